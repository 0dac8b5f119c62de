//! The page of [`Inspection`]: heat maps of the errors of casts, by block and GEMM, and a table of them.

use std::fmt::Write;
use std::path::Path;

use super::{Inspection, TensorCast};
use crate::data::name_of;
use crate::frame::{HEAD, TABLE_END, begun, columns, ended, note, section, table_begun};
use crate::heat::{Cell, HeatMap, Ramp};
use crate::html::escape;
use crate::metrics::format;
use crate::{ReportError, may_be_replaced, write_whole};

/// The page's name inside a run folder.
pub const INSPECT_FILE: &str = "inspect.html";

/// SQNR in decibels at the two ends of the colours. A cast that only rounds the mantissa has 31.5 dB with
/// E4M3 and 25.5 dB with E5M2.
const DECIBELS: [f64; 2] = [32.0, 14.0];
/// Meaning of these figures.
const ROUNDING_ALONE: &str = "SQNR, the signal-to-quantization-noise ratio, is the power of a tensor over the power of its rounding errors. \
                              Rounding alone leaves about 31.5 dB in E4M3 and 25.5 dB in E5M2, and nothing is wrong. Much less means that \
                              the range of the tensor does not fit its scale. A question mark: not finite.";
/// Meaning of the rows and columns.
const CELLS: &str = "A cell is the cast of one operand of a GEMM. Of a layer y = x w^T, fprop computes y, dgrad the gradient of x, and wgrad \
                     the gradient of w; dy is the gradient of y.";
/// Shares at the two ends of the colours, on a logarithmic scale.
const SHARES: [f64; 2] = [1e-5, 1e-1];

/// Writes the page of `inspection` to `path`. An existing file is replaced if xtrain wrote it as a page or
/// `overwrite` is set.
pub fn write_inspection(inspection: &Inspection, path: &Path, overwrite: bool) -> Result<(), ReportError> {
    if !overwrite && !may_be_replaced(path, HEAD)? {
        return Err(ReportError::Taken { path: path.to_owned() });
    }
    write_whole(path, &render(inspection))
}

/// The page.
pub(crate) fn render(inspection: &Inspection) -> String {
    let Inspection { run, step, recipe, casts, loss, tensors } = inspection;
    let name = &name_of(run);
    let title = format!("{name}, step {step}: casts of {casts}");
    let mut out = begun(&title, "xtrain inspect");
    let _ = write!(
        out,
        "<header>\n<p class=\"kind\">FP8 casts of one training step</p>\n<h1>{}</h1>\n<ul class=\"chips\"><li>checkpoint of step {}</li>\
         <li>computed in {}</li><li>casts of {}</li><li>loss {loss:.4}</li></ul>\n",
        escape(name),
        format::grouped(*step),
        escape(recipe),
        escape(casts)
    );
    note(&mut out, CELLS);
    out.push_str("</header>\n");
    if tensors.is_empty() {
        out.push_str("<p class=\"empty\">The step has no casts to FP8.</p>\n");
        return ended(out, SOURCE);
    }
    let grid = Grid::new(tensors);
    let [clean, noisy] = DECIBELS;
    let signal_ends = [format!("{clean:.0} dB or more"), format!("{noisy:.0} dB or less")];
    let signal =
        grid.map("Signal to noise", "SQNR of each cast, in dB", signal_ends, Ramp::Concern, &|t| Shown {
            heat: heat(t.sqnr_db, DECIBELS),
            short: decibels(t.sqnr_db),
            whole: format!("{}{}", decibels(t.sqnr_db), if t.sqnr_db.is_finite() { " dB" } else { "" }),
        });
    let [few, many] = SHARES;
    let share_ends =
        || [format!("{} or less", format::percent(few, 3)), format!("{} or more", format::percent(many, 0))];
    let mut maps = vec![
        HeatMap { note: ROUNDING_ALONE, ..signal },
        grid.map(
            "Underflow",
            "share of the non-zero elements that become zero",
            share_ends(),
            Ramp::Concern,
            &share_of(|t| t.underflow),
        ),
    ];
    if tensors.iter().any(|t| t.saturation > 0.0) {
        let unit = "share of the non-zero elements beyond the format's largest number";
        maps.push(grid.map("Saturation", unit, share_ends(), Ramp::Concern, &share_of(|t| t.saturation)));
    }
    let amaxes = || tensors.iter().map(|t| t.amax).filter(|&amax| amax > 0.0);
    let ends = [amaxes().fold(f64::INFINITY, f64::min), amaxes().fold(0.0, f64::max)];
    let logarithms = ends.map(f64::ln);
    if amaxes().next().is_some() {
        let names = ends.map(format::significant);
        maps.push(grid.map("Amax", "largest absolute value", names, Ramp::Amount, &|t| Shown {
            heat: if t.amax > 0.0 { heat(t.amax.ln(), logarithms) } else { 0.0 },
            short: short(t.amax),
            whole: format::significant(t.amax),
        }));
    }
    for map in maps {
        let _ = write!(out, "<section class=\"card\">\n{}</section>\n", map.html());
    }
    section(&mut out, "All casts", &table(tensors));
    ended(out, SOURCE)
}

const SOURCE: &str = "a checkpoint and the next batch of its run";

/// A figure of a tensor as a cell shows it.
struct Shown {
    /// Place between the ends of the colours.
    heat: f64,
    /// Its text in the cell.
    short: String,
    /// Its text for the pointer.
    whole: String,
}

/// Position of each tensor in the maps.
struct Grid<'a> {
    columns: Vec<(String, String)>,
    blocks: Vec<u32>,
    tensors: &'a [TensorCast],
}

impl<'a> Grid<'a> {
    fn new(tensors: &'a [TensorCast]) -> Self {
        let mut columns: Vec<(String, String)> = Vec::new();
        let mut blocks: Vec<u32> = tensors.iter().map(|t| t.block).collect();
        blocks.sort_unstable();
        blocks.dedup();
        // In the order of the forward, whichever GEMM of a layer comes first.
        for tensor in tensors {
            if !columns.iter().any(|(site, _)| *site == tensor.site) {
                for other in tensors.iter().filter(|other| other.site == tensor.site) {
                    let column = column(other);
                    if !columns.contains(&column) {
                        columns.push(column);
                    }
                }
            }
        }
        Grid { columns, blocks, tensors }
    }

    fn map(
        &self,
        title: &'static str,
        unit: &'static str,
        ends: [String; 2],
        ramp: Ramp,
        of: &dyn Fn(&TensorCast) -> Shown,
    ) -> HeatMap {
        let mut cells = vec![vec![None; self.columns.len()]; self.blocks.len()];
        for tensor in self.tensors {
            let row = self.blocks.iter().position(|&block| block == tensor.block);
            let at = self.columns.iter().position(|name| *name == column(tensor));
            if let (Some(row), Some(at)) = (row, at) {
                let Shown { heat, short, whole } = of(tensor);
                let kept = if tensor.bf16_reason.is_some() { ", but runs in bf16" } else { "" };
                let said = format!("{}, {}: {whole}{kept}", tensor.name, tensor.operand);
                cells[row][at] = Some(Cell { heat, text: short, said });
            }
        }
        let rows = self.blocks.iter().map(|block| format!("{block}")).collect();
        let columns = self.columns.clone();
        let more = "the table has all values";
        HeatMap { title, unit, row_name: "block", ends, columns, rows, cells, ramp, more, note: "" }
    }
}

/// Name of a column: site, GEMM and operand.
fn column(tensor: &TensorCast) -> (String, String) {
    let operand = if tensor.operand == "output gradient" { "dy" } else { tensor.operand };
    (tensor.site.clone(), format!("{} {operand}", tensor.gemm))
}

fn heat(value: f64, [none, full]: [f64; 2]) -> f64 {
    (value - none) / (full - none)
}

fn share_of(of: impl Fn(&TensorCast) -> f64) -> impl Fn(&TensorCast) -> Shown {
    move |tensor| {
        let share = of(tensor);
        Shown {
            heat: if share == 0.0 { 0.0 } else { heat(share.ln(), SHARES.map(f64::ln)) },
            short: percent(share),
            whole: format::percent(share, 4),
        }
    }
}

/// A percentage that fits into a cell.
fn percent(share: f64) -> String {
    match 100.0 * share {
        0.0 => "0".to_owned(),
        percent if percent >= 9.95 => format!("{percent:.0}%"),
        percent if percent >= 0.095 => format!("{percent:.1}%"),
        percent if percent >= 0.0095 => format!("{percent:.2}%"),
        percent if percent > 0.0 => "<.01%".to_owned(),
        _ => "?".to_owned(),
    }
}

fn short(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        _ if (0.01..1000.0).contains(&value) => format::significant(value),
        _ => format!("{value:.0e}"),
    }
}

fn decibels(value: f64) -> String {
    match value {
        f64::INFINITY => "exact".to_owned(),
        value if value.is_nan() => "?".to_owned(),
        value => format!("{value:.1}"),
    }
}

fn table(tensors: &[TensorCast]) -> String {
    let mut out = format!("<details>\n<summary>{} casts</summary>\n", tensors.len());
    out += &table_begun("All casts", "");
    out += &columns(&[
        "GEMM",
        "Operand",
        "Format and scale",
        "SQNR, dB",
        "Underflow",
        "Saturation",
        "Amax",
        "Zeros",
        "Not finite",
        "Runs in bf16 because",
    ]);
    for t in tensors {
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\"><code>{}</code></th><td>{}</td><td>{} per {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&t.name),
            t.operand,
            escape(&t.format),
            t.scaling,
            decibels(t.sqnr_db),
            format::percent(t.underflow, 4),
            format::percent(t.saturation, 4),
            format::significant(t.amax),
            format::percent(t.zeros, 2),
            format::grouped(t.not_finite),
            escape(t.bf16_reason.as_deref().unwrap_or("–"))
        );
    }
    out + TABLE_END + "</details>\n"
}
