"""SkirmishGame: N games of Skirmish stepped in place by compiled kernels (a `NativeGame`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.batch import Int64Array, Slots
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.native.batch import GAMES_PER_THREAD, GameBatch
from fasttrain_games.skirmish import kernels
from fasttrain_games.skirmish.actions import action_space, illegal_head
from fasttrain_games.skirmish.layout import observation_width
from fasttrain_games.skirmish.options import SELF, OpponentMix, Options, make_options, opponents_for
from fasttrain_games.skirmish.render import BoardView
from fasttrain_games.skirmish.state import GAME, OVER, TERMS, UNSTARTED, impossible, make_setup
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.threads import FOLLOW, ThreadChoice, new_team, run

RESET_OPTIONS = ("mission", "rounds", "opponent")


class SkirmishGame(GameBatch):
    """N independent games; the learner is side 0, at the lower edge of the board.

    Reward of every step: `reward_vp` times the change of the difference in victory points (VP). At the end
    `reward_win` is added for a win and subtracted for a loss. Two secondary terms, 0 by default, are summed up and paid
    every `secondary_every` decisions of the learner and at the end: `reward_damage` per wound dealt minus wounds taken,
    `reward_progress` per inch by which own moves bring units nearer to their nearest marker.

    With opponent "self" the caller decides for both sides: a game also stops before the opponent's decisions.
    Observation and mask are then those of the opponent's side; `opponents_turn` is true for these games. The reward is
    always that of the learner since the previous stop.

    Args:
        num_envs: N.
        action_mode: "heads": all units at once, `MultiDiscrete`; "units": one unit at a time, `Discrete`.
        opponent: "random", "greedy", "planner", "self", or a mapping of these to weights, drawn at each game's start.
        mission: "only_war", "take_and_hold", the path of a YAML file, a mapping as in such a file, or a list of these.
        roster, enemy_roster: name of a shipped roster, or the path of a YAML file; 1 to 8 units.
        rounds: length of a game in rounds.
        width, height: size of the board in inches.
        cache: keep tables of distances, lines of sight and targets (`tables.py`). Results are the same without them.
        reward_debug: put the sums of the reward's terms into the episode's info, as `reward_terms`.

    Raises:
        ConfigError: a value out of range, an unknown name, or a wrong file. The message says what fits.
    """

    def __init__(self, num_envs: int, action_mode: str = "heads", **options: object) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs}: at least one game is needed")
        self.options: Options = make_options(action_mode=action_mode, **options)
        rosters = self.options.rosters
        super().__init__(
            "Skirmish",
            np.zeros(num_envs, GAME),
            np.empty((num_envs, 4)),
            action_space(self.options),
            observation_width(len(rosters[0]), len(rosters[1])),
            sum(self.options.head_sizes),
        )
        self.records["phase"] = UNSTARTED
        self.setup = make_setup(self.options)
        self.records["rounds"] = self.records["next_rounds"] = self.options.rounds
        self._mix[:] = self.options.opponent
        self._usual = self._mix.copy()  # opponents for games without the reset option `opponent`
        self.written: tuple[Any, ...] = ()  # array arguments of kernels.write_step

    def bind(self, slots: Slots) -> None:
        super().bind(slots)
        self.written = (
            slots.observations, slots.action_masks, slots.rewards, slots.terminations, self.opponents_turn,
        )  # fmt: skip

    def kernel_calls(self) -> list[KernelCall]:
        games, setup, none, team = self.records, self.setup, self._all_games[:0], (new_team(), 0)
        actions = self._bound().actions.reshape(self.num_envs, -1)
        return [
            KernelCall(kernels.advance, (games, setup, self._mix, none, False, *team)),
            KernelCall(kernels.write_step, (games, setup, none, *self.written, *team)),
            KernelCall(kernels.apply_actions, (games, setup, actions, none)),
            KernelCall(kernels.forget_outcomes, (games, none)),
            KernelCall(kernels.seed_games, (games, none, np.zeros(0, np.uint64))),
            FOLLOW,
        ]

    def _seed(self, indices: Int64Array, seeds: NDArray[np.uint64]) -> None:
        kernels.seed_games(self.records, indices, seeds)

    def _restart(self, indices: Int64Array) -> None:
        kernels.forget_outcomes(self.records, indices)
        run(kernels.advance, 1, self.records, self.setup, self._mix, indices, True)
        run(kernels.write_step, 1, self.records, self.setup, indices, *self.written)

    def _step(self, indices: Int64Array, choice: ThreadChoice) -> None:
        slots, games, setup = self._bound(), self.records, self.setup
        actions = slots.actions.reshape(self.num_envs, -1)
        illegal = kernels.apply_actions(games, setup, actions, indices)
        if illegal >= 0:
            raise self._illegal(int(illegal))
        parts = self._parts(indices)
        on_threads = parts > 1 and choice.next()
        start_ns = time.perf_counter_ns()
        self._play_on(indices, False, parts if on_threads else 1)
        ended = indices[slots.terminations[indices]]
        if ended.size:
            self.final_observations[ended] = slots.observations[ended]  # type: ignore[index]
            self._play_on(ended, True, min(parts, len(ended) // GAMES_PER_THREAD) if on_threads else 1)
        slots.truncations[indices] = False
        if parts > 1:  # seconds per game, because the length of `indices` varies
            choice.took(on_threads, (time.perf_counter_ns() - start_ns) / (1e9 * len(indices)))

    def _play_on(self, indices: Int64Array, anew: bool, threads: int) -> None:
        """Play to the next decision, or with `anew` to the first decision of a new game, and write the slots."""
        games, setup = self.records, self.setup
        start_ns = time.perf_counter_ns()
        run(kernels.advance, threads, games, setup, self._mix, indices, anew)
        self.opponents_ns += time.perf_counter_ns() - start_ns
        run(kernels.write_step, threads, games, setup, indices, *self.written)

    def episode_info(self, index: int) -> dict[str, Any]:
        """The info at the episode's end of env `index`, valid in the step in which it ended.

        The learner is the "model", the other side the "player"; `winner` is one of them or "draw". `turn` is the round
        in which the game ended, health is in wounds left.
        """
        game = self.records[index]
        model_vp, player_vp = game["result_vp"].tolist()
        model_health, player_health = game["result_health"].tolist()
        outcome = int(game["result_outcome"])
        info = {
            "winner": ("player", "draw", "model")[outcome + 1],
            "is_win": outcome > 0,
            "is_draw": outcome == 0,
            "model_vp": model_vp,
            "player_vp": player_vp,
            "vp_diff": model_vp - player_vp,
            "end_reason": "wipeout_self" if not model_health else "turn_limit" if player_health else "wipeout_enemy",
            "turn": int(game["result_round"]),
            "model_health": model_health,
            "player_health": player_health,
            "mission": self.options.missions[int(game["result_mission"])].name,
        }
        if self.options.reward_debug:
            info["reward_terms"] = dict(zip(TERMS, game["result_terms"].tolist(), strict=True))
        return info

    def reward_terms(self, index: int) -> dict[str, float]:
        """Sums of the reward's terms in the running episode of env `index`; all 0 without `reward_debug`."""
        return dict(zip(TERMS, self.records["terms"][index].tolist(), strict=True))

    def set_opponents(self, mix: OpponentMix, indices: Sequence[int] | Int64Array | None = None) -> None:
        """Change the opponent of all envs or of the listed ones, from each env's next game on.

        Raises:
            ConfigError: see `options.opponents_for`.
        """
        listed = slice(None) if indices is None else np.asarray(indices, np.int64)
        self._mix[listed] = self._usual[listed] = opponents_for(mix, self.options.rosters)

    def set_options(self, options: Mapping[str, Any], indices: Int64Array) -> None:
        """Set options of the next games: {"mission": "only_war", "rounds": 2, "opponent": "greedy"}. {}: as configured.

        Raises:
            EnvSpecError: an unknown option, or a mission or number of rounds with which these games were not built.
            ConfigError: see `options.opponents_for`.
        """
        most, missions = self.options.rounds, [each.name for each in self.options.missions]
        mission, rounds, opponent = (options.get(key) for key in RESET_OPTIONS)
        if unknown := [key for key in options if key not in RESET_OPTIONS]:
            raise EnvSpecError(f"Skirmish has no reset option {unknown[0]!r}: it takes {', '.join(RESET_OPTIONS)}")
        if mission not in (None, *missions):
            raise EnvSpecError(f"Skirmish: mission={mission}: choose one of env.kwargs.mission: {', '.join(missions)}")
        if rounds is not None and (type(rounds) is not int or not 1 <= rounds <= most):
            raise EnvSpecError(f"Skirmish: rounds={rounds}: expected 1 to {most}, the value of env.kwargs.rounds")
        mix = self._usual[indices] if opponent is None else opponents_for(opponent, self.options.rosters)
        if opponent is not None and mix[SELF - 1] < 1.0:
            raise EnvSpecError("Skirmish: a task cannot have opponent=self; use opponent=self on the command line")
        self._mix[indices], self.records["next_rounds"][indices] = mix, rounds or most
        self.records["next_mission"][indices] = 0 if mission is None else 1 + missions.index(mission)

    def peek(self, index: int) -> dict[str, Any]:
        """A copy of every field of game `index` (`state.GAME`), for tests and tools."""
        game = self.records[index]
        return {name: value.tolist() for name in GAME.names or () for value in (game[name],)}

    def view(self, index: int) -> BoardView:
        """What `render` draws of game `index`: the present board, units, points."""
        game = self.records[index]
        x, y, health = (game[name].tolist() for name in ("x", "y", "health"))
        units = [
            list(zip(x[side], y[side], health[side], strict=True))[: len(roster)]
            for side, roster in enumerate(self.options.rosters)
        ]
        return BoardView(
            mission=self.options.missions[int(game["mission"])],
            round=int(game["round"]),
            rounds=int(game["rounds"]),
            phase=min(int(game["phase"]), OVER),
            active=int(game["active"]),
            vp=(int(game["vp"][0]), int(game["vp"][1])),
            cp=(int(game["cp"][0]), int(game["cp"][1])),
            units=units,
            sheets=self.options.rosters,
        )

    def _impossible(self, games: NDArray[Any]) -> str:
        return impossible(games, self.setup[0])

    def _illegal(self, index: int) -> EnvError:
        slots = self._bound()
        values = slots.actions[index].reshape(-1)
        if self.records["phase"][index] >= OVER or slots.action_masks is None:
            return EnvError(f"Skirmish env {index} has no game for action {values.tolist()}: call reset() first")
        wrong = illegal_head(self.options, slots.action_masks[index], values)
        if wrong is None:
            return EnvError(f"Skirmish env {index}: action {values.tolist()} is illegal now")
        head, legal = wrong
        return EnvError(
            f"Skirmish env {index}: {values[head]} in head {head} of action {values.tolist()} is illegal now, legal "
            f"values are {legal}"
        )
