//! Texts that servers share, each changed by one of them at a time.

use sqlx::{Any, AnyPool, Row, Transaction};

use crate::changes::Iam;
use crate::error::IamError;

/// Texts of a database, by name.
#[derive(Debug, Clone)]
pub struct Documents {
    pool: AnyPool,
}

impl Iam {
    /// The texts of the database.
    pub fn documents(&self) -> Documents {
        Documents { pool: self.pool().clone() }
    }
}

/// One's turn to change a text. Dropped, it leaves the text as it was.
#[derive(Debug)]
pub struct Turn {
    transaction: Transaction<'static, Any>,
    name: String,
    body: Option<String>,
}

impl Turn {
    /// The text, once there is one.
    pub fn body(&self) -> Option<&str> {
        self.body.as_deref()
    }

    /// Makes it another.
    ///
    /// # Errors
    /// The database's; the text is then the one of before.
    pub async fn write(mut self, body: String) -> Result<(), IamError> {
        sqlx::query("UPDATE documents SET body = $1, version = version + 1 WHERE name = $2")
            .bind(body)
            .bind(self.name)
            .execute(&mut *self.transaction)
            .await?;
        Ok(self.transaction.commit().await?)
    }
}

impl Documents {
    /// A text, once there is one.
    ///
    /// # Errors
    /// The database's.
    pub async fn read(&self, name: &str) -> Result<Option<String>, IamError> {
        let row = sqlx::query("SELECT body FROM documents WHERE name = $1")
            .bind(name.to_owned())
            .fetch_optional(&self.pool)
            .await?;
        Ok(row.map(|row| row.try_get("body")).transpose()?.and_then(written))
    }

    /// How often it was changed.
    ///
    /// # Errors
    /// The database's.
    pub async fn version(&self, name: &str) -> Result<i64, IamError> {
        let row = sqlx::query("SELECT version FROM documents WHERE name = $1")
            .bind(name.to_owned())
            .fetch_optional(&self.pool)
            .await?;
        Ok(row.map(|row| row.try_get("version")).transpose()?.unwrap_or(0))
    }

    /// Waits for whoever is changing it.
    ///
    /// # Errors
    /// The database's.
    pub async fn turn(&self, name: &str) -> Result<Turn, IamError> {
        let name = name.to_owned();
        let mut transaction = self.pool.begin().await?;
        // A row that is written is the writer's until the end of its transaction; so it is written first.
        sqlx::query(
            "INSERT INTO documents (name, version, body) VALUES ($1, 0, '') \
             ON CONFLICT (name) DO UPDATE SET version = documents.version",
        )
        .bind(name.clone())
        .execute(&mut *transaction)
        .await?;
        let row = sqlx::query("SELECT body FROM documents WHERE name = $1")
            .bind(name.clone())
            .fetch_one(&mut *transaction)
            .await?;
        Ok(Turn { body: written(row.try_get("body")?), transaction, name })
    }
}

/// A text that nobody has written yet is empty.
fn written(body: String) -> Option<String> {
    (!body.is_empty()).then_some(body)
}
