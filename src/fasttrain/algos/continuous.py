"""schedule=continuous: envs go on stepping while PPO updates, in a thread of the training process.

A rollout has all `n_steps` × N transitions since the previous rollout. It begins and ends within episodes. A fast env
gives more transitions than a slow env, at most `LONGEST` × `n_steps`. The thread acts with a copy of the policy, which
has the weights from before the update. So a transition can be several updates old when PPO learns from it. `Reuse`
corrects for this by importance weights and V-trace. Transitions older than `max_lag` updates are dropped.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.engine import note_episodes
from fasttrain.algos.grouped import GroupedRollout
from fasttrain.algos.reuse import Reuse
from fasttrain.batch import BoolArray, Int64Array
from fasttrain.buffers.stock import as_stock
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.base import copy_observations
from fasttrain.vec.groups import Groups, GroupStep

LONGEST = 2  # maximum number of an env's transitions in a rollout, in multiples of `n_steps`


class Came(NamedTuple):
    """A transition of an env that the callbacks have not seen yet."""

    info: dict[str, Any]
    done: bool
    reward: float


class Continuous:
    """What a model keeps from rollout to rollout: its `ContinuousRollout`, and statistics of the transitions' ages.

    Attributes:
        rollout: the `ContinuousRollout` that collects; None before the first rollout and after the last one.
        dropped: (T, N) bool, the newest rollout's transitions that are not learned from; None: all ages are 0.
    """

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self.rollout: ContinuousRollout | None = None
        self.dropped: BoolArray | None = None
        self.total = self.count = self.largest = self.too_old = 0

    def take(self, lags: Int64Array, missing: BoolArray) -> None:
        """Add lags (T, N), ages in updates, to the statistics, and set `dropped`. A `missing` transition has lag 0."""
        old: BoolArray = lags > self.max_lag
        self.total, self.count = self.total + int(lags.sum()), self.count + int((~missing).sum())
        self.largest, self.too_old = max(self.largest, int(lags.max())), self.too_old + int(old.sum())
        self.dropped = old if lags.any() else None

    def lags(self) -> tuple[int, int, int, int]:
        """Sum of the lags, largest lag, number of transitions, number of transitions that were too old."""
        return self.total, self.largest, self.count, self.too_old


class ContinuousRollout(GroupedRollout):
    """Collects T transitions per env on average. One object collects all rollouts, unlike a `GroupedRollout`."""

    def __init__(self, model: Any, groups: Groups, masked: bool) -> None:
        super().__init__(model, groups, masked)
        self.quota = model.n_steps * self.storage.num_envs
        self.buffers = [model.rollout_buffer, as_stock(copy.deepcopy(self.storage))]
        self.actor.rollout_buffer = model.rollout_buffer
        self.idle = list(range(len(groups.rows)))  # groups that wait for an action
        rows = [groups.rows_of([group]) for group in self.idle]  # row indices of each group's envs
        self.first, self.largest = np.array([each[0] for each in rows]), max(map(len, rows))  # first rows; largest size
        self.version = -1  # number of updates before the actor's weights were copied
        self.versions: Int64Array = np.zeros(self.dones.shape, np.int64)  # (T, N) the actor's `version`
        self.ended: BoolArray = np.array(model._last_episode_starts, np.bool_)  # (N,) dones of the last finished step
        self.unseen = [deque[Came]() for _ in self.every]  # queue of each env, oldest transition first
        self.policy, self.settled = model.policy, False
        self.handed: Any = None  # the `_last_obs` that this object gave to the model
        self.storage.reset()

    def _actor(self) -> Any:
        """A copy of the model with its own policy and engine, because an update changes those of the model."""
        actor = copy.copy(self.model)
        actor.policy = copy.deepcopy(self.model.policy, {id(self.model.policy.optimizer): None})
        actor.policy.set_training_mode(False)
        self._renew_engine(actor)
        return actor

    def _renew_engine(self, actor: Any) -> None:
        ours = self.model.engine
        actor.engine = type(ours)(actor.policy, ours.settings)
        actor.engine.guard = ours.guard

    @property
    def gained(self) -> int:
        """Number of transitions since the last rollout."""
        return int(self.taken.sum())

    def collect(self, callback: BaseCallback) -> bool:
        """Step envs until T × N transitions make the model's next rollout. False: the callback asked to stop."""
        model, actor = self.model, self.actor
        actor.policy.load_state_dict(model.policy.state_dict())
        if (type(actor.engine), actor.engine.settings) != (type(model.engine), model.engine.settings):
            self._renew_engine(actor)
        actor.engine.begin()
        self.version, self.first_step = self.version + 1, model.num_timesteps
        if self.settled:
            self._look_again()
        while self._report_all(callback, whole=self.gained >= self.quota):
            if self.gained < self.quota:
                self._turn()
                continue
            last = model.num_timesteps >= model._total_timesteps
            if last:
                self._take(self.under_way)
                self.groups.finish()
                if not self._report_all(callback, whole=True):
                    break
            self._hand_over(surplus=0 if last else self.gained - self.quota)
            model.collector.continuous.rollout = None if last else self
            return True
        self._take(self.under_way)
        self._leave()
        model.collector.continuous.rollout = None
        return False

    def _look_again(self) -> None:
        """Read the model's last observations again: after `settle` an evaluation may have reset the envs."""
        self.settled = False
        begun = np.asarray(self.model._last_episode_starts, np.bool_) & ~self.ended
        self.taken[begun] = 0  # these envs were reset within an episode: drop their transitions
        self.observations, self.ended = copy_observations(self.model._last_obs), self.ended | begun
        room = self.taken < self.storage.num_steps
        self.storage.episode_starts[self.taken[room], self.every[room]] = self.ended[room]

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Envs step in a thread while the block runs, up to T × N transitions. The thread's errors are raised here."""
        self.clock, stop, failures = PhaseClock(), Event(), list[BaseException]()

        def go_on() -> None:
            try:
                while not stop.is_set() and self.gained + self.largest <= self.quota:
                    self._turn()
            except BaseException as error:  # raised again in the main thread
                failures.append(error)

        thread = Thread(target=go_on, name="envs that go on", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            self.model.collector.clock.enter("env_step")
            thread.join()  # waits for the end of a step that has begun
            self.clock = self.model.collector.clock
        if failures:
            raise failures[0]

    def _turn(self) -> None:
        """Act for the idle groups with room in the storage, and store the steps of the groups that are ready."""
        has_room = self.taken[self.first[self.idle]] < self.storage.num_steps
        able = [group for group, room in zip(self.idle, has_room.tolist(), strict=True) if room]
        self.idle = [group for group, room in zip(self.idle, has_room.tolist(), strict=True) if not room]
        self._act(able)
        self.clock.enter("env_step")
        ready = self.groups.first_ready(self.under_way)
        if self.gained + len(ready) * self.largest <= self.quota:
            self._take(ready)
            return
        while ready and self.gained < self.quota:  # the other ready groups belong to the next rollout
            self._take([ready.pop(0)])

    def _act(self, groups: list[int]) -> None:
        super()._act(groups)
        if groups:
            rows = self.groups.rows_of(groups)
            self.versions[self.taken[rows], rows] = self.version

    def _take(self, groups: list[int]) -> None:
        super()._take(groups)
        self.idle += groups

    def _note(self, outcome: GroupStep, steps: Int64Array, rows: Int64Array, dones: BoolArray) -> None:
        infos: Any = defaultdict(dict)
        self.groups.env.fill_infos(infos, outcome.rows, outcome.records, outcome.finished)
        for row, done, reward in zip(rows.tolist(), dones.tolist(), self.storage.rewards[steps, rows], strict=True):
            self.unseen[row].append(Came(infos[row], done, reward))
        self.ended[rows], self.newest = dones, (steps, rows)

    def settle(self) -> None:
        """Finish the steps that have begun. Then the model's last observations are the envs' newest."""
        self._take(self.under_way)
        self.groups.finish()
        self._show_last()
        self.settled = True

    def _show_last(self) -> None:
        self.handed = self.model._last_obs = copy_observations(self.observations)
        self.model._last_episode_starts = self.ended.copy()

    def _report_all(self, callback: BaseCallback, whole: bool) -> bool:
        """Call the callback until fewer than N transitions (`whole`: none) are unreported. False: a callback stops.

        Each call reports every env's oldest transition. An env without one has an empty info, reward 0 and done False.
        """
        model, nothing = self.model, Came({}, False, 0.0)
        while (count := sum(map(len, self.unseen))) >= (1 if whole else len(self.unseen)):
            came = [one.popleft() if one else nothing for one in self.unseen]
            infos, dones, rewards = zip(*came, strict=True)
            model.num_timesteps += count - sum(map(len, self.unseen))
            self.clock.enter("log")
            callback.update_locals({"infos": [*infos], "dones": np.array(dones), "rewards": np.array(rewards)})
            if not callback.on_step():
                return False
            self.clock.enter("buffer")
            note_episodes(model, [*infos], np.array(dones))
        return True

    def _hand_over(self, surplus: int) -> None:
        """Make the stored transitions the model's rollout; drop the last `surplus`. Then fill the other storage."""
        filled, taken, model = self.storage, self.taken, self.model
        missing = np.arange(filled.num_steps)[:, None] >= taken
        filled.rewards[missing] = filled.episode_starts[missing] = 0.0
        filled.leave_out(slice(None), missing)
        filled.complete()
        lags = np.where(missing, 0, self.version - self.versions)
        ours: Continuous = model.collector.continuous
        ours.take(lags, missing)
        if surplus:
            steps, rows = self.newest
            ours.dropped = np.zeros_like(missing) if ours.dropped is None else ours.dropped
            ours.dropped[steps[-surplus:], rows[-surplus:]] = True
        self._show_last()
        model.rollout_buffer, self.actor.rollout_buffer = self.buffers
        self.buffers.reverse()
        self.storage = self.actor.rollout_buffer.storage
        self.storage.reset()
        if self.under_way:
            rows = self.groups.rows_of(self.under_way)
            self.storage.put(np.zeros_like(rows), rows, filled.rows_at(taken[rows], rows))
            self.versions[0, rows] = self.versions[taken[rows], rows]
        self.storage.episode_starts[0] = self.ended
        self.taken = np.zeros_like(taken)


def use_continuous(model: Any, max_lag: int) -> None:
    """Set schedule=continuous for the model."""
    model.collector.schedule, model.collector.continuous = "continuous", Continuous(max_lag)
    model.reuse = model.reuse or Reuse(1)


def continued(model: Any, groups: Groups, masked: bool) -> ContinuousRollout:
    """The model's `ContinuousRollout`; a new one when a training begins and after a reset of the envs."""
    now: ContinuousRollout | None = model.collector.continuous.rollout
    if now is None or now.handed is not model._last_obs or now.policy is not model.policy:
        model.collector.continuous.rollout = now = ContinuousRollout(model, groups, masked)
    return now


def going_on(model: Any) -> AbstractContextManager[None]:
    """In this context the envs go on stepping if the model collects continuously."""
    rollout: ContinuousRollout | None = model.collector.continuous.rollout
    return nullcontext() if rollout is None else rollout.going_on()


def settle(model: Any) -> None:
    """Finish the steps that have begun. Call it between two rollouts, before other code uses the envs."""
    ours = getattr(getattr(model, "collector", None), "continuous", None)
    if ours is not None and ours.rollout is not None:
        ours.rollout.settle()
