//! A heat map: coloured cells with values, in grouped columns.

use std::fmt::Write;

use super::html::escape;

/// A heat map, ready to be drawn.
pub(super) struct HeatMap {
    pub(super) title: &'static str,
    /// Unit of the values and meaning of the colours.
    pub(super) unit: &'static str,
    /// Group and name of each column. The columns of a group are adjacent.
    pub(super) columns: Vec<(String, String)>,
    pub(super) rows: Vec<String>,
    /// Cells by row and column; `None` without a value.
    pub(super) cells: Vec<Vec<Option<Cell>>>,
    pub(super) ramp: Ramp,
    /// A sentence under the map.
    pub(super) note: &'static str,
}

/// A value and its presentation.
#[derive(Clone)]
pub(super) struct Cell {
    /// Colour, from 0 to 1.
    pub(super) heat: f64,
    /// Text in the cell: a few characters.
    pub(super) text: String,
    /// Text for the pointer and for screen readers.
    pub(super) said: String,
}

/// A scale of colours for 0 to 1.
#[derive(Clone, Copy)]
pub(super) enum Ramp {
    /// From good to bad: blue, yellow, red, which colour-blind readers can distinguish.
    Concern,
    /// From little to much.
    Amount,
}

/// Sizes in pixels.
const WIDE: usize = 38;
const HIGH: usize = 18;
const LEFT: usize = 44;
const TOP: usize = 78;
/// Space for the end of the last column's name.
const RIGHT: usize = 44;
/// Space between groups of columns.
const GAP: usize = 10;

impl HeatMap {
    /// The map as a `figure`.
    pub(super) fn html(&self) -> String {
        let lefts = self.lefts();
        let width = lefts.last().map_or(LEFT, |left| left + WIDE) + RIGHT;
        let height = TOP + HIGH * self.rows.len() + 4;
        let mut out = format!(
            "<figure>\n<figcaption><h3>{}</h3><span class=\"unit\">{}</span></figcaption>\n<div class=\"scroll\">\n\
             <svg class=\"heat\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
            escape(self.title),
            escape(self.unit),
            escape(&format!("{}, {}", self.title, self.unit))
        );
        let mut group = None;
        for ((of, name), left) in self.columns.iter().zip(&lefts) {
            if group != Some(of) {
                let _ = writeln!(out, "<text class=\"group\" x=\"{left}\" y=\"12\">{}</text>", escape(of));
                group = Some(of);
            }
            let (x, y) = (left + WIDE / 2 - 4, TOP - 6);
            let _ =
                writeln!(out, "<text transform=\"translate({x} {y}) rotate(-35)\">{}</text>", escape(name));
        }
        for (n, (row, cells)) in self.rows.iter().zip(&self.cells).enumerate() {
            let top = TOP + HIGH * n;
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
                LEFT - 8,
                top + 13,
                escape(row)
            );
            for (cell, left) in cells.iter().zip(&lefts) {
                if let Some(cell) = cell {
                    self.cell(&mut out, cell, *left, top);
                }
            }
        }
        out.push_str("</svg>\n</div>\n");
        if !self.note.is_empty() {
            let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(self.note));
        }
        out.push_str("</figure>\n");
        out
    }

    fn cell(&self, out: &mut String, cell: &Cell, left: usize, top: usize) {
        let [r, g, b] = self.ramp.color(cell.heat);
        let light = 0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b);
        let ink = if light > 140.0 { "#111" } else { "#fff" };
        let (wide, high) = (WIDE - 2, HIGH - 2);
        let _ = writeln!(
            out,
            "<g><title>{}</title><rect x=\"{left}\" y=\"{top}\" width=\"{wide}\" height=\"{high}\" fill=\"#{r:02x}{g:02x}{b:02x}\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" style=\"fill:{ink}\">{}</text></g>",
            escape(&cell.said),
            left + wide / 2,
            top + 12,
            escape(&cell.text)
        );
    }

    /// The left edge of each column.
    fn lefts(&self) -> Vec<usize> {
        let mut left = LEFT;
        let mut group = self.columns.first().map(|(group, _)| group);
        let mut lefts = Vec::new();
        for (of, _) in &self.columns {
            if group != Some(of) {
                left += GAP;
                group = Some(of);
            }
            lefts.push(left);
            left += WIDE;
        }
        lefts
    }
}

impl Ramp {
    fn color(self, heat: f64) -> [u8; 3] {
        let stops: &[[f64; 3]] = match self {
            Ramp::Concern => &[[58.0, 118.0, 175.0], [250.0, 240.0, 180.0], [202.0, 40.0, 40.0]],
            Ramp::Amount => &[[242.0, 240.0, 247.0], [84.0, 39.0, 143.0]],
        };
        let heat = if heat.is_nan() { 1.0 } else { heat.clamp(0.0, 1.0) };
        let at = heat * (stops.len() - 1) as f64;
        let first = (at as usize).min(stops.len() - 2);
        let part = at - first as f64;
        [0, 1, 2].map(|n| (stops[first][n] + part * (stops[first + 1][n] - stops[first][n])).round() as u8)
    }
}
