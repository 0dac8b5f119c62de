//! The pass that measures casts: for what every product of a linear layer multiplies, what a cast to FP8 does to it.
//!
//! It runs behind the backward pass, where all three products are known, and in front of [`crate::quantized`], so that a program may compute
//! under one recipe and be measured under another. Each measurement is a cast and an op that compares the cast with what was cast; both are
//! done where the value is made anyway, inputs in the forward and gradients in the backward, and only a few numbers remain, so a measured
//! step takes no more memory than a plain one. Of parameters the masters are cast, as FP8 recipes do.

use crate::quantized::{LinearGemm, Quantization, QuantizedOps};
use crate::trace::instantiate;
use crate::{Code, Instance, Op, Origin, Program, Role, Storage, TraceError, ValueId};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::Scaling;

/// The ops that the pass inserts.
pub trait MeasuringOps: QuantizedOps {
    /// Compares what was cast with its cast, which lies as it stands or `transposed`: counts and sizes.
    fn cast_statistics(&self, scaling: Scaling, transposed: bool) -> Arc<dyn Op>;
}

/// A factor of a product of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Factor {
    /// What the layer is given.
    Input,
    /// Its weight.
    Weight,
    /// The gradient of what it makes.
    OutputGradient,
}

impl Factor {
    /// All of them.
    pub const ALL: [Factor; 3] = [Factor::Input, Factor::Weight, Factor::OutputGradient];

    /// Its name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Factor::Input => "input",
            Factor::Weight => "weight",
            Factor::OutputGradient => "output gradient",
        }
    }

    /// The products that read it: which of their factors it is, and whether they want it transposed.
    const fn reads(self) -> [(LinearGemm, usize, bool); 2] {
        match self {
            Factor::Input => [(LinearGemm::Fprop, 0, false), (LinearGemm::Wgrad, 1, true)],
            Factor::Weight => [(LinearGemm::Fprop, 1, false), (LinearGemm::Dgrad, 1, true)],
            Factor::OutputGradient => [(LinearGemm::Dgrad, 0, false), (LinearGemm::Wgrad, 0, true)],
        }
    }
}

/// A cast that is measured.
#[derive(Clone, Debug)]
pub struct MeasuredCast {
    /// The layer: block and site.
    pub layer: Origin,
    /// For which of its products.
    pub gemm: LinearGemm,
    /// What is cast.
    pub factor: Factor,
    /// How.
    pub quantization: Quantization,
    /// Its elements.
    pub elements: usize,
    /// Names of the program's outputs that tell: counts and sizes. Casts that come to the same share them.
    pub outputs: [Arc<str>; 2],
}

/// Adds measurements to a program that has its backward, of the casts that `how` says for the products of every linear layer in a block;
/// returns it with what is measured, in the order of the program.
pub fn apply(
    mut program: Program,
    ops: &dyn MeasuringOps,
    how: &dyn Fn(LinearGemm) -> Option<[Quantization; 2]>,
) -> Result<(Program, Vec<MeasuredCast>), TraceError> {
    let parameters = program.parameters_by_value();
    let instances = std::mem::take(&mut program.instances);
    let mut pass = Pass { out: program, ops, how, known: HashMap::new(), measured: Vec::new() };
    for instance in instances {
        let gemm = instance.code.op().linear_gemm().filter(|_| instance.origin.block.is_some());
        let of_product = |factor: Factor| {
            let at = gemm?;
            // Inputs and weights are measured where they are read first, so that nothing is kept for it.
            let (_, n, _) = factor.reads().into_iter().find(|(gemm, ..)| *gemm == at)?;
            (factor == Factor::OutputGradient || at == LinearGemm::Fprop).then_some(instance.inputs[n])
        };
        for factor in Factor::ALL {
            let Some(value) = of_product(factor) else { continue };
            let cast = parameters.get(&value).map_or(value, |&n| pass.out.parameters[n].master);
            for (gemm, n, transposed) in factor.reads() {
                let is_here =
                    factor != Factor::OutputGradient || Some(gemm) == instance.code.op().linear_gemm();
                if let Some(factors) = (pass.how)(gemm).filter(|_| is_here) {
                    pass.measure(cast, gemm, factor, factors[n], transposed, &instance)?;
                }
            }
        }
        pass.out.instances.push(instance);
    }
    Ok((pass.out, pass.measured))
}

struct Pass<'a> {
    out: Program,
    ops: &'a dyn MeasuringOps,
    how: &'a dyn Fn(LinearGemm) -> Option<[Quantization; 2]>,
    /// The outputs that tell of a cast in a layout.
    known: HashMap<(ValueId, Quantization, bool), [Arc<str>; 2]>,
    measured: Vec<MeasuredCast>,
}

impl Pass<'_> {
    fn measure(
        &mut self,
        value: ValueId,
        gemm: LinearGemm,
        factor: Factor,
        quantization: Quantization,
        transposed: bool,
        instance: &Instance,
    ) -> Result<(), TraceError> {
        // Whole tensors and square blocks have the same scales either way.
        let turns = matches!(quantization.scaling, Scaling::Row | Scaling::Tile) && transposed;
        let outputs = match self.known.get(&(value, quantization, turns)) {
            Some(outputs) => outputs.clone(),
            None => {
                let origin = Origin { role: Role::Precision, ..instance.origin.clone() };
                // What casts by a scale of earlier steps is measured with its own: there are none in a step that stands alone.
                let quantization = Quantization { delayed: false, ..quantization };
                let quantize = self.ops.quantize(quantization, [!turns, turns]);
                let cast = self.emit(quantize, &[value], origin.clone())?;
                let statistics = self.ops.cast_statistics(quantization.scaling, turns);
                let made = self.emit(statistics, &[value, cast[0], cast[1]], origin)?;
                let name = format!("{}:{} {}", instance.origin, gemm.name(), factor.name());
                let outputs = [format!("{name} counts").into(), format!("{name} sizes").into()];
                for (value, name) in made.iter().zip(&outputs) {
                    self.out.values[value.0 as usize].storage = Storage::Output { name: Arc::clone(name) };
                }
                self.known.insert((value, quantization, turns), outputs.clone());
                outputs
            }
        };
        let elements = self.out.ty(value).numel();
        let layer = instance.origin.clone();
        self.measured.push(MeasuredCast { layer, gemm, factor, quantization, elements, outputs });
        Ok(())
    }

    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        origin: Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, &[], origin)?;
        let made = instance.outputs.iter().map(|o| o.value).collect();
        self.out.instances.push(instance);
        Ok(made)
    }
}
