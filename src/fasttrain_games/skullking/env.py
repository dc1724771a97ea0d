"""SkullKingEnv: one game as a Gymnasium environment, played by the same kernels as the native batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttrain.batch import Float32Array
from fasttrain.native.batch import SingleGame
from fasttrain_games.skullking.game import GameView, SkullKingGame
from fasttrain_games.skullking.opponents import OpponentMix
from fasttrain_games.skullking.render import describe_action, describe_step, render_table, render_totals
from fasttrain_games.skullking.rules import NUM_ACTIONS


class SkullKingEnv(SingleGame[np.int64, SkullKingGame]):
    """One game of Skull King. The same seed and actions give the same trajectory as in a `SkullKingGame`.

    With opponent "self" the caller also decides for the other seats: each step is one decision of one seat, and
    observation and mask are those of this seat. `opponents_turn` is True if it is not the learner's seat. Rewards, the
    last observation of a game and the info are always the learner's.

    Args:
        num_players: seats, 2 to 8; the learner is seat 0.
        opponents: a bot's name or "self", a list of one name per other seat, or a mapping of name to weight.
        render_mode: None or "ansi".
        on_illegal: "replace" (the lowest legal action) or "raise"; see `SingleGame`.
        card_memory: False: observations show no played cards except those of the current trick; see `SkullKingGame`.
        **reward: the arguments of `SkullKingGame` for reward and shaping.

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
        card_memory: bool = True,
        **reward: float,
    ) -> None:
        if render_mode not in (None, "ansi"):
            # SB3's make_vec_env first tries "rgb_array", and continues without it only after a TypeError.
            raise TypeError(f"render_mode={render_mode!r}: choose None or 'ansi'")
        self.render_mode = render_mode
        game = SkullKingGame(1, num_players, opponents, card_memory=card_memory, **reward)
        super().__init__(game, on_illegal)
        self.player_names = ("you", "bot")  # names of the learner and of the others in texts
        self._before: GameView | None = None  # the state at the learner's last decision, for `describe_step`

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start a game; returns its observation and an empty info. options={"rounds": [8, 10]}: only rounds 8 to 10."""
        self._before = None
        return super().reset(seed=seed, options=options)

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._before = None

    def step(self, action: int | np.int64) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one decision. The info is empty, except after an illegal action and at the episode's end.

        Raises:
            EnvError: an action is illegal and `on_illegal` is "raise", or `reset()` was not called.
        """
        chosen = int(action)
        masks = self._masks[0]
        if self._replace_illegal and not (0 <= chosen < NUM_ACTIONS and masks[chosen]) and masks.any():
            chosen = int(masks.argmax())
            self._illegal_actions += 1
        self._slots.actions[0] = chosen
        if self.render_mode is not None and not self.opponents_turn:
            self._before = self._game.peek(0)
        self._game.step()
        return self._stepped()

    @property
    def seat_to_decide(self) -> int:
        """The seat that decides next; 0 is the learner."""
        return int(self._game.records["seat"][0])

    def set_opponents(self, mix: OpponentMix) -> None:
        """Change the opponents from the next game on; see `SkullKingGame.set_opponents`."""
        self._game.set_opponents(mix)

    def peek(self) -> GameView:
        """Everything about the game, hidden cards included, for tests and tools."""
        return self._game.peek(0)

    def describe_action(self, action: int) -> str:
        """An action in words: "bids 3", "plays yellow 7"."""
        return describe_action(int(action))

    def describe_step(self) -> str:
        """The learner's last decision and the events since then as text: bids once all are made, cards, tricks, scores.

        The text is empty before the first decision, and without a render mode.
        """
        if self._before is None:
            return ""
        return describe_step(self._before, self._game.peek(0), self.player_names)

    def render(self) -> str | None:
        """The table as text with render_mode "ansi", else None. After an episode: outcome and totals."""
        if self.render_mode is None:
            return None
        view = self._game.peek(0)
        if not self._next_game_begun:
            return render_table(view, self.player_names)
        info = self._game.episode_info(0)
        outcome = f"game over: {info['end_reason']} with {info['score']} points ({info['score_diff']:+d})"
        return f"{outcome}\n{render_totals(view, self.player_names)}"
