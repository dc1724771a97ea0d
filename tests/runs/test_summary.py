from __future__ import annotations

import json

import numpy as np
import pytest

from fasttrain.cli.library import train
from fasttrain.errors import EnvSpecError
from plain_env import PlainEnv


class Seat(PlainEnv):
    """A game server with one seat: whoever comes second is refused."""

    taken = False

    def __init__(self):
        if Seat.taken:
            raise OSError("the seat is taken")
        Seat.taken = True

    def seen(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def paid(self, action):
        return float(action)

    def close(self):
        Seat.taken = False


@pytest.fixture
def seated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = {"algo": "ppo", "num_envs": 1, "total_timesteps": 96, "report": False, "checkup": "off", "batch_size": 16,
              "vec_env": "dummy", "algo.n_steps": 32, "eval.episodes": 2, "folder": "run", "on_existing": "overwrite",
              "fused_update": "off"}  # fmt: skip
    return lambda **more: train(env=Seat, **{**common, **more})


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_evaluations_borrow_the_one_env_and_leave_it_as_it_was(seated, engine: str):
    found = []
    for every in (0, 32):
        done = seated(engine=engine, eval_every=every)
        found.append(done.model.policy.state_dict())
        assert not Seat.taken
        assert done.summary["quality"]["episodes"] == 2
    assert len(done.summary["evaluations"]) >= 2
    assert all((found[0][name] == found[1][name]).all() for name in found[0])  # as if nobody had looked


def test_no_evaluation_by_no_episodes_and_a_second_copy_that_cannot_be(seated, monkeypatch):
    done = seated(**{"eval.episodes": 0})
    assert done.summary["evaluation"] == "left out: eval.episodes=0"
    assert json.loads((done.folder / "summary.json").read_text())["quality"]["episodes"] == 0
    monkeypatch.setattr(Seat, "taken", False)
    with pytest.raises(EnvSpecError, match=r"the seat is taken .*; num_envs=2 are open at once; use num_envs=1"):
        seated(num_envs=2)
