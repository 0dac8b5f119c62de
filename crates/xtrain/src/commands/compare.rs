//! `xtrain compare`.

use crate::cli::CompareArgs;
use crate::failure::{Failure, one_line};
use crate::terminal;
use xtrain_report::gap::{COMPARE_FILE, Comparison, LossGap};
use xtrain_report::metrics::format;

pub(crate) fn run(args: &CompareArgs) -> Result<(), Failure> {
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

/// The figures in columns, followed by the notes.
fn text(comparison: &Comparison) -> String {
    let Comparison { baseline, compared, notes, counted_in, last, .. } = comparison;
    let mut rows = vec![
        [
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
        .map(String::from),
    ];
    let mut add = |runs: &[String], recipe: &Option<String>, bar: Option<f64>, all: [&Option<LossGap>; 2]| {
        let is_baseline = rows.len() == 1;
        for (what, figure) in ["training", "validation"].into_iter().zip(all) {
            let is_first = what == "training";
            if figure.is_none() && !is_first {
                continue;
            }
            let of = |of: &dyn Fn(&LossGap) -> Option<String>| {
                figure.as_ref().and_then(of).unwrap_or_else(|| "-".into())
            };
            let inside =
                |inside: Option<bool>| inside.map(|inside| if inside { "inside" } else { "OUTSIDE" });
            let row = [
                if is_first { named(runs) } else { String::new() },
                if is_first { recipe.clone().unwrap_or_else(|| "?".into()) } else { String::new() },
                match figure.as_ref().filter(|f| f.unit != "nats/token") {
                    Some(f) => format!("{what}, {}", f.unit),
                    None => what.into(),
                },
                of(&|f| Some(place(f))),
                of(&|f| Some(format!("{:.4}", f.loss))),
                of(&|f| (!is_baseline).then(|| format!("{:.4}", f.baseline_loss))),
                match is_baseline {
                    true => "baseline".into(),
                    false => of(&|f| Some(gap(f))),
                },
                match is_baseline {
                    true => {
                        of(&|f| f.seed_deviation_percent.map(|deviation| format!("s.d. {deviation:.3}%")))
                    }
                    false => of(&|f| f.seed_spread_percent.map(|spread| format!("±{spread:.3}%"))),
                },
                figure
                    .as_ref()
                    .and_then(|f| inside(f.inside_spread))
                    .filter(|_| !is_baseline)
                    .unwrap_or("")
                    .into(),
                bar.map_or("-".into(), |bar| format!("{bar}%")),
                match figure {
                    Some(f) if bar.is_some() => inside(f.inside_bar).unwrap_or("unclear").into(),
                    _ => String::new(),
                },
            ];
            rows.push(row);
        }
    };
    add(&baseline.runs, &baseline.recipe, None, [&baseline.training, &baseline.validation]);
    for gap in compared {
        add(&gap.runs, &gap.recipe, gap.bar_percent, [&gap.training, &gap.validation]);
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

/// Rows of cells, each column as wide as its widest cell; the first three columns are left-aligned, the
/// others right-aligned.
fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let widths: Vec<usize> =
        (0..N).map(|n| rows.iter().map(|row| row[n].chars().count()).max().unwrap_or(0)).collect();
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
