//! Prints the rows of a task as lines of JSON, with tokens if a tokenizer is named:
//! `cargo run -p xtrain-data --example task_rows -- TASK [TOKENIZER MAX_TOKENS]`.

use std::io::{self, BufWriter, Write};

use serde_json::{Value, json};
use xtrain_data::Tokenizer;
use xtrain_data::task::{Gold, Task, TaskRow};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, model) = match arguments.as_slice() {
        [task] => (task, None),
        [task, tokenizer, max_tokens] => (task, Some((Tokenizer::load(tokenizer)?, max_tokens.parse()?))),
        _ => return Err("usage: task_rows TASK [TOKENIZER MAX_TOKENS]".into()),
    };
    let task = Task::open(task)?;
    eprintln!("{}", task.describe());
    let summary = task.check()?;
    eprintln!("{summary:?}");
    let mut out = BufWriter::new(io::stdout().lock());
    for row in task.rows()? {
        let row = row?;
        let tokens = match &model {
            Some((tokenizer, max_tokens)) => tokens(&task, tokenizer, &row, *max_tokens),
            None => Value::Null,
        };
        let gold = match &row.gold {
            Gold::Choice(index) => json!(index),
            Gold::Greedy => json!("greedy"),
            Gold::Answer { answer, .. } => json!(answer),
        };
        let requests: Vec<Value> = row
            .requests
            .iter()
            .map(|request| {
                json!({
                    "context": &*request.context,
                    "continuation": request.continuation,
                    "characters": request.characters,
                    "bytes": request.bytes,
                })
            })
            .collect();
        let row = json!({
            "row": row.row,
            "id": row.id,
            "cluster": row.cluster,
            "gold": gold,
            "requests": requests,
            "tokens": tokens,
        });
        writeln!(out, "{row}")?;
    }
    Ok(out.flush()?)
}

/// The requests as tokens, or the error.
fn tokens(task: &Task, tokenizer: &Tokenizer, row: &TaskRow, max_tokens: usize) -> Value {
    match task.encode(tokenizer, row, max_tokens) {
        Ok(encoded) => encoded
            .iter()
            .map(|request| {
                json!({
                    "tokens": request.tokens,
                    "scored": request.scored,
                    "truncated": request.truncated,
                })
            })
            .collect(),
        Err(error) => json!({ "error": error.to_string() }),
    }
}
