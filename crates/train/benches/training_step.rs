//! Seconds of the preparation and of each training step of a small model, on the GPU that NVIDIA's libraries
//! offer. `tests/emulated/run.sh speed` runs it on the emulated one.

use std::error::Error;
use std::path::Path;
use std::time::Instant;
use xtrain_config::Config;
use xtrain_runtime::Checks;
use xtrain_step::engine::{Processor, Target};
use xtrain_step::learner::Learner;
use xtrain_step::random_batch::random_batch;
use xtrain_train::spec::plan_on;

/// A model of four layers of width 128, in bf16.
const RUN: &str = "
    [model]
    dim = 128
    layers = 4
    heads = 2
    [data]
    train = 'none.txt'
    tokenizer = 'bytes'
    seq_len = 128
    [optimizer]
    lr = 1e-3
    [train]
    steps = 3
    batch_size = 4
    device = 'cuda'
";

/// The preparation, which compiles kernels and chooses algorithms, and three steps: the second records
/// graphs, the third replays them.
fn main() -> Result<(), Box<dyn Error>> {
    let parsed = Config::parse::<&str>(Path::new("run.toml"), RUN.as_bytes(), &[])?;
    let planned = plan_on(&parsed, Target::Cuda)?;
    let engine = Processor::for_config(&parsed.config)?.engine(Checks::default())?;
    let begun = Instant::now();
    let mut learner = Learner::new(engine, planned.spec.clone(), 1)?;
    learner.weights().initialize(1, 0.02)?;
    println!("preparation of training: {:.1} s", begun.elapsed().as_secs_f64());
    let batch = random_batch(&planned.spec, 0);
    let tokens = batch.tokens.len();
    for step in 0..3 {
        let begun = Instant::now();
        learner.step(step, 1e-3, std::slice::from_ref(&batch))?;
        println!("training step {}, {tokens} tokens: {:.1} s", step + 1, begun.elapsed().as_secs_f64());
    }
    Ok(())
}
