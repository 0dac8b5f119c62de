//! Numbers with units in run files and options: counts as `64M` or `64Ki`, bytes as `5GB` or `4GiB`. Numbers
//! without a unit are counts or bytes; a size of so few bytes that a unit was probably meant is refused.

use std::fmt;
use std::str::FromStr;

/// A positive count, written as digits with or without a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(pub u64);

/// A positive number of bytes, written as digits with or without a decimal or binary unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// Smaller sizes need a unit: `40` probably means 40 GiB.
const LEAST_BARE_BYTES: u64 = 1 << 20;

/// The units of counts in messages, largest first.
const THOUSANDS: [(&str, u64); 3] = [("G", 1_000_000_000), ("M", 1_000_000), ("K", 1_000)];

/// The other units in which counts may be written.
const OTHER_COUNTS: [(&str, u64); 6] = [
    ("T", 1_000_000_000_000),
    ("B", 1_000_000_000),
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
];

/// The units of counts, for messages.
pub const COUNT_UNITS: &str = "K, M, G or B, T; Ki, Mi, Gi, Ti";

/// A number with or without a unit of counts; `None` for anything else, and for more than can be counted.
pub fn parse_count(text: &str) -> Option<u64> {
    parse(text, &THOUSANDS).or_else(|| parse(text, &OTHER_COUNTS))
}

/// The units of sizes. A unit precedes those that are suffixes of it.
const BYTES: [(&str, u64); 9] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];

impl FromStr for Count {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let count = parse_count(text).filter(|&count| count > 0);
        count.map(Count).ok_or("write a number from 1 on, such as 64M, 64Ki or 500000")
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = parse(text, &BYTES).filter(|&bytes| bytes > 0);
        let bytes = bytes.ok_or("write a number of bytes from 1 on, such as 500MB, 5GB or 4GiB")?;
        match text.parse::<u64>() {
            Ok(bare) if bare < LEAST_BARE_BYTES => Err(format!(
                "without a unit it is {bare} bytes; write {bare}GiB or {bare}GB, or {bare}B if you mean bytes"
            )),
            _ => Ok(Size(bytes)),
        }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(self.0, &THOUSANDS))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(self.0, &BYTES))
    }
}

/// Digits with or without a unit; nothing for anything else, and for more than can be counted.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let with_unit = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)));
    let (digits, unit) = with_unit.unwrap_or((text, 1));
    let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse::<u64>().ok().filter(|_| all_digits)?.checked_mul(unit)
}

/// The number in the first unit of which it is a whole multiple.
fn shown(number: u64, units: &[(&str, u64)]) -> String {
    match units.iter().find(|(_, unit)| number.is_multiple_of(*unit)) {
        Some((name, unit)) => format!("{}{name}", number / unit),
        None => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_with_and_without_a_suffix_and_shown_with_one() {
        for (text, count, shown) in [
            ("64", 64, "64"),
            ("64M", 64_000_000, "64M"),
            ("1500K", 1_500_000, "1500K"),
            ("2000M", 2_000_000_000, "2G"),
        ] {
            assert_eq!(text.parse(), Ok(Count(count)));
            assert_eq!(Count(count).to_string(), shown);
        }
        for (text, count) in [("64Ki", 65_536), ("3B", 3_000_000_000), ("2T", 2_000_000_000_000), ("0", 0)] {
            assert_eq!(parse_count(text), Some(count), "{text}");
        }
        for wrong in ["", "0", "0M", "M", "1.5M", "-1", "+1", "64m", "64 M", "64MB", "99999999999999G"] {
            assert!(wrong.parse::<Count>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn sizes_are_read_in_decimal_and_binary_units_and_shown_in_one() {
        for (text, bytes, shown) in [
            ("1048577", 1_048_577, "1048577B"),
            ("17B", 17, "17B"),
            ("500MB", 500_000_000, "500MB"),
            ("5GB", 5_000_000_000, "5GB"),
            ("4GiB", 4 << 30, "4GiB"),
            ("2048KiB", 2 << 20, "2MiB"),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
            assert_eq!(Size(bytes).to_string(), shown);
        }
        for wrong in ["", "GB", "0GB", "-1GB", "5XB", "5 GB", "5G", "5gb", "1.5GB", "1e9", "99999999999GB"] {
            assert!(wrong.parse::<Size>().is_err_and(|e| e.contains("5GB")), "{wrong:?}");
        }
        let said = "40".parse::<Size>().expect_err("too few to be bytes");
        assert_eq!(said, "without a unit it is 40 bytes; write 40GiB or 40GB, or 40B if you mean bytes");
        assert!("1048575".parse::<Size>().is_err() && "1048576".parse::<Size>().is_ok());
    }
}
