//! Random programs with collectives, and their values on all ranks, computed plainly in one thread.

use std::any::Any;
use std::sync::Arc;
use std::thread;
use xtrain_distributed::{Communicator, ThreadCommunicator};
use xtrain_ops::add::Add;
use xtrain_ops::cast::Cast;
use xtrain_ops::collective::{AllGather, AllToAll, ReduceScatter};
use xtrain_ops::sum_ranks::SumRanks;
use xtrain_program::{
    Groups, Lane, Op, Program, Role, Stage, StateKind, Storage, Tracer, ValueId, When, WriteMode,
};
use xtrain_runtime::{Engine, EngineError, Part};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// Rows and columns of a tensor of all ranks. Two, three and four ranks get pieces with and without padding.
const ROWS: usize = 10;
const COLS: usize = 7;
/// The parts of a step of three micro-steps, and a step of one.
const PARTS: [Part; 5] = [Part::First, Part::Next, Part::Last, Part::Update, Part::Whole];
/// States of all ranks' rows, and of a piece.
const FULL_STATES: [&str; 2] = ["full0", "full1"];
const PIECE_STATES: [&str; 2] = ["piece0", "piece1"];

/// A builder of random programs for a number of ranks.
struct Builder {
    rng: Philox,
    drawn: u64,
    tracer: Tracer,
    /// Groups of equal size.
    groups: Vec<Groups>,
    /// True if reduce-scatters are drawn.
    adds_over_ranks: bool,
    /// The number of write modes to draw from: the update has no first micro-step.
    modes: usize,
    /// Values with all rows, and pieces.
    full: Vec<ValueId>,
    pieces: Vec<ValueId>,
    /// The lane, if it is drawn, the micro-steps and the write mode of each instance.
    placed: Vec<(Option<Lane>, When, WriteMode)>,
}

/// A random program of a step, by `seed`, for this number of ranks: with collectives of all, or of four ranks
/// by twos. It has reduce-scatters among as many ranks as `most_added` at most.
pub(crate) fn random_program(seed: u64, ranks: usize, most_added: usize) -> Program {
    let groups = match (ranks, seed % 2) {
        (4, 1) => vec![Groups { size: 2, stride: 1 }, Groups { size: 2, stride: 2 }],
        _ => vec![Groups::world(ranks)],
    };
    let adds_over_ranks = groups[0].size <= most_added;
    let mut builder = Builder {
        rng: Philox::new(seed, 0, 8),
        drawn: 0,
        tracer: Tracer::default(),
        groups,
        adds_over_ranks,
        modes: 3,
        full: Vec::new(),
        pieces: Vec::new(),
        placed: Vec::new(),
    };
    let input = builder.tracer.input("in", full());
    let [states, pieces] = builder.states();
    (builder.full, builder.pieces) = (states.iter().copied().chain([input]).collect(), pieces.to_vec());
    for _ in 0..2 + builder.draw(12) {
        builder.step(states, pieces);
    }
    for (name, value) in [("out full", builder.full.clone()), ("out piece", builder.pieces.clone())] {
        let is_transient =
            |v: &&ValueId| matches!(builder.tracer.program().value(**v).storage, Storage::Transient);
        if let Some(&value) = value.iter().rev().find(is_transient) {
            builder.tracer.output(name, value);
        }
    }
    // The update reads and writes states alone.
    builder.tracer = Tracer::new(std::mem::take(&mut builder.tracer).finish(), Stage::Update, Role::Update);
    (builder.full, builder.pieces, builder.modes) = (states.to_vec(), pieces.to_vec(), 2);
    for _ in 0..1 + builder.draw(6) {
        builder.step(states, pieces);
    }
    let mut program = builder.tracer.finish();
    for (instance, (lane, when, mode)) in program.instances.iter_mut().zip(builder.placed) {
        instance.lane = lane.unwrap_or(instance.lane);
        (instance.when, instance.outputs[0].mode) = (when, mode);
    }
    program
}

impl Builder {
    fn draw(&mut self, below: usize) -> usize {
        self.drawn += 1;
        self.rng.word(self.drawn) as usize % below
    }

    fn states(&mut self) -> [[ValueId; 2]; 2] {
        let piece = piece(self.groups[0]);
        let tracer = &mut self.tracer;
        [
            FULL_STATES.map(|name| tracer.state(StateKind::Master, name, full())),
            PIECE_STATES.map(|name| tracer.state(StateKind::Moment1, name, piece)),
        ]
    }

    /// Adds a sum of two values, an all-gather, or one reduce-scatter or several together.
    fn step(&mut self, states: [ValueId; 2], piece_states: [ValueId; 2]) {
        let (is_state, which) = (self.draw(3) == 0, self.draw(2));
        let drawn = self.draw(self.groups.len());
        let groups = self.groups[drawn];
        let first = self.draw(groups.size);
        match self.draw(if self.adds_over_ranks { 6 } else { 5 }) {
            0 => {
                let target = is_state.then_some(states[which]);
                let values = self.full.clone();
                let sum = self.sum(&values, target);
                self.full.push(sum);
            }
            1 => {
                let target = is_state.then_some(piece_states[which]);
                let values = self.pieces.clone();
                let sum = self.sum(&values, target);
                self.pieces.push(sum);
            }
            2 => {
                let target = is_state.then_some(states[which]);
                let input = self.draw(self.pieces.len());
                let inputs = [self.pieces[input]];
                let op = AllGather { groups, first, rows: ROWS };
                let gathered = self.emit(op, &inputs, target, None, When::Always, WriteMode::Assign);
                self.full.push(gathered);
            }
            3 => {
                let (count, values) = (2 + self.draw(3), self.full.clone());
                // Only the exchanges read these.
                let sums: Vec<ValueId> = (0..count).map(|_| self.sum(&values, None)).collect();
                let op = || AllToAll { groups, first, piece_rows: piece(groups).shape[0] };
                let exchange =
                    |x: &ValueId| self.emit(op(), &[*x], None, None, When::Always, WriteMode::Assign);
                let exchanged: Vec<ValueId> = sums.iter().map(exchange).collect();
                for pieces in exchanged {
                    let lane = Some(self.lane());
                    let sum = self.emit(SumRanks, &[pieces], None, lane, When::Always, WriteMode::Assign);
                    self.pieces.push(sum);
                }
            }
            4 => {
                let when = if self.draw(3) == 0 { When::Last } else { When::Always };
                let is_bf16 = self.draw(3) == 0;
                let input = self.draw(self.full.len());
                let mut x = self.full[input];
                let assign = WriteMode::Assign;
                if is_bf16 {
                    let lane = self.lane();
                    x = self.emit(Cast { to: DType::BF16 }, &[x], None, Some(lane), when, assign);
                }
                let op = AllToAll { groups, first, piece_rows: piece(groups).shape[0] };
                let pieces = self.emit(op, &[x], None, None, when, assign);
                // A value that only the last micro-step writes is state.
                let target = (is_state || when == When::Last).then_some(piece_states[which]);
                let modes = [WriteMode::Assign, WriteMode::Add, WriteMode::AddAfterFirst];
                let mode = if target.is_some() { modes[self.draw(self.modes)] } else { assign };
                let lane = self.lane();
                let sum = self.emit(SumRanks, &[pieces], target, Some(lane), when, mode);
                self.pieces.push(sum);
            }
            _ => {
                let (as_summand, input) = (self.draw(2) == 0, self.draw(self.full.len()));
                let (x, target) = ([self.full[input]], is_state.then_some(piece_states[which]));
                let op = ReduceScatter { groups, first, piece_rows: piece(groups).shape[0], as_summand };
                let (always, assign) = (When::Always, WriteMode::Assign);
                let sum = match as_summand {
                    false => self.emit(op, &x, target, None, always, assign),
                    true => {
                        let summand = self.emit(op, &x, None, None, always, assign);
                        let (lane, add) = (Some(self.lane()), WriteMode::Add);
                        let mode = if target.is_some() { add } else { assign };
                        self.emit(SumRanks, &[summand], target, lane, always, mode)
                    }
                };
                self.pieces.push(sum);
            }
        }
    }

    fn lane(&mut self) -> Lane {
        Lane::ALL[self.draw(Lane::COUNT)]
    }

    /// The sum of two different values; it is computed over the first, so the second is not the target.
    fn sum(&mut self, values: &[ValueId], target: Option<ValueId>) -> ValueId {
        let x = self.draw(values.len());
        let y = (x + 1 + self.draw(values.len() - 1)) % values.len();
        let (mut inputs, lane) = ([values[x], values[y]], self.lane());
        if target == Some(inputs[1]) {
            inputs.swap(0, 1);
        }
        if inputs[0] == inputs[1] {
            return inputs[0];
        }
        self.emit(Add, &inputs, target, Some(lane), When::Always, WriteMode::Assign)
    }

    fn emit(
        &mut self,
        op: impl Op,
        inputs: &[ValueId],
        target: Option<ValueId>,
        lane: Option<Lane>,
        when: When,
        mode: WriteMode,
    ) -> ValueId {
        self.placed.push((lane, when, mode));
        self.tracer.site("random").emit_into(op, inputs, &[target]).expect("the types fit")[0]
    }
}

fn full() -> TensorType {
    TensorType::new(DType::F32, [ROWS, COLS])
}

fn piece(groups: Groups) -> TensorType {
    TensorType::new(DType::F32, [ROWS.div_ceil(groups.size), COLS])
}

/// The contents of the input and the states of a rank.
fn contents(ty: TensorType, rank: usize, of: usize) -> Vec<f32> {
    (0..ty.numel()).map(|n| ((n * 5 + rank * 3 + of * 7) % 11) as f32 + 0.1 * (rank + 1) as f32).collect()
}

/// The outputs after each part, repeated `times`, and the states at the end, of one rank.
pub(crate) fn results(
    engine: &mut dyn Engine,
    program: Program,
    rank: usize,
    times: usize,
) -> Result<Vec<Vec<f32>>, EngineError> {
    let floats = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    let bytes = |x: Vec<f32>| x.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    let (states, outputs) = (states(&program), names_of_outputs(&program));
    let id = engine.load(program)?;
    for (n, (kind, name, ty)) in states.iter().enumerate() {
        engine.write_state(*kind, name, &bytes(contents(*ty, rank, n + 1)))?;
    }
    engine.write_input(id, "in", &bytes(contents(full(), rank, 0)))?;
    let mut all = Vec::new();
    for part in (0..times).flat_map(|_| PARTS) {
        engine.run(id, part)?;
        let found = engine.outputs(id)?;
        for (name, _) in &outputs {
            all.push(floats(found.get(name)?));
        }
    }
    for (kind, name, _) in &states {
        all.push(floats(&engine.read_state(*kind, name)?));
    }
    Ok(all)
}

/// [`results`] of all ranks, each of which runs `engine` in a thread of its own.
pub(crate) fn results_of_ranks(
    program: &Program,
    ranks: usize,
    times: usize,
    engine: impl Fn(usize, Arc<dyn Communicator>) -> Result<Box<dyn Engine>, EngineError> + Sync,
) -> Vec<Result<Vec<Vec<f32>>, EngineError>> {
    thread::scope(|scope| {
        let run = |communicator: ThreadCommunicator| {
            let rank = communicator.rank();
            results(&mut *engine(rank, Arc::new(communicator))?, program.clone(), rank, times)
        };
        let spawn = |communicator| scope.spawn(move || run(communicator));
        let handles: Vec<_> = ThreadCommunicator::world(ranks).into_iter().map(spawn).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

/// The expected [`results`] of each rank.
pub(crate) fn expected(program: &Program, ranks: usize, times: usize) -> Vec<Vec<Vec<f32>>> {
    let mut values: Vec<Vec<Vec<f32>>> =
        program.values.iter().map(|value| vec![vec![0.0; value.ty.numel()]; ranks]).collect();
    let (states, outputs) = (states(program), names_of_outputs(program));
    let id_of = |kind, name: &str| program.state(kind, name).expect("a state of the program").0 as usize;
    for rank in 0..ranks {
        for (n, (kind, name, ty)) in states.iter().enumerate() {
            values[id_of(*kind, name)][rank] = contents(*ty, rank, n + 1);
        }
        values[program.input("in").expect("an input").0 as usize][rank] = contents(full(), rank, 0);
    }
    let mut all = vec![Vec::new(); ranks];
    for part in (0..times).flat_map(|_| PARTS) {
        for instance in program.instances.iter().filter(|instance| part.runs(instance)) {
            let inputs: Vec<_> = instance.inputs.iter().map(|v| values[v.0 as usize].clone()).collect();
            let computed = compute(instance.code.op(), &inputs, program.ty(instance.outputs[0].value));
            let output = &mut values[instance.outputs[0].value.0 as usize];
            match instance.outputs[0].mode.accumulates(part.is_first()) {
                false => *output = computed,
                true => output.iter_mut().flatten().zip(computed.iter().flatten()).for_each(|(y, x)| *y += x),
            }
        }
        for (_, id) in &outputs {
            (0..ranks).for_each(|rank| all[rank].push(values[id.0 as usize][rank].clone()));
        }
    }
    for (kind, name, _) in &states {
        (0..ranks).for_each(|rank| all[rank].push(values[id_of(*kind, name)][rank].clone()));
    }
    all
}

/// The output of an op on every rank, from its inputs on every rank.
fn compute(op: &dyn Op, inputs: &[Vec<Vec<f32>>], ty: TensorType) -> Vec<Vec<f32>> {
    let (ranks, op): (usize, &dyn Any) = (inputs[0].len(), op);
    if op.is::<Add>() {
        let add = |(x, y): (&Vec<f32>, &Vec<f32>)| x.iter().zip(y).map(|(x, y)| x + y).collect();
        return inputs[0].iter().zip(&inputs[1]).map(add).collect();
    }
    if op.is::<Cast>() {
        let round = |x: &Vec<f32>| {
            let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
            HostTensor::from_f64(ty, &wide).to_f64().into_iter().map(|x| x as f32).collect()
        };
        return inputs[0].iter().map(round).collect();
    }
    let sum = |x: &Vec<f32>| {
        let pieces: Vec<&[f32]> = x.chunks(ty.numel()).collect();
        // Up to four ranks.
        let pairs = |i: usize| pieces.chunks(2).map(move |pair| pair.iter().map(|p| p[i]).sum::<f32>());
        (0..ty.numel()).map(|i| pairs(i).sum()).collect()
    };
    if op.is::<SumRanks>() {
        return inputs[0].iter().map(sum).collect();
    }
    let of_group = |groups: Groups, rank| -> Vec<usize> { groups.ranks(rank).collect() };
    if let Some(&AllGather { first, groups, .. }) = op.downcast_ref() {
        let gathered = |rank| {
            let ranks = of_group(groups, rank);
            let pieces = (0..ranks.len()).flat_map(|p| inputs[0][ranks[(first + p) % ranks.len()]].clone());
            pieces.take(ty.numel()).collect()
        };
        return (0..ranks).map(gathered).collect();
    }
    let received = |groups: Groups, first, elements, rank| -> Vec<f32> {
        let n = groups.size;
        let piece = (groups.place(rank) + n - first) % n;
        let element = |from: usize, i| inputs[0][from].get(piece * elements + i).copied().unwrap_or(0.0);
        let of = |from| (0..elements).map(move |i| element(from, i));
        of_group(groups, rank).into_iter().flat_map(of).collect()
    };
    if let Some(&ReduceScatter { first, groups, .. }) = op.downcast_ref() {
        return (0..ranks).map(|rank| sum(&received(groups, first, ty.numel(), rank))).collect();
    }
    let Some(&AllToAll { first, groups, .. }) = op.downcast_ref() else { panic!("an op of another kind") };
    (0..ranks).map(|rank| received(groups, first, ty.numel() / groups.size, rank)).collect()
}

fn states(program: &Program) -> Vec<(StateKind, Arc<str>, TensorType)> {
    let state = |id| match &program.value(id).storage {
        Storage::State { kind, name } => Some((*kind, name.clone(), program.ty(id))),
        _ => None,
    };
    program.ids().filter_map(state).collect()
}

fn names_of_outputs(program: &Program) -> Vec<(Arc<str>, ValueId)> {
    program.outputs().collect()
}
