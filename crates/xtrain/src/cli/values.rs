//! Parsers of option values.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::ops::RangeInclusive;
use xtrain_config::{COUNT_UNITS, Device, Rate, parse_count};
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
        let is_called = |device: &Device| device.aliases().any(|alias| alias == text);
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
            format!("write a whole number from {least} to {most}, with or without a unit ({COUNT_UNITS})")
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

/// A number from 0 to 1.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a number from 0 to 1".to_owned())
}

/// A number of points of a score.
pub(super) fn points(text: &str) -> Result<f64, String> {
    let points = text.parse().ok().filter(|points| (0.0..=100.0).contains(points));
    points.ok_or_else(|| "write a number of points from 0 to 100".to_owned())
}

/// Bytes per second: `12.5GB/s`, `400Gbit/s`.
pub(super) fn bandwidth(text: &str) -> Result<f64, String> {
    text.parse().map(|Rate(bytes)| bytes)
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::Command;
    use clap::error::ErrorKind;
    use std::fs;
    use std::path::Path;

    /// README.md and the pages of docs/.
    fn pages() -> Vec<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let docs =
            fs::read_dir(root.join("docs")).expect("docs").map(|entry| entry.expect("an entry").path());
        let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
        pages.chain([root.join("README.md")]).map(|path| fs::read_to_string(path).expect("a page")).collect()
    }

    /// The names of all commands, from the program's on.
    fn commands(command: &Command, path: &[String]) -> Vec<(Vec<String>, Command)> {
        let path: Vec<String> = path.iter().cloned().chain([command.get_name().to_owned()]).collect();
        let below = command.get_subcommands().flat_map(|below| commands(below, &path));
        below.collect::<Vec<_>>().into_iter().chain([(path.clone(), command.clone())]).collect()
    }

    fn refusal(arguments: &[String]) -> Option<ErrorKind> {
        Cli::whole().try_get_matches_from(arguments).err().map(|error| error.kind())
    }

    #[test]
    fn every_value_with_a_unit_in_the_docs_is_one_that_its_option_takes() {
        let all = commands(&Cli::whole(), &[]);
        let mut seen = 0;
        for page in pages() {
            let words: Vec<&str> = page.split_whitespace().collect();
            for pair in words.windows(2) {
                let Some(option) = pair[0].trim_start_matches(['`', '(']).strip_prefix("--") else {
                    continue;
                };
                let value = pair[1].trim_end_matches(['`', ',', ';', ':', ')', '.', '|']);
                let is_of_unit = value.starts_with(|c: char| c.is_ascii_digit())
                    && value.ends_with(|c: char| c.is_ascii_alphabetic());
                let has_it =
                    |command: &Command| command.get_arguments().any(|arg| arg.get_long() == Some(option));
                for (path, _) in all.iter().filter(|(_, command)| is_of_unit && has_it(command)) {
                    let set = [format!("--{option}"), value.to_owned()];
                    let arguments: Vec<String> = path.iter().cloned().chain(set).collect();
                    let kind = refusal(&arguments);
                    let is_wrong =
                        [ErrorKind::ValueValidation, ErrorKind::InvalidValue].map(Some).contains(&kind);
                    assert!(!is_wrong, "{arguments:?}: {kind:?}");
                    seen += 1;
                }
            }
        }
        assert!(seen > 5, "only {seen} were found");
    }

    #[test]
    fn every_command_of_xtrain_in_the_docs_is_taken() {
        let mut seen = 0;
        for page in pages() {
            let blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("\n```").next());
            for line in blocks
                .flat_map(|block| block.replace("\\\n", " ").lines().map(str::to_owned).collect::<Vec<_>>())
            {
                let command = line.split("  #").next().unwrap_or_default().trim();
                let is_plain =
                    command.starts_with("xtrain ") && !command.contains(['\'', '"', '|', '>', '$', '&', ';']);
                if !is_plain {
                    continue;
                }
                let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
                assert_eq!(refusal(&arguments), None, "{command}");
                seen += 1;
            }
        }
        assert!(seen > 20, "only {seen} were found");
    }
}
