//! Damaged rows and templates end with a result or a line, never with a panic.

mod common;

use common::{Bytes, Random, read};
use serde_json::Value;
use xtrain_chat::{
    ChatError, ChatRow, Literals, MaskOptions, RowFailure, Template, TemplateSettings, Templates, TrainOn,
    encode, parse_row, read_row, recognise, samples,
};

/// Pieces that mutations insert.
const PIECES: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    "'",
    "\\",
    "null",
    "-0",
    "1e999",
    "99999999999999999999",
    "\\ud800",
    "\u{10F8F2}",
    "é",
    "\u{1F469}",
    "{%",
    "%}",
    "{{",
    "}}",
    "{#",
    "#}",
    "-%}",
    "{%-",
    " if ",
    " for x in ",
    " in ",
    "|",
    ".items",
    "[::-1]",
    "|safe",
    "loop",
    "{% generation %}",
    "{% endgeneration %}",
    "{% raw %}",
    "{% endraw %}",
    "(",
    ")",
    "namespace(",
    "<|im_end|>",
    "\r\n",
];

fn mutate(text: &str, random: &mut Random) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for _ in 0..=random.next(4) {
        let at = random.next(chars.len() + 1);
        let end = (at + random.next(12)).min(chars.len());
        match random.next(5) {
            0 => drop(chars.drain(at..end)),
            1 => drop(chars.splice(at..at, PIECES[random.next(PIECES.len())].chars())),
            2 => drop(chars.splice(at..end, PIECES[random.next(PIECES.len())].chars())),
            3 => {
                let copied = chars[at..end].to_vec();
                let to = random.next(chars.len() + 1);
                drop(chars.splice(to..to, copied));
            }
            _ if at < chars.len() => chars[at] = char::from(u8::try_from(random.next(128)).expect("ASCII")),
            _ => chars.push('{'),
        }
    }
    chars.into_iter().collect()
}

/// Replaces, removes or repeats one value inside a row.
fn mutate_value(row: &str, random: &mut Random) -> String {
    let mut row: Value = serde_json::from_str(row).expect("JSON");
    let whole = row.clone();
    mutate_inside(&mut row, &whole, random);
    row.to_string()
}

fn mutate_inside(value: &mut Value, whole: &Value, random: &mut Random) {
    let descends = random.next(6) > 0;
    match value {
        Value::Array(items) if descends && !items.is_empty() => {
            let at = random.next(items.len());
            match random.next(8) {
                0 => drop(items.remove(at)),
                1 => items.insert(at, items[at].clone()),
                2 => items.swap(0, at),
                _ => mutate_inside(&mut items[at], whole, random),
            }
        }
        Value::Object(keys) if descends && !keys.is_empty() => {
            let at = random.next(keys.len());
            mutate_inside(keys.values_mut().nth(at).expect("a value"), whole, random);
        }
        _ => {
            let text = value.as_str().unwrap_or_default().to_owned();
            *value = match random.next(12) {
                0 => Value::Null,
                1 => Value::from(random.next(9)),
                2 => Value::from(1e-7),
                3 => Value::Array(Vec::new()),
                4 => serde_json::json!({}),
                5 => whole.clone(),
                6 => serde_json::json!([{"type": "text", "text": text}]),
                7 => Value::from(true),
                _ => Value::from(mutate(&text, random)),
            };
        }
    }
}

fn one_line(message: &str) {
    assert!(!message.contains(['\n', '\r']) && message.len() < 4000, "{message:?}");
}

fn rows() -> Vec<String> {
    let golden = common::golden("rendered.json");
    let mut rows: Vec<String> =
        golden["conversations"].as_array().expect("rows").iter().map(Value::to_string).collect();
    rows.extend(
        [
            r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": false}]}"#,
            r#"{"conversations": [{"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"}]}"#,
            r#"{"prompt": "a", "completion": "b"}"#,
            r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
            r#"{"instruction": "a", "input": "b", "output": "c", "system": "d"}"#,
            r#"{"text": "a", "messages": null, "tools": "[{}]"}"#,
        ]
        .map(str::to_owned),
    );
    rows
}

#[test]
fn damaged_rows_end_with_a_line() {
    let special = ["<|im_end|>", "<|im_start|>"].map(str::to_owned);
    let options = MaskOptions::new(TrainOn::Assistant, &special[..1], &special).expect("stop tokens");
    let bytes = Bytes { special: special.to_vec(), not_special: Vec::new() };
    let chatml = Templates::chatml(&TemplateSettings::default()).expect("a template");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("chat_template.jinja"), read("templates/tools_xml.jinja"))
        .expect("a file");
    let tools = Templates::of_folder(folder.path(), &TemplateSettings::default()).expect("a template");
    let (rows, mut random) = (rows(), Random(0x5EED_CAFE_F00D));
    let mut counts = [0; 3];
    for _ in 0..10_000 {
        let row = &rows[random.next(rows.len())];
        let line =
            if random.next(2) == 0 { mutate(row, &mut random) } else { mutate_value(row, &mut random) };
        let read = parse_row(&line).and_then(|row| read_row(recognise(&row)?, &row));
        match read {
            Ok(ChatRow::Chat(conversation)) => {
                for templates in [&chatml, &tools] {
                    match samples(&conversation, templates, &options) {
                        Ok(mask) => {
                            mask.samples.iter().for_each(|sample| drop(encode(&bytes, sample).expect("ids")));
                            counts[0] += 1;
                        }
                        Err(error) => {
                            one_line(&error.to_string());
                            counts[1] += 1;
                        }
                    }
                }
            }
            Ok(_) => counts[0] += 1,
            Err(error) => {
                one_line(&error.to_string());
                counts[2] += 1;
            }
        }
    }
    println!("{counts:?}");
    assert!(counts.iter().all(|count| *count > 500), "{counts:?}: all outcomes are seen");
}

#[test]
fn damaged_templates_end_with_a_line() {
    let golden = common::golden("rendered.json");
    let conversations: Vec<_> = (golden["conversations"].as_array().expect("rows").iter())
        .map(|row| common::conversation(row).expect("a conversation"))
        .collect();
    let names: Vec<_> = std::fs::read_dir(common::folder().join("templates")).expect("a folder").collect();
    let mut sources: Vec<String> = names
        .into_iter()
        .map(|entry| std::fs::read_to_string(entry.expect("an entry").path()).expect("a template"))
        .collect();
    sources.sort();
    let literals = Literals::new(["<|im_end|>"]).expect("a name");
    let mut random = Random(0x0BAD_5EED_1234);
    let mut counts = [0; 3];
    for _ in 0..2_000 {
        let source = mutate(&sources[random.next(sources.len())], &mut random);
        let compiled: Result<Template, ChatError> =
            Template::compile(&source, "mutated", &common::settings(&golden, &[]));
        let template = match compiled {
            Ok(template) => template,
            Err(error) => {
                one_line(&error.to_string());
                counts[0] += 1;
                continue;
            }
        };
        let conversation = &conversations[random.next(conversations.len())];
        match template.render(&conversation.messages, conversation.tools.as_deref(), false, &literals) {
            Ok(_) => counts[1] += 1,
            Err(RowFailure::Drop(reason)) => one_line(&reason.to_string()),
            Err(RowFailure::Error(error)) => {
                one_line(&error.to_string());
                counts[2] += 1;
            }
        }
    }
    println!("{counts:?}");
    assert!(counts.iter().all(|count| *count > 50), "{counts:?}: all outcomes are seen");
}
