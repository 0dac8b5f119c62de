//! Axes: positions of values between 0 and 1, and round numbers as labels.

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// Equal differences have equal lengths.
    Linear,
    /// Equal ratios have equal lengths; values must be positive.
    Log,
}

/// An axis from `low` to `high` with labelled ticks inside.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) scale: Scale,
    pub(super) low: f64,
    pub(super) high: f64,
    /// Values and labels, rising.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis over `low..=high` with about `target` ticks at 1, 2 or 5 times a power of ten.
    ///
    /// A range without length or with ends that are not finite is widened to one that can be drawn.
    pub(super) fn linear(low: f64, high: f64, target: usize) -> Self {
        Self::with_least_step(low, high, target, 0.0)
    }

    /// An axis whose ticks are whole numbers, for steps and tokens.
    pub(super) fn whole(low: f64, high: f64, target: usize) -> Self {
        Self::with_least_step(low, high, target, 1.0)
    }

    fn with_least_step(low: f64, high: f64, target: usize, least: f64) -> Self {
        let (low, high) = drawable(low, high);
        let step = nice_step((high - low) / target as f64).max(least);
        let (first, last) = ((low / step).ceil(), (high / step).floor());
        let count = (last - first).clamp(0.0, 4.0 * target as f64) as usize;
        let values: Vec<f64> = (0..=count).map(|at| (first + at as f64) * step).collect();
        let labels = linear_labels(&values, step);
        Self { scale: Scale::Linear, low, high, ticks: values.into_iter().zip(labels).collect() }
    }

    /// A logarithmic axis over `low..=high`, both positive: ticks at powers of ten, and also at 2 and 5 times
    /// them if those are few.
    pub(super) fn log(low: f64, high: f64) -> Self {
        let (low, high) = (low.max(f64::MIN_POSITIVE), high.max(low * 1.01).max(f64::MIN_POSITIVE * 2.0));
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let decades = high.log10() - low.log10();
        let stride = ((decades / 7.0).ceil() as usize).max(1);
        // Strides meet at 1.
        let first = first.div_euclid(stride as i32) * stride as i32;
        let multiples: &[f64] = if decades < 2.2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let ticks =
            (first..=last).step_by(stride).flat_map(|power| multiples.iter().map(move |&m| (m, power)));
        let ticks = ticks.map(|(m, power)| (m * 10f64.powi(power), log_label(m, power)));
        let ticks = ticks.filter(|(value, _)| (low..=high).contains(value)).collect();
        Self { scale: Scale::Log, low, high, ticks }
    }

    /// Position of `value`: 0 at `low`, 1 at `high`, outside of this range beyond the axis. NaN if it has
    /// none.
    pub(super) fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value > 0.0 => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            Scale::Log => f64::NAN,
        }
    }
}

fn drawable(low: f64, high: f64) -> (f64, f64) {
    // Far from the largest finite number, so that differences stay finite.
    const LIMIT: f64 = 1e300;
    let (low, high) = (low.clamp(-LIMIT, LIMIT), high.clamp(-LIMIT, LIMIT));
    if low.is_nan() || high.is_nan() {
        return (0.0, 1.0);
    }
    // Ticks closer than this could not be distinguished.
    let least = (low.abs().max(high.abs()) * 1e-9).max(1e-300);
    if high - low >= least {
        return (low, high);
    }
    let middle = low / 2.0 + high / 2.0;
    let pad = if middle == 0.0 { 1.0 } else { middle.abs() * 0.1 };
    (middle - pad, middle + pad)
}

/// The step among 1, 2 and 5 times a power of ten whose ratio to `rough` is nearest to 1.
fn nice_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    // The boundary between two neighbours is their geometric mean.
    let multiple = match rough / power {
        m if m < 2f64.sqrt() => 1.0,
        m if m < 10f64.sqrt() => 2.0,
        m if m < 50f64.sqrt() => 5.0,
        _ => 10.0,
    };
    multiple * power
}

/// Labels in one form: plain decimals, thousands with a suffix, or powers of ten for very small and very
/// large values.
fn linear_labels(values: &[f64], step: f64) -> Vec<String> {
    let largest = values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
    let (unit, suffix) = match largest {
        _ if !(0.009..1e15).contains(&largest) => {
            return values.iter().map(|&value| power_label(value, step)).collect();
        }
        _ if largest >= 1e12 => (1e12, "T"),
        _ if largest >= 1e9 => (1e9, "B"),
        _ if largest >= 1e6 => (1e6, "M"),
        _ if largest >= 1e4 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let decimals = decimals_of(step / unit);
    let label = |value: f64| match value {
        0.0 => "0".to_owned(),
        _ => format!("{:.decimals$}{suffix}", value / unit),
    };
    values.iter().map(|&value| label(value)).collect()
}

/// `2.5e-4`: as many digits as `step` needs.
fn power_label(value: f64, step: f64) -> String {
    // A tick that should be 0 may miss it by a rounding error.
    if value.abs() < step / 2.0 {
        return "0".to_owned();
    }
    let decimals = decimals_of(step / 10f64.powf(value.abs().log10().floor()));
    let label = format!("{value:.decimals$e}");
    match label.split_once('e') {
        Some((digits, power)) if digits.contains('.') => {
            format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => label,
    }
}

fn log_label(multiple: f64, power: i32) -> String {
    match power {
        -3..0 => format!("{:.*}", power.unsigned_abs() as usize, multiple * 10f64.powi(power)),
        0..4 => format!("{:.0}", multiple * 10f64.powi(power)),
        _ => format!("{multiple:.0}e{power}"),
    }
}

/// Decimals that a multiple of `step` needs if `step` is 1, 2 or 5 times a power of ten.
fn decimals_of(step: f64) -> usize {
    (-(step.log10() + 1e-9).floor()).clamp(0.0, 12.0) as usize
}
