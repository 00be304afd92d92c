//! What a server in a sandbox says about its own address, made true for callers that reach it below a
//! path of ours: redirects and the paths of cookies.

use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// Tells the server where callers see its root.
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// Where callers see a server's root, and what the server calls itself.
#[derive(Debug, Clone)]
pub(super) struct Outside {
    /// The path, without a slash at its end.
    prefix: String,
    /// What the request's `host` said.
    host: String,
    /// The server's port.
    port: String,
}

impl Outside {
    /// Takes the facts from a request, and tells the server the path.
    pub(super) fn tell(prefix: String, port: &str, headers: &mut HeaderMap) -> Self {
        if let Ok(value) = HeaderValue::try_from(&prefix) {
            headers.insert(FORWARDED_PREFIX, value);
        }
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        Self { prefix, host: host.to_owned(), port: port.to_owned() }
    }

    /// Makes the headers of an answer true outside.
    pub(super) fn correct(&self, headers: &mut HeaderMap) {
        for name in [header::LOCATION, header::CONTENT_LOCATION] {
            let seen = headers.get(&name).and_then(|value| value.to_str().ok());
            if let Some(Ok(value)) = seen.and_then(|url| self.url(url)).map(HeaderValue::try_from) {
                headers.insert(name, value);
            }
        }
        if let header::Entry::Occupied(mut cookies) = headers.entry(header::SET_COOKIE) {
            for value in cookies.iter_mut() {
                let changed = value.to_str().ok().and_then(|cookie| self.cookie(cookie));
                if let Some(Ok(changed)) = changed.map(HeaderValue::try_from) {
                    *value = changed;
                }
            }
        }
    }

    /// A URL of the server's own as callers reach it. `None` leaves it: it is relative, of somebody
    /// else, or below the path already, for servers that heed `x-forwarded-prefix`.
    fn url(&self, url: &str) -> Option<String> {
        let after_scheme = ["http:", "https:"]
            .iter()
            .find_map(|scheme| {
                Some(url.get(scheme.len()..)?).filter(|_| url[..scheme.len()].eq_ignore_ascii_case(scheme))
            })
            .unwrap_or(url);
        match after_scheme.strip_prefix("//") {
            Some(rest) => {
                let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
                if !self.is_own(authority) {
                    return None;
                }
                let slash = if path.starts_with('/') { "" } else { "/" };
                self.below(&format!("{slash}{path}"))
            }
            None if url.starts_with('/') => self.below(url),
            None => None,
        }
    }

    fn below(&self, path: &str) -> Option<String> {
        let rest = path.strip_prefix(&self.prefix);
        let is_below = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#']));
        (!is_below).then(|| format!("{}{path}", self.prefix))
    }

    /// The host that the caller named, or this port of the sandbox's loopback.
    fn is_own(&self, authority: &str) -> bool {
        if authority.eq_ignore_ascii_case(&self.host) {
            return true;
        }
        let is_loopback = |host: &str| ["localhost", "127.0.0.1", "[::1]", "0.0.0.0"].contains(&host);
        match authority.rsplit_once(':') {
            Some((host, port)) if port == self.port => is_loopback(&host.to_ascii_lowercase()),
            _ => self.port == "80" && is_loopback(&authority.to_ascii_lowercase()),
        }
    }

    fn cookie(&self, cookie: &str) -> Option<String> {
        let mut changed = false;
        let parts: Vec<String> = cookie
            .split(';')
            .enumerate()
            .map(|(place, part)| {
                let below = part
                    .split_once('=')
                    .filter(|(name, _)| place > 0 && name.trim().eq_ignore_ascii_case("path"))
                    .map(|(_, path)| path.trim())
                    .filter(|path| path.starts_with('/'))
                    .and_then(|path| self.below(path));
                changed |= below.is_some();
                below.map_or_else(|| part.to_owned(), |path| format!(" Path={path}"))
            })
            .collect();
        changed.then(|| parts.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outside() -> Outside {
        let mut headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static("api:7420"))]);
        let outside = Outside::tell("/v1/sandboxes/sb-n1-a/ports/3000/http".to_owned(), "3000", &mut headers);
        assert_eq!(headers[FORWARDED_PREFIX], "/v1/sandboxes/sb-n1-a/ports/3000/http");
        outside
    }

    #[test]
    fn a_redirect_of_the_server_to_itself_stays_below_its_path() {
        let outside = outside();
        for (url, path) in [
            ("/login?next=/a", "/login?next=/a"),
            ("/", "/"),
            ("http://api:7420/login", "/login"),
            ("HTTP://API:7420", "/"),
            ("https://api:7420?q", "/?q"),
            ("//api:7420/x", "/x"),
            ("http://localhost:3000/x#y", "/x#y"),
            ("http://127.0.0.1:3000/", "/"),
            ("/v1/sandboxes/sb-n1-a/ports/3000/https", "/v1/sandboxes/sb-n1-a/ports/3000/https"),
        ] {
            assert_eq!(outside.url(url), Some(format!("{}{path}", outside.prefix)), "{url}");
        }
    }

    #[test]
    fn other_redirects_are_left_alone() {
        let outside = outside();
        for url in [
            "login",
            "../up",
            "?page=2",
            "",
            "https://example.org/x",
            "//example.org/x",
            "http://localhost:3001/x",
            "http://localhost/x",
            "mailto:a@b",
            "/v1/sandboxes/sb-n1-a/ports/3000/http/login",
            "http://api:7420/v1/sandboxes/sb-n1-a/ports/3000/http",
            "é",
        ] {
            assert_eq!(outside.url(url), None, "{url}");
        }
    }

    #[test]
    fn cookies_of_a_path_come_back_under_the_path_that_callers_use() {
        let outside = outside();
        let cookie = |text: &str| outside.cookie(text);
        assert_eq!(
            cookie("path=1; HttpOnly; path=/app; Secure").unwrap(),
            "path=1; HttpOnly; Path=/v1/sandboxes/sb-n1-a/ports/3000/http/app; Secure"
        );
        assert_eq!(cookie("a=b"), None);
        assert_eq!(cookie("a=b; Path=/v1/sandboxes/sb-n1-a/ports/3000/http/"), None);
    }
}
