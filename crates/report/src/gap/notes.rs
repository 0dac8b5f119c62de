//! Notes for readers of a comparison: what the figures leave out, why a gap is unclear, and how runs differ.

use super::figures::{Comparable, Ends, FAR, Gap, LossGap};
use super::groups::Group;
use crate::curves::{View, Views};
use crate::metrics::{StepMetrics, format};

/// Notes for readers of the figures, each listed once.
#[derive(Default)]
pub(super) struct Notes {
    pub(super) all: Vec<String>,
}

impl Notes {
    pub(super) fn add(&mut self, note: String) {
        if !self.all.contains(&note) {
            self.all.push(note);
        }
    }

    /// Notes on one run: unreadable parts, skipped steps, an early end.
    pub(super) fn of_run(&mut self, view: &View<'_>) {
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

    /// Notes on the averaged steps: no losses, losses that are not finite, different learning rates.
    pub(super) fn of_ends(&mut self, views: &Views<'_>, group: &Group, baseline: &Group, ends: &Ends<'_>) {
        let runs = || group.runs.iter().chain(&baseline.runs).map(|&n| &views.views[n]);
        for (view, points) in runs().zip(ends.own.iter().chain(&ends.base)) {
            let (name, counted_in) = (&view.run.name, views.x_name.trim_end_matches('s'));
            let broken = points.iter().filter(|p| !p.1.is_finite()).count();
            match (points.len(), broken) {
                (0, _) => self.add(format!("{name} has no loss in the compared {counted_in}s")),
                (_, 0) => {}
                (all, broken) => self.add(format!(
                    "{name}: {broken} of the {all} losses to be averaged are not finite, so the gap is unknown"
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
                "where {} is compared, learning rates range from {least:.2e} to {most:.2e}: the gap is partly due to the schedules",
                views.views[group.runs[0]].run.name
            ));
        }
    }

    /// Notes the figures that are left out because they are not comparable.
    pub(super) fn of_what_differs(&mut self, names: &[String], same: Comparable) {
        let names = names.join(", ");
        match same {
            Comparable { tokenizer: true, text: true } => {}
            Comparable { tokenizer: false, text: true } => self.add(format!(
                "{names}: the tokenizer differs from the baseline's, so losses in nats per token are not comparable: there is no gap of the \
                 training loss, and validation losses are compared in bits per byte"
            )),
            Comparable { tokenizer: true, text: false } => self.add(format!(
                "{names}: the validation text differs from the baseline's, so there is no gap of the validation loss; give both the same \
                 data.valid, or evaluate both on one file with xtrain eval RUN --data FILE"
            )),
            Comparable { tokenizer: false, text: false } => self.add(format!(
                "{names}: tokenizer and validation text differ from the baseline's, so no losses are comparable; compare bits per byte on one \
                 file with xtrain eval RUN --data FILE"
            )),
        }
    }

    /// Notes why a gap is neither inside nor outside the bar.
    pub(super) fn of_verdict(&mut self, gap: &Gap) {
        let Some(bar) = gap.bar_percent else { return };
        let unclear = |figure: &&LossGap| figure.inside_bar.is_none();
        let Some(figure) = gap.training.iter().chain(&gap.validation).find(unclear) else { return };
        let names = gap.runs.join(", ");
        let remedy = "train both with more seeds (--set train.seed=1, ...), or longer, and name all runs";
        self.add(match (figure.seed_spread_percent, figure.gap_interval_percent) {
            (Some(spread), _) if spread > FAR * bar => format!(
                "{names}: unclear, because seeds of the baseline spread by ±{spread:.2}%, far over the bar of {bar}%; {remedy}"
            ),
            (_, Some(interval)) => format!(
                "{names}: unclear, because the gap is only known to ±{interval:.2}%, and the bar is {bar}%; {remedy}"
            ),
            (Some(_), None) => {
                format!("{names}: unclear, because the gap is over the bar of {bar}% but within the spread of seeds; {remedy}")
            }
            (None, None) => format!(
                "{names}: unclear, because a single seed does not show the effect of chance; only a gap over {:.2}%, three times the bar, would \
                 be clear; {remedy}",
                FAR * bar
            ),
        });
    }

    /// Notes the settings in which a group of runs differs from the baseline.
    pub(super) fn of_kind(&mut self, names: &[String], group: &Group, baseline: &Group) {
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

    pub(super) fn of_baseline(&mut self, baseline: &Group) {
        let Some(first) = baseline.configs.iter().flatten().next() else {
            return self.add(
                "the baseline's configuration cannot be read, so seeds and recipe are not known".into(),
            );
        };
        let keys = baseline.differs_in(first);
        if !keys.is_empty() {
            self.add(format!(
                "the baseline's runs differ in {}, so their spread is not only due to seeds",
                keys.join(", ")
            ));
        }
        let mut seeds: Vec<_> = (0..baseline.runs.len()).filter_map(|n| baseline.seed(n)).collect();
        seeds.sort_unstable();
        if seeds.windows(2).any(|pair| pair[0] == pair[1]) {
            self.add(
                "runs of the baseline have the same seed, so their spread is smaller than that between seeds"
                    .into(),
            );
        }
    }
}
