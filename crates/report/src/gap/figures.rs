//! Gaps of the training loss over the last common steps, and gaps of the validation loss.

use super::groups::Group;
use super::spread::Sample;
use super::{Baseline, Comparison};
use crate::RunData;
use crate::curves::{View, Views};
use crate::metrics::{StepMetrics, format};
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
}

/// A loss compared with that of the baseline.
#[derive(Clone, Debug, Serialize)]
pub struct LossGap {
    /// First position, in steps or tokens, whose loss is included.
    pub from: u64,
    /// Last position whose loss is included.
    pub to: u64,
    /// Mean cross-entropy over these steps and over the runs, in nats per token.
    pub loss: f64,
    /// Mean cross-entropy of the runs that these are compared with: the baseline's runs of the same seeds, or
    /// all of the baseline's runs.
    pub baseline_loss: f64,
    /// Loss above that of the baseline, in percent: the mean over the runs, each compared with the baseline's
    /// run of its seed if there is one.
    pub gap_percent: f64,
    /// Number of runs that were compared with a run of their seed.
    pub paired: usize,
    /// Half width of the 95% confidence interval of the gap over seeds, for two or more runs.
    pub gap_interval_percent: Option<f64>,
    /// Standard deviation of the baseline over its seeds, in percent of its loss, for two or more runs.
    pub seed_deviation_percent: Option<f64>,
    /// Distance from the baseline within which as many runs of the baseline's configuration, with other
    /// seeds, would lie with 95% confidence (Student's t).
    pub seed_spread_percent: Option<f64>,
    /// True if the gap lies inside that spread.
    pub inside_spread: Option<bool>,
    /// True if the gap lies inside the tolerance of the recipe, as a lower loss always does. `None` if the
    /// confidence interval reaches both sides of the tolerance.
    pub inside_bar: Option<bool>,
}

/// Tolerance of docs/numerics.md for the loss of `recipe` relative to `baseline`, in percent.
fn bar(recipe: Option<Recipe>, baseline: Option<Recipe>) -> Option<f64> {
    match (recipe?, baseline?) {
        (Recipe::Fp8Row | Recipe::Fp8Block, Recipe::Bf16 | Recipe::Fp32) => Some(0.25),
        (fp8, Recipe::Bf16 | Recipe::Fp32) if fp8.is_fp8() => Some(0.5),
        (Recipe::Bf16, Recipe::Fp32) => Some(0.3),
        _ => None,
    }
}

/// The losses of all runs by their position.
pub(super) struct Losses {
    pub(super) training: Vec<Vec<Point>>,
    validation: Vec<Vec<Point>>,
    /// Length of a baseline step on the x axis.
    pub(super) per_step: f64,
}

impl Losses {
    pub(super) fn of(views: &Views<'_>) -> Self {
        let training = |view: &View<'_>| {
            view.history.steps.iter().map(|m| (m.step as f64 * view.x_per_step, m.loss)).collect()
        };
        let validation = |view: &View<'_>| {
            view.history.evals.iter().map(|m| (m.step as f64 * view.x_per_step, m.loss)).collect()
        };
        Losses {
            training: views.views.iter().map(training).collect(),
            validation: views.views.iter().map(validation).collect(),
            per_step: views.views.first().map_or(1.0, |view| view.x_per_step),
        }
    }
}

/// The curves of a group's runs.
pub(super) fn curves<'p>(all: &'p [Vec<Point>], group: &Group) -> Vec<&'p [Point]> {
    group.runs.iter().map(|&n| &all[n][..]).collect()
}

/// The points of each curve within `range`.
pub(super) fn within<'p>(curves: &[&'p [Point]], range: &RangeInclusive<f64>) -> Vec<&'p [Point]> {
    let part = |points: &&'p [Point]| {
        let first = points.partition_point(|p| p.0 < *range.start());
        &points[first..points.partition_point(|p| p.0 <= *range.end()).max(first)]
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
    pub(super) baseline: Sample,
    pub(super) gap: Sample,
    pub(super) paired: usize,
    /// Distance from the baseline within which as many other runs of its group lie.
    pub(super) spread: Option<f64>,
}

/// The gap of these runs' points to those of the baseline; `None` if any of them has no point, or a loss that
/// is not a positive number.
pub(super) fn measured(
    group: &Group,
    runs: &[&[Point]],
    baseline: &Group,
    base: &[&[Point]],
) -> Option<Measured> {
    let of_base = Sample::of(&base.iter().map(|points| mean(points)).collect::<Vec<_>>())?;
    let mut paired = 0;
    let (mut losses, mut besides) = (Vec::new(), Vec::new());
    for (n, points) in runs.iter().enumerate() {
        let seed = group.seed(n);
        let partner = (0..base.len()).find(|&at| seed.is_some() && baseline.seed(at) == seed);
        let (loss, beside) = match partner {
            Some(at) => means(points, base[at]),
            None => (mean(points), of_base.mean),
        };
        paired += usize::from(partner.is_some());
        losses.push(loss);
        besides.push(beside);
    }
    let gaps: Vec<f64> = losses.iter().zip(&besides).map(|(loss, beside)| loss / beside - 1.0).collect();
    let (loss, beside) = (Sample::of(&losses)?.mean, Sample::of(&besides)?.mean);
    let spread = of_base.of_others(runs.len()).map(|spread| spread / of_base.mean);
    (of_base.mean > 0.0).then_some(())?;
    Some(Measured { loss, beside, baseline: of_base, gap: Sample::of(&gaps)?, paired, spread })
}

impl LossGap {
    fn of(measured: &Measured, range: (u64, u64), bar_percent: Option<f64>) -> Self {
        let Measured { loss, beside, baseline, gap, paired, spread } = measured;
        let gap_percent = 100.0 * gap.mean;
        let spread = spread.map(|spread| 100.0 * spread);
        LossGap {
            from: range.0,
            to: range.1,
            loss: *loss,
            baseline_loss: *beside,
            gap_percent,
            paired: *paired,
            gap_interval_percent: gap.of_mean().map(|interval| 100.0 * interval),
            seed_deviation_percent: baseline.deviation.map(|deviation| 100.0 * deviation / baseline.mean),
            seed_spread_percent: spread,
            inside_spread: spread.map(|spread| gap_percent.abs() <= spread),
            inside_bar: bar_percent.and_then(|bar| {
                let interval = gap.of_mean().map_or(0.0, |interval| 100.0 * interval);
                let is_clear = (gap_percent - bar).abs() >= interval;
                is_clear.then_some(gap_percent <= bar)
            }),
        }
    }
}

/// Position at which the shortest of some curves ends.
pub(super) fn common_end<'p>(curves: impl IntoIterator<Item = &'p [Point]>) -> f64 {
    curves.into_iter().map(|points| points.last().map_or(0.0, |p| p.0)).fold(f64::INFINITY, f64::min)
}

/// The last steps that a group and the baseline have both made, over which losses are averaged.
struct Ends<'p> {
    own: Vec<&'p [Point]>,
    base: Vec<&'p [Point]>,
    end: f64,
}

impl<'p> Ends<'p> {
    fn of(losses: &'p Losses, group: &Group, baseline: &Group, last: u64) -> Self {
        let (own, base) = (curves(&losses.training, group), curves(&losses.training, baseline));
        let end = common_end(own.iter().chain(&base).copied());
        // Between two steps, because positions in tokens are rounded.
        let range = end - (last as f64 - 0.5) * losses.per_step..=end + 0.25 * losses.per_step;
        Ends { own: within(&own, &range), base: within(&base, &range), end }
    }

    fn figure(&self, group: &Group, baseline: &Group, bar: Option<f64>) -> Option<LossGap> {
        let found = measured(group, &self.own, baseline, &self.base)?;
        let firsts = self.own.iter().chain(&self.base).filter_map(|points| points.first());
        let first = firsts.map(|p| p.0).fold(self.end, f64::min);
        Some(LossGap::of(&found, (first.round() as u64, self.end.round() as u64), bar))
    }
}

/// The last evaluation that all runs of a group and of the baseline have made.
fn at_evaluation(losses: &Losses, group: &Group, baseline: &Group, bar: Option<f64>) -> Option<LossGap> {
    let (own, base) = (curves(&losses.validation, group), curves(&losses.validation, baseline));
    let has = |points: &&[Point], x: f64| points.iter().any(|p| p.0 == x);
    let is_shared = |x: &f64| own.iter().chain(&base).all(|points| has(points, *x));
    let at = own.first()?.iter().rev().map(|p| p.0).find(is_shared)?;
    let found = measured(group, &within(&own, &(at..=at)), baseline, &within(&base, &(at..=at)))?;
    Some(LossGap::of(&found, (at.round() as u64, at.round() as u64), bar))
}

/// Compares all other groups with the first.
pub(super) fn compare(runs: Vec<RunData>, groups: Vec<Group>, last: u64) -> Comparison {
    let views = Views::new(&runs);
    let losses = Losses::of(&views);
    let names = |group: &Group| -> Vec<String> { group.runs.iter().map(|&n| runs[n].name.clone()).collect() };
    let recipe = |group: &Group| group.recipe().map(|recipe| recipe.name().to_owned());
    let base = &groups[0];
    let mut notes = Notes::default();
    views.views.iter().for_each(|view| notes.of_run(view));
    notes.of_baseline(base);
    let mut compared = Vec::new();
    for group in &groups[1..] {
        let bar_percent = bar(group.recipe(), base.recipe());
        let ends = Ends::of(&losses, group, base, last);
        notes.of_kind(&names(group), group, base);
        notes.of_ends(&views, group, base, &ends);
        compared.push(Gap {
            runs: names(group),
            recipe: recipe(group),
            bar_percent,
            training: ends.figure(group, base, bar_percent),
            validation: at_evaluation(&losses, group, base, bar_percent),
        });
    }
    let baseline = Baseline {
        runs: names(base),
        recipe: recipe(base),
        training: Ends::of(&losses, base, base, last).figure(base, base, None),
        validation: at_evaluation(&losses, base, base, None),
    };
    let counted_in = views.x_name;
    Comparison { counted_in, last, baseline, compared, notes: notes.all, folders: Vec::new(), runs, groups }
}

/// Notes for readers of the figures, each listed once.
#[derive(Default)]
struct Notes {
    all: Vec<String>,
}

impl Notes {
    fn add(&mut self, note: String) {
        if !self.all.contains(&note) {
            self.all.push(note);
        }
    }

    /// Notes on one run: unreadable parts, skipped steps, an early end.
    fn of_run(&mut self, view: &View<'_>) {
        let (name, history) = (&view.run.name, &view.history);
        for problem in &view.run.problems {
            self.add(format!("{name}: {problem}"));
        }
        let last = history.last_step();
        if history.steps.is_empty() {
            self.add(format!("{name} has reported no step yet"));
        } else if let Some(total) = view.run.summary.total_steps.filter(|&total| total > last) {
            let (last, total) = (format::grouped(last), format::grouped(total));
            self.add(format!("{name} is at step {last} of {total}"));
        }
        for resumed in &history.resumed {
            if let Some([before, now]) = resumed.switched {
                let step = format::grouped(resumed.step);
                self.add(format!(
                    "{name} went from {} to {} after step {step}: its gap is that of both",
                    before.name(),
                    now.name()
                ));
            }
        }
        match history.skipped.len() {
            0 => {}
            1 => self.add(format!("{name} skipped a step that was not finite")),
            n => self.add(format!("{name} skipped {n} steps that were not finite")),
        }
    }

    /// Notes on the averaged steps: losses that are not finite, no losses, different learning rates.
    fn of_ends(&mut self, views: &Views<'_>, group: &Group, baseline: &Group, ends: &Ends<'_>) {
        let runs = || group.runs.iter().chain(&baseline.runs).map(|&n| &views.views[n]);
        for (view, points) in runs().zip(ends.own.iter().chain(&ends.base)) {
            let (name, counted_in) = (&view.run.name, views.x_name.trim_end_matches('s'));
            let broken = points.iter().filter(|p| !p.1.is_finite()).count();
            match (points.len(), broken) {
                (0, _) => self.add(format!("{name} reports no loss of the {counted_in}s that are compared")),
                (_, 0) => {}
                (all, broken) => self.add(format!(
                    "{name}: {broken} of the {all} losses to be averaged are not finite, so there is no gap to tell"
                )),
            }
        }
        let rate = |view: &&View<'_>| {
            let before = |m: &&StepMetrics| m.step as f64 * view.x_per_step <= ends.end * (1.0 + 1e-9);
            view.history.steps.iter().rev().find(before).map(|m| m.lr)
        };
        let rates: Vec<f64> = runs().filter_map(|view| rate(&view)).collect();
        let (least, most) =
            rates.iter().fold((f64::INFINITY, 0.0), |(l, m): (f64, f64), &r| (l.min(r), m.max(r)));
        if most > least * 1.01 {
            self.add(format!(
                "learning rates go from {least:.2e} to {most:.2e} where {} is compared: part of the gap may be due to them",
                views.views[group.runs[0]].run.name
            ));
        }
    }

    /// Notes on a group of runs: its differences to the baseline.
    fn of_kind(&mut self, names: &[String], group: &Group, baseline: &Group) {
        let names = names.join(", ");
        let Some(config) = &group.configs[0] else {
            return self
                .add(format!("{names}: the configuration cannot be read, so seed and recipe are not known"));
        };
        let keys = baseline.differs_in(config);
        if keys.iter().any(|key| !key.starts_with("precision.")) {
            self.add(format!("{names}: differs from the baseline in {}", keys.join(", ")));
        }
    }

    fn of_baseline(&mut self, baseline: &Group) {
        let Some(first) = baseline.configs.iter().flatten().next() else {
            return self.add(
                "the baseline's configuration cannot be read, so seeds and recipe are not known".into(),
            );
        };
        let keys = baseline.differs_in(first);
        if !keys.is_empty() {
            self.add(format!(
                "the baseline's runs differ in {}: their spread is not one of seeds alone",
                keys.join(", ")
            ));
        }
        let mut seeds: Vec<_> = (0..baseline.runs.len()).filter_map(|n| baseline.seed(n)).collect();
        seeds.sort_unstable();
        if seeds.windows(2).any(|pair| pair[0] == pair[1]) {
            self.add(
                "runs of the baseline have the same seed: their spread is smaller than that of seeds".into(),
            );
        }
    }
}
