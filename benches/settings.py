#!/usr/bin/env python3
"""The settings that xtrain chooses beside the fastest that a sweep finds, on one GPU.

    benches/settings.py XTRAIN OUT.jsonl [--seconds 540] [--rows "T12 bf16,LLAMA1B bf16"]

For each row: one short measurement of `xtrain bench step` with each combination below, then the chosen settings
and the three fastest in turns, in this order and in reverse. OUT gets a line for each measurement of the turns;
the table at the end shows the means and the ratio of the chosen settings to the best. A row is left out if less
time is left than the longest row took.
"""
import argparse
import json
import subprocess
import sys
import time

CONFIGS = {
    "T10": ("benches/configs/t10.toml", 100),
    "T12": ("benches/configs/t12.toml", 40),
    "LLAMA1B": ("benches/configs/llama1b.toml", 5),
    "LLAMA8B-L8": ("benches/configs/llama8b_l8.toml", 4),
    "Qwen2.5-1.5B": ("benches/configs/qwen2.5_1.5b.toml", 1),
}
RECIPES = ["bf16", "fp8-current"]
CHOSEN = ["train.recompute=auto", "train.loss_chunk=auto"]
SWEEP = [
    [f"train.recompute={recompute}", f"train.loss_chunk={chunk}"]
    for recompute in ("none", "norms")
    for chunk in (4096, 8192, 16384)
]


def measure(xtrain, work, settings, repeats):
    """Tokens per second and bytes of GPU memory, or None if the settings do not fit."""
    name, recipe = work.rsplit(" ", 1)
    config, steps = CONFIGS[name]
    command = [xtrain, "bench", "step", config, "--json", "--warmup", "2", "--steps", str(steps), "--repeats", str(repeats)]
    settings = [f"precision.recipe={recipe}", *settings]
    if recipe != "bf16":
        settings.append("precision.skip_slower=[]")
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{work}: {' '.join(settings)}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xtrain")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--rows", default=",".join(f"{name} {recipe}" for name in CONFIGS for recipe in RECIPES))
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    longest = 0
    table = []
    with open(args.out, "a") as out:
        for work in args.rows.split(","):
            begun = time.monotonic()
            if begun + longest > end:
                print(f"left out: {work}")
                continue
            speeds = []
            for settings in SWEEP:
                result = measure(args.xtrain, work, settings, 1)
                if result:
                    speeds.append((result["tokens_per_second"], settings))
                    print(f"{work}: {' '.join(settings)}: {result['tokens_per_second']:.0f}", flush=True)
            if not speeds:
                sys.exit(f"{work}: no settings of the sweep run")
            best = [settings for _, settings in sorted(speeds, reverse=True)[:3]]
            turns = [CHOSEN, *best]
            sums = {}
            for settings in turns + turns[::-1]:
                result = measure(args.xtrain, work, settings, 3)
                if result is None:
                    sys.exit(1)
                out.write(json.dumps({"work": work, "settings": settings, "result": result}) + "\n")
                out.flush()
                sums.setdefault(" ".join(settings), []).append(result["tokens_per_second"])
            means = {settings: sum(values) / len(values) for settings, values in sums.items()}
            chosen = means.pop(" ".join(CHOSEN))
            fastest = max(means, key=means.get)
            table.append(f"{work:24} chosen {chosen:10.0f}  best {means[fastest]:10.0f} {fastest}  ratio {chosen / means[fastest]:.4f}")
            print(table[-1], flush=True)
            longest = max(longest, time.monotonic() - begun)
    print("\n".join(table))


if __name__ == "__main__":
    main()
