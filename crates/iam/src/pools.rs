//! What creates asked for, and which of it was brought to pools of nodes ahead of time. Layers are told by kind and name, as
//! `base/debian:12`.

use dsec_model::PoolName;
use sqlx::{AnyConnection, Row};

use crate::changes::Iam;
use crate::error::IamError;

/// Rows of one transaction: others wait no longer than it takes to write them.
const ROWS_MAX: usize = 1000;

/// How often sandboxes of the same layers were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accessed {
    /// Their layers, in order, with a space between them.
    pub layers: String,
    /// How often.
    pub count: u64,
    /// The last time, Unix ms.
    pub last_ms: u64,
}

/// A layer that was brought to a pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolLayer {
    /// Its kind and name.
    pub layer: String,
    /// The layer that the name stood for then.
    pub digest: String,
}

/// What was brought to a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolSet {
    /// Another one after each change.
    pub version: i64,
    /// Bytes of its content, each once.
    pub bytes: u64,
    /// Bytes that it may have.
    pub budget: u64,
    /// When a sync last ended, Unix ms; 0: none has.
    pub synced_ms: u64,
    /// Its layers, in order.
    pub layers: Vec<PoolLayer>,
}

/// A change of what was brought to a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolChange {
    /// Layers that are not in it any more.
    pub dropped: Vec<String>,
    /// Layers that are.
    pub added: Vec<PoolLayer>,
    /// Bytes of all its content then.
    pub bytes: u64,
    /// The budget that it was chosen within.
    pub budget: u64,
    /// The sync is over; it is this time, Unix ms.
    pub ended_ms: Option<u64>,
}

fn unsigned(number: i64) -> u64 {
    number.try_into().unwrap_or(0)
}

fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

impl Iam {
    /// Adds what was asked for on a day, in days since 1970.
    ///
    /// # Errors
    /// The database's; some of it may be in.
    pub async fn add_accesses(&self, day: u64, mut accessed: Vec<Accessed>) -> Result<(), IamError> {
        // In one order, so that no two servers wait for each other's rows.
        accessed.sort_unstable_by(|a, b| a.layers.cmp(&b.layers));
        for rows in accessed.chunks(ROWS_MAX) {
            let mut tx = self.db.pool.begin().await?;
            for Accessed { layers, count, last_ms } in rows {
                sqlx::query(
                    "INSERT INTO pool_accesses (day, layers, count, last_ms) VALUES ($1, $2, $3, $4) \
                     ON CONFLICT (day, layers) DO UPDATE SET count = pool_accesses.count + excluded.count, \
                     last_ms = excluded.last_ms",
                )
                .bind(signed(day))
                .bind(layers.clone())
                .bind(signed(*count))
                .bind(signed(*last_ms))
                .execute(&mut *tx)
                .await?;
            }
            tx.commit().await?;
        }
        Ok(())
    }

    /// All that was asked for from a day on, in order of its layers.
    ///
    /// # Errors
    /// The database's.
    pub async fn accesses(&self, since_day: u64) -> Result<Vec<Accessed>, IamError> {
        let rows = sqlx::query(
            "SELECT layers, CAST(SUM(count) AS BIGINT) AS times, MAX(last_ms) AS last_ms FROM pool_accesses \
             WHERE day >= $1 GROUP BY layers",
        )
        .bind(signed(since_day))
        .fetch_all(&self.db.pool)
        .await?;
        let read = |row: &sqlx::any::AnyRow| {
            Ok(Accessed {
                layers: row.try_get("layers")?,
                count: unsigned(row.try_get("times")?),
                last_ms: unsigned(row.try_get("last_ms")?),
            })
        };
        let mut accessed: Vec<Accessed> = rows.iter().map(read).collect::<Result<_, IamError>>()?;
        // A database sorts as its locale does.
        accessed.sort_unstable_by(|a, b| a.layers.cmp(&b.layers));
        Ok(accessed)
    }

    /// Forgets what was asked for before a day.
    ///
    /// # Errors
    /// The database's.
    pub async fn forget_accesses(&self, before_day: u64) -> Result<(), IamError> {
        sqlx::query("DELETE FROM pool_accesses WHERE day < $1")
            .bind(signed(before_day))
            .execute(&self.db.pool)
            .await?;
        Ok(())
    }

    /// What was brought to a pool. None: it is what it was at `known`.
    ///
    /// # Errors
    /// The database's.
    pub async fn pool_set(&self, pool: &PoolName, known: i64) -> Result<Option<PoolSet>, IamError> {
        let mut tx = self.db.pool.begin().await?;
        let row = sqlx::query("SELECT version, bytes, budget, synced_ms FROM pools WHERE name = $1")
            .bind(pool.as_str().to_owned())
            .fetch_optional(&mut *tx)
            .await?;
        let Some(row) = row else {
            return Ok((known != 0).then(PoolSet::default));
        };
        let version: i64 = row.try_get("version")?;
        if version == known {
            return Ok(None);
        }
        let layers = layers_of(&mut tx, pool).await?;
        Ok(Some(PoolSet {
            version,
            bytes: unsigned(row.try_get("bytes")?),
            budget: unsigned(row.try_get("budget")?),
            synced_ms: unsigned(row.try_get("synced_ms")?),
            layers,
        }))
    }

    /// Begins a sync of a pool. Returns its turn: an earlier one changes nothing any more.
    ///
    /// # Errors
    /// The database's.
    pub async fn begin_pool_sync(&self, pool: &PoolName) -> Result<i64, IamError> {
        let row = sqlx::query(
            "INSERT INTO pools (name, turn, version, bytes, budget, synced_ms) VALUES ($1, 1, 1, 0, 0, 0) \
             ON CONFLICT (name) DO UPDATE SET turn = pools.turn + 1 RETURNING turn",
        )
        .bind(pool.as_str().to_owned())
        .fetch_one(&self.db.pool)
        .await?;
        Ok(row.try_get("turn")?)
    }

    /// Changes what was brought to a pool, as the sync of a turn.
    ///
    /// # Errors
    /// Another sync has begun since, or the database's: nothing is changed.
    pub async fn change_pool(&self, pool: &PoolName, turn: i64, change: &PoolChange) -> Result<(), IamError> {
        let name = pool.as_str().to_owned();
        let mut tx = self.db.pool.begin().await?;
        let done = sqlx::query(
            "UPDATE pools SET version = version + 1, bytes = $3, budget = $4, \
             synced_ms = CASE WHEN $5 > 0 THEN $5 ELSE synced_ms END WHERE name = $1 AND turn = $2",
        )
        .bind(name.clone())
        .bind(turn)
        .bind(signed(change.bytes))
        .bind(signed(change.budget))
        .bind(signed(change.ended_ms.unwrap_or(0)))
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() == 0 {
            return Err(IamError::Conflict(format!("another sync of the pool {pool} has begun since")));
        }
        for layer in &change.dropped {
            sqlx::query("DELETE FROM pool_layers WHERE pool = $1 AND layer = $2")
                .bind(name.clone())
                .bind(layer.clone())
                .execute(&mut *tx)
                .await?;
        }
        for PoolLayer { layer, digest } in &change.added {
            sqlx::query(
                "INSERT INTO pool_layers (pool, layer, digest) VALUES ($1, $2, $3) \
                 ON CONFLICT (pool, layer) DO UPDATE SET digest = excluded.digest",
            )
            .bind(name.clone())
            .bind(layer.clone())
            .bind(digest.clone())
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        Ok(())
    }
}

async fn layers_of(tx: &mut AnyConnection, pool: &PoolName) -> Result<Vec<PoolLayer>, IamError> {
    let rows = sqlx::query("SELECT layer, digest FROM pool_layers WHERE pool = $1")
        .bind(pool.as_str().to_owned())
        .fetch_all(tx)
        .await?;
    let read = |row: &sqlx::any::AnyRow| {
        Ok(PoolLayer { layer: row.try_get("layer")?, digest: row.try_get("digest")? })
    };
    let mut layers: Vec<PoolLayer> = rows.iter().map(read).collect::<Result<_, IamError>>()?;
    layers.sort_unstable();
    Ok(layers)
}
