//! Numbers with units in run files and options: counts as `64M` or `64Ki`, bytes as `5GB` or `1.5GiB`, rates
//! as `12.5GB/s` or `400Gbit/s`. Numbers without a unit are counts or bytes; a size of so few bytes that a
//! unit was probably meant is refused, and so is a unit that could mean bits or bytes.

use std::fmt;
use std::str::FromStr;

/// A positive count, written as digits with or without a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(pub u64);

/// A positive number of bytes, written as digits with or without a decimal or binary unit. Fractions of a
/// unit are rounded to the nearest byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// Bytes per second, more than none, written as bytes or bits of a unit per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate(pub f64);

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

/// A number with or without a unit of counts; `None` for anything else, for more than can be counted, and for
/// fractions that are not whole: `1.5K` is 1500, and `1.5` is none.
pub fn parse_count(text: &str) -> Option<u64> {
    let found = parse(text, &THOUSANDS).or_else(|| parse(text, &OTHER_COUNTS))?;
    found.is_whole.then_some(found.nearest)
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

/// The units of bits, in bytes times eight.
const BITS: [(&str, u64); 5] =
    [("Tbit", 1_000_000_000_000), ("Gbit", 1_000_000_000), ("Mbit", 1_000_000), ("Kbit", 1_000), ("bit", 1)];

impl FromStr for Count {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let count = parse_count(text).filter(|&count| count > 0);
        count.map(Count).ok_or("write a whole number from 1 on, such as 64M, 1.5M, 64Ki or 500000")
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        // Only such a number is proposed with a unit.
        if parse(&format!("{number}GB"), &BYTES).is_some_and(|of| of.nearest > 0) {
            match &text[number.len()..] {
                "" if number.contains('.') => {
                    return Err(format!("a size needs a unit: write {number}GiB or {number}GB"));
                }
                "" if number.parse().is_ok_and(|bare: u64| (1..LEAST_BARE_BYTES).contains(&bare)) => {
                    return Err(format!(
                        "without a unit it is {number} bytes; write {number}GiB or {number}GB, or {number}B if you mean bytes"
                    ));
                }
                unit @ ("K" | "M" | "G" | "T") => {
                    return Err(format!(
                        "write {number}{unit}iB or {number}{unit}B, as {unit} could mean both"
                    ));
                }
                unit => {
                    if let Some((own, _)) = BYTES.iter().find(|(own, _)| is_misspelt(own, unit)) {
                        return Err(format!("the unit is written {own}: {number}{own}"));
                    }
                }
            }
        }
        // A number of bytes is whole.
        let bytes = parse(text, &BYTES).filter(|of| of.nearest > 0 && (of.is_whole || of.unit > 1));
        bytes
            .map(|bytes| Size(bytes.nearest))
            .ok_or_else(|| "write a number of bytes from 1 on, such as 500MB, 5GB or 1.5GiB".to_owned())
    }
}

/// True for `gb` or `gib` instead of `GB` and `GiB`, which can only mean bytes.
fn is_misspelt(own: &str, unit: &str) -> bool {
    own != unit && own.eq_ignore_ascii_case(unit) && !unit.is_empty()
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || "write bytes or bits per second, such as 50GB/s, 12.5GB/s or 400Gbit/s".to_owned();
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '/');
        if !number.parse::<f64>().is_ok_and(|number| number.is_finite() && number > 0.0) {
            return Err(wrong());
        }
        let unit = &text[number.len()..];
        let base = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps")).unwrap_or(unit);
        let is_unit = |(own, _): &&(&str, u64)| *own == base;
        let (of_bytes, of_bits) = (BYTES.iter().find(is_unit), BITS.iter().find(is_unit));
        match (of_bytes.or(of_bits), unit.ends_with("/s")) {
            (Some(_), true) => {}
            (Some((own, _)), false) => return Err(format!("a rate is per second: {number}{own}/s")),
            (None, _) if base.ends_with('B') || base.to_lowercase().ends_with("ib") => {
                return Err(match BYTES.iter().find(|(own, _)| is_misspelt(own, base)) {
                    Some((own, _)) => format!("the unit is written {own}/s: {number}{own}/s"),
                    None => wrong(),
                });
            }
            // `Gb`, `gb` and `Gbps` are read as bits by some, and as bytes by others.
            (None, _) => {
                let prefix = base.trim_end_matches(['b', 'B', 'i']).to_uppercase();
                return match prefix.as_str() {
                    "K" | "M" | "G" | "T" => Err(format!(
                        "it could mean bits or bytes; write {number}{prefix}bit/s or {number}{prefix}B/s"
                    )),
                    _ => Err(wrong()),
                };
            }
        }
        let scaled = |units: &[(&str, u64)], unit: &str| parse(&format!("{number}{unit}"), units);
        let bytes = match (of_bytes, of_bits) {
            (Some((unit, _)), _) => scaled(&BYTES, unit).map(|of| of.nearest as f64),
            (_, Some((unit, _))) => scaled(&BITS, unit).map(|of| of.nearest as f64 / 8.0),
            _ => None,
        };
        bytes.filter(|bytes| *bytes > 0.0).map(Rate).ok_or_else(wrong)
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

/// A number with a unit.
struct ParsedQuantity {
    /// The whole number that is nearest.
    nearest: u64,
    /// True if the number is whole.
    is_whole: bool,
    unit: u64,
}

/// Most digits after a point.
const MOST_DECIMALS: usize = 12;

/// Digits, which may have a point among them, with or without a unit; `None` for anything else, and for more
/// than can be counted.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<ParsedQuantity> {
    let with_unit = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)));
    let (number, unit) = with_unit.unwrap_or((text, 1));
    let (whole, decimals) = match number.split_once('.') {
        Some((whole, decimals)) if !decimals.is_empty() => (whole, decimals),
        Some(_) => return None,
        None => (number, ""),
    };
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(decimals) || decimals.len() > MOST_DECIMALS {
        return None;
    }
    let scale = 10_u128.pow(decimals.len() as u32);
    let fraction = if decimals.is_empty() { 0 } else { decimals.parse::<u128>().ok()? };
    // 64 bits, 40 bits and the unit's 40 are more than 128.
    let scaled =
        (u128::from(whole.parse::<u64>().ok()?).checked_mul(scale)? + fraction).checked_mul(unit.into())?;
    let nearest = u64::try_from(scaled.checked_add(scale / 2)? / scale).ok()?;
    Some(ParsedQuantity { nearest, is_whole: scaled.is_multiple_of(scale), unit })
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
        for (text, count) in [
            ("64Ki", 65_536),
            ("3B", 3_000_000_000),
            ("2T", 2_000_000_000_000),
            ("0", 0),
            ("1.5M", 1_500_000),
            ("0.5Ki", 512),
            ("2.50K", 2_500),
            ("0.001G", 1_000_000),
        ] {
            assert_eq!(parse_count(text), Some(count), "{text}");
        }
        // Of parts of a token there is no such number.
        for wrong in ["1.5", "1.3Ki", "0.0001K", "1.M", ".5M", "1.5.5M", "1e3", "1,5M"] {
            assert_eq!(parse_count(wrong), None, "{wrong}");
        }
        for wrong in ["", "0", "0M", "M", "0.0M", "-1", "+1", "64m", "64 M", "64MB", "99999999999999G"] {
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
            ("1.5GiB", 3 << 29, "1536MiB"),
            ("0.1KiB", 102, "102B"),
            ("12.5GB", 12_500_000_000, "12500MB"),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
            assert_eq!(Size(bytes).to_string(), shown);
        }
        for wrong in
            ["", "GB", "0GB", "-1GB", "5XB", "5 GB", "1.B", "0.5B", "1e9", "5GBB", "99999999999GB", "infGB"]
        {
            assert!(wrong.parse::<Size>().is_err_and(|e| e.contains("5GB")), "{wrong:?}");
        }
        for (ambiguous, said) in [
            ("5G", "write 5GiB or 5GB, as G could mean both"),
            ("1.5T", "write 1.5TiB or 1.5TB, as T could mean both"),
            ("5gb", "the unit is written GB: 5GB"),
            ("1.5gib", "the unit is written GiB: 1.5GiB"),
            ("1.5", "a size needs a unit: write 1.5GiB or 1.5GB"),
        ] {
            assert_eq!(ambiguous.parse::<Size>(), Err(said.to_owned()));
        }
        let said = "40".parse::<Size>().expect_err("too few to be bytes");
        assert_eq!(said, "without a unit it is 40 bytes; write 40GiB or 40GB, or 40B if you mean bytes");
        assert!("1048575".parse::<Size>().is_err() && "1048576".parse::<Size>().is_ok());
    }

    #[test]
    fn rates_are_bytes_or_bits_per_second() {
        for (text, bytes) in [
            ("48GB/s", 48e9),
            ("12.5GB/s", 12.5e9),
            ("12500MB/s", 12.5e9),
            ("1.5GiB/s", f64::from(3 << 29)),
            ("400Gbit/s", 50e9),
            ("1.6Tbit/s", 200e9),
            ("100Mbit/s", 12.5e6),
        ] {
            assert_eq!(text.parse(), Ok(Rate(bytes)), "{text}");
        }
        for (text, said) in [
            ("400Gb/s", "it could mean bits or bytes; write 400Gbit/s or 400GB/s"),
            ("400Gbps", "it could mean bits or bytes; write 400Gbit/s or 400GB/s"),
            ("1.5gb/s", "it could mean bits or bytes; write 1.5Gbit/s or 1.5GB/s"),
            ("50G", "it could mean bits or bytes; write 50Gbit/s or 50GB/s"),
            ("50GB", "a rate is per second: 50GB/s"),
            ("400Gbit", "a rate is per second: 400Gbit/s"),
            ("50GBps", "a rate is per second: 50GB/s"),
        ] {
            assert_eq!(text.parse::<Rate>(), Err(said.to_owned()), "{text}");
        }
        for wrong in
            ["", "fast", "50", "0GB/s", "-1GB/s", "GB/s", "50 GB/s", "infGB/s", "nanGB/s", "50/s", "50s"]
        {
            assert!(wrong.parse::<Rate>().is_err_and(|said| said.contains("12.5GB/s")), "{wrong:?}");
        }
    }
}
