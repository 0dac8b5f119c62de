//! The order in which BIG-bench writes choices: NumPy's `RandomState(42).permutation`.
//!
//! `RandomState` draws with MT19937 (Matsumoto and Nishimura, 1998), seeded by `init_genrand`; its shuffle
//! swaps each element, from the last one down, with one at most as far, drawn by masking and rejecting.

/// BIG-bench's seed.
const SEED: u32 = 42;
/// Number of words of the generator's state.
const WORDS: usize = 624;
/// Distance of the words that are mixed.
const SHIFT: usize = 397;

/// The permutation of `len` elements.
pub(super) fn permutation(len: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut random = Mt19937::new(SEED);
    for last in (1..len).rev() {
        let mask = u32::MAX.checked_shr((last as u32).leading_zeros()).unwrap_or(0);
        let drawn = loop {
            let drawn = (random.next_word() & mask) as usize;
            if drawn <= last {
                break drawn;
            }
        };
        order.swap(last, drawn);
    }
    order
}

/// The generator.
struct Mt19937 {
    words: [u32; WORDS],
    at: usize,
}

impl Mt19937 {
    fn new(seed: u32) -> Mt19937 {
        let mut words = [seed; WORDS];
        for at in 1..WORDS {
            let before = words[at - 1];
            words[at] = 1_812_433_253_u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(at as u32);
        }
        Mt19937 { words, at: WORDS }
    }

    fn next_word(&mut self) -> u32 {
        if self.at == WORDS {
            for at in 0..WORDS {
                let joined = (self.words[at] & 0x8000_0000) | (self.words[(at + 1) % WORDS] & 0x7FFF_FFFF);
                let twisted = (joined >> 1) ^ if joined & 1 == 1 { 0x9908_B0DF } else { 0 };
                self.words[at] = self.words[(at + SHIFT) % WORDS] ^ twisted;
            }
            self.at = 0;
        }
        let mut word = self.words[self.at];
        self.at += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9D2C_5680;
        word ^= (word << 15) & 0xEFC6_0000;
        word ^ (word >> 18)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_those_of_numpy() {
        // numpy.random.RandomState(42).permutation(n)
        let numpy: [&[usize]; 7] = [
            &[],
            &[0],
            &[1, 0],
            &[0, 1, 2],
            &[1, 3, 0, 2],
            &[1, 4, 2, 0, 3],
            &[8, 1, 5, 0, 7, 2, 9, 4, 3, 6],
        ];
        for expected in numpy {
            assert_eq!(permutation(expected.len()), expected);
        }
        // Beyond the words of one state.
        assert_eq!(permutation(1000)[..6], [521, 737, 740, 660, 411, 678]);
    }
}
