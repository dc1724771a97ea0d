#!/usr/bin/env python3
"""What the README shows of single runs, measured again: python3 scripts/captures.py NAME

Each capture starts `fasttrain` in an empty folder and stores what the README needs of it as docs/results/NAME.json.

  first-run           the default job under speed, its model exported, and the job once more on a machine that is half
                      as fast and has compiled nothing (two minutes)
  checkup             the README's example env with the mask of the step before (a few seconds)
  workers             what vec_env=auto decides for 64 envs of 100 µs (a few seconds)
  skirmish-learning   what Skirmish learns in 15 million steps, DQN in 200,000, self-play in 15 million (a quarter of
                      an hour)
  compare             stock, speed and a crippled candidate on CartPole and Skull King, five seeds (20 minutes)
  ablate, tune        what pays of speed on Skull King, and what would be faster still (ten and five minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_machine
from fasttrain.machine import usable_cores

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
RUN = "outputs/2026-01-31/12-00-00_skullking_maskable_ppo_1"  # the folder that the README's examples name
# The example's mask as it was before the step, a frequent mistake.
STALE = {
    "self.there = np.ones(self.size, bool)\n": "self.there = self.before = np.ones(self.size, bool)\n",
    "self.there[action] = False\n": "self.before = self.there.copy(); self.there[action] = False\n",
    "return self.there if self.there.any()": "return self.before if self.before.any()",
}
COMPARED = {
    "cartpole": ("env.id=CartPole-v1", "algo=ppo", "total_timesteps=100000", "eval.episodes=100"),
    "skullking": ("total_timesteps=200000", "eval.episodes=1000"),
}
LEARNING = {
    "greedy": ("env=skirmish", "total_timesteps=15e6"),
    "dqn": (
        "env=skirmish",
        "algo=dqn",
        "algo.prioritized=true",
        "opponent=random",
        "algo.target_update_interval=2000",
        "algo.buffer_size=200000",
        "total_timesteps=200000",
    ),
    "self": ("env=skirmish", "opponent=self", "total_timesteps=15e6"),
}


def fasttrain(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, expected: int = 0
) -> list[str]:
    """Run it with `folder` as working directory; what it printed, line by line.

    Raises:
        SystemExit: it ended with another exit code than `expected`.
    """
    command = [sys.executable, "-m", "fasttrain", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode != expected:
        raise SystemExit(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return [line.rstrip() for line in done.stdout.splitlines()]


def summary_of(folder: Path) -> dict[str, Any]:
    """What is kept of summary.json."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    kept = {key: summary[key] for key in ("env_steps", "wall_s", "startup_s", "steps_per_s", "updates", "quality")}
    return {**kept, "evaluations": summary["evaluations"]}


def between(lines: Sequence[str], first: str, last: str) -> list[str]:
    """From the line that begins with `first` to before the one that begins with `last`; empty lines at the end go."""
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    ends = (number for number, line in enumerate(lines) if number > begin and line.startswith(last))
    kept = list(lines[begin : next(ends, len(lines))])
    while kept and not kept[-1]:
        kept.pop()
    return kept


def first_run(folder: Path) -> dict[str, Any]:
    """The default job, its export, and the job beside a process burning each core, with an empty cache of kernels."""
    begun = time.perf_counter()
    lines = fasttrain(folder, "+profile=speed", f"hydra.run.dir={RUN}")
    took = time.perf_counter() - begun
    with bench_machine.burners(usable_cores()):
        begun = time.perf_counter()
        fasttrain(
            folder, "+profile=speed", "hydra.run.dir=slow", environment={"NUMBA_CACHE_DIR": str(folder / "cache")}
        )
        slow = {"elapsed_s": time.perf_counter() - begun, "summary": summary_of(folder / "slow")}
    exported = fasttrain(folder, "export", f"run={RUN}", "format=onnx")
    return {
        "lines": [line for line in between(lines, "[PERF] ", "everything is in") if not line.startswith("evaluating:")],
        "summary": summary_of(folder / RUN),
        "elapsed_s": took,
        "slow": slow,
        "export": between(exported, "inputs", "no such line"),
    }


def checkup(folder: Path) -> dict[str, Any]:
    """The example of the README, spoiled."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    source = next(text for text in examples if "class Collect" in text)
    for right, wrong in STALE.items():
        if source.count(right) != 1:
            raise SystemExit(f"the example in README.md has changed: {right.strip()!r} is not in it once")
        source = source.replace(right, wrong)
    (folder / "collect.py").write_text(source, encoding="utf-8")
    lines = fasttrain(folder, "check", "env.entry_point=collect:Collect", "env.kwargs.size=4", "hydra.run.dir=run")
    return {"lines": between(lines, "Checkup of ", "written to ")}


def workers(folder: Path) -> dict[str, Any]:
    """Rows of the plan."""
    shutil.copy(ROOT / "scripts" / "bench_vecenv.py", folder)
    steps = ("total_timesteps=256", "algo.rollout_size=256", "batch_size=128", "eval.episodes=2", "checkup=off")
    run = ("+profile=speed", "env.entry_point=bench_vecenv:Working", "num_envs=64", *steps, "hydra.run.dir=run")
    fasttrain(folder, *run)
    rows = json.loads((folder / "run" / "plan.json").read_text(encoding="utf-8"))["flags"]
    wanted = ("vec_env", "workers")
    return {"rows": [{**row} for name in wanted for row in rows if row["flag"] == name]}


def skirmish_learning(folder: Path) -> dict[str, Any]:
    """Quality of three runs, one seed each."""
    found = {}
    for name, arguments in LEARNING.items():
        print(f"  {name}: fasttrain +profile=speed {' '.join(arguments)}", flush=True)
        fasttrain(folder, "+profile=speed", *arguments, "live=off", f"hydra.run.dir={name}")
        found[name] = {"arguments": list(arguments), **summary_of(folder / name)}
    return {"runs": found}


def compare(folder: Path) -> dict[str, Any]:
    """The gate on two tasks: it must fail the candidate that does not learn (exit code 3)."""
    stock = "{name: stock, overrides: [profile=baseline, vec_env=dummy, torch_threads=1]}"
    again = stock.replace("name: stock", "name: stock again")
    crippled = "{name: crippled, overrides: [profile=speed, algo.learning_rate=1e-6]}"
    candidates = f"candidates=[{stock}, {again}, speed, {crippled}]"
    found = {}
    for name, arguments in COMPARED.items():
        print(f"  {name}: fasttrain compare '{candidates}' {' '.join(arguments)}", flush=True)
        fasttrain(folder, "compare", candidates, *arguments, "report=false", f"study={name}", expected=3)
        found[name] = {"arguments": [candidates, *arguments], **study_of(folder / name, "rows", "gate")}
    return {"studies": found}


def ablate(folder: Path) -> dict[str, Any]:
    """Ten minutes."""
    fasttrain(folder, "ablate", "+profile=speed", "report=false", "study=ablate")
    return study_of(folder / "ablate", "rows", "kept", "result", "cell_s")


def tune(folder: Path) -> dict[str, Any]:
    """Five minutes."""
    fasttrain(folder, "tune", "+profile=speed", "minutes=5", "report=false", "study=tune")
    return study_of(folder / "tune", "rows", "best", "result")


def study_of(folder: Path, *keys: str) -> dict[str, Any]:
    """What is kept of study.json."""
    study = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    return {key: study[key] for key in keys}


CAPTURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "first-run": first_run,
    "checkup": checkup,
    "workers": workers,
    "skirmish-learning": skirmish_learning,
    "compare": compare,
    "ablate": ablate,
    "tune": tune,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CAPTURES, metavar="NAME", help=f"of {', '.join(CAPTURES)}")
    options = parser.parse_args(arguments)
    for name in options.names:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = CAPTURES[name](Path(folder))
        about = {"name": name, **bench_machine.about(), "command": f"python3 scripts/captures.py {name}"}
        store(RESULTS / f"{name}.json", {**about, **found})
    return 0


def store(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
