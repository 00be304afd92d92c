//! Requests about projects, identities and what they may do.

use std::time::Duration;

use dsec_model::iam::ProjectPath;
use dsec_proto::rest::{
    AuditList, ChangeProjectRequest, CreateGrantRequest, CreateIdentityRequest, CreateKeyRequest,
    CreateProjectRequest, Grant, GrantList, Identity, IdentityList, Key, Project, ProjectList, StopRequest,
    TaskOutcome, TaskWaitRequest, TaskWaited, WhoAmI,
};
use reqwest::Method;

use super::calls::WAIT_MARGIN;
use super::{Client, ClientError};
use crate::parse::segment;

fn project_path(project: &ProjectPath, what: &str) -> String {
    format!("/projects/{}{what}", segment(project.as_str()))
}

impl Client {
    /// Who the key belongs to.
    pub(crate) async fn whoami(&self) -> Result<WhoAmI, ClientError> {
        self.json(self.request(Method::GET, "/whoami")).await
    }

    /// The projects.
    pub(crate) async fn projects(&self) -> Result<Vec<Project>, ClientError> {
        self.json::<ProjectList>(self.request(Method::GET, "/projects")).await.map(|list| list.projects)
    }

    /// One project.
    pub(crate) async fn project(&self, project: &ProjectPath) -> Result<Project, ClientError> {
        self.json(self.request(Method::GET, &project_path(project, ""))).await
    }

    /// Makes a project.
    pub(crate) async fn create_project(
        &self,
        request: &CreateProjectRequest,
    ) -> Result<Project, ClientError> {
        self.json(self.request(Method::POST, "/projects").json(request)).await
    }

    /// Changes a project.
    pub(crate) async fn change_project(
        &self,
        project: &ProjectPath,
        request: &ChangeProjectRequest,
    ) -> Result<Project, ClientError> {
        self.json(self.request(Method::PATCH, &project_path(project, "")).json(request)).await
    }

    /// Removes a project.
    pub(crate) async fn remove_project(&self, project: &ProjectPath) -> Result<(), ClientError> {
        self.done(self.request(Method::DELETE, &project_path(project, ""))).await
    }

    /// Ends all sandboxes of a project and of those in it.
    pub(crate) async fn stop_project(
        &self,
        project: &ProjectPath,
        grace_ms: u64,
    ) -> Result<TaskOutcome, ClientError> {
        let http = self.request(Method::POST, &project_path(project, "/stop"));
        let limit = Duration::from_millis(grace_ms) + self.answer_timeout();
        self.json_within(http.json(&StopRequest { grace_ms }), limit).await
    }

    /// Waits until no sandbox of a project, or of those in it, lives.
    pub(crate) async fn wait_project(
        &self,
        project: &ProjectPath,
        limit: Duration,
    ) -> Result<TaskWaited, ClientError> {
        let request = TaskWaitRequest { timeout_ms: Some(limit.as_millis().try_into().unwrap_or(u64::MAX)) };
        let http = self.request(Method::POST, &project_path(project, "/wait")).json(&request);
        self.json_within(http, limit + WAIT_MARGIN).await
    }

    /// The identities.
    pub(crate) async fn identities(&self) -> Result<Vec<Identity>, ClientError> {
        self.json::<IdentityList>(self.request(Method::GET, "/identities")).await.map(|list| list.identities)
    }

    /// One identity, with what it was given and its keys.
    pub(crate) async fn identity(&self, identity: u64) -> Result<Identity, ClientError> {
        self.json(self.request(Method::GET, &format!("/identities/{identity}"))).await
    }

    /// Makes an identity.
    pub(crate) async fn create_identity(
        &self,
        request: &CreateIdentityRequest,
    ) -> Result<Identity, ClientError> {
        self.json(self.request(Method::POST, "/identities").json(request)).await
    }

    /// Removes an identity.
    pub(crate) async fn remove_identity(&self, identity: u64) -> Result<(), ClientError> {
        self.done(self.request(Method::DELETE, &format!("/identities/{identity}"))).await
    }

    /// Makes a key.
    pub(crate) async fn create_key(
        &self,
        identity: u64,
        request: &CreateKeyRequest,
    ) -> Result<Key, ClientError> {
        self.json(self.request(Method::POST, &format!("/identities/{identity}/keys")).json(request)).await
    }

    /// Revokes a key.
    pub(crate) async fn revoke_key(&self, id: &str) -> Result<(), ClientError> {
        self.done(self.request(Method::DELETE, &format!("/keys/{}", segment(id)))).await
    }

    /// The grants.
    pub(crate) async fn grants(&self) -> Result<Vec<Grant>, ClientError> {
        self.json::<GrantList>(self.request(Method::GET, "/grants")).await.map(|list| list.grants)
    }

    /// Gives something.
    pub(crate) async fn create_grant(&self, request: &CreateGrantRequest) -> Result<Grant, ClientError> {
        self.json(self.request(Method::POST, "/grants").json(request)).await
    }

    /// Takes a grant back.
    pub(crate) async fn revoke_grant(&self, grant: u64) -> Result<(), ClientError> {
        self.done(self.request(Method::DELETE, &format!("/grants/{grant}"))).await
    }

    /// A page of the audit log.
    pub(crate) async fn audit(
        &self,
        before: Option<&str>,
        limit: u32,
        denied: Option<bool>,
    ) -> Result<AuditList, ClientError> {
        let mut query = vec![("limit", limit.to_string())];
        query.extend(before.map(|before| ("before", before.to_owned())));
        query.extend(denied.map(|denied| ("denied", denied.to_string())));
        self.json(self.request(Method::GET, "/audit").query(&query)).await
    }
}
