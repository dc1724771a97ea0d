from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import RunCommand, configured
from fasttrain.accelerators import kernels
from fasttrain.buffers import n_step, prioritized
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.engine import EngineSwitch, switch_step
from fasttrain.runs.models import read_model_file
from fasttrain.runs.progress import Progress
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.precedence import read

SMALL = ("+profile=speed", "env.id=CartPole-v1", "vec_env=dummy", "num_envs=4", "eval.episodes=2", "checkup=off")
PPO = (*SMALL, "algo=ppo", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", "total_timesteps=256")
DQN = (*SMALL, "algo=dqn", "warmup_steps=32", "batch_size=16", "updates_per_step=2", "total_timesteps=200")


class Switching:
    """A switch without a compiler: `ready` says whether its process is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None, calls: Any = ()) -> None:
        self.said: list[str] = []
        self.used = self.started = 0
        self.slower = self.failure = ""
        self.refusal: OSError | None = None
        self.ready = False
        monkeypatch.setattr("fasttrain.runs.engine.Compiler", self._start)
        self.switch = EngineSwitch(list(calls), at, self._use, self.said.append)
        self.progress = Progress(1_000_000, PhaseClock())
        self.progress.started -= 10.0

    def _use(self) -> str:
        self.used += not self.slower
        return self.slower

    def _start(self, _: Any) -> Switching:
        if self.refusal is not None:
            raise self.refusal
        self.started += 1
        return self

    def is_done(self) -> bool:
        return self.ready

    def stop(self) -> None:
        pass

    def rest(self, env_steps: int, updates: int) -> None:
        self.progress.env_steps, self.progress.updates = env_steps, updates
        self.switch.at_rest(self.progress)


def test_when_kernels_are_compiled_and_take_over(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch)
    toy.rest(0, 0)
    assert toy.started == 0
    toy.rest(100, 4)
    toy.rest(200, 8)
    assert (toy.started, toy.used) == (1, 0)
    toy.ready = True
    toy.rest(300, 12)
    toy.rest(400, 16)
    assert (toy.used, toy.switch.at) == (1, 300)
    assert "compiled kernels from step 300 on" in toy.said[-1]
    assert toy.switch.to_dict()["at"] == 300
    toy = Switching(monkeypatch)
    toy.rest(900_000, 4)
    toy.rest(950_000, 8)
    assert (toy.started, toy.used) == (0, 0)
    assert "it ends before compiling would pay" in toy.said[-1]
    assert "before compiling" in toy.switch.to_dict()["why_not"]
    toy = Switching(monkeypatch, 250)
    for step in (100, 200, 300, 400):
        toy.rest(step, step)
        assert toy.used == (step >= 300)
    assert (toy.started, toy.switch.at, toy.said) == (0, 250, [])


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ({"failure": "no room"}, "could not be compiled (no room)"),
        ({"slower": "kernels 1,740 ms, torch 1,240 ms"}, "goes on with PyTorch: kernels 1,740 ms, torch 1,240 ms"),
        ({"refusal": OSError("no memory")}, "nothing can be compiled beside it (no memory)"),
        ({"calls": [SimpleNamespace(is_kept=False)]}, "no place to keep them"),
    ],
)
def test_torch_stays_where_kernels_cannot_be_or_are_slower(
    monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], told: str
):
    toy = Switching(monkeypatch, calls=way.pop("calls", ()))
    vars(toy).update(way)
    for step in (100, 200, 300):
        toy.rest(step, 4)
        toy.ready = True
    assert (toy.used, toy.switch.at, toy.switch.done) == (0, None, True)
    assert told in toy.said[-1]


@pytest.mark.parametrize("arguments", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_switch_is_repeated_to_the_bit(
    fasttrain: RunCommand, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    found = []
    for step in (128, 128, 10_000, 0):
        monkeypatch.setattr("fasttrain.runs.engine.switch_step", lambda _, step=step: step)
        weights = read_model_file(fasttrain(*arguments).ok().folder / "model.zip")[1].values()
        found.append(b"".join(tensor.numpy().tobytes() for tensor in weights))
    assert found[0] == found[1]
    assert len(set(found)) == 3, "torch before, kernels after, and neither alone"


@pytest.mark.parametrize(
    ("listed", "arguments"),
    [
        (kernels.kernel_calls, PPO),
        (
            lambda: [*prioritized.kernel_calls(), *n_step.kernel_calls()],
            (*DQN, "algo.prioritized=true", "algo.n_steps=3"),
        ),
    ],
    ids=["ppo", "replay"],
)
def test_types_listed_are_the_types_called(fasttrain: RunCommand, listed: Any, arguments: tuple[str, ...]):
    """Else a kernel would be compiled once ahead and once more in training."""
    for call in listed():
        call.kernel.compile(call.signature)
    known = {call.kernel: set(call.kernel.signatures) for call in listed()}
    fasttrain(*arguments).ok()
    assert {kernel: set(kernel.signatures) for kernel in known} == known


def test_when_kernels_work(monkeypatch: pytest.MonkeyPatch):
    plan, exact = (RunSpec(configured("+profile=speed", f"deterministic={it}"), ()) for it in ("false", "true"))
    assert switch_step(plan) == 0, "as the environment of tests says"
    assert switch_step(plan._replace(engine_switch_at=256)) == 256, "a run is repeated"
    assert read([], {"FASTTRAIN_ENGINE_SWITCH_AT": "5"}).overrides == ["engine_switch_at=5"], "to be told of"
    monkeypatch.delenv("FASTTRAIN_ENGINE_SWITCH_AT")
    assert (switch_step(plan), switch_step(exact)) == (None, 0)


COLD = """
import gc, sys
from numba.core.dispatcher import Dispatcher
from fasttrain.cli import main
from fasttrain.runs.callbacks import RunCallback
before, found = RunCallback._on_rollout_start, []
def look(self):
    before(self)
    if self.run.progress.updates and not found:
        each = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
        found.append([one.py_func.__name__ for one in each if one.signatures])
RunCallback._on_rollout_start = look
for words in (["algo=ppo", "algo.rollout_size=64", "batch_size=32"], ["algo=dqn", "warmup_steps=32", "batch_size=16"]):
    found.clear()
    assert main([*words, *sys.argv[1:], "hydra.run.dir=" + words[0][5:]]) == 0
    print("compiled", found)
"""


def test_no_kernel_runs_before_the_first_update_is_made(tmp_path: Path):
    """With an empty cache, in a process of its own: no dispatcher of any module has a signature by then."""
    environment = {key: value for key, value in os.environ.items() if key != "FASTTRAIN_ENGINE_SWITCH_AT"}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cold")
    line = [sys.executable, "-c", COLD, *SMALL, "total_timesteps=256", "report=false"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled [[]]") == 2, done.stdout
    for name in ("ppo", "dqn"):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["engine_switch"]["at"] is None
        assert "before" in summary["engine_switch"]["why_not"], "kernels were compiled, or compiling would pay"
