//! Detects that other programs use the CPU, so that measured times would be too long.

use std::time::Duration;

/// Number of samples; other programs must run in most of them.
const SAMPLES: usize = 5;

/// Time before each sample, in which the threads of this process go to sleep.
const PAUSE: Duration = Duration::from_millis(2);

/// True if other programs leave fewer than `threads` of the machine's CPUs. False if the system does not say.
pub(super) fn is_busy(threads: usize) -> bool {
    let Some(cpus) = std::fs::read_to_string("/proc/cpuinfo").ok().map(|text| cpu_count(&text)) else {
        return false;
    };
    let busy = (0..SAMPLES).filter(|_| {
        std::thread::sleep(PAUSE);
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        is_short(runnable(&load).unwrap_or(0), threads, cpus)
    });
    busy.count() > SAMPLES / 2
}

/// True if `runnable` threads, the asking one among them, leave fewer than `threads` of `cpus`.
fn is_short(runnable: usize, threads: usize, cpus: usize) -> bool {
    runnable.saturating_sub(1) + threads > cpus
}

/// Number of threads that run or could run: the fourth field of `/proc/loadavg`, before the slash.
fn runnable(loadavg: &str) -> Option<usize> {
    loadavg.split_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// Number of CPUs in `/proc/cpuinfo`.
fn cpu_count(cpuinfo: &str) -> usize {
    cpuinfo.lines().filter(|line| line.starts_with("processor")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_busy_if_other_programs_leave_too_few_cores() {
        let (alone, loaded) = ("0.10 0.05 0.01 1/345 4711\n", "7.28 5.60 5.82 4/345 4711\n");
        assert_eq!((runnable(alone), runnable(loaded), runnable("")), (Some(1), Some(4), None));
        let cpus = cpu_count("processor\t: 0\nmodel name\t: a CPU\n\nprocessor\t: 1\n");
        assert_eq!(cpus, 2);
        assert!(!is_short(1, cpus, cpus) && is_short(4, cpus, cpus));
        // Three others fit beside one thread on four cores, but not beside two.
        assert!(!is_short(4, 1, 4) && is_short(4, 2, 4));
    }
}
