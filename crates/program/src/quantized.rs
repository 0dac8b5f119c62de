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
//! An op that has products inside, as the loss has those of the head, casts what they multiply itself, but for the weight.
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

    /// Rows and columns of its result, and what is summed, of a layer of so many outputs and inputs.
    pub const fn extents(self, tokens: usize, outputs: usize, inputs: usize) -> [usize; 3] {
        match self {
            LinearGemm::Fprop => [tokens, outputs, inputs],
            LinearGemm::Dgrad => [tokens, inputs, outputs],
            LinearGemm::Wgrad => [outputs, inputs, tokens],
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
    let chosen: Vec<Chosen> =
        program.instances.iter().map(|instance| Chosen::of(&program, instance, choose)).collect();
    if chosen.iter().all(|chosen| matches!(chosen, Chosen::Nothing)) {
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
        if stage == Stage::Backward {
            let replaced = if matches!(chosen, Chosen::Itself(..)) { 2 } else { 0 };
            pass.kept.extend(&instance.inputs[replaced..]);
        }
        for (n, how, transposed) in chosen.factors() {
            let need = pass.needs.entry((instance.inputs[n], how)).or_default();
            need.stages[usize::from(transposed)].get_or_insert(stage);
        }
    }
    let instances = std::mem::take(&mut pass.out.instances);
    for (mut instance, chosen) in instances.into_iter().zip(chosen) {
        match chosen {
            Chosen::Nothing => {}
            Chosen::Itself(gemm, how) => pass.lower(&mut instance, gemm, how)?,
            Chosen::Inside(hows) => pass.lower_inside(&mut instance, hows)?,
        }
        pass.out.instances.push(instance);
    }
    Ok(without_unread_copies(pass.out))
}

/// What of an instance is computed of FP8 factors.
enum Chosen {
    Nothing,
    /// The product that it is.
    Itself(LinearGemm, ScaledGemm),
    /// Of the products that it has inside.
    Inside([Option<ScaledGemm>; 3]),
}

impl Chosen {
    fn of(
        program: &Program,
        instance: &Instance,
        choose: &dyn Fn(Candidate<'_>) -> Option<ScaledGemm>,
    ) -> Chosen {
        let (op, origin) = (instance.code.op(), &instance.origin);
        let shape = |n: usize| program.ty(instance.inputs[n]).shape.rows_cols();
        if let Some(gemm) = op.linear_gemm() {
            let ((rows, cols), (other_rows, other_cols)) = (shape(0), shape(1));
            let [tokens, outputs, inputs] = match gemm {
                LinearGemm::Fprop => [rows, other_rows, cols],
                LinearGemm::Dgrad | LinearGemm::Wgrad => [rows, cols, other_cols],
            };
            let extents = gemm.extents(tokens, outputs, inputs);
            return match choose(Candidate { origin, gemm, extents }) {
                Some(how) => Chosen::Itself(gemm, how),
                None => Chosen::Nothing,
            };
        }
        let inner = op.inner_gemms();
        let hows = LinearGemm::ALL.map(|gemm| {
            let is_inside = inner.contains(&gemm);
            is_inside.then(|| {
                let ((tokens, inputs), (outputs, _)) = (shape(0), shape(1));
                choose(Candidate { origin, gemm, extents: gemm.extents(tokens, outputs, inputs) })
            })?
        });
        if hows.iter().all(Option::is_none) { Chosen::Nothing } else { Chosen::Inside(hows) }
    }

    /// The factors that the program has: which input each is, how it is cast, and whether its transpose is needed.
    fn factors(&self) -> Vec<(usize, Quantization, bool)> {
        match self {
            Chosen::Nothing => Vec::new(),
            Chosen::Itself(gemm, how) => {
                let transposed = gemm.transposed().into_iter().enumerate();
                transposed.map(|(n, transposed)| (n, how.factors[n], transposed)).collect()
            }
            Chosen::Inside([fprop, dgrad, _]) => {
                let weight =
                    |how: &Option<ScaledGemm>, transposed| Some((1, how.as_ref()?.factors[1], transposed));
                [weight(fprop, false), weight(dgrad, true)].into_iter().flatten().collect()
            }
        }
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

    /// Has products inside an instance be of FP8 factors: it casts all but the weight itself.
    fn lower_inside(
        &mut self,
        instance: &mut Instance,
        hows: [Option<ScaledGemm>; 3],
    ) -> Result<(), TraceError> {
        let (op, origin) = (instance.code.op(), instance.origin.clone());
        let Some(scaled) = op.with_fp8_gemms(hows) else {
            unreachable!("{} has products inside, so it can have them of FP8 factors", op.name())
        };
        let inner = op.inner_gemms();
        let weight = instance.inputs[1];
        let mut inputs = vec![instance.inputs[0]];
        inputs.extend(&instance.inputs[2..]);
        for (gemm, how) in [LinearGemm::Fprop, LinearGemm::Dgrad].into_iter().zip(hows) {
            match how {
                Some(how) => {
                    let transposed = gemm.transposed()[1];
                    let factor = (gemm, 1);
                    inputs.extend(self.representation(
                        weight,
                        how.factors[1],
                        transposed,
                        &origin,
                        factor,
                    )?);
                }
                None if inner.contains(&gemm) => inputs.push(weight),
                None => {}
            }
        }
        let [fprop, dgrad, wgrad] = hows;
        let factor = |how: Option<ScaledGemm>, n: usize| how.map(|how| how.factors[n]);
        let casts = [
            ("input", factor(fprop, 0).or(factor(wgrad, 1))),
            ("output gradient", factor(dgrad, 0).or(factor(wgrad, 0))),
        ];
        let mut amaxes = Vec::new();
        for (what, how) in casts {
            if let Some(how) = how.filter(|how| how.delayed) {
                let delayed = self.delayed_state(format!("{origin} {what}"), how);
                inputs.push(delayed.scale);
                amaxes.push(self.records.then_some((delayed.amax, WriteMode::AddAfterFirst)));
            }
        }
        if casts.iter().any(|(_, how)| how.is_some_and(|how| !how.delayed)) {
            amaxes.push(Some(self.raised()));
        }
        let targets: Vec<_> = instance.outputs.iter().map(|output| Some(output.value)).collect();
        let lowered = instantiate(&mut self.out, Code::Plain(scaled), &inputs, &targets, origin)?;
        let was = instance.outputs.iter().map(|output| Some((output.value, output.mode)));
        let recorded = was.chain(amaxes).zip(lowered.outputs);
        let outputs = recorded.map(|(recorded, made)| match recorded {
            Some((value, mode)) => Output { value, mode },
            None => made,
        });
        *instance = Instance { outputs: outputs.collect(), code: lowered.code, inputs, ..instance.clone() };
        Ok(())
    }

    /// Where casts note the largest magnitude that they meet, and how the next one does.
    fn raised(&mut self) -> (ValueId, WriteMode) {
        let mode = if self.amax.is_none() { WriteMode::AddAfterFirst } else { WriteMode::Add };
        let amax = *self.amax.get_or_insert_with(|| {
            self.out.add_state(StateKind::Amax, &AMAX.into(), TensorType::new(DType::F32, [1]))
        });
        (amax, mode)
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
            None => Some(self.raised()),
        };
        let values: Vec<_> = cast.outputs.iter().map(|o| o.value).take(cast.outputs.len() - 1).collect();
        if let (Some(last), Some((value, mode))) = (cast.outputs.last_mut(), recorded) {
            *last = Output { value, mode };
        }
        self.out.instances.push(cast);
        Ok(values)
    }

    /// The state of a tensor that is cast with a scale of earlier steps, called `name` if this is its first cast.
    fn delayed(&mut self, key: (ValueId, Quantization), name: String) -> Delayed {
        if let Some(known) = self.needs[&key].delayed.clone() {
            return known;
        }
        let delayed = self.delayed_state(name, key.1);
        if let Some(need) = self.needs.get_mut(&key) {
            need.delayed = Some(delayed.clone());
        }
        delayed
    }

    /// Such state, of this name.
    fn delayed_state(&mut self, name: String, how: Quantization) -> Delayed {
        let name: Arc<str> = name.into();
        let mut state = |kind, shape: &[usize]| {
            let ty = TensorType { dtype: DType::F32, shape: Shape::new(shape) };
            self.out.add_state(kind, &name, ty)
        };
        let (amax, scale) = (state(StateKind::Amax, &[1]), state(StateKind::Scale, &[1, 1]));
        let Quantization { format, pow2_scales, .. } = how;
        let delayed = Delayed { name, format, pow2_scales, amax, scale };
        if self.records {
            self.out.delayed.push(delayed.clone());
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
