//! Machines that join over the network.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use dsec_model::ErrorKind;
use dsec_pki::Certificate;
use dsec_proto::rest::{
    AnnounceRequest, Announced, Cluster as ClusterInfo, JoinRequest, Joined, MemberList, Token, TokenRequest,
};
use http::StatusCode;
use http_body_util::{BodyExt as _, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Call;
use super::call::parsed;
use super::system::text;
use crate::app::App;
use crate::cluster::{Cluster, Refusal};
use crate::failure::{Failure, Reply};
use crate::forward;

/// Longest body of those who have no key, bytes: a certificate request and a name.
const BODY_MAX: usize = 32 << 10;

/// The certificate that a node has shown on its connection.
#[derive(Clone)]
pub struct NodeCertificate(pub Arc<Certificate>);

/// The cluster that machines may join.
#[utoipa::path(get, path = "/v1/cluster", operation_id = "get_cluster", tag = "cluster",
    responses((status = 200, description = "What it is known by.", body = ClusterInfo)))]
pub async fn get(call: Call) -> Reply {
    json(&cluster(&call.app)?.info().await?)
}

/// Makes the cluster's authority, unless there is one.
#[utoipa::path(post, path = "/v1/cluster", operation_id = "make_cluster", tag = "cluster",
    responses((status = 200, description = "What it is known by; `made` says whether it is new.", body = ClusterInfo)))]
pub async fn make(call: Call) -> Reply {
    json(&cluster(&call.app)?.init().await?)
}

/// Makes a token by which one machine can join.
#[utoipa::path(post, path = "/v1/cluster/tokens", operation_id = "make_join_token", tag = "cluster",
    request_body(content = Option<TokenRequest>, description = "May be empty."),
    responses((status = 200, description = "The token, which is shown this once.", body = Token)))]
pub async fn token(call: Call) -> Reply {
    let body = forward::whole(call.request.into_body()).await?;
    let request = if body.trim_ascii().is_empty() { TokenRequest::default() } else { parsed(&body)? };
    json(&cluster(&call.app)?.token(request).await?)
}

/// The nodes that have joined.
#[utoipa::path(get, path = "/v1/cluster/nodes", operation_id = "list_members", tag = "cluster",
    responses((status = 200, description = "By name.", body = MemberList)))]
pub async fn members(call: Call) -> Reply {
    json(&cluster(&call.app)?.members().await?)
}

/// Has a node be none of the cluster's any more: nothing is sent there, and its certificate is good for nothing.
#[utoipa::path(delete, path = "/v1/cluster/nodes/{node}", operation_id = "forget_member", tag = "cluster",
    params(("node" = String, Path, description = "The node's name.")),
    responses((status = 204, description = "It is forgotten. Its sandboxes run on until their node ends them.")))]
pub async fn forget(Path(node): Path<String>, call: Call) -> Reply {
    cluster(&call.app)?.forget(&node, &call.app.nodes).await?;
    let mut response = Response::default();
    *response.status_mut() = StatusCode::NO_CONTENT;
    Ok(response)
}

/// Lets a machine in. Its token is what it is let in by.
#[utoipa::path(post, path = "/v1/cluster/join", operation_id = "join_cluster", tag = "cluster", security(()),
    request_body = JoinRequest,
    responses((status = 200, description = "Its certificate, and the authority's.", body = Joined)))]
pub async fn join(State(app): State<Arc<App>>, request: Request) -> Reply {
    let cluster = cluster(&app)?;
    let request: JoinRequest = short(request).await?;
    json(&cluster.join(request, &app.nodes).await?)
}

/// A node says that it is there, and has its certificate renewed. Its certificate is what it is known by.
#[utoipa::path(post, path = "/v1/cluster/announce", operation_id = "announce_node", tag = "cluster", security(()),
    request_body = AnnounceRequest,
    responses((status = 200, description = "It was heard.", body = Announced)))]
pub async fn announce(State(app): State<Arc<App>>, request: Request) -> Reply {
    let cluster = cluster(&app)?;
    let Some(NodeCertificate(shown)) = request.extensions().get::<NodeCertificate>().cloned() else {
        return Err(Refusal::NoCertificate.into());
    };
    let request: AnnounceRequest = short(request).await?;
    json(&cluster.announce(&shown, request, &app.nodes).await?)
}

fn cluster(app: &App) -> Result<&Arc<Cluster>, Failure> {
    app.cluster.as_ref().ok_or_else(|| {
        Failure::new(ErrorKind::NotFound, "this server keeps no cluster")
            .hint("set cluster_dir in its configuration (`dsec up` does), and start it again")
    })
}

async fn short<T: DeserializeOwned>(request: Request) -> Result<T, Failure> {
    let body = Limited::new(request.into_body(), BODY_MAX).collect().await;
    parsed(&body.map_err(|_| Failure::body_too_large(BODY_MAX))?.to_bytes())
}

fn json(value: &impl Serialize) -> Reply {
    let body = serde_json::to_vec(value);
    let body = body.map_err(|error| {
        Failure::new(ErrorKind::Internal, format!("the answer cannot be written: {error}"))
    })?;
    Ok(text("application/json", body))
}
