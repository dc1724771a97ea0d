"""The campaign of envs that hang, end their process, crash it, eat the memory, raise, print: before a training, and in
`fasttrain check`. All must be named in one line with exit code 2, and nothing be left behind. See campaigns.py.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from injector import Nursery, Training

Say = Callable[[str], None]
Result = dict[str, Any]
TIMEOUT_S = 5.0
PATIENCE_S = 30.0
MEMORY_BYTES = 600 << 20  # what the machine seems to have
NAMED: Mapping[str, str] = {  # how → what is said of it
    "hang": "hangs in {place}: nothing came back for 5 s",
    "exit": "ends the process with code 3 in {place}",
    "segfault": r"dies by signal 11 \(segmentation fault\) in {place}",
    "eat": r"needs 0\.\d+ GB or more in {place}",
    "raises": r"RuntimeError: the board fell \(\S*victim\.py:\d+, in _raises\)",
    "spin": "hangs in {place}: nothing came back for 5 s",
    "abort": r"dies by signal 6 \(aborted\) in {place}",
    "leave": r"SystemExit: 3 \(\S*victim\.py:\d+, in _leave\)",
    "spam": "hangs in {place}: nothing came back for 5 s",
}
PLACES: Mapping[str, str] = {
    "step": r"step {at} of (episode 2 after )?seed \d+",
    "reset": r"reset of seed \d+",
    "constructor": "its constructor",
    "action_masks": r"action_masks\(\) after step {at} of (episode 2 after )?seed \d+",
    "close": r"close\(\)",
}
RUNS: Mapping[str, tuple[str, ...]] = {
    "dummy": ("+profile=speed", "vec_env=dummy", "num_envs=2"),
    "shared": ("+profile=speed", "vec_env=shared", "num_envs=4", "num_workers=2"),
    "auto": ("+profile=balance", "vec_env=auto", "num_envs=4"),
    "check": ("check",),
}
QUIET = ("env.entry_point=victim:Victim", f"env.step_timeout_s={TIMEOUT_S:g}", "total_timesteps=512", "live=off",
         "report=false", "hydra.run.dir=run")  # fmt: skip


def victims(count: int, seed: int, folder: Path, say: Say, lent: Nursery | None = None) -> Result:
    """`most_s`: the longest from the start to the end; `seconds`: of each way."""
    result: Result = {"victims": 0, "named": 0, "ways": {}, "most_s": 0.0, "processes": 0, "shared": 0, "bad": []}
    rng = random.Random(seed)
    hows, names = list(NAMED), list(RUNS)
    with Nursery.lent(lent) as nursery:
        for number in range(count):
            how = hows[number % len(hows)]
            where = "step" if number < len(hows) else rng.choice(list(PLACES))
            if how in ("raises", "leave") and where == "close":  # has shown by then what it can
                where = "reset"
            at, name = rng.randrange(1, 250), names[number % len(names)]
            if how in ("raises", "leave") and where not in ("constructor",):
                name = "check"  # a training warns, and goes on until it meets that itself
            place = folder / f"victim{number}"
            place.mkdir(parents=True)
            algo = "algo=maskable_ppo" if where == "action_masks" else "algo=ppo"
            told = (f"env.kwargs.how={how}", f"env.kwargs.where={where}", f"env.kwargs.at={at}")
            training = Training(nursery, place, (*RUNS[name], *QUIET, algo, *told), memory=MEMORY_BYTES)
            training.end()
            _judge(training, f"{how} in {where} ({name})", how, PLACES[where].format(at=at), result)
            result["ways"][how] = result["ways"].get(how, 0) + 1
            if (number + 1) % 10 == 0:
                say(f"{number + 1} of {count} victims")
    return result


def _judge(training: Training, what: str, how: str, place: str, result: Result) -> None:
    took, said = time.monotonic() - training.begun, training.said()
    left = training.litter(PATIENCE_S)  # what others on this machine leave for a moment is not of this run
    lines = [line for line in said.splitlines() if re.search(NAMED[how].format(place=place), line)]
    named = len(lines) == 1 and training.code == 2 and "Traceback" not in said and f"about to {how}" in said
    result["victims"] += 1
    result["named"] += named
    result["most_s"] = round(max(result["most_s"], took), 1)
    result["processes"] += left.processes
    result["shared"] += left.shared
    if not named:
        result["bad"].append(f"{what}: exit code {training.code}: {said[-1500:]}")
    if any(left):
        result["bad"].append(f"{what}: {left} left")
