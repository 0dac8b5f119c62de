//! The tail of a ragged tensor, as an op writes it ([`crate::tails`]).

/// The contents of the tails that an op writes: an attribute of the op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tail {
    /// Zeros.
    #[default]
    Zeros,
    /// Whatever was in memory; NaNs on the CPU. Nothing may depend on it.
    Undefined {
        /// The rows that are expected in groups. They determine the cost alone.
        live_rows: usize,
    },
}

impl Tail {
    /// True if it is undefined.
    pub const fn is_undefined(self) -> bool {
        matches!(self, Tail::Undefined { .. })
    }
}
