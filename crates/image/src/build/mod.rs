//! Making layers: metadata images and blobs from archives and directories, and one layer of many.
//!
//! ```text
//! archive ──► intake ─┐                    ┌─► LayerTree ──► metadata image
//! directory, upper ───┴─► names ───────────┘      ▲ resolve_redirects, merge, oci_form
//!                         content ──► BlobWriter ─┼─► plain file
//!                                       │         └─► packs ──► PackSink
//!                            known? ◄───┴─ FileIndex of donors, Previous pack of the same directory
//! ```
//!
//! [`OciLayout`] is the way out: layers as an image for other tools.

mod attributes;
mod blob;
mod directory;
mod export;
mod files;
mod layer;
mod layout;
mod merge;
mod pack;
mod previous;
mod redirect;
mod tar;
mod walk;

pub use blob::{BlobWriter, BuiltBlob};
pub use export::oci_form;
pub use files::{Donors, FileIndex, FileIndexError, FilePlace};
pub use layer::{ArchiveSource, BuiltLayer, Workshop, from_directory, from_upper};
pub use layout::OciLayout;
pub use merge::{Hidden, MergeError, merge};
pub use pack::PackSink;
pub use previous::{Previous, PreviousError};
pub use redirect::resolve_redirects;
pub use tar::BlobReader;
