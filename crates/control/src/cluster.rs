//! The cluster that this server keeps: its authority, the tokens that machines join by, and the nodes that have.
//!
//! ```text
//!  token ──► POST /v1/cluster/join ──► known (rules) ──► store        certificate for the node
//!  edge  ──► POST /v1/cluster/announce, with its certificate ──┘        its address, a renewal, who else claims to be it
//!            known ──► NodeSet: ways over the network, each vouched for when a connection is made
//! ```
//!
//! What is known is kept in a [`ClusterStore`] that several servers may share: each looks once a second whether it has changed.

mod known;
mod refusal;
mod store;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_model::{ErrorKind, NodeId};
use dsec_pki::tls::{Callers, Identity, cluster_client, cluster_server};
use dsec_pki::{Authority, Certificate, JoinToken, Key, PkiError, Request, Role, Validity};
use dsec_proto::rest::{
    AnnounceRequest, Announced, Cluster as ClusterInfo, EdgeInstance, JoinRequest, Joined, Member,
    MemberList, TOKEN_TTL_DEFAULT_S, TOKEN_TTL_MAX_S, Token, TokenRequest,
};
use futures_util::future::BoxFuture;
use http::HeaderMap;
use rustls::{ClientConfig, ServerConfig};
use serde_json::json;

pub use known::{Announcer, IssuedRecord, Joiner, Known, NodeRecord, Standing, TokenRecord};
pub use refusal::Refusal;
pub use store::{Change, ClusterStore, DatabaseStore, FileStore, StoreError, Storing};

use crate::behalf::Behalf;
use crate::failure::Failure;
use crate::nodes::{Node, NodeSet};
use crate::upstream::{TlsWay, Voucher, Way};

/// How often the store is looked at, and whether our own certificate is old.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long the edge that was heard last may take to say that it lives, when another claims to be its node.
const RIVAL_WITHIN: Duration = Duration::from_secs(3);
/// Least time between two lines of the log about secrets that no token has: anybody can send any number of them.
const GUESSES_EVERY: Duration = Duration::from_secs(10);
/// Longest address and instance of an edge.
const ADDRESS_MAX: usize = 255;
const INSTANCE_MAX: usize = 64;

/// What an operator may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How long certificates of nodes and of control live. They are renewed at two thirds.
    pub lifetime: Duration,
    /// How often nodes say that they are there.
    pub announce_every: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { lifetime: Duration::from_secs(7 * 24 * 3600), announce_every: Duration::from_secs(10) }
    }
}

/// Of a cluster that is made: its authority, and what we show by it.
struct Ready {
    authority: Authority,
    identity: Arc<Identity>,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// The cluster, whether it is made yet or not.
pub struct Cluster {
    store: Arc<dyn ClusterStore>,
    settings: Settings,
    /// Names of nodes that are not ours to give.
    configured: Vec<NodeId>,
    ready: RwLock<Option<Arc<Ready>>>,
    now: Mutex<Now>,
    /// One change at a time: what is in memory is then never older than what was.
    changing: tokio::sync::Mutex<()>,
    /// When nodes last said that they are there, Unix ms.
    seen: Mutex<HashMap<NodeId, u64>>,
    /// When a secret that no token has was last written into the log.
    guessed: Mutex<Option<Instant>>,
}

/// What is known now, and what of it the nodes are made by.
#[derive(Default)]
struct Now {
    known: Arc<Known>,
    /// Of the store, when it was read; none: it is to be read.
    version: Option<String>,
    /// Nodes that were handed on: where each is, and since when it is this one.
    applied: BTreeMap<NodeId, (String, u64)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Cluster {
    /// What a store has, or will have.
    pub fn new(store: Arc<dyn ClusterStore>, settings: Settings, configured: Vec<NodeId>) -> Arc<Self> {
        Arc::new(Self {
            store,
            settings,
            configured,
            ready: RwLock::default(),
            now: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            seen: Mutex::default(),
            guessed: Mutex::default(),
        })
    }

    /// What our own processes are answered by over TLS, once the cluster is made.
    pub fn server(&self) -> Option<Arc<ServerConfig>> {
        let ready = self.ready.read().unwrap_or_else(PoisonError::into_inner);
        ready.as_ref().map(|ready| Arc::clone(&ready.server))
    }

    /// Reads what there is, if it has changed.
    ///
    /// # Errors
    /// The store cannot be read, or what it has cannot be used.
    pub async fn open(&self) -> Result<(), Failure> {
        self.refresh().await.map_err(stored)?;
        if self.server().is_none()
            && let Some(pem) = self.store.authority().await.map_err(stored)?
        {
            let authority = Authority::from_pem(&pem).map_err(defect)?;
            let ready = self.made_ready(authority).map_err(defect)?;
            self.ready.write().unwrap_or_else(PoisonError::into_inner).get_or_insert(Arc::new(ready));
        }
        Ok(())
    }

    fn made_ready(&self, authority: Authority) -> Result<Ready, PkiError> {
        let (chain, key) = self.own(&authority)?;
        let identity = Arc::new(Identity::from_pem(&chain, &key)?);
        let server = cluster_server(Arc::clone(&identity), authority.der(), Callers::NodesOrNone)?;
        let client = cluster_client(Some(Arc::clone(&identity)), authority.der())?;
        Ok(Ready { authority, identity, server, client })
    }

    /// A certificate for ourselves. Its key is in this process alone.
    fn own(&self, authority: &Authority) -> Result<(String, String), PkiError> {
        let key = Key::make()?;
        let request = Request::from_pem(&key.request()?)?;
        let issued = authority.issue(&request, &Role::Control, Validity::now_for(self.settings.lifetime))?;
        Ok((issued.pem + &authority.pem(), key.to_pem()))
    }

    async fn ready(self: &Arc<Self>) -> Result<Arc<Ready>, Failure> {
        let now = |this: &Self| this.ready.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(ready) = now(self) {
            return Ok(ready);
        }
        self.open().await?;
        now(self).ok_or_else(|| {
            Failure::new(ErrorKind::NotFound, "this server has no cluster yet")
                .hint("`dsec cluster init` makes one; machines join it over the network")
        })
    }

    /// Follows the store and keeps our own certificate new, until it is dropped.
    pub async fn follow(self: Arc<Self>, nodes: impl Fn() -> Option<Arc<crate::app::App>>) {
        let mut is_reported = false;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(app) = nodes() else { return };
            match self.open().await {
                Ok(()) => is_reported = false,
                Err(failure) if !is_reported => {
                    tracing::error!(error = %failure.0, "the cluster cannot be looked at; what was known counts");
                    is_reported = true;
                }
                Err(_) => {}
            }
            self.renew_own();
            self.apply(&app.nodes);
        }
    }

    fn renew_own(&self) {
        let Some(ready) = self.ready.read().unwrap_or_else(PoisonError::into_inner).clone() else { return };
        let is_due = ready.identity.certificate().is_ok_and(|own| own.renew_at_s() <= now_ms() / 1000);
        if is_due {
            let renewed =
                self.own(&ready.authority).and_then(|(chain, key)| ready.identity.replace(&chain, &key));
            match renewed {
                Ok(()) => tracing::info!("this server's own certificate was renewed"),
                Err(error) => tracing::error!(%error, "this server's own certificate cannot be renewed"),
            }
        }
    }

    fn known(&self) -> Arc<Known> {
        Arc::clone(&lock(&self.now).known)
    }

    /// Reads what is known again, if it has changed.
    async fn refresh(&self) -> Result<(), StoreError> {
        let _changing = self.changing.lock().await;
        let version = Some(self.store.version().await?);
        if lock(&self.now).version == version {
            return Ok(());
        }
        let known = Arc::new(self.store.read().await?);
        let mut now = lock(&self.now);
        (now.known, now.version) = (known, version);
        Ok(())
    }

    /// Changes what is known, and keeps it.
    async fn change<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Known) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let _changing = self.changing.lock().await;
        let (tell, mut told) = tokio::sync::oneshot::channel();
        let change: Change = Box::new(move |known| {
            let _nobody_waits = tell.send(change(known));
        });
        let known = Arc::new(self.store.change(change).await.map_err(stored)?);
        let mut now = lock(&self.now);
        // Somebody else may have changed it since: it is looked at again soon.
        (now.known, now.version) = (known, None);
        told.try_recv().map_err(|_| Failure::new(ErrorKind::Internal, "the store did not make the change"))
    }

    /// Has the nodes be those that are known.
    pub fn apply(self: &Arc<Self>, nodes: &NodeSet) {
        let Some(ready) = self.ready.read().unwrap_or_else(PoisonError::into_inner).clone() else { return };
        let mut now = lock(&self.now);
        let known = Arc::clone(&now.known);
        now.applied.retain(|name, _| {
            let stays = known.nodes.contains_key(name);
            if !stays {
                tracing::info!(node_id = %name, "node has left");
                nodes.remove(name);
            }
            stays
        });
        for (name, record) in &known.nodes {
            let place = (record.address.clone(), record.joined_ms);
            if now.applied.get(name) != Some(&place) && !self.configured.contains(name) {
                tracing::info!(node_id = %name, address = record.address, "node is used");
                nodes.put(Node::new(name.clone(), self.way(&ready, name, &record.address)));
                now.applied.insert(name.clone(), place);
            }
        }
    }

    fn way(self: &Arc<Self>, ready: &Ready, node: &NodeId, address: &str) -> Way {
        let voucher: Arc<dyn Voucher> = Arc::new(Records(Arc::clone(self)));
        let config = Arc::clone(&ready.client);
        Way::Tls(Arc::new(TlsWay { node: node.clone(), address: address.to_owned(), config, voucher }))
    }

    /// Makes the cluster, unless it is made.
    ///
    /// # Errors
    /// It cannot be kept.
    pub async fn init(self: &Arc<Self>) -> Result<ClusterInfo, Failure> {
        let is_there = self.store.authority().await.map_err(stored)?.is_some();
        let made = !is_there && {
            let made = Authority::make("dsec cluster").map_err(defect)?;
            self.store.found(made).await.map_err(stored)?
        };
        if made {
            tracing::info!("the cluster was made");
        }
        Ok(ClusterInfo { made, ..self.info().await? })
    }

    /// What the cluster is known by.
    ///
    /// # Errors
    /// There is none yet.
    pub async fn info(self: &Arc<Self>) -> Result<ClusterInfo, Failure> {
        let ready = self.ready().await?;
        let certificate = Certificate::parse(ready.authority.der()).map_err(defect)?;
        Ok(ClusterInfo {
            authority: certificate.fingerprint.to_string(),
            authority_until_ms: certificate.not_after_s.saturating_mul(1000),
            made: false,
        })
    }

    /// Makes a token.
    ///
    /// # Errors
    /// The name or the time is out of its range, or there are too many.
    pub async fn token(self: &Arc<Self>, request: TokenRequest) -> Result<Token, Failure> {
        let ready = self.ready().await?;
        let node: Option<NodeId> = request.node.map(|name| name.parse().map_err(bad_node)).transpose()?;
        let ttl_s = request.ttl_s.unwrap_or(TOKEN_TTL_DEFAULT_S);
        if !(1..=TOKEN_TTL_MAX_S).contains(&ttl_s) {
            let message = format!("ttl_s is {ttl_s}; it must be between 1 and {TOKEN_TTL_MAX_S}");
            return Err(Failure::new(ErrorKind::InvalidArgument, message)
                .detail(json!({ "field": "ttl_s", "min": 1, "max": TOKEN_TTL_MAX_S })));
        }
        let token = JoinToken::make(ready.authority.fingerprint()).map_err(defect)?;
        let now_ms = now_ms();
        let expires_ms = now_ms + ttl_s * 1000;
        let record = TokenRecord { node: node.clone(), expires_ms, used: None };
        let kept = token.kept();
        self.change(move |known| known.add_token(kept, record, now_ms)).await??;
        Ok(Token { token: token.text(), node: node.map(String::from), expires_ms })
    }

    /// Lets a machine in.
    ///
    /// # Errors
    /// Its token is not good, its name taken, or its request malformed.
    pub async fn join(self: &Arc<Self>, request: JoinRequest, nodes: &NodeSet) -> Result<Joined, Failure> {
        let ready = self.ready().await?;
        let kept = JoinToken::kept_of(&request.secret);
        // Before anything is locked or written: anybody can send anything here.
        self.refresh().await.map_err(stored)?;
        if !self.known().tokens.contains_key(&kept) {
            return Err(self.guessed());
        }
        let node: NodeId = request.node.parse().map_err(bad_node)?;
        check_address(&request.address)?;
        let asked = Request::from_pem(&request.request).map_err(bad_request)?;
        let role = Role::Node(node.to_string());
        let issued = ready.authority.issue(&asked, &role, Validity::now_for(self.settings.lifetime));
        let issued = issued.map_err(defect)?;
        let (name, record) = (node.clone(), IssuedRecord::of(&issued.certificate));
        let is_configured = self.configured.contains(&node);
        let (key, address, now_ms) = (asked.key(), request.address, now_ms());
        let joined = self.change(move |known| {
            let joiner = Joiner { token: &kept, node: &name, key, address: &address };
            known.may_join(&joiner, is_configured, now_ms)?;
            known.join(&joiner, record, now_ms);
            Ok(())
        });
        joined.await?.map_err(refused)?;
        tracing::info!(node_id = %node, key = %key, "node has joined");
        self.apply(nodes);
        Ok(Joined { certificate: issued.pem, authority: ready.authority.pem() })
    }

    /// A secret that no token has.
    fn guessed(&self) -> Failure {
        let mut guessed = lock(&self.guessed);
        if guessed.is_none_or(|last| last.elapsed() >= GUESSES_EVERY) {
            *guessed = Some(Instant::now());
            Refusal::UnknownToken.log();
        }
        Refusal::UnknownToken.into()
    }

    /// Hears a node that has shown this certificate.
    ///
    /// # Errors
    /// It is refused: renamed, cloned, replayed, forgotten.
    pub async fn announce(
        self: &Arc<Self>,
        shown: &Certificate,
        request: AnnounceRequest,
        nodes: &NodeSet,
    ) -> Result<Announced, Failure> {
        let ready = self.ready().await?;
        let Some(Role::Node(name)) = &shown.role else { return Err(refused(Refusal::NoCertificate)) };
        let node: NodeId = name.parse().map_err(bad_node)?;
        if request.node != *name {
            let given = request.node.chars().take(ADDRESS_MAX).collect();
            return Err(refused(Refusal::Renamed { node, given }));
        }
        check_address(&request.address)?;
        check_instance(&request.instance)?;
        let AnnounceRequest { instance, address, request, .. } = request;
        let certificate = shown.fingerprint;
        let announcer = Announcer { node: &node, certificate, instance: &instance, address: &address };
        let mut standing = self.known().standing(&node, certificate);
        if standing.is_err() {
            // Another server may know better.
            self.refresh().await.map_err(stored)?;
            standing = self.known().standing(&node, certificate);
        }
        let standing = standing.map_err(refused)?;
        let rival = self.known().rival(&announcer).map_err(refused)?;
        if let Some((address, rival)) = &rival
            && self.lives(&ready, &node, address, rival).await
        {
            return Err(refused(self.known().cloned(&announcer)));
        }
        let issued = match &request {
            Some(pem) => {
                let asked = Request::from_pem(pem).map_err(bad_request)?;
                let validity = Validity::now_for(self.settings.lifetime);
                let role = Role::Node(name.clone());
                Some(ready.authority.issue(&asked, &role, validity).map_err(defect)?)
            }
            None => None,
        };
        lock(&self.seen).insert(node.clone(), now_ms());
        let again_ms = u64::try_from(self.settings.announce_every.as_millis()).unwrap_or(u64::MAX);
        let is_news =
            self.known().nodes.get(&node).is_none_or(|record| {
                record.address != address || record.instance.as_ref() != Some(&instance)
            });
        if issued.is_some() || is_news || standing == Standing::Confirms {
            let renewed = issued.as_ref().map(|issued| IssuedRecord::of(&issued.certificate));
            let rival = rival.map(|(_, instance)| instance);
            let name = node.clone();
            let changed = self.change(move |known| {
                let announcer =
                    Announcer { node: &name, certificate, instance: &instance, address: &address };
                known.announced(&announcer, rival.as_deref())?;
                if let Some(renewed) = renewed {
                    known.renewed(&name, renewed);
                }
                Ok(())
            });
            changed.await?.map_err(refused)?;
            self.apply(nodes);
            // Who sees that the node is up may use it at once.
            nodes.look_at(&node).await;
        }
        if issued.is_some() {
            tracing::info!(node_id = %node, "certificate of a node is renewed");
        }
        Ok(Announced { certificate: issued.map(|issued| issued.pem), again_ms })
    }

    /// Whether this edge of a node answers still at its address.
    async fn lives(self: &Arc<Self>, ready: &Ready, node: &NodeId, address: &str, instance: &str) -> bool {
        let rival = Node::new(node.clone(), self.way(ready, node, address));
        let mut headers = HeaderMap::new();
        Behalf::server().write(&mut headers);
        let answer = rival.ask::<EdgeInstance>("/internal/instance", &headers);
        matches!(tokio::time::timeout(RIVAL_WITHIN, answer).await, Ok(Ok(there)) if there.instance == instance)
    }

    /// The nodes that have joined.
    ///
    /// # Errors
    /// There is no cluster yet.
    pub async fn members(self: &Arc<Self>) -> Result<MemberList, Failure> {
        self.ready().await?;
        self.refresh().await.map_err(stored)?;
        let (known, seen) = (self.known(), lock(&self.seen));
        let member = |(name, record): (&NodeId, &NodeRecord)| Member {
            node: name.to_string(),
            address: record.address.clone(),
            key: record.now.key.clone(),
            joined_ms: record.joined_ms,
            certificate_until_ms: record.now.until_ms,
            seen_ms: seen.get(name).copied(),
        };
        Ok(MemberList { nodes: known.nodes.iter().map(member).collect() })
    }

    /// Has a node be none of the cluster's any more.
    ///
    /// # Errors
    /// It is none.
    pub async fn forget(self: &Arc<Self>, node: &str, nodes: &NodeSet) -> Result<(), Failure> {
        self.ready().await?;
        let name: NodeId = node.parse().map_err(bad_node)?;
        let (gone, now_ms) = (name.clone(), now_ms());
        let was_there = self.change(move |known| {
            let was_there = known.forget(&gone);
            known.forget_old(now_ms);
            was_there
        });
        if !was_there.await? {
            let hint = match self.configured.contains(&name) {
                true => "it is one of the server's configuration: take it out of control.toml",
                false => "`dsec cluster nodes` lists them",
            };
            return Err(Failure::new(ErrorKind::NotFound, format!("no node {name} has joined"))
                .hint(hint)
                .detail(json!({ "node": name.as_str() })));
        }
        lock(&self.seen).remove(&name);
        tracing::info!(node_id = %name, "node is forgotten");
        self.apply(nodes);
        Ok(())
    }
}

/// Looks at certificates by what is known.
struct Records(Arc<Cluster>);

impl Voucher for Records {
    fn vouch<'a>(
        &'a self,
        node: &'a NodeId,
        certificate: &'a Certificate,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async {
            let cluster = &self.0;
            let mut standing = cluster.known().standing(node, certificate.fingerprint);
            if standing.is_err() && cluster.refresh().await.is_ok() {
                standing = cluster.known().standing(node, certificate.fingerprint);
            }
            match standing {
                Ok(Standing::Current) => Ok(()),
                Ok(Standing::Confirms) => {
                    let (cluster, node, shown) = (Arc::clone(cluster), node.clone(), certificate.fingerprint);
                    tokio::spawn(async move {
                        if let Err(failure) = cluster.change(move |known| known.shown(&node, shown)).await {
                            tracing::error!(error = %failure.0, "a renewed certificate cannot be noted");
                        }
                    });
                    Ok(())
                }
                Err(refusal) => {
                    refusal.log();
                    Err(refusal.message())
                }
            }
        })
    }
}

fn refused(refusal: Refusal) -> Failure {
    refusal.log();
    refusal.into()
}

fn stored(error: StoreError) -> Failure {
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    tracing::error!(%error, cause, "the cluster's store");
    Failure::new(ErrorKind::Internal, "what the cluster knows cannot be read or written")
        .hint("the log of dsec-control says why")
}

fn defect(error: PkiError) -> Failure {
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    tracing::error!(%error, cause, "the cluster's authority");
    Failure::new(ErrorKind::Internal, "the cluster's authority cannot be used")
        .hint("the log of dsec-control says why")
}

fn bad_node(error: dsec_model::IdError) -> Failure {
    Failure::new(ErrorKind::InvalidArgument, error.to_string()).detail(json!({ "field": "node" }))
}

fn bad_request(error: PkiError) -> Failure {
    Failure::new(ErrorKind::InvalidArgument, error.to_string()).detail(json!({ "field": "request" }))
}

/// An address that others can reach.
fn check_address(address: &str) -> Result<(), Failure> {
    let bad = |why: &str| {
        let given: String = address.chars().take(ADDRESS_MAX).collect();
        Err(Failure::new(ErrorKind::InvalidArgument, format!("{given:?} is no address of an edge: {why}"))
            .hint("it is host:port, as the servers reach it: set `advertise` in edge.toml")
            .detail(json!({ "field": "address" })))
    };
    if address.len() > ADDRESS_MAX || address.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return bad("it is too long, or has blanks");
    }
    let Some((host, port)) = address.rsplit_once(':') else { return bad("it has no port") };
    if !port.parse::<u16>().is_ok_and(|port| port > 0) {
        return bad("its port is none");
    }
    if host.is_empty() || (host.contains(':') && !(host.starts_with('[') && host.ends_with(']'))) {
        return bad("it has no host");
    }
    let ip = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    if ip.is_ok_and(|ip| ip.is_unspecified()) {
        return bad("nobody can be reached there");
    }
    Ok(())
}

fn check_instance(instance: &str) -> Result<(), Failure> {
    let is_one =
        (1..=INSTANCE_MAX).contains(&instance.len()) && instance.bytes().all(|b| b.is_ascii_alphanumeric());
    if is_one {
        return Ok(());
    }
    Err(Failure::new(ErrorKind::InvalidArgument, "instance must be 1 to 64 letters and digits")
        .detail(json!({ "field": "instance" })))
}
