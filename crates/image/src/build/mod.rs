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
mod glob;
mod layer;
mod layout;
mod merge;
mod pack;
mod previous;
mod redirect;
mod rules;
mod shadow;
mod tar;
mod walk;

pub use blob::{BlobWriter, BuiltBlob};
pub use export::oci_form;
pub use files::{Donors, FileIndex, FileIndexError, FilePlace};
pub use glob::{Glob, GlobError};
pub use layer::{
    ArchiveSource, BuiltLayer, LayerSource, PackedUpper, Upper, UpperReader, Workshop, from_directory,
    look_for_denied,
};
pub use layout::OciLayout;
pub use merge::{Hidden, MergeError, merge};
pub use pack::PackSink;
pub use previous::{Previous, PreviousError};
pub use redirect::{has_redirects, resolve_redirects};
pub use rules::{ANSWERS, Denied, Effect, LeftOut, RULES_MAX, Rules, add_up, sift};
pub use shadow::{Shadowed, mark_whiteouts, shadowed};
pub use tar::BlobReader;
