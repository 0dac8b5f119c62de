//! Runs with Muon: resumed, planned, exported and tuned again, and what is refused.

use crate::place::Place;
use crate::resume::assert_same_end;

const MUON: &str = "--set optimizer.kind=muon --set schedule.kind=constant --set checkpoint.every=6 --set train.micro_batch_size=1";

/// Resumed in two processes that each have rows of the matrices, and then in one.
#[test]
fn a_run_goes_on_exactly_also_with_other_ranks() {
    let place = Place::new();
    let run = format!("{MUON} --set parallel.reduce=any-world");
    place.train("whole", &format!("{run} --set train.steps=18"));
    place.train("parts", &format!("{run} --set train.steps=6"));
    let cut = "--ranks 2 --set parallel.shard=optimizer";
    place.train("parts", &format!("{run} {cut} --resume --set train.steps=12"));
    place.train("parts", &format!("{run} --resume --set train.steps=18"));
    let last = |out: &str| place.read(&format!("{out}/hf/model.safetensors"));
    assert!(last("whole") == last("parts"), "other weights");
    // Without a second moment of the matrices.
    let manifest = String::from_utf8(place.read("whole/checkpoints/step-18/manifest.json")).expect("text");
    let has = |name: &str| manifest.contains(name);
    assert!(has("moment1/blocks.0.attn.qkv_proj.weight") && !has("moment2/blocks.0.attn.qkv_proj.weight"));
    assert!(has("moment2/embed.weight") && has("moment2/norm.weight"));
    // In one process, sums of any kind.
    let run = format!("{MUON} --set eval.every=6");
    place.train("one", &format!("{run} --set train.steps=12"));
    place.train("two", &format!("{run} --set train.steps=6"));
    place.train("two", &format!("{run} --resume --set train.steps=12"));
    assert_same_end(&place, "one", "two");
}

#[test]
fn the_state_of_one_optimizer_is_refused_by_the_other() {
    let place = Place::new();
    for (from, to) in [("muon", "adamw"), ("adamw", "muon")] {
        place.train(from, &format!("{MUON} --set optimizer.kind={from} --set train.steps=6"));
        let more = format!("{MUON} --resume --set train.steps=12 --set optimizer.kind={to}");
        let kind = format!("optimizer.kind = \"{from}\"");
        place.run(&format!("train run.toml --out {from} {more}")).refuses(&[
            &kind,
            "xtrain export",
            "model.init_from",
        ]);
    }
    // The export is tuned with the other one.
    let tune = |out: &str, from: &str, kind: &str| {
        let run = format!(
            "train continued.toml --out {out} --set model.init_from={from}/hf --set optimizer.kind={kind}"
        );
        place.run(&run).succeeds().stderr
    };
    let warning = "no sign that Muon trained these weights";
    place.write("continued.toml", CONTINUED.as_bytes());
    assert!(tune("a", "adamw", "muon").contains(warning));
    assert!(!tune("b", "adamw", "adamw").contains(warning));
    // A run with Muon says so in its folder, and so does one that tunes its export; one with AdamW does not.
    assert!(!tune("c", "muon", "muon").contains(warning));
    assert!(!tune("d", "c", "muon").contains(warning));
    tune("e", "c", "adamw");
    assert!(tune("f", "e", "muon").contains(warning));
}

const CONTINUED: &str =
    "[data]\ntrain = 'a.txt'\nseq_len = 16\n[train]\nsteps = 2\nbatch_size = 2\n[eval]\nevery = 0\n";

#[test]
fn keys_of_one_optimizer_are_refused_with_the_other() {
    let place = Place::new();
    for (sets, words) in [
        ("optimizer.momentum=0.9", &["`momentum`", "or set `kind`"][..]),
        ("optimizer.kind=muon --set optimizer.moments=bf16", &["moments = \"bf16\"", "kind = \"adamw\""]),
        ("optimizer.kind=muon --set optimizer.momentum=1", &["momentum", "less than 1"]),
        ("optimizer.kind=lion", &["adamw", "muon"]),
    ] {
        place.run(&format!("plan run.toml --set {sets}")).refuses(words);
    }
}

#[test]
fn a_plan_has_one_moment_of_matrices_and_the_iteration() {
    let place = Place::new();
    let plan = |sets: &str| place.run(&format!("plan run.toml {sets}")).succeeds().stdout;
    let (muon, adamw) = (plan("--set optimizer.kind=muon"), plan(""));
    let row = |plan: &str| plan.lines().find(|line| line.contains("second moments")).map(str::to_owned);
    assert!(row(&muon).is_some() && row(&muon) != row(&adamw), "{muon}");
    let program = plan("--set optimizer.kind=muon --dump");
    for op in ["MuonMomentum", "Orthogonalize", "MuonStep", "AdamW"] {
        assert!(program.contains(op), "{op}: {program}");
    }
    let cut = plan(
        "--set optimizer.kind=muon --ranks 2 --set parallel.shard=optimizer --set train.batch_size=4 --dump",
    );
    assert!(cut.contains("AllToAll { groups: "), "{cut}");
}
