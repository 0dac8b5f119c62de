//! The pass that has the products of linear layers computed of FP8 factors.
//!
//! It runs behind the backward pass, where all three products of a layer are known: fprop `x w^T`, dgrad `dy w`, wgrad `dy^T x`. Tensor
//! cores want both factors of FP8 along what is summed, so each of x, w and dy is needed as it stands by one product and transposed by
//! another. The pass gives every value that a product reads its *representations*: quantized in the layouts that its products need, with
//! their scales, each made once. What an activation's representation is made of is then needed no longer: the planner lets go of it, and
//! between forward and backward one byte an element is kept where two were.
//!
//! Representations of parameters are state, made with the update ([`crate::Parameter::quantized`]): once a step, whatever the accumulation.
//!
//! The scale of a cast may be of the amaxes of earlier steps: then it is state, and so is the amax of this step, of which the update makes the
//! next scale ([`Delayed`]).
//!
//! Every other cast raises one state value, [`AMAX`], to the largest magnitude that it met: a cast saturates and would hide an infinity, so
//! the update reads there whether the step was finite.
//!
//! Which products, and how, is asked of whoever runs the pass; model code knows nothing of it.

use crate::trace::instantiate;
use crate::{
    Code, Instance, Op, Origin, Output, Program, Role, Stage, StateKind, Storage, TraceError, ValueId,
    WriteMode,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use xtrain_tensor::{DType, Scaling, Shape, TensorType};

/// The name of the state value `f32[1]` that casts raise.
pub const AMAX: &str = "largest magnitude cast";

/// One of the three products of a linear layer: what it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearGemm {
    /// `y_to = x_ti w_oi^T (+ bias_o)`: inputs x, w, bias.
    Fprop,
    /// `dx_ti = dy_to w_oi`: inputs dy, w.
    Dgrad,
    /// `dw_oi = dy_to^T x_ti`: inputs dy, x.
    Wgrad,
}

impl LinearGemm {
    /// All three.
    pub const ALL: [LinearGemm; 3] = [LinearGemm::Fprop, LinearGemm::Dgrad, LinearGemm::Wgrad];

    /// Its name, which is that of the role of its instances.
    pub const fn name(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "fprop",
            LinearGemm::Dgrad => "dgrad",
            LinearGemm::Wgrad => "wgrad",
        }
    }

    /// In which layout the product needs each of its first two inputs: whether transposed.
    const fn transposed(self) -> [bool; 2] {
        match self {
            LinearGemm::Fprop => [false, false],
            LinearGemm::Dgrad => [false, true],
            LinearGemm::Wgrad => [true, true],
        }
    }
}

/// How a tensor is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// E4M3 or E5M2.
    pub format: DType,
    /// Which elements share a scale, seen as the product sees the factor.
    pub scaling: Scaling,
    /// Whether scales are powers of two.
    pub pow2_scales: bool,
    /// Whether the scale, one of the whole tensor, is of the amaxes of earlier steps.
    pub delayed: bool,
}

/// A tensor that is cast with a scale of earlier steps' amaxes. All of it is state, found by `name`.
#[derive(Clone, Debug)]
pub struct Delayed {
    /// Of the layer that reads it first, and as what it reads it.
    pub name: Arc<str>,
    /// What it is cast to.
    pub format: DType,
    /// Whether its scale is a power of two.
    pub pow2_scales: bool,
    /// [`StateKind::Amax`], `f32[1]`: the largest magnitude of this step.
    pub amax: ValueId,
    /// [`StateKind::Scale`], `f32[1, 1]`: 0 where there is none yet.
    pub scale: ValueId,
}

/// How a product is computed of FP8 factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaledGemm {
    /// How its first two inputs are cast.
    pub factors: [Quantization; 2],
    /// Whether sums may stay in the tensor cores.
    pub fast_accumulation: bool,
}

/// The ops that the pass inserts.
pub trait QuantizedOps {
    /// Casts a matrix; outputs are, for each layout that is made (as it stands, transposed), the numbers and their scales, and at last the
    /// largest magnitude, which accumulates as the largest of all. Where the scale is delayed it is a second input, and where that is 0 the
    /// matrix's own takes its place.
    fn quantize(&self, quantization: Quantization, made: [bool; 2]) -> Arc<dyn Op>;
    /// Restores what was cast by tiles, as it stands.
    fn dequantize(&self, out: DType) -> Arc<dyn Op>;
    /// The product of what [`QuantizedOps::quantize`] makes: numbers and scales of both factors, and a bias where there is one.
    fn scaled_matmul(&self, gemm: ScaledGemm, out: DType, bias: bool) -> Arc<dyn Op>;
}

/// A product as whoever chooses is shown it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Where it is.
    pub origin: &'a Origin,
    /// Which of the three.
    pub gemm: LinearGemm,
    /// Rows and columns of the result, and what is summed.
    pub extents: [usize; 3],
}

/// The representations of a parameter that one op makes of its master.
#[derive(Clone)]
pub struct Quantized {
    /// What makes them.
    pub op: Arc<dyn Op>,
    /// Of what needs them first.
    pub origin: Origin,
    /// Its outputs that are state: numbers and scales of the layouts.
    pub values: Vec<ValueId>,
    /// Where its scale is of earlier steps.
    pub delayed: Option<Delayed>,
}

/// What is needed of a value in one quantization: as it stands, and transposed.
#[derive(Default)]
struct Need {
    /// From which stage on.
    stages: [Option<Stage>; 2],
    /// Numbers and scales, once they are made.
    values: [Option<[ValueId; 2]>; 2],
    /// Of a tensor with a scale of earlier steps, once it is cast.
    delayed: Option<Delayed>,
}

/// Has the products for which `choose` returns a way computed of FP8 factors. Value ids keep their meaning; what nothing reads any more is
/// transient.
pub fn apply(
    program: Program,
    ops: &dyn QuantizedOps,
    choose: &dyn Fn(Candidate<'_>) -> Option<ScaledGemm>,
) -> Result<Program, TraceError> {
    let chosen: Vec<Option<(LinearGemm, ScaledGemm)>> = program
        .instances
        .iter()
        .map(|instance| {
            let gemm = instance.code.op().linear_gemm()?;
            let extents = extents(&program, instance, gemm);
            Some((gemm, choose(Candidate { origin: &instance.origin, gemm, extents })?))
        })
        .collect();
    if chosen.iter().all(Option::is_none) {
        return Ok(program);
    }
    let parameters = program.parameters_by_value();
    let records = program.parameters.iter().any(|p| p.gradient.is_some());
    let mut pass = Pass {
        parameters,
        needs: HashMap::new(),
        kept: HashSet::new(),
        amax: None,
        records,
        ops,
        out: program,
    };
    for (instance, chosen) in pass.out.instances.iter().zip(&chosen) {
        let stage = instance.origin.stage;
        let replaced = if chosen.is_some() { 2 } else { 0 };
        if stage == Stage::Backward {
            pass.kept.extend(&instance.inputs[replaced..]);
        }
        let Some((gemm, how)) = chosen else { continue };
        for (n, transposed) in gemm.transposed().into_iter().enumerate() {
            let need = pass.needs.entry((instance.inputs[n], how.factors[n])).or_default();
            need.stages[usize::from(transposed)].get_or_insert(stage);
        }
    }
    let instances = std::mem::take(&mut pass.out.instances);
    for (mut instance, chosen) in instances.into_iter().zip(chosen) {
        if let Some((gemm, how)) = chosen {
            pass.lower(&mut instance, gemm, how)?;
        }
        pass.out.instances.push(instance);
    }
    Ok(without_unread_copies(pass.out))
}

/// Rows and columns of the result, and what is summed.
fn extents(program: &Program, instance: &Instance, gemm: LinearGemm) -> [usize; 3] {
    let shape = |n: usize| program.ty(instance.inputs[n]).shape.rows_cols();
    let ((rows, cols), (other_rows, other_cols)) = (shape(0), shape(1));
    match gemm {
        LinearGemm::Fprop => [rows, other_rows, cols],
        LinearGemm::Dgrad => [rows, other_cols, cols],
        LinearGemm::Wgrad => [cols, other_cols, rows],
    }
}

struct Pass<'a> {
    out: Program,
    parameters: HashMap<ValueId, usize>,
    needs: HashMap<(ValueId, Quantization), Need>,
    /// What the backward reads itself, so that it is there to be cast again: nothing else of it is kept.
    kept: HashSet<ValueId>,
    amax: Option<ValueId>,
    /// Whether what is cast is noted for the scales of later steps: in training.
    records: bool,
    ops: &'a dyn QuantizedOps,
}

impl Pass<'_> {
    /// Makes a product one of FP8 factors; emits what makes these, where that was not done for another.
    fn lower(
        &mut self,
        instance: &mut Instance,
        gemm: LinearGemm,
        how: ScaledGemm,
    ) -> Result<(), TraceError> {
        let mut inputs = Vec::new();
        for (n, transposed) in gemm.transposed().into_iter().enumerate() {
            inputs.extend(self.representation(
                instance.inputs[n],
                how.factors[n],
                transposed,
                &instance.origin,
                (gemm, n),
            )?);
        }
        inputs.extend(&instance.inputs[2..]);
        let out = self.out.ty(instance.outputs[0].value).dtype;
        let op = self.ops.scaled_matmul(how, out, instance.inputs.len() > 2);
        let targets = [Some(instance.outputs[0].value)];
        let origin = instance.origin.clone();
        let lowered = instantiate(&mut self.out, Code::Plain(op), &inputs, &targets, origin)?;
        let modes = lowered.outputs.into_iter().zip(&instance.outputs);
        let outputs = modes.map(|(made, was)| Output { mode: was.mode, ..made }).collect();
        *instance = Instance { outputs, code: lowered.code, inputs, ..instance.clone() };
        Ok(())
    }

    /// Numbers and scales of a value in one layout.
    fn representation(
        &mut self,
        value: ValueId,
        quantization: Quantization,
        transposed: bool,
        origin: &Origin,
        factor: (LinearGemm, usize),
    ) -> Result<[ValueId; 2], TraceError> {
        let layout = usize::from(transposed);
        let need = &self.needs[&(value, quantization)];
        if let Some(values) = need.values[layout] {
            return Ok(values);
        }
        let parameter = self.parameters.get(&value).copied();
        // A second cast costs less than what it makes costs memory from the forward on.
        let later = parameter.is_none() && origin.stage == Stage::Forward && self.kept.contains(&value);
        let made = [0, 1].map(|n| {
            let is_needed = need.stages[n].is_some_and(|stage| !later || stage == Stage::Forward);
            is_needed && need.values[n].is_none()
        });
        let op = self.ops.quantize(quantization, made);
        let values = match parameter {
            Some(parameter) => {
                self.quantized_parameter((parameter, value), quantization, made, op, origin)?
            }
            None => self.quantized_activation(value, quantization, op, origin, factor)?,
        };
        let mut pairs = values.as_chunks::<2>().0.iter().copied();
        let Some(need) = self.needs.get_mut(&(value, quantization)) else {
            unreachable!("it was read above")
        };
        for (held, is_made) in need.values.iter_mut().zip(made) {
            *held = if is_made { pairs.next() } else { *held };
        }
        need.values[layout].ok_or_else(|| unreachable!("every layout that is needed was noted"))
    }

    /// The outputs of a cast in front of what needs it first.
    fn quantized_activation(
        &mut self,
        value: ValueId,
        quantization: Quantization,
        op: Arc<dyn Op>,
        origin: &Origin,
        (gemm, n): (LinearGemm, usize),
    ) -> Result<Vec<ValueId>, TraceError> {
        let key = (value, quantization);
        let is_first = self.needs[&key].delayed.is_none();
        // The input of wgrad is that of fprop, unless it was made again of less.
        let what = match (gemm, n) {
            (LinearGemm::Fprop, _) => "input",
            (LinearGemm::Wgrad, 1) => "input of wgrad",
            _ => "output gradient",
        };
        let delayed = quantization.delayed.then(|| self.delayed(key, format!("{origin} {what}")));
        let inputs: Vec<_> = [value].into_iter().chain(delayed.as_ref().map(|d| d.scale)).collect();
        let origin = Origin { role: Role::Precision, ..origin.clone() };
        let mut cast = instantiate(&mut self.out, Code::Plain(op), &inputs, &[], origin)?;
        let recorded = match delayed {
            // Once: what is cast again, for the other layout, is what it was.
            Some(delayed) => (self.records && is_first).then_some((delayed.amax, WriteMode::AddAfterFirst)),
            None => {
                let mode = if self.amax.is_none() { WriteMode::AddAfterFirst } else { WriteMode::Add };
                let amax = *self.amax.get_or_insert_with(|| {
                    self.out.add_state(StateKind::Amax, &AMAX.into(), TensorType::new(DType::F32, [1]))
                });
                Some((amax, mode))
            }
        };
        let values: Vec<_> = cast.outputs.iter().map(|o| o.value).take(cast.outputs.len() - 1).collect();
        if let (Some(last), Some((value, mode))) = (cast.outputs.last_mut(), recorded) {
            *last = Output { value, mode };
        }
        for made in &values {
            self.out.values[made.0 as usize].represents = Some(value);
        }
        self.out.instances.push(cast);
        Ok(values)
    }

    /// The state of a tensor that is cast with a scale of earlier steps, called `name` if this is its first cast.
    fn delayed(&mut self, key: (ValueId, Quantization), name: String) -> Delayed {
        if let Some(known) = self.needs[&key].delayed.clone() {
            return known;
        }
        let name: Arc<str> = name.into();
        let mut state = |kind, shape: &[usize]| {
            let ty = TensorType { dtype: DType::F32, shape: Shape::new(shape) };
            self.out.add_state(kind, &name, ty)
        };
        let (amax, scale) = (state(StateKind::Amax, &[1]), state(StateKind::Scale, &[1, 1]));
        let Quantization { format, pow2_scales, .. } = key.1;
        let delayed = Delayed { name, format, pow2_scales, amax, scale };
        if self.records {
            self.out.delayed.push(delayed.clone());
        }
        if let Some(need) = self.needs.get_mut(&key) {
            need.delayed = Some(delayed.clone());
        }
        delayed
    }

    /// State for what a cast makes of a master.
    fn quantized_parameter(
        &mut self,
        (parameter, value): (usize, ValueId),
        quantization: Quantization,
        made: [bool; 2],
        op: Arc<dyn Op>,
        origin: &Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let (name, master) =
            (self.out.parameters[parameter].name.clone(), self.out.parameters[parameter].master);
        let delayed = quantization.delayed.then(|| self.delayed((value, quantization), name.to_string()));
        let mut inputs = vec![self.out.ty(master)];
        inputs.extend(delayed.as_ref().map(|d| self.out.ty(d.scale)));
        let types = op.infer(&inputs).map_err(|error| TraceError {
            site: name.to_string(),
            op: op.name(),
            operands: self.out.ty(master).to_string(),
            error,
        })?;
        let Quantization { format, scaling, pow2_scales, .. } = quantization;
        let powers = if pow2_scales { ", powers of two" } else { "" };
        let layouts =
            [("as it stands", made[0]), ("transposed", made[1])].into_iter().filter(|(_, made)| *made);
        let names = layouts.flat_map(|(layout, _)| {
            ["", " scales"].map(|what| format!("{name} {format}{what} ({scaling:?}{powers}, {layout})"))
        });
        let mut values = Vec::new();
        for (name, &ty) in names.zip(&types) {
            let value = self.out.add_state(StateKind::Compute, &name.into(), ty);
            self.out.values[value.0 as usize].represents = Some(master);
            values.push(value);
        }
        self.out.parameters[parameter].quantized.push(Quantized {
            op,
            origin: Origin { role: Role::Precision, ..origin.clone() },
            values: values.clone(),
            delayed,
        });
        Ok(values)
    }
}

/// The program without the copies of parameters that nothing reads any more.
fn without_unread_copies(mut program: Program) -> Program {
    let mut is_read = vec![false; program.values.len()];
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        is_read[v.0 as usize] = true;
    }
    for parameter in &mut program.parameters {
        if let Some(copy) = parameter.compute.filter(|copy| !is_read[copy.0 as usize]) {
            program.values[copy.0 as usize].storage = Storage::Transient;
            parameter.compute = None;
        }
    }
    program
}

/// Appends what makes the representations of all parameters of their masters.
pub fn remake(mut program: Program, stage: Stage) -> Result<Program, TraceError> {
    for parameter in program.parameters.clone() {
        for Quantized { op, origin, values, delayed } in &parameter.quantized {
            let origin = Origin { stage, ..origin.clone() };
            let states = values.iter().copied().chain(delayed.as_ref().map(|d| d.amax));
            let targets: Vec<_> = states.map(Some).collect();
            let inputs: Vec<_> =
                [parameter.master].into_iter().chain(delayed.as_ref().map(|d| d.scale)).collect();
            let code = Code::Plain(op.clone());
            let instance = instantiate(&mut program, code, &inputs, &targets, origin)?;
            program.instances.push(instance);
        }
    }
    Ok(program)
}
