//! The table of a comparison: the losses of each group of runs and their gaps to the baseline.

use std::fmt::Write;

use super::figures::LossGap;
use super::{Comparison, Gap};
use crate::chart::{COLORS, color_class};
use crate::frame::{TABLE_END, columns, table_begun};
use crate::glossary::definitions;
use crate::html::escape;
use crate::metrics::format;

/// Figures of a loss, each in its column, and what it means.
const FIGURES: [[&str; 2]; 8] = [
    ["Steps", ""],
    ["Loss", ""],
    ["Baseline", "The loss of the baseline's runs that these are compared with."],
    [
        "Gap",
        "The relative difference of the loss to the baseline's. Each run is compared with the baseline's run of the same seed, if there is \
         one. ± is the 95% confidence interval over the seeds.",
    ],
    [
        "Spread of seeds",
        "Distance from the baseline within which the mean of as many runs of its configuration with other seeds would lie, with 95% \
         confidence (Student's t). In the baseline's own row, s.d. is the standard deviation over its seeds.",
    ],
    [
        "Within spread",
        "Yes: another seed of the baseline could have the same gap. No: the gap is more than chance.",
    ],
    ["Bar", "The recipe's tolerance: the largest gap that is accepted (docs/numerics.md)."],
    [
        "Within bar",
        "Unclear: chance alone could move the gap across the bar. With a single seed, only a gap above three times the bar is clear.",
    ],
];

/// Cells of one loss, as many as there are figures.
type Cells = [Option<String>; FIGURES.len()];

/// The rows of a group: its losses.
struct Rows<'a> {
    runs: &'a [String],
    recipe: Option<&'a str>,
    losses: Vec<(String, Cells)>,
}

/// The table and the meaning of its columns.
pub(super) fn table(comparison: &Comparison) -> String {
    let base = &comparison.baseline;
    let mut groups = vec![Rows {
        runs: &base.runs,
        recipe: base.recipe.as_deref(),
        losses: losses([base.training.as_ref(), base.validation.as_ref()], of_baseline),
    }];
    for Gap { runs, recipe, bar_percent, training, validation } in &comparison.compared {
        let losses = losses([training.as_ref(), validation.as_ref()], |figure| of_gap(figure, *bar_percent));
        groups.push(Rows { runs, recipe: recipe.as_deref(), losses });
    }
    // A figure that no run has needs no column.
    let has_values =
        |n: &usize| groups.iter().flat_map(|group| &group.losses).any(|(_, cells)| cells[*n].is_some());
    let shown: Vec<usize> = (0..FIGURES.len()).filter(has_values).collect();
    let unit = if comparison.counted_in == "step" { "Steps" } else { "Tokens" };
    let names = shown.iter().map(|&n| if n == 0 { unit } else { FIGURES[n][0] });
    let mut out = table_begun("Losses and gaps", "groups");
    out += &columns(&["Runs", "Recipe", "Loss of"].into_iter().chain(names).collect::<Vec<_>>());
    for (n, group) in groups.iter().enumerate() {
        group.html(&mut out, n, &shown);
    }
    out += TABLE_END;
    let losses = format!(
        "Training: the mean over the last {} steps that both sides have run. Validation: the last evaluation that all of them have.",
        format::grouped(comparison.last)
    );
    let mut meanings = vec![["Loss", losses.as_str()]];
    meanings.extend(shown.iter().map(|&n| FIGURES[n]).filter(|[_, meaning]| !meaning.is_empty()));
    out + &definitions(&meanings)
}

impl Rows<'_> {
    fn html(&self, out: &mut String, color: usize, shown: &[usize]) {
        let span = self.losses.len();
        for (n, (what, cells)) in self.losses.iter().enumerate() {
            out.push_str("<tr>");
            if n == 0 {
                let _ = write!(
                    out,
                    "<th scope=\"row\" rowspan=\"{span}\"><i class=\"key line {}\"></i>{}</th><td rowspan=\"{span}\">{}</td>",
                    color_class(color, color / COLORS),
                    escape(&self.runs.join(", ")),
                    escape(self.recipe.unwrap_or("–"))
                );
            }
            let _ = write!(out, "<td>{}</td>", escape(what));
            for &figure in shown {
                let _ = write!(out, "<td>{}</td>", cells[figure].as_deref().unwrap_or("–"));
            }
            out.push_str("</tr>\n");
        }
    }
}

/// The two losses of a group, with their cells.
fn losses(figures: [Option<&LossGap>; 2], cells: impl Fn(&LossGap) -> Cells) -> Vec<(String, Cells)> {
    let named = ["training", "validation"].into_iter().zip(figures);
    let rows = named.map(|(what, figure)| {
        let name = match figure.filter(|figure| figure.unit == "bits/byte") {
            Some(_) => format!("{what}, bits per byte"),
            None => what.to_owned(),
        };
        (name, figure.map(&cells).unwrap_or_default())
    });
    rows.collect()
}

fn of_baseline(figure: &LossGap) -> Cells {
    let spread = figure.seed_deviation_percent.map(|deviation| format!("s.d. {deviation:.3}%"));
    let loss = format!("{:.4}", figure.loss);
    [Some(place(figure)), Some(loss), None, None, spread, None, None, None]
}

fn of_gap(figure: &LossGap, bar: Option<f64>) -> Cells {
    let yes = |inside: bool| if inside { "yes" } else { "<b>no</b>" }.to_owned();
    let interval = figure.gap_interval_percent.map(|interval| format!(" ±{interval:.3}%"));
    [
        Some(place(figure)),
        Some(format!("{:.4}", figure.loss)),
        Some(format!("{:.4}", figure.baseline_loss)),
        Some(format!("<b>{:+.3}%</b>{}", figure.gap_percent, interval.unwrap_or_default())),
        figure.seed_spread_percent.map(|spread| format!("±{spread:.3}%")),
        figure.inside_spread.map(yes),
        bar.map(|bar| format!("{bar}%")),
        bar.map(|_| figure.inside_bar.map_or_else(|| "unclear".to_owned(), yes)),
    ]
}

fn place(figure: &LossGap) -> String {
    match figure.from == figure.to {
        true => format::grouped(figure.to),
        false => format!("{}–{}", format::grouped(figure.from), format::grouped(figure.to)),
    }
}
