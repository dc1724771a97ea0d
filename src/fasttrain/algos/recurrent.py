"""RecurrentPPO and MaskableRecurrentPPO: PPO's loops with memory.

What is remembered between two steps is `_last_lstm_states`, SB3's name; the loops of `ppo.py` hand it to the engine and
keep what comes back. sb3-contrib has no masked class: a zip of ours loads by `fasttrain.MaskableRecurrentPPO`, or by
`sb3_contrib.RecurrentPPO` with the policy of `engines/recurrent_policies.py`, one file that needs nothing of fasttrain.
"""

from __future__ import annotations

from typing import Any, ClassVar

import sb3_contrib
from gymnasium import spaces
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.ppo import _PPO, collect
from fasttrain.buffers.sequences import Memory
from fasttrain.engines.engine import Engine
from fasttrain.engines.packed_lstm import RecurrentKernelEngine, why_no_kernels
from fasttrain.engines.recurrent import RecurrentEngine
from fasttrain.engines.recurrent_policies import (
    MaskableRecurrentActorCriticCnnPolicy,
    MaskableRecurrentActorCriticPolicy,
    MaskableRecurrentMultiInputActorCriticPolicy,
)
from fasttrain.engines.sequence_kernels import SequenceKernelEngine, why_not
from fasttrain.errors import ConfigError


class RecurrentPPO(_PPO, sb3_contrib.RecurrentPPO):
    """Drop-in for `sb3_contrib.RecurrentPPO`; `engine="kernels"` takes sequences through compiled kernels, unpadded."""

    _kinds: ClassVar[dict[str, type[Engine]]] = {"torch": RecurrentEngine, "kernels": RecurrentKernelEngine}
    _masked = False
    unsquashes = False  # stock's loop only clips what gSDE has squashed
    _last_lstm_states: RNNStates  # type: ignore[assignment]

    def _setup_model(self) -> None:
        _check_last_minibatch(self)
        super()._setup_model()

    def why_not(self, kind: str) -> str:
        return why_no_kernels(self.policy) and why_not(self.policy) if kind == "kernels" else ""

    def _engine_class(self, kind: str) -> type[Engine]:
        """Kernels through and through where they know every layer, else for the LSTMs' sequences alone."""
        return SequenceKernelEngine if kind == "kernels" and not why_not(self.policy) else super()._engine_class(kind)

    def memory(self) -> Memory:
        starts: Any = self._last_episode_starts
        return Memory(self._last_lstm_states, starts)

    def blank_memory(self, num_envs: int) -> Memory:
        return Memory.blank(num_envs, self.remembered()["state_shape"], self.device)

    def remember(self, states: RNNStates) -> None:
        self._last_lstm_states = states

    def remembered(self) -> dict[str, Any]:
        lstm: Any = self.policy.lstm_actor
        own_critic = self.policy.lstm_critic is not None
        return {"state_shape": (lstm.num_layers, lstm.hidden_size), "own_critic": own_critic}

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        with self.collector.clock.phase("buffer"):
            return collect(self, env, callback, n_rollout_steps, use_masking=self._masked)


class MaskableRecurrentPPO(RecurrentPPO):
    """RecurrentPPO with action masks, which sb3-contrib has not; for Discrete, MultiDiscrete and MultiBinary actions.

    A state without a legal action is an `EnvError`, not a random guess.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": MaskableRecurrentActorCriticPolicy,
        "CnnLstmPolicy": MaskableRecurrentActorCriticCnnPolicy,
        "MultiInputLstmPolicy": MaskableRecurrentMultiInputActorCriticPolicy,
    }
    _masked = True

    def _setup_model(self) -> None:
        if isinstance(self.action_space, spaces.Box):
            raise ConfigError(f"{self.action_space} actions have no masks: take RecurrentPPO")
        if not issubclass(self.policy_class, MaskableRecurrentActorCriticPolicy):
            raise ConfigError(
                f"policy={self.policy_class.__name__} takes no masks: derive it from "
                "fasttrain.engines.recurrent_policies.MaskableRecurrentActorCriticPolicy"
            )
        super()._setup_model()

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> Any:
        """Actions, legal ones where masks (N, A) are given, and the states to hand in at the next step."""
        policy: Any = self.policy
        return policy.predict(observation, state, episode_start, deterministic, action_masks)


def _check_last_minibatch(model: Any) -> None:
    """Refuse a last minibatch of one row, whose normalised advantage is NaN in stock, and with it all weights.

    Raises:
        ConfigError: there would be one.
    """
    total = model.n_steps * model.n_envs
    if model.normalize_advantage and model.batch_size is not None and total % model.batch_size == 1:
        raise ConfigError(
            f"batch_size={model.batch_size} leaves a last minibatch of one of {model.n_steps} × {model.n_envs} steps, "
            "whose advantage cannot be normalised: take another batch_size, or normalize_advantage=False"
        )
