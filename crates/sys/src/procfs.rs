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
    fn memory_adds_up() {
        let (total, available) = memory_kib().unwrap();
        assert!(available > 0 && available <= total);
    }
}
