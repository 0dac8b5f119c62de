//! Collectives: instances that move data between the ranks of a run.
//!
//! A collective has no kernel: engines run it by its kind, through a communicator. It runs on the
//! communication lane. All ranks run one program, whose list order is thus the order of collectives on every
//! rank; no program depends on the rank that runs it.

/// A movement of data between the ranks of a [`Group`], or a sum over them, from the only input of an op to
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
    /// True if libraries pass its pieces around a ring of all ranks; false if each rank sends to all others.
    pub const fn is_ring(self) -> bool {
        match self {
            Collective::AllGather { .. } | Collective::ReduceScatter { .. } => true,
            Collective::AllToAll { .. } => false,
        }
    }

    /// Bytes of a piece, for an input and an output of these bytes.
    pub const fn piece_bytes(self, group: Group, input_bytes: usize, output_bytes: usize) -> usize {
        match self {
            Collective::AllGather { .. } => input_bytes,
            Collective::AllToAll { .. } => output_bytes / group.size(),
            Collective::ReduceScatter { .. } => output_bytes,
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
