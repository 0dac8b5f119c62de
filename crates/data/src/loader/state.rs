//! The loader's state in a checkpoint: the index of the next sample, and the data that it refers to.

use serde::{Deserialize, Serialize};

use super::Loader;
use crate::error::{DataError, Result};

/// A run's position in its data, with a description of the data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Samples consumed by all ranks together, which is the index of the next sample.
    pub samples: u64,
    /// The seed of the order.
    pub seed: u64,
    /// S, tokens per sequence.
    pub seq_len: usize,
    /// The sources, in order.
    pub sources: Vec<SourceState>,
}

/// A source in a [`LoaderState`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceState {
    /// Name, for messages only, because data may be moved.
    pub name: String,
    /// Fingerprint of its tokens and document ends, in hexadecimal.
    pub fingerprint: String,
    /// Hash of the chat template that rendered it, in hexadecimal; absent where none did, and in states of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Weight in the mixture.
    pub weight: f64,
    /// Number of training windows, which depends on the held-out fraction.
    pub windows: u64,
    /// Number of samples taken from it.
    pub samples: u64,
    /// Hash of its windows of whole documents, in hexadecimal; absent where windows are parts of the stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bins: Option<String>,
}

impl Loader {
    /// The state after `samples` samples.
    pub fn state(&self, samples: u64) -> LoaderState {
        let counts = self.mixture.counts(samples);
        let sources = self.sources.iter().zip(counts).map(|(source, samples)| SourceState {
            name: source.stream.name().to_owned(),
            fingerprint: format!("{:016x}", source.stream.fingerprint()),
            template: source.stream.chat().and_then(|chat| chat.template.clone()),
            weight: source.weight,
            windows: source.windows.count(),
            samples,
            bins: source.windows.hash().map(|hash| format!("{hash:016x}")),
        });
        LoaderState {
            samples,
            seed: self.options.seed,
            seq_len: self.options.seq_len,
            sources: sources.collect(),
        }
    }

    /// Checks that this loader continues with the same samples as the loader that saved `state`, and returns
    /// the index of the next sample.
    ///
    /// # Errors
    /// Other data, weights, held-out fraction, sequence length or seed. The error names the difference.
    pub fn resume(&self, state: &LoaderState) -> Result<u64> {
        let current = self.state(state.samples);
        let refuse = |problem: String| {
            Err(DataError::invalid(
                format!("the checkpoint cannot continue with this data: {problem}"),
                "restore the data and settings that the run started with, or start a new run from the checkpoint's weights",
            ))
        };
        if current.seed != state.seed {
            return refuse(format!("the seed was {}, now it is {}", state.seed, current.seed));
        }
        if current.seq_len != state.seq_len {
            return refuse(format!(
                "the sequence length was {}, now it is {}",
                state.seq_len, current.seq_len
            ));
        }
        if current.sources.len() != state.sources.len() {
            return refuse(format!("it had {} sources, now {}", state.sources.len(), current.sources.len()));
        }
        for ((now, before), source) in current.sources.iter().zip(&state.sources).zip(&self.sources) {
            if now.fingerprint != before.fingerprint {
                let is_other = before.template.is_some() && now.template != before.template;
                let file = source.stream.chat().and_then(|chat| chat.template_file.as_ref());
                return refuse(match (is_other, file) {
                    (false, _) if now.name == before.name => {
                        format!("the tokens of {} have changed since the run began", now.name)
                    }
                    (false, _) => format!("the tokens of {} are not those of {}", now.name, before.name),
                    (true, Some(file)) => {
                        format!(
                            "the chat template of {}, {file}, is another than when the run began",
                            now.name
                        )
                    }
                    (true, None) => {
                        format!("the chat template of {} is another than when the run began", now.name)
                    }
                });
            }
            // A JSON parser may lose the last bit of a number.
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
            if now.bins != before.bins {
                return refuse(format!("the documents of {} are packed into other windows", now.name));
            }
            if now.samples != before.samples {
                return refuse(format!("{} gave {} samples, not {}", now.name, before.samples, now.samples));
            }
        }
        Ok(state.samples)
    }
}
