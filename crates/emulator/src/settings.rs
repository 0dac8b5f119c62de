//! Settings of the emulator, from `XTRAIN_EMULATOR`: `key=value` pairs separated by spaces, or one per line
//! if values contain spaces.

use std::fmt;
use std::sync::LazyLock;

/// The environment variable.
const VARIABLE: &str = "XTRAIN_EMULATOR";

/// The settings of the environment. `None`, after a report, if they cannot be parsed: a test would otherwise
/// run on another device than intended.
pub(crate) static SETTINGS: LazyLock<Option<ProcessDevices>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    ProcessDevices::parse(&text).inspect_err(|problem| eprintln!("emulated GPU: {VARIABLE}: {problem}")).ok()
});

/// The devices of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessDevices {
    /// `arch=sm_90a`: the architecture.
    pub(crate) arch: Arch,
    /// `devices=1`: the number of devices.
    pub(crate) devices: usize,
    /// `memory=4096`: the memory of each device in MiB.
    pub(crate) memory_bytes: u64,
    /// `seed=0`: the seed of all random orders.
    pub(crate) seed: u64,
    /// `log=FILE`: a file to which loaded kernels with their instruction forms and launched kernels are
    /// appended, one per line.
    pub(crate) log: Option<String>,
    /// `ptx=FOLDER`: a folder in which the PTX of sources is kept.
    pub(crate) ptx: Option<String>,
    /// `nccl=22707`: the version that NCCL reports.
    pub(crate) nccl: i32,
    /// `places=0`: ranks of NCCL may use buffers at other places than each other.
    pub(crate) compares_places: bool,
    /// `nvlink=0`: no link between devices.
    pub(crate) has_nvlink: bool,
    /// `omit=wait:3`: a wait to leave out, to check that tests fail.
    pub(crate) omit: Option<Omission>,
    /// `swap=1:3`: a rank, and the first of two groups of NCCL calls that it exchanges.
    pub(crate) swap: Option<(usize, usize)>,
    /// `patch=FILE`: a fault to put into a kernel's source, to check that tests fail.
    pub(crate) patch: Option<Patch>,
    /// `trace=gemm.cu:87`: a source line whose instructions are printed.
    pub(crate) trace: Option<TraceLine>,
    /// `races=1`: data races by PTX's memory model are reported.
    pub(crate) races: bool,
}

/// A source line to trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceLine {
    pub(crate) file: String,
    pub(crate) line: u32,
    /// `tile=0:8x32:e4m3:128`: a tile of shared memory to print with each instruction.
    pub(crate) tile: Option<Tile>,
    /// `stop=5`: the number of instructions after which the launch ends.
    pub(crate) stop: u64,
}

/// A matrix in shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) offset: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// `f32`, `u32`, `bf16`, `e4m3`, `e5m2` or `u8`.
    pub(crate) element: String,
    /// log2 of the 16-byte chunks that a swizzle permutes.
    pub(crate) swizzle_bits: u32,
}

/// A compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arch {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if self.major >= 9 { "a" } else { "" })
    }
}

/// The wait, event, copy or edge to leave out, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Omission {
    pub(crate) what: Ordering,
    pub(crate) number: usize,
}

/// A kind of ordering that `omit` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordering {
    /// A stream's wait for an event.
    Wait,
    /// The recording of an event.
    Event,
    /// A copy or fill.
    Copy,
    /// An edge between two nodes of a graph.
    Edge,
    /// A group of calls of NCCL, on rank 1.
    Collective,
}

/// A source patch, applied before a kernel is compiled.
///
/// The header has `key: value` lines; `source` names the kernel's source, e.g. `quantize/kernel.cu`, whose
/// headers are part of it. After an empty line follows a diff: `-` removes a line, `+` adds one, a space
/// keeps one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Patch {
    pub(crate) source: String,
    old: String,
    new: String,
}

impl ProcessDevices {
    fn parse(text: &str) -> Result<ProcessDevices, String> {
        let mut settings = ProcessDevices {
            arch: Arch { major: 9, minor: 0 },
            devices: 1,
            memory_bytes: 4 << 30,
            seed: 0,
            log: None,
            ptx: None,
            nccl: 22_707,
            compares_places: true,
            has_nvlink: true,
            omit: None,
            swap: None,
            patch: None,
            trace: None,
            races: false,
        };
        let (mut tile, mut stop) = (None, u64::MAX);
        let separator = if text.contains('\n') { '\n' } else { ' ' };
        for setting in text.split(separator).map(str::trim).filter(|setting| !setting.is_empty()) {
            let (key, value) =
                setting.split_once('=').ok_or_else(|| format!("`{setting}` is not `key=value`"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("`{value}` is not a number"));
            match key {
                "arch" => {
                    let digits = value.strip_prefix("sm_").unwrap_or(value).trim_end_matches('a');
                    let number: u32 =
                        digits.parse().map_err(|_| format!("`{value}` is not an architecture"))?;
                    settings.arch = Arch { major: number / 10, minor: number % 10 };
                }
                "devices" => settings.devices = number()? as usize,
                "memory" => settings.memory_bytes = number()? << 20,
                "seed" => settings.seed = number()?,
                "log" => settings.log = Some(value.to_owned()),
                "ptx" => settings.ptx = Some(value.to_owned()),
                "nccl" => settings.nccl = number()? as i32,
                "places" => settings.compares_places = number()? != 0,
                "nvlink" => settings.has_nvlink = number()? != 0,
                "omit" => settings.omit = Some(Omission::parse(value)?),
                "swap" => {
                    let numbers = value
                        .split_once(':')
                        .and_then(|(rank, group)| Some((rank.parse().ok()?, group.parse().ok()?)));
                    settings.swap = Some(numbers.ok_or("`swap` needs a rank and a number: `1:3`")?);
                }
                "patch" => {
                    let text = std::fs::read_to_string(value).map_err(|error| format!("{value}: {error}"))?;
                    settings.patch = Some(Patch::parse(&text)?);
                }
                "trace" => {
                    let place =
                        value.rsplit_once(':').and_then(|(file, line)| Some((file, line.parse().ok()?)));
                    let (file, line) = place.ok_or("`trace` needs a file and a line: `add/kernel.cu:12`")?;
                    settings.trace = Some(TraceLine { file: file.to_owned(), line, tile: None, stop });
                }
                "tile" => {
                    tile = Some(
                        Tile::parse(value).ok_or("`tile` needs a place, a size and a type: `0:8x32:bf16`; types are f32, u32, bf16, e4m3, e5m2 and u8")?,
                    )
                }
                "stop" => stop = number()?,
                "races" => settings.races = number()? != 0,
                _ => {
                    return Err(format!(
                        "unknown setting `{key}`; known are arch, devices, memory, seed, log, ptx, nccl, places, nvlink, omit, swap, \
                         patch, trace, tile, stop, races"
                    ));
                }
            }
        }
        match &mut settings.trace {
            Some(trace) => (trace.tile, trace.stop) = (tile, stop),
            None if tile.is_some() || stop < u64::MAX => {
                return Err("`tile` and `stop` need `trace`".to_owned());
            }
            None => {}
        }
        Ok(settings)
    }
}

impl Tile {
    fn parse(text: &str) -> Option<Tile> {
        let parts: Vec<&str> = text.split(':').collect();
        let (&[offset, size, element], swizzle) = parts.split_first_chunk::<3>()?;
        let (rows, columns) = size.split_once('x')?;
        let swizzle_bits = match swizzle {
            [] => 0,
            ["32"] => 1,
            ["64"] => 2,
            ["128"] => 3,
            _ => return None,
        };
        let is_known = ["f32", "u32", "bf16", "e4m3", "e5m2", "u8"].contains(&element);
        let tile = Tile {
            offset: offset.parse().ok()?,
            rows: rows.parse().ok()?,
            columns: columns.parse().ok()?,
            element: element.to_owned(),
            swizzle_bits,
        };
        is_known.then_some(tile)
    }
}

impl Omission {
    fn parse(text: &str) -> Result<Omission, String> {
        let (what, number) = text.split_once(':').ok_or("`omit` needs a kind and a number: `wait:0`")?;
        let what = match what {
            "wait" => Ordering::Wait,
            "event" => Ordering::Event,
            "copy" => Ordering::Copy,
            "edge" => Ordering::Edge,
            "collective" => Ordering::Collective,
            _ => return Err(format!("`{what}` is none of wait, event, copy, edge and collective")),
        };
        Ok(Omission { what, number: number.parse().map_err(|_| format!("`{number}` is not a number"))? })
    }
}

impl Patch {
    fn parse(text: &str) -> Result<Patch, String> {
        let (head, body) = text.split_once("\n\n").ok_or("a patch needs an empty line after its header")?;
        let source = head.lines().find_map(|line| line.strip_prefix("source: "));
        let source = source.ok_or("a patch names a program: `source: add/kernel.cu`")?.to_owned();
        let mut patch = Patch { source, old: String::new(), new: String::new() };
        for line in body.lines() {
            let (mark, rest) = line.split_at_checked(1).unwrap_or((" ", ""));
            let (goes, comes) = match mark {
                "-" => (true, false),
                "+" => (false, true),
                " " => (true, true),
                _ => return Err(format!("`{line}` of a patch begins with none of `-`, `+` and a space")),
            };
            for (wanted, text) in [(goes, &mut patch.old), (comes, &mut patch.new)] {
                if wanted {
                    text.extend([rest, "\n"]);
                }
            }
        }
        Ok(patch)
    }

    /// Applies the patch. An error unless its lines occur in the program exactly once.
    pub(crate) fn apply(&self, program: &str) -> Result<String, String> {
        match program.matches(&self.old).count() {
            1 => Ok(program.replace(&self.old, &self.new)),
            count => Err(format!("the lines of the patch occur {count} times in {}, not once", self.source)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_or_refused() {
        let settings = ProcessDevices::parse("arch=sm_89 devices=2 memory=64 seed=7 omit=edge:1").unwrap();
        assert_eq!((settings.arch.to_string(), settings.devices), ("sm_89".to_owned(), 2));
        assert_eq!((settings.memory_bytes, settings.seed), (64 << 20, 7));
        assert_eq!(settings.omit, Some(Omission { what: Ordering::Edge, number: 1 }));
        assert_eq!(ProcessDevices::parse("").unwrap().arch.to_string(), "sm_90a");
        let lines = ProcessDevices::parse("seed=7\nlog=/a folder/log\n").unwrap();
        assert_eq!((lines.seed, lines.log.as_deref()), (7, Some("/a folder/log")));
        let trace =
            ProcessDevices::parse("tile=1024:8x32:e4m3:128 trace=a/b.cu:7 stop=2").unwrap().trace.unwrap();
        assert_eq!((trace.file.as_str(), trace.line, trace.stop), ("a/b.cu", 7, 2));
        assert_eq!(
            trace.tile.map(|tile| (tile.offset, tile.columns, tile.swizzle_bits)),
            Some((1024, 32, 3))
        );
        for wrong in [
            "trace=a.cu",
            "trace=a.cu:7 tile=0:8x",
            "trace=a.cu:7 tile=0:8x8:f64",
            "tile=0:8x8:f32",
            "stop=1",
            "arch",
            "arch=x",
            "omit=wait",
            "omit=hope:1",
            "swap=1",
            "speed=9",
        ] {
            assert!(ProcessDevices::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_patch_replaces_lines_that_occur_once() {
        let patch = Patch::parse("source: a.cu\ntest: none\n\n kept;\n\n-old;\n+new;\n").unwrap();
        assert_eq!(patch.source, "a.cu");
        assert_eq!(patch.apply("old;\nkept;\n\nold;\n"), Ok("old;\nkept;\n\nnew;\n".into()));
        for other in ["old;\n", "kept;\n\nold;\nkept;\n\nold;\n"] {
            assert!(patch.apply(other).is_err(), "{other}");
        }
        for wrong in ["source: a.cu\n-old;\n", "test: none\n\n-old;\n", "source: a.cu\n\nold;\n"] {
            assert!(Patch::parse(wrong).is_err(), "{wrong}");
        }
    }
}
