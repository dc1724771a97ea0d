"""SkullKingGame: N games of Skull King stepped in place by compiled kernels (a `NativeGame`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fasttrain.batch import Float64Array, Int64Array, Slots
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.native.batch import GameBatch
from fasttrain_games.skullking import kernels
from fasttrain_games.skullking.bots import SEAT_NAMES
from fasttrain_games.skullking.observation import observation_width
from fasttrain_games.skullking.opponents import OpponentMix, cumulative_mix, level_of
from fasttrain_games.skullking.rules import MAX_PLAYERS, MIN_PLAYERS, NUM_ACTIONS, NUM_NUMBERED, NUM_ROUNDS
from fasttrain_games.skullking.state import ENDED, GAME, UNSTARTED, impossible
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.threads import FOLLOW, ThreadChoice, new_team, run

_SCRATCH_SHAPE = (2, 12)  # row 0: probabilities of winning 0 to 10 tricks, row 1 (bot `hard`): held cards' win chances


class GameView(NamedTuple):
    """Everything about one game, hidden cards included. For tests, tools and rendering, never for an agent."""

    phase: int  # state.BIDDING, PLAYING or ENDED
    round_number: int
    dealer: int
    leader: int
    hands: list[list[int]]  # card ids per seat, ascending
    bids: list[int]  # per seat; a seat that has not bid yet has its previous round's bid
    tricks: list[int]
    totals: list[int]
    bonuses: list[int]  # points at stake this round per seat, without Loot
    alliances: list[tuple[int, int]]  # (seat that played a Loot card, seat that won the trick)
    trick: list[int]  # codes on the table in the order played
    plays: list[int]  # codes played since the last bids, kept after a round until the next bids
    levels: list[int]  # per seat an index into bots.SEAT_NAMES, drawn at the first decision; entry 0 is unused
    seat: int  # the seat that decides next
    final_totals: list[int]  # points per seat of the last game that ended


class SkullKingGame(GameBatch):
    """N independent games. Seat 0 of each is the learner's; bots of the chosen levels play the other seats.

    For a seat whose opponent is "self" the caller decides (a `TwoSidedGame`): the game stops before its decisions too,
    and the slots then hold the observation and mask of that seat. In each round the learner bids first; no seat sees a
    bid before all are made.

    Reward: round score times `reward_round_scale` at each round's end. At the game's end `reward_win` is added if the
    learner has the best total, alone or with others; otherwise it is subtracted. Shaping terms, all 0 by default:

    - `shaping_bid_made`: added at a round's end if the learner made its bid exactly;
    - `shaping_bid_error`: subtracted at a round's end for each trick above or below the bid;
    - `shaping_trick_won`: added for each trick that the learner wins;
    - `shaping_trick_toward_bid`: added for each trick won up to the bid, subtracted for each trick beyond it.

    Args:
        num_envs: N.
        num_players: seats per game, 2 to 8.
        opponents: a bot's name or "self", a list of one name per other seat, or a mapping of name to weight.
        card_memory: False: an observation shows no played cards except those of the current trick, so that a policy
            needs a memory: the blocks `seen` and `tigress` have only this trick, `bonus` and `alliances` are zero.

    Raises:
        ConfigError: a value out of range or an unknown opponent.
    """

    def __init__(
        self,
        num_envs: int,
        num_players: int = 4,
        opponents: OpponentMix = "medium",
        *,
        card_memory: bool = True,
        reward_round_scale: float = 0.01,
        reward_win: float = 1.0,
        shaping_bid_made: float = 0.0,
        shaping_bid_error: float = 0.0,
        shaping_trick_won: float = 0.0,
        shaping_trick_toward_bid: float = 0.0,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs}: at least one game is needed")
        if not MIN_PLAYERS <= num_players <= MAX_PLAYERS:
            raise ConfigError(f"num_players={num_players}: Skull King takes {MIN_PLAYERS} to {MAX_PLAYERS} players")
        if not isinstance(card_memory, bool):
            raise ConfigError(f"card_memory={card_memory!r}: choose true or false")
        super().__init__(
            "Skull King",
            np.zeros(num_envs, GAME),
            np.empty((num_envs, num_players - 1, len(SEAT_NAMES))),
            spaces.Discrete(NUM_ACTIONS),
            observation_width(num_players),
            NUM_ACTIONS,
        )
        self.num_players, self._remembers = num_players, card_memory
        self.records["num_players"] = num_players
        self.records["next_rounds"] = 1, NUM_ROUNDS
        self._scratch: Float64Array = np.zeros((1, *_SCRATCH_SHAPE))
        weights = {  # in the order of the W_ indices in state.py
            "reward_round_scale": reward_round_scale,
            "reward_win": reward_win,
            "shaping_bid_made": shaping_bid_made,
            "shaping_bid_error": shaping_bid_error,
            "shaping_trick_won": shaping_trick_won,
            "shaping_trick_toward_bid": shaping_trick_toward_bid,
        }
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
                raise ConfigError(f"{name}={weight!r}: choose a finite number")
        self._weights = np.array([*weights.values()], np.float64)
        self.written: tuple[Any, ...] = ()  # array arguments of kernels.write_step
        self.set_opponents(opponents)

    def bind(self, slots: Slots) -> None:
        super().bind(slots)
        self.written = (
            slots.observations, slots.action_masks, slots.rewards, slots.terminations, slots.truncations,
            self.final_observations, self.opponents_turn,
        )  # fmt: skip

    @property
    def seats_to_decide(self) -> NDArray[np.int32]:
        """(N,) int32: the seat of each game that decides next; 0 is the learner."""
        seats: NDArray[np.int32] = self.records["seat"]
        return seats

    def kernel_calls(self) -> list[KernelCall]:
        games, none, team = self.records, self._all_games[:0], (new_team(), 0)
        views = (self._observations, self._masks, self.opponents_turn)
        return [
            KernelCall(kernels.advance, (games, none, self._mix, self._weights, self._scratch, *team)),
            KernelCall(kernels.write_step, (games, none, *self.written, *team)),
            KernelCall(kernels.restart_games, (games, none, *views)),
            KernelCall(kernels.apply_actions, (games, none, self._bound().actions)),
            *([] if self._remembers else [KernelCall(kernels.forget_played_cards, (games, none, *self._shown()))]),
            KernelCall(kernels.seed_games, (games, none, np.zeros(0, np.uint64))),
            FOLLOW,
        ]

    def _seed(self, indices: Int64Array, seeds: NDArray[np.uint64]) -> None:
        kernels.seed_games(self.records, indices, seeds)

    def _restart(self, indices: Int64Array) -> None:
        kernels.restart_games(self.records, indices, self._observations, self._masks, self.opponents_turn)
        if not self._remembers:
            kernels.forget_played_cards(self.records, indices, *self._shown())

    def _step(self, indices: Int64Array, choice: ThreadChoice) -> None:
        slots = self._bound()
        games = self.records
        illegal = kernels.apply_actions(games, indices, slots.actions)
        if illegal >= 0:
            raise self._illegal(int(illegal), int(slots.actions[illegal]))
        parts = self._parts(indices)
        on_threads = parts > 1 and choice.next()
        threads = parts if on_threads else 1
        start_ns = time.perf_counter_ns()
        run(kernels.advance, threads, games, indices, self._mix, self._weights, self._scratch_of(threads))
        between_ns = time.perf_counter_ns()
        run(kernels.write_step, threads, games, indices, *self.written)
        if not self._remembers:
            kernels.forget_played_cards(games, indices, *self._shown())
        self.opponents_ns += between_ns - start_ns
        if parts > 1:  # time per game, because `len(indices)` varies
            choice.took(on_threads, (time.perf_counter_ns() - start_ns) / (1e9 * len(indices)))

    def _shown(self) -> tuple[Any, ...]:
        """The arrays that `forget_played_cards` takes: observations, terminations, last observations."""
        return self._observations, self._bound().terminations, self.final_observations

    def _scratch_of(self, threads: int) -> Float64Array:
        if len(self._scratch) < threads:
            self._scratch = np.zeros((threads, *_SCRATCH_SHAPE))
        return self._scratch

    def episode_info(self, index: int) -> dict[str, Any]:
        """The info at the episode's end of env `index`, valid in the step in which it ended.

        `winner` is a seat: 0, the learner's, also if the learner shares the best total. `is_win` is True also for a
        shared win, `score_diff` is the learner's total minus the best other one, `end_reason` is "won", "shared" or
        "lost", `turn` counts the learner's decisions. `opponents_beaten` is the share of other seats with a lower
        total, where an equal total counts half.
        """
        game = self.records[index]
        totals = game["result_totals"][: self.num_players].tolist()
        own = totals[0]
        others = max(totals[1:])
        end_reason = "won" if own > others else "shared" if own == others else "lost"
        beaten = 0.0
        for total in totals[1:]:
            if total <= own:
                beaten += 1.0 if total < own else 0.5
        return {
            "winner": 0 if own >= others else totals.index(others),
            "is_win": end_reason != "lost",
            "score": own,
            "score_diff": own - others,
            "bids_made": int(game["result_bids_made"]),
            "end_reason": end_reason,
            "turn": int(game["result_turn"]),
            "opponents_beaten": beaten / (self.num_players - 1),
        }

    def set_options(self, options: Mapping[str, Any], indices: Int64Array) -> None:
        """Choose the first and last round of the next games: {"rounds": [8, 10]}. {} means rounds 1 to 10.

        Raises:
            EnvSpecError: an unknown option, or impossible rounds.
        """
        if unknown := [key for key in options if key != "rounds"]:
            raise EnvSpecError(f"Skull King has no reset option {unknown[0]!r}: it takes rounds, for example [8, 10]")
        rounds = options.get("rounds", (1, NUM_ROUNDS))
        whole = isinstance(rounds, (list, tuple)) and len(rounds) == 2 and all(type(each) is int for each in rounds)
        if not whole or not 1 <= rounds[0] <= rounds[1] <= NUM_ROUNDS:
            raise EnvSpecError(f"Skull King: rounds={rounds}: expected the first and the last round, 1 to {NUM_ROUNDS}")
        self.records["next_rounds"][indices] = rounds

    def set_opponents(self, mix: OpponentMix, indices: Sequence[int] | Int64Array | None = None) -> None:
        """Change the opponents of all envs or of the listed ones, from each env's next game on.

        A game that has just begun also gets them, because opponents are drawn with the learner's first decision.

        Raises:
            ConfigError: see `opponents.cumulative_mix`.
        """
        cumulative = cumulative_mix(mix, self.num_players)
        self._mix[slice(None) if indices is None else np.asarray(indices, np.int64)] = cumulative

    def bot_actions(self, level: str, indices: Sequence[int] | Int64Array | None = None) -> Int64Array:
        """(M,) int64: the action that a bot of this level would take now, in all envs or the listed ones.

        `random` and `easy` draw from the games' own random streams, so that a call changes the rest of the games.

        Raises:
            ConfigError: unknown level.
        """
        self._bound()
        listed = self._all_games if indices is None else np.asarray(indices, np.int64)
        if (self.records["phase"][listed] == UNSTARTED).any():
            raise EnvError("Skull King: reset() every env before asking for bot_actions()")
        actions = np.empty(len(listed), np.int64)
        kernels.choose_as_bot(self.records, listed, level_of(level), actions, self._scratch[0])
        return actions

    def peek(self, index: int) -> GameView:
        """A copy of everything about game `index`, hidden cards included."""
        game = self.records[index]
        seats = self.num_players
        allied = int(game["num_allied"])
        return GameView(
            phase=int(game["phase"]),
            round_number=int(game["round"]),
            dealer=int(game["dealer"]),
            leader=int(game["leader"]),
            hands=[
                _cards(int(numbers), int(specials))
                for numbers, specials in zip(game["hand_numbers"][:seats], game["hand_specials"][:seats], strict=True)
            ],
            bids=game["bids"][:seats].tolist(),
            tricks=game["tricks"][:seats].tolist(),
            totals=game["totals"][:seats].tolist(),
            bonuses=game["bonus"][:seats].tolist(),
            alliances=list(
                zip(game["ally_player"][:allied].tolist(), game["ally_winner"][:allied].tolist(), strict=True)
            ),
            trick=game["codes"][: int(game["played"])].tolist(),
            plays=game["plays"][: int(game["num_plays"])].tolist(),
            levels=game["levels"][:seats].tolist(),
            seat=int(game["seat"]),
            final_totals=game["result_totals"][:seats].tolist(),
        )

    def _impossible(self, games: NDArray[Any]) -> str:
        return impossible(games, len(SEAT_NAMES))

    def _illegal(self, index: int, action: int) -> EnvError:
        phase = int(self.records["phase"][index])
        if phase in (UNSTARTED, ENDED):
            return EnvError(f"Skull King env {index} has no game for action {action}: call reset() first")
        legal = np.flatnonzero(self._masks[index]).tolist()
        seat = int(self.records["seat"][index])
        where = f"env {index}, seat {seat}" if seat else f"env {index}"
        return EnvError(f"Skull King {where}: action {action} is illegal now, legal actions are {legal}")


def _cards(numbers: int, specials: int) -> list[int]:
    bits = numbers | specials << NUM_NUMBERED
    return [card for card in range(bits.bit_length()) if bits >> card & 1]
