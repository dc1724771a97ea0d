"""A native game of your own: N boards of tic-tac-toe against random moves, stepped at once.

    fasttrain +profile=speed env.game=tictactoe:GAME

Run where this file lies. `TicTacToeEnv` is one board as a Gymnasium env: what the checkup plays, `play` shows, and what
runs without a batch; `GAME` says which is which, and what values hold where nobody chose others. Numpy is enough for a
small game; the built-in ones are compiled (fasttrain_games).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fasttrain.batch import Slots
from fasttrain.errors import EnvError
from fasttrain.native import GameSpec

GAME = GameSpec(
    env="tictactoe:TicTacToeEnv",
    native="tictactoe:TicTacToe",
    own={"total_timesteps": 500_000, "num_envs": {"balance": 64, "speed": 256}},
)
LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])
SPLITMIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


class TicTacToe:
    """N boards; see `fasttrain.envs.protocol.NativeGame`.

    Args:
        num_envs: N.
        first: probability that the learner begins.
    """

    def __init__(self, num_envs: int = 1, first: float = 0.5) -> None:
        self.num_envs, self.first = num_envs, float(first)
        self.observation_space = spaces.Box(0.0, 1.0, (18,), np.float32)  # the learner's fields, the opponent's
        self.action_space = spaces.Discrete(9)
        self.final_observations = np.zeros((num_envs, 18), np.float32)
        self.opponents_ns = 0  # of the opponent's turns; too short to be worth a clock
        self.boards = np.zeros((num_envs, 9), np.int8)  # 1: the learner's, -1: the opponent's
        self.streams = np.zeros(num_envs, np.uint64)  # one of random numbers for each board
        self.seeded = np.zeros(num_envs, np.bool_)
        self.results = np.zeros(num_envs, np.int8)  # of the last episode: 1 won, 0 draw, -1 lost

    def bind(self, slots: Slots) -> None:
        """Take the arrays to read actions from and to write everything else to."""
        self.slots = slots

    def reset(self, indices: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        """A new game on each listed board."""
        for index, seed in zip(indices, seeds, strict=True):
            if seed is not None or not self.seeded[index]:
                self.streams[index] = secrets.randbits(63) if seed is None else seed
                self.seeded[index] = True
        self._begin(np.asarray(indices))

    def step(self) -> None:
        """The learner's move, then the opponent's; boards that are decided start again."""
        slots, everyone, actions = self.slots, np.arange(self.num_envs), self.slots.actions
        if len(illegal := np.flatnonzero(self.boards[everyone, actions] != 0)):
            index = int(illegal[0])
            legal = np.flatnonzero(self.boards[index] == 0).tolist()
            raise EnvError(f"env {index}: action {int(actions[index])} is illegal, legal are {legal}")
        self.boards[everyone, actions] = 1
        won = self._has_line(1)
        over = won | (self.boards != 0).all(1)
        self._move(np.flatnonzero(~over))
        lost = ~over & self._has_line(-1)
        over |= lost | (self.boards != 0).all(1)
        self.results[:] = won.astype(np.int8) - lost
        slots.rewards[:], slots.terminations[:], slots.truncations[:] = self.results, over, False
        self._write(everyone)
        if len(ended := np.flatnonzero(over)):
            self.final_observations[ended] = slots.observations[ended]
            self._begin(ended)

    def episode_info(self, index: int) -> dict[str, Any]:
        """How the episode that has just ended did."""
        result = int(self.results[index])
        return {"is_win": result == 1, "is_draw": result == 0, "end_reason": ("draw", "won", "lost")[result]}

    def state_arrays(self) -> dict[str, NDArray[Any]]:
        """For checkpoints; a game without begins its episodes anew after `resume`."""
        return {"boards": self.boards, "streams": self.streams, "seeded": self.seeded, "results": self.results}

    def load_state_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from there."""
        for name, own in self.state_arrays().items():
            own[...] = arrays[name]

    def _begin(self, rows: NDArray[np.int64]) -> None:
        self.boards[rows] = 0
        self._move(rows[self._uniform(rows) >= self.first])
        self._write(rows)

    def _move(self, rows: NDArray[np.int64]) -> None:
        """A random move of the opponent on these boards."""
        free = self.boards[rows] == 0
        wanted = (self._uniform(rows) * free.sum(1)).astype(np.int64) + 1  # the how-manieth free field
        self.boards[rows, (free.cumsum(1) == wanted[:, None]).argmax(1)] = -1

    def _write(self, rows: NDArray[np.int64]) -> None:
        boards, slots = self.boards[rows], self.slots
        slots.observations[rows] = np.concatenate([boards == 1, boards == -1], axis=1)
        slots.action_masks[rows] = boards == 0

    def _has_line(self, who: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.boards[:, LINES] == who).all(2).any(1)
        return found

    def _uniform(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The next number of each board's own stream (splitmix64), in [0, 1): what one board draws moves no other."""
        with np.errstate(over="ignore"):
            self.streams[rows] += SPLITMIX[0]
            bits = self.streams[rows]
            for shift, factor in ((30, SPLITMIX[1]), (27, SPLITMIX[2])):
                bits = (bits ^ (bits >> np.uint64(shift))) * factor
        return (bits >> np.uint64(11)).astype(np.float64) / 2**53


class TicTacToeEnv(gym.Env[NDArray[np.float32], np.int64]):
    """One board; the same numbers as row i of a batch with the same seed."""

    def __init__(self, first: float = 0.5) -> None:
        self.game = TicTacToe(1, first)
        self.observation_space, self.action_space = self.game.observation_space, self.game.action_space
        self.slots = Slots(
            observations=np.zeros((1, 18), np.float32), actions=np.zeros(1, np.int64), rewards=np.zeros(1, np.float32),
            terminations=np.zeros(1, bool), truncations=np.zeros(1, bool), action_masks=np.ones((1, 9), bool),
        )  # fmt: skip
        self.game.bind(self.slots)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset(np.zeros(1, np.int64), [seed])
        return self.slots.observations[0].copy(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.slots.actions[0] = action
        self.game.step()
        over, reward = bool(self.slots.terminations[0]), float(self.slots.rewards[0])
        last = self.game.final_observations if over else self.slots.observations
        return last[0].copy(), reward, over, False, self.game.episode_info(0) if over else {}

    def action_masks(self) -> NDArray[np.bool_]:
        """(9,) True = free."""
        masks: Any = self.slots.action_masks
        found: NDArray[np.bool_] = masks[0].copy()
        return found
