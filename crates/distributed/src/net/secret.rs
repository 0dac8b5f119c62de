//! The secret of a run: those who know it are ranks.
//!
//! It is a value that the launcher gives to all ranks, or a file that rank 0 writes and that only the user
//! can read. The file of an earlier run that was killed may still be there when a rank looks for it, so ranks
//! read it again whenever they are refused.

use crate::error::CommError;
use crate::limits;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Variable that holds the secret.
pub const SECRET_VARIABLE: &str = "XTRAIN_SECRET";

/// Minimum length of a secret, in bytes: a short one can be guessed from one answer to a challenge.
const MIN_BYTES: usize = 16;

/// The user that NFS shows in the place of root.
const NOBODY: u32 = 65_534;

/// Maximum length of a secret, in bytes.
const MAX_BYTES: u64 = 4096;

/// The source of the secret.
#[derive(Clone)]
pub struct Secret(SecretSource);

#[derive(Clone)]
enum SecretSource {
    Value(Vec<u8>),
    File(PathBuf, WriteSecret),
}

/// Writes a file that only the user can read, and replaces an older one. Its error is one line with the path.
pub type WriteSecret = fn(&Path, &str) -> Result<(), String>;

/// The secret itself, as the key of message authentication codes.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) Vec<u8>);

impl Secret {
    /// A secret with this value, as from `XTRAIN_SECRET`.
    ///
    /// # Errors
    /// It has less than 16 bytes.
    pub fn value(text: &str) -> Result<Self, CommError> {
        let bytes = text.trim().as_bytes().to_vec();
        if bytes.len() < MIN_BYTES {
            return Err(CommError::Start(format!(
                "{SECRET_VARIABLE} has {} bytes, but a secret needs {MIN_BYTES}: `openssl rand -hex 32` prints one",
                bytes.len()
            )));
        }
        Ok(Secret(SecretSource::Value(bytes)))
    }

    /// The secret in a file, which rank 0 writes once it listens. The other ranks wait for it while they
    /// start.
    pub fn file(path: impl Into<PathBuf>, write: WriteSecret) -> Self {
        Secret(SecretSource::File(path.into(), write))
    }

    /// The secret for rank 0. If it is in a file, writes a random one to it. A file of an earlier run is
    /// replaced.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn create(&self) -> Result<Key, CommError> {
        let (path, write) = match &self.0 {
            SecretSource::Value(bytes) => return Ok(Key(bytes.clone())),
            SecretSource::File(path, write) => (path, write),
        };
        let secret = random_text().map_err(system)?;
        write(path, &secret).map_err(|e| CommError::Start(format!("the secret of the run: {e}")))?;
        Ok(Key(secret.into_bytes()))
    }

    /// Removes the file, if the secret is in one.
    pub(crate) fn remove(&self) {
        if let SecretSource::File(path, _) = &self.0 {
            // A file that stays is harmless: the next run replaces it.
            let _ = fs::remove_file(path);
        }
    }

    pub(crate) fn key(&self) -> Result<Key, CommError> {
        match &self.0 {
            SecretSource::Value(bytes) => Ok(Key(bytes.clone())),
            SecretSource::File(path, _) => read_private(path),
        }
    }
}

/// It does not show the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            SecretSource::Value(_) => f.write_str("Secret(value)"),
            SecretSource::File(path, _) => write!(f, "Secret({})", path.display()),
        }
    }
}

/// A random secret in 64 hexadecimal digits.
pub(crate) fn random_text() -> io::Result<String> {
    Ok(random()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// 32 random bytes of the kernel.
pub(crate) fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    // Up to 256 bytes, the kernel gives all or fails.
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

fn read_private(path: &Path) -> Result<Key, CommError> {
    let refuse =
        |what: String| CommError::Start(format!("the secret of the run, {}: {what}", path.display()));
    let unreadable = |e: io::Error| match e.kind() {
        _ if limits::is_out_of_files(&e) => limits::system("the secret of the run", &e),
        io::ErrorKind::NotFound => refuse(format!(
            "it does not exist: rank 0, which writes it, has not started or has failed (see its output), or this node \
             does not share its folder; with {SECRET_VARIABLE} on all ranks no file is needed"
        )),
        _ => refuse(e.to_string()),
    };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    let user = rustix::process::geteuid();
    // A network file system may show another owner of root's files, that of its folder or nobody.
    let is_roots = |owner: u32| {
        let of_folder = path.parent().and_then(|folder| fs::metadata(folder).ok()).map(|folder| folder.uid());
        user.is_root() && (owner == NOBODY || Some(owner) == of_folder)
    };
    if metadata.uid() != user.as_raw() && !is_roots(metadata.uid()) {
        return Err(refuse("it belongs to another user; remove it".into()));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(refuse("other users can read it (its mode must be 600); remove it".into()));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() < MIN_BYTES {
        return Err(refuse("it is too short; remove it".into()));
    }
    Ok(Key(bytes))
}

fn system(error: io::Error) -> CommError {
    CommError::System(format!("the kernel gave no random numbers: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::secret_file;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_holds_another_secret_for_each_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run.secret");
        let secret = secret_file(&path);
        let first = secret.create().expect("a secret");
        assert_eq!(secret.key().expect("a key").0, first.0);
        assert_ne!(secret.create().expect("another secret").0, first.0);
        secret.remove();
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run.secret");
        let secret = secret_file(&path);
        secret.create().expect("a secret");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("our file");
        let error = secret.key().err().expect("a refusal").to_string();
        assert!(error.contains("run.secret") && error.contains("600"), "{error}");
    }

    #[test]
    fn short_secrets_are_refused_and_none_is_shown() {
        assert!(Secret::value("hunter2").is_err());
        let secret = Secret::value("0123456789abcdef\n").expect("16 bytes");
        assert_eq!(secret.key().expect("a key").0.len(), 16);
        assert_eq!(format!("{secret:?}"), "Secret(value)");
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error_with_its_path() {
        let error =
            secret_file("/nonexistent/run.secret".as_ref()).create().err().expect("no folder").to_string();
        assert!(error.contains("/nonexistent/run.secret"), "{error}");
    }
}
