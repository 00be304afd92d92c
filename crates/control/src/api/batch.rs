//! Many sandboxes that are alike, in one call: each is placed by itself, and told as soon as it runs.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use dsec_model::ErrorKind;
use dsec_proto::rest::{
    CREATE_AT_ONCE_MAX, CREATE_MANY_MAX, CreateManyEvent, CreateManyRequest, ErrorBody, IDEMPOTENCY_ATTEMPT,
    IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_MAX, Sandbox,
};
use futures_util::stream::FuturesUnordered;
use futures_util::{Stream, StreamExt};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, header};
use http_body_util::{BodyExt, Limited};
use serde_json::json;

use super::call::parsed;
use super::{Call, lists, system};
use crate::app::App;
use crate::behalf::Behalf;
use crate::create::{Create, Needs, attempt, idempotency_key};
use crate::failure::{Failure, Reply};
use crate::forward;

/// Creates under way at once when nothing is said: what some nodes take at a time.
const AT_ONCE_DEFAULT: u32 = 64;
/// What an answer has of each stream of a first command, bytes: control holds it for a moment, of many.
const INLINE_MAX: u64 = 64 << 10;
/// Largest answer to one create, bytes: a record, and two such streams with each byte written as an escape of six.
const ANSWER_MAX: usize = 2 << 20;
/// Bytes that an index adds to the call's idempotency key.
const INDEX_LEN: usize = 6;

/// Creates many sandboxes that are alike, on whatever nodes, and tells each as soon as it runs.
///
/// A failure that all would meet (no such image, a limit out of its range) ends the call after those that are under way. If the caller
/// hangs up no more are begun; those that are there stay until their `ttl_running_stop`. With an idempotency key the same call again
/// finds those of the first.
#[utoipa::path(post, path = "/v1/sandboxes/batch", operation_id = "create_sandboxes", tag = "sandboxes",
    params(("idempotency-key" = Option<String>, Header, description = "1 to 121 visible ASCII characters: the key of each is this, a dot and its index."),
        ("idempotency-attempt" = Option<u32>, Header, description = "As for one.")),
    request_body = CreateManyRequest,
    responses((status = 200, description = "A line for each, in no order, and one for all.", body = CreateManyEvent, content_type = "application/x-ndjson")))]
pub async fn create(call: Call) -> Reply {
    let key = idempotency_key(call.request.headers())?;
    let attempt = attempt(call.request.headers())?;
    if let Some(key) = key.as_ref().filter(|key| key.len() + INDEX_LEN + 1 > IDEMPOTENCY_KEY_MAX) {
        let most = IDEMPOTENCY_KEY_MAX - INDEX_LEN - 1;
        let message = format!("{IDEMPOTENCY_KEY} of many has {} characters; {most} is the most", key.len());
        return Err(bad(IDEMPOTENCY_KEY, message));
    }
    let identity = lists::identity(&call);
    let Call { app, behalf, request } = call;
    let body = forward::whole(request.into_body()).await?;
    let CreateManyRequest { count, at_once, skip, mut sandbox } = parsed(&body)?;
    let at_once = at_once.unwrap_or(AT_ONCE_DEFAULT);
    for (field, value, most) in [("count", count, CREATE_MANY_MAX), ("at_once", at_once, CREATE_AT_ONCE_MAX)]
    {
        if !(1..=most).contains(&value) {
            return Err(bad(field, format!("{field} is {value}; it must be 1 to {most}")));
        }
    }
    if let Some(exec) = &mut sandbox.exec {
        exec.inline_limit_bytes =
            Some(exec.inline_limit_bytes.map_or(INLINE_MAX, |asked| asked.min(INLINE_MAX)));
    }
    let wanted = without(count, &skip);
    let body = serde_json::to_vec(&sandbox)
        .map_err(|error| Failure::new(ErrorKind::Internal, format!("a body cannot be written: {error}")))?;
    let needs = Arc::new(Needs::of(&body));
    let each = Arc::new(Each { app, behalf, identity, body: body.into(), needs, key, attempt });
    let lines = told(each, wanted, at_once);
    Ok(system::text("application/x-ndjson", Body::from_stream(lines)))
}

/// The indices below `count` that no range has. In one pass: a caller may give a million ranges.
fn without(count: u32, ranges: &[[u32; 2]]) -> Vec<u32> {
    let mut steps = vec![0_i64; count as usize + 1];
    for [from, to] in ranges.iter().filter(|[from, to]| from <= to && *from < count) {
        steps[*from as usize] += 1;
        steps[(*to).min(count - 1) as usize + 1] -= 1;
    }
    let mut depth = 0;
    let is_wanted = |index: &u32| {
        depth += steps[*index as usize];
        depth == 0
    };
    (0..count).filter(is_wanted).collect()
}

fn bad(field: &str, message: String) -> Failure {
    Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": field }))
}

/// What all have in common.
struct Each {
    app: Arc<App>,
    behalf: Behalf,
    identity: HeaderMap,
    body: Bytes,
    needs: Arc<Needs>,
    key: Option<String>,
    attempt: Option<u32>,
}

impl Each {
    /// Makes one.
    async fn make(&self, index: u32) -> (u32, Result<Sandbox, ErrorBody>) {
        let made = async {
            let key = self.key.as_ref().map(|key| format!("{key}.{index}"));
            let head = self.head(key.as_deref());
            // Of all batches together, since each answer is held here.
            let _turn = self.app.batch_turns.acquire().await;
            let (body, needs) = (self.body.clone(), Arc::clone(&self.needs));
            let create = Create { head, body, needs, key, attempt: self.attempt };
            let answer = create.place(&self.app, &self.behalf, &self.identity).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await.map_err(|error| {
                Failure::new(ErrorKind::Unavailable, format!("the node broke off its answer: {error}"))
                    .hint("the sandbox may have been made; look before you repeat it")
            })?;
            let body = body.to_bytes();
            if status.is_success() {
                return serde_json::from_slice(&body).map_err(|error| odd(&error));
            }
            let refused: ErrorBody = serde_json::from_slice(&body).map_err(|error| odd(&error))?;
            Err(Failure(dsec_proto::rest::ApiError(Box::new(refused))))
        };
        (index, made.await.map_err(|failure: Failure| *failure.0.0))
    }

    fn head(&self, key: Option<&str>) -> Parts {
        let (mut head, ()) = Request::new(()).into_parts();
        (head.method, head.uri) = (Method::POST, Uri::from_static("/v1/sandboxes"));
        head.headers = self.identity.clone();
        head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = key.and_then(|key| HeaderValue::from_str(key).ok()) {
            head.headers.insert(IDEMPOTENCY_KEY, key);
        }
        if let Some(attempt) = self.attempt {
            head.headers.insert(IDEMPOTENCY_ATTEMPT, HeaderValue::from(attempt));
        }
        head
    }
}

fn odd(error: &serde_json::Error) -> Failure {
    Failure::new(ErrorKind::Unavailable, format!("the node gave an answer that is not understood: {error}"))
}

/// Whether every other would be refused for the same reason. A limit that one node cannot give another may have, and of a sandbox that
/// runs it is its first command that failed.
fn concerns_all(error: &ErrorBody) -> bool {
    use ErrorKind::{InvalidArgument, NotFound, PermissionDenied, TooLarge, Unauthenticated, Unsupported};
    if ["max", "sandbox_id"].iter().any(|fact| error.detail.get(fact).is_some()) {
        return false;
    }
    matches!(
        error.code,
        InvalidArgument | NotFound | PermissionDenied | TooLarge | Unauthenticated | Unsupported
    )
}

/// Where the call is.
struct Going {
    each: Arc<Each>,
    under_way: FuturesUnordered<futures_util::future::BoxFuture<'static, (u32, Result<Sandbox, ErrorBody>)>>,
    wanted: Vec<u32>,
    /// How many of those were begun, and will be at most.
    begun: usize,
    end: usize,
    at_once: u32,
    created: u32,
    failed: u32,
}

impl Going {
    fn begin_more(&mut self) {
        while self.begun < self.end && self.under_way.len() < self.at_once as usize {
            let (each, index) = (Arc::clone(&self.each), self.wanted[self.begun]);
            self.under_way.push(Box::pin(async move { each.make(index).await }));
            self.begun += 1;
        }
    }

    fn hear(&mut self, index: u32, made: Result<Sandbox, ErrorBody>) -> CreateManyEvent {
        match made {
            Ok(sandbox) => {
                self.created += 1;
                CreateManyEvent::Created { index, sandbox: Box::new(sandbox) }
            }
            Err(error) => {
                self.failed += 1;
                if concerns_all(&error) {
                    self.end = self.begun;
                }
                CreateManyEvent::Failed { index, error }
            }
        }
    }
}

/// A line for each as it comes, and one for all.
fn told(each: Arc<Each>, wanted: Vec<u32>, at_once: u32) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let under_way = FuturesUnordered::new();
    let end = wanted.len();
    let going = Going { each, under_way, wanted, begun: 0, end, at_once, created: 0, failed: 0 };
    futures_util::stream::unfold(Some(going), |going| async move {
        let mut going = going?;
        going.begin_more();
        let Some((index, made)) = going.under_way.next().await else {
            let (created, failed) = (going.created, going.failed);
            let left = u32::try_from(going.wanted.len() - going.begun).unwrap_or(u32::MAX);
            return Some((Ok(system::line(&CreateManyEvent::Done { created, failed, left })), None));
        };
        let event = going.hear(index, made);
        Some((Ok(system::line(&event)), Some(going)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_skipped_is_left_out_and_ranges_may_overlap() {
        assert_eq!(without(6, &[]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(without(6, &[[0, 2], [5, 5]]), [3, 4]);
        assert_eq!(without(6, &[[1, 3], [2, 4], [9, 10], [4, 2], [5, u32::MAX]]), [0]);
        assert_eq!(without(1, &[[0, 0]]), Vec::<u32>::new());
    }
}
