//! Renders conversations for comparison with transformers (`tests/chat/compare.py`).
//!
//! Reads lines of JSON: `{"template": FILE, "messages": [...], "tools": [...], "kwargs": {...}, "prompt":
//! bool, "stops": [...], "special": [...]}`, and writes a line for each: `{"text", "spans"}` or `{"error"}`;
//! with stops also `{"method", "samples": [{"text", "trained"}]}` or `{"mask_error"}`. Ranges count bytes.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::Path;

use serde_json::{Value, json};
use xtrain_chat::{
    ChatError, ChatRow, MaskOptions, RowFailure, RowFormat, Template, TemplateSettings, Templates, TrainOn,
    parse_row, read_row, samples,
};

fn main() -> std::io::Result<()> {
    let mut compiled: BTreeMap<String, Result<(Template, Templates), ChatError>> = BTreeMap::new();
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let answer = answer(&line?, &mut compiled);
        writeln!(out, "{answer}")?;
    }
    out.flush()
}

fn answer(line: &str, compiled: &mut BTreeMap<String, Result<(Template, Templates), ChatError>>) -> Value {
    let row = match parse_row(line) {
        Ok(row) => row,
        Err(error) => return json!({"error": error.to_string()}),
    };
    let names = |key: &str| -> Vec<String> {
        let list = row.get(key).and_then(Value::as_array).into_iter().flatten();
        list.filter_map(|name| name.as_str().map(str::to_owned)).collect()
    };
    let path = row.get("template").and_then(Value::as_str).unwrap_or_default();
    let kwargs = row.get("kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    let key = format!("{path} {}", Value::Object(kwargs.clone()));
    let today = row.get("today").and_then(Value::as_str).and_then(|day| day.parse().ok()).unwrap_or_default();
    let settings = TemplateSettings { kwargs, today, ..TemplateSettings::default() };
    let loaded = compiled.entry(key).or_insert_with(|| {
        let source = std::fs::read_to_string(path).map_err(|error| ChatError::new(error.to_string(), ""))?;
        let template = Template::compile(&source, path, &settings)?;
        Ok((template, Templates::of_file(Path::new(path), &settings)?))
    });
    let (template, templates) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return json!({"error": error.to_string()}),
    };
    let conversation = match read_row(RowFormat::Messages, &row) {
        Ok(ChatRow::Chat(conversation)) => conversation,
        Ok(_) => return json!({"error": "no conversation"}),
        Err(error) => return json!({"error": error.to_string()}),
    };
    let options = MaskOptions::new(TrainOn::Assistant, &["<no stop>".to_owned()], &names("special"));
    let literals = match &options {
        Ok(options) => options.literals(),
        Err(error) => return json!({"error": error.to_string()}),
    };
    let prompt = row.get("prompt").and_then(Value::as_bool).unwrap_or_default();
    let tools = conversation.tools.as_deref();
    let mut answer = match template.render(&conversation.messages, tools, prompt, literals) {
        Ok(rendering) => {
            let ranges = |ranges: &[std::ops::Range<usize>]| -> Vec<[usize; 2]> {
                ranges.iter().map(|range| [range.start, range.end]).collect()
            };
            json!({"text": rendering.text, "spans": ranges(&rendering.spans)})
        }
        Err(error) => return json!({"error": error.to_string()}),
    };
    let stops = names("stops");
    if !stops.is_empty() {
        let masked = MaskOptions::new(TrainOn::Assistant, &stops, &names("special"))
            .map_err(RowFailure::Error)
            .and_then(|options| samples(&conversation, templates, &options));
        match masked {
            Ok(mask) => {
                let samples = mask.samples.iter().map(|sample| {
                    let trained: Vec<[usize; 2]> =
                        sample.trained.iter().map(|range| [range.start, range.end]).collect();
                    json!({"text": sample.text, "trained": trained})
                });
                answer["method"] = json!(mask.method.to_string());
                answer["samples"] = samples.collect();
            }
            Err(error) => answer["mask_error"] = json!(error.to_string()),
        }
    }
    answer
}
