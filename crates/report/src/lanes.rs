//! A picture of a step's lanes over time, as one SVG file.

use super::axis::Axis;
use super::html::escape;
use crate::metrics::format;
use crate::{ReportError, may_be_replaced, write_whole};
use std::fmt::Write;
use std::path::Path;

/// First line of every picture, and of no other file.
const HEAD: &str = "<!-- Written by xtrain. -->\n";

/// A part of a step, which runs once or several times in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct LanePart {
    /// Its name.
    pub name: String,
    /// Seconds of one time.
    pub seconds: f64,
    /// Its work, in the order of time within a row.
    pub bars: Vec<Bar>,
}

/// A piece of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// The kind of work.
    pub kind: Work,
    /// Bars of one kind and group that follow each other are drawn as one.
    pub group: Option<u32>,
    /// Seconds after the beginning of the part.
    pub begin: f64,
    /// The end.
    pub end: f64,
}

/// Kinds of work, each with a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// The forward.
    Forward,
    /// The backward.
    Backward,
    /// The forward that the backward recomputes.
    Recompute,
    /// The update.
    Update,
    /// Nothing: the kernels wait for communication.
    Exposed,
    /// Weights are gathered.
    Weights,
    /// Gradients are reduced.
    Gradients,
    /// Tokens travel to the experts of other ranks and back.
    Tokens,
    /// Activations travel to the next stage of a pipeline, and gradients back.
    Activations,
    /// Copies of parameters are gathered after the update.
    Copies,
    /// Numbers of the step are gathered.
    Numbers,
}

impl Work {
    const ALL: [Work; 11] = [
        Work::Forward,
        Work::Backward,
        Work::Recompute,
        Work::Update,
        Work::Exposed,
        Work::Weights,
        Work::Gradients,
        Work::Tokens,
        Work::Activations,
        Work::Copies,
        Work::Numbers,
    ];

    /// The class of its colour, and its name in the legend.
    fn look(self) -> (&'static str, &'static str) {
        match self {
            Work::Forward => ("f", "forward"),
            Work::Backward => ("b", "backward"),
            Work::Recompute => ("r", "recomputed forward"),
            Work::Update => ("u", "update"),
            Work::Exposed => ("x", "exposed: kernels wait"),
            Work::Weights => ("w", "weights"),
            Work::Gradients => ("g", "gradients"),
            Work::Tokens => ("t", "tokens"),
            Work::Activations => ("a", "activations"),
            Work::Copies => ("c", "copies after the update"),
            Work::Numbers => ("n", "numbers"),
        }
    }

    /// The row of the part that shows it: 0 for kernels, 1 for communication.
    fn row(self) -> usize {
        let is_exchange = matches!(
            self,
            Work::Weights | Work::Gradients | Work::Tokens | Work::Activations | Work::Copies | Work::Numbers
        );
        usize::from(is_exchange)
    }
}

const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#16191d}.soft{fill:#5a6472}.grid{stroke:#5a6472;stroke-opacity:.3}\
                     .f{fill:#4c8dd6}.b{fill:#1f5fa8}.r{fill:#a9c8ec}.u{fill:#7a5cc0}.x{fill:#e4570e}.w{fill:#0b8f83}.g{fill:#d39a00}\
                     .t{fill:#8a5a2b}.a{fill:#5b9aa0}.c{fill:#7fbf5f}.n{fill:#c2457a}\
                     @media(prefers-color-scheme:dark){text{fill:#e8ecf1}.soft{fill:#96a1b0}}";

/// Width of the picture, and of the names at its left.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 120.0;
/// Height of a row, and of its bars.
const ROW: f64 = 20.0;
const BAR: f64 = 16.0;
/// Height of a part with its name.
const PART: f64 = 3.0 * ROW + 8.0;
/// Bars that are narrower are not drawn.
const NARROWEST: f64 = 0.05;

/// The lanes of a step as SVG: a pair of rows for each part, all on one scale of time.
pub fn lanes(title: &str, parts: &[LanePart]) -> String {
    let (body, height) = body(parts);
    svg(title, &body, height)
}

/// The schedule of a pipeline as SVG, a row for each stage, and below it, on a scale of its own, the parts of
/// the stage that `of` names.
pub fn schedule(title: &str, stages: &[Vec<Bar>], of: &str, parts: &[LanePart]) -> String {
    let seconds = stages.iter().flatten().map(|bar| bar.end).fold(0.0, f64::max);
    let bottom = 24.0 + ROW * stages.len() as f64;
    let (mut out, x) = axis(seconds, bottom);
    for (n, bars) in stages.iter().enumerate() {
        // The row of a kernel is one below the top of a part.
        let top = 24.0 + ROW * (n as f64 - 1.0);
        let _ = writeln!(out, "<text class=\"soft\" x=\"4\" y=\"{:.0}\">stage {n}</text>", top + ROW + 13.0);
        for kind in Work::ALL {
            let path = path(bars, kind, top, &x);
            if !path.is_empty() {
                let _ = writeln!(out, "<path class=\"{}\" d=\"{path}\"/>", kind.look().0);
            }
        }
    }
    let at = bottom + 44.0;
    let (parts, height) = body(parts);
    let _ = write!(
        out,
        "<g transform=\"translate(0 {at:.0})\"><text x=\"4\" y=\"15\">{}</text>\n{parts}</g>\n",
        escape(of)
    );
    svg(title, &out, at + height)
}

/// An axis of so many seconds below `bottom`, and the place of a time on it.
fn axis(seconds: f64, bottom: f64) -> (String, impl Fn(f64) -> f64) {
    let axis = Axis::linear(0.0, 1e3 * seconds, 8);
    let mut out = String::new();
    let ticks = axis.ticks.clone();
    let x = move |seconds: f64| LEFT + (WIDTH - LEFT - 20.0) * axis.place(1e3 * seconds);
    for (ms, label) in &ticks {
        let at = x(ms / 1e3);
        let _ = writeln!(
            out,
            "<path class=\"grid\" d=\"M{at:.1} 24V{bottom:.0}\"/><text class=\"soft\" x=\"{at:.1}\" y=\"{:.0}\" \
             text-anchor=\"middle\">{label}</text>",
            bottom + 16.0
        );
    }
    let _ = writeln!(out, "<text class=\"soft\" x=\"4\" y=\"{:.0}\">milliseconds</text>", bottom + 16.0);
    (out, x)
}

/// The parts of a step, with their axis and legend, and the height of all.
fn body(parts: &[LanePart]) -> (String, f64) {
    let seconds = parts.iter().map(|part| part.seconds).fold(0.0, f64::max);
    let bottom = 24.0 + PART * parts.len() as f64;
    let (mut body, x) = axis(seconds, bottom);
    let mut shown = Vec::new();
    for (n, part) in parts.iter().enumerate() {
        let top = 24.0 + PART * n as f64;
        let length = format::significant(1e3 * part.seconds);
        let _ = writeln!(
            body,
            "<text x=\"{LEFT}\" y=\"{:.0}\">{}, {length} ms</text><text class=\"soft\" x=\"4\" y=\"{:.0}\">kernels</text>\
             <text class=\"soft\" x=\"4\" y=\"{:.0}\">communication</text>",
            top + 15.0,
            escape(&part.name),
            top + ROW + 13.0,
            top + 2.0 * ROW + 13.0
        );
        for kind in Work::ALL {
            let path = path(&part.bars, kind, top, &x);
            if !path.is_empty() {
                shown.push(kind);
                let _ = writeln!(body, "<path class=\"{}\" d=\"{path}\"/>", kind.look().0);
            }
        }
    }
    let mut at = 4.0;
    for kind in Work::ALL.into_iter().filter(|kind| shown.contains(kind)) {
        let (class, name) = kind.look();
        let y = bottom + 30.0;
        let _ = writeln!(
            body,
            "<rect class=\"{class}\" x=\"{at:.0}\" y=\"{y:.0}\" width=\"12\" height=\"12\"/><text x=\"{:.0}\" y=\"{:.0}\">{name}</text>",
            at + 17.0,
            y + 11.0
        );
        at += 30.0 + 7.2 * name.len() as f64;
    }
    (body, bottom + 52.0)
}

/// A picture of this height.
fn svg(title: &str, body: &str, height: f64) -> String {
    format!(
        "{HEAD}<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" role=\"img\">\n\
         <title>{0}</title><style>{STYLE}</style>\n<text x=\"4\" y=\"15\">{0}</text>\n{body}</svg>\n",
        escape(title)
    )
}

/// The bars of one kind as a path of rectangles.
fn path(bars: &[Bar], kind: Work, top: f64, x: impl Fn(f64) -> f64) -> String {
    let mut joined: Vec<(Option<u32>, f64, f64)> = Vec::new();
    for bar in bars.iter().filter(|bar| bar.kind == kind) {
        let (begin, end) = (x(bar.begin), x(bar.end));
        match joined.last_mut() {
            Some((group, _, last)) if *group == bar.group && begin - *last < NARROWEST => *last = end,
            _ => joined.push((bar.group, begin, end)),
        }
    }
    let y = top + ROW * (1 + kind.row()) as f64;
    let mut path = String::new();
    for (_, begin, end) in joined.into_iter().filter(|(_, begin, end)| end - begin >= NARROWEST) {
        // A gap tells neighbours apart where there is room for one.
        let width = if end - begin > 3.0 { end - begin - 0.5 } else { end - begin };
        let _ = write!(path, "M{begin:.1} {y:.0}h{width:.1}v{BAR}h-{width:.1}z");
    }
    path
}

/// Writes a picture to `path`. An existing file is replaced if it is such a picture.
pub fn write_lanes(path: &Path, picture: &str) -> Result<(), ReportError> {
    if !may_be_replaced(path, HEAD)? {
        return Err(ReportError::NotAPicture { path: path.to_owned() });
    }
    write_whole(path, picture)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(kind: Work, group: u32, begin: f64, end: f64) -> Bar {
        Bar { kind, group: Some(group), begin, end }
    }

    #[test]
    fn bars_of_a_group_are_joined_and_rows_are_those_of_their_lanes() {
        let bars = vec![
            bar(Work::Forward, 0, 0.0, 0.1),
            bar(Work::Forward, 0, 0.1, 0.2),
            bar(Work::Forward, 1, 0.2, 0.4),
            bar(Work::Weights, 1, 0.0, 0.2),
        ];
        let part = |name: &str| LanePart { name: name.into(), seconds: 0.4, bars: bars.clone() };
        let svg = lanes("a <step>", &[part("first"), part("last")]);
        assert!(svg.starts_with(HEAD) && svg.ends_with("</svg>\n"), "{svg}");
        assert!(svg.contains("<title>a &lt;step&gt;</title>"));
        let forward: Vec<&str> = svg.lines().filter(|line| line.starts_with("<path class=\"f\"")).collect();
        assert_eq!(forward.len(), 2);
        assert!(forward.iter().all(|path| path.matches('M').count() == 2), "{forward:?}");
        assert!(forward[0].contains(" 44h") && forward[1].contains(" 112h"), "{forward:?}");
        assert!(svg.contains("<path class=\"w\" d=\"M120.0 64h"), "{svg}");
        // The legend has what is shown.
        assert!(svg.contains(">forward</text>") && svg.contains(">weights</text>"), "{svg}");
        assert!(!svg.contains(">update</text>"), "{svg}");
    }

    #[test]
    fn stages_have_a_row_each_above_the_parts_of_one() {
        let stages = [vec![bar(Work::Forward, 0, 0.0, 0.1)], vec![bar(Work::Forward, 0, 0.1, 0.2)]];
        let part = LanePart { name: "forward".into(), seconds: 0.1, bars: stages[0].clone() };
        let svg = schedule("two <stages>", &stages, "the slowest", &[part]);
        assert!(svg.contains("two &lt;stages&gt;<") && svg.contains(">the slowest<"), "{svg}");
        let rows: Vec<&str> = svg.lines().filter(|line| line.starts_with("<path class=\"f\"")).collect();
        let places: Vec<bool> = rows.iter().map(|row| row.contains(" 24h")).collect();
        assert_eq!((places, rows[1].contains(" 44h")), (vec![true, false, false], true), "{rows:?}");
        assert!(svg.contains(">stage 0<") && svg.contains(">stage 1<") && svg.ends_with("</svg>\n"), "{svg}");
    }

    #[test]
    fn a_step_without_time_has_an_axis() {
        let svg = lanes("nothing", &[LanePart { name: "step".into(), seconds: 0.0, bars: Vec::new() }]);
        assert!(svg.contains("step, 0 ms") && !svg.contains("NaN"), "{svg}");
    }
}
