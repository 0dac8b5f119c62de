//! The verdict on a difference of scores: does the candidate cost points?
//!
//! ```text
//!                 -margin      0      margin
//! inside             |    [---+--]      |         the interval lies within the margin
//! OUTSIDE   [--+--]  |                  |         it lies beyond the margin
//! unclear       [----|--+--]            |         it reaches both; inside, if it lies within the seeds' band
//! ```
//!
//! The interval decides even where the seeds of the reference spread more widely: pairs of one seed share
//! this noise. A point is a hundredth of the score's unit.

use super::difference_error::DifferenceError;
use super::interval::Interval;
use super::seeds::{Pairing, SeedDifference};
use serde::Serialize;

/// Multiple of the bar, or of the margin, above which a gap or a spread of seeds is far over it.
pub(crate) const FAR: f64 = 3.0;

/// Margin of a verdict if none is set, in points.
pub const MARGIN_POINTS: f64 = 1.0;

/// Largest number of seeds on each side, and multiple of rows, that a verdict advises.
const MOST_SEEDS: usize = 100;
const MOST_TIMES_ROWS: f64 = 1000.0;

/// The answer: does the candidate cost points?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Finding {
    /// The difference is no larger than the margin, or than that of other seeds.
    #[serde(rename = "inside")]
    Inside,
    /// The difference is larger than the margin.
    #[serde(rename = "OUTSIDE")]
    Outside,
    /// Chance could move the difference across the margin.
    #[serde(rename = "unclear")]
    Unclear,
}

impl Finding {
    /// The word in tables and in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Finding::Inside => "inside",
            Finding::Outside => "OUTSIDE",
            Finding::Unclear => "unclear",
        }
    }
}

/// Causes of chance between the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variation {
    /// Rows alone: both sides evaluate the same weights, as in two precisions.
    Rows,
    /// Rows and seeds: both sides were trained.
    Seeds,
}

/// A number of evaluations that would settle an unclear verdict, if the difference stays as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Settling {
    /// Seeds on each side.
    Seeds(u64),
    /// Rows, of all tasks together, rounded up to two digits.
    Rows(u64),
}

/// The verdict on one task, or on the mean of several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskVerdict {
    /// The answer.
    pub finding: Finding,
    /// Candidate minus reference, in points: negative if the candidate is worse.
    pub difference_points: f64,
    /// 95% interval of the difference, in points; see [`SeedDifference::interval`].
    pub interval_points: Option<Interval>,
    /// The margin, in points.
    pub margin_points: f64,
    /// Distance from the reference within which as many other seeds of it would lie, in points.
    pub band_points: Option<f64>,
    /// True if the difference lies within that band.
    pub inside_band: Option<bool>,
    /// Smallest true difference, in points, that would be OUTSIDE in 80% of such comparisons: the margin plus
    /// a multiple of the standard error (noncentral t; 2.8 for many seeds, 6.4 for three). `None` without an
    /// interval, or if one seed on a side can give no such verdict.
    pub detectable_points: Option<f64>,
    /// Number of seeds or rows that would settle an unclear verdict in 80% of such comparisons. `None` if the
    /// verdict is clear, or if the difference lies so close to the margin that no reasonable number would.
    pub settled_by: Option<Settling>,
    /// The reason, a clause that follows the word of the finding and a colon.
    pub reason: String,
}

impl TaskVerdict {
    /// The verdict on `difference`, which may be up to `margin_points` large. A margin that is negative or
    /// NaN counts as 0.
    ///
    /// *inside*: the interval lies within the margin, or within the band of other seeds unless this is over
    /// three times the margin. *OUTSIDE*: the interval lies beyond the margin, in either direction.
    /// *unclear*: neither; there is no interval; or one seed on a side, for [`Variation::Seeds`].
    pub fn new(difference: &SeedDifference, variation: Variation, margin_points: f64) -> Self {
        let margin = margin_points.max(0.0);
        let points = 100.0 * difference.difference;
        let interval = difference.interval.map(|interval| interval.in_points());
        let band = difference.band.map(|band| 100.0 * band);
        let lacks_seeds = variation == Variation::Seeds && difference.pairing == Pairing::OneSeed;
        let narrow_band = band.filter(|band| *band <= FAR * margin);
        let finding = match interval {
            _ if lacks_seeds => Finding::Unclear,
            Some(interval) if interval.is_within(margin) => Finding::Inside,
            Some(interval) if interval.is_beyond(margin) => Finding::Outside,
            Some(interval) if narrow_band.is_some_and(|band| interval.is_within(band)) => Finding::Inside,
            _ => Finding::Unclear,
        };
        let error = difference.error.unbiased();
        let power = error.half_width_of_power().filter(|_| !lacks_seeds);
        let mut verdict = Self {
            finding,
            difference_points: points,
            interval_points: interval,
            margin_points: margin,
            band_points: band,
            inside_band: band.map(|band| points.abs() <= band),
            detectable_points: power.map(|power| margin + 100.0 * power),
            settled_by: None,
            reason: String::new(),
        };
        if finding == Finding::Unclear {
            verdict.settled_by = verdict.settling(difference, lacks_seeds);
        }
        verdict.reason = verdict.because(lacks_seeds);
        verdict
    }

    /// The fewest seeds, else rows, with which the interval would lie on one side of the margin.
    fn settling(&self, difference: &SeedDifference, lacks_seeds: bool) -> Option<Settling> {
        let error = difference.error.unbiased();
        let is_settled = |error: DifferenceError| {
            let reach = error.half_width_of_power().map_or(f64::INFINITY, |power| 100.0 * power);
            reach <= (self.difference_points.abs() - self.margin_points).abs()
        };
        let present = difference.reference_seeds.min(difference.candidate_seeds);
        let with_seeds = |seeds: &usize| match difference.pairing {
            // A spread of two seeds alone is hardly known.
            Pairing::OneSeed => lacks_seeds && *seeds > 2 && is_settled(error.of_one_pair_with_seeds(*seeds)),
            _ => *seeds > present && is_settled(error.with_seeds(*seeds, present)),
        };
        if let Some(seeds) = (2..=MOST_SEEDS).find(with_seeds) {
            return Some(Settling::Seeds(seeds as u64));
        }
        if lacks_seeds {
            return None;
        }
        let mut times = 1.0;
        while times <= MOST_TIMES_ROWS && !is_settled(error.with_rows(times)) {
            times *= 1.02;
        }
        let rows = difference.rows as f64 * times;
        (times <= MOST_TIMES_ROWS).then(|| Settling::Rows(two_digits_up(rows)))
    }

    fn because(&self, lacks_seeds: bool) -> String {
        let margin = points(self.margin_points);
        let known = self.interval_points.map(|interval| points(interval.half_width()));
        let in_band = match self.band_points {
            Some(band) if band > self.margin_points => Some(points(band)),
            _ => None,
        };
        match (self.finding, known) {
            (Finding::Inside, _)
                if self.interval_points.is_some_and(|i| !i.is_within(self.margin_points)) =>
            {
                format!(
                    "other seeds of the reference would differ as much: they lie within ±{}",
                    in_band.unwrap_or_default()
                )
            }
            (Finding::Inside, _) => format!("the whole interval lies within the margin of ±{margin}"),
            (Finding::Outside, _) => {
                let direction = if self.difference_points < 0.0 { "worse" } else { "better" };
                let but = in_band.filter(|_| self.inside_band == Some(true));
                let but =
                    but.map(|band| format!(", though other seeds of the reference would lie within ±{band}"));
                format!("{direction} by more than the margin of {margin}{}", but.unwrap_or_default())
            }
            (Finding::Unclear, None) => {
                "a single row, or a single cluster of rows, has no interval".to_owned()
            }
            (Finding::Unclear, Some(known)) => {
                let why = match lacks_seeds {
                    true => format!(
                        "a single seed on a side does not show the effect of chance in training; for these runs the difference is known to ±{known}"
                    ),
                    false => format!("the difference is known to ±{known} only, and the margin is {margin}"),
                };
                format!("{why}; {}", self.remedy(lacks_seeds))
            }
        }
    }

    fn remedy(&self, lacks_seeds: bool) -> String {
        match self.settled_by {
            Some(Settling::Seeds(seeds)) => {
                let least = if lacks_seeds { "at least" } else { "about" };
                format!("{least} {seeds} seeds on each side would settle it, if the difference stays")
            }
            Some(Settling::Rows(rows)) => {
                format!("about {} rows would settle it, if the difference stays", crate::metrics::format::grouped(rows))
            }
            None if lacks_seeds => "train at least three seeds on each side".to_owned(),
            None => "no practical number of seeds or rows would settle it, if the difference stays; take a task with more rows, or the margin that matters to you".to_owned(),
        }
    }
}

/// A number of points with its unit, to two digits after the point.
pub(crate) fn points(points: f64) -> String {
    match points {
        1.0 => "1 point".to_owned(),
        _ if points == points.round() => format!("{points:.0} points"),
        _ => format!("{points:.2} points"),
    }
}

/// The number with two significant digits, rounded up.
fn two_digits_up(number: f64) -> u64 {
    let unit = 10f64.powf(number.log10().floor() - 1.0).max(1.0);
    ((number / unit).ceil() * unit) as u64
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
