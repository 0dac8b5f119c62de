//! Rows of chats and of prompts with answers, by the names of their fields. Training on them needs a template
//! and a mask, so that none of their fields is taken for text unless the user names it.

/// A field of a row, or a column.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field<'r> {
    pub(super) name: &'r str,
    pub(super) content: Content,
}

/// Content of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Text,
    List,
    /// An object or a structure.
    Object,
    /// A number, a boolean or null.
    Other,
}

/// Names of fields with the turns of a chat.
const CHATS: [&str; 7] = ["messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"];

/// Words in the names of fields with prompts, and with answers.
const PROMPTS: [&str; 8] =
    ["prompt", "prompts", "instruction", "instructions", "question", "questions", "query", "problem"];
const ANSWERS: [&str; 12] = [
    "completion",
    "completions",
    "response",
    "responses",
    "answer",
    "answers",
    "solution",
    "solutions",
    "chosen",
    "rejected",
    "reply",
    "replies",
];

/// Names that mean an answer beside a prompt.
const OUTPUTS: [&str; 4] = ["output", "outputs", "target", "targets"];

/// Names that mean a prompt and its answer only together.
const PAIRS: [(&str, &str); 19] = [
    ("input", "output"),
    ("input", "target"),
    ("input", "response"),
    ("inputs", "outputs"),
    ("inputs", "targets"),
    ("source", "target"),
    ("src", "tgt"),
    ("q", "a"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("human", "gpt"),
    ("human", "bot"),
    ("user", "bot"),
    ("input_text", "output_text"),
    ("input_text", "target_text"),
    ("source_text", "target_text"),
    ("user_message", "assistant_message"),
    ("request", "response"),
    ("post", "reply"),
];

/// Names that mean a part of the prompt beside a prompt and its answer.
const CONTEXTS: [&str; 4] = ["input", "context", "system", "passage"];

/// Last words of names that say something about a prompt or an answer.
const ABOUT: [&str; 12] =
    ["id", "ids", "count", "date", "hash", "lang", "language", "length", "score", "source", "type", "url"];

/// Advice for rows with these fields, if they are chats or prompts with answers.
pub(super) fn advice(noun: &str, fields: &[Field<'_>]) -> Option<String> {
    if let Some(chat) = fields.iter().find(|field| is_chat(field)) {
        return Some(format!(
            "{:?} is chat data, and fine-tuning on chats is on the roadmap, but not supported yet; name plain text",
            chat.name
        ));
    }
    let parts = parts(fields);
    parts.first()?;
    let names = parts.iter().map(|part| format!("{:?}", part.name)).collect::<Vec<_>>().join(", ");
    let has = |name: &str| parts.iter().any(|part| is_named(part, name));
    let (what, written) = match has("chosen") && has("rejected") {
        true => ("preferences between answers", "the chosen answer, with its prompt if any,"),
        false => ("pairs of prompt and answer", "both"),
    };
    let texts: Vec<&Field<'_>> = parts.iter().filter(|part| part.content == Content::Text).copied().collect();
    let joined = match noun == "field" && texts.len() == parts.len() {
        true => format!(" (jq -c '{{text: ({})}}' FILE > NEW.jsonl)", joined(&texts)),
        false => String::new(),
    };
    let is_alone = |part: &&&Field<'_>| !is_prompt(part) && !is_context(part) && !is_named(part, "rejected");
    let alone = texts.iter().rfind(is_alone).map_or(String::new(), |only| {
        let name = format!("{:?}", only.name);
        format!(
            ", or name one of them: data.text_field = {name} in a run file, --text-field {name} elsewhere"
        )
    });
    Some(format!(
        "{what} ({names}) are not supported yet; write {written} into one {noun}, text{joined}{alone}"
    ))
}

/// A filter of jq for the fields in a row, each in lines of its own.
fn joined(fields: &[&Field<'_>]) -> String {
    let is_word = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let filter = |field: &&Field<'_>| match is_word(field.name) {
        true => format!(".{}", field.name),
        false => format!(".[{:?}]", field.name),
    };
    let written = fields.iter().filter(|field| !is_named(field, "rejected"));
    written.map(filter).collect::<Vec<_>>().join(" + \"\\n\" + ")
}

fn is_chat(field: &Field<'_>) -> bool {
    field.content == Content::List && CHATS.contains(&field.name.to_lowercase().as_str())
}

/// The prompts and answers among the fields, in the order of the row; none unless there are both.
fn parts<'r, 'f>(fields: &'f [Field<'r>]) -> Vec<&'f Field<'r>> {
    // An answer may be a number: that of a choice.
    let is_part = |field: &&Field<'_>| field.content != Content::Other || is_named_answer(field);
    let fields = || fields.iter().filter(is_part);
    let has = |name: &str| fields().any(|field| is_named(field, name));
    let is_output = |field: &Field<'_>| is_answer(field) || OUTPUTS.iter().any(|name| is_named(field, name));
    let is_of_pair = |field: &Field<'_>| is_prompt(field) || is_output(field) || is_context(field);
    if fields().any(|field| is_prompt(field)) && fields().any(|field| is_output(field))
        || has("chosen") && has("rejected")
    {
        return fields().filter(|field| is_of_pair(field)).collect();
    }
    if let Some((prompt, answer)) = PAIRS.iter().find(|(prompt, answer)| has(prompt) && has(answer)) {
        return fields().filter(|field| is_named(field, prompt) || is_named(field, answer)).collect();
    }
    // `{"translation": {"en": "...", "de": "..."}}`
    fields().filter(|field| is_named(field, "translation") && field.content == Content::Object).collect()
}

fn is_named(field: &Field<'_>, name: &str) -> bool {
    field.name.eq_ignore_ascii_case(name)
}

fn is_named_answer(field: &Field<'_>) -> bool {
    ANSWERS.iter().any(|name| is_named(field, name))
}

fn is_context(field: &Field<'_>) -> bool {
    CONTEXTS.iter().any(|name| is_named(field, name))
}

fn is_prompt(field: &Field<'_>) -> bool {
    has_word(field.name, &PROMPTS)
}

fn is_answer(field: &Field<'_>) -> bool {
    has_word(field.name, &ANSWERS)
}

/// True if one of `words` is a word of the name, whose words are separated by marks or capitals.
fn has_word(name: &str, words: &[&str]) -> bool {
    let mut separated = String::new();
    let mut before = ' ';
    for c in name.chars() {
        if c.is_uppercase() && before.is_lowercase() {
            separated.push(' ');
        }
        separated.extend(c.to_lowercase());
        before = c;
    }
    let of_name: Vec<&str> = separated.split(|c: char| !c.is_alphanumeric()).collect();
    let is_about = of_name.last().is_some_and(|last| ABOUT.contains(last));
    !is_about && of_name.iter().any(|word| words.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The advice for a row with these fields of text; `[]` marks a list, `{}` an object and `#` a number.
    fn of(names: &[&str]) -> String {
        let field = |name: &&str| {
            let content = match name {
                _ if name.ends_with("[]") => Content::List,
                _ if name.ends_with("{}") => Content::Object,
                _ if name.ends_with('#') => Content::Other,
                _ => Content::Text,
            };
            (name.trim_end_matches(['[', ']', '{', '}', '#']).to_owned(), content)
        };
        let fields: Vec<(String, Content)> = names.iter().map(field).collect();
        let fields: Vec<Field<'_>> =
            fields.iter().map(|(name, content)| Field { name, content: *content }).collect();
        advice("field", &fields).unwrap_or_default()
    }

    #[test]
    fn prompts_with_answers_are_told_from_text() {
        for names in [
            &["prompt", "completion"][..],
            &["instruction", "input", "output"],
            &["Instruction", "Response"],
            &["id#", "question", "answer"],
            &["context", "question", "answers{}"],
            &["system_prompt", "question", "response"],
            &["query", "response"],
            &["source", "target"],
            &["inputs", "targets"],
            &["userPrompt", "modelAnswer"],
            &["problem", "solution"],
            &["instruction", "context", "response", "category"],
            &["input_text", "target_text"],
            &["question", "subject", "choices[]", "answer#"],
            &["post", "reply"],
            &["question", "target"],
            &["translation{}"],
        ] {
            assert!(of(names).starts_with("pairs of prompt and answer ("), "{names:?}: {}", of(names));
        }
        for names in
            [&["chosen", "rejected"][..], &["chosen[]", "rejected[]"], &["prompt", "chosen", "rejected"]]
        {
            assert!(of(names).starts_with("preferences between answers ("), "{names:?}: {}", of(names));
        }
        for names in [&["messages[]"][..], &["id", "conversations[]"], &["dialog[]", "summary"]] {
            assert!(of(names).contains("is chat data"), "{names:?}: {}", of(names));
        }
        for names in [
            &["body"][..],
            &["title", "body", "source"],
            &["prompt"],
            &["content", "question_id", "answer_count#"],
            &["input", "label#"],
            &["text", "source", "url", "target_lang"],
            &["document", "summary"],
            &["user", "comment"],
        ] {
            assert_eq!(of(names), "", "{names:?}");
        }
    }

    #[test]
    fn the_advice_joins_the_fields_of_text() {
        let said = of(&["instruction", "in put", "input", "output", "n#"]);
        assert!(
            said.contains(r#"jq -c '{text: (.instruction + "\n" + .input + "\n" + .output)}' FILE"#),
            "{said}"
        );
        assert!(said.contains("--text-field \"output\" elsewhere"), "{said}");
        let said = of(&["the prompt", "chosen", "rejected"]);
        assert!(said.contains(r#"{text: (.["the prompt"] + "\n" + .chosen)}"#), "{said}");
        // Training on the prompts alone is no advice.
        let said = of(&["prompt", "answers[]"]);
        assert!(!said.contains("jq") && !said.contains("text_field"), "{said}");
        assert!(of(&["chosen", "rejected"]).contains("write the chosen answer"));
    }
}
