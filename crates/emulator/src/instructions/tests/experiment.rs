//! Experiments on a GPU that show two rules: how FP8 sums are aligned, and what a tensor copy to global memory
//! writes where its box is partly outside of the tensor.
//!
//! `cargo test -p xtrain-emulator --lib -- --ignored --nocapture --test-threads=1 experiment`

use super::hopper::Case;
use super::{Device, Grid, arguments, gpu};
use crate::random::Random;
use crate::tensor_map::TensorMap;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

// ---------------------------------------------------------------- FP8 sums

const COLUMNS: usize = 64;
const RESULTS: usize = 64 * COLUMNS;

#[derive(Clone, Copy)]
struct Format {
    name: &'static str,
    mantissa: u32,
    bias: i32,
    /// The largest finite number.
    max: u8,
}

const FORMATS: [Format; 2] = [
    Format { name: "e4m3", mantissa: 3, bias: 7, max: 0x7E },
    Format { name: "e5m2", mantissa: 2, bias: 15, max: 0x7B },
];

/// An operand: value, exponent of its leading bit, and exponent by its field.
#[derive(Clone, Copy)]
struct Number {
    value: f64,
    normal: i32,
    field: i32,
}

impl Format {
    fn number(self, byte: u8) -> Number {
        let magnitude = u32::from(byte & 0x7F);
        let sign = if byte > 0x7F { -1.0 } else { 1.0 };
        let (exponent, fraction) = (magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1));
        let field = exponent.max(1) as i32 - self.bias;
        if magnitude > self.max.into() {
            let value = if self.mantissa == 2 && fraction == 0 { sign * f64::INFINITY } else { f64::NAN };
            return Number { value, normal: field, field };
        }
        let significand = if exponent > 0 { fraction | 1 << self.mantissa } else { fraction };
        let value = sign * f64::from(significand) * 2f64.powi(field - self.mantissa as i32);
        let normal = if value == 0.0 { field } else { leading(value) };
        Number { value, normal, field }
    }
}

/// The exponent of the leading bit.
fn leading(x: f64) -> i32 {
    ((x.to_bits() >> 52 & 0x7FF) as i32) - 1023
}

/// Subnormal operands have the exponent of their field, not that of their leading bit.
const SUBNORMALS_BY_FIELD: u32 = 1;
/// Zero operands have the exponent of their field; else a product of zero has none.
const ZEROS_BY_FIELD: u32 = 2;
/// As the former, but only a zero of one operand, beside another that is not zero.
const HALF_ZEROS_BY_FIELD: u32 = 4;
/// Terms and the sum are cut towards minus infinity.
const FLOOR: u32 = 8;
/// The sum of C does not take part in the largest exponent.
const WITHOUT_C: u32 = 16;
const MODELS: [(&str, u32); 9] = [
    ("now", 0),
    ("subnormals by field", 1),
    ("zeros by field", 2),
    ("both by field", 3),
    ("half zeros by field", 4),
    ("half zeros and subnormals by field", 5),
    ("floor", 8),
    ("both by field, C not in the largest exponent", 16 + 3),
    ("C not in the largest exponent", 16),
];

fn modelled(a: &[Number], b: &[Number], c: f32, model: u32) -> f32 {
    let is = |flag| model & flag != 0;
    let c = f64::from(c);
    let mut largest = if c == 0.0 || is(WITHOUT_C) { i32::MIN } else { leading(c) };
    let mut special = if c.is_finite() { 0.0 } else { c };
    for (a, b) in a.iter().zip(b) {
        let product = a.value * b.value;
        if !product.is_finite() {
            special += product;
            continue;
        }
        let by_field = match (a.value == 0.0, b.value == 0.0) {
            (false, false) => true,
            (true, true) => is(ZEROS_BY_FIELD),
            _ => is(ZEROS_BY_FIELD) || is(HALF_ZEROS_BY_FIELD),
        };
        let exponent =
            |x: &Number| if is(SUBNORMALS_BY_FIELD) || x.value == 0.0 { x.field } else { x.normal };
        if by_field {
            largest = largest.max(exponent(a) + exponent(b));
        }
    }
    if special != 0.0 || special.is_nan() {
        return special as f32;
    }
    if largest == i32::MIN {
        return if is(WITHOUT_C) { c as f32 } else { 0.0 };
    }
    let cut = |x: f64, last: i32| {
        let unit = f64::from_bits(((1023 + last) as u64) << 52);
        if is(FLOOR) { (x / unit).floor() * unit } else { (x / unit).trunc() * unit }
    };
    let terms = a.iter().zip(b).map(|(a, b)| cut(a.value * b.value, largest - 13));
    let total = terms.sum::<f64>() + cut(c, largest - 13);
    if total == 0.0 { 0.0 } else { cut(total, leading(total) - 13) as f32 }
}

const KINDS: [&str; 8] =
    ["uniform", "sparse", "subnormal", "cancelling", "wide C", "any C", "specials", "tiny"];

/// Operands of a block: 64 rows of A, 64 columns of B, 32 bytes each, and C by row.
fn operands(random: &mut Random, kind: usize, formats: [Format; 2]) -> ([Vec<u8>; 2], Vec<f32>) {
    let sign = |random: &mut Random| (random.below(2) as u8) << 7;
    let mut matrices = formats.map(|format| {
        let subnormals = (1usize << format.mantissa) - 1;
        (0..64 * 32)
            .map(|_| {
                let any = random.below(usize::from(format.max) + 1) as u8;
                let magnitude = match kind {
                    1 if random.below(8) < 4 => 0,
                    1 => 1 + random.below(8 * subnormals) as u8,
                    2 if random.below(8) < 4 => 1 + random.below(subnormals) as u8,
                    2 if random.below(8) < 6 => 0,
                    4 | 5 if random.below(2) == 0 => 0,
                    5 => random.below(16) as u8,
                    6 if random.below(48) == 0 => 0x78 + random.below(8) as u8,
                    7 if random.below(8) < 7 => 0,
                    7 => 1 + random.below(subnormals) as u8,
                    _ => any,
                };
                magnitude | sign(random)
            })
            .collect::<Vec<u8>>()
    });
    if kind == 3 {
        // Products come in pairs that cancel, but for the last few.
        for (n, matrix) in matrices.iter_mut().enumerate() {
            for row in matrix.chunks_mut(32) {
                for k in (0..28).step_by(2) {
                    row[k + 1] = row[k] ^ if n == 0 { 0x80 } else { 0 };
                }
                for byte in &mut row[28..] {
                    *byte = *byte & 0x80 | (*byte & 0x7F) / 4;
                }
            }
        }
    }
    let c = (0..RESULTS).map(|_| {
        let whole = random.below(64) as f32 - 31.0;
        let mantissa = random.draw() as u32 & 0x807F_FFFF;
        let wide = |random: &mut Random, first: u32, count: usize| {
            f32::from_bits(mantissa | (127 + random.below(count) as u32 - first) << 23)
        };
        match kind {
            0 | 3 => whole,
            1 | 2 | 7 if random.below(3) == 0 => 0.0,
            1 | 2 => wide(random, 24, 24),
            7 => wide(random, 45, 40),
            4 => wide(random, 24, 48),
            5 => f32::from_bits(random.draw() as u32),
            _ if random.below(64) == 0 => [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][random.below(3)],
            _ => whole,
        }
    });
    let c = c.collect();
    (matrices, c)
}

fn fp8_kernel(formats: [Format; 2]) -> String {
    let sums: Vec<String> = (0..COLUMNS / 2).map(|n| format!("%f{n}")).collect();
    let each = |line: &dyn Fn(usize) -> String| (0..COLUMNS / 2).map(line).collect::<String>();
    format!(
        ".visible .entry form(.param .u64 from, .param .u64 to, .param .u64 adds)\n{{\n\
         .reg .pred %p;\n.reg .b32 %t, %s, %v, %r<4>;\n.reg .f32 %f<{}>;\n.reg .b64 %from, %to, %o, %d0, %d1;\n\
         .shared .align 1024 .b8 area[4096];\nld.param.u64 %from, [from];\nld.param.u64 %to, [to];\n\
         mov.u32 %t, %ctaid.x;\nmul.wide.u32 %o, %t, 4096;\nadd.s64 %from, %from, %o;\nmul.wide.u32 %o, %t, {};\nadd.s64 %to, %to, %o;\n\
         mov.u32 %t, %tid.x;\nmov.u32 %s, area;\nshl.b32 %v, %t, 2;\nadd.s32 %s, %s, %v;\ncvt.u64.u32 %o, %v;\nadd.s64 %from, %from, %o;\n\
         FILL:\nld.global.u32 %r0, [%from];\nst.shared.u32 [%s], %r0;\nadd.s32 %s, %s, 512;\nadd.s64 %from, %from, 512;\n\
         add.s32 %v, %v, 512;\nsetp.lt.u32 %p, %v, 4096;\n@%p bra FILL;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n\
         mul.wide.u32 %o, %t, {};\nadd.s64 %to, %to, %o;\n{}\
         mov.u32 %s, area;\nshr.u32 %s, %s, 4;\ncvt.u64.u32 %d0, %s;\nadd.s64 %d0, %d0, {};\nadd.s64 %d1, %d0, 128;\n\
         ld.param.u64 %o, [adds];\nsetp.ne.s64 %p, %o, 0;\nwgmma.fence.sync.aligned;\n\
         wgmma.mma_async.sync.aligned.m64n{COLUMNS}k32.f32.{}.{} {{{}}}, %d0, %d1, %p, 1, 1;\n\
         wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n{}ret;\n}}\n",
        COLUMNS / 2,
        4 * RESULTS,
        2 * COLUMNS,
        each(&|n| format!("ld.global.f32 %f{n}, [%to+{}];\n", 4 * n)),
        16u64 << 32 | 8 << 16,
        formats[0].name,
        formats[1].name,
        sums.join(", "),
        each(&|n| format!("st.global.f32 [%to+{}], %f{n};\n", 4 * n)),
    )
}

/// Row and column of element n of a thread's sums.
fn place(thread: usize, n: usize) -> (usize, usize) {
    (thread / 32 * 16 + thread % 32 / 4 + n / 2 % 2 * 8, n / 4 * 8 + thread % 4 * 2 + n % 2)
}

/// Place of byte k of a row in shared memory: 8 rows of 16 bytes, then the second half of k.
fn position(row: usize, k: usize) -> usize {
    row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16
}

/// Results that a model does not give.
#[derive(Clone, Default)]
struct Wrong {
    results: usize,
    signs: usize,
    examples: Vec<String>,
}

/// Compares results from `first` on with each model.
fn judge(
    words: &[[u8; 4]],
    first: usize,
    all: &[([Vec<u8>; 2], Vec<f32>)],
    tables: &[Vec<Number>; 2],
    adds: bool,
) -> Vec<Wrong> {
    let mut wrong = vec![Wrong::default(); MODELS.len()];
    for (at, word) in words.iter().enumerate() {
        let (at, found) = (first + at, f32::from_le_bytes(*word));
        let (block, thread, n) = (at / RESULTS, at % RESULTS / (COLUMNS / 2), at % (COLUMNS / 2));
        let (row, column) = place(thread, n);
        let (matrices, c) = &all[block];
        let rows = [&matrices[0][32 * row..][..32], &matrices[1][32 * column..][..32]];
        let numbers: [Vec<Number>; 2] =
            std::array::from_fn(|n| rows[n].iter().map(|&byte| tables[n][usize::from(byte)]).collect());
        let c = if adds { c[row * COLUMNS + column] } else { 0.0 };
        for (wrong, &(_, model)) in wrong.iter_mut().zip(&MODELS) {
            let expected = modelled(&numbers[0], &numbers[1], c, model);
            if found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan() {
                continue;
            }
            *(if found == expected { &mut wrong.signs } else { &mut wrong.results }) += 1;
            if wrong.examples.len() < 6 {
                let hex = |bytes: &[u8]| bytes.iter().map(|x| format!("{x:02x}")).collect::<String>();
                let exact = numbers[0].iter().zip(&numbers[1]).map(|(a, b)| a.value * b.value).sum::<f64>()
                    + f64::from(c);
                wrong.examples.push(format!(
                    "    a {} b {} c {:08x} model {:08x} GPU {:08x} ({expected:e}, {found:e}, exact {exact:e})",
                    hex(rows[0]),
                    hex(rows[1]),
                    c.to_bits(),
                    expected.to_bits(),
                    found.to_bits()
                ));
            }
        }
    }
    wrong
}

fn fp8(blocks: impl Fn(usize) -> usize) {
    for formats in [[0, 0], [1, 0], [0, 1], [1, 1]].map(|pair| pair.map(|n: usize| FORMATS[n])) {
        let tables: [Vec<Number>; 2] =
            formats.map(|format| (0..=255).map(|byte| format.number(byte)).collect());
        let text = fp8_kernel(formats);
        for (kind, name) in KINDS.iter().enumerate() {
            for adds in [false, true] {
                let blocks = blocks(kind);
                let mut random = Random::new(super::seed() ^ (kind as u64) << 8 ^ u64::from(adds));
                let all: Vec<_> = (0..blocks).map(|_| operands(&mut random, kind, formats)).collect();
                let mut areas = vec![0u8; 4096 * blocks];
                let mut sums = Vec::new();
                for (block, (matrices, c)) in all.iter().enumerate() {
                    for (n, matrix) in matrices.iter().enumerate() {
                        for (at, byte) in matrix.iter().enumerate() {
                            areas[4096 * block + 2048 * n + position(at / 32, at % 32)] = *byte;
                        }
                    }
                    for thread in 0..128 {
                        for n in 0..COLUMNS / 2 {
                            let (row, column) = place(thread, n);
                            sums.extend(c[row * COLUMNS + column].to_le_bytes());
                        }
                    }
                }
                let mut device = Device::new();
                let (from, to) = (device.store(&areas), device.store(&sums));
                let ran = device.run(&text, Grid::row(blocks, 128), &arguments(&[from, to, adds.into()]));
                let found = ran.and_then(|()| device.load(to, sums.len()));
                let title = format!("{} {} {name}, adds {adds}", formats[0].name, formats[1].name);
                let found = match found {
                    Ok(found) => found,
                    Err(problem) => {
                        println!("fp8 {title}: {problem}");
                        return;
                    }
                };
                // Wrong results and wrong signs of zero by model, and examples of each.
                let words = found.as_chunks::<4>().0;
                let part = words.len().div_ceil(std::thread::available_parallelism().map_or(1, usize::from));
                let (all, tables) = (&all, &tables);
                let parts: Vec<Vec<Wrong>> = std::thread::scope(|scope| {
                    let judges: Vec<_> = (words.chunks(part).enumerate())
                        .map(|(n, words)| scope.spawn(move || judge(words, n * part, all, tables, adds)))
                        .collect();
                    judges.into_iter().map(|judge| judge.join().expect("no panic")).collect()
                });
                let wrong: Vec<Wrong> = (0..MODELS.len())
                    .map(|m| Wrong {
                        results: parts.iter().map(|part| part[m].results).sum(),
                        signs: parts.iter().map(|part| part[m].signs).sum(),
                        examples: parts.iter().flat_map(|part| part[m].examples.clone()).take(6).collect(),
                    })
                    .collect();
                println!("fp8 {title}: {} results", found.len() / 4);
                for (m, (name, _)) in MODELS.iter().enumerate() {
                    println!("  {:6} wrong, {:6} signs of zero: {name}", wrong[m].results, wrong[m].signs);
                }
                let best =
                    (0..MODELS.len()).min_by_key(|&m| wrong[m].results + wrong[m].signs).expect("a model");
                for m in if best == 0 { vec![0] } else { vec![best, 0] } {
                    if !wrong[m].examples.is_empty() {
                        println!("  examples against \"{}\":\n{}", MODELS[m].0, wrong[m].examples.join("\n"));
                    }
                }
            }
        }
    }
}

// ---------------------------------------------------------------- boxes

/// Bytes before and after the tensor.
const GUARD: usize = 2048;
const BACKGROUND: u8 = 0xEE;

/// The content of byte n of a box.
fn pattern(n: usize) -> u8 {
    ((3 * n + 1) % 233) as u8
}

struct Trial {
    is_load: bool,
    case: Case,
}

/// All trials: first those that vary one or two properties of boxes of two dimensions.
fn trials() -> Vec<Trial> {
    let mut all = Vec::new();
    let mut add =
        |is_load: bool, element: u64, bits: u32, extents: &[u64], pads: &[u64], boxed: &[u64], at: &[i32]| {
            let mut bytes = extents[0] * element;
            let mut strides = Vec::new();
            for (n, extent) in extents.iter().enumerate().skip(1) {
                bytes = bytes.next_multiple_of(16) + 16 * pads.get(n - 1).copied().unwrap_or(0);
                strides.push(bytes);
                bytes *= extent;
            }
            let map = TensorMap {
                address: 0,
                element_bytes: element,
                swizzle_bits: bits,
                extents: extents.to_vec(),
                strides,
                boxed: boxed.to_vec(),
            };
            let content = (0..bytes.next_multiple_of(16) as usize).map(|n| (n % 229) as u8).collect();
            all.push(Trial { is_load, case: Case { map, content, at: at.to_vec() } });
        };
    // Rows of 64 bytes and fewer; one row above and below.
    for inner in [64u64, 60, 57, 56, 52, 49, 63] {
        for pad in [0, 1, 4] {
            for width in [16u64, 32, 48, 64] {
                for start in [0, 16, 32, 48, 64, -16, -32] {
                    add(false, 1, 0, &[inner, 3], &[pad], &[width, 2], &[start, 0]);
                }
            }
        }
    }
    for row in [-1, 1, 2, 3, -2] {
        for inner in [64u64, 56, 57] {
            for start in [0, 48, -16] {
                add(false, 1, 0, &[inner, 3], &[1], &[32, 2], &[start, row]);
            }
        }
    }
    // Elements of 2 and 4 bytes: extents and starts in bytes.
    for element in [2u64, 4] {
        for inner in [64u64, 60, 56, 52, 62] {
            for (width, start) in [(16, 48), (32, 48), (64, 0), (64, 32), (32, -16), (16, 64)] {
                if inner % element == 0 {
                    let (width, start) = (width / element, start / element as i32);
                    add(false, element, 0, &[inner / element, 3], &[0], &[width, 2], &[start, 0]);
                }
            }
        }
    }
    // Swizzles.
    for bits in 1..4 {
        let width = 16u64 << bits;
        for inner in [2 * width, 2 * width - 4, 2 * width - 8, 2 * width - 15, 2 * width - 16] {
            for start in [0, width as i32, 2 * width as i32 - 16, 16, -16, -(width as i32)] {
                for pad in [0, 2] {
                    add(false, 1, bits, &[inner, 20], &[pad], &[width, 16], &[start, 2]);
                }
            }
        }
    }
    // Other numbers of dimensions.
    for inner in [64u64, 60, 57, 52] {
        for (width, start) in [(32, 0), (32, 32), (32, 48), (64, 0), (32, -16), (16, 64)] {
            add(false, 1, 0, &[inner], &[], &[width], &[start]);
            for outer in [0, -1, 2] {
                add(false, 1, 0, &[inner, 3, 2], &[0, 1], &[width, 2, 2], &[start, 0, outer]);
                add(false, 1, 0, &[inner, 3, 2, 2], &[1, 0, 1], &[width, 2, 1, 2], &[start, 1, 0, outer]);
                add(
                    false,
                    1,
                    0,
                    &[inner, 2, 2, 2, 3],
                    &[0, 0, 1, 0],
                    &[width, 2, 1, 2, 2],
                    &[start, 0, 1, 0, outer],
                );
            }
        }
    }
    // Loads at ends, which were equal.
    for inner in [64u64, 60, 57, 49] {
        for (width, start) in [(32, 48), (32, -16), (16, 64), (64, 16)] {
            add(true, 1, 0, &[inner, 3], &[0], &[width, 2], &[start, 0]);
            add(true, 1, 0, &[inner], &[], &[width], &[start]);
        }
    }
    // Starts that are no multiple of 16 bytes.
    for is_load in [true, false] {
        for (element, inner, start) in [
            (1u64, 64u64, 8),
            (1, 64, 4),
            (1, 64, -4),
            (1, 60, 4),
            (4, 64, 4),
            (4, 64, -8),
            (2, 64, 8),
            (1, 64, 1),
        ] {
            add(
                is_load,
                element,
                0,
                &[inner / element, 3],
                &[1],
                &[32 / element, 2],
                &[start / element as i32, 0],
            );
        }
        add(is_load, 1, 0, &[64], &[], &[32], &[8]);
        add(is_load, 4, 0, &[16], &[], &[8], &[-1]);
        add(is_load, 4, 3, &[64, 20], &[0], &[32, 8], &[1, 0]);
    }
    all
}

impl Trial {
    /// Trials that are likely to end alike.
    fn class(&self) -> String {
        let TensorMap { element_bytes, swizzle_bits, extents, boxed, .. } = &self.case.map;
        let (inner, first) =
            ((extents[0] * element_bytes) as i64, i64::from(self.case.at[0]) * *element_bytes as i64);
        let last = first + (boxed[0] * element_bytes) as i64;
        let outer = (1..extents.len())
            .any(|n| self.case.at[n] < 0 || self.case.at[n] as i64 + boxed[n] as i64 > extents[n] as i64);
        format!(
            "{} rank {} swizzle {swizzle_bits} rows {} start {} end {} outer {}",
            if self.is_load { "load" } else { "store" },
            extents.len(),
            if inner % 16 == 0 { "whole".into() } else { format!("mod4={}", inner % 4) },
            match first {
                _ if first % 16 != 0 => "unaligned",
                _ if first < 0 => "negative",
                _ if first >= inner => "beyond",
                _ => "inside",
            },
            if last <= inner {
                "inside"
            } else if last - inner < 16 {
                "in the last 16"
            } else {
                "outside"
            },
            if outer { "outside" } else { "inside" },
        )
    }

    fn describe(&self) -> String {
        let TensorMap { element_bytes, swizzle_bits, extents, strides, boxed, .. } = &self.case.map;
        let is = if self.is_load { "load" } else { "store" };
        format!(
            "{is} es={element_bytes} sw={swizzle_bits} extents={extents:?} strides={strides:?} box={boxed:?} at={:?}",
            self.case.at
        )
    }

    fn kernel(&self) -> String {
        let rank = self.case.at.len();
        let parameters: String = (0..rank).map(|n| format!(", .param .u64 c{n}")).collect();
        let set: String =
            (0..rank).map(|n| format!("ld.param.u64 %o, [c{n}];\ncvt.u32.u64 %k{n}, %o;\n")).collect();
        let registers: Vec<String> = (0..rank).map(|n| format!("%k{n}")).collect();
        let of_box = format!("[%m, {{{}}}]", registers.join(", "));
        let work = if self.is_load {
            format!(
                "mov.u32 %s, bar;\nmov.u32 %v, 1;\nmbarrier.init.shared::cta.b64 [%s], %v;\nfence.mbarrier_init.release.cluster;\n\
                 cvt.u32.u64 %v, %bytes;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], %v;\nmov.u32 %w, area;\n\
                 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%w], {of_box}, [%s];\n\
                 SPIN:\nmbarrier.try_wait.parity.shared::cta.b64 %p, [%s], 0;\n@!%p bra SPIN;\n\
                 mov.u32 %v, 0;\ncvt.u32.u64 %x, %bytes;\nDUMP:\nadd.s32 %t, %w, %v;\nld.shared.u32 %k0, [%t];\n\
                 st.global.u32 [%to], %k0;\nadd.s64 %to, %to, 4;\nadd.s32 %v, %v, 4;\nsetp.lt.u32 %p, %v, %x;\n@%p bra DUMP;\n"
            )
        } else {
            format!(
                "mov.u32 %s, area;\nmov.u32 %v, 0;\nmov.u32 %x, 1;\ncvt.u32.u64 %w, %bytes;\nFILL:\nst.shared.u8 [%s], %x;\n\
                 add.s32 %x, %x, 3;\nrem.u32 %x, %x, 233;\nadd.s32 %s, %s, 1;\nadd.s32 %v, %v, 1;\nsetp.lt.u32 %p, %v, %w;\n@%p bra FILL;\n\
                 fence.proxy.async.shared::cta;\nmov.u32 %s, area;\n\
                 cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group {of_box}, [%s];\n\
                 cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
            )
        };
        format!(
            ".visible .entry form(.param .align 64 .b8 map[128], .param .u64 to, .param .u64 bytes{parameters})\n{{\n\
             .reg .pred %p;\n.reg .b32 %s, %t, %v, %w, %x, %k<5>;\n.reg .b64 %to, %o, %m, %bytes;\n\
             .shared .align 8 .b8 bar[16];\n.shared .align 1024 .b8 area[8192];\n\
             ld.param.u64 %to, [to];\nld.param.u64 %bytes, [bytes];\n{set}mov.b64 %m, map;\ncvta.param.u64 %m, %m;\n{work}ret;\n}}\n"
        )
    }

    /// The result, or a fault.
    fn run(&mut self) -> Result<String, String> {
        let text = self.kernel();
        let bytes = self.case.map.box_bytes() as usize;
        assert!(bytes <= 8192, "a small box");
        let length = self.case.content.len();
        let mut memory = vec![BACKGROUND; GUARD];
        memory.extend(if self.is_load { self.case.content.clone() } else { vec![BACKGROUND; length] });
        memory.extend(vec![BACKGROUND; GUARD]);
        let mut device = Device::new();
        let start = device.store(&memory);
        self.case.map.address = start + GUARD as u64;
        let to = device.store(&vec![BACKGROUND; bytes]);
        let mut parameters = device.tensor_map(&self.case.map);
        let coordinates = self.case.at.iter().map(|&at| at as u32 as u64);
        parameters
            .extend(arguments(&[to, bytes as u64].into_iter().chain(coordinates).collect::<Vec<u64>>()));
        device.run(&text, Grid::row(1, 1), &parameters)?;
        let (mut expected, found) = if self.is_load {
            (vec![0; bytes], device.load(to, bytes)?)
        } else {
            (memory.clone(), device.load(start, memory.len())?)
        };
        for (place, index) in self.case.places() {
            match index {
                Some(index) if self.is_load => expected[place] = self.case.content[index],
                Some(index) => expected[GUARD + index] = pattern(place),
                None => {}
            }
        }
        if expected == found {
            return Ok("equal".into());
        }
        // Ranges of differing bytes: byte of the tensor, expected and found bytes.
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for at in (0..found.len()).filter(|&at| expected[at] != found[at]) {
            match ranges.last_mut() {
                Some((_, end)) if *end == at => *end += 1,
                _ => ranges.push((at, at + 1)),
            }
        }
        let origin = if self.is_load { 0 } else { GUARD as i64 };
        let hex = |bytes: &[u8]| bytes.iter().take(20).map(|x| format!("{x:02x}")).collect::<String>();
        let shown: Vec<String> = (ranges.iter().take(8))
            .map(|&(from, to)| {
                let (begin, end) = (from as i64 - origin, to as i64 - origin);
                format!(
                    "[{begin}, {end}) expected {} GPU {}",
                    hex(&expected[from..to]),
                    hex(&found[from..to])
                )
            })
            .collect();
        Ok(format!("differs in {} ranges: {}", ranges.len(), shown.join("; ")))
    }
}

const FIRST: &str = "XTRAIN_EXPERIMENT_FIRST";
const SKIP: &str = "XTRAIN_EXPERIMENT_SKIP";

/// Runs trials from `first` on, until a fault.
fn boxes_from(first: usize, skip: &str) {
    for (n, mut trial) in trials().into_iter().enumerate().skip(first) {
        let class = trial.class();
        if skip.split(';').any(|skipped| skipped == class) {
            println!("box {n}|skipped|{class}|{}", trial.describe());
            continue;
        }
        match trial.run() {
            Ok(result) => println!("box {n}|{result}|{class}|{}", trial.describe()),
            Err(fault) => {
                println!("box {n}|FAULT {fault}|{class}|{}", trial.describe());
                return;
            }
        }
    }
}

/// Runs all trials, in a new process after each fault, for some seconds.
fn boxes(seconds: u64) {
    let (began, count) = (Instant::now(), trials().len());
    let mut first = 0;
    // Faults and other ends by class.
    let mut ends: HashMap<String, [usize; 2]> = HashMap::new();
    while first < count {
        if began.elapsed().as_secs() > seconds {
            println!("boxes: {first} of {count} were reached; {FIRST}={first} goes on");
            break;
        }
        let skip: Vec<&str> =
            ends.iter().filter(|(_, of)| of[0] > 1 && of[1] == 0).map(|(class, _)| class.as_str()).collect();
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args([
                "--ignored",
                "--nocapture",
                "--exact",
                "instructions::tests::experiment::part_of_the_boxes",
            ])
            .env(FIRST, first.to_string())
            .env(SKIP, skip.join(";"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test again");
        let before = first;
        for line in BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok) {
            let Some(at) = line.find("box ") else { continue };
            let line = &line[at..];
            println!("{line}");
            let parts: Vec<&str> = line.splitn(4, '|').collect();
            let [number, result, class, _] = parts[..] else { continue };
            let Some(number) = number.strip_prefix("box ").and_then(|n| n.parse::<usize>().ok()) else {
                continue;
            };
            first = number + 1;
            if result != "skipped" {
                ends.entry(class.to_owned()).or_default()[usize::from(!result.starts_with("FAULT"))] += 1;
            }
        }
        let _ = child.wait();
        if first == before {
            println!("box {first}|the process ended|?|?");
            first += 1;
        }
    }
    println!("boxes: {first} of {count} in {} s", began.elapsed().as_secs());
    let mut ends: Vec<_> = ends.into_iter().collect();
    ends.sort();
    for (class, [faults, others]) in ends {
        println!("class {class}: {faults} faults, {others} without");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn experiment_with_fp8_sums_and_boxes() {
    let is_gpu = gpu::use_alone();
    let began = Instant::now();
    fp8(|kind| match (is_gpu, kind) {
        (false, _) => 4,
        (_, 0) => 384,
        _ => 48,
    });
    println!("fp8: {} s", began.elapsed().as_secs());
    boxes(
        std::env::var("XTRAIN_EXPERIMENT_SECONDS").map_or(60, |seconds| seconds.parse().expect("a number")),
    );
}

#[test]
#[ignore = "a part of the experiment"]
fn part_of_the_boxes() {
    gpu::use_alone();
    let first = std::env::var(FIRST).map_or(0, |first| first.parse().expect("a number"));
    boxes_from(first, &std::env::var(SKIP).unwrap_or_default());
}
