//! Activities of the host: NVTX ranges for an attached profiler and, while a trace is recorded, slices for
//! it.

use std::cell::RefCell;
use std::time::Instant;
use xtrain_cuda::nvtx;

/// An activity of a thread.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Its name.
    pub name: &'static str,
    /// The step that it belongs to, from 1.
    pub step: Option<u64>,
    /// Its begin.
    pub begin: Instant,
    /// Its end.
    pub end: Instant,
}

thread_local! {
    /// Spans of this thread since [`record`]; `None` if it does not record.
    static RECORD: RefCell<Option<Vec<Span>>> = const { RefCell::new(None) };
}

/// Starts recording the activities of this thread.
pub fn record() {
    RECORD.set(Some(Vec::new()));
}

/// Ends the recording; returns the activities in the order in which they began.
pub fn recorded() -> Vec<Span> {
    let mut done = RECORD.take().unwrap_or_default();
    done.sort_by_key(|done| (done.begin, std::cmp::Reverse(done.end)));
    done
}

/// An activity that lasts until this is dropped.
#[must_use = "it ends where it is dropped"]
pub struct SpanGuard {
    name: &'static str,
    step: Option<u64>,
    begin: Option<Instant>,
    _range: nvtx::NvtxRange,
}

/// Begins the activity `name` on this thread.
pub fn span(name: &'static str) -> SpanGuard {
    start(name, None, nvtx::range(name))
}

/// Begins a span for the step of this number, from 1.
pub fn step_span(name: &'static str, step: u64) -> SpanGuard {
    start(name, Some(step), nvtx::range(format_args!("{name} {step}")))
}

fn start(name: &'static str, step: Option<u64>, range: nvtx::NvtxRange) -> SpanGuard {
    let begin = RECORD.with_borrow(Option::is_some).then(Instant::now);
    SpanGuard { name, step, begin, _range: range }
}

impl Drop for SpanGuard {
    fn drop(&mut self) {
        let Some(begin) = self.begin else { return };
        let done = Span { name: self.name, step: self.step, begin, end: Instant::now() };
        RECORD.with_borrow_mut(|record| record.iter_mut().for_each(|all| all.push(done)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_begins_and_ends_while_it_is_recorded_is_told_outer_first() {
        let before = span("before");
        record();
        drop(before);
        {
            let _outer = step_span("outer", 7);
            drop(span("inner"));
        }
        let within = span("within");
        let spans: Vec<_> = recorded().iter().map(|done| (done.name, done.step)).collect();
        assert_eq!(spans, [("outer", Some(7)), ("inner", None)]);
        drop(within);
        assert!(recorded().is_empty());
    }
}
