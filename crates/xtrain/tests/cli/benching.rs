//! `bench`: every kind measures on the CPU too, as a table and as JSON. No figure is checked, only its
//! subject. On a GPU if XTRAIN_TEST_DEVICE is `cuda`.

use crate::fragments::assert_says;
use crate::place::{Place, Ran, device, finish};
use serde_json::Value;
use std::process::Command;

fn json(place: &Place, arguments: &str) -> Value {
    let ran = bench(place, &format!("{arguments} --json"));
    assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.stdout);
    serde_json::from_str(&ran.stdout).expect("JSON")
}

/// `bench` with these arguments, `DEVICE` in them being the tests'.
fn bench(place: &Place, arguments: &str) -> Ran {
    place.run(&format!("bench {}", arguments.replace("DEVICE", &device()))).succeeds()
}

fn positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|x| x > 0.0)
}

#[test]
fn products_are_those_of_a_run_file_or_of_the_given_sizes() {
    let place = Place::new();
    let quick = "--repeats 1 --runs 1";
    let one = json(&place, &format!("gemm --m 8 --n 24 --k 16 --precision bf16 --device DEVICE {quick}"));
    assert_eq!(one["precision"], "bf16");
    assert!(positive(&one["ceiling"]["tflops"]) && positive(&one["ceiling"]["gigabytes_per_second"]));
    let rows = one["rows"].as_array().expect("rows");
    let roles: Vec<&str> = rows.iter().filter_map(|row| row["role"].as_str()).collect();
    assert_eq!(roles, ["fprop", "dgrad", "wgrad"]);
    for row in rows {
        assert_eq!((&row["m"], &row["n"], &row["k"]), (&8.into(), &24.into(), &16.into()));
        assert!(positive(&row["seconds"]) && positive(&row["of_product"]), "{row}");
    }
    let experts = json(
        &place,
        &format!("gemm --experts 3 --m 200 --capacity 800 --n 24 --k 16 --device DEVICE {quick}"),
    );
    let sites: Vec<&str> = (experts["rows"].as_array().expect("rows").iter().step_by(3))
        .filter_map(|row| row["site"].as_str())
        .collect();
    assert_eq!(sites, ["dense", "3 experts in 896 rows", "3 experts in 896 rows, Zipf"]);
    assert_eq!(
        (&experts["rows"][0]["capacity"], &experts["rows"][3]["capacity"]),
        (&200.into(), &896.into())
    );
    let of_run = json(&place, &format!("gemm run.toml --set train.device=DEVICE {quick}"));
    let sites: Vec<&str> = of_run["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .filter_map(|row| row["site"].as_str())
        .step_by(3)
        .collect();
    assert_eq!(sites, ["attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "lm_head"]);
    let table = bench(&place, &format!("gemm --device DEVICE {quick}")).stdout;
    assert!(table.contains(": at best ") && table.contains("wgrad"), "{table}");
}

#[test]
fn attention_is_measured_whole_and_within_documents() {
    let place = Place::new();
    let quick = "--repeats 1 --runs 1";
    let sizes = "--batch 2 --seq-len 32 --heads 4 --kv-heads 2 --head-dim 8 --document-tokens 8";
    let measured = json(&place, &format!("attention {sizes} --device DEVICE {quick}"));
    let rows = measured["rows"].as_array().expect("rows");
    let told: Vec<(&str, bool)> = (rows.iter())
        .map(|row| (row["op"].as_str().expect("a name"), row["document_tokens"].is_null()))
        .collect();
    // On a GPU gradients are measured in a fixed order and in any order.
    let orders = if device() == "cpu" { 1 } else { 2 };
    let wanted = [true, false]
        .map(|whole| [vec![("attention", whole)], vec![("attention_grad", whole); orders]].concat());
    assert_eq!(told, wanted.concat());
    assert!(rows.iter().all(|row| row["seq_len"] == 32 && positive(&row["tflops"])));
    let of_run = json(&place, &format!("attention run.toml --set train.device=DEVICE {quick}"));
    let row = &of_run["rows"][0];
    assert_eq!((&row["heads"], &row["kv_heads"], &row["head_dim"]), (&2.into(), &1.into(), &8.into()));
    place
        .run(&format!("bench attention --heads 3 --kv-heads 2 {quick}"))
        .refuses(&["3 query heads", "--kv-heads"]);
    let table = bench(&place, &format!("attention run.toml --set train.device=DEVICE {quick}")).stdout;
    assert!(table.contains("attention_grad") && table.contains("documents"), "{table}");
}

#[test]
fn a_step_and_its_ops_are_measured() {
    let place = Place::new();
    let step = json(&place, "step run.toml --set train.device=DEVICE --warmup 2 --repeats 2 --steps 3");
    assert_eq!(step["tokens"], 64);
    assert!(positive(&step["tokens_per_second"]) && positive(&step["loss"]), "{step}");
    assert_eq!(step["measured"].as_array().map(Vec::len), Some(2));
    assert_eq!(step["data"], "random");
    place.run("tokenize a.txt --bpe-vocab-size 300 --out shards").succeeds();
    let of_shards = "--set data.train=shards --set data.tokenizer= --set model.vocab_size=300";
    let step = json(
        &place,
        &format!("step run.toml --set train.device=DEVICE {of_shards} --warmup 2 --repeats 1 --steps 1"),
    );
    assert_eq!(step["data"], "shards");
    place.run(&format!("bench step run.toml {of_shards} --set model.vocab_size=200")).refuses(&[
        "`vocab_size` = 200",
        "the shards in shards",
        "leave it out",
    ]);
    let ops = bench(&place, "op run.toml --set train.device=DEVICE --repeats 2 --json").stdout;
    let rows: Vec<Value> = ops.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let count = |op: &str, site: &str| {
        let row = rows.iter().find(|row| row["op"] == op && row["site"] == site);
        row.and_then(|row| row["count"].as_u64())
    };
    assert_eq!(count("linear", "attn.qkv_proj"), Some(2), "one in each block: {ops}");
    assert_eq!(count("adamw", "adamw"), Some(1));
    assert!(rows.iter().all(|row| positive(&row["seconds"])));
}

#[test]
fn linear_layers_are_measured_in_fp8_beside_bf16() {
    let place = Place::new();
    let quick = "--device DEVICE --repeats 1 --runs 1";
    let recipes = "--recipe fp8-delayed --recipe fp8-row";
    let measured =
        json(&place, &format!("fp8 --shape 32,16,48 --shape 64,16,48 --shape 32,48,16 {recipes} {quick}"));
    let rows = measured["rows"].as_array().expect("rows");
    let sizes: Vec<_> = rows.iter().map(|row| [&row["m"], &row["k"], &row["n"]].map(Value::as_u64)).collect();
    assert_eq!(sizes, [[32, 16, 48], [64, 16, 48], [32, 48, 16]].map(|sizes| sizes.map(Some)));
    for row in rows {
        let of: Vec<_> = row["recipes"].as_array().expect("recipes").iter().collect();
        assert_eq!(
            of.iter().map(|of| of["recipe"].as_str()).collect::<Vec<_>>(),
            [Some("fp8-delayed"), Some("fp8-row")]
        );
        assert!(
            of.iter().all(|of| ["forward", "backward", "both"].iter().all(|key| positive(&of[key]))),
            "{row}"
        );
        assert!(positive(&row["bf16"]["forward"]) && positive(&of[0]["seconds"]["weights"]), "{row}");
    }
    // A line for each recipe and size of weights.
    let lines = measured["break_even"].as_array().expect("lines");
    let told: Vec<_> = lines.iter().map(|line| (line["recipe"].as_str(), line["k"].as_u64())).collect();
    let [delayed, row] = [Some("fp8-delayed"), Some("fp8-row")];
    assert_eq!(told, [(delayed, Some(16)), (row, Some(16)), (delayed, Some(48)), (row, Some(48))]);
    let table = bench(&place, &format!("fp8 {quick}")).stdout;
    for said in ["fp8-current", "fp8-block", "bf16 ms", "break-even: number of tokens from which"] {
        assert!(table.contains(said), "{said}: {table}");
    }
    assert_eq!(table.contains("the CPU emulates FP8"), device() == "cpu", "{table}");
}

#[test]
fn the_linear_layers_of_a_run_file_are_measured_in_its_blocks() {
    let place = Place::new();
    let sets = "--set train.device=DEVICE --set model.ffn_dim=32";
    let of_run = json(&place, &format!("fp8 run.toml {sets} --set precision.recipe=fp8-block"));
    let rows = of_run["rows"].as_array().expect("rows");
    let layers: Vec<&str> = rows.iter().filter_map(|row| row["layer"].as_str()).collect();
    assert_eq!(layers, ["attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]);
    for row in rows {
        assert_eq!((&row["recipe"], &row["tokens"]), (&"fp8-block".into(), &64.into()));
        assert!(positive(&row["bf16_seconds"]) && positive(&row["fp8_seconds"]), "{row}");
        let speed = row["speed"].as_f64().expect("a number");
        assert_eq!(row["stays_in_bf16"].as_bool(), Some(speed < 0.98 && device() == "cuda"), "{row}");
    }
    assert_eq!(of_run["kept"].as_bool(), Some(device() == "cuda"));
    // A run file without FP8 is asked about all recipes.
    let table = bench(&place, &format!("fp8 run.toml {sets}")).stdout;
    let count = |word: &str| table.lines().filter(|line| line.starts_with(word)).count();
    assert_eq!(["fp8-current", "fp8-delayed", "fp8-row", "fp8-block"].map(count), [4; 4], "{table}");
    assert_says("bench fp8, the tokens of a run file", table);
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let place = Place::new();
    for (arguments, word) in [
        ("gemm --m 8", "--n"),
        ("gemm --experts 8", "--m"),
        ("gemm --experts 8 --per-token 9 --m 8 --n 8 --k 8", "--per-token 9"),
        ("gemm --per-token 2 --m 8 --n 8 --k 8", "--experts"),
        ("gemm --capacity 16 --m 8 --n 8 --k 8", "--experts"),
        ("gemm --m 0 --n 1 --k 1", "0"),
        ("gemm run.toml --m 8 --n 8 --k 8", "--m"),
        ("gemm run.toml --experts 8", "--experts"),
        ("gemm run.toml --per-token 2", "--per-token"),
        ("gemm run.toml --experts 8 --per-token 2", "--experts"),
        ("gemm run.toml --device cpu", "--device"),
        ("gemm --device gpu", "did you mean 'cuda'?"),
        ("gemm --set train.steps=1", "FILE"),
        ("attention --seq-len 1e3", "1e3"),
        ("fp8 --shape 32,16", "three multiples of 16"),
        ("fp8 --shape 32,16,24", "three multiples of 16"),
        ("fp8 run.toml --shape 32,16,32", "--shape"),
        ("fp8 --recipe bf16", "bf16"),
    ] {
        let ran = place.run(&format!("bench {arguments}"));
        assert_eq!(ran.code(), Some(2), "{arguments}: {}", ran.stderr);
        assert!(ran.stderr.contains(word), "{arguments}: {}", ran.stderr);
    }
    place
        .run("bench gemm --m 4194304 --n 4194304 --k 4194304 --device cpu --repeats 1 --runs 1")
        .refuses(&["GiB of memory", "take smaller sizes"]);
    place.run("bench gemm nothing.toml").refuses(&["nothing.toml"]);
}

#[test]
fn the_step_that_is_measured_is_compared_with_a_run_on_shards() {
    let place = Place::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/step_vs_train.sh");
    let mut command = Command::new("sh");
    let device = format!("train.device={}", device());
    // Names that a shell would take apart, and that JSON would.
    let (run, text) = ("its \"own\" run.toml", "a 'b'.txt");
    place.write(run, &place.read("run.toml"));
    place.write(text, &place.read("a.txt"));
    command.args([script, run, text, &device, "model.vocab_size=320", "eval.prompts=[\"a b\"]"]);
    for (name, value) in
        [("XTRAIN", env!("CARGO_BIN_EXE_xtrain")), ("STEPS", "4"), ("REPEATS", "3"), ("VOCABULARY", "300")]
    {
        command.env(name, value);
    }
    let ran = finish(place.settle(command), "step_vs_train.sh").succeeds();
    let line: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout));
    assert!(line["work"].as_str().is_some_and(|work| work.ends_with(", bench step against train")), "{line}");
    assert_eq!(line["metric"], "tok/s");
    let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("no number {key}: {line}"));
    assert!((number("ratio") * number("peer_value") / number("value") - 1.0).abs() < 1e-3, "{line}");
    let said = line["command"].as_str().unwrap_or_default();
    assert!(said.contains("step_vs_train.sh 'its \"own\" run.toml' TEXT train.device="), "{said}");
    assert!(said.ends_with(" model.vocab_size=320 'eval.prompts=[\"a b\"]'"), "{said}");
    let told = ["peer", "card", "driver", "command", "commit", "date"];
    assert!(told.iter().all(|key| line[key].as_str().is_some_and(|text| !text.is_empty())), "{line}");
}
