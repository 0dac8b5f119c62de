#!/usr/bin/env python3
"""Draws the lanes of one step of a profile (`xtrain train --profile`) of several GPUs, and prints how long its collectives take and are exposed.

    benches/lanes_of_trace.py RUN/trace.json --out docs/parallel/trace.svg

A collective is exposed while no kernel of the compute lane runs. Of the steps whose ops are timed, the one of median length is taken.
"""

import argparse
import collections
import json
import pathlib

# The class of a kind of work, as `xtrain plan --svg` colours it, and its name in the legend.
KINDS = {
    "fprop": ("f", "forward"),
    "dgrad": ("b", "backward"),
    "wgrad": ("b", "backward"),
    "fprop+grad": ("b", "backward"),
    "update": ("u", "update"),
    "all_gather": ("w", "weights"),
    "all_to_all": ("g", "gradients"),
    "exchange": ("g", "gradients"),
    "sum": ("x", "sums of ranks"),
}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#16191d}.soft{fill:#5a6472}.grid{stroke:#5a6472;stroke-opacity:.3}.f{fill:#4c8dd6}.b{fill:#1f5fa8}"
    ".u{fill:#7a5cc0}.w{fill:#0b8f83}.g{fill:#d39a00}.x{fill:#a9c8ec}.n{fill:#c2457a}"
    "@media(prefers-color-scheme:dark){text{fill:#e8ecf1}.soft{fill:#96a1b0}}"
)
LEFT, RIGHT, TOP, HEIGHT = 120, 950, 26, 28


def union(intervals):
    """Intervals without overlaps, in order."""
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def covered(begin, end, intervals):
    """How much of an interval these cover."""
    return sum(max(0.0, min(end, e) - max(begin, b)) for b, e in intervals)


def kind(event, lane):
    """The class and name of an op's kind of work."""
    name, role = event["name"].split()[0], event["cat"]
    key = name if lane == 2 else "sum" if role == "reduce" else role
    return KINDS.get(key, ("n", name))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("trace", type=pathlib.Path)
    arguments.add_argument("--out", type=pathlib.Path)
    options = arguments.parse_args()
    trace = json.loads(options.trace.read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    ops = [e for e in events if e["cat"] not in ("copy", "run")]
    steps = [e for e in events if e["cat"] == "run"]
    inside = lambda step: [e for e in ops if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    timed = sorted((step for step in steps if inside(step)), key=lambda step: step["dur"])
    if not timed:
        raise SystemExit(f"{options.trace}: no step whose ops are timed; a profile of several GPUs has some")
    step = timed[len(timed) // 2]
    begin, lanes = step["ts"], {lane: [e for e in inside(step) if e["tid"] == lane] for lane in (1, 2)}
    compute = union((e["ts"], e["ts"] + e["dur"]) for e in lanes[1])
    rows = collections.defaultdict(lambda: [0, 0.0, 0.0])
    for event in lanes[2]:
        row = rows[event["name"].split()[0]]
        row[0] += 1
        row[1] += event["dur"]
        row[2] += event["dur"] - covered(event["ts"], event["ts"] + event["dur"], compute)
    print(f"{step['dur'] / 1e3:.1f} ms of a step on {trace['otherData']['device']}, ops timed")
    for name, (count, total, exposed) in rows.items():
        print(f"{name:<12} {count:3} times  {total / 1e3:8.2f} ms  exposed {exposed / 1e3:6.2f} ms  hidden {1 - exposed / total:.0%}")
    if not options.out:
        return
    scale = (RIGHT - LEFT) / step["dur"]
    x = lambda ts: LEFT + (ts - begin) * scale
    title = f"A step on {trace['otherData']['device']}, measured"
    bottom = TOP + 2 * HEIGHT + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {bottom + 44}" width="960" role="img">']
    out += [f"<title>{title}</title><style>{STYLE}</style>", f'<text x="4" y="15">{title}</text>']
    ms = max(10, round(step["dur"] / 1e4) // 10 * 10)
    for tick in range(0, int(step["dur"] / 1e3) + 1, ms):
        at = x(begin + 1e3 * tick)
        out.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom - 6}"/><text class="soft" x="{at:.1f}" y="{bottom + 8}" text-anchor="middle">{tick}</text>')
    legend = {}
    for lane, name in ((1, "compute"), (2, "communication")):
        y = TOP + (lane - 1) * (HEIGHT + 4)
        out.append(f'<text x="4" y="{y + 18}">{name}</text>')
        paths = collections.defaultdict(list)
        for event in lanes[lane]:
            of, label = kind(event, lane)
            legend[of] = label
            paths[of].append([event["ts"], event["ts"] + event["dur"]])
        for of, intervals in paths.items():
            # Kernels closer than a tenth of a pixel are drawn as one.
            near = union((b, e + 0.1 / scale) for b, e in intervals)
            path = "".join(f"M{x(b):.1f} {y}H{x(e):.1f}v{HEIGHT}H{x(b):.1f}z" for b, e in near)
            out.append(f'<path class="{of}" d="{path}"/>')
    out.append(f'<text class="soft" x="{RIGHT}" y="15" text-anchor="end">ms</text>')
    for n, (of, label) in enumerate(legend.items()):
        at = LEFT + 130 * n
        out.append(f'<path class="{of}" d="M{at} {bottom + 18}h12v12h-12z"/><text x="{at + 18}" y="{bottom + 29}">{label}</text>')
    options.out.write_text("<!-- Written by benches/lanes_of_trace.py. -->\n" + "\n".join([*out, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
