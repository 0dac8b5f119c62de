//! `xtrain compare`.

use crate::cli::CompareArgs;
use crate::failure::Failure;
use crate::terminal;
use xtrain_checkpoint::first_few;
use xtrain_report::seed_gap::{COMPARE_FILE, Comparison, GroupRows, Table, TaskSettings};
use xtrain_train::run_file;

pub(crate) fn run(args: &CompareArgs) -> Result<(), Failure> {
    args.baseline.iter().chain(&args.runs).try_for_each(|run| run_file::refuse_as_run(run))?;
    let mut comparison = Comparison::load(&args.baseline, &args.runs, args.last)?;
    comparison
        .compare_tasks(TaskSettings { last_checkpoints: args.last_checkpoints, margin_points: args.margin });
    let path = match &args.page.out {
        Some(path) => path.clone(),
        None => comparison.first_compared().join(COMPARE_FILE),
    };
    comparison.write(&path, args.page.overwrite)?;
    if args.json {
        let mut json = serde_json::to_value(&comparison).unwrap_or_default();
        json["page"] = path.to_string_lossy().into();
        return terminal::print_json(&json).map(|_| ());
    }
    terminal::print(&format!("{}page: {}\n", text(&comparison), terminal::shown_path(&path))).map(|_| ())
}

/// The figures in columns, their legends and the notes.
fn text(comparison: &Comparison) -> String {
    let mut out = table(comparison.table());
    if let Some(tasks) = comparison.task_table() {
        out.push('\n');
        out.push_str(&table(tasks));
    }
    for note in &comparison.notes {
        out.push_str(&format!("note: {}\n", terminal::shown(note)));
    }
    out
}

/// A table in columns, and the lines below it.
fn table(Table { row_name, columns, groups, legend, reasons, .. }: Table) -> String {
    let names = columns.iter().map(|column| column.name.to_owned());
    let mut cells: Vec<Vec<String>> =
        vec![["runs", row_name].map(String::from).into_iter().chain(names).collect()];
    for GroupRows { runs, rows, .. } in groups {
        for (n, (row, of_row)) in rows.into_iter().enumerate() {
            let name = if n == 0 { named(&runs) } else { String::new() };
            let of_row = of_row.into_iter().map(|cell| cell.unwrap_or_else(|| "-".into()));
            cells.push([name, terminal::shown(&row)].into_iter().chain(of_row).collect());
        }
    }
    let is_number = |n: usize| n.checked_sub(2).is_some_and(|n| columns[n].is_number);
    let mut out = aligned(&cells, is_number);
    for [term, meaning] in reasons.into_iter().chain(legend) {
        out.push_str(&format!("{}: {meaning}\n", terminal::shown(&term)));
    }
    out
}

/// Names of runs: the first, and the number of the others if there are many.
fn named(runs: &[String]) -> String {
    let few = if runs.len() > 2 { 1 } else { 2 };
    terminal::shown(&first_few(runs, few))
}

/// Rows of cells, each column as wide as its widest cell. Columns of words are left-aligned, and those of
/// numbers right-aligned.
fn aligned(rows: &[Vec<String>], is_number: impl Fn(usize) -> bool) -> String {
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|n| rows.iter().map(|row| row[n].chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (n, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            let (before, after) = if is_number(n) { (pad.as_str(), "") } else { ("", pad.as_str()) };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}
