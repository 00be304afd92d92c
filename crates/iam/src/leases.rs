//! Leases of quota: what each server may let in. All of one project and resource together are never more than its quota, but for what was in
//! use when the quota was lowered.

use dsec_model::iam::{Counted, ProjectPath, Share};
use sqlx::{AnyConnection, AnyPool, Row};

use crate::error::IamError;
use crate::replicas::ReplicaId;

/// A lease, of something in a project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Whose quota.
    pub project: ProjectPath,
    /// Of what.
    pub counted: Counted,
    /// How much.
    pub amount: u64,
}

/// How often somebody could not get what they needed of something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scarcity {
    /// Whose quota.
    pub project: ProjectPath,
    /// Of what.
    pub counted: Counted,
    /// How often so far.
    pub times: i64,
}

fn unsigned(number: i64) -> u64 {
    number.try_into().unwrap_or(0)
}

fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

/// Waits until nobody else is at these leases: until the transaction ends they wait for this one.
async fn turn(tx: &mut AnyConnection, project: &str, counted: &str, scarce: bool) -> Result<(), IamError> {
    sqlx::query(
        "INSERT INTO quota_turns (project, counted, turns, scarce) VALUES ($1, $2, 1, $3) \
         ON CONFLICT (project, counted) DO UPDATE SET turns = quota_turns.turns + 1, \
         scarce = quota_turns.scarce + excluded.scarce",
    )
    .bind(project.to_owned())
    .bind(counted.to_owned())
    .bind(i64::from(scarce))
    .execute(tx)
    .await?;
    Ok(())
}

/// What a server asks for, and what it knows.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// What the lease is to be; what others have is filled in where it is decided.
    pub share: Share,
    /// The change up to which the server knows everything.
    pub since: i64,
    /// The servers that live.
    pub living: &'a [String],
}

/// What a server has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leased {
    /// What it may let in on its lease.
    pub amount: u64,
    /// What others have.
    pub others: u64,
    /// Every server that lives has said what it uses since the quota was set. Before that nobody gets more than they use.
    pub is_settled: bool,
}

/// Makes a server's lease what it asks for, as far as the quota has it.
pub(crate) async fn set(
    pool: &AnyPool,
    me: &ReplicaId,
    project: &ProjectPath,
    counted: Counted,
    Ask { share, since, living }: Ask<'_>,
) -> Result<Leased, IamError> {
    let (path, what) = (project.as_str().to_owned(), counted.to_string());
    let mut tx = pool.begin().await?;
    turn(&mut tx, &path, &what, false).await?;
    let set = sqlx::query("SELECT version FROM projects WHERE path = $1")
        .bind(path.clone())
        .fetch_optional(&mut *tx)
        .await?
        .map_or(Ok(0), |row| row.try_get::<i64, _>("version"))?;
    let rows =
        sqlx::query("SELECT replica, amount, since FROM quota_leases WHERE project = $1 AND counted = $2")
            .bind(path.clone())
            .bind(what.clone())
            .fetch_all(&mut *tx)
            .await?;
    let (mut others, mut know) = (0_u64, vec![me.as_str().to_owned()]);
    for row in rows {
        let replica: String = row.try_get("replica")?;
        if replica == me.as_str() {
            continue;
        }
        others = others.saturating_add(unsigned(row.try_get("amount")?));
        if row.try_get::<i64, _>("since")? >= set {
            know.push(replica);
        }
    }
    let is_settled = since >= set && living.iter().all(|id| know.contains(id));
    let share = match is_settled {
        true => Share { others, ..share },
        false => Share { others, need: 0, is_scarce: true, ..share },
    };
    let amount = share.lease();
    sqlx::query(
        "INSERT INTO quota_leases (project, counted, replica, amount, since) VALUES ($1, $2, $3, $4, $5) \
         ON CONFLICT (project, counted, replica) DO UPDATE SET amount = excluded.amount, since = excluded.since",
    )
    .bind(path)
    .bind(what)
    .bind(me.as_str().to_owned())
    .bind(signed(amount))
    .bind(since)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Leased { amount: share.usable(), others, is_settled })
}

/// Asks others to give back what they do not use.
pub(crate) async fn ask_back(
    pool: &AnyPool,
    project: &ProjectPath,
    counted: Counted,
) -> Result<(), IamError> {
    let mut tx = pool.begin().await?;
    turn(&mut tx, project.as_str(), &counted.to_string(), true).await?;
    tx.commit().await?;
    Ok(())
}

/// What was asked back so far.
pub(crate) async fn scarce(pool: &AnyPool) -> Result<Vec<Scarcity>, IamError> {
    let rows = sqlx::query("SELECT project, counted, scarce FROM quota_turns WHERE scarce > 0")
        .fetch_all(pool)
        .await?;
    let mut found = Vec::new();
    for row in rows {
        let (project, counted): (String, String) = (row.try_get("project")?, row.try_get("counted")?);
        if let (Ok(project), Ok(counted)) = (project.parse(), counted.parse()) {
            found.push(Scarcity { project, counted, times: row.try_get("scarce")? });
        }
    }
    Ok(found)
}

/// Becomes the heir of a server that is gone: its leases are this one's from now on. None: another was faster.
pub(crate) async fn inherit(
    pool: &AnyPool,
    me: &ReplicaId,
    gone: &str,
) -> Result<Option<Vec<Lease>>, IamError> {
    let mut tx = pool.begin().await?;
    let done = sqlx::query("UPDATE replicas SET heir = $1 WHERE id = $2 AND heir IS NULL")
        .bind(me.as_str().to_owned())
        .bind(gone.to_owned())
        .execute(&mut *tx)
        .await?;
    if done.rows_affected() == 0 {
        return Ok(None);
    }
    let rows = sqlx::query(
        "SELECT project, counted, amount FROM quota_leases WHERE replica = $1 ORDER BY project, counted",
    )
    .bind(gone.to_owned())
    .fetch_all(&mut *tx)
    .await?;
    let mut leases = Vec::new();
    for row in rows {
        let (project, counted): (String, String) = (row.try_get("project")?, row.try_get("counted")?);
        let amount: i64 = row.try_get("amount")?;
        turn(&mut tx, &project, &counted, false).await?;
        sqlx::query(
            "INSERT INTO quota_leases (project, counted, replica, amount, since) VALUES ($1, $2, $3, $4, 0) \
             ON CONFLICT (project, counted, replica) DO UPDATE SET amount = quota_leases.amount + excluded.amount",
        )
        .bind(project.clone())
        .bind(counted.clone())
        .bind(me.as_str().to_owned())
        .bind(amount)
        .execute(&mut *tx)
        .await?;
        if let (Ok(project), Ok(counted)) = (project.parse(), counted.parse()) {
            leases.push(Lease { project, counted, amount: unsigned(amount) });
        }
    }
    sqlx::query("DELETE FROM quota_leases WHERE replica = $1")
        .bind(gone.to_owned())
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(Some(leases))
}
