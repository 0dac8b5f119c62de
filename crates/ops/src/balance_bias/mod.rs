//! The update of the biases that balance the experts of mixtures without a loss (Wang et al., arXiv
//! 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(skip u32[], sums f32[n, 2], bias_e of each layer) -> bias_e of each layer`, in place. With s_e =
/// sign(mean(load) - load_e): bias_e += rate (s_e - mean(s)), so the mean of a bias does not drift (as in
/// torchtitan). A load is the number of tokens of each expert in the step, among the sums of the step
/// ([`PackSums`](crate::pack_sums::PackSums)). If `skip` is not 0, no bit changes.
///
/// Operands are f32. CPU and GPU return equal bits.
#[derive(Clone, Debug)]
pub struct BalanceBias {
    rate: f32,
    /// The place among the sums of the first load of each layer.
    loads: Vec<usize>,
    in_place: Vec<(usize, usize)>,
}

impl BalanceBias {
    /// An update of the biases of layers whose loads begin at these places among the sums.
    pub fn new(rate: f32, loads: Vec<usize>) -> Self {
        let in_place = (0..loads.len()).map(|layer| (layer, 2 + layer)).collect();
        BalanceBias { rate, loads, in_place }
    }
}

impl Op for BalanceBias {
    fn name(&self) -> &'static str {
        "balance_bias"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 2 + self.loads.len())?;
        OpError::ensure(self.rate >= 0.0 && self.rate.is_finite(), || {
            format!("the update rate must be a finite number of at least 0, not {}", self.rate)
        })?;
        let [skip, sums] = [inputs[0], inputs[1]];
        OpError::ensure(skip == TensorType::new(DType::U32, []), || {
            format!("skip must be u32[], not {skip}")
        })?;
        OpError::ensure(sums.dtype == DType::F32, || format!("sums must be f32, not {sums}"))?;
        for (&bias, &first) in inputs[2..].iter().zip(&self.loads) {
            let is_bias = bias.dtype == DType::F32 && bias.shape.len() == 1;
            OpError::ensure(is_bias && first + bias.numel() <= sums.numel(), || {
                format!("the loads of the bias {bias} begin at {first} of the sums {sums}")
            })?;
        }
        Ok(inputs[2..].to_vec())
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }
}

impl OnGpu for BalanceBias {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
