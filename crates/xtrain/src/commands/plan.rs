//! `xtrain plan`.

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::plan_table::{self, Advised, Answer, ModeRow, Tables};
use crate::terminal;
use std::path::Path;
use xtrain_config::Device::Auto;
use xtrain_config::{Config, ConfigErrors, Override, ParallelConfig, Parsed};
use xtrain_planner::advice::Planner;
use xtrain_planner::describe::{
    warn_of_distant_ranks, warn_of_few_micro_batches, warn_of_open_micro_batch, warn_of_parts_in_bf16,
};
use xtrain_planner::estimate::{Device, DeviceModel};
use xtrain_planner::meshes::LeftOut;
use xtrain_planner::planned::Planned;
use xtrain_planner::routed::RoutedStep;
use xtrain_planner::row_room::RowRoom;
use xtrain_planner::{choose, fp8_skip};
use xtrain_rank::Rank;
use xtrain_report::lanes::write_lanes;
use xtrain_step::engine::{Processor, Room, Target};
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_train::process_group::transport;
use xtrain_train::spec::plan_for;
use xtrain_train::{run_file, source};

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let sets = args.run.set.iter().cloned().map(Override::Set);
    let sets: Vec<Override> = sets.chain(args.processes.device(&args.run.set)?).collect();
    let ranks = args.processes.given().map_or(1, |(_, count)| count);
    let parsed = load(&args.run.file, &sets, ranks)?;
    // The workspace of kernels grows with the threads of a rank; none is started here.
    let threads = terminal::share_of_threads(parsed.config.train.threads, ranks)?;
    // A GPU that is asked for need not be present.
    let processor = match args.device_model {
        Some(_) => None,
        None => Processor::choose(parsed.config.train.device).ok(),
    };
    if args.memory.is_some()
        && parsed.config.train.device == Auto
        && matches!(processor, Some(Processor::Cpu))
    {
        tracing::warn!(
            "this machine has no usable GPU, so this is the plan of a run on its CPU; `--set train.device=cuda` plans one on a GPU"
        );
    }
    let target = processor.as_ref().map_or(Target::Cuda, Processor::target);
    if ranks > 1 {
        let spans_nodes = args.processes.gpus.is_some() && ranks > args.gpus_per_node;
        transport::check(&parsed.config.parallel, target == Target::Cuda, spans_nodes)?;
    }
    // Ranks that cannot share the batch may in another mesh, which is planned from the run of one process.
    let (planned, refused) = match plan_for(&parsed, target, Rank::first_of(ranks)) {
        Ok(planned) => (planned, None),
        Err(error) => match may_have_mesh(args, &parsed).then(|| plan_for(&parsed, target, Rank::ALONE)) {
            Some(Ok(alone)) => (alone, Some(error)),
            _ => return Err(error.into()),
        },
    };
    let recipe = planned.spec.recipe;
    let device = match (&args.device_model, &processor, args.memory) {
        (Some(model), ..) => Some(Device::model(model)?),
        (None, Some(processor), _) => Some(Device::new(processor, recipe, threads, ranks)),
        (None, None, memory) => memory.map(|size| Device::of_memory(size.0)),
    };
    let device = device.map(|device| match args.memory {
        Some(size) => device.with_memory(size.0),
        None => device,
    });
    let device = device.map(|device| connected(device, args, ranks, &parsed.config.parallel));
    if args.dump || args.dump_after.is_some() {
        return dump(args, planned, device.as_ref(), processor.as_ref());
    }
    let has = processor.as_ref().and_then(|own| Some((own.room_of_each(ranks)?, own.owner(ranks))));
    let modelled = || Some((Room::new(device.as_ref()?.usable_bytes?), device.as_ref()?.name.clone()));
    let room = args
        .memory
        .map(|size| (Room::new(size.0), "the device (--memory)".to_owned()))
        .or(has)
        .or_else(modelled);
    let replan = |ranks: usize, settings: &[String]| -> Result<Planned, Failure> {
        let changed: Vec<Override> =
            sets.iter().cloned().chain(settings.iter().cloned().map(Override::Set)).collect();
        Ok(plan_for(&load(&args.run.file, &changed, ranks)?, target, Rank::first_of(ranks))?)
    };
    let routing = args.routing.map(|routing| routing.of_model(&planned.spec)).transpose()?;
    if routing.is_some() && device.is_none() {
        return Err(no_device("--routing compares times"));
    }
    let advised = match &device {
        Some(device) => {
            let (room, owner) = room.map_or((None, String::new()), |(room, owner)| (Some(room), owner));
            let planner = Planner { device, processor: processor.as_ref(), room, replan: &replan };
            let advice = match refused {
                None => planner.advise(&planned)?,
                Some(error) => {
                    let why = error.to_string().replace('\n', "; ");
                    let advised = planner.advise_refused(&planned, ranks, &why)?;
                    advised.map_err(|left_out| no_mesh(ranks, &why, &left_out))?
                }
            };
            let time = advice.shown().time(device)?;
            let modes = ModeRow::all(&advice, routing, device)?;
            let shown = &advice.shown().planned;
            let step = routing.map(|routing| RoutedStep::estimate(shown, routing, device)).transpose()?;
            let routed = args.routing.zip(step.flatten());
            let largest_room = match &advice.fit {
                Some(fit) => {
                    let needed = advice.shown().needed_bytes;
                    RowRoom::largest(&shown.spec, needed, fit.room.available_bytes, device)?
                }
                None => None,
            };
            Some(Advised { advice, device, owner, time, modes, largest_room, routed })
        }
        None => match refused {
            None => None,
            Some(error) => return Err(error.into()),
        },
    };
    let shown = advised.as_ref().map(|advised| advised.advice.shown());
    let program = match shown {
        Some(shown) => shown.program.clone(),
        None => programs::training(&planned.spec).map_err(LearnError::from)?,
    };
    let timeline = shown.map(|shown| shown.timeline.clone());
    let planned = shown.map_or(planned, |shown| shown.planned.clone());
    if let Some(device) = &device {
        warn_of_distant_ranks(&planned.spec, &device.network);
    }
    warn_of_parts_in_bf16(&planned.spec);
    warn_of_few_micro_batches(&planned);
    warn_of_open_micro_batch(&parsed.config, &planned);
    if let Some(path) = &args.svg {
        let (Some(device), Some(timeline)) = (&device, &timeline) else {
            return Err(no_device("--svg draws times"));
        };
        let ranks = planned.rank.world_size;
        let title = format!("{}: a step on {ranks} x {}", planned.spec.model, device.name);
        let picture = match shown.map_or(&[][..], |shown| &shown.stages) {
            [] => timeline.picture(&title, &program),
            stages => timeline.picture_of_stages(&title, &program, stages, planned.micro_steps()),
        };
        write_lanes(path, &picture)?;
    }
    let reference = programs::reference(&planned.spec).map_err(LearnError::from)?;
    let refusal = match (&args.device_model, &processor) {
        (Some(model), _) => DeviceModel::named(model)?.check(recipe).err(),
        (None, Some(processor)) => processor.check(recipe).err(),
        (None, None) => None,
    };
    let answer = Answer { refusal, advised, is_of_a_file: !is_a_model(&args.run.file) };
    let tables = Tables { program: &program, reference: reference.as_ref(), target, threads, all: args.all };
    match args.json {
        true => terminal::print_json(&plan_table::json(&planned, &answer, &tables)),
        false => terminal::print(&plan_table::text(&planned, &answer, &tables)),
    }
    .map(|_| ())
}

/// True if another mesh may run what the ranks cannot run as configured: `parallel` names none.
fn may_have_mesh(args: &PlanArgs, parsed: &Parsed) -> bool {
    let ParallelConfig { replicas, expert, tensor, pipeline, .. } = parsed.config.parallel;
    let is_dump = args.dump || args.dump_after.is_some();
    [replicas, expert, tensor, pipeline] == [1; 4] && !is_dump
}

/// The error of a number of ranks that can run it in no mesh.
fn no_mesh(ranks: usize, why: &str, left_out: &LeftOut) -> Failure {
    Failure::user(match plan_table::left_out(left_out, ranks) {
        Some(others) => format!("{why}; nothing is planned {others}"),
        None => format!("{why}; no other mesh of {ranks} ranks is planned"),
    })
}

/// The error of an option that needs times.
fn no_device(needs: &str) -> Failure {
    Failure::user(format!(
        "{needs}, and there is no device to estimate them for; name one, as in --device-model h100"
    ))
}

/// Prints the program of the step as it is configured.
fn dump(
    args: &PlanArgs,
    planned: Planned,
    device: Option<&Device>,
    processor: Option<&Processor>,
) -> Result<(), Failure> {
    let planned = match device {
        Some(device) => choose::decide(planned, device)?.0,
        None => planned,
    };
    let planned = match processor {
        Some(processor) => fp8_skip::decide_if_measured(planned, processor)?,
        None => planned,
    };
    let program = match &args.dump_after {
        Some(pass) => programs::training_after(&planned.spec, pass),
        None => programs::training(&planned.spec),
    };
    terminal::print(&program.map_err(LearnError::from)?.to_string()).map(|_| ())
}

/// The device with the connections that the run and the options name.
fn connected(device: Device, args: &PlanArgs, ranks: usize, parallel: &ParallelConfig) -> Device {
    let of_gpus = args.processes.ranks.is_none();
    let ranks_per_node = if of_gpus { args.gpus_per_node } else { ranks };
    let device = device.connected(|network| network.of_run(parallel).of_nodes(ranks_per_node));
    // A run does not know these, so they change no choice.
    Device { network: device.network.with_bandwidths(args.link, args.ring), ..device }
}

/// True for a Hugging Face folder or a config.json, which is planned without a run file.
fn is_a_model(path: &Path) -> bool {
    path.is_dir() || path.extension().is_some_and(|extension| extension == "json")
}

/// The run file at `path`, or one for the model there.
fn load(path: &Path, sets: &[Override], ranks: usize) -> Result<Parsed, Failure> {
    if !is_a_model(path) {
        return Ok(run_file::load(path, sets)?);
    }
    if path.is_dir() && !path.join(source::CONFIG_FILE).is_file() {
        source::refuse_adapter(path)?;
        let own = path.join("config.toml");
        return Ok(run_file::load(if own.is_file() { &own } else { path }, sets)?);
    }
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if !path.is_dir() && path.file_name().is_none_or(|name| name != source::CONFIG_FILE) {
        return Err(Failure::user(format!(
            "{}: a model is planned from its folder or its {}; anything else is a run file in TOML",
            terminal::shown_path(path),
            source::CONFIG_FILE
        )));
    }
    let parse = |example: Example, sets: &[Override]| -> Result<Parsed, ConfigErrors> {
        Config::parse(path, example.run_file(folder).as_bytes(), sets)
    };
    // The context and the size of the model decide the rest; settings of batches are about the run itself.
    let is_of_model = |set: &&Override| matches!(set, Override::Set(set) if set.starts_with("model.") || set.starts_with("experts."));
    let of_model: Vec<Override> = sets.iter().filter(is_of_model).cloned().collect();
    let first = parse(Example { seq_len: 1, tokens: 1, batch_size: ranks }, &of_model)?;
    let planned = plan_for(&first, Target::Cuda, Rank::first_of(ranks))?;
    let seq_len = planned.spec.model.context().min(SEQ_LEN);
    let active = planned.spec.model.active_parameter_count() as u64;
    Ok(parse(Example::new(active, seq_len, ranks), sets)?)
}

/// Tokens of a sequence of a model that is planned without a run file, if it was made for as many.
const SEQ_LEN: usize = 4096;

/// Training tokens for each parameter that is active for a token: the compute-optimal number of Hoffmann et
/// al. (arXiv 2203.15556), about.
const TOKENS_PER_PARAMETER: u64 = 20;

/// The fewest steps of such a run, unless its batches would be smaller than a sequence for each rank.
const STEPS: u64 = 10_000;

/// The most tokens of a step: as many as Llama 3 began with (arXiv 2407.21783, section 3.4.1).
const STEP_TOKENS: u64 = 4 << 20;

/// The run of a model that is planned without a run file.
struct Example {
    seq_len: usize,
    tokens: u64,
    batch_size: usize,
}

impl Example {
    /// The run of a model with so many active parameters, with a batch that `ranks` share evenly.
    fn new(active: u64, seq_len: usize, ranks: usize) -> Example {
        let tokens = TOKENS_PER_PARAMETER * active.max(1);
        let sequences = (tokens / STEPS).min(STEP_TOKENS) / seq_len as u64;
        let rounded = 1 << sequences.max(1).ilog2();
        let batch_size = usize::max(rounded, ranks).next_multiple_of(ranks.max(1));
        Example { seq_len, tokens, batch_size }
    }

    fn run_file(&self, folder: &Path) -> String {
        let Example { seq_len, tokens, batch_size } = self;
        let folder = serde_json::json!(folder.to_string_lossy());
        format!(
            "[model]\ninit_from = {folder}\n[data]\ntrain = \"its text\"\nseq_len = {seq_len}\n\
             [train]\ntokens = {tokens}\nbatch_size = {batch_size}\nmicro_batch_size = \"auto\"\n"
        )
    }
}
