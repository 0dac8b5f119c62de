"""The losses of runs as a table, and the table as a picture: what docs/fp8.md shows of the recipes.

    python benches/loss_curves.py table RUN... > curves.csv     # means over 25 steps, a column a run folder
    python benches/loss_curves.py picture curves.csv > curves.svg   # the gap of each column to the mean of those called bf16

The picture shows how much higher, in percent, each loss is than that of the baseline's run of the same seed (called bf16-0), smoothed
over 100 steps, and as a band what other seeds of the baseline do.
"""

import csv
import json
import pathlib
import sys

WINDOW = 25
COLOURS = ["#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0a7ea4"]


def losses(run):
    steps = {}
    for line in (pathlib.Path(run) / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "step":
            steps[event["step"]] = event["loss"]
    return [steps[n] for n in sorted(steps)]


def table(runs):
    columns = {pathlib.Path(run).name: losses(run) for run in runs}
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["step", *columns])
    for end in range(WINDOW, min(map(len, columns.values())) + 1, WINDOW):
        out.writerow([end, *(f"{sum(c[end - WINDOW:end]) / WINDOW:.5f}" for c in columns.values())])


def picture(path):
    rows = list(csv.DictReader(open(path)))
    steps = [int(row["step"]) for row in rows]
    columns = {name: [float(row[name]) for row in rows] for name in rows[0] if name != "step"}
    smooth = lambda x: [sum(x[max(0, i - 3):i + 1]) / len(x[max(0, i - 3):i + 1]) for i in range(len(x))]
    columns = {name: smooth(values) for name, values in columns.items()}
    base = columns["bf16-0"]
    gaps = {name: [100 * (a / b - 1) for a, b in zip(values, base)] for name, values in columns.items() if name != "bf16-0"}
    first, width, height, left, top, most = 4, 720, 300, 60, 20, 1.5
    x = lambda i: left + (steps[i] - steps[first]) / (steps[-1] - steps[first]) * (width - left - 190)
    y = lambda gap: top + (most - max(-most, min(most, gap))) / (2 * most) * (height - top - 40)
    line = lambda values: " ".join(f"{x(i):.1f},{y(values[i]):.1f}" for i in range(first, len(steps)))
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#57606a">')
    print(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    for gap in (-1.5, -1, -0.5, 0, 0.5, 1, 1.5):
        print(f'<path d="M{left} {y(gap):.1f}H{width - 190}" stroke="#d0d7de"/><text x="{left - 6}" y="{y(gap) + 4:.1f}" text-anchor="end">{gap:+.1f}%</text>')
    for step in range(250, steps[-1] + 1, 250):
        print(f'<text x="{x(steps.index(step)):.1f}" y="{height - 22}" text-anchor="middle">{step}</text>')
    print(f'<text x="{(left + width - 190) / 2}" y="{height - 4}" text-anchor="middle">step</text>')
    colours = iter(COLOURS)
    for n, (name, values) in enumerate(gaps.items()):
        colour = "#afb8c1" if name.startswith("bf16") else next(colours)
        print(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{line(values)}"/>')
        place = top + 14 + 20 * n
        print(f'<path d="M{width - 178} {place - 4}h18" stroke="{colour}" stroke-width="3"/><text x="{width - 154}" y="{place}">{name}</text>')
    print("</svg>")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("table", "picture"):
        sys.exit(__doc__)
    table(sys.argv[2:]) if sys.argv[1] == "table" else picture(sys.argv[2])
