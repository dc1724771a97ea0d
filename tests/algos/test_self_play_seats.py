"""Several opponents at one game, of a policy that remembers: each seat knows what itself saw, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.algos.self_play import SnapshotPool
from fasttrain.envs.wrappers import TwoSided
from fasttrain.errors import ConfigError
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain_games.skullking.env import SkullKingEnv
from fasttrain_games.skullking.game import SkullKingGame
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
ENVS, PLAYERS = 3, 4


def table(kind: str) -> tuple[SelfPlayVecEnv, Any]:
    """The games in self-play, and who says whose turn it is in them."""
    if kind == "native":
        game = SkullKingGame(ENVS, PLAYERS, "self")
        return SelfPlayVecEnv(fasttrain.NativeVecEnv(game, seed=1)), lambda env: game.peek(env).seat
    envs = [SkullKingEnv(PLAYERS, "self") for _ in range(ENVS)]
    inner = DummyVecEnv([lambda env=env: TwoSided(env) for env in envs])  # type: ignore[misc]
    inner.seed(1)
    return SelfPlayVecEnv(inner), lambda env: envs[env].peek().seat


@pytest.mark.parametrize("kind", ["native", "dummy"])
def test_a_seats_states_depend_on_what_it_saw_in_this_episode_alone(kind: str):
    env, seat_of = table(kind)
    model: Any = fasttrain.MaskableRecurrentPPO(
        "MlpLstmPolicy", env, n_steps=8, batch_size=24, seed=0, device="cpu", policy_kwargs={"lstm_hidden_size": 4}
    )
    pool = SnapshotPool(model, ENVS, size=2, seats=lambda: env.turns.seats)
    seen: dict[tuple[int, int], list[Any]] = {}
    over: list[int] = []

    class Noted:
        def act(self, observations: Any, action_masks: Any, envs: Any) -> Any:
            for observation, mask, number in zip(observations, action_masks, envs.tolist(), strict=True):
                seen.setdefault((number, seat_of(number)), []).append((observation.copy(), mask.copy()))
            return pool.act(observations, action_masks, envs)

        def episode_over(self, number: int, info: Any) -> None:
            for seat in range(1, PLAYERS):
                seen.pop((number, seat), None)
            over.append(number)
            pool.episode_over(number, info)

    def check() -> int:
        found, count = pool.memory_arrays(), 0
        assert len(found["starts"]) == ENVS * (PLAYERS - 1)
        for (number, seat), history in seen.items():
            states: Any = None
            for observation, mask in history:
                _, states = model.predict(observation, states, np.array([states is None]), action_masks=mask)
            place = (seat - 1) * ENVS + number
            assert not found["starts"][place]
            for part in range(2):
                assert np.abs(found[f"pi/{part}"][:, place] - states[part][:, 0]).max() < 1e-5
            count += len(history)
        assert found["starts"].sum() == ENVS * (PLAYERS - 1) - len(seen)
        return count

    env.set_opponent(Noted())
    env.reset()
    counts = []
    for step in range(70):
        masks: Any = env.read_masks()
        env.step(masks.argmax(axis=1))
        if step in (4, 40, 69):
            counts.append(check())
    assert sorted({seat for _, seat in seen}) == [1, 2, 3]
    assert sorted(over) == [0, 1, 2], "65 decisions of each seat are a game"
    assert counts[0] in range(36, 55)
    assert counts[2] < counts[1], "nothing of the game before"

    kept = {name: array.copy() for name, array in pool.memory_arrays().items()}
    other = SnapshotPool(model, ENVS, size=2)
    assert len(other.memory_arrays()["starts"]) == ENVS
    other.load_memory(kept)
    assert all(np.array_equal(array, kept[name]) for name, array in other.memory_arrays().items())
    for starts in (kept["starts"][:-1], kept["starts"][0]):
        with pytest.raises(ConfigError, match=r"^starts of the checkpoint"):
            SnapshotPool(model, ENVS, size=2).load_memory({**kept, "starts": starts})
