//! `xtrain plan`.

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::plan_table::{self, Answer, Several, Tables};
use crate::terminal;
use std::path::Path;
use xtrain_config::Device::Auto;
use xtrain_config::{Config, ConfigErrors, Override, ParallelConfig, Parsed};
use xtrain_report::lanes::write_lanes;
use xtrain_train::crew::transport;
use xtrain_train::engine::{Processor, Room, Target};
use xtrain_train::error::LearnError;
use xtrain_train::estimate::{Device, RunTime, Timeline};
use xtrain_train::fit::Fit;
use xtrain_train::member::Member;
use xtrain_train::spec::plan_for;
use xtrain_train::{choose, modes, programs, run_file, slower, source};

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
    let planned = plan_for(&parsed, target, Member::first_of(ranks))?;
    let recipe = planned.spec.recipe;
    let device = match (&args.device_model, &processor, args.memory) {
        (Some(model), ..) => Some(Device::model(model)?),
        (None, Some(processor), _) => Some(Device::of(processor, recipe, threads).shared_by(ranks)),
        (None, None, memory) => memory.map(|size| Device::of_memory(size.0)),
    };
    let device = device.map(|device| match args.memory {
        Some(size) => device.with_memory(size.0),
        None => device,
    });
    let device = device.map(|device| connected(device, args, &parsed.config.parallel));
    let open = planned.resolved.clone();
    let (planned, choice) = match &device {
        Some(device) => choose::decide(planned, device)?,
        None => (planned, None),
    };
    let planned = match &processor {
        Some(processor) => slower::decide_if_measured(planned, processor)?,
        None => planned,
    };
    if let Some(pass) = &args.dump_after {
        let program = programs::training_after(&planned.spec, pass).map_err(LearnError::from)?;
        return terminal::print(&program.to_string()).map(|_| ());
    }
    let program = programs::training(&planned.spec).map_err(LearnError::from)?;
    if args.dump {
        return terminal::print(&program.to_string()).map(|_| ());
    }
    let reference = programs::reference(&planned.spec).map_err(LearnError::from)?;
    let has = processor.as_ref().and_then(|own| Some((own.room_of_each(ranks)?, own.owner(ranks))));
    let modelled = || Some((Room::of(device.as_ref()?.usable_bytes?), device.as_ref()?.name.clone()));
    let room = args
        .memory
        .map(|size| (Room::of(size.0), "the device (--memory)".to_owned()))
        .or(has)
        .or_else(modelled);
    let fit = match room {
        Some((room, owner)) => Some((Fit::of(&planned, target, threads, room)?, owner)),
        None => None,
    };
    let time = device.as_ref().map(|device| RunTime::of(&planned, &program, device, 0)).transpose()?;
    let refusal = processor.as_ref().and_then(|processor| processor.check(planned.spec.recipe).err());
    let micro_steps = planned.spec.micro_steps(planned.resolved.config.train.batch_size);
    let timeline = device.as_ref().map(|device| Timeline::new(&program, device, micro_steps));
    if let Some(path) = &args.svg {
        let (Some(device), Some(timeline)) = (&device, &timeline) else {
            return Err(Failure::user(
                "--svg draws times, and there is no device to estimate them for; name one, as in --device-model h100",
            ));
        };
        let title = format!("{}: a step on {ranks} x {}", planned.spec.model, device.name);
        write_lanes(path, &timeline.picture(&title, &program))?;
    }
    let several = match (&device, timeline) {
        (Some(device), Some(timeline)) if ranks > 1 => {
            let modes = modes::modes(&open, planned.member, device)?;
            Some(Several { timeline, network: device.network, modes })
        }
        _ => None,
    };
    let is_of_a_file = !is_a_model(&args.run.file);
    let answer = Answer { refusal, fit, choice, time, several, is_of_a_file };
    let tables = Tables { program: &program, reference: reference.as_ref(), target, threads, all: args.all };
    terminal::print(&plan_table::text(&planned, &answer, &tables)).map(|_| ())
}

/// The device with the connections that the run and the options name.
fn connected(device: Device, args: &PlanArgs, parallel: &ParallelConfig) -> Device {
    let network = device.network.of_run(parallel);
    let network = match args.processes.gpus {
        Some(_) => network.of_nodes(args.gpus_per_node, args.link, args.ring),
        None => network,
    };
    Device { network, ..device }
}

/// True for a Hugging Face folder or a config.json, which is planned without a run file.
fn is_a_model(path: &Path) -> bool {
    path.is_dir() || path.extension().is_some_and(|extension| extension == "json")
}

/// The run file at `path`, or one for the model there: sequences as long as it was made for, up to 4096
/// tokens, a batch that `ranks` share evenly, and a billion tokens of training.
fn load(path: &Path, sets: &[Override], ranks: usize) -> Result<Parsed, Failure> {
    if !is_a_model(path) {
        return Ok(run_file::load(path, sets)?);
    }
    if path.is_dir() && !path.join(source::CONFIG_FILE).is_file() {
        let own = path.join("config.toml");
        return Ok(run_file::load(if own.is_file() { &own } else { path }, sets)?);
    }
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if !path.is_dir() && path.file_name().is_none_or(|name| name != source::CONFIG_FILE) {
        return Err(Failure::user(format!(
            "{}: a model is planned from its folder or its {}; anything else is a run file in TOML",
            path.display(),
            source::CONFIG_FILE
        )));
    }
    let batch_size = 8_usize.next_multiple_of(ranks.max(1));
    let text = |seq_len: usize| {
        let folder = serde_json::json!(folder.to_string_lossy());
        format!(
            "[model]\ninit_from = {folder}\n[data]\ntrain = \"its text\"\nseq_len = {seq_len}\n\
             [train]\ntokens = 1_000_000_000\nbatch_size = {batch_size}\n"
        )
    };
    let parse =
        |seq_len| -> Result<Parsed, ConfigErrors> { Config::parse(path, text(seq_len).as_bytes(), sets) };
    let parsed = parse(SEQ_LEN)?;
    match source::init(&parsed.config)? {
        Some(hf) if hf.model.max_position_embeddings < SEQ_LEN => {
            Ok(parse(hf.model.max_position_embeddings)?)
        }
        _ => Ok(parsed),
    }
}

/// Tokens of a sequence of a model that is planned without a run file.
const SEQ_LEN: usize = 4096;
