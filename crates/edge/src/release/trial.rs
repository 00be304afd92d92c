//! Beginning a trial, and ending it.

use std::path::Path;
use std::time::Duration;

use dsec_proto::rest::{
    ApiError, ChangeBegun, EndTrialRequest, NodeChange, Programs, ReleaseName, TryConfigRequest,
    TryReleaseRequest,
};
use serde_json::json;

use super::choice::{Choice, Installed};
use super::settings::{self, SettingsError};
use super::{Releases, conflict, no_release, store, trial_length};
use crate::clock::now_ms;
use crate::config::Config;
use crate::error::{chain, internal, invalid, invalid_field};

/// Longest reason, bytes.
const WHY_MAX: usize = 1000;
/// Pause before a trial is ended again that could not be: the disk is full, as a rule.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What ending a trial does to this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// It goes on.
    GoOn,
    /// It is to become another program, or to read its configuration anew.
    Become,
}

impl Releases {
    /// Sees that programs can be tried, and writes down that they are. The process is to become them then.
    ///
    /// # Errors
    /// They cannot be tried; nothing has changed.
    pub async fn try_programs(
        &self,
        request: &TryReleaseRequest,
        sandboxes: u64,
    ) -> Result<ChangeBegun, ApiError> {
        let length = trial_length(request.trial_ms)?;
        let change = NodeChange::Programs(request.programs.clone());
        self.none_on_trial()?;
        if request.programs == self.choice().chosen {
            return Ok(ChangeBegun { changes: false, change });
        }
        self.takes_releases()?;
        match &request.programs {
            Programs::Installed => self.check_installed().await?,
            Programs::Release(name) => self.check_release(name).await?,
        }
        self.begin(change, length, sandboxes, |_| Ok(()))
    }

    async fn check_release(&self, name: &ReleaseName) -> Result<(), ApiError> {
        if !self.has(name) {
            return Err(no_release(name, &self.node));
        }
        self.check_programs(&self.dir.release(name), name.version(), &self.config.file).await
    }

    async fn check_installed(&self) -> Result<(), ApiError> {
        let installed = self.choice().installed.clone();
        match installed {
            Some(installed) => store::check_config(&installed.path, &self.config.file).await,
            None => Ok(()),
        }
    }

    /// Programs that `edge.toml` names would stay when a release comes, which then would not be what it says.
    fn takes_releases(&self) -> Result<(), ApiError> {
        let text = std::fs::read_to_string(&self.config.file).unwrap_or_default();
        let table: toml::Table = toml::from_str(&text).unwrap_or_default();
        match ["aether", "fill"].into_iter().find(|key| table.contains_key(*key)) {
            Some(key) => Err(conflict(format!(
                "edge.toml of node {} names a program of its own ({key}), which would stay beside those of a release",
                self.node
            ))
            .hint(format!("remove `{key}` there, or upgrade this node by hand"))),
            None => Ok(()),
        }
    }

    /// Sees that a configuration can be tried, puts it in place and writes down that it is on trial.
    ///
    /// # Errors
    /// It cannot be tried; nothing has changed.
    pub async fn try_config(
        &self,
        request: &TryConfigRequest,
        sandboxes: u64,
    ) -> Result<ChangeBegun, ApiError> {
        let length = trial_length(request.trial_ms)?;
        self.none_on_trial()?;
        let file = self.config.file.clone();
        let there = std::fs::read_to_string(&file)
            .map_err(|error| internal(&format!("{} cannot be read", file.display()), &error))?;
        let wanted = settings::changed(&there, &request.set, &request.unset).map_err(bad_settings)?;
        Config::parse(&wanted, Path::new("edge.toml")).map_err(|error| invalid(chain(&error)))?;
        let change = NodeChange::Config(settings::digest(&wanted).unwrap_or_default());
        if wanted == there || request.only_look {
            return Ok(ChangeBegun { changes: wanted != there, change });
        }
        let put = |releases: &Self| {
            let failed = |error: std::io::Error| {
                internal(
                    &format!("{} cannot be written: it must lie where the node may", file.display()),
                    &error,
                )
            };
            releases.dir.keep_config(&there).map_err(failed)?;
            super::dir::write_whole(&file, wanted.as_bytes()).map_err(failed)
        };
        self.begin(change, length, sandboxes, put)
    }

    fn none_on_trial(&self) -> Result<(), ApiError> {
        match &self.choice().trial {
            Some(trial) => Err(conflict(format!("node {} tries {} already", self.node, trial.change))
                .detail(json!({ "trial": trial.change }))),
            None => Ok(()),
        }
    }

    /// Writes down that a change is tried. `put` comes before the last moment at which nothing has changed.
    fn begin(
        &self,
        change: NodeChange,
        length: Duration,
        sandboxes: u64,
        put: impl FnOnce(&Self) -> Result<(), ApiError>,
    ) -> Result<ChangeBegun, ApiError> {
        let mut choice = self.choice();
        if let Some(trial) = &choice.trial {
            return Err(conflict(format!("node {} tries {} already", self.node, trial.change)));
        }
        let mut next = choice.clone();
        if next.installed.is_none() {
            // Nobody has chosen before: this is it.
            let own = std::env::current_exe().and_then(|exe| Installed::of(&exe));
            next.installed =
                Some(own.map_err(|error| internal("this program is not where it was started", &error))?);
        }
        let length_ms = u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
        next.begin(change.clone(), now_ms().saturating_add(length_ms), sandboxes);
        self.save(&next)?;
        if let Err(error) = put(self) {
            self.save(&choice)?;
            return Err(error);
        }
        tracing::info!(%change, length_ms, "a change is tried");
        *choice = next;
        Ok(ChangeBegun { changes: true, change })
    }

    /// Ends a trial as its caller says.
    ///
    /// # Errors
    /// It is not the one that is under way; it cannot be written down.
    pub fn end_trial(&self, request: &EndTrialRequest) -> Result<After, ApiError> {
        let mut choice = self.choice();
        let tried = choice.trial.as_ref().map(|trial| trial.change.clone());
        if tried.as_ref() != Some(&request.change) {
            return match (tried, request.keep) {
                // The answer to an earlier call was lost.
                (None, true) if self.is_so(&choice, &request.change) => Ok(After::GoOn),
                (None, false) if !self.is_so(&choice, &request.change) => Ok(After::GoOn),
                (tried, _) => Err(conflict(format!(
                    "node {} does not try {}; {}",
                    self.node,
                    request.change,
                    tried.map_or("it tries nothing".to_owned(), |tried| format!("it tries {tried}"))
                ))),
            };
        }
        if request.keep { self.keep(&mut choice) } else { self.back(&mut choice, &request.why) }
    }

    /// Whether a change is what the node is, without a trial.
    fn is_so(&self, choice: &Choice, change: &NodeChange) -> bool {
        match change {
            NodeChange::Programs(programs) => choice.chosen == *programs,
            NodeChange::Config(_) => self.tries(change),
        }
    }

    fn keep(&self, choice: &mut Choice) -> Result<After, ApiError> {
        let mut next = choice.clone();
        let Some(change) = next.keep(now_ms()) else { return Ok(After::GoOn) };
        if !self.tries(&change) {
            return Err(conflict(format!("node {} has not become {change} yet", self.node)));
        }
        self.save(&next)?;
        *choice = next;
        self.dir.drop_config();
        let kept: Vec<&ReleaseName> = [Some(&choice.chosen), choice.previous.as_ref()]
            .into_iter()
            .flatten()
            .filter_map(|programs| match programs {
                Programs::Release(name) => Some(name),
                Programs::Installed => None,
            })
            .collect();
        if let Err(error) = self.dir.retain(&kept) {
            tracing::warn!(%error, "an old release stays");
        }
        tracing::info!(%change, "a change is kept");
        Ok(After::GoOn)
    }

    fn back(&self, choice: &mut Choice, why: &str) -> Result<After, ApiError> {
        let mut next = choice.clone();
        let why: String = why.chars().take(WHY_MAX).collect();
        let Some(change) = next.back(&why, now_ms()) else { return Ok(After::GoOn) };
        if matches!(change, NodeChange::Config(_)) {
            let put = self.dir.put_config_back(&self.config.file);
            put.map_err(|error| internal("the configuration of before cannot be put back", &error))?;
        }
        self.save(&next)?;
        *choice = next;
        tracing::error!(%change, why, "a change is gone back from");
        Ok(After::Become)
    }

    /// Goes back from a change of which nobody said in time that it is good, if it is on trial still.
    fn give_up(&self, change: &NodeChange) -> Result<After, ApiError> {
        let mut choice = self.choice();
        if choice.trial.as_ref().is_none_or(|trial| trial.change != *change) {
            return Ok(After::GoOn);
        }
        self.back(&mut choice, "nobody said in time that it is good")
    }

    /// Returns when a trial has lasted too long without a word that it is good, and was gone back from.
    pub async fn expired(&self) {
        loop {
            let Some((change, until_ms)) =
                self.choice().trial.as_ref().map(|trial| (trial.change.clone(), trial.until_ms))
            else {
                // One that begins makes this process another.
                return std::future::pending().await;
            };
            let left_ms = until_ms.saturating_sub(now_ms());
            if left_ms > 0 {
                tokio::time::sleep(Duration::from_millis(left_ms)).await;
                continue;
            }
            match self.give_up(&change) {
                Ok(After::Become) => return,
                Ok(After::GoOn) => {}
                Err(error) => {
                    tracing::error!(error = error.0.message, "a trial cannot be ended");
                    tokio::time::sleep(TRY_AGAIN).await;
                }
            }
        }
    }
}

fn bad_settings(error: SettingsError) -> ApiError {
    let message = error.to_string();
    match error {
        SettingsError::OfTheNode(key) | SettingsError::Kind(key) => invalid_field(&key, message),
        SettingsError::There(_) => conflict(message),
        SettingsError::Set(_) | SettingsError::TooMany | SettingsError::Nothing => invalid(message),
    }
}
