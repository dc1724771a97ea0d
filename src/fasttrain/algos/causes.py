"""What was not finite first, after an update was skipped: data, then weights, then what the networks make of them, then
loss and gradients. Asked only when something went wrong, so it may take its time (10 ms for 10⁶ transitions).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import obs_as_tensor

from fasttrain.algos.finite import bad_parameters, first_bad, listed, parts_of
from fasttrain.algos.heads import CategoricalHead, head_of

ROWS = 4096  # of a rollout that go through the networks at once
UNKNOWN = "loss or gradients overflowed"


def blame(loss_is_finite: bool, parameters: str) -> str:
    """What to say of loss and gradient, if nothing before them explains it."""
    if not loss_is_finite:
        return "the loss"
    return f"the gradient of parameter {parameters}"


def why_rollout(model: Any, blamed: str) -> str:
    """Of a PPO or MaskablePPO with the rollout that it has just learned from; `blamed` is what `blame` said."""
    storage, policy = model.rollout_buffer, model.policy
    given = [*parts_of(storage.observations), ("reward", storage.rewards)]
    if found := _first_of(given, "of the rollout"):
        return found
    if names := bad_parameters(policy):
        return f"parameter {listed(names)} is not finite"
    acted = ("values", "log_probs", "advantages", "returns")
    made = [(name.removesuffix("s").replace("_", " "), getattr(storage, name)) for name in acted]
    return _first_of(made, "of the rollout") or _logits(model) or blamed or UNKNOWN


def why_replay(model: Any, blamed: str) -> str:
    """Of a DQN with what its replay buffer holds; `blamed` is what `blame` said."""
    storage = model.replay_buffer
    rows = storage.buffer_size if storage.full else storage.pos
    given = [(name, array[:rows]) for name, array in parts_of(storage.observations)]
    if not storage.optimize_memory_usage:
        given += [(f"next {name}", array[:rows]) for name, array in parts_of(storage.next_observations)]
    given.append(("reward", storage.rewards[:rows]))
    if found := _first_of(given, "of the replay buffer"):
        return found
    if names := bad_parameters(model.policy):
        return f"parameter {listed(names)} is not finite"
    return blamed or UNKNOWN


def _first_of(fields: list[tuple[str, NDArray[Any]]], where: str) -> str:
    """The first entry of (T, N, ...) arrays that is not finite."""
    for name, array in fields:
        at = first_bad(array)
        if at is not None:
            return f"the {name} of env {at[1]} in row {at[0]} {where} is {array[at]}"
    return ""


@torch.no_grad()
def _logits(model: Any) -> str:
    """Where the policy's logits are not finite with the weights of now."""
    head = head_of(model.policy, model.action_space)
    storage = model.rollout_buffer
    if not isinstance(head, CategoricalHead):
        return ""
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in _keyed(storage.observations).items()}
    for begin in range(0, storage.num_steps * storage.num_envs, ROWS):
        part: Any = {name: array[begin : begin + ROWS] for name, array in flat.items()}
        logits, values = head.outputs(obs_as_tensor(part.get("", part), model.device))
        for name, found in (("logits", logits), ("value", values)):
            at = first_bad(found.cpu().numpy())
            if at is not None:
                row, env = divmod(begin + at[0], storage.num_envs)
                return f"the {name} of env {env} in row {row} of the rollout, with finite weights and inputs,"
    return ""


def _keyed(observations: Any) -> dict[str, NDArray[Any]]:
    return observations if isinstance(observations, dict) else {"": np.asarray(observations)}
