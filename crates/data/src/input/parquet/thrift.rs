//! Structures in Thrift's compact protocol, read only to check them: parquet's page headers and footers.

use std::io::{self, ErrorKind, Read};

// Types of values, as the protocol numbers them.
/// End of a structure.
pub(super) const STOP: u8 = 0;
pub(super) const TRUE: u8 = 1;
pub(super) const FALSE: u8 = 2;
pub(super) const BYTE: u8 = 3;
pub(super) const I16: u8 = 4;
pub(super) const I64: u8 = 6;
pub(super) const DOUBLE: u8 = 7;
pub(super) const BINARY: u8 = 8;
pub(super) const LIST: u8 = 9;
pub(super) const SET: u8 = 10;
pub(super) const STRUCT: u8 = 12;

/// Gets the ids of a field and, before it, of those that hold it; its type; and the value of a whole number,
/// the length of bytes, or 0.
pub(super) type OnField<'f> = dyn FnMut(&[i64], u8, i64) -> io::Result<()> + 'f;

/// Nesting of values that is accepted. The format needs less.
const MAX_DEPTH: usize = 16;

/// Reads the fields of a structure up to its end. `on_field` gets each field once it is read, then the end of
/// the structure as a field 0 of type [`STOP`].
pub(super) fn read_fields(input: &mut impl Read, on_field: &mut OnField) -> io::Result<()> {
    read_value(input, STRUCT, MAX_DEPTH, &mut Vec::new(), on_field).map(drop)
}

/// Reads a value of a type, down to `depth` levels. `path` holds the ids of the fields that hold it.
fn read_value(
    input: &mut impl Read,
    kind: u8,
    depth: usize,
    path: &mut Vec<i64>,
    on_field: &mut OnField,
) -> io::Result<i64> {
    let Some(depth) = depth.checked_sub(1) else {
        return Err(invalid(format!("values nest over {MAX_DEPTH} levels")));
    };
    match kind {
        // They are in the type.
        TRUE | FALSE => {}
        BYTE => drop(read_byte(input)?),
        I16..=I64 => return read_signed(input),
        DOUBLE => skip(input, 8)?,
        BINARY => {
            let len = read_unsigned(input)?;
            skip(input, len)?;
            return Ok(len.try_into().unwrap_or(i64::MAX));
        }
        LIST | SET => {
            let header = read_byte(input)?;
            let len = match header >> 4 {
                15 => read_unsigned(input)?,
                len => len.into(),
            };
            let element = header & 15;
            // The parquet crate skips them by the billion, because it takes no byte for each.
            if len > 0 && matches!(element, TRUE | FALSE) {
                return Err(invalid("a list of booleans, which the format does not have"));
            }
            for _ in 0..len {
                read_value(input, element, depth, path, on_field)?;
            }
        }
        STRUCT => {
            let mut id = 0_i64;
            loop {
                let byte = read_byte(input)?;
                let kind = byte & 15;
                id = match byte >> 4 {
                    _ if byte == STOP => 0,
                    0 => read_signed(input)?,
                    delta => id.saturating_add(delta.into()),
                };
                path.push(id);
                if byte == STOP {
                    on_field(path, kind, 0)?;
                } else if (1..=i16::MAX.into()).contains(&id) {
                    let number = read_value(input, kind, depth, path, on_field)?;
                    on_field(path, kind, number)?;
                } else {
                    return Err(invalid(format!("a structure has a field {id} of type {kind}")));
                }
                path.pop();
                if byte == STOP {
                    break;
                }
            }
        }
        other => return Err(invalid(format!("a value of type {other}, which the format does not have"))),
    }
    Ok(0)
}

pub(super) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, problem.into())
}

fn read_byte(input: &mut impl Read) -> io::Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn skip(input: &mut impl Read, bytes: u64) -> io::Result<()> {
    match io::copy(&mut input.take(bytes), &mut io::sink())? {
        skipped if skipped == bytes => Ok(()),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// A number of up to 64 bits, seven bits in a byte, the lowest first.
fn read_unsigned(input: &mut impl Read) -> io::Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = read_byte(input)?;
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(invalid("a number has more than 64 bits"))
}

/// A number whose lowest bit is the sign.
fn read_signed(input: &mut impl Read) -> io::Result<i64> {
    let number = read_unsigned(input)?;
    Ok((number >> 1) as i64 ^ -((number & 1) as i64))
}
