//! A line chart: SVG curves in a frame of HTML labels.
//!
//! The curves stretch with the page while labels and line widths keep their size, so one chart serves a
//! phone, a wide screen and paper. Values for the reader's pointer are in `data-` attributes of each curve.

use std::fmt::Write;

use super::axis::Axis;
use super::html::escape;
use super::thin::{self, Point};
use crate::metrics::format;

/// Parts of a chart's width that hold at most four points each.
const COLUMNS: usize = 600;
/// Width and height of the drawing in its own units.
const SIZE: f64 = 1000.0;
/// Evaluations up to this number are drawn as dots on their line.
const DOTS: usize = 80;

/// A chart, ready to be drawn.
pub(super) struct Chart {
    pub(super) title: &'static str,
    /// Unit of the y axis.
    pub(super) unit: &'static str,
    /// Quantity on the x axis: `step` or `tokens`.
    pub(super) x_name: &'static str,
    pub(super) x: Axis,
    /// Tokens per step, if the x axis counts steps and can be switched to tokens.
    pub(super) step_tokens: Option<f64>,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// x of steps without an update.
    pub(super) skipped: Vec<f64>,
    /// x of resumes.
    pub(super) resumed: Vec<f64>,
    /// True if the legend explains the vertical lines.
    pub(super) explains_marks: bool,
    /// True if the legend omits dashed curves, because each belongs to a line of its colour.
    pub(super) pairs: bool,
    /// Horizontal lines and what they mean.
    pub(super) references: Vec<(f64, String)>,
    /// Areas behind the curves.
    pub(super) bands: Vec<Band>,
    /// A point to put a ring on.
    pub(super) ring: Option<Point>,
    /// Sentences under the chart.
    pub(super) notes: Vec<String>,
}

/// One curve.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) style: Style,
    /// Index of its colour.
    pub(super) color: usize,
    /// Shade of the colour, which tells runs of one group apart.
    pub(super) tone: usize,
    /// Points, ascending in x.
    pub(super) points: Vec<Point>,
}

/// An area between two curves.
pub(super) struct Band {
    pub(super) name: String,
    /// Index of its colour.
    pub(super) color: usize,
    /// x, ascending, with the lower and the upper end there.
    pub(super) points: Vec<(f64, f64, f64)>,
}

/// Style of a curve.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// A faint line of single values behind their mean.
    Raw,
    /// A line.
    Line,
    /// A dashed line, with a dot at each point if they are few.
    Dashed,
    /// A line with a dot at each of few points.
    Dotted,
}

impl Style {
    fn class(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Line => "line",
            Self::Dashed => "dashed",
            Self::Dotted => "line",
        }
    }
}

/// Number of colours in the style sheet; further curves repeat them.
pub(super) const COLORS: usize = 8;
/// Shades of each colour: further ones start over.
const TONES: usize = 4;
/// Share of the height below which neighbouring horizontal lines share a label, so that labels do not
/// overlap.
const LABEL_HEIGHT: f64 = 0.09;

/// The classes of a colour in one of its shades.
pub(super) fn color_class(color: usize, tone: usize) -> String {
    match tone % TONES {
        0 => format!("c{}", color % COLORS),
        tone => format!("c{} t{tone}", color % COLORS),
    }
}

impl Chart {
    /// The chart as a `figure`.
    pub(super) fn html(&self) -> String {
        let mut out = format!(
            "<figure class=\"chart\" data-x0=\"{}\" data-x1=\"{}\" data-xname=\"{}\"{}>\n",
            self.x.low,
            self.x.high,
            self.x_name,
            self.step_tokens.map(|tokens| format!(" data-tokens=\"{tokens}\"")).unwrap_or_default()
        );
        let _ = writeln!(
            out,
            "<figcaption><h3>{}</h3><span class=\"unit\">{}</span></figcaption>",
            escape(self.title),
            escape(self.unit)
        );
        self.legend(&mut out);
        out.push_str("<div class=\"plot\">\n<div class=\"y\" aria-hidden=\"true\">");
        for (value, label) in &self.y.ticks {
            let _ = write!(out, "<span style=\"bottom:{:.2}%\">{label}</span>", self.y.place(*value) * 100.0);
        }
        out.push_str("</div>\n<div class=\"area\">\n");
        self.drawing(&mut out);
        self.overlays(&mut out);
        out.push_str("</div>\n");
        ticks(&mut out, "by-step", self.x_name, &self.x);
        if let Some(tokens) = self.step_tokens {
            let axis = Axis::whole(self.x.low * tokens, self.x.high * tokens, 5);
            ticks(&mut out, "by-token", "tokens", &axis);
        }
        out.push_str("</div>\n");
        if !self.notes.is_empty() {
            let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(&self.notes.join(" ")));
        }
        out.push_str("</figure>\n");
        out
    }

    fn legend(&self, out: &mut String) {
        if self.series.len() == 1 && self.bands.is_empty() {
            return;
        }
        out.push_str("<ul class=\"legend\">");
        for series in self.series.iter().filter(|series| !(self.pairs && series.style == Style::Dashed)) {
            let last = series.points.iter().rev().map(|point| point.1).find(|value| value.is_finite());
            let last = last
                .filter(|_| series.style != Style::Raw)
                .map(|value| format!(" <b>{}</b>", four_digits(value)))
                .unwrap_or_default();
            let (class, name) = (series.style.class(), escape(&series.name));
            let color = color_class(series.color, series.tone);
            let _ = write!(out, "<li><i class=\"key {class} {color}\"></i>{name}{last}</li>");
        }
        for band in &self.bands {
            let (color, name) = (band.color % COLORS, escape(&band.name));
            let _ = write!(out, "<li><i class=\"key band c{color}\"></i>{name}</li>");
        }
        if self.explains_marks && !self.skipped.is_empty() {
            let _ = write!(out, "<li><i class=\"key skip\"></i>skipped step</li>");
        }
        if self.explains_marks && !self.resumed.is_empty() {
            let _ = write!(out, "<li><i class=\"key resume\"></i>resumed</li>");
        }
        out.push_str("</ul>\n");
    }

    fn drawing(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "<svg viewBox=\"0 0 {SIZE} {SIZE}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">",
            escape(&self.spoken())
        );
        let mut grid = String::new();
        for (value, _) in &self.y.ticks {
            let _ = write!(grid, "M0 {:.1}H{SIZE}", self.down(*value));
        }
        let _ = writeln!(out, "<path class=\"grid\" d=\"{grid}\"/>");
        self.verticals(out, "skip", &self.skipped);
        self.verticals(out, "resume", &self.resumed);
        for band in &self.bands {
            self.band(out, band);
        }
        for (value, _) in &self.references {
            let _ = writeln!(out, "<path class=\"reference\" d=\"M0 {:.1}H{SIZE}\"/>", self.down(*value));
        }
        for series in &self.series {
            self.curve(out, series);
        }
        out.push_str("</svg>\n");
    }

    /// Draws each unbroken piece as an area, along its upper edge and back along the lower one.
    fn band(&self, out: &mut String, band: &Band) {
        let mut path = String::new();
        let is_whole = |p: &(f64, f64, f64)| p.1.is_finite() && p.2.is_finite();
        for piece in band.points.split(|p| !is_whole(p)).filter(|piece| piece.len() > 1) {
            let upper = piece.iter().map(|&(x, _, high)| (x, high));
            let lower = piece.iter().rev().map(|&(x, low, _)| (x, low));
            for (at, (x, y)) in upper.chain(lower).enumerate() {
                let _ = write!(
                    path,
                    "{}{:.1} {:.1}",
                    if at == 0 { "M" } else { " " },
                    self.across(x),
                    self.down(y)
                );
            }
            path.push('Z');
        }
        let _ = writeln!(out, "<path class=\"band c{}\" d=\"{path}\"/>", band.color % COLORS);
    }

    fn curve(&self, out: &mut String, series: &Series) {
        // Values without a place (a logarithm of zero) break the curve like those that are not finite.
        let placed: Vec<Point> = series
            .points
            .iter()
            .map(|&(x, y)| (x, if self.y.place(y).is_nan() { f64::NAN } else { y }))
            .collect();
        let (mut path, mut dots, mut xs, mut ys) =
            (String::new(), String::new(), String::new(), String::new());
        for piece in thin::thin(&placed, COLUMNS) {
            for (at, &(x, y)) in piece.iter().enumerate() {
                let (across, down) = (self.across(x), self.down(y));
                let _ = write!(path, "{}{across:.1} {down:.1}", if at == 0 { "M" } else { " " });
                // A piece of one point would be invisible as a line.
                let has_dots = matches!(series.style, Style::Dashed | Style::Dotted);
                if piece.len() == 1 || has_dots && series.points.len() <= DOTS {
                    let _ = write!(dots, "M{across:.1} {down:.1}h0");
                }
                let comma = if xs.is_empty() { "" } else { "," };
                let _ = write!(xs, "{comma}{x}");
                let _ = write!(ys, "{comma}{}", four_digits(y));
            }
        }
        let (class, name) = (series.style.class(), escape(&series.name));
        let color = color_class(series.color, series.tone);
        let _ = writeln!(
            out,
            "<path class=\"{class} {color}\" d=\"{path}\" data-name=\"{name}\" data-x=\"{xs}\" data-y=\"{ys}\"/>"
        );
        if !dots.is_empty() {
            let _ = writeln!(out, "<path class=\"dots {color}\" d=\"{dots}\"/>");
        }
    }

    /// Draws vertical lines, no two closer than a pixel of a wide screen.
    fn verticals(&self, out: &mut String, class: &str, xs: &[f64]) {
        let mut places: Vec<i64> = xs.iter().map(|&x| self.across(x).round() as i64).collect();
        places.dedup();
        if places.is_empty() {
            return;
        }
        let path: String = places.iter().map(|place| format!("M{place} 0V{SIZE}")).collect();
        let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
    }

    fn overlays(&self, out: &mut String) {
        for (place, label) in self.labels() {
            let _ = writeln!(
                out,
                "<span class=\"reflabel\" style=\"bottom:{:.2}%\">{}</span>",
                place * 100.0,
                escape(&label)
            );
        }
        if let Some((x, y)) = self.ring.filter(|ring| (0.0..=1.0).contains(&self.y.place(ring.1))) {
            let (left, bottom) = (self.x.place(x) * 100.0, self.y.place(y) * 100.0);
            let _ =
                writeln!(out, "<span class=\"ring\" style=\"left:{left:.2}%;bottom:{bottom:.2}%\"></span>");
        }
    }

    /// Labels of the horizontal lines and their places; lines close to each other share one, at the upper.
    fn labels(&self) -> Vec<(f64, String)> {
        let placed = self.references.iter().map(|(value, label)| (self.y.place(*value), label));
        let mut placed: Vec<(f64, &String)> = placed.filter(|(place, _)| place.is_finite()).collect();
        placed.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut labels: Vec<(f64, String)> = Vec::new();
        let mut lowest = f64::INFINITY;
        for (place, label) in placed {
            match labels.last_mut().filter(|_| lowest - place < LABEL_HEIGHT) {
                Some((_, shared)) => *shared += &format!(", {label}"),
                None => labels.push((place, label.clone())),
            }
            lowest = place;
        }
        labels
    }

    /// Description of the chart for screen readers.
    fn spoken(&self) -> String {
        let mut text = format!("{}, {}.", self.title, self.unit);
        for series in self.series.iter().filter(|series| series.style != Style::Raw) {
            let mut finite = series.points.iter().map(|point| point.1).filter(|value| value.is_finite());
            if let Some(first) = finite.next() {
                let last = finite.next_back().unwrap_or(first);
                let _ =
                    write!(text, " {}: from {} to {}.", series.name, four_digits(first), four_digits(last));
            }
        }
        text
    }

    fn across(&self, x: f64) -> f64 {
        self.x.place(x).clamp(0.0, 1.0) * SIZE
    }

    /// A value outside of the axis is drawn just beyond the edge, where it is cut off.
    fn down(&self, y: f64) -> f64 {
        (1.0 - self.y.place(y).clamp(-0.02, 1.02)) * SIZE
    }
}

/// A row of labels under the chart, and its name.
fn ticks(out: &mut String, class: &str, name: &str, axis: &Axis) {
    let _ = write!(out, "<div class=\"x {class}\" aria-hidden=\"true\">");
    for (value, label) in &axis.ticks {
        let _ = write!(out, "<span style=\"left:{:.2}%\">{label}</span>", axis.place(*value) * 100.0);
    }
    let _ = write!(out, "</div>\n<div class=\"xname {class}\" aria-hidden=\"true\">{name}</div>\n");
}

/// A value as the legend and the pointer show it: four or five significant digits.
pub(super) fn four_digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (0.01..10_000.0).contains(&size) => {
            format!("{value:.*}", (3 - size.log10().floor() as i32).max(0) as usize)
        }
        size if (10_000.0..1e15).contains(&size) => format::count(value),
        _ => format!("{value:.3e}"),
    }
}
