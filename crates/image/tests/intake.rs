//! Archives that are cut, disks that are full, and what an import tells.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod support;

use std::io::Write as _;
use std::path::Path;

use dsec_image::build::{ArchiveSource, Donors, Workshop};
use dsec_image::{ImportError, ImportLimits, ImportPhase};
use support::archive::Archive;
use support::layers::{Packs, Shop};
use support::{Mount, chain};

fn archive(seed: u8, files: usize) -> Vec<u8> {
    let content: Vec<u8> = (0..30_000u32).map(|n| (n * 7) as u8 ^ seed).collect();
    (0..files)
        .fold(Archive::new(), |archive, n| archive.file(&format!("d{}/{n}", n % 7), &content[n % 99..]))
        .finish()
}

#[test]
fn an_archive_cut_at_any_fiftieth_is_refused() {
    let whole = archive(0, 30);
    let mut shop = Shop::new();
    for part in 0..50 {
        let cut = shop.file(&whole[..(whole.len() - 1024) * part / 50]);
        shop.import(&cut).expect_err("it is cut");
    }
    let source = shop.file(&whole);
    shop.import(&source).unwrap();
}

#[test]
fn the_same_source_gives_the_same_bytes() {
    let image = |seed, files| {
        let mut shop = Shop::new();
        let source = shop.file(&archive(seed, files));
        shop.import(&source).unwrap().encoded()
    };
    let first = image(0, 40);
    assert!(first == image(0, 40));
    // Content alone changes the UUID (at 1024 + 48), and so does metadata alone.
    let uuid = |image: &[u8]| image[1072..1088].to_vec();
    assert_ne!(uuid(&first), uuid(&image(1, 40)));
    assert_ne!(uuid(&first), uuid(&image(0, 39)));
}

/// Makes the one layer of a source, with all its files in `dir`.
fn make_in(dir: &Path, source: &Path) -> Result<(), ImportError> {
    let mut source = ArchiveSource::open(source, dir, &ImportLimits::default())?;
    let workshop = Workshop {
        blob_path: &dir.join("blob"),
        donors: Donors::default(),
        sink: &mut Packs::default(),
        progress: &mut |_| {},
    };
    source.build(0, workshop).map(drop)
}

#[test]
fn a_full_disk_is_said_clearly() {
    let shop = Shop::new();
    // Full while content is written, and while an archive is decompressed.
    let blobs = Archive::new().file(&format!("blobs/sha256/{}", "0".repeat(64)), &archive(0, 90)).finish();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    packed.write_all(&blobs).unwrap();
    for bytes in [archive(0, 90), packed.finish().unwrap()] {
        let disk = Mount::tmpfs("1m");
        let error = make_in(disk.path(), &shop.file(&bytes)).unwrap_err();
        assert!(chain(&error).contains("is full; free some room"), "{}", chain(&error));
        assert_eq!(error.kind().code(), "resource_exhausted");
    }
    let disk = Mount::tmpfs("1m");
    make_in(disk.path(), &shop.file(&archive(0, 3))).unwrap();
}

#[test]
fn progress_is_told_every_few_megabytes_and_never_goes_back() {
    let mut shop = Shop::new();
    let bytes = archive(0, 500);
    let source = shop.file(&bytes);
    let mut told = Vec::new();
    shop.import_within(&source, &ImportLimits::default(), &mut |progress| told.push(progress)).unwrap();
    assert!(told.len() >= 3, "{told:?}");
    assert!(told.is_sorted_by_key(|progress| (progress.source_bytes, progress.files)));
    for progress in &told {
        assert_eq!(progress.phase, ImportPhase::Reading);
        assert_eq!(progress.source_bytes_total, bytes.len() as u64);
        assert!(progress.source_bytes <= progress.source_bytes_total);
    }
    // 500 files, and 7 directories made for them.
    assert!((1..=507).contains(&told[told.len() - 1].files), "{told:?}");
}

#[test]
fn errors_tell_the_archive_the_entry_and_the_remedy() {
    let mut shop = Shop::new();
    let source = shop.file(&Archive::new().file("../x", b"").finish());
    let error = shop.import(&source).unwrap_err();
    assert!(matches!(error, ImportError::Entry { .. }));
    let text = chain(&error);
    assert!(text.starts_with("entry `../x` of "), "{text}");
    assert!(text.contains("/source cannot be imported: its path contains `..`"), "{text}");
    assert_eq!(error.kind().code(), "invalid_argument");
}
