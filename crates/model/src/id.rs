//! Opaque ids. Parsing is the only door in; a sandbox id carries the node that runs it, so that
//! routing a request needs no lookup.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a {kind} id: {rule}")]
pub struct IdError {
    /// Which kind of id was wanted.
    pub kind: &'static str,
    /// The text as it was given, shortened to 80 characters.
    pub given: String,
    /// The rule it breaks.
    pub rule: &'static str,
}

fn fail<T>(kind: &'static str, given: &str, rule: &'static str) -> Result<T, IdError> {
    Err(IdError { kind, given: given.chars().take(80).collect(), rule })
}

fn is_label(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/' | b':'))
        && text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
}

macro_rules! text_id {
    ($name:ident, $kind:literal, $doc:literal, $check:expr) => {
        #[doc = $doc]
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                let check: fn(&str) -> Result<(), &'static str> = $check;
                match check(text) {
                    Ok(()) => Ok(Self(text.to_owned())),
                    Err(rule) => fail($kind, text, rule),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id!(NodeId, "node", "A node's name in the cluster: 1 to 32 lower-case letters and digits.", |text| {
    if !is_label(text) {
        return Err("it must be made of lower-case letters and digits");
    }
    if text.len() > 32 { Err("it must have at most 32 characters") } else { Ok(()) }
});

text_id!(
    PoolName,
    "pool",
    "A pool of nodes, as their operators name it: 1 to 32 lower-case letters, digits and `-`.",
    |text| {
        if !is_label(text.replace('-', "").as_str()) || text.starts_with('-') {
            return Err("it must start with a lower-case letter or digit and hold those and '-' only");
        }
        if text.len() > 32 { Err("it must have at most 32 characters") } else { Ok(()) }
    }
);

impl Default for PoolName {
    /// The pool of a node that does not say which it is of.
    fn default() -> Self {
        Self("onprem".to_owned())
    }
}

text_id!(SandboxId, "sandbox", "A sandbox: `sb-<node>-<random>`.", |text| {
    const SHAPE: &str = "it must look like sb-<node>-<random>";
    let mut parts = text.split('-');
    let (Some("sb"), Some(node), Some(random), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(SHAPE);
    };
    if is_label(node) && node.len() <= 32 && is_label(random) && random.len() <= 32 {
        Ok(())
    } else {
        Err(SHAPE)
    }
});

text_id!(ExecId, "exec", "One command in a sandbox: `ex-<random>`, unique within its sandbox.", |text| {
    match text.strip_prefix("ex-") {
        Some(rest) if is_label(rest) && rest.len() <= 32 => Ok(()),
        _ => Err("it must look like ex-<random>"),
    }
});

text_id!(
    SessionId,
    "session",
    "A shell session in a sandbox, named by the caller: 1 to 64 letters, digits, `-`, `_` and `.`.",
    |text| {
        if text.len() > 64 {
            return Err("it must have at most 64 characters");
        }
        if is_name(text) && !text.contains(['/', ':']) {
            Ok(())
        } else {
            Err("it must start with a letter or digit and hold letters, digits, '-', '_' and '.' only")
        }
    }
);

text_id!(
    TaskId,
    "task",
    "A job that many sandboxes belong to, named by the caller: 1 to 128 letters, digits, `-_./:`.",
    |text| {
        if text.len() > 128 {
            return Err("it must have at most 128 characters");
        }
        if is_name(text) {
            Ok(())
        } else {
            Err("it must start with a letter or digit and hold letters, digits and '-_./:' only")
        }
    }
);

impl SandboxId {
    /// Joins a node and the random part, which the caller draws: at least 12 characters of `a-z0-9`.
    ///
    /// # Errors
    /// The random part breaks the rule.
    pub fn new(node: &NodeId, random: &str) -> Result<Self, IdError> {
        format!("sb-{node}-{random}").parse()
    }

    /// The node that runs the sandbox.
    pub fn node(&self) -> &str {
        self.0.split('-').nth(1).unwrap_or_default()
    }

    /// The random part alone: what names the sandbox's directories and cgroups on its node.
    pub fn random(&self) -> &str {
        self.0.rsplit('-').next().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_id_carries_its_node() {
        let id: SandboxId = "sb-n1-abc123def456".parse().unwrap();
        assert_eq!(id.node(), "n1");
        assert_eq!(id.random(), "abc123def456");
    }

    #[test]
    fn a_path_or_a_shell_word_is_not_an_id() {
        for bad in ["", "sb-", "sb-n1-", "sb-n1-a/b", "sb-n1-../..", "sb-N1-abc", "sb-n1-abc-def", "sb n1 a"]
        {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad:?} was taken");
        }
        for bad in ["", ".", "..", "-x", "a b", "a/b", "a:b"] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad:?} was taken");
        }
        assert!("rl/job-42:step.7".parse::<TaskId>().is_ok());
        assert!("ex-1f".parse::<ExecId>().is_ok());
        assert!("1f".parse::<ExecId>().is_err());
    }

    #[test]
    fn an_id_survives_json_and_a_bad_one_does_not_enter_by_it() {
        let id: SandboxId = serde_json::from_str("\"sb-n1-abc\"").unwrap();
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"sb-n1-abc\"");
        assert!(serde_json::from_str::<SandboxId>("\"../../etc\"").is_err());
    }
}
