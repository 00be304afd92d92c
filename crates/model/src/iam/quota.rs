//! How much a project may use. A project's use counts in all that it is in, so the least quota on the way to the root decides.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::project::ProjectPath;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Sandboxes that are not ended.
    Sandboxes,
    /// Cores they may use, in thousandths.
    CpuMillis,
    /// Memory they may use, MiB.
    MemoryMib,
    /// Disk they may use, MiB.
    DiskMib,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sandboxes => "sandboxes",
            Self::CpuMillis => "thousandths of a core",
            Self::MemoryMib => "MiB of memory",
            Self::DiskMib => "MiB of disk",
        })
    }
}

/// Amounts by resource. As a quota, what is not in it is not limited.
pub type Quota = BTreeMap<Resource, u64>;

/// There is no room in a project's quota, or in that of one it is in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{project} may use {most} {resource}; {used} are used and {wanted} more are wanted")]
pub struct Exceeded {
    /// Whose quota.
    pub project: ProjectPath,
    /// Of what.
    pub resource: Resource,
    /// Its quota.
    pub most: u64,
    /// What is used of it.
    pub used: u64,
    /// What was wanted.
    pub wanted: u64,
}

/// Quotas and use of all projects.
#[derive(Debug, Clone, Default)]
pub struct QuotaTree {
    quotas: BTreeMap<ProjectPath, Quota>,
    used: BTreeMap<ProjectPath, Quota>,
}

impl QuotaTree {
    /// Sets a project's quota. One below what is used stops new use and takes nothing away.
    pub fn set(&mut self, project: ProjectPath, quota: Quota) {
        self.quotas.insert(project, quota);
    }

    /// Takes all of it in a project and in all that it is in, or nothing.
    ///
    /// # Errors
    /// The first quota that has no room, from the project upwards.
    pub fn take(&mut self, project: &ProjectPath, wanted: &Quota) -> Result<(), Exceeded> {
        for above in project.upwards() {
            let Some(quota) = self.quotas.get(&above) else { continue };
            for (&resource, &wanted) in wanted {
                let (most, used) = (amount(Some(quota), resource), self.used(&above, resource));
                if let Some(most) = most
                    && used.saturating_add(wanted) > most
                {
                    return Err(Exceeded { project: above, resource, most, used, wanted });
                }
            }
        }
        for above in project.upwards() {
            let used = self.used.entry(above).or_default();
            for (&resource, &wanted) in wanted {
                let now = used.entry(resource).or_default();
                *now = now.saturating_add(wanted);
            }
        }
        Ok(())
    }

    /// Gives back what was taken.
    pub fn give_back(&mut self, project: &ProjectPath, amounts: &Quota) {
        for above in project.upwards() {
            let Some(used) = self.used.get_mut(&above) else { continue };
            for (resource, amount) in amounts {
                if let Some(now) = used.get_mut(resource) {
                    *now = now.saturating_sub(*amount);
                }
            }
            used.retain(|_, now| *now > 0);
            if used.is_empty() {
                self.used.remove(&above);
            }
        }
    }

    /// What a project and all that are in it use.
    pub fn used(&self, project: &ProjectPath, resource: Resource) -> u64 {
        amount(self.used.get(project), resource).unwrap_or(0)
    }

    /// What a project could still take: the least that is left on the way to the root. None: not limited.
    pub fn left(&self, project: &ProjectPath, resource: Resource) -> Option<u64> {
        project
            .upwards()
            .filter_map(|above| {
                let most = amount(self.quotas.get(&above), resource)?;
                Some(most.saturating_sub(self.used(&above, resource)))
            })
            .min()
    }
}

fn amount(amounts: Option<&Quota>, resource: Resource) -> Option<u64> {
    amounts?.get(&resource).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(text: &str) -> ProjectPath {
        text.parse().unwrap()
    }

    fn sandboxes(count: u64) -> Quota {
        Quota::from([(Resource::Sandboxes, count)])
    }

    #[test]
    fn the_least_on_the_way_up_decides() {
        let mut tree = QuotaTree::default();
        tree.set(path("root/rl"), sandboxes(10));
        tree.set(path("root/rl/job"), sandboxes(100));
        assert_eq!(tree.left(&path("root/rl/job/a"), Resource::Sandboxes), Some(10));
        tree.take(&path("root/rl/other"), &sandboxes(4)).unwrap();
        assert_eq!(tree.left(&path("root/rl/job"), Resource::Sandboxes), Some(6));
        let over = tree.take(&path("root/rl/job"), &sandboxes(7)).unwrap_err();
        assert_eq!(over.to_string(), "root/rl may use 10 sandboxes; 4 are used and 7 more are wanted");
        assert_eq!(tree.used(&path("root/rl/job"), Resource::Sandboxes), 0, "all or nothing");
        assert_eq!(tree.left(&path("root/free"), Resource::Sandboxes), None);
    }

    #[test]
    fn a_quota_below_what_is_used_takes_nothing_away() {
        let mut tree = QuotaTree::default();
        tree.take(&path("root/a"), &sandboxes(5)).unwrap();
        tree.set(path("root"), sandboxes(3));
        assert_eq!(tree.left(&path("root/a"), Resource::Sandboxes), Some(0));
        tree.take(&path("root/a"), &sandboxes(1)).unwrap_err();
        tree.give_back(&path("root/a"), &sandboxes(5));
        tree.take(&path("root/a"), &sandboxes(3)).unwrap();
    }

    const PROJECTS: [&str; 6] = ["root", "root/a", "root/a/b", "root/a/c", "root/d", "root/d/e"];

    proptest! {
        #[test]
        fn no_quota_is_ever_exceeded_and_all_comes_back(
            quotas in proptest::collection::vec((0..PROJECTS.len(), 0_u64..20), 0..6),
            steps in proptest::collection::vec((0..PROJECTS.len(), 1_u64..6, any::<bool>()), 1..80),
        ) {
            let mut tree = QuotaTree::default();
            for (project, most) in quotas {
                tree.set(path(PROJECTS[project]), sandboxes(most));
            }
            let mut taken: Vec<(ProjectPath, u64)> = Vec::new();
            for (project, count, gives_back) in steps {
                if gives_back && !taken.is_empty() {
                    let (project, count) = taken.swap_remove(count as usize % taken.len());
                    tree.give_back(&project, &sandboxes(count));
                } else if tree.take(&path(PROJECTS[project]), &sandboxes(count)).is_ok() {
                    taken.push((path(PROJECTS[project]), count));
                }
                for project in PROJECTS.map(path) {
                    let below = taken.iter().filter(|(at, _)| at.is_within(&project)).map(|(_, count)| count);
                    let used: u64 = below.sum();
                    prop_assert_eq!(tree.used(&project, Resource::Sandboxes), used);
                    if let Some(most) = amount(tree.quotas.get(&project), Resource::Sandboxes) {
                        prop_assert!(used <= most);
                    }
                }
            }
            for (project, count) in taken {
                tree.give_back(&project, &sandboxes(count));
            }
            prop_assert!(tree.used.is_empty());
        }
    }
}
