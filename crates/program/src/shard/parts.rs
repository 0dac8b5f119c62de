//! Parameters of which each rank computes with a part alone: the experts that it has.
//!
//! FP8 copies with one scale for the whole parameter have the scale of all experts, so that they have the
//! bits of one process. The amaxes of all ranks are gathered before the casts ([`crate::refresh`]), as for
//! rows of a parameter that is cut.

use super::ShardOps;
use super::quantized::{self, CopySource};
use crate::{Parallel, ParameterCut, Program, RowShard, Storage, Transposed};
use std::collections::HashMap;
use xtrain_rank::Groups;
use xtrain_tensor::Scaling;

/// Casts parts that are whole on this rank as rows of the parameter, if they share a scale with other parts.
pub(super) fn cast_with_scales_of_all(
    program: &mut Program,
    parallel: &Parallel,
    cuts: &HashMap<String, ParameterCut>,
    ops: &dyn ShardOps,
) {
    let mut instead_of = HashMap::new();
    for p in 0..program.parameters.len() {
        let Some(ParameterCut { parts, shard, .. }) = cuts.get(&*program.parameters[p].name) else {
            continue;
        };
        let is_cut_further = parallel.cuts_state() && shard.groups.size > 1;
        if parts.size == 1 || is_cut_further {
            continue;
        }
        let whole = RowShard { groups: Groups::world(1), first: 0, piece_rows: shard.rows, rows: shard.rows };
        let copies = std::mem::take(&mut program.parameters[p].quantized);
        let (of_tensor, others): (Vec<_>, Vec<_>) =
            copies.into_iter().partition(|copies| copies.quantization.scaling == Scaling::Tensor);
        program.parameters[p].quantized = others;
        for copies in of_tensor {
            // The row-major numbers that instances read are the rows.
            let row_major = if copies.layouts[0] { &copies.values[..2] } else { &[] };
            let cut = quantized::cut(program, &copies, whole, ops, |program, value, ty| {
                if row_major.contains(&value) { value } else { program.add_value(ty, Storage::Transient) }
            });
            for (value, source) in cut.sources {
                match source {
                    CopySource::Held(held) if held == value => {}
                    CopySource::Held(held) => {
                        instead_of.insert(value, held);
                        program.values[value.0 as usize].storage = Storage::Transient;
                    }
                    // They are in their place.
                    CopySource::Gathered(_) => {}
                    CopySource::Transposed(rows, op) => {
                        let transposed = Transposed { op, from: rows.piece, to: value };
                        program.parameters[p].transposed.push(transposed);
                    }
                }
            }
            program.parameters[p].quantized_rows.extend(cut.rows);
        }
    }
    for v in program.instances.iter_mut().flat_map(|i| &mut i.inputs) {
        *v = instead_of.get(v).copied().unwrap_or(*v);
    }
}
