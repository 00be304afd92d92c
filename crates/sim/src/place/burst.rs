//! How evenly a job is spread over equal nodes, with what each replica sent counted, and without.

use super::Options;
use crate::cluster::{Cluster, Mechanisms, Plan, spread};
use crate::node::Shape;
use crate::workload::Workload;

/// By which factor the fullest node is over the mean after all of a job was asked for within a second, so that no report shows
/// any of it in time: with the overlay, and without it in the same course of events.
pub(super) fn measure(options: &Options, seed: u64) -> (f64, f64) {
    (excess(options, seed, true), excess(options, seed, false))
}

fn excess(options: &Options, seed: u64, overlay: bool) -> f64 {
    let mechanisms = Mechanisms { overlay, ..Mechanisms::default() };
    let (nodes, replicas) = (Options::count(options.nodes), Options::count(options.replicas));
    let mut cluster = Cluster::new(Plan { seed, nodes, replicas, shape: Shape::default(), mechanisms });
    cluster.burst(options.burst, options.burst, &mut Workload::containers());
    cluster.run_until_answered();
    spread(cluster.nodes())
}
