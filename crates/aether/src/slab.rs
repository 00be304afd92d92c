//! A table whose keys go stale when their entry is removed, so that an event that was fetched
//! before the removal finds nothing instead of a newcomer.

/// Names an entry: slot and the slot's generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    slot: u32,
    generation: u32,
}

impl Key {
    /// As 56 bits, for an epoll event: 32 of slot, 24 of generation.
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.generation & 0xff_ffff) << 32 | u64::from(self.slot)
    }

    /// Back from [`Key::bits`].
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self { slot: bits as u32, generation: (bits >> 32) as u32 & 0xff_ffff }
    }
}

/// The table.
pub(crate) struct Slab<T> {
    slots: Vec<(u32, Option<Box<T>>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Adds an entry.
    pub(crate) fn insert(&mut self, value: T) -> Key {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let entry = &mut self.slots[slot as usize];
        entry.0 = (entry.0 + 1) & 0xff_ffff;
        entry.1 = Some(Box::new(value));
        Key { slot, generation: entry.0 }
    }

    /// The entry, if it is still there.
    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let (generation, value) = self.slots.get(key.slot as usize)?;
        if *generation == key.generation { value.as_deref() } else { None }
    }

    /// Likewise, to change.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, value) = self.slots.get_mut(key.slot as usize)?;
        if *generation == key.generation { value.as_deref_mut() } else { None }
    }

    /// Takes the entry out.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, value) = self.slots.get_mut(key.slot as usize)?;
        if *generation != key.generation {
            return None;
        }
        let value = value.take()?;
        self.free.push(key.slot);
        if self.free.len() == self.slots.len() {
            // Empty again: give the memory back, but keep generations apart.
            self.slots.shrink_to_fit();
        }
        Some(*value)
    }

    /// All entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, (generation, value))| {
            let key = Key { slot: slot as u32, generation: *generation };
            value.as_deref().map(|value| (key, value))
        })
    }

    /// All entries, to change.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Key, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(slot, (generation, value))| {
            let key = Key { slot: slot as u32, generation: *generation };
            value.as_deref_mut().map(|value| (key, value))
        })
    }

    /// The first entry that is wanted.
    pub(crate) fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<Key> {
        self.iter().find(|(_, value)| wanted(value)).map(|(key, _)| key)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing_in_a_reused_slot() {
        let mut slab = Slab::default();
        let old = slab.insert(1);
        assert_eq!(slab.remove(old), Some(1));
        let new = slab.insert(2);
        assert_eq!((slab.get(old), slab.get(new), slab.len()), (None, Some(&2), 1));
        assert_eq!(slab.remove(old), None);
        assert_eq!(Key::from_bits(new.bits()), new);
    }
}
