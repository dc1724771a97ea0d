"""`torch_threads=auto` for networks that torch computes: one thread or one per core, by trying both.

A rule by size was wrong by half for convolutions, and no rule knows how busy the machine is: threads that wait for one
whose core is taken make a product slower than one thread alone.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from fasttrain.plan import Plan
from fasttrain.runs.evaluate import own_random_state

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
