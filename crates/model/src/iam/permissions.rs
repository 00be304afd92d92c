//! What there is to be allowed.

use std::fmt;
use std::ops::{BitAnd, BitOr, Sub};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! permissions {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// One thing that somebody may do.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Permission {
            $($(#[doc = $doc])+ #[serde(rename = $text)] $name,)+
        }

        impl Permission {
            /// All there are.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Its name on the wire.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }
        }
    };
}

permissions! {
    /// See sandboxes, their records and events.
    SandboxRead = "sandbox.read",
    /// Make sandboxes.
    SandboxCreate = "sandbox.create",
    /// Run commands in sandboxes, read and write their files, reach their ports.
    SandboxUse = "sandbox.use",
    /// Pause, resume, update and stop sandboxes.
    SandboxStop = "sandbox.stop",
    /// See layers and start from them.
    LayerRead = "layer.read",
    /// Pack sandboxes under names of the project.
    LayerPack = "layer.pack",
    /// Import, build, tag and remove layers, under any name.
    LayerWrite = "layer.write",
    /// See nodes.
    NodeRead = "node.read",
    /// Cordon and drain nodes.
    NodeManage = "node.manage",
    /// See projects, identities, grants and quotas.
    ProjectRead = "project.read",
    /// Make and remove subprojects, and set their quotas.
    ProjectManage = "project.manage",
    /// Make identities and their keys, and give them what oneself holds.
    IdentityManage = "identity.manage",
    /// Read the audit log.
    AuditRead = "audit.read",
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Permission {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .iter()
            .copied()
            .find(|permission| permission.as_str() == text)
            .ok_or_else(|| format!("there is no permission {text:?}"))
    }
}

/// A set of permissions. On the wire a list of names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(from = "Vec<Permission>", into = "Vec<Permission>")]
pub struct Permissions(u32);

impl Permissions {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Everything.
    pub const ALL: Self = Self((1 << Permission::ALL.len()) - 1);

    /// Whether this one is among them.
    pub fn has(self, permission: Permission) -> bool {
        self.0 & bit(permission) != 0
    }

    /// Whether all of these are among them.
    pub fn has_all(self, others: Self) -> bool {
        self & others == others
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// One after the other.
    pub fn iter(self) -> impl Iterator<Item = Permission> {
        Permission::ALL.iter().copied().filter(move |permission| self.has(*permission))
    }
}

fn bit(permission: Permission) -> u32 {
    1 << permission as u32
}

impl FromIterator<Permission> for Permissions {
    fn from_iter<I: IntoIterator<Item = Permission>>(iter: I) -> Self {
        Self(iter.into_iter().fold(0, |bits, permission| bits | bit(permission)))
    }
}

impl From<Vec<Permission>> for Permissions {
    fn from(list: Vec<Permission>) -> Self {
        list.into_iter().collect()
    }
}

impl From<Permissions> for Vec<Permission> {
    fn from(set: Permissions) -> Self {
        set.iter().collect()
    }
}

impl BitAnd for Permissions {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for Permissions {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Sub for Permissions {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl fmt::Debug for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A set that has a name, since most want one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Everything.
    Owner,
    /// Environments are made with it: sandboxes, and all of layers.
    Builder,
    /// Rollouts run with it: sandboxes, and layers to start from. It cannot write what others start from.
    Runtime,
    /// Looks, and changes nothing.
    Viewer,
}

impl Role {
    /// What it may do.
    pub fn permissions(self) -> Permissions {
        use Permission::{
            LayerPack, LayerRead, LayerWrite, NodeRead, ProjectRead, SandboxCreate, SandboxRead, SandboxStop,
            SandboxUse,
        };
        let runtime = [SandboxRead, SandboxCreate, SandboxUse, SandboxStop, LayerRead];
        match self {
            Self::Owner => Permissions::ALL,
            Self::Builder => runtime.into_iter().chain([LayerPack, LayerWrite]).collect(),
            Self::Runtime => runtime.into_iter().collect(),
            Self::Viewer => [SandboxRead, LayerRead, NodeRead, ProjectRead].into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_lists_of_names_on_the_wire() {
        let set: Permissions = [Permission::LayerRead, Permission::SandboxUse].into_iter().collect();
        let text = serde_json::to_string(&set).unwrap();
        assert_eq!(text, r#"["sandbox.use","layer.read"]"#);
        assert_eq!(serde_json::from_str::<Permissions>(&text).unwrap(), set);
        assert!(serde_json::from_str::<Permissions>(r#"["sandbox.everything"]"#).is_err());
        for permission in Permission::ALL {
            assert_eq!(permission.as_str().parse(), Ok(*permission));
        }
        assert_eq!(Permissions::ALL.iter().count(), Permission::ALL.len());
    }

    #[test]
    fn rollouts_cannot_write_what_others_start_from() {
        let runtime = Role::Runtime.permissions();
        assert!(runtime.has(Permission::SandboxUse));
        assert!(!runtime.has(Permission::LayerWrite) && !runtime.has(Permission::LayerPack));
        assert!(Role::Builder.permissions().has_all(runtime));
        assert_eq!(Permissions::ALL - Role::Owner.permissions(), Permissions::NONE);
    }
}
