//! Trains a model and continues a text with it:
//!
//!     cargo run --release --example train
//!
//! docs/library.md shows what follows.

use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use xtrain::prelude::*;

/// Prints the loss of each step that the run logs.
struct Losses;

impl Observer for Losses {
    fn event(&mut self, event: &Event, steps: u64) {
        if let Event::Step(step) = event {
            println!("step {} of {steps}: loss {:.4}", step.step, step.loss);
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = ["train.steps=50", "train.out=runs/library", "optimizer.lr=3e-3"];
    let run = Config::load("examples/quickstart.toml".as_ref(), &settings)?;
    // Set by a signal handler, for example, it saves the run and ends it.
    let stop = AtomicBool::new(false);
    train(&run, Start::Resume, &stop, &mut Losses)?;

    let mut model = open("runs/library".as_ref(), Which::Latest, Device::Auto, None)?;
    let prompt = model.tokenizer.encode_prompt("pub fn ")?;
    let ends = model.tokenizer.stop_tokens().to_vec();
    let mut generator = Generator::new(&mut model.weights, prompt.len() + 20)?;
    let mut each = |_: GeneratedToken<'_>| ControlFlow::Continue(());
    let sampling = Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 0 };
    let tokens = generator.generate(&mut model.weights, &prompt, 20, sampling, &ends, &mut each)?;
    println!("pub fn {}", model.tokenizer.decode_after(&prompt, &tokens, SpecialTokens::Hide)?);
    Ok(())
}
