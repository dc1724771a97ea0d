"""SkullKingBids: one round of Skull King as a goal environment, for hindsight (`algo.her`).

The goal is a number of tricks: the bid. After a round with another number of tricks, `algo.her=final` learns from the
round as if that number had been the bid. `future` and `episode` also take numbers of tricks within the round.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from fasttrain.batch import BoolArray, Float32Array
from fasttrain_games.skullking.env import SkullKingEnv
from fasttrain_games.skullking.observation import IS_BIDDING, NEED, describe_observation

Observation = dict[str, Float32Array]


class SkullKingBids(gym.Env[Observation, np.int64]):
    """One round with a given bid. The policy plays the cards; the reward is 1 in the last step if the bid is met.

    The observation is a Dict. "observation" (W,) is that of `SkullKingEnv` without what shows the own bid, because
    hindsight changes the bid. A goal (2,) is (tricks / 10, 1.0 if the round is over, else 0.0).

    Args:
        rounds: smallest and largest round; each episode draws one. A round deals as many cards as its number.
        most: largest bid; each episode draws one from 0 to this number, or to the round's number.
        **further: arguments of `SkullKingEnv`.
    """

    def __init__(self, rounds: tuple[int, int] = (3, 10), most: int = 4, **further: Any) -> None:
        self.game, self.rounds, self.most = SkullKingEnv(**further), rounds, most
        seen, goal = self.game.observation_space, spaces.Box(0.0, 1.0, (2,), np.float32)
        parts = {"observation": seen, "achieved_goal": goal, "desired_goal": goal}
        self.observation_space: spaces.Space[Any] = spaces.Dict(parts)
        self.action_space = self.game.action_space
        columns = describe_observation(further.get("num_players", 4))
        own = (columns["bids"].start, columns["needs"].start)
        self._hidden, self._tricks = [*range(NEED, IS_BIDDING), *own], columns["tricks"].start

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        number = int(self.np_random.integers(*self.rounds, endpoint=True))
        self.game.reset(seed=int(self.np_random.integers(2**31)), options={"rounds": [number, number]})
        bid = int(self.np_random.integers(min(number, self.most), endpoint=True))
        self._goal = np.array([bid / 10, 1.0], np.float32)
        seen, *_ = self.game.step(np.int64(bid))
        return self._without_bid(seen, ended=False), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        seen, _, ended, _, info = self.game.step(action)
        observation = self._without_bid(seen, ended)
        reward = float(self.compute_reward(observation["achieved_goal"], self._goal, {}))
        return observation, reward, ended, False, {**info, "is_success": bool(reward)} if ended else info

    def compute_reward(self, achieved_goal: Float32Array, desired_goal: Float32Array, info: Any) -> Any:
        return np.isclose(achieved_goal, desired_goal).all(axis=-1).astype(np.float32)

    def action_masks(self) -> BoolArray:
        return self.game.action_masks()

    def _without_bid(self, seen: Float32Array, ended: bool) -> Observation:
        reached = np.array([seen[self._tricks], ended], np.float32)
        seen = seen.copy()
        seen[self._hidden] = 0.0
        return {"observation": seen, "achieved_goal": reached, "desired_goal": self._goal}
