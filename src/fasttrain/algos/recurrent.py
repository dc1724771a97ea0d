"""RecurrentPPO and MaskableRecurrentPPO: PPO with an LSTM or GRU, in the loops of `ppo.py`.

The LSTM states after a step are in `_last_lstm_states`, as in SB3. Minibatches consist of sequences. For exact results
the policy's own methods evaluate padded sequences, as in SB3. If rounding may differ, only the LSTM gets sequences,
many in one call. All other layers get the minibatch's rows without padding.

sb3-contrib has no such class with masks. A zip of MaskableRecurrentPPO loads by `fasttrain.MaskableRecurrentPPO`, or
by `sb3_contrib.RecurrentPPO` together with `recurrent_policies.py`, a file that imports nothing of fasttrain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import sb3_contrib
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from sb3_contrib.ppo_recurrent import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy
from stable_baselines3.common.distributions import BernoulliDistribution
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from fasttrain.algos.engine import RECURRENT, TorchEngine
from fasttrain.algos.policy_view import Evaluated, PolicyView, networks_of
from fasttrain.algos.ppo import _PPO
from fasttrain.algos.recurrent_policies import (
    CellActorCriticCnnPolicy,
    CellActorCriticPolicy,
    CellMultiInputActorCriticPolicy,
    MaskableRecurrentActorCriticCnnPolicy,
    MaskableRecurrentActorCriticPolicy,
    MaskableRecurrentMultiInputActorCriticPolicy,
)
from fasttrain.batch import each_array
from fasttrain.buffers.recurrent import Memory, RecurrentStorage, rows_of_states
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations
from fasttrain.errors import ConfigError
from fasttrain.spec.computing import check_last_minibatch

# If a policy overrides one of these methods, the policy's own methods are called, not the faster code of this file.
_PATH = ("forward", "evaluate_actions", "predict_values", "_process_sequence", "_get_action_dist_from_latent",
         "extract_features", "__call__")  # fmt: skip
_SEES_PADDING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)  # layers that padding affects
Run = Callable[[str, Tensor], Tensor]  # runs the LSTM "pi" (actor) or "vf" (critic): features (B, F) → outputs (B, H)
# sb3-contrib's policy → the policy that replaces it if `cell` is given. Stock SB3 can load all zips without `cell`.
WITH_CELLS: dict[Any, Any] = {
    MlpLstmPolicy: CellActorCriticPolicy,
    CnnLstmPolicy: CellActorCriticCnnPolicy,
    MultiInputLstmPolicy: CellMultiInputActorCriticPolicy,
}


class PaddedView(PolicyView):
    """Calls the policy's own methods, as sb3-contrib does. Minibatches are padded sequences."""

    layout = "padded"

    def act(self, observations: TensorObservations, action_masks: Tensor | None, memory: Any = None) -> Any:
        """Actions (N, ...), values (N, 1), log-probabilities (N,) and the states after the step."""
        return self.policy(observations, memory.states, self._starts(memory), **self._masks(action_masks))

    def values(self, observations: TensorObservations, memory: Any = None) -> Tensor:
        values: Tensor = self.policy.predict_values(observations, memory.states.vf, self._starts(memory))
        return values

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        sequences = batch.sequences
        values, log_probs, entropy = self.policy.evaluate_actions(
            batch.observations, self._as_numbers(batch.actions), sequences.states, sequences.episode_starts,
            **self._masks(batch.action_masks),
        )  # fmt: skip
        rows = sequences.rows
        entropy = None if entropy is None else entropy.index_select(0, rows)
        return Evaluated(values.flatten().index_select(0, rows), log_probs.index_select(0, rows), entropy)

    def _as_numbers(self, actions: Tensor) -> Tensor:
        """MultiBinary actions as floats: sb3-contrib 2.9.2 passes integers, but torch's Bernoulli needs floats."""
        return actions.float() if isinstance(self.policy.action_dist, BernoulliDistribution) else actions

    def _starts(self, memory: Any = None) -> Tensor:
        return torch.tensor(memory.episode_starts, dtype=torch.float32, device=self.policy.device)

    def _masks(self, action_masks: Tensor | None) -> dict[str, Any]:
        return {"action_masks": action_masks} if self.maskable else {}


class UnpaddedView(PaddedView):
    """Calls the policy's modules on the minibatch's rows. Only the LSTM gets the rows as sequences."""

    layout = "grouped"

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.direct = networks_of(policy, policy.action_space)

    def act(self, observations: TensorObservations, action_masks: Tensor | None, memory: Any = None) -> Any:
        before, after = states_within(memory), {}

        def run(which: str, features: Tensor) -> Tensor:
            output, after[which] = self._lstm(which)(features[None], getattr(before, which))
            return output[0]  # type: ignore[no-any-return]

        latent, values = step_outputs(self.policy, observations, run)
        states = RNNStates(after["pi"], after.get("vf", after["pi"]))
        if self.direct is not None:
            actions, log_probs = self.direct.drawn(self.policy.action_net(latent), action_masks)
            return actions, values, log_probs, states
        distribution = self.policy._get_action_dist_from_latent(latent)
        actions = distribution.get_actions()
        return actions.reshape(-1, *self.policy.action_space.shape), values, distribution.log_prob(actions), states

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        sequences = batch.sequences

        def run(which: str, features: Tensor) -> Tensor:
            return self._run_sequences(self._lstm(which), features, getattr(sequences.states, which), sequences.groups)

        latent, values = step_outputs(self.policy, batch.observations, run)
        if self.direct is not None:
            logits = self.policy.action_net(latent)
            rated = self.direct.rate(logits, batch.actions, batch.action_masks, entropy_gradient)
            return Evaluated(values.flatten(), *rated, logits)
        distribution = self.policy._get_action_dist_from_latent(latent)
        log_probs = distribution.log_prob(self._as_numbers(batch.actions))
        return Evaluated(values.flatten(), log_probs, distribution.entropy())

    def _run_sequences(self, lstm: Any, features: Tensor, states: Any, groups: Any) -> Tensor:
        """Run an LSTM on sequences: rows (B, F) → outputs (B, H). `states` (L, S, H): the first of each sequence."""
        outputs = []
        for group in groups:
            steps, count = group.shape
            rows = features[group.rows]
            side_by_side = rows.new_zeros(steps * count, rows.shape[1]).index_copy(0, group.places, rows)
            first_states = states if len(groups) == 1 else rows_of_states(states, group.sequences)
            output, _ = lstm(side_by_side.view(steps, count, -1), first_states)
            outputs.append(output.flatten(0, 1).index_select(0, group.places))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _lstm(self, which: str) -> Any:
        return self.policy.lstm_actor if which == "pi" else self.policy.lstm_critic


def step_outputs(policy: Any, observations: TensorObservations, run: Run) -> tuple[Tensor, Tensor]:
    """The input of the actor's last layer (B, W), and values (B, 1). `run` calls an LSTM."""
    features = policy.extract_features(observations)
    pi_features, vf_features = (features, features) if policy.share_features_extractor else features
    latent_pi = run("pi", pi_features)
    if policy.lstm_critic is not None:
        latent_vf = run("vf", vf_features)
    else:
        latent_vf = latent_pi.detach() if policy.shared_lstm else policy.critic(vf_features)
    extractor = policy.mlp_extractor
    return extractor.forward_actor(latent_pi), policy.value_net(extractor.forward_critic(latent_vf))


def states_within(memory: Memory) -> RNNStates:
    """The LSTM states of `memory`, set to zero where an episode begins."""
    states: RNNStates = memory.states
    if memory.episode_starts.any():
        within = torch.from_numpy(1.0 - memory.episode_starts).to(states.pi[0])[:, None]
        states = each_array(lambda part: part * within, states)
    return states


def must_be_padded(policy: Any) -> bool:
    """Whether SB3's padding is necessary: the policy overrides methods, or has layers that padding affects."""
    masked = isinstance(policy, MaskableRecurrentActorCriticPolicy)
    base: Any = MaskableRecurrentActorCriticPolicy if masked else RecurrentActorCriticPolicy
    same = all(getattr(type(policy), name) is getattr(base, name) for name in _PATH)
    if not same or any(name in vars(policy) for name in _PATH) or policy._forward_hooks or policy._forward_pre_hooks:
        return True
    return policy.lstm_actor.dropout > 0 or any(isinstance(module, _SEES_PADDING) for module in policy.modules())


class RecurrentEngine(TorchEngine):
    """A recurrent actor-critic on PyTorch."""

    float32_only = RECURRENT

    def new_view(self) -> PaddedView:
        exact = self.exact or must_be_padded(self.policy)
        return PaddedView(self.policy) if exact else UnpaddedView(self.policy)


class _Recurrent:
    """Adds LSTM states to `_PPO`. A subclass has this base class before `_PPO`."""

    _torch_engine: Any = RecurrentEngine
    _storage: Any = RecurrentStorage
    unsquashes = False  # as in SB3's recurrent loop: squashed actions of gSDE are clipped, not unscaled
    _last_lstm_states: Any  # `RNNStates` after the last step

    def _setup_model(self: Any) -> None:
        if self.normalize_advantage:
            check_last_minibatch(self.batch_size, self.n_envs, self.n_steps)
        if "cell" in self.policy_kwargs:
            self.policy_class = _with_cells(self.policy_class, self.policy_kwargs)
        super()._setup_model()  # type: ignore[misc]  # of PPO
        self._last_lstm_states = self.blank_memory(self.n_envs).states

    def memory(self: Any) -> Memory:
        return Memory(self._last_lstm_states, self._last_episode_starts)

    def blank_memory(self: Any, num_envs: int) -> Memory:
        """Zeroed LSTM states of `num_envs` new episodes."""
        further = self.remembered()
        return Memory.blank(num_envs, further["state_shape"], self.device, further["keeps_cells"])

    def remember(self, states: RNNStates) -> Memory:
        """Store the LSTM states after a step, and return them as a `Memory`."""
        self._last_lstm_states = states
        return self.memory()

    def remembered(self: Any) -> dict[str, Any]:
        lstm, own_critic = self.policy.lstm_actor, self.policy.lstm_critic is not None
        shape = lstm.num_layers, lstm.hidden_size
        return {"state_shape": shape, "own_critic": own_critic, "keeps_cells": isinstance(lstm, nn.LSTM)}


class RecurrentPPO(_Recurrent, _PPO, sb3_contrib.RecurrentPPO):
    """Drop-in for `sb3_contrib.RecurrentPPO`; `engine="kernels"` computes LSTM and MLP in compiled kernels."""

    _masked = False


class MaskableRecurrentPPO(_Recurrent, _PPO, sb3_contrib.RecurrentPPO):
    """RecurrentPPO with action masks, for Discrete, MultiDiscrete and MultiBinary actions.

    A state without a legal action raises an `EnvError`.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": MaskableRecurrentActorCriticPolicy,
        "CnnLstmPolicy": MaskableRecurrentActorCriticCnnPolicy,
        "MultiInputLstmPolicy": MaskableRecurrentMultiInputActorCriticPolicy,
    }
    _masked = True

    def _setup_model(self) -> None:
        if isinstance(self.action_space, spaces.Box):
            raise ConfigError(f"{self.action_space} actions have no masks: use RecurrentPPO")
        if not issubclass(self.policy_class, MaskableRecurrentActorCriticPolicy):
            raise ConfigError(
                f"policy={self.policy_class.__name__} takes no masks: derive it from "
                "fasttrain.algos.recurrent_policies.MaskableRecurrentActorCriticPolicy"
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
        """Actions (only legal ones if masks (N, A) are given), and the `state` for the next call."""
        policy: Any = self.policy
        return policy.predict(observation, state, episode_start, deterministic, action_masks)


def _with_cells(policy: Any, asked: dict[str, Any]) -> Any:
    """The policy class that replaces `policy` and takes the argument `cell`.

    Raises:
        ConfigError: no such class exists, or `lstm_kwargs` is given for a GRU.
    """
    kind, name = WITH_CELLS.get(policy, policy), asked["cell"]
    if not issubclass(kind, CellActorCriticPolicy):
        raise ConfigError(
            f"cell={name} with policy={policy.__name__}, which has an LSTM: derive it from "
            "fasttrain.algos.recurrent_policies.CellActorCriticPolicy, or remove cell"
        )
    if name != "lstm" and asked.get("lstm_kwargs"):
        raise ConfigError(f"lstm_kwargs={asked['lstm_kwargs']} has no effect with cell={name}: remove one of them")
    return kind
