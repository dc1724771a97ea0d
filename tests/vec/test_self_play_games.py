"""Self-play in games with engines: whose turn it is decides, refused actions are asked again, lost games are cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.errors import EnvError
from fasttrain.vec.self_play import SelfPlayVecEnv
from fasttrain_engines.settings import DaemonsConfig, Timeouts
from fasttrain_engines.vec_env import DaemonVecEnv

HERE = Path(__file__).resolve().parent.parent
ENGINE = (sys.executable, "-S", str(HERE / "alternating_engine.py"))


class Naming:
    """Names one number, or the largest that is legal below it."""

    def __init__(self, number: int) -> None:
        self.number, self.shown, self.over = number, list[Any](), list[Any]()

    def act(self, observations: Any, action_masks: Any, envs: Any) -> Any:
        self.shown.append((envs.tolist(), observations.tolist()))
        return np.array([max(np.flatnonzero(mask[: self.number + 1])) for mask in action_masks])

    def episode_over(self, env: int, info: dict[str, Any]) -> None:
        self.over.append((env, info))


def games(count: int, *flags: str, two_sided: bool = True) -> DaemonVecEnv:
    settings = DaemonsConfig(
        command=(*ENGINE, *flags), count=count, games_per_daemon=1, timeouts_s=Timeouts(start=15.0)
    )
    return DaemonVecEnv("alternating_games:Alternating", {}, count, settings, 2, two_sided=two_sided)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.mark.usefixtures("found")
def test_each_side_decides_in_its_turn_and_rewards_are_the_learners():
    env = SelfPlayVecEnv(games(2))
    env.set_opponent(opponent := Naming(1))
    assert env.reset().tolist() == [[0, 0], [0, 0]], "the learner begins the first game"
    rewards, ends = [], []
    for _ in range(6):
        seen, paid, dones, infos = env.step(np.array([2, 3]))
        assert not seen[:, 1].any(), "the learner is to decide"
        rewards.append(paid.tolist())
        ends.append([infos[row]["episode"] for row in np.flatnonzero(dones)])
    # Learner first: 2 - 1, 2 - 1. Opponent first: -1 + 2 - 1, then + 2; as second decision 3 is refused.
    assert [row for row, _ in rewards] == [1, 1, 0, 2, 1, 1]
    assert [[(end["r"], end["l"]) for end in each][:1] for each in ends] == [[], [(2, 2)], [], [(2, 2)], [], [(2, 2)]]
    assert opponent.shown[0][0] == [0, 1]
    assert all(turn == 1 for _, seen in opponent.shown for _, turn in seen)
    assert [env for env, _ in opponent.over[:2]] == [0, 1]
    env.close()


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("refused", ["learner", "opponent"])
def test_a_refused_action_is_asked_again_of_whom_it_was_asked(refused: str):
    env = SelfPlayVecEnv(games(1))
    env.set_opponent(opponent := Naming(3 if refused == "opponent" else 1))
    env.reset()
    if refused == "opponent":
        env.step_slots(np.array([2]))
        assert [seen[0][0] for _, seen in opponent.shown] == [1, 1], "asked twice, then it names 2"
        assert env.slots.rewards.tolist() == [0]
        assert env.slots.resets is None
    else:
        for _ in range(2):
            env.step_slots(np.array([2]))  # the opponent begins the second game: -1 is to be paid
        env.step_slots(np.array([3]))
        assert env.slots.resets.tolist() == [True]
        assert env.slots.rewards.tolist() == [0]
        assert env.read_masks().tolist() == [[True, True, True, False]]
        env.step_slots(np.array([2]))
        assert env.slots.resets is None
        assert env.slots.rewards.tolist() == [-1 + 2 - 1]
        env.step_slots(np.array([2]))
        assert [(one.length, one.episode_return) for one in env.slots.finished] == [(2, 2.0)]
    env.close()


@pytest.mark.usefixtures("found")
def test_a_game_that_is_lost_in_the_opponents_turn_ends_the_learners_episode():
    env = SelfPlayVecEnv(games(1, "--dies", "2"))  # each process asks once and dies at its second question
    env.set_opponent(Naming(1))
    env.reset()
    env.step_slots(np.array([2]))
    assert [(one.lost, one.length) for one in env.slots.finished] == [(True, 1)]
    env.close()
    # The opponent begins the second game with two decisions, is paid for one, and at the other the engine dies.
    env = SelfPlayVecEnv(games(1, "--twice", "--dies", "8"))
    env.set_opponent(opponent := Naming(1))
    env.reset()
    env.step_slots(np.array([2]))
    env.step_slots(np.array([2]))
    assert [(one.lost, one.episode_return) for one in env.slots.finished] == [(False, 2.0)], (
        "the lost one is no episode"
    )
    assert ["lost" in info for _, info in opponent.over] == [False, True]
    env.step_slots(np.array([2]))
    assert env.slots.rewards.tolist() == [2], "nothing of the lost game is paid in the next"
    env.close()


@pytest.mark.usefixtures("found")
def test_a_game_that_asks_for_the_other_side_needs_somebody_who_decides():
    env = games(1, two_sided=False)
    env.reset()
    with pytest.raises(EnvError, match="opponent=self"):
        env.step(np.array([2]))
    env.close()
