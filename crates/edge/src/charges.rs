//! What the sandboxes of the node may use, by whose they are and by the replica of control that answers for them. Replicas count their
//! quotas by it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsec_model::iam::ProjectPath;
use dsec_model::{ErrorKind, Limits};
use dsec_proto::rest::{ApiError, Arrived, Charge, Charged};
use serde_json::json;

/// How long the arrival of a create is told: replicas ask once a second.
const ARRIVAL_TOLD_FOR: Duration = Duration::from_secs(5);
/// Arrivals that are told, at most: a replica that is not told of one counts it twice for a while.
const ARRIVALS_MAX: usize = 10_000;

/// Whose they are, their backend, and to whom they are charged.
type Account = (ProjectPath, String, String);

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    sandboxes: u64,
    cpu_millis: u64,
    memory_mib: u64,
    disk_mib: u64,
}

#[derive(Debug, Default)]
struct Books {
    sums: BTreeMap<Account, Sum>,
    /// Replicas that are no more: nothing is charged to them any longer.
    fenced: HashSet<String>,
    /// What has arrived lately, the latest last.
    arrived: VecDeque<(Instant, Arrived)>,
}

/// The sums of a node.
#[derive(Debug, Default)]
pub struct Charges {
    books: Arc<Mutex<Books>>,
}

/// A sandbox, or a create on its way to be one, for as long as it is counted.
#[derive(Debug)]
pub struct Counted {
    books: Arc<Mutex<Books>>,
    account: Account,
    limits: Limits,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut books = lock(&self.books);
        let Some(sum) = books.sums.get_mut(&self.account) else { return };
        sum.sandboxes -= 1;
        sum.cpu_millis -= self.limits.cpu_millis;
        sum.memory_mib -= self.limits.memory_mib;
        sum.disk_mib -= self.limits.disk_mib;
        if sum.sandboxes == 0 {
            books.sums.remove(&self.account);
        }
    }
}

impl Books {
    fn forget_arrivals(&mut self) {
        let is_old = |(at, _): &(Instant, Arrived)| at.elapsed() > ARRIVAL_TOLD_FOR;
        while self.arrived.len() >= ARRIVALS_MAX || self.arrived.front().is_some_and(is_old) {
            self.arrived.pop_front();
        }
    }
}

impl Charges {
    /// Counts a create, from when it has arrived.
    ///
    /// # Errors
    /// Its replica is no more; it would use more than was taken for it.
    pub fn take(
        &self,
        project: &ProjectPath,
        backend: &str,
        charge: Option<&Charge>,
        limits: &Limits,
    ) -> Result<Counted, ApiError> {
        let mut books = lock(&self.books);
        if let Some(charge) = charge {
            if books.fenced.contains(&charge.by) {
                let message = format!("the server {} was given up, and its creates with it", charge.by);
                return Err(ApiError::new(ErrorKind::Unavailable, message).hint("try again"));
            }
            let taken = [charge.cpu_millis, charge.memory_mib, charge.disk_mib];
            if [limits.cpu_millis, limits.memory_mib, limits.disk_mib]
                .iter()
                .zip(taken)
                .any(|(uses, taken)| *uses > taken)
            {
                return Err(ApiError::new(
                    ErrorKind::ResourceExhausted,
                    "the node's default limits are greater than what was counted for the sandbox",
                )
                .detail(json!({ "charge": charge.to_string() }))
                .hint("they were changed a moment ago: try again"));
            }
            books.forget_arrivals();
            let arrived = Arrived { by: charge.by.clone(), ticket: charge.ticket };
            books.arrived.push_back((Instant::now(), arrived));
        }
        let by = charge.map(|charge| charge.by.clone()).unwrap_or_default();
        Ok(self.count(books, (project.clone(), backend.to_owned(), by), limits))
    }

    /// Counts a sandbox that was taken before.
    pub fn retake(&self, project: &ProjectPath, backend: &str, by: &str, limits: &Limits) -> Counted {
        self.count(lock(&self.books), (project.clone(), backend.to_owned(), by.to_owned()), limits)
    }

    fn count(&self, mut books: MutexGuard<'_, Books>, account: Account, limits: &Limits) -> Counted {
        let sum = books.sums.entry(account.clone()).or_default();
        sum.sandboxes += 1;
        sum.cpu_millis += limits.cpu_millis;
        sum.memory_mib += limits.memory_mib;
        sum.disk_mib += limits.disk_mib;
        Counted { books: Arc::clone(&self.books), account, limits: limits.clone() }
    }

    /// All sums, and what has arrived lately and is in them.
    pub fn all(&self) -> (Vec<Charged>, Vec<Arrived>) {
        let mut books = lock(&self.books);
        books.forget_arrivals();
        let arrived = books.arrived.iter().map(|(_, arrived)| arrived.clone()).collect();
        (books.sums.iter().map(charged).collect(), arrived)
    }

    /// Takes nothing more that is charged to a replica, and says what is.
    pub fn fence(&self, by: &str) -> Vec<Charged> {
        let mut books = lock(&self.books);
        books.fenced.insert(by.to_owned());
        books.sums.iter().filter(|((_, _, charged_to), _)| charged_to == by).map(charged).collect()
    }
}

fn charged(((project, backend, by), sum): (&Account, &Sum)) -> Charged {
    Charged {
        project: project.clone(),
        backend: backend.clone(),
        by: by.clone(),
        sandboxes: sum.sandboxes,
        cpu_millis: sum.cpu_millis,
        memory_mib: sum.memory_mib,
        disk_mib: sum.disk_mib,
    }
}

fn lock(books: &Mutex<Books>) -> MutexGuard<'_, Books> {
    books.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(memory_mib: u64) -> Limits {
        Limits { memory_mib, cpu_millis: 500, disk_mib: 100, ..Limits::default() }
    }

    fn charge(by: &str) -> Charge {
        Charge { by: by.to_owned(), ticket: 7, cpu_millis: 500, memory_mib: 64, disk_mib: 100 }
    }

    #[test]
    fn sums_are_of_those_that_live() {
        let charges = Charges::default();
        let (a, b): (ProjectPath, ProjectPath) = ("root/a".parse().unwrap(), "root/b".parse().unwrap());
        let first = charges.take(&a, "container", Some(&charge("c1")), &limits(64)).unwrap();
        let second = charges.take(&a, "container", Some(&charge("c1")), &limits(32)).unwrap();
        let other = charges.retake(&b, "container", "c2", &limits(16));
        let unasked = charges.take(&a, "container", None, &limits(1000)).unwrap();
        let of = |by: &str| charges.all().0.into_iter().find(|charged| charged.by == by);
        let arrived = charges.all().1;
        assert_eq!((arrived.len(), arrived[0].by.as_str(), arrived[0].ticket), (2, "c1", 7));
        let c1 = of("c1").unwrap();
        assert_eq!((c1.sandboxes, c1.cpu_millis, c1.memory_mib, c1.disk_mib), (2, 1000, 96, 200));
        assert_eq!((of("").unwrap().memory_mib, of("c2").unwrap().project), (1000, b));
        drop((first, unasked, other));
        assert_eq!(of("c1").unwrap().memory_mib, 32);
        drop(second);
        assert!(charges.all().0.is_empty());
    }

    #[test]
    fn nothing_is_charged_to_who_is_no_more() {
        let charges = Charges::default();
        let root = ProjectPath::root();
        let _lives = charges.take(&root, "container", Some(&charge("c1")), &limits(64)).unwrap();
        let fenced = charges.fence("c1");
        assert_eq!((fenced.len(), fenced[0].sandboxes), (1, 1));
        let refused = charges.take(&root, "container", Some(&charge("c1")), &limits(64)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        charges.take(&root, "container", Some(&charge("c2")), &limits(64)).unwrap();
        assert_eq!(charges.fence("c1")[0].sandboxes, 1);
    }

    #[test]
    fn what_would_use_more_than_was_taken_is_refused() {
        let charges = Charges::default();
        let refused =
            charges.take(&ProjectPath::root(), "container", Some(&charge("c")), &limits(65)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
        assert!(charges.all().0.is_empty());
    }
}
