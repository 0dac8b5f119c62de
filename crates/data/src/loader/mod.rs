//! The loader: packs, shuffles and mixes token streams into batches, identically on any number of ranks.
//!
//! The seed and the index of a sample in the run determine the sample. The mixture gives the source and the
//! sample's index within the source; dividing that by the number of windows gives the epoch and the index in
//! the epoch; the epoch's permutation gives the window. There is no other state, so any rank can read any
//! range of samples, and a run resumes from one number. `docs/data-format.md` specifies the order.
//!
//! Deliberately absent: a history of samples, and a shuffle buffer.

mod batch;
mod bins;
mod documents;
mod mixture;
mod permutation;
mod split;
mod state;
mod taken;
mod validation;

use std::ops::Range;
use std::sync::Arc;

pub use batch::{Batch, DocumentMask, IGNORED_TARGET};
pub use bins::{Packing, TokenCounts};
pub use documents::{LeftOut, TooLong};
pub use mixture::Mixture;
pub use permutation::Permutation;
pub use state::{LoaderState, SourceState};
pub use validation::Validation;

use crate::error::{DataError, Result};
use crate::stream::TokenStream;
use bins::Bins;
use documents::find_documents;
use split::{RangeWindows, Remainder, Windows};
use taken::Taken;

/// A token stream and its weight in the mixture.
#[derive(Debug, Clone)]
pub struct MixtureSource {
    /// The tokens.
    pub stream: Arc<dyn TokenStream>,
    /// Positive weight of any scale. The stream's share of the samples is its weight over the sum of all
    /// weights.
    pub weight: f64,
    /// How its documents fill windows.
    pub packing: Packing,
}

/// Options of the loader.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderOptions {
    /// S, tokens per sequence.
    pub seq_len: usize,
    /// Seed of the order.
    pub seed: u64,
    /// Attention across documents, or not.
    pub document_mask: DocumentMask,
    /// Fraction of each source held out for validation.
    pub held_out: Option<f64>,
}

/// Training samples of a run, by index.
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
    held_out: Windows,
    weight: f64,
    left_out: LeftOut,
    taken: Taken,
}

/// The window of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleLocation {
    /// Index of the source.
    pub source: usize,
    /// Number of complete passes over the source before.
    pub epoch: u64,
    /// Index of the window among the source's training windows.
    pub window: u64,
    /// Position of the window's first token in the source.
    pub position: u64,
}

impl Loader {
    /// A loader over `sources`. Their order is part of the sample order.
    ///
    /// # Errors
    /// No sources; invalid weights; a source too short for one sequence; a held-out fraction that cannot be
    /// split off.
    pub fn new(sources: Vec<MixtureSource>, options: LoaderOptions) -> Result<Loader> {
        if options.seq_len == 0 {
            return Err(DataError::invalid("the sequence length is 0", "set at least 1"));
        }
        let weights: Vec<f64> = sources.iter().map(|source| source.weight).collect();
        let mixture = Mixture::new(&weights)?;
        let mut loaded = Vec::with_capacity(sources.len());
        for (number, MixtureSource { stream, weight, packing }) in sources.into_iter().enumerate() {
            options.document_mask.check(packing, stream.as_ref())?;
            let (windows, held_out, left_out) = match packing {
                Packing::Stream => {
                    let tokens = stream.token_count();
                    let (train, held_out) = split::train_and_held_out(stream.name(), tokens, &options)?;
                    let train = RangeWindows::new(train, options.seq_len, Remainder::Drop);
                    let held_out = RangeWindows::new(held_out, options.seq_len, Remainder::ShortWindow);
                    (Windows::Ranges(train), Windows::Ranges(held_out), LeftOut::default())
                }
                Packing::Whole(too_long) | Packing::One(too_long) => {
                    let documents = find_documents(&*stream, options.seq_len, too_long, options.held_out)?;
                    let pack = |documents: &[_]| {
                        // No epoch has this number, so the key is used nowhere else.
                        let key = permutation::hash(options.seed, number as u64, u64::MAX);
                        let one_each = matches!(packing, Packing::One(_));
                        Windows::Bins(Bins::new(documents, options.seq_len, key, one_each))
                    };
                    (pack(&documents.train), pack(&documents.held_out), documents.left_out)
                }
            };
            let taken = Taken::default();
            loaded.push(LoadedSource { stream, windows, held_out, weight, left_out, taken });
        }
        Ok(Loader { sources: loaded, mixture, options })
    }

    /// Samples `first .. first + count` as one batch.
    ///
    /// # Errors
    /// A shard that shrank, is damaged or holds tokens outside its vocabulary.
    pub fn batch(&self, first: u64, count: usize) -> Result<Batch> {
        let mut batch = Batch::with_capacity(count, self.options.seq_len);
        for sample in first..first + count as u64 {
            let SampleLocation { source, window, .. } = self.locate(sample);
            let LoadedSource { stream, windows, .. } = &self.sources[source];
            batch.push(stream.as_ref(), windows.locate(window), self.options.document_mask)?;
        }
        Ok(batch)
    }

    /// Number of inputs and of trained targets in `samples`. The loss of a global batch is divided by the
    /// latter. Does not read the samples.
    pub fn counts(&self, samples: Range<u64>) -> TokenCounts {
        let is_full = |source: &LoadedSource| matches!(source.windows, Windows::Ranges(_));
        if self.sources.iter().all(is_full) {
            return self.full_windows(samples.end - samples.start);
        }
        self.counts_by_source(samples).into_iter().fold(TokenCounts::default(), TokenCounts::plus)
    }

    /// As [`Loader::counts`], of each source.
    pub fn counts_by_source(&self, samples: Range<u64>) -> Vec<TokenCounts> {
        let mut counts = vec![TokenCounts::default(); self.sources.len()];
        for sample in samples {
            let SampleLocation { source, window, .. } = self.locate(sample);
            counts[source] = counts[source].plus(self.sources[source].windows.counts(window));
        }
        counts
    }

    /// The counts of so many windows of parts of a stream: in training they are full.
    fn full_windows(&self, count: u64) -> TokenCounts {
        TokenCounts::full(count * self.options.seq_len as u64)
    }

    /// The window of sample `index`.
    pub fn locate(&self, index: u64) -> SampleLocation {
        let (number, count) = self.mixture.locate(index);
        let windows = &self.sources[number].windows;
        let (epoch, window) = self.window_of(number, count);
        let position = windows.locate(window).position();
        SampleLocation { source: number, epoch, window, position }
    }

    /// Epoch and window of the source's sample number `count`.
    fn window_of(&self, source: usize, count: u64) -> (u64, u64) {
        let windows = self.sources[source].windows.count();
        let (epoch, index_in_epoch) = (count / windows, count % windows);
        let key = permutation::hash(self.options.seed, source as u64, epoch);
        (epoch, Permutation::new(windows, key).apply(index_in_epoch))
    }

    /// The held-out parts of all sources; `None` if nothing is held out.
    pub fn validation(&self) -> Option<Validation> {
        self.options.held_out?;
        let parts = self.sources.iter().map(|s| (Arc::clone(&s.stream), s.held_out.clone())).collect();
        Some(Validation::from_parts(parts, self.options.seq_len, self.options.document_mask))
    }

    /// Number of positions in all windows of all sources: one epoch, if sources are mixed by size.
    pub fn epoch_tokens(&self) -> u64 {
        self.windows().into_iter().sum::<u64>() * self.options.seq_len as u64
    }

    /// Number of windows of each source, which is its number of samples per epoch.
    pub fn windows(&self) -> Vec<u64> {
        self.sources.iter().map(|source| source.windows.count()).collect()
    }

    /// Names of the sources, in their order.
    pub fn source_names(&self) -> Vec<&str> {
        self.sources.iter().map(|source| source.stream.name()).collect()
    }

    /// The source of each sample in `samples`, as its index. All tokens of a sample are from one source, so
    /// row b of [`Loader::batch`] at `first` is from source b of `first .. first + count`.
    pub fn sources(&self, samples: Range<u64>) -> Vec<usize> {
        samples.map(|sample| self.mixture.locate(sample).0).collect()
    }

    /// Inputs and trained targets of each source in the first `samples` samples. They follow from the
    /// position alone, so a resumed run counts as an uninterrupted one does.
    pub fn taken(&self, samples: u64) -> Vec<TokenCounts> {
        let counts = self.mixture.counts(samples).into_iter().enumerate();
        counts.map(|(source, count)| self.taken_of(source, count)).collect()
    }

    fn taken_of(&self, source: usize, count: u64) -> TokenCounts {
        let LoadedSource { windows, taken, .. } = &self.sources[source];
        match windows {
            Windows::Ranges(_) => self.full_windows(count),
            Windows::Bins(bins) => taken.sum(count, |n| bins.counts(self.window_of(source, n).1)),
        }
    }

    /// Documents of each source that no window holds, because windows hold whole documents.
    pub fn left_out(&self) -> Vec<LeftOut> {
        self.sources.iter().map(|source| source.left_out).collect()
    }

    /// Epochs of each source in the first `samples` samples.
    pub fn epochs(&self, samples: u64) -> Vec<f64> {
        let counts = self.mixture.counts(samples);
        counts.iter().zip(self.windows()).map(|(&count, windows)| count as f64 / windows as f64).collect()
    }
}
