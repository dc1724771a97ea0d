from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.errors import ConfigError
from fasttrain.runs.demonstrations import Demonstrations, read_demonstrations, record
from toys import Corridor

SEEN, DISCRETE = spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2)


class Right:
    def act(self, observations: Any, action_masks: Any, envs: NDArray[np.int64]) -> NDArray[Any]:
        return np.ones(len(envs), np.int64)


@pytest.fixture
def shown() -> Demonstrations:
    env = DummyVecEnv([lambda: Corridor(3), lambda: Corridor(5)])
    return record(env, Right(), episodes=5)


def test_whole_episodes_are_recorded_as_many_of_each_environment(shown: Demonstrations) -> None:
    assert shown.episode_starts.sum() == 5
    assert len(shown.actions) == 3 * 2 + 5 * 3 or len(shown.actions) == 3 * 3 + 5 * 2
    lengths = np.diff([*np.flatnonzero(shown.episode_starts), len(shown.actions)])
    assert sorted(lengths.tolist()) in ([3, 3, 3, 5, 5], [3, 3, 5, 5, 5])
    assert shown.action_masks is None
    ends = np.append(shown.episode_starts[1:], True)
    np.testing.assert_array_equal(shown.rewards, ends)
    assert not shown.truncations.any()
    np.testing.assert_allclose(shown.observations[shown.episode_starts][:, 0], 0)
    steps = np.round(shown.observations[:, 2] * 60).astype(int)
    assert (steps[shown.episode_starts] == 0).all()
    assert (np.diff(steps)[~shown.episode_starts[1:]] == 1).all()


def test_returns_are_discounted_within_an_episode_and_not_known_shortly_before_a_truncation() -> None:
    def returns(starts: list[int], rewards: list[int], cuts: list[int], gamma: float) -> NDArray[Any]:
        begins, ends, paid = np.array(starts, bool), np.array(cuts, bool), np.array(rewards, np.float32)
        return Demonstrations(np.zeros((5, 1)), np.zeros(5, np.int64), None, begins, paid, ends).returns(gamma)

    whole = returns([1, 0, 0, 1, 0], [1, 2, 4, 8, 16], [0] * 5, 0.5)
    np.testing.assert_allclose(whole, [1 + 1 + 1, 2 + 2, 4, 8 + 8, 16])
    cut = returns([1, 0, 0, 0, 1], [1] * 5, [0, 0, 0, 1, 0], 0.3)  # what follows counts 0.0081, 0.027, 0.09 and 0.3
    np.testing.assert_allclose(cut, [1.417, 1.39, np.nan, np.nan, 1.0], rtol=1e-5)


def test_a_file_gives_back_what_was_saved(shown: Demonstrations, tmp_path: Path) -> None:
    shown.save(tmp_path / "d.npz")
    again = read_demonstrations(tmp_path / "d.npz", SEEN, DISCRETE)
    for one, other in zip(shown, again, strict=True):
        np.testing.assert_array_equal(one, other)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one number": (
        {"actions": np.int64(3)},
        r"actions must hold a number for each decision, it is int64 of shape \(\)",
    ),
    "texts": ({"rewards": np.array(["a"] * 4)}, "rewards must hold a number for each decision"),
    "no actions": ({"actions": None}, "there is no array actions"),
    "shape": ({"observations": np.zeros((4, 2), np.float32)}, r"observations is of shape \(4, 2\)"),
    "missing": ({"observations": None}, "observations is missing"),
    "nan": ({"observations": np.full((4, 3), np.nan, np.float32)}, "observations is not finite in row 0"),
    "range": ({"actions": np.array([0, 1, 2, 1])}, "the action of row 2 is not in Discrete"),
    "kind": ({"actions": np.array([0.5, 1, 1, 1])}, "is not in Discrete"),
    "rewards": ({"rewards": np.zeros(3)}, "episode_starts and rewards need a finite value for each of the 4"),
    "masks": ({"action_masks": np.ones((4, 3), bool)}, r"action_masks have shape \(4, 3\), expected \(4, 2\)"),
    "cuts": ({"truncations": np.zeros(3, bool)}, r"truncations have shape \(3,\), expected \(4,\)"),
    "illegal": ({"action_masks": np.array([[1, 1], [1, 0], [1, 1], [1, 1]], bool)}, r"action 1 of row 1 is illegal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    good: dict[str, Any] = {
        "observations": np.zeros((4, 3), np.float32), "actions": np.array([0, 1, 0, 1]),
        "episode_starts": np.array([True, False, True, False]), "rewards": np.zeros(4, np.float32),
    }  # fmt: skip
    np.savez(tmp_path / "good.npz", **good)
    assert len(read_demonstrations(tmp_path / "good.npz", SEEN, DISCRETE).actions) == 4
    np.savez(tmp_path / "d.npz", **{key: value for key, value in {**good, **changes}.items() if value is not None})
    with pytest.raises(ConfigError, match=message):
        read_demonstrations(tmp_path / "d.npz", SEEN, DISCRETE)
