"""Overlap: the update of one rollout runs in a thread while the next rollout is collected.

The next rollout is collected with weights that are exactly one update old (as in Cleanba, Huang et al. 2023): the
update works on a copy of the policy, and `model.policy` takes the result over when the rollout is full. What acts,
what a callback sees and what is saved in between is one consistent policy. The same seed gives the same run: the order
of the minibatches is drawn before the thread starts, so that both sides never draw from the same stream.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from stable_baselines3.common.logger import Logger
from torch import nn

from fasttrain.algos.fast import FastState, storage_of
from fasttrain.algos.update import update
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.engines.torch import Acceleration


class OverlappedUpdate:
    """At most one update under way, and what it needs of its own.

    Args:
        model: a PPO or MaskablePPO of ours; `finish` changes its policy, optimizer, log and counters.
        threads: of the compiled kernels, for the update.
    """

    def __init__(self, model: Any, threads: int) -> None:
        self.model, self.threads = model, threads
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._spare: RolloutStorage | None = None
        self._seconds = 0.0
        self._state = FastState(masked=model._fast.masked, max_threads=threads)  # of the learner
        self._policy: Any = None  # a copy of the model's
        self._copied: list[int] = []  # ids of the parameters it was copied from
        self._learner: Any = self._prepared()  # a shallow copy of the model with a policy and a log of its own

    @property
    def warmup_s(self) -> float:
        """What compiling for the update took; it was done before the update began, outside of every phase."""
        return self._state.warmup_s

    @property
    def under_way(self) -> bool:
        """Whether there is an update to finish."""
        return self._thread is not None

    def start(self) -> None:
        """Begin to train on the model's filled storage, and give the model another one to fill."""
        self.finish()
        model, learner = self.model, self._prepared()
        self._learner = learner
        filled: RolloutStorage = model.rollout_buffer
        filled.draw_ahead(model.n_epochs)
        learner.rollout_buffer, model.rollout_buffer = filled, self._spare
        storage_of(model, filled.num_steps, filled.num_envs)  # made anew where the spare one does not fit
        self._spare = None
        self._thread = threading.Thread(target=self._run, args=(learner,), name="fasttrain-update", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the update and take it over: weights, optimizer, log, counters.

        Raises:
            whatever the update raised; the model keeps its weights then.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        model, learner = self.model, self._learner
        fast: FastState = model._fast
        fast.clock.background_ns += int(self._seconds * 1e9)
        self._spare = learner.rollout_buffer
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        copy_weights(learner.policy, model.policy)
        copy_optimizer(learner.policy.optimizer, model.policy.optimizer)
        model._n_updates = learner._n_updates
        fast.gradient_updates = learner._fast.gradient_updates
        fast.skipped_steps = learner._fast.skipped_steps
        for key, value in learner.logger.name_to_value.items():
            model.logger.record(key, value, exclude=learner.logger.name_to_excluded[key])

    def wait(self) -> Any:
        """Wait for the update under way without taking it over; its learner, or None if there is none.

        Raises:
            whatever the update raised, as `finish` will.
        """
        if self._thread is None:
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error  # and again in `finish`: who waits may take it for a failure of what it waits for
        return self._learner

    def hold(self, fill: Callable[[Any], None]) -> None:
        """As after `wait`, with a learner that `fill` makes what it was in another process."""
        self._learner = learner = self._prepared()
        learner.rollout_buffer = None  # the model's own; a spare one is made with the next `start`
        fill(learner)
        self._thread = threading.Thread(target=lambda: None, name="fasttrain-update", daemon=True)
        self._thread.start()

    def _prepared(self) -> Any:
        """The learner, with the model's present weights, settings and progress."""
        model, state = self.model, self._state
        fast: FastState = model._fast
        parameters = [id(parameter) for parameter in model.policy.parameters()]
        if parameters != self._copied:  # the first time, or a layer was replaced
            self._policy, self._copied = copy.deepcopy(model.policy), parameters
        else:
            copy_weights(model.policy, self._policy)
            copy_optimizer(model.policy.optimizer, self._policy.optimizer)
        state.fused, state.acceleration = fast.fused, without_graphs(fast.acceleration)
        state.guard = fast.guard  # one for both: it counts rounds
        state.gradient_updates, state.skipped_steps = fast.gradient_updates, fast.skipped_steps
        learner = copy.copy(model)
        learner.policy, learner._fast = self._policy, state
        learner.set_logger(Logger(folder=None, output_formats=[]))
        accelerator = state.accelerator_of(self._policy)
        if state.kernels_of(self._policy, model.observation_space) is None and accelerator.needs_warm_up(learner, ()):
            with fast.clock.phase("other"):
                accelerator.warm_up(learner, ())
        return learner

    def _run(self, learner: Any) -> None:
        begun = time.perf_counter()
        try:
            update(learner)
        except BaseException as error:  # reaches the trainer in `finish`
            self._error = error
        self._seconds = time.perf_counter() - begun


def without_graphs(settings: Acceleration) -> Acceleration:
    """A CUDA graph must not be captured while another thread uses the device."""
    return settings if settings.compile_mode is None else replace(settings, compile_mode="default")


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
