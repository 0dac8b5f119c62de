//! Loads, stores, conversions of addresses, fences and prefetches (sections 9.7.9 and 9.7.13).

use super::form::Form;
use super::{Device, Grid, arguments, random};
use std::collections::BTreeMap;

/// Threads of a block; also the bytes for each of them in every space.
const THREADS: usize = 64;
const OWN: usize = 64;

/// Register classes and their bytes. Registers may be wider than the data of an access.
const CLASSES: [(&str, usize); 3] = [("b16", 2), ("b32", 4), ("b64", 8)];

/// A load or a store.
#[derive(Clone, Copy)]
struct Access {
    /// The space that the address points into.
    place: Place,
    is_generic: bool,
    /// Bytes of an element.
    bytes: usize,
    count: usize,
    is_signed: bool,
    /// True if registers have exactly the element's size, as those of floating point do.
    is_exact: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Global,
    Shared,
    Local,
    Param,
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![
        Form::by("cvta.shared.u64", |_| check_load("ld.u32")),
        Form::by("cvta.local.u64", |_| check_load("ld.u32")),
        Form::by("cvta.to.global.u64", |opcode| addresses_are_converted_back(opcode, "global")),
        Form::by("cvta.to.shared.u64", |opcode| addresses_are_converted_back(opcode, "shared")),
        Form::by("membar.gl", |opcode| hints_change_nothing(opcode, "")),
        Form::by("prefetch.global.L2", |opcode| hints_change_nothing(opcode, "[%to]")),
    ];
    let types =
        ["u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "f32", "u64", "s64", "b64", "f64"];
    for space in ["", ".global", ".shared", ".local", ".param"] {
        for ty in types {
            for vector in ["", ".v2", ".v4"] {
                let access = access_of(&format!("x{space}{vector}.{ty}"));
                if access.count > 1 && (access.bytes == 1 || access.bytes * access.count > 16) {
                    continue;
                }
                let opcode = |name: &str| -> &'static str { format!("{name}{space}{vector}.{ty}").leak() };
                forms.push(Form::by(opcode("ld"), check_load));
                if space != ".param" {
                    forms.push(Form::by(opcode("st"), check_store));
                }
            }
        }
    }
    for opcode in [
        "ld.acquire.gpu.global.u32",
        "ld.acquire.gpu.u32",
        "ld.global.cg.f32",
        "ld.global.nc.L1::no_allocate.v4.u32",
        "ld.global.nc.f32",
        "ld.global.nc.u32",
        "ld.global.nc.v2.u32",
        "ld.global.nc.v4.u32",
        "ld.volatile.global.u32",
        "ld.volatile.u32",
    ] {
        forms.push(Form::by(opcode, check_load));
    }
    for opcode in ["st.release.gpu.u32", "st.volatile.global.u32"] {
        forms.push(Form::by(opcode, check_store));
    }
    forms
}

/// The access of an opcode.
fn access_of(opcode: &str) -> Access {
    let parts: Vec<&str> = opcode.split('.').collect();
    let has = |part: &str| parts.contains(&part);
    let ty = parts[parts.len() - 1];
    let place = match () {
        _ if has("shared") => Place::Shared,
        _ if has("local") => Place::Local,
        _ if has("param") => Place::Param,
        _ => Place::Global,
    };
    Access {
        place,
        is_generic: place == Place::Global && !has("global"),
        bytes: ty[1..].parse::<usize>().expect("bits") / 8,
        count: if has("v4") {
            4
        } else if has("v2") {
            2
        } else {
            1
        },
        is_signed: ty.starts_with('s'),
        is_exact: ty.starts_with('f'),
    }
}

/// Spaces that a generic address may point to.
fn places_of(access: Access) -> Vec<Access> {
    match access.is_generic {
        true => [Place::Global, Place::Shared, Place::Local].map(|place| Access { place, ..access }).into(),
        false => vec![access],
    }
}

fn classes_of(access: Access) -> impl Iterator<Item = (&'static str, usize)> {
    CLASSES
        .into_iter()
        .filter(move |(_, bytes)| *bytes == access.bytes || *bytes > access.bytes && !access.is_exact)
}

/// Bytes of the area that a thread can access.
fn reach(place: Place) -> usize {
    if matches!(place, Place::Global | Place::Shared) { THREADS * OWN } else { OWN }
}

/// Code that copies a thread's own bytes between `%own`, in global memory, and its area in shared or local
/// memory.
fn copies(place: Place, is_fill: bool) -> String {
    let (space, first) = match place {
        Place::Shared => {
            ("shared", "mul.wide.u32 %o, %t, 64;\nmov.u64 %p, area_shared;\nadd.s64 %p, %p, %o;\n")
        }
        Place::Local => ("local", "mov.u64 %p, area_local;\n"),
        _ => return String::new(),
    };
    let mut text = String::from(first);
    for at in (0..OWN).step_by(4) {
        text += &match is_fill {
            true => format!("ld.global.u32 %v, [%own+{at}];\nst.{space}.u32 [%p+{at}], %v;\n"),
            false => format!("ld.{space}.u32 %v, [%p+{at}];\nst.global.u32 [%own+{at}], %v;\n"),
        };
    }
    text
}

/// The start of a kernel: fills the area, and computes the thread's address and predicate.
fn prologue(access: Access, displacement: i64) -> String {
    let base = match access.place {
        Place::Global => "mov.u64 %p, %from;\n".to_owned(),
        Place::Shared if access.is_generic => {
            "mov.u64 %p, area_shared;\ncvta.shared.u64 %p, %p;\n".to_owned()
        }
        Place::Local if access.is_generic => "mov.u64 %p, area_local;\ncvta.local.u64 %p, %p;\n".to_owned(),
        Place::Shared => "mov.u64 %p, area_shared;\n".to_owned(),
        Place::Local => "mov.u64 %p, area_local;\n".to_owned(),
        Place::Param => "mov.b64 %p, area_param;\n".to_owned(),
    };
    format!(
        ".visible .entry access(.param .u64 from, .param .u64 offsets, .param .u64 to,\n\
         .param .align 16 .b8 area_param[{OWN}])\n{{\n\
         .reg .pred %g;\n.reg .b32 %t, %v, %r;\n.reg .b64 %from, %offsets, %to, %own, %o, %p, %w;\n\
         .reg .b16 %b16_<4>;\n.reg .b32 %b32_<4>;\n.reg .b64 %b64_<4>;\n\
         .shared .align 16 .b8 before[64];\n.shared .align 16 .b8 area_shared[{}];\n.local .align 16 .b8 area_local[{OWN}];\n\
         mov.u32 %t, %tid.x;\nld.param.u64 %from, [from];\nld.param.u64 %offsets, [offsets];\nld.param.u64 %to, [to];\n\
         mul.wide.u32 %o, %t, {OWN};\nadd.s64 %own, %from, %o;\n{}bar.sync 0;\n{base}\
         mul.wide.u32 %o, %t, 8;\nadd.s64 %offsets, %offsets, %o;\nmul.wide.u32 %o, %t, 32;\nadd.s64 %to, %to, %o;\n\
         ld.global.u64 %o, [%offsets];\nsetp.ne.s64 %g, %o, -1;\nadd.s64 %p, %p, %o;\nadd.s64 %p, %p, {};\n",
        THREADS * OWN,
        copies(access.place, true),
        -displacement,
    )
}

/// Offset of each thread's bytes in its area; `None` for threads that do not take part.
fn offsets(access: Access, pattern: usize, seed: &str) -> Vec<Option<u64>> {
    let mut random = random(seed);
    let size = access.bytes * access.count;
    let slots = reach(access.place) / size;
    // An odd factor permutes the slots.
    let factor = 2 * random.below(1000) + 1;
    let start = random.below(slots);
    let slot = |thread: usize| match pattern {
        0 => thread,
        1 => THREADS - 1 - thread,
        _ => factor * thread + start,
    };
    let offsets = (0..THREADS).map(|thread| ((slot(thread) % slots) * size) as u64);
    offsets.map(|offset| (pattern != 3 || random.below(3) > 0).then_some(offset)).collect()
}

fn register(class: &str, n: usize) -> String {
    format!("%{class}_{n}")
}

/// The operand for the data of an access.
fn registers(access: Access, class: &str) -> String {
    let all: Vec<String> = (0..access.count).map(|n| register(class, n)).collect();
    if access.count == 1 { all[0].clone() } else { format!("{{{}}}", all.join(", ")) }
}

/// The address operand, of 64 bits or, for shared memory, of 32, and the instruction that prepares it.
fn address(access: Access, displacement: i64, is_short: bool) -> (&'static str, String) {
    let offset = if displacement == 0 { String::new() } else { format!("+{displacement}") };
    match is_short && access.place == Place::Shared && !access.is_generic {
        true => ("cvt.u32.u64 %r, %p;\n", format!("[%r{offset}]")),
        false => ("", format!("[%p{offset}]")),
    }
}

fn content(seed: &str, bytes: usize) -> Vec<u8> {
    let mut random = random(seed);
    (0..bytes).map(|_| random.draw() as u8).collect()
}

fn words(offsets: &[Option<u64>]) -> Vec<u8> {
    offsets.iter().flat_map(|offset| offset.unwrap_or(u64::MAX).to_le_bytes()).collect()
}

/// Loads with all classes of registers, in all orders of addresses.
fn check_load(opcode: &str) -> Result<(), String> {
    for access in places_of(access_of(opcode)) {
        for (class, width) in classes_of(access) {
            for pattern in 0..4 {
                let displacement = [0, 16, -16][(pattern + width) % 3];
                let name = format!("{opcode} {class} {:?} {pattern}", access.place);
                load(opcode, access, class, width, pattern, displacement)
                    .map_err(|e| format!("{name}: {e}"))?;
            }
        }
    }
    Ok(())
}

fn load(
    opcode: &str,
    access: Access,
    class: &str,
    width: usize,
    pattern: usize,
    displacement: i64,
) -> Result<(), String> {
    let (shorten, from) = address(access, displacement, pattern % 2 == 1);
    let mut text = prologue(access, displacement) + shorten;
    for n in 0..access.count {
        text += &format!("mov.{class} {}, 21845;\n", register(class, n));
    }
    text += &format!("@%g {opcode} {}, {from};\n", registers(access, class));
    for n in 0..access.count {
        text += &match class {
            "b16" => format!("cvt.u64.u16 %w, {};\n", register(class, n)),
            "b32" => format!("cvt.u64.u32 %w, {};\n", register(class, n)),
            _ => format!("mov.b64 %w, {};\n", register(class, n)),
        };
        text += &format!("st.global.u64 [%to+{}], %w;\n", 8 * n);
    }
    text += "ret;\n}\n";

    let mut device = Device::new();
    let (global, param) = (content(opcode, THREADS * OWN), content("parameters", OWN));
    let offsets = offsets(access, pattern, opcode);
    let from = device.store(&global);
    let to = device.store(&[0; THREADS * 32]);
    let offsets_at = device.store(&words(&offsets));
    let given = [arguments(&[from, offsets_at, to]), vec![0; 8], param.clone()].concat();
    device.run(&text, Grid::row(1, THREADS), &given)?;
    let found = device.load_words(to, 4 * THREADS)?;
    for thread in 0..THREADS {
        let area = match access.place {
            Place::Global | Place::Shared => &global[..],
            Place::Local => &global[thread * OWN..][..OWN],
            Place::Param => &param[..],
        };
        for n in 0..access.count {
            let expected = match offsets[thread] {
                None => 21845,
                Some(offset) => {
                    let bytes = &area[offset as usize + n * access.bytes..][..access.bytes];
                    let value = bytes.iter().rev().fold(0i128, |sum, &byte| sum << 8 | i128::from(byte));
                    let is_negative = access.is_signed && bytes[access.bytes - 1] >= 128;
                    let value = if is_negative { value - (1 << (8 * access.bytes)) } else { value };
                    value as u64 & (u64::MAX >> (64 - 8 * width))
                }
            };
            if found[4 * thread + n] != expected {
                let found = found[4 * thread + n];
                return Err(format!("element {n} of thread {thread} is {found:#x} and not {expected:#x}"));
            }
        }
    }
    Ok(())
}

/// Stores from all classes of registers, in all orders of addresses.
fn check_store(opcode: &str) -> Result<(), String> {
    for access in places_of(access_of(opcode)) {
        for (class, _) in classes_of(access) {
            for pattern in 0..4 {
                let displacement = [0, -16, 16][pattern % 3];
                let name = format!("{opcode} {class} {:?} {pattern}", access.place);
                store(opcode, access, class, pattern, displacement).map_err(|e| format!("{name}: {e}"))?;
            }
        }
    }
    Ok(())
}

fn store(opcode: &str, access: Access, class: &str, pattern: usize, displacement: i64) -> Result<(), String> {
    let (shorten, target) = address(access, displacement, pattern % 2 == 1);
    let mut text = prologue(access, displacement) + shorten;
    for n in 0..access.count {
        text += &format!("ld.global.{class} {}, [%to+{}];\n", register(class, n), 8 * n);
    }
    text += &format!("@%g {opcode} {target}, {};\nbar.sync 0;\n", registers(access, class));
    text += &copies(access.place, false);
    text += "ret;\n}\n";

    let mut device = Device::new();
    let (before, values) = (content(opcode, THREADS * OWN), content("values", THREADS * 32));
    let offsets = offsets(access, pattern, opcode);
    let from = device.store(&before);
    let (to, offsets_at) = (device.store(&values), device.store(&words(&offsets)));
    let given = [arguments(&[from, offsets_at, to]), vec![0; 8 + OWN]].concat();
    device.run(&text, Grid::row(1, THREADS), &given)?;
    let mut expected = before;
    for (thread, offset) in offsets.iter().enumerate() {
        let Some(offset) = *offset else { continue };
        let own = if access.place == Place::Local { thread * OWN } else { 0 };
        for n in 0..access.count {
            let at = own + offset as usize + n * access.bytes;
            expected[at..][..access.bytes].copy_from_slice(&values[thread * 32 + 8 * n..][..access.bytes]);
        }
    }
    let found = device.load(from, THREADS * OWN)?;
    let differing: BTreeMap<usize, [u8; 2]> =
        (0..found.len()).filter(|&n| found[n] != expected[n]).map(|n| (n, [found[n], expected[n]])).collect();
    match differing.first_key_value() {
        None => Ok(()),
        Some(first) => Err(format!("{} bytes differ, the first {first:?}", differing.len())),
    }
}

/// A generic address, converted to its space, names the same bytes.
fn addresses_are_converted_back(opcode: &str, space: &str) -> Result<(), String> {
    let text = format!(
        ".{space} .align 8 .u32 there;\n.visible .entry convert(.param .u64 to)\n{{\n.reg .b32 %r<3>;\n\
         .reg .b64 %p, %q, %to;\nld.param.u64 %to, [to];\nmov.u64 %p, there;\nmov.u32 %r1, 123;\n\
         st.{space}.u32 [%p], %r1;\ncvta.{space}.u64 %q, %p;\nld.u32 %r1, [%q];\n{opcode} %q, %q;\n\
         ld.{space}.u32 %r2, [%q];\nadd.s32 %r1, %r1, %r2;\nst.global.u32 [%to], %r1;\nret;\n}}\n"
    );
    let mut device = Device::new();
    let to = device.allocate(4);
    device.run(&text, Grid::row(1, 1), &arguments(&[to]))?;
    let found = device.load(to, 4)?;
    if found == 246u32.to_le_bytes() { Ok(()) } else { Err(format!("{found:?} is not twice 123")) }
}

/// Fences and prefetches change neither memory nor registers.
fn hints_change_nothing(opcode: &str, operand: &str) -> Result<(), String> {
    let text = format!(
        ".visible .entry hint(.param .u64 to)\n{{\n.reg .b32 %t;\n.reg .b64 %to, %o;\nld.param.u64 %to, [to];\n\
         mov.u32 %t, %tid.x;\nmul.wide.u32 %o, %t, 4;\nadd.s64 %to, %to, %o;\nst.global.u32 [%to], %t;\n\
         {opcode} {operand};\nld.global.u32 %t, [%to];\nadd.s32 %t, %t, 1;\nst.global.u32 [%to], %t;\nret;\n}}\n"
    );
    let mut device = Device::new();
    let to = device.allocate(4 * THREADS);
    device.run(&text, Grid::row(1, THREADS), &arguments(&[to]))?;
    let expected: Vec<u8> = (1..=THREADS as u32).flat_map(|n| n.to_le_bytes()).collect();
    if device.load(to, 4 * THREADS)? == expected { Ok(()) } else { Err("memory differs".into()) }
}
