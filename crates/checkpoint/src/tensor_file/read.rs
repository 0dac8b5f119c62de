//! The reader of a safetensors file: validates the header on opening, then reads tensors into the caller's
//! buffers.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::StoredDtype;
use super::convert::widen;
use super::header::{Header, LENGTH_BYTES, TensorInfo};
use crate::error::{CheckpointError, Result};
use crate::files::{OpenFile, PIECE_BYTES};

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    file: OpenFile,
    contents: Arc<Contents>,
}

/// A header, and the index of each of its tensors.
#[derive(Debug)]
pub(crate) struct Contents {
    header: Header,
    by_name: HashMap<String, usize>,
}

impl TensorFile {
    /// Opens the file and validates its header.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when it cannot be opened; [`CheckpointError::Damaged`] for anything but a
    /// complete safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenFile::open(path)?;
        // Enough bytes to recognise a git-lfs pointer.
        let mut start = vec![0; file.len().min(64)];
        file.read_at(0, &mut start)?;
        start.resize(LENGTH_BYTES + Header::json_bytes(path, &start, file.len())?, 0);
        file.read_at(0, &mut start)?;
        let header = Header::parse(path, &start, file.len())?;
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { file, contents: Arc::new(Contents { header, by_name }) })
    }

    /// Opens a file again whose header is known.
    pub(crate) fn with_contents(path: &Path, contents: Arc<Contents>) -> Result<Self> {
        Ok(Self { file: OpenFile::open(path)?, contents })
    }

    pub(crate) fn contents(&self) -> &Arc<Contents> {
        &self.contents
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The validated header.
    pub fn header(&self) -> &Header {
        &self.contents.header
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.contents.by_name.get(name).map(|&index| &self.contents.header.tensors[index])
    }

    /// Reads a tensor's bytes, unconverted: little-endian, row-major.
    ///
    /// # Errors
    /// [`CheckpointError::Shrunk`] if the file was truncated after it was opened;
    /// [`CheckpointError::Internal`] if `out` has another length.
    pub fn read_bytes(&self, tensor: &TensorInfo, out: &mut [u8]) -> Result<()> {
        check_room(tensor, "bytes", tensor.range.len(), out.len())?;
        self.file.read_large_at(tensor.range.start, out)
    }

    /// Reads `out.len()` bytes from byte `start` of the file on, on all cores.
    pub(crate) fn read_at(&self, start: usize, out: &mut [u8]) -> Result<()> {
        self.file.read_large_at(start, out)
    }

    /// Calls `each` with the bytes of this range of the file, in order, in chunks of up to [`PIECE_BYTES`].
    pub(crate) fn for_each_chunk(&self, range: Range<usize>, mut each: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = vec![0; range.len().min(PIECE_BYTES)];
        for start in range.clone().step_by(PIECE_BYTES) {
            let chunk = &mut buffer[..PIECE_BYTES.min(range.end - start)];
            self.file.read_at(start, chunk)?;
            each(chunk);
        }
        Ok(())
    }

    /// Reads a tensor of F64, F32, F16 or BF16 elements as `f32`; F64 rounds to nearest even.
    ///
    /// # Errors
    /// [`CheckpointError::Unsupported`] for other element types and for finite F64 elements beyond the range
    /// of `f32`; [`CheckpointError::Shrunk`] if the file was truncated; [`CheckpointError::Internal`] if
    /// `out` has another number of elements.
    pub fn read_f32(&self, tensor: &TensorInfo, out: &mut [f32]) -> Result<()> {
        check_room(tensor, "elements", tensor.shape.iter().product(), out.len())?;
        self.read_f32_part(tensor, 0, out)
    }

    /// [`TensorFile::read_f32`] of scales, which may be F8_E8M0 too; its code 255 is a NaN.
    pub(crate) fn read_scales(&self, tensor: &TensorInfo, out: &mut [f32]) -> Result<()> {
        self.check_scales(tensor)?;
        check_room(tensor, "elements", tensor.shape.iter().product(), out.len())?;
        self.convert(tensor, 0, out)
    }

    /// [`TensorFile::read_f32`] of `out.len()` elements, from element `start` on.
    pub(crate) fn read_f32_part(&self, tensor: &TensorInfo, start: usize, out: &mut [f32]) -> Result<()> {
        self.check_readable(tensor)?;
        self.convert(tensor, start, out)
    }

    /// Reads `out.len()` E4M3 elements of a tensor, from element `start` on, as `f32`, without applying
    /// scales.
    pub(crate) fn read_e4m3_part(&self, tensor: &TensorInfo, start: usize, out: &mut [f32]) -> Result<()> {
        if tensor.dtype != StoredDtype::F8_E4M3 {
            return Err(CheckpointError::Internal(format!("'{}' is {}", tensor.name, tensor.dtype)));
        }
        self.convert(tensor, start, out)
    }

    /// Reads and converts `out.len()` elements from `start` on. The caller has checked the element type.
    fn convert(&self, tensor: &TensorInfo, start: usize, out: &mut [f32]) -> Result<()> {
        let size = tensor.dtype.bitsize() / 8;
        let begin = tensor.range.start + start * size;
        if tensor.dtype == StoredDtype::F32 {
            return self.file.read_large_at(begin, bytemuck::cast_slice_mut(out));
        }
        let piece_len = PIECE_BYTES / size;
        let convert = |buffer: &mut Vec<u8>, (i, out): (usize, &mut [f32])| {
            let first = i * piece_len;
            buffer.resize(out.len() * size, 0);
            self.file.read_at(begin + first * size, buffer)?;
            let Some((at, value)) = widen(tensor.dtype, buffer, out) else { return Ok(()) };
            Err(CheckpointError::unsupported(
                self.path(),
                &tensor.name,
                format!("element {} is {value:e}, which is too large for f32", start + first + at),
                "use a version of this model in F32 or BF16, or correct the value",
            ))
        };
        let pieces = out.par_chunks_mut(piece_len).enumerate().map_init(Vec::new, convert);
        // The first error in the file, independent of the number of threads.
        pieces.find_map_first(Result::err).map_or(Ok(()), Err)
    }

    /// Refuses the element types that [`TensorFile::read_scales`] does not convert.
    pub(crate) fn check_scales(&self, tensor: &TensorInfo) -> Result<()> {
        match tensor.dtype {
            StoredDtype::F8_E8M0 => Ok(()),
            _ => self.check_readable(tensor),
        }
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
                    format!(
                        "has {} elements; the only quantised weights that can be read are F8_E4M3 matrices with scales for blocks of 128 x 128",
                        tensor.dtype
                    ),
                    "use the bf16 version of this model, or convert it to bf16 first",
                ))
            }
            _ => Err(CheckpointError::unsupported(
                self.path(),
                &tensor.name,
                format!("has {} elements; weights must be F64, F32, F16 or BF16", tensor.dtype),
                "this folder's weights are packed or quantised: use the bf16 version of this model",
            )),
        }
    }
}

fn check_room(tensor: &TensorInfo, unit: &str, expected: usize, room: usize) -> Result<()> {
    if room == expected {
        return Ok(());
    }
    let name = &tensor.name;
    Err(CheckpointError::Internal(format!("a buffer of {room} {unit} for the {expected} of '{name}'")))
}
