"""A callback sees every local name of stock's `collect_rollouts`; which these are is read off stock's source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from toys import RandomEnv, toy_gym_vec

# Names that a callback of ours does not see, and why.
LEFT_OVER = "set behind on_step(), for one env after the other: what a callback sees is the step before"
EXCEPTIONS = dict.fromkeys(("idx", "done", "terminal_obs", "terminal_value", "kwargs"), LEFT_OVER)
PAIRS = {
    "PPO": (stable_baselines3.PPO, fasttrain.PPO),
    "MaskablePPO": (sb3_contrib.MaskablePPO, fasttrain.MaskablePPO),
    "DQN": (stable_baselines3.DQN, fasttrain.DQN),
    "SAC": (stable_baselines3.SAC, fasttrain.SAC),
}


def local_names(function: Any) -> set[str]:
    """Parameters and whatever is assigned in it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


class Seeing(BaseCallback):
    """Keeps what the last step showed, and what changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.at_end: dict[str, Any] = {}

    def _on_step(self) -> bool:
        self.seen = dict(self.locals)
        return True

    def _on_rollout_end(self) -> None:
        self.at_end = dict(self.locals)


def trained(name: str, which: int, callback: BaseCallback) -> Any:
    make: Any = PAIRS[name][which]
    if name in ("DQN", "SAC"):
        acting: Any = spaces.Discrete(4) if name == "DQN" else spaces.Box(-1, 1, (2,))
        env: Any = DummyVecEnv([lambda: RandomEnv(spaces.Box(-1, 1, (3,), np.float32), acting)] * 2)
        settings: dict[str, Any] = {"learning_starts": 4, "buffer_size": 100, "train_freq": 2}
    else:
        env, settings = toy_gym_vec(), {"n_steps": 8, "batch_size": 40, "n_epochs": 1}
    return make("MlpPolicy", env, seed=0, device="cpu", **settings).learn(80, callback)


@pytest.mark.parametrize("name", PAIRS)
def test_a_callback_sees_every_name_of_stocks_loop(name: str):
    stock, ours = Seeing(), Seeing()
    trained(name, 0, stock)
    model = trained(name, 1, CallbackList([ours]))
    wanted = local_names(PAIRS[name][0].collect_rollouts)
    assert wanted - ours.seen.keys() <= EXCEPTIONS.keys()
    assert wanted - ours.at_end.keys() <= EXCEPTIONS.keys()
    assert not ours.seen.keys() & EXCEPTIONS.keys(), "the list is out of date"
    for key in wanted & stock.seen.keys() & ours.seen.keys() - {"self", "callback", "env"}:
        one, other = stock.seen[key], ours.seen[key]
        assert isinstance(other, type(one)), key
        assert np.shape(other) == np.shape(one), key
    assert ours.seen["self"] is model
    assert ours.seen["env"] is model.env
    buffer = "replay_buffer" if name in ("DQN", "SAC") else "rollout_buffer"
    assert ours.seen[buffer] is getattr(model, buffer)


def test_what_a_callback_writes_into_rewards_is_learnt_from():
    class Bonus(BaseCallback):
        def _on_step(self) -> bool:
            self.locals["rewards"][:] = 7.0
            return True

    for which in (0, 1):
        assert (trained("PPO", which, Bonus()).rollout_buffer.rewards > 5.0).all(), "but for the values of cut episodes"
        assert (trained("DQN", which, Bonus()).replay_buffer.rewards[:40] == 7.0).all()
