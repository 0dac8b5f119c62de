//! A trace of some steps of a run, for ui.perfetto.dev and chrome://tracing: host activity, and the work of
//! the processor over time.
//!
//! It holds two kinds of steps, one after the other. Steps of the first kind run as usual, on a GPU as one
//! graph each that is launched while others run: they show whether the device waits for the host. Steps of
//! the second kind are timed op by op, on a GPU by events between the ops, and the host waits for each.
//! Tracing changes no result. All ranks time the same steps, because NCCL needs collectives that are either
//! in a graph on all ranks or on none; rank 0 writes the trace.

use crate::error::RunError;
use crate::folder::RunFolder;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use xtrain_planner::estimate::OpLabel;
use xtrain_program::Lane;
use xtrain_report::chrome::{Trace, Track};
use xtrain_report::metrics::format::percent;
use xtrain_runtime::{Part, ProgramId, Timed, TimedWork, Timing};
use xtrain_step::error::LearnError;
use xtrain_step::learner::Learner;
use xtrain_step::spans;

/// Steps of a run to trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileOptions {
    /// Number of steps that are timed op by op. Steps that run as usual precede them.
    pub steps: u64,
    /// The first traced step, from 1; by default soon after the beginning. If the run does not reach it, or
    /// too few steps follow, a warning says so and the first or last steps are traced.
    pub from: Option<u64>,
}

/// Steps before the traced ones by default: the first runs op by op and the second is recorded.
const WARM_UP: u64 = 3;

/// Steps that are traced as they run usually, if the run has as many: some more than are in flight at once.
const AS_THEY_RUN: u64 = 6;

/// Records the trace of a run.
pub(crate) struct Profiler {
    /// True on the rank that writes the trace.
    writes: bool,
    window: Window,
    timing: Timing,
    begun: Instant,
    /// The last step that began.
    last: u64,
}

/// The traced steps, each given by the number of steps before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    begin: u64,
    /// First step that is timed op by op.
    ops: u64,
    end: u64,
}

impl Window {
    /// The window for `options` in a run of the steps from `first` to `steps`.
    fn new(options: ProfileOptions, first: u64, steps: u64) -> Self {
        let left = steps.saturating_sub(first);
        let by_op = options.steps.min(left);
        let requested = options.from.map_or(WARM_UP, |from| from.saturating_sub(first + 1));
        let before = requested.min(left - by_op);
        let (begin, ops) = (first + before, first + before + AS_THEY_RUN.min(left - by_op - before));
        Window { begin, ops, end: ops + by_op }
    }

    /// A warning if the window does not begin with the requested step.
    fn moved(&self, options: ProfileOptions, first: u64, steps: u64) -> Option<String> {
        let from = options.from.filter(|&from| from != self.begin + 1)?;
        Some(match self.begin == self.end {
            true => format!("--profile-from {from}: no step is left to trace"),
            false => format!(
                "--profile-from {from}: the run makes the steps {} to {steps}; {} to {} are traced",
                first + 1,
                self.begin + 1,
                self.end
            ),
        })
    }

    fn timing(&self, done: u64) -> Timing {
        match done {
            done if done < self.begin || done >= self.end => Timing::Off,
            done if done < self.ops => Timing::Runs,
            _ => Timing::Ops { repeats: 1 },
        }
    }
}

impl Profiler {
    /// A profiler of the steps from `first` to `steps`, on the rank that writes the trace or on another.
    pub(crate) fn new(options: ProfileOptions, first: u64, steps: u64, writes: bool) -> Self {
        let window = Window::new(options, first, steps);
        if let Some(moved) = window.moved(options, first, steps).filter(|_| writes) {
            tracing::warn!("{moved}");
        }
        Profiler { writes, window, timing: Timing::Off, begun: Instant::now(), last: 0 }
    }

    /// True if the profiler changes how the step after `done` others runs.
    pub(crate) fn acts(&self, done: u64) -> bool {
        self.window.timing(done) != self.timing
    }

    /// Called before the step that follows `done` others.
    pub(crate) fn before_step(
        &mut self,
        done: u64,
        learner: &mut Learner,
        folder: &RunFolder,
        device: &str,
    ) -> Result<(), RunError> {
        let timing = self.window.timing(done);
        if timing == Timing::Off {
            return self.finish(learner, folder, device);
        }
        if self.timing == Timing::Off {
            self.begun = Instant::now();
            spans::record();
        }
        self.last = done + 1;
        self.set(timing, learner)
    }

    /// Called before an evaluation. Its programs are not timed op by op, because they are no steps.
    pub(crate) fn before_evaluation(&mut self, learner: &mut Learner) -> Result<(), RunError> {
        if self.timing == Timing::Off { Ok(()) } else { self.set(Timing::Runs, learner) }
    }

    /// Writes the trace, unless it is empty or already written.
    pub(crate) fn finish(
        &mut self,
        learner: &mut Learner,
        folder: &RunFolder,
        device: &str,
    ) -> Result<(), RunError> {
        if self.timing == Timing::Off {
            return Ok(());
        }
        let engine = learner.weights().engine();
        let times = engine.take_times().map_err(LearnError::from)?;
        self.set(Timing::Off, learner)?;
        if !self.writes {
            return Ok(());
        }
        let idle = self.idle_share(&times, learner.program());
        let text = self.trace(&times, &spans::recorded(), learner, device, idle);
        // A failed trace does not end the run.
        match folder.write(TRACE_FILE, &text) {
            Ok(()) => tracing::info!(
                "steps {} to {} are traced in {}: open it at ui.perfetto.dev{}",
                self.window.begin + 1,
                self.last,
                folder.path().join(TRACE_FILE).display(),
                idle.map_or(String::new(), |idle| format!(
                    "; the device idled {} of the time between steps",
                    percent(idle, 2)
                ))
            ),
            Err(error) => tracing::warn!("the trace is not written: {error}"),
        }
        Ok(())
    }

    fn set(&mut self, timing: Timing, learner: &mut Learner) -> Result<(), RunError> {
        if timing != self.timing {
            learner.weights().engine().set_timing(timing).map_err(LearnError::from)?;
            self.timing = timing;
        }
        Ok(())
    }

    /// Share of the time in which the device was idle, over the steps that ran as usual, from the start of
    /// the first to the end of the last.
    fn idle_share(&self, times: &[Timed], train: ProgramId) -> Option<f64> {
        let is_step = |t: &&Timed| t.program == train && matches!(t.work, TimedWork::Part(p) if p.is_first());
        // The steps after them are timed op by op, and the host waits for each.
        let steps = (self.window.ops - self.window.begin) as usize;
        let end = times.iter().filter(is_step).nth(steps).map(|first| first.begin);
        let ran: Vec<&Timed> = times.iter().take_while(|t| end.is_none_or(|end| t.begin < end)).collect();
        let begin = ran.iter().position(is_step)?;
        let last = ran.iter().rposition(|t| t.program == train && matches!(t.work, TimedWork::Part(_)))?;
        let ran = &ran[begin..=last];
        let gaps = ran.windows(2).map(|pair| pair[1].begin.saturating_duration_since(pair[0].end));
        let all = ran.last()?.end - ran.first()?.begin;
        (all > Duration::ZERO).then(|| gaps.sum::<Duration>().as_secs_f64() / all.as_secs_f64())
    }

    fn trace(
        &self,
        times: &[Timed],
        done: &[spans::Span],
        learner: &mut Learner,
        device: &str,
        idle: Option<f64>,
    ) -> String {
        let mut trace = Trace::new(json!({
            "made by": concat!("xtrain ", env!("CARGO_PKG_VERSION")),
            "device": device,
            "steps as they run": format!("{} to {}", self.window.begin + 1, self.window.ops),
            "steps op by op": format!("{} to {}", self.window.ops + 1, self.window.end),
            "idle share between steps as they run": idle,
            "op times": OP_TIMES,
        }));
        trace.name(HOST, "host", "host");
        trace.name(DEVICE, device, "steps and ops");
        let train = learner.program();
        let instances = &learner.weights().engine().program(train).instances;
        let is_used = |lane: &Lane| instances.iter().any(|instance| instance.lane == *lane);
        for lane in Lane::ALL.into_iter().skip(1).filter(is_used) {
            trace.name(track(lane), device, &format!("ops of the {} lane", lane.name()));
        }
        let since = |at: Instant| at.saturating_duration_since(self.begun);
        for done in done {
            let args = done.step.map_or(json!({}), |step| json!({ "step": step }));
            trace.slice(HOST, done.name, "host", (since(done.begin), since(done.end)), args);
        }
        let mut step = self.window.begin;
        let mut labels: HashMap<ProgramId, Vec<OpLabel>> = HashMap::new();
        let mut times = times;
        while let [timed, others @ ..] = times {
            times = others;
            let when = (since(timed.begin), since(timed.end));
            let of_step = timed.program == train;
            match timed.work {
                TimedWork::Inputs => trace.slice(DEVICE, "copy inputs", "copy", when, json!({})),
                TimedWork::Outputs => trace.slice(DEVICE, "copy outputs", "copy", when, json!({})),
                TimedWork::Part(part) => {
                    step += u64::from(of_step && part.begins_step());
                    let (name, args) = match (of_step, part) {
                        (false, _) => ("evaluation or reference", json!({})),
                        (true, Part::Whole) => ("step", self.step_args(step)),
                        (true, Part::First | Part::Next | Part::Last) => ("micro-step", self.step_args(step)),
                        (true, Part::Forward(..)) => ("forward", self.step_args(step)),
                        (true, Part::Backward(..)) => ("backward", self.step_args(step)),
                        (true, Part::Update) => ("update", self.step_args(step)),
                    };
                    trace.slice(DEVICE, name, "run", when, args);
                }
                TimedWork::Instance(index) => {
                    let labels = labels.entry(timed.program).or_insert_with(|| {
                        let program = learner.weights().engine().program(timed.program);
                        program.instances.iter().map(|i| OpLabel::new(program, i)).collect()
                    });
                    let together = if labels[index].is_collective() { together(timed, others) } else { 0 };
                    times = &others[together..];
                    let label = OpLabel::together(&labels[index..=index + together]);
                    trace.slice(
                        track(label.lane),
                        &label.name,
                        label.role,
                        when,
                        label.args(when.1 - when.0),
                    );
                }
            }
        }
        trace.into_json()
    }

    fn step_args(&self, step: u64) -> Value {
        json!({ "step": step, "timed": if step > self.window.ops { "op by op" } else { "as it runs" } })
    }
}

/// The file in the run folder.
pub(crate) const TRACE_FILE: &str = "trace.json";

const HOST: Track = Track { process: 1, thread: 1 };
const DEVICE: Track = Track { process: 2, thread: 1 };

/// The track of the ops of a lane. Those of the compute lane are on the track of the steps.
fn track(lane: Lane) -> Track {
    Track { thread: DEVICE.thread + lane as u32, ..DEVICE }
}

/// The number of collectives that ran together with the first, of those after it.
fn together(first: &Timed, others: &[Timed]) -> usize {
    let TimedWork::Instance(index) = first.work else { return 0 };
    let follows = |(n, timed): &(usize, &Timed)| {
        timed.program == first.program
            && timed.work == TimedWork::Instance(index + n)
            && [timed.begin, timed.end] == [first.end; 2]
    };
    (1..).zip(others).take_while(follows).count()
}

/// Explanation of op times, for readers of a trace.
const OP_TIMES: &str = "On a GPU an op's time is that between two events, which are recorded in the step's graph before and after it: \
                        a microsecond or so of it is the event's, and ops that would overlap do not. So these steps take longer than the \
                        others. On the CPU it is the time between the op's call and its return.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_traced_steps_are_within_the_run_and_as_many_as_were_asked_for_where_it_has_them() {
        let of = |steps, from, first, all| {
            let Window { begin, ops, end } = Window::new(ProfileOptions { steps, from }, first, all);
            (begin, ops, end)
        };
        assert_eq!(of(3, None, 0, 100), (3, 9, 12));
        assert_eq!(of(3, None, 50, 100), (53, 59, 62), "a run that goes on");
        assert_eq!(of(2, Some(20), 0, 100), (19, 25, 27));
        assert_eq!(of(2, Some(20), 60, 100), (60, 66, 68), "completed steps are not repeated");
        assert_eq!(of(3, Some(96), 0, 100), (95, 97, 100));
        assert_eq!(of(3, Some(99), 0, 100), (97, 97, 100));
        assert_eq!(of(3, None, 0, 8), (3, 5, 8));
        assert_eq!(of(3, None, 0, 4), (1, 1, 4));
        assert_eq!(of(3, None, 0, 1), (0, 0, 1));
        assert_eq!(of(3, None, 7, 7), (7, 7, 7));
    }
}
