//! `GET /v1/sandboxes` over several nodes. Which sandboxes a page has is found out here, by the records that are kept of all nodes and
//! are brought up to date first; then each node is asked for those of the page that it has, and for no others.

use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Query;
use dsec_model::iam::Scope;
use dsec_model::{ErrorKind, SandboxId, State};
use dsec_proto::rest::{NodeHealth, NodeKnown, Position, Sandbox, SandboxFilter, SandboxList, SandboxesById};
use futures_util::future::join_all;
use http::{HeaderMap, Uri};

use super::Call;
use super::lists::{identity, partial, percent_encoded};
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::nodes::Node;
use crate::watcher::{ANSWER_WITHIN, Standing};

/// How long a node that missed reports is waited for: as long as one takes that is merely slow, so that one that hangs does not
/// hold up each page of every list until it is lost.
const SUSPECT_WITHIN: Duration = Duration::from_millis(500);

/// A node, as a list meets it.
struct Source {
    at: usize,
    node: Arc<Node>,
    standing: Standing,
    has: Has,
}

/// Where a list has a node's sandboxes from.
enum Has {
    /// What the node said just now.
    Now,
    /// What it said when it was last heard of.
    Then,
    /// Its edge is of a version that does not say: the node's own page, and whether that is its last.
    Page(Vec<Sandbox>, bool),
    /// Nothing: it is lost, and was not heard of since this server started.
    Nothing,
}

/// A list. Nodes that do not answer are named in a header; their sandboxes are in the list as they were when last heard of, or as lost.
///
/// # Errors
/// The query is not one of a list's. A node does not answer of which nothing is known yet: a page with a hole in it would look whole.
pub(super) async fn sandboxes(call: Call) -> Reply {
    let filter = parsed(call.request.uri())?;
    let headers = identity(&call);
    let list = List { app: &call.app, headers: &headers, filter: &filter, scope: &call.behalf.may };
    let asked = call.app.nodes.placed().into_iter().map(|(at, node)| list.source(at, node));
    let mut sources = join_all(asked).await.into_iter().collect::<Result<Vec<Source>, Failure>>()?;
    let (page, more) = list.page(&sources);
    let next_cursor = page.last().filter(|_| more).map(ToString::to_string);
    let sandboxes = list.records(page, &mut sources).await;
    let is_silent = |source: &&Source| matches!(source.has, Has::Then | Has::Nothing);
    let silent: Vec<String> = sources.iter().filter(is_silent).map(|it| it.node.name().to_string()).collect();
    partial(&SandboxList { sandboxes, next_cursor }, &silent)
}

fn parsed(uri: &Uri) -> Result<SandboxFilter, Failure> {
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map_err(|_| Failure::new(ErrorKind::InvalidArgument, "the query is malformed"))?;
    Ok(SandboxFilter::of(pairs.0)?)
}

struct List<'a> {
    app: &'a App,
    headers: &'a HeaderMap,
    filter: &'a SandboxFilter,
    /// Where the caller sees sandboxes.
    scope: &'a Scope,
}

impl List<'_> {
    /// Brings what is known of a node up to date, as far as it answers.
    async fn source(&self, at: usize, node: Arc<Node>) -> Result<Source, Failure> {
        let nodes = &self.app.nodes;
        let standing = nodes.watched.standing(at);
        let within = match standing.health {
            NodeHealth::Well => ANSWER_WITHIN,
            // Nothing is known of it yet, and a list needs it.
            NodeHealth::Suspect if nodes.records.known(at) == NodeKnown::Gathering => ANSWER_WITHIN,
            NodeHealth::Suspect => SUSPECT_WITHIN,
            NodeHealth::Lost => Duration::ZERO,
        };
        let told = if standing.is_lost() {
            Err(standing.failure(node.name(), false))
        } else {
            let told = tokio::time::timeout(within, nodes.records.refresh(at, &node)).await;
            told.unwrap_or_else(|_| Err(node.odd(format!("did not answer in {} ms", within.as_millis()))))
        };
        let has = match (told, nodes.records.known(at)) {
            (Ok(()), NodeKnown::Counted) => Has::Now,
            (Err(_), NodeKnown::Counted) => Has::Then,
            (Err(_), _) if standing.is_lost() => Has::Nothing,
            (Err(failure), _) => return Err(failure),
            (Ok(()), _) => self.own_page(&node).await?,
        };
        Ok(Source { at, node, standing, has })
    }

    /// The page of a node that does not tell what it has.
    async fn own_page(&self, node: &Node) -> Result<Has, Failure> {
        let mut filter = self.filter.clone();
        // It never has one that is lost, and may not know the word.
        filter.states.retain(|state| *state != State::Lost);
        if filter.states.is_empty() && !self.filter.states.is_empty() {
            return Ok(Has::Page(Vec::new(), true));
        }
        let pairs = filter.pairs(filter.cursor.as_ref(), filter.limit());
        let query: Vec<String> =
            pairs.iter().map(|(key, value)| format!("{key}={}", percent_encoded(value))).collect();
        let path = format!("/v1/sandboxes?{}", query.join("&"));
        let list: SandboxList = node.ask(&path, self.headers).await?;
        Ok(Has::Page(list.sandboxes, list.next_cursor.is_none()))
    }

    /// The places of the page, and whether there are sandboxes after it.
    fn page(&self, sources: &[Source]) -> (Vec<Position>, bool) {
        let limit = self.filter.limit();
        // The best so far, the last of them on top; one more than the page has tells that there are more.
        let mut best: BinaryHeap<Position> = BinaryHeap::with_capacity(limit + 2);
        let mut more = false;
        for source in sources {
            let before = if best.len() > limit { best.peek() } else { None };
            let of_node = match &source.has {
                Has::Page(sandboxes, is_last) => {
                    more |= !is_last;
                    sandboxes.iter().map(Position::of).collect()
                }
                Has::Now | Has::Then => self.kept(source, before, limit + 1),
                Has::Nothing => Vec::new(),
            };
            for place in of_node {
                best.push(place);
                if best.len() > limit + 1 {
                    best.pop();
                }
            }
        }
        let mut page = best.into_sorted_vec();
        more |= page.len() > limit;
        page.truncate(limit);
        (page, more)
    }

    fn kept(&self, source: &Source, before: Option<&Position>, max: usize) -> Vec<Position> {
        let records = &self.app.nodes.records;
        records.page(source.at, source.standing, self.filter, self.scope, before, max).unwrap_or_default()
    }

    /// The records of a page, in its order. A node that does not give them becomes one that was heard of then.
    async fn records(&self, page: Vec<Position>, sources: &mut [Source]) -> Vec<Sandbox> {
        let mut of_nodes: HashMap<&str, Vec<&Position>> = HashMap::new();
        for place in &page {
            of_nodes.entry(place.1.node()).or_default().push(place);
        }
        let asked = sources.iter_mut().filter_map(|source| {
            let places = of_nodes.remove(source.node.name().as_str())?;
            Some(self.records_of(source, places))
        });
        let mut found: HashMap<SandboxId, Sandbox> = HashMap::with_capacity(page.len());
        for sandboxes in join_all(asked.collect::<Vec<_>>()).await {
            found.extend(sandboxes.into_iter().map(|sandbox| (sandbox.id.clone(), sandbox)));
        }
        // One may be another than it was when the page was chosen.
        page.iter()
            .filter_map(|place| found.remove(&place.1))
            .filter(|it| self.filter.takes_record(it))
            .collect()
    }

    async fn records_of(&self, source: &mut Source, places: Vec<&Position>) -> Vec<Sandbox> {
        if let Has::Page(sandboxes, _) = &mut source.has {
            return std::mem::take(sandboxes);
        }
        if matches!(source.has, Has::Now) {
            let SandboxFilter { usage, content, .. } = *self.filter;
            let ids = places.iter().map(|place| place.1.clone()).collect();
            let question = SandboxesById { ids, usage, content };
            let nodes = &self.app.nodes;
            let asked = source.node.tell::<SandboxList>("/internal/sandboxes/get", self.headers, &question);
            match nodes.unless_lost(source.at, &source.node, asked).await {
                Ok(list) => return list.sandboxes,
                Err(_) => source.has = Has::Then,
            }
        }
        let kept = |place| self.app.nodes.records.sandbox_at(source.at, source.standing, place);
        places.into_iter().filter_map(kept).collect()
    }
}
