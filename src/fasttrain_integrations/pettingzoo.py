"""PettingZoo's games: `Seat`, an env for one learner, which plays another seat in every episode, and `Rows`, a
vectorized env in which every agent is a row.

In `Seat` the other seats play random legal moves. With `opponents="self"` the caller chooses their actions too: a step
is one decision of the seat whose turn it is, `opponents_turn` is True if this is an opponent's seat, and observation
and mask are this seat's. Rewards, the last observation and the info are always the learner's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from fasttrain.batch import BoolArray, each_array
from fasttrain.envs.masks import mask_width
from fasttrain.envs.user_code import blame, import_user_module
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.spec.backends import SINGLE, VECTOR, Backend
from fasttrain.spec.games import GameSpec

if TYPE_CHECKING:
    from fasttrain.spec.config import EnvConfig

HERE = "fasttrain_integrations.pettingzoo"
MASK, SEEN = "action_mask", "observation"
KINDS = ("random", "self")
MOST_GAMES = 1_000  # most games in a row without a decision of the learner
GAME = GameSpec(opponent_key="opponents", eval_opponent="random")


class _Games(Backend):
    """Builds `Seat`, or with `env.kwargs.sharing=true` `Rows`, a VectorEnv with a row for every agent."""

    name = "pettingzoo"

    def adapted(self, env: EnvConfig) -> EnvConfig:
        if env.id is None:
            module = (env.entry_point or "pettingzoo.classic.connect_four_v3").partition(":")[0]
            raise ConfigError(f"env.backend=pettingzoo needs a module with a function env(): env.id={module}")
        kwargs = {"game": env.id, **env.kwargs}
        if kwargs.pop("sharing", False):
            return replace(env, backend=VECTOR, id=None, entry_point=f"{HERE}:Rows", kwargs=kwargs)
        seat: dict[str, Any] = {"entry_point": f"{HERE}:Seat", "game": f"{HERE}:GAME"}
        return replace(env, backend=SINGLE, id=None, kwargs=kwargs, **seat)


BACKEND = _Games()


class Seat(gymnasium.Env[Any, Any]):
    """One seat of a game whose seats have the same spaces. Raises EnvSpecError if there is no such game or its seats
    have different spaces.

    The last info has `is_win`, `is_draw`, `score_diff` (the learner's rewards minus the best other seat's), `seat`, and
    `end_reason` with the seat's name, so that results are reported by seat.

    Args:
        game: the module, for example `pettingzoo.classic.connect_four_v3`; it has `env()` or `parallel_env()`.
        opponents: "random" or "self".
        seat: the learner's seat by name; None: each seat in turn, the first one drawn from the seed.
        options: arguments of the game's `env()`.
    """

    def __init__(
        self,
        game: str,
        opponents: str = "random",
        seat: str | None = None,
        render_mode: str | None = None,
        **options: object,
    ) -> None:
        self._what = f"env.id={game}"
        if opponents not in KINDS:
            raise EnvSpecError(f"{self._what}: env.kwargs.opponents={opponents!r} is none of {', '.join(KINDS)}")
        self.aec = _made(game, self._what, {**options, "render_mode": render_mode})
        self.render_mode, self._others_decide_outside = render_mode, opponents == "self"
        self.metadata = {"render_modes": [], **self.aec.metadata}
        self.seats = list(self.aec.possible_agents)
        if seat is not None and seat not in self.seats:
            raise EnvSpecError(f"{self._what}: env.kwargs.seat={seat!r} is none of {', '.join(self.seats)}")
        self._fixed, self._games, self.seat = seat, 0, seat or self.seats[0]
        self._totals: dict[str, float] = {}  # seat → sum of its rewards; empty before the first game
        kinds = ("observation_space", "action_space")
        shown, self.action_space = (_same(self.aec, kind, self.seats, self._what) for kind in kinds)
        self._in_dict = isinstance(shown, spaces.Dict) and SEEN in shown.spaces
        space = shown[SEEN] if self._in_dict else shown
        self._float32 = isinstance(space, spaces.Box) and space.dtype == np.float64
        if self._float32:
            space = spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._games = int(self.np_random.integers(len(self.seats))) if seed is not None else self._games + 1
        self.seat = self._fixed or self.seats[self._games % len(self.seats)]
        self._options = options
        self._deal()
        self._go_on()
        return self._observation(), {}

    def _deal(self) -> None:
        self.aec.reset(seed=int(self.np_random.integers(2**31)), options=self._options)
        self._totals, self._has_decided = dict.fromkeys(self.seats, 0.0), False

    @property
    def opponents_turn(self) -> bool:
        return bool(self._totals) and not self._over() and self.aec.agent_selection != self.seat

    @property
    def seat_to_decide(self) -> int:
        """The number of the seat that decides next, from 1 on."""
        return 1 + self.seats.index(self.aec.agent_selection)

    def action_masks(self) -> BoolArray:
        """The mask (A,) of the seat that decides next; all True if the game has no masks."""
        if self._over():
            return np.ones(self.action_space.n, np.bool_)  # type: ignore[attr-defined]
        seat = self.aec.agent_selection
        seen = self.aec.observe(seat)
        mask = seen.get(MASK) if isinstance(seen, dict) else None
        mask = self.aec.infos[seat].get(MASK) if mask is None else mask
        found: BoolArray = np.ones(self.action_space.n, np.bool_) if mask is None else np.asarray(mask) != 0  # type: ignore[attr-defined]
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self._totals[self.seat]
        mask = self.action_masks() if self.opponents_turn and isinstance(self.action_space, spaces.Discrete) else ()
        if np.any(mask) and not mask[action]:
            raise EnvError(f"{self._what}: the opponent in seat {self.aec.agent_selection} chose the illegal {action}")
        self._act(action)
        self._go_on()
        over, reward = self._over(), self._totals[self.seat] - before
        cut = over and bool(self.aec.truncations.get(self.seat)) and not self.aec.terminations.get(self.seat)
        return self._observation(), reward, over and not cut, cut, self._outcome() if over else {}

    def _act(self, action: object) -> None:
        self._has_decided |= self.aec.agent_selection == self.seat
        self.aec.step(action)
        for seat, reward in self.aec.rewards.items():
            self._totals[seat] += float(reward)

    def _go_on(self) -> None:
        """Play on to the next decision that the caller makes. If a game ends before the learner's first decision, a new
        game begins. Raises EnvError after more than MOST_GAMES of these games in a row.
        """
        games = 0
        while not self._over() or not self._has_decided:
            if self._over():
                self._deal()
                games += 1
            if games > MOST_GAMES:
                raise EnvError(f"{self._what}: {MOST_GAMES:,} games in a row ended before {self.seat} decided anything"
                               "; look at the options of the game (env.kwargs, curriculum.tasks)")  # fmt: skip
            seat = self.aec.agent_selection
            if self.aec.terminations[seat] or self.aec.truncations[seat]:
                self.aec.step(None)  # the seat is finished and leaves the game
            elif seat == self.seat or self._others_decide_outside:
                return
            else:
                self._act(self._random_move())

    def _random_move(self) -> Any:
        if isinstance(self.action_space, spaces.Discrete):
            mask = self.action_masks()
            return int(self.np_random.choice(np.flatnonzero(mask if mask.any() else ~mask)))
        self.action_space.seed(int(self.np_random.integers(2**31)))
        return self.action_space.sample()

    def _over(self) -> bool:
        """Whether the learner has finished. Other seats may still play."""
        aec, seat = self.aec, self.seat
        return seat not in aec.agents or bool(aec.terminations[seat] or aec.truncations[seat])

    def _observation(self) -> Any:
        """The observation of the seat that decides next; at the end of a game the learner's."""
        seen = self.aec.observe(self.seat if self._over() else self.aec.agent_selection)
        seen = seen[SEEN] if self._in_dict else seen
        return seen.astype(np.float32) if self._float32 else seen

    def _outcome(self) -> dict[str, Any]:
        mine = self._totals[self.seat]
        best = max((total for seat, total in self._totals.items() if seat != self.seat), default=0.0)
        word = "won" if mine > best else "drew" if mine == best else "lost"
        return {"is_win": mine > best, "is_draw": mine == best, "score_diff": mine - best, "seat": self.seat,
                "end_reason": f"{self.seat} {word}"}  # fmt: skip

    def render(self) -> Any:
        return self.aec.render()

    def close(self) -> None:
        self.aec.close()


def _made(game: str, what: str, options: dict[str, Any], parallel: bool = False) -> Any:
    """The game as an AEC env, or with `parallel` as a parallel env; a game of the other kind is converted."""
    try:
        module = import_user_module(game, os.getcwd(), what)
    except EnvSpecError as error:
        cause, (top, group, *_) = error.__cause__, f"{game}.".split(".")
        lacks = cause.name if isinstance(cause, ModuleNotFoundError) and top == "pettingzoo" else game
        if lacks in (None, game, f"{top}.{group}"):
            raise
        extra = "fasttrain[pettingzoo]" if lacks == top else f"pettingzoo[{group}]"
        raise EnvSpecError(f"{what} needs {lacks}, which is not installed: pip install '{extra}'") from error
    try:
        if parallel and hasattr(module, "parallel_env"):
            return module.parallel_env(**options)
        if hasattr(module, "env"):
            return Turns(module.env(**options)) if parallel else module.env(**options)
        if hasattr(module, "parallel_env"):
            return import_module("pettingzoo.utils").parallel_to_aec(module.parallel_env(**options))
    except Exception as error:
        raise EnvSpecError(f"{what} could not be made with {options}: {blame(error)}") from error
    raise EnvSpecError(f"{what}: the module has neither env() nor parallel_env()")


def _same(game: object, kind: str, seats: list[str], what: str) -> Any:
    """The space `kind` (observation_space or action_space) that all seats of `game` share."""
    first, *others = (getattr(game, kind)(seat) for seat in seats)
    if any(other != first for other in others):
        way_out = (
            "one policy plays all seats, so make these equal (supersuit pads observations and actions), or give each "
            "seat its policy: env.kwargs.sharing=true 'policies={NAME: {decides: SEAT}, …}'"
        )
        raise EnvSpecError(f"{what}: the seats differ in their {kind}; {way_out}")
    return first


class Turns:
    """An AEC env as a parallel env in which only the agent in `movers` acts. Each step gives rewards to all agents."""

    def __init__(self, aec: Any) -> None:
        self.aec, self.metadata, self.possible_agents = aec, aec.metadata, list(aec.possible_agents)
        self.observation_space, self.action_space, self.close = aec.observation_space, aec.action_space, aec.close

    def reset(self, seed: int | None = None, options: object = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.aec.reset(seed=seed, options=options)
        self.agents, self.movers, self._decided = [*self.aec.agents], [self.aec.agent_selection], set[str]()
        return {agent: self.aec.observe(agent) for agent in self.agents}, self.aec.infos

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        aec, (mover,) = self.aec, self.movers
        self._decided.add(mover)
        aec.step(actions[mover])
        gained, over, cut = ({agent: told.get(agent, 0) * (agent in self._decided) for agent in self.agents}
                             for told in (aec.rewards, aec.terminations, aec.truncations))  # fmt: skip
        seen = {agent: aec.observe(agent) for agent in self.agents if over[agent] or cut[agent]}
        out = {agent for agent in aec.agents if aec.terminations[agent] or aec.truncations[agent]}
        while aec.agents and aec.agent_selection in out:
            aec.step(None)  # the agent leaves the game
        self.agents, self.movers = [agent for agent in aec.agents if agent not in out], [aec.agent_selection]
        if self.agents:
            seen[self.movers[0]] = aec.observe(self.movers[0])
        return seen, gained, over, cut, aec.infos


class Rows(VectorEnv[Any, Any, Any]):
    """Copies of a game in which every agent is a row: one policy learns for all of them by parameter sharing.

    A copy resets in the step in which its last agent finishes. `infos["rests"]` (N,) marks rows whose next action is
    ignored: the agent has finished before the others, or another agent acts next (AEC env).

    Args:
        num_envs: rows, a multiple of the number of agents; or 1 for the checkup, where other agents act at random.
        game: the module, for example `pettingzoo.butterfly.pistonball_v6`; it has `parallel_env()` or `env()`.
        roles: the agents, in the order of the policies that decide for them. The agents' spaces may differ:
            observations and actions are padded, and the observation ends with a one-hot of the agent.

    Attributes:
        seat_spaces: with `roles`, observation and action space of each agent.
    """

    def __init__(self, num_envs: int, game: str, roles: Sequence[str] = (), **options: object) -> None:
        self._what, self.num_envs = f"env.id={game}", num_envs
        first = _made(game, self._what, options, parallel=True)
        self.agents = list(first.possible_agents)
        if num_envs != 1 and num_envs % len(self.agents):
            below = max(1, num_envs // len(self.agents)) * len(self.agents)
            raise EnvSpecError(
                f"{self._what} has {len(self.agents)} agents, each a row: num_envs={num_envs} is no multiple of that; "
                f"use num_envs={below}"
            )
        count = max(1, num_envs // len(self.agents))
        self.copies = [first, *(_made(game, self._what, options, parallel=True) for _ in range(count - 1))]
        self.roles, self.seat_spaces = [*roles], dict[str, tuple[Any, Any]]()
        if roles:
            self.single_observation_space, self.single_action_space = self._padded(first)
        else:
            self.single_observation_space = _same(first, "observation_space", self.agents, self._what)
            self.single_action_space = _same(first, "action_space", self.agents, self._what)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.SAME_STEP, "rows_rest": True}
        keys = [(copy, agent) for copy in range(count) for agent in self.agents]  # for num_envs=1 only keys[0] is a row
        self._rows = {key: row for row, key in enumerate(keys)}
        self._seen: list[Any] = [None] * len(keys)
        self._masks: list[Any] = [None] * len(keys)

    def _padded(self, game: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """The spaces of all rows. Raises EnvSpecError: an agent has no policy, or its spaces cannot be padded."""
        if {*self.roles} != {*self.agents}:
            raise EnvSpecError(f"{self._what}: policies decide for {', '.join(self.roles)}; the game has the agents "
                               f"{', '.join(self.agents)}, and each needs one policy")  # fmt: skip
        for agent in self.agents:
            seen, actions = game.observation_space(agent), game.action_space(agent)
            seen = seen[SEEN] if isinstance(seen, spaces.Dict) and SEEN in seen.spaces else seen
            if not (isinstance(seen, spaces.Box) and len(seen.shape) == 1):
                raise EnvSpecError(f"{self._what}: {agent} observes {seen}; policies need a Box with one axis")
            low, high = seen.low.astype(np.float32), seen.high.astype(np.float32)
            self.seat_spaces[agent] = spaces.Box(low, high), actions
        shown, chosen = zip(*self.seat_spaces.values(), strict=True)
        self._width = max(space.shape[0] for space in shown)
        if all(isinstance(space, spaces.Discrete) for space in chosen):
            action: spaces.Space[Any] = max(chosen, key=lambda space: int(space.n))  # type: ignore[attr-defined]
        elif all(isinstance(space, spaces.Box) and len(space.shape) == 1 for space in chosen):
            low, high = min(space.low.min() for space in chosen), max(space.high.max() for space in chosen)
            action = spaces.Box(low, high, max(space.shape for space in chosen), np.float32)
        else:
            action = _same(game, "action_space", self.agents, self._what)
        return spaces.Box(-np.inf, np.inf, (self._width + len(self.roles),), np.float32), action

    def reset(self, *, seed: Any = None, options: object = None) -> tuple[Any, dict[str, Any]]:
        for number, copy in enumerate(self.copies):
            self._note(number, *copy.reset(seed=None if seed is None else int(seed) + number, options=options))
        return self._stacked(), self._told({})

    def _note(self, number: int, observations: dict[str, Any], infos: dict[str, Any]) -> None:
        for agent, seen in observations.items():
            row = self._rows[number, agent]
            mask = infos.get(agent, {}).get(MASK)
            mask = seen.get(MASK, mask) if self.roles and isinstance(seen, dict) else mask
            if mask is None and self._masks[row] is not None and agent in self._movers(number):
                raise EnvError(f"{self._what}: {agent} had an action mask before and has none now")
            if self.roles:
                mask = None if mask is None else np.pad(mask, (0, mask_width(self.single_action_space) - len(mask)))
                own = np.ravel(seen[SEEN] if isinstance(seen, dict) else seen)
                seen = np.zeros(self.single_observation_space.shape, np.float32)
                seen[: len(own)], seen[self._width + self.roles.index(agent)] = own, 1.0
            self._seen[row], self._masks[row] = seen, mask

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rewards, ends = np.zeros(len(self._rows)), np.zeros((2, len(self._rows)), np.bool_)
        for number, copy in enumerate(self.copies):
            chosen = {agent: self._action(actions, self._rows[number, agent]) for agent in copy.agents}
            observations, gained, over, cut, infos = copy.step(chosen)
            self._note(number, observations, infos)
            for agent in chosen:
                row = self._rows[number, agent]
                rewards[row], ends[:, row] = gained[agent], (over[agent], cut[agent])
        terminations, truncations = ends[:, : self.num_envs]
        told: dict[str, Any] = {}
        if (ended := terminations | truncations).any():
            told = {"final_obs": self._stacked(), "_final_obs": ended}
        for number, copy in enumerate(self.copies):
            if not copy.agents:
                self._note(number, *copy.reset())
        return self._stacked(), rewards[: self.num_envs], terminations, truncations, self._told(told)

    def _action(self, actions: Any, row: int) -> Any:
        """The action of a row; random for an agent without a row."""
        _, space = self.seat_spaces.get(self.agents[row % len(self.agents)], (None, self.single_action_space))
        if row < self.num_envs and self.roles and isinstance(space, spaces.Box):
            return np.clip(actions[row][: space.shape[0]], space.low, space.high)
        if row < self.num_envs:
            return actions[row]
        seen = self._seen[row]
        mask = seen.get(MASK) if isinstance(seen, dict) else self._masks[row]
        return space.sample(None if mask is None or not hasattr(space, "n") else np.asarray(mask, np.int8))

    def _stacked(self) -> Any:
        return each_array(lambda *rows: np.stack(rows), *self._seen[: self.num_envs])

    def _movers(self, number: int) -> list[str]:
        """The agents of a copy that act next."""
        copy = self.copies[number]
        return getattr(copy, "movers", copy.agents) if copy.agents else []

    def _told(self, infos: dict[str, Any]) -> dict[str, Any]:
        rests, masks = np.ones(len(self._rows), np.bool_), self._masks[: self.num_envs]
        for number in range(len(self.copies)):
            rests[[self._rows[number, agent] for agent in self._movers(number)]] = False
        infos["rests"] = rests[: self.num_envs]
        every = next((np.ones_like(mask) for mask in masks if mask is not None), None)
        if every is not None:
            infos[MASK] = np.stack([every if mask is None else mask for mask in masks])
        return infos

    def close_extras(self, **_: object) -> None:
        for copy in self.copies:
            copy.close()
