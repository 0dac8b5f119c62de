//! [`SwigluSaving`] on a GPU: the launches of a cast and of SwiGLU.

use super::SwigluSaving;
use crate::quantize::{saving, saving_workspace};
use xtrain_cuda::{CudaError, CudaKernel, Gpu, Operands, Work};
use xtrain_tensor::TensorType;

impl CudaKernel for SwigluSaving {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        saving_workspace()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = *operands;
        let (y, copy) = outputs.split_at(1);
        let save = saving(gpu, inputs[0], copy, workspace)?;
        Ok(Work::sequence(vec![
            save,
            self.swiglu().prepare(gpu, &Operands { inputs, outputs: y, workspace: &[] })?,
        ]))
    }
}
