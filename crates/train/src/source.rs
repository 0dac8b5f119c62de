//! Sources of a model and its data: the Hugging Face folder that training starts from, and folders of token
//! shards.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::paths::Sources;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::first_few;
use xtrain_checkpoint::hf::{hub_id, looks_like_a_hub_id, not_a_model, only_an_adapter, warn_of_adapter};
use xtrain_config::{OptimizerKind, nearest};
use xtrain_data::{Dataset, Tokenizer, shell_path};
use xtrain_model::hf::HfConfig;

/// File in a Hugging Face folder that describes the model.
pub const CONFIG_FILE: &str = "config.json";
/// File with the settings of generation; not every folder has one.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";

/// The first training source that is token shards, named by its path in the configuration.
pub(crate) fn shards(sources: &Sources<'_>) -> Result<Option<Dataset>, RunError> {
    let Some(first) = sources.train.iter().find(|source| source.is_shards) else { return Ok(None) };
    Ok(Some(Dataset::open(&first.path)?.with_name(&first.named.path)))
}

/// The model that training starts from, if any.
pub(crate) fn init(sources: &Sources<'_>) -> Result<Option<HfConfig>, RunError> {
    let Some(folder) = &sources.init_from else { return Ok(None) };
    if let Some(refused) = refuse_run_folder(folder) {
        return Err(refused);
    }
    read_hf_config(folder).map(Some)
}

/// Refuses a folder that holds an adapter in place of a model.
pub fn refuse_adapter(folder: &Path) -> Result<(), RunError> {
    only_an_adapter(folder).map_or(Ok(()), |error| Err(error.into()))
}

/// Warns of settings of a folder by which another program may compute other results.
pub(crate) fn warn_of_notes(folder: &Path, hf: &HfConfig) {
    let file = folder.join(CONFIG_FILE);
    hf.notes.warnings.iter().for_each(|note| tracing::warn!("{}: {note}", file.display()));
    warn_of_adapter(folder);
    let unknown = &hf.notes.unknown;
    if !unknown.is_empty() {
        tracing::debug!(
            "{}: keys that nothing reads: {} ({})",
            file.display(),
            unknown.len(),
            unknown.join(", ")
        );
    }
}

/// As [`warn_of_notes`], and of settings by which transformers would train otherwise; of Muon, if another
/// optimizer may have trained the weights.
pub(crate) fn warn_of_training(folder: &Path, hf: &HfConfig, optimizer: OptimizerKind) {
    warn_of_notes(folder, hf);
    let file = folder.join(CONFIG_FILE);
    let of_muon = hf.muon_note().filter(|_| optimizer == OptimizerKind::Muon);
    hf.notes.training.iter().chain(&of_muon).for_each(|note| tracing::warn!("{}: {note}", file.display()));
}

/// As [`init`], for a run that has begun: reads the copies in the run folder, because the original may be
/// missing or changed.
pub(crate) fn saved_init(sources: &Sources<'_>, run: &RunFolder) -> Result<Option<HfConfig>, RunError> {
    match &sources.init_from {
        Some(_) if run.source().is_dir() => read_hf_config(&run.source()).map(Some),
        _ => init(sources),
    }
}

/// Size limit of a model description.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Copies the description of the model in `folder`, from which training starts, to the run folder.
pub(crate) fn save_init(folder: &Path, run: &RunFolder) -> Result<(), RunError> {
    std::fs::create_dir_all(run.source()).map_err(RunError::io(&run.source(), "create"))?;
    for name in [CONFIG_FILE, GENERATION_FILE] {
        let path = folder.join(name);
        if path.exists() {
            let text = xtrain_config::files::read_text(&path, MAX_CONFIG_BYTES)
                .map_err(RunError::io(&path, "read"))?;
            run.write(&format!("source/{name}"), &text)?;
        }
    }
    Ok(())
}

/// Refuses a run folder or a checkpoint as `model.init_from`.
fn refuse_run_folder(folder: &Path) -> Option<RunError> {
    let (run, what, of_step) = match RunFolder::of_checkpoint(folder) {
        Some((run, step)) => (run, "a checkpoint of a run", format!(" --step {step}")),
        None => (Some(RunFolder::new(folder)).filter(RunFolder::is_begun)?, "a run folder", String::new()),
    };
    let (place, hf) = (shell_path(run.path()), run.hf());
    let advice = match hf.is_dir() && of_step.is_empty() {
        true => format!("its model is in {}", hf.display()),
        false => format!("export it first: xtrain export {place}{of_step} --out FOLDER"),
    };
    Some(RunError::Refused(format!(
        "model.init_from names {}, which is {what} and no Hugging Face folder; {advice}",
        folder.display()
    )))
}

/// The error for a model folder that does not exist.
pub fn no_such_folder(folder: &Path) -> RunError {
    let name = folder.to_string_lossy();
    if let Some(near) = near_folder(folder) {
        return RunError::Refused(format!("there is no folder {name}; did you mean {}?", near.display()));
    }
    let advice = match looks_like_a_hub_id(&name) {
        true => format!(
            "; if it is a model of the Hugging Face Hub, download it first: hf download {} --local-dir {name}",
            hub_id(&name)
        ),
        false => siblings(folder),
    };
    RunError::Refused(format!("there is no folder {name}; check the path{advice}"))
}

/// `; runs has a, b, c`: the folders where `folder` would be.
fn siblings(folder: &Path) -> String {
    const MOST: usize = 5;
    let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
        return String::new();
    };
    let mut names = folders_in(parent);
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    match names.is_empty() {
        true => String::new(),
        false => format!("; {} has {}", parent.display(), first_few(names, MOST)),
    }
}

/// Loads the tokenizer at `path`. `end_of_document` names the token that ends documents, if the tokenizer's
/// own files are not to; `others` says what else may be given, for the message if there is nothing at `path`.
pub fn load_tokenizer(
    path: &Path,
    end_of_document: Option<&str>,
    others: &str,
) -> Result<Tokenizer, RunError> {
    if !path.exists() {
        return Err(no_such_tokenizer(path, others));
    }
    Ok(match end_of_document {
        Some(name) => Tokenizer::load_with_end_of_document(path, name)?,
        None => Tokenizer::load(path)?,
    })
}

/// The values of `data.tokenizer` that are not paths, for [`load_tokenizer`].
pub(crate) const OWN_TOKENIZERS: &str = "\"bpe\", \"bytes\" or \"chars\"";

/// The error for a tokenizer that does not exist.
fn no_such_tokenizer(path: &Path, others: &str) -> RunError {
    let name = path.to_string_lossy();
    let is_file = path.extension().is_some_and(|extension| extension == "json");
    let is_hub_name = |name: &str| looks_like_a_hub_id(name) || looks_like_a_hub_id(&format!("any/{name}"));
    let advice = match near_folder(path) {
        Some(near) => format!("did you mean {}?", near.display()),
        None if !is_file && is_hub_name(&name) => format!(
            "if it is one of the Hugging Face Hub, download it first: hf download {} --include '*.json' --local-dir {name}",
            hub_id(&name)
        ),
        None => "check the path".to_owned(),
    };
    RunError::Refused(format!(
        "there is no tokenizer {name}; name a tokenizer.json, its folder, or {others}; {advice}"
    ))
}

/// The sibling of `folder` with the most similar name, if one is similar.
fn near_folder(folder: &Path) -> Option<PathBuf> {
    let parent = folder.parent()?;
    let listed = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let names = folders_in(listed);
    nearest(folder.file_name()?.to_str()?, names.iter().map(String::as_str)).map(|name| parent.join(name))
}

/// The names of the folders in `folder`; none if it cannot be read.
fn folders_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    folders.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Reads config.json and generation_config.json of a Hugging Face folder.
pub fn read_hf_config(folder: &Path) -> Result<HfConfig, RunError> {
    if !folder.exists() {
        return Err(no_such_folder(folder));
    }
    let config = folder.join(CONFIG_FILE);
    if let (false, Some(error)) = (config.exists(), not_a_model(folder)) {
        return Err(error.into());
    }
    let read = |path: &Path| {
        xtrain_config::files::read_text(path, MAX_CONFIG_BYTES).map_err(RunError::io(path, "read"))
    };
    let refused = |error| RunError::Model { place: folder.display().to_string(), error };
    let mut hf = HfConfig::parse(&read(&config)?).map_err(refused)?;
    let generation = folder.join(GENERATION_FILE);
    if generation.exists() {
        hf.parse_generation(&read(&generation)?).map_err(refused)?;
    }
    Ok(hf)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use xtrain_config::Config;

    const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 9, "unheard_of": 1.50}"#;

    #[test]
    fn a_run_keeps_what_the_folder_that_it_began_from_said() {
        let place = tempfile::tempdir().expect("a folder");
        let (folder, run) = (place.path().join("model"), RunFolder::new(place.path().join("run")));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(CONFIG_FILE), CONFIG).expect("written");
        fs::write(folder.join(GENERATION_FILE), r#"{"temperature": 0.6}"#).expect("written");
        let text = format!(
            "[model]\ninit_from = {:?}\n[data]\ntrain = \"a.txt\"\n[train]\nsteps = 1\n",
            folder.display().to_string()
        );
        let config =
            Config::parse::<&str>(Path::new("run.toml"), text.as_bytes(), &[]).expect("a run file").config;
        let sources = Sources::resolve(&config);
        let before = init(&sources).expect("read").expect("there is one");
        assert_eq!(before.generation["temperature"], 0.6);
        save_init(&folder, &run).expect("kept");
        assert_eq!(fs::read_to_string(run.source().join(CONFIG_FILE)).expect("there"), CONFIG);
        fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(saved_init(&sources, &run).expect("read"), Some(before));
        fs::remove_dir_all(run.source()).expect("removed");
        assert!(saved_init(&sources, &run).is_err(), "missing files are reported");
    }
}
