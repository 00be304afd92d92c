use proptest::prelude::*;

use super::*;

fn area() -> (tempfile::TempDir, Area) {
    let dir = tempfile::tempdir().unwrap();
    let area = Area::create(&dir.path().join("blob")).unwrap();
    (dir, area)
}

/// Appends a sparse file of which nothing is watched.
fn sparse(
    area: &mut Area,
    mut content: &[u8],
    size: u64,
    segments: &[Segment],
    room: u64,
) -> Result<(Extent, ChunkMap), AppendError> {
    let mut passing = Passing { seen: &mut |_| {}, tick: &mut |_| {} };
    area.append_sparse(&mut content, size, segments, room, &mut passing)
}

/// Reads a file back the way the kernel does: through its chunks, holes as zeros.
fn read_back(blob: &[u8], start: u32, size: u64, chunks: &ChunkMap) -> Vec<u8> {
    let mut out = Vec::new();
    for index in 0..size.div_ceil(BLOCK_SIZE) {
        match chunks.offsets[(index >> chunks.bits) as usize] {
            NULL_ADDR => out.extend_from_slice(&[0; BLOCK_SIZE as usize]),
            offset => {
                let inside = index & ((1 << chunks.bits) - 1);
                let at = (u64::from(start + offset) + inside) * BLOCK_SIZE;
                out.extend_from_slice(&blob[at as usize..(at + BLOCK_SIZE) as usize]);
            }
        }
    }
    out.truncate(size as usize);
    out
}

#[test]
fn a_huge_sparse_file_takes_neither_room_nor_time() {
    let (_dir, mut area) = area();
    let size = 10u64 << 30;
    let segments = [Segment { offset: 0, len: 5 }, Segment { offset: size - 5, len: 5 }];
    let (extent, chunks) = sparse(&mut area, b"helloworld", size, &segments, u64::MAX).unwrap();
    assert!(u64::from(extent.blocks) * BLOCK_SIZE <= 1 << 20, "{}", extent.blocks);
    assert!(chunks.offsets.len() * 4 <= 1 << 20);
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
    let result = sparse(&mut area, b"x", i64::MAX as u64, &segments, 1 << 20);
    assert!(matches!(result, Err(AppendError::NoRoom { .. })));
    assert_eq!(area.position(), 0);
}

#[test]
fn segments_out_of_order_are_refused() {
    let (_dir, mut area) = area();
    for segments in [
        vec![Segment { offset: 10, len: 5 }, Segment { offset: 12, len: 5 }],
        vec![Segment { offset: 10, len: u64::MAX }],
        vec![Segment { offset: 99, len: 5 }],
    ] {
        let result = sparse(&mut area, &[1; 99], 100, &segments, u64::MAX);
        assert!(matches!(result, Err(AppendError::BadSegments)));
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
        let mut passing = Passing { seen: &mut |_| {}, tick: &mut |_| {} };
        area.append(&mut b"before".as_slice(), 6, &mut passing).unwrap();
        let size = expected.len() as u64;
        let (extent, chunks) = sparse(&mut area, &content, size, &segments, u64::MAX).unwrap();
        let (_, len) = area.into_file().unwrap();
        let mut blob = std::fs::read(dir.path().join("blob")).unwrap();
        // It may end in a hole.
        blob.resize(len as usize, 0);
        prop_assert!(read_back(&blob, extent.start, size, &chunks) == expected);
    }
}
