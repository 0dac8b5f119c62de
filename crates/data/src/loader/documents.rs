//! Documents of a source: found, measured, and split into training and held-out ones.
//!
//! Documents with equal questions are held out together, so that no answer to a question of the held-out ones
//! is trained.

use std::collections::BTreeMap;
use std::ops::Range;

use xxhash_rust::xxh3::Xxh3;

use crate::error::{DataError, Result};
use crate::stream::TokenStream;

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
    pub(super) trained: u32,
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
        let which = format!("of more than {longest} tokens");
        for (count, which, what) in [
            (
                too_long,
                which.clone(),
                "left out; raise data.seq_len, or set data.too_long = \"truncate\" to use the beginnings",
            ),
            (truncated, which, "cut; raise data.seq_len to use all of them"),
            (
                untrained,
                format!("without a trained token among the first {longest}"),
                "left out; raise data.seq_len",
            ),
        ] {
            let (noun, are) = if *count == 1 { ("document", "is") } else { ("documents", "are") };
            if *count > 0 {
                tracing::warn!("{name}: {count} {noun} {which} {are} {what}");
            }
        }
    }
}

/// The training and held-out documents of a source.
pub(super) struct SplitDocuments {
    pub(super) train: Vec<Document>,
    pub(super) held_out: Vec<Document>,
    pub(super) left_out: LeftOut,
}

/// A document before its length is compared with S.
struct FoundDocument {
    range: Range<u64>,
    /// Hash of the question, or of the beginning; documents with equal ones are held out together.
    group: u64,
}

/// The documents of a stream, split into training and held-out ones.
///
/// Conversations with equal questions stay on one side; where questions are not known, documents of one
/// conversation, and conversations that begin alike up to their first trained token. Groups are taken in the
/// order of their hashes until `held_out` of the tokens is reached, so the split does not depend on the order
/// of documents, on seeds or on weights.
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
                    return;
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
    if let Some((number, tokens)) = problem {
        return Err(DataError::invalid(
            format!("{name}: document {} has {tokens} tokens, more than seq_len + 1 = {longest}", number + 1),
            "raise data.seq_len, or set data.too_long to \"drop\" or \"truncate\"",
        ));
    }
    left_out.warn(name, longest);
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

    /// The group of a document whose question is not known: that of the document before if both are of one
    /// conversation; else the hash of the tokens before the first trained one, or of all if the first target
    /// is trained.
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
