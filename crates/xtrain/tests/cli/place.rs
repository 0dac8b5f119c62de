//! A folder for one test, with texts and a run file in it, and the binary run there.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// No command of these tests computes nearly as long: one that does hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Patience with a command that waits. On a machine with other work, every command waits.
const LONG_PATIENCE: Duration = Duration::from_secs(600);

/// The model and the batches of most tests: 40 steps of some milliseconds.
pub(crate) const RUN: &str = r#"
[model]
dim = 16
layers = 2
heads = 2
kv_heads = 1

[data]
train = "a.txt"
tokenizer = "bytes"
seq_len = 16
held_out = 0.05
cache_dir = "cache"

[optimizer]
lr = 3e-3

[schedule]
warmup_steps = 2

[train]
steps = 40
batch_size = 4
threads = 1

[checkpoint]
every = 3

[eval]
every = 7
tokens = 128

[log]
every = 1
tensorboard = false
"#;

/// Device of tests that name one: `cpu`, or a GPU if XTRAIN_TEST_DEVICE is `cuda`.
pub(crate) fn device() -> String {
    std::env::var("XTRAIN_TEST_DEVICE").unwrap_or_else(|_| "cpu".into())
}

/// A folder of its own; commands run in it, so that run files name plain names.
pub(crate) struct Place {
    folder: TempDir,
}

impl Drop for Place {
    /// Kills what a failed test has left running here, which would slow all other tests.
    fn drop(&mut self) {
        let Ok(processes) = fs::read_dir("/proc") else { return };
        let is_here = |process: &fs::DirEntry| {
            fs::read_link(process.path().join("cwd"))
                .is_ok_and(|folder| folder.starts_with(self.folder.path()))
        };
        for process in processes.flatten().filter(|_| std::thread::panicking()).filter(is_here) {
            let _ = Command::new("kill").arg("-KILL").arg(process.file_name()).status();
        }
    }
}

impl Place {
    /// A folder with two texts, and [`RUN`] as run.toml.
    pub(crate) fn new() -> Self {
        let place = Place { folder: tempfile::tempdir().expect("a folder") };
        place.write("a.txt", text(1, 400).as_bytes());
        place.write("b.txt", text(2, 150).as_bytes());
        place.write("run.toml", RUN.as_bytes());
        // A run file that begins with a model folder, whose tokenizer it then uses.
        place.write("continued.toml", RUN.replace("tokenizer = \"bytes\"\n", "").as_bytes());
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(path, bytes).expect("a file");
    }

    /// An empty file for what a process says.
    pub(crate) fn sink(&self, name: &str) -> fs::File {
        fs::File::create(self.path(name)).expect("a file")
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub(crate) fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// The names in a folder, sorted.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap_or_else(|e| panic!("{folder}: {e}"));
        let mut names: Vec<String> =
            entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Every file of a folder and what it holds, to see that nothing changed; without the lock, which names
    /// its last holder.
    pub(crate) fn contents(&self, folder: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.path(folder)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.file_name().is_some_and(|name| name != ".lock") {
                    let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                    found.insert(path, bytes);
                }
            }
        }
        found
    }

    /// Bytes of the files of a folder, which need not exist and may change meanwhile.
    pub(crate) fn bytes_in(&self, folder: &str) -> usize {
        let (mut bytes, mut folders) = (0, vec![self.path(folder)]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.metadata() {
                    Ok(found) if found.is_dir() => folders.push(entry.path()),
                    Ok(found) => bytes += found.len() as usize,
                    Err(_) => {}
                }
            }
        }
        bytes
    }

    /// The records of a run's metrics.
    pub(crate) fn metrics(&self, run: &str) -> Vec<Value> {
        let text = String::from_utf8(self.read(&format!("{run}/metrics.jsonl"))).expect("text");
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// The records of a kind in a run's metrics.
    pub(crate) fn records(&self, run: &str, kind: &str) -> Vec<Value> {
        self.metrics(run).into_iter().filter(|record| record["kind"] == kind).collect()
    }

    /// `xtrain` with these arguments, separated by spaces.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtrain"));
        command.args(arguments.split_whitespace());
        self.settle(command)
    }

    /// Another program here, with the same surroundings.
    pub(crate) fn settle(&self, mut command: Command) -> Command {
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command.env_remove("RUST_LOG").env("RUST_BACKTRACE", "1");
        command
    }

    /// Runs `xtrain` to its end.
    pub(crate) fn run(&self, arguments: &str) -> Ran {
        finish(self.command(arguments), arguments)
    }

    /// As [`Place::run`], with `folder` of this place, which is created, as the current folder.
    pub(crate) fn run_in(&self, folder: &str, arguments: &str) -> Ran {
        fs::create_dir_all(self.path(folder)).expect("a folder");
        let mut command = self.command(arguments);
        command.current_dir(self.path(folder));
        finish(command, arguments)
    }

    /// Copies a folder, hidden files too.
    pub(crate) fn copy(&self, from: &str, to: &str) {
        let target = self.path(to);
        fs::create_dir_all(target.parent().expect("a parent")).expect("a folder");
        let copied = Command::new("cp").arg("-r").args([self.path(from), target]).status();
        assert!(copied.expect("cp").success());
    }

    /// Trains run.toml into `out`, expecting success.
    pub(crate) fn train(&self, out: &str, more: &str) -> Ran {
        self.run(&format!("train run.toml --out {out} {more}")).succeeds()
    }
}

/// Result of a command.
pub(crate) struct Ran {
    what: String,
    status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a command to its end, however much it says.
pub(crate) fn finish(mut command: Command, what: &str) -> Ran {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (stdout, stderr) = std::thread::scope(|scope| {
        let read = |from: &mut (dyn Read + Send)| {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).expect("readable");
            text(bytes)
        };
        let (stdout, stderr) = (scope.spawn(move || read(&mut out)), scope.spawn(move || read(&mut err)));
        wait(&mut child, what);
        (stdout.join().expect("read"), stderr.join().expect("read"))
    });
    Ran { what: what.to_owned(), status: wait(&mut child, what), stdout, stderr }
}

/// Waits for the end of a process, and ends it if it hangs.
pub(crate) fn wait(child: &mut Child, what: &str) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("waits") {
            return status;
        }
        let (elapsed, computed) = (begun.elapsed(), cpu_time(child.id()));
        if elapsed > PATIENCE && (computed > PATIENCE || elapsed > LONG_PATIENCE) {
            child.kill().expect("ends");
            panic!("`{what}` took {elapsed:?}, {computed:?} of CPU time");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Sends a signal, such as `TERM`, to a process.
pub(crate) fn signal(process: u32, signal: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {process}")]).status();
    assert!(sent.expect("a shell").success());
}

/// CPU time of a process so far, to a hundredth of a second.
fn cpu_time(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name, in parentheses, may hold anything. User and system time are fields 14 and 15.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Waits until `ready`, which a process that works well brings about.
pub(crate) fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !ready() {
        assert!(begun.elapsed() < LONG_PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Ran {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub(crate) fn succeeds(self) -> Self {
        assert_eq!(self.code(), Some(0), "`{}`: {}\n{}", self.what, self.status, self.stderr);
        self
    }

    /// Ended with an error of the user's: exit code 2, and one line that holds all `words`. Returns the line.
    pub(crate) fn refuses(&self, words: &[&str]) -> String {
        let lines = self.refuses_in_lines();
        assert_eq!(lines.len(), 1, "`{}`: {}", self.what, self.stderr);
        let line = &lines[0];
        for word in words {
            assert!(line.contains(word), "`{}` does not say {word:?}: {line}", self.what);
        }
        line.clone()
    }

    /// As [`Ran::refuses`], but a line for each of several errors.
    pub(crate) fn refuses_in_lines(&self) -> Vec<String> {
        assert_eq!(self.code(), Some(2), "`{}`: {}\n{}", self.what, self.status, self.stderr);
        self.is_readable();
        let is_log =
            |line: &&str| line.trim_start().starts_with("WARN ") || line.trim_start().starts_with("INFO ");
        let lines: Vec<String> = self.stderr.lines().filter(|line| !is_log(line)).map(String::from).collect();
        let is_error = |line: &String| line.starts_with("error: ") || line.contains("] error: ");
        assert!(lines.first().is_some_and(is_error), "`{}`: {}", self.what, self.stderr);
        lines
    }

    /// No panic, no backtrace, nothing of Rust's debug output, no control characters.
    pub(crate) fn is_readable(&self) {
        for strange in
            ["panicked", "RUST_BACKTRACE", "Os {", "Some(", "Err(", "memory allocation of", "\u{1b}"]
        {
            assert!(!self.stderr.contains(strange), "`{}`: {:?}: {}", self.what, strange, self.stderr);
        }
        assert!(self.stderr.len() < 4000, "`{}`: {}", self.what, self.stderr);
    }
}

/// English-looking text of so many lines, always the same for a seed.
fn text(seed: u64, lines: usize) -> String {
    const WORDS: [&str; 16] = [
        "the", "river", "ran", "under", "a", "stone", "bridge", "and", "nobody", "saw", "it", "turn", "to",
        "the", "sea", "again",
    ];
    let mut state = seed;
    let mut line = || {
        let words = (0..9).map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            WORDS[(state >> 60) as usize]
        });
        words.collect::<Vec<_>>().join(" ")
    };
    (0..lines).map(|_| line() + ".\n").collect()
}

/// Asserts that two files hold the same bytes.
pub(crate) fn assert_same_file(a: &Path, b: &Path) {
    let read = |path: &Path| fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(read(a) == read(b), "{} and {} differ", a.display(), b.display());
}
