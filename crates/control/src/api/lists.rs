//! Lists over several nodes: every node is asked, the answers are merged.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dsec_model::ErrorKind;
use dsec_proto::rest::{NodeStatus, PAGE_DEFAULT, PAGE_MAX, Sandbox, SandboxList, UNREACHABLE_NODES};
use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Call;
use super::system::text;
use crate::access::REQUEST_ID;
use crate::failure::{Failure, Reply};
use crate::nodes::Node;
use crate::watcher::Nodes;

/// Where a page ended. Opaque to callers; base64 of JSON.
///
/// Nodes page with cursors of their own, and a merged page ends in the middle of most nodes' pages.
/// So a node's next page is asked with the cursor of the page that was not used up, and what was
/// already given is known by its time: lists are newest first. Sandboxes of the very millisecond at
/// which the page ended are known by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cursor {
    /// Nodes that have more, each with its own cursor (none: its first page).
    nodes: BTreeMap<String, Option<String>>,
    /// `created_ms` of the last sandbox given.
    after_ms: u64,
    /// Those of that millisecond that were given.
    given: Vec<String>,
}

impl Cursor {
    fn parse(text: &str) -> Result<Self, Failure> {
        URL_SAFE_NO_PAD.decode(text).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).ok_or_else(
            || {
                Failure::new(ErrorKind::InvalidArgument, "cursor is not one that a list has given")
                    .detail(json!({ "field": "cursor" }))
            },
        )
    }

    fn text(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    fn has_given(&self, sandbox: &Sandbox) -> bool {
        sandbox.created_ms > self.after_ms
            || (sandbox.created_ms == self.after_ms && self.given.iter().any(|id| id == sandbox.id.as_str()))
    }
}

/// One node's part of a page: what it has left, and how to ask for it again.
struct Part {
    node: String,
    /// Cursor that the page was asked with.
    asked: Option<String>,
    /// Cursor of the page after.
    next: Option<String>,
    sandboxes: Vec<Sandbox>,
}

/// `GET /v1/sandboxes` over several nodes. A node that does not answer fails the list: a page with
/// a hole in it would look whole.
pub(super) async fn sandboxes(call: Call) -> Reply {
    let query = Query::parse(call.request.uri().query().unwrap_or_default())?;
    let headers = identity(&call);
    let cursor = match &query.cursor {
        Some(text) => Cursor::parse(text)?,
        None => {
            let nodes = call.app.nodes.all().iter().map(|node| (node.name().to_string(), None)).collect();
            Cursor { nodes, after_ms: u64::MAX, given: Vec::new() }
        }
    };
    let asked = cursor.nodes.iter().filter_map(|(name, page)| {
        // A node that has left the configuration meanwhile has nothing to list.
        let node = call.app.nodes.get(name)?;
        Some((node, page.clone()))
    });
    let asked = asked.map(async |(node, page)| part(&node, page, &query, &headers, &cursor).await);
    let parts = join_all(asked).await.into_iter().collect::<Result<Vec<Part>, Failure>>()?;
    let page = merge(parts, &cursor, query.limit);
    Ok(text("application/json", to_json(&page)?))
}

/// Reads a node's list from `page` on, until something in it is new to the caller.
async fn part(
    node: &Node,
    page: Option<String>,
    query: &Query,
    headers: &HeaderMap,
    cursor: &Cursor,
) -> Result<Part, Failure> {
    let mut asked = page;
    loop {
        let list: SandboxList = node.ask(&query.path(asked.as_deref()), headers).await?;
        let mut sandboxes = list.sandboxes;
        sandboxes.retain(|sandbox| !cursor.has_given(sandbox));
        if sandboxes.is_empty() && list.next_cursor.is_some() && list.next_cursor != asked {
            asked = list.next_cursor;
            continue;
        }
        return Ok(Part { node: node.name().to_string(), asked, next: list.next_cursor, sandboxes });
    }
}

fn merge(parts: Vec<Part>, before: &Cursor, limit: usize) -> SandboxList {
    let mut left: BTreeMap<String, (usize, Option<String>, Option<String>)> = BTreeMap::new();
    let mut all: Vec<(String, Sandbox)> = Vec::new();
    for part in parts {
        left.insert(part.node.clone(), (part.sandboxes.len(), part.asked, part.next));
        all.extend(part.sandboxes.into_iter().map(|sandbox| (part.node.clone(), sandbox)));
    }
    all.sort_by(|(_, a), (_, b)| b.created_ms.cmp(&a.created_ms).then_with(|| b.id.cmp(&a.id)));
    all.truncate(limit);
    for (node, _) in &all {
        if let Some((count, ..)) = left.get_mut(node) {
            *count -= 1;
        }
    }
    let page: Vec<Sandbox> = all.into_iter().map(|(_, sandbox)| sandbox).collect();
    let nodes: BTreeMap<_, _> = left
        .into_iter()
        .filter_map(|(node, (count, asked, next))| match (count, next) {
            (0, None) => None,
            (0, next) => Some((node, next)),
            _ => Some((node, asked)),
        })
        .collect();
    let next_cursor = (!nodes.is_empty()).then(|| after(before, nodes, &page).text());
    SandboxList { sandboxes: page, next_cursor }
}

fn after(before: &Cursor, nodes: BTreeMap<String, Option<String>>, page: &[Sandbox]) -> Cursor {
    let after_ms = page.last().map_or(before.after_ms, |last| last.created_ms);
    let mut given: Vec<String> = page
        .iter()
        .filter(|sandbox| sandbox.created_ms == after_ms)
        .map(|sandbox| sandbox.id.to_string())
        .collect();
    if after_ms == before.after_ms {
        given.extend(before.given.iter().cloned());
    }
    Cursor { nodes, after_ms, given }
}

/// The query of a list: what we need ourselves, and the rest as the caller wrote it.
struct Query {
    limit: usize,
    cursor: Option<String>,
    rest: String,
}

impl Query {
    fn parse(query: &str) -> Result<Self, Failure> {
        let mut parsed = Self { limit: PAGE_DEFAULT, cursor: None, rest: String::new() };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("limit", value) => {
                    parsed.limit = value
                        .parse()
                        .ok()
                        .filter(|limit| (1..=PAGE_MAX).contains(limit))
                        .ok_or_else(|| bad_limit(value))?;
                }
                ("cursor", value) => parsed.cursor = Some(value.to_owned()),
                _ => {
                    parsed.rest.push_str(pair);
                    parsed.rest.push('&');
                }
            }
        }
        Ok(parsed)
    }

    fn path(&self, cursor: Option<&str>) -> String {
        let mut path = format!("/v1/sandboxes?{}limit={}", self.rest, self.limit);
        if let Some(cursor) = cursor {
            path.push_str("&cursor=");
            path.push_str(&percent_encoded(cursor));
        }
        path
    }
}

fn bad_limit(given: &str) -> Failure {
    let given: String = given.chars().take(40).collect();
    Failure::new(
        ErrorKind::InvalidArgument,
        format!("limit is {given:?}; it must be between 1 and {PAGE_MAX}"),
    )
    .detail(json!({ "field": "limit", "min": 1, "max": PAGE_MAX }))
}

/// A value of a query.
pub(super) fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// `GET /v1/nodes` over several nodes. A node that does not answer is named in a header: this list
/// is where one looks for it.
pub(super) async fn nodes(call: Call) -> Reply {
    let (mut up, mut down): (Vec<NodeStatus>, Vec<String>) = (Vec::new(), Vec::new());
    let mut failure = None;
    let query = call.request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let (app, headers) = (Arc::clone(&call.app), identity(&call));
    for (node, answer) in app.nodes.ask_all::<Nodes>(&format!("/v1/nodes{query}"), &headers).await {
        match answer {
            Ok(answer) => up.extend(answer.nodes),
            Err(why) => {
                down.push(node.name().to_string());
                failure = Some(why);
            }
        }
    }
    match failure {
        Some(failure) if up.is_empty() => Err(failure),
        _ => partial(&json!({ "nodes": up }), &down),
    }
}

/// An answer without what these nodes would have said, which are named in a header.
pub(super) fn partial<T: Serialize>(value: &T, down: &[String]) -> Reply {
    let mut response = text("application/json", to_json(value)?);
    if let (false, Ok(names)) = (down.is_empty(), HeaderValue::from_str(&down.join(","))) {
        response.headers_mut().insert(UNREACHABLE_NODES, names);
    }
    Ok(response)
}

/// What the nodes that answer say of themselves.
pub(super) async fn statuses(call: Call) -> Vec<NodeStatus> {
    let headers = identity(&call);
    let app = call.app;
    let answers = app.nodes.ask_all::<Nodes>("/v1/nodes", &headers).await;
    answers.into_iter().filter_map(|(_, answer)| answer.ok()).flat_map(|answer| answer.nodes).collect()
}

/// Headers that tell a node on whose behalf we ask.
pub(super) fn identity(call: &Call) -> HeaderMap {
    let mut headers = HeaderMap::new();
    call.behalf.write(&mut headers);
    if let Some(id) = call.request.headers().get(REQUEST_ID) {
        headers.insert(REQUEST_ID, id.clone());
    }
    headers
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(value)
        .map_err(|error| Failure::new(ErrorKind::Internal, format!("the answer cannot be written: {error}")))
}
