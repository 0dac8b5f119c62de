//! Mixtures of experts: a run, its report, its export, and a run that goes on with other experts.

use crate::place::Place;

const MIXTURE: &str =
    "--set model.family=qwen3_moe --set experts.count=4 --set experts.per_token=2 --set experts.ffn_dim=12";

#[test]
fn a_mixture_trains_reports_its_loads_and_is_taken_in_again() {
    let place = Place::new();
    place.train("out", &format!("{MIXTURE} --set train.steps=5 --set experts.dense_blocks=[1]"));
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
    for key in ["\"num_experts\": 4", "\"num_local_experts\": 4", "\"mlp_only_layers\": [\n    1\n  ]"] {
        assert!(config.contains(key), "{config}");
    }
    let steps = "--set train.steps=2 --set schedule.warmup_steps=1";
    place.run(&format!("train run.toml --out again --set model.init_from=out/hf --set model.dim= --set model.layers= --set model.heads= \
         --set model.kv_heads= --set data.tokenizer= {steps}")).succeeds();
    assert_eq!(place.records("again", "experts").len(), 2);
}

#[test]
fn a_plan_counts_the_parameters_of_a_token() {
    let place = Place::new();
    let plan = place.run(&format!("plan run.toml {MIXTURE}")).succeeds().stdout;
    // Two blocks have four experts of 3 x 12 x 16 numbers each, of which a token passes through two.
    let line = plan.lines().find(|line| line.starts_with("parameters")).expect("a line").to_owned();
    let numbers: Vec<usize> = line
        .split(|c: char| !c.is_ascii_digit() && c != ',')
        .filter_map(|word| word.trim_matches(',').replace(',', "").parse().ok())
        .collect();
    assert_eq!(numbers[0] - numbers[1], 2 * 2 * 3 * 12 * 16, "{line}");
    assert!(plan.contains("2 of 4 for a token, in 2 of 2 blocks"), "{plan}");
    assert!(plan.contains("balanced by a loss of weight 0.001"), "{plan}");
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
}
