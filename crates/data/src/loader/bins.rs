//! Whole documents packed into windows of S positions: bins.
//!
//! A document of n tokens takes n - 1 positions, its inputs; the tokens after them are its targets. Bins are
//! filled by best-fit decreasing: documents by length, longest first, each into the bin with the least room
//! that holds it (Johnson 1973). Equal lengths are ordered by a seeded permutation, so the bins are a pure
//! function of lengths, S, seed and the documents that are packed.
//!
//! Packing takes some 100 bytes of memory for each document, and its bins some 40 later.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::documents::{Document, TooLong};
use super::permutation::Permutation;
use crate::stream::TokenStream;

/// How a source's documents fill windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// Windows follow each other in the stream of tokens; documents cross their ends.
    #[default]
    Stream,
    /// A window holds as many whole documents as fit.
    Whole(TooLong),
    /// A window holds one document.
    One(TooLong),
}

impl Packing {
    /// A stream of tokens with the packing for which nothing else was asked: whole documents where some
    /// tokens are untrained, else the stream.
    pub fn with_stream(stream: Arc<dyn TokenStream>) -> (Arc<dyn TokenStream>, Packing) {
        let is_masked = stream.has_untrained();
        (stream, if is_masked { Packing::Whole(TooLong::default()) } else { Packing::Stream })
    }
}

/// Numbers of positions in windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenCounts {
    /// Positions with an input token; the others are padding.
    pub inputs: u64,
    /// Targets that are trained.
    pub trained: u64,
}

impl TokenCounts {
    /// Those of full windows with so many positions, all of whose targets are trained.
    pub fn full(positions: u64) -> TokenCounts {
        TokenCounts { inputs: positions, trained: positions }
    }

    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: TokenCounts) -> TokenCounts {
        TokenCounts { inputs: self.inputs + other.inputs, trained: self.trained + other.trained }
    }
}

/// Windows of whole documents.
#[derive(Debug, Clone)]
pub(super) struct Bins {
    /// All documents, bin by bin.
    documents: Vec<Document>,
    /// Index of each bin's first document, and the number of documents at the end.
    first: Vec<usize>,
    counts: Vec<TokenCounts>,
    hash: u64,
}

impl Bins {
    /// Packs documents into bins of `seq_len` positions; with `one_each` a bin holds one document.
    pub(super) fn new(documents: &[Document], seq_len: usize, key: u64, one_each: bool) -> Bins {
        let order = Permutation::new(documents.len() as u64, key);
        let mut sorted: Vec<(Reverse<u32>, u64, usize)> = documents
            .iter()
            .enumerate()
            .map(|(number, document)| (Reverse(document.tokens), order.apply(number as u64), number))
            .collect();
        sorted.sort_unstable();
        // Bins that have room, by their room.
        let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut bin_of = vec![0; documents.len()];
        let mut bins = 0;
        for &(_, _, number) in &sorted {
            let inputs = documents[number].inputs();
            let (room, bin) = match open.range_mut(inputs..).next() {
                Some((&room, with_room)) if !one_each => {
                    let bin = with_room.pop();
                    if with_room.is_empty() {
                        open.remove(&room);
                    }
                    (room, bin)
                }
                _ => (seq_len, None),
            };
            let bin = bin.unwrap_or_else(|| {
                bins += 1;
                bins - 1
            });
            bin_of[number] = bin;
            if room > inputs {
                open.entry(room - inputs).or_default().push(bin);
            }
        }
        let mut first = vec![0; bins + 1];
        bin_of.iter().for_each(|&bin| first[bin + 1] += 1);
        (0..bins).for_each(|bin| first[bin + 1] += first[bin]);
        let mut next = first.clone();
        let mut packed = documents.to_vec();
        for &(_, _, number) in &sorted {
            let place = &mut next[bin_of[number]];
            packed[*place] = documents[number];
            *place += 1;
        }
        let mut digest = Xxh3::new();
        digest.update(&(seq_len as u64).to_le_bytes());
        let mut counts = vec![TokenCounts::default(); bins];
        for (bin, count) in counts.iter_mut().enumerate() {
            for document in &packed[first[bin]..first[bin + 1]] {
                count.inputs += document.inputs() as u64;
                count.trained += u64::from(document.trained);
                digest.update(&document.start.to_le_bytes());
                digest.update(&document.tokens.to_le_bytes());
            }
            digest.update(&u64::MAX.to_le_bytes());
        }
        Bins { documents: packed, first, counts, hash: digest.digest() }
    }

    /// Number of bins.
    pub(super) fn count(&self) -> u64 {
        self.counts.len() as u64
    }

    /// The documents of a bin, in the order of its positions.
    pub(super) fn documents(&self, bin: u64) -> &[Document] {
        let bin = bin as usize;
        &self.documents[self.first[bin]..self.first[bin + 1]]
    }

    /// The counts of a bin.
    pub(super) fn counts(&self, bin: u64) -> TokenCounts {
        self.counts[bin as usize]
    }

    /// Hash of all bins: equal hashes give equal samples.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::permutation::hash;
    use super::*;

    fn document(start: u64, tokens: u32) -> Document {
        Document { start, tokens, trained: tokens - 1 }
    }

    proptest! {
        #[test]
        fn each_document_is_in_one_bin_and_bins_do_not_overflow(
            lengths in prop::collection::vec(2_u32..=65, 1..200), key in any::<u64>(), one_each in any::<bool>(),
        ) {
            let mut start = 0;
            let documents: Vec<_> =
                lengths.iter().map(|&n| { start += u64::from(n); document(start - u64::from(n), n) }).collect();
            let bins = Bins::new(&documents, 64, key, one_each);
            let mut seen: Vec<u64> = Vec::new();
            for bin in 0..bins.count() {
                let inputs: usize = bins.documents(bin).iter().map(Document::inputs).sum();
                prop_assert!(inputs <= 64 && inputs > 0);
                prop_assert!(!one_each || bins.documents(bin).len() == 1);
                prop_assert_eq!(bins.counts(bin), TokenCounts::full(inputs as u64));
                seen.extend(bins.documents(bin).iter().map(|d| d.start));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, documents.iter().map(|d| d.start).collect::<Vec<_>>());
            // Best fit: no document of a later bin fits into the room that an earlier bin has left.
            if !one_each {
                let room = |bin| 64 - bins.documents(bin).iter().map(Document::inputs).sum::<usize>();
                for bin in 1..bins.count() {
                    let largest = bins.documents(bin)[0].inputs();
                    prop_assert!((0..bin).all(|before| room(before) < largest));
                }
            }
            prop_assert_eq!(bins.hash(), Bins::new(&documents, 64, key, one_each).hash());
        }
    }

    #[test]
    fn a_million_documents_of_random_lengths_are_packed_with_little_padding() {
        let documents: Vec<_> =
            (0..1_000_000).map(|n| document(n * 2049, 2 + (hash(7, n, 0) % 2048) as u32)).collect();
        let bins = Bins::new(&documents, 2048, 1, false);
        let inputs: u64 = (0..bins.count()).map(|bin| bins.counts(bin).inputs).sum();
        let padding = 1.0 - inputs as f64 / (bins.count() * 2048) as f64;
        assert!(padding < 0.005, "{padding}");
    }
}
