//! What changed of many things since somebody last asked: each change has a number, a later one of the same thing takes the place of
//! the one before, and whoever knows all up to a number is told what came after it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

/// Things that are gone and still remembered as such. Who asks with a number from before the oldest reads everything again: at
/// hundreds that go in a second that is who was away for most of a minute.
pub const GONE_MAX: usize = 10_000;

/// The changes of things that are told apart by `K` and looked at by `M`.
#[derive(Debug, Clone)]
pub struct Journal<K, M> {
    /// The number of the last change; 0: there was none.
    last: u64,
    /// The number up to which things that are gone may have been dropped from here.
    dropped: u64,
    /// How often all were looked at.
    looks: u64,
    latest: HashMap<K, Entry<M>>,
    by_number: BTreeMap<u64, K>,
    /// The numbers of those that are gone.
    gone: BTreeSet<u64>,
}

#[derive(Debug, Clone)]
struct Entry<M> {
    /// Of its last change.
    number: u64,
    /// What was last seen of it.
    mark: M,
    /// At which look that was.
    seen: u64,
    is_gone: bool,
}

/// The next changes for somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<K, M> {
    /// What to ask with next.
    pub upto: u64,
    /// There are more already.
    pub more: bool,
    /// The page begins from nothing: what the reader knew before is void.
    pub whole: bool,
    /// Things that are new or another, in the order of their last change.
    pub changed: Vec<K>,
    /// Things that are gone, with what was last seen of them.
    pub gone: Vec<(K, M)>,
}

impl<K, M> Default for Journal<K, M> {
    fn default() -> Self {
        let (latest, by_number, gone) = (HashMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { last: 0, dropped: 0, looks: 0, latest, by_number, gone }
    }
}

impl<K: Clone + Eq + Hash, M: Clone + PartialEq> Journal<K, M> {
    /// Takes in all things as they are now; those that are not among them are gone.
    pub fn compare<'a>(&mut self, now: impl Iterator<Item = (&'a K, M)>)
    where
        K: 'a,
    {
        self.looks += 1;
        for (key, mark) in now {
            match self.latest.get_mut(key) {
                Some(entry) if !entry.is_gone && entry.mark == mark => entry.seen = self.looks,
                _ => self.note(key.clone(), mark, false),
            }
        }
        let is_gone = |entry: &Entry<M>| !entry.is_gone && entry.seen != self.looks;
        let gone: Vec<(K, M)> = self
            .latest
            .iter()
            .filter(|(_, entry)| is_gone(entry))
            .map(|(key, entry)| (key.clone(), entry.mark.clone()))
            .collect();
        for (key, mark) in gone {
            self.note(key, mark, true);
        }
        while self.gone.len() > GONE_MAX {
            let Some(oldest) = self.gone.pop_first() else { return };
            self.dropped = oldest;
            if let Some(key) = self.by_number.remove(&oldest) {
                self.latest.remove(&key);
            }
        }
    }

    fn note(&mut self, key: K, mark: M, is_gone: bool) {
        self.last += 1;
        let number = self.last;
        if is_gone {
            self.gone.insert(number);
        }
        self.by_number.insert(number, key.clone());
        let entry = Entry { number, mark, seen: self.looks, is_gone };
        if let Some(before) = self.latest.insert(key, entry) {
            self.by_number.remove(&before.number);
            self.gone.remove(&before.number);
        }
    }

    /// At most `max` changes after number `since`; 0: everything, from nothing.
    pub fn after(&self, since: u64, max: usize) -> Page<K, M> {
        // A number that was never given is somebody else's.
        let whole = since == 0 || since < self.dropped || since > self.last;
        let since = if whole { 0 } else { since };
        let mut page = Page { upto: since, more: false, whole, changed: Vec::new(), gone: Vec::new() };
        for (number, key) in self.by_number.range(since + 1..) {
            let Some(entry) = self.latest.get(key) else { continue };
            // Whoever begins from nothing never had what is gone.
            if whole && entry.is_gone {
                continue;
            }
            if page.changed.len() + page.gone.len() == max {
                page.more = true;
                return page;
            }
            page.upto = *number;
            match entry.is_gone {
                true => page.gone.push((key.clone(), entry.mark.clone())),
                false => page.changed.push(key.clone()),
            }
        }
        page.upto = self.last;
        page
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn with(things: &[(u8, u8)]) -> Journal<u8, u8> {
        let mut journal = Journal::default();
        journal.compare(things.iter().map(|(key, mark)| (key, *mark)));
        journal
    }

    #[test]
    fn what_did_not_change_is_not_told_again() {
        let mut journal = with(&[(1, 0), (2, 0)]);
        let first = journal.after(0, 10);
        assert!(first.whole && !first.more && first.changed.len() == 2);
        journal.compare([(&1, 0), (&2, 1)].into_iter());
        let second = journal.after(first.upto, 10);
        assert_eq!((second.whole, second.changed, second.gone), (false, vec![2], vec![]));
        journal.compare([(&2, 1)].into_iter());
        let third = journal.after(second.upto, 10);
        assert_eq!((third.changed, third.gone), (vec![], vec![(1, 0)]));
        assert_eq!(journal.after(third.upto, 10).upto, third.upto);
    }

    #[test]
    fn who_was_away_for_too_many_that_are_gone_reads_all_again() {
        let mut journal: Journal<usize, u8> = Journal::default();
        let keys: Vec<usize> = (0..GONE_MAX + 2).collect();
        journal.compare(keys.iter().map(|key| (key, 0)));
        let knows_all = journal.after(0, usize::MAX).upto;
        journal.compare([(&(GONE_MAX + 1), 0)].into_iter());
        // One more than are remembered.
        let page = journal.after(knows_all, usize::MAX);
        assert_eq!((page.whole, page.changed), (true, vec![GONE_MAX + 1]));
        assert!(page.gone.is_empty());
        assert!(!journal.after(page.upto, 10).whole);
    }

    #[test]
    fn a_number_that_was_never_given_begins_from_nothing() {
        let page = with(&[(1, 0)]).after(77, 10);
        assert_eq!((page.whole, page.upto, page.changed), (true, 1, vec![1]));
        let empty = with(&[]).after(5, 10);
        assert!(empty.whole && !empty.more && empty.upto == 0);
    }

    proptest! {
        /// Readers who take pages of any size at any times all end up with what there is.
        #[test]
        fn a_reader_knows_what_there_is(
            courses in proptest::collection::vec(
                (proptest::collection::btree_map(0u8..12, 0u8..3, 0..12), 1usize..5, any::<bool>()), 1..12
            )
        ) {
            let mut journal = Journal::default();
            let (mut known, mut since) = (BTreeMap::<u8, ()>::new(), 0);
            let mut last = BTreeMap::new();
            let read = |journal: &Journal<u8, u8>, known: &mut BTreeMap<u8, ()>, since: &mut u64, max| {
                let page = journal.after(*since, max);
                if page.whole {
                    known.clear();
                }
                known.extend(page.changed.into_iter().map(|key| (key, ())));
                known.retain(|key, ()| page.gone.iter().all(|(gone, _)| gone != key));
                *since = page.upto;
                page.more
            };
            for (things, max, reads) in courses {
                journal.compare(things.iter().map(|(key, mark)| (key, *mark)));
                last = things;
                if reads {
                    read(&journal, &mut known, &mut since, max);
                }
            }
            while read(&journal, &mut known, &mut since, 2) {}
            prop_assert!(known.keys().eq(last.keys()), "{known:?} of {last:?}");
        }
    }
}
