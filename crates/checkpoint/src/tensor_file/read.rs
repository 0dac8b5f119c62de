//! The reader: one memory-mapped safetensors file whose header has been validated whole.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use super::convert::widen;
use super::header::{Header, LENGTH_BYTES, TensorInfo};
use crate::error::{CheckpointError, Result};
use crate::map::MappedFile;

/// Bytes that are read between two looks at the file's length. A multiple of every element size.
const CHUNK_BYTES: usize = 16 << 20;

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    map: MappedFile,
    header: Header,
    by_name: HashMap<String, usize>,
}

impl TensorFile {
    /// Maps the file and validates its header.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when it cannot be opened; [`CheckpointError::Damaged`] for anything but a complete
    /// safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let map = MappedFile::open(path)?;
        // Long enough to tell a git-lfs pointer from a strange header length.
        let start = map.bytes(0..map.len().min(64))?;
        let json_bytes = Header::json_bytes(path, start, map.len())?;
        let header = Header::parse(path, map.bytes(0..LENGTH_BYTES + json_bytes)?, map.len())?;
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { map, header, by_name })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// The validated header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.header.tensors[index])
    }

    /// A tensor's bytes, straight from the file: little-endian, row-major.
    ///
    /// # Errors
    /// [`CheckpointError::Shrunk`] when the file has been cut since it was opened.
    pub fn bytes(&self, tensor: &TensorInfo) -> Result<&[u8]> {
        self.map.bytes(tensor.range.clone())
    }

    /// Hands out a range of the file in order, in pieces of some MiB, and looks at the file's length before each.
    pub(crate) fn chunks(
        &self,
        range: Range<usize>,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + CHUNK_BYTES);
            each(self.map.bytes(at..end)?)?;
            at = end;
        }
        Ok(())
    }

    /// Converts a tensor of F64, F32, F16 or BF16 elements to `f32`, rounding F64 to nearest even.
    ///
    /// # Errors
    /// [`CheckpointError::Unsupported`] for other element types; [`CheckpointError::Shrunk`] when the file has been
    /// cut; [`CheckpointError::Internal`] when `out` has another number of elements.
    pub fn read_f32(&self, tensor: &TensorInfo, out: &mut [f32]) -> Result<()> {
        let numel: usize = tensor.shape.iter().product();
        if numel != out.len() {
            let (name, room) = (&tensor.name, out.len());
            return Err(CheckpointError::Internal(format!(
                "room for {room} of {numel} elements of '{name}'"
            )));
        }
        self.read_f32_part(tensor, 0, out)
    }

    /// As [`TensorFile::read_f32`], for as many elements as `out` has room for, from element `start` on.
    pub(crate) fn read_f32_part(&self, tensor: &TensorInfo, start: usize, out: &mut [f32]) -> Result<()> {
        self.check_readable(tensor)?;
        let size = tensor.dtype.bitsize() / 8;
        let begin = tensor.range.start + start * size;
        let mut rest = out;
        self.chunks(begin..begin + rest.len() * size, |bytes| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes.len() / size);
            rest = later;
            widen(tensor.dtype, bytes, now);
            Ok(())
        })
    }

    /// Refuses the element types that [`TensorFile::read_f32`] does not convert.
    pub(crate) fn check_readable(&self, tensor: &TensorInfo) -> Result<()> {
        use super::StoredDtype::*;
        match tensor.dtype {
            F64 | F32 | F16 | BF16 => Ok(()),
            F8_E4M3 | F8_E5M2 | F8_E8M0 | F8_E4M3FNUZ | F8_E5M2FNUZ | F4 | F6_E2M3 | F6_E3M2 => {
                Err(CheckpointError::unsupported(
                    self.path(),
                    &tensor.name,
                    format!("has {} elements, and quantised weights are not read yet", tensor.dtype),
                    "use the bf16 version of this model, or convert it to bf16 first",
                ))
            }
            _ => Err(CheckpointError::unsupported(
                self.path(),
                &tensor.name,
                format!("has {} elements, and weights are F64, F32, F16 or BF16", tensor.dtype),
                "this folder's weights are packed or quantised: use the bf16 version of this model",
            )),
        }
    }
}
