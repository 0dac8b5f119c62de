//! The pass that measures casts: the error of the cast to FP8 of every operand of a linear layer's GEMMs.
//!
//! It runs after the backward pass, when all three GEMMs exist, and before [`crate::quantize`], so that a
//! program can compute in one recipe and measure the casts of another. A measurement is a cast and an op that
//! compares the cast with its input. Both run when the operand is read first: inputs and weights in the
//! forward, gradients in the backward. Only a few counters outlive them, so measuring needs no more memory at
//! the peak. As in FP8 recipes, the casts of parameters read the masters.

use crate::program::instantiate;
use crate::quantize::{QuantizeOps, constant_scale};
use crate::{
    CastOperand, Code, Instance, LinearGemm, LinearOperand, MeasuredCast, Op, Origin, Program, Quantization,
    Role, StaticScale, Storage, TraceError, ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::{DType, Scaling, TensorType};

/// The ops that the pass inserts.
pub trait MeasureOps: QuantizeOps {
    /// Compares a tensor with its cast, which is row-major or `transposed`. The outputs are counts and sizes.
    fn cast_statistics(&self, scaling: Scaling, transposed: bool) -> Arc<dyn Op>;
}

/// Adds measurements to a program that has its backward. They cover the operands of every linear layer in a
/// block, in the formats that `formats` returns for its GEMMs, if any. [`Program::measured`] then lists them
/// in the order of the program. A cast with a delayed scale uses that of `static_scale`, if there is one,
/// else its current amax: the program has no earlier steps.
pub fn apply(
    mut program: Program,
    ops: &dyn MeasureOps,
    formats: &dyn Fn(&Origin, LinearGemm) -> Option<[Quantization; 2]>,
    static_scale: Option<StaticScale<'_>>,
) -> Result<Program, TraceError> {
    let parameters = program.parameters_by_value();
    let instances = std::mem::take(&mut program.instances);
    let mut pass = MeasurePass { out: program, ops, static_scale, outputs: HashMap::new() };
    for instance in instances {
        let in_block = instance.origin.block.is_some();
        let gemms = instance.code.op().gemms(&pass.out.input_types(&instance)).filter(|_| in_block);
        let kind = gemms.and_then(|gemms| gemms.only()).map(|gemm| gemm.kind);
        for operand in LinearOperand::ALL {
            // Inputs and weights are measured in the forward, so that nothing is saved for the measurement.
            let is_gradient = operand == LinearOperand::OutputGradient;
            let read = operand.reads().into_iter().find(|(gemm, ..)| Some(*gemm) == kind);
            let Some((_, n, _)) = read.filter(|_| is_gradient || kind == Some(LinearGemm::Fprop)) else {
                continue;
            };
            let value = instance.inputs[n];
            let cast = parameters.get(&value).map_or(value, |&n| pass.out.parameters[n].master);
            for (gemm, n, transposed) in operand.reads() {
                let reads_operand = !is_gradient || Some(gemm) == kind;
                if let Some(quantizations) = formats(&instance.origin, gemm).filter(|_| reads_operand) {
                    pass.measure(cast, gemm, operand, quantizations[n], transposed, &instance)?;
                }
            }
        }
        pass.out.instances.push(instance);
    }
    Ok(pass.out)
}

struct MeasurePass<'a> {
    out: Program,
    ops: &'a dyn MeasureOps,
    static_scale: Option<StaticScale<'a>>,
    /// The names of the outputs of each measured cast, by value, quantization and layout.
    outputs: HashMap<(ValueId, Quantization, bool), [Arc<str>; 2]>,
}

impl MeasurePass<'_> {
    fn measure(
        &mut self,
        value: ValueId,
        gemm: LinearGemm,
        operand: LinearOperand,
        quantization: Quantization,
        transposed: bool,
        instance: &Instance,
    ) -> Result<(), TraceError> {
        // Whole tensors and square blocks have the same scales in both layouts.
        let transposed = matches!(quantization.scaling, Scaling::Row | Scaling::Tile) && transposed;
        let key = (value, quantization, transposed);
        let outputs = match self.outputs.get(&key) {
            Some(outputs) => outputs.clone(),
            None => {
                let origin = Origin { role: Role::Precision, ..instance.origin.clone() };
                let name = format!("{}:{} {}", instance.origin, gemm.name(), operand.name());
                let scale =
                    self.static_scale(&origin, operand).filter(|_| quantization.delayed).map(|scale| {
                        self.out.add_value(TensorType::new(DType::F32, [1, 1]), constant_scale(&name, scale))
                    });
                let quantization = Quantization { delayed: scale.is_some(), ..quantization };
                let quantize = self.ops.quantize(quantization, [!transposed, transposed]);
                let inputs: Vec<_> = [value].into_iter().chain(scale).collect();
                let cast = self.emit(quantize, &inputs, origin.clone())?;
                let statistics = self.ops.cast_statistics(quantization.scaling, transposed);
                let results = self.emit(statistics, &[value, cast[0], cast[1]], origin)?;
                let outputs = [format!("{name} counts").into(), format!("{name} sizes").into()];
                for (value, name) in results.iter().zip(&outputs) {
                    self.out.values[value.0 as usize].storage = Storage::Output { name: Arc::clone(name) };
                }
                self.outputs.insert(key, outputs.clone());
                outputs
            }
        };
        let elements = self.out.ty(value).numel();
        let layer = instance.origin.clone();
        self.out.measured.push(MeasuredCast { layer, gemm, operand, quantization, elements, outputs });
        Ok(())
    }

    /// The static scale of an operand, if it has one. An input that only wgrad casts has its scale there.
    fn static_scale(&self, layer: &Origin, operand: LinearOperand) -> Option<f32> {
        let of = self.static_scale?;
        let only_of_wgrad = (operand == LinearOperand::Input).then_some(CastOperand::WgradInput);
        of(layer, operand.into()).or_else(|| of(layer, only_of_wgrad?))
    }

    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        origin: Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, &[], origin)?;
        let outputs = instance.outputs.iter().map(|o| o.value).collect();
        self.out.instances.push(instance);
        Ok(outputs)
    }
}
