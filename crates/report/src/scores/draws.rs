//! Random numbers of simulations, and the share of intervals that contain the truth.

use super::interval::Interval;

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub(super) struct Draws(pub(super) u64);

impl Draws {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub(super) fn uniform(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// 1 with this probability, else 0.
    pub(super) fn answer(&mut self, probability: f64) -> f64 {
        f64::from(u8::from(self.uniform() < probability))
    }

    /// A normal number of mean 0 and standard deviation 1.
    pub(super) fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Number of draws of an interval by default, which shows a wrong formula.
const FEW: usize = 2_000;

/// Number of draws of a simulation: 10,000 with `XTRAIN_TEST_ALL=1`, else `few`.
pub(super) fn count(few: usize) -> usize {
    if std::env::var_os("XTRAIN_TEST_ALL").is_some() { 10_000 } else { few }
}

/// Share of draws of which the interval contains `truth`.
pub(super) fn coverage(
    truth: f64,
    seed: u64,
    mut interval: impl FnMut(&mut Draws) -> Option<Interval>,
) -> f64 {
    let mut draws = Draws(seed);
    let count = count(FEW);
    let covers = |interval: Interval| interval.low <= truth && truth <= interval.high;
    (0..count).filter(|_| interval(&mut draws).is_some_and(covers)).count() as f64 / count as f64
}

/// Asserts that a share of draws lies within bounds, which are wider by four standard errors of few draws.
pub(super) fn assert_share(of: &str, share: f64, low: f64, high: f64) {
    let extra = if count(FEW) == FEW { 0.02 } else { 0.0 };
    assert!((low - extra..=high + extra).contains(&share), "{of}: {share}, not from {low} to {high}");
}

/// Ids 0, 1, ...
pub(super) fn ids(rows: usize) -> Vec<String> {
    (0..rows).map(|row| row.to_string()).collect()
}
