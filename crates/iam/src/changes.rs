//! The way to all of it: what is known, and every change of it.

use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsec_model::iam::{
    Amounts, Counted, Grant, GrantId, Grantor, IdentityId, Permission, Permissions, ProjectPath, Scope,
};
use sqlx::Row;

use crate::audit::{AuditEntry, AuditQuery, Denials, Denied};
use crate::book::{Book, Caller};
use crate::db::Database;
use crate::error::IamError;
use crate::leases::{self, Ask, Lease, Leased, Scarcity};
use crate::records::{Bounds, GrantRecord, IdentityKind, IdentityRecord, KeyRecord, ProjectRecord, Record};
use crate::replicas::{self, Pulses, Replica, ReplicaId};
use crate::secret;

/// How often a server looks for changes of others.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a change waits for other servers to have seen it.
const SEEN_WITHIN: Duration = Duration::from_secs(5);
/// How long what is known is believed when the database is silent: rollouts go on through an outage of some minutes, and a key that
/// was revoked meanwhile does not work for ever.
const BELIEVED_FOR: Duration = Duration::from_secs(300);
/// How long the audit log keeps what it has.
const AUDIT_KEPT: Duration = Duration::from_secs(90 * 24 * 3600);
/// Longest name of an identity or a key, bytes.
const NAME_MAX: usize = 128;
/// Longest life of a key, ms: ten years.
const KEY_LIFE_MAX_MS: u64 = 10 * 366 * 24 * 3600 * 1000;
/// Ceilings below one project, at most: a scope names those that matter, in a header.
const CEILINGS_MAX: usize = 200;

/// What a change was, for the audit log.
#[derive(Debug, Clone, Copy)]
pub struct Did<'a> {
    /// Who does it.
    pub caller: &'a Caller,
    /// The request, as the logs have it.
    pub request_id: &'a str,
}

/// A change that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed<T> {
    /// What came of it.
    pub made: T,
    /// Servers that live.
    pub servers: usize,
    /// Those of them that know of it.
    pub told: usize,
}

/// A key that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewKey {
    /// What is kept of it.
    pub record: KeyRecord,
    /// The key itself, which nobody can be told again.
    pub key: String,
}

/// What a change does: rows to write, and what the log says of it.
struct Plan<T> {
    made: T,
    records: Vec<Record>,
    project: ProjectPath,
    action: &'static str,
    target: String,
    detail: String,
}

/// Identities and all about them.
pub struct Iam {
    pub(crate) db: Database,
    book: RwLock<Book>,
    me: RwLock<ReplicaId>,
    pulses: Pulses,
    /// One change of this server at a time.
    changing: tokio::sync::Mutex<()>,
    denials: Denials,
    heard: Mutex<Instant>,
}

impl std::fmt::Debug for Iam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Iam").finish_non_exhaustive()
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Iam {
    /// Opens a database, `sqlite:PATH` or `postgres://...`, and reads all of it.
    ///
    /// # Errors
    /// It cannot be opened or read.
    pub async fn open(url: &str) -> Result<Self, IamError> {
        let db = Database::open(url).await?;
        let me = ReplicaId::new()?;
        let iam = Self {
            db,
            book: RwLock::default(),
            me: RwLock::new(me.clone()),
            pulses: Pulses::default(),
            changing: tokio::sync::Mutex::new(()),
            denials: Denials::default(),
            heard: Mutex::new(Instant::now()),
        };
        iam.refresh().await?;
        let version = iam.book().version;
        replicas::register(&iam.db.pool, &me, version).await?;
        Ok(iam)
    }

    pub(crate) fn pool(&self) -> &sqlx::AnyPool {
        &self.db.pool
    }

    /// What is known.
    pub fn book(&self) -> RwLockReadGuard<'_, Book> {
        self.book.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The change up to which everything is known.
    pub fn version(&self) -> i64 {
        self.book().version
    }

    /// The name of this server.
    pub fn me(&self) -> ReplicaId {
        self.me.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Who a key belongs to; none: nobody, or no longer.
    ///
    /// # Errors
    /// The database was silent for so long that what is known is not believed any more.
    pub fn caller(&self, key: &str) -> Result<Option<Caller>, IamError> {
        let silent = self.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if silent > BELIEVED_FOR {
            return Err(IamError::Stale(silent.as_secs()));
        }
        Ok(self.book().caller(&secret::digest(key), now_ms()))
    }

    /// Hears what others changed. Returns whether there was anything.
    ///
    /// # Errors
    /// The database's.
    pub async fn refresh(&self) -> Result<bool, IamError> {
        let mut connection = self.db.pool.acquire().await?;
        let known = self.book().version;
        let row = sqlx::query("SELECT version FROM meta WHERE id = 1").fetch_one(&mut *connection).await?;
        let version: i64 = row.try_get("version")?;
        let is_new = version > known;
        if is_new {
            let records = Record::newer(&mut connection, known).await?;
            self.apply(records, version);
        }
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Ok(is_new)
    }

    fn apply(&self, records: Vec<Record>, version: i64) {
        let mut book = self.book.write().unwrap_or_else(PoisonError::into_inner);
        for record in records {
            book.apply(record);
        }
        book.version = book.version.max(version);
    }

    /// Keeps what is known up to date, shows others that this server lives, and writes down who was not let, until it is dropped.
    pub async fn keep(&self) {
        let mut told = 0;
        let mut beaten = Instant::now();
        let mut swept: Option<Instant> = None;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let step = async {
                self.refresh().await?;
                let version = self.book().version;
                if !self.db.is_ours_alone() && (told != version || beaten.elapsed() >= Duration::from_secs(1))
                {
                    if !replicas::beat(&self.db.pool, &self.me(), version).await? {
                        self.begin_again(version).await?;
                    }
                    (told, beaten) = (version, Instant::now());
                }
                self.write_denials().await?;
                if swept.is_none_or(|at| at.elapsed() > Duration::from_secs(3600)) {
                    let kept = u64::try_from(AUDIT_KEPT.as_millis()).unwrap_or(u64::MAX);
                    AuditEntry::forget(&self.db.pool, now_ms().saturating_sub(kept)).await?;
                    swept = Some(Instant::now());
                }
                Ok::<(), IamError>(())
            };
            if let Err(error) = step.await {
                tracing::warn!(%error, "identities are not kept up to date");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }

    /// Others have given this server up, and one of them answers for what it did: it is another from now on.
    async fn begin_again(&self, version: i64) -> Result<(), IamError> {
        let new = ReplicaId::new()?;
        replicas::register(&self.db.pool, &new, version).await?;
        let mut me = self.me.write().unwrap_or_else(PoisonError::into_inner);
        tracing::warn!(before = %me, now = %new, "other servers had given this one up; it begins again");
        *me = new;
        Ok(())
    }

    /// Tells others that this server ends.
    ///
    /// # Errors
    /// The database's.
    pub async fn end(&self) -> Result<(), IamError> {
        self.write_denials().await?;
        replicas::end(&self.db.pool, &self.me()).await
    }

    /// All servers that there are or were.
    ///
    /// # Errors
    /// The database's.
    pub async fn replicas(&self) -> Result<Vec<Replica>, IamError> {
        replicas::all(&self.db.pool, &self.pulses, &self.me(), self.db.is_ours_alone()).await
    }

    /// Forgets a server that is gone and that nothing is charged to any more.
    ///
    /// # Errors
    /// The database's.
    pub async fn forget_replica(&self, id: &str) -> Result<(), IamError> {
        replicas::forget(&self.db.pool, id).await
    }

    // --- changes

    /// Makes a change: raises the version, which nobody else does until it is over, hears what was done before, decides, writes.
    async fn change<T>(
        &self,
        did: Did<'_>,
        decide: impl FnOnce(&Book, u64) -> Result<Plan<T>, IamError>,
    ) -> Result<Changed<T>, IamError> {
        let _one_at_a_time = self.changing.lock().await;
        let mut tx = self.db.pool.begin().await?;
        let row = sqlx::query("UPDATE meta SET version = version + 1 WHERE id = 1 RETURNING version")
            .fetch_one(&mut *tx)
            .await?;
        let version: i64 = row.try_get("version")?;
        let known = self.book().version;
        if known < version - 1 {
            let records = Record::newer(&mut tx, known).await?;
            self.apply(records, version - 1);
        }
        let Plan { made, records, project, action, target, detail } =
            decide(&self.book(), version.cast_unsigned())?;
        for record in &records {
            record.write(&mut tx, version).await?;
        }
        let entry = AuditEntry {
            project: project.to_string(),
            action: action.to_owned(),
            target,
            detail,
            request_id: did.request_id.to_owned(),
            ..AuditEntry::new(did.caller, now_ms(), self.me().as_str())
        };
        entry.write(&mut tx).await?;
        tx.commit().await?;
        self.apply(records, version);
        let (servers, told) = self.told(version).await?;
        Ok(Changed { made, servers, told })
    }

    /// Waits until all servers know of a change, and says how many there are and how many do.
    async fn told(&self, version: i64) -> Result<(usize, usize), IamError> {
        let began = Instant::now();
        let me = self.me();
        loop {
            let mut living = self.replicas().await?;
            living.retain(|replica| !replica.is_gone);
            let knows = |replica: &&Replica| replica.id == me.as_str() || replica.seen >= version;
            let told = living.iter().filter(knows).count();
            if told == living.len() || began.elapsed() > SEEN_WITHIN {
                return Ok((living.len(), told));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes a project. The caller must manage the one that it is in.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn create_project(
        &self,
        did: Did<'_>,
        path: ProjectPath,
        ceiling: Option<Permissions>,
        quota: Amounts,
    ) -> Result<Changed<ProjectRecord>, IamError> {
        self.change(did, |book, version| {
            let above = path.parent().ok_or_else(|| IamError::AlreadyExists("project root".to_owned()))?;
            book.require(did.caller, &above, only(Permission::ProjectManage))?;
            if !book.has_project(&above) {
                return Err(no_project(&above));
            }
            if book.has_project(&path) {
                return Err(IamError::AlreadyExists(format!("project {path}")));
            }
            few_ceilings(book, &path, ceiling)?;
            let record = ProjectRecord {
                path: path.clone(),
                ceiling,
                quota,
                created_ms: now_ms(),
                created_by: did.caller.identity,
                version: version.cast_signed(),
                removed: false,
            };
            Ok(project_plan(record, "project.create"))
        })
        .await
    }

    /// Sets a project's ceiling or quota. The caller must manage the one that it is in; the root's are the cluster's.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn change_project(
        &self,
        did: Did<'_>,
        path: ProjectPath,
        ceiling: Option<Option<Permissions>>,
        quota: Option<Amounts>,
    ) -> Result<Changed<ProjectRecord>, IamError> {
        self.change(did, |book, version| {
            let above = path.parent().unwrap_or_else(ProjectPath::root);
            book.require(did.caller, &above, only(Permission::ProjectManage))?;
            if path.parent().is_none() && ceiling.flatten().is_some() {
                let message = "the root has no ceiling: who could raise it again?".to_owned();
                return Err(IamError::Invalid { field: "ceiling", message });
            }
            let kept = book.project(&path).cloned();
            let is_root = path == ProjectPath::root();
            let kept = match kept {
                Some(kept) => kept,
                None if is_root => ProjectRecord {
                    path: path.clone(),
                    ceiling: None,
                    quota: Amounts::new(),
                    created_ms: now_ms(),
                    created_by: None,
                    version: 0,
                    removed: false,
                },
                None => return Err(no_project(&path)),
            };
            few_ceilings(book, &path, ceiling.flatten())?;
            let ceiling = ceiling.unwrap_or(kept.ceiling);
            let quota = quota.unwrap_or_else(|| kept.quota.clone());
            let version = version.cast_signed();
            Ok(project_plan(ProjectRecord { ceiling, quota, version, ..kept }, "project.change"))
        })
        .await
    }

    /// Removes a project that nothing is in.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn remove_project(
        &self,
        did: Did<'_>,
        path: ProjectPath,
    ) -> Result<Changed<ProjectRecord>, IamError> {
        self.change(did, |book, _| {
            let above = path.parent().ok_or_else(|| IamError::Conflict("the root stays".to_owned()))?;
            book.require(did.caller, &above, only(Permission::ProjectManage))?;
            let kept = book.project(&path).cloned().ok_or_else(|| no_project(&path))?;
            if let Some(inner) = book.projects().find(|it| it.path != path && it.path.is_within(&path)) {
                return Err(IamError::Conflict(format!("{} is in {path}", inner.path)));
            }
            if let Some(somebody) = book.identities().find(|it| it.project == path) {
                return Err(IamError::Conflict(format!("identity {} is in {path}", somebody.name)));
            }
            let mut plan = project_plan(ProjectRecord { removed: true, ..kept }, "project.remove");
            let grants = book.grants().filter(|it| it.grant.project == path).cloned();
            plan.records.extend(grants.map(|it| Record::Grant(GrantRecord { removed: true, ..it })));
            Ok(plan)
        })
        .await
    }

    /// Makes an identity that holds nothing yet.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn create_identity(
        &self,
        did: Did<'_>,
        project: ProjectPath,
        name: String,
        kind: IdentityKind,
    ) -> Result<Changed<IdentityRecord>, IamError> {
        check_name("name", &name)?;
        self.change(did, |book, version| {
            book.require(did.caller, &project, only(Permission::IdentityManage))?;
            if !book.has_project(&project) {
                return Err(no_project(&project));
            }
            if book.identities().any(|it| it.project == project && it.name == name) {
                return Err(IamError::AlreadyExists(format!("identity {name} of {project}")));
            }
            let record = IdentityRecord {
                id: IdentityId(version),
                project: project.clone(),
                name: name.clone(),
                kind,
                created_ms: now_ms(),
                created_by: did.caller.identity,
                removed: false,
            };
            Ok(Plan {
                made: record.clone(),
                records: vec![Record::Identity(record)],
                project,
                action: "identity.create",
                target: format!("{version} {name}"),
                detail: kind.as_str().to_owned(),
            })
        })
        .await
    }

    /// Removes an identity, its keys and its grants; what it gave counts for nothing from then on.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn remove_identity(
        &self,
        did: Did<'_>,
        id: IdentityId,
    ) -> Result<Changed<IdentityRecord>, IamError> {
        self.change(did, |book, _| {
            let kept = seen_identity(book, did.caller, id)?.clone();
            book.require(did.caller, &kept.project, only(Permission::IdentityManage))?;
            let gone = IdentityRecord { removed: true, ..kept };
            let keys = book.keys_of(id).cloned();
            let grants = book.grants().filter(|it| it.grant.to == id).cloned();
            let mut records = vec![Record::Identity(gone.clone())];
            records.extend(keys.map(|it| Record::Key(KeyRecord { removed: true, ..it })));
            records.extend(grants.map(|it| Record::Grant(GrantRecord { removed: true, ..it })));
            Ok(Plan {
                project: gone.project.clone(),
                action: "identity.remove",
                target: format!("{} {}", id.0, gone.name),
                detail: String::new(),
                made: gone,
                records,
            })
        })
        .await
    }

    /// Makes a key: for oneself, or, by who manages identities there, for one who holds no more than the caller.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn create_key(
        &self,
        did: Did<'_>,
        identity: IdentityId,
        name: String,
        bounds: Bounds,
        life_ms: Option<u64>,
    ) -> Result<Changed<NewKey>, IamError> {
        check_name("name", &name)?;
        if life_ms.is_some_and(|life| life == 0 || life > KEY_LIFE_MAX_MS) {
            let message = "a key's life must be more than nothing and at most ten years".to_owned();
            return Err(IamError::Invalid { field: "expires_in_s", message });
        }
        let (key, id) = (secret::key()?, secret::id('k')?);
        let sha256 = secret::digest(&key);
        let changed = self
            .change(did, |book, _| {
                let owner = seen_identity(book, did.caller, identity)?;
                if did.caller.identity != Some(identity) {
                    book.require(did.caller, &owner.project, only(Permission::IdentityManage))?;
                }
                if let Some(project) = &bounds.project
                    && !book.has_project(project)
                {
                    return Err(no_project(project));
                }
                book.require_all_of(did.caller, identity, &bounds)?;
                let record = KeyRecord {
                    id: id.clone(),
                    identity,
                    sha256,
                    name: name.clone(),
                    bounds,
                    created_ms: now_ms(),
                    created_by: did.caller.identity,
                    expires_ms: life_ms.map(|life| now_ms().saturating_add(life)),
                    removed: false,
                };
                Ok(Plan {
                    made: record.clone(),
                    records: vec![Record::Key(record)],
                    project: owner.project.clone(),
                    action: "key.create",
                    target: id,
                    detail: format!("for {} {}", identity.0, owner.name),
                })
            })
            .await?;
        let Changed { made: record, servers, told } = changed;
        Ok(Changed { made: NewKey { record, key }, servers, told })
    }

    /// Revokes a key: one's own, or, by who manages identities there, anybody's.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn revoke_key(&self, did: Did<'_>, id: &str) -> Result<Changed<KeyRecord>, IamError> {
        self.change(did, |book, _| {
            let unknown = || IamError::NotFound { what: "key", name: id.to_owned() };
            let kept = book.key(id).cloned().ok_or_else(unknown)?;
            let owner = seen_identity(book, did.caller, kept.identity).map_err(|_| unknown())?;
            if did.caller.identity != Some(kept.identity) {
                book.require(did.caller, &owner.project, only(Permission::IdentityManage))?;
            }
            let gone = KeyRecord { removed: true, ..kept };
            Ok(Plan {
                made: gone.clone(),
                records: vec![Record::Key(gone)],
                project: owner.project.clone(),
                action: "key.revoke",
                target: id.to_owned(),
                detail: format!("of {} {}", owner.id.0, owner.name),
            })
        })
        .await
    }

    /// Gives somebody something in a project, of what the caller holds there.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn grant(
        &self,
        did: Did<'_>,
        to: IdentityId,
        project: ProjectPath,
        permissions: Permissions,
    ) -> Result<Changed<GrantRecord>, IamError> {
        if permissions.is_empty() {
            let message = "nothing is given: say a role or permissions".to_owned();
            return Err(IamError::Invalid { field: "permissions", message });
        }
        self.change(did, |book, version| {
            book.require(did.caller, &project, permissions | only(Permission::IdentityManage))?;
            if !book.has_project(&project) {
                return Err(no_project(&project));
            }
            let to = seen_identity(book, did.caller, to)?;
            let by = did.caller.identity.map_or(Grantor::Cluster, Grantor::Identity);
            let record = GrantRecord {
                id: GrantId(version),
                grant: Grant { to: to.id, project: project.clone(), permissions, by },
                created_ms: now_ms(),
                removed: false,
            };
            Ok(grant_plan(record, to, "grant.create"))
        })
        .await
    }

    /// Takes a grant back, and with it all that rests on it: its giver may, and who manages identities there.
    ///
    /// # Errors
    /// See [`IamError`].
    pub async fn revoke_grant(&self, did: Did<'_>, id: GrantId) -> Result<Changed<GrantRecord>, IamError> {
        self.change(did, |book, _| {
            let unknown = || IamError::NotFound { what: "grant", name: id.0.to_string() };
            let kept = book.grant(id).cloned().ok_or_else(unknown)?;
            let is_givers = did.caller.identity.is_some_and(|me| kept.grant.by == Grantor::Identity(me));
            if !is_givers {
                if !book.held(did.caller, &kept.grant.project).has(Permission::ProjectRead) {
                    return Err(unknown());
                }
                book.require(did.caller, &kept.grant.project, only(Permission::IdentityManage))?;
            }
            let to = book.identity(kept.grant.to).ok_or_else(unknown)?;
            Ok(grant_plan(GrantRecord { removed: true, ..kept }, to, "grant.revoke"))
        })
        .await
    }

    // --- the audit log

    /// Somebody was not let.
    pub fn denied(&self, caller: &Caller, denied: &Denied<'_>) {
        self.denials.add(caller, denied, now_ms(), self.me().as_str());
    }

    /// Writes down who was not let since.
    ///
    /// # Errors
    /// The database's; they are not lost then.
    pub async fn write_denials(&self) -> Result<(), IamError> {
        let entries = self.denials.take();
        if entries.is_empty() {
            return Ok(());
        }
        let mut tx = self.db.pool.begin().await?;
        for entry in &entries {
            entry.write(&mut tx).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Something was done that is not kept here, such as a node being cordoned.
    ///
    /// # Errors
    /// The database's.
    pub async fn note(&self, did: Did<'_>, action: &str, target: &str) -> Result<(), IamError> {
        let entry = AuditEntry {
            action: action.to_owned(),
            target: target.to_owned(),
            request_id: did.request_id.to_owned(),
            ..AuditEntry::new(did.caller, now_ms(), self.me().as_str())
        };
        entry.write(&mut *self.db.pool.acquire().await?).await
    }

    /// The latest entries of the projects of a scope.
    ///
    /// # Errors
    /// The database's.
    pub async fn audit(&self, scope: &Scope, query: &AuditQuery) -> Result<Vec<AuditEntry>, IamError> {
        AuditEntry::read(&self.db.pool, scope, query).await
    }

    // --- leases of quota

    /// Makes this server's lease what it asks for, as far as the quota has it.
    ///
    /// # Errors
    /// The database's: the lease is what it was.
    pub async fn lease(
        &self,
        project: &ProjectPath,
        counted: Counted,
        ask: Ask<'_>,
    ) -> Result<Leased, IamError> {
        leases::set(&self.db.pool, &self.me(), project, counted, ask).await
    }

    /// Asks other servers to give back what they do not use.
    ///
    /// # Errors
    /// The database's.
    pub async fn ask_back(&self, project: &ProjectPath, counted: Counted) -> Result<(), IamError> {
        leases::ask_back(&self.db.pool, project, counted).await
    }

    /// What was asked back so far.
    ///
    /// # Errors
    /// The database's.
    pub async fn scarce(&self) -> Result<Vec<Scarcity>, IamError> {
        leases::scarce(&self.db.pool).await
    }

    /// Becomes the heir of a server that is gone. None: another was faster.
    ///
    /// # Errors
    /// The database's.
    pub async fn inherit(&self, gone: &str) -> Result<Option<Vec<Lease>>, IamError> {
        leases::inherit(&self.db.pool, &self.me(), gone).await
    }
}

fn only(permission: Permission) -> Permissions {
    [permission].into_iter().collect()
}

fn no_project(path: &ProjectPath) -> IamError {
    IamError::NotFound { what: "project", name: path.to_string() }
}

/// An identity that the caller may know of: themselves, or one of a project whose identities they see.
fn seen_identity<'a>(
    book: &'a Book,
    caller: &Caller,
    id: IdentityId,
) -> Result<&'a IdentityRecord, IamError> {
    let unknown = || IamError::NotFound { what: "identity", name: id.0.to_string() };
    let found = book.identity(id).ok_or_else(unknown)?;
    let held = book.held(caller, &found.project);
    let is_seen = held.has(Permission::ProjectRead) || held.has(Permission::IdentityManage);
    if is_seen || caller.identity == Some(id) { Ok(found) } else { Err(unknown()) }
}

fn few_ceilings(book: &Book, path: &ProjectPath, ceiling: Option<Permissions>) -> Result<(), IamError> {
    let others = book.projects().filter(|it| it.ceiling.is_some() && it.path != *path).count();
    if ceiling.is_some() && others >= CEILINGS_MAX {
        let message = format!("{CEILINGS_MAX} projects have a ceiling already, the most there can be");
        return Err(IamError::Conflict(message));
    }
    Ok(())
}

fn check_name(field: &'static str, name: &str) -> Result<(), IamError> {
    if (1..=NAME_MAX).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let message = format!("{field} must be 1 to {NAME_MAX} bytes in one line; it has {} bytes", name.len());
    Err(IamError::Invalid { field, message })
}

fn project_plan(record: ProjectRecord, action: &'static str) -> Plan<ProjectRecord> {
    let quota: Vec<String> =
        record.quota.iter().map(|(counted, amount)| format!("{counted}={amount}")).collect();
    Plan {
        project: record.path.clone(),
        action,
        target: record.path.to_string(),
        detail: quota.join(" "),
        made: record.clone(),
        records: vec![Record::Project(record)],
    }
}

fn grant_plan(record: GrantRecord, to: &IdentityRecord, action: &'static str) -> Plan<GrantRecord> {
    Plan {
        project: record.grant.project.clone(),
        action,
        target: record.id.0.to_string(),
        detail: format!("{:?} to {} {}", record.grant.permissions, to.id.0, to.name),
        made: record.clone(),
        records: vec![Record::Grant(record)],
    }
}
