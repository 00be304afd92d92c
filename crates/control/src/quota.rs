//! Quotas: what this server may let in still, and the part of it that it has leased (ADR 14).
//!
//! ```text
//! create ── charge ──► Ledger ── no room in the lease ──► more: a greater lease, after nodes and other servers were asked
//!                        ▲  ▲
//!        nodes' reports ─┘  └─ keep, once a second: leases given back, servers that are gone inherited
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsec_iam::{Ask, IamError, Lease, Leased, Replica, ReplicaId, Scarcity};
use dsec_model::iam::{
    Amounts, Backend, Counted, Exceeded, Ledger, Outcome, ProjectPath, Resource, Share, Ticket, add,
    amounts_of,
};
use dsec_model::{ErrorKind, Limits};
use dsec_proto::rest::{Charge, Charged, ChargesFenced, FenceChargesRequest};
use http::HeaderMap;
use serde_json::json;
use tokio::sync::watch;

use crate::app::App;
use crate::behalf::Behalf;
use crate::create::Needs;
use crate::failure::Failure;
use crate::watcher::Charges;

/// How often leases are looked at, and reports are taken in.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often servers that are gone are looked for.
const REPLICAS_EVERY: Duration = Duration::from_secs(1);
/// How long a create waits after a start for what an earlier server let in to be known.
const READY_WITHIN: Duration = Duration::from_secs(10);
/// How often others are asked and nodes are looked at before a create is refused, how often others are waited for who have not said yet what
/// they use, and the pause in which they do.
const LOOKS_MAX: u32 = 5;
const WAITS_MAX: u32 = 12;
const ASK_PAUSE: Duration = Duration::from_millis(300);
/// How long a refusal is remembered, for those that came before it.
const REFUSAL_KEPT: Duration = Duration::from_secs(60);

type Of = (ProjectPath, Counted);

/// What a server that is gone was leased, and which nodes let nothing more in on its account.
struct Inherited {
    /// It, and those that it had inherited.
    ids: HashSet<String>,
    leases: Vec<Lease>,
    /// What was charged to them, by node that was fenced.
    fenced: HashMap<usize, Vec<(ProjectPath, Amounts)>>,
}

#[derive(Default)]
struct State {
    ledger: Ledger,
    /// The change of identities that the ledger's quotas are of.
    version: Option<i64>,
    me: Option<ReplicaId>,
    /// The servers that this one answers for, itself among them.
    mine: HashSet<String>,
    inherited: Vec<Inherited>,
    /// When each node was asked for the report that was taken in last.
    absorbed: HashMap<usize, u64>,
    /// How often each was scarce when it was last looked at.
    scarce: HashMap<Of, i64>,
    /// A turn for each that more is asked for of.
    asking: HashMap<Of, Arc<tokio::sync::Mutex<()>>>,
    /// When what others have was last looked at in vain.
    refused: HashMap<Of, Instant>,
    /// Quotas that were set, of which the database does not have yet what this server uses.
    untold: HashSet<Of>,
    /// The servers that live, by name.
    living: Vec<String>,
}

/// Quotas as this server keeps to them.
pub struct Quotas {
    state: Mutex<State>,
    /// One lease at a time.
    leasing: tokio::sync::Mutex<()>,
    ready: watch::Sender<bool>,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            leasing: tokio::sync::Mutex::new(()),
            ready: watch::Sender::new(false),
        }
    }
}

/// A create that is counted, until it is told what became of it.
pub struct Counting<'a> {
    app: &'a App,
    node: usize,
    ticket: Option<Ticket>,
    /// What the node is told.
    pub charge: Charge,
}

impl Counting<'_> {
    /// The node made nothing.
    pub fn refused(mut self) {
        self.settle(Outcome::Refused);
    }

    /// The node has answered: what it says of itself from now on has this in it.
    pub fn answered(mut self) {
        self.settle(Outcome::Made { node: self.node });
    }

    fn settle(&mut self, outcome: Outcome) {
        if let Some(ticket) = self.ticket.take() {
            self.app.quotas.lock().ledger.settle(ticket, outcome, self.app.nodes.watched.now_ms());
        }
    }
}

impl Drop for Counting<'_> {
    /// Its caller hung up, or the node broke off: it may have arrived.
    fn drop(&mut self) {
        self.settle(Outcome::Unknown { node: self.node });
    }
}

impl Quotas {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a create that is about to be sent to a node. `is_first`: it was not sent to another before.
    ///
    /// # Errors
    /// `resource_exhausted`: a quota has no room for it.
    pub async fn charge<'a>(
        &self,
        app: &'a App,
        behalf: &Behalf,
        node: usize,
        needs: &Needs,
        is_first: bool,
    ) -> Result<Counting<'a>, Failure> {
        let limits = needs.limits(app.nodes.watched.defaults(node).as_ref());
        let amounts = amounts_of(
            Backend::ALL.into_iter().find(|backend| backend.as_str() == needs.backend()),
            [
                (Resource::Sandboxes, 1),
                (Resource::CpuMillis, limits.cpu_millis),
                (Resource::MemoryMib, limits.memory_mib),
                (Resource::DiskMib, limits.disk_mib),
            ]
            .into_iter()
            .chain(is_first.then_some((Resource::CreatesPerS, 1))),
        );
        self.sync(app);
        if self.lock().ledger.is_limited(&behalf.project) {
            self.ready().await?;
        }
        let arrived = Instant::now();
        loop {
            let began = {
                let mut state = self.lock();
                let by = state.me.as_ref().map(ToString::to_string).unwrap_or_default();
                let began = state.ledger.begin(&behalf.project, amounts.clone(), app.nodes.watched.now_ms());
                began.map(|ticket| (ticket, by))
            };
            match began {
                Ok((ticket, by)) => {
                    let Limits { cpu_millis, memory_mib, disk_mib, .. } = limits;
                    let charge = Charge { by, ticket: ticket.0, cpu_millis, memory_mib, disk_mib };
                    return Ok(Counting { app, node, ticket: Some(ticket), charge });
                }
                Err(exceeded) => {
                    if !self.more(app, &exceeded, arrived).await? {
                        return Err(refusal(app, behalf, &exceeded));
                    }
                }
            }
        }
    }

    /// Waits until it is known what servers before this one let in.
    async fn ready(&self) -> Result<(), Failure> {
        let mut ready = self.ready.subscribe();
        let waits = ready.wait_for(|ready| *ready);
        if tokio::time::timeout(READY_WITHIN, waits).await.is_ok() {
            return Ok(());
        }
        Err(Failure::new(ErrorKind::Unavailable, "what is in use of quotas is not known yet")
            .hint("the server has just started; try again in a moment"))
    }

    /// Takes in what changed of identities: quotas, and this server's own name.
    fn sync(&self, app: &App) {
        let (version, me) = (app.iam.version(), app.iam.me());
        let mut state = self.lock();
        if state.me.as_ref() != Some(&me) {
            // Another server answers for what was let in by the one that this was.
            state.ledger.restart();
            state.mine = HashSet::from([me.to_string()]);
            state.inherited.clear();
            state.absorbed.clear();
            (state.me, state.version) = (Some(me), None);
        }
        if state.version != Some(version) {
            let before = state.version.unwrap_or(0);
            let book = app.iam.book();
            let changed = book.limited_since(before);
            let of = changed.flat_map(|it| it.quota.keys().map(|counted| (it.path.clone(), *counted)));
            state.untold.extend(of);
            state.ledger.set_quotas(book.quotas(), app.nodes.watched.now_ms());
            state.version = Some(version);
        }
    }

    /// Takes in what nodes have said since.
    fn absorb(&self, app: &App) {
        let reports = app.nodes.watched.charged();
        let mut state = self.lock();
        let me = state.me.as_ref().map(ToString::to_string).unwrap_or_default();
        for (at, report) in reports.iter().enumerate() {
            let Charges { asked_ms, charged, arrived } = &**report;
            if *asked_ms > state.absorbed.get(&at).copied().unwrap_or(0) {
                state.absorbed.insert(at, *asked_ms);
                let mine = by_project(charged.iter().filter(|charged| state.mine.contains(&charged.by)));
                let arrived = arrived.iter().filter(|it| it.by == me).map(|it| Ticket(it.ticket));
                state.ledger.report(at, *asked_ms, mine, arrived);
            }
        }
    }

    /// Sees to a greater lease. Returns whether there is room now.
    async fn more(&self, app: &App, exceeded: &Exceeded, arrived: Instant) -> Result<bool, Failure> {
        let of: Of = (exceeded.project.clone(), exceeded.counted);
        let turn = Arc::clone(self.lock().asking.entry(of.clone()).or_default());
        let _one_at_a_time = turn.lock().await;
        // Somebody has looked since this one came: of thousands that wait here one asks.
        if self.lock().refused.get(&of).is_some_and(|looked| arrived < *looked) {
            return Ok(false);
        }
        let (mut looked, mut looks, mut waits) = (Instant::now(), 0, 0);
        while looks < LOOKS_MAX && waits < WAITS_MAX {
            self.absorb(app);
            match self.ask(app, exceeded, looks > 0).await? {
                None => return Ok(true),
                // The others say what they use within a moment.
                Some(Leased { is_settled: false, .. }) => waits += 1,
                Some(Leased { others, .. }) => {
                    let passes = exceeded.counted.resource == Resource::CreatesPerS;
                    if others > 0 {
                        app.iam.ask_back(&exceeded.project, exceeded.counted).await?;
                    } else if passes || looks > 0 {
                        break;
                    }
                    // Some may have ended since the last reports, and others may not use what they have.
                    looked = Instant::now();
                    looks += 1;
                    app.nodes.look().await;
                    if others == 0 {
                        continue;
                    }
                }
            }
            tokio::time::sleep(ASK_PAUSE).await;
        }
        self.lock().refused.insert(of, looked);
        Ok(false)
    }

    /// Asks for a greater lease. None: there is room.
    async fn ask(
        &self,
        app: &App,
        Exceeded { project, counted, wanted, .. }: &Exceeded,
        is_scarce: bool,
    ) -> Result<Option<Leased>, Failure> {
        let _one_at_a_time = self.leasing.lock().await;
        let now_ms = app.nodes.watched.now_ms();
        let (used, asked) = {
            let state = self.lock();
            let Some(most) = state.most(project, *counted) else { return Ok(None) };
            let used = state.ledger.used(project, *counted, now_ms);
            let leased = state.ledger.leased(project, *counted);
            if used.saturating_add(*wanted) <= leased {
                return Ok(None);
            }
            let replicas = state.living.len() as u64;
            // What is leased may be used by the time that the database answers.
            let held = used.max(leased);
            (used, state.ask(Share { used: held, need: *wanted, most, others: 0, replicas, is_scarce }))
        };
        let leased = app.iam.lease(project, *counted, asked.as_ref()).await?;
        self.lock().ledger.lease(project, *counted, leased.amount);
        Ok((used.saturating_add(*wanted) > leased.amount).then_some(leased))
    }

    /// Takes reports in, gives leases back, and answers for servers that are gone, until it is dropped.
    pub async fn keep(&self, app: &App) {
        let mut looked: Option<Instant> = None;
        app.nodes.watched.gathered().await;
        loop {
            self.sync(app);
            self.absorb(app);
            let step = async {
                if looked.is_none_or(|at| at.elapsed() >= REPLICAS_EVERY) {
                    self.inherit(app).await?;
                    self.fence(app).await;
                    looked = Some(Instant::now());
                }
                self.give_back(app).await
            };
            match step.await {
                Ok(()) => {
                    self.ready.send_replace(true);
                }
                Err(error) => tracing::warn!(%error, "leases of quotas are not kept"),
            }
            {
                let mut state = self.lock();
                state.refused.retain(|_, looked| looked.elapsed() < REFUSAL_KEPT);
                state.asking.retain(|_, turn| Arc::strong_count(turn) > 1);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Becomes the heir of servers that are gone, and finds out which this one answers for.
    async fn inherit(&self, app: &App) -> Result<(), IamError> {
        let replicas = app.iam.replicas().await?;
        let mut gained = Vec::new();
        for gone in replicas.iter().filter(|replica| replica.is_gone && replica.heir.is_none()) {
            if let Some(leases) = app.iam.inherit(&gone.id).await? {
                tracing::info!(
                    server = gone.id,
                    leases = leases.len(),
                    "a server is gone; this one answers for it"
                );
                gained.push(Inherited { ids: chain(&replicas, &gone.id), leases, fenced: HashMap::new() });
            }
        }
        self.answer_for(&app.iam.me(), &replicas, gained);
        self.absorb(app);
        self.forget(app, &replicas).await
    }

    fn answer_for(&self, me: &ReplicaId, replicas: &[Replica], gained: Vec<Inherited>) {
        let mut state = self.lock();
        let living = replicas.iter().filter(|replica| !replica.is_gone);
        state.living = living.map(|replica| replica.id.clone()).collect();
        let mut mine = chain(replicas, me.as_str());
        mine.extend(gained.iter().flat_map(|gained| gained.ids.iter().cloned()));
        if mine != state.mine {
            state.mine = mine;
            // What nodes said before is looked at with other eyes.
            state.absorbed.clear();
        }
        for gained in gained {
            for lease in &gained.leases {
                let amount = state.ledger.leased(&lease.project, lease.counted).saturating_add(lease.amount);
                state.ledger.lease(&lease.project, lease.counted, amount);
            }
            state.inherited.push(gained);
        }
        owe(&mut state);
    }

    /// Forgets servers that nothing is charged to any more, once every node has said so.
    async fn forget(&self, app: &App, replicas: &[Replica]) -> Result<(), IamError> {
        let reports = app.nodes.watched.charged();
        if reports.iter().any(|report| report.asked_ms == 0) {
            return Ok(());
        }
        let charged: HashSet<&str> =
            reports.iter().flat_map(|report| &report.charged).map(|charged| charged.by.as_str()).collect();
        let is_settled = |id: &String| {
            let state = self.lock();
            state.mine.contains(id) && !state.inherited.iter().any(|inherited| inherited.ids.contains(id))
        };
        let me = app.iam.me();
        for gone in replicas.iter().filter(|it| it.heir.is_some() && it.id != me.as_str()) {
            let is_heir_of_some = replicas.iter().any(|it| it.heir.as_ref() == Some(&gone.id));
            if is_settled(&gone.id) && !charged.contains(gone.id.as_str()) && !is_heir_of_some {
                app.iam.forget_replica(&gone.id).await?;
            }
        }
        Ok(())
    }

    /// Has nodes let nothing more in on account of servers that are gone.
    async fn fence(&self, app: &App) {
        let to_ask: Vec<(usize, String)> = {
            let state = self.lock();
            let nodes = app.nodes.placed();
            let missing = nodes.into_iter().map(|(at, _)| at).flat_map(|at| {
                let open =
                    state.inherited.iter().filter(move |inherited| !inherited.fenced.contains_key(&at));
                open.flat_map(move |inherited| inherited.ids.iter().map(move |id| (at, id.clone())))
            });
            missing.collect()
        };
        let mut headers = HeaderMap::new();
        Behalf::server().write(&mut headers);
        let asked = to_ask.into_iter().map(|(at, by)| {
            let headers = &headers;
            async move {
                let question = FenceChargesRequest { by: by.clone() };
                let answer = match app.nodes.at(at) {
                    Some(node) => node.tell("/internal/charges/fence", headers, &question).await,
                    None => Err(Failure::new(ErrorKind::Unavailable, "the node has left")),
                };
                (at, by, answer)
            }
        });
        let mut answers: HashMap<(usize, String), Vec<Charged>> = HashMap::new();
        for (at, by, answer) in futures_util::future::join_all(asked).await {
            match answer {
                Ok(ChargesFenced { charged }) => drop(answers.insert((at, by), charged)),
                // An edge of before charges knows of none.
                Err(failure) if failure.0.kind() == ErrorKind::NotFound => {
                    answers.insert((at, by), Vec::new());
                }
                Err(failure) => {
                    tracing::debug!(at, error = failure.0.0.message, "a node is not fenced");
                }
            }
        }
        let places: Vec<usize> = app.nodes.placed().into_iter().map(|(at, _)| at).collect();
        let mut state = self.lock();
        for inherited in &mut state.inherited {
            for at in places.iter().copied() {
                let of_all: Option<Vec<&Vec<Charged>>> =
                    inherited.ids.iter().map(|id| answers.get(&(at, id.clone()))).collect();
                if let Some(of_all) = of_all {
                    inherited.fenced.entry(at).or_insert_with(|| by_project(of_all.into_iter().flatten()));
                }
            }
        }
        state.inherited.retain(|inherited| !places.iter().all(|at| inherited.fenced.contains_key(at)));
        owe(&mut state);
    }

    /// Whether somebody could not get what they needed since this was last looked at.
    fn is_news(&self, wanted_by_others: &[Scarcity]) -> bool {
        let state = self.lock();
        let is_new = |it: &Scarcity| {
            state.scarce.get(&(it.project.clone(), it.counted)).is_none_or(|seen| *seen != it.times)
        };
        wanted_by_others.iter().any(is_new)
    }

    /// Says what is used of quotas that were set, and gives back what is leased and neither used nor likely to be soon.
    async fn give_back(&self, app: &App) -> Result<(), IamError> {
        let wanted_by_others = {
            let is_alone = self.lock().living.len() <= 1;
            if is_alone { Vec::new() } else { app.iam.scarce().await? }
        };
        if self.is_news(&wanted_by_others) {
            // Some may have ended since the last reports: who asks waits for them.
            app.nodes.look().await;
            self.absorb(app);
        }
        let (told, spare) = {
            let mut state = self.lock();
            let told = std::mem::take(&mut state.untold);
            (told, spare(&mut state, wanted_by_others, app.nodes.watched.now_ms()))
        };
        let nothing = |of: Of| (of, None);
        let all = told.into_iter().map(nothing).chain(spare.into_iter().map(|(of, keep)| (of, Some(keep))));
        for ((project, counted), keep) in all {
            let _one_at_a_time = self.leasing.lock().await;
            // Lowered here before it is there: in between nobody can use what another may get already.
            let asked = {
                let mut state = self.lock();
                let now_ms = app.nodes.watched.now_ms();
                let Some(most) = state.most(&project, counted) else { continue };
                let used = match keep {
                    Some(keep) => state.ledger.lower(&project, counted, keep, now_ms),
                    None => {
                        let leased = state.ledger.leased(&project, counted);
                        leased.max(state.ledger.used(&project, counted, now_ms))
                    }
                };
                let replicas = state.living.len() as u64;
                state.ask(Share { used, need: 0, most, others: 0, replicas, is_scarce: true })
            };
            match app.iam.lease(&project, counted, asked.as_ref()).await {
                Ok(leased) => self.lock().ledger.lease(&project, counted, leased.amount),
                Err(error) => {
                    self.lock().untold.insert((project, counted));
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// An ask of a lease, with what it is asked on.
struct Asked {
    share: Share,
    since: i64,
    living: Vec<String>,
}

impl Asked {
    fn as_ref(&self) -> Ask<'_> {
        Ask { share: self.share, since: self.since, living: &self.living }
    }
}

impl State {
    fn most(&self, project: &ProjectPath, counted: Counted) -> Option<u64> {
        let mut quotas = self.ledger.quotas();
        quotas.find(|(at, of, _)| (*at, *of) == (project, counted)).map(|(_, _, most)| most)
    }

    fn ask(&self, share: Share) -> Asked {
        Asked { share, since: self.version.unwrap_or(0), living: self.living.clone() }
    }
}

/// Leases that have more than is used or likely to be soon, and what they should be.
fn spare(state: &mut State, wanted_by_others: Vec<Scarcity>, now_ms: u64) -> Vec<(Of, u64)> {
    if state.living.len() <= 1 {
        return Vec::new();
    }
    let mut scarce = HashSet::new();
    for it in wanted_by_others {
        let of = (it.project, it.counted);
        if state.scarce.insert(of.clone(), it.times) != Some(it.times) {
            scarce.insert(of);
        }
    }
    let replicas = state.living.len() as u64;
    let mut spare = Vec::new();
    for (project, counted, most) in state.ledger.quotas() {
        let used = state.ledger.used(project, counted, now_ms);
        let leased = state.ledger.leased(project, counted);
        let of = (project.clone(), counted);
        let is_scarce = scarce.contains(&of);
        let keep = Share { used, need: 0, most, others: 0, replicas, is_scarce }.lease();
        // A little too much is left alone, or each create would be a lease given back and taken again.
        let is_much = leased > keep.saturating_add(keep / 4).saturating_add(16);
        if leased > keep && (is_scarce || is_much) {
            spare.push((of, keep));
        }
    }
    spare
}

/// What is used in a project by all that nodes last said, whoever let it in.
pub fn used_in(app: &App, project: &ProjectPath) -> Amounts {
    let mut used = Amounts::new();
    for charged in app.nodes.watched.charged().iter().flat_map(|report| &report.charged) {
        if charged.project.is_within(project) {
            add(&mut used, &amounts(charged));
        }
    }
    used
}

fn amounts(charged: &Charged) -> Amounts {
    let backend = Backend::ALL.into_iter().find(|backend| backend.as_str() == charged.backend);
    amounts_of(
        backend,
        [
            (Resource::Sandboxes, charged.sandboxes),
            (Resource::CpuMillis, charged.cpu_millis),
            (Resource::MemoryMib, charged.memory_mib),
            (Resource::DiskMib, charged.disk_mib),
        ],
    )
}

fn by_project<'a>(charged: impl Iterator<Item = &'a Charged>) -> Vec<(ProjectPath, Amounts)> {
    let mut sums: BTreeMap<ProjectPath, Amounts> = BTreeMap::new();
    for charged in charged {
        add(sums.entry(charged.project.clone()).or_default(), &amounts(charged));
    }
    sums.into_iter().collect()
}

/// A server and all that it answers for.
fn chain(replicas: &[Replica], of: &str) -> HashSet<String> {
    let mut ids = HashSet::from([of.to_owned()]);
    loop {
        let more: Vec<String> = replicas
            .iter()
            .filter(|it| it.heir.as_ref().is_some_and(|heir| ids.contains(heir)) && !ids.contains(&it.id))
            .map(|it| it.id.clone())
            .collect();
        if more.is_empty() {
            return ids;
        }
        ids.extend(more);
    }
}

/// Counts as used what servers that are gone may have let in on nodes that were not asked yet.
fn owe(state: &mut State) {
    let mut owed: HashMap<Of, u64> = HashMap::new();
    for inherited in &state.inherited {
        for Lease { project, counted, amount } in &inherited.leases {
            let known: u64 = inherited
                .fenced
                .values()
                .flatten()
                .filter(|(at, _)| at.is_within(project))
                .filter_map(|(_, amounts)| amounts.get(counted))
                .sum();
            *owed.entry((project.clone(), *counted)).or_default() += amount.saturating_sub(known);
        }
    }
    state.ledger.owe(owed);
}

fn refusal(app: &App, behalf: &Behalf, exceeded: &Exceeded) -> Failure {
    let Exceeded { project, counted, most, wanted, .. } = exceeded;
    let is_seen = app.iam.book().held(&behalf.principal.caller, project).has(crate::rules::READS);
    if !is_seen {
        let message = format!("a quota above {} has no room for the sandbox ({counted})", behalf.project);
        return Failure::new(ErrorKind::ResourceExhausted, message)
            .detail(json!({ "counted": counted }))
            .hint("try again later, or ask who manages the project for more");
    }
    let used = match counted.resource {
        Resource::CreatesPerS => exceeded.used,
        _ => used_in(app, project).get(counted).copied().unwrap_or(0),
    };
    let message = Exceeded { used, ..exceeded.clone() }.to_string();
    Failure::new(ErrorKind::ResourceExhausted, message)
        .detail(
            json!({ "project": project, "counted": counted, "most": most, "used": used, "wanted": wanted }),
        )
        .hint(match counted.resource {
            Resource::CreatesPerS => "try again in a second",
            _ => "stop sandboxes of the project, or ask who manages it for more",
        })
}
