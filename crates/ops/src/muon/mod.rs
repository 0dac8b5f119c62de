//! Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>) in three ops: the momentum of some
//! matrices of one shape, the orthogonalised matrix, and the step of the masters.
//!
//! For a matrix W `[r, c]` with gradient G, g = coefficient * G, in f32:
//!
//! ```text
//! M' = momentum M + (1 - momentum) g
//! U  = momentum M' + (1 - momentum) g                       (Nesterov)
//! O  = 0.2 sqrt(max(r, c)) orthogonalised(U)                for each part of W
//! W' = W - lr (O + weight_decay W)
//! ```
//!
//! `orthogonalised` is five steps of a Newton-Schulz iteration, which replaces the singular values of U by
//! numbers near 1 ([`Orthogonalize`]). The constants and the scale are those of `torch.optim.Muon` with
//! `adjust_lr_fn = "match_rms_adamw"` (Liu et al., arXiv 2502.16982, section 2.2): an update has the RMS of
//! AdamW's, so a learning rate of AdamW can be kept.
//!
//! Ranks that have rows of the matrices alone exchange them between these ops. A rank then has its rows of
//! some matrices of one shape, as many as there are ranks (`slots`), or less and zeros. After an
//! [`AllToAll`](crate::collective::AllToAll) each has all rows of one, orthogonalises it, and sends the rows
//! back.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use std::ops::Range;
use xtrain_cuda::KernelSource;
use xtrain_program::{Arithmetic, Cost, KernelCost, Op, OpError, Operand};
use xtrain_tensor::{DType, Shape, TensorType};

/// Coefficients of the iteration: X' = A X + (B G + C G G) X with G = X Xᵀ.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// Steps of the iteration.
const STEPS: usize = 5;
/// The least norm by which a matrix is divided.
const EPS: f64 = 1e-7;
/// The RMS of an update, by the rows and columns of a part of full rank.
const RMS: f64 = 0.2;

/// `(coefficient f32[], skip u32[], then moment f32[p, c] and grad f32[p, c] of each of n matrices)
/// -> (moments' in place, update f32[slots, p, c])`.
///
/// If `skip` is not 0, no bit of the moments changes, and the update is 0. So it is in slots after the n-th.
#[derive(Clone, Debug)]
pub struct MuonMomentum {
    momentum: f64,
    slots: usize,
    in_place: Vec<(usize, usize)>,
}

/// `update f32[n, p, c] (or [n, 1, p, c]) -> f32[n, p, c]`: each part of the matrix, orthogonalised and
/// multiplied by 0.2 sqrt(max(rows, columns)) of the part.
///
/// The n pieces of p rows are those of `rows` rows, one after the other from piece `first` on, and then
/// padding, whose outputs are 0. With G the smaller of X Xᵀ and Xᵀ X:
///
/// ```text
/// X = U / max(norm(U), 1e-7)                               Frobenius
/// five times: X = 3.4445 X + (-4.7750 G + 2.0315 G G) X     or X (...), if G is Xᵀ X
/// ```
///
/// In f32 on a CPU. On a GPU, the operands of the three GEMMs of a step are rounded to bf16; X, sums and the
/// diagonal of the polynomial, which is by far its largest part, are f32.
#[derive(Clone, Debug)]
pub struct Orthogonalize {
    /// Rows of each part, one after the other.
    pub parts: Vec<usize>,
    /// The piece with the first rows.
    pub first: usize,
}

/// `(lr f32[], skip u32[], update f32[m, p, c] (or [m, 1, p, c]), then n masters f32[p, c])
/// -> (masters' in place, each followed by its compute copy if it has one)`, with n at most m.
///
/// If `skip` is not 0, no bit of the masters changes, and the copies are written from them.
#[derive(Clone, Debug)]
pub struct MuonStep {
    weight_decay: f64,
    /// The element types of the compute copies.
    copies: Vec<Option<DType>>,
    in_place: Vec<(usize, usize)>,
}

impl MuonMomentum {
    /// Inputs before those of the matrices.
    const CONTROLS: usize = 2;

    /// The momentum of n matrices, and their updates in as many slots or more.
    pub fn new(momentum: f64, n: usize, slots: usize) -> MuonMomentum {
        let in_place = (0..n).map(|i| (i, MuonMomentum::CONTROLS + 2 * i)).collect();
        MuonMomentum { momentum, slots, in_place }
    }

    fn matrices(&self) -> usize {
        self.in_place.len()
    }
}

impl MuonStep {
    /// Inputs before the masters.
    const CONTROLS: usize = 3;

    /// The step of masters with compute copies of these types.
    pub fn new(weight_decay: f64, copies: Vec<Option<DType>>) -> MuonStep {
        let outputs = |copy: &Option<DType>| 1 + usize::from(copy.is_some());
        let firsts = copies.iter().scan(0, |next, copy| Some(std::mem::replace(next, *next + outputs(copy))));
        let in_place = firsts.enumerate().map(|(n, output)| (output, MuonStep::CONTROLS + n)).collect();
        MuonStep { weight_decay, copies, in_place }
    }
}

impl Orthogonalize {
    /// The rows of each part, by their numbers.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.parts.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end - rows..*end)
        })
    }

    fn rows(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Elements of the largest part, and of the largest matrix of products of its rows or columns.
    fn largest(&self, cols: usize) -> [usize; 2] {
        let most = self.parts.iter().copied().max().unwrap_or(0);
        [most * cols, most.min(cols).pow(2)]
    }
}

/// 0.2 sqrt(max(rows, columns)) of a part.
fn scale(rows: usize, cols: usize) -> f32 {
    (RMS * (rows.max(cols) as f64).sqrt()) as f32
}

/// The pieces of an update: their number, rows and columns.
fn pieces(ty: TensorType) -> Option<[usize; 3]> {
    match *ty.shape {
        [n, p, c] | [n, 1, p, c] if ty.dtype == DType::F32 => Some([n, p, c]),
        _ => None,
    }
}

fn flag(name: &str, ty: TensorType) -> Result<(), OpError> {
    OpError::ensure(ty == TensorType::new(DType::U32, []), || format!("{name}: skip must be u32[], not {ty}"))
}

fn number(name: &str, ty: TensorType) -> Result<(), OpError> {
    OpError::ensure(ty == TensorType::new(DType::F32, []), || {
        format!("{name}: the first input must be f32[], not {ty}")
    })
}

impl Op for MuonMomentum {
    fn name(&self) -> &'static str {
        "muon_momentum"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let (n, slots) = (self.matrices(), self.slots);
        OpError::ensure(n > 0 && n <= slots && inputs.len() == MuonMomentum::CONTROLS + 2 * n, || {
            format!(
                "muon_momentum of {n} matrices in {slots} slots takes coefficient, skip, and moment and grad of each, not {} inputs",
                inputs.len()
            )
        })?;
        number(self.name(), inputs[0])?;
        flag(self.name(), inputs[1])?;
        let matrix = inputs[MuonMomentum::CONTROLS];
        let matrices = &inputs[MuonMomentum::CONTROLS..];
        let are_alike = matrix.dtype == DType::F32 && matrix.shape.len() == 2;
        OpError::ensure(are_alike && matrices.iter().all(|ty| *ty == matrix), || {
            format!("moments and gradients must be f32 matrices of one shape, not {matrices:?}")
        })?;
        let shape = Shape::new(&[&[slots], &*matrix.shape].concat());
        let update = TensorType { shape, ..matrix };
        Ok(std::iter::repeat_n(matrix, n).chain([update]).collect())
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }
}

impl Op for Orthogonalize {
    fn name(&self) -> &'static str {
        "orthogonalize"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 1)?;
        let pieces = pieces(inputs[0]).filter(|[n, p, c]| {
            let has_part = self.parts.iter().all(|rows| *rows > 0) && !self.parts.is_empty() && *c > 0;
            has_part && self.rows() <= n * p && self.first < *n
        });
        let Some([n, p, c]) = pieces else {
            return Err(OpError(format!(
                "orthogonalize of {} rows from piece {} on takes f32[n, p, c] with at least as many rows, not {}",
                self.rows(),
                self.first,
                inputs[0]
            )));
        };
        Ok(vec![TensorType { shape: Shape::new(&[n, p, c]), ..inputs[0] }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// The kernels of a GPU: two passes over a part before its iteration and one after it, and in each step
    /// three GEMMs, a pass over the products and two over the part.
    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        let Some([_, _, cols]) = pieces(inputs[0]) else { return Cost::default() };
        let mut kernels = Vec::new();
        for part in self.parts.chunk_by(|a, b| a == b) {
            let (rows, count) = (part[0], part.len());
            let (side, long) = (rows.min(cols), rows.max(cols));
            let (elements, products) = ((rows * cols) as f64, (side * side) as f64);
            let pass =
                |times: usize, bytes: f64| KernelCost { times: times * count, ..KernelCost::of_bytes(bytes) };
            let gemm = |mnk: [usize; 3], bytes: f64| KernelCost {
                arithmetic: Arithmetic::Gemm { mnk, operands: DType::BF16, scaling: None },
                ..pass(STEPS, bytes)
            };
            kernels.extend([
                pass(1, 4.0 * elements),
                pass(1, 10.0 * elements),
                gemm([side, side, long], 2.0 * (elements + products)),
                gemm([side, side, side], 6.0 * products),
                pass(STEPS, 8.0 * products),
                pass(STEPS, 8.0 * elements),
                KernelCost {
                    added_bytes: 4.0 * elements,
                    ..gemm([rows, cols, side], 6.0 * elements + 2.0 * products)
                },
                pass(STEPS - 1, 6.0 * elements),
                pass(1, 8.0 * elements),
            ]);
        }
        Cost { kernels, sent_bytes: 0.0 }
    }
}

impl Op for MuonStep {
    fn name(&self) -> &'static str {
        "muon_step"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let n = self.copies.len();
        OpError::ensure(n > 0 && inputs.len() == MuonStep::CONTROLS + n, || {
            format!(
                "muon_step of {n} matrices takes lr, skip, update and {n} masters, not {} inputs",
                inputs.len()
            )
        })?;
        number(self.name(), inputs[0])?;
        flag(self.name(), inputs[1])?;
        let (update, masters) = (inputs[2], &inputs[MuonStep::CONTROLS..]);
        let fits = pieces(update).is_some_and(|[m, p, c]| {
            n <= m && masters.iter().all(|ty| *ty == TensorType::new(DType::F32, [p, c]))
        });
        OpError::ensure(fits, || {
            format!(
                "muon_step takes an update f32[m, p, c] and up to m masters f32[p, c], not {update} and {masters:?}"
            )
        })?;
        let copies = self.copies.iter();
        OpError::ensure(
            copies.clone().flatten().all(|dtype| matches!(dtype, DType::F32 | DType::BF16)),
            || format!("copies must be f32 or bf16, not {:?}", self.copies),
        )?;
        let of_master = |(copy, master): (&Option<DType>, &TensorType)| {
            [Some(*master), copy.map(|dtype| master.with_dtype(dtype))].into_iter().flatten()
        };
        Ok(copies.zip(masters).flat_map(of_master).collect())
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }
}

impl OnGpu for MuonMomentum {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for Orthogonalize {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, xtrain_cuda::Gemm::FALLBACK_SOURCE];
}

impl OnGpu for MuonStep {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
