//! Who may do what, how much of it, and who did: projects, identities, keys, grants, quotas and the audit log, kept in SQLite or
//! PostgreSQL by the same statements; and beside them what servers have to agree on about pools of nodes.
//!
//! ```text
//! Iam ── change ──► one transaction: raises the version, hears what others did, asks `model::iam`, writes, tells the audit log
//!  │
//!  └─ Book: all of it in memory, read at every request; told anew when the version is another
//! ```
//!
//! Rules are `dsec_model::iam`'s; what a request needs is control's. See `docs/adr/013-identities.md` and `014-quotas.md`.

mod audit;
mod book;
mod changes;
mod db;
mod documents;
mod error;
mod leases;
mod pools;
mod records;
mod replicas;
mod secret;

pub use audit::{AUDIT_PAGE_MAX, AuditEntry, AuditQuery, Denials, Denied};
pub use book::{Book, Caller};
pub use changes::{Changed, Did, Iam, NewKey};
pub use documents::{Documents, Turn};
pub use error::IamError;
pub use leases::{Ask, Lease, Leased, Scarcity};
pub use pools::{Accessed, PoolChange, PoolLayer, PoolSet};
pub use records::{Bounds, GrantRecord, IdentityKind, IdentityRecord, KeyRecord, ProjectRecord};
pub use replicas::{Replica, ReplicaId};
pub use secret::{PREFIX, digest};
