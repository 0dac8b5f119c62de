//! Types of operands and results: their registers, their edge cases, and the comparison of results.

use crate::random::Random;
use rustc_apfloat::ieee::{Double, Half, IeeeFloat, Quad, Semantics, Single};
use rustc_apfloat::{Float, FloatConvert};

/// A type of operands.
pub(super) trait Operand: Copy {
    /// Class of its registers, such as `b32`.
    const CLASS: &'static str;
    fn of_bits(bits: u64) -> Self;
    /// Edge cases of definitions.
    fn edges() -> Vec<u64>;
    /// Random bits.
    fn random(random: &mut Random) -> u64;
    /// The bits as an immediate.
    fn literal(bits: u64) -> String;
}

/// A type of results.
pub(super) trait Outcome {
    const CLASS: &'static str;
    /// True if a register with these bits holds this result.
    fn agrees(&self, found: u64) -> bool;
    fn show(&self) -> String;
}

macro_rules! integers {
    ($($ty:ident $class:literal;)*) => {$(
        impl Operand for $ty {
            const CLASS: &'static str = $class;
            fn of_bits(bits: u64) -> $ty {
                bits as $ty
            }
            fn edges() -> Vec<u64> {
                let powers = (0..$ty::BITS).flat_map(|n| [-2i128, -1, 0, 1].map(|d| (1i128 << n) + d));
                let mut edges: Vec<i128> = powers.collect();
                edges.extend([0, 3, 5, 10, 0x5555_5555_5555_5555, -0x5555_5555_5555_5556]);
                edges.extend((0..8).map(|n| -(1 << n) - 1));
                let mut edges: Vec<u64> = edges.into_iter().map(|x| x as $ty as u64).collect();
                edges.sort();
                edges.dedup();
                edges
            }
            fn random(random: &mut Random) -> u64 {
                // Small numbers of either sign as well.
                let shift = random.below($ty::BITS as usize);
                (random.draw() as $ty >> shift) as u64
            }
            fn literal(bits: u64) -> String {
                (bits as $ty).to_string()
            }
        }
        impl Outcome for $ty {
            const CLASS: &'static str = $class;
            fn agrees(&self, found: u64) -> bool {
                *self == found as $ty
            }
            fn show(&self) -> String {
                format!("{self:#x}")
            }
        }
    )*};
}

integers! {
    u16 "b16";
    i16 "b16";
    u32 "b32";
    i32 "b32";
    u64 "b64";
    i64 "b64";
}

impl Operand for bool {
    const CLASS: &'static str = "pred";
    fn of_bits(bits: u64) -> bool {
        bits != 0
    }
    fn edges() -> Vec<u64> {
        vec![0, 1]
    }
    fn random(random: &mut Random) -> u64 {
        random.draw() & 1
    }
    fn literal(bits: u64) -> String {
        if bits != 0 { "-1" } else { "0" }.into()
    }
}

impl Outcome for bool {
    const CLASS: &'static str = "pred";
    fn agrees(&self, found: u64) -> bool {
        u64::from(*self) == found
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

/// The NaN that f32 instructions return on GPUs. The ISA leaves its bits open.
pub(super) const NAN: u64 = 0x7FFF_FFFF;

/// Edges of a binary format: zeros, powers of two and the limits of normal and subnormal numbers with their
/// neighbours, infinities, NaNs.
fn float_edges(bits: u32, mantissa: u32) -> Vec<u64> {
    let exponent = bits - 1 - mantissa;
    let (bias, unit) = ((1u64 << (exponent - 1)) - 1, 1u64 << mantissa);
    let infinity = ((1 << exponent) - 1) * unit;
    let power = |n: i64| (bias as i64 + n) as u64 * unit;
    let mut edges = vec![0, 1, 2, 3, unit / 2, unit - 1, unit, unit + 1, 2 * unit];
    edges.extend([infinity - 1, infinity, infinity + 1, infinity + unit / 2, infinity + unit / 2 + 0x123]);
    edges.extend([2 * infinity.max(unit) / 2 + unit - 1, power(0) + unit / 3, power(1) + unit / 2]);
    let near = [-2, -1, 0, 1, 2, 8, i64::from(mantissa), i64::from(mantissa) + 1, 31, 32, 63, 64];
    let last = bias as i64;
    for n in near.into_iter().chain([last, last - 1, 1 - last, last / 2, -last / 2]) {
        edges.extend([power(n) - 1, power(n), power(n) + 1]);
    }
    let signed: Vec<u64> = edges.iter().flat_map(|&x| [x, x | 1 << (bits - 1)]).collect();
    let mut edges = signed;
    edges.sort();
    edges.dedup();
    edges
}

/// Random bits. Two in three have an exponent near that of 1, so that sums and products neither vanish nor
/// overflow.
fn random_float(random: &mut Random, bits: u32, mantissa: u32) -> u64 {
    let any = random.draw() >> (64 - bits);
    let exponent = bits - 1 - mantissa;
    let bias = (1u64 << (exponent - 1)) - 1;
    match random.below(3) {
        0 => any,
        _ => {
            let moderate = bias - 12 + random.below(24) as u64;
            any & !(((1 << exponent) - 1) << mantissa) | moderate << mantissa
        }
    }
}

macro_rules! floats {
    ($($ty:ident $bits:literal $mantissa:literal $class:literal $prefix:literal $digits:literal;)*) => {$(
        impl Operand for $ty {
            const CLASS: &'static str = $class;
            fn of_bits(bits: u64) -> $ty {
                let mask = u64::MAX >> (64 - $bits);
                $ty::from_bits((bits & mask).into())
            }
            fn edges() -> Vec<u64> {
                float_edges($bits, $mantissa)
            }
            fn random(random: &mut Random) -> u64 {
                random_float(random, $bits, $mantissa)
            }
            fn literal(bits: u64) -> String {
                format!("{}{bits:0width$X}", $prefix, width = $digits)
            }
        }
    )*};
}

floats! {
    Single 32 23 "b32" "0f" 8;
    Double 64 52 "b64" "0d" 16;
}

impl Outcome for Single {
    const CLASS: &'static str = "b32";
    fn agrees(&self, found: u64) -> bool {
        u128::from(found) == if self.is_nan() { NAN.into() } else { self.to_bits() }
    }
    fn show(&self) -> String {
        format!("{:#x} ({self})", self.to_bits())
    }
}

/// The ISA does not define the payload of a NaN, so any NaN agrees.
impl Outcome for Double {
    const CLASS: &'static str = "b64";
    fn agrees(&self, found: u64) -> bool {
        if self.is_nan() { Double::of_bits(found).is_nan() } else { u128::from(found) == self.to_bits() }
    }
    fn show(&self) -> String {
        format!("{:#x} ({self})", self.to_bits())
    }
}

/// A result of f32 whose NaN may have any bits.
pub(super) struct AnyNan(pub(super) Single);

impl Outcome for AnyNan {
    const CLASS: &'static str = "b32";
    fn agrees(&self, found: u64) -> bool {
        if self.0.is_nan() { Single::of_bits(found).is_nan() } else { self.0.agrees(found) }
    }
    fn show(&self) -> String {
        self.0.show()
    }
}

/// Two binary16, whose NaNs may have any bits.
pub(super) struct Halves(pub(super) [Half; 2]);

impl Outcome for Halves {
    const CLASS: &'static str = "b32";
    fn agrees(&self, found: u64) -> bool {
        (0..2).all(|n| {
            let half = Half::from_bits(u128::from(found >> (16 * n) & 0xFFFF));
            half.bitwise_eq(self.0[n]) || half.is_nan() && self.0[n].is_nan()
        })
    }
    fn show(&self) -> String {
        format!("{:#x} and {:#x}", self.0[0].to_bits(), self.0[1].to_bits())
    }
}

/// A number as f64, which holds it exactly.
pub(super) fn to_f64(x: Single) -> f64 {
    let wide: Double = x.convert(&mut false).value;
    f64::from_bits(wide.to_bits() as u64)
}

/// The nearest f32.
pub(super) fn to_single(x: f64) -> Single {
    Double::of_bits(x.to_bits()).convert(&mut false).value
}

/// A subnormal number becomes a zero of its sign (`.ftz`).
pub(super) fn flushed(x: Single) -> Single {
    if x.is_denormal() { Single::ZERO.copy_sign(x) } else { x }
}

/// The f32 nearest to a number that is known with a relative error below 1e-9. If that leaves two, either
/// agrees.
pub(super) struct Nearest {
    pub(super) exact: f64,
    /// Subnormal results become zeros.
    pub(super) flushes: bool,
}

impl Nearest {
    fn finished(&self, x: Single) -> Single {
        if self.flushes { flushed(x) } else { x }
    }
}

impl Outcome for Nearest {
    const CLASS: &'static str = "b32";
    fn agrees(&self, found: u64) -> bool {
        let nearest = to_single(self.exact);
        let neighbours = [nearest.next_down().value, nearest.next_up().value];
        let is_tie = |other: &Single| {
            let middle = (to_f64(nearest) + to_f64(*other)) / 2.0;
            (self.exact - middle).abs() < 1e-9 * self.exact.abs()
        };
        let mut allowed = vec![nearest];
        allowed.extend(neighbours.into_iter().filter(is_tie));
        allowed.into_iter().any(|x| self.finished(x).agrees(found))
    }
    fn show(&self) -> String {
        format!("{:e}, {}", self.exact, self.finished(to_single(self.exact)).show())
    }
}

/// The square root, rounded to nearest: the number lies between the squares of the midpoints around the
/// result, which are exact.
pub(super) struct Root<S: Semantics>(pub(super) IeeeFloat<S>);

/// The reciprocal of the square root, rounded to nearest, by the squares of the midpoints around the result.
pub(super) struct ReciprocalRoot(pub(super) Single);

/// Midpoints between a number and its neighbours.
fn midpoints<S: Semantics>(x: IeeeFloat<S>) -> [Quad; 2] {
    [x.next_down().value, x.next_up().value].map(|other| {
        let [x, other]: [Quad; 2] = [x, other].map(|x| x.convert(&mut false).value);
        ((x + other).value / Quad::from_u128(2).value).value
    })
}

impl<S: Semantics> Outcome for Root<S> {
    const CLASS: &'static str = if S::BITS == 32 { "b32" } else { "b64" };
    fn agrees(&self, found: u64) -> bool {
        let (x, root) = (self.0, IeeeFloat::<S>::from_bits(found.into()));
        if x.is_zero() || x.is_nan() || x.is_negative() || x.is_infinite() {
            let special = if x.is_negative() && !x.is_zero() { IeeeFloat::<S>::NAN } else { x };
            let is_nan = if S::BITS == 32 { found == NAN } else { root.is_nan() };
            return if special.is_nan() { is_nan } else { root.bitwise_eq(special) };
        }
        let wide: Quad = x.convert(&mut false).value;
        let [low, high] = midpoints(root).map(|middle| (middle * middle).value);
        root.is_finite_non_zero() && !root.is_negative() && low < wide && wide < high
    }
    fn show(&self) -> String {
        format!("the root of {}", self.0)
    }
}

impl Outcome for ReciprocalRoot {
    const CLASS: &'static str = "b32";
    fn agrees(&self, found: u64) -> bool {
        let (x, root) = (self.0, Single::of_bits(found));
        let special = match (x.is_negative(), x.is_zero(), x.is_infinite()) {
            _ if x.is_nan() => Some(Single::NAN),
            (_, true, _) => Some(Single::INFINITY.copy_sign(x)),
            (true, ..) => Some(Single::NAN),
            (false, _, true) => Some(Single::ZERO),
            _ => None,
        };
        if let Some(special) = special {
            return special.agrees(found);
        }
        let wide: Quad = x.convert(&mut false).value;
        let one = Quad::from_u128(1).value;
        let [low, high] = midpoints(root).map(|middle| ((middle * middle).value * wide).value);
        root.is_finite_non_zero() && !root.is_negative() && low < one && one < high
    }
    fn show(&self) -> String {
        format!("the reciprocal root of {}", self.0)
    }
}
