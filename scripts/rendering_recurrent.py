"""Stored results about what needs memory as docs/memory.md shows them. Used by reproduce.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import learning_recurrent
from fasttrain.studies.statistics import OPEN
from rendering import Json, Load, cores, percent, prose, rounded, table

TITLES = {
    "tmaze-10": "T-maze of length 10",
    "tmaze-50": "T-maze of length 50",
    "tmaze-200": "T-maze of length 200",
    "cartpole": "CartPole without velocities",
    "pendulum": "Pendulum without velocities",
    "memory-s7": "MiniGrid-MemoryS7",
    "skullking": "Skull King",
}
FILES = tuple(f"learning-recurrent-{name}.json" for name in TITLES)
HEAD = ("task", "arm", "seeds", "env steps", "final greedy policy", "lowest, highest seed", "seconds", "of CPU", "gate")


def learned(load: Load) -> str:
    """The table of results, and that of the training curves."""
    rows, curves, notes = [], [], []
    for name, title in TITLES.items():
        stored = load(f"learning-recurrent-{name}")
        found = learning_recurrent.found_of(name, stored["cells"])
        told = {arm: learning_recurrent.figures(cells, stored["measure"]) for arm, cells in found.items() if cells}
        for arm, figures in told.items():
            label = title if arm == next(iter(told)) else ""
            verdict = stored["gate"] if arm == learning_recurrent.FASTTRAIN else None
            rows.append(_row(label, arm, figures, stored["measure"], verdict))
            curves.append((label, arm, *(_value(part, name) for part in figures["curve"])))
        notes += _open_note(name, title, stored)
    text = (
        f"Means over seeds with Student's 95 % interval, on {cores(load('learning-recurrent-tmaze-10'))} that others "
        "kept busy too, one thread a run; seconds are medians of the training alone, CPU seconds those of the whole "
        "process. In T-mazes and in Skull King the share of episodes won, elsewhere the mean return. The gate is that "
        "of `fasttrain compare`, fasttrain against stock by paired seeds:"
    )
    tenths = ("task", "arm", *(str(tenth) for tenth in range(1, learning_recurrent.POINTS + 1)))
    after = " ".join([*notes, "What the sampled policy got in each tenth of its training, the mean over seeds:"])
    return f"{prose(text)}\n\n{table(HEAD, rows)}\n\n{prose(after)}\n\n{table(tenths, curves)}"


def _row(label: str, arm: str, figures: Json, measure: str, verdict: Json | None) -> tuple[str, ...]:
    rate = measure == "win_rate"
    low, high = figures["interval"]
    if rate:
        low, high = max(0.0, low), min(1.0, high)
    several = figures["seeds"] > 1
    bounds = (low, high) if several else (None, None)
    result = percent(figures["mean"], *bounds) if rate else _return(figures["mean"], *bounds)
    if figures["score_diff"] is not None:
        result += f", score {figures['score_diff']:+.0f}"
    least, most = (f"{100 * end:.0f}" if rate else _return(end) for end in figures["range"])
    seconds = (rounded(figures[key], 2) for key in ("wall_s", "cpu_s"))
    judged = "" if verdict is None else _verdict(verdict, rate)
    return (label, arm, str(figures["seeds"]), rounded(figures["env_steps"], 2), result,
            f"{least}, {most}" if several else "-", *seconds, judged)  # fmt: skip


def _open_note(name: str, title: str, stored: Json) -> list[str]:
    """What else is known where the gate could not decide."""
    if stored["gate"] is None or stored["gate"]["verdict"] != OPEN:
        return []
    found = learning_recurrent.gate(name, stored["cells"], learning_recurrent.curves)
    if found is None or found.pairs < 2:
        return []
    scale, unit = (100, " points") if stored["measure"] == "win_rate" else (1, "")
    low, difference, high = (scale * value for value in (found.low, found.difference, found.high))
    return [
        f"{title}: the final greedy policies scatter too much for a verdict over {found.pairs} seeds; the means of the "
        f"whole training curves differ by {difference:+.1f}{unit} [{low:+.1f}, {high:+.1f}]."
    ]


def _return(value: float, low: float | None = None, high: float | None = None) -> str:
    digits = 0 if abs(value) >= 30 else 2
    return f"{value:.{digits}f}" + ("" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]")


def _verdict(found: Mapping[str, Any], rate: bool) -> str:
    """`pass: +0.0 [-1.0, +1.0], margin 3`."""
    scale = 100 if rate else 1
    bounds = [found[key] for key in ("low", "high")]
    low, high = ("?" if bound is None else f"{scale * bound:+.1f}" for bound in bounds)
    return (
        f"{found['verdict']}: {scale * found['difference']:+.1f} [{low}, {high}], margin {scale * found['margin']:.3g}"
    )


def _value(part: float, name: str) -> str:
    """A share of games in percent, else a return."""
    if learning_recurrent.TASKS[name].measure == "win_rate":
        return f"{100 * part:.0f} %"
    return f"{part:.2f}" if abs(part) < 10 else f"{part:.0f}"


CARTPOLE = {
    f"recurrent-{units}-{name}": f"{units} units, minibatches of {what}"
    for units in (64, 256)
    for name, what in (
        ("128-short", "128, episodes of some 20 steps"),
        ("2048-short", "2,048, the same"),
        ("2048-long", "2,048, episodes longer than the rollout"),
    )
}
SKULLKING = {
    "recurrent-skullking-256": "256 units, sb3-contrib's architecture",
    "recurrent-skullking-64": "the same with 64 units",
    "recurrent-skullking-shared": "one LSTM of 64 units for both nets",
    "recurrent-skullking-encoder": "the same behind an encoder (248 → 64) of the user's, around the LSTM by torch",
}
ARITHMETIC = "recurrent-256-arithmetic"
SPEED_FILES = tuple(f"{name}.json" for name in (*CARTPOLE, ARITHMETIC, *SKULLKING))


def speed(load: Load) -> str:
    """CartPole without velocities against stock and others; what memory costs in Skull King."""
    rows = []
    for name, what in CARTPOLE.items():
        stored = load(name)
        stock = max(
            (stored["theirs"][each]["median"], stored["ratios"][each])
            for each in stored["ratios"]
            if each.startswith("sb3-contrib")
        )
        others = [stored["ratios"].get(each) for each in ("lean PPO-LSTM loop", "Sample Factory")]
        ratios = (_ratio(each) if each else "-" for each in (stock[1], *others))
        rows.append((what, rounded(stored["ours"]["median"], 3), rounded(stock[0], 3), *ratios))
    machine = cores(load("recurrent-64-128-short"))
    text = (
        f"CartPole without velocities, 64 envs × 128 steps, 4 epochs, whole runs on {machine}: env steps/s and ratios, "
        "taken turn by turn; stock's is the better of one thread and torch's own number. The lean loop is one file of "
        "PyTorch whose minibatches are whole envs' rollouts; Sample Factory has one LSTM for both nets:"
    )
    head = ("LSTM", "fasttrain", "stock", "ratio to stock", "to the lean loop", "to Sample Factory")
    shares = []
    for name, what in SKULLKING.items():
        stored = load(name)
        plain = stored["theirs"]["fasttrain MaskablePPO, no memory"]["median"]
        share = stored["ratios"]["fasttrain MaskablePPO, no memory"]["median"]
        shares.append((what, rounded(stored["ours"]["median"], 3), rounded(plain, 3), f"{100 * share:.0f} %"))
    product = load(ARITHMETIC)
    share = product["ratios"]["torch, product of matrices"]["median"]
    after = (
        "With 256 units arithmetic is the wall: in minibatches of 2,048 the LSTMs' products alone are "
        f"{rounded(product['ours']['median'], 2)} GFLOP/s of the update, {100 * share:.0f} % of what torch's product "
        "of two matrices of 1,024 × 1,024 reached there in turn. "
        "Skull King by MaskablePPO's own settings, with memory and without:"
    )
    skull = ("LSTM", "steps/s", "without memory", "share")
    return f"{prose(text)}\n\n{table(head, rows)}\n\n{prose(after)}\n\n{table(skull, shares)}"


def _ratio(found: Json) -> str:
    return f"{found['median']:.1f}×"
