//! The frame of every page: head, sections, boxes that scroll, and the end.

use std::fmt::Write;

use super::chart::Chart;
use super::html::escape;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("hover.js");

/// First bytes of every page, and of no other file.
pub(super) const HEAD: &str = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
                               <meta name=\"generator\" content=\"xtrain report\">\n";

/// The start of a page up to its `main`; `maker` appears in the window's title.
pub(super) fn begun(title: &str, maker: &str) -> String {
    let mut out = String::with_capacity(1 << 18);
    let _ = write!(
        out,
        "{HEAD}<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{} – {maker}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        escape(title)
    );
    out
}

/// Closes the page; `source` names what it was written from.
pub(super) fn ended(mut out: String, source: &str) -> String {
    let _ = write!(
        out,
        "<footer>Written by xtrain {} from {source}. This page loads nothing from elsewhere.</footer>\n</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
    out
}

/// A box with a title.
pub(super) fn section(out: &mut String, title: &str, body: &str) {
    let _ = write!(out, "<section class=\"card\">\n<h2>{}</h2>\n{body}</section>\n", escape(title));
}

/// A sentence in small print.
pub(super) fn note(out: &mut String, text: &str) {
    let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(text));
}

/// A box with sentences to notice.
pub(super) fn notice<T: AsRef<str>>(out: &mut String, title: &str, sentences: &[T]) {
    if sentences.is_empty() {
        return;
    }
    let _ = write!(out, "<section class=\"notice\" role=\"note\">\n<h2>{}</h2>\n<ul>", escape(title));
    for sentence in sentences {
        let _ = write!(out, "<li>{}</li>", escape(sentence.as_ref()));
    }
    out.push_str("</ul>\n</section>\n");
}

/// The start of a box that a wide table scrolls in, also with the keyboard.
pub(super) fn table_begun(label: &str, class: &str) -> String {
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\"><table{}>\n",
        escape(label),
        if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") }
    )
}

/// The row of the names of the columns, and the start of the body.
pub(super) fn columns<T: AsRef<str>>(names: &[T]) -> String {
    let cells: String =
        names.iter().map(|name| format!("<th scope=\"col\">{}</th>", escape(name.as_ref()))).collect();
    format!("<thead><tr>{cells}</tr></thead>\n<tbody>\n")
}

pub(super) const TABLE_END: &str = "</tbody>\n</table></div>\n";

/// Selects steps or tokens for the x axes of all following charts, without a script.
pub(super) fn axis_choice(out: &mut String) {
    out.push_str(
        "<span class=\"axis\">Horizontal axis:</span> \
         <input type=\"radio\" name=\"axis\" id=\"axis-step\" class=\"axis\" checked><label class=\"axis\" for=\"axis-step\">Steps</label>\
         <input type=\"radio\" name=\"axis\" id=\"axis-token\" class=\"axis\"><label class=\"axis\" for=\"axis-token\">Tokens</label>\n",
    );
}

/// A chart in a box.
pub(super) fn card(out: &mut String, chart: &Chart) {
    let wide = if chart.is_wide() { " wide" } else { "" };
    let _ = write!(out, "<section class=\"card{wide}\">\n{}</section>\n", chart.html());
}

/// A chart, or two views of it to choose from, without a script.
pub(super) fn views(out: &mut String, whole: &Chart, closer: Option<&Chart>) {
    let Some(closer) = closer else { return out.push_str(&whole.html()) };
    let _ = write!(
        out,
        "<div class=\"tabs\">\n<input type=\"radio\" name=\"loss\" id=\"loss-whole\" checked><label for=\"loss-whole\">Whole range</label>\
         <input type=\"radio\" name=\"loss\" id=\"loss-closer\"><label for=\"loss-closer\">Closer</label>\n\
         <div class=\"pane whole\">{}</div>\n<div class=\"pane closer\">{}</div>\n</div>\n",
        whole.html(),
        closer.html()
    );
}
