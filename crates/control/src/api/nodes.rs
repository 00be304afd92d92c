//! The nodes, and whether they take new sandboxes.

use dsec_proto::rest::{CordonRequest, DrainRequest, NodeStatus};

use super::{Call, NodeCall, lists};
use crate::failure::Reply;
use crate::forward::BodyKind;

/// The nodes: what each is, can do and does now.
#[utoipa::path(get, path = "/v1/nodes", operation_id = "list_nodes", tag = "nodes",
    params(("layers" = Option<bool>, Query, description = "Adds the names that the sandboxes of the last hour had for their layers.")),
    responses((status = 200, description = "The nodes that answer; `x-dsec-unreachable-nodes` names the others.",
        body = ref("#/components/schemas/NodeList"),
        headers(("x-dsec-unreachable-nodes" = String, description = "Comma-separated; missing when every node answers.")))))]
pub async fn list(call: Call) -> Reply {
    match call.app.nodes.only() {
        Some(node) => call.forward(&node, BodyKind::Raw).await,
        None => lists::nodes(call).await,
    }
}

/// One node.
#[utoipa::path(get, path = "/v1/nodes/{node}", operation_id = "get_node", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    responses((status = 200, description = "What it is, can do and does now.", body = NodeStatus)))]
pub async fn get(call: NodeCall) -> Reply {
    call.forward().await
}

/// Keeps new sandboxes away from a node. Those it has stay.
#[utoipa::path(post, path = "/v1/nodes/{node}/cordon", operation_id = "cordon_node", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    request_body(content = Option<CordonRequest>, description = "May be empty."),
    responses((status = 200, description = "The node, which takes no more from now on.", body = NodeStatus)))]
pub async fn cordon(call: NodeCall) -> Reply {
    call.forward().await
}

/// Opens a node for new sandboxes again, after a cordon or a drain.
#[utoipa::path(post, path = "/v1/nodes/{node}/uncordon", operation_id = "uncordon_node", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    responses((status = 200, description = "The node, which takes more from now on.", body = NodeStatus)))]
pub async fn uncordon(call: NodeCall) -> Reply {
    call.forward().await
}

/// Keeps new sandboxes away from a node and waits for those it has to end; the answer does not wait.
#[utoipa::path(post, path = "/v1/nodes/{node}/drain", operation_id = "drain_node", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    request_body(content = Option<DrainRequest>, description = "May be empty: the sandboxes end when they end."),
    responses((status = 200, description = "The node: it is drained once its usage counts no sandbox.", body = NodeStatus)))]
pub async fn drain(call: NodeCall) -> Reply {
    call.forward().await
}
