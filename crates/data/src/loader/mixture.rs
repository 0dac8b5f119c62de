//! The mixture of sources: assigns each sample to a source.
//!
//! Weights become whole numbers of samples per cycle. A cycle is scheduled so that after any number of
//! samples each source is less than one sample away from its share: the n-th sample of a source has an
//! earliest and a latest slot, and each slot goes to the source with the earliest deadline among those that
//! may come (proportionate progress; Baruah et al. 1996, who prove that a schedule exists and that this finds
//! one). A look-up in the cycle then gives any sample's source and its index within the source.

use crate::error::{DataError, Result};

/// Weights that are multiples of 1/n for an n up to this are represented exactly.
const MAX_EXACT_CYCLE: u64 = 10_000;
/// Other weights are rounded to multiples of 1 / this.
const ROUNDED_CYCLE: u64 = 1_000_000;

/// The periodic order of sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixture {
    /// Samples of each source per cycle.
    shares: Vec<u64>,
    /// For each sample of a cycle: its source, and the number of earlier samples of that source in the cycle.
    cycle: Vec<(u32, u32)>,
}

impl Mixture {
    /// A mixture by positive weights of any scale.
    ///
    /// # Errors
    /// No weights; a weight that is not a positive number; a weight below a millionth of the sum.
    pub fn new(weights: &[f64]) -> Result<Mixture> {
        let shares = shares(weights)?;
        let total: u64 = shares.iter().sum();
        let mut taken = vec![0; shares.len()];
        let mut cycle = Vec::with_capacity(total as usize);
        for slot in 0..total {
            let next = (0..shares.len())
                .filter(|&s| taken[s] < shares[s] && taken[s] * total / shares[s] <= slot)
                .min_by_key(|&s| ((taken[s] + 1) * total).div_ceil(shares[s]))
                .ok_or_else(|| DataError::Internal("a slot of the mixture stays empty".to_owned()))?;
            cycle.push((next as u32, taken[next] as u32));
            taken[next] += 1;
        }
        Ok(Mixture { shares, cycle })
    }

    /// The source of sample `index`, and the number of earlier samples of that source.
    pub fn locate(&self, index: u64) -> (usize, u64) {
        let length = self.cycle.len() as u64;
        let (source, before) = self.cycle[(index % length) as usize];
        (source as usize, index / length * self.shares[source as usize] + u64::from(before))
    }

    /// Number of samples of each source among the first `samples`.
    pub fn counts(&self, samples: u64) -> Vec<u64> {
        let length = self.cycle.len() as u64;
        let mut counts: Vec<u64> = self.shares.iter().map(|share| samples / length * share).collect();
        for &(source, _) in &self.cycle[..(samples % length) as usize] {
            counts[source as usize] += 1;
        }
        counts
    }
}

/// Whole numbers proportional to the weights.
fn shares(weights: &[f64]) -> Result<Vec<u64>> {
    if weights.is_empty() {
        return Err(DataError::invalid("there is no data source", "name at least one"));
    }
    if let Some((source, weight)) = weights.iter().enumerate().find(|(_, w)| !(w.is_finite() && **w > 0.0)) {
        return Err(DataError::invalid(
            format!("the weight {weight} of data source {} is not a positive number", source + 1),
            "set a positive weight, or remove the source",
        ));
    }
    let total: f64 = weights.iter().sum();
    let exact = |cycle: u64| -> Option<Vec<u64>> {
        let scaled = weights.iter().map(|weight| weight / total * cycle as f64);
        let shares: Option<Vec<u64>> = scaled
            .map(|share| {
                (share.round() >= 1.0 && (share - share.round()).abs() < 1e-9).then(|| share.round() as u64)
            })
            .collect();
        shares.filter(|shares| shares.iter().sum::<u64>() == cycle)
    };
    if let Some(shares) = (1..=MAX_EXACT_CYCLE).find_map(exact) {
        return Ok(shares);
    }
    // Largest remainder method.
    let scaled: Vec<f64> = weights.iter().map(|weight| weight / total * ROUNDED_CYCLE as f64).collect();
    let mut shares: Vec<u64> = scaled.iter().map(|share| share.floor() as u64).collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    by_remainder.sort_by(|&a, &b| scaled[b].fract().total_cmp(&scaled[a].fract()).then(a.cmp(&b)));
    let left_over = ROUNDED_CYCLE.saturating_sub(shares.iter().sum()) as usize;
    for &source in by_remainder.iter().cycle().take(left_over) {
        shares[source] += 1;
    }
    if let Some(source) = shares.iter().position(|&share| share == 0) {
        return Err(DataError::invalid(
            format!("the weight of data source {} is less than a millionth of the sum", source + 1),
            "increase its weight, or remove it",
        ));
    }
    Ok(shares)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn any_prefix_is_within_one_sample_of_the_weights(
            weights in prop::collection::vec(1_u32..60, 1..7),
        ) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let total: f64 = weights.iter().sum();
            let mixture = Mixture::new(&weights).unwrap();
            let mut counts = vec![0_u64; weights.len()];
            for index in 0..2000 {
                prop_assert_eq!(&mixture.counts(index), &counts);
                let (source, before) = mixture.locate(index);
                prop_assert_eq!(before, counts[source]);
                counts[source] += 1;
                for (count, weight) in counts.iter().zip(&weights) {
                    let share = weight / total * (index + 1) as f64;
                    prop_assert!((*count as f64 - share).abs() < 1.0 + 1e-9, "{count} for {share}");
                }
            }
        }

        #[test]
        fn other_weights_are_met_to_a_millionth(
            weights in prop::collection::vec(0.001_f64..1.0, 2..5),
        ) {
            let total: f64 = weights.iter().sum();
            let mixture = Mixture::new(&weights).unwrap();
            for (&share, weight) in mixture.shares.iter().zip(&weights) {
                prop_assert!((share as f64 / mixture.cycle.len() as f64 - weight / total).abs() <= 1e-6);
            }
        }
    }

    #[test]
    fn decimal_weights_are_exact() {
        assert_eq!(Mixture::new(&[0.7, 0.2, 0.1]).unwrap().counts(10), [7, 2, 1]);
        assert_eq!(Mixture::new(&[0.1, 0.1, 0.1]).unwrap().counts(3), [1, 1, 1]);
    }

    #[test]
    fn invalid_weights_are_refused() {
        for weights in [&[][..], &[1.0, 0.0], &[-1.0], &[f64::NAN], &[f64::INFINITY], &[1.0, 1e-9]] {
            assert!(Mixture::new(weights).is_err(), "{weights:?}");
        }
    }
}
