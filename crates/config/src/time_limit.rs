//! A wall-clock limit in the form `2h30m`, `170m`, `45s`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A wall-clock time written as numbers with units, largest first: `1d12h`, `2h30m`, `45s`.
///
/// Whole seconds, at least one and at most ten years. Prints in the largest units that fit, so `170m` prints
/// as `2h50m`.
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
         (d, h, m, s)"
    )]
    Form,
    /// Zero, or more than ten years.
    #[error("a time limit lies between 1s and 3650d")]
    Range,
}

xtrain_tensor::debug_as_display!(TimeLimitError);

const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3_600), ('m', 60), ('s', 1)];
const MAX_SECONDS: u64 = 3_650 * 86_400;

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
        let mut seconds: u64 = 0;
        let mut rest = text;
        for (unit, unit_seconds) in UNITS {
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            if digits == 0 || !rest[digits..].starts_with(unit) {
                continue;
            }
            let count: u64 = rest[..digits].parse().map_err(|_| TimeLimitError::Range)?;
            seconds = seconds.saturating_add(count.saturating_mul(unit_seconds));
            rest = &rest[digits + 1..];
        }
        if text.is_empty() || !rest.is_empty() {
            return Err(TimeLimitError::Form);
        }
        if !(1..=MAX_SECONDS).contains(&seconds) {
            return Err(TimeLimitError::Range);
        }
        Ok(TimeLimit(Duration::from_secs(seconds)))
    }
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
        let mut seconds = self.0.as_secs();
        for (unit, unit_seconds) in UNITS {
            if seconds >= unit_seconds {
                write!(f, "{}{unit}", seconds / unit_seconds)?;
                seconds %= unit_seconds;
            }
        }
        Ok(())
    }
}
