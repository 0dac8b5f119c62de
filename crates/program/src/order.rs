//! What happens before what: lane order, and the data dependencies between lanes.

use crate::{Lane, Program, ValueId};

/// The happens-before relation of a program's instances, as vector clocks over the lanes.
pub struct Order {
    /// For instance i and lane l: how many instances of l have completed before i starts.
    clocks: Vec<[u32; Lane::COUNT]>,
    /// The position of each instance within its lane.
    positions: Vec<u32>,
    lanes: Vec<usize>,
    /// For each instance, the instances of other lanes that it must wait for.
    waits: Vec<Vec<usize>>,
}

impl Order {
    /// The order of `program`: an instance follows those before it in its lane, whatever wrote what it reads, and whatever
    /// read or wrote what it writes.
    pub fn of(program: &Program) -> Self {
        let n = program.instances.len();
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
            for d in dependencies.iter().copied().chain(latest[lane]) {
                let through = order.clocks[d];
                for (mine, theirs) in order.clocks[i].iter_mut().zip(through) {
                    *mine = (*mine).max(theirs);
                }
                let seen = &mut order.clocks[i][order.lanes[d]];
                *seen = (*seen).max(order.positions[d] + 1);
            }
            dependencies.retain(|&d| order.lanes[d] != lane);
            dependencies.sort_unstable();
            dependencies.dedup();
            order.waits[i] = dependencies;
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

    /// Whether instance `a` has completed before instance `b` starts, however the lanes run.
    pub fn before(&self, a: usize, b: usize) -> bool {
        self.clocks[b][self.lanes[a]] > self.positions[a]
    }

    /// The instances of other lanes that `i` must wait for: the events that an executor emits.
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

    /// How many instances of each lane completed before `i` starts.
    pub(crate) fn clock(&self, i: usize) -> [u32; Lane::COUNT] {
        self.clocks[i]
    }
}
