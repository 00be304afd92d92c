//! Room for content: layers that nobody uses stay mounted for the next sandbox, and what is mounted directly is never evicted. When
//! the cache or the disk gets tight, the longest idle are let go of, so that their content may go.

use std::time::Duration;

use dsec_fill::protocol::Room;
use dsec_image::layer::LayerId;
use tokio::time::timeout;

use super::Layers;
use super::work::{RESERVE, free_bytes};

/// How long the fill worker is asked; one that is being replaced answers the next time.
const ASK_MAX: Duration = Duration::from_secs(1);
/// The cache is full from this part of its budget on: eviction leaves a little less.
const FULL_PERCENT: u64 = 85;
/// Of a full cache, what must be free to go: with less, what is read now and what was read just before push each other out.
const MOVING_PERCENT: u64 = 25;
/// Disk that idle layers must leave: twice what uploads and imports must, which are refused below it.
const DISK_MIN: u64 = 2 * RESERVE;

impl Layers {
    /// Lets go of idle layers, the longest idle first, for as long as content has no room. Called now and then.
    pub async fn make_room(&self) {
        let mut idle = self.longest_idle().into_iter();
        loop {
            let (is_cache, is_disk) = (self.is_cache_tight().await, self.is_disk_tight());
            if !is_cache && !is_disk {
                return;
            }
            let Some(id) = idle.next() else { return };
            if !is_disk && !self.may_keep_content(&id) {
                continue;
            }
            tracing::info!(layer = %id, cache = is_cache, disk = is_disk, "an idle layer is let go of for room");
            self.let_go(&id).await;
            if is_disk {
                self.evict(&id).await;
            }
        }
    }

    /// Whether the layer may have content mounted that is therefore not evicted.
    fn may_keep_content(&self, id: &LayerId) -> bool {
        let slot = self.slot(id);
        // Of a layer of an earlier edge it is not known.
        let may =
            slot.try_lock().map_or(true, |here| here.as_ref().is_none_or(|ready| ready.has_direct_content()));
        self.drop_slot(id, &slot);
        may
    }

    async fn is_cache_tight(&self) -> bool {
        matches!(timeout(ASK_MAX, self.content.room()).await, Ok(Ok(room)) if is_tight(&room))
    }

    fn is_disk_tight(&self) -> bool {
        free_bytes(&self.dir).is_ok_and(|free| free < DISK_MIN)
    }

    /// Takes out content that no layer here stands on any more: the cache has room, and so nobody else would.
    async fn evict(&self, id: &LayerId) {
        let Ok(manifest) = self.manifest(id).await else { return };
        for blob in manifest.blobs.iter().filter(|blob| !self.blobs.is_used(&blob.id)) {
            if let Err(error) = self.content.evict(blob.id).await {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(blob = %blob.id, error, "content stays on a full disk");
            }
        }
    }
}

/// Whether the cache is full, and of too much that may not go.
fn is_tight(room: &Room) -> bool {
    let part = |percent| room.budget_bytes / 100 * percent;
    room.used_bytes >= part(FULL_PERCENT)
        && room.used_bytes.saturating_sub(room.kept_bytes) < part(MOVING_PERCENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_tight_when_it_is_full_of_what_may_not_go() {
        let room = |used_bytes, kept_bytes| Room { budget_bytes: 1000, used_bytes, kept_bytes };
        assert!(!is_tight(&room(700, 700)), "it has room");
        assert!(!is_tight(&room(1000, 500)), "what is old goes");
        assert!(is_tight(&room(1000, 800)));
    }
}
