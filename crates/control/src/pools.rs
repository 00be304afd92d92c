//! Pools of nodes: which of them takes over when the others are full, what was brought there ahead of time, and what is asked for.
//!
//! ```text
//! create ──► route: its layers all in `synced`? the homes fuller than they should be? ──► pools to try, in order
//!    │ answered
//!    └─────► accesses ── every few seconds ──► database ──► sync (api/pools): what to bring there ──► database ──► synced
//! ```
//!
//! Nothing here asks anybody while a create waits. See `docs/adr/017-bursting.md`.

mod accesses;
mod synced;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_iam::{Accessed, IamError, PoolSet};
use dsec_model::PoolName;
use dsec_model::placement::{Burst, Pools as Allowed};
use dsec_proto::rest::ACCESSES_KEPT_DAYS;

use crate::app::App;
use crate::create::Needs;
use accesses::Accesses;
use synced::Synced;

/// How often the database is asked whether something else was brought to the pool.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How often accesses are written: those since are lost when a server ends.
const WRITE_EVERY: Duration = Duration::from_secs(10);
/// How often it is looked whether names still stand for what was brought: until then a sandbox of a moved name may run in the pool, and
/// fetch what it reads.
const NAMES_EVERY: Duration = Duration::from_secs(30);
/// How often accesses that are too old are forgotten.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);
const DAY_MS: u64 = 24 * 3600 * 1000;

/// The pools that a create may go to, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// Any: none takes over from the others.
    Any,
    /// The one that it asks for.
    Asked(PoolName),
    /// The homes.
    Home(PoolName),
    /// The homes, and what takes over from them if they have no room.
    HomeFirst(PoolName),
    /// What takes over from the homes, and they if it has no room.
    OverflowFirst(PoolName),
}

impl Route {
    /// The pools of a leg; none: there is no such leg.
    pub fn leg(&self, leg: usize) -> Option<Allowed<'_>> {
        match (self, leg) {
            (Self::Any, 0) => Some(Allowed::All),
            (Self::Asked(pool), 0) | (Self::OverflowFirst(pool), 0) | (Self::HomeFirst(pool), 1) => {
                Some(Allowed::Only(pool))
            }
            (Self::Home(pool), 0) | (Self::HomeFirst(pool), 0) | (Self::OverflowFirst(pool), 1) => {
                Some(Allowed::AllBut(pool))
            }
            _ => None,
        }
    }

    /// All of them.
    pub fn all(&self) -> Allowed<'_> {
        match self {
            Self::Any | Self::HomeFirst(_) | Self::OverflowFirst(_) => Allowed::All,
            Self::Asked(pool) => Allowed::Only(pool),
            Self::Home(pool) => Allowed::AllBut(pool),
        }
    }

    /// Whether a leg is that of the pool which takes over.
    pub fn is_diverted(&self, leg: usize) -> bool {
        matches!((self, leg), (Self::OverflowFirst(_), 0) | (Self::HomeFirst(_), 1))
    }
}

/// What became of creates that did not ask for a pool.
#[derive(Debug, Default)]
struct Counts {
    asked: AtomicU64,
    eligible: AtomicU64,
    diverted: AtomicU64,
    refused: AtomicU64,
}

/// What this server knows of pools.
#[derive(Debug, Default)]
pub struct Pools {
    burst: Option<Burst>,
    synced: RwLock<Arc<Synced>>,
    accesses: Accesses,
    counts: Counts,
}

impl Pools {
    /// With the pool that takes over, where there is one.
    pub fn new(burst: Option<Burst>) -> Self {
        Self { burst, ..Self::default() }
    }

    /// The pool that takes over, and when.
    pub fn burst(&self) -> Option<&Burst> {
        self.burst.as_ref()
    }

    fn synced(&self) -> Arc<Synced> {
        Arc::clone(&self.synced.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether all that a sandbox is made of is in the pool that takes over. `layers` as [`Needs::layers`] has them.
    pub fn has_all(&self, layers: &str) -> bool {
        self.synced().has_all(layers)
    }

    /// Where a create may go. `is_again`: its caller may have sent it before and does not say, so that it has to meet the same node.
    pub fn route(&self, app: &App, needs: &Needs, is_again: bool) -> Route {
        let Some(burst) = &self.burst else {
            return needs.pool().map_or(Route::Any, Route::Asked);
        };
        if let Some(pool) = needs.pool() {
            return Route::Asked(pool);
        }
        self.counts.asked.fetch_add(1, Ordering::Relaxed);
        if !self.has_all(needs.layers()) {
            return Route::Home(burst.pool.clone());
        }
        self.counts.eligible.fetch_add(1, Ordering::Relaxed);
        if is_again {
            return Route::Home(burst.pool.clone());
        }
        match app.nodes.watched.diverts(burst) {
            true => Route::OverflowFirst(burst.pool.clone()),
            false => Route::HomeFirst(burst.pool.clone()),
        }
    }

    /// A node of the pool that takes over took one.
    pub fn diverted(&self) {
        self.counts.diverted.fetch_add(1, Ordering::Relaxed);
    }

    /// No node of it did.
    pub fn refused(&self) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// A sandbox of these layers was made.
    pub fn accessed(&self, needs: &Needs) {
        if self.burst.is_some() {
            self.accesses.add(needs.layers());
        }
    }

    /// Keeps what is known of the pool up to date, and writes down what was asked for, until it is dropped.
    pub async fn keep(&self, app: &App) {
        let Some(burst) = &self.burst else { return std::future::pending().await };
        let (mut written, mut named, mut swept) = (Instant::now(), None::<Instant>, None::<Instant>);
        loop {
            let step = async {
                if self.refresh(app, &burst.pool).await? {
                    named = None;
                }
                if written.elapsed() >= WRITE_EVERY {
                    self.write(app).await?;
                    written = Instant::now();
                }
                if swept.is_none_or(|at| at.elapsed() >= SWEEP_EVERY) {
                    app.iam.forget_accesses(today().saturating_sub(ACCESSES_KEPT_DAYS)).await?;
                    swept = Some(Instant::now());
                }
                Ok::<(), IamError>(())
            };
            if let Err(error) = step.await {
                tracing::warn!(%error, "what is known of the pool is not kept up to date");
            }
            if named.is_none_or(|at| at.elapsed() >= NAMES_EVERY) {
                self.look_at_names(app).await;
                named = Some(Instant::now());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Hears what others brought to the pool. Returns whether there was anything.
    async fn refresh(&self, app: &App, pool: &PoolName) -> Result<bool, IamError> {
        let known = self.synced().version();
        let Some(set) = app.iam.pool_set(pool, known).await? else { return Ok(false) };
        self.set(Synced::new(set));
        Ok(true)
    }

    /// The same at once, for who has just changed it here.
    ///
    /// # Errors
    /// The database's.
    pub async fn hear(&self, app: &App, pool: &PoolName) -> Result<(), IamError> {
        if self.burst.as_ref().is_some_and(|burst| burst.pool == *pool) {
            self.refresh(app, pool).await?;
        }
        Ok(())
    }

    /// Takes it down, unless a later one was heard of meanwhile.
    fn set(&self, synced: Synced) {
        let mut known = self.synced.write().unwrap_or_else(PoisonError::into_inner);
        if synced.version() >= known.version() {
            *known = Arc::new(synced);
        }
    }

    /// Leaves out names that stand for something else by now. What cannot be looked at stays as it was.
    async fn look_at_names(&self, app: &App) {
        let synced = self.synced();
        if let Some(current) = synced.looked_at(app).await {
            self.set(current);
        }
    }

    /// Writes down what was asked for here.
    ///
    /// # Errors
    /// The database's: it is written the next time.
    pub async fn write(&self, app: &App) -> Result<(), IamError> {
        let taken = self.accesses.take();
        if taken.is_empty() {
            return Ok(());
        }
        let now_ms = now_ms();
        let rows = taken
            .iter()
            .map(|(layers, count)| Accessed { layers: layers.clone(), count: *count, last_ms: now_ms })
            .collect();
        let written = app.iam.add_accesses(now_ms / DAY_MS, rows).await;
        if written.is_err() {
            self.accesses.put_back(taken);
        }
        written
    }

    /// What was brought to a pool.
    ///
    /// # Errors
    /// The database's.
    pub async fn set_of(&self, app: &App, pool: &PoolName) -> Result<PoolSet, IamError> {
        // No pool has a version of less than 1.
        Ok(app.iam.pool_set(pool, -1).await?.unwrap_or_default())
    }

    /// How many of these creates a pool could take, with what was brought to it.
    pub fn covered(&self, pool: &PoolName, set: &PoolSet, accesses: &[Accessed]) -> u64 {
        let is_ours = self.burst.as_ref().is_some_and(|burst| burst.pool == *pool);
        // Of the pool that takes over it is known which names have moved.
        let synced = if is_ours { self.synced() } else { Arc::new(Synced::new(set.clone())) };
        accesses
            .iter()
            .filter(|accessed| synced.has_all(&accessed.layers))
            .map(|accessed| accessed.count)
            .sum()
    }

    /// Counters, and how full each pool is, in Prometheus' text format.
    pub fn render(&self, app: &App) -> String {
        let mut text = String::new();
        let help = "Share of a pool's memory or sandboxes that is in use, the greater of them.";
        let _ = writeln!(text, "# HELP dsec_pool_utilisation {help}\n# TYPE dsec_pool_utilisation gauge");
        for pool in app.nodes.watched.pools() {
            let used = pool.filled.utilisation();
            let _ = writeln!(text, "dsec_pool_utilisation{{pool=\"{}\"}} {used}", pool.name);
        }
        let Some(burst) = &self.burst else { return text };
        let Counts { asked, eligible, diverted, refused } = &self.counts;
        let all = [
            ("creates", "Creates that did not ask for a pool.", asked),
            ("eligible", "Of these, those whose layers are all in the pool that takes over.", eligible),
            ("diverted", "Creates that the pool took over.", diverted),
            ("refused", "Creates that it was to take over and no node of it took.", refused),
            ("unrecorded", "Creates whose layers were too many to be recorded.", self.accesses.lost()),
        ];
        for (name, help, count) in all {
            let (name, count) = (format!("dsec_burst_{name}_total"), count.load(Ordering::Relaxed));
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
            let _ = writeln!(text, "{name}{{pool=\"{}\"}} {count}", burst.pool);
        }
        text
    }
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Days since 1970.
pub fn today() -> u64 {
    now_ms() / DAY_MS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_leg_of_a_route_has_pools_of_its_own() {
        let cloud: PoolName = "cloud".parse().unwrap();
        let (only, but) = (Allowed::Only(&cloud), Allowed::AllBut(&cloud));
        for (route, legs) in [
            (Route::Any, vec![Allowed::All]),
            (Route::Asked(cloud.clone()), vec![only]),
            (Route::Home(cloud.clone()), vec![but]),
            (Route::HomeFirst(cloud.clone()), vec![but, only]),
            (Route::OverflowFirst(cloud.clone()), vec![only, but]),
        ] {
            let found: Vec<_> = (0..).map_while(|leg| route.leg(leg)).collect();
            assert_eq!(found, legs, "{route:?}");
            for (leg, pools) in legs.iter().enumerate() {
                let diverted = *pools == only && !matches!(route, Route::Asked(_));
                assert_eq!(route.is_diverted(leg), diverted, "{route:?}");
            }
        }
    }
}
