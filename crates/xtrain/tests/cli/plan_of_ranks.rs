//! `xtrain plan` and `xtrain bench` of several ranks: memory by the arithmetic of parameters, bytes, times of
//! lanes, and the modes of `parallel.shard` beside each other.

use crate::fragments::assert_says;
use crate::place::Place;
use serde_json::Value;
use std::path::Path;

fn example(file: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(file).display().to_string()
}

fn plan(place: &Place, arguments: &str) -> String {
    place.run(&format!("plan {arguments}")).succeeds().stdout
}

/// The bytes in the row of a table that begins so; 0 without such a row.
fn row(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.get(..44).is_some_and(|start| start.trim_end() == name));
    let bytes = line.and_then(|line| line.get(44..62)?.trim().replace(',', "").parse().ok());
    bytes.unwrap_or(0)
}

/// The row of a mode in the table of modes.
fn mode<'a>(text: &'a str, shard: &str) -> &'a str {
    let line = text.lines().find(|line| line.get(..18).is_some_and(|start| start.trim_end() == shard));
    line.unwrap_or_else(|| panic!("no row of {shard}:\n{text}"))
}

#[test]
fn the_memory_of_llama_3_70b_is_the_arithmetic_of_its_parameters() {
    let place = Place::new();
    let (parameters, norms) = (70_553_706_496u64, 161 * 8192);
    // Embedding and head have 128,256 rows, which 64 ranks share evenly and 1,024 do not: 126 rows are a
    // piece. All other matrices divide.
    for (ranks, padded_rows) in [(64, 128_256), (1024, 126 * 1024)] {
        let padding = 2 * (padded_rows - 128_256) * 8192;
        let piece = (parameters + padding) / ranks;
        let matrices = parameters - norms;
        for shard in ["none", "optimizer", "gradients", "weights"] {
            let text = plan(
                &place,
                &format!(
                    "{} --gpus {ranks} --set train.batch_size=1024 --set parallel.shard={shard} --set train.device=cuda \
                     --set train.recompute=block --set train.loss_chunk=4096",
                    example("llama3_70b.toml")
                ),
            );
            let held = if shard == "none" { parameters } else { piece };
            for name in ["masters", "first moments", "second moments"] {
                assert_eq!(row(&text, name), 4 * held, "{ranks} ranks, {shard}, {name}:\n{text}");
            }
            let is_summed = shard == "gradients" || shard == "weights";
            let (gradients, summed) = match shard {
                "none" => (4 * parameters, 0),
                _ if is_summed => (0, 4 * piece),
                _ => (4 * parameters, 4 * piece),
            };
            assert_eq!(row(&text, "gradients"), gradients, "{ranks} ranks, {shard}:\n{text}");
            assert_eq!(row(&text, "summed gradients"), summed, "{ranks} ranks, {shard}:\n{text}");
            let copies = if shard == "weights" { 2 * (piece - norms / ranks) } else { 2 * matrices };
            assert_eq!(row(&text, "compute weights"), copies, "{ranks} ranks, {shard}:\n{text}");
            // A micro-step sends a rank's rows of each tensor to every other rank: gradients in fp32, and
            // bf16 matrices with fp32 norms for the forward and the backward of each block. The last two
            // blocks are still there when their backward begins, and embedding and head are gathered once.
            let others = ranks - 1;
            assert_eq!(row(&text, "gradients, all_to_all"), 4 * piece * others, "{shard}:\n{text}");
            let vocabulary = padded_rows * 8192 / ranks;
            let block = (parameters - 2 * 128_256 * 8192 - norms) / 80 / ranks;
            let (norm, gathers) = (4 * 8192 / ranks, 2 * 80 - 2);
            let gathered = gathers * (2 * block + 2 * norm) + 2 * 2 * vocabulary + norm;
            let sent = if shard == "weights" { gathered * others } else { 0 };
            assert_eq!(row(&text, "weights, all_gather"), sent, "{ranks} ranks, {shard}:\n{text}");
        }
    }
}

#[test]
fn a_plan_of_several_gpus_tells_times_bytes_and_modes() {
    let place = Place::new();
    let file = example("llama3_8b.toml");
    let text = plan(&place, &format!("{file} --gpus 16 --device-model h100 --set parallel.shard=weights"));
    let network = "16; 330 GB/s within a node; between nodes 330 GB/s in rings (all-gather, reduce-scatter), and \
                   48.0 GB/s for the NIC of each GPU (all-to-all)\n";
    assert!(text.contains(&format!("\nranks                       {network}")), "{text}");
    assert!(text.contains(" of communication: ") && text.contains("% hidden\n"), "{text}");
    assert_says("plan of ranks, the longest wait", &text);
    assert_says("plan of ranks, the source of times", &text);
    assert_says("plan of ranks, a mode that does not fit", mode(&text, "none"));
    assert!(mode(&text, "weights").contains("  as configured; "), "{text}");
    assert_says("plan of ranks, the fastest mode", &text);
    assert!(row(&text, "weights, all_gather") > 0 && row(&text, "numbers, all_gather") > 0, "{text}");
    // Between nodes, NCCL adds gradients much faster than our fixed order, but with other bits.
    let sums = text.lines().find_map(|line| line.strip_prefix("faster sums ")).unwrap_or_default();
    assert!(sums.contains("reduce=fast: ") && sums.contains("bits"), "{text}");
    // Faster NICs, and more GPUs of a node.
    let seconds = |options: &str| -> f64 {
        let text = plan(&place, &format!("{file} --gpus 16 --device-model h100 {options}"));
        let mode = mode(&text, "weights").split_whitespace();
        // Memory has a unit, as have bytes of a micro-step and of a step.
        mode.skip(7).take(1).collect::<String>().parse().expect("seconds")
    };
    let (slow, usual, node) = (seconds("--link 5GB/s"), seconds(""), seconds("--gpus-per-node 16"));
    assert!(slow > usual && usual > node, "{slow} {usual} {node}");
    // Gradients go through NICs, unless NCCL adds them in rings.
    let fast = "--set parallel.reduce=fast";
    assert!(seconds(fast) < usual, "{} {usual}", seconds(fast));
    let (rings, both) = (seconds("--ring 100GB/s"), seconds(&format!("--ring 100GB/s {fast}")));
    assert!(rings > usual && both > seconds(fast), "{rings} {both}");
    for (options, says) in [
        ("--gpus 8 --link 50", "write bytes or bits per second, such as 50GB/s"),
        ("--link 50GB/s", "--gpus"),
        ("--ring 50GB/s", "--gpus"),
        ("--ranks 2 --link 50GB/s", "--ranks"),
        ("--ranks 2 --gpus-per-node 2", "--ranks"),
        (
            "--gpus 8 --set train.device=cpu",
            "--gpus 8 is for GPUs, and --set train.device=cpu asks for another device",
        ),
        ("--gpus 8 --svg a.svg --dump", "--dump"),
        ("--gpus 16 --set parallel.transport=copy", "and the run has several hosts"),
        ("--ranks 2 --set train.device=cpu --set parallel.transport=nccl", "ranks on the CPU have no GPU"),
        ("--gpus 8 --set parallel.reduce=fast --set parallel.transport=copy", "copies add nothing"),
    ] {
        place.run(&format!("plan {file} {options}")).refuses(&[says]);
    }
}

/// Inputs in a byte of an element if a rank has tiles of tokens, gradients if one layout is enough.
#[test]
fn a_plan_says_in_which_type_tensor_ranks_gather_tokens() {
    let place = Place::new();
    let inputs = "attn.qkv_proj, mlp.gate_up_proj in";
    let gradients = "gradients of mlp.down_proj, attn.o_proj in";
    for (settings, expected) in [
        ("recipe=fp8-delayed", format!("{inputs} e4m3; {gradients} e5m2")),
        ("recipe=fp8-block", format!("{inputs} e4m3; {gradients} bf16 (dgrad and wgrad read two casts")),
        (
            "recipe=fp8-block --set data.seq_len=128",
            format!("{inputs} bf16 (64 tokens of a rank are not a multiple of 128)"),
        ),
        ("recipe=fp8-current --set parallel.gather=fp32", format!("{inputs} bf16 (by parallel.gather)")),
    ] {
        let tensor = "--gpus 2 --set parallel.tensor=2 --set train.device=cuda --set train.batch_size=1";
        let text =
            plan(&place, &format!("{} {tensor} --set precision.{settings}", example("llama3_8b.toml")));
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn a_picture_shows_the_lanes_of_a_step() {
    let place = Place::new();
    let file = example("llama3_8b.toml");
    let draw = |options: &str| {
        place.run(&format!("plan {file} --gpus 8 --set parallel.shard=weights --svg a.svg {options}"))
    };
    draw("--set train.device=cuda").refuses(&["--svg draws times", "--device-model"]);
    for micro_steps in [1, 2, 64] {
        let batch = 8 * micro_steps;
        draw(&format!("--device-model h100 --set train.batch_size={batch}")).succeeds();
        let svg = String::from_utf8(place.read("a.svg")).expect("text");
        let parts = ["first micro-step", " further micro-steps, each", "last micro-step", ">update, "];
        let expected = [micro_steps > 1, micro_steps > 2, micro_steps > 1, micro_steps > 1];
        assert_eq!(parts.map(|part| svg.contains(part)), expected, "{micro_steps}");
        for name in [">forward<", ">weights<", ">gradients<", ">exposed: kernels wait<", "8 x NVIDIA H100"] {
            assert!(svg.contains(name), "{name}");
        }
        assert!(svg.len() < 64 << 10, "{} bytes", svg.len());
    }
    place.write("a.svg", b"<svg/> of someone else");
    draw("--device-model h100").refuses(&["a.svg", "is no picture that xtrain wrote"]);
    assert_eq!(place.read("a.svg"), b"<svg/> of someone else");
}

fn json(place: &Place, arguments: &str) -> Value {
    let ran = place.run(&format!("bench {arguments} --json")).succeeds();
    serde_json::from_str(&ran.stdout).expect("JSON")
}

#[test]
fn one_of_several_ranks_is_measured_on_one_device() {
    let place = Place::new();
    let sets = "--set train.device=cpu --set train.micro_batch_size=1";
    let quick = &format!("--warmup 0 --repeats 1 --steps 2 {sets}");
    for shard in ["none", "weights"] {
        let run = format!("step run.toml --rank-of 4 --set parallel.shard={shard} {quick}");
        let speed = json(&place, &run);
        let rank = &speed["rank"];
        assert_eq!(rank["ranks"], 4);
        assert_eq!(rank["plan_bytes"], speed["planned_bytes"], "{speed}");
        assert_eq!(rank["sent_bytes"], rank["plan_sent_bytes"], "{speed}");
        assert_eq!(speed["tokens"], 16);
        let slow = json(&place, &format!("{run} --stretch --gpus-per-node 1 --link 1MB/s"));
        assert!(slow["seconds"].as_f64() > speed["seconds"].as_f64(), "{slow} {speed}");
    }
    // With a part of the experts, of which the first rank has most tokens by Zipf's law.
    let mixture = "--set model.family=mixtral --set experts.count=4 --set experts.ffn_dim=12 --routing zipf";
    for shard in ["none", "weights"] {
        let options = format!("--set parallel.expert=4 --set parallel.shard={shard} {mixture}");
        let speed = json(&place, &format!("step run.toml --rank-of 4 {quick} {options}"));
        let rank = &speed["rank"];
        assert_eq!(rank["plan_bytes"], speed["planned_bytes"], "{speed}");
        assert_eq!(rank["sent_bytes"], rank["plan_sent_bytes"], "{speed}");
        assert!(speed["loss"].as_f64().is_some_and(|loss| loss > 1.0), "{speed}");
        let plan = place.run(&format!("plan run.toml --json --ranks 4 {sets} {options}")).succeeds().stdout;
        let plan: Value = serde_json::from_str(&plan).unwrap_or_else(|error| panic!("{error}: {plan}"));
        assert_eq!(plan["sent_bytes"], rank["sent_bytes"], "{plan}");
        // Beside the step, the device holds the program that fills the copies of masters.
        let [planned, held] = [&plan, rank].map(|of| of["plan_bytes"].as_u64().expect("bytes"));
        assert!((planned..planned + 1024).contains(&held), "{planned} {held}");
    }
    // A routing that does not fit is no step to measure. Tokens of a small batch always fit.
    let long = "--set data.seq_len=128 --set parallel.expert=4 --set experts.capacity=1.0";
    place
        .run(&format!("bench step run.toml --rank-of 4 {quick} {mixture} {long}"))
        .refuses(&["the experts of block ", "experts.capacity"]);
    // All ranks see it, and one reports it.
    place
        .run(&format!("bench step run.toml --ranks 4 {quick} {mixture} {long}"))
        .refuses(&["the experts of block ", "experts.capacity"]);
    let table = place.run(&format!("bench step run.toml --rank-of 4 {quick}")).succeeds().stdout;
    for row in ["\nrank ", "\nstep by the plan ", "\nallocated memory ", "\nsent a step "] {
        assert!(table.contains(row), "{table}");
    }
    place.run("bench step run.toml --stretch").refuses(&["--rank-of"]);
}

#[test]
fn a_step_is_measured_on_all_ranks() {
    let place = Place::new();
    let quick = "--warmup 0 --repeats 2 --steps 1 --set train.micro_batch_size=1";
    let mixture =
        "--set model.family=mixtral --set experts.count=4 --set experts.ffn_dim=12 --routing uniform";
    let meshes = [
        "--set parallel.shard=weights".to_owned(),
        "--set parallel.pipeline=2".to_owned(),
        format!("--set parallel.expert=2 {mixture}"),
    ];
    for mesh in meshes {
        let speed = json(&place, &format!("step run.toml --ranks 2 {mesh} {quick}"));
        assert_eq!(
            (&speed["ranks"], &speed["tokens"], &speed["rank"]),
            (&2.into(), &64.into(), &Value::Null)
        );
        assert!(speed["loss"].as_f64().is_some_and(|loss| loss > 1.0), "{speed}");
    }
    let table = place.run(&format!("bench step run.toml --ranks 2 {quick}")).succeeds().stdout;
    assert!(table.contains("2 ranks, each on CPU"), "{table}");
    assert_eq!(place.names(""), ["a.txt", "b.txt", "continued.toml", "run.toml"]);
    place.run(&format!("bench step run.toml --ranks 2 --routing zipf {quick}")).refuses(&["no experts"]);
    place.run("bench step run.toml --ranks 2 --rank-of 2").refuses(&["--rank-of", "--ranks"]);
    place.run("bench step run.toml --ranks 3").refuses(&["3"]);
}

#[test]
fn collectives_are_measured_between_processes() {
    let place = Place::new();
    let quick = "--size 64KiB --size 100KB --repeats 1 --runs 2";
    let speeds = json(&place, &format!("comm --ranks 3 --threads 1 {quick}"));
    assert_eq!(speeds["ranks"], 3);
    let rows = speeds["rows"].as_array().expect("rows");
    let names: Vec<&str> = rows.iter().filter_map(|row| row["collective"].as_str()).collect();
    assert_eq!(
        names,
        [
            "all_gather",
            "all_gather",
            "exchange + sum",
            "exchange + sum",
            "reduce_scatter",
            "reduce_scatter",
            "all_reduce",
            "all_reduce"
        ]
    );
    for row in rows {
        let positive = |key: &str| row[key].as_f64().is_some_and(|value| value > 0.0);
        assert!(positive("seconds") && positive("bus_gigabytes_per_second"), "{row}");
        assert!(row["bytes"].as_u64().is_some_and(|bytes| bytes.is_multiple_of(12)), "{row}");
    }
    let table = place.run(&format!("bench comm --ranks 2 --threads 1 {quick}")).succeeds().stdout;
    assert!(
        table.starts_with("2 ranks, each on CPU, 1 thread, path host; a GEMM of 512^3 takes "),
        "{table}"
    );
    assert_eq!(place.names(""), ["a.txt", "b.txt", "continued.toml", "run.toml"]);
    // A process alone sends nothing.
    assert!(
        place.run(&format!("bench comm --device cpu {quick}")).succeeds().stdout.starts_with("1 ranks, ")
    );
}

#[test]
fn a_proposed_mesh_is_planned_as_it_was_proposed() {
    let place = Place::new();
    let json = |arguments: &str| -> Value {
        let text = plan(&place, &format!("{arguments} --json --device-model h100"));
        serde_json::from_str(&text).expect("JSON")
    };
    let model = "--set model.dim=1024 --set model.heads=8 --set model.kv_heads=8 --set model.layers=8";
    let base = format!("run.toml --gpus 32 {model} --set train.batch_size=8 --set train.micro_batch_size=1");
    let found = json(&base);
    let device = &found["device"];
    // 8 sequences are too few for 32 ranks alone.
    assert_eq!((&device["fits"], &found["ranks"]), (&false.into(), &32.into()), "{found}");
    assert!(device["refused"].as_str().is_some_and(|why| why.contains("32 ranks")), "{found}");
    let meshes = device["meshes"].as_array().expect("meshes");
    assert!((2..=5).contains(&meshes.len()), "{found}");
    assert_eq!(meshes[0]["set"], device["proposed"]["set"], "{found}");
    for mesh in meshes {
        let sets = mesh["set"].as_array().expect("settings").iter().filter_map(Value::as_str);
        let sets: Vec<String> = sets.map(|setting| format!("--set {setting}")).collect();
        let again = json(&format!("{base} {}", sets.join(" ")));
        let same = |key: &str| (again["device"][key].clone(), mesh[key].clone());
        for key in ["needed_bytes", "seconds", "mfu"] {
            let (again, proposed) = same(key);
            assert_eq!(again, proposed, "{key} of {mesh}");
        }
        let stages = mesh["stages"].as_array().map_or(0, Vec::len) as u64;
        assert_eq!(Some(stages.max(1)), mesh["pipeline"].as_u64(), "{mesh}");
    }
    let text = plan(&place, &format!("{base} --device-model h100"));
    for line in
        ["\ntensor x pipeline x data ", "\n    limited by  ", "\n    settings    --set ", "\nproposed "]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    // No mesh of a prime number of ranks has so few sequences, and the run names no mesh that is replaced.
    place
        .run(&format!("plan {base} --gpus 31 --device-model h100").replace("--gpus 32 ", ""))
        .refuses(&["31 ranks"]);
    let named = format!("plan {base} --device-model h100 --set parallel.tensor=2");
    place.run(&named).refuses(&["8 cannot be shared evenly by 16 groups"]);
}

#[test]
fn a_picture_shows_the_schedule_of_a_pipeline() {
    let place = Place::new();
    let file = example("llama3_8b.toml");
    let sets = "--set parallel.pipeline=4 --set train.batch_size=64 --set parallel.shard=optimizer";
    plan(&place, &format!("{file} --gpus 8 --device-model h100 {sets} --svg a.svg"));
    let svg = String::from_utf8(place.read("a.svg")).expect("text");
    for name in [">stage 0<", ">stage 3<", ": 32 micro-batches through 4 stages<", "the slowest<", ">update<"]
    {
        assert!(svg.contains(name), "{name}");
    }
    assert!(!svg.contains(">stage 4<") && svg.len() < 128 << 10, "{} bytes", svg.len());
}

/// The operations of a token are those of all stages, and too few micro-batches for them are warned of.
#[test]
fn operations_of_a_pipeline_are_those_of_all_stages() {
    let place = Place::new();
    let sets =
        "--device-model h100 --set train.recompute=none --set train.micro_batch_size=2 --set model.layers=3";
    let computed = |options: &str| {
        let text = plan(&place, &format!("run.toml {sets} {options}"));
        let line = text.lines().find(|line| line.starts_with("FLOPs per token")).expect("a line").to_owned();
        line.rsplit_once("; ").expect("two counts").1.to_owned()
    };
    let whole = computed("");
    assert!(whole.ends_with(" computed"), "{whole}");
    for stages in [2, 3] {
        assert_eq!(computed(&format!("--gpus {stages} --set parallel.pipeline={stages}")), whole);
    }
    let few = "--gpus 2 --set parallel.pipeline=2 --set train.batch_size=2";
    let ran = place.run(&format!("plan run.toml {sets} {few}")).succeeds();
    assert!(ran.stderr.contains("1 micro-batch for 2 "), "{}", ran.stderr);
    assert!(ran.stderr.contains("1 of 2 rounds, 50%"), "{}", ran.stderr);
}
