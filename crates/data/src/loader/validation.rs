//! Validation sequences: held-out tokens or documents in order.

use std::ops::Range;
use std::sync::Arc;

use super::batch::{Batch, DocumentMask, IGNORED_TARGET};
use super::bins::{Bins, Packing};
use super::documents::find_documents;
use super::split::{RangeWindows, Remainder, Windows};
use crate::error::{DataError, Result};
use crate::stream::TokenStream;

/// Sequences for evaluation. Every token except the first of each range or document is a target at most once.
#[derive(Debug, Clone)]
pub struct Validation {
    parts: Vec<(Arc<dyn TokenStream>, Windows)>,
    seq_len: usize,
    mask: DocumentMask,
    /// Number of windows used. If smaller than the total, they are evenly spaced.
    used: u64,
}

impl Validation {
    /// All tokens of `streams`, in order, each packed as it says.
    ///
    /// # Errors
    /// A sequence length of 0; streams without targets; documents that are too long, where that is an error.
    pub fn new(
        streams: Vec<(Arc<dyn TokenStream>, Packing)>,
        seq_len: usize,
        mask: DocumentMask,
    ) -> Result<Validation> {
        if seq_len == 0 {
            return Err(DataError::invalid("the sequence length is 0", "set at least 1"));
        }
        let names: Vec<String> = streams.iter().map(|(stream, _)| stream.name().to_owned()).collect();
        let mut parts = Vec::with_capacity(streams.len());
        for (stream, packing) in streams {
            mask.check(packing, stream.as_ref())?;
            let windows = match packing {
                Packing::Stream => {
                    let all = std::iter::once(0..stream.token_count()).collect();
                    Windows::Ranges(RangeWindows::new(all, seq_len, Remainder::ShortWindow))
                }
                Packing::Whole(too_long) | Packing::One(too_long) => {
                    let documents = find_documents(&*stream, seq_len, too_long, None)?.train;
                    let one_each = matches!(packing, Packing::One(_));
                    Windows::Bins(Bins::new(&documents, seq_len, 0, one_each))
                }
            };
            parts.push((stream, windows));
        }
        let validation = Validation::from_parts(parts, seq_len, mask);
        if validation.used == 0 {
            let problem = format!("{}: fewer than two tokens, too few for validation", names.join(", "));
            return Err(DataError::invalid(problem, "name more text"));
        }
        Ok(validation)
    }

    pub(super) fn from_parts(
        parts: Vec<(Arc<dyn TokenStream>, Windows)>,
        seq_len: usize,
        mask: DocumentMask,
    ) -> Validation {
        let used = parts.iter().map(|(_, windows)| windows.count()).sum();
        Validation { parts, seq_len, mask, used }
    }

    /// Restricts this to at most `max_windows` sequences, evenly spaced and deterministic.
    #[must_use]
    pub fn at_most(mut self, max_windows: u64) -> Validation {
        self.used = self.used.min(max_windows.max(1));
        self
    }

    /// Number of sequences.
    pub fn window_count(&self) -> u64 {
        self.used
    }

    /// The fingerprints of the sources' tokens, in their order.
    pub fn fingerprints(&self) -> Vec<u64> {
        self.parts.iter().map(|(stream, _)| stream.fingerprint()).collect()
    }

    /// Names of the sources, in their order.
    pub fn source_names(&self) -> Vec<&str> {
        self.parts.iter().map(|(stream, _)| stream.name()).collect()
    }

    /// The source of each sequence in `sequences`, as its index; `None` for those that only pad a batch. All
    /// tokens of a sequence are from one source.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn sources(&self, sequences: Range<u64>) -> Result<Vec<Option<usize>>> {
        let source =
            |number| Ok((number < self.used).then(|| self.locate(number)).transpose()?.map(|at| at.0));
        sequences.map(source).collect()
    }

    /// Sequences `first .. first + count` as one batch. After the last sequence, rows without targets pad it
    /// to `count`, so that all batches have one shape.
    ///
    /// # Errors
    /// A shard that shrank, is damaged or holds tokens outside its vocabulary.
    pub fn batch(&self, first: u64, count: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(count, self.seq_len);
        for number in first..first + count as u64 {
            if number < self.used {
                let (part, window) = self.locate(number)?;
                let (stream, windows) = &self.parts[part];
                batch.push(stream.as_ref(), windows.locate(window), self.mask)?;
            } else {
                batch.push_padding();
            }
        }
        Ok(batch)
    }

    /// All sequences in order, in batches of `batch_size`.
    pub fn batches(&self, batch_size: usize) -> impl Iterator<Item = Result<Batch>> + '_ {
        let batch_size = batch_size.max(1);
        (0..self.used.div_ceil(batch_size as u64)).map(move |b| self.batch(b * batch_size as u64, batch_size))
    }

    /// Unigram entropy of the targets, in nats per token: the loss of a model that knows only token
    /// frequencies.
    ///
    /// # Errors
    /// Those of [`Validation::batch`].
    pub fn unigram_entropy_nats(&self) -> Result<f64> {
        let mut counts = Vec::new();
        for batch in self.batches(16) {
            for target in batch?.targets.into_iter().filter(|&target| target != IGNORED_TARGET) {
                // Not negative, because tokens are checked against the vocabulary when they are read.
                let token = target as usize;
                if token >= counts.len() {
                    counts.resize(token + 1, 0);
                }
                counts[token] += 1_u64;
            }
        }
        Ok(entropy_nats(&counts))
    }

    /// Bytes of text that the targets encode; `None` if a source does not know its own or has untrained
    /// tokens, whose text nobody scores. A part of a source counts in proportion to its targets, because
    /// bytes per token differ between sources.
    pub fn text_bytes(&self) -> Result<Option<f64>> {
        let mut targets = vec![0_u64; self.parts.len()];
        for number in 0..self.used {
            let (part, window) = self.locate(number)?;
            targets[part] += self.parts[part].1.counts(window).trained;
        }
        let bytes = self.parts.iter().zip(targets).map(|((stream, _), targets)| {
            if stream.has_untrained() {
                return None;
            }
            let all = stream.token_count().saturating_sub(1).max(1);
            Some(stream.text_bytes()? as f64 * targets as f64 / all as f64)
        });
        Ok(bytes.sum())
    }

    /// Part of sequence `number`, and its window in that part.
    fn locate(&self, number: u64) -> Result<(usize, u64)> {
        let total: u64 = self.parts.iter().map(|(_, windows)| windows.count()).sum();
        let mut window = (u128::from(number) * u128::from(total) / u128::from(self.used)) as u64;
        for (part, (_, windows)) in self.parts.iter().enumerate() {
            if window < windows.count() {
                return Ok((part, window));
            }
            window -= windows.count();
        }
        Err(DataError::Internal(format!("validation window {number} of {} was requested", self.used)))
    }
}

/// Entropy in nats of the distribution given by counts.
fn entropy_nats(counts: &[u64]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    let terms = counts.iter().filter(|&&count| count > 0).map(|&count| {
        let share = count as f64 / total;
        -share * share.ln()
    });
    terms.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_of_known_distributions() {
        assert_eq!(entropy_nats(&[]), 0.0);
        assert_eq!(entropy_nats(&[0, 0, 3]), 0.0);
        assert!((entropy_nats(&[1, 1, 1, 1]) - 4_f64.ln()).abs() < 1e-12);
        let skewed = 0.75 * (4.0 / 3.0_f64).ln() + 0.25 * 4_f64.ln();
        assert!((entropy_nats(&[1, 0, 3]) - skewed).abs() < 1e-12);
    }
}
