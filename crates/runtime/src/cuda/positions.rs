//! The positions of a stream among the collectives of a program, for errors: which of them the GPU has come
//! to.

use std::fmt::Write;
use std::ops::Range;
use xtrain_cuda::{CudaError, Stream, StreamProgress};
use xtrain_program::{Collective, Groups, Instance, Program, order};
use xtrain_tensor::TensorType;

/// The side of collectives at which a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    Before,
    After,
}

/// The collectives of a program that are issued together, in list order, and how far the GPU has come.
pub(super) struct Positions {
    /// The index of the first instance of each run of collectives, and its words.
    runs: Vec<(usize, String)>,
    /// 2 n + 1 once run n has begun, and 2 n + 2 once it has ended.
    progress: StreamProgress,
}

impl Positions {
    /// The collectives of `program` on this rank, at none of which the GPU has been.
    pub(super) fn new(program: &Program, rank: usize, stream: &Stream) -> Result<Positions, CudaError> {
        let runs = order::runs(program).into_iter();
        let runs: Vec<_> = runs.filter_map(|run| Some((run.start, words(program, rank, run)?))).collect();
        let progress = StreamProgress::new(stream.context(), 2 * runs.len() as u32 + 1, stream)?;
        Ok(Positions { runs, progress })
    }

    /// Lets `stream` note that it comes to the run that begins with the instance `first`, or leaves it.
    pub(super) fn pass(&self, first: usize, passage: Passage, stream: &Stream) -> Result<(), CudaError> {
        let number = 2 * self.number(first) as u32 + 1;
        self.progress.reach(number + u32::from(passage == Passage::After), stream)
    }

    /// The run that begins with the instance `first`, in words.
    pub(super) fn words(&self, first: usize) -> &str {
        &self.runs[self.number(first)].1
    }

    fn number(&self, first: usize) -> usize {
        let number = self.runs.binary_search_by_key(&first, |(start, _)| *start);
        number.expect("collectives begin where the program's runs do")
    }

    /// The position of the GPU in words, which follow "it".
    pub(super) fn describe(&self) -> String {
        match self.progress.reached() as usize {
            0 => "has come to none of its collectives".to_owned(),
            number if number % 2 == 1 => format!("waits in {}", self.runs[number / 2].1),
            number => format!("waits in no collective, and was last in {}", self.runs[number / 2 - 1].1),
        }
    }
}

/// Collectives that are issued together in words: their kind, what the first of them carries, their bytes,
/// and the ranks, the other one if it is a message. `None` for other instances.
fn words(program: &Program, rank: usize, run: Range<usize>) -> Option<String> {
    let instances = &program.instances[run];
    let (first, op) = (&instances[0], instances[0].code.op());
    let (collective, groups) = op.collective()?;
    let mut words = format!("{} at {} ({})", op.name(), first.origin, first.origin.role.name());
    if let more @ 1.. = instances.len() - 1 {
        // Writing to a string succeeds.
        let _ = write!(words, " and {more} more");
    }
    let sent = |i: &Instance| program.cost(i).sent_bytes;
    let bytes: f64 = instances.iter().map(sent).sum();
    if let Some(place) = collective.other_place() {
        let other = groups.rank_at(rank, place);
        return Some(match collective {
            Collective::Receive { .. } => {
                let received = program.output_types(first).iter().map(TensorType::bytes).sum::<usize>();
                format!("{words}, which receives {received} bytes from rank {other}")
            }
            _ => format!("{words}, which sends {bytes} bytes to rank {other}"),
        });
    }
    let Groups { size, stride } = groups;
    let ranks = match stride {
        1 => format!("{size} ranks"),
        _ => format!("{size} ranks, {stride} apart"),
    };
    Some(format!("{words}, which sends {bytes} bytes from each of {ranks}"))
}
