//! The pass that refreshes the copies of parameters after the update, and the program that refreshes all
//! copies after the masters change.
//!
//! If masters are cut among ranks, copies are gathered from the rows of all ranks. Of FP8 copies ranks gather
//! the numbers that each has cast from its rows, with the scales of the whole: the amaxes on which these
//! depend are gathered before, all at once. With another [`crate::Gather`] each rank casts the whole weight,
//! which exists for a moment only: it is gathered to one of two slots, so a gather waits until the cast
//! before the last has read its slot. Of a matrix that ranks compute in parts, each takes its part of the
//! gathered tensor.

use crate::program::instantiate;
use crate::shard::{ShardOps, tensor_place};
use crate::{
    Code, Delayed, Gathered, Op, Origin, Parameter, Program, Quantized, QuantizedRows, Role, RowShard, Stage,
    Storage, TraceError, Transposed, ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::TensorType;

/// Appends, in this stage and in the order of parameters, the casts and gathers of the copies of trained
/// parameters.
pub fn apply(program: Program, stage: Stage, ops: &dyn ShardOps) -> Result<Program, TraceError> {
    let trained = program.parameters.iter().filter(|p| !program.is_frozen(p)).cloned().collect();
    refresh_all(program, trained, stage, false, ops)
}

/// Refreshes all copies of these parameters. `unset` says that delayed scales may not be set.
fn refresh_all(
    program: Program,
    parameters: Vec<Parameter>,
    stage: Stage,
    unset: bool,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    let mut pass = RefreshPass { out: program, stage, ops, slots: HashMap::new(), amaxes: HashMap::new() };
    pass.amaxes_of_all(&parameters, unset)?;
    for parameter in &parameters {
        pass.refresh(parameter)?;
    }
    Ok(pass.out)
}

struct RefreshPass<'a> {
    out: Program,
    stage: Stage,
    ops: &'a dyn ShardOps,
    /// For each type, the slot of the next gathered weight and the other one.
    slots: HashMap<TensorType, [ValueId; 2]>,
    /// The amaxes of the whole, by the numbers that are cast with them.
    amaxes: HashMap<ValueId, ValueId>,
}

impl RefreshPass<'_> {
    /// Adds the maxima over ranks of the amaxes on which casts of rows depend. There may be as many as there
    /// are columns in all weights, so ranks exchange pieces: each takes the maxima of one, and all gather
    /// these.
    fn amaxes_of_all(&mut self, parameters: &[Parameter], unset: bool) -> Result<(), TraceError> {
        let stage = self.stage;
        let origin = |site: &str| Origin { block: None, site: site.into(), role: Role::Precision, stage };
        let (of_all, mut groups) = (origin("amaxes"), None);
        let (mut numbers, mut amaxes) = (Vec::new(), Vec::new());
        for parameter in parameters {
            let origin = origin(&parameter.name);
            for rows in parameter.quantized_rows.iter().filter(|rows| rows.needs_amaxes_of_all(unset)) {
                let op = self.ops.amaxes(rows.by_column);
                amaxes.push(self.emit(op, &[parameter.master], &[], origin.clone())?[0]);
                numbers.push(rows.numbers);
            }
            groups = groups.or(parameter.amax_groups);
        }
        let Some(groups) = groups.filter(|_| !amaxes.is_empty()) else { return Ok(()) };
        let lengths = amaxes.iter().map(|&amaxes| self.out.ty(amaxes).numel()).collect();
        let mut values = self.emit(self.ops.rank_amaxes(), &amaxes, &[], of_all.clone())?;
        let rows = self.out.ty(values[0]).numel();
        let cut = RowShard { groups, first: 0, piece_rows: rows.div_ceil(groups.size), rows };
        let of_piece = self.ops.max_amaxes(vec![cut.piece_rows]);
        for op in [self.ops.all_to_all(cut), of_piece, self.ops.all_gather(cut)] {
            values = self.emit(op, &values, &[], of_all.clone())?;
        }
        let most = self.emit(self.ops.max_amaxes(lengths), &values, &[], of_all)?;
        self.amaxes = numbers.into_iter().zip(most).collect();
        Ok(())
    }

    fn refresh(&mut self, parameter: &Parameter) -> Result<(), TraceError> {
        for rows in &parameter.quantized_rows {
            self.cast_rows(parameter.master, rows)?;
        }
        for &gathered in &parameter.gathered {
            self.gather(parameter, gathered)?;
        }
        for Transposed { op, from, to } in &parameter.transposed {
            let (site, role) = (parameter.name.clone(), Role::Precision);
            let origin = Origin { block: None, site, role, stage: self.stage };
            self.emit(op.clone(), &[*from], &[Some(*to)], origin)?;
        }
        if parameter.quantized.is_empty() {
            return Ok(());
        }
        let weight = self.whole_weight(parameter)?;
        for Quantized { quantization, layouts, origin, values, delayed } in &parameter.quantized {
            let states = values.iter().copied().chain(delayed.as_ref().map(|d| d.amax));
            let targets: Vec<_> = states.map(Some).collect();
            let inputs: Vec<_> = [weight].into_iter().chain(delayed.as_ref().map(|d| d.scale)).collect();
            self.emit(self.ops.quantize(*quantization, *layouts), &inputs, &targets, origin.clone())?;
        }
        Ok(())
    }

    /// Casts this rank's rows of a master.
    fn cast_rows(&mut self, master: ValueId, rows: &QuantizedRows) -> Result<(), TraceError> {
        let QuantizedRows { quantization, by_column, origin, numbers, scales, delayed } = rows;
        let amaxes = self.amaxes.get(numbers).copied();
        let op = self.ops.quantize_rows(*quantization, [!by_column, *by_column], amaxes.is_some());
        let scale = delayed.as_ref().map(|delayed| delayed.scale);
        let inputs: Vec<_> = [master].into_iter().chain(scale).chain(amaxes).collect();
        let amax = delayed.as_ref().map(|delayed| delayed.amax);
        // Scales by columns are those of the transpose's rows.
        let written = Some(*numbers).filter(|_| !by_column);
        let cast = self.emit(op, &inputs, &[written, Some(*scales), amax], origin.clone())?;
        if *by_column {
            self.emit(self.ops.transpose_bytes(), &cast[..1], &[Some(*numbers)], origin.clone())?;
        }
        Ok(())
    }

    /// All rows of the weight, for its casts.
    fn whole_weight(&mut self, parameter: &Parameter) -> Result<ValueId, TraceError> {
        let rows = parameter.cast_from.unwrap_or(parameter.master);
        let Some(cut) = parameter.shard else { return Ok(rows) };
        if let Some(held) = parameter.gathered.iter().find(|gathered| gathered.piece == rows) {
            return Ok(held.whole);
        }
        let ty = cut.whole(self.out.ty(rows));
        let slot = self.slot(parameter.part.as_ref().map_or(ty, |part| part.part(ty)));
        self.gather(parameter, Gathered { piece: rows, whole: slot, cut })?;
        Ok(slot)
    }

    /// One of the two slots for gathered tensors of a type, in turn.
    fn slot(&mut self, ty: TensorType) -> ValueId {
        let out = &mut self.out;
        let slots =
            self.slots.entry(ty).or_insert_with(|| [(); 2].map(|()| out.add_value(ty, Storage::Transient)));
        slots.swap(0, 1);
        slots[1]
    }

    fn gather(&mut self, parameter: &Parameter, gathered: Gathered) -> Result<(), TraceError> {
        let Gathered { piece, whole, cut } = gathered;
        let (site, role) = (parameter.name.clone(), Role::Gather);
        let origin = Origin { block: None, site, role, stage: self.stage };
        let Some(part) = &parameter.part else {
            self.emit(self.ops.all_gather(cut), &[piece], &[Some(whole)], origin)?;
            return Ok(());
        };
        let all = self.slot(cut.whole(self.out.ty(piece)));
        self.emit(self.ops.all_gather(cut), &[piece], &[Some(all)], origin.clone())?;
        let place = tensor_place(&mut self.out);
        let origin = Origin { role: Role::Precision, ..origin };
        self.emit(self.ops.take_part(part), &[all, place], &[Some(whole)], origin)?;
        Ok(())
    }

    /// Appends an instance and returns its outputs.
    fn emit(
        &mut self,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        targets: &[Option<ValueId>],
        origin: Origin,
    ) -> Result<Vec<ValueId>, TraceError> {
        let origin = Origin { stage: self.stage, ..origin };
        let instance = instantiate(&mut self.out, Code::Plain(op), inputs, targets, origin)?;
        let outputs = instance.outputs.iter().map(|output| output.value).collect();
        self.out.instances.push(instance);
        Ok(outputs)
    }
}

/// The program that refreshes every copy of the parameters of `program` from its master. It is run once after
/// masters are initialised or loaded. Without copies it has no instances.
pub fn program(program: &Program, ops: &dyn ShardOps) -> Result<Program, TraceError> {
    let mut out = Program::default();
    let mut copies = HashMap::new();
    for p in &program.parameters {
        let mut copy = |v: ValueId| *copies.entry(v).or_insert_with(|| out.copy_value(program, v));
        let mut copy_delayed = |delayed: &Option<Delayed>| {
            let delayed = delayed.as_ref()?;
            Some(Delayed { amax: copy(delayed.amax), scale: copy(delayed.scale), ..delayed.clone() })
        };
        let mut quantized = p.quantized.clone();
        let mut quantized_rows = p.quantized_rows.clone();
        quantized.iter_mut().for_each(|of| of.delayed = copy_delayed(&of.delayed));
        quantized_rows.iter_mut().for_each(|of| of.delayed = copy_delayed(&of.delayed));
        let values = quantized.iter_mut().flat_map(|of| &mut of.values);
        let rows = quantized_rows.iter_mut().flat_map(|of| [&mut of.numbers, &mut of.scales]);
        values.chain(rows).for_each(|v| *v = copy(*v));
        let gathered = |of: &Gathered| Gathered { piece: copy(of.piece), whole: copy(of.whole), cut: of.cut };
        let gathered = p.gathered.iter().map(gathered).collect();
        let transposed =
            |of: &Transposed| Transposed { op: of.op.clone(), from: copy(of.from), to: copy(of.to) };
        let transposed = p.transposed.iter().map(transposed).collect();
        let parameter = Parameter {
            name: p.name.clone(),
            master: copy(p.master),
            compute: p.compute.map(&mut copy),
            part: p.part.clone(),
            quantized,
            quantized_rows,
            gradient: None,
            tied_gradient: None,
            shard: p.shard,
            amax_groups: p.amax_groups,
            cast_from: p.cast_from.map(&mut copy),
            gathered,
            transposed,
        };
        if let Some(compute) = parameter.compute {
            let code = Code::Plain(ops.cast(out.ty(compute).dtype));
            let (role, stage) = (Role::Precision, Stage::Forward);
            let origin = Origin { block: None, site: p.name.clone(), role, stage };
            let instance = instantiate(&mut out, code, &[parameter.master], &[Some(compute)], origin)?;
            out.instances.push(instance);
        }
        out.parameters.push(parameter);
    }
    let parameters = out.parameters.clone();
    refresh_all(out, parameters, Stage::Forward, true, ops)
}
