//! Which programs the nodes run, and changes of them and of their configuration. What is changed is written down in the audit log.

use dsec_iam::Did;
use dsec_proto::rest::{
    ChangeBegun, EndTrialRequest, NodeRelease, StoredRelease, TryConfigRequest, TryReleaseRequest,
};

use super::NodeCall;
use crate::failure::Reply;
use crate::forward::BodyKind;

/// What a node runs, and how it stands with changes of it.
#[utoipa::path(get, path = "/v1/nodes/{node}/release", operation_id = "get_node_release", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    responses((status = 200, description = "What it runs. 404 with `no path` in its message: its edge is of a version that cannot be upgraded from afar.",
        body = NodeRelease)))]
pub async fn get(call: NodeCall) -> Reply {
    call.forward().await
}

/// Sends a node a release. Nothing runs it yet.
#[utoipa::path(put, path = "/v1/nodes/{node}/releases/{release}", operation_id = "put_node_release", tag = "nodes",
    params(("node" = String, Path, description = "The node's name."),
        ("release" = String, Path, description = "`VERSION-DIGEST`: the first 16 hexadecimal digits of the SHA-256 of a line `SHA256  PROGRAM` for each program, by name.")),
    request_body(content = Vec<u8>, content_type = "application/x-tar", description = "The files dsec-aether, dsec-edge and dsec-fill."),
    responses((status = 200, description = "It lies there, and is what its name says.", body = StoredRelease)))]
pub async fn put(call: NodeCall) -> Reply {
    noted(call, BodyKind::Raw).await
}

/// Has a node run other programs, on trial: it goes back by itself unless it is told in time that they are good.
#[utoipa::path(post, path = "/v1/nodes/{node}/release/try", operation_id = "try_node_release", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    request_body = TryReleaseRequest,
    responses((status = 200, description = "The node becomes them, or runs them already.", body = ChangeBegun)))]
pub async fn try_release(call: NodeCall) -> Reply {
    noted(call, BodyKind::Json).await
}

/// Changes what is the operator's in a node's configuration, on trial.
#[utoipa::path(post, path = "/v1/nodes/{node}/config/try", operation_id = "try_node_config", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    request_body = TryConfigRequest,
    responses((status = 200, description = "The node takes it, or has it already.", body = ChangeBegun)))]
pub async fn try_config(call: NodeCall) -> Reply {
    noted(call, BodyKind::Json).await
}

/// Ends a trial: the change is kept, or the node goes back from it now.
#[utoipa::path(post, path = "/v1/nodes/{node}/trial/end", operation_id = "end_node_trial", tag = "nodes",
    params(("node" = String, Path, description = "The node's name.")),
    request_body = EndTrialRequest,
    responses((status = 200, description = "How the node stands then.", body = NodeRelease)))]
pub async fn end_trial(call: NodeCall) -> Reply {
    noted(call, BodyKind::Json).await
}

/// Forwards a call, and has the audit log say that it was made. A log that cannot be written does not keep the cluster's own key from
/// putting a node right.
async fn noted(call: NodeCall, kind: BodyKind) -> Reply {
    let (app, principal, called) = call.known();
    let answer = call.forward_as(kind).await?;
    if answer.status().is_success() {
        let did = Did { caller: &principal.caller, request_id: &called.request_id };
        if let Err(error) = app.iam.note(did, &called.action, &called.target).await {
            tracing::error!(%error, action = called.action, target = called.target, "the audit log cannot be written");
        }
    }
    Ok(answer)
}
