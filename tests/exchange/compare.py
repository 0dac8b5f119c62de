"""When two engines agree: the rule, and the table that shows how well."""

from dataclasses import dataclass, field

import numpy as np

# A choice is decisive where the best logit leads the second by more than this many times the engines' largest difference.
DECISIVE = 10.0


@dataclass(frozen=True)
class Bar:
    """What a comparison must reach."""

    relative: float  # ||theirs - ours|| / ||ours|| over all logits of all steps, at most
    decisive: int  # steps of which the choice is decisive, at least


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
    for step in np.flatnonzero(decisive & ~same):
        result.faults.append(
            f"token {step}: xtrain takes {ours[step].argmax()}, the engine {theirs[step].argmax()}, though the margin "
            f"is {margin[step]:.3g} and the logits differ by {difference[step]:.3g} only"
        )
    if result.relative > bar.relative:
        result.faults.append(f"logits differ by {result.relative:.2e} (relative), more than {bar.relative:.0e}")
    if result.decisive < bar.decisive:
        result.faults.append(
            f"only {result.decisive} of {result.steps} choices are decisive, fewer than {bar.decisive}"
        )
    return result


def table(results):
    """The comparisons as lines of text."""
    head = ("model", "weights", "engine", "agree", "decisive", "max diff", "relative", "margin min/median", "")
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
