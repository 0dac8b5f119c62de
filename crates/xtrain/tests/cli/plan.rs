//! `xtrain plan`: the counts of known models, a table that adds up, and the memory that a run then holds.

use crate::fragments::assert_says;
use crate::messages::assert_message;
use crate::place::Place;
use serde_json::Value;
use std::path::Path;

fn examples(file: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(file).display().to_string()
}

fn plan(place: &Place, arguments: &str) -> String {
    place.run(&format!("plan {arguments}")).succeeds().stdout
}

/// The number that stands in the row of the memory table that begins so.
fn row(text: &str, name: &str) -> u64 {
    let line =
        text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no row {name}:\n{text}"));
    // A row's name may hold numbers; its bytes stand in a column of their own.
    bytes_of(line).unwrap_or_else(|| panic!("no bytes in {line:?}"))
}

/// The second column of a row of the memory table.
fn bytes_of(line: &str) -> Option<u64> {
    line.get(44..62)?.trim().replace(',', "").parse().ok()
}

/// The rows of the memory table, without its total.
fn rows(text: &str) -> Vec<(String, u64)> {
    let table = text.lines().skip_while(|line| !line.starts_with("memory ")).skip(1);
    let rows = table.take_while(|line| !line.starts_with("total"));
    rows.map(|line| (line[..44].trim().to_owned(), bytes_of(line).expect("a number"))).collect()
}

#[test]
fn the_parameters_of_llama_3_are_the_known_ones_and_the_table_adds_up() {
    let place = Place::new();
    for (file, parameters) in [("llama3_8b.toml", 8_030_261_248u64), ("llama3_70b.toml", 70_553_706_496)] {
        let text = plan(&place, &examples(file));
        let shown: String = parameters
            .to_string()
            .as_bytes()
            .rchunks(3)
            .rev()
            .map(|c| String::from_utf8_lossy(c) + ",")
            .collect();
        assert!(text.contains(&format!("{} (", shown.trim_end_matches(','))), "{text}");
        let rows = rows(&text);
        assert!(rows.len() >= 8, "{text}");
        assert_eq!(rows.iter().map(|(_, bytes)| bytes).sum::<u64>(), row(&text, "total"), "{text}");
        // State that the recipe fixes: fp32 masters, gradients and moments, bf16 copies of the matrices.
        for name in ["masters", "gradients", "first moments", "second moments"] {
            assert_eq!(row(&text, name), 4 * parameters, "{name}\n{text}");
        }
        let compute = row(&text, "compute weights");
        assert!(compute <= 2 * parameters && compute > 2 * parameters - parameters / 100, "{text}");
        assert!(!place.exists("runs"), "a plan wrote something");
    }
}

#[test]
fn what_cpu_kernels_work_in_is_told_under_the_total() {
    let place = Place::new();
    let more = |change: &str| {
        let text = plan(&place, &format!("run.toml --set data.seq_len=2048 --set train.threads=1 {change}"));
        let mut lines = text.lines().skip_while(|line| !line.starts_with("total")).skip(1);
        let line = lines.next().expect("a line under the total").to_owned();
        assert!(line.starts_with("CPU kernels use up to ") && line.ends_with(" more"), "{text}");
        line
    };
    let one = more("");
    assert_ne!(one, more("--set train.threads=8"), "it grows with the threads");
    assert_ne!(one, more("--set data.seq_len=8192"), "it grows with the sequence");
}

#[test]
fn a_plan_says_whether_it_fits_and_what_would() {
    let place = Place::new();
    let given = "--set train.recompute=none --set train.loss_chunk=4096";
    let asked = |arguments: &str| plan(&place, &format!("run.toml --set model.dim=64 {given} {arguments}"));
    let total = row(&asked("--set train.device=cuda"), "total");
    // On a GPU, libraries need memory besides the plan.
    let enough = total + (256 << 20);
    let text = asked(&format!("--set train.device=cuda --memory {enough}"));
    assert_says("plan, memory of libraries", &text);
    assert_says("plan, it fits", &text);
    let text = asked(&format!("--set train.device=cuda --memory {}", enough - 1));
    assert_says("plan, it does not fit", &text);
    let proposed = "--set train.recompute=norms --set train.recompute_blocks=1";
    assert!(answer(&text, "proposed").starts_with(&format!("{proposed}: it needs ")), "{text}");
    assert_says("plan, another proposal", &text);
    // The tables are those of the proposed run, which fits as it says.
    let again = asked(&format!("--set train.device=cuda --memory {} {proposed}", enough - 1));
    assert_eq!(row(&again, "total"), row(&text, "total"), "{text}");
    assert_eq!(answer(&again, "time"), answer(&text, "time"), "{text}");
    assert!(answer(&again, "fits").starts_with("yes: "), "{again}");
    let mut without_gpu = place.command(&format!("plan run.toml --memory {enough}"));
    without_gpu.env("CUDA_VISIBLE_DEVICES", "");
    let of_a_cpu = crate::place::finish(without_gpu, "plan").succeeds();
    assert_says("plan, a machine without a GPU", &of_a_cpu.stderr);
    assert_says("plan, nothing fits", asked("--memory 1MiB"));
    // Without a size it is the machine's own, which has room for this one.
    assert!(asked("--set train.device=cpu").contains(", and this machine has "), "{text}");
    let text =
        plan(&place, &format!("{} --set train.device=cuda --memory 24GiB", examples("llama3_8b.toml")));
    assert_says("plan, memory of the state", &text);
    assert!(answer(&text, "proposed").starts_with("--gpus 8 --set parallel.shard=weights "), "{text}");
}

#[test]
fn logits_and_workspace_are_told_wherever_the_peak_is() {
    let place = Place::new();
    // A chunk of 1024 tokens in bf16, and two f32 terms for each of the 8192 tokens of a sequence.
    let logits = 1024 * 128_256 * 2 + 8192 * 2 * 4;
    let mut away = Vec::new();
    for recompute in ["none", "norms", "block"] {
        let set = format!("--all --set train.loss_chunk=1024 --set train.recompute={recompute}");
        let text = plan(&place, &format!("{} {set}", examples("llama3_8b.toml")));
        assert_eq!(row(&text, "logits of a chunk"), logits, "{text}");
        assert_eq!(row(&text, "workspace of other ops"), 0, "{text}");
        let table = rows(&text).iter().any(|(name, _)| name == "logits of a chunk");
        assert_ne!(table, text.contains("not at the peak"), "{text}");
        away.push(!table);
    }
    assert_eq!(away, [false, false, true]);
}

#[test]
fn a_plan_opens_no_data_and_works_for_every_kind_of_tokenizer_whose_size_is_known() {
    let place = Place::new();
    std::fs::remove_file(place.path("a.txt")).expect("removes");
    assert!(plan(&place, "run.toml").contains("vocabulary 257"));
    assert!(plan(&place, "run.toml --set data.tokenizer=bpe").contains("vocabulary 4096"));
    assert!(
        plan(&place, "run.toml --set data.tokenizer=chars --set model.vocab_size=65")
            .contains("vocabulary 65")
    );
    let bounded = plan(&place, "run.toml --set data.tokenizer=chars");
    assert_says("plan, a vocabulary of characters that are not there", bounded);
    let missing = place.run("plan run.toml --set data.tokenizer=some/folder");
    missing.refuses(&["some/folder"]);
    assert!(
        plan(&place, "run.toml --set data.tokenizer=some/folder --set model.vocab_size=900")
            .contains("vocabulary 900")
    );
}

#[test]
fn a_plan_of_far_too_much_is_told_and_not_allocated() {
    let place = Place::new();
    let text = plan(&place, "run.toml --set data.seq_len=16777216 --set model.dim=1024");
    assert!(row(&text, "rotation tables") == 16_777_216 * 512 * 4, "{text}");
    let absurd = "--set data.seq_len=16777216 --set train.batch_size=16777216 --set model.dim=65536";
    place.run(&format!("plan run.toml {absurd}")).refuses(&[
        "data.seq_len",
        "train.micro_batch_size",
        "typo",
    ]);
}

#[test]
fn the_dump_names_every_instance() {
    let place = Place::new();
    let dump = plan(&place, "run.toml --dump");
    for site in ["blocks.1.attn.qkv_proj", "lm_head", "adamw", "grad_norm"] {
        assert!(dump.contains(site), "{site}");
    }
    let instances = |dump: &str, role: &str| dump.lines().filter(|line| line.contains(role)).count();
    assert!(instances(&dump, "dgrad") > 10);
    assert_eq!(instances(&dump, "recompute"), 0);
    assert!(instances(&plan(&place, "run.toml --dump --set train.recompute=block"), "recompute") > 10);
}

/// Bytes that evaluation adds: tokens, targets, positions and sources of 4 sequences of 16, three scalars,
/// and the sums of a source, each at a multiple of 256 bytes.
const EVALUATION: u64 = 4 * 4 * 16 * 4 + 4 * 256;

/// Bytes that a run reported to hold.
fn held(place: &Place, out: &str) -> u64 {
    place.metrics(out)[0]["memory_bytes"].as_u64().expect("memory_bytes")
}

#[test]
fn a_run_holds_what_its_plan_says_to_the_byte() {
    let place = Place::new();
    let quick =
        "--set train.steps=2 --set checkpoint.export_hf=false --set data.held_out=0 --set eval.every=0";
    for (n, change) in [
        "",
        "--set precision.recipe=bf16 --set train.micro_batch_size=2",
        "--set data.document_mask=true --set model.dropout=0.1 --set train.recompute=block",
        "--set model.tie_embeddings=true --set model.family=qwen2",
        "--set precision.recipe=fp8-block --set precision.skip_slower=[] --set data.seq_len=32 --set model.ffn_dim=32 \
         --set precision.reference_every=40",
    ]
    .into_iter()
    .enumerate()
    {
        let text = plan(&place, &format!("run.toml {quick} {change}"));
        place.train(&format!("out{n}"), &format!("{quick} {change}"));
        assert_eq!(held(&place, &format!("out{n}")), row(&text, "total"), "{change}\n{text}");
    }
}

#[test]
fn evaluation_adds_its_inputs_and_outputs_and_nothing_else() {
    let place = Place::new();
    let text = plan(&place, "run.toml --set train.steps=2");
    place.train("out", "--set train.steps=2");
    assert_eq!(held(&place, "out"), row(&text, "total") + EVALUATION, "{text}");
}

#[test]
fn a_plan_takes_the_vocabulary_that_the_run_then_has() {
    let place = Place::new();
    let quick = "--set train.steps=2 --set data.train=shards";
    place.run("tokenize a.txt --bpe-vocab-size 300 --out shards").succeeds();
    let index: Value = serde_json::from_slice(&place.read("shards/dataset.json")).expect("JSON");
    // continued.toml names no tokenizer.
    let text = plan(&place, &format!("continued.toml {quick}"));
    assert!(text.contains(&format!("vocabulary {}\n", index["vocab_size"])), "{text}");
    assert!(!text.contains("at most"), "{text}");
    place.run(&format!("train continued.toml --out out {quick}")).succeeds();
    assert_eq!(held(&place, "out"), row(&text, "total") + EVALUATION, "{text}");
    // The run then names the tokenizer that it has, in the file and in the folder.
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    assert!(config.contains("tokenizer = \"shards\"") && !config.contains("bpe_vocab_size"), "{config}");
    assert_eq!(place.read("out/tokenizer/tokenizer.json"), place.read("shards/tokenizer.json"));
    place.run("train out/config.toml --out again").succeeds();
    // A size that is asked for is listed.
    let sized = place.run(&format!("plan continued.toml {quick} --set data.bpe_vocab_size=5000"));
    sized.refuses(&["`bpe_vocab_size` = 5000", "shards"]);
    // Characters are counted, in files and in shards.
    let chars = "--set data.tokenizer=chars --set train.steps=2";
    let counted = plan(&place, &format!("run.toml {chars}"));
    place.train("chars", chars);
    assert_eq!(held(&place, "chars"), row(&counted, "total") + EVALUATION, "{counted}");
}

#[test]
fn a_plan_shows_every_linear_layer_with_its_formats_and_why_some_are_bf16() {
    let place = Place::new();
    let file = examples("llama3_8b.toml");
    let sets = "--set precision.recipe=fp8-current --set precision.skip=[\"*.o_proj:wgrad\"] --set precision.bf16_last_layers=2";
    let text = plan(&place, &format!("{file} {sets}"));
    let line = |name: &str| {
        text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"))
    };
    assert!(
        line("precision")
            .ends_with("fp8-current, 91.3% of the operations of the blocks' linear layers in FP8"),
        "{text}"
    );
    assert!(line("blocks 0-29 attn.o_proj").ends_with("bf16  (skipped by \"*.o_proj:wgrad\")"), "{text}");
    assert_message("plan, a layer in FP8", line("blocks 0-29 mlp.gate_up_proj"));
    assert_message("plan, a layer at the end that stays in bf16", line("blocks 30-31 mlp.down_proj"));
    let slower = "precision.skip_slower=[{layer=\"mlp.down_proj\",speed=0.93,tokens=4096}]";
    let left = plan(&place, &format!("{file} {sets} --set {slower}"));
    let why = "(FP8 is slower: 0.93 of bf16's speed at 4096 x 14336 x 4096)";
    let is_left = |line: &&str| line.starts_with("blocks 0-29 mlp.down_proj") && line.ends_with(why);
    assert_eq!(left.lines().filter(is_left).count(), 1, "{left}");
    // Before a measurement, the plan says where it happens.
    let note =
        "layers that FP8 would make slower stay in bf16; they are measured on the GPU when the run begins";
    assert!(plan(&place, &format!("{file} {sets} --set train.device=cuda")).contains(note));
    assert!(
        !plan(&place, &format!("{file} {sets} --set train.device=cuda --set precision.skip_slower=[]"))
            .contains(note)
    );
    let none =
        place.run(&format!("plan {file} {sets} --set {}", slower.replace("mlp.down_proj", "down_proj")));
    none.refuses(&["[precision] skip_slower: \"down_proj\" is not a linear layer", "mlp.down_proj"]);
    let part =
        place.run(&format!("plan {file} --set precision.recipe=fp8-row --set precision.skip=[\"*.q_proj\"]"));
    part.refuses(&["[precision] skip", "q_proj is a part of qkv_proj"]);
    assert!(!plan(&place, &format!("{file} --set precision.recipe=bf16")).contains("out x in"));
}

#[test]
fn a_pattern_that_names_nothing_is_told_what_it_may_mean() {
    let place = Place::new();
    for (pattern, meant) in [
        ("down_proj:wgrad", "did you mean \"*.down_proj:wgrad\"?"),
        ("blocks.7.*", "the blocks are 0 to "),
        ("lm_head", "the head is in bf16 unless precision.head is \"fp8\""),
        ("embed", "the embedding is never in FP8"),
        ("blocks.[0-1].*", "only * stands for other text"),
        ("*.nothing", "the linear layers of a block are blocks.0.attn.qkv_proj"),
    ] {
        let set = format!("--set precision.recipe=fp8-block --set precision.skip=[\"{pattern}\"]");
        place.run(&format!("plan run.toml {set}")).refuses(&[pattern, " names nothing", meant]);
    }
}

#[test]
fn a_head_in_fp8_is_shown_and_one_that_cannot_be_is_told() {
    let place = Place::new();
    let set = "--set precision.recipe=fp8-block --set precision.head=fp8 --set precision.skip_slower=[]";
    let line = |of: &str| {
        let plan = place.run(&format!("plan run.toml {set} {of}")).succeeds().stdout;
        let line = plan.lines().find(|line| line.starts_with("lm_head ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no head: {plan}"))
    };
    let whole = line("--set model.vocab_size=288");
    assert_eq!(whole.matches("e4m3 x e4m3").count(), 3, "{whole}");
    assert!(
        line("--set model.vocab_size=288 --set precision.skip=[\"lm_head:wgrad\"]").contains("skipped by")
    );
    assert_message("plan, a head that is not a multiple of 16", line("--set model.vocab_size=290"));
    assert!(line("--set precision.head=bf16").contains("precision.head = \"bf16\""));
    let ran =
        place.run(&format!("train run.toml --out out {set} --set model.vocab_size=290 --set train.steps=3"));
    let said = ran.succeeds().stderr;
    for product in ["fprop", "dgrad", "wgrad"] {
        assert!(said.contains(&format!("{product} (290 is not a multiple of 16: the vocabulary")), "{said}");
    }
    place
        .run(&format!("plan run.toml {set} --set model.vocab_size=288 --set precision.skip=[\"lm_head.x\"]"))
        .refuses(&["names nothing; the linear layers", "after the blocks lm_head"]);
}

#[test]
fn the_program_after_a_pass_is_printed_and_an_unknown_pass_gets_the_nearest_name() {
    let place = Place::new();
    let file = examples("fp8.toml");
    let small = "--set train.device=cpu --set train.recompute=norms";
    let after = |pass: &str| plan(&place, &format!("{file} {small} --dump-after {pass}"));
    let (quantize, fuse) = (after("quantize"), after("fuse"));
    assert!(quantize.contains("AddRmsNorm") && !quantize.contains("AdamW"), "{quantize}");
    assert!(fuse.contains("RmsQuantize") && !quantize.contains("RmsQuantize"), "{fuse}");
    assert_eq!(fuse, plan(&place, &format!("{file} {small} --dump")));
    let refused = place.run(&format!("plan {file} --dump-after quantise"));
    assert_eq!(refused.code(), Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("did you mean quantize?"), "{}", refused.stderr);
}

/// The value of a line of the answers.
fn answer<'a>(text: &'a str, name: &str) -> &'a str {
    let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name}: {text}"))[name.len()..].trim()
}

#[test]
fn the_answers_come_first_and_are_those_of_the_device() {
    let place = Place::new();
    let text = plan(&place, "run.toml --device-model h200");
    let names = text.lines().map(|line| line.split("  ").next().unwrap_or_default());
    let first: Vec<&str> = names.take_while(|name| !name.is_empty()).collect();
    assert_eq!(first, ["model", "fits", "time", "low MFU", "chosen", "parameters", "run"], "{text}");
    assert!(answer(&text, "fits").ends_with("and NVIDIA H200 has 134.61 GiB available"), "{text}");
    let chosen = answer(&text, "chosen");
    assert!(chosen.starts_with("recompute=none, loss_chunk=4096 for NVIDIA H200: it needs 0."), "{text}");
    assert_says("plan, available memory", chosen);
    let time = answer(&text, "time");
    assert!(
        time.starts_with("about ") && time.ends_with(" MFU (from the device table, edition 4)"),
        "{text}"
    );
    assert!(!text.contains("not at the peak") && !text.contains("workspace of other ops"), "{text}");
    place.run("plan run.toml --device-model h900").refuses(&["h900", "known GPUs are H200, H100, A100"]);
    // Without a GPU there is no time of one.
    let text = plan(&place, "run.toml --set train.recompute=none --set train.device=cpu");
    assert!(answer(&text, "time").contains(" tokens/s, "), "{text}");
}

#[test]
fn a_large_model_gets_what_fits_and_where_nothing_does_what_would() {
    let place = Place::new();
    let file = examples("llama3_8b.toml");
    let small = plan(&place, &format!("{file} --set optimizer.moments=bf16 --device-model h200"));
    assert!(answer(&small, "fits").starts_with("yes: "), "{small}");
    let slower = " slower than recompute=none, loss_chunk=4096, which needs 140.";
    assert!(answer(&small, "chosen").contains(slower), "{small}");
    let none = plan(&place, &format!("{file} --device-model h100"));
    assert!(answer(&none, "fits").starts_with("no: as configured it needs 137.97 GiB, "), "{none}");
    for part in ["nothing fits: even ", " of its 32 layers would fit"] {
        assert!(none.contains(part), "{part}: {none}");
    }
    let eight = plan(&place, &format!("{file} --device-model h100 --gpus 8"));
    assert!(answer(&eight, "time").ends_with(" MFU (from the device table, edition 4)"), "{eight}");
    // The proposed options lead to a run that fits, of the same time.
    for text in [none, eight] {
        let (options, needs) = answer(&text, "proposed").split_once(": ").expect("its memory");
        let gpus = if options.contains("--gpus") { "" } else { "--gpus 8" };
        let again = plan(&place, &format!("{file} --device-model h100 {gpus} {options}"));
        let size = needs.split(" needs ").nth(1).and_then(|rest| rest.split(';').next()).expect("a size");
        assert!(answer(&again, "fits").starts_with(&format!("yes: it needs {size}, ")), "{options}: {again}");
        assert_eq!(answer(&again, "time"), answer(&text, "time"), "{options}");
        assert!(!again.contains("\nfaster "), "{again}");
    }
}

#[test]
fn a_larger_micro_batch_is_proposed_where_gathers_take_long() {
    let place = Place::new();
    let file = examples("llama3_8b.toml");
    let slow =
        "--gpus 64 --device-model h100 --link 3GB/s --set parallel.shard=weights --set parallel.reduce=fast";
    let text = plan(&place, &format!("{file} {slow}"));
    assert!(answer(&text, "fits").starts_with("yes: "), "{text}");
    assert!(answer(&text, "low MFU").contains("% of the step waits for "), "{text}");
    let (options, why) = answer(&text, "faster").split_once(": ").expect("a reason");
    assert!(why.contains(" as fast as configured; ") || why.contains("% faster than "), "{text}");
    // It is the row that the table calls proposed, and the last line.
    let row = text.lines().find(|line| line.contains("  proposed; ")).expect("a row");
    let shard = options
        .split("parallel.shard=")
        .nth(1)
        .map_or("weights", |rest| rest.split(' ').next().expect("a word"));
    assert!(row.starts_with(shard), "{options}: {row}");
    assert!(text.contains(&format!("\nthe fastest that fits is parallel.shard = \"{shard}\"")), "{text}");
    let weights =
        plan(&place, &format!("{file} {slow} --set train.batch_size=256 --set parallel.replicas=8"));
    assert!(!weights.contains("micro_batch_size=8"), "a rank has four sequences: {weights}");
}

/// Sizes of the published config.json files, and the parameters of the published weights: all, and those of a
/// token (12.9, 3.3 and 22.2 billion in their papers and model cards).
#[test]
fn published_mixtures_are_planned_from_their_config_json() {
    let place = Place::new();
    let qwen = |dim: usize, layers: usize, heads: usize, widths: [usize; 2]| {
        let [dense, expert] = widths;
        serde_json::json!({
            "model_type": "qwen3_moe", "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": dense, "moe_intermediate_size": expert,
            "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
            "max_position_embeddings": 40_960, "rope_theta": 1e6, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001, "tie_word_embeddings": false,
        })
    };
    let mixtral = serde_json::json!({
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32_768, "rope_theta": 1e6, "sliding_window": null,
        "router_aux_loss_coef": 0.02, "tie_word_embeddings": false,
    });
    for (name, config, parameters, experts) in [
        (
            "Mixtral-8x7B",
            mixtral,
            "46,702,792,704, 12,879,925,248 of",
            "2 of 8 experts per token, in 32 of 32",
        ),
        (
            "Qwen3-30B-A3B",
            qwen(2048, 48, 32, [6144, 768]),
            "30,532,122,624, 3,353,032,704 of",
            "8 of 128 experts per token, in 48 of 48",
        ),
        (
            "Qwen3-235B-A22B",
            qwen(4096, 94, 64, [12_288, 1536]),
            "235,093,634,560, 22,190,763,520 of",
            "8 of 128 experts per token, in 94 of 94",
        ),
    ] {
        place.write(&format!("{name}/config.json"), config.to_string().as_bytes());
        // Settings that a plan would choose are given, because their search takes long.
        let quick = "--device-model h200 --set train.micro_batch_size=8 --set train.loss_chunk=4096 --set train.recompute=block";
        let text = plan(&place, &format!("{name} {quick}"));
        assert!(answer(&text, "parameters").starts_with(parameters), "{text}");
        let shown = text.lines().find(|line| line.starts_with("experts ")).expect("a line");
        assert!(shown.contains(experts), "{shown}");
        assert!(answer(&text, "fits").starts_with("no: as configured it needs "), "{text}");
        // The smallest number of GPUs on which it fits is named, from any number on, and with all options
        // that it needs there.
        let options = |text: &str| answer(text, "proposed").split(": ").next().unwrap_or_default().to_owned();
        let gpus = |text: &str| -> usize {
            let options = options(text);
            let count = options.strip_prefix("--gpus ").and_then(|rest| rest.split(' ').next()?.parse().ok());
            count.unwrap_or_else(|| panic!("no number of GPUs: {text}"))
        };
        let count = gpus(&text);
        // Between nodes, NCCL adds gradients faster than our fixed order, but with other bits.
        assert!(count > 8 || !text.contains("\nfaster sums "), "{text}");
        assert!(text.contains(&format!("\n{:28}on {count} GPUs it does: see below\n", "")), "{text}");
        let less = (count - 1).next_power_of_two() / 2;
        let fewer = plan(&place, &format!("{name} {quick} --gpus {less}"));
        assert_eq!(gpus(&fewer), count, "{fewer}");
        assert!(fewer.contains(&format!("on {less} GPUs nothing fits: even ")), "{fewer}");
        let there = plan(&place, &format!("{name} {quick} {}", options(&text)));
        assert!(answer(&there, "fits").starts_with("yes: "), "{there}");
        let layers = config["num_hidden_layers"].as_u64().expect("a number");
        assert!(text.contains(&format!(" of its {layers} layers would fit")), "{text}");
        let coefficient = &config["router_aux_loss_coef"];
        assert!(shown.contains(&format!("; balance: loss, weight {coefficient}; ")), "{shown}");
    }
}

/// More GPUs have the micro-batches that they can share, not those of the run file.
#[test]
fn a_run_that_fits_on_more_gpus_is_planned_there_with_micro_batches_that_they_share() {
    let place = Place::new();
    let model = "--set model.dim=1024 --set model.layers=8 --set model.heads=8 --set model.vocab_size=8192";
    let batch = "--set train.batch_size=8 --set train.micro_batch_size=4";
    let text =
        plan(&place, &format!("run.toml {model} {batch} --gpus 2 --device-model h200 --memory 700MiB"));
    let proposed = answer(&text, "proposed");
    assert!(proposed.starts_with("--gpus 8 ") && proposed.contains("train.micro_batch_size=1"), "{text}");
}

#[test]
fn processes_on_a_cpu_share_its_memory() {
    let place = Place::new();
    let available = |options: &str| -> f64 {
        let text = plan(&place, &format!("run.toml --set train.threads=0 --set train.device=cpu {options}"));
        let fits = answer(&text, "fits");
        let (owner, size) = fits.rsplit_once(" has ").expect("a size");
        assert_eq!(owner.ends_with("each of 4 processes on this machine"), !options.is_empty(), "{fits}");
        let size = size.strip_suffix(" GiB available").expect("GiB");
        size.parse().expect("a number")
    };
    let (all, share) = (available(""), available("--ranks 4"));
    // Other programs hold more or less from one moment to the next.
    assert!(share < all / 2.0, "{share} of {all} GiB");
}

#[test]
fn a_choice_says_if_it_changes_rounding() {
    let place = Place::new();
    let eight = format!("{} --set optimizer.moments=bf16", examples("llama3_8b.toml"));
    let micro = format!("{eight} --set train.micro_batch_size=auto --set train.batch_size=64");
    let t10 = examples("../benches/configs/t10.toml");
    let chunk = format!("{t10} --set train.loss_chunk=auto --set model.layers=2");
    let all_of_a_rank = "run.toml --set train.micro_batch_size=auto --gpus 2".to_owned();
    for (run, says) in [
        (eight, None),
        (micro, Some("; micro_batch_size changes rounding")),
        (chunk, Some("; loss_chunk changes rounding")),
        (all_of_a_rank, None),
    ] {
        let text = plan(&place, &format!("{run} --device-model h200"));
        let chosen = answer(&text, "chosen");
        match says {
            Some(says) => assert!(chosen.ends_with(says), "{chosen}"),
            None => assert!(!chosen.contains("rounding"), "{chosen}"),
        }
    }
}

#[test]
fn a_model_is_planned_without_a_run_file() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    for path in ["out/hf", "out/hf/config.json"] {
        let text = plan(&place, &format!("{path} --device-model 4090"));
        assert!(answer(&text, "run").contains(" tokens, "), "{text}");
        assert_says("plan, an assumed length", answer(&text, "run"));
        // The sequences are no longer than those that the model was made for, which it says.
        assert!(answer(&text, "batch").contains(" sequences of 16 tokens "), "{text}");
        assert!(answer(&text, "run").ends_with("data.seq_len, the model's context"), "{text}");
        assert!(answer(&text, "time").starts_with("about "), "{text}");
    }
    // The example's batch is one that the ranks can share.
    for ranks in [3, 64] {
        let text = plan(&place, &format!("out/hf --device-model h100 --gpus {ranks}"));
        assert!(answer(&text, "run").contains(" tokens, "), "{text}");
    }
    let micro = plan(
        &place,
        "out/hf --device-model h100 --gpus 8 --set train.batch_size=32 --set train.micro_batch_size=4",
    );
    assert!(answer(&micro, "batch").ends_with(" 4 at a time"), "{micro}");
    let set = plan(&place, "out/hf --set train.tokens=1000000 --set data.seq_len=8");
    assert!(answer(&set, "run").contains(" 1.00M tokens"), "{set}");
    // A run folder is planned by its configuration.
    assert!(answer(&plan(&place, "out"), "run").starts_with("2 steps"));
    place.run("plan out/metrics.json").refuses(&["a model is planned from its folder or its config.json"]);
}

#[test]
fn the_length_of_epochs_is_told_once_the_text_is_tokens() {
    let place = Place::new();
    let epochs = "run.toml --set train.steps= --set train.epochs=2";
    let before = plan(&place, epochs);
    assert_says("plan, the length of epochs before tokenizing", answer(&before, "run"));
    assert!(!place.exists("cache"), "a plan wrote something");
    place.train("out", "--set train.steps=2");
    let after = plan(&place, epochs);
    assert!(answer(&after, "run").contains(" steps, "), "{after}");
}

#[test]
fn a_plan_refuses_what_the_run_would() {
    let place = Place::new();
    let weights = "--set data.train=[{path=\"a.txt\",weight=1.0},{path=\"b.txt\",weight=1e-9}]";
    place.run(&format!("plan run.toml {weights}")).refuses(&["data source 2", "less than a millionth"]);
    place
        .run("plan run.toml --set data.held_out= --set data.valid=a.txt")
        .refuses(&["is also in data.train"]);
    place.run("plan run.toml --set model.vocab_size=256").refuses(&["less than the tokenizer's 257"]);
    place.run("plan run.toml --set data.begin_of_document=true").refuses(&["beginning-of-sequence token"]);
}
