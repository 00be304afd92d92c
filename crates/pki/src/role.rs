//! What a certificate's owner is.

use rustls::pki_types::ServerName;

use crate::PkiError;

/// Domain that every name of a certificate is below. `internal` is nobody's in the DNS, for good.
const DOMAIN: &str = "dsec.internal";

/// What a certificate's owner is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// A server of the public API: it may send nodes requests, and nodes ask it to join and to be renewed.
    Control,
    /// The node of this name.
    Node(String),
}

impl Role {
    /// The name that its certificate has.
    pub fn dns_name(&self) -> String {
        match self {
            Self::Control => format!("control.{DOMAIN}"),
            Self::Node(name) => format!("{name}.node.{DOMAIN}"),
        }
    }

    /// The role that a certificate's name means.
    pub fn of(dns_name: &str) -> Option<Self> {
        let below = dns_name.strip_suffix(DOMAIN)?.strip_suffix('.')?;
        match below.strip_suffix(".node") {
            Some(node) if !node.is_empty() && !node.contains('.') => Some(Self::Node(node.to_owned())),
            None if below == "control" => Some(Self::Control),
            _ => None,
        }
    }

    /// The same name for TLS.
    ///
    /// # Errors
    /// A node's name has characters that no DNS name has.
    pub fn server_name(&self) -> Result<ServerName<'static>, PkiError> {
        ServerName::try_from(self.dns_name())
            .map_err(|_| PkiError::Certificate(format!("{} is no name of a host", self.dns_name())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_told_by_its_name_and_by_no_other() {
        for role in [Role::Control, Role::Node("n1".to_owned()), Role::Node("control".to_owned())] {
            assert_eq!(Role::of(&role.dns_name()), Some(role));
        }
        for other in
            ["", "dsec.internal", "node.dsec.internal", ".node.dsec.internal", "a.b.node.dsec.internal"]
        {
            assert_eq!(Role::of(other), None, "{other}");
        }
        assert_eq!(Role::of("control.dsec.internal.example"), None);
        assert_eq!(Role::of("n1.nodedsec.internal"), None);
    }
}
