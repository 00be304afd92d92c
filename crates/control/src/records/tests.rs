use std::collections::BTreeMap;
use std::time::Instant;

use dsec_model::iam::ProjectPath;
use dsec_model::{Limits, State};
use dsec_proto::rest::{NodeHealth, SandboxChange, SandboxForgotten, SandboxLimits, SandboxShape};

use super::*;
use table::{Odd, Upto};

const WELL: Standing = Standing { health: NodeHealth::Well, heard_ms: Some(7) };
const LOST: Standing = Standing { health: NodeHealth::Lost, heard_ms: Some(7) };

fn change(number: u64, state: State) -> SandboxChange {
    SandboxChange {
        id: format!("sb-n1-{number:012}").parse().unwrap(),
        owner: 0,
        shape: 0,
        labels: Some(BTreeMap::from([("step".to_owned(), (number % 10).to_string())])),
        state,
        reason: None,
        created_ms: 1_790_000_000_000 + number / 3,
        running_ms: Some(1_790_000_000_050 + number / 3),
        ended_ms: None,
    }
}

fn changes(epoch: &str, seq: u64, whole: bool, changed: Vec<SandboxChange>) -> SandboxChanges {
    SandboxChanges {
        epoch: epoch.to_owned(),
        seq,
        more: false,
        whole,
        owners: vec![SandboxOwner {
            project: ProjectPath::root(),
            task_id: "job".parse().ok(),
            backend: "container".to_owned(),
        }],
        shapes: vec![SandboxShape {
            image: "debian".to_owned(),
            image_digest: "d1".to_owned(),
            limits: SandboxLimits::from(&Limits::default()),
            init_user: "root".to_owned(),
        }],
        changed,
        forgotten: Vec::new(),
    }
}

fn forgotten(number: u64) -> SandboxForgotten {
    let SandboxChange { id, created_ms, .. } = change(number, State::Running);
    SandboxForgotten { id, created_ms }
}

/// The records of one node, which told this.
fn told(all: Vec<SandboxChanges>) -> Records {
    let records = Records::default();
    records.add();
    let mut table = Table::new("n1".parse().unwrap());
    for changes in all {
        table.take_in(changes, &records.kept).unwrap();
    }
    *records.of(0).unwrap().told() = Told::Table(table);
    records
}

fn everything() -> Meant {
    Meant { task: None, scope: Scope::everything() }
}

fn states(records: &Records, standing: Standing) -> StateCounts {
    let counts = records.counts(0, standing, &everything()).unwrap();
    counts.into_iter().fold(StateCounts::default(), |mut all, (_, counts)| {
        all += counts;
        all
    })
}

#[test]
fn a_table_is_what_was_told_last() {
    let first = changes("a", 3, true, (0..3).map(|number| change(number, State::Creating)).collect());
    let mut second = changes("a", 5, false, vec![change(1, State::Running)]);
    second.forgotten = vec![forgotten(2), forgotten(77)];
    let records = told(vec![first, second]);
    let StateCounts { creating, running, .. } = states(&records, WELL);
    assert_eq!((creating, running, records.len(0)), (1, 1, 2));
    assert_eq!(states(&records, LOST), StateCounts { lost: 2, ..StateCounts::default() });
}

#[test]
fn what_cannot_be_is_not_taken_in() {
    let kept = Kept::default();
    let mut table = Table::new("n1".parse().unwrap());
    let of_another = changes("a", 1, false, vec![change(1, State::Running)]);
    assert!(matches!(table.take_in(of_another, &kept), Err(Odd::OtherStart)));
    let mut theirs = change(1, State::Running);
    theirs.id = "sb-n2-abc".parse().unwrap();
    assert!(matches!(table.take_in(changes("a", 1, true, vec![theirs]), &kept), Err(Odd::OtherNode(_))));
    let nowhere = SandboxChange { owner: 1, ..change(1, State::Running) };
    assert!(matches!(table.take_in(changes("a", 1, true, vec![nowhere]), &kept), Err(Odd::NoSuchPlace(_))));
    assert_eq!((table.upto(), table.records().count()), (&Upto::default(), 0));
}

#[test]
fn pages_are_in_the_order_of_lists_and_end_before_what_is_better() {
    let all = (0..20).map(|number| change(number, State::Running)).collect();
    let records = told(vec![changes("a", 1, true, all)]);
    let scope = Scope::everything();
    let page = |filter: &SandboxFilter, before: Option<&Position>, max| {
        records.page(0, WELL, filter, &scope, before, max).unwrap()
    };
    let mut filter = SandboxFilter::default();
    let (mut seen, whole) = (Vec::new(), page(&filter, None, 100));
    assert!(whole.is_sorted() && whole.len() == 20);
    loop {
        let next = page(&filter, None, 3);
        let Some(last) = next.last() else { break };
        filter.cursor = Some(last.clone());
        seen.extend(next);
    }
    assert_eq!(seen, whole);
    assert_eq!(page(&SandboxFilter::default(), Some(&whole[4]), 100), whole[..4]);
    let labelled =
        SandboxFilter { labels: vec![("step".to_owned(), "3".to_owned())], ..SandboxFilter::default() };
    assert_eq!(page(&labelled, None, 100).len(), 2);
    assert!(records.page(0, WELL, &labelled, &Scope::NOTHING, None, 9).unwrap().is_empty());
}

#[test]
fn labels_that_were_not_told_are_the_nodes_to_look_at() {
    let untold = SandboxChange { labels: None, ..change(1, State::Running) };
    let records = told(vec![changes("a", 1, true, vec![untold])]);
    let filter = SandboxFilter { labels: vec![("a".to_owned(), "b".to_owned())], ..SandboxFilter::default() };
    let found = |standing| records.page(0, standing, &filter, &Scope::everything(), None, 9).unwrap().len();
    assert_eq!((found(WELL), found(LOST)), (1, 0));
}

#[test]
fn what_nobody_holds_any_more_is_let_go() {
    let records = told(Vec::new());
    let node = records.of(0).unwrap();
    for number in 0..5000 {
        let mut one = changes("a", number, number == 0, vec![change(0, State::Running)]);
        one.owners[0].task_id = format!("t{number}").parse().ok();
        let Told::Table(table) = &mut *node.told() else { unreachable!() };
        table.take_in(one, &records.kept).unwrap();
    }
    assert!(records.kept.owners.len() < 1100, "{}", records.kept.owners.len());
}

/// What it takes to hold, list and count what a large cluster has. Run it to see: `cargo test --release -p dsec-control 380_000 -- --ignored --nocapture`.
#[test]
#[ignore = "measures and asserts nothing that a change could break"]
fn a_node_of_380_000() {
    let records = Records::default();
    records.add();
    let mut table = Table::new("n1".parse().unwrap());
    let before = resident_kib();
    let began = Instant::now();
    for page in 0..76 {
        let of_page = (page * 5000..(page + 1) * 5000).map(|number| change(number, State::Running)).collect();
        table.take_in(changes("a", page + 1, page == 0, of_page), &records.kept).unwrap();
    }
    println!("taken in: {:?}, {} bytes each", began.elapsed(), (resident_kib() - before) * 1024 / 380_000);
    *records.of(0).unwrap().told() = Told::Table(table);
    let began = Instant::now();
    assert_eq!(states(&records, WELL).running, 380_000);
    println!("counted: {:?}", began.elapsed());
    let filter = SandboxFilter { states: vec![State::Failed], ..SandboxFilter::default() };
    let began = Instant::now();
    assert!(records.page(0, WELL, &filter, &Scope::everything(), None, 100).unwrap().is_empty());
    println!("looked through: {:?}", began.elapsed());
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
