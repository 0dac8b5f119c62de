//! Casts that tensor ranks run before they gather tokens.
//!
//! Where the tokens of all ranks would be gathered and then cast, each rank casts its own, and ranks gather
//! numbers: a byte of an element instead of two. These and their scales are those of the cast of all tokens,
//! to the bit:
//!
//! * A delayed scale is known. It must be set: one that is not would come from a rank's own amax.
//! * The scale of the tensor comes from the largest amax of all ranks, which they gather before the cast.
//! * Rows and tiles of a token are its own. Transposed, a row is a column of tokens, whose amax is the
//!   largest of all ranks. Tiles along tokens are a rank's own if it has whole ones.
//!
//! A layout is gathered in the stage that reads it. So of the transpose that wgrad reads, the backward keeps
//! this rank's part and gathers it: columns, which are joined after the gather, so that one GEMM adds all
//! tokens in the order of a cast after the gather. A gradient is read in both layouts in one stage. If it has
//! one scale, its transpose is computed from the gathered numbers. With other scales both layouts would
//! travel, as many bytes as it has in bf16, so it is cast after it is gathered. So are tokens that something
//! else reads too, or with padding after them.

use super::{WireOps, WirePass, gather_of};
use crate::program::instantiate;
use crate::shard::ShardOps;
use crate::{
    Code, Gather, Groups, Instance, Op, Origin, Output, Program, Quantization, Storage, TraceError, ValueId,
    WriteMode,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::{Scaling, TILE};

/// The ops that the pass inserts.
pub trait SequenceOps: WireOps + ShardOps {
    /// The formats and the layouts of a cast of a tensor as an operand; `None` if it is another op.
    fn operand_cast(&self, cast: &dyn Op) -> Option<(Quantization, [bool; 2])>;
    /// The op that joins the columns of so many ranks, whose tensors follow each other.
    fn join_columns(&self, ranks: usize) -> Arc<dyn Op>;
}

/// Casts the tokens of a rank before they are gathered, wherever that sends fewer bytes and changes no bit,
/// if they are gathered in FP8. Value ids keep their meaning.
pub fn apply(program: Program, gather: Gather, ops: &dyn SequenceOps) -> Result<Program, TraceError> {
    let found = match gather {
        Gather::Auto => GatheredCast::find(&program, ops),
        Gather::Fp32 | Gather::Bf16 => Vec::new(),
    };
    let mut pass = SequencePass { wire: WirePass::new(program), ops };
    for cast in found {
        pass.replace(&cast)?;
    }
    Ok(pass.wire.finish())
}

/// A cast of gathered tokens. Arrays are by layout: row-major, transposed.
struct GatheredCast {
    /// The index of the gather.
    gather: usize,
    groups: Groups,
    /// The index of the cast.
    cast: usize,
    quantization: Quantization,
    layouts: [Option<CastLayout>; 2],
}

/// A layout of a cast.
#[derive(Clone, Copy)]
struct CastLayout {
    numbers: ValueId,
    scales: ValueId,
    /// The first reader in a later stage, if none is in that of the cast.
    later: Option<usize>,
}

impl GatheredCast {
    /// The casts of a program that may run before the gather of their input.
    fn find(program: &Program, ops: &dyn SequenceOps) -> Vec<GatheredCast> {
        let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
        for (n, instance) in program.instances.iter().enumerate() {
            instance.inputs.iter().for_each(|&v| readers.entry(v).or_default().push(n));
        }
        let readers_of = |v: ValueId| readers.get(&v).map_or(&[][..], Vec::as_slice);
        let found = |(gather, instance): (usize, &Instance)| {
            let groups = gather_of(instance)?;
            let &[Output { value: all, .. }] = &instance.outputs[..] else { return None };
            let is_inner =
                matches!(program.value(all).storage, Storage::Transient) && !program.value(all).boundary;
            let (&[cast], true) = (readers_of(all), is_inner) else { return None };
            let reader = &program.instances[cast];
            let (quantization, written) = ops.operand_cast(reader.code.op())?;
            let own_tokens = program.ty(instance.inputs[0]).shape[0];
            let is_whole = own_tokens * groups.size == program.ty(all).shape[0];
            if reader.origin.stage != instance.origin.stage || !is_whole {
                return None;
            }
            let mut pairs = reader.outputs.as_chunks::<2>().0.iter();
            let layouts = written.map(|is_written| {
                let &[numbers, scales] = pairs.next().filter(|_| is_written)?;
                let first = *readers_of(numbers.value).first()?;
                let is_later = program.instances[first].origin.stage != reader.origin.stage;
                Some(CastLayout {
                    numbers: numbers.value,
                    scales: scales.value,
                    later: is_later.then_some(first),
                })
            });
            let found = GatheredCast { gather, groups, cast, quantization, layouts };
            found.is_equal(own_tokens).then_some(found)
        };
        program.instances.iter().enumerate().filter_map(found).collect()
    }

    /// True if fewer bytes travel, and numbers and scales are those of a cast after the gather.
    fn is_equal(&self, own_tokens: usize) -> bool {
        let [row_major, transposed] = self.layouts;
        let is_one = self.layouts.iter().flatten().filter(|layout| layout.later.is_none()).count() == 1;
        let is_equal = match self.quantization.scaling {
            Scaling::Tensor => true,
            Scaling::Row => is_one,
            Scaling::Tile => is_one && (transposed.is_none() || own_tokens.is_multiple_of(TILE)),
            Scaling::Block => false,
        };
        row_major.is_some() && is_equal
    }
}

struct SequencePass<'a> {
    wire: WirePass,
    ops: &'a dyn SequenceOps,
}

impl SequencePass<'_> {
    fn replace(&mut self, found: &GatheredCast) -> Result<(), TraceError> {
        let &GatheredCast { gather: at, groups, quantization, layouts, .. } = found;
        let [gather, cast] = [at, found.cast].map(|n| self.wire.out.instances[n].clone());
        let (tokens, scale) = (gather.inputs[0], cast.inputs.get(1).copied());
        let is_of_tensor = quantization.scaling == Scaling::Tensor;
        let is_all_now = layouts.iter().flatten().all(|layout| layout.later.is_none());
        let casts = match (quantization.scaling, layouts[1]) {
            // The transpose of the gathered numbers, with their scale.
            (Scaling::Tensor, Some(_)) if is_all_now => vec![[true, false]],
            // With the amaxes of columns.
            (Scaling::Row, Some(_)) => vec![[true, false], [false, true]],
            (_, transposed) => vec![[true, transposed.is_some()]],
        };
        let mut own = Vec::new();
        for (n, layouts) in casts.into_iter().enumerate() {
            let by_column = n > 0;
            let amaxes = match by_column || is_of_tensor && scale.is_none() {
                true => Some(self.amaxes_of_all(at, tokens, groups, by_column, &cast.origin)?),
                false => None,
            };
            let op = self.ops.quantize_rows(quantization, layouts, amaxes.is_some());
            let inputs: Vec<ValueId> = [tokens].into_iter().chain(scale).chain(amaxes).collect();
            let mut of_rank =
                instantiate(&mut self.wire.out, Code::Plain(op), &inputs, &[], cast.origin.clone())?;
            if let (Some(amax), Some(&of_all), false) =
                (of_rank.outputs.last_mut(), cast.outputs.last(), by_column)
            {
                *amax = of_all;
                self.wire.amaxes.extend((of_all.mode != WriteMode::Assign).then_some(of_all.value));
            }
            own.extend(of_rank.outputs.as_chunks::<2>().0.iter().map(|pair| pair.map(|output| output.value)));
            self.wire.at.entry(at).or_default().push(of_rank);
        }
        for (layout, &[numbers, scales]) in layouts.iter().flatten().zip(&own) {
            let (at, origin) = match layout.later {
                Some(reader) => (reader, self.wire.out.instances[reader].origin.clone()),
                None => (at, gather.origin.clone()),
            };
            self.gather(at, groups, numbers, layout.numbers, &origin)?;
            self.gather(at, groups, scales, layout.scales, &origin)?;
        }
        if let ([Some(row_major), Some(transposed)], &[[_, scales]]) = (layouts, &own[..]) {
            let (from, to) = (row_major.numbers, transposed.numbers);
            self.emit(at, self.ops.transpose_bytes(), &[from], Some(to), &cast.origin)?;
            self.wire.same.insert(transposed.scales, scales);
        }
        self.wire.removed.extend([at, found.cast]);
        Ok(())
    }

    /// The amaxes of a tensor, or of its columns, of all ranks, of which each has some rows.
    fn amaxes_of_all(
        &mut self,
        at: usize,
        tokens: ValueId,
        groups: Groups,
        by_column: bool,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let own = self.emit(at, self.ops.amaxes(by_column), &[tokens], None, origin)?;
        let count = self.wire.out.ty(own).numel();
        let gathered =
            self.emit(at, self.ops.gather_rows(groups, groups.size * count), &[own], None, origin)?;
        self.emit(at, self.ops.max_amaxes(vec![count]), &[gathered], None, origin)
    }

    /// Gathers `whole` from the parts of ranks, of which this one has `own`: rows of it, columns, or all.
    fn gather(
        &mut self,
        at: usize,
        groups: Groups,
        own: ValueId,
        whole: ValueId,
        origin: &Origin,
    ) -> Result<(), TraceError> {
        let [of_rank, of_all] = [own, whole].map(|v| self.wire.out.ty(v).shape.rows_cols());
        if of_rank == of_all {
            self.wire.same.insert(whole, own);
            return Ok(());
        }
        let gather = self.ops.gather_rows(groups, groups.size * of_rank.0);
        if of_rank.1 == of_all.1 {
            self.emit(at, gather, &[own], Some(whole), origin)?;
            return Ok(());
        }
        let parts = self.emit(at, gather, &[own], None, origin)?;
        self.emit(at, self.ops.join_columns(groups.size), &[parts], Some(whole), origin)?;
        Ok(())
    }

    /// Inserts an instance with one output, `target` if given, before the instance `at`.
    fn emit(
        &mut self,
        at: usize,
        op: Arc<dyn Op>,
        inputs: &[ValueId],
        target: Option<ValueId>,
        origin: &Origin,
    ) -> Result<ValueId, TraceError> {
        let instance = instantiate(&mut self.wire.out, Code::Plain(op), inputs, &[target], origin.clone())?;
        let output = instance.outputs[0].value;
        self.wire.at.entry(at).or_default().push(instance);
        Ok(output)
    }
}
