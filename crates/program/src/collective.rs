//! Collectives: instances that move data between the ranks of a run.
//!
//! A collective has no kernel: engines run it by its kind, through a communicator. It runs on the
//! communication lane. All ranks run one program, whose list order is thus the order of collectives on every
//! rank; no program depends on the rank that runs it.

use xtrain_rank::Groups;

/// A movement of data between the ranks of a group, or a sum over them, from the first input of an op to
/// its only output.
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
    /// Adds the inputs of all ranks, in f32. The output is the piece of the sum that belongs to this rank;
    /// padding is zeros. The communicator chooses the order of the sum.
    ReduceScatter {
        /// The rank of the first piece.
        first: usize,
    },
}

impl Collective {
    /// The name in tables and counts.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllGather { .. } => "all_gather",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::ReduceScatter { .. } => "reduce_scatter",
        }
    }

    /// True if libraries pass its pieces around a ring of all ranks; false if each rank sends to all others.
    pub const fn is_ring(self) -> bool {
        match self {
            Collective::AllGather { .. } | Collective::ReduceScatter { .. } => true,
            Collective::AllToAll { .. } => false,
        }
    }

    /// Bytes of a piece, for an input and an output of these bytes.
    pub const fn piece_bytes(self, groups: Groups, input_bytes: usize, output_bytes: usize) -> usize {
        match self {
            Collective::AllGather { .. } => input_bytes,
            Collective::AllToAll { .. } => output_bytes / groups.size,
            Collective::ReduceScatter { .. } => output_bytes,
        }
    }
}
