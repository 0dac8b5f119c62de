//! Warp-level matrix instructions (section 9.7.14).

use super::form::Form;
use super::{Device, Grid, arguments, random};

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![Form::by("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", products)];
    for (count, transposition) in [1, 2, 4].into_iter().flat_map(|count| [(count, ""), (count, ".trans")]) {
        let opcode = format!("ldmatrix.sync.aligned.m8n8.x{count}{transposition}.shared.b16").leak();
        forms.push(Form::by(opcode, move |opcode| loads(opcode, count, !transposition.is_empty())));
    }
    forms
}

/// Matrices of 8 rows of 8 numbers; lanes 8 n to 8 n + 7 hold the addresses of the rows. Thread t receives
/// numbers 2 (t mod 4) and the next one of row t / 4, or of column t / 4 if transposed.
fn loads(opcode: &str, count: usize, is_transposed: bool) -> Result<(), String> {
    let mut random = random(opcode);
    let numbers: Vec<u16> = (0..64 * 8).map(|_| random.draw() as u16).collect();
    // Rows of 16 bytes; lanes beyond the matrices have no address.
    let rows: Vec<u32> =
        (0..32).map(|lane| if lane < 8 * count { random.below(64) as u32 * 16 } else { !0 }).collect();
    let registers: Vec<String> = (0..count).map(|n| format!("%r{n}")).collect();
    let text = format!(
        ".visible .entry loads(.param .u64 from, .param .u64 rows, .param .u64 to)\n{{\n.reg .b32 %t, %v, %s, %r<4>;\n\
         .reg .b64 %from, %rows, %to, %o, %own;\n.shared .align 16 .b8 before[32];\n.shared .align 16 .b8 area[1024];\n\
         ld.param.u64 %from, [from];\nld.param.u64 %rows, [rows];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n\
         mul.wide.u32 %o, %t, 32;\nadd.s64 %from, %from, %o;\nmov.u64 %own, area;\nadd.s64 %own, %own, %o;\n\
         {fill}bar.warp.sync 0xffffffff;\nmul.wide.u32 %o, %t, 4;\nadd.s64 %rows, %rows, %o;\n\
         ld.global.u32 %v, [%rows];\nmov.u32 %s, area;\nadd.s32 %s, %s, %v;\n{opcode} {{{registers}}}, [%s];\n\
         mul.wide.u32 %o, %t, 16;\nadd.s64 %to, %to, %o;\n{dump}ret;\n}}\n",
        fill = (0..32)
            .step_by(4)
            .map(|at| format!("ld.global.u32 %v, [%from+{at}];\nst.shared.u32 [%own+{at}], %v;\n"))
            .collect::<String>(),
        registers = registers.join(", "),
        dump = (0..count).map(|n| format!("st.global.u32 [%to+{}], %r{n};\n", 4 * n)).collect::<String>(),
    );
    let mut device = Device::new();
    let from = device.store(&numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let addresses = device.store(&rows.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let to = device.store(&[0; 16 * 32]);
    device.run(&text, Grid::row(1, 32), &arguments(&[from, addresses, to]))?;
    let found = device.load(to, 16 * 32)?;
    let number = |matrix: usize, row: usize, column: usize| {
        let (row, column) = if is_transposed { (column, row) } else { (row, column) };
        u32::from(numbers[rows[8 * matrix + row] as usize / 2 + column])
    };
    for lane in 0..32 {
        for matrix in 0..count {
            let (row, column) = (lane / 4, 2 * (lane % 4));
            let expected = number(matrix, row, column) | number(matrix, row, column + 1) << 16;
            let at = 16 * lane + 4 * matrix;
            let found = u32::from_le_bytes(found[at..at + 4].try_into().expect("4 bytes"));
            if found != expected {
                return Err(format!("matrix {matrix}, lane {lane}: {found:#x} is not {expected:#x}"));
            }
        }
    }
    Ok(())
}

/// A, B by column, C, and D of a GEMM, as lists of rows.
type Numbers = [Vec<f64>; 3];

/// Random matrices of a kind; those of the last kind include special values.
fn matrices(kind: usize, round: usize) -> Numbers {
    let mut random = random(&format!("matrices {kind} {round}"));
    let special =
        [0.0, -0.0, 1.0, -2.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 2f64.powi(-133), 2f64.powi(127)];
    let mut number = |digits: u32| {
        let uniform = random.draw() as f64 / 2f64.powi(64) - 0.5;
        let spread = 2f64.powi(random.below(12) as i32 - 6);
        // As many binary digits as the format has.
        let rounded = |x: f64| {
            let unit = 2f64.powi(x.abs().log2().floor() as i32 + 1 - digits as i32);
            if x == 0.0 { x } else { (x / unit).round() * unit }
        };
        match kind {
            // Whole numbers: all sums are exact.
            0 => (random.below(17) as f64) - 8.0,
            1 => rounded(uniform),
            2 => rounded(uniform * spread),
            _ if random.below(16) == 0 => special[random.below(special.len())],
            _ => rounded(uniform),
        }
    };
    [
        (0..16 * 16).map(|_| number(8)).collect(),
        (0..16 * 8).map(|_| number(8)).collect(),
        (0..16 * 8).map(|_| number(24)).collect(),
    ]
}

/// Row and column of element i of A, B, and C or D in a thread, by the ISA's figures.
fn place(operand: usize, thread: usize, i: usize) -> (usize, usize) {
    let (group, within) = (thread / 4, thread % 4);
    match operand {
        0 => (
            if i < 2 || (4..6).contains(&i) { group } else { group + 8 },
            within * 2 + i % 2 + if i < 4 { 0 } else { 8 },
        ),
        1 => (within * 2 + i % 2 + if i < 2 { 0 } else { 8 }, group),
        _ => (if i < 2 { group } else { group + 8 }, within * 2 + i % 2),
    }
}

/// A warp's D for the 10 words of A, B and C in each thread.
fn multiplied(opcode: &str, words: &[u32]) -> Result<Vec<u8>, String> {
    let loads: String = (0..10).map(|n| format!("ld.global.u32 %r{n}, [%from+{}];\n", 4 * n)).collect();
    let text = format!(
        ".visible .entry products(.param .u64 from, .param .u64 to)\n{{\n.reg .b32 %t, %r<10>, %f<4>;\n\
         .reg .b64 %from, %to, %o;\nld.param.u64 %from, [from];\nld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n\
         mul.wide.u32 %o, %t, 40;\nadd.s64 %from, %from, %o;\nmul.wide.u32 %o, %t, 16;\nadd.s64 %to, %to, %o;\n\
         {loads}{opcode} {{%f0, %f1, %f2, %f3}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%r6, %r7, %r8, %r9}};\n\
         st.global.v4.u32 [%to], {{%f0, %f1, %f2, %f3}};\nret;\n}}\n"
    );
    let mut device = Device::new();
    let from = device.store(&words.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let to = device.allocate(16 * 32);
    device.run(&text, Grid::row(1, 32), &arguments(&[from, to]))?;
    device.load(to, 16 * 32)
}

/// Results of an H200 (driver 580): for each warp 320 words of operands and 128 of results. Exponents of
/// operands and sums are near and far; there are zeros, subnormal numbers, infinities and NaN.
const H200: &[u8] = include_bytes!("mma-h200.bin");

fn products(opcode: &str) -> Result<(), String> {
    for (n, warp) in H200.chunks(4 * 448).enumerate() {
        let (operands, expected) = warp.split_at(4 * 320);
        let words: Vec<u32> =
            operands.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let found = multiplied(opcode, &words)?;
        if let Some(at) = (0..128).find(|at| found[4 * at..][..4] != expected[4 * at..][..4]) {
            let [found, expected] = [&found, expected].map(|bytes| &bytes[4 * at..][..4]);
            return Err(format!("warp {n} of an H200's, result {at}: {found:x?} is not {expected:x?}"));
        }
    }
    for (round, kind) in (0..24).map(|round| (round, round % 4)) {
        let [a, b, c] = matrices(kind, round);
        let mut words: Vec<u32> = Vec::new();
        let nearest_bf16 = |x: f64| ((x as f32).to_bits() >> 16) as u16;
        for thread in 0..32 {
            let element = |operand: usize, i: usize, of: &[f64], columns: usize| {
                let (row, column) = place(operand, thread, i);
                of[row * columns + column]
            };
            let pair =
                |low: f64, high: f64| u32::from(nearest_bf16(low)) | u32::from(nearest_bf16(high)) << 16;
            words.extend((0..4).map(|n| pair(element(0, 2 * n, &a, 16), element(0, 2 * n + 1, &a, 16))));
            words.extend((0..2).map(|n| pair(element(1, 2 * n, &b, 8), element(1, 2 * n + 1, &b, 8))));
            words.extend((0..4).map(|n| (element(2, n, &c, 8) as f32).to_bits()));
        }
        let found = multiplied(opcode, &words)?;
        for (n, found) in found.as_chunks::<4>().0.iter().enumerate() {
            let found = f64::from(f32::from_le_bytes(*found));
            let (row, column) = place(2, n / 4, n % 4);
            let terms: Vec<f64> =
                (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).chain([c[row * 8 + column]]).collect();
            let sum = terms.iter().sum::<f64>();
            let magnitude = terms.iter().map(|x| x.abs()).filter(|x| x.is_finite()).sum::<f64>();
            let is_right = match sum {
                _ if terms.iter().any(|x| x.is_nan()) => found.is_nan(),
                // An overflow of a partial sum depends on the order.
                _ if magnitude > f64::from(f32::MAX) => true,
                _ if sum.is_nan() => found.is_nan(),
                _ if sum.is_infinite() => found == sum,
                _ => (found - sum).abs() <= 2f64.powi(-22) * magnitude + 2f64.powi(-149),
            };
            if !is_right || kind == 0 && found != sum {
                return Err(format!("matrices {kind}, row {row}, column {column}: {found} is not {sum}"));
            }
        }
    }
    Ok(())
}
