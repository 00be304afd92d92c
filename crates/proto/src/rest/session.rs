//! Shell sessions.

use std::collections::BTreeMap;

use dsec_model::{ExecId, SessionId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::PtySize;

/// Makes a session, or finds it when it is there.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SessionRequest {
    /// Its name. Default: drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub id: Option<SessionId>,
    /// Program of the shell. Default: `/bin/bash`, else `/bin/sh`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// User. Default: the sandbox's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// First working directory. Default: the sandbox's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Environment, over the sandbox's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// An interactive shell on a terminal of this size, to be attached and left any number of times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<PtySize>,
}

/// A session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Its name.
    #[schema(value_type = String)]
    pub id: SessionId,
    /// Process id of its shell inside the sandbox.
    pub pid: u32,
    /// Its user, as given.
    pub user: String,
    /// Of a terminal session: the exec that is its shell; attach to that one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub pty_exec_id: Option<ExecId>,
    /// Lines that run or wait.
    pub pending: u32,
    /// When it was made, Unix ms.
    pub created_ms: u64,
}

/// The open sessions of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionList {
    /// The sessions.
    pub sessions: Vec<Session>,
}
