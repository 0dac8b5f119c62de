//! The section of a report about the experts of a mixture-of-experts model: curves, and loads by block.

use std::fmt::Write;

use super::chart::{Chart, Series, Style};
use super::curves::{View, Views, points_of};
use super::frame::section;
use super::heat::{Cell, HeatMap, Ramp};
use super::history::ExpertFigures;
use super::loads::{Column, Load};
use super::range::axis_of;
use crate::metrics::format;

/// Largest loads over the mean load at the two ends of the colours.
const LOADS: [f64; 2] = [1.0, 3.0];

/// The section of a run with experts.
pub(super) fn experts(out: &mut String, all: &Views<'_>) {
    let [view] = &all.views[..] else { return };
    if view.history.experts.is_empty() {
        return;
    }
    let mut body = "<div class=\"small\">\n".to_owned();
    for chart in charts(all, view) {
        let _ = write!(body, "<div>\n{}</div>\n", chart.html());
    }
    body.push_str("</div>\n");
    if view.history.loads.columns.iter().any(|column| !column.blocks.is_empty()) {
        body += &map(&view.history.loads.columns).html();
    }
    section(out, "Experts", &body);
}

/// Largest load, balance loss and z-loss over the steps, as far as there are finite values.
fn charts(all: &Views<'_>, view: &View<'_>) -> Vec<Chart> {
    let curve = |name: &str, color, figure: fn(&ExpertFigures) -> f64| -> Vec<Series> {
        let experts = view.history.experts.iter();
        let points = experts.map(|m| (m.step as f64 * view.x_per_step, figure(m))).collect();
        all.with_smooth(Series::new(name.to_owned(), Style::Line, color, 0, points))
    };
    let mut loads = curve("worst block", 0, |m| m.worst_load);
    // Without its single reports, which lie among those of the worst block.
    loads.extend(curve("mean block", 1, |m| m.mean_load).pop());
    let of_ranks = curve("worst block", 0, |m| m.rank_load.unwrap_or(f64::NAN));
    let (balance, z_loss) =
        (curve("balance loss", 0, |m| m.balance), curve("router z-loss", 0, |m| m.z_loss));
    let equal = [(0.0, LOADS[0])];
    let axis_of_loads = |loads: &[Series]| {
        axis_of(&points_of(loads), 1000.0)
            .and_then(|_| axis_of(&[points_of(loads), vec![&equal[..]]].concat(), 1000.0))
    };
    let [load_axis, rank_axis] = [&loads, &of_ranks].map(|loads| axis_of_loads(loads));
    let references = || vec![(LOADS[0], "equal loads".to_owned())];
    let balance_axis = axis_of(&points_of(&balance), 1000.0);
    let z_axis = axis_of(&points_of(&z_loss), 1000.0);
    let charts = [
        load_axis.map(|y| {
            let chart =
                all.chart("Largest load", "of an expert", "times the mean load of its block", y, loads);
            Chart { references: references(), ..chart }
        }),
        rank_axis.map(|y| {
            let chart =
                all.chart("Largest load", "of a rank", "times the mean load of the ranks", y, of_ranks);
            Chart { references: references(), ..chart }
        }),
        balance_axis
            .map(|y| all.chart("Balance loss", "mean over blocks", "before its coefficient", y, balance)),
        z_axis.map(|y| all.chart("Router z-loss", "mean over blocks", "before its coefficient", y, z_loss)),
    ];
    charts.into_iter().flatten().collect()
}

/// The largest load of each block over the steps.
fn map(columns: &[Column]) -> HeatMap {
    let mut blocks: Vec<u64> = columns.iter().flat_map(|column| column.blocks.keys().copied()).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let cells = |&block: &u64| {
        columns.iter().map(|column| Some(cell(block, column, *column.blocks.get(&block)?))).collect()
    };
    let [equal, uneven] = LOADS;
    HeatMap {
        title: "Largest load by block",
        unit: "of an expert, over the mean load of the block's experts",
        row_name: "block",
        ends: [format!("{equal:.0}, equal loads"), format!("{uneven:.0} or more")],
        columns: columns
            .iter()
            .map(|column| ("up to step".to_owned(), format::grouped(column.last)))
            .collect(),
        cells: blocks.iter().map(cells).collect(),
        rows: blocks.iter().map(u64::to_string).collect(),
        ramp: Ramp::Concern,
        more: "the pointer shows the steps of each cell",
        note: "A cell is the highest value of the reports of its steps. A question mark: not finite.",
    }
}

fn cell(block: u64, column: &Column, load: Load) -> Cell {
    let [equal, uneven] = LOADS;
    let text = if load.largest.is_finite() { format::significant(load.largest) } else { "?".to_owned() };
    let steps = match [column.first, column.last].map(format::grouped) {
        [first, last] if first == last => format!("step {first}"),
        [first, last] => format!("steps {first} to {last}"),
    };
    let tokens = format::grouped(load.least_tokens);
    let said = format!("block {block}, {steps}: {text}, least used expert {tokens} tokens");
    Cell { heat: (load.largest - equal) / (uneven - equal), text, said }
}
