"""`nan_guard`: whether numbers are finite, and what follows where they are not.

What envs and policy hand on is looked at before anything acts on it or stores it, by `causes.py`, which says what is
not finite. In updates it never reaches a weight: the update is skipped, counted, named, and if
nothing else comes, it ends the run or takes the weights back to where updates were good.

The optimizer steps only where loss and gradient norm are finite (`step_clipped`, and in the kernels). What
came of it, one gradient norm per update, is read once per round: a rollout of PPO, a vector step of DQN.
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

NOT_FINITE = ("probability tensor contains", "Expected parameter", "Expected value argument")  # torch's words for it
COUNTED = ("skipped", "in_a_row", "rollbacks", "rolled_back", "since_copy")
MAX_SKIPPED = 10  # rounds of updates in a row (a rollout's, a vector step's) that may be lost
KEPT = {
    True: "weights and optimizer are as they were",
    False: "the actor is as it was, and critics step where their own loss and gradient are finite",
}
KEEP_EVERY = 1000  # updates between two copies of weights and optimizer for a rollback: 60 µs of a second or more


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=4)


class Guard:
    """Watches the updates of one model.

    Args:
        at_limit: how to give up, as `nan_guard` says.
        say: takes lines for the user.
        max_skipped: more bad rounds in a row than this are the limit.
    """

    def __init__(
        self,
        at_limit: Literal["stop", "rollback"] = "stop",
        say: Callable[[str], None] = _warn,
        max_skipped: int = MAX_SKIPPED,
    ) -> None:
        self.at_limit, self.max_skipped = at_limit, max_skipped
        self.say = say
        self.skipped = 0  # updates
        self.in_a_row = 0  # rounds in which none could be applied
        self.rollbacks = 0
        self.rolled_back = False  # and no good round since
        self._silent_below = 0  # so many skipped updates
        self.since_copy = 0
        self._copies: list[list[Tensor]] = []  # the older is of before updates that were all good

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What it has counted and kept, for a checkpoint: plain values, and arrays by name."""
        counted = {name: getattr(self, name) for name in COUNTED}
        arrays = {
            f"{number}/{place}": tensor.cpu().numpy()
            for number, copy in enumerate(self._copies)
            for place, tensor in enumerate(copy)
        }
        return {**counted, "copies": len(self._copies)}, arrays

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], model: Any) -> None:
        """Go on from there, once the model's policy and optimizers are as they were.

        Raises:
            ConfigError: what was kept is not of this policy.
        """
        for name in COUNTED:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self._copies = [_copy(model) for _ in range(min(2, int(state["copies"])))]
        if (kept := sum(map(len, self._copies))) != len(arrays):
            raise ConfigError(f"the checkpoint has {len(arrays)} arrays to roll back to, this policy {kept}")
        for number, copy in enumerate(self._copies):
            for place, tensor in enumerate(copy):
                given = tensor.numpy(force=True).copy()
                load_into(given, arrays, f"{number}/{place}")
                tensor.copy_(torch.from_numpy(given))

    def note(self, model: Any, norms: Float64Array, why: Callable[[], str], expected: bool = False) -> None:
        """Take in a round of updates. Skipped ones are told whenever twice as many were skipped as at the last line.

        Args:
            norms: of their gradients; not finite where no step was taken.
            why: finds out what was not finite first; asked only where something was.
            expected: a few skipped steps are the normal course of things (float16's gradient scaler).

        Raises:
            DivergedError: too many rounds in a row brought nothing, and there is nothing to go back to.
        """
        if math.isfinite(sum(norms.tolist())):  # of ten 0.3 µs, norms.sum() 1.5
            self.in_a_row = 0
            if len(norms):
                self.rolled_back = False
                self._keep(model, len(norms))
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
                f"{KEPT[_is_whole(model)]} ({self.skipped:,} skipped so far)"
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
            "lower algo.learning_rate, scale rewards and observations, or look at what was named"
        )

    def _keep(self, model: Any, updates: int) -> None:
        """Copies for a rollback, of now and of `KEEP_EVERY` good updates ago."""
        if self.at_limit != "rollback":
            return
        self.since_copy += updates
        if self.since_copy >= KEEP_EVERY or not self._copies:
            self.since_copy = 0
            self._copies = [*self._copies[-1:], _copy(model)]


def _copy(model: Any) -> list[Tensor]:
    return [value.clone() for value in _tensors_of(model)]


@torch.no_grad()
def restore(model: Any, copy: list[Tensor]) -> None:
    """Weights and optimizers as they were, in place: whoever holds the tensors sees the old values."""
    for place, value in zip(_tensors_of(model), copy, strict=True):
        place.copy_(value)


def _tensors_of(model: Any) -> list[Tensor]:
    """Weights and buffers, the weight of the entropy where SAC learns it, then what the optimizers hold."""
    entropy = getattr(model, "ent_coef_optimizer", None)
    learned = [] if entropy is None else [each for group in entropy.param_groups for each in group["params"]]
    optimizers = [*optimizers_of(model.policy), *([] if entropy is None else [entropy])]
    groups = [(each, group) for each in optimizers for group in each.param_groups]
    states = [optimizer.state.get(p, {}) for optimizer, group in groups for p in group["params"]]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*model.policy.state_dict().values(), *learned, *kept]


def _is_whole(model: Any) -> bool:
    """Whether an update is one step; SAC's critics take theirs before it is known whether the actor can."""
    return hasattr(model.policy, "optimizer")


def optimizers_of(policy: Any) -> list[torch.optim.Optimizer]:
    """The one that most policies have, or those of actor and critic."""
    return [policy.optimizer] if hasattr(policy, "optimizer") else [policy.actor.optimizer, policy.critic.optimizer]
