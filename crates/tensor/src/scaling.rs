//! Scalings: the regions of a matrix that share a scale, and the layout of the scales.

/// The edge of tiles and blocks.
pub const TILE: usize = 128;

/// A scaling of a matrix `[M, K]`, a GEMM operand that is summed over K: the region that shares a scale, and
/// the layout of the scales in memory, which is the one that GEMMs read (cuBLAS 13, "Scaling modes"). At
/// edges that 128 does not divide, the last tiles are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// One scale for the whole matrix: `[1, 1]`.
    Tensor,
    /// One scale for each row: `[M, 1]`.
    Row,
    /// One scale for 128 neighbours in a row: `[ceil(K / 128), M]`; scales of one column of tiles are
    /// neighbours.
    Tile,
    /// One scale for 128 rows by 128 columns: `[ceil(M / 128), P]`. P is ceil(K / 128) rounded up to a
    /// multiple of four; the padding is 0.
    Block,
}

impl Scaling {
    /// All scalings.
    pub const ALL: [Scaling; 4] = [Scaling::Tensor, Scaling::Row, Scaling::Tile, Scaling::Block];

    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Scaling::Tensor => "tensor",
            Scaling::Row => "row",
            Scaling::Tile => "tile",
            Scaling::Block => "block",
        }
    }

    /// The rows and columns of the region that shares a scale, in a matrix of these extents.
    pub fn region(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Scaling::Tensor => (rows, cols),
            Scaling::Row => (1, cols),
            Scaling::Tile => (1, TILE),
            Scaling::Block => (TILE, TILE),
        }
    }

    /// The shape of the scales for a matrix of these extents.
    pub fn shape(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Scaling::Tensor => [1, 1],
            Scaling::Row => [rows, 1],
            Scaling::Tile => [cols.div_ceil(TILE), rows],
            Scaling::Block => [rows.div_ceil(TILE), cols.div_ceil(TILE).next_multiple_of(4)],
        }
    }

    /// The strides of scales: to the region below, and to the region on the right.
    pub fn steps(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Scaling::Tensor => (0, 0),
            Scaling::Row => (1, 0),
            Scaling::Tile => (1, rows),
            Scaling::Block => (self.shape(rows, cols)[1], 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_a_scale_and_regions_share_none() {
        for (rows, cols) in [(1, 1), (3, 5), (1, 300), (300, 1), (128, 256), (129, 131), (257, 640)] {
            for scaling in Scaling::ALL {
                let ((high, wide), (down, across)) = (scaling.region(rows, cols), scaling.steps(rows, cols));
                let mut used = std::collections::HashMap::new();
                for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                    let region = (row / high, col / wide);
                    let at = region.0 * down + region.1 * across;
                    assert!(at < scaling.shape(rows, cols).iter().product());
                    assert_eq!(*used.entry(at).or_insert(region), region, "{scaling:?} of {rows}x{cols}");
                }
            }
        }
    }
}
