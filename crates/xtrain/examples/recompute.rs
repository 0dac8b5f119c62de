//! How much memory recomputation saves, known before anything runs:
//!
//!     cargo run --release --example recompute
//!
//! docs/library.md shows what follows.

use xtrain::prelude::*;
use xtrain::step::{engine, programs};
use xtrain::train::run;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let parsed = Config::load("examples/llama3_8b.toml".as_ref(), &["train.micro_batch_size=2"])?;
    let mut spec = run::plan(&parsed)?.spec;
    for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
        spec.recompute = recompute;
        let program = programs::training(&spec)?;
        let plan = engine::Target::Cpu.plan(&program);
        println!("{recompute:?}: {} ops, {} GiB", program.instances.len(), plan.total_bytes() >> 30);
    }
    Ok(())
}
