//! The state of which a rank has its rows alone.

use super::ShardOps;
use super::quantized::{self, CopySource, RankRows};
use crate::{Gather, Gathered, ParameterCut, Program, RowShard, StateKind, Storage, Transposed, ValueId};
use std::collections::HashMap;
use xtrain_tensor::DType;

/// Cuts the masters. The copies that GEMMs read stay whole; the optimizer writes this rank's rows of them. A
/// master that instances read is replaced by a whole copy.
pub(super) fn cut_state(
    program: &mut Program,
    gather: Gather,
    cuts: &HashMap<String, ParameterCut>,
    ops: &dyn ShardOps,
) {
    let mut is_read = vec![false; program.values.len()];
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        is_read[v.0 as usize] = true;
    }
    let mut instead_of = HashMap::new();
    for p in 0..program.parameters.len() {
        let parameter = &program.parameters[p];
        let Some(&ParameterCut { shard: cut, .. }) = cuts.get(&*parameter.name) else { continue };
        if cut.groups.size == 1 {
            continue;
        }
        let (name, master, compute) = (parameter.name.clone(), parameter.master, parameter.compute);
        let part = parameter.part.clone();
        let whole_of = |ty| part.as_ref().map_or(ty, |part| part.whole(ty));
        let whole = whole_of(program.ty(master));
        let mut gathered = Vec::new();
        if is_read[master.0 as usize] {
            let ty = program.ty(master);
            let whole = program.add_state(StateKind::Gathered, &name, ty);
            gathered.push(Gathered { piece: master, whole, cut });
            instead_of.insert(master, whole);
        }
        program.values[master.0 as usize].ty = cut.piece(whole);
        let mut compute = compute.map(|whole| {
            let piece = program.add_value(cut.piece(whole_of(program.ty(whole))), Storage::Transient);
            gathered.push(Gathered { piece, whole, cut });
            piece
        });
        let parameter = &mut program.parameters[p];
        (parameter.gathered, parameter.shard) = (gathered, Some(cut));
        match gather {
            // The part of a tensor group is cast from the part of the master.
            Gather::Auto if part.is_some() => {}
            Gather::Auto => instead_of.extend(gather_numbers(program, p, cut, ops)),
            Gather::Fp32 => {}
            Gather::Bf16 if parameter.quantized.is_empty() => {}
            Gather::Bf16 => {
                let ty = cut.piece(whole).with_dtype(DType::BF16);
                let piece = *compute.get_or_insert_with(|| program.add_value(ty, Storage::Transient));
                program.parameters[p].cast_from = Some(piece);
            }
        }
        program.parameters[p].compute = compute;
    }
    for v in program.instances.iter_mut().flat_map(|i| &mut i.inputs) {
        *v = instead_of.get(v).copied().unwrap_or(*v);
    }
}

/// Lets the ranks gather the FP8 numbers of a parameter. Returns the values that instances read instead of
/// others.
fn gather_numbers(
    program: &mut Program,
    p: usize,
    cut: RowShard,
    ops: &dyn ShardOps,
) -> HashMap<ValueId, ValueId> {
    let mut instead_of = HashMap::new();
    let (cast, whole): (Vec<_>, Vec<_>) =
        std::mem::take(&mut program.parameters[p].quantized).into_iter().partition(quantized::is_possible);
    program.parameters[p].quantized = whole;
    for copies in cast {
        let new = |program: &mut Program, _, ty| program.add_value(ty, Storage::Transient);
        let quantized::Cut { rows, sources } = quantized::cut(program, &copies, cut, ops, new);
        let mut gathered: HashMap<ValueId, ValueId> = HashMap::new();
        for (value, source) in sources {
            match source {
                CopySource::Held(held) if held == value => {}
                CopySource::Held(held) => {
                    instead_of.insert(value, held);
                    program.values[value.0 as usize].storage = Storage::Transient;
                }
                CopySource::Gathered(RankRows { piece, cut, .. }) => {
                    program.parameters[p].gathered.push(Gathered { piece, whole: value, cut });
                    gathered.insert(piece, value);
                }
                CopySource::Transposed(RankRows { piece, cut, whole }, op) => {
                    let from = *gathered.entry(piece).or_insert_with(|| {
                        let whole = program.add_value(whole, Storage::Transient);
                        program.parameters[p].gathered.push(Gathered { piece, whole, cut });
                        whole
                    });
                    program.parameters[p].transposed.push(Transposed { op, from, to: value });
                }
            }
        }
        program.parameters[p].quantized_rows.extend(rows);
    }
    instead_of
}
