//! Tokens of texts, for comparison with other programs:
//!
//! ```sh
//! cargo run -p xtrain-data --example encode -- FOLDER < texts.jsonl              # one JSON string per line
//! cargo run -p xtrain-data --example encode -- FOLDER --cut 40 < texts.jsonl     # in pieces of about 40 bytes
//! cargo run -p xtrain-data --example encode -- FOLDER --save COPY < /dev/null    # saves the tokenizer
//! ```
//!
//! The first line of the output has the size of the vocabulary and the rule for cuts; then come the ids of a
//! text in each line.

use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;

use xtrain_data::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| arguments.iter().position(|a| a == name).and_then(|at| arguments.get(at + 1));
    let tokenizer = Tokenizer::load(arguments.first().ok_or("name the tokenizer")?)?;
    if let Some(folder) = option("--save") {
        tokenizer.save(Path::new(folder))?;
    }
    let limit = option("--cut").map(|limit| limit.parse()).transpose()?;
    let mut out = BufWriter::new(io::stdout().lock());
    writeln!(out, "[{}, \"{:?}\"]", tokenizer.vocab_size(), tokenizer.cut_rule())?;
    for line in io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        let ids = match limit {
            Some(limit) => encode_cut(&tokenizer, &text, limit)?,
            None => tokenizer.encode(&text)?,
        };
        writeln!(out, "{ids:?}")?;
    }
    Ok(())
}

/// Encodes pieces of `text` that end at the last safe cut within `limit` bytes, or else at the next one.
fn encode_cut(tokenizer: &Tokenizer, text: &str, limit: usize) -> Result<Vec<u32>, xtrain_data::DataError> {
    let rule = tokenizer.cut_rule();
    let (mut ids, mut rest) = (Vec::new(), text);
    while let Some(at) = rule.last_cut(rest, limit).or_else(|| rule.first_cut(rest, limit)) {
        let (piece, after) = rest.split_at(at);
        ids.extend(tokenizer.encode_piece(piece, rest.len() == text.len())?);
        rest = after;
    }
    ids.extend(tokenizer.encode_piece(rest, rest.len() == text.len())?);
    Ok(ids)
}
