//! The OpenAPI document, generated from the handlers. `openapi/dsec.json` is a copy of it that the
//! repository keeps, so that a change of the surface shows in review; a test compares the two.

use std::sync::OnceLock;

use dsec_proto::rest;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Components, Content, Ref, RefOr, Response};
use utoipa::{Modify, OpenApi};

use crate::api::{
    batch, cluster, counts, execs, files, identities, images, layers, nodes, pools, ports, projects,
    releases, sandboxes, sessions, system, tasks,
};

#[derive(OpenApi)]
#[openapi(
    info(title = "dsec", description = "Sandboxes for agentic reinforcement learning. How the paths behave is in docs/reference/http-api.md.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")),
    paths(
        sandboxes::create, batch::create, sandboxes::list, sandboxes::get, sandboxes::update, sandboxes::stop, sandboxes::remove, sandboxes::pause,
        sandboxes::resume, sandboxes::logs,
        sandboxes::pack, counts::get,
        execs::start, execs::list, execs::get, execs::stdout, execs::stderr, execs::attach, execs::stdin,
        execs::signal, execs::resize,
        sessions::open, sessions::list, sessions::get, sessions::close,
        files::read, files::write, files::remove, files::stat, files::list, files::mkdir, files::rename,
        files::watch, files::pack, files::unpack,
        ports::http, ports::tcp,
        images::list, images::get, images::import, images::pull, images::remove,
        images::list_layers, images::get_layer, images::import_layer, images::pull_layer, images::remove_layer,
        layers::trace, layers::prefetch, layers::verify_layer, layers::export, layers::tag, layers::verify_store,
        layers::collect, layers::step, layers::name_step,
        tasks::list, tasks::get, tasks::stop, tasks::pause, tasks::resume, tasks::wait,
        nodes::list, nodes::get, nodes::cordon, nodes::uncordon, nodes::drain, pools::list, pools::sync,
        releases::get, releases::put, releases::try_release, releases::try_config, releases::end_trial,
        cluster::get, cluster::make, cluster::token, cluster::members, cluster::forget, cluster::join, cluster::announce,
        projects::list, projects::create, projects::get, projects::change, projects::remove, projects::stop, projects::pause,
        projects::resume, projects::wait,
        identities::whoami, identities::list, identities::create, identities::get, identities::remove, identities::create_key,
        identities::revoke_key, identities::list_grants, identities::create_grant, identities::revoke_grant, identities::audit,
        system::healthz, system::openapi, system::metrics,
    ),
    components(schemas(rest::ErrorBody, rest::NodeStatus, rest::AttachEvent, rest::FileEvent)),
    security(("key" = [])),
    tags(
        (name = "sandboxes", description = "Creating, finding and ending sandboxes."),
        (name = "commands", description = "Commands in a sandbox."),
        (name = "sessions", description = "Shell sessions: cwd, variables and background jobs stay between lines."),
        (name = "files", description = "Files in a sandbox."),
        (name = "ports", description = "Servers that run in a sandbox."),
        (name = "images", description = "What sandboxes are made of: images, and the layers over them."),
        (name = "tasks", description = "All sandboxes of a job, as one."),
        (name = "projects", description = "Projects, what they may use, and all sandboxes of one as one."),
        (name = "identities", description = "Who may do what: identities, their keys, what they were given, and the audit log."),
        (name = "nodes", description = "The machines that sandboxes run on."),
        (name = "cluster", description = "Machines that join over the network."),
        (name = "system", description = "The platform itself."),
    ),
    modifiers(&Common),
)]
struct Document;

/// What all operations have in common: the key, and the failures.
struct Common;

/// Status, name and description of each failure, in the order of `docs/reference/http-api.md`.
const FAILURES: [(&str, &str, &str); 11] = [
    ("400", "InvalidArgument", "`invalid_argument`: malformed, or out of its range."),
    ("401", "Unauthenticated", "`unauthenticated`: no such key."),
    ("403", "PermissionDenied", "`permission_denied`: the key may not."),
    ("404", "NotFound", "`not_found`: no such sandbox, image, exec, session, file, path."),
    (
        "409",
        "Conflict",
        "`already_exists`, `conflict`: it is there with other content; wrong state; image in use.",
    ),
    ("413", "TooLarge", "`too_large`: over a limit of the platform."),
    ("429", "ResourceExhausted", "`resource_exhausted`: the node has no room now."),
    ("500", "Internal", "`internal`: a defect or a failing host."),
    ("501", "Unsupported", "`unsupported`: this host's kernel cannot."),
    ("503", "Unavailable", "`unavailable`: the node or the agent cannot be reached now."),
    ("504", "DeadlineExceeded", "`deadline_exceeded`: a time limit of the request ran out."),
];

impl Modify for Common {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_with(Components::new);
        let key = Http::builder()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some(
                "A key, such as the one that `dsec up` writes to `~/.config/dsec/config.toml`.",
            ))
            .build();
        components.add_security_scheme("key", SecurityScheme::Http(key));
        let nodes = ArrayBuilder::new().items(Ref::from_schema_name("NodeStatus"));
        let list = ObjectBuilder::new()
            .description(Some("The nodes."))
            .property("nodes", nodes)
            .required("nodes")
            .build();
        components.schemas.insert("NodeList".to_owned(), list.into());
        for (_, name, description) in FAILURES {
            let body = Content::new(Some(RefOr::Ref(Ref::from_schema_name("ErrorBody"))));
            let response = Response::builder().description(description).content("application/json", body);
            components.responses.insert(name.to_owned(), response.build().into());
        }
        for (path, item) in &mut document.paths.paths {
            name_by_method(item);
            for operation in operations(item) {
                add_failures(path, operation);
                add_node(operation);
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.delete,
        &mut item.options,
        &mut item.head,
        &mut item.patch,
    ]
    .into_iter()
    .flatten()
}

/// Every path below a key can fail in every way of the table; those that need none can only be
/// unavailable.
fn add_failures(path: &str, operation: &mut Operation) {
    let open = matches!(path, "/healthz" | "/v1/openapi.json");
    for (status, name, _) in FAILURES {
        if open && status != "503" && status != "500" {
            continue;
        }
        let response = Ref::new(format!("#/components/responses/{name}"));
        operation.responses.responses.entry(status.to_owned()).or_insert(RefOr::Ref(response));
    }
}

/// Every call about layers and their store may name the node that is to carry it out.
fn add_node(operation: &mut Operation) {
    if !operation.tags.iter().flatten().any(|tag| tag == "images") {
        return;
    }
    let is_prefetch = operation.operation_id.as_deref() == Some("prefetch_layer");
    let description = match is_prefetch {
        true => "The nodes that are to have it; may be repeated. Default: all.",
        false => "The node that is to do it. Default: any, for which all nodes must share one layer store.",
    };
    let node = ParameterBuilder::new()
        .name("node")
        .parameter_in(ParameterIn::Query)
        .description(Some(description))
        .schema(Some(ObjectBuilder::new().schema_type(Type::String)));
    operation.parameters.get_or_insert_default().push(node.build());
}

/// One function serves every method of the ports' path, and an operation's id must be unique.
fn name_by_method(item: &mut PathItem) {
    let Some(shared) = item.get.as_ref().and_then(|get| get.operation_id.clone()) else {
        return;
    };
    let others = [
        (&mut item.put, "put"),
        (&mut item.post, "post"),
        (&mut item.delete, "delete"),
        (&mut item.options, "options"),
        (&mut item.head, "head"),
        (&mut item.patch, "patch"),
    ];
    for (operation, method) in others {
        if let Some(operation) = operation
            && operation.operation_id.as_ref() == Some(&shared)
        {
            operation.operation_id = Some(format!("{shared}_{method}"));
        }
    }
}

/// The document: pretty JSON that ends in a newline, the same bytes each time.
pub fn document() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        // The types serialise to JSON by construction; an empty document fails the tests.
        let mut text = Document::openapi().to_pretty_json().unwrap_or_default();
        text.push('\n');
        text
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::api::ROUTES;

    fn parsed() -> serde_json::Value {
        serde_json::from_str(document()).unwrap()
    }

    #[test]
    fn the_copy_in_the_repository_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../openapi/dsec.json");
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        assert!(kept == document(), "openapi/dsec.json is stale: run `cargo xtask openapi`");
    }

    #[test]
    fn what_is_served_is_documented_and_the_other_way_round() {
        let documented: BTreeSet<String> = parsed()["paths"]
            .as_object()
            .unwrap()
            .keys()
            .map(|path| path.replace("{path}", "{*path}"))
            .collect();
        let served: BTreeSet<String> = ROUTES
            .iter()
            .filter(|route| !route.ends_with("/http") && !route.ends_with("/http/"))
            .map(|route| (*route).to_owned())
            .collect();
        assert_eq!(documented, served);
    }

    #[test]
    fn operations_have_unique_ids_and_every_reference_leads_somewhere() {
        let document = parsed();
        let mut ids = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let id =
                    operation["operationId"].as_str().unwrap_or_else(|| panic!("{method} {path} has no id"));
                assert!(ids.insert(id.to_owned()), "{id} is there twice");
                assert!(operation["responses"]["503"].is_object(), "{id} cannot be unavailable");
            }
        }
        let text = super::document();
        for reference in text.split("\"#/").skip(1) {
            let pointer = format!("/{}", reference.split('"').next().unwrap());
            assert!(document.pointer(&pointer).is_some_and(|it| it.is_object()), "nothing at {pointer}");
        }
    }
}
