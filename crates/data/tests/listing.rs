//! Names, folders and patterns list the files that a user means: one split of several, and each text once.

#[path = "../../../tests/messages.rs"]
mod messages;

use std::path::{Path, PathBuf};

use messages::assert_message;
use tempfile::TempDir;
use xtrain_data::{DataError, Listing, Split, Take, list, list_inputs};

/// A folder with these files.
fn folder(files: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }
    folder
}

/// Names of the files, as they are called in `root`.
fn names(root: &Path, listing: &Listing) -> Vec<String> {
    let name = |path: &Path| path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
    listing.files.iter().map(|file| name(&file.path)).collect()
}

fn listed(root: &Path, name: &str, take: Take) -> Result<Vec<String>, DataError> {
    list(&[root.join(name)], take).map(|listing| names(root, &listing))
}

#[test]
fn names_folders_and_patterns_list_files_in_a_fixed_order() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for name in ["b.txt", "a.jsonl.gz", "notes.pdf", ".hidden.txt", "sub/c.parquet", "sub/deep/d.txt.zst"] {
        std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        std::fs::write(root.join(name), "x").unwrap();
    }
    let list = |names: &[PathBuf]| -> Vec<String> {
        let found = list_inputs(names).unwrap();
        found.iter().map(|f| f.path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()).collect()
    };
    let everything = ["a.jsonl.gz", "b.txt", "sub/c.parquet", "sub/deep/d.txt.zst"];
    assert_eq!(list(&[root.to_path_buf()]), everything);
    assert_eq!(list(&[root.join("**/*.t?t*")]), ["b.txt", "sub/deep/d.txt.zst"]);
    assert_eq!(list(&[root.join("sub/*.parquet"), root.join("b.txt")]), ["sub/c.parquet", "b.txt"]);
    for (names, expected) in [
        (vec![root.join("notes.pdf")], "cannot be read"),
        (vec![root.join("*.csv")], "matches no input file"),
        (vec![root.join("absent.txt")], "check the path"),
        (vec![root.join("b.txt"), root.join("*.txt")], "named twice"),
        (vec![root.join("b.txt"), root.join("sub/../b.txt")], "named twice"),
        (vec![root.to_path_buf(), root.join("./sub/deep/d.txt.zst")], "named twice"),
        (vec![], "no input is named"),
    ] {
        let message = list_inputs(&names).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

/// Files of a folder, and those of its training, validation and test split; `None` if it is refused.
type Case<'c> = (&'c [&'c str], [Option<&'c [&'c str]>; 3]);

#[test]
fn a_folder_means_its_split() {
    let cases: &[Case<'_>] = &[
        (
            &[
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/validation-00000-of-00001.parquet",
                "data/test-00000-of-00001.parquet",
                "README.md",
                "dataset_infos.json",
            ],
            [
                Some(&["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
                Some(&["data/validation-00000-of-00001.parquet"]),
                Some(&["data/test-00000-of-00001.parquet"]),
            ],
        ),
        // TinyStories: only the shards in `data` count.
        (
            &[
                "data/train-00000-of-00001.parquet",
                "data/validation-00000-of-00001.parquet",
                "Tiny-train.txt",
                "Tiny-valid.txt",
            ],
            [
                Some(&["data/train-00000-of-00001.parquet"]),
                Some(&["data/validation-00000-of-00001.parquet"]),
                None,
            ],
        ),
        (
            &["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"],
            [
                Some(&["data/train_sft-00000-of-00001.jsonl"]),
                None,
                Some(&["data/test_sft-00000-of-00001.jsonl"]),
            ],
        ),
        (
            &["data/en-00000-of-00001.jsonl", "data/fr-00000-of-00001.jsonl"],
            [Some(&["data/en-00000-of-00001.jsonl", "data/fr-00000-of-00001.jsonl"]); 3],
        ),
        // The Pile: folders before files.
        (
            &["train/00.jsonl.zst", "train/01.jsonl.zst", "val.jsonl.zst", "test.jsonl.zst"],
            [
                Some(&["train/00.jsonl.zst", "train/01.jsonl.zst"]),
                Some(&["val.jsonl.zst"]),
                Some(&["test.jsonl.zst"]),
            ],
        ),
        (
            &["train/validation-report.txt", "train.txt", "dev/a.txt"],
            [Some(&["train/validation-report.txt"]), Some(&["dev/a.txt"]), None],
        ),
        (
            &["en/train-a.jsonl", "fr/train-a.jsonl", "fr/eval.jsonl"],
            [Some(&["en/train-a.jsonl", "fr/train-a.jsonl"]), None, Some(&["fr/eval.jsonl"])],
        ),
        // Files of no split beside some of the training split, and beside others only.
        (&["train.jsonl", "extra.jsonl", "dev.jsonl"], [Some(&["train.jsonl"]), Some(&["dev.jsonl"]), None]),
        (&["corpus.jsonl", "validation.jsonl"], [Some(&["corpus.jsonl"]), Some(&["validation.jsonl"]), None]),
        (
            &["c4-train.00000.jsonl.gz", "c4-validation.00000.jsonl.gz"],
            [Some(&["c4-train.00000.jsonl.gz"]), Some(&["c4-validation.00000.jsonl.gz"]), None],
        ),
        (&["Train.txt", "TEST.txt"], [Some(&["Train.txt"]), None, Some(&["TEST.txt"])]),
        (&["train1.txt", "my test file.txt"], [Some(&["train1.txt"]), None, Some(&["my test file.txt"])]),
        // No keyword is a word here.
        (
            &["contest.txt", "developers.txt", "pretrain.txt", "trainset.txt", "seqeval_results.txt"],
            [Some(&["contest.txt", "developers.txt", "pretrain.txt", "seqeval_results.txt", "trainset.txt"]);
                3],
        ),
        (&["test.jsonl", "eval.jsonl"], [None, None, Some(&["eval.jsonl", "test.jsonl"])]),
        (&["train.jsonl"], [Some(&["train.jsonl"]), None, None]),
    ];
    for (files, expected) in cases {
        let place = folder(files);
        for (split, expected) in Split::ALL.into_iter().zip(expected) {
            let found = list(&[place.path()], Take::OfFolders(split));
            let shown = found.as_ref().map(|found| names(place.path(), found));
            match (&found, expected) {
                (Ok(found), Some(expected)) => {
                    assert_eq!(names(place.path(), found), *expected, "{split:?} of {files:?}");
                    let data = files.iter().filter(|name| !name.ends_with("md") && !name.ends_with("json"));
                    let is_whole = found.files.len() == data.count();
                    let said = [&found.notes[..], &found.warnings].concat();
                    assert!(is_whole || said.len() == 1, "{split:?} of {files:?}: {said:?}");
                }
                (Err(error), None) => assert!(error.to_string().contains(split.name()), "{error}"),
                _ => panic!("{split:?} of {files:?}: {shown:?}"),
            }
        }
    }
}

#[test]
fn a_refused_split_is_read_under_the_name_that_the_error_gives() {
    for files in [
        &["test.jsonl"][..],
        &["test-0.jsonl", "test-1.jsonl"],
        &["en/test-0.jsonl", "fr/test-1.jsonl"],
        &["data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet", "old/test.txt"],
        &["x/test/a.jsonl", "x/test/b.jsonl"],
        &["en/test/a.jsonl", "fr/test/b.jsonl"],
        &["dev.jsonl", "x/my_dev.jsonl"],
    ] {
        let place = folder(files);
        let error = list(&[place.path()], Take::OfFolders(Split::Train)).unwrap_err().to_string();
        let (_, name) = error.split_once("name them: ").unwrap_or_else(|| panic!("{error}"));
        let found = names(place.path(), &list(&[name], Take::OfFolders(Split::Train)).unwrap());
        assert_eq!(found, files.iter().filter(|name| !name.starts_with("old")).copied().collect::<Vec<_>>());
    }
}

#[test]
fn a_pattern_that_names_a_split_is_read_as_written() {
    let place = folder(&[
        "test-0.jsonl",
        "train-0.jsonl",
        "train-1.jsonl",
        "validation.jsonl",
        "test/a.jsonl",
        "only/test-1.jsonl",
    ]);
    let root = place.path();
    let train = Take::OfFolders(Split::Train);
    for (pattern, expected) in [
        ("*.jsonl", &["train-0.jsonl", "train-1.jsonl"][..]),
        ("test-*", &["test-0.jsonl"]),
        ("{train,test}-0*", &["test-0.jsonl", "train-0.jsonl"]),
        ("*-0.jsonl", &["train-0.jsonl"]),
        ("**/test*.jsonl", &["only/test-1.jsonl", "test-0.jsonl"]),
        ("test/*", &["test/a.jsonl"]),
        ("test", &["test/a.jsonl"]),
        ("test-0.jsonl", &["test-0.jsonl"]),
    ] {
        assert_eq!(listed(root, pattern, train).unwrap(), expected, "{pattern}");
    }
    assert!(listed(root, "te*-0.jsonl", train).is_err());
    assert!(listed(root, "only", train).is_err());
    assert_eq!(listed(root, "*.jsonl", Take::All).unwrap().len(), 4);
}

#[test]
fn files_that_are_named_one_by_one_are_taken_unless_one_split_is_asked_for() {
    let place = folder(&["train.jsonl", "test.jsonl", "more.jsonl", "train/a.txt", "test/a.txt"]);
    let paths = |files: &[&str]| files.iter().map(|name| place.path().join(name)).collect::<Vec<_>>();
    let all = paths(&["train.jsonl", "test.jsonl", "more.jsonl"]);
    let found = list(&all, Take::OfFolders(Split::Train)).unwrap();
    assert_eq!(names(place.path(), &found), ["train.jsonl", "test.jsonl", "more.jsonl"]);
    assert_eq!(found.several_splits.as_deref(), Some("train: train.jsonl; test: test.jsonl"));
    assert_eq!(names(place.path(), &list(&all, Take::Only(Split::Test)).unwrap()), ["test.jsonl"]);
    assert!(list(&all, Take::Only(Split::Validation)).is_err());
    let in_folders = paths(&["train/a.txt", "test/a.txt"]);
    assert_eq!(names(place.path(), &list(&in_folders, Take::Only(Split::Train)).unwrap()), ["train/a.txt"]);
    for one in [&["train.jsonl", "more.jsonl"][..], &["train.jsonl"], &["more.jsonl"]] {
        assert_eq!(list(&paths(one), Take::OfFolders(Split::Train)).unwrap().several_splits, None);
    }
}

#[test]
fn a_text_beside_its_copy_is_refused() {
    let refused = |files: &[&str], named: &[&str]| {
        let place = folder(files);
        let named: Vec<PathBuf> = named.iter().map(|name| place.path().join(name)).collect();
        list(&named, Take::OfFolders(Split::Train)).err().map(|error| error.to_string()).unwrap_or_default()
    };
    for copies in [["a.jsonl", "a.jsonl.gz"], ["a.txt.zst", "a.txt.zstd"], ["x/a.txt", "x/a.txt.gzip"]] {
        for named in [&[""][..], &["**/*"], &copies] {
            let error = refused(&copies, named);
            assert!(
                error.contains("one file in two compressions") && error.contains("remove"),
                "{named:?}: {error}"
            );
        }
    }
    let copies = ["train.jsonl", "train.parquet"];
    assert!(refused(&copies, &[""]).contains("one text in two formats"));
    assert!(refused(&copies, &[""]).ends_with("**/*.jsonl"), "{}", refused(&copies, &[""]));
    // Named one by one they are two texts, and the copy of another split is not read.
    assert_eq!(refused(&copies, &copies), "");
    assert_eq!(refused(&["train.jsonl", "test.jsonl", "test.jsonl.gz"], &[""]), "");
    assert_eq!(refused(&["a.txt", "b/a.txt", "A.txt", "a.b.txt"], &[""]), "");
}

#[test]
fn data_of_other_kinds_is_not_skipped_silently() {
    let place =
        folder(&["a.jsonl", "b.jsonl.xz", "c.csv", "README.md", "LICENSE", "dataset_info.json", "code.py"]);
    let found = list(&[place.path()], Take::OfFolders(Split::Train)).unwrap();
    assert_eq!(names(place.path(), &found), ["a.jsonl"]);
    assert!(
        found.warnings[0].contains("2 files are skipped") && found.warnings[0].contains("b.jsonl.xz, c.csv")
    );
    let place = folder(&["c.csv", "README.md"]);
    let error = list(&[place.path()], Take::All).unwrap_err().to_string();
    assert!(error.contains("but for example") && error.contains("pd.read_csv"), "{error}");
    for (name, content, advice) in [
        ("a.json", "{\n \"data\": [\n", "jq -c '.data[]' "),
        ("a.tar.gz", "", "tar xf "),
        ("a.jsonl.bz2", "", "bzip2 -dk "),
        ("train.bin", "", "nanoGPT"),
        ("a.parquet.gz", "", "decompress"),
        ("a.md", "", "add .txt to its name"),
        ("a", "", "add .txt to its name"),
    ] {
        let path = place.path().join(name);
        std::fs::write(&path, content).unwrap();
        let error = list_inputs(&[path]).unwrap_err().to_string();
        assert!(error.contains("of a kind that cannot be read") && error.contains(advice), "{name}: {error}");
    }
}

/// A folder with these files and a README.md with this header.
fn with_card(files: &[&str], header: &str) -> TempDir {
    let place = folder(files);
    std::fs::write(
        place.path().join("README.md"),
        format!("---\nlicense: mit\n{header}\n---\n# A data set\n"),
    )
    .unwrap();
    place
}

/// The names of the files in `name` for each split; the error for a split that has none.
fn of_splits(root: &Path, name: &str) -> [Result<String, String>; 3] {
    Split::ALL.map(|split| {
        let listed = listed(root, name, Take::OfFolders(split));
        listed.map(|names| names.join(" ")).map_err(|error| error.to_string())
    })
}

#[test]
fn a_card_says_the_splits_of_files_over_their_names() {
    let files = ["a.jsonl", "b.jsonl", "c.jsonl", "data/train-1.jsonl", "data/x/test.jsonl"];
    // Header, name that is read, and the files of its training, validation and test split; "" for none.
    for (header, name, expected) in [
        (
            "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a.jsonl\n  - split: test\n    path: b.jsonl",
            "",
            ["a.jsonl", "", "b.jsonl"],
        ),
        (
            "configs:\n  - config_name: x\n    data_files:\n      - {split: train_sft, path: [\"a.*\", c.jsonl]}\n      - split: dev\n        path: 'data/**'",
            "",
            ["a.jsonl c.jsonl", "data/train-1.jsonl data/x/test.jsonl", ""],
        ),
        // Files of test are left out of a broader pattern for training.
        (
            "configs:\n- config_name: x\n  data_files:\n  - split: train\n    path: '**/*.jsonl'\n  - split: test\n    path: data/train-*",
            "",
            ["a.jsonl b.jsonl c.jsonl data/x/test.jsonl", "", "data/train-1.jsonl"],
        ),
        (
            "configs:\n- config_name: x\n  data_files:\n  - split: train\n    path: a.jsonl\n  - split: test\n    path: data/train-*",
            "**/*train*",
            ["", "data/train-1.jsonl", "data/train-1.jsonl"],
        ),
        // Patterns without a split are for training; the default of several configurations is read.
        ("configs:\n- config_name: x\n  data_files: '*.jsonl'", "", ["a.jsonl b.jsonl c.jsonl", "", ""]),
        (
            "configs:\n- config_name: x\n  data_files: [a.jsonl]\n- config_name: y\n  default: true\n  data_files: [b.jsonl, c.jsonl]",
            "",
            ["b.jsonl c.jsonl", "", ""],
        ),
        ("configs:\n- config_name: x\n  data_dir: data", "", ["data/train-1.jsonl", "", "data/x/test.jsonl"]),
        (
            "configs:\n- config_name: x\n  data_dir: data\n  data_files:\n  - split: test\n    path: x/*",
            "",
            ["", "", "data/x/test.jsonl"],
        ),
        // Paths are written in several ways.
        (
            "configs:\n- config_name: x\n  data_dir: ./data/",
            "",
            ["data/train-1.jsonl", "", "data/x/test.jsonl"],
        ),
        (
            "configs:\n- config_name: x\n  data_dir: x\n- config_name: default\n  data_dir: .",
            "",
            ["data/train-1.jsonl", "", "data/x/test.jsonl"],
        ),
        (
            "configs:\n- config_name: x\n  data_files:\n  - split: train\n    path: data/../*.jsonl\n  - split: test\n    path: .//b.jsonl",
            "",
            ["a.jsonl c.jsonl", "", "b.jsonl"],
        ),
        // A folder or pattern below the README.md.
        (
            "configs:\n- config_name: x\n  data_files:\n  - split: train\n    path: data/x/test.jsonl\n  - split: test\n    path: data/train-1.jsonl",
            "data",
            ["data/x/test.jsonl", "", "data/train-1.jsonl"],
        ),
        (
            "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files:\n  - split: test\n    path: b.jsonl",
            "*.jsonl",
            ["a.jsonl", "", "b.jsonl"],
        ),
        // A README.md of other files.
        ("configs:\n- config_name: x\n  data_files: 'csv/*.csv'", "*.jsonl", ["a.jsonl b.jsonl c.jsonl"; 3]),
        ("tags:\n- configs", "data", ["data/train-1.jsonl", "", "data/x/test.jsonl"]),
    ] {
        let place = with_card(&files, header);
        let found = of_splits(place.path(), name);
        for ((found, expected), split) in found.iter().zip(expected).zip(Split::ALL) {
            let found = match found {
                Ok(found) => found.as_str(),
                Err(error) => {
                    assert!(error.contains("there is no file of the"), "{error}");
                    ""
                }
            };
            assert_eq!(found, expected, "{} of {name:?} under {header}", split.name());
        }
    }
}

#[test]
fn configurations_without_a_default_are_alternatives() {
    let card = "configs:\n- config_name: en\n  data_files: en/**\n- config_name: fr\n  data_files:\n  - split: train\n    path: fr/a*";
    let place = with_card(&["en/a.jsonl", "fr/a.jsonl", "fr/b.jsonl"], card);
    let error = of_splits(place.path(), "")[0].clone().unwrap_err();
    assert_message("configurations without a default are alternatives", &error);
    // The advice works.
    let pattern = error.split("data.train = \"").nth(1).unwrap().trim_end_matches('"');
    assert_eq!(listed(place.path(), pattern, Take::OfFolders(Split::Train)).unwrap(), ["en/a.jsonl"]);
    assert_eq!(of_splits(place.path(), "fr")[0].as_deref(), Ok("fr/a.jsonl"));
    assert_eq!(list(&[place.path()], Take::All).unwrap().files.len(), 3);
    // Only one of them was downloaded.
    std::fs::remove_dir_all(place.path().join("en")).unwrap();
    assert_eq!(of_splits(place.path(), "")[0].as_deref(), Ok("fr/a.jsonl"));
    // Cards of several data sets.
    let both = folder(&["one/a.jsonl", "one/b.jsonl", "two/train.jsonl", "two/test.jsonl"]);
    let card = "---\nconfigs:\n- config_name: x\n  data_files:\n  - split: test\n    path: a.jsonl\n  - split: train\n    path: b.jsonl\n---\n";
    std::fs::write(both.path().join("one/README.md"), card).unwrap();
    assert_eq!(of_splits(both.path(), "")[0].as_deref(), Ok("one/b.jsonl two/train.jsonl"));
}

#[test]
fn a_default_configuration_without_files_here_is_refused() {
    let card =
        "configs:\n- config_name: default\n  data_files: a.jsonl\n- config_name: y\n  data_files: b.jsonl";
    let place = with_card(&["b.jsonl"], card);
    let error = of_splits(place.path(), "")[0].clone().unwrap_err();
    assert_message("a default configuration without files here is refused", &error);
    assert_eq!(of_splits(place.path(), "b*")[0].as_deref(), Ok("b.jsonl"));
}

#[test]
fn a_card_that_cannot_be_read_is_refused() {
    for header in [
        "configs: [",
        "configs:\n- data_files: a.jsonl",
        "configs:\n- config_name: x\n  data_files: 3",
        "configs:\n- config_name: x\n  data_files:\n  - split: train\n    paths: a.jsonl",
        "configs:\n- config_name: x\n  data_files: '[a'",
        "configs:\n- config_name: &a x\n  data_files: [*b]",
    ] {
        let place = with_card(&["a.jsonl"], header);
        let error = of_splits(place.path(), "")[0].clone().unwrap_err();
        assert!(error.contains("README.md: the YAML header") && !error.contains('\n'), "{header}: {error}");
    }
    let place = with_card(&["a.jsonl"], "configs: null");
    assert_eq!(of_splits(place.path(), "")[0].as_deref(), Ok("a.jsonl"));
}
