//! The happens-before relation of instances: lane order, and data dependencies between lanes. Collectives
//! that may be issued together ([`runs`]) are not ordered among themselves.

use crate::{Instance, Lane, Program, ValueId};
use std::mem::discriminant;
use std::ops::Range;

/// The happens-before relation of a program's instances, as vector clocks over the lanes.
pub struct Order {
    /// For each instance i and lane l, the number of instances of l that complete before i starts.
    clocks: Vec<[u32; Lane::COUNT]>,
    /// The position of each instance within its lane.
    positions: Vec<u32>,
    lanes: Vec<usize>,
    /// For each instance, the instances of other lanes that it waits for.
    waits: Vec<Vec<usize>>,
}

impl Order {
    /// The order of `program`. An instance starts after the earlier instances of its lane, the writers of its
    /// inputs, and the earlier readers and writers of its outputs.
    pub fn new(program: &Program) -> Self {
        let n = program.instances.len();
        let mut is_coalesced = vec![false; n];
        for run in runs(program) {
            is_coalesced[run.start + 1..run.end].fill(true);
        }
        let mut order = Order {
            clocks: vec![[0; Lane::COUNT]; n],
            positions: vec![0; n],
            lanes: vec![0; n],
            waits: vec![Vec::new(); n],
        };
        let mut count = [0u32; Lane::COUNT];
        let mut latest: [Option<usize>; Lane::COUNT] = [None; Lane::COUNT];
        let mut writer: Vec<Option<usize>> = vec![None; program.values.len()];
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); program.values.len()];
        for (i, instance) in program.instances.iter().enumerate() {
            let lane = instance.lane as usize;
            order.lanes[i] = lane;
            order.positions[i] = count[lane];
            let index = |v: &ValueId| v.0 as usize;
            let mut dependencies: Vec<usize> =
                instance.inputs.iter().filter_map(|v| writer[index(v)]).collect();
            for o in &instance.outputs {
                dependencies.extend(writer[index(&o.value)]);
                dependencies.extend(readers[index(&o.value)].iter().copied());
            }
            let before = latest[lane].map_or([0; Lane::COUNT], |latest| match is_coalesced[i] {
                true => order.clocks[latest],
                false => order.after(latest),
            });
            let (waits, clock) = order.waits_and_clock(&dependencies, before);
            order.clocks[i] = clock;
            order.waits[i] = waits;
            for v in &instance.inputs {
                readers[index(v)].push(i);
            }
            for o in &instance.outputs {
                writer[index(&o.value)] = Some(i);
                readers[index(&o.value)].clear();
            }
            latest[lane] = Some(i);
            count[lane] += 1;
        }
        order
    }

    /// The instances that an instance must wait for, given its `dependencies` and the `clock` that its lane's
    /// order gives it, and its clock afterwards. From each other lane that is the last dependency, unless
    /// another dependency already waits for it.
    fn waits_and_clock(
        &self,
        dependencies: &[usize],
        mut clock: [u32; Lane::COUNT],
    ) -> (Vec<usize>, [u32; Lane::COUNT]) {
        let mut last: [Option<usize>; Lane::COUNT] = [None; Lane::COUNT];
        for &d in dependencies {
            last[self.lanes[d]] = last[self.lanes[d]].max(Some(d));
        }
        let seen = |clock: &[u32; Lane::COUNT], d: usize| clock[self.lanes[d]] > self.positions[d];
        let unseen: Vec<usize> = last.into_iter().flatten().filter(|&d| !seen(&clock, d)).collect();
        let by_another = |&d: &usize| unseen.iter().any(|&other| other != d && seen(&self.clocks[other], d));
        let waits: Vec<usize> = unseen.iter().copied().filter(|d| !by_another(d)).collect();
        for &d in &waits {
            for (count, waited_for) in clock.iter_mut().zip(self.after(d)) {
                *count = (*count).max(waited_for);
            }
        }
        (waits, clock)
    }

    /// The clock after `d` completes.
    fn after(&self, d: usize) -> [u32; Lane::COUNT] {
        let mut clock = self.clocks[d];
        clock[self.lanes[d]] = self.positions[d] + 1;
        clock
    }

    /// True if instance `a` completes before instance `b` starts, however the lanes are timed.
    pub fn before(&self, a: usize, b: usize) -> bool {
        self.clocks[b][self.lanes[a]] > self.positions[a]
    }

    /// The instances of other lanes for whose events `i` must wait, at most one of each lane. Together with
    /// the order within lanes they imply the whole relation, and none is redundant.
    pub fn waits(&self, i: usize) -> &[usize] {
        &self.waits[i]
    }

    /// The lane of `i`, as an index.
    pub(crate) fn lane(&self, i: usize) -> usize {
        self.lanes[i]
    }

    /// The position of `i` in its lane.
    pub(crate) fn position(&self, i: usize) -> u32 {
        self.positions[i]
    }

    /// The number of instances of each lane that complete before `i` starts.
    pub(crate) fn clock(&self, i: usize) -> [u32; Lane::COUNT] {
        self.clocks[i]
    }
}

/// The instances in runs that an engine issues one after the other. The instances of a run may be issued
/// together, and then begin when all of them can, and end together: they are collectives of a kind, a group
/// of ranks and a block, none of which reads or writes what another writes. Any other instance is alone.
pub fn runs(program: &Program) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, instance) in program.instances.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if joins(&program.instances[run.clone()], instance) => run.end += 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// True if `instance` is a collective that may be issued together with those of `run`. Messages may not:
/// their ranks run other programs.
fn joins(run: &[Instance], instance: &Instance) -> bool {
    let kind = |i: &Instance| {
        let (collective, groups) = i.code.op().collective()?;
        let kind = (discriminant(&collective), groups, i.lane, i.phase(), i.when, i.origin.block, i.chunk);
        (!collective.is_message()).then_some(kind)
    };
    let is_independent = |other: &Instance| {
        let (written, writes) = (other.outputs[0].value, instance.outputs[0].value);
        written != writes && !instance.inputs.contains(&written) && !other.inputs.contains(&writes)
    };
    kind(instance).is_some() && kind(&run[0]) == kind(instance) && run.iter().all(is_independent)
}
