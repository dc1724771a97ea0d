"""SkirmishPythonEnv: Skirmish on the plain rules, one game, milliseconds a step."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import BoolArray, Float32Array
from fasttrain.errors import ConfigError, EnvError
from fasttrain_games.skirmish.actions import action_space, head_values, illegal_head, named_heads, replace_illegal
from fasttrain_games.skirmish.layout import observation_width
from fasttrain_games.skirmish.options import SELF, OpponentMix, make_options, opponents_for
from fasttrain_games.skirmish.render import BoardView, check_render_mode, draw_board, outcome_line, render_board
from fasttrain_games.skirmish.words import action_in_words, choice_in_words
from reference.skirmish_python.battle import Battle
from reference.skirmish_python.bots import play_phase
from reference.skirmish_python.observation import legal, observe
from reference.skirmish_python.stream import Stream
from reference.skirmish_python.units import MOVE

TERMS = ("vp", "win", "damage", "progress")


class SkirmishPythonEnv(gymnasium.Env[Float32Array, Any]):
    """One game of Skirmish in plain Python: seed for seed the trajectory of `SkirmishEnv`.

    `info["perf"]["enemy_turn_ms"]` is what the opponent's turn took, in steps that have one. Else as `SkirmishEnv`.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self, render_mode: str | None = None, on_illegal: str = "replace", action_mode: str = "heads", **options: Any
    ) -> None:
        self.render_mode = check_render_mode(render_mode)
        if on_illegal not in ("replace", "raise"):
            raise ConfigError(f"on_illegal={on_illegal!r}: choose 'replace' or 'raise'")
        self._replace_illegal = on_illegal == "replace"
        self._options = make_options(action_mode="heads" if action_mode == "dict" else action_mode, **options)
        rosters = self._options.rosters
        width = observation_width(len(rosters[0]), len(rosters[1]))
        self.observation_space = spaces.Box(-1.0, 1.0, (width,), np.float32)
        self.action_space = named_heads(self._options) if action_mode == "dict" else action_space(self._options)
        self._stream: Stream | None = None
        self._battle: Battle | None = None
        self._cursor = 0  # units mode: the unit that decides
        self._lead = 0  # VP difference when the last reward was paid
        self._since_paid = 0  # decisions of the learner since secondary terms were paid
        self._paid = (0, 0.0)  # damage margin and progress paid so far
        self._terms = dict.fromkeys(TERMS, 0.0)
        self._illegal_actions = 0
        self._enemy_turn_ns = 0

    @property
    def battle(self) -> Battle:
        """The rules' own state of the game."""
        if self._battle is None:
            raise EnvError("Skirmish: reset() must come before everything else")
        return self._battle

    @property
    def opponents_turn(self) -> bool:
        """Whether the side to decide is the opponent (with opponent "self"); False before the first reset."""
        return self._battle is not None and not self._battle.over and self._battle.active == 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Start a game; without a seed it continues the random stream. `options` are not used."""
        super().reset(seed=seed)
        if seed is not None or self._stream is None:
            self._stream = Stream(secrets.randbits(64) if seed is None else seed)
        self._illegal_actions = self._lead = self._since_paid = 0
        self._paid = (0, 0.0)
        self._terms = dict.fromkeys(TERMS, 0.0)
        self._begin()
        while self.battle.over:
            self._begin()
        return self._observation(), {}

    def get_state(self) -> dict[str, Any]:
        """The random stream: where the next game comes from, not where this one is."""
        return {"stream": None if self._stream is None else self._stream.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """The next `reset()` continues that stream."""
        self._stream = None
        if state["stream"] is not None:
            self._stream = Stream(0)
            self._stream.state = int(state["stream"])

    def step(self, action: Any) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """One decision; the info holds `perf`, illegal actions and, at the end, the episode's.

        Raises:
            EnvError: an illegal action with `on_illegal="raise"`, or no game to play it in.
        """
        battle = self.battle
        if battle.over:
            raise EnvError(f"Skirmish has no game to play action {action} in: reset() it first")
        values = self._checked(action)
        units = battle.units[battle.active]
        if battle.active == 0:
            self._since_paid += 1
        if self._options.action_mode == "heads":
            battle.use_stratagem(int(values[-2]), int(values[-1]))
            chosen = values[: len(units)] if battle.phase == MOVE else values[len(units) :]
            for unit, choice in zip(units, chosen, strict=False):
                battle.carry_out(unit, int(choice))
            battle.end_phase()
        else:
            battle.carry_out(units[self._cursor], int(values[0]) - (0 if battle.phase == MOVE else 25))
            self._cursor += 1
        self._enemy_turn_ns = 0
        self._to_decision()
        # Present in every step, because readers look at one env's info and then take it from all.
        perf = {"enemy_turn_ms": self._enemy_turn_ns / 1e6} if self._enemy_turn_ns else {}
        info: dict[str, Any] = {"perf": perf}
        reward = self._reward()
        if self._illegal_actions:
            info["illegal_actions"] = self._illegal_actions
        if self._options.reward_debug:
            info["reward_terms"] = dict(self._terms)
        if battle.over:
            info.update(self.episode_info())
        return self._observation(), reward, battle.over, False, info

    def action_masks(self) -> BoolArray:
        """(A,) bool, True = legal: the mask of the next decision, head after head; after the end nothing is legal."""
        if self.battle.over:
            return np.zeros(sum(self._options.head_sizes), np.bool_)
        return np.array(legal(self.battle, self._cursor), np.bool_)

    def set_opponents(self, mix: OpponentMix) -> None:
        """Change the opponent from the next game on."""
        self._options = dataclasses.replace(self._options, opponent=opponents_for(mix, self._options.rosters))
        if self._battle is not None:
            self._battle.options = self._options

    def episode_info(self) -> dict[str, Any]:
        """The episode's outcome; see `SkirmishGame.episode_info`."""
        battle = self.battle
        model_health, player_health = battle.health(0), battle.health(1)
        lead = battle.vp[0] - battle.vp[1]
        outcome = self._outcome()
        return {
            "winner": ("player", "draw", "model")[outcome + 1], "is_win": outcome > 0, "is_draw": outcome == 0,
            "model_vp": battle.vp[0], "player_vp": battle.vp[1], "vp_diff": lead,
            "end_reason": "wipeout_self" if not model_health else "turn_limit" if player_health else "wipeout_enemy",
            "turn": battle.round, "model_health": model_health, "player_health": player_health,
            "mission": battle.mission.name,
        }  # fmt: skip

    def render(self) -> Any:
        """The board as text ("ansi"; after the end below a line about it) or as a picture (H, W, 3) uint8."""
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array":
            return draw_board(self.view())
        outcome = f"{outcome_line(self.episode_info())}\n" if self.battle.over else ""
        return outcome + render_board(self.view())

    def describe_action(self, action: Any) -> str:
        """What `action` would do now."""
        values = head_values(self._options, action).tolist()
        return action_in_words(self._options, self.view(), values, self._cursor)

    def describe_choice(self, part: int, value: int) -> str:
        """What a value of one head would do now."""
        return choice_in_words(self._options, self.view(), part, value, self._cursor)

    def view(self) -> BoardView:
        """What there is to draw."""
        battle = self.battle
        return BoardView(
            mission=battle.mission, round=battle.round, rounds=self._options.rounds, phase=battle.phase,
            active=battle.active, vp=(battle.vp[0], battle.vp[1]), cp=(battle.cp[0], battle.cp[1]),
            units=[[(unit.x, unit.y, unit.health) for unit in side] for side in battle.units],
            sheets=self._options.rosters,
        )  # fmt: skip

    def _outcome(self) -> int:
        """1 the learner won, -1 it lost, 0 a draw."""
        battle = self.battle
        if not battle.living(0):
            return -1
        if not battle.living(1):
            return 1
        return (battle.vp[0] > battle.vp[1]) - (battle.vp[0] < battle.vp[1])

    def _to_decision(self) -> None:
        """Play on until somebody outside must decide, or the game is over."""
        battle = self.battle
        while not battle.over:
            if battle.active == 0 or battle.level == SELF:
                units = battle.units[battle.active]
                if self._options.action_mode == "heads":
                    return
                while self._cursor < len(units):
                    if len(battle.choices(units[self._cursor])) > 1:
                        return
                    self._cursor += 1
            else:
                start_ns = time.perf_counter_ns()
                play_phase(battle, battle.level)
                self._enemy_turn_ns += time.perf_counter_ns() - start_ns
            self._cursor = 0
            battle.end_phase()

    def _begin(self) -> None:
        self._cursor = 0
        self._battle = Battle(self._options, self._stream or Stream(0))
        self._to_decision()

    def _reward(self) -> float:
        options, battle = self._options, self.battle
        terms = dict.fromkeys(TERMS, 0.0)
        lead = battle.vp[0] - battle.vp[1]
        terms["vp"] = options.reward_vp * (lead - self._lead)
        self._lead = lead
        if battle.over:
            terms["win"] = options.reward_win * self._outcome()
        if battle.over or self._since_paid >= options.secondary_every:
            margin = battle.dealt - battle.taken
            terms["damage"] = options.reward_damage * (margin - self._paid[0])
            terms["progress"] = options.reward_progress * (battle.progress - self._paid[1])
            self._paid = (margin, battle.progress)
            self._since_paid = 0
        for name, value in terms.items():
            self._terms[name] += value
        return float(np.float32(sum(terms.values())))

    def _checked(self, action: Any) -> Any:
        values, mask = head_values(self._options, action), self.action_masks()
        if self._replace_illegal:
            self._illegal_actions += replace_illegal(self._options, mask, values)
        elif wrong := illegal_head(self._options, mask, values):
            head, legal_values = wrong
            raise EnvError(
                f"Skirmish: {values[head]} in head {head} of action {values.tolist()} is illegal now, legal values are "
                f"{legal_values}"
            )
        return values

    def _observation(self) -> Float32Array:
        battle = self.battle
        units_mode = self._options.action_mode == "units"
        side = 0 if battle.over else battle.active
        return np.array(observe(battle, side, self._cursor if units_mode and not battle.over else -1), np.float32)
