use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::erofs::Attributes;
use crate::erofs::format::NULL_ADDR;
use crate::erofs::sparse::ChunkPlan;

fn area() -> (tempfile::TempDir, DataArea) {
    let dir = tempfile::tempdir().unwrap();
    let area = DataArea::create(&dir.path().join("image")).unwrap();
    (dir, area)
}

/// Reads a file back the way the kernel does: through its chunks, holes as zeros.
fn read_back(image: &[u8], data: &FileData) -> Vec<u8> {
    let mut out = Vec::new();
    let block = |number: u32| &image[number as usize * 4096..(number as usize + 1) * 4096];
    for index in 0..data.size.div_ceil(4096) {
        match &data.chunks {
            None => out.extend_from_slice(block(data.start + index as u32)),
            Some(chunks) => match chunks.offsets[(index >> chunks.bits) as usize] {
                NULL_ADDR => out.extend_from_slice(&[0; 4096]),
                offset => {
                    let inside = index & ((1 << chunks.bits) - 1);
                    out.extend_from_slice(block(data.start + offset + inside as u32));
                }
            },
        }
    }
    out.truncate(data.size as usize);
    out
}

fn image(area: DataArea, dir: &tempfile::TempDir) -> Vec<u8> {
    drop(area.into_file().unwrap());
    let mut bytes = std::fs::read(dir.path().join("image")).unwrap();
    bytes.resize(bytes.len() + (64 << 20), 0xee);
    bytes
}

#[test]
fn a_huge_sparse_file_takes_neither_room_nor_time() {
    let (_dir, mut area) = area();
    let size = 10u64 << 30;
    let segments = [Segment { offset: 0, len: 5 }, Segment { offset: size - 5, len: 5 }];
    let data =
        area.append_sparse(&mut b"helloworld".as_slice(), size, &segments, u64::MAX, &mut |_| {}).unwrap();
    assert!(data.stored_bytes() <= 1 << 20, "{}", data.stored_bytes());
    assert!(data.chunks.as_ref().unwrap().offsets.len() * 4 <= 1 << 20);
    assert_eq!(data.size(), size);
}

#[test]
fn a_scattered_sparse_file_gets_small_chunks() {
    let segments: Vec<_> = (0..1000).map(|i| Segment { offset: i * (1 << 20), len: 4096 }).collect();
    let plan = ChunkPlan::best(1000 << 20, &segments).unwrap();
    assert!(plan.stored + plan.chunks * 4 < 6 << 20, "{} {}", plan.stored, plan.chunks);
}

#[test]
fn a_sparse_file_beyond_its_room_is_refused_before_it_is_written() {
    let (_dir, mut area) = area();
    let segments = [Segment { offset: 0, len: 1 }];
    let result = area.append_sparse(&mut b"x".as_slice(), i64::MAX as u64, &segments, 1 << 20, &mut |_| {});
    assert!(matches!(result, Err(AppendError::NoRoom { .. })));
    assert_eq!(area.position(), BLOCK_SIZE);
}

#[test]
fn segments_out_of_order_are_refused() {
    let (_dir, mut area) = area();
    for segments in [
        vec![Segment { offset: 10, len: 5 }, Segment { offset: 12, len: 5 }],
        vec![Segment { offset: 10, len: u64::MAX }],
        vec![Segment { offset: 99, len: 5 }],
    ] {
        let result = area.append_sparse(&mut [1u8; 99].as_slice(), 100, &segments, u64::MAX, &mut |_| {});
        assert!(matches!(result, Err(AppendError::BadSegments)));
    }
}

#[test]
fn compacting_drops_what_the_tree_does_not_use_and_nothing_else() {
    let (dir, mut area) = area();
    let mut tree = Tree::new();
    let root = tree.root();
    let mut expected = BTreeMap::new();
    for number in 0..50u8 {
        let content = vec![number; 1 + usize::from(number) * 1000];
        let size = content.len() as u64;
        let data = area.append(&mut content.as_slice(), size, &mut |_| {}).unwrap();
        let name = format!("{number:02}");
        tree.insert(root, name.as_bytes(), 0, Attributes::default(), Content::File(data));
        expected.insert(name, content);
    }
    let mut holes = vec![0; 500_000];
    holes[300_000..300_010].fill(9);
    let segments = [Segment { offset: 300_000, len: 10 }];
    let data =
        area.append_sparse(&mut [9; 10].as_slice(), 500_000, &segments, u64::MAX, &mut |_| {}).unwrap();
    tree.insert(root, b"holes", 0, Attributes::default(), Content::File(data));
    expected.insert("holes".to_owned(), holes);
    let before = area.position();
    for number in (0..50).filter(|number| number % 3 != 0) {
        let name = format!("{number:02}");
        tree.remove(root, name.as_bytes());
        expected.remove(&name);
    }
    let new = area.compacted(&mut tree, &dir.path().join("new")).unwrap();
    assert!(new.position() < before / 2);
    drop(new.into_file().unwrap());
    let image = std::fs::read(dir.path().join("new")).unwrap();
    for (name, content) in expected {
        let inode = tree.get(tree.lookup(root, name.as_bytes()).unwrap().inode).unwrap();
        let Content::File(data) = &inode.content else { unreachable!() };
        assert_eq!(read_back(&image, data), content, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn sparse_files_read_back_as_they_were(
        gaps in proptest::collection::vec((0u64..200_000, 1u64..30_000), 0..12),
        tail in 0u64..300_000,
    ) {
        let (dir, mut area) = area();
        let (mut at, mut segments, mut content) = (0, Vec::new(), Vec::new());
        let mut expected = Vec::new();
        for (number, (gap, len)) in gaps.iter().enumerate() {
            at += gap;
            segments.push(Segment { offset: at, len: *len });
            expected.resize(at as usize, 0);
            expected.resize((at + len) as usize, number as u8 + 1);
            content.resize(content.len() + *len as usize, number as u8 + 1);
            at += len;
        }
        expected.resize((at + tail) as usize, 0);
        area.append(&mut b"before".as_slice(), 6, &mut |_| {}).unwrap();
        let size = expected.len() as u64;
        let data =
            area.append_sparse(&mut content.as_slice(), size, &segments, u64::MAX, &mut |_| {}).unwrap();
        let image = image(area, &dir);
        prop_assert!(read_back(&image, &data) == expected);
    }
}
