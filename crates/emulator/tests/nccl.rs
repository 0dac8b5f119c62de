//! Tests of the emulated NCCL: ranks as processes and as threads, collectives in streams and graphs, and the
//! faults that it names.

mod common;

use common::{Body, Outcome};
use libtest_mimic::{Arguments, Failed, Trial};
use std::error::Error;
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};
use std::{fs, thread};
use xtrain_cuda::{
    Context, CudaDevice, CudaError, DeviceMemory, Event, Graph, Installed, Library, NcclCall,
    NcclCommunicator, NcclId, Stream,
};

/// Variables of a rank's process.
const RANK: &str = "XTRAIN_TEST_RANK";
const RANKS: &str = "XTRAIN_TEST_RANKS";
const FOLDER: &str = "XTRAIN_TEST_FOLDER";

/// Bytes of a piece.
const PIECE: usize = 96;

type Boxed<T> = Result<T, Box<dyn Error>>;

/// A rank of a test.
struct Rank {
    rank: usize,
    ranks: usize,
    context: Context,
    stream: Stream,
    nccl: NcclCommunicator,
}

fn number(variable: &str) -> Boxed<usize> {
    Ok(std::env::var(variable)?.parse()?)
}

/// The id, which rank 0 makes and writes into the folder of the test.
fn shared_id(rank: usize) -> Boxed<NcclId> {
    let file = PathBuf::from(std::env::var(FOLDER)?).join("id");
    if rank == 0 {
        let id = NcclId::new()?;
        fs::write(file.with_extension("part"), id.bytes())?;
        fs::rename(file.with_extension("part"), file)?;
        return Ok(id);
    }
    let begun = Instant::now();
    loop {
        match fs::read(&file) {
            Ok(bytes) => return Ok(NcclId::from(<[u8; 128]>::try_from(bytes).map_err(|_| "no id")?)),
            Err(_) if begun.elapsed() < Duration::from_secs(20) => thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(error.into()),
        }
    }
}

fn go_on() -> Result<(), CudaError> {
    Ok(())
}

/// The place of a rank among `world_size`.
const fn place(index: usize, world_size: usize) -> xtrain_rank::Rank {
    xtrain_rank::Rank { index, world_size }
}

impl Rank {
    /// This process as a rank, on a GPU of its own.
    fn of_process() -> Boxed<Rank> {
        let (rank, ranks) = (number(RANK)?, number(RANKS)?);
        Rank::join(rank, ranks, &shared_id(rank)?)
    }

    fn join(rank: usize, ranks: usize, id: &NcclId) -> Boxed<Rank> {
        let context = Context::new(CudaDevice::get(rank)?)?;
        let stream = Stream::new(&context)?;
        let nccl = NcclCommunicator::join(&context, id, place(rank, ranks), &go_on)?;
        Ok(Rank { rank, ranks, context, stream, nccl })
    }

    fn memory(&self, pieces: usize) -> Boxed<DeviceMemory> {
        Ok(DeviceMemory::new(&self.context, pieces * PIECE)?)
    }

    /// Memory in which each byte of piece `p` is `10 * of + p`.
    fn pieces(&self, pieces: usize, of: usize) -> Boxed<DeviceMemory> {
        let memory = self.memory(pieces)?;
        memory.all().write(&filled(pieces, |p| 10 * of + p), &self.stream)?;
        Ok(memory)
    }

    fn run(&self, calls: &[NcclCall<'_>]) -> Result<(), CudaError> {
        self.nccl.enqueue(calls, &self.stream, &go_on)
    }

    /// The calls of an all-to-all.
    fn exchange<'a>(&self, from: &'a DeviceMemory, to: &'a DeviceMemory) -> Vec<NcclCall<'a>> {
        let piece = |memory: &'a DeviceMemory, p: usize| memory.span(p * PIECE..(p + 1) * PIECE);
        let both = |other| {
            let send = NcclCall::Send { to: other, input: piece(from, other) };
            [send, NcclCall::Receive { from: other, output: piece(to, other) }]
        };
        (0..self.ranks).flat_map(both).collect()
    }
}

fn filled(pieces: usize, byte: impl Fn(usize) -> usize) -> Vec<u8> {
    (0..pieces).flat_map(|p| [byte(p) as u8; PIECE]).collect()
}

/// Moves data by each call, directly and in a graph beside other work.
fn move_bytes(rank: &Rank) -> Outcome {
    let n = rank.ranks;
    let (own, all, from, to) =
        (rank.pieces(1, rank.rank)?, rank.memory(n)?, rank.pieces(n, rank.rank)?, rank.memory(n)?);
    let (sent, copied) = (rank.pieces(1, rank.rank + 5)?, rank.memory(1)?);
    let side = Stream::new(&rank.context)?;
    let events = [Event::new(&rank.context)?, Event::new(&rank.context)?];
    let body = || -> Result<(), CudaError> {
        rank.run(&[NcclCall::AllGather { input: own.all(), output: all.all() }])?;
        // The next input is what was gathered last.
        events[0].record(&rank.stream)?;
        side.wait(&events[0])?;
        own.all().copy_from(all.span((n - 1) * PIECE..n * PIECE), &side)?;
        rank.run(&rank.exchange(&from, &to))?;
        rank.run(&[NcclCall::Broadcast { root: n - 1, input: sent.all(), output: copied.all() }])?;
        events[1].record(&side)?;
        rank.stream.wait(&events[1])
    };
    let check = |gathered: &dyn Fn(usize) -> usize| -> Outcome {
        assert_eq!(all.all().read(&rank.stream)?, filled(n, gathered));
        assert_eq!(to.all().read(&rank.stream)?, filled(n, |from| 10 * from + rank.rank));
        assert_eq!(copied.all().read(&rank.stream)?, filled(1, |_| 10 * (n + 4)));
        Ok(())
    };
    body()?;
    check(&|p| 10 * p)?;
    let mut graph = Graph::record(&rank.stream, body)?.instantiate()?;
    for _ in 0..3 {
        all.all().fill(7, &rank.stream)?;
        to.all().fill(7, &rank.stream)?;
        copied.all().fill(7, &rank.stream)?;
        graph.launch(&rank.stream)?;
        check(&|_| 10 * (n - 1))?;
    }
    Ok(())
}

/// Adds by each call, directly and in a graph. Small numbers have exact sums in any order.
fn add_numbers(rank: &Rank) -> Outcome {
    let n = rank.ranks;
    let numbers = |count: usize, number: &dyn Fn(usize) -> f32| -> Vec<u8> {
        (0..count).flat_map(|i| number(i).to_le_bytes()).collect()
    };
    let each = PIECE / size_of::<f32>();
    let (from, piece, whole) = (rank.memory(n)?, rank.memory(1)?, rank.memory(n)?);
    from.all().write(&numbers(n * each, &|i| (i * (rank.rank + 1)) as f32), &rank.stream)?;
    whole.all().fill(7, &rank.stream)?;
    let body = || {
        rank.run(&[NcclCall::ReduceScatter { input: from.all(), output: piece.all() }])?;
        // To each rank, a piece of another length.
        let reduce = |root: usize| {
            let bytes = 0..(root + 1) * PIECE;
            NcclCall::Reduce { root, input: from.span(bytes.clone()), output: whole.span(bytes) }
        };
        rank.run(&(0..n).map(reduce).collect::<Vec<_>>())
    };
    let sum = |i: usize| (i * n * (n + 1) / 2) as f32;
    let check = || -> Outcome {
        let expected = numbers(each, &|i| sum(rank.rank * each + i));
        assert_eq!(piece.all().read(&rank.stream)?, expected);
        let received = (rank.rank + 1) * PIECE;
        let expected = numbers(received / size_of::<f32>(), &sum);
        let (found, others) = (whole.all().read(&rank.stream)?, vec![7; n * PIECE - received]);
        assert_eq!(found, [expected, others].concat());
        Ok(())
    };
    body()?;
    check()?;
    let mut graph = Graph::record(&rank.stream, body)?.instantiate()?;
    for _ in 0..2 {
        piece.all().fill(7, &rank.stream)?;
        whole.all().fill(7, &rank.stream)?;
        graph.launch(&rank.stream)?;
        check()?;
    }
    Ok(())
}

fn numbers_are_added() -> Outcome {
    add_numbers(&Rank::of_process()?)
}

fn bytes_arrive() -> Outcome {
    move_bytes(&Rank::of_process()?)
}

/// Ranks as threads of one process, which take turns on the machine.
fn threads_exchange() -> Outcome {
    let id = NcclId::new()?;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    let run = || move_bytes(&Rank::join(rank, 3, &id)?);
                    run().map_err(|error| error.to_string())
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a panic")?)
    })?;
    Ok(())
}

/// Runs `calls`, on which the ranks disagree, and prints the error.
fn disagree(calls: impl Fn(&Rank, &DeviceMemory, &DeviceMemory) -> Result<(), CudaError>) -> Outcome {
    let rank = Rank::of_process()?;
    let (from, to) = (rank.pieces(2 * rank.ranks, 1)?, rank.memory(2 * rank.ranks)?);
    let ran = calls(&rank, &from, &to).and_then(|()| rank.stream.synchronize());
    let error = ran.err().ok_or("no difference was found")?;
    assert!(error.to_string().contains("disagree"), "{error}");
    let of_nccl = rank.nccl.check().err().ok_or("NCCL has no error")?;
    assert!(of_nccl.to_string().contains("disagree"), "{of_nccl}");
    leave_last(rank.rank, rank.ranks)
}

/// Lets rank 0 end after the others, because its process passes on what ranks send.
fn leave_last(rank: usize, ranks: usize) -> Outcome {
    let folder = PathBuf::from(std::env::var(FOLDER)?);
    let left = |rank: usize| folder.join(format!("left {rank}"));
    fs::write(left(rank), "")?;
    let begun = Instant::now();
    while rank == 0 && (1..ranks).any(|other| !left(other).exists()) {
        if begun.elapsed() > Duration::from_secs(20) {
            return Err("the other ranks do not leave".into());
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn gather<'a>(from: &'a DeviceMemory, to: &'a DeviceMemory, at: usize, ranks: usize) -> NcclCall<'a> {
    NcclCall::AllGather {
        input: from.span(at * PIECE..(at + 1) * PIECE),
        output: to.span(at * PIECE..(at + ranks) * PIECE),
    }
}

fn kinds_differ() -> Outcome {
    disagree(|rank, from, to| match rank.rank {
        0 => rank.run(&[gather(from, to, 0, rank.ranks)]),
        _ => rank.run(&rank.exchange(from, to)),
    })
}

fn sizes_differ() -> Outcome {
    disagree(|rank, from, to| {
        let bytes = if rank.rank == 0 { 16 } else { 32 };
        let (input, output) = (from.span(0..bytes), to.span(0..rank.ranks * bytes));
        rank.run(&[NcclCall::AllGather { input, output }])
    })
}

fn roots_of_sums_differ() -> Outcome {
    disagree(|rank, from, to| {
        let (input, output) = (from.span(0..PIECE), to.span(0..PIECE));
        rank.run(&[NcclCall::Reduce { root: rank.rank.min(1), input, output }])
    })
}

fn sizes_of_sums_differ() -> Outcome {
    disagree(|rank, from, to| {
        let bytes = if rank.rank == 0 { 16 } else { 32 };
        let (input, output) = (from.span(0..rank.ranks * bytes), to.span(0..bytes));
        rank.run(&[NcclCall::ReduceScatter { input, output }])
    })
}

/// Sums of calls of other sizes have other orders, and equal calls have equal bits.
fn the_order_of_a_sum_is_drawn() -> Outcome {
    let rank = Rank::of_process()?;
    let (from, to) = (rank.memory(1)?, rank.memory(1)?);
    // 1e8 + 1 - 1e8 is 0 or 1 by the order.
    let number = [1e8f32, 1.0, -1e8][rank.rank];
    from.all().write(&number.to_le_bytes().repeat(PIECE / 4), &rank.stream)?;
    let mut sums = Vec::new();
    for elements in (1..PIECE / 4).chain(1..PIECE / 4) {
        let (input, output) = (from.span(0..4 * elements), to.span(0..4 * elements));
        rank.run(&[NcclCall::Reduce { root: 0, input, output }])?;
        rank.stream.synchronize()?;
        if rank.rank == 0 {
            sums.push(to.span(0..4).read(&rank.stream)?);
        }
    }
    let (first, again) = sums.split_at(sums.len() / 2);
    assert_eq!(first, again);
    assert!(rank.rank > 0 || first.iter().any(|sum| *sum != first[0]), "{first:?}");
    Ok(())
}

fn orders_differ() -> Outcome {
    disagree(|rank, from, to| {
        let order = if rank.rank == 0 { [0, 1] } else { [1, 0] };
        order.iter().try_for_each(|&at| rank.run(&[gather(from, to, at, rank.ranks)]))
    })
}

/// As [`orders_differ`], by the emulator's own setting.
fn a_rank_swaps_two_groups() -> Outcome {
    disagree(|rank, from, to| (0..2).try_for_each(|at| rank.run(&[gather(from, to, at, rank.ranks)])))
}

fn orders_differ_in_a_graph() -> Outcome {
    disagree(|rank, from, to| {
        let order = if rank.rank == 0 { [0, 1] } else { [1, 0] };
        let body = || order.iter().try_for_each(|&at| rank.run(&[gather(from, to, at, rank.ranks)]));
        Graph::record(&rank.stream, body)?.instantiate()?.launch(&rank.stream)?;
        rank.stream.synchronize()
    })
}

fn numbers_of_groups_differ() -> Outcome {
    if number(RANK)? == 1 {
        let rank = Rank::of_process()?;
        let (from, to) = (rank.pieces(4, 1)?, rank.memory(4)?);
        rank.run(&[gather(&from, &to, 0, rank.ranks)])?;
        rank.stream.synchronize()?;
        return leave_last(rank.rank, rank.ranks);
    }
    disagree(|rank, from, to| (0..2).try_for_each(|at| rank.run(&[gather(from, to, at, rank.ranks)])))
}

/// A rank that never comes is found by the caller's deadline.
fn a_rank_is_missing() -> Outcome {
    let context = Context::new(CudaDevice::get(0)?)?;
    let begun = Instant::now();
    let in_time = || -> Result<(), CudaError> {
        let is_late = begun.elapsed() > Duration::from_millis(200);
        if is_late { Err(CudaError::NoDevice) } else { Ok(()) }
    };
    let joined = NcclCommunicator::join(&context, &NcclId::new()?, xtrain_rank::Rank::first_of(2), &in_time);
    assert!(matches!(joined, Err(CudaError::NoDevice)));
    assert!(begun.elapsed() < Duration::from_secs(5));
    Ok(())
}

fn two_ranks_have_one_gpu() -> Outcome {
    let rank = number(RANK)?;
    let context = Context::new(CudaDevice::get(0)?)?;
    let joined = NcclCommunicator::join(&context, &shared_id(rank)?, place(rank, 2), &go_on);
    let error = joined.err().ok_or("they join")?.to_string();
    assert!(error.contains("invalid usage") && error.contains("Duplicate GPU detected"), "{error}");
    leave_last(rank, 2)
}

/// A rank that leaves is an asynchronous error, and an abort frees who waits for it.
fn a_rank_leaves() -> Outcome {
    let rank = Rank::of_process()?;
    if rank.rank == 1 {
        std::process::exit(0);
    }
    let (from, to) = (rank.pieces(1, 1)?, rank.memory(2)?);
    to.all().fill(3, &rank.stream)?;
    // It may be too late for the call itself.
    let ran = rank.run(&[gather(&from, &to, 0, 2)]);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| rank.stream.synchronize());
        let begun = Instant::now();
        while rank.nccl.check().is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no error");
            thread::sleep(Duration::from_millis(2));
        }
        let error = rank.nccl.check().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("remote process exited") && error.contains("rank 1 has left"), "{error}");
        if ran.is_ok() {
            assert!(!waiting.is_finished(), "the stream does not wait");
        }
        rank.nccl.abort();
        waiting.join().expect("a thread that waits")
    })?;
    assert_eq!(to.all().read(&rank.stream)?, [3; 2 * PIECE]);
    assert!(rank.run(&[gather(&from, &to, 0, 2)]).is_err_and(|error| error.to_string().contains("aborted")));
    Ok(())
}

/// A graph that outlives its communicator keeps it from closing, and from the end of an abort, after which
/// the graph moves nothing.
fn a_graph_outlives_its_communicator() -> Outcome {
    let Rank { ranks, context, stream, nccl, .. } = Rank::of_process()?;
    let (from, to) = (DeviceMemory::new(&context, PIECE)?, DeviceMemory::new(&context, ranks * PIECE)?);
    from.all().fill(1, &stream)?;
    let body = || nccl.enqueue(&[gather(&from, &to, 0, ranks)], &stream, &go_on);
    let mut graph = Graph::record(&stream, body)?.instantiate()?;
    thread::scope(|scope| {
        let ended = scope.spawn(move || drop(nccl));
        // It is closed for 5 seconds and then aborted.
        thread::sleep(Duration::from_secs(6));
        assert!(!ended.is_finished(), "the graph does not keep it");
        to.all().fill(2, &stream)?;
        graph.launch(&stream)?;
        assert_eq!(to.all().read(&stream)?, vec![2; ranks * PIECE]);
        drop(graph);
        ended.join().map_err(|_| "a panic".into())
    })
}

/// Ranks connect in their first group, which is in progress until all have called one.
fn a_first_group_waits_for_all_ranks() -> Outcome {
    let rank = Rank::of_process()?;
    let (from, to) = (rank.pieces(1, rank.rank)?, rank.memory(rank.ranks)?);
    rank.stream.synchronize()?;
    let begun = Instant::now();
    let in_time = || -> Result<(), CudaError> {
        let is_late = begun.elapsed() > Duration::from_millis(300);
        if is_late { Err(CudaError::NoDevice) } else { Ok(()) }
    };
    if rank.rank == 0 {
        let called = rank.nccl.enqueue(&[gather(&from, &to, 0, rank.ranks)], &rank.stream, &in_time);
        assert!(matches!(called, Err(CudaError::NoDevice)));
        rank.nccl.abort();
        return Ok(());
    }
    // Rank 0 leaves, which is an error also where it is waited for in this way.
    thread::sleep(Duration::from_millis(600));
    let error = rank.run(&[gather(&from, &to, 0, rank.ranks)]).err().ok_or("it is connected")?;
    assert!(error.to_string().contains("rank 0 has left"), "{error}");
    Ok(())
}

fn an_old_nccl_is_refused() -> Outcome {
    let error = Installed::open(Library::Nccl).err().ok_or("it is used")?.to_string();
    let end = "libnccl.so.2 is NCCL 2.26.5; xtrain needs 2.27.0 or newer: `pip install nvidia-nccl-cu13`";
    assert!(error.ends_with(end), "{error}");
    Ok(())
}

/// A test of several processes.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    ranks: usize,
    /// Settings beside the number of devices.
    settings: &'static str,
    /// Text that must appear on the standard error of rank 0; without it, nothing that begins like a report.
    says: &'static str,
    body: Body,
}

const fn case(
    name: &'static str,
    ranks: usize,
    settings: &'static str,
    says: &'static str,
    body: Body,
) -> Case {
    Case { name, ranks, settings, says, body }
}

const DISAGREE: &str = "emulated GPU: NCCL: the ranks disagree on group 0 of their communicator";

const CASES: [Case; 20] = [
    case("two_processes_exchange", 2, "seed=1", "", bytes_arrive),
    case("three_processes_exchange", 3, "seed=2", "", bytes_arrive),
    case("three_processes_exchange_in_another_order", 3, "seed=3", "", bytes_arrive),
    case("threads_exchange", 1, "devices=3 seed=4", "", threads_exchange),
    case(
        "kinds_differ",
        2,
        "",
        "rank 0 calls an all-gather of 96 uint8, but rank 1 calls a send to rank 0 of 96 uint8 and 3 other calls",
        kinds_differ,
    ),
    case(
        "sizes_differ",
        3,
        "",
        "rank 0 calls an all-gather of 16 uint8, but rank 1 calls an all-gather of 32 uint8",
        sizes_differ,
    ),
    case("numbers_are_added", 3, "seed=5", "", numbers_are_added),
    case(
        "roots_of_sums_differ",
        3,
        "",
        "rank 0 calls a reduction to rank 0 of 24 float32, but rank 1 calls a reduction to rank 1 of 24 float32",
        roots_of_sums_differ,
    ),
    case(
        "sizes_of_sums_differ",
        2,
        "",
        "rank 0 calls a reduce-scatter of 4 float32, but rank 1 calls a reduce-scatter of 8 float32",
        sizes_of_sums_differ,
    ),
    case("the_order_of_a_sum_is_drawn", 3, "", "", the_order_of_a_sum_is_drawn),
    case(
        "orders_differ",
        2,
        "",
        "rank 0 sends from byte 0 of an allocation of 384, but rank 1 sends from byte 96",
        orders_differ,
    ),
    case("a_rank_swaps_two_groups", 2, "swap=1:0", DISAGREE, a_rank_swaps_two_groups),
    case("orders_differ_in_a_graph", 2, "", DISAGREE, orders_differ_in_a_graph),
    case(
        "numbers_of_groups_differ",
        2,
        "",
        "rank 0 calls an all-gather as number 1, but rank 1 has finished after 1",
        numbers_of_groups_differ,
    ),
    case("a_rank_is_missing", 1, "", "", a_rank_is_missing),
    case("two_ranks_have_one_gpu", 2, "", "", two_ranks_have_one_gpu),
    case("a_rank_leaves", 2, "", "", a_rank_leaves),
    case("a_graph_outlives_its_communicator", 2, "", "", a_graph_outlives_its_communicator),
    case("a_first_group_waits_for_all_ranks", 2, "", "", a_first_group_waits_for_all_ranks),
    case("an_old_nccl_is_refused", 1, "nccl=22605", "", an_old_nccl_is_refused),
];

/// Runs a case with a process for each rank.
fn run(case: Case) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let start = |rank: usize| {
        let settings = format!("devices={} {}", case.ranks, case.settings);
        let variables = [(RANK, rank.to_string()), (RANKS, case.ranks.to_string())];
        let mut command = common::child_command(case.name, &settings)?;
        command.envs(variables).env(FOLDER, folder.path());
        command.spawn()
    };
    let started = (0..case.ranks).map(start).collect::<std::io::Result<Vec<_>>>()?;
    let outputs = started.into_iter().map(|child| child.wait_with_output());
    let outputs: Vec<Output> = outputs.collect::<std::io::Result<_>>()?;
    for (rank, output) in outputs.iter().enumerate() {
        let said = String::from_utf8_lossy(&output.stderr);
        let is_right = match (rank, case.says) {
            (0, "") => !said.contains("emulated GPU: "),
            (0, says) => said.contains(says),
            _ => true,
        };
        if !output.status.success() || !is_right {
            return Err(format!(
                "rank {rank}: {}, `{}` is expected in its output:\n{said}",
                output.status, case.says
            )
            .into());
        }
    }
    Ok(())
}

fn main() -> Outcome {
    common::run_as_child(&CASES.map(|case| (case.name, case.body)))?;
    let tests = CASES.map(|case| Trial::test(case.name, move || run(case)));
    libtest_mimic::run(&Arguments::from_args(), tests.into()).exit()
}
