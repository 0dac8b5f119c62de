//! From token streams to batches: packed, shuffled, mixed, and the same on any number of ranks.
//!
//! The number i of a sample in the whole run decides, with the seed, everything about it: the mixture gives the
//! source and the sample's number within it; that number over the source's windows gives epoch and place; the
//! epoch's permutation of the windows gives the window. There is no other state, so a rank reads any slice it
//! likes and a run resumes from one number. docs/data-format.md has the order in full.
//!
//! Deliberately absent: any memory of what was read before, and any shuffling buffer.

mod batch;
mod mixture;
mod permutation;
mod split;
mod state;
mod validation;

use std::ops::Range;
use std::sync::Arc;

pub use batch::{Batch, DocumentMask, IGNORED_TARGET};
pub use mixture::Mixture;
pub use permutation::Permutation;
pub use state::{LoaderState, SourceState};
pub use validation::Validation;

use crate::error::{DataError, Result};
use crate::stream::TokenStream;
use split::{Remainder, Windows};

/// A token stream and how much of it to use.
#[derive(Debug, Clone)]
pub struct MixtureSource {
    /// The tokens.
    pub stream: Arc<dyn TokenStream>,
    /// Its share of the samples is its weight over the sum of all weights.
    pub weight: f64,
}

/// What shapes the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderOptions {
    /// S, tokens a sequence.
    pub seq_len: usize,
    /// Decides the order.
    pub seed: u64,
    /// Whether documents see each other.
    pub document_mask: DocumentMask,
    /// The fraction of each source that is kept for validation.
    pub held_out: Option<f64>,
}

/// The training samples of a run, by number.
#[derive(Debug)]
pub struct Loader {
    sources: Vec<LoadedSource>,
    mixture: Mixture,
    options: LoaderOptions,
}

#[derive(Debug)]
struct LoadedSource {
    stream: Arc<dyn TokenStream>,
    windows: Windows,
    held_out: Vec<Range<u64>>,
    weight: f64,
}

/// Which window a sample is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleLocation {
    /// The source, by its number.
    pub source: usize,
    /// How often the source has been used up before.
    pub epoch: u64,
    /// The window among the source's training windows.
    pub window: u64,
    /// Position of the window's first token in the source.
    pub position: u64,
}

impl Loader {
    /// A loader over `sources`, in whose order the mixture counts.
    ///
    /// # Errors
    /// No sources; weights that cannot be met; a source too short for one sequence; a split that cannot be made.
    pub fn new(sources: Vec<MixtureSource>, options: LoaderOptions) -> Result<Loader> {
        if options.seq_len == 0 {
            return Err(DataError::invalid("the sequence length is 0", "give at least 1"));
        }
        let weights: Vec<f64> = sources.iter().map(|source| source.weight).collect();
        let mixture = Mixture::new(&weights)?;
        let mut loaded = Vec::with_capacity(sources.len());
        for MixtureSource { stream, weight } in sources {
            let tokens = stream.token_count();
            let (train, held_out) = match options.held_out {
                Some(fraction) => split::split(fraction, tokens, options.seq_len, stream.name())?,
                None => (std::iter::once(0..tokens).collect(), Vec::new()),
            };
            let windows = Windows::new(train, options.seq_len, Remainder::Drop);
            if windows.count() == 0 {
                return Err(DataError::invalid(
                    format!(
                        "{} has {} training tokens in one piece, too few for one sequence of {} and its targets",
                        stream.name(),
                        windows.longest(),
                        options.seq_len
                    ),
                    "use more text, a shorter sequence, or hold out less",
                ));
            }
            loaded.push(LoadedSource { stream, windows, held_out, weight });
        }
        Ok(Loader { sources: loaded, mixture, options })
    }

    /// Samples `first .. first + count` as one batch.
    ///
    /// # Errors
    /// A shard that shrank or holds tokens outside its vocabulary.
    pub fn batch(&self, first: u64, count: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(count, self.options.seq_len);
        for sample in first..first + count as u64 {
            let location = self.locate(sample);
            let stream = self.sources[location.source].stream.as_ref();
            batch.push(stream, location.position, self.options.seq_len, self.options.document_mask)?;
        }
        Ok(batch)
    }

    /// How many targets `samples` have together; what the loss of a global batch is divided
    /// by. Known without reading them.
    pub fn valid_targets(&self, samples: Range<u64>) -> u64 {
        // Training windows are full and no target in them is ignored.
        (samples.end - samples.start) * self.options.seq_len as u64
    }

    /// Which window sample `index` is.
    pub fn locate(&self, index: u64) -> SampleLocation {
        let (number, count) = self.mixture.locate(index);
        let windows = &self.sources[number].windows;
        let (epoch, index_in_epoch) = (count / windows.count(), count % windows.count());
        let key = permutation::hash(self.options.seed, number as u64, epoch);
        let window = Permutation::new(windows.count(), key).apply(index_in_epoch);
        let (position, _) = windows.locate(window);
        SampleLocation { source: number, epoch, window, position }
    }

    /// The held-out part of all sources, or `None` where nothing is held out.
    pub fn validation(&self) -> Option<Validation> {
        self.options.held_out?;
        let parts = self.sources.iter().map(|s| (Arc::clone(&s.stream), s.held_out.clone())).collect();
        Some(Validation::from_parts(parts, self.options.seq_len, self.options.document_mask))
    }

    /// Targets in all windows of all sources: what a pass over the data trains on, where sources are mixed by size.
    pub fn epoch_tokens(&self) -> u64 {
        self.windows().into_iter().sum::<u64>() * self.options.seq_len as u64
    }

    /// Windows of each source: its samples in an epoch.
    pub fn windows(&self) -> Vec<u64> {
        self.sources.iter().map(|source| source.windows.count()).collect()
    }

    /// How many epochs of each source the first `samples` samples are.
    pub fn epochs(&self, samples: u64) -> Vec<f64> {
        let counts = self.mixture.counts(samples);
        counts.iter().zip(self.windows()).map(|(&count, windows)| count as f64 / windows as f64).collect()
    }
}
