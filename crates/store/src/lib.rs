//! The layer store: a directory (local or any shared mount) or an S3-compatible bucket.
//!
//! ```text
//! dsec-store.json                          marks the place as a store: a mount that is gone is not an empty store
//! dsec-store-id                            tells it from every other
//! packs/<aa>/<pack>  blobs/<blob>          content and indexes
//! meta/<metadata>    layers/<layer>        metadata images and manifests
//! files/<layer>                            where the content of its files lies, for layers that are made later
//! names/<kind>/<name>/versions/<version>   written once, never changed
//! names/<kind>/<name>/tags/<tag>@<number>  the highest number counts: a tag moves by making the next one
//! oci/<diff id>  steps/<key>  traces/<blob>   hints: what was converted or built already, what is read first
//! leases/  collect/                        see [`lease`] and [`collect`]
//! ```
//!
//! Everything but a lease's sign of life and the hints is written once and under a name that nobody else gives to other bytes, so two
//! writers never disagree, a listing never misses what is replaced under it, and only one condition is asked of the store: make
//! if absent. A directory does that with a hard link, over NFS too; a bucket with `If-None-Match`.

pub mod collect;
mod connect;
mod error;
mod export;
mod key;
pub mod lease;
mod mark;
mod names;
mod publish;
mod read;
mod store;
mod verify;

pub use collect::{CollectSettings, Collected, Collector};
pub use connect::StoreSettings;
pub use error::StoreError;
pub use lease::Lease;
pub use names::{NameEntry, NamePage, Version};
pub use publish::{PackSender, Publish};
pub use read::COALESCE_GAP;
pub use store::Store;
pub use verify::{Finding, Problem, Tell, Verified};
