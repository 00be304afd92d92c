//! Images, and layers of every other kind, by name.

use dsec_proto::rest::{Image, ImageList, ImportEvent, PullRequest};
use utoipa::IntoParams;

use super::Call;
use super::store::{self, on_one_node};
use crate::failure::Reply;
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
    store::list(call).await
}

/// One image.
#[utoipa::path(get, path = "/v1/images/{name}", operation_id = "get_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "The image.", body = Image)))]
pub async fn get(call: Call) -> Reply {
    store::get(call).await
}

/// Imports an image: a rootfs tar, an OCI layout as a tar, or a `docker save` archive, compressed or not.
///
/// Answers a line of JSON (`ImportEvent`) for each step; the last is `done` or `error`.
#[utoipa::path(put, path = "/v1/images/{name}", operation_id = "import_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded."), ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn import(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Imports an image that a node gets from a registry. Layers that the platform has are not fetched again.
///
/// Answers as an import does.
#[utoipa::path(post, path = "/v1/images/{name}/pull", operation_id = "pull_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded.")),
    request_body = PullRequest,
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn pull(call: Call) -> Reply {
    on_one_node(call, BodyKind::Json).await
}

/// Removes an image; refused while sandboxes use it.
#[utoipa::path(delete, path = "/v1/images/{name}", operation_id = "remove_image", tag = "images",
    params(("name" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 204, description = "Removed.")))]
pub async fn remove(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Lists the layers of a kind, by name.
#[utoipa::path(get, path = "/v1/layers/{kind}", operation_id = "list_layers", tag = "images",
    params(("kind" = String, Path, description = "`base`, `workspace`, `toolkit` or `snapshot`.")),
    responses((status = 200, description = "The layers.", body = ImageList)))]
pub async fn list_layers(call: Call) -> Reply {
    store::list(call).await
}

/// One layer.
#[utoipa::path(get, path = "/v1/layers/{kind}/{name}", operation_id = "get_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    responses((status = 200, description = "The layer.", body = Image)))]
pub async fn get_layer(call: Call) -> Reply {
    store::get(call).await
}

/// Imports a layer: as an image is, to lie over one.
#[utoipa::path(put, path = "/v1/layers/{kind}/{name}", operation_id = "import_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded."), ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn import_layer(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Imports a layer that a node gets from a registry: as an image is, to lie over one.
#[utoipa::path(post, path = "/v1/layers/{kind}/{name}/pull", operation_id = "pull_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    request_body = PullRequest,
    responses((status = 200, description = "How it goes, a line each.", body = ImportEvent, content_type = "application/x-ndjson")))]
pub async fn pull_layer(call: Call) -> Reply {
    on_one_node(call, BodyKind::Json).await
}

/// Removes a layer's name; refused while sandboxes use it.
#[utoipa::path(delete, path = "/v1/layers/{kind}/{name}", operation_id = "remove_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 204, description = "Removed.")))]
pub async fn remove_layer(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}
