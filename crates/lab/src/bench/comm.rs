//! Speed of collectives between the ranks of a run, alone and beside a GEMM.
//!
//! Sizes and bus bandwidth are those of nccl-tests: the size is that of the tensor of all ranks, and the bus
//! bandwidth counts the bytes that a rank sends.

use super::operands::{filled, operand};
use serde::Serialize;
use xtrain_config::{Device, ParallelConfig, Transport};
use xtrain_ops::collective::{AllGather, AllToAll, ReduceScatter};
use xtrain_ops::linear::Linear;
use xtrain_ops::sum_ranks::SumRanks;
use xtrain_planner::median::median;
use xtrain_program::{Groups, Program, Role, Stage, TraceError, Tracer};
use xtrain_runtime::{Checks, Engine, EngineError, Part, TimedWork, Timing};
use xtrain_step::engine::{DataPath, Processor, Target};
use xtrain_step::error::{LearnError, ProgramError};
use xtrain_tensor::DType;
use xtrain_train::error::RunError;
use xtrain_train::process_group::ProcessGroup;

/// Collectives to measure.
#[derive(Clone, Debug)]
pub struct CommOptions {
    /// The processor of each rank.
    pub device: Device,
    /// The path between GPUs.
    pub transport: Transport,
    /// Bytes of the tensor of all ranks.
    pub sizes: Vec<u64>,
    /// Extent of the square matrices of the GEMM that runs beside; that of the best rate if absent.
    pub gemm: Option<usize>,
    /// Measurements, of which the median counts.
    pub repeats: usize,
    /// Runs of a measurement, one after the other.
    pub runs: usize,
}

impl CommOptions {
    /// The options with their names, which all ranks must have alike.
    fn by_name(&self) -> Vec<(String, String)> {
        let sizes: Vec<String> = self.sizes.iter().map(u64::to_string).collect();
        let gemm = self.gemm.map_or_else(|| "default".to_owned(), |extent| extent.to_string());
        let options = [
            ("--device", self.device.name().to_owned()),
            ("--transport", self.transport.name().to_owned()),
            ("--size", sizes.join(", ")),
            ("--gemm", gemm),
            ("--repeats", self.repeats.to_string()),
            ("--runs", self.runs.to_string()),
        ];
        options.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

/// Speeds of collectives.
#[derive(Clone, Debug, Serialize)]
pub struct CommSpeeds {
    /// The device of this rank.
    pub device: String,
    /// The path between ranks: `copy`, `nccl` or `host`.
    pub transport: &'static str,
    /// The number of ranks.
    pub ranks: usize,
    /// Extent of the square matrices of the GEMM that runs beside.
    pub gemm: usize,
    /// Seconds of the GEMM alone.
    pub gemm_seconds: f64,
    /// A row for each collective and size.
    pub rows: Vec<CommSpeed>,
}

/// Speed of a collective.
#[derive(Clone, Debug, Serialize)]
pub struct CommSpeed {
    /// `all_gather`; `exchange + sum`, the reduce-scatter of a run by default; `reduce_scatter`, NCCL's own,
    /// that of `parallel.reduce = "fast"`; or `all_reduce`, the first two.
    pub collective: &'static str,
    /// Bytes of the tensor of all ranks.
    pub bytes: u64,
    /// Seconds alone.
    pub seconds: f64,
    /// Bus bandwidth alone, in 10^9 bytes a second.
    pub bus_gigabytes_per_second: f64,
    /// Seconds until both are done if a GEMM begins at the same time.
    pub beside_gemm_seconds: f64,
    /// Seconds of that GEMM, by events around it in other runs.
    pub gemm_beside_seconds: f64,
}

/// The index of the GEMM among the instances of a program in which one runs beside a collective.
const GEMM_BESIDE: usize = 1;

/// The collectives that are measured.
const COLLECTIVES: [&str; 4] = ["all_gather", "exchange + sum", "reduce_scatter", "all_reduce"];

/// Measures collectives of f32 between the ranks of `process_group`. All ranks call it.
pub fn comm(process_group: &ProcessGroup, options: &CommOptions) -> Result<CommSpeeds, RunError> {
    measure(process_group, options).map_err(|error| process_group.fail(error))
}

fn measure(process_group: &ProcessGroup, options: &CommOptions) -> Result<CommSpeeds, RunError> {
    process_group.compare_options(&options.by_name())?;
    let gpu = process_group.gpu(options.device)?;
    let processor =
        Processor::choose_at(options.device, gpu).map_err(|error| RunError::Refused(error.to_string()))?;
    let (device, target) = (processor.describe(), processor.target());
    let gemm = options.gemm.unwrap_or(if target == Target::Cpu { 512 } else { 8192 });
    let parallel = ParallelConfig { transport: options.transport, ..ParallelConfig::default() };
    let path = process_group.data_path(&processor, &parallel)?;
    let transport = match path {
        DataPath::Host => "host",
        DataPath::Copies { .. } => "copy",
        DataPath::Nccl(_) => "nccl",
    };
    let engine = processor.engine_of_rank(Checks::default(), process_group.communicator(), path);
    let mut engine = engine.map_err(LearnError::from)?;
    let ranks = process_group.rank().world_size;
    let mut seconds = |program, instance| timed(engine.as_mut(), process_group, program, instance, options);
    // By events around it, as beside a collective.
    let (_, gemm_seconds) = seconds(traced(|t| multiply(t, gemm, target))?, Some(0))?;
    let mut rows = Vec::new();
    for collective in COLLECTIVES {
        // Copies add nothing.
        if (collective, transport) == ("reduce_scatter", "copy") {
            continue;
        }
        for &bytes in &options.sizes {
            let elements = (bytes as usize / 4).next_multiple_of(ranks).max(ranks);
            let (alone, _) = seconds(traced(|t| collect(t, collective, ranks, elements, |_| Ok(())))?, None)?;
            let both = traced(|t| collect(t, collective, ranks, elements, |t| multiply(t, gemm, target)))?;
            let (beside, gemm_beside) = seconds(both, Some(GEMM_BESIDE))?;
            let bytes = 4 * elements as u64;
            let times = if collective == "all_reduce" { 2.0 } else { 1.0 };
            let sent = times * bytes as f64 * (ranks - 1) as f64 / ranks as f64;
            rows.push(CommSpeed {
                collective,
                bytes,
                seconds: alone,
                bus_gigabytes_per_second: sent / alone / 1e9,
                beside_gemm_seconds: beside,
                gemm_beside_seconds: gemm_beside,
            });
        }
    }
    process_group.finish()?;
    Ok(CommSpeeds { device, transport, ranks, gemm, gemm_seconds, rows })
}

fn traced(trace: impl FnOnce(&mut Tracer) -> Result<(), TraceError>) -> Result<Program, RunError> {
    let mut tracer = Tracer::new(Program::default(), Stage::Forward, Role::Gather);
    trace(&mut tracer).map_err(|error| LearnError::from(ProgramError::from(error)))?;
    Ok(tracer.finish())
}

/// Traces a collective of a tensor of so many elements, and what runs beside its first exchange. As in a
/// training step, the sum runs on the compute lane after that.
fn collect(
    t: &mut Tracer,
    collective: &str,
    ranks: usize,
    elements: usize,
    beside: impl FnOnce(&mut Tracer) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let (groups, piece) = (Groups::world(ranks), elements / ranks);
    let gather = AllGather { groups, first: 0, rows: elements };
    if collective == "all_gather" {
        let x = operand(t, &format!("a piece of {elements}"), DType::F32, [piece]);
        t.emit(gather, &[x])?;
        return beside(t);
    }
    let x = operand(t, &format!("all of {elements}"), DType::F32, [elements]);
    if collective == "reduce_scatter" {
        t.emit(ReduceScatter { groups, first: 0, piece_rows: piece, as_summand: false }, &[x])?;
        return beside(t);
    }
    let pieces = t.emit(AllToAll { groups, first: 0, piece_rows: piece }, &[x])?[0];
    beside(t)?;
    let sum = t.emit(SumRanks, &[pieces])?[0];
    if collective == "all_reduce" {
        t.emit(gather, &[sum])?;
    }
    Ok(())
}

/// Traces a GEMM of square matrices.
fn multiply(t: &mut Tracer, extent: usize, target: Target) -> Result<(), TraceError> {
    let dtype = if target == Target::Cpu { DType::F32 } else { DType::BF16 };
    let [x, w] = ["x", "w"].map(|name| operand(t, name, dtype, [extent, extent]));
    t.emit(Linear, &[x, w])?;
    Ok(())
}

/// Seconds of a run of `program`, in which all ranks begin together, and those of one of its instances,
/// 0 without one.
fn timed(
    engine: &mut dyn Engine,
    process_group: &ProcessGroup,
    program: Program,
    instance: Option<usize>,
    options: &CommOptions,
) -> Result<(f64, f64), RunError> {
    let failed = |error: EngineError| RunError::from(LearnError::from(error).advising("take smaller sizes"));
    let before = engine.state_entries().len();
    let id = engine.load(program).map_err(failed)?;
    for (site, entry) in engine.state_entries().into_iter().enumerate().skip(before) {
        let values = filled(entry.ty, site as u32, 1.0);
        engine.write_state(entry.kind, &entry.name, &values).map_err(failed)?;
    }
    engine.set_timing(Timing::Off).map_err(failed)?;
    // The second run of a part on a GPU records its graph.
    for _ in 0..2 {
        engine.run(id, Part::Whole).map_err(failed)?;
    }
    let mut median_of = |timing: Timing, is_counted: &dyn Fn(TimedWork) -> bool| {
        engine.set_timing(timing).map_err(failed)?;
        let mut measured = Vec::new();
        for _ in 0..options.repeats.max(1) {
            process_group.barrier()?;
            for _ in 0..options.runs.max(1) {
                engine.run(id, Part::Whole).map_err(failed)?;
            }
            let times = engine.take_times().map_err(failed)?;
            let counted = times.iter().filter(|timed| is_counted(timed.work));
            let seconds: f64 = counted.map(|timed| timed.seconds()).sum();
            measured.push(seconds / options.runs.max(1) as f64);
        }
        Ok::<_, RunError>(median(&measured))
    };
    let whole = median_of(Timing::Runs, &|work| matches!(work, TimedWork::Part(_)))?;
    let of_instance = match instance {
        Some(index) => median_of(Timing::Ops { repeats: 1 }, &|work| work == TimedWork::Instance(index))?,
        None => 0.0,
    };
    Ok((whole, of_instance))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_alone_is_measured_and_sends_nothing() {
        let options = CommOptions {
            device: Device::Cpu,
            transport: Transport::Auto,
            sizes: vec![4096, 100],
            gemm: Some(64),
            repeats: 2,
            runs: 2,
        };
        let speeds = comm(&ProcessGroup::alone(), &options).expect("speeds");
        assert_eq!((speeds.ranks, speeds.rows.len()), (1, 8));
        assert!(speeds.gemm_seconds > 0.0);
        for row in speeds.rows {
            assert!(row.seconds > 0.0 && row.beside_gemm_seconds > 0.0, "{row:?}");
            assert!(row.gemm_beside_seconds > 0.0, "{row:?}");
            assert_eq!(row.bus_gigabytes_per_second, 0.0);
        }
    }
}
