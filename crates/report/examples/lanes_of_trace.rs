//! The lanes of a measured step: draws one of a profile of several GPUs (`xtrain train --profile`), and
//! prints how long each op takes, and how much of the collectives is exposed: no kernel of the compute lane
//! runs meanwhile. Of the steps whose ops are timed, it takes the one of median length.
//!
//! ```sh
//! cargo run -p xtrain-report --example lanes_of_trace -- RUN/trace.json lanes.svg
//! ```

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use xtrain_report::lanes::{Bar, LanePart, Work, lanes, write_lanes};

/// A timed piece of work of a trace, in microseconds.
struct Event<'a> {
    name: &'a str,
    /// The role of an op.
    category: &'a str,
    is_communication: bool,
    begin: f64,
    end: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [trace, picture] = &paths[..] else {
        return Err("name a trace.json and the picture to write".into());
    };
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace)?)?;
    let device = trace["otherData"]["device"].as_str().unwrap_or("a GPU");
    let events: Vec<Event<'_>> =
        trace["traceEvents"].as_array().into_iter().flatten().filter_map(of_gpu).collect();
    let ops_of = |step: &Event<'_>| {
        let (begin, end) = (step.begin, step.end);
        let is_op = |event: &&Event<'_>| !matches!(event.category, "run" | "copy");
        events.iter().filter(is_op).filter(move |event| (begin..end).contains(&event.begin))
    };
    let runs = events.iter().filter(|event| event.category == "run");
    let mut steps: Vec<&Event<'_>> = runs.filter(|step| ops_of(step).next().is_some()).collect();
    steps.sort_by(|a, b| (a.end - a.begin).total_cmp(&(b.end - b.begin)));
    let step = steps.get(steps.len() / 2).ok_or("no step of the trace has timed ops")?;
    let bars = bars(step, ops_of(step));
    print(step, ops_of(step), &bars);
    let seconds = 1e-6 * (step.end - step.begin);
    let part = LanePart { name: "step".to_owned(), seconds, bars };
    write_lanes(Path::new(picture), &lanes(&format!("A step on {device}, measured"), &[part]))?;
    Ok(())
}

/// The work of a GPU that an event tells.
fn of_gpu(event: &Value) -> Option<Event<'_>> {
    let begin = event["ts"].as_f64()?;
    (event["ph"] == "X" && event["pid"] == 2).then_some(Event {
        name: event["name"].as_str()?,
        category: event["cat"].as_str()?,
        is_communication: event["tid"] == 2,
        begin,
        end: begin + event["dur"].as_f64()?,
    })
}

/// Ops as bars, and bars for the time in which the kernels wait.
fn bars<'a>(step: &Event<'_>, ops: impl Iterator<Item = &'a Event<'a>>) -> Vec<Bar> {
    let seconds = |time: f64| 1e-6 * (time - step.begin);
    let mut ops: Vec<&Event<'_>> = ops.collect();
    ops.sort_by(|a, b| a.begin.total_cmp(&b.begin));
    let (mut bars, mut free) = (Vec::new(), step.begin);
    for op in ops {
        let kind = match (op.is_communication, op.category, op.name) {
            (true, _, name) if name.starts_with("all_gather") => Work::Weights,
            (true, ..) => Work::Gradients,
            (false, "fprop", _) => Work::Forward,
            (false, "update", _) => Work::Update,
            // Sums over ranks, too.
            (false, ..) => Work::Backward,
        };
        if !op.is_communication {
            if op.begin > free {
                bars.push(Bar {
                    kind: Work::Exposed,
                    group: None,
                    begin: seconds(free),
                    end: seconds(op.begin),
                });
            }
            free = free.max(op.end);
        }
        bars.push(Bar { kind, group: None, begin: seconds(op.begin), end: seconds(op.end) });
    }
    bars
}

/// Prints the time of kernels and of collectives by op.
fn print<'a>(step: &Event<'_>, ops: impl Iterator<Item = &'a Event<'a>>, bars: &[Bar]) {
    let mut rows: BTreeMap<(bool, &str), (usize, f64, f64)> = BTreeMap::new();
    for op in ops {
        let (begin, end) = (1e-6 * (op.begin - step.begin), 1e-6 * (op.end - step.begin));
        let waits = bars.iter().filter(|bar| bar.kind == Work::Exposed);
        let exposed: f64 = waits.map(|bar| (bar.end.min(end) - bar.begin.max(begin)).max(0.0)).sum();
        let name = op.name.split(' ').next().unwrap_or(op.name);
        let row = rows.entry((op.is_communication, name)).or_default();
        *row = (row.0 + 1, row.1 + end - begin, row.2 + exposed);
    }
    println!("a step of {:.1} ms, ops timed", 1e-3 * (step.end - step.begin));
    for ((is_communication, op), (times, seconds, exposed)) in rows {
        let hidden = match is_communication {
            true => {
                let hidden = 100.0 * (1.0 - exposed / seconds);
                format!(", {:.2} ms exposed, {hidden:.0}% hidden", 1e3 * exposed)
            }
            false => String::new(),
        };
        println!("{op:<26} {times:>3} times {:>8.2} ms{hidden}", 1e3 * seconds);
    }
}
