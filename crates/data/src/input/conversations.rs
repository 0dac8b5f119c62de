//! Rows of chats, of prompts with answers and of pairs of texts, by the names of their fields. None of their
//! fields is taken for text unless the user names it.

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

/// True for a string that holds a list of objects in JSON, as chats are stored in columns of strings.
pub(super) fn is_json_list(text: &str) -> bool {
    text.trim_start().strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with('{'))
}

/// True for the name of a field with the turns of a chat.
pub(super) fn is_chat_name(name: &str) -> bool {
    CHATS.contains(&name.to_lowercase().as_str())
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
const PAIRS: [(&str, &str); 21] = [
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
    ("goal", "sol1"),
    ("ctx", "endings"),
];

/// Names that mean two texts to compare only together.
const COMPARED: [(&str, &str); 12] = [
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question1", "question2"),
    ("anchor", "positive"),
    ("anchor", "pos"),
    ("query", "positive"),
    ("query", "pos"),
    ("query", "passage"),
    ("query", "document"),
];

/// Names of further fields beside two texts to compare, or an answer.
const OTHERS: [&str; 4] = ["neg", "negative", "negatives", "sol2"];

/// Names of fields with answers to choose from.
const CHOICES: [&str; 3] = ["choices", "options", "endings"];

/// Words in the names of fields with the steps to an answer.
const REASONING: [&str; 9] = [
    "reasoning",
    "thinking",
    "think",
    "thought",
    "thoughts",
    "rationale",
    "rationales",
    "explanation",
    "cot",
];

/// Names that mean a part of the prompt beside a prompt and its answer.
const CONTEXTS: [&str; 3] = ["input", "context", "passage"];

/// Last words of names that say something about a prompt or an answer.
const ABOUT: [&str; 12] =
    ["id", "ids", "count", "date", "hash", "lang", "language", "length", "score", "source", "type", "url"];

/// Advice for rows with these fields, if they are chats or prompts with answers.
pub(super) fn advice(noun: &str, fields: &[Field<'_>]) -> Option<String> {
    if let Some(chat) = fields.iter().find(|field| is_chat(field)) {
        let advice = match ["messages", "conversations"].contains(&chat.name) {
            true => AS_CONVERSATIONS.to_owned(),
            false => format!("name the {noun} messages to train on its answers"),
        };
        return Some(format!("{:?} is chat data; {advice}, or name plain text", chat.name));
    }
    let TextParts { fields: parts, is_compared } = parts(fields);
    parts.first()?;
    let names = parts.iter().map(|part| format!("{:?}", part.name)).collect::<Vec<_>>().join(", ");
    let has = |name: &str| parts.iter().any(|part| is_named(part, name));
    let (what, written) = match (is_compared, has("chosen") && has("rejected")) {
        (true, _) => ("pairs of texts", "the texts"),
        (_, true) => ("preferences between answers", "the chosen answer, with its prompt if any,"),
        _ => (PROMPTS_WITH_ANSWERS, "all of them"),
    };
    let texts: Vec<&Field<'_>> = parts.iter().filter(|part| part.content == Content::Text).copied().collect();
    let joined = match noun == "field" && texts.len() == parts.len() {
        true => format!(" (jq -c '{{text: ({})}}' FILE > NEW.jsonl)", joined(&texts)),
        false => String::new(),
    };
    let is_alone =
        |part: &&&Field<'_>| !is_compared && place(part) == TextPlace::Answer && !is_named(part, "rejected");
    let alone = texts.iter().rfind(is_alone).map_or(String::new(), |only| {
        let name = format!("{:?}", only.name);
        format!(
            ", or name one of them: data.text_field = {name} in a run file, --text-field {name} elsewhere"
        )
    });
    let advice = match what {
        PROMPTS_WITH_ANSWERS if has("prompt") && has("completion") || has("instruction") && has("output") => {
            format!("; {AS_CONVERSATIONS}, or")
        }
        PROMPTS_WITH_ANSWERS => "; name them prompt and completion to train on the answers, or".to_owned(),
        _ => " are not supported yet;".to_owned(),
    };
    Some(format!("{what} ({names}){advice} write {written} into one {noun}, text{joined}{alone}"))
}

const PROMPTS_WITH_ANSWERS: &str = "pairs of prompt and answer";

/// Advice for rows that can be trained on as conversations.
const AS_CONVERSATIONS: &str =
    "read the rows as conversations (data.format = \"chat\" in a run file, --chat in tokenize)";

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
    // What is not to be learned.
    let is_wrong =
        |field: &Field<'_>| is_named(field, "rejected") || OTHERS.iter().any(|name| is_named(field, name));
    let written = fields.iter().filter(|field| !is_wrong(field));
    written.map(filter).collect::<Vec<_>>().join(" + \"\\n\" + ")
}

fn is_chat(field: &Field<'_>) -> bool {
    field.content == Content::List && is_chat_name(field.name)
}

/// Fields that belong together, in the order in which a text has them.
struct TextParts<'r, 'f> {
    fields: Vec<&'f Field<'r>>,
    /// True for texts to compare, false for prompts with answers.
    is_compared: bool,
}

/// Places in a text.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum TextPlace {
    System,
    Prompt,
    Context,
    Choices,
    Reasoning,
    Answer,
}

/// The place of a field of a prompt with its answer.
fn place(field: &Field<'_>) -> TextPlace {
    match () {
        () if has_word(field.name, &["system"]) => TextPlace::System,
        () if is_reasoning(field) => TextPlace::Reasoning,
        () if is_answer(field) => TextPlace::Answer,
        () if is_prompt(field) => TextPlace::Prompt,
        () if is_context(field) => TextPlace::Context,
        () if CHOICES.iter().any(|name| is_named(field, name)) => TextPlace::Choices,
        () => TextPlace::Answer,
    }
}

/// The prompts and answers, or the texts to compare, among the fields of a row; none unless there are both.
fn parts<'r, 'f>(fields: &'f [Field<'r>]) -> TextParts<'r, 'f> {
    // An answer may be a number: that of a choice.
    let is_part = |field: &&Field<'_>| field.content != Content::Other || is_named_answer(field);
    let fields = || fields.iter().filter(is_part);
    let has = |name: &str| fields().any(|field| is_named(field, name));
    let is_pair = |(one, other): &&(&str, &str)| has(one) && has(other);
    let is_other = |field: &Field<'_>| OTHERS.iter().any(|name| is_named(field, name));
    // The name of the first text decides, whatever else it may mean.
    let has_answer = fields().any(|field| is_answer(field));
    if let Some((one, _)) = COMPARED.iter().find(is_pair).filter(|_| !has_answer) {
        let is_second = |field: &Field<'_>| {
            COMPARED.iter().any(|(first, second)| first == one && is_named(field, second)) || is_other(field)
        };
        let mut texts: Vec<&Field<'_>> =
            fields().filter(|field| is_named(field, one) || is_second(field)).collect();
        texts.sort_by_key(|field| !is_named(field, one));
        return TextParts { fields: texts, is_compared: true };
    }
    let is_output = |field: &Field<'_>| is_answer(field) || OUTPUTS.iter().any(|name| is_named(field, name));
    let is_around = |field: &Field<'_>| {
        let is_choice = CHOICES.iter().any(|name| is_named(field, name));
        is_context(field)
            || is_reasoning(field)
            || has_word(field.name, &["system"])
            || is_choice
            || is_other(field)
    };
    if fields().any(|field| is_prompt(field)) && fields().any(is_output) || has("chosen") && has("rejected") {
        let is_of_pair = |field: &&Field<'_>| is_prompt(field) || is_output(field) || is_around(field);
        let mut parts: Vec<&Field<'_>> = fields().filter(is_of_pair).collect();
        parts.sort_by_key(|field| place(field));
        return TextParts { fields: parts, is_compared: false };
    }
    if let Some((prompt, answer)) = PAIRS.iter().find(is_pair) {
        let is_of_pair =
            |field: &&Field<'_>| is_named(field, prompt) || is_named(field, answer) || is_around(field);
        let mut parts: Vec<&Field<'_>> = fields().filter(is_of_pair).collect();
        parts.sort_by_key(|field| match () {
            () if is_named(field, prompt) => TextPlace::Prompt,
            () if is_named(field, answer) => TextPlace::Answer,
            () => place(field),
        });
        return TextParts { fields: parts, is_compared: false };
    }
    // `{"translation": {"en": "...", "de": "..."}}`
    let translations =
        fields().filter(|field| is_named(field, "translation") && field.content == Content::Object);
    TextParts { fields: translations.collect(), is_compared: false }
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

fn is_reasoning(field: &Field<'_>) -> bool {
    has_word(field.name, &REASONING)
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
    let lower = name.to_lowercase();
    // `CoT` is a word too.
    let words_of =
        |name: &'_ str| name.split(|c: char| !c.is_alphanumeric()).map(str::to_owned).collect::<Vec<_>>();
    let of_name = [words_of(&lower), words_of(&separated)].concat();
    let is_about = of_name.last().is_some_and(|last| ABOUT.contains(&last.as_str()));
    !is_about && of_name.iter().any(|word| words.contains(&word.as_str()))
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
            &["goal", "sol1", "sol2"],
            &["query", "passage", "answer"],
            &["ctx", "endings[]", "label"],
            &["input", "Complex_CoT", "Response", "question"],
        ] {
            assert!(of(names).starts_with("pairs of prompt and answer ("), "{names:?}: {}", of(names));
        }
        for names in
            [&["chosen", "rejected"][..], &["chosen[]", "rejected[]"], &["prompt", "chosen", "rejected"]]
        {
            assert!(of(names).starts_with("preferences between answers ("), "{names:?}: {}", of(names));
        }
        for names in [
            &["query", "pos[]", "neg[]"][..],
            &["premise", "hypothesis", "label#"],
            &["sentence1", "sentence2"],
            &["anchor", "positive", "negative"],
            &["Query", "Positive"],
            &["question1", "question2", "is_duplicate#"],
        ] {
            assert!(of(names).starts_with("pairs of texts ("), "{names:?}: {}", of(names));
            assert!(!of(names).contains("text_field"), "one of them is no text to train on: {}", of(names));
        }
        for names in [&["messages[]"][..], &["id", "conversations[]"], &["dialog[]", "summary"]] {
            assert!(of(names).contains("is chat data"), "{names:?}: {}", of(names));
        }
        for names in [
            &["body"][..],
            &["title", "body", "source"],
            &["prompt"],
            &["content", "question_id", "answer_count#"],
            &["content", "questionId", "answerType"],
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
        // The order is that of a text, whatever that of the row is.
        for (names, joined) in [
            (&["answer", "input", "prompt"][..], ".prompt + \"\\n\" + .input + \"\\n\" + .answer"),
            (
                &["context", "output", "question", "reasoning", "system_prompt"],
                ".system_prompt + \"\\n\" + .question + \"\\n\" + .context + \"\\n\" + .reasoning + \"\\n\" + .output",
            ),
            (
                &["Complex_CoT", "Question", "Response"],
                ".Question + \"\\n\" + .Complex_CoT + \"\\n\" + .Response",
            ),
            (&["assistant", "system", "user"], ".system + \"\\n\" + .user + \"\\n\" + .assistant"),
            (&["target", "source"], ".source + \"\\n\" + .target"),
            (&["hypothesis", "premise"], ".premise + \"\\n\" + .hypothesis"),
        ] {
            let said = of(names);
            assert!(said.contains(&format!("{{text: ({joined})}}")), "{said}");
        }
        // Training on the prompts alone is no advice.
        let said = of(&["prompt", "answers[]"]);
        assert!(!said.contains("jq") && !said.contains("text_field"), "{said}");
        assert!(of(&["chosen", "rejected"]).contains("write the chosen answer"));
    }
}
