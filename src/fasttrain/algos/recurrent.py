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
from sb3_contrib.ppo_recurrent import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from fasttrain.algos.ppo import _PPO, collect
from fasttrain.buffers.sequences import Memory
from fasttrain.engines.engine import Engine
from fasttrain.engines.losses import value_loss_of_square
from fasttrain.engines.recurrent import RecurrentEngine
from fasttrain.engines.recurrent_policies import (
    CellActorCriticCnnPolicy,
    CellActorCriticPolicy,
    CellMultiInputActorCriticPolicy,
    MaskableRecurrentActorCriticCnnPolicy,
    MaskableRecurrentActorCriticPolicy,
    MaskableRecurrentMultiInputActorCriticPolicy,
)
from fasttrain.engines.sequence_kernels import SequenceKernelEngine
from fasttrain.errors import ConfigError
from fasttrain.spec.computing import check_last_minibatch

# Only where a cell is asked for: of all others the zip stays stock's.
WITH_CELLS: dict[Any, Any] = {
    MlpLstmPolicy: CellActorCriticPolicy,
    CnnLstmPolicy: CellActorCriticCnnPolicy,
    MultiInputLstmPolicy: CellMultiInputActorCriticPolicy,
}


class RecurrentPPO(_PPO, sb3_contrib.RecurrentPPO):
    """Drop-in for `sb3_contrib.RecurrentPPO`; `engine="kernels"` computes an LSTM before an MLP in compiled kernels."""

    _kinds: ClassVar[dict[str, type[Engine]]] = {"torch": RecurrentEngine, "kernels": SequenceKernelEngine}
    _masked = False
    _value_loss = staticmethod(value_loss_of_square)
    unsquashes = False  # stock's loop only clips what gSDE has squashed
    _last_lstm_states: RNNStates  # type: ignore[assignment]

    def _setup_model(self) -> None:
        if self.normalize_advantage:
            check_last_minibatch(self.batch_size, self.n_envs, self.n_steps)
        if "cell" in self.policy_kwargs:
            self.policy_class = _with_cells(self.policy_class, self.policy_kwargs)
        super()._setup_model()
        self._last_lstm_states = self.blank_memory(self.n_envs).states

    def memory(self) -> Memory:
        starts: Any = self._last_episode_starts
        return Memory(self._last_lstm_states, starts)

    def blank_memory(self, num_envs: int) -> Memory:
        told = self.remembered()
        return Memory.blank(num_envs, told["state_shape"], self.device, told["keeps_cells"])

    def remember(self, states: RNNStates) -> None:
        self._last_lstm_states = states

    def remembered(self) -> dict[str, Any]:
        lstm: Any = self.policy.lstm_actor
        own_critic = self.policy.lstm_critic is not None
        shape, keeps_cells = (lstm.num_layers, lstm.hidden_size), isinstance(lstm, nn.LSTM)
        return {"state_shape": shape, "own_critic": own_critic, "keeps_cells": keeps_cells}

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


def _with_cells(policy: Any, asked: dict[str, Any]) -> Any:
    """The class of the same policy that takes a cell by its name.

    Raises:
        ConfigError: there is none, or the LSTM's own arguments are there too.
    """
    found, name = WITH_CELLS.get(policy, policy), asked["cell"]
    if not issubclass(found, CellActorCriticPolicy):
        raise ConfigError(
            f"cell={name} with policy={policy.__name__}, which has an LSTM: derive it from "
            "fasttrain.engines.recurrent_policies.CellActorCriticPolicy, or leave cell out"
        )
    if name != "lstm" and asked.get("lstm_kwargs"):
        raise ConfigError(f"cell={name} with lstm_kwargs={asked['lstm_kwargs']}, which are an LSTM's: leave one out")
    return found
