//! What a checkpoint keeps of the loader: one number, and what it was a number in.

use serde::{Deserialize, Serialize};

use super::Loader;
use crate::error::{DataError, Result};

/// How far a run is in its data, and in which data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Samples consumed by all ranks together; the next one has this number.
    pub samples: u64,
    /// The seed of the order.
    pub seed: u64,
    /// S, tokens a sequence.
    pub seq_len: usize,
    /// The sources, in their order.
    pub sources: Vec<SourceState>,
}

/// One source in a [`LoaderState`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceState {
    /// What it was called; for messages, as data may move.
    pub name: String,
    /// Of its tokens and document ends, in hexadecimal.
    pub fingerprint: String,
    /// Its weight.
    pub weight: f64,
    /// Its training windows; changes with what is held out.
    pub windows: u64,
    /// Samples taken from it.
    pub samples: u64,
}

impl Loader {
    /// The state after `samples` samples.
    pub fn state(&self, samples: u64) -> LoaderState {
        let counts = self.mixture.counts(samples);
        let sources = self.sources.iter().zip(counts).map(|(source, samples)| SourceState {
            name: source.stream.name().to_owned(),
            fingerprint: format!("{:016x}", source.stream.fingerprint()),
            weight: source.weight,
            windows: source.windows.count(),
            samples,
        });
        LoaderState {
            samples,
            seed: self.options.seed,
            seq_len: self.options.seq_len,
            sources: sources.collect(),
        }
    }

    /// Checks that this loader gives the samples that the one of `state` would have given, and returns the number
    /// of the next sample.
    ///
    /// # Errors
    /// Other data, weights, held-out part, sequence length or seed; what differs is named.
    pub fn resume(&self, state: &LoaderState) -> Result<u64> {
        let here = self.state(state.samples);
        let refuse = |problem: String| {
            Err(DataError::invalid(
                format!("the checkpoint cannot go on with this data: {problem}"),
                "restore what the run began with, or start a new run from the checkpoint's weights",
            ))
        };
        if here.seed != state.seed {
            return refuse(format!("the seed was {}, now it is {}", state.seed, here.seed));
        }
        if here.seq_len != state.seq_len {
            return refuse(format!("the sequence length was {}, now it is {}", state.seq_len, here.seq_len));
        }
        if here.sources.len() != state.sources.len() {
            return refuse(format!("it had {} sources, now {}", state.sources.len(), here.sources.len()));
        }
        for (now, before) in here.sources.iter().zip(&state.sources) {
            if now.fingerprint != before.fingerprint {
                return refuse(format!("the tokens of {} are not those of {}", now.name, before.name));
            }
            // JSON may lose the last bit of a number.
            if (now.weight - before.weight).abs() > 1e-12 * before.weight.abs() {
                return refuse(format!(
                    "the weight of {} was {}, now {}",
                    now.name, before.weight, now.weight
                ));
            }
            if now.windows != before.windows {
                let (name, before, now) = (&now.name, before.windows, now.windows);
                return refuse(format!(
                    "{name} had {before} training sequences, now {now}: other tokens are held out"
                ));
            }
            if now.samples != before.samples {
                return refuse(format!("{} gave {} samples, not {}", now.name, before.samples, now.samples));
            }
        }
        Ok(state.samples)
    }
}
