//! The cache over stops of every kind: what it says is here is here.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use dsec_fill::cache::{BootId, Cache, CacheError, Mark, Stored};
use support::{BOOT, GROUP, Made, Random};

const LATER: BootId = BootId([8; 16]);

fn open(dir: &Path, boot: BootId) -> Cache {
    Cache::open(dir, 1 << 40, boot).unwrap()
}

fn fill(cache: &Cache, made: &Made, groups: impl IntoIterator<Item = u64>) {
    let blob = cache.add(&made.index).unwrap();
    for group in groups {
        let range = blob.range_of(group);
        assert_eq!(cache.store(&blob, group, made.part(range)).unwrap(), Stored::Cached);
    }
}

fn here(cache: &Cache, made: &Made) -> Vec<u64> {
    let blob = cache.blob(made.id()).unwrap().unwrap();
    (0..made.index.groups().len() as u64).filter(|group| blob.has(*group)).collect()
}

/// Reads all that the cache says it has, after it looked at what it doubts, and compares: groups that are there.
fn compare(cache: &Cache, made: &Made) -> Vec<u64> {
    let blob = cache.blob(made.id()).unwrap().unwrap();
    for group in 0..made.index.groups().len() as u64 {
        assert!(!(blob.has(group) && blob.doubts(group)));
        blob.prove(group).unwrap();
        let range = blob.range_of(group);
        let mut out = vec![0; (range.end - range.start) as usize];
        assert_eq!(blob.read(range.start, &mut out).unwrap(), blob.has(group));
        assert!(!blob.has(group) || out == made.part(range), "group {group} is wrong");
    }
    here(cache, made)
}

fn file(dir: &Path, made: &Made) -> PathBuf {
    dir.join(made.id().to_string())
}

#[test]
fn a_killed_worker_loses_nothing_and_the_next_boot_believes_nothing_unchecked() {
    let (dir, made) = (tempfile::tempdir().unwrap(), Made::new(1, 10 * GROUP + 4096));
    fill(&open(dir.path(), BOOT), &made, [0, 3, 10]);
    assert_eq!(here(&open(dir.path(), BOOT), &made), [0, 3, 10]);

    let cache = open(dir.path(), LATER);
    assert_eq!(here(&cache, &made), Vec::<u64>::new());
    drop(cache);
    // A worker that is killed before it looked leaves the next one the same doubts.
    let cache = open(dir.path(), LATER);
    assert_eq!(here(&cache, &made), Vec::<u64>::new());
    assert_eq!(compare(&cache, &made), [0, 3, 10]);
    drop(cache);
    assert_eq!(here(&open(dir.path(), LATER), &made), [0, 3, 10]);
}

#[test]
fn content_that_a_power_cut_took_is_not_believed() {
    let (dir, made) = (tempfile::tempdir().unwrap(), Made::new(2, 10 * GROUP));
    fill(&open(dir.path(), BOOT), &made, 0..6);
    // The bits reached the disk; of the content, some did, some became zeros, one is half, the end is cut.
    let data = OpenOptions::new().write(true).open(file(dir.path(), &made)).unwrap();
    data.write_all_at(&vec![0; GROUP as usize], GROUP).unwrap();
    data.write_all_at(&vec![0; GROUP as usize / 2], 3 * GROUP).unwrap();
    data.set_len(5 * GROUP).unwrap();
    let cache = open(dir.path(), LATER);
    assert_eq!(compare(&cache, &made), [0, 2, 4]);
}

#[test]
fn any_bytes_in_the_map_or_index_make_it_claim_less_never_more() {
    let made = Made::new(3, 20 * GROUP);
    let mut random = Random(11);
    for round in 0..60 {
        let dir = tempfile::tempdir().unwrap();
        fill(&open(dir.path(), BOOT), &made, [1, 5, 7]);
        let victim = file(dir.path(), &made).with_extension(if round % 3 == 0 { "index" } else { "map" });
        let mut bytes = std::fs::read(&victim).unwrap();
        match random.below(3) {
            0 => bytes.truncate(random.below(bytes.len() as u64) as usize),
            // Bits come and go; not in the byte that says "sealed", which is written alone and after all others.
            1 => (0..40).for_each(|_| {
                let at = 64 + random.below(bytes.len() as u64 - 64) as usize;
                bytes[at] ^= 1 << random.below(8);
            }),
            _ => bytes.fill(0),
        }
        std::fs::write(&victim, &bytes).unwrap();
        let cache = open(dir.path(), LATER);
        cache.add(&made.index).unwrap();
        assert!(compare(&cache, &made).iter().all(|group| [1, 5, 7].contains(group)), "round {round}");
    }
}

#[test]
fn a_sealed_blob_is_believed_by_the_next_boot_until_something_goes() {
    let (dir, made) = (tempfile::tempdir().unwrap(), Made::new(4, 3 * GROUP));
    let cache = open(dir.path(), BOOT);
    fill(&cache, &made, 0..3);
    cache.blob(made.id()).unwrap().unwrap().seal().unwrap();
    drop(cache);
    let cache = open(dir.path(), LATER);
    assert_eq!(here(&cache, &made), [0, 1, 2]);
    cache.evict_oldest(1);
    assert_eq!(here(&cache, &made).len(), 2);
    drop(cache);
    assert_eq!(here(&open(dir.path(), BOOT), &made), Vec::<u64>::new());
}

#[test]
fn eviction_takes_the_oldest_and_gives_the_disk_its_room_back() {
    let dir = tempfile::tempdir().unwrap();
    let (old, kept, new) = (Made::new(5, 4 * GROUP), Made::new(6, 4 * GROUP), Made::new(7, 4 * GROUP));
    let cache = open(dir.path(), BOOT);
    for made in [&old, &kept] {
        fill(&cache, made, 0..4);
    }
    drop(cache);
    // The age of what an earlier worker left is its map's.
    for made in [&old, &kept] {
        let map = OpenOptions::new().write(true).open(file(dir.path(), made).with_extension("map")).unwrap();
        map.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    }
    let cache = open(dir.path(), BOOT);
    cache.blob(kept.id()).unwrap().unwrap().set_mark(Mark::Direct, true).unwrap();
    fill(&cache, &new, 0..4);
    let before = cache.used_bytes();
    assert_eq!(cache.evict_oldest(4 * GROUP), 4 * GROUP);
    assert!(cache.used_bytes() + 4 * GROUP <= before);
    assert!(
        cache.blob(old.id()).unwrap().is_none() && !file(dir.path(), &old).exists(),
        "an empty blob is removed"
    );
    assert_eq!((here(&cache, &kept).len(), here(&cache, &new).len()), (4, 4));
    assert_eq!(cache.evict_oldest(u64::MAX), 4 * GROUP);
    assert_eq!(here(&cache, &kept).len(), 4, "what is mounted directly stays");
    assert!(file(dir.path(), &kept).metadata().unwrap().blocks() * 512 >= 4 * GROUP);

    let kept_blob = cache.blob(kept.id()).unwrap().unwrap();
    kept_blob.set_mark(Mark::Open, true).unwrap();
    kept_blob.set_mark(Mark::Direct, false).unwrap();
    cache.evict_blob(&kept_blob);
    assert_eq!(file(dir.path(), &kept).metadata().unwrap().blocks(), 0, "holes take no room");
    assert!(cache.blob(kept.id()).unwrap().is_some(), "an open blob stays known");
}

#[test]
fn marks_outlive_the_worker_and_mounts_marks_end_with_the_boot() {
    let (dir, made) = (tempfile::tempdir().unwrap(), Made::new(8, GROUP));
    let cache = open(dir.path(), BOOT);
    let blob = cache.add(&made.index).unwrap();
    for mark in [Mark::Open, Mark::Direct, Mark::Pinned] {
        for _ in 0..2 {
            blob.set_mark(mark, true).unwrap();
        }
    }
    drop((cache, blob));
    let marks = |boot| {
        let blob = open(dir.path(), boot).blob(made.id()).unwrap().unwrap();
        [Mark::Open, Mark::Direct, Mark::Pinned].map(|mark| blob.has_mark(mark))
    };
    assert_eq!(marks(BOOT), [true; 3]);
    assert_eq!(marks(LATER), [false, false, true]);
}

#[test]
fn a_blob_made_here_is_taken_in_and_another_file_is_not() {
    let (dir, made) = (tempfile::tempdir().unwrap(), Made::new(9, 5 * GROUP + 8192));
    let cache = open(&dir.path().join("cache"), BOOT);
    let blob = cache.add(&made.index).unwrap();
    let path = dir.path().join("content");
    let mut wrong = made.plain.clone();
    wrong[4 * GROUP as usize] ^= 1;
    for content in [&wrong[..], &made.plain[1..]] {
        std::fs::write(&path, content).unwrap();
        assert!(matches!(cache.insert_complete(&blob, &path), Err(CacheError::NotTheContent { .. })));
        assert!(!blob.is_complete());
    }
    std::fs::write(&path, &made.plain).unwrap();
    for _ in 0..2 {
        assert_eq!(cache.insert_complete(&blob, &path).unwrap(), Stored::Cached);
    }
    assert!(std::fs::read(blob.path()).unwrap() == made.plain);
    assert_eq!(here(&open_again(cache, blob, LATER), &made).len(), 6);
}

#[test]
fn a_file_that_is_handed_over_becomes_the_caches_own() {
    let (dir, made) = (tempfile::tempdir().unwrap(), Made::new(10, 70 * GROUP + 8192));
    let size = made.index.size();
    let cache = Cache::open(&dir.path().join("cache"), size + GROUP, BOOT).unwrap();
    let blob = cache.add(&made.index).unwrap();
    let path = dir.path().join("content");
    std::fs::write(&path, &made.plain[1..]).unwrap();
    assert!(matches!(cache.take_complete(&blob, &path), Err(CacheError::NotTheContent { .. })));
    cache.store(&blob, 3, made.part(3 * GROUP..4 * GROUP)).unwrap();
    std::fs::write(&path, &made.plain).unwrap();
    let inode = std::fs::metadata(&path).unwrap().ino();
    assert_eq!(cache.take_complete(&blob, &path).unwrap(), Stored::Cached);
    assert!(!path.exists() && std::fs::metadata(blob.path()).unwrap().ino() == inode);
    assert_eq!((blob.is_complete(), cache.used_bytes()), (true, size));
    let mut read = vec![0; size as usize];
    assert!(blob.read(0, &mut read).unwrap() && read == made.plain);

    // What is complete already is not replaced, and what has no room stays with its maker.
    std::fs::write(&path, &made.plain).unwrap();
    assert_eq!(cache.take_complete(&blob, &path).unwrap(), Stored::Cached);
    assert!(!path.exists() && std::fs::metadata(blob.path()).unwrap().ino() == inode);
    blob.set_mark(Mark::Pinned, true).unwrap();
    let other = Made::new(11, 2 * GROUP);
    std::fs::write(&path, &other.plain).unwrap();
    let other = cache.add(&other.index).unwrap();
    assert_eq!(cache.take_complete(&other, &path).unwrap(), Stored::NoRoom);
    assert!(path.exists() && cache.used_bytes() == size);

    blob.seal().unwrap();
    drop(other);
    assert_eq!(here(&open_again(cache, blob, LATER), &made).len(), 71);
}

#[test]
fn what_was_known_and_never_read_or_half_removed_is_gone_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let [unread, read, marked, halved] = [12, 13, 14, 15].map(|seed| Made::new(seed, 2 * GROUP));
    let cache = open(dir.path(), BOOT);
    for made in [&unread, &marked, &halved] {
        cache.add(&made.index).unwrap();
    }
    fill(&cache, &read, [1]);
    cache.blob(marked.id()).unwrap().unwrap().set_mark(Mark::Open, true).unwrap();
    drop(cache);
    // Killed between its files.
    std::fs::remove_file(file(dir.path(), &halved)).unwrap();
    std::fs::write(file(dir.path(), &read).with_extension("map.new"), "half").unwrap();
    let cache = open(dir.path(), BOOT);
    let mut known: Vec<_> = cache.known().into_iter().map(|(_, id)| id).collect();
    let mut kept = vec![read.id(), marked.id()];
    known.sort_unstable();
    kept.sort_unstable();
    assert_eq!((known, here(&cache, &read)), (kept, vec![1]));
    let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    assert!(!names.iter().any(|name| name.ends_with(".new")), "{names:?}");
    assert_eq!(names.len(), 2 + 3 + 4, "lock, boot, three files a blob and a mark: {names:?}");
}

fn open_again(cache: Cache, blob: std::sync::Arc<dsec_fill::cache::CachedBlob>, boot: BootId) -> Cache {
    let dir = blob.path().parent().unwrap().to_owned();
    drop((cache, blob));
    open(&dir, boot)
}
