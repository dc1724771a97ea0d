"""One thread or one per core: what is faster is taken, and trying it changes nothing of the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces

import fasttrain
from conftest import configured
from fasttrain.runs import check as module
from fasttrain.runs.check import settle_threads, step_times, updates_per_step
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve
from toys import RandomEnv, seeded_vec

pytestmark = pytest.mark.usefixtures("all_threads")
IMAGES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
DICT = spaces.Dict({"board": spaces.Box(-1, 1, (5,), np.float32), "hand": spaces.Discrete(3)})


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model_of(kind: Any, space: spaces.Space[Any], policy: str, **settings: Any) -> Any:
    acting: Any = spaces.Box(-1, 1, (2,)) if kind is fasttrain.SAC else spaces.Discrete(3)
    env = seeded_vec(lambda: RandomEnv(space, acting), 2)
    if kind not in (fasttrain.DQN, fasttrain.SAC):
        settings = {"n_steps": 8, "batch_size": 8, "n_epochs": 3, **settings}
    return kind(policy, env, seed=0, device="cpu", **settings)


def plan_for(*arguments: str) -> Any:
    config = configured("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "fused_update=off", *arguments)
    return resolve(
        config, {}, EnvFacts(native=False, step_s=1e-5, images=True), Machine(cores=2, windows=False, cuda=False)
    )


@pytest.mark.parametrize(
    ("kind", "space", "policy"),
    [
        (fasttrain.PPO, IMAGES, "CnnPolicy"),
        (fasttrain.PPO, DICT, "MultiInputPolicy"),
        (sb3_contrib.RecurrentPPO, spaces.Box(-1, 1, (3,), np.float32), "MlpLstmPolicy"),
        (fasttrain.DQN, IMAGES, "CnnPolicy"),
        (fasttrain.DQN, DICT, "MultiInputPolicy"),
        (fasttrain.SAC, DICT, "MultiInputPolicy"),
    ],
)
def test_trying_changes_nothing(kind: Any, space: spaces.Space[Any], policy: str):
    model = model_of(kind, space, policy)
    weights = {name: value.clone() for name, value in model.policy.state_dict().items()}
    streams = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    drawn = model.observation_space.np_random.bit_generator.state, model.action_space.np_random.bit_generator.state
    settled = settle_threads(plan_for(), model)
    assert settled.config.torch_threads in (1, 2)
    assert torch.get_num_threads() == settled.config.torch_threads
    assert all(torch.equal(value, weights[name]) for name, value in model.policy.state_dict().items())
    assert all(parameter.grad is None for parameter in model.policy.parameters())
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (np.random.get_state()[1] == streams[1]).all()
    assert random.getstate() == streams[2]
    assert drawn == (
        model.observation_space.np_random.bit_generator.state,
        model.action_space.np_random.bit_generator.state,
    )
    assert min(step_times(model, 2)) > 0


@pytest.mark.parametrize(("one", "several", "chosen"), [(3.0, 2.0, 2), (2.1, 2.0, 1), (1.0, 20.0, 1)])
def test_more_threads_must_pay(monkeypatch: pytest.MonkeyPatch, one: float, several: float, chosen: int):
    monkeypatch.setattr(module, "step_times", lambda *_: (one, several))
    settled = settle_threads(plan_for(), model_of(fasttrain.PPO, IMAGES, "CnnPolicy"))
    row = settled.row("torch_threads")
    assert (row.effective, torch.get_num_threads()) == (chosen, chosen)
    assert row.reason == f"acting and updating takes {1e3 * one:.3g} ms a vector step on one thread, " + (
        f"{1e3 * several:.3g} on 2"
    )


def test_nothing_is_tried_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "step_times", lambda *_: pytest.fail("tried"))
    model = model_of(fasttrain.PPO, IMAGES, "CnnPolicy")
    for plan in (plan_for("torch_threads=2"), plan_for("deterministic=true")):
        assert settle_threads(plan, model) is plan


def test_a_policy_that_is_called_otherwise_keeps_the_plan(monkeypatch: pytest.MonkeyPatch):
    model = model_of(fasttrain.PPO, spaces.Box(-1, 1, (3,), np.float32), "MlpPolicy")
    monkeypatch.setattr(type(model.policy), "evaluate_actions", lambda self, seen: None)
    row = settle_threads(plan_for(), model).row("torch_threads")
    assert (row.effective, row.reason) == (2, "one per core; not tried out: TypeError")


def test_updates_per_vector_step():
    assert updates_per_step(model_of(fasttrain.PPO, IMAGES, "CnnPolicy")) == 3 * 2 / 8
    box = spaces.Box(-1, 1, (3,), np.float32)
    assert updates_per_step(model_of(fasttrain.DQN, box, "MlpPolicy", train_freq=4, gradient_steps=-1)) == 2.0
    assert updates_per_step(model_of(fasttrain.DQN, box, "MlpPolicy", train_freq=4, gradient_steps=6)) == 6 / 4
