//! The servers that share a database, and what they know of it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sqlx::{AnyPool, Row};

use crate::error::IamError;
use crate::secret;

/// How long a server may be silent before it counts as gone.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// The name of one run of one server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(String);

impl ReplicaId {
    pub(crate) fn new() -> Result<Self, IamError> {
        secret::id('c').map(Self)
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A server, as its row says and as this one has seen it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    /// Its name.
    pub id: String,
    /// It does not live any more.
    pub is_gone: bool,
    /// The change up to which it knows everything.
    pub seen: i64,
    /// Who answers for what is charged to it, once it is gone.
    pub heir: Option<String>,
}

/// When each server was last seen to do something, by this one's clock.
#[derive(Debug, Default)]
pub(crate) struct Pulses {
    seen: Mutex<HashMap<String, (i64, Instant)>>,
}

impl Pulses {
    fn is_gone(&self, id: &str, beat: i64, now: Instant) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, at) = seen.entry(id.to_owned()).or_insert((beat, now));
        if *last != beat {
            (*last, *at) = (beat, now);
        }
        now.duration_since(*at) > GONE_AFTER
    }

    fn forget_others(&self, known: &[Replica]) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|id, _| known.iter().any(|replica| replica.id == *id));
    }
}

pub(crate) async fn register(pool: &AnyPool, id: &ReplicaId, seen: i64) -> Result<(), IamError> {
    sqlx::query("INSERT INTO replicas (id, beat, seen, ended, heir) VALUES ($1, 0, $2, 0, NULL)")
        .bind(id.0.clone())
        .bind(seen)
        .execute(pool)
        .await?;
    Ok(())
}

/// Shows that it lives. Returns whether others still believe that it does.
pub(crate) async fn beat(pool: &AnyPool, id: &ReplicaId, seen: i64) -> Result<bool, IamError> {
    let done = sqlx::query("UPDATE replicas SET beat = beat + 1, seen = $2 WHERE id = $1 AND heir IS NULL")
        .bind(id.0.clone())
        .bind(seen)
        .execute(pool)
        .await?;
    Ok(done.rows_affected() > 0)
}

pub(crate) async fn end(pool: &AnyPool, id: &ReplicaId) -> Result<(), IamError> {
    sqlx::query("UPDATE replicas SET ended = 1 WHERE id = $1").bind(id.0.clone()).execute(pool).await?;
    Ok(())
}

/// All of them. `me` is not gone, and all others are where nobody else can use the database.
pub(crate) async fn all(
    pool: &AnyPool,
    pulses: &Pulses,
    me: &ReplicaId,
    is_alone: bool,
) -> Result<Vec<Replica>, IamError> {
    let now = Instant::now();
    let mut replicas = Vec::new();
    for row in sqlx::query("SELECT id, beat, seen, ended, heir FROM replicas").fetch_all(pool).await? {
        let id: String = row.try_get("id")?;
        let heir: Option<String> = row.try_get("heir")?;
        let ended = row.try_get::<i64, _>("ended")? != 0;
        let is_silent = pulses.is_gone(&id, row.try_get("beat")?, now);
        let is_gone = id != me.0 && (is_alone || ended || heir.is_some() || is_silent);
        replicas.push(Replica { id, is_gone, seen: row.try_get("seen")?, heir });
    }
    pulses.forget_others(&replicas);
    Ok(replicas)
}

/// Forgets one that is gone and that nothing is charged to any more.
pub(crate) async fn forget(pool: &AnyPool, id: &str) -> Result<(), IamError> {
    sqlx::query("DELETE FROM replicas WHERE id = $1 AND heir IS NOT NULL")
        .bind(id.to_owned())
        .execute(pool)
        .await?;
    Ok(())
}
