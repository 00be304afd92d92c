//! Sandboxes of nodes that do not answer: as they were last heard of, or lost, and what they are when the node is back.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dsec_model::State;
use dsec_proto::rest::{Counts, NodeHealth, NodeKnown, Sandbox, SandboxList};
use http::StatusCode;
use serde_json::json;

use crate::harness::{Answer, Control, get, patiently, post, until};
use crate::lists::{fill, fill_with, sandbox};

fn listed(answer: &Answer) -> Vec<Sandbox> {
    assert_eq!(answer.status, StatusCode::OK, "{:?}", String::from_utf8_lossy(&answer.body));
    serde_json::from_slice::<SandboxList>(&answer.body).unwrap().sandboxes
}

async fn counts(control: &Control, query: &str) -> Counts {
    let answer = control.ask(get(&format!("/v1/counts{query}"))).await;
    assert_eq!(answer.status, StatusCode::OK);
    serde_json::from_slice(&answer.body).unwrap()
}

fn silent(answer: &Answer) -> &str {
    answer.headers.get("x-dsec-unreachable-nodes").map_or("", |names| names.to_str().unwrap())
}

/// Two nodes with three sandboxes each, of a task: the second's are running, stopping and failed.
async fn two_nodes() -> Control {
    let control = Control::start(2).await;
    fill_with(&control, &[3, 3], |name, sandboxes| {
        for sandbox in sandboxes.iter_mut() {
            sandbox.task_id = Some("job".parse().unwrap());
            sandbox.labels.insert("number".to_owned(), sandbox.id.random().to_owned());
        }
        if name == "n2" {
            sandboxes[1].state = State::Stopping;
            sandboxes[2].state = State::Failed;
        }
    });
    control.told(0, 3).await;
    control.told(1, 3).await;
    control
}

#[tokio::test]
async fn sandboxes_of_a_node_that_does_not_answer_are_listed_as_last_heard_of() {
    let mut control = two_nodes().await;
    control.edges[1].kill().await;
    let answer = control.ask(get("/v1/sandboxes")).await;
    assert_eq!((listed(&answer).len(), silent(&answer)), (6, "n2"));
    let states: Vec<State> =
        listed(&answer).iter().filter(|it| it.node == "n2").map(|sandbox| sandbox.state).collect();
    assert_eq!(states, [State::Failed, State::Stopping, State::Running], "unreachable is not lost");
    // Filters look at what is kept, and pages go over both.
    let of_label = control.ask(get("/v1/sandboxes?label=number%3D1&task_id=job")).await;
    let mut ids: Vec<String> = listed(&of_label).iter().map(|sandbox| sandbox.id.to_string()).collect();
    ids.sort();
    assert_eq!(ids, ["sb-n1-1", "sb-n2-1"]);
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = control.ask(get(&format!("/v1/sandboxes?limit=2{cursor}"))).await;
        all.extend(listed(&page).into_iter().map(|sandbox| sandbox.id));
        let Some(next) = page.json()["next_cursor"].as_str().map(str::to_owned) else { break };
        cursor = format!("&cursor={next}");
    }
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 6);
    // A call to one of them says that its node cannot be reached.
    assert_eq!(control.ask(get("/v1/sandboxes/sb-n2-1")).await.error(), "unavailable");
    assert_eq!(counts(&control, "").await.sandboxes.lost, 0);
}

#[tokio::test]
async fn sandboxes_of_a_lost_node_are_lost_until_it_is_back() {
    let mut control = two_nodes().await;
    control.edges[1].kill().await;
    control.lose(1).await;

    let answer = control.ask(get("/v1/sandboxes?state=lost")).await;
    assert_eq!(silent(&answer), "n2");
    let lost = listed(&answer);
    assert_eq!(lost.len(), 2, "one had ended: {lost:?}");
    let was = lost.iter().map(|sandbox| sandbox.lost.unwrap().last_state).collect::<Vec<_>>();
    assert_eq!(was, [State::Stopping, State::Running]);
    assert!(
        lost.iter()
            .all(|it| it.state == State::Lost && it.lost.unwrap().heard_ms > 0 && it.image == "debian")
    );
    assert_eq!(listed(&control.ask(get("/v1/sandboxes?state=running")).await).len(), 3);
    assert_eq!(listed(&control.ask(get("/v1/sandboxes")).await).len(), 6);

    let one = control.ask(get("/v1/sandboxes/sb-n2-2")).await;
    assert_eq!((one.status, &one.json()["state"]), (StatusCode::OK, &json!("lost")));
    assert_eq!(one.json()["lost"]["last_state"], "running");
    let ended = control.ask(get("/v1/sandboxes/sb-n2-0")).await;
    assert_eq!((&ended.json()["state"], ended.json()["lost"].is_null()), (&json!("failed"), true));
    for request in [
        get("/v1/sandboxes/sb-n2-77"),
        get("/v1/sandboxes/sb-n2-2?wait_state=stopped"),
        get("/v1/sandboxes/sb-n2-2/execs"),
        post("/v1/sandboxes/sb-n2-2/stop", "{}"),
    ] {
        let answer = control.ask(request).await;
        assert_eq!(answer.error(), "unavailable");
        let error = answer.json();
        assert!(error["message"].as_str().unwrap().starts_with("node n2 is lost"), "{error}");
        assert_eq!((&error["detail"]["node"], &error["detail"]["lost"]), (&json!("n2"), &json!(true)));
    }

    let counted = counts(&control, "").await;
    let all = counted.sandboxes;
    assert_eq!((all.running, all.lost, all.failed, all.stopping), (3, 2, 1, 0));
    assert_eq!((counted.tasks["job"], counted.backends["container"]), (all, all));
    assert_eq!(counted.nodes["n2"].health, NodeHealth::Lost);
    assert!(!counted.gathering && counted.uncounted.is_empty());

    control.edges[1].restart();
    until("the node is back", async || {
        let answer = control.ask(get("/v1/sandboxes")).await;
        let states: Vec<State> = listed(&answer).iter().map(|sandbox| sandbox.state).collect();
        if states.contains(&State::Lost) || !silent(&answer).is_empty() { Err(states) } else { Ok(()) }
    })
    .await;
    let back = counts(&control, "?node=n2").await;
    assert_eq!((back.sandboxes.running, back.sandboxes.stopping, back.sandboxes.lost), (1, 1, 0));
    assert_eq!(back.nodes.len(), 1);
}

#[tokio::test]
async fn a_task_counts_what_is_lost_and_a_wait_does_not_wait_for_it() {
    let mut control = two_nodes().await;
    control.edges[1].kill().await;
    let task = control.ask(get("/v1/tasks/job")).await;
    assert_eq!(
        task.json()["sandboxes"],
        json!({"creating":0,"running":4,"stopping":1,"stopped":0,"failed":1})
    );
    assert_eq!(silent(&task), "n2");
    // Unreachable, they are waited for.
    let late = control.ask(post("/v1/tasks/job/wait", r#"{"timeout_ms":30}"#)).await;
    assert_eq!((late.error().as_str(), &late.json()["detail"]["left"]), ("deadline_exceeded", &json!(2)));

    let mut caller = control.connect().await;
    let wait = post("/v1/tasks/job/wait", r#"{"timeout_ms":60000}"#);
    let waiting = tokio::spawn(async move { caller.ask(wait).await });
    control.lose(1).await;
    let waited = patiently(waiting).await.unwrap();
    assert_eq!((waited.status, waited.json()), (StatusCode::OK, json!({ "lost": 2 })));
    assert_eq!(silent(&waited), "n2");
    assert_eq!(control.ask(get("/v1/tasks")).await.json()["tasks"][0]["sandboxes"]["lost"], json!(2));
}

#[tokio::test]
async fn a_call_that_waits_for_a_node_ends_when_the_node_is_lost() {
    let control = two_nodes().await;
    control.edges[1].notes.hung.store(true, Ordering::SeqCst);
    let mut caller = control.connect().await;
    let call = tokio::spawn(async move { caller.ask(post("/v1/sandboxes/sb-n2-2/stop", "{}")).await });
    // It is on its way, or will be refused as it comes: both are an answer.
    tokio::task::yield_now().await;
    control.lose(1).await;
    let answer = patiently(call).await.unwrap();
    assert_eq!(answer.error(), "unavailable");
    assert_eq!(answer.json()["detail"]["lost"], true);
}

#[tokio::test]
async fn a_node_that_hangs_does_not_hold_up_what_is_known() {
    let control = two_nodes().await;
    control.edges[1].notes.hung.store(true, Ordering::SeqCst);
    control.lose(1).await;
    let began = Instant::now();
    assert_eq!(listed(&control.ask(get("/v1/sandboxes")).await).len(), 6);
    assert_eq!(control.ask(get("/v1/tasks")).await.status, StatusCode::OK);
    assert_eq!(counts(&control, "").await.sandboxes.lost, 2);
    // A node that is asked is waited for three seconds and more.
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_server_that_starts_says_what_it_has_not_gathered_yet() {
    let control =
        Control::start_as(2, |_| {}, |_| None, |edges| edges[1].notes.hung.store(true, Ordering::SeqCst))
            .await;
    control.told(0, 0).await;
    let counted = counts(&control, "").await;
    assert!(counted.gathering, "{counted:?}");
    assert_eq!(counted.uncounted, ["n2"]);
    assert_eq!(
        (counted.nodes["n2"].known, counted.nodes["n2"].health),
        (NodeKnown::Gathering, NodeHealth::Suspect)
    );
    assert_eq!(control.ask(get("/v1/sandboxes")).await.error(), "unavailable", "a list has no unknown hole");
    control.lose(1).await;
    let counted = counts(&control, "").await;
    assert!(!counted.gathering, "nobody gathers what is lost");
    assert_eq!(counted.uncounted, ["n2"]);
    let list = control.ask(get("/v1/sandboxes")).await;
    assert_eq!((listed(&list).len(), silent(&list)), (0, "n2"));
}

#[tokio::test]
async fn a_big_node_is_read_in_several_answers_and_anew_when_its_edge_was() {
    let mut control = Control::start(2).await;
    control.edges[0].notes.changes_max.store(7, Ordering::SeqCst);
    fill(&control, &[40, 0]);
    control.told(0, 40).await;
    control.edges[0].kill().await;
    control.edges[0].notes.sandboxes.lock().unwrap().truncate(25);
    control.edges[0].restart();
    control.told(0, 25).await;
}

#[tokio::test]
async fn counts_are_of_what_the_caller_sees() {
    let control = Control::start(2).await;
    fill_with(&control, &[4, 4], |name, sandboxes| {
        sandboxes[0].project = "root/theirs".parse().unwrap();
        sandboxes[1].task_id = Some("other".parse().unwrap());
        sandboxes.push(sandbox(name, 50, 1));
    });
    control.told(0, 5).await;
    control.told(1, 5).await;
    assert_eq!(counts(&control, "").await.sandboxes.running, 10);
    assert_eq!(counts(&control, "?project=root/theirs").await.sandboxes.running, 2);
    assert_eq!(counts(&control, "?task_id=other&node=n1").await.sandboxes.running, 1);
    assert_eq!(counts(&control, "").await.projects["root/theirs"].running, 2);
    let mut narrow = get("/v1/counts");
    narrow.headers_mut().insert("x-dsec-project", "root/theirs".parse().unwrap());
    let seen: Counts = serde_json::from_slice(&control.ask(narrow).await.body).unwrap();
    assert_eq!((seen.sandboxes.running, seen.projects.len()), (2, 1));
    assert_eq!(control.ask(get("/v1/counts?what=1")).await.error(), "invalid_argument");
}
