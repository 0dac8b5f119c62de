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
    pub(super) fn of(config: &Config, vocab_size: usize) -> Result<Tokens, RunError> {
        let sources = &config.data.train.0;
        if let Some(other) = sources.iter().find(|source| !are_shards(source)) {
            tracing::info!("random tokens: {} is no folder of token shards", other.path);
            return Ok(Tokens::Random);
        }
        // Nothing is validated, and text would have to be turned into tokens for it.
        let mut config = config.clone();
        config.data.valid = None;
        let corpus = Corpus::open(&config, None, &mut |_| ControlFlow::Continue(()))?;
        let tokens = corpus.tokenizer.vocab_size();
        if tokens > vocab_size {
            return Err(RunError::Refused(format!(
                "[model] `vocab_size` = {vocab_size} is less than the {tokens} tokens of the shards in {}; leave it out",
                sources.first().map_or("", |source| &source.path)
            )));
        }
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
            Tokens::Random => Ok(Tokens::random(spec, n as u32)),
        }
    }

    /// Random tokens, which occur by Zipf's law as those of a text do: a token's rank is its number, and its logarithm is uniform. Tokens that
    /// are all as frequent leave nothing to learn, and hardly ever meet in the embedding's gradient.
    pub(super) fn random(spec: &TrainingSpec, n: u32) -> Batch {
        let (sequences, seq_len) = (spec.batch.sequences, spec.batch.seq_len);
        let count = sequences * seq_len;
        let rng = Philox::new(0, n, 0);
        let tokens = spec.model.vocab_size;
        let of_all = |i: usize| f64::from(rng.word(i as u64)) / 2f64.powi(32);
        let token =
            |i: usize| (((tokens as f64 + 1.0).powf(of_all(i)) - 1.0) as usize).min(tokens - 1) as i32;
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
}
