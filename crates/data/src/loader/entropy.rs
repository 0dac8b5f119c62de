//! The entropy of tokens taken one by one: the first bar that a language model has to pass.

/// Entropy in nats of the frequencies of `tokens`; negative ones (ignored targets) are passed over. 0 for none.
pub fn unigram_entropy_nats(tokens: &[i32]) -> f64 {
    let mut counts = Vec::new();
    for token in tokens.iter().filter_map(|&token| usize::try_from(token).ok()) {
        if token >= counts.len() {
            counts.resize(token + 1, 0);
        }
        counts[token] += 1_u64;
    }
    of_counts(&counts)
}

/// Entropy in nats of a distribution given by counts.
pub(super) fn of_counts(counts: &[u64]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    let terms = counts.iter().filter(|&&count| count > 0).map(|&count| {
        let share = count as f64 / total;
        -share * share.ln()
    });
    terms.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_of_known_distributions() {
        assert_eq!(unigram_entropy_nats(&[]), 0.0);
        assert_eq!(unigram_entropy_nats(&[5, 5, 5, -100]), 0.0);
        assert!((unigram_entropy_nats(&[0, 1, 2, 3]) - 4_f64.ln()).abs() < 1e-12);
        let skewed = 0.75 * (4.0 / 3.0_f64).ln() + 0.25 * 4_f64.ln();
        assert!((unigram_entropy_nats(&[7, 7, 7, 2]) - skewed).abs() < 1e-12);
    }
}
