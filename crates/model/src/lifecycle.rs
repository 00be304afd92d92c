//! The life of a sandbox as a total, pure function. The driver in `edge` executes the actions and
//! reports what happened as events; it never decides.
//!
//! ```text
//!      ┌───────────────── StopAsked ─────────────────┐
//!      │        Launched              StopAsked      ▼   GuestGone, AgentLost, LaunchFailed
//!  Creating ─────────────► Running ─────────────► Stopping ─────────────► Stopped
//!      │ LaunchFailed         │
//!      │ AgentLost, GuestGone │ AgentLost, GuestGone
//!      └──────────► Failed ◄──┘
//! ```
//!
//! Idle time and lifetime that are over come as `StopAsked` with that reason.
//!
//! A paused state will stand between Running and itself (Running ► Pausing ► Paused ► Resuming ►
//! Running) and accept the same stop events; nothing else changes by it.

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Being launched; takes no request yet.
    Creating,
    /// Takes requests.
    Running,
    /// Being ended; takes no new request.
    Stopping,
    /// Ended as asked. Nothing of it is left on the node but its record.
    Stopped,
    /// Ended otherwise; the record says why. Nothing of it is left on the node but its record.
    Failed,
    /// It had not ended when its node was last heard of, which is long ago. Control says so; no edge ever does, and nothing leads
    /// here: a node that comes back says what the sandbox is.
    Lost,
}

impl State {
    /// True for the two states that nothing leaves.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Stopped | Self::Failed)
    }

    /// The wire's word for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }
}

/// Why a sandbox left Running, or never got there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum EndReason {
    /// Somebody asked.
    Asked,
    /// `ttl_running_stop` seconds passed without a request or an attached session.
    Idle,
    /// `max_lifetime` seconds passed.
    Lifetime,
    /// Its sockets held more of the host's memory than its memory limit.
    SocketMemory {
        /// How much, and what the limit is.
        message: String,
    },
    /// The node's platform is going down.
    NodeDown,
    /// The node was drained, and the time that its sandboxes had was over.
    Drained,
    /// A phase of the launch failed.
    LaunchFailed {
        /// What failed, with its cause.
        message: String,
    },
    /// The in-sandbox agent died or its channel closed.
    AgentLost {
        /// What was seen.
        message: String,
    },
    /// The machine was restarted under it.
    Rebooted,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The agent answered.
    Launched,
    /// The launch failed and every phase of it was undone.
    LaunchFailed(String),
    /// A caller, a timer or the node wants it to end.
    StopAsked {
        /// Why.
        reason: EndReason,
        /// Milliseconds that its processes get between SIGTERM and SIGKILL.
        grace_ms: u64,
    },
    /// The grace period is over.
    GraceOver,
    /// No process of it is left.
    GuestGone,
    /// The agent's channel closed without being asked.
    AgentLost(String),
}

/// What the driver does next, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Write the record: its state or reason has changed.
    Record,
    /// Send SIGTERM to the sandbox's processes and report [`Event::GraceOver`] after this many ms.
    Terminate {
        /// Milliseconds until SIGKILL.
        grace_ms: u64,
    },
    /// SIGKILL every process; report [`Event::GuestGone`] when none is left.
    Kill,
    /// Remove mounts, cgroups, directories and files, and give the room back.
    CleanUp,
}

/// The next state, why it ended if it is ending, and what to do. Events that make no sense in a
/// state are ignored (no action, same state): they are races, such as a stop that meets a crash. A kill comes before
/// all else: what a hostile sandbox holds up on the node ends with its processes.
pub fn step(
    state: State,
    reason: Option<EndReason>,
    event: Event,
) -> (State, Option<EndReason>, Vec<Action>) {
    use Action::{CleanUp, Kill, Record, Terminate};
    match (state, event) {
        (State::Creating, Event::Launched) => (State::Running, None, vec![Record]),
        (State::Creating, Event::LaunchFailed(message)) => {
            (State::Failed, Some(EndReason::LaunchFailed { message }), vec![Record, CleanUp])
        }
        (State::Creating, Event::StopAsked { reason, .. }) => {
            (State::Stopping, Some(reason), vec![Kill, Record])
        }
        (State::Creating | State::Running, Event::AgentLost(message)) => {
            (State::Failed, Some(EndReason::AgentLost { message }), vec![Kill, Record, CleanUp])
        }
        (State::Running, Event::StopAsked { reason, grace_ms: 0 }) => {
            (State::Stopping, Some(reason), vec![Kill, Record])
        }
        (State::Running, Event::StopAsked { reason, grace_ms }) => {
            (State::Stopping, Some(reason), vec![Record, Terminate { grace_ms }])
        }
        // A second stop with less patience hurries the first one.
        (State::Stopping, Event::StopAsked { grace_ms: 0, .. } | Event::GraceOver) => {
            (State::Stopping, reason, vec![Kill])
        }
        (State::Stopping, Event::GuestGone | Event::AgentLost(_) | Event::LaunchFailed(_)) => {
            (State::Stopped, reason, vec![Record, CleanUp])
        }
        (State::Creating | State::Running, Event::GuestGone) => (
            State::Failed,
            Some(EndReason::AgentLost { message: "every process of the sandbox is gone".into() }),
            vec![Record, CleanUp],
        ),
        (state, _) => (state, reason, Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Launched),
            Just(Event::LaunchFailed("x".into())),
            (0..2u64).prop_map(|g| Event::StopAsked { reason: EndReason::Asked, grace_ms: g * 1000 }),
            Just(Event::GraceOver),
            Just(Event::GuestGone),
            Just(Event::AgentLost("y".into())),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_it_is_cleaned_up_exactly_once_and_then_never_moves(
            history in proptest::collection::vec(events(), 0..40)
        ) {
            let (mut state, mut reason, mut cleanups) = (State::Creating, None, 0);
            for event in history {
                let was_final = state.is_final();
                let (next, why, actions) = step(state, reason.clone(), event);
                if was_final {
                    prop_assert_eq!(next, state);
                    prop_assert!(actions.is_empty());
                }
                cleanups += actions.iter().filter(|a| **a == Action::CleanUp).count();
                (state, reason) = (next, why);
                prop_assert_eq!(cleanups, usize::from(state.is_final()));
            }
            if state.is_final() {
                prop_assert!(reason.is_some(), "a final state without a reason");
            }
        }

        #[test]
        fn a_stop_always_leads_to_the_end(before in proptest::collection::vec(events(), 0..10)) {
            let (mut state, mut reason) = (State::Creating, None);
            let stop = Event::StopAsked { reason: EndReason::Asked, grace_ms: 10 };
            for event in before.into_iter().chain([stop, Event::GraceOver, Event::GuestGone]) {
                (state, reason, _) = step(state, reason, event);
            }
            prop_assert!(state.is_final());
        }
    }

    #[test]
    fn a_stop_during_the_launch_is_a_stop_and_not_a_failure() {
        let (state, reason, _) =
            step(State::Creating, None, Event::StopAsked { reason: EndReason::Asked, grace_ms: 5 });
        let (state, reason, actions) = step(state, reason, Event::LaunchFailed("killed".into()));
        assert_eq!((state, reason), (State::Stopped, Some(EndReason::Asked)));
        assert_eq!(actions, [Action::Record, Action::CleanUp]);
    }
}
