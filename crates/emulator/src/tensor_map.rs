//! Tensor maps: how `cuTensorMapEncodeTiled` describes a tensor, and the bytes of a box of it.
//!
//! The words of an encoded map are a magic number and the map's place in the list of this process.

use crate::kernel::cluster::CopyPiece;
use std::sync::{Arc, Mutex, PoisonError};

/// All maps.
static MAPS: Mutex<Vec<Arc<TensorMap>>> = Mutex::new(Vec::new());

/// The first word of every map.
const MAGIC: u64 = u64::from_le_bytes(*b"tensormp");
/// Bytes that a swizzle moves at once.
const CHUNK: u64 = 16;
/// The most dimensions.
pub(crate) const MOST_DIMENSIONS: usize = 5;

/// A tensor in global memory and the boxes in which it is copied. Dimensions begin with the contiguous one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorMap {
    pub(crate) address: u64,
    pub(crate) element_bytes: u64,
    /// log2 of the number of chunks that a swizzle permutes.
    pub(crate) swizzle_bits: u32,
    pub(crate) extents: Vec<u64>,
    /// Strides in bytes of the dimensions but the first.
    pub(crate) strides: Vec<u64>,
    pub(crate) boxed: Vec<u64>,
}

/// The place of an address in shared memory by a swizzle that permutes 2^bits chunks of 16 bytes.
#[inline(always)]
pub(crate) fn swizzled(address: u64, bits: u32) -> u64 {
    address ^ (address >> 7 & ((1 << bits) - 1)) << 4
}

impl TensorMap {
    /// Checks what the driver checks, by the documentation of `cuTensorMapEncodeTiled` (CUDA 13.0).
    pub(crate) fn check(&self) -> Result<(), String> {
        let TensorMap { address, element_bytes, swizzle_bits, extents, strides, boxed } = self;
        if address % 16 != 0 {
            return Err(format!("the address {address:#x} is not a multiple of 16"));
        }
        if let Some(extent) = extents.iter().find(|extent| !(1..=1 << 32).contains(*extent)) {
            return Err(format!("an extent of {extent}"));
        }
        if let Some(stride) = strides.iter().find(|stride| *stride % 16 != 0 || **stride >= 1 << 40) {
            return Err(format!("a stride of {stride} bytes, which must be a multiple of 16 below 2^40"));
        }
        if let Some(extent) = boxed.iter().find(|extent| !(1..=256).contains(*extent)) {
            return Err(format!("a box with {extent} elements along a dimension"));
        }
        let inner = boxed[0] * element_bytes;
        let most = if *swizzle_bits == 0 { u64::MAX } else { CHUNK << swizzle_bits };
        if inner % CHUNK != 0 || inner > most {
            return Err(format!(
                "a box whose rows have {inner} bytes; they are multiples of 16 up to {most}"
            ));
        }
        // The driver allows it; where the rows of such a box lie is not documented.
        if *swizzle_bits > 0 && inner < most {
            return Err(format!(
                "a box whose rows of {inner} bytes are narrower than its swizzle, which is not emulated"
            ));
        }
        Ok(())
    }

    /// Words that stand for the map.
    pub(crate) fn encode(self) -> [u64; 16] {
        let mut maps = MAPS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = maps.iter().position(|map| **map == self);
        let number = known.unwrap_or(maps.len());
        if number == maps.len() {
            maps.push(Arc::new(self));
        }
        let mut words = [0; 16];
        words[..2].copy_from_slice(&[MAGIC, number as u64]);
        words
    }

    /// The map with these words; `None` if they are not a map.
    pub(crate) fn decode(words: &[u64; 16]) -> Option<Arc<TensorMap>> {
        let maps = MAPS.lock().unwrap_or_else(PoisonError::into_inner);
        maps.get(words[1] as usize).filter(|_| words[0] == MAGIC).cloned()
    }

    pub(crate) fn box_bytes(&self) -> u64 {
        self.element_bytes * self.boxed.iter().product::<u64>()
    }

    /// The pieces that a copy of a box to the tensor writes. As on a GPU, rows are written up to a multiple
    /// of 16 bytes, and negative coordinates are an error.
    pub(crate) fn stored_pieces(&self, coordinates: &[i32], shared: u64) -> Result<Vec<CopyPiece>, String> {
        if let Some(at) = coordinates.iter().find(|at| **at < 0) {
            return Err(format!("copies a box to the coordinate {at} of a tensor"));
        }
        let mut whole = self.clone();
        whole.extents[0] =
            (self.extents[0] * self.element_bytes).next_multiple_of(CHUNK) / self.element_bytes;
        let mut pieces = whole.pieces(coordinates, shared);
        pieces.retain(|piece| piece.global.is_some());
        Ok(pieces)
    }

    /// The pieces of the box that begins at these coordinates, with a dense copy of it at `shared`. What is
    /// outside of the tensor has no global address.
    pub(crate) fn pieces(&self, coordinates: &[i32], shared: u64) -> Vec<CopyPiece> {
        let row_bytes = self.boxed[0] * self.element_bytes;
        let step = if self.swizzle_bits == 0 { row_bytes } else { CHUNK };
        let mut pieces = Vec::new();
        for row in 0..self.boxed[1..].iter().product::<u64>() {
            let (mut rest, mut start, mut is_inside) = (row, self.address as i64, true);
            for (n, &extent) in self.boxed.iter().enumerate().skip(1) {
                let at = i64::from(coordinates[n]) + (rest % extent) as i64;
                rest /= extent;
                is_inside &= (0..self.extents[n] as i64).contains(&at);
                start = start.wrapping_add(at.wrapping_mul(self.strides[n - 1] as i64));
            }
            // The row's bytes that are inside of the tensor.
            let first = i64::from(coordinates[0]) * self.element_bytes as i64;
            let end = if is_inside { (self.extents[0] * self.element_bytes) as i64 } else { i64::MIN };
            for chunk in (0..row_bytes).step_by(step as usize) {
                let to = swizzled(shared + row * row_bytes + chunk, self.swizzle_bits);
                let from = first + chunk as i64;
                let begin = (-from).clamp(0, step as i64) as u64;
                let inside = end.saturating_sub(from).clamp(begin as i64, step as i64) as u64;
                let parts = [(0, begin, false), (begin, inside, true), (inside, step, false)];
                for (begin, end, is_inside) in parts.into_iter().filter(|(begin, end, _)| begin < end) {
                    let global = is_inside.then(|| (start + from) as u64 + begin);
                    pieces.push(CopyPiece { global, shared: to + begin, bytes: end - begin });
                }
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        let (extents, strides, boxed) = (vec![40, 3], vec![48], vec![32, 2]);
        TensorMap { address: 1 << 20, element_bytes: 1, swizzle_bits: 0, extents, strides, boxed }
    }

    #[test]
    fn a_map_is_decoded_as_it_was_encoded() {
        let [first, other] = [map(), TensorMap { address: 16, ..map() }].map(TensorMap::encode);
        assert_eq!(TensorMap::decode(&first).as_deref(), Some(&map()));
        assert_eq!((first == map().encode(), first == other), (true, false));
        assert_eq!(TensorMap::decode(&[0; 16]), None);
        assert!(map().check().is_ok());
        assert!(TensorMap { strides: vec![40], ..map() }.check().is_err());
        assert!(TensorMap { swizzle_bits: 1, boxed: vec![48, 2], ..map() }.check().is_err());
    }

    #[test]
    fn what_lies_outside_of_the_tensor_is_filled() {
        let found = map().pieces(&[16, 2], 0);
        let found: Vec<_> = found.iter().map(|piece| (piece.global, piece.shared, piece.bytes)).collect();
        let start = (1 << 20) + 2 * 48 + 16;
        assert_eq!(found, [(Some(start), 0, 24), (None, 24, 8), (None, 32, 32)]);
        let found = map().pieces(&[-8, 0], 0);
        assert_eq!((found[0].global, found[0].bytes, found[1].global), (None, 8, Some(1 << 20)));
    }

    #[test]
    fn rows_are_stored_up_to_a_multiple_of_16_bytes() {
        let found = map().stored_pieces(&[16, 2], 0).unwrap();
        let found: Vec<_> = found.iter().map(|piece| (piece.global, piece.shared, piece.bytes)).collect();
        assert_eq!(found, [(Some((1 << 20) + 2 * 48 + 16), 0, 32)]);
        assert!(map().stored_pieces(&[0, -1], 0).is_err());
    }

    #[test]
    fn a_swizzle_permutes_the_chunks_of_eight_rows() {
        let of_row = |row: u64, bits, width: u64| -> Vec<u64> {
            (0..width / 16).map(|n| swizzled(row * width + 16 * n, bits) % width / 16).collect()
        };
        assert_eq!(of_row(3, 3, 128), [3, 2, 1, 0, 7, 6, 5, 4]);
        assert_eq!(of_row(2, 2, 64), [1, 0, 3, 2]);
        assert_eq!([of_row(3, 1, 32), of_row(4, 1, 32)], [[0, 1], [1, 0]]);
    }
}
