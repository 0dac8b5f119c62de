//! `train --profile`: the trace, and that it changes nothing else. On a GPU if XTRAIN_TEST_DEVICE is `cuda`.

use crate::fragments::assert_says;
use crate::place::{Place, device};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A complete event: its name, its times in nanoseconds, and its arguments.
#[derive(Debug)]
struct Slice {
    name: String,
    begin: i64,
    end: i64,
    args: Value,
}

/// A trace: what the host did, what the device ran, and what it says of itself.
struct Traced {
    host: Vec<Slice>,
    device: Vec<Slice>,
    about: Value,
}

fn read(place: &Place, run: &str) -> Traced {
    let trace: Value = serde_json::from_slice(&place.read(&format!("{run}/trace.json"))).expect("JSON");
    let nanoseconds = |value: &Value| (value.as_f64().expect("a number") * 1e3).round() as i64;
    let mut names = BTreeMap::new();
    let mut tracks: BTreeMap<String, Vec<Slice>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events") {
        let text = |key: &str| event[key].as_str().expect("a text").to_owned();
        let pid = event["pid"].as_u64().expect("a process");
        assert!(event["tid"].is_u64(), "{event}");
        match (event["ph"].as_str(), event["name"].as_str()) {
            (Some("M"), Some("process_name")) => {
                names.insert(pid, event["args"]["name"].as_str().expect("a name").to_owned());
            }
            (Some("M"), _) => {}
            (Some("X"), _) => {
                let begin = nanoseconds(&event["ts"]);
                let end = begin + nanoseconds(&event["dur"]);
                let slice = Slice { name: text("name"), begin, end, args: event["args"].clone() };
                tracks.entry(names[&pid].clone()).or_default().push(slice);
            }
            _ => panic!("an event of another kind: {event}"),
        }
    }
    let host = tracks.remove("host").expect("the host's track");
    let (name, device) = tracks.pop_first().expect("the device's track");
    let about = trace["otherData"].clone();
    assert!(tracks.is_empty() && about["device"] == name.as_str(), "{name}, {about}");
    Traced { host, device, about }
}

/// Settings that make a run the same to the bit on every device, and its bytes known.
fn deterministic(more: &str) -> String {
    let device = device();
    format!(
        "{more} --set train.device={device} --set precision.recipe=fp32 --set train.attention_deterministic=true"
    )
}

/// Of any two slices of a track one holds the other, or ends before it begins. A slice stands before those in
/// it.
fn nest(track: &[Slice]) {
    let mut open: Vec<&Slice> = Vec::new();
    let mut last = 0;
    for slice in track {
        assert!(slice.begin >= last && slice.end >= slice.begin, "{slice:?} begins before {last}");
        last = slice.begin;
        while open.last().is_some_and(|outer| outer.end <= slice.begin) {
            open.pop();
        }
        if let Some(outer) = open.last() {
            assert!(slice.end <= outer.end, "{slice:?} does not end in {outer:?}");
        }
        open.push(slice);
    }
}

fn names(track: &[Slice]) -> BTreeSet<&str> {
    track.iter().map(|slice| slice.name.as_str()).collect()
}

/// Loss and gradient norm of every step, as they stand in metrics.jsonl.
fn numbers(place: &Place, run: &str) -> Vec<(Value, Value, Value)> {
    let steps = place.metrics(run).into_iter().filter(|line| !line["grad_norm"].is_null());
    steps.map(|line| (line["step"].clone(), line["loss"].clone(), line["grad_norm"].clone())).collect()
}

#[test]
fn a_trace_names_what_ran_with_its_bytes_and_events_nest() {
    let place = Place::new();
    place.train("plain", &deterministic("--set train.steps=12"));
    let ran = place.train("out", &deterministic("--set train.steps=12 --profile"));
    assert_says("train, traced steps", &ran.stderr);
    let Traced { host, device, about } = read(&place, "out");
    assert_eq!(about["steps as they run"], "4 to 9");
    assert_eq!(about["steps op by op"], "10 to 12");
    let idle = about["idle share between steps as they run"].as_f64().expect("a share");
    assert!((0.0..1.0).contains(&idle), "{idle}");
    nest(&device);
    nest(&host);
    let wanted =
        ["collect", "evaluation", "fetch", "launch", "metrics", "micro-step", "prepare", "save", "step"];
    for name in wanted.into_iter().chain(["write inputs"]) {
        assert!(names(&host).contains(name), "the host's track lacks {name}: {:?}", names(&host));
    }
    let steps: Vec<(u64, &str)> = (device.iter())
        .filter(|slice| slice.name == "step")
        .map(|s| (s.args["step"].as_u64().expect("a number"), s.args["timed"].as_str().expect("a text")))
        .collect();
    let (as_it_runs, by_op) = ("as it runs", "op by op");
    assert_eq!(steps, [4, 5, 6, 7, 8, 9, 10, 11, 12].map(|n| (n, if n < 10 { as_it_runs } else { by_op })));

    // A linear layer of the second block: 64 tokens, from 16 to 16 + 2 * 8 columns.
    let ops: Vec<&Slice> = device.iter().filter(|slice| slice.args["op"].is_string()).collect();
    let of = |name: &str, role: &str, block: u64| -> Vec<&&Slice> {
        let is = |s: &&&Slice| s.name == name && s.args["role"] == role && s.args["block"] == block;
        ops.iter().filter(is).collect()
    };
    let qkv = of("linear attn.qkv_proj", "fprop", 1);
    assert_eq!(qkv.len(), 3, "one in each step that is timed op by op: {:?}", names(&device));
    assert_eq!(qkv[0].args["bytes"], 4 * (64 * 16 + 32 * 16 + 64 * 32));
    assert_eq!(qkv[0].args["FLOPs"], 2.0 * 64.0 * 16.0 * 32.0);
    assert_eq!(of("linear_wgrad attn.qkv_proj", "wgrad", 0).len(), 3);
    let adamw: Vec<_> = ops.iter().filter(|op| op.args["op"] == "adamw").collect();
    assert_eq!(adamw.len(), 3);
    assert!(
        adamw[0].args["block"].is_null() && adamw[0].args["GB/s"].as_f64().is_some_and(|rate| rate > 0.0)
    );
    let within = |op: &Slice| {
        let holds = |s: &Slice| s.name == "step" && s.begin <= op.begin && op.end <= s.end;
        device.iter().any(|s| holds(s) && s.args["timed"] == by_op)
    };
    assert!(ops.iter().all(|op| within(op)), "ops of steps that are timed as a whole");

    assert_eq!(numbers(&place, "out"), numbers(&place, "plain"));
    let shards = place.names("out/checkpoints/step-12").into_iter().filter(|n| n.ends_with(".safetensors"));
    let files: Vec<String> = shards.map(|name| format!("checkpoints/step-12/{name}")).collect();
    assert!(!files.is_empty());
    for file in files.iter().map(String::as_str).chain(["hf/model.safetensors"]) {
        assert!(place.read(&format!("out/{file}")) == place.read(&format!("plain/{file}")), "{file}");
    }
    assert!(!place.exists("plain/trace.json"));
}

#[test]
fn the_traced_steps_are_those_that_were_asked_for_and_micro_steps_are_told_apart() {
    let place = Place::new();
    let more =
        "--set train.steps=12 --set train.micro_batch_size=2 --profile --profile-from 10 --profile-steps 1";
    place.train("out", &deterministic(more));
    let Traced { host, device, about } = read(&place, "out");
    assert_eq!(about["steps as they run"], "10 to 11");
    assert_eq!(about["steps op by op"], "12 to 12");
    let parts: Vec<(&str, u64)> = (device.iter())
        .filter_map(|slice| Some((slice.name.as_str(), slice.args["step"].as_u64()?)))
        .collect();
    let step = |n| [("micro-step", n), ("micro-step", n), ("update", n)];
    assert_eq!(parts, [step(10), step(11), step(12)].concat());
    nest(&device);
    assert!(names(&host).contains("update"));
    // Past the end, the last steps are traced, and that is said.
    let late = "--set train.steps=12 --profile --profile-from 50 --profile-steps 1";
    let said = place.train("late", &deterministic(late)).stderr;
    assert_says("train, a trace past the end", said);
    assert_eq!(read(&place, "late").about["steps op by op"], "12 to 12");
    // A resumed run traces its own steps, in place of those before.
    place.run(&deterministic("train run.toml --out out --resume --profile --set train.steps=14")).succeeds();
    assert_eq!(read(&place, "out").about["steps op by op"], "13 to 14");
}

#[test]
fn options_of_a_trace_without_one_are_refused() {
    let place = Place::new();
    for option in ["--profile-steps 2", "--profile-from 5", "--profile --profile-steps 0"] {
        let ran = place.run(&format!("train run.toml --out out {option}"));
        assert_eq!(ran.code(), Some(2), "{option}: {}", ran.stderr);
        assert!(ran.stderr.contains("--profile") && !place.exists("out"), "{option}: {}", ran.stderr);
    }
}
