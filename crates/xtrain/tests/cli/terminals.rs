//! Terminals: control characters of names, and of generated text on a terminal, are shown and never obeyed.
//! Also a command on a terminal, for the tests of chats.

use crate::place::{Place, Ran, finish, wait, wait_until};
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use xtrain_report::metrics::printable;

/// A folder's name that sets a terminal's title and colour, breaks a line and turns text around.
const NAME: &str = "n\u{1b}]0;pwn\u{7}\u{1b}[31m\n\r\u{9b}1A\u{202e}\u{200b}x";

/// A prompt on a line that is cleared.
const PROMPT: &str = "\u{1b}[K> ";

/// Characters that no output may hold, but for those in `allowed`.
fn controls<'a>(text: &'a str, allowed: &str) -> Vec<&'a str> {
    let is_bad = |c: char| {
        (c.is_control() || printable::name(c.encode_utf8(&mut [0; 4])).len() > 4) && !allowed.contains(c)
    };
    text.matches(is_bad).collect()
}

/// A terminal of its own: our end, and that of a command.
fn terminal() -> (File, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&ours).and_then(|()| unlockpt(&ours)).expect("its other end");
    let name = ptsname(&ours, Vec::new()).expect("its name");
    let theirs = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("opens");
    (File::from(ours), File::from(theirs))
}

/// `xtrain` on a terminal of its own, on which a test types.
pub(crate) struct OnTerminal {
    pub(crate) child: Child,
    ours: File,
    said: Arc<Mutex<Vec<u8>>>,
    listener: JoinHandle<()>,
}

impl OnTerminal {
    /// Starts `xtrain` with these arguments.
    pub(crate) fn new(place: &Place, arguments: &str) -> OnTerminal {
        let (ours, theirs) = terminal();
        let mut command = place.command(arguments);
        command.env("TERM", "xterm");
        let other = |file: &File| Stdio::from(file.try_clone().expect("a copy"));
        command.stdin(other(&theirs)).stdout(other(&theirs)).stderr(Stdio::from(theirs));
        let child = command.spawn().expect("starts");
        drop(command);
        let said = Arc::new(Mutex::new(Vec::new()));
        let (heard, mut from) = (said.clone(), ours.try_clone().expect("a copy"));
        let listener = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                heard.lock().expect("a lock").extend(&bytes[..count]);
            }
        });
        OnTerminal { child, ours, said, listener }
    }

    /// Number of bytes that it has printed.
    pub(crate) fn printed(&self) -> usize {
        self.said.lock().expect("a lock").len()
    }

    /// The text that it has printed after so many bytes.
    pub(crate) fn after(&self, bytes: usize) -> String {
        String::from_utf8_lossy(&self.said.lock().expect("a lock")[bytes..]).into_owned()
    }

    /// Waits for a prompt after so many bytes.
    pub(crate) fn wait_for_prompt(&self, after: usize) {
        wait_until("a prompt", || self.after(after).contains(PROMPT));
    }

    /// Waits for this answer after so many bytes, and for the prompt that follows it.
    pub(crate) fn wait_for_answer(&self, answer: &str, after: usize) {
        let answer = format!("\n{answer}\r\n");
        wait_until("an answer and a prompt", || {
            self.after(after).split_once(&answer).is_some_and(|(_, then)| then.contains(PROMPT))
        });
    }

    /// Types keys.
    pub(crate) fn types(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).expect("typed");
    }

    /// Waits for its end. Returns the exit code.
    pub(crate) fn ends(mut self) -> Option<i32> {
        let code = wait(&mut self.child, "chat").code();
        drop(self.ours);
        self.listener.join().expect("ended");
        code
    }
}

/// Standard output of a command on a terminal of its own; standard error goes nowhere.
fn on_a_terminal(mut command: Command) -> String {
    let (mut ours, theirs) = terminal();
    let mut child = command.stdout(Stdio::from(theirs)).stderr(Stdio::null()).spawn().expect("starts");
    // This process's copy of the other end would keep the terminal open.
    drop(command);
    let mut out = Vec::new();
    // The end of a terminal is an error.
    let _ = ours.read_to_end(&mut out);
    assert!(wait(&mut child, "a command on a terminal").success());
    String::from_utf8(out).expect("text").replace("\r\n", "\n")
}

/// `xtrain` with these arguments, in which `@` is [`NAME`].
fn command(place: &Place, arguments: &str) -> Command {
    let mut command = place.command("");
    command.args(arguments.split(' ').map(|argument| argument.replace('@', NAME)));
    command
}

fn ran(place: &Place, arguments: &str) -> Ran {
    finish(command(place, arguments), arguments).succeeds()
}

#[test]
fn names_are_printed_with_escapes_in_pipes_and_on_terminals() {
    let place = Place::new();
    let shown = printable::name(NAME);
    place.write(&format!("{NAME}.txt"), &place.read("a.txt"));
    let train = "train run.toml --set data.train=@.txt --out @ --set train.steps=4 --set schedule.kind=wsd \
                 --set eval.prompts=['the\\u001b[2J\\u009b']";
    let train = train.replace("                 ", "");
    std::fs::rename(place.path("a.txt"), place.path("moved.txt")).expect("renamed");
    for arguments in [
        &train[..],
        "train run.toml --set data.train=@.txt --out @ --resume --set train.steps=6 --set schedule.kind=wsd",
        "tokenize @.txt --bytes --out @-shards",
        "tokenize @-shards --verify",
        "eval @ --data @.txt",
        "export @ --out @-hf",
        "report @",
        "compare @ @ --baseline @-2",
        "inspect @ --casts fp8-block",
        "blame @ --casts fp8-block",
        "plan run.toml --set data.train=@.txt",
        "init @.txt --out @.toml",
        "train run.toml --set data.train=@.txt --out @-3 --set train.steps=4 --max-time 1ms",
    ] {
        if arguments.starts_with("compare") {
            place.copy(NAME, &format!("{NAME}-2"));
        }
        let ran = ran(&place, arguments);
        for (stream, text) in [("stdout", &ran.stdout), ("stderr", &ran.stderr)] {
            assert_eq!(controls(text, "\n\t"), [""; 0], "{stream} of {arguments}: {text}");
        }
        // A line break in a name is none in the output.
        let said = format!("{}{}", ran.stdout, ran.stderr);
        let is_named = ["plan", "eval", "blame"].iter().any(|verb| arguments.starts_with(verb))
            || said.contains(&*shown);
        assert!(is_named, "{arguments}: {said}");
    }
    let again = command(&place, "train run.toml --set data.train=@.txt --out @-4 --set train.steps=4");
    let said = on_a_terminal(again);
    assert!(controls(&said, "\n\t").is_empty() && said.contains(&*shown), "{said}");
    // Errors have names too.
    let failed = finish(command(&place, "eval @-nothing"), "eval");
    let line = failed.refuses(&[&shown]);
    assert_eq!(controls(&line, ""), [""; 0], "{line}");
}

#[test]
fn generated_text_is_raw_in_a_pipe_and_has_escapes_on_a_terminal() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    // A model that has learned nothing generates every byte.
    let arguments = "generate out --prompt the -n 400 --temperature 1.5 --seed 3";
    let raw = place.run(arguments).succeeds().stdout;
    assert!(raw.contains('\u{1b}') || raw.contains('\u{7}'), "{raw:?}");
    let shown = on_a_terminal(place.command(arguments));
    assert_eq!(shown, printable::text(&raw));
    assert_eq!(controls(&shown, "\n\t"), [""; 0], "{shown:?}");

    let json = |text: &str| -> serde_json::Value { serde_json::from_str(text).expect("JSON") };
    let arguments = format!("{arguments} --json");
    let [piped, shown] = [place.run(&arguments).succeeds().stdout, on_a_terminal(place.command(&arguments))];
    assert_eq!(json(&piped)["text"], json(&shown)["text"]);
    assert_eq!(format!("{}\n", json(&piped)["text"].as_str().expect("text")), raw);
    assert_eq!(controls(&shown, "\n"), [""; 0], "{shown:?}");
}
