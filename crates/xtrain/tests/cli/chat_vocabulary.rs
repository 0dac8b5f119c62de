//! A base model that learns to chat: markers become tokens, embedding and head grow, the export ends turns.

use crate::place::{Place, assert_same_file};
use serde_json::{Value, json};

/// A base model, tied or not, and conversations.
fn place(sets: &str) -> Place {
    let place = Place::new();
    let size =
        "--set data.tokenizer=bpe --set data.bpe_vocab_size=290 --set data.seq_len=128 --set train.steps=2";
    place.train("base", &format!("{size} {sets}"));
    let row = |n: usize| {
        let messages = json!([
            {"role": "user", "content": format!("what is {n}?")},
            {"role": "assistant", "content": format!("it is {n}")},
        ]);
        json!({ "messages": messages }).to_string() + "\n"
    };
    place.write("chats.jsonl", (0..200).map(row).collect::<String>().as_bytes());
    place
}

const CHAT: &str = "--set model.init_from=base/hf --set data.train=chats.jsonl --set data.chat_template=chatml --set data.seq_len=128 \
                    --set train.steps=4 --set schedule.kind=constant --set data.today=2026-01-02";

/// Rows and columns of a tensor of an export.
fn shape(place: &Place, export: &str, name: &str) -> Option<[u64; 2]> {
    let bytes = place.read(&format!("{export}/model.safetensors"));
    let (len, rest) = bytes.split_first_chunk::<8>().expect("a header");
    let header: Value = serde_json::from_slice(&rest[..u64::from_le_bytes(*len) as usize]).expect("JSON");
    serde_json::from_value(header.get(name)?["shape"].clone()).ok()
}

fn json_of(place: &Place, file: &str) -> Value {
    serde_json::from_slice(&place.read(file)).expect("JSON")
}

#[test]
fn markers_become_tokens_and_the_export_ends_turns() {
    let place = place("");
    let ran = place.run(&format!("train continued.toml --out out {CHAT}")).succeeds();
    let line =
        "grows from 290 to 292 tokens (<|im_start|>, <|im_end|>), embedding and head from 290 to 384 rows";
    assert_eq!(ran.stderr.matches(&format!("the vocabulary {line}")).count(), 1, "{}", ran.stderr);
    let planned = place.run(&format!("plan continued.toml {CHAT}")).succeeds().stdout;
    assert!(planned.lines().any(|said| said.starts_with("vocabulary ") && said.ends_with(line)), "{planned}");
    let again = place.run("plan out/config.toml").succeeds().stdout;
    assert!(again.contains("290 to 384 rows"), "{again}");
    place.run("export out --out exported").succeeds();
    for folder in ["out/hf", "exported"] {
        for tensor in ["model.embed_tokens.weight", "lm_head.weight"] {
            assert_eq!(shape(&place, folder, tensor), Some([384, 16]), "{tensor}");
        }
        let template = String::from_utf8(place.read(&format!("{folder}/chat_template.jinja"))).expect("text");
        let tokenizer = json_of(&place, &format!("{folder}/tokenizer_config.json"));
        assert_eq!(
            (&tokenizer["chat_template"], &tokenizer["eos_token"]),
            (&json!(template), &json!("<|im_end|>"))
        );
        let ends = json!([291, 289]);
        assert_eq!(json_of(&place, &format!("{folder}/generation_config.json"))["eos_token_id"], ends);
        let config = json_of(&place, &format!("{folder}/config.json"));
        assert_eq!((&config["eos_token_id"], &config["vocab_size"]), (&ends, &json!(384)));
        let added = json_of(&place, &format!("{folder}/tokenizer.json"))["added_tokens"].clone();
        let added: Vec<_> =
            added.as_array().expect("a list").iter().map(|token| token["id"].clone()).collect();
        assert_eq!(added, [289, 290, 291].map(Value::from));
    }
    let generated = place.run("generate out/hf --prompt <|im_start|>user --json -n 3").succeeds().stdout;
    assert!(generated.contains("\"tokens\""), "{generated}");
    place.run("generate out --prompt <|im_start|>user -n 3").succeeds();
    place.run("eval out --data chats.jsonl").succeeds();
    // Another run begins with the grown model: nothing grows.
    let more = CHAT.replace("base/hf", "out/hf").replace("--set data.chat_template=chatml", "");
    let ran = place.run(&format!("train continued.toml --out more {more}")).succeeds();
    assert!(!ran.stderr.contains("the vocabulary"), "{}", ran.stderr);
    assert_eq!(place.read("more/hf/tokenizer.json"), place.read("out/hf/tokenizer.json"));
    // Text on the base model stays as it was.
    place.run("train continued.toml --out text --set model.init_from=base/hf --set data.seq_len=128 --set train.steps=2").succeeds();
    assert_eq!(shape(&place, "text/hf", "lm_head.weight"), Some([290, 16]));
    assert!(!place.exists("text/hf/chat_template.jinja") && !place.exists("text/tokenizer/xtrain_chat.json"));
}

#[test]
fn a_template_for_rows_with_tools_is_kept_in_run_and_export() {
    let place = place("");
    let template = |word: &str| {
        format!(
            "{{%- for m in messages %}}{word}{{{{ m.role }}}}: {{{{ m.content }}}}<|im_end|>{{%- endfor %}}\
             {{%- if add_generation_prompt %}}{word}assistant: {{%- endif %}}"
        )
    };
    let tools = "additional_chat_templates/tool_use.jinja";
    place.write("base/hf/chat_template.jinja", template("").as_bytes());
    place.write(&format!("base/hf/{tools}"), template("T ").as_bytes());
    let row = json!({
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}],
    });
    place.write("chats.jsonl", (row.to_string() + "\n").repeat(20).as_bytes());
    let chatml = CHAT.replace("--set train.steps=4", "--set data.held_out=0.0 --set eval.every=0");
    let sets = chatml.replace("--set data.chat_template=chatml", "");
    let train = |more: &str| place.run(&format!("train continued.toml {sets} {more}"));
    train("--out whole --set train.steps=4").succeeds();
    train("--out out --set train.steps=2").succeeds();
    train("--out out --set train.steps=4 --resume").succeeds();
    assert_same_file(&place.path("whole/hf/model.safetensors"), &place.path("out/hf/model.safetensors"));
    place.run("export out --out exported").succeeds();
    place.run("export out --out exported --overwrite").succeeds();
    for folder in ["out/hf", "exported"] {
        for file in [tools, "chat_template.jinja"] {
            assert_eq!(place.read(&format!("{folder}/{file}")), place.read(&format!("base/hf/{file}")));
        }
        let shown = place.run(&format!("tokenize chats.jsonl --tokenizer {folder} --show 1")).succeeds();
        assert!(shown.stdout.contains("T user: hello"), "{}", shown.stdout);
    }
    place.run("eval out --data chats.jsonl").succeeds();
    // An export with another template has no template for tools.
    let plain = json!({"messages": row["messages"]}).to_string() + "\n";
    place.write("chats.jsonl", plain.repeat(20).as_bytes());
    place.run(&format!("train continued.toml --out one {chatml} --set train.steps=2")).succeeds();
    assert!(!place.exists(&format!("one/hf/{tools}")));
}

#[test]
fn growth_and_resume_give_the_same_bits_on_any_number_of_ranks() {
    let place = place("--set model.tie_embeddings=true");
    let sets = format!("{CHAT} --set train.micro_batch_size=1 --set parallel.reduce=any-world");
    let train = |out: &str, more: &str| {
        place.run(&format!("train continued.toml --out {out} {sets} {more}")).succeeds()
    };
    let alone = train("alone", "");
    assert!(alone.stderr.contains(", embedding from 290 to 384 rows"), "{}", alone.stderr);
    assert_eq!(shape(&place, "alone/hf", "lm_head.weight"), None);
    let said = train("ranks", "--ranks 2 --set parallel.shard=weights").stderr;
    assert_eq!(said.matches("the vocabulary grows").count(), 1, "{said}");
    train("four", "--ranks 4 --set parallel.shard=optimizer");
    train("part", "--set train.steps=2");
    let resumed = train("part", "--resume");
    assert!(!resumed.stderr.contains("the vocabulary"), "{}", resumed.stderr);
    for run in ["ranks", "four", "part"] {
        let model = |run: &str| place.path(&format!("{run}/hf/model.safetensors"));
        assert_same_file(&model(run), &model("alone"));
    }
    let other = "--resume --set train.steps=5 --set data.reserved_tokens=<|r_*|>";
    place
        .run(&format!("train continued.toml --out part {sets} {other}"))
        .refuses(&["data.reserved_tokens: not set"]);
}

#[test]
fn shards_of_a_grown_tokenizer_and_padded_embeddings_are_taken() {
    let place = place("--set model.vocab_size=320");
    let command =
        "tokenize chats.jsonl --tokenizer base/hf --chat-template chatml --today 2026-01-02 --out tokens";
    let said = place.run(command).succeeds();
    assert!(said.stderr.contains("the vocabulary grows from 290 to 292 tokens"), "{}", said.stderr);
    let of_text = place.run(&format!("train continued.toml --out text {CHAT}")).succeeds();
    let held = "tokens (<|im_start|>, <|im_end|>), which the 320 rows of embedding and head can hold";
    assert!(of_text.stderr.contains(held), "{}", of_text.stderr);
    assert_eq!(shape(&place, "text/hf", "lm_head.weight"), Some([320, 16]));
    let shards = CHAT.replace("chats.jsonl", "tokens");
    let ran = place.run(&format!("train continued.toml --out shards {shards}")).succeeds();
    assert!(ran.stderr.contains(held), "{}", ran.stderr);
    assert_same_file(&place.path("shards/hf/model.safetensors"), &place.path("text/hf/model.safetensors"));
    assert_eq!(place.read("shards/hf/chat_template.jinja"), place.read("text/hf/chat_template.jinja"));
    // From scratch, on bytes.
    let scratch = "--set data.train=chats.jsonl --set data.chat_template=chatml --set data.seq_len=128 --set train.steps=2";
    let ran = place.train("scratch", scratch);
    assert!(
        ran.stderr.contains("the vocabulary grows from 257 to 259 tokens (<|im_start|>, <|im_end|>)\n"),
        "{}",
        ran.stderr
    );
    assert_eq!(shape(&place, "scratch/hf", "lm_head.weight"), Some([259, 16]));
}

#[test]
fn reserved_tokens_become_markers_or_are_too_few() {
    let place = place("");
    let mut tokenizer = json_of(&place, "base/hf/tokenizer.json");
    let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
    for (id, number) in [(290, 0), (291, 1)] {
        let mut token = added[0].clone();
        (token["id"], token["content"]) = (id.into(), format!("<|r_{number}|>").into());
        added.push(token);
    }
    place.write("tok/tokenizer.json", tokenizer.to_string().as_bytes());
    let scratch = "--set data.train=chats.jsonl --set data.chat_template=chatml --set data.seq_len=128 --set train.steps=2 --set data.tokenizer=tok";
    let train = |out: &str, more: &str| place.run(&format!("train run.toml --out {out} {scratch} {more}"));
    let ran = train("out", "--set data.reserved_tokens=<|r_*|>").succeeds();
    let said = "the vocabulary has new names for reserved tokens (<|r_0|> is now <|im_start|>, <|r_1|> is now <|im_end|>)";
    assert!(ran.stderr.contains(said), "{}", ran.stderr);
    assert_eq!(shape(&place, "out/hf", "lm_head.weight"), Some([292, 16]));
    for (pattern, missing) in
        [("<|r_1*|>", "too few for <|im_end|>"), ("<|s*", "no unused token, too few for <|im_start|>")]
    {
        train("no", &format!("--set data.reserved_tokens={pattern}")).refuses(&[
            "data.reserved_tokens",
            pattern,
            missing,
        ]);
    }
    assert!(!place.exists("no"), "nothing is written");
}

#[test]
fn a_run_goes_on_with_its_tokenizer_at_another_path_but_not_with_another_chat_template() {
    let place = place("");
    let own = CHAT.replace("--set data.chat_template=chatml ", "");
    let text = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{{ eos_token }}{% endgeneration %}\
                {% else %}{{ m.content }}{% endif %}{% endfor %}";
    for name in ["one", "same", "other"] {
        for file in ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"] {
            place.write(&format!("{name}/{file}"), &place.read(&format!("base/hf/{file}")));
        }
        let text = if name == "other" { text.replace('!', "?") } else { text.to_owned() };
        place.write(&format!("{name}/chat_template.jinja"), text.as_bytes());
    }
    let run = |more: &str| place.run(&format!("train continued.toml --out out {own} {more}"));
    run("--set data.tokenizer=one").succeeds();
    let longer = "--resume --set train.steps=6 --set data.tokenizer";
    run(&format!("{longer}=other")).refuses(&["data.tokenizer", "one", "other", "chat template"]);
    run(&format!("{longer}=same")).succeeds();
}
