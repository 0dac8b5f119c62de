//! Asynchronous matrix instructions of four warps (section 9.7.15).

use super::form::Form;
use super::{Device, Grid, arguments, random};
use crate::gemm::defined_fp8_sum;
use crate::numbers::{E4M3, E5M2, Minifloat, from_bf16};

const THREADS: usize = 128;
/// Where A and B begin in shared memory, and where B ends.
const AREAS: [usize; 3] = [0, 8 << 10, 40 << 10];

/// A form: its columns, the types of A and B, and where A lies.
#[derive(Clone, Copy)]
struct Shape {
    columns: usize,
    types: [&'static str; 2],
    from_registers: bool,
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for columns in (8..=256).step_by(8) {
        for types in
            [["e4m3", "e4m3"], ["e5m2", "e4m3"], ["e4m3", "e5m2"], ["e5m2", "e5m2"], ["bf16", "bf16"]]
        {
            let k = if types[0] == "bf16" { 16 } else { 32 };
            let opcode =
                format!("wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{}.{}", types[0], types[1]);
            forms.push(Form::by(opcode.leak(), move |opcode| {
                [false, true]
                    .into_iter()
                    .try_for_each(|from_registers| Shape { columns, types, from_registers }.check(opcode))
            }));
        }
    }
    for opcode in
        ["wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned"]
    {
        forms.push(Form::by(opcode, |_| {
            let shape = Shape { columns: 8, types: ["bf16"; 2], from_registers: false };
            shape.check("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16")
        }));
    }
    forms
}

fn format_of(ty: &str) -> Minifloat {
    if ty == "e5m2" { E5M2 } else { E4M3 }
}

/// An operand's layout in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// log2 of the chunks that are permuted.
    bits: u32,
    transposed: bool,
    /// The 32 bytes of a row that the instruction reads.
    slice: usize,
    rows: usize,
}

impl Layout {
    fn width(self) -> usize {
        16 << self.bits
    }

    /// Leading and stride byte offsets.
    fn offsets(self) -> [usize; 2] {
        match (self.transposed, self.bits) {
            (false, 0) => [16 * self.rows, 128],
            (false, _) => [16, 8 * self.width()],
            (true, 0) => [128, 256],
            (true, _) => [16 * self.width(), 8 * self.width()],
        }
    }

    /// The descriptor without the area's address.
    fn descriptor(self) -> u64 {
        let [leading, stride] = self.offsets().map(|bytes| bytes as u64 >> 4);
        let mode = [0, 3, 2, 1][self.bits as usize];
        mode << 62 | stride << 32 | leading << 16 | (32 * self.slice) as u64 >> 4
    }

    /// The place of byte `byte` of element k of a row, for elements of `size` bytes.
    fn place(self, row: usize, k: usize, byte: usize, size: usize) -> usize {
        let [leading, stride] = self.offsets();
        let at = match (self.transposed, self.bits) {
            (false, 0) => {
                let along = k * size + byte;
                row / 8 * stride + row % 8 * 16 + along / 16 * leading + along % 16
            }
            (false, _) => row / 8 * stride + row % 8 * self.width() + 32 * self.slice + k * size + byte,
            (true, 0) => row / 8 * stride + k % 8 * 16 + k / 8 * leading + row % 8 * size + byte,
            (true, _) => {
                let per_line = self.width() / size;
                row / per_line * leading
                    + row % per_line * size
                    + k % 8 * self.width()
                    + k / 8 * stride
                    + byte
            }
        };
        // Chunks of 16 bytes are permuted among lines of 128 bytes.
        let (line, chunk) = (at / 128, at / 16 % 8);
        line * 128 + (chunk ^ (line % (1 << self.bits))) * 16 + at % 16
    }
}

impl Shape {
    fn check(self, opcode: &str) -> Result<(), String> {
        (0..3).try_for_each(|round| self.multiply(opcode, round))
    }

    fn multiply(self, opcode: &str, round: usize) -> Result<(), String> {
        let Shape { columns, types, from_registers } = self;
        let mut random = random(&format!("{opcode} {from_registers} {round}"));
        let is_bf16 = types[0] == "bf16";
        let (size, k) = if is_bf16 { (2, 16) } else { (1, 32) };
        let mut layout = |rows: usize| {
            let (bits, transposed) = (random.below(4) as u32, is_bf16 && random.below(2) == 0);
            let slices = if transposed || bits == 0 { 1 } else { (16 << bits) / 32 };
            Layout { bits, transposed, slice: random.below(slices), rows }
        };
        let mut layouts = [layout(64), layout(columns)];
        layouts[0].transposed &= !from_registers;
        let signs: [i32; 2] = [0, 1].map(|_| if random.below(3) == 0 { -1 } else { 1 });
        let adds = random.below(2) == 1;
        // Whole numbers, of which all sums are exact, numbers of all magnitudes, and small and subnormal
        // ones.
        let mut number = |ty: &str| -> (u16, f64) {
            let whole = random.below(17) as f32 - 8.0;
            let format = format_of(ty);
            let bits = match (ty, round) {
                ("bf16", 0) => (whole.to_bits() >> 16) as u16,
                ("bf16", _) => (random.draw() as u16 & 0x87FF) | 0x3C00,
                (_, 0) => format.encode(whole).into(),
                _ => {
                    let most = if round == 1 { format.max } else { 15 };
                    random.below(usize::from(most) + 1) as u16 | (random.below(2) as u16) << 7
                }
            };
            let value = if ty == "bf16" { from_bf16(bits) } else { format.decode(bits as u8) };
            (bits, value.into())
        };
        let mut matrices: Vec<Vec<(u16, f64)>> = Vec::new();
        for (rows, ty) in [(64, types[0]), (columns, types[1])] {
            matrices.push((0..rows * k).map(|_| number(ty)).collect());
        }
        let unit = if round == 2 { 2f32.powi(-12) } else { 1.0 };
        let held: Vec<f32> = (0..64 * columns).map(|_| unit * (random.below(64) as f32 - 31.0)).collect();

        let mut areas = vec![0u8; AREAS[2]];
        for (n, matrix) in matrices.iter().enumerate() {
            for (at, (bits, _)) in matrix.iter().enumerate() {
                for byte in 0..size {
                    let place = layouts[n].place(at / k, at % k, byte, size);
                    areas[AREAS[n] + place] = bits.to_le_bytes()[byte];
                }
            }
        }
        // Row and column of element n of a thread's sums.
        let place = |thread: usize, n: usize| {
            (thread / 32 * 16 + thread % 32 / 4 + n / 2 % 2 * 8, n / 4 * 8 + thread % 4 * 2 + n % 2)
        };
        let of_thread = |of: &dyn Fn(usize, usize) -> f32, thread: usize| {
            (0..columns / 2)
                .map(|n| place(thread, n))
                .map(|(row, column)| of(row, column))
                .collect::<Vec<f32>>()
        };
        let sums =
            (0..THREADS).flat_map(|thread| of_thread(&|row, column| held[row * columns + column], thread));
        // A's registers: rows g and g + 8, then the second half of k.
        let per_word = 4 / size;
        let left = (0..THREADS).flat_map(|thread| {
            let matrix = &matrices[0];
            (0..4).flat_map(move |n| {
                let row = thread / 32 * 16 + thread % 32 / 4 + n % 2 * 8;
                let first = thread % 4 * per_word + n / 2 * k / 2;
                (0..per_word).flat_map(move |i| matrix[row * k + first + i].0.to_le_bytes()[..size].to_vec())
            })
        });
        let mut device = Device::new();
        let from = device.store(&areas);
        let left = device.store(&left.collect::<Vec<u8>>());
        let to = device.store(&sums.flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
        let descriptors = layouts.map(Layout::descriptor);
        let text = self.kernel(opcode, layouts, signs, is_bf16);
        let all = [from, left, to, descriptors[0], descriptors[1], adds.into()];
        device.run(&text, Grid::row(1, THREADS), &arguments(&all))?;
        let found = device.load(to, 4 * 64 * columns)?;
        for (n, found) in found.as_chunks::<4>().0.iter().enumerate() {
            let found = f32::from_le_bytes(*found);
            let (row, column) = place(n / (columns / 2), n % (columns / 2));
            let sign = f64::from(signs[0] * signs[1]);
            let operands: Vec<[f64; 2]> = (0..k)
                .map(|k_at| [sign * matrices[0][row * k + k_at].1, matrices[1][column * k + k_at].1])
                .collect();
            let sum = if adds { held[row * columns + column].into() } else { 0.0 };
            let products: Vec<f64> = operands.iter().map(|[x, y]| x * y).collect();
            let is_right = if is_bf16 {
                let exact = products.iter().sum::<f64>() + sum;
                let magnitude = products.iter().map(|x| x.abs()).sum::<f64>() + sum.abs();
                (f64::from(found) - exact).abs() <= if round == 0 { 0.0 } else { 2f64.powi(-22) * magnitude }
            } else {
                f64::from(found) == defined_fp8_sum(&operands, types.map(format_of), sum)
            };
            if !is_right {
                return Err(format!(
                    "{layouts:?}, signs {signs:?}, adds: {adds}, A from registers: {from_registers}: row {row}, column {column}: \
                     {found} of {sum} and {products:?}"
                ));
            }
        }
        Ok(())
    }

    /// Fills two areas of shared memory, loads sums and A's registers, multiplies, and stores the sums.
    fn kernel(self, opcode: &str, layouts: [Layout; 2], signs: [i32; 2], is_bf16: bool) -> String {
        let count = self.columns / 2;
        let sums: Vec<String> = (0..count).map(|n| format!("%f{n}")).collect();
        let each = |line: &dyn Fn(usize) -> String| (0..count).map(line).collect::<String>();
        let left = if self.from_registers { "{%r0, %r1, %r2, %r3}" } else { "%d0" };
        let transposed: String = (layouts.iter().skip(usize::from(self.from_registers)))
            .map(|layout| if is_bf16 { format!(", {}", u8::from(layout.transposed)) } else { String::new() })
            .collect();
        format!(
            ".visible .entry form(.param .u64 from, .param .u64 left, .param .u64 to, .param .u64 a, .param .u64 b, .param .u64 adds)\n{{\n\
             .reg .pred %p;\n.reg .b32 %t, %s, %v, %r<4>;\n.reg .f32 %f<{count}>;\n.reg .b64 %from, %left, %to, %o, %d0, %d1;\n\
             .shared .align 1024 .b8 area[{areas}];\nld.param.u64 %from, [from];\nld.param.u64 %left, [left];\nld.param.u64 %to, [to];\n\
             mov.u32 %t, %tid.x;\nmov.u32 %s, area;\nshl.b32 %v, %t, 2;\nadd.s32 %s, %s, %v;\ncvt.u64.u32 %o, %v;\nadd.s64 %from, %from, %o;\n\
             FILL:\nld.global.u32 %r0, [%from];\nst.shared.u32 [%s], %r0;\nadd.s32 %s, %s, 512;\nadd.s64 %from, %from, 512;\n\
             add.s32 %v, %v, 512;\nsetp.lt.u32 %p, %v, {areas};\n@%p bra FILL;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n\
             mul.wide.u32 %o, %t, 16;\nadd.s64 %left, %left, %o;\nld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%left];\n\
             mul.wide.u32 %o, %t, {bytes};\nadd.s64 %to, %to, %o;\n{}\
             mov.u32 %s, area;\nshr.u32 %s, %s, 4;\ncvt.u64.u32 %o, %s;\nld.param.u64 %d0, [a];\nadd.s64 %d0, %d0, %o;\n\
             ld.param.u64 %d1, [b];\nadd.s64 %d1, %d1, %o;\nadd.s64 %d1, %d1, {second};\nld.param.u64 %o, [adds];\nsetp.ne.s64 %p, %o, 0;\n\
             wgmma.fence.sync.aligned;\n{opcode} {{{}}}, {left}, %d1, %p, {}, {}{transposed};\n\
             wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n{}ret;\n}}\n",
            each(&|n| format!("ld.global.f32 %f{n}, [%to+{}];\n", 4 * n)),
            sums.join(", "),
            signs[0],
            signs[1],
            each(&|n| format!("st.global.f32 [%to+{}], %f{n};\n", 4 * n)),
            areas = AREAS[2],
            bytes = 4 * count,
            second = AREAS[1] >> 4,
        )
    }
}
