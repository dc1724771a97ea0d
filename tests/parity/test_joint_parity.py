"""Several policies equal flat PPO: one policy that decides everything is PPO, two that never meet are two trainings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_ppo_parity import CASES, Case, difference, logged, moments

import fasttrain
from fasttrain.algos import policy_view
from fasttrain.algos.joint import JointMaskablePPO, JointPPO
from fasttrain.algos.joint_recurrent import JointMaskableRecurrentPPO
from fasttrain.algos.owners import Owners
from plain_env import PlainEnv
from toys import MaskedEnv, seeded_vec

CONTAINERS = {fasttrain.PPO: JointPPO, fasttrain.MaskablePPO: JointMaskablePPO}
SETTINGS = {"batch_size": 32, "n_epochs": 2, "seed": 3, "device": "cpu"}


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of")
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("masked discrete, cut, bonus", "torch"),
        ("masked discrete, cut, bonus", "kernels"),
        ("masked, all options", "torch"),
        ("masked, all options", "kernels"),
        ("masked multi-discrete", "torch"),
        ("masked multi-discrete", "kernels"),
        ("multi-discrete", "torch"),
        ("box", "torch"),  # kernels draw normal numbers for a rollout at once, and torch gives others step by step
    ],
)
def test_one_policy_that_decides_everything_is_flat_ppo(name: str, engine: str) -> None:
    case: Case = CASES[name]
    kind, settings = case.classes[0], {**SETTINGS, **case.settings, "n_steps": case.steps}

    def make(env: Any) -> dict[str, Any]:
        return {"all": kind("MlpPolicy", env, **{**settings, "seed": None})}

    flat = kind("MlpPolicy", seeded_vec(case.make), engine=engine, **settings).learn(2 * 4 * case.steps)
    given = {"make": make, "owners": Owners(["all"], [None]), **settings}
    joint: Any = CONTAINERS[kind](seeded_vec(case.make), engine=engine, **given).learn(2 * 4 * case.steps)
    only = joint.members["all"]
    assert only.engine.kind == engine
    # With kernels the values at the ends of cut episodes are computed one by one here, all together there.
    limit = 0.0 if engine == "torch" else 1e-6
    assert difference(only, flat) <= limit
    assert all(torch.allclose(mine, its, atol=limit) for mine, its in zip(moments(only), moments(flat), strict=True))
    own = {key.removeprefix("all/"): value for key, value in logged(joint).items()}
    assert {**own, **logged(flat)} == own if engine == "torch" else {*logged(flat)} <= {*own}
    assert joint.engine.decisions == {"all": 8 * case.steps}


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_one_recurrent_policy_that_decides_everything_is_flat(engine: str) -> None:
    given: dict[str, Any] = {"n_steps": 16, "policy_kwargs": {"lstm_hidden_size": 16, "net_arch": [8]}, **SETTINGS}
    game = lambda: MaskedEnv(spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(4), cut=True)  # noqa: E731
    kind = fasttrain.MaskableRecurrentPPO
    flat = kind("MlpLstmPolicy", seeded_vec(game), engine=engine, **given).learn(192)
    joint: Any = JointMaskableRecurrentPPO(
        seeded_vec(game), make=lambda env: {"all": kind("MlpLstmPolicy", env, **{**given, "seed": None})},
        owners=Owners(["all"], [None]), engine=engine, **given,
    ).learn(192)  # fmt: skip
    only = joint.members["all"]
    assert only.engine.kind == engine
    assert difference(only, flat) <= (0.0 if engine == "torch" else 1e-6)
    assert torch.equal(joint._last_lstm_states.pi[0], flat._last_lstm_states.pi[0]) or engine == "kernels"


class Flagged(PlainEnv):
    """Random observations after a flag, and a reward for one of the actions. Ends after 5 steps, or cut after 7."""

    observation_space, action_space = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)

    def __init__(self, flag: float) -> None:
        self.flag, self.length, self.cut = flag, 5 if flag else 7, not flag

    def seen(self) -> Any:
        self.drawn = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self.drawn[0] = self.flag
        return self.drawn

    def paid(self, action: Any) -> float:
        return float(action == 1) + self.drawn[1]


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size of")
def test_two_policies_that_never_meet_are_two_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of actions and minibatches have no stream here, because two trainings have two streams."""
    monkeypatch.setattr(policy_view, "draw", lambda probs: probs.argmax(-1, keepdim=True))
    monkeypatch.setattr(np.random, "permutation", lambda count: np.arange(count)[::-1].copy())
    own: dict[str, dict[str, Any]] = {
        "fast": {"gamma": 0.9, "n_epochs": 3, "batch_size": 7, "policy_kwargs": {"net_arch": [8]}},
        "slow": {"gae_lambda": 0.8, "ent_coef": 0.02, "batch_size": 16, "n_epochs": 2},
    }
    flags = iter([1.0, 1.0, 0.0, 0.0])
    start: dict[str, Any] = {}

    def make(env: Any) -> dict[str, Any]:
        made = {name: fasttrain.PPO("MlpPolicy", env, n_steps=11, device="cpu", **more) for name, more in own.items()}
        start.update({name: {key: each.clone() for key, each in model.policy.state_dict().items()}
                      for name, model in made.items()})  # fmt: skip
        return made

    joint: Any = JointPPO(
        seeded_vec(lambda: Flagged(next(flags))), make=make, owners=Owners([*own], [[0], None]), n_steps=11,
        batch_size=44, seed=3, device="cpu",
    ).learn(4 * 33)  # fmt: skip
    for place, (name, more) in enumerate(own.items()):
        vec = seeded_vec(lambda flag=1.0 - place: Flagged(flag), num_envs=2)
        alone = fasttrain.PPO("MlpPolicy", vec, n_steps=11, seed=3, device="cpu", **more)
        alone.policy.load_state_dict(start[name])
        vec.seed(3 + 2 * place)
        alone.learn(2 * 33)
        assert difference(joint.members[name], alone) == 0.0, name
        assert all(torch.equal(a, b) for a, b in zip(moments(joint.members[name]), moments(alone), strict=True))
