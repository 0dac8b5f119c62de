//! A seeded permutation of `0..size`, computed point by point without a table.
//!
//! A Feistel network (Luby & Rackoff 1988) over the smallest power of two that is at least `size`, applied
//! until the value is below `size` (cycle walking; Black & Rogaway 2002), fewer than two times on average.
//! Each round adds a keyed hash of one half to the other. That is invertible for any hash, so every value
//! occurs once.

/// Rounds of the network. Four suffice for large domains; small ones, whose halves have few bits, need more.
const ROUNDS: u64 = 12;

/// A permutation of `0..size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    size: u64,
    low_bits: u32,
    high_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..size` with this key.
    pub fn new(size: u64, key: u64) -> Permutation {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        let low_bits = bits / 2;
        Permutation { size, low_bits, high_bits: bits - low_bits, key }
    }

    /// The image of `index`, which must be below the size.
    pub fn apply(&self, index: u64) -> u64 {
        debug_assert!(index < self.size, "{index} is outside a permutation of {}", self.size);
        let mut value = index;
        loop {
            value = self.encrypt(value);
            if value < self.size {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let low_mask = (1 << self.low_bits) - 1;
        let high_mask = (1 << self.high_bits) - 1;
        let (mut low, mut high) = (value & low_mask, value >> self.low_bits);
        for round in 0..ROUNDS {
            if round % 2 == 0 {
                high = high.wrapping_add(hash(self.key, round, low)) & high_mask;
            } else {
                low = low.wrapping_add(hash(self.key, round, high)) & low_mask;
            }
        }
        high << self.low_bits | low
    }
}

/// Hash of three numbers, with the finaliser of SplitMix64 (Steele et al. 2014) after each.
pub(super) fn hash(key: u64, a: u64, b: u64) -> u64 {
    mix(mix(mix(key) ^ a) ^ b)
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_value_occurs_once(size in 1_u64..3000, key: u64) {
            let permutation = Permutation::new(size, key);
            let mut values: Vec<u64> = (0..size).map(|i| permutation.apply(i)).collect();
            values.sort_unstable();
            prop_assert_eq!(values, (0..size).collect::<Vec<_>>());
        }

        #[test]
        fn huge_sizes_stay_inside(size in 1_u64 << 40.., index: u64, key: u64) {
            prop_assert!(Permutation::new(size, key).apply(index % size) < size);
        }
    }

    /// Chi-squared statistic of counts against a uniform distribution, in standard deviations from its mean.
    fn chi_squared_sigmas(counts: &[u64]) -> f64 {
        let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        let chi: f64 = counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
        let freedom = counts.len() as f64 - 1.0;
        (chi - freedom) / (2.0 * freedom).sqrt()
    }

    #[test]
    fn small_permutations_are_all_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for key in 0..24_000 {
            let permutation = Permutation::new(4, key);
            *counts.entry([0, 1, 2, 3].map(|i| permutation.apply(i))).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24);
        let sigmas = chi_squared_sigmas(&counts.into_values().collect::<Vec<_>>());
        assert!(sigmas < 5.0, "{sigmas}");
    }

    #[test]
    fn neighbours_land_at_all_distances() {
        let size = 1000;
        let mut counts = vec![0; size as usize];
        for key in 0..100 {
            let permutation = Permutation::new(size, key);
            for i in 0..size - 1 {
                counts[((permutation.apply(i + 1) + size - permutation.apply(i)) % size) as usize] += 1;
            }
        }
        assert_eq!(counts.remove(0), 0);
        let sigmas = chi_squared_sigmas(&counts);
        assert!(sigmas < 5.0, "{sigmas}");
    }
}
