//! Collectives: instances that move data between the ranks of a run.
//!
//! A collective has no kernel: engines run it by its kind, through a communicator. It runs on the
//! communication lane. All ranks of a pipeline's stage run one program, whose list order is thus the order of
//! collectives on each of them; no program depends on the rank within the stage that runs it. Ranks of
//! different stages exchange messages, which their sender does not wait for.

use xtrain_rank::Groups;

/// A movement of data between the ranks of a group, or a sum over them, from the first input of an op to
/// its only output.
///
/// But for messages, the tensor of all ranks is cut by rows into as many pieces as there are ranks. All
/// pieces have the bytes of the tensor of one rank; the last pieces may end after the tensor of all ranks,
/// and the rows there are padding. Piece `p` belongs to the rank `(first + p) % size`, counted within the
/// group.
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
    /// Sends the input to another rank of the group. There is no output.
    Send {
        /// The place of that rank.
        to: usize,
    },
    /// Receives the output from another rank of the group. There is no input.
    Receive {
        /// The place of that rank.
        from: usize,
    },
    /// Sends the input to another rank of the group, which does the same, and receives the output from it.
    SendReceive {
        /// The place of that rank.
        with: usize,
    },
}

impl Collective {
    /// The name in tables and counts.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllGather { .. } => "all_gather",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::Send { .. } => "send",
            Collective::Receive { .. } => "receive",
            Collective::SendReceive { .. } => "send_receive",
        }
    }

    /// True if libraries pass its pieces around a ring of all ranks.
    pub const fn is_ring(self) -> bool {
        matches!(self, Collective::AllGather { .. } | Collective::ReduceScatter { .. })
    }

    /// True if a rank sends to one other rank, or receives from one.
    pub const fn is_message(self) -> bool {
        self.other_place().is_some()
    }

    /// The place of the other rank of a message.
    pub const fn other_place(self) -> Option<usize> {
        match self {
            Collective::Send { to: other }
            | Collective::Receive { from: other }
            | Collective::SendReceive { with: other } => Some(other),
            _ => None,
        }
    }

    /// Bytes that a rank sends to others, for an input and an output of these bytes.
    pub const fn sent_bytes(self, groups: Groups, input_bytes: usize, output_bytes: usize) -> usize {
        match self {
            Collective::Send { .. } | Collective::SendReceive { .. } => input_bytes,
            Collective::Receive { .. } => 0,
            _ => self.piece_bytes(groups, input_bytes, output_bytes) * (groups.size - 1),
        }
    }

    /// Bytes of a piece, for an input and an output of these bytes; of a message, all.
    pub const fn piece_bytes(self, groups: Groups, input_bytes: usize, output_bytes: usize) -> usize {
        match self {
            Collective::AllGather { .. } | Collective::Send { .. } | Collective::SendReceive { .. } => {
                input_bytes
            }
            Collective::AllToAll { .. } => output_bytes / groups.size,
            Collective::ReduceScatter { .. } | Collective::Receive { .. } => output_bytes,
        }
    }
}
