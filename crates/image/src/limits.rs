//! Bounds on one import, and what it tells while it runs.

/// What one import may cost. The source is not trusted: each bound ends the import as soon as it
/// is met, before the memory or disk is spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImportLimits {
    /// Bytes of all layers after decompression, and bytes stored for sparse files.
    /// 64 GiB: the largest agent images known are near 40 GiB.
    pub max_bytes: u64,
    /// Entries of all layers, and directories made because an entry needs them. 5 million.
    pub max_files: u64,
    /// Bytes of names, link targets and extended attributes, which are kept in memory. 1 GiB.
    pub max_metadata_bytes: u64,
}

impl Default for ImportLimits {
    fn default() -> Self {
        Self { max_bytes: 64 << 30, max_files: 5_000_000, max_metadata_bytes: 1 << 30 }
    }
}

/// What an import is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImportPhase {
    /// Reading the source and laying out content. Takes nearly all of the time.
    Reading,
    /// Handing what is left to the store, and merging the layers.
    Sealing,
}

/// How far an import is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImportProgress {
    /// What it is doing.
    pub phase: ImportPhase,
    /// Bytes of the source read so far, as they are stored (compressed).
    pub source_bytes: u64,
    /// Bytes of the source to read in all.
    pub source_bytes_total: u64,
    /// Archive entries taken in so far, and directories made because an entry needed them.
    pub files: u64,
}
