//! A limit on the text that a normalizer makes of a document.
//!
//! A `Replace` with a long text in place of a short one multiplies a document, and a sequence of them does so
//! over and over. A normalizer that may multiply it is first applied step by step, and stops before a step
//! whose text is too long.

use serde_json::{Value, json};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use super::MAX_HF_BYTES;
use super::shape::longest_of_charsmap;
use crate::catch_panic::catch_panic;

/// Maximum size of a normalized text. Those of published tokenizers make at most a few bytes of one.
const MAX_BYTES: u64 = 4 * MAX_HF_BYTES as u64;
/// Growth up to which a normalizer is not measured.
const USUAL_GROWTH: u64 = 4;
/// Growth from which on a normalizer is refused: even that of a name of a token would take too much memory.
const REFUSED_GROWTH: u64 = 1 << 20;

/// The steps of a normalizer that may multiply a text; none if it does not.
#[derive(Debug)]
pub(super) struct NormalizedSize {
    growth: u64,
    steps: Vec<Value>,
}

impl NormalizedSize {
    /// Steps of the `normalizer` of a `tokenizer.json`. The error is the problem, for a message.
    pub(super) fn from_normalizer(normalizer: &Value) -> Result<NormalizedSize, String> {
        let mut steps = Vec::new();
        flatten(normalizer, &mut steps);
        let growth = steps.iter().map(growth).fold(1, u64::saturating_mul);
        if growth > REFUSED_GROWTH {
            return Err(format!(
                "its normalizer may make more than {} MiB of one byte of text",
                REFUSED_GROWTH >> 20
            ));
        }
        Ok(NormalizedSize { growth, steps: if growth > USUAL_GROWTH { steps } else { Vec::new() } })
    }

    /// Fails if the normalized text would be too long. The error is the problem, for a message.
    pub(super) fn check(&self, text: &str) -> Result<(), String> {
        let bytes = text.len() as u64;
        if self.steps.is_empty() || bytes.saturating_mul(self.growth) <= MAX_BYTES {
            return Ok(());
        }
        // A long text that stays as it is may be longer.
        let most = MAX_BYTES.max(bytes.saturating_mul(USUAL_GROWTH));
        let refused = || {
            format!(
                "its normalizer makes more than {} MiB of {} KiB of text",
                most >> 20,
                bytes.div_ceil(1 << 10)
            )
        };
        let mut current = text.to_owned();
        for step in &self.steps {
            if step.get("type").is_some_and(|kind| kind == "Replace") {
                let with = |content: &str| {
                    let mut changed = step.clone();
                    changed["content"] = content.into();
                    apply(&changed, &current).map(|text| text.len() as u64)
                };
                let (rest, marked) = (with("")?, with("x")?);
                let matches = marked.saturating_sub(rest);
                let content = step.get("content").and_then(Value::as_str).map_or(0, str::len) as u64;
                if rest.saturating_add(matches.saturating_mul(content)) > most {
                    return Err(refused());
                }
            } else if growth(step) > 1 {
                // In parts, each of which makes at most as much as is allowed.
                let mut size = 0;
                for part in parts(&current, (most / growth(step)) as usize) {
                    size += apply(step, part)?.len() as u64;
                    if size > most {
                        return Err(refused());
                    }
                }
            }
            current = apply(step, &current)?;
        }
        Ok(())
    }
}

/// The steps of a normalizer, in order.
fn flatten(normalizer: &Value, steps: &mut Vec<Value>) {
    match normalizer.get("normalizers").and_then(Value::as_array) {
        Some(inner) => inner.iter().for_each(|step| flatten(step, steps)),
        None if normalizer.is_null() => {}
        None => steps.push(normalizer.clone()),
    }
}

/// Maximum number of bytes that a step makes of one, as far as its content decides it.
fn growth(step: &Value) -> u64 {
    let kind = step.get("type").and_then(Value::as_str).unwrap_or_default();
    let length = |value: Option<&Value>| value.and_then(Value::as_str).map_or(0, str::len) as u64;
    let content = length(step.get("content"));
    match kind {
        // An expression may match single characters, and the places between them.
        "Replace" => match length(step.get("pattern").and_then(|pattern| pattern.get("String"))) {
            0 => content + 1,
            pattern => content.div_ceil(pattern).max(1),
        },
        "Prepend" => length(step.get("prepend")) + 1,
        // Those that are published make 33 bytes of three.
        "Precompiled" => {
            let map = step.get("precompiled_charsmap").and_then(Value::as_str);
            map.and_then(longest_of_charsmap).filter(|&longest| longest > 64).unwrap_or(1)
        }
        _ => 1,
    }
}

/// `text` in parts of about this many bytes, and of a character at least.
fn parts(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let least = rest.chars().next()?.len_utf8();
        let (part, after) = rest.split_at(rest.floor_char_boundary(bytes).max(least));
        rest = after;
        Some(part)
    })
}

/// The text after a step.
fn apply(step: &Value, text: &str) -> Result<String, String> {
    let step: NormalizerWrapper = serde_json::from_value(json!(step)).map_err(|error| error.to_string())?;
    let mut normalized = NormalizedString::from(text);
    catch_panic(|| step.normalize(&mut normalized))?;
    Ok(normalized.get().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn check(steps: &[Value], text: &str) -> Result<(), String> {
        NormalizedSize::from_normalizer(&json!({"type": "Sequence", "normalizers": steps}))
            .and_then(|size| size.check(text))
    }

    #[test]
    fn a_normalizer_that_multiplies_a_text_is_stopped_before_it_does() {
        let thousand = "x".repeat(1000);
        let text = "a ".repeat(100_000);
        let a = || json!({"String": "a"});
        assert!(
            check(&[replace(a(), &thousand)], &text).unwrap_err().contains("more than 12 MiB of 196 KiB")
        );
        assert!(check(&[replace(json!({"Regex": "a"}), &thousand)], &text).is_err());
        // Another text has few matches, or none after the first step.
        assert_eq!(check(&[replace(a(), &thousand)], &"b".repeat(200_000)), Ok(()));
        assert_eq!(check(&[replace(json!({"String": "b"}), &thousand), replace(a(), "c")], &text), Ok(()));
        // Each step alone is small.
        let chained: Vec<Value> = (0..4).map(|_| replace(a(), "aaaa")).collect();
        assert!(check(&chained, &text).is_err());
        assert_eq!(check(&chained, "aa a"), Ok(()));
        let chained: Vec<Value> = (0..40).map(|_| replace(a(), "aa")).collect();
        assert!(check(&chained, "b").unwrap_err().contains("of one byte"));
        // A long text that stays as it is.
        let lines = [replace(json!({"String": "\n"}), "[LINE]\n")];
        assert_eq!(check(&lines, &"b".repeat(20 << 20)), Ok(()));
        assert!(check(&lines, &"\n".repeat(3 << 20)).is_err());
        // Usual normalizers.
        assert_eq!(
            check(&[json!({"type": "NFKC"}), replace(json!({"String": " "}), "▁")], &" ".repeat(5 << 20)),
            Ok(())
        );
        assert!(NormalizedSize::from_normalizer(&Value::Null).unwrap().check("a").is_ok());
    }
}
