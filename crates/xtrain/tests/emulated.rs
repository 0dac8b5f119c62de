//! The binary on emulated GPUs: refusals of those that are too old or too small for a run, one of several
//! ranks on one GPU, and training on two. The tests count as ignored unless `tests/emulated/run.sh` starts
//! them.

use libtest_mimic::{Arguments, Failed, Trial};
use std::path::Path;
use std::process::Command;

/// The variable that holds the emulator's settings.
const SETTINGS: &str = "XTRAIN_EMULATOR";

const RUN: &str = r#"
[model]
dim = 64
layers = 2
heads = 2
[data]
train = "text.txt"
tokenizer = "bytes"
seq_len = 64
cache_dir = "cache"
[optimizer]
lr = 1e-3
[train]
steps = 2
batch_size = 4
device = "cuda"
out = "out"
"#;

/// The exit code of `xtrain VERB run.toml` on a GPU with these settings, its output, and whether it created
/// the run's folder.
fn xtrain(verb: &str, gpu: &str, set: &[&str]) -> Result<(Option<i32>, String, bool), Failed> {
    let folder = place()?;
    let settings = std::env::var(SETTINGS)?;
    let given: Vec<&str> = settings.lines().chain(gpu.split_whitespace()).collect();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtrain"));
    command.current_dir(&folder).env(SETTINGS, given.join("\n")).args(verb.split(' ')).arg("run.toml");
    for set in set {
        command.args(["--set", set]);
    }
    let output = command.output()?;
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Ok((output.status.code(), text.concat(), folder.path().join("out").exists()))
}

/// A GPU, a recipe that it lacks, and the end of the refusal.
const LACKING: [(&str, &str, &str); 3] = [
    (
        "arch=sm_80",
        "fp8-current",
        "needs compute capability 8.9 or newer, and Emulated GPU sm_80 has 8.0; choose one that it supports: fp32, bf16",
    ),
    (
        "arch=sm_80",
        "fp8-block",
        "needs compute capability 9.0 or newer, and Emulated GPU sm_80 has 8.0; choose one that it supports: fp32, bf16",
    ),
    (
        "arch=sm_89",
        "fp8-block",
        "needs compute capability 9.0 or newer, and Emulated GPU sm_89 has 8.9; choose one that it supports: fp32, bf16, \
         fp8-current, fp8-delayed",
    ),
];

fn train_refuses_a_recipe_that_the_gpu_lacks() -> Result<(), Failed> {
    for (gpu, recipe, end) in LACKING {
        let (code, text, has_begun) = xtrain("train", gpu, &[&format!("precision.recipe={recipe}")])?;
        assert_eq!((code, has_begun), (Some(2), false), "{text}");
        let refusal = format!("[precision] recipe = {recipe:?} {end}");
        assert!(text.contains(&refusal), "{refusal}\n{text}");
    }
    Ok(())
}

fn plan_reports_a_recipe_that_the_gpu_lacks() -> Result<(), Failed> {
    for (gpu, recipe, end) in LACKING {
        let (code, text, _) = xtrain("plan", gpu, &[&format!("precision.recipe={recipe}")])?;
        assert_eq!(code, Some(0), "{text}");
        let row = format!("{:<28}no: [precision] recipe = {recipe:?} {end}\n", "runs");
        assert!(text.contains(&row), "{row}\n{text}");
    }
    let (_, text, _) = xtrain("plan", "arch=sm_80", &["precision.recipe=bf16"])?;
    assert!(!text.lines().any(|line| line.starts_with("runs ")), "{text}");
    Ok(())
}

fn train_refuses_a_gpu_with_too_little_memory() -> Result<(), Failed> {
    let set = ["model.dim=1024", "model.layers=4", "precision.recipe=bf16"];
    let (code, text, has_begun) = xtrain("train", "arch=sm_80 memory=512", &set)?;
    assert_eq!((code, has_begun), (Some(2), false), "{text}");
    let refusal = text.lines().find(|line| line.contains("the run needs ")).ok_or_else(|| text.clone())?;
    let room = " GiB of memory, but Emulated GPU sm_80 has 0.50 GiB available; nothing fits: ";
    assert!(refusal.contains(room) && refusal.contains("choose a smaller model"), "{refusal}");
    Ok(())
}

fn one_of_several_ranks_runs_on_one_gpu() -> Result<(), Failed> {
    let verb = "bench step --rank-of 2 --warmup 0 --repeats 1 --steps 1 --json";
    let set = ["parallel.shard=weights", "precision.recipe=bf16", "data.seq_len=16", "train.batch_size=2"];
    let (code, text, _) = xtrain(verb, "", &set)?;
    let line = text.lines().find(|line| line.starts_with('{')).ok_or_else(|| text.clone())?;
    let speed: serde_json::Value = serde_json::from_str(line)?;
    assert_eq!((code, &speed["rank"]["plan_bytes"]), (Some(0), &speed["planned_bytes"]), "{text}");
    assert!(speed["rank"]["plan_sent_bytes"].as_u64() > Some(0), "{text}");
    Ok(())
}

/// The run of two GPUs: a step of four micro-batches, the second of which runs as graphs.
const OF_TWO: [&str; 4] =
    ["model.dim=128", "train.batch_size=8", "train.micro_batch_size=2", "train.attention_deterministic=true"];

/// A folder with a run file and its text.
fn place() -> Result<tempfile::TempDir, Failed> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("run.toml"), RUN)?;
    std::fs::write(folder.path().join("text.txt"), "a text of some words\n".repeat(1000))?;
    Ok(folder)
}

/// The exit code and the output of a run in `folder` on two GPUs.
fn on_two(folder: &Path, option: &str, set: &[&str], gpu: &str) -> Result<(Option<i32>, String), Failed> {
    let settings = std::env::var(SETTINGS)?;
    let given: Vec<&str> = settings.lines().chain(["devices=2"]).chain(gpu.split(' ')).collect();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtrain"));
    command.current_dir(folder).env(SETTINGS, given.join("\n"));
    command.args(["train", "run.toml", "--gpus", "2", option]);
    for set in OF_TWO.iter().chain(set) {
        command.args(["--set", set]);
    }
    let output = command.output()?;
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Ok((output.status.code(), text.concat()))
}

/// The output of a run on two GPUs, which is traced, and its losses and gradient norms by step.
fn train_on_two(set: &[&str], gpu: &str) -> Result<(Option<i32>, String, Vec<String>), Failed> {
    let folder = place()?;
    let (code, text) = on_two(folder.path(), "--profile", set, gpu)?;
    let out = folder.path().join("out");
    assert!(code != Some(0) || out.join("trace.json").exists(), "{text}");
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let mut steps = Vec::new();
    for line in metrics.lines() {
        let line: serde_json::Value = serde_json::from_str(line)?;
        if let (Some(loss), Some(norm)) = (line.get("loss"), line.get("grad_norm")) {
            steps.push(format!("loss {loss}, norm {norm}"));
        }
    }
    Ok((code, text, steps))
}

/// A mode of sharding and an order of sums, by the seed.
fn drawn_mode() -> [String; 2] {
    let seed: usize = std::env::var("XTRAIN_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let shard = ["none", "optimizer", "gradients", "weights"][seed % 4];
    // The sum of two is the same in any order.
    let reduce = ["same-world", "any-world", "fast"][seed / 4 % 3];
    println!("shard {shard}, reduce {reduce}");
    [format!("parallel.shard={shard}"), format!("parallel.reduce={reduce}")]
}

fn two_gpus_train_the_same_on_each_path() -> Result<(), Failed> {
    let [shard, reduce] = drawn_mode();
    let run =
        |transport: &str| train_on_two(&[&shard, &reduce, &format!("parallel.transport={transport}")], "");
    let (code, text, by_host) = run("host")?;
    assert_eq!((code, by_host.len()), (Some(0), 2), "{text}");
    // Copies add nothing.
    let transports = if reduce.ends_with("fast") { &["nccl"][..] } else { &["copy", "nccl"] };
    for transport in transports {
        let (code, text, steps) = run(transport)?;
        assert_eq!((code, &steps), (Some(0), &by_host), "{transport}: {text}");
    }
    Ok(())
}

/// Only rank 0 generates the sample, and the copies of masters for it are gathered from all ranks.
fn a_run_that_lacks_only_its_sample_resumes() -> Result<(), Failed> {
    let folder = place()?;
    let set = ["parallel.shard=optimizer", "eval.prompts=[\"a text\"]", "eval.max_tokens=4", "eval.every=0"];
    let (code, text) = on_two(folder.path(), "--quiet", &set, "")?;
    assert_eq!(code, Some(0), "{text}");
    for file in ["sample.txt", ".finished"] {
        std::fs::remove_file(folder.path().join("out").join(file))?;
    }
    let (code, text) = on_two(folder.path(), "--resume", &set, "")?;
    assert!(code == Some(0) && folder.path().join("out/sample.txt").exists(), "{text}");
    Ok(())
}

/// A rank that exchanges or leaves out a collective ends the run on all ranks, and the difference is named.
fn ranks_that_disagree_on_a_collective_are_named() -> Result<(), Failed> {
    let [shard, reduce] = drawn_mode();
    for fault in ["swap=1:3", "omit=collective:2"] {
        let set = [&*shard, &*reduce, "parallel.timeout=20s", "parallel.transport=nccl"];
        let (code, text, _) = train_on_two(&set, fault)?;
        assert_eq!(code, Some(1), "{fault}: {text}");
        assert!(text.contains("the ranks disagree on group "), "{fault}: {text}");
    }
    Ok(())
}

fn gpus_without_nvlink_are_named() -> Result<(), Failed> {
    let (code, text, _) = train_on_two(&["parallel.transport=copy"], "nvlink=0")?;
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("[parallel] transport = \"copy\": rank 0 (") && text.contains("no NVLink"),
        "{text}"
    );
    Ok(())
}

fn an_old_nccl_is_named_and_not_used() -> Result<(), Failed> {
    let old = "libnccl.so.2 is NCCL 2.26.5; xtrain needs 2.27.0 or newer: `pip install nvidia-nccl-cu13`";
    let (code, text, steps) = train_on_two(&["train.steps=1"], "nccl=22605 nvlink=0")?;
    assert_eq!((code, steps.len()), (Some(0), 1), "{text}");
    let warned = "collectives between GPUs pass through host memory, which is slow: rank 0 (";
    assert!(text.contains(warned) && text.contains(old), "{text}");
    let (code, text, _) = train_on_two(&["parallel.transport=nccl"], "nccl=22605")?;
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("[parallel] transport = \"nccl\": rank 0 (") && text.contains(old), "{text}");
    Ok(())
}

fn main() {
    let is_emulated = std::env::var_os(SETTINGS).is_some();
    let tests: [(&str, fn() -> Result<(), Failed>); 9] = [
        ("train_refuses_a_recipe_that_the_gpu_lacks", train_refuses_a_recipe_that_the_gpu_lacks),
        ("plan_reports_a_recipe_that_the_gpu_lacks", plan_reports_a_recipe_that_the_gpu_lacks),
        ("train_refuses_a_gpu_with_too_little_memory", train_refuses_a_gpu_with_too_little_memory),
        ("two_gpus_train_the_same_on_each_path", two_gpus_train_the_same_on_each_path),
        ("a_run_that_lacks_only_its_sample_resumes", a_run_that_lacks_only_its_sample_resumes),
        ("gpus_without_nvlink_are_named", gpus_without_nvlink_are_named),
        ("ranks_that_disagree_on_a_collective_are_named", ranks_that_disagree_on_a_collective_are_named),
        ("an_old_nccl_is_named_and_not_used", an_old_nccl_is_named_and_not_used),
        ("one_of_several_ranks_runs_on_one_gpu", one_of_several_ranks_runs_on_one_gpu),
    ];
    let tests = tests.map(|(name, test)| Trial::test(name, test).with_ignored_flag(!is_emulated));
    libtest_mimic::run(&Arguments::from_args(), tests.into()).exit()
}
