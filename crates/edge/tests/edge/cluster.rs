//! Nodes of a cluster over the network: a real control and real edges on loopback, on the fake backend.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_control::app::App;
use dsec_control::cluster::{Cluster, FileStore, Settings};
use dsec_control::config::ConfigFile;
use dsec_control::{api, server};
use dsec_edge::member::{Joining, Kept, Member, MemberError, check, join};
use dsec_edge::node::Node;
use dsec_edge::server::{Socket, serve, serve_cluster};
use dsec_pki::Certificate;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::support::client::{Answer, Client, tiny_tar};
use crate::support::content::FakeContent;
use crate::support::{Backend, World};

const KEY: &str = "dsec_test";
/// Long enough that nothing is renewed in a test.
const LONG: Duration = Duration::from_secs(3600);

/// A control that keeps a cluster.
struct Control {
    address: SocketAddr,
    app: Arc<App>,
    stop: CancellationToken,
    dir: tempfile::TempDir,
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Control {
    async fn start(lifetime: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let keys_file = dir.path().join("keys.json");
        let sha256 = format!("{:x}", Sha256::digest(KEY.as_bytes()));
        let keys = json!({ "keys": [{ "id": "k", "project": "root", "sha256": sha256, "created_ms": 1, "name": "t" }] });
        std::fs::write(&keys_file, keys.to_string()).unwrap();
        let config = ConfigFile {
            listen: Some("127.0.0.1:0".to_owned()),
            keys_file: Some(keys_file),
            cluster_dir: Some(dir.path().join("cluster")),
            ..ConfigFile::default()
        };
        let mut app = Arc::into_inner(App::open(&config.validate().unwrap()).await.unwrap()).unwrap();
        let settings = Settings { lifetime, announce_every: Duration::from_millis(100) };
        let store = Arc::new(FileStore::new(&dir.path().join("cluster")));
        app.cluster = Some(Cluster::new(store, settings, Vec::new()));
        let app = Arc::new(app);
        let (of, cluster) = (Arc::downgrade(&app), app.cluster.clone().unwrap());
        tokio::spawn(cluster.follow(move || of.upgrade()));
        let watched = Arc::clone(&app);
        tokio::spawn(async move { watched.watch().await });
        let listener = server::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let router = api::router(Arc::clone(&app));
        tokio::spawn(server::serve(listener, Arc::clone(&app), router, stop.clone()));
        let control = Self { address, app, stop, dir };
        assert_eq!(control.post("/v1/cluster", json!({})).await.expect(200)["made"], true);
        control
    }

    async fn send(&self, method: &str, path: &str, body: impl Into<bytes::Bytes>) -> Answer {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        let headers = [("authorization", format!("Bearer {KEY}"))];
        let headers: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let request: http::Request<Full<bytes::Bytes>> = Client::request(method, path, &headers, body);
        let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.send("POST", path, body.to_string()).await
    }

    async fn token(&self, request: Value) -> String {
        self.post("/v1/cluster/tokens", request).await.expect(200)["token"].as_str().unwrap().to_owned()
    }

    fn joining(&self, token: &str) -> Joining {
        Joining { token: token.parse().unwrap(), control: format!("https://{}", self.address) }
    }

    /// A machine that has joined.
    async fn machine(&self, name: &str) -> World {
        let world = machine(name);
        join(&world.config(), &self.joining(&self.token(json!({})).await)).await.unwrap();
        world
    }

    /// Names of the nodes that have joined, as the list says them.
    async fn members(&self) -> Vec<String> {
        let list = self.send("GET", "/v1/cluster/nodes", "").await.expect(200);
        list["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|node| node["node"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Whether a node is reached.
    async fn reaches(&self, node: &str) -> bool {
        self.send("GET", &format!("/v1/nodes/{node}"), "").await.status == 200
    }
}

fn machine(name: &str) -> World {
    // Nobody listens there: where the edge really does, it tells when it does.
    let mut world = World::with("listen = \"127.0.0.1:1\"\n");
    world.name = name.to_owned();
    world
}

/// An edge that is a member. Dropping it is `kill -9`.
struct Edge {
    address: SocketAddr,
    member: Arc<Member>,
    instance: String,
    client: Client,
    _running: Running,
}

struct Running(Option<tokio::runtime::Runtime>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Waits for what must come.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so().await {
        assert!(Instant::now() < deadline, "waited for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Starts an edge as `dsec-edge run` does, up to what control says of it.
async fn start(world: &World) -> Result<Edge, MemberError> {
    let kept = check(&world.config())?.expect("it has joined nothing");
    serve_as(world, kept, true).await
}

async fn serve_as(world: &World, kept: Kept, announces: bool) -> Result<Edge, MemberError> {
    let (config, host) = (world.config(), Arc::clone(&world.host));
    let member = Arc::new(Member::new(&config, kept)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let begun = Arc::clone(&member);
    let task = runtime.spawn(async move {
        let content = Arc::new(FakeContent::new(Arc::clone(&host)));
        let path = config.socket.clone();
        let node = Node::start(config, Arc::new(Backend(host)), content).await.unwrap();
        let socket = Socket::bind(&path).unwrap();
        tokio::spawn(serve(Arc::clone(&node), socket));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve_cluster(Arc::clone(&node), listener, begun.server()));
        let instance = node.instance.clone();
        if announces {
            let pause = begun.announce(&instance, address).await?;
            tokio::spawn(begun.keep(instance.clone(), address, pause));
        }
        Ok::<_, MemberError>((address, instance, path))
    });
    let _running = Running(Some(runtime));
    let (address, instance, path) = task.await.unwrap()?;
    Ok(Edge { address, member, instance, client: Client::new(path), _running })
}

/// The reason of a refusal.
fn reason<T>(result: Result<T, MemberError>) -> String {
    match result.err().expect("it was not refused") {
        MemberError::Refused { error, .. } => {
            assert!(!error.0.hint.is_empty(), "it is not told what to do: {error}");
            error.0.detail["reason"].as_str().unwrap().to_owned()
        }
        other => panic!("{other:?}"),
    }
}

/// The text of an error with what is below it.
fn told(error: MemberError) -> String {
    dsec_edge::error::chain(&error)
}

/// Everything of one machine's state on another.
fn copied(from: &World, to: &World) {
    std::fs::create_dir_all(&to.state).unwrap();
    std::fs::copy(from.state.join("member.json"), to.state.join("member.json")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_join_by_tokens_and_run_sandboxes_over_the_network() {
    let control = Control::start(LONG).await;
    let (one, two) = (control.machine("n1").await, control.machine("n2").await);
    assert_eq!(control.members().await, ["n1", "n2"]);
    let edges = [start(&one).await.unwrap(), start(&two).await.unwrap()];
    for edge in &edges {
        edge.client.import("base").await;
    }
    until("both nodes", async || control.reaches("n1").await && control.reaches("n2").await).await;
    let mut seen = std::collections::BTreeSet::new();
    let begun = Instant::now();
    while seen.len() < 2 && begun.elapsed() < Duration::from_secs(20) {
        let made = control.post("/v1/sandboxes", json!({ "container_image": "base" })).await;
        if made.status == 503 {
            // Neither has been heard since it began to listen.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        }
        let made = made.expect(201);
        let id = made["id"].as_str().unwrap();
        let exec = json!({ "shell": "echo over the network", "wait": true });
        let ran = control.post(&format!("/v1/sandboxes/{id}/execs"), exec).await;
        assert_eq!(ran.json()["stdout"], "over the network\n", "{}", ran.text());
        seen.insert(made["node"].as_str().unwrap().to_owned());
    }
    assert_eq!(seen.len(), 2, "only {seen:?} got sandboxes");
    // Large bodies, both ways.
    let listed = control.send("PUT", "/v1/images/other?node=n1", tiny_tar("x")).await;
    assert_eq!(listed.status, 200, "{}", listed.text());
    for (world, files) in [(&one, ["member.json"].as_slice()), (&two, &["member.json"])] {
        for file in files {
            let mode = world.state.join(file).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "others can read {file}");
        }
        assert!(!world.state.join("joining.key").exists());
    }
    for file in ["ca.key", "ca.pem", "cluster.json"] {
        let mode = control.dir.path().join("cluster").join(file).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "others can read {file}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_has_said_that_it_is_up_takes_the_next_sandbox() {
    let control = Control::start(LONG).await;
    let mut running = Vec::new();
    for name in ["n1", "n2", "n3"] {
        let world = control.machine(name).await;
        let edge = start(&world).await.unwrap();
        edge.client.import("base").await;
        // Not a second later, when control asks its nodes anyway.
        let made = control.post("/v1/sandboxes", json!({ "container_image": "base" })).await.expect(201);
        assert_eq!(made["node"], name);
        assert_eq!(control.post(&format!("/v1/nodes/{name}/cordon"), json!({})).await.status, 200);
        running.push((world, edge));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_lets_one_machine_in_for_its_time_and_name() {
    let control = Control::start(LONG).await;
    let token = control.token(json!({})).await;
    let (one, two) = (machine("n1"), machine("n2"));
    join(&one.config(), &control.joining(&token)).await.unwrap();
    // The same once more is no second join: what is there stays.
    let before = std::fs::read(one.state.join("member.json")).unwrap();
    join(&one.config(), &control.joining(&token)).await.unwrap();
    assert_eq!(std::fs::read(one.state.join("member.json")).unwrap(), before);
    assert_eq!(reason(join(&two.config(), &control.joining(&token)).await), "used_token");
    let named = control.token(json!({ "node": "n3" })).await;
    assert_eq!(reason(join(&two.config(), &control.joining(&named)).await), "other_name");
    let taken = control.token(json!({})).await;
    assert_eq!(reason(join(&machine("n1").config(), &control.joining(&taken)).await), "name_taken");
    let short = control.post("/v1/cluster/tokens", json!({ "ttl_s": 1 })).await.expect(200);
    until("the token's end", async || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        now > u128::from(short["expires_ms"].as_u64().unwrap())
    })
    .await;
    let late = control.joining(short["token"].as_str().unwrap());
    assert_eq!(reason(join(&two.config(), &late).await), "expired_token");
    let other = Control::start(LONG).await;
    let foreign = Joining {
        control: format!("https://{}", control.address),
        ..other.joining(&other.token(json!({})).await)
    };
    // A server of another cluster than the token's is not even asked.
    let error = told(join(&two.config(), &foreign).await.unwrap_err());
    assert!(error.contains("invalid peer certificate"), "{error}");
    for (request, status) in [(json!({ "ttl_s": 0 }), 400), (json!({ "node": "N 1" }), 400)] {
        control.post("/v1/cluster/tokens", request).await.refused(status, "invalid_argument");
    }
    assert!(
        !std::fs::read_to_string(control.dir.path().join("cluster/cluster.json"))
            .unwrap()
            .contains(&token.parse::<dsec_pki::JoinToken>().unwrap().secret())
    );
    assert_eq!(control.members().await, ["n1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renamed_node_is_refused_by_itself_and_by_control() {
    let control = Control::start(LONG).await;
    let mut world = control.machine("n1").await;
    let kept = Kept::load(&world.state).unwrap().unwrap();
    world.name = "n2".to_owned();
    let error = told(start(&world).await.err().unwrap());
    assert!(error.contains("node n1 of a cluster") && error.contains("calls this node n2"), "{error}");
    // One that does not look: control does.
    let announced = serve_as(&world, kept, true).await;
    assert_eq!(reason(announced), "renamed");
    // And one whose file was changed: its certificate is for the other name.
    let other = machine("n2");
    std::fs::create_dir_all(&other.state).unwrap();
    let text = std::fs::read_to_string(world.state.join("member.json")).unwrap();
    std::fs::write(other.state.join("member.json"), text.replace("\"node\": \"n1\"", "\"node\": \"n2\""))
        .unwrap();
    assert_eq!(reason(start(&other).await), "renamed");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_edges_with_one_identity_the_second_is_refused_while_the_first_lives() {
    let control = Control::start(LONG).await;
    let world = control.machine("n1").await;
    let first = start(&world).await.unwrap();
    until("the first", async || control.reaches("n1").await).await;
    let copy = machine("n1");
    copied(&world, &copy);
    assert_eq!(reason(start(&copy).await), "cloned");
    assert!(control.reaches("n1").await, "the first was harmed");
    // A restart is none: nobody answers where the first was.
    let (address, instance, member) = (first.address, first.instance.clone(), Arc::clone(&first.member));
    drop(first);
    let mut again = None;
    until("the end of the first", async || {
        again = start(&world).await.ok();
        again.is_some()
    })
    .await;
    assert!(control.reaches("n1").await);
    // Nor is a machine that was moved; what it was moved from is refused from then on.
    drop(again.take());
    until("the end of the second", async || {
        again = start(&copy).await.ok();
        again.is_some()
    })
    .await;
    assert_eq!(reason(start(&world).await), "cloned");
    assert_eq!(
        reason(member.announce(&instance, address).await),
        "cloned",
        "one that was replaced comes back"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_node_is_left_alone_and_joins_again_by_another_token() {
    let control = Control::start(LONG).await;
    let world = control.machine("n1").await;
    let edge = start(&world).await.unwrap();
    until("the node", async || control.reaches("n1").await).await;
    control.send("DELETE", "/v1/cluster/nodes/n1", "").await.expect(204);
    assert!(!control.reaches("n1").await);
    control.send("GET", "/v1/nodes/n1", "").await.refused(404, "not_found");
    control.send("DELETE", "/v1/cluster/nodes/n1", "").await.refused(404, "not_found");
    assert!(control.app.nodes.all().is_empty());
    assert_eq!(reason(edge.member.announce(&edge.instance, edge.address).await), "forgotten");
    drop(edge);
    assert_eq!(reason(start(&world).await), "forgotten");
    join(&world.config(), &control.joining(&control.token(json!({})).await)).await.unwrap();
    let _edge = start(&world).await.unwrap();
    until("the node again", async || control.reaches("n1").await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_under_requests_and_the_old_ones_are_refused() {
    let control = Control::start(Duration::from_secs(4)).await;
    let world = control.machine("n1").await;
    let old = Kept::load(&world.state).unwrap().unwrap();
    let edge = start(&world).await.unwrap();
    edge.client.import("base").await;
    until("the node", async || control.reaches("n1").await).await;
    let made = control.post("/v1/sandboxes", json!({ "container_image": "base" })).await.expect(201);
    let execs = format!("/v1/sandboxes/{}/execs", made["id"].as_str().unwrap());
    // One request over more than a life, and many short ones beside it.
    let long = control.post(&execs, json!({ "shell": "sleep 7; echo slept", "wait": true }));
    let is_over = AtomicBool::new(false);
    let short = async {
        let mut count = 0;
        while !is_over.load(Ordering::SeqCst) {
            let ran = control.post(&execs, json!({ "shell": "echo on", "wait": true })).await;
            assert_eq!(ran.status, 200, "{}", ran.text());
            count += 1;
        }
        count
    };
    let long = async {
        let long = long.await;
        is_over.store(true, Ordering::SeqCst);
        long
    };
    let (long, count) = tokio::join!(long, short);
    assert_eq!(long.json()["stdout"], "slept\n", "{}", long.text());
    assert!(count > 5, "{count} requests");
    let print = |kept: &Kept| Certificate::parse_pem(&kept.certificate).unwrap();
    let now = Kept::load(&world.state).unwrap().unwrap();
    assert_ne!(print(&now).fingerprint, print(&old).fingerprint, "it was not renewed");
    assert_ne!(print(&now).key, print(&old).key, "the key is the old one");
    drop(edge);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_of_before_a_renewal_is_refused_by_both_ways() {
    // Renewed after ten seconds; the old one would count for twenty more.
    let control = Control::start(Duration::from_secs(30)).await;
    let world = control.machine("n1").await;
    let old = Kept::load(&world.state).unwrap().unwrap();
    let edge = start(&world).await.unwrap();
    until("the renewal", async || {
        let now = Kept::load(&world.state).unwrap().unwrap();
        now.certificate != old.certificate
    })
    .await;
    // What was issued counts once its edge has shown it.
    let read = || std::fs::read_to_string(control.dir.path().join("cluster/cluster.json")).unwrap();
    until("the renewed certificate to be shown", async || {
        let known: serde_json::Value = serde_json::from_str(&read()).unwrap();
        known["nodes"]["n1"]["next"].is_null()
    })
    .await;
    until("the node", async || control.reaches("n1").await).await;
    let kept = read();
    let (address, instance) = (edge.address, edge.instance.clone());
    drop(edge);
    let copy = machine("n1");
    let stale = Member::new(&copy.config(), old.clone()).unwrap();
    assert_eq!(reason(stale.announce(&instance, address).await), "replayed", "{kept}");
    // It serves all the same, at the address of the node; control does not take it for that.
    let impostor = serve_as(&copy, old, false).await.unwrap();
    let cluster = control.dir.path().join("cluster/cluster.json");
    let known = std::fs::read_to_string(&cluster).unwrap();
    let part = control.dir.path().join("cluster/part");
    std::fs::write(&part, known.replace(&address.to_string(), &impostor.address.to_string())).unwrap();
    std::fs::rename(part, &cluster).unwrap();
    until("the impostor's address", async || {
        let nodes = control.app.nodes.all();
        nodes.iter().any(|node| node.way().to_string() == impostor.address.to_string())
    })
    .await;
    control.send("GET", "/v1/nodes/n1", "").await.refused(503, "unavailable");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_without_controls_certificate_reaches_a_handler() {
    let control = Control::start(LONG).await;
    let (world, other) = (control.machine("n1").await, control.machine("n2").await);
    let edge = start(&world).await.unwrap();
    // Plain HTTP.
    let mut plain = TcpStream::connect(edge.address).await.unwrap();
    plain.write_all(b"GET /v1/nodes HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut heard = Vec::new();
    let _ = plain.read_to_end(&mut heard).await;
    assert!(!heard.starts_with(b"HTTP"), "{:?}", String::from_utf8_lossy(&heard));
    // Nothing at all: it is let go after a while.
    let mut silent = TcpStream::connect(edge.address).await.unwrap();
    let _ = tokio::time::timeout(Duration::from_secs(60), silent.read_to_end(&mut heard))
        .await
        .expect("it is held");
    // TLS without a certificate, and with a node's.
    let kept = Kept::load(&other.state).unwrap().unwrap();
    let authority = rustls::pki_types::CertificateDer::from_pem_slice(kept.authority.as_bytes()).unwrap();
    let node = dsec_pki::tls::Identity::from_pem(&kept.certificate, &kept.key).unwrap();
    for identity in [None, Some(Arc::new(node))] {
        let tls = dsec_pki::tls::cluster_client(identity, &authority).unwrap();
        let stream = TcpStream::connect(edge.address).await.unwrap();
        let name = dsec_pki::Role::Node("n1".to_owned()).server_name().unwrap();
        let heard = async {
            // TLS 1.3: the refusal comes after the client is done.
            let mut stream = tokio_rustls::TlsConnector::from(tls).connect(name, stream).await?;
            stream.write_all(b"GET /v1/nodes HTTP/1.1\r\nhost: x\r\n\r\n").await?;
            let mut heard = [0; 4];
            stream.read_exact(&mut heard).await?;
            Ok::<_, std::io::Error>(heard)
        };
        assert!(heard.await.is_err(), "an answer came");
    }
    // What ends the node is for its own machine, also when control asks.
    until("the node", async || control.reaches("n1").await).await;
    let node = control.app.nodes.get("n1").unwrap();
    let refused =
        node.tell::<Value>("/internal/shutdown", &http::HeaderMap::new(), &json!({})).await.unwrap_err();
    assert_eq!(refused.0.0.code, dsec_model::ErrorKind::NotFound);
    assert!(control.reaches("n1").await);
    // Announcing is a node's, by its certificate.
    let announce = json!({ "node": "n1", "instance": "x", "address": "127.0.0.1:1" });
    control.post("/v1/cluster/announce", announce).await.refused(401, "unauthenticated");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_that_starts_again_knows_its_nodes_and_its_cluster() {
    let control = Control::start(LONG).await;
    let world = control.machine("n1").await;
    let edge = start(&world).await.unwrap();
    let store = Arc::new(FileStore::new(&control.dir.path().join("cluster")));
    let again = Cluster::new(store, Settings::default(), Vec::new());
    again.open().await.unwrap();
    let nodes = dsec_control::nodes::NodeSet::new(&[]);
    again.apply(&nodes);
    let node = nodes.get("n1").unwrap();
    assert_eq!(node.way().to_string(), edge.address.to_string());
    let status: Value = node.ask("/v1/nodes/n1", &http::HeaderMap::new()).await.unwrap();
    assert_eq!(status["node"], "n1");
}
