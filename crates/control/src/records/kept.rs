//! What many records have in common, once.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use dsec_proto::rest::SandboxOwner;

/// Things that are looked through for those that nobody holds any more, at least.
const SWEPT_MIN: usize = 1024;

/// Owners and texts that records share.
#[derive(Default)]
pub(super) struct Kept {
    /// Whose sandboxes are.
    pub(super) owners: Once<SandboxOwner>,
    /// Shapes, labels and reasons, as JSON.
    pub(super) texts: Once<str>,
}

/// Things of which there is one each.
pub(super) struct Once<T: ?Sized>(Mutex<Held<T>>);

struct Held<T: ?Sized> {
    all: HashSet<Arc<T>>,
    /// At how many they are looked through.
    sweep_at: usize,
}

impl<T: ?Sized + Eq + Hash> Default for Once<T> {
    fn default() -> Self {
        Self(Mutex::new(Held { all: HashSet::new(), sweep_at: SWEPT_MIN }))
    }
}

impl<T: ?Sized + Eq + Hash> Once<T> {
    /// The one that is equal to this.
    pub(super) fn get(&self, thing: impl Borrow<T> + Into<Arc<T>>) -> Arc<T> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(one) = held.all.get(thing.borrow()) {
            return Arc::clone(one);
        }
        if held.all.len() >= held.sweep_at {
            held.all.retain(|one| Arc::strong_count(one) > 1);
            held.sweep_at = SWEPT_MIN.max(held.all.len() * 2);
        }
        let one: Arc<T> = thing.into();
        held.all.insert(Arc::clone(&one));
        one
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).all.len()
    }
}
