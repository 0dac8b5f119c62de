//! Random numbers for tests: the same at each run, unless another seed is asked for.

/// A SplitMix64 generator (Steele, Lea & Flood 2014).
pub(crate) struct Dice(u64);

impl Dice {
    /// Seeded by `XTRAIN_TEST_SEED`, 0 where it is not set; says so under the name of the test.
    pub(crate) fn new(test: &str) -> Self {
        let seed = std::env::var("XTRAIN_TEST_SEED").map_or(0, |seed| seed.parse().expect("a number"));
        println!("{test}: XTRAIN_TEST_SEED={seed}");
        Dice(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from 0 to `end - 1`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
