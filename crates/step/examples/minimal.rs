//! A language model in one file: it reads a text as bytes, trains a small Llama on the CPU, and continues the
//! text. What a run adds (a run file, tokenizers, folders, checkpoints, ranks, reports) is left out.
//!
//! ```sh
//! cargo run --release -p xtrain-step --example minimal -- TEXT [STEPS]
//! ```

use std::{error::Error, ops::ControlFlow};
use xtrain_config::Device;
use xtrain_data::Batch as TokenBatch;
use xtrain_model::decoder::{Batch, Loss};
use xtrain_model::optimizer::{AdamWSpec, Optimizer};
use xtrain_model::{Architecture, Description, Family, Fp8Overrides, Recipe, RopeScaling};
use xtrain_program::{Parallel, Recompute};
use xtrain_runtime::Checks;
use xtrain_step::engine::Processor;
use xtrain_step::generate::{GeneratedToken, Generator, Sampling};
use xtrain_step::learner::Learner;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::{DType, Philox};

/// Sequences of a step, and bytes of a sequence.
const BATCH: Batch = Batch { sequences: 8, seq_len: 64 };

/// Seed of the weights and of the order of the text.
const SEED: u64 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| "README.md".to_owned());
    let steps = arguments.next().map_or(Ok(200), |steps| steps.parse())?;
    let text = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
    let mut learner = new_learner()?;
    for step in 0..steps {
        let loss = train_step(&mut learner, &text, step)?;
        if step % 10 == 0 || step + 1 == steps {
            println!("step {step:4}  loss {loss:.3}");
        }
    }
    println!("{}", String::from_utf8_lossy(&generate(&mut learner, b"The ", 100)?));
    Ok(())
}

/// A Llama of 2 layers over bytes, with random weights, on the CPU.
pub fn new_learner() -> Result<Learner, Box<dyn Error>> {
    let engine = Processor::choose(Device::Cpu)?.engine(Checks::default())?;
    let mut learner = Learner::new(engine, spec(model()?), SEED)?;
    learner.weights().initialize(SEED, 0.02)?;
    Ok(learner)
}

/// The model: a family says which norms, rotations and biases a block has; these are its sizes.
fn model() -> Result<Architecture, Box<dyn Error>> {
    let description = Description {
        family: Family::LLAMA,
        dim: 64,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn_dim: 192,
        mixture: None,
        vocab_size: 256,
        max_position_embeddings: 256,
        window: None,
        attention_scale: None,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        norm_eps: 1e-5,
        tie_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
    };
    Ok(description.architecture()?)
}

/// All that determines the program of a step: forward, backward, clipping and AdamW.
fn spec(model: Architecture) -> TrainingSpec {
    TrainingSpec {
        model,
        recipe: Recipe::Fp32,
        fp8: Fp8Overrides::default(),
        batch: BATCH,
        document_mask: false,
        attention_deterministic: true,
        loss: Loss {
            chunk_tokens: BATCH.tokens(),
            z_loss: 0.0,
            sources: 0,
            counts_matches: false,
            balancing: None,
        },
        fixed_routing: None,
        dropout: 0.0,
        recompute: Recompute::None,
        recompute_blocks: None,
        max_grad_norm: 1.0,
        optimizer: Optimizer::AdamW(AdamWSpec {
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            moments: DType::F32,
            seed: SEED,
        }),
        parallel: Parallel::ALONE,
        split: Vec::new(),
        capacity: None,
        reference: false,
        scored: Vec::new(),
    }
}

/// Trains one step; returns its loss, in nats per byte.
pub fn train_step(learner: &mut Learner, text: &[u8], step: u64) -> Result<f64, Box<dyn Error>> {
    let lr = 3e-3 * ((step + 1) as f64 / 10.0).min(1.0); // 10 steps of warmup, then a constant rate.
    Ok(learner.step(step, lr, &[batch(text, step)?])?.loss)
}

/// Random pieces of the text. The target of a byte is the byte after it.
fn batch(text: &[u8], step: u64) -> Result<TokenBatch, Box<dyn Error>> {
    let Batch { sequences, seq_len } = BATCH;
    let starts = text.len().checked_sub(seq_len).filter(|&starts| starts > 0);
    let starts = starts.ok_or_else(|| format!("the text needs more than {seq_len} bytes"))?;
    let random = Philox::new(SEED, step as u32, 0);
    let first = |sequence: usize| random.word(sequence as u64) as usize % starts;
    let bytes = |offset: usize| {
        let piece = move |sequence: usize| &text[first(sequence) + offset..][..seq_len];
        (0..sequences).flat_map(piece).map(|&byte| i32::from(byte)).collect()
    };
    Ok(TokenBatch {
        batch_size: sequences,
        seq_len,
        tokens: bytes(0),
        targets: bytes(1),
        positions: (0..sequences).flat_map(|_| 0..seq_len as i32).collect(),
        doc_start: vec![0; sequences * seq_len],
        valid_targets: sequences * seq_len,
        row_inputs: vec![seq_len; sequences],
    })
}

/// `prompt` and so many bytes that follow it, by the weights that training has reached.
pub fn generate(learner: &mut Learner, prompt: &[u8], count: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let tokens: Vec<u32> = prompt.iter().copied().map(u32::from).collect();
    let mut generator = Generator::new(learner.weights(), tokens.len() + count)?;
    let sampling = Sampling { temperature: 0.7, top_k: 0, top_p: 1.0, seed: SEED };
    let go_on = &mut |_: GeneratedToken<'_>| ControlFlow::Continue(());
    let generated = generator.generate(learner.weights(), &tokens, count, sampling, &[], go_on)?;
    Ok(prompt.iter().copied().chain(generated.into_iter().map(|token| token as u8)).collect())
}
