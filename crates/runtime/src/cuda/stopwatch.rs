//! Times of a GPU's work, by events in its stream.

use super::marks::Marks;
use crate::error::EngineError;
use crate::part::{Part, ProgramId};
use crate::timing::{Timed, TimedWork, Timing};
use std::time::{Duration, Instant};
use xtrain_cuda::{CudaError, Event, Stream};
use xtrain_program::Lane;

/// Times work that is enqueued on a stream.
#[derive(Default)]
pub(super) struct Stopwatch {
    timing: Timing,
    /// One moment by both clocks.
    origin: Option<(Event, Instant)>,
    /// Work that may still be in progress.
    marked: Vec<Marked>,
    done: Vec<Timed>,
    /// The end of the last timed work.
    last: Option<Instant>,
}

struct Marked {
    program: ProgramId,
    work: TimedWork,
    begin: Event,
    end: Event,
}

impl Stopwatch {
    pub(super) fn timing(&self) -> Timing {
        self.timing
    }

    /// Sets what is timed. If timing was off, waits for the stream in order to compare the clocks.
    pub(super) fn set(&mut self, timing: Timing, stream: &Stream) -> Result<(), CudaError> {
        if timing != Timing::Off && self.timing == Timing::Off {
            stream.synchronize()?;
            let event = Event::timed(stream.context())?;
            event.record(stream)?;
            event.synchronize()?;
            self.origin = Some((event, Instant::now()));
        }
        self.timing = timing;
        Ok(())
    }

    /// Records where work begins; None if timing is off.
    pub(super) fn begin(&self, stream: &Stream) -> Result<Option<Event>, CudaError> {
        if self.timing == Timing::Off {
            return Ok(None);
        }
        let event = Event::timed(stream.context())?;
        event.record(stream)?;
        Ok(Some(event))
    }

    /// Records the end of the work that began at `begin`.
    pub(super) fn end(
        &mut self,
        begin: Option<Event>,
        program: ProgramId,
        work: TimedWork,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let Some(begin) = begin else { return Ok(()) };
        let end = Event::timed(stream.context())?;
        end.record(stream)?;
        self.marked.push(Marked { program, work, begin, end });
        Ok(())
    }

    /// Takes the times of `part` and of its ops, which ran after all earlier work. The streams have passed
    /// all events. An op begins after it has waited for other lanes, or when the previous op of its lane
    /// ends.
    pub(super) fn ops(&mut self, program: ProgramId, part: Part, marks: &Marks) -> Result<(), CudaError> {
        self.settle()?;
        let begin = self.instant(&marks.begin)?;
        let after = |mark| between(&marks.begin, mark);
        let (begin, end) = self.push(program, TimedWork::Part(part), begin, after(&marks.end)?);
        let mut next = [begin; Lane::COUNT];
        for op in &marks.ops {
            let next = &mut next[op.lane as usize];
            let from = match &op.begin {
                Some(mark) => (begin + after(mark)?).clamp(*next, end),
                None => *next,
            };
            let until = (begin + after(&op.end)?).clamp(from, end);
            for (n, index) in op.run.clone().enumerate() {
                let begin = if n == 0 { from } else { until };
                self.done.push(Timed { program, work: TimedWork::Instance(index), begin, end: until });
            }
            *next = until;
        }
        Ok(())
    }

    /// All times since the last call.
    pub(super) fn take(&mut self) -> Result<Vec<Timed>, EngineError> {
        self.settle()?;
        Ok(std::mem::take(&mut self.done))
    }

    /// Waits for the work in progress and takes its times.
    fn settle(&mut self) -> Result<(), CudaError> {
        for marked in std::mem::take(&mut self.marked) {
            marked.end.synchronize()?;
            let (begin, took) = (self.instant(&marked.begin)?, between(&marked.begin, &marked.end)?);
            self.push(marked.program, marked.work, begin, took);
        }
        Ok(())
    }

    /// Adds work that ran after all work before it. Events have a limited resolution; a beginning that seems
    /// earlier is moved.
    fn push(
        &mut self,
        program: ProgramId,
        work: TimedWork,
        begin: Instant,
        took: Duration,
    ) -> (Instant, Instant) {
        let begin = self.last.map_or(begin, |last| begin.max(last));
        let end = begin + took;
        self.last = Some(end);
        self.done.push(Timed { program, work, begin, end });
        (begin, end)
    }

    /// The time at which the stream passed `event`.
    fn instant(&self, event: &Event) -> Result<Instant, CudaError> {
        let Some((origin, at)) = &self.origin else { unreachable!("it is set where timing begins") };
        Ok(*at + between(origin, event)?)
    }
}

/// The time from one event to a later one; zero if it is below the events' resolution.
fn between(begin: &Event, end: &Event) -> Result<Duration, CudaError> {
    Ok(Duration::try_from_secs_f64(begin.seconds_until(end)?).unwrap_or_default())
}
