//! What `/proc` tells of processes, the machine and its memory.

use std::fs;
use std::io::{self, BufRead, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use crate::advise::Range;

fn parse<T: std::str::FromStr>(text: Option<&str>, what: &'static str) -> io::Result<T> {
    text.and_then(|t| t.trim().parse().ok()).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, what))
}

/// Start time of a process in clock ticks since boot (field 22 of its `stat`): with the pid and the
/// boot id it names a process for ever.
///
/// # Errors
/// `NotFound`: there is no such process.
pub fn start_ticks(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command name, in parentheses, may hold anything, a ')' too; the fields follow the last one.
    let (_, fields) = stat.rsplit_once(')').ok_or_else(|| io::Error::other("/proc/PID/stat has no ')'"))?;
    parse(fields.split_ascii_whitespace().nth(19), "/proc/PID/stat field 22")
}

/// Id of this boot.
///
/// # Errors
/// The kernel's.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Sockets below which nobody need add up what they hold.
const SOCKETS_FEW: u64 = 8;

/// Bytes that wait in netlink and UDP sockets of the network namespace that `pid` is in. 0 when it is gone.
pub fn socket_bytes(pid: i32) -> u64 {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    // `sockets: used N` counts those of this namespace alone, unlike the memory in the lines below it.
    let few = read("sockstat")
        .strip_prefix("sockets: used ")
        .and_then(|rest| rest.lines().next()?.parse().ok())
        .is_some_and(|used: u64| used < SOCKETS_FEW);
    if few {
        return 0;
    }
    let datagrams = ["udp", "udp6", "udplite", "udplite6"].map(|name| udp_bytes(&read(name)));
    netlink_bytes(&read("netlink")) + datagrams.iter().sum::<u64>()
}

/// Columns `Rmem` and `Wmem`.
fn netlink_bytes(table: &str) -> u64 {
    let line = |line: &str| -> Option<u64> {
        let mut columns = line.split_ascii_whitespace().skip(4);
        let mut next = || columns.next()?.parse::<u64>().ok();
        Some(next()? + next()?)
    };
    table.lines().skip(1).filter_map(line).sum()
}

/// Column `tx_queue:rx_queue`, hexadecimal.
fn udp_bytes(table: &str) -> u64 {
    let line = |line: &str| -> Option<u64> {
        let (tx, rx) = line.split_ascii_whitespace().nth(4)?.split_once(':')?;
        let bytes = |text| u64::from_str_radix(text, 16).ok();
        Some(bytes(tx)? + bytes(rx)?)
    };
    table.lines().skip(1).filter_map(line).sum()
}

/// A file that a process can write to right now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenFile {
    /// Command name of the process, at most 15 bytes.
    pub command: String,
    /// The file, as the process sees it.
    pub path: PathBuf,
}

/// Id of the mount that a process has as its root.
///
/// # Errors
/// The process is gone.
pub fn root_mount(pid: i32) -> io::Result<u64> {
    mount_of(&format!("/proc/{pid}/root/"))
}

fn mount_of(path: &str) -> io::Result<u64> {
    Ok(statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?.stx_mnt_id)
}

/// Regular files on a mount that a process has open for writing, or mapped so that what it writes to memory goes there.
/// Files without a name left do not count. Each descriptor and mapping that is looked at takes one off `budget`.
///
/// # Errors
/// There are more than that. A process that is gone has none.
pub fn written_files(pid: i32, mount: u64, budget: &mut u64) -> io::Result<Vec<WrittenFile>> {
    let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
    let mut found = Vec::new();
    let mut note = |link: &str| {
        if let Ok(path) = fs::read_link(link) {
            found.push(WrittenFile { command: command.clone(), path });
        }
    };
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten() {
        spend(budget)?;
        let info = fs::read_to_string(entry.path()).unwrap_or_default();
        let link = format!("/proc/{pid}/fd/{}", entry.file_name().to_string_lossy());
        if is_open_for_writing(&info, mount) && is_named_file(&link) {
            note(&link);
        }
    }
    for mapping in shared_for_writing(pid, budget)? {
        if mount_of(&mapping.link).is_ok_and(|of| of == mount) && is_named_file(&mapping.link) {
            note(&mapping.link);
        }
    }
    Ok(found)
}

/// Whether a process, which stands still, can change a file that has a name without a call that would date it: by memory that is
/// the file's, or by a write that the kernel does on its own. Each mapping that is looked at takes one off `budget`.
///
/// # Errors
/// There are more than that, or they cannot be read. A process that is gone has none.
pub fn maps_for_writing(pid: i32, budget: &mut u64) -> io::Result<bool> {
    Ok(shared_for_writing(pid, budget)?.iter().any(|mapping| mapping.is_aio || is_named_file(&mapping.link)))
}

/// Whether a link of `/proc` leads to a regular file that has a name left.
fn is_named_file(link: &str) -> bool {
    fs::metadata(link).is_ok_and(|meta| meta.is_file() && meta.nlink() > 0)
}

/// A mapping through which a file can be written.
struct SharedMapping {
    link: String,
    /// Where the kernel notes the ends of writes that go on by themselves.
    is_aio: bool,
}

/// Shared mappings of what was opened for writing, also those that may not be written just now: mprotect(2) undoes that.
fn shared_for_writing(pid: i32, budget: &mut u64) -> io::Result<Vec<SharedMapping>> {
    let is_gone = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH));
    let mut found = Vec::new();
    let mut maps = match fs::File::open(format!("/proc/{pid}/maps")) {
        Ok(file) => io::BufReader::new(file),
        Err(e) if is_gone(&e) => return Ok(found),
        Err(e) => return Err(e),
    };
    let mut line = Vec::new();
    loop {
        line.clear();
        match maps.read_until(b'\n', &mut line) {
            Ok(0) => return Ok(found),
            Ok(_) => spend(budget)?,
            Err(e) if is_gone(&e) => return Ok(found),
            Err(e) => return Err(e),
        }
        // Names are whatever a sandbox likes.
        let line = String::from_utf8_lossy(&line);
        let Some(range) = shared(&line) else { continue };
        let link = format!("/proc/{pid}/map_files/{range}");
        let is_writable = |meta: fs::Metadata| meta.mode() & libc::S_IWUSR != 0;
        if fs::symlink_metadata(&link).map_or(true, is_writable) {
            found.push(SharedMapping { link, is_aio: line.contains(" /[aio]") });
        }
    }
}

fn spend(budget: &mut u64) -> io::Result<()> {
    *budget = budget
        .checked_sub(1)
        .ok_or_else(|| io::Error::other("there are too many open files and mappings to look at"))?;
    Ok(())
}

/// Whether `/proc/PID/fdinfo/N` is of a file on the mount that can be written to.
fn is_open_for_writing(info: &str, mount: u64) -> bool {
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let flags = field("flags:").and_then(|text| i32::from_str_radix(text, 8).ok()).unwrap_or(0);
    let is_path = flags & libc::O_PATH != 0;
    !is_path
        && flags & libc::O_ACCMODE != libc::O_RDONLY
        && field("mnt_id:").and_then(|text| text.parse().ok()) == Some(mount)
}

/// The addresses of a line of `/proc/PID/maps` if it is of a file whose memory all who map it share.
fn shared(line: &str) -> Option<&str> {
    let mut fields = line.split_ascii_whitespace();
    let (range, access) = (fields.next()?, fields.next()?);
    let inode = fields.nth(2)?;
    (access.ends_with('s') && inode != "0").then_some(range)
}

/// A part of a process's address space that has memory of its own, in memory or in swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnMemory {
    /// Where.
    pub range: Range,
    /// In memory now, KiB.
    pub rss_kib: u64,
    /// Of that, read or written lately.
    pub referenced_kib: u64,
    /// In swap now, KiB.
    pub swap_kib: u64,
}

/// Bytes of `smaps` that are read: some 20,000 mappings. Who has more keeps the memory of the rest to itself.
const SMAPS_BYTES_MAX: u64 = 16 << 20;

/// Memory that is a process's own: what it wrote, and what it shares as memory. What it only reads of files, such as programs, is not.
///
/// # Errors
/// They cannot be read. A process that is gone has none.
pub fn own_memory(pid: i32) -> io::Result<Vec<OwnMemory>> {
    let mut text = Vec::new();
    let read = fs::File::open(format!("/proc/{pid}/smaps"))
        .and_then(|file| file.take(SMAPS_BYTES_MAX).read_to_end(&mut text));
    match read {
        Ok(_) => Ok(own_memory_in(&String::from_utf8_lossy(&text))),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

fn own_memory_in(smaps: &str) -> Vec<OwnMemory> {
    let mut found: Vec<(bool, OwnMemory)> = Vec::new();
    for line in smaps.lines() {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((start, end)) = name.split_once('-') {
            let hex = |text| u64::from_str_radix(text, 16).unwrap_or(0);
            let (start, end) = (hex(start), hex(end));
            let range = Range { start, bytes: end.saturating_sub(start) };
            let is_shared = rest.as_bytes().get(3) == Some(&b's');
            found.push((is_shared, OwnMemory { range, rss_kib: 0, referenced_kib: 0, swap_kib: 0 }));
            continue;
        }
        let Some((is_own, memory)) = found.last_mut() else { continue };
        let kib = || rest.trim().trim_end_matches("kB").trim().parse().unwrap_or(0);
        match name {
            "Rss:" => memory.rss_kib = kib(),
            "Referenced:" => memory.referenced_kib = kib(),
            "Anonymous:" => *is_own |= kib() > 0,
            "Swap:" => {
                memory.swap_kib = kib();
                *is_own |= memory.swap_kib > 0;
            }
            // The kernel's own pages that are mapped into it, and what is locked.
            "VmFlags:" => {
                *is_own &= !rest.split_ascii_whitespace().any(|flag| ["pf", "io", "lo"].contains(&flag))
            }
            _ => {}
        }
    }
    let own = found.into_iter().filter(|(is_own, memory)| *is_own && memory.rss_kib + memory.swap_kib > 0);
    own.map(|(_, memory)| memory).collect()
}

/// Memory of the machine and what is available now, KiB.
///
/// # Errors
/// `/proc/meminfo` does not read as expected.
pub fn memory_kib() -> io::Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        parse(line.map(|l| l.trim_end_matches("kB")), "/proc/meminfo")
    };
    Ok((field("MemTotal:")?, field("MemAvailable:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_a_start_and_a_dead_one_has_none() {
        let me = std::process::id() as i32;
        assert_eq!(start_ticks(me).unwrap(), start_ticks(me).unwrap());
        assert!(start_ticks(1).unwrap() <= start_ticks(me).unwrap());
        assert_eq!(start_ticks(i32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_waits_in_sockets_is_added_up() {
        let netlink = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n\
                       0000000000000000 0   1052       00000000 425984   768      0     2        0        5\n\
                       0000000000000000 0   0          00000000 0        0        0     2        0        6\n";
        assert_eq!(netlink_bytes(netlink), 426_752);
        let udp = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n\
                   7: 0100007F:1F90 00000000:0000 07 00000001:00000100 00:00000000 00000000     0\n";
        assert_eq!(udp_bytes(udp), 257);
    }

    #[test]
    fn files_that_are_open_for_writing_are_found_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let me = std::process::id() as i32;
        let mount = mount_of(&dir.path().display().to_string()).unwrap();
        let seen = |name: &str| {
            let found = written_files(me, mount, &mut 100_000).unwrap();
            found.iter().any(|file| file.path == dir.path().join(name))
        };
        let (read, write, gone, mapped) = ("read", "write", "gone", "mapped");
        for name in [read, write, gone, mapped] {
            fs::write(dir.path().join(name), [0; 4096]).unwrap();
        }
        let open =
            |name: &str| fs::OpenOptions::new().read(true).write(true).open(dir.path().join(name)).unwrap();
        let _read = fs::File::open(dir.path().join(read)).unwrap();
        let (_write, _gone, to_map) = (open(write), open(gone), open(mapped));
        fs::remove_file(dir.path().join(gone)).unwrap();
        // SAFETY: a new mapping of a page of the file, which nothing refers to.
        let at = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let fd = std::os::fd::AsRawFd::as_raw_fd(&to_map);
            libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        drop(to_map);
        assert!(seen(write) && seen(mapped) && !seen(read) && !seen(gone));
        assert!(maps_for_writing(me, &mut 100_000).unwrap());
        assert!(maps_for_writing(me, &mut 0).is_err());
        // SAFETY: the mapping of above, which nothing reads or writes.
        assert_eq!(unsafe { libc::mprotect(at, 4096, libc::PROT_READ) }, 0);
        assert!(seen(mapped) && maps_for_writing(me, &mut 100_000).unwrap());
        assert!(written_files(me, mount + 1_000_000, &mut 100_000).unwrap().is_empty());
        assert!(written_files(me, mount, &mut 1).is_err());
        // SAFETY: the mapping of above.
        assert_eq!(unsafe { libc::munmap(at, 4096) }, 0);
        assert!(!seen(mapped) && !maps_for_writing(me, &mut 100_000).unwrap());
    }

    #[test]
    fn own_memory_is_what_was_written_or_is_shared() {
        let smaps = "1000-3000 r-xp 00000000 00:01 7   /bin/sh\nRss:   8 kB\nAnonymous:   0 kB\nSwap:  0 kB\nVmFlags: rd ex\n\
                     3000-5000 rw-p 00000000 00:01 7   /bin/sh\nRss:   8 kB\nReferenced:  4 kB\nAnonymous: 4 kB\nSwap:  0 kB\nVmFlags: rd wr\n\
                     6000-8000 rw-s 00000000 00:01 9   /dev/shm/x\nRss:   4 kB\nReferenced:  4 kB\nAnonymous: 0 kB\nSwap:  4 kB\nVmFlags: rd wr\n\
                     8000-9000 rw-p 00000000 00:00 0\nRss:   4 kB\nAnonymous: 4 kB\nSwap:  0 kB\nVmFlags: rd wr lo\n\
                     9000-a000 rw-p 00000000 00:00 0\nRss:   0 kB\nAnonymous: 0 kB\nSwap:  0 kB\nVmFlags: rd wr\n";
        let found: Vec<_> =
            own_memory_in(smaps).iter().map(|it| (it.range.start, it.rss_kib, it.swap_kib)).collect();
        assert_eq!(found, [(0x3000, 8, 0), (0x6000, 4, 4)]);
        let me = own_memory(std::process::id() as i32).unwrap();
        assert!(me.iter().map(|it| it.rss_kib).sum::<u64>() > 0);
    }

    #[test]
    fn memory_adds_up() {
        let (total, available) = memory_kib().unwrap();
        assert!(available > 0 && available <= total);
    }
}
