//! Sampling of the next token.
//!
//! `among` is the definition: it sorts all tokens by their logits, truncates and draws. [`Sampling::choose`]
//! returns the same token without sorting the whole vocabulary.

use rayon::prelude::*;
use xtrain_tensor::{Philox, vectorized};

/// Settings of sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 selects the likeliest token.
    pub temperature: f64,
    /// Number of the likeliest tokens that are candidates; 0 for all.
    pub top_k: usize,
    /// Probability that the likeliest tokens must reach together to be the candidates; 1 for all.
    pub top_p: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// The Philox stream of sampling.
const SAMPLE_STREAM: u32 = u32::MAX - 1;

/// Tokens per thread when weights are summed.
const CHUNK: usize = 2048;

/// Number of tokens that are skipped at once if none of them is a candidate.
const LINE: usize = 256;

/// Tokens whose weight is below exp(-LIKELY) of the likeliest one's are rarely drawn.
const LIKELY: f64 = 12.0;

/// Two sums of weights that differ by less than this share of all weights may differ by rounding alone: each
/// of up to 2^32 additions is off by less than 2^-53.
const DOUBT: f64 = 1e-6;

impl Sampling {
    /// Samples a token from `logits`, one for each row of the vocabulary. `index` numbers the draw.
    pub fn choose(&self, logits: &[f32], index: u64) -> u32 {
        if self.temperature <= 0.0 || logits.is_empty() {
            return likeliest(logits);
        }
        let draw = f64::from(Philox::new(self.seed, SAMPLE_STREAM, 0).uniform(index));
        if self.top_k > 0 && self.top_k < logits.len() {
            let mut order = keys(logits, |_| true);
            order.select_nth_unstable(self.top_k - 1);
            order.truncate(self.top_k);
            order.sort_unstable();
            return self.among(&order, logits, draw);
        }
        self.among_likely(logits, draw).unwrap_or_else(|| {
            let mut order = keys(logits, |_| true);
            order.par_sort_unstable();
            self.among(&order, logits, draw)
        })
    }

    /// The token that `draw`, from [0, 1), selects among `order`, which begins with the likeliest.
    fn among(&self, order: &[u64], logits: &[f32], draw: f64) -> u32 {
        let Some(&first) = order.first() else { return 0 };
        let weight = |&key: &u64| self.weight(logits[token(key)], logits[token(first)]);
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mut reached = 0.0;
        let kept = weights.iter().position(|w| {
            reached += w / total;
            reached >= self.top_p
        });
        weights.truncate(kept.map_or(weights.len(), |k| k + 1));
        let mut left = draw * weights.iter().sum::<f64>();
        for (w, &key) in weights.iter().zip(order) {
            left -= w;
            if left < 0.0 {
                return token(key) as u32;
            }
        }
        likeliest(logits)
    }

    /// The result of [`Sampling::among`] for all tokens, computed from the likely ones alone; `None` if
    /// rounding may change it.
    fn among_likely(&self, logits: &[f32], draw: f64) -> Option<u32> {
        let best = logits[likeliest(logits) as usize];
        let weight = |x: f32| self.weight(x, best);
        let sums: Vec<f64> =
            logits.par_chunks(CHUNK).map(|part| part.iter().map(|&x| weight(x)).sum()).collect();
        let total: f64 = sums.iter().sum();
        let doubt = DOUBT * total;
        let least = best - (LIKELY * self.temperature) as f32;
        let mut order = keys(logits, |x| x >= least);
        order.sort_unstable();
        // Sum that the draw is scaled by: all weights, or those of the tokens within top_p.
        let mut scale = total;
        if self.top_p < 1.0 {
            let (mut reached, goal) = (0.0, self.top_p * total);
            let kept = order.iter().position(|&key| {
                reached += weight(logits[token(key)]);
                reached >= goal - doubt
            })?;
            if reached < goal + doubt {
                return None;
            }
            order.truncate(kept + 1);
            scale = reached;
        }
        let mut left = draw * scale;
        let found = order.iter().position(|&key| {
            left -= weight(logits[token(key)]);
            left < doubt
        })?;
        (left < -doubt).then_some(token(order[found]) as u32)
    }

    /// Weight of a token with this logit, relative to the likeliest one.
    fn weight(&self, logit: f32, best: f32) -> f64 {
        (f64::from(logit - best) / self.temperature).exp()
    }
}

/// A number that orders f32 as `total_cmp` does.
#[inline(always)]
fn rank(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

/// Keys of the tokens whose logits are `wanted`. Sorted keys order tokens by descending logit, and equal
/// logits by their index.
fn keys(logits: &[f32], wanted: impl Fn(f32) -> bool) -> Vec<u64> {
    let mut keys = Vec::new();
    for (line, of_line) in logits.chunks(LINE).enumerate() {
        // No early exit, so that the loop is vectorised.
        if !of_line.iter().fold(false, |any, &x| any | wanted(x)) {
            continue;
        }
        let tokens = of_line.iter().enumerate().filter(|(_, x)| wanted(**x));
        keys.extend(tokens.map(|(at, &x)| {
            let falling = !(rank(x) as u32 ^ 1 << 31);
            u64::from(falling) << 32 | (line * LINE + at) as u64
        }));
    }
    keys
}

/// The token of a key.
fn token(key: u64) -> usize {
    (key & 0xffff_ffff) as usize
}

/// True if all logits are finite.
pub(super) fn are_finite(logits: &[f32]) -> bool {
    // No early exit, so that the loop is vectorised.
    let most = vectorized(|| logits.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7FFF_FFFF)));
    f32::from_bits(most).is_finite()
}

/// The first of the tokens with the largest logit.
fn likeliest(logits: &[f32]) -> u32 {
    let (largest, line) = vectorized(|| {
        let (mut largest, mut line) = (i32::MIN, 0);
        for (n, of_line) in logits.chunks(LINE).enumerate() {
            let of_line = of_line.iter().fold(i32::MIN, |most, &x| most.max(rank(x)));
            if of_line > largest {
                (largest, line) = (of_line, n);
            }
        }
        (largest, line)
    });
    let rest = logits.iter().skip(line * LINE);
    (line * LINE + rest.map(|&x| rank(x)).position(|x| x == largest).unwrap_or(0)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 5 };

    fn shares(s: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        (0..20_000).for_each(|i| counts[s.choose(logits, i) as usize] += 1.0 / 20_000.0);
        counts
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0f32, (2.0f32).ln(), (5.0f32).ln()];
        let found = shares(PLAIN, &logits);
        for (f, e) in found.iter().zip([1.0 / 8.0, 2.0 / 8.0, 5.0 / 8.0]) {
            assert!((f - e).abs() < 0.02, "{found:?}");
        }
        // Temperature 1/2 squares the odds.
        let found = shares(Sampling { temperature: 0.5, ..PLAIN }, &logits);
        assert!((found[2] - 25.0 / 30.0).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.0f32, (2.0f32).ln(), (5.0f32).ln()];
        assert_eq!(shares(Sampling { top_k: 2, ..PLAIN }, &logits)[0], 0.0);
        assert_eq!(
            shares(Sampling { top_p: 0.6, ..PLAIN }, &logits),
            [0.0, 0.0, shares(Sampling { top_k: 1, ..PLAIN }, &logits)[2]]
        );
        assert_eq!(shares(Sampling { top_p: 0.7, ..PLAIN }, &logits)[0], 0.0);
    }

    /// `among` of all tokens, which is the definition.
    fn defined(s: Sampling, logits: &[f32], index: u64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if s.top_k > 0 {
            order.truncate(s.top_k);
        }
        let order: Vec<u64> = order.into_iter().map(|at| at as u64).collect();
        s.among(&order, logits, f64::from(Philox::new(s.seed, SAMPLE_STREAM, 0).uniform(index)))
    }

    proptest! {
        #[test]
        fn no_shortcut_changes_a_token(
            logits in prop::collection::vec(prop_oneof![-30.0f32..30.0, Just(1.5), Just(-0.0), Just(0.0), Just(f32::NEG_INFINITY)], 1..400),
            temperature in 0.05f64..4.0, top_k in 0usize..40, top_p in prop_oneof![Just(1.0), 0.01f64..1.0], seed in 0u64..50
        ) {
            for top_k in [0, top_k] {
                let s = Sampling { temperature, top_k, top_p, seed };
                for index in 0..20 {
                    prop_assert_eq!(s.choose(&logits, index), defined(s, &logits, index));
                }
            }
        }
    }

    #[test]
    fn a_large_vocabulary_is_rarely_sorted() {
        let mut logits = vec![0.0f32; 50_000];
        Philox::new(1, 2, 3).fill_normal(3.0, &mut logits);
        let draw = |index| f64::from(Philox::new(PLAIN.seed, SAMPLE_STREAM, 0).uniform(index));
        for s in [PLAIN, Sampling { top_p: 0.9, ..PLAIN }] {
            let found = (0..200).filter(|&index| s.among_likely(&logits, draw(index)).is_some()).count();
            assert!(found > 150, "{found} of 200");
            (0..20).for_each(|index| assert_eq!(s.choose(&logits, index), defined(s, &logits, index)));
        }
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_likeliest() {
        assert_eq!(Sampling { temperature: 0.0, ..PLAIN }.choose(&[1.0, 3.0, 3.0, 2.0], 0), 1);
    }
}
