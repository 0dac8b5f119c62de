//! The lanes of a measured step: draws one of a profile of several GPUs (`xtrain train --profile`), that of
//! median length. Of all steps whose ops are timed, prints the mean time of each kind of op, and for
//! collectives how much of it is exposed: no kernel of the compute lane runs meanwhile.
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
    let mut steps: Vec<(&Event<'_>, Vec<&Event<'_>>)> = runs
        .map(|step| (step, ops_of(step).collect()))
        .filter(|(_, ops): &(_, Vec<_>)| !ops.is_empty())
        .collect();
    steps.sort_by(|(a, _), (b, _)| (a.end - a.begin).total_cmp(&(b.end - b.begin)));
    let (step, ops) = steps.get(steps.len() / 2).ok_or("no step of the trace has timed ops")?;
    print(&steps);
    let bars = bars(step, ops);
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
fn bars(step: &Event<'_>, ops: &[&Event<'_>]) -> Vec<Bar> {
    let seconds = |time: f64| 1e-6 * (time - step.begin);
    let mut ops = ops.to_vec();
    ops.sort_by(|a, b| a.begin.total_cmp(&b.begin));
    let waits = |begin: f64, end: f64| Bar {
        kind: Work::Exposed,
        group: None,
        begin: seconds(begin),
        end: seconds(end),
    };
    let (mut bars, mut free) = (Vec::new(), step.begin);
    let end = ops.iter().map(|op| op.end).fold(step.begin, f64::max);
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
                bars.push(waits(free, op.begin));
            }
            free = free.max(op.end);
        }
        bars.push(Bar { kind, group: None, begin: seconds(op.begin), end: seconds(op.end) });
    }
    // Collectives after the last kernel.
    if end > free {
        bars.push(waits(free, end));
    }
    bars
}

/// Prints means over steps by kind of op.
fn print(steps: &[(&Event<'_>, Vec<&Event<'_>>)]) {
    let mut rows: BTreeMap<(bool, &str), (usize, f64, f64)> = BTreeMap::new();
    let mut all = 0.0;
    for (step, ops) in steps {
        all += step.end - step.begin;
        let bars = bars(step, ops);
        for op in ops {
            let exposed = if op.is_communication { exposed(step, op, &bars) } else { 0.0 };
            let kind = op.name.split(' ').next().unwrap_or(op.name);
            let row = rows.entry((op.is_communication, kind)).or_default();
            *row = (row.0 + 1, row.1 + op.end - op.begin, row.2 + exposed);
        }
    }
    let count = steps.len();
    let ms = |time: f64| 1e-3 * time / count as f64;
    println!("{count} steps of {:.1} ms, ops timed", ms(all));
    for ((is_communication, kind), (times, time, exposed)) in rows {
        print!("{kind:<26} {:>3} times {:>8.2} ms", times / count, ms(time));
        if is_communication {
            print!(", {:.2} ms exposed, {:.0}% hidden", ms(exposed), 100.0 * (1.0 - exposed / time));
        }
        println!();
    }
}

/// The part of a collective, in microseconds, in which the kernels of its step wait.
fn exposed(step: &Event<'_>, op: &Event<'_>, bars: &[Bar]) -> f64 {
    let (begin, end) = (1e-6 * (op.begin - step.begin), 1e-6 * (op.end - step.begin));
    let waits = bars.iter().filter(|bar| bar.kind == Work::Exposed);
    1e6 * waits.map(|bar| (bar.end.min(end) - bar.begin.max(begin)).max(0.0)).sum::<f64>()
}
