"""What a run sets in torch: its device, its compiler left out where it is not used, its threads.

`torch_threads=auto` for networks that torch computes tries one thread and one per core. A rule by size was wrong by
half for convolutions, and no rule knows how busy the machine is: threads that wait for one whose core is taken make a
product slower than one thread alone.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from fasttrain.errors import ConfigError
from fasttrain.saving.buffer_state import own_random_state
from fasttrain.spec.plan import Plan


def pick_device(requested: str, policy: str) -> str:
    """`auto`: a small MLP is faster on the CPU (SB3 warns of the GPU there), images belong on the GPU.

    Raises:
        ConfigError: a device was asked for that is not there.
    """
    if requested == "auto":
        return "cuda" if policy.startswith("Cnn") and torch.cuda.is_available() else "cpu"
    if requested == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: this machine (or this torch build) has no MPS; take device=cpu")
    kind, _, number = requested.partition(":")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={requested}: this machine (or this torch build) has no CUDA; take device=cpu")
        there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if number and requested not in there:
            raise ConfigError(f"device={requested}: this machine has {', '.join(there)}")
    return requested


WRAPPED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
DISABLED = "__dynamo_disable"  # where torch keeps the form of a method that its compiler would leave alone
STEPPING = (Adam, AdamW, RMSprop, SGD)


def leave_compiler_out() -> None:
    """Let optimizers be built, saved and stepped without `torch._dynamo`: 800 modules, 1.2 s of every start on 2 cores.

    Those methods import it only to be left alone by it. Here each is told that it has been left alone already, and
    `step` sets gradients on or off without a word to the compiler. Another version of torch may do that elsewhere: then
    the start, or the first update, takes the second longer, and nothing else changes.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in WRAPPED:
        method = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if method is not None and not hasattr(method, DISABLED):
            setattr(method, DISABLED, method)
    for optimizer in STEPPING:
        step: Any = optimizer.step
        if step.__code__.co_name == "_use_grad":
            optimizer.step = _without_compiler(step.__wrapped__)  # type: ignore[method-assign]


def _without_compiler(step: Any) -> Any:
    """As torch's `_use_grad_for_differentiable`, less the compiler's graph breaks."""

    @functools.wraps(step)
    def plain(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain


ROUNDS, MOST_ROWS = 5, 128  # rows of an update: more take longer and tell no more
MUST_GAIN = 1.1  # else one thread, which leaves the other cores alone


def settle_threads(plan: Plan, model: BaseAlgorithm) -> Plan:
    """Set torch's threads to what was fastest, where the plan left that open; its networks and draws stay as they were.

    `deterministic=true` takes what the plan says: a number that was measured may be another one the next time.
    """
    threads, config = plan.config.torch_threads, plan.config
    row = next(row for row in plan.rows if row.flag == "torch_threads")
    if row.requested != "auto" or threads == 1 or config.deterministic or model.device.type != "cpu":
        return plan
    if config.fused_update == "on":
        torch.set_num_threads(1)
        return plan.replacing(
            "torch_threads", 1, "the networks are computed by compiled kernels, with threads of their own"
        )
    try:
        with own_random_state(config.seed):
            one, several = step_times(model, int(threads))
    except Exception as error:  # a policy of the user's that cannot be copied or called like stock's
        return plan.replacing("torch_threads", threads, f"one per core; not tried out: {type(error).__name__}")
    chosen = int(threads) if one > MUST_GAIN * several else 1
    torch.set_num_threads(chosen)
    told = f"acting and updating takes {1e3 * one:.3g} ms a vector step on one thread, {1e3 * several:.3g} on {threads}"
    return plan.replacing("torch_threads", chosen, told)


def step_times(model: Any, threads: int) -> tuple[float, float]:
    """Seconds of acting and updating per vector step, on one thread and on `threads`; medians, taken in turn."""
    policy = copy.deepcopy(model.policy)
    rows = min(MOST_ROWS, model.batch_size or MOST_ROWS)
    act, update = _acting(policy, model), _updating(policy, model, rows)
    times: dict[int, list[float]] = {1: [], threads: []}
    for number in range(ROUNDS + 1):
        for count, taken in times.items():
            torch.set_num_threads(count)
            acting, updating = _timed(act), _timed(update)
            if number:  # the first allocates
                taken.append(acting + updates_per_step(model) * updating * (model.batch_size or rows) / rows)
    return statistics.median(times[1]), statistics.median(times[threads])


def updates_per_step(model: Any) -> float:
    """Gradient updates per vector step."""
    if isinstance(model, OffPolicyAlgorithm):
        steps = model.gradient_steps if model.gradient_steps >= 0 else model.n_envs
        frequency: Any = model.train_freq  # of episodes: as if of steps
        return float(steps / max(1, frequency.frequency))
    return float(model.n_epochs * math.ceil(model.n_steps * model.n_envs / (model.batch_size or 1)) / model.n_steps)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _acting(policy: Any, model: Any) -> Callable[[], None]:
    observations = _observations(policy, model, model.n_envs)

    def act() -> None:
        with torch.no_grad():
            policy(observations)

    return act


def _updating(policy: Any, model: Any, rows: int) -> Callable[[], None]:
    observations = _observations(policy, model, rows)
    if isinstance(model, OffPolicyAlgorithm):

        def update() -> None:
            with torch.no_grad():
                policy.q_net_target(observations)
            policy.q_net(observations).square().mean().backward()

        return update
    space = copy.deepcopy(model.action_space)
    actions = torch.as_tensor(np.stack([space.sample() for _ in range(rows)]))

    def update_actor() -> None:
        values, log_probs, _ = policy.evaluate_actions(observations, actions)
        (values.square().mean() - log_probs.mean()).backward()

    return update_actor


def _observations(policy: Any, model: Any, rows: int) -> Any:
    space = copy.deepcopy(model.observation_space)
    drawn = [space.sample() for _ in range(rows)]
    if isinstance(space, spaces.Dict):
        return policy.obs_to_tensor({key: np.stack([row[key] for row in drawn]) for key in space.spaces})[0]
    return policy.obs_to_tensor(np.stack(drawn))[0]
