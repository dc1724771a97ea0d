"""SelfPlayVecEnv: two-sided envs whose opponents are policies in the trainer's process.

The inner vector env stops at the decisions of both sides. One step of `SelfPlayVecEnv` applies the learner's actions.
Then the opponent acts in all envs where it must act, again and again, until the learner must act in every env. So
the opponent's policy gets whole batches, and no worker needs a network.
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
from fasttrain.vec.base import EmptyMasks, SlotSource, SlotVecEnv, copy_observations, slots_of, unblock_masks
from fasttrain.vec.external import ExternalVecEnv
from fasttrain.vec.native import NativeVecEnv


@runtime_checkable
class Opponent(Protocol):
    """Chooses the actions of the opponent's side."""

    def act(self, observations: Any, action_masks: BoolArray | None, envs: Int64Array) -> NDArray[Any]:
        """Actions (M, ...) for these envs (M,), from the opponent's observations (M, ...) and masks (M, A)."""

    def episode_over(self, env: int, info: dict[str, Any]) -> None:
        """Called when an episode has ended with this info and the next episode has begun, before its first action."""


class RandomOpponent:
    """Draws a legal action at random. It plays until `set_opponent` is called."""

    def __init__(self, action_space: Any, seed: int = 0) -> None:
        self.action_space, self._rng = action_space, np.random.default_rng(seed)
        self._dims = head_sizes(action_space)

    def act(self, observations: object, action_masks: BoolArray | None, envs: Int64Array) -> NDArray[Any]:
        return draw_choices(self._rng, self._dims, len(envs), action_masks).reshape(-1, *self.action_space.shape)

    def episode_over(self, env: int, info: dict[str, Any]) -> None:
        pass


class OwnTurns:
    """Whose turn it is, for native games and games with engines: they know it and can step single envs."""

    def __init__(self, env: NativeVecEnv | ExternalVecEnv) -> None:
        if isinstance(env, NativeVecEnv) and not hasattr(env.game, "step_listed"):
            raise EnvSpecError(f"{type(env.game).__name__} does not support self-play: it has no step_listed")
        self.env = env
        self._only_seat: NDArray[Any] = np.ones(env.num_envs, np.int64)

    @property
    def opponents(self) -> BoolArray:
        """(N,) True where the opponent acts next."""
        return self.env.opponents_turn

    @property
    def again(self) -> BoolArray | None:
        """(N,) True where the game refused the last action and asks again; None if games never refuse."""
        return getattr(self.env, "again", None)

    @property
    def seats(self) -> NDArray[Any]:
        """(N,) number of the opponent that acts next, from 1; always 1 if the game does not distinguish them."""
        seats: NDArray[Any] = getattr(getattr(self.env, "game", None), "seats_to_decide", self._only_seat)
        return seats

    def begin(self) -> None:
        """Called after a reset of all envs."""

    def step(self, actions: NDArray[Any]) -> list[FinishedEpisode]:
        """Act in every env. Returns the episodes that ended."""
        self.env.step_slots(actions)
        return self.env.slots.finished

    def step_listed(self, envs: Int64Array, actions: NDArray[Any]) -> list[FinishedEpisode]:
        """Act in these envs only. Afterwards only their slots are valid."""
        return self.env.step_listed(envs, actions)


class InfoTurns:
    """Whose turn it is, for other vector envs, whose envs have the wrapper `TwoSided`. Members as in `OwnTurns`."""

    def __init__(self, env: VecEnv, source: SlotSource) -> None:
        self.env, self.source = env, source
        self.seats: Int64Array = np.zeros(env.num_envs, np.int64)  # (N,) seat that acts next; 0: the learner's
        shape = env.action_space.shape or ()
        self._skipped = np.full((env.num_envs, *shape), -1, env.action_space.dtype)  # at -1 TwoSided does not step
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
    """A vector env of the learner's decisions: lengths and returns count only the learner's actions and rewards.

    Rewards before the learner's first action of an episode are added to the reward of that action. Truncations count as
    terminations: in the last state it may be the opponent's turn, and the critic does not know opponents' observations.

    Args:
        inner: a `NativeVecEnv` or `ExternalVecEnv` of a two-sided game, or a vector env whose envs have the wrapper
            `TwoSided`.
    """

    def __init__(self, inner: VecEnv) -> None:
        self.inner = inner
        self.source: Any = slots_of(inner)
        inner_slots: Slots = self.source.slots
        self.turns: OwnTurns | InfoTurns = (
            OwnTurns(inner) if isinstance(inner, (NativeVecEnv, ExternalVecEnv)) else InfoTurns(inner, self.source)
        )
        self.opponent: Opponent = RandomOpponent(inner.action_space)
        self.empty_masks = EmptyMasks()  # checks opponents' masks; a run sets another one, which knows the env step
        self.opponents_ns = 0  # time of the opponents' actions and of the env steps after them
        self._next_rewards = np.zeros_like(inner_slots.rewards)  # rewards before the learner's first action
        own = {name: np.zeros_like(getattr(inner_slots, name)) for name in ("rewards", "terminations", "truncations")}
        self.slots = replace(inner_slots, finished=[], **own)
        super().__init__(inner.num_envs, inner.observation_space, inner.action_space)

    def set_opponent(self, opponent: Opponent) -> None:
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
        slots.terminations[:] = True  # as after an episode's end: opponents' rewards go to `_next_rewards`
        self._let_opponents_act([])
        self.clear_slots()
        self._share_state()
        return copy_observations(slots.observations)

    def step_slots(self, actions: NDArray[Any]) -> None:
        slots = self.slots
        finished = self.turns.step(actions)
        inner_slots = self.source.slots
        np.add(inner_slots.rewards, self._next_rewards, out=slots.rewards)
        slots.resets = inner_slots.resets
        if slots.resets is None:
            self._next_rewards[:] = 0.0
            self._lengths += 1
        else:  # where `resets` is True the game refused the action, and the reward waits for an accepted one
            slots.rewards[slots.resets] = 0.0
            self._next_rewards[~slots.resets] = 0.0
            self._lengths += ~slots.resets
        slots.terminations[:] = inner_slots.terminations | inner_slots.truncations
        for episode in finished:
            self.opponent.episode_over(episode.env_index, episode.info)
        slots.finished = self._let_opponents_act(list(finished))
        self._returns += slots.rewards
        slots.finished = [self._as_learners(episode) for episode in slots.finished]
        self._share_state()

    def _let_opponents_act(self, finished: list[FinishedEpisode]) -> list[FinishedEpisode]:
        """Let opponents act until the learner must act in every env. Returns `finished` and the episodes that ended."""
        slots, turn = self.slots, self.turns.opponents
        began = time.perf_counter_ns()
        while turn.any():
            envs = np.flatnonzero(turn)
            masks = self.source.read_masks()
            if masks is not None:
                masks, dims = masks[envs], head_sizes(self.action_space)
                self.empty_masks.check(masks, dims, envs=envs, whose=" of the opponent")
                masks = unblock_masks(masks, dims)
            observations = select_rows(self.source.slots.observations, envs)
            actions = self.opponent.act(observations, masks, envs)
            ended = self.turns.step_listed(envs, actions)
            turn, inner_slots = self.turns.opponents, self.source.slots
            over = slots.terminations[envs]
            slots.rewards[envs[~over]] += inner_slots.rewards[envs[~over]]
            self._next_rewards[envs[over]] += inner_slots.rewards[envs[over]]
            finished += [
                episode
                for episode in ended
                if self._learner_acted(episode, over[np.searchsorted(envs, episode.env_index)])
            ]
        self.opponents_ns += time.perf_counter_ns() - began
        return finished

    def _learner_acted(self, episode: FinishedEpisode, ended_before: bool) -> bool:
        """Record the end of an episode. Returns False if the learner did not act in the episode.

        `ended_before`: another episode of this env ended since the learner's last action.
        """
        index = episode.env_index
        self.opponent.episode_over(index, episode.info)
        if ended_before and not episode.lost:
            raise EnvError(f"env {index}: two episodes ended between two decisions of the learner")
        self.slots.terminations[index] = True
        if ended_before:  # the env's engine failed before the learner's first action: drop the episode
            self._next_rewards[index] = 0.0
        return not ended_before

    def _as_learners(self, episode: FinishedEpisode) -> FinishedEpisode:
        """The episode with the learner's return and length."""
        index = episode.env_index
        info = {key: value for key, value in episode.info.items() if key not in ("episode", TURN)}
        return self.end_episode(index, episode.final_observation, info, episode.lost)

    def _share_state(self) -> None:
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
