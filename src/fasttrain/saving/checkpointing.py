"""When a run writes checkpoints, and where a run that must stop ends.

A run is at rest between an update and the next rollout (DQN: before a vector step). Only from this state another
process can continue, so a stop during a rollout waits until the run is at rest. If that would take longer than
`checkpoint.grace_s`, the copy in memory of the state at the last rest is written. Every run makes such a copy now and
then, as a precaution against errors, but so rarely that it costs little.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.save_util import recursive_getattr, save_to_zip_file

from fasttrain.machine import free_memory
from fasttrain.perf.clock import PhaseClock
from fasttrain.saving.checkpoints import CheckpointFolder, Snapshot, Writer

HOLD_MOST_BYTES = 256 << 20  # a larger state is not kept as a copy in memory
HOLD_SHARE = 0.002  # share of the training's time for copies in memory: a copy of 3 ms is made every 1.5 s
TIMED_MOST_BYTES = 2 << 30
TIMED_SHARE = 0.01  # share of time for timed checkpoints: if writing takes 10 s, one is written every 1,000 s
COPY_SHARE = 0.25  # share of the free memory; if a copy would take more, training waits while the state is written
Take = Callable[[], Snapshot]  # takes a snapshot of views, which must be copied or written before training continues


class Settings(NamedTuple):
    """The settings of `checkpoint`, for one run."""

    every: int  # env steps; 0: only at a signal
    background: bool
    grace_s: float
    every_s: float = 0.0  # seconds of training between checkpoints; 0: not by time


class Checkpoints:
    """Makes and writes the checkpoints of one run. After an error it tries again when the next checkpoint is due.

    Attributes:
        failed: why the last checkpoint that was due could not be written; empty if it was written, or none was due.
        at: env steps of the last checkpoint that was begun; -1 if none was.
    """

    def __init__(
        self, folder: CheckpointFolder, take: Take, settings: Settings, clock: PhaseClock, say: Callable[[str], None]
    ) -> None:
        self.folder, self.settings = folder, settings
        self.failed, self.at = "", -1
        self._take, self._clock, self._say = take, clock, say
        self._thread: threading.Thread | None = None
        self._held: Snapshot | None = None  # a copy in memory of the state at a call of `at_rest`
        self._holds = 0  # number of copies so far
        self._hold_s, self._held_at = 0.0, 0.0  # how long the last copy took, and when it was made
        self._too_large = False  # whether the state is too large to be copied
        self._write_s, self._written_at = 0.0, time.perf_counter()  # duration and time of the last checkpoint
        self._published = -1  # env steps of the last checkpoint that this process has written
        self._rest_at = -1  # env steps at the last call of `at_rest`
        self._stopping = False  # `stopping` at the last call of `at_rest`
        self._rested = 0.0  # time of the last call of `at_rest`, on `time.perf_counter`
        self._cycle_s: float | None = None  # seconds between the last two calls of `at_rest`; None until the second
        self._asked: float | None = None  # time at which the run first wanted to stop

    def at_rest(self, env_steps: int, due: bool, stopping: bool) -> None:
        """To be called when the run is at rest. `stopping`: the run ends after this call."""
        now = time.perf_counter()
        if self._rest_at >= 0:
            self._cycle_s = now - self._rested
        else:
            self._written_at = now
        self._rest_at, self._stopping = env_steps, stopping
        timed = 0 < self.settings.every_s <= now - self._written_at >= self._write_s / TIMED_SHARE
        if (due or stopping or (timed and self._by_time())) and self.at != env_steps:
            self._held = None
            with self._clock.phase("checkpoint"):
                self._write(None, background=self.settings.background and not stopping)
            self._written_at = time.perf_counter()
            self._write_s = self._written_at - now
        elif self.at != env_steps and self._may_be_held(now):
            self._held = None  # freed before the next copy is made, so that there is only one at a time
            with self._clock.phase("checkpoint"):
                self._hold()
            self._holds, self._held_at = self._holds + 1, time.perf_counter()
            self._hold_s = self._held_at - now
        self._rested = time.perf_counter()

    def may_stop(self, for_signal: bool, since: int = 0) -> bool:
        """Whether a run that wants to stop during a rollout may stop now; not before a state of `since` env steps."""
        if self._rest_at < since:
            return False
        if not (for_signal or self.settings.every):
            return True
        now = time.perf_counter()
        if self._asked is None:
            self._asked = now
        if self.at == self._rest_at and (self._stopping or not self.failed):
            return True  # the state at the last rest was saved, or the attempt to save it before this stop failed
        held = self._held if self._held is not None and self._held.env_steps == self._rest_at else None
        if held is None and not self._too_large:  # no copy was made, because rollouts were short so far
            return False
        left_s = 0.0 if self._cycle_s is None else self._cycle_s - (now - self._rested)
        if max(left_s, now - self._asked) <= self.settings.grace_s:
            return False
        if held is not None:
            with self._clock.phase("checkpoint"):
                self._write(held, background=False)
        elif not self.failed:
            self.failed = (
                f"the state of {self._rest_at:,} steps is too large to be kept in memory, and the rollout too long "
                "to wait for its end: raise checkpoint.grace_s, or set checkpoint_every"
            )
        return True

    def finish(self, env_steps: int, at_rest: bool, stopped: bool) -> None:
        """Write the final state, from which a longer run can continue, and wait until everything is written.

        Without checkpoints the final state is written only if a signal `stopped` the run. If training has not ended
        `at_rest`, the steps of the last rollout are dropped.
        """
        with self._clock.phase("checkpoint"):
            held, self._held = self._held, None
            self.wait()
            if not (stopped or self.settings.every or self._by_time()):
                pass
            elif at_rest:
                self._rest_at = env_steps
                if self.at != env_steps or self.failed:
                    self._write(None, background=False)
            elif held is not None and held.env_steps > self.at:
                self._rest_at = held.env_steps
                self._write(held, background=False)
        if not at_rest and self.at == self._published >= 0 and not self.failed:
            self._say(f"checkpoint of {self.at:,} steps written; the {env_steps - self.at:,} later steps are dropped")
        if self.failed:
            self._say(f"warning: not saved for a resume: {self.failed}")

    def after_error(self, now: Take) -> None:
        """Write the newest state after an error; `now` takes a snapshot if there is no copy in memory."""
        self.wait()
        held, self._held = self._held, None
        known = -1 if self.failed else self.at
        if (held.env_steps <= known) if held else (known >= 0 and not self._too_large):
            return  # this state was written already, or the run continued from it
        try:
            taken = held or now()
            self.folder.publish(taken.env_steps, taken.files())
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
        else:
            self.failed, self.at = "", taken.env_steps

    def wait(self) -> None:
        """Wait for the thread that writes a checkpoint."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _by_time(self) -> bool:
        """Whether checkpoints are written by time. Not if there is a large replay buffer, which would fill the disk."""
        if self.settings.every_s and (size := self._take().size_bytes) > TIMED_MOST_BYTES:
            self.settings = self.settings._replace(every_s=0.0)
            self._say(f"the state takes {size / 1e9:.1f} GB, too large for timed checkpoints; set checkpoint_every")
        return self.settings.every_s > 0

    def _may_be_held(self, now: float) -> bool:
        """Whether to copy the state now: always with long rollouts, else the first two times and rarely later."""
        if self._too_large:
            return False
        if self._cycle_s is not None and self._cycle_s > self.settings.grace_s / 2:
            return True
        return self._holds < 2 or now - self._held_at >= self._hold_s / HOLD_SHARE

    def _hold(self) -> None:
        try:
            views = self._take()
            self._too_large = views.size_bytes > HOLD_MOST_BYTES
            if not self._too_large:
                self._held = views.copied()
        except Exception as error:
            self._note(self._rest_at, error)

    def _write(self, snapshot: Snapshot | None, background: bool) -> None:
        self.wait()  # wait for the previous checkpoint, so that there is only one copy at a time
        self.at = self._rest_at
        try:
            taken = snapshot or self._take()
            background = background and taken.size_bytes <= COPY_SHARE * free_memory()
            taken = taken.copied() if background else taken
        except Exception as error:  # a failed checkpoint must not end the training
            self._note(self._rest_at, error)
            return
        if not background:
            self._publish(taken)
            return
        self._thread = threading.Thread(target=self._publish, args=(taken,), name="fasttrain-checkpoint")
        self._thread.start()

    def _publish(self, snapshot: Snapshot) -> None:
        try:
            self.folder.publish(snapshot.env_steps, snapshot.files())
        except Exception as error:
            self._note(snapshot.env_steps, error)
        else:
            self.failed, self._published = "", snapshot.env_steps

    def _note(self, env_steps: int, error: Exception) -> None:
        repeated = bool(self.failed)
        self.failed = f"the checkpoint of {env_steps:,} steps could not be written ({type(error).__name__}: {error})"
        if not repeated:
            again = f"; the next try is in {self.settings.every:,} steps" if self.settings.every else ""
            self._say(f"warning: {self.failed}; training goes on{again}")


def zip_writer(model: BaseAlgorithm) -> Writer:
    """A function that writes what `model.save` would write now. Copying the model takes 0.3 ms."""
    excluded = set(model._excluded_save_params())
    names, tensor_names = model._get_torch_save_params()
    excluded |= {name.split(".")[0] for name in (*names, *tensor_names)}
    data = {name: _copied(value) for name, value in model.__dict__.items() if name not in excluded}
    params = {name: _cloned(recursive_getattr(model, name).state_dict()) for name in names}
    tensors = {name: recursive_getattr(model, name).detach().clone() for name in tensor_names}

    def write(file: BinaryIO) -> None:
        save_to_zip_file(file, data=data, params=params, pytorch_variables=tensors)  # type: ignore[arg-type]

    return write


def _copied(value: object) -> object:
    """A copy of a value that training changes in place; other values are returned as they are."""
    return copy.copy(value) if isinstance(value, (deque, dict, list, np.ndarray)) else value


def _cloned(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _cloned(item)  # type: ignore[index]
        return copied
    return [_cloned(item) for item in value] if isinstance(value, list) else value
