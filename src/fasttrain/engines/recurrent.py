"""A policy that remembers acts and learns: the heads of recurrent actor-critics, and their engine.

Exactly as stock, by the policy's own methods on padded sequences; or, where sums may be taken in another order, without
padding between networks and with one call of the LSTM for a group of sequences. Stock walks step by step through every
minibatch in which an episode starts; to an LSTM a state that is zero where the episode begins is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.distributions import BernoulliDistribution
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor, nn

from fasttrain.batch import BoolArray, Float32Array, each_array
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations
from fasttrain.buffers.sequences import Memory, rows_of_states
from fasttrain.engines.compiling import Compiler
from fasttrain.engines.engine import Acted, Engine, EngineSettings, Stored
from fasttrain.engines.heads import Head, choices_of
from fasttrain.engines.losses import Evaluated
from fasttrain.engines.recurrent_policies import MaskableRecurrentActorCriticPolicy
from fasttrain.engines.torch import TorchEngine
from fasttrain.errors import ConfigError

# A policy that overrides one of these computes in a way of its own, and its own methods are called.
_PATH = ("forward", "evaluate_actions", "predict_values", "_process_sequence", "_get_action_dist_from_latent",
         "extract_features", "__call__")  # fmt: skip
_MEETS_PADDING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)  # padding is data to these
Run = Callable[[str, Tensor], Tensor]  # "pi" or "vf" and features (B, F) → what the LSTM makes of them (B, H)


class PaddedHead(Head):
    """The policy's own methods, called as sb3-contrib calls them."""

    layout = "padded"  # of the sequences that it rates

    def act(self, observations: TensorObservations, action_masks: Tensor | None, memory: Any = None) -> Any:
        """Actions (N, ...), values (N, 1), log-probabilities (N,) and the states after."""
        return self.policy(observations, memory.states, self._starts(memory), **self._masks(action_masks))

    def values(self, observations: TensorObservations, memory: Any = None) -> Tensor:
        values: Tensor = self.policy.predict_values(observations, memory.states.vf, self._starts(memory))
        return values

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        laid = batch.sequences
        values, log_probs, entropy = self.policy.evaluate_actions(
            batch.observations, self._rateable(batch.actions), laid.states, laid.episode_starts,
            **self._masks(batch.action_masks),
        )  # fmt: skip
        kept = laid.kept
        entropy = None if entropy is None else entropy.index_select(0, kept)
        return Evaluated(values.flatten().index_select(0, kept), log_probs.index_select(0, kept), entropy)

    def _rateable(self, actions: Tensor) -> Tensor:
        """Bits without masks as numbers: sb3-contrib 2.9.2 hands its Bernoulli integers, which torch refuses."""
        return actions.float() if isinstance(self.policy.action_dist, BernoulliDistribution) else actions

    def _starts(self, memory: Memory) -> Tensor:
        return torch.tensor(memory.episode_starts, dtype=torch.float32, device=self.policy.device)

    def _masks(self, action_masks: Tensor | None) -> dict[str, Any]:
        return {"action_masks": action_masks} if self.maskable else {}


class UnpaddedHead(PaddedHead):
    """The policy's own modules: rows as they are, side by side as sequences only where an LSTM reads them."""

    layout = "grouped"

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.choices = choices_of(policy, policy.action_space)

    def act(self, observations: TensorObservations, action_masks: Tensor | None, memory: Any = None) -> Any:
        before, after = _resumed(memory), {}

        def run(which: str, features: Tensor) -> Tensor:
            output, after[which] = self._lstm(which)(features[None], getattr(before, which))
            found: Tensor = output[0]
            return found

        latent, values = step_outputs(self.policy, observations, run)
        states = RNNStates(after["pi"], after.get("vf", after["pi"]))
        if self.choices is not None:
            actions, log_probs = self.choices.drawn(self.policy.action_net(latent), action_masks)
            return actions, values, log_probs, states
        distribution = self.policy._get_action_dist_from_latent(latent)
        actions = distribution.get_actions()
        return actions.reshape(-1, *self.policy.action_space.shape), values, distribution.log_prob(actions), states

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        laid = batch.sequences

        def run(which: str, features: Tensor) -> Tensor:
            return self._sequenced(self._lstm(which), features, getattr(laid.states, which), laid)

        latent, values = step_outputs(self.policy, batch.observations, run)
        if self.choices is not None:
            logits = self.policy.action_net(latent)
            rated = self.choices.rate(logits, batch.actions, batch.action_masks, entropy_gradient)
            return Evaluated(values.flatten(), *rated, logits)
        distribution = self.policy._get_action_dist_from_latent(latent)
        log_probs = distribution.log_prob(self._rateable(batch.actions))
        return Evaluated(values.flatten(), log_probs, distribution.entropy())

    def _sequenced(self, lstm: Any, features: Tensor, states: Any, laid: Any) -> Tensor:  # (B, F), (L, S, H) → (B, H)
        """What an LSTM makes of a minibatch's sequences."""
        found = []
        for group in laid.groups:
            steps, count = group.shape
            rows = features[group.rows]
            side_by_side = rows.new_zeros(steps * count, rows.shape[1]).index_copy(0, group.places, rows)
            begun = states if len(laid.groups) == 1 else rows_of_states(states, group.sequences)
            output, _ = lstm(side_by_side.view(steps, count, -1), begun)
            found.append(output.flatten(0, 1).index_select(0, group.places))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _lstm(self, which: str) -> Any:
        return self.policy.lstm_actor if which == "pi" else self.policy.lstm_critic


def step_outputs(policy: Any, observations: TensorObservations, run: Run) -> tuple[Tensor, Tensor]:
    """What the actor's last layer reads, (B, W), and values (B, 1); `run` is the LSTMs' part."""
    features = policy.extract_features(observations)
    pi_features, vf_features = (features, features) if policy.share_features_extractor else features
    latent_pi = run("pi", pi_features)
    if policy.lstm_critic is not None:
        latent_vf = run("vf", vf_features)
    else:
        latent_vf = latent_pi.detach() if policy.shared_lstm else policy.critic(vf_features)
    extractor = policy.mlp_extractor
    return extractor.forward_actor(latent_pi), policy.value_net(extractor.forward_critic(latent_vf))


def _resumed(memory: Memory) -> RNNStates:
    """The states, zero where an episode begins."""
    states: RNNStates = memory.states
    if memory.episode_starts.any():
        fresh = torch.from_numpy(1.0 - memory.episode_starts).to(states.pi[0])[:, None]
        states = each_array(lambda part: part * fresh, states)
    return states


def must_be_padded(policy: Any) -> bool:
    """Whether sequences must be laid out as stock does it: for methods of its own, or for layers that read padding."""
    masked = isinstance(policy, MaskableRecurrentActorCriticPolicy)
    base: Any = MaskableRecurrentActorCriticPolicy if masked else RecurrentActorCriticPolicy
    same = all(getattr(type(policy), name) is getattr(base, name) for name in _PATH)
    if not same or any(name in vars(policy) for name in _PATH) or policy._forward_hooks or policy._forward_pre_hooks:
        return True
    return policy.lstm_actor.dropout > 0 or any(isinstance(module, _MEETS_PADDING) for module in policy.modules())


def check_settings(settings: EngineSettings) -> None:
    """Refuse what no engine of a recurrent policy does.

    Raises:
        ConfigError: such a setting is there.
    """
    if settings.amp_dtype is not None or settings.gradient_accumulation > 1 or settings.compile_mode is not None:
        raise ConfigError(
            "a policy that remembers computes in float32, uncompiled, each minibatch in one part: leave amp_dtype, "
            "compile_mode and gradient_accumulation out"
        )


class RecurrentEngine(TorchEngine):
    """Of a recurrent actor-critic; `memory` is a `Memory`, what comes of acting the states after it."""

    def __init__(
        self, policy: Any, settings: EngineSettings, before: Engine | None = None, compiler: Compiler | None = None
    ) -> None:
        check_settings(settings)
        super().__init__(policy, settings, before, compiler)

    def new_head(self) -> PaddedHead:
        exact = self.settings.exact or must_be_padded(self.policy)
        return PaddedHead(self.policy) if exact else UnpaddedHead(self.policy)

    def batches(self, data: Any, batch_size: int | None) -> Iterator[RolloutBatch]:
        found: Iterator[RolloutBatch] = data.sequences(batch_size, self.head.layout)
        return found

    def act(self, observations: Any, action_masks: BoolArray | None, memory: Any = None) -> Acted:
        with torch.no_grad():
            seen = self.transfer.observations(observations)
            masks = None if action_masks is None else self.transfer.masks(action_masks)
            actions, values, log_probs, after = self._drawn(seen, masks, memory)
        stored = Stored(seen, actions, values, log_probs, masks, memory.states)
        return Acted(self.transfer.actions(actions), stored, after)

    def values(self, observations: Any, memory: Any = None) -> Float32Array:
        with torch.no_grad():
            seen = obs_as_tensor(observations, self.device)
            found: Float32Array = self.head.values(seen, memory).cpu().numpy()
        return found.reshape(-1)
