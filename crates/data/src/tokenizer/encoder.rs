//! The encoder of documents, chosen by the content of `tokenizer.json`.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::AddedToken;

use super::byte_bpe::ByteBpe;
use super::cut_rule::CutRule;
use super::space_bpe::SpaceBpe;

/// Encoder of documents. `added` are names of added tokens that are recognised in documents; a text with one
/// of them is encoded by the `tokenizers` crate.
#[derive(Debug)]
pub(super) enum Encoder {
    Chars(HashMap<char, u32>),
    ByteBpe { bpe: Box<ByteBpe>, nfc: bool, added: Vec<String> },
    SpaceBpe { bpe: Box<SpaceBpe>, added: Vec<String> },
    HuggingFace,
}

/// Chooses the encoder, and the rule for splitting documents.
pub(super) fn choose_encoder(json: &Value, added: &[(u32, AddedToken)]) -> (Encoder, CutRule) {
    let in_text: Vec<&AddedToken> =
        added.iter().map(|(_, token)| token).filter(|token| !token.special).collect();
    let normalizer = json.get("normalizer").filter(|normalizer| !normalizer.is_null());
    let chars = char_vocab(json).filter(|_| normalizer.is_none() && in_text.is_empty());
    chars
        .map(|vocab| (Encoder::Chars(vocab), CutRule::Anywhere))
        .or_else(|| byte_bpe(json, normalizer, &in_text))
        .or_else(|| space_bpe(json, &in_text))
        .unwrap_or((Encoder::HuggingFace, CutRule::Never))
}

fn byte_bpe(json: &Value, normalizer: Option<&Value>, in_text: &[&AddedToken]) -> Option<(Encoder, CutRule)> {
    let nfc = normalizer.is_some();
    if normalizer.is_some_and(|normalizer| normalizer.get("type").is_none_or(|t| t != "NFC")) {
        return None;
    }
    let bpe = ByteBpe::from_json(json)?;
    let cut = if bpe.is_bytes_only() && in_text.is_empty() && !nfc {
        CutRule::Anywhere
    } else if bpe.is_bytes_only() || in_text.iter().any(|token| reaches_past_itself(token)) {
        CutRule::Never
    } else {
        CutRule::BetweenWords
    };
    Some((Encoder::ByteBpe { bpe: Box::new(bpe), nfc, added: names(in_text) }, cut))
}

fn space_bpe(json: &Value, in_text: &[&AddedToken]) -> Option<(Encoder, CutRule)> {
    // A token that is matched after normalization may be spelled differently in the text.
    let bpe = SpaceBpe::from_json(json).filter(|_| !in_text.iter().any(|token| token.normalized))?;
    let cut = if bpe.joins_before_spaces() || in_text.iter().any(|token| reaches_past_itself(token)) {
        CutRule::Never
    } else if bpe.joins_newlines() || !in_text.is_empty() {
        // Texts with such tokens are encoded by the `tokenizers` crate, for which later pieces must start
        // with a space.
        CutRule::BeforeSpaces
    } else {
        CutRule::BetweenWords
    };
    Some((Encoder::SpaceBpe { bpe: Box::new(bpe), added: names(in_text) }, cut))
}

fn names(tokens: &[&AddedToken]) -> Vec<String> {
    tokens.iter().map(|token| token.content.clone()).collect()
}

/// True for a token that a cut between words could break or alter.
fn reaches_past_itself(token: &AddedToken) -> bool {
    token.lstrip || token.rstrip || token.single_word || token.content.contains(char::is_whitespace)
}

/// The vocabulary of a file in which every token is one character, without merges and pre-tokenizer.
fn char_vocab(json: &Value) -> Option<HashMap<char, u32>> {
    let model = json.get("model")?;
    let absent = |parent: &Value, key: &str| parent.get(key).is_none_or(Value::is_null);
    let plain = model.get("type")? == "BPE"
        && model.get("merges")?.as_array()?.is_empty()
        && model.get("byte_fallback").is_none_or(|fallback| fallback == false)
        && ["unk_token", "continuing_subword_prefix", "end_of_word_suffix"]
            .iter()
            .all(|key| absent(model, key))
        && absent(json, "pre_tokenizer");
    if !plain {
        return None;
    }
    let entries = model.get("vocab")?.as_object()?.iter();
    entries
        .map(|(token, id)| {
            let mut chars = token.chars();
            let only = chars.next().filter(|_| chars.next().is_none())?;
            Some((only, u32::try_from(id.as_u64()?).ok()?))
        })
        .collect()
}
