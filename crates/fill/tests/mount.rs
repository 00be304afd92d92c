//! Holder, worker and device on this kernel. Needs root and Linux 6.9. Every test ends with the certainty that no mount,
//! process or socket of it is left.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dsec_fill::client::ClientError;
use dsec_fill::engine::Limits;
use dsec_fill::protocol::BlobStats;
use dsec_fill::trace::Trace;
use rustix::process::{Signal, kill_process};
use support::platform::{LIMIT, Platform, Reader, block_on};
use support::{GROUP, Made, Random};

fn look(platform: &Platform, made: &Made) -> BlobStats {
    block_on(platform.client.look(&[made.id()])).unwrap()[0].clone()
}

#[test]
fn a_blob_is_a_file_until_it_is_complete_and_then_its_own() {
    let made = Made::new(1, 20 * GROUP + 4096);
    let mut platform = Platform::start(&[&made], |_| {});
    let opened = block_on(platform.client.open(made.id())).unwrap();
    assert!(!opened.direct && opened.size_bytes == made.index.size());
    let found = std::fs::metadata(&opened.path).unwrap();
    assert_eq!((found.len(), found.mode() & 0o7777), (made.index.size(), 0o444));
    let names: Vec<_> =
        std::fs::read_dir(platform.mount()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [made.id().to_string().as_str()]);
    assert!(std::fs::metadata(platform.mount().join("something")).is_err());
    assert!(std::fs::File::create(platform.mount().join("something")).is_err());

    let start = 7 * GROUP - 100;
    assert_eq!(Reader::open(&opened.path, true).read(start, 200).unwrap(), made.part(start..start + 200));
    let here = look(&platform, &made);
    assert_eq!((here.counts.asked_bytes, here.groups_here), (200, 2));
    let trace = block_on(platform.client.trace(made.id(), false)).unwrap();
    assert_eq!(trace.order(), [6, 7]);

    assert!(std::fs::read(&opened.path).unwrap() == made.plain);
    let direct = block_on(platform.client.open(made.id())).unwrap();
    assert!(direct.direct && direct.path.starts_with(platform.dir.path().join("cache")));
    assert!(std::fs::read(&direct.path).unwrap() == made.plain);
    assert_eq!(block_on(platform.client.evict(made.id())).unwrap(), 0, "it is mounted directly");
    block_on(platform.client.close(made.id())).unwrap();
    block_on(platform.client.pin(made.id(), true)).unwrap();
    assert_eq!(block_on(platform.client.evict(made.id())).unwrap(), 0, "it is pinned");
    block_on(platform.client.pin(made.id(), false)).unwrap();
    assert_eq!(block_on(platform.client.evict(made.id())).unwrap(), made.index.size());
    block_on(platform.client.close(made.id())).unwrap();

    block_on(platform.client.shut_down()).unwrap();
    platform.end(None);
    assert_eq!(platform.mounts(), Vec::<String>::new());
}

#[test]
fn sixty_four_readers_through_the_device_fetch_what_one_does() {
    let made = Made::new(2, 30 * GROUP);
    let platform = Platform::start(&[&made], |config| config.devices = 2);
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    std::thread::scope(|scope| {
        for reader in 0..64u64 {
            let (path, made) = (&path, &made);
            scope.spawn(move || {
                let file = Reader::open(path, reader % 2 == 0);
                for nth in 0..30 {
                    let start = (nth + reader) % 30 * GROUP;
                    assert!(file.read(start, GROUP as usize).unwrap() == made.part(start..start + GROUP));
                }
            });
        }
    });
    let stats = block_on(platform.client.stats()).unwrap();
    assert_eq!(stats.counts.fetched_bytes, made.stored_bytes(0..30));
}

/// The heart of it: workers are killed as fast as they come, and no reader sees anything but the content.
///
/// `DSEC_FILL_KILLS` sets how many; the default fits a test run, 10,000 are worth a night.
#[test]
fn readers_do_not_notice_that_workers_are_killed() {
    let kills_wanted: u64 = std::env::var("DSEC_FILL_KILLS").map_or(1_500, |text| text.parse().unwrap());
    let made = Made::new(3, 150 * GROUP + 4096);
    let platform = Platform::start(&[&made], |_| {});
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    let (stop, reads, evictions) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..6u64 {
            let (path, made, stop, reads) = (&path, &made, &stop, &reads);
            scope.spawn(move || {
                let mut random = Random(reader + 100);
                while !stop.load(Ordering::Relaxed) {
                    let file = Reader::open(path, reader % 2 == 0);
                    for _ in 0..20 {
                        let length = 1 + random.below(400_000);
                        let start = random.below(made.index.size() - length);
                        match file.read(start, length as usize) {
                            Ok(bytes) if bytes == made.part(start..start + length) => {}
                            other => {
                                stop.store(true, Ordering::Relaxed);
                                panic!("{length} bytes from {start} on: {:?}", other.map(|_| "other bytes"));
                            }
                        }
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        // Nothing is left in the cache for long, so that workers die in every part of their work.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // On a busy machine no worker may live long enough to answer this one.
                match block_on(platform.client.evict(made.id())) {
                    Ok(_) => drop(evictions.fetch_add(1, Ordering::Relaxed)),
                    Err(ClientError::Silent { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        platform.kill_workers(kills_wanted, &stop);
        stop.store(true, Ordering::Relaxed);
    });
    assert!(reads.load(Ordering::Relaxed) > 0 && evictions.load(Ordering::Relaxed) > 0);
    println!("{} reads over {kills_wanted} kills", reads.load(Ordering::Relaxed));
}

#[test]
fn a_worker_is_replaced_under_a_waiting_reader() {
    let made = Made::new(4, 8 * GROUP);
    let platform = Platform::start(&[&made], |_| {});
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    let before = block_on(platform.client.stats()).unwrap().worker_pid;
    // A stopped worker answers nothing: the read is in its hands when it goes.
    kill_process(platform.worker_pid().unwrap(), Signal::STOP).unwrap();
    let reading = std::thread::spawn(move || Reader::open(&path, true).read(3 * GROUP, 1000));
    kill_process(platform.holder_pid(), Signal::HUP).unwrap();
    assert_eq!(reading.join().unwrap().unwrap(), made.part(3 * GROUP..3 * GROUP + 1000));
    let second = block_on(platform.client.stats()).unwrap().worker_pid;
    assert_ne!(before, second);
    block_on(platform.client.replace()).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while block_on(platform.client.stats()).unwrap().worker_pid == second {
        assert!(Instant::now() < until, "no other worker came");
    }
}

/// As in an upgrade that removes the program before it puts the new one there.
#[test]
fn a_holder_that_cannot_start_a_worker_goes_on_trying() {
    let made = Made::new(14, 8 * GROUP);
    let mut platform = Platform::start(&[&made], |_| {});
    platform.end(Some(Signal::TERM));
    let (program, away, errors) =
        ["dsec-fill", "away", "errors"].map(|name| platform.dir.path().join(name)).into();
    std::fs::copy(&platform.program, &program).unwrap();
    (platform.program, platform.errors) = (program.clone(), Some(errors.clone()));
    platform.hold();
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    std::fs::rename(&program, &away).unwrap();
    kill_process(platform.worker_pid().unwrap(), Signal::KILL).unwrap();
    let reading = std::thread::spawn(move || Reader::open(&path, true).read(3 * GROUP, 1000));
    let until = Instant::now() + LIMIT;
    while !std::fs::read_to_string(&errors).unwrap().contains("cannot be started") {
        assert!(Instant::now() < until, "it found a program to start");
    }
    std::fs::rename(&away, &program).unwrap();
    assert_eq!(reading.join().unwrap().unwrap(), made.part(3 * GROUP..3 * GROUP + 1000));
}

/// A file that nobody writes to stands for one whose server is gone: whoever opens it waits.
#[test]
fn a_store_that_hangs_keeps_nobody_from_what_is_here() {
    let (here, away) = (Made::new(15, 2 * GROUP), Made::new(16, 70 * GROUP));
    let platform = Platform::start(&[&here, &away], |config| {
        config.limits = Limits { run_groups: 1, attempt_ms: 100, outage_ms: 20_000, ..Limits::default() };
    });
    block_on(platform.client.fetch(here.id(), None, LIMIT)).unwrap();
    let path = block_on(platform.client.open(away.id())).unwrap().path;
    let packs: Vec<_> = away.packs.iter().map(|(id, bytes)| (platform.pack(id), bytes)).collect();
    for (pack, _) in &packs {
        std::fs::remove_file(pack).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, pack, 0o600.into()).unwrap();
    }
    std::thread::scope(|scope| {
        for group in 0..70 {
            let (path, away) = (&path, &away);
            scope.spawn(move || {
                let read = Reader::open(path, true).read(group * GROUP, 100);
                assert!(read.unwrap() == away.part(group * GROUP..group * GROUP + 100));
            });
        }
        // Each try takes a thread and does not give it back.
        let tasks = format!("/proc/{}/task", platform.worker_pid().unwrap().as_raw_nonzero());
        let until = Instant::now() + LIMIT;
        while std::fs::read_dir(&tasks).unwrap().count() < 64 {
            assert!(Instant::now() < until, "{:?}", std::fs::read_dir(&tasks).unwrap().count());
        }
        let opened = block_on(platform.client.open(here.id())).unwrap();
        assert!(opened.direct && std::fs::read(&opened.path).unwrap() == here.plain);
        for (pack, bytes) in &packs {
            let waiting = std::fs::File::options().write(true).open(pack).unwrap();
            std::fs::remove_file(pack).unwrap();
            std::fs::write(pack, bytes).unwrap();
            drop(waiting);
        }
    });
}

#[test]
fn a_store_without_the_bytes_is_an_error_and_never_zeros() {
    let made = Made::new(5, 8 * GROUP);
    let platform = Platform::start(&[&made], |_| {});
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    let (packs, away) = (platform.dir.path().join("store/packs"), platform.dir.path().join("away"));
    std::fs::rename(&packs, &away).unwrap();
    for direct in [true, false] {
        let error = Reader::open(&path, direct).read(GROUP, 10).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    }
    std::fs::rename(&away, &packs).unwrap();
    assert!(std::fs::read(&path).unwrap() == made.plain);
    let unknown = Made::new(77, GROUP).id();
    match block_on(platform.client.open(unknown)) {
        Err(ClientError::Refused { message, again: false }) => {
            assert!(message.contains(&unknown.to_string()))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_full_disk_makes_reads_go_on_uncached() {
    let made = Made::new(6, 64 * GROUP);
    let disk = tempfile::tempdir().unwrap();
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "fill-test"]).arg(disk.path()).status();
    assert!(mounted.unwrap().success());
    let platform = Platform::start(&[&made], |config| config.cache_dir = disk.path().join("cache"));
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    block_on(platform.client.pin(made.id(), true)).unwrap();
    for _ in 0..2 {
        assert!(Reader::open(&path, true).read(0, made.plain.len()).unwrap() == made.plain);
    }
    let here = look(&platform, &made);
    assert!(here.counts.uncached_groups > 30 && here.groups_here < 32, "{here:?}");
    block_on(platform.client.pin(made.id(), false)).unwrap();
    assert!(Reader::open(&path, true).read(0, made.plain.len()).unwrap() == made.plain);
    drop(platform);
    assert!(Command::new("umount").arg(disk.path()).status().unwrap().success());
}

#[test]
fn what_a_killed_holder_left_is_cleared_by_the_next() {
    let made = Made::new(7, 4 * GROUP);
    let mut platform = Platform::start(&[&made], |_| {});
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    let reader = Reader::open(&path, true);
    platform.end(Some(Signal::KILL));
    assert!(reader.read(0, 10).is_err(), "without a holder nobody will ever answer");
    drop(reader);
    assert_eq!(platform.mounts().len(), 1);
    let until = Instant::now() + Duration::from_secs(20);
    while !platform.processes().is_empty() {
        assert!(Instant::now() < until, "the worker outlives its holder: {:?}", platform.processes());
    }
    platform.hold();
    assert_eq!(platform.mounts().len(), 1);
    assert!(std::fs::read(&path).unwrap() == made.plain);
}

#[test]
fn content_made_on_this_node_needs_no_store() {
    let made = Made::new(8, 12 * GROUP);
    let platform = Platform::start(&[&made], |_| {});
    let file = platform.dir.path().join("content");
    std::fs::write(&file, &made.plain).unwrap();
    std::fs::remove_dir_all(platform.dir.path().join("store/packs")).unwrap();
    for _ in 0..2 {
        assert!(block_on(platform.client.insert(made.id(), &file)).unwrap());
    }
    assert!(block_on(platform.client.open(made.id())).unwrap().direct);
    std::fs::write(&file, &made.plain[1..]).unwrap();
    block_on(platform.client.close(made.id())).unwrap();
    block_on(platform.client.evict(made.id())).unwrap();
    assert!(block_on(platform.client.insert(made.id(), &file)).is_err());
    // Handed over, it is not read: on another file system it is, and it is gone in both cases.
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    for dir in [elsewhere.path(), platform.dir.path()] {
        let file = dir.join("content");
        std::fs::write(&file, &made.plain).unwrap();
        assert!(block_on(platform.client.hand_over(made.id(), &file)).unwrap() && !file.exists());
        let opened = block_on(platform.client.open(made.id())).unwrap();
        assert!(opened.direct && std::fs::read(&opened.path).unwrap() == made.plain);
        block_on(platform.client.close(made.id())).unwrap();
        assert_eq!(block_on(platform.client.evict(made.id())).unwrap(), made.index.size());
    }
}

#[test]
fn the_next_run_finds_its_content_along_the_trace_of_the_first() {
    let made = Made::new(9, 40 * GROUP);
    let platform = Platform::start(&[&made], |_| {});
    let path = block_on(platform.client.open(made.id())).unwrap().path;
    for group in [9u64, 3, 30] {
        Reader::open(&path, true).read(group * GROUP, 10).unwrap();
    }
    let trace = block_on(platform.client.trace(made.id(), true)).unwrap();
    assert_eq!(trace.order(), [9, 3, 30]);
    block_on(platform.client.evict(made.id())).unwrap();
    block_on(platform.client.prefetch(made.id(), Some(&trace))).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let here = look(&platform, &made);
        if here.groups_here == 3 {
            break;
        }
        assert!(Instant::now() < until, "{here:?}");
    }
    assert!(block_on(platform.client.trace(made.id(), false)).unwrap().order().is_empty());
}

#[test]
fn content_is_fetched_until_it_is_there_or_it_is_said_why_not() {
    let made = Made::new(10, 40 * GROUP + 4096);
    let platform = Platform::start(&[&made], |_| {});
    let fetch =
        |trace: Option<&Trace>, limit| block_on(platform.client.fetch(made.id(), trace, limit)).unwrap();
    let some = fetch(Some(&Trace::of_run(&[7, 40, 2, 99])), LIMIT);
    assert_eq!((some.wanted_bytes, some.left_bytes), (2 * GROUP + 4096, 0));
    assert!(some.is_over && some.problem.is_none());
    let here = block_on(platform.client.look(&[Made::new(11, 1).id(), made.id()])).unwrap();
    assert_eq!(here.iter().map(|blob| blob.here_bytes).collect::<Vec<_>>(), [2 * GROUP + 4096]);
    // Cut short it says what is left, and goes on when it is asked again.
    let mut all = fetch(None, Duration::ZERO);
    while !all.is_over {
        assert!(all.problem.is_none());
        all = fetch(None, Duration::from_millis(50));
    }
    assert_eq!((all.wanted_bytes, all.left_bytes), (made.index.size(), 0));
    assert!(block_on(platform.client.open(made.id())).unwrap().direct);
    drop(platform);
    let platform = Platform::start(&[&made], |config| config.cache_bytes = 8 * GROUP);
    let ended = block_on(platform.client.fetch(made.id(), None, LIMIT)).unwrap();
    assert!(ended.is_over && ended.left_bytes >= 32 * GROUP, "{ended:?}");
    assert!(ended.problem.unwrap().contains("no room"));
}

/// A worker lives for months and blobs come and go.
#[test]
fn what_is_gone_is_let_go_of_and_what_was_done_for_it_still_counts() {
    let (read, unread) = (Made::new(12, 2 * GROUP), Made::new(13, 2 * GROUP));
    let platform = Platform::start(&[&read, &unread], |_| {});
    let open_files = || {
        let descriptors = format!("/proc/{}/fd", platform.worker_pid().unwrap().as_raw_nonzero());
        let files =
            std::fs::read_dir(descriptors).unwrap().filter_map(|entry| entry.ok()?.path().read_link().ok());
        files.filter(|file| file.display().to_string().contains(&read.id().to_string())).count()
    };
    let wait_until_gone = || {
        let until = Instant::now() + LIMIT;
        loop {
            let stats = block_on(platform.client.stats()).unwrap();
            if (stats.known_blobs, open_files()) == (0, 0) {
                return stats;
            }
            assert!(Instant::now() < until, "{stats:?}, {} files", open_files());
        }
    };
    let opened = block_on(platform.client.open(read.id())).unwrap();
    block_on(platform.client.open(unread.id())).unwrap();
    assert_eq!(block_on(platform.client.stats()).unwrap().known_blobs, 2);
    assert!(std::fs::read(&opened.path).unwrap() == read.plain && open_files() > 0);
    // Emptied while it is open, or never read: it goes when it is closed.
    block_on(platform.client.evict(read.id())).unwrap();
    for made in [&read, &unread] {
        block_on(platform.client.close(made.id())).unwrap();
    }
    assert_eq!(wait_until_gone().counts.asked_bytes, read.index.size());
    assert!(block_on(platform.client.look(&[read.id(), unread.id()])).unwrap().is_empty());
    let opened = block_on(platform.client.open(read.id())).unwrap();
    assert!(std::fs::read(&opened.path).unwrap() == read.plain);
    // Closed and then emptied, it goes at once.
    block_on(platform.client.close(read.id())).unwrap();
    block_on(platform.client.evict(read.id())).unwrap();
    assert_eq!(wait_until_gone().counts.asked_bytes, 2 * read.index.size());
}

#[test]
fn the_worker_holds_no_capability_and_the_socket_is_its_owners() {
    let platform = Platform::start(&[], |_| {});
    let capabilities = |pid: rustix::process::Pid| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
        ["CapPrm:", "CapEff:"].map(|name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        })
    };
    assert_eq!(capabilities(platform.worker_pid().unwrap()), [0, 0]);
    assert_eq!(capabilities(platform.holder_pid()), [1 << 21, 1 << 21], "CAP_SYS_ADMIN alone, to unmount");
    let mode = std::fs::metadata(platform.dir.path().join("socket")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
}
