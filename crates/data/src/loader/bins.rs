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
use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::permutation::Permutation;
use crate::error::{DataError, Result};
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

/// Treatment of a document with more than S + 1 tokens, where windows hold whole documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TooLong {
    /// It is left out and counted.
    #[default]
    Drop,
    /// Its first S + 1 tokens are used.
    Truncate,
    /// It is an error.
    Error,
}

/// A document of a source, or its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Document {
    /// Position of its first token in the source.
    pub(super) start: u64,
    /// Number of its tokens, at least 2 and at most S + 1.
    pub(super) tokens: u32,
    /// Number of its targets that are trained, at least 1.
    trained: u32,
}

impl Document {
    /// Positions that it takes in a window.
    pub(super) fn inputs(&self) -> usize {
        self.tokens as usize - 1
    }
}

/// Documents that no window holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LeftOut {
    /// Documents with more than S + 1 tokens.
    pub too_long: u64,
    /// Documents whose beginning alone is used.
    pub truncated: u64,
    /// Documents without a trained target.
    pub untrained: u64,
}

impl LeftOut {
    /// Warns of documents that are left out or cut.
    fn warn(&self, name: &str, longest: u64) {
        let LeftOut { too_long, truncated, untrained } = self;
        for (count, what) in [
            (too_long, format!("have more than {longest} tokens and are left out")),
            (truncated, format!("have more than {longest} tokens and are cut")),
            (untrained, "have no trained token and are left out".to_owned()),
        ] {
            if *count > 0 {
                tracing::warn!("{name}: {count} documents {what}");
            }
        }
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

/// The training and held-out documents of a source.
pub(super) struct SplitDocuments {
    pub(super) train: Vec<Document>,
    pub(super) held_out: Vec<Document>,
    pub(super) left_out: LeftOut,
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

/// A document before its length is compared with S.
struct FoundDocument {
    range: Range<u64>,
    /// Hash of what the conversation was asked first; documents with equal ones are held out together.
    group: u64,
}

/// The documents of a stream, split into training and held-out ones.
///
/// Documents of one conversation, and conversations that begin alike up to their first trained token, stay on
/// one side. Groups are taken in the order of their hashes until `held_out` of the tokens is reached, so the
/// split does not depend on the order of documents, on seeds or on weights.
///
/// # Errors
/// A stream that cannot be read; a document that is too long, where that is an error; nothing to train on, or
/// nothing to hold out.
pub(super) fn find_documents(
    stream: &dyn TokenStream,
    seq_len: usize,
    too_long: TooLong,
    held_out: Option<f64>,
) -> Result<SplitDocuments> {
    let longest = seq_len as u64 + 1;
    let mut left_out = LeftOut::default();
    let mut documents: Vec<(Document, u64)> = Vec::new();
    let questions = if held_out.is_some() { stream.questions()? } else { None };
    let wants_groups = held_out.is_some();
    let mut reader = DocumentReader { stream, bits: Vec::new(), group: 0, wants_groups, questions };
    let mut problem = None;
    reader.each(|number, found, bits| {
        let tokens = found.range.end - found.range.start;
        if tokens > longest {
            match too_long {
                TooLong::Drop => {
                    left_out.too_long += 1;
                    return;
                }
                TooLong::Truncate => left_out.truncated += 1,
                TooLong::Error => {
                    problem.get_or_insert((number, tokens));
                }
            }
        }
        let used = tokens.min(longest) as usize;
        let trained = bits[1.min(used)..used].iter().filter(|&&bit| bit).count() as u32;
        if trained == 0 {
            left_out.untrained += 1;
        } else {
            documents
                .push((Document { start: found.range.start, tokens: used as u32, trained }, found.group));
        }
    })?;
    let name = stream.name();
    left_out.warn(name, longest);
    if let Some((number, tokens)) = problem {
        return Err(DataError::invalid(
            format!("{name}: document {} has {tokens} tokens, more than seq_len + 1 = {longest}", number + 1),
            "raise data.seq_len, or set data.too_long to \"drop\" or \"truncate\"",
        ));
    }
    if documents.is_empty() {
        let LeftOut { too_long, untrained, .. } = left_out;
        return Err(DataError::invalid(
            format!(
                "{name} has nothing to train on: {too_long} documents have more than {longest} tokens, and \
                 {untrained} have no trained token"
            ),
            "raise data.seq_len, set data.too_long = \"truncate\", or use other data",
        ));
    }
    let Some(fraction) = held_out else {
        let train = documents.into_iter().map(|(document, _)| document).collect();
        return Ok(SplitDocuments { train, held_out: Vec::new(), left_out });
    };
    let groups = held_out_groups(&documents, fraction).ok_or_else(|| {
        DataError::invalid(
            format!(
                "{name}: a fraction of {fraction} cannot be held out of {} conversations with {} different beginnings",
                documents.len(),
                count_groups(&documents)
            ),
            "use more conversations, another data.held_out, or data.held_out = 0 with eval.every = 0",
        )
    })?;
    let (held, train): (Vec<_>, Vec<_>) =
        documents.into_iter().partition(|(_, group)| groups.binary_search(group).is_ok());
    let without_group = |documents: Vec<(Document, u64)>| documents.into_iter().map(|(d, _)| d).collect();
    Ok(SplitDocuments { train: without_group(train), held_out: without_group(held), left_out })
}

/// Tokens of each group, by hash.
fn tokens_by_group(documents: &[(Document, u64)]) -> BTreeMap<u64, u64> {
    let mut groups = BTreeMap::new();
    for (document, group) in documents {
        *groups.entry(*group).or_insert(0) += u64::from(document.tokens);
    }
    groups
}

fn count_groups(documents: &[(Document, u64)]) -> usize {
    tokens_by_group(documents).len()
}

/// The groups to hold out, sorted: in the order of their hashes, each that does not exceed the fraction, or
/// else the smallest. `None` if a side would be empty.
fn held_out_groups(documents: &[(Document, u64)], fraction: f64) -> Option<Vec<u64>> {
    if !(fraction > 0.0 && fraction < 1.0) {
        return None;
    }
    let groups = tokens_by_group(documents);
    let total: u64 = groups.values().sum();
    let wanted = (total as f64 * fraction).round() as u64;
    let mut held = 0;
    let mut taken: Vec<u64> = groups
        .iter()
        .filter(|&(_, &tokens)| {
            let is_taken = held + tokens <= wanted;
            held += if is_taken { tokens } else { 0 };
            is_taken
        })
        .map(|(&group, _)| group)
        .collect();
    if taken.is_empty() {
        taken.extend(groups.iter().min_by_key(|&(_, &tokens)| tokens).map(|(&group, _)| group));
    }
    (taken.len() < groups.len()).then_some(taken)
}

/// Reads the documents of a stream one by one.
struct DocumentReader<'s> {
    stream: &'s dyn TokenStream,
    bits: Vec<bool>,
    /// The group of the document before.
    group: u64,
    wants_groups: bool,
    /// The hash of each document's question, if they are known.
    questions: Option<Vec<u64>>,
}

impl DocumentReader<'_> {
    /// Calls `f` with the number of each document, the document, and its tokens' bits. Tokens after the last
    /// end are a document too.
    fn each(&mut self, mut f: impl FnMut(usize, FoundDocument, &[bool])) -> Result<()> {
        let count = self.stream.token_count();
        let mut ends = Vec::new();
        self.stream.document_ends(1..count + 1, &mut ends)?;
        if ends.last() != Some(&count) && count > 0 {
            ends.push(count);
        }
        let mut start = 0;
        for (number, end) in ends.into_iter().enumerate() {
            self.bits.resize((end - start) as usize, false);
            self.stream.trained(start, &mut self.bits)?;
            if self.wants_groups {
                let question = self.questions.as_ref().and_then(|questions| questions.get(number).copied());
                self.group = question.map_or_else(|| self.group_of(start..end), Ok)?;
            }
            f(number, FoundDocument { range: start..end, group: self.group }, &self.bits);
            start = end;
        }
        Ok(())
    }

    /// The group of a document whose question is not known: that of the document before if both are of one conversation; else the hash
    /// of the tokens before the first trained one, or of all if the first target is trained.
    fn group_of(&self, range: Range<u64>) -> Result<u64> {
        let is_masked = self.stream.has_untrained();
        if is_masked && self.bits[0] && range.start > 0 {
            return Ok(self.group);
        }
        let prompt = self.bits.iter().skip(1).position(|&bit| bit).map_or(self.bits.len(), |at| at + 1);
        let length = if prompt > 1 { prompt } else { self.bits.len() };
        let mut tokens = vec![0; length];
        self.stream.read(range.start, &mut tokens)?;
        let mut digest = Xxh3::new();
        tokens.iter().for_each(|token| digest.update(&token.to_le_bytes()));
        Ok(digest.digest())
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
