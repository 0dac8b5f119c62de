"""When two engines agree: the rule, and the table that shows how well.

A greedy choice must be the same wherever it is decisive: where the best logit leads the second by more than 10 times the
largest difference of that step's logits between the engines. Such a difference cannot turn the choice, so what a wrong
engine or a wrong file does is to leave few steps decisive and all logits apart: those two are what the bars are for.
"""

from dataclasses import dataclass, field

import numpy as np

DECISIVE = 10.0


@dataclass(frozen=True)
class Bar:
    """What a comparison must reach."""

    relative: float  # ||theirs - ours|| / ||ours|| over all logits of all steps, at most
    decisive: int  # steps whose choice is decisive, and so the same, at least


@dataclass
class Comparison:
    """One engine against xtrain on one folder; `faults` is empty where they agree."""

    model: str
    weights: str
    engine: str
    steps: int = 0
    agreeing: int = 0
    decisive: int = 0
    largest: float = float("nan")
    relative: float = float("nan")
    margins: tuple = (float("nan"), float("nan"))  # smallest, median
    note: str = ""
    faults: list = field(default_factory=list)

    @property
    def name(self):
        return f"{self.model} ({self.weights}) in {self.engine}"


def compare(model, weights, engine, ours, theirs, bar):
    """Compares [steps, vocabulary] logits, each engine having been given the same tokens before each step."""
    result = Comparison(model, weights, engine)
    ours = np.asarray(ours, np.float64)
    theirs = np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        result.faults.append(f"logits are {theirs.shape}, ours {ours.shape}")
        return result
    if not np.isfinite(theirs).all():
        result.faults.append("logits are not finite")
        return result
    difference = np.abs(theirs - ours).max(axis=1)
    best = np.sort(ours, axis=1)
    margin = best[:, -1] - best[:, -2]
    same = ours.argmax(axis=1) == theirs.argmax(axis=1)
    decisive = margin > DECISIVE * difference
    result.steps = len(ours)
    result.agreeing = int(same.sum())
    result.decisive = int(decisive.sum())
    result.largest = float(difference.max())
    result.relative = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))
    result.margins = (float(margin.min()), float(np.median(margin)))
    if result.relative > bar.relative:
        result.faults.append(f"logits differ by {result.relative:.2e} (relative), more than {bar.relative:.0e}")
    if result.decisive < bar.decisive:
        result.faults.append(
            f"only {result.decisive} of {result.steps} choices are decisive, fewer than {bar.decisive} ({result.agreeing} agree)"
        )
    return result


def table(results):
    """The comparisons as lines of text."""
    head = ("model", "weights", "engine", "agree", "decisive", "max diff", "relative", "margin min/median", "result")
    rows = [head]
    for r in results:
        if r.note:
            rows.append((r.model, r.weights, r.engine, "-", "-", "-", "-", "-", r.note))
            continue
        rows.append(
            (
                r.model,
                r.weights,
                r.engine,
                f"{r.agreeing}/{r.steps}",
                f"{r.decisive}/{r.steps}",
                f"{r.largest:.1e}",
                f"{r.relative:.1e}",
                f"{r.margins[0]:.1e} / {r.margins[1]:.1e}",
                "FAILED" if r.faults else "ok",
            )
        )
    return align(rows)


def align(rows):
    """Rows of text as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
