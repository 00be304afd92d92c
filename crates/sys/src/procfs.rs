//! What `/proc` tells of processes, the machine and its memory.

use std::fs;
use std::io;

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
    fn memory_adds_up() {
        let (total, available) = memory_kib().unwrap();
        assert!(available > 0 && available <= total);
    }
}
