//! The layer store as this node has it. It may be away when the edge starts: what runs is served all the same, and the store is
//! taken up when it answers.
//!
//! ```text
//! away ── tried again, with backoff ──► opened: a lease, what is here is held ── looked at now and then ──► away? told
//! ```

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, Feature};
use dsec_store::{Lease, Store, StoreError, StoreSettings};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::Layers;
use super::hold::Held;
use crate::doctor;
use crate::error::{chain, internal, store_failed};

/// How long a start waits for the store. One that answers takes less; one that does not must not keep callers from what runs.
const FIRST_TRY_MAX: Duration = Duration::from_secs(3);
/// Pause before it is tried again; it doubles up to the second.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(15);
/// Where the store's id is noted, below its address: an edge whose store is away says which it is.
const ID_FILE: &str = "store-id";
/// How long a look whether it answers may take before it is said not to.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// What there is once the store was opened.
struct Opened {
    store: Store,
    id: String,
    held: Held,
}

/// The store, away or opened.
pub(super) struct Backing {
    settings: StoreSettings,
    opened: OnceLock<Opened>,
    /// Why it cannot be used now.
    problem: Mutex<Option<String>>,
    /// Locked while it is looked at: a look at a directory whose server is gone keeps a thread for as long.
    looking: Arc<tokio::sync::Mutex<()>>,
    /// Its id, as it was when it was last opened; nothing if it never was.
    last_id: String,
}

impl Backing {
    pub(super) fn new(settings: &StoreSettings, dir: &Path) -> Self {
        let problem = Mutex::new(Some("it has not answered yet".to_owned()));
        let noted = std::fs::read_to_string(dir.join(ID_FILE)).unwrap_or_default();
        let last_id = match noted.split_once('\n') {
            Some((url, id)) if url == settings.url => id.to_owned(),
            _ => String::new(),
        };
        Self {
            settings: settings.clone(),
            opened: OnceLock::new(),
            problem,
            looking: Arc::default(),
            last_id,
        }
    }

    fn get(&self) -> Result<&Opened, ApiError> {
        self.opened.get().ok_or_else(|| {
            let url = &self.settings.url;
            let problem = self.problem().unwrap_or_default();
            let message = format!("the layer store {url} is away: {problem}");
            ApiError::new(ErrorKind::Unavailable, message)
                .detail(json!({ "store": url }))
                .hint("what runs goes on; the node takes the store up when it answers: try again then")
        })
    }

    fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*known, &problem) {
            (None, Some(now)) => {
                tracing::error!(store = self.settings.url, problem = now, "the layer store is away")
            }
            (Some(_), None) => tracing::info!(store = self.settings.url, "the layer store answers"),
            _ => {}
        }
        *known = problem;
    }

    /// Opens the store, once.
    async fn open(&self, dir: &Path, node: &str) -> Result<(), StoreFailure> {
        let settings = self.settings.clone();
        let runtime = tokio::runtime::Handle::current();
        // A directory whose server is gone may keep the thread for as long.
        let opening = tokio::task::spawn_blocking(move || runtime.block_on(Store::open_or_create(&settings)));
        let store =
            opening.await.map_err(|e| StoreFailure::Other(internal("opening the store broke off", &e)))?;
        let store = store.map_err(StoreFailure::Store)?;
        let id = store.id().await.map_err(StoreFailure::Store)?;
        let held = Held::begin(&store, dir, node).await.map_err(StoreFailure::Other)?;
        if let Err(error) = std::fs::write(dir.join(ID_FILE), format!("{}\n{id}", self.settings.url)) {
            tracing::warn!(%error, "the store's id is not noted");
        }
        let _first = self.opened.set(Opened { store, id, held });
        Ok(())
    }
}

/// Why the store was not opened.
enum StoreFailure {
    Store(StoreError),
    Other(ApiError),
}

impl StoreFailure {
    fn problem(&self) -> String {
        match self {
            Self::Store(error) => chain(error),
            Self::Other(error) => error.0.message.clone(),
        }
    }

    /// What no waiting mends, as the start of an edge is told.
    fn is_final(&self) -> bool {
        matches!(self, Self::Store(StoreError::Settings { .. }))
    }

    fn into_api(self) -> ApiError {
        match self {
            Self::Store(error) => store_failed(&error),
            Self::Other(error) => error,
        }
    }
}

impl Layers {
    /// The store.
    ///
    /// # Errors
    /// It has been away since the edge started.
    pub(super) fn store(&self) -> Result<&Store, ApiError> {
        Ok(&self.backing.get()?.store)
    }

    /// The node's lease.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub(super) fn lease(&self) -> Result<Arc<Lease>, ApiError> {
        Ok(self.backing.get()?.held.lease())
    }

    pub(super) fn held(&self) -> Option<&Held> {
        self.backing.opened.get().map(|opened| &opened.held)
    }

    /// What tells the store from every other; nothing while that is not known.
    pub fn store_id(&self) -> String {
        self.backing.opened.get().map_or(&self.backing.last_id, |opened| &opened.id).clone()
    }

    /// Opens the store, and goes on trying in the background when it does not answer soon. What runs on this node is known
    /// already: it is held from here on.
    ///
    /// # Errors
    /// The settings name no store.
    pub async fn take_up(self: &Arc<Self>) -> Result<(), ApiError> {
        let (tell, first) = oneshot::channel();
        let layers = Arc::clone(self);
        tokio::spawn(layers.open_until(tell));
        match timeout(FIRST_TRY_MAX, first).await {
            Ok(Ok(ended)) => ended,
            _ => Ok(()),
        }
    }

    async fn open_until(self: Arc<Self>, first: oneshot::Sender<Result<(), ApiError>>) {
        let (mut first, mut pause) = (Some(first), PAUSE_MIN);
        loop {
            let failure = match self.backing.open(&self.dir, &self.node).await {
                Ok(()) => break,
                Err(failure) => failure,
            };
            tracing::warn!(
                store = self.backing.settings.url,
                problem = failure.problem(),
                ?pause,
                "the layer store is away"
            );
            *self.backing.problem.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.problem());
            if let Some(first) = first.take() {
                let is_final = failure.is_final();
                let _gone_on = first.send(if is_final { Err(failure.into_api()) } else { Ok(()) });
                if is_final {
                    return;
                }
            }
            tokio::time::sleep(pause).await;
            pause = PAUSE_MAX.min(pause * 2);
        }
        self.backing.set_problem(None);
        self.keep_hold().await;
        if let Some(first) = first {
            let _gone_on = first.send(Ok(()));
        }
    }

    /// Looks whether the store answers, for those who ask. Called now and then.
    pub fn look_at_store(self: &Arc<Self>) {
        let (Some(opened), Ok(turn)) =
            (self.backing.opened.get(), Arc::clone(&self.backing.looking).try_lock_owned())
        else {
            return;
        };
        let (layers, store) = (Arc::clone(self), opened.store.clone());
        tokio::spawn(async move {
            let mut look = std::pin::pin!(store.check());
            let seen = match timeout(LOOK_MAX, &mut look).await {
                Ok(seen) => seen,
                Err(_) => {
                    layers
                        .backing
                        .set_problem(Some(format!("it has not answered for {} s", LOOK_MAX.as_secs())));
                    look.await
                }
            };
            layers.backing.set_problem(seen.err().map(|error| chain(&error)));
            drop(turn);
        });
    }

    /// The store as a feature of the node.
    pub fn store_feature(&self) -> Feature {
        doctor::store(&self.backing.settings.url, self.backing.problem())
    }
}
