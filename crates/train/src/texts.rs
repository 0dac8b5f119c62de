//! The files of the texts that a user names, with advice for names of data that is not on this machine.

use crate::error::RunError;
use std::io::ErrorKind;
use std::path::Path;
use xtrain_checkpoint::CheckpointError;
use xtrain_checkpoint::hf::{hub_id, looks_like_a_hub_id};
use xtrain_data::{DataError, Listing, Take, shell_quoted};

/// Lists the files of texts.
///
/// # Errors
/// Those of [`xtrain_data::list`]; an address in place of a path.
pub fn list<P: AsRef<Path>>(names: &[P], take: Take) -> Result<Listing, RunError> {
    if let Some(refused) = names.iter().find_map(|name| refuse_address(name.as_ref())) {
        return Err(refused);
    }
    xtrain_data::list(names, take).map_err(|error| match hint(&error) {
        Some(hint) => RunError::Refused(format!("{error}; {hint}")),
        None => error.into(),
    })
}

/// Logs which files are read and which are not, if their names do not make that plain.
pub fn log(listing: &Listing) {
    for note in &listing.notes {
        tracing::info!("{note}");
    }
    for warning in &listing.warnings {
        tracing::warn!("{warning}");
    }
}

/// Advice for a text that does not exist, if its name may be that of a data set of the Hugging Face Hub.
fn hint(error: &DataError) -> Option<String> {
    let DataError::File(CheckpointError::Io { path, source, .. }) = error else { return None };
    let name = path.to_str().filter(|_| source.kind() == ErrorKind::NotFound)?;
    may_be_of_the_hub(name)
        .then(|| format!("if it is a data set of the Hugging Face Hub, {}", download(name)))
}

/// True for `owner/name` that is no file of a known kind.
pub fn may_be_of_the_hub(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_file = (2..=7).contains(&extension.len()) && extension.chars().all(|c| c.is_ascii_lowercase());
    looks_like_a_hub_id(name) && !is_file
}

/// The command that downloads a data set of the Hub.
pub fn download(name: &str) -> String {
    let (id, name) = (shell_quoted(&hub_id(name)), shell_quoted(name));
    format!("download it first: hf download {id} --repo-type dataset --local-dir {name}")
}

/// The error for the address of data elsewhere.
fn refuse_address(name: &Path) -> Option<RunError> {
    let name = name.to_str().filter(|name| !Path::new(name).exists())?;
    let (scheme, rest) = name.split_once("://")?;
    if scheme.is_empty() || !scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)) {
        return None;
    }
    let of_hub = ["datasets/", "huggingface.co/datasets/"].iter().find_map(|start| rest.strip_prefix(start));
    let hub_name = of_hub.filter(|_| ["hf", "http", "https"].contains(&scheme)).map(|rest| {
        let mut parts = rest.split('/');
        let owner = parts.next().unwrap_or_default();
        let name = parts.next().unwrap_or_default().split('@').next().unwrap_or_default();
        format!("{owner}/{name}")
    });
    let advice = match (scheme, &hub_name) {
        (_, Some(name)) => download(name),
        ("s3", _) => format!("copy it first: aws s3 sync {} FOLDER", shell_quoted(folder_of(name))),
        ("gs", _) => {
            format!("copy it first: gcloud storage rsync -r {} FOLDER", shell_quoted(folder_of(name)))
        }
        ("http" | "https", _) => format!("download it first: curl -LO {}", shell_quoted(name)),
        ("file", _) => format!("name its path: {rest}"),
        _ => "copy it to this machine first".to_owned(),
    };
    Some(RunError::Refused(format!("{name} is an address, and xtrain reads local files; {advice}")))
}

/// An address without the name of a file or a pattern.
fn folder_of(address: &str) -> &str {
    match address.rsplit_once('/') {
        Some((folder, name)) if name.contains(['.', '*', '?']) || name.is_empty() => folder,
        _ => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_that_is_elsewhere_has_the_command_that_fetches_it() {
        for (name, said) in [
            (
                "roneneldan/TinyStories",
                "hf download roneneldan/TinyStories --repo-type dataset --local-dir roneneldan/TinyStories",
            ),
            (
                "hf://datasets/allenai/c4@main/en/*.json.gz",
                "hf download allenai/c4 --repo-type dataset --local-dir allenai/c4",
            ),
            (
                "https://huggingface.co/datasets/a/b/resolve/main/x.parquet",
                "hf download a/b --repo-type dataset",
            ),
            ("s3://bucket/data/*.jsonl", "aws s3 sync s3://bucket/data FOLDER"),
            ("gs://bucket/data", "gcloud storage rsync -r gs://bucket/data FOLDER"),
            ("https://example.com/a.txt", "curl -LO https://example.com/a.txt"),
            ("file:///nowhere/a.txt", "name its path: /nowhere/a.txt"),
            ("memory://a", "copy it to this machine first"),
        ] {
            let error = list(&[name], Take::All).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(name) && error.contains(said), "{name}: {error}");
        }
        for name in ["nowhere/a.txt", "nowhere/a.jsonl", "./a/b", "nowhere"] {
            let error = list(&[name], Take::All).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("check the path") && !error.contains("Hub"), "{name}: {error}");
        }
    }
}
