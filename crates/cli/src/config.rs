//! Where the platform is and which key opens it: flags, then the environment, then the config file,
//! then the default. Clap joins the first two.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Where `dsec up` listens unless told otherwise.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:7420";
/// Variable that names another config file.
pub(crate) const CONFIG_VARIABLE: &str = "DSEC_CONFIG";

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
}

/// What a client needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Address of the API, without a slash at its end.
    pub(crate) url: String,
    /// Key for it.
    pub(crate) api_key: Option<String>,
}

/// Path of the config file: `$DSEC_CONFIG`, else `~/.config/dsec/config.toml`.
pub(crate) fn path() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os(CONFIG_VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    match std::env::home_dir().filter(|home| !home.as_os_str().is_empty()) {
        Some(home) => Ok(home.join(".config/dsec/config.toml")),
        None => Err(Failure::new("there is no home directory to keep the config file in")
            .hint(format!("set HOME, or {CONFIG_VARIABLE} to the path of a config file"))),
    }
}

/// Reads a config file. A missing one is an empty one.
pub(crate) fn read(path: &Path) -> Result<ConfigFile, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(ConfigFile::default()),
        Err(error) => return Err(Failure::io(format!("cannot read {}", path.display()), &error)),
    };
    toml::from_str(&text).map_err(|error| {
        Failure::new(format!("{} is not a config file: {}", path.display(), error.message()))
            .hint("it holds `url` and `api_key`; remove it and run `dsec up` to have it written again")
    })
}

/// Joins what was given with what the file has.
pub(crate) fn resolve(url: Option<String>, api_key: Option<String>, file: &ConfigFile) -> Target {
    let default = || format!("http://{DEFAULT_LISTEN}");
    let clean = |url: String| {
        let url = url.trim().trim_end_matches('/').to_owned();
        if url.contains("://") { url } else { format!("http://{url}") }
    };
    let file_url = clean(file.url.clone().unwrap_or_else(default));
    let url = url.filter(|url| !url.is_empty()).map_or_else(|| file_url.clone(), clean);
    // The file's key belongs to the file's address: another server must not learn it.
    let file_key = if same_place(&url, &file_url) { file.api_key.clone() } else { None };
    Target { url, api_key: api_key.filter(|key| !key.is_empty()).or(file_key) }
}

fn same_place(a: &str, b: &str) -> bool {
    let loopback = |url: &str| url.replacen("://localhost:", "://127.0.0.1:", 1);
    loopback(a) == loopback(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> ConfigFile {
        ConfigFile { url: Some("http://10.0.0.1:7420/".into()), api_key: Some("dsec_file".into()) }
    }

    #[test]
    fn what_is_given_wins_over_the_file_and_the_file_over_the_default() {
        let none = resolve(None, None, &ConfigFile::default());
        assert_eq!(none, Target { url: "http://127.0.0.1:7420".into(), api_key: None });
        let from_file = resolve(None, None, &file());
        assert_eq!(from_file.url, "http://10.0.0.1:7420");
        assert_eq!(from_file.api_key.as_deref(), Some("dsec_file"));
        let given = resolve(Some("h:1".into()), Some("dsec_flag".into()), &file());
        assert_eq!(given, Target { url: "http://h:1".into(), api_key: Some("dsec_flag".into()) });
        assert_eq!(resolve(None, Some("k".into()), &file()).api_key.as_deref(), Some("k"));
    }

    #[test]
    fn the_key_of_the_file_is_not_sent_to_another_server() {
        assert_eq!(resolve(Some("http://evil:7420".into()), None, &file()).api_key, None);
        let local = ConfigFile { url: None, ..file() };
        let same = resolve(Some("http://localhost:7420".into()), None, &local);
        assert_eq!(same.api_key.as_deref(), Some("dsec_file"));
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, "url = \"x\"\napikey = \"y\"\n").unwrap();
        assert!(read(&path).unwrap_err().message.contains("apikey"));
        assert_eq!(read(&dir.path().join("none")).unwrap(), ConfigFile::default());
    }
}
