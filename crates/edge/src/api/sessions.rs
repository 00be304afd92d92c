//! Shell sessions.

use axum::http::StatusCode;
use dsec_model::SessionId;
use dsec_proto::guest::{self, Request, SessionInfo, SessionOpen};
use dsec_proto::rest::{ApiError, Session, SessionList, SessionRequest};
use serde::Deserialize;

use super::{Answer, In, OptionalJson, PathOf, json};
use crate::error::{bad_id, internal, invalid_field, no_such};
use crate::guest::exec::Facts;
use crate::ids;
use crate::sandbox::plan::{check_path, check_user};
use crate::sandbox::{Entered, run};

#[derive(Deserialize)]
pub(super) struct SessionPath {
    sid: String,
}

fn describe(info: SessionInfo) -> Result<Session, ApiError> {
    let pty_exec = (!info.pty_exec.is_empty()).then(|| info.pty_exec.parse()).transpose();
    Ok(Session {
        id: info
            .session
            .parse()
            .map_err(|e| internal("the agent names a session as none can be named", &e))?,
        pid: info.pid,
        user: info.user,
        pty_exec_id: pty_exec.map_err(|e| internal("the agent names a command as none can be named", &e))?,
        pending: info.pending,
        created_ms: info.created_ms,
    })
}

fn check(request: &SessionRequest) -> Result<(), ApiError> {
    if let Some(shell) = &request.shell
        && (shell.is_empty() || shell.contains('\0'))
    {
        return Err(invalid_field("shell", format!("shell is {shell:?}; it must name a program")));
    }
    if let Some(user) = &request.user {
        check_user("user", user)?;
    }
    if let Some(cwd) = &request.cwd {
        check_path("cwd", cwd)?;
    }
    run::check_env(&request.env)?;
    run::check_pty("pty", request.pty)
}

pub(super) async fn open(In(entered): In, OptionalJson(request): OptionalJson<SessionRequest>) -> Answer {
    check(&request)?;
    let id = match request.id {
        Some(id) => id,
        None => ids::session()?,
    };
    // Known here and open there: no cgroup is made for nothing.
    if let Some(info) = entered.guest().execs.session(id.as_str()) {
        return Ok(json(StatusCode::OK, &describe(info)?));
    }
    let pty_exec = request.pty.map(|_| ids::exec()).transpose()?;
    let shell_exec = pty_exec.as_ref().map(|_| Facts {
        command: request.shell.clone().unwrap_or_else(|| "shell".to_owned()),
        session: Some(id.clone()),
        pty: true,
        ..Facts::default()
    });
    let open = SessionOpen {
        session: id.to_string(),
        shell: request.shell.unwrap_or_default().into_bytes(),
        user: request.user.unwrap_or_default(),
        cwd: request.cwd.unwrap_or_default().into_bytes(),
        env: run::env_lines(&request.env),
        pty: request.pty.map(|size| guest::Pty { rows: size.rows.into(), cols: size.cols.into() }),
        pty_exec: pty_exec.as_ref().map(ToString::to_string).unwrap_or_default(),
    };
    let info = run::open_session(&entered, open, shell_exec).await?;
    if let Some(ours) = pty_exec
        && info.existed
    {
        // Somebody else opened it at the same time; the shell is theirs.
        entered.guest().execs.abandon(&ours);
    }
    let status = if info.existed { StatusCode::OK } else { StatusCode::CREATED };
    Ok(json(status, &describe(info)?))
}

pub(super) async fn list(In(entered): In) -> Answer {
    let sessions = entered.guest().execs.sessions().into_iter().map(describe).collect::<Result<_, _>>()?;
    Ok(json(StatusCode::OK, &SessionList { sessions }))
}

fn find(entered: &Entered, sid: &str) -> Result<(SessionId, SessionInfo), ApiError> {
    let id: SessionId = sid.parse().map_err(|e| bad_id(&e))?;
    match entered.guest().execs.session(sid) {
        Some(info) => Ok((id, info)),
        None => Err(no_such("session", sid, &entered.handle.id)),
    }
}

pub(super) async fn get(In(entered): In, PathOf(SessionPath { sid }): PathOf<SessionPath>) -> Answer {
    let (_, info) = find(&entered, &sid)?;
    Ok(json(StatusCode::OK, &describe(info)?))
}

pub(super) async fn close(
    In(entered): In,
    PathOf(SessionPath { sid }): PathOf<SessionPath>,
) -> Answer<StatusCode> {
    let (id, _) = find(&entered, &sid)?;
    let request = Request::SessionClose(guest::SessionRef { session: id.to_string() });
    entered.guest().done(request, Vec::new()).await?;
    entered.guest().execs.session_closed(id.as_str());
    Ok(StatusCode::NO_CONTENT)
}
