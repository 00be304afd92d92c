//! Headers of one hop.

use http::HeaderMap;
use http::header::{self, HeaderName};

/// Headers of one hop (RFC 9110, 7.6.1), and `expect`, which each server answers itself.
const HOP_BY_HOP: [HeaderName; 10] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::EXPECT,
];

/// The options of `connection`, in lower case.
pub fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = String> {
    headers
        .get_all(header::CONNECTION)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|option| option.trim().to_ascii_lowercase())
}

/// Removes what must not go on to the next hop: the headers of one hop, and those that `connection`
/// names. Our own headers, `authorization` and `content-length` are not for it to remove.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<String> = connection_options(headers).collect();
        for name in named {
            if !name.starts_with("x-dsec-") && name != "authorization" && name != "content-length" {
                headers.remove(name);
            }
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}
