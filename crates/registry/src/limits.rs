//! Bounds on one pull. The registry is not trusted.

use std::time::Duration;

/// What one pull may cost, and how patient it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a manifest or index. Registries take no larger ones than 4 MiB.
    pub document_bytes: u64,
    /// Bytes of an image's configuration. 8 MiB, as in archives.
    pub config_bytes: u64,
    /// Layers of an image, as in archives: overlayfs and docker stop at 127, flattened images have had more.
    pub layers: usize,
    /// Bytes of all layers as they are stored. 64 GiB, which is also the most they may unpack to.
    pub total_bytes: u64,
    /// Bytes that count as progress.
    pub progress_bytes: u64,
    /// How long a server may take for so many bytes, or for an answer's head.
    pub stall: Duration,
    /// Tries in a row without progress.
    pub tries: u32,
    /// Pause after the first of them; it doubles with each.
    pub pause: Duration,
    /// Longest pause, also of those that a server asks for.
    pub pause_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            document_bytes: 4 << 20,
            config_bytes: 8 << 20,
            layers: 1024,
            total_bytes: 64 << 30,
            progress_bytes: 64 << 10,
            stall: Duration::from_secs(60),
            tries: 5,
            pause: Duration::from_millis(250),
            pause_max: Duration::from_secs(20),
        }
    }
}
