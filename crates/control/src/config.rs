//! Settings: a TOML file, then flags and environment over it, checked once into [`Config`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_model::placement;
use dsec_model::{IdError, NodeId, PoolName};
use dsec_proto::rest::SOCKET_PATH_MAX;
use serde::{Deserialize, Serialize};

use crate::cluster::Settings;

/// Most nodes of one cluster (the design's scale unit has 160): above it a list is a mistake.
pub const NODES_MAX: usize = 1024;
/// Least and most life of a certificate, seconds: a renewal must come through before the end, and who took a key must not have it for
/// years.
pub const LIFETIME_MIN_S: u64 = 60;
const LIFETIME_MAX_S: u64 = 90 * 24 * 3600;

/// Databases that are known.
const ONE_FILE: &str = "sqlite:";
const DATABASES: [&str; 3] = [ONE_FILE, "postgres://", "postgresql://"];

/// The file as written, before it is checked. Every field may come from a flag instead.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfigFile {
    /// Where the public API listens, `host:port`. Port 0: any free one.
    pub listen: Option<String>,
    /// The key file that `dsec up` makes.
    pub keys_file: Option<PathBuf>,
    /// Where identities are kept: `sqlite:PATH` or `postgres://...`. Default: `control.db` beside the key file.
    pub database: Option<String>,
    /// Certificate of the public API, PEM, with those between it and its root. With `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM.
    pub tls_key: Option<PathBuf>,
    /// Directory to make an authority and a certificate of the public API in, for development.
    pub tls_self_made: Option<PathBuf>,
    /// Directory of the cluster that machines may join over the network: its authority, tokens and nodes.
    pub cluster_dir: Option<PathBuf>,
    /// How long certificates of nodes and of control live, seconds. Default: a week.
    pub certificate_lifetime_s: Option<u64>,
    /// The nodes on this machine.
    pub nodes: Vec<NodeEntry>,
    /// The pool that takes over when the others are full. The same on all servers of a cluster.
    pub burst: Option<BurstEntry>,
}

/// `[burst]` as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BurstEntry {
    /// The pool that takes over.
    pub pool: String,
    /// The utilisation of all other pools above which it does, 0 to 1. Default: 0.8.
    pub above: Option<f64>,
    /// The share of the creates that it could take which it then takes, above 0 and up to 1. Default: 0.3.
    pub share: Option<f64>,
}

impl BurstEntry {
    fn checked(self) -> Result<BurstConfig, ConfigError> {
        let pool = self.pool.parse().map_err(ConfigError::BurstPool)?;
        let above = self.above.unwrap_or(placement::Burst::ABOVE);
        let share = self.share.unwrap_or(placement::Burst::SHARE);
        if !(0.0..=1.0).contains(&above) {
            return Err(ConfigError::BurstAbove(above));
        }
        if !(share > 0.0 && share <= 1.0) {
            return Err(ConfigError::BurstShare(share));
        }
        Ok(BurstConfig { pool, above, share })
    }
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
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Config {
    /// Where the public API listens, `host:port`.
    pub listen: String,
    /// The key file.
    pub keys_file: PathBuf,
    /// Where identities are kept. May have a password in it.
    #[serde(skip)]
    pub database: String,
    /// The certificate of the public API; without it, it speaks plain HTTP.
    #[serde(flatten)]
    pub tls: Option<Tls>,
    /// The cluster that machines may join.
    #[serde(flatten)]
    pub cluster: Option<ClusterConfig>,
    /// Each name once; at least one, where there is no cluster.
    pub nodes: Vec<NodeConfig>,
    /// The pool that takes over when the others are full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<BurstConfig>,
}

/// Checked `[burst]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BurstConfig {
    /// The pool that takes over.
    pub pool: PoolName,
    /// The utilisation of all other pools above which it does, 0 to 1.
    pub above: f64,
    /// The share of the creates that it could take which it then takes, above 0 and up to 1.
    pub share: f64,
}

impl From<BurstConfig> for placement::Burst {
    fn from(BurstConfig { pool, above, share }: BurstConfig) -> Self {
        Self { pool, above, share }
    }
}

/// The cluster that machines may join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterConfig {
    /// Where its authority, its tokens and its nodes are kept.
    #[serde(flatten)]
    pub place: ClusterPlace,
    /// How long certificates live, seconds.
    pub certificate_lifetime_s: u64,
}

/// Where what a cluster knows is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ClusterPlace {
    /// In files of this server.
    Files {
        /// Their directory.
        #[serde(rename = "cluster_dir")]
        dir: PathBuf,
    },
    /// In the database, which several servers share.
    Database {
        /// Directory of what this server kept in files before; that moves into the database.
        #[serde(rename = "cluster_dir", skip_serializing_if = "Option::is_none")]
        earlier: Option<PathBuf>,
    },
}

impl ClusterConfig {
    /// The same for those who use it.
    pub fn settings(&self) -> Settings {
        Settings { lifetime: Duration::from_secs(self.certificate_lifetime_s), ..Settings::default() }
    }
}

/// Whence the certificate of the public API is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Tls {
    /// From these files.
    Files {
        /// Its chain.
        #[serde(rename = "tls_cert")]
        cert: PathBuf,
        /// Its private key.
        #[serde(rename = "tls_key")]
        key: PathBuf,
    },
    /// Made here.
    SelfMade {
        /// The directory to keep it in.
        #[serde(rename = "tls_self_made")]
        dir: PathBuf,
    },
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
    /// The database is none that is known.
    #[error("database must begin with one of {}", DATABASES.join(", "))]
    Database,
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
    /// A certificate without its key, or the other way round.
    #[error("tls_cert and tls_key go together; set both, or neither")]
    HalfTls,
    /// Two certificates.
    #[error("tls_self_made makes a certificate and tls_cert names one; set one of them")]
    TwiceTls,
    /// Certificates that live too short or too long.
    #[error("certificate_lifetime_s is {0}; it must be between {LIFETIME_MIN_S} and {LIFETIME_MAX_S}")]
    Lifetime(u64),
    /// The pool that takes over has a bad name.
    #[error("burst.pool is not the name of a pool")]
    BurstPool(#[source] IdError),
    /// A threshold that is none.
    #[error("burst.above is {0}; it is the share of the other pools that is in use, 0 to 1")]
    BurstAbove(f64),
    /// A share that is none.
    #[error("burst.share is {0}; it must be above 0 and at most 1: without [burst] nothing is taken over")]
    BurstShare(f64),
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
        let database = match self.database {
            Some(database) if DATABASES.iter().any(|scheme| database.starts_with(scheme)) => database,
            Some(_) => return Err(ConfigError::Database),
            None => format!("sqlite:{}", keys_file.with_file_name("control.db").display()),
        };
        let place = match (database.starts_with(ONE_FILE), self.cluster_dir) {
            (true, dir) => dir.map(|dir| ClusterPlace::Files { dir }),
            (false, earlier) => Some(ClusterPlace::Database { earlier }),
        };
        if self.nodes.is_empty() && place.is_none() {
            return Err(ConfigError::Missing { field: "nodes", flag: "--node" });
        }
        let usual_s = Settings::default().lifetime.as_secs();
        let certificate_lifetime_s = self.certificate_lifetime_s.unwrap_or(usual_s);
        if !(LIFETIME_MIN_S..=LIFETIME_MAX_S).contains(&certificate_lifetime_s) {
            return Err(ConfigError::Lifetime(certificate_lifetime_s));
        }
        let cluster = place.map(|place| ClusterConfig { place, certificate_lifetime_s });
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
        let tls = tls_of(self.tls_cert, self.tls_key, self.tls_self_made)?;
        let burst = self.burst.map(BurstEntry::checked).transpose()?;
        Ok(Config { listen, keys_file, database, tls, cluster, nodes, burst })
    }
}

fn tls_of(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    self_made: Option<PathBuf>,
) -> Result<Option<Tls>, ConfigError> {
    match (cert, key, self_made) {
        (None, None, dir) => Ok(dir.map(|dir| Tls::SelfMade { dir })),
        (Some(cert), Some(key), None) => Ok(Some(Tls::Files { cert, key })),
        (Some(_), Some(_), Some(_)) => Err(ConfigError::TwiceTls),
        _ => Err(ConfigError::HalfTls),
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
        assert_eq!(config.database, "sqlite:/run/dsec/control.db");
        assert_eq!(config.burst, None);
        let burst = check(&format!("{GOOD}[burst]\npool = \"cloud\"\n")).unwrap().burst.unwrap();
        assert_eq!((burst.pool.as_str(), burst.above, burst.share), ("cloud", 0.8, 0.3));
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
            ("keys_file", "database = \"mysql://h/x\"\n keys_file", "must begin with"),
            ("nodes =", "# ", "--node"),
            ("keys_file", "certificate_lifetime_s = 1\n keys_file", "between 60"),
            ("nodes =", "burst = { pool = \"The Cloud\" }\n nodes =", "burst.pool"),
            ("nodes =", "burst = { pool = \"cloud\", above = 80 }\n nodes =", "burst.above is 80"),
            ("nodes =", "burst = { pool = \"cloud\", share = 0.0 }\n nodes =", "burst.share is 0"),
            ("nodes =", "burst = { above = 0.8 }\n nodes =", "pool"),
            ("keys_file", "tls_cert = \"/c\"\n keys_file", "go together"),
            (
                "keys_file",
                "tls_self_made = \"/d\"\n tls_cert = \"/c\"\n tls_key = \"/k\"\n keys_file",
                "one of them",
            ),
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
