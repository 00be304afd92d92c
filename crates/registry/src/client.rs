//! Requests to one registry about one repository: credentials when it asks, references to elsewhere, another try.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use url::Url;

use crate::auth::{Challenge, Credentials, Token, TokenRequest, basic, bearer};
use crate::connect::{Http, client};
use crate::digest::Digest;
use crate::error::PullError;
use crate::limits::Limits;
use crate::places::{Allowed, Places};
use crate::reference::{Reference, authority};

/// References from one place to another that are followed.
const REDIRECTS_MAX: usize = 5;
/// Largest answer of a token service, in bytes.
const TOKEN_BYTES_MAX: u64 = 256 << 10;
/// What names the program in requests.
const AGENT: HeaderValue = HeaderValue::from_static(concat!("dsec/", env!("CARGO_PKG_VERSION")));

/// How a registry is spoken to.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Without TLS, wherever it is. Without this, only a host that is this machine by its name is, and only if no `ca_pem`
    /// is given.
    pub plain_http: bool,
    /// Certificates to trust beside the system's, as PEM.
    pub ca_pem: Option<String>,
    /// What it is shown when it asks.
    pub credentials: Option<Credentials>,
    /// Registries that may be connected to.
    pub allowed: Allowed,
    /// Bounds.
    pub limits: Limits,
}

/// A repository of a registry.
#[derive(Debug)]
pub struct Client {
    http: Http,
    /// Of the registry, with a slash at its end.
    base: Url,
    /// Host and port for errors.
    host: String,
    repository: String,
    credentials: Option<Credentials>,
    limits: Limits,
    granted: Mutex<Granted>,
    /// Held while credentials are exchanged for a token: one request does it for all.
    granting: tokio::sync::Mutex<()>,
}

/// What requests carry.
#[derive(Debug, Default, Clone)]
struct Granted {
    header: Option<HeaderValue>,
    /// How often it was changed.
    generation: u64,
}

/// What a request wants.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Below the repository, such as `manifests/latest`.
    pub(crate) path: &'a str,
    /// For errors.
    pub(crate) what: &'a str,
    pub(crate) headers: &'a [(HeaderName, HeaderValue)],
}

impl Client {
    /// A client of the repository that `reference` names. Nothing is connected yet.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn new(reference: &Reference, settings: &Settings) -> Result<Self, PullError> {
        let is_plain = settings.plain_http || (reference.is_loopback() && settings.ca_pem.is_none());
        let scheme = if is_plain { "http" } else { "https" };
        let host = reference.authority();
        let base = Url::parse(&format!("{scheme}://{host}/v2/{}/", reference.repository()));
        let base = base.map_err(|error| PullError::Strange { host: host.clone(), why: error.to_string() })?;
        let port = base.port_or_known_default().unwrap_or_default();
        let places = Places::new(settings.allowed.clone(), reference.host(), port);
        let header = match &settings.credentials {
            Some(Credentials::RegistryToken(token)) => bearer(token),
            _ => None,
        };
        Ok(Self {
            http: client(Arc::new(places), !is_plain, settings.ca_pem.as_deref())?,
            base,
            host,
            repository: reference.repository().to_owned(),
            credentials: settings.credentials.clone(),
            limits: settings.limits,
            granted: Mutex::new(Granted { header, generation: 0 }),
            granting: tokio::sync::Mutex::default(),
        })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The registry's host and port, for errors.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// A whole answer of at most `most` bytes, with its content type and the digest it claims. Tried again where that may help.
    pub(crate) async fn document(&self, wanted: &Wanted<'_>, most: u64) -> Result<Fetched, PullError> {
        let mut tries = Tries::new(&self.limits);
        loop {
            match self.document_once(wanted, most).await {
                Err(error) if tries.again(&error).await => {}
                other => return other,
            }
        }
    }

    async fn document_once(&self, wanted: &Wanted<'_>, most: u64) -> Result<Fetched, PullError> {
        let response = self.get(wanted).await?;
        let text = |name: HeaderName| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
        let content_type = text(header::CONTENT_TYPE);
        let claimed = text(HeaderName::from_static("docker-content-digest"));
        let bytes = self.whole(response.into_body(), wanted.what, most).await?;
        Ok(Fetched { content_type, claimed: claimed.and_then(|digest| digest.parse().ok()), bytes })
    }

    /// Reads a body whole.
    async fn whole(&self, mut body: Incoming, what: &str, most: u64) -> Result<Vec<u8>, PullError> {
        let mut bytes = Vec::new();
        let read = async {
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| self.broke_off(&self.host, error.into()))?;
                let Ok(data) = frame.into_data() else { continue };
                let found = bytes.len() as u64 + data.len() as u64;
                if found > most {
                    return Err(PullError::TooLarge {
                        what: what.to_owned(),
                        found,
                        max: most,
                        unit: "bytes or more",
                    });
                }
                bytes.extend_from_slice(&data);
            }
            Ok(())
        };
        tokio::time::timeout(self.limits.stall, read).await.unwrap_or_else(|_| Err(self.stalled(what)))?;
        Ok(bytes)
    }

    pub(crate) fn stalled(&self, what: &str) -> PullError {
        let (least, limit_s) = (self.limits.progress_bytes, self.limits.stall.as_secs());
        PullError::Stalled { host: self.host.clone(), what: what.to_owned(), least, limit_s }
    }

    pub(crate) fn broke_off(&self, host: &str, error: Box<dyn Error + Send + Sync>) -> PullError {
        PullError::exchange(host.to_owned(), error)
    }

    /// The answer to one request, its head read: it is a success. Where it wants credentials they are shown, where it refers to
    /// another place that is asked.
    pub(crate) async fn get(&self, wanted: &Wanted<'_>) -> Result<Response<Incoming>, PullError> {
        let strange = |why: String| PullError::Strange { host: self.host.clone(), why };
        let first = self.base.join(wanted.path).map_err(|error| strange(error.to_string()))?;
        let mut is_refreshed = false;
        let mut redirects = 0;
        let mut url = first.clone();
        loop {
            let is_own = url.origin() == self.base.origin();
            let granted = self.granted.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let mut request = Request::get(url.as_str());
            for (name, value) in wanted.headers {
                request = request.header(name, value);
            }
            // What proves who we are is for the registry alone.
            if let Some(header) = granted.header.as_ref().filter(|_| is_own) {
                request = request.header(header::AUTHORIZATION, header);
            }
            let response = self.exchange(&url, request, Bytes::new(), wanted.what).await?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if status == StatusCode::UNAUTHORIZED && is_own && !is_refreshed {
                is_refreshed = true;
                let challenge = Challenge::of(response.headers());
                self.grant(challenge, granted.generation).await?;
                continue;
            }
            if status.is_redirection() {
                let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
                let next = location.and_then(|location| url.join(location).ok());
                let next = next.ok_or_else(|| strange(format!("{status} without a place to look at")))?;
                redirects += 1;
                if redirects > REDIRECTS_MAX {
                    return Err(strange(format!(
                        "it refers to another place more than {REDIRECTS_MAX} times"
                    )));
                }
                url = self.follow(next)?;
                continue;
            }
            return Err(self.refused(&url, &response, wanted.what));
        }
    }

    /// Whether a reference is followed at all; the connection has its own word.
    fn follow(&self, mut url: Url) -> Result<Url, PullError> {
        let host = shown(&url);
        match url.scheme() {
            "https" => {}
            "http" if self.base.scheme() == "http" => {}
            "http" => return Err(PullError::Downgraded { host }),
            other => {
                let why = format!("it refers to a {other:?} address");
                return Err(PullError::Strange { host: self.host.clone(), why });
            }
        }
        // User and password in a reference are nothing a registry needs.
        let (_, _) = (url.set_username(""), url.set_password(None));
        url.set_fragment(None);
        Ok(url)
    }

    fn refused(&self, url: &Url, response: &Response<Incoming>, what: &str) -> PullError {
        let (host, what) = (shown(url), what.to_owned());
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.unauthorized(host),
            StatusCode::NOT_FOUND => PullError::NotFound { host, what },
            status => {
                let after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
                let after_s = after.and_then(|seconds| seconds.trim().parse().ok());
                PullError::Status { host, what, status: status.as_u16(), after_s }
            }
        }
    }

    fn unauthorized(&self, host: String) -> PullError {
        let with_credentials = self.credentials.is_some();
        PullError::Unauthorized { host, repository: self.repository.clone(), with_credentials }
    }

    /// Meets a challenge, unless another request did since `generation`.
    async fn grant(&self, challenge: Option<Challenge>, generation: u64) -> Result<(), PullError> {
        let _one = self.granting.lock().await;
        if self.granted.lock().unwrap_or_else(PoisonError::into_inner).generation != generation {
            return Ok(());
        }
        let header = match challenge {
            Some(Challenge::Basic) => self.credentials.as_ref().and_then(basic),
            Some(Challenge::Bearer { realm, service, scope }) => {
                Some(self.token(realm, service.as_deref(), scope.as_deref()).await?)
            }
            None => None,
        };
        let header = header.ok_or_else(|| self.unauthorized(self.host.clone()))?;
        let mut granted = self.granted.lock().unwrap_or_else(PoisonError::into_inner);
        *granted = Granted { header: Some(header), generation: generation + 1 };
        Ok(())
    }

    async fn token(
        &self,
        realm: Url,
        service: Option<&str>,
        scope: Option<&str>,
    ) -> Result<HeaderValue, PullError> {
        let realm = self.follow(realm)?;
        let credentials = self.credentials.as_ref();
        let TokenRequest { url, form, authorization } =
            TokenRequest::new(&realm, service, scope, &self.repository, credentials);
        let mut request = match &form {
            Some(_) => {
                Request::post(url.as_str()).header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            }
            None => Request::get(url.as_str()),
        };
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let what = "a token";
        let response = self.exchange(&url, request, form.unwrap_or_default().into(), what).await?;
        match response.status() {
            status if status.is_success() => {}
            // Some services say with these that credentials are wrong.
            StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND => return Err(self.unauthorized(shown(&url))),
            _ => return Err(self.refused(&url, &response, what)),
        }
        let bytes = self.whole(response.into_body(), what, TOKEN_BYTES_MAX).await?;
        let header = serde_json::from_slice::<Token>(&bytes).ok().and_then(Token::header);
        header.ok_or_else(|| PullError::Strange { host: shown(&url), why: "it gave no token".to_owned() })
    }

    /// Sends one request to one place and reads the answer's head.
    async fn exchange(
        &self,
        url: &Url,
        request: http::request::Builder,
        body: Bytes,
        what: &str,
    ) -> Result<Response<Incoming>, PullError> {
        let host = shown(url);
        let request = request.header(header::USER_AGENT, AGENT).body(Full::new(body));
        let request =
            request.map_err(|error| PullError::Strange { host: host.clone(), why: error.to_string() })?;
        match tokio::time::timeout(self.limits.stall, self.http.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(self.broke_off(&host, error.into())),
            Err(_) => Err(self.stalled(what)),
        }
    }
}

/// A document as it came.
pub(crate) struct Fetched {
    pub(crate) content_type: Option<String>,
    /// The digest that the registry says it has.
    pub(crate) claimed: Option<Digest>,
    pub(crate) bytes: Vec<u8>,
}

/// Host and port of an address.
fn shown(url: &Url) -> String {
    authority(url.host_str().unwrap_or_default().trim_matches(['[', ']']), url.port())
}

/// Counts tries in a row that got nowhere, and pauses between them.
pub(crate) struct Tries<'a> {
    limits: &'a Limits,
    failed: u32,
}

impl<'a> Tries<'a> {
    pub(crate) fn new(limits: &'a Limits) -> Self {
        Self { limits, failed: 0 }
    }

    /// Something came since the last try.
    pub(crate) fn progress(&mut self) {
        self.failed = 0;
    }

    /// Whether to try again after `error`; pauses before it says so.
    pub(crate) async fn again(&mut self, error: &PullError) -> bool {
        self.failed += 1;
        if !error.is_transient() || self.failed >= self.limits.tries {
            return false;
        }
        tracing::debug!(error = error as &dyn Error, failed = self.failed, "a registry is asked again");
        let asked = match error {
            PullError::Status { after_s: Some(seconds), .. } => Duration::from_secs(*seconds),
            _ => Duration::ZERO,
        };
        tokio::time::sleep(self.pause().max(asked).min(self.limits.pause_max)).await;
        true
    }

    fn pause(&self) -> Duration {
        let doubled = self.limits.pause.saturating_mul(1 << (self.failed - 1).min(16));
        // Up to half as long again, so that those who failed together do not come back together.
        let jitter = getrandom::u32().map_or(0.0, |random| f64::from(random) / f64::from(u32::MAX) / 2.0);
        doubled.mul_f64(1.0 + jitter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(reference: &str, plain_http: bool) -> Client {
        Client::new(&reference.parse().unwrap(), &Settings { plain_http, ..Settings::default() }).unwrap()
    }

    fn followed(client: &Client, to: &str) -> Result<String, PullError> {
        client.follow(Url::parse(to).unwrap()).map(String::from)
    }

    #[test]
    fn tls_is_left_for_nothing_less() {
        let secure = client("registry.example/a", false);
        assert_eq!(secure.base.as_str(), "https://registry.example/v2/a/");
        assert!(matches!(followed(&secure, "http://registry.example/x"), Err(PullError::Downgraded { .. })));
        assert_eq!(
            followed(&secure, "https://u:p@other.example/x?y#z").unwrap(),
            "https://other.example/x?y"
        );
        for plain in [client("localhost:5000/a", false), client("registry.example/a", true)] {
            assert_eq!(plain.base.scheme(), "http");
            assert!(followed(&plain, "http://other.example/").is_ok());
        }
    }

    #[test]
    fn pauses_double_up_to_their_limit() {
        let limits = Limits::default();
        let pause = |failed| Tries { limits: &limits, failed }.pause();
        assert!(pause(1) >= limits.pause && pause(1) <= limits.pause * 3 / 2);
        assert!(pause(4) >= limits.pause * 8);
        assert!(pause(u32::MAX) >= limits.pause_max);
    }
}
