//! The tokens that steps are measured on.

use std::ops::ControlFlow;
use xtrain_config::Config;
use xtrain_data::{Batch, Loader};
use xtrain_step::random_batch::random_batch;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_train::corpus::Corpus;
use xtrain_train::error::RunError;
use xtrain_train::paths::Sources;

/// New tokens for every step. Memorised ones leave gradients of zeros, which draw less power.
pub(super) enum Tokens {
    /// Those of the run file, which names token shards alone: there is nothing to prepare.
    Shards(Box<Loader>),
    /// Random ones.
    Random,
}

impl Tokens {
    pub(super) fn open(config: &Config, vocab_size: usize) -> Result<Tokens, RunError> {
        let other = Sources::resolve(config).train.into_iter().find(|source| !source.is_shards);
        if let Some(other) = other {
            tracing::info!("random tokens: {} is not a folder of token shards", other.named.path);
            return Ok(Tokens::Random);
        }
        // Nothing is validated, and text would have to be turned into tokens for it.
        let mut config = config.clone();
        config.data.valid = None;
        let corpus = Corpus::open(&Sources::resolve(&config), None, &mut |_| ControlFlow::Continue(()))?;
        let tokens = corpus.tokenizer.vocab_size();
        if tokens > vocab_size {
            return Err(RunError::Refused(format!(
                "[model] `vocab_size` = {vocab_size} is less than the {tokens} tokens of the shards in {}; leave it out",
                config.data.train.0.first().map_or("", |source| &source.path)
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

    /// The source of each sequence of the `n`-th micro-batch.
    pub(super) fn sources(&self, spec: &TrainingSpec, n: usize) -> Vec<usize> {
        let first = n * spec.batch.sequences;
        let sequences = first..first + spec.batch.sequences;
        match self {
            Tokens::Shards(loader) => loader.sources(sequences.start as u64..sequences.end as u64),
            Tokens::Random => sequences.map(|sequence| sequence % spec.loss.sources.max(1)).collect(),
        }
    }

    /// The `n`-th micro-batch.
    pub(super) fn batch(&self, spec: &TrainingSpec, n: usize) -> Result<Batch, RunError> {
        match self {
            Tokens::Shards(loader) => {
                Ok(loader.batch((n * spec.batch.sequences) as u64, spec.batch.sequences)?)
            }
            Tokens::Random => Ok(random_batch(spec, n as u32)),
        }
    }
}
