"""Stored results of studies and of the doctor as the README shows them. Used by reproduce.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rendering
from rendering import Json, Load

TASKS = {"cartpole": "CartPole, PPO", "skullking": "Skull King, MaskablePPO"}
EXAMINED = {
    "limits-skullking": "Skull King, `speed`",
    "limits-dqn-cartpole": "CartPole, DQN, `speed`",
    "limits-python-100us": "a Python env of 100 µs, `speed`",
    "limits-python-100us-dummy": "the same with `vec_env=dummy`",
}


def compare(load: Load) -> str:
    """The gate on an equal, a faster and a crippled candidate."""
    found = load("compare")
    studies = found["studies"].items()
    rows = [_judged(TASKS[task], row, study["gate"]) for task, study in studies for row in study["rows"][1:]]
    seeds = len(found["studies"]["cartpole"]["rows"][0]["seeds"])
    head = ("task", "candidate", "steps/s ÷ stock", "win rate or mean reward − stock", "verdict")
    text = f"Stock beside itself, `speed` and a candidate whose learning rate is next to nothing, {seeds} seeds each:"
    return f"{text}\n\n{rendering.table(head, rows)}"


def _judged(task: str, row: Json, gate: Json) -> tuple[str, ...]:
    rate = gate["metric"] == "win_rate"
    unit = f"{100 * gate['margin']:.3g} points" if rate else f"{gate['margin']:.3g}"
    value, low, high = ((100 if rate else 1) * row["difference"][key] for key in ("value", "low", "high"))
    quality = f"{value:+.3g} [{low:+.3g}, {high:+.3g}], margin {unit}"
    return task, row["name"], ratio(row["speed_up"]), quality, row["verdict"]


def ablate(load: Load) -> str:
    """What ten minutes said of Skull King."""
    found = load("ablate")
    rows = [
        (f"`{row['name']}`", row["change"], ratio(row["added"]), ratio(row["within"]), row["why"])
        for row in found["rows"]
    ]
    head = ("flag", "change", "× when added", "× profile ÷ without", "verdict")
    text = f"Of `speed` on Skull King on {rendering.cores(found)} in ten minutes"
    return f"{text}; what was kept is {ratio(found['result'])} as fast as all of it:\n\n{rendering.table(head, rows)}"


def tune(load: Load) -> str:
    """What five minutes found for Skull King."""
    found = load("tune")
    best = " ".join(f"`{key}={value}`" for key, value in found["best"].items())
    what = f"{best} at {ratio(found['result'])}" if best else f"nothing clearly faster ({ratio(found['result'])})"
    where = f"Of `speed` on Skull King on {rendering.cores(found)}"
    return rendering.prose(f"{where} it found, in five minutes and {len(found['rows'])} trials, {what}.")


def limits(load: Load) -> str:
    """What the doctor says beside what is measured without it."""
    rows = []
    for name, label in EXAMINED.items():
        found = load(f"limits/{name}")
        advice, said = "nothing that would pay", "-"
        if found["advice"]:
            advice = f"`{found['advice']}`"
            said = f"{gain(found['expected_gain']['median'])} / {gain(found['real_gain']['best'])}"
        shares = f"{100 * found['doctor_share']['median']:.0f} % / {100 * found['measured_share']['best']:.0f} %"
        rows.append((label, str(found["usable_cores"]), shares, advice, said))
    head = ("run", "cores", "share of its limit: doctor / separate processes", "first advice", "gain: expected / real")
    return rendering.table(head, rows)


def ratio(interval: Mapping[str, Any] | None) -> str:
    """`2.31× [2.20, 2.50]`."""
    if interval is None:
        return "-"
    low, high = interval["low"], interval["high"]
    bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{interval['value']:.2f}×{bounds}"


def gain(share: float) -> str:
    """`+50 %`."""
    return f"{100 * share:+.0f} %"
