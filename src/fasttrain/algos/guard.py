"""`nan_guard` in updates: an update with numbers that are not finite is skipped and reported.

The optimizer steps only if loss and gradient norm are finite (`step_clipped`, and in the kernels), so that NaN and
infinity never reach a weight. After each round of updates (a rollout of PPO, a vector step of DQN) the guard reads the
gradient norms. After too many rounds without a finite update the guard ends the run, or rolls back the weights.
`causes.py` finds out what was not finite, and checks observations, rewards and actions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.batch import Float64Array, load_into
from fasttrain.errors import ConfigError, DivergedError

NOT_FINITE = ("probability tensor contains", "Expected parameter", "Expected value argument")  # texts of torch's errors
COUNTERS = ("skipped", "in_a_row", "rollbacks", "rolled_back", "since_copy")
MAX_SKIPPED = 10  # maximum number of rounds in a row without a finite update
UNCHANGED = {
    True: "weights and optimizer are as they were",
    False: "the actor is as it was, and critics step where their own loss and gradient are finite",
}
COPY_EVERY = 1000  # updates between two copies of weights and optimizer, for a rollback; a copy takes 60 µs


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=4)


class Guard:
    """Watches the updates of one model.

    Args:
        at_limit: what to do after too many rounds in a row without a finite update; from the setting `nan_guard`.
        say: prints a line for the user.
        max_skipped: maximum number of such rounds in a row.
    """

    def __init__(
        self,
        at_limit: Literal["stop", "rollback"] = "stop",
        say: Callable[[str], None] = _warn,
        max_skipped: int = MAX_SKIPPED,
    ) -> None:
        self.at_limit, self.say, self.max_skipped = at_limit, say, max_skipped
        self.skipped = 0  # number of skipped updates
        self.in_a_row = 0  # rounds in a row without a finite update
        self.rollbacks = 0
        self.rolled_back = False  # True after a rollback, until a round has only finite updates
        self._silent_below = 0  # number of skipped updates at which the next line is printed
        self.since_copy = 0  # updates since the last copy
        self._copies: list[list[Tensor]] = []  # at most two copies; all updates between them were good

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What a checkpoint stores of the guard: plain values, and arrays by name."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        arrays = {
            f"{number}/{place}": tensor.cpu().numpy()
            for number, copy in enumerate(self._copies)
            for place, tensor in enumerate(copy)
        }
        return {**counters, "copies": len(self._copies)}, arrays

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], model: Any) -> None:
        """Continue from a `state`, after the model's policy and optimizers were loaded.

        Raises:
            ConfigError: the state is of another policy.
        """
        for name in COUNTERS:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self._copies = [_copy(model) for _ in range(min(2, int(state["copies"])))]
        if (tensors := sum(map(len, self._copies))) != len(arrays):
            raise ConfigError(f"the checkpoint has {len(arrays)} arrays for a rollback, this policy has {tensors}")
        for number, copy in enumerate(self._copies):
            for place, tensor in enumerate(copy):
                values = tensor.numpy(force=True).copy()
                load_into(values, arrays, f"{number}/{place}")
                tensor.copy_(torch.from_numpy(values))

    def note(self, model: Any, norms: Float64Array, why: Callable[[], str], expected: bool = False) -> None:
        """Count a round of updates. A line is printed each time the number of skipped updates has doubled.

        Args:
            norms: gradient norms of the updates; not finite where the update was skipped.
            why: returns what was not finite first; called only after a skipped update.
            expected: True: skipped steps are normal (float16's gradient scaler), and no line is printed.

        Raises:
            DivergedError: too many rounds in a row without a finite update, and no rollback is possible.
        """
        if math.isfinite(sum(norms.tolist())):  # for ten norms this takes 0.3 µs, norms.sum() takes 1.5
            self.in_a_row = 0
            if len(norms):
                self.rolled_back = False
                self._copy_for_rollback(model, len(norms))
            return
        bad = int(np.count_nonzero(~np.isfinite(norms)))
        self.skipped += bad
        self.in_a_row = self.in_a_row + 1 if bad == len(norms) else 0
        if self.in_a_row > self.max_skipped:
            self._give_up(model, why())
        elif not expected and self.skipped >= self._silent_below:
            self._silent_below = 2 * self.skipped
            self.say(
                f"[GUARD] step {model.num_timesteps:,}: {bad:,} of {len(norms):,} updates skipped: {why()}; "
                f"{UNCHANGED[_is_whole(model)]} ({self.skipped:,} skipped so far)"
            )

    def _give_up(self, model: Any, why: str) -> None:
        rounds = f"no update could be applied in {self.in_a_row} rounds in a row"
        if self.at_limit == "rollback" and self._copies and not self.rolled_back:
            restore(model, self._copies[0])
            self._copies = self._copies[:1]
            self.rollbacks += 1
            self.in_a_row, self.rolled_back = 0, True
            self.say(f"[GUARD] step {model.num_timesteps:,}: {rounds}: {why}; back to the last good weights")
            return
        again = " again after going back to the last good weights" if self.rolled_back else ""
        raise DivergedError(
            f"{rounds}{again}, at step {model.num_timesteps}: {why}. The weights "
            f"{'' if _is_whole(model) else 'of the actor '}are those of the last good update; "
            "lower algo.learning_rate, scale rewards and observations, or remove the cause named here"
        )

    def _copy_for_rollback(self, model: Any, updates: int) -> None:
        """Copy the weights every `COPY_EVERY` good updates, and keep the last two copies."""
        if self.at_limit != "rollback":
            return
        self.since_copy += updates
        if self.since_copy >= COPY_EVERY or not self._copies:
            self.since_copy = 0
            self._copies = [*self._copies[-1:], _copy(model)]


def _copy(model: Any) -> list[Tensor]:
    return [value.clone() for value in _tensors_of(model)]


@torch.no_grad()
def restore(model: Any, copy: list[Tensor]) -> None:
    """Write the copied values into the weights and the optimizers' states, in place."""
    for place, value in zip(_tensors_of(model), copy, strict=True):
        place.copy_(value)


def _tensors_of(model: Any) -> list[Tensor]:
    """Weights and buffers, then `log_ent_coef` if SAC learns it, then the optimizers' states."""
    entropy = getattr(model, "ent_coef_optimizer", None)
    learned = [] if entropy is None else [each for group in entropy.param_groups for each in group["params"]]
    optimizers = [*optimizers_of(model.policy), *([] if entropy is None else [entropy])]
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    states = [optimizer.state.get(p, {}) for optimizer, group in groups for p in group["params"]]
    held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*model.policy.state_dict().values(), *learned, *held]


def _is_whole(model: Any) -> bool:
    """Whether one optimizer step makes the whole update. False for SAC: its critics step before its actor."""
    return hasattr(model.policy, "optimizer")


def optimizers_of(policy: Any) -> list[torch.optim.Optimizer]:
    """The policy's optimizers: SAC has one for the actor and one for the critics, a joint policy one per member."""
    if hasattr(policy, "members"):
        return [each.optimizer for each in policy.members.children()]
    return [policy.optimizer] if hasattr(policy, "optimizer") else [policy.actor.optimizer, policy.critic.optimizer]
