//! What is done with layers beyond their names, and the care of their store. Images are layers of the kind `base`.

use dsec_proto::rest::{CollectEvent, Image, LayerTrace, PrefetchEvent, PrefetchRequest, VerifyEvent};
use utoipa::IntoParams;

use super::store::on_one_node;
use super::{Call, prefetch as on_nodes};
use crate::failure::Reply;
use crate::forward::BodyKind;

/// Query of a collection.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "documents what the nodes parse")]
pub(crate) struct CollectQuery {
    /// What is younger stays, seconds. Default: a day.
    grace_s: Option<u64>,
    /// Layers of recipes' steps that were used since stay, seconds. Default: a week.
    step_age_s: Option<u64>,
}

/// What first runs read of a layer, which later ones find prefetched.
#[utoipa::path(get, path = "/v1/layers/{kind}/{name}/trace", operation_id = "get_layer_trace", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    responses((status = 200, description = "By blob.", body = LayerTrace)))]
pub async fn trace(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Brings content of a layer to all nodes, or to those named.
///
/// Answers a line of JSON (`PrefetchEvent`) for each step; the last is `done` or `error`. Ends when the caller hangs up.
#[utoipa::path(post, path = "/v1/layers/{kind}/{name}/prefetch", operation_id = "prefetch_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    request_body(content = Option<PrefetchRequest>),
    responses((status = 200, description = "How it goes, a line each.", body = PrefetchEvent, content_type = "application/x-ndjson")))]
pub async fn prefetch(call: Call) -> Reply {
    on_nodes::prefetch(call).await
}

/// Reads a layer and its parents whole from the store and checks every digest.
///
/// Answers a line of JSON (`VerifyEvent`) for each step; the last is `done` or `error`. Ends when the caller hangs up.
#[utoipa::path(post, path = "/v1/layers/{kind}/{name}/verify", operation_id = "verify_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    responses((status = 200, description = "How it goes, a line each.", body = VerifyEvent, content_type = "application/x-ndjson")))]
pub async fn verify_layer(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// A layer, with those below it, as a tar of an OCI layout.
#[utoipa::path(get, path = "/v1/layers/{kind}/{name}/export", operation_id = "export_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    responses((status = 200, description = "The archive; one that is cut off has no end.", body = Vec<u8>, content_type = "application/x-tar")))]
pub async fn export(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Puts a tag on the version that a name means, wherever the tag was before.
#[utoipa::path(put, path = "/v1/layers/{kind}/{name}/tags/{tag}", operation_id = "tag_layer", tag = "images",
    params(("kind" = String, Path, description = "Its kind."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded."),
        ("tag" = String, Path, description = "The tag.")),
    responses((status = 200, description = "The layer under its tag.", body = Image)))]
pub async fn tag(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// What a step of a recipe came to. It counts as used now, which keeps it for a week.
#[utoipa::path(get, path = "/v1/steps/{key}", operation_id = "get_step", tag = "images",
    params(("key" = String, Path, description = "Its key, as `step` of a pack gave it.")),
    responses((status = 200, description = "The layer.", body = Image)))]
pub async fn step(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Gives the layer of a step a name of its kind: of an image, a name for sandboxes to start from.
#[utoipa::path(put, path = "/v1/steps/{key}/names/{name}", operation_id = "name_step", tag = "images",
    params(("key" = String, Path, description = "Its key, as `step` of a pack gave it."),
        ("name" = String, Path, description = "`name`, `name:tag` or `name@version`, percent-encoded.")),
    responses((status = 200, description = "The layer under its name.", body = Image)))]
pub async fn name_step(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Reads all layers of the store whole and checks every digest.
///
/// Answers a line of JSON (`VerifyEvent`) for each step; the last is `done` or `error`. Ends when the caller hangs up.
#[utoipa::path(post, path = "/v1/store/verify", operation_id = "verify_store", tag = "images",
    responses((status = 200, description = "How it goes, a line each.", body = VerifyEvent, content_type = "application/x-ndjson")))]
pub async fn verify_store(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}

/// Removes from the store what nothing refers to any more, as nodes do once an hour.
///
/// Answers a line of JSON (`CollectEvent`) now and then; the last is `done` or `error`.
#[utoipa::path(post, path = "/v1/store/collect", operation_id = "collect_store", tag = "images", params(CollectQuery),
    responses((status = 200, description = "How it goes, a line each.", body = CollectEvent, content_type = "application/x-ndjson")))]
pub async fn collect(call: Call) -> Reply {
    on_one_node(call, BodyKind::Raw).await
}
