//! The routes. Handlers are thin: what they say about themselves becomes the OpenAPI document, what
//! they do is one line. Taking a [`Call`], a [`SandboxCall`] or a [`NodeCall`] is what authenticates; only the three
//! paths of [`system`] that anybody may ask do without.

pub mod batch;
mod call;
pub mod cluster;
pub mod counts;
pub mod execs;
pub mod files;
pub mod identities;
pub mod images;
pub mod layers;
mod listing;
mod lists;
pub mod nodes;
pub mod pools;
pub mod ports;
mod prefetch;
pub mod projects;
pub mod releases;
pub mod sandboxes;
pub mod sessions;
mod store;
pub mod system;
pub mod tasks;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{any, delete, get, post, put};

use crate::access;
use crate::app::App;

pub use call::{Call, NodeCall, SandboxCall};

/// Every template of [`router`]: what metrics and logs call a path by.
pub const ROUTES: [&str; 86] = [
    "/healthz",
    "/metrics",
    "/v1/openapi.json",
    "/v1/whoami",
    "/v1/projects",
    "/v1/projects/{project}",
    "/v1/projects/{project}/stop",
    "/v1/projects/{project}/pause",
    "/v1/projects/{project}/resume",
    "/v1/projects/{project}/wait",
    "/v1/identities",
    "/v1/identities/{identity}",
    "/v1/identities/{identity}/keys",
    "/v1/keys/{key}",
    "/v1/grants",
    "/v1/grants/{grant}",
    "/v1/audit",
    "/v1/nodes",
    "/v1/nodes/{node}",
    "/v1/nodes/{node}/cordon",
    "/v1/nodes/{node}/uncordon",
    "/v1/nodes/{node}/drain",
    "/v1/pools",
    "/v1/pools/{pool}/sync",
    "/v1/nodes/{node}/release",
    "/v1/nodes/{node}/releases/{release}",
    "/v1/nodes/{node}/release/try",
    "/v1/nodes/{node}/config/try",
    "/v1/nodes/{node}/trial/end",
    "/v1/cluster",
    "/v1/cluster/tokens",
    "/v1/cluster/nodes",
    "/v1/cluster/nodes/{node}",
    "/v1/cluster/join",
    "/v1/cluster/announce",
    "/v1/images",
    "/v1/images/{name}",
    "/v1/images/{name}/pull",
    "/v1/layers/{kind}",
    "/v1/layers/{kind}/{name}",
    "/v1/layers/{kind}/{name}/pull",
    "/v1/layers/{kind}/{name}/trace",
    "/v1/layers/{kind}/{name}/prefetch",
    "/v1/layers/{kind}/{name}/verify",
    "/v1/layers/{kind}/{name}/export",
    "/v1/layers/{kind}/{name}/tags/{tag}",
    "/v1/steps/{key}",
    "/v1/steps/{key}/names/{name}",
    "/v1/store/verify",
    "/v1/store/collect",
    "/v1/tasks",
    "/v1/tasks/{task}",
    "/v1/tasks/{task}/stop",
    "/v1/tasks/{task}/pause",
    "/v1/tasks/{task}/resume",
    "/v1/tasks/{task}/wait",
    "/v1/counts",
    "/v1/sandboxes",
    "/v1/sandboxes/batch",
    "/v1/sandboxes/{id}",
    "/v1/sandboxes/{id}/stop",
    "/v1/sandboxes/{id}/pause",
    "/v1/sandboxes/{id}/resume",
    "/v1/sandboxes/{id}/logs",
    "/v1/sandboxes/{id}/pack",
    "/v1/sandboxes/{id}/execs",
    "/v1/sandboxes/{id}/execs/{eid}",
    "/v1/sandboxes/{id}/execs/{eid}/stdout",
    "/v1/sandboxes/{id}/execs/{eid}/stderr",
    "/v1/sandboxes/{id}/execs/{eid}/attach",
    "/v1/sandboxes/{id}/execs/{eid}/stdin",
    "/v1/sandboxes/{id}/execs/{eid}/signal",
    "/v1/sandboxes/{id}/execs/{eid}/resize",
    "/v1/sandboxes/{id}/sessions",
    "/v1/sandboxes/{id}/sessions/{sid}",
    "/v1/sandboxes/{id}/files",
    "/v1/sandboxes/{id}/files/stat",
    "/v1/sandboxes/{id}/files/list",
    "/v1/sandboxes/{id}/files/mkdir",
    "/v1/sandboxes/{id}/files/move",
    "/v1/sandboxes/{id}/files/watch",
    "/v1/sandboxes/{id}/archive",
    "/v1/sandboxes/{id}/ports/{port}/http",
    "/v1/sandboxes/{id}/ports/{port}/http/",
    "/v1/sandboxes/{id}/ports/{port}/http/{*path}",
    "/v1/sandboxes/{id}/ports/{port}/tcp",
];

/// The whole surface.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/healthz", get(system::healthz))
        .route("/metrics", get(system::metrics))
        .route("/v1/openapi.json", get(system::openapi))
        .route("/v1/counts", get(counts::get))
        .route("/v1/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/v1/sandboxes/batch", post(batch::create))
        .route("/v1/sandboxes/{id}", get(sandboxes::get).patch(sandboxes::update).delete(sandboxes::remove))
        .route("/v1/sandboxes/{id}/stop", post(sandboxes::stop))
        .route("/v1/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/v1/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/v1/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/v1/sandboxes/{id}/pack", post(sandboxes::pack))
        .merge(projects_and_identities())
        .merge(tasks_and_nodes())
        .merge(members())
        .merge(images_and_layers())
        .merge(execs_and_sessions())
        .merge(files_and_ports())
        .fallback(access::no_such_path)
        .method_not_allowed_fallback(access::no_such_method)
        .layer(from_fn_with_state(Arc::clone(&app), access::around))
        .with_state(app)
}

fn projects_and_identities() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/whoami", get(identities::whoami))
        .route("/v1/projects", get(projects::list).post(projects::create))
        .route("/v1/projects/{project}", get(projects::get).patch(projects::change).delete(projects::remove))
        .route("/v1/projects/{project}/stop", post(projects::stop))
        .route("/v1/projects/{project}/pause", post(projects::pause))
        .route("/v1/projects/{project}/resume", post(projects::resume))
        .route("/v1/projects/{project}/wait", post(projects::wait))
        .route("/v1/identities", get(identities::list).post(identities::create))
        .route("/v1/identities/{identity}", get(identities::get).delete(identities::remove))
        .route("/v1/identities/{identity}/keys", post(identities::create_key))
        .route("/v1/keys/{key}", delete(identities::revoke_key))
        .route("/v1/grants", get(identities::list_grants).post(identities::create_grant))
        .route("/v1/grants/{grant}", delete(identities::revoke_grant))
        .route("/v1/audit", get(identities::audit))
}

fn tasks_and_nodes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/tasks", get(tasks::list))
        .route("/v1/tasks/{task}", get(tasks::get))
        .route("/v1/tasks/{task}/stop", post(tasks::stop))
        .route("/v1/tasks/{task}/pause", post(tasks::pause))
        .route("/v1/tasks/{task}/resume", post(tasks::resume))
        .route("/v1/tasks/{task}/wait", post(tasks::wait))
        .route("/v1/nodes", get(nodes::list))
        .route("/v1/nodes/{node}", get(nodes::get))
        .route("/v1/nodes/{node}/cordon", post(nodes::cordon))
        .route("/v1/nodes/{node}/uncordon", post(nodes::uncordon))
        .route("/v1/nodes/{node}/drain", post(nodes::drain))
        .route("/v1/pools", get(pools::list))
        .route("/v1/pools/{pool}/sync", post(pools::sync))
        .route("/v1/nodes/{node}/release", get(releases::get))
        .route("/v1/nodes/{node}/releases/{release}", put(releases::put))
        .route("/v1/nodes/{node}/release/try", post(releases::try_release))
        .route("/v1/nodes/{node}/config/try", post(releases::try_config))
        .route("/v1/nodes/{node}/trial/end", post(releases::end_trial))
}

fn members() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/cluster", get(cluster::get).post(cluster::make))
        .route("/v1/cluster/tokens", post(cluster::token))
        .route("/v1/cluster/nodes", get(cluster::members))
        .route("/v1/cluster/nodes/{node}", delete(cluster::forget))
        .route("/v1/cluster/join", post(cluster::join))
        .route("/v1/cluster/announce", post(cluster::announce))
}

fn images_and_layers() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/images", get(images::list))
        .route("/v1/images/{name}", get(images::get).put(images::import).delete(images::remove))
        .route("/v1/images/{name}/pull", post(images::pull))
        .route("/v1/layers/{kind}", get(images::list_layers))
        .route(
            "/v1/layers/{kind}/{name}",
            get(images::get_layer).put(images::import_layer).delete(images::remove_layer),
        )
        .route("/v1/layers/{kind}/{name}/pull", post(images::pull_layer))
        .route("/v1/layers/{kind}/{name}/trace", get(layers::trace))
        .route("/v1/layers/{kind}/{name}/prefetch", post(layers::prefetch))
        .route("/v1/layers/{kind}/{name}/verify", post(layers::verify_layer))
        .route("/v1/layers/{kind}/{name}/export", get(layers::export))
        .route("/v1/layers/{kind}/{name}/tags/{tag}", put(layers::tag))
        .route("/v1/steps/{key}", get(layers::step))
        .route("/v1/steps/{key}/names/{name}", put(layers::name_step))
        .route("/v1/store/verify", post(layers::verify_store))
        .route("/v1/store/collect", post(layers::collect))
}

fn execs_and_sessions() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/sandboxes/{id}/execs", get(execs::list).post(execs::start))
        .route("/v1/sandboxes/{id}/execs/{eid}", get(execs::get))
        .route("/v1/sandboxes/{id}/execs/{eid}/stdout", get(execs::stdout))
        .route("/v1/sandboxes/{id}/execs/{eid}/stderr", get(execs::stderr))
        .route("/v1/sandboxes/{id}/execs/{eid}/attach", get(execs::attach))
        .route("/v1/sandboxes/{id}/execs/{eid}/stdin", put(execs::stdin))
        .route("/v1/sandboxes/{id}/execs/{eid}/signal", post(execs::signal))
        .route("/v1/sandboxes/{id}/execs/{eid}/resize", post(execs::resize))
        .route("/v1/sandboxes/{id}/sessions", get(sessions::list).post(sessions::open))
        .route("/v1/sandboxes/{id}/sessions/{sid}", get(sessions::get).delete(sessions::close))
}

fn files_and_ports() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/sandboxes/{id}/files", get(files::read).put(files::write).delete(files::remove))
        .route("/v1/sandboxes/{id}/files/stat", get(files::stat))
        .route("/v1/sandboxes/{id}/files/list", get(files::list))
        .route("/v1/sandboxes/{id}/files/mkdir", post(files::mkdir))
        .route("/v1/sandboxes/{id}/files/move", post(files::rename))
        .route("/v1/sandboxes/{id}/files/watch", get(files::watch))
        .route("/v1/sandboxes/{id}/archive", get(files::pack).put(files::unpack))
        .route("/v1/sandboxes/{id}/ports/{port}/http", any(ports::http))
        .route("/v1/sandboxes/{id}/ports/{port}/http/", any(ports::http))
        .route("/v1/sandboxes/{id}/ports/{port}/http/{*path}", any(ports::http))
        .route("/v1/sandboxes/{id}/ports/{port}/tcp", get(ports::tcp))
}
