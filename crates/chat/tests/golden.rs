//! Renderings, spans, ids and masks, equal to those of transformers.

mod common;

use common::{Bytes, compile, conversation, golden, read, settings, without_spans};
use serde_json::{Value, json};
use xtrain_chat::{
    Literals, MaskOptions, Method, Rendering, RowFailure, Template, Templates, TrainOn, encode, samples,
};

/// A rendering as the golden files write it.
fn shown(result: Result<Rendering, RowFailure>) -> Value {
    match result {
        Ok(rendering) => {
            let spans: Vec<_> = rendering.spans.iter().map(|span| [span.start, span.end]).collect();
            json!({"text": rendering.text, "spans": spans})
        }
        Err(_) => json!({"refused": true}),
    }
}

fn wanted(row: &Value) -> Value {
    match row.get("refused") {
        Some(_) => json!({"refused": true}),
        None => json!({"text": row["text"], "spans": row["spans"]}),
    }
}

fn none() -> Literals {
    Literals::new(Vec::<&str>::new()).expect("no names")
}

#[test]
fn our_templates_render_as_in_transformers() {
    let golden = golden("rendered.json");
    let mut different = Vec::new();
    for row in golden["rows"].as_array().expect("rows") {
        let more: Vec<(&str, Value)> =
            row.get("thinking").map(|value| ("enable_thinking", value.clone())).into_iter().collect();
        let name = row["template"].as_str().expect("a name");
        let template = compile(&read(&format!("templates/{name}")), &settings(&golden, &more));
        let given = &golden["conversations"]
            [usize::try_from(row["conversation"].as_u64().expect("a place")).expect("small")];
        let conversation = conversation(given).expect("a conversation");
        let prompt = given["prompt"].as_bool().unwrap_or_default();
        let result = template.render(&conversation.messages, conversation.tools.as_deref(), prompt, &none());
        let said = format!("{result:?}");
        if shown(result) != wanted(row) {
            different.push(format!("{name} {}: {said}\n  wanted {}", row["conversation"], wanted(row)));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// Templates that transformers renders and this crate refuses, because it cannot render them equally.
const REFUSED: [&str; 15] = [
    "{{ x.html | safe + '<' }}",
    "{{ x.html | e }}",
    "{{ 'nan' | float }}",
    "{{ 1 < 3 in [3] }}",
    "{{ x.dict.items() }}",
    "{% set g = x.list | map('string') %}{{ g | list }}{{ g | list }}",
    "{{ x.text.strip is defined }}",
    "{{ x.text['strip'] is defined }}",
    "{{ x.int.real }}",
    "{{ x.list[1.0] }}",
    "{{ x.list[x.int / 7] }}",
    "{{ self is defined }}",
    "{% macro f(a) %}{% endmacro %}{{ f.arguments }}",
    "{{ '٣' | int }}",
    "{{ '1.٣' | float }}",
];

/// Templates that transformers refuses and this crate renders: slices of nothing are empty.
const RENDERED: [&str; 2] = ["{{ x.none[1:] }}", "{{ missing[1:] }}"];

#[test]
fn features_of_jinja_and_python_are_those_of_transformers() {
    let golden = golden("features.json");
    let conversation = common::messages(r#"[{"role": "user", "content": "hi"}]"#);
    let mut different = Vec::new();
    for row in golden["rows"].as_array().expect("rows") {
        let source = row["source"].as_str().expect("a source");
        let compiled =
            Template::compile(source, "feature", &settings(&golden, &[("x", golden["x"].clone())]));
        let result = match compiled {
            Ok(template) => template.render(&conversation.messages, None, false, &none()),
            Err(error) => Err(RowFailure::Error(error)),
        };
        let said = match &result {
            Ok(rendering) => format!("{:?} {:?}", rendering.text, rendering.spans),
            Err(error) => error.to_string(),
        };
        assert!(!said.contains('\n'), "one line: {said}");
        let is_refused = REFUSED.contains(&source);
        if RENDERED.contains(&source) {
            assert!(result.is_ok() && row.get("refused").is_some(), "{source:?}: {said}");
        } else if shown(result) != if is_refused { json!({"refused": true}) } else { wanted(row) } {
            different.push(format!("{source:?}:\n  found  {said}\n  wanted {}", wanted(row)));
        }
    }
    assert!(different.is_empty(), "{} features differ:\n{}", different.len(), different.join("\n"));
}

/// Lengths of runs of untrained and trained tokens in turn.
fn mask_of(runs: &Value) -> Vec<bool> {
    let runs = runs.as_array().expect("runs").iter().enumerate();
    runs.flat_map(|(at, run)| {
        vec![at % 2 == 1; usize::try_from(run.as_u64().expect("a length")).expect("small")]
    })
    .collect()
}

#[test]
fn ids_and_masks_are_those_of_transformers_without_prompt_and_end() {
    let (rendered, golden) = (golden("rendered.json"), golden("tokens.json"));
    let names = |value: &Value| -> Vec<String> {
        value
            .as_array()
            .expect("names")
            .iter()
            .map(|name| name.as_str().expect("a name").to_owned())
            .collect()
    };
    let bytes = Bytes { special: names(&golden["special"]), not_special: names(&golden["not_special"]) };
    let (mut removed, mut by_prefixes, mut rows) = (0, 0, 0);
    for row in golden["rows"].as_array().expect("rows") {
        let name = row["template"].as_str().expect("a name");
        let source = read(&format!("templates/{name}"));
        let place = usize::try_from(row["conversation"].as_u64().expect("a place")).expect("small");
        let conversation = conversation(&rendered["conversations"][place]).expect("a conversation");
        let stops = names(&golden["stops"][name.trim_end_matches(".jinja")]);
        let options = MaskOptions::new(TrainOn::Assistant, &stops, &bytes.special).expect("stop tokens");
        let folder = tempfile::tempdir().expect("a folder");
        let of = |source: &str| {
            let path = folder.path().join("chat_template.jinja");
            std::fs::write(&path, source).expect("a file");
            Templates::of_folder(folder.path(), &settings(&rendered, &[])).expect("a template")
        };
        let spans =
            samples(&conversation, &of(&source), &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((spans.method, spans.samples.len()), (Method::Spans, 1));
        let encoded = encode(&bytes, &spans.samples[0]).expect("ids");
        let ids: Vec<u64> = encoded.ids.iter().map(|&id| u64::from(id)).collect();
        let placed: u64 = ids.iter().zip(1..).map(|(id, place)| id * place).sum();
        assert_eq!(row["ids"], json!([ids.len(), ids.iter().sum::<u64>(), placed]), "{name} {place}");
        // Trained tokens are trained in transformers too, and all others of it follow a stop token of the
        // same span or are supplied by the prompt.
        let theirs = mask_of(&row["mask"]);
        let is_subset = encoded
            .trained
            .iter()
            .zip(theirs.iter().chain(std::iter::repeat(&false)))
            .all(|(our, their)| !our || *their);
        assert!(is_subset, "{name} {place}: more is trained than in transformers");
        removed +=
            theirs.iter().filter(|bit| **bit).count() - encoded.trained.iter().filter(|bit| **bit).count();
        rows += 1;
        // The template without marks has the same mask, where it is proven in one sample.
        match samples(&conversation, &of(&without_spans(&source)), &options) {
            Ok(mask) if mask.method == Method::Prefixes => {
                assert_eq!(mask.samples, spans.samples, "{name} {place}");
                by_prefixes += 1;
            }
            Ok(mask) => assert_eq!(mask.method, Method::TurnByTurn, "{name} {place}"),
            Err(RowFailure::Error(error)) => {
                assert!(error.problem.contains("does not begin the rendered answer"), "{error}")
            }
            Err(other) => panic!("{name} {place}: {other}"),
        }
    }
    println!("{rows} rows, {by_prefixes} by prefixes too, {removed} tokens removed");
    assert!(rows > 30 && by_prefixes > 20, "{rows} rows, {by_prefixes} by prefixes");
}

#[test]
fn a_template_without_end_ends_soon_with_an_error() {
    let conversation = common::messages(r#"[{"role": "user", "content": "hi"}]"#);
    for source in [
        "{% for i in range(10**9) %}a{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(100) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | list }}",
        "{% set s = 'a' * 1000000 %}{% for i in range(1000) %}{{ s }}{% endfor %}",
        "{{ ('a' * 100000000) * 100000000 }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s | tojson }}{{ ns.s }}",
    ] {
        let start = std::time::Instant::now();
        let template = Template::compile(source, "loop", &Default::default()).expect("a template");
        let error = template.render(&conversation.messages, None, false, &none()).expect_err(source);
        assert!(matches!(error, RowFailure::Error(_)), "{source}: {error}");
        let seconds = start.elapsed().as_secs_f64();
        println!("{seconds:.2} s: {error}");
        // Far above what it takes, some 2 s without optimization: a busy machine must not fail here.
        assert!(seconds < 30.0, "{source}: {seconds} s");
    }
}
