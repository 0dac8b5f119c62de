//! Gaps of the training loss over the last common steps, and gaps of the validation loss.
//!
//! Runs with different tokenizers have no gap of the training loss, and one of the validation loss in bits a
//! byte, if they are evaluated on one text.

use super::groups::{Group, Seed};
use super::task_gap::{TaskGap, TaskMean};
use crate::RunData;
use crate::curves::{View, Views};
use crate::identity::{same_text, same_tokenizer};
use crate::metrics::EvalMetrics;
use crate::scores::sample::SeedSample;
use crate::scores::verdict::FAR;
use crate::thin::Point;
use serde::Serialize;
use std::ops::RangeInclusive;
use xtrain_model::Recipe;

/// Runs of one group compared with the baseline.
#[derive(Clone, Debug, Serialize)]
pub struct Gap {
    /// Their names.
    pub runs: Vec<String>,
    /// Their recipe, if known.
    pub recipe: Option<String>,
    /// Tolerance of docs/numerics.md for the loss of this recipe relative to the baseline's recipe, in
    /// percent.
    pub bar_percent: Option<f64>,
    /// Training loss over the last common steps; `None` if there is no loss to compare, which a note
    /// explains.
    pub training: Option<LossGap>,
    /// Loss of the last evaluation that all runs have.
    pub validation: Option<LossGap>,
    /// Tasks that these runs and the baseline have scores of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskGap>,
    /// The mean of two or more tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_mean: Option<TaskMean>,
}

/// A loss compared with that of the baseline.
#[derive(Clone, Debug, Serialize)]
pub struct LossGap {
    /// First position, in steps or tokens, whose loss is included.
    pub from: u64,
    /// Last position whose loss is included.
    pub to: u64,
    /// Unit of the losses: `nats/token`, or `bits/byte` if tokenizers differ.
    pub unit: &'static str,
    /// Number of distinct seeds of these runs. Runs of one seed count as one run: their mean.
    pub seeds: usize,
    /// Mean cross-entropy over these steps and over the seeds.
    pub loss: f64,
    /// Mean cross-entropy of the runs that these are compared with: the baseline's runs of the same seeds, or
    /// all of the baseline's runs.
    pub baseline_loss: f64,
    /// Loss above that of the baseline, in percent: the mean over the seeds, each compared with the
    /// baseline's runs of this seed if there are any.
    pub gap_percent: f64,
    /// Number of seeds that the baseline has too.
    pub paired: usize,
    /// Half width of the 95% confidence interval of the gap over seeds, for two or more seeds.
    pub gap_interval_percent: Option<f64>,
    /// Standard deviation of the baseline over its seeds, in percent of its loss, for two or more seeds.
    pub seed_deviation_percent: Option<f64>,
    /// Distance from the baseline within which runs of the baseline's configuration with as many other seeds
    /// would lie with 95% confidence (Student's t).
    pub seed_spread_percent: Option<f64>,
    /// True if the gap lies inside that spread.
    pub inside_spread: Option<bool>,
    /// True if the gap lies inside the recipe's bar, which limits only a higher loss; `None` if unclear.
    pub inside_bar: Option<bool>,
}

/// True if a gap lies inside the bar, false if outside, `None` if that is unclear. All arguments are in
/// percent.
///
/// For several seeds the interval of their gap decides, and also the baseline's spread unless the baseline
/// has all of these seeds. Where only one side has several seeds, the gap of other seeds holds the chance
/// of the side with one. Without its spread, as between two single runs, a gap is clear only far outside
/// the bar. If the baseline's seeds spread far over the bar, no gap within their spread is clear.
fn inside_bar(
    gap: f64,
    bar: f64,
    interval: Option<f64>,
    spread: Option<f64>,
    all_paired: bool,
) -> Option<bool> {
    let is_lost_in_spread = spread.is_some_and(|spread| spread > FAR * bar && gap.abs() <= spread);
    let is_clear = match (interval, spread) {
        _ if is_lost_in_spread => false,
        (Some(interval), Some(spread)) if !all_paired => (gap - bar).abs() >= interval.max(spread),
        (Some(interval), None) if !all_paired => gap > (FAR * bar).max(bar + interval),
        (Some(interval), _) => (gap - bar).abs() >= interval,
        (None, Some(spread)) if !all_paired => (gap - bar).abs() >= spread,
        (None, Some(spread)) => gap <= bar || gap > spread,
        (None, None) => gap > FAR * bar,
    };
    is_clear.then_some(gap <= bar)
}

/// Tolerance of docs/numerics.md for the loss of `recipe` relative to `baseline`, in percent.
pub(super) fn bar(recipe: Option<Recipe>, baseline: Option<Recipe>) -> Option<f64> {
    match (recipe?, baseline?) {
        (Recipe::Fp8Row | Recipe::Fp8Block, Recipe::Bf16 | Recipe::Fp32) => Some(0.25),
        (fp8, Recipe::Bf16 | Recipe::Fp32) if fp8.is_fp8() => Some(0.5),
        (Recipe::Bf16, Recipe::Fp32) => Some(0.3),
        _ => None,
    }
}

/// The losses of the groups by their position, each list in the order of the groups.
pub(super) struct Losses {
    pub(super) training: Vec<Vec<SeedCurve>>,
    validation: Vec<Vec<SeedCurve>>,
    /// Of the same evaluations, in bits per byte.
    bits: Vec<Vec<SeedCurve>>,
    /// Length of a baseline step on the x axis.
    pub(super) per_step: f64,
}

/// The losses of the runs of one seed.
pub(super) struct SeedCurve {
    seed: Option<u64>,
    points: Vec<Point>,
}

/// Some of the losses of the runs of one seed.
#[derive(Clone, Copy)]
pub(super) struct SeedPart<'p> {
    seed: Option<u64>,
    pub(super) points: &'p [Point],
}

impl Losses {
    pub(super) fn collect(views: &Views<'_>, groups: &[Group]) -> Self {
        let of_groups = |points: &dyn Fn(&View<'_>) -> Vec<Point>| -> Vec<Vec<SeedCurve>> {
            let of_seed = |Seed { seed, runs }: Seed| SeedCurve {
                seed,
                points: mean_curve(runs.iter().map(|&n| points(&views.views[n])).collect()),
            };
            groups.iter().map(|group| group.seeds().into_iter().map(of_seed).collect()).collect()
        };
        let of_evals = |view: &View<'_>, loss: &dyn Fn(&EvalMetrics) -> Option<f64>| -> Vec<Point> {
            let of = |m: &EvalMetrics| Some((m.step as f64 * view.x_per_step, loss(m)?));
            view.history.evals.iter().filter_map(of).collect()
        };
        Losses {
            training: of_groups(&|view| {
                view.history.steps.iter().map(|m| (m.step as f64 * view.x_per_step, m.loss)).collect()
            }),
            validation: of_groups(&|view| of_evals(view, &|m| Some(m.loss))),
            bits: of_groups(&|view| of_evals(view, &|m| m.bits_per_byte)),
            per_step: views.views.first().map_or(1.0, |view| view.x_per_step),
        }
    }
}

/// The mean of some curves at each position, over those that have a value there.
fn mean_curve(mut curves: Vec<Vec<Point>>) -> Vec<Point> {
    if curves.len() < 2 {
        return curves.pop().unwrap_or_default();
    }
    let mut all: Vec<Point> = curves.concat();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.chunk_by(|a, b| a.0 == b.0).map(|at| (at[0].0, mean(at))).collect()
}

/// The whole curves.
pub(super) fn whole(curves: &[SeedCurve]) -> Vec<SeedPart<'_>> {
    curves.iter().map(|curve| SeedPart { seed: curve.seed, points: &curve.points }).collect()
}

/// The parts of the curves within `range`.
pub(super) fn within<'p>(curves: &[SeedPart<'p>], range: &RangeInclusive<f64>) -> Vec<SeedPart<'p>> {
    let part = |&SeedPart { seed, points }: &SeedPart<'p>| {
        let first = points.partition_point(|p| p.0 < *range.start());
        let end = points.partition_point(|p| p.0 <= *range.end()).max(first);
        SeedPart { seed, points: &points[first..end] }
    };
    curves.iter().map(part).collect()
}

/// Means of two runs over the positions that both report, or over all positions if they share none.
fn means(run: &[Point], other: &[Point]) -> (f64, f64) {
    let mean = |points: &mut dyn Iterator<Item = f64>| {
        let (mut sum, mut count) = (0.0, 0usize);
        points.for_each(|loss| (sum, count) = (sum + loss, count + 1));
        sum / count as f64
    };
    let (mut at, mut shared) = (0, Vec::new());
    for &(x, loss) in run {
        while other.get(at).is_some_and(|p| p.0 < x) {
            at += 1;
        }
        if let Some(&(_, beside)) = other.get(at).filter(|p| p.0 == x) {
            shared.push((loss, beside));
        }
    }
    if shared.is_empty() {
        return (mean(&mut run.iter().map(|p| p.1)), mean(&mut other.iter().map(|p| p.1)));
    }
    (mean(&mut shared.iter().map(|p| p.0)), mean(&mut shared.iter().map(|p| p.1)))
}

/// The mean of a run; NaN without points.
fn mean(points: &[Point]) -> f64 {
    points.iter().map(|p| p.1).sum::<f64>() / points.len() as f64
}

/// A gap at one position, as ratios, not percent.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) loss: f64,
    /// Mean loss of the runs that these are compared with.
    beside: f64,
    pub(super) baseline: SeedSample,
    pub(super) gap: SeedSample,
    pub(super) paired: usize,
    /// Distance from the baseline within which as many other runs of its group lie.
    pub(super) spread: Option<f64>,
}

/// The gap of these runs' points to those of the baseline; `None` if any of them has no point, or a loss that
/// is not a positive number.
pub(super) fn measured(runs: &[SeedPart<'_>], baseline: &[SeedPart<'_>]) -> Option<Measured> {
    let of_base =
        SeedSample::from_values(&baseline.iter().map(|base| mean(base.points)).collect::<Vec<_>>())?;
    let mut paired = 0;
    let (mut losses, mut besides) = (Vec::new(), Vec::new());
    for run in runs {
        let partner = baseline.iter().find(|base| run.seed.is_some() && base.seed == run.seed);
        let (loss, beside) = match partner {
            Some(base) => means(run.points, base.points),
            None => (mean(run.points), of_base.mean),
        };
        paired += usize::from(partner.is_some());
        losses.push(loss);
        besides.push(beside);
    }
    let gaps: Vec<f64> = losses.iter().zip(&besides).map(|(loss, beside)| loss / beside - 1.0).collect();
    let (loss, beside) = (SeedSample::from_values(&losses)?.mean, SeedSample::from_values(&besides)?.mean);
    let spread = of_base.of_others(runs.len()).map(|spread| spread / of_base.mean);
    (of_base.mean > 0.0).then_some(())?;
    Some(Measured { loss, beside, baseline: of_base, gap: SeedSample::from_values(&gaps)?, paired, spread })
}

impl LossGap {
    fn new(measured: &Measured, range: (u64, u64), bar_percent: Option<f64>, unit: &'static str) -> Self {
        let Measured { loss, beside, baseline, gap, paired, spread } = measured;
        let gap_percent = 100.0 * gap.mean;
        let spread = spread.map(|spread| 100.0 * spread);
        LossGap {
            from: range.0,
            to: range.1,
            unit,
            seeds: gap.count,
            loss: *loss,
            baseline_loss: *beside,
            gap_percent,
            paired: *paired,
            gap_interval_percent: gap.of_mean().map(|interval| 100.0 * interval),
            seed_deviation_percent: baseline.deviation.map(|deviation| 100.0 * deviation / baseline.mean),
            seed_spread_percent: spread,
            inside_spread: spread.map(|spread| gap_percent.abs() <= spread),
            inside_bar: bar_percent.and_then(|bar| {
                let interval = gap.of_mean().map(|interval| 100.0 * interval);
                inside_bar(gap_percent, bar, interval, spread, *paired == gap.count)
            }),
        }
    }

    /// True if the baseline has all seeds of these runs.
    pub(super) fn is_paired(&self) -> bool {
        self.paired == self.seeds
    }
}

/// Position at which the shortest of some curves ends.
pub(super) fn common_end(curves: &[SeedPart<'_>]) -> f64 {
    curves.iter().map(|curve| curve.points.last().map_or(0.0, |p| p.0)).fold(f64::INFINITY, f64::min)
}

/// The last steps that a group and the baseline have both made, over which losses are averaged.
pub(super) struct Ends<'p> {
    /// For each seed of the group.
    pub(super) own: Vec<SeedPart<'p>>,
    /// For each seed of the baseline.
    pub(super) base: Vec<SeedPart<'p>>,
    pub(super) end: f64,
}

impl<'p> Ends<'p> {
    /// The ends of the n-th group.
    pub(super) fn find(losses: &'p Losses, n: usize, last: u64) -> Self {
        let (own, base) = (whole(&losses.training[n]), whole(&losses.training[0]));
        let end = common_end(&own).min(common_end(&base));
        // Between two steps, because positions in tokens are rounded.
        let range = end - (last as f64 - 0.5) * losses.per_step..=end + 0.25 * losses.per_step;
        Ends { own: within(&own, &range), base: within(&base, &range), end }
    }

    pub(super) fn figure(&self, bar: Option<f64>) -> Option<LossGap> {
        let found = measured(&self.own, &self.base)?;
        let firsts = self.own.iter().chain(&self.base).filter_map(|part| part.points.first());
        let first = firsts.map(|p| p.0).fold(self.end, f64::min);
        let range = (first.round() as u64, self.end.round() as u64);
        Some(LossGap::new(&found, range, bar, NATS))
    }
}

/// Units of a loss.
const NATS: &str = "nats/token";
const BITS: &str = "bits/byte";

/// The last evaluation after the first step that all seeds of the n-th group and of the baseline have made.
pub(super) fn at_evaluation(
    losses: &Losses,
    n: usize,
    bar: Option<f64>,
    same: Comparable,
) -> Option<LossGap> {
    let (of, unit) = match same {
        Comparable { text: false, .. } => return None,
        Comparable { tokenizer: true, .. } => (&losses.validation, NATS),
        Comparable { tokenizer: false, .. } => (&losses.bits, BITS),
    };
    let (own, base) = (whole(&of[n]), whole(&of[0]));
    let has = |part: &SeedPart<'_>, x: f64| part.points.iter().any(|p| p.0 == x);
    let is_shared = |x: &f64| *x > 0.0 && own.iter().chain(&base).all(|part| has(part, *x));
    let at = own.first()?.points.iter().rev().map(|p| p.0).find(is_shared)?;
    let found = measured(&within(&own, &(at..=at)), &within(&base, &(at..=at)))?;
    let at = at.round() as u64;
    Some(LossGap::new(&found, (at, at), bar, unit))
}

/// Common properties of the runs of a group and of the baseline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comparable {
    pub(super) tokenizer: bool,
    /// The text that they are validated on.
    pub(super) text: bool,
}

impl Comparable {
    pub(super) fn compare(runs: &[RunData], group: &Group, baseline: &Group) -> Self {
        let first = &runs[baseline.runs[0]];
        let all = |same: fn(&RunData, &RunData) -> bool| {
            group.runs.iter().chain(&baseline.runs).all(|&n| same(first, &runs[n]))
        };
        Comparable { tokenizer: all(same_tokenizer), text: all(same_text) }
    }
}
