//! Images. They live on the nodes. With one node every path is that node's; with several, reading
//! looks at all of them, and changing is refused until there is a store that the nodes share.

use std::sync::Arc;

use dsec_model::ErrorKind;
use dsec_proto::rest::{Image, ImageList, ImportEvent, PullRequest};
use utoipa::IntoParams;

use super::{Call, lists};
use crate::failure::{Failure, Reply};
use crate::forward::BodyKind;

/// Query of an import.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct ImportQuery {
    /// What it is made from, for people: kept as the image's `source`.
    source: Option<String>,
}

/// Lists the images, by name.
#[utoipa::path(get, path = "/v1/images", operation_id = "list_images", tag = "images",
    responses((status = 200, description = "The images.", body = ImageList)))]
pub async fn list(call: Call) -> Reply {
    match call.app.nodes.only() {
        Some(node) => {
            let node = Arc::clone(node);
            call.forward(&node, BodyKind::Raw).await
        }
        None => lists::images(call).await,
    }
}

/// One image.
#[utoipa::path(get, path = "/v1/images/{name}", operation_id = "get_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "The image.", body = Image)))]
pub async fn get(call: Call) -> Reply {
    match call.app.nodes.only() {
        Some(node) => {
            let node = Arc::clone(node);
            call.forward(&node, BodyKind::Raw).await
        }
        None => lists::image(call).await,
    }
}

/// Imports an image: a rootfs tar, an OCI layout as a tar, or a `docker save` archive, compressed or not.
///
/// Answers a line of JSON (`ImportEvent`) for each step; the last is `done` or `error`.
#[utoipa::path(put, path = "/v1/images/{name}", operation_id = "import_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded."), ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn import(call: Call) -> Reply {
    on_the_only_node(call).await
}

/// Imports an image that the node gets from a registry. Layers that the platform has are not fetched again.
///
/// Answers as an import does.
#[utoipa::path(post, path = "/v1/images/{name}/pull", operation_id = "pull_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded.")),
    request_body = PullRequest,
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn pull(call: Call) -> Reply {
    to_the_only_node(call, BodyKind::Json).await
}

/// Removes an image; refused while sandboxes use it.
#[utoipa::path(delete, path = "/v1/images/{name}", operation_id = "remove_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 204, description = "Removed.")))]
pub async fn remove(call: Call) -> Reply {
    on_the_only_node(call).await
}

/// Lists the layers of a kind, by name.
#[utoipa::path(get, path = "/v1/layers/{kind}", operation_id = "list_layers", tag = "images",
    params(("kind" = String, Path, description = "`base`, `workspace`, `toolkit` or `snapshot`.")),
    responses((status = 200, description = "The layers.", body = ImageList)))]
pub async fn list_layers(call: Call) -> Reply {
    on_the_only_node(call).await
}

/// One layer.
#[utoipa::path(get, path = "/v1/layers/{kind}/{name}", operation_id = "get_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    responses((status = 200, description = "The layer.", body = Image)))]
pub async fn get_layer(call: Call) -> Reply {
    on_the_only_node(call).await
}

/// Imports a layer: as an image is, to lie over one.
#[utoipa::path(put, path = "/v1/layers/{kind}/{name}", operation_id = "import_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded."), ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn import_layer(call: Call) -> Reply {
    on_the_only_node(call).await
}

/// Imports a layer that the node gets from a registry: as an image is, to lie over one.
#[utoipa::path(post, path = "/v1/layers/{kind}/{name}/pull", operation_id = "pull_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    request_body = PullRequest,
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn pull_layer(call: Call) -> Reply {
    to_the_only_node(call, BodyKind::Json).await
}

/// Removes a layer's name; refused while sandboxes use it.
#[utoipa::path(delete, path = "/v1/layers/{kind}/{name}", operation_id = "remove_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 204, description = "Removed.")))]
pub async fn remove_layer(call: Call) -> Reply {
    on_the_only_node(call).await
}

pub(super) async fn on_the_only_node(call: Call) -> Reply {
    to_the_only_node(call, BodyKind::Raw).await
}

async fn to_the_only_node(call: Call, body: BodyKind) -> Reply {
    let Some(node) = call.app.nodes.only() else {
        return Err(Failure::new(
            ErrorKind::Unsupported,
            format!("this is done on one node, and there are {}", call.app.nodes.all().len()),
        )
        .hint("do it on each node, with a dsec-control that has that node alone"));
    };
    let node = Arc::clone(node);
    call.forward(&node, body).await
}
