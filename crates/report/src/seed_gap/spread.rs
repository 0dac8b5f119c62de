//! Confidence intervals from a few values by Student's t.

/// Value that 2.5% of Student's distribution with 1, 2, ... degrees of freedom exceeds.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// Mean and standard deviation of a sample; the latter needs two values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LossSample {
    pub(super) count: usize,
    pub(super) mean: f64,
    pub(super) deviation: Option<f64>,
}

impl LossSample {
    /// The sample of these values; `None` without values, or if one is not finite.
    pub(super) fn from_values(values: &[f64]) -> Option<Self> {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        if !mean.is_finite() {
            return None;
        }
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = (count > 1).then(|| (squares / (count - 1) as f64).sqrt());
        Some(Self { count, mean, deviation })
    }

    /// Distance from its mean within which the mean of the population lies with 95% confidence.
    pub(super) fn of_mean(&self) -> Option<f64> {
        Some(self.t() * self.deviation? / (self.count as f64).sqrt())
    }

    /// Distance from its mean within which the mean of `others` more values lies with 95% confidence.
    pub(super) fn of_others(&self, others: usize) -> Option<f64> {
        Some(self.t() * self.deviation? * (1.0 / self.count as f64 + 1.0 / others as f64).sqrt())
    }

    fn t(&self) -> f64 {
        let degrees = self.count.saturating_sub(1).max(1);
        // Beyond the table, by the first term of the expansion at the normal distribution's 1.96.
        T.get(degrees - 1).copied().unwrap_or(1.96 + 2.372 / degrees as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_of_the_tables() {
        let sample = LossSample::from_values(&[1.0, 2.0, 3.0]).expect("finite");
        assert_eq!((sample.mean, sample.deviation), (2.0, Some(1.0)));
        assert!((sample.of_mean().expect("three") - 4.303 / 3f64.sqrt()).abs() < 1e-12);
        assert!((sample.of_others(1).expect("three") - 4.303 * (4.0f64 / 3.0).sqrt()).abs() < 1e-12);
        let many = LossSample { count: 61, mean: 0.0, deviation: Some(1.0) };
        assert!((many.t() - 2.000).abs() < 1e-3, "{}", many.t());
    }

    #[test]
    fn one_number_has_no_spread_and_none_no_mean() {
        let one = LossSample::from_values(&[2.0]).expect("finite");
        assert_eq!((one.of_mean(), one.of_others(1)), (None, None));
        assert_eq!(LossSample::from_values(&[]), None);
        assert_eq!(LossSample::from_values(&[1.0, f64::NAN]), None);
    }
}
