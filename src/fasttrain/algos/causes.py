"""Which numbers are not finite, and why: the checks and the messages of `nan_guard`.

After a skipped update these functions search in this order: data, weights, the networks' outputs, loss and gradients.
The search takes 10 ms for 10⁶ transitions. This matters little after a failure.
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

SHOWN = 5  # maximum number of envs that a message names
FEW = 10_000  # arrays with fewer entries are checked by their sum of squares, in 1 µs instead of 3
ROWS = 4096  # rows of a rollout in one forward pass of the search
UNKNOWN = "loss or gradients overflowed"


def first_bad(array: NDArray[Any]) -> tuple[int, ...] | None:
    """Index of the first entry that is NaN or infinite; None if all are finite."""
    if array.dtype.kind != "f":
        return None
    places = np.argwhere(~np.isfinite(array))
    return tuple(map(int, places[0])) if len(places) else None


def parts_of(observations: Observations) -> Iterable[tuple[str, NDArray[Any]]]:
    """(name for messages, array) of observations: one pair, or one per key of a Dict."""
    if isinstance(observations, dict):
        return [(f"observation {key!r}", part) for key, part in observations.items()]
    return [("observation", observations)]


def all_finite(numbers: Any) -> bool:
    """Whether all entries of an array, or of all arrays in a dict, are finite."""
    if isinstance(numbers, dict):
        return all(map(all_finite, numbers.values()))
    array = np.asarray(numbers)
    if array.dtype.char in "fd" and array.size < FEW and math.isfinite(np.vdot(array, array)):
        return True
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def check_step(
    observations: Observations,  # (N, ...)
    rewards: Float32Array,  # (N,)
    finished: Iterable[FinishedEpisode],  # ended episodes whose last observations are checked too
    step: int,
    normalizer: Any = None,
) -> None:
    """Check the results of a vector step before they are stored.

    Raises:
        EnvError: a number is not finite; the message names env, field and step. With a `normalizer` (SB3's
            VecNormalize) the original numbers are checked first: one NaN makes the normalized numbers of all envs NaN.
    """
    fields: list[tuple[str, NDArray[Any]]] = []
    if not (all_finite(observations) and all_finite(rewards)):
        fields = [*parts_of(observations), ("reward", rewards)]
        if normalizer is not None:
            fields = [*parts_of(normalizer.get_original_obs()), ("reward", normalizer.get_original_reward()), *fields]
    for name, array in fields:
        if envs := _bad_rows(array):
            raise EnvError(_message(name, envs, array[envs[0]], step))
    for episode in finished:
        last = episode.final_observation
        for name, part in () if last is None or all_finite(last) else parts_of(last):
            if first_bad(array := np.asarray(part)) is not None:
                raise EnvError(_message(f"last {name} of the episode", [episode.env_index], array, step))


def check_actions(
    actions: NDArray[Any], policy: nn.Module, observations: Any, step: int, envs: Int64Array | None = None
) -> None:
    """Check actions (n, ...) of `envs` (n,), or of the first n envs (None), before env step number `step`.

    Raises:
        EnvError: an action is not finite.
    """
    if all_finite(actions):
        return
    rows = _bad_rows(actions)
    names = list_first(rows if envs is None else envs[rows].tolist(), SHOWN)
    why = why_no_action(policy, observations, "the action") or "lower the learning rate, or look at the policy"
    raise EnvError(f"the action of env {names} is not finite at step {step}: {why}")


def check_rollout(storage: RolloutStorage, last: Observations, step: int) -> None:
    """Call `check_step` for each step of a rollout. It raises EnvError at the first number that is not finite.

    Args:
        last: observations (N, ...) after the last step; `storage` does not have them.
        step: env steps of the run at the end of the rollout.
    """
    steps = storage.num_steps
    for number in range(1, steps + 1):
        observations = select_rows(storage.observations, number) if number < steps else last
        check_step(observations, storage.rewards[number - 1], (), step - (steps - number) * storage.num_envs)


def _bad_rows(array: NDArray[Any]) -> list[int]:
    if array.dtype.kind != "f":
        return []
    return np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1)).tolist()  # type: ignore[no-any-return]


def _message(field: str, envs: list[int], row: Any, step: int) -> str:
    at = first_bad(np.asarray(row)) or ()
    where = f" at index {', '.join(map(str, at))}" if at else ""
    number = np.asarray(row)[at]
    return (
        f"the {field} of env {list_first(envs, SHOWN)} is not finite ({number}{where}) at step {step}: check "
        "what the env returns; vec_env=shared with env.on_env_error=restart goes on without such an episode"
    )


def bad_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters with numbers that are not finite."""
    return [name for name, values in module.named_parameters() if not bool(torch.isfinite(values).all())]


def bad_gradients(module: nn.Module) -> list[str]:
    """Names of parameters whose gradient is not finite; if all are finite, the parameter with the largest gradient."""
    gradients = {name: values.grad for name, values in module.named_parameters() if values.grad is not None}
    bad = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
    return bad or [max(gradients, key=lambda name: float(gradients[name].abs().max()))]


def list_first(things: Sequence[object], most: int = 3) -> str:
    """Text with the first `most` things and the number of the remaining things."""
    return ", ".join(map(str, things[:most])) + (f" and {len(things) - most} more" if len(things) > most else "")


def why_no_action(policy: nn.Module, observations: Any, what: str) -> str:
    """Why a policy's output, named `what`, is not finite; empty if neither observations nor weights are the cause."""
    for field, part in parts_of(observations):
        array = part.numpy(force=True) if isinstance(part, Tensor) else np.asarray(part)
        if envs := _bad_rows(array):
            return f"the {field} of env {list_first(envs, SHOWN)} is not finite; check what the env returns"
    names = list_first(bad_parameters(policy))
    lower = f"{what} is not finite although its inputs are: parameter {names} is not; lower the learning rate"
    return lower if names else ""


def blame(loss_is_finite: bool, parameters: str) -> str:
    """Text for a message: "the loss" if it is not finite, else the gradient of these parameters."""
    return f"the gradient of parameter {parameters}" if loss_is_finite else "the loss"


def why_rollout(policy: Any, storage: RolloutStorage, blamed: str) -> str:
    """What was not finite when an actor-critic learned from a rollout, as text. `blamed`: result of `blame`, or ""."""
    data = [*parts_of(storage.observations), ("reward", storage.rewards)]
    outputs = ("values", "log_probs", "advantages", "returns")
    computed = [(name.removesuffix("s").replace("_", " "), getattr(storage, name)) for name in outputs]
    where = "of the rollout"
    return (
        _first_of(data, where) or _bad_weights(policy) or _first_of(computed, where) or _logits(policy, storage)
        or blamed or UNKNOWN
    )  # fmt: skip


def why_replay(model: Any, blamed: str) -> str:
    """As `why_rollout`, for DQN or SAC and its replay buffer."""
    storage = model.replay_buffer
    rows = storage.buffer_size if storage.full else storage.pos
    images = storage.frames is not None  # images are integers, and integers are always finite
    data = [] if images else [*parts_of(storage.observations)]
    if not (images or storage.optimize_memory_usage):
        data += [(f"next {name}", array) for name, array in parts_of(storage.next_observations)]
    data = [(name, array[:rows]) for name, array in [*data, ("reward", storage.rewards)]]
    return _first_of(data, "of the replay buffer") or _bad_weights(model.policy) or blamed or UNKNOWN


def _bad_weights(policy: Any) -> str:
    names = list_first(bad_parameters(policy))
    return f"parameter {names} is not finite" if names else ""


def _first_of(fields: list[tuple[str, NDArray[Any]]], where: str) -> str:
    """The first entry of the arrays (T, N, ...) that is not finite, as text; empty if all are finite."""
    for name, array in fields:
        at = first_bad(array)
        if at is not None:
            return f"the {name} of env {at[1]} in row {at[0]} {where} is {array[at]}"
    return ""


@torch.no_grad()
def _logits(policy: Any, storage: RolloutStorage) -> str:
    """Where the policy's logits or values for the rollout are not finite, as text; empty if all are finite."""
    view = view_of(policy, policy.action_space)
    if not isinstance(view, NetworkView):
        return ""
    flat = each_array(lambda part: part.reshape(-1, *part.shape[2:]), storage.observations)
    for begin in range(0, storage.num_steps * storage.num_envs, ROWS):
        part = select_rows(flat, slice(begin, begin + ROWS))
        logits, values = view.outputs(obs_as_tensor(part, policy.device))
        for name, outputs in (("logits", logits), ("value", values)):
            at = first_bad(outputs.cpu().numpy())
            if at is not None:
                row, env = divmod(begin + at[0], storage.num_envs)
                return f"the {name} of env {env} in row {row} of the rollout, with finite weights and inputs,"
    return ""
