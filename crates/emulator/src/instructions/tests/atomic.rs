//! Atomic operations (sections 9.7.13.5 and 9.7.13.6) of threads with few common addresses and with addresses
//! of their own.

use super::form::Form;
use super::types::{Operand, flushed};
use super::{Device, Grid, arguments, random};
use rustc_apfloat::Float;
use rustc_apfloat::ieee::{Double, Single};

/// Threads of a launch: two blocks for global memory, one for shared.
const THREADS: usize = 64;

/// Computes the new value from the old one and the operands.
type Update = fn(u64, [u64; 2]) -> u64;

/// An operation: its name and type, and the new value in global and in shared memory.
struct Operation {
    name: &'static str,
    ty: &'static str,
    update: Update,
    in_shared: Update,
}

fn operations() -> Vec<Operation> {
    let of = |name, ty, update| Operation { name, ty, update, in_shared: update };
    vec![
        of("add", "u32", |old, [x, _]| (old + x) & 0xFFFF_FFFF),
        of("add", "s32", |old, [x, _]| (old + x) & 0xFFFF_FFFF),
        of("add", "u64", |old, [x, _]| (u128::from(old) + u128::from(x)) as u64),
        of("min", "u32", |old, [x, _]| if x < old { x } else { old }),
        of("max", "u32", |old, [x, _]| if x > old { x } else { old }),
        of("min", "s32", |old, [x, _]| if (x as i32) < old as i32 { x } else { old }),
        of("max", "s32", |old, [x, _]| if x as i32 > old as i32 { x } else { old }),
        of("min", "u64", |old, [x, _]| if x < old { x } else { old }),
        of("max", "u64", |old, [x, _]| if x > old { x } else { old }),
        of("inc", "u32", |old, [x, _]| if old >= x { 0 } else { old + 1 }),
        of("dec", "u32", |old, [x, _]| if old == 0 || old > x { x } else { old - 1 }),
        of("and", "b32", |old, [x, _]| old & x),
        of("or", "b32", |old, [x, _]| old | x),
        of("xor", "b32", |old, [x, _]| old ^ x),
        of("and", "b64", |old, [x, _]| old & x),
        of("or", "b64", |old, [x, _]| old | x),
        of("xor", "b64", |old, [x, _]| old ^ x),
        of("exch", "b32", |_, [x, _]| x),
        of("exch", "b64", |_, [x, _]| x),
        of("cas", "b32", |old, [x, new]| if old == x { new } else { old }),
        of("cas", "b64", |old, [x, new]| if old == x { new } else { old }),
        // In global memory subnormal numbers are flushed, in shared memory they are not.
        Operation {
            name: "add",
            ty: "f32",
            update: |old, [x, _]| flushing_sum(old, x),
            in_shared: |old, [x, _]| bits_of((Single::of_bits(old) + Single::of_bits(x)).value),
        },
        of("add", "f64", |old, [x, _]| (Double::of_bits(old) + Double::of_bits(x)).value.to_bits() as u64),
    ]
}

fn bits_of(x: Single) -> u64 {
    if x.is_nan() { super::types::NAN } else { x.to_bits() as u64 }
}

fn flushing_sum(old: u64, x: u64) -> u64 {
    let [old, x] = [old, x].map(|bits| flushed(Single::of_bits(bits)));
    bits_of(flushed((old + x).value))
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![
        Form::by("red.global.add.v2.f32", |opcode| sums_of_vectors(opcode, 2)),
        Form::by("red.global.add.v4.f32", |opcode| sums_of_vectors(opcode, 4)),
        Form::by("red.release.gpu.global.add.u32", |opcode| check(opcode, &operations()[0])),
    ];
    for space in ["", ".global", ".shared"] {
        for operation in operations() {
            for family in ["atom", "red"] {
                if family == "red" && matches!(operation.name, "exch" | "cas") {
                    continue;
                }
                let (name, ty) = (operation.name, operation.ty);
                let opcode = format!("{family}{space}.{name}.{ty}").leak();
                let find = move || operations().into_iter().find(|o| (o.name, o.ty) == (name, ty));
                let form = Form::by(opcode, move |opcode| check(opcode, &find().expect("it is listed")));
                forms.push(if family == "atom" { form.of_any_order() } else { form });
            }
        }
    }
    forms
}

/// An operand; `meets` says that threads share addresses.
fn operand(operation: &Operation, random: &mut crate::random::Random, meets: bool) -> u64 {
    // Where threads share an address, no value occurs twice, so that the order can be reconstructed. Sums
    // grow.
    let bits = match (operation.ty, operation.name) {
        ("f32", _) if meets => (random.below(64) as f32 + 1.0).to_bits().into(),
        ("f64", _) if meets => (random.below(64) as f64 + 1.0).to_bits(),
        ("f32", _) => {
            let edges = Single::edges();
            if random.below(2) == 0 { edges[random.below(edges.len())] } else { Single::random(random) }
        }
        ("f64", _) => Double::random(random) & !(1 << 62),
        (_, "add" | "xor" | "exch" | "cas") => random.draw(),
        ("u64" | "b64", _) => u64::random(random),
        _ => u32::random(random),
    };
    if operation.ty.ends_with("32") { bits & 0xFFFF_FFFF } else { bits }
}

fn check(opcode: &str, operation: &Operation) -> Result<(), String> {
    let is_shared_only = opcode.contains(".shared");
    let is_generic = !is_shared_only && !opcode.contains(".global");
    for in_shared in [false, true] {
        if in_shared != is_shared_only && !is_generic {
            continue;
        }
        for addresses in [1, 5, THREADS] {
            for is_immediate in [false, true] {
                if is_immediate && operation.name == "cas" {
                    continue;
                }
                run(opcode, operation, in_shared, is_generic, addresses, is_immediate).map_err(
                    |problem| {
                        format!(
                            "{addresses} addresses, shared: {in_shared}, immediate: {is_immediate}: {problem}"
                        )
                    },
                )?;
            }
        }
    }
    Ok(())
}

fn run(
    opcode: &str,
    operation: &Operation,
    in_shared: bool,
    is_generic: bool,
    addresses: usize,
    is_immediate: bool,
) -> Result<(), String> {
    let bytes = if operation.ty.ends_with("64") { 8 } else { 4 };
    let is_atom = opcode.starts_with("atom");
    let mut random = random(&format!("{opcode} {addresses}"));
    let meets = addresses < THREADS;
    let mut initial: Vec<u64> = (0..addresses).map(|_| operand(operation, &mut random, meets)).collect();
    let constant = operand(operation, &mut random, meets);
    // For each thread: address, operands, and true if it takes part.
    let mut threads: Vec<(usize, [u64; 2], bool)> = (0..THREADS)
        .map(|thread| {
            let at = if meets { random.below(addresses) } else { thread };
            let mut operands = [0; 2].map(|_| operand(operation, &mut random, meets));
            if is_immediate {
                operands[0] = constant;
            }
            (at, operands, random.below(8) > 0)
        })
        .collect();
    match operation.name {
        // Threads with a common address count to one limit, so that the order can be reconstructed.
        "inc" | "dec" if meets => {
            let limit = if is_immediate { constant } else { 7 };
            initial.iter_mut().for_each(|x| *x = limit.saturating_sub(3));
            threads.iter_mut().for_each(|(_, operands, _)| operands[0] = limit);
        }
        "cas" => threads.iter_mut().for_each(|(at, operands, _)| operands[0] = initial[*at]),
        _ => {}
    }
    let literal = match operation.ty {
        "f32" => format!("0f{constant:08X}"),
        "f64" => format!("0d{constant:016X}"),
        _ => constant.to_string(),
    };
    let source = if is_immediate { literal.as_str() } else { "%v" };
    let text = kernel(opcode, operation, in_shared, is_generic, source);
    let mut device = Device::new();
    let words: Vec<u64> = threads
        .iter()
        .flat_map(|&(at, [first, second], takes_part)| [at as u64, first, second, takes_part.into()])
        .collect();
    let mut memory: Vec<u8> = initial.iter().flat_map(|x| x.to_le_bytes()[..bytes].to_vec()).collect();
    memory.resize(bytes * THREADS, 0);
    let memory = device.store(&memory);
    let rows = device.store(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
    let to = device.store(&[0; 8 * THREADS]);
    device.run(&text, Grid::row(1, THREADS), &arguments(&[memory, rows, to]))?;
    let olds = device.load_words(to, THREADS)?;
    let left = device.load(memory, bytes * addresses)?;
    let update = if in_shared { operation.in_shared } else { operation.update };
    for (at, left) in left.chunks(bytes).enumerate() {
        let left = left.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        let mut pending: Vec<([u64; 2], u64)> = Vec::new();
        for (thread, &(own, operands, takes_part)) in threads.iter().enumerate() {
            if takes_part && own == at {
                pending.push((operands, olds[thread]));
            }
        }
        check_order(update, initial[at], left, pending, is_atom)?;
    }
    for (thread, (.., takes_part)) in threads.iter().enumerate() {
        if !takes_part && olds[thread] != 0 {
            return Err(format!("thread {thread} takes no part, but has a result"));
        }
    }
    Ok(())
}

/// A kernel in which each thread that takes part runs one instruction with `source`, at the address of its
/// row. In shared memory, it starts with the words of global memory and copies them back.
fn kernel(opcode: &str, operation: &Operation, in_shared: bool, is_generic: bool, source: &str) -> String {
    let bytes = if operation.ty.ends_with("64") { 8 } else { 4 };
    let class = if bytes == 8 { "b64" } else { "b32" };
    let target = if opcode.starts_with("atom") { "%d, " } else { "" };
    let last = if operation.name == "cas" { ", %n" } else { "" };
    let (fill, dump, base) = match in_shared {
        true => (
            format!("ld.global.{class} %d, [%p];\nst.shared.{class} [%s], %d;\nbar.sync 0;\n"),
            format!("bar.sync 0;\nld.shared.{class} %d, [%s];\nst.global.{class} [%p], %d;\n"),
            if is_generic { "mov.u64 %p, area;\ncvta.shared.u64 %p, %p;\n" } else { "mov.u64 %p, area;\n" },
        ),
        false => (String::new(), String::new(), "mov.u64 %p, %memory;\n"),
    };
    let own = format!(
        "mul.wide.u32 %o, %t, {bytes};\nadd.s64 %p, %memory, %o;\nmov.u64 %s, area;\nadd.s64 %s, %s, %o;\n"
    );
    format!(
        ".visible .entry atomics(.param .u64 memory, .param .u64 rows, .param .u64 to)\n{{\n.reg .pred %g;\n\
         .reg .b32 %t, %w;\n.reg .b64 %memory, %rows, %to, %p, %s, %o;\n.reg .{class} %v, %n, %d;\n\
         .shared .align 8 .b8 area[{}];\nld.param.u64 %memory, [memory];\nld.param.u64 %rows, [rows];\n\
         ld.param.u64 %to, [to];\nmov.u32 %t, %tid.x;\n{own}{fill}mul.wide.u32 %o, %t, 32;\n\
         add.s64 %rows, %rows, %o;\nmul.wide.u32 %o, %t, 8;\nadd.s64 %to, %to, %o;\n\
         ld.global.u32 %w, [%rows];\nmul.wide.u32 %o, %w, {bytes};\n{base}add.s64 %p, %p, %o;\n\
         ld.global.{class} %v, [%rows+8];\nld.global.{class} %n, [%rows+16];\nld.global.u32 %w, [%rows+24];\n\
         setp.ne.s32 %g, %w, 0;\nmov.{class} %d, 0;\n@%g {opcode} {target}[%p], {source}{last};\n\
         st.global.{class} [%to], %d;\n{own}{dump}ret;\n}}\n",
        8 * THREADS
    )
}

/// Checks that in some order the updates lead from `initial` to `left`, and that each thread found the value
/// before it. `pending` are operands and the value that their thread found, if the instruction returns one.
fn check_order(
    update: Update,
    initial: u64,
    left: u64,
    mut pending: Vec<([u64; 2], u64)>,
    is_atom: bool,
) -> Result<(), String> {
    let mut value = initial;
    while !pending.is_empty() {
        // Some thread found this value; if several did, one of them leaves it first.
        let found = |&(_, old): &([u64; 2], u64)| !is_atom || old == value;
        let keeps = |all: &([u64; 2], u64)| found(all) && update(value, all.0) == value;
        let next = pending.iter().position(keeps).or(pending.iter().position(found));
        let next = next.ok_or_else(|| format!("no thread found {value:#x}, but {pending:x?}"))?;
        let (operands, _) = pending.swap_remove(next);
        value = update(value, operands);
    }
    if value == left { Ok(()) } else { Err(format!("{left:#x} is left of {initial:#x}, and not {value:#x}")) }
}

/// Four sums of f32 at each address: special values at addresses of their own, and whole numbers where
/// threads meet.
fn sums_of_vectors(opcode: &str, width: usize) -> Result<(), String> {
    let registers: Vec<String> = (0..width).map(|n| format!("%r{n}")).collect();
    let (registers, row_bytes) = (registers.join(", "), 4 * width);
    for addresses in [THREADS, 3] {
        let mut random = random(opcode);
        let operation = operations().into_iter().find(|o| o.ty == "f32").expect("it is listed");
        let meets = addresses < THREADS;
        let mut numbers =
            |count| (0..count).map(|_| operand(&operation, &mut random, meets)).collect::<Vec<_>>();
        let (initial, added) = (numbers(width * addresses), numbers(width * THREADS));
        let text = format!(
            ".visible .entry sums(.param .u64 memory, .param .u64 rows)\n{{\n.reg .b32 %t, %r<4>;\n\
             .reg .b64 %memory, %rows, %o;\nld.param.u64 %memory, [memory];\nld.param.u64 %rows, [rows];\n\
             mov.u32 %t, %tid.x;\nmul.wide.u32 %o, %t, {row_bytes};\nadd.s64 %rows, %rows, %o;\nrem.u32 %t, %t, {addresses};\n\
             mul.wide.u32 %o, %t, {row_bytes};\nadd.s64 %memory, %memory, %o;\n\
             ld.global.v{width}.u32 {{{registers}}}, [%rows];\n\
             {opcode} [%memory], {{{registers}}};\nret;\n}}\n"
        );
        let mut device = Device::new();
        let bytes =
            |numbers: &[u64]| numbers.iter().flat_map(|&x| (x as u32).to_le_bytes()).collect::<Vec<u8>>();
        let (memory, rows) = (device.store(&bytes(&initial)), device.store(&bytes(&added)));
        device.run(&text, Grid::row(1, THREADS), &arguments(&[memory, rows]))?;
        let mut expected = initial;
        for (n, &x) in added.iter().enumerate() {
            let at = n / width % addresses * width + n % width;
            expected[at] = flushing_sum(expected[at], x);
        }
        let found = device.load(memory, row_bytes * addresses)?;
        for (n, (found, expected)) in found.as_chunks::<4>().0.iter().zip(&expected).enumerate() {
            let found = u64::from(u32::from_le_bytes(*found));
            if found != *expected {
                return Err(format!("sum {n} is {found:#x} and not {expected:#x}"));
            }
        }
    }
    Ok(())
}
