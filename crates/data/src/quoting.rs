//! Names in commands that messages tell users to run, and in text that programs read.

use std::path::Path;

/// `word`, quoted for a shell, as printable text. What a terminal does not show is escaped as bash, zsh and
/// POSIX 2024 read it: `$'a\012b'`.
pub fn shell_quoted(word: &str) -> String {
    quoted(word.as_bytes())
}

/// `path` as an argument, quoted for a shell. It does not begin with a dash, as an option does.
pub fn shell_path(path: &Path) -> String {
    let bytes = path.as_os_str().as_encoded_bytes();
    match bytes.starts_with(b"-") {
        true => quoted(&[b"./", bytes].concat()),
        false => quoted(bytes),
    }
}

/// `text` as a string of Python, JSON and TOML, on one line. JSON does not escape DEL.
pub fn string_literal(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn quoted(word: &[u8]) -> String {
    let chunks = || word.utf8_chunks();
    let all = |is: fn(char) -> bool| {
        chunks().all(|chunk| chunk.invalid().is_empty() && chunk.valid().chars().all(is))
    };
    // zsh replaces a word that begins with an equals sign.
    if all(is_plain) && !word.is_empty() && !word.starts_with(b"=") {
        return chunks().map(|chunk| chunk.valid()).collect();
    }
    if all(is_printable) {
        return format!(
            "'{}'",
            chunks().map(|chunk| chunk.valid().replace('\'', "'\\''")).collect::<String>()
        );
    }
    let mut text = String::from("$'");
    let octal = |bytes: &[u8]| bytes.iter().map(|byte| format!("\\{byte:03o}")).collect::<String>();
    for chunk in chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\'' | '\\' => text.extend(['\\', c]),
                c if is_printable(c) => text.push(c),
                c => text.push_str(&octal(c.encode_utf8(&mut [0; 4]).as_bytes())),
            }
        }
        text.push_str(&octal(chunk.invalid()));
    }
    text + "'"
}

/// True for a character that no shell takes for anything else, anywhere in a word.
fn is_plain(c: char) -> bool {
    c.is_alphanumeric() || "-_./=:,+@%".contains(c)
}

/// True for a character that can be seen, and for a space. Marks that follow a letter are among these.
fn is_printable(c: char) -> bool {
    "'\"\\".contains(c) || !format!("a{c}").escape_debug().any(|escaped| escaped == '\\')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;

    /// The bytes that bash passes on for `word`.
    fn read_by_bash(word: &str) -> Vec<u8> {
        let mut bash = Command::new("bash");
        let output = bash.args(["-c", &format!("printf '%s' {word}")]).output().expect("bash");
        assert!(output.status.success(), "{word}");
        output.stdout
    }

    #[test]
    fn only_what_a_shell_would_change_is_quoted() {
        for plain in ["runs/a-b_1.0", "optimizer.lr=1e-3", "ü/ß", "a,b:c+d@e%f"] {
            assert_eq!(shell_quoted(plain), plain);
        }
        for (word, quoted) in [
            ("", "''"),
            ("a b", "'a b'"),
            ("a b'$c", r"'a b'\''$c'"),
            ("=a", "'=a'"),
            ("~/a", "'~/a'"),
            ("e\u{301} ", "'e\u{301} '"),
            ("a\n'\\\u{1b}", r"$'a\012\'\\\033'"),
            ("\u{202e}", r"$'\342\200\256'"),
        ] {
            assert_eq!(shell_quoted(word), quoted);
        }
        assert_eq!(shell_path(Path::new("-a b")), "'./-a b'");
        assert_eq!(shell_path(Path::new(OsStr::from_bytes(b"a\xff"))), r"$'a\377'");
    }

    #[test]
    fn a_literal_is_one_line() {
        assert_eq!(string_literal("a\"\\\n\u{7f}é"), r#""a\"\\\n\u007fé""#);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        #[test]
        fn bash_reads_the_bytes_of_any_name(words in proptest::collection::vec(proptest::collection::vec(1_u8.., 0..12), 1..20)) {
            // One process for many words.
            let all: Vec<String> = words.iter().map(|word| quoted(word)).collect();
            let joined = words.join(&b"\n"[..]);
            prop_assert_eq!(read_by_bash(&all.join(r"$'\n'")), joined);
            prop_assert!(all.iter().all(|word| !word.contains(char::is_control)), "{:?}", all);
        }
    }
}
