//! Output for people: a progress bar on a terminal, plain lines in a log.

mod printing;

pub(crate) use printing::{
    is_shown, print, print_error, print_generated, print_help, print_json, print_marked, shown, shown_path,
    stopped,
};

use crate::allocator;
use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use printing::{log_line, shown_toml};
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::debug_fn;
use xtrain_config::Config;
use xtrain_data::{LearnProgress, Progress, VocabularyKind};
use xtrain_report::REPORT_FILE;
use xtrain_report::metrics::{self, Event};
use xtrain_train::corpus::Notice;
use xtrain_train::run::Observer;

/// Sends warnings and whatever `RUST_LOG` enables to standard error, each line with `prefix` in front, and
/// also informative messages unless `detail` is [`Detail::Quiet`]. A message is one line, whatever names are
/// in it.
pub(crate) fn log(detail: Detail, prefix: String) {
    const USUAL: &str = "warn,xtrain::commands=info,xtrain::ranks=info,xtrain_train=info,xtrain_lab=info";
    let usual = match detail {
        Detail::Quiet => "warn".to_owned(),
        Detail::Given => USUAL.to_owned(),
        Detail::Whole => format!("{USUAL},xtrain_train::source=debug"),
    };
    let fields = debug_fn(|out, field, value| {
        let value = shown(&format!("{value:?}"));
        if field.name() == "message" {
            write!(out, "{value}")
        } else {
            write!(out, "{}={value}", field.name())
        }
    });
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .fmt_fields(fields.delimited(" "))
        .with_writer(Prefixed(prefix))
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        // Its report about a broken standard error would go there too, as a panic.
        .log_internal_errors(false)
        .init();
}

/// Width of a column with this heading and these names: the longest of them, and two spaces.
pub(crate) fn column<'a>(heading: &str, names: impl IntoIterator<Item = &'a str>) -> usize {
    let widths = names.into_iter().map(|name| name.chars().count());
    widths.fold(heading.chars().count(), usize::max) + 2
}

/// Standard error, with a text before each line.
#[derive(Clone)]
struct Prefixed(String);

impl<'a> MakeWriter<'a> for Prefixed {
    type Writer = Prefixed;

    fn make_writer(&'a self) -> Prefixed {
        self.clone()
    }
}

impl Write for Prefixed {
    /// Writes a line, which comes in one piece, with one call, so that lines of several ranks do not mix.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        match self.0.is_empty() {
            true => std::io::stderr().write_all(line)?,
            false => std::io::stderr().write_all(&[self.0.as_bytes(), line].concat())?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

/// Sets the number of compute threads; 0 takes all. Each command calls it once, before any computation.
pub(crate) fn use_threads(threads: usize) -> Result<(), Failure> {
    use_share_of_threads(threads, 1)
}

/// As [`use_threads`], in one of `processes` that share the machine: 0 takes this process's share of all.
pub(crate) fn use_share_of_threads(threads: usize, processes: usize) -> Result<(), Failure> {
    let count = share_of_threads(threads, processes)?;
    let built = rayon::ThreadPoolBuilder::new().num_threads(count).build_global();
    built.map_err(|e| {
        Failure::user(format!(
            "cannot start the compute threads ({e}); use fewer with --threads or train.threads, or raise the limits on memory and \
             processes (ulimit -v, ulimit -u)"
        ))
    })
}

/// The largest number of threads, as for --threads and train.threads.
const MAX_THREADS: usize = 1024;

/// Number of threads that compute in one of `processes` that share the machine; 0 takes its share of all.
pub(crate) fn share_of_threads(threads: usize, processes: usize) -> Result<usize, Failure> {
    match threads {
        0 => Ok(thread_count(0)?.div_ceil(processes)),
        given => Ok(given),
    }
}

/// Number of threads that compute; 0 takes those of `RAYON_NUM_THREADS`, or all.
pub(crate) fn thread_count(threads: usize) -> Result<usize, Failure> {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if threads > 0 {
        return Ok(threads);
    }
    let asked = std::env::var(VARIABLE).ok().and_then(|text| text.trim().parse().ok());
    match asked.unwrap_or(0) {
        0 => Ok(std::thread::available_parallelism().map_or(1, |all| all.get().min(MAX_THREADS))),
        asked if asked > MAX_THREADS => Err(Failure::user(format!(
            "{VARIABLE} = {asked} is more than {MAX_THREADS} threads; set a smaller number, or unset it"
        ))),
        asked => Ok(asked),
    }
}

/// Verbosity of a run's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Warnings.
    Quiet,
    /// Events, and the keys that differ from their defaults.
    Given,
    /// Events, the whole configuration, and the keys of a model's config.json that nothing reads.
    Whole,
}

/// Watches a run on a rank that shows nothing.
pub(crate) struct Silent(pub(crate) Arc<AtomicBool>);

impl Observer for Silent {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {
        allocator::return_free_blocks();
    }
}

/// Shows a training run.
pub(crate) struct TrainingView {
    bar: Option<ProgressBar>,
    texts: TextBar,
    stop: Arc<AtomicBool>,
    detail: Detail,
    /// The keys that differ from their defaults, a line each.
    given: String,
}

impl TrainingView {
    /// A view of the run described by `config`.
    pub(crate) fn new(stop: Arc<AtomicBool>, detail: Detail, config: &Config) -> Self {
        let given = xtrain_config::diff(&Config::default(), config).into_iter();
        let given: Vec<String> =
            given.filter_map(|change| Some(format!("{} = {}", change.key, change.after?))).collect();
        TrainingView { bar: None, texts: TextBar::default(), stop, detail, given: given.join("\n") }
    }

    fn is_quiet(&self) -> bool {
        self.detail == Detail::Quiet
    }

    /// Prints a line above the bar.
    fn say(&self, line: impl AsRef<str>) {
        match &self.bar {
            Some(bar) if !bar.is_hidden() => bar.suspend(|| log_line(line.as_ref())),
            _ => log_line(line.as_ref()),
        }
    }
}

impl Observer for TrainingView {
    fn notice(&mut self, notice: Notice) -> ControlFlow<()> {
        match notice {
            _ if self.is_quiet() => {}
            Notice::Learning { vocabulary, progress } => self.texts.learning(vocabulary, progress),
            Notice::Tokenizing { path, progress } => self.texts.tokenizing(&path, &progress),
        }
        match self.stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn started(&mut self, config: &Config, model: &str, device: &str, first_step: u64, steps: u64) {
        allocator::return_free_blocks();
        if self.is_quiet() {
            return;
        }
        self.texts.finish();
        let what = format!("{model}; {device}");
        if first_step == steps {
            return log_line(&format!("{what}; all {steps} steps are done; writing the missing files"));
        }
        match self.detail {
            Detail::Whole => log_line(&shown_toml(&config.to_toml())),
            _ => log_line(&shown_toml(&self.given)),
        }
        if let (true, Some(out)) = (config.log.jsonl, &config.train.out) {
            self.say(format!("report: {}/{REPORT_FILE}, updated during the run", shown(out)));
        }
        self.say(format!("{what}; steps {first_step} to {steps}"));
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        bar.set_style(style("{wide_bar} {pos}/{len} steps, {elapsed} elapsed, {eta} left"));
        bar.set_position(first_step);
        bar.reset_eta();
        self.bar = Some(bar);
    }

    fn stepped(&mut self, done: u64, _: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    fn event(&mut self, event: &Event, steps: u64) {
        let line = metrics::line(event, Some(steps));
        match (self.detail, event) {
            (Detail::Quiet, Event::Warning(_)) => print_error(&line),
            (Detail::Quiet, _) => {}
            _ => self.say(line),
        }
    }

    fn wrote(&mut self, what: &str, path: &Path) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if !self.is_quiet() {
            log_line(&format!("{what}: {}", shown_path(path)));
        }
    }
}

/// Progress of a long task on a terminal; shows nothing elsewhere.
#[derive(Default)]
pub(crate) struct Bar {
    bar: Option<ProgressBar>,
    /// Label of the bar.
    doing: String,
}

impl Bar {
    /// Shows the progress of `doing`. Another label replaces the previous one.
    pub(crate) fn show(&mut self, doing: &str, done: u64, total: u64) {
        if self.doing != doing {
            self.clear();
            self.doing = doing.to_owned();
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.set_style(style("{msg} {wide_bar} {percent}%, {eta} left"));
            bar.set_message(shown(doing));
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }

    /// Shows the progress of a task in parts, of which `part` is in progress.
    pub(crate) fn show_part(&mut self, doing: &str, part: &str, done: u64, total: u64) {
        self.show(doing, done, total);
        if let Some(bar) = &self.bar {
            bar.set_message(shown(&format!("{doing} {part}")));
        }
    }

    /// Shows how much of the text at `path` is tokenized, and how fast.
    pub(crate) fn tokenizing(&mut self, path: &str, progress: &Progress) {
        self.show(path, progress.bytes_done, progress.bytes_total);
        if let Some(bar) = &self.bar {
            bar.set_message(format!("tokenizing {} ({:.0} MB/s)", shown(path), progress.mb_per_s()));
        }
    }

    /// Removes the bar; returns its label.
    pub(crate) fn clear(&mut self) -> String {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        std::mem::take(&mut self.doing)
    }
}

/// Shows the progress of learning vocabularies and tokenizing texts.
#[derive(Default)]
pub(crate) struct TextBar {
    bar: Bar,
    tokens: Option<Progress>,
}

impl TextBar {
    pub(crate) fn learning(&mut self, vocabulary: VocabularyKind, progress: LearnProgress) {
        let (doing, done, total) = match progress {
            LearnProgress::Reading { bytes_done, bytes_total } => {
                ("reading the text", bytes_done, bytes_total)
            }
            LearnProgress::Merging { done, total } => ("learning merges", done as u64, total as u64),
        };
        if matches!(progress, LearnProgress::Reading { .. }) && self.bar.doing != doing {
            log_line(&match vocabulary {
                VocabularyKind::Bpe { size } => {
                    format!("learning a vocabulary of {size} tokens from the text")
                }
                VocabularyKind::Chars => "collecting the characters of the text as vocabulary".to_owned(),
            });
        }
        self.bar.show(doing, done, total);
    }

    pub(crate) fn tokenizing(&mut self, path: &str, progress: &Progress) {
        if self.bar.doing != path {
            self.finish();
        }
        self.bar.tokenizing(path, progress);
        self.tokens = Some(*progress);
    }

    /// Clears the bar and reports the text whose tokens were prepared.
    pub(crate) fn finish(&mut self) {
        let path = self.bar.clear();
        if let Some(p) = self.tokens.take() {
            let (made, bytes) = (totals(p.tokens, p.documents), metrics::format::bytes(p.bytes_done));
            log_line(&format!("{}: {made}, {bytes} at {:.1} MB/s", shown(&path), p.mb_per_s()));
        }
    }

    /// Clears the bar and returns the progress with tokens, for callers that report it themselves.
    pub(crate) fn take(&mut self) -> Option<Progress> {
        self.bar.clear();
        self.tokens.take()
    }
}

/// Size of a dataset, in words.
pub(crate) fn totals(tokens: u64, documents: u64) -> String {
    let (tokens, many) = (metrics::format::grouped(tokens), if documents == 1 { "" } else { "s" });
    format!("{tokens} tokens in {} document{many}", metrics::format::grouped(documents))
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸ ")
}
