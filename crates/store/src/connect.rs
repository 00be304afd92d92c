//! From settings to an open backend: a directory, or a bucket through hyper and rustls.
//!
//! The bucket's HTTP client is hyper's and not the one that `object_store` brings, which would build a second cryptographic library
//! beside the workspace's and loads certificates also where only plain HTTP is spoken.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::{Client, connect::HttpConnector as TcpConnector};
use hyper_util::rt::TokioExecutor;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::local::LocalFileSystem;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientOptions, GetOptions, ObjectStore, RetryConfig};
use rustls::{ClientConfig, RootCertStore};
use serde::{Deserialize, Serialize};

use crate::error::StoreError;

/// How long a bucket may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a removal on a disk of this host may take.
const LOCAL_REMOVAL_MAX: Duration = Duration::from_secs(60);
/// And in a directory that several hosts mount: what waits for a server that is gone is sent when it is back.
const SHARED_REMOVAL_MAX: Duration = Duration::from_secs(1800);
/// Longest answer that is not an object's content: a page of a list is the longest.
const ANSWER_MAX: u64 = 16 << 20;
/// Idle connections kept open to a bucket: as many as uploads and fetches under way at once are likely to need.
const IDLE_CONNECTIONS_MAX: usize = 64;

/// Which store, and how it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StoreSettings {
    /// `/path`, `file:///path` or `s3://bucket/prefix`.
    pub url: String,
    /// Whether a directory that is no store is made one. Without it such a directory is refused: its mount may be missing. Buckets are
    /// made stores without being told.
    #[serde(default)]
    pub create: bool,
    /// The bucket's server if it is not Amazon's, such as `https://storage:9000`. Else `AWS_ENDPOINT_URL`.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// Else `AWS_REGION`, else `us-east-1`.
    #[serde(default)]
    pub region: Option<String>,
    /// Else `AWS_ACCESS_KEY_ID`, or what the machine's role gives.
    #[serde(default)]
    pub access_key_id: Option<String>,
    /// Else `AWS_SECRET_ACCESS_KEY`.
    #[serde(default)]
    pub secret_access_key: Option<String>,
    /// Whether the server may be spoken to in the clear.
    #[serde(default)]
    pub allow_http: bool,
    /// How long one request may take, its body included, in milliseconds. A pack is 32 MiB.
    #[serde(default = "request_ms_default")]
    pub request_ms_max: u64,
    /// How long a request is tried again when the server fails or is not there, in milliseconds.
    #[serde(default = "retry_ms_default")]
    pub retry_ms_max: u64,
}

fn request_ms_default() -> u64 {
    60_000
}

fn retry_ms_default() -> u64 {
    30_000
}

impl StoreSettings {
    /// The store at this place, all else by default.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            create: false,
            endpoint: None,
            region: None,
            access_key_id: None,
            secret_access_key: None,
            allow_http: false,
            request_ms_max: request_ms_default(),
            retry_ms_max: retry_ms_default(),
        }
    }

    /// Whether they name a directory, not a bucket.
    pub fn is_directory(&self) -> bool {
        self.path().is_some()
    }

    fn path(&self) -> Option<&str> {
        let path = self.url.strip_prefix("file://").unwrap_or(&self.url);
        path.starts_with('/').then_some(path)
    }

    /// Whether they name a store, which is not asked: it may be away.
    ///
    /// # Errors
    /// [`StoreError::Settings`].
    pub fn check(&self) -> Result<(), StoreError> {
        if self.is_directory() {
            // Not even looked at: one whose server is gone may not answer for ever.
            return Ok(());
        }
        match open(self, false) {
            Err(error @ StoreError::Settings { .. }) => Err(error),
            _ => Ok(()),
        }
    }
}

/// An open backend.
pub(crate) struct Backend {
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// The same place without a flush after each write, for leases: they need to be seen and not to outlive a crash.
    pub(crate) brief: Arc<dyn ObjectStore>,
    /// The same place, where no request is sent twice.
    pub(crate) once: Arc<dyn ObjectStore>,
    /// How long a removal is waited for; one that was sent may arrive as much later again, and no later.
    pub(crate) removal_max: Duration,
    /// The directory, if it is one.
    pub(crate) directory: Option<PathBuf>,
}

/// Opens the backend; `create` makes a directory that is not there.
pub(crate) fn open(settings: &StoreSettings, create: bool) -> Result<Backend, StoreError> {
    let bad = |problem: String| StoreError::Settings { given: settings.url.clone(), problem };
    if let Some(path) = settings.path() {
        if create {
            std::fs::create_dir_all(path).map_err(|error| bad(format!("it cannot be made: {error}")))?;
        }
        let open = || {
            LocalFileSystem::new_with_prefix(path).map_err(|error| StoreError::Unavailable {
                store: settings.url.clone(),
                what: "its directory".to_owned(),
                source: Box::new(error),
            })
        };
        let objects: Arc<dyn ObjectStore> = Arc::new(open()?.with_fsync(true));
        let directory = PathBuf::from(path);
        let removal_max = if is_on_this_host(&directory) { LOCAL_REMOVAL_MAX } else { SHARED_REMOVAL_MAX };
        let brief = Arc::new(open()?);
        return Ok(Backend {
            once: Arc::clone(&objects),
            objects,
            brief,
            removal_max,
            directory: Some(directory),
        });
    }
    let Some(rest) = settings.url.strip_prefix("s3://") else {
        return Err(bad("it must be /path, file:///path or s3://bucket/prefix".to_owned()));
    };
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(bad("the bucket has no name".to_owned()));
    }
    let retry = RetryConfig {
        backoff: BackoffConfig { max_backoff: Duration::from_secs(3), ..BackoffConfig::default() },
        retry_timeout: Duration::from_millis(settings.retry_ms_max),
        ..RetryConfig::default()
    };
    let timeout = Duration::from_millis(settings.request_ms_max);
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_client_options(ClientOptions::new().with_allow_http(settings.allow_http));
    for (key, value) in [
        (AmazonS3ConfigKey::Endpoint, &settings.endpoint),
        (AmazonS3ConfigKey::Region, &settings.region),
        (AmazonS3ConfigKey::AccessKeyId, &settings.access_key_id),
        (AmazonS3ConfigKey::SecretAccessKey, &settings.secret_access_key),
    ] {
        if let Some(value) = value {
            builder = builder.with_config(key, value);
        }
    }
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
    let plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    if plain && !settings.allow_http {
        return Err(bad(
            "its endpoint is plain http: set allow_http if the network may be trusted".to_owned()
        ));
    }
    let builder = builder.with_http_connector(Hyper { timeout, plain });
    let build = |retry| -> Result<Arc<dyn ObjectStore>, StoreError> {
        let objects = builder.clone().with_retry(retry).build().map_err(|error| bad(error.to_string()))?;
        Ok(match prefix.trim_matches('/') {
            "" => Arc::new(objects),
            prefix => Arc::new(PrefixStore::new(objects, prefix)),
        })
    };
    let once = build(RetryConfig { max_retries: 0, ..retry.clone() })?;
    let objects = build(retry)?;
    Ok(Backend { brief: Arc::clone(&objects), objects, once, removal_max: timeout, directory: None })
}

/// Whether the directory is on a disk of this host, as far as its file system is known; one that cannot be asked is not.
fn is_on_this_host(directory: &Path) -> bool {
    /// `f_type` of statfs(2): ext4, XFS, Btrfs, tmpfs, overlayfs, F2FS, ZFS.
    const LOCAL: [u32; 7] =
        [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0xf2f5_2010, 0x2fc1_2fc1];
    rustix::fs::statfs(directory).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// Makes the HTTP clients of a bucket.
#[derive(Debug)]
struct Hyper {
    timeout: Duration,
    /// The endpoint is plain HTTP.
    plain: bool,
}

impl HttpConnector for Hyper {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = TcpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let tls = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(self.tls()?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client =
            Client::builder(TokioExecutor::new()).pool_max_idle_per_host(IDLE_CONNECTIONS_MAX).build(tls);
        Ok(HttpClient::new(Service { client, timeout: self.timeout }))
    }
}

impl Hyper {
    /// With the host's certificates, or none if nothing but plain HTTP will be spoken.
    fn tls(&self) -> object_store::Result<ClientConfig> {
        let failed = |source| object_store::Error::Generic { store: "S3", source };
        let mut roots = RootCertStore::empty();
        if !self.plain {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                return Err(failed("this host has no certificates to check the server's with".into()));
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(Box::new(error)))?;
        Ok(config.with_root_certificates(roots).with_no_client_auth())
    }
}

/// Most bytes of a body that are read into memory; goes with a request.
#[derive(Debug, Clone, Copy)]
struct BodyMax(u64);

/// A read of at most so many bytes. A bucket's answer that is longer is not read at all, or not on from there.
pub(crate) fn up_to(max: u64) -> GetOptions {
    let mut options = GetOptions::default();
    options.extensions.insert(BodyMax(max));
    options
}

/// One HTTP client.
#[derive(Debug)]
struct Service {
    client: Client<HttpsConnector<TcpConnector>, HttpRequestBody>,
    timeout: Duration,
}

#[async_trait::async_trait]
impl HttpService for Service {
    /// Reads the whole answer, so that the time limit is on all of it and a body that breaks off is tried again.
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let max = request.extensions().get::<BodyMax>().map_or(ANSWER_MAX, |max| max.0);
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| {
                let kind =
                    if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
                HttpError::new(kind, error)
            })?;
            let (head, body) = response.into_parts();
            let length =
                head.headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
            let bytes = match length {
                // Who asked sees the length and reads no further. To a question for the length alone no bytes come.
                Some(length) if max < length => Bytes::new(),
                _ => collect(body, max).await?,
            };
            let body = http_body_util::Full::new(bytes).map_err(|never| match never {});
            Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
        };
        match tokio::time::timeout(self.timeout, exchange).await {
            Ok(done) => done,
            Err(elapsed) => Err(HttpError::new(HttpErrorKind::Timeout, elapsed)),
        }
    }
}

/// A body's bytes, unless there are too many.
async fn collect<B>(body: B, max: u64) -> Result<Bytes, HttpError>
where
    B: http_body_util::BodyExt,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let limited = Limited::new(body, usize::try_from(max).unwrap_or(usize::MAX));
    let collected = limited.collect().await.map_err(|error| {
        let is_long = error.is::<LengthLimitError>();
        // Asked again, it would be as long.
        let kind = if is_long { HttpErrorKind::Decode } else { HttpErrorKind::Interrupted };
        let long = || std::io::Error::other(format!("the answer goes on after {max} bytes"));
        HttpError::new(kind, if is_long { long() } else { std::io::Error::other(error) })
    })?;
    Ok(collected.to_bytes())
}
