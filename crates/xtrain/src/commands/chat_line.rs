//! A line of `xtrain chat`: a message, or a command that begins with a slash.

/// The meaning of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChatLine<'l> {
    /// Nothing.
    Blank,
    /// A message to answer.
    Message(&'l str),
    /// Forgets the conversation.
    Reset,
    /// Sets the system message, or removes it.
    System(Option<&'l str>),
    /// Appends the conversation to a file.
    Save(&'l str),
    /// Lists the commands.
    Help,
    /// Ends the chat.
    Quit,
    /// Is not understood: the reason.
    Wrong(String),
}

/// The commands, for `/help`.
pub(super) const COMMANDS: &str = "/reset        forgets the conversation, but not the system message
/system TEXT  sets the system message, which begins the conversation; without TEXT, removes it
/save FILE    appends the conversation to FILE as a row of messages, which xtrain train reads
/help         lists the commands
/quit         ends the chat, as Ctrl-C and Ctrl-D do; Ctrl-C while an answer is written stops the answer
//TEXT        sends /TEXT as a message";

impl ChatLine<'_> {
    /// Reads a line.
    pub(super) fn parse(line: &str) -> ChatLine<'_> {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return if line.is_empty() { ChatLine::Blank } else { ChatLine::Message(line) };
        };
        if command.starts_with('/') {
            return ChatLine::Message(command);
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = Some(rest.trim()).filter(|rest| !rest.is_empty());
        match (name, rest) {
            ("reset", None) => ChatLine::Reset,
            ("system", text) => ChatLine::System(text),
            ("save", Some(file)) => ChatLine::Save(file),
            ("save", None) => ChatLine::Wrong("/save needs a file: /save chats.jsonl".to_owned()),
            ("help" | "?", None) => ChatLine::Help,
            ("quit" | "exit" | "bye" | "q", None) => ChatLine::Quit,
            _ => ChatLine::Wrong(format!(
                "there is no command {line}; /help lists them, and // begins a message with a slash"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_unless_they_begin_with_a_slash() {
        for (line, meant) in [
            (" \t\r\n", ChatLine::Blank),
            ("what is 1/2?\n", ChatLine::Message("what is 1/2?")),
            ("//etc is a folder\n", ChatLine::Message("/etc is a folder")),
            ("/reset\n", ChatLine::Reset),
            ("/system  Be brief. \n", ChatLine::System(Some("Be brief."))),
            ("/system", ChatLine::System(None)),
            ("/save my chats.jsonl", ChatLine::Save("my chats.jsonl")),
            ("/help", ChatLine::Help),
            ("/quit", ChatLine::Quit),
        ] {
            assert_eq!(ChatLine::parse(line), meant, "{line:?}");
        }
        for line in ["/save", "/rest", "/reset now", "/etc is a folder", "/"] {
            assert!(matches!(ChatLine::parse(line), ChatLine::Wrong(_)), "{line:?}");
        }
        for name in ["/reset", "/system", "/save", "/help", "/quit", "//"] {
            assert!(COMMANDS.lines().any(|line| line.starts_with(name)), "{name}");
        }
    }
}
