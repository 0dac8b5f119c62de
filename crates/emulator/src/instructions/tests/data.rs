//! Moves, selections and predefined registers (sections 9.7.9 and 10).

use super::form::{Form, form};
use super::{Device, Grid, arguments};

macro_rules! of_types {
    ($forms:ident; $($ty:ident $($suffix:literal)+;)*) => {$($(
        $forms.push(form(concat!("mov.", $suffix), |a: $ty| a).or_immediate());
        $forms.push(form(concat!("selp.", $suffix), |a: $ty, b: $ty, p: bool| if p { a } else { b }));
    )+)*};
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![
        form("mov.pred", |a: bool| a).or_immediate(),
        // Vectors of equal parts, the low bits first.
        form("mov.b32", |a: u16, b: u16| u32::from(a) + (u32::from(b) << 16)).written("%d, {%a, %b}"),
        form("mov.b32", |a: u32| a as u16).written("{%d, %x}, %a"),
        form("mov.b32", |a: u32| (a >> 16) as u16).written("{%x, %d}, %a"),
        form("mov.b64", |a: u32, b: u32| u64::from(a) + (u64::from(b) << 32)).written("%d, {%a, %b}"),
        form("mov.b64", |a: u64| a as u32).written("{%d, %x}, %a"),
        form("mov.b64", |a: u64| (a >> 32) as u32).written("{%x, %d}, %a"),
        form("mov.b64", |a: u16, b: u16, c: u16, d: u16| {
            [a, b, c, d].into_iter().rev().fold(0, |sum, part| sum << 16 | u64::from(part))
        })
        .written("%d, {%a, %b, %c, %e}"),
        Form::by("mov.u32", predefined_registers_say_where_a_thread_is),
        Form::by("mov.u64", a_variable_has_an_address),
        Form::by("mov.b64", a_variable_has_an_address),
        Form::by("add.u64", a_variable_has_an_address),
    ];
    of_types! { forms;
        u16 "b16" "u16" "s16";
        u32 "b32" "u32" "s32" "f32";
        u64 "b64" "u64" "s64" "f64";
    }
    forms
}

const REGISTERS: [&str; 14] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%cluster_ctarank",
];

fn predefined_registers_say_where_a_thread_is(opcode: &str) -> Result<(), String> {
    let (blocks, threads) = ([3, 2, 4], [5, 3, 7]);
    let [block_count, thread_count] = [blocks, threads].map(|extents| extents.iter().product::<u32>());
    // Each thread finds its position in the results by its registers.
    let mut text = String::from(
        ".visible .entry where(.param .u64 to)\n{\n.reg .b32 %r<20>;\n.reg .b64 %to, %o;\nld.param.u64 %to, [to];\n",
    );
    for (n, register) in REGISTERS.iter().enumerate() {
        text += &format!("{opcode} %r{n}, {register};\n");
    }
    text += "mad.lo.s32 %r14, %r8, %r10, %r7;\nmad.lo.s32 %r14, %r14, %r9, %r6;\n\
             mad.lo.s32 %r14, %r14, %r5, %r2;\nmad.lo.s32 %r14, %r14, %r4, %r1;\nmad.lo.s32 %r14, %r14, %r3, %r0;\n\
             mul.wide.u32 %o, %r14, 56;\nadd.s64 %to, %to, %o;\n";
    for n in 0..REGISTERS.len() {
        text += &format!("st.global.u32 [%to+{}], %r{n};\n", 4 * n);
    }
    text += "ret;\n}\n";
    let mut device = Device::new();
    let count = (block_count * thread_count) as usize;
    let to = device.allocate(56 * count);
    device.run(&text, Grid { blocks, threads }, &arguments(&[to]))?;
    let found = device.load(to, 56 * count)?;
    for (n, found) in found.chunks(56).enumerate() {
        let found: Vec<u32> = found.as_chunks::<4>().0.iter().map(|&x| u32::from_le_bytes(x)).collect();
        let (block, thread) = (n as u32 / thread_count, n as u32 % thread_count);
        let split = |n: u32, [x, y, _]: [u32; 3]| [n % x, n / x % y, n / (x * y)];
        let mut expected = [split(thread, threads), threads, split(block, blocks), blocks].concat();
        expected.extend([thread % 32, 0]);
        if found != expected {
            return Err(format!("{REGISTERS:?} are {found:?} and not {expected:?}"));
        }
    }
    Ok(())
}

/// The addresses of variables in global memory, shared memory and parameters. The bytes there are read
/// through the address.
fn a_variable_has_an_address(opcode: &str) -> Result<(), String> {
    let address = |of: &str| match opcode {
        "add.u64" => format!("mov.u64 %p, {of};\nadd.u64 %p, %p, 8;\n"),
        _ => format!("{opcode} %p, {of};\nadd.s64 %p, %p, 8;\n"),
    };
    let text = format!(
        ".global .align 8 .u32 TABLE[4] = {{1, 2, 3, -4}};\n\
         .visible .entry reads(.param .u64 to, .param .u64 two)\n{{\n.reg .b32 %r<4>;\n.reg .b64 %to, %p;\n\
         .shared .align 8 .b8 gap[24];\n.shared .align 8 .b8 tile[16];\n\
         ld.param.u64 %to, [to];\nmov.u32 %r1, 77;\nst.shared.u32 [tile+8], %r1;\n\
         {}ld.global.u32 %r1, [%p];\nst.global.u32 [%to], %r1;\n\
         {}ld.shared.u32 %r1, [%p];\nst.global.u32 [%to+4], %r1;\n\
         {}ld.param.u32 %r1, [%p];\nst.global.u32 [%to+8], %r1;\nret;\n}}\n",
        address("TABLE"),
        address("tile"),
        address("to"),
    );
    let mut device = Device::new();
    let to = device.allocate(12);
    device.run(&text, Grid::row(1, 1), &arguments(&[to, 99]))?;
    let expected: Vec<u8> = [3u32, 77, 99].iter().flat_map(|x| x.to_le_bytes()).collect();
    let found = device.load(to, 12)?;
    if found == expected { Ok(()) } else { Err(format!("{found:?} is not {expected:?}")) }
}
