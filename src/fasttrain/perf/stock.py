"""The phases of a stock SB3 algorithm, measured from outside without any change of SB3.

An env wrapper, hooks on the acting network and on the optimizers, and a callback enter the phases of one `PhaseClock`.
Forward and backward of an update cannot be separated from outside, so they are reported together as `train`, with
gradient clipping. `optim` is the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from fasttrain.perf.clock import PhaseClock

ACTING = ("actor", "q_net", "quantile_net")  # policy attributes: the network that chooses actions


def optimizers_of(model: BaseAlgorithm) -> list[Any]:
    """Every optimizer that SB3 saves with a model: PPO and DQN have one, SAC up to three, ARS none."""
    names = (name for name in model._get_torch_save_params()[0] if name.endswith("optimizer"))
    return [recursive_getattr(model, name) for name in names]


class TimedVecEnv(VecEnvWrapper):
    """Counts every call into the env as phase `env_step`."""

    def __init__(self, venv: VecEnv, clock: PhaseClock) -> None:
        super().__init__(venv)
        self.clock = clock
        self.look_at_masks: Callable[[list[Any]], None] = lambda _: None  # called with the envs' masks

    def reset(self) -> VecEnvObs:
        with self.clock.phase("env_step"):
            return self.venv.reset()

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        self.clock.enter("env_step")
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        result = self.venv.step_wait()
        self.clock.enter("buffer")
        return result

    def env_method(
        self, method_name: str, *method_args: Any, indices: int | Iterable[int] | None = None, **method_kwargs: object
    ) -> list[Any]:
        self.clock.enter("env_step")
        result = self.venv.env_method(method_name, *method_args, indices=indices, **method_kwargs)
        if method_name == "action_masks":
            self.look_at_masks(result)
        self.clock.enter("action")  # SB3 asks for masks right before it acts
        return result


class StockPhases(BaseCallback):
    """The callback that enters the phases outside of the env's calls."""

    def __init__(self, clock: PhaseClock) -> None:
        super().__init__()
        self.clock = clock
        self._hooks: list[Any] = []
        self._collecting = False

    def _init_callback(self) -> None:
        policy: Any = self.model.policy
        acting = next((getattr(policy, name) for name in ACTING if hasattr(policy, name)), policy)
        self._hooks = [acting.register_forward_pre_hook(self._on_forward)]
        for optimizer in optimizers_of(self.model):
            self._hooks.append(optimizer.register_step_pre_hook(self._on_optimizer_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))

    def _on_forward(self, *_: object) -> None:
        if self._collecting:
            self.clock.enter("action")

    def _on_optimizer_step(self, *_: object) -> None:
        self.clock.enter("optim")

    def _after_optimizer_step(self, *_: object) -> None:
        self.clock.enter("train")

    def _on_rollout_start(self) -> None:
        self._collecting = True
        self.clock.enter("action")

    def _on_step(self) -> bool:
        self.clock.enter("buffer")
        return True

    def _on_rollout_end(self) -> None:
        self._collecting = False
        self.clock.enter("train")

    def _on_training_end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.clock.enter("other")


def is_stock(model: BaseAlgorithm) -> bool:
    """Whether `model` has a class of SB3, or a user's subclass of an SB3 class; neither has a phase clock."""
    return not hasattr(model, "time_with")
