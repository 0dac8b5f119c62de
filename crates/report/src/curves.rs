//! The charts of a report and their curves.

use std::borrow::Cow;

use super::axis::Axis;
use super::chart::{COLORS, Chart, LegendValue, Series, Style, four_digits};
use super::data::RunData;
use super::history::History;
use super::identity::same_tokenizer;
use super::marks::Mark;
use super::names::{self, Labels};
use super::range::{axis_from_zero, axis_of, outside};
use super::thin::{self, Point, SMOOTHED_FROM};
use crate::metrics::{EvalMetrics, SourceMetrics, StepMetrics, format};

/// One run with derived values.
pub(super) struct View<'a> {
    pub(super) run: &'a RunData,
    pub(super) history: History,
    /// Its name in legends.
    pub(super) label: String,
    /// Length of a step on the x axis: 1, or its tokens.
    pub(super) x_per_step: f64,
    /// Index of its colour among several runs.
    pub(super) color: usize,
    /// Shade of the colour.
    pub(super) tone: usize,
}

/// Several runs and their common x axis.
pub(super) struct Views<'a> {
    pub(super) views: Vec<View<'a>>,
    pub(super) x_name: &'static str,
    /// Common beginning and end of the runs' names, which their labels omit.
    pub(super) left_out: [String; 2],
}

impl<'a> Views<'a> {
    /// Runs are compared by step if a step has the same number of tokens in all of them, else by tokens.
    pub(super) fn new(runs: &'a [RunData]) -> Self {
        let Labels { labels, left_out } =
            names::for_legend(&runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>());
        let view = |(n, (run, label)): (usize, (&'a RunData, String))| View {
            run,
            history: run.history(),
            label,
            x_per_step: 1.0,
            color: n,
            tone: n / COLORS,
        };
        let mut views: Vec<View<'a>> = runs.iter().zip(labels).enumerate().map(view).collect();
        let tokens_per_step: Vec<f64> =
            views.iter().filter_map(|view| tokens_per_step(&view.history)).collect();
        let same = tokens_per_step.windows(2).all(|pair| (pair[0] / pair[1] - 1.0).abs() < 0.01);
        if same || tokens_per_step.len() < views.len() {
            return Self { views, x_name: "step", left_out };
        }
        for (view, tokens) in views.iter_mut().zip(tokens_per_step) {
            view.x_per_step = tokens;
        }
        Self { views, x_name: "tokens", left_out }
    }

    /// The loss over the whole run, and enlarged if its first fall would flatten the rest.
    pub(super) fn loss(&self) -> Option<(Chart, Option<Chart>)> {
        let series = self.loss_series();
        let whole = axis_of(&points_of(&series), 1000.0)?;
        let x = self.x_axis();
        let later = x.low + 0.2 * (x.high - x.low);
        let late: Vec<&[Point]> = points_of(&series)
            .into_iter()
            .map(|points| &points[points.partition_point(|p| p.0 < later)..])
            .collect();
        let closer = axis_of(&late, 1000.0).filter(|closer| {
            closer.scale == whole.scale && closer.high - closer.low < 0.5 * (whole.high - whole.low)
        });
        let chart = |y| self.chart("Loss", "mean cross-entropy", "nats per token", y, self.loss_series());
        let decorate = |mut chart: Chart| {
            if let [view] = &self.views[..] {
                let best = view.history.best_eval().filter(|_| view.history.evals.len() > 1);
                let point = best.map(|m| (m.step as f64 * view.x_per_step, m.loss));
                chart.ring = point.map(|point| (point, "lowest validation loss"));
                let entropy = view.run.summary.unigram_entropy;
                let entropy = entropy.filter(|entropy| (chart.y.low..=chart.y.high).contains(entropy));
                chart.references.extend(entropy.map(|entropy| (entropy, "unigram entropy".to_owned())));
            }
            chart
        };
        Some((
            decorate(chart(whole)),
            closer.map(|closer| Chart { notes: Vec::new(), ..decorate(chart(closer)) }),
        ))
    }

    /// True if the tokenizers differ, so that losses in nats per token are not comparable.
    pub(super) fn tokenizers_differ(&self) -> bool {
        let of_one = |pair: &[View<'_>]| same_tokenizer(pair[0].run, pair[1].run);
        !self.views.windows(2).all(of_one)
    }

    /// Two flags: some training curves are smoothed, and all are.
    pub(super) fn smoothing(&self) -> [bool; 2] {
        let is_smoothed = |view: &View<'_>| view.history.steps.len() >= SMOOTHED_FROM;
        [self.views.iter().any(is_smoothed), self.views.iter().all(is_smoothed)]
    }

    /// Explains the curves of several runs.
    pub(super) fn note(&self) -> String {
        let smoothed = match self.smoothing() {
            [_, true] => ", smoothed",
            [true, false] => ", smoothed if a run has enough reports",
            [false, false] => "",
        };
        let has_evals = self.views.iter().any(|view| !view.history.evals.is_empty());
        let dashed = if has_evals { " Dashed: validation loss." } else { "" };
        let tokenizers = match self.tokenizers_differ() {
            true => " The tokenizers differ, so nats per token are not comparable: see bits per byte.",
            false => "",
        };
        format!("Solid: training loss{smoothed}.{dashed}{tokenizers}")
    }

    /// Bits per byte, learning rate, gradient norm, throughput, saturated casts, the gap of reference
    /// segments and the losses of a mixture's sources, as far as there are values.
    pub(super) fn others(&self) -> Vec<Chart> {
        let lr = self.each("learning rate", |m| m.lr);
        let norms = self.smoothed("norm", |m| m.grad_norm);
        let rates = self.smoothed("throughput", |m| m.tokens_per_second);
        let lr_axis = axis_from_zero(&points_of(&lr));
        let norm_axis = axis_of(&points_of(&norms), 8.0);
        let rate_axis = axis_from_zero(&points_of(&rates));
        let saturated = self.saturated();
        let saturated_axis = axis_from_zero(&points_of(&saturated));
        let gaps = self.gaps();
        let gap_axis = axis_from_zero(&points_of(&gaps));
        let sources = self.sources();
        let sources_axis = axis_of(&points_of(&sources), 1000.0);
        let charts = [
            self.bits_chart(),
            sources_axis.map(|y| {
                let dashed = sources.iter().any(|series| series.style == Style::Dashed);
                let mut chart = self.chart("Loss by source", "of the mixture", "nats per token", y, sources);
                chart.pairs = true;
                if dashed {
                    chart.notes.push("Solid: training. Dashed: validation.".into());
                }
                chart
            }),
            lr_axis.map(|y| self.chart("Learning rate", "at each step", "learning rate", y, lr)),
            norm_axis.map(|y| self.chart("Gradient norm", "before clipping", "L2 norm", y, norms)),
            rate_axis.map(|y| self.chart("Throughput", "", "tokens per second", y, rates)),
            saturated_axis
                .map(|y| self.chart("Saturated casts", "at static scales, so far", "casts", y, saturated)),
            gap_axis.map(|y| {
                let chart =
                    self.chart("Gap to bf16", "over reference segments", "percent of the loss", y, gaps);
                Chart { suffix: "%", ..chart }
            }),
        ];
        charts.into_iter().flatten().collect()
    }

    /// Bits per byte of the evaluations.
    pub(super) fn bits_chart(&self) -> Option<Chart> {
        let bits = self.bits();
        let y = axis_of(&points_of(&bits), 1000.0)?;
        Some(self.chart("Bits per byte", "of the validation text", "bits per byte", y, bits))
    }

    pub(super) fn chart(
        &self,
        title: impl Into<Cow<'static, str>>,
        subtitle: impl Into<Cow<'static, str>>,
        y_name: impl Into<Cow<'static, str>>,
        y: Axis,
        series: Vec<Series>,
    ) -> Chart {
        Chart {
            notes: if self.views.len() == 1 { notes(&series, &y) } else { Vec::new() },
            title: title.into(),
            subtitle: subtitle.into(),
            y_name: y_name.into(),
            suffix: "",
            x_name: self.x_name,
            x: self.x_axis(),
            step_tokens: self.step_tokens(),
            y,
            series,
            marks: self.marks(),
            pairs: self.views.len() > 1,
            references: Vec::new(),
            bands: Vec::new(),
            ring: None,
        }
    }

    /// Events of a run. One chart could not distinguish the events of several runs.
    fn marks(&self) -> Vec<Mark> {
        let [view] = &self.views[..] else { return Vec::new() };
        let History { skipped, resumed, warnings, .. } = &view.history;
        let mark = |name, class, steps: Vec<u64>| Mark {
            name,
            class,
            at: steps.into_iter().map(|step| step as f64 * view.x_per_step).collect(),
        };
        let mut marks = vec![
            mark("skipped step", "skip", skipped.iter().map(|s| s.step).collect()),
            mark("resumed", "resume", resumed.iter().map(|r| r.step).collect()),
            mark("warning", "warn", warnings.iter().map(|w| w.step).collect()),
        ];
        marks.retain(|mark| !mark.at.is_empty());
        marks
    }

    /// Tokens of a step, where the x axis counts steps and all runs have as many.
    pub(super) fn step_tokens(&self) -> Option<f64> {
        let first = self.views.iter().find_map(|view| tokens_per_step(&view.history));
        first.filter(|_| self.x_name == "step")
    }

    pub(super) fn x_axis(&self) -> Axis {
        let last = self
            .views
            .iter()
            .map(|view| view.history.last_step() as f64 * view.x_per_step)
            .fold(1.0, f64::max);
        Axis::whole(0.0, last, 5)
    }

    fn loss_series(&self) -> Vec<Series> {
        let mut series = self.smoothed("training", |m| m.loss);
        for view in &self.views {
            let evals = view.history.evals.iter().map(|m| (m.step as f64 * view.x_per_step, m.loss));
            let points: Vec<Point> = evals.collect();
            if points.is_empty() {
                continue;
            }
            let (name, color) = match self.views.len() {
                1 => ("validation".to_owned(), 1),
                _ => (format!("{}, validation", view.label), view.color),
            };
            series.push(Series::new(name, Style::Dashed, color, view.tone, points));
        }
        series
    }

    /// Cross-entropy of each evaluation in bits per byte of text.
    fn bits(&self) -> Vec<Series> {
        let mut series = Vec::new();
        for view in &self.views {
            let of = |m: &EvalMetrics| Some((m.step as f64 * view.x_per_step, m.bits_per_byte?));
            let points: Vec<Point> = view.history.evals.iter().filter_map(of).collect();
            if points.is_empty() {
                continue;
            }
            let (name, color) = match self.views.len() {
                1 => ("validation".to_owned(), 1),
                _ => (view.label.clone(), view.color),
            };
            // Alone, so that the legend shows it.
            series.push(Series::new(name, Style::Dotted, color, view.tone, points));
        }
        series
    }

    /// Losses of each source of a run's mixture, in training and in validation. A page of several runs omits
    /// these curves: too many.
    fn sources(&self) -> Vec<Series> {
        let [view] = &self.views[..] else { return Vec::new() };
        let mut names: Vec<&str> = Vec::new();
        for source in &view.history.sources {
            if !names.contains(&source.name.as_str()) {
                names.push(&source.name);
            }
        }
        let Labels { labels, .. } = names::for_legend(&names);
        let mut series = Vec::new();
        for (n, (&name, label)) in names.iter().zip(labels).enumerate() {
            let points = |loss: fn(&SourceMetrics) -> Option<f64>| -> Vec<Point> {
                let of_source = view.history.sources.iter().filter(|source| source.name == name);
                of_source.filter_map(|m| Some((m.step as f64 * view.x_per_step, loss(m)?))).collect()
            };
            let [training, validation] = [points(|m| m.train_loss), points(|m| m.loss)];
            let mut add = |name: String, style, points: Vec<Point>| {
                if !points.is_empty() {
                    series.push(Series::new(name, style, n, n / COLORS, points));
                }
            };
            // A dashed curve has the legend of the solid one of its colour, if there is one.
            match training.is_empty() {
                true => add(label, Style::Dotted, validation),
                false => {
                    add(label.clone(), Style::Dotted, training);
                    add(format!("{label}, validation"), Style::Dashed, validation);
                }
            }
        }
        series
    }

    /// Saturated casts of the runs with static scales that had any.
    fn saturated(&self) -> Vec<Series> {
        let mut series = self.each("saturated casts", |m| m.saturated.map_or(f64::NAN, |casts| casts as f64));
        series.iter_mut().for_each(|series| series.points.retain(|point| !point.1.is_nan()));
        series.retain(|series| series.points.iter().any(|point| point.1 > 0.0));
        series
    }

    /// Gap of each reference segment: its loss above that in bf16, in percent.
    fn gaps(&self) -> Vec<Series> {
        let several = self.views.len() > 1;
        let with_segments = self.views.iter().filter(|view| !view.history.references.is_empty());
        let series = with_segments.map(|view| {
            let name = if several { view.label.clone() } else { "gap".to_owned() };
            let segments = view.history.references.iter();
            let points = segments.map(|r| (r.step as f64 * view.x_per_step, 100.0 * r.gap())).collect();
            Series::new(name, Style::Dotted, view.color, view.tone, points)
        });
        series.collect()
    }

    fn smoothed(&self, name: &str, figure: impl Fn(&StepMetrics) -> f64) -> Vec<Series> {
        self.each(name, figure).into_iter().flat_map(|raw| self.with_smooth(raw)).collect()
    }

    /// Single values and a smooth curve through them; for several runs the smooth curve only.
    pub(super) fn with_smooth(&self, raw: Series) -> Vec<Series> {
        let Some((points, reports)) = smoothed(&raw.points) else { return vec![raw] };
        let value = mean_of_last(&raw.points, reports)
            .map_or(LegendValue::Absent, |mean| LegendValue::Is(four_digits(mean)));
        let [view] = &self.views[..] else { return vec![Series { points, value, ..raw }] };
        let reports = format::grouped(view.history.reports_in(reports, raw.points.len()));
        let name = format!("{}, smoothed over {reports} reports", raw.name);
        let each = format!("{}, each report", raw.name);
        let smooth = Series { value, ..Series::new(name, Style::Line, raw.color, raw.tone, points) };
        vec![Series::new(each, Style::Raw, raw.color, raw.tone, raw.points), smooth]
    }

    /// One curve for each run, called `name` if there is only one.
    fn each(&self, name: &str, figure: impl Fn(&StepMetrics) -> f64) -> Vec<Series> {
        let several = self.views.len() > 1;
        let with_steps = self.views.iter().filter(|view| !view.history.steps.is_empty());
        let series = with_steps.map(|view| {
            let name = if several { view.label.clone() } else { name.to_owned() };
            let steps = view.history.steps.iter();
            let points = steps.map(|m| (m.step as f64 * view.x_per_step, figure(m))).collect();
            Series::new(name, Style::Line, view.color, view.tone, points)
        });
        series.collect()
    }
}

/// The smooth curve through `points`, and the number of points that each of its values averages; `None` if
/// there are too few points.
pub(super) fn smoothed(points: &[Point]) -> Option<(Vec<Point>, usize)> {
    (points.len() >= SMOOTHED_FROM).then(|| thin::smooth(points))
}

/// The mean of the last `reports` points, without those that are not finite.
pub(super) fn mean_of_last(points: &[Point], reports: usize) -> Option<f64> {
    let last = &points[points.len().saturating_sub(reports)..];
    let finite: Vec<f64> = last.iter().map(|point| point.1).filter(|value| value.is_finite()).collect();
    (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / finite.len() as f64)
}

pub(super) fn points_of(series: &[Series]) -> Vec<&[Point]> {
    series.iter().map(|series| &series.points[..]).collect()
}

/// Notes on the values that a chart of one run leaves out. Values of a smooth curve do not count, because the
/// curve it was computed from is counted.
fn notes(series: &[Series], y: &Axis) -> Vec<String> {
    let smoothed = series.iter().any(|series| series.style == Style::Raw);
    let reported: Vec<&[Point]> = series
        .iter()
        .filter(|series| !(smoothed && series.style == Style::Line))
        .map(|series| &series.points[..])
        .collect();
    let broken =
        reported.iter().flat_map(|points| points.iter()).filter(|point| !point.1.is_finite()).count();
    let sentences = [
        match outside(&reported, y) {
            0 => None,
            1 => Some("1 value lies outside of the axis.".to_owned()),
            n => Some(format!("{} values lie outside of the axis.", format::grouped(n as u64))),
        },
        match broken {
            0 => None,
            1 => Some("1 value is not finite and leaves a gap.".to_owned()),
            n => Some(format!("{} values are not finite and leave gaps.", format::grouped(n as u64))),
        },
    ];
    sentences.into_iter().flatten().collect()
}

fn tokens_per_step(history: &History) -> Option<f64> {
    let last = history.steps.last().filter(|last| last.tokens > 0 && last.step > 0)?;
    Some(last.tokens as f64 / last.step as f64)
}
