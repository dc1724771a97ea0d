from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize
from traced_envs import Hidden, Parts, Slow

from fasttrain.envs.retrace import RetraceFactory
from fasttrain.errors import ConfigError
from fasttrain.saving.checkpoints import array_writer
from fasttrain.saving.env_state import env_state, load_env_state, load_random_state, plain, random_state
from fasttrain.vec.base import SlotVecEnv
from fasttrain.vec.native import NativeVecEnv
from fasttrain.vec.self_play import RandomOpponent, SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_games.skirmish.game import SkirmishGame
from fasttrain_games.skullking.game import SkullKingGame
from toys import ToyGame

pytestmark = [
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # stock's workers: else each loads torch, 2 s
]
FORK = None if sys.platform == "win32" else "fork"


def cart() -> Any:
    return Monitor(gymnasium.make("CartPole-v1"))


def begun(env: VecEnv, steps: int = 0) -> VecEnv:
    env.seed(3)
    env.reset()
    acted(env, steps, seed=1)
    return env


BUILDS: dict[str, Callable[[], VecEnv]] = {
    "skull king": lambda: NativeVecEnv(SkullKingGame(5)),
    "skirmish": lambda: NativeVecEnv(SkirmishGame(5)),
    "self-play": lambda: SelfPlayVecEnv(NativeVecEnv(SkullKingGame(3, opponents="self"))),
    "dummy": lambda: DummyVecEnv([RetraceFactory(cart)] * 3),
    "subproc": lambda: SubprocVecEnv([RetraceFactory(cart)] * 2, FORK),
    "shared": lambda: SharedMemoryVecEnv([RetraceFactory(cart)] * 3, 1),
    "dummy, Dict": lambda: DummyVecEnv([RetraceFactory(lambda: Monitor(Parts()))] * 2),
    "subproc, Dict": lambda: SubprocVecEnv([RetraceFactory(lambda: Monitor(Parts()))] * 2, FORK),
    "shared, Dict": lambda: SharedMemoryVecEnv([RetraceFactory(Parts)] * 3, 2),
    "wrapped": lambda: VecNormalize(VecFrameStack(DummyVecEnv([RetraceFactory(cart)] * 3), 2)),
}


def bytes_of(seen: Any) -> bytes:
    return b"".join(seen[key].tobytes() for key in sorted(seen)) if isinstance(seen, dict) else seen.tobytes()


def acted(env: VecEnv, steps: int, seed: int) -> list[Any]:
    """Legal actions; observations, rewards and ends."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        space: Any = env.action_space
        dims = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", 2)))
        keys = rng.random((env.num_envs, dims.sum()))
        if isinstance(env, SlotVecEnv) and env.masked:
            keys[~np.stack(env.env_method("action_masks"))] = -1
        parts = np.split(keys, np.cumsum(dims)[:-1], axis=1)
        actions = np.stack([part.argmax(1) for part in parts], 1)
        answer = env.step(actions[:, 0] if isinstance(space, spaces.Discrete) else actions)
        seen.append(
            (bytes_of(answer[0]), answer[1].tobytes(), answer[2].tolist(), [i.get("episode") for i in answer[3]])
        )
    return seen


def timeless(seen: list[Any]) -> str:
    return json.dumps([[str(row[:3]), [[each["r"], each["l"]] if each else None for each in row[3]]] for row in seen])


@pytest.mark.parametrize("name", BUILDS)
def test_both_go_on_alike(name: str):
    env, other = BUILDS[name](), BUILDS[name]()
    try:
        state, arrays = env_state(begun(env, 130), traced=True)
        file = io.BytesIO()
        array_writer(arrays)(file)
        file.seek(0)
        other.seed(4)
        with np.load(file, allow_pickle=False) as stored:  # an open file, as `resume` has it
            assert load_env_state(other, json.loads(json.dumps(state)), stored, 1000, traced=True) is None
        for each in (env, other):
            if isinstance(each, SelfPlayVecEnv):  # an opponent's own state is not the env's
                each.set_opponent(RandomOpponent(each.action_space, seed=9))
        assert timeless(acted(env, 150, seed=2)) == timeless(acted(other, 150, seed=2))
    finally:
        env.close()
        other.close()


def test_envs_that_cannot_be_brought_back_begin_anew_alone():
    def build() -> VecEnv:
        return VecNormalize(VecFrameStack(DummyVecEnv([RetraceFactory(cart), RetraceFactory(Hidden)][1:] * 2), 3))

    env, other = build(), build()
    state, arrays = env_state(begun(env, 4), traced=True)
    found = load_env_state(other, state, {key: np.array(array) for key, array in arrays.items()}, 50, traced=True)
    assert found.rows == [0, 1]
    first = [Hidden().reset(seed=50 + index)[0] for index in range(2)]
    assert np.array_equal(found.original, [[0, 0, *first[0]], [0, 0, *first[1]]])
    assert np.array_equal(found.observations, other.normalize_obs(found.original))  # type: ignore[attr-defined]


def test_an_episode_that_takes_longer_than_a_step_may_begins_anew():
    envs = [SharedMemoryVecEnv([RetraceFactory(Slow)], 1, step_timeout_s=timeout) for timeout in (60.0, 1.0)]
    try:
        state, arrays = env_state(begun(envs[0], 70), traced=True)
        found = load_env_state(envs[1], state, arrays, 50, traced=True)
        assert found.rows == [0]
        assert found.observations[0] == Slow().reset(seed=50)[0]
    finally:
        for each in envs:
            each.close()


def test_envs_without_notes_and_games_without_state_begin_anew():
    env = begun(NativeVecEnv(ToyGame(3)))
    state, arrays = env_state(env, traced=True)
    assert state["kind"] == "opaque"
    found = load_env_state(env, state, arrays, 7, traced=True)
    assert found.rows == [0, 1, 2]
    assert found.observations[:, 0].tolist() == [7, 8, 9], "with other seeds"


@pytest.mark.parametrize(
    ("game", "field", "value", "told"),
    [
        (SkullKingGame, "seat", 9, "seat must lie between 0 and 7"),
        (SkullKingGame, "levels", 77, "levels"),
        (SkullKingGame, "deck", 3, "no permutation"),
        (SkirmishGame, "cursor", 99, "cursor must lie between"),
        (SkirmishGame, "mission", 5, "mission must lie between 0 and 0"),
        (SkullKingGame, "", 3, "of the checkpoint is"),  # another number of envs
    ],
)
def test_games_that_cannot_be_are_refused(game: Any, field: str, value: int, told: str):
    env = begun(NativeVecEnv(game(2)))
    state, arrays = env_state(env, traced=False)
    arrays = {**{key: np.array(array) for key, array in arrays.items()}, "envs/none": np.zeros(1)}
    if field:
        arrays["game/games"][field] = value
    with pytest.raises(ConfigError, match=told):
        load_env_state(env if field else NativeVecEnv(game(value), seed=1), state, arrays, 1, traced=False)


# --- random streams


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def test_all_streams_go_on_from_where_they_were_and_what_is_none_is_refused():
    np.random.randn()  # half of a pair is kept for the next call
    random.gauss(0, 1)
    state, arrays = random_state()
    first = drawn()
    load_random_state(json.loads(json.dumps(state)), arrays)
    assert drawn() == first
    with pytest.raises(ConfigError, match="numpy"):
        load_random_state(state, {**arrays, "numpy": arrays["numpy"][:3]})
    with pytest.raises(ValueError, match="version 99"):
        load_random_state({**state, "python": {"version": 99, "gauss": None}}, arrays)


def test_plain_values():
    given = {"a": np.float64(1.5), "b": [np.int64(2), (True,)], "c": np.arange(2)}
    assert plain(given) == {"a": 1.5, "b": [2, [True]], "c": [0, 1]}
