//! Creates with a key happen once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::{ApiError, CreateSandboxRequest, Exec, IDEMPOTENCY_KEY_MAX};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::error::invalid;

/// Bytes of a first command's output that are kept with its key for an hour: 10,000 of them are 160 MB at
/// worst, and most are short. Longer ones are read again from the sandbox while it runs.
const OUTPUT_KEPT_MAX: usize = 16 << 10;
/// How long a create may be on its way from control to here.
const FENCED_FOR: Duration = Duration::from_secs(600);

/// A key as it is kept with its sandbox's record.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoredKey {
    /// Whose key it is: the same text of two projects is two keys.
    pub project: String,
    /// The caller's text.
    pub key: String,
    /// SHA-256 of the request's canonical form, hex.
    pub request: String,
    /// Which attempt of its caller's this create is, where the caller counts.
    #[serde(skip)]
    pub attempt: Option<u32>,
}

impl StoredKey {
    /// Checks a key and binds it to its request.
    ///
    /// # Errors
    /// It is not 1 to 128 visible ASCII characters.
    pub fn new(
        project: &str,
        key: &str,
        attempt: Option<u32>,
        request: &CreateSandboxRequest,
    ) -> Result<Self, ApiError> {
        if key.is_empty() || key.len() > IDEMPOTENCY_KEY_MAX || !key.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(invalid(format!(
                "the idempotency-key has {} bytes; it must be 1 to {IDEMPOTENCY_KEY_MAX} visible ASCII characters",
                key.len()
            )));
        }
        // Maps are ordered and absent fields are left out, so equal requests have equal texts.
        let text = serde_json::to_vec(request).map_err(|e| invalid(e.to_string()))?;
        let request = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { project: project.to_owned(), key: key.to_owned(), request, attempt })
    }

    fn place(&self) -> Place {
        (self.project.clone(), self.key.clone())
    }
}

/// What the create of a key made.
#[derive(Debug, Clone)]
pub struct Made {
    /// The sandbox.
    pub id: SandboxId,
    /// How its first command went, as it was answered. `None`: there was none, or an edge before this one
    /// answered it.
    pub first_exec: Option<Result<FirstExec, ApiError>>,
}

/// The first command of a create, as it was answered.
#[derive(Debug, Clone)]
pub struct FirstExec {
    /// The answer, without output when that is larger than [`OUTPUT_KEPT_MAX`].
    pub answer: Arc<Exec>,
    /// The output is in it.
    pub is_whole: bool,
}

impl FirstExec {
    /// Keeps an answer.
    pub fn of(exec: &Exec) -> Self {
        let texts = [&exec.stdout, &exec.stderr, &exec.stdout_base64, &exec.stderr_base64];
        let bytes: usize = texts.into_iter().flatten().map(String::len).sum();
        let mut answer = exec.clone();
        let is_whole = bytes <= OUTPUT_KEPT_MAX;
        if !is_whole {
            (answer.stdout, answer.stderr, answer.stdout_base64, answer.stderr_base64) =
                (None, None, None, None);
        }
        Self { answer: Arc::new(answer), is_whole }
    }
}

type Outcome = Option<Result<Made, ApiError>>;

struct Slot {
    request: String,
    outcome: watch::Receiver<Outcome>,
}

/// A project and a key.
type Place = (String, String);

/// A later attempt went elsewhere: those before it are not taken any more.
struct Fence {
    attempt: u32,
    since: Instant,
}

#[derive(Default)]
struct Table {
    slots: HashMap<Place, Slot>,
    fences: HashMap<Place, Fence>,
}

/// The keys of this node's sandboxes.
#[derive(Default)]
pub struct Keys {
    table: Mutex<Table>,
}

/// What to do with a create.
pub enum Claim {
    /// It is the first of its key: create, and report to this.
    First(Reservation),
    /// Another has made, or is making, this sandbox.
    Known(watch::Receiver<Outcome>),
}

/// A key held by the create in progress. Dropped without an outcome, it is free again.
pub struct Reservation {
    keys: Arc<Keys>,
    key: StoredKey,
    outcome: watch::Sender<Outcome>,
}

impl Reservation {
    /// Tells all who wait how the create went. A failed one frees the key.
    pub fn settle(self, result: Result<Made, ApiError>) {
        self.outcome.send_replace(Some(result));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let made = matches!(*self.outcome.borrow(), Some(Ok(_)));
        if !made {
            self.keys.lock().slots.remove(&self.key.place());
        }
    }
}

impl Keys {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a key.
    ///
    /// # Errors
    /// The key belongs to another request; a later attempt was here already.
    pub fn claim(self: &Arc<Self>, key: &StoredKey) -> Result<Claim, ApiError> {
        let mut table = self.lock();
        let at = key.place();
        let fence = table.fences.get(&at);
        if let (Some(attempt), Some(fence)) = (key.attempt, fence)
            && attempt < fence.attempt
        {
            let message = format!("attempt {attempt} of this create came after attempt {}", fence.attempt);
            return Err(ApiError::new(ErrorKind::Conflict, message).hint("the later one is answered"));
        }
        match table.slots.get(&at) {
            Some(slot) if slot.request == key.request => Ok(Claim::Known(slot.outcome.clone())),
            Some(_) => Err(ApiError::new(
                ErrorKind::AlreadyExists,
                format!("the idempotency-key {:?} was used for another request", key.key),
            )
            .hint("draw a new key for each new sandbox")),
            None => {
                let (outcome, receiver) = watch::channel(None);
                table.slots.insert(at, Slot { request: key.request.clone(), outcome: receiver });
                Ok(Claim::First(Reservation { keys: Arc::clone(self), key: key.clone(), outcome }))
            }
        }
    }

    /// Whether a sandbox of this key is here or being made. If not, no attempt before this one makes it any more.
    pub fn fence(&self, project: &str, key: &str, attempt: u32) -> bool {
        let mut table = self.lock();
        let at = (project.to_owned(), key.to_owned());
        if table.slots.contains_key(&at) {
            return true;
        }
        let fence = table.fences.entry(at).or_insert(Fence { attempt, since: Instant::now() });
        fence.attempt = fence.attempt.max(attempt);
        fence.since = Instant::now();
        false
    }

    /// Enters the key of a sandbox that is there already.
    pub fn restore(&self, key: &StoredKey, id: &SandboxId) {
        let (_, outcome) = watch::channel(Some(Ok(Made { id: id.clone(), first_exec: None })));
        self.lock().slots.insert(key.place(), Slot { request: key.request.clone(), outcome });
    }

    /// Forgets keys of sandboxes that are not known any more, and attempts that cannot be on their way any more.
    pub fn retain(&self, known: impl Fn(&SandboxId) -> bool) {
        let mut table = self.lock();
        table.slots.retain(|_, slot| match &*slot.outcome.borrow() {
            Some(Ok(made)) => known(&made.id),
            _ => true,
        });
        table.fences.retain(|_, fence| fence.since.elapsed() < FENCED_FOR);
    }
}

/// Waits for the create that holds the key.
///
/// # Errors
/// It failed.
pub async fn outcome(mut slot: watch::Receiver<Outcome>) -> Result<Made, ApiError> {
    let interrupted = || {
        ApiError::new(ErrorKind::Unavailable, "the create that this one waited for was interrupted")
            .hint("send it again with the same key")
    };
    match slot.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(interrupted())),
        Err(_) => Err(interrupted()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(attempt: Option<u32>) -> StoredKey {
        let request = serde_json::from_value(serde_json::json!({ "container_image": "debian" })).unwrap();
        StoredKey::new("root", "k", attempt, &request).unwrap()
    }

    #[test]
    fn an_attempt_that_comes_after_a_later_one_makes_nothing() {
        let keys = Arc::<Keys>::default();
        assert!(!keys.fence("root", "k", 2));
        assert_eq!(keys.claim(&key(Some(1))).err().unwrap().kind(), ErrorKind::Conflict);
        assert!(!keys.fence("other", "k", 9), "of another project");
        assert!(matches!(keys.claim(&key(Some(2))), Ok(Claim::First(_))));
        assert!(matches!(keys.claim(&key(None)), Ok(Claim::First(_))), "who does not count is not held up");
    }

    #[test]
    fn a_create_under_way_is_known() {
        let keys = Arc::<Keys>::default();
        let Ok(Claim::First(reservation)) = keys.claim(&key(Some(1))) else { panic!("it is the first") };
        assert!(keys.fence("root", "k", 2));
        assert!(matches!(keys.claim(&key(Some(2))), Ok(Claim::Known(_))));
        drop(reservation);
        assert!(!keys.fence("root", "k", 3), "it failed, and another may make it");
        keys.retain(|_| false);
        assert_eq!(keys.claim(&key(Some(2))).err().unwrap().kind(), ErrorKind::Conflict, "not forgotten yet");
    }
}
