//! Measures preparation and loading: `throughput OUT KIND INPUT...`, KIND being `bytes`, a vocabulary size to
//! train, or a tokenizer to load. Prints MB/s (10^6 bytes of input), tokens per second of two epochs, of
//! which the first verifies the blocks, and peak memory (Linux).

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use xtrain_data::{
    Dataset, DocumentMask, InputOptions, Loader, LoaderOptions, MixtureSource, Packing, PrepareOptions,
    TextFiles, TokenStream, Tokenizer, VocabularyKind, learn_for_dataset, list_inputs, prepare,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [out, kind, inputs @ ..] = arguments.as_slice() else {
        return Err("usage: throughput OUT KIND INPUT...".into());
    };
    let inputs = list_inputs(inputs)?;
    let begun = Instant::now();
    let tokenizer = match kind.parse::<usize>() {
        Ok(size) => {
            let texts = [TextFiles { inputs: inputs.clone(), options: InputOptions::default() }];
            let go_on = &mut |_| ControlFlow::Continue(());
            learn_for_dataset(&texts, VocabularyKind::Bpe { size }, Path::new(out), go_on)?
        }
        Err(_) if kind == "bytes" => Tokenizer::bytes(),
        Err(_) => Tokenizer::load(kind)?,
    };
    println!("tokenizer: {} tokens after {:.1} s", tokenizer.vocab_size(), begun.elapsed().as_secs_f64());
    let mut speed = 0.0;
    let options = PrepareOptions::default();
    let dataset = prepare(&inputs, &tokenizer, &options, Path::new(out), &mut |progress| {
        speed = progress.mb_per_s();
        ControlFlow::Continue(())
    })?;
    println!("tokenize: {speed:.1} MB/s, {} tokens", dataset.token_count());
    let begun = Instant::now();
    dataset.verify()?;
    println!("verify: {:.2} s", begun.elapsed().as_secs_f64());
    let stream: Arc<dyn TokenStream> = Arc::new(Dataset::open(out)?);
    let options = LoaderOptions { seq_len: 1024, seed: 0, document_mask: DocumentMask::Off, held_out: None };
    let loader = Loader::new(vec![MixtureSource { stream, weight: 1.0, packing: Packing::Stream }], options)?;
    let windows = loader.windows()[0];
    for epoch in 0..2 {
        let begun = Instant::now();
        for first in (epoch * windows..(epoch + 1) * windows).step_by(8) {
            loader.batch(first, 8)?;
        }
        let rate = loader.epoch_tokens() as f64 / 1e6 / begun.elapsed().as_secs_f64();
        println!("load, epoch {epoch}: {rate:.1} million tokens/s");
    }
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        status.lines().filter(|line| line.starts_with("VmHWM")).for_each(|line| println!("{line}"));
    }
    Ok(())
}
