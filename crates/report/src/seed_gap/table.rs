//! Tables of a comparison, and the table of losses: the losses of each group of runs and their gaps to the
//! baseline. The terminal and the page show its cells.
//!
//! Columns that no row has a value for are absent, and so are rows without figures. The answer, the gap and
//! the verdict, comes first, so that a phone shows it.

use std::fmt::Write;

use super::figures::LossGap;
use super::{Comparison, Gap};
use crate::chart::{COLORS, color_class};
use crate::frame::{TABLE_END, columns, table_begun};
use crate::glossary::definitions;
use crate::html::escape;
use crate::metrics::format;
use crate::scores::Finding;

/// A table of figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Its title.
    pub label: &'static str,
    /// Name of the column of the rows' names.
    pub row_name: &'static str,
    /// Columns that are emphasised on the page.
    pub(super) answers: &'static [&'static str],
    /// Names of the columns after those of the runs and of the loss.
    pub columns: Vec<Column>,
    /// The groups of runs, the baseline's first.
    pub groups: Vec<GroupRows>,
    /// Words of the table and what they mean.
    pub legend: Vec<[String; 2]>,
    /// Rows whose verdict is explained, and the explanation.
    pub reasons: Vec<[String; 2]>,
}

/// A column of figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// True for numbers, which are right-aligned.
    pub is_number: bool,
}

/// The rows of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupRows {
    /// Names of its runs.
    pub runs: Vec<String>,
    /// Number of the group, which is that of its colour: the baseline has 0.
    pub(super) number: usize,
    /// Name of each row, with a cell for each column; `None` without a value.
    pub rows: Vec<(String, Vec<Option<String>>)>,
}

/// Cells of one loss, as many as there are columns.
type Cells = [Option<String>; COLUMNS.len()];

/// All columns, and what those mean that are not obvious.
const COLUMNS: [(Column, &str); 9] = [
    (number("gap"), "relative difference of the loss to the baseline's, of the same seeds if it has them"),
    (word("within bar"), ""),
    (number("bar"), "the recipe's tolerance for a higher loss (docs/numerics.md)"),
    (number("spread"), "distance from the baseline within which as many of its other seeds would lie (95%)"),
    (word("within spread"), ""),
    (number("loss"), ""),
    (number("baseline"), ""),
    (number("steps"), ""),
    (word("recipe"), ""),
];

const GAP: usize = 0;
const WITHIN_BAR: usize = 1;
const PLACE: usize = 7;
const UNCLEAR: &str = Finding::Unclear.word();
const OUTSIDE: &str = Finding::Outside.word();

pub(super) const fn number(name: &'static str) -> Column {
    Column { name, is_number: true }
}

pub(super) const fn word(name: &'static str) -> Column {
    Column { name, is_number: false }
}

pub(super) fn table(comparison: &Comparison) -> Table {
    let base = &comparison.baseline;
    let of_base = [base.training.as_ref(), base.validation.as_ref()];
    let mut groups = vec![rows(0, &base.runs, of_base, |figure| of_baseline(figure, base.recipe.as_deref()))];
    for (n, gap) in comparison.compared.iter().enumerate() {
        let Gap { runs, recipe, bar_percent, training, validation, .. } = gap;
        let cells = |figure: &LossGap| of_gap(figure, *bar_percent, recipe.as_deref());
        groups.push(rows(n + 1, runs, [training.as_ref(), validation.as_ref()], cells));
    }
    let all = || groups.iter().flat_map(|group| &group.rows).map(|(_, cells)| cells);
    let shown: Vec<usize> = (0..COLUMNS.len()).filter(|&n| all().any(|cells| cells[n].is_some())).collect();
    let mut legend = vec![[
        "loss of".to_owned(),
        format!(
            "training: mean over the last {} steps of both sides; validation: the last evaluation of all",
            format::grouped(comparison.last)
        ),
    ]];
    let has_gap = comparison.compared.iter().any(|gap| gap.training.is_some() || gap.validation.is_some());
    let has_interval = all().any(|cells| cells[GAP].as_ref().is_some_and(|gap| gap.contains('±')));
    for &n in &shown {
        let (column, meaning) = COLUMNS[n];
        let (term, meaning) = match n {
            GAP if !has_gap => continue,
            GAP if has_interval => (column.name, format!("{meaning}; ± is its 95% interval over seeds")),
            WITHIN_BAR if all().any(|cells| cells[n].as_deref() == Some(UNCLEAR)) => {
                (UNCLEAR, "chance alone could move the gap across the bar; a note says why".to_owned())
            }
            _ if meaning.is_empty() => continue,
            _ => (column.name, meaning.to_owned()),
        };
        legend.push([term.to_owned(), meaning]);
    }
    let column = |&n: &usize| match (n, comparison.counted_in) {
        (PLACE, "tokens") => Column { name: "tokens", ..COLUMNS[n].0 },
        _ => COLUMNS[n].0,
    };
    let columns = shown.iter().map(column).collect();
    for (_, cells) in groups.iter_mut().flat_map(|group| &mut group.rows) {
        *cells = shown.iter().map(|&n| cells[n].take()).collect();
    }
    groups.retain(|group| !group.rows.is_empty());
    Table {
        label: "Losses and gaps",
        row_name: "loss of",
        answers: &[COLUMNS[GAP].0.name],
        columns,
        groups,
        legend,
        reasons: Vec::new(),
    }
}

/// The rows of the losses that a group has.
fn rows(
    number: usize,
    runs: &[String],
    figures: [Option<&LossGap>; 2],
    cells: impl Fn(&LossGap) -> Cells,
) -> GroupRows {
    let named = ["training", "validation"].into_iter().zip(figures);
    let losses = named.filter_map(|(name, figure)| {
        let figure = figure?;
        let name = match figure.unit {
            "bits/byte" => format!("{name}, bits/byte"),
            _ => name.to_owned(),
        };
        Some((name, cells(figure).into()))
    });
    GroupRows { runs: runs.to_vec(), number, rows: losses.collect() }
}

fn of_baseline(figure: &LossGap, recipe: Option<&str>) -> Cells {
    let deviation = figure.seed_deviation_percent.map(|deviation| format!("s.d. {deviation:.3}%"));
    let loss = Some(format!("{:.4}", figure.loss));
    let [place, recipe] = [Some(place(figure)), recipe.map(str::to_owned)];
    [Some("baseline".to_owned()), None, None, deviation, None, loss, None, place, recipe]
}

fn of_gap(figure: &LossGap, bar: Option<f64>, recipe: Option<&str>) -> Cells {
    let inside = |inside: bool| if inside { Finding::Inside.word() } else { OUTSIDE }.to_owned();
    let interval = figure.gap_interval_percent.map(|interval| format!(" ±{interval:.3}%"));
    [
        Some(percent(figure) + &interval.unwrap_or_default()),
        bar.map(|_| figure.inside_bar.map_or_else(|| UNCLEAR.to_owned(), inside)),
        bar.map(|bar| format!("{bar}%")),
        figure.seed_spread_percent.map(|spread| format!("±{spread:.3}%")),
        figure.inside_spread.map(inside),
        Some(format!("{:.4}", figure.loss)),
        Some(format!("{:.4}", figure.baseline_loss)),
        Some(place(figure)),
        recipe.map(str::to_owned),
    ]
}

/// The gap as the table and the legend of its curve show it.
pub(super) fn percent(figure: &LossGap) -> String {
    format!("{:+.3}%", figure.gap_percent)
}

fn place(figure: &LossGap) -> String {
    match figure.from == figure.to {
        true => format::grouped(figure.to),
        false => format!("{}-{}", format::grouped(figure.from), format::grouped(figure.to)),
    }
}

impl Table {
    /// The table and its legend on a page.
    pub(super) fn html(&self) -> String {
        let mut out = table_begun(self.label, "groups");
        let names = self.columns.iter().map(|column| capitalised(column.name));
        out += &columns(
            &["Runs".to_owned(), capitalised(self.row_name)].into_iter().chain(names).collect::<Vec<_>>(),
        );
        for group in &self.groups {
            group.html(&mut out, &self.columns, self.answers);
        }
        out += TABLE_END;
        let legend: Vec<[String; 2]> = self
            .legend
            .iter()
            .map(|[term, meaning]| [capitalised(term), capitalised(meaning) + "."])
            .collect();
        if !self.reasons.is_empty() {
            out += &definitions(&self.reasons);
        }
        out + &definitions(&legend)
    }
}

fn capitalised(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

impl GroupRows {
    fn html(&self, out: &mut String, columns: &[Column], answers: &[&str]) {
        let span = self.rows.len();
        for (n, (name, cells)) in self.rows.iter().enumerate() {
            out.push_str("<tr>");
            if n == 0 {
                let _ = write!(
                    out,
                    "<th scope=\"row\" rowspan=\"{span}\"><i class=\"key line {}\"></i>{}</th>",
                    color_class(self.number, self.number / COLORS),
                    escape(&self.runs.join(", ")),
                );
            }
            let _ = write!(out, "<td>{}</td>", escape(name));
            for (column, cell) in columns.iter().zip(cells) {
                let text = cell.as_deref().unwrap_or("–");
                let is_answer = answers.contains(&column.name) && self.number > 0 || text == OUTSIDE;
                let text = escape(text);
                let _ = match is_answer {
                    true => write!(out, "<td><b>{text}</b></td>"),
                    false => write!(out, "<td>{text}</td>"),
                };
            }
            out.push_str("</tr>\n");
        }
    }
}
