//! `xtrain eval`.

use super::{open_model, reopen_model};
use crate::cli::EvalArgs;
use crate::failure::Failure;
use crate::ranks::Place;
use crate::signals::Stop;
use crate::terminal::{self, Bar};
use serde_json::{Value, json};
use std::process::ExitCode;
use xtrain_data::InputOptions;
use xtrain_model::Recipe;
use xtrain_report::metrics::format;
use xtrain_train::eval_data::{EvalProgress, HeldOut, TextLoss, TextOptions};

/// Result in one precision.
struct Evaluated {
    precision: Recipe,
    step: Option<u64>,
    loss: TextLoss,
}

pub(crate) fn run(args: &EvalArgs, place: &Place) -> Result<ExitCode, Failure> {
    if !args.task.is_empty() {
        return super::eval_tasks::run(args, place);
    }
    if args.processes.given().is_some() {
        return Err(Failure::user(
            "only the scores of tasks are shared by several processes; name a --task, or evaluate text with one process",
        ));
    }
    of_text(args)
}

fn of_text(args: &EvalArgs) -> Result<ExitCode, Failure> {
    let mut bar = Bar::default();
    let found = evaluate(args, &mut bar);
    bar.clear();
    let Some(found) = found? else {
        return Ok(terminal::stopped());
    };
    if args.json {
        found.iter().try_for_each(|one| terminal::print_json(&json(one, &found)).map(|_| ()))?;
    } else {
        let _ = terminal::print(&match found.as_slice() {
            [only] => alone(&only.loss),
            _ => table(&found),
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The losses in all precisions on the same tokens; `None` if it is stopped.
fn evaluate(args: &EvalArgs, bar: &mut Bar) -> Result<Option<Vec<Evaluated>>, Failure> {
    let stop = Stop::on_signals()?;
    let options = TextOptions {
        seq_len: args.seq_len,
        batch_size: args.batch_size.into(),
        document_mask: args.document_mask,
        take: args.split.unwrap_or(TextOptions::default().take),
        input: InputOptions {
            whole_rows: false,
            field: args.text_field.clone(),
            separator: args.separator.clone(),
            skip_bad_rows: args.skip_bad_rows,
        },
        cache: args.cache_dir.clone(),
    };
    let mut show = |doing: EvalProgress<'_>| {
        match doing {
            EvalProgress::Tokenizing(path, progress) => bar.tokenizing(&path.to_string_lossy(), progress),
            EvalProgress::Evaluating(done, all) => bar.show("evaluating", done, all),
        }
        stop.check()
    };
    // One model at a time, because memory may hold no second one.
    let precisions = match args.precision.as_slice() {
        [] => vec![None],
        named => named.iter().copied().map(Some).collect(),
    };
    let (mut held_out, mut all) = (None, Vec::new());
    for precision in precisions {
        let mut opened = match held_out {
            None => open_model(&args.model, args.on.device, precision)?,
            Some(_) => reopen_model(&args.model, args.on.device, precision)?,
        };
        let tokens = match held_out.take() {
            Some(tokens) => Some(tokens),
            None if args.data.is_empty() => HeldOut::of_run(&opened, &mut show)?,
            None => HeldOut::of_texts(&opened, &args.data, &options, &mut show)?,
        };
        let Some(tokens) = tokens else { return Ok(None) };
        let Some(loss) = tokens.loss(&mut opened, options.batch_size, &mut show)? else { return Ok(None) };
        all.push(Evaluated { precision: opened.weights.numerics().recipe, step: opened.step, loss });
        held_out = Some(tokens);
    }
    Ok(Some(all))
}

fn json(found: &Evaluated, all: &[Evaluated]) -> Value {
    let loss = &found.loss;
    let mut json = json!({
        "loss": loss.loss, "perplexity": loss.loss.exp(), "bits_per_byte": loss.bits_per_byte(),
        "token_accuracy": loss.token_accuracy, "tokens": loss.tokens, "text_bytes": loss.text_bytes,
        "seq_len": loss.seq_len, "document_mask": loss.document_mask, "step": found.step, "precision": found.precision.name(),
    });
    if all.len() > 1 {
        json["gap_percent"] = json!(100.0 * loss.gap(&all[0].loss));
    }
    json
}

fn alone(found: &TextLoss) -> String {
    let (loss, perplexity) = (found.loss, found.loss.exp());
    let bits_per_byte =
        found.bits_per_byte().map_or(String::new(), |bits| format!("bits per byte  {bits:.4}\n"));
    format!(
        "loss           {loss:.4} nats per token\nperplexity     {perplexity:.3}\n{bits_per_byte}\
         token accuracy {}\n{}",
        format::percent(found.token_accuracy, 2),
        of_tokens(found)
    )
}

/// Description of the evaluated tokens.
fn of_tokens(found: &TextLoss) -> String {
    let tokens = format::grouped(found.tokens as u64);
    format!("tokens         {tokens} in sequences of {}\n", found.seq_len)
}

/// The precisions in rows, with the gap of each loss to the first.
fn table(all: &[Evaluated]) -> String {
    let mut text = format!(
        "{:<13}{:>8}{:>12}{:>15}{:>10}{:>10}\n",
        "precision", "loss", "perplexity", "bits per byte", "accuracy", "gap"
    );
    for (n, Evaluated { precision, loss, .. }) in all.iter().enumerate() {
        let gap = match n {
            0 => String::new(),
            // Avoids a negative zero.
            _ => format!("{:+.3}%", (1e5 * loss.gap(&all[0].loss)).round() / 1e3 + 0.0),
        };
        let bits_per_byte = loss.bits_per_byte().map_or("-".to_owned(), |bits| format!("{bits:.4}"));
        let row = format!(
            "{:<13}{:>8.4}{:>12.3}{bits_per_byte:>15}{:>10}{gap:>10}",
            precision.name(),
            loss.loss,
            loss.loss.exp(),
            format::percent(loss.token_accuracy, 2)
        );
        text += &format!("{}\n", row.trim_end());
    }
    text + &all.first().map(|first| of_tokens(&first.loss)).unwrap_or_default()
}
