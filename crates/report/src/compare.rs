//! Several runs side by side: their figures, and the differences of their configurations.

use std::fmt::Write;

use super::chart::COLORS;
use super::curves::View;
use super::figures::{final_training_loss, median, train_seconds};
use super::html::{escape, shortened};
use crate::metrics::format;

/// Longest value of a key that is shown, in bytes.
const VALUE_BYTES: usize = 200;

/// A table with one row a run.
pub(super) fn figures_table(views: &[View<'_>]) -> String {
    let best_of_all =
        views.iter().filter_map(|view| view.history.best_eval()).map(|m| m.loss).min_by(f64::total_cmp);
    let mut out = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th>Run</th><th>Best val. loss</th><th>at step</th><th>Perplexity</th>\
         <th>Last val. loss</th><th>Train. loss</th><th>Steps</th><th>Tokens</th><th>Time</th><th>Tokens/s</th><th>Parameters</th></tr></thead>\n<tbody>\n",
    );
    for view in views {
        let history = &view.history;
        let best = history.best_eval();
        let cells = [
            best.map(|m| m.loss).map(|loss| match Some(loss) == best_of_all {
                true => format!("<b>{loss:.4}</b>"),
                false => format!("{loss:.4}"),
            }),
            best.map(|m| format::grouped(m.step)),
            best.map(|m| format::significant(m.perplexity())),
            history.evals.last().map(|m| format!("{:.4}", m.loss)),
            final_training_loss(&history.steps).map(|(loss, _)| format!("{loss:.4}")),
            Some(format::grouped(history.last_step())),
            history.steps.last().map(|m| format::count(m.tokens as f64)),
            train_seconds(view).map(format::duration),
            median(view, |m| m.tokens_per_second).map(format::count),
            view.run.summary.parameters.map(|parameters| format::count(parameters as f64)),
        ];
        let _ = write!(
            out,
            "<tr><th><i class=\"key line c{}\"></i>{}</th>",
            view.color % COLORS,
            escape(&view.run.name)
        );
        for cell in cells {
            let _ = write!(out, "<td>{}</td>", cell.as_deref().unwrap_or("–"));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
    out
}

/// A table of the keys whose values differ, or a sentence if none does.
pub(super) fn differences(views: &[View<'_>]) -> String {
    let configs: Vec<Option<Vec<(String, String)>>> =
        views.iter().map(|view| flatten(view.run.config.as_deref()?)).collect();
    if configs.iter().flatten().count() < views.len() {
        return "<p>Not every run has a configuration that can be read.</p>\n".to_owned();
    }
    let configs: Vec<Vec<(String, String)>> = configs.into_iter().flatten().collect();
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in configs.iter().flatten() {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let value = |config: &[(String, String)], key: &str| {
        config.iter().find(|(k, _)| k == key).map(|(_, value)| value.clone())
    };
    let rows =
        keys.iter().map(|key| (key, configs.iter().map(|config| value(config, key)).collect::<Vec<_>>()));
    let rows: Vec<_> = rows.filter(|(_, values)| values.windows(2).any(|pair| pair[0] != pair[1])).collect();
    if rows.is_empty() {
        return "<p>Nothing: the configurations are equal.</p>\n".to_owned();
    }
    let mut out = String::from("<div class=\"scroll\"><table class=\"diff\">\n<thead><tr><th>Key</th>");
    for view in views {
        let _ = write!(out, "<th>{}</th>", escape(&view.run.name));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (key, values) in rows {
        let _ = write!(out, "<tr><th><code>{}</code></th>", escape(key));
        for value in values {
            let value = value.map_or("–".to_owned(), |value| shortened(&value, VALUE_BYTES));
            let _ = write!(out, "<td><code>{}</code></td>", escape(&value));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
    out
}

/// The keys of a TOML text, dotted, with their values as written; `None` if the text is not TOML.
fn flatten(text: &str) -> Option<Vec<(String, String)>> {
    fn walk(prefix: &str, table: &toml::Table, out: &mut Vec<(String, String)>) {
        for (key, value) in table {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                toml::Value::Table(inner) => walk(&key, inner, out),
                value => out.push((key, value.to_string())),
            }
        }
    }
    let mut out = Vec::new();
    walk("", &text.parse().ok()?, &mut out);
    Some(out)
}
