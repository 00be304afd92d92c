//! What must hold, whatever the database.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use dsec_iam::{
    Accessed, Ask, AuditQuery, Bounds, Caller, Changed, Denied, Did, Iam, IamError, IdentityKind, NewKey,
    PoolChange, PoolLayer,
};
use dsec_model::PoolName;
use dsec_model::iam::{
    Amounts, Counted, GrantId, IdentityId, Permission, Permissions, ProjectPath, Resource, Role, Scope, Share,
};

pub struct Place {
    pub url: String,
}

type Scenario = fn(Place) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! scenarios {
    ($($name:ident),+ $(,)?) => {
        vec![$((stringify!($name), (|place| Box::pin($name(place))) as Scenario)),+]
    };
}

/// Those that one server is enough for.
pub fn alone() -> Vec<(&'static str, Scenario)> {
    scenarios![
        what_is_given_is_held,
        nobody_gives_more_than_they_hold,
        keys_are_narrowed_expire_and_are_revoked,
        what_is_taken_above_is_gone_below,
        nobody_sees_others,
        changes_and_denials_are_written_down,
        leases_are_never_more_than_the_quota,
        a_text_is_changed_by_one_at_a_time,
        accesses_add_up_and_are_forgotten,
        a_pool_has_what_the_last_sync_put_there,
    ]
}

/// Those of several servers.
pub fn shared() -> Vec<(&'static str, Scenario)> {
    scenarios![
        a_change_is_known_everywhere_when_it_returns,
        two_servers_share_a_quota,
        nobody_gets_more_before_all_have_said_what_they_use,
        who_is_gone_has_an_heir,
        who_was_given_up_begins_again,
    ]
}

fn path(text: &str) -> ProjectPath {
    text.parse().unwrap()
}

fn root() -> Caller {
    Caller::cluster("k-root", ProjectPath::root())
}

fn by(caller: &Caller) -> Did<'_> {
    Did { caller, request_id: "r-1" }
}

fn only(permission: Permission) -> Permissions {
    [permission].into_iter().collect()
}

fn manager() -> Permissions {
    Role::Runtime.permissions()
        | only(Permission::IdentityManage)
        | only(Permission::ProjectManage)
        | only(Permission::ProjectRead)
}

async fn project(iam: &Iam, text: &str) {
    iam.create_project(by(&root()), path(text), None, Amounts::new()).await.unwrap();
}

/// Somebody with a key, and what they were given.
async fn somebody(
    iam: &Iam,
    home: &str,
    name: &str,
    permissions: Permissions,
) -> (IdentityId, Caller, GrantId) {
    let made =
        iam.create_identity(by(&root()), path(home), name.to_owned(), IdentityKind::Service).await.unwrap();
    let id = made.made.id;
    let granted = iam.grant(by(&root()), id, path(home), permissions).await.unwrap();
    let key = key(iam, &root(), id, Bounds::default()).await.unwrap();
    (id, iam.caller(&key.key).unwrap().unwrap(), granted.made.id)
}

async fn key(iam: &Iam, caller: &Caller, id: IdentityId, bounds: Bounds) -> Result<NewKey, IamError> {
    let made = iam.create_key(by(caller), id, "test".to_owned(), bounds, None).await?;
    Ok(made.made)
}

fn is_denied<T: std::fmt::Debug>(result: Result<T, IamError>) {
    assert!(matches!(result, Err(IamError::Denied { .. })), "{result:?}");
}

fn is_unknown<T: std::fmt::Debug>(result: Result<T, IamError>) {
    assert!(matches!(result, Err(IamError::NotFound { .. })), "{result:?}");
}

async fn what_is_given_is_held(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    project(&iam, "root/rl").await;
    project(&iam, "root/rl/job").await;
    let twice = iam.create_project(by(&root()), path("root/rl"), None, Amounts::new()).await;
    assert!(matches!(twice, Err(IamError::AlreadyExists(_))), "{twice:?}");
    is_unknown(iam.create_project(by(&root()), path("root/no/where"), None, Amounts::new()).await);
    let (id, caller, _) = somebody(&iam, "root/rl", "ci", Role::Runtime.permissions()).await;
    let quota = Amounts::from([(Resource::Sandboxes.into(), 7)]);
    iam.change_project(by(&root()), path("root/rl"), None, Some(quota.clone())).await.unwrap();
    drop(iam);
    // All of it is there after a restart.
    let iam = Iam::open(&place.url).await.unwrap();
    let book = iam.book();
    assert_eq!(book.held(&caller, &path("root/rl/job")), Role::Runtime.permissions());
    assert_eq!(book.held(&caller, &path("root")), Permissions::NONE);
    assert_eq!(book.scope(&caller, Permission::SandboxUse), Scope::of(path("root/rl")));
    assert!(book.scope(&caller, Permission::LayerWrite).is_nothing());
    assert_eq!(book.identity(id).unwrap().name, "ci");
    assert_eq!(book.quotas()[&path("root/rl")], quota);
    assert_eq!(book.scope(&root(), Permission::NodeManage), Scope::everything());
}

async fn nobody_gives_more_than_they_hold(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    for name in ["root/rl", "root/rl/job", "root/other"] {
        project(&iam, name).await;
    }
    let (alice_id, alice, _) = somebody(&iam, "root/rl", "alice", manager()).await;
    let agent =
        iam.create_identity(by(&alice), path("root/rl/job"), "agent".to_owned(), IdentityKind::Agent).await;
    let agent = agent.unwrap().made.id;
    iam.grant(by(&alice), agent, path("root/rl/job"), Role::Runtime.permissions()).await.unwrap();
    is_denied(iam.grant(by(&alice), agent, path("root/rl/job"), only(Permission::LayerWrite)).await);
    is_denied(iam.grant(by(&alice), agent, path("root/other"), Role::Runtime.permissions()).await);
    is_denied(iam.grant(by(&alice), alice_id, path("root"), only(Permission::SandboxRead)).await);
    // Who manages an identity that holds more than they do gets no key of it.
    iam.grant(by(&root()), agent, path("root/other"), Role::Owner.permissions()).await.unwrap();
    is_denied(key(&iam, &alice, agent, Bounds::default()).await);
    let narrowed = Bounds { project: Some(path("root/rl")), permissions: None };
    let agents = key(&iam, &alice, agent, narrowed).await.unwrap();
    let agents = iam.caller(&agents.key).unwrap().unwrap();
    assert_eq!(iam.book().held(&agents, &path("root/other")), Permissions::NONE);
    assert_eq!(iam.book().held(&agents, &path("root/rl/job")), Role::Runtime.permissions());
    // A narrowed key makes no wider one, not even for its own identity.
    is_denied(key(&iam, &agents, agent, Bounds::default()).await);
    // Nobody lifts the quota or the ceiling that they are under.
    is_denied(iam.change_project(by(&alice), path("root/rl"), None, Some(Amounts::new())).await);
    iam.change_project(by(&alice), path("root/rl/job"), None, Some(Amounts::new())).await.unwrap();
    is_denied(iam.create_project(by(&agents), path("root/rl/job/a"), None, Amounts::new()).await);
}

async fn keys_are_narrowed_expire_and_are_revoked(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    project(&iam, "root/rl").await;
    let (id, caller, _) = somebody(&iam, "root/rl", "ci", Role::Builder.permissions()).await;
    let reads = Bounds { project: None, permissions: Some(only(Permission::SandboxRead)) };
    let made = key(&iam, &caller, id, reads).await.unwrap();
    let reader = iam.caller(&made.key).unwrap().unwrap();
    assert_eq!(iam.book().held(&reader, &path("root/rl")), only(Permission::SandboxRead));
    assert!(iam.book().scope(&reader, Permission::SandboxUse).is_nothing());
    iam.revoke_key(by(&caller), &made.record.id).await.unwrap();
    assert_eq!(iam.caller(&made.key).unwrap(), None);
    is_unknown(iam.revoke_key(by(&caller), &made.record.id).await);
    let brief =
        iam.create_key(by(&caller), id, "brief".to_owned(), Bounds::default(), Some(300)).await.unwrap().made;
    assert!(iam.caller(&brief.key).unwrap().is_some());
    tokio::time::sleep(Duration::from_millis(350)).await;
    assert_eq!(iam.caller(&brief.key).unwrap(), None, "it has expired");
    assert_eq!(iam.caller("dsec_nobody").unwrap(), None);
    let other = key(&iam, &caller, id, Bounds::default()).await.unwrap();
    iam.remove_identity(by(&root()), id).await.unwrap();
    assert_eq!(iam.caller(&other.key).unwrap(), None, "its owner is gone");
    assert_eq!(iam.book().grants().count(), 0);
    for (life, name) in [(Some(0), "x"), (Some(u64::MAX), "x"), (None, ""), (None, "two\nlines")] {
        let refused = iam.create_key(by(&root()), id, name.to_owned(), Bounds::default(), life).await;
        assert!(matches!(refused, Err(IamError::Invalid { .. })), "{refused:?}");
    }
}

async fn what_is_taken_above_is_gone_below(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    project(&iam, "root/rl").await;
    project(&iam, "root/rl/job").await;
    let (_, alice, alices) = somebody(&iam, "root/rl", "alice", manager()).await;
    let bob =
        iam.create_identity(by(&alice), path("root/rl/job"), "bob".to_owned(), IdentityKind::Person).await;
    let bob = bob.unwrap().made.id;
    let given =
        iam.grant(by(&alice), bob, path("root/rl/job"), Role::Runtime.permissions()).await.unwrap().made;
    let bobs = key(&iam, &alice, bob, Bounds::default()).await.unwrap();
    let bobs = iam.caller(&bobs.key).unwrap().unwrap();
    let held = || iam.book().held(&bobs, &path("root/rl/job"));
    assert_eq!(held(), Role::Runtime.permissions());
    let ceiling = Some(Some(Role::Viewer.permissions()));
    iam.change_project(by(&root()), path("root/rl"), ceiling, None).await.unwrap();
    assert_eq!(held(), Role::Viewer.permissions() & Role::Runtime.permissions());
    assert_eq!(iam.book().counts_for(&given), held());
    iam.change_project(by(&root()), path("root/rl"), Some(None), None).await.unwrap();
    assert_eq!(held(), Role::Runtime.permissions());
    iam.revoke_grant(by(&root()), alices).await.unwrap();
    assert_eq!(held(), Permissions::NONE);
    let conflict = iam.remove_project(by(&root()), path("root/rl")).await;
    assert!(matches!(conflict, Err(IamError::Conflict(_))), "{conflict:?}");
    iam.remove_identity(by(&root()), bob).await.unwrap();
    iam.remove_project(by(&root()), path("root/rl/job")).await.unwrap();
    assert!(!iam.book().has_project(&path("root/rl/job")));
    project(&iam, "root/rl/job").await;
    assert!(iam.book().has_project(&path("root/rl/job")), "it can be made again");
}

async fn nobody_sees_others(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    project(&iam, "root/a").await;
    project(&iam, "root/b").await;
    let (_, alice, _) = somebody(&iam, "root/a", "alice", manager()).await;
    let (bob, _, bobs) = somebody(&iam, "root/b", "bob", manager()).await;
    is_unknown(iam.grant(by(&alice), bob, path("root/a"), only(Permission::SandboxRead)).await);
    is_unknown(iam.remove_identity(by(&alice), bob).await);
    is_unknown(key(&iam, &alice, bob, Bounds::default()).await);
    is_unknown(iam.revoke_grant(by(&alice), bobs).await);
    let id = iam.book().keys_of(bob).next().unwrap().id.clone();
    is_unknown(iam.revoke_key(by(&alice), &id).await);
    is_unknown(iam.remove_identity(by(&alice), IdentityId(999)).await);
}

async fn changes_and_denials_are_written_down(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    project(&iam, "root/a").await;
    project(&iam, "root/b").await;
    let (_, alice, _) = somebody(&iam, "root/a", "alice", manager()).await;
    let denied = Denied {
        action: "PUT /v1/images/{name}",
        target: "/v1/images/x",
        detail: "layer.write",
        request_id: "r-7",
    };
    for _ in 0..5 {
        iam.denied(&alice, &denied);
    }
    iam.write_denials().await.unwrap();
    let all =
        iam.audit(&Scope::everything(), &AuditQuery { limit: 100, ..AuditQuery::default() }).await.unwrap();
    let actions: Vec<&str> = all.iter().rev().map(|entry| entry.action.as_str()).collect();
    let expected = [
        "project.create",
        "project.create",
        "identity.create",
        "grant.create",
        "key.create",
        "PUT /v1/images/{name}",
    ];
    assert_eq!(actions, expected);
    assert_eq!((all[0].denied, all[0].count, all[0].who.as_str()), (true, 5, "alice"));
    assert_eq!(all[0].request_id, "r-7");
    assert!(all.iter().all(|entry| !entry.detail.contains("dsec_") && !entry.target.contains("dsec_")));
    let of_b = iam
        .audit(&Scope::of(path("root/b")), &AuditQuery { limit: 100, ..AuditQuery::default() })
        .await
        .unwrap();
    assert_eq!(of_b.len(), 1);
    let page =
        iam.audit(&Scope::everything(), &AuditQuery { limit: 2, ..AuditQuery::default() }).await.unwrap();
    let next = AuditQuery { limit: 100, before: Some(page[1].id.clone()), denied: Some(false) };
    assert_eq!(iam.audit(&Scope::everything(), &next).await.unwrap().len(), 4);
}

const SANDBOXES: Counted = Counted { resource: Resource::Sandboxes, backend: None };

fn share(used: u64, need: u64) -> Share {
    Share { used, need, most: 100, others: 0, replicas: 2, is_scarce: false }
}

fn ask(share: Share) -> Ask<'static> {
    Ask { share, since: i64::MAX, living: &[] }
}

async fn leases_are_never_more_than_the_quota(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    let rl = path("root/rl");
    let lease = async |share: Share| iam.lease(&rl, SANDBOXES, ask(share)).await.unwrap().amount;
    assert_eq!(lease(share(0, 1)).await, 17);
    assert_eq!(lease(Share { replicas: 1, ..share(0, 1) }).await, 100);
    assert_eq!(lease(Share { is_scarce: true, ..share(3, 0) }).await, 3);
    iam.ask_back(&rl, SANDBOXES).await.unwrap();
    iam.ask_back(&rl, SANDBOXES).await.unwrap();
    let scarce = iam.scarce().await.unwrap();
    assert_eq!((scarce.len(), scarce[0].times, &scarce[0].project), (1, 2, &rl));
    drop(iam);
    // The server of before is gone, since nobody else can use its file; on PostgreSQL it must be silent first.
    let iam = Iam::open(&place.url).await.unwrap();
    let replicas = iam.replicas().await.unwrap();
    assert_eq!(replicas.len(), 2);
    let before = replicas.iter().find(|replica| replica.id != iam.me().as_str()).unwrap();
    if place.url.starts_with("sqlite") {
        assert!(before.is_gone);
    }
    let inherited = iam.inherit(&before.id).await.unwrap().unwrap();
    assert_eq!((inherited.len(), inherited[0].amount), (1, 3));
    assert_eq!(iam.inherit(&before.id).await.unwrap(), None, "once");
    assert_eq!(iam.lease(&rl, SANDBOXES, ask(share(3, 1))).await.unwrap().others, 0);
    iam.forget_replica(&before.id).await.unwrap();
    assert_eq!(iam.replicas().await.unwrap().len(), 1);
}

/// Two servers that keep themselves up to date.
async fn two(place: &Place) -> (std::sync::Arc<Iam>, std::sync::Arc<Iam>) {
    let open = async || {
        let iam = std::sync::Arc::new(Iam::open(&place.url).await.unwrap());
        let kept = std::sync::Arc::clone(&iam);
        tokio::spawn(async move { kept.keep().await });
        iam
    };
    (open().await, open().await)
}

async fn a_change_is_known_everywhere_when_it_returns(place: Place) {
    let (one, other) = two(&place).await;
    project(&one, "root/a").await;
    let (id, _, grant) = somebody(&one, "root/a", "ci", Role::Runtime.permissions()).await;
    let made = key(&one, &root(), id, Bounds::default()).await.unwrap();
    let caller = other.caller(&made.key).unwrap().expect("the other server knows the key");
    assert!(other.book().held(&caller, &path("root/a")).has(Permission::SandboxUse));
    let Changed { servers, told, .. } = one.revoke_grant(by(&root()), grant).await.unwrap();
    assert_eq!((servers, told), (2, 2));
    assert_eq!(other.book().held(&caller, &path("root/a")), Permissions::NONE);
    one.revoke_key(by(&root()), &made.record.id).await.unwrap();
    assert_eq!(other.caller(&made.key).unwrap(), None);
    // Both at once: one of them makes it.
    let (cluster, name) = (root(), path("root/same"));
    let (first, second) = tokio::join!(
        one.create_project(by(&cluster), name.clone(), None, Amounts::new()),
        other.create_project(by(&cluster), name.clone(), None, Amounts::new()),
    );
    assert_eq!(u8::from(first.is_ok()) + u8::from(second.is_ok()), 1, "{first:?} {second:?}");
    one.end().await.unwrap();
    let Changed { servers, .. } =
        other.create_project(by(&root()), path("root/z"), None, Amounts::new()).await.unwrap();
    assert_eq!(servers, 1, "one has ended");
}

async fn two_servers_share_a_quota(place: Place) {
    let (one, other) = two(&place).await;
    let rl = path("root/rl");
    let mut has = [0_u64, 0];
    // Both want one more, again and again, at the same time.
    for _ in 0..60 {
        let (a, b) = tokio::join!(
            one.lease(&rl, SANDBOXES, ask(Share { is_scarce: true, ..share(has[0], 1) })),
            other.lease(&rl, SANDBOXES, ask(Share { is_scarce: true, ..share(has[1], 1) })),
        );
        has = [a.unwrap().amount, b.unwrap().amount];
        assert!(has.iter().sum::<u64>() <= 100, "{has:?}");
    }
    assert_eq!(has.iter().sum::<u64>(), 100, "all of it can be had: {has:?}");
}

async fn nobody_gets_more_before_all_have_said_what_they_use(place: Place) {
    let (one, other) = two(&place).await;
    let (rl, living) = (path("root/rl"), [one.me().to_string(), other.me().to_string()]);
    project(&one, "root/rl").await;
    let quota = Amounts::from([(SANDBOXES, 8)]);
    one.change_project(by(&root()), rl.clone(), None, Some(quota)).await.unwrap();
    let of = |used, need| Share { used, need, most: 8, others: 0, replicas: 2, is_scarce: false };
    let (share, since) = (of(5, 1), one.version());
    let first = one.lease(&rl, SANDBOXES, Ask { share, since, living: &living }).await.unwrap();
    assert_eq!((first.amount, first.is_settled), (5, false), "the other may use three already");
    let old = other
        .lease(&rl, SANDBOXES, Ask { share: of(3, 0), since: since - 1, living: &living })
        .await
        .unwrap();
    assert_eq!((old.amount, old.is_settled), (3, false), "it does not know of the quota yet");
    let (share, since) = (of(3, 0), other.version());
    let known = other.lease(&rl, SANDBOXES, Ask { share, since, living: &living }).await.unwrap();
    assert_eq!((known.amount, known.others, known.is_settled), (3, 5, true));
    let full = one.lease(&rl, SANDBOXES, Ask { share: of(5, 1), since, living: &living }).await.unwrap();
    assert_eq!((full.amount, full.is_settled), (5, true));
}

async fn who_is_gone_has_an_heir(place: Place) {
    let (one, other) = two(&place).await;
    let rl = path("root/rl");
    one.lease(&rl, SANDBOXES, ask(share(10, 0))).await.unwrap();
    let gone = one.me().to_string();
    let living = async || other.replicas().await.unwrap().iter().filter(|it| !it.is_gone).count();
    assert_eq!(living().await, 2);
    one.end().await.unwrap();
    assert_eq!(living().await, 1);
    let inherited = other.inherit(&gone).await.unwrap().unwrap();
    assert_eq!(inherited[0].amount, 15);
    let now = other.lease(&rl, SANDBOXES, ask(share(10, 0))).await.unwrap();
    assert_eq!((now.amount, now.others), (15, 0));
}

async fn who_was_given_up_begins_again(place: Place) {
    let (one, other) = two(&place).await;
    let before = one.me();
    other.inherit(before.as_str()).await.unwrap().unwrap();
    let began = std::time::Instant::now();
    while one.me() == before {
        assert!(began.elapsed() < Duration::from_secs(10), "it goes on as if nothing had happened");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let replicas = other.replicas().await.unwrap();
    let now = replicas.iter().find(|replica| replica.id == one.me().as_str()).unwrap();
    assert!(!now.is_gone && now.heir.is_none());
}

async fn a_text_is_changed_by_one_at_a_time(place: Place) {
    let texts = Iam::open(&place.url).await.unwrap().documents();
    assert_eq!((texts.read("t").await.unwrap(), texts.version("t").await.unwrap()), (None, 0));
    let adding = (0..4).map(|_| {
        let texts = texts.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                let turn = texts.turn("t").await.unwrap();
                let before: u32 = turn.body().map_or(0, |body| body.parse().unwrap());
                tokio::time::sleep(Duration::from_millis(1)).await;
                turn.write((before + 1).to_string()).await.unwrap();
            }
        })
    });
    for each in adding.collect::<Vec<_>>() {
        each.await.unwrap();
    }
    assert_eq!(
        (texts.read("t").await.unwrap(), texts.version("t").await.unwrap()),
        (Some("40".to_owned()), 40)
    );
    // Who gives a turn back has changed nothing, and keeps nobody.
    drop(texts.turn("t").await.unwrap());
    texts.turn("other").await.unwrap().write("o".to_owned()).await.unwrap();
    assert_eq!(texts.version("t").await.unwrap(), 40);
    texts.turn("t").await.unwrap().write("41".to_owned()).await.unwrap();
    assert_eq!(texts.read("t").await.unwrap().as_deref(), Some("41"));
}

async fn accesses_add_up_and_are_forgotten(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    let accessed =
        |layers: &str, count: u64, last_ms: u64| Accessed { layers: layers.to_owned(), count, last_ms };
    iam.add_accesses(9, vec![accessed("base/b", 1, 1)]).await.unwrap();
    iam.add_accesses(10, vec![accessed("base/b workspace/w", 2, 10), accessed("base/a", 1, 11)])
        .await
        .unwrap();
    iam.add_accesses(10, vec![accessed("base/a", 4, 12)]).await.unwrap();
    iam.add_accesses(11, vec![accessed("base/a", 1, 20)]).await.unwrap();
    assert_eq!(
        iam.accesses(10).await.unwrap(),
        [accessed("base/a", 6, 20), accessed("base/b workspace/w", 2, 10)]
    );
    iam.forget_accesses(11).await.unwrap();
    assert_eq!(iam.accesses(0).await.unwrap(), [accessed("base/a", 1, 20)]);
    let many: Vec<Accessed> = (0..2500).map(|number| accessed(&format!("base/{number}"), 1, 1)).collect();
    iam.add_accesses(12, many).await.unwrap();
    assert_eq!(iam.accesses(12).await.unwrap().len(), 2500);
}

async fn a_pool_has_what_the_last_sync_put_there(place: Place) {
    let iam = Iam::open(&place.url).await.unwrap();
    let pool: PoolName = "cloud".parse().unwrap();
    assert_eq!(iam.pool_set(&pool, 0).await.unwrap(), None, "there is none, and none was known");
    let layer = |layer: &str, digest: &str| PoolLayer { layer: layer.to_owned(), digest: digest.to_owned() };
    let first = iam.begin_pool_sync(&pool).await.unwrap();
    let added = vec![layer("base/a", "d1"), layer("base/b", "d2")];
    let change = PoolChange { added, bytes: 30, budget: 40, ..PoolChange::default() };
    iam.change_pool(&pool, first, &change).await.unwrap();
    let set = iam.pool_set(&pool, 0).await.unwrap().unwrap();
    assert_eq!((set.bytes, set.budget, set.synced_ms), (30, 40, 0));
    assert_eq!(set.layers, [layer("base/a", "d1"), layer("base/b", "d2")]);
    assert_eq!(iam.pool_set(&pool, set.version).await.unwrap(), None, "nothing is new");
    let second = iam.begin_pool_sync(&pool).await.unwrap();
    let late = iam.change_pool(&pool, first, &change).await.unwrap_err();
    assert!(matches!(late, IamError::Conflict(_)), "{late}");
    let change = PoolChange {
        dropped: vec!["base/a".to_owned()],
        added: vec![layer("base/b", "d3")],
        bytes: 10,
        budget: 20,
        ended_ms: Some(5),
    };
    iam.change_pool(&pool, second, &change).await.unwrap();
    let now = iam.pool_set(&pool, set.version).await.unwrap().unwrap();
    assert_eq!((now.bytes, now.budget, now.synced_ms), (10, 20, 5));
    assert_eq!(now.layers, [layer("base/b", "d3")]);
    let other = iam.pool_set(&"other".parse().unwrap(), 0).await.unwrap();
    assert_eq!(other, None);
}
