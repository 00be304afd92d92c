//! Who holds what, and what may be given on.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::permissions::{Permission, Permissions};
use super::project::ProjectPath;
use super::scope::Scope;

/// A person, a service or an agent. Never used again once it is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct IdentityId(pub u64);

/// A grant. A later one has a greater number, and no number is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GrantId(pub u64);

/// Who gave something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grantor {
    /// Whoever set the cluster up.
    Cluster,
    /// An identity, out of what it holds itself.
    Identity(IdentityId),
}

/// Permissions of an identity in a project and all that are in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Whose.
    pub to: IdentityId,
    /// Where.
    pub project: ProjectPath,
    /// What.
    pub permissions: Permissions,
    /// By whom. It counts for no more than they held already when they gave it and hold still.
    pub by: Grantor,
}

/// Something was to be given, or done, that the giver does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{missing:?} is not held in {project}")]
pub struct NotHeld {
    /// Where.
    pub project: ProjectPath,
    /// What is missing.
    pub missing: Permissions,
}

/// What a grant counts for.
#[derive(Debug, Clone)]
struct Counting {
    of: GrantId,
    project: ProjectPath,
    permissions: Permissions,
}

/// All grants, and what projects allow at most.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    grants: BTreeMap<GrantId, Grant>,
    ceilings: BTreeMap<ProjectPath, Permissions>,
    /// What each grant counts for, by who has it. Follows from the others, and is worked out when they change.
    counting: HashMap<IdentityId, Vec<Counting>>,
}

impl Policy {
    /// Of grants and ceilings as they were kept.
    pub fn new(
        grants: impl IntoIterator<Item = (GrantId, Grant)>,
        ceilings: impl IntoIterator<Item = (ProjectPath, Permissions)>,
    ) -> Self {
        let mut policy = Self {
            grants: grants.into_iter().collect(),
            ceilings: ceilings.into_iter().collect(),
            counting: HashMap::new(),
        };
        policy.settle();
        policy
    }

    /// What an identity may do in a project now.
    pub fn held(&self, identity: IdentityId, project: &ProjectPath) -> Permissions {
        let counting = self.counting.get(&identity).into_iter().flatten();
        let held = counting
            .filter(|grant| project.is_within(&grant.project))
            .fold(Permissions::NONE, |held, grant| held | grant.permissions);
        held & self.ceiling(project)
    }

    /// Where an identity may do something now.
    pub fn scope(&self, identity: IdentityId, permission: Permission) -> Scope {
        let counting = self.counting.get(&identity).into_iter().flatten();
        let within = counting.filter(|grant| grant.permissions.has(permission));
        let cut = self.ceilings.iter().filter(|(_, ceiling)| !ceiling.has(permission));
        Scope::new(
            within.map(|grant| grant.project.clone()).collect(),
            cut.map(|(project, _)| project.clone()).collect(),
        )
    }

    /// All that an identity holds anywhere, by where it was given: what somebody must hold to act as it.
    pub fn holdings(&self, identity: IdentityId) -> impl Iterator<Item = (&ProjectPath, Permissions)> {
        let counting = self.counting.get(&identity).into_iter().flatten();
        counting.map(|grant| (&grant.project, grant.permissions & self.ceiling(&grant.project)))
    }

    /// What a grant counts for now.
    pub fn counts_for(&self, id: GrantId) -> Permissions {
        let to = self.grants.get(&id).and_then(|grant| self.counting.get(&grant.to));
        let counting = to.into_iter().flatten().find(|counting| counting.of == id);
        counting.map_or(Permissions::NONE, |grant| grant.permissions & self.ceiling(&grant.project))
    }

    /// Works out what each grant counts for, the oldest first, so that each rests on older ones only. Two who gave each other
    /// something would otherwise hold each other up when the ground is gone from under both.
    fn settle(&mut self) {
        self.counting.clear();
        let grants = std::mem::take(&mut self.grants);
        for (id, grant) in &grants {
            self.count(*id, grant);
        }
        self.grants = grants;
    }

    /// Adds what one grant counts for, after all that are older.
    fn count(&mut self, id: GrantId, grant: &Grant) {
        let backed = match grant.by {
            Grantor::Cluster => Permissions::ALL,
            Grantor::Identity(by) => self.held(by, &grant.project),
        };
        let counting =
            Counting { of: id, project: grant.project.clone(), permissions: grant.permissions & backed };
        self.counting.entry(grant.to).or_default().push(counting);
    }

    /// What may be held at all in a project: what it and all that it is in allow.
    fn ceiling(&self, project: &ProjectPath) -> Permissions {
        project
            .upwards()
            .filter_map(|above| self.ceilings.get(&above).copied())
            .fold(Permissions::ALL, |least, ceiling| least & ceiling)
    }

    /// Checks that an identity holds these in a project.
    ///
    /// # Errors
    /// [`NotHeld`], with what is missing.
    pub fn require(
        &self,
        identity: IdentityId,
        project: &ProjectPath,
        wanted: Permissions,
    ) -> Result<(), NotHeld> {
        match wanted - self.held(identity, project) {
            Permissions::NONE => Ok(()),
            missing => Err(NotHeld { project: project.clone(), missing }),
        }
    }

    /// Gives something.
    ///
    /// # Errors
    /// [`NotHeld`]: the giver does not hold all of it there, or may not give.
    pub fn grant(&mut self, id: GrantId, grant: Grant) -> Result<(), NotHeld> {
        if let Grantor::Identity(by) = grant.by {
            let giving = [Permission::IdentityManage].into_iter().collect();
            self.require(by, &grant.project, grant.permissions | giving)?;
        }
        self.add(id, grant);
        Ok(())
    }

    /// Adds a grant that was given before, elsewhere. It counts for no more than its giver holds.
    pub fn add(&mut self, id: GrantId, grant: Grant) {
        let is_newest = self.grants.last_key_value().is_none_or(|(last, _)| *last < id);
        if is_newest {
            // None that is older rests on it.
            self.count(id, &grant);
        }
        self.grants.insert(id, grant);
        if !is_newest {
            self.settle();
        }
    }

    /// Takes a grant back, and with it all that rests on it.
    pub fn revoke(&mut self, id: GrantId) -> Option<Grant> {
        let grant = self.grants.remove(&id);
        self.settle();
        grant
    }

    /// Takes back all that an identity has, and all that rests on it.
    pub fn forget(&mut self, identity: IdentityId) {
        self.grants.retain(|_, grant| grant.to != identity);
        self.settle();
    }

    /// Sets what may be held at most in a project and all that are in it; none: whatever what it is in allows.
    pub fn limit(&mut self, project: ProjectPath, permissions: Option<Permissions>) {
        match permissions {
            Some(permissions) => self.ceilings.insert(project, permissions),
            None => self.ceilings.remove(&project),
        };
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::permissions::Role;
    use super::*;

    const ROOT: IdentityId = IdentityId(0);

    fn path(text: &str) -> ProjectPath {
        text.parse().unwrap()
    }

    fn grant(by: u64, to: u64, project: &str, permissions: Permissions) -> Grant {
        Grant {
            to: IdentityId(to),
            project: path(project),
            permissions,
            by: Grantor::Identity(IdentityId(by)),
        }
    }

    /// Identity 0 holds everything.
    fn founded() -> Policy {
        let all = Grant {
            to: ROOT,
            project: ProjectPath::root(),
            permissions: Permissions::ALL,
            by: Grantor::Cluster,
        };
        Policy::new([(GrantId(0), all)], [])
    }

    fn manager() -> Permissions {
        Role::Runtime.permissions() | [Permission::IdentityManage].into_iter().collect()
    }

    #[test]
    fn only_what_is_held_can_be_given_and_only_below() {
        let mut policy = founded();
        policy.grant(GrantId(1), grant(0, 1, "root/rl", manager())).unwrap();
        policy.grant(GrantId(2), grant(1, 2, "root/rl/job", Role::Runtime.permissions())).unwrap();
        assert_eq!(policy.held(IdentityId(2), &path("root/rl/job/agent")), Role::Runtime.permissions());
        assert_eq!(policy.held(IdentityId(2), &path("root/rl")), Permissions::NONE);
        let more =
            policy.grant(GrantId(3), grant(1, 2, "root/rl/job", Role::Builder.permissions())).unwrap_err();
        assert_eq!(more.missing, Role::Builder.permissions() - manager());
        policy.grant(GrantId(3), grant(1, 2, "root/other", Role::Runtime.permissions())).unwrap_err();
        policy.grant(GrantId(3), grant(2, 3, "root/rl/job", Role::Runtime.permissions())).unwrap_err();
    }

    #[test]
    fn what_is_taken_from_the_giver_is_gone_from_all_after_it() {
        let mut policy = founded();
        policy.grant(GrantId(1), grant(0, 1, "root/rl", manager())).unwrap();
        policy.grant(GrantId(2), grant(1, 2, "root/rl/job", manager())).unwrap();
        policy.grant(GrantId(3), grant(2, 3, "root/rl/job/a", Role::Runtime.permissions())).unwrap();
        let at = path("root/rl/job/a");
        assert!(policy.held(IdentityId(3), &at).has(Permission::SandboxUse));
        policy.limit(path("root/rl"), Some(Role::Viewer.permissions()));
        assert_eq!(policy.held(IdentityId(3), &at), Role::Viewer.permissions() & Role::Runtime.permissions());
        policy.revoke(GrantId(1)).unwrap();
        assert_eq!(policy.held(IdentityId(3), &at), Permissions::NONE);
    }

    #[test]
    fn two_cannot_hold_each_other_up() {
        let mut policy = founded();
        policy.grant(GrantId(1), grant(0, 1, "root", manager())).unwrap();
        policy.grant(GrantId(2), grant(1, 2, "root", manager())).unwrap();
        policy.grant(GrantId(3), grant(2, 1, "root", manager())).unwrap();
        policy.revoke(GrantId(1));
        assert_eq!(policy.held(IdentityId(1), &ProjectPath::root()), Permissions::NONE);
        assert_eq!(policy.held(IdentityId(2), &ProjectPath::root()), Permissions::NONE);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Grant { by: u64, to: u64, project: usize, permissions: u32 },
        Revoke(usize),
        Limit(usize, u32),
    }

    const PROJECTS: [&str; 5] = ["root", "root/a", "root/a/b", "root/a/b/c", "root/d"];

    fn some(bits: u32) -> Permissions {
        let all = Permission::ALL.iter().enumerate();
        all.filter(|(at, _)| bits & (1 << at) != 0).map(|(_, permission)| *permission).collect()
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let bits = prop_oneof![Just(u32::MAX), any::<u32>()];
        let step = prop_oneof![
            6 => (1_u64..5, 1_u64..6, 0..PROJECTS.len(), bits.clone())
                .prop_map(|(by, to, project, permissions)| Step::Grant { by, to, project, permissions }),
            1 => any::<usize>().prop_map(Step::Revoke),
            1 => (1..PROJECTS.len(), bits).prop_map(|(project, bits)| Step::Limit(project, bits)),
        ];
        proptest::collection::vec(step, 1..40)
    }

    proptest! {
        /// Identity 1 is all that the cluster's owner gave something to: nobody ever holds more than it was given, or anything elsewhere.
        #[test]
        fn no_sequence_yields_more_than_its_root_held(given: u32, at in 1..PROJECTS.len(), steps in steps()) {
            let given = some(given) | [Permission::IdentityManage].into_iter().collect();
            let mut policy = founded();
            policy.grant(GrantId(1), grant(0, 1, PROJECTS[at], given)).unwrap();
            let mut next = 2;
            for step in steps {
                match step {
                    Step::Grant { by, to, project, permissions } => {
                        let _ = policy.grant(GrantId(next), grant(by, to, PROJECTS[project], some(permissions)));
                        next += 1;
                    }
                    Step::Revoke(which) => {
                        policy.revoke(GrantId(1 + which as u64 % next));
                    }
                    Step::Limit(project, bits) => policy.limit(path(PROJECTS[project]), Some(some(bits))),
                }
                for identity in 1..6 {
                    for project in PROJECTS {
                        let held = policy.held(IdentityId(identity), &path(project));
                        let most = if path(project).is_within(&path(PROJECTS[at])) { given } else { Permissions::NONE };
                        prop_assert!(most.has_all(held), "{} holds {:?} in {}", identity, held, project);
                        prop_assert!(policy.ceiling(&path(project)).has_all(held));
                        for permission in Permission::ALL {
                            let scope = policy.scope(IdentityId(identity), *permission);
                            prop_assert_eq!(scope.has(&path(project)), held.has(*permission));
                        }
                    }
                }
            }
            policy.revoke(GrantId(1));
            for identity in 1..6 {
                for project in PROJECTS {
                    prop_assert_eq!(policy.held(IdentityId(identity), &path(project)), Permissions::NONE);
                }
            }
        }
    }
}
