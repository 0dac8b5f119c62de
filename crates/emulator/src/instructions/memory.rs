//! Loads and stores (PTX ISA, sections 9.7.9.8 to 9.7.9.11).

use super::{AnySource, AnyTarget, Decoded, Decoder, lanes, unknown};
use crate::context::{Context, Source};
use crate::fault::{Fault, FaultKind, Outcome};
use crate::kernel::Execute;
use crate::memory::{Bytes, outside};
use crate::ptx::{Class, Instruction, Operand, Space};
use crate::registers::{LANES, Lanes, lanes_of};

/// Where a space begins among generic addresses; global memory has its own addresses.
pub(crate) fn window(space: Space) -> u64 {
    match space {
        Space::Global | Space::Generic => 0,
        Space::Shared => 1 << 60,
        Space::Local => 2 << 60,
        Space::Param => 3 << 60,
    }
}

/// A memory operand: where it points to.
pub(super) struct Address {
    base: Base,
    offset: u64,
}

enum Base {
    Wide(Source<u64>),
    /// Shared memory has short addresses.
    Short(Source<u32>),
}

impl Address {
    pub(super) fn of(d: &Decoder<'_>, operand: &Operand) -> Decoded<Address> {
        let Operand::Address(base, offset) = operand else {
            return Err(format!("{operand:?} is no address"));
        };
        let base = match &**base {
            Operand::Register(register) if d.class(*register) == Class::B32 => Base::Short(d.source(base)?),
            base => Base::Wide(d.source(base)?),
        };
        Ok(Address { base, offset: *offset as u64 })
    }

    #[inline(always)]
    pub(super) fn read(&self, cx: &Context<'_>) -> Outcome<Lanes<u64>> {
        let mut addresses = match self.base {
            Base::Wide(source) => cx.value(source)?,
            Base::Short(source) => cx.value(source)?.map(u64::from),
        };
        for address in &mut addresses {
            *address = address.wrapping_add(self.offset);
        }
        Ok(addresses)
    }
}

impl Context<'_> {
    /// The bytes that a lane reaches at an address, which is a multiple of their number.
    #[inline]
    pub(super) fn reach(
        &self,
        lane: usize,
        space: Space,
        address: u64,
        bytes: u64,
        does: &str,
    ) -> Outcome<Bytes<'_>> {
        self.reach_aligned(lane, space, address, [bytes, bytes], does)
    }

    /// As [`Context::reach`], of an address that is a multiple of `align`.
    #[inline]
    pub(super) fn reach_aligned(
        &self,
        lane: usize,
        space: Space,
        address: u64,
        [bytes, align]: [u64; 2],
        does: &str,
    ) -> Outcome<Bytes<'_>> {
        let (space, offset) = match space {
            Space::Generic => {
                let spaces = [Space::Shared, Space::Local, Space::Param];
                let space = spaces.into_iter().find(|&space| address >> 60 == window(space) >> 60);
                space.map_or((Space::Global, address), |space| (space, address - window(space)))
            }
            _ => (space, address),
        };
        let found = match space {
            Space::Shared => self.shared.bytes(offset, bytes),
            Space::Local => self.local_bytes(lane, offset, bytes),
            Space::Param => self.launch.parameters.bytes(offset, bytes),
            _ => self.launch.memory.bytes(offset, bytes),
        };
        match found {
            Some(found) if address.is_multiple_of(align) => Ok(found),
            Some(_) => {
                let problem =
                    format!("{does} {bytes} bytes at {address:#x}, which is no multiple of {align}");
                Err(Fault::new(lane as u32, FaultKind::Alignment, problem))
            }
            None => {
                let what = match space {
                    Space::Shared => format!("{bytes} bytes at {offset} of a block's {}", self.shared.len()),
                    Space::Local => {
                        format!("{bytes} bytes at {offset} of a thread's {}", self.launch.code.local_bytes)
                    }
                    Space::Param => format!("{bytes} bytes at {offset} of the kernel's parameters"),
                    _ => self.launch.memory.describe(offset, bytes),
                };
                outside(lane as u32, &format!("{does} {}", name_of(space)), what)
            }
        }
    }

    /// The bytes of all lanes, where they lie one after the other; nothing where a closer look is needed.
    #[inline(always)]
    fn reach_all(&self, space: Space, addresses: &Lanes<u64>, bytes: u64) -> Option<Bytes<'_>> {
        let first = addresses[0];
        let mut differs = 0;
        for (lane, address) in addresses.iter().enumerate() {
            differs |= address ^ first.wrapping_add(lane as u64 * bytes);
        }
        if differs != 0 || self.active != u32::MAX || !first.is_multiple_of(bytes) {
            return None;
        }
        match space {
            Space::Shared => self.shared.bytes(first, LANES as u64 * bytes),
            Space::Global | Space::Generic => self.launch.memory.bytes(first, LANES as u64 * bytes),
            _ => None,
        }
    }

    /// N bytes of each active lane, and their marks where some were never written.
    #[inline(always)]
    fn gather<const N: usize>(&self, space: Space, addresses: &Lanes<u64>) -> Outcome<Gathered<N>> {
        if let Some(bytes) = self.reach_all(space, addresses, N as u64) {
            let marks = bytes.mark_rows::<N>();
            let is_written = marks.as_flattened().iter().fold(1, |all, mark| all & mark) != 0;
            return Ok((bytes.rows(), (!is_written).then(|| marks.map(|row| unwritten(&row)))));
        }
        let (mut data, mut marks, mut some) = ([[0; N]; LANES], [0u16; LANES], 0);
        for lane in lanes_of(self.active) {
            let bytes = self.reach(lane, space, addresses[lane], N as u64, "reads")?;
            data[lane] = bytes.read(0);
            marks[lane] = unwritten(&bytes.marks::<N>(0));
            some |= marks[lane];
        }
        Ok((data, (some != 0).then_some(marks)))
    }

    /// Writes N bytes of each active lane, with marks where some were never written.
    #[inline(always)]
    fn scatter<const N: usize>(
        &mut self,
        space: Space,
        addresses: &Lanes<u64>,
        data: &[[u8; N]; LANES],
        marks: Option<&Lanes<u16>>,
    ) -> Outcome {
        self.wrote = true;
        if let (Some(bytes), None) = (self.reach_all(space, addresses, N as u64), marks) {
            bytes.write_rows(data);
            return Ok(());
        }
        for lane in lanes_of(self.active) {
            let bytes = self.reach(lane, space, addresses[lane], N as u64, "writes")?;
            let unwritten = marks.map_or(0, |marks| marks[lane]);
            bytes.write_marked(0, data[lane], std::array::from_fn(|n| u8::from(unwritten >> n & 1 == 0)));
        }
        Ok(())
    }
}

/// Bytes of all lanes, and a bit for each of a lane's bytes that was never written, if there is one.
type Gathered<const N: usize> = ([[u8; N]; LANES], Option<Lanes<u16>>);

fn unwritten<const N: usize>(marks: &[u8; N]) -> u16 {
    marks.iter().enumerate().map(|(n, mark)| u16::from(*mark == 0) << n).sum()
}

fn name_of(space: Space) -> &'static str {
    match space {
        Space::Global | Space::Generic => "global memory",
        Space::Shared => "shared memory",
        Space::Local => "local memory",
        Space::Param => "parameters",
    }
}

/// What an opcode says of the access.
pub(super) struct Access {
    pub(super) space: Space,
    /// Bytes of an element.
    pub(super) bytes: usize,
    pub(super) is_signed: bool,
    pub(super) count: usize,
}

impl Access {
    pub(super) fn of(instruction: &Instruction, parts: &[&str]) -> Decoded<Access> {
        let mut access = Access { space: Space::Generic, bytes: 0, is_signed: false, count: 1 };
        for part in parts {
            match *part {
                // Order, scope and hints to caches: accesses are executed one after the other.
                "volatile" | "relaxed" | "acquire" | "release" | "weak" | "cta" | "gpu" | "sys" | "nc"
                | "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "L1::no_allocate" => {}
                "global" => access.space = Space::Global,
                "shared" | "shared::cta" => access.space = Space::Shared,
                "local" => access.space = Space::Local,
                "param" => access.space = Space::Param,
                "v2" => access.count = 2,
                "v4" => access.count = 4,
                "b8" | "u8" => access.bytes = 1,
                "s8" => (access.bytes, access.is_signed) = (1, true),
                "b16" | "u16" => access.bytes = 2,
                "s16" => (access.bytes, access.is_signed) = (2, true),
                "b32" | "u32" | "s32" | "f32" => access.bytes = 4,
                "b64" | "u64" | "s64" | "f64" => access.bytes = 8,
                _ => return unknown(instruction),
            }
        }
        if access.bytes == 0 || access.bytes * access.count > 16 { unknown(instruction) } else { Ok(access) }
    }
}

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let access = Access::of(instruction, parts)?;
    let is_load = instruction.parts()[0] == "ld";
    let [first, second] = &instruction.operands[..] else { return unknown(instruction) };
    let (data, address) = if is_load { (first, second) } else { (second, first) };
    let address = Address::of(d, address)?;
    let elements = d.elements(data);
    if elements.len() != access.count {
        return unknown(instruction);
    }
    macro_rules! by_size {
        ($make:ident, $data:expr) => {
            match access.bytes * access.count {
                1 => $make::<1>(access, address, $data),
                2 => $make::<2>(access, address, $data),
                4 => $make::<4>(access, address, $data),
                8 => $make::<8>(access, address, $data),
                _ => $make::<16>(access, address, $data),
            }
        };
    }
    lanes(if is_load {
        let targets =
            elements.iter().map(|target| d.any_target(target)).collect::<Decoded<Vec<AnyTarget>>>()?;
        by_size!(load, targets)
    } else {
        let sources = elements.iter().map(|source| d.any(source)).collect::<Decoded<Vec<AnySource>>>()?;
        by_size!(store, sources)
    })
}

fn load<const N: usize>(access: Access, address: Address, targets: Vec<AnyTarget>) -> Execute {
    Box::new(move |cx| {
        let addresses = address.read(cx)?;
        let (data, marks) = cx.gather::<N>(access.space, &addresses)?;
        for (n, target) in targets.iter().enumerate() {
            let values: Lanes<u64> = match access.bytes {
                4 => std::array::from_fn(|lane| {
                    element::<4, N>(&data[lane], n).map_or(0, u32::from_le_bytes).into()
                }),
                8 => {
                    std::array::from_fn(|lane| element::<8, N>(&data[lane], n).map_or(0, u64::from_le_bytes))
                }
                2 => std::array::from_fn(|lane| {
                    let value = element::<2, N>(&data[lane], n).map_or(0, u16::from_le_bytes);
                    if access.is_signed { value as i16 as u64 } else { value.into() }
                }),
                _ => std::array::from_fn(|lane| {
                    let value = element::<1, N>(&data[lane], n).map_or(0, u8::from_le_bytes);
                    if access.is_signed { value as i8 as u64 } else { value.into() }
                }),
            };
            match &marks {
                None => target.write(cx, &values),
                Some(marks) => {
                    let of_element = |lane: usize| {
                        let bits = marks[lane] >> (n * access.bytes) & ((1u32 << access.bytes) - 1) as u16;
                        // The bytes that extend a signed number are as its last one.
                        let extends = access.is_signed && bits >> (access.bytes - 1) != 0;
                        bits as u8 | if extends { u8::MAX << access.bytes } else { 0 }
                    };
                    target.write_marked(cx, &values, &std::array::from_fn(of_element));
                }
            }
        }
        Ok(())
    })
}

/// Element `n` of E bytes.
#[inline(always)]
fn element<const E: usize, const N: usize>(bytes: &[u8; N], n: usize) -> Option<[u8; E]> {
    bytes.get(n * E..)?.first_chunk::<E>().copied()
}

fn store<const N: usize>(access: Access, address: Address, sources: Vec<AnySource>) -> Execute {
    Box::new(move |cx| {
        let addresses = address.read(cx)?;
        let mut data = [[0; N]; LANES];
        for (n, source) in sources.iter().enumerate() {
            let values = source.read(cx);
            for lane in 0..LANES {
                let bytes = values[lane].to_le_bytes();
                match access.bytes {
                    4 => put::<4, N>(&mut data[lane], n, &bytes),
                    8 => put::<8, N>(&mut data[lane], n, &bytes),
                    2 => put::<2, N>(&mut data[lane], n, &bytes),
                    _ => put::<1, N>(&mut data[lane], n, &bytes),
                }
            }
        }
        if !sources.iter().any(|source| source.is_marked(cx)) {
            return cx.scatter(access.space, &addresses, &data, None);
        }
        let mut marks = [0u16; LANES];
        for (n, source) in sources.iter().enumerate() {
            let limit = ((1u32 << access.bytes) - 1) as u16;
            for (all, one) in marks.iter_mut().zip(source.unwritten(cx)) {
                *all |= (u16::from(one) & limit) << (n * access.bytes);
            }
        }
        cx.scatter(access.space, &addresses, &data, Some(&marks))
    })
}

#[inline(always)]
fn put<const E: usize, const N: usize>(to: &mut [u8; N], n: usize, value: &[u8; 8]) {
    if let (Some(to), Some(value)) =
        (to.get_mut(n * E..).and_then(<[u8]>::first_chunk_mut::<E>), value.first_chunk::<E>())
    {
        *to = *value;
    }
}
