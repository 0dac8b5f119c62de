//! A heat map: coloured cells with values, in grouped columns.

use std::fmt::Write;

use super::html::escape;

/// A heat map, ready to be drawn.
pub(super) struct HeatMap {
    pub(super) title: &'static str,
    /// Quantity and unit of the values.
    pub(super) unit: &'static str,
    /// Name of the rows.
    pub(super) row_name: &'static str,
    /// Values at the two ends of the colours.
    pub(super) ends: [String; 2],
    /// Group and name of each column. The columns of a group are adjacent.
    pub(super) columns: Vec<(String, String)>,
    pub(super) rows: Vec<String>,
    /// Cells by row and column; `None` without a value.
    pub(super) cells: Vec<Vec<Option<Cell>>>,
    pub(super) ramp: Ramp,
    /// A few words for screen readers: where the values are.
    pub(super) more: &'static str,
    /// Sentences under the map.
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
/// Space for the end of the last column's name.
const RIGHT: usize = 44;
/// Space between groups of columns.
const GAP: usize = 10;
/// Width of a character of a group's name, at least.
const CHARACTER: usize = 7;

impl HeatMap {
    /// The map as a `figure`.
    pub(super) fn html(&self) -> String {
        let (lefts, width) = self.lefts();
        let top = self.top();
        let height = top + HIGH * self.rows.len() + 4;
        let colors: Vec<String> = self.ramp.stops().iter().map(|&stop| hex(stop.map(|c| c as u8))).collect();
        let mut out = format!(
            "<figure>\n<figcaption><h3>{}</h3><span class=\"unit\">{}</span></figcaption>\n\
             <p class=\"ramp\">{} <i style=\"background:linear-gradient(90deg,{})\"></i> {}</p>\n\
             <div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">\n\
             <svg class=\"heat\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n",
            escape(self.title),
            escape(self.unit),
            escape(&self.ends[0]),
            colors.join(","),
            escape(&self.ends[1]),
            escape(self.title),
            escape(&format!("{}, {}; {}", self.title, self.unit, self.more))
        );
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" class=\"row\">{}</text>",
            LEFT - 8,
            top - 6,
            escape(self.row_name)
        );
        let mut group = None;
        for ((of, name), left) in self.columns.iter().zip(&lefts) {
            if group != Some(of) {
                let _ = writeln!(out, "<text class=\"group\" x=\"{left}\" y=\"12\">{}</text>", escape(of));
                group = Some(of);
            }
            let (x, y) = (left + WIDE / 2 - 4, top - 6);
            let _ =
                writeln!(out, "<text transform=\"translate({x} {y}) rotate(-35)\">{}</text>", escape(name));
        }
        for (n, (row, cells)) in self.rows.iter().zip(&self.cells).enumerate() {
            let top = top + HIGH * n;
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{}\" class=\"row\">{}</text>",
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
        let color = self.ramp.color(cell.heat);
        let (wide, high) = (WIDE - 2, HIGH - 2);
        let _ = writeln!(
            out,
            "<g><title>{}</title><rect x=\"{left}\" y=\"{top}\" width=\"{wide}\" height=\"{high}\" fill=\"{}\"/>\
             <text x=\"{}\" y=\"{}\" class=\"{}\">{}</text></g>",
            escape(&cell.said),
            hex(color),
            left + wide / 2,
            top + 12,
            ink(color),
            escape(&cell.text)
        );
    }

    /// Height of the names of the columns, which are slanted, and of their groups.
    fn top(&self) -> usize {
        let longest = self.columns.iter().map(|(_, name)| name.chars().count()).max().unwrap_or(0);
        (18 + 5 * longest).max(40)
    }

    /// The left edge of each column, and the width of the map. A group is as wide as its name.
    fn lefts(&self) -> (Vec<usize>, usize) {
        let mut lefts = Vec::new();
        let (mut left, mut name_end) = (LEFT, LEFT);
        let mut group = None;
        for (of, _) in &self.columns {
            if group != Some(of) {
                if group.is_some() {
                    left = (left + GAP).max(name_end);
                }
                name_end = left + CHARACTER * of.chars().count() + GAP;
                group = Some(of);
            }
            lefts.push(left);
            left += WIDE;
        }
        (lefts, (left + RIGHT).max(name_end))
    }
}

/// Class of a text on this colour: black or white, whichever has the greater contrast (WCAG 2.1).
pub(super) fn ink(color: [u8; 3]) -> &'static str {
    let linear = |channel: u8| match f64::from(channel) / 255.0 {
        value if value <= 0.03928 => value / 12.92,
        value => ((value + 0.055) / 1.055).powf(2.4),
    };
    let [r, g, b] = color.map(linear);
    let luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    if (luminance + 0.05).powi(2) > 1.05 * 0.05 { "dark" } else { "light" }
}

pub(super) fn hex([r, g, b]: [u8; 3]) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

impl Ramp {
    fn stops(self) -> &'static [[f64; 3]] {
        match self {
            Ramp::Concern => &[[58.0, 118.0, 175.0], [250.0, 240.0, 180.0], [202.0, 40.0, 40.0]],
            Ramp::Amount => &[[242.0, 240.0, 247.0], [84.0, 39.0, 143.0]],
        }
    }

    pub(super) fn color(self, heat: f64) -> [u8; 3] {
        let stops = self.stops();
        let heat = if heat.is_nan() { 1.0 } else { heat.clamp(0.0, 1.0) };
        let at = heat * (stops.len() - 1) as f64;
        let first = (at as usize).min(stops.len() - 2);
        let part = at - first as f64;
        [0, 1, 2].map(|n| (stops[first][n] + part * (stops[first + 1][n] - stops[first][n])).round() as u8)
    }
}
