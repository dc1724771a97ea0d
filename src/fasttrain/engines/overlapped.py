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
from typing import Any, NamedTuple

import torch
from torch import nn

from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.engines.engine import Engine, EngineSettings, PPOWork, Statistics
from fasttrain.machine import usable_cores


class Taken(NamedTuple):
    """An update that was taken over."""

    done: Statistics
    work: PPOWork
    rollout: RolloutStorage | None  # that it learned from; None where it was made in another process


class Overlapped:
    """At most one update under way, and the engine that makes it."""

    def __init__(self) -> None:
        self.learner: Engine | None = None  # of a copy of the policy
        self.spare: RolloutStorage | None = None  # that nobody fills or learns from
        self._copied: list[int] = []  # ids of the parameters that the learner's were copied from
        self._thread: threading.Thread | None = None
        self._rollout: RolloutStorage | None = None
        self._work: PPOWork | None = None
        self._done: Statistics | None = None
        self._error: BaseException | None = None
        self._seconds = 0.0

    @property
    def under_way(self) -> bool:
        """Whether there is an update to take over."""
        return self._thread is not None

    def start(self, engine: Engine, rollout: RolloutStorage, work: PPOWork) -> None:
        """Begin to learn from a filled rollout with the weights and settings that `engine` has now."""
        learner = self.prepared(engine, rollout, work)
        rollout.draw_ahead(work.n_epochs)
        self._rollout, self._work, self._done = rollout, work, None
        self._thread = threading.Thread(target=self._run, args=(learner,), name="fasttrain-update", daemon=True)
        self._thread.start()

    def take(self, engine: Engine) -> Taken | None:
        """Wait for the update and take it over into the engine's policy; None if there is none.

        Raises:
            whatever the update raised; the policy keeps its weights then.
        """
        if self._thread is None or self._work is None or self.learner is None:
            return None
        self._thread.join()
        self._thread, rollout, work = None, self._rollout, self._work
        engine.clock.background_ns += int(self._seconds * 1e9)
        self.spare, self._rollout = rollout, None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        assert self._done is not None
        copy_weights(self.learner.policy, engine.policy)
        copy_optimizer(self.learner.policy.optimizer, engine.policy.optimizer)
        return Taken(engine.counted(self._done), work, rollout)

    def wait(self) -> tuple[Engine, PPOWork, Statistics] | None:
        """Wait for the update under way without taking it over; who made it, what it was and what came of it.

        Raises:
            whatever the update raised, as `take` will.
        """
        if self._thread is None or self._work is None or self.learner is None:
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error  # and again in `take`: who waits may take it for a failure of what it waits for
        assert self._done is not None
        return self.learner, self._work, self._done

    def hold(self, engine: Engine, work: PPOWork, done: Statistics, fill: Callable[[Engine], None]) -> None:
        """As after `wait`, with an update made in another process; `fill` makes the learner what it was."""
        learner = self._copy_of(engine)
        fill(learner)
        self._rollout, self._work, self._done = None, work, done
        self._thread = threading.Thread(target=lambda: None, name="fasttrain-update", daemon=True)
        self._thread.start()

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
        old = self.learner
        if old is None or type(old) is not type(engine) or old.settings != settings or not old.fits(copied):
            self.learner = type(engine)(copied, settings)
        assert self.learner is not None
        self.learner.guard = engine.guard  # whether steps are watched; what came of them is noted by the algorithm
        return self.learner

    def _run(self, learner: Engine) -> None:
        begun = time.perf_counter()
        try:
            self._done = learner.update(self._rollout, self._work)
        except BaseException as error:  # reaches the trainer in `take`
            self._error = error
        self._seconds = time.perf_counter() - begun


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
