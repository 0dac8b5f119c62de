//! Mixtures of experts: a run, its report, its export, and a run that goes on with other experts.

use crate::messages::assert_message;
use crate::place::Place;
use serde_json::Value;

const MIXTURE: &str =
    "--set model.family=qwen3_moe --set experts.count=4 --set experts.per_token=2 --set experts.ffn_dim=12";

#[test]
fn a_mixture_trains_reports_its_loads_and_is_taken_in_again() {
    let place = Place::new();
    place.train(
        "out",
        &format!(
            "{MIXTURE} --set train.steps=5 --set experts.dense_blocks=[1] --set experts.balance_loss=0.02"
        ),
    );
    let records = place.records("out", "experts");
    assert_eq!(records.len(), 5);
    for record in &records {
        assert_eq!(record["blocks"], serde_json::json!([0]));
        // 64 tokens, each with two of four experts.
        let (most, least) = (record["max_load"][0].as_f64(), record["min_tokens"][0].as_f64());
        assert!(most.is_some_and(|most| (1.0..=2.0).contains(&most)), "{record}");
        assert!(least.is_some_and(|least| least <= 32.0), "{record}");
        assert!(record["balance"].as_f64().is_some_and(|loss| loss > 1.5 && loss < 4.0), "{record}");
    }
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("Experts"), "the page has no section for experts");
    place.run("generate out --prompt the --max-tokens 5").succeeds();
    let evaluated = place.run("eval out").succeeds();
    assert!(evaluated.stdout.contains("loss"), "{}", evaluated.stdout);
    // Other programs name the number of experts differently.
    let config = String::from_utf8(place.read("out/hf/config.json")).expect("text");
    let keys = ["\"num_experts\": 4", "\"num_local_experts\": 4", "\"mlp_only_layers\": [\n    1\n  ]"];
    for key in keys.into_iter().chain(["\"router_aux_loss_coef\": 0.02"]) {
        assert!(config.contains(key), "{config}");
    }
    let steps = "--set train.steps=2 --set schedule.warmup_steps=1";
    place.run(&format!("train run.toml --out again --set model.init_from=out/hf --set model.dim= --set model.layers= --set model.heads= \
         --set model.kv_heads= --set data.tokenizer= {steps}")).succeeds();
    assert_eq!(place.records("again", "experts").len(), 2);
    // The run goes on with the weight of the balance loss that it had.
    let again = String::from_utf8(place.read("again/config.toml")).expect("text");
    assert!(again.contains("\nbalance_loss = 0.02\n"), "{again}");
    place.run("export out --out exported").succeeds();
    let exported = String::from_utf8(place.read("exported/config.json")).expect("text");
    assert!(exported.contains("\"router_aux_loss_coef\": 0.02"), "{exported}");
}

#[test]
fn a_plan_of_ranks_tells_how_long_experts_are_gathered() {
    let place = Place::new();
    let plan = |options: &str| {
        let plan = format!("plan run.toml --gpus 2 --device-model h100 --set train.device=cuda {options}");
        place.run(&plan).succeeds().stdout
    };
    let gathers = |text: String| text.contains("\ngathers of experts ");
    assert!(gathers(plan(&format!("{MIXTURE} --set parallel.shard=weights"))));
    // Elsewhere, ranks have whole weights in the forward and in the backward.
    assert!(!gathers(plan(&format!("{MIXTURE} --set parallel.shard=optimizer"))));
    assert!(!gathers(plan("--set parallel.shard=weights")));
}

/// Numbers with commas in a text.
fn numbers(text: &str) -> Vec<u64> {
    let words = text.split(|c: char| !c.is_ascii_digit() && c != ',');
    words.filter_map(|word| word.trim_matches(',').replace(',', "").parse().ok()).collect()
}

/// The first line of a text that begins so.
fn line<'a>(text: &'a str, begin: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("no {begin}: {text}"))
}

/// Micro-batches of one sequence of 128 tokens on each of four ranks.
const SHARED: &str = "--gpus 4 --device-model h100 --set data.seq_len=128 --set train.recompute=none";

#[test]
fn a_plan_of_ranks_that_share_experts_counts_theirs_and_the_bytes_of_tokens() {
    let place = Place::new();
    let plan = |options: &str| {
        let plan = format!("plan run.toml {MIXTURE} {SHARED} --set train.device=cuda {options}");
        place.run(&plan).succeeds().stdout
    };
    let whole = plan("");
    let text = plan("--set parallel.expert=4");
    // Two blocks have four experts of 3 x 12 x 16 numbers each.
    let parameters = numbers(line(&text, "parameters "))[0];
    for (text, held) in [(&whole, parameters), (&text, parameters - 3 * 2 * 3 * 12 * 16)] {
        for name in ["masters ", "first moments ", "second moments "] {
            assert_eq!(numbers(line(text, name))[0], 4 * held, "{name} {text}");
        }
    }
    // Each rank sends 128 tokens of 16 numbers in bf16, and ids and gates of two experts of each, to three
    // others, from two blocks; then gradients.
    let of_tokens = 2 * 3 * 128;
    for (collective, bytes) in [("all_gather", 2 * 16 + 8 + 8 + 2 * 16), ("all_to_all", 2 * 16 + 2 * 16 + 8)]
    {
        let sent = line(&text, &format!("tokens, {collective}"));
        assert_eq!(numbers(sent), [of_tokens * bytes, 1], "{text}");
        assert!(!whole.contains("tokens, all"), "{whole}");
    }
    assert_message("plan, experts that ranks share", line(&text, "experts "));
    assert!(line(&text, "by contents ").contains("tokens "), "{text}");
    // All copies of 4 x 128 tokens may be those of two experts; with equal loads they would be those of four.
    assert!(line(&text, "room for rows ").contains(" routing, 2 times"), "{text}");
    let small = plan("--set parallel.expert=4 --set experts.capacity=1.0");
    assert_message("plan, room for rows", line(&small, "room for rows "));
    assert!(!whole.contains("room for rows"), "{whole}");
    // The table compares all numbers of ranks that share them.
    for text in [&whole, &text] {
        for row in ["none ", "none, expert=2 ", "weights, expert=4 "] {
            line(text, row);
        }
    }
    assert!(!plan("--set parallel.replicas=2").contains("expert=4"), "a replica has two ranks");
    let dense = place.run(&format!("plan run.toml {SHARED}")).succeeds().stdout;
    assert!(!dense.contains("expert="), "{dense}");
}

#[test]
fn experts_of_several_nodes_are_warned_of() {
    let place = Place::new();
    let plan = |options: &str| {
        place
            .run(&format!("plan run.toml {MIXTURE} {SHARED} --set parallel.expert=4 {options}"))
            .succeeds()
            .stderr
    };
    assert!(!plan("").contains("on several nodes"));
    assert_message("plan, experts on several nodes", plan("--gpus-per-node 2").trim_end());
}

#[test]
fn a_plan_tells_what_an_uneven_routing_costs() {
    let place = Place::new();
    let plan = |options: &str| place.run(&format!("plan run.toml {SHARED} {options}"));
    let text = plan(&format!("{MIXTURE} --set parallel.expert=4 --routing zipf")).succeeds().stdout;
    // The first of four experts gets 12 of 25 of the copies of 4 x 128 tokens, two of each.
    let routed = line(&text, "routing zipf ");
    assert!(routed.contains(" 492 of its 512 rows ") && routed.contains(" 1.92 times "), "{routed}");
    let columns: Vec<&str> = line(&text, "parallel.shard ").split_whitespace().collect();
    assert!(columns.contains(&"routed"), "{text}");
    let text = plan(&format!("{MIXTURE} --routing zipf")).succeeds().stdout;
    assert!(line(&text, "routing zipf ").contains("rank has all experts"), "{text}");
    plan("--routing zipf").refuses(&["the model has no experts"]);
    place
        .run(&format!("plan run.toml {MIXTURE} --gpus 4 --set train.device=cuda --routing zipf"))
        .refuses(&["--routing compares times", "--device-model"]);
}

#[test]
fn a_plan_as_json_has_the_figures_of_its_tables() {
    let place = Place::new();
    let plan = |options: &str| {
        let plan = format!("plan run.toml {MIXTURE} {SHARED} --set parallel.expert=2 {options}");
        place.run(&plan).succeeds().stdout
    };
    let (text, json) = (plan(""), plan("--json --routing zipf"));
    let plan: Value = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{e}: {json}"));
    for row in plan["memory"].as_array().expect("rows") {
        let (purpose, bytes) = (row["purpose"].as_str().expect("a name"), row["bytes"].as_u64());
        if !purpose.starts_with("saved by") {
            let line = line(&text, &format!("{purpose:<44}"));
            assert_eq!(Some(numbers(&line[44..])[0]), bytes, "{row}");
        }
    }
    let rows = plan["memory"].as_array().expect("rows").iter();
    assert_eq!(rows.filter_map(|row| row["bytes"].as_u64()).sum::<u64>(), plan["plan_bytes"]);
    for sent in plan["sent"].as_array().expect("rows") {
        let name = format!("{}, {} ", sent["contents"], sent["collective"]).replace('"', "");
        let found = numbers(line(&text, &name));
        assert_eq!([Some(found[0]), Some(found[1])], [&sent["bytes"], &sent["times"]].map(Value::as_u64));
    }
    let device = &plan["device"];
    let contents = |of: &Value| of["contents"].as_str().map(str::to_owned).expect("a name");
    let communication = device["communication"].as_array().expect("rows");
    assert!(communication.iter().map(contents).any(|contents| contents == "tokens"), "{plan}");
    let sum = |key: &str| communication.iter().filter_map(|of| of[key].as_f64()).sum::<f64>();
    for (key, total) in [("seconds", "communication_seconds"), ("exposed_seconds", "exposed_seconds")] {
        let total = device[total].as_f64().expect("seconds");
        assert!((sum(key) - total).abs() <= 1e-9 * total, "{plan}");
    }
    let modes = device["modes"].as_array().expect("rows");
    assert!(modes.iter().filter(|mode| mode["is_given"] == true).all(|mode| mode["expert"] == 2), "{plan}");
    assert!(modes.iter().all(|mode| mode["routed_seconds"].is_f64()), "{plan}");
    assert_eq!(
        [&plan["experts"]["of_a_rank"], &device["routed"]["routing"]],
        [&Value::from(2), &Value::from("zipf")]
    );
    place.run("plan run.toml --json --dump").refuses(&["--dump"]);
}

#[test]
fn ranks_that_share_experts_report_the_largest_load_of_a_rank() {
    let place = Place::new();
    let shared = format!("{MIXTURE} --ranks 4 --set parallel.expert=4 --set train.steps=3");
    place.train("out", &shared);
    let records = place.records("out", "experts");
    assert_eq!(records.len(), 3);
    for record in &records {
        // Each rank has one expert.
        assert_eq!(record["rank_load"], record["max_load"], "{record}");
    }
    place.train("two", &shared.replace("expert=4", "expert=2"));
    for record in place.records("two", "experts") {
        let of = |key: &str| record[key][0].as_f64().expect("a load");
        assert!((1.0..=2.0).contains(&of("rank_load")) && of("rank_load") <= of("max_load"), "{record}");
    }
}

#[test]
fn a_plan_counts_the_parameters_of_a_token() {
    let place = Place::new();
    let plan = place.run(&format!("plan run.toml {MIXTURE}")).succeeds().stdout;
    // Two blocks have four experts of 3 x 12 x 16 numbers each, of which a token passes through two.
    let found = numbers(line(&plan, "parameters "));
    assert_eq!(found[0] - found[1], 2 * 2 * 3 * 12 * 16, "{found:?}");
    // Two copies of 4 x 16 tokens.
    let experts = |plan: &str| line(plan, "experts ").to_owned();
    assert_message("plan, experts", experts(&plan));
    let dots = "--set model.family=dots1 --set experts.count=4 --set experts.ffn_dim=12 --set experts.shared_ffn_dim=24 \
         --set experts.dense_blocks=[0] --set experts.z_loss=0.25";
    let plan = place.run(&format!("plan run.toml {dots}")).succeeds().stdout;
    assert_message("plan, experts of a dots1 model", experts(&plan));
    let none = place.run(&format!("plan run.toml {MIXTURE} --set experts.balance=none")).succeeds().stdout;
    assert_message("plan, experts without a balance", experts(&none));
}

#[test]
fn a_run_goes_on_with_the_experts_that_it_began_with() {
    let place = Place::new();
    let dots = "--set model.family=dots1 --set experts.count=4 --set experts.ffn_dim=12";
    place.train("out", &format!("{dots} --set train.steps=3"));
    let resume = format!("train run.toml --out out --resume --set train.steps=6 {dots}");
    place.run(&format!("{resume} --set experts.balance=none")).refuses(&[
        "experts.balance",
        "\"bias\"",
        "\"none\"",
    ]);
    place.run(&format!("{resume} --set experts.count=5")).refuses(&["blocks.0.mlp"]);
    place.run(&format!("{resume} --set experts.bias_rate=0.1")).succeeds();
    let config = String::from_utf8(place.read("out/hf/config.json")).expect("text");
    for key in ["\"topk_method\": \"noaux_tc\"", "\"moe_layer_freq\": 1", "\"scoring_func\": \"sigmoid\""] {
        assert!(config.contains(key), "{config}");
    }
}

/// Sizes that FP8 takes.
const FP8: &str = "--set model.family=qwen3_moe --set experts.count=4 --set experts.ffn_dim=16 --set data.seq_len=32 \
     --set precision.skip_slower=[]";

/// The line of a plan on a linear layer.
fn planned(place: &Place, sets: &str, layer: &str) -> String {
    let plan = place.run(&format!("plan run.toml {FP8} {sets}")).succeeds().stdout;
    let line = plan.lines().find(|line| line.contains(layer)).map(str::to_owned);
    line.unwrap_or_else(|| panic!("no {layer} in {plan}"))
}

#[test]
fn a_plan_says_which_experts_are_in_fp8_and_why_others_are_not() {
    let place = Place::new();
    let layer = "mlp.experts.down_proj";
    for recipe in ["fp8-current", "fp8-delayed"] {
        let line = planned(&place, &format!("--set precision.recipe={recipe}"), layer);
        let gemms = [" 4 x 16 x 16 ", "e4m3 x e4m3", "e5m2 x e4m3"];
        assert!(gemms.iter().all(|part| line.contains(part)) && !line.contains("bf16"), "{line}");
    }
    let blocks = planned(&place, "--set precision.recipe=fp8-block", layer);
    assert_message("plan, experts that are too narrow for fp8-block", blocks);
    let large = "--set precision.recipe=fp8-block --set experts.ffn_dim=64";
    let gate_up = planned(&place, large, "mlp.experts.gate_up_proj");
    assert!(gate_up.contains("4 x 128 x 16") && !gate_up.contains("bf16"), "{gate_up}");
    let rows = planned(&place, "--set precision.recipe=fp8-row", layer);
    assert_message("plan, experts under fp8-row", rows);
    let skip = "--set precision.recipe=fp8-current --set precision.skip=[\"*.experts.down_proj:wgrad\"]";
    let skipped = planned(&place, skip, layer);
    assert!(skipped.contains("e5m2 x e4m3") && skipped.contains("skipped by"), "{skipped}");
}

#[test]
fn a_run_keeps_the_format_in_which_its_tokens_travel() {
    let place = Place::new();
    let wire = |out: &str| -> String {
        let config = String::from_utf8(place.read(&format!("{out}/config.toml"))).expect("text");
        config.lines().find(|line| line.starts_with("wire = ")).expect("a mixture's").to_owned()
    };
    let run = format!("{FP8} --set precision.recipe=fp8-delayed");
    place.train("out", &format!("{run} --set experts.wire=fp8 --set train.steps=3"));
    assert_eq!(wire("out"), "wire = \"fp8\"");
    let mut file = place.read("run.toml");
    file.extend(b"\n[experts]\nwire = \"bf16\"\n");
    place.write("bf16.toml", &file);
    let resume = |file: &str, more: &str| place.run(&format!("train {file} --out out --resume {run} {more}"));
    let refused = resume("bf16.toml", "--set train.steps=6");
    refused.refuses(&["experts.wire", "\"fp8\"", "\"bf16\"", "--set experts.wire=bf16"]);
    // A run file that does not name it.
    resume("run.toml", "--set train.steps=4").succeeds();
    assert_eq!(wire("out"), "wire = \"fp8\"");
    resume("run.toml", "--set train.steps=5 --set precision.recipe=bf16").succeeds();
    assert_eq!(wire("out"), "wire = \"bf16\"");
    resume("run.toml", "--set train.steps=6 --set experts.wire=fp8").succeeds();
    assert_eq!(wire("out"), "wire = \"fp8\"");
    // Ranks that share experts send FP8 if nothing is named.
    let ranks = "--ranks 2 --set parallel.expert=2 --set train.batch_size=4 --set train.steps=2";
    place.run(&format!("train run.toml --out ranks {run} {ranks}")).succeeds();
    assert_eq!(wire("ranks"), "wire = \"fp8\"");
}

#[test]
fn tokens_travel_in_fp8_only_if_experts_read_it() {
    let place = Place::new();
    let plan = |sets: &str| place.run(&format!("plan run.toml {FP8} --set experts.wire=fp8 {sets}"));
    for recipe in ["fp32", "bf16", "fp8-current", "fp8-row"] {
        plan(&format!("--set precision.recipe={recipe}")).refuses(&["wire", recipe, "fp8-block"]);
    }
    let block = "--set precision.recipe=fp8-block --set experts.ffn_dim=64";
    plan(block).succeeds();
    plan(&format!("{block} --set precision.pow2_scales=false")).refuses(&["wire", "pow2_scales"]);
    // The layers are too narrow, or skipped.
    plan("--set precision.recipe=fp8-block").refuses(&["wire", "multiple of 128"]);
    let skip = "--set precision.skip=[\"*.experts.*:wgrad\"]";
    plan(&format!("--set precision.recipe=fp8-delayed {skip}")).refuses(&["wire", "skipped by"]);
    place.run("plan run.toml --set experts.wire=fp8").refuses(&["experts"]);
}

#[test]
fn tools_for_fp8_name_the_layers_of_experts() {
    let place = Place::new();
    place.train("out", &format!("{FP8} --set precision.recipe=fp8-current --set train.steps=4"));
    let json = |arguments: &str| -> Value {
        let ran = place.run(&format!("{arguments} --json")).succeeds();
        serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout))
    };
    let inspected = json("inspect out");
    let tensors = inspected["tensors"].as_array().expect("a list");
    assert_eq!(tensors.len(), 2 * 4 * 6);
    let name = "blocks.1.mlp.experts.gate_up_proj:wgrad";
    for tensor in tensors.iter().filter(|tensor| tensor["name"] == name) {
        let ratio = tensor["sqnr_db"].as_f64();
        assert!(tensor["kept"].is_null() && ratio.is_some_and(|db| (21.0..34.0).contains(&db)), "{tensor}");
    }
    let line = |text: &str| text.lines().find(|line| line.contains("gate_up_proj:fprop")).map(str::to_owned);
    let table = place.run("inspect out").succeeds().stdout;
    let columns = line(&table).expect("a line");
    assert!(columns.starts_with("mlp.experts.gate_up_proj:fprop  input  "), "{table}");
    // What the run computes in bf16 is marked: all experts under `fp8-row`, and one block by `skip`.
    place.train("rows", &format!("{FP8} --set precision.recipe=fp8-row --set train.steps=2"));
    let table = place.run("inspect rows").succeeds().stdout;
    let of_experts: Vec<&str> = table.lines().filter(|line| line.starts_with("mlp.experts.")).collect();
    assert!(of_experts.len() == 12 && of_experts.iter().all(|line| line.contains("  bf16: ")), "{table}");
    assert!(table.lines().filter(|line| line.starts_with("attn.")).all(|line| !line.contains("bf16: ")));
    let blamed = json("blame out");
    let groups = blamed["groups"].as_array().expect("a list");
    let of_experts: Vec<_> = groups.iter().filter(|group| group["site"] == "mlp.experts.down_proj").collect();
    assert_eq!((groups.len(), of_experts.len()), (12, 3), "{blamed}");
    assert!(of_experts[0]["set"].as_str().is_some_and(|set| set.contains("*.mlp.experts.down_proj:")));
    let measured = json(&format!("bench fp8 run.toml {FP8} --set precision.recipe=fp8-current"));
    let layers: Vec<_> = measured["rows"].as_array().expect("rows").iter().map(|row| &row["layer"]).collect();
    let sites = ["attn.qkv_proj", "attn.o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
    assert_eq!(layers, sites);
    let skipped = format!(
        "{FP8} --set precision.recipe=fp8-current --set train.steps=4 --set precision.skip=[\"{name}\"]"
    );
    place.train("skipped", &skipped);
    let table = place.run("inspect skipped").succeeds().stdout;
    let wgrads = || table.lines().filter(|line| line.starts_with("mlp.experts.gate_up_proj:wgrad"));
    assert_eq!(
        (wgrads().count(), wgrads().filter(|line| line.contains("  bf16: ")).count()),
        (4, 2),
        "{table}"
    );
    place.run("compare out skipped").succeeds();
    // Tokens have `top_k` rows each, and an expert its own outputs.
    let timed = json(&format!("bench gemm run.toml {FP8} --repeats 1 --runs 1"));
    let timed = timed["rows"].as_array().expect("rows").iter();
    let sizes: Vec<[u64; 3]> = timed
        .filter(|row| row["site"] == "mlp.experts.gate_up_proj" && row["role"] == "fprop")
        .map(|row| ["m", "n", "k"].map(|size| row[size].as_u64().expect("a size")))
        .collect();
    assert_eq!(sizes, [[4 * 32 * 2, 2 * 16, 16]]);
    let bench = format!("bench op run.toml {FP8} --set precision.recipe=fp8-current --repeats 1 --json");
    let ops = place.run(&bench).succeeds().stdout;
    let rows = ops.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let is_expert = |row: &Value| row["op"] == "grouped_scaled_matmul";
    assert_eq!(rows.filter(is_expert).filter_map(|row| row["count"].as_u64()).sum::<u64>(), 12, "{ops}");
}
