//! Which addresses a pull may connect to.
//!
//! Whoever has a key can name any host, and a registry can refer to any other: to a token service, to where its blobs lie.
//! The node stands inside a network that neither may be in, so:
//!
//! - link-local addresses and those where clouds keep a machine's secrets are refused, whoever names them;
//! - a list of the operator's can name the only registries there are;
//! - a registry refers to nothing more private than it is itself: from the internet not into a private network, from there not to
//!   this machine.
//!
//! All of it is asked of the very address that is then connected to, so no answer of a name server changes in between.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::OnceLock;

/// Where clouds serve a machine its own credentials, outside of the link-local ranges. Source: their documentation.
const METADATA: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// How far an address reaches, the most public first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    /// The internet.
    Public,
    /// A network of somebody's own.
    Private,
    /// This machine.
    Loopback,
    /// What answers there knows this machine by its place alone. Multicast and the like too: no registry is there.
    Never,
}

fn reach(address: IpAddr) -> Reach {
    let address = canonical(address);
    if METADATA.contains(&address) {
        return Reach::Never;
    }
    match address {
        IpAddr::V4(v4) => match v4.octets() {
            [127, ..] | [0, 0, 0, 0] => Reach::Loopback,
            [169, 254, ..] | [0, ..] | [224..=255, ..] => Reach::Never,
            [10, ..] | [192, 168, ..] | [172, 16..=31, ..] | [100, 64..=127, ..] | [198, 18..=19, ..] => {
                Reach::Private
            }
            _ => Reach::Public,
        },
        IpAddr::V6(v6) => match v6.segments() {
            // Connecting to the unspecified address connects to this machine.
            [0, 0, 0, 0, 0, 0, 0, 0 | 1] => Reach::Loopback,
            [0xfe80..=0xfebf, ..] | [0xff00..=0xffff, ..] => Reach::Never,
            [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Reach::Private,
            _ => Reach::Public,
        },
    }
}

/// An IPv4 address that is written as an IPv6 one, as what it is: mapped, compatible, or behind a translator or relay.
fn canonical(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let of = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    match v6.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => address,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] => of(high, low),
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x64, 0xff9b, 1, _, _, _, high, low] => of(high, low),
        [0x2002, high, low, ..] => of(high, low),
        _ => address,
    }
}

/// One entry of the operator's list: `HOST`, `HOST:PORT` or `*.DOMAIN`. Without a port every port is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    host: String,
    /// Also hosts below it, and only those.
    below: bool,
    port: Option<u16>,
}

/// Why an entry of the list is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no registry; write HOST, HOST:PORT or *.DOMAIN")]
pub struct PatternError {
    /// As it was written.
    pub given: String,
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let wrong = || PatternError { given: text.to_owned() };
        let (below, rest) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (host, port) = match rest.rsplit_once(':') {
            // An IPv6 address, in brackets or not.
            Some((host, _)) if host.contains(':') && !host.ends_with(']') => (rest, None),
            Some((host, port)) => (host, Some(port.parse().map_err(|_| wrong())?)),
            None => (rest, None),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_name = |host: &str| {
            host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'))
        };
        let host = match host.parse::<IpAddr>() {
            Ok(address) if !below => address.to_string(),
            Err(_) if !host.is_empty() && is_name(host) => host.to_ascii_lowercase(),
            _ => return Err(wrong()),
        };
        Ok(Self { host, below, port })
    }
}

impl Pattern {
    fn fits(&self, host: &str, port: u16) -> bool {
        let host_fits = if self.below {
            host.strip_suffix(&self.host).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        } else {
            host == self.host
        };
        host_fits && self.port.is_none_or(|own| own == port)
    }
}

/// The operator's list of registries; none: any host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowed(Option<Vec<Pattern>>);

impl Allowed {
    /// These and no others.
    pub fn only(patterns: Vec<Pattern>) -> Self {
        Self(Some(patterns))
    }

    fn lists(&self, host: &str, port: u16) -> bool {
        self.0.iter().flatten().any(|pattern| pattern.fits(host, port))
    }
}

/// Why an address is not connected to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The operator's list does not have it.
    #[error("{host} is not among the registries that this node may connect to")]
    NotListed {
        /// Host and port.
        host: String,
    },
    /// It is link-local, a cloud's metadata, multicast.
    #[error(
        "{host} is at {address}, where no registry is: link-local, metadata and multicast addresses are refused"
    )]
    Never {
        /// Host and port.
        host: String,
        /// Where it is.
        address: IpAddr,
    },
    /// A registry referred to something more private than itself.
    #[error(
        "the registry refers to {host} at {address}, which is in a more private network than the registry itself"
    )]
    MorePrivate {
        /// Host and port.
        host: String,
        /// Where it is.
        address: IpAddr,
    },
}

/// What one pull may connect to.
#[derive(Debug)]
pub(crate) struct Places {
    allowed: Allowed,
    /// Host and port of the registry that was asked for.
    registry: (String, u16),
    /// How private the registry was found to be at first.
    reach: OnceLock<Reach>,
}

impl Places {
    pub(crate) fn new(allowed: Allowed, host: &str, port: u16) -> Self {
        Self { allowed, registry: (host.to_owned(), port), reach: OnceLock::new() }
    }

    /// Those of a host's addresses that may be connected to.
    ///
    /// # Errors
    /// There is none: why not, for the first of them.
    pub(crate) fn admit(&self, host: &str, port: u16, addresses: &[IpAddr]) -> Result<Vec<IpAddr>, Refused> {
        let is_registry = self.registry.0 == host && self.registry.1 == port;
        let is_listed = self.allowed.lists(host, port);
        let shown = || crate::reference::authority(host, Some(port));
        if is_registry && self.allowed.0.is_some() && !is_listed {
            return Err(Refused::NotListed { host: shown() });
        }
        // The first contact is with the registry; whatever comes later is measured by it.
        if is_registry {
            let found = addresses.iter().map(|address| reach(*address)).min();
            found.filter(|found| *found != Reach::Never).map(|found| *self.reach.get_or_init(|| found));
        }
        let mut refused = None;
        let mut admitted = Vec::new();
        for address in addresses {
            match self.check(host, port, *address, is_listed) {
                Ok(()) => admitted.push(*address),
                Err(why) => refused = refused.or(Some(why)),
            }
        }
        match refused {
            Some(why) if admitted.is_empty() => Err(why),
            _ => Ok(admitted),
        }
    }

    fn check(&self, host: &str, port: u16, address: IpAddr, is_listed: bool) -> Result<(), Refused> {
        let shown = || crate::reference::authority(host, Some(port));
        let found = reach(address);
        if found == Reach::Never {
            // Only who writes that very address into the list means it: a name in it may be anybody's to move.
            let is_meant = is_listed && host.parse::<IpAddr>().is_ok();
            return if is_meant { Ok(()) } else { Err(Refused::Never { host: shown(), address }) };
        }
        // Without a list, what a registry may refer to goes by where it is; with one, the list knows what is inside.
        let most = match self.allowed.0 {
            Some(_) => Reach::Public,
            None => self.reach.get().copied().unwrap_or(Reach::Public),
        };
        if is_listed || found <= most {
            return Ok(());
        }
        Err(Refused::MorePrivate { host: shown(), address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn list(patterns: &[&str]) -> Allowed {
        Allowed::only(patterns.iter().map(|pattern| pattern.parse().unwrap()).collect())
    }

    fn admit(places: &Places, host: &str, address: &str) -> bool {
        places.admit(host, 443, &[ip(address)]).is_ok()
    }

    #[test]
    fn addresses_reach_as_far_as_their_ranges() {
        for (address, wanted) in [
            ("192.0.2.1", Reach::Public),
            ("2001:db8::1", Reach::Public),
            ("10.1.2.3", Reach::Private),
            ("172.31.0.1", Reach::Private),
            ("172.32.0.1", Reach::Public),
            ("100.64.0.1", Reach::Private),
            ("fd12::1", Reach::Private),
            ("127.0.0.1", Reach::Loopback),
            ("0.0.0.0", Reach::Loopback),
            ("::", Reach::Loopback),
            ("::1", Reach::Loopback),
            ("169.254.169.254", Reach::Never),
            ("fe80::1", Reach::Never),
            ("febf::1", Reach::Never),
            ("fd00:ec2::254", Reach::Never),
            ("100.100.100.200", Reach::Never),
            ("168.63.129.16", Reach::Never),
            ("224.0.0.1", Reach::Never),
            ("255.255.255.255", Reach::Never),
            ("ff02::1", Reach::Never),
            // The same addresses in an IPv6 coat.
            ("::ffff:169.254.169.254", Reach::Never),
            ("::169.254.169.254", Reach::Never),
            ("64:ff9b::a9fe:a9fe", Reach::Never),
            ("2002:a9fe:a9fe::1", Reach::Never),
            ("::ffff:127.0.0.1", Reach::Loopback),
            ("::ffff:10.0.0.1", Reach::Private),
        ] {
            assert_eq!(reach(ip(address)), wanted, "{address}");
        }
    }

    #[test]
    fn metadata_is_refused_by_whatever_name_and_loopback_is_not() {
        let places = Places::new(Allowed::default(), "registry.example", 443);
        let refused = places.admit("registry.example", 443, &[ip("169.254.169.254")]).unwrap_err();
        assert!(matches!(refused, Refused::Never { .. }), "{refused}");
        // Of several addresses the good ones stay.
        let found = places.admit("registry.example", 443, &[ip("fe80::1"), ip("192.0.2.1")]).unwrap();
        assert_eq!(found, [ip("192.0.2.1")]);
        assert!(admit(&Places::new(Allowed::default(), "localhost", 443), "localhost", "127.0.0.1"));
    }

    #[test]
    fn a_registry_refers_to_nothing_more_private_than_itself() {
        for (registry, referred, good) in [
            ("192.0.2.1", "198.51.100.1", true),
            ("192.0.2.1", "10.0.0.1", false),
            ("192.0.2.1", "127.0.0.1", false),
            ("10.0.0.1", "192.168.0.1", true),
            ("10.0.0.1", "192.0.2.1", true),
            ("10.0.0.1", "127.0.0.1", false),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "10.0.0.1", true),
            ("127.0.0.1", "169.254.169.254", false),
        ] {
            let places = Places::new(Allowed::default(), "registry.example", 443);
            assert!(admit(&places, "registry.example", registry));
            assert_eq!(admit(&places, "blobs.example", referred), good, "{registry} to {referred}");
        }
    }

    #[test]
    fn a_registry_does_not_become_more_private_while_it_is_pulled_from() {
        let places = Places::new(Allowed::default(), "registry.example", 443);
        assert!(admit(&places, "registry.example", "192.0.2.1"));
        assert!(!admit(&places, "registry.example", "127.0.0.1"), "its name was given another address");
        // The same with a refused address first.
        let places = Places::new(Allowed::default(), "registry.example", 443);
        assert!(!admit(&places, "registry.example", "169.254.0.1"));
        assert!(admit(&places, "registry.example", "192.0.2.1"));
    }

    #[test]
    fn a_list_has_all_the_registries_there_are() {
        let allowed = list(&["registry.example:443", "*.corp.example", "localhost", "10.0.0.5"]);
        for (host, port, address, good) in [
            ("registry.example", 443, "192.0.2.1", true),
            ("registry.example", 444, "192.0.2.1", false),
            ("other.example", 443, "192.0.2.1", false),
            ("a.corp.example", 5000, "10.0.0.1", true),
            ("corp.example", 443, "10.0.0.1", false),
            ("evilcorp.example", 443, "192.0.2.1", false),
            ("localhost", 5000, "127.0.0.1", true),
            ("10.0.0.5", 443, "10.0.0.5", true),
            ("a.corp.example", 443, "169.254.169.254", false),
        ] {
            let places = Places::new(allowed.clone(), host, port);
            assert_eq!(places.admit(host, port, &[ip(address)]).is_ok(), good, "{host}:{port} at {address}");
        }
        // What a listed one refers to is public, or listed too.
        let places = Places::new(allowed, "a.corp.example", 443);
        assert!(admit(&places, "a.corp.example", "10.0.0.1"));
        assert!(admit(&places, "blobs.example", "192.0.2.7"));
        assert!(!admit(&places, "blobs.example", "10.0.0.7"));
        assert!(admit(&places, "blobs.corp.example", "10.0.0.7"));
        let places = Places::new(list(&[]), "registry.example", 443);
        assert!(!admit(&places, "registry.example", "192.0.2.1"), "an empty list allows none");
    }

    #[test]
    fn a_link_local_address_is_reached_only_where_the_list_has_it() {
        let places = Places::new(list(&["169.254.7.7", "*.example"]), "169.254.7.7", 443);
        assert!(admit(&places, "169.254.7.7", "169.254.7.7"));
        assert!(!admit(&places, "blobs.example", "169.254.7.7"));
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for text in
            ["", "*", "*.", "https://registry.example", "registry.example/x", "a:b", "a:70000", "*.10.0.0.1"]
        {
            assert!(text.parse::<Pattern>().is_err(), "{text}");
        }
        for text in ["::1", "[::1]:5000", "[::1]", "localhost:5000", "*.example:443", "Registry.Example"] {
            assert!(text.parse::<Pattern>().is_ok(), "{text}");
        }
    }
}
