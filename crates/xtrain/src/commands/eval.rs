//! `xtrain eval`.

use super::open_model;
use crate::cli::EvalArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Bar};
use std::io::Write;
use xtrain_data::InputOptions;
use xtrain_train::evaluate::{Doing, TextOptions, text};
use xtrain_train::metrics::format;

pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let mut opened = open_model(&args.model, args.compute.device, args.compute.precision)?;
    let options = TextOptions {
        seq_len: args.seq_len,
        batch_size: args.batch_size.into(),
        document_mask: args.document_mask,
        input: InputOptions { field: args.text_field.clone(), separator: args.separator.clone() },
        cache: args.cache_dir.clone(),
    };
    let mut bar = Bar::default();
    let found = text(&mut opened, &args.data, &options, &mut |doing| {
        match doing {
            Doing::Tokenizing(path, progress) => bar.tokenizing(&path.display().to_string(), progress),
            Doing::Evaluating(done, all) => bar.show("evaluating", done, all),
        }
        stop.go_on()
    });
    bar.clear();
    let Some(found) = found? else {
        // Not among what a program may read from standard output.
        let _ = writeln!(std::io::stderr(), "stopped before the end; there is no result");
        return Ok(());
    };
    let (loss, perplexity, bits_per_byte) = (found.loss, found.loss.exp(), found.bits_per_byte());
    if args.json {
        let json = serde_json::json!({
            "loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte, "tokens": found.tokens,
            "text_bytes": found.text_bytes, "seq_len": found.seq_len, "document_mask": found.document_mask,
            "step": opened.step,
        });
        return terminal::print(&format!("{json}\n")).map(|_| ());
    }
    let text = format!(
        "loss           {loss:.4} nats a token\nperplexity     {perplexity:.3}\nbits per byte  {bits_per_byte:.4}\n\
         tokens         {} in sequences of {}\n",
        format::grouped(found.tokens as u64),
        found.seq_len
    );
    terminal::print(&text).map(|_| ())
}
