//! What `--help` shows.

use crate::place::Place;

const VERBS: [&str; 7] = ["train", "plan", "tokenize", "generate", "eval", "export", "report"];

#[test]
fn every_verbs_help_has_a_summary_an_example_and_its_defaults() {
    let place = Place::new();
    for verb in VERBS {
        let text = place.run(&format!("{verb} --help")).succeeds().stdout;
        assert!(text.contains(&format!("Usage: xtrain {verb}")), "{text}");
        assert!(text.contains(&format!("Examples:\n  xtrain {verb} ")), "{text}");
        assert!(text.lines().next().is_some_and(|first| first.len() > 10), "{text}");
        // An option with a value says what it is without one, where that is a value.
        let wanted = match verb {
            "generate" => vec!["[default: 128]", "[default: 0.8]", "[default: 0]", "[default: 1"],
            "eval" => vec!["[default: 8]", "[default: text]", "by default 1024"],
            "tokenize" => vec!["[default: text]", "[default: 64M]"],
            "export" => vec!["by default as the run's own export", "[default: 5GB]"],
            "report" => vec!["by default report.html"],
            "train" => vec!["docs/configuration.md", "--resume", "--max-time"],
            _ => vec!["docs/configuration.md", "--dump"],
        };
        for word in wanted {
            assert!(text.contains(word), "`{verb} --help` does not say {word}:\n{text}");
        }
    }
}

#[test]
fn without_arguments_it_helps_and_lists_the_verbs() {
    let place = Place::new();
    let ran = place.run("");
    assert_eq!(ran.code(), Some(2));
    for verb in VERBS {
        assert!(ran.stderr.contains(&format!("\n  {verb} ")), "{verb}: {}", ran.stderr);
    }
    assert!(ran.stderr.contains("Examples:"));
    assert_eq!(place.run("--help").succeeds().stdout, ran.stderr);
    assert!(place.run("--version").succeeds().stdout.starts_with("xtrain 0."));
}

#[test]
fn a_run_prints_the_configuration_that_it_uses_as_a_run_file() {
    let place = Place::new();
    let ran = place.train("out", "--set train.steps=2");
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    assert!(ran.stdout.contains(&config), "{}", ran.stdout);
    place.write("again.toml", config.as_bytes());
    place.run("train again.toml --out again").succeeds();
    let [a, b] = ["out", "again"].map(|out| place.read(&format!("{out}/hf/model.safetensors")));
    assert!(a == b, "the printed configuration is another run");
}
