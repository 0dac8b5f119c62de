use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizer, Tokenizer};

use super::super::added_in_text::AddedInText;
use super::super::cut_rule::{CutRule, is_cut_letter};
use super::super::words::{CharClass, char_class};
use super::rule_of;
use crate::catch_panic::catch_panic;

const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CL100K: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s";
const DEEPSEEK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const CLIP: &str =
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";

fn split(regex: &str, behavior: &str, invert: bool) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert})
}

fn isolated(regex: &str) -> Value {
    split(regex, "Isolated", false)
}

fn sequence(steps: &[Value]) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn byte_level(prefix: bool, regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex})
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

fn tokenizer(normalizer: &Value, pre_tokenizer: &Value, added: &[Value]) -> Option<Tokenizer> {
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    });
    let mut tokenizer = Tokenizer::from_bytes(file.to_string()).ok()?;
    tokenizer.set_encode_special_tokens(true);
    Some(tokenizer)
}

fn rule(normalizer: Value, pre_tokenizer: Value) -> CutRule {
    rule_of(&tokenizer(&normalizer, &pre_tokenizer, &[]).unwrap())
}

#[test]
fn cuts_of_published_pre_tokenizers_are_known() {
    let qwen = crate::tokenizer::words::QWEN;
    let gpt2 = crate::tokenizer::words::GPT2;
    let bytes = byte_level(false, false);
    let white = json!({"type": "WhitespaceSplit"});
    let t5 = sequence(&[white.clone(), metaspace("always", true)]);
    let deepseek = sequence(&[
        isolated(r"\p{N}{1,3}"),
        isolated("[一-龥぀-ゟ゠-ヿ]+"),
        isolated(DEEPSEEK),
        bytes.clone(),
    ]);
    for (pre_tokenizer, expected) in [
        (isolated(gpt2), CutRule::BetweenWords),
        (isolated(qwen), CutRule::BetweenWords),
        (sequence(&[isolated(O200K), bytes.clone()]), CutRule::BetweenLetters),
        (sequence(&[isolated(CL100K), bytes.clone()]), CutRule::BetweenWords),
        (deepseek, CutRule::BetweenWords),
        (sequence(&[split(CLIP, "Removed", true), byte_level(false, true)]), CutRule::BetweenWords),
        (sequence(&[isolated(BLOOM), bytes.clone()]), CutRule::BeforeSpaces),
        (byte_level(false, true), CutRule::BetweenWords),
        (byte_level(true, true), CutRule::BeforeSpaces),
        (
            sequence(&[json!({"type": "Digits", "individual_digits": true}), byte_level(false, true)]),
            CutRule::BetweenWords,
        ),
        (t5, CutRule::BetweenWords),
        (sequence(&[white.clone(), metaspace("first", true)]), CutRule::BeforeSpaces),
        (metaspace("always", true), CutRule::BeforeSpaces),
        (metaspace("first", true), CutRule::BeforeSpaces),
        (metaspace("always", false), CutRule::Never),
        (white, CutRule::BetweenWords),
        (json!({"type": "Whitespace"}), CutRule::BetweenWords),
        (json!({"type": "BertPreTokenizer"}), CutRule::BetweenWords),
        (json!({"type": "CharDelimiterSplit", "delimiter": " "}), CutRule::BeforeSpaces),
        (json!({"type": "CharDelimiterSplit", "delimiter": "\n"}), CutRule::AfterNewlines),
        (split(" ", "Removed", false), CutRule::BeforeSpaces),
        (split(" ", "MergedWithNext", false), CutRule::BeforeSpaces),
        (split(" ", "MergedWithPrevious", false), CutRule::Never),
        (split(r"\n", "MergedWithPrevious", false), CutRule::AfterNewlines),
        (split(r"\w+|\W+", "Isolated", false), CutRule::BetweenLetters),
        (split(r"\w+|\W+", "Contiguous", false), CutRule::Never),
        (sequence(&[json!({"type": "UnicodeScripts"}), isolated(gpt2)]), CutRule::Never),
        (sequence(&[isolated(gpt2), json!({"type": "UnicodeScripts"})]), CutRule::BetweenWords),
        (isolated(r"(?<=a)\w+|\W+"), CutRule::Never),
        (isolated(r"^\w+|\W+"), CutRule::Never),
        (isolated(r"\w+\b|\W"), CutRule::Never),
        (isolated(r"[^\n]+\n?|\n"), CutRule::AfterNewlines),
        (isolated(r".+|\n"), CutRule::AfterNewlines),
        (isolated(r"\w*"), CutRule::Never),
        (json!(null), CutRule::Never),
    ] {
        assert_eq!(rule(json!(null), pre_tokenizer.clone()), expected, "{pre_tokenizer}");
    }
    let (kind, qwen) = (|kind: &str| json!({"type": kind}), isolated(qwen));
    for (normalizer, expected) in [
        (kind("NFC"), CutRule::BetweenWords),
        (kind("NFD"), CutRule::BetweenWords),
        (kind("NFKC"), CutRule::BetweenLetters),
        (kind("StripAccents"), CutRule::BeforeSpaces),
        (kind("Lowercase"), CutRule::BetweenWords),
        (kind("Nmt"), CutRule::BeforeSpaces),
        (json!({"type": "Strip", "strip_left": true, "strip_right": false}), CutRule::AfterNewlines),
        (json!({"type": "Prepend", "prepend": "▁"}), CutRule::Never),
        (json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}), CutRule::AfterNewlines),
        (json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}), CutRule::BetweenWords),
        (json!({"type": "Replace", "pattern": {"String": "``"}, "content": "\""}), CutRule::BetweenWords),
        // A space comes before the newline, which was none in the text.
        (json!({"type": "Replace", "pattern": {"Regex": "a|b"}, "content": "é "}), CutRule::Never),
        (json!({"type": "Replace", "pattern": {"String": "!"}, "content": ""}), CutRule::BeforeSpaces),
    ] {
        assert_eq!(rule(normalizer.clone(), qwen.clone()), expected, "{normalizer}");
    }
}

#[test]
fn letters_at_cuts_decompose_into_letters_and_marks() {
    let letters_and_marks = tokenizers::utils::SysRegex::new(r"[\p{L}\p{M}]").unwrap();
    for kind in ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"] {
        let tokenizer = tokenizer(&json!({"type": kind}), &json!(null), &[]).unwrap();
        for c in ('\0'..=char::MAX).filter(|&c| is_cut_letter(c)) {
            let mut text = tokenizers::NormalizedString::from(c.to_string());
            tokenizers::Normalizer::normalize(tokenizer.get_normalizer().unwrap(), &mut text).unwrap();
            let (first, last) = (text.get().chars().next().unwrap(), text.get().chars().next_back().unwrap());
            assert_eq!(char_class(first), CharClass::Letter, "{kind} {c:?}");
            let is_one = letters_and_marks.find_iter(&last.to_string()).next().is_some();
            assert!(is_one, "{kind} {c:?} {last:?}");
        }
    }
}

/// The pieces into which `text` is split, and the added tokens among them; `None` where the `tokenizers`
/// crate panics, as it does where a token that strips white space meets another one.
fn pieces(tokenizer: &Tokenizer, text: &str) -> Option<Vec<(String, Option<u32>)>> {
    let split = catch_panic(|| {
        let mut split =
            tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
        tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut split)?;
        Ok::<_, tokenizers::Error>(split)
    });
    let split = split.ok()?;
    let pieces = split.get_splits(OffsetReferential::Normalized, OffsetType::Byte).into_iter();
    let piece = |(piece, _, added): (&str, _, &Option<Vec<tokenizers::Token>>)| {
        (piece.to_owned(), added.as_ref().map(|tokens| tokens[0].id))
    };
    Some(pieces.map(piece).collect())
}

fn one_of(texts: &'static [&'static str]) -> BoxedStrategy<String> {
    prop::sample::select(texts).prop_map(str::to_owned).boxed()
}

/// Expressions of the parts that published ones consist of, and of some that they do not.
fn expressions() -> impl Strategy<Value = String> {
    let part = one_of(&[
        "a",
        "b",
        "e",
        " ",
        r"\n",
        r"\s",
        r"\S",
        r"\w",
        r"\W",
        ".",
        r"\p{L}",
        r"\p{N}",
        r"[^\s\p{L}]",
        r"[^\r\n]",
        r"[\r\n]",
        r"[\r\n/]",
        r"[a-c ]",
        r"\p{M}",
        "(?i:'s)",
        r"[[:alpha:]]",
        r"[^ ]",
        r"\p{Lu}",
        "!",
        r"\d",
        r"[^\r\n\p{L}\p{N}]",
    ]);
    let quantifier = one_of(&[
        "", "", "", "?", "+", "+", "*", "++", "*+", "?+", "+?", "*?", "{1,2}", "{2}", "{1,2}+", "{,2}",
    ]);
    let quantified = (part, quantifier).prop_map(|(part, quantifier)| part + &quantifier);
    let ahead =
        (one_of(&["(?=", "(?!"]), quantified.clone()).prop_map(|(open, part)| format!("{open}{part})"));
    let item = prop_oneof![8 => quantified, 1 => ahead, 1 => Just("$".to_owned())].boxed();
    let alternative = prop::collection::vec(item, 1..4).prop_map(|items| items.concat());
    let alternatives =
        prop::collection::vec(alternative, 1..4).prop_map(|alternatives| alternatives.join("|"));
    let group = (
        one_of(&["(?:", "(", "(?>", "(?i:"]),
        alternatives.clone(),
        one_of(&[")", ")+", ")?", ")*", "){2}"]),
    );
    let nested = prop_oneof![
        3 => alternatives.clone(),
        1 => (group, alternatives.clone()).prop_map(|((open, inside, close), rest)| {
            format!("{open}{inside}{close}|{rest}")
        }),
    ];
    // The ends of published expressions, so that most match every character.
    (
        nested,
        one_of(&[
            "",
            r"|\s+(?!\S)|\s+",
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
            r"|\p{L}|.|\n",
        ]),
    )
        .prop_map(|(start, end)| start + &end)
}

fn normalizers() -> impl Strategy<Value = Value> {
    let replace =
        |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let one = prop::sample::select(vec![
        json!({"type": "NFC"}),
        json!({"type": "NFD"}),
        json!({"type": "NFKC"}),
        json!({"type": "NFKD"}),
        json!({"type": "Lowercase"}),
        json!({"type": "StripAccents"}),
        json!({"type": "Nmt"}),
        json!({"type": "Strip", "strip_left": false, "strip_right": true}),
        json!({"type": "Strip", "strip_left": true, "strip_right": false}),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
        replace(json!({"Regex": " {2,}"}), " "),
        replace(json!({"String": " "}), "▁"),
        replace(json!({"Regex": "a|b"}), "é "),
        replace(json!({"Regex": "[ab] ?"}), "x"),
        replace(json!({"Regex": "[a!]"}), ""),
        replace(json!({"String": "\n"}), ""),
        replace(json!({"Regex": r"\p{L}$"}), "1"),
    ]);
    prop_oneof![
        3 => Just(Value::Null),
        2 => one.clone(),
        1 => prop::collection::vec(one, 1..4).prop_map(|steps| json!({"type": "Sequence", "normalizers": steps})),
    ]
}

fn pre_tokenizers() -> impl Strategy<Value = Value> {
    let behavior =
        one_of(&["Isolated", "Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]);
    let split = (expressions(), behavior, any::<bool>())
        .prop_map(|(regex, behavior, invert)| split(&regex, &behavior, invert))
        .boxed();
    let plain = prop::sample::select(vec![
        json!({"type": "Whitespace"}),
        json!({"type": "WhitespaceSplit"}),
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "Digits", "individual_digits": true}),
        json!({"type": "Digits", "individual_digits": false}),
        json!({"type": "Punctuation", "behavior": "Contiguous"}),
        json!({"type": "Punctuation", "behavior": "MergedWithNext"}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "FixedLength", "length": 3}),
        json!({"type": "CharDelimiterSplit", "delimiter": "a"}),
        json!({"type": "CharDelimiterSplit", "delimiter": " "}),
        byte_level(false, true),
        byte_level(true, true),
        byte_level(true, false),
        metaspace("first", true),
        metaspace("always", true),
        metaspace("never", true),
        metaspace("always", false),
    ]);
    let step = prop_oneof![3 => split.clone(), 1 => plain.clone()];
    prop_oneof![4 => split, 1 => plain, 3 => prop::collection::vec(step, 2..4).prop_map(|steps: Vec<Value>| sequence(&steps))]
}

fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        6 => one_of(&["a", "b", "e", "s", "S", "é", "ß", "x", "中", "文", "İ", "ガ", "Ǆ", "ﬁ"]),
        4 => Just(" ".to_owned()),
        3 => Just("\n".to_owned()),
        2 => one_of(&["1", "2", "½", "!", "'", "/", "'s", ".", "▁", "¨", "_", "-"]),
        1 => one_of(&["\u{301}", "\u{344}", "\u{93C}", " \u{301}", "\t", "\r\n", "  ", "\n\n", "\u{3000}", "\u{200B}", "\u{FFFD}", "ŀ", "ﹰ"]),
    ];
    prop::collection::vec(part, 0..30).prop_map(|parts| parts.concat())
}

/// Added tokens, with all combinations of flags.
fn added_tokens() -> impl Strategy<Value = Vec<Value>> {
    let name = one_of(&[
        "a", "b", "S", "é", "e\u{301}", "中", "1", "!", "'s", "ab", "a ", " a", " ", "  ", " \u{301}", "\n",
        "\n\n", "a b", "a\nb", "!\n", "\n!", "\na", "\t", "▁", "▁a", "a▁",
    ]);
    let token = (name, prop::array::uniform4(prop::bool::weighted(0.3)), prop::bool::weighted(0.2)).prop_map(
        |(content, [lstrip, rstrip, single_word, normalized], special)| {
            json!({
                "id": 0, "content": content, "lstrip": lstrip, "rstrip": rstrip, "single_word": single_word,
                "normalized": normalized, "special": special,
            })
        },
    );
    prop_oneof![1 => Just(Vec::new()), 1 => prop::collection::vec(token, 1..4)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_global_rejects: 100_000, ..ProptestConfig::default() })]

    #[test]
    fn parts_are_split_like_the_whole(
        normalizer in normalizers(),
        pre_tokenizer in pre_tokenizers(),
        added in added_tokens(),
        texts in prop::collection::vec(texts(), 50),
    ) {
        let tokenizer = tokenizer(&normalizer, &pre_tokenizer, &added);
        let Some(tokenizer) = tokenizer else { return Err(TestCaseError::reject("expression")) };
        let Ok(added) = AddedInText::from_tokenizer(&tokenizer) else { return Err(TestCaseError::reject("one token")) };
        let rule = added.limit(rule_of(&tokenizer), ' ');
        prop_assume!(rule != CutRule::Never);
        for text in texts {
            let Some(whole) = pieces(&tokenizer, &text) else { continue };
            let mut from = 1;
            while let Some(at) = rule.first_cut(&text, from) {
                let parts = [&text[..at], &text[at..]].map(|part| pieces(&tokenizer, part).unwrap());
                prop_assert_eq!(&parts.concat(), &whole, "{} at {} under {:?}", text, at, rule);
                from = at + 1;
            }
        }
    }
}
