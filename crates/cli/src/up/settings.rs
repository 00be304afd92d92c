//! The configurations of the two programs: what `dsec up` decides in them, over what the operator wrote.
//!
//! `dsec up` owns the paths, since they follow from the state directory, and what its flags say. Everything
//! else in the files, comments included, is the operator's and stays.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use dsec_model::NodeId;
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, value};

use super::state::{StateDir, write_private};
use crate::config::DEFAULT_LISTEN;
use crate::failure::Failure;

/// How both of these begin, and those of earlier versions.
const HEAD: &str = "# `dsec up` sets ";
/// A node's name when nobody has said one.
const DEFAULT_NODE: &str = "n1";
const EDGE_HEAD: &str = "\
# `dsec up` sets state_dir and socket at each start, and node, listen and advertise when its flags say so.
# Everything else here is yours and stays: see docs/operating.md.
";
const CONTROL_HEAD: &str = "\
# `dsec up` sets keys_file, cluster_dir and the node of its own edge at each start, and listen and tls_* when its flags say so.
# Everything else here is yours and stays: see docs/operating.md.
";

/// What the supervisor itself has to know of the configurations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Settings {
    /// Name of the node.
    pub(super) node: NodeId,
    /// Address of the API.
    pub(super) listen: SocketAddr,
    /// How it is spoken to.
    pub(super) tls: Tls,
    /// Of a node of a cluster whose servers are elsewhere: there is no API here.
    pub(super) member: Option<Membership>,
}

/// What flags say of a node that joins, or has joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Membership {
    /// Where its edge listens.
    pub(super) listen: Option<SocketAddr>,
    /// Where the servers reach it.
    pub(super) advertise: Option<String>,
}

/// How the API is spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Tls {
    /// By plain HTTP.
    Plain,
    /// By a certificate of these files.
    Files {
        /// The chain.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// By a certificate that is made in this directory.
    SelfMade(PathBuf),
}

impl Tls {
    /// What control.toml says.
    fn of(control: &DocumentMut) -> Self {
        let path = |key| control.get(key).and_then(Item::as_str).map(PathBuf::from);
        match (path("tls_cert"), path("tls_key"), path("tls_self_made")) {
            (Some(cert), Some(key), _) => Self::Files { cert, key },
            (_, _, Some(dir)) => Self::SelfMade(dir),
            _ => Self::Plain,
        }
    }
}

impl Settings {
    /// Flags, else what the files say, else the defaults.
    ///
    /// # Errors
    /// A file cannot be read or is no configuration.
    pub(super) fn resolve(
        state: &StateDir,
        node: Option<&NodeId>,
        listen: Option<SocketAddr>,
        tls: Option<Tls>,
    ) -> Result<Self, Failure> {
        let node = match node {
            Some(node) => node.clone(),
            None => {
                let edge = read(&state.edge_config())?;
                let name = edge.get("node").and_then(Item::as_str).unwrap_or(DEFAULT_NODE);
                name.parse().map_err(|error| bad(&state.edge_config(), "node", &format!("{error}")))?
            }
        };
        let listen = match listen {
            Some(listen) => listen,
            None => {
                let control = read(&state.control_config())?;
                let text = control.get("listen").and_then(Item::as_str).unwrap_or(DEFAULT_LISTEN);
                address(text).map_err(|why| bad(&state.control_config(), "listen", &why))?
            }
        };
        let tls = match tls {
            Some(tls) => tls,
            None => Tls::of(&read(&state.control_config())?),
        };
        Ok(Self { node, listen, tls, member: None })
    }

    /// Writes both files, with what is in them already.
    ///
    /// # Errors
    /// A file cannot be read or written, or is no configuration.
    pub(super) fn write(&self, state: &StateDir) -> Result<(), Failure> {
        let edge = self.edge(read(&state.edge_config())?, state)?;
        if self.member.is_some() {
            return write_private(&state.edge_config(), with_head(EDGE_HEAD, &edge).as_bytes());
        }
        let control = self.control(read(&state.control_config())?, state)?;
        write_private(&state.edge_config(), with_head(EDGE_HEAD, &edge).as_bytes())?;
        write_private(&state.control_config(), with_head(CONTROL_HEAD, &control).as_bytes())
    }

    fn edge(&self, mut file: DocumentMut, state: &StateDir) -> Result<DocumentMut, Failure> {
        set(&mut file, "node", self.node.as_str());
        set(&mut file, "state_dir", text_of(state.root())?);
        set(&mut file, "socket", text_of(&state.socket())?);
        if let Some(Membership { listen, advertise }) = &self.member {
            if let Some(listen) = listen {
                set(&mut file, "listen", &listen.to_string());
            }
            if let Some(advertise) = advertise {
                set(&mut file, "advertise", advertise);
            }
        }
        Ok(file)
    }

    fn control(&self, mut file: DocumentMut, state: &StateDir) -> Result<DocumentMut, Failure> {
        let listens = file.get("listen").and_then(Item::as_str).and_then(|text| address(text).ok());
        if listens != Some(self.listen) {
            set(&mut file, "listen", &self.listen.to_string());
        }
        set(&mut file, "keys_file", text_of(&state.keys_file())?);
        set(&mut file, "cluster_dir", text_of(&state.cluster_dir())?);
        let (here, gone): (&[(&str, &Path)], &[&str]) = match &self.tls {
            Tls::Plain => (&[], &[]),
            Tls::Files { cert, key } => (&[("tls_cert", cert), ("tls_key", key)], &["tls_self_made"]),
            Tls::SelfMade(dir) => (&[("tls_self_made", dir)], &["tls_cert", "tls_key"]),
        };
        for (key, path) in here {
            set(&mut file, key, text_of(path)?);
        }
        for key in gone {
            file.remove(key);
        }
        let nodes = file.entry("nodes").or_insert(Item::ArrayOfTables(ArrayOfTables::new()));
        let mut tables = std::mem::take(nodes).into_array_of_tables().map_err(|_| {
            bad(&state.control_config(), "nodes", "it must be [[nodes]] with name and socket")
        })?;
        let socket = state.socket();
        let socket = text_of(&socket)?;
        let place = tables.iter().position(|t| t.get("socket").and_then(Item::as_str) == Some(socket));
        match place.and_then(|place| tables.get_mut(place)) {
            Some(ours) => set(ours, "name", self.node.as_str()),
            None => {
                let mut ours = Table::new();
                set(&mut ours, "name", self.node.as_str());
                set(&mut ours, "socket", socket);
                tables.push(ours);
            }
        }
        *nodes = Item::ArrayOfTables(tables);
        Ok(file)
    }
}

fn with_head(head: &str, file: &DocumentMut) -> String {
    let text = file.to_string();
    if text.starts_with(HEAD) { text } else { format!("{head}{text}") }
}

/// Sets a value; one that is right already keeps its place and its comment.
fn set(table: &mut Table, key: &str, text: &str) {
    if table.get(key).and_then(Item::as_str) != Some(text) {
        table.insert(key, value(text));
    }
}

fn text_of(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| Failure::new(format!("the path {} is not UTF-8", path.display())))
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let mut found = text.to_socket_addrs().map_err(|error| format!("{text:?} is no host:port: {error}"))?;
    found.next().ok_or_else(|| format!("{text:?} has no address"))
}

/// A missing file is an empty one.
fn read(path: &Path) -> Result<DocumentMut, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(Failure::io(format!("cannot read {}", path.display()), &error)),
    };
    text.parse().map_err(|error| {
        Failure::new(format!("{} is no configuration: {error}", path.display()))
            .hint("put it right, or remove it: `dsec up` writes one with its defaults")
    })
}

fn bad(path: &Path, key: &str, why: &str) -> Failure {
    Failure::new(format!("{key} in {} cannot be used: {why}", path.display()))
        .hint("put it right there, or remove the line to have the default")
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn up(state: &StateDir, node: Option<&str>, listen: Option<&str>) -> Result<Settings, Failure> {
        let node = node.map(|node| node.parse::<NodeId>().unwrap());
        let listen = listen.map(|text| text.parse().unwrap());
        let settings = Settings::resolve(state, node.as_ref(), listen, None)?;
        settings.write(state)?;
        Ok(settings)
    }

    fn state(dir: &tempfile::TempDir) -> StateDir {
        let state = StateDir::new(dir.path()).unwrap();
        state.make().unwrap();
        state
    }

    fn text(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn the_first_configurations_are_what_the_programs_read() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(&dir);
        up(&state, None, None).unwrap();
        let read = |path: PathBuf| toml::from_str::<toml::Value>(&text(&path)).unwrap();
        let root = dir.path().to_str().unwrap();
        let edge = read(state.edge_config());
        assert_eq!(edge["node"].as_str(), Some("n1"));
        assert_eq!(edge["state_dir"].as_str(), Some(root));
        assert_eq!(edge["socket"].as_str(), Some(format!("{root}/run/edge.sock").as_str()));
        let control = read(state.control_config());
        assert_eq!(control["listen"].as_str(), Some("127.0.0.1:7420"));
        assert_eq!(control["keys_file"].as_str(), Some(format!("{root}/keys.json").as_str()));
        assert_eq!(control["nodes"][0]["name"].as_str(), Some("n1"));
        assert_eq!(control["nodes"][0]["socket"], edge["socket"]);
    }

    #[test]
    fn what_the_operator_wrote_stays_to_the_letter() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(&dir);
        up(&state, None, None).unwrap();
        let edge = text(&state.edge_config())
            + "max_sandboxes = 12 # small machine\n\n[defaults]\nmemory_limit_mb = 512\n";
        std::fs::write(state.edge_config(), &edge).unwrap();
        let control = text(&state.control_config()).replace("127.0.0.1:7420", "localhost:7999")
            + "\n# the other machine\n[[nodes]]\nname = \"n2\"\nsocket = \"/run/n2.sock\"\n";
        std::fs::write(state.control_config(), &control).unwrap();
        let settings = up(&state, None, None).unwrap();
        assert_eq!(settings.listen.port(), 7999);
        assert_eq!((text(&state.edge_config()), text(&state.control_config())), (edge, control));
    }

    #[test]
    fn a_flag_is_written_over_what_was_there_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(&dir);
        std::fs::write(state.edge_config(), "max_sandboxes = 7\nnode = \"old\"\n").unwrap();
        up(&state, Some("new"), Some("127.0.0.1:7001")).unwrap();
        let again = up(&state, None, None).unwrap();
        assert_eq!((again.node.as_str(), again.listen.port()), ("new", 7001));
        assert!(text(&state.edge_config()).contains("max_sandboxes = 7"));
        let control: toml::Value = toml::from_str(&text(&state.control_config())).unwrap();
        assert_eq!(control["nodes"].as_array().unwrap().len(), 1);
        assert_eq!(control["nodes"][0]["name"].as_str(), Some("new"));
    }

    #[test]
    fn a_member_has_no_control_and_keeps_where_it_listens() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(&dir);
        let flags =
            Membership { listen: Some("10.0.0.5:7421".parse().unwrap()), advertise: Some("n5:7421".into()) };
        for member in [flags, Membership::default()] {
            let settings = Settings::resolve(&state, None, None, None).unwrap();
            Settings { member: Some(member), ..settings }.write(&state).unwrap();
        }
        let edge: toml::Value = toml::from_str(&text(&state.edge_config())).unwrap();
        assert_eq!(edge["listen"].as_str(), Some("10.0.0.5:7421"));
        assert_eq!(edge["advertise"].as_str(), Some("n5:7421"));
        assert!(!state.control_config().exists());
    }

    #[test]
    fn a_certificate_is_said_once_and_replaced_by_another_kind() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(&dir);
        let up_with = |tls: Option<Tls>| {
            let settings = Settings::resolve(&state, None, None, tls).unwrap();
            settings.write(&state).unwrap();
            settings.tls
        };
        assert_eq!(up_with(None), Tls::Plain);
        let files = Tls::Files { cert: "/c.pem".into(), key: "/k.pem".into() };
        let made = Tls::SelfMade(state.tls_dir());
        for tls in [files, made] {
            assert_eq!(up_with(Some(tls.clone())), tls);
            assert_eq!(up_with(None), tls);
        }
        let control: toml::Value = toml::from_str(&text(&state.control_config())).unwrap();
        assert!(control.get("tls_cert").is_none() && control.get("tls_key").is_none(), "{control}");
    }

    #[test]
    fn a_file_that_is_none_is_named_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state = state(&dir);
        for (broken, word) in [("max_sandboxes = ", "edge.toml"), ("node = \"N 1\"\n", "node")] {
            std::fs::write(state.edge_config(), broken).unwrap();
            let failure = up(&state, None, None).unwrap_err();
            assert!(failure.message.contains(word), "{}", failure.message);
            assert_eq!(text(&state.edge_config()), broken);
        }
    }
}
