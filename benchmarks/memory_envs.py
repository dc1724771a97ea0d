"""Envs that cannot be played well without memory: a T-maze, and CartPole and Pendulum without velocities. And LSTMs
that keep things for long from the beginning.

Made for `env.entry_point=benchmarks.memory_envs:t_maze env.kwargs.length=10` and the like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

AHEAD, LEFT, RIGHT = 0, 1, 2
SIGNS = {LEFT: (1.0, 1.0, 0.0), RIGHT: (0.0, 1.0, 1.0)}  # at the entrance: where the goal is
CORRIDOR, JUNCTION = (1.0, 0.0, 1.0), (0.0, 1.0, 0.0)
GOAL_REWARD, COST = 1.0, -0.1


class TMaze(gymnasium.Env[Any, Any]):
    """A corridor that ends in a junction, after Bakker (2002): which way to turn there is shown at the entrance alone.

    The observation is three numbers by Bakker's code: a sign at the entrance that tells whether the goal lies left or
    right, the same values in every cell of the corridor after it, others at the junction. From the entrance to the
    junction it is `length` steps. Actions: ahead, left, right; there is no way back.

    In the corridor left and right run into a wall: nobody moves, and it costs 0.1. At the junction ahead is a wall too,
    and left and right end the episode: 1 where the goal lies there, -0.1 where it does not. An episode is cut off after
    four times as many steps as the way needs, 4 × (length + 1), without a further reward. `info["is_win"]` says at its
    end whether the goal was reached. The best return is 1; who remembers nothing reaches the goal in half of the
    episodes at best, and gets 0.45.
    """

    def __init__(self, length: int = 10) -> None:
        if length < 1:
            raise ValueError(f"length={length}: a corridor has one cell or more")
        self.length, self.limit = length, 4 * (length + 1)
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.place, self.steps, self.goal = 0, 0, LEFT

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = 0, 0
        self.goal = LEFT if self.np_random.random() < 0.5 else RIGHT
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        at_junction, turns = self.place == self.length, int(action) != AHEAD
        over, won = at_junction and turns, at_junction and int(action) == self.goal
        moves = not at_junction and not turns
        self.place += moves
        reward = GOAL_REWARD if won else 0.0 if moves else COST
        cut_off = not over and self.steps >= self.limit
        return self._seen(), reward, over, cut_off, {"is_win": won} if over or cut_off else {}

    def _seen(self) -> Any:
        sign = SIGNS[self.goal] if self.place == 0 else JUNCTION if self.place == self.length else CORRIDOR
        return np.array(sign, dtype=np.float32)


class Blind(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows some entries of a vector alone."""

    def __init__(self, env: gymnasium.Env[Any, Any], shown: Sequence[int]) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.shown = np.array(shown)
        self.observation_space = spaces.Box(space.low[self.shown], space.high[self.shown], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[self.shown]


def t_maze(length: int = 10) -> gymnasium.Env[Any, Any]:
    """A T-maze whose junction is so many steps away."""
    return TMaze(length)


def cartpole() -> gymnasium.Env[Any, Any]:
    """CartPole-v1 that shows where the cart is and how the pole leans, not how fast they move."""
    return Blind(gymnasium.wrappers.TimeLimit(CartPoleEnv(), 500), (0, 2))


class Swinging(CartPoleEnv):
    """A pole that may fall and a cart that may leave: only the limit of steps ends an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.x_threshold = self.theta_threshold_radians = np.inf


def long() -> gymnasium.Env[Any, Any]:
    """CartPole without velocities, whose episodes are all 500 steps."""
    return Blind(gymnasium.wrappers.TimeLimit(Swinging(), 500), (0, 2))


def pendulum() -> gymnasium.Env[Any, Any]:
    """Pendulum-v1 that shows where it points to, not how fast it turns."""
    return Blind(gymnasium.wrappers.TimeLimit(PendulumEnv(), 200), (0, 1))


class LastingPolicy(RecurrentActorCriticPolicy):
    """sb3-contrib's policy whose LSTMs begin as such that keep what they have seen for up to `steps` steps.

    Chrono initialization (Tallec and Ollivier, 2018): the biases of forget gates are log(u), those of input gates
    -log(u), with u uniform between 1 and `steps`. By torch's own initialization a forget gate halves what it keeps in
    every step, and no gradient is left after 50 of them.
    """

    def __init__(self, *args: Any, steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            for lstm in filter(None, (self.lstm_actor, self.lstm_critic)):
                units = lstm.hidden_size
                kept = torch.empty(units).uniform_(1.0, float(steps)).log()
                lstm.bias_hh_l0[:units] = -kept
                lstm.bias_hh_l0[units : 2 * units] = kept
