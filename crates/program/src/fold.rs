//! The pass that lets each process compute for several ranks of a tensor group, with their bits.
//!
//! With [`crate::Reduce::AnyMesh`] a model is traced for one rank of a tensor group of a fixed size, the
//! *parts* of a block, whatever ranks there are. Each of n ranks then computes for parts / n of them: it
//! repeats each instance for each part. So all kernels have the shapes that they have on as many ranks as
//! parts, and whatever ranks add is the same binary tree, of which a rank adds the lowest levels. That makes
//! the bits those of any number of tensor ranks.
//!
//! * Tokens that ranks gather are joined first; partial sums that they exchange are added first, in f32.
//! * A parameter is whole. Parts of it are taken, and cast to FP8, where they are read; their gradients are
//!   put into their places in the whole, with zeros elsewhere, and added. So state, its cut among ranks and
//!   their sums are those of data parallelism ([`crate::shard`]).
//! * What all parts compute alike, from gathered tokens alone, is computed once.

use crate::program::instantiate;
use crate::shard::ShardOps;
use crate::{
    Code, Collective, Groups, Instance, Op, Origin, Output, Program, Quantized, Role, RowShard, Stage,
    StateKind, Storage, TENSOR_PLACE, TensorCut, TraceError, ValueId, WriteMode,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::{DType, TensorType};

/// The ops that the pass inserts.
pub trait FoldOps: ShardOps {
    /// The op that stacks its inputs: `[...] -> [n, ...]`.
    fn stack(&self) -> Arc<dyn Op>;
    /// The op that joins its inputs by rows, without the padding after so many rows.
    fn join_rows(&self, rows: usize) -> Arc<dyn Op>;
    /// The op that joins so many lines of equally many rows of each input: the first of all, then the second
    /// of all, and so on.
    fn join_lines(&self, lines: usize) -> Arc<dyn Op>;
    /// If `sum` adds the gradients of experts by the rank of tokens: the lines of its input, one for each
    /// expert and rank, and the op that adds as many times `parts` of them.
    fn sum_of_sources(&self, sum: &dyn Op, parts: usize) -> Option<(usize, Arc<dyn Op>)>;
    /// The op that splits a tensor into so many of equally many rows, with zeros after the last.
    fn split_rows(&self, parts: usize, rows: usize) -> Arc<dyn Op>;
}

/// The parts that a process computes.
#[derive(Clone, Copy, Debug)]
pub struct Folded<'a> {
    /// The tensor group of which the model is traced for one rank; other collectives have other groups.
    pub traced: Groups,
    /// The ranks of a tensor group. They divide those.
    pub ranks: Groups,
    /// Inputs with a row for each token of a part. The process has those of its parts, one after the other.
    pub by_token: &'a [&'a str],
    /// Inputs that differ by part, which the host writes for each ([`input_of`]).
    pub by_part: &'a [&'a str],
    /// Outputs that accumulate as a maximum. The others are sums.
    pub maxima: &'a [String],
}

impl Folded<'_> {
    /// Parts of each rank.
    pub const fn count(&self) -> usize {
        self.traced.size / self.ranks.size
    }
}

/// The name of an input for the `n`-th part of a process.
pub fn input_of(name: &str, n: usize) -> String {
    if n == 0 { name.to_owned() } else { format!("{name}.{n}") }
}

/// Lets a program compute the parts of a rank. Value ids of what is not in parts keep their meaning.
pub fn apply(mut program: Program, folded: &Folded<'_>, ops: &dyn FoldOps) -> Result<Program, TraceError> {
    let instances = std::mem::take(&mut program.instances);
    let (mut modes, mut last_writers) = (HashMap::new(), HashMap::new());
    for (n, instance) in instances.iter().enumerate() {
        for &Output { value, mode } in &instance.outputs {
            modes.entry(value).or_insert(mode);
            last_writers.insert(value, n);
        }
    }
    let mut pass = FoldPass::new(program, *folded, ops);
    pass.make_parameters_whole();
    pass.begin()?;
    for (n, instance) in instances.iter().enumerate() {
        pass.fold(instance)?;
        for Output { value, .. } in &instance.outputs {
            if last_writers[value] == n {
                pass.add_up(*value, modes[value], &instance.origin)?;
            }
        }
    }
    Ok(pass.out)
}

struct FoldPass<'a> {
    out: Program,
    folded: Folded<'a>,
    ops: &'a dyn FoldOps,
    /// The values of each part in place of one that parts have apart.
    parts: HashMap<ValueId, Vec<ValueId>>,
    /// The tensors that parts pass to an exchange, by its output.
    exchanged: HashMap<ValueId, Vec<ValueId>>,
    /// The cut of each whole tensor of which parts are read.
    cuts: HashMap<ValueId, (Arc<str>, TensorCut)>,
    /// The FP8 copies of parts of parameters, with the master, and the place of each value in them.
    casts: Vec<(ValueId, Quantized)>,
    cast_of: HashMap<ValueId, (usize, usize)>,
    /// Parts that are taken, and the outputs of their casts, by stage.
    taken: HashMap<(ValueId, usize, Stage), ValueId>,
    cast: HashMap<(usize, usize, Stage), Vec<ValueId>>,
}

impl<'a> FoldPass<'a> {
    fn new(out: Program, folded: Folded<'a>, ops: &'a dyn FoldOps) -> Self {
        FoldPass {
            out,
            folded,
            ops,
            parts: HashMap::new(),
            exchanged: HashMap::new(),
            cuts: HashMap::new(),
            casts: Vec::new(),
            cast_of: HashMap::new(),
            taken: HashMap::new(),
            cast: HashMap::new(),
        }
    }

    /// Gives parameters that are traced in parts the types of the whole, and gradients of all parameters
    /// values of their own.
    fn make_parameters_whole(&mut self) {
        for p in 0..self.out.parameters.len() {
            let parameter = &mut self.out.parameters[p];
            let gradients = [parameter.gradient, parameter.tied_gradient];
            let (name, master, compute) = (parameter.name.clone(), parameter.master, parameter.compute);
            let part = parameter.part.take();
            let quantized =
                if part.is_some() { std::mem::take(&mut parameter.quantized) } else { Vec::new() };
            let has_parts = part.is_some() || self.folded.count() > 1;
            for gradient in gradients.into_iter().flatten().filter(|_| has_parts) {
                let ty = self.out.ty(gradient);
                let of_parts = (0..self.folded.count()).map(|_| self.out.add_value(ty, Storage::Transient));
                let of_parts = of_parts.collect();
                self.parts.insert(gradient, of_parts);
            }
            let Some(cut) = part else { continue };
            for value in [Some(master), compute].into_iter().chain(gradients).flatten() {
                let ty = &mut self.out.values[value.0 as usize].ty;
                *ty = cut.whole(*ty);
                self.cuts.insert(value, (name.clone(), cut.clone()));
            }
            for copies in quantized {
                for (n, &value) in copies.values.iter().enumerate() {
                    self.out.values[value.0 as usize].storage = Storage::Transient;
                    self.cast_of.insert(value, (self.casts.len(), n));
                }
                self.casts.push((master, copies));
            }
        }
    }

    /// The inputs, outputs and caches of each part.
    fn begin(&mut self) -> Result<(), TraceError> {
        let count = self.folded.count();
        if count == 1 {
            return Ok(());
        }
        for name in self.folded.by_token {
            let Some(input) = self.out.input(name) else { continue };
            let part = self.out.ty(input);
            let rows = part.shape[0];
            self.out.values[input.0 as usize].ty = with_rows(part, count * rows);
            let origin =
                Origin { block: None, site: (*name).into(), role: Role::Precision, stage: Stage::Forward };
            let parts = self.emit(self.ops.split_rows(count, rows), &[input], &[], origin)?;
            self.parts.insert(input, parts);
        }
        for name in self.folded.by_part {
            let Some(input) = self.out.input(name) else { continue };
            let ty = self.out.ty(input);
            let further = (1..count).map(|n| {
                let name = input_of(name, n).into();
                self.out.add_value(ty, Storage::Input { name })
            });
            let parts = std::iter::once(input).chain(further).collect();
            self.parts.insert(input, parts);
        }
        for id in self.out.ids() {
            let Storage::State { kind: StateKind::Cache, name } = &self.out.value(id).storage else {
                continue;
            };
            let (name, ty) = (name.clone(), self.out.ty(id));
            let further =
                (1..count).map(|n| self.out.add_state(StateKind::Cache, &input_of(&name, n).into(), ty));
            let parts = std::iter::once(id).chain(further).collect();
            self.parts.insert(id, parts);
        }
        Ok(())
    }

    /// Emits an instance for all parts.
    fn fold(&mut self, instance: &Instance) -> Result<(), TraceError> {
        if self.folded.count() > 1 {
            match instance.code.op().collective() {
                Some((Collective::AllGather { .. }, groups)) if groups == self.folded.traced => {
                    return self.gather(instance);
                }
                Some((Collective::AllToAll { .. }, groups)) if groups == self.folded.traced => {
                    let sent =
                        (0..self.folded.count()).map(|n| self.input(instance.inputs[0], n, &instance.origin));
                    let sent = sent.collect::<Result<_, _>>()?;
                    self.exchanged.insert(instance.outputs[0].value, sent);
                    return Ok(());
                }
                _ => {}
            }
            if let Some((lines, sum)) = self.ops.sum_of_sources(instance.code.op(), self.folded.count()) {
                return self.add_sources(instance, lines, sum);
            }
            if let Some(sent) = instance.inputs.first().and_then(|input| self.exchanged.get(input)).cloned() {
                return self.exchange(instance, &sent);
            }
        }
        if !self.is_in_parts(instance) {
            self.out.instances.push(instance.clone());
            return Ok(());
        }
        for n in 0..self.folded.count() {
            let inputs = instance.inputs.iter().map(|&input| self.input(input, n, &instance.origin));
            let inputs = inputs.collect::<Result<_, _>>()?;
            let outputs = instance.outputs.iter().map(|&output| self.output(output, n)).collect();
            self.out.instances.push(Instance { inputs, outputs, ..instance.clone() });
        }
        Ok(())
    }

    /// True if parts compute an instance apart: it reads something of a part, it computes gradients, or it
    /// receives the tokens of a part from another stage.
    fn is_in_parts(&self, instance: &Instance) -> bool {
        let is_of_part = |value: &ValueId| {
            self.parts.contains_key(value)
                || self.cuts.contains_key(value)
                || self.cast_of.contains_key(value)
        };
        let receives = matches!(instance.code.op().collective(), Some((Collective::Receive { .. }, _)));
        receives
            || instance.inputs.iter().any(is_of_part)
            || instance.outputs.iter().any(|o| is_of_part(&o.value))
    }

    /// The value that the `n`-th part reads in place of `value`.
    fn input(&mut self, value: ValueId, n: usize, reader: &Origin) -> Result<ValueId, TraceError> {
        if let Some(parts) = self.parts.get(&value) {
            return Ok(parts[n]);
        }
        if let Some(&(copies, output)) = self.cast_of.get(&value) {
            return Ok(self.cast(copies, n, reader)?[output]);
        }
        match self.cuts.get(&value).cloned() {
            Some((name, cut)) => self.take(value, n, name, &cut, reader),
            None => Ok(value),
        }
    }

    /// The output of the `n`-th part in place of an output of an instance.
    fn output(&mut self, Output { value, mode }: Output, n: usize) -> Output {
        let is_maximum = match &self.out.value(value).storage {
            Storage::State { .. } => !self.parts.contains_key(&value),
            Storage::Output { name } => self.folded.maxima.iter().any(|maximum| **maximum == **name),
            _ => false,
        };
        if is_maximum {
            // All parts raise one amax, or one number of rows.
            return Output { value, mode: if n == 0 { mode } else { WriteMode::Add } };
        }
        if !self.parts.contains_key(&value) {
            let parts = (0..self.folded.count()).map(|n| self.output_of_part(value, n)).collect();
            self.parts.insert(value, parts);
        }
        let part = self.parts[&value][n];
        // Parts of gradients and of outputs of the program are added once in a micro-step.
        let mode = match mode {
            WriteMode::AddAfterFirst if part != value => WriteMode::Assign,
            mode => mode,
        };
        Output { value: part, mode }
    }

    /// A value for the `n`-th part in place of one that the program computes.
    fn output_of_part(&mut self, value: ValueId, n: usize) -> ValueId {
        let of = self.out.value(value).clone();
        let is_only = self.folded.count() == 1 && matches!(of.storage, Storage::Output { .. });
        if is_only || n == 0 && matches!(of.storage, Storage::Transient) {
            let repeats =
                of.repeats.map(|repeated| self.parts.get(&repeated).map_or(repeated, |parts| parts[0]));
            self.out.values[value.0 as usize].repeats = repeats;
            return value;
        }
        let part = self.out.add_value(of.ty, Storage::Transient);
        let copy = &mut self.out.values[part.0 as usize];
        copy.boundary = of.boundary;
        copy.repeats =
            of.repeats.map(|repeated| self.parts.get(&repeated).map_or(repeated, |parts| parts[n]));
        part
    }

    /// The part of a whole parameter, or of its copy for GEMMs, taken before it is first read in a stage.
    fn take(
        &mut self,
        whole: ValueId,
        n: usize,
        name: Arc<str>,
        cut: &TensorCut,
        reader: &Origin,
    ) -> Result<ValueId, TraceError> {
        let key = (whole, n, reader.stage);
        if let Some(&taken) = self.taken.get(&key) {
            return Ok(taken);
        }
        let of_block = reader.block.and_then(|block| name.strip_prefix(&format!("blocks.{block}.")));
        let site = of_block.map_or_else(|| name.clone(), Arc::from);
        let origin = Origin { site, role: Role::Precision, ..reader.clone() };
        let place = self.place(n);
        let part = self.emit(self.ops.take_part(cut), &[whole, place], &[], origin)?[0];
        self.taken.insert(key, part);
        Ok(part)
    }

    /// The FP8 copies of a part of a parameter, cast before they are first read in a stage.
    fn cast(&mut self, copies: usize, n: usize, reader: &Origin) -> Result<Vec<ValueId>, TraceError> {
        let key = (copies, n, reader.stage);
        if let Some(cast) = self.cast.get(&key) {
            return Ok(cast.clone());
        }
        let is_first = !self.cast.keys().any(|(earlier, ..)| *earlier == copies);
        let (master, Quantized { quantization, layouts, origin, values, delayed }) =
            self.casts[copies].clone();
        let part = self.input(master, n, reader)?;
        let origin = Origin { block: reader.block, stage: reader.stage, ..origin };
        let inputs: Vec<ValueId> = [part].into_iter().chain(delayed.as_ref().map(|of| of.scale)).collect();
        let mut targets = vec![None; values.len()];
        targets.extend(delayed.as_ref().map(|of| Some(of.amax)));
        let written = self.emit(self.ops.quantize(quantization, layouts), &inputs, &targets, origin)?;
        if let (false, Some(cast)) = (is_first, self.out.instances.last_mut())
            && delayed.is_some()
        {
            cast.outputs[values.len()].mode = WriteMode::Add;
        }
        self.cast.insert(key, written.clone());
        Ok(written)
    }

    /// Joins tokens of the parts, and gathers those of all ranks.
    fn gather(&mut self, instance: &Instance) -> Result<(), TraceError> {
        let Instance { inputs, outputs, origin, .. } = instance;
        let held: Result<Vec<ValueId>, _> =
            (0..self.folded.count()).map(|n| self.input(inputs[0], n, origin)).collect();
        let (held, gathered) = (held?, outputs[0].value);
        let (piece, rows) = (self.out.ty(held[0]).shape[0] * held.len(), self.out.ty(gathered).shape[0]);
        if self.folded.ranks.size == 1 {
            self.emit(self.ops.join_rows(rows), &held, &[Some(gathered)], origin.clone())?;
            return Ok(());
        }
        let joined = self.emit(self.ops.join_rows(piece), &held, &[], origin.clone())?;
        let gather = self.ops.all_gather(self.rows_of_ranks(piece, rows));
        self.emit(gather, &joined, &[Some(gathered)], origin.clone())?;
        Ok(())
    }

    /// Adds what parts have computed for all tokens, here and then over all ranks, and splits the sums for
    /// the tokens of this rank.
    fn exchange(&mut self, instance: &Instance, sent: &[ValueId]) -> Result<(), TraceError> {
        let (origin, sum) = (&instance.origin, instance.outputs[0].value);
        let of_part = self.out.ty(sum);
        let (rows, of_each) = (self.out.ty(sent[0]).shape[0], of_part.shape[0]);
        let mut own = self.tree(sent, None, origin)?;
        if self.folded.ranks.size > 1 {
            let exchange = self.ops.all_to_all(self.rows_of_ranks(of_each * sent.len(), rows));
            let exchanged = self.emit(exchange, &[own], &[], origin.clone())?;
            own = self.emit(self.ops.sum_ranks(), &exchanged, &[], origin.clone())?[0];
        }
        if of_part.dtype != DType::F32 {
            own = self.emit(self.ops.cast(of_part.dtype), &[own], &[], origin.clone())?[0];
        }
        let parts: Vec<ValueId> =
            (0..sent.len()).map(|n| self.output(instance.outputs[0], n).value).collect();
        let targets: Vec<_> = parts.iter().copied().map(Some).collect();
        self.emit(self.ops.split_rows(parts.len(), of_each), &[own], &targets, origin.clone())?;
        Ok(())
    }

    /// Adds the gradients of experts by the rank and the part of the tokens, whose order is that of the ranks
    /// if there were as many as parts.
    fn add_sources(&mut self, instance: &Instance, lines: usize, sum: Arc<dyn Op>) -> Result<(), TraceError> {
        let Instance { inputs, outputs, origin, .. } = instance;
        let of_parts: Result<Vec<ValueId>, _> =
            (0..self.folded.count()).map(|n| self.input(inputs[0], n, origin)).collect();
        let joined = self.emit(self.ops.join_lines(lines), &of_parts?, &[], origin.clone())?;
        let Output { value, mode } = outputs[0];
        self.parts.remove(&value);
        self.emit(sum, &joined, &[Some(value)], origin.clone())?;
        if let Some(output) = self.out.instances.last_mut().and_then(|sum| sum.outputs.first_mut()) {
            output.mode = mode;
        }
        Ok(())
    }

    /// Adds what parts have written in place of a gradient or an output of the program, after its last
    /// writer.
    fn add_up(&mut self, value: ValueId, mode: WriteMode, writer: &Origin) -> Result<(), TraceError> {
        let Some(parts) = self.parts.get(&value).filter(|parts| !parts.contains(&value)).cloned() else {
            return Ok(());
        };
        let is_gradient = matches!(self.out.value(value).storage, Storage::State { .. });
        let origin = Origin { role: if is_gradient { Role::Reduce } else { writer.role }, ..writer.clone() };
        let mut placed = parts;
        if let Some((_, cut)) = self.cuts.get(&value).cloned() {
            let target = (placed.len() == 1).then_some(value);
            for (n, part) in placed.iter_mut().enumerate() {
                let place = self.place(n);
                let op = self.ops.place_part(&cut);
                *part = self.emit(op, &[*part, place], &[target], origin.clone())?[0];
            }
            if target.is_some() {
                return Ok(());
            }
        }
        self.tree(&placed, Some(value), &origin)?;
        if let Some(output) = self.out.instances.last_mut().and_then(|sum| sum.outputs.first_mut()) {
            output.mode = mode;
        }
        Ok(())
    }

    /// The sum of tensors of the parts, f32: the lowest levels of the tree over those of all ranks.
    fn tree(
        &mut self,
        parts: &[ValueId],
        sum: Option<ValueId>,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let stacked = self.emit(self.ops.stack(), parts, &[], origin.clone())?;
        Ok(self.emit(self.ops.sum_ranks(), &stacked, &[sum], origin.clone())?[0])
    }

    /// The input with the place of the `n`-th part among all.
    fn place(&mut self, n: usize) -> ValueId {
        let name = input_of(TENSOR_PLACE, n);
        let ty = TensorType::new(DType::U32, [1]);
        let known = self.out.input(&name);
        known.unwrap_or_else(|| self.out.add_value(ty, Storage::Input { name: name.into() }))
    }

    /// The cut of so many rows into pieces of the ranks.
    fn rows_of_ranks(&self, piece_rows: usize, rows: usize) -> RowShard {
        RowShard { groups: self.folded.ranks, first: 0, piece_rows, rows }
    }

    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        targets: &[Option<ValueId>],
        origin: Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, targets, origin)?;
        let outputs = instance.outputs.iter().map(|output| output.value).collect();
        self.out.instances.push(instance);
        Ok(outputs)
    }
}

/// The type with another number of rows.
fn with_rows(ty: TensorType, rows: usize) -> TensorType {
    let shape = [&[rows], &ty.shape[1..]].concat();
    TensorType { shape: xtrain_tensor::Shape::new(&shape), ..ty }
}
