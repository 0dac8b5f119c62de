//! The output of `--help`.

use crate::place::Place;

const VERBS: [&str; 14] = [
    "init",
    "train",
    "plan",
    "tokenize",
    "generate",
    "chat",
    "eval",
    "export",
    "report",
    "compare",
    "inspect",
    "blame",
    "doctor",
    "completions",
];

#[test]
fn every_verbs_help_has_a_summary_an_example_and_its_defaults() {
    let place = Place::new();
    for verb in VERBS {
        let text = place.run(&format!("{verb} --help")).succeeds().stdout;
        assert!(text.contains(&format!("Usage: xtrain {verb}")), "{text}");
        assert!(text.contains(&format!("Examples:\n  xtrain {verb}")), "{text}");
        assert!(text.lines().next().is_some_and(|first| first.len() > 10), "{text}");
        // An option with a value says what it is without one, where that is a value.
        let wanted = match verb {
            "generate" => vec!["[default: 128]", "[default: 0.8]", "[default: 0]", "[default: 1"],
            "chat" => vec!["[default: 1024]", "[default: 8192]", "/save FILE"],
            "eval" => vec!["[default: 8]", "[default: text]", "and for a Hugging Face folder 1024"],
            "tokenize" => vec!["[default: text]", "[default: 64M]"],
            "export" => vec!["by default as in the run's own export", "[default: 5GB]"],
            "report" => vec!["by default report.html"],
            "compare" => vec!["--baseline", "[default: 100]", "by default compare.html"],
            "inspect" => {
                vec!["by default fp8-block if the run has no FP8", "by default inspect.html", "[default: 0]"]
            }
            "blame" => vec!["by default fp8-block if the run has no FP8", "[default: 1]", "[default: 0]"],
            "doctor" => vec!["--json", "exit code is 0"],
            "init" => vec!["[default: run.toml]", "Hugging Face folder", "token shards"],
            "completions" => vec!["possible values: bash, elvish, fish, powershell, zsh"],
            "train" => vec!["docs/configuration.md", "--resume", "--max-time"],
            _ => vec!["docs/configuration.md", "--dump"],
        };
        // Lines end where the terminal does.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in wanted {
            assert!(words.contains(word), "`{verb} --help` does not say {word}:\n{text}");
        }
    }
}

#[test]
fn options_are_those_that_a_verb_uses() {
    let place = Place::new();
    let help = |verb: &str| place.run(&format!("{verb} --help")).succeeds().stdout;
    for verb in ["train", "tokenize", "generate", "chat", "eval", "export"] {
        assert!(help(verb).contains("--threads"), "{verb}");
    }
    for (verb, computes) in [("generate", true), ("eval", true), ("export", false)] {
        assert_eq!(help(verb).contains("--precision"), computes, "{verb}");
    }
    place.train("out", "--set train.steps=2 --threads 2");
    assert!(String::from_utf8(place.read("out/config.toml")).expect("text").contains("threads = 2\n"));
}

#[test]
fn an_option_that_is_a_key_of_the_run_file_is_told_how_it_is_set() {
    let place = Place::new();
    for (option, set) in [
        ("--lr 1e-3", "--set optimizer.lr=1e-3"),
        ("--optimizer.lr=1e-3", "--set optimizer.lr=1e-3"),
        ("--steps 3", "--set train.steps=3"),
        ("--epochs 3", "--set train.epochs=3"),
        ("--tokens 3", "--set train.tokens=3 --set train.steps= --set train.epochs= or --set eval.tokens=3"),
        ("--warmup-step 3", "--set schedule.warmup_steps=3"),
        ("--colour red", "with --set section.key=value,"),
    ] {
        for verb in ["train", "plan"] {
            let name = option.split([' ', '=']).next().unwrap_or_default();
            place.run(&format!("{verb} run.toml {option}")).refuses(&[&format!("no option {name}; "), set]);
        }
    }
    // Slips of options are reported as such, and other verbs name the one that takes the setting.
    let slip = place.run("train run.toml --resum").refuses(&["there is no option --resum"]);
    assert!(!slip.contains("--set"), "{slip}");
    place.run("generate out --lr 1e-3 --prompt the").refuses(&[
        "there is no option --lr of xtrain generate",
        "a setting of runs: xtrain train run.toml --set optimizer.lr=1e-3",
    ]);
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
    let version = place.run("--version").succeeds().stdout;
    assert!(version.starts_with("xtrain 0.") && version.contains(" (sources "), "{version}");
}

#[test]
fn a_verbose_run_prints_the_configuration_that_it_uses_as_a_run_file() {
    let place = Place::new();
    let ran = place.train("out", "--verbose --set train.steps=2");
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    // What the file says of how keys were chosen is not repeated.
    let keys: Vec<&str> = config.lines().map(|line| line.split("  # ").next().unwrap_or(line)).collect();
    assert!(ran.stdout.contains(&keys.join("\n")), "{}", ran.stdout);
    place.write("again.toml", config.as_bytes());
    place.run("train again.toml --out again").succeeds();
    let [a, b] = ["out", "again"].map(|out| place.read(&format!("{out}/hf/model.safetensors")));
    assert!(a == b, "the printed configuration is another run");
}
