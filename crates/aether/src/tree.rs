//! Process trees: by cgroup where there is one, else by walking `/proc`.

use std::collections::HashMap;
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
    below(&processes(), root)
}

fn below(all: &[(i32, i32)], root: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for (pid, parent) in all {
        children.entry(*parent).or_default().push(*pid);
    }
    let mut found = Vec::new();
    let mut left = vec![root];
    while let Some(parent) = left.pop() {
        // Taken out, so that a number that was reused while the list was made leads into no circle.
        let of_parent = children.remove(&parent).unwrap_or_default();
        left.extend(&of_parent);
        found.extend(of_parent);
    }
    found.retain(|pid| *pid != root);
    found
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

/// Those of `pids` that are none of `roots` and descend from none.
pub(crate) fn apart_from(roots: &[i32], pids: Vec<i32>) -> Vec<i32> {
    if roots.is_empty() {
        return pids;
    }
    apart(roots, pids, |pid| stat(pid).map_or(0, |stat| stat.parent))
}

/// Each process is looked at once, however many share its ancestors.
fn apart(roots: &[i32], pids: Vec<i32>, mut parent: impl FnMut(i32) -> i32) -> Vec<i32> {
    // Whether a process descends; the agent, and who is gone, do not.
    let mut known: HashMap<i32, bool> = roots.iter().map(|pid| (*pid, true)).collect();
    let mut path = Vec::new();
    pids.into_iter()
        .filter(|pid| {
            let mut at = *pid;
            let descends = loop {
                match known.get(&at) {
                    Some(descends) => break *descends,
                    None if at <= 1 => break false,
                    None => {
                        // Until it is known; numbers that are reused meanwhile could lead into a circle.
                        known.insert(at, false);
                        path.push(at);
                        at = parent(at);
                    }
                }
            };
            known.extend(path.drain(..).map(|passed| (passed, descends)));
            !descends
        })
        .collect()
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

    #[test]
    fn descendants_are_found_whatever_the_order_and_the_depth() {
        let chain: Vec<(i32, i32)> = (3..50_000).rev().map(|pid| (pid, pid - 1)).collect();
        assert_eq!(below(&chain, 10).len(), 50_000 - 11);
        let circle = [(5, 6), (6, 5), (7, 5)];
        let mut found = below(&circle, 5);
        found.sort_unstable();
        assert_eq!(found, [6, 7]);
    }

    #[test]
    fn every_process_is_looked_at_once_however_deep_the_tree_is() {
        let mut looks = 0;
        let pids: Vec<i32> = (3..7000).collect();
        let parent = |pid: i32| {
            looks += 1;
            // A chain below 2, of which 4000 was there before.
            pid - 1
        };
        assert_eq!(apart(&[4000, 9999], pids, parent), (3..4000).collect::<Vec<_>>());
        assert!(looks < 7000, "{looks} looks");
        assert_eq!(apart(&[9], vec![5, 6], |pid| 11 - pid), [5, 6]);
    }
}
