//! The page of a comparison: the figures, the losses, and the gap over the runs.

use super::figures::{Comparable, Losses, SeedCurve, SeedPart, common_end, measured, whole, within};
use super::table::percent;
use super::{Comparison, Group};
use crate::axis::Axis;
use crate::chart::{Band, COLORS, Chart, LegendValue, Series, Style};
use crate::compare;
use crate::curves::Views;
use crate::frame::{axis_choice, begun, card, ended, note, notice, section, views};
use crate::glossary::{OF_COMPARISONS, glossary};
use crate::html::escape;
use crate::names;
use crate::thin::Point;
use std::fmt::Write;

/// Positions at which the gap is drawn, if there are enough reports to smooth it.
const PLACES: usize = 240;
/// Share of the runs over which a smoothed gap is averaged at each position.
const WINDOW: f64 = 1.0 / 25.0;
/// Minimum number of reports whose gap is smoothed: a window then has three or more.
const SMOOTHED_GAP_FROM: usize = 75;

pub(super) fn render(comparison: &Comparison) -> String {
    let mut all = Views::new(&comparison.runs);
    for (color, group) in comparison.groups.iter().enumerate() {
        for (tone, &n) in group.runs.iter().enumerate() {
            // Colours of many groups repeat, in another shade.
            (all.views[n].color, all.views[n].tone) = (color, tone + color / COLORS);
        }
    }
    let groups: Vec<&[String]> = comparison.compared.iter().map(|gap| &gap.runs[..]).collect();
    let title =
        format!("{} against {}", names::of_groups(&groups), names::of_group(&comparison.baseline.runs));
    let mut out = begun(&title, "xtrain compare");
    let _ = write!(
        out,
        "<header>\n<p class=\"kind\">Gap to a baseline</p>\n<h1>{}</h1>\n</header>\n",
        escape(&title)
    );
    section(&mut out, "Losses", &comparison.table().html());
    if let Some(tasks) = comparison.task_table() {
        section(&mut out, "Tasks", &tasks.html());
    }
    notice(&mut out, "Notes", &comparison.notes);
    let gap = gap_chart(comparison, &all);
    if all.step_tokens().is_some() {
        axis_choice(&mut out);
    }
    if let Some(chart) = gap {
        card(&mut out, &chart);
    }
    if let Some((mut whole, mut closer)) = all.loss() {
        // The table has the figures, over the same steps for all runs.
        for series in
            [Some(&mut whole), closer.as_mut()].into_iter().flatten().flat_map(|chart| &mut chart.series)
        {
            series.value = LegendValue::Absent;
        }
        out.push_str("<section class=\"card\">\n");
        views(&mut out, &whole, closer.as_ref());
        note(&mut out, &all.note());
        out.push_str("</section>\n");
    }
    if let Some(chart) = all.bits_chart().filter(|_| all.tokenizers_differ()) {
        card(&mut out, &chart);
    }
    section(&mut out, "Runs", &compare::figures_table(&all, &[compare::TRAINING_LOSS]));
    section(&mut out, "What differs", &compare::differences(&all.views));
    glossary(&mut out, &all, &OF_COMPARISONS);
    ended(out, "the metrics of these runs")
}

/// Name of a group in the legend.
fn label(group: &Group, views: &Views<'_>) -> String {
    names::of_group(&group.runs.iter().map(|&n| views.views[n].label.clone()).collect::<Vec<_>>())
}

/// A band from middles and half widths. The half widths are root mean squares over an eighth of the run,
/// because those of a few seeds at a single place jump.
fn band(points: &[(f64, f64, f64)]) -> Vec<(f64, f64, f64)> {
    let eased = |(n, &(x, middle, _)): (usize, &(f64, f64, f64))| {
        let beside = points.len() / 16;
        let around = &points[n.saturating_sub(beside)..(n + beside + 1).min(points.len())];
        let half = (around.iter().map(|p| p.2 * p.2).sum::<f64>() / around.len() as f64).sqrt();
        (x, middle - half, middle + half)
    };
    points.iter().enumerate().map(eased).collect()
}

/// The gap of a group to the baseline over the runs, in percent.
#[derive(Default)]
struct GapCurve {
    gaps: Vec<Point>,
    /// Gaps and the half widths of their 95% intervals over the group's seeds.
    intervals: Vec<(f64, f64, f64)>,
    /// Zeros and the spread of the baseline's seeds around them.
    spreads: Vec<(f64, f64, f64)>,
    /// The values that the axis has to show.
    low: f64,
    high: f64,
    /// True if each point is a mean over several reports.
    is_smoothed: bool,
}

impl GapCurve {
    fn subtract(own: &[SeedCurve], base: &[SeedCurve]) -> Self {
        let (own, base) = (whole(own), whole(base));
        let all = [&own[..], &base[..]].concat();
        let first = all.iter().filter_map(|part| part.points.first()).map(|p| p.0).fold(0.0, f64::max);
        let end = common_end(&all);
        let reports = within(&all, &(first..=end));
        // Every window contains a report of each run.
        let spacing = |part: &SeedPart<'_>| (end - first) / part.points.len().saturating_sub(1).max(1) as f64;
        let least = 0.51 * reports.iter().map(spacing).fold(0.0, f64::max);
        let fewest = reports.iter().min_by_key(|part| part.points.len()).map_or(&[][..], |part| part.points);
        let is_smoothed = fewest.len() >= SMOOTHED_GAP_FROM;
        let mut curve = GapCurve { is_smoothed, ..GapCurve::default() };
        let places: Vec<f64> = match is_smoothed {
            true => (0..PLACES).map(|n| first + (end - first) * n as f64 / (PLACES - 1) as f64).collect(),
            false => fewest.iter().map(|p| p.0).collect(),
        };
        for x in places {
            // Towards the start the window shrinks on both sides alike, because the loss falls steeply there.
            let wanted = if is_smoothed { WINDOW * (end - first) / 2.0 } else { 0.0 };
            let half = wanted.min((x - first) / 2.0).max(least);
            let range = x - half..=x + half;
            let Some(found) = measured(&within(&own, &range), &within(&base, &range)) else {
                continue;
            };
            let gap = 100.0 * found.gap.mean;
            let interval = found.gap.of_mean().map(|interval| 100.0 * interval);
            curve.gaps.push((x, gap));
            curve.intervals.extend(interval.map(|interval| (x, gap, interval)));
            curve.spreads.extend(found.spread.map(|spread| (x, 0.0, 100.0 * spread)));
            // The first steps, where the gap is noise, do not determine the axis.
            if x > first + 0.2 * (end - first) {
                let reach = interval.unwrap_or(0.0).min(3.0 * gap.abs());
                curve.low = curve.low.min(gap - reach);
                curve.high = curve.high.max(gap + reach);
            }
        }
        curve
    }
}

/// The gap of every group over the runs, the spread of the baseline's seeds around 0, and the tolerances.
fn gap_chart(comparison: &Comparison, views: &Views<'_>) -> Option<Chart> {
    let losses = Losses::collect(views, &comparison.groups);
    let baseline = &comparison.groups[0];
    let mut bands = Vec::new();
    let mut series = Vec::new();
    let (mut low, mut high) = (0.0f64, 0.0f64);
    let mut smoothed = Vec::new();
    for (color, group) in comparison.groups.iter().enumerate().skip(1) {
        if !Comparable::compare(&comparison.runs, group, baseline).tokenizer {
            continue;
        }
        let curve = GapCurve::subtract(&losses.training[color], &losses.training[0]);
        (low, high) = (low.min(curve.low), high.max(curve.high));
        let name = label(group, views);
        // The spread is drawn once, for the first group that has a curve.
        if series.is_empty() && !curve.spreads.is_empty() {
            bands.push(Band {
                name: "spread of the baseline's seeds (95%)".into(),
                color: 0,
                points: band(&curve.spreads),
            });
        }
        if !curve.intervals.is_empty() {
            let name = format!("{name}, 95% interval over its seeds");
            bands.push(Band { name, color, points: band(&curve.intervals) });
        }
        if !curve.gaps.is_empty() {
            smoothed.push(curve.is_smoothed);
            let style = if curve.is_smoothed { Style::Line } else { Style::Dotted };
            // The curve ends at the gap of the last reports; the table has that of the compared steps.
            let figure = comparison.compared[color - 1].training.as_ref();
            let value = figure.map_or(LegendValue::Absent, |figure| LegendValue::Is(percent(figure)));
            let curve = Series::new(name, style, color, color / COLORS, curve.gaps);
            series.push(Series { value, ..curve });
        }
    }
    if series.is_empty() {
        return None;
    }
    let mut bars: Vec<f64> = comparison.compared.iter().filter_map(|gap| gap.bar_percent).collect();
    bars.sort_by(f64::total_cmp);
    bars.dedup();
    high = bars.iter().fold(high, |high, &bar| high.max(bar));
    let seeds = bands.first().filter(|band| band.color == 0).map_or(0.0, |band| {
        let mut widths: Vec<f64> = band.points.iter().map(|p| p.2).collect();
        widths.sort_by(f64::total_cmp);
        widths[widths.len() / 2]
    });
    // The spread of two seeds is so wide that it would hide everything else.
    let seeds = seeds.min(4.0 * high.max(-low).max(0.05));
    let (low, high) = (low.min(-seeds), high.max(seeds));
    let pad = 0.06 * (high - low);
    let mut references = vec![(0.0, "baseline".to_owned())];
    references.extend(bars.into_iter().map(|bar| (bar, format!("bar {bar}%"))));
    Some(Chart {
        title: "Gap to the baseline".into(),
        subtitle: match (smoothed.contains(&true), smoothed.contains(&false)) {
            (true, false) => "of the training loss, smoothed",
            (true, true) => "of the training loss, smoothed if a run has enough reports",
            _ => "of the training loss, at each report",
        }
        .into(),
        y_name: "percent above the baseline".into(),
        suffix: "%",
        x_name: views.x_name,
        x: views.x_axis(),
        step_tokens: views.step_tokens(),
        y: Axis::linear(low - pad, high + pad, 5),
        series,
        marks: Vec::new(),
        pairs: false,
        references,
        bands,
        ring: None,
        notes: Vec::new(),
    })
}
