"""Overlap: the update of one rollout runs in a thread while the next rollout is collected.

The next rollout is collected with weights that are exactly one update old (as in Cleanba, Huang et al. 2023): the
update works on a copy of the policy, and the policy takes the result over when the rollout is full. What acts, what a
callback sees and what is saved in between is one consistent policy. The same seed gives the same run: the order of the
minibatches is drawn before the thread starts, so that both sides never draw from the same stream.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.engines.engine import Engine, EngineSettings, PPOWork, Statistics
from fasttrain.machine import usable_cores


class Job:
    """One update: who makes it, what it is, what came of it."""

    def __init__(self, learner: Engine, work: PPOWork, rollout: RolloutStorage | None, done: Any = None) -> None:
        self.learner, self.work = learner, work
        self.rollout = rollout  # that it learns from; None where it was made in another process
        self._done: Any = done  # Statistics
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="fasttrain-update", daemon=True)
        if done is None:
            self._thread.start()

    def result(self) -> Statistics:
        """Wait for it. Raises whatever it raised."""
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error
        done: Statistics = self._done
        return done

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            self._done = self.learner.update(self.rollout, self.work)
        except BaseException as error:  # reaches the trainer in `result`
            self._error = error
        self.seconds = time.perf_counter() - begun


class Overlapped:
    """At most one update under way, and the engine that makes it."""

    def __init__(self) -> None:
        self.learner: Engine | None = None  # of a copy of the policy
        self.spare: RolloutStorage | None = None  # that nobody fills or learns from
        self.job: Job | None = None  # under way
        self._copied: list[int] = []  # ids of the parameters that the learner's were copied from

    def start(self, engine: Engine, rollout: RolloutStorage, work: PPOWork) -> None:
        """Begin to learn from a filled rollout with the weights and settings that `engine` has now."""
        learner = self.prepared(engine, rollout, work)
        rollout.draw_ahead(work.n_epochs)
        self.job = Job(learner, work, rollout)

    def take(self, engine: Engine) -> tuple[Job, Statistics] | None:
        """Wait for the update and take it over into the engine's policy; None if there is none.

        Raises:
            whatever the update raised; the policy keeps its weights then.
        """
        job, self.job = self.job, None
        if job is None:
            return None
        try:
            done = job.result()
        finally:
            self.spare = job.rollout
            engine.clock.background_ns += int(job.seconds * 1e9)
        copy_weights(job.learner.policy, engine.policy)
        copy_optimizer(job.learner.policy.optimizer, engine.policy.optimizer)
        return job, engine.counted(done)

    def hold(self, engine: Engine, work: PPOWork, done: Statistics, fill: Callable[[Engine], None]) -> None:
        """As if an update made in another process were under way; `fill` makes the learner what it was."""
        learner = self._copy_of(engine)
        fill(learner)
        self.job = Job(learner, work, None, done)

    def prepared(self, engine: Engine, rollout: RolloutStorage, work: PPOWork) -> Engine:
        """The learner with the present weights and settings; compiled, if that is asked for."""
        learner = self._copy_of(engine)
        before = learner.warmup_s
        with engine.clock.phase("other"):
            learner.prepare(rollout, work, [])
        engine.warmup_s += learner.warmup_s - before
        return learner

    def _copy_of(self, engine: Engine) -> Engine:
        policy, settings = engine.policy, learner_settings(engine.settings)
        parameters = [id(parameter) for parameter in policy.parameters()]
        if self.learner is None or parameters != self._copied:  # the first time, or a layer was replaced
            copied, self.learner, self._copied = copy.deepcopy(policy), None, parameters
        else:
            copied = self.learner.policy
            copy_weights(policy, copied)
            copy_optimizer(policy.optimizer, copied.optimizer)
        copied.set_training_mode(True)
        learner = self.learner
        same = learner is not None and type(learner) is type(engine) and learner.settings == settings
        if learner is None or not same or not learner.fits(copied):
            self.learner = learner = type(engine)(copied, settings)
        learner.guard = engine.guard  # whether steps are watched; what came of them is noted by the algorithm
        return learner


def learner_settings(settings: EngineSettings) -> EngineSettings:
    """One core is left to acting. A CUDA graph must not be captured while another thread uses the device."""
    threads = max(1, min(settings.threads, usable_cores() - 1))
    mode = None if settings.compile_mode is None else "default"
    return replace(settings, threads=threads, overlap=False, compile_mode=mode)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Parameters and buffers, in place: whoever holds them sees the new values."""
    pairs = zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    for given, place in pairs:
        place.copy_(given)


@torch.no_grad()
def copy_optimizer(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """State and settings of an optimizer over the same parameters, tensors in place where they exist."""
    for group, into in zip(source.param_groups, target.param_groups, strict=True):
        into.update({key: value for key, value in group.items() if key != "params"})
        for parameter, own in zip(group["params"], into["params"], strict=True):
            state, place = source.state.get(parameter, {}), target.state[own]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and isinstance(place.get(key), torch.Tensor):
                    place[key].copy_(value)
                else:
                    place[key] = copy.deepcopy(value)
