//! Notes for readers of a comparison: what the figures leave out, why a gap is unclear, and how runs differ.

use super::figures::{Comparable, Ends, Gap, LossGap};
use super::groups::{Group, Seed};
use crate::curves::{View, Views};
use crate::metrics::{StepMetrics, format};
use crate::scores::verdict::FAR;
use xtrain_checkpoint::first_few;

/// Runs up to this number are named by a note that is about several.
const NAMED: usize = 5;

/// Notes for readers of the figures. Notes of several runs that say the same are one.
#[derive(Default)]
pub(super) struct Notes {
    /// The runs, if a note is about some, and what it says.
    all: Vec<(Vec<String>, String)>,
}

impl Notes {
    /// Adds a note about all runs.
    fn add(&mut self, text: String) {
        if !self.all.iter().any(|(names, known)| names.is_empty() && *known == text) {
            self.all.push((Vec::new(), text));
        }
    }

    /// Adds a note about these runs.
    pub(super) fn add_of(&mut self, names: &[String], text: String) {
        match self.all.iter_mut().find(|(known, said)| !known.is_empty() && *said == text) {
            Some((known, _)) => {
                let new: Vec<&String> = names.iter().filter(|name| !known.contains(name)).collect();
                let new: Vec<String> = new.into_iter().cloned().collect();
                known.extend(new);
            }
            None => self.all.push((names.to_vec(), text)),
        }
    }

    /// The notes as sentences.
    pub(super) fn said(self) -> Vec<String> {
        let sentence = |(names, text): (Vec<String>, String)| match names.is_empty() {
            true => text,
            false => format!("{}: {text}", listed(&names, ", ")),
        };
        self.all.into_iter().map(sentence).collect()
    }

    /// Notes the runs of a group that have the same seed.
    pub(super) fn of_seeds(&mut self, views: &Views<'_>, group: &Group) {
        for Seed { seed, runs } in group.seeds().iter().filter(|seed| seed.runs.len() > 1) {
            let names = listed(&names_of(views, runs), " and ");
            self.add(match seed {
                Some(seed) => format!("{names} have the same seed ({seed}) and count as one run"),
                None => format!("{names} have no readable configuration, so their seeds are not known and they count as one run"),
            });
        }
    }

    /// Notes on one run: unreadable parts, skipped steps, an early end.
    pub(super) fn of_run(&mut self, view: &View<'_>) {
        let (name, history) = (std::slice::from_ref(&view.run.name), &view.history);
        for problem in &view.run.problems {
            self.add_of(name, problem.clone());
        }
        let last = history.last_step();
        if history.steps.is_empty() {
            self.add_of(name, "no step has been reported yet".into());
        } else if let Some(total) = view.run.summary.total_steps.filter(|&total| total > last) {
            let (last, total) = (format::grouped(last), format::grouped(total));
            self.add_of(name, format!("at step {last} of {total}"));
        }
        for resumed in &history.resumed {
            if let Some([before, now]) = resumed.switched {
                let step = format::grouped(resumed.step);
                let (before, now) = (before.name(), now.name());
                let text =
                    format!("went from {before} to {now} after step {step}, so the gap is that of both");
                self.add_of(name, text);
            }
        }
        match history.skipped.len() {
            0 => {}
            1 => self.add_of(name, "skipped one step that was not finite".into()),
            n => self.add_of(name, format!("skipped {n} steps that were not finite")),
        }
    }

    /// Notes on the averaged steps: no losses, losses that are not finite, different learning rates.
    pub(super) fn of_ends(&mut self, views: &Views<'_>, group: &Group, baseline: &Group, ends: &Ends<'_>) {
        let runs = || group.runs.iter().chain(&baseline.runs).map(|&n| &views.views[n]);
        let seeds = group.seeds().into_iter().chain(baseline.seeds());
        for (seed, part) in seeds.zip(ends.own.iter().chain(&ends.base)) {
            let names = names_of(views, &seed.runs);
            let counted_in = views.x_name.trim_end_matches('s');
            let broken = part.points.iter().filter(|p| !p.1.is_finite()).count();
            match (part.points.len(), broken) {
                (0, _) => self.add_of(&names, format!("no loss in the compared {counted_in}s")),
                (_, 0) => {}
                (all, broken) => self.add_of(
                    &names,
                    format!(
                        "{broken} of the {all} losses to be averaged are not finite, so the gap is unknown"
                    ),
                ),
            }
        }
        // Where the run file sets other rates, a note says so.
        let sets_rates = |key: &String| key.starts_with("optimizer.lr") || key.starts_with("schedule.");
        let config = group.configs[0].as_ref();
        if config.is_some_and(|config| baseline.differs_in(config).iter().any(sets_rates)) {
            return;
        }
        let rate = |view: &&View<'_>| {
            let before = |m: &&StepMetrics| m.step as f64 * view.x_per_step <= ends.end * (1.0 + 1e-9);
            view.history.steps.iter().rev().find(before).map(|m| m.lr)
        };
        let rates: Vec<f64> = runs().filter_map(|view| rate(&view)).collect();
        let (least, most) =
            rates.iter().fold((f64::INFINITY, 0.0), |(l, m): (f64, f64), &r| (l.min(r), m.max(r)));
        if most > least * 1.01 {
            let names = names_of(views, &group.runs);
            let text = format!(
                "at the compared {}s, learning rates range from {least:.2e} to {most:.2e}, so the gap is partly due to the schedules",
                views.x_name.trim_end_matches('s')
            );
            self.add_of(&names, text);
        }
    }

    /// Notes the figures that are left out because they are not comparable.
    pub(super) fn of_what_differs(&mut self, names: &[String], same: Comparable) {
        let text = match same {
            Comparable { tokenizer: true, text: true } => return,
            Comparable { tokenizer: false, text: true } => {
                "the tokenizer differs from the baseline's, so losses in nats per token are not comparable: there is no gap of the training \
                 loss, and validation losses are compared in bits per byte"
            }
            Comparable { tokenizer: true, text: false } => {
                "the validation text differs from the baseline's, so there is no gap of the validation loss; give both the same data.valid, or \
                 evaluate both on one file with xtrain eval RUN --data FILE"
            }
            Comparable { tokenizer: false, text: false } => {
                "tokenizer and validation text differ from the baseline's, so no losses are comparable; compare bits per byte on one file with \
                 xtrain eval RUN --data FILE"
            }
        };
        self.add_of(names, text.into());
    }

    /// Notes why a gap is neither inside nor outside the bar.
    pub(super) fn of_verdict(&mut self, gap: &Gap) {
        let Some(bar) = gap.bar_percent else { return };
        let unclear = |figure: &&LossGap| figure.inside_bar.is_none();
        let Some(figure) = gap.training.iter().chain(&gap.validation).find(unclear) else { return };
        let remedy = "train both with more seeds (--set train.seed=1, ...), or longer, and name all runs; reference segments \
                      (precision.reference_every, docs/fp8.md) need one run only";
        let reason = match (figure.seed_spread_percent, figure.gap_interval_percent) {
            (Some(spread), _) if spread > FAR * bar => {
                format!("seeds of the baseline spread by ±{spread:.2}%, far over the bar of {bar}%")
            }
            (None, Some(_)) if !figure.is_paired() => format!(
                "the baseline has a single seed, which does not show the effect of chance; only a gap over {:.2}%, three times the bar, would \
                 be clear",
                FAR * bar
            ),
            (_, Some(interval)) => format!("the gap is only known to ±{interval:.2}%, and the bar is {bar}%"),
            (Some(spread), None) => format!(
                "another seed could lie on the other side of the bar of {bar}%: seeds of the baseline spread by ±{spread:.2}%"
            ),
            (None, None) => format!(
                "a single seed does not show the effect of chance; only a gap over {:.2}%, three times the bar, would be clear",
                FAR * bar
            ),
        };
        self.add_of(&gap.runs, format!("unclear, because {reason}; {remedy}"));
    }

    /// Notes the settings in which a group of runs differs from the baseline.
    pub(super) fn of_kind(&mut self, names: &[String], group: &Group, baseline: &Group) {
        let Some(config) = &group.configs[0] else {
            let text = "the configuration cannot be read, so seed and recipe are not known";
            return self.add_of(names, text.into());
        };
        let keys = baseline.differs_in(config);
        if keys.iter().any(|key| !key.starts_with("precision.")) {
            self.add_of(names, format!("differs from the baseline in {}", keys.join(", ")));
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
    }
}

/// The names of these runs.
fn names_of(views: &Views<'_>, runs: &[usize]) -> Vec<String> {
    runs.iter().map(|&n| views.views[n].run.name.clone()).collect()
}

/// The names, with `last` before the last one, or the first few and the number of the others.
fn listed(names: &[String], last: &str) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [all @ .., end] if all.len() <= NAMED => format!("{}{last}{end}", all.join(", ")),
        _ => first_few(names, NAMED),
    }
}
