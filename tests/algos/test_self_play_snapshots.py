"""Frozen copies that act like the policy they were made of; the pool of them: who is in it, who plays, what Elo makes
of the games; and what each seat of a game remembers."""

from __future__ import annotations

import io
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.self_play import FIRST_RATING, K_FACTOR, Player, SnapshotPool, expected_score, weights_of
from fasttrain.envs.wrappers import TwoSided
from fasttrain.errors import ConfigError
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain_games.skullking.env import SkullKingEnv
from fasttrain_games.skullking.game import SkullKingGame
from toys import ToyGame

EITHER = pytest.mark.parametrize("engine", ["torch", "kernels"])
ENVS, PLAYERS = 3, 4


def toys() -> Any:
    return fasttrain.NativeVecEnv(ToyGame(5), seed=0)


def learner(engine: str = "torch") -> Any:
    return fasttrain.MaskablePPO("MlpPolicy", toys(), n_steps=8, batch_size=20, seed=0, device="cpu", engine=engine)


def dqn(engine: str) -> Any:
    return fasttrain.DQN("MlpPolicy", toys(), buffer_size=200, seed=0, device="cpu", engine=engine)


def remembering(env: Any) -> Any:
    return fasttrain.MaskableRecurrentPPO(
        "MlpLstmPolicy", env, n_steps=8, batch_size=20, seed=0, device="cpu", policy_kwargs={"lstm_hidden_size": 4}
    )


def seen(model: Any, count: int = 400) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    observations = rng.random((count, *model.observation_space.shape)).astype(np.float32)
    masks = rng.random((count, int(model.action_space.n))) < 0.5
    masks[:, 0] = True
    return observations, masks


@EITHER
def test_the_best_action_and_a_few_others(engine: str):
    model = dqn(engine)
    player: Any = Player(model)
    assert isinstance(player.engine, KernelQEngine) == (engine == "kernels")
    observations, masks = seen(model, 4000)
    drawn = player.act(observations, masks)
    assert masks[np.arange(4000), drawn].all()
    with torch.no_grad():
        values = model.q_net(torch.from_numpy(observations)).numpy()
    best = np.where(masks, values, -np.inf).argmax(axis=1)
    errs = (drawn != best).mean()
    assert 0.5 * Player.random_share < errs <= Player.random_share


@EITHER
@pytest.mark.parametrize("make", [learner, dqn])
def test_only_loading_changes_it(make: Any, engine: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Player, "random_share", 0.0)
    model = make(engine)
    player: Any = Player(model)
    assert isinstance(player.engine, (KernelEngine, KernelQEngine)) == (engine == "kernels")
    observations, masks = seen(model)

    def acts() -> Any:
        torch.manual_seed(0)
        return player.act(observations, masks)

    before = acts()
    old = weights_of(model)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    np.testing.assert_array_equal(acts(), before)
    player.load(weights_of(model))
    assert (acts() != before).any()
    player.load(old)
    np.testing.assert_array_equal(acts(), before)


def test_what_is_refused_twice_or_first_is_forgotten():
    model, refused = remembering(toys()), np.zeros(5, np.bool_)
    (shown, masks), everyone = seen(model, 5), np.arange(5)
    pool = SnapshotPool(model, 5, size=1, again=lambda: refused)

    def ask(*again: int) -> Any:
        refused[:] = np.isin(everyone, again)
        rows = np.array(again or everyone)
        pool.act(shown[rows], masks[rows], rows)
        return {name: np.array(part) for name, part in pool.memory_arrays().items()}

    ask()
    second = ask()
    for _ in range(2):
        assert all(np.array_equal(part, second[name]) for name, part in ask(0, 2).items())
    pool.episode_over(1, {})
    first = ask()
    assert not np.array_equal(first["pi/0"], second["pi/0"])
    assert all(np.allclose(part, first[name], atol=1e-6) for name, part in ask(1).items())


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
    model = remembering(env)
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
        if step in (4, 20, 69):
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
    for name, array in (("starts", kept["starts"][:-1]), ("starts", kept["starts"][0]), ("pi/1", kept["pi/1"][:, :3])):
        with pytest.raises(ConfigError, match=rf"^{name} of the checkpoint"):
            SnapshotPool(model, ENVS, size=2).load_memory({**kept, name: array})


def pool_of(model: Any, **options: Any) -> SnapshotPool:
    settings = {"num_envs": 6, "size": 3, "score_of": lambda info: info.get("score")}
    return SnapshotPool(model, **{**settings, **options})


def mark(model: Any, number: float) -> None:
    """Weights that say which version they are."""
    with torch.no_grad():
        model.policy.action_net.bias.fill_(number)


class Told:
    """A generator whose places are given; it keeps what it was asked for."""

    def __init__(self, places: list[int]) -> None:
        self.places, self.asked = places, []

    def integers(self, bound: int) -> int:
        self.asked.append(bound)
        return self.places.pop(0)

    def permutation(self, count: int) -> Any:
        return np.arange(count)


def test_the_nth_snapshot_is_drawn_among_n_places(monkeypatch: pytest.MonkeyPatch):
    model, told = learner(), Told([3, 2, 0, 5])
    monkeypatch.setattr(np.random, "default_rng", lambda _: told)
    pool = pool_of(model, size=3)
    for step in range(1, 8):
        mark(model, step)
        pool.take(step)
    assert pool.current.env_steps == 7, "the latest is not in the pool"
    for snapshot in (pool.current, *pool.pool):
        assert snapshot.weights["action_net.bias"][0] == snapshot.env_steps
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
        (torch.zeros(7), "opponent 0 has weights of another network"),
        (torch.zeros(8, dtype=torch.float64), "opponent 0 has weights of another network"),
        (None, "opponent 0 has weights of another network"),
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


def test_players_are_used_again(monkeypatch: pytest.MonkeyPatch):
    model, made = learner(), Mock(wraps=Player)
    monkeypatch.setattr("fasttrain.algos.self_play.Player", made)
    pool = pool_of(model, size=1, latest=0.5)
    for step in range(20):
        pool.take(step)
        for env in range(6):
            pool.episode_over(env, {})
        pool.act(np.zeros((6, 3), np.float32), np.ones((6, 8), np.bool_), np.arange(6))
    assert made.call_count <= 3
