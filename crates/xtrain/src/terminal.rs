//! What a person sees: a progress bar on a terminal, plain lines in a log.

use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing_subscriber::EnvFilter;
use xtrain_data::Progress;
use xtrain_train::config::Config;
use xtrain_train::metrics::{self, Event};
use xtrain_train::run::{Notice, Observer};

/// Sends warnings and what `RUST_LOG` asks for to standard error.
pub(crate) fn log() {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("warn,xtrain::commands=info,xtrain_train=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        // Its complaint about a standard error that cannot be written would go there too, as a panic.
        .log_internal_errors(false)
        .init();
}

/// Sets how many threads compute; 0 takes all. Each command calls it once, before anything computes.
pub(crate) fn use_threads(threads: usize) -> Result<(), Failure> {
    let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    built.map_err(|e| {
        Failure::user(format!(
            "cannot start the threads that compute ({e}); ask for fewer with --threads or train.threads"
        ))
    })
}

/// Prints to standard output. A reader that went away, as after `| head`, is no error but nothing more need be made for it.
pub(crate) fn print(text: &str) -> Result<ControlFlow<()>, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(e) => Err(Failure::user(format!("cannot write to standard output: {e}"))),
    }
}

/// Prints a line of a run's log. What is in the way of it must not end a run: the metrics files have it too.
fn log_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Shows a training run.
pub(crate) struct TrainingView {
    bar: Option<ProgressBar>,
    tokenizing: TokenizeBar,
    stop: Arc<AtomicBool>,
}

impl TrainingView {
    pub(crate) fn new(stop: Arc<AtomicBool>) -> Self {
        TrainingView { bar: None, tokenizing: TokenizeBar::default(), stop }
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
            Notice::LearningVocabulary { size } => {
                self.say(format!("learning a vocabulary of {size} tokens from the text"))
            }
            Notice::Tokenizing { path, progress } => self.tokenizing.show(&path, &progress),
        }
        match self.stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn started(&mut self, config: &Config, model: &str, first_step: u64, steps: u64) {
        self.tokenizing.finish();
        let threads = rayon::current_num_threads();
        log_line(&config.to_toml());
        self.say(format!("{model}; CPU, {threads} threads; steps {first_step} to {steps}"));
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
        self.say(metrics::line(event, Some(steps)));
    }

    fn wrote(&mut self, what: &str, path: &Path) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        log_line(&format!("{what}: {}", path.display()));
    }
}

/// Shows how far text is turned into tokens.
#[derive(Default)]
pub(crate) struct TokenizeBar {
    bar: Option<ProgressBar>,
    last: Option<(String, Progress)>,
}

impl TokenizeBar {
    pub(crate) fn show(&mut self, path: &str, progress: &Progress) {
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(progress.bytes_total), ProgressDrawTarget::stderr());
            bar.set_style(style("tokenizing {msg} {wide_bar} {percent}%, {eta} left"));
            bar
        });
        bar.set_length(progress.bytes_total);
        bar.set_position(progress.bytes_done);
        bar.set_message(format!("{path} ({:.0} MB/s)", progress.mb_per_s()));
        self.last = Some((path.to_owned(), *progress));
    }

    /// Clears the bar and says what was done.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if let Some((path, p)) = self.last.take() {
            let (tokens, documents) =
                (metrics::format::grouped(p.tokens), metrics::format::grouped(p.documents));
            log_line(&format!(
                "{path}: {tokens} tokens in {documents} documents, {} at {:.1} MB/s",
                metrics::format::bytes(p.bytes_done),
                p.mb_per_s()
            ));
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸ ")
}
