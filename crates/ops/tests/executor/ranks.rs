//! Collectives: ranks as threads, stages of a pipeline, ranks that wait in vain, and runs of one process.

use super::{LANE_PROGRAMS, SMALL, check, engine, filled, floats, vector};
use crate::common;
use crate::common::collectives;
use libtest_mimic::Failed;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use xtrain_cuda::{CudaDevice, CudaError, Gpu, NcclId};
use xtrain_distributed::{
    CommError, Communicator, Groups, Pace, PaceTime, Path, Sending, ThreadCommunicator,
};
use xtrain_ops::add::Add;
use xtrain_ops::collective::{AllGather, Receive, ReduceScatter, Send, SendReceive};
use xtrain_ops::pack_sums::PackSums;
use xtrain_ops::registry::cuda_kernels;
use xtrain_program::{Parallel, Program, Role, Stage, StateKind, Tracer};
use xtrain_rank::Rank;
use xtrain_runtime::{
    Checks, CudaEngine, Engine, EngineError, MessagePair, MicroSlot, NcclGroups, Part, ProgramId, Ticket,
    Turn, groups_of_run, message_pairs,
};
use xtrain_tensor::{DType, TensorType};

/// Ranks as threads, each with an engine, exchange through the host and have the values of a plain
/// computation. Parts without collectives are recorded while another rank waits in one.
pub(crate) fn ranks_exchange_through_the_host() -> Result<(), Failed> {
    let engine = |(): &(), _, host| {
        Ok(CudaEngine::new(Arc::new(cuda_kernels()), Gpu::open(0)?)?.with_communicator(host))
    };
    ranks_exchange("the host", &WORLDS, |ranks| ranks, |_| Ok(()), engine)
}

/// Numbers of ranks, and those that are added to the seed. Programs of four ranks have collectives of groups
/// for every other seed.
const WORLDS: [(usize, u64); 5] = [(2, 0), (2, 1), (3, 2), (NCCL_RANKS, 3), (NCCL_RANKS, 4)];

/// The most ranks of a test of NCCL, each of which has a GPU of its own.
const NCCL_RANKS: usize = 4;

/// The kinds of groups of a run, and an id by rank for each; and the pairs of its messages.
struct NcclIds {
    groups: Vec<(Groups, Vec<NcclId>)>,
    pairs: Vec<(MessagePair, NcclId)>,
}

/// The ids of a run, of which groups use those of their first ranks.
fn nccl_ids(ranks: usize) -> Result<NcclIds, CudaError> {
    let replicas = if ranks == NCCL_RANKS { 2 } else { 1 };
    ids_of_run(&Parallel { rank: Rank::first_of(ranks), replicas, ..Parallel::ALONE })
}

/// The ids of a run whose ranks are stages.
fn nccl_ids_of_stages(stages: usize) -> Result<NcclIds, CudaError> {
    ids_of_run(&Parallel { rank: Rank::first_of(stages), pipeline: stages, ..Parallel::ALONE })
}

fn ids_of_run(parallel: &Parallel) -> Result<NcclIds, CudaError> {
    let ranks = 0..parallel.rank.world_size;
    let ids = |groups| Ok((groups, ranks.clone().map(|_| NcclId::new()).collect::<Result<_, CudaError>>()?));
    let groups = groups_of_run(parallel).into_iter().map(ids).collect::<Result<_, CudaError>>()?;
    let with_id = |pair| Ok((pair, NcclId::new()?));
    let pairs = message_pairs(parallel).into_iter().map(with_id).collect::<Result<_, CudaError>>()?;
    Ok(NcclIds { groups, pairs })
}

/// The engine of a rank whose collectives go through NCCL.
fn engine_with_nccl(
    ids: &NcclIds,
    rank: usize,
    communicator: Arc<dyn Communicator>,
    names: bool,
) -> Result<CudaEngine, EngineError> {
    let gpu = Gpu::open(rank)?;
    let of_first = |(groups, ids): &(Groups, Vec<NcclId>)| {
        let first = groups.ranks(rank).next().expect("a group has ranks");
        (*groups, ids[first])
    };
    let (kinds, of_kinds): (Vec<_>, Vec<_>) = ids.groups.iter().map(of_first).unzip();
    let poll = || Ok::<_, CudaError>(());
    let nccl = NcclGroups::join(gpu.context(), rank, &kinds, &of_kinds, &poll)?;
    let nccl = nccl.with_messages(gpu.context(), rank, &ids.pairs, &poll)?;
    CudaEngine::new(Arc::new(cuda_kernels()), gpu)?.with_nccl(nccl.naming(names), communicator)
}

/// Connects the ranks of all groups. A rank waits for the others in its first collective of a group, and no
/// thread of the process records a graph meanwhile, which ranks of other groups would wait for.
fn connected(mut engine: CudaEngine, ranks: usize) -> Result<CudaEngine, EngineError> {
    let mut tracer = Tracer::default();
    let input = tracer.input("in", vector(1));
    let halves = [Groups { size: 2, stride: 1 }, Groups { size: 2, stride: 2 }];
    let groups = halves.into_iter().filter(|_| ranks == NCCL_RANKS).chain([Groups::world(ranks)]);
    for (n, groups) in groups.enumerate() {
        let op = AllGather { groups, first: 0, rows: groups.size };
        let all = tracer.site("connect").emit(op, &[input]).expect("a vector")[0];
        tracer.output(&format!("all {n}"), all);
    }
    let id = engine.load(tracer.finish())?;
    engine.write_input(id, "in", &filled(1.0, 1))?;
    engine.run(id, Part::Whole)?;
    engine.outputs(id)?;
    Ok(engine)
}

/// The engine of a rank that copies to the memory of the others' GPUs.
fn engine_with_copies(
    rank: usize,
    host: Arc<dyn Communicator>,
    names: bool,
) -> Result<CudaEngine, EngineError> {
    CudaEngine::new(Arc::new(cuda_kernels()), Gpu::open(rank)?)?.with_peer_copies(host, names)
}

/// Ranks as threads exchange through NCCL, op by op and in graphs, and have the values of a plain
/// computation, which are those of an exchange through the host.
pub(crate) fn ranks_exchange_by_nccl() -> Result<(), Failed> {
    let engine = |ids: &NcclIds, rank, host: Arc<dyn Communicator>| {
        let ranks = host.world_size();
        connected(engine_with_nccl(ids, rank, host, rank == 0)?, ranks)
    };
    // The sum of two is the same in any order.
    ranks_exchange("NCCL", &worlds_of_gpus()?, |_| 2, nccl_ids, engine)
}

/// As [`ranks_exchange_by_nccl`], by copies to each other's memory.
pub(crate) fn ranks_exchange_by_copies() -> Result<(), Failed> {
    let engine = |(): &(), rank, host: Arc<dyn Communicator>| {
        let ranks = host.world_size();
        connected(engine_with_copies(rank, host, false)?, ranks)
    };
    ranks_exchange("copies", &worlds_of_gpus()?, |_| 1, |_| Ok(()), engine)
}

/// The worlds in which each rank has a GPU.
fn worlds_of_gpus() -> Result<Vec<(usize, u64)>, CudaError> {
    let gpus = CudaDevice::all()?.len();
    Ok(WORLDS.into_iter().filter(|(ranks, _)| *ranks <= gpus).collect())
}

/// Ranks run random programs of collectives, with reduce-scatters among at most so many of them.
fn ranks_exchange<T: Sync>(
    path: &str,
    worlds: &[(usize, u64)],
    most_added: impl Fn(usize) -> usize,
    meet: impl Fn(usize) -> Result<T, CudaError>,
    engine: impl Fn(&T, usize, Arc<dyn Communicator>) -> Result<CudaEngine, EngineError> + Sync,
) -> Result<(), Failed> {
    for &(ranks, n) in worlds {
        let seed = common::seed().wrapping_add(n);
        let program = collectives::random_program(seed, ranks, most_added(ranks));
        let met = meet(ranks)?;
        let found = collectives::results_of_ranks(&program, ranks, 3, |rank, communicator| {
            Ok(Box::new(engine(&met, rank, communicator)?))
        });
        let expected = collectives::expected(&program, ranks, 3);
        for (rank, (found, expected)) in found.into_iter().zip(&expected).enumerate() {
            assert!(
                found? == *expected,
                "rank {rank} of {ranks} of the program XTRAIN_TEST_SEED={seed}: a collective by {path} at random has other values"
            );
        }
    }
    Ok(())
}

/// NCCL adds in an order of its own. Numbers of a few bits have exact sums; pieces have padding and begin at
/// each rank, and whole pieces at the first.
pub(crate) fn ranks_add_by_nccl() -> Result<(), Failed> {
    let gpus = CudaDevice::all()?.len();
    for ranks in (2..=NCCL_RANKS).filter(|ranks| *ranks <= gpus) {
        let program = || {
            let mut tracer = Tracer::default();
            let groups = Groups::world(ranks);
            for (name, rows) in [("short", 3 * ranks - 2), ("whole", 3 * ranks)] {
                let input = tracer.input(name, TensorType::new(DType::F32, [rows, 7]));
                for first in 0..ranks {
                    let op = ReduceScatter { groups, first, piece_rows: 3, as_summand: first % 2 == 1 };
                    let sum = tracer.site(name).emit(op, &[input]).expect("it fits")[0];
                    tracer.output(&format!("{name} {first}"), sum);
                }
            }
            tracer.finish()
        };
        let ids = nccl_ids(ranks)?;
        let run = |communicator: ThreadCommunicator| -> Result<(), Failed> {
            let rank = communicator.rank();
            let mut engine = engine_with_nccl(&ids, rank, Arc::new(communicator), false)?;
            let id = engine.load(program())?;
            let number = |i: usize, rank: usize| ((i * 5 + rank * 3) % 11) as f32;
            for (name, rows) in [("short", 3 * ranks - 2), ("whole", 3 * ranks)] {
                let numbers: Vec<u8> = (0..rows * 7).flat_map(|i| number(i, rank).to_le_bytes()).collect();
                engine.write_input(id, name, &numbers)?;
            }
            // Op by op, while it is recorded, and as a graph.
            for _ in 0..3 {
                engine.run(id, Part::Whole)?;
                let outputs = engine.outputs(id)?;
                for (name, rows) in [("short", 3 * ranks - 2), ("whole", 3 * ranks)] {
                    for first in 0..ranks {
                        let begin = (rank + ranks - first) % ranks * 3 * 7;
                        let sum = |i: usize| -> f32 { (0..ranks).map(|rank| number(i, rank)).sum() };
                        let of = |i: usize| if i < rows * 7 { sum(i) } else { 0.0 };
                        let expected: Vec<f32> = (begin..begin + 3 * 7).map(of).collect();
                        let name = format!("{name} {first}");
                        let found = floats(outputs.get(&name)?);
                        assert_eq!(found, expected, "{name} of rank {rank} of {ranks}");
                    }
                }
            }
            Ok(())
        };
        thread::scope(|scope| {
            let ranks = ThreadCommunicator::world(ranks).into_iter();
            let ranks: Vec<_> = ranks.map(|communicator| scope.spawn(|| run(communicator))).collect();
            let ran: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect();
            ran.into_iter().collect::<Result<(), Failed>>()
        })?;
    }
    Ok(())
}

/// Elements of a tensor whose places, and those of all after it, differ between stages.
fn elements_of_stage(stage: usize) -> usize {
    100 + 700 * stage
}

/// The stage `stage` of `stages`. It sends the sum of what it receives and its state; back comes the sum of
/// these sums of the stages after it, to which it adds its own. In the update, the first and the last stage
/// exchange their states, and all stages gather these.
fn stage(stage: usize, stages: usize, elements: usize) -> Result<Program, Failed> {
    let (groups, ty, is_last) = (Groups::world(stages), vector(elements), stage + 1 == stages);
    let mut tracer = Tracer::default();
    tracer.state(StateKind::Moment1, "of this stage", vector(elements_of_stage(stage)));
    let state = tracer.state(StateKind::Master, "state", ty);
    let first = match stage {
        0 => tracer.input("in", ty),
        _ => tracer.site("stage").emit(Receive { groups, from: stage - 1, ty }, &[])?[0],
    };
    let saved = tracer.site("sum").emit(Add, &[first, state])?[0];
    if !is_last {
        tracer.site("stage").emit(Send { groups, to: stage + 1 }, &[saved])?;
    }
    let mut tracer = Tracer::new(tracer.finish(), Stage::Backward, Role::Dgrad);
    let mut sum = saved;
    if !is_last {
        let back = tracer.site("stage").emit(Receive { groups, from: stage + 1, ty }, &[])?[0];
        sum = tracer.site("sum").emit(Add, &[back, saved])?[0];
    }
    match stage {
        0 => {
            let both = tracer.site("sum").emit(PackSums, &[saved, sum])?[0];
            tracer.output("out", both);
        }
        _ => {
            tracer.site("stage").emit(Send { groups, to: stage - 1 }, &[sum])?;
        }
    }
    let mut tracer = Tracer::new(tracer.finish(), Stage::Update, Role::Update);
    if stage == 0 || is_last {
        let with = if is_last { 0 } else { stages - 1 };
        let other = tracer.site("tied").emit(SendReceive { groups, with }, &[state])?[0];
        tracer.output("of the other", other);
    }
    let gather = AllGather { groups, first: 0, rows: stages * elements };
    let all = tracer.site("all").emit(gather, &[state])?[0];
    tracer.output("all", all);
    let mut program = tracer.finish();
    program.slots = vec![stages - stage];
    Ok(program)
}

/// The runs of a step of a stage (1F1B), and its inputs. Outputs are fetched after the update.
fn run_stage(
    engine: &mut CudaEngine,
    id: ProgramId,
    (stage, stages): (usize, usize),
    elements: usize,
    values: &[f32],
) -> Result<Ticket, EngineError> {
    let (slots, micro_steps) = (stages - stage, values.len());
    let mut backwards = 0..micro_steps;
    let slot = |n: usize| MicroSlot { chunk: 0, number: n % slots };
    for (n, &value) in values.iter().enumerate() {
        if stage == 0 {
            engine.write_input(id, "in", &filled(value, elements))?;
        }
        engine.run(id, Part::Forward(Turn::of(n, micro_steps), slot(n)))?;
        let done = if n + 1 == micro_steps { micro_steps } else { (n + 2).saturating_sub(slots) };
        while backwards.start < done
            && let Some(n) = backwards.next()
        {
            engine.run(id, Part::Backward(Turn::of(n, micro_steps), slot(n)))?;
        }
    }
    engine.run(id, Part::Update)?;
    engine.fetch(id)
}

/// Stages exchange messages by a path, in more steps than there are buffers, whose results are collected in
/// the end: with fewer micro-batches than stages and with many, op by op with poisoned memory and in graphs.
/// Each micro-batch's backward reads what its own forward has saved, though other forwards ran between them.
fn stages_exchange<T: Sync>(
    worlds: &[usize],
    meet: impl Fn(usize) -> Result<T, CudaError>,
    engine: impl Fn(&T, usize, Arc<dyn Communicator>) -> Result<CudaEngine, EngineError> + Sync,
) -> Result<(), Failed> {
    let run = |met: &T, communicator: ThreadCommunicator, poison, elements| -> Result<(), Failed> {
        let (rank, stages) = (communicator.rank(), communicator.world_size());
        let mut engine = engine(met, rank, Arc::new(communicator))?;
        engine.set_checks(Checks { poison, numerics: false });
        let id = engine.load(stage(rank, stages, elements)?)?;
        let own = |stage: usize| 0.5 * (stage + 1) as f32;
        engine.write_state(StateKind::Master, "state", &filled(own(rank), elements))?;
        let mut results = Vec::new();
        for step in 0..6 {
            let micro_steps = [1, 2, 3, 7][step % 4];
            let values: Vec<f32> = (0..micro_steps).map(|n| (step * 8 + n) as f32).collect();
            let ticket = run_stage(&mut engine, id, (rank, stages), elements, &values)?;
            results.push((values, ticket));
        }
        for (values, ticket) in results {
            let outputs = engine.collect(ticket)?;
            let what = format!("stage {rank} of {stages}, {} micro-batches", values.len());
            let all = outputs.get("all")?;
            for (stage, gathered) in all.chunks(4 * elements).enumerate() {
                check(&format!("{what}: gathered"), gathered, own(stage));
            }
            if rank == 0 || rank + 1 == stages {
                let other = if rank == 0 { stages - 1 } else { 0 };
                check(&format!("{what}: exchanged"), outputs.get("of the other")?, own(other));
            }
            if rank == 0 {
                let up_to = |stage: usize| -> f32 { (0..=stage).map(own).sum() };
                let saved: f32 = values.iter().map(|value| value + own(0)).sum();
                let of_all = |value: &f32| (0..stages).map(|stage| value + up_to(stage)).sum::<f32>();
                let bytes = outputs.get("out")?;
                check(&format!("{what}: saved"), &bytes[..4 * elements], saved);
                check(&what, &bytes[4 * elements..][..4 * elements], values.iter().map(of_all).sum());
            }
        }
        Ok(())
    };
    for (n, (&stages, poison)) in
        worlds.iter().flat_map(|stages| [(stages, true), (stages, false)]).enumerate()
    {
        let elements = 1 + common::seed().wrapping_add(n as u64).wrapping_mul(2_654_435_761) as usize % 3000;
        let met = meet(stages)?;
        thread::scope(|scope| {
            let ranks = ThreadCommunicator::world(stages).into_iter();
            let ranks: Vec<_> =
                ranks.map(|communicator| scope.spawn(|| run(&met, communicator, poison, elements))).collect();
            let ran: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect();
            ran.into_iter().collect::<Result<(), Failed>>()
        })?;
    }
    Ok(())
}

pub(crate) fn stages_exchange_through_the_host() -> Result<(), Failed> {
    stages_exchange(
        &[2, 3],
        |_| Ok(()),
        |(), _, communicator| {
            let engine = CudaEngine::new(Arc::new(cuda_kernels()), Gpu::open(0)?)?;
            Ok(engine.with_communicator(communicator))
        },
    )
}

/// The numbers of stages that have a GPU each.
fn stages_on_gpus() -> Result<Vec<usize>, Failed> {
    let gpus = CudaDevice::all()?.len();
    Ok([2, 4].into_iter().filter(|stages| *stages <= gpus).collect())
}

pub(crate) fn stages_exchange_by_copies() -> Result<(), Failed> {
    stages_exchange(
        &stages_on_gpus()?,
        |_| Ok(()),
        |(), rank, host| engine_with_copies(rank, host, rank == 1),
    )
}

pub(crate) fn stages_exchange_by_nccl() -> Result<(), Failed> {
    stages_exchange(&stages_on_gpus()?, nccl_ids_of_stages, |ids, rank, host| {
        engine_with_nccl(ids, rank, host, rank == 1)
    })
}

/// Ranks that give the GPU a second.
struct Impatient(ThreadCommunicator);

impl Communicator for Impatient {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.0.all_gather(groups, first, input, output)
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.0.all_to_all(groups, first, input, output)
    }

    fn send(&self, groups: Groups, to: usize, message: &[u8]) -> Result<(), CommError> {
        self.0.send(groups, to, message)
    }

    fn receive(&self, groups: Groups, from: usize, message: &mut [u8]) -> Result<(), CommError> {
        self.0.receive(groups, from, message)
    }

    fn sent_bytes(&self) -> u64 {
        self.0.sent_bytes()
    }

    fn timeout(&self) -> Option<Duration> {
        Some(Duration::from_secs(1))
    }
}

/// A rank that waits for one which does not take part in a collective, or no longer does, ends with an error
/// that names the collective, and its engine can be dropped.
pub(crate) fn a_rank_that_waits_in_vain_is_freed_by_nccl() -> Result<(), Failed> {
    let collective = "all_gather at gather (fprop), which sends 4000 bytes from each of 2 ranks";
    // The first collective connects the ranks.
    let connecting = format!(
        "NCCL has tried to connect the ranks of a collective for 1 s: another rank does not take part in {collective}"
    );
    let running = "has not completed a step of one micro-step, or an evaluation for 1 s: another rank does not take part";
    let named = format!("{running} in one of its collectives, or a kernel hangs; it waits in {collective}");
    let in_a_graph = format!(
        "{running} in one of its collectives, or a kernel hangs; parallel.name_collectives = true names the collective in which it waits"
    );
    // The second run records a graph, which names nothing unless it is asked to.
    for (runs_together, names, expected) in
        [(0, false, &connecting), (1, false, &in_a_graph), (1, true, &named), (3, true, &named)]
    {
        let ids = nccl_ids(2)?;
        let engine = |rank, communicator| engine_with_nccl(&ids, rank, communicator, names);
        let said = wait_in_vain(Together::Gather, runs_together, engine)?;
        assert!(said.contains(expected), "{said}");
    }
    Ok(())
}

/// As [`a_rank_that_waits_in_vain_is_freed_by_nccl`], where ranks copy to each other's memory.
pub(crate) fn a_rank_that_waits_in_vain_is_freed_by_copies() -> Result<(), Failed> {
    let named = "it waits in all_gather at gather (fprop), which sends 4000 bytes from each of 2 ranks";
    // Before the first run, ranks wait for each other on the host.
    for (runs_together, names, expected) in
        [(1, false, "parallel.name_collectives = true names"), (1, true, named), (3, true, named)]
    {
        let engine = |rank, host| engine_with_copies(rank, host, names);
        let said = wait_in_vain(Together::Gather, runs_together, engine)?;
        assert!(
            said.contains("evaluation for 1 s: another rank does not take") && said.contains(expected),
            "{said}"
        );
    }
    Ok(())
}

/// A stage that waits for a gradient of one which no longer sends any ends with an error that names it.
pub(crate) fn a_stage_that_waits_in_vain_is_freed_by_copies() -> Result<(), Failed> {
    let engine = |names| move |rank, host| engine_with_copies(rank, host, names);
    stage_in_vain(&[1, 4], |runs, names| wait_in_vain(Together::Stages, runs, engine(names)))
}

/// As [`a_stage_that_waits_in_vain_is_freed_by_copies`], through NCCL.
pub(crate) fn a_stage_that_waits_in_vain_is_freed_by_nccl() -> Result<(), Failed> {
    stage_in_vain(&[1, 4], |runs, names| {
        let ids = nccl_ids_of_stages(2)?;
        wait_in_vain(Together::Stages, runs, |rank, host| engine_with_nccl(&ids, rank, host, names))
    })
}

fn stage_in_vain(
    runs_together: &[usize],
    said: impl Fn(usize, bool) -> Result<String, Failed>,
) -> Result<(), Failed> {
    let part = "has not completed the backward of a micro-step for 1 s: another rank does not take part";
    let named = "it waits in receive at stage (dgrad), which receives 4000 bytes from rank 1";
    let unnamed = "parallel.name_collectives = true names the collective in which it waits";
    for &runs in runs_together {
        for (names, expected) in [(true, named), (false, unnamed)] {
            let said = said(runs, names)?;
            assert!(said.contains(part) && said.contains(expected), "{said}");
        }
    }
    Ok(())
}

/// The time limit counts from the end of the last run: a rank may wait longer for several in flight.
pub(crate) fn a_rank_waits_while_runs_complete_by_nccl() -> Result<(), Failed> {
    let ids = nccl_ids(2)?;
    wait_for_several(|rank, host| engine_with_nccl(&ids, rank, host, false))
}

/// As [`a_rank_waits_while_runs_complete_by_nccl`], where ranks copy to each other's memory.
pub(crate) fn a_rank_waits_while_runs_complete_by_copies() -> Result<(), Failed> {
    wait_for_several(|rank, host| engine_with_copies(rank, host, false))
}

/// Runs a collective several times, at once on one rank and every half second on the other. In the end the
/// first waits for five, longer than the time limit and the time in which a run ends.
fn wait_for_several(
    engine: impl Fn(usize, Arc<dyn Communicator>) -> Result<CudaEngine, EngineError> + Sync,
) -> Result<(), Failed> {
    let end = Barrier::new(2);
    let run = |communicator: ThreadCommunicator| -> Result<(), EngineError> {
        let rank = communicator.rank();
        let mut engine = engine(rank, Arc::new(Impatient(communicator)))?;
        let id = engine.load(gathering())?;
        let runs = (0..8).try_for_each(|_| {
            if rank == 1 {
                thread::sleep(Duration::from_millis(500));
            }
            engine.write_input(id, "in", &filled(1.0, SMALL))?;
            engine.run(id, Part::Whole)
        });
        let ended = runs.and_then(|()| engine.outputs(id).map(drop));
        end.wait();
        ended
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            ThreadCommunicator::world(2).into_iter().map(|c| scope.spawn(|| run(c))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank").map_err(Failed::from))
    })
}

/// A program that gathers a vector of two ranks.
fn gathering() -> Program {
    let mut tracer = Tracer::default();
    let input = tracer.input("in", vector(SMALL));
    let op = AllGather { groups: Groups::world(2), first: 1, rows: 2 * SMALL };
    let all = tracer.site("gather").emit(op, &[input]).expect("a vector")[0];
    tracer.output("out", all);
    tracer.finish()
}

/// The runs of two ranks.
#[derive(Clone, Copy)]
enum Together {
    /// A collective.
    Gather,
    /// A step of two stages, with one micro-batch.
    Stages,
}

impl Together {
    fn program(self, rank: usize) -> Result<Program, Failed> {
        match self {
            Together::Gather => Ok(gathering()),
            Together::Stages => stage(rank, 2, SMALL),
        }
    }

    fn run(self, engine: &mut CudaEngine, id: ProgramId, rank: usize) -> Result<(), EngineError> {
        let ticket = match self {
            Together::Gather => {
                engine.write_input(id, "in", &filled(1.0, SMALL))?;
                engine.run(id, Part::Whole)?;
                engine.fetch(id)?
            }
            Together::Stages => run_stage(engine, id, (rank, 2), SMALL, &[1.0])?,
        };
        engine.collect(ticket).map(drop)
    }
}

/// The error of a rank that the other leaves after so many runs.
fn wait_in_vain(
    together: Together,
    runs_together: usize,
    engine: impl Fn(usize, Arc<dyn Communicator>) -> Result<CudaEngine, EngineError> + Sync,
) -> Result<String, Failed> {
    let end = Barrier::new(2);
    let run = |communicator: ThreadCommunicator| -> Result<String, Failed> {
        let rank = communicator.rank();
        let mut engine = engine(rank, Arc::new(Impatient(communicator)))?;
        let id = engine.load(together.program(rank)?)?;
        let mut run = || together.run(&mut engine, id, rank);
        let together = (0..runs_together).try_for_each(|_| run());
        let said = (rank == 0 && together.is_ok()).then(|| run().err().map(|error| error.to_string()));
        if rank == 0 {
            drop(engine);
        }
        end.wait();
        together?;
        Ok(said.map_or(Some(String::new()), |said| said).ok_or("the collective completes")?)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            ThreadCommunicator::world(2).into_iter().map(|c| scope.spawn(|| run(c))).collect();
        let said: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect();
        let mut said = said.into_iter().collect::<Result<Vec<_>, Failed>>()?;
        Ok(said.swap_remove(0))
    })
}

/// In a run of one process, collectives are copies, which are recorded with the ops around them.
pub(crate) fn collectives_of_one_process_are_recorded() -> Result<(), Failed> {
    for seed in (0..LANE_PROGRAMS).map(|n| common::seed().wrapping_add(n)) {
        let program = collectives::random_program(seed, 1, 1);
        let found = collectives::results(&mut engine()?, program.clone(), 0, 3)?;
        let expected = collectives::expected(&program, 1, 3).remove(0);
        assert!(
            found == expected,
            "program XTRAIN_TEST_SEED={seed}: a collective at random has other values than a copy"
        );
    }
    Ok(())
}

/// Op by op and in a graph, collectives that are issued together take the latency once.
pub(crate) fn collectives_with_absent_ranks_take_their_time() -> Result<(), Failed> {
    let mut tracer = Tracer::default();
    for name in ["a", "b"] {
        let input = tracer.input(name, vector(SMALL));
        let op = AllGather { groups: Groups::world(3), first: 0, rows: 3 * SMALL };
        let all = tracer.site(name).emit(op, &[input])?[0];
        tracer.output(&format!("all {name}"), all);
    }
    let gathers = Sending { groups: Groups::world(3), path: Path::Ring };
    let time = PaceTime { latency: Duration::from_millis(30), bandwidth: 1e6 };
    let pace = Pace { times: vec![(gathers, time)] };
    let gpu = Gpu::open(0)?;
    let mut engine = CudaEngine::new(Arc::new(cuda_kernels()), gpu)?.as_rank_of(3, Some(pace))?;
    let id = engine.load(tracer.finish())?;
    for name in ["a", "b"] {
        engine.write_input(id, name, &filled(2.0, SMALL))?;
    }
    for _ in 0..3 {
        let begun = Instant::now();
        engine.run(id, Part::Whole)?;
        let all = floats(engine.outputs(id)?.get("all b")?);
        let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
        assert_eq!(all, vec![2.0; 3 * SMALL]);
        // Two other ranks are sent 4,000 bytes each, twice.
        assert!(milliseconds >= 46.0, "{milliseconds} ms");
    }
    Ok(())
}
