use std::collections::BTreeMap;

use dsec_model::Limits;
use dsec_proto::rest::{Sandbox, SandboxLimits, SandboxList};
use http::StatusCode;

use crate::harness::{Control, get};

fn sandbox(node: &str, number: usize, created_ms: u64) -> Sandbox {
    Sandbox {
        id: format!("sb-{node}-{number}").parse().unwrap(),
        state: dsec_model::State::Running,
        reason: None,
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
        usage: None,
        launch_phases: Vec::new(),
        first_exec: None,
    }
}

/// Gives each node so many sandboxes, with times that often meet.
fn fill(control: &Control, counts: &[usize]) {
    for (edge, count) in control.edges.iter().zip(counts) {
        let name = &edge.notes.name;
        *edge.notes.sandboxes.lock().unwrap() =
            (0..*count).rev().map(|number| sandbox(name, number, 1000 + number as u64 / 3)).collect();
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
async fn a_list_with_a_hole_is_a_failure_and_the_nodes_list_names_the_hole() {
    let mut control = Control::start(2).await;
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
