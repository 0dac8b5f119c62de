//! Confidence intervals from a few values, one a seed, by Student's t.

use super::student::t_95;

/// Mean and standard deviation of a few values; the latter needs two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SeedSample {
    pub(crate) count: usize,
    pub(crate) mean: f64,
    pub(crate) deviation: Option<f64>,
}

impl SeedSample {
    /// The sample of these values; `None` without values, or if one is not finite.
    pub(crate) fn from_values(values: &[f64]) -> Option<Self> {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        if !mean.is_finite() {
            return None;
        }
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = (count > 1).then(|| (squares / (count - 1) as f64).sqrt());
        Some(Self { count, mean, deviation })
    }

    /// Squared standard error of the mean.
    pub(crate) fn variance_of_mean(&self) -> Option<f64> {
        Some(self.deviation?.powi(2) / self.count as f64)
    }

    /// Distance from its mean within which the mean of the population lies with 95% confidence.
    pub(crate) fn of_mean(&self) -> Option<f64> {
        Some(self.t() * self.variance_of_mean()?.sqrt())
    }

    /// Distance from its mean within which the mean of `others` more values lies with 95% confidence.
    pub(crate) fn of_others(&self, others: usize) -> Option<f64> {
        Some(self.t() * self.deviation? * (1.0 / self.count as f64 + 1.0 / others as f64).sqrt())
    }

    /// Degrees of freedom of the deviation.
    pub(crate) fn degrees(&self) -> f64 {
        self.count.saturating_sub(1).max(1) as f64
    }

    fn t(&self) -> f64 {
        t_95(self.degrees())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_of_the_tables() {
        let sample = SeedSample::from_values(&[1.0, 2.0, 3.0]).expect("finite");
        assert_eq!((sample.mean, sample.deviation), (2.0, Some(1.0)));
        let t = 4.302_652_729_749_464;
        assert!((sample.of_mean().expect("three") - t / 3f64.sqrt()).abs() < 1e-12);
        assert!((sample.of_others(1).expect("three") - t * (4.0f64 / 3.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn one_number_has_no_spread_and_none_no_mean() {
        let one = SeedSample::from_values(&[2.0]).expect("finite");
        assert_eq!((one.of_mean(), one.of_others(1)), (None, None));
        assert_eq!(SeedSample::from_values(&[]), None);
        assert_eq!(SeedSample::from_values(&[1.0, f64::NAN]), None);
    }
}
