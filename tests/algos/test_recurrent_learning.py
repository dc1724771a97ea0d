"""RecurrentPPO: which view serves a policy, acting, groups of envs, and what is refused."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates

import fasttrain
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.recurrent import PaddedView, RecurrentEngine, UnpaddedView, must_be_padded
from fasttrain.buffers.recurrent import Memory
from fasttrain.errors import ConfigError, EnvError
from fasttrain.vec.groups import WorkerGroups
from recurrent_cases import assert_walked
from toys import Failing, seeded_vec, short

BOX = spaces.Box(-1, 1, (3,), np.float32)
ROUNDING = EngineSettings(fused_adam=True)


def policy_of(kind: Any = RecurrentActorCriticPolicy, **settings: Any) -> Any:
    torch.manual_seed(1)
    return kind(BOX, spaces.Discrete(2), lambda _: 1e-3, lstm_hidden_size=4, **settings)


class Own(RecurrentActorCriticPolicy):
    def evaluate_actions(self, *arguments: Any) -> Any:
        return super().evaluate_actions(*arguments)


class Dropping(torch.nn.Dropout):
    pass


@pytest.mark.parametrize(
    ("settings", "padded"),
    [
        ({}, False),
        ({"kind": Own}, True),
        ({"activation_fn": Dropping}, True),
        ({"n_lstm_layers": 2, "lstm_kwargs": {"dropout": 0.1}}, True),
    ],
)
def test_a_policy_of_ones_own_is_served_by_its_own_methods(settings: dict[str, Any], padded: bool):
    policy = policy_of(**settings)
    assert must_be_padded(policy) is padded
    assert isinstance(RecurrentEngine(policy, ROUNDING).new_view(), UnpaddedView) is not padded
    assert type(RecurrentEngine(policy, EngineSettings()).new_view()) is PaddedView


@pytest.mark.parametrize(
    "settings", [{"amp_dtype": torch.bfloat16}, {"compile_mode": "default"}, {"gradient_accumulation": 2}]
)
def test_settings_that_do_not_go_with_memory_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="a policy that remembers computes in float32, without torch.compile"):
        RecurrentEngine(policy_of(), EngineSettings(**settings))


def memory_of(count: int, starts: list[bool]) -> Memory:
    part = torch.randn(1, count, 4)
    return Memory(RNNStates((part, part + 1), (part + 2, part + 3)), np.array(starts))


def test_an_output_that_is_not_finite_is_told():
    policy = policy_of()
    with torch.no_grad():
        policy.action_net.weight[0, 0] = np.nan
    with pytest.raises(EnvError, match=r"parameter action_net.weight is not"):
        RecurrentEngine(policy, EngineSettings()).act(np.zeros((2, 3), np.float32), None, memory_of(2, [True, True]))


def model_of(env: Any = None, **settings: Any) -> Any:
    arguments = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 3, "device": "cpu"} | settings
    env = seeded_vec(lambda: gym.make("CartPole-v1")) if env is None else env
    return fasttrain.RecurrentPPO("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 8}, **arguments)


def test_a_last_minibatch_of_one_is_refused():
    for size in (21, 1):
        told = f"batch_size={size} with a rollout of 4 × 16 steps: the last minibatch has"
        with pytest.raises(ConfigError, match=told):
            model_of(batch_size=size)
    model_of(batch_size=21, normalize_advantage=False).learn(64)
    model_of(batch_size=22).learn(64)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("schedule", "fails"), [("lockstep", True), ("first_ready", False), ("first_ready", True)])
def test_memory_follows_rows_where_groups_step_apart_and_envs_are_replaced(schedule: str, fails: bool):
    makes = [(lambda: Failing(short())) if fails else short] * 4
    env = fasttrain.SharedMemoryVecEnv(makes, num_workers=2, on_env_error="restart", max_restarts=100)
    try:
        model = model_of(env)
        model.collector.schedule = schedule
        model.learn(2 * 64)
        model.collect_rollouts(env, model._init_callback(None), model.rollout_buffer, 16)
        assert model.rollout_buffer.episode_starts.sum() > 8
        assert env.restarts == (24 if fails else 0)
        assert_walked(model)
    finally:
        env.close()


@pytest.mark.usefixtures("forked_workers")
def test_a_stop_leaves_what_those_who_were_ahead_remember(monkeypatch: pytest.MonkeyPatch):
    """A callback ends it after four steps, when the first group is under way to its fifth, which ends its episodes."""
    env = fasttrain.SharedMemoryVecEnv([short] * 4, num_workers=2)
    try:
        model = model_of(env)
        model.collector.schedule = "first_ready"
        monkeypatch.setattr(WorkerGroups, "first_ready", lambda self, groups: groups[:1])  # in the order they were sent
        model.learn(100, lambda names, _: names["n_steps"] < 3)
        seen, policy = torch.from_numpy(model.rollout_buffer.observations), model.policy
        assert model._last_episode_starts.tolist() == [True, True, False, False]
        for index, steps in enumerate((5, 5, 4, 4)):
            states = tuple(torch.zeros(1, 1, part.shape[2]) for part in model._last_lstm_states.pi)
            with torch.no_grad():
                _, states = policy._process_sequence(seen[:steps, index], states, torch.zeros(steps), policy.lstm_actor)
            assert torch.allclose(model._last_lstm_states.pi[0][:, index], states[0][:, 0], atol=1e-6)
    finally:
        env.close()
