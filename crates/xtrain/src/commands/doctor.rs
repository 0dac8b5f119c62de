//! `xtrain doctor`.

use crate::cli::DoctorArgs;
use crate::failure::Failure;
use crate::terminal;
use xtrain_lab::doctor::{Examination, LibraryFound, examine};
use xtrain_report::metrics::format;

pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    terminal::use_threads(0)?;
    let found = examine();
    let _ = match args.json {
        true => terminal::print_json(&found)?,
        false => terminal::print(&text(&found))?,
    };
    match found.works {
        true => Ok(()),
        false => Err(Failure::user(format!(
            "training does not work on {}: {}; `train.device = \"cpu\"` does without a GPU",
            found.device,
            found
                .self_tests
                .iter()
                .filter_map(|test| test.problem.as_deref())
                .next()
                .unwrap_or("a trial failed")
        ))),
    }
}

/// Widths of the columns.
const NAME: usize = 17;
const VERSION: usize = 34;

fn text(found: &Examination) -> String {
    let mut out = format!("xtrain {}\n\nNVIDIA's libraries\n", crate::cli::VERSION);
    for (n, library) in found.libraries.iter().enumerate() {
        out.push_str(&of_library(library, &found.libraries[..n]));
    }
    for fault in &found.folder_faults {
        out.push_str(&format!("  {fault}\n"));
    }
    out.push_str("\nGPUs\n");
    if found.gpus.is_empty() {
        out.push_str("  none found\n");
    }
    for gpu in &found.gpus {
        let free = match gpu.free_bytes {
            Some(bytes) => format!("{} free", format::gib(bytes)),
            None => "which cannot be opened".into(),
        };
        out.push_str(&format!(
            "  {}  {}, compute capability {}, {} multiprocessors, {} of memory, {free}\n",
            gpu.ordinal,
            gpu.name,
            gpu.compute_capability,
            gpu.multiprocessors,
            format::gib(gpu.memory_bytes)
        ));
        let recipes = if gpu.recipes.is_empty() { "none".into() } else { gpu.recipes.join(", ") };
        out.push_str(&format!("     recipes: {recipes}\n"));
    }
    let rows = found.recipes.iter().map(|row| format!("{} from {}", row.recipe, row.from));
    let rows: Vec<String> = rows.collect();
    out.push_str(&format!("  recipes by compute capability: {}\n", rows.join(", ")));
    out.push_str("\nKernels that were compiled\n");
    let cache = &found.kernel_cache;
    out.push_str(&match &cache.folder {
        Some(folder) => {
            let many = if cache.files == 1 { "" } else { "s" };
            let bytes = format::bytes(cache.bytes);
            let held = format!("{} file{many}, {bytes}", cache.files);
            format!("  {}: {}\n", terminal::shown_path(folder), cache.problem.as_ref().unwrap_or(&held))
        }
        None => "  are not cached: set XTRAIN_CACHE to a folder, or every start compiles them\n".into(),
    });
    let memory = |bytes: Option<u64>| bytes.map_or("unknown".into(), format::gib);
    out.push_str(&format!(
        "\nCPU\n  {} threads, {} of memory, {} available\n",
        found.cpu.threads,
        memory(found.cpu.memory_bytes),
        memory(found.cpu.available_bytes)
    ));
    out.push_str(&format!("\nTried on {}\n", found.device));
    for test in &found.self_tests {
        let (what, seconds) = (&test.name, format::duration(test.seconds));
        let said = if test.ok { "ok" } else { "failed" };
        out.push_str(&format!("  {what:<44}{said:<8}{seconds:>6}\n"));
        if let Some(problem) = &test.problem {
            out.push_str(&format!("      {}\n", problem.replace('\n', "\n      ")));
        }
    }
    out.push_str(&verdict(found));
    out
}

/// A library, after the `earlier` ones: places that one of them was looked for in are not listed again.
fn of_library(library: &LibraryFound, earlier: &[LibraryFound]) -> String {
    let LibraryFound { name, file, path, version, missing } = library;
    let Some(missing) = missing else {
        let path = path.as_ref().map_or_else(String::new, |path| terminal::shown_path(path));
        return format!("  {name:<NAME$}{:<VERSION$}{path}\n", version.as_deref().unwrap_or_default());
    };
    let mut out = format!("  {name:<NAME$}{file} {}\n", missing.problem);
    let mut line = |what: &str, value: &str| out.push_str(&format!("      {what:<13}{value}\n"));
    let is_alike = |other: &&LibraryFound| {
        other.missing.as_ref().is_some_and(|other| other.looked_in == missing.looked_in)
    };
    match earlier.iter().find(is_alike) {
        Some(other) => line("looked in", &format!("the same places as for {}", other.name)),
        None => missing.looked_in.iter().enumerate().for_each(|(n, place)| {
            line(if n == 0 { "looked in" } else { "" }, place);
        }),
    }
    line("to get it", missing.remedy);
    line("without it", missing.without_it);
    out
}

fn verdict(found: &Examination) -> String {
    let device = &found.device;
    match (found.works, &found.no_gpu) {
        (true, None) => format!("\nTraining works, on {device}.\n"),
        (true, Some(why)) => {
            format!("\nTraining works, on the CPU alone ({device}). No GPU is used: {why}.\n")
        }
        (false, _) => format!("\nTraining does not work on {device}: see what failed above.\n"),
    }
}
