//! The text of a run file, with comments on the keys that users change.

use super::found::{Found, FoundData};
use super::size::{Size, interval, shortened};
use std::collections::BTreeSet;
use std::path::Path;
use xtrain_config::Count;
use xtrain_data::{shell_path, string_literal};
use xtrain_report::metrics::format;
use xtrain_step::engine::Processor;

/// Placeholder path of a template.
const NO_TEXT: &str = "data/corpus.txt";

/// Field of `.jsonl` and `.parquet` files that needs no key.
const DEFAULT_FIELD: &str = "text";

/// Batch and learning rate of a model that is trained further.
pub(super) const FURTHER_BATCH_SIZE: u64 = 8;
pub(super) const FURTHER_LR: f64 = 2e-5;

/// Maximum sequence length of a model that is trained further, on a CPU and on a GPU, so that a first run is
/// short.
const FURTHER_SEQ_LEN: (u64, u64) = (512, 2048);

/// The text of the run file `file`, for a model of this size or for the model in `found`.
pub(super) fn run_file(
    found: &Found,
    size: Option<&Size>,
    file: &Path,
    run_tokens: u64,
    processor: &Processor,
) -> String {
    let is_cpu = matches!(processor, Processor::Cpu);
    let (seq_len, batch_size, lr) = match size {
        Some(size) => (size.seq_len(found), size.batch_size, size.lr),
        None => {
            let most = if is_cpu { FURTHER_SEQ_LEN.0 } else { FURTHER_SEQ_LEN.1 };
            let allowed = found.model.as_ref().map_or(most, |(_, hf)| hf.model.context() as u64);
            (shortened(most.min(allowed), found), FURTHER_BATCH_SIZE, FURTHER_LR)
        }
    };
    let steps = run_tokens.div_ceil(seq_len * batch_size);
    let every = interval(steps / 10);
    let held_out = held_out(found);
    let sections = [
        model(found, size),
        data(found, held_out, seq_len),
        optimizer(lr, found.model.is_some()).0,
        train(found, run_tokens, batch_size, steps),
        checked(every, held_out > 0.0 || !found.valid.is_empty()),
        precision(),
    ];
    header(file, "generate", " --prompt \"Once upon a time\"") + &joined(&sections)
}

/// Sections after the header.
pub(super) fn joined(sections: &[String]) -> String {
    sections.iter().map(|section| format!("\n{section}")).collect()
}

/// The comment that begins a file; the model of the run is tried with this command.
pub(super) fn header(file: &Path, verb: &str, options: &str) -> String {
    let name = shell_path(file);
    let run = shell_path(&Path::new("runs").join(file.file_stem().unwrap_or("run".as_ref())));
    format!(
        "# A run file for xtrain. Other keys have their defaults; docs/configuration.md lists all keys.\n\
         #\n\
         #     xtrain plan {name}              memory and time, before anything runs\n\
         #     xtrain train {name}             trains into {run}; --resume continues; --gpus 8 takes 8 GPUs\n\
         #     xtrain {verb} {run}{options}\n\
         #\n\
         # Any key can be changed for one run: xtrain train {name} --set optimizer.lr=1e-3 --out runs/other\n"
    )
}

pub(super) fn model(found: &Found, size: Option<&Size>) -> String {
    let line = Line::under("[model]");
    match (&found.model, size) {
        (Some((folder, hf)), _) => {
            line.key("init_from", string_literal(folder), "its weights, sizes and tokenizer")
                .comment(&format!(
                    "{}.",
                    hf.model.architecture().map_or(String::new(), |model| model.to_string())
                ))
                .0
        }
        (None, Some(size)) => {
            line.key("dim", size.dim, "width; with layers, it determines the size of the model")
                .key("layers", size.layers, "depth; a larger model learns more and takes longer")
                .key("heads", size.heads, "query heads; must divide dim")
                .key("kv_heads", size.kv_heads, "key and value heads; must divide heads")
                .key(
                    "tie_embeddings",
                    true,
                    "shares the embedding with the output head, which saves parameters in a small model",
                )
                .0
        }
        (None, None) => line.0,
    }
}

pub(super) fn data(found: &Found, held_out: f64, seq_len: u64) -> String {
    let named = found.data.iter().chain(&found.valid);
    let fields: BTreeSet<&str> = named.filter_map(|source| source.text_field.as_deref()).collect();
    // A field of all sources is a key of the section, different ones are keys of the sources.
    let common = (fields.len() == 1).then(|| fields.first().copied()).flatten();
    let entry = |source: &FoundData| match &source.text_field {
        Some(field) if common.is_none() && field != DEFAULT_FIELD => {
            format!("{{ path = {}, text_field = {} }}", string_literal(&source.path), string_literal(field))
        }
        _ => string_literal(&source.path),
    };
    let sources = |found: &[FoundData]| match found {
        // A table has its place in a list only.
        [one] if common.is_some() || one.text_field.as_deref().is_none_or(|field| field == DEFAULT_FIELD) => {
            entry(one)
        }
        several => format!("[{}]", several.iter().map(entry).collect::<Vec<_>>().join(", ")),
    };
    let train = if found.data.is_empty() { string_literal(NO_TEXT) } else { sources(&found.data) };
    let what = match (found.data.is_empty(), found.has_shards) {
        (true, _) => {
            "put your text here: .txt, .jsonl or .parquet, a folder, a pattern (\"data/**/*.txt\") or a list"
        }
        (_, true) => "token shards; a list may mix several, with weights",
        _ if found.chat.is_some() => {
            "rows of conversations (docs/chat.md); a list may mix several, with weights"
        }
        _ => "also a folder, a pattern (\"data/**/*.txt\") or a list, with weights",
    };
    let mut line = Line::under("[data]").key("train", train, what);
    if let Some(field) = common.filter(|field| *field != DEFAULT_FIELD) {
        line = line.key("text_field", string_literal(field), "field or column that holds the text");
    }
    if !found.has_shards && found.chat.is_none() {
        line = line.off("separator", "\"<|endoftext|>\"", "separates documents in a .txt file");
    }
    line = match held_out > 0.0 {
        _ if !found.valid.is_empty() => {
            line.key("valid", sources(&found.valid), "validation data; of a folder, its validation split")
        }
        true => line.key("held_out", held_out, "fraction of the text that is held out for validation"),
        false => line.key("held_out", "0.0", "the text is too short to hold out a part for validation"),
    };
    if found.model.is_none() && !found.has_shards {
        line = line
            .key(
                "tokenizer",
                "\"bpe\"",
                "learned from the text; or \"bytes\", \"chars\", a tokenizer.json or its folder",
            )
            .key("bpe_vocab_size", found.bpe_vocab_size, "size of the learned vocabulary");
    }
    let Some(chat) = &found.chat else {
        return line.key("seq_len", seq_len, "context length in tokens").0;
    };
    line = match chat.has_template {
        true => line.off(
            "chat_template",
            "\"chatml\"",
            "instead of the template of the model's folder; or a file",
        ),
        false => line.key(
            "chat_template",
            "\"chatml\"",
            "the model's folder has no template that can be used; or a file",
        ),
    };
    line.key("train_on", "\"assistant\"", "all answers; \"last\": the last one; \"all\": the whole text")
        .key("seq_len", seq_len, "context length in tokens; longer conversations are left out and counted")
        .0
}

pub(super) fn optimizer(lr: f64, is_further: bool) -> Line {
    let why = match is_further {
        true => "low, so that the model forgets little; 1e-5 to 1e-4 are usual",
        false => "peak learning rate; tune this first, by factors of two",
    };
    Line::under("[optimizer]").key("lr", format!("{lr:e}"), why)
}

fn train(found: &Found, run_tokens: u64, batch_size: u64, steps: u64) -> String {
    let passes = found.tokens.filter(|tokens| *tokens > 0).map(|tokens| run_tokens as f64 / tokens as f64);
    let passes = match passes {
        Some(passes) if passes >= 0.95 => format!(", about {} of the text", times(passes)),
        Some(passes) => format!(", about {} of the text", format::percent(passes, 0)),
        None => String::new(),
    };
    let length =
        format!("length of the run: {} steps{passes}; or set steps or epochs", format::grouped(steps));
    Line::under("[train]")
        .key("tokens", string_literal(&Count(run_tokens).to_string()), &length)
        .key("batch_size", batch_size, "sequences per step")
        .key("micro_batch_size", "\"auto\"", "sequences at a time, as memory allows")
        .0
}

/// `1 pass`, `10 passes`.
fn times(passes: f64) -> String {
    let passes = passes.round();
    format!("{passes} {}", if passes == 1.0 { "pass" } else { "passes" })
}

/// Evaluations and checkpoints.
fn checked(every: u64, validates: bool) -> String {
    let mut line = Line::under("[eval]");
    if validates {
        line = line.key("every", every, "steps between evaluations");
    }
    line = line.off("prompts", "[\"Once upon a time\"]", "prompts that the model continues at the end");
    format!("{}\n{}", line.0, saved(every))
}

pub(super) fn saved(every: u64) -> String {
    let why = "steps between checkpoints; --resume continues from the latest";
    Line::under("[checkpoint]").key("every", every, why).0
}

/// The recipe is left out, so that the file suits every device.
pub(super) fn precision() -> String {
    let why = "default: \"bf16\" on a GPU, \"fp32\" on a CPU; FP8 is faster for large models (docs/fp8.md)";
    Line::under("[precision]").off("recipe", "\"fp8-block\"", why).0
}

/// Fraction of the data that is held out.
pub(super) fn held_out(found: &Found) -> f64 {
    match found.tokens {
        _ if !found.valid.is_empty() => 0.0,
        None => 0.005,
        Some(tokens) if tokens >= 2_000_000 => 0.005,
        Some(tokens) if tokens >= 200_000 => 0.02,
        Some(tokens) if tokens >= 2_000 => 0.05,
        Some(_) => 0.0,
    }
}

/// The lines of a section.
pub(super) struct Line(pub(super) String);

impl Line {
    pub(super) fn under(section: &str) -> Line {
        Line(format!("{section}\n"))
    }

    pub(super) fn key(mut self, key: &str, value: impl ToString, comment: &str) -> Line {
        let value = format!("{key} = {}", value.to_string());
        self.0.push_str(&format!("{value:<33}  # {comment}\n"));
        self
    }

    /// A key that is commented out.
    pub(super) fn off(self, key: &str, value: &str, comment: &str) -> Line {
        let value = format!("# {key} = {value}");
        Line(format!("{}{value:<33}  # {comment}\n", self.0))
    }

    fn comment(self, comment: &str) -> Line {
        Line(format!("{}# {comment}\n", self.0))
    }
}
