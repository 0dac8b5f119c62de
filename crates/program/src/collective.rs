//! Collectives: instances that move data between the ranks of a run.
//!
//! A collective computes nothing, so it has no kernel: engines run it by its kind, through a communicator. It
//! runs on the communication lane. All ranks run one program, whose list order is thus the order of
//! collectives on every rank; no program depends on the rank that runs it.

use crate::{Instance, Program};
use std::mem::discriminant;
use std::ops::Range;

/// A movement of data between the ranks of a [`Group`], from the only input of an op to its only output.
///
/// The tensor of all ranks is cut by rows into as many pieces as there are ranks. All pieces have the bytes
/// of the tensor of one rank; the last pieces may end after the tensor of all ranks, and the rows there are
/// padding. Piece `p` belongs to the rank `(first + p) % size`, counted within the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Gathers every rank's input, a piece, into an output of all ranks. Padding is dropped.
    AllGather {
        /// The rank of the first piece.
        first: usize,
    },
    /// Sends each piece of the input to the rank to which it belongs. The output consists of the pieces that
    /// the ranks sent to this rank, in the order of ranks, whatever `first` is. Padding is zeros.
    AllToAll {
        /// The rank of the first piece.
        first: usize,
    },
}

impl Collective {
    /// Bytes of a piece, for an input and an output of these bytes.
    pub const fn piece_bytes(self, group: Group, input_bytes: usize, output_bytes: usize) -> usize {
        match self {
            Collective::AllGather { .. } => input_bytes,
            Collective::AllToAll { .. } => output_bytes / group.size(),
        }
    }
}

/// The ranks among which a collective moves data. Each group of a kind moves data of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All ranks of the run.
    World {
        /// Their number.
        size: usize,
    },
    /// Ranks that have the rows of all state together: `size` neighbours, from a multiple of `size` on.
    Shard {
        /// Their number.
        size: usize,
    },
    /// Ranks that have equal rows: those at one place of each group of shards.
    Replicas {
        /// Their number.
        size: usize,
    },
}

impl Group {
    /// The number of ranks of a group.
    pub const fn size(self) -> usize {
        match self {
            Group::World { size } | Group::Shard { size } | Group::Replicas { size } => size,
        }
    }
}

/// The runs of collectives that an engine may issue as one: several of a kind, a group and a block that follow
/// each other in the list, none of which reads or writes what another writes. They begin when all of them can,
/// and end together.
pub fn coalesced(program: &Program) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, instance) in program.instances.iter().enumerate() {
        if instance.code.op().collective().is_none() {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == i && joins(&program.instances[run.clone()], instance) => run.end += 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs.retain(|run| run.len() > 1);
    runs
}

/// True if a collective can be issued together with those before it.
fn joins(run: &[Instance], instance: &Instance) -> bool {
    let kind = |i: &Instance| {
        let call = i.code.op().collective().map(|(collective, group)| (discriminant(&collective), group));
        (call, i.lane, i.phase(), i.when, i.origin.block)
    };
    let is_independent = |other: &Instance| {
        let (written, writes) = (other.outputs[0].value, instance.outputs[0].value);
        written != writes && !instance.inputs.contains(&written) && !other.inputs.contains(&writes)
    };
    kind(&run[0]) == kind(instance) && run.iter().all(is_independent)
}
