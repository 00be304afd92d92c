//! Which process the kernel killed when a container's memory was full. Counters say that it
//! happened; only the kernel's log says to whom. Its line names the victim's host user id, and with it
//! the container, since every container has ids of its own.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Mutex, PoisonError};

use dsec_sys::idmap::{FIRST_BASE, IDS, IdRange};

use crate::OomReport;

/// Reports kept for one container that nobody asks for.
const REPORTS_MAX: usize = 64;
/// One record of `/dev/kmsg` is never longer.
const RECORD_MAX: usize = 8192;

/// The kernel's log, read as far as it goes whenever somebody asks.
#[derive(Debug)]
pub(super) struct OomLog(Mutex<State>);

#[derive(Debug)]
struct State {
    /// `None` on a host that does not let us read it: then reports have no names.
    log: Option<File>,
    reports: HashMap<IdRange, Vec<OomReport>>,
}

impl OomLog {
    /// From now on: what happened before is not ours.
    pub(super) fn open() -> Self {
        let log = OpenOptions::new().read(true).custom_flags(libc_nonblock()).open("/dev/kmsg").ok();
        let log = log.and_then(|mut log| log.seek(SeekFrom::End(0)).is_ok().then_some(log));
        Self(Mutex::new(State { log, reports: HashMap::new() }))
    }

    /// Reports of a container since the last call.
    pub(super) fn take(&self, range: IdRange) -> Vec<OomReport> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.read_on();
        state.reports.remove(&range).unwrap_or_default()
    }
}

fn libc_nonblock() -> i32 {
    rustix::fs::OFlags::NONBLOCK.bits() as i32
}

impl State {
    fn read_on(&mut self) {
        let Some(log) = &mut self.log else { return };
        let mut record = [0; RECORD_MAX];
        loop {
            match log.read(&mut record) {
                Ok(n) if n > 0 => {
                    if let Some((range, report)) = parse(&String::from_utf8_lossy(&record[..n])) {
                        let reports = self.reports.entry(range).or_default();
                        if reports.len() < REPORTS_MAX {
                            reports.push(report);
                        }
                    }
                }
                // EPIPE: records were overwritten before we read them; the next read goes on after the gap.
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
                _ => return,
            }
        }
    }
}

/// `Memory cgroup out of memory: Killed process 123 (python3) total-vm:..kB, anon-rss:..kB, file-rss:..kB,
/// shmem-rss:..kB, UID:268435456 pgtables:...` (Linux 5.3 and newer).
fn parse(record: &str) -> Option<(IdRange, OomReport)> {
    // Only the kernel's own line, from its start: a command name in another line may say anything.
    let text = record.split_once(';')?.1.strip_prefix("Memory cgroup out of memory: Killed process ")?;
    let (pid, rest) = text.split_once(" (")?;
    pid.parse::<u32>().ok()?;
    // A command name may hold parentheses, commas and even this.
    let (process, numbers) = rest.rsplit_once(") total-vm:")?;
    let value = |name: &str| -> Option<u64> {
        let text = numbers.split_once(name)?.1;
        text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())].parse().ok()
    };
    let uid = u32::try_from(value("UID:")?).ok()?;
    let range = IdRange::from_base(uid.checked_sub(FIRST_BASE)? / IDS * IDS + FIRST_BASE)?;
    let kib: u64 = ["anon-rss:", "file-rss:", "shmem-rss:"].into_iter().filter_map(value).sum();
    Some((range, OomReport { process: process.to_owned(), rss_bytes: kib * 1024 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_line_names_the_container_and_the_process() {
        let base = IdRange::nth(7).unwrap().base();
        let line = format!(
            "3,1021,8123,-;Memory cgroup out of memory: Killed process 4711 (a (b), c) total-vm:200000kB, \
             anon-rss:60000kB, file-rss:1024kB, shmem-rss:0kB, UID:{} pgtables:200kB oom_score_adj:0\n",
            base + 1000
        );
        let (range, report) = parse(&line).unwrap();
        assert_eq!(range, IdRange::nth(7).unwrap());
        assert_eq!(report, OomReport { process: "a (b), c".into(), rss_bytes: 61024 * 1024 });
    }

    #[test]
    fn other_lines_and_other_users_are_not_ours() {
        assert!(parse("6,1,1,-;usb 1-1: new device\n").is_none());
        let other =
            "3,1,1,-;Out of memory: Killed process 1 (x) total-vm:1kB, anon-rss:1kB, UID:0 pgtables\n";
        assert!(parse(other).is_none());
        let forged = "6,1,1,-;Killed process [9]: segfault at 0 in Memory cgroup out of memory: Killed process 1 (x) \
                      total-vm:1kB, anon-rss:1kB, UID:268435456 pgtables\n";
        assert!(parse(forged).is_none(), "a line that only quotes the kernel's was believed");
    }
}
