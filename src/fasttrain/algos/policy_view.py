"""How a policy draws actions and computes their log-probabilities: with its own modules, without distribution objects.

`view_of` chooses a view for a policy. For Discrete, MultiDiscrete, masked MultiBinary and continuous actions of an
unchanged SB3 policy this is a `NetworkView`. For everything else (gSDE, MultiBinary without masks, a policy that
overrides a method of `_ACTION_PATH`) a `StockView` calls the policy's own `forward` and `evaluate_actions`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.maskable.distributions import (
    MaskableBernoulliDistribution,
    MaskableCategoricalDistribution,
    MaskableDistribution,
    MaskableMultiCategoricalDistribution,
)
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn

from fasttrain.algos.devices import Precision
from fasttrain.buffers.rollout import RolloutBatch, TensorObservations

# If a policy overrides one of these methods, the policy's own methods are called, not the faster code of this file.
_ACTION_PATH = ("forward", "evaluate_actions", "_get_action_dist_from_latent", "__call__")
_SINGLE = (CategoricalDistribution, MaskableCategoricalDistribution)
_MULTI = (MultiCategoricalDistribution, MaskableMultiCategoricalDistribution, MaskableBernoulliDistribution)

Outputs = tuple[Tensor, Tensor]  # logits or means (B, A), and values (B, 1)
OUTPUT = "the policy's output (logits or means)"  # how messages name the output
ILLEGAL_LOGIT = -1e8  # sb3-contrib's stand-in for minus infinity
LOST = f"{OUTPUT} is not finite although its inputs are: its weights are too large; lower algo.learning_rate"


class Evaluated(NamedTuple):
    """What the policy computes for a minibatch with its present parameters. The tensors carry gradients."""

    values: Tensor  # (B,)
    log_probs: Tensor  # (B,) of the stored actions
    entropy: Tensor | None  # (B,); None if the entropy has no closed form
    logits: Tensor | None = None  # (B, A) of the action net, before masks, or a Gaussian's means; None: unknown


class PolicyView(ABC):
    """Draws actions. Also computes log-probabilities and entropies of actions that were drawn earlier.

    Args:
        precision: the precision in which the networks compute; None: float32.
        dims: sizes of the sub-actions; None if there is only one.
    """

    layout = ""  # "padded" or "grouped" sequences in a minibatch; empty: not recurrent

    def __init__(self, policy: Any, precision: Precision | None = None, dims: Sequence[int] | None = None) -> None:
        self.policy, self.precision, self.dims = policy, precision, dims
        self.maskable = isinstance(getattr(policy, "action_dist", None), MaskableDistribution)

    @abstractmethod
    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions (N, ...), values (N, 1) and log-probabilities (N,) for observations (N, ...), masks (N, A) bool."""

    def values(self, observations: TensorObservations) -> Tensor:
        """Values (N, 1) of observations for which no action is drawn."""
        return self.policy.predict_values(observations)  # type: ignore[no-any-return]

    @abstractmethod
    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        """Evaluate a minibatch's actions. Without `entropy_gradient` the entropy is only logged and has no gradient."""


class NetworkView(PolicyView):
    """Calls the policy's networks, and applies the distribution's operations to their outputs."""

    acting: Callable[[TensorObservations], Outputs] | None = None  # a compiled form of `self.outputs`, for `act`

    @abstractmethod
    def drawn(self, outputs: Tensor, action_masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions (N,) or (N, K) drawn from the action net's outputs (N, A), and their log-probabilities (N,)."""

    @abstractmethod
    def rate(
        self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B,) of `actions` and entropies (B,), from the action net's outputs (B, A)."""

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        outputs, values = (self.acting or self.outputs)(observations)
        actions, log_probs = self.drawn(outputs, action_masks)
        return actions, values, log_probs

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        outputs, values = self.outputs(batch.observations)
        rated = self.rate(outputs, batch.actions, batch.action_masks, entropy_gradient)
        return Evaluated(values.flatten(), *rated, outputs)

    def outputs(self, observations: TensorObservations) -> Outputs:
        """Outputs of the action net (B, A) and values (B, 1), always float32."""
        policy, extractor, precision = self.policy, self.policy.mlp_extractor, self.precision
        with nullcontext() if precision is None else precision.autocast():
            features = policy.extract_features(observations)
            if policy.share_features_extractor:
                latent_pi, latent_vf = extractor(features)
            else:
                latent_pi, latent_vf = extractor.forward_actor(features[0]), extractor.forward_critic(features[1])
            outputs, values = policy.action_net(latent_pi), policy.value_net(latent_vf)
        return (outputs, values) if precision is None else (outputs.float(), values.float())


class CategoricalView(NetworkView):
    """One categorical action per row (`self.dims` is None), or K sub-actions. The action net's outputs are logits."""

    def drawn(self, outputs: Tensor, action_masks: Tensor | None) -> tuple[Tensor, Tensor]:
        action_masks = self.masks_for(outputs, action_masks)
        return sample(outputs, action_masks) if self.dims is None else multi_sample(outputs, self.dims, action_masks)

    def rate(
        self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        action_masks = self.masks_for(outputs, action_masks)
        if self.dims is None:
            return log_prob_and_entropy(outputs, actions, action_masks, entropy_gradient)
        return multi_log_prob_and_entropy(outputs, actions, self.dims, action_masks, entropy_gradient)

    def masks_for(self, logits: Tensor, action_masks: Tensor | None) -> Tensor | None:
        """The masks. A maskable policy gets all-legal ones for None: sb3-contrib normalises logits twice even then."""
        return torch.ones_like(logits, dtype=torch.bool) if action_masks is None and self.maskable else action_masks


class GaussianView(NetworkView):
    """Continuous actions (B, A) of a diagonal Gaussian, by the operations of torch's Normal.

    The action net's outputs are the means. `log_std` (A,) is a parameter of the policy.
    """

    def drawn(self, outputs: Tensor, action_masks: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = self._scale(outputs)
        actions = outputs + torch.empty_like(outputs).normal_() * scale
        if not torch.isfinite(actions.sum()):
            raise ValueError("Expected parameters of a Gaussian that are finite")  # torch's Normal raises the same
        return actions, gaussian_log_prob(outputs, scale, actions)

    def rate(
        self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        scale = self._scale(outputs)
        log_probs = gaussian_log_prob(outputs, scale, actions)  # before the entropy, as in SB3, for the same rounding
        return log_probs, (0.5 + 0.5 * math.log(2 * math.pi) + torch.log(scale)).sum(dim=1)

    def _scale(self, means: Tensor) -> Tensor:
        return torch.ones_like(means) * self.policy.log_std.exp()  # type: ignore[no-any-return]


class StockView(PolicyView):
    """The policy's own methods, called as SB3 calls them."""

    def __init__(self, policy: Any, action_space: spaces.Space[Any], precision: Precision | None = None) -> None:
        super().__init__(policy, precision)
        # SB3's rollout buffer returns all actions except Discrete as float32. sb3-contrib's maskable buffer does not.
        self.float_actions = not self.maskable and not isinstance(action_space, spaces.Discrete)

    def act(self, observations: TensorObservations, action_masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        masks = {"action_masks": None if action_masks is None else action_masks.cpu().numpy()} if self.maskable else {}
        with self._networks():
            actions, values, log_probs = self.policy(observations, **masks)
        return actions, values, log_probs

    def evaluate(self, batch: RolloutBatch, entropy_gradient: bool) -> Evaluated:
        actions = batch.actions.float() if self.float_actions else batch.actions
        masks = {"action_masks": batch.action_masks} if self.maskable else {}
        with self._networks():
            values, log_probs, entropy = self.policy.evaluate_actions(batch.observations, actions, **masks)
        return Evaluated(values.flatten(), log_probs, entropy)

    def _networks(self) -> Any:
        return nullcontext() if self.precision is None else self.precision.inside(self.policy)


def view_of(policy: nn.Module, action_space: spaces.Space[Any], precision: Precision | None = None) -> PolicyView:
    """The fastest view of the policy. Its numbers are those of the policy's own methods, except for `precision`."""
    direct = networks_of(policy, action_space, precision) if is_unchanged(policy) else None
    return direct or StockView(policy, action_space, precision)


def networks_of(policy: Any, action_space: spaces.Space[Any], precision: Precision | None = None) -> NetworkView | None:
    """A view that calls the policy's networks; None unless actions are categorical or of a diagonal Gaussian."""
    kind: Any = type(policy.action_dist)
    if kind in _SINGLE:
        return CategoricalView(policy, precision)
    if kind is DiagGaussianDistribution and len(action_space.shape or ()) == 1:
        return GaussianView(policy, precision)
    return CategoricalView(policy, precision, action_dims(action_space)) if kind in _MULTI else None


def is_unchanged(policy: nn.Module) -> bool:
    """Whether the methods `_ACTION_PATH` of `policy` are SB3's own, in class and instance, and it has no hooks."""
    base = MaskableActorCriticPolicy if isinstance(policy, MaskableActorCriticPolicy) else ActorCriticPolicy
    if not isinstance(policy, base):
        return False
    same_class = all(getattr(type(policy), name) is getattr(base, name) for name in _ACTION_PATH)
    hooked = policy._forward_hooks or policy._forward_pre_hooks or policy._backward_hooks
    return same_class and not hooked and not any(name in vars(policy) for name in _ACTION_PATH)


def action_dims(action_space: spaces.Space[Any]) -> list[int]:
    """Sizes of the categorical sub-actions of a maskable action space; their sum is the width of its mask."""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(size) for size in action_space.nvec]
    if isinstance(action_space, spaces.MultiBinary):
        return [2] * int(np.prod(action_space.n))
    raise TypeError(f"{type(action_space).__name__} actions have no masks")


def clip_actions(model: Any, actions: NDArray[Any]) -> NDArray[Any]:
    """The actions that the envs get: Box actions within the bounds, all others as drawn."""
    space = model.action_space
    if not isinstance(space, spaces.Box):
        return actions
    if model.policy.squash_output and getattr(model, "unsquashes", True):
        return model.policy.unscale_action(actions)  # type: ignore[no-any-return]
    return np.clip(actions, space.low, space.high)  # type: ignore[no-any-return]


# --- Distributions as functions of tensors. Every value and every gradient is what SB3 and sb3-contrib compute, by the
# same floating-point operations in the same order. B rows, A actions, K sub-actions of a MultiDiscrete space.


def log_normalize(logits: Tensor, action_masks: Tensor | None = None) -> Tensor:  # (..., A) each → (..., A)
    """Logits shifted so that their exponentials sum to one; with masks, once more for the legal actions alone."""
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    return log_probs if action_masks is None else masked_log_normalize(log_probs, as_legal(action_masks))


def masked_log_normalize(logits: Tensor, legal: Tensor) -> Tensor:  # (..., A), (..., A) float, 1: legal → (..., A)
    """`log_normalize(where(legal, logits, -1e8))`, bit for bit, in a quarter of the time.

    `torch.where` takes 434 µs for 2,048 × 86; a multiply-add by a 0/1 mask is vectorized and takes 28 µs. `exp` is slow
    for numbers below -88 (1,290 µs, not 150), so illegal entries are computed as exp(0) and set to zero afterwards. A
    row without a legal action is 0 everywhere and has no gradient. In sb3-contrib such a row is -8 with 55 or more
    actions, because -1e8 + log A is rounded there.
    """
    masked = torch.addcmul((legal - 1.0).mul_(-ILLEGAL_LOGIT), logits, legal)
    largest = masked.amax(-1, keepdim=True)
    total = (masked - largest).mul_(legal).exp_().mul_(legal).sum(-1, keepdim=True).clamp_(min=1.0)
    return masked - total.log_().add_(largest)


def as_legal(action_masks: Tensor) -> Tensor:  # (..., A) bool → (..., A) float32
    """The mask as a 0/1 factor. For 2,048 × 86 the cast from uint8 takes 10 µs, from bool 58 µs."""
    compiling = torch.compiler.is_compiling()  # if so, no view: torch 2.11 cannot compile it, but fuses the cast
    return (action_masks if compiling else action_masks.view(torch.uint8)).to(torch.float32)


class _LogProbAndEntropy(torch.autograd.Function):
    """Log-probability and entropy of categorical actions with an explicit gradient.

    The gradient adds its terms in autograd's order, so that it equals the gradient of SB3's graph bit for
    bit. Without `entropy_gradient` it leaves out the terms that SB3 would multiply by `ent_coef = 0`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, actions: Tensor, action_masks: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        legal = None if action_masks is None else as_legal(action_masks)
        first = log_normalize(logits)
        log_probs = first if legal is None else masked_log_normalize(first, legal)
        probs = torch.softmax(log_probs, -1)
        entropy = -(log_probs * probs).sum(-1)
        index = actions.unsqueeze(-1)
        ctx.save_for_backward(first, log_probs, probs, index, legal)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs.gather(-1, index).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        first, log_probs, probs, index, legal = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        if ctx.entropy_gradient:
            outer = -grad_entropy.unsqueeze(-1)
            grad = outer * probs
            grad += torch._softmax_backward_data(outer * log_probs, probs, -1, probs.dtype)
        else:
            grad = torch.zeros_like(log_probs)
        grad.scatter_add_(-1, index, grad_log_prob.unsqueeze(-1))
        if legal is not None:
            grad_normalizer = -grad.sum(-1, keepdim=True)
            grad = (log_probs * legal).exp_().mul_(grad_normalizer).add_(grad).mul_(legal)
        grad_normalizer = -grad.sum(-1, keepdim=True)
        return first.exp().mul_(grad_normalizer).add_(grad), None, None, None


def log_prob_and_entropy(
    logits: Tensor,  # (B, A) raw network output
    actions: Tensor,  # (B,) int64
    action_masks: Tensor | None = None,  # (B, A) bool
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:  # (B,), (B,)
    """Log-probabilities of the actions taken and the entropy of each row."""
    return _LogProbAndEntropy.apply(logits, actions, action_masks, entropy_gradient)  # type: ignore[no-any-return, no-untyped-call]


def multi_log_prob_and_entropy(
    logits: Tensor,  # (B, sum of dims)
    actions: Tensor,  # (B, K) int64
    dims: Sequence[int],  # (K,) sizes of the sub-actions
    action_masks: Tensor | None = None,  # (B, sum of dims) bool
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:  # (B,), (B,)
    """Log-probabilities and entropies, summed over K categorical sub-actions (MultiBinary: of two choices)."""
    if len(set(dims)) == 1:  # equal sizes: one call on (B, K, A / K)
        shape = (len(logits), len(dims), dims[0])
        masks = None if action_masks is None else action_masks.view(shape)
        log_prob, entropy = log_prob_and_entropy(logits.view(shape), actions, masks, entropy_gradient)
        return log_prob.sum(1), entropy.sum(1)
    rated = [
        log_prob_and_entropy(part, action, mask, entropy_gradient)
        for (part, mask), action in zip(by_sub_action(logits, dims, action_masks), actions.unbind(1), strict=True)
    ]
    return torch.stack([pair[0] for pair in rated], 1).sum(1), torch.stack([pair[1] for pair in rated], 1).sum(1)


def by_sub_action(
    logits: Tensor, dims: Sequence[int], action_masks: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For each sub-action, of n choices: its logits (B, n) and masks (B, n)."""
    masks = [None] * len(dims) if action_masks is None else torch.split(action_masks, list(dims), 1)
    for part, mask in zip(torch.split(logits, list(dims), 1), masks, strict=True):
        yield part, None if mask is None else mask.contiguous()


@torch.no_grad()
def draw(probs: Tensor) -> Tensor:  # (B, A) → (B, 1) int64
    """`torch.multinomial(probs, 1, True)`: the same draws from the same random stream, in 40 % of the time on the CPU.

    torch divides the probabilities by exponential variates and takes the largest. It computes these variates one by one
    (316 µs for 256 × 86). Here one vectorized logarithm of the same uniform numbers gives them (105 µs).
    """
    usable = probs.device.type == "cpu" and probs.dtype == torch.float32 and _exponentials_agree()
    if not usable or not torch.isfinite(probs.sum()):  # of NaN or infinity torch's own call raises the error
        return torch.multinomial(probs, 1, True)
    return (probs / _exponentials(probs.shape, torch.default_generator)).argmax(-1, keepdim=True)


def _exponentials(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).uniform_(generator=generator).neg_().log1p_().neg_().float()


@cache
def _exponentials_agree() -> bool:
    """Whether this build of torch computes exponential variates as `_exponentials` does. Tested once per process."""
    ours, theirs = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = torch.empty(64, 33).exponential_(1.0, generator=theirs)
    same = torch.equal(_exponentials(expected.shape, ours), expected)
    return same and torch.equal(ours.get_state(), theirs.get_state())


@torch.no_grad()
def sample(logits: Tensor, action_masks: Tensor | None = None) -> tuple[Tensor, Tensor]:  # (B, A) → (B,), (B,)
    """One action per row, drawn from torch's random stream exactly as in SB3, and its log-probability."""
    log_probs = log_normalize(logits, action_masks)
    actions = draw(torch.softmax(log_probs, -1))
    return actions.squeeze(1), log_probs.gather(-1, actions).squeeze(1)


@torch.no_grad()
def multi_sample(logits: Tensor, dims: Sequence[int], action_masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """K sub-actions per row (B, K), drawn in their order as in SB3, and their joint log-probability (B,)."""
    drawn = [sample(part, mask) for part, mask in by_sub_action(logits, dims, action_masks)]
    return torch.stack([pair[0] for pair in drawn], 1), torch.stack([pair[1] for pair in drawn], 1).sum(1)


def gaussian_log_prob(means: Tensor, scale: Tensor, actions: Tensor) -> Tensor:  # (B, A) each → (B,)
    """The log-probability of actions of a diagonal Gaussian, as torch's Normal and SB3 compute it."""
    densities = -((actions - means) ** 2) / (2 * scale**2) - scale.log() - math.log(math.sqrt(2 * math.pi))
    return densities.sum(dim=1)
