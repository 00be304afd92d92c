//! The life of a sandbox as a total, pure function. The driver in `edge` executes the actions and
//! reports what happened as events; it never decides.
//!
//! ```text
//!      ┌───────────────── StopAsked ─────────────────┐
//!      │        Launched              StopAsked      ▼   GuestGone, AgentLost, LaunchFailed
//!  Creating ─────────────► Running ─────────────► Stopping ─────────────► Stopped
//!      │ LaunchFailed       │ ▲ │                    ▲
//!      │                    │ │ │ PauseAsked         │ StopAsked
//!      │                    │ │ ▼                    │
//!      │         PauseFailed│ └─Pausing ─────────────┤
//!      │                    │   │  │ Paused           │
//!      │                    │   │  ▼                  │
//!      │                    │   │ Paused ─────────────┤
//!      │                    │   │  │ ResumeAsked      │
//!      │             Resumed│   ▼  ▼                  │
//!      │                    └── Resuming ─────────────┘
//!      │ AgentLost, GuestGone │ AgentLost, GuestGone of any of the four
//!      └──────────► Failed ◄──┘
//! ```
//!
//! Idle time, lifetime and time paused that are over come as `StopAsked` with that reason; with `auto_pause` idle time that is over
//! comes as `PauseAsked`.
//!
//! A pause that fails changes nothing: the sandbox goes back to Running. A resume is wanted more than a pause: one that comes while the
//! sandbox is being paused breaks that off, and a pause that comes while it is being resumed is ignored (its caller asks again).

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Being launched; takes no request yet.
    Creating,
    /// Takes requests.
    Running,
    /// Its processes are being stopped and its memory given back. A request breaks that off.
    Pausing,
    /// Its processes stand still, and its memory was given back. A request resumes it.
    Paused,
    /// Its processes are about to go on.
    Resuming,
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

    /// True for running and for those in which a request brings it back to running.
    pub fn is_usable(self) -> bool {
        matches!(self, Self::Running | Self::Pausing | Self::Paused | Self::Resuming)
    }

    /// The wire's word for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
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
    /// `max_lifetime` seconds passed, those paused not counted.
    Lifetime,
    /// It was paused for `ttl_paused_stop` seconds.
    PausedTooLong,
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
    /// A caller or a timer wants it to stand still.
    PauseAsked,
    /// Its processes stand still, and what could be given back of its memory was.
    Paused,
    /// Its processes did not stand still; they go on.
    PauseFailed,
    /// Somebody wants to use it.
    ResumeAsked,
    /// Its processes go on.
    Resumed,
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
    /// Begin to make its processes stand still and to give its memory back; report [`Event::Paused`] or [`Event::PauseFailed`].
    Pause,
    /// Break a pause off that was begun, and wait until nothing of it goes on: it reports nothing any more.
    BreakOff,
    /// Let its processes go on, and begin to bring their memory back; report [`Event::Resumed`] or [`Event::AgentLost`]. On the way
    /// to an end the report is ignored.
    Thaw,
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
/// all else: what a hostile sandbox holds up on the node ends with its processes. It reaches them also where they stand still.
pub fn step(
    state: State,
    reason: Option<EndReason>,
    event: Event,
) -> (State, Option<EndReason>, Vec<Action>) {
    use Action::{BreakOff, CleanUp, Kill, Pause, Record, Terminate, Thaw};
    use State::{Creating, Failed, Paused, Pausing, Resuming, Running, Stopped, Stopping};
    match (state, event) {
        (Creating, Event::Launched) => (Running, None, vec![Record]),
        (Creating, Event::LaunchFailed(message)) => {
            (Failed, Some(EndReason::LaunchFailed { message }), vec![Record, CleanUp])
        }
        (Creating, Event::StopAsked { reason, .. }) => (Stopping, Some(reason), vec![Kill, Record]),
        (Running, Event::PauseAsked) => (Pausing, None, vec![Record, Pause]),
        (Pausing, Event::Paused) => (Paused, None, vec![Record]),
        (Pausing, Event::PauseFailed) => (Running, None, vec![Record]),
        // Written down before its processes go on: an edge that dies in between must not take them for paused.
        (Pausing, Event::ResumeAsked) => (Resuming, None, vec![BreakOff, Record, Thaw]),
        (Paused, Event::ResumeAsked) => (Resuming, None, vec![Record, Thaw]),
        (Resuming, Event::Resumed) => (Running, None, vec![Record]),
        (Pausing, Event::AgentLost(message)) => {
            (Failed, Some(EndReason::AgentLost { message }), vec![Kill, BreakOff, Record, CleanUp])
        }
        (Creating | Running | Paused | Resuming, Event::AgentLost(message)) => {
            (Failed, Some(EndReason::AgentLost { message }), vec![Kill, Record, CleanUp])
        }
        (Pausing, Event::StopAsked { reason, grace_ms: 0 }) => {
            (Stopping, Some(reason), vec![Kill, BreakOff, Record])
        }
        (Running | Paused | Resuming, Event::StopAsked { reason, grace_ms: 0 }) => {
            (Stopping, Some(reason), vec![Kill, Record])
        }
        (Running | Resuming, Event::StopAsked { reason, grace_ms }) => {
            (Stopping, Some(reason), vec![Record, Terminate { grace_ms }])
        }
        // Processes that stand still do not hear SIGTERM.
        (Pausing, Event::StopAsked { reason, grace_ms }) => {
            (Stopping, Some(reason), vec![BreakOff, Record, Thaw, Terminate { grace_ms }])
        }
        (Paused, Event::StopAsked { reason, grace_ms }) => {
            (Stopping, Some(reason), vec![Record, Thaw, Terminate { grace_ms }])
        }
        // A second stop with less patience hurries the first one.
        (Stopping, Event::StopAsked { grace_ms: 0, .. } | Event::GraceOver) => (Stopping, reason, vec![Kill]),
        (Stopping, Event::GuestGone | Event::AgentLost(_) | Event::LaunchFailed(_)) => {
            (Stopped, reason, vec![Record, CleanUp])
        }
        (Creating | Running | Pausing | Paused | Resuming, Event::GuestGone) => {
            let message = "every process of the sandbox is gone".into();
            let clean_up =
                if state == Pausing { vec![BreakOff, Record, CleanUp] } else { vec![Record, CleanUp] };
            (Failed, Some(EndReason::AgentLost { message }), clean_up)
        }
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
            Just(Event::PauseAsked),
            Just(Event::Paused),
            Just(Event::PauseFailed),
            Just(Event::ResumeAsked),
            Just(Event::Resumed),
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

        /// As the driver does it: what was begun and what stands still after each action.
        #[test]
        fn nothing_is_left_standing_still_but_what_is_paused(
            history in proptest::collection::vec(events(), 0..40)
        ) {
            let (mut state, mut reason) = (State::Creating, None);
            let (mut in_progress, mut still) = (false, false);
            for event in history {
                // A pause reports once, and only one that goes on.
                let reports = matches!(event, Event::Paused | Event::PauseFailed);
                if reports && !in_progress {
                    continue;
                }
                if reports {
                    in_progress = false;
                    still = event == Event::Paused;
                }
                let (next, why, actions) = step(state, reason.clone(), event);
                for action in &actions {
                    match action {
                        Action::Pause => {
                            prop_assert!(!in_progress && !still, "paused twice");
                            in_progress = true;
                        }
                        Action::BreakOff => {
                            prop_assert!(in_progress, "nothing to break off");
                            in_progress = false;
                        }
                        Action::Thaw => {
                            prop_assert!(!in_progress, "thawed while it is being frozen");
                            still = false;
                        }
                        Action::Terminate { .. } => prop_assert!(!still, "SIGTERM to what cannot hear it"),
                        Action::Kill => still = false,
                        Action::CleanUp => prop_assert!(!in_progress, "cleaned up while it is being frozen"),
                        Action::Record => {}
                    }
                }
                (state, reason) = (next, why);
                prop_assert_eq!(in_progress, state == State::Pausing);
                if still && !state.is_final() {
                    prop_assert_eq!(state, State::Paused);
                }
            }
        }

        #[test]
        fn a_resume_always_leads_back_to_running_unless_it_ends(
            before in proptest::collection::vec(events(), 0..20)
        ) {
            let (mut state, mut reason) = (State::Running, None);
            for event in before.into_iter().chain([Event::ResumeAsked, Event::Resumed]) {
                (state, reason, _) = step(state, reason, event);
            }
            prop_assert!(state == State::Running || state == State::Stopping || state.is_final(), "{state:?}");
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

    /// What follows on an event, from a state without a reason.
    fn then(state: State, event: Event) -> (State, Vec<Action>) {
        let (next, _, actions) = step(state, None, event);
        (next, actions)
    }

    #[test]
    fn a_pause_goes_there_and_back_and_is_asked_for_once() {
        assert_eq!(
            then(State::Running, Event::PauseAsked),
            (State::Pausing, vec![Action::Record, Action::Pause])
        );
        for state in [State::Creating, State::Pausing, State::Paused, State::Resuming, State::Stopping] {
            assert_eq!(then(state, Event::PauseAsked), (state, vec![]));
        }
        assert_eq!(then(State::Pausing, Event::Paused).0, State::Paused);
        assert_eq!(then(State::Pausing, Event::PauseFailed), (State::Running, vec![Action::Record]));
        assert_eq!(
            then(State::Paused, Event::ResumeAsked),
            (State::Resuming, vec![Action::Record, Action::Thaw])
        );
        assert_eq!(then(State::Resuming, Event::ResumeAsked), (State::Resuming, vec![]));
        assert_eq!(then(State::Resuming, Event::Resumed).0, State::Running);
    }

    #[test]
    fn a_resume_breaks_a_pause_off_and_a_kill_does_not_wait_for_it() {
        let (state, actions) = then(State::Pausing, Event::ResumeAsked);
        assert_eq!((state, actions), (State::Resuming, vec![Action::BreakOff, Action::Record, Action::Thaw]));
        let stop = |grace_ms| Event::StopAsked { reason: EndReason::Asked, grace_ms };
        assert_eq!(then(State::Pausing, stop(0)).1[0], Action::Kill);
        assert_eq!(then(State::Paused, stop(0)).1, [Action::Kill, Action::Record]);
        assert_eq!(
            then(State::Paused, stop(5)).1,
            [Action::Record, Action::Thaw, Action::Terminate { grace_ms: 5 }]
        );
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
