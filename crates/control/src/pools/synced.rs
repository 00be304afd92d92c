//! What was brought to the pool that takes over, as creates are compared with it.

use std::collections::{BTreeSet, HashMap};

use dsec_iam::PoolSet;
use dsec_proto::rest::{ImageList, LAYER_BASE};
use http::HeaderMap;

use crate::app::App;
use crate::behalf::Behalf;

/// A layer of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Layer {
    digest: String,
    /// Its name stands for it still, as far as is known.
    is_current: bool,
}

/// The layers of the pool, by kind and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Synced {
    version: i64,
    layers: HashMap<String, Layer>,
}

impl Synced {
    pub(super) fn new(set: PoolSet) -> Self {
        let layers = set
            .layers
            .into_iter()
            .map(|layer| (layer.layer, Layer { digest: layer.digest, is_current: true }))
            .collect();
        Self { version: set.version, layers }
    }

    pub(super) fn version(&self) -> i64 {
        self.version
    }

    /// Whether all of these, with a space between them, are there. Nothing is not: what a sandbox is made of was not understood.
    pub(super) fn has_all(&self, layers: &str) -> bool {
        let mut layers = layers.split(' ').filter(|layer| !layer.is_empty()).peekable();
        layers.peek().is_some()
            && layers.all(|layer| self.layers.get(layer).is_some_and(|layer| layer.is_current))
    }

    /// The same after a look at what names stand for now. None: it is as it was, or nobody said.
    pub(super) async fn looked_at(&self, app: &App) -> Option<Self> {
        let kinds: BTreeSet<&str> =
            self.layers.keys().filter_map(|layer| Some(layer.split_once('/')?.0)).collect();
        if kinds.is_empty() {
            return None;
        }
        let nodes = app.nodes.of_one_store(&app.nodes.all()).await.ok()?;
        let mut headers = HeaderMap::new();
        Behalf::server().write(&mut headers);
        let mut names = HashMap::new();
        for kind in kinds {
            let path =
                if kind == LAYER_BASE { "/v1/images".to_owned() } else { format!("/v1/layers/{kind}") };
            let list: ImageList = nodes.first()?.ask(&path, &headers).await.ok()?;
            names.extend(
                list.images.into_iter().map(|image| (format!("{kind}/{}", image.name), image.digest)),
            );
        }
        let looked_at = self.as_of(&names);
        (looked_at != *self).then_some(looked_at)
    }

    /// The same where these are the layers that names, as lists have them, stand for.
    fn as_of(&self, names: &HashMap<String, String>) -> Self {
        let mut now = self.clone();
        for (name, layer) in &mut now.layers {
            // A version never stands for anything else.
            layer.is_current = name.contains('@') || names.get(usual(name)) == Some(&layer.digest);
        }
        now
    }
}

/// A name as lists have it: without the tag that it has when it has none.
fn usual(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use dsec_iam::PoolLayer;

    use super::*;

    #[test]
    fn a_sandbox_is_there_when_all_its_layers_are() {
        let layer = |layer: &str| PoolLayer { layer: layer.to_owned(), digest: "d".to_owned() };
        let set =
            PoolSet { version: 1, layers: ["base/a", "toolkit/t"].map(layer).into(), ..PoolSet::default() };
        let synced = Synced::new(set);
        assert!(synced.has_all("base/a") && synced.has_all("base/a toolkit/t"));
        for absent in ["", " ", "base/b", "base/a base/b", "workspace/a", "base/a workspace/t"] {
            assert!(!synced.has_all(absent), "{absent:?}");
        }
    }

    #[test]
    fn a_name_that_stands_for_another_layer_is_not_there_until_it_is_back() {
        let names = ["base/a", "base/b:latest", "base/c@12ab", "toolkit/t"];
        let layer = |layer: &&str| PoolLayer { layer: (*layer).to_owned(), digest: "d".to_owned() };
        let set = PoolSet { version: 1, layers: names.iter().map(layer).collect(), ..PoolSet::default() };
        let synced = Synced::new(set);
        let listed = |all: &[(&str, &str)]| {
            all.iter().map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned())).collect()
        };
        let all = listed(&[("base/a", "d"), ("base/b", "d"), ("toolkit/t", "d")]);
        assert_eq!(synced.as_of(&all), synced);
        let moved = synced.as_of(&listed(&[("base/a", "e"), ("base/b", "d")]));
        let there = names.map(|name| moved.has_all(name));
        assert_eq!(there, [false, true, true, false], "moved, its usual tag, a version, removed");
        assert_eq!(moved.as_of(&all), synced);
    }
}
