//! Credentials, and what a registry wants to see of them.
//!
//! Nothing is sent before it is asked for. A registry asks with a challenge: for user and password themselves (Basic), or for a
//! token that another server gives for them (Bearer). Source: RFC 9110, and the token specification of the distribution project.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderValue, header};
use serde::Deserialize;
use url::Url;
use url::form_urlencoded::Serializer;

/// What proves who pulls. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// A user and a password.
    Password {
        /// The user.
        user: String,
        /// The password.
        password: String,
    },
    /// What a log-in gave in place of a password; the token service takes it.
    IdentityToken(String),
    /// A token for the registry itself.
    RegistryToken(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password { .. } => "Password",
            Self::IdentityToken(_) => "IdentityToken",
            Self::RegistryToken(_) => "RegistryToken",
        })
    }
}

/// What a registry asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// User and password.
    Basic,
    /// A token of a service.
    Bearer {
        /// Where the service is.
        realm: Url,
        /// What it calls the registry.
        service: Option<String>,
        /// For what the token is to be good.
        scope: Option<String>,
    },
}

impl Challenge {
    /// The challenge of an answer that can be met, tokens before passwords; none if there is no such.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut basic = None;
        for value in headers.get_all(header::WWW_AUTHENTICATE) {
            let Ok(text) = value.to_str() else { continue };
            let Ok(challenges) = http_auth::parse_challenges(text) else { continue };
            for challenge in challenges {
                let param = |name: &str| {
                    let mut params = challenge.params.iter();
                    let found = params.find(|(key, _)| key.eq_ignore_ascii_case(name));
                    found.map(|(_, value)| value.to_unescaped()).filter(|text| !text.is_empty())
                };
                if challenge.scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                } else if challenge.scheme.eq_ignore_ascii_case("bearer")
                    && let Some(realm) = param("realm").and_then(|realm| Url::parse(&realm).ok())
                {
                    return Some(Self::Bearer { realm, service: param("service"), scope: param("scope") });
                }
            }
        }
        basic
    }
}

/// A request to a token service.
pub(crate) struct TokenRequest {
    pub(crate) url: Url,
    /// A form to post; none: it is a GET.
    pub(crate) form: Option<String>,
    pub(crate) authorization: Option<HeaderValue>,
}

impl TokenRequest {
    /// The request that meets a challenge. `repository` is what is pulled from.
    pub(crate) fn new(
        realm: &Url,
        service: Option<&str>,
        scope: Option<&str>,
        repository: &str,
        credentials: Option<&Credentials>,
    ) -> Self {
        let scope = scope.map_or_else(|| format!("repository:{repository}:pull"), str::to_owned);
        let mut url = realm.clone();
        let mut form = None;
        if let Some(Credentials::IdentityToken(token)) = credentials {
            let mut fields = Serializer::new(String::new());
            fields.append_pair("grant_type", "refresh_token").append_pair("client_id", "dsec");
            fields.append_pair("refresh_token", token).append_pair("scope", &scope);
            if let Some(service) = service {
                fields.append_pair("service", service);
            }
            form = Some(fields.finish());
        } else {
            let mut query = url.query_pairs_mut();
            if let Some(service) = service {
                query.append_pair("service", service);
            }
            query.append_pair("scope", &scope);
            if let Some(Credentials::Password { user, .. }) = credentials {
                query.append_pair("account", user);
            }
        }
        Self { url, form, authorization: credentials.and_then(basic) }
    }
}

/// A token service's answer.
#[derive(Deserialize)]
pub(crate) struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Token {
    pub(crate) fn header(self) -> Option<HeaderValue> {
        self.token.or(self.access_token).filter(|token| !token.is_empty()).and_then(|token| bearer(&token))
    }
}

/// User and password as a header, if these credentials are that.
pub(crate) fn basic(credentials: &Credentials) -> Option<HeaderValue> {
    let Credentials::Password { user, password } = credentials else { return None };
    secret(&format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))))
}

/// A token as a header; none if it has characters that no header has.
pub(crate) fn bearer(token: &str) -> Option<HeaderValue> {
    secret(&format!("Bearer {token}"))
}

fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn challenge(values: &[&'static str]) -> Option<Challenge> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(value));
        }
        Challenge::of(&headers)
    }

    #[test]
    fn a_token_is_preferred_over_a_password() {
        let found = challenge(&[
            r#"Basic realm="x""#,
            r#"Bearer realm="https://auth.example/token?a=b",service="registry, \"the\" one",scope="repository:a:pull""#,
        ]);
        let Some(Challenge::Bearer { realm, service, scope }) = found else { panic!("{found:?}") };
        assert_eq!(realm.as_str(), "https://auth.example/token?a=b");
        assert_eq!(service.as_deref(), Some("registry, \"the\" one"));
        assert_eq!(scope.as_deref(), Some("repository:a:pull"));
        assert_eq!(challenge(&[r#"basic realm="Registry Realm""#]), Some(Challenge::Basic));
    }

    #[test]
    fn what_cannot_be_met_is_no_challenge() {
        for values in
            [&[][..], &["Negotiate"], &[r#"Bearer realm="/token""#], &["Bearer service=x"], &["\"\""]]
        {
            assert_eq!(challenge(values), None, "{values:?}");
        }
    }

    #[test]
    fn a_token_is_asked_for_as_the_service_wants_it() {
        let realm = Url::parse("https://auth.example/token?a=b").unwrap();
        let asked = TokenRequest::new(&realm, Some("the registry"), None, "team/app", None);
        assert_eq!(
            asked.url.as_str(),
            "https://auth.example/token?a=b&service=the+registry&scope=repository%3Ateam%2Fapp%3Apull"
        );
        assert!(asked.form.is_none() && asked.authorization.is_none());
        let password = Credentials::Password { user: "ann".to_owned(), password: "p:w".to_owned() };
        let asked = TokenRequest::new(&realm, None, Some("s"), "team/app", Some(&password));
        assert!(asked.url.as_str().ends_with("?a=b&scope=s&account=ann"), "{}", asked.url);
        assert_eq!(asked.authorization.unwrap(), "Basic YW5uOnA6dw==");
        let identity = Credentials::IdentityToken("t&t".to_owned());
        let asked = TokenRequest::new(&realm, None, Some("s"), "team/app", Some(&identity));
        assert_eq!(
            asked.form.as_deref(),
            Some("grant_type=refresh_token&client_id=dsec&refresh_token=t%26t&scope=s")
        );
        assert!(asked.authorization.is_none() && !asked.url.as_str().contains("t%26t"));
    }

    #[test]
    fn credentials_are_not_shown() {
        let password = Credentials::Password { user: "ann".to_owned(), password: "secret".to_owned() };
        let shown = format!("{password:?} {:?} {:?}", basic(&password), bearer("secret"));
        assert!(!shown.contains("secret") && !shown.contains("YW5u"), "{shown}");
    }
}
