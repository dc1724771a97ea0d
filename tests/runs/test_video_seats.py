"""A model that remembers, at several seats of one game: each seat's memory is its own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from fasttrain.runs.video import Seats
from fasttrain_games.skullking.env import SkullKingEnv

Seen = tuple[bytes, ...]


class Historian:
    """Remembers every observation that it was told of; takes the lowest legal action."""

    def __init__(self) -> None:
        self.told: list[Seen] = []

    def predict(self, observations: Any, state: Any, episode_start: Any, deterministic: bool, action_masks: Any) -> Any:
        assert episode_start.tolist() == [state is None]
        history: Seen = (*(state or ()), observations[0].tobytes())
        self.told.append(history)
        return action_masks.argmax(axis=1), history


class SeatsUnnamed(gym.Wrapper[Any, Any, Any, Any]):
    def get_wrapper_attr(self, name: str) -> Any:
        return super().get_wrapper_attr(name if name != "seat_to_decide" else "none")


@pytest.mark.parametrize("named", [True, False])
def test_each_seat_remembers_what_it_saw_in_this_episode(named: bool):
    base = SkullKingEnv(3, "self")
    env: Any = base if named else SeatsUnnamed(base)
    model: Any = Historian()
    seats = Seats(model, env, has_masks=True, deterministic=True)
    by_seat: dict[int, Seen] = {}
    for seed in (1, 2):
        observation, _ = env.reset(seed=seed)
        seats.forget()
        by_seat.clear()
        over, decisions = False, 0
        while not over:
            seat = base.peek().seat if named else min(base.peek().seat, 1)
            by_seat[seat] = (*by_seat.get(seat, ()), observation.tobytes())
            action = seats.actions(observation[None], base.action_masks()[None])
            assert model.told[-1] == by_seat[seat]
            observation, _, over, _, _ = env.step(action[0])
            decisions += 1
        assert decisions == 195
        assert {seat: len(seen) for seat, seen in by_seat.items()} == (
            {0: 65, 1: 65, 2: 65} if named else {0: 65, 1: 130}
        )
