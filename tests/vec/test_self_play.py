"""SelfPlayVecEnv: a step ends where every learner must decide; what the opponents do in between counts with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from duels import DECISIONS, Duel, duel
from fasttrain.envs.make import EnvFactory, EnvSpec
from fasttrain.envs.wrappers import TwoSided
from fasttrain.errors import EnvError
from fasttrain.vec.self_play import RandomOpponent, SelfPlayVecEnv
from fasttrain.vec.shared import SharedMemoryVecEnv

pytestmark = pytest.mark.usefixtures("forked_workers")


class Scripted:
    """Names the number of its env, and notes what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[list[int], list[list[float]], list[list[bool]]]] = []
        self.over: list[tuple[int, dict[str, Any]]] = []

    def act(self, observations: Any, action_masks: Any, envs: Any) -> Any:
        self.shown.append((envs.tolist(), observations.tolist(), action_masks.tolist()))
        return envs.copy()

    def episode_over(self, env: int, info: dict[str, Any]) -> None:
        self.over.append((env, info))


def vec_env(kind: str, count: int = 3) -> SelfPlayVecEnv:
    if kind == "dummy":
        env = SelfPlayVecEnv(DummyVecEnv([lambda: Monitor(duel())] * count))
    else:
        env = SelfPlayVecEnv(SharedMemoryVecEnv([duel] * count, 2, info_keys=("opponents_turn",)))
    env.set_opponent(Scripted())
    return env


def test_an_opponent_without_a_legal_action_is_told_or_an_error():
    class Stuck(Duel):
        def action_masks(self) -> Any:
            return np.full(4, not self.opponents_turn)

    env, opponent = SelfPlayVecEnv(DummyVecEnv([lambda: TwoSided(Stuck())] * 2)), Scripted()
    env.set_opponent(opponent)
    env.reset()
    with pytest.warns(UserWarning, match="no legal action of the opponent in env 0, 1 at step") as told:
        env.step(np.array([1, 1]))
    env.step(np.array([1, 1]))
    assert len(told) == 1
    assert (env.empty_masks.count, [masks for *_, masks in opponent.shown]) == (4, [[[True] * 4] * 2] * 2)
    env.empty_masks.raises = True
    with pytest.raises(EnvError, match="of the opponent in env 0, 1"):  # who begins the next episode
        env.step(np.array([1, 1]))


@pytest.mark.parametrize("kind", ["dummy", "shared"])
def test_opponents_decide_between_the_learners_decisions(kind: str):
    env = vec_env(kind)
    observations = env.reset()
    assert observations[:, 2].tolist() == [0, 0, 0]
    total, lengths, ended = np.zeros(3), [], []
    for step in range(11):
        observations, rewards, dones, infos = env.step(np.array([1, 1, 1]))
        assert observations[:, 2].tolist() == [0, 0, 0], "the learner is to decide"
        total += rewards
        for index in np.flatnonzero(dones):
            lengths.append(infos[index]["episode"]["l"])
            ended.append((step, infos[index]["by"], infos[index]["episode"]["r"]))
    # Learner first: it decides 3 times of 5; opponent first: 2 times, and the opponent ends it.
    assert lengths == [3, 3, 3, 2, 2, 2, 3, 3, 3, 2, 2, 2]
    by_env = [[r for _, _, r in ended[index::3]] for index in range(3)]
    assert by_env == [[3 - 2 * index, 2 - 3 * index] * 2 for index in range(3)]
    # The last step's episode has started again with the learner's turn; one decision of it is open.
    assert total.tolist() == [sum(each) + 1 - index for index, each in enumerate(by_env)]
    opponent: Any = env.opponent
    assert [envs for envs, _ in opponent.over][:3] == [0, 1, 2]
    assert all(set(info) >= {"is_win", "by"} for _, info in opponent.over)
    assert opponent.shown[0][0] == [0, 1, 2]
    assert [row[2] for row in opponent.shown[0][1]] == [1, 1, 1], "its own view"
    env.close()


@pytest.mark.parametrize("kind", ["dummy", "shared"])
def test_masks_are_those_of_who_decides(kind: str):
    env = vec_env(kind, 4)  # env 3's opponent names 3, after which 3 is illegal
    env.reset()
    env.step_slots(np.array([1, 2, 3, 1]))
    opponent: Any = env.opponent
    assert [row[3] for row in opponent.shown[0][2]] == [True, True, False, True]
    assert env.read_masks()[:, 3].tolist() == [True, True, True, False]
    env.close()


def test_a_reset_that_begins_with_the_opponent():
    env = vec_env("dummy")
    env.reset()
    observations = env.reset()  # the second episode of each
    assert observations.tolist() == [[1, 0, 0], [1, 1, 0], [1, 2, 0]]
    _, rewards, _, _ = env.step(np.array([1, 1, 1]))
    # The opponent named 0, 1, 2 before the learner's 1 and after it.
    assert rewards.tolist() == [1, -1, -3], "what came before the learner's first decision counts with it"
    env.close()


def test_a_new_game_is_played_by_who_was_drawn_for_it():
    env = vec_env("dummy", 1)
    events: list[str] = []

    class Noting(Scripted):
        def act(self, observations: Any, action_masks: Any, envs: Any) -> Any:
            events.append(f"act {int(observations[0][0])}")
            return super().act(observations, action_masks, envs)

        def episode_over(self, env: int, info: dict[str, Any]) -> None:
            events.append("over")

    env.set_opponent(Noting())
    env.reset()
    for _ in range(5):
        env.step_slots(np.array([1]))
    # Of five decisions the learner has 0, 2, 4 of the first game; the opponent opens the second and ends it.
    assert events == ["act 1", "act 3", "over", "act 0", "act 2", "act 4", "over"]
    env.close()


def test_a_truncation_is_an_end():
    class Cut(Duel):
        def step(self, action: Any) -> Any:
            observation, reward, over, _, info = super().step(action)
            return observation, reward, False, over, info

    env = SelfPlayVecEnv(DummyVecEnv([lambda: TwoSided(Cut())]))
    env.set_opponent(Scripted())
    env.reset()
    for _ in range(3):
        env.step_slots(np.array([1]))
    assert (env.slots.terminations.tolist(), env.slots.truncations.tolist()) == ([True], [False])
    assert not env.slots.finished[0].truncated


@pytest.mark.parametrize(
    "id", ["reference.skirmish_python:SkirmishPython-v0", "fasttrain/Skirmish-v0", "fasttrain/SkullKing-v0"]
)
def test_the_built_in_games_are_played_through_the_slots(id: str):
    options = {"opponents": "self"} if "SkullKing" in id else {"opponent": "self"}
    spec = EnvSpec(id=id, kwargs={**options, "on_illegal": "raise"}, two_sided=True)
    env = SelfPlayVecEnv(SharedMemoryVecEnv([EnvFactory(spec)] * 2, 1, info_keys=("opponents_turn",)))
    env.seed(0)
    env.reset()
    learner, every, finished = RandomOpponent(env.action_space, 1), np.arange(2), []
    for _ in range(80):
        env.step_slots(learner.act(None, env.read_masks(), every))  # an illegal action raises
        finished += env.slots.finished
    length = 65 if "SkullKing" in id else 15  # decisions of the learner in a game
    assert {episode.length for episode in finished} == {length}
    assert len(finished) == 2 * (80 // length)
    env.close()


def test_random_opponents_play_legally():
    env = SelfPlayVecEnv(DummyVecEnv([duel] * 8))
    assert isinstance(env.opponent, RandomOpponent)
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(60):
        keys = rng.random((8, 4)) * env.read_masks()
        env.step_slots(keys.argmax(axis=1))  # an illegal action raises
    assert env.opponents_ns > 0
    seen = np.concatenate([inner.unwrapped.seen for inner in env.inner.envs])
    assert set(seen[seen[:, 1] == 1][:, 2]) == {0, 1, 2, 3}
    assert max(seen[:, 0]) == DECISIONS - 1


def test_two_ends_between_two_decisions_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("duels.DECISIONS", 1)
    env = vec_env("dummy", 1)
    env.reset()
    with pytest.raises(EnvError, match="two episodes ended between two decisions"):
        env.step_slots(np.array([1]))
