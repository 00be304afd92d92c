//! A simulated cluster: what must hold holds whatever goes wrong, and does not where the mechanism that it is owed to is off. A
//! course of events comes of a seed, which each failure names.

use dsec_model::admission::Policy;
use dsec_sim::cluster::{Cluster, Fault, Finding, Mechanisms, Plan, spread};
use dsec_sim::node::Shape;
use dsec_sim::workload::Workload;

const ALL: Mechanisms = Mechanisms { overlay: true, fence: true, records: true };

fn plan(seed: u64, nodes: usize, mechanisms: Mechanisms) -> Plan {
    Plan { seed, nodes, replicas: 3, shape: Shape::default(), mechanisms }
}

#[test]
fn a_burst_spreads_evenly_and_would_not_without_the_overlay() {
    for (seed, a_second) in [(1, 5_000), (2, 32_000), (3, 32_000)] {
        let over = |overlay| {
            let mut cluster = Cluster::new(plan(seed, 160, Mechanisms { overlay, ..ALL }));
            cluster.burst(32_000, a_second, &mut Workload::containers());
            cluster.run_until_answered();
            spread(cluster.nodes())
        };
        let (with, without) = (over(true), over(false));
        eprintln!(
            "seed {seed}, {a_second} a second: {with:.3} of the mean, {without:.3} without the overlay"
        );
        assert!(with <= 1.10, "seed {seed}, {a_second} a second: {with}");
        assert!(
            without > with,
            "seed {seed}, {a_second} a second: {without} without the overlay, {with} with it"
        );
        if a_second == 32_000 {
            assert!(
                without - 1.0 > 3.0 * (with - 1.0),
                "seed {seed}: {without} without the overlay, {with} with it"
            );
        }
    }
}

/// A job during which nodes of 20 are cut off for long enough that callers stop waiting, and edges start again.
fn troubled(seed: u64, mechanisms: Mechanisms) -> Vec<Finding> {
    let mut cluster = Cluster::new(plan(seed, 20, mechanisms));
    let begun_ms = cluster.now_ms();
    for node in 0..4 {
        let at_ms = begun_ms + 1000 * (node as u64 + 1);
        cluster.fault_at(at_ms, Fault::CutOff { node, for_ms: 12_000 + 3000 * node as u64 });
        cluster.fault_at(at_ms, Fault::Restarts { node: node + 4, for_ms: 1500 });
    }
    cluster.burst(4000, 500, &mut Workload::containers());
    cluster.settle()
}

#[test]
fn a_create_that_is_sent_again_makes_one_sandbox_and_two_where_nobody_asks_for_the_first() {
    for seed in 1..4 {
        assert_eq!(troubled(seed, ALL), [], "seed {seed}");
        let without = troubled(seed, Mechanisms { fence: false, ..ALL });
        let doubled = without.iter().filter(|finding| matches!(finding, Finding::Doubled { .. })).count();
        assert!(doubled > 0, "seed {seed}: {without:?}");
    }
}

#[test]
fn an_edge_that_starts_again_has_its_sandboxes_and_none_without_records() {
    let without = troubled(1, Mechanisms { records: false, ..ALL });
    let lost = without.iter().filter(|finding| matches!(finding, Finding::Lost { .. })).count();
    assert!(lost > 0, "{without:?}");
}

#[test]
fn whatever_goes_wrong_nothing_is_doubled_or_lost_and_all_counts_agree() {
    for seed in 1..=30 {
        let mut cluster = Cluster::new(plan(seed, 20, ALL));
        let begun_ms = cluster.now_ms();
        for _ in 0..12 {
            let at_ms = begun_ms + cluster.chance().u64(..20_000);
            let fault = Fault::draw(20, cluster.chance());
            cluster.fault_at(at_ms, fault);
        }
        cluster.burst(1500, 75, &mut Workload::containers());
        assert_eq!(cluster.settle(), [], "seed {seed}: {:?}", cluster.counts());
    }
}

#[test]
fn the_last_room_of_a_full_cluster_is_found_and_no_node_takes_more_than_it_may() {
    let policy = Policy { sandboxes_max: 50, ..Policy::default() };
    let shape = Shape { policy, ..Shape::default() };
    let mut cluster = Cluster::new(Plan { shape, ..plan(5, 20, ALL) });
    cluster.burst(990, 2000, &mut Workload::containers());
    assert_eq!(cluster.settle(), []);
    assert_eq!(cluster.counts().get("made"), Some(&990));
    assert!(cluster.counts().get("refused").is_some(), "no node was ever full: {:?}", cluster.counts());
}

#[test]
fn one_seed_is_one_course_of_events() {
    let digest = |seed| {
        let mut cluster = Cluster::new(plan(seed, 10, ALL));
        cluster.fill(20, &Workload::containers());
        let fault = Fault::draw(10, cluster.chance());
        cluster.fault_at(500, fault);
        cluster.burst(300, 300, &mut Workload::microvms());
        cluster.run_until(5000);
        cluster.digest()
    };
    assert_eq!(digest(9), digest(9));
    assert_ne!(digest(9), digest(10));
}
