//! A chat on a terminal: keys that move and delete edit the line, and print nothing.

use crate::chat_tools::{ANSWER, trained};
use crate::place::wait_until;
use crate::terminals::OnTerminal;

#[test]
fn keys_of_editing_change_the_line_and_print_nothing() {
    let place = trained("");
    let mut chat = OnTerminal::new(&place, "chat out --temperature 0");
    chat.wait_for_prompt(0);
    // Home, delete, end, backspace, left, right.
    let begun = chat.printed();
    chat.types("xis i 3?y\u{1b}[H\u{1b}[3~\u{1b}[F\u{7f}\u{1b}[D\u{1b}[D\u{1b}[Dt\u{1b}[C\r");
    chat.wait_for_answer(ANSWER, begun);
    // The line before, changed.
    let asked = chat.printed();
    chat.types("\u{1b}[A\u{1b}[D\u{7f}4\r");
    chat.wait_for_answer(ANSWER, asked);
    let saving = chat.printed();
    chat.types("/save saved.jsonl\r");
    wait_until("a row", || chat.after(saving).contains("messages appended"));
    assert!(!chat.after(0).contains("^["), "{:?}", chat.after(0));
    chat.types("\u{4}");
    assert_eq!(chat.ends(), Some(0));
    let saved = String::from_utf8(place.read("saved.jsonl")).expect("text");
    assert!(saved.contains("\"is it 3?\"") && saved.contains("\"is it 4?\""), "{saved}");
}
