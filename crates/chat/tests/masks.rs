//! Masks: what is trained, by each method, and what is refused.

mod common;

use common::{compile, messages, read, without_spans};
use serde_json::json;
use xtrain_chat::{
    Conversation, DropReason, Mask, MaskOptions, Method, RowFailure, TemplateSettings, Templates, TrainOn,
    samples,
};

const TURNS: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
const SPANS: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}\
                     {{ m.content }}<end>\n{% endgeneration %}{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";

fn templates(source: &str) -> Templates {
    let folder = tempfile::tempdir().expect("a folder");
    let config = json!({"chat_template": source}).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("a file");
    Templates::of_folder(folder.path(), &TemplateSettings::default())
        .unwrap_or_else(|error| panic!("{error}"))
}

fn mask_with(source: &str, conversation: &Conversation, train_on: TrainOn) -> Result<Mask, RowFailure> {
    let options =
        MaskOptions::new(train_on, &["<end>"], &["<end>", "<user>", "<assistant>"]).expect("stop tokens");
    samples(conversation, &templates(source), &options)
}

/// Trained texts of each sample.
fn trained(mask: &Mask) -> Vec<Vec<&str>> {
    let ranges = |sample: &'_ xtrain_chat::MaskedText| sample.trained.clone();
    mask.samples
        .iter()
        .map(|sample| ranges(sample).into_iter().map(|range| &sample.text[range]).collect())
        .collect()
}

fn answers(source: &str, json: &str, train_on: TrainOn) -> Vec<Vec<String>> {
    let mask = mask_with(source, &messages(json), train_on).unwrap_or_else(|error| panic!("{error}"));
    trained(&mask).into_iter().map(|sample| sample.into_iter().map(str::to_owned).collect()).collect()
}

const TWO: &str = r#"[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]"#;

#[test]
fn answers_are_trained_from_after_the_prompt_to_the_stop_token() {
    for (source, method) in [(TURNS, Method::Prefixes), (SPANS, Method::Spans)] {
        assert_eq!(mask_with(source, &messages(TWO), TrainOn::Assistant).expect("a mask").method, method);
        assert_eq!(answers(source, TWO, TrainOn::Assistant), [["a<end>", "b<end>"]]);
        assert_eq!(answers(source, TWO, TrainOn::Last), [["b<end>"]]);
        let untrained = TWO.replace(r#""content": "a"}"#, r#""content": "a", "train": false}"#);
        assert_eq!(answers(source, &untrained, TrainOn::Assistant), [["b<end>"]]);
        let empty = TWO.replace(r#""content": "b""#, r#""content": " ""#);
        assert_eq!(
            answers(source, &empty, TrainOn::Assistant),
            [["a<end>"]],
            "an empty answer is not trained"
        );
    }
    let all = "<user>q<end>\n<assistant>a<end>\n<user>r<end>\n<assistant>b<end>\n";
    assert_eq!(answers(TURNS, TWO, TrainOn::All), [[all]]);
}

#[test]
fn what_the_prompt_supplies_is_not_trained() {
    let opens = |source: &str| {
        source
            .replace(
                "<{{ m.role }}>{{ m.content }}",
                "<{{ m.role }}>{{ 'T' if m.role == 'assistant' }}{{ m.content }}",
            )
            .replace("{% generation %}", "{% generation %}T")
            .replace("<assistant>{% endif %}", "<assistant>T{% endif %}")
    };
    for source in [TURNS, SPANS] {
        assert_eq!(answers(&opens(source), TWO, TrainOn::Assistant), [["a<end>", "b<end>"]], "{source}");
    }
}

#[test]
fn history_that_is_rendered_otherwise_makes_a_sample_of_each_answer() {
    let source =
        TURNS.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else 'old' }}");
    let mask = mask_with(&source, &messages(TWO), TrainOn::Assistant).expect("a mask");
    assert_eq!(mask.method, Method::TurnByTurn);
    assert_eq!(trained(&mask), [["a<end>"], ["b<end>"]]);
    assert_eq!((mask.sample_bytes(), mask.whole_bytes), (31 + 64, 64));
    assert_eq!(mask.samples[0].text, "<user>q<end>\n<assistant>a<end>\n");
    assert_eq!(mask.samples[1].text, "<user>q<end>\n<assistant>old<end>\n<user>r<end>\n<assistant>b<end>\n");
}

#[test]
fn text_after_the_stop_token_need_not_stay() {
    // As Phi-3: the end of the text stands only behind the last message.
    let source =
        TURNS.replace("{% if add_generation_prompt %}", "{% if not add_generation_prompt %}</s>{% else %}");
    let mask = mask_with(&source, &messages(TWO), TrainOn::Assistant).expect("a mask");
    assert_eq!((mask.method, trained(&mask)), (Method::Prefixes, vec![vec!["a<end>", "b<end>"]]));
}

#[test]
fn masks_that_cannot_be_proven_are_refused_with_both_texts() {
    let opens = TURNS.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}");
    let error = mask_with(&opens, &messages(TWO), TrainOn::Assistant).expect_err("no prefix").to_string();
    assert!(error.contains("the prompt has \"<think>\", the answer has \"a<end>\\n\""), "{error}");
    assert!(
        error.contains("data.chat_template_kwargs") && error.contains("message 2") && !error.contains('\n'),
        "{error}"
    );
    for source in [TURNS.replace("<end>", ""), SPANS.replace("<end>", "")] {
        let error = mask_with(&source, &messages(TWO), TrainOn::Assistant).expect_err("no stop").to_string();
        assert!(error.contains("does not end with a token at which generation stops (<end>)"), "{error}");
        assert!(error.contains("tokenizer_config.json"), "it names the template: {error}");
    }
    let error = MaskOptions::new(TrainOn::Last, &[""], &["<end>"]).expect_err("no stop tokens").to_string();
    assert!(error.contains("no token at which generation stops"), "{error}");
}

#[test]
fn names_of_special_tokens_in_a_row_are_text_and_stop_nothing() {
    let row =
        r#"[{"role": "user", "content": "say <end>"}, {"role": "assistant", "content": "x<end>y<user>"}]"#;
    for source in [TURNS, SPANS] {
        let mask = mask_with(source, &messages(row), TrainOn::Assistant).expect("a mask");
        assert_eq!(trained(&mask), [["x<end>y<user><end>"]], "{source}");
        let sample = &mask.samples[0];
        let literals: Vec<&str> = sample.literals.iter().map(|range| &sample.text[range.clone()]).collect();
        assert_eq!(literals, ["<end>", "<end>", "<user>"]);
    }
    let changed = TURNS.replace("{{ m.content }}", "{{ m.content | length }}");
    let dropped = mask_with(&changed, &messages(row), TrainOn::Assistant);
    assert_eq!(dropped, Err(RowFailure::Drop(DropReason::ChangedName)), "the template counts the marks");
}

#[test]
fn a_conversation_whose_renderings_grow_with_the_square_of_its_turns_is_dropped() {
    // The name of a special token prevents that the beginnings are found in one rendering.
    let turns = |turns: usize, question: &str| {
        let turn = r#"{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, "#;
        let last = r#"{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}"#;
        let all = format!("[{}{last}]", turn.repeat(turns - 1)).replacen('q', question, 1);
        messages(&all.replace("\"a\"", &format!("\"{}\"", "a".repeat(1000))))
    };
    for source in [TURNS, SPANS] {
        let mask = |turns_of: &Conversation| mask_with(source, turns_of, TrainOn::Assistant);
        assert!(mask(&turns(300, "<end>")).is_ok());
        assert_eq!(mask(&turns(900, "<end>")), Err(RowFailure::Drop(DropReason::TooManyTurns)));
        assert!(mask(&turns(900, "q")).is_ok());
    }
}

#[test]
fn rows_without_anything_to_train_and_rows_that_the_template_refuses_are_dropped() {
    let dropped =
        |source: &str, row: &str| mask_with(source, &messages(row), TrainOn::Assistant).expect_err(row);
    let user = r#"[{"role": "user", "content": "q"}]"#;
    assert_eq!(dropped(TURNS, user), RowFailure::Drop(DropReason::NoTrainedToken));
    let marked =
        "[{\"role\": \"user\", \"content\": \"\u{10F8F2}\"}, {\"role\": \"assistant\", \"content\": \"a\"}]";
    assert_eq!(dropped(TURNS, marked), RowFailure::Drop(DropReason::PrivateUse));
    let raising = "{{ raise_exception('no ' ~ messages[0].role) }}";
    assert_eq!(dropped(raising, TWO), RowFailure::Drop(DropReason::Raised("no user".into())));
    let failing = "a\n{{ messages[0].content + 1 }}";
    let RowFailure::Error(error) = dropped(failing, TWO) else {
        panic!("an error of the template is no reason to drop")
    };
    assert!(error.problem.contains(", line 2: "), "{error}");
}

#[test]
fn messages_that_a_template_drops_are_counted() {
    let row =
        TWO.replace(r#""q""#, r#""question""#).replace(r#""r""#, r#"[{"type": "text", "text": "remark"}]"#);
    let source = TURNS.replace("{{ m.content }}", "x");
    let mask = mask_with(&source, &messages(&row), TrainOn::Assistant).expect("a mask");
    assert_eq!(mask.missing_messages, 2);
}

#[test]
fn the_builtin_chatml_trains_answers_and_refuses_tools() {
    let chatml = Templates::chatml(&TemplateSettings::default()).expect("a template");
    let options =
        MaskOptions::new(TrainOn::Assistant, &["<|im_end|>"], &["<|im_end|>"]).expect("stop tokens");
    let mask = samples(&messages(TWO), &chatml, &options).expect("a mask");
    let text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n\
                <|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n";
    assert_eq!(
        (mask.samples[0].text.as_str(), trained(&mask)),
        (text, vec![vec!["a<|im_end|>", "b<|im_end|>"]])
    );
    let call = r#"[{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]"#;
    let dropped = samples(&messages(call), &chatml, &options).expect_err("tools");
    assert!(dropped.to_string().contains("\\\"chatml\\\" has no tool calls"), "{dropped}");
}

#[test]
fn a_folder_names_its_templates_as_in_transformers() {
    let folder = tempfile::tempdir().expect("a folder");
    let of = || Templates::of_folder(folder.path(), &TemplateSettings::default());
    let none = of().expect_err("no template").to_string();
    assert!(none.contains("has no chat template; name one with data.chat_template"), "{none}");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    };
    let first = |templates: &Templates, has_tools: bool| {
        let template = templates.for_row(has_tools).expect("a template");
        let none = xtrain_chat::Literals::new(Vec::<&str>::new()).expect("no names");
        template.render(&messages(TWO).messages, None, false, &none).expect("a text").text
    };
    let list = json!({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]});
    write("tokenizer_config.json", &list.to_string());
    let templates = of().expect("templates");
    assert_eq!((first(&templates, false), first(&templates, true)), ("d".into(), "t".into()));
    write("chat_template.jinja", "file\n");
    assert_eq!(first(&of().expect("a template"), true), "file", "files replace the config");
    write("additional_chat_templates/tool_use.jinja", "more");
    assert_eq!(first(&of().expect("a template"), true), "more");
    write("chat_template.jinja", "a\nb{% if %}");
    let broken = of().expect_err("broken").to_string();
    assert!(broken.contains("chat_template.jinja, line 2: ") && !broken.contains('\n'), "{broken}");
}

#[test]
fn unknown_parts_of_a_template_are_errors_with_their_line() {
    let cases = [
        ("\n{% do 1 %}", "line 2: the statement \"do\" is unknown"),
        ("{% generation %}a", "line 1: a generation block is not closed"),
        ("{% endgeneration %}", "closes no generation block"),
        ("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", "lies in another one"),
        ("{{ x | safe + 'a' }}", "`safe` beside +"),
        ("\n\n{{ 'a", "line 3: a string is not closed"),
        ("{{ a }", "`}` without `{`"),
        ("{{ a", "a tag is not closed with `}}`"),
        ("{# a", "a comment is not closed"),
        (
            "{% for i in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
            "`break` stands in a `generation` block",
        ),
        ("{% continue %}", "`continue` stands in no loop"),
    ];
    for (source, problem) in cases {
        let error = xtrain_chat::Template::compile(source, "t", &TemplateSettings::default())
            .expect_err(source)
            .to_string();
        assert!(error.contains(problem), "{source:?}: {error}");
    }
    let kwargs = serde_json::Map::from_iter([("messages".to_owned(), json!([]))]);
    let error =
        xtrain_chat::Template::compile("", "t", &TemplateSettings { kwargs, ..TemplateSettings::default() })
            .expect_err("taken");
    assert!(error.to_string().contains("data.chat_template_kwargs has \"messages\""), "{error}");
}

#[test]
fn our_templates_have_the_same_text_without_spans() {
    for name in ["chatml", "tools_xml", "ends", "parts"] {
        let source = read(&format!("templates/{name}.jinja"));
        let settings = TemplateSettings {
            kwargs: serde_json::Map::from_iter([("eos_token".into(), json!("</s>"))]),
            ..TemplateSettings::default()
        };
        let none = xtrain_chat::Literals::new(Vec::<&str>::new()).expect("no names");
        let text = |source: &str| {
            compile(source, &settings)
                .render(&messages(TWO).messages, None, false, &none)
                .expect("a text")
                .text
        };
        assert_eq!(text(&source), text(&without_spans(&source)), "{name}");
    }
}

/// Two blocks for an answer with thoughts, none for an empty one.
const TWO_BLOCKS: &str = "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>\
    {% if m.reasoning_content %}{% generation %}T:{{ m.reasoning_content }}<end>{% endgeneration %}{% endif %}\
    {% if m.content %}{% generation %}{{ m.content }}<end>{% endgeneration %}{% endif %}\
    {% else %}<{{ m.role }}>{{ m.content }}<end>{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn all_blocks_of_an_answer_are_its_own() {
    // As many blocks as answers: neither the number nor the order tells whose they are.
    let empty_first = r#"[{"role": "user", "content": "q"}, {"role": "assistant", "content": ""},
        {"role": "user", "content": "r"}, {"role": "assistant", "reasoning_content": "think", "content": "b"}]"#;
    let untrained = r#"[{"role": "user", "content": "q"}, {"role": "assistant", "content": ""},
        {"role": "user", "content": "r"},
        {"role": "assistant", "reasoning_content": "no", "content": "no", "train": false},
        {"role": "user", "content": "s"}, {"role": "assistant", "content": "last"}]"#;
    // Without prompts, the renderings up to each answer tell it.
    let raises = TWO_BLOCKS.replace(
        "{% if add_generation_prompt %}",
        "{% if add_generation_prompt %}{{ raise_exception('no prompt') }}",
    );
    for source in [TWO_BLOCKS, &raises] {
        assert_eq!(answers(source, empty_first, TrainOn::Assistant), [["T:think<end>", "b<end>"]]);
        assert_eq!(answers(source, empty_first, TrainOn::Last), [["T:think<end>", "b<end>"]]);
        assert_eq!(answers(source, untrained, TrainOn::Assistant), [["last<end>"]]);
    }
    // Neither prompts nor renderings: history has other text.
    let other = raises.replace("T:{{ m.reasoning_content }}", "{{ 'T' if loop.last else 'long' }}");
    let changing =
        untrained.replace(r#""content": "last""#, r#""content": "last", "reasoning_content": "t""#);
    let error = mask_with(&other, &messages(&changing), TrainOn::Assistant).expect_err("unknown").to_string();
    assert!(error.contains("cannot be assigned"), "{error}");
}
