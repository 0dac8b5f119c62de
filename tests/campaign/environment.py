"""Faults of the environment: limits on memory, files and threads, full disks, folders and files that may not be used, closed outputs.

A command under a fault succeeds or ends in one line; afterwards the same command without it ends like one that never met it.
"""

import os
import subprocess

import place
from program import Failure

SHORT = 24
TRAIN = "train run.toml --out run --resume"
COMMANDS = [
    *[TRAIN] * 3,
    "tokenize c.txt --bpe-vocab-size 300 --out tokens",
    "export peace --out hf",
    "eval peace --data b.txt",
    "report peace",
    "generate peace --prompt the -n 3",
]


def prepare(folder, program):
    place.texts(folder)
    (folder / "c.txt").write_text(place.text(3, 4000))
    program.run(folder, "train run.toml --out peace").succeeds()
    program.run(folder, "tokenize c.txt --bpe-vocab-size 300 --out peace-tokens").succeeds()
    return {"can_mount": can_mount(folder), "is_bound": is_bound(folder)}


def can_mount(folder):
    """True if this user may mount a disk in memory, in mounts of its own."""
    (folder / "disk").mkdir()
    return subprocess.run([*unshare("mount -t tmpfs -o size=1m none disk")], cwd=folder, capture_output=True).returncode == 0


def unshare(script):
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]


def is_bound(folder):
    """True if permissions bind this user, as they do not bind root."""
    probe = folder / "probe"
    probe.write_text("")
    probe.chmod(0)
    try:
        probe.read_text()
        return False
    except PermissionError:
        return True
    finally:
        probe.unlink()


def trial(prepared, base, folder, program, dice, count):
    folder.rmdir()
    place.copy(base, folder)
    fault = dice.choice(FAULTS)
    what = fault(prepared, folder, program, dice)
    return f"of {what or fault.__name__}"


def under(limits):
    """A fault: a command under limits."""

    def fault(prepared, folder, program, dice):
        command = dice.choice(COMMANDS)
        threads = dice.choice([1, 2, 8])
        ended = program.run(folder, command, limits=limits(dice), env={"RAYON_NUM_THREADS": str(threads)})
        # Below some 30 MB the system's loader cannot start the program.
        if ended.code != 127 and not (ended.code == -11 and not ended.err):
            ended.judge()
        place.check_whole(folder)
        again(folder, program, command)

    return fault


def again(folder, program, command):
    """Runs the command without a fault, and compares with one that never met it."""
    if command == TRAIN:
        program.run(folder, command).succeeds()
        place.same(place.lasting(folder / "peace"), place.lasting(folder / "run"), "a run after a fault")
        place.check_no_leftovers(folder)
    elif command.startswith("tokenize"):
        program.run(folder, command).succeeds()
        place.same(place.shards(folder / "peace-tokens"), place.shards(folder / "tokens"), "shards after a fault")
        place.check_no_leftovers(folder)


def limited_memory(*arguments):
    return under(lambda dice: f"-v {int(26_000 * 40 ** dice.random())}")(*arguments)


def limited_files(*arguments):
    return under(lambda dice: f"-f {int(300 ** dice.random()) - 1}")(*arguments)


def few_open_files(*arguments):
    return under(lambda dice: f"-n {dice.randint(3, 24)}")(*arguments)


def full_disk(prepared, folder, program, dice):
    """A run and its cache on a disk that fills up, and again once it is larger."""
    if not prepared["can_mount"]:
        return "full_disk, skipped: no mounts"
    sets = "--out disk/run --resume --set data.cache_dir=disk/cache"
    run = f"{program.path} train run.toml {sets} >out 2>err"
    size = int(4 * 150 ** dice.random())
    larger = "mount -t tmpfs -o remount,size=64m none disk"
    again = f"cp err first; {larger} && {run} && cp -r disk/run run"
    script = f"mount -t tmpfs -o size={size}k none disk && {run}; code=$?; {again}; exit $code"
    done = subprocess.run(unshare(script), cwd=folder, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    first = (folder / "first").read_text()
    if done.returncode not in (0, 2) or (done.returncode == 2 and not first.splitlines()[-1].startswith("error: ")):
        raise Failure(f"on a disk of {size} KiB: {done.returncode}: {first}{done.stderr}")
    if not (folder / "run").exists():
        raise Failure(f"after a full disk of {size} KiB: {(folder / 'err').read_text()}")
    place.same(place.lasting(folder / "peace"), place.lasting(folder / "run"), f"a run after a full disk of {size} KiB")
    return None


def forbidden(prepared, folder, program, dice):
    """A file or folder without permissions, or in which nothing may be written."""
    if not prepared["is_bound"]:
        return "forbidden, skipped: root may do everything"
    paths = [path for path in folder.rglob("*") if "cache" not in path.parts]
    path = dice.choice(paths)
    mode = path.stat().st_mode
    path.chmod(dice.choice([0, 0o400, 0o500]))
    try:
        program.run(folder, dice.choice(COMMANDS)).judge()
    finally:
        path.chmod(mode)
    return None


def replaced(prepared, folder, program, dice):
    """A FIFO, a folder, a link to itself, a device or nothing in the place of a file."""
    paths = sorted((folder / "peace").rglob("*")) + [folder / name for name in ("a.txt", "b.txt", "run.toml")]
    path = dice.choice([path for path in paths if path.is_file()])
    path.unlink()
    kind = dice.choice(["fifo", "folder", "loop", "zero", "null", "nothing", "directory link"])
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "zero" | "null":
            path.symlink_to(f"/dev/{kind}")
        case "directory link":
            path.symlink_to(".")
    name = path.relative_to(folder)
    commands = [
        *COMMANDS,
        "train run.toml --out peace --resume",
        "plan run.toml",
        "generate peace/hf --prompt the -n 3",
        "compare peace peace",
        f"tokenize {name} --bytes --out new",
    ]
    program.run(folder, dice.choice(commands)).judge()
    return None


def no_output(prepared, folder, program, dice):
    """Standard output and error that are full or closed."""
    command = dice.choice(COMMANDS)
    with open("/dev/full", "wb") as full:
        which = dice.choice(["stdout", "stderr"])
        ended = program.run(folder, command, **{which: full})
    if ended.code not in (0, 2):
        raise Failure(f"`{command}` with a full {which}: exit code {ended.code}: {ended.err}")
    if command == TRAIN:
        again(folder, program, command)
    return None


def poor_surroundings(prepared, folder, program, dice):
    """Variables of the environment that are missing or strange."""
    strange = ["", "/nowhere", "\udcff", "relative", "/dev/null", "/proc"]
    names = ["HOME", "TMPDIR", "XTRAIN_CACHE", "PATH", "XDG_CACHE_HOME", "LANG", "RUST_LOG", "RUST_BACKTRACE", "COLUMNS"]
    env = {name: dice.choice(strange) for name in dice.sample(names, 3)}
    command = dice.choice(COMMANDS)
    program.run(folder, command, env=env).judge()
    again(folder, program, command)
    return None


FAULTS = [
    *[limited_memory] * 3,
    *[limited_files] * 2,
    few_open_files,
    *[full_disk] * 2,
    forbidden,
    *[replaced] * 2,
    no_output,
    poor_surroundings,
]
