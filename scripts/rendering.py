"""Stored results as the README shows them: from JSON to Markdown, nothing is measured. Used by reproduce.py."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import learning

Json = Mapping[str, Any]
Load = Callable[[str], Json]  # name of a file in docs/results, without .json
SHOWN_OTHERS = 3


def loader(folder: Path) -> Load:
    """Reads `folder`/NAME.json."""
    return lambda name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def rounded(value: float, digits: int = 3) -> str:
    """`154,000`: three digits that count."""
    exact = float(f"{value:.{digits}g}")
    return f"{exact:,.0f}" if abs(exact) >= 10 ** (digits - 1) else f"{exact:g}"


def percent(share: float, low: float | None = None, high: float | None = None, digits: int = 1) -> str:
    """`62.2 % [60.1, 64.3]`."""
    text = f"{100 * share:.{digits}f} %"
    return text if low is None or high is None else f"{text} [{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


def code(lines: Iterable[str]) -> str:
    """A block of output."""
    return "\n".join(["```", *lines, "```"])


def prose(text: str) -> str:
    """Broken into lines as the README's are."""
    return textwrap.fill(text, width=130, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


# --- single runs


def first_run(load: Load) -> str:
    """What to expect of the default job, and its last lines."""
    found = load("first-run")
    summary, quality = found["summary"], found["summary"]["quality"]
    slow = found["slow"]
    text = (
        f"Captured on {cores(found)}: {summary['wall_s']:.0f} seconds of training, {found['elapsed_s']:.0f} in all. On "
        f"slower ones, a process burning each of them and no kernel compiled before, "
        f"{slow['summary']['wall_s']:.0f} and {slow['elapsed_s']:.0f}. It wins "
        f"{percent(quality['sampled']['win_rate'], digits=0)} of its games with sampled and "
        f"{percent(quality['win_rate'], digits=0)} with greedy actions; chance is 25 %."
    )
    return f"{prose(text)}\n\n{code(found['lines'])}"


def export(load: Load) -> str:
    """What `export` prints."""
    return code(load("first-run")["export"])


def checkup(load: Load) -> str:
    """What `check` prints."""
    return code(load("checkup")["lines"])


def workers(load: Load) -> str:
    """Two rows of the plan."""
    rows = load("workers")["rows"]
    return code(f"{row['flag']:<11}  {row['requested']}  {row['effective']!s:<6}  {row['reason']}" for row in rows)


def start(load: Load) -> str:
    """From the command to the first update, and what compiling costs; the checkout in turn is the first version's."""
    found = load("start")
    rows = []
    for case, ours in found["ours"].items():
        wall, cpu, before = ours["wall_s"], ours["cpu_s"], found.get("against", {}).get(case)
        told = f"{before['wall_s']['median']:.1f} s, {before['cpu_s']['median']:.1f} s of CPU" if before else "-"
        span = f"{wall['median']:.1f} s [{wall['min']:.1f}, {wall['max']:.1f}]"
        rows.append([case, span, f"{cpu['median']:.1f} s", told])
    head = ("", "first update after", "CPU until then", "the version before")
    return (
        f"{table(head, rows)}\n\nOn {cores(found)}; `compiling`: all of the run's kernels, `help`: `fasttrain --help`."
    )


def skirmish_learning(load: Load) -> str:
    """One seed each."""
    runs = load("skirmish-learning")["runs"]
    greedy, dqn = runs["greedy"], runs["dqn"]
    course = [row["win_rate"] for row in runs["self"]["evaluations"]]
    return prose(
        f"One seed each: MaskablePPO under `speed` wins {won(greedy)} of its games against `greedy` after "
        f"{steps(greedy)} steps ({greedy['wall_s'] / 60:.0f} minutes on 2 busy cores), DQN with prioritized "
        f"replay {won(dqn)} against `random` after {steps(dqn)} (`{' '.join(dqn['arguments'][4:6])}`). "
        f"In self-play the win rate against `greedy`, which it never trained against, rose from "
        f"{percent(course[0], digits=0)} after a tenth of {steps(runs['self'])} steps to "
        f"{percent(course[-1], digits=0)}."
    )


def won(run: Json) -> str:
    """The greedy policy's win rate with its interval."""
    return percent(run["quality"]["win_rate"], *run["quality"]["ci95"]["win_rate"], digits=0)


def steps(run: Json) -> str:
    """`15 million`, `200,000`."""
    count = run["env_steps"]
    return f"{count / 1e6:.0f} million" if count >= 2e6 else rounded(count)


def cores(found: Json) -> str:
    """`2 cores`."""
    return str(found["machine"]).partition(",")[0]


# --- speed


class Work(NamedTuple):
    """A row: a work of benchmark.py and what the table calls it."""

    name: str
    label: str
    against: str | None = None  # None: the best of the others


WORKS = (
    Work("skullking-train", "training Skull King, MaskablePPO [64, 64], 256 envs, minibatch 1,024, 4 epochs"),
    Work("ppo-update-64-256", "its update alone, minibatch 256"),
    Work("ppo-update-64-2048", "its update alone, minibatch 2,048"),
    Work("ppo-update-512", "the same with [512, 512, 256], minibatch 2,048, bfloat16 against float32"),
    Work("ppo-cartpole-64", "training CartPole, PPO, 64 envs"),
    Work("ppo-cartpole-8", "training CartPole, PPO, 8 envs"),
    Work("dqn-cartpole", "training CartPole, DQN [64, 64], 8 envs, 8 updates of 64 a step"),
    Work("dqn-update-64", "its updates alone"),
    Work("per-storage-1e6", "prioritized replay, 256 of 10⁶ drawn and rated, with storage"),
    Work("per-tree-1e6", "the same by the tree alone"),
    Work("vecenv-collect", "collecting from 64 Python envs of 100 µs with masks, 2 workers"),
    Work("vecenv-wargame", "the same from 16 Skirmish envs in plain Python, one unit at a time"),
    Work("vecenv-step-256", "stepping 256 CartPoles, nothing else"),
    Work("vecenv-step-64", "the same with 64"),
    Work("vecenv-step-8", "the same with 8"),
    Work("groups-first-ready", "rollouts from 64 envs that wait 2 ms a step (variation 0.63), `schedule=first_ready`"),
    Work("skullking-step", "stepping native Skull King, random legal actions, observations and masks written"),
    Work("skirmish-step", "stepping native Skirmish against `greedy`, heads"),
    Work("skirmish-units-step", "the same, one unit at a time"),
    Work("skirmish-planner", "stepping it against `planner`, heads", against="plain Python env"),
    Work("skirmish-planner", "what its caches gain there", against="without caches"),
    Work("skirmish-caches", "what its caches gain against `greedy`"),
    Work("skirmish-rewards", "what leaving out secondary rewards gains", against="secondary at every decision"),
    Work("skirmish-self-play", "training Skirmish against itself instead of against `greedy`"),
)
AUTO = ("vecenv-auto-64", "vecenv-auto-8")
TREES = ("per-tree-1e4", "per-tree-1e7")


def speed_works() -> list[str]:
    """Every work that the speed table takes something from."""
    return list(dict.fromkeys([*(work.name for work in WORKS), *AUTO, *TREES]))


def speed(load: Load) -> str:
    """The table of works, and what does not fit into a row."""
    rows = [_speed_row(work, load(work.name)) for work in WORKS]
    auto = [load(name)["ratios"]["DummyVecEnv"]["median"] for name in AUTO]
    small, large = (load(name)["ours"]["median"] for name in TREES)
    text = (
        f"On {cores(load(WORKS[0].name))}: medians, and of the ratios, taken turn by turn, also the extremes. Where "
        f"envs cost next to nothing (CartPole with 64 and 8 envs), `vec_env=auto` stays with one process and keeps "
        f"DummyVecEnv's speed ({auto[0]:.2f}× and {auto[1]:.2f}×, within the noise). From 10⁴ to "
        f"10⁷ entries a round of the tree takes {small / large:.1f} times as long."
    )
    return f"{prose(text)}\n\n{table(['work', 'fasttrain', 'others', 'ratio to the best of them', 'turns'], rows)}"


def turns_of(found: Json) -> int:
    """In how many turns a work of benchmark.py was measured."""
    repeats = re.search(r"--repeats (\d+)", found["command"])
    return int(repeats[1]) if repeats else 5


def _speed_row(work: Work, found: Json) -> list[str]:
    unit = re.sub(r" (of .* )?per second$", "/s", found.get("unit", "env steps per second").removeprefix("env "))
    others = sorted(found["theirs"].items(), key=lambda item: -item[1]["median"])
    others = [item for item in others if work.against in (None, item[0])]
    shown = [f"{rounded(rate['median'])} ({name})" for name, rate in others[:SHOWN_OTHERS]]
    if more := len(others) - SHOWN_OTHERS:
        shown += [f"{more} slower"] if more > 0 else []
    ratio = found["ratio"] if work.against is None else found["ratios"][work.against]
    turns = turns_of(found)
    spread = "" if turns == 1 else f" [{rounded(ratio['min'])}, {rounded(ratio['max'])}]"
    ideal = found.get("share_of_ideal")
    label = work.label if ideal is None else f"{work.label}: {100 * ideal['median']:.0f} % of cores ÷ env time"
    ours = f"{rounded(found['ours']['median'])} {unit}"
    return [label, ours, ", ".join(shown), f"**{rounded(ratio['median'])}×**{spread}", str(turns)]


# --- learning

TITLES = {
    "cartpole": "CartPole-v1",
    "acrobot": "Acrobot-v1",
    "lunarlander": "LunarLander-v3",
    "invalid-actions": "InvalidActionEnvDiscrete (70 actions, 55 illegal), MaskablePPO",
    "skullking": "Skull King, MaskablePPO, win rate",
    "skullking-short": "Skull King over 200,000 steps",
    "dqn-cartpole": "CartPole-v1",
    "dqn-acrobot": "Acrobot-v1",
    "dqn-lunarlander": "LunarLander-v3",
    "dqn-skullking": "Skull King with masks against three `easy` bots, win rate",
}
PPO = (
    *((task, "speed") for task in TITLES if not task.startswith("dqn-")),
    ("skullking-short", "balance"),
)
DQN = (
    ("dqn-cartpole", "speed"),
    ("dqn-acrobot", "speed"),
    ("dqn-lunarlander", "speed"),
    ("dqn-lunarlander", "double-per"),
    ("dqn-skullking", "speed"),
)
HEAD = ("task", "env steps", "seeds", "stock", "`speed`", "difference", "gate", "steps to threshold", "seconds to it")
Cells = Mapping[int, Json]


def cells_of(load: Load, task: str, side: str) -> dict[int, Json]:
    """The stored runs of one side, by seed."""
    found = load(f"learning/{task}")["cells"]
    return learning.chosen(found, side, learning.overrides_of(learning.TASKS[task], side))


def learning_ppo(load: Load) -> str:
    """PPO's gate."""
    rows, notes = [], []
    for task, side in PPO:
        sides = cells_of(load, task, "baseline"), cells_of(load, task, side)
        rows.append(_learning_row(task, TITLES[task] if side == "speed" else f"the same under `{side}`", *sides))
        notes += _open_note(TITLES[task], task, *sides)
    return "\n\n".join([table(HEAD, rows), *map(prose, notes)])


def learning_dqn(load: Load) -> str:
    """DQN's gate; what the final greedy policy alone would say."""
    rows, finals, notes = [], [], []
    for task, side in DQN:
        ours = cells_of(load, task, side)
        if learning.TASKS[task].chance is not None:
            rows.append(_chance_row(task, ours))
            continue
        stock = cells_of(load, task, "baseline")
        title = TITLES[task] if side == "speed" else "the same, double Q and prioritized replay"
        rows.append(_learning_row(task, title, stock, ours))
        finals.append(learning.compared(stock, ours)["final"].verdict)
        notes += _stopping_note(TITLES[task], task, stock, ours)
    by_final = f"By the final greedy policy the verdicts are {', '.join(finals)}."
    return "\n\n".join([table(HEAD, rows), prose(" ".join([by_final, *notes]))])


def _learning_row(task: str, title: str, stock: Cells, ours: Cells) -> list[str]:
    gated = learning.TASKS[task].gated
    found = learning.compared(stock, ours)[gated]
    is_rate = learning.figure(ours, gated)[1]
    show = percent if is_rate else _one_digit
    difference = _difference(found.difference, found.low, found.high, is_rate)
    seeds = {seed: cells for seed, cells in stock.items() if seed in ours}
    reached = [learning.times(cells, learning.TASKS[task].threshold) for cells in (seeds, ours)]
    return [
        title, _horizon(task), str(found.pairs), show(found.baseline), show(found.candidate), difference, found.verdict,
        *_times(reached),
    ]  # fmt: skip


def _chance_row(task: str, ours: Cells) -> list[str]:
    chance = learning.TASKS[task].chance or 0.0
    found = learning.beats_chance(ours, chance)
    mean = percent(found["mean"], found["low"], found["high"])
    times = _times([learning.times(ours, learning.TASKS[task].threshold)])
    by_chance = f"chance {percent(chance, digits=0)}"
    return [TITLES[task], _horizon(task), str(len(ours)), by_chance, mean, "", found["verdict"], *times]


def _times(sides: Sequence[Json]) -> tuple[str, str]:
    """`74,000 → 19,000 (195)` and seconds; where not all seeds reached it, how many did."""

    def joined(key: str) -> str:
        found = [side[key][0] for side in sides]
        return " → ".join("never" if value is None else rounded(value, 2) for value in found)

    count = "" if all(s["reached"] == s["seeds"] for s in sides) else (
        "; " + " and ".join(f"{s['reached']} of {s['seeds']}" for s in sides) + " seeds"
    )  # fmt: skip
    threshold = sides[0]["threshold"]
    shown = percent(threshold, digits=0) if 0 < threshold < 1 else f"{threshold:g}"
    return f"{joined('env_steps')} ({shown}{count})", joined("wall_s")


def _horizon(task: str) -> str:
    (total,) = [text for text in learning.TASKS[task].overrides if text.startswith("total_timesteps=")]
    return f"{int(total.partition('=')[2]):,}"


def _one_digit(value: float) -> str:
    return f"{value:.1f}"


def _difference(value: float, low: float, high: float, is_rate: bool) -> str:
    if is_rate:
        return f"{100 * value:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    digits = 0 if abs(value) >= 30 else 1
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _open_note(title: str, task: str, stock: Cells, ours: Cells) -> list[str]:
    """What else is known where the gate could not decide."""
    found = learning.compared(stock, ours)
    if found[learning.TASKS[task].gated].verdict != learning.OPEN:
        return []
    others = [("the mean of the training curve", "curve"), ("sampled play", "sampled")]
    known = [f"{words} by {_known(found[name], learning.figure(ours, name)[1])}" for words, name in others]
    return [
        f"On {title} the last greedy policy's result scatters too much for {found['final'].pairs} seeds; from stock's "
        f"differ {' and '.join(known)}."
    ]


def _known(found: Any, is_rate: bool = False) -> str:
    if is_rate:
        return _difference(found.difference, found.low, found.high, is_rate)
    return f"{found.difference:+.0f} [{found.low:+.0f}, {found.high:+.0f}]"


def _stopping_note(title: str, task: str, stock: Cells, ours: Cells) -> list[str]:
    """Seeds that were added because the first ten were not enough are said."""
    first = [{seed: cell for seed, cell in cells.items() if seed < learning.MIN_PAIRS} for cells in (stock, ours)]
    gated = learning.TASKS[task].gated
    early, final = learning.compared(*first)[gated], learning.compared(stock, ours)[gated]
    if early.pairs == final.pairs or early.verdict == final.verdict:
        return []
    return [f"On {title} ten seeds were not enough ({_known(early)}); it was stopped at {final.pairs}."]


# --- the rest


def masks(load: Load) -> str:
    """Of sample_masks.py."""
    found = load("masks")
    count = f"{found['draws'] / 1e6:.0f} million"
    illegal = "none of them illegal" if not found["illegal"] else f"{found['illegal']} of them illegal"
    return prose(
        f"No illegal action is drawn: `{found['command']}` drew {count} over float32, bfloat16 and float16 logits "
        f"and all kinds of masks, {illegal}."
    )


SETTINGS = {
    "stock": "stock (minibatch 64, 10 epochs, learning rate 3e-4, 12 envs)",
    "balance": "`balance`",
    "speed": "`speed`",
    "speed, stock's learning rate": "`speed` with stock's learning rate",
}


def faster_settings(load: Load) -> str:
    """Speed beside what is learned."""
    found = load("faster-settings")
    rows = []
    for name, row in found["rows"].items():
        rate, ratio, wins = row["steps_per_s"], row["ratio"], row["win_rate"]
        gain = "" if name == "stock" else f"{ratio['median']:.1f}× [{ratio['min']:.1f}, {ratio['max']:.1f}]"
        won_text = percent(wins["mean"], wins["min"], wins["max"])
        rows.append([SETTINGS[name], rounded(rate["median"]), gain, won_text, f"{row['updates_per_step']:.3f}"])
    head = ["settings of", "steps/s", "ratio", "win rate [lowest, highest]", "updates per step"]
    text = (
        f"What the faster settings cost in learning on Skull King, at {found['env_steps']:,} env steps each, all "
        f"by the same engine (`{found['command']}`: {found['turns']} seeds in turn, {found['episodes']:,} greedy "
        f"games each):"
    )
    return f"{prose(text)}\n\n{table(head, rows)}"


def picture(place: str, words: str) -> Callable[[Load], str]:
    """A picture beside the JSON files; its place is named from the page's folder."""
    return lambda load: f"![{words}]({place})"
