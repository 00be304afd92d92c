//! The database: one file beside the server, or a PostgreSQL that servers share.

use std::borrow::Cow;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AnyPool, ConnectOptions, Executor};

use crate::error::IamError;

/// Connections of one server: changes are few, and leases wait for each other in the database anyway.
const CONNECTIONS: u32 = 8;
/// How long to wait for a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The tables, oldest first.
const MIGRATIONS: [(i64, &str, &str); 3] = [
    (1, "identities", include_str!("../migrations/0001_identities.sql")),
    (2, "pools", include_str!("../migrations/0002_pools.sql")),
    (3, "documents", include_str!("../migrations/0003_documents.sql")),
];

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    pub(crate) pool: AnyPool,
    /// Nobody else uses it: held for as long as it is open.
    lock: Option<File>,
}

impl Database {
    /// Opens it and brings its tables up to date. `url`: `sqlite:PATH` or `postgres://...`.
    ///
    /// # Errors
    /// It cannot be reached, another server uses the file, or a newer version made its tables.
    pub(crate) async fn open(url: &str) -> Result<Self, IamError> {
        static DRIVERS: Once = Once::new();
        DRIVERS.call_once(sqlx::any::install_default_drivers);
        let failed = |message: String| IamError::Open { url: without_password(url), message };
        let file = url.strip_prefix("sqlite:").map(|path| PathBuf::from(path.trim_start_matches("//")));
        let lock = file.as_deref().map(alone).transpose().map_err(&failed)?;
        let options: AnyConnectOptions = match &file {
            Some(path) => format!("sqlite:{}?mode=rwc", path.display()).parse(),
            None => url.parse(),
        }
        .map_err(|error: sqlx::Error| failed(error.to_string()))?;
        let is_file = file.is_some();
        let pool = AnyPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(CONNECT_WITHIN)
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    if is_file {
                        connection.execute("PRAGMA journal_mode = WAL").await?;
                    }
                    Ok(())
                })
            })
            .connect_with(options.disable_statement_logging())
            .await
            .map_err(|error| failed(error.to_string()))?;
        let migrations = MIGRATIONS.map(|(version, name, sql)| {
            Migration::new(version, Cow::Borrowed(name), MigrationType::Simple, Cow::Borrowed(sql), false)
        });
        let migrator = Migrator { migrations: Cow::Owned(migrations.into()), ..Migrator::DEFAULT };
        migrator.run(&pool).await.map_err(|error| failed(error.to_string()))?;
        Ok(Self { pool, lock })
    }

    /// Whether no other server can be using it.
    pub(crate) fn is_ours_alone(&self) -> bool {
        self.lock.is_some()
    }
}

/// Makes the file, for its owner only, and a lock beside it.
fn alone(path: &Path) -> Result<File, String> {
    let open = |path: &Path| {
        File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
    };
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock = open(path).and_then(|_| open(Path::new(&lock_path))).map_err(|error| error.to_string())?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| "another dsec-control uses this file; several need a PostgreSQL".to_owned())?;
    Ok(lock)
}

/// An address as it may be logged.
fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    match rest.rsplit_once('@') {
        Some((user, host)) => {
            format!("{scheme}://{}@{host}", user.split(':').next().unwrap_or_default())
        }
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_told() {
        assert_eq!(without_password("postgres://dsec:s3c@ret@db:5432/x"), "postgres://dsec@db:5432/x");
        assert_eq!(without_password("postgres://db/x"), "postgres://db/x");
        assert_eq!(without_password("sqlite:/var/x.db"), "sqlite:/var/x.db");
    }
}
