//! The part of Chrome's Trace Event Format that is needed here; ui.perfetto.dev opens it too.
//!
//! One JSON object with `traceEvents`: complete events (`"ph": "X"`, a beginning and a duration in
//! microseconds) on tracks, and metadata events (`"M"`) that name these. A process groups tracks, each of
//! which is one of its threads. The events of a track nest: of two, one contains the other or ends before it
//! begins.

use serde_json::{Value, json};
use std::time::Duration;

/// A track: its process and thread, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Track {
    /// Number of the process.
    pub process: u32,
    /// Number of the thread in it.
    pub thread: u32,
}

/// A trace under construction.
pub struct Trace {
    about: Value,
    events: Vec<Value>,
}

impl Trace {
    /// An empty trace; `about` describes it.
    pub fn new(about: Value) -> Self {
        Trace { about, events: Vec::new() }
    }

    /// Names a track and its process.
    pub fn name(&mut self, track: Track, process: &str, thread: &str) {
        let Track { process: pid, thread: tid } = track;
        for (what, args) in [
            ("process_name", json!({ "name": process })),
            ("process_sort_index", json!({ "sort_index": pid })),
            ("thread_name", json!({ "name": thread })),
        ] {
            self.events.push(json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": args }));
        }
    }

    /// Adds an activity from `begin` to `end`, both relative to the start of the trace.
    pub fn slice(
        &mut self,
        track: Track,
        name: &str,
        category: &str,
        times: (Duration, Duration),
        args: Value,
    ) {
        let (begin, end) = times;
        self.events.push(json!({
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": track.process,
            "tid": track.thread,
            "ts": microseconds(begin),
            "dur": microseconds(end.saturating_sub(begin)),
            "args": args,
        }));
    }

    /// The file, one event per line.
    pub fn into_json(self) -> String {
        let events: Vec<String> = self.events.iter().map(Value::to_string).collect();
        let (about, events) = (self.about, events.join(",\n"));
        format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":[\n{events}\n]}}\n")
    }
}

/// Microseconds, with three decimals.
fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_json_with_named_tracks_and_events_in_microseconds() {
        let mut trace = Trace::new(json!({ "device": "a \"GPU\"" }));
        let track = Track { process: 2, thread: 1 };
        trace.name(track, "a GPU", "ops");
        let times = (Duration::from_nanos(1_234_567), Duration::from_nanos(2_000_000));
        trace.slice(track, "linear", "fprop", times, json!({ "bytes": 12 }));
        let read: Value = serde_json::from_str(&trace.into_json()).expect("JSON");
        assert_eq!(read["otherData"]["device"], "a \"GPU\"");
        assert_eq!(read["traceEvents"][2]["args"]["name"], "ops");
        let event = &read["traceEvents"][3];
        assert_eq!((event["ts"].as_f64(), event["dur"].as_f64()), (Some(1234.567), Some(765.433)));
        assert_eq!(
            (&event["ph"], &event["name"], &event["args"]["bytes"]),
            (&json!("X"), &json!("linear"), &json!(12))
        );
    }
}
