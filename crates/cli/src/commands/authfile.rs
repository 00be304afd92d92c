//! Credentials in docker's config file, as `docker login` writes them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use dsec_proto::rest::RegistryCredentials;
use serde::Deserialize;

use super::pull::SCHEME;
use crate::failure::Failure;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ConfigFile {
    auths: BTreeMap<String, Entry>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Entry")
    }
}

/// What a file has for a registry.
#[derive(Debug, PartialEq)]
pub(crate) enum Found {
    /// These.
    Credentials(RegistryCredentials),
    /// The name of a program that would have them.
    Helper(String),
    /// Nothing.
    Nothing,
}

/// Where docker keeps its file.
pub(crate) fn usual() -> Option<PathBuf> {
    let set = std::env::var_os("DOCKER_CONFIG").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    set.or_else(|| Some(std::env::home_dir()?.join(".docker"))).map(|dir| dir.join("config.json"))
}

/// What `file` has for a reference. One that nobody named may be missing.
pub(crate) fn look_up(file: &Path, is_named: bool, reference: &str) -> Result<Found, Failure> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if !is_named && error.kind() == std::io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(Failure::io(format!("cannot read {}", file.display()), &error)),
    };
    // What is wrong is told by its place alone: the text around it may be a password.
    let config: ConfigFile = serde_json::from_str(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Failure::usage(format!(
            "{} is no config file of docker's: line {line}, column {column}",
            file.display()
        ))
        .hint("mend it, or name another one with --authfile")
    })?;
    find(&config, reference).map_err(|why| Failure::usage(format!("{}: {why}", file.display())))
}

fn find(config: &ConfigFile, reference: &str) -> Result<Found, String> {
    let wanted = places(reference);
    for place in &wanted {
        let helper = config.cred_helpers.iter().find(|(key, _)| plain_key(key) == *place);
        if let Some((_, helper)) = helper {
            return Ok(Found::Helper(helper.clone()));
        }
        for (key, entry) in config.auths.iter().filter(|(key, _)| plain_key(key) == *place) {
            if let Some(credentials) =
                credentials(entry).ok_or_else(|| format!("the entry {key:?} is damaged"))?
            {
                return Ok(Found::Credentials(credentials));
            }
        }
    }
    Ok(config.creds_store.clone().filter(|store| !store.is_empty()).map_or(Found::Nothing, Found::Helper))
}

/// Keys that fit a reference, the closest first: some tools keep credentials for each repository.
fn places(reference: &str) -> Vec<String> {
    let rest = reference.strip_prefix(SCHEME).unwrap_or(reference);
    let rest = rest.split('@').next().unwrap_or_default();
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let path = path.split(':').next().unwrap_or_default();
    let mut place = format!("{}/{path}", host.to_ascii_lowercase());
    let mut places = vec![place.clone()];
    while let Some((above, _)) = place.rsplit_once('/') {
        place = above.to_owned();
        places.push(place.clone());
    }
    places
}

/// A key without a scheme, and without what registries' own paths are.
fn plain_key(key: &str) -> String {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let key = key.trim_end_matches('/');
    let key = key.strip_suffix("/v1").or_else(|| key.strip_suffix("/v2")).unwrap_or(key);
    match key.split_once('/') {
        Some((host, path)) => format!("{}/{path}", host.to_ascii_lowercase()),
        None => key.to_ascii_lowercase(),
    }
}

/// The outer one is missing where an entry is damaged, the inner one where it is empty.
fn credentials(entry: &Entry) -> Option<Option<RegistryCredentials>> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let none = RegistryCredentials::default();
    if let Some(token) = given(&entry.registrytoken) {
        return Some(Some(RegistryCredentials { registry_token: Some(token), ..none }));
    }
    if let Some(token) = given(&entry.identitytoken) {
        return Some(Some(RegistryCredentials { identity_token: Some(token), ..none }));
    }
    if let Some(auth) = given(&entry.auth) {
        let bytes = STANDARD.decode(&auth).or_else(|_| STANDARD_NO_PAD.decode(&auth)).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let (user, password) = text.trim_end_matches('\0').split_once(':')?;
        let (username, password) = (Some(user.to_owned()), Some(password.to_owned()));
        return Some(Some(RegistryCredentials { username, password, ..none }));
    }
    match (given(&entry.username), given(&entry.password)) {
        (username @ Some(_), password @ Some(_)) => {
            Some(Some(RegistryCredentials { username, password, ..none }))
        }
        _ => Some(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, reference: &str) -> Result<Found, String> {
        find(&serde_json::from_str(text).unwrap(), reference)
    }

    fn user(found: Result<Found, String>) -> Option<(String, String)> {
        match found.unwrap() {
            Found::Credentials(found) => Some((found.username?, found.password?)),
            _ => None,
        }
    }

    #[test]
    fn an_entry_is_found_by_the_registrys_host_and_port() {
        // ann:a:b, and bob:c
        let text = r#"{"auths": {
            "registry.example": {"auth": "YW5uOmE6Yg=="},
            "https://Other.Example:5000/v2/": {"auth": "Ym9iOmM="},
            "plain.example": {"username": "eve", "password": "d"},
            "empty.example": {}
        }, "HttpHeaders": {"x": "y"}}"#;
        let pair = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        for (reference, wanted) in [
            ("docker://registry.example/team/app:1", pair("ann", "a:b")),
            ("docker://registry.example:5000/team/app:1", None),
            ("docker://other.example:5000/app@sha256:0", pair("bob", "c")),
            ("docker://plain.example/app", pair("eve", "d")),
            ("docker://empty.example/app", None),
            ("docker://evil-registry.example/app", None),
        ] {
            assert_eq!(user(found(text, reference)), wanted, "{reference}");
        }
    }

    #[test]
    fn the_closest_entry_counts() {
        let text = r#"{"auths": {"h.example": {"auth": "YTph"}, "h.example/team": {"auth": "Yjpi"}, "h.example/team/app": {"auth": "Yzpj"}}}"#;
        for (reference, wanted) in [
            ("h.example/team/app:1", "c"),
            ("h.example/team/other", "b"),
            ("h.example/x", "a"),
            ("h.example/teamwork", "a"),
        ] {
            assert_eq!(user(found(text, reference)).unwrap().0, wanted, "{reference}");
        }
    }

    #[test]
    fn tokens_and_helpers_are_told_apart() {
        let text = r#"{"auths": {"a.example": {"auth": "YTo=", "identitytoken": "t"}, "b.example": {}},
            "credsStore": "store", "credHelpers": {"c.example": "special"}}"#;
        let Found::Credentials(token) = found(text, "a.example/x").unwrap() else { panic!() };
        assert_eq!((token.identity_token.as_deref(), token.username), (Some("t"), None));
        assert_eq!(found(text, "b.example/x"), Ok(Found::Helper("store".to_owned())));
        assert_eq!(found(text, "c.example/x"), Ok(Found::Helper("special".to_owned())));
        assert_eq!(found("{}", "a.example/x"), Ok(Found::Nothing));
    }

    #[test]
    fn what_is_damaged_is_named_without_its_secret() {
        for auth in ["!secret!", "c2VjcmV0"] {
            let error =
                found(&format!(r#"{{"auths": {{"a.example": {{"auth": "{auth}"}}}}}}"#), "a.example/x")
                    .unwrap_err();
            assert!(error.contains("a.example") && !error.contains("secret"), "{error}");
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        assert_eq!(look_up(&file, false, "a.example/x"), Ok(Found::Nothing));
        assert!(look_up(&file, true, "a.example/x").is_err());
        std::fs::write(&file, r#"{"auths": {"a.example": {"auth": secret}}}"#).unwrap();
        let failure = look_up(&file, false, "a.example/x").unwrap_err();
        assert!(failure.message.contains("line 1") && !failure.message.contains("secret"), "{failure}");
    }
}
