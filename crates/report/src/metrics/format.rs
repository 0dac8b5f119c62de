//! Numbers for people: three significant digits and a unit.
//!
//! Every function accepts any value, including NaN and infinities, and allocates only its result.

/// A count with a decimal suffix: `999`, `61.2k`, `1.35M`, `7.62B`, `14.8T`.
pub fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "B", "T"])
}

/// A size in binary units: `512 B`, `1.46 KiB`, `1004 MiB`.
pub fn bytes(value: u64) -> String {
    scaled(value as f64, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB", " PiB"])
}

/// A size in GiB with two decimals, so that columns align: `0.42 GiB`. Less than 0.1 GiB is in smaller units:
/// `61.4 MiB`.
pub fn gib(value: u64) -> String {
    match value as f64 / f64::from(1 << 30) {
        less if less < 0.1 => bytes(value),
        size => format!("{size:.2} GiB"),
    }
}

/// A duration in its two largest units: `312ms`, `4.2s`, `41s`, `2m41s`, `1h02m`, `3d04h`, `2y41d`.
///
/// A negative or non-finite number of seconds is `?`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".to_owned();
    }
    if seconds < 0.9995 {
        return format!("{:.0}ms", seconds * 1e3);
    }
    if seconds < 9.95 {
        return format!("{seconds:.1}s");
    }
    let whole = seconds.round() as u64;
    let (minutes, hours, days) = (whole / 60, whole / 3600, whole / 86_400);
    let years = days / 365;
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => format!("{minutes}m{:02}s", whole % 60),
        3600..86_400 => format!("{hours}h{:02}m", minutes % 60),
        86_400..31_536_000 => format!("{days}d{:02}h", hours % 24),
        _ => format!("{years}y{}d", days % 365),
    }
}

/// A short time with three significant digits: `0.043 ms`, `458 ms`, `10.0 s`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        _ if seconds < 0.999_5 => format!("{} ms", significant(1e3 * seconds)),
        _ => format!("{} s", significant(seconds)),
    }
}

/// A speed relative to another, given the seconds of the slower and of the faster: `31.2% faster than
/// before`, `2.8 times as fast as before`.
pub fn faster(slower: f64, faster: f64, than: &str) -> String {
    match slower / faster {
        ratio if ratio < 2.0 => format!("{} faster than {than}", percent(ratio - 1.0, 1)),
        ratio => format!("{ratio:.1} times as fast as {than}"),
    }
}

/// A fraction as a percentage: `2%`, `41.2%` with one decimal.
pub fn percent(fraction: f64, decimals: usize) -> String {
    format!("{:.decimals$}%", fraction * 100.0)
}

/// Three significant digits, in e-notation outside 0.001 to 99,999: `0.84`, `12.3`, `1.2e-5`, `NaN`.
pub fn significant(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    match size {
        _ if !(0.000_999_5..99_999.5).contains(&size) => format!("{value:.1e}"),
        _ if size < 0.099_95 => format!("{value:.3}"),
        _ if size < 9.995 => format!("{value:.2}"),
        _ if size < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// A whole number with thousands separators: `1,234,567`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `value` in the largest of `units`, each `base` times the previous one, in which it is at least 1.
fn scaled(value: f64, base: f64, units: &[&str]) -> String {
    if !value.is_finite() {
        return format!("{value}");
    }
    let mut scaled = value;
    let mut unit = 0;
    // A value that would round to the base takes the next unit: 999.96k is 1.00M.
    while unit + 1 < units.len() && scaled.abs() >= base - 0.5 {
        scaled /= base;
        unit += 1;
    }
    let whole = unit == 0 && scaled.fract() == 0.0;
    let decimals = match scaled.abs() {
        _ if whole => 0,
        size if size < 9.995 => 2,
        size if size < 99.95 => 1,
        _ => 0,
    };
    format!("{scaled:.decimals$}{}", units[unit])
}
