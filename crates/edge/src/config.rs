//! `edge.toml`: read once, checked once, then passed down as [`Config`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_model::limits::cores_to_millis;
use dsec_model::{CpuClass, Limits, NodeId, Policy, PoolName};
use dsec_proto::rest::SOCKET_PATH_MAX;
use dsec_registry::{Allowed, Pattern};
use dsec_store::StoreSettings;
use serde::Deserialize;

/// Most that may be configured: one sandbox takes a range of 65,536 host ids, and 2^32 of them exist.
const MAX_SANDBOXES_MAX: u64 = 60_000;
/// Content of layers kept on a node when nothing is said: some hundred working sets, as a run reads a tenth of its image.
const CACHE_MIB_DEFAULT: u64 = 64 << 10;
/// Least: what a few images are worked with at a time.
const CACHE_MIB_MIN: u64 = 256;
/// Most swap, MiB (8 TiB): above it a number is a mistake, and a swap file counts its pages in 32 bits.
const SWAP_MIB_MAX: u64 = 8 << 20;
/// How long a sandbox stands still for a pack when nothing is said: a snapshot takes as long to write out what that reads.
const STILL_MS_DEFAULT: u64 = 500;
/// Most: callers of a sandbox that stands still wait, and their time limits run.
const STILL_MS_MAX: u64 = 10_000;

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    node: String,
    state_dir: PathBuf,
    socket: Option<PathBuf>,
    listen: Option<SocketAddr>,
    advertise: Option<String>,
    aether: Option<PathBuf>,
    fill: Option<PathBuf>,
    max_sandboxes: Option<u64>,
    pool: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    store: Option<StoreSettings>,
    #[serde(default)]
    cache: Cache,
    #[serde(default)]
    admission: Admission,
    #[serde(default)]
    packs: Packs,
    #[serde(default)]
    registries: Registries,
    #[serde(default)]
    swap: Swap,
    #[serde(default)]
    defaults: Defaults,
}

/// Registries that images may be pulled from.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Registries {
    /// `HOST`, `HOST:PORT` or `*.DOMAIN`; without it any.
    allow: Option<Vec<String>>,
}

impl Registries {
    fn allowed(self) -> Result<Allowed, String> {
        let Some(allow) = self.allow else { return Ok(Allowed::default()) };
        let parsed: Result<Vec<Pattern>, _> = allow.iter().map(|pattern| pattern.parse()).collect();
        parsed.map(Allowed::only).map_err(|error| format!("registries.allow: {error}"))
    }
}

/// What the node keeps for itself, and how far it promises more than it has: [`Policy`], as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Admission {
    memory_overcommit: Option<u64>,
    memory_reserve_mib: Option<u64>,
    memory_pressure_max: Option<f64>,
    cpu_overcommit: Option<u64>,
    cpu_pressure_max: Option<f64>,
    disk_reserve_mib: Option<u64>,
    files_reserve: Option<u64>,
    processes_reserve: Option<u64>,
}

impl Admission {
    fn over(self, base: Policy) -> Result<Policy, String> {
        let policy = Policy {
            memory_overcommit: self.memory_overcommit.unwrap_or(base.memory_overcommit),
            memory_reserve_mib: self.memory_reserve_mib.unwrap_or(base.memory_reserve_mib),
            memory_pressure_max: self.memory_pressure_max.unwrap_or(base.memory_pressure_max),
            cpu_overcommit: self.cpu_overcommit.unwrap_or(base.cpu_overcommit),
            cpu_pressure_max: self.cpu_pressure_max.unwrap_or(base.cpu_pressure_max),
            disk_reserve_mib: self.disk_reserve_mib.unwrap_or(base.disk_reserve_mib),
            files_reserve: self.files_reserve.unwrap_or(base.files_reserve),
            processes_reserve: self.processes_reserve.unwrap_or(base.processes_reserve),
            ..base
        };
        for (name, factor) in
            [("memory_overcommit", policy.memory_overcommit), ("cpu_overcommit", policy.cpu_overcommit)]
        {
            if factor == 0 {
                return Err(format!("admission.{name} is 0; it must be at least 1"));
            }
        }
        for (name, share) in [
            ("memory_pressure_max", policy.memory_pressure_max),
            ("cpu_pressure_max", policy.cpu_pressure_max),
        ] {
            if !(0.0..=1.0).contains(&share) {
                return Err(format!("admission.{name} is {share}; it is a share of time, 0 to 1"));
            }
        }
        Ok(policy)
    }
}

/// The cache of layers' content on this node.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Cache {
    size_mib: Option<u64>,
}

/// The making of layers of sandboxes.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Packs {
    still_ms_max: Option<u64>,
}

/// Swap of the node, for the memory of paused sandboxes.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Swap {
    size_mib: u64,
}

/// Limits of sandboxes whose create leaves them out, in the words of the create request.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Defaults {
    memory_limit_mb: Option<u64>,
    cpu_cores_limit: Option<f64>,
    cpu_burst_ms: Option<u64>,
    cpu_weight: Option<u64>,
    cpu_class: Option<CpuClass>,
    pids_limit: Option<u64>,
    open_files_limit: Option<u64>,
    disk_limit_mb: Option<u64>,
    disk_files_limit: Option<u64>,
    ttl_running_stop: Option<u64>,
    auto_pause: Option<bool>,
    ttl_paused_stop: Option<u64>,
    max_lifetime: Option<u64>,
}

/// What the edge runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// The file that it was read from.
    pub file: PathBuf,
    /// This node's name.
    pub node: NodeId,
    /// Root of everything the edge keeps.
    pub state_dir: PathBuf,
    /// Where it serves.
    pub socket: PathBuf,
    /// Where it listens for the servers of its cluster, once it is of one.
    pub listen: Option<SocketAddr>,
    /// Where those reach it, `host:port`, if it is not where it listens.
    pub advertise: Option<String>,
    /// The agent's binary.
    pub aether: PathBuf,
    /// The fill worker's binary.
    pub fill: PathBuf,
    /// When it takes one more sandbox.
    pub admission: Policy,
    /// The pool of nodes that this one is of.
    pub pool: PoolName,
    /// What the operator says of this node: placement can be asked for them.
    pub labels: BTreeMap<String, String>,
    /// Where layers are kept. Default: a directory of the state directory.
    pub store: StoreSettings,
    /// Bytes that content of layers may take on this node, beside the store.
    pub cache_bytes: u64,
    /// How long a sandbox may stand still for what it wrote to be read where it lies. A snapshot is read of one that wrote more.
    pub still_max: Duration,
    /// Registries that images may be pulled from.
    pub registries: Allowed,
    /// Size of the node's own swap file, bytes. 0: it makes none.
    pub swap_bytes: u64,
    /// Limits of a create that says nothing. On a node with fewer cores or less memory or disk they
    /// are lowered to what it has.
    pub defaults: Limits,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path} cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is no such file.
    #[error("{path} is not valid")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A value is out of its range.
    #[error("{path}: {message}")]
    Value {
        /// The file.
        path: PathBuf,
        /// Which and why.
        message: String,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, has an unknown or missing field, or a value out of its range.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Checks a file's text; `path` is for the errors.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text)
            .map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })?;
        let value = |message: String| ConfigError::Value { path: path.to_owned(), message };
        let node: NodeId = file.node.parse().map_err(|e: dsec_model::IdError| value(e.to_string()))?;
        let pool = file.pool.as_deref().map(str::parse).transpose();
        let pool = pool.map_err(|e: dsec_model::IdError| value(format!("pool: {e}")))?.unwrap_or_default();
        if !file.state_dir.is_absolute() {
            return Err(value(format!(
                "state_dir is {}; it must be an absolute path",
                file.state_dir.display()
            )));
        }
        let socket = file.socket.unwrap_or_else(|| file.state_dir.join("run/edge.sock"));
        let length = socket.as_os_str().len();
        if !socket.is_absolute() || length > SOCKET_PATH_MAX {
            return Err(value(format!(
                "socket is {} ({length} bytes); it must be an absolute path of at most {SOCKET_PATH_MAX} bytes",
                socket.display()
            )));
        }
        let usual = Policy::default();
        let sandboxes_max = file.max_sandboxes.unwrap_or(usual.sandboxes_max);
        if !(1..=MAX_SANDBOXES_MAX).contains(&sandboxes_max) {
            return Err(value(format!(
                "max_sandboxes is {sandboxes_max}; it must be 1 to {MAX_SANDBOXES_MAX}"
            )));
        }
        let admission = file.admission.over(Policy { sandboxes_max, ..usual }).map_err(value)?;
        let cache_mib = file.cache.size_mib.unwrap_or(CACHE_MIB_DEFAULT);
        if cache_mib < CACHE_MIB_MIN {
            return Err(value(format!("cache.size_mib is {cache_mib}; it must be at least {CACHE_MIB_MIN}")));
        }
        let still_ms = file.packs.still_ms_max.unwrap_or(STILL_MS_DEFAULT);
        if still_ms > STILL_MS_MAX {
            return Err(value(format!("packs.still_ms_max is {still_ms}; it must be 0 to {STILL_MS_MAX}")));
        }
        let store = file.store.unwrap_or_else(|| {
            let own = file.state_dir.join("store").to_string_lossy().into_owned();
            StoreSettings { create: true, ..StoreSettings::new(own) }
        });
        if file.swap.size_mib > SWAP_MIB_MAX {
            return Err(value(format!(
                "swap.size_mib is {}; it must be 0 to {SWAP_MIB_MAX}",
                file.swap.size_mib
            )));
        }
        if file.listen.is_some_and(|listen| listen.port() == 0) {
            return Err(value("listen has port 0; name one, so that others find it".to_owned()));
        }
        let defaults = file.defaults.over(Limits::default()).map_err(value)?;
        let registries = file.registries.allowed().map_err(value)?;
        Ok(Self {
            file: path.to_owned(),
            node,
            socket,
            listen: file.listen,
            advertise: file.advertise,
            aether: file.aether.unwrap_or_else(|| beside_this_program("dsec-aether")),
            fill: file.fill.unwrap_or_else(|| beside_this_program("dsec-fill")),
            store,
            cache_bytes: cache_mib << 20,
            still_max: Duration::from_millis(still_ms),
            registries,
            swap_bytes: file.swap.size_mib << 20,
            admission,
            pool,
            labels: file.labels,
            defaults,
            state_dir: file.state_dir,
        })
    }
}

fn beside_this_program(name: &str) -> PathBuf {
    std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(|dir| dir.join(name)))
        .unwrap_or_else(|| Path::new("/usr/lib/dsec").join(name))
}

impl Defaults {
    fn over(self, base: Limits) -> Result<Limits, String> {
        let cpu_millis = match self.cpu_cores_limit {
            None => base.cpu_millis,
            Some(cores) => cores_to_millis(cores).ok_or_else(|| {
                format!("defaults.cpu_cores_limit is {cores}; it must be a positive number")
            })?,
        };
        Ok(Limits {
            memory_mib: self.memory_limit_mb.unwrap_or(base.memory_mib),
            cpu_millis,
            cpu_burst_ms: self.cpu_burst_ms.unwrap_or(base.cpu_burst_ms),
            cpu_weight: self.cpu_weight.unwrap_or(base.cpu_weight),
            cpu_class: self.cpu_class.unwrap_or(base.cpu_class),
            pids: self.pids_limit.unwrap_or(base.pids),
            nofile: self.open_files_limit.unwrap_or(base.nofile),
            disk_mib: self.disk_limit_mb.unwrap_or(base.disk_mib),
            disk_files: self.disk_files_limit.unwrap_or(base.disk_files),
            max_lifetime_s: self.max_lifetime.unwrap_or(base.max_lifetime_s),
            ttl_running_stop_s: self.ttl_running_stop.unwrap_or(base.ttl_running_stop_s),
            ttl_paused_stop_s: self.ttl_paused_stop.unwrap_or(base.ttl_paused_stop_s),
            auto_pause: self.auto_pause.unwrap_or(base.auto_pause),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("edge.toml"))
    }

    #[test]
    fn the_shortest_file_is_enough() {
        let config = parse("node = \"n1\"\nstate_dir = \"/var/lib/dsec\"\n").unwrap();
        assert_eq!(config.socket, Path::new("/var/lib/dsec/run/edge.sock"));
        assert_eq!(config.admission, Policy::default());
        assert_eq!(config.defaults, Limits::default());
        assert_eq!(config.pool.as_str(), "onprem");
        let cloud = parse("node = \"n1\"\nstate_dir = \"/x\"\npool = \"cloud\"\n").unwrap();
        assert_eq!(cloud.pool.as_str(), "cloud");
    }

    #[test]
    fn defaults_are_in_the_callers_units() {
        let config = parse(
            "node = \"n1\"\nstate_dir = \"/x\"\n[defaults]\ncpu_cores_limit = 1.5\nmax_lifetime = 60\ncpu_class = \"best_effort\"\n",
        )
        .unwrap();
        assert_eq!(config.defaults.cpu_class, CpuClass::BestEffort);
        assert_eq!((config.defaults.cpu_millis, config.defaults.max_lifetime_s), (1500, 60));
    }

    #[test]
    fn admission_is_what_is_said_over_what_is_usual() {
        let config = parse(
            "node = \"n1\"\nstate_dir = \"/x\"\nmax_sandboxes = 7\n[admission]\ncpu_overcommit = 8\nmemory_pressure_max = 0.5\n",
        )
        .unwrap();
        let said =
            Policy { sandboxes_max: 7, cpu_overcommit: 8, memory_pressure_max: 0.5, ..Policy::default() };
        assert_eq!(config.admission, said);
    }

    #[test]
    fn what_is_unknown_or_out_of_range_is_refused_with_its_name() {
        for (text, word) in [
            ("node = \"n1\"\nstate_dir = \"/x\"\nsokcet = \"/y\"\n", "sokcet"),
            ("node = \"N_1\"\nstate_dir = \"/x\"\n", "N_1"),
            ("node = \"n1\"\nstate_dir = \"x\"\n", "state_dir"),
            ("node = \"n1\"\nstate_dir = \"/x\"\nmax_sandboxes = 0\n", "max_sandboxes"),
            (
                "node = \"n1\"\nstate_dir = \"/x\"\n[admission]\ncpu_overcommit = 0\n",
                "admission.cpu_overcommit",
            ),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[admission]\nmemory_pressure_max = 20.0\n", "0 to 1"),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[packs]\nstill_ms_max = 10001\n", "packs.still_ms_max"),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[cache]\nsize_mib = 1\n", "cache.size_mib"),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[swap]\nsize_mib = 99999999\n", "swap.size_mib"),
            (
                "node = \"n1\"\nstate_dir = \"/x\"\n[registries]\nallow = [\"https://registry.example\"]\n",
                "registries.allow",
            ),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[store]\nurl = \"/s\"\nuri = 1\n", "uri"),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[defaults]\ncpu_cores_limit = -1\n", "cpu_cores_limit"),
            ("node = \"n1\"\nstate_dir = \"/x\"\npool = \"The Cloud\"\n", "The Cloud"),
            ("node = \"n1\"\nstate_dir = \"/x\"\n[defaults]\ncpu_class = \"fast\"\n", "cpu_class"),
            ("state_dir = \"/x\"\n", "node"),
            ("node = \"n1\"\nstate_dir = \"/x\"\nlisten = \"10.0.0.1\"\n", "listen"),
            ("node = \"n1\"\nstate_dir = \"/x\"\nlisten = \"10.0.0.1:0\"\n", "port 0"),
        ] {
            let text = crate::error::chain(&parse(text).unwrap_err());
            assert!(text.contains(word), "{text}");
        }
    }
}
