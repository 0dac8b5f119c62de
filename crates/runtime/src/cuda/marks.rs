//! Events around the ops of a part, from which the time of each op is read.

use super::lanes::LaneEvents;
use crate::part::Part;
use std::ops::Range;
use xtrain_cuda::{Context, CudaError, Event, Stream};
use xtrain_program::{Lane, Program};

/// The events of a part whose ops are timed.
pub(super) struct Marks {
    /// Before the first op.
    pub(super) begin: Event,
    /// The ops in list order.
    pub(super) ops: Vec<OpMarks>,
    /// After all lanes.
    pub(super) end: Event,
}

/// The events of an op, or of collectives that run together.
pub(super) struct OpMarks {
    /// The indices of the instances.
    pub(super) run: Range<usize>,
    pub(super) lane: Lane,
    /// After the op has waited for other lanes, if it waits. Any other op begins when the previous one of its
    /// lane ends.
    pub(super) begin: Option<Event>,
    pub(super) end: Event,
}

impl Marks {
    /// Events for the ops of `part`, which has these runs of instances.
    pub(super) fn new(
        program: &Program,
        lanes: Option<&LaneEvents>,
        part: Part,
        runs: impl Iterator<Item = Range<usize>>,
        context: &Context,
    ) -> Result<Self, CudaError> {
        let waits = |lanes: &LaneEvents, index| lanes.waits(program, part, index).next().is_some();
        let op = |run: Range<usize>| {
            let is_late = lanes.is_some_and(|lanes| run.clone().any(|index| waits(lanes, index)));
            let begin = is_late.then(|| Event::timed(context)).transpose()?;
            let lane = program.instances[run.start].lane;
            Ok(OpMarks { run, lane, begin, end: Event::timed(context)? })
        };
        let ops = runs.filter(|run| part.runs(&program.instances[run.start])).map(op);
        Ok(Marks {
            begin: Event::timed(context)?,
            ops: ops.collect::<Result<_, CudaError>>()?,
            end: Event::timed(context)?,
        })
    }
}

/// Records `event` on `stream`, in a graph if the stream is captured.
pub(super) fn mark(event: &Event, stream: &Stream, is_captured: bool) -> Result<(), CudaError> {
    if is_captured { event.record_in_graph(stream) } else { event.record(stream) }
}
