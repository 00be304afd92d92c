//! The agent's clock, which can stand still: while a sandbox is paused no time limit of it runs.

use std::time::{Duration, Instant};

/// A clock that goes as the machine's does, but for the time that it stood still.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// How long it has stood still so far.
    behind: Duration,
    /// It stands still since then, by the machine's clock.
    since: Option<Instant>,
}

impl Clock {
    /// The time by this clock. Never before what it said last.
    pub(crate) fn now(&self) -> Instant {
        self.at(Instant::now())
    }

    fn at(&self, machine: Instant) -> Instant {
        let goes_until = self.since.unwrap_or(machine);
        goes_until.checked_sub(self.behind).unwrap_or(goes_until)
    }

    /// How long it is until then; `None` while it stands still, when no time comes.
    pub(crate) fn until(&self, then: Instant) -> Option<Duration> {
        self.since.is_none().then(|| then.saturating_duration_since(self.now()))
    }

    /// It stands still from now on, if it does not already.
    pub(crate) fn stand_still(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// It goes on from where it stands.
    pub(crate) fn go_on(&mut self) {
        self.go_on_at(Instant::now());
    }

    fn go_on_at(&mut self, machine: Instant) {
        if let Some(since) = self.since.take() {
            self.behind += machine.saturating_duration_since(since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_it_stood_still_never_was() {
        let begin = Instant::now();
        let hour = Duration::from_secs(3600);
        let mut clock = Clock::default();
        assert_eq!(clock.at(begin), begin);
        clock.since = Some(begin + hour);
        let deadline = begin + hour * 2;
        assert_eq!(clock.at(begin + hour * 5), begin + hour, "it stands still");
        assert_eq!(clock.until(deadline), None);
        clock.go_on_at(begin + hour * 5);
        assert_eq!(clock.at(begin + hour * 5), begin + hour, "it goes on from where it stood");
        assert_eq!(clock.at(begin + hour * 6), deadline);
        clock.go_on_at(begin + hour * 9);
        assert_eq!(clock.at(begin + hour * 6), deadline, "it went already");
        // Again: what it is behind adds up.
        clock.since = Some(begin + hour * 6);
        clock.go_on_at(begin + hour * 7);
        assert_eq!(clock.at(begin + hour * 7), deadline);
    }
}
