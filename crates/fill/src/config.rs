//! The configuration of holder and worker: one TOML file, read by both.

use std::path::{Path, PathBuf};

use dsec_store::{StoreError, StoreSettings};
use serde::{Deserialize, Serialize};

use crate::engine::{Limits, LimitsError};

/// Descriptors of the session, one thread each. More than cores only helps while the cache's disk is slow.
const DEVICES_DEFAULT: usize = 4;
const DEVICES_MAX: usize = 64;

/// The configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where the device is mounted; made when it is not there.
    pub mount: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// The cache: on a plain file system, not on overlayfs, or nothing can be mounted from it directly.
    pub cache_dir: PathBuf,
    /// Bytes of content that the cache may take.
    pub cache_bytes: u64,
    /// Threads that answer the kernel.
    #[serde(default = "devices_default")]
    pub devices: usize,
    /// Where packs come from.
    pub store: StoreSettings,
    /// What the engine may take.
    #[serde(default)]
    pub limits: Limits,
}

/// Why a configuration is not one.
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
    /// It is not TOML of this shape.
    #[error("{path} is not a configuration of dsec-fill")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        #[source]
        source: toml::de::Error,
    },
    /// A value.
    #[error("{path}: {what}")]
    Value {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The limits.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The store's settings.
    #[error("the [store] settings cannot be used")]
    Store(#[from] StoreError),
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// With the file and what is wrong in it.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = |source| ConfigError::Read { path: path.to_owned(), source };
        let parse = |source| ConfigError::Parse { path: path.to_owned(), source };
        let config: Self = toml::from_str(&std::fs::read_to_string(path).map_err(read)?).map_err(parse)?;
        let value = |what: String| Err(ConfigError::Value { path: path.to_owned(), what });
        if !(1..=DEVICES_MAX).contains(&config.devices) {
            return value(format!("devices is {}; it must be 1 to {DEVICES_MAX}", config.devices));
        }
        for (name, path) in
            [("mount", &config.mount), ("socket", &config.socket), ("cache_dir", &config.cache_dir)]
        {
            if !path.is_absolute() {
                return value(format!("{name} is {}; it must be an absolute path", path.display()));
            }
        }
        config.limits.check()?;
        config.store.check()?;
        Ok(config)
    }
}

fn devices_default() -> usize {
    DEVICES_DEFAULT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Config {
        let mut store = StoreSettings::new(url);
        store.secret_access_key = Some("a \"secret\"".to_owned());
        Config {
            mount: "/m".into(),
            socket: "/s".into(),
            cache_dir: "/c".into(),
            cache_bytes: 1 << 30,
            devices: 2,
            store,
            limits: Limits::default(),
        }
    }

    #[test]
    fn a_configuration_is_read_as_it_was_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A directory that is not there now may be a mount that comes.
        let config = config("/store/that/is/away");
        std::fs::write(file.path(), toml::to_string(&config).unwrap()).unwrap();
        assert_eq!(Config::load(file.path()).unwrap(), config);
        std::fs::write(file.path(), toml::to_string(&self::config("store")).unwrap()).unwrap();
        assert!(matches!(Config::load(file.path()), Err(ConfigError::Store(_))));
    }
}
