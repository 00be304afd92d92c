//! A create, from the checked request to a sandbox that runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dsec_model::iam::ProjectPath;
use dsec_model::{ErrorKind, Limits, SandboxId, State};
use dsec_proto::guest::{Check, Request};
use dsec_proto::rest::{
    self, ApiError, Charge, CreateSandboxRequest, ExecRequest, LaunchPhase, Sandbox, SandboxLimits,
};
use serde_json::json;
use tokio::sync::oneshot;

use super::actor::{self, Holds, Launched, Origin};
use super::record::{self, Stored, StoredSpec};
use super::{Grip, Handle, plan, run};
use crate::charges::Counted;
use crate::clock::{micros, now_ms};
use crate::error::{internal, launch_failed};
use crate::guest::{Connection, ExecTable};
use crate::idempotency::{self, Claim, FirstExec, Made, StoredKey};
use crate::ids;
use crate::layers::Composed;
use crate::node::Node;

/// What a create came to.
#[derive(Debug)]
pub struct Created {
    /// The record as the caller gets it.
    pub sandbox: Sandbox,
    /// False when an earlier create with the same key made it.
    pub fresh: bool,
}

/// Whose a sandbox is to be.
#[derive(Debug)]
pub struct Owner {
    /// Its project.
    pub project: ProjectPath,
    /// What was counted for it, and by whom.
    pub charge: Option<Charge>,
}

/// Creates a sandbox. To be run in a task of its own: a caller that hangs up must not stop it half-way.
///
/// # Errors
/// Nothing is left of the sandbox then, but a record of a failure that was not the caller's.
pub async fn create(
    node: Arc<Node>,
    request: CreateSandboxRequest,
    key: Option<StoredKey>,
    owner: Owner,
) -> Result<Created, ApiError> {
    let Some(key) = key else {
        let (handle, exec) = fresh(&node, request, None, owner).await?;
        let first_exec = run_first(&handle, exec).await.transpose()?;
        return Ok(Created { sandbox: reply(&handle, first_exec), fresh: true });
    };
    match node.keys.claim(&key)? {
        Claim::Known(slot) => {
            let made = idempotency::outcome(slot).await?;
            let handle = node.registry.get(made.id.as_str())?;
            handle.activity.touch();
            let first_exec = match request.exec {
                Some(exec) => answered_before(&handle, &exec, made.first_exec).await?,
                None => None,
            };
            Ok(Created { sandbox: reply(&handle, first_exec), fresh: false })
        }
        Claim::First(reservation) => match fresh(&node, request, Some(key), owner).await {
            Ok((handle, exec)) => {
                let first = run_first(&handle, exec).await;
                let kept = first.as_ref().map(|r| r.as_ref().map(FirstExec::of).map_err(Clone::clone));
                reservation.settle(Ok(Made { id: handle.id.clone(), first_exec: kept }));
                Ok(Created { sandbox: reply(&handle, first.transpose()?), fresh: true })
            }
            Err(error) => {
                reservation.settle(Err(error.clone()));
                Err(error)
            }
        },
    }
}

fn reply(handle: &Handle, first_exec: Option<rest::Exec>) -> Sandbox {
    Sandbox { first_exec, ..Sandbox::clone(&handle.record()) }
}

/// Runs the command that came with a create, if any did. One that cannot be started does not undo the sandbox:
/// it fails the request, and the error names the sandbox.
async fn run_first(handle: &Arc<Handle>, exec: Option<ExecRequest>) -> Option<Result<rest::Exec, ApiError>> {
    let ran = first_exec(handle, exec?).await;
    Some(ran.map_err(|error| {
        let mut detail = error.0.detail.clone();
        if let Some(fields) = detail.as_object_mut() {
            fields.insert("sandbox_id".to_owned(), json!(handle.id));
        }
        let hint = match error.0.hint.as_str() {
            "" => "the sandbox runs; its id is in detail".to_owned(),
            hint => format!("{hint}; the sandbox runs, its id is in detail"),
        };
        ApiError::new(error.kind(), format!("exec: {}", error.0.message)).detail(detail).hint(hint)
    }))
}

async fn first_exec(handle: &Arc<Handle>, request: ExecRequest) -> Result<rest::Exec, ApiError> {
    let entered = handle.enter().await?;
    let (wait, inline) = (request.wait, run::inline_limit(request.inline_limit_bytes, run::INLINE_DEFAULT)?);
    let exec = run::start_as(&entered, request, ids::first_exec(&handle.id)?).await?;
    if wait { run::finish(&entered, &exec, inline).await } else { Ok(exec.record()) }
}

/// The first command as it was answered the first time. What is not kept is read again while the sandbox
/// has it.
async fn answered_before(
    handle: &Arc<Handle>,
    request: &ExecRequest,
    kept: Option<Result<FirstExec, ApiError>>,
) -> Result<Option<rest::Exec>, ApiError> {
    let kept = kept.transpose()?;
    if let Some(FirstExec { answer, is_whole: true }) = &kept {
        return Ok(Some(rest::Exec::clone(answer)));
    }
    let again = async {
        let entered = handle.enter().await?;
        let exec = entered.guest().execs.get(ids::first_exec(&handle.id)?.as_str())?;
        let inline = run::inline_limit(request.inline_limit_bytes, run::INLINE_DEFAULT)?;
        if request.wait { run::finish(&entered, &exec, inline).await } else { Ok(exec.record()) }
    };
    Ok(again.await.ok().or_else(|| kept.map(|first| rest::Exec::clone(&first.answer))))
}

async fn fresh(
    node: &Arc<Node>,
    mut request: CreateSandboxRequest,
    key: Option<StoredKey>,
    owner: Owner,
) -> Result<(Arc<Handle>, Option<ExecRequest>), ApiError> {
    let began = Instant::now();
    if node.is_draining() {
        return Err(ApiError::new(ErrorKind::Unavailable, "the node is going down and takes no sandbox"));
    }
    let exec = request.exec.take();
    let limits = plan::check(&request, &node.config.defaults, &node.room.capacity())?;
    if let Some(exec) = &exec {
        run::check(exec)?;
    }
    node.suits(&request)?;
    node.scheduling.admit()?;
    let counted = node.charges.take(&owner.project, &request.backend, owner.charge.as_ref(), &limits)?;
    let id = ids::sandbox(&node.config.node)?;
    let turn = node.pending.begin(request.task_id.clone(), owner.project.clone());
    let asked = Asked { id: &id, request: &request, limits, owner, counted };
    let (stored, holds) = prepare(node, asked, key).await?;
    let (handle, mailbox) = Handle::new(stored.sandbox.clone());
    turn.settle(|| {
        // Fetching layers may have taken long enough for somebody to have cordoned the node.
        node.scheduling.admit()?;
        match node.registry.insert(Arc::clone(&handle)) {
            true => Ok(()),
            false => Err(ApiError::new(ErrorKind::Internal, "an id was drawn twice").hint("try again")),
        }
    })?;
    let directory = record::make(&node.config.state_dir, id.random(), &node.records);
    if let Err(error) = directory.and_then(|directory| handle.events.write_into(&directory)) {
        tracing::error!(sandbox_id = %id, %error, "a sandbox's events cannot be written down");
    }
    handle.events.push("created", json!({ "image": request.container_image }));
    let checks = (request.init_user.is_some() || request.cwd.is_some()).then(|| Check {
        user: stored.spec.user.clone(),
        cwd: request.cwd.clone().unwrap_or_default().into_bytes(),
    });
    let launch = launch(Arc::clone(node), Arc::clone(&handle), stored.clone(), checks, began.elapsed());
    let (reply, outcome) = oneshot::channel();
    let origin = Origin::Created { launch: tokio::spawn(launch), reply };
    actor::spawn(node, Arc::clone(&handle), mailbox, stored, holds, origin);
    match outcome.await {
        Ok(Ok(())) => Ok((handle, exec)),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            Err(ApiError::new(ErrorKind::Internal, format!("sandbox {id} was lost while it was created")))
        }
    }
}

/// A sandbox to be, as it was asked for and counted.
struct Asked<'a> {
    id: &'a SandboxId,
    request: &'a CreateSandboxRequest,
    limits: Limits,
    owner: Owner,
    counted: Counted,
}

/// Takes the layers and the room, and writes down in memory what is to be launched.
async fn prepare(
    node: &Arc<Node>,
    asked: Asked<'_>,
    key: Option<StoredKey>,
) -> Result<(Stored, Holds), ApiError> {
    let Asked { id, request, limits, owner, counted } = asked;
    let Composed { layers, shown, config, held } = node.layers.compose(request, id).await?;
    let env = plan::environment(&config, request)?;
    let user = request.init_user.clone().or_else(|| config.user.clone().filter(|u| !u.is_empty()));
    let user = user.unwrap_or_else(|| "root".to_owned());
    let cwd = request.cwd.clone().or_else(|| config.working_dir.clone().filter(|d| !d.is_empty()));
    let permit = node.room.admit(&limits, &*node.launch)?;
    let now = now_ms();
    let sandbox = Sandbox {
        id: id.clone(),
        state: State::Creating,
        reason: None,
        lost: None,
        backend: request.backend.clone(),
        image: request.container_image.clone(),
        image_digest: shown.first().map(|layer| layer.id.clone()).unwrap_or_default(),
        layers: shown,
        node: node.config.node.to_string(),
        project: owner.project,
        limits: SandboxLimits::from(&limits),
        init_user: user.clone(),
        task_id: request.task_id.clone(),
        labels: request.labels.clone(),
        created_ms: now,
        running_ms: None,
        ended_ms: None,
        last_active_ms: now,
        pauses: None,
        usage: None,
        launch_phases: Vec::new(),
        first_exec: None,
    };
    let spec = StoredSpec {
        layers,
        limits,
        env,
        cwd: cwd.unwrap_or_else(|| "/".to_owned()),
        user,
        hostname: request.hostname.clone().unwrap_or_else(|| id.random().to_owned()),
        allow_setuid: request.allow_setuid,
    };
    let charged_to = owner.charge.map(|charge| charge.by).unwrap_or_default();
    let stored = Stored { sandbox, spec, anchor: None, boot_id: node.boot_id.clone(), key, charged_to };
    Ok((stored, Holds { permit, counted, layers: held }))
}

/// The launch itself: record, backend, hello, checks. It never leaves something running that is not in
/// its result.
async fn launch(
    node: Arc<Node>,
    handle: Arc<Handle>,
    mut stored: Stored,
    checks: Option<Check>,
    admitted: Duration,
) -> Launched {
    let mut phases = vec![phase("admit", admitted)];
    let id = handle.id.clone();
    let queued = Instant::now();
    let started = tokio::task::spawn_blocking(move || {
        let mut phases = vec![phase("queue", queued.elapsed())];
        let at = Instant::now();
        // First of all, so that an edge that dies now knows of it when it is back.
        stored
            .write(&node.config.state_dir)
            .map_err(|e| internal("the sandbox's record cannot be written", &e))?;
        phases.push(phase("record", at.elapsed()));
        let spec = stored.spec.to_container(&stored.sandbox.id);
        let (instance, of_backend) = node
            .launch
            .launch(&spec)
            .map_err(|e| launch_failed(&stored.sandbox.id, &e, &node.config.state_dir))?;
        phases.extend(of_backend.iter().map(|p| phase(&p.name, p.took)));
        let at = Instant::now();
        stored.anchor = Some(instance.anchor().clone());
        let noted = stored.write(&node.config.state_dir);
        let connected =
            noted.map_err(|e| internal("the sandbox's record cannot be written", &e)).and_then(|()| {
                instance.connect().map_err(|e| launch_failed(&stored.sandbox.id, &e, &node.config.state_dir))
            });
        phases.push(phase("connect", at.elapsed()));
        Ok((instance, connected, phases))
    });
    let (instance, connected, of_backend) = match started.await {
        Ok(Ok(started)) => started,
        Ok(Err(error)) => return Launched { grip: None, guest: Err(error), phases },
        Err(error) => {
            let error = internal("the launch broke off inside the edge", &error);
            return Launched { grip: None, guest: Err(error), phases };
        }
    };
    phases.extend(of_backend);
    let grip = Grip::new(instance);
    let at = Instant::now();
    let guest = match connected {
        Err(error) => Err(error),
        Ok(stream) => {
            let table = ExecTable::new(id, Arc::clone(&grip), Arc::clone(&handle.events));
            greet(stream, table, checks).await
        }
    };
    phases.push(phase("hello", at.elapsed()));
    Launched { grip: Some(grip), guest, phases }
}

async fn greet(
    stream: std::os::unix::net::UnixStream,
    table: Arc<ExecTable>,
    checks: Option<Check>,
) -> Result<Arc<Connection>, ApiError> {
    let guest = Connection::open(stream, table).await?;
    if let Some(check) = checks
        && let Err(error) =
            guest.done(Request::Check(check), guest.file_cgroup()?.into_iter().collect()).await
    {
        guest.close("the create was refused");
        let error = ApiError::from(error);
        // Not there, or not a directory: either way it is the request that is wrong.
        return Err(match error.kind() {
            ErrorKind::NotFound | ErrorKind::PermissionDenied => {
                ApiError::new(ErrorKind::InvalidArgument, error.0.message.clone()).hint(error.0.hint.clone())
            }
            _ => error,
        });
    }
    Ok(guest)
}

fn phase(name: &str, took: Duration) -> LaunchPhase {
    LaunchPhase { name: name.to_owned(), us: micros(took) }
}
