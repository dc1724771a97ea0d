"""Which numbers are not finite, and why: the places that `nan_guard` names.

After an update was skipped it is asked what was not finite first: data, then weights, then what the networks make of
them, then loss and gradients. That is asked only when something went wrong, so it may take its time (10 ms for 10⁶
transitions).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor, nn

from fasttrain.algos.policy_view import NetworkView, view_of
from fasttrain.batch import FinishedEpisode, Float32Array, Int64Array, Observations, each_array, select_rows
from fasttrain.buffers.rollout import RolloutStorage
from fasttrain.errors import EnvError

SHOWN = 5  # envs named in a message
FEW = 10_000  # entries, up to which a sum of squares shows in 1 µs instead of 3 that all are finite
ROWS = 4096  # of a rollout that go through the networks at once
UNKNOWN = "loss or gradients overflowed"


def first_bad(array: NDArray[Any]) -> tuple[int, ...] | None:
    """Index of the first entry that is not finite."""
    if array.dtype.kind != "f":
        return None
    found = np.argwhere(~np.isfinite(array))
    return tuple(int(i) for i in found[0]) if len(found) else None


def parts_of(observations: Observations) -> Iterable[tuple[str, NDArray[Any]]]:
    """The name in messages and the array: one, or one per key."""
    if isinstance(observations, dict):
        return [(f"observation {key!r}", part) for key, part in observations.items()]
    return [("observation", observations)]


def all_finite(numbers: Any) -> bool:
    """Whether no entry of an array, or of those of a dict, is NaN or infinite."""
    if isinstance(numbers, dict):
        return all(map(all_finite, numbers.values()))
    array = np.asarray(numbers)
    if array.dtype.char in "fd" and array.size < FEW and math.isfinite(np.vdot(array, array)):
        return True
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def check_step(
    observations: Observations,  # (N, ...)
    rewards: Float32Array,  # (N,)
    finished: Iterable[FinishedEpisode],  # whose last observation is going to be used
    step: int,
    normalizer: Any = None,
) -> None:
    """What a vector step brought, before anything acts on it or stores it.

    Raises:
        EnvError: a number is not finite; env, field and step are named. Behind `normalizer` (SB3's VecNormalize) the
            numbers that the envs gave are named, because one NaN in its statistics spoils all envs.
    """
    given: list[tuple[str, NDArray[Any]]] = []
    if not (all_finite(observations) and all_finite(rewards)):
        given = [*parts_of(observations), ("reward", rewards)]
        if normalizer is not None:
            given = [*parts_of(normalizer.get_original_obs()), ("reward", normalizer.get_original_reward()), *given]
    for name, array in given:
        if first_bad(array) is not None:
            envs = _bad_rows(array)
            raise EnvError(_refusal(name, envs, array[envs[0]], step))
    for episode in finished:
        last = episode.final_observation
        for name, part in () if last is None or all_finite(last) else parts_of(last):
            if first_bad(array := np.asarray(part)) is not None:
                raise EnvError(_refusal(f"last {name} of the episode", [episode.env_index], array, step))


def check_actions(
    actions: NDArray[Any], policy: nn.Module, observations: Any, step: int, envs: Int64Array | None = None
) -> None:
    """Actions (n, ...) of `envs` (n,), of the first ones if left out, before they get them; `step` is that which they
    take.

    Raises:
        EnvError: one is not finite, which numpy would cast to some integer or the env simulate on.
    """
    if all_finite(actions):
        return
    rows = _bad_rows(actions)
    named = listed(rows if envs is None else envs[rows].tolist(), SHOWN)
    why = why_no_action(policy, observations, "the action") or "lower the learning rate, or look at the policy"
    raise EnvError(f"the action of env {named} is not finite at step {step}: {why}")


def check_rollout(storage: RolloutStorage, last: Observations, step: int) -> None:
    """The steps of a rollout that is not `finite`, one by one.

    Args:
        last: observations (N, ...) after the last step, which `storage` does not have.
        step: env steps by then.

    Raises:
        EnvError: as `check_step` of the first step at which something was not finite.
    """
    steps, seen = storage.num_steps, storage.observations
    for number in range(1, steps + 1):
        observations = select_rows(seen, number) if number < steps else last
        check_step(observations, storage.rewards[number - 1], (), step - (steps - number) * storage.num_envs)


def _bad_rows(array: NDArray[Any]) -> list[int]:
    rows: list[int] = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1)).tolist()
    return rows


def _refusal(field: str, envs: list[int], row: Any, step: int) -> str:
    at = first_bad(np.asarray(row)) or ()
    where = f" at index {', '.join(map(str, at))}" if at else ""
    return (
        f"the {field} of env {listed(envs, SHOWN)} is not finite ({np.asarray(row)[at]}{where}) at step {step}: check "
        "what the env returns; vec_env=shared with env.on_env_error=restart goes on without such an episode"
    )


def bad_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that hold something not finite."""
    return [name for name, values in module.named_parameters() if not bool(torch.isfinite(values).all())]


def bad_gradients(module: nn.Module) -> list[str]:
    """Names of the parameters whose gradient holds something not finite; if none does, of the largest."""
    named = {name: values.grad for name, values in module.named_parameters() if values.grad is not None}
    bad = [name for name, grad in named.items() if not bool(torch.isfinite(grad).all())]
    return bad or [max(named, key=lambda name: float(named[name].abs().max()))]


def listed(things: Sequence[object], most: int = 3) -> str:
    """The first few of them, and how many more there are."""
    return ", ".join(map(str, things[:most])) + (f" and {len(things) - most} more" if len(things) > most else "")


def why_no_action(policy: nn.Module, observations: Any, what: str) -> str:
    """Why a policy's output is not finite; `what` is the output's name. Empty if nothing explains it."""
    for field, part in parts_of(observations):
        array = part.numpy(force=True) if isinstance(part, Tensor) else np.asarray(part)
        if first_bad(array) is not None:
            return f"the {field} of env {listed(_bad_rows(array), SHOWN)} is not finite; check what the env returns"
    if names := bad_parameters(policy):
        named = f"parameter {listed(names)} is not"
        return f"{what} is not finite although its inputs are: {named}; lower the learning rate"
    return ""


def blame(loss_is_finite: bool, parameters: str) -> str:
    """What to say of loss and gradient, if nothing before them explains it."""
    return f"the gradient of parameter {parameters}" if loss_is_finite else "the loss"


def why_rollout(policy: Any, storage: RolloutStorage, blamed: str) -> str:
    """Of an actor-critic and the rollout that it has just learned from; `blamed` is what `blame` said."""
    given = [*parts_of(storage.observations), ("reward", storage.rewards)]
    if found := _first_of(given, "of the rollout"):
        return found
    if names := bad_parameters(policy):
        return f"parameter {listed(names)} is not finite"
    acted = ("values", "log_probs", "advantages", "returns")
    made = [(name.removesuffix("s").replace("_", " "), getattr(storage, name)) for name in acted]
    return _first_of(made, "of the rollout") or _logits(policy, storage) or blamed or UNKNOWN


def why_replay(model: Any, blamed: str) -> str:
    """Of a DQN with what its replay buffer holds; `blamed` is what `blame` said."""
    storage = model.replay_buffer
    rows = storage.buffer_size if storage.full else storage.pos
    images = storage.frames is not None  # of whole numbers, which are always finite
    given = [] if images else [(name, array[:rows]) for name, array in parts_of(storage.observations)]
    if not (images or storage.optimize_memory_usage):
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
def _logits(policy: Any, storage: RolloutStorage) -> str:
    """Where the policy's logits are not finite with the weights of now."""
    view = view_of(policy, policy.action_space)
    if not isinstance(view, NetworkView):
        return ""
    flat = each_array(lambda part: part.reshape(-1, *part.shape[2:]), storage.observations)
    for begin in range(0, storage.num_steps * storage.num_envs, ROWS):
        part = select_rows(flat, slice(begin, begin + ROWS))
        logits, values = view.outputs(obs_as_tensor(part, policy.device))
        for name, found in (("logits", logits), ("value", values)):
            at = first_bad(found.cpu().numpy())
            if at is not None:
                row, env = divmod(begin + at[0], storage.num_envs)
                return f"the {name} of env {env} in row {row} of the rollout, with finite weights and inputs,"
    return ""
