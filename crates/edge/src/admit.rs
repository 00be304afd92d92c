//! Final admission: room is promised under one lock and given back when the permit is dropped.

use std::sync::{Arc, Mutex, PoisonError};

use dsec_model::{Admission, Capacity, Demand, ErrorKind};
use dsec_proto::rest::ApiError;

use crate::error::internal;
use crate::launch::Launch;

/// MiB in bytes.
const MIB: u64 = 1 << 20;

#[derive(Debug, Default, Clone, Copy)]
struct Promised {
    live: u64,
    memory_mib: u64,
}

/// What is promised on this node.
#[derive(Debug)]
pub struct Room {
    promised: Arc<Mutex<Promised>>,
    live_max: u64,
    capacity: Capacity,
}

/// Room for one sandbox, for as long as it is held.
#[derive(Debug)]
pub struct Permit {
    promised: Arc<Mutex<Promised>>,
    memory_mib: u64,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        promised.live = promised.live.saturating_sub(1);
        promised.memory_mib = promised.memory_mib.saturating_sub(self.memory_mib);
    }
}

impl Room {
    /// Room of a node with nothing on it.
    pub fn new(capacity: Capacity, live_max: u64) -> Self {
        Self { promised: Arc::default(), live_max, capacity }
    }

    /// All the node has.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Memory promised now, MiB.
    pub fn promised_mib(&self) -> u64 {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner).memory_mib
    }

    /// Takes room for one sandbox of this memory limit, if there is.
    ///
    /// # Errors
    /// `resource_exhausted` with what is short.
    pub fn admit(&self, memory_mib: u64, backend: &dyn Launch) -> Result<Permit, ApiError> {
        // Read outside the lock: an answer some microseconds old decides the same.
        let (_, available) = memory_mib_now()?;
        let disk_free_mib = backend.disk().1 / MIB;
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        let node = Admission {
            memory_available_mib: available,
            disk_free_mib,
            live: promised.live,
            live_max: self.live_max,
            memory_promised_mib: promised.memory_mib,
            capacity: self.capacity,
        };
        node.decide(Demand { memory_mib }).map_err(|short| {
            ApiError::new(ErrorKind::ResourceExhausted, format!("no room for the sandbox: {short}"))
                .hint("stop sandboxes you do not need, ask for less, or try another node")
        })?;
        promised.live += 1;
        promised.memory_mib += memory_mib;
        Ok(Permit { promised: Arc::clone(&self.promised), memory_mib })
    }

    /// Takes room without asking, for a sandbox that runs already.
    pub fn readmit(&self, memory_mib: u64) -> Permit {
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        promised.live += 1;
        promised.memory_mib += memory_mib;
        Permit { promised: Arc::clone(&self.promised), memory_mib }
    }
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

/// Share of the last ten seconds in which some process waited for a processor, 0 to 1; 0 where the kernel does not tell.
/// Source: `/proc/pressure/cpu`, pressure stall information.
pub fn cpu_pressure_now() -> f64 {
    std::fs::read_to_string("/proc/pressure/cpu").ok().and_then(|text| some_avg10(&text)).unwrap_or(0.0)
}

fn some_avg10(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = some.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    Some(percent.parse::<f64>().ok()?.clamp(0.0, 100.0) / 100.0)
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_the_share_of_ten_seconds() {
        let text = "some avg10=12.50 avg60=3.00 avg300=1.00 total=5\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(some_avg10(text), Some(0.125));
        assert_eq!(some_avg10(""), None);
        assert_eq!(some_avg10("some avg60=1.00"), None);
    }
}
