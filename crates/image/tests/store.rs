//! The store under failure, and under several users at once.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use dsec_image::{ImageStore, ImportError, ImportLimits, ImportPhase};
use support::archive::Archive;
use support::{Mount, Store, chain, leftovers, name};

fn archive(seed: u8, files: usize) -> Vec<u8> {
    let content: Vec<u8> = (0..30_000u32).map(|n| (n * 7) as u8 ^ seed).collect();
    (0..files)
        .fold(Archive::new(), |archive, n| archive.file(&format!("d{}/{n}", n % 7), &content[n % 99..]))
        .finish()
}

#[test]
fn an_archive_cut_at_any_fiftieth_leaves_an_empty_store() {
    let whole = archive(0, 30);
    let store = Store::new();
    for part in 0..50 {
        let cut = store.file(&whole[..(whole.len() - 1024) * part / 50]);
        let error = store.import(&cut).expect_err("it is cut");
        assert_eq!(store.leftovers(), [""; 0], "{error}");
    }
    store.import(&store.file(&whole)).unwrap();
    assert_eq!(store.leftovers().len(), 2);
}

#[test]
fn the_same_source_gives_the_same_bytes() {
    let (one, two) = (Store::new(), Store::new());
    let first = one.import(&one.file(&archive(0, 40))).unwrap();
    let second = two.import(&two.file(&archive(0, 40))).unwrap();
    assert_eq!(first.digest, second.digest);
    let image = |store: &Store, digest: &str| fs::read(store.store.blob_path(digest)).unwrap();
    let (a, b) = (image(&one, &first.digest), image(&two, &second.digest));
    assert!(a == b);
    // Content alone changes the UUID (at 1024 + 48), and so does metadata alone.
    let uuid = |image: &[u8]| image[1072..1088].to_vec();
    let content = two.import(&two.file(&archive(1, 40))).unwrap();
    assert_ne!(uuid(&a), uuid(&image(&two, &content.digest)));
    let metadata = two.import(&two.file(&archive(0, 39))).unwrap();
    assert_ne!(uuid(&a), uuid(&image(&two, &metadata.digest)));
}

#[test]
fn names_share_a_blob_and_the_last_one_takes_it_along() {
    let store = Store::new();
    let source = store.file(&archive(0, 3));
    let import =
        |text: &str| store.store.import(&name(text), &source, &ImportLimits::default(), &mut |_| {}).unwrap();
    let (a, b) = (import("team/a:1"), import("team/a"));
    assert_eq!(a.digest, b.digest);
    let blob = store.store.blob_path(&a.digest);
    assert_eq!(store.store.list().unwrap(), [b.clone(), a.clone()]);
    assert_eq!(store.store.get(&name("team/a:1")).unwrap(), Some(a));
    assert_eq!(store.store.get(&name("team/a:2")).unwrap(), None);
    let removed = store.store.remove(&name("team/a:1")).unwrap();
    assert!(removed.record.is_some() && !removed.blob_deleted && blob.exists());
    let again = store.store.remove(&name("team/a:1")).unwrap();
    assert!(again.record.is_none() && !again.blob_deleted);
    assert!(store.store.remove(&name("team/a")).unwrap().blob_deleted);
    assert_eq!(store.leftovers(), [""; 0]);
}

#[test]
fn importing_over_a_name_replaces_its_image_and_frees_the_old() {
    let store = Store::new();
    let old = store.import(&store.file(&archive(0, 3))).unwrap();
    let new = store.import(&store.file(&archive(1, 3))).unwrap();
    assert_ne!(old.digest, new.digest);
    assert_eq!(store.store.list().unwrap(), [new]);
    assert!(!store.store.blob_path(&old.digest).exists());
    // The same again keeps its blob.
    let same = store.import(&store.file(&archive(1, 3))).unwrap();
    assert!(store.store.blob_path(&same.digest).exists());
    assert_eq!(store.leftovers().len(), 2);
    // A failed one changes nothing.
    store.import(&store.file(b"garbage")).unwrap_err();
    assert_eq!(store.store.list().unwrap(), [same]);
}

#[test]
fn imports_and_removals_at_once_leave_whole_records_with_blobs() {
    let store = Store::new();
    let sources: Vec<_> = (0..4u8)
        .map(|seed| {
            let path = store.dir.path().join(format!("source-{seed}"));
            fs::write(&path, archive(seed, 5)).unwrap();
            path
        })
        .collect();
    std::thread::scope(|scope| {
        for source in &sources {
            // Each with its own view of the store, as processes have.
            let dir = store.dir.path().join("store");
            scope.spawn(move || {
                let store = ImageStore::open(dir).unwrap();
                for round in 0..6 {
                    store.import(&name("one"), source, &ImportLimits::default(), &mut |_| {}).unwrap();
                    if round % 2 == 0 {
                        store.remove(&name("one")).unwrap();
                    }
                    for record in store.list().unwrap() {
                        assert_eq!(record.name, name("one"));
                    }
                }
            });
        }
    });
    let records = store.store.list().unwrap();
    let blobs = fs::read_dir(store.dir.path().join("store/blobs")).unwrap().count();
    assert_eq!(records.len(), blobs);
    for record in records {
        assert_eq!(fs::metadata(store.store.blob_path(&record.digest)).unwrap().len(), record.size_bytes);
    }
    assert_eq!(fs::read_dir(store.dir.path().join("store/tmp")).unwrap().count(), 0);
}

#[test]
fn opening_clears_dead_imports_and_keeps_running_ones() {
    let store = Store::new();
    let dir = store.dir.path().join("store");
    let kept = store.import(&store.file(&archive(0, 2))).unwrap();
    // A killed import: its directory with an unlocked lock, and one killed before it had any; and
    // a blob published without its record.
    fs::create_dir(dir.join("tmp/import-dead")).unwrap();
    fs::write(dir.join("tmp/import-dead/lock"), b"").unwrap();
    fs::write(dir.join("tmp/import-dead/image.erofs"), b"half").unwrap();
    fs::create_dir(dir.join("tmp/import-unborn")).unwrap();
    fs::write(dir.join("tmp/stray"), b"").unwrap();
    fs::write(dir.join("blobs/orphan.erofs"), b"whole").unwrap();
    let source = store.file(&archive(1, 2));
    let mut opened_while_running = 0;
    let running = store.store.import(&name("running"), &source, &ImportLimits::default(), &mut |progress| {
        if progress.phase == ImportPhase::Writing {
            opened_while_running += 1;
            ImageStore::open(&dir).unwrap();
            let left: Vec<_> =
                fs::read_dir(dir.join("tmp")).unwrap().map(|entry| entry.unwrap().path()).collect();
            assert_eq!(left.len(), 1, "{left:?}");
        }
    });
    assert_eq!(opened_while_running, 1);
    let running = running.unwrap_or_else(|e| panic!("{}", chain(&e)));
    assert_eq!(store.store.list().unwrap(), [running, kept]);
    assert_eq!(store.leftovers().len(), 4);
}

/// A process that is killed when this goes, also when a test panics.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn whoever_changes_names_blobs_or_tmp_waits_for_the_lock() {
    let store = Store::new();
    let dir = store.dir.path().join("store");
    let source = store.file(&archive(0, 2));
    store.import(&source).unwrap();
    let before = store.leftovers();
    let import =
        || drop(store.store.import(&name("b"), &source, &ImportLimits::default(), &mut |_| {}).unwrap());
    let remove = || drop(store.store.remove(&name("test:1")).unwrap());
    let open = || drop(ImageStore::open(&dir).unwrap());
    let operations: [(&str, &(dyn Fn() + Sync)); 3] =
        [("import", &import), ("open", &open), ("remove", &remove)];
    for (what, operation) in operations {
        let lock = fs::File::open(dir.join("lock")).unwrap();
        lock.lock().unwrap();
        let inode = format!(":{} ", lock.metadata().unwrap().ino());
        std::thread::scope(|scope| {
            let running = scope.spawn(operation);
            // The kernel lists those who wait with an arrow.
            let waits = || {
                let locks = fs::read_to_string("/proc/locks").unwrap();
                locks.lines().any(|line| line.contains("-> FLOCK") && line.contains(&inode))
            };
            while !waits() {
                assert!(!running.is_finished(), "{what} did not wait");
                std::thread::yield_now();
            }
            if what != "remove" {
                assert!(before.iter().all(|path| store.leftovers().contains(path)), "{what}");
            } else {
                assert!(store.store.get(&name("test:1")).unwrap().is_some(), "{what}");
            }
            drop(lock);
        });
    }
    assert_eq!(store.store.list().unwrap().len(), 1);
}

#[test]
fn a_killed_import_leaves_nothing_after_the_next_open() {
    // This program again, as the importing process; it stops in the middle and is killed there.
    if let Ok(dir) = std::env::var("DSEC_TEST_IMPORT_AND_HANG") {
        let dir = PathBuf::from(dir);
        let store = ImageStore::open(dir.join("store")).unwrap();
        let _ = store.import(&name("a"), &dir.join("source"), &ImportLimits::default(), &mut |progress| {
            if progress.phase == ImportPhase::Sealing {
                fs::write(dir.join("hanging"), b"").unwrap();
                loop {
                    std::thread::park();
                }
            }
        });
        return;
    }
    let store = Store::new();
    store.file(&archive(0, 5));
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_import_leaves_nothing_after_the_next_open"])
        .env("DSEC_TEST_IMPORT_AND_HANG", store.dir.path())
        .spawn()
        .unwrap();
    let child = Killed(child);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !store.dir.path().join("hanging").exists() {
        assert!(std::time::Instant::now() < deadline, "the import did not get to its end in 20 s");
        std::thread::yield_now();
    }
    let dir = store.dir.path().join("store");
    ImageStore::open(&dir).unwrap();
    assert_eq!(store.leftovers().len(), 1, "a living import is left alone");
    drop(child);
    assert_eq!(store.leftovers().len(), 1);
    ImageStore::open(&dir).unwrap();
    assert_eq!(store.leftovers(), [""; 0]);
}

#[test]
fn a_full_disk_is_said_clearly_and_leaves_nothing() {
    let disk = Mount::tmpfs("1m");
    let dir = disk.path().join("store");
    let store = ImageStore::open(&dir).unwrap();
    let sources = Store::new();
    // Full while content is written, and while an archive is decompressed.
    let blobs = Archive::new().file(&format!("blobs/sha256/{}", "0".repeat(64)), &archive(0, 90)).finish();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    std::io::Write::write_all(&mut packed, &blobs).unwrap();
    // And only with the metadata: many names, no content.
    let names =
        (0..9000).fold(Archive::new(), |a, n| a.file(&format!("{n}-{}", "n".repeat(80)), b"")).finish();
    for bytes in [archive(0, 90), packed.finish().unwrap(), names] {
        let source = sources.file(&bytes);
        let error = store.import(&name("a"), &source, &ImportLimits::default(), &mut |_| {}).unwrap_err();
        assert!(chain(&error).contains("is full; free some room"), "{}", chain(&error));
        assert_eq!(error.kind().code(), "resource_exhausted");
        assert_eq!(leftovers(&dir), [""; 0]);
    }
    store.import(&name("a"), &sources.file(&archive(0, 3)), &ImportLimits::default(), &mut |_| {}).unwrap();
}

#[test]
fn a_damaged_record_is_reported_and_mended_by_importing_again() {
    let store = Store::new();
    let record = store.import(&store.file(&archive(0, 2))).unwrap();
    let path = store.dir.path().join("store/images/test@1.json");
    fs::write(&path, b"{").unwrap();
    assert!(chain(&store.store.list().unwrap_err()).contains("test@1.json is damaged"));
    // Whose the blob is cannot be told now, so opening keeps it.
    ImageStore::open(store.dir.path().join("store")).unwrap();
    assert!(store.store.blob_path(&record.digest).exists());
    let again = store.import(&store.file(&archive(0, 2))).unwrap();
    assert_eq!(store.store.list().unwrap(), [again]);
}

#[test]
fn progress_reaches_the_end_of_the_source() {
    let store = Store::new();
    let bytes = archive(0, 500);
    let mut told = Vec::new();
    store
        .store
        .import(&name("a"), &store.file(&bytes), &ImportLimits::default(), &mut |progress| {
            told.push(progress)
        })
        .unwrap();
    assert!(told.len() > 4, "{told:?}");
    assert!(told.is_sorted_by_key(|progress| progress.source_bytes));
    // 500 files, and 7 directories made for them.
    let last = told.last().unwrap();
    assert_eq!((last.phase, last.source_bytes, last.files), (ImportPhase::Sealing, bytes.len() as u64, 507));
    assert_eq!(last.source_bytes_total, bytes.len() as u64);
}

#[test]
fn errors_tell_the_archive_the_entry_and_the_remedy() {
    let store = Store::new();
    let error = store.import(&store.file(&Archive::new().file("../x", b"").finish())).unwrap_err();
    assert!(matches!(error, ImportError::Entry { .. }));
    let text = chain(&error);
    assert!(text.starts_with("entry `../x` of "), "{text}");
    assert!(text.contains("/source cannot be imported: its path contains `..`"), "{text}");
    assert_eq!(error.kind().code(), "invalid_argument");
}
