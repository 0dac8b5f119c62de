//! Disks that are full and files that may not be read.

use crate::place::{Place, Ran, finish};
use crate::resume::assert_same_end;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Runs `xtrain` under these limits of the shell's `ulimit`.
fn under(limits: &str, place: &Place, arguments: &str) -> Ran {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit {limits}; exec {} {arguments}", env!("CARGO_BIN_EXE_xtrain"))]);
    finish(place.settle(shell), arguments)
}

/// Runs `xtrain` with files limited to `blocks` of 512 bytes, which stands for a full disk and needs no
/// rights. Unhandled, the limit's signal ends a process.
fn on_a_small_disk(place: &Place, blocks: usize, arguments: &str) -> Ran {
    under(&format!("-f {blocks}"), place, arguments)
}

#[test]
#[cfg(target_os = "linux")]
fn memory_and_threads_that_the_system_refuses_are_named_in_one_line() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    let mut refused = 0;
    for megabytes in [45, 50, 60, 100, 200, 400] {
        for (n, command) in [
            "tokenize a.txt --bpe-vocab-size 300 --out shards",
            "train run.toml --set train.steps=3 --set train.threads=8 --out new",
            "generate out --prompt the -n 3",
            "export out --out hf",
            "report out",
        ]
        .iter()
        .enumerate()
        {
            // Each into a place of its own.
            let ran = under(
                &format!("-v {megabytes}000"),
                &place,
                &command.replace("--out ", &format!("--out {megabytes}-{n}-")),
            );
            // glibc aborts the process if it cannot note the destructors of another thread meanwhile.
            let is_aborted = ran.stderr.contains("Fatal glibc error: failed to register TLS destructor");
            if ran.code() != Some(0) && !is_aborted {
                ran.refuses(&[]);
                refused += 1;
            }
        }
    }
    // Eight threads do not fit into 45 MB, and everything fits into 400.
    assert!((1..25).contains(&refused), "{refused}");
    under("-v 45000", &place, "train run.toml --set train.threads=8 --out last").refuses(&["ulimit -v"]);
}

#[test]
fn a_limit_that_is_too_low_or_too_high_is_named() {
    let place = Place::new();
    under("-n 8", &place, "train run.toml --out out").refuses(&["Too many open files", "ulimit -n"]);
    for verb in ["plan", "train"] {
        let arguments = format!("{verb} run.toml --set train.threads=0");
        let mut command = place.command(&arguments);
        command.env("RAYON_NUM_THREADS", "999999");
        finish(command, &arguments).refuses(&["RAYON_NUM_THREADS = 999999", "1024"]);
    }
    // A plan starts no threads: a thousand would need more memory than this.
    let mut command = Command::new("sh");
    let plan = format!(
        "ulimit -v 1000000; RAYON_NUM_THREADS=1000 exec {} plan run.toml --set train.threads=0 --set train.device=cpu",
        env!("CARGO_BIN_EXE_xtrain")
    );
    command.args(["-c", &plan]);
    finish(place.settle(command), &plan).succeeds();
}

#[test]
fn a_full_disk_ends_a_run_with_its_last_checkpoint_whole() {
    let place = Place::new();
    let keep_all = "--set checkpoint.keep_last=20 --set schedule.kind=constant";
    place.train("peace", keep_all);
    place.train("out", &format!("{keep_all} --set train.steps=3"));
    let state = place.read("out/checkpoints/step-3/rank-00000-00001.safetensors");
    // The metrics still fit, a checkpoint does not.
    let small = state.len() / 512 - 1;
    let ran = on_a_small_disk(&place, small, "train run.toml --out out --resume");
    ran.refuses(&["out/checkpoints/step-6", "write", "File too large", "ulimit"]);
    assert_eq!(place.names("out/checkpoints"), ["step-3"]);
    assert_eq!(place.read("out/checkpoints/step-3/rank-00000-00001.safetensors"), state);
    // Nothing at all fits.
    on_a_small_disk(&place, 0, "train run.toml --out out --resume").refuses(&["out"]);
    assert_eq!(place.names("out/checkpoints"), ["step-3"]);
    // With room again, the run resumes and ends as if nothing had happened.
    place.train("out", &format!("--resume {keep_all}"));
    let last = "checkpoints/step-40/rank-00000-00001.safetensors";
    assert!(place.read(&format!("out/{last}")) == place.read(&format!("peace/{last}")));
}

#[test]
fn a_full_disk_under_each_verb_is_one_line_and_leaves_nothing_half_made() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    on_a_small_disk(&place, 2, "tokenize a.txt --bytes --out shards").refuses(&[
        "shards",
        "File too large",
        "ulimit",
    ]);
    assert!(!place.exists("shards/dataset.json"));
    on_a_small_disk(&place, 2, "export out --out hf").refuses(&["hf"]);
    assert!(!place.exists("hf"));
    let report = place.read("out/report.html");
    on_a_small_disk(&place, 2, "report out").refuses(&["report.html", "File too large", "ulimit"]);
    assert_eq!(place.read("out/report.html"), report);
    on_a_small_disk(&place, 2, "train run.toml --out new").refuses(&[
        "new/tokenizer",
        "File too large",
        "ulimit",
    ]);
    // The same commands, once there is room.
    place.run("tokenize a.txt --bytes --out shards").succeeds();
    place.run("export out --out hf").succeeds();
    place.train("new", "--set train.steps=3");
}

/// Runs a script with a disk in memory of so many KiB at `small`, which vanishes with it; nothing where the
/// system allows no such disk.
#[cfg(target_os = "linux")]
fn with_a_disk_of(kib: usize, place: &Place, script: &str) -> Option<Ran> {
    let in_own_mounts = |script: String| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
        place.settle(unshare)
    };
    std::fs::create_dir_all(place.path("small")).expect("a folder");
    let mount = format!("mount -t tmpfs -o size={kib}k none small");
    let can =
        in_own_mounts(mount.clone()).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    can.then(|| finish(in_own_mounts(format!("{mount}; {script}")), script))
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fills_up_anywhere_in_a_run_costs_nothing_but_the_time_since_the_last_checkpoint() {
    let place = Place::new();
    let sets = "--set train.steps=12 --set data.cache_dir=small/cache";
    place.train("peace", sets);
    let run = format!("{} train run.toml --out small/out {sets} > /dev/null", env!("CARGO_BIN_EXE_xtrain"));
    let mut filled = 0;
    // From no room for the tokens, over each file of a checkpoint, to enough.
    for kib in [4, 16, 40, 80, 100, 300, 480, 500, 516, 680, 700, 720, 740, 64_000] {
        let out = format!("out{kib}");
        let script = format!(
            "{run}; code=$?; mount -o remount,size=64m small; {run} --resume 2> again || cat again; cp -r small/out {out}; exit $code"
        );
        let Some(ran) = with_a_disk_of(kib, &place, &script) else {
            println!("skipped: this user cannot mount a disk in memory");
            return;
        };
        if ran.code() != Some(0) {
            ran.refuses(&["small/", "No space left on device", "free some space"]);
            filled += 1;
        }
        assert_same_end(&place, "peace", &out);
    }
    assert!((8..14).contains(&filled), "{filled}");
}

/// Runs `xtrain` as a user bound by permissions: this one, or `nobody` if this one is root.
struct Bound<'p> {
    place: &'p Place,
    nobody: bool,
}

impl<'p> Bound<'p> {
    /// None, with a word about it, where no such user can run the binary.
    fn of(place: &'p Place) -> Option<Self> {
        place.write("probe", b"");
        allow(place, "probe", 0);
        let nobody = fs::read(place.path("probe")).is_ok();
        allow(place, "", 0o777);
        let bound = Bound { place, nobody };
        if !bound.command("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
            println!("skipped: this user may read everything, and no other one can run the binary here");
            return None;
        }
        Some(bound)
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = self.place.command(arguments);
        if self.nobody {
            command.uid(65534).gid(65534);
        }
        command
    }

    fn run(&self, arguments: &str) -> Ran {
        finish(self.command(arguments), arguments)
    }
}

fn allow(place: &Place, name: &str, mode: u32) {
    fs::set_permissions(place.path(name), Permissions::from_mode(mode)).expect("permissions");
}

#[test]
fn files_that_may_not_be_read_are_named() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    let Some(bound) = Bound::of(&place) else { return };
    for name in ["b.txt", "out/config.toml", "run.toml", "out/hf/model.safetensors"] {
        allow(&place, name, 0);
    }
    bound.run("eval out --data a.txt").refuses(&["out/config.toml", "Permission denied"]);
    bound.run("generate out/hf --prompt the").refuses(&["out/hf/model.safetensors", "Permission denied"]);
    bound.run("tokenize b.txt --bytes --out shards").refuses(&[
        "b.txt",
        "Permission denied",
        "check the permissions",
    ]);
    bound.run("plan run.toml").refuses(&["run.toml", "Permission denied", "check the permissions"]);
}

#[test]
fn folders_that_may_not_be_written_are_named_and_stay_as_they_are() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    place.run("tokenize a.txt --bytes --out shards").succeeds();
    place.write("locked/notes.txt", b"mine");
    let Some(bound) = Bound::of(&place) else { return };
    for name in ["out", "out/checkpoints", "locked"] {
        allow(&place, name, 0o555);
    }
    let before = (place.contents("out"), place.contents("locked"));
    for (command, named) in [
        ("train run.toml --out out --resume --set train.steps=6 --set schedule.warmup_steps=1", "out"),
        ("train run.toml --out locked/new", "locked/new"),
        ("train run.toml --out new --set data.cache_dir=locked", "locked"),
        ("tokenize a.txt --bytes --out locked/shards", "locked/shards"),
        ("export out --out locked/hf", "locked/hf"),
        ("report out", "out/report.html"),
    ] {
        bound.run(command).refuses(&[named, "Permission denied", "check the permissions"]);
    }
    // Commands that only read need no more than that.
    bound.run("generate out --prompt the -n 2").succeeds();
    bound.run("eval out --data shards").succeeds();
    bound.run("plan run.toml").succeeds();
    assert_eq!((place.contents("out"), place.contents("locked")), before);
    for name in ["out", "out/checkpoints", "locked"] {
        allow(&place, name, 0o755);
    }
}
