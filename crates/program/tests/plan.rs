//! The planner on random programs over several lanes: values that may be live at one time share no byte.

use proptest::prelude::*;
use xtrain_program::order::Order;
use xtrain_program::{
    Instance, Lane, MemoryRow, Op, OpError, Plan, Program, Purpose, Region, Role, Stage, Storage, Tracer,
    ValueId,
};
use xtrain_tensor::{DType, TensorType};

/// An op of any arity whose first output may be computed over its first input.
#[derive(Clone, Debug)]
struct Any {
    outputs: Vec<usize>,
    workspace: usize,
    in_place: bool,
}

fn bytes(n: usize) -> TensorType {
    TensorType::new(DType::U8, [n])
}

/// The plan of a program of such ops, for a device on which each needs the workspace of its field.
fn plan(program: &Program) -> Plan {
    Plan::new(program, &|op, _| {
        let any: &dyn std::any::Any = op;
        any.downcast_ref::<Any>().map(|op| vec![bytes(op.workspace)]).unwrap_or_default()
    })
}

impl Op for Any {
    fn name(&self) -> &'static str {
        "any"
    }

    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(self.outputs.iter().copied().map(bytes).collect())
    }

    fn in_place(&self) -> &[(usize, usize)] {
        if self.in_place { &[(0, 0)] } else { &[] }
    }
}

/// One instance of a random program: the earlier values that it reads, its op and its lane.
#[derive(Clone, Debug)]
struct Line {
    reads: Vec<prop::sample::Index>,
    op: Any,
    lane: usize,
}

fn line() -> impl Strategy<Value = Line> {
    let sizes = prop::collection::vec(1usize..2000, 1..3);
    (prop::collection::vec(any::<prop::sample::Index>(), 0..3), sizes, 0usize..500, any::<bool>(), 0usize..3)
        .prop_map(|(reads, mut outputs, workspace, in_place, lane)| {
            outputs.dedup();
            Line { reads, op: Any { outputs, workspace: workspace + 1, in_place }, lane }
        })
}

fn build(lines: &[Line]) -> Program {
    let mut t = Tracer::default();
    let mut written: Vec<ValueId> = Vec::new();
    for l in lines {
        let reads: Vec<ValueId> =
            if written.is_empty() { vec![] } else { l.reads.iter().map(|i| *i.get(&written)).collect() };
        let mut op = l.op.clone();
        op.in_place &= !reads.is_empty();
        written.extend(t.emit(op, &reads).expect("takes anything"));
    }
    let mut program = t.finish();
    for (instance, l) in program.instances.iter_mut().zip(lines) {
        instance.lane = [Lane::Compute, Lane::Communication, Lane::Copy][l.lane];
    }
    program
}

fn operands(i: &Instance) -> Vec<ValueId> {
    let outputs = i.outputs.iter().map(|o| o.value);
    i.inputs.iter().copied().chain(outputs).collect()
}

/// Happens-before by its definition: the transitive closure of lane order and conflicting accesses.
fn closure(program: &Program) -> Vec<Vec<bool>> {
    let n = program.instances.len();
    let mut before = vec![vec![false; n]; n];
    for b in 0..n {
        for a in 0..b {
            let (x, y) = (&program.instances[a], &program.instances[b]);
            let writes = |i: &Instance, v: ValueId| i.outputs.iter().any(|o| o.value == v);
            let conflict =
                operands(x).iter().any(|&v| operands(y).contains(&v) && (writes(x, v) || writes(y, v)));
            before[a][b] = x.lane == y.lane || conflict;
        }
    }
    for k in 0..n {
        for a in 0..k {
            if before[a][k] {
                for b in k + 1..n {
                    before[a][b] |= before[k][b];
                }
            }
        }
    }
    before
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn values_that_may_be_alive_together_never_share_a_byte(lines in prop::collection::vec(line(), 1..40)) {
        let program = build(&lines);
        let before = closure(&program);
        let plan = plan(&program);
        let users: Vec<Vec<usize>> = program.ids().map(|v| {
            (0..program.instances.len()).filter(|&i| operands(&program.instances[i]).contains(&v)).collect()
        }).collect();
        let ends = |a: usize, b: usize| users[a].iter().all(|&u| before[u][users[b][0]]);
        for a in 0..users.len() {
            for b in 0..a {
                if users[a].is_empty() || users[b].is_empty() || ends(a, b) || ends(b, a) {
                    continue;
                }
                let (x, y) = (plan.location(ValueId(a as u32)), plan.location(ValueId(b as u32)));
                let apart = x.offset + x.bytes <= y.offset || y.offset + y.bytes <= x.offset;
                // In place: the last use of b is the instance that computes a in its memory.
                let writer = users[a][0];
                let over = program.instances[writer].code.op().in_place().contains(&(0, 0))
                    && program.instances[writer].outputs[0].value.0 as usize == a
                    && x == y
                    && users[b].iter().all(|&u| u == writer || before[u][writer]);
                prop_assert!(apart || over || chained(&program, a, b), "%{a} and %{b} at {x:?} and {y:?}");
            }
        }
        for (i, workspace) in plan.workspaces.iter().enumerate() {
            for (ty, place) in workspace {
                prop_assert_eq!(ty.bytes(), place.bytes);
                for (v, users) in users.iter().enumerate().filter(|(_, users)| !users.is_empty()) {
                    let ends = users.iter().all(|&u| before[u][i]) || before[i][users[0]];
                    let value = plan.location(ValueId(v as u32));
                    let apart = value.offset + value.bytes <= place.offset || place.offset + place.bytes <= value.offset;
                    prop_assert!(apart || ends, "%{v} and the workspace of {i} at {value:?} and {place:?}");
                }
            }
        }
        prop_assert_eq!(plan.memory.total_bytes(), plan.total_bytes());
    }

    #[test]
    fn the_order_is_the_closure_of_lanes_and_conflicts(lines in prop::collection::vec(line(), 1..40)) {
        let program = build(&lines);
        let (order, before) = (Order::new(&program), closure(&program));
        for b in 0..program.instances.len() {
            for a in 0..b {
                prop_assert_eq!(order.before(a, b), before[a][b], "{} before {}", a, b);
            }
        }
    }
}

/// Happens-before, if an instance waits for the earlier ones of its lane and for those in `waits` alone.
fn by_waits(program: &Program, waits: &[Vec<usize>]) -> Vec<Vec<bool>> {
    let n = program.instances.len();
    let mut before = vec![vec![false; n]; n];
    for b in 0..n {
        let same_lane = (0..b).filter(|&a| program.instances[a].lane == program.instances[b].lane);
        for a in same_lane.chain(waits[b].iter().copied()) {
            before[a][b] = true;
            (0..a).for_each(|earlier| before[earlier][b] |= before[earlier][a]);
        }
    }
    before
}

proptest! {
    #[test]
    fn waits_are_the_whole_order_between_lanes_and_none_is_idle(lines in prop::collection::vec(line(), 1..40)) {
        let program = build(&lines);
        let order = Order::new(&program);
        let waits: Vec<Vec<usize>> = (0..program.instances.len()).map(|i| order.waits(i).to_vec()).collect();
        let before = closure(&program);
        prop_assert_eq!(&by_waits(&program, &waits), &before);
        for (i, waited) in waits.iter().enumerate() {
            let mut lanes: Vec<Lane> = waited.iter().map(|&w| program.instances[w].lane).collect();
            prop_assert!(!lanes.contains(&program.instances[i].lane));
            lanes.dedup();
            prop_assert_eq!(lanes.len(), waited.len(), "{} waits twice for a lane", i);
            for w in 0..waited.len() {
                let mut without = waits.clone();
                without[i].remove(w);
                prop_assert!(by_waits(&program, &without) != before, "{i} need not wait for {}", waited[w]);
            }
        }
    }
}

/// True if %a was computed in the memory of %b, directly or through values between them.
fn chained(program: &Program, a: usize, b: usize) -> bool {
    let maker = program.instances.iter().find(|i| i.outputs.iter().any(|o| o.value.0 as usize == a));
    let Some(maker) =
        maker.filter(|m| !m.code.op().in_place().is_empty() && m.outputs[0].value.0 as usize == a)
    else {
        return false;
    };
    let source = maker.inputs[0].0 as usize;
    source == b || chained(program, source, b)
}

#[test]
fn a_chain_needs_two_buffers_and_an_in_place_chain_one() {
    for (in_place, buffers) in [(false, 2), (true, 1)] {
        let mut t = Tracer::default();
        let op = Any { outputs: vec![1024], workspace: 0, in_place: false };
        let mut v = t.emit(op.clone(), &[]).expect("takes anything")[0];
        for _ in 0..10 {
            v = t.emit(Any { in_place, ..op.clone() }, &[v]).expect("takes anything")[0];
        }
        let plan = plan(&t.finish());
        assert_eq!(plan.region_bytes[Region::Scratch as usize], buffers * 1024);
    }
}

/// Of the forward's values, the backward reads one directly, and one after it was changed in place; it writes
/// a third before it reads it.
#[test]
fn what_the_backward_reads_of_the_forward_is_in_slots() {
    let op = |in_place| Any { outputs: vec![1024], workspace: 0, in_place };
    let mut t = Tracer::default();
    let a = t.emit(op(false), &[]).expect("takes anything")[0];
    let b = t.emit(op(false), &[a]).expect("takes anything")[0];
    let changed = t.emit(op(true), &[b]).expect("takes anything")[0];
    let own = t.emit(op(false), &[changed]).expect("takes anything")[0];
    let mut t = Tracer::new(t.finish(), Stage::Backward, Role::Dgrad);
    t.emit_into(op(false), &[a], &[Some(own)]).expect("takes anything");
    t.emit(op(false), &[changed, own]).expect("takes anything");
    let mut program = t.finish();
    for slots in [0, 1, 3] {
        program.slots = if slots > 0 { vec![slots] } else { Vec::new() };
        let plan = plan(&program);
        let saved = if slots > 0 { Region::Slots } else { Region::Scratch };
        let regions = [a, b, changed, own].map(|v| plan.location(v).region);
        assert_eq!(regions, [saved, saved, saved, Region::Scratch], "{slots} slots");
        let expected = if slots > 0 { (vec![2 * 1024], slots * 2 * 1024) } else { (Vec::new(), 0) };
        assert_eq!((plan.slot_bytes.clone(), plan.region_bytes[Region::Slots as usize]), expected);
        let of_table: usize = plan.memory.total_bytes();
        assert_eq!(of_table, plan.total_bytes(), "{slots} slots");
    }
}

#[test]
#[should_panic(expected = "before it is written")]
fn reading_a_value_that_was_never_written_panics() {
    let mut t = Tracer::default();
    let v = t.emit(Any { outputs: vec![8], workspace: 0, in_place: false }, &[]).expect("takes anything")[0];
    let mut program = t.finish();
    let ghost = program.add_value(TensorType::new(DType::U8, [8]), Storage::Transient);
    program.instances[0].inputs = vec![ghost];
    assert!(ghost > v);
    plan(&program);
}

#[test]
fn the_table_lists_workspace_at_the_peak_and_elsewhere() {
    let mut t = Tracer::default();
    let op = |outputs: usize, workspace| Any { outputs: vec![outputs], workspace, in_place: false };
    t.enter_block(Some(0));
    let small = t.site("core").emit(op(64, 100), &[]).expect("takes anything")[0];
    t.enter_block(Some(1));
    let small = t.site("core").emit(op(64, 200), &[small]).expect("takes anything")[0];
    t.enter_block(None);
    t.site("head").emit(op(64, 5000), &[small]).expect("takes anything");
    let memory = plan(&t.finish()).memory;
    let bytes = |rows: &[MemoryRow], site: &str| {
        let named = Purpose::Workspace(site.into());
        rows.iter().find(|row| row.purpose == named).map(|row| row.bytes)
    };
    assert_eq!(memory.peak_at, "head (fprop)");
    assert_eq!(bytes(&memory.rows, "head any"), Some(5120));
    // That of the block with the larger one.
    assert_eq!(bytes(&memory.elsewhere, "core any"), Some(256));
    assert_eq!(memory.elsewhere.len(), 1);
}
