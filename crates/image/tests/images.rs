//! OCI layouts and `docker save` archives: layers, digests, platforms, compression.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed, as it should")]

mod support;

use std::fs;
use std::io::Write;
use std::path::Path;

use dsec_image::{EntryProblem, ImportError, ImportLimits};
use serde_json::{Value, json};
use support::archive::Archive;
use support::layers::{Image, Shop};
use support::layout::{INDEX, Layout, MANIFEST, sha256, tar};
use support::{chain, facts, run, shell};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Compressed by the program itself.
fn compressed(program: &str, bytes: &[u8]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("in"), bytes).unwrap();
    shell(dir.path(), &format!("{program} -c in > out"));
    fs::read(dir.path().join("out")).unwrap()
}

fn layers() -> [Vec<u8>; 3] {
    let big: Vec<u8> = (0..1_300_000u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect();
    [
        Archive::new()
            .dir("d")
            .file("d/old", b"old")
            .file("d/linked", b"shared")
            .file("gone", &big)
            .file("kept", b"kept")
            .dir("opaque")
            .file("opaque/hidden", b"x")
            .finish(),
        Archive::new()
            .file(".wh.gone", b"")
            .file("d/old", b"newer")
            .hard_link("second", "d/linked")
            .file("opaque/.wh..wh..opq", b"")
            .file("opaque/shown", b"y")
            .finish(),
        Archive::new().file("d/.wh.linked", b"").symlink("lib", "d").file("lib/through", b"z").finish(),
    ]
}

fn check_layers(shop: &mut Shop, source: &Path) {
    let image = shop.import(source).unwrap_or_else(|e| panic!("{}: {}", source.display(), chain(&e)));
    let config = &image.config;
    assert_eq!(config.env, ["PATH=/bin", "A=1"]);
    assert_eq!(config.working_dir.as_deref(), Some("/work"));
    assert_eq!(config.user.as_deref(), Some("1000:1000"));
    assert_eq!((config.entrypoint.as_slice(), config.cmd.len()), (["/init".to_owned()].as_slice(), 0));
    assert_eq!(config.labels["made"], "by hand");
    assert_eq!(config.architecture, "amd64");
    let mount = shop.mount(&image.layer);
    let found = facts(mount.path());
    let paths: Vec<_> = found.keys().map(|path| String::from_utf8_lossy(path)).collect();
    assert_eq!(
        paths,
        [".", "./d", "./d/old", "./d/through", "./kept", "./lib", "./opaque", "./opaque/shown", "./second"]
    );
    assert_eq!(fs::read(mount.path().join("d/old")).unwrap(), b"newer");
    assert_eq!(fs::read(mount.path().join("second")).unwrap(), b"shared");
    assert_eq!(found[b"./second".as_slice()].links, 1);
}

fn check_bytes(shop: &mut Shop, bytes: &[u8]) {
    let source = shop.file(bytes);
    check_layers(shop, &source);
}

/// Imports bytes.
fn import(shop: &mut Shop, bytes: &[u8]) -> Result<Image, ImportError> {
    let source = shop.file(bytes);
    shop.import(&source)
}

/// What must be refused.
fn refused(bytes: &[u8]) -> ImportError {
    import(&mut Shop::new(), bytes).expect_err("it should be refused")
}

#[test]
fn layers_are_applied_in_order_whatever_holds_them() {
    let [a, b, c] = layers();
    let mixed = Layout::default().image(&[gzip(&a), compressed("zstd", &b), compressed("xz", &c)]);
    let mut shop = Shop::new();
    check_bytes(&mut shop, &mixed.tar());
    for program in ["gzip", "zstd", "xz"] {
        check_bytes(&mut shop, &compressed(program, &mixed.tar()));
    }
    let dir = shop.dir.path().join("layout");
    for (name, content) in mixed.files() {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    check_layers(&mut shop, &dir);
    // GNU tar's own archive of it begins with `./`.
    let tar = shop.dir.path().join("source");
    run("tar", &["-cf".as_ref(), tar.as_os_str(), "-C".as_ref(), dir.as_os_str(), ".".as_ref()]);
    check_layers(&mut shop, &tar);
}

fn docker_files(layers: &[Vec<u8>]) -> Vec<(String, Vec<u8>)> {
    let diff_ids: Vec<_> = layers.iter().map(|layer| format!("sha256:{}", sha256(layer))).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "config": {
            "Env": ["PATH=/bin", "A=1"], "WorkingDir": "/work", "User": "1000:1000",
            "Entrypoint": ["/init"], "Labels": {"made": "by hand"},
        },
    })
    .to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    let names: Vec<_> = layers.iter().map(|layer| format!("{}/layer.tar", sha256(&layer[..600]))).collect();
    let manifest = json!([{"Config": config_name, "RepoTags": ["test:1"], "Layers": names}]).to_string();
    let mut files = vec![(config_name, config.into_bytes())];
    files.extend(names.into_iter().zip(layers.iter().cloned()));
    files.push(("manifest.json".to_owned(), manifest.into_bytes()));
    files
}

#[test]
fn docker_save_archives_are_read_in_both_forms() {
    let mut shop = Shop::new();
    let old = docker_files(&layers());
    check_bytes(&mut shop, &tar(&old));
    check_bytes(&mut shop, &gzip(&tar(&old)));
    // A layer that is there twice is a link the second time.
    let layer = Archive::new().file("a", b"1").finish();
    let mut files = docker_files(&[layer.clone(), layer.clone()]);
    let manifest = String::from_utf8(files.pop().unwrap().1).unwrap();
    let first = format!("{}/layer.tar", sha256(&layer[..600]));
    let second = format!("{}/layer.tar", "e".repeat(64));
    let manifest = manifest.replacen(&format!("{first}\"]"), &format!("{second}\"]"), 1);
    let archive = Archive::new()
        .file(&files[0].0, &files[0].1)
        .file(&first, &layer)
        .pax(&[("linkpath", format!("../{first}").as_bytes())])
        .symlink(&second, "")
        .file("manifest.json", manifest.as_bytes());
    import(&mut shop, &archive.finish()).unwrap();
    // Newer ones are OCI layouts too, with layers that are not compressed.
    let mut new = Layout::default().image(&layers()).files();
    new.push(("manifest.json".to_owned(), b"[{\"Config\":\"nowhere\",\"Layers\":[]}]".to_vec()));
    new.push(("repositories".to_owned(), b"{}".to_vec()));
    check_bytes(&mut shop, &tar(&new));
}

#[test]
fn a_damaged_blob_is_named() {
    let [a, b, _] = layers();
    let layout = Layout::default().image(&[gzip(&a), b.clone()]);
    for layer in [gzip(&a), b] {
        let digest = sha256(&layer);
        // Anywhere in it, also where decompressing or reading it fails first, and in its last byte.
        for at in [0, 20, layer.len() / 2, layer.len() - 1] {
            let mut files = layout.files();
            let blob = files.iter_mut().find(|(name, _)| name.ends_with(&digest)).unwrap();
            blob.1[at] ^= 1;
            let error = refused(&tar(&files));
            let ImportError::DigestMismatch { blob, .. } = &error else { panic!("{at}: {}", chain(&error)) };
            assert_eq!(*blob, format!("sha256:{digest}"));
        }
        let mut files = layout.files();
        files.iter_mut().find(|(name, _)| name.ends_with(&digest)).unwrap().1.push(0);
        assert!(matches!(refused(&tar(&files)), ImportError::DigestMismatch { .. }), "a longer blob");
        files.retain(|(name, _)| !name.ends_with(&digest));
        let error = refused(&tar(&files));
        assert!(matches!(&error, ImportError::BlobMissing { blob } if blob.ends_with(&digest)), "{error}");
    }
    // Manifest and configuration.
    for (at, (name, _)) in layout.files().iter().enumerate() {
        let mut files = layout.files();
        if files[at].1.first() == Some(&b'{') && name.starts_with("blobs/") {
            files[at].1.push(b' ');
            let error = refused(&tar(&files));
            assert!(
                matches!(&error, ImportError::DigestMismatch { blob, .. } if name.ends_with(&blob[7..])),
                "{error}"
            );
        }
    }
    for part in 0..2 {
        let mut files = docker_files(&layers());
        let last = files[part].1.len() - 2;
        files[part].1[last] ^= 1;
        assert!(matches!(refused(&tar(&files)), ImportError::DigestMismatch { .. }), "part {part}");
    }
}

#[test]
fn a_bad_entry_in_a_whole_blob_is_not_called_damage() {
    let noise: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let bad = Archive::new().file("../x", b"").file("more", &noise).finish();
    for layer in [bad.clone(), gzip(&bad), compressed("zstd", &bad)] {
        let error = refused(&Layout::default().image(&[layer]).tar());
        assert!(
            matches!(&error, ImportError::Entry { problem: EntryProblem::ParentTraversal, .. }),
            "{}",
            chain(&error)
        );
    }
    let error = refused(&tar(&docker_files(&[bad])));
    assert!(
        matches!(&error, ImportError::Entry { problem: EntryProblem::ParentTraversal, .. }),
        "{}",
        chain(&error)
    );
}

#[test]
fn the_image_for_this_host_is_picked_from_several() {
    let [a, b, c] = layers();
    let mut layout = Layout::default();
    let mut ours = layout.manifest("amd64", &[a, b, c]);
    let mut other = layout.manifest("arm64", &[gzip(b"not read")]);
    other["platform"] = json!({"architecture": "arm64", "os": "linux"});
    let unmarked = layout.manifest("s390x", &[]);
    let mut attestation = layout.manifest("unknown", &[]);
    attestation["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
    let absent = json!({"mediaType": MANIFEST, "digest": format!("sha256:{}", "0".repeat(64)), "size": 1});
    let others = vec![other, unmarked, attestation, absent];
    layout.manifests.clone_from(&others);
    let ImportError::NoPlatform { wanted, found } = refused(&layout.tar()) else { panic!("taken") };
    assert_eq!(wanted, "amd64");
    assert_eq!(found[..2], ["linux/arm64", "linux/s390x"]);
    assert!(found[2].contains("not in this archive") && found.len() == 3, "{found:?}");

    ours["platform"] = json!({"architecture": "amd64", "os": "linux"});
    let inner = json!({"manifests": others.iter().chain([&ours]).collect::<Vec<_>>()}).to_string();
    let inner = layout.blob(INDEX, inner.as_bytes());
    // The same image under two names is one image.
    layout.manifests = vec![inner, ours.clone(), ours.clone()];
    let mut shop = Shop::new();
    check_bytes(&mut shop, &layout.tar());

    let mut second = layout.manifest("amd64", &[layers()[0].clone()]);
    second["annotations"] = json!({"org.opencontainers.image.ref.name": "second"});
    layout.manifests = vec![ours, second];
    let error = refused(&layout.tar());
    assert!(matches!(&error, ImportError::Ambiguous { found } if found[1] == "second"), "{error}");
}

#[test]
fn manifests_that_make_no_sense_are_refused() {
    let layer = layers()[0].clone();
    let mut cyclic = Layout::default();
    let mut at = cyclic.blob(INDEX, b"{}");
    for _ in 0..6 {
        at = cyclic.blob(INDEX, json!({"manifests": [at]}).to_string().as_bytes());
    }
    cyclic.manifests.push(at);
    assert!(matches!(refused(&cyclic.tar()), ImportError::UnsupportedImage { .. }));

    let mut sha512 = Layout::default();
    sha512.manifests.push(json!({"mediaType": MANIFEST, "digest": "sha512:00", "size": 1}));
    assert!(matches!(refused(&sha512.tar()), ImportError::UnsupportedDigest { .. }));
    let mut path = Layout::default();
    path.manifests.push(json!({"mediaType": MANIFEST, "digest": "sha256:../../etc/passwd", "size": 1}));
    assert!(matches!(refused(&path.tar()), ImportError::UnsupportedDigest { .. }));

    let mut files = Layout::default().image(std::slice::from_ref(&layer)).files();
    files.last_mut().unwrap().1 = b"{".to_vec();
    assert!(matches!(refused(&tar(&files)), ImportError::BadDocument { .. }));
    files.last_mut().unwrap().1 = vec![b' '; (8 << 20) + 1];
    assert!(matches!(refused(&tar(&files)), ImportError::DocumentTooLarge { .. }));
    files.pop();
    assert!(matches!(refused(&tar(&files)), ImportError::NotAnArchive { .. }));

    let mut files = docker_files(&[layer]);
    let manifest: Vec<Value> = serde_json::from_slice(&files[2].1).unwrap();
    files[2].1 = json!([manifest[0], manifest[0]]).to_string().into_bytes();
    assert!(matches!(refused(&tar(&files)), ImportError::Ambiguous { .. }));
    let mut short = manifest[0].clone();
    short["Layers"] = json!([]);
    files[2].1 = json!([short]).to_string().into_bytes();
    assert!(matches!(refused(&tar(&files)), ImportError::UnsupportedImage { .. }));
}

#[test]
fn root_file_systems_are_read_in_every_compression() {
    let plain = Archive::new().file("manifest.json", b"{}").file("etc/os-release", b"x").finish();
    let mut shop = Shop::new();
    let expected = import(&mut shop, &plain).unwrap();
    assert!(expected.config.env[0].starts_with("PATH=/usr/local/sbin:"));
    // Two gzip members and two zstd frames are one stream.
    let (head, tail) = plain.split_at(700);
    for bytes in [
        gzip(&plain),
        compressed("zstd", &plain),
        compressed("xz", &plain),
        [gzip(head), gzip(tail)].concat(),
        [compressed("zstd --long=27", head), compressed("zstd", tail)].concat(),
    ] {
        assert!(import(&mut shop, &bytes).unwrap().encoded() == expected.encoded());
    }
}

#[test]
fn what_is_no_archive_is_refused() {
    for bytes in [b"".as_slice(), b"x", b"#!/bin/sh\n", &[0x42; 5000], b"PK\x03\x04zip"] {
        let error = refused(bytes);
        assert!(matches!(error, ImportError::NotAnArchive { .. }), "{}", chain(&error));
    }
    for bytes in
        [gzip(b"hello"), compressed("zstd", b"hello"), compressed("xz", b"hello"), b"\x1f\x8bzzzz".to_vec()]
    {
        let error = refused(&bytes);
        assert!(matches!(error, ImportError::Entry { .. }), "{}", chain(&error));
    }
    let mut shop = Shop::new();
    let missing = shop.import(Path::new("/nowhere/at/all")).unwrap_err();
    assert!(matches!(missing, ImportError::Source { .. }));
    for path in ["/dev/zero", "/proc"] {
        assert!(matches!(shop.import(Path::new(path)).unwrap_err(), ImportError::NotAnArchive { .. }));
    }
}

/// Imports what must be refused after 50 MiB.
fn refused_early(bytes: &[u8]) -> ImportError {
    let mut shop = Shop::new();
    let source = shop.file(bytes);
    let limits = ImportLimits { max_bytes: 50 << 20, ..ImportLimits::default() };
    shop.import_within(&source, &limits, &mut |_| {}).expect_err("it should be refused")
}

/// Zeros, some kilobytes of each 64 MiB. Who reads to their end finds that it is damaged.
fn zeros(pieces: usize) -> Vec<u8> {
    [compressed("zstd", &vec![0; 64 << 20]).repeat(pieces), b"no frame".to_vec()].concat()
}

#[test]
fn a_bomb_is_stopped_before_it_costs_anything() {
    // 4 GiB of zeros in a few kilobytes, as a layer, a root file system and an archive of blobs.
    let header = |name: &str| {
        Archive::new()
            .raw(name.as_bytes(), b'0', b"", b"", |h| h[124..136].copy_from_slice(b"77777777777\0"))
            .cut()
    };
    let bomb = |name: &str| [compressed("zstd", &header(name)), zeros(64)].concat();
    let layer = Layout::default().image(&[bomb("big")]).tar();
    let blobs = bomb(&format!("blobs/sha256/{}", "0".repeat(64)));
    for bytes in [layer, bomb("big"), blobs] {
        let error = refused_early(&bytes);
        assert!(
            matches!(&error, ImportError::Entry { problem: EntryProblem::TooManyBytes { .. }, .. }),
            "{}",
            chain(&error)
        );
    }
}

#[test]
fn a_bad_archive_in_a_bomb_is_not_decompressed_to_its_end_for_its_digest() {
    let bad = Archive::new().file("../x", b"").cut();
    let layer = [compressed("zstd", &bad), zeros(4)].concat();
    // `docker save`, whose digests are of what is unpacked.
    let error = refused_early(&tar(&docker_files(&[layer])));
    assert!(
        matches!(&error, ImportError::Entry { problem: EntryProblem::ParentTraversal, .. }),
        "{}",
        chain(&error)
    );
}

#[test]
fn a_cut_compressed_archive_is_an_error_wherever_it_is_cut() {
    let noise: Vec<u8> = (0..20_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let plain = Archive::new().file("a", &noise).file("b", &noise[..777]).symlink("l", "a").finish();
    for whole in [gzip(&plain), compressed("zstd", &plain), compressed("xz", &plain)] {
        for part in 0..50 {
            let error = refused(&whole[..whole.len() * part / 50]);
            assert!(matches!(error, ImportError::Entry { .. } | ImportError::NotAnArchive { .. }), "{error}");
        }
        refused(&whole[..whole.len() - 1]);
    }
    let layout = Layout::default().image(&[gzip(&plain)]).tar();
    for part in 0..50 {
        refused(&layout[..(layout.len() - 1024) * part / 50]);
    }
}
