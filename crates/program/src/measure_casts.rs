//! The pass that measures casts: for every operand of a linear layer's GEMM, the error of its cast to FP8.
//!
//! It runs after the backward pass, when all three GEMMs are known, and before [`crate::quantize`], so that a
//! program may compute in one recipe and be measured in another. A measurement is a cast and an op that
//! compares it with its input, both next to the op that computes the operand: inputs in the forward,
//! gradients in the backward. Only a few counters remain, so a measured step takes no more memory than a
//! plain one. Of parameters the masters are cast, as FP8 recipes do.

use crate::quantize::QuantizeOps;
use crate::trace::instantiate;
use crate::{
    Code, Instance, LinearGemm, Op, Origin, Program, Quantization, Role, Storage, TraceError, ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::Scaling;

/// The ops that the pass inserts.
pub trait MeasureOps: QuantizeOps {
    /// Compares a tensor with its cast, row-major or `transposed`: counts and sizes.
    fn cast_statistics(&self, scaling: Scaling, transposed: bool) -> Arc<dyn Op>;
}

/// An operand of the GEMMs of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearOperand {
    /// x.
    Input,
    /// w.
    Weight,
    /// dy.
    OutputGradient,
}

impl LinearOperand {
    /// All of them.
    pub const ALL: [LinearOperand; 3] =
        [LinearOperand::Input, LinearOperand::Weight, LinearOperand::OutputGradient];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            LinearOperand::Input => "input",
            LinearOperand::Weight => "weight",
            LinearOperand::OutputGradient => "output gradient",
        }
    }

    /// The GEMMs that read it: which of their operands it is, and true if transposed.
    const fn reads(self) -> [(LinearGemm, usize, bool); 2] {
        match self {
            LinearOperand::Input => [(LinearGemm::Fprop, 0, false), (LinearGemm::Wgrad, 1, true)],
            LinearOperand::Weight => [(LinearGemm::Fprop, 1, false), (LinearGemm::Dgrad, 1, true)],
            LinearOperand::OutputGradient => [(LinearGemm::Dgrad, 0, false), (LinearGemm::Wgrad, 0, true)],
        }
    }
}

/// A measured cast.
#[derive(Clone, Debug)]
pub struct MeasuredCast {
    /// The layer: block and site.
    pub layer: Origin,
    /// The GEMM that the cast is for.
    pub gemm: LinearGemm,
    /// The operand that is cast.
    pub operand: LinearOperand,
    /// Its format.
    pub quantization: Quantization,
    /// Its elements.
    pub elements: usize,
    /// Names of the program's outputs with the result: counts and sizes. Equal casts share them.
    pub outputs: [Arc<str>; 2],
}

/// Adds measurements to a program that has its backward: of the operands of every linear layer in a block, in
/// the formats that `formats` has for its GEMMs. [`Program::measured`] then lists them in the order of the
/// program.
pub fn apply(
    mut program: Program,
    ops: &dyn MeasureOps,
    formats: &dyn Fn(LinearGemm) -> Option<[Quantization; 2]>,
) -> Result<Program, TraceError> {
    let parameters = program.parameters_by_value();
    let instances = std::mem::take(&mut program.instances);
    let mut pass = Pass { out: program, ops, outputs: HashMap::new() };
    for instance in instances {
        let in_block = instance.origin.block.is_some();
        let gemms = instance.code.op().gemms(&pass.out.input_types(&instance)).filter(|_| in_block);
        let kind = gemms.and_then(|gemms| gemms.only()).map(|gemm| gemm.kind);
        for operand in LinearOperand::ALL {
            // Inputs and weights are measured where they are read first, so that nothing is saved for it.
            let is_gradient = operand == LinearOperand::OutputGradient;
            let read = operand.reads().into_iter().find(|(gemm, ..)| Some(*gemm) == kind);
            let Some((_, n, _)) = read.filter(|_| is_gradient || kind == Some(LinearGemm::Fprop)) else {
                continue;
            };
            let value = instance.inputs[n];
            let cast = parameters.get(&value).map_or(value, |&n| pass.out.parameters[n].master);
            for (gemm, n, transposed) in operand.reads() {
                let is_here = !is_gradient || Some(gemm) == kind;
                if let Some(quantizations) = formats(gemm).filter(|_| is_here) {
                    pass.measure(cast, gemm, operand, quantizations[n], transposed, &instance)?;
                }
            }
        }
        pass.out.instances.push(instance);
    }
    Ok(pass.out)
}

struct Pass<'a> {
    out: Program,
    ops: &'a dyn MeasureOps,
    /// Names of the outputs of each cast that was measured, by value, quantization and layout.
    outputs: HashMap<(ValueId, Quantization, bool), [Arc<str>; 2]>,
}

impl Pass<'_> {
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
        let outputs = match self.outputs.get(&(value, quantization, transposed)) {
            Some(outputs) => outputs.clone(),
            None => {
                let origin = Origin { role: Role::Precision, ..instance.origin.clone() };
                // A delayed cast is measured with its own amax: there are no earlier steps.
                let quantization = Quantization { delayed: false, ..quantization };
                let quantize = self.ops.quantize(quantization, [!transposed, transposed]);
                let cast = self.emit(quantize, &[value], origin.clone())?;
                let statistics = self.ops.cast_statistics(quantization.scaling, transposed);
                let results = self.emit(statistics, &[value, cast[0], cast[1]], origin)?;
                let name = format!("{}:{} {}", instance.origin, gemm.name(), operand.name());
                let outputs = [format!("{name} counts").into(), format!("{name} sizes").into()];
                for (value, name) in results.iter().zip(&outputs) {
                    self.out.values[value.0 as usize].storage = Storage::Output { name: Arc::clone(name) };
                }
                self.outputs.insert((value, quantization, transposed), outputs.clone());
                outputs
            }
        };
        let elements = self.out.ty(value).numel();
        let layer = instance.origin.clone();
        self.out.measured.push(MeasuredCast { layer, gemm, operand, quantization, elements, outputs });
        Ok(())
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
