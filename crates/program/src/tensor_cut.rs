//! The parts of a parameter in which the ranks of a tensor group compute.

use xtrain_rank::Groups;
use xtrain_tensor::{Shape, TensorType};

/// The name of the input `u32[1]` with the place of this rank in its tensor group.
pub const TENSOR_PLACE: &str = "tensor_place";

/// How a parameter is cut among the ranks of a tensor group, each of which computes with its part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorCut {
    /// The ranks.
    pub groups: Groups,
    /// The dimension that is cut.
    pub by: CutBy,
}

/// The dimension by which a parameter is cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CutBy {
    /// Rows: the lengths of consecutive runs of them, one for each parameter that it fuses. A rank has an
    /// equal part of each run: of query, of key and of value heads.
    Rows(Vec<usize>),
    /// Columns: a rank has an equal part of each row.
    Columns,
}

/// A region of a tensor, seen as `[lines, n, width]` for n ranks; a part has `[lines, width]` of it. Offsets
/// and widths count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutRegion {
    /// Its first element in the whole.
    pub in_whole: usize,
    /// Its first element in a part.
    pub in_part: usize,
    /// Lines.
    pub lines: usize,
    /// Elements of a line of one rank.
    pub width: usize,
}

impl TensorCut {
    /// The type of a part.
    ///
    /// # Panics
    /// If the ranks do not divide what is cut, which a layout checks.
    pub fn part(&self, whole: TensorType) -> TensorType {
        self.resized(whole, |extent| {
            assert!(extent.is_multiple_of(self.groups.size), "{self:?} does not divide {whole}");
            extent / self.groups.size
        })
    }

    /// The type of the whole of a part.
    pub fn whole(&self, part: TensorType) -> TensorType {
        self.resized(part, |extent| extent * self.groups.size)
    }

    fn resized(&self, ty: TensorType, resize: impl Fn(usize) -> usize) -> TensorType {
        let mut shape = ty.shape.to_vec();
        let cut = match self.by {
            CutBy::Rows(_) => shape.first_mut(),
            CutBy::Columns => shape.last_mut(),
        };
        cut.into_iter().for_each(|extent| *extent = resize(*extent));
        TensorType { shape: Shape::new(&shape), ..ty }
    }

    /// The regions of a whole of this type.
    pub fn regions(&self, whole: TensorType) -> Vec<CutRegion> {
        let n = self.groups.size;
        match &self.by {
            CutBy::Rows(runs) => {
                let row: usize = whole.shape[1..].iter().product();
                let mut first = 0;
                let region = |&rows: &usize| {
                    let (in_whole, in_part) = (first * row, first / n * row);
                    first += rows;
                    CutRegion { in_whole, in_part, lines: 1, width: rows / n * row }
                };
                runs.iter().map(region).collect()
            }
            CutBy::Columns => {
                let cols = whole.shape.last().copied().unwrap_or(1);
                let lines = whole.numel() / cols.max(1);
                vec![CutRegion { in_whole: 0, in_part: 0, lines, width: cols / n }]
            }
        }
    }
}
