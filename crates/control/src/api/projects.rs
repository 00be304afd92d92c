//! Projects: what they may use, and all sandboxes of one as one.

use std::sync::Arc;

use axum::RequestExt;
use axum::extract::{FromRequest, Path, Request};
use dsec_iam::{Changed, Iam, ProjectRecord};
use dsec_model::ErrorKind;
use dsec_model::iam::{Amounts, ProjectPath, Scope};
use dsec_proto::rest::{
    ChangeProjectRequest, CreateProjectRequest, Project, ProjectList, StopRequest, TaskOutcome,
    TaskWaitRequest, TaskWaited,
};
use http::{HeaderMap, StatusCode};
use serde_json::json;

use super::Call;
use super::call::{Called, malformed_path, note_denied, parsed};
use super::identities::{Acting, answer, changed};
use super::tasks::ToAll;
use crate::app::App;
use crate::failure::{Failure, Reply};
use crate::quota::used_in;
use crate::records::Meant;
use crate::{forward, rules};

/// The projects that the caller sees.
#[utoipa::path(get, path = "/v1/projects", operation_id = "list_projects", tag = "projects",
    responses((status = 200, description = "The project that the call acts in, and all in it.", body = ProjectList)))]
pub async fn list(call: Call) -> Reply {
    let book = call.app.iam.book();
    let sees = book.scope(&call.behalf.principal.caller, rules::READS);
    let lens = sees.clone().in_project(&call.behalf.project);
    let all = [ProjectPath::root()].into_iter().chain(book.projects().map(|it| it.path.clone()));
    let mut seen: Vec<ProjectPath> = all.filter(|path| lens.has(path)).collect();
    drop(book);
    seen.sort_unstable();
    seen.dedup();
    let projects = seen.iter().map(|path| shown(&call.app, &sees, path)).collect();
    answer(StatusCode::OK, &ProjectList { projects })
}

/// Makes a project. The caller must manage the one that it is in (`project.manage`).
#[utoipa::path(post, path = "/v1/projects", operation_id = "create_project", tag = "projects",
    request_body = CreateProjectRequest,
    responses((status = 201, description = "The project.", body = Project)))]
pub async fn create(call: Call) -> Reply {
    let (acting, body) = Acting::of(call).await?;
    let CreateProjectRequest { project, ceiling, quota } = parsed(&body)?;
    let made = acting.app.iam.create_project(acting.did(), project, ceiling, quota).await;
    told(&acting, StatusCode::CREATED, made.map_err(|error| acting.failure(error))?)
}

/// One project.
#[utoipa::path(get, path = "/v1/projects/{project}", operation_id = "get_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded: `root%2Frl`.")),
    responses((status = 200, description = "The project.", body = Project)))]
pub async fn get(ProjectCall { call, project }: ProjectCall) -> Reply {
    let sees = call.app.iam.book().scope(&call.behalf.principal.caller, rules::READS);
    if !sees.has(&project) || !call.app.iam.book().has_project(&project) {
        return Err(no_project(&project));
    }
    answer(StatusCode::OK, &shown(&call.app, &sees, &project))
}

/// Changes a project's quota or ceiling. The caller must manage the one that it is in: nobody lifts the limits they are under.
#[utoipa::path(patch, path = "/v1/projects/{project}", operation_id = "change_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded.")),
    request_body = ChangeProjectRequest,
    responses((status = 200, description = "The project; its quota holds on all servers.", body = Project)))]
pub async fn change(ProjectCall { call, project }: ProjectCall) -> Reply {
    let (acting, body) = Acting::of(call).await?;
    let ChangeProjectRequest { ceiling, quota } = parsed(&body)?;
    let made = acting.app.iam.change_project(acting.did(), project, ceiling, quota).await;
    told(&acting, StatusCode::OK, made.map_err(|error| acting.failure(error))?)
}

/// Removes a project that nothing is in: no project, no identity, no sandbox.
#[utoipa::path(delete, path = "/v1/projects/{project}", operation_id = "remove_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded.")),
    responses((status = 204, description = "Removed.")))]
pub async fn remove(ProjectCall { call, project }: ProjectCall) -> Reply {
    let (acting, _) = Acting::of(call).await?;
    acting.app.nodes.look().await;
    let caller = &acting.behalf.principal.caller;
    let manages = project.parent().is_some_and(|above| {
        acting.app.iam.book().held(caller, &above).has(dsec_model::iam::Permission::ProjectManage)
    });
    let used = used_in(&acting.app, &project);
    if manages && let Some(sandboxes) = used.get(&dsec_model::iam::Resource::Sandboxes.into()) {
        let message = format!("{sandboxes} sandboxes of {project} live");
        return Err(Failure::new(ErrorKind::Conflict, message).hint("end them first: `dsec project stop`"));
    }
    let gone = acting.app.iam.remove_project(acting.did(), project).await;
    changed(StatusCode::NO_CONTENT, &gone.map_err(|error| acting.failure(error))?, |_| json!(null))
}

/// Ends all sandboxes of a project and of those in it. Safe to repeat.
#[utoipa::path(post, path = "/v1/projects/{project}/stop", operation_id = "stop_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded.")),
    request_body(content = Option<StopRequest>, description = "May be empty."),
    responses((status = 200, description = "How many were ended, and what failed.", body = TaskOutcome)))]
pub async fn stop(call: ProjectCall) -> Reply {
    call.told_to_all("stop").await?.stop().await
}

/// Pauses all sandboxes of a project and of those in it, side by side. Safe to repeat.
#[utoipa::path(post, path = "/v1/projects/{project}/pause", operation_id = "pause_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded.")),
    responses((status = 200, description = "How many were paused, and what failed.", body = TaskOutcome)))]
pub async fn pause(call: ProjectCall) -> Reply {
    call.told_to_all("pause").await?.pause().await
}

/// Resumes all paused sandboxes of a project and of those in it, side by side.
#[utoipa::path(post, path = "/v1/projects/{project}/resume", operation_id = "resume_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded.")),
    responses((status = 200, description = "How many were resumed, and what failed.", body = TaskOutcome)))]
pub async fn resume(call: ProjectCall) -> Reply {
    call.told_to_all("resume").await?.pause().await
}

/// Waits until no sandbox of a project, or of those in it, lives.
#[utoipa::path(post, path = "/v1/projects/{project}/wait", operation_id = "wait_project", tag = "projects",
    params(("project" = String, Path, description = "Its way from the root, percent-encoded.")),
    request_body(content = Option<TaskWaitRequest>, description = "May be empty."),
    responses((status = 200, description = "None is known to live any more; those on nodes that are lost are counted.", body = TaskWaited)))]
pub async fn wait(call: ProjectCall) -> Reply {
    let project = call.project.clone();
    call.told_to_all("wait").await?.wait(&format!("project {project}"), json!({ "project": project })).await
}

/// A request about the project that its path names.
pub struct ProjectCall {
    call: Call,
    project: ProjectPath,
}

impl FromRequest<Arc<App>> for ProjectCall {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Failure> {
        let mut call = Call::from_request(request, app).await?;
        let Path(project) = call.request.extract_parts::<Path<String>>().await.map_err(malformed_path)?;
        let project = project.parse().map_err(|error: dsec_model::iam::ProjectError| {
            Failure::new(ErrorKind::InvalidArgument, error.to_string()).detail(json!({ "field": "project" }))
        })?;
        Ok(Self { call, project })
    }
}

impl ProjectCall {
    /// What every node is to do with the sandboxes of the project.
    async fn told_to_all(self, what: &str) -> Result<ToAll, Failure> {
        let Self { call, project } = self;
        let called = Called::of(&call.request);
        let behalf = call.behalf.in_project(project).inspect_err(|failure| {
            note_denied(&call.app, &call.behalf.principal, &called, failure);
        })?;
        let mut headers = HeaderMap::new();
        behalf.write(&mut headers);
        let body = forward::whole(call.request.into_body()).await?;
        let meant = Meant { task: None, scope: behalf.may.clone() };
        Ok(ToAll { app: call.app, headers, path: format!("/internal/sandboxes/{what}"), body, meant })
    }
}

fn no_project(project: &ProjectPath) -> Failure {
    Failure::new(ErrorKind::NotFound, format!("no project {project}"))
        .detail(json!({ "what": "project", "name": project }))
        .hint("`dsec project ls` lists them")
}

fn told(acting: &Acting, status: StatusCode, done: Changed<ProjectRecord>) -> Reply {
    let sees = acting.app.iam.book().scope(&acting.behalf.principal.caller, rules::READS);
    changed(status, &done, |record| json!(shown(&acting.app, &sees, &record.path)))
}

fn shown(app: &App, sees: &Scope, path: &ProjectPath) -> Project {
    let book = app.iam.book();
    let kept = book.project(path).cloned();
    drop(book);
    Project {
        project: path.clone(),
        ceiling: kept.as_ref().and_then(|it| it.ceiling),
        quota: kept.as_ref().map(|it| it.quota.clone()).unwrap_or_default(),
        effective: effective(&app.iam, sees, path),
        used: used_in(app, path),
        created_ms: kept.as_ref().map(|it| it.created_ms),
        created_by: kept.and_then(|it| it.created_by).map(|by| by.0),
    }
}

/// The least quota of a project and of those it is in, as far as they are seen.
fn effective(iam: &Iam, sees: &Scope, path: &ProjectPath) -> Amounts {
    let book = iam.book();
    let mut least = Amounts::new();
    for above in path.upwards().filter(|above| sees.has(above)) {
        for (counted, most) in book.project(&above).into_iter().flat_map(|it| &it.quota) {
            let now = least.entry(*counted).or_insert(*most);
            *now = (*now).min(*most);
        }
    }
    least
}
