//! Estimates of the time of a step against the measured steps of `benches/results`, and the settings that
//! are chosen by them against all that there are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use xtrain_config::Config;
use xtrain_planner::choose;
use xtrain_planner::estimate::{Device, Timeline, step_seconds};
use xtrain_planner::fit::Fit;
use xtrain_planner::planned::Planned;
use xtrain_program::Recompute;
use xtrain_rank::Rank;
use xtrain_step::engine::{Room, Target};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_train::spec::{plan_for, plan_on};

/// An estimate may be off by this share of the measured time.
const BAR: f64 = 0.15;

/// [`BAR`] for a step on several GPUs.
const BAR_OF_SEVERAL: f64 = 0.07;

/// Measured times that differ by less are in no order: two runs of one command do.
const NOISE: f64 = 0.02;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn h200() -> Device {
    Device::model("h200").expect("it is in the table")
}

fn planned(config: &str, sets: &[String]) -> Planned {
    let parsed = Config::load(&repository().join(config), sets).expect("a run file");
    plan_on(&parsed, Target::Cuda).expect("a plan")
}

/// A measured step: its device, its configuration, its settings, and seconds.
struct Measured {
    device: Device,
    /// The file of the result, and the commit: such steps were measured one after the other.
    call: (PathBuf, String),
    config: String,
    sets: Vec<String>,
    seconds: f64,
}

/// A row of `benches/results` that has a speed of a device in the table.
struct Row {
    path: PathBuf,
    device: Device,
    json: serde_json::Value,
    words: Vec<String>,
    tokens_per_second: f64,
}

impl Row {
    /// The values of `--set`.
    fn sets(&self) -> Vec<String> {
        self.words.windows(2).filter(|pair| pair[0] == "--set").map(|pair| pair[1].clone()).collect()
    }

    /// The number after an option.
    fn number(&self, option: &str) -> usize {
        let pair = self.words.windows(2).find(|pair| pair[0] == option).expect("an option");
        pair[1].parse().expect("a number")
    }
}

/// The rows with the speed of a command that begins so.
fn rows(command: &str) -> Vec<Row> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(repository().join("benches/results")).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        for line in std::fs::read_to_string(&path).expect("a file").lines() {
            let json: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
            let device = match json["card"].as_str() {
                Some("NVIDIA H200") => h200(),
                Some("NVIDIA H100 80GB HBM3") => Device::model("h100").expect("it is in the table"),
                _ => continue,
            };
            let text = json["command"].as_str().unwrap_or_default();
            if text.starts_with(command) && json["metric"] == "tok/s" {
                let words = text.split_whitespace().map(str::to_owned).collect();
                let tokens_per_second = json["value"].as_f64().expect("a number");
                all.push(Row { path: path.clone(), device, words, tokens_per_second, json });
            }
        }
    }
    all
}

/// The steps on one device, but for those with a fixed routing of tokens to experts, which no run has.
fn measured() -> Vec<Measured> {
    let is_fixed = |row: &Row| row.words.iter().any(|word| word == "--routing");
    let rows = rows("xtrain bench step ").into_iter().filter(|row| !is_fixed(row));
    let measured = rows.map(|row| {
        let (config, sets) = (row.words[3].clone(), row.sets());
        let tokens = planned(&config, &sets).resolved.config.step_tokens();
        let call = (row.path, row.json["commit"].as_str().unwrap_or_default().to_owned());
        Measured { device: row.device, call, config, sets, seconds: tokens as f64 / row.tokens_per_second }
    });
    measured.collect()
}

fn seconds(planned: &Planned, device: &Device) -> f64 {
    let program = programs::training(&planned.spec).expect("a program");
    let micro_steps = planned.resolved.config.train.batch_size / planned.spec.batch.sequences;
    step_seconds(&program, &device.rates, micro_steps)
}

#[test]
fn every_measured_step_is_estimated_within_the_bar() {
    let rows = measured();
    assert!(rows.len() > 70, "only {} rows", rows.len());
    for config in ["t10", "t12", "llama1b", "llama8b_l8", "qwen2.5_1.5b"] {
        assert!(rows.iter().any(|row| row.config.ends_with(&format!("/{config}.toml"))), "{config}");
    }
    let mut wrong = Vec::new();
    for Measured { device, config, sets, seconds: measured, .. } in &rows {
        let share = seconds(&planned(config, sets), device) / measured;
        println!("{share:.3} of {:.2} ms: {} {config} {}", 1e3 * measured, device.name, sets.join(" "));
        if (share - 1.0).abs() > BAR {
            wrong.push(format!("{share:.3}: {config} {}", sets.join(" ")));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

/// By copies between GPUs or, where `parallel.transport` is set, through NCCL.
#[test]
fn steps_on_several_gpus_are_estimated_within_the_bar() {
    let rows = rows("benches/weak_scaling.py ");
    assert!(rows.len() >= 8, "only {} rows", rows.len());
    for row in rows {
        let (gpus, batch) = (row.number("--gpus"), row.number("--batch"));
        let sets = [row.sets(), vec![format!("train.batch_size={}", gpus * batch)]].concat();
        let parsed = Config::load(&repository().join(&row.words[1]), &sets).expect("a run file");
        let planned = plan_for(&parsed, Target::Cuda, Rank::first_of(gpus)).expect("a plan");
        let program = programs::training(&planned.spec).expect("a program");
        let network = row.device.network.of_run(&planned.resolved.config.parallel);
        let estimate = Timeline::new(&program, &Device { network, ..row.device.clone() }, 1).seconds();
        let ratio = estimate * row.tokens_per_second / planned.resolved.config.step_tokens() as f64;
        let (ms, command) = (1e3 * estimate / ratio, row.words[1..].join(" "));
        println!("{ratio:.3} of {ms:.1} ms: {}, {command}", row.device.name);
        assert!((ratio - 1.0).abs() < BAR_OF_SEVERAL, "{ratio:.3}: {}, {command}", row.device.name);
    }
}

/// Of steps that were measured together and differ in one of the settings that are chosen.
#[test]
fn estimates_are_in_the_order_of_the_measured_settings() {
    let chosen = ["train.recompute", "train.loss_chunk", "train.micro_batch_size"];
    let mut groups: BTreeMap<_, Vec<(f64, f64)>> = BTreeMap::new();
    for Measured { device, call, config, sets, seconds: measured } in measured() {
        let is_chosen = |set: &&String| chosen.iter().any(|key| set.starts_with(key));
        let mut others: Vec<String> = sets.iter().filter(|set| !is_chosen(set)).cloned().collect();
        others.sort();
        let estimate = seconds(&planned(&config, &sets), &device);
        groups.entry((call, config, others)).or_default().push((measured, estimate));
    }
    let mut pairs = 0;
    for (group, steps) in groups {
        for (n, one) in steps.iter().enumerate() {
            for other in &steps[..n] {
                if (one.0 / other.0).ln().abs() < NOISE {
                    continue;
                }
                pairs += 1;
                assert_eq!(one.0 < other.0, one.1 < other.1, "{group:?}: {one:?} and {other:?}");
            }
        }
    }
    assert!(pairs > 20, "only {pairs} pairs");
}

/// A model of which activations and logits take much, and whose GEMMs are large.
const RUN: &str = "[model]\ndim = 1024\nlayers = 6\nheads = 16\nffn_dim = 4096\nvocab_size = 64000\n\
                   [data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 2048\n[train]\nsteps = 1\nbatch_size = 16\n";

/// Experts in its blocks but the first.
const MIXTURE: [&str; 5] = [
    "model.family=qwen3_moe",
    "model.layers=4",
    "experts.count=8",
    "experts.ffn_dim=1024",
    "experts.dense_blocks=[0]",
];

/// Bytes and seconds of a step.
fn step(spec: &TrainingSpec, batch_size: usize, device: &Device) -> (u64, f64) {
    let fit = Fit::new(spec, device.target, device.threads, batch_size, Room::new(u64::MAX)).expect("a plan");
    let program = programs::training(spec).expect("a program");
    (fit.needed_bytes, step_seconds(&program, &device.choice_rates, batch_size / spec.batch.sequences))
}

/// Bytes and seconds of all settings, with the chunk of each.
fn all_steps(spec: &TrainingSpec, batch_size: usize, device: &Device) -> Vec<(u64, f64, usize)> {
    let mut all = Vec::new();
    for chunk in (8..=16).map(|n| 1 << n) {
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            let layers = spec.model.layers.len();
            for blocks in if recompute == Recompute::None { 0..=0 } else { 1..=layers } {
                let mut spec = spec.clone();
                spec.recompute = recompute;
                spec.recompute_blocks = Some(blocks);
                spec.loss.chunk_tokens = chunk;
                let (bytes, seconds) = step(&spec, batch_size, device);
                all.push((bytes, seconds, chunk));
            }
        }
    }
    all
}

#[test]
fn the_chosen_settings_are_within_a_percent_of_the_best_that_fit() {
    for (recipe, more) in [("bf16", &[][..]), ("fp8-block", &[]), ("bf16", &MIXTURE)] {
        let recipe = format!("precision.recipe={recipe}");
        let sets: Vec<&str> =
            [&recipe, "precision.skip_slower=[]"].into_iter().chain(more.iter().copied()).collect();
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &sets).expect("a run file");
        let open = || plan_on(&parsed, Target::Cuda).expect("a plan");
        let all = all_steps(&open().spec, 16, &h200());
        let (least, most) =
            (all.iter().map(|of| of.0).min().unwrap(), all.iter().map(|of| of.0).max().unwrap());
        for n in 0..=12 {
            let room = least + (most - least) * n / 12;
            let device = h200().with_memory(room);
            let (chosen, choice) = choose::decide(open(), &device).expect("a choice");
            let choice = choice.expect("a choice");
            let (bytes, seconds) = step(&chosen.spec, 16, &device);
            assert!(choice.fits && bytes <= room, "{bytes} in {room}: {choice}");
            assert_eq!((choice.chosen.bytes, choice.chosen.seconds), (bytes, seconds));
            let fits = || all.iter().filter(|of| of.0 <= room);
            let best = fits().map(|of| of.1).fold(f64::INFINITY, f64::min);
            assert!(seconds <= best * 1.01, "{seconds} and {best} in {room}: {choice}");
            // The usual chunk is left where it must be, or for a gain.
            let usual = fits().filter(|of| of.2 == 4096).map(|of| of.1).fold(f64::INFINITY, f64::min);
            if chosen.spec.loss.chunk_tokens != 4096 {
                assert!(seconds < usual * 0.99, "{seconds} and {usual} in {room}: {choice}");
            }
        }
        let (_, choice) = choose::decide(open(), &h200().with_memory(least - 1)).expect("a choice");
        assert!(!choice.expect("a choice").fits);
    }
}

#[test]
fn what_is_given_is_kept_and_what_is_asked_for_is_chosen() {
    let chosen = |sets: &[&str], room: u64| {
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), sets).expect("a run file");
        let planned = plan_on(&parsed, Target::Cuda).expect("a plan");
        let (planned, choice) = choose::decide(planned, &h200().with_memory(room)).expect("a choice");
        (planned, choice)
    };
    let all = ["train.recompute=none", "train.loss_chunk=4096"];
    let (given, choice) = chosen(&all, 1 << 30);
    assert!(choice.is_none() && given.chosen.is_empty());
    let (needed, _) = step(&given.spec, 16, &h200());
    // Only the number of blocks is open.
    let sets = ["train.recompute=norms", "train.recompute_blocks=auto", "train.loss_chunk=2048"];
    let (some, _) = chosen(&sets, needed - (needed >> 5));
    assert_eq!((some.spec.recompute, some.spec.loss.chunk_tokens), (Recompute::Norms, 2048));
    assert!(some.spec.recompute_blocks.is_some_and(|blocks| (1..6).contains(&blocks)), "{:?}", some.spec);
    let keys: Vec<&str> = some.chosen.iter().map(|chosen| chosen.key).collect();
    assert_eq!(keys, ["train.recompute_blocks"]);
    // The micro-batch stays whole unless it is asked for.
    let some_room = 5 << 30;
    assert!(needed > some_room);
    let (_, choice) = chosen(&["train.loss_chunk=4096"], some_room);
    let whole = choice.expect("a choice").chosen;
    assert_eq!(whole.settings.micro_batch_size, 16);
    let (smaller, choice) = chosen(&["train.micro_batch_size=auto"], some_room);
    let choice = choice.expect("a choice");
    assert!(choice.fits && choice.chosen.settings.micro_batch_size < 16, "{choice}");
    assert_eq!(smaller.spec.batch.sequences, choice.chosen.settings.micro_batch_size);
    // What was chosen is read back as it was.
    let text = smaller.resolved.config.to_toml();
    let again = Config::parse::<&str>(Path::new("config.toml"), text.as_bytes(), &[]).expect("a run file");
    assert!(!choose::is_undecided(&again.config));
    assert_eq!(plan_on(&again, Target::Cuda).expect("a plan").spec, smaller.spec);
}

#[test]
fn on_a_cpu_everything_is_saved_unless_memory_is_short() {
    let parsed = Config::parse::<&str>(Path::new("run.toml"), RUN.as_bytes(), &[]).expect("a run file");
    let open = || plan_on(&parsed, Target::Cpu).expect("a plan");
    let device = Device { target: Target::Cpu, ..h200() };
    let (planned, choice) = choose::decide(open(), &device).expect("a choice");
    let choice = choice.expect("a choice");
    assert_eq!((planned.spec.recompute, planned.spec.loss.chunk_tokens), (Recompute::None, 4096));
    assert!(choice.is_usual(), "{choice}");
    let (planned, choice) =
        choose::decide(open(), &device.with_memory(choice.chosen.bytes - 1)).expect("a choice");
    assert_ne!(planned.spec.recompute, Recompute::None);
    assert!(!choice.expect("a choice").is_usual());
}

#[test]
fn devices_are_found_by_parts_of_their_names() {
    let name =
        |asked: &str| Device::model(asked).map(|device| device.name).map_err(|error| error.to_string());
    for (asked, found) in [
        ("h200", "NVIDIA H200"),
        ("NVIDIA H100", "NVIDIA H100"),
        ("4090", "NVIDIA RTX 4090"),
        ("rtx-5090", "NVIDIA RTX 5090"),
        ("a100", "NVIDIA A100"),
    ] {
        assert_eq!(name(asked), Ok(found.to_owned()));
    }
    let error = name("h900").expect_err("there is none");
    assert!(error.contains("known GPUs are H200, H100, A100, L40S, RTX 4090, RTX 5090"), "{error}");
}
