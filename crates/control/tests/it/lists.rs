use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use dsec_model::Limits;
use dsec_proto::rest::{Sandbox, SandboxLimits, SandboxList};
use http::StatusCode;
use serde_json::json;

use crate::edge::FakeEdge;
use crate::harness::{Control, get};

pub(crate) fn sandbox(node: &str, number: usize, created_ms: u64) -> Sandbox {
    Sandbox {
        id: format!("sb-{node}-{number}").parse().unwrap(),
        state: dsec_model::State::Running,
        reason: None,
        lost: None,
        backend: "container".to_owned(),
        image: "debian".to_owned(),
        layers: Vec::new(),
        image_digest: String::new(),
        node: node.to_owned(),
        project: dsec_model::iam::ProjectPath::root(),
        limits: SandboxLimits::from(&Limits::default()),
        init_user: "root".to_owned(),
        task_id: None,
        labels: BTreeMap::new(),
        created_ms,
        running_ms: None,
        ended_ms: None,
        last_active_ms: created_ms,
        pauses: None,
        usage: None,
        launch_phases: Vec::new(),
        first_exec: None,
    }
}

/// Gives each node so many sandboxes, with times that often meet.
pub(crate) fn fill(control: &Control, counts: &[usize]) {
    fill_with(control, counts, |_, _| {});
}

/// The same, of which something is changed before anybody sees them.
pub(crate) fn fill_with(control: &Control, counts: &[usize], change: impl Fn(&str, &mut Vec<Sandbox>)) {
    for (edge, count) in control.edges.iter().zip(counts) {
        let name = &edge.notes.name;
        let of_number = |number| sandbox(name, number, 1000 + number as u64 / 3);
        let mut sandboxes = (0..*count).rev().map(of_number).collect();
        change(name, &mut sandboxes);
        *edge.notes.sandboxes.lock().unwrap() = sandboxes;
    }
}

async fn page(control: &Control, limit: usize, cursor: Option<&str>) -> SandboxList {
    let cursor = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
    let answer = control.ask(get(&format!("/v1/sandboxes?state=running&limit={limit}{cursor}"))).await;
    assert_eq!(answer.status, StatusCode::OK, "{:?}", String::from_utf8_lossy(&answer.body));
    serde_json::from_slice(&answer.body).unwrap()
}

#[tokio::test]
async fn pages_over_nodes_have_everything_once_newest_first() {
    let control = Control::start(3).await;
    fill(&control, &[17, 0, 40]);
    for limit in [1, 2, 3, 7, 56, 57, 58, 1000] {
        let (mut all, mut cursor) = (Vec::new(), None);
        loop {
            let got = page(&control, limit, cursor.as_deref()).await;
            assert!(got.sandboxes.len() <= limit);
            all.extend(got.sandboxes);
            cursor = got.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert!(all.is_sorted_by(|a, b| a.created_ms >= b.created_ms), "limit {limit}");
        let mut ids: Vec<String> = all.iter().map(|sandbox| sandbox.id.to_string()).collect();
        assert_eq!(ids.len(), 57, "limit {limit}");
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 57, "limit {limit}");
    }
}

#[tokio::test]
async fn sandboxes_made_between_two_pages_shift_nothing() {
    let control = Control::start(2).await;
    fill(&control, &[6, 6]);
    let first = page(&control, 5, None).await;
    for edge in &control.edges {
        edge.notes.sandboxes.lock().unwrap().insert(0, sandbox(&edge.notes.name, 99, 5000));
    }
    let second = page(&control, 5, first.next_cursor.as_deref()).await;
    let third = page(&control, 5, second.next_cursor.as_deref()).await;
    let mut ids: Vec<String> = [first, second, third]
        .iter()
        .flat_map(|page| page.sandboxes.iter().map(|sandbox| sandbox.id.to_string()))
        .collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 12, "{ids:?}");
}

#[tokio::test]
async fn a_page_asks_each_node_for_those_that_it_has_of_it() {
    let control = Control::start(3).await;
    fill(&control, &[40, 40, 40]);
    assert_eq!(page(&control, 12, None).await.sandboxes.len(), 12);
    let asked: usize = control.edges.iter().map(|edge| edge.notes.asked_by_id.load(Ordering::SeqCst)).sum();
    assert_eq!(asked, 12);
}

#[tokio::test]
async fn nodes_that_do_not_tell_of_their_sandboxes_are_asked_for_a_page() {
    let control = Control::start(3).await;
    control.edges[1].notes.old.store(true, Ordering::SeqCst);
    fill(&control, &[10, 12, 14]);
    let (mut ids, mut cursor) = (BTreeSet::new(), None);
    loop {
        let got = page(&control, 5, cursor.as_deref()).await;
        ids.extend(got.sandboxes.into_iter().map(|sandbox| sandbox.id));
        cursor = got.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(ids.len(), 36);
    // A word that it does not know is not sent there.
    let lost = control.ask(get("/v1/sandboxes?state=lost")).await;
    assert_eq!((lost.status, lost.json()["sandboxes"].as_array().unwrap().len()), (StatusCode::OK, 0));
    let counts = control.ask(get("/v1/counts")).await.json();
    assert_eq!((&counts["uncounted"], &counts["gathering"]), (&json!(["n2"]), &json!(false)));
    assert_eq!(counts["nodes"]["n2"]["known"], "untold");
}

#[tokio::test]
async fn a_list_with_an_unknown_hole_is_a_failure_and_the_nodes_list_names_it() {
    let make_old = |edges: &[FakeEdge]| edges[1].notes.old.store(true, Ordering::SeqCst);
    let mut control = Control::start_as(2, |_| {}, |_| None, make_old).await;
    fill(&control, &[3, 3]);
    control.edges[1].kill().await;
    let answer = control.ask(get("/v1/sandboxes")).await;
    assert_eq!(answer.error(), "unavailable");
    assert_eq!(answer.json()["detail"]["node"], "n2");

    let answer = control.ask(get("/v1/nodes")).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.json()["nodes"].as_array().unwrap().len(), 1);
    assert_eq!(answer.headers["x-dsec-unreachable-nodes"], "n2");
    assert_eq!(control.ask(get("/healthz")).await.json()["status"], "ok");
}

#[tokio::test]
async fn a_bad_page_is_refused() {
    let control = Control::start(2).await;
    for query in ["limit=0", "limit=1001", "limit=x", "cursor=x", "cursor=e30", "cursor=%20"] {
        let answer = control.ask(get(&format!("/v1/sandboxes?{query}"))).await;
        assert_eq!(answer.error(), "invalid_argument", "{query}");
    }
}
