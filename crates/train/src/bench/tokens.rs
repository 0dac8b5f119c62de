//! The tokens that steps are measured on.

use super::attention;
use crate::config::Config;
use crate::programs::TrainingSpec;
use crate::run::setup::are_shards;
use crate::run::{Corpus, RunError};
use std::ops::ControlFlow;
use xtrain_data::{Batch, Loader};
use xtrain_tensor::Philox;

/// Documents have this many tokens on average, where attention stays within them.
const DOCUMENT_TOKENS: usize = 512;

/// New tokens for every step. Those that were learned by heart leave gradients of zeros, which take a card less power.
pub(super) enum Tokens {
    /// Those of the run file, which names token shards alone: there is nothing to prepare.
    Shards(Box<Loader>),
    /// Random ones.
    Random,
}

impl Tokens {
    pub(super) fn of(config: &Config) -> Result<Tokens, RunError> {
        if !config.data.train.0.iter().all(are_shards) {
            return Ok(Tokens::Random);
        }
        let corpus = Corpus::open(config, None, &mut |_| ControlFlow::Continue(()))?;
        Ok(Tokens::Shards(Box::new(corpus.loader)))
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Tokens::Shards(_) => "shards",
            Tokens::Random => "random",
        }
    }

    /// The `n`-th micro-batch.
    pub(super) fn batch(&self, spec: &TrainingSpec, n: usize) -> Result<Batch, RunError> {
        match self {
            Tokens::Shards(loader) => {
                Ok(loader.batch((n * spec.batch.sequences) as u64, spec.batch.sequences)?)
            }
            Tokens::Random => Ok(random(spec, n as u32)),
        }
    }
}

/// Random tokens, which occur by Zipf's law as those of a text do: a token's rank is its number, and its logarithm is uniform. Tokens that
/// are all as frequent leave nothing to learn, and hardly ever meet in the embedding's gradient.
fn random(spec: &TrainingSpec, n: u32) -> Batch {
    let (sequences, seq_len) = (spec.batch.sequences, spec.batch.seq_len);
    let count = sequences * seq_len;
    let rng = Philox::new(0, n, 0);
    let tokens = spec.model.vocab_size;
    let of_all = |i: usize| f64::from(rng.word(i as u64)) / 2f64.powi(32);
    let token = |i: usize| (((tokens as f64 + 1.0).powf(of_all(i)) - 1.0) as usize).min(tokens - 1) as i32;
    let doc_start = match spec.document_mask {
        true => attention::documents([sequences, seq_len], DOCUMENT_TOKENS),
        false => vec![0; count],
    };
    Batch {
        batch_size: sequences,
        seq_len,
        tokens: (0..count).map(token).collect(),
        targets: (1..=count).map(token).collect(),
        positions: (0..count).map(|i| (i % seq_len) as i32 - doc_start[i]).collect(),
        doc_start,
        valid_targets: count,
    }
}
