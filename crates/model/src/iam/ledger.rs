//! What one replica of control may still let in: its leases of quotas, and what is charged to it.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::project::ProjectPath;
use super::quota::{Amounts, Counted, Exceeded, Resource, add, subtract};

/// How long a create that was sent and not answered may still arrive at its node, ms.
const ARRIVES_WITHIN_MS: u64 = 30_000;
/// Within which creates are counted that have a quota a second, ms.
const SECOND_MS: u64 = 1000;

/// A create that is charged. Its end is to be told to [`Ledger::settle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// What became of a create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It made nothing.
    Refused,
    /// The node said that it did: its reports that are asked for from now on count it.
    Made {
        /// The node's place.
        node: usize,
    },
    /// Nobody knows: reports that are asked for after it must have arrived count it, if it made anything.
    Unknown {
        /// The place of the node it was sent to.
        node: usize,
    },
}

#[derive(Debug)]
struct Flight {
    project: ProjectPath,
    amounts: Amounts,
}

/// What a node's last report says is charged to this replica, and what it cannot say yet.
#[derive(Debug, Default)]
struct OfNode {
    charged: Vec<(ProjectPath, Amounts)>,
    /// Those it made, with when that was known.
    made: VecDeque<(u64, Ticket)>,
    /// Those it may make, with until when.
    unknown: VecDeque<(u64, Ticket)>,
}

/// Leases and charges of one replica. Times are ms of one clock that does not go back.
#[derive(Debug, Default)]
pub struct Ledger {
    quotas: BTreeMap<ProjectPath, Amounts>,
    leased: HashMap<(ProjectPath, Counted), u64>,
    used: HashMap<ProjectPath, Amounts>,
    /// What a replica before this one may have let in, on nodes that could not be asked.
    owed: HashMap<(ProjectPath, Counted), u64>,
    nodes: HashMap<usize, OfNode>,
    flights: HashMap<Ticket, Flight>,
    /// Creates of the last second, of what has a quota a second.
    creates: HashMap<(ProjectPath, Counted), VecDeque<u64>>,
    last: u64,
}

impl Ledger {
    /// Sets the quotas of all projects. One below what is used stops new use and takes nothing away. Of one that is less than before nothing is
    /// leased any more but what is used, since others may have as much; those are returned.
    pub fn set_quotas(
        &mut self,
        quotas: BTreeMap<ProjectPath, Amounts>,
        now_ms: u64,
    ) -> Vec<(ProjectPath, Counted)> {
        let has = |project: &ProjectPath, counted: &Counted| {
            quotas.get(project).is_some_and(|quota| quota.contains_key(counted))
        };
        self.leased.retain(|(project, counted), _| has(project, counted));
        self.owed.retain(|(project, counted), _| has(project, counted));
        self.creates.retain(|(project, counted), _| has(project, counted));
        let before = std::mem::replace(&mut self.quotas, quotas);
        let is_less = |project: &ProjectPath, counted: Counted, most: u64| {
            before.get(project).and_then(|quota| quota.get(&counted)).is_some_and(|before| most < *before)
        };
        let lowered: Vec<_> = self
            .quotas()
            .filter(|(project, counted, most)| is_less(project, *counted, *most))
            .map(|(project, counted, _)| (project.clone(), counted))
            .collect();
        for (project, counted) in &lowered {
            self.lower(project, *counted, 0, now_ms);
        }
        lowered
    }

    /// Forgets everything but that tickets of before are none of its own.
    pub fn restart(&mut self) {
        *self = Self { last: self.last, ..Self::default() };
    }

    /// Everything that has a quota, and how much.
    pub fn quotas(&self) -> impl Iterator<Item = (&ProjectPath, Counted, u64)> {
        self.quotas
            .iter()
            .flat_map(|(project, quota)| quota.iter().map(move |(counted, most)| (project, *counted, *most)))
    }

    /// Whether a create in a project could be refused.
    pub fn is_limited(&self, project: &ProjectPath) -> bool {
        project.upwards().any(|above| self.quotas.contains_key(&above))
    }

    /// What this replica uses of something: what its creates of the last second are, or what is charged to it.
    pub fn used(&self, project: &ProjectPath, counted: Counted, now_ms: u64) -> u64 {
        let at = (project.clone(), counted);
        let owed = self.owed.get(&at).copied().unwrap_or(0);
        if counted.resource == Resource::CreatesPerS {
            let since =
                |times: &VecDeque<u64>| times.iter().filter(|time| **time + SECOND_MS > now_ms).count();
            return owed.saturating_add(self.creates.get(&at).map_or(0, |times| since(times) as u64));
        }
        let used = self.used.get(project).and_then(|used| used.get(&counted)).copied().unwrap_or(0);
        used.saturating_add(owed)
    }

    /// What this replica may use of it.
    pub fn leased(&self, project: &ProjectPath, counted: Counted) -> u64 {
        self.leased.get(&(project.clone(), counted)).copied().unwrap_or(0)
    }

    /// Charges a create in a project and in all that it is in, or nothing.
    ///
    /// # Errors
    /// The first lease that has no room, from the project upwards. There may be room in the quota.
    pub fn begin(
        &mut self,
        project: &ProjectPath,
        amounts: Amounts,
        now_ms: u64,
    ) -> Result<Ticket, Exceeded> {
        for above in project.upwards() {
            let Some(quota) = self.quotas.get(&above) else { continue };
            for (&counted, &most) in quota {
                let Some(&wanted) = amounts.get(&counted) else { continue };
                let used = self.used(&above, counted, now_ms);
                if used.saturating_add(wanted) > self.leased(&above, counted) {
                    return Err(Exceeded { project: above, counted, most, used, wanted });
                }
            }
        }
        for above in project.upwards() {
            for (&counted, _) in self.quotas.get(&above).into_iter().flatten() {
                if counted.resource == Resource::CreatesPerS && amounts.contains_key(&counted) {
                    let times = self.creates.entry((above.clone(), counted)).or_default();
                    while times.front().is_some_and(|time| *time + SECOND_MS <= now_ms) {
                        times.pop_front();
                    }
                    times.push_back(now_ms);
                }
            }
        }
        self.charge(project, &amounts);
        self.last += 1;
        let ticket = Ticket(self.last);
        self.flights.insert(ticket, Flight { project: project.clone(), amounts });
        Ok(ticket)
    }

    fn charge(&mut self, project: &ProjectPath, amounts: &Amounts) {
        for above in project.upwards() {
            add(self.used.entry(above).or_default(), amounts);
        }
    }

    fn discharge(&mut self, project: &ProjectPath, amounts: &Amounts) {
        for above in project.upwards() {
            let Some(used) = self.used.get_mut(&above) else { continue };
            subtract(used, amounts);
            if used.is_empty() {
                self.used.remove(&above);
            }
        }
    }

    /// Tells what became of a create.
    pub fn settle(&mut self, ticket: Ticket, outcome: Outcome, now_ms: u64) {
        match outcome {
            Outcome::Refused => self.land(ticket),
            Outcome::Made { node } => {
                self.nodes.entry(node).or_default().made.push_back((now_ms, ticket));
            }
            Outcome::Unknown { node } => {
                let until = now_ms + ARRIVES_WITHIN_MS;
                self.nodes.entry(node).or_default().unknown.push_back((until, ticket));
            }
        }
    }

    fn land(&mut self, ticket: Ticket) {
        if let Some(Flight { project, amounts }) = self.flights.remove(&ticket) {
            self.discharge(&project, &amounts);
        }
    }

    /// A node says what it has that is charged to this replica, and which creates have arrived and are in it. `asked_ms`: when it was asked.
    pub fn report(
        &mut self,
        node: usize,
        asked_ms: u64,
        charged: Vec<(ProjectPath, Amounts)>,
        arrived: impl IntoIterator<Item = Ticket>,
    ) {
        for (project, amounts) in &charged {
            self.charge(project, amounts);
        }
        let of_node = self.nodes.entry(node).or_default();
        let before = std::mem::replace(&mut of_node.charged, charged);
        let mut landed = Vec::new();
        let OfNode { made, unknown, .. } = of_node;
        for waiting in [made, unknown] {
            while waiting.front().is_some_and(|(at, _)| *at < asked_ms) {
                landed.extend(waiting.pop_front().map(|(_, ticket)| ticket));
            }
        }
        for (project, amounts) in before {
            self.discharge(&project, &amounts);
        }
        for ticket in landed.into_iter().chain(arrived) {
            self.land(ticket);
        }
    }

    /// Lowers a lease, though not below what is used. Returns what it is then.
    pub fn lower(&mut self, project: &ProjectPath, counted: Counted, to: u64, now_ms: u64) -> u64 {
        let lowered = self.leased(project, counted).min(to.max(self.used(project, counted, now_ms)));
        self.lease(project, counted, lowered);
        lowered
    }

    /// Sets a lease.
    pub fn lease(&mut self, project: &ProjectPath, counted: Counted, amount: u64) {
        self.leased.insert((project.clone(), counted), amount);
    }

    /// Sets what counts as used without being charged: what a replica before this one was leased and may have let in.
    pub fn owe(&mut self, owed: HashMap<(ProjectPath, Counted), u64>) {
        self.owed = owed;
    }
}

/// What a replica's lease should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// What it uses.
    pub used: u64,
    /// What it needs more at once.
    pub need: u64,
    /// The quota.
    pub most: u64,
    /// What others are leased.
    pub others: u64,
    /// Replicas there are.
    pub replicas: u64,
    /// Somebody could not get what they need.
    pub is_scarce: bool,
}

impl Share {
    /// The lease: what is used and needed, if the quota has it, and something for what comes next. A replica that is alone takes everything; among several it is half as much again,
    /// or sixteen times what is needed, but no more than an even share of what is free.
    pub fn lease(self) -> u64 {
        let room = self.most.saturating_sub(self.others);
        let wanted = self.used.saturating_add(self.need);
        let free = room.saturating_sub(wanted);
        let spare = match self.replicas {
            _ if self.is_scarce => 0,
            0 | 1 => free,
            several => (free / several).min((wanted / 2).max(self.need.saturating_mul(16))),
        };
        wanted.saturating_add(spare).min(room).max(self.used)
    }

    /// What may be let in on it: nothing, where all together have more than the quota. `used` may count a create twice that is on its way.
    pub fn usable(self) -> u64 {
        let lease = self.lease();
        if self.others.saturating_add(lease) <= self.most { lease } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::quota::{Backend, amounts_of};
    use super::*;

    const SANDBOXES: Counted = Counted { resource: Resource::Sandboxes, backend: None };
    const CREATES: Counted = Counted { resource: Resource::CreatesPerS, backend: None };

    fn path(text: &str) -> ProjectPath {
        text.parse().unwrap()
    }

    fn sandboxes(count: u64) -> Amounts {
        Amounts::from([(SANDBOXES, count)])
    }

    fn limited(quotas: &[(&str, u64)]) -> Ledger {
        let mut ledger = Ledger::default();
        ledger
            .set_quotas(quotas.iter().map(|(project, most)| (path(project), sandboxes(*most))).collect(), 0);
        for (project, most) in quotas {
            ledger.lease(&path(project), SANDBOXES, *most);
        }
        ledger
    }

    #[test]
    fn the_least_on_the_way_up_decides() {
        let mut ledger = limited(&[("root/rl", 10), ("root/rl/job", 100)]);
        ledger.begin(&path("root/rl/other"), sandboxes(4), 0).unwrap();
        let over = ledger.begin(&path("root/rl/job"), sandboxes(7), 0).unwrap_err();
        assert_eq!(over.to_string(), "root/rl may use 10 sandboxes; 4 are used and 7 more are wanted");
        assert_eq!(ledger.used(&path("root/rl/job"), SANDBOXES, 0), 0, "all or nothing");
        assert!(!ledger.is_limited(&path("root/free")));
        ledger.begin(&path("root/free"), sandboxes(1000), 0).unwrap();
    }

    #[test]
    fn a_create_counts_until_a_report_can_have_counted_it() {
        let mut ledger = limited(&[("root/a", 2)]);
        let project = path("root/a");
        let used = |ledger: &Ledger| ledger.used(&project, SANDBOXES, 0);
        let ticket = ledger.begin(&project, sandboxes(1), 10).unwrap();
        ledger.report(0, 15, vec![], []);
        assert_eq!(used(&ledger), 1, "it flies");
        ledger.settle(ticket, Outcome::Made { node: 0 }, 20);
        ledger.report(0, 20, vec![], []);
        ledger.report(1, 50, vec![], []);
        assert_eq!(used(&ledger), 1, "no report can have counted it");
        ledger.report(0, 21, vec![(project.clone(), sandboxes(1))], []);
        assert_eq!(used(&ledger), 1, "the report has");
        ledger.report(0, 22, vec![], []);
        assert_eq!(used(&ledger), 0, "it has ended");
        // One that has arrived is the node's to count, answered or not.
        let early = ledger.begin(&project, sandboxes(1), 25).unwrap();
        ledger.report(0, 26, vec![(project.clone(), sandboxes(1))], [early]);
        assert_eq!(used(&ledger), 1);
        ledger.settle(early, Outcome::Made { node: 0 }, 27);
        ledger.report(0, 28, vec![], []);
        assert_eq!(used(&ledger), 0);
        let refused = ledger.begin(&project, sandboxes(1), 30).unwrap();
        ledger.settle(refused, Outcome::Refused, 31);
        assert_eq!(used(&ledger), 0);
        let lost = ledger.begin(&project, sandboxes(1), 40).unwrap();
        ledger.settle(lost, Outcome::Unknown { node: 0 }, 41);
        ledger.report(0, 41 + ARRIVES_WITHIN_MS, vec![], []);
        assert_eq!(used(&ledger), 1, "it may arrive still");
        ledger.report(0, 42 + ARRIVES_WITHIN_MS, vec![], []);
        assert_eq!(used(&ledger), 0);
    }

    #[test]
    fn creates_are_counted_within_any_second() {
        let mut ledger = Ledger::default();
        let project = path("root/a");
        let of_vms = Counted { resource: Resource::CreatesPerS, backend: Some(Backend::Vm) };
        ledger.set_quotas(BTreeMap::from([(project.clone(), Amounts::from([(CREATES, 2), (of_vms, 1)]))]), 0);
        ledger.lease(&project, CREATES, 2);
        ledger.lease(&project, of_vms, 1);
        let create = |backend| amounts_of(Some(backend), [(Resource::CreatesPerS, 1)]);
        ledger.begin(&project, create(Backend::Vm), 1000).unwrap();
        let over = ledger.begin(&project, create(Backend::Vm), 1500).unwrap_err();
        assert_eq!(
            over.to_string(),
            "root/a may use 1 creates a second in vms; 1 are used and 1 more are wanted"
        );
        ledger.begin(&project, create(Backend::Container), 1999).unwrap();
        ledger.begin(&project, create(Backend::Container), 1999).unwrap_err();
        ledger.begin(&project, create(Backend::Vm), 2000).unwrap();
        ledger.begin(&project, create(Backend::Container), 2998).unwrap_err();
    }

    #[test]
    fn a_lease_is_not_lowered_below_what_is_used() {
        let mut ledger = limited(&[("root", 10)]);
        let root = ProjectPath::root();
        ledger.begin(&path("root/a"), sandboxes(4), 0).unwrap();
        assert_eq!(ledger.lower(&root, SANDBOXES, 1, 0), 4);
        assert_eq!(ledger.lower(&root, SANDBOXES, 9, 0), 4, "it is not raised");
        ledger.begin(&path("root/a"), sandboxes(1), 0).unwrap_err();
        ledger.lease(&root, SANDBOXES, 6);
        ledger.owe(HashMap::from([((root.clone(), SANDBOXES), 2)]));
        ledger.begin(&path("root/a"), sandboxes(1), 0).unwrap_err();
        ledger.owe(HashMap::new());
        ledger.begin(&path("root/a"), sandboxes(1), 0).unwrap();
    }

    #[test]
    fn of_a_quota_that_is_lowered_nothing_is_left_but_what_is_used() {
        let mut ledger = limited(&[("root/a", 10), ("root/b", 10)]);
        ledger.begin(&path("root/a"), sandboxes(3), 0).unwrap();
        let set = |a: u64| BTreeMap::from([(path("root/a"), sandboxes(a)), (path("root/b"), sandboxes(10))]);
        assert_eq!(ledger.set_quotas(set(8), 0), [(path("root/a"), SANDBOXES)]);
        assert_eq!(
            (ledger.leased(&path("root/a"), SANDBOXES), ledger.leased(&path("root/b"), SANDBOXES)),
            (3, 10)
        );
        ledger.begin(&path("root/a"), sandboxes(1), 0).unwrap_err();
        assert!(ledger.set_quotas(set(9), 0).is_empty());
        ledger.begin(&path("root/a"), sandboxes(1), 0).unwrap_err();
    }

    #[test]
    fn who_is_alone_takes_everything_and_several_share() {
        let share = Share { used: 10, need: 1, most: 1000, others: 0, replicas: 1, is_scarce: false };
        assert_eq!(share.lease(), 1000);
        assert_eq!(Share { replicas: 2, others: 100, ..share }.lease(), 27);
        assert_eq!(Share { replicas: 2, others: 980, ..share }.lease(), 15);
        assert_eq!(Share { replicas: 2, others: 989, ..share }.lease(), 11);
        assert_eq!(Share { replicas: 2, others: 990, ..share }.lease(), 10);
        assert_eq!(Share { replicas: 2, others: 100, is_scarce: true, ..share }.lease(), 11);
        assert_eq!(Share { most: 5, ..share }.lease(), 10, "what is used stays");
        assert_eq!(Share { most: 5, ..share }.usable(), 0, "and nothing is let in");
    }

    const PROJECTS: [&str; 6] = ["root", "root/a", "root/a/b", "root/a/c", "root/d", "root/d/e"];

    /// A cluster of replicas and nodes, of which everything is known.
    struct World {
        replicas: Vec<Ledger>,
        /// By node: replica, project and ticket of each sandbox it has.
        nodes: Vec<Vec<(usize, ProjectPath, Ticket)>>,
        quotas: Vec<(ProjectPath, u64)>,
        /// Leases as the database has them.
        rows: HashMap<(usize, ProjectPath), u64>,
        now: u64,
    }

    #[derive(Debug, Clone)]
    enum Step {
        Create { replica: usize, project: usize, node: usize, fate: u8 },
        End { node: usize, which: usize },
        Report { replica: usize, node: usize },
        Settle { replica: usize, quota: usize, need: u64, is_scarce: bool },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..2_usize, 0..PROJECTS.len(), 0..2_usize, 0_u8..5)
                .prop_map(|(replica, project, node, fate)| Step::Create { replica, project, node, fate }),
            2 => (0..2_usize, any::<usize>()).prop_map(|(node, which)| Step::End { node, which }),
            3 => (0..2_usize, 0..2_usize).prop_map(|(replica, node)| Step::Report { replica, node }),
            4 => (0..2_usize, any::<usize>(), 0_u64..3, any::<bool>())
                .prop_map(|(replica, quota, need, is_scarce)| Step::Settle { replica, quota, need, is_scarce }),
        ];
        proptest::collection::vec(step, 1..120)
    }

    impl World {
        fn step(&mut self, step: Step) {
            self.now += 1;
            match step {
                Step::Create { replica, project, node, fate } => {
                    let project = path(PROJECTS[project]);
                    let Ok(ticket) = self.replicas[replica].begin(&project, sandboxes(1), self.now) else {
                        return;
                    };
                    // Refused; made; made and nobody heard; never arrived and nobody knows.
                    if matches!(fate, 1 | 2 | 4) {
                        self.nodes[node].push((replica, project, ticket));
                    }
                    if fate == 4 {
                        // Made, and its answer is still on its way.
                        return;
                    }
                    let outcome = match fate {
                        0 => Outcome::Refused,
                        1 => Outcome::Made { node },
                        _ => Outcome::Unknown { node },
                    };
                    self.replicas[replica].settle(ticket, outcome, self.now);
                }
                Step::End { node, which } => {
                    let has = &mut self.nodes[node];
                    if !has.is_empty() {
                        has.swap_remove(which % has.len());
                    }
                }
                Step::Report { replica, node } => {
                    let of_replica = self.nodes[node].iter().filter(|(by, ..)| *by == replica);
                    let arrived: Vec<Ticket> = of_replica.clone().map(|(_, _, ticket)| *ticket).collect();
                    let charged = of_replica.map(|(_, project, _)| (project.clone(), sandboxes(1))).collect();
                    self.replicas[replica].report(node, self.now, charged, arrived);
                }
                Step::Settle { replica, quota, need, is_scarce } => {
                    if self.quotas.is_empty() {
                        return;
                    }
                    let (project, most) = self.quotas[quota % self.quotas.len()].clone();
                    let others = self.rows.get(&(1 - replica, project.clone())).copied().unwrap_or(0);
                    let ledger = &mut self.replicas[replica];
                    let used =
                        ledger.used(&project, SANDBOXES, self.now).max(ledger.leased(&project, SANDBOXES));
                    let share = Share { used, need, most, others, replicas: 2, is_scarce };
                    ledger.lease(&project, SANDBOXES, share.usable());
                    self.rows.insert((replica, project), share.lease());
                }
            }
        }
    }

    proptest! {
        #[test]
        fn no_quota_is_ever_exceeded(quotas in proptest::collection::btree_map(0..PROJECTS.len(), 0_u64..20, 0..6), steps in steps()) {
            let quotas: Vec<_> = quotas.into_iter().map(|(project, most)| (path(PROJECTS[project]), most)).collect();
            let set: BTreeMap<_, _> = quotas.iter().map(|(project, most)| (project.clone(), sandboxes(*most))).collect();
            let mut replicas = vec![Ledger::default(), Ledger::default()];
            for replica in &mut replicas {
                replica.set_quotas(set.clone(), 0);
            }
            let nodes = vec![Vec::new(), Vec::new()];
            let mut world = World { replicas, nodes, quotas, rows: HashMap::new(), now: 0 };
            for step in steps {
                world.step(step);
                for (project, most) in &world.quotas {
                    let all = world.nodes.iter().flatten().filter(|(_, at, _)| at.is_within(project)).count() as u64;
                    prop_assert!(all <= *most, "{} has {} of {}", project, all, most);
                }
            }
        }
    }
}
