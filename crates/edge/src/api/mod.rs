//! The HTTP surface of one node. `docs/reference/http-api.md` is its contract. Handlers are thin: they
//! check the form, find the sandbox, and hand over.

mod archive;
mod around;
mod attach;
mod behind;
mod bodies;
mod caller;
mod execs;
mod files;
mod images;
mod layers;
mod nodes;
mod packs;
mod ports;
mod records;
mod releases;
mod sandboxes;
mod sessions;
mod tasks;
mod watch;

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Query, Request, State};
use axum::http::{StatusCode, header, request::Parts};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post, put};
use dsec_model::ErrorKind;
use dsec_proto::rest::{ApiError, JSON_BODY_MAX, status_of};
use http_body_util::{BodyExt, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::invalid;
use crate::node::Node;
use crate::sandbox::Entered;
use crate::traffic;

pub use caller::Caller;

/// All paths, for those on this machine.
pub fn router(node: Arc<Node>) -> Router {
    let local = Router::new().route("/internal/shutdown", post(nodes::shutdown));
    around(paths().merge(local), node)
}

/// What servers of the cluster may ask from other machines: nothing that ends the node.
pub fn remote_router(node: Arc<Node>) -> Router {
    around(paths(), node)
}

fn around(paths: Router<Arc<Node>>, node: Arc<Node>) -> Router {
    paths
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn(around::around))
        .layer(middleware::from_fn_with_state(Arc::clone(&node), traffic::counted))
        .with_state(node)
}

fn paths() -> Router<Arc<Node>> {
    let sandbox = Router::new()
        .route("/", get(sandboxes::get).patch(sandboxes::update).delete(sandboxes::delete))
        .route("/stop", post(sandboxes::stop))
        .route("/pause", post(sandboxes::pause))
        .route("/resume", post(sandboxes::resume))
        .route("/logs", get(sandboxes::logs))
        .route("/pack", post(packs::pack))
        .route("/execs", post(execs::start).get(execs::list))
        .route("/execs/{eid}", get(execs::get))
        .route("/execs/{eid}/stdout", get(execs::stdout))
        .route("/execs/{eid}/stderr", get(execs::stderr))
        .route("/execs/{eid}/attach", any(attach::attach))
        .route("/execs/{eid}/stdin", put(execs::stdin))
        .route("/execs/{eid}/signal", post(execs::signal))
        .route("/execs/{eid}/resize", post(execs::resize))
        .route("/sessions", post(sessions::open).get(sessions::list))
        .route("/sessions/{sid}", get(sessions::get).delete(sessions::close))
        .route("/files", get(files::read).put(files::write).delete(files::remove))
        .route("/files/stat", get(files::stat))
        .route("/files/list", get(files::list))
        .route("/files/mkdir", post(files::mkdir))
        .route("/files/move", post(files::rename))
        .route("/files/watch", any(watch::watch))
        .route("/archive", get(archive::pack).put(archive::unpack))
        .route("/ports/{port}/http", any(ports::http))
        .route("/ports/{port}/http/", any(ports::http))
        .route("/ports/{port}/http/{*path}", any(ports::http))
        .route("/ports/{port}/tcp", any(ports::tcp));
    let layer = Router::new()
        .route("/", get(images::get_layer).put(images::import_layer).delete(images::remove_layer))
        .route("/pull", post(images::pull_layer))
        .route("/trace", get(layers::trace))
        .route("/prefetch", post(layers::prefetch))
        .route("/verify", post(layers::verify_layer))
        .route("/export", get(layers::export))
        .route("/tags/{tag}", put(layers::tag));
    Router::new()
        .route("/v1/sandboxes", post(sandboxes::create).get(sandboxes::list))
        .nest("/v1/sandboxes/{id}", sandbox)
        .route("/v1/images", get(images::list))
        .route("/v1/images/{name}", get(images::get).put(images::import).delete(images::remove))
        .route("/v1/images/{name}/pull", post(images::pull))
        .route("/v1/layers/{kind}", get(images::list_layers))
        .nest("/v1/layers/{kind}/{name}", layer)
        .route("/v1/steps/{key}", get(layers::step))
        .route("/v1/steps/{key}/names/{name}", put(layers::name_step))
        .route("/v1/store/verify", post(layers::verify_store))
        .route("/v1/store/collect", post(layers::collect))
        .route("/v1/tasks", get(tasks::list))
        .route("/v1/tasks/{task}/stop", post(tasks::stop))
        .route("/v1/tasks/{task}/pause", post(tasks::pause))
        .route("/v1/tasks/{task}/resume", post(tasks::resume))
        .route("/v1/tasks/{task}/wait", post(tasks::wait))
        .route("/internal/sandboxes/changes", get(records::changes))
        .route("/internal/sandboxes/get", post(records::by_id))
        .route("/internal/sandboxes/stop", post(tasks::stop_all))
        .route("/internal/sandboxes/pause", post(tasks::pause_all))
        .route("/internal/sandboxes/resume", post(tasks::resume_all))
        .route("/internal/sandboxes/wait", post(tasks::wait_all))
        .route("/v1/nodes", get(nodes::list))
        .route("/v1/nodes/{node}", get(nodes::get))
        .route("/v1/nodes/{node}/cordon", post(nodes::cordon))
        .route("/v1/nodes/{node}/uncordon", post(nodes::uncordon))
        .route("/v1/nodes/{node}/drain", post(nodes::drain))
        .route("/v1/nodes/{node}/release", get(releases::get))
        .route("/v1/nodes/{node}/releases/{release}", put(releases::put))
        .route("/v1/nodes/{node}/release/try", post(releases::try_release))
        .route("/v1/nodes/{node}/config/try", post(releases::try_config))
        .route("/v1/nodes/{node}/trial/end", post(releases::end_trial))
        .route("/healthz", get(nodes::health))
        .route("/internal/layers", get(layers::held))
        .route("/internal/layers/{id}", get(layers::held_layer))
        .route("/internal/keys/fence", post(sandboxes::fence))
        .route("/internal/charges/fence", post(nodes::fence_charges))
        .route("/internal/instance", get(nodes::instance))
}

async fn no_path(request: Request) -> Failure {
    Failure(
        ApiError::new(ErrorKind::NotFound, format!("no path {}", request.uri().path()))
            .hint("docs/reference/http-api.md lists the paths"),
    )
}

async fn no_method(request: Request) -> Failure {
    Failure(
        ApiError::new(
            ErrorKind::MethodNotAllowed,
            format!("{} does not take {}", request.uri().path(), request.method()),
        )
        .hint("the `allow` header says what it takes"),
    )
}

/// An [`ApiError`] as a response.
#[derive(Debug)]
pub struct Failure(pub ApiError);

impl<E: Into<ApiError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(status_of(self.0.kind())).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(*self.0.0)).into_response()
    }
}

/// What handlers answer.
type Answer<T = Response> = Result<T, Failure>;

/// A JSON body. The content type is not asked for, so that people can curl.
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Failure;
    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        Ok(Self(parse(&body(request).await?)?))
    }
}

/// A JSON body that may be empty.
pub struct OptionalJson<T>(pub T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = Failure;
    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let bytes = body(request).await?;
        if bytes.trim_ascii().is_empty() { Ok(Self(T::default())) } else { Ok(Self(parse(&bytes)?)) }
    }
}

async fn body(request: Request) -> Result<Bytes, ApiError> {
    match Limited::new(request.into_body(), JSON_BODY_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(ApiError::new(
            ErrorKind::TooLarge,
            format!("the JSON body is larger than {JSON_BODY_MAX} bytes"),
        )
        .hint("put large content into a file of the sandbox, or stream it")),
        Err(_) => Err(invalid("the request's body ended before its length was reached")),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| invalid(format!("the JSON body is not valid: {error}")))
}

/// Query parameters; unknown ones are refused by the types themselves.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => {
                let cause = std::error::Error::source(&rejection)
                    .map_or_else(|| rejection.to_string(), ToString::to_string);
                Err(invalid(format!("the query is not valid: {cause}")).into())
            }
        }
    }
}

/// The parts of a path, decoded.
pub struct PathOf<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathOf<T> {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(path)) => Ok(Self(path)),
            Err(rejection) => {
                Err(invalid(format!("the path is not valid: {}", rejection.body_text())).into())
            }
        }
    }
}

/// The running sandbox that the path names, resumed if it was paused; for as long as it is held the sandbox is in use.
pub struct In(pub Entered);

#[derive(serde::Deserialize)]
struct SandboxPath {
    id: String,
}

impl FromRequestParts<Arc<Node>> for In {
    type Rejection = Failure;
    async fn from_request_parts(parts: &mut Parts, node: &Arc<Node>) -> Result<Self, Failure> {
        let PathOf(SandboxPath { id }) = PathOf::from_request_parts(parts, node).await?;
        let caller = Caller::from_request_parts(parts, node).await?;
        Ok(Self(caller.find(node, &id)?.enter().await?))
    }
}

/// JSON with a status.
fn json<T: Serialize>(status: StatusCode, value: &T) -> Response {
    (status, axum::Json(value)).into_response()
}

/// Lines of JSON.
fn ndjson(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

type Shared = State<Arc<Node>>;
