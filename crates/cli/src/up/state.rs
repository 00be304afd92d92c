//! The state directory: its layout, the root key, the logs, the config file of the user.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dsec_proto::rest::SOCKET_PATH_MAX;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::{self, ConfigFile};
use crate::failure::Failure;
use crate::parse::MIB;
use crate::render;

/// Least room on the state's disk: for the logs, the records and the sockets of a start.
const FREE_MIN: u64 = 16 * MIB;
/// Size above which a log is put aside at the next start.
const LOG_MAX: u64 = 16 * MIB;
/// Id of the root key in `keys.json`.
const ROOT_KEY_ID: &str = "key-root";

/// Paths in a state directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateDir {
    root: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct Keys {
    keys: Vec<Key>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Key {
    id: String,
    project: String,
    name: String,
    sha256: String,
    created_ms: u64,
    /// What a newer version keeps there.
    #[serde(flatten)]
    more: serde_json::Map<String, serde_json::Value>,
}

impl StateDir {
    /// The directory's paths; nothing is made yet.
    ///
    /// # Errors
    /// It cannot be made absolute, is not UTF-8, or is too long for a socket below it.
    pub(super) fn new(path: &Path) -> Result<Self, Failure> {
        let root = std::path::absolute(path)
            .map_err(|error| Failure::io(format!("{} is no directory", path.display()), &error))?;
        let state = Self { root };
        if state.root.to_str().is_none() {
            return Err(Failure::new(format!("the path {} is not UTF-8", state.root.display())));
        }
        if state.socket().as_os_str().len() > SOCKET_PATH_MAX {
            return Err(Failure::new(format!(
                "the path {} is too long: a socket below it could not be bound",
                state.root.display()
            ))
            .hint("choose a shorter --state-dir"));
        }
        Ok(state)
    }

    /// The directory itself.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Lock that the supervisor holds; its content says who that is.
    pub(super) fn lock(&self) -> PathBuf {
        self.root.join("run/lock")
    }

    /// Process id of the supervisor.
    pub(super) fn pid_file(&self) -> PathBuf {
        self.root.join("run/up.pid")
    }

    /// The two processes that run, for whoever comes after a supervisor that was killed.
    pub(super) fn processes(&self) -> PathBuf {
        self.root.join("run/processes.json")
    }

    /// The edge's socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.root.join("run/edge.sock")
    }

    /// The edge's configuration.
    pub(super) fn edge_config(&self) -> PathBuf {
        self.root.join("edge.toml")
    }

    /// Who the node is in a cluster that it has joined; `dsec-edge` writes it.
    pub(super) fn member(&self) -> PathBuf {
        self.root.join("member.json")
    }

    /// Where the cluster is kept that others may join.
    pub(super) fn cluster_dir(&self) -> PathBuf {
        self.root.join("cluster")
    }

    /// The control plane's configuration.
    pub(super) fn control_config(&self) -> PathBuf {
        self.root.join("control.toml")
    }

    /// Where a certificate of the API is made.
    pub(super) fn tls_dir(&self) -> PathBuf {
        self.root.join("tls")
    }

    /// A log.
    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.root.join("log").join(format!("{name}.log"))
    }

    /// Makes the directories; `0700`, since keys and sandboxes' files lie below.
    pub(super) fn make(&self) -> Result<(), Failure> {
        for dir in [self.root.clone(), self.root.join("run"), self.root.join("log")] {
            make_private_dir(&dir)?;
        }
        Ok(())
    }

    /// Refuses a disk without room before anything is started on it.
    pub(super) fn check_room(&self) -> Result<(), Failure> {
        let failed = |errno: rustix::io::Errno| {
            Failure::io(format!("cannot look at {}", self.root.display()), &errno.into())
        };
        let disk = rustix::fs::statvfs(&self.root).map_err(failed)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        // A file system without a fixed number of files says that it has none.
        let files_left = disk.f_files == 0 || disk.f_favail > 0;
        if free >= FREE_MIN && files_left {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the disk of {} is full: {} and {} files are free, {} are needed",
            self.root.display(),
            render::bytes(free),
            disk.f_favail,
            render::bytes(FREE_MIN)
        ))
        .hint("free some space there, or choose another --state-dir"))
    }

    /// The root key: the one that is there, else a new one. `keys.json` knows it afterwards.
    pub(super) fn root_key(&self) -> Result<String, Failure> {
        let path = self.root.join("root.key");
        let key = match std::fs::read_to_string(&path) {
            Ok(text) if text.trim().len() > "dsec_".len() => text.trim().to_owned(),
            Ok(_) => new_key()?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => new_key()?,
            Err(error) => return Err(Failure::io(format!("cannot read {}", path.display()), &error)),
        };
        // First what lets the key in, then the key: one that is on disk always opens the platform.
        self.know(&key)?;
        write_private(&path, format!("{key}\n").as_bytes())?;
        Ok(key)
    }

    /// The keys that may ask.
    pub(super) fn keys_file(&self) -> PathBuf {
        self.root.join("keys.json")
    }

    fn know(&self, key: &str) -> Result<(), Failure> {
        let path = self.keys_file();
        let mut keys = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice::<Keys>(&text).map_err(|error| {
                Failure::new(format!("{} holds no keys: {error}", path.display()))
                    .hint("put it right, or remove it: `dsec up` writes one with the root key")
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Keys { keys: Vec::new() },
            Err(error) => return Err(Failure::io(format!("cannot read {}", path.display()), &error)),
        };
        let sha256 = hex(&Sha256::digest(key.as_bytes()));
        if keys.keys.iter().any(|known| known.id == ROOT_KEY_ID && known.sha256 == sha256) {
            return Ok(());
        }
        keys.keys.retain(|known| known.id != ROOT_KEY_ID);
        keys.keys.insert(
            0,
            Key {
                id: ROOT_KEY_ID.to_owned(),
                project: "root".to_owned(),
                name: "root".to_owned(),
                sha256,
                created_ms: render::now_ms(),
                more: serde_json::Map::new(),
            },
        );
        let text = serde_json::to_string_pretty(&keys)
            .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
        write_private(&path, format!("{text}\n").as_bytes())
    }

    /// Opens a log to be added to; one that has grown too large is put aside first.
    pub(super) fn open_log(&self, name: &str) -> Result<File, Failure> {
        let path = self.log(name);
        let failed = |error| Failure::io(format!("cannot write {}", path.display()), &error);
        if path.metadata().is_ok_and(|meta| meta.len() > LOG_MAX) {
            std::fs::rename(&path, path.with_extension("log.1")).map_err(failed)?;
        }
        OpenOptions::new().create(true).append(true).mode(0o600).open(&path).map_err(failed)
    }
}

/// Writes the user's config file and answers its path. One that led elsewhere is kept beside it. `ca_file` is copied there
/// too: the state directory is not theirs to read.
pub(super) fn write_user_config(url: &str, key: &str, ca_file: Option<&Path>) -> Result<PathBuf, Failure> {
    let path = config::path()?;
    let old = config::read(&path).unwrap_or_default();
    let own_ca = ca_file.map(|_| path.with_extension("ca.pem"));
    // What the user said of another server's certificate is theirs, and stays.
    let said = old.ca_file.clone().filter(|_| old.url.as_deref() == Some(url));
    let ca = own_ca.clone().or(said);
    let new = ConfigFile { url: Some(url.to_owned()), api_key: Some(key.to_owned()), ca_file: ca };
    let missing = path.ancestors().skip(1).take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
    let made: Vec<PathBuf> = missing.map(Path::to_owned).collect();
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        // Directories above ours are the user's, made as the user's programs make them.
        std::fs::create_dir_all(dir)
            .map_err(|error| Failure::io(format!("cannot make {}", dir.display()), &error))?;
    }
    if old.url.as_ref().is_some_and(|url| Some(url) != new.url.as_ref()) && old.api_key != new.api_key {
        let aside = path.with_extension("toml.before-up");
        let kept = std::fs::rename(&path, &aside);
        kept.map_err(|error| Failure::io(format!("cannot keep {}", path.display()), &error))?;
        render::note(&format!(
            "dsec: the config file led to {}; it is now {}",
            old.url.unwrap_or_default(),
            aside.display()
        ));
    }
    if let (Some(from), Some(to)) = (ca_file, &own_ca) {
        let ca = std::fs::read(from)
            .map_err(|error| Failure::io(format!("cannot read {}", from.display()), &error))?;
        write_private(to, &ca)?;
    }
    write_private(&path, toml_text(&new)?.as_bytes())?;
    if let Some((user, group)) = config::behind_sudo() {
        for made in made.iter().chain(&own_ca).chain([&path]) {
            // The user's own file, which they shall read without us.
            std::os::unix::fs::lchown(made, Some(user), Some(group))
                .map_err(|error| Failure::io(format!("cannot give {} away", made.display()), &error))?;
        }
    }
    Ok(path)
}

/// The address at which this machine reaches a listener.
pub(super) fn reach_of(listen: SocketAddr) -> SocketAddr {
    let mut reach = listen;
    if listen.ip().is_unspecified() {
        let loopback = match listen {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        };
        reach.set_ip(loopback);
    }
    reach
}

/// Writes a file that only its owner reads, whole or not at all.
pub(super) fn write_private(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    let write = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        // An old file of that name keeps its mode.
        file.set_permissions(PermissionsExt::from_mode(0o600))?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&part, path)
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(&part);
        Failure::io(format!("cannot write {}", path.display()), &error)
    })
}

fn make_private_dir(dir: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::io(format!("cannot make {}", dir.display()), &error);
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    std::fs::set_permissions(dir, PermissionsExt::from_mode(0o700)).map_err(failed)
}

fn toml_text(value: &impl Serialize) -> Result<String, Failure> {
    toml::to_string(value).map_err(|error| Failure::new(format!("cannot write TOML: {error}")))
}

fn new_key() -> Result<String, Failure> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| Failure::new(format!("no random bytes for a key: {error}")))?;
    Ok(format!("dsec_{}", URL_SAFE_NO_PAD.encode(bytes)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_key_is_made_once_and_only_its_hash_is_in_the_keys_file() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(&dir.path().join("s")).unwrap();
        state.make().unwrap();
        assert_eq!(mode(state.root()), 0o700);
        let key = state.root_key().unwrap();
        assert!(key.starts_with("dsec_") && key.len() == 5 + 43, "{key}");
        assert_eq!(state.root_key().unwrap(), key);
        let text = std::fs::read_to_string(state.keys_file()).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["keys"].as_array().unwrap().len(), 1);
        assert_eq!(json["keys"][0]["sha256"], hex(&Sha256::digest(key.as_bytes())));
        assert_eq!(json["keys"][0]["project"], "root");
        assert!(!text.contains(&key));
        assert_eq!((mode(&state.keys_file()), mode(&state.root().join("root.key"))), (0o600, 0o600));
    }

    #[test]
    fn keys_of_others_survive_a_new_root_key() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(dir.path()).unwrap();
        state.make().unwrap();
        let other = r#"{"keys":[{"id":"key-2","project":"root/rl","name":"x","sha256":"ab","created_ms":1,"scopes":["a"]},
            {"id":"key-root","project":"root","name":"root","sha256":"cd","created_ms":1}]}"#;
        std::fs::write(state.keys_file(), other).unwrap();
        state.root_key().unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(state.keys_file()).unwrap()).unwrap();
        assert_eq!(json["keys"].as_array().unwrap().len(), 2);
        assert_eq!(json["keys"][1]["scopes"][0], "a");
        assert_ne!(json["keys"][0]["sha256"], "cd");
    }

    #[test]
    fn a_log_that_has_grown_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(dir.path()).unwrap();
        state.make().unwrap();
        File::create(state.log("edge")).unwrap().set_len(LOG_MAX + 1).unwrap();
        state.open_log("edge").unwrap().write_all(b"new").unwrap();
        assert_eq!(std::fs::read(state.log("edge")).unwrap(), b"new");
        assert_eq!(dir.path().join("log/edge.log.1").metadata().unwrap().len(), LOG_MAX + 1);
    }

    #[test]
    fn addresses_are_reached_at_the_loopback() {
        let reach = |listen: &str| reach_of(listen.parse().unwrap()).to_string();
        assert_eq!(reach("0.0.0.0:1"), "127.0.0.1:1");
        assert_eq!(reach("[::]:1"), "[::1]:1");
        assert_eq!(reach("10.0.0.1:7420"), "10.0.0.1:7420");
    }

    #[test]
    fn a_path_that_is_too_long_for_a_socket_is_refused() {
        let failure = StateDir::new(Path::new(&format!("/{}", "x".repeat(100)))).unwrap_err();
        assert!(failure.message.contains("too long"));
    }
}
