"""SkirmishEnv: one game as a Gymnasium environment, played by the same kernels as the native batch."""

from __future__ import annotations

from typing import Any

from fasttrain.batch import Float32Array
from fasttrain.native.batch import SingleGame
from fasttrain_games.skirmish.actions import head_values, named_heads, replace_illegal
from fasttrain_games.skirmish.game import SkirmishGame
from fasttrain_games.skirmish.options import OpponentMix
from fasttrain_games.skirmish.render import BoardView, check_render_mode, draw_board, outcome_line, render_board
from fasttrain_games.skirmish.words import action_in_words, choice_in_words


class SkirmishEnv(SingleGame[Any, SkirmishGame]):
    """One game of Skirmish. The same seed and actions give the same trajectory as in a `SkirmishGame`.

    Args:
        render_mode: None, "ansi" or "rgb_array".
        on_illegal: "replace" (the lowest legal value of each illegal head) or "raise"; see `SingleGame`.
        action_mode: as in `SkirmishGame`, or "dict": a Dict of the heads by name.
        **options: see `SkirmishGame`. `reward_debug` puts `reward_terms`, sums of the episode so far, into every info.

    Raises:
        ConfigError: a value out of range, an unknown name, or a wrong file.
        TypeError: an unknown render mode or argument.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        render_mode: str | None = None,
        on_illegal: str = "replace",
        action_mode: str = "heads",
        **options: object,
    ) -> None:
        self.render_mode = check_render_mode(render_mode)
        game = SkirmishGame(1, "heads" if action_mode == "dict" else action_mode, **options)
        super().__init__(game, on_illegal)
        if action_mode == "dict":
            self.action_space = named_heads(game.options)

    def step(self, action: object) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """Take one decision. The info is empty, except after illegal actions, with `reward_debug` and at the end.

        Raises:
            EnvError: an action is illegal and `on_illegal` is "raise", or `reset()` was not called.
        """
        game = self._game
        values = head_values(game.options, action)
        if self._replace_illegal and self._masks.any():
            self._illegal_actions += replace_illegal(game.options, self._masks[0], values)
        self._slots.actions.reshape(-1)[:] = values
        game.step()
        answer = self._stepped()
        if game.options.reward_debug and not self._next_game_begun:
            answer[4]["reward_terms"] = game.reward_terms(0)
        return answer

    def set_opponents(self, mix: OpponentMix) -> None:
        """Change the opponent from the next game on; see `SkirmishGame.set_opponents`."""
        self._game.set_opponents(mix)

    def peek(self) -> dict[str, Any]:
        """All fields of the game, for tests and tools."""
        return self._game.peek(0)

    def view(self) -> BoardView:
        """What `render` draws: the present board, units, points."""
        return self._game.view(0)

    def describe_action(self, action: object) -> str:
        """A text that says what `action` would do in the present state."""
        values = head_values(self._game.options, action).tolist()
        return action_in_words(self._game.options, self.view(), values, self.peek()["cursor"])

    def describe_choice(self, part: int, value: int) -> str:
        """A text that says what a value of one head would do now."""
        return choice_in_words(self._game.options, self.view(), part, value, self.peek()["cursor"])

    def render(self) -> Any:
        """The board as text ("ansi") or as a picture (H, W, 3) uint8 ("rgb_array").

        After an episode's end this is the board of the next game. A line above the text says how the last game ended.
        """
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array":
            return draw_board(self.view())
        outcome = f"{outcome_line(self._game.episode_info(0))}\n" if self._next_game_begun else ""
        return outcome + render_board(self.view())
