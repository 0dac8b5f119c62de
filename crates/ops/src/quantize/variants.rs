//! Variants of the kernels that cast: a table of sources and scalings, and the numbers by which kernels know
//! them. The kernels' macros are generated from here, so no number is written twice.

use super::{CastSource, Given, Layouts, Quantize};
use xtrain_cuda::{Constants, Defines};
use xtrain_tensor::{DType, Scaling, TILE};

/// Columns of a thread's piece of an area.
pub(super) const WIDTH: usize = 8;

/// Sizes that the kernels share: rows and columns of an area, which a block casts; columns of a thread's
/// piece.
const SIZES: Constants = &[("EDGE", TILE as i64), ("WIDTH", WIDTH as i64)];

/// The names of values in kernels. A value's number is its index.
type Names<T, const N: usize> = [(&'static str, T); N];

/// Without weights of rows, which a macro of its own stands for.
const SOURCES: Names<CastSource, 8> = [
    ("INPUT", CastSource::Input),
    ("NORM", CastSource::Norm),
    ("SWIGLU", CastSource::Swiglu { restored: false, weighted: false }),
    ("SWIGLU_SAVING", CastSource::SwigluSaving { weighted: false }),
    ("SWIGLU_RESTORED", CastSource::Swiglu { restored: true, weighted: false }),
    ("SWIGLU_GRAD", CastSource::SwigluGrad { restored: false, weighted: false }),
    ("SWIGLU_GRAD_RESTORED", CastSource::SwigluGrad { restored: true, weighted: false }),
    ("PERMUTE", CastSource::Permute),
];
const FORMATS: Names<DType, 3> = [("E4M3", DType::E4M3), ("E5M2", DType::E5M2), ("E5M6", DType::E5M6)];
const SCALINGS: Names<Scaling, 4> =
    [("TENSOR", Scaling::Tensor), ("ROW", Scaling::Row), ("TILE", Scaling::Tile), ("BLOCK", Scaling::Block)];
const PHASES: Names<Phase, 5> = [
    ("FUSED", Phase::Fused),
    ("MEASURE", Phase::Measure),
    ("MEASURE_UNSET", Phase::MeasureUnset),
    ("CAST", Phase::Cast),
    ("CAST_GIVEN", Phase::CastGiven),
];

/// The numbers of the formats, for kernels that read FP8.
pub(super) const FORMAT_NUMBERS: Constants = &numbered(FORMATS);
/// All numbers that the device code of casts uses.
pub(super) const CONSTANTS: &[Constants] =
    &[SIZES, &numbered(SOURCES), FORMAT_NUMBERS, &numbered(SCALINGS), &numbered(PHASES)];

const fn numbered<T: Copy, const N: usize>(names: Names<T, N>) -> [(&'static str, i64); N] {
    let mut numbers = [("", 0); N];
    let mut n = 0;
    while n < N {
        numbers[n] = (names[n].0, n as i64);
        n += 1;
    }
    numbers
}

/// The number of a value in kernels.
///
/// # Panics
/// If it has no name: `Quantize::infer` refuses other formats.
fn number<T: PartialEq + std::fmt::Debug, const N: usize>(names: Names<T, N>, value: T) -> i64 {
    let found = names.iter().position(|(_, named)| *named == value);
    found.unwrap_or_else(|| panic!("the cast kernels have no number for {value:?}")) as i64
}

/// The number of a format in kernels.
pub(super) fn format_number(format: DType) -> i64 {
    number(FORMATS, format)
}

/// The part of a cast that a launch does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    /// Reduces the amax of each region and casts it, for regions within an area.
    Fused,
    /// Reduces amaxes and casts nothing.
    Measure,
    /// Reduces the amax of the tensor if the given scale is 0.
    MeasureUnset,
    /// Casts with the scales of amaxes that are known.
    Cast,
    /// Casts with the given scale and reduces the amax. A scale of 0 is replaced by that of the amax that
    /// `MeasureUnset` reduced.
    CastGiven,
}

impl Phase {
    /// True if it casts nothing.
    pub(super) fn measures(self) -> bool {
        matches!(self, Phase::Measure | Phase::MeasureUnset)
    }
}

/// Sources and formats down, scalings across; in each cell, the layouts of the casts whose kernels tests
/// compile. These are the casts of training; others are compiled when a program has them.
pub(crate) type Table = &'static [(CastSource, DType, [&'static [Layouts]; COLUMNS.len()])];

/// The columns of a [`Table`]: scaling, power-of-two scales, and the given scale or amax.
const COLUMNS: [(Scaling, bool, Given); 5] = [
    (Scaling::Tensor, false, Given::Nothing),
    (Scaling::Tensor, false, Given::Scale),
    (Scaling::Row, true, Given::Nothing),
    (Scaling::Tile, true, Given::Nothing),
    (Scaling::Block, true, Given::Nothing),
];

pub(crate) const NONE: &[Layouts] = &[];
pub(crate) const ROW_MAJOR: &[Layouts] = &[Layouts::RowMajor];
pub(crate) const TRANSPOSED: &[Layouts] = &[Layouts::Transposed];
pub(crate) const BOTH: &[Layouts] = &[Layouts::Both];
pub(crate) const ANY: &[Layouts] = &[Layouts::RowMajor, Layouts::Transposed, Layouts::Both];

/// The casts by kernels of this op.
#[rustfmt::skip]
pub(super) const TABLE: Table = {
    use CastSource::{Input, Norm, Permute, Swiglu, SwigluGrad, SwigluSaving};
    use DType::{E4M3, E5M2, E5M6};
    const fn swiglu([restored, weighted]: [bool; 2]) -> CastSource { Swiglu { restored, weighted } }
    const fn grad([restored, weighted]: [bool; 2]) -> CastSource { SwigluGrad { restored, weighted } }
    const SAVING: CastSource = SwigluSaving { weighted: false };
    const WEIGHTED_SAVING: CastSource = SwigluSaving { weighted: true };
    &[
        //                              current     delayed     rows        tiles       blocks
        (Input,                  E4M3, [ANY,        ANY,        ANY,        ANY,        ANY]),
        (Input,                  E5M2, [ANY,        NONE,       NONE,       NONE,       NONE]),
        (Input,                  E5M6, [NONE,       NONE,       NONE,       ROW_MAJOR,  NONE]),
        (Norm,                   E4M3, [ANY,        BOTH,       BOTH,       BOTH,       NONE]),
        (swiglu([false, false]), E4M3, [ANY,        BOTH,       BOTH,       BOTH,       NONE]),
        (SAVING,                 E4M3, [ROW_MAJOR,  ROW_MAJOR,  ROW_MAJOR,  ROW_MAJOR,  NONE]),
        (swiglu([true, false]),  E4M3, [TRANSPOSED, TRANSPOSED, TRANSPOSED, TRANSPOSED, NONE]),
        (grad([false, false]),   E5M2, [BOTH,       BOTH,       NONE,       NONE,       NONE]),
        (grad([false, false]),   E4M3, [NONE,       NONE,       BOTH,       BOTH,       NONE]),
        (grad([true, false]),    E5M2, [BOTH,       BOTH,       NONE,       NONE,       NONE]),
        (grad([true, false]),    E4M3, [NONE,       NONE,       BOTH,       BOTH,       NONE]),
        // Of experts, which are not cast by rows.
        (Permute,                E4M3, [BOTH,       BOTH,       NONE,       ANY,        NONE]),
        (Permute,                E5M2, [BOTH,       BOTH,       NONE,       NONE,       NONE]),
        (swiglu([false, true]),  E4M3, [BOTH,       BOTH,       NONE,       BOTH,       NONE]),
        (WEIGHTED_SAVING,        E4M3, [NONE,       NONE,       NONE,       ROW_MAJOR,  NONE]),
        (swiglu([true, true]),   E4M3, [NONE,       NONE,       NONE,       TRANSPOSED, NONE]),
        (grad([false, true]),    E5M2, [BOTH,       BOTH,       NONE,       NONE,       NONE]),
        (grad([true, true]),     E4M3, [NONE,       NONE,       NONE,       BOTH,       NONE]),
    ]
};

/// The variants for the casts of a table, each once, with these phases.
fn variants(table: Table, phases: impl Fn(Quantize) -> Vec<Phase>) -> Vec<Defines> {
    let mut all = Vec::new();
    for &(source, format, cells) in table {
        for ((scaling, pow2_scales, given), layouts) in COLUMNS.into_iter().zip(cells) {
            for &layouts in layouts {
                let cast = Quantize { source, given, ..Quantize::new(format, scaling, pow2_scales, layouts) };
                for defines in phases(cast).into_iter().map(|phase| cast.defines(phase)) {
                    if !all.contains(&defines) {
                        all.push(defines);
                    }
                }
            }
        }
    }
    all
}

/// The variants of this op's kernels.
pub(super) fn own_variants() -> Vec<Defines> {
    variants(TABLE, |cast| {
        let packed = if cast.format == DType::E5M6 { cast.phases(true) } else { &[] };
        [cast.phases(false), packed].concat()
    })
}

/// The variants of another op's kernel that computes these values and casts them.
pub(crate) fn fused_variants(table: Table) -> Vec<Defines> {
    variants(table, |cast| vec![cast.fused_phase()])
}

impl CastSource {
    /// Rows of a thread's piece. Sources of which a thread holds much in registers have fewer.
    const fn height(self) -> usize {
        match self {
            CastSource::SwigluGrad { .. } | CastSource::SwigluSaving { .. } => 4,
            _ => 8,
        }
    }

    /// The source without weights of rows.
    const fn unweighted(self) -> Self {
        match self {
            CastSource::Swiglu { restored, .. } => CastSource::Swiglu { restored, weighted: false },
            CastSource::SwigluSaving { .. } => CastSource::SwigluSaving { weighted: false },
            CastSource::SwigluGrad { restored, .. } => CastSource::SwigluGrad { restored, weighted: false },
            CastSource::Input | CastSource::Norm | CastSource::Permute => self,
        }
    }

    /// Threads of a block that casts an area.
    pub(crate) const fn threads(self) -> u32 {
        (TILE / WIDTH * (TILE / self.height())) as u32
    }
}

impl Quantize {
    /// The phases of the cast in order. In rows that are no multiple of 8, elements of a packed format share
    /// bytes: `packed_pairs` of them are cast by a kernel of their own, after the regions are measured.
    pub(super) fn phases(self, packed_pairs: bool) -> &'static [Phase] {
        match (self.given, self.scaling) {
            _ if packed_pairs => &[Phase::Measure],
            (Given::Amax, _) => &[Phase::Cast],
            (Given::Scale, _) => &[Phase::MeasureUnset, Phase::CastGiven],
            (Given::ScaleOrAmax, _) => &[Phase::CastGiven],
            (Given::Nothing, Scaling::Tensor | Scaling::Row) => &[Phase::Measure, Phase::Cast],
            (Given::Nothing, Scaling::Tile | Scaling::Block) => &[Phase::Fused],
        }
    }

    /// The phase in which another op's kernel casts its result.
    pub(super) fn fused_phase(self) -> Phase {
        if self.is_given() { Phase::CastGiven } else { Phase::Fused }
    }

    /// The source of a phase: a copy of gate and up is saved once.
    pub(super) fn source_in(self, phase: Phase) -> CastSource {
        match (self.source, phase) {
            (CastSource::SwigluSaving { weighted }, Phase::Cast | Phase::MeasureUnset) => {
                CastSource::Swiglu { restored: false, weighted }
            }
            (source, _) => source,
        }
    }

    /// The macros with which the kernels of a phase are compiled.
    pub(super) fn defines(self, phase: Phase) -> Defines {
        let source = self.source_in(phase);
        // The amax of a tensor depends neither on format and layouts nor on how scales are rounded.
        let measures_tensor =
            self.scaling == Scaling::Tensor && phase.measures() && self.format != DType::E5M6;
        let cast = match measures_tensor {
            true => Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::Both),
            false => self,
        };
        let [row_major, transposed] = cast.layouts.written().map(i64::from);
        vec![
            ("SOURCE", number(SOURCES, source.unweighted())),
            ("WEIGHTED", source.is_weighted().into()),
            ("HEIGHT", source.height() as i64),
            ("FORMAT", format_number(cast.format)),
            ("SCALING", number(SCALINGS, cast.scaling)),
            ("POW2", cast.pow2_scales.into()),
            ("PHASE", number(PHASES, phase)),
            ("ROW_MAJOR", row_major),
            ("TRANSPOSED", transposed),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_stands_for_two_numbers() {
        let mut names: Vec<&str> = CONSTANTS.iter().copied().flatten().map(|(name, _)| *name).collect();
        names.extend(own_variants()[0].iter().map(|(name, _)| name));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
