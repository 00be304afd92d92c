//! Everything that is kept, in memory: what requests are checked against.

use std::collections::{BTreeMap, HashMap};

use dsec_model::iam::{Amounts, GrantId, IdentityId, Permission, Permissions, Policy, ProjectPath, Scope};

use crate::error::IamError;
use crate::records::{Bounds, GrantRecord, IdentityRecord, KeyRecord, ProjectRecord, Record};

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Whose key it is; none: the cluster's own, which may do everything in `home`.
    pub identity: Option<IdentityId>,
    /// What they are called.
    pub name: String,
    /// The key's id.
    pub key_id: String,
    /// The project they act in when they do not say.
    pub home: ProjectPath,
    /// What the key is narrowed to.
    pub bounds: Bounds,
}

impl Caller {
    /// The cluster's own key.
    pub fn cluster(key_id: &str, home: ProjectPath) -> Self {
        let name = "cluster".to_owned();
        Self { identity: None, name, key_id: key_id.to_owned(), home, bounds: Bounds::default() }
    }
}

/// All there is.
#[derive(Debug, Default)]
pub struct Book {
    /// The change up to which everything is in it.
    pub(crate) version: i64,
    projects: BTreeMap<ProjectPath, ProjectRecord>,
    identities: BTreeMap<IdentityId, IdentityRecord>,
    keys: BTreeMap<String, KeyRecord>,
    by_digest: HashMap<[u8; 32], String>,
    grants: BTreeMap<GrantId, GrantRecord>,
    policy: Policy,
}

impl Book {
    pub(crate) fn apply(&mut self, record: Record) {
        match record {
            Record::Project(it) => {
                let ceiling = it.ceiling.filter(|_| !it.removed);
                let before = self.projects.get(&it.path).and_then(|project| project.ceiling);
                if ceiling != before {
                    self.policy.limit(it.path.clone(), ceiling);
                }
                put(&mut self.projects, it.path.clone(), it.removed, it);
            }
            Record::Identity(it) => {
                if it.removed {
                    self.policy.forget(it.id);
                    self.grants.retain(|_, grant| grant.grant.to != it.id);
                    self.keys.retain(|_, key| key.identity != it.id);
                    let keys = &self.keys;
                    self.by_digest.retain(|_, id| keys.contains_key(id));
                }
                put(&mut self.identities, it.id, it.removed, it);
            }
            Record::Key(it) => {
                let is_orphan = !self.identities.contains_key(&it.identity);
                if it.removed || is_orphan {
                    self.by_digest.remove(&it.sha256);
                } else {
                    self.by_digest.insert(it.sha256, it.id.clone());
                }
                put(&mut self.keys, it.id.clone(), it.removed || is_orphan, it);
            }
            Record::Grant(it) => {
                let is_orphan = !self.identities.contains_key(&it.grant.to);
                if it.removed || is_orphan {
                    self.policy.revoke(it.id);
                } else if !self.grants.contains_key(&it.id) {
                    self.policy.add(it.id, it.grant.clone());
                }
                put(&mut self.grants, it.id, it.removed || is_orphan, it);
            }
        }
    }

    /// Who a key belongs to, at a time; none: nobody, or no longer.
    pub fn caller(&self, digest: &[u8; 32], now_ms: u64) -> Option<Caller> {
        let key = self.keys.get(self.by_digest.get(digest)?)?;
        if key.expires_ms.is_some_and(|expires| expires <= now_ms) {
            return None;
        }
        let identity = self.identities.get(&key.identity)?;
        Some(Caller {
            identity: Some(identity.id),
            name: identity.name.clone(),
            key_id: key.id.clone(),
            home: key.bounds.project.clone().unwrap_or_else(|| identity.project.clone()),
            bounds: key.bounds.clone(),
        })
    }

    /// What a caller may do in a project.
    pub fn held(&self, caller: &Caller, project: &ProjectPath) -> Permissions {
        let held = match caller.identity {
            None if project.is_within(&caller.home) => Permissions::ALL,
            None => Permissions::NONE,
            Some(identity) => self.policy.held(identity, project),
        };
        match &caller.bounds.project {
            Some(bound) if !project.is_within(bound) => Permissions::NONE,
            _ => held & caller.bounds.permissions.unwrap_or(Permissions::ALL),
        }
    }

    /// Where a caller may do something.
    pub fn scope(&self, caller: &Caller, permission: Permission) -> Scope {
        if caller.bounds.permissions.is_some_and(|bound| !bound.has(permission)) {
            return Scope::NOTHING;
        }
        let scope = match caller.identity {
            None => Scope::of(caller.home.clone()),
            Some(identity) => self.policy.scope(identity, permission),
        };
        match &caller.bounds.project {
            Some(bound) => scope.in_project(bound),
            None => scope,
        }
    }

    /// Checks that a caller may do these in a project.
    ///
    /// # Errors
    /// [`IamError::Denied`] with what is missing.
    pub fn require(
        &self,
        caller: &Caller,
        project: &ProjectPath,
        wanted: Permissions,
    ) -> Result<(), IamError> {
        match wanted - self.held(caller, project) {
            Permissions::NONE => Ok(()),
            missing => Err(IamError::Denied { project: project.clone(), missing }),
        }
    }

    /// Checks that a caller may do all that an identity may do with a key of these bounds: who gives somebody a key can act as them.
    pub(crate) fn require_all_of(
        &self,
        caller: &Caller,
        identity: IdentityId,
        bounds: &Bounds,
    ) -> Result<(), IamError> {
        for (project, permissions) in self.policy.holdings(identity) {
            let at = match &bounds.project {
                Some(bound) if bound.is_within(project) => bound,
                Some(bound) if !project.is_within(bound) => continue,
                _ => project,
            };
            self.require(caller, at, permissions & bounds.permissions.unwrap_or(Permissions::ALL))?;
        }
        Ok(())
    }

    /// A project. The root is there always.
    pub fn project(&self, path: &ProjectPath) -> Option<&ProjectRecord> {
        self.projects.get(path)
    }

    /// Whether a project is there.
    pub fn has_project(&self, path: &ProjectPath) -> bool {
        *path == ProjectPath::root() || self.projects.contains_key(path)
    }

    /// All projects but a root of which nothing was said, in order.
    pub fn projects(&self) -> impl Iterator<Item = &ProjectRecord> {
        self.projects.values()
    }

    /// Quotas of all projects that have one.
    pub fn quotas(&self) -> BTreeMap<ProjectPath, Amounts> {
        let limited = self.projects.values().filter(|project| !project.quota.is_empty());
        limited.map(|project| (project.path.clone(), project.quota.clone())).collect()
    }

    /// Projects with a quota that were changed after a version.
    pub fn limited_since(&self, version: i64) -> impl Iterator<Item = &ProjectRecord> {
        self.projects.values().filter(move |project| project.version > version && !project.quota.is_empty())
    }

    /// Somebody.
    pub fn identity(&self, id: IdentityId) -> Option<&IdentityRecord> {
        self.identities.get(&id)
    }

    /// Everybody, in order of their numbers.
    pub fn identities(&self) -> impl Iterator<Item = &IdentityRecord> {
        self.identities.values()
    }

    /// A key.
    pub fn key(&self, id: &str) -> Option<&KeyRecord> {
        self.keys.get(id)
    }

    /// Keys of somebody.
    pub fn keys_of(&self, identity: IdentityId) -> impl Iterator<Item = &KeyRecord> {
        self.keys.values().filter(move |key| key.identity == identity)
    }

    /// A grant.
    pub fn grant(&self, id: GrantId) -> Option<&GrantRecord> {
        self.grants.get(&id)
    }

    /// All grants, the oldest first.
    pub fn grants(&self) -> impl Iterator<Item = &GrantRecord> {
        self.grants.values()
    }

    /// What a grant counts for now, its giver and the projects' ceilings being what they are.
    pub fn counts_for(&self, grant: &GrantRecord) -> Permissions {
        self.policy.counts_for(grant.id)
    }
}

fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, removed: bool, value: V) {
    match removed {
        true => map.remove(&key),
        false => map.insert(key, value),
    };
}
