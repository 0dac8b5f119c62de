//! A bar chart of ratios, one a row, with a line at 1 (the peer) and a mark at the target.

use std::fmt::Write;

/// Text with the characters escaped that XML reserves.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// A ratio to be drawn.
pub(crate) struct Ratio {
    pub(crate) label: String,
    pub(crate) ratio: f64,
    /// True if a larger ratio is better.
    pub(crate) more: bool,
    /// The target.
    pub(crate) bar: Option<f64>,
}

const ROW: f64 = 26.0;
const LEFT: f64 = 290.0;
const WIDTH: f64 = 760.0;
/// Space after the longest bar for its number.
const RIGHT: f64 = 60.0;

const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#16191d}.soft{fill:#5a6472}.good{fill:#0b8f83}.bad{fill:#e4570e}\
                     .peer{stroke:#5a6472;stroke-width:1}.bar{stroke:#16191d;stroke-width:2.5}\
                     @media(prefers-color-scheme:dark){text{fill:#e8ecf1}.soft{fill:#96a1b0}.bar{stroke:#e8ecf1}.peer{stroke:#96a1b0}}";

/// The picture as SVG, or `None` without rows.
pub(crate) fn ratios(title: &str, rows: &[Ratio]) -> Option<String> {
    if rows.is_empty() {
        return None;
    }
    let longest = rows.iter().flat_map(|row| [row.ratio, row.bar.unwrap_or(1.0), 1.0]).fold(0.0, f64::max);
    let x = |ratio: f64| LEFT + (WIDTH - LEFT - RIGHT) * ratio / longest;
    let groups = [(true, "more is better"), (false, "less is better")];
    let mut body = String::new();
    let mut y = 0.0;
    for (more, name) in groups {
        let of_group: Vec<&Ratio> = rows.iter().filter(|row| row.more == more).collect();
        if of_group.is_empty() {
            continue;
        }
        let _ =
            writeln!(body, "<text class=\"soft\" x=\"{LEFT}\" y=\"{:.0}\">{name}, peer = 1</text>", y + 17.0);
        y += ROW;
        let top = y;
        for row in of_group {
            let good = if more { row.ratio >= 1.0 } else { row.ratio <= 1.0 };
            let class = if good { "good" } else { "bad" };
            let (middle, end) = (y + 17.0, x(row.ratio));
            let _ = writeln!(
                body,
                "<text x=\"{:.0}\" y=\"{middle:.0}\" text-anchor=\"end\">{}</text><rect class=\"{class}\" x=\"{LEFT}\" y=\"{:.0}\" \
                 width=\"{:.1}\" height=\"16\"/>",
                LEFT - 8.0,
                escape(&row.label),
                y + 4.0,
                end - LEFT
            );
            let mut after = end;
            if let Some(bar) = row.bar {
                let at = x(bar);
                after = after.max(at);
                let (from, to) = (y + 1.0, y + 23.0);
                let _ = writeln!(
                    body,
                    "<line class=\"bar\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{from:.0}\" y2=\"{to:.0}\"/>"
                );
            }
            let _ =
                writeln!(body, "<text x=\"{:.1}\" y=\"{middle:.0}\">{:.2}</text>", after + 6.0, row.ratio);
            y += ROW;
        }
        let one = x(1.0);
        let _ = writeln!(
            body,
            "<line class=\"peer\" x1=\"{one:.1}\" x2=\"{one:.1}\" y1=\"{top:.0}\" y2=\"{y:.0}\"/>"
        );
    }
    Some(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {y:.0}\" width=\"{WIDTH:.0}\" role=\"img\">\n\
         <title>{}</title><style>{STYLE}</style>\n{body}</svg>\n",
        escape(title)
    ))
}
