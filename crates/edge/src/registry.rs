//! All sandboxes of the node, living and remembered.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use dsec_model::SandboxId;
use dsec_proto::rest::ApiError;

use crate::clock::now_ms;
use crate::error::no_sandbox;
use crate::sandbox::Handle;

/// How long an ended sandbox stays listed, ms.
pub const REMEMBERED_MS: u64 = 3_600_000;
/// Most ended sandboxes that stay listed; at 1,000 stops a second an hour would be 3.6 million.
pub const REMEMBERED_MAX: usize = 10_000;

/// The sandboxes by id.
#[derive(Debug, Default)]
pub struct Registry {
    handles: RwLock<HashMap<SandboxId, Arc<Handle>>>,
}

impl Registry {
    /// Enters one; `false` when the id is taken.
    pub fn insert(&self, handle: Arc<Handle>) -> bool {
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        match handles.entry(handle.id.clone()) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(handle);
                true
            }
        }
    }

    /// Takes one out.
    pub fn remove(&self, id: &SandboxId) {
        self.handles.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// One by id.
    pub fn find(&self, id: &SandboxId) -> Option<Arc<Handle>> {
        self.handles.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// One by the text of its id.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, id: &str) -> Result<Arc<Handle>, ApiError> {
        id.parse::<SandboxId>().ok().and_then(|id| self.find(&id)).ok_or_else(|| no_sandbox(id))
    }

    /// All, in no order.
    pub fn all(&self) -> Vec<Arc<Handle>> {
        self.handles.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Those that have not ended.
    pub fn living(&self) -> Vec<Arc<Handle>> {
        let mut handles = self.all();
        handles.retain(|handle| !handle.state().is_final());
        handles
    }

    /// Forgets those that ended more than an hour ago, or before the last [`REMEMBERED_MAX`].
    pub fn expire(&self) {
        let mut ended: Vec<(u64, SandboxId)> = self
            .all()
            .iter()
            .filter_map(|handle| Some((handle.record().ended_ms?, handle.id.clone())))
            .collect();
        ended.sort_unstable();
        let oldest = now_ms().saturating_sub(REMEMBERED_MS);
        let surplus = ended.len().saturating_sub(REMEMBERED_MAX);
        let expired = ended.iter().enumerate().filter(|(i, (at, _))| *i < surplus || *at < oldest);
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        for (_, (_, id)) in expired {
            handles.remove(id);
        }
    }
}
