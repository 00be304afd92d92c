//! Leases: what somebody is using or publishing right now, so that a collection leaves it.
//!
//! ```text
//! leases/<id>.alive                        who holds it and for how long; written again by a task, dated by the store
//! leases/<id>.hold.<number>.<key, / as +>  one object that is held
//! leases/<id>.idle.<number>.<key, / as +>  says of that hold that nobody uses what it holds now
//! ```
//!
//! A hold is an object of its own and is never changed, so that holding more neither rewrites a list nor waits for another hold. Its
//! number is random and never used again: a removal of it that arrives late finds nothing, not a newer hold of the same object. A
//! hold counts as long as its lease is not known to have run out; collectors give a lease twice its time. A lease that cannot be read
//! counts too, for two hours: its holder may be alive, and writes it anew.
//!
//! An **idle** hold keeps its object from collections as any other, so its holder may use it again without asking. It does not keep a
//! name from being removed: its holder is to let go when no name is left ([`crate::Collector::unnamed`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use dsec_image::build::FileIndex;
use dsec_image::layer::{LayerId, Manifest};
use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::PutMode;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::collect::Outlook;
use crate::error::StoreError;
use crate::store::{Found, RECORD_MAX, Store, json};
use crate::{collect, key};

/// Renewals in the time a lease has: two may fail.
const RENEWALS: u32 = 3;
/// How long a lease or a list that cannot be read counts, by the store's clock: one whose host lost power may have lost its bytes.
/// Longer than any that can be read counts after it was last written.
pub(crate) const UNREADABLE_MAX: Duration = Duration::from_secs(2 * 3600);
/// Longest time of a lease.
const TTL_MAX: Duration = Duration::from_secs(UNREADABLE_MAX.as_secs() / 2);
/// How often a collection that is about to remove what is wanted is looked at again.
const COLLECTION_POLL: Duration = Duration::from_millis(200);

#[derive(Serialize, Deserialize)]
struct Alive {
    holder: String,
    ttl_ms: u64,
}

/// A hold, as its holder knows it.
#[derive(Debug)]
struct Held {
    /// Where it lies.
    object: String,
    /// It was seen that no collection is about to remove what it holds.
    is_settled: bool,
    /// Whether the store was told that nobody uses what it holds; `None` while it is not known what it was told.
    is_idle: Option<bool>,
    /// Locked by whoever tells it: two that tell at once might leave it told either.
    telling: Arc<tokio::sync::Mutex<()>>,
}

impl Held {
    fn new(object: String) -> Self {
        Self { object, is_settled: false, is_idle: Some(false), telling: Arc::default() }
    }
}

/// A lease, renewed until it is released or dropped. Dropped, it runs out by itself.
#[derive(Debug)]
pub struct Lease {
    store: Store,
    id: String,
    ttl: Duration,
    /// By the key of what is held.
    held: Mutex<HashMap<String, Held>>,
    /// Holds that stand for nothing any more and may still be there.
    doomed: Mutex<Vec<Held>>,
    /// Of what is held, what a void list named.
    late: Mutex<HashSet<String>>,
    /// When the last renewal that succeeded was begun; `None` once it was lost.
    renewed: Arc<Mutex<Option<Instant>>>,
    renewer: tokio::task::JoinHandle<()>,
}

impl Lease {
    /// Takes a new lease for `holder`, a node or a publisher, that lives `ttl`, at most an hour, past its last sign of life.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn begin(store: &Store, holder: &str, ttl: Duration) -> Result<Self, StoreError> {
        let plain: String = holder
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' })
            .take(64)
            .collect();
        let id = format!("{plain}-{}", store.random()?);
        let ttl = ttl.min(TTL_MAX);
        let begun = Instant::now();
        let alive = json(&Alive { holder: holder.to_owned(), ttl_ms: ttl.as_millis() as u64 });
        store.put_brief(&alive_key(&id), alive.clone(), PutMode::Create).await?;
        Ok(Self::running(store, id, alive, ttl, HashMap::new(), begun))
    }

    /// Goes on with a lease that this holder's last process had, with all that it holds.
    ///
    /// # Errors
    /// `LeaseLost` if it has run out.
    pub async fn adopt(store: &Store, id: &str, ttl: Duration) -> Result<Self, StoreError> {
        let ttl = ttl.min(TTL_MAX);
        let begun = Instant::now();
        let lost = || StoreError::LeaseLost { lease: id.to_owned() };
        let all = Leases::read(store).await?;
        let alive = all.alive.get(id).filter(|alive| !alive.has_run_out).ok_or_else(lost)?;
        let bytes = json(&Alive { holder: alive.holder.clone(), ttl_ms: ttl.as_millis() as u64 });
        renew(store, id, bytes.clone()).await?;
        // Whether that process got as far as to look at collections is not known.
        let held = |hold: Hold| Held { is_idle: Some(hold.is_idle), ..Held::new(hold.object) };
        let own = all.holds.into_iter().filter(|hold| hold.lease == id);
        let held = own.map(|hold| (hold.key.clone(), held(hold))).collect();
        Ok(Self::running(store, id.to_owned(), bytes, ttl, held, begun))
    }

    fn running(
        store: &Store,
        id: String,
        alive: Bytes,
        ttl: Duration,
        held: HashMap<String, Held>,
        begun: Instant,
    ) -> Self {
        let renewed = Arc::new(Mutex::new(Some(begun)));
        let renewer = tokio::spawn(keep_alive(store.clone(), id.clone(), alive, ttl, Arc::clone(&renewed)));
        Self {
            store: store.clone(),
            id,
            ttl,
            held: Mutex::new(held),
            doomed: Mutex::default(),
            late: Mutex::default(),
            renewed,
            renewer,
        }
    }

    /// Its id, to adopt it by.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The store it is in.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Holds a layer, and with it all it refers to, and reads its manifest.
    ///
    /// # Errors
    /// `NotFound` if it is gone or about to go.
    pub async fn use_layer(&self, layer: &LayerId) -> Result<Manifest, StoreError> {
        let key = key::layer(layer);
        self.settle(&key).await?;
        let manifest = self.store.manifest(layer).await;
        if manifest.is_err() {
            // Nothing will rely on it.
            self.late.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        }
        manifest
    }

    /// Holds a layer whose content another one that is being made may share, and tells where its files lie. None if that is
    /// not known, or of nothing that may be relied on: then nothing is shared.
    ///
    /// # Errors
    /// `NotFound` if the layer is gone or about to go.
    pub async fn use_donor(&self, layer: &LayerId) -> Result<Option<FileIndex>, StoreError> {
        let manifest = self.use_layer(layer).await?;
        match self.store.files(layer, &manifest).await {
            Err(StoreError::Damaged { what, problem }) => {
                tracing::warn!(object = what, problem, "damaged file index left aside");
                Ok(None)
            }
            other => other,
        }
    }

    /// Tells the store whether anybody uses a layer that is held, unless it knows.
    ///
    /// # Errors
    /// [`StoreError`]; it is to be told again.
    pub async fn tell_idle(&self, layer: &LayerId, is_idle: bool) -> Result<(), StoreError> {
        let key = key::layer(layer);
        let Some(telling) = self.held().get(&key).map(|held| Arc::clone(&held.telling)) else {
            return Ok(());
        };
        let _turn = telling.lock().await;
        let object = match self.held().get_mut(&key) {
            Some(held) if held.is_idle != Some(is_idle) => {
                held.is_idle = None;
                held.object.clone()
            }
            _ => return Ok(()),
        };
        match is_idle {
            true => self.store.put_brief(&idle_of(&object), MARK, PutMode::Create).await?,
            false => self.store.delete(&idle_of(&object)).await?,
        }
        if let Some(held) = self.held().get_mut(&key).filter(|held| held.object == object) {
            held.is_idle = Some(is_idle);
        }
        Ok(())
    }

    /// Lets go of a layer. Whoever uses it several times counts, and calls this at the last.
    ///
    /// # Errors
    /// [`StoreError`]; the store may keep it for this lease until another layer is let go of.
    pub async fn release_layer(&self, layer: &LayerId) -> Result<(), StoreError> {
        let key = key::layer(layer);
        self.late.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        // A removal that failed may still arrive: whoever wants the layer from now on needs a new hold.
        let Some(held) = self.held().remove(&key) else { return Ok(()) };
        let mut doomed = std::mem::take(&mut *self.doomed());
        doomed.push(held);
        while let Some(held) = doomed.pop() {
            if let Err(error) = self.remove_hold(&held).await {
                doomed.push(held);
                self.doomed().append(&mut doomed);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives the lease back with all it holds. What was held is safe no more.
    ///
    /// # Errors
    /// [`StoreError`]; it then runs out by itself.
    pub async fn release(&self) -> Result<(), StoreError> {
        self.renewer.abort();
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let held = std::mem::take(&mut *self.held());
        let doomed = std::mem::take(&mut *self.doomed());
        let let_go = |held: Held| async move { self.remove_hold(&held).await };
        futures_util::stream::iter(held.into_values().chain(doomed))
            .map(let_go)
            .buffer_unordered(collect::REQUESTS_MAX)
            .try_collect::<Vec<()>>()
            .await?;
        self.store.delete(&alive_key(&self.id)).await
    }

    async fn remove_hold(&self, held: &Held) -> Result<(), StoreError> {
        if held.is_idle != Some(false) {
            self.store.delete(&idle_of(&held.object)).await?;
        }
        self.store.delete(&held.object).await
    }

    fn doomed(&self) -> MutexGuard<'_, Vec<Held>> {
        self.doomed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what is held is still safe.
    ///
    /// # Errors
    /// `LeaseLost`.
    pub fn check(&self) -> Result<(), StoreError> {
        let renewed = *self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        if renewed.is_some_and(|at| at.elapsed() < self.ttl) {
            return Ok(());
        }
        Err(StoreError::LeaseLost { lease: self.id.clone() })
    }

    /// Holds an object, there or not, and waits until no collection that began before is about to remove it. Then it stays if it is
    /// there, and what is put there stays. The argument is in [`collect`].
    pub(crate) async fn settle(&self, key: &str) -> Result<(), StoreError> {
        self.check()?;
        let object = {
            let mut all = self.held();
            match all.get(key) {
                Some(held) if held.is_settled => return Ok(()),
                Some(held) => held.object.clone(),
                None => {
                    let object = hold_key(&self.id, &self.store.random()?, key);
                    all.insert(key.to_owned(), Held::new(object.clone()));
                    object
                }
            }
        };
        self.store.put_brief(&object, MARK, PutMode::Create).await?;
        loop {
            match collect::outlook(&self.store, key).await? {
                Outlook::Stays => break,
                Outlook::MayGoLate => {
                    self.late.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned());
                    break;
                }
                Outlook::MayGo => tokio::time::sleep(COLLECTION_POLL).await,
            }
            self.check()?;
        }
        if let Some(held) = self.held().get_mut(key).filter(|held| held.object == object) {
            held.is_settled = true;
        }
        Ok(())
    }
}

impl Lease {
    /// Looks whether what is held and was named by a void list is still there: a removal may have been later than any should be.
    ///
    /// # Errors
    /// `Unavailable` names what is gone: trying again publishes it, or says that it is not there.
    pub async fn look_again(&self) -> Result<(), StoreError> {
        let late = self.late.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for key in late {
            if self.store.head(&key).await?.is_none() {
                return Err(self
                    .store
                    .unavailable(key, "a collection removed it very late: publish it again"));
            }
        }
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewer.abort();
    }
}

async fn keep_alive(
    store: Store,
    id: String,
    alive: Bytes,
    ttl: Duration,
    renewed: Arc<Mutex<Option<Instant>>>,
) {
    loop {
        tokio::time::sleep(ttl / RENEWALS).await;
        let begun = Instant::now();
        match renew(&store, &id, alive.clone()).await {
            Ok(()) => {
                let mut renewed = renewed.lock().unwrap_or_else(PoisonError::into_inner);
                // One that had run out in the meantime stays lost, whatever the store still shows.
                match *renewed {
                    Some(last) if last.elapsed() < ttl => *renewed = Some(begun),
                    _ => *renewed = None,
                }
            }
            Err(StoreError::LeaseLost { .. }) => {
                *renewed.lock().unwrap_or_else(PoisonError::into_inner) = None;
                tracing::warn!(lease = id, "lease lost");
                return;
            }
            Err(error) => {
                tracing::warn!(lease = id, error = &error as &dyn std::error::Error, "lease not renewed")
            }
        }
    }
}

async fn renew(store: &Store, id: &str, alive: Bytes) -> Result<(), StoreError> {
    let key = alive_key(id);
    if store.head(&key).await?.is_none() {
        return Err(StoreError::LeaseLost { lease: id.to_owned() });
    }
    store.put_brief(&key, alive, PutMode::Overwrite).await
}

fn alive_key(id: &str) -> String {
    format!("{}/{id}.alive", key::LEASES)
}

/// What lies in a hold: its name says it all.
const MARK: Bytes = Bytes::from_static(b"x");
const HOLD: &str = ".hold.";
const IDLE: &str = ".idle.";

fn hold_key(id: &str, number: &str, key: &str) -> String {
    format!("{}/{id}{HOLD}{number}.{}", key::LEASES, key.replace('/', "+"))
}

/// Where it is said of a hold that it is idle. No lease's id has a dot in it.
fn idle_of(hold: &str) -> String {
    hold.replacen(HOLD, IDLE, 1)
}

/// One lease as a collector sees it.
pub(crate) struct Seen {
    holder: String,
    has_run_out: bool,
}

/// One hold as a collector sees it.
pub(crate) struct Hold {
    lease: String,
    key: String,
    object: String,
    is_idle: bool,
}

/// All leases.
pub(crate) struct Leases {
    alive: BTreeMap<String, Seen>,
    holds: Vec<Hold>,
    /// What says of holds that they are idle.
    idle: HashSet<String>,
}

impl Leases {
    /// Reads all leases. What is held by a lease that is not seen counts: it may have begun during the listing.
    pub(crate) async fn read(store: &Store) -> Result<Self, StoreError> {
        let found = store.list(key::LEASES, None).await?;
        let now_ms = store.now_ms().await?;
        let mut leases = Self { alive: BTreeMap::new(), holds: Vec::new(), idle: HashSet::new() };
        for object in found {
            let Some(name) = object.key.strip_prefix(key::LEASES).and_then(|key| key.strip_prefix('/'))
            else {
                continue;
            };
            if let Some((lease, hold)) = name.split_once(HOLD) {
                // One without a number is of a version that gave none, and counts.
                let key = hold.split_once('.').map_or(hold, |(_, key)| key).replace('+', "/");
                leases.holds.push(Hold { lease: lease.to_owned(), key, object: object.key, is_idle: false });
            } else if name.contains(IDLE) {
                leases.idle.insert(object.key);
            } else if let Some(id) = name.strip_suffix(".alive").map(str::to_owned)
                && let Some(seen) = read_one(store, &object, now_ms).await?
            {
                leases.alive.insert(id, seen);
            }
        }
        for hold in &mut leases.holds {
            hold.is_idle = leases.idle.contains(&idle_of(&hold.object));
        }
        Ok(leases)
    }

    /// The keys that are held.
    pub(crate) fn held(&self) -> impl Iterator<Item = &str> {
        self.holds.iter().filter(|hold| !self.has_run_out(&hold.lease)).map(|hold| hold.key.as_str())
    }

    fn has_run_out(&self, lease: &str) -> bool {
        self.alive.get(lease).is_some_and(|seen| seen.has_run_out)
    }

    /// Removes what leases that have run out left, and what was held by none that is there. Returns how many objects.
    pub(crate) async fn remove_run_out(&self, store: &Store) -> Result<u64, StoreError> {
        let mut removed = 0;
        for (id, _) in self.alive.iter().filter(|(_, seen)| seen.has_run_out) {
            store.delete(&alive_key(id)).await?;
            removed += 1;
        }
        let holds = self.holds.iter().map(|hold| (hold.lease.as_str(), &hold.object));
        let idle = self.idle.iter().filter_map(|object| Some((lease_in(object)?, object)));
        for (lease, object) in holds.chain(idle) {
            let gone = match self.alive.get(lease) {
                Some(seen) => seen.has_run_out,
                None => store.head(&alive_key(lease)).await?.is_none(),
            };
            if gone {
                store.delete(object).await?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

async fn read_one(store: &Store, object: &Found, now_ms: i64) -> Result<Option<Seen>, StoreError> {
    let seen = match read_brief::<Alive>(store, object, "a lease", RECORD_MAX).await? {
        Brief::Gone => return Ok(None),
        Brief::Unreadable => (holder_in(&object.key).to_owned(), UNREADABLE_MAX.as_millis() as i64),
        Brief::Read(alive) => (alive.holder, (alive.ttl_ms as i64).saturating_mul(2)),
    };
    let (holder, counts_ms) = seen;
    let is_old = |modified_ms: i64| now_ms.saturating_sub(modified_ms) > counts_ms;
    // The listing may have taken long: what looks old is looked at again.
    let has_run_out = is_old(object.modified_ms)
        && store.head(&object.key).await?.is_none_or(|now| is_old(now.modified_ms));
    Ok(Some(Seen { holder, has_run_out }))
}

/// The lease that an object belongs to.
fn lease_in(key: &str) -> Option<&str> {
    key.rsplit('/').next()?.split('.').next()
}

/// Whose lease it is, as far as its key says.
fn holder_in(key: &str) -> &str {
    let name = key.rsplit('/').next().unwrap_or(key);
    name.rsplit_once('-').map_or(name, |(holder, _)| holder)
}

/// What an object that was written without waiting for the disk turned out to be.
pub(crate) enum Brief<T> {
    Gone,
    /// Its bytes are lost or another program's: how old it is says whether it still counts.
    Unreadable,
    Read(T),
}

pub(crate) async fn read_brief<T: DeserializeOwned>(
    store: &Store,
    object: &Found,
    what: &str,
    max: u64,
) -> Result<Brief<T>, StoreError> {
    let problem = match store.get(&object.key, what, max).await {
        Err(StoreError::NotFound { .. }) => return Ok(Brief::Gone),
        Err(StoreError::Damaged { problem, .. }) => problem,
        Err(error) => return Err(error),
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(read) => return Ok(Brief::Read(read)),
            Err(error) => error.to_string(),
        },
    };
    tracing::warn!(object = object.key, problem, "it cannot be read and counts until it is old");
    Ok(Brief::Unreadable)
}

/// Who uses this key, if anybody does.
pub(crate) async fn user_of(store: &Store, key: &str) -> Result<Option<String>, StoreError> {
    let leases = Leases::read(store).await?;
    let is_used = |hold: &&Hold| hold.key == key && !hold.is_idle && !leases.has_run_out(&hold.lease);
    let hold = leases.holds.iter().find(is_used);
    Ok(hold.map(|hold| match leases.alive.get(&hold.lease) {
        Some(seen) => seen.holder.clone(),
        None => hold.lease.clone(),
    }))
}
