//! The page of [`Inspection`]: heat maps of the errors of casts, by block and GEMM, and a table of them.

use std::fmt::Write;
use std::path::Path;

use super::{Inspection, TensorCast};
use crate::data::name_of;
use crate::heat::{Cell, HeatMap, Ramp};
use crate::html::escape;
use crate::metrics::format;
use crate::page::{begun, ended, section};
use crate::{ReportError, may_be_replaced, write_whole};

/// The page's name inside a run folder.
pub const INSPECT_FILE: &str = "inspect.html";

/// SQNR in decibels at the two ends of the colours. A cast that only rounds the mantissa has 31.5 dB with
/// E4M3 and 25.5 dB with E5M2.
const DECIBELS: [f64; 2] = [32.0, 14.0];
/// Meaning of these figures.
const ROUNDING_ALONE: &str = "Rounding alone leaves about 31.5 dB in E4M3 and 25.5 dB in E5M2: such a cast loses nothing but bits of the \
                              mantissa, and nothing is wrong. Much less means that the tensor's range does not fit its scale.";
/// Shares at the two ends of the colours, on a logarithmic scale.
const SHARES: [f64; 2] = [1e-5, 1e-1];

/// Writes the page of `inspection` to `path`. An existing file is replaced if xtrain wrote it as a page or
/// `overwrite` is set.
pub fn write_inspection(inspection: &Inspection, path: &Path, overwrite: bool) -> Result<(), ReportError> {
    if !overwrite && !may_be_replaced(path)? {
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
        "<header>\n<p class=\"kind\">What casts to FP8 do to a step</p>\n<h1>{}</h1>\n<ul class=\"chips\"><li>checkpoint of step {}</li>\
         <li>computed in {}</li><li>casts of {}</li><li>loss {loss:.4}</li></ul>\n</header>\n",
        escape(name),
        format::grouped(*step),
        escape(recipe),
        escape(casts)
    );
    let grid = Grid::of(tensors);
    let signal = grid.map("Signal to noise", "dB, of the cast; red is noise", Ramp::Concern, &|t| {
        (heat(t.sqnr_db, DECIBELS), decibels(t.sqnr_db))
    });
    let mut maps = vec![
        HeatMap { note: ROUNDING_ALONE, ..signal },
        grid.map(
            "Underflow",
            "share of the non-zero elements that become zero",
            Ramp::Concern,
            &share_of(|t| t.underflow),
        ),
    ];
    if tensors.iter().any(|t| t.saturation > 0.0) {
        let unit = "share of the non-zero elements beyond the format's largest";
        maps.push(grid.map("Saturation", unit, Ramp::Concern, &share_of(|t| t.saturation)));
    }
    let amaxes = || tensors.iter().map(|t| t.amax).filter(|&amax| amax > 0.0);
    let ends = [amaxes().fold(f64::INFINITY, f64::min).ln(), amaxes().fold(0.0, f64::max).ln()];
    maps.push(grid.map("Amax", "largest absolute value, coloured by its logarithm", Ramp::Amount, &|t| {
        (if t.amax > 0.0 { heat(t.amax.ln(), ends) } else { 0.0 }, short(t.amax))
    }));
    for map in maps {
        let _ = write!(out, "<section class=\"card\">\n{}</section>\n", map.html());
    }
    section(&mut out, "Tensors", &table(tensors));
    ended(out, "a checkpoint and the batch that its run would have seen next")
}

/// Position of each tensor in the maps.
struct Grid<'a> {
    columns: Vec<(String, String)>,
    blocks: Vec<u32>,
    tensors: &'a [TensorCast],
}

impl<'a> Grid<'a> {
    fn of(tensors: &'a [TensorCast]) -> Self {
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
        ramp: Ramp,
        of: &dyn Fn(&TensorCast) -> (f64, String),
    ) -> HeatMap {
        let mut cells = vec![vec![None; self.columns.len()]; self.blocks.len()];
        for tensor in self.tensors {
            let row = self.blocks.iter().position(|&block| block == tensor.block);
            let at = self.columns.iter().position(|name| *name == column(tensor));
            if let (Some(row), Some(at)) = (row, at) {
                let (heat, text) = of(tensor);
                cells[row][at] = Some(Cell { heat, text, said: said(tensor) });
            }
        }
        let rows = self.blocks.iter().map(|block| format!("{block}")).collect();
        HeatMap { title, unit, columns: self.columns.clone(), rows, cells, ramp, note: "" }
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

fn share_of(of: impl Fn(&TensorCast) -> f64) -> impl Fn(&TensorCast) -> (f64, String) {
    move |tensor| match of(tensor) {
        0.0 => (0.0, "0".to_owned()),
        share => (heat(share.ln(), SHARES.map(f64::ln)), percent(share)),
    }
}

/// A percentage that fits into a cell.
fn percent(share: f64) -> String {
    match 100.0 * share {
        percent if percent >= 9.95 => format!("{percent:.0}%"),
        percent if percent >= 0.1 => format!("{percent:.1}%"),
        percent => format!("{percent:.0e}"),
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

fn said(tensor: &TensorCast) -> String {
    let kept = tensor.bf16_reason.as_ref().map(|why| format!("; in bf16: {why}")).unwrap_or_default();
    format!(
        "{}, {}: {} dB, underflow {}, saturation {}, amax {} ({} by {}{kept})",
        tensor.name,
        tensor.operand,
        decibels(tensor.sqnr_db),
        format::percent(tensor.underflow, 3),
        format::percent(tensor.saturation, 3),
        format::significant(tensor.amax),
        tensor.format,
        tensor.scaling
    )
}

fn table(tensors: &[TensorCast]) -> String {
    let mut out = format!(
        "<details>\n<summary>{} casts</summary>\n<div class=\"scroll\"><table>\n<thead><tr><th>GEMM</th><th>Operand</th><th>Cast</th><th>SQNR, dB</th>\
         <th>Underflow</th><th>Saturation</th><th>amax</th><th>Zeros</th><th>Not finite</th><th>In bf16</th></tr></thead>\n<tbody>\n",
        tensors.len()
    );
    for t in tensors {
        let _ = writeln!(
            out,
            "<tr><th><code>{}</code></th><td>{}</td><td>{} by {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
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
    out.push_str("</tbody>\n</table></div>\n</details>\n");
    out
}
