//! Numbers with units, as options take them: bytes as `5GB` or `4GiB`, counts as `64M`. A number alone is bytes, or ones.

/// Bytes: decimal units and, with an `i`, binary ones.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 10] = [
        ("", 1),
        ("b", 1),
        ("kb", 1_000),
        ("mb", 1_000_000),
        ("gb", 1_000_000_000),
        ("tb", 1_000_000_000_000),
        ("kib", 1 << 10),
        ("mib", 1 << 20),
        ("gib", 1 << 30),
        ("tib", 1 << 40),
    ];
    parse(text, &UNITS)
        .ok_or_else(|| "a size is written as 500MB, 5GB or 4GiB, and is at least 1 byte".to_owned())
}

/// A count: k, M, B and T are thousands, millions, billions and trillions.
pub(crate) fn count(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 5] =
        [("", 1), ("k", 1_000), ("m", 1_000_000), ("b", 1_000_000_000), ("t", 1_000_000_000_000)];
    parse(text, &UNITS).ok_or_else(|| "a count is written as 500k, 64M or 1.5B, and is at least 1".to_owned())
}

/// `number unit`, the unit in any case; nothing for what is no such thing, less than 1, or too large to be counted.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim_start().to_ascii_lowercase());
    let (_, scale) = units.iter().find(|(name, _)| *name == unit)?;
    let value = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(*scale)?,
        Err(_) => {
            let scaled = number.parse::<f64>().ok()? * *scale as f64;
            // What f64 holds to the one.
            (scaled.fract() == 0.0 && scaled < (1u64 << 53) as f64).then_some(scaled as u64)?
        }
    };
    (value > 0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_what_they_say() {
        for (text, expected) in [
            ("5GB", 5_000_000_000),
            ("500mb", 500_000_000),
            ("4GiB", 4 << 30),
            ("1.5 GB", 1_500_000_000),
            ("0.5KiB", 512),
            ("17", 17),
            ("17B", 17),
            (" 2 TB ", 2_000_000_000_000),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for (text, expected) in [
            ("64M", 64_000_000),
            ("1.5B", 1_500_000_000),
            ("100", 100),
            ("2k", 2_000),
            ("1T", 1_000_000_000_000),
        ] {
            assert_eq!(count(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_with_a_unit_is_told_how_one_is_written() {
        for text in [
            "",
            "GB",
            "0",
            "0GB",
            "-1GB",
            "5XB",
            "5 G B",
            "1e9",
            "1.2.3GB",
            "99999999999999999999",
            "20000000TB",
            "0.1B",
            "nan",
            "5Gi",
        ] {
            assert!(bytes(text).is_err_and(|e| e.contains("5GB")), "{text}");
        }
        for text in ["", "64MB", "M", "0", "64 millions"] {
            assert!(count(text).is_err_and(|e| e.contains("64M")), "{text}");
        }
    }
}
