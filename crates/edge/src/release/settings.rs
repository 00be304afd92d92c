//! Changing what is the operator's in `edge.toml`, and leaving the rest to the letter.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};
use toml_edit::{DocumentMut, Item, TableLike, Value};

/// Keys of a node alone: what it is, where it is, and what would take its sandboxes' ground away.
const OF_THE_NODE: [&str; 8] =
    ["node", "state_dir", "socket", "listen", "advertise", "aether", "fill", "store"];
/// Keys that a change may name. A configuration has some tens.
const KEYS_MAX: usize = 1000;
/// Hexadecimal digits of a digest that are shown.
const DIGEST_DIGITS: usize = 16;

/// Why a change is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// What is to be set is no TOML.
    #[error("what is to be set is no TOML: {0}")]
    Set(String),
    /// What is there is no TOML.
    #[error("the node's configuration is no TOML: {0}")]
    There(String),
    /// A key of the node's own.
    #[error("{0} is the node's own and is not set from afar: write it into the node's edge.toml")]
    OfTheNode(String),
    /// A key that is a table in one and a value in the other.
    #[error("{0} is a table in one of the two configurations and a value in the other")]
    Kind(String),
    /// Too many keys.
    #[error("more than {KEYS_MAX} keys are named")]
    TooMany,
    /// Nothing is named.
    #[error("no key is named to be set or removed")]
    Nothing,
}

/// A configuration's text with keys removed and set.
///
/// # Errors
/// Something of it cannot be; the text names the key.
pub fn changed(there: &str, set: &str, unset: &[String]) -> Result<String, SettingsError> {
    let mut file: DocumentMut =
        there.parse().map_err(|e: toml_edit::TomlError| SettingsError::There(e.to_string()))?;
    let set: DocumentMut =
        set.parse().map_err(|e: toml_edit::TomlError| SettingsError::Set(e.to_string()))?;
    if set.is_empty() && unset.is_empty() {
        return Err(SettingsError::Nothing);
    }
    let first_of = |path: &String| path.split('.').next().unwrap_or_default().to_owned();
    let named: Vec<String> =
        set.iter().map(|(key, _)| key.to_owned()).chain(unset.iter().map(first_of)).collect();
    if let Some(key) = named.iter().find(|key| OF_THE_NODE.contains(&key.as_str())) {
        return Err(SettingsError::OfTheNode(key.clone()));
    }
    if named.len() > KEYS_MAX {
        return Err(SettingsError::TooMany);
    }
    for path in unset {
        remove(file.as_table_mut(), path);
    }
    merge(file.as_table_mut(), set.as_table(), "")?;
    Ok(file.to_string())
}

/// Removes a key, and the table it leaves empty.
fn remove(table: &mut dyn TableLike, path: &str) {
    let Some((key, rest)) = path.split_once('.') else {
        table.remove(path);
        return;
    };
    let Some(below) = table.get_mut(key).and_then(Item::as_table_like_mut) else { return };
    remove(below, rest);
    if below.is_empty() {
        table.remove(key);
    }
}

fn merge(into: &mut dyn TableLike, from: &dyn TableLike, path: &str) -> Result<(), SettingsError> {
    for (key, item) in from.iter() {
        let path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let Some(there) = into.get_mut(key) else {
            into.insert(key, item.clone());
            continue;
        };
        match (there.as_table_like_mut(), item.as_table_like()) {
            (Some(there), Some(item)) => merge(there, item, &path)?,
            (None, None) => replace(there, item),
            _ => return Err(SettingsError::Kind(path)),
        }
    }
    Ok(())
}

/// Puts a value into the place of another, whose comment stays with it.
fn replace(there: &mut Item, item: &Item) {
    if bare(there) == bare(item) {
        return;
    }
    match (there.as_value_mut(), item.as_value()) {
        (Some(there), Some(value)) => {
            let decor = there.decor().clone();
            *there = value.clone();
            *there.decor_mut() = decor;
        }
        _ => *there = item.clone(),
    }
}

/// A value without its blanks and comments.
fn bare(item: &Item) -> Option<String> {
    let mut value: Value = item.as_value()?.clone();
    value.decor_mut().clear();
    Some(value.to_string())
}

/// The first 16 hexadecimal digits of the SHA-256 of what is the operator's in a configuration; none of one that is no TOML.
pub fn digest(text: &str) -> Option<String> {
    let table: toml::Table = toml::from_str(text).ok()?;
    let mut lines = BTreeMap::new();
    for (key, value) in table.iter().filter(|(key, _)| !OF_THE_NODE.contains(&key.as_str())) {
        flatten(key, value, &mut lines);
    }
    let mut hash = Sha256::new();
    for (path, value) in lines {
        hash.update(format!("{path} = {value}\n"));
    }
    let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Some(digest[..DIGEST_DIGITS].to_owned())
}

fn flatten(path: &str, value: &toml::Value, lines: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            table.iter().for_each(|(key, value)| flatten(&format!("{path}.{key:?}"), value, lines));
        }
        value => drop(lines.insert(path.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THERE: &str = "# ours\nnode = \"n1\"\nstate_dir = \"/x\"\nmax_sandboxes = 7 # small\n\n[admission]\n# why\ncpu_overcommit = 8\n\n[labels]\nrack = \"r1\"\n";

    fn set(text: &str) -> Result<String, SettingsError> {
        changed(THERE, text, &[])
    }

    #[test]
    fn what_is_named_is_set_and_the_rest_stays_to_the_letter() {
        let text = set("max_sandboxes = 9\n[labels]\npool = \"a\"\n[cache]\nsize_mib = 300\n").unwrap();
        let wanted = THERE.replace("= 7 # small", "= 9 # small");
        assert!(text.starts_with(&wanted), "{text}");
        assert!(text.ends_with("rack = \"r1\"\npool = \"a\"\n[cache]\nsize_mib = 300\n"), "{text}");
        assert_eq!(changed(&text, "max_sandboxes=9", &[]).unwrap(), text);
    }

    #[test]
    fn what_is_so_already_changes_nothing() {
        assert_eq!(set("max_sandboxes=7\nadmission = { cpu_overcommit = 8 }\n").unwrap(), THERE);
    }

    #[test]
    fn a_key_is_removed_and_its_empty_table_with_it() {
        let text = changed(THERE, "", &["labels.rack".to_owned(), "nothing.there".to_owned()]).unwrap();
        assert!(!text.contains("labels") && text.contains("cpu_overcommit"), "{text}");
    }

    #[test]
    fn keys_of_the_node_are_refused_by_name() {
        for key in OF_THE_NODE {
            let refused = [set(&format!("{key} = \"x\"\n")), changed(THERE, "", &[format!("{key}.url")])];
            for error in refused.map(Result::unwrap_err) {
                assert_eq!(error, SettingsError::OfTheNode(key.to_owned()));
            }
        }
        assert_eq!(set("labels = 1"), Err(SettingsError::Kind("labels".to_owned())));
        assert_eq!(set(""), Err(SettingsError::Nothing));
        assert!(matches!(set("a ="), Err(SettingsError::Set(_))));
    }

    #[test]
    fn nodes_that_are_configured_alike_have_one_digest() {
        let other = "max_sandboxes=7\nstate_dir = \"/y\"\nnode = \"n2\"\nlabels = { rack = \"r1\" }\n[admission]\ncpu_overcommit = 8\n";
        assert_eq!(digest(THERE), digest(other));
        assert_ne!(digest(THERE), digest(&other.replace("r1", "r2")));
        assert_eq!(digest("a ="), None);
    }
}
