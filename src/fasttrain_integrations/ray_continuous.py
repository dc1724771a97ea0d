"""cluster=ray schedule=continuous: actors go on while PPO updates, and rollouts are made of what has come.

The learner asks each actor for a few vector steps, a fragment. When a fragment comes, the actor is at once asked for
another one, with the newest weights, also during an update. A rollout has all n_steps × N transitions since the
previous rollout. A fast actor gives more of them than a slow one, at most `LONGEST` × n_steps per env. Each transition
has the version of its weights. `Continuous` counts and limits its age, and `Reuse` corrects for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.engine import note_episodes
from fasttrain.batch import Int64Array, each_array, select_rows
from fasttrain.buffers.rollout import RolloutRow, RolloutStorage
from fasttrain.spec.config import Config
from fasttrain.vec.base import copy_observations
from fasttrain_integrations.ray_actors import ActorVecEnv
from fasttrain_integrations.ray_collector import STORED, Part, Work
from fasttrain_integrations.ray_requests import MOST, Requests

SHARE = 4  # a fragment has at most n_steps ÷ SHARE vector steps, so that weights stay fresh
POLL_S = 0.5  # how often late actors are looked for


class Fragment(NamedTuple):
    """Some vector steps of an actor. The first `begin` of them are in an earlier rollout."""

    number: int  # of the actor
    version: int  # number of updates before its weights were sent
    part: Part | None  # None: the actor was lost here
    last: Any  # (n, ...) observations after these steps; of a lost actor the first ones of the new envs
    begin: int = 0

    @property
    def steps(self) -> int:
        """Vector steps that are not stored yet."""
        return 0 if self.part is None else len(self.part.dones) - self.begin


class ContinuousVecEnv(ActorVecEnv):
    """The learner's view of all actors' envs with schedule=continuous."""

    def __init__(self, config: Config, num_envs: int) -> None:
        super().__init__(dataclasses.replace(config, schedule="lockstep"), num_envs)  # in each actor

    def fill(self, model: Any, engine: Any, rollout: RolloutStorage, use_masking: bool, callback: BaseCallback) -> bool:
        """Make a rollout of the next T × N transitions. False: the callback asked to stop."""
        ours = model.collector.continuous
        if ours.rollout is None or ours.rollout.handed is not model._last_obs:  # a training begins, or envs were reset
            ours.rollout = ActorRollout(self, model, use_masking)
        return ours.rollout.collect(engine, rollout, callback)  # type: ignore[no-any-return]


class ActorRollout:
    """Fragments of all actors, and the rollout that they fill. One object makes all rollouts.

    Attributes:
        handed: the `_last_obs` that this object gave to the model.
        gained: transitions in the present rollout.
        taken: (actors,) vector steps of each actor in the present rollout.
        waiting: fragments that are not in a rollout yet, those of each actor in their order.
    """

    def __init__(self, env: ContinuousVecEnv, model: Any, masked: bool) -> None:
        self.env, self.model, self.masked, self.version = env, model, masked, -1
        self.quota, self.most_steps = model.n_steps * env.num_envs, model.rollout_buffer.storage.num_steps
        self.requests = Requests(env, max(1, model.n_steps // SHARE))
        self.waiting: list[Fragment] = []
        self.gained, self.taken = 0, [0] * len(env.sizes)
        self.unseen = [deque[tuple[Any, ...]]() for _ in env.sizes]  # steps that the callbacks have not seen yet
        self.last: list[Any] = [select_rows(model._last_obs, rows) for rows in self._every_rows()]
        self.ended = np.array(model._last_episode_starts, np.bool_)
        self.handed: Any = None
        self.random = np.random.default_rng([env.config.seed, model.num_timesteps])

    def _every_rows(self) -> list[slice]:
        return [self.env.rows_of(number) for number in range(len(self.env.sizes))]

    def collect(self, engine: Any, rollout: RolloutStorage, callback: BaseCallback) -> bool:
        """Fill the rollout. False: the callback asked to stop."""
        model, clock = self.model, self.model.collector.clock
        self.version, self.rollout = self.version + 1, rollout
        self.weights = self.env.shared({name: part.cpu() for name, part in model.policy.state_dict().items()})
        self.settings = dataclasses.replace(engine.settings, threads=1, pin_memory=False)
        self.versions: Int64Array = np.full(rollout.rewards.shape, self.version)
        rollout.rewards[...] = rollout.episode_starts[...] = 0.0
        while True:
            clock.enter("buffer")
            self._ask()
            self._store()
            full = self.gained >= self.quota
            if not self._report(callback, whole=full):
                return False
            if full:
                self._hand_over()
                return True
            clock.enter("env_step")
            self._receive()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Actors get requests from a thread while the block runs. The thread's errors are raised here."""
        stop, failures = Event(), list[BaseException]()

        def go_on() -> None:
            try:
                while not stop.is_set() and sum(each.steps * self._size(each) for each in self.waiting) < self.quota:
                    self._ask()
                    self._receive(stop)
            except BaseException as error:  # raised again in the main thread
                failures.append(error)

        thread = Thread(target=go_on, name="actors that go on", daemon=True)
        if self.model.num_timesteps < self.model._total_timesteps:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
        if failures:
            raise failures[0]

    def settle(self) -> None:
        """Does nothing: other code of the learner does not use the envs in the actors."""

    def _size(self, fragment: Fragment) -> int:
        return self.env.sizes[fragment.number]

    def _ask(self) -> None:
        """Ask the actors with fewer than two requests for a fragment, if it has room in a rollout."""
        for number, actor in enumerate(self.env.actors):
            steps, begun, asked = self.requests.length(number), self.model.num_timesteps, self.requests.of(number)
            ahead = sum(asked) + sum(each.steps for each in self.waiting if each.number == number)
            if len(asked) < MOST and self.taken[number] + ahead + steps <= self.most_steps:
                seed = int(self.random.integers(2**31))
                work = Work(self.settings, seed, steps, self.masked, begun, None, None)
                reply = actor.collect.remote(self.weights, work)
                self.requests.add(number, steps, reply, self.version)

    def _receive(self, stop: Event | None = None) -> None:
        """Wait for the next fragment."""
        answer = self.requests.answer(POLL_S if stop is None else POLL_S / 10)
        if answer is not None:
            last = answer.first if answer.sent is None else answer.sent.last
            if answer.sent is not None:
                self.env.note(answer.number, answer.sent.news, self.model.collector.empty_masks)
            self.waiting.append(Fragment(answer.number, answer.tag, answer.sent, last))

    def _store(self) -> None:
        """Store the waiting fragments. What has no room, or is more than T × N transitions, waits on."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            if each.part is None and not any(other.number == each.number for other in self.waiting):
                self._note_lost(each)
                continue
            room = self.most_steps - self.taken[each.number]
            count = min(each.steps, room, math.ceil((self.quota - self.gained) / self._size(each)))
            if count > 0 and each.part is not None:
                self._put(each, each.part, count)
            if each.part is None or count < each.steps:
                self.waiting.append(each._replace(begin=each.begin + max(count, 0)))

    def _put(self, fragment: Fragment, part: Part, count: int) -> None:
        """Store the next `count` vector steps of a fragment."""
        number, size, rollout, begin = fragment.number, self._size(fragment), self.rollout, fragment.begin
        rows, first, end = self.env.rows_of(number), self.taken[number], begin + count
        steps, own = slice(first, first + count), slice(begin, end)
        stored = {name: _flat(part.stored[name], own) for name in STORED}
        at, envs = np.repeat(np.arange(steps.start, steps.stop), size), np.tile(np.arange(rows.start, rows.stop), count)
        names = ("observations", "actions", "values", "log_probs", "masks")
        rollout.put(at, envs, RolloutRow(*(stored[name] for name in names)))
        rollout.rewards[steps, rows], rollout.episode_starts[steps, rows] = part.rewards[own], part.episode_starts[own]
        if part.left_out[own].any():
            left_out = np.zeros((count, self.env.num_envs), np.bool_)
            left_out[:, rows] = part.left_out[own]
            rollout.leave_out(steps, left_out)
        self.versions[steps, rows] = fragment.version
        infos: list[dict[int, Any]] = [{} for _ in range(begin, end)]
        for step, index, info in part.infos:
            if begin <= step < end:
                infos[step - begin][rows.start + index] = info
        self.unseen[number].extend(zip(part.plain_rewards[own], part.dones[own], infos, strict=True))
        self.taken[number] += count
        self.gained, self.newest = self.gained + count * size, (steps.stop - 1, rows.stop)
        self.ended[rows] = part.dones[end - 1]
        self.last[number] = copy_observations(part.last)  # Ray's arrays cannot be written
        if count < fragment.steps:  # the observations before the first step that is not stored yet
            self.last[number] = each_array(
                lambda seen, last: seen[end].reshape(last.shape).astype(last.dtype), part.stored["observations"],
                part.last,
            )  # fmt: skip

    def _note_lost(self, fragment: Fragment) -> None:
        """End the running episodes of a lost actor: the value of their last observation is added to the last reward."""
        number, rows = fragment.number, self.env.rows_of(fragment.number)
        if self.taken[number]:
            values = self.model.engine.values(self.last[number]) * np.float32(self.model.gamma)
            self.rollout.rewards[self.taken[number] - 1, rows] += np.where(self.ended[rows], 0.0, values)
        self.last[number], self.ended[rows] = copy_observations(fragment.last), True

    def _report(self, callback: BaseCallback, whole: bool) -> bool:
        """Call the callback until fewer than N transitions (`whole`: none) are unreported. False: a callback stops.

        Each call reports every actor's oldest step. The envs of an actor without one have reward 0 and done False.
        """
        model, env = self.model, self.env
        while (count := self._unreported()) >= (1 if whole else env.num_envs):
            rewards, dones = np.zeros(env.num_envs, np.float32), np.zeros(env.num_envs, np.bool_)
            infos: list[dict[str, Any]] = [{}] * env.num_envs
            for rows, steps in zip(self._every_rows(), self.unseen, strict=True):
                if steps:
                    rewards[rows], dones[rows], ends = steps.popleft()
                    for index, info in ends.items():
                        infos[index] = info
            model.num_timesteps += count - self._unreported()
            model.collector.clock.enter("log")
            callback.update_locals({"rewards": rewards, "dones": dones, "infos": infos})
            if not callback.on_step():
                return False
            model.collector.clock.enter("buffer")
            note_episodes(model, infos, dones)
        return True

    def _unreported(self) -> int:
        return sum(size * len(steps) for size, steps in zip(self.env.sizes, self.unseen, strict=True))

    def _hand_over(self) -> None:
        """Complete the rollout, and count the ages of its transitions. The last ones above T × N are not learned."""
        rollout, ours, taken = self.rollout, self.model.collector.continuous, np.repeat(self.taken, self.env.sizes)
        missing = np.arange(rollout.num_steps)[:, None] >= taken
        rollout.leave_out(slice(None), missing)
        rollout.complete()
        ours.take(self.version - self.versions, missing)
        if surplus := self.gained - self.quota:
            step, stop = self.newest
            ours.dropped = np.zeros_like(missing) if ours.dropped is None else ours.dropped
            ours.dropped[step, stop - surplus : stop] = True
        self.handed = self.model._last_obs = each_array(lambda *own: np.concatenate(own), *self.last)
        self.model._last_episode_starts = self.ended.copy()
        self.gained, self.taken = 0, [0] * len(self.taken)


def _flat(stored: Any, steps: slice) -> Any:
    """Copies of these steps (k, n, ...) as tensors (k × n, ...)."""

    def of(part: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(part[steps]).reshape(-1, *part.shape[2:]))

    return each_array(of, stored)


VEC_ENV = ContinuousVecEnv
