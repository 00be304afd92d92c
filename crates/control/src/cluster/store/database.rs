//! Texts of the servers' database.

use std::path::Path;
use std::sync::Arc;

use dsec_iam::Documents;
use dsec_pki::AuthorityPem;
use serde::{Deserialize, Serialize};

use super::{Change, ClusterStore, FileStore, StoreError, Storing};
use crate::cluster::Known;

/// Names of the texts.
const AUTHORITY: &str = "cluster/authority";
const KNOWN: &str = "cluster/known";

/// Keeps what a cluster knows for all servers of a database.
pub struct DatabaseStore {
    documents: Documents,
}

/// An authority as it lies in the database. Whoever reads that can speak for every node.
#[derive(Serialize, Deserialize)]
struct AuthorityText {
    certificate: String,
    key: String,
}

fn unreadable(name: &str) -> impl FnOnce(serde_json::Error) -> StoreError {
    move |source| StoreError::Parse { place: format!("{name} in the database"), source: Arc::new(source) }
}

fn text_of(AuthorityPem { certificate, key }: AuthorityPem) -> Result<String, StoreError> {
    serde_json::to_string(&AuthorityText { certificate, key }).map_err(unreadable(AUTHORITY))
}

fn parse(text: Option<&str>) -> Result<Known, StoreError> {
    text.map_or_else(|| Ok(Known::default()), |text| serde_json::from_str(text).map_err(unreadable(KNOWN)))
}

impl DatabaseStore {
    /// A store among these texts; nothing is made yet.
    pub fn new(documents: Documents) -> Self {
        Self { documents }
    }

    /// Takes over what one server kept in a directory before it had such a database. Where the database has a cluster
    /// already, that one counts.
    ///
    /// # Errors
    /// Either cannot be read or written.
    pub async fn take_over(&self, dir: &Path) -> Result<(), StoreError> {
        let files = FileStore::new(dir);
        let Some(authority) = files.authority().await? else { return Ok(()) };
        let earlier = files.read().await?;
        // The nodes first: where there is an authority, they are known.
        let turn = self.documents.turn(AUTHORITY).await?;
        if turn.body().is_some() {
            return Ok(());
        }
        self.change(Box::new(move |known| *known = earlier)).await?;
        turn.write(text_of(authority)?).await?;
        tracing::info!(dir = %dir.display(), "the cluster has moved into the database");
        Ok(())
    }
}

impl ClusterStore for DatabaseStore {
    fn authority(&self) -> Storing<'_, Option<AuthorityPem>> {
        Box::pin(async {
            let Some(text) = self.documents.read(AUTHORITY).await? else { return Ok(None) };
            let AuthorityText { certificate, key } =
                serde_json::from_str(&text).map_err(unreadable(AUTHORITY))?;
            Ok(Some(AuthorityPem { certificate, key }))
        })
    }

    fn found(&self, made: AuthorityPem) -> Storing<'_, bool> {
        Box::pin(async move {
            let turn = self.documents.turn(AUTHORITY).await?;
            if turn.body().is_some() {
                return Ok(false);
            }
            turn.write(text_of(made)?).await?;
            Ok(true)
        })
    }

    fn read(&self) -> Storing<'_, Known> {
        Box::pin(async { parse(self.documents.read(KNOWN).await?.as_deref()) })
    }

    fn change(&self, change: Change) -> Storing<'_, Known> {
        Box::pin(async move {
            let turn = self.documents.turn(KNOWN).await?;
            let before = parse(turn.body())?;
            let mut known = before.clone();
            change(&mut known);
            if known != before {
                turn.write(serde_json::to_string(&known).map_err(unreadable(KNOWN))?).await?;
            }
            Ok(known)
        })
    }

    fn version(&self) -> Storing<'_, String> {
        Box::pin(async { Ok(self.documents.version(KNOWN).await?.to_string()) })
    }
}
