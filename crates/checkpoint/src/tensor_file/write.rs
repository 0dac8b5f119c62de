//! The writer of a safetensors file: the header first, from the shapes, then one tensor at a time.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo as Entry};

use super::StoredDtype;
use super::header::{LENGTH_BYTES, MAX_HEADER_BYTES, stored_bytes};
use crate::error::{CheckpointError, Result};
use crate::temporary::Temporary;

/// Name, type and shape of a tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: StoredDtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
}

/// A safetensors file that is being written. Dropping it before [`TensorFileWriter::finish`] removes the
/// file.
#[derive(Debug)]
pub struct TensorFileWriter {
    /// The final name, for errors.
    path: PathBuf,
    out: BufWriter<File>,
    /// `None` in a folder that is itself temporary.
    temporary: Option<Temporary>,
    /// Names and sizes in bytes of the tensors, in the order of the file.
    expected: Vec<(String, usize)>,
    next: usize,
}

impl TensorFileWriter {
    /// Creates a temporary file beside `path` and writes the header for `tensors`, whose bytes follow in that
    /// order.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the disk fails; [`CheckpointError::Internal`] for repeated names or sizes
    /// that overflow.
    pub fn create(path: &Path, tensors: &[StoredTensor], metadata: &[(&str, &str)]) -> Result<Self> {
        let header = HeaderLayout::new(path, tensors, metadata)?;
        let temporary = Temporary::file(path)?;
        let file = temporary.handle().try_clone().map_err(CheckpointError::io(path, "create"))?;
        Self::start(path, file, Some(temporary), header)
    }

    /// [`TensorFileWriter::create`] under the final name, for a folder that is itself temporary.
    pub(crate) fn create_in_place(
        path: &Path,
        tensors: &[StoredTensor],
        metadata: &[(&str, &str)],
    ) -> Result<Self> {
        let header = HeaderLayout::new(path, tensors, metadata)?;
        let file = File::create_new(path).map_err(CheckpointError::io(path, "create"))?;
        Self::start(path, file, None, header)
    }

    fn start(path: &Path, file: File, temporary: Option<Temporary>, layout: HeaderLayout) -> Result<Self> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&(layout.json.len() as u64).to_le_bytes())
            .and_then(|()| out.write_all(&layout.json))
            .map_err(CheckpointError::io(path, "write"))?;
        Ok(Self { path: path.to_path_buf(), out, temporary, expected: layout.sizes, next: 0 })
    }

    /// Appends the next tensor's bytes (little-endian, row-major).
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the disk fails (is full, for example); [`CheckpointError::Internal`] if the
    /// number of bytes does not match dtype and shape.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_in_parts(|append| append(bytes))
    }

    /// [`TensorFileWriter::write`] in parts: `each` appends them in order.
    pub(crate) fn write_in_parts(
        &mut self,
        each: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let Some((name, size)) = self.expected.get(self.next) else {
            let (path, count) = (self.path.display(), self.expected.len());
            return Err(CheckpointError::Internal(format!("{path}: more than {count} tensors were written")));
        };
        let mut found = 0;
        each(&mut |bytes| {
            found += bytes.len();
            self.out.write_all(bytes).map_err(CheckpointError::io(&self.path, "write"))
        })?;
        if found != *size {
            let path = self.path.display();
            return Err(CheckpointError::Internal(format!(
                "{path}: tensor '{name}' takes {size} bytes, but got {found}"
            )));
        }
        self.next += 1;
        Ok(())
    }

    /// Syncs the file, renames it to its final name and returns its length in bytes.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the disk fails; [`CheckpointError::Internal`] if tensors are missing.
    pub fn finish(self) -> Result<u64> {
        let Self { path, out, temporary, expected, next } = self;
        if next != expected.len() {
            let (path, count) = (path.display(), expected.len());
            return Err(CheckpointError::Internal(format!("{path}: {next} of {count} tensors were written")));
        }
        let file = out.into_inner().map_err(|e| CheckpointError::io(&path, "write")(e.into_error()))?;
        file.sync_all().map_err(CheckpointError::io(&path, "sync to the disk"))?;
        let bytes = file.metadata().map_err(CheckpointError::io(&path, "read the size of"))?.len();
        if let Some(temporary) = temporary {
            temporary.publish(&path)?;
        }
        Ok(bytes)
    }
}

/// The header's JSON, padded so that the data starts at a multiple of eight bytes, and the sizes of the
/// tensors.
struct HeaderLayout {
    json: Vec<u8>,
    sizes: Vec<(String, usize)>,
}

impl HeaderLayout {
    fn new(path: &Path, tensors: &[StoredTensor], metadata: &[(&str, &str)]) -> Result<Self> {
        let internal = |problem: String| CheckpointError::Internal(format!("{}: {problem}", path.display()));
        let mut names = HashSet::new();
        let mut sizes = Vec::with_capacity(tensors.len());
        let mut entries = Vec::with_capacity(tensors.len());
        let mut end = 0usize;
        for tensor in tensors {
            let StoredTensor { name, dtype, shape } = tensor;
            if name == "__metadata__" || !names.insert(name.as_str()) {
                return Err(internal(format!("the name '{name}' is taken")));
            }
            let bytes = stored_bytes(*dtype, shape).filter(|bytes| end.checked_add(*bytes).is_some());
            let bytes = bytes.ok_or_else(|| internal(format!("the size of '{name}' {shape:?} overflows")))?;
            entries.push((
                name.clone(),
                Entry { dtype: *dtype, shape: shape.clone(), data_offsets: (end, end + bytes) },
            ));
            sizes.push((name.clone(), bytes));
            end += bytes;
        }
        let metadata: HashMap<String, String> =
            metadata.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let header = Metadata::new((!metadata.is_empty()).then_some(metadata), entries)
            .map_err(|e| internal(format!("the header is not valid: {e}")))?;
        let mut json = serde_json::to_vec(&header)
            .map_err(|e| internal(format!("the header does not serialise: {e}")))?;
        json.resize(json.len().next_multiple_of(LENGTH_BYTES), b' ');
        if json.len() > MAX_HEADER_BYTES {
            return Err(internal(format!("the header takes {} bytes", json.len())));
        }
        Ok(Self { json, sizes })
    }
}
