//! What must hold, whatever went wrong.

use std::collections::BTreeMap;
use std::sync::Arc;

use dsec_model::placement::{Health, Node as View};

use super::{Call, Cluster, Link, Outcome};
use crate::node::Node;

/// What does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// One create made two sandboxes, and no node of them was lost in between.
    #[error("the create {key} has a sandbox on each of {nodes:?}")]
    Doubled {
        /// Its key.
        key: String,
        /// Where.
        nodes: Vec<String>,
    },
    /// A caller was told of a sandbox whose time is not over, its node lives, and the sandbox is not there.
    #[error("the sandbox of the create {key} is not on {node}, which lives")]
    Lost {
        /// Its key.
        key: String,
        /// Where it should be.
        node: String,
    },
    /// A node has a sandbox that nobody asked for.
    #[error("{node} has a sandbox of {key}, which nobody asked for")]
    Unknown {
        /// Its key.
        key: String,
        /// Where.
        node: String,
    },
    /// A node's sums are not those of its sandboxes.
    #[error("{0}")]
    Books(String),
    /// What a replica believes of a node is not what the node is.
    #[error("a replica believes of {node}: {believes}; it is so: {is}")]
    View {
        /// Of which.
        node: String,
        /// What it believes.
        believes: String,
        /// What is so.
        is: String,
    },
    /// A caller gave up although there was room.
    #[error("{0} callers gave up")]
    GaveUp(usize),
}

/// By which factor the fullest node is over the mean, counting sandboxes.
pub fn spread<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> f64 {
    let counts: Vec<usize> = nodes.into_iter().map(|node| node.sandboxes().len()).collect();
    let all: usize = counts.iter().sum();
    let most = counts.iter().max().copied().unwrap_or_default();
    if all == 0 { 1.0 } else { most as f64 * counts.len() as f64 / all as f64 }
}

impl Cluster {
    /// Everything that does not hold at this moment. For what replicas believe, wait until nothing is under way: see
    /// [`Cluster::settle`].
    pub fn audit(&mut self) -> Vec<Finding> {
        let now_ms = self.now_ms;
        self.nodes.iter_mut().for_each(|node| node.advance(now_ms));
        let mut findings: Vec<Finding> =
            self.nodes.iter().filter_map(Node::audit).map(Finding::Books).collect();
        findings.extend(self.doubled_and_unknown());
        findings.extend(self.calls.iter().filter_map(|call| self.lost(call)));
        let gave_up = self.calls.iter().filter(|call| call.outcome == Some(Outcome::GaveUp)).count();
        if gave_up > 0 {
            findings.push(Finding::GaveUp(gave_up));
        }
        findings
    }

    /// Lets everything under way end, with nothing new, until every replica has heard of every node again; then what
    /// replicas believe is looked at too.
    pub fn settle(&mut self) -> Vec<Finding> {
        self.run_until_answered();
        // A node that was lost is found again with the next question.
        self.run_until(self.now_ms.max(self.troubled_until_ms) + SETTLE_MS);
        let mut findings = self.audit();
        let views: Vec<View> = self.replicas.iter().flat_map(|replica| replica.watched.nodes()).collect();
        findings.extend(views.iter().enumerate().filter_map(|(at, view)| self.misjudged(at, view)));
        findings
    }

    fn doubled_and_unknown(&self) -> Vec<Finding> {
        let asked: BTreeMap<&str, &Call> = self.calls.iter().map(|call| (&*call.key, call)).collect();
        let mut holders: BTreeMap<Arc<str>, Vec<String>> = BTreeMap::new();
        for (node, link) in self.nodes.iter().zip(&self.links) {
            if *link == Link::Dead {
                continue;
            }
            for key in node.sandboxes().values().filter_map(|sandbox| sandbox.create.key.as_ref()) {
                holders.entry(Arc::clone(key)).or_default().push(node.name().to_string());
            }
        }
        let mut findings = Vec::new();
        for (key, nodes) in holders {
            if !asked.contains_key(&*key) {
                let node = nodes.first().cloned().unwrap_or_default();
                findings.push(Finding::Unknown { key: key.to_string(), node });
            } else if nodes.len() > 1 && !self.forsaken.contains(&key) {
                findings.push(Finding::Doubled { key: key.to_string(), nodes });
            }
        }
        findings
    }

    fn lost(&self, call: &Call) -> Option<Finding> {
        let Some(Outcome::Made { node, serial }) = call.outcome else { return None };
        let is_there = self.nodes[node].sandboxes().contains_key(&serial);
        // It was not made before it was asked for, so it does not end before this.
        let may_be_over = call.began_ms + call.load.lifetime_ms <= self.now_ms;
        (self.links[node] != Link::Dead && !is_there && !may_be_over)
            .then(|| Finding::Lost { key: call.key.to_string(), node: self.nodes[node].name().to_string() })
    }

    fn misjudged(&self, at: usize, view: &View) -> Option<Finding> {
        let at = at % self.nodes.len();
        let (node, link) = (&self.nodes[at], self.links[at]);
        let finding = |believes: String, is: String| {
            Some(Finding::View { node: node.name().to_string(), believes, is })
        };
        match (link, view.health()) {
            (Link::Up, Health::Well) | (Link::Dead, Health::Lost) => {}
            (link, health) => return finding(format!("{health:?}"), format!("{link:?}")),
        }
        if link == Link::Dead {
            return None;
        }
        // Since the report some may have ended; none came.
        let (believed, is) = (view.report().sandboxes, node.sandboxes().len() as u64);
        if believed < is || believed > is + node.ended_since(self.now_ms.saturating_sub(REPORT_AGE_MAX_MS)) {
            return finding(format!("{believed} sandboxes"), format!("{is} sandboxes"));
        }
        let mut as_reported = View::new(node.name().clone());
        as_reported.reported(view.report().clone(), self.now_ms);
        if view.load() != as_reported.load() {
            return finding(format!("a load of {:?}", view.load()), format!("{:?}", as_reported.load()));
        }
        None
    }
}

/// Longer than it takes until a question that is under way is given up and another is answered, ms.
const SETTLE_MS: u64 = 10_000;
/// How old a report is at most when all is well, ms: the time between two questions, and the way there and back.
const REPORT_AGE_MAX_MS: u64 = 1_200;
