//! One sync of a pool: reads what was asked for, chooses, brings it to the nodes, and says so in the database as it comes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use dsec_iam::{Accessed, PoolChange, PoolLayer};
use dsec_model::{ErrorKind, PoolName};
use dsec_proto::rest::{
    HeldLayer, Image, PoolLayerChosen, PoolLayerFailed, PoolSyncEvent, PoolSyncRequest, PoolSynced,
    PrefetchEvent,
};
use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use serde_json::json;
use tokio::sync::mpsc::Sender;

use super::plan::{self, Layer, Layers, Plan};
use crate::api::identities::Acting;
use crate::api::lists::percent_encoded;
use crate::api::{prefetch, store};
use crate::app::App;
use crate::behalf::Behalf;
use crate::failure::Failure;
use crate::nodes::Node;
use crate::pools::now_ms;

/// Layers that nodes are asked about at a time.
const ASKED_AT_ONCE: usize = 16;

/// A sync that was found to be possible.
pub(super) struct Syncing {
    app: Arc<App>,
    pool: PoolName,
    budget: u64,
    since_day: u64,
    is_dry: bool,
    /// Nodes of the pool that answer, and names of the others.
    nodes: Vec<Arc<Node>>,
    away: Vec<String>,
    behalf: Behalf,
    headers: HeaderMap,
}

impl Syncing {
    /// Looks at the nodes.
    ///
    /// # Errors
    /// There is no such pool, none of its nodes answers, or nodes have different layer stores.
    pub(super) async fn new(
        acting: &Acting,
        pool: PoolName,
        request: &PoolSyncRequest,
        since_day: u64,
    ) -> Result<Self, Failure> {
        let app = Arc::clone(&acting.app);
        app.nodes.watched.gathered().await;
        let pools = app.nodes.watched.pools();
        let Some(view) = pools.iter().find(|view| view.name == pool) else {
            let known: Vec<&str> = pools.iter().map(|view| view.name.as_str()).collect();
            return Err(Failure::new(ErrorKind::NotFound, format!("no node is of a pool {pool}"))
                .hint(format!("there are: {}; `pool` of edge.toml says of which a node is", known.join(", ")))
                .detail(json!({ "pool": pool, "pools": known })));
        };
        let nodes: Vec<Arc<Node>> = view.answering.iter().filter_map(|at| app.nodes.at(*at)).collect();
        let silent = view.nodes.iter().filter(|at| !view.answering.contains(at));
        let away: Vec<String> =
            silent.filter_map(|at| app.nodes.at(*at)).map(|node| node.name().to_string()).collect();
        if nodes.is_empty() {
            return Err(Failure::new(ErrorKind::Unavailable, format!("no node of the pool {pool} answers"))
                .hint("see that dsec-edge runs on them (`dsec node ls`)")
                .detail(json!({ "pool": pool, "nodes": away })));
        }
        one_store(&app).await?;
        let behalf = Behalf::server();
        let mut headers = HeaderMap::new();
        behalf.write(&mut headers);
        let (budget, is_dry) = (request.budget_bytes, request.dry_run);
        Ok(Self { app, pool, budget, since_day, is_dry, nodes, away, behalf, headers })
    }

    pub(super) fn pool(&self) -> &PoolName {
        &self.pool
    }

    /// Carries it out.
    ///
    /// # Errors
    /// The database or the store cannot be read, another sync has begun, or nobody listens any more. What was brought stays.
    pub(super) async fn run(&self, events: &Sender<PoolSyncEvent>) -> Result<PoolSynced, Failure> {
        let iam = &self.app.iam;
        self.app.pools.write(&self.app).await?;
        let accesses = iam.accesses(self.since_day).await?;
        let before = self.app.pools.set_of(&self.app, &self.pool).await?;
        let layers = self.layers(&accesses).await?;
        let plan = plan::plan(&accesses, &layers, &before, self.budget);
        if self.is_dry {
            let chosen = plan.chosen.iter().map(|chosen| chosen.layer.clone()).collect();
            return Ok(self.outcome(plan, &accesses, &layers, &chosen, Vec::new()));
        }
        let turn = iam.begin_pool_sync(&self.pool).await?;
        let mut there: BTreeSet<String> = plan.kept.iter().map(|kept| kept.layer.clone()).collect();
        let change = |dropped: Vec<String>, added: Vec<PoolLayer>, there: &BTreeSet<String>| PoolChange {
            bytes: plan::bytes_of(&layers, there.iter().map(String::as_str)),
            budget: self.budget,
            dropped,
            added,
            ended_ms: None,
        };
        self.change(turn, change(plan.dropped.clone(), Vec::new(), &there)).await?;
        let mut failed = BTreeMap::new();
        let mut done: BTreeSet<&str> = BTreeSet::new();
        for chosen in &plan.chosen {
            self.tell(events, &plan, &layers, chosen, &done).await?;
            done.insert(&chosen.layer);
            if let Err(problem) = self.bring(chosen).await {
                failed.insert(chosen.layer.clone(), problem);
                if there.remove(&chosen.layer) {
                    self.change(turn, change(vec![chosen.layer.clone()], Vec::new(), &there)).await?;
                }
            } else if there.insert(chosen.layer.clone()) {
                self.change(turn, change(Vec::new(), vec![named(chosen)], &there)).await?;
            }
        }
        // A cache that is too small has given up the first for the last.
        for chosen in &plan.chosen {
            if let (true, Err(problem)) = (there.contains(&chosen.layer), self.is_whole(chosen).await) {
                there.remove(&chosen.layer);
                failed.insert(chosen.layer.clone(), problem);
            }
        }
        let lost = failed.keys().cloned().collect();
        let ended = PoolChange { ended_ms: Some(now_ms()), ..change(lost, Vec::new(), &there) };
        self.change(turn, ended).await?;
        let failed = failed.into_iter().map(|(layer, problem)| PoolLayerFailed { layer, problem }).collect();
        Ok(self.outcome(plan, &accesses, &layers, &there, failed))
    }

    async fn change(&self, turn: i64, change: PoolChange) -> Result<(), Failure> {
        self.app.iam.change_pool(&self.pool, turn, &change).await?;
        Ok(self.app.pools.hear(&self.app, &self.pool).await?)
    }

    async fn tell(
        &self,
        events: &Sender<PoolSyncEvent>,
        plan: &Plan,
        layers: &Layers,
        now: &PoolLayerChosen,
        done: &BTreeSet<&str>,
    ) -> Result<(), Failure> {
        let progress = PoolSyncEvent::Progress {
            layer: now.layer.clone(),
            layers: plan.chosen.len() as u64,
            layers_done: done.len() as u64,
            bytes: plan.bytes,
            bytes_done: plan::bytes_of(layers, done.iter().copied()),
        };
        let gone = |_| Failure::new(ErrorKind::Unavailable, "nobody waits for the sync any more");
        events.send(progress).await.map_err(gone)
    }

    /// All layers that were asked for and are there, as the store has them.
    async fn layers(&self, accesses: &[Accessed]) -> Result<Layers, Failure> {
        let names: BTreeSet<String> = accesses.iter().flat_map(plan::layers_of).map(str::to_owned).collect();
        let ask = |name: String| async move { Ok(self.layer(&name).await?.map(|layer| (name, layer))) };
        let asked = names.into_iter().map(ask);
        let found = futures_util::stream::iter(asked).buffer_unordered(ASKED_AT_ONCE);
        found.try_filter_map(async |found| Ok(found)).try_collect().await
    }

    async fn layer(&self, name: &str) -> Result<Option<Layer>, Failure> {
        let Some(path) = path_of(name) else { return Ok(None) };
        let image: Image = match store::ask_any(&self.nodes, &path, &self.headers).await {
            Ok(image) => image,
            Err(failure) if [ErrorKind::NotFound, ErrorKind::InvalidArgument].contains(&failure.0.kind()) => {
                return Ok(None);
            }
            Err(failure) => return Err(failure),
        };
        let Some(content) = image.nodes.into_iter().find_map(|on| on.content) else {
            let message = format!("a node of the pool {} does not say how large {name} is", self.pool);
            return Err(Failure::new(ErrorKind::Unavailable, message)
                .hint("its fill worker may be starting; try again in a moment"));
        };
        let blobs = content.blobs.into_iter().map(|blob| (blob.id, blob.size_bytes)).collect();
        Ok(Some(Layer { digest: image.digest, blobs }))
    }

    /// Brings a layer whole to every node.
    async fn bring(&self, chosen: &PoolLayerChosen) -> Result<(), String> {
        let asked = self.nodes.iter().map(|node| self.bring_to(node, &chosen.layer));
        for (node, brought) in self.nodes.iter().zip(join_all(asked).await) {
            brought.map_err(|failure| format!("node {}: {}", node.name(), failure.0.0.message))?;
        }
        self.is_whole(chosen).await
    }

    async fn bring_to(&self, node: &Arc<Node>, layer: &str) -> Result<(), Failure> {
        let odd = || Failure::new(ErrorKind::InvalidArgument, format!("{layer} is no name of a layer"));
        let uri = path_of(layer).and_then(|path| format!("{path}/prefetch").parse().ok()).ok_or_else(odd)?;
        let body = Bytes::from_static(b"{}");
        let begun = prefetch::begin(node, &self.head(uri), &body, &self.behalf, &self.app.tunnels).await?;
        let mut events = prefetch::events(node.name().to_string(), begun);
        while let Some((_, said)) = events.next().await {
            match said {
                Ok(PrefetchEvent::Done { .. }) => return Ok(()),
                Ok(PrefetchEvent::Progress { .. }) => {}
                Ok(PrefetchEvent::Error { error }) | Err(error) => {
                    return Err(Failure(dsec_proto::rest::ApiError(Box::new(error))));
                }
            }
        }
        Err(Failure::new(ErrorKind::Unavailable, "it broke off without saying how it went"))
    }

    fn head(&self, uri: Uri) -> Parts {
        let (mut head, ()) = Request::new(()).into_parts();
        (head.method, head.uri) = (Method::POST, uri);
        head.headers.insert(header::HOST, HeaderValue::from_static("dsec"));
        head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        head
    }

    /// Whether the layer that was chosen, and not one that has its name by now, is whole on every node.
    async fn is_whole(&self, chosen: &PoolLayerChosen) -> Result<(), String> {
        let path = format!("/internal/layers/{}", chosen.digest);
        let asked = self.nodes.iter().map(|node| node.ask::<HeldLayer>(&path, &self.headers));
        for (node, held) in self.nodes.iter().zip(join_all(asked).await) {
            let name = node.name();
            let held = held.map_err(|failure| format!("node {name}: {}", failure.0.0.message))?;
            let Some(content) = held.here.content else {
                return Err(format!("node {name} does not say what it has of it"));
            };
            if content.here_bytes < content.size_bytes {
                let (here, all) = (content.here_bytes, content.size_bytes);
                return Err(format!(
                    "node {name} has {here} of its {all} bytes: its cache is too small, or the name has moved"
                ));
            }
        }
        Ok(())
    }

    fn outcome(
        &self,
        plan: Plan,
        accesses: &[Accessed],
        layers: &Layers,
        there: &BTreeSet<String>,
        failed: Vec<PoolLayerFailed>,
    ) -> PoolSynced {
        let Plan { mut chosen, dropped, accesses: all, gone, covered_before, .. } = plan;
        chosen.retain(|chosen| there.contains(&chosen.layer));
        PoolSynced {
            pool: self.pool.clone(),
            dry_run: self.is_dry,
            budget_bytes: self.budget,
            bytes: plan::bytes_of(layers, there.iter().map(String::as_str)),
            accesses: all,
            gone,
            covered_before,
            covered: plan::covered(accesses, |layer| there.contains(layer)),
            dropped: dropped.into_iter().filter(|layer| !there.contains(layer)).collect(),
            layers: chosen,
            failed,
            away: self.away.clone(),
        }
    }
}

fn named(chosen: &PoolLayerChosen) -> PoolLayer {
    PoolLayer { layer: chosen.layer.clone(), digest: chosen.digest.clone() }
}

/// Where a node tells of a layer, by kind and name.
fn path_of(layer: &str) -> Option<String> {
    let (kind, name) = layer.split_once('/')?;
    Some(format!("/v1/layers/{kind}/{}", percent_encoded(name)))
}

/// Sees that all nodes share a layer store: a name is to mean the same layer at home and in the pool.
///
/// # Errors
/// They do not, or none answers.
async fn one_store(app: &App) -> Result<(), Failure> {
    let Err(failure) = app.nodes.of_one_store(&app.nodes.all()).await else { return Ok(()) };
    if failure.0.kind() != ErrorKind::InvalidArgument {
        return Err(failure);
    }
    let message =
        "the nodes do not share a layer store, and what a pool takes over with has to be in its own";
    Err(Failure::new(ErrorKind::Unsupported, message)
        .hint("give all nodes one store ([store] in edge.toml); this version does not copy between stores")
        .detail(failure.0.0.detail.clone()))
}
