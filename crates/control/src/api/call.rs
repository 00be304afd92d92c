//! Extractors that authenticate a request and find its node: a handler cannot forget to.

use std::sync::Arc;

use axum::RequestExt;
use axum::extract::{FromRequest, RawPathParams, Request};
use dsec_model::{ErrorKind, ExecId, IdError, SandboxId, SessionId};
use serde_json::json;

use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::forward::{BodyKind, Outgoing};
use crate::keys::{self, Principal};
use crate::nodes::Node;

/// An authenticated request.
pub struct Call {
    /// What handlers share.
    pub app: Arc<App>,
    /// Who asks.
    pub caller: Arc<Principal>,
    /// The request.
    pub request: Request,
}

impl FromRequest<Arc<App>> for Call {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let caller = keys::authenticate(&*app.keys, request.headers()).await?;
        Ok(Self { app: Arc::clone(app), caller, request })
    }
}

impl Call {
    /// Forwards it to a node.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward(self, node: &Arc<Node>, kind: BodyKind) -> Reply {
        Outgoing::new(self.request, &self.caller, kind).await?.send(node, &self.app.tunnels).await
    }
}

/// An authenticated request for one sandbox, whose path is well formed and whose node is known.
pub struct SandboxCall {
    call: Call,
    node: Arc<Node>,
}

impl FromRequest<Arc<App>> for SandboxCall {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let mut call = Call::from_request(request, app).await?;
        let params: RawPathParams = call.request.extract_parts().await.map_err(|error| {
            Failure::new(ErrorKind::InvalidArgument, format!("the path is malformed: {error}"))
        })?;
        let mut node = None;
        for (name, value) in &params {
            match name {
                "id" => node = Some(node_of(app, value)?),
                "eid" => drop(value.parse::<ExecId>().map_err(bad_id)?),
                "sid" => drop(value.parse::<SessionId>().map_err(bad_id)?),
                "port" => check_port(value)?,
                _ => {}
            }
        }
        let node = node.ok_or_else(|| Failure::new(ErrorKind::Internal, "the route has no sandbox id"))?;
        Ok(Self { call, node })
    }
}

impl SandboxCall {
    /// Forwards it to the sandbox's node. The body, if any, is bytes of any length.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward(self) -> Reply {
        self.call.forward(&self.node, BodyKind::Raw).await
    }

    /// Forwards it to the sandbox's node. The body is JSON.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward_json(self) -> Reply {
        self.call.forward(&self.node, BodyKind::Json).await
    }
}

fn node_of(app: &App, id: &str) -> Result<Arc<Node>, Failure> {
    let id: SandboxId = id.parse().map_err(bad_id)?;
    app.nodes.get(id.node()).cloned().ok_or_else(|| {
        Failure::new(ErrorKind::NotFound, format!("no sandbox {id}: there is no node {} here", id.node()))
            .detail(json!({ "sandbox_id": id.as_str(), "node": id.node() }))
    })
}

fn bad_id(error: IdError) -> Failure {
    let detail = json!({ "field": format!("{}_id", error.kind), "given": &error.given });
    Failure::new(ErrorKind::InvalidArgument, error.to_string()).detail(detail)
}

fn check_port(port: &str) -> Result<(), Failure> {
    match port.parse::<u16>() {
        Ok(1..) => Ok(()),
        _ => Err(Failure::new(
            ErrorKind::InvalidArgument,
            format!(
                "{:?} is not a port; it must be between 1 and 65535",
                port.chars().take(20).collect::<String>()
            ),
        )
        .detail(json!({ "field": "port" }))),
    }
}
