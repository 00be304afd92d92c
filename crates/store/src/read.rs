//! Reading: manifests, metadata, indexes and ranges of packs. What is read whole is checked against its digest; ranges of packs
//! are checked by their groups' digests, by [`Store::group`] or whoever fills a cache.

use std::ops::Range;

use bytes::Bytes;
use dsec_image::build::FileIndex;
use dsec_image::erofs::{BLOCK_SIZE, BlobRef};
use dsec_image::layer::{
    BlobId, BlobIndex, Digest, LayerId, MANIFEST_SIZE_MAX, Manifest, MetadataRef, PackId,
};

use crate::error::StoreError;
use crate::key;
use crate::store::Store;

/// Ranges of one pack that lie no further apart than this are fetched as one: what is fetched for nothing takes less time than a
/// second request.
pub const COALESCE_GAP: u32 = 128 << 10;
const DIGEST_SIZE: usize = 32;
/// Longest index of a blob: one of more than 300 GiB, beyond what any sandbox may write.
pub(crate) const INDEX_SIZE_MAX: u64 = 64 << 20;
/// Longest index of a layer's files: five million of them, as many as an import may have.
pub(crate) const FILES_SIZE_MAX: u64 = 256 << 20;
/// Longest record of first reads.
const TRACE_SIZE_MAX: u64 = 1 << 20;

impl Store {
    /// A layer's manifest.
    ///
    /// # Errors
    /// [`StoreError`]; `Damaged` if its bytes are not what the id says.
    pub async fn manifest(&self, id: &LayerId) -> Result<Manifest, StoreError> {
        let what = format!("layer {id}");
        let bytes = self.get(&key::layer(id), &what, MANIFEST_SIZE_MAX as u64).await?;
        check(&what, &bytes, &id.0)?;
        Manifest::decode(&bytes).map_err(|error| StoreError::damaged(what, error))
    }

    /// A layer's metadata image.
    ///
    /// # Errors
    /// As [`Self::manifest`].
    pub async fn metadata(&self, metadata: &MetadataRef) -> Result<Bytes, StoreError> {
        let MetadataRef { id, size } = metadata;
        let what = format!("metadata {id}");
        let bytes = self.get(&key::metadata(id), &what, *size).await?;
        check(&what, &bytes, &id.0)?;
        Ok(bytes)
    }

    /// A blob's index.
    ///
    /// # Errors
    /// As [`Self::manifest`].
    pub async fn blob_index(&self, id: &BlobId) -> Result<BlobIndex, StoreError> {
        let what = format!("the index of blob {id}");
        let bytes = self.get(&key::blob(id), &what, INDEX_SIZE_MAX).await?;
        check(&what, &bytes, &id.0)?;
        BlobIndex::decode(&bytes).map_err(|error| StoreError::damaged(what, error))
    }

    /// Where the content of a layer's files lies, as far as it is in blobs that the layer keeps.
    pub(crate) async fn files(
        &self,
        layer: &LayerId,
        manifest: &Manifest,
    ) -> Result<Option<FileIndex>, StoreError> {
        let what = format!("the files of layer {layer}");
        let bytes = match self.get(&key::files(layer), &what, FILES_SIZE_MAX).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            other => other?,
        };
        let files = unseal(&bytes)
            .and_then(|encoded| FileIndex::decode(encoded).map_err(|error| error.to_string()))
            .map_err(|problem| StoreError::damaged(what, problem))?;
        let is_kept = |blob: &BlobRef| {
            let size = u64::from(blob.blocks) * BLOCK_SIZE;
            manifest.blobs.iter().any(|kept| kept.id == blob.id && kept.size == size)
        };
        Ok(Some(files.within(is_kept)))
    }

    /// A range of a pack, all of it, as stored.
    ///
    /// # Errors
    /// `Damaged` if the pack ends before the range does.
    pub async fn fetch(&self, pack: &PackId, range: Range<u32>) -> Result<Bytes, StoreError> {
        let what = format!("pack {pack}");
        let wanted = range.end.saturating_sub(range.start) as usize;
        if wanted == 0 {
            return Ok(Bytes::new());
        }
        let bytes = self.get_range(&key::pack(pack), range.start.into()..range.end.into(), &what).await?;
        if bytes.len() != wanted {
            let problem =
                format!("it ends at byte {}, before {}", range.start as usize + bytes.len(), range.end);
            return Err(StoreError::damaged(what, problem));
        }
        Ok(bytes)
    }

    /// Several ranges of a pack, in the order given; neighbours are fetched together.
    ///
    /// # Errors
    /// As [`Self::fetch`], of the first range that fails.
    pub async fn fetch_all(&self, pack: &PackId, ranges: &[Range<u32>]) -> Result<Vec<Bytes>, StoreError> {
        let runs = coalesce(ranges);
        let fetched =
            futures_util::future::try_join_all(runs.iter().map(|run| self.fetch(pack, run.clone()))).await?;
        let part = |range: &Range<u32>| {
            let run = runs.partition_point(|run| run.start <= range.start).saturating_sub(1);
            let from = (range.start - runs[run].start) as usize;
            fetched[run].slice(from..from + (range.end - range.start) as usize)
        };
        Ok(ranges.iter().map(|range| if range.is_empty() { Bytes::new() } else { part(range) }).collect())
    }

    /// The plain bytes of one of a blob's groups, checked.
    ///
    /// # Errors
    /// `Damaged` if the pack's bytes are not the group; `NotFound` if the blob has no group of that number.
    pub async fn group(&self, index: &BlobIndex, number: u64) -> Result<Bytes, StoreError> {
        let group = usize::try_from(number).ok().and_then(|at| index.groups().get(at)).ok_or_else(|| {
            StoreError::NotFound { what: format!("group {number} of a blob of {}", index.groups().len()) }
        })?;
        let pack = index.packs()[group.pack as usize].id;
        let stored = self.fetch(&pack, group.offset..group.offset + group.stored).await?;
        plain(&stored, index.plain_len(number) as usize, &group.hash)
            .map_err(|problem| StoreError::damaged(format!("group {number} in pack {pack}"), problem))
    }

    /// What was recorded of a blob's first reads, if anything was.
    ///
    /// # Errors
    /// [`StoreError`]; that there is none is no error.
    pub async fn trace(&self, blob: &BlobId) -> Result<Option<Bytes>, StoreError> {
        match self.get(&key::trace(blob), "a trace", TRACE_SIZE_MAX).await {
            Err(StoreError::NotFound { .. }) => Ok(None),
            other => other.map(Some),
        }
    }

    /// When what was recorded of a blob's first reads was recorded, Unix ms by the store's clock.
    ///
    /// # Errors
    /// As [`Self::trace`].
    pub async fn trace_written_ms(&self, blob: &BlobId) -> Result<Option<u64>, StoreError> {
        let found = self.head(&key::trace(blob)).await?;
        Ok(found.map(|found| u64::try_from(found.modified_ms).unwrap_or_default()))
    }

    /// Records a blob's first reads in place of what was recorded before. A hint: nothing relies on it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put_trace(&self, blob: &BlobId, trace: Bytes) -> Result<(), StoreError> {
        self.replace(&key::trace(blob), trace).await
    }
}

/// Bytes behind their own digest, for what is not named by it.
pub(crate) fn seal(bytes: &[u8]) -> Bytes {
    [Digest::of(bytes).as_bytes().as_slice(), bytes].concat().into()
}

/// The bytes that were sealed.
fn unseal(sealed: &[u8]) -> Result<&[u8], String> {
    let (digest, bytes) = sealed.split_at_checked(DIGEST_SIZE).ok_or("it is cut")?;
    match Digest::of(bytes).as_bytes().as_slice() == digest {
        true => Ok(bytes),
        false => Err("its bytes are not what its digest says".to_owned()),
    }
}

/// The plain bytes of a group from its stored ones, checked.
pub(crate) fn plain(stored: &Bytes, len: usize, hash: &Digest) -> Result<Bytes, String> {
    let bytes = if stored.len() == len {
        stored.clone()
    } else {
        zstd::bulk::decompress(stored, len)
            .map_err(|error| format!("it cannot be decompressed: {error}"))?
            .into()
    };
    if bytes.len() != len || Digest::of(&bytes) != *hash {
        return Err("its content is another".to_owned());
    }
    Ok(bytes)
}

fn check(what: &str, bytes: &[u8], digest: &Digest) -> Result<(), StoreError> {
    let found = Digest::of(bytes);
    if found == *digest {
        return Ok(());
    }
    Err(StoreError::damaged(what, format!("its {} bytes have the digest {found}", bytes.len())))
}

/// The runs to fetch for these ranges, in order and without overlap.
fn coalesce(ranges: &[Range<u32>]) -> Vec<Range<u32>> {
    let mut sorted: Vec<Range<u32>> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_by_key(|range| range.start);
    let mut runs: Vec<Range<u32>> = Vec::new();
    for range in sorted {
        match runs.last_mut() {
            Some(run) if range.start <= run.end.saturating_add(COALESCE_GAP) => {
                run.end = run.end.max(range.end)
            }
            _ => runs.push(range),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_run_and_distant_ranges_do_not() {
        let far = COALESCE_GAP * 3;
        let ranges = [far..far + 5, 10..20, 0..10, 15..17, 30..40, 7..7];
        assert_eq!(coalesce(&ranges), [0..40, far..far + 5]);
    }

    #[test]
    fn a_group_is_checked_and_cannot_grow_past_its_length() {
        let content = vec![7; 4096];
        let hash = Digest::of(&content);
        let frame = Bytes::from(zstd::bulk::compress(&content, 3).unwrap());
        assert_eq!(plain(&frame, 4096, &hash).unwrap(), content);
        assert_eq!(plain(&Bytes::from(content.clone()), 4096, &hash).unwrap(), content);
        assert!(plain(&frame, 4095, &hash).is_err());
        assert!(plain(&frame, 4097, &hash).is_err());
        assert!(plain(&Bytes::from(vec![8; 4096]), 4096, &hash).is_err());
    }
}
