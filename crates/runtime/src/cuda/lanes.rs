//! The lanes of a program as streams. Each lane is a stream of its own; an instance that waits for one of
//! another lane waits for an event of that lane's stream.
//!
//! A part begins and ends on the stream of the compute lane: the other streams wait for it at the beginning,
//! and it waits for them at the end. So the copies of inputs, outputs and state, which are on that stream,
//! need no further events, and a capture of that stream contains all lanes. A program with one lane has no
//! event. The kernels of other lanes go first: kernels of the compute lane wait for them, and take all of the
//! multiprocessors.

use crate::part::Part;
use xtrain_cuda::{Context, CudaError, Event, Stream};
use xtrain_program::order::Order;
use xtrain_program::{Lane, Program};

/// The streams of an engine, one for each lane that a program uses.
pub(super) struct Streams {
    compute: Stream,
    /// The streams of the other lanes, by lane.
    others: [Option<Stream>; Lane::COUNT],
}

impl Streams {
    /// The stream of the compute lane.
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Streams { compute: Stream::new(context)?, others: [const { None }; Lane::COUNT] })
    }

    /// Adds the streams of the lanes of `program`.
    pub(super) fn add_for(&mut self, program: &Program) -> Result<(), CudaError> {
        for lane in other_lanes(program) {
            let stream = &mut self.others[lane as usize];
            if stream.is_none() {
                *stream = Some(Stream::before_others(self.compute.context())?);
            }
        }
        Ok(())
    }

    pub(super) fn compute(&self) -> &Stream {
        &self.compute
    }

    /// The stream of a lane of a program for which [`Streams::add_for`] was called.
    pub(super) fn get(&self, lane: Lane) -> &Stream {
        match lane {
            Lane::Compute => &self.compute,
            lane => self.others[lane as usize].as_ref().expect("the streams of all lanes were added"),
        }
    }

    /// Waits for the work of all lanes.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.others.iter().flatten().chain([&self.compute]).try_for_each(Stream::synchronize)
    }
}

/// The lanes of `program` other than the compute lane.
fn other_lanes(program: &Program) -> impl Iterator<Item = Lane> {
    let is_used = |lane: &Lane| program.instances.iter().any(|instance| instance.lane == *lane);
    Lane::ALL.into_iter().filter(|lane| *lane != Lane::Compute).filter(is_used)
}

/// The events of a program of several lanes.
pub(super) struct LaneEvents {
    order: Order,
    /// For each instance, the event after it, if an instance of another lane waits for it.
    done: Vec<Option<Event>>,
    begin: Event,
    /// The lanes other than the compute lane, each with the event after its last instance.
    ends: Vec<(Lane, Event)>,
}

impl LaneEvents {
    /// The events of `program`; `None` if it has one lane.
    pub(super) fn new(program: &Program, context: &Context) -> Result<Option<Self>, CudaError> {
        let with_event = |lane| Ok((lane, Event::new(context)?));
        let ends = other_lanes(program).map(with_event).collect::<Result<Vec<_>, CudaError>>()?;
        if ends.is_empty() {
            return Ok(None);
        }
        let order = Order::new(program);
        let mut done: Vec<Option<Event>> = program.instances.iter().map(|_| None).collect();
        for index in (0..program.instances.len()).flat_map(|index| order.waits(index)) {
            done[*index] = Some(Event::new(context)?);
        }
        Ok(Some(LaneEvents { order, done, begin: Event::new(context)?, ends }))
    }

    /// Makes the other lanes wait for the work before the part.
    pub(super) fn begin(&self, streams: &Streams) -> Result<(), CudaError> {
        self.begin.record(streams.compute())?;
        self.ends.iter().try_for_each(|(lane, _)| streams.get(*lane).wait(&self.begin))
    }

    /// The instances of other lanes for which an instance waits within `part`. All of earlier parts have
    /// completed.
    pub(super) fn waits(&self, program: &Program, part: Part, index: usize) -> impl Iterator<Item = usize> {
        let waits = self.order.waits(index).iter().copied();
        waits.filter(move |&other| part.includes(&program.instances[other]))
    }

    /// Makes `stream`, the instance's, wait for the instances for which it waits within `part`.
    pub(super) fn wait(
        &self,
        program: &Program,
        part: Part,
        index: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.waits(program, part, index).try_for_each(|other| {
            let done = self.done[other].as_ref().expect("each instance that is waited for has an event");
            stream.wait(done)
        })
    }

    /// Records that `stream` is past an instance, if another lane waits for it.
    pub(super) fn done(&self, index: usize, stream: &Stream) -> Result<(), CudaError> {
        self.done[index].as_ref().map_or(Ok(()), |event| event.record(stream))
    }

    /// Makes the compute lane wait for the other lanes.
    pub(super) fn end(&self, streams: &Streams) -> Result<(), CudaError> {
        self.ends.iter().try_for_each(|(lane, end)| {
            end.record(streams.get(*lane))?;
            streams.compute().wait(end)
        })
    }
}
