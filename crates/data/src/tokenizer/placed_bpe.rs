//! Tokens with their places in a text, by the fast path of byte-level BPE.
//!
//! The `tokenizers` crate tracks the place of every byte through every step of its pipeline. Here a token's
//! bytes are those of the text, so its place follows from the lengths of the tokens before it.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, NormalizedString, Normalizer, PostProcessorWrapper};
use xtrain_chat::EncodedToken;

use super::byte_bpe::ByteBpe;

/// The finder of the places of tokens of [`ByteBpe`].
#[derive(Debug)]
pub(super) struct PlacedBpe {
    /// Added tokens that are found in the text, then those that are found between them.
    in_text: AddedTokens,
    in_normalized: AddedTokens,
    /// Length in bytes of each token of the vocabulary, by id.
    token_bytes: Vec<usize>,
    trim: Trim,
}

/// Spaces that are no part of a token's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trim {
    None,
    All,
    /// All but a single one at the start of the text.
    AllButPrefix,
}

/// Added tokens, and a search for their names: the longest of those that begin first.
#[derive(Debug)]
struct AddedTokens {
    search: AhoCorasick,
    tokens: Vec<Added>,
}

#[derive(Debug)]
struct Added {
    id: u32,
    /// Spaces at the start and at the end of its name.
    leading: usize,
    trailing: usize,
}

impl PlacedBpe {
    /// The finder of `tokenizer`, whose documents are encoded by [`ByteBpe`]; `None` if its places follow
    /// other rules.
    pub(super) fn from_tokenizer(tokenizer: &tokenizers::Tokenizer) -> Option<PlacedBpe> {
        let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.retain(|(_, token)| !token.content.is_empty());
        if added.iter().any(|(_, token)| token.single_word || token.lstrip || token.rstrip) {
            return None;
        }
        added.sort_by_key(|(id, _)| *id);
        let (in_normalized, in_text): (Vec<_>, Vec<_>) =
            added.into_iter().partition(|(_, token)| token.normalized);
        let normalized = |token: &AddedToken| {
            let mut name = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut name).ok()?;
            }
            Some(name.get().to_owned())
        };
        let mut token_bytes = vec![0; tokenizer.get_vocab_size(true)];
        for (token, id) in tokenizer.get_vocab(false) {
            let id = id as usize;
            if id >= token_bytes.len() {
                token_bytes.resize(id + 1, 0);
            }
            token_bytes[id] = token.chars().count();
        }
        Some(PlacedBpe {
            in_text: AddedTokens::new(&in_text, |token| Some(token.content.clone()))?,
            in_normalized: AddedTokens::new(&in_normalized, normalized)?,
            token_bytes,
            trim: trim(tokenizer.get_post_processor())?,
        })
    }

    /// The tokens of `text`, which normalization does not change, with places in characters.
    pub(super) fn encode(&self, bpe: &ByteBpe, text: &str) -> Vec<EncodedToken> {
        let mut placed = Placed { tokens: Vec::with_capacity(text.len() / 3), chars: 0, trim: self.trim };
        let mut ids = Vec::new();
        self.in_text.split(text, &mut placed, |text, placed| {
            self.in_normalized.split(text, placed, |text, placed| {
                ids.clear();
                bpe.encode(text, &mut ids);
                let mut at = 0;
                for &id in &ids {
                    let end = at + self.token_bytes[id as usize];
                    placed.push_bytes(id, text, at, end);
                    at = end;
                }
            });
        });
        placed.tokens
    }
}

impl AddedTokens {
    fn new(
        tokens: &[(u32, AddedToken)],
        name: impl Fn(&AddedToken) -> Option<String>,
    ) -> Option<AddedTokens> {
        let names: Vec<String> = tokens.iter().map(|(_, token)| name(token)).collect::<Option<_>>()?;
        let search = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&names).ok()?;
        let is_space = |c: &char| *c == 'Ġ' || c.is_whitespace();
        let added = |(id, token): &(u32, AddedToken)| Added {
            id: *id,
            leading: token.content.chars().take_while(is_space).count(),
            trailing: token.content.chars().rev().take_while(is_space).count(),
        };
        Some(AddedTokens { search, tokens: tokens.iter().map(added).collect() })
    }

    /// Puts the added tokens of `text`, and calls `between` for the text between them.
    fn split<'t>(&self, text: &'t str, placed: &mut Placed, mut between: impl FnMut(&'t str, &mut Placed)) {
        let mut from = 0;
        for found in self.search.find_iter(text) {
            if from < found.start() {
                between(&text[from..found.start()], placed);
            }
            let Added { id, leading, trailing } = self.tokens[found.pattern().as_usize()];
            let start = placed.chars;
            placed.chars += text[found.range()].chars().count();
            placed.push(EncodedToken { id, start, end: placed.chars }, leading, trailing);
            from = found.end();
        }
        if from < text.len() {
            between(&text[from..], placed);
        }
    }
}

/// Tokens found so far.
struct Placed {
    tokens: Vec<EncodedToken>,
    /// Number of characters that begin in them.
    chars: usize,
    trim: Trim,
}

impl Placed {
    /// Adds the token of the bytes `from..to` of `text`. A character in part is in its place.
    fn push_bytes(&mut self, id: u32, text: &str, from: usize, to: usize) {
        let bytes = &text.as_bytes()[from..to];
        let start = self.chars - usize::from(!text.is_char_boundary(from));
        self.chars += bytes.iter().filter(|&&byte| !is_continuation(byte)).count();
        let is_space = |byte: &&u8| **byte == b' ';
        let leading = bytes.iter().take_while(is_space).count();
        let trailing = bytes.iter().rev().take_while(is_space).count();
        self.push(EncodedToken { id, start, end: self.chars }, leading, trailing);
    }

    /// Adds a token, without the spaces at its start and its end.
    fn push(&mut self, mut token: EncodedToken, leading: usize, trailing: usize) {
        let keeps_first = self.trim == Trim::AllButPrefix && token.start == 0 && leading == 1;
        if self.trim != Trim::None {
            if !keeps_first {
                token.start = token.end.min(token.start + leading);
            }
            if token.end >= trailing {
                token.end = token.start.max(token.end - trailing);
            }
        }
        self.tokens.push(token);
    }
}

/// True for a byte of UTF-8 that begins no character.
fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}

/// The spaces that a post-processor takes from places; `None` for one with other rules.
fn trim(processor: Option<&PostProcessorWrapper>) -> Option<Trim> {
    match processor {
        None | Some(PostProcessorWrapper::Template(_)) => Some(Trim::None),
        Some(PostProcessorWrapper::ByteLevel(bytes)) if !bytes.trim_offsets => Some(Trim::None),
        Some(PostProcessorWrapper::ByteLevel(bytes)) if bytes.add_prefix_space => Some(Trim::AllButPrefix),
        Some(PostProcessorWrapper::ByteLevel(_)) => Some(Trim::All),
        // Two of them would take spaces twice.
        Some(PostProcessorWrapper::Sequence(all)) => {
            let found = all.as_ref().iter().map(|each| trim(Some(each)));
            let mut found = found.collect::<Option<Vec<_>>>()?.into_iter().filter(|trim| *trim != Trim::None);
            let first = found.next().unwrap_or(Trim::None);
            found.next().is_none().then_some(first)
        }
        Some(_) => None,
    }
}
