//! Rules on who depends on whom.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::{File, Report, Rule};

const LINTS: Rule =
    Rule { name: "lints", reason: "the workspace's lints hold in every crate or they hold nowhere" };
const PURE_MODEL: Rule = Rule {
    name: "pure-model",
    reason: "rules that know no clock, file, socket or runtime can be tested by calling them",
};
const TABLE: Rule = Rule {
    name: "crate-table",
    reason: "who may depend on whom is said in ARCHITECTURE.md; a new way between crates is a decision",
};

/// A crate and what it may not reach, over any number of steps.
struct Wall {
    from: &'static str,
    to: &'static [&'static str],
    rule: Rule,
}

const ROOTLESS: Rule = Rule {
    name: "no-privileged-code",
    reason: "control and the CLI run without root, anywhere: they ask the edge and do nothing on the node themselves",
};
const SMALL_AGENT: Rule = Rule {
    name: "small-agent",
    reason: "the agent runs once in every sandbox and must stay below 1 MiB of private memory",
};
const STORE_ALONE: Rule = Rule {
    name: "store-alone",
    reason: "the store is read and written from anywhere: builders, nodes, tools; it knows no node and needs no root",
};
const STANDS_ALONE: Rule = Rule {
    name: "fill-stands-alone",
    reason: "the fill process outlives the edge and is replaced apart from it, so it knows nothing of sandboxes",
};
const PRIVILEGED: [&str; 5] = ["dsec-sys", "dsec-image", "dsec-backend", "dsec-edge", "dsec-fill"];

/// The table of ARCHITECTURE.md: each crate and those of this workspace that it may be built from.
const MAY: &[(&str, &[&str])] = &[
    ("dsec-model", &[]),
    ("dsec-proto", &["dsec-model"]),
    ("dsec-http", &[]),
    ("dsec-pki", &[]),
    ("dsec-sys", &[]),
    ("dsec-image", &["dsec-model"]),
    ("dsec-store", &["dsec-image"]),
    ("dsec-fill", &["dsec-image", "dsec-store", "dsec-sys"]),
    ("dsec-backend", &["dsec-model", "dsec-proto", "dsec-sys"]),
    (
        "dsec-edge",
        &[
            "dsec-backend",
            "dsec-fill",
            "dsec-http",
            "dsec-image",
            "dsec-model",
            "dsec-pki",
            "dsec-proto",
            "dsec-registry",
            "dsec-store",
            "dsec-sys",
        ],
    ),
    ("dsec-iam", &["dsec-model"]),
    ("dsec-recipe", &[]),
    ("dsec-registry", &["dsec-image", "dsec-model"]),
    ("dsec-aether", &["dsec-proto"]),
    ("dsec-control", &["dsec-http", "dsec-iam", "dsec-model", "dsec-pki", "dsec-proto"]),
    ("dsec", &["dsec-model", "dsec-proto", "dsec-recipe"]),
    ("dsec-sim", &["dsec-control", "dsec-model", "dsec-proto"]),
    ("xtask", &[]),
];

const WALLS: [Wall; 5] = [
    Wall { from: "dsec-control", to: &PRIVILEGED, rule: ROOTLESS },
    Wall { from: "dsec", to: &PRIVILEGED, rule: ROOTLESS },
    Wall {
        from: "dsec-store",
        to: &["dsec-sys", "dsec-backend", "dsec-edge", "dsec-proto", "reqwest"],
        rule: STORE_ALONE,
    },
    Wall { from: "dsec-fill", to: &["dsec-backend", "dsec-edge", "dsec-proto"], rule: STANDS_ALONE },
    Wall { from: "dsec-aether", to: &["tokio", "hyper", "serde_json"], rule: SMALL_AGENT },
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

/// Checks every rule of this module.
pub(crate) fn check(root: &Path, files: &[File], report: &mut Report) -> anyhow::Result<()> {
    lints(files, report);
    let metadata = cargo(root, &["metadata", "--format-version", "1", "--no-deps"])?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("cargo metadata gave something that is not understood")?;
    declared(root, &metadata.packages, report);
    for wall in &WALLS {
        let Some(package) = metadata.packages.iter().find(|package| package.name == wall.from) else {
            continue;
        };
        let reached = reached_by(root, wall.from)?;
        for target in wall.to.iter().filter(|target| reached.contains(**target)) {
            let what = format!(
                "{} reaches {target}; see cargo tree -p {} -e normal -i {target}",
                wall.from, wall.from
            );
            report.add(wall.rule, &relative(root, &package.manifest_path), 1, what);
        }
    }
    Ok(())
}

/// Every package that is built into `package`. Asked of `cargo tree` and not of the metadata's
/// graph: that one joins the features of the whole workspace, and what aether leaves out of proto
/// would show as reached.
fn reached_by(root: &Path, package: &str) -> anyhow::Result<BTreeSet<String>> {
    let tree = cargo(
        root,
        &["tree", "--package", package, "--edges", "normal,build", "--prefix", "none", "--format", "{p}"],
    )?;
    Ok(tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect())
}

fn declared(root: &Path, packages: &[Package], report: &mut Report) {
    for package in packages {
        let manifest = relative(root, &package.manifest_path);
        let Some((_, may)) = MAY.iter().find(|(name, _)| *name == package.name) else {
            report.add(TABLE, &manifest, 1, format!("{} is not in the table", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let built_in = dependency.kind.as_deref() != Some("dev");
            let ours = MAY.iter().any(|(name, _)| *name == dependency.name);
            if built_in && ours && !may.contains(&dependency.name.as_str()) {
                let what = format!("the table has no way from {} to {}", package.name, dependency.name);
                report.add(TABLE, &manifest, 1, what);
            }
            if package.name == "dsec-model"
                && built_in
                && !["serde", "thiserror"].contains(&dependency.name.as_str())
            {
                report.add(PURE_MODEL, &manifest, 1, format!("the model depends on {}", dependency.name));
            }
        }
    }
}

fn lints(files: &[File], report: &mut Report) {
    for file in files.iter().filter(|file| file.path.ends_with("/Cargo.toml") && file.krate().is_some()) {
        let manifest: toml::Table = match file.text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                report.add(LINTS, &file.path, 1, format!("not readable: {}", error.message()));
                continue;
            }
        };
        let inherits =
            manifest.get("lints").and_then(|lints| lints.get("workspace")).and_then(toml::Value::as_bool);
        if inherits != Some(true) {
            report.add(LINTS, &file.path, 1, "there is no `[lints] workspace = true`");
        }
    }
}

fn relative(root: &Path, path: &str) -> String {
    Path::new(path).strip_prefix(root).unwrap_or(Path::new(path)).to_string_lossy().into_owned()
}

fn cargo(root: &Path, args: &[&str]) -> anyhow::Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).current_dir(root).args(args).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo {}: {}", args[0], String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).context("cargo's answer is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::super::tests::found;
    use super::*;

    #[test]
    fn a_crate_without_the_workspaces_lints_is_found() {
        let good = ("crates/a/Cargo.toml", "[lints]\nworkspace = true");
        let bad = ("crates/b/Cargo.toml", "[package]\nname = \"b\"");
        assert_eq!(found(lints, &[good, bad]), ["crates/b/Cargo.toml:1 lints"]);
    }

    #[test]
    fn a_declared_dependency_that_is_not_allowed_is_found() {
        let dependency = |name: &str, kind: Option<&str>| Dependency {
            name: name.to_owned(),
            kind: kind.map(str::to_owned),
        };
        let package = |name: &str, dependencies| Package {
            name: name.to_owned(),
            manifest_path: format!("/r/{name}/Cargo.toml"),
            dependencies,
        };
        let packages = [
            package("dsec-model", vec![dependency("serde", None), dependency("proptest", Some("dev"))]),
            package("dsec-edge", vec![dependency("tokio", None)]),
        ];
        let mut report = Report::default();
        declared(Path::new("/r"), &packages, &mut report);
        assert!(report.findings.is_empty());

        let packages = [
            package("dsec-model", vec![dependency("tokio", None)]),
            package(
                "dsec-backend",
                vec![dependency("dsec-image", None), dependency("dsec-edge", Some("dev"))],
            ),
            package("dsec-new", vec![]),
        ];
        declared(Path::new("/r"), &packages, &mut report);
        let rules: Vec<_> = report.findings.iter().map(|finding| finding.rule.name).collect();
        assert_eq!(rules, ["pure-model", "crate-table", "crate-table"]);
    }

    #[test]
    fn what_a_crate_reaches_is_seen_over_several_steps() {
        let reached = reached_by(&crate::root().unwrap(), "dsec-control").unwrap();
        assert!(reached.contains("dsec-model") && reached.contains("mio"), "{reached:?}");
    }
}
