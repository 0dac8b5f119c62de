//! A wall-clock limit in the form `2h30m`, `170m`, `45s`, `0.5s`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A wall-clock time written as numbers with units, largest first: `1d12h`, `2h30m`, `45s`, `100ms`. The last
/// number may have a fraction: `1.5h`.
///
/// Whole milliseconds, at least one and at most ten years. Prints in the largest units that fit, so `170m`
/// prints as `2h50m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("format" = "time"))]
pub struct TimeLimit(Duration);

/// Error in a text that should be a time.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TimeLimitError {
    /// Something other than numbers with units, largest first.
    #[error(
        "a time is written as numbers with units, largest first, such as \"2h30m\", \"170m\" or \"45s\" \
         (d, h, m, s, ms)"
    )]
    Form,
    /// Less than a millisecond, or more than ten years.
    #[error("a time limit lies between 1ms and 3650d")]
    Range,
}

xtrain_tensor::debug_as_display!(TimeLimitError);

/// Units and their milliseconds, largest first.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
const MAX_MS: u64 = 3_650 * 86_400_000;
/// Decimals of a fraction that count.
const DECIMALS: usize = 9;

impl TimeLimit {
    /// A limit of some minutes, as a default.
    pub(crate) const fn minutes(minutes: u64) -> Self {
        TimeLimit(Duration::from_secs(60 * minutes))
    }

    /// The limit as a duration.
    pub fn duration(self) -> Duration {
        self.0
    }
}

impl FromStr for TimeLimit {
    type Err = TimeLimitError;

    fn from_str(text: &str) -> Result<Self, TimeLimitError> {
        let mut ms: u64 = 0;
        let mut rest = text;
        let mut has_fraction = false;
        for (unit, unit_ms) in UNITS {
            let (number, after) = split_number(rest);
            let Some(after) = after.strip_prefix(unit).filter(|after| ends_unit(after)) else { continue };
            let (whole, fraction) = number.split_once('.').map_or((number, None), |(a, b)| (a, Some(b)));
            let is_number = !whole.is_empty() && fraction.is_none_or(|fraction| !fraction.is_empty());
            if !is_number || has_fraction {
                return Err(TimeLimitError::Form);
            }
            let count: u64 = whole.parse().map_err(|_| TimeLimitError::Range)?;
            ms = ms.saturating_add(count.saturating_mul(unit_ms));
            ms = ms.saturating_add(fraction.map_or(0, |digits| part_of(unit_ms, digits)));
            (has_fraction, rest) = (fraction.is_some(), after);
        }
        if text.is_empty() || !rest.is_empty() {
            return Err(TimeLimitError::Form);
        }
        if !(1..=MAX_MS).contains(&ms) {
            return Err(TimeLimitError::Range);
        }
        Ok(TimeLimit(Duration::from_millis(ms)))
    }
}

/// The digits at the beginning, which may have a point among them, and the rest.
fn split_number(text: &str) -> (&str, &str) {
    let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let whole = digits(text);
    let end = match text[whole..].strip_prefix('.') {
        Some(fraction) => whole + 1 + digits(fraction),
        None => whole,
    };
    text.split_at(end)
}

/// True if a unit ends before `after`: the `m` of `ms` is none.
fn ends_unit(after: &str) -> bool {
    after.is_empty() || after.starts_with(|c: char| c.is_ascii_digit())
}

/// The milliseconds of a fraction with these decimals of a unit, rounded to the nearest.
fn part_of(unit_ms: u64, digits: &str) -> u64 {
    let digits = &digits[..digits.len().min(DECIMALS)];
    let scale = 10_u64.pow(digits.len() as u32);
    let fraction: u64 = digits.parse().unwrap_or_default();
    (fraction * unit_ms + scale / 2) / scale
}

impl TryFrom<String> for TimeLimit {
    type Error = TimeLimitError;

    fn try_from(text: String) -> Result<Self, TimeLimitError> {
        text.parse()
    }
}

impl From<TimeLimit> for String {
    fn from(limit: TimeLimit) -> Self {
        limit.to_string()
    }
}

impl fmt::Display for TimeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ms = self.0.as_millis() as u64;
        for (unit, unit_ms) in UNITS {
            if ms >= unit_ms {
                write!(f, "{}{unit}", ms / unit_ms)?;
                ms %= unit_ms;
            }
        }
        Ok(())
    }
}
