//! A set of group numbers that threads share.

use std::sync::atomic::{AtomicU64, Ordering};

/// One bit a group. Setting one publishes what the setting thread did before.
#[derive(Debug)]
pub(crate) struct Bits {
    words: Vec<AtomicU64>,
}

impl Bits {
    /// Of `bits` bits, from these words; missing ones are 0, and so are bits past the end.
    pub(crate) fn new(bits: u64, from: impl IntoIterator<Item = u64>) -> Self {
        let mut words: Vec<u64> = from.into_iter().take(words_for(bits)).collect();
        words.resize(words_for(bits), 0);
        if let Some(last) = words.last_mut()
            && !bits.is_multiple_of(64)
        {
            *last &= (1 << (bits % 64)) - 1;
        }
        Self { words: words.into_iter().map(AtomicU64::new).collect() }
    }

    pub(crate) fn get(&self, bit: u64) -> bool {
        self.word(bit).load(Ordering::Acquire) & mask(bit) != 0
    }

    /// Whether this call changed it.
    pub(crate) fn set(&self, bit: u64) -> bool {
        self.word(bit).fetch_or(mask(bit), Ordering::AcqRel) & mask(bit) == 0
    }

    /// Whether this call changed it.
    pub(crate) fn clear(&self, bit: u64) -> bool {
        self.word(bit).fetch_and(!mask(bit), Ordering::AcqRel) & mask(bit) != 0
    }

    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Acquire).count_ones())).sum()
    }

    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// The word that this bit is in.
    pub(crate) fn word_of(&self, bit: u64) -> u64 {
        self.word(bit).load(Ordering::Acquire)
    }

    fn word(&self, bit: u64) -> &AtomicU64 {
        &self.words[(bit / 64) as usize]
    }
}

/// Words that hold `bits` bits.
pub(crate) fn words_for(bits: u64) -> usize {
    bits.div_ceil(64) as usize
}

fn mask(bit: u64) -> u64 {
    1 << (bit % 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_past_the_end_are_never_counted() {
        let bits = Bits::new(65, [u64::MAX, u64::MAX, u64::MAX]);
        assert_eq!(bits.count(), 65);
        assert!(bits.clear(64) && !bits.clear(64) && bits.set(64) && !bits.set(64) && bits.get(64));
        assert_eq!(Bits::new(0, []).count(), 0);
    }
}
