//! Which elements of a matrix share a scale.

/// The edge of tiles and blocks.
pub(crate) const TILE: usize = 128;

/// Which elements of a matrix `[R, C]` share a scale. At edges that 128 does not divide, the last tiles are smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// All: scales are `[1, 1]`.
    Tensor,
    /// Those of a row: `[R, 1]`.
    Row,
    /// Those of a column: `[1, C]`.
    Column,
    /// 128 neighbours in a row: `[R, ceil(C / 128)]`.
    Tile1x128,
    /// 128 neighbours in a column: `[ceil(R / 128), C]`.
    Tile128x1,
    /// 128 rows by 128 columns: `[ceil(R / 128), ceil(C / 128)]`.
    Block128,
}

impl Granularity {
    /// All of them.
    pub const ALL: [Granularity; 6] = [
        Granularity::Tensor,
        Granularity::Row,
        Granularity::Column,
        Granularity::Tile1x128,
        Granularity::Tile128x1,
        Granularity::Block128,
    ];

    /// The rows and columns of the region that shares a scale, in a matrix of these extents.
    pub fn region(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Granularity::Tensor => (rows, cols),
            Granularity::Row => (1, cols),
            Granularity::Column => (rows, 1),
            Granularity::Tile1x128 => (1, TILE),
            Granularity::Tile128x1 => (TILE, 1),
            Granularity::Block128 => (TILE, TILE),
        }
    }

    /// The shape of the scales of a matrix of these extents.
    pub fn scales(self, rows: usize, cols: usize) -> [usize; 2] {
        let (high, wide) = self.region(rows, cols);
        [rows.div_ceil(high), cols.div_ceil(wide)]
    }

    /// The granularity of scales of this shape for a matrix of these extents. Where several have the shape, they also share the
    /// regions.
    pub fn of_scales(scales: [usize; 2], rows: usize, cols: usize) -> Option<Self> {
        Granularity::ALL.into_iter().find(|g| g.scales(rows, cols) == scales)
    }
}
