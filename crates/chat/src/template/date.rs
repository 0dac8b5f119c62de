//! The date that templates print.

use std::fmt;
use std::str::FromStr;

/// A day of the Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    year: i32,
    month: u32,
    day: u32,
}

impl Default for Date {
    /// The first day of Unix time.
    fn default() -> Date {
        Date { year: 1970, month: 1, day: 1 }
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Date {
    /// A day, if the calendar has it.
    pub fn new(year: i32, month: u32, day: u32) -> Option<Date> {
        let is_leap = year % 4 == 0 && year % 100 != 0 || year % 400 == 0;
        let days = match month {
            2 => 28 + u32::from(is_leap),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        let is_day = (1..=9999).contains(&year) && (1..=12).contains(&month) && (1..=days).contains(&day);
        is_day.then_some(Date { year, month, day })
    }

    /// The day of a time in seconds since 1970, in UTC.
    pub fn of_unix_seconds(seconds: u64) -> Date {
        // Days since 1 March of year 0, in cycles of 400 years.
        let days = i64::try_from(seconds / 86_400).unwrap_or(0).min(2_900_000) + 719_468;
        let (era, of_era) = (days / 146_097, days % 146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
        let number = |value: i64| u32::try_from(value).unwrap_or(1);
        let year = i32::try_from(year_of_era + era * 400 + carry).unwrap_or(1970);
        Date { year, month: number(month), day: number(day) }
    }

    /// `strftime` in the C locale, at midnight.
    ///
    /// # Errors
    /// The directive that is unknown.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        let (month, weekday) = (MONTHS[self.month as usize - 1], DAYS[self.weekday()]);
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let is_bare = directive == Some('-');
            if is_bare {
                directive = chars.next();
            }
            let number = |value: u32, width: usize| match is_bare {
                true => value.to_string(),
                false => format!("{value:0width$}"),
            };
            let text = match directive {
                Some('Y') => self.year.to_string(),
                Some('y') => number(self.year.unsigned_abs() % 100, 2),
                Some('m') => number(self.month, 2),
                Some('d') => number(self.day, 2),
                Some('e') if !is_bare => format!("{:2}", self.day),
                Some('j') => number(self.day_of_year(), 3),
                Some('B') => month.to_owned(),
                Some('b' | 'h') => month[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('H' | 'M' | 'S') => number(0, 2),
                Some('I') => number(12, 2),
                Some('p') => "AM".to_owned(),
                Some('F') => self.to_string(),
                Some('D') => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year % 100),
                Some('T') => "00:00:00".to_owned(),
                Some('%') => "%".to_owned(),
                other => return Err(format!("%{}", other.map(String::from).unwrap_or_default())),
            };
            out.push_str(&text);
        }
        Ok(out)
    }

    fn day_of_year(self) -> u32 {
        (1..self.month)
            .map(|month| (28..=31).rfind(|&day| Date::new(self.year, month, day).is_some()))
            .sum::<Option<u32>>()
            .unwrap_or_default()
            + self.day
    }

    /// Days since Sunday.
    fn weekday(self) -> usize {
        let (month, year) =
            if self.month < 3 { (self.month + 12, self.year - 1) } else { (self.month, self.year) };
        let century = year.rem_euclid(100);
        let day = self.day as i32 + (13 * (month as i32 + 1)) / 5 + century + century / 4 + year / 400
            - 2 * (year / 100);
        // Zeller's congruence counts from Saturday.
        (day + 6).rem_euclid(7) as usize
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl FromStr for Date {
    type Err = String;

    /// Reads a day such as `2026-11-28`.
    fn from_str(text: &str) -> Result<Date, String> {
        let parts: Vec<Option<u32>> = text
            .split('-')
            .map(|part| part.parse().ok().filter(|_| part.bytes().all(|byte| byte.is_ascii_digit())))
            .collect();
        let date = match parts[..] {
            [Some(year), Some(month), Some(day)] if text.len() == 10 => Date::new(year as i32, month, day),
            _ => None,
        };
        date.ok_or_else(|| format!("{text:?} is no date such as 2026-11-28"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_of_unix_time_follow_the_calendar() {
        let mut before = Date::of_unix_seconds(0);
        assert_eq!(before, Date::default());
        for day in 1..80_000_u64 {
            let date = Date::of_unix_seconds(day * 86_400 + 5);
            let Date { year, month, day: of_month } = before;
            let next = Date::new(year, month, of_month + 1).or(Date::new(year, month + 1, 1)).or(Date::new(
                year + 1,
                1,
                1,
            ));
            assert_eq!(Some(date), next);
            assert_eq!(date.weekday(), (before.weekday() + 1) % 7, "{date}");
            assert_eq!(date.to_string().parse(), Ok(date));
            before = date;
        }
        assert_eq!(Date::of_unix_seconds(1_795_824_000).to_string(), "2026-11-28");
        assert_eq!(Date::of_unix_seconds(951_782_400).format("%A %j").as_deref(), Ok("Tuesday 060"));
    }

    #[test]
    fn dates_that_the_calendar_lacks_are_refused() {
        for text in ["2026-02-29", "2026-13-01", "2026-1-01", "28.11.2026", "", "+026-01-01", "2026-11-28 "] {
            assert!(text.parse::<Date>().is_err(), "{text}");
        }
        assert_eq!(Date::default().format("%Q"), Err("%Q".to_owned()));
    }
}
