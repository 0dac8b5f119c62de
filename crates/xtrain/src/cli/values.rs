//! Parsers of option values.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::ops::RangeInclusive;
use xtrain_config::{COUNT_UNITS, Device, Size, parse_count};
use xtrain_data::{Split, Take};

/// One of `all`, by its name in run files.
pub(super) fn named<T: Copy + Send + Sync>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let parser = PossibleValuesParser::new(all.iter().map(|&value| name(value)));
    parser.try_map(move |text| all.iter().copied().find(|&value| name(value) == text).ok_or("no such name"))
}

/// The files of a split, by its name or another keyword of it, or all files.
pub(super) fn split() -> impl TypedValueParser<Value = Take> {
    const ALL: &str = "all";
    let splits = Split::ALL.map(|split| PossibleValue::new(split.name()).aliases(&split.keywords()[1..]));
    let all = PossibleValue::new(ALL);
    PossibleValuesParser::new(splits.into_iter().chain([all])).map(|text| {
        let split = Split::ALL.into_iter().find(|split| split.keywords().contains(&text.as_str()));
        split.map_or(Take::All, Take::Only)
    })
}

/// A device, by its name in run files. Another program's name for a device gets ours as a suggestion.
pub(super) fn device() -> impl TypedValueParser<Value = Device> {
    let values = Device::ALL.map(|device| PossibleValue::new(device.name()).aliases(device.aliases()));
    PossibleValuesParser::new(values).try_map(|text| {
        let is_called = |device: &Device| device.aliases().contains(&text.as_str());
        let ours = Device::ALL.into_iter().find(is_called).map(Device::name);
        let named = Device::ALL.into_iter().find(|device| device.name() == text);
        named.ok_or_else(|| format!("did you mean '{}'?", ours.unwrap_or("auto")))
    })
}

/// A number of tokens within `range`, with or without a unit: `8192`, `8Ki`, `1M`.
pub(super) fn tokens(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| {
        let count = parse_count(text).filter(|count| range.contains(count));
        count.and_then(|count| usize::try_from(count).ok()).ok_or_else(|| {
            let (least, most) = (range.start(), range.end());
            format!("write a number from {least} to {most}, with or without a unit ({COUNT_UNITS})")
        })
    }
}

/// A whole number within `range`.
pub(super) fn bounded(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    whole(range)
}

/// As [`bounded`], of another type.
pub(super) fn whole<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.and_then(|number: u64| T::try_from(number).ok()).ok_or_else(|| match range.end() {
            &u64::MAX => format!("write a whole number of at least {}", range.start()),
            end => format!("write a whole number from {} to {end}", range.start()),
        })
    }
}

/// A number, with or without point and exponent.
pub(super) fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "write a number".to_owned())
}

/// Bytes per second: `50GB/s`.
pub(super) fn bandwidth(text: &str) -> Result<f64, String> {
    let bytes = text.strip_suffix("/s").and_then(|size| size.parse::<Size>().ok());
    bytes
        .map(|size| size.0 as f64)
        .ok_or_else(|| "write bytes per second, such as 50GB/s or 500MB/s".to_owned())
}
