//! [`SwigluSaving`] on a GPU: the launches of a cast and of SwiGLU.

use super::SwigluSaving;
use crate::quantize::{saving, saving_workspace};
use crate::swiglu::Swiglu;
use crate::tail::end_of_groups;
use xtrain_cuda::{CudaError, CudaKernel, Gpu, Operands, Work};
use xtrain_tensor::TensorType;

impl CudaKernel for SwigluSaving {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        saving_workspace()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = *operands;
        let (y, copy) = outputs.split_at(1);
        let end = end_of_groups(self.tail, inputs.get(Swiglu::STARTS));
        let save = saving(gpu, inputs[0], copy, workspace, end)?;
        Ok(Work::sequence(vec![
            save,
            self.swiglu().prepare(gpu, &Operands { inputs, outputs: y, workspace: &[] })?,
        ]))
    }
}
