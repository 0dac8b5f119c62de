//! The pass that casts tokens to FP8 before they travel to the ranks of their experts.
//!
//! The tokens of a mixture, and the gradients of its outputs, are gathered from the ranks that share experts,
//! permuted by experts, and cast as operands of GEMMs. If the cast of a token depends on no other token, it
//! runs before the gather instead: half of the bytes travel. The layout that wgrad reads is then computed
//! from numbers that are cast already, which may round a second time, so the pass changes numbers. A process
//! that holds all experts casts in the same order, so it computes the same.
//!
//! It runs after [`crate::quantize`]. Rows that something else reads in their own type are left alone, as
//! their tokens travel in that type anyway; measurements ([`crate::measure_casts`]) do not count.
//!
//! Tokens that the ranks of a tensor group gather are cast before that, too ([`sequence`]): it changes no
//! number.

pub mod sequence;

use crate::program::instantiate;
use crate::{
    Code, Collective, Groups, Instance, Op, Output, Program, Role, Storage, TraceError, ValueId, WriteMode,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The ops that the pass inserts.
pub trait WireOps {
    /// The ops in place of `permute`, which permutes tokens by experts, and of `cast`, which casts the rows;
    /// `None` if they are other ops, or if tokens cannot be cast before.
    fn cast_tokens(&self, permute: &dyn Op, cast: &dyn Op) -> Option<CastTokens>;
    /// The gather of a tensor with so many rows from all ranks of a group, in their order.
    fn gather_rows(&self, groups: Groups, rows: usize) -> Arc<dyn Op>;
}

/// The ops in place of a permutation and the cast of its output.
pub struct CastTokens {
    /// The cast, of tokens. Its inputs are those of the cast of rows. Its outputs are numbers, scales, and
    /// the amax.
    pub cast: Arc<dyn Op>,
    /// The op that permutes the numbers. Its inputs are the numbers, those of the permutation after the first
    /// (two of them), and the scales if tokens have scales of their own. Its outputs are those of the cast of
    /// rows, without the amax, and without scales if tokens have none.
    pub permute: Arc<dyn Op>,
    /// True if tokens have scales of their own.
    pub has_scales: bool,
}

/// Casts tokens before they are gathered, wherever that is possible. Value ids keep their meaning.
pub fn apply(program: Program, ops: &dyn WireOps) -> Result<Program, TraceError> {
    let moved = Moved::find(&program, ops);
    if moved.is_empty() {
        return Ok(program);
    }
    let mut pass = WirePass::new(program);
    for moved in moved {
        pass.replace(moved, ops)?;
    }
    Ok(pass.finish())
}

/// A cast of rows that becomes one of tokens.
struct Moved {
    /// The index of the cast.
    cast: usize,
    /// The index of the instance that permutes the tokens.
    permute: usize,
    /// The index of the instance that gathers the tokens, if only this cast needs them.
    gather: Option<usize>,
    /// True if something else reads the permuted tokens.
    keeps_rows: bool,
    ops: CastTokens,
}

impl Moved {
    /// The casts of a program that may run before the gather of their tokens.
    fn find(program: &Program, ops: &dyn WireOps) -> Vec<Moved> {
        let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
        let mut writers: HashMap<ValueId, usize> = HashMap::new();
        for (n, instance) in program.instances.iter().enumerate() {
            instance.inputs.iter().for_each(|&v| readers.entry(v).or_default().push(n));
            writers.extend(instance.outputs.iter().map(|o| (o.value, n)));
        }
        let readers_of = |v: ValueId| readers.get(&v).map_or(&[][..], Vec::as_slice);
        let is_inner = |v: ValueId| {
            let value = program.value(v);
            matches!(value.storage, Storage::Transient) && !value.boundary
        };
        let mut all = Vec::new();
        for (permute, instance) in program.instances.iter().enumerate() {
            let [Output { value: rows, .. }] = instance.outputs[..] else { continue };
            if !is_inner(rows) {
                continue;
            }
            let cast_of = |&n: &usize| {
                let cast = &program.instances[n];
                let is_of_rows = cast.inputs[0] == rows && cast.origin.stage == instance.origin.stage;
                let moved = is_of_rows.then(|| ops.cast_tokens(instance.code.op(), cast.code.op()));
                Some((n, moved.flatten()?))
            };
            let casts: Vec<(usize, CastTokens)> = readers_of(rows).iter().filter_map(cast_of).collect();
            let is_cast = |n: usize| casts.iter().any(|(cast, _)| *cast == n);
            let others = || readers_of(rows).iter().filter(|n| !is_cast(**n));
            // Those of measurements are for precision.
            if others().any(|&n| program.instances[n].origin.role != Role::Precision) {
                continue;
            }
            let keeps_rows = others().next().is_some();
            let tokens = instance.inputs[0];
            let is_gathered = |n: &usize| gather_of(&program.instances[*n]).is_some();
            let is_needed_here = !keeps_rows && readers_of(tokens) == [permute] && is_inner(tokens);
            let gather = writers.get(&tokens).copied().filter(|n| is_needed_here && is_gathered(n));
            all.extend(casts.into_iter().map(|(cast, ops)| Moved { cast, permute, gather, keeps_rows, ops }));
        }
        all
    }
}

/// The ranks from which an instance gathers the rows of a tensor in their order, if it does.
fn gather_of(instance: &Instance) -> Option<Groups> {
    match instance.code.op().collective() {
        Some((Collective::AllGather { first: 0 }, groups)) => Some(groups),
        _ => None,
    }
}

struct WirePass {
    out: Program,
    /// Instances to insert before the one of an index.
    at: HashMap<usize, Vec<Instance>>,
    /// The indices of instances to remove.
    removed: HashSet<usize>,
    /// For a value that nothing writes any more, the one that is equal to it.
    same: HashMap<ValueId, ValueId>,
    /// The amaxes that moved casts accumulate.
    amaxes: HashSet<ValueId>,
}

impl WirePass {
    fn new(out: Program) -> Self {
        let (at, removed, same, amaxes) = Default::default();
        WirePass { out, at, removed, same, amaxes }
    }

    /// The program with instances inserted and removed.
    fn finish(mut self) -> Program {
        let instances = std::mem::take(&mut self.out.instances);
        for (n, mut instance) in instances.into_iter().enumerate() {
            self.out.instances.extend(self.at.remove(&n).into_iter().flatten());
            if !self.removed.contains(&n) {
                instance.inputs.iter_mut().for_each(|v| *v = self.same.get(v).copied().unwrap_or(*v));
                self.out.instances.push(instance);
            }
        }
        begin_amaxes(&mut self.out, &self.amaxes);
        self.out
    }

    fn replace(&mut self, moved: Moved, ops: &dyn WireOps) -> Result<(), TraceError> {
        let Moved { cast: cast_at, permute: permute_at, gather: gather_at, keeps_rows, ops: by } = moved;
        let [cast, permute] = [cast_at, permute_at].map(|n| self.out.instances[n].clone());
        let gather = gather_at.map(|n| self.out.instances[n].clone());
        let Some((amax, outputs)) = cast.outputs.split_last() else { unreachable!("a cast has an amax") };

        // One scale for the tensor is that of all layouts.
        let scales: Vec<ValueId> = outputs.iter().skip(1).step_by(2).map(|o| o.value).collect();
        let tokens = gather.as_ref().map_or(permute.inputs[0], |gather| gather.inputs[0]);
        let inputs: Vec<ValueId> = [tokens].into_iter().chain(cast.inputs[1..].iter().copied()).collect();
        let scale = scales.first().copied().filter(|_| !by.has_scales);
        let code = Code::Plain(by.cast);
        let mut of_tokens = instantiate(&mut self.out, code, &inputs, &[None, scale], cast.origin.clone())?;
        if let Some(scale) = scale {
            self.same.extend(scales.iter().skip(1).map(|&other| (other, scale)));
        }
        let mut sent: Vec<ValueId> = of_tokens.outputs.iter().map(|o| o.value).take(2).collect();
        sent.truncate(if by.has_scales { 2 } else { 1 });
        if let Some(last) = of_tokens.outputs.last_mut() {
            *last = *amax;
        }
        self.amaxes.extend((amax.mode != WriteMode::Assign).then_some(amax.value));
        let mut before = vec![of_tokens];
        if let Some((gather, groups)) = gather.as_ref().and_then(|gather| Some((gather, gather_of(gather)?)))
        {
            for v in &mut sent {
                let rows = groups.size * self.out.ty(*v).shape[0];
                let code = Code::Plain(ops.gather_rows(groups, rows));
                let gathered = instantiate(&mut self.out, code, &[*v], &[], gather.origin.clone())?;
                *v = gathered.outputs[0].value;
                before.push(gathered);
            }
        }
        self.at.entry(gather_at.unwrap_or(permute_at)).or_default().extend(before);

        let permuted = sent[..1].iter().chain(&permute.inputs[1..3]).chain(&sent[1..]);
        let permuted: Vec<ValueId> = permuted.copied().collect();
        let step = if by.has_scales { 1 } else { 2 };
        let targets: Vec<_> = outputs.iter().step_by(step).map(|o| Some(o.value)).collect();
        let code = Code::Plain(by.permute);
        let rows = instantiate(&mut self.out, code, &permuted, &targets, permute.origin)?;
        self.at.entry(cast_at).or_default().push(rows);
        self.removed.insert(cast_at);
        if !keeps_rows {
            self.removed.extend([permute_at].into_iter().chain(gather_at));
        }
        Ok(())
    }
}

/// Makes the first writer of these amaxes in a step overwrite them, and the others add: casts have moved.
fn begin_amaxes(program: &mut Program, amaxes: &HashSet<ValueId>) {
    let mut begun = HashSet::new();
    let outputs = program.instances.iter_mut().flat_map(|instance| &mut instance.outputs);
    for output in outputs.filter(|o| amaxes.contains(&o.value)) {
        let is_first = begun.insert(output.value);
        output.mode = if is_first { WriteMode::AddAfterFirst } else { WriteMode::Add };
    }
}
