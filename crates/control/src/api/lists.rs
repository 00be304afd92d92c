//! What is asked of several nodes: every node is asked, the answers are merged.

use std::sync::Arc;

use dsec_model::ErrorKind;
use dsec_proto::rest::{NodeStatus, UNREACHABLE_NODES};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;
use serde_json::json;

use super::Call;
use super::system::text;
use crate::access::REQUEST_ID;
use crate::failure::{Failure, Reply};
use crate::watcher::Nodes;

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
    for (_, node, answer) in app.nodes.ask_all::<Nodes>(&format!("/v1/nodes{query}"), &headers).await {
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
    answers.into_iter().filter_map(|(.., answer)| answer.ok()).flat_map(|answer| answer.nodes).collect()
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
