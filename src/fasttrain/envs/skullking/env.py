"""SkullKingEnv: one game as a Gymnasium environment, played by the same kernels as the native batch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import BoolArray, Float32Array, Slots
from fasttrain.envs.retrace import bytes_of, load_bytes
from fasttrain.envs.skullking.game import GameView, SkullKingGame
from fasttrain.envs.skullking.opponents import OpponentMix
from fasttrain.envs.skullking.render import describe_action, describe_step, render_table, render_totals
from fasttrain.envs.skullking.rules import NUM_ACTIONS
from fasttrain.errors import ConfigError

_FIRST = np.zeros(1, np.int64)
_FIRST.flags.writeable = False


class SkullKingEnv(gymnasium.Env[Float32Array, np.int64]):
    """One game of Skull King; same seed and same actions give the trajectory of a `SkullKingGame` of any size.

    As in the batch, the next game is dealt when one ends; `reset()` without a seed after an ended episode hands out
    that game, any other `reset()` deals a new one.

    `on_illegal` says what happens to an action outside the mask. "replace", the default, plays the lowest legal action
    instead and counts it in `info["illegal_actions"]` (of the episode so far), because generic tools (Gymnasium's and
    SB3's checkers, unmasked algorithms) sample the whole action space; "raise" raises EnvError as the batch does.

    With seats of "self" a step is one decision of whichever seat must decide: `opponents_turn` says whether it is
    another than the learner's, and observation and mask are that seat's. Rewards, the last observation of a game and
    the info stay the learner's.

    Args:
        num_players: seats, 2 to 8; the learner is seat 0.
        opponents: a bot's name or "self", a list of one name per other seat, or a mapping of name to weight.
        render_mode: None or "ansi".
        on_illegal: "replace" or "raise".
        **reward: the reward and shaping keys of `SkullKingGame`.

    Raises:
        ConfigError: a value out of range, an unknown opponent or `on_illegal`.
        TypeError: an unknown render mode.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        num_players: int = 4,
        opponents: OpponentMix = "medium",
        render_mode: str | None = None,
        on_illegal: str = "replace",
        **reward: float,
    ) -> None:
        if render_mode not in (None, "ansi"):
            # A TypeError because SB3's make_vec_env asks for "rgb_array" first and takes no for an answer only so.
            raise TypeError(f"render_mode={render_mode!r}: choose None or 'ansi'")
        if on_illegal not in ("replace", "raise"):
            raise ConfigError(f"on_illegal={on_illegal!r}: choose 'replace' or 'raise'")
        self.render_mode = render_mode
        self._replace_illegal = on_illegal == "replace"
        self._game = SkullKingGame(1, num_players, opponents, **reward)
        self.observation_space = self._game.observation_space
        self.action_space = self._game.action_space
        self._masks = np.zeros((1, NUM_ACTIONS), np.bool_)
        self._observations = np.zeros((1, *self._game.observation_space.shape), np.float32)
        self._slots = Slots(
            observations=self._observations,
            actions=np.zeros(1, np.int64),
            rewards=np.zeros(1, np.float32),
            terminations=np.zeros(1, np.bool_),
            truncations=np.zeros(1, np.bool_),
            action_masks=self._masks,
        )
        self._game.bind(self._slots)
        self._next_game_dealt = False
        self._illegal_actions = 0
        self.player_names = ("you", "bot")  # the learner and the others, as text calls them
        self._before: GameView | None = None  # the learner's last decision, for `describe_step`

    @property
    def opponents_turn(self) -> bool:
        """Whether the seat that must decide is not the learner's."""
        return bool(self._game.opponents_turn[0])

    @property
    def opponents_ns(self) -> int:
        """Nanoseconds spent in the opponents' turns since construction."""
        return self._game.opponents_ns

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start a game; returns its first observation and an empty info. `options` are not used."""
        super().reset(seed=seed)
        if seed is not None or not self._next_game_dealt:
            self._game.reset(_FIRST, [seed])
        self._next_game_dealt = False
        self._illegal_actions = 0
        self._before = None
        return self._observation(), {}

    def get_state(self) -> dict[str, Any]:
        """Where the game is, for `set_state`: plain values and arrays."""
        return {"dealt": self._next_game_dealt, **bytes_of(self._arrays())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError, ValueError: no game can be there.
        """
        arrays = load_bytes(self._arrays(), state)
        self._game.load_state_arrays(arrays)
        self._observations[:], self._masks[:] = arrays["observations"], arrays["masks"]
        self._next_game_dealt, self._illegal_actions, self._before = bool(state["dealt"]), 0, None

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {**self._game.state_arrays(), "observations": self._observations, "masks": self._masks}

    def step(self, action: Any) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """One decision; the info is empty but for illegal actions and, at the end, the episode's.

        Raises:
            EnvError: an illegal action with `on_illegal="raise"`, or no `reset()` yet.
        """
        info: dict[str, Any] = {}
        chosen = int(action)
        masks = self._masks[0]
        if self._replace_illegal and not (0 <= chosen < NUM_ACTIONS and masks[chosen]) and masks.any():
            chosen = int(masks.argmax())
            self._illegal_actions += 1
        slots = self._slots
        slots.actions[0] = chosen
        if self.render_mode is not None and not self.opponents_turn:
            self._before = self._game.peek(0)
        self._game.step()
        if self._illegal_actions:
            info["illegal_actions"] = self._illegal_actions
        reward = float(slots.rewards[0])
        self._next_game_dealt = bool(slots.terminations[0])
        if not self._next_game_dealt:
            return self._observation(), reward, False, False, info
        info.update(self._game.episode_info(0))
        return self._game.final_observations[0].copy(), reward, True, False, info

    def action_masks(self) -> BoolArray:
        """(86,) bool, True = legal: the mask of the next decision."""
        mask: BoolArray = self._masks[0].copy()
        return mask

    def set_opponents(self, mix: OpponentMix) -> None:
        """Change the opponents from the next game on; see `SkullKingGame.set_opponents`."""
        self._game.set_opponents(mix)

    def peek(self) -> GameView:
        """Everything about the game, hidden cards included: for tests and tools."""
        return self._game.peek(0)

    def describe_action(self, action: int) -> str:
        """An action in words: "bids 3", "plays yellow 7"."""
        return describe_action(int(action))

    def describe_step(self) -> str:
        """What happened since the learner's last decision, with it: bids once all are made, cards, tricks, scores.

        Empty before the first one, and without a render mode.
        """
        if self._before is None:
            return ""
        return describe_step(self._before, self._game.peek(0), self.player_names)

    def render(self) -> str | None:
        """The table as text with render_mode "ansi", else None; after an episode's end its outcome and the totals."""
        if self.render_mode is None:
            return None
        view = self._game.peek(0)
        if not self._next_game_dealt:
            return render_table(view, self.player_names)
        info = self._game.episode_info(0)
        outcome = f"game over: {info['end_reason']} with {info['score']} points ({info['score_diff']:+d})"
        return f"{outcome}\n{render_totals(view, self.player_names)}"

    def _observation(self) -> Float32Array:
        observation: Float32Array = self._observations[0].copy()
        return observation
