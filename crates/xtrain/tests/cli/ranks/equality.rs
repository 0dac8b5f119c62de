//! Several processes against one.

use super::{SHARED, assert_near, numbers};
use crate::place::{Place, assert_same_file};

#[test]
fn ranks_train_the_model_of_one_process() {
    let place = Place::new();
    place.train("one", SHARED);
    for ranks in [2, 3, 4] {
        let out = format!("ranks-{ranks}");
        let ran = place.train(&out, &format!("{SHARED} --ranks {ranks}"));
        assert!(ran.stdout.contains(&format!("; {ranks} x CPU")), "{}", ran.stdout);
        for (key, share) in
            [("loss", 1e-5), ("grad_norm", 1e-5), ("tokens", 0.0), ("lr", 0.0), ("epoch", 0.0)]
        {
            let [ours, alone] = [&*out, "one"].map(|out| numbers(&place, out, "step", key));
            assert_eq!(alone.len(), 10);
            assert_near(&ours, &alone, share);
        }
        let [ours, alone] = [&*out, "one"].map(|out| numbers(&place, out, "eval", "loss"));
        assert_eq!(alone.len(), 2);
        assert_near(&ours, &alone, 1e-5);
        assert_eq!(place.names(&out), place.names("one"), "{ranks}");
    }
}

#[test]
fn what_ranks_leave_is_read_by_every_command_in_one_process() {
    let place = Place::new();
    let fp8 = "--set precision.recipe=fp8-row --set precision.skip_slower=[] --set data.seq_len=32 --set model.ffn_dim=32 --set \
               precision.reference_every=4 --set precision.reference_steps=2 --set train.check_numerics=true";
    let all = ["none", "optimizer", "gradients", "weights"].map(|shard| {
        let out = format!("out-{shard}");
        place.train(
            &out,
            &format!("{SHARED} {fp8} --ranks 3 --profile --set parallel.shard={shard} --set eval.prompts=[\"the\",\"a\"]"),
        );
        assert!(place.exists(&format!("{out}/trace.json")));
        assert_eq!(place.records(&out, "reference").len(), 2);
        assert_eq!(place.records(&out, "sample").len(), 2);
        out
    });
    // Where the state is changes no bit; the first two add gradients in another order than the last two.
    for pair in all.chunks(2) {
        for file in ["hf/model.safetensors", "sample.txt"] {
            assert_same_file(
                &place.path(&format!("{}/{file}", pair[0])),
                &place.path(&format!("{}/{file}", pair[1])),
            );
        }
    }
    let out = &all[3];
    for command in [
        format!("eval {out} --json"),
        format!("generate {out} --prompt the --max-tokens 4"),
        format!("export {out} --out exported"),
        format!("report {out}"),
        format!("inspect {out} --out inspected.html"),
        format!("blame {out}"),
        format!("compare {} {out} --out compared.html", all[0]),
        format!("plan {out}/config.toml"),
    ] {
        place.run(&command).succeeds();
    }
    // In the type of the run's own export.
    assert!(place.exists("exported/model.safetensors"));
    let evaluated = |out: &str| place.run(&format!("eval {out} --json")).succeeds().stdout;
    let loss =
        |text: String| serde_json::from_str::<serde_json::Value>(text.trim()).expect("JSON")["loss"].clone();
    assert_eq!(loss(evaluated(&all[2])), loss(evaluated(out)));
}

#[test]
fn a_run_repeats_to_the_bit() {
    let place = Place::new();
    for out in ["one", "two"] {
        place.train(out, &format!("{SHARED} --ranks 3"));
    }
    let [a, b] = ["one", "two"].map(|out| place.path(&format!("{out}/hf/model.safetensors")));
    assert_same_file(&a, &b);
    assert_eq!(numbers(&place, "one", "step", "loss"), numbers(&place, "two", "step", "loss"));
}

#[test]
fn sums_for_any_world_have_the_bits_of_one_process() {
    let place = Place::new();
    let any = "--set train.batch_size=8 --set train.micro_batch_size=1 --set train.steps=6 --set parallel.reduce=any-world";
    place.train("one", any);
    for (ranks, replicas) in [(2, 1), (4, 1), (4, 2)] {
        let out = format!("ranks-{ranks}-{replicas}");
        // A single replica holds all state on every rank, and two have their rows.
        let shard = if replicas == 1 { "none" } else { "weights" };
        let sets = format!("--set parallel.replicas={replicas} --set parallel.shard={shard}");
        place.train(&out, &format!("{any} --ranks {ranks} {sets}"));
        let [a, b] = [&*out, "one"].map(|out| place.path(&format!("{out}/hf/model.safetensors")));
        assert_same_file(&a, &b);
        for (kind, key) in [("step", "loss"), ("step", "grad_norm"), ("eval", "loss")] {
            assert_eq!(numbers(&place, &out, kind, key), numbers(&place, "one", kind, key), "{kind} {key}");
        }
    }
}

#[test]
fn an_evaluation_has_the_same_bits_on_any_number_of_ranks() {
    let place = Place::new();
    place.train("start", SHARED);
    // The weights that training continues are evaluated first, 50 sequences in batches of 1.
    let continued = format!(
        "train continued.toml --set model.init_from=start/hf {SHARED} --set eval.tokens=800 --set schedule.warmup_steps=0"
    );
    let losses: Vec<f64> = (1..=4)
        .map(|ranks| {
            let out = format!("ranks-{ranks}");
            let shard = if ranks > 2 { "weights" } else { "none" };
            let sets = format!("--set train.steps=1 --set parallel.shard={shard}");
            place.run(&format!("{continued} --out {out} --ranks {ranks} {sets}")).succeeds();
            let first = &place.records(&out, "eval")[0];
            assert_eq!(first["step"], 0);
            first["loss"].as_f64().expect("a number")
        })
        .collect();
    assert_eq!(losses, [losses[0]; 4]);
}

#[test]
fn each_source_of_a_mixture_has_its_loss_on_any_number_of_ranks() {
    let place = Place::new();
    place.train("start", SHARED);
    let continued = format!(
        "train continued.toml --set model.init_from=start/hf {SHARED} --set eval.tokens=1600 --set train.steps=1 --set schedule.warmup_steps=0 --set \
         data.train=[{{path=\"a.txt\",weight=2}},{{path=\"b.txt\",weight=1}}] --set train.micro_batch_size=2"
    );
    let by_source = |ranks: usize| -> Vec<(String, f64)> {
        let out = format!("ranks-{ranks}");
        let shard = if ranks > 2 { "weights" } else { "optimizer" };
        place
            .run(&format!("{continued} --out {out} --ranks {ranks} --set parallel.shard={shard}"))
            .succeeds();
        let first = place.records(&out, "source").into_iter().filter(|record| record["step"] == 0);
        first.map(|record| (record["name"].to_string(), record["loss"].as_f64().expect("a number"))).collect()
    };
    let alone = by_source(1);
    assert_eq!(alone.len(), 2, "{alone:?}");
    for ranks in [2, 3] {
        assert_eq!(by_source(ranks), alone);
    }
}
