from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.fast import Collector, bootstrap_truncated, clip_actions, read_masks
from fasttrain.algos.ppo import PPO
from fasttrain.batch import FinishedEpisode
from fasttrain.errors import EnvError
from fasttrain.vec.base import EmptyMasks, opened, stuck_envs
from toys import toy_gym_vec


class SumEngine:
    """V(observation) = 10 × its sum."""

    def __init__(self, kind: str) -> None:
        self.settings, self.rated = EngineSettings(kind=kind), list[int]()

    def values(self, observations: Any, memory: Any = None) -> Any:
        parts = observations.values() if isinstance(observations, dict) else [observations]
        sums = sum(part.sum(axis=1) for part in parts)
        self.rated.append(len(sums))
        return 10.0 * sums


class LeftOut:
    """Stands for the storage of a rollout."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []

    def leave_out(self, step: int, envs: list[int]) -> None:
        self.rows += [(step, env) for env in envs]


def bootstrapped(
    kind: str, finished: list[FinishedEpisode], num_envs: int, values: Any = 0.0, storage: Any = None
) -> tuple[Any, list[int]]:
    """Rewards that were zero, and how many states went through the engine together."""
    engine: Any = SumEngine(kind)
    rewards = np.zeros(num_envs, np.float32)
    bootstrap_truncated(engine, 0.5, finished, rewards, np.broadcast_to(values, num_envs), storage, 7)
    return rewards.tolist(), engine.rated


def episode(index: int, truncated: bool, lost: bool = False) -> FinishedEpisode:
    return FinishedEpisode(index, 1.0, 3, np.full(2, float(index + 1), np.float32), truncated, {}, lost)


@pytest.mark.parametrize(("kind", "together"), [("torch", [1, 1]), ("kernels", [2])])
def test_only_cut_episodes_get_the_value_of_their_last_state(kind: str, together: list[int]):
    """Env by env as in stock, whose numbers a product of several rows would not give; by kernels all at once."""
    rewards, rated = bootstrapped(kind, [episode(0, False), episode(2, True), episode(3, True)], 4)
    assert rewards == [0.0, 0.0, 0.5 * 10 * 6, 0.5 * 10 * 8]
    assert rated == together


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_last_observations_by_key(kind: str):
    last = {"a": np.full(2, 1.0, np.float32), "b": np.full(3, 2.0, np.float32)}
    cut = episode(1, True)._replace(final_observation=last)
    assert bootstrapped(kind, [cut], 2)[0] == [0.0, 0.5 * 10 * 8]


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_a_lost_episode_teaches_nothing(kind: str):
    storage = LeftOut()
    rewards, rated = bootstrapped(kind, [episode(1, True, lost=True)], 3, np.array([1.5, 2.5, 3.5]), storage)
    assert storage.rows == [(7, 1)]
    assert rewards == [0.0, 0.5 * 2.5, 0.0], "what led there ends as cut, with the value of where it led"
    assert rated == []


@pytest.mark.parametrize("squash", [False, True])
def test_box_actions_reach_the_env_within_bounds(squash: bool):
    space = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))
    policy = SimpleNamespace(squash_output=squash, unscale_action=lambda actions: 2 * actions)
    model: Any = SimpleNamespace(action_space=space, policy=policy)
    actions = np.array([[-3.0, 2.0], [0.5, 9.0]])
    expected = 2 * actions if squash else np.array([[-1.0, 2.0], [0.5, 4.0]])
    assert (clip_actions(model, actions) == expected).all()


def test_other_actions_pass_as_drawn():
    actions = np.array([3, 4])
    assert clip_actions(SimpleNamespace(action_space=spaces.Discrete(5)), actions) is actions  # type: ignore[arg-type]


def test_slots_are_kept_per_env():
    model = PPO("MlpPolicy", toy_gym_vec(2), n_steps=8, batch_size=8, n_epochs=1, device="cpu")
    env = model.get_env()
    source = model.collector.source_of(env)
    assert model.collector.source_of(env) is source
    assert model.collector.source_of(toy_gym_vec(2)) is not source


def test_stuck_envs_are_found():
    masks = np.ones((3, 5), np.bool_)
    assert stuck_envs(masks, [2, 3]).tolist() == []
    masks[1, 2:] = False
    assert stuck_envs(masks, [2, 3]).tolist() == [1]
    assert stuck_envs(masks, [5]).tolist() == []
    assert stuck_envs(masks[:, :4], [2, 2]).tolist() == [1], "sub-actions of one size are looked at together"


def test_empty_masks_are_counted_told_once_and_may_be_an_error():
    masks = np.ones((5, 4), np.bool_)
    said: list[str] = []
    empty = EmptyMasks(say=said.append)
    empty.look(masks, [4], 10)
    masks[[1, 3]] = False
    empty.look(masks, [4], 812)
    empty.look(masks, [2, 2], 813, np.arange(10, 15))
    assert empty.count == 4
    assert len(said) == 1
    assert "no legal action in env 1, 3 at step 812" in said[0]
    masks[3, :2] = True
    with pytest.raises(EnvError, match=r"env 11 \(head 0, 1\), 13 \(head 1\) at step 9"):
        EmptyMasks(raises=True).look(masks, [2, 2], 9, np.arange(10, 15))
    filled = opened(masks, [2, 2])
    assert filled.all()
    assert not masks[1].any(), "a copy"
    assert opened(filled, [4]) is filled


def test_masks_of_another_width_are_refused():
    source: Any = SimpleNamespace(read_masks=lambda: np.ones((2, 5), np.bool_))
    with pytest.raises(EnvError, match=r"returned 5 entries .* needs 4"):
        read_masks(Collector(), source, [4], 0)
