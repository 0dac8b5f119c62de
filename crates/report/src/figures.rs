//! The key figures of a run.

use super::curves::{View, mean_of_last, smoothed};
use super::thin::Point;
use crate::metrics::{StepMetrics, format};

/// A number in large print, with notes.
pub(super) struct Figure {
    pub(super) label: &'static str,
    pub(super) value: String,
    /// Notes in small print under the number.
    pub(super) notes: Vec<String>,
}

/// The figures of the run, most important first.
pub(super) fn figures(view: &View<'_>) -> Vec<Figure> {
    let all = [
        validation(view),
        perplexity(view),
        training_loss(view),
        tokens(view),
        time(view),
        throughput(view),
        model(view),
        steps(view),
    ];
    all.into_iter().flatten().collect()
}

fn validation(view: &View<'_>) -> Option<Figure> {
    let last = view.history.evals.last()?;
    let mut notes = Vec::new();
    if let Some(best) = view.history.best_eval() {
        if best.step != last.step {
            notes.push(format!("lowest: {:.4} at step {}", best.loss, format::grouped(best.step)));
        } else if view.history.evals.len() > 1 {
            notes.push("the lowest of the run".to_owned());
        }
        if let Some(first) = view.history.evals.first().filter(|first| first.step == 0 && last.step > 0) {
            notes.push(format!("{:.4} before training", first.loss));
        }
        if let Some(entropy) = view.run.summary.unigram_entropy {
            let (distance, is) = match entropy - last.loss {
                below if below < 0.0 => (-below, "above"),
                below => (below, "below"),
            };
            notes.push(format!("{distance:.2} nats {is} the unigram entropy"));
        }
    }
    Some(Figure { label: "Validation loss", value: format!("{:.4}", last.loss), notes })
}

fn perplexity(view: &View<'_>) -> Option<Figure> {
    let last = view.history.evals.last()?;
    let notes = last.bits_per_byte.map(|bits| format!("{bits:.3} bits per byte")).into_iter().collect();
    Some(Figure { label: "Perplexity", value: format::significant(last.perplexity()), notes })
}

/// The training loss at the end, and the number of reports of which it is the mean: those over which the
/// curve is smoothed, or 1.
pub(super) fn final_training_loss(steps: &[StepMetrics]) -> Option<(f64, usize)> {
    let losses: Vec<Point> = steps.iter().map(|m| (m.step as f64, m.loss)).collect();
    match smoothed(&losses) {
        Some((_, reports)) => mean_of_last(&losses, reports).map(|loss| (loss, reports)),
        None => losses.iter().rev().map(|point| point.1).find(|loss| loss.is_finite()).map(|loss| (loss, 1)),
    }
}

fn training_loss(view: &View<'_>) -> Option<Figure> {
    let (loss, reports) = final_training_loss(&view.history.steps)?;
    let notes = match (reports, view.history.steps.last()) {
        (1, _) | (_, None) => vec!["last report".to_owned()],
        (_, Some(last)) => {
            let reports = format::grouped(view.history.reports_in(reports, view.history.steps.len()));
            vec![format!("mean of the last {reports} reports"), format!("{:.4} in the last one", last.loss)]
        }
    };
    Some(Figure { label: "Training loss", value: format!("{loss:.4}"), notes })
}

fn tokens(view: &View<'_>) -> Option<Figure> {
    let last = view.history.steps.last()?;
    let epochs = (last.epoch > 0.0).then(|| format!("{} epochs", format::significant(last.epoch)));
    let notes = epochs.into_iter().collect();
    Some(Figure { label: "Tokens", value: format::count(last.tokens as f64), notes })
}

/// Seconds of training: from the summary if it has them, else from the steps' own times.
pub(super) fn train_seconds(view: &View<'_>) -> Option<f64> {
    let seconds = view.run.summary.train_seconds.unwrap_or_else(|| view.history.step_seconds());
    (seconds > 0.0).then_some(seconds)
}

fn time(view: &View<'_>) -> Option<Figure> {
    let seconds = train_seconds(view)?;
    let step_ms = median(view, |m| m.step_ms);
    let notes = step_ms.map(|ms| format!("{} per step", format::duration(ms / 1e3))).into_iter().collect();
    Some(Figure { label: "Training time", value: format::duration(seconds), notes })
}

/// The median of a figure over the reports.
pub(super) fn median(view: &View<'_>, figure: impl Fn(&StepMetrics) -> f64) -> Option<f64> {
    let mut values: Vec<f64> =
        view.history.steps.iter().map(figure).filter(|value| value.is_finite()).collect();
    let middle = values.len() / 2;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

fn throughput(view: &View<'_>) -> Option<Figure> {
    let rate = median(view, |m| m.tokens_per_second)?;
    let mut notes = Vec::new();
    if let Some(tflops) = median(view, |m| m.tflops).filter(|&tflops| tflops > 0.0) {
        notes.push(format!("{} TFLOP/s", format::significant(tflops)));
    }
    if let Some(mfu) = median(view, |m| m.mfu.unwrap_or(f64::NAN)) {
        notes.push(format!("{} MFU", format::percent(mfu, 1)));
    }
    if let Some(share) = median(view, |m| m.trained.map_or(f64::NAN, |trained| trained.share)) {
        notes.push(format!("{} of them trained", format::percent(share, 0)));
    }
    if let Some(padding) = median(view, |m| m.trained.map_or(f64::NAN, |trained| trained.padding)) {
        notes.push(format!("{} padding", format::percent(padding, 1)));
    }
    Some(Figure { label: "Tokens per second", value: format::count(rate), notes })
}

fn model(view: &View<'_>) -> Option<Figure> {
    let peak = view.history.steps.iter().map(|m| m.memory_bytes).max().filter(|&peak| peak > 0);
    let memory = peak.map(|peak| format!("{} of memory", format::bytes(peak)));
    if let Some(parameters) = view.run.summary.parameters {
        let notes = memory.into_iter().collect();
        return Some(Figure { label: "Parameters", value: format::count(parameters as f64), notes });
    }
    Some(Figure { label: "Memory", value: format::bytes(peak?), notes: Vec::new() })
}

fn steps(view: &View<'_>) -> Option<Figure> {
    let last = view.history.last_step();
    let mut notes = Vec::new();
    if let Some(total) = view.run.summary.total_steps.filter(|&total| total != last) {
        notes.push(format!("of {}", format::grouped(total)));
    }
    let skipped = view.history.skipped.len();
    if skipped > 0 {
        notes.push(format!("{skipped} skipped"));
    }
    if let Some(casts) = view.history.steps.last().and_then(|m| m.saturated).filter(|&casts| casts > 0) {
        notes.push(format!("{} saturated casts", format::grouped(casts)));
    }
    match view.history.resumed.len() {
        0 => {}
        1 => notes.push("resumed once".to_owned()),
        times => notes.push(format!("resumed {times} times")),
    }
    (last > 0).then(|| Figure { label: "Steps", value: format::grouped(last), notes })
}
