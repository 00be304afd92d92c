//! Final admission: room is promised under one lock and given back when the permit is dropped.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsec_model::{Admission, Capacity, Demand, ErrorKind, Limits, Observed, Policy, Promised};
use dsec_proto::rest::ApiError;
use serde_json::json;

use crate::error::internal;
use crate::launch::Launch;

/// MiB in bytes.
const MIB: u64 = 1 << 20;

/// What is promised on this node.
#[derive(Debug)]
pub struct Room {
    promised: Arc<Mutex<Promised>>,
    policy: Policy,
    capacity: Capacity,
    state_dir: PathBuf,
}

/// Room for one sandbox, for as long as it is held.
#[derive(Debug)]
pub struct Permit {
    promised: Arc<Mutex<Promised>>,
    demand: Demand,
}

impl Permit {
    /// Writes the promise down.
    fn new(promised: &Arc<Mutex<Promised>>, mut now: MutexGuard<'_, Promised>, demand: Demand) -> Self {
        *now = now.plus(demand);
        Self { promised: Arc::clone(promised), demand }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        *promised = promised.minus(self.demand);
    }
}

impl Room {
    /// Room of a node with nothing on it, which keeps its state in `state_dir`.
    pub fn new(capacity: Capacity, policy: Policy, state_dir: &Path) -> Self {
        Self { promised: Arc::default(), policy, capacity, state_dir: state_dir.to_owned() }
    }

    /// All the node has.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// What is promised now.
    pub fn promised(&self) -> Promised {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Promised> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the node has left at this moment.
    ///
    /// # Errors
    /// The host's memory cannot be read.
    pub fn observe(&self, backend: &dyn Launch) -> Result<Observed, ApiError> {
        Ok(Observed {
            memory_available_mib: memory_mib_now()?.1,
            memory_pressure: pressure("memory", "full"),
            cpu_pressure: pressure("cpu", "some"),
            disk_free_mib: backend.disk().1 / MIB,
            files_free: files_free(&self.state_dir),
            processes: processes_now(),
        })
    }

    /// Takes room for one sandbox with these limits, if there is.
    ///
    /// # Errors
    /// `resource_exhausted` with what is short.
    pub fn admit(&self, limits: &Limits, backend: &dyn Launch) -> Result<Permit, ApiError> {
        let demand = demand(limits);
        // Read outside the lock: an answer some microseconds old decides the same.
        let observed = self.observe(backend)?;
        let promised = self.lock();
        let node = Admission { policy: self.policy, capacity: self.capacity, observed, promised: *promised };
        node.decide(demand).map_err(|short| {
            ApiError::new(ErrorKind::ResourceExhausted, format!("no room for the sandbox: {short}"))
                .detail(json!({ "short": short.of }))
                .hint("stop sandboxes you do not need, ask for less, or try another node")
        })?;
        Ok(Permit::new(&self.promised, promised, demand))
    }

    /// Takes room without asking, for a sandbox that runs already.
    pub fn readmit(&self, limits: &Limits) -> Permit {
        Permit::new(&self.promised, self.lock(), demand(limits))
    }
}

fn demand(limits: &Limits) -> Demand {
    Demand { memory_mib: limits.memory_mib, cpu_millis: limits.cpu_millis }
}

/// Memory of the host: all, available now, MiB. Source: proc(5), `MemTotal` and `MemAvailable`.
///
/// # Errors
/// `/proc/meminfo` cannot be read or lacks a line.
pub fn memory_mib_now() -> Result<(u64, u64), ApiError> {
    let text =
        std::fs::read_to_string("/proc/meminfo").map_err(|e| internal("/proc/meminfo cannot be read", &e))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()
    };
    match (field("MemTotal:"), field("MemAvailable:")) {
        (Some(all), Some(available)) => Ok((all / 1024, available / 1024)),
        _ => Err(ApiError::new(ErrorKind::Internal, "/proc/meminfo lacks MemTotal or MemAvailable")),
    }
}

/// Share of the last ten seconds in which processes waited for this, 0 to 1; 0 where the kernel does not tell. `who` is `some`, any of
/// them, or `full`, all of them. Source: `/proc/pressure`, pressure stall information.
fn pressure(of: &str, who: &str) -> f64 {
    std::fs::read_to_string(format!("/proc/pressure/{of}"))
        .ok()
        .and_then(|text| avg10(&text, who))
        .unwrap_or(0.0)
}

fn avg10(text: &str, who: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(who)?.strip_prefix(' '))?;
    let percent = line.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    Some(percent.parse::<f64>().ok()?.clamp(0.0, 100.0) / 100.0)
}

/// Files that can still be made on a file system; the most there can be where it has no such limit (btrfs) or cannot be asked.
fn files_free(on: &Path) -> u64 {
    rustix::fs::statvfs(on).ok().filter(|fs| fs.f_files > 0).map_or(u64::MAX, |fs| fs.f_favail)
}

/// Processes and threads of the host, 0 where it cannot be read. Source: proc(5), `loadavg`'s fourth field.
fn processes_now() -> u64 {
    std::fs::read_to_string("/proc/loadavg").ok().and_then(|text| all_of_loadavg(&text)).unwrap_or(0)
}

fn all_of_loadavg(text: &str) -> Option<u64> {
    text.split(' ').nth(3)?.split_once('/')?.1.parse().ok()
}

/// Processes and threads that the host's kernel takes, 0 where it does not tell. Source: proc(5), `kernel.pid_max` and `kernel.threads-max`.
fn processes_max() -> u64 {
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?.trim().parse().ok();
    ["pid_max", "threads-max"].into_iter().filter_map(read).min().unwrap_or(0)
}

/// All that this node has.
///
/// # Errors
/// The host's memory cannot be read.
pub fn capacity(backend: &dyn Launch) -> Result<Capacity, ApiError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(Capacity {
        memory_mib: memory_mib_now()?.0,
        cpu_millis: cores as u64 * 1000,
        disk_mib: backend.disk().0 / MIB,
        processes: processes_max(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_the_share_of_ten_seconds() {
        let text = "some avg10=12.50 avg60=3.00 avg300=1.00 total=5\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!((avg10(text, "some"), avg10(text, "full")), (Some(0.125), Some(0.99)));
        assert_eq!(avg10("", "some"), None);
        assert_eq!(avg10("some avg60=1.00", "some"), None);
    }

    #[test]
    fn processes_are_counted_of_all_users() {
        assert_eq!(all_of_loadavg("0.10 0.20 0.30 2/345 6789\n"), Some(345));
        assert_eq!(all_of_loadavg("0.10"), None);
        let (now, most) = (processes_now(), processes_max());
        assert!(0 < now && now < most, "{now} of {most}");
    }

    #[test]
    fn files_are_those_of_the_state() {
        let free = files_free(Path::new("/proc/self"));
        assert_eq!(free, u64::MAX, "proc has no such limit");
        assert!(files_free(Path::new("/")) > 0);
    }
}
