from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from stable_baselines3 import PPO

from conftest import Finished, RunCommand
from fasttrain.errors import EnvError
from fasttrain.saving import checkpointing
from resume_cases import episodes_of

ENV = """
from plain_env import PlainEnv

KINDS = {"error": ValueError("the board fell"), "exit": SystemExit(3), "memory": MemoryError("9 TiB"),
         "ctrl": KeyboardInterrupt(), "odd": ValueError(f"at {object()}")}

class Late(PlainEnv):
    length = 7

    def __init__(self, kind="", last=9.0):
        self.kind, self.last = kind, last

    def seen(self):
        drawn = self.np_random.normal(size=2).clip(-9, 9).astype("float32")
        if self.kind and self.time and drawn[0] > self.last:
            raise KINDS[self.kind]
        return drawn

    def paid(self, action):
        return float(action)
"""
SMALL = ("+profile=speed", "env.entry_point=falling:Late", "vec_env=dummy", "num_envs=2", "checkup=off", "seed=3",
         "fused_update=off", "eval.episodes=2", "batch_size=32", "algo.net_arch=[8]")  # fmt: skip
ROLLOUTS = (*SMALL, "algo.rollout_size=64", "algo.n_epochs=2", "total_timesteps=256")
PPO_SMALL = (*ROLLOUTS, "algo=ppo")
DQN_SMALL = (*SMALL, "algo=dqn", "warmup_steps=32", "algo.buffer_size=300", "updates_per_step=1",
             "total_timesteps=256")  # fmt: skip
LAST = "env.kwargs.last=2.75"  # one number in 336 is larger: with these seeds none in the first 64 steps
CASES = {
    "ppo": PPO_SMALL,
    "stock": (*PPO_SMALL, "engine=stock"),
    "recurrent": (*ROLLOUTS, "algo=recurrent_ppo", "algo.lstm_hidden_size=4"),
    "dqn": (*DQN_SMALL, "prefetch=off"),
    "stock dqn": (*DQN_SMALL, "engine=stock"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "falling.py").write_text(ENV)
    monkeypatch.delitem(sys.modules, "falling", raising=False)
    monkeypatch.setattr(checkpointing, "HOLD_SHARE", 1e12)  # at every rest: which one is no matter of time here
    return tmp_path


def crashed(fasttrain: RunCommand, *arguments: str) -> Finished:
    done = fasttrain(*arguments)
    assert done.exit_code == 1, done.err
    assert done.json("summary.json")["status"] == done.json("status.json")["phase"] == "crashed"
    return done


def newest(done: Finished) -> int:
    return max(int(path.name.removeprefix("step_")) for path in (done.folder / "checkpoints").iterdir())


@pytest.mark.parametrize("name", CASES)
def test_a_crashed_run_goes_on_as_if_not(name: str, fasttrain: RunCommand, late: Path, monkeypatch: pytest.MonkeyPatch):
    done = crashed(fasttrain, *CASES[name], "env.kwargs.kind=error", LAST)
    *_, told, saved = done.err.splitlines()
    assert "ValueError: the board fell (falling.py:" in told
    assert "step " in told
    assert told.startswith("fasttrain: error: env ")
    assert saved.endswith(f"fasttrain resume run={done.folder} goes on")
    assert "model.zip" in saved
    assert "Traceback" in done.err, "of the user's own code"
    steps = newest(done)
    assert 0 <= done.json("summary.json")["env_steps"] - steps <= 64
    # Repaired, it goes on, and comes to what it would have come to.
    (late / "falling.py").write_text(ENV.replace("raise KINDS[self.kind]", "pass  # it held"))
    monkeypatch.delitem(sys.modules, "falling")
    again = fasttrain("resume", f"run={done.folder}").ok()
    assert f"going on from step_{steps:012d}: " in again.out
    assert "warning" not in again.out
    whole = fasttrain(*CASES[name], "env.kwargs.kind=error", LAST)
    assert episodes_of(done.folder) == episodes_of(whole.folder)
    assert done.json("summary.json")["status"] == "done"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("exit", "called sys.exit(3): let it raise an error"),
        ("memory", "not enough memory: 9 TiB"),
        ("ctrl", "KeyboardInterrupt"),
    ],
)
def test_whatever_ends_it(kind: str, told: str, fasttrain: RunCommand):
    done = crashed(fasttrain, *PPO_SMALL, f"env.kwargs.kind={kind}", LAST)
    assert told in done.err
    assert newest(done) > 0
    PPO.load(done.folder / "model.zip", device="cpu")


def test_an_error_that_comes_again_at_the_same_place_is_said_to(fasttrain: RunCommand):
    done = crashed(fasttrain, *PPO_SMALL, "env.kwargs.kind=odd", LAST)
    assert "same error" not in done.err
    for _ in range(2):
        again = fasttrain("resume", f"run={done.folder}")
        assert again.exit_code == 1
        assert "the same error came at the same step before the run was resumed" in again.err
    assert "checkup=off" in done.json("summary.json")["overrides"], "those of the first start are kept"


def test_a_state_too_large_to_keep_is_that_of_the_error(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpointing, "HOLD_MOST_BYTES", 4)
    done = crashed(fasttrain, *CASES["dqn"], "env.kwargs.kind=error", LAST)
    summary = done.json("summary.json")
    assert newest(done) == summary["env_steps"]
    again = fasttrain("resume", f"run={done.folder}", f"total_timesteps={summary['env_steps'] + 2}").ok()
    assert "2 of 2 envs could not be brought back to where they were" in again.out


def test_before_the_first_update_there_is_nothing_to_save(fasttrain: RunCommand, tmp_path: Path):
    fell = fasttrain(*PPO_SMALL, "env.kwargs.kind=error", "env.kwargs.last=0")
    *traceback, told = fell.err.splitlines()
    assert fell.exit_code == EnvError.exit_code
    assert re.match(r"fasttrain: error: env \d, step \d+ of its episode, ValueError: the board fell \(fall", told)
    assert len(traceback) < 30, "the end of it, where the user's own code is"
    told = fasttrain(*PPO_SMALL, "env.kwargs.kind=exit", "env.kwargs.last=0")
    assert told.exit_code == EnvError.exit_code
    assert re.search(r"error: env \d, step \d+ of its episode, called sys.exit\(3\): let it raise", told.err)
    assert json.loads((tmp_path / "run0" / "summary.json").read_text())["status"] == "crashed"
    assert not (tmp_path / "run0" / "model.zip").exists()
    assert not (tmp_path / "run0" / "checkpoints").exists()
