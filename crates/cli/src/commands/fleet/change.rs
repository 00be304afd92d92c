//! One node: given a change, looked at, and left on it or on what it had.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use dsec_model::ErrorKind;
use dsec_proto::rest::{
    EndTrialRequest, FeatureState, NodeChange, NodeRelease, NodeStatus, Programs, TryConfigRequest,
    TryReleaseRequest,
};

use super::release::Release;
use crate::client::{Client, ClientError};
use crate::failure::Failure;

/// Between two looks at a node that tries something.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Looks in a row at which a node must be well.
const WELL_LOOKS: u32 = 3;
/// How much longer a node waits by itself than we look at it.
const TRIAL_MARGIN: Duration = Duration::from_secs(30);
/// How long a node may take to be back on what it had.
const BACK_WITHIN: Duration = Duration::from_secs(60);

/// What is wanted of all nodes.
#[derive(Debug)]
pub(super) enum Wanted {
    /// That they run a release.
    Release(Release),
    /// That they run what they ran before.
    Previous,
    /// That keys of their configuration are these.
    Config(TryConfigRequest),
}

/// How a node stands before anything is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    /// It is as is wanted.
    Has,
    /// This is to be done, from what it has.
    Needs {
        /// What it has, for people.
        from: String,
        /// What it is to have.
        to: String,
    },
}

/// A node that did not take a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NotTaken {
    /// Why.
    pub(super) why: String,
    /// What it is on now; none: it does not say.
    pub(super) on: Option<String>,
}

/// Something that can be done to each node of a fleet.
pub(super) trait Change {
    /// How a node stands. Changes nothing.
    ///
    /// # Errors
    /// It cannot be changed so, or does not answer.
    async fn look(&self, node: &str) -> Result<Plan, Failure>;

    /// Does it to a node. Dropped on the way, the node goes back by itself, unless it was well already.
    ///
    /// # Errors
    /// The node is on what it had, or does not answer.
    async fn carry_out(&self, node: &str) -> Result<(), NotTaken>;
}

/// The real nodes.
pub(super) struct OnNodes {
    client: Client,
    wanted: Wanted,
    health_timeout: Duration,
}

impl OnNodes {
    /// By this client.
    pub(super) fn new(client: Client, wanted: Wanted, health_timeout: Duration) -> Self {
        Self { client, wanted, health_timeout }
    }

    fn trial_ms(&self) -> Option<u64> {
        u64::try_from((self.health_timeout + TRIAL_MARGIN).as_millis()).ok()
    }

    /// What a node is to run. None: another change than of its programs.
    fn programs(&self, there: &NodeRelease) -> Result<Option<Programs>, Failure> {
        match &self.wanted {
            Wanted::Release(release) => Ok(Some(Programs::Release(release.name.clone()))),
            Wanted::Previous => match &there.previous {
                Some(previous) => Ok(Some(previous.clone())),
                None => Err(Failure::new(format!("node {} has run nothing before", there.node))),
            },
            Wanted::Config(_) => Ok(None),
        }
    }

    fn config(&self, only_look: bool) -> Option<TryConfigRequest> {
        match &self.wanted {
            Wanted::Config(request) => {
                Some(TryConfigRequest { trial_ms: self.trial_ms(), only_look, ..request.clone() })
            }
            Wanted::Release(_) | Wanted::Previous => None,
        }
    }

    /// Begins the trial. None: there is nothing to change.
    async fn begin(&self, node: &str, there: &NodeRelease) -> Result<Option<NodeChange>, Failure> {
        if let Some(request) = self.config(false) {
            let begun = self.client.try_config(node, &request).await?;
            return Ok(begun.changes.then_some(begun.change));
        }
        let Some(programs) = self.programs(there)? else { return Ok(None) };
        if let Wanted::Release(Release { name, archive, length }) = &self.wanted
            && !there.stored.contains(name)
        {
            self.client.put_release(node, name, archive.path(), *length).await?;
        }
        let request = TryReleaseRequest { programs, trial_ms: self.trial_ms() };
        let begun = self.client.try_release(node, &request).await?;
        Ok(begun.changes.then_some(begun.change))
    }

    /// Waits until a node that tries a change is well.
    ///
    /// # Errors
    /// It is not, with why.
    async fn well(&self, node: &str, change: &NodeChange, before: &Before) -> Result<(), String> {
        let (began, mut well, mut last) = (Instant::now(), 0, "it has not answered since".to_owned());
        loop {
            match self.look_at(node, change, before).await {
                Look::Well => well += 1,
                Look::NotYet(why) => (well, last) = (0, why),
                Look::Bad(why) => return Err(why),
            }
            if well >= WELL_LOOKS {
                return Ok(());
            }
            if began.elapsed() >= self.health_timeout {
                return Err(format!(
                    "it was not well within {} s: {last}",
                    self.health_timeout.as_secs_f64()
                ));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn look_at(&self, node: &str, change: &NodeChange, before: &Before) -> Look {
        let there = match self.client.node_release(node).await {
            Ok(there) => there,
            Err(error) => return Look::NotYet(error.to_string()),
        };
        match judge(&there, change, &before.instance) {
            Look::Well => {}
            other => return other,
        }
        match self.client.node(node).await {
            Ok(status) => before.compare(&status),
            Err(error) => Look::NotYet(error.to_string()),
        }
    }

    async fn keep(&self, node: &str, change: &NodeChange) -> Result<(), String> {
        let request = EndTrialRequest { change: change.clone(), keep: true, why: String::new() };
        let began = Instant::now();
        loop {
            match self.client.end_trial(node, &request).await {
                Ok(_) => return Ok(()),
                Err(error) if error.passes() && began.elapsed() < TRIAL_MARGIN / 2 => {
                    tokio::time::sleep(LOOK_EVERY).await;
                }
                Err(error) => return Err(format!("it was well and could not be told so: {error}")),
            }
        }
    }

    /// Has a node go back, and waits until it has. What it is on then, if it says.
    async fn back(&self, node: &str, change: &NodeChange, why: &str) -> Option<String> {
        let request = EndTrialRequest { change: change.clone(), keep: false, why: why.to_owned() };
        let began = Instant::now();
        loop {
            let stands = match self.client.node_release(node).await {
                Ok(there) if there.trial.is_none() => Some(there),
                // It hears us, and is told; otherwise it goes back by itself.
                Ok(_) => {
                    let _it_goes_back_by_itself = self.client.end_trial(node, &request).await;
                    None
                }
                Err(_) => None,
            };
            if let Some(there) = stands
                && there.running == there.chosen
            {
                return Some(self.shown(&there));
            }
            if began.elapsed() >= BACK_WITHIN + self.health_timeout + TRIAL_MARGIN {
                return None;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// What a node has of what is changed, for people.
    fn shown(&self, there: &NodeRelease) -> String {
        match &self.wanted {
            Wanted::Config(_) => format!("configuration {}", there.config),
            Wanted::Release(_) | Wanted::Previous => shown(&there.running, &there.version),
        }
    }
}

/// Programs for people.
pub(super) fn shown(programs: &Programs, version: &str) -> String {
    match programs {
        Programs::Installed => format!("{version} (installed)"),
        Programs::Release(name) => name.to_string(),
    }
}

impl Change for OnNodes {
    async fn look(&self, node: &str) -> Result<Plan, Failure> {
        let there = self.client.node_release(node).await.map_err(|error| too_old(node, error))?;
        let from = self.shown(&there);
        if let Some(request) = self.config(true) {
            let begun = self.client.try_config(node, &request).await?;
            return Ok(if begun.changes {
                Plan::Needs { from, to: begun.change.to_string() }
            } else {
                Plan::Has
            });
        }
        let Some(programs) = self.programs(&there)? else { return Ok(Plan::Has) };
        Ok(if there.chosen == programs && there.trial.is_none() {
            Plan::Has
        } else {
            Plan::Needs { from, to: programs.to_string() }
        })
    }

    async fn carry_out(&self, node: &str) -> Result<(), NotTaken> {
        let not_begun = |failure: &Failure, on: Option<String>| NotTaken { why: failure.message.clone(), on };
        let there = self.client.node_release(node).await;
        let there = there.map_err(|error| not_begun(&error.into(), None))?;
        let on = Some(self.shown(&there));
        let status = self.client.node(node).await.map_err(|error| not_begun(&error.into(), on.clone()))?;
        let before = Before::of(&there, &status);
        let begun = self.begin(node, &there).await.map_err(|failure| not_begun(&failure, on))?;
        let Some(change) = begun else { return Ok(()) };
        let taken = match self.well(node, &change, &before).await {
            Ok(()) => self.keep(node, &change).await,
            Err(why) => Err(why),
        };
        match taken {
            Ok(()) => Ok(()),
            Err(why) => {
                let on = self.back(node, &change, &why).await;
                Err(NotTaken { why, on })
            }
        }
    }
}

/// A node whose edge knows no releases says that there is no such path.
fn too_old(node: &str, error: ClientError) -> Failure {
    if error.kind() == Some(ErrorKind::NotFound) {
        let message = format!("node {node} runs a version that cannot be changed from afar: {error}");
        return Failure::new(message).hint("install this version on it by hand once, and restart its edge");
    }
    error.into()
}

/// A node before it is changed.
#[derive(Debug)]
struct Before {
    instance: String,
    works: BTreeSet<String>,
}

/// How a node on trial looks.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Well,
    /// It may become so.
    NotYet(String),
    /// It does not.
    Bad(String),
}

impl Before {
    fn of(there: &NodeRelease, status: &NodeStatus) -> Self {
        Self { instance: there.instance.clone(), works: working(status) }
    }

    /// What worked before works now.
    fn compare(&self, status: &NodeStatus) -> Look {
        let now = working(status);
        let lacking: Vec<&str> = self.works.difference(&now).map(String::as_str).collect();
        if lacking.is_empty() {
            return Look::Well;
        }
        Look::NotYet(format!("what worked before does not work: {}", lacking.join(", ")))
    }
}

fn working(status: &NodeStatus) -> BTreeSet<String> {
    let works = status.features.iter().filter(|feature| feature.state == FeatureState::Works);
    works.map(|feature| feature.name.clone()).collect()
}

/// What a node that was given a change says of itself.
fn judge(there: &NodeRelease, change: &NodeChange, instance_before: &str) -> Look {
    let Some(trial) = &there.trial else {
        return Look::Bad(match &there.failed {
            Some(failed) if failed.change == *change => format!("it went back by itself: {}", failed.why),
            _ => "it tries nothing any more".to_owned(),
        });
    };
    let is_so = match change {
        NodeChange::Programs(programs) => there.running == *programs,
        NodeChange::Config(digest) => there.config == *digest,
    };
    if trial.change != *change {
        return Look::Bad(format!("it tries {} meanwhile", trial.change));
    }
    if !is_so || there.instance == instance_before {
        return Look::NotYet("it has not become so yet".to_owned());
    }
    if !trial.lost.is_empty() {
        let (count, first) = (trial.lost.len(), &trial.lost[0]);
        return Look::Bad(format!("{count} of its {} sandboxes were lost, such as {first}", trial.sandboxes));
    }
    match trial.taken_over {
        Some(_) => Look::Well,
        None => Look::NotYet("it has not taken its sandboxes over yet".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use dsec_proto::rest::{FailedChange, NodeTrial};

    use super::*;

    fn change() -> NodeChange {
        NodeChange::Programs("0.2.0-0123456789abcdef".parse().unwrap())
    }

    fn on_trial() -> NodeRelease {
        let trial =
            NodeTrial { change: change(), until_ms: 9, sandboxes: 3, taken_over: Some(3), lost: Vec::new() };
        NodeRelease {
            node: "n1".to_owned(),
            version: "0.2.0".to_owned(),
            running: "0.2.0-0123456789abcdef".parse().unwrap(),
            instance: "new".to_owned(),
            chosen: Programs::Installed,
            since_ms: None,
            previous: None,
            stored: Vec::new(),
            config: "c".to_owned(),
            trial: Some(trial),
            failed: None,
        }
    }

    #[test]
    fn a_node_is_well_when_it_has_become_so_with_all_its_sandboxes() {
        assert_eq!(judge(&on_trial(), &change(), "old"), Look::Well);
        assert!(matches!(judge(&on_trial(), &change(), "new"), Look::NotYet(_)));
        let not_yet = NodeRelease { running: Programs::Installed, ..on_trial() };
        assert!(matches!(judge(&not_yet, &change(), "old"), Look::NotYet(_)));
    }

    #[test]
    fn a_lost_sandbox_and_a_node_that_went_back_are_bad() {
        let mut lost = on_trial();
        lost.trial.as_mut().unwrap().lost.push("sb-n1-x".to_owned());
        assert!(matches!(judge(&lost, &change(), "old"), Look::Bad(why) if why.contains("sb-n1-x")));
        let failed = FailedChange { change: change(), why: "it ended".to_owned(), at_ms: 1 };
        let back = NodeRelease { trial: None, failed: Some(failed), ..on_trial() };
        assert!(matches!(judge(&back, &change(), "old"), Look::Bad(why) if why.contains("it ended")));
    }
}
