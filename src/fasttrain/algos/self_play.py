"""Opponents in self-play: copies of a policy that only act, and the pool of earlier versions of the learner.

Players act in batches, and by compiled kernels if the learner does. The pool gives each version an Elo rating.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor

from fasttrain.algos.engine import Engine, EngineSettings
from fasttrain.algos.policy_view import action_dims
from fasttrain.batch import BoolArray, Int64Array, draw_choices, load_into, select_rows
from fasttrain.buffers.recurrent import Memory
from fasttrain.errors import ConfigError

Weights = dict[str, Tensor]


def weights_of(model: Any) -> Weights:
    """A copy of the weights with which the model acts. For DQN these are the online network's weights."""
    return {name: value.detach().clone() for name, value in _acting_part(model.policy).state_dict().items()}


def _acting_part(policy: Any) -> Any:
    return getattr(policy, "q_net", policy)


class Player:
    """Acts with a copy of the model's weights, by the same kind of engine. Only `load` changes this copy.

    Actions are drawn from the policy's distribution. A policy with Q-values takes the best action, and sometimes a
    random action, because a learner learns little from an opponent without randomness.
    """

    random_share = 0.05

    def __init__(self, model: Any) -> None:
        policy = copy.deepcopy(model.policy)
        policy.set_training_mode(False)
        engine = model.engine_now()
        settings = EngineSettings(kind=engine.settings.kind, channels_last=engine.settings.channels_last)
        self.engine: Engine = type(engine)(policy, settings)
        self.engine.guard = None
        self.engine.begin()
        self.lstm_states: RNNStates | None = None  # states after the last `act`; None: not recurrent
        self._dims = action_dims(model.action_space) if hasattr(policy, "q_net") else []
        self._shape = model.action_space.shape or ()

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Memory | None = None) -> NDArray[Any]:
        """Actions (M,) or (M, K) for observations (M, ...) and masks (M, A) bool; None: all actions are legal."""
        actions, _, self.lstm_states = self.engine.act(observations, action_masks, memory)
        if self._dims:
            actions = np.array(actions)
            drawn = draw_choices(np.random, self._dims, len(actions), action_masks)
            at_random = np.random.random(len(actions)) < self.random_share
            actions[at_random] = drawn[at_random].reshape(-1, *self._shape)
        return actions

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Act with a copy of these weights from now on."""
        _acting_part(self.engine.policy).load_state_dict(weights)  # in place, because kernels have views of the weights
        self.engine.begin()


FIRST_RATING = 1000.0
K_FACTOR = 16.0  # maximum change of a rating by one game; FIDE uses 10 for strong players, 20 for others
ACTIVE = 2  # snapshots of the pool that play at the same time; a step takes one forward pass for each of them
SPREAD = 400.0  # rating difference at which the stronger player is expected to win 10 of 11 points


@dataclass(slots=True)
class Snapshot:
    """One version of the learner."""

    number: int  # 0 (the untrained policy), 1, 2, …
    env_steps: int  # the run's env steps when the snapshot was taken
    weights: Weights
    rating: float = FIRST_RATING  # Elo
    games: int = 0
    points: float = 0.0  # points of the learner against this snapshot: 1 for a win, 0.5 for a draw

    def summary(self) -> dict[str, Any]:
        """For summary.json."""
        share = self.points / self.games if self.games else None
        return {"env_steps": self.env_steps, "elo": round(self.rating, 1), "games": self.games, "learner_score": share}


def expected_score(rating: float, other: float) -> float:
    """The expected score of the first player against the second (Elo 1978): 0.5 if they are equal."""
    return float(1.0 / (1.0 + 10.0 ** ((other - rating) / SPREAD)))


@dataclass(slots=True)
class SnapshotPool:
    """Opponents for N envs, drawn per episode: with probability `latest` the latest snapshot, else one from the pool.

    The pool is a uniform sample of all snapshots before the latest (reservoir sampling, Vitter 1985), so that early
    versions stay among the opponents. `ACTIVE` snapshots of the pool play at a time, drawn anew with each new snapshot.
    Ratings are Elo's, from the learner's games. A new snapshot gets the learner's rating.

    Args:
        model: the learner, fasttrain's PPO, MaskablePPO or DQN.
        num_envs: N.
        size: snapshots in the pool.
        seed: for the draws of opponents.
        score_of: returns the learner's share of the points, 0 … 1, from an episode's info; None if it is unknown.
        latest: probability of the latest snapshot.
        seats: returns the number, from 1 on, of the seat that decides in each env (N,). Each seat has its own LSTM
            states. None: one seat per game.
        again: returns a mask (N,) bool: True where the env refused the last decision and asks for another. None, or a
            result of None: no env refused a decision.
    """

    model: Any
    num_envs: int
    size: int
    seed: int = 0
    score_of: Callable[[Mapping[str, Any]], float | None] = field(default=lambda _: None)
    latest: float = 0.5
    seats: Callable[[], NDArray[Any]] | None = None
    again: Callable[[], BoolArray | None] | None = None
    rating: float = FIRST_RATING  # the learner's rating
    taken: int = 0
    current: Snapshot = field(init=False)
    pool: list[Snapshot] = field(default_factory=list)
    active: list[Snapshot] = field(default_factory=list)  # snapshots of the pool that play at present
    playing: list[Snapshot] = field(init=False)  # the opponent in each env
    memory: Any = field(init=False)  # `Memory` of seat 1 of all envs, then of seat 2, …; None: not recurrent
    _before: Any = field(init=False)  # the `Memory` before the last decisions; restored if the env refuses an action
    _players: dict[int, Player] = field(default_factory=dict)  # snapshot's number → player
    _spare: list[Player] = field(default_factory=list)
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.current = self._snapshot(0)
        self.playing = [self.current] * self.num_envs
        self._forget()

    def _forget(self) -> None:
        blank = getattr(self.model, "blank_memory", None)
        self.memory = self._before = None if blank is None else blank(self.num_envs)

    def _places(self, envs: Int64Array) -> Int64Array:
        """The rows of `memory` for the seats that decide in these envs."""
        places = envs if self.seats is None else envs + self.num_envs * (self.seats()[envs] - 1)
        self._remember(int(places.max()) + 1)
        return places

    def _remember(self, count: int) -> None:
        while len(self.memory.episode_starts) < count:
            self.memory = self.memory.beside(self.model.blank_memory(self.num_envs))

    def _take_back(self, envs: Int64Array, places: Int64Array) -> None:
        """Restore the LSTM states from before the decisions that the env refused."""
        if self.again is None or (again := self.again()) is None:
            return
        refused = places[again[envs]]
        self.memory.put(refused, self._before.of(refused).states)
        self.memory.episode_starts[refused] = self._before.episode_starts[refused]
        self._before = self.memory.copied()

    def take(self, env_steps: int) -> None:
        """Take a snapshot of the learner. The previous snapshot may enter the pool."""
        before, seen = self.current, self.taken - 1
        self.current = self._snapshot(env_steps)
        if len(self.pool) < self.size:
            self.pool.append(before)
        elif (place := int(self._rng.integers(seen + 1))) < self.size:
            self.pool[place] = before
        chosen = self._rng.permutation(len(self.pool))[:ACTIVE]
        self.active = [self.pool[index] for index in chosen.tolist()]
        present = [self.current, *self.pool]
        for env, snapshot in enumerate(self.playing):
            if all(snapshot is not each for each in present):  # the env's opponent left the pool
                self.playing[env] = self.current
        for number in {*self._players} - {each.number for each in present}:
            self._spare.append(self._players.pop(number))  # reused for a later snapshot: copying a policy takes 1 ms

    def act(self, observations: Any, action_masks: BoolArray | None, envs: Int64Array) -> NDArray[Any]:
        """Actions of the opponents of these envs, with one forward pass per snapshot."""
        numbers = np.array([self.playing[env].number for env in envs.tolist()])
        groups = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        places = envs if self.memory is None else self._places(envs)
        if self.memory is not None:
            self._take_back(envs, places)
        drawn = []
        for rows in groups:
            masks = None if action_masks is None else action_masks[rows]
            player = self._player(self.playing[int(envs[rows[0]])])
            memory = None if self.memory is None else self.memory.of(places[rows])
            drawn.append(player.act(select_rows(observations, rows), masks, memory))
            if self.memory is not None:
                self.memory.put(places[rows], player.lstm_states)
                self.memory.episode_starts[places[rows]] = False
        by_group = np.concatenate(drawn)
        actions = np.empty_like(by_group)
        actions[np.concatenate(groups)] = by_group
        return actions

    def episode_over(self, env: int, info: Mapping[str, Any]) -> None:
        """Rate the opponent of the episode that ended, and draw the opponent of the next episode."""
        snapshot, score = self.playing[env], self.score_of(info)
        if self.memory is not None:
            self.memory.episode_starts[env :: self.num_envs] = True
        if score is not None and snapshot is not self.current:  # games against the latest snapshot change no rating
            change = K_FACTOR * (score - expected_score(self.rating, snapshot.rating))
            self.rating += change
            snapshot.rating -= change
            snapshot.games += 1
            snapshot.points += score
        from_pool = self.active and self._rng.random() >= self.latest
        self.playing[env] = self.active[int(self._rng.integers(len(self.active)))] if from_pool else self.current

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: tensors and numbers."""
        names = Snapshot.__dataclass_fields__
        current, *pool = ({name: getattr(each, name) for name in names} for each in (self.current, *self.pool))
        rng = self._rng.bit_generator.state
        return {"rating": self.rating, "taken": self.taken, "current": current, "pool": pool, "rng": rng}

    def memory_arrays(self) -> dict[str, NDArray[Any]]:
        """The opponents' LSTM states in the running games, by name. The arrays are views."""
        if self.memory is None:
            return {}
        states = self.memory.states
        parts = {f"{net}/{place}": part for net in ("pi", "vf") for place, part in enumerate(getattr(states, net))}
        return {"starts": self.memory.episode_starts, **{name: part.numpy(force=True) for name, part in parts.items()}}

    def load_memory(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Set the opponents' LSTM states. Raises ConfigError: the states are of another network or other envs."""
        if self.memory is None:
            return
        self._remember(np.size(arrays.get("starts", ())))
        copies = {name: np.array(array) for name, array in self.memory_arrays().items()}
        for name, array in copies.items():
            load_into(array, arrays, name)
        states = [tuple(torch.from_numpy(copies[f"{net}/{place}"]) for place in range(2)) for net in ("pi", "vf")]
        self.memory.put(slice(None), RNNStates(*states))
        self.memory.episode_starts[:] = copies["starts"]

    def positions(self) -> dict[str, list[int]]:
        """The numbers of the active snapshots, and of the snapshot that plays in each env."""
        return {"active": [each.number for each in self.active], "playing": [each.number for each in self.playing]}

    def resume(self, state: Mapping[str, Any], positions: Mapping[str, Any]) -> None:
        """Continue from results of `state` and `positions`. Running episodes continue with their opponents.

        Raises:
            ConfigError: weights are of another network or not finite, or the positions are of other envs or of
                snapshots that `state` lacks. Nothing was changed.
        """
        loaded = [Snapshot(**each) for each in (state["current"], *state["pool"])]
        for each in loaded:
            _check_weights(each, self.current.weights)
        known = {each.number: each for each in loaded}
        numbers = [*positions["active"], *positions["playing"]]
        if len(positions["playing"]) != self.num_envs or not set(numbers) <= set(known):
            raise ConfigError("the checkpoint's opponents do not fit this run's envs")
        self.rating, self.taken = state["rating"], state["taken"]
        self.current, *self.pool = loaded
        self.active = [known[number] for number in positions["active"]]
        self.playing = [known[number] for number in positions["playing"]]
        self._rng.bit_generator.state = state["rng"]
        self._forget()
        self._spare += self._players.values()  # a number may now be another snapshot: load the weights anew
        self._players.clear()

    def summary(self) -> dict[str, Any]:
        """For summary.json: ratings of the learner and of the pool, the oldest snapshot first."""
        pool = sorted(self.pool, key=lambda snapshot: snapshot.number)
        return {"elo": round(self.rating, 1), "snapshots": self.taken, "pool": [each.summary() for each in pool]}

    def _snapshot(self, env_steps: int) -> Snapshot:
        number, self.taken = self.taken, self.taken + 1
        return Snapshot(number, env_steps, weights_of(self.model), self.rating)

    def _player(self, snapshot: Snapshot) -> Player:
        player = self._players.get(snapshot.number)
        if player is None:
            player = self._spare.pop() if self._spare else Player(self.model)
            player.load(snapshot.weights)
            self._players[snapshot.number] = player
        return player


def _check_weights(snapshot: Snapshot, like: Weights) -> None:
    weights = snapshot.weights
    if {name: (t.shape, t.dtype) for name, t in weights.items()} != {n: (t.shape, t.dtype) for n, t in like.items()}:
        raise ConfigError(f"opponent {snapshot.number} has weights of another network")
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{name} of opponent {snapshot.number} has numbers that are not finite")
