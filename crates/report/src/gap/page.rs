//! The page of a comparison: the figures, the losses, and the gap over the runs.

use super::figures::{Comparable, LossGap, Losses, common_end, curves, measured, within};
use super::{Comparison, Gap};
use crate::axis::Axis;
use crate::chart::{Band, Chart, Series, Style, color_class};
use crate::compare;
use crate::curves::Views;
use crate::html::escape;
use crate::metrics::format;
use crate::page::{axis_choice, begun, ended, note, section, tabs};
use crate::thin::Point;
use std::fmt::Write;

/// Positions at which the gap is drawn.
const PLACES: usize = 240;
/// Share of the runs over which the gap is averaged at each position.
const WINDOW: f64 = 1.0 / 25.0;

pub(super) fn render(comparison: &Comparison) -> String {
    let mut views = Views::new(&comparison.runs);
    for (color, group) in comparison.groups.iter().enumerate() {
        for (tone, &n) in group.runs.iter().enumerate() {
            (views.views[n].color, views.views[n].tone) = (color, tone);
        }
    }
    let names: Vec<String> = comparison.compared.iter().map(|gap| called(&gap.runs)).collect();
    let title = format!("{} against {}", names.join(", "), called(&comparison.baseline.runs));
    let mut out = begun(&title, "xtrain compare");
    let _ = write!(
        out,
        "<header>\n<p class=\"kind\">The gap to a baseline</p>\n<h1>{}</h1>\n</header>\n",
        escape(&title)
    );
    notes(&mut out, &comparison.notes);
    section(&mut out, "Losses", &table(comparison));
    let gap = gap_chart(comparison, &views);
    if views.step_tokens().is_some() {
        axis_choice(&mut out);
    }
    if let Some(chart) = gap {
        let _ = write!(out, "<section class=\"card\">\n{}</section>\n", chart.html());
    }
    if let Some((whole, closer)) = views.loss() {
        out.push_str("<section class=\"card\">\n");
        match closer {
            None => out.push_str(&whole.html()),
            Some(closer) => tabs(&mut out, &whole, &closer),
        }
        note(&mut out, &views.note());
        out.push_str("</section>\n");
    }
    if let Some(chart) = views.bits_chart().filter(|_| views.tokenizers_differ()) {
        let _ = write!(out, "<section class=\"card\">\n{}</section>\n", chart.html());
    }
    section(&mut out, "Runs", &compare::figures_table(&views.views));
    section(&mut out, "What differs", &compare::differences(&views.views));
    ended(out, "the metrics of these runs")
}

/// Title of several runs: the first of their names.
fn called(runs: &[String]) -> String {
    match runs {
        [] => String::new(),
        [one] => one.clone(),
        [first, others @ ..] => format!("{first} and {} more", others.len()),
    }
}

fn notes(out: &mut String, notes: &[String]) {
    if notes.is_empty() {
        return;
    }
    out.push_str("<section class=\"problems\" role=\"note\">\n<p>To know of these runs:</p>\n<ul>");
    for note in notes {
        let _ = write!(out, "<li>{}</li>", escape(note));
    }
    out.push_str("</ul>\n</section>\n");
}

fn table(comparison: &Comparison) -> String {
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th>Runs</th><th>Recipe</th><th>Loss of</th><th>at</th><th>Loss</th><th>Baseline</th>\
         <th>Gap</th><th>Seeds</th><th>Within seeds</th><th>Bar</th><th>Within bar</th></tr></thead>\n<tbody>\n",
    );
    let base = &comparison.baseline;
    for (what, figure) in [("training", &base.training), ("validation", &base.validation)] {
        let names = (what == "training").then(|| base.runs.join(", "));
        row(&mut out, 0, names, base.recipe.as_deref(), what, figure.as_ref(), None);
    }
    for (n, gap) in comparison.compared.iter().enumerate() {
        let Gap { runs, recipe, bar_percent, training, validation } = gap;
        for (what, figure) in [("training", training), ("validation", validation)] {
            let names = (what == "training").then(|| runs.join(", "));
            row(&mut out, n + 1, names, recipe.as_deref(), what, figure.as_ref(), *bar_percent);
        }
    }
    out.push_str("</tbody>\n</table></div>\n");
    let _ = writeln!(
        out,
        "<p class=\"note\">Training: the mean over the last {} steps that both sides have made; validation: the last evaluation that all have \
         made. Gap: the relative difference of the loss, each run compared with the baseline's run of the same seed, if there is one; ± is the 95% \
         interval over its seeds. Seeds: the distance from the baseline within which other seeds of its configuration would lie, with 95% confidence \
         (Student's t). Bar: the recipe's tolerance; unclear if chance alone could move the gap across it, as with a single seed below three times the bar.</p>",
        format::grouped(comparison.last)
    );
    out
}

/// A row of the table. The baseline's own row, whose colour has no index above 0, has no gap.
fn row(
    out: &mut String,
    color: usize,
    names: Option<String>,
    recipe: Option<&str>,
    what: &str,
    figure: Option<&LossGap>,
    bar: Option<f64>,
) {
    let head = match &names {
        Some(names) => format!("<i class=\"key line {}\"></i>{}", color_class(color, 0), escape(names)),
        None => String::new(),
    };
    let _ = write!(out, "<tr><th>{head}</th>");
    let is_baseline = color == 0;
    let yes = |inside: Option<bool>| inside.map(|inside| if inside { "yes" } else { "<b>no</b>" }.to_owned());
    let figure_of = |of: &dyn Fn(&LossGap) -> Option<String>| figure.and_then(of);
    let cells = [
        names.and(recipe).map(|recipe| escape(recipe).to_string()),
        Some(match figure.filter(|f| f.unit == "bits/byte") {
            Some(f) => format!("{what}, {}", f.unit),
            None => what.to_owned(),
        }),
        figure_of(&|f| Some(place(f))),
        figure_of(&|f| Some(format!("{:.4}", f.loss))),
        figure_of(&|f| (!is_baseline).then(|| format!("{:.4}", f.baseline_loss))),
        figure_of(&|f| (!is_baseline).then(|| gap_text(f))),
        figure_of(&|f| match is_baseline {
            true => f.seed_deviation_percent.map(|deviation| format!("s.d. {deviation:.3}%")),
            false => f.seed_spread_percent.map(|spread| format!("±{spread:.3}%")),
        }),
        figure_of(&|f| yes(f.inside_spread.filter(|_| !is_baseline))),
        bar.map(|bar| format!("{bar}%")),
        figure_of(&|f| bar.map(|_| yes(f.inside_bar).unwrap_or_else(|| "unclear".into()))),
    ];
    for cell in cells {
        let _ = write!(out, "<td>{}</td>", cell.as_deref().unwrap_or("–"));
    }
    out.push_str("</tr>\n");
}

fn place(figure: &LossGap) -> String {
    match figure.from == figure.to {
        true => format::grouped(figure.to),
        false => format!("{}–{}", format::grouped(figure.from), format::grouped(figure.to)),
    }
}

fn gap_text(figure: &LossGap) -> String {
    let interval = figure.gap_interval_percent.map(|interval| format!(" ±{interval:.3}%"));
    format!("<b>{:+.3}%</b>{}", figure.gap_percent, interval.unwrap_or_default())
}

/// A band from middles and half widths. The half widths are root mean squares over an eighth of the run,
/// because those of a few seeds at a single place jump.
fn band(points: &[(f64, f64, f64)]) -> Vec<(f64, f64, f64)> {
    let eased = |(n, &(x, middle, _)): (usize, &(f64, f64, f64))| {
        let around = &points[n.saturating_sub(PLACES / 16)..(n + PLACES / 16 + 1).min(points.len())];
        let half = (around.iter().map(|p| p.2 * p.2).sum::<f64>() / around.len() as f64).sqrt();
        (x, middle - half, middle + half)
    };
    points.iter().enumerate().map(eased).collect()
}

/// The gap of every group over the runs, the spread of the baseline's seeds around 0, and the tolerances.
fn gap_chart(comparison: &Comparison, views: &Views<'_>) -> Option<Chart> {
    let losses = Losses::of(views);
    let baseline = &comparison.groups[0];
    let base = curves(&losses.training, baseline);
    let mut bands = Vec::new();
    let mut series = Vec::new();
    let (mut low, mut high) = (0.0f64, 0.0f64);
    for (color, group) in comparison.groups.iter().enumerate().skip(1) {
        if !Comparable::of(&comparison.runs, group, baseline).tokenizer {
            continue;
        }
        let own = curves(&losses.training, group);
        let all = || own.iter().chain(&base);
        let first = all().filter_map(|points| points.first()).map(|p| p.0).fold(0.0, f64::max);
        let end = common_end(all().copied());
        // Every window contains a report of each run.
        let reports = within(&all().copied().collect::<Vec<_>>(), &(first..=end));
        let spacing = |points: &&[Point]| (end - first) / points.len().saturating_sub(1).max(1) as f64;
        let least = 0.51 * reports.iter().map(spacing).fold(0.0, f64::max);
        let (mut gaps, mut intervals, mut spreads) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..PLACES {
            let x = first + (end - first) * n as f64 / (PLACES - 1) as f64;
            // Towards the start the window shrinks on both sides alike, because the loss falls steeply there.
            let half = (WINDOW * (end - first) / 2.0).min((x - first) / 2.0).max(least);
            let range = x - half..=x + half;
            let Some(found) = measured(group, &within(&own, &range), baseline, &within(&base, &range)) else {
                continue;
            };
            let (gap, interval) =
                (100.0 * found.gap.mean, found.gap.of_mean().map(|interval| 100.0 * interval));
            gaps.push((x, gap));
            intervals.extend(interval.map(|interval| (x, gap, interval)));
            spreads.extend(found.spread.map(|spread| (x, 0.0, 100.0 * spread)));
            // The first steps, where the gap is noise, do not determine the axis.
            if x > first + 0.2 * (end - first) {
                let reach = interval.unwrap_or(0.0).min(3.0 * gap.abs());
                low = low.min(gap - reach);
                high = high.max(gap + reach);
            }
        }
        let name = called(&comparison.compared[color - 1].runs);
        if color == 1 && !spreads.is_empty() {
            bands.push(Band {
                name: "spread of the baseline's seeds (95%)".into(),
                color: 0,
                points: band(&spreads),
            });
        }
        if !intervals.is_empty() {
            bands.push(Band { name: format!("{name}, 95% over its seeds"), color, points: band(&intervals) });
        }
        if !gaps.is_empty() {
            series.push(Series { name, style: Style::Line, color, tone: 0, points: gaps });
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
        title: "Gap to the baseline",
        unit: "loss above the baseline's, percent, smoothed",
        x_name: views.x_name,
        x: views.x_axis(),
        step_tokens: views.step_tokens(),
        y: Axis::linear(low - pad, high + pad, 5),
        series,
        skipped: Vec::new(),
        resumed: Vec::new(),
        explains_marks: false,
        pairs: false,
        references,
        bands,
        ring: None,
        notes: Vec::new(),
    })
}
