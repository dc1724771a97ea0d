"""What is promised and was checked, as the README shows it: `auto`, wrong inputs, stock's suites. For reproduce.py."""

from __future__ import annotations

import statistics

import rendering
from rendering import Json, Load

TASKS = {
    "cartpole": "CartPole, [64, 64]",
    "mlp-256": "CartPole, [256, 256]",
    "mlp-1024": "CartPole, [1024, 1024]",
    "computes-100us": "an env that computes 100 µs",
    "waits-2ms": "an env that waits 2 ms",
    "dict": "Dict observations",
    "pictures": "84×84 images, NatureCNN",
    "pong": "Pong of EnvPool, NatureCNN",
}


def auto(load: Load) -> str:
    """The matrix: a row an env and algorithm, quiet and busy in each cell."""
    found = load("auto")
    cells = {(cell["algo"], cell["task"], cell["busy"]): _cell(cell) for cell in found["cells"]}
    rows = []
    for algo in ("ppo", "dqn"):
        for task in TASKS:
            sides = [cells[algo, task, busy] for busy in (False, True) if (algo, task, busy) in cells]
            if sides:
                rows.append((f"{algo.upper()}, {TASKS[task]}", *map(" / ".join, zip(*sides, strict=True))))
    turns = statistics.median(len(cell["rates"]["speed"]) for cell in found["cells"])
    text = f"On {rendering.cores(found)}, {turns:.0f} turn{'s' if turns > 1 else ''}, on a quiet machine"
    text += " / with a process burning each core." if any(cell["busy"] for cell in found["cells"]) else "."
    head = ("training", "stock's best, steps/s", "`balance`", "`speed`", "`speed` to the best explicit choice")
    return f"{rendering.prose(text)}\n\n{rendering.table(head, rows)}"


def _cell(cell: Json) -> tuple[str, str, str, str]:
    rate = statistics.median(cell["rates"][cell["best_stock"]])
    return f"{rate:,.0f}", f"{cell['balance']:.2f}×", f"{cell['speed']:.2f}×", f"{100 * cell['auto']:.0f} %"


def wrong_inputs(load: Load) -> str:
    """How many were tried and how many ended otherwise than by one clear message."""
    parts = load("wrong_inputs")["parts"]
    inside = sum(parts[name]["cases"] for name in ("settings", "hand"))
    bad = sum(part["bad_count"] for part in parts.values())
    return rendering.prose(
        f"`python3 scripts/wrong_inputs.py` tries {inside:,} wrong inputs by calling the command and "
        f"{parts['processes']['cases']} as processes: {bad or 'none'} ended with a traceback, without a word, "
        "not at all, with another exit code than 2 or without the wrong key in the first line."
    )


def stock_suites(load: Load) -> str:
    """Counts of both suites, with stock's classes and with ours, and each exception."""
    suites = load("stock_suites")["suites"]
    rows, notes = [], []
    for package, suite in suites.items():
        counts = [
            f"{_total(suite, classes, 'passed'):,} passed, {_total(suite, classes, 'failed')} failed"
            for classes in ("stock", "ours")
        ]
        rows.append((f"{package.replace('_', '-')} {suite['version']}", str(len(suite["files"])), *counts))
        notes += [f"- `{test}`: {why}" for test, why in suite["exceptions"].items()]
        notes += [f"- `{test}` fails with stock's class too" for test in suite["failed_with_stock"]]
    told = rendering.table(("suite", "files", "stock's classes", "ours"), rows)
    return "\n\n".join([told, *(["\n".join(notes)] if notes else [])])


def _total(suite: Json, classes: str, outcome: str) -> int:
    return sum(both[classes][outcome] for both in suite["files"].values())
