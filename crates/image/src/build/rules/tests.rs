use super::*;
use crate::erofs::{Attributes, FileData};

fn layer(paths: &[&str]) -> LayerTree {
    let mut layer = LayerTree::default();
    for path in paths {
        let mut at = layer.tree.root();
        let (names, last) = match path.strip_suffix('/') {
            Some(path) => (path, Content::directory()),
            None => match path.strip_suffix('-') {
                Some(path) => (path, overlay::whiteout().1),
                None => (*path, Content::File(FileData::empty())),
            },
        };
        let names: Vec<_> = names.split('/').collect();
        for (number, name) in names.iter().enumerate() {
            at = match layer.tree.lookup(at, name.as_bytes()) {
                Some(found) => found,
                None => {
                    let is_last = number + 1 == names.len();
                    let content = if is_last { last.clone() } else { Content::directory() };
                    let attributes = Attributes::default();
                    layer.tree.insert(at, name.as_bytes(), attributes, content)
                }
            };
        }
    }
    layer
}

fn paths(layer: &LayerTree) -> Vec<String> {
    let mut found = Vec::new();
    let mut todo = vec![(layer.tree.root(), String::new())];
    while let Some((dir, path)) = todo.pop() {
        let entries = walk::entries(&layer.tree, dir).unwrap();
        if entries.is_empty() {
            found.push(path.clone());
        }
        for (name, id) in entries {
            let path = format!("{path}/{}", String::from_utf8_lossy(name));
            match walk::entries(&layer.tree, *id) {
                Some(_) => todo.push((*id, path)),
                None => found.push(path),
            }
        }
    }
    found.sort();
    found
}

fn residue() -> Rules {
    let mut rules = Rules::default();
    for name in Rules::residue_names() {
        assert!(rules.scrub(name), "{name}");
    }
    rules
}

#[test]
fn every_rule_of_ours_is_a_pattern() {
    let patterns: usize = RESIDUE.iter().map(|(_, _, patterns)| patterns.len()).sum();
    assert_eq!(residue().len(), patterns);
    assert!(patterns < RULES_MAX / 2);
}

#[test]
fn residue_goes_and_work_stays() {
    let mut layer = layer(&[
        "work/a.py",
        "work/__pycache__/a.pyc",
        "work/pkg/__pycache__/b.pyc",
        "work/.pytest_cache/v/x",
        "root/.bash_history",
        "root/.ssh/id_ed25519",
        "root/.ssh/old-",
        "var/log/apt/history.log",
        "var/log/nginx/",
        "var/cache/apt/pkgcache.bin",
        "tmp/x/y",
        "home/a/.npmrc",
        "work/.npmrc",
        "root/.cargo/registry/src/x/lib.rs",
        "root/.cargo/registry/cache/x/y.crate",
    ]);
    let report = sift(&mut layer, &residue()).unwrap();
    assert_eq!(
        paths(&layer),
        [
            "/home/a",
            "/root/.cargo/registry/src/x/lib.rs",
            "/root/.ssh/old",
            "/tmp",
            "/var/cache/apt",
            "/var/log/apt",
            "/var/log/nginx",
            "/work/.npmrc",
            "/work/a.py",
            "/work/pkg",
        ]
    );
    let of = |rule: &str| report.iter().find(|left| left.rule == rule).unwrap();
    assert_eq!(of("caches/python").files, 7);
    assert_eq!(
        of("caches/python").paths,
        ["/work/.pytest_cache", "/work/__pycache__", "/work/pkg/__pycache__"]
    );
    assert_eq!((of("temp").files, of("keys").files, of("logs").files), (2, 2, 1));
    assert_eq!(sift(&mut layer, &residue()).unwrap(), []);
}

#[test]
fn a_removal_is_excluded_and_never_scrubbed() {
    let mut scrubbed = layer(&["root/.ssh/id-", "root/.netrc-"]);
    assert_eq!(sift(&mut scrubbed, &residue()).unwrap(), []);
    let mut rules = Rules::default();
    rules.add(Effect::Exclude, "/root/*", "/root/*").unwrap();
    let report = sift(&mut scrubbed, &rules).unwrap();
    assert_eq!((report[0].effect, report[0].files), (Effect::Exclude, 3));
    assert_eq!(paths(&scrubbed), ["/root"]);
}

#[test]
fn the_first_effect_decides_and_a_deny_rule_names_rule_and_path() {
    let all = ["work/secret/key.pem", "work/other.pem"];
    let mut rules = Rules::default();
    rules.add(Effect::Deny, "*.pem", "*.pem").unwrap();
    rules.add(Effect::Exclude, "secret/", "secret/").unwrap();
    let denied = sift(&mut layer(&all), &rules).unwrap_err();
    assert_eq!((denied.rule.as_str(), denied.path.as_str()), ("*.pem", "/work/other.pem"));
    assert!(rules.denies() && !rules.of(&[Effect::Exclude]).denies());
    let mut kept = layer(&all[..1]);
    assert_eq!(sift(&mut kept, &rules).unwrap()[0].paths, ["/work/secret"]);
    // What says that a file was removed is no file.
    sift(&mut layer(&["work/gone.pem-"]), &rules).unwrap();
}

#[test]
fn a_name_of_rules_takes_in_those_that_go_on_behind_it() {
    let mut rules = Rules::default();
    assert!(rules.scrub("caches"));
    assert!(!rules.scrub("cache") && !rules.scrub("") && !rules.scrub("caches/"));
    let mut one = Rules::default();
    assert!(one.scrub("caches/pip"));
    assert!(one.len() < rules.len());
}

#[test]
fn reports_add_up() {
    let one = |files, path: &str| LeftOut {
        effect: Effect::Scrub,
        rule: "logs".to_owned(),
        files,
        bytes: 10,
        paths: vec![path.to_owned()],
    };
    let mut all = vec![one(1, "/a")];
    add_up(&mut all, vec![one(2, "/b"), LeftOut { rule: "keys".to_owned(), ..one(1, "/c") }]);
    assert_eq!((all.len(), all[0].files, all[0].bytes), (2, 3, 20));
    assert_eq!(all[0].paths, ["/a", "/b"]);
}
