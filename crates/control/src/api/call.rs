//! Extractors that authenticate a request and find its node: a handler cannot forget to.

use std::fmt::Display;
use std::sync::Arc;

use axum::RequestExt;
use axum::extract::{FromRequest, MatchedPath, RawPathParams, Request};
use dsec_iam::Denied;
use dsec_model::{ErrorKind, ExecId, IdError, NodeId, SandboxId, SessionId};
use http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::lists;
use crate::access::REQUEST_ID;
use crate::app::App;
use crate::behalf::Behalf;
use crate::failure::{Failure, Reply};
use crate::forward::{BodyKind, Outgoing};
use crate::keys::{self, Principal};
use crate::nodes::Node;
use crate::rules;

/// A request that its caller may make.
pub struct Call {
    /// What handlers share.
    pub app: Arc<App>,
    /// Who asks, and where they may do it.
    pub behalf: Behalf,
    /// The request.
    pub request: Request,
}

impl FromRequest<Arc<App>> for Call {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let principal = keys::authenticate(&app.keys, &app.iam, request.headers())?;
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str).unwrap_or_default();
        let Some(rule) = rules::of(request.method(), route) else {
            let message = format!("nobody was said to be let into {} {route}", request.method());
            return Err(Failure::new(ErrorKind::Internal, message));
        };
        match Behalf::find(app, Arc::clone(&principal), rule, request.headers()) {
            Ok(behalf) => Ok(Self { app: Arc::clone(app), behalf, request }),
            Err(failure) => {
                note_denied(app, &principal, &Called::of(&request), &failure);
                Err(failure)
            }
        }
    }
}

impl Call {
    /// Forwards it to a node.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward(self, node: &Arc<Node>, kind: BodyKind) -> Reply {
        Outgoing::new(self.request, &self.behalf, kind).await?.send(node, &self.app.tunnels).await
    }
}

/// Has the audit log say that somebody was not let, if that is what a failure is.
pub(super) fn note_denied(app: &App, principal: &Principal, called: &Called, failure: &Failure) {
    if failure.0.kind() != ErrorKind::PermissionDenied {
        return;
    }
    let missing = failure.0.0.detail["missing"].as_array();
    let missing: Vec<&str> = missing.into_iter().flatten().filter_map(|name| name.as_str()).collect();
    app.iam.denied(
        &principal.caller,
        &Denied {
            action: &called.action,
            target: &called.target,
            detail: &missing.join(" "),
            request_id: &called.request_id,
        },
    );
}

/// What a request was, for the audit log.
pub(super) struct Called {
    /// Method and route.
    pub(super) action: String,
    /// The path.
    pub(super) target: String,
    /// Its name in the logs.
    pub(super) request_id: String,
}

impl Called {
    pub(super) fn of(request: &Request) -> Self {
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str).unwrap_or_default();
        let id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
        Self {
            action: format!("{} {route}", request.method()),
            target: request.uri().path().to_owned(),
            request_id: id.unwrap_or_default().to_owned(),
        }
    }
}

/// An authenticated request for one sandbox, whose path is well formed and whose node is known.
pub struct SandboxCall {
    call: Call,
    id: SandboxId,
    at: usize,
    node: Arc<Node>,
}

impl FromRequest<Arc<App>> for SandboxCall {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let mut call = Call::from_request(request, app).await?;
        let params: RawPathParams = call.request.extract_parts().await.map_err(malformed_path)?;
        let mut named = None;
        for (name, value) in &params {
            match name {
                "id" => named = Some(value.parse::<SandboxId>().map_err(bad_id)?),
                "eid" => drop(value.parse::<ExecId>().map_err(bad_id)?),
                "sid" => drop(value.parse::<SessionId>().map_err(bad_id)?),
                "port" => check_port(value)?,
                _ => {}
            }
        }
        let id = named.ok_or_else(|| Failure::new(ErrorKind::Internal, "the route has no sandbox id"))?;
        let (at, node) = node_of(app, &id)?;
        Ok(Self { call, id, at, node })
    }
}

impl SandboxCall {
    /// Forwards it to the sandbox's node. The body, if any, is bytes of any length.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward(self) -> Reply {
        self.forward_as(BodyKind::Raw).await
    }

    /// Forwards it to the sandbox's node. The body is JSON.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward_json(self) -> Reply {
        self.forward_as(BodyKind::Json).await
    }

    /// Gives the sandbox's record; of one whose node is lost, what was last heard of it.
    ///
    /// # Errors
    /// See [`Outgoing`]. The node is lost, and a state is to be waited for, or what was last heard has no such sandbox that the
    /// caller sees.
    pub async fn look(self) -> Reply {
        let Self { call, id, at, node } = &self;
        let nodes = &call.app.nodes;
        let standing = nodes.watched.standing(*at);
        if !standing.is_lost() {
            return self.forward().await;
        }
        let query = call.request.uri().query().unwrap_or_default();
        if query.split('&').any(|pair| pair.starts_with("wait_state=") && pair != "wait_state=lost") {
            return Err(standing.failure(node.name(), false));
        }
        match nodes.records.sandbox(*at, standing, id, &call.behalf.may) {
            Some(sandbox) => lists::partial(&sandbox, &[node.name().to_string()]),
            None => Err(standing.failure(node.name(), false)),
        }
    }

    async fn forward_as(self, kind: BodyKind) -> Reply {
        let Self { call, id: _, at, node } = self;
        let app = Arc::clone(&call.app);
        let noted = call.behalf.is_for_the_node_to_find();
        let noted = noted.then(|| (Arc::clone(&call.behalf.principal), Called::of(&call.request)));
        let answer = app.nodes.unless_lost(at, &node, call.forward(&node, kind)).await?;
        if let Some((principal, called)) = noted.filter(|_| answer.status() == StatusCode::FORBIDDEN) {
            let failure = Failure::new(ErrorKind::PermissionDenied, "the node found that it may not");
            note_denied(&app, &principal, &called, &failure);
        }
        Ok(answer)
    }
}

/// An authenticated request for the node that its path names.
pub struct NodeCall {
    call: Call,
    node: Arc<Node>,
}

impl FromRequest<Arc<App>> for NodeCall {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let mut call = Call::from_request(request, app).await?;
        let params: RawPathParams = call.request.extract_parts().await.map_err(malformed_path)?;
        let name =
            params.iter().find(|(param, _)| *param == "node").map(|(_, name)| name).unwrap_or_default();
        let node = app.nodes.get(name).ok_or_else(|| no_node(app, name))?;
        Ok(Self { call, node })
    }
}

impl NodeCall {
    /// Forwards it to the node.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub async fn forward(self) -> Reply {
        self.forward_as(BodyKind::Json).await
    }

    /// Forwards it to the node, with a body of this kind.
    ///
    /// # Errors
    /// See [`Outgoing`].
    pub(super) async fn forward_as(self, kind: BodyKind) -> Reply {
        self.call.forward(&self.node, kind).await
    }

    /// What the audit log needs of it once it is gone.
    pub(super) fn known(&self) -> (Arc<App>, Arc<Principal>, Called) {
        let Call { app, behalf, request } = &self.call;
        (Arc::clone(app), Arc::clone(&behalf.principal), Called::of(request))
    }
}

fn no_node(app: &App, name: &str) -> Failure {
    let name: String = name.chars().take(64).collect();
    let nodes: Vec<NodeId> = app.nodes.all().iter().map(|node| node.name().clone()).collect();
    Failure::new(ErrorKind::NotFound, format!("no node {name}"))
        .hint("`dsec node ls` lists them")
        .detail(json!({ "node": name, "nodes": nodes }))
}

fn node_of(app: &App, id: &SandboxId) -> Result<(usize, Arc<Node>), Failure> {
    app.nodes.find(id.node()).ok_or_else(|| {
        Failure::new(ErrorKind::NotFound, format!("no sandbox {id}: there is no node {} here", id.node()))
            .detail(json!({ "sandbox_id": id.as_str(), "node": id.node() }))
    })
}

/// A path whose parts cannot be read.
pub(super) fn malformed_path(error: impl Display) -> Failure {
    Failure::new(ErrorKind::InvalidArgument, format!("the path is malformed: {error}"))
}

/// A JSON body, parsed.
///
/// # Errors
/// It is not what the path takes.
pub(super) fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| {
        Failure::new(ErrorKind::InvalidArgument, format!("the JSON body is not valid: {error}"))
    })
}

/// An id in a path that is none.
pub(super) fn bad_id(error: IdError) -> Failure {
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
