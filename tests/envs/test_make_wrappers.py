from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from fasttrain.envs.make import EnvSpec, make_env
from fasttrain.errors import EnvSpecError

GRID = "minigrid:MiniGrid-Empty-5x5-v0"


def entry(wrapper: str, **arguments: Any) -> dict[str, Any]:
    return {"wrapper": wrapper, **arguments}


def wrapped(env_id: str, *entries: Any) -> gymnasium.Env[Any, Any]:
    return make_env(EnvSpec(id=env_id, wrappers=entries))


def played(env: gymnasium.Env[Any, Any], action: Any, steps: int = 3) -> tuple[Any, list[float]]:
    """The last observation, in its space, and the rewards."""
    observation, _ = env.reset(seed=4)
    rewards = []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        assert observation in env.observation_space
        if terminated or truncated:
            break
    return observation, rewards


PENDULUM = np.zeros(1, np.float32)


def test_gymnasiums_with_plain_arguments():
    stacked = wrapped("CartPole-v1", entry("gymnasium.wrappers:FrameStackObservation", stack_size=3))
    assert stacked.observation_space.shape == (3, 4)
    assert played(stacked, 0)[1] == [1.0, 1.0, 1.0]
    limited = wrapped("CartPole-v1", entry("gymnasium.wrappers:TimeLimit", max_episode_steps=2))
    assert played(limited, 0)[1] == [1.0, 1.0]
    rescaled = wrapped("Pendulum-v1", entry("gymnasium.wrappers:RescaleObservation", min_obs=-1, max_obs=1))
    plain, _ = played(wrapped("Pendulum-v1"), PENDULUM)
    seen, _ = played(rescaled, PENDULUM)
    np.testing.assert_allclose(seen, plain / [1, 1, 8], atol=1e-6)  # it turns at 8 at most


def test_those_of_stable_baselines():
    _, plain = played(wrapped("Pendulum-v1"), PENDULUM)
    assert min(plain) > -16.3
    assert len(set(plain)) == 3
    clipped = wrapped("Pendulum-v1", "stable_baselines3.common.atari_wrappers:ClipRewardEnv")
    assert played(clipped, PENDULUM)[1] == [-1.0, -1.0, -1.0]
    for test_mode, left in ((False, 1 - 3 / 200), (True, 1.0)):
        timed = wrapped("Pendulum-v1", entry("sb3_contrib.common.wrappers:TimeFeatureWrapper", test_mode=test_mode))
        assert played(timed, PENDULUM)[0][-1] == np.float32(left)


def test_an_argument_may_name_a_function_or_a_class():
    halved = entry("gymnasium.wrappers:TransformReward", func="operator:neg")
    assert played(wrapped("CartPole-v1", halved), 0)[1] == [-1.0, -1.0, -1.0]
    doubles = entry("gymnasium.wrappers:DtypeObservation", dtype="numpy:float64")
    assert wrapped("CartPole-v1", doubles).observation_space.dtype == np.float64


@pytest.fixture
def given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that answers for its old names with an error of its own, as supersuit does."""
    source = "def __getattr__(name):\n    raise ImportError(f'{name} is now deprecated, use stack_v1')\n"
    (tmp_path / "gives_up_make_wrappers.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield "gives_up_make_wrappers"
    sys.modules.pop("gives_up_make_wrappers", None)


def test_what_cannot_be_named_is_told(given_up: str):
    with pytest.raises(EnvSpecError, match=r"TransformReward, func=math:sqr: module 'math' has no 'sqr'; did you mean"):
        wrapped("CartPole-v1", entry("gymnasium.wrappers:TransformReward", func="math:sqr"))
    with pytest.raises(
        EnvSpecError, match=rf"{given_up}:stack_v0: ImportError: stack_v0 is now deprecated, use stack_v1"
    ):
        wrapped("CartPole-v1", f"{given_up}:stack_v0")


def test_supersuits_functions():
    pytest.importorskip("supersuit", reason="supersuit is not installed", exc_type=ImportError)
    stacked = wrapped("CartPole-v1", entry("supersuit:frame_stack_v1", stack_size=3))
    assert played(stacked, 0)[0].shape == (12,)
    negated = wrapped("CartPole-v1", entry("supersuit:reward_lambda_v0", change_reward_fn="operator:neg"))
    assert played(negated, 0)[1] == [-1.0, -1.0, -1.0]
    with pytest.raises(EnvSpecError, match="frame_stack_v0 is now deprecated, use frame_stack_v1 instead"):
        wrapped("CartPole-v1", entry("supersuit:frame_stack_v0", stack_size=3))


def test_minigrids_wrappers():
    pytest.importorskip("minigrid", reason="minigrid is not installed")
    image = wrapped(GRID, "minigrid.wrappers:ImgObsWrapper")
    assert played(image, 2)[0].shape == (7, 7, 3)
    near = entry("minigrid.wrappers:ViewSizeWrapper", agent_view_size=5)
    flat = wrapped(GRID, near, "minigrid.wrappers:ImgObsWrapper", "gymnasium.wrappers:FlattenObservation")
    assert played(flat, 2)[0].shape == (75,)
    assert "mission" in wrapped(GRID).reset(seed=1)[0]
