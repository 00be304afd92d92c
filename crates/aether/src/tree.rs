//! Process trees: by cgroup where there is one, else by walking `/proc`.

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};

use crate::child::Cgroup;
use crate::sys;

/// Walks of `/proc` (each with a kill) until nothing new shows up: a fork bomb can outrun one.
const WALKS_MAX: usize = 32;

/// Kills all of a cgroup, at once and by the kernel.
pub(crate) fn kill_cgroup(cgroup: &Cgroup) -> bool {
    rustix::io::write(&cgroup.kill, b"1").is_ok()
}

/// Processes of a cgroup, as our pid namespace numbers them.
pub(crate) fn members(cgroup: &Cgroup) -> Vec<i32> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(cgroup.dir.as_fd(), "cgroup.procs", flags, Mode::empty()) else {
        return Vec::new();
    };
    read_all(&file).split(|b| *b == b'\n').filter_map(number).filter(|pid| *pid > 1).collect()
}

/// Every process that descends from `root`, without itself. What was orphaned has no traces left.
pub(crate) fn descendants(root: i32) -> Vec<i32> {
    let all = processes();
    let mut found = BTreeSet::from([root]);
    loop {
        let before = found.len();
        for (pid, parent) in &all {
            if found.contains(parent) {
                found.insert(*pid);
            }
        }
        if found.len() == before {
            break;
        }
    }
    found.remove(&root);
    found.into_iter().collect()
}

/// Kills a process, its group, and all that descend from it.
pub(crate) fn kill_descendants(root: i32) {
    // Stopped first, so that a parent does not make new ones while the list is worked through.
    let _ = sys::kill(root, libc::SIGSTOP);
    for _ in 0..WALKS_MAX {
        let found = descendants(root);
        let alive = found.iter().filter(|pid| sys::kill(**pid, libc::SIGKILL).is_ok()).count();
        if alive == 0 || found.iter().all(|pid| is_zombie(*pid)) {
            break;
        }
    }
    let _ = sys::kill(-root, libc::SIGKILL);
    let _ = sys::kill(root, libc::SIGKILL);
}

/// `pid` descends from one of `roots`.
pub(crate) fn descends(pid: i32, roots: &[i32]) -> bool {
    let mut at = pid;
    for _ in 0..64 {
        if roots.contains(&at) {
            return true;
        }
        match stat(at) {
            Some(stat) if stat.parent > 1 => at = stat.parent,
            _ => return false,
        }
    }
    false
}

/// CPU time of a process and the children it waited for, microseconds.
pub(crate) fn cpu_us(pid: i32) -> u64 {
    stat(pid).map_or(0, |stat| stat.ticks.saturating_mul(1_000_000) / sys::clock_ticks())
}

/// It is a fork of the agent that never became its command (`PF_FORKNOEXEC`).
pub(crate) fn never_ran(pid: i32) -> bool {
    const FORKED_ONLY: u64 = 0x40;
    stat(pid).is_some_and(|stat| stat.flags & FORKED_ONLY != 0)
}

fn is_zombie(pid: i32) -> bool {
    stat(pid).is_none_or(|stat| stat.state == b'Z')
}

struct Stat {
    state: u8,
    parent: i32,
    flags: u64,
    ticks: u64,
}

fn stat(pid: i32) -> Option<Stat> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(format!("/proc/{pid}/stat"), flags, Mode::empty()).ok()?;
    let mut text = [0; 1024];
    let n = rustix::io::read(&file, &mut text).ok()?;
    parse_stat(&text[..n])
}

/// The program's name is in parentheses and may hold any byte, so the fields count from the last `)`.
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let at = text.iter().rposition(|b| *b == b')')?;
    let fields: Vec<&[u8]> = text.get(at + 2..)?.split(|b| *b == b' ').collect();
    let ticks = (11..15)
        .filter_map(|i| std::str::from_utf8(fields.get(i)?).ok()?.parse::<u64>().ok())
        .fold(0, u64::saturating_add);
    let flags = std::str::from_utf8(fields.get(6)?).ok()?.parse().ok()?;
    Some(Stat { state: *fields.first()?.first()?, parent: number(fields.get(1)?)?, flags, ticks })
}

fn processes() -> Vec<(i32, i32)> {
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    dir.flatten()
        .filter_map(|entry| number(entry.file_name().as_encoded_bytes()))
        .filter_map(|pid| Some((pid, stat(pid)?.parent)))
        .collect()
}

fn number(text: &[u8]) -> Option<i32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn read_all(file: impl AsFd) -> Vec<u8> {
    let mut text = Vec::new();
    let mut chunk = [0; 2048];
    while let Ok(n @ 1..) = rustix::io::read(&file, &mut chunk) {
        text.extend_from_slice(&chunk[..n]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_cannot_forge_its_parent() {
        let text = b"42 (x) S 1 (y) z) R 7 42 42 0 -1 0 0 0 0 0 3 4 5 6 20 0 1";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.state, stat.parent, stat.ticks), (b'R', 7, 18));
    }
}
