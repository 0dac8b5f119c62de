//! The encoder of documents, chosen by the content of `tokenizer.json`.

use std::collections::HashMap;

use serde_json::Value;

use super::added_in_text::AddedInText;
use super::byte_bpe::ByteBpe;
use super::cut_rule::CutRule;
use super::space_bpe::{Prefix, SpaceBpe};

/// Encoder of documents. The `tokenizers` crate encodes a text in which an added token occurs.
#[derive(Debug)]
pub(super) enum Encoder {
    Chars(HashMap<char, u32>),
    ByteBpe { bpe: Box<ByteBpe>, nfc: bool },
    SpaceBpe(Box<SpaceBpe>),
    HuggingFace,
}

/// Chooses the encoder, and the rule for splitting documents, if it is known.
pub(super) fn choose_encoder(json: &Value, added: &AddedInText) -> (Encoder, Option<CutRule>) {
    let normalizer = json.get("normalizer").filter(|normalizer| !normalizer.is_null());
    let chars = char_vocab(json).filter(|_| normalizer.is_none() && added.is_empty());
    let fast = chars
        .map(|vocab| (Encoder::Chars(vocab), CutRule::Anywhere))
        .or_else(|| byte_bpe(json, normalizer, added))
        .or_else(|| space_bpe(json, added));
    match fast {
        Some((encoder, rule)) => (encoder, Some(rule)),
        None => (Encoder::HuggingFace, None),
    }
}

fn byte_bpe(json: &Value, normalizer: Option<&Value>, added: &AddedInText) -> Option<(Encoder, CutRule)> {
    let nfc = normalizer.is_some();
    if normalizer.is_some_and(|normalizer| normalizer.get("type").is_none_or(|t| t != "NFC")) {
        return None;
    }
    let bpe = ByteBpe::from_json(json)?;
    let cut = match bpe.is_bytes_only() && added.is_empty() && !nfc {
        true => CutRule::Anywhere,
        false => added.limit(CutRule::BetweenWords, ' '),
    };
    Some((Encoder::ByteBpe { bpe: Box::new(bpe), nfc }, cut))
}

fn space_bpe(json: &Value, added: &AddedInText) -> Option<(Encoder, CutRule)> {
    let bpe = SpaceBpe::from_json(json)?;
    // A normalizer that puts a mark before a text puts one before each text between added tokens. At a cut
    // within such a text the mark takes the place of the space, as it does not beside a token.
    let may_lack_mark = bpe.prefix() == Prefix::Mark && added.splits_at_spaces();
    let cut = if bpe.joins_before_spaces() || may_lack_mark {
        CutRule::Never
    } else if bpe.joins_newlines() || !added.is_empty() {
        added.limit(CutRule::BeforeSpaces, '▁')
    } else {
        CutRule::BetweenWords
    };
    Some((Encoder::SpaceBpe(Box::new(bpe)), cut))
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
