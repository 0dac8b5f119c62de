//! `xtrain doctor`: what it says of a machine without a driver that can be used, and that what it prints
//! agrees with itself.

use crate::place::{Place, Ran, finish};
use serde_json::Value;

const FILES: [&str; 5] =
    ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libnccl.so.2"];

/// A place with a folder of files that have the names of NVIDIA's libraries but are not libraries, and one
/// cached kernel.
fn broken() -> Place {
    let place = Place::new();
    for file in FILES {
        place.write(&format!("libraries/{file}"), b"not a library");
    }
    place.write("cache/kernels/a.cubin", b"12345");
    place
}

fn doctor(place: &Place, arguments: &str) -> Ran {
    let mut command = place.command(&format!("doctor {arguments}"));
    command.env("XTRAIN_CUDA_LIBRARIES", place.path("libraries")).env("XTRAIN_CACHE", place.path("cache"));
    finish(command, "doctor")
}

#[test]
fn a_machine_whose_libraries_are_broken_trains_on_its_cpu_and_is_told_why() {
    let place = broken();
    let text = doctor(&place, "").succeeds().stdout;
    for file in FILES {
        let named = place.path("libraries").join(file).display().to_string();
        assert!(text.contains(&format!("{file} cannot be opened: {named}: ")), "{text}");
    }
    let folder = place.path("libraries").display().to_string();
    let looked = format!("looked in    {folder} (XTRAIN_CUDA_LIBRARIES)\n");
    assert!(text.contains(&looked), "{text}");
    // Places are listed once: the driver's, which only the loader knows, and those of all others.
    let lines: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("looked in")).collect();
    let same = lines.iter().filter(|line| line.contains("the same places as for")).count();
    assert_eq!((lines.len(), same), (5, 3), "{text}");
    for said in [
        "to get it    install NVIDIA's driver, 580 or newer\n",
        "to get it    `pip install nvidia-cudnn-cu13`\n",
        "to get it    `pip install nvidia-nccl-cu13`\n",
        "without it   attention runs by xtrain's own kernels alone, which may be slower\n",
        "without it   collectives between GPUs pass through host memory, which is slow\n",
        "GPUs\n  none found\n",
        "kernels: 1 file, 5 B\n",
        "\nTraining works, on the CPU alone (CPU, ",
    ] {
        assert!(text.contains(said), "{said:?} is not in\n{text}");
    }
    assert!(text.lines().any(|line| line.contains("train a small model") && line.contains(" ok ")), "{text}");
    assert!(text.lines().all(|line| line == line.trim_end()), "{text:?}");
}

#[test]
fn odd_folders_of_libraries_are_told() {
    let place = Place::new();
    place.write("file", b"");
    std::fs::create_dir(place.path("empty")).expect("a folder");
    std::os::unix::fs::symlink("nowhere", place.path("link")).expect("a link");
    for (folder, fault) in [
        ("", "is set and names no folder; unset it"),
        ("none", "names none: cannot be read (No such file or directory (os error 2))"),
        ("file", "names file: a file, where a folder is needed"),
        ("empty", "names empty: holds none of NVIDIA's libraries by the names that are looked for"),
        (
            "link",
            "names link: a link to nowhere, which cannot be followed (No such file or directory (os error 2))",
        ),
    ] {
        let mut command = place.command("doctor");
        command.env("XTRAIN_CUDA_LIBRARIES", folder);
        let ran = finish(command, "doctor");
        assert!(ran.stdout.contains(&format!("\n  XTRAIN_CUDA_LIBRARIES {fault}\n")), "{}", ran.stdout);
    }
}

#[test]
fn the_json_says_the_same() {
    let place = broken();
    let said = doctor(&place, "--json").succeeds().stdout;
    assert_eq!(said.lines().count(), 1);
    let found: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(found["works"], true);
    assert_eq!(found["kernel_cache"]["bytes"], 5);
    assert_eq!(found["cards"], Value::Array(Vec::new()));
    assert!(found["no_gpu"].as_str().is_some_and(|why| why.contains("libcuda.so.1")), "{said}");
    assert!(found["cpu"]["threads"].as_u64() >= Some(1), "{said}");
    let libraries = found["libraries"].as_array().expect("a list");
    for (library, file) in libraries.iter().zip(FILES) {
        assert_eq!(library["file"], file);
        assert_eq!(library["path"], Value::Null);
        let problem = library["missing"]["problem"].as_str().expect("a reason");
        assert!(problem.starts_with("cannot be opened: "), "{problem}");
    }
    assert_eq!(libraries.len(), FILES.len());
    let recipes: Vec<_> = found["recipes"].as_array().expect("a list").iter().collect();
    assert_eq!(recipes[0]["recipe"], "fp32");
    assert_eq!(recipes[1]["from"], "8.0");
}

#[test]
fn on_this_machine_it_ends_as_training_would() {
    let place = Place::new();
    let ran = place.run("doctor --json");
    let found: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert_eq!(ran.code(), Some(if found["works"] == true { 0 } else { 2 }), "{}", ran.stderr);
    for library in found["libraries"].as_array().expect("a list") {
        assert_ne!(library["path"].is_null(), library["missing"].is_null(), "{library}");
    }
    for trial in found["trials"].as_array().expect("a list") {
        assert_eq!(trial["ok"] == true, trial["problem"].is_null(), "{trial}");
    }
    // A machine without a GPU has tested its CPU, one with a GPU the GPU.
    let cards = found["cards"].as_array().expect("a list");
    let trials = found["trials"].as_array().expect("a list");
    assert!(trials.len() > if cards.is_empty() { 0 } else { 1 }, "{}", ran.stdout);
}
