use std::collections::{BTreeMap, BTreeSet, HashSet};

use proptest::prelude::*;

use super::*;

const BACKEND: &str = "container";

fn report() -> Report {
    Report {
        backends: BTreeSet::from([BACKEND.to_owned()]),
        architecture: "x86_64".to_owned(),
        memory_mib: 100_000,
        memory_available_mib: 100_000,
        cpu_millis: 64_000,
        sandboxes_max: 3200,
        ..Report::default()
    }
}

fn node(number: usize, report: Report) -> Node {
    let mut node = Node::new(format!("n{number}").parse().unwrap());
    node.reported(report, 0);
    node
}

/// Nodes with so much memory in use, MiB.
fn nodes(used: &[u64]) -> Vec<Node> {
    let with = |(number, used): (usize, &u64)| {
        node(number, Report { memory_available_mib: 100_000 - used, ..report() })
    };
    used.iter().enumerate().map(with).collect()
}

fn wanted() -> Wanted<'static> {
    Wanted { backend: BACKEND, ..Wanted::default() }
}

fn first(nodes: &[Node], wanted: &Wanted<'_>, draw: impl FnMut(usize) -> usize) -> Option<usize> {
    choose(nodes, wanted, &mut Tries::default(), draw)
}

#[test]
fn the_least_loaded_of_the_drawn_is_taken() {
    assert_eq!(first(&nodes(&[9000, 3000, 5000]), &wanted(), |_| 0), Some(1));
}

#[test]
fn only_the_drawn_are_compared() {
    let mut used = [10_000; 8];
    used[7] = 0;
    // Drawing always the first that is left gives nodes 0, 1 and 2; drawing the last looks at node 7.
    assert_eq!(first(&nodes(&used), &wanted(), |_| 0), Some(0));
    assert_eq!(first(&nodes(&used), &wanted(), |left| left - 1), Some(7));
}

#[test]
fn what_cannot_take_it_is_passed_over_and_counted() {
    let labels = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    let features = ["kvm".to_owned()];
    let wanted = Wanted {
        features: &features,
        architecture: Some("x86_64"),
        labels: Some(&labels),
        gpus: 2,
        ..wanted()
    };
    let good = Report {
        features: BTreeSet::from(["kvm".to_owned()]),
        labels: BTreeMap::from([("zone".to_owned(), "a".to_owned()), ("rack".to_owned(), "7".to_owned())]),
        gpus_free: 2,
        ..report()
    };
    let all = [
        Report { cordoned: true, ..good.clone() },
        Report { draining: true, ..good.clone() },
        Report { backends: BTreeSet::new(), ..good.clone() },
        Report { features: BTreeSet::new(), ..good.clone() },
        Report { architecture: "aarch64".to_owned(), ..good.clone() },
        Report { labels: BTreeMap::from([("zone".to_owned(), "b".to_owned())]), ..good.clone() },
        Report { gpus_free: 1, ..good.clone() },
        good.clone(),
        good,
    ];
    let mut nodes: Vec<Node> =
        all.into_iter().enumerate().map(|(number, report)| node(number, report)).collect();
    nodes[8].missed(Health::Lost, 0);
    for seed in 0..9 {
        assert_eq!(first(&nodes, &wanted, |left| seed % left), Some(7));
    }
    let mut refusals = Refusals::default();
    refusals.add("full");
    refusals.add("full");
    let mut tries = Tries::default();
    assert_eq!(choose(&nodes, &wanted, &mut tries, |_| 0), Some(7));
    nodes[7].reported(Report { cordoned: true, ..report() }, 0);
    assert!(!refusals.add_unfit(&nodes, &wanted, &tries), "some will be well again");
    assert_eq!(
        refusals.to_string(),
        "2 full, 1 cordoned, 1 draining, 1 lost, 1 of another architecture, 1 without a free GPU, \
         1 without a kernel feature, 1 without the backend, 1 without the labels"
    );
}

#[test]
fn what_no_node_will_ever_take_is_told_from_what_none_takes_now() {
    let nodes = nodes(&[0, 0]);
    let wanted = Wanted { backend: "microvm", ..wanted() };
    assert!(Refusals::default().add_unfit(&nodes, &wanted, &Tries::default()));
    let labels = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    let wanted = Wanted { labels: Some(&labels), ..self::wanted() };
    assert!(Refusals::default().add_unfit(&nodes, &wanted, &Tries::default()));
}

#[test]
fn layers_are_told_apart_by_their_names() {
    let names = ["", "debian", "debian:2", "click", "snapshot/click"];
    let numbers: HashSet<u64> = names.iter().map(|name| layer_number(name)).collect();
    assert_eq!(numbers.len(), names.len());
    // The same in every replica and release: a published test vector of FNV-1a.
    assert_eq!(layer_number("foobar"), 0x8594_4171_f739_67e8);
}

#[test]
fn suspect_nodes_come_last_and_not_never() {
    let mut nodes = nodes(&[0, 90_000]);
    nodes[0].missed(Health::Suspect, 0);
    let mut tries = Tries::default();
    assert_eq!(choose(&nodes, &wanted(), &mut tries, |_| 0), Some(1));
    assert_eq!(choose(&nodes, &wanted(), &mut tries, |_| 0), Some(0));
    assert_eq!(choose(&nodes, &wanted(), &mut tries, |_| 0), None);
}

#[test]
fn one_thing_that_is_used_up_outweighs_all_that_is_free() {
    let full_memory = Load::of(0.97, 0.0, 0.0);
    let busy_processors = Load::of(0.0, 0.97, 0.0);
    let even = Load::of(0.7, 0.7, 0.7);
    assert!(full_memory > even && busy_processors > even);
    assert!(full_memory > busy_processors, "memory weighs most");
    assert!(Load::of(2.0, 0.0, 0.0).0.is_finite());
}

#[test]
fn of_equal_nodes_the_one_with_the_content_is_taken() {
    let layers = [1, 2];
    let wanted = Wanted { layers: &layers, ..wanted() };
    let mut all = nodes(&[1000; 20]);
    let with = |layers: &[u64], used: u64| Report {
        layers: HashSet::from_iter(layers.iter().copied()),
        memory_available_mib: 100_000 - used,
        ..report()
    };
    all[15].reported(with(&[2], 1000), 0);
    assert_eq!(first(&all, &wanted, |_| 0), Some(15), "the drawn ones are 0, 1 and 2");
    all[16].reported(with(&[1, 2], 1000), 0);
    assert_eq!(first(&all, &wanted, |_| 0), Some(16), "more of it");
    all[16].reported(with(&[1, 2], 30_000), 0);
    assert_eq!(first(&all, &wanted, |_| 0), Some(0), "at hand on a node that is fuller");
}

#[test]
fn what_was_sent_counts_until_a_report_shows_it() {
    let mut node = node(0, report());
    let empty = node.load();
    node.placed(1000, Expected::START);
    node.placed(2000, Expected::START);
    let two = node.load();
    assert!(two > empty);
    node.refused(2000);
    let one = node.load();
    assert!(empty < one && one < two);
    node.reported(report(), 1050);
    assert_eq!(node.load(), one, "the report was asked for while it was on its way");
    node.reported(report(), 1200);
    assert_eq!(node.load(), empty);
    node.placed(3000, Expected::START);
    node.missed(Health::Suspect, 40_000);
    assert_eq!(node.load(), empty, "it is long ago");
}

#[test]
fn a_key_keeps_its_first_node_when_another_is_added() {
    let (two, three) = (["n1", "n2"], ["n1", "n2", "n3"]);
    let mut moved = 0;
    for number in 0..300 {
        let key = format!("project/key-{number}");
        let before = keyed_order(two, key.as_bytes());
        let after = keyed_order(three, key.as_bytes());
        match after[0] {
            2 => moved += 1,
            first => assert_eq!(first, before[0]),
        }
    }
    assert!((60..140).contains(&moved), "{moved} of 300 moved to the third node");
}

/// Numbers that look random, the same every time.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// By which part the fullest of 160 nodes is over the mean after three replicas placed 32,000 sandboxes. Each hears of every
/// node once a second.
fn excess(a_second: u64, overlay: bool, layers: &[u64]) -> f64 {
    const COUNT: u64 = 32_000;
    const NODES: usize = 160;
    const REPLICAS: usize = 3;
    const PERIOD_MS: u64 = 1000;
    let real = Report { memory_mib: 1_500_000, cpu_millis: 190_000, ..report() };
    let mut sandboxes = vec![0_u64; NODES];
    let mut views: Vec<Vec<Node>> =
        (0..REPLICAS).map(|_| (0..NODES).map(|number| node(number, real.clone())).collect()).collect();
    let mut seed = 7;
    let mut asked = [0; REPLICAS];
    for placed in 0..COUNT {
        let now_ms = 1000 + placed * 1000 / a_second;
        for (replica, view) in views.iter_mut().enumerate() {
            // At times of their own.
            let due = (now_ms + replica as u64 * PERIOD_MS / REPLICAS as u64) / PERIOD_MS;
            if asked[replica] < due {
                asked[replica] = due;
                for (node, sandboxes) in view.iter_mut().zip(&sandboxes) {
                    let used = sandboxes * Expected::START.memory_mib;
                    let now = Report {
                        memory_available_mib: real.memory_mib - used,
                        sandboxes: *sandboxes,
                        // One has the content at first, and who ran a sandbox of it.
                        layers: layers
                            .iter()
                            .copied()
                            .filter(|_| *sandboxes > 0 || node.name().as_str() == "n9")
                            .collect(),
                        ..real.clone()
                    };
                    node.reported(now, now_ms);
                }
            }
        }
        let view = &mut views[(splitmix(&mut seed) % REPLICAS as u64) as usize];
        let wanted = Wanted { layers, ..wanted() };
        let chosen = choose(view, &wanted, &mut Tries::default(), |below| {
            (splitmix(&mut seed) % below as u64) as usize
        });
        let chosen = chosen.unwrap();
        if overlay {
            view[chosen].placed(now_ms, Expected::START);
        }
        sandboxes[chosen] += 1;
    }
    let most = sandboxes.iter().max().copied().unwrap_or_default();
    most as f64 * NODES as f64 / COUNT as f64 - 1.0
}

#[test]
fn a_burst_spreads_evenly_and_would_not_without_the_overlay() {
    for a_second in [5000, 32_000] {
        let (with, without) = (excess(a_second, true, &[]), excess(a_second, false, &[]));
        let on_one_image = excess(a_second, true, &[5]);
        eprintln!(
            "{a_second} a second: {with:.3} over the mean, {without:.3} without the overlay, {on_one_image:.3} of one image"
        );
        assert!(with <= 0.10, "{with} over the mean at {a_second} a second");
        assert!(on_one_image <= 0.10, "{on_one_image} over the mean with one image");
        assert!(without >= 3.0 * with, "{without} without the overlay, {with} with it");
    }
}

proptest! {
    #[test]
    fn nobody_is_asked_twice_or_in_vain(
        used in proptest::collection::vec((0_u64..100_000, any::<bool>(), any::<bool>()), 0..40),
        mut seed: u64,
    ) {
        let mut all = nodes(&used.iter().map(|(used, ..)| *used).collect::<Vec<_>>());
        for (node, (_, cordoned, lost)) in all.iter_mut().zip(&used) {
            node.reported(Report { cordoned: *cordoned, ..node.report().clone() }, 0);
            if *lost {
                node.missed(Health::Lost, 0);
            }
        }
        let fit: BTreeSet<usize> =
            (0..all.len()).filter(|&at| all[at].unfit(&wanted()).is_none()).collect();
        let mut tries = Tries::default();
        let mut asked = BTreeSet::new();
        while let Some(at) = choose(&all, &wanted(), &mut tries, |below| (splitmix(&mut seed) % below as u64) as usize) {
            prop_assert!(fit.contains(&at));
            prop_assert!(asked.insert(at), "{} twice", at);
        }
        prop_assert_eq!(asked.len(), fit.len().min(TRIES_MAX));
    }

    #[test]
    fn the_overlay_adds_up(steps in proptest::collection::vec((0_u8..4, 0_u64..400), 1..200)) {
        let mut node = node(0, report());
        let (mut now_ms, mut sent) = (0, Vec::new());
        for (what, after_ms) in steps {
            now_ms += after_ms;
            match what {
                0 | 1 => {
                    node.placed(now_ms, Expected::START);
                    sent.push(now_ms);
                }
                2 => {
                    if let Some(at) = sent.pop() {
                        node.refused(at);
                    }
                }
                _ => {
                    node.reported(report(), now_ms);
                    sent.retain(|at| at + 100 >= now_ms);
                }
            }
        }
        let mut again = self::node(0, report());
        sent.iter().for_each(|at| again.placed(*at, Expected::START));
        prop_assert_eq!(node.load(), again.load());
    }
}
