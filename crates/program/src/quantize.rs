//! The pass that moves the GEMMs of linear layers to FP8 operands.
//!
//! It runs after the backward pass, when all three GEMMs of a layer exist: fprop `x w^T`, dgrad `dy w`, wgrad
//! `dy^T x`. In FP8, tensor cores need both operands contiguous along the inner extent, so one GEMM reads
//! each of x, w and dy row-major and another reads it transposed. The pass casts every value that a GEMM
//! reads once for each layout. If nothing else reads the bf16 value, it is dead after the cast: one byte of
//! each element is saved for the backward instead of two.
//!
//! The FP8 copies of parameters are state. The update refreshes them ([`crate::refresh`]) once a step, for
//! any number of micro-steps.
//!
//! A delayed scale comes from the amaxes of earlier steps. The scale and the amax of the current step are
//! state; the update computes the next scale from the amax ([`Delayed`]). All other casts share one state
//! value, [`AMAX`]: the maximum of their amaxes. A cast saturates, which would hide an infinity, so the
//! update reads [`AMAX`] to decide whether the step was finite.
//!
//! With static scales, casts with delayed scales read constants in place of that state.
//!
//! An op with GEMMs inside, such as the loss with the head's GEMMs, casts their operands itself, except for
//! the weight.
//!
//! The caller chooses the GEMMs and their formats. Model code contains nothing about FP8.

use crate::program::instantiate;
use crate::{
    CastOperand, Code, Delayed, Gemms, Instance, LinearGemm, Op, OpError, OperandSource, Origin, Output,
    Program, Quantization, Quantized, Role, ScaledGemm, Stage, StateKind, StaticScale, Storage, TraceError,
    ValueId, WriteMode,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use xtrain_tensor::{DType, HostTensor, Shape, TensorType};

/// The name of the state value `f32[1]` with the amax of all casts whose scales are not delayed.
pub const AMAX: &str = "amax of casts";

/// The ops that the pass inserts.
pub trait QuantizeOps {
    /// The op that casts a matrix. Its outputs are numbers and scales for each of the `layouts` (row-major,
    /// transposed) that is true, and then the amax, which accumulates as a maximum. Its second input is the
    /// delayed scale, if any; if that is 0, the scale comes from the matrix's own amax.
    fn quantize(&self, quantization: Quantization, layouts: [bool; 2]) -> Arc<dyn Op>;
    /// The op that restores a row-major matrix from its cast by tiles.
    fn dequantize(&self, out: DType) -> Arc<dyn Op>;
}

/// A GEMM that may run on FP8 operands, for the caller's decision.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The layer.
    pub origin: &'a Origin,
    /// Fprop, dgrad or wgrad.
    pub gemm: LinearGemm,
    /// Rows and columns of the result, and the inner extent.
    pub extents: [usize; 3],
}

/// The casts of a value in one quantization. Arrays are by layout: row-major, transposed.
#[derive(Default)]
struct Casts {
    /// The first stage that reads the layout.
    stages: [Option<Stage>; 2],
    /// Numbers and scales, once the cast is emitted.
    values: [Option<[ValueId; 2]>; 2],
    /// The delayed scale, once a cast that uses it is emitted.
    delayed: Option<Delayed>,
}

/// Moves the GEMMs for which `choose` returns a format to FP8 operands. Value ids keep their meaning. Compute
/// copies of parameters that nothing reads afterwards are removed from the state. Delayed scales are those of
/// `static_scale`, if it is given.
///
/// # Errors
/// `static_scale` has no scale for a tensor that is cast with a delayed one.
pub fn apply(
    program: Program,
    ops: &dyn QuantizeOps,
    choose: &dyn Fn(Candidate<'_>) -> Option<ScaledGemm>,
    static_scale: Option<StaticScale<'_>>,
) -> Result<Program, TraceError> {
    let chosen: Vec<Option<Chosen>> =
        program.instances.iter().map(|instance| Chosen::new(&program, instance, choose)).collect();
    if chosen.iter().all(Option::is_none) {
        return Ok(program);
    }
    let mut pass = Pass {
        parameters: program.parameters_by_value(),
        casts: HashMap::new(),
        read_in_backward: HashSet::new(),
        amax: None,
        trains: program.parameters.iter().any(|p| p.gradient.is_some()),
        ops,
        static_scale,
        out: program,
    };
    for (instance, chosen) in pass.out.instances.iter().zip(&chosen) {
        let stage = instance.origin.stage;
        if stage == Stage::Backward {
            let is_gemm = chosen.as_ref().is_some_and(|chosen| chosen.gemms.only().is_some());
            pass.read_in_backward.extend(&instance.inputs[if is_gemm { 2 } else { 0 }..]);
        }
        for operand in chosen.iter().flat_map(Chosen::operands) {
            let casts = pass.casts.entry((instance.inputs[operand.input], operand.quantization)).or_default();
            casts.stages[usize::from(operand.transposed)].get_or_insert(stage);
        }
    }
    let instances = std::mem::take(&mut pass.out.instances);
    for (mut instance, chosen) in instances.into_iter().zip(chosen) {
        if let Some(chosen) = chosen {
            match chosen.gemms.only() {
                Some(_) => pass.replace_gemm(&mut instance, &chosen)?,
                None => pass.replace_gemms_inside(&mut instance, &chosen)?,
            }
        }
        pass.out.instances.push(instance);
    }
    Ok(without_unread_copies(pass.out))
}

/// The GEMMs of an instance that run on FP8 operands.
struct Chosen {
    gemms: Gemms,
    /// In the order of [`LinearGemm::ALL`].
    formats: [Option<ScaledGemm>; 3],
}

/// An input of an instance that the pass casts as an operand of a GEMM.
struct CastInput {
    /// The index of the input.
    input: usize,
    quantization: Quantization,
    transposed: bool,
    gemm: LinearGemm,
}

impl Chosen {
    fn new(
        program: &Program,
        instance: &Instance,
        choose: &dyn Fn(Candidate<'_>) -> Option<ScaledGemm>,
    ) -> Option<Chosen> {
        let gemms = instance.code.op().gemms(&program.input_types(instance))?;
        let formats = LinearGemm::ALL.map(|kind| {
            let gemm = gemms.list.iter().find(|gemm| gemm.kind == kind)?;
            choose(Candidate { origin: &instance.origin, gemm: kind, extents: gemm.extents })
        });
        formats.iter().any(Option::is_some).then_some(Chosen { gemms, formats })
    }

    /// The operands that are inputs of the instance.
    fn operands(&self) -> Vec<CastInput> {
        let mut operands = Vec::new();
        for gemm in &self.gemms.list {
            let Some(format) = self.formats[gemm.kind as usize] else { continue };
            for (n, transposed) in gemm.kind.transposed().into_iter().enumerate() {
                if let OperandSource::Input(input) = gemm.operands[n] {
                    let quantization = format.operands[n];
                    operands.push(CastInput { input, quantization, transposed, gemm: gemm.kind });
                }
            }
        }
        operands
    }
}

struct Pass<'a> {
    out: Program,
    parameters: HashMap<ValueId, usize>,
    casts: HashMap<(ValueId, Quantization), Casts>,
    /// Values that the backward also reads in their own type. They are saved in any case, so the backward
    /// casts them again instead of reading a saved cast.
    read_in_backward: HashSet<ValueId>,
    /// The state value [`AMAX`], once a cast writes it.
    amax: Option<ValueId>,
    /// True in training, where amaxes are recorded for the scales of later steps.
    trains: bool,
    ops: &'a dyn QuantizeOps,
    static_scale: Option<StaticScale<'a>>,
}

impl Pass<'_> {
    /// Replaces a GEMM with its FP8 twin, after emitting the casts that it is the first to read.
    fn replace_gemm(&mut self, instance: &mut Instance, chosen: &Chosen) -> Result<(), TraceError> {
        let mut inputs = Vec::new();
        for operand in chosen.operands() {
            inputs.extend(self.cast(instance.inputs[operand.input], &operand, &instance.origin)?);
        }
        inputs.extend(&instance.inputs[2..]);
        let code = Code::Plain((chosen.gemms.in_fp8)(chosen.formats));
        let targets = [Some(instance.outputs[0].value)];
        let twin = instantiate(&mut self.out, code, &inputs, &targets, instance.origin.clone())?;
        *instance = Instance { outputs: instance.outputs.clone(), ..twin };
        Ok(())
    }

    /// Replaces an op with GEMMs inside with its FP8 twin, which casts all operands except the weight.
    fn replace_gemms_inside(&mut self, instance: &mut Instance, chosen: &Chosen) -> Result<(), TraceError> {
        let origin = instance.origin.clone();
        let mut inputs = vec![instance.inputs[0]];
        inputs.extend(&instance.inputs[2..]);
        let operands = chosen.operands();
        for gemm in [LinearGemm::Fprop, LinearGemm::Dgrad] {
            match operands.iter().find(|operand| operand.gemm == gemm) {
                Some(operand) => {
                    inputs.extend(self.cast(instance.inputs[operand.input], operand, &origin)?)
                }
                None if chosen.gemms.list.iter().any(|found| found.kind == gemm) => {
                    inputs.push(instance.inputs[1]);
                }
                None => {}
            }
        }
        let [fprop, dgrad, wgrad] = chosen.formats;
        let quantization = |gemm: Option<ScaledGemm>, n: usize| gemm.map(|gemm| gemm.operands[n]);
        let casts = [
            (CastOperand::Input, quantization(fprop, 0).or(quantization(wgrad, 1))),
            (CastOperand::OutputGradient, quantization(dgrad, 0).or(quantization(wgrad, 0))),
        ];
        let mut amaxes = Vec::new();
        for (operand, quantization) in casts {
            if let Some(quantization) = quantization.filter(|quantization| quantization.delayed) {
                let delayed = self.add_delayed(name_of(&origin, operand), &origin, operand, quantization)?;
                inputs.push(delayed.scale);
                amaxes.push(
                    self.trains.then_some(Output { value: delayed.amax, mode: WriteMode::AddAfterFirst }),
                );
            }
        }
        if casts.iter().any(|(_, quantization)| quantization.is_some_and(|q| !q.delayed)) {
            amaxes.push(Some(self.next_amax()));
        }
        let targets: Vec<_> = instance.outputs.iter().map(|output| Some(output.value)).collect();
        let code = Code::Plain((chosen.gemms.in_fp8)(chosen.formats));
        let mut twin = instantiate(&mut self.out, code, &inputs, &targets, origin)?;
        let outputs = instance.outputs.iter().copied().map(Some).chain(amaxes);
        for (output, target) in twin.outputs.iter_mut().zip(outputs) {
            *output = target.unwrap_or(*output);
        }
        *instance = twin;
        Ok(())
    }

    /// The state value [`AMAX`], as the next cast writes it.
    fn next_amax(&mut self) -> Output {
        let mode = if self.amax.is_none() { WriteMode::AddAfterFirst } else { WriteMode::Add };
        let value = *self.amax.get_or_insert_with(|| {
            self.out.add_state(StateKind::Amax, &AMAX.into(), TensorType::new(DType::F32, [1]))
        });
        Output { value, mode }
    }

    /// The numbers and scales of a value that is cast as an operand of a layer's GEMM. The first call emits
    /// the cast, in all layouts that the program reads.
    fn cast(
        &mut self,
        value: ValueId,
        operand: &CastInput,
        origin: &Origin,
    ) -> Result<[ValueId; 2], TraceError> {
        let &CastInput { quantization, transposed, .. } = operand;
        let key = (value, quantization);
        let layout = usize::from(transposed);
        let casts = &self.casts[&key];
        if let Some(values) = casts.values[layout] {
            return Ok(values);
        }
        let parameter = self.parameters.get(&value).copied();
        // Casting again in the backward is cheaper than saving the transposed cast of the forward.
        let is_cast_again =
            parameter.is_none() && origin.stage == Stage::Forward && self.read_in_backward.contains(&value);
        let layouts = [0, 1].map(|n| {
            let is_needed = casts.stages[n].is_some_and(|stage| !is_cast_again || stage == Stage::Forward);
            is_needed && casts.values[n].is_none()
        });
        let op = self.ops.quantize(quantization, layouts);
        let values = match parameter {
            Some(parameter) => self.cast_parameter(parameter, key, layouts, op.as_ref(), origin)?,
            None => self.cast_activation(key, op, operand, origin)?,
        };
        let mut pairs = values.as_chunks::<2>().0.iter().copied();
        let Some(casts) = self.casts.get_mut(&key) else { unreachable!("the entry was read above") };
        for (pair, is_cast) in casts.values.iter_mut().zip(layouts) {
            *pair = if is_cast { pairs.next() } else { *pair };
        }
        casts.values[layout]
            .ok_or_else(|| unreachable!("the cast writes every layout that the program reads"))
    }

    /// Emits a cast before the first GEMM that reads it. Returns the outputs without the amax.
    fn cast_activation(
        &mut self,
        key: (ValueId, Quantization),
        op: Arc<dyn Op>,
        operand: &CastInput,
        origin: &Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let is_first = self.casts[&key].delayed.is_none();
        // Wgrad reads the input of fprop, except if the input is restored from fewer bits.
        let operand = match (operand.gemm, operand.input) {
            (LinearGemm::Fprop, _) => CastOperand::Input,
            (LinearGemm::Wgrad, 1) => CastOperand::WgradInput,
            _ => CastOperand::OutputGradient,
        };
        let delayed = self.delayed(key, name_of(origin, operand), origin, operand)?;
        let inputs: Vec<_> = [key.0].into_iter().chain(delayed.as_ref().map(|d| d.scale)).collect();
        let origin = Origin { role: Role::Precision, ..origin.clone() };
        let mut cast = instantiate(&mut self.out, Code::Plain(op), &inputs, &[], origin)?;
        let target = match delayed {
            // Only the first cast records it: a cast in the other layout has the same amax.
            Some(delayed) => (self.trains && is_first)
                .then_some(Output { value: delayed.amax, mode: WriteMode::AddAfterFirst }),
            None => Some(self.next_amax()),
        };
        let values = cast.outputs.iter().map(|o| o.value).take(cast.outputs.len() - 1).collect();
        if let (Some(amax), Some(target)) = (cast.outputs.last_mut(), target) {
            *amax = target;
        }
        self.out.instances.push(cast);
        Ok(values)
    }

    /// The delayed scale of a value, if its cast has one. The first call adds it under `name`; `layer` reads
    /// the value as `operand`.
    fn delayed(
        &mut self,
        key: (ValueId, Quantization),
        name: String,
        layer: &Origin,
        operand: CastOperand,
    ) -> Result<Option<Delayed>, TraceError> {
        if !key.1.delayed || self.casts[&key].delayed.is_some() {
            return Ok(self.casts[&key].delayed.clone());
        }
        let delayed = self.add_delayed(name, layer, operand, key.1)?;
        if let Some(casts) = self.casts.get_mut(&key) {
            casts.delayed = Some(delayed.clone());
        }
        Ok(Some(delayed))
    }

    /// Adds the state of a delayed scale, or the constant of a static one.
    fn add_delayed(
        &mut self,
        name: String,
        layer: &Origin,
        operand: CastOperand,
        quantization: Quantization,
    ) -> Result<Delayed, TraceError> {
        let (name, layer): (Arc<str>, _) = (name.into(), layer.clone());
        let ty = |shape: &[usize]| TensorType { dtype: DType::F32, shape: Shape::new(shape) };
        let amax = self.out.add_state(StateKind::Amax, &name, ty(&[1]));
        let scale = match self.static_scale {
            None => self.out.add_state(StateKind::Scale, &name, ty(&[1, 1])),
            Some(of) => {
                let missing = || TraceError {
                    site: layer.to_string(),
                    op: "quantize",
                    operands: operand.name().to_owned(),
                    error: OpError("there is no static scale for it".into()),
                };
                let scale = of(&layer, operand).ok_or_else(missing)?;
                self.out.add_value(ty(&[1, 1]), constant_scale(&name, scale))
            }
        };
        let Quantization { format, pow2_scales, .. } = quantization;
        let delayed = Delayed { name, layer, operand, format, pow2_scales, amax, scale };
        if self.trains {
            self.out.delayed.push(delayed.clone());
        }
        Ok(delayed)
    }

    /// Adds the state that a cast of a parameter's master writes.
    fn cast_parameter(
        &mut self,
        parameter: usize,
        key: (ValueId, Quantization),
        layouts: [bool; 2],
        op: &dyn Op,
        origin: &Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let (name, master) =
            (self.out.parameters[parameter].name.clone(), self.out.parameters[parameter].master);
        let delayed = self.delayed(key, name.to_string(), origin, CastOperand::Weight)?;
        let mut inputs = vec![self.out.ty(master)];
        inputs.extend(delayed.as_ref().map(|d| self.out.ty(d.scale)));
        let types = op.infer(&inputs).map_err(|error| TraceError {
            site: name.to_string(),
            op: op.name(),
            operands: self.out.ty(master).to_string(),
            error,
        })?;
        let Quantization { format, scaling, pow2_scales, .. } = key.1;
        let powers = if pow2_scales { ", powers of two" } else { "" };
        let [row_major, transposed] = layouts;
        let written = [("row-major", row_major), ("transposed", transposed)];
        let names = written.into_iter().filter(|(_, is_cast)| *is_cast).flat_map(|(layout, _)| {
            ["", " scales"].map(|part| format!("{name} {format}{part} ({scaling:?}{powers}, {layout})"))
        });
        let values: Vec<ValueId> = (names.zip(&types))
            .map(|(name, &ty)| self.out.add_state(StateKind::Compute, &name.into(), ty))
            .collect();
        let origin = Origin { role: Role::Precision, ..origin.clone() };
        let quantized = Quantized { quantization: key.1, layouts, origin, values: values.clone(), delayed };
        self.out.parameters[parameter].quantized.push(quantized);
        Ok(values)
    }
}

/// The name of the scale of a tensor that is no parameter.
fn name_of(layer: &Origin, operand: CastOperand) -> String {
    format!("{layer} {}", operand.name())
}

/// A static scale `f32[1, 1]`. The value is a part of its name, because programs share constants by name.
pub(crate) fn constant_scale(tensor: &str, scale: f32) -> Storage {
    let ty = TensorType::new(DType::F32, [1, 1]);
    let make = move || HostTensor::from_f64(ty, &[scale.into()]);
    Storage::Constant { name: format!("{tensor} scale {scale:e}").into(), make: Arc::new(make) }
}

/// The program without the compute copies of parameters that nothing reads.
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
