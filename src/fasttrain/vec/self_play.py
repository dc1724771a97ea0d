"""SelfPlayVecEnv: envs in which somebody here decides for the opponents, many of them in one call.

The envs below stop at the decisions of either side. One step of this vector env applies the learners' actions and then
lets the opponents decide, in rounds over all envs where it is their turn, until every learner must decide again. So the
opponents' policies run as batches in the trainer's process, wherever the envs are: no worker holds a network.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs

from fasttrain.batch import OPPONENTS_TURN as TURN
from fasttrain.batch import BoolArray, FinishedEpisode, Int64Array, Slots, draw_choices, select_rows
from fasttrain.envs.masks import head_sizes
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.base import EmptyMasks, SlotSource, SlotVecEnv, copy_observations, opened, slots_of
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.native import NativeVecEnv


@runtime_checkable
class Opponent(Protocol):
    """Decides for the other side."""

    def act(self, observations: Any, action_masks: BoolArray | None, envs: Int64Array) -> NDArray[Any]:
        """Actions (M, ...) for these envs (M,), from the other side's observations (M, ...) and masks (M, A)."""

    def episode_over(self, env: int, info: dict[str, Any]) -> None:
        """An episode of env `env` ended with this info; a new one has begun, and nobody has decided in it yet."""


class RandomOpponent:
    """Any legal action: until `set_opponent` is called."""

    def __init__(self, action_space: Any, seed: int = 0) -> None:
        self.action_space, self._rng = action_space, np.random.default_rng(seed)
        self._dims = head_sizes(action_space)

    def act(self, observations: object, action_masks: BoolArray | None, envs: Int64Array) -> NDArray[Any]:
        return draw_choices(self._rng, self._dims, len(envs), action_masks).reshape(-1, *self.action_space.shape)

    def episode_over(self, env: int, info: dict[str, Any]) -> None:
        pass


class OwnTurns:
    """Whose turn it is, and steps of some envs: of native games and games with engines, which know both."""

    def __init__(self, env: NativeVecEnv | ExternalVecEnv) -> None:
        if isinstance(env, NativeVecEnv) and not hasattr(env.game, "step_listed"):
            raise EnvSpecError(f"{type(env.game).__name__} cannot be played against oneself: it has no step_listed")
        self.env = env
        self._first: NDArray[Any] = np.ones(env.num_envs, np.int64)

    @property
    def opponents(self) -> BoolArray:
        """(N,) true where the opponent decides next."""
        return self.env.opponents_turn

    @property
    def again(self) -> BoolArray | None:
        """(N,) whether the decision before was refused and comes again; None where games refuse none."""
        return getattr(self.env, "again", None)

    @property
    def seats(self) -> NDArray[Any]:
        """(N,) which opponent that is, a number from 1 on; always 1 where the game does not tell them apart."""
        seats: NDArray[Any] = getattr(getattr(self.env, "game", None), "seats_to_decide", self._first)
        return seats

    def begin(self) -> None:
        """The envs were reset. Nothing to do: the game itself knows whose turn it is."""

    def step(self, actions: NDArray[Any]) -> list[FinishedEpisode]:
        """One decision in every env."""
        self.env.step_slots(actions)
        return self.env.slots.finished

    def step_listed(self, envs: Int64Array, actions: NDArray[Any]) -> list[FinishedEpisode]:
        """One decision in these envs alone; only their slots count afterwards."""
        return self.env.step_listed(envs, actions)


class InfoTurns:
    """The same of any vector env whose envs wear `TwoSided`."""

    def __init__(self, env: VecEnv, source: SlotSource) -> None:
        self.env, self.source = env, source
        self.seats: Int64Array = np.zeros(env.num_envs, np.int64)  # as `OwnTurns` has it; 0 is the learner
        shape = env.action_space.shape or ()
        self._skipped = np.full((env.num_envs, *shape), -1, env.action_space.dtype)
        self.again = None

    @property
    def opponents(self) -> BoolArray:
        return self.seats > 0

    def begin(self) -> None:
        self.seats[:] = [info[TURN] for info in self.env.reset_infos]

    def step(self, actions: NDArray[Any]) -> list[FinishedEpisode]:
        self.source.step_slots(actions)
        finished = self.source.slots.finished
        self.seats[:] = [info.get(TURN, 0) for info in self.source.infos()]
        for episode in finished:
            self.seats[episode.env_index] = self.env.reset_infos[episode.env_index][TURN]
        return finished

    def step_listed(self, envs: Int64Array, actions: NDArray[Any]) -> list[FinishedEpisode]:
        self._skipped[envs] = actions
        finished = self.step(self._skipped)
        self._skipped[envs] = -1
        return finished


class SelfPlayVecEnv(SlotVecEnv):
    """Steps end where each learner must decide; episodes count the learner's decisions and rewards alone.

    What opponents do before the learner's first decision counts with that decision. A truncation counts as an end: the
    state it leaves may be one in which the opponent decides, whose view says nothing of the learner's future.

    Args:
        inner: a `NativeVecEnv` of a two-sided game, an `ExternalVecEnv` of one, or a vector env whose envs wear
            `TwoSided`.
    """

    def __init__(self, inner: VecEnv) -> None:
        self.inner = inner
        self.source: Any = slots_of(inner)
        given: Slots = self.source.slots
        self.turns: OwnTurns | InfoTurns = (
            OwnTurns(inner) if isinstance(inner, (NativeVecEnv, ExternalVecEnv)) else InfoTurns(inner, self.source)
        )
        self.opponent: Opponent = RandomOpponent(inner.action_space)
        self.empty_masks = EmptyMasks()  # of opponents; a run's own, which is told each step of the learners
        self.opponents_ns = 0  # spent on the opponents' decisions and what followed from them
        self._next_rewards = np.zeros_like(given.rewards)  # of episodes that began in this step
        own = {name: np.zeros_like(getattr(given, name)) for name in ("rewards", "terminations", "truncations")}
        self.slots = replace(given, finished=[], **own)
        super().__init__(inner.num_envs, inner.observation_space, inner.action_space)

    def set_opponent(self, opponent: Opponent) -> None:
        """Who decides for the other side from now on."""
        self.opponent = opponent

    @property
    def masked(self) -> bool:
        return bool(self.source.masked)

    def read_masks(self) -> BoolArray | None:
        self.slots.action_masks = self.source.read_masks()
        return self.slots.action_masks

    def seed(self, seed: int | None = None) -> Any:
        return self.inner.seed(seed)

    def reset(self) -> VecEnvObs:
        self._next_rewards[:] = 0.0
        slots = self.slots
        self.clear_slots()
        self.source.reset()
        self.reset_infos = self.inner.reset_infos
        self.turns.begin()
        slots.terminations[:] = True  # so that what comes now counts with the learner's first decisions
        self._let_opponents_decide([])
        self.clear_slots()
        self._show()
        return copy_observations(slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        slots = self.slots
        finished = self.turns.step(actions)
        given = self.source.slots
        np.add(given.rewards, self._next_rewards, out=slots.rewards)
        slots.resets = given.resets
        if slots.resets is None:
            self._next_rewards[:] = 0.0
            self._lengths += 1
        else:  # an engine refused some actions: what these rows had is paid with the action that it takes
            slots.rewards[slots.resets] = 0.0
            self._next_rewards[~slots.resets] = 0.0
            self._lengths += ~slots.resets
        slots.terminations[:] = given.terminations | given.truncations
        for episode in finished:
            self.opponent.episode_over(episode.env_index, episode.info)
        slots.finished = self._let_opponents_decide(list(finished))
        self._returns += slots.rewards
        slots.finished = [self._closed(episode) for episode in slots.finished]
        self._show()

    def _let_opponents_decide(self, finished: list[FinishedEpisode]) -> list[FinishedEpisode]:
        """Until every learner must decide; the episodes that ended, those in `finished` among them."""
        slots, turn = self.slots, self.turns.opponents
        begun = time.perf_counter_ns()
        while turn.any():
            envs = np.flatnonzero(turn)
            masks = self.source.read_masks()
            if masks is not None:
                masks, dims = masks[envs], head_sizes(self.action_space)
                self.empty_masks.look(masks, dims, envs=envs, whose=" of the opponent")
                masks = opened(masks, dims)
            seen = select_rows(self.source.slots.observations, envs)
            actions = self.opponent.act(seen, masks, envs)
            ended = self.turns.step_listed(envs, actions)
            turn, given = self.turns.opponents, self.source.slots
            over = slots.terminations[envs]
            slots.rewards[envs[~over]] += given.rewards[envs[~over]]
            self._next_rewards[envs[over]] += given.rewards[envs[over]]
            finished += [each for each in ended if self._ends(each, over[np.searchsorted(envs, each.env_index)])]
        self.opponents_ns += time.perf_counter_ns() - begun
        return finished

    def _ends(self, episode: FinishedEpisode, again: bool) -> bool:
        """Whether the learner had a decision in it, to which the end belongs."""
        index = episode.env_index
        self.opponent.episode_over(index, episode.info)
        if again and not episode.lost:
            raise EnvError(f"env {index}: two episodes ended between two decisions of the learner")
        self.slots.terminations[index] = True
        if again:  # its engine failed before the learner's first one: as if it had never begun
            self._next_rewards[index] = 0.0
        return not again

    def _closed(self, episode: FinishedEpisode) -> FinishedEpisode:
        """With the learner's own return and length."""
        index = episode.env_index
        info = {key: value for key, value in episode.info.items() if key not in ("episode", TURN)}
        return self.end_episode(index, episode.final_observation, info, episode.lost)

    def _show(self) -> None:
        self.slots.observations = self.source.slots.observations
        self.slots.action_masks = self.source.read_masks()

    def call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: VecEnvIndices) -> list[Any]:
        return self.inner.env_method(name, *args, indices=indices, **kwargs)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self.inner.get_attr(attr_name, indices)

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        self.inner.set_attr(attr_name, value, indices)

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        return self.inner.env_is_wrapped(wrapper_class, indices)

    def get_images(self) -> Any:
        return self.inner.get_images()

    def close(self) -> None:
        self.inner.close()
