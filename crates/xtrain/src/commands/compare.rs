//! `xtrain compare`.

use crate::cli::CompareArgs;
use crate::failure::{Failure, one_line};
use crate::terminal;
use xtrain_report::gap::{COMPARE_FILE, Comparison, LossGap};
use xtrain_report::metrics::format;
use xtrain_train::run_file;

pub(crate) fn run(args: &CompareArgs) -> Result<(), Failure> {
    args.baseline.iter().chain(&args.runs).try_for_each(|run| run_file::refuse_as_run(run))?;
    let comparison = Comparison::load(&args.baseline, &args.runs, args.last)?;
    let path = match &args.page.out {
        Some(path) => path.clone(),
        None => comparison.first_compared().join(COMPARE_FILE),
    };
    comparison.write(&path, args.page.overwrite)?;
    if args.json {
        let mut json = serde_json::to_value(&comparison).unwrap_or_default();
        json["page"] = path.display().to_string().into();
        return terminal::print(&format!("{json}\n")).map(|_| ());
    }
    terminal::print(&format!("{}page: {}\n", text(&comparison), path.display())).map(|_| ())
}

/// Cells of a row of the table.
type Row = [String; 11];

/// The figures in columns, followed by the notes.
fn text(comparison: &Comparison) -> String {
    let Comparison { baseline, compared, notes, counted_in, last, .. } = comparison;
    let head: Row = [
        "runs",
        "recipe",
        "loss of",
        counted_in,
        "loss",
        "baseline",
        "gap",
        "seeds",
        "within seeds",
        "bar",
        "within bar",
    ]
    .map(String::from);
    let mut rows = vec![head];
    let of_baseline = [&baseline.training, &baseline.validation];
    rows.extend(rows_of(&baseline.runs, &baseline.recipe, of_baseline, true, None));
    for gap in compared {
        let of_gap = [&gap.training, &gap.validation];
        rows.extend(rows_of(&gap.runs, &gap.recipe, of_gap, false, gap.bar_percent));
    }
    let mut out = columns(&rows);
    out.push_str(&format!(
        "training: mean over the last {} steps of both\n\
         gap: relative difference of the loss, ± its 95% interval over seeds\n\
         seeds: distance from the baseline within which its other seeds would lie (95%)\n\
         bar: the recipe's tolerance (docs/numerics.md)\n\
         unclear: chance alone could move the gap across the bar; with a single seed, this holds below three times the bar\n",
        format::grouped(*last)
    ));
    for note in notes {
        out.push_str(&format!("note: {}\n", one_line(note)));
    }
    out
}

/// The rows of runs: one for their training loss, and one for their validation loss if they have any. `bar`
/// is the tolerance of their recipe.
fn rows_of(
    runs: &[String],
    recipe: &Option<String>,
    [training, validation]: [&Option<LossGap>; 2],
    is_baseline: bool,
    bar: Option<f64>,
) -> Vec<Row> {
    let first = row("training", training, is_baseline, bar);
    let second = validation.as_ref().map(|_| row("validation", validation, is_baseline, bar));
    let mut rows: Vec<Row> = std::iter::once(first).chain(second).collect();
    rows[0][0] = named(runs);
    rows[0][1] = recipe.clone().unwrap_or_else(|| "?".into());
    rows
}

/// The row of a loss, without the names of its runs and of their recipe.
fn row(of_what: &str, figure: &Option<LossGap>, is_baseline: bool, bar: Option<f64>) -> Row {
    let of =
        |of: &dyn Fn(&LossGap) -> Option<String>| figure.as_ref().and_then(of).unwrap_or_else(|| "-".into());
    let inside = |inside: bool| if inside { "inside" } else { "OUTSIDE" };
    let inside_spread = figure.as_ref().and_then(|f| f.inside_spread).filter(|_| !is_baseline);
    [
        String::new(),
        String::new(),
        match figure.as_ref().filter(|f| f.unit != "nats/token") {
            Some(f) => format!("{of_what}, {}", f.unit),
            None => of_what.into(),
        },
        of(&|f| Some(place(f))),
        of(&|f| Some(format!("{:.4}", f.loss))),
        of(&|f| (!is_baseline).then(|| format!("{:.4}", f.baseline_loss))),
        match is_baseline {
            true => "baseline".into(),
            false => of(&|f| Some(gap(f))),
        },
        match is_baseline {
            true => of(&|f| f.seed_deviation_percent.map(|deviation| format!("s.d. {deviation:.3}%"))),
            false => of(&|f| f.seed_spread_percent.map(|spread| format!("±{spread:.3}%"))),
        },
        inside_spread.map_or("", inside).into(),
        bar.map_or("-".into(), |bar| format!("{bar}%")),
        match figure {
            Some(f) if bar.is_some() => f.inside_bar.map_or("unclear", inside).into(),
            _ => String::new(),
        },
    ]
}

/// Names of runs: the first, and the number of the others if there are many.
fn named(runs: &[String]) -> String {
    let name = match runs {
        [first, _, _, ..] => format!("{first} and {} more", runs.len() - 1),
        few => few.join(", "),
    };
    one_line(&name)
}

fn place(figure: &LossGap) -> String {
    match figure.from == figure.to {
        true => figure.to.to_string(),
        false => format!("{}-{}", figure.from, figure.to),
    }
}

fn gap(figure: &LossGap) -> String {
    let interval = figure.gap_interval_percent.map(|interval| format!(" ±{interval:.3}%"));
    format!("{:+.3}%{}", figure.gap_percent, interval.unwrap_or_default())
}

/// Rows of cells, each column as wide as its widest cell. Columns of words are left-aligned, and those of
/// numbers right-aligned.
fn columns(rows: &[Row]) -> String {
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|n| rows.iter().map(|row| row[n].chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (n, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            let (before, after) =
                if n < 3 || n == 8 || n == 10 { ("", pad.as_str()) } else { (pad.as_str(), "") };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}
