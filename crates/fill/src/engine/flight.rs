//! A group on its way: one fetch, however many wait for it.

use std::sync::Arc;

use dsec_image::layer::GroupRef;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::{Blob, FillError};
use crate::cache::hold;

/// A group's bytes as they arrived, and the share of the engine's memory they take.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) plain: Vec<u8>,
    /// Given back when the last one who waited has copied its part.
    pub(super) _share: Arc<OwnedSemaphorePermit>,
}

/// How it ended.
pub(super) type Outcome = Result<Arc<Arrived>, FillError>;

/// What those who wait hold. Closed without a value: the engine stopped.
pub(super) type Waiting = watch::Receiver<Option<Outcome>>;

/// The one who fetches a group. Dropped, it lets the next reader try again.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) blob: Arc<Blob>,
    pub(super) group: u64,
    tell: watch::Sender<Option<Outcome>>,
    /// No longer the blob's flight of this group.
    left: bool,
}

impl Flight {
    pub(super) fn new(blob: Arc<Blob>, group: u64) -> (Self, Waiting) {
        let (tell, waiting) = watch::channel(None);
        (Self { blob, group, tell, left: false }, waiting)
    }

    pub(super) fn place(&self) -> GroupRef {
        self.blob.cached.index().groups()[self.group as usize]
    }

    /// Tells all who wait. What is in the cache must be there before, so that whoever finds no flight finds the group.
    /// Nobody joins a flight that has ended: they would get its error without a try of their own.
    pub(super) fn end(mut self, outcome: Outcome) {
        self.leave();
        self.tell.send_replace(Some(outcome));
    }

    fn leave(&mut self) {
        if !std::mem::replace(&mut self.left, true) {
            hold(&self.blob.flights).remove(&self.group);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Cuts flights into runs that one fetch can bring: neighbours in one pack, at most `groups_max` of them.
pub(super) fn runs(flights: Vec<Flight>, groups_max: usize) -> Vec<Vec<Flight>> {
    let mut runs: Vec<Vec<Flight>> = Vec::new();
    for flight in flights {
        let here = flight.place();
        match runs.last_mut() {
            Some(run)
                if run.len() < groups_max && run.last().is_some_and(|last| follows(&last.place(), &here)) =>
            {
                run.push(flight);
            }
            _ => runs.push(vec![flight]),
        }
    }
    runs
}

fn follows(last: &GroupRef, next: &GroupRef) -> bool {
    last.pack == next.pack && last.offset + last.stored == next.offset
}
