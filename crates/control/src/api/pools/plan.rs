//! What a pool is to have, of what creates asked for. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use dsec_iam::{Accessed, PoolLayer, PoolSet};
use dsec_model::placement::cover::{Demand, cover};
use dsec_proto::rest::PoolLayerChosen;

/// A layer, as the store has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) digest: String,
    /// Ids of its blobs, and their bytes.
    pub(super) blobs: Vec<(String, u64)>,
}

/// Layers by kind and name.
pub(super) type Layers = BTreeMap<String, Layer>;

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Layers that are to be there, in the order in which they were chosen.
    pub(super) chosen: Vec<PoolLayerChosen>,
    /// Layers of before that stay.
    pub(super) kept: Vec<PoolLayer>,
    /// Layers of before that do not, or stand for something else by now.
    pub(super) dropped: Vec<String>,
    /// Bytes of the chosen ones, each once.
    pub(super) bytes: u64,
    /// Creates that counted, those of layers that are gone, and those that could be taken before.
    pub(super) accesses: u64,
    pub(super) gone: u64,
    pub(super) covered_before: u64,
}

/// The layers of one access.
pub(super) fn layers_of(accessed: &Accessed) -> impl Iterator<Item = &str> {
    accessed.layers.split(' ')
}

/// Chooses within a budget of bytes.
pub(super) fn plan(accesses: &[Accessed], layers: &Layers, before: &PoolSet, budget: u64) -> Plan {
    let there: Vec<&Accessed> = accesses
        .iter()
        .filter(|accessed| layers_of(accessed).all(|layer| layers.contains_key(layer)))
        .collect();
    let (mut places, mut sizes) = (HashMap::new(), Vec::new());
    for (blob, bytes) in layers.values().flat_map(|layer| &layer.blobs) {
        places.entry(blob.as_str()).or_insert_with(|| {
            sizes.push(*bytes);
            sizes.len() - 1
        });
    }
    let parts = |accessed: &Accessed| {
        let blobs = layers_of(accessed).filter_map(|layer| layers.get(layer)).flat_map(|layer| &layer.blobs);
        blobs.filter_map(|(blob, _)| places.get(blob.as_str()).copied()).collect()
    };
    let demands: Vec<Demand> =
        there.iter().map(|accessed| Demand { accesses: accessed.count, parts: parts(accessed) }).collect();
    let found = cover(&sizes, &demands, budget);
    let mut chosen: Vec<PoolLayerChosen> = Vec::new();
    let mut place_of = HashMap::new();
    for accessed in found.demands.iter().map(|at| there[*at]) {
        for (name, layer) in layers_of(accessed).filter_map(|name| Some((name, layers.get(name)?))) {
            let at = *place_of.entry(name).or_insert_with(|| {
                let bytes = bytes_of(layers, [name]);
                let (layer, digest) = (name.to_owned(), layer.digest.clone());
                chosen.push(PoolLayerChosen { layer, digest, bytes, accesses: 0 });
                chosen.len() - 1
            });
            chosen[at].accesses += accessed.count;
        }
    }
    let stays = |had: &&PoolLayer| {
        place_of.get(had.layer.as_str()).is_some_and(|at| chosen[*at].digest == had.digest)
    };
    let (kept, left): (Vec<&PoolLayer>, Vec<&PoolLayer>) = before.layers.iter().partition(stays);
    let as_before = |layer: &str| {
        let had =
            before.layers.binary_search_by(|had| had.layer.as_str().cmp(layer)).map(|at| &before.layers[at]);
        had.is_ok_and(|had| layers.get(layer).is_some_and(|layer| layer.digest == had.digest))
    };
    let all: u64 = accesses.iter().map(|accessed| accessed.count).sum();
    Plan {
        bytes: found.bytes,
        accesses: all,
        gone: all - there.iter().map(|accessed| accessed.count).sum::<u64>(),
        covered_before: covered(accesses, as_before),
        kept: kept.into_iter().cloned().collect(),
        dropped: left.into_iter().map(|had| had.layer.clone()).collect(),
        chosen,
    }
}

/// Bytes of these layers' content, each once.
pub(super) fn bytes_of<'a>(layers: &Layers, names: impl IntoIterator<Item = &'a str>) -> u64 {
    let mut seen = HashSet::new();
    let blobs = names.into_iter().filter_map(|name| layers.get(name)).flat_map(|layer| &layer.blobs);
    blobs.filter(|(blob, _)| seen.insert(blob.as_str())).map(|(_, bytes)| bytes).sum()
}

/// Creates all of whose layers are there.
pub(super) fn covered(accesses: &[Accessed], is_there: impl Fn(&str) -> bool) -> u64 {
    let is_covered = |accessed: &&Accessed| layers_of(accessed).all(&is_there);
    accesses.iter().filter(is_covered).map(|accessed| accessed.count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accessed(layers: &str, count: u64) -> Accessed {
        Accessed { layers: layers.to_owned(), count, last_ms: 0 }
    }

    fn layers(all: &[(&str, &[(&str, u64)])]) -> Layers {
        let layer = |(name, blobs): &(&str, &[(&str, u64)])| {
            let blobs = blobs.iter().map(|(blob, bytes)| ((*blob).to_owned(), *bytes)).collect();
            ((*name).to_owned(), Layer { digest: format!("digest of {name}"), blobs })
        };
        all.iter().map(layer).collect()
    }

    fn had(names: &[&str]) -> PoolSet {
        let layer =
            |name: &&str| PoolLayer { layer: (*name).to_owned(), digest: format!("digest of {name}") };
        PoolSet { layers: names.iter().map(layer).collect(), ..PoolSet::default() }
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.chosen.iter().map(|chosen| chosen.layer.as_str()).collect()
    }

    #[test]
    fn content_that_layers_share_counts_once_and_a_sandbox_needs_all_of_its_own() {
        let layers = layers(&[
            ("base/a", &[("x", 100)]),
            ("base/a:2", &[("x", 100), ("y", 10)]),
            ("base/b", &[("z", 100)]),
            ("workspace/w", &[("w", 5)]),
        ]);
        let accesses = [accessed("base/a:2 workspace/w", 4), accessed("base/a", 2), accessed("base/b", 3)];
        let plan = plan(&accesses, &layers, &had(&["base/b"]), 115);
        assert_eq!(names(&plan), ["base/a:2", "workspace/w", "base/a"]);
        assert_eq!((plan.bytes, plan.accesses, plan.gone, plan.covered_before), (115, 9, 0, 3));
        assert_eq!(plan.dropped, ["base/b"]);
        assert_eq!(plan.chosen[0].accesses, 4);
        assert_eq!(bytes_of(&layers, names(&plan)), plan.bytes);
    }

    #[test]
    fn what_is_gone_cannot_be_brought_and_a_name_that_moved_is_brought_again() {
        let layers = layers(&[("base/a", &[("x", 10)]), ("base/b", &[("y", 10)])]);
        let accesses = [accessed("base/a", 3), accessed("base/b", 2), accessed("base/a base/none", 7)];
        let mut before = had(&["base/a", "base/b"]);
        before.layers[0].digest = "an older one".to_owned();
        let plan = plan(&accesses, &layers, &before, 100);
        assert_eq!(names(&plan), ["base/a", "base/b"]);
        assert_eq!((plan.gone, plan.covered_before), (7, 2));
        assert_eq!((plan.kept, plan.dropped), (had(&["base/b"]).layers, vec!["base/a".to_owned()]));
    }
}
