//! Settings: a TOML file, then flags and environment over it, checked once into [`Config`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use dsec_model::{IdError, NodeId};
use serde::{Deserialize, Serialize};

/// Most nodes of one cluster (the design's scale unit has 160): above it a list is a mistake.
pub const NODES_MAX: usize = 1024;
/// Longest path of a Unix socket, bytes: `sun_path` has 108 with its closing zero.
pub const SOCKET_PATH_MAX: usize = 107;

/// The file as written, before it is checked. Every field may come from a flag instead.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfigFile {
    /// Where the public API listens, `host:port`. Port 0: any free one.
    pub listen: Option<String>,
    /// The key file that `dsec up` makes.
    pub keys_file: Option<PathBuf>,
    /// The nodes.
    pub nodes: Vec<NodeEntry>,
}

/// One node as written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeEntry {
    /// Its name, the same as in its edge's configuration: sandbox ids carry it.
    pub name: String,
    /// The Unix socket of its edge.
    pub socket: PathBuf,
}

/// Checked settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// Where the public API listens, `host:port`.
    pub listen: String,
    /// The key file.
    pub keys_file: PathBuf,
    /// At least one node, each name once.
    pub nodes: Vec<NodeConfig>,
}

/// One checked node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeConfig {
    /// Its name.
    pub name: NodeId,
    /// The Unix socket of its edge.
    pub socket: PathBuf,
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("the configuration file {path} is not valid")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A setting is given nowhere.
    #[error("{field} is not set; set it in the configuration file or with {flag}")]
    Missing {
        /// The setting.
        field: &'static str,
        /// The flag that sets it.
        flag: &'static str,
    },
    /// The listen address has no port, or a bad one.
    #[error("listen is {given:?}; it must be host:port, such as 127.0.0.1:7420 or [::1]:7420")]
    Listen {
        /// As given.
        given: String,
    },
    /// A node's name is not one.
    #[error("a node of the configuration has a bad name")]
    NodeName(#[source] IdError),
    /// Two nodes have one name.
    #[error("the node {0} is configured twice")]
    NodeTwice(NodeId),
    /// Too many nodes.
    #[error("{0} nodes are configured; at most {NODES_MAX} are taken")]
    TooManyNodes(usize),
    /// A socket's path cannot be a socket's path.
    #[error(
        "the socket of node {node} is {path:?}; it must be an absolute path of at most {SOCKET_PATH_MAX} bytes"
    )]
    Socket {
        /// Whose.
        node: NodeId,
        /// As given.
        path: PathBuf,
    },
    /// `--node` is not `NAME=SOCKET`.
    #[error("{0:?} is not NAME=SOCKET")]
    NodeFlag(String),
}

impl std::str::FromStr for NodeEntry {
    type Err = ConfigError;

    /// `NAME=SOCKET`, the form of `--node`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.split_once('=') {
            Some((name, socket)) if !name.is_empty() && !socket.is_empty() => {
                Ok(Self { name: name.to_owned(), socket: PathBuf::from(socket) })
            }
            _ => Err(ConfigError::NodeFlag(text.to_owned())),
        }
    }
}

impl ConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is not TOML, or has a field that does not exist.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text)
            .map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })
    }

    /// Checks everything that can be checked without touching the host.
    ///
    /// # Errors
    /// The first setting that is missing or cannot be used.
    pub fn validate(self) -> Result<Config, ConfigError> {
        let listen = self.listen.ok_or(ConfigError::Missing { field: "listen", flag: "--listen" })?;
        check_listen(&listen)?;
        let keys_file =
            self.keys_file.ok_or(ConfigError::Missing { field: "keys_file", flag: "--keys-file" })?;
        if self.nodes.is_empty() {
            return Err(ConfigError::Missing { field: "nodes", flag: "--node" });
        }
        if self.nodes.len() > NODES_MAX {
            return Err(ConfigError::TooManyNodes(self.nodes.len()));
        }
        let mut seen = BTreeSet::new();
        let mut nodes = Vec::with_capacity(self.nodes.len());
        for entry in self.nodes {
            let name: NodeId = entry.name.parse().map_err(ConfigError::NodeName)?;
            let length = entry.socket.as_os_str().len();
            if !entry.socket.is_absolute() || length > SOCKET_PATH_MAX {
                return Err(ConfigError::Socket { node: name, path: entry.socket });
            }
            if !seen.insert(name.clone()) {
                return Err(ConfigError::NodeTwice(name));
            }
            nodes.push(NodeConfig { name, socket: entry.socket });
        }
        Ok(Config { listen, keys_file, nodes })
    }
}

fn check_listen(listen: &str) -> Result<(), ConfigError> {
    let bad = || ConfigError::Listen { given: listen.to_owned() };
    let (host, port) = listen.rsplit_once(':').ok_or_else(bad)?;
    let bare_v6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
    if host.is_empty() || bare_v6 || port.parse::<u16>().is_err() {
        return Err(bad());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        listen = "127.0.0.1:0"
        keys_file = "/run/dsec/keys.json"
        nodes = [{ name = "n1", socket = "/run/dsec/edge.sock" }]
    "#;

    fn check(text: &str) -> Result<Config, String> {
        toml::from_str::<ConfigFile>(text)
            .map_err(|error| error.to_string())?
            .validate()
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_complete_file_is_taken() {
        let config = check(GOOD).unwrap();
        assert_eq!(config.listen, "127.0.0.1:0");
        assert_eq!(config.nodes[0].name.as_str(), "n1");
    }

    #[test]
    fn a_bad_file_is_refused_naming_the_setting() {
        for (from, to, says) in [
            ("listen =", "lisen =", "lisen"),
            ("127.0.0.1:0", "127.0.0.1", "host:port"),
            ("127.0.0.1:0", "::1", "host:port"),
            ("127.0.0.1:0", "h:70000", "host:port"),
            ("127.0.0.1:0", ":80", "host:port"),
            ("\"n1\"", "\"N1\"", "bad name"),
            ("/run/dsec/edge.sock", "edge.sock", "absolute"),
            ("name =", "nom =", "nom"),
            ("keys_file", "#", "--keys-file"),
            ("nodes =", "# ", "--node"),
        ] {
            let error = check(&GOOD.replace(from, to)).unwrap_err();
            assert!(error.contains(says), "{from} -> {to}: {error}");
        }
        let twice = GOOD.replace("nodes = [", "nodes = [{ name = \"n1\", socket = \"/a\" }, ");
        assert!(check(&twice).unwrap_err().contains("twice"));
    }

    #[test]
    fn a_node_flag_is_a_name_and_a_socket() {
        let entry: NodeEntry = "n2=/run/e.sock".parse().unwrap();
        assert_eq!((entry.name.as_str(), entry.socket.to_str()), ("n2", Some("/run/e.sock")));
        for bad in ["", "n2", "=x", "n2="] {
            assert!(bad.parse::<NodeEntry>().is_err(), "{bad:?} was taken");
        }
    }
}
