//! Where the platform is and which key opens it: flags, then the environment, then the config file,
//! then the default. Clap joins the first two. The Python SDK has the same rules; both are held to the cases of
//! `tests/configuration.json`, and `docs/reference/configuration.md` states them.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use dsec_model::iam::ProjectPath;
use reqwest::Url;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Where `dsec up` listens unless told otherwise.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:7420";
/// Variable that names another config file.
pub(crate) const CONFIG_VARIABLE: &str = "DSEC_CONFIG";
/// Place of the config file below a directory of configurations.
const FILE: &str = "dsec/config.toml";

/// The config file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConfigFile {
    /// Address of the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) url: Option<String>,
    /// Key for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) api_key: Option<String>,
    /// PEM file of certificates to trust beside the system's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca_file: Option<PathBuf>,
}

/// What was given by flags and variables.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given {
    /// Address of the API.
    pub(crate) url: Option<String>,
    /// Key for it.
    pub(crate) api_key: Option<String>,
    /// PEM file of certificates to trust.
    pub(crate) ca_file: Option<PathBuf>,
    /// Project to act in.
    pub(crate) project: Option<ProjectPath>,
}

impl Given {
    /// What the variables alone say, where no flags are parsed.
    pub(crate) fn from_environment() -> Self {
        let variable = |name| std::env::var(name).ok();
        Self {
            url: variable("DSEC_URL"),
            api_key: variable("DSEC_API_KEY"),
            ca_file: std::env::var_os("DSEC_CA_FILE").map(PathBuf::from),
            project: variable("DSEC_PROJECT").and_then(|text| text.parse().ok()),
        }
    }
}

/// What a client needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Target {
    /// Address of the API, without `/v1` and without a slash at its end.
    pub(crate) url: String,
    /// Key for it.
    pub(crate) api_key: Option<String>,
    /// PEM file of certificates to trust beside the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// Project to act in; none: the key's.
    pub(crate) project: Option<ProjectPath>,
}

/// Path of the config file.
///
/// # Errors
/// There is no home directory to look in.
pub(crate) fn path() -> Result<PathBuf, Failure> {
    let user = Surroundings {
        variable: &|name| std::env::var_os(name),
        root: rustix::process::geteuid().is_root(),
        home_of: &|name| nix::unistd::User::from_name(name.to_str()?).ok()?.map(|user| user.dir),
    };
    user.path().or_else(|| Some(std::env::home_dir()?.join(".config").join(FILE))).ok_or_else(|| {
        Failure::new("there is no home directory to keep the config file in")
            .hint(format!("set HOME, or {CONFIG_VARIABLE} to the path of a config file"))
    })
}

/// What the place of the config file depends on.
struct Surroundings<'a> {
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    root: bool,
    home_of: &'a dyn Fn(&OsStr) -> Option<PathBuf>,
}

impl Surroundings<'_> {
    fn set(&self, name: &str) -> Option<OsString> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }

    fn path(&self) -> Option<PathBuf> {
        if let Some(path) = self.set(CONFIG_VARIABLE) {
            return Some(path.into());
        }
        // The base directory specification has relative paths ignored.
        if let Some(base) = self.set("XDG_CONFIG_HOME").map(PathBuf::from).filter(|base| base.is_absolute()) {
            return Some(base.join(FILE));
        }
        let behind_sudo = self.set("SUDO_USER").filter(|name| self.root && name != "root");
        let home = behind_sudo.and_then(|name| (self.home_of)(&name));
        Some(home.or_else(|| self.set("HOME").map(PathBuf::from))?.join(".config").join(FILE))
    }
}

/// The user and group behind `sudo`, whose config file is ours; not where it is named outright.
pub(crate) fn behind_sudo() -> Option<(u32, u32)> {
    if std::env::var_os(CONFIG_VARIABLE).is_some_and(|path| !path.is_empty()) {
        return None;
    }
    let number = |name| std::env::var(name).ok()?.parse().ok();
    std::env::var_os("SUDO_USER").filter(|name| !name.is_empty() && name != "root")?;
    rustix::process::geteuid().is_root().then_some((number("SUDO_UID")?, number("SUDO_GID")?))
}

/// Reads a config file. A missing one is an empty one.
pub(crate) fn read(path: &Path) -> Result<ConfigFile, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(ConfigFile::default()),
        Err(error) => return Err(Failure::io(format!("cannot read {}", path.display()), &error)),
    };
    toml::from_str(&text).map_err(|error| {
        Failure::usage(format!("{} is not a config file: {}", path.display(), error.message())).hint(
            "it holds `url`, `api_key` and `ca_file`; remove it and run `dsec up` to have it written again",
        )
    })
}

/// Joins what was given with what the file has. What is empty was not given.
///
/// # Errors
/// An address is none.
pub(crate) fn resolve(given: Given, file: &ConfigFile) -> Result<Target, Failure> {
    let set = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
    let file_url = normal(&set(&file.url).unwrap_or_else(|| DEFAULT_LISTEN.to_owned()))?;
    let url = set(&given.url).map_or_else(|| Ok(file_url.clone()), |url| normal(&url))?;
    // The file's key belongs to the file's address: another server must not learn it.
    let same = place_of(&url) == place_of(&file_url);
    let file_key = set(&file.api_key).filter(|_| same);
    let given_ca = given.ca_file.filter(|path| !path.as_os_str().is_empty());
    let file_ca = file.ca_file.clone().filter(|path| same && !path.as_os_str().is_empty());
    let (api_key, ca_file) = (set(&given.api_key).or(file_key), given_ca.or(file_ca));
    Ok(Target { url, api_key, ca_file, project: given.project })
}

/// An address as `SCHEME://HOST[:PORT][/PATH]`: http where no scheme is given, without the `/v1` that the API's
/// pages show at its end.
fn normal(text: &str) -> Result<String, Failure> {
    let text = text.trim();
    let bad = |why: &str| {
        Failure::usage(format!("{text:?} is not an address of the API: {why}"))
            .hint(format!("it looks like http://{DEFAULT_LISTEN} or https://dsec.example.com"))
    };
    let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url = Url::parse(&whole).map_err(|error| bad(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad("its scheme is neither http nor https"));
    }
    if !url.username().is_empty() || url.password().is_some() || whole.contains(['?', '#', '@']) {
        return Err(bad("it holds more than a host, a port and a path"));
    }
    let (_, rest) = whole.split_once("://").unwrap_or_default();
    let rest = rest.trim_end_matches('/');
    let rest = rest.strip_suffix("/v1").unwrap_or(rest).trim_end_matches('/');
    Ok(format!("{}://{rest}", url.scheme()))
}

/// What makes two addresses the same server.
fn place_of(url: &str) -> Option<(String, String, u16, String)> {
    let url = Url::parse(url).ok()?;
    let host = url.host_str()?;
    let host = if matches!(host, "localhost" | "[::1]") { "127.0.0.1" } else { host };
    let path = url.path().trim_end_matches('/');
    Some((url.scheme().to_owned(), host.to_owned(), url.port_or_known_default()?, path.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Cases {
        paths: Vec<PathCase>,
        targets: Vec<TargetCase>,
        files: Vec<FileCase>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct PathCase {
        name: String,
        env: HashMap<String, String>,
        #[serde(default)]
        root: bool,
        homes: HashMap<String, PathBuf>,
        path: PathBuf,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct TargetCase {
        name: String,
        #[serde(default)]
        env: HashMap<String, String>,
        #[serde(default)]
        file: ConfigFile,
        url: Option<String>,
        api_key: Option<String>,
        ca_file: Option<PathBuf>,
        error: Option<String>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct FileCase {
        name: String,
        text: String,
        error: String,
    }

    fn cases() -> Cases {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/configuration.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn the_file_is_where_the_cases_say() {
        for case in cases().paths {
            let surroundings = Surroundings {
                variable: &|name| case.env.get(name).map(OsString::from),
                root: case.root,
                home_of: &|name| case.homes.get(name.to_str()?).cloned(),
            };
            assert_eq!(surroundings.path(), Some(case.path), "{}", case.name);
        }
    }

    #[test]
    fn the_target_is_what_the_cases_say() {
        for case in cases().targets {
            let variable = |name: &str| case.env.get(name).cloned();
            let given = Given {
                url: variable("DSEC_URL"),
                api_key: variable("DSEC_API_KEY"),
                ca_file: variable("DSEC_CA_FILE").map(PathBuf::from),
                project: None,
            };
            match (resolve(given, &case.file), case.error) {
                (Ok(target), None) => {
                    let url = case.url.unwrap();
                    let wanted = Target { url, api_key: case.api_key, ca_file: case.ca_file, project: None };
                    assert_eq!(target, wanted, "{}", case.name);
                }
                (Err(failure), Some(text)) => {
                    assert!(failure.message.contains(&text), "{}: {failure}", case.name);
                }
                (found, _) => panic!("{}: {found:?}", case.name),
            }
        }
    }

    #[test]
    fn a_file_that_is_none_is_refused_as_the_cases_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        for case in cases().files {
            std::fs::write(&path, case.text).unwrap();
            let failure = read(&path).unwrap_err();
            assert!(failure.message.contains(&case.error), "{}: {failure}", case.name);
        }
        assert_eq!(read(&dir.path().join("none")).unwrap(), ConfigFile::default());
    }
}
