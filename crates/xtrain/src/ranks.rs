//! The processes of a run: how the command line starts them, and how this one joins the others.

use crate::cli::{Command, Processes, VERSION};
use crate::failure::{Failure, one_line};
use crate::refused;
use crate::terminal::{print_error, shown_path};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use xtrain_checkpoint::{remove_leftovers, replace_private_file};
use xtrain_config::{ParallelConfig, Parsed};
use xtrain_distributed::{
    Environment, Fault, RankLauncher, SECRET_VARIABLE, Secret, StartOptions, Variables, nccl_variables,
};
use xtrain_train::process_group::ProcessGroup;
use xtrain_train::run_file;

/// Time in which this rank ends by itself after another one has ended the run: it writes its report, and
/// completes a save that is nearly written.
const GRACE: Duration = Duration::from_secs(3);

/// Time between SIGTERM and SIGKILL for ranks that this process started.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// True once this process has reported the error that ends it.
static HAS_REPORTED: AtomicBool = AtomicBool::new(false);

/// The folder beside which the ranks of a benchmark find their secret.
pub(crate) const BENCH_FOLDER: &str = "bench";

/// The place of this process among those of a run.
pub(crate) struct Place {
    variables: Variables,
    /// Where several processes share the run.
    environment: Option<Environment>,
    /// True if `xtrain train --gpus` or `--ranks` started this process.
    is_ours: bool,
}

impl Place {
    /// The place of the process that runs `command`.
    ///
    /// # Errors
    /// Variables of a launcher are incomplete, or do not fit the options; a command that several processes
    /// cannot share.
    pub(crate) fn detect(command: &Command, variables: Variables) -> Result<Place, Failure> {
        let is_ours = RankLauncher::is_parent(&variables);
        let detected = Environment::detect(&variables);
        let Some(processes) = command.processes() else {
            if let Ok(Some(environment)) = &detected {
                refuse_several(command, environment)?;
            }
            return Ok(Place { variables, environment: None, is_ours });
        };
        let environment = detected.map_err(|error| Failure::user(error.to_string()))?;
        if let (Some(environment), Some((option, count)), false) = (&environment, processes.given(), is_ours)
        {
            return Err(Failure::user(format!(
                "{option} {count} starts processes on this machine, but {} has started this one as rank {} of {}; leave out {option}",
                environment.launcher, environment.world.rank.index, environment.world.rank.world_size
            )));
        }
        Ok(Place { variables, environment, is_ours })
    }

    /// The text before each line that this process writes to standard error, unless its launcher writes it.
    pub(crate) fn prefix(&self) -> String {
        match &self.environment {
            Some(environment) if environment.world.rank.index > 0 && !self.is_ours => {
                format!("[rank {}] ", environment.world.rank.index)
            }
            _ => String::new(),
        }
    }

    /// True for rank 0, and for a process that trains alone.
    pub(crate) fn is_first(&self) -> bool {
        self.environment.as_ref().is_none_or(|environment| environment.world.rank.index == 0)
    }

    /// The number of processes that this one starts, if it is no rank but starts them.
    ///
    /// # Errors
    /// The machine has fewer GPUs.
    pub(crate) fn launches(&self, processes: &Processes) -> Result<Option<usize>, Failure> {
        if let Some(count) = processes.gpus.filter(|_| self.is_first()) {
            check_gpus(count)?;
        }
        let count = processes.given().map(|(_, count)| count);
        Ok(count.filter(|&count| !self.is_ours && count > 1))
    }

    /// Processes of the run on this node.
    pub(crate) fn local_world_size(&self) -> usize {
        self.environment.as_ref().map_or(1, |environment| environment.world.local_rank.world_size)
    }

    /// Joins the other processes of the run in `folder`, if it has any.
    pub(crate) fn join(&self, parallel: &ParallelConfig, folder: &Path) -> Result<ProcessGroup, Failure> {
        let Some(environment) = &self.environment else {
            remove_leftovers_of_secrets(folder);
            return Ok(ProcessGroup::alone());
        };
        let secret = self.secret(environment, folder)?;
        let start = StartOptions {
            deadline: parallel.start_timeout.duration(),
            report: Arc::new(|line: &str| tracing::warn!("{line}")),
            ..StartOptions::default()
        };
        if self.is_first() {
            remove_leftovers_of_secrets(folder);
            for (name, value) in nccl_variables(&self.variables) {
                tracing::info!("{name}={value}");
            }
        }
        let is_heard = self.is_heard();
        let prefix = self.prefix();
        let ended = move |fault: Fault| {
            thread::sleep(GRACE);
            if take_last_word() && is_heard(&fault) {
                print_error(&format!("{prefix}error: {}", one_line(&fault.to_string())));
            }
            // Exit handlers of the driver would wait for the GPU, which may wait for another rank.
            signal_hook::low_level::exit(if fault.is_users() { 2 } else { 1 })
        };
        Ok(ProcessGroup::join(
            environment.clone(),
            &secret,
            start,
            VERSION,
            parallel.timeout.duration(),
            ended,
        )?)
    }

    /// The secret of the run: a variable, or a file beside the run folder, which rank 0 writes.
    fn secret(&self, environment: &Environment, folder: &Path) -> Result<Secret, Failure> {
        let refused = |error: xtrain_distributed::CommError| Failure::user(error.to_string());
        if let Some(value) = self.variables.get(SECRET_VARIABLE) {
            return Secret::value(value).map_err(refused);
        }
        let file = secret_file(folder);
        if let Some(parent) = file.parent().filter(|_| environment.world.rank.index == 0) {
            fs::create_dir_all(parent)
                .map_err(|e| Failure::user(format!("{}: cannot create: {e}", shown_path(parent))))?;
        }
        Ok(Secret::file(file, |path, text| {
            replace_private_file(path, text.as_bytes()).map_err(|e| e.to_string())
        }))
    }

    /// Decides if this rank reports a fault. The launcher shows what rank 0 says, so a wrong input that rank
    /// 0 reports is not repeated.
    fn is_heard(&self) -> impl Fn(&Fault) -> bool + Send + 'static {
        let repeats = self.is_ours && !self.is_first();
        move |fault| !(repeats && fault.is_users() && fault.rank == 0)
    }

    /// Reports the failure that ends this process, unless that is done.
    pub(crate) fn report(&self, failure: &Failure) {
        let is_heard = failure.fault().is_none_or(self.is_heard());
        if take_last_word() && is_heard {
            report(failure, &self.prefix());
        }
    }
}

/// The file of the secret of the run in `folder`.
fn secret_file(folder: &Path) -> PathBuf {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    folder.with_file_name(format!(".{name}.secret"))
}

/// Removes what a killed rank 0 of the run in `folder` was writing beside it.
fn remove_leftovers_of_secrets(folder: &Path) {
    let file = secret_file(folder);
    let name = file.file_name().and_then(|name| name.to_str());
    let Some(parent) = file.parent().filter(|parent| parent.is_dir()) else { return };
    if let Err(error) = remove_leftovers(parent, |target| Some(target) == name) {
        tracing::debug!("{error}");
    }
}

/// Reports a failure on standard error.
pub(crate) fn report(failure: &Failure, prefix: &str) {
    // Standard error may be closed; the exit code still reports the failure.
    print_error(&format!("{prefix}error: {failure}"));
    refused::after_error(failure.exit_code());
}

/// True for the first caller, which reports the error that ends this process.
fn take_last_word() -> bool {
    !HAS_REPORTED.swap(true, Ordering::SeqCst)
}

/// Starts the processes of a run on this machine, and waits for their end. All get the command line of this
/// one. Returns their exit code.
pub(crate) fn launch(count: usize) -> Result<i32, Failure> {
    let failed = |error: xtrain_distributed::CommError| Failure::user(error.to_string());
    let launch = RankLauncher::copies(count, std::env::args_os().skip(1).collect()).map_err(failed)?;
    RankLauncher { grace: LAST_GRACE, ..launch }.run().map_err(failed)
}

/// As [`launch`], of the run of `parsed`. What a killed rank was writing is removed.
pub(crate) fn launch_run(count: usize, parsed: &Parsed) -> Result<ExitCode, Failure> {
    let code = launch(count)?;
    let folder = run_file::folder(parsed);
    for folder in [folder.path(), &folder.checkpoints()].into_iter().filter(|_| code != 0) {
        if let Err(error) = remove_leftovers(folder, |_| true) {
            // The folder may not exist yet; the next run removes what stays.
            tracing::debug!("{error}");
        }
    }
    Ok(exit_code(code))
}

/// The exit code of this process for that of the ranks which it started.
pub(crate) fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Refuses a verb that one process does. Those that only print are allowed.
fn refuse_several(command: &Command, environment: &Environment) -> Result<(), Failure> {
    let world = &environment.world;
    let is_for_each = matches!(command, Command::Doctor(_) | Command::Completions(_) | Command::Plan(_));
    if is_for_each {
        return Ok(());
    }
    Err(Failure::user(format!(
        "only `xtrain train`, `xtrain eval --task`, `xtrain bench step` and `xtrain bench comm` run in several processes, and {} has started {}; start this command once, without {}",
        environment.launcher, world.rank.world_size, environment.launcher
    )))
}

/// Refuses more GPUs than the machine has.
fn check_gpus(count: usize) -> Result<(), Failure> {
    let visible = xtrain_step::engine::Processor::visible_gpus();
    if count <= visible {
        return Ok(());
    }
    let has = match visible {
        0 => format!("no GPU (`xtrain doctor` says why); --ranks {count} uses the CPU"),
        1 => "1 GPU, as far as CUDA_VISIBLE_DEVICES shows it".to_owned(),
        n => format!("{n} GPUs, as far as CUDA_VISIBLE_DEVICES shows them"),
    };
    Err(Failure::user(format!("--gpus {count}: this machine has {has}")))
}
