//! Memory that the machine, or the container around this process, has and can still provide.
//!
//! Linux only; elsewhere nothing is known and nothing is refused. Control groups of version 2 are read: every
//! group from this process up to the root may set a limit.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that this process can still use; None if the system does not report them.
pub fn available_bytes() -> Option<u64> {
    let groups = groups().into_iter().filter_map(|group| {
        let cache = stat(&group, "inactive_file").unwrap_or(0);
        let used = number(&group.join("memory.current"))?.saturating_sub(cache);
        Some(number(&group.join("memory.max"))?.saturating_sub(used))
    });
    groups.chain(meminfo("MemAvailable:")).min()
}

/// Bytes that this process could use if nothing else ran; None if the system does not report them.
pub fn total_bytes() -> Option<u64> {
    let groups = groups().into_iter().filter_map(|group| number(&group.join("memory.max")));
    groups.chain(meminfo("MemTotal:")).min()
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with(key))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The folders of this process's control group and those above it.
fn groups() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = text.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    Path::new(own).ancestors().map(|group| Path::new("/sys/fs/cgroup").join(group)).collect()
}

/// The number in a file; None for `max`, which is no limit.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn stat(group: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(group.join("memory.stat")).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_memory_is_available() {
        let (total, available) = (total_bytes().expect("a total"), available_bytes().expect("what is left"));
        assert!(0 < available && available < total, "{available} of {total}");
    }
}
