//! A line chart: SVG curves in a frame of HTML labels.
//!
//! The curves stretch with the page while labels and line widths keep their size, so one chart serves a
//! phone, a wide screen and paper. Values for the reader's pointer are in `data-` attributes of each curve.

use std::borrow::Cow;
use std::fmt::Write;

use super::axis::Axis;
use super::html::escape;
use super::marks::{Mark, labels};
use super::thin::{self, Point, SMOOTHED_FROM};
use crate::metrics::format;

/// Parts of a chart's width that hold at most four points each.
const COLUMNS: usize = 600;
/// Width and height of the drawing in its own units.
const SIZE: f64 = 1000.0;
/// Evaluations up to this number are drawn as dots on their line.
const DOTS: usize = 80;
/// Points of other lines up to this number are drawn as dots too. Smoothed curves have more.
const FEW: usize = SMOOTHED_FROM - 1;

/// A chart, ready to be drawn.
pub(super) struct Chart {
    pub(super) title: Cow<'static, str>,
    /// A few words that complete the title.
    pub(super) subtitle: Cow<'static, str>,
    /// Quantity and unit of the y axis.
    pub(super) y_name: Cow<'static, str>,
    /// Unit after each value.
    pub(super) suffix: &'static str,
    /// Quantity on the x axis: `step` or `tokens`.
    pub(super) x_name: &'static str,
    pub(super) x: Axis,
    /// Tokens per step, if the x axis counts steps and can be switched to tokens.
    pub(super) step_tokens: Option<f64>,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// Vertical lines.
    pub(super) marks: Vec<Mark>,
    /// True if the legend omits dashed curves and areas, because each belongs to a line of its colour.
    pub(super) pairs: bool,
    /// Horizontal lines and what they mean.
    pub(super) references: Vec<(f64, String)>,
    /// Areas behind the curves.
    pub(super) bands: Vec<Band>,
    /// A point to put a ring on, and its meaning.
    pub(super) ring: Option<(Point, &'static str)>,
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
    /// Intervals of the points that the pointer shows, if there are any.
    pub(super) intervals: Vec<Option<[f64; 2]>>,
    /// Value beside its name in the legend.
    pub(super) value: LegendValue,
}

/// Value of a curve in the legend.
pub(super) enum LegendValue {
    /// The last one of the curve that is finite.
    Last,
    /// This figure.
    Is(String),
    /// None.
    Absent,
}

impl Series {
    /// A curve with its last value in the legend; single values behind their mean have none there.
    pub(super) fn new(name: String, style: Style, color: usize, tone: usize, points: Vec<Point>) -> Self {
        let value = if style == Style::Raw { LegendValue::Absent } else { LegendValue::Last };
        Series { name, style, color, tone, points, intervals: Vec::new(), value }
    }

    /// The interval of the point at `x`, if it has one.
    fn interval(&self, x: f64) -> Option<[f64; 2]> {
        let at = self.points.partition_point(|point| point.0 < x);
        *self.intervals.get(at)?
    }

    fn last(&self) -> Option<f64> {
        self.points.iter().rev().map(|point| point.1).find(|value| value.is_finite())
    }
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
    /// A line, with a dot at each point if they are very few.
    Line,
    /// A dashed line, with a dot at each point if they are few.
    Dashed,
    /// A line with a dot at each of few points.
    Dotted,
}

impl Style {
    /// Largest number of points that have a dot each.
    fn dots(self) -> usize {
        match self {
            Self::Raw => 0,
            Self::Line => FEW,
            Self::Dashed | Self::Dotted => DOTS,
        }
    }

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
/// Curves of a chart with a legend that fits beside other charts.
const NARROW_CURVES: usize = 8;
/// Part of the height by which a curve may leave the axis before it is cut off.
const MARGIN: f64 = 0.05;

/// The classes of a colour in one of its shades.
pub(super) fn color_class(color: usize, tone: usize) -> String {
    match tone % TONES {
        0 => format!("c{}", color % COLORS),
        tone => format!("c{} t{tone}", color % COLORS),
    }
}

impl Chart {
    /// True if its legend needs the width of the page.
    pub(super) fn is_wide(&self) -> bool {
        self.series.len() > NARROW_CURVES
    }

    /// The chart as a `figure`.
    pub(super) fn html(&self) -> String {
        let mut out = format!(
            "<figure class=\"chart\" data-x0=\"{}\" data-x1=\"{}\" data-xname=\"{}\" data-suffix=\"{}\"{}>\n",
            self.x.low,
            self.x.high,
            self.x_name,
            self.suffix,
            self.step_tokens.map(|tokens| format!(" data-tokens=\"{tokens}\"")).unwrap_or_default()
        );
        let _ = writeln!(
            out,
            "<figcaption><h3>{}</h3><span class=\"unit\">{}</span></figcaption>",
            escape(&self.title),
            escape(&self.subtitle)
        );
        self.legend(&mut out);
        let _ = write!(
            out,
            "<div class=\"plot\">\n<div class=\"yname\" aria-hidden=\"true\">{}</div>\n<div class=\"y\" aria-hidden=\"true\">",
            escape(&self.y_name)
        );
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
        let ring = self.ring.filter(|ring| self.has_place(ring.0));
        let is_alone = self.series.len() == 1 && !self.pairs;
        if is_alone && self.bands.is_empty() && self.marks.is_empty() && ring.is_none() {
            return;
        }
        out.push_str("<ul class=\"legend\">");
        for series in self.series.iter().filter(|series| !(self.pairs && series.style == Style::Dashed)) {
            let value = match &series.value {
                LegendValue::Last => series.last().map(|value| four_digits(value) + self.suffix),
                LegendValue::Is(value) => Some(value.clone()),
                LegendValue::Absent => None,
            };
            let value = value.map(|value| format!(" <b>{}</b>", escape(&value))).unwrap_or_default();
            let (class, name) = (series.style.class(), escape(&series.name));
            let color = color_class(series.color, series.tone);
            let _ = write!(out, "<li><i class=\"key {class} {color}\"></i>{name}{value}</li>");
        }
        for band in self.bands.iter().filter(|_| !self.pairs) {
            let (color, name) = (band.color % COLORS, escape(&band.name));
            let _ = write!(out, "<li><i class=\"key band c{color}\"></i>{name}</li>");
        }
        if let Some((_, name)) = ring {
            let _ = write!(out, "<li><i class=\"key circle\"></i>{name}</li>");
        }
        for Mark { name, class, .. } in &self.marks {
            let _ = write!(out, "<li><i class=\"key {class}\"></i>{name}</li>");
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
        for mark in &self.marks {
            self.verticals(out, mark);
        }
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
                if piece.len() == 1 || series.points.len() <= series.style.dots() {
                    let _ = write!(dots, "M{across:.1} {down:.1}h0");
                }
                let comma = if xs.is_empty() { "" } else { "," };
                let _ = write!(xs, "{comma}{x}");
                let _ = write!(ys, "{comma}{}", with_interval(y, series.interval(x)));
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
    fn verticals(&self, out: &mut String, Mark { class, at, .. }: &Mark) {
        let mut places: Vec<i64> = at.iter().map(|&x| self.across(x).round() as i64).collect();
        places.dedup();
        if places.is_empty() {
            return;
        }
        let path: String = places.iter().map(|place| format!("M{place} 0V{SIZE}")).collect();
        let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
    }

    fn overlays(&self, out: &mut String) {
        let lines = self.references.iter().map(|(value, label)| (self.y.place(*value), label.clone()));
        for (place, label) in labels(lines) {
            let _ = writeln!(
                out,
                "<span class=\"reflabel\" style=\"bottom:{:.2}%\">{}</span>",
                place * 100.0,
                escape(&label)
            );
        }
        if let Some(((x, y), _)) = self.ring.filter(|ring| self.has_place(ring.0)) {
            let (left, bottom) = (self.x.place(x) * 100.0, self.y.place(y) * 100.0);
            let _ =
                writeln!(out, "<span class=\"ring\" style=\"left:{left:.2}%;bottom:{bottom:.2}%\"></span>");
        }
    }

    fn has_place(&self, (_, y): Point) -> bool {
        (0.0..=1.0).contains(&self.y.place(y))
    }

    /// Description of the chart for screen readers.
    fn spoken(&self) -> String {
        let mut text = format!("{}, {}, in {}.", self.title, self.subtitle, self.y_name);
        for series in self.series.iter().filter(|series| series.style != Style::Raw) {
            let first = series.points.iter().map(|point| point.1).find(|value| value.is_finite());
            let _ = match (&series.value, first, series.last()) {
                (LegendValue::Is(value), ..) => write!(text, " {}: {value}.", series.name),
                (LegendValue::Last, Some(first), Some(last)) => {
                    write!(text, " {}: from {} to {}.", series.name, four_digits(first), four_digits(last))
                }
                (LegendValue::Last, ..) => Ok(()),
                (LegendValue::Absent, ..) => write!(text, " {}.", series.name),
            };
        }
        text
    }

    fn across(&self, x: f64) -> f64 {
        self.x.place(x).clamp(0.0, 1.0) * SIZE
    }

    /// A value outside of the axis is drawn beyond the edge, where it is cut off.
    fn down(&self, y: f64) -> f64 {
        (1.0 - self.y.place(y).clamp(-MARGIN, 1.0 + MARGIN)) * SIZE
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

/// A value with its interval, if it has one: `0.4123 (0.3901 to 0.4345)`.
pub(super) fn with_interval(value: f64, interval: Option<[f64; 2]>) -> String {
    match interval.filter(|ends| ends.iter().all(|end| end.is_finite())) {
        Some([low, high]) => {
            format!("{} ({} to {})", four_digits(value), four_digits(low), four_digits(high))
        }
        None => four_digits(value),
    }
}

/// A value as the legend and the pointer show it: four significant digits. Powers of ten have no zeros at the
/// end.
pub(super) fn four_digits(value: f64) -> String {
    let rounded = format!("{value:.3e}");
    let Some((digits, power)) = rounded.split_once('e') else { return value.to_string() };
    match power.parse::<i32>() {
        _ if value == 0.0 => "0".to_owned(),
        Ok(power @ -2..4) => format!("{value:.*}", (3 - power) as usize),
        Ok(4..15) => format::count(value),
        _ => format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.')),
    }
}
