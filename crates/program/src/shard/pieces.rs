//! The state of which a rank has its rows alone.

use crate::{Gathered, Program, RowShard, StateKind, Storage};
use std::collections::HashMap;

/// Cuts the masters. The copies that GEMMs read stay whole; the optimizer writes this rank's rows of them. A
/// master that instances read is replaced by a whole copy.
pub(super) fn cut_state(program: &mut Program, cuts: &HashMap<String, RowShard>) {
    let mut is_read = vec![false; program.values.len()];
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        is_read[v.0 as usize] = true;
    }
    let mut whole_of = HashMap::new();
    for p in 0..program.parameters.len() {
        let parameter = &program.parameters[p];
        let Some(&cut) = cuts.get(&*parameter.name) else { continue };
        let (name, master, compute) = (parameter.name.clone(), parameter.master, parameter.compute);
        let whole = program.ty(master);
        let mut gathered = Vec::new();
        if is_read[master.0 as usize] {
            let whole = program.add_state(StateKind::Gathered, &name, whole);
            gathered.push(Gathered { piece: master, whole });
            whole_of.insert(master, whole);
        }
        program.values[master.0 as usize].ty = cut.piece(whole);
        let compute = compute.map(|whole| {
            let piece = program.add_value(cut.piece(program.ty(whole)), Storage::Transient);
            gathered.push(Gathered { piece, whole });
            piece
        });
        let parameter = &mut program.parameters[p];
        (parameter.compute, parameter.gathered, parameter.shard) = (compute, gathered, Some(cut));
    }
    for v in program.instances.iter_mut().flat_map(|i| &mut i.inputs) {
        *v = whole_of.get(v).copied().unwrap_or(*v);
    }
}
