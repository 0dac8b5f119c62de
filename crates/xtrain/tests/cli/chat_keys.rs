//! A chat on a terminal: keys that move and delete edit the line, and print nothing.

use crate::chat_tools::{ANSWER, trained};
use crate::place::{Place, wait, wait_until};
use crate::terminals::terminal;
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// `xtrain chat` on a terminal of its own.
pub(crate) struct OnTerminal {
    pub(crate) child: Child,
    ours: File,
    said: Arc<Mutex<Vec<u8>>>,
    listener: JoinHandle<()>,
}

/// A prompt on a line that is cleared.
const PROMPT: &str = "\u{1b}[K> ";

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

    /// Waits for an answer after so many bytes, and for the prompt that follows it.
    fn wait_for_answer(&self, after: usize) {
        let answer = format!("\n{ANSWER}\r\n");
        wait_until("an answer and a prompt", || {
            self.after(after).split_once(&answer).is_some_and(|(_, then)| then.contains(PROMPT))
        });
    }

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

#[test]
fn keys_of_editing_change_the_line_and_print_nothing() {
    let place = trained("");
    let mut chat = OnTerminal::new(&place, "chat out --temperature 0");
    chat.wait_for_prompt(0);
    // Home, delete, end, backspace, left, right.
    let begun = chat.printed();
    chat.types("xis i 3?y\u{1b}[H\u{1b}[3~\u{1b}[F\u{7f}\u{1b}[D\u{1b}[D\u{1b}[Dt\u{1b}[C\r");
    chat.wait_for_answer(begun);
    // The line before, changed.
    let asked = chat.printed();
    chat.types("\u{1b}[A\u{1b}[D\u{7f}4\r");
    chat.wait_for_answer(asked);
    let saving = chat.printed();
    chat.types("/save saved.jsonl\r");
    wait_until("a row", || chat.after(saving).contains("messages appended"));
    assert!(!chat.after(0).contains("^["), "{:?}", chat.after(0));
    chat.types("\u{4}");
    assert_eq!(chat.ends(), Some(0));
    let saved = String::from_utf8(place.read("saved.jsonl")).expect("text");
    assert!(saved.contains("\"is it 3?\"") && saved.contains("\"is it 4?\""), "{saved}");
}
