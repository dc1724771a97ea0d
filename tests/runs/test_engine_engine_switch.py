from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import configured
from fasttrain.accelerators import kernels, kernels_q
from fasttrain.buffers import n_step, prioritized
from fasttrain.kernels.actor_critic import act_rows, train_epoch
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.engine import EngineSwitch, switch_step
from fasttrain.runs.progress import Progress
from fasttrain.spec.plan import RunSpec
from fasttrain.spec.precedence import read

SMALL = ("+profile=speed", "env.id=CartPole-v1", "vec_env=dummy", "num_envs=4", "eval.episodes=2", "report=false")
PPO = (*SMALL, "algo=ppo", "algo.rollout_size=64", "batch_size=32", "algo.n_epochs=1", "total_timesteps=512")
DQN = (*SMALL, "algo=dqn", "warmup_steps=32", "batch_size=16", "updates_per_step=2", "total_timesteps=400")


class Switching:
    """A switch without a compiler: `ready` says whether its process is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None, failure: str = "") -> None:
        self.said: list[str] = []
        self.used = self.started = 0
        self.slower = ""
        self.ready, self.failure = False, failure
        monkeypatch.setattr("fasttrain.runs.engine.Compiler", self._start)
        self.switch = EngineSwitch([], at, self._use, self.said.append)
        self.progress = Progress(1_000_000, PhaseClock())
        self.progress.started -= 10.0

    def _use(self) -> str:
        self.used += not self.slower
        return self.slower

    def _start(self, _: Any) -> Switching:
        self.started += 1
        return self

    def is_done(self) -> bool:
        return self.ready

    def stop(self) -> None:
        pass

    def rest(self, env_steps: int, updates: int) -> None:
        self.progress.env_steps, self.progress.updates = env_steps, updates
        self.switch.at_rest(self.progress)


def test_the_first_update_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, None)
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


def test_a_run_that_ends_soon_compiles_nothing(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, None)
    toy.rest(900_000, 4)
    toy.rest(950_000, 8)
    assert (toy.started, toy.used) == (0, 0)
    assert "sooner than compiled kernels would pay" in toy.said[-1]
    assert "sooner" in toy.switch.to_dict()["why_not"]


def test_what_cannot_be_compiled_leaves_the_torch_engine(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, None, failure="no room")
    toy.rest(100, 4)
    toy.ready = True
    toy.rest(200, 8)
    toy.rest(300, 12)
    assert (toy.started, toy.used) == (1, 0)
    assert "could not be compiled (no room)" in toy.said[-1]


def test_kernels_that_are_slower_here_do_not_take_over(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, None)
    toy.slower, toy.ready = "kernels 1,740 ms, torch 1,240 ms", True
    for step in (100, 200, 300):
        toy.rest(step, 4)
    assert (toy.started, toy.used, toy.switch.at, toy.switch.done) == (1, 0, None, True)
    assert toy.said[-1] == "this run stays on the torch engine: kernels 1,740 ms, torch 1,240 ms"


def test_a_process_that_cannot_be_started_ends_no_training(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, None)

    def refuse(_: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("fasttrain.runs.engine.Compiler", refuse)
    toy.rest(100, 4)
    toy.rest(200, 8)
    assert toy.used == 0
    assert "nothing can be compiled beside it (Cannot allocate memory)" in toy.said[-1]


def test_what_was_kept_nowhere_is_not_compiled_in_the_training(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, None)
    toy.switch._calls = [type("Call", (), {"is_kept": False})()]
    toy.rest(100, 4)
    toy.ready = True
    toy.rest(200, 8)
    assert toy.used == 0
    assert "no place to keep them" in toy.said[-1]


def test_a_step_that_was_asked_for_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    toy = Switching(monkeypatch, 250)
    for step in (100, 200, 300, 400):
        toy.rest(step, step)
        assert toy.used == (step >= 300)
    assert (toy.started, toy.switch.at, toy.said) == (0, 250, [])


@pytest.mark.parametrize("arguments", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_switch_is_repeated_to_the_bit_and_changes_what_computes(
    fasttrain: Any, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    files = []
    for name, step in (("a", 256), ("b", 256), ("never", 10_000), ("always", 0)):
        monkeypatch.setattr("fasttrain.runs.engine.switch_step", lambda _, step=step: step)
        done = fasttrain(*arguments, f"hydra.run.dir={name}")
        assert done.exit_code == 0, done.err
        files.append(_weights(done.folder / "model.zip"))
    assert files[0] == files[1]
    assert len(set(files)) == 3, "torch before, kernels after, and neither alone"


def _weights(file: Path) -> bytes:
    import io
    import zipfile

    import torch

    with zipfile.ZipFile(file) as archive:
        tensors = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
    return b"".join(tensor.numpy().tobytes() for tensor in tensors.values())


def test_types_listed_are_the_types_called(fasttrain: Any):
    """Else a kernel would be compiled once ahead and once more in training."""
    known = {kernel: set(kernel.signatures) for kernel in (act_rows, train_epoch)}
    for call in kernels.kernel_calls():
        call.kernel.compile(call.signature)
    listed = {kernel: set(kernel.signatures) for kernel in known}
    assert fasttrain(*PPO).exit_code == 0
    assert {kernel: set(kernel.signatures) for kernel in known} == listed
    assert len(kernels_q.kernel_calls()) == 2


def test_what_a_replay_buffer_draws_by_is_compiled_before_training(fasttrain: Any):
    kernels = (prioritized.update_kernel, prioritized.draw_kernel, prioritized.set_kernel, n_step.n_step_kernel)
    for call in [*prioritized.kernel_calls(), *n_step.kernel_calls()]:
        call.kernel.compile(call.signature)
    listed = [set(kernel.signatures) for kernel in kernels]
    assert all(listed)
    done = fasttrain(*DQN, "algo.prioritized=true", "algo.n_steps=3")
    assert done.exit_code == 0, done.err
    assert [set(kernel.signatures) for kernel in kernels] == listed


def test_when_kernels_work(monkeypatch: pytest.MonkeyPatch):
    plan, exact = (RunSpec(configured("+profile=speed", f"deterministic={it}"), ()) for it in ("false", "true"))
    assert switch_step(plan) == 0, "as the environment of tests says"
    assert switch_step(plan._replace(engine_switch_at=256)) == 256, "a run is repeated"
    assert read([], {"FASTTRAIN_ENGINE_SWITCH_AT": "5"}).overrides == ["engine_switch_at=5"], "to be told of"
    monkeypatch.delenv("FASTTRAIN_ENGINE_SWITCH_AT")
    assert (switch_step(plan), switch_step(exact)) == (None, 0)


def test_no_kernel_runs_before_the_first_update_is_made(tmp_path: Path):
    """With an empty cache, in a process of its own: no dispatcher of any module has a signature by then."""
    code = (
        "import gc, sys\n"
        "from numba.core.dispatcher import Dispatcher\n"
        "from fasttrain.runs.callbacks import RunCallback\n"
        "before = RunCallback._on_rollout_start\n"
        "def look(self):\n"
        "    before(self)\n"
        "    if self.run.progress.updates and not found:\n"
        "        each = [d for d in gc.get_objects() if isinstance(d, Dispatcher)]\n"
        "        found.append([d.py_func.__name__ for d in each if d.signatures])\n"
        "found = []\n"
        "RunCallback._on_rollout_start = look\n"
        "from fasttrain.cli import main\n"
        "for word in (sys.argv[1:4], sys.argv[4:7]):\n"
        "    found.clear()\n"
        "    assert main([*word, *sys.argv[7:], 'hydra.run.dir=' + word[0][5:]]) == 0\n"
        "    print('compiled', found)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "FASTTRAIN_ENGINE_SWITCH_AT"}
    ppo = ("algo=ppo", "algo.rollout_size=64", "batch_size=32")
    dqn = ("algo=dqn", "warmup_steps=32", "batch_size=16")
    done = subprocess.run(
        [sys.executable, "-c", code, *ppo, *dqn, *SMALL, "total_timesteps=256"],
        cwd=tmp_path, env={**environment, "NUMBA_CACHE_DIR": str(tmp_path / "cold")}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled [[]]") == 2, done.stdout
    for name in ("ppo", "dqn"):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["engine_switch"]["at"] is None
        assert "sooner" in summary["engine_switch"]["why_not"]
