"""The pool of opponents: who is in it, who plays, and what Elo makes of the games."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import fasttrain
from fasttrain.algos.self_play import FIRST_RATING, K_FACTOR, SnapshotPool, expected_score
from fasttrain.errors import ConfigError
from toys import ToyGame, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)


def learner() -> Any:
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    return fasttrain.MaskablePPO("MlpPolicy", env, n_steps=8, batch_size=20, seed=0, device="cpu")


def pool_of(model: Any, **options: Any) -> SnapshotPool:
    settings = {"num_envs": 6, "size": 3, "score_of": lambda info: info.get("score")}
    return SnapshotPool(model, **{**settings, **options})


def mark(model: Any, number: float) -> None:
    """Weights that say which version they are."""
    with torch.no_grad():
        model.policy.action_net.bias.fill_(number)


def test_the_latest_and_a_sample_of_all_before():
    model = learner()
    counts: Counter[int] = Counter()
    for seed in range(300):
        pool = pool_of(model, seed=seed)
        pool._players.clear()
        for step in range(1, 11):
            mark(model, step)
            pool.take(step)
        assert pool.current.env_steps == 10
        assert len(pool.pool) == 3
        counts.update(snapshot.number for snapshot in pool.pool)
        for snapshot in (pool.current, *pool.pool):
            if snapshot.number:
                assert snapshot.weights["action_net.bias"][0] == snapshot.env_steps
    assert set(counts) == set(range(10)), "the latest is not in the pool"
    # Each of ten is in it with probability 3/10: 90 of 300, standard deviation 7.9.
    assert all(90 - 4 * 7.9 < count < 90 + 4 * 7.9 for count in counts.values())


class Told:
    """A generator whose places are given; it keeps what it was asked for."""

    def __init__(self, places: list[int]) -> None:
        self.places, self.asked = places, []

    def integers(self, bound: int) -> int:
        self.asked.append(bound)
        return self.places.pop(0)

    def permutation(self, count: int) -> Any:
        return np.arange(count)


def test_the_nth_snapshot_is_drawn_among_n_places():
    pool = pool_of(learner(), size=3)
    pool._rng = told = Told([3, 2, 0, 5])  # type: ignore[assignment]
    for step in range(1, 8):
        pool.take(step)
    assert told.asked == [4, 5, 6, 7], "the fourth before the latest is one of four, each as probable"
    assert [each.number for each in pool.pool] == [5, 1, 4], "place 3 is outside, 2 the last inside"


def test_every_env_is_played_by_its_own_opponent():
    model = learner()
    pool = pool_of(model, latest=0.3)
    for step in range(1, 4):
        with torch.no_grad():  # version k plays action k, whatever it sees
            model.policy.action_net.weight.zero_()
            model.policy.action_net.bias.fill_(-50.0)
            model.policy.action_net.bias[step] = 50.0
        pool.take(step)
    for env in range(6):
        pool.episode_over(env, {})
    playing = [snapshot.env_steps for snapshot in pool.playing]
    assert len(set(playing)) > 1
    observations = np.zeros((6, 3), np.float32)
    masks = np.ones((6, 8), np.bool_)
    actions = pool.act(observations, masks, np.arange(6))
    for env, version in enumerate(playing):
        if version:  # 0 is untrained
            assert actions[env] == version
    some = np.array([5, 2])
    chosen = pool.act(observations[:2], masks[:2], some)
    assert [chosen[k] for k in range(2) if playing[some[k]]] == [playing[env] for env in some if playing[env]]


def test_the_share_of_the_latest():
    pool = pool_of(learner(), num_envs=1, latest=0.7)
    pool.take(1)
    latest = 0
    for _ in range(2000):
        pool.episode_over(0, {})
        latest += pool.playing[0] is pool.current
    assert latest / 2000 == pytest.approx(0.7, abs=0.04)


def test_elo_by_hand():
    assert expected_score(1400, 1000) == pytest.approx(10 / 11)
    pool = pool_of(learner(), num_envs=1, latest=0.0)
    pool.episode_over(0, {"score": 1.0})
    assert pool.rating == FIRST_RATING, "games against the latest say nothing"
    pool.take(1)
    pool.episode_over(0, {"score": 0.0})  # what was the latest has left: the env went on against it as one of the pool
    assert pool.rating == FIRST_RATING - K_FACTOR / 2
    (old,) = pool.pool
    assert (old.rating, old.games, old.points) == (FIRST_RATING + K_FACTOR / 2, 1, 0.0)
    pool.episode_over(0, {})
    assert old.games == 1, "no score, no rating"
    pool.take(2)
    assert pool.current.rating == pool.rating
    assert pool.summary()["pool"][0] == {"env_steps": 0, "elo": 1008.0, "games": 1, "learner_score": 0.0}


def test_the_stronger_learner_rises():
    pool = pool_of(learner(), num_envs=1, latest=0.0)
    pool.take(1)
    for game in range(500):
        pool.episode_over(0, {"score": float(game % 4 > 0)})
    (old,) = pool.pool
    assert expected_score(pool.rating, old.rating) == pytest.approx(0.75, abs=0.1)


def test_state_goes_through_a_file():
    model = learner()
    pool = pool_of(model)
    for step in range(1, 6):
        mark(model, step)
        pool.take(step)
        pool.episode_over(step, {"score": 1.0})
    file = io.BytesIO()
    torch.save(pool.state(), file)
    file.seek(0)
    other = pool_of(learner())
    other.act(np.zeros((6, 3), np.float32), np.ones((6, 8), np.bool_), np.arange(6))  # its own snapshot 0 plays
    other.resume(torch.load(file, weights_only=True), pool.positions())
    assert other.summary() == pool.summary()
    assert other.current.weights["action_net.bias"][0] == 5
    observations, masks = np.zeros((6, 3), np.float32), np.ones((6, 8), np.bool_)
    torch.manual_seed(0)
    first = other.act(observations, masks, np.arange(6))
    torch.manual_seed(0)
    np.testing.assert_array_equal(first, pool.act(observations, masks, np.arange(6)))


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (torch.full((8,), torch.nan), "action_net.bias of opponent 0 has numbers that are not finite"),
        (torch.zeros(7), "opponent 0 is of another network"),
        (torch.zeros(8, dtype=torch.float64), "opponent 0 is of another network"),
        (None, "opponent 0 is of another network"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(weights: torch.Tensor | None, told: str):
    pool = pool_of(learner())
    pool.take(1)
    before, state = pool.summary(), pool.state()
    bad = state["pool"][0]["weights"] = dict(state["pool"][0]["weights"])
    if weights is None:
        del bad["action_net.bias"]
    else:
        bad["action_net.bias"] = weights
    with pytest.raises(ConfigError, match=told):
        pool.resume({**state, "rating": 1.0}, pool.positions())
    assert pool.summary() == before


def test_players_are_used_again():
    model = learner()
    pool = pool_of(model, size=1, latest=0.5)
    for step in range(20):
        pool.take(step)
        for env in range(6):
            pool.episode_over(env, {})
        pool.act(np.zeros((6, 3), np.float32), np.ones((6, 8), np.bool_), np.arange(6))
    assert len(pool._players) + len(pool._spare) <= 3
