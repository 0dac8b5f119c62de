//! Atomic replacement of one file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::{CheckpointError, Result};
use crate::temporary::{self, Temporary};

/// Writes a file atomically: readers of `path` find the old file or the new one, never a part of either.
/// After the return it is the new one, even if the power fails.
///
/// `write` fills the temporary `<name>.tmp-<pid>` beside `path` (see `docs/checkpoint-format.md`), which is
/// synced and renamed; then the folder is synced and leftovers of ended processes are removed.
///
/// # Errors
/// [`CheckpointError::Io`], naming `path`, if the disk or `write` fails: the old file stays, and no temporary
/// remains. [`CheckpointError::Locked`] if this process is writing `path` already.
pub fn replace_file(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>) -> Result<()> {
    replace(path, Temporary::file, write)
}

/// As [`replace_file`]; only the user may read the file, from its first byte on.
///
/// # Errors
/// As [`replace_file`].
pub fn replace_private_file(path: &Path, content: &[u8]) -> Result<()> {
    replace(path, Temporary::private_file, |out| out.write_all(content))
}

fn replace(
    path: &Path,
    create: impl FnOnce(&Path) -> Result<Temporary>,
    write: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
) -> Result<()> {
    let replaced = || -> Result<()> {
        let temporary = create(path)?;
        let mut out = BufWriter::new(temporary.handle());
        write(&mut out).and_then(|()| out.flush()).map_err(CheckpointError::io(path, "write"))?;
        drop(out);
        temporary.publish(path)
    };
    replaced().map_err(|error| match error {
        // The caller asked for one write; the step that failed does not matter.
        CheckpointError::Io { source, .. } => CheckpointError::io(path, "write")(source),
        other => other,
    })?;
    let name = path.file_name().and_then(|name| name.to_str());
    if let Err(error) = temporary::remove_leftovers(temporary::parent(path), |target| Some(target) == name) {
        tracing::debug!("cannot remove leftovers of {}: {error}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_is_replaced_and_leftovers_of_it_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for name in ["a.json.tmp-1", "b.json.tmp-1"] {
            fs::write(dir.path().join(name), "half").unwrap();
        }
        for text in ["one", "two"] {
            replace_file(&path, |out| out.write_all(text.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert!(!dir.path().join("a.json.tmp-1").exists(), "its process has ended");
        assert!(dir.path().join("b.json.tmp-1").exists(), "it belongs to another file");
    }

    #[test]
    fn a_private_file_is_the_users_alone_and_replaces_leftovers() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        // As left by a killed process with this process id, of another container.
        fs::write(dir.path().join(format!("secret.tmp-{}", std::process::id())), "half").unwrap();
        fs::write(&path, "old").unwrap();
        replace_private_file(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_writer_that_fails_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        fs::write(&path, "old").unwrap();
        let full = |out: &mut BufWriter<&File>| {
            out.write_all(b"ne")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        };
        let error = replace_file(&path, full).unwrap_err().to_string();
        assert!(
            error.contains("a.json: cannot write: ")
                && error.ends_with(
                    "free some space and run the command again (a run that has begun: with --resume)"
                ),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // A folder is not replaced by a file.
        fs::create_dir(dir.path().join("b")).unwrap();
        assert!(replace_file(&dir.path().join("b"), |out| out.write_all(b"x")).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_is_being_written_is_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let inner = |_: &mut BufWriter<&File>| {
            let error = replace_file(&path, |_| Ok(())).unwrap_err();
            assert!(matches!(error, CheckpointError::Locked { .. }));
            Ok(())
        };
        replace_file(&path, inner).unwrap();
    }
}
