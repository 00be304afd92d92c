//! On whose behalf a node is asked: who calls, in which project, and where they may do what they ask for.

use std::sync::Arc;

use dsec_iam::{Caller, IamError};
use dsec_model::ErrorKind;
use dsec_model::iam::{Permission, Permissions, ProjectPath, Scope};
use dsec_proto::rest::{CHARGE, KEY_ID, MAY, PROJECT, SEES};
use http::header::HeaderName;
use http::{HeaderMap, HeaderValue};
use serde_json::json;

use crate::app::App;
use crate::failure::Failure;
use crate::keys::Principal;
use crate::rules::Rule;

const PROJECT_HEADER: HeaderName = HeaderName::from_static(PROJECT);
const KEY_ID_HEADER: HeaderName = HeaderName::from_static(KEY_ID);
const SEES_HEADER: HeaderName = HeaderName::from_static(SEES);
const MAY_HEADER: HeaderName = HeaderName::from_static(MAY);
const CHARGE_HEADER: HeaderName = HeaderName::from_static(CHARGE);

/// Longest scope that is sent to a node, bytes: the head of a request has room for it and all else.
const SCOPE_MAX: usize = 32 << 10;

/// A caller whose call was found to be theirs to make.
#[derive(Debug, Clone)]
pub struct Behalf {
    /// Who calls.
    pub principal: Arc<Principal>,
    /// The project that the call acts in.
    pub project: ProjectPath,
    /// Where they may do what they ask for, as far as the call reaches.
    pub may: Scope,
    project_header: HeaderValue,
    sees_header: HeaderValue,
    /// Where it is not all that they see.
    may_header: Option<HeaderValue>,
}

impl Behalf {
    /// The server itself, asking for what it needs to know.
    pub fn server() -> Self {
        let principal = Principal::new(Caller::cluster("dsec-control", ProjectPath::root()));
        let (sees, may) = (Scope::everything(), Scope::everything());
        // Names of projects are visible ASCII.
        Self::new(Arc::new(principal), ProjectPath::root(), &sees, may).unwrap_or_else(|_| unreachable!())
    }

    fn new(
        principal: Arc<Principal>,
        project: ProjectPath,
        sees: &Scope,
        may: Scope,
    ) -> Result<Self, Failure> {
        let may_header = if *sees == may { None } else { Some(header(&may.to_string())?) };
        Ok(Self {
            project_header: header(project.as_str())?,
            sees_header: header(&sees.to_string())?,
            may_header,
            principal,
            project,
            may,
        })
    }

    /// Lets a caller make a call, or not.
    ///
    /// # Errors
    /// They may not; the project that they act in is none.
    pub fn find(
        app: &App,
        principal: Arc<Principal>,
        rule: Rule,
        headers: &HeaderMap,
    ) -> Result<Self, Failure> {
        let caller = &principal.caller;
        let project = acting_in(headers)?.unwrap_or_else(|| caller.home.clone());
        let book = app.iam.book();
        let denied = |at: &ProjectPath, missing: Permission| {
            Failure::from(IamError::Denied { project: at.clone(), missing: [missing].into_iter().collect() })
        };
        let (sees, may) = match rule {
            Rule::Key => (Scope::NOTHING, Scope::NOTHING),
            Rule::Cluster(wanted) => {
                let root = ProjectPath::root();
                if !book.held(caller, &root).has(wanted) {
                    return Err(denied(&root, wanted));
                }
                (Scope::everything(), Scope::everything())
            }
            Rule::Everything => {
                let root = ProjectPath::root();
                let missing = Permissions::ALL - book.held(caller, &root);
                if !missing.is_empty() {
                    return Err(IamError::Denied { project: root, missing }.into());
                }
                (Scope::everything(), Scope::everything())
            }
            Rule::Project(wanted) => {
                if !book.held(caller, &project).has(wanted) {
                    return Err(denied(&project, wanted));
                }
                if !book.has_project(&project) && project != caller.home {
                    return Err(IamError::NotFound { what: "project", name: project.to_string() }.into());
                }
                (book.scope(caller, Permission::SandboxRead), book.scope(caller, wanted))
            }
            Rule::Sandbox(wanted) => {
                let (sees, may) = (book.scope(caller, Permission::SandboxRead), book.scope(caller, wanted));
                if may.is_nothing() {
                    return Err(denied(&project, wanted));
                }
                (sees, may)
            }
            Rule::Below(wanted) => {
                let may = book.scope(caller, wanted).in_project(&project);
                if may.is_nothing() {
                    return Err(denied(&project, wanted));
                }
                (may.clone(), may)
            }
        };
        drop(book);
        Self::new(principal, project, &sees, may)
    }

    /// The same call, in another project: its path says which.
    ///
    /// # Errors
    /// There is nothing in it that the caller may do this to.
    pub fn in_project(&self, project: ProjectPath) -> Result<Self, Failure> {
        let may = self.may.clone().in_project(&project);
        if may.is_nothing() {
            return Err(IamError::NotFound { what: "project", name: project.to_string() }.into());
        }
        Self::new(Arc::clone(&self.principal), project, &may.clone(), may)
    }

    /// Whether a node may find, beyond what was found here, that the caller may not.
    pub fn is_for_the_node_to_find(&self) -> bool {
        self.may_header.is_some()
    }

    /// Puts it in the head of a request to a node, in place of what its caller may have put there.
    pub fn write(&self, headers: &mut HeaderMap) {
        headers.remove(CHARGE_HEADER);
        headers.insert(PROJECT_HEADER, self.project_header.clone());
        headers.insert(KEY_ID_HEADER, self.principal.key_id.clone());
        headers.insert(SEES_HEADER, self.sees_header.clone());
        match &self.may_header {
            Some(may) => headers.insert(MAY_HEADER, may.clone()),
            None => headers.remove(MAY_HEADER),
        };
    }
}

/// Puts what a create is charged with in its head.
///
/// # Errors
/// It is no header, which it is by its form.
pub fn write_charge(headers: &mut HeaderMap, charge: &dsec_proto::rest::Charge) -> Result<(), Failure> {
    headers.insert(CHARGE_HEADER, header(&charge.to_string())?);
    Ok(())
}

/// The project that a caller says the call is to act in.
fn acting_in(headers: &HeaderMap) -> Result<Option<ProjectPath>, Failure> {
    let mut given = headers.get_all(PROJECT_HEADER).iter();
    let Some(value) = given.next() else { return Ok(None) };
    let bad = |message: String| {
        Failure::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": PROJECT }))
    };
    if given.next().is_some() {
        return Err(bad(format!("{PROJECT} is given twice")));
    }
    let text = value.to_str().map_err(|_| bad(format!("{PROJECT} is not visible ASCII")))?;
    text.parse().map(Some).map_err(|error: dsec_model::iam::ProjectError| bad(error.to_string()))
}

fn header(text: &str) -> Result<HeaderValue, Failure> {
    if text.len() > SCOPE_MAX {
        let message = "what the key may do is spread over too many projects for one call";
        return Err(
            Failure::new(ErrorKind::Unsupported, message).hint("use keys that are narrowed to a project")
        );
    }
    HeaderValue::from_str(text)
        .map_err(|_| Failure::new(ErrorKind::Internal, "a scope has something in it that no header takes"))
}

impl From<IamError> for Failure {
    fn from(error: IamError) -> Self {
        let message = error.to_string();
        match error {
            IamError::Denied { project, missing } => {
                let missing: Vec<&str> = missing.iter().map(Permission::as_str).collect();
                Self::new(ErrorKind::PermissionDenied, format!("the key may not: {message}"))
                    .detail(json!({ "project": project, "missing": missing }))
                    .hint("`dsec whoami` shows what the key may do; who manages identities in the project can give more")
            }
            IamError::NotFound { what, name } => {
                Self::new(ErrorKind::NotFound, message).detail(json!({ "what": what, "name": name }))
            }
            IamError::AlreadyExists(_) => Self::new(ErrorKind::AlreadyExists, message),
            IamError::Conflict(_) => Self::new(ErrorKind::Conflict, message),
            IamError::Invalid { field, .. } => {
                Self::new(ErrorKind::InvalidArgument, message).detail(json!({ "field": field }))
            }
            IamError::Stale(_) => Self::new(ErrorKind::Unavailable, message)
                .hint("see that the database runs; the cluster's own key works meanwhile"),
            IamError::Database(_) | IamError::Open { .. } => {
                tracing::error!(error = message, "the database of identities failed");
                Self::new(ErrorKind::Unavailable, "the database of identities does not answer")
                    .hint("try again; the server's log has the reason")
            }
            IamError::Row(_) | IamError::Random(_) => Self::new(ErrorKind::Internal, message),
        }
    }
}
