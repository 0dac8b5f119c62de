//! McNemar's exact test, by binomial probabilities that neither overflow nor lose digits for many rows.

use super::student::stirling_error;
use serde::Serialize;
use std::f64::consts::{LN_2, TAU};

/// Rows on which exactly one of two models is right, and their test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct McNemar {
    /// Rows that only the reference has right.
    pub only_reference: u64,
    /// Rows that only the candidate has right.
    pub only_candidate: u64,
    /// Two-sided p of [`mcnemar_p`]. It takes rows as independent: with clusters it is too small.
    pub p: f64,
}

/// McNemar's exact two-sided p: twice the probability that a fair coin shows, in `one` + `other` throws, at
/// most `min(one, other)` heads; at most 1 (McNemar, Psychometrika 12, 1947; the binomial form is in
/// Fagerland et al., BMC Medical Research Methodology 13:91, 2013). 1 without discordant rows.
///
/// Its time grows with the square root of the number of rows.
pub fn mcnemar_p(one: u64, other: u64) -> f64 {
    if one == other {
        return 1.0;
    }
    let (least, n) = (one.min(other) as f64, one as f64 + other as f64);
    // Terms decrease from the largest on.
    let (mut sum, mut term, mut k) = (0.0, 1.0, least);
    while term > 1e-17 * sum {
        sum += term;
        term *= k / (n - k + 1.0);
        k -= 1.0;
    }
    (2.0 * fair_probability(least, n) * sum).min(1.0)
}

/// Probability of `k` heads in `n` throws of a fair coin, by Loader's saddle-point form (Fast and accurate
/// computation of binomial probabilities, 2000).
fn fair_probability(k: f64, n: f64) -> f64 {
    if k == 0.0 {
        return (-n * LN_2).exp();
    }
    let rest = n - k;
    let e = (rest - k) / n;
    // (1 - e) ln(1 - e) + (1 + e) ln(1 + e), which for small e is the sum of e^2j / (j (2j - 1)).
    let deviance = match e < 0.1 {
        true => (1..12).map(|j| e.powi(2 * j) / f64::from(j * (2 * j - 1))).sum(),
        false => (1.0 - e) * (-e).ln_1p() + (1.0 + e) * e.ln_1p(),
    };
    let errors = stirling_error(n) - stirling_error(k) - stirling_error(rest);
    (errors - 0.5 * n * deviance).exp() * (n / (TAU * k * rest)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// scipy 1.17.1, `stats.binomtest(one, one + other).pvalue`, equal to statsmodels' `mcnemar(exact=True)`.
    const REFERENCE: [(u64, u64, f64); 11] = [
        (0, 6, 0.031_25),
        (1, 2, 1.0),
        (3, 11, 0.057_373_046_875),
        (9, 10, 1.0),
        (12, 31, 0.005_401_572_654_591_291),
        (40, 77, 0.000_799_584_443_396_323_9),
        (480, 530, 0.123_073_275_896_218_01),
        (5_000, 5_300, 0.003_215_819_673_645_259),
        (1_000_000, 1_003_000, 0.034_088_365_079_432),
        (100, 600, 9.348_895_347_114_398e-88),
        (500_000_000, 500_050_000, 0.113_862_563_371_715_05),
    ];

    #[test]
    fn p_is_that_of_the_exact_binomial_test() {
        for (one, other, p) in REFERENCE {
            let found = mcnemar_p(one, other);
            assert!((found / p - 1.0).abs() < 1e-9, "{one}, {other}: {found}, not {p}");
            assert_eq!(found, mcnemar_p(other, one));
        }
        assert_eq!([mcnemar_p(0, 0), mcnemar_p(7, 7), mcnemar_p(0, 1)], [1.0; 3]);
    }
}
