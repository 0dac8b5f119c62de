//! The emulator's forms.txt lists every instruction form of the kernels, and no others.
//!
//! All variants of the kernels are compiled for the emulated architectures; with `XTRAIN_TEST_SAMPLE=1`, for
//! Hopper: `tests/emulated/run.py` checks the forms of what runs on others. The tests are ignored unless
//! `XTRAIN_CUDA_LIBRARIES` names the emulator's folder and `XTRAIN_EMULATOR_NVRTC` a compiler, as
//! `tests/emulated/run.sh` does.

use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use xtrain_cuda::{Arch, Compiler, KernelSource};
use xtrain_ops::registry::kernel_sources;

const LISTED: &str = include_str!("../../emulator/tests/forms.txt");

const ARCHS: [Arch; 3] = [Arch::SM80, Arch::SM89, Arch::SM90];

/// Listed forms that occur only in variants compiled on demand, e.g. attention with a head width of 48.
const ON_DEMAND: [&str; 2] = ["mul.lo.s16", "sub.s16"];

/// Forms, each with a kernel that contains it.
type Forms = BTreeMap<String, String>;

/// The forms of a source's kernels, computed on first use.
type Found = LazyLock<Result<Forms, String>, Box<dyn FnOnce() -> Result<Forms, String> + Send>>;

fn listed() -> BTreeSet<&'static str> {
    LISTED.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// Compiles a source to PTX.
fn find(source: &KernelSource, archs: &[Arch]) -> Result<Forms, String> {
    let compiler = Compiler::open().map_err(|error| error.to_string())?;
    let mut found = Forms::new();
    for &arch in archs.iter().filter(|arch| source.archs.contains(arch)) {
        for variant in source.variants() {
            let options = KernelSource::options(&variant);
            let compiled = compiler
                .compile(source.name, &source.full_text(), arch, &options)
                .map_err(|error| error.to_string())?;
            for form in forms_of(&String::from_utf8_lossy(&compiled.cubin)) {
                found.entry(form.to_owned()).or_insert_with(|| format!("{arch} {}", options.join(" ")));
            }
        }
    }
    Ok(found)
}

/// The opcodes of PTX with their modifiers.
fn forms_of(ptx: &str) -> BTreeSet<&str> {
    // Lines of directives have no semicolon, or declare registers and variables.
    let lines = ptx.lines().map(str::trim).filter(|line| !line.starts_with('.') && !line.starts_with("//"));
    lines.flat_map(|line| line.split(';')).filter_map(opcode).collect()
}

/// The opcode of a statement, after labels, braces and a predicate.
fn opcode(statement: &str) -> Option<&str> {
    let mut words = statement.split_whitespace().map(|word| word.trim_matches(['{', '}', '(', ')']));
    let word = words.find(|word| !word.is_empty() && !word.ends_with(':') && !word.starts_with('@'))?;
    word.starts_with(|c: char| c.is_ascii_lowercase()).then_some(word)
}

fn main() {
    let needed = ["XTRAIN_CUDA_LIBRARIES", "XTRAIN_EMULATOR_NVRTC"];
    let is_there = needed.iter().all(|name| std::env::var_os(name).is_some());
    if !is_there {
        eprintln!("kernels are not compiled: tests/emulated/run.sh sets {}", needed.join(" and "));
    }
    let all = std::env::var("XTRAIN_TEST_SAMPLE").map_or(true, |sample| sample != "1");
    let archs = if all { &ARCHS[..] } else { &[Arch::SM90] };
    let sources = kernel_sources();
    let found: Arc<Vec<Found>> = Arc::new(
        sources
            .iter()
            .map(|&source| {
                let find: Box<dyn FnOnce() -> _ + Send> = Box::new(move || find(&source, archs));
                LazyLock::new(find)
            })
            .collect(),
    );
    let mut tests = Vec::new();
    for (n, source) in sources.iter().enumerate() {
        let found = found.clone();
        let test = move || -> Result<(), Failed> {
            let found = found[n].as_ref()?;
            let listed = listed();
            let unlisted = found.iter().filter(|(form, _)| !listed.contains(form.as_str()));
            let unlisted: Vec<String> = unlisted.map(|(form, kernel)| format!("{form} ({kernel})")).collect();
            match unlisted.is_empty() {
                true => Ok(()),
                false => Err(format!("not in forms.txt: {}", unlisted.join(", ")).into()),
            }
        };
        tests.push(Trial::test(format!("all forms are listed of {}", source.name), test));
    }
    if all {
        let test = move || -> Result<(), Failed> {
            let mut unused = listed();
            unused.retain(|form| !ON_DEMAND.contains(form));
            for found in found.iter() {
                found.as_ref()?.keys().for_each(|form| _ = unused.remove(form.as_str()));
            }
            match unused.is_empty() {
                true => Ok(()),
                false => Err(format!("forms.txt lists what no kernel has: {unused:?}").into()),
            }
        };
        tests.push(Trial::test("every listed form is one of a kernel's", test));
    }
    let tests = tests.into_iter().map(|test| test.with_ignored_flag(!is_there)).collect();
    libtest_mimic::run(&Arguments::from_args(), tests).exit()
}
