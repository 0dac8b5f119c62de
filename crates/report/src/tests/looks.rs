//! Readability of pages: labels do not overlap, lines have names, colours have contrast.

use proptest::prelude::*;

use super::markup::{self, Document};
use super::*;
use crate::heat::{Ramp, hex, ink};
use crate::marks::{LABEL_HEIGHT, labels};
use crate::seed_gap::Comparison;

/// Pages of every kind, with a warning, a resume, sources, tasks and experts.
fn pages() -> Vec<String> {
    let mut first = run("a-name-of-a-run-that-is-long-1", 200);
    first.records.push(record(Warning { step: 150, text: "the loss is high".into() }));
    first.records.push(record(Resumed::after(200)));
    for (name, train_loss) in [("books", Some(2.0)), ("web", None)] {
        let (step, loss) = (200, Some(2.5));
        let source = SourceMetrics { step, name: name.into(), train_loss, loss, ..SourceMetrics::default() };
        first.records.push(record(source));
    }
    for step in 1..=200 {
        let (balance, z_loss, blocks) = (2.0, 4.0, vec![0, 1]);
        let (max_load, min_tokens) = (vec![1.5, 1.0 + 1.0 / step as f64], vec![41, 50]);
        let rank_load = max_load.clone();
        let experts = ExpertMetrics { step, balance, z_loss, blocks, max_load, min_tokens, rank_load };
        first.records.push(record(experts));
    }
    first.summary.unigram_entropy = Some(5.0);
    let scored = |mut run: RunData| {
        for (step, value) in [(100, 0.3), (200, 0.4)] {
            run.records.push(record(score(step, "a-task", value)));
        }
        run
    };
    let first = scored(first);
    let others = (2..12).map(|n| scored(run(&format!("a-name-of-a-run-that-is-long-{n}"), 200)));
    let runs: Vec<RunData> = [first.clone()].into_iter().chain(others).collect();
    vec![render(&first), render_all(&runs), Comparison::new(runs, 2, 100).html()]
}

fn read(page: &str) -> Document {
    markup::read(page).unwrap_or_else(|problem| panic!("{problem}"))
}

fn attribute<'a>(attributes: &'a [(String, String)], key: &str) -> &'a str {
    attributes.iter().find(|(name, _)| name == key).map_or("", |(_, value)| value)
}

#[test]
fn pages_have_a_language_a_title_and_boxes_that_the_keyboard_scrolls() {
    for page in pages() {
        let title = page.split("<title>").nth(1).and_then(|rest| rest.split("</title>").next());
        assert!(title.is_some_and(|title| (8..100).contains(&title.len())), "{title:?}");
        let document = read(&page);
        let html = document.tags.iter().find(|(name, _)| name == "html").unwrap();
        assert_eq!(attribute(&html.1, "lang"), "en");
        let boxes = document.tags.iter().filter(|(_, attributes)| attribute(attributes, "class") == "scroll");
        let mut count = 0;
        for (_, attributes) in boxes {
            assert_eq!(attribute(attributes, "tabindex"), "0");
            assert!(!attribute(attributes, "aria-label").is_empty());
            count += 1;
        }
        let wide = page.matches("<table").count() + page.matches("class=\"heat\"").count();
        assert_eq!(count, wide, "every table and heat map scrolls in its own box");
    }
}

#[test]
fn both_axes_of_a_chart_have_names_and_its_legend_names_each_line() {
    for page in pages() {
        let figures: Vec<&str> = page.split("<figure class=\"chart\"").skip(1).collect();
        assert!(figures.len() > 1);
        for figure in figures {
            let figure = figure.split("</figure>").next().unwrap();
            let title = figure.split("<h3>").nth(1).and_then(|rest| rest.split('<').next()).unwrap();
            for name in ["yname", "xname"] {
                let found = figure.split(&format!("<div class=\"{name}")).nth(1).unwrap();
                let text = found.split('>').nth(1).and_then(|rest| rest.split('<').next()).unwrap();
                assert!(!text.is_empty(), "{name} of {title}");
            }
            let lines: Vec<[&str; 2]> = figure
                .split("<path class=\"")
                .skip(1)
                .filter_map(|path| {
                    let name = path.split("data-name=\"").nth(1)?.split('"').next()?;
                    Some([path.split('"').next()?, name])
                })
                .collect();
            let legend = figure.split("<ul class=\"legend\">").nth(1).unwrap_or_default();
            for [class, name] in &lines {
                // A dashed line is named by the line of its colour.
                let base = name.trim_end_matches(", validation");
                let is_named = legend.contains(&format!("\"></i>{base}"));
                assert!(is_named || lines.len() == 1, "{title}: {class} {name} in {legend}");
            }
            for mark in ["skip", "resume", "warn"] {
                let is_drawn = figure.contains(&format!("<path class=\"{mark}\""));
                assert_eq!(is_drawn, legend.contains(&format!("key {mark}\"")), "{title}: {mark}");
            }
        }
    }
}

#[test]
fn a_quantity_is_explained_once() {
    for page in pages() {
        let mut terms: Vec<&str> =
            page.split("<dt>").skip(1).filter_map(|rest| rest.split("</dt>").next()).collect();
        assert!(terms.len() > 3, "{terms:?}");
        let count = terms.len();
        terms.sort_unstable();
        terms.dedup();
        assert_eq!(terms.len(), count, "{terms:?}");
    }
}

#[test]
fn a_point_at_the_edge_of_a_chart_is_not_cut_in_half() {
    let style = include_str!("../style.css");
    let rule = style.lines().find(|line| line.starts_with(".area svg")).unwrap();
    assert!(rule.contains("overflow: visible") && rule.contains("clip-path: inset(-5px)"), "{rule}");
}

/// Relative luminance of `#rgb` or `#rrggbb` (WCAG 2.1).
fn luminance(color: &str) -> f64 {
    let digits = color.strip_prefix('#').unwrap();
    let wide: String =
        if digits.len() == 3 { digits.chars().flat_map(|c| [c, c]).collect() } else { digits.into() };
    let channel = |n: usize| {
        let value = f64::from(u8::from_str_radix(&wide[2 * n..2 * n + 2], 16).unwrap()) / 255.0;
        if value <= 0.03928 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * channel(0) + 0.7152 * channel(1) + 0.0722 * channel(2)
}

fn contrast(one: &str, other: &str) -> f64 {
    let (a, b) = (luminance(one), luminance(other));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[test]
fn text_and_lines_stand_out_in_light_and_dark() {
    let style = include_str!("../style.css");
    let mut themes = 0;
    for theme in style.split(":root {").skip(1).map(|rest| rest.split('}').next().unwrap()) {
        if !theme.contains("--c0") {
            continue;
        }
        themes += 1;
        let color = |name: &str| {
            let found = theme.split(&format!("--{name}: ")).nth(1).and_then(|rest| rest.split(';').next());
            found.unwrap_or_else(|| panic!("--{name} in {theme}"))
        };
        for text in ["text", "soft", "bad"] {
            for ground in ["page", "card", "notice"] {
                let found = contrast(color(text), color(ground));
                assert!(found >= 4.5, "{text} on {ground}: {found:.2}");
            }
        }
        for line in (0..8).map(|n| format!("c{n}")) {
            let found = contrast(color(&line), color("card"));
            assert!(found >= 3.0, "{line}: {found:.2}");
        }
    }
    assert_eq!(themes, 2);
}

#[test]
fn values_stand_out_on_every_colour_of_a_heat_map() {
    let style = include_str!("../style.css");
    for (class, color) in [("dark", "#000"), ("light", "#fff")] {
        let rule = style.lines().find(|line| line.starts_with(&format!(".heat .{class}"))).unwrap();
        assert!(rule.contains(&format!("fill: {color};")), "{rule}");
    }
    for ramp in [Ramp::Concern, Ramp::Amount] {
        for color in (0..=100).map(|heat| ramp.color(f64::from(heat) / 100.0)) {
            let text = if ink(color) == "dark" { "#000" } else { "#fff" };
            let found = contrast(text, &hex(color));
            assert!(found >= 4.5, "{text} on {}: {found:.2}", hex(color));
        }
    }
}

#[test]
fn labels_stand_on_their_lines_where_there_is_room() {
    let line = |place: f64| (place, format!("{place}"));
    let found = labels([line(0.5), line(0.2), line(f64::NAN), line(1.5)]);
    assert_eq!(found, [(0.2, "0.2".to_owned()), (0.5, "0.5".to_owned())]);
    let close = labels([line(0.5), line(0.52)]);
    assert!((close[0].0 + close[1].0 - 1.02).abs() < 1e-12, "they move apart alike: {close:?}");
}

proptest! {
    #[test]
    fn labels_never_overlap(places in prop::collection::vec(0.0f64..=1.0, 0..14)) {
        let found = labels(places.iter().map(|&place| (place, place.to_string())));
        for pair in found.windows(2) {
            prop_assert!(pair[1].0 - pair[0].0 >= LABEL_HEIGHT - 1e-9, "{:?}", found);
        }
        for (place, label) in &found {
            prop_assert!((-1e-9..=1.0 - LABEL_HEIGHT + 1e-9).contains(place), "{:?}", found);
            let line: f64 = label.parse().unwrap();
            prop_assert!((place - line).abs() <= found.len() as f64 * LABEL_HEIGHT, "{:?}", found);
        }
    }
}
