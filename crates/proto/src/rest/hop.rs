//! What control adds to a request on its way to an edge, and asks of edges for itself. Edges believe it on their own socket only.

use std::fmt;
use std::str::FromStr;

use dsec_model::iam::ProjectPath;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Header: the project that the request acts in. Callers may give it too, to act in another than that of their identity.
pub const PROJECT: &str = "x-dsec-project";
/// Header: which key asked.
pub const KEY_ID: &str = "x-dsec-key-id";
/// Header: in which projects the caller sees sandboxes; a scope of `dsec_model::iam`. Without it: in all.
pub const SEES: &str = "x-dsec-sees";
/// Header: in which projects the caller may do this; without it where it sees them.
pub const MAY: &str = "x-dsec-may";
/// Header: what a create is charged with, a [`Charge`].
pub const CHARGE: &str = "x-dsec-charge";

/// Longest name of a replica of control, bytes.
const REPLICA_MAX: usize = 64;

/// Which replica of control a create is charged to, and what it took for it of the quotas. As text `REPLICA TICKET CPU_MILLIS MEMORY_MIB DISK_MIB`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charge {
    /// The replica.
    pub by: String,
    /// Its number for it: reports name those that have arrived.
    pub ticket: u64,
    /// Cores, in thousandths, at most.
    pub cpu_millis: u64,
    /// Memory at most, MiB.
    pub memory_mib: u64,
    /// Disk at most, MiB.
    pub disk_mib: u64,
}

impl fmt::Display for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {} {}", self.by, self.ticket, self.cpu_millis, self.memory_mib, self.disk_mib)
    }
}

impl FromStr for Charge {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split(' ');
        let by = words.next().filter(|by| (1..=REPLICA_MAX).contains(&by.len()));
        let mut number = || words.next().and_then(|word| word.parse().ok());
        let charge = match (by, number(), number(), number(), number()) {
            (Some(by), Some(ticket), Some(cpu_millis), Some(memory_mib), Some(disk_mib)) => {
                Self { by: by.to_owned(), ticket, cpu_millis, memory_mib, disk_mib }
            }
            _ => return Err("it must be a replica and four numbers"),
        };
        if words.next().is_some() { Err("something follows its four numbers") } else { Ok(charge) }
    }
}

/// What sandboxes of a node that have not ended, creates under way among them, may use: those of one project, backend and replica of control.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Charged {
    /// Their project.
    #[schema(value_type = String)]
    pub project: ProjectPath,
    /// Their backend.
    pub backend: String,
    /// The replica of control that they are charged to; empty where none is.
    #[serde(default)]
    pub by: String,
    /// How many they are.
    pub sandboxes: u64,
    /// Cores, in thousandths.
    pub cpu_millis: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Disk, MiB.
    pub disk_mib: u64,
}

/// A create that has arrived at a node and is in what it has charged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Arrived {
    /// The replica of control that it is charged to.
    pub by: String,
    /// The replica's number for it.
    pub ticket: u64,
}

/// Has a node take nothing more that is charged to a replica that is no more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FenceChargesRequest {
    /// The replica.
    pub by: String,
}

/// What is charged to it on the node, and will not grow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChargesFenced {
    /// By project and backend.
    pub charged: Vec<Charged>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_is_a_line() {
        let charge: Charge = "c-1f 7 2000 512 1024".parse().unwrap();
        assert_eq!((charge.by.as_str(), charge.memory_mib), ("c-1f", 512));
        assert_eq!(charge.to_string().parse(), Ok(charge));
        for bad in ["", "c", "c 1 2 3", "c 1 2 3 x", "c 1 2 3 4 5", " 1 2 3 4", "c 1 2 3 -4"] {
            assert!(bad.parse::<Charge>().is_err(), "{bad}");
        }
    }
}
