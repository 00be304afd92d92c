use proptest::prelude::*;

use super::*;
use crate::erofs::write::EncodeError;
use crate::layer::{BlobId, Digest};

fn blob(name: &str, blocks: u32) -> BlobRef {
    BlobRef { id: BlobId(Digest::of(name.as_bytes())), blocks }
}

/// A layer with everything an image can hold.
fn layer() -> LayerTree {
    let mut layer = LayerTree {
        tree: Tree::new(),
        blobs: vec![blob("one", 10), blob("unused", 1), blob("two", u32::MAX)],
    };
    let tree = &mut layer.tree;
    let mut attributes = Attributes { mode: 0o4751, uid: 70_000, gid: u32::MAX, ..Attributes::default() };
    attributes.mtime = Timestamp { seconds: -5, nanoseconds: 999_999_999 };
    let mut xattrs = Xattrs::default();
    xattrs.set(b"user.a", b"value").unwrap();
    xattrs.set(b"trusted.overlay.opaque", b"y").unwrap();
    let root = tree.root();
    let dir = tree.insert(root, b"dir", attributes.clone(), Content::directory());
    attributes.xattrs = Some(Box::new(xattrs));
    let sparse = FileData {
        size: 40_000,
        start: 3,
        blocks: 4,
        device: 3,
        chunks: Some(Box::new(ChunkMap { bits: 1, offsets: vec![NULL_ADDR, 0, NULL_ADDR, 2, NULL_ADDR] })),
    };
    let hole = FileData {
        chunks: Some(Box::new(ChunkMap { bits: 31, offsets: vec![NULL_ADDR] })),
        ..FileData::empty()
    };
    for (name, content) in [
        (b"dense".as_slice(), Content::File(FileData::dense(10 * 4096 - 1, 0, 1))),
        (b"huge", Content::File(FileData::dense((u64::from(u32::MAX) - 1) * 4096, 0, 3))),
        (b"sparse", Content::File(sparse)),
        (b"hole", Content::File(FileData { size: 1 << 40, ..hole })),
        (b"empty", Content::File(FileData::empty())),
        (b"link", Content::Symlink(vec![b't'; 4095].into())),
        (b"short", Content::Symlink(b"t".as_slice().into())),
        (b"char", Content::CharDevice(0, 0)),
        (b"block", Content::BlockDevice(4095, 1_048_575)),
        (b"fifo", Content::Fifo),
        (b"socket", Content::Socket),
    ] {
        let id = tree.insert(dir, name, attributes.clone(), content);
        tree.hard_link(root, &[b"also-".as_slice(), name].concat(), id);
    }
    let many = tree.insert(dir, b"many", attributes, Content::directory());
    for number in 0..100u32 {
        let name = [b"\xff\xfe".as_slice(), &[b'n'; 40], number.to_string().as_bytes()].concat();
        tree.insert(many, &name, Attributes::default(), Content::directory());
    }
    layer
}

#[test]
fn what_is_written_is_read_back() {
    let layer = layer();
    let (image, used) = layer.encode().unwrap();
    assert_eq!(used, [layer.blobs[0], layer.blobs[2]]);
    let again = LayerTree::decode(&image).unwrap();
    assert_eq!(again.blobs, used);
    assert_eq!(again.tree.iter().count(), layer.tree.iter().count());
    assert_eq!(again.encode().unwrap().0, image);
    let empty = LayerTree::default().encode().unwrap().0;
    assert_eq!(LayerTree::decode(&empty).unwrap().encode().unwrap().0, empty);
}

#[test]
fn a_device_table_of_a_thousand_blobs_is_read_back() {
    let mut layer = LayerTree::default();
    let root = layer.tree.root();
    for number in 0..BLOBS_MAX as u32 {
        let device = layer.device(blob(&number.to_string(), number + 1)).unwrap();
        let data = FileData::dense(4096, number, device);
        layer.tree.insert(root, number.to_string().as_bytes(), Attributes::default(), Content::File(data));
    }
    assert_eq!(layer.device(blob("one too many", 1)), None);
    let (image, used) = layer.encode().unwrap();
    assert_eq!(used.len(), BLOBS_MAX);
    assert_eq!(LayerTree::decode(&image).unwrap().encode().unwrap().0, image);
}

#[test]
fn a_file_outside_its_blob_is_not_written() {
    for (start, device) in [(10, 1), (0, 4), (0, 0)] {
        let mut layer = layer();
        let root = layer.tree.root();
        let data = Content::File(FileData::dense(4096, start, device));
        layer.tree.insert(root, b"bad", Attributes::default(), data);
        assert_eq!(layer.encode().unwrap_err(), EncodeError::NoBlob, "{start} {device}");
    }
}

/// Gives the superblock the checksum that it asks for, so that what is behind it is read.
fn sealed(mut image: Vec<u8>) -> Vec<u8> {
    if image.len() >= BLOCK {
        let checksum = superblock_checksum(&image);
        image[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
    }
    image
}

#[test]
fn an_image_with_content_of_its_own_is_refused() {
    let mut layer = LayerTree::default();
    let root = layer.tree.root();
    layer.tree.insert(root, b"f", Attributes::default(), Content::File(FileData::empty()));
    let (mut image, _) = layer.encode().unwrap();
    let is_file = |raw: &[u8]| {
        let record = raw.first_chunk().and_then(InodeRecord::decode);
        record.is_some_and(|record| FileType::from_mode(record.mode) == Some(FileType::Regular))
    };
    let at = (BLOCK..image.len()).step_by(SLOT as usize).find(|at| is_file(&image[*at..])).unwrap();
    // Its size.
    image[at + 8] = 1;
    let error = LayerTree::decode(&sealed(image)).unwrap_err();
    assert_eq!(error.what, "a file's content is not in a blob");
}

#[test]
fn every_cut_is_refused() {
    let (image, _) = layer().encode().unwrap();
    for end in (0..image.len()).step_by(512) {
        assert!(LayerTree::decode(&sealed(image[..end].to_vec())).is_err(), "{end}");
    }
}

/// Every byte of inodes and entries, set to what a forger would try: nothing panics, and what is still read is a tree
/// that can be written and read again.
#[test]
fn no_changed_byte_panics_or_gives_an_unwritable_tree() {
    let (image, _) = layer().encode().unwrap();
    let mut taken = 0;
    for at in SUPER_OFFSET..image.len() {
        for value in [0, 1, 0x7f, 0xff, image[at] ^ 0x20, image[at].wrapping_add(1)] {
            // Long runs of one kind say the same thing many times.
            if value == image[at] || (at > 8 * BLOCK && at % 7 != 0) {
                continue;
            }
            let mut bad = image.clone();
            bad[at] = value;
            if let Ok(layer) = LayerTree::decode(&sealed(bad)) {
                taken += 1;
                let again = layer.encode().unwrap_or_else(|e| panic!("byte {at} as {value}: {e}")).0;
                LayerTree::decode(&again).unwrap_or_else(|e| panic!("byte {at} as {value}: {e}"));
            }
        }
    }
    // Owners, times and the like may be anything.
    assert!(taken > 1000, "{taken}");
}

proptest! {
    #[test]
    fn no_mutation_panics_or_runs_away(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0usize..4), 1..8),
    ) {
        let (mut image, _) = layer().encode().unwrap();
        let (len, inodes) = (image.len(), layer().tree.iter().count());
        for (at, value, width) in changes {
            let at = at.index(len - 8);
            let width = 1 << width;
            image[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        if let Ok(layer) = LayerTree::decode(&sealed(image)) {
            prop_assert!(layer.tree.iter().count() <= inodes * 2);
            prop_assert!(layer.encode().is_ok());
        }
    }
}
