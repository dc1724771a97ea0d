"""SingleGame: one game of a `GameBatch` as a Gymnasium environment, with the batch's own kernels."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import BoolArray, Float32Array, Slots
from fasttrain.envs.game_batch import GameBatch
from fasttrain.envs.retrace import bytes_of, load_bytes
from fasttrain.errors import ConfigError

Action = TypeVar("Action")
Game = TypeVar("Game", bound=GameBatch)
_FIRST = np.zeros(1, np.int64)
_FIRST.flags.writeable = False


class SingleGame(gymnasium.Env[Float32Array, Action], Generic[Action, Game]):
    """Base of the built-in games' envs: its slots, the game that follows one that ended, and its state.

    As in the batch, the next game begins when one ends; `reset()` without a seed after an ended episode hands out that
    game, any other `reset()` begins a new one.

    `on_illegal` says what happens to an action outside the mask. "replace" takes a legal one instead and counts it in
    `info["illegal_actions"]` (of the episode so far), because generic tools (Gymnasium's and SB3's checkers, unmasked
    algorithms) sample the whole action space; "raise" raises EnvError as the batch does.

    Raises:
        ConfigError: `on_illegal` is neither.
    """

    def __init__(self, game: Game, on_illegal: str) -> None:
        if on_illegal not in ("replace", "raise"):
            raise ConfigError(f"on_illegal={on_illegal!r}: choose 'replace' or 'raise'")
        self._replace_illegal = on_illegal == "replace"
        self._game = game
        self.observation_space = game.observation_space
        self.action_space = game.action_space  # type: ignore[assignment]
        self._masks: BoolArray = np.zeros((1, game.mask_width), np.bool_)
        self._observations: Float32Array = np.zeros(game.final_observations.shape, np.float32)
        self._slots = Slots(
            observations=self._observations,
            actions=np.zeros((1, *(game.action_space.shape or ())), np.int64),
            rewards=np.zeros(1, np.float32),
            terminations=np.zeros(1, np.bool_),
            truncations=np.zeros(1, np.bool_),
            action_masks=self._masks,
        )
        game.bind(self._slots)
        self._next_game_begun = False
        self._illegal_actions = 0

    @property
    def opponents_ns(self) -> int:
        """Nanoseconds spent in the opponents' turns since construction."""
        return self._game.opponents_ns

    @property
    def opponents_turn(self) -> bool:
        """Whether the side to decide is not the learner's (with opponents "self")."""
        return bool(self._game.opponents_turn[0]) and not self._next_game_begun

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start a game; returns its first observation and an empty info. `options` are not used."""
        super().reset(seed=seed)
        if seed is not None or not self._next_game_begun:
            self._game.reset(_FIRST, [seed])
        self._next_game_begun = False
        self._illegal_actions = 0
        return self._observation(), {}

    def action_masks(self) -> BoolArray:
        """(A,) bool, True = legal: the mask of the next decision, head after head."""
        mask: BoolArray = self._masks[0].copy()
        return mask

    def get_state(self) -> dict[str, Any]:
        """Where the game is, for `set_state`: plain values and arrays."""
        counted = {"begun": self._next_game_begun, "illegal_actions": self._illegal_actions}
        return {**counted, **bytes_of(self._arrays())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError, ValueError: no game can be there.
        """
        arrays = load_bytes(self._arrays(), state)
        self._game.load_state_arrays(arrays)
        self._observations[:], self._masks[:] = arrays["observations"], arrays["masks"]
        self._next_game_begun, self._illegal_actions = bool(state["begun"]), int(state["illegal_actions"])

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {**self._game.state_arrays(), "observations": self._observations, "masks": self._masks}

    def _observation(self) -> Float32Array:
        observation: Float32Array = self._observations[0].copy()
        return observation

    def _stepped(self) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """What `step` returns after the batch's: the info is empty but for illegal actions and the episode's, at its
        end."""
        info: dict[str, Any] = {}
        if self._illegal_actions:
            info["illegal_actions"] = self._illegal_actions
        reward = float(self._slots.rewards[0])
        self._next_game_begun = bool(self._slots.terminations[0])
        if not self._next_game_begun:
            return self._observation(), reward, False, False, info
        info.update(self._game.episode_info(0))
        return self._game.final_observations[0].copy(), reward, True, False, info
