//! The text of a run file that trains a model on conversations.

use super::found::{Found, FoundChat};
use super::size::{CHAT_PASSES, interval};
use super::text::{
    FURTHER_BATCH_SIZE, FURTHER_LR, Line, data, header, held_out, joined, model, optimizer, precision, saved,
};
use std::path::Path;
use xtrain_config::Count;
use xtrain_data::string_literal;
use xtrain_report::metrics::format;

/// Maximum sequence length. Shorter sequences would leave out many conversations.
const SEQ_LEN: u64 = 2048;

/// Steps of warmup in a hundred steps.
const WARMUP_PERCENT: u64 = 3;

/// The key for the length of a run on conversations, whose tokens are not counted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// A number of tokens, for a plan with the time.
    Planned,
    /// As it is written.
    Written,
}

/// The text of the run file `file`.
pub(super) fn run_file(
    found: &Found,
    chat: &FoundChat,
    file: &Path,
    run_tokens: u64,
    length: Length,
) -> String {
    let context = found.model.as_ref().map_or(SEQ_LEN, |(_, hf)| hf.model.context() as u64);
    let seq_len = SEQ_LEN.min(context);
    let steps = run_tokens.div_ceil(seq_len * FURTHER_BATCH_SIZE);
    let every = interval(steps / 10);
    let held_out = held_out(found);
    let optimizer = optimizer(FURTHER_LR, true).key("weight_decay", "0.0", "none: the run is short");
    let sections = [
        model(found, None),
        data(found, held_out, seq_len),
        optimizer.0,
        schedule(steps),
        train(run_tokens, steps, length),
        evaluated(chat, every, held_out > 0.0 || !found.valid.is_empty()),
        saved(every),
        precision(),
    ];
    header(file, "chat", "") + &joined(&sections)
}

fn schedule(steps: u64) -> String {
    let warmup = (steps * WARMUP_PERCENT).div_ceil(100).min(steps.saturating_sub(1));
    Line::under("[schedule]")
        .key("kind", "\"linear\"", "the rate falls in a straight line")
        .key("min_lr_ratio", "0.0", "to zero")
        .key("warmup_steps", warmup, &format!("about {WARMUP_PERCENT}% of the steps"))
        .0
}

fn train(run_tokens: u64, steps: u64, length: Length) -> String {
    let line = Line::under("[train]");
    let line = match length {
        Length::Planned => line.key("tokens", string_literal(&Count(run_tokens).to_string()), ""),
        Length::Written => {
            let noun = if steps == 1 { "step" } else { "steps" };
            let what = format!("passes over the conversations: about {} {noun}", format::grouped(steps));
            line.key("epochs", CHAT_PASSES, &what)
        }
    };
    line.key("batch_size", FURTHER_BATCH_SIZE, "sequences per step, each of several conversations")
        .key("micro_batch_size", "\"auto\"", "sequences at a time, as memory allows")
        .0
}

fn evaluated(chat: &FoundChat, every: u64, validates: bool) -> String {
    let mut line = Line::under("[eval]");
    if validates {
        line = line.key("every", every, "steps between evaluations");
    }
    let why = "questions that the model answers at the end";
    match &chat.question {
        Some(question) => line.key("chats", format!("[{}]", string_literal(question)), why).0,
        None => line.off("chats", "[\"Who are you?\"]", why).0,
    }
}
