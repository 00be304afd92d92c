//! How much a project may use, by what. A project's use counts in all that it is in, so the least quota on the way to the root decides.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::project::ProjectPath;

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Sandboxes that are not ended.
    Sandboxes,
    /// Cores they may use, in thousandths.
    CpuMillis,
    /// Memory they may use, MiB.
    MemoryMib,
    /// Disk they may use, MiB.
    DiskMib,
    /// Creates within any second.
    CreatesPerS,
}

impl Resource {
    /// All there are.
    pub const ALL: [Self; 5] =
        [Self::Sandboxes, Self::CpuMillis, Self::MemoryMib, Self::DiskMib, Self::CreatesPerS];

    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sandboxes => "sandboxes",
            Self::CpuMillis => "cpu_millis",
            Self::MemoryMib => "memory_mib",
            Self::DiskMib => "disk_mib",
            Self::CreatesPerS => "creates_per_s",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Sandboxes => "sandboxes",
            Self::CpuMillis => "thousandths of a core",
            Self::MemoryMib => "MiB of memory",
            Self::DiskMib => "MiB of disk",
            Self::CreatesPerS => "creates a second",
        }
    }
}

/// What runs a sandbox, where a quota is for one kind of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backend {
    /// Containers.
    Container,
    /// MicroVMs.
    MicroVm,
    /// Full VMs.
    Vm,
    /// Functions.
    FnCall,
}

impl Backend {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::Container, Self::MicroVm, Self::Vm, Self::FnCall];

    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::MicroVm => "microvm",
            Self::Vm => "vm",
            Self::FnCall => "fncall",
        }
    }
}

/// One thing that is counted: a resource, of all sandboxes or of those of one backend. As text `memory_mib` or `container.memory_mib`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Counted {
    /// Of what.
    pub resource: Resource,
    /// Of which sandboxes; none: of all.
    pub backend: Option<Backend>,
}

impl From<Resource> for Counted {
    fn from(resource: Resource) -> Self {
        Self { resource, backend: None }
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(backend) = self.backend {
            write!(f, "{}.", backend.as_str())?;
        }
        f.write_str(self.resource.as_str())
    }
}

impl FromStr for Counted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (backend, resource) = match text.split_once('.') {
            Some((backend, resource)) => (Some(backend), resource),
            None => (None, text),
        };
        let backend =
            backend.map(|name| Backend::ALL.into_iter().find(|it| it.as_str() == name).ok_or(())).transpose();
        let resource = Resource::ALL.into_iter().find(|it| it.as_str() == resource);
        match (backend, resource) {
            (Ok(backend), Some(resource)) => Ok(Self { resource, backend }),
            _ => Err(format!("{text:?} is nothing that a quota counts: {}", Self::FORM)),
        }
    }
}

impl Counted {
    /// What its text looks like.
    const FORM: &str = "it must be sandboxes, cpu_millis, memory_mib, disk_mib or creates_per_s, of one backend with its name and a dot before it, such as container.sandboxes";

    /// For people: what an amount of it is of.
    fn what(self) -> String {
        match self.backend {
            Some(backend) => format!("{} in {}s", self.resource.what(), backend.as_str()),
            None => self.resource.what().to_owned(),
        }
    }
}

impl TryFrom<String> for Counted {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Counted> for String {
    fn from(counted: Counted) -> Self {
        counted.to_string()
    }
}

/// Amounts by what they are of. As a quota, what is not in it is not limited.
pub type Amounts = BTreeMap<Counted, u64>;

/// What a sandbox counts for, in all and of its backend.
pub fn amounts_of(backend: Option<Backend>, each: impl IntoIterator<Item = (Resource, u64)>) -> Amounts {
    let mut amounts = Amounts::new();
    for (resource, amount) in each {
        amounts.insert(resource.into(), amount);
        if backend.is_some() {
            amounts.insert(Counted { resource, backend }, amount);
        }
    }
    amounts
}

/// Adds amounts to others.
pub fn add(to: &mut Amounts, more: &Amounts) {
    for (counted, amount) in more {
        let now = to.entry(*counted).or_default();
        *now = now.saturating_add(*amount);
    }
}

/// Takes amounts from others. What is nothing then is not in it.
pub fn subtract(from: &mut Amounts, less: &Amounts) {
    for (counted, amount) in less {
        if let Some(now) = from.get_mut(counted) {
            *now = now.saturating_sub(*amount);
        }
    }
    from.retain(|_, now| *now > 0);
}

/// There is no room in a project's quota, or in that of one it is in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{project} may use {most} {}; {used} are used and {wanted} more are wanted", .counted.what())]
pub struct Exceeded {
    /// Whose quota.
    pub project: ProjectPath,
    /// Of what.
    pub counted: Counted,
    /// Its quota.
    pub most: u64,
    /// What is used of it.
    pub used: u64,
    /// What was wanted.
    pub wanted: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_has_a_text() {
        for backend in [None].into_iter().chain(Backend::ALL.map(Some)) {
            for resource in Resource::ALL {
                let counted = Counted { resource, backend };
                assert_eq!(counted.to_string().parse(), Ok(counted));
            }
        }
        for bad in ["", "cpu", "pod.sandboxes", "container.", ".sandboxes", "container.vm.sandboxes"] {
            let error = bad.parse::<Counted>().unwrap_err();
            assert!(error.contains("container.sandboxes"), "{error}");
        }
        let quota: Amounts = serde_json::from_str(r#"{"sandboxes": 5, "vm.memory_mib": 7}"#).unwrap();
        assert_eq!(serde_json::to_string(&quota).unwrap(), r#"{"sandboxes":5,"vm.memory_mib":7}"#);
    }

    #[test]
    fn a_sandbox_counts_in_all_and_of_its_backend() {
        let amounts = amounts_of(Some(Backend::Vm), [(Resource::Sandboxes, 1), (Resource::MemoryMib, 64)]);
        let text = serde_json::to_string(&amounts).unwrap();
        assert_eq!(text, r#"{"sandboxes":1,"vm.sandboxes":1,"memory_mib":64,"vm.memory_mib":64}"#);
        let mut sum = amounts.clone();
        add(&mut sum, &amounts_of(None, [(Resource::Sandboxes, 2)]));
        assert_eq!(sum[&Resource::Sandboxes.into()], 3);
        subtract(&mut sum, &amounts);
        assert_eq!(sum, amounts_of(None, [(Resource::Sandboxes, 2)]));
    }
}
