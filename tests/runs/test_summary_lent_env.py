"""Where one instance of a simulator can live: num_envs=1 never opens a second one beside it."""

import json

import gymnasium as gym
import numpy as np
import pytest

from fasttrain.cli.library import train
from fasttrain.errors import EnvSpecError


class Seat(gym.Env):
    """A game server with one seat: whoever comes second is refused."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    taken = False
    opened = 0

    def __init__(self):
        if Seat.taken:
            raise OSError("the seat is taken")
        Seat.taken = True
        Seat.opened += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return self._seen(), {}

    def step(self, action):
        self.left -= 1
        return self._seen(), float(action), self.left == 0, False, {}

    def close(self):
        Seat.taken = False

    def _seen(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_evaluations_borrow_the_one_env_and_leave_it_as_it_was(tmp_path, monkeypatch, engine: str):
    monkeypatch.chdir(tmp_path)
    rest = {"algo": "ppo", "num_envs": 1, "total_timesteps": 96, "report": False, "live": "off", "checkup": "off",
            "engine": engine, "batch_size": 16, "vec_env": "dummy"}  # fmt: skip
    found = []
    for every in (0, 32):
        settings = {"algo.n_steps": 32, "eval.episodes": 2, "eval_every": every, "fused_update": "off"}
        done = train(env=Seat, folder=tmp_path / f"{every}", **rest, **settings)
        found.append(done.model.policy.state_dict())
        assert not Seat.taken
        assert done.summary["quality"]["episodes"] == 2
    assert len(done.summary["evaluations"]) >= 2
    assert all((found[0][name] == found[1][name]).all() for name in found[0])  # as if nobody had looked


def test_no_evaluation_is_asked_for_by_no_episodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"algo": "ppo", "num_envs": 1, "total_timesteps": 32, "report": False, "live": "off", "checkup": "off",
                "batch_size": 16, "algo.n_steps": 32, "eval.episodes": 0}  # fmt: skip
    done = train(env=Seat, folder=tmp_path / "run", **settings)
    assert done.summary["evaluation"] == "left out: eval.episodes=0"
    assert json.loads((tmp_path / "run/summary.json").read_text())["quality"]["episodes"] == 0


def test_a_second_copy_that_cannot_be_is_told_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"algo": "ppo", "num_envs": 2, "total_timesteps": 32, "report": False, "live": "off", "checkup": "off",
                "batch_size": 16, "algo.n_steps": 32, "vec_env": "dummy"}  # fmt: skip
    monkeypatch.setattr(Seat, "taken", False)
    with pytest.raises(EnvSpecError, match=r"the seat is taken .*; num_envs=2 are open at once, take num_envs=1"):
        train(env=Seat, folder=tmp_path / "run", **settings)
