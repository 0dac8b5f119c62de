//! The CPU time that other programs take from this process's CPUs, which makes measured times too long.

use std::time::Duration;
use std::{fs, thread};

/// The time that shows the load of the moment: several ticks, of 10 ms.
const MOMENT: Duration = Duration::from_millis(100);

/// The part of a CPU that other programs may take: a desktop's daemons need as much.
const TOLERATED: f64 = 0.2;

/// The CPU time of the CPUs on which this process may run, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    /// Of all processes, the system, and other virtual machines on the same CPUs.
    used: u64,
    /// CPU time that passed.
    all: u64,
    /// Of this process.
    own: u64,
    cpus: usize,
}

/// A watch on the load that other programs cause from its beginning on.
pub(super) struct Load(Option<Ticks>);

impl Load {
    /// Begins to watch.
    pub(super) fn begin() -> Load {
        Load(now())
    }

    /// As [`Load::is_busy`], of the next tenth of a second.
    pub(super) fn is_busy_now(threads: usize) -> bool {
        let load = Load::begin();
        thread::sleep(MOMENT);
        load.is_busy(threads)
    }

    /// True if other programs left fewer than `threads` CPUs since the watch began. False if the system does
    /// not say.
    pub(super) fn is_busy(&self, threads: usize) -> bool {
        let (Some(before), Some(after)) = (self.0, now()) else { return false };
        others(before, after) + threads as f64 > after.cpus as f64 + TOLERATED
    }
}

/// The CPUs that other programs used between two readings, on average.
fn others(before: Ticks, after: Ticks) -> f64 {
    let passed = after.all.saturating_sub(before.all).max(1) as f64;
    let used = after.used.saturating_sub(before.used) as f64 - after.own.saturating_sub(before.own) as f64;
    used.max(0.0) / passed * after.cpus as f64
}

fn now() -> Option<Ticks> {
    let read = |path: &str| fs::read_to_string(path).ok();
    ticks(&read("/proc/stat")?, &read("/proc/self/stat")?, &read("/proc/self/status")?)
}

/// The reading in `/proc/stat`, and in `stat` and `status` of this process.
fn ticks(stat: &str, own: &str, status: &str) -> Option<Ticks> {
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let allowed = cpu_list(allowed)?;
    let (mut used, mut all) = (0, 0);
    for cpu in &allowed {
        let line = stat.lines().find_map(|line| line.strip_prefix(&format!("cpu{cpu} ")))?;
        let times: Vec<u64> = line.split_whitespace().map_while(|n| n.parse().ok()).collect();
        // user, nice, system, idle, iowait, irq, softirq, steal; guests count as user.
        let [user, nice, system, idle, waiting, irq, softirq, steal, ..] = times[..] else { return None };
        let busy = user + nice + system + irq + softirq + steal;
        (used, all) = (used + busy, all + busy + idle + waiting);
    }
    // The name of the program, in parentheses, may contain anything.
    let mut fields = own.rsplit_once(')')?.1.split_whitespace().skip(11);
    let own = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(Ticks { used, all, own, cpus: allowed.len() })
}

/// The CPUs of a list such as `0-3,8`.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\txtrain\nCpus_allowed_list:\t0,2\n";

    /// CPUs 0 and 2 of three after so many ticks of other programs, and of this one.
    fn reading(others: u64, own: u64, idle: u64) -> Ticks {
        let stat = format!(
            "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {} 0 1 {idle} 1 0 0 {others} 0 0\ncpu1 999 0 0 0 0 0 0 0 0 0\n\
             cpu2 0 0 0 {} 0 0 0 0 0 0\nintr 1\n",
            own,
            idle + own + others + 2
        );
        let own = format!("7 (a) b) R 1 1 1 0 -1 0 1 0 0 0 {} {} 0 0 20 0", own - own / 3, own / 3);
        ticks(&stat, &own, STATUS).expect("a reading")
    }

    #[test]
    fn the_time_of_other_programs_on_our_cpus_is_load() {
        let before = reading(5, 30, 100);
        assert_eq!((before.cpus, before.own, before.used), (2, 30, 36));
        let load = |of_others: u64, own: u64, idle: u64| {
            others(before, reading(5 + of_others, 30 + own, 100 + idle))
        };
        assert_eq!(load(0, 90, 10), 0.0);
        assert!((load(50, 50, 0) - 0.5).abs() < 1e-9, "{}", load(50, 50, 0));
        assert_eq!(cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(ticks("cpu0 1 2", "7 (x) R", STATUS), None);
    }

    #[test]
    fn this_system_is_read() {
        if cfg!(target_os = "linux") {
            let found = now().expect("a reading");
            assert!(found.cpus > 0 && found.all >= found.used, "{found:?}");
        }
    }
}
