use std::time::{Duration, SystemTime};

use rustls::{ClientConnection, ServerConnection};

use super::*;
use crate::{Authority, Key, Request, Validity};

/// Talks both through a handshake; the first failure of either.
fn handshake(client: &Arc<ClientConfig>, to: &Role, server: &Arc<ServerConfig>) -> Result<(), String> {
    let mut client = ClientConnection::new(Arc::clone(client), to.server_name().unwrap()).unwrap();
    let mut server = ServerConnection::new(Arc::clone(server)).unwrap();
    let mut wire = Vec::new();
    for _ in 0..10 {
        wire.clear();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets().map_err(|error| format!("server: {error}"))?;
        wire.clear();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        client.read_tls(&mut wire.as_slice()).unwrap();
        client.process_new_packets().map_err(|error| format!("client: {error}"))?;
        if !client.is_handshaking() && !server.is_handshaking() && !client.wants_write() {
            return Ok(());
        }
    }
    Err("the handshake does not end".to_owned())
}

fn authority() -> Authority {
    Authority::from_pem(&Authority::make("test").unwrap()).unwrap()
}

fn node(name: &str) -> Role {
    Role::Node(name.to_owned())
}

/// A certificate of these, with its key and the authority's certificate behind it.
fn pems(authority: &Authority, role: &Role, validity: Validity) -> (String, String) {
    let key = Key::make().unwrap();
    let request = Request::from_pem(&key.request().unwrap()).unwrap();
    let issued = authority.issue(&request, role, validity).unwrap();
    (issued.pem + &authority.pem(), key.to_pem())
}

fn identity_for(authority: &Authority, role: &Role, validity: Validity) -> Arc<Identity> {
    let (chain, key) = pems(authority, role, validity);
    Arc::new(Identity::from_pem(&chain, &key).unwrap())
}

fn identity(authority: &Authority, role: &Role) -> Arc<Identity> {
    identity_for(authority, role, Validity::now_for(Duration::from_secs(3600)))
}

/// The server of a node, with this identity.
fn edge(identity: Arc<Identity>, authority: &Authority) -> Arc<ServerConfig> {
    cluster_server(identity, authority.der(), Callers::Control).unwrap()
}

fn client(identity: Arc<Identity>, authority: &Authority) -> Arc<ClientConfig> {
    cluster_client(Some(identity), authority.der()).unwrap()
}

#[test]
fn control_and_a_node_take_each_other() {
    let ca = authority();
    let control = client(identity(&ca, &Role::Control), &ca);
    handshake(&control, &node("n1"), &edge(identity(&ca, &node("n1")), &ca)).unwrap();
}

#[test]
fn control_goes_to_no_node_but_the_one_it_means() {
    let (ca, other) = (authority(), authority());
    let control = client(identity(&ca, &Role::Control), &ca);
    let to_n1 = |role: &Role| handshake(&control, &node("n1"), &edge(identity(&ca, role), &ca)).unwrap_err();
    for role in [node("n2"), Role::Control] {
        let error = to_n1(&role);
        assert!(error.starts_with("client") && error.contains(&role.dns_name()), "{error}");
    }
    let error = handshake(&control, &node("n1"), &edge(identity(&other, &node("n1")), &ca)).unwrap_err();
    assert!(error.contains("UnknownIssuer") || error.contains("BadSignature"), "{error}");
}

#[test]
fn a_node_takes_nobody_but_control() {
    let (ca, other) = (authority(), authority());
    let edge = edge(identity(&ca, &node("n1")), &ca);
    let refused = |client: &Arc<ClientConfig>| handshake(client, &node("n1"), &edge).unwrap_err();
    for role in [node("n1"), node("n2"), node("control")] {
        assert!(refused(&client(identity(&ca, &role), &ca)).starts_with("server"), "{role:?}");
    }
    assert!(refused(&client(identity(&other, &Role::Control), &ca)).starts_with("server"));
    let without = cluster_client(None, ca.der()).unwrap();
    let error = refused(&without);
    assert!(error.contains("no certificates"), "{error}");
}

#[test]
fn control_takes_nodes_and_those_who_have_nothing_yet() {
    let (ca, other) = (authority(), authority());
    let server = identity(&ca, &Role::Control);
    let server = cluster_server(server, ca.der(), Callers::NodesOrNone).unwrap();
    let try_with = |client: Arc<ClientConfig>| handshake(&client, &Role::Control, &server);
    try_with(cluster_client(None, ca.der()).unwrap()).unwrap();
    try_with(client(identity(&ca, &node("n1")), &ca)).unwrap();
    assert!(try_with(client(identity(&ca, &Role::Control), &ca)).is_err());
    assert!(try_with(client(identity(&other, &node("n1")), &ca)).is_err());
}

#[test]
fn what_has_expired_or_is_of_the_future_is_refused_by_both() {
    let ca = authority();
    let now = SystemTime::now();
    let hours = |n: u64| Duration::from_secs(n * 3600);
    for validity in [
        Validity { from: now - hours(3), until: now - hours(1) },
        Validity { from: now + hours(1), until: now + hours(3) },
    ] {
        let control = client(identity(&ca, &Role::Control), &ca);
        let old = edge(identity_for(&ca, &node("n1"), validity), &ca);
        assert!(handshake(&control, &node("n1"), &old).unwrap_err().starts_with("client"));
        let control = client(identity_for(&ca, &Role::Control, validity), &ca);
        let edge = edge(identity(&ca, &node("n1")), &ca);
        assert!(handshake(&control, &node("n1"), &edge).unwrap_err().starts_with("server"));
    }
}

#[test]
fn a_fingerprint_is_enough_to_know_the_cluster_by() {
    let (ca, other) = (authority(), authority());
    let server = |identity| cluster_server(identity, ca.der(), Callers::NodesOrNone).unwrap();
    let joiner = pinned_client(ca.fingerprint()).unwrap();
    handshake(&joiner, &Role::Control, &server(identity(&ca, &Role::Control))).unwrap();
    // Another cluster, a node of this one, and one that shows this one's authority without being of it.
    let (forged, key) = pems(&other, &Role::Control, Validity::now_for(Duration::from_secs(60)));
    let forged = Arc::new(Identity::from_pem(&(forged + &ca.pem()), &key).unwrap());
    for wrong in [identity(&other, &Role::Control), identity(&ca, &node("n1")), forged] {
        assert!(handshake(&joiner, &Role::Control, &server(wrong)).unwrap_err().starts_with("client"));
    }
}

#[test]
fn a_certificate_is_replaced_for_what_comes_and_a_bad_one_is_not_taken() {
    let ca = authority();
    let own = identity(&ca, &node("n2"));
    let server = edge(Arc::clone(&own), &ca);
    let control = client(identity(&ca, &Role::Control), &ca);
    handshake(&control, &node("n1"), &server).unwrap_err();
    let (chain, key) = pems(&ca, &node("n1"), Validity::now_for(Duration::from_secs(60)));
    own.replace(&chain, &key).unwrap();
    handshake(&control, &node("n1"), &server).unwrap();
    let (_, another) = pems(&ca, &node("n1"), Validity::now_for(Duration::from_secs(60)));
    own.replace(&chain, &another).unwrap_err();
    own.replace("", &key).unwrap_err();
    handshake(&control, &node("n1"), &server).unwrap();
}
