//! `xtrain eval`.

use super::open_model;
use crate::cli::EvalArgs;
use crate::failure::Failure;
use crate::terminal;
use std::path::Path;
use std::sync::Arc;
use xtrain_data::{
    Dataset, DocumentMask, InputOptions, TokenStream, Tokenizer, Validation, list_inputs, tokenize_in_memory,
};
use xtrain_model::decoder::Batch;
use xtrain_train::evaluate::Evaluator;
use xtrain_train::metrics::format;

/// Tokens whose logits exist at one time.
const LOSS_CHUNK: usize = 1024;

/// Context where none is asked for, in tokens.
const SEQ_LEN: usize = 1024;

pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    let mut opened = open_model(&args.model)?;
    let limit = opened.weights.model().max_position_embeddings;
    let asked = args.seq_len.unwrap_or(SEQ_LEN.min(limit));
    if asked > limit {
        tracing::warn!("--seq-len exceeds the {limit} tokens of context that the model is meant for");
    }
    let mut streams = Vec::new();
    for path in &args.data {
        streams.push(stream(path, args, &opened.tokenizer)?);
    }
    let vocab_size = opened.weights.model().vocab_size;
    if let Some(wide) = streams.iter().find(|s| s.vocab_size() > vocab_size) {
        return Err(Failure::user(format!(
            "{} has a vocabulary of {}, the model's has {vocab_size}: it was made with another tokenizer",
            wide.name(),
            wide.vocab_size()
        )));
    }
    // Longer sequences and larger batches than the data fills would only take memory.
    let longest = streams.iter().map(|s| s.token_count().saturating_sub(1)).max().unwrap_or(0);
    let seq_len = usize::try_from(longest).map_or(asked, |longest| asked.min(longest.max(1)));
    let validation = Validation::of(streams, seq_len, DocumentMask::Off)?;
    let sequences = validation.window_count().min(args.batch_size.into()) as usize;
    let shape = Batch { sequences, seq_len };
    let evaluator = Evaluator::new(&mut opened.weights, shape, false, LOSS_CHUNK)?;
    let (loss, tokens) = evaluator.mean_loss(&mut opened.weights, &validation)?;
    // Every stream is read whole and knows its text.
    let text_bytes = validation.text_bytes()?.unwrap_or_default();
    let bits_per_byte = loss * tokens as f64 / std::f64::consts::LN_2 / text_bytes.max(1.0);
    if args.json {
        let json = serde_json::json!({
            "loss": loss, "perplexity": loss.exp(), "bits_per_byte": bits_per_byte,
            "tokens": tokens, "text_bytes": text_bytes.round() as u64, "seq_len": seq_len, "step": opened.step,
        });
        return terminal::print(&format!("{json}\n")).map(|_| ());
    }
    let text = format!(
        "loss           {loss:.4} nats a token\nperplexity     {:.3}\nbits per byte  {bits_per_byte:.4}\n\
         tokens         {} in sequences of {seq_len}\n",
        loss.exp(),
        format::grouped(tokens as u64)
    );
    terminal::print(&text).map(|_| ())
}

/// The tokens at `path`.
fn stream(path: &Path, args: &EvalArgs, tokenizer: &Tokenizer) -> Result<Arc<dyn TokenStream>, Failure> {
    if path.join("dataset.json").is_file() {
        let dataset = Dataset::open(path)?;
        if dataset.tokenizer_hash() != tokenizer.hash_hex() {
            return Err(Failure::user(format!(
                "the shards in {} were made with another tokenizer than the model's; name the text, or tokenize it again",
                path.display()
            )));
        }
        if dataset.begin_of_document() != tokenizer.document_begin() {
            return Err(Failure::user(format!(
                "the documents in {} begin with tokens {:?}, those of the model with {:?}; name the text, or tokenize it again",
                path.display(),
                dataset.begin_of_document(),
                tokenizer.document_begin()
            )));
        }
        return Ok(Arc::new(dataset));
    }
    let options = InputOptions { field: args.field.clone(), separator: args.separator.clone() };
    let name = path.display().to_string();
    Ok(Arc::new(tokenize_in_memory(name, &list_inputs(&[path])?, tokenizer, &options)?))
}
