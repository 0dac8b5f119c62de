//! A routing that does not depend on routers, for benchmarks.

use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// A choice of experts for each token that is the same in every block and step. Expert number e, from 1 on,
/// is chosen by a share of tokens proportional to 1 / e^skew, but at most by all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FixedRouting {
    /// 0 for equal shares, 1 for Zipf's law.
    pub skew: f64,
}

impl FixedRouting {
    /// The share of tokens that choose each expert, if each chooses `top_k`; at most 1. The shares add up to
    /// `top_k`, which is at most `experts`.
    pub fn shares(self, experts: usize, top_k: usize) -> Vec<f64> {
        let weights: Vec<f64> = (1..=experts).map(|e| (e as f64).powf(-self.skew)).collect();
        let mut full = 0;
        loop {
            let rest: f64 = weights[full..].iter().sum();
            let factor = (top_k - full) as f64 / rest;
            if full == top_k || factor * weights[full] <= 1.0 {
                return (0..experts).map(|e| if e < full { 1.0 } else { factor * weights[e] }).collect();
            }
            full += 1;
        }
    }

    /// The mean number of experts of a token that each of `ranks` has, if they share the experts; they add up
    /// to `top_k`.
    pub fn shares_of_ranks(self, experts: usize, top_k: usize, ranks: usize) -> Vec<f64> {
        self.shares(experts, top_k).chunks(experts.div_ceil(ranks)).map(|own| own.iter().sum()).collect()
    }

    /// The tokens that choose each expert.
    pub fn loads(self, tokens: usize, experts: usize, top_k: usize) -> Vec<usize> {
        let mut loads = vec![0; experts];
        self.ids(tokens, experts, top_k).to_f64().into_iter().for_each(|id| loads[id as usize] += 1);
        loads
    }

    /// `i32[tokens, top_k]`: distinct experts of each token.
    pub(crate) fn ids(self, tokens: usize, experts: usize, top_k: usize) -> HostTensor {
        let shares = self.shares(experts, top_k);
        let rng = Philox::new(0, 0, 0);
        let mut ids = Vec::with_capacity(tokens * top_k);
        for token in 0..tokens {
            // Systematic sampling: the experts whose intervals, as long as their shares, contain one number
            // and those that are larger by 1, 2, ...
            let (mut expert, mut end) = (0, shares[0]);
            for n in 0..top_k {
                let at = f64::from(rng.uniform(token as u64)) + n as f64;
                // Of the experts after this one, so many must be left.
                while end <= at && expert + top_k - n < experts {
                    expert += 1;
                    end += shares[expert];
                }
                ids.push(expert as f64);
                expert += 1;
                end += shares.get(expert).copied().unwrap_or(0.0);
            }
        }
        HostTensor::from_f64(TensorType::new(DType::I32, [tokens, top_k]), &ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(skew: f64, tokens: usize, experts: usize, top_k: usize) -> Vec<usize> {
        let ids = FixedRouting { skew }.ids(tokens, experts, top_k).to_f64();
        for of_token in ids.chunks(top_k) {
            assert!(of_token.windows(2).all(|pair| pair[0] < pair[1]), "{of_token:?}");
        }
        FixedRouting { skew }.loads(tokens, experts, top_k)
    }

    #[test]
    fn experts_have_equal_shares_of_tokens() {
        for (experts, top_k) in [(8, 2), (128, 8), (5, 5), (3, 1)] {
            let mean = 10_000 * top_k / experts;
            let loads = loads(0.0, 10_000, experts, top_k);
            assert!(loads.iter().all(|load| load.abs_diff(mean) <= mean / 5), "{loads:?}");
        }
    }

    #[test]
    fn experts_have_shares_by_zipfs_law_but_at_most_all_tokens() {
        // Shares of 2 by 12, 6, 4 and 3 of 25.
        let of_four = FixedRouting { skew: 1.0 }.shares(4, 2);
        assert!(
            of_four.iter().zip([0.96, 0.48, 0.32, 0.24]).all(|(a, b)| (a - b).abs() < 1e-9),
            "{of_four:?}"
        );
        let shares = FixedRouting { skew: 1.0 }.shares(128, 8);
        assert_eq!(shares[0], 1.0);
        assert!((shares.iter().sum::<f64>() - 8.0).abs() < 1e-9);
        assert!((shares[3] / shares[7] - 2.0).abs() < 1e-9);
        for (load, share) in loads(1.0, 10_000, 128, 8).into_iter().zip(shares) {
            assert!((load as f64 - share * 1e4).abs() <= 20.0 + share * 1e3, "{load} of {share}");
        }
        let of_ranks = FixedRouting { skew: 1.0 }.shares_of_ranks(4, 2, 2);
        assert!(of_ranks.iter().zip([1.44, 0.56]).all(|(a, b)| (a - b).abs() < 1e-9), "{of_ranks:?}");
        assert_eq!(FixedRouting { skew: 0.0 }.shares_of_ranks(8, 2, 4), [0.5; 4]);
        assert_eq!(loads(1.0, 100, 4, 4), [100; 4]);
        assert_eq!(loads(9.0, 100, 3, 1)[0], 100);
    }
}
