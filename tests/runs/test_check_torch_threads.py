from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces
from untouched import untouched

import fasttrain
from conftest import configured
from fasttrain.runs import calibration as module
from fasttrain.runs.calibration import settle_threads, updates_per_step
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve
from toys import RandomEnv, seeded_vec

pytestmark = pytest.mark.usefixtures("all_threads")
IMAGES = spaces.Box(0, 255, (4, 36, 36), np.uint8)
DICT = spaces.Dict({"board": spaces.Box(-1, 1, (5,), np.float32), "hand": spaces.Discrete(3)})


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "MOST_S", 0.1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model_of(kind: Any, space: spaces.Space[Any], policy: str, **settings: Any) -> Any:
    acting: Any = spaces.Box(-1, 1, (2,)) if kind is fasttrain.SAC else spaces.Discrete(3)
    env = seeded_vec(lambda: RandomEnv(space, acting), 2)
    if kind not in (fasttrain.DQN, fasttrain.SAC):
        settings = {"n_steps": 8, "batch_size": 8, "n_epochs": 3, **settings}
    return kind(policy, env, seed=0, device="cpu", **settings)


def plan_for(*arguments: str, algo: str = "ppo") -> Any:
    base = ("+profile=speed", "env.id=CartPole-v1", f"algo={algo}", "fused_update=off", "num_envs=2", "batch_size=16")
    config = configured(*base, *arguments)
    return resolve(
        config, {}, EnvFacts(native=False, step_s=1e-5, images=True), Machine(cores=2, windows=False, cuda=False)
    )


@pytest.mark.parametrize(
    ("kind", "space", "policy", "arguments"),
    [
        (fasttrain.PPO, IMAGES, "CnnPolicy", ("ppo",)),
        (stable_baselines3.PPO, DICT, "MultiInputPolicy", ("ppo", "engine=stock")),
        (sb3_contrib.RecurrentPPO, spaces.Box(-1, 1, (3,), np.float32), "MlpLstmPolicy", ("recurrent_ppo",)),
        (fasttrain.DQN, DICT, "MultiInputPolicy", ("dqn",)),
        (fasttrain.SAC, DICT, "MultiInputPolicy", ("sac",)),
    ],
)
def test_trying_changes_nothing(kind: Any, space: spaces.Space[Any], policy: str, arguments: tuple[str, ...]):
    model = model_of(kind, space, policy)
    with untouched(model):
        settled = settle_threads(plan_for(*arguments[1:], algo=arguments[0]), model)
    assert settled.row("torch_threads").reason.startswith("measured here: torch on 1 thread ")
    assert settled.config.torch_threads in (1, 2)
    assert torch.get_num_threads() == settled.config.torch_threads
    assert all(parameter.grad is None for parameter in model.policy.parameters())


@pytest.mark.parametrize(("one", "several", "chosen"), [(3.0, 2.0, 2), (2.1, 2.0, 1), (1.0, 20.0, 1)])
def test_more_threads_must_pay(monkeypatch: pytest.MonkeyPatch, one: float, several: float, chosen: int):
    costs = {"torch on 1 thread": one, "torch on 2 threads": several}
    monkeypatch.setattr(module, "measured", lambda *_: (costs, True))
    settled = settle_threads(plan_for(), model_of(fasttrain.PPO, IMAGES, "CnnPolicy"))
    row = settled.row("torch_threads")
    assert (row.effective, torch.get_num_threads()) == (chosen, chosen)


def test_nothing_is_tried_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "measured", lambda *_: pytest.fail("tried"))
    model = model_of(fasttrain.PPO, IMAGES, "CnnPolicy")
    for plan in (plan_for("torch_threads=2"), plan_for("deterministic=true")):
        assert settle_threads(plan, model) is plan


def test_a_policy_that_cannot_be_there_twice_keeps_the_plan(monkeypatch: pytest.MonkeyPatch):
    model = model_of(fasttrain.PPO, spaces.Box(-1, 1, (3,), np.float32), "MlpPolicy")
    monkeypatch.setattr(module, "build_algorithm", lambda *_: None)
    row = settle_threads(plan_for(), model).row("torch_threads")
    assert (row.effective, row.reason) == (2, "one per core; not tried out: AttributeError")


def test_updates_per_vector_step():
    assert updates_per_step(model_of(fasttrain.PPO, IMAGES, "CnnPolicy")) == 3 * 2 / 8
    box = spaces.Box(-1, 1, (3,), np.float32)
    assert updates_per_step(model_of(fasttrain.DQN, box, "MlpPolicy", train_freq=4, gradient_steps=-1)) == 2.0
    assert updates_per_step(model_of(fasttrain.DQN, box, "MlpPolicy", train_freq=4, gradient_steps=6)) == 6 / 4
