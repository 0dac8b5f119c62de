//! A matrix in device memory, read and written as f32.

use super::{Element, GemmLayout};
use crate::memory::{Memory, Unreadable};
use crate::numbers::{E4M3, E5M2, from_bf16, to_bf16};
use bytemuck::Pod;

/// A matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) name: &'static str,
    pub(super) address: u64,
    pub(super) layout: GemmLayout,
}

impl Matrix {
    /// All elements, widened, without the gaps between columns. An element that was never written is an
    /// error.
    pub(super) fn read(&self, memory: &Memory) -> Result<Vec<f32>, String> {
        let decode = |format: crate::numbers::Minifloat| -> Result<Vec<f32>, String> {
            let values: Vec<f32> = (0..=u8::MAX).map(|bits| format.decode(bits)).collect();
            Ok(self.bits::<u8>(memory)?.into_iter().map(|bits| values[usize::from(bits)]).collect())
        };
        match self.layout.element {
            Element::F32 => self.bits(memory),
            Element::Bf16 => Ok(self.bits(memory)?.into_iter().map(from_bf16).collect()),
            Element::E4m3 => decode(E4M3),
            Element::E5m2 => decode(E5M2),
        }
    }

    /// Addresses of the contiguous parts of memory, and the number of elements in each.
    fn parts(&self) -> (impl Iterator<Item = u64> + use<>, usize) {
        let GemmLayout { element, rows, columns, leading } = self.layout;
        let (parts, length) = if leading == rows { (1, rows * columns) } else { (columns, rows) };
        let (address, step) = (self.address, leading * element.bytes());
        ((0..parts).map(move |part| address + (part * step) as u64), length)
    }

    /// The bits of all elements, without the gaps between columns.
    fn bits<T: Pod>(&self, memory: &Memory) -> Result<Vec<T>, String> {
        let mut all = vec![T::zeroed(); self.layout.rows * self.layout.columns];
        let (parts, length) = self.parts();
        for (address, part) in parts.zip(all.chunks_mut(length)) {
            let part: &mut [u8] = bytemuck::cast_slice_mut(part);
            let bytes = part.len() as u64;
            memory.read(address, part).map_err(|unreadable| match unreadable {
                Unreadable::Outside => self.outside("reads", memory, address, bytes),
                Unreadable::Unwritten => {
                    let (name, place) = (self.name, memory.describe(address, bytes));
                    format!("a GEMM reads elements of {name} that were never written: {place}")
                }
            })?;
        }
        Ok(all)
    }

    /// Rounds and writes all elements; the gaps between columns are unchanged.
    pub(super) fn write(&self, memory: &Memory, elements: &[f32]) -> Result<(), String> {
        let rounded: Vec<u16>;
        let bytes: &[u8] = match self.layout.element {
            Element::Bf16 => {
                rounded = elements.iter().map(|&element| to_bf16(element)).collect();
                bytemuck::cast_slice(&rounded)
            }
            _ => bytemuck::cast_slice(elements),
        };
        let (parts, length) = self.parts();
        let length = length * self.layout.element.bytes();
        for (address, part) in parts.zip(bytes.chunks(length)) {
            let written = memory.write(address, part);
            written.ok_or_else(|| self.outside("writes", memory, address, length as u64))?;
        }
        Ok(())
    }

    fn outside(&self, does: &str, memory: &Memory, address: u64, bytes: u64) -> String {
        let place = memory.describe(address, bytes);
        format!("a GEMM {does} {} out of bounds: {place}", self.name)
    }
}
