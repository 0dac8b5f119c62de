//! Escaping of text for HTML.

use std::fmt::{self, Display};

/// Escapes a text for element content and quoted attributes.
///
/// Control characters that HTML forbids become U+FFFD.
pub(crate) fn escape(text: &str) -> Escaped<'_> {
    Escaped(text)
}

pub(crate) struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find(|c: char| matches!(c, '&' | '<' | '>' | '"' | '\'') || forbidden(c)) {
            f.write_str(&rest[..at])?;
            let special = rest[at..].chars().next().expect("found at this place");
            f.write_str(match special {
                '&' => "&amp;",
                '<' => "&lt;",
                '>' => "&gt;",
                '"' => "&quot;",
                '\'' => "&#39;",
                _ => "\u{FFFD}",
            })?;
            rest = &rest[at + special.len_utf8()..];
        }
        f.write_str(rest)
    }
}

fn forbidden(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\t')
}

/// `text`, cut after about `limit_bytes` with a note that says so.
pub(super) fn shortened(text: &str, limit_bytes: usize) -> String {
    if text.len() <= limit_bytes {
        return text.to_owned();
    }
    let cut = text.floor_char_boundary(limit_bytes);
    format!("{}\n… {} more bytes", &text[..cut], text.len() - cut)
}

/// A time as `2026-11-21 09:48 UTC`; `None` outside of the years 1970 to 9999.
pub(super) fn utc(seconds: f64) -> Option<String> {
    if !(0.0..253_402_300_800.0).contains(&seconds) {
        return None;
    }
    let minutes = seconds as u64 / 60;
    let (year, month, day) = civil(minutes / 1440);
    Some(format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60 % 24, minutes % 60))
}

/// Year, month and day of the Gregorian calendar, `days` after 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut rest) = (1970, days);
    while rest >= 365 + u64::from(leap(year)) {
        rest -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while rest >= lengths[month] {
        rest -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, rest + 1)
}
