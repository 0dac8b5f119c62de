//! The work of an op, kernel by kernel: enough to estimate its time on a device without knowing the op.

use xtrain_rank::Groups;
use xtrain_tensor::{DType, Scaling, TensorType};

/// The work of one run of an op.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// Its kernels.
    pub kernels: Vec<KernelCost>,
    /// Bytes that a rank sends to others: the work of a collective.
    pub sent_bytes: f64,
}

/// The work of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelCost {
    /// How often it runs.
    pub times: usize,
    /// The unit that computes, and how much.
    pub arithmetic: Arithmetic,
    /// Bytes that it reads and writes each time.
    pub bytes: f64,
    /// Bytes of outputs that it adds to, which it reads besides.
    pub added_bytes: f64,
}

/// Arithmetic of a kernel, by the unit that does it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arithmetic {
    /// None that takes longer than the kernel's bytes.
    None,
    /// A GEMM.
    Gemm {
        /// Rows and columns of the result, and the length of its sums.
        mnk: [usize; 3],
        /// The element type of its operands; the wider one of two formats of 8 bits.
        operands: DType,
        /// The scalings of operands of 8 bits.
        scaling: Option<[Scaling; 2]>,
    },
    /// GEMMs of the causal half of the scores of attention, and their softmax.
    Attention {
        /// GEMMs of all scores: two forward, five backward.
        gemms: usize,
        /// Heads of all sequences.
        heads: usize,
        /// Queries of a sequence, as many as its keys.
        seq_len: usize,
        /// Columns of a head.
        head_dim: usize,
        /// The element type of its operands.
        operands: DType,
        /// True if gradients are added in a fixed order.
        in_order: bool,
    },
}

impl Arithmetic {
    /// True for the backward of attention.
    pub fn is_attention_backward(&self) -> bool {
        matches!(self, Arithmetic::Attention { gemms: 3.., .. })
    }

    /// Floating-point operations; a multiply-add counts two. A float, because a step of a large model
    /// overflows 64 bits.
    pub fn flops(&self) -> f64 {
        match *self {
            Arithmetic::None => 0.0,
            Arithmetic::Gemm { mnk: [m, n, k], .. } => 2.0 * m as f64 * n as f64 * k as f64,
            Arithmetic::Attention { gemms, heads, seq_len, head_dim, .. } => {
                gemms as f64 * heads as f64 * head_dim as f64 * seq_len as f64 * seq_len as f64
            }
        }
    }
}

impl KernelCost {
    /// A kernel that does nothing but read and write so many bytes.
    pub fn of_bytes(bytes: f64) -> KernelCost {
        KernelCost { times: 1, arithmetic: Arithmetic::None, bytes, added_bytes: 0.0 }
    }
}

impl Cost {
    /// One kernel that reads each input and writes each output once.
    pub fn of_operands(arithmetic: Arithmetic, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_kernel(arithmetic, inputs.iter().chain(outputs).map(|ty| ty.bytes() as f64).sum())
    }

    /// One kernel that reads and writes so many bytes.
    pub fn of_kernel(arithmetic: Arithmetic, bytes: f64) -> Cost {
        let kernels = vec![KernelCost { times: 1, arithmetic, bytes, added_bytes: 0.0 }];
        Cost { kernels, sent_bytes: 0.0 }
    }

    /// One kernel that does nothing but read and write so many bytes.
    pub fn of_bytes(bytes: f64) -> Cost {
        Cost { kernels: vec![KernelCost::of_bytes(bytes)], sent_bytes: 0.0 }
    }

    /// The cost of a collective: a rank sends its piece, or one like it, to each other rank of the group. The
    /// traffic in the memory of devices is not counted.
    pub fn of_collective(groups: Groups, piece_bytes: usize) -> Cost {
        Cost { kernels: Vec::new(), sent_bytes: piece_bytes as f64 * (groups.size - 1) as f64 }
    }

    /// The cost of a message of so many bytes, for its sender.
    pub fn of_message(bytes: usize) -> Cost {
        Cost { kernels: Vec::new(), sent_bytes: bytes as f64 }
    }

    /// Floating-point operations of all kernels.
    pub fn flops(&self) -> f64 {
        self.kernels.iter().map(|kernel| kernel.times as f64 * kernel.arithmetic.flops()).sum()
    }
}
