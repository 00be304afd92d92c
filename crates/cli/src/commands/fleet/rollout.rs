//! The nodes of a fleet, a batch after the other, until too many have failed or somebody interrupts.

use std::str::FromStr;
use std::time::Instant;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use serde::Serialize;

use super::super::signals::{Asked, Signals};
use super::change::{Change, NotTaken, Plan};
use crate::failure::Failure;

/// Nodes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Batch {
    /// So many.
    Nodes(usize),
    /// This share of all that are meant, in percent; at least one.
    Percent(usize),
}

impl FromStr for Batch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is no batch; write a number of nodes from 1, or a share such as 10%");
        let (number, is_share) = match text.strip_suffix('%') {
            Some(number) => (number, true),
            None => (text, false),
        };
        match (number.parse().map_err(|_| wrong())?, is_share) {
            (percent @ 1..=100, true) => Ok(Self::Percent(percent)),
            (nodes @ 1.., false) => Ok(Self::Nodes(nodes)),
            _ => Err(wrong()),
        }
    }
}

impl Batch {
    fn size(self, of: usize) -> usize {
        match self {
            Self::Nodes(nodes) => nodes,
            Self::Percent(percent) => (of * percent / 100).max(1),
        }
    }
}

/// What became of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// It has the change now.
    Changed,
    /// It had it already.
    Had,
    /// It would be changed.
    WouldChange,
    /// It did not take it.
    Failed,
    /// It was in the midst of it when we were told to end: it keeps the change only if it was found well, and goes back by itself else.
    Unfinished,
    /// Nothing was done to it.
    NotBegun,
}

/// A node of a report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct NodeReport {
    /// Its name.
    pub(super) node: String,
    /// What became of it.
    pub(super) outcome: Outcome,
    /// What it has, or had when nothing was done to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) on: Option<String>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) why: Option<String>,
    /// Seconds that it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seconds: Option<f64>,
}

/// What became of all.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    /// Somebody interrupted.
    pub(super) interrupted: bool,
    /// By name.
    pub(super) nodes: Vec<NodeReport>,
}

impl Report {
    fn count(&self, outcome: Outcome) -> usize {
        self.nodes.iter().filter(|node| node.outcome == outcome).count()
    }

    /// A sentence about one that is all good.
    pub(super) fn summary(&self, what: &str) -> String {
        let (changed, had, would) =
            (self.count(Outcome::Changed), self.count(Outcome::Had), self.count(Outcome::WouldChange));
        let of = self.nodes.len();
        if would > 0 {
            return format!("{would} of {of} nodes would be given {what}; nothing was done");
        }
        format!("{} of {of} nodes have {what}: {changed} since now, {had} before", changed + had)
    }

    /// What is not good about it, if anything is.
    pub(super) fn failure(&self, what: &str) -> Option<Failure> {
        let (failed, left) = (self.count(Outcome::Failed), self.count(Outcome::NotBegun));
        let unfinished = self.count(Outcome::Unfinished);
        if failed == 0 && !self.interrupted {
            return None;
        }
        let have = self.count(Outcome::Changed) + self.count(Outcome::Had);
        let of = self.nodes.len();
        let first = self.nodes.iter().find(|node| node.outcome == Outcome::Failed).map(|node| {
            format!("node {} did not take it: {}", node.node, node.why.as_deref().unwrap_or_default())
        });
        let first = first.unwrap_or_else(|| "it was interrupted".to_owned());
        let message = format!(
            "{first}; {have} of {of} nodes have {what}, {failed} failed, {unfinished} were in the midst of it, {left} were not begun"
        );
        Some(Failure::new(message).hint(
            "`dsec fleet status` shows how the nodes stand; the same call again goes on with those that do not have it",
        ))
    }
}

/// How to go about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rollout {
    /// Nodes at a time.
    pub(super) batch: Batch,
    /// Nodes that may fail.
    pub(super) max_failures: usize,
    /// Look only.
    pub(super) dry_run: bool,
}

impl Rollout {
    /// Goes about it: looks at all nodes, then changes them. `tell` is given a line as each is done. The first interruption lets the
    /// batch that is under way come to its end; the second one does not.
    ///
    /// # Errors
    /// What `tell` says.
    pub(super) async fn run(
        self,
        change: &impl Change,
        names: Vec<String>,
        signals: &mut Signals,
        mut tell: impl FnMut(&str) -> Result<(), Failure>,
    ) -> Result<Report, Failure> {
        let plans = join_all(names.iter().map(|name| change.look(name))).await;
        let mut nodes: Vec<NodeReport> =
            names.into_iter().zip(plans).map(|(node, plan)| planned(node, plan, self.dry_run)).collect();
        for node in nodes.iter().filter(|node| node.outcome != Outcome::NotBegun) {
            tell(&line(node))?;
        }
        let to_change: Vec<usize> =
            (0..nodes.len()).filter(|at| nodes[*at].outcome == Outcome::NotBegun).collect();
        let mut asked = None;
        for batch in to_change.chunks(self.batch.size(nodes.len())) {
            let failed = nodes.iter().filter(|node| node.outcome == Outcome::Failed).count();
            if failed > self.max_failures || asked.is_some() {
                break;
            }
            asked = run_batch(change, &mut nodes, batch, signals, &mut tell).await?;
        }
        Ok(Report { interrupted: asked.is_some(), nodes })
    }
}

fn planned(node: String, plan: Result<Plan, Failure>, dry_run: bool) -> NodeReport {
    let report = |outcome, on, why| NodeReport { node, outcome, on, why, seconds: None };
    match plan {
        Ok(Plan::Has) => report(Outcome::Had, None, None),
        Ok(Plan::Needs { from, to }) if dry_run => {
            report(Outcome::WouldChange, Some(format!("{from} -> {to}")), None)
        }
        Ok(Plan::Needs { from, .. }) => report(Outcome::NotBegun, Some(from), None),
        Err(failure) => report(Outcome::Failed, None, Some(failure.message)),
    }
}

/// Changes some nodes at once. Returns the signal that came meanwhile.
async fn run_batch(
    change: &impl Change,
    nodes: &mut [NodeReport],
    batch: &[usize],
    signals: &mut Signals,
    tell: &mut impl FnMut(&str) -> Result<(), Failure>,
) -> Result<Option<Asked>, Failure> {
    let one = async |at: usize, name: String| {
        let began = Instant::now();
        (at, change.carry_out(&name).await, began.elapsed().as_secs_f64())
    };
    let mut under_way: FuturesUnordered<_> =
        batch.iter().map(|at| one(*at, nodes[*at].node.clone())).collect();
    for at in batch {
        nodes[*at].outcome = Outcome::Unfinished;
    }
    let mut asked: Option<Asked> = None;
    loop {
        tokio::select! {
            done = under_way.next() => {
                let Some((at, result, seconds)) = done else { return Ok(asked) };
                let node = &mut nodes[at];
                node.seconds = Some((seconds * 10.0).round() / 10.0);
                (node.outcome, node.on, node.why) = match result {
                    Ok(()) => (Outcome::Changed, None, None),
                    Err(NotTaken { why, on }) => (Outcome::Failed, on, Some(why)),
                };
                tell(&line(node))?;
            }
            signal = signals.next() => {
                if asked.replace(signal).is_some() {
                    return Ok(asked);
                }
                tell("interrupted: the nodes that are under way come to their end, no more are begun; once more ends at once")?;
            }
        }
    }
}

/// A node's line, for people.
fn line(node: &NodeReport) -> String {
    let NodeReport { node: name, outcome, on, why, seconds } = node;
    let took = seconds.map(|seconds| format!(" ({seconds} s)")).unwrap_or_default();
    match outcome {
        Outcome::Changed => format!("{name}  changed{took}"),
        Outcome::Had => format!("{name}  has it already"),
        Outcome::WouldChange => format!("{name}  {}", on.as_deref().unwrap_or_default()),
        Outcome::Failed => {
            let why = why.as_deref().unwrap_or_default();
            let on = match (on, seconds) {
                (Some(on), _) => format!("; it is on {on}"),
                (None, Some(_)) => "; it does not say what it is on".to_owned(),
                (None, None) => String::new(),
            };
            format!("{name}  FAILED{took}: {why}{on}")
        }
        Outcome::Unfinished => format!("{name}  in the midst of it"),
        Outcome::NotBegun => format!("{name}  not begun"),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Nodes that take a change, but for some.
    #[derive(Default)]
    struct Fake {
        bad: BTreeSet<&'static str>,
        have: RefCell<BTreeSet<String>>,
        at_once: RefCell<(usize, usize)>,
    }

    impl Change for Fake {
        async fn look(&self, node: &str) -> Result<Plan, Failure> {
            Ok(match self.have.borrow().contains(node) {
                true => Plan::Has,
                false => Plan::Needs { from: "old".to_owned(), to: "new".to_owned() },
            })
        }

        async fn carry_out(&self, node: &str) -> Result<(), NotTaken> {
            let (now, most) = *self.at_once.borrow();
            *self.at_once.borrow_mut() = (now + 1, most.max(now + 1));
            tokio::task::yield_now().await;
            self.at_once.borrow_mut().0 -= 1;
            if self.bad.contains(node) {
                return Err(NotTaken { why: "it crashed".to_owned(), on: Some("old".to_owned()) });
            }
            self.have.borrow_mut().insert(node.to_owned());
            Ok(())
        }
    }

    async fn run(fake: &Fake, count: usize, batch: &str, max_failures: usize) -> Report {
        let names = (0..count).map(|number| format!("n{number}")).collect();
        let rollout = Rollout { batch: batch.parse().unwrap(), max_failures, dry_run: false };
        rollout.run(fake, names, &mut Signals::new().unwrap(), |_| Ok(())).await.unwrap()
    }

    fn counts(report: &Report) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        report.nodes.iter().for_each(|node| *counts.entry(format!("{:?}", node.outcome)).or_default() += 1);
        counts
    }

    fn wanted(pairs: &[(&str, usize)]) -> BTreeMap<String, usize> {
        pairs.iter().map(|(outcome, count)| ((*outcome).to_owned(), *count)).collect()
    }

    #[tokio::test]
    async fn nodes_are_changed_in_batches_and_those_that_have_it_are_passed_over() {
        let fake = Fake::default();
        fake.have.borrow_mut().insert("n3".to_owned());
        let report = run(&fake, 20, "25%", 0).await;
        assert_eq!(counts(&report), wanted(&[("Changed", 19), ("Had", 1)]));
        assert_eq!(fake.at_once.borrow().1, 5);
        assert!(report.failure("it").is_none());
        assert_eq!(counts(&run(&fake, 20, "1", 0).await), wanted(&[("Had", 20)]));
    }

    #[tokio::test]
    async fn a_failure_stops_what_follows_and_is_named() {
        let fake = Fake { bad: ["n2"].into(), ..Fake::default() };
        let report = run(&fake, 9, "2", 0).await;
        assert_eq!(counts(&report), wanted(&[("Changed", 3), ("Failed", 1), ("NotBegun", 5)]));
        let failure = report.failure("it").unwrap();
        assert!(failure.message.contains("node n2 did not take it: it crashed"), "{}", failure.message);
        assert_eq!(report.nodes[2].on.as_deref(), Some("old"));
    }

    #[tokio::test]
    async fn as_many_may_fail_as_is_said() {
        let fake = Fake { bad: ["n0", "n1"].into(), ..Fake::default() };
        assert_eq!(counts(&run(&fake, 4, "1", 1).await), wanted(&[("Failed", 2), ("NotBegun", 2)]));
        assert_eq!(counts(&run(&fake, 4, "1", 2).await), wanted(&[("Failed", 2), ("Changed", 2)]));
    }

    #[tokio::test]
    async fn a_look_changes_nothing() {
        let fake = Fake::default();
        let rollout = Rollout { batch: Batch::Nodes(1), max_failures: 0, dry_run: true };
        let names = vec!["n0".to_owned()];
        let report = rollout.run(&fake, names, &mut Signals::new().unwrap(), |_| Ok(())).await.unwrap();
        assert_eq!(counts(&report), wanted(&[("WouldChange", 1)]));
        assert!(fake.have.borrow().is_empty());
    }

    #[test]
    fn a_batch_is_a_number_or_a_share_and_at_least_one() {
        assert_eq!("10%".parse::<Batch>().unwrap().size(5), 1);
        assert_eq!("50%".parse::<Batch>().unwrap().size(5), 2);
        assert_eq!("3".parse::<Batch>().unwrap().size(100), 3);
        for bad in ["0", "0%", "101%", "", "%", "x", "-1"] {
            assert!(bad.parse::<Batch>().is_err(), "{bad}");
        }
    }
}
