"""The maths of PPO: log-probabilities of masked discrete and of continuous actions, and the terms of the loss.

Arrays in, arrays out.

Every value and every gradient is what SB3 and sb3-contrib compute, by the same floating-point operations in the same
order; only the way there is shorter. Legend: B rows, A actions, K sub-actions of a MultiDiscrete space.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fasttrain.buffers.rollout import RolloutBatch

Terms = dict[str, Tensor]  # scalars () by the names under which they are logged
ILLEGAL_LOGIT = -1e8  # sb3-contrib's stand-in for minus infinity


def log_normalize(logits: Tensor) -> Tensor:  # (..., A) → (..., A)
    """Logits shifted so that their exponentials sum to one."""
    return logits - logits.logsumexp(-1, keepdim=True)


def masked_log_normalize(logits: Tensor, legal: Tensor) -> Tensor:  # (..., A), (..., A) float 1 legal, 0 not → (..., A)
    """`log_normalize(where(legal, logits, -1e8))`, bit by bit, in a quarter of the time.

    `torch.where` walks element by element (434 µs for 2,048 × 86), multiply-add by a 0/1 mask is vectorised (28 µs).
    `exp` of anything below -88 takes a slow path (1,290 µs against 150 µs), so illegal places go through it as exp(0)
    and are zeroed after. That leaves at least the 1 of the largest, and 0 where nothing is legal: such a row is 0
    everywhere as sb3-contrib's (which is -8 from 55 actions on: its -1e8 + log A rounds so), without a gradient.
    """
    masked = torch.addcmul((legal - 1.0).mul_(-ILLEGAL_LOGIT), logits, legal)
    largest = masked.amax(-1, keepdim=True)
    total = (masked - largest).mul_(legal).exp_().mul_(legal).sum(-1, keepdim=True).clamp_(min=1.0)
    return masked - total.log_().add_(largest)


def as_legal(action_masks: Tensor) -> Tensor:  # (..., A) bool → (..., A) float32
    """The mask as a 0/1 factor; by way of uint8 it costs 10 µs for 2,048 × 86, straight from bool 58 µs."""
    return action_masks.view(torch.uint8).to(torch.float32)


class _LogProbAndEntropy(torch.autograd.Function):
    """Log-probability and entropy of categorical actions with the gradient written out.

    The gradient adds its terms in the order in which autograd would, so that it is bit by bit that of SB3's graph.
    With `entropy_gradient` off, terms that SB3 would multiply by `ent_coef = 0` are left out.
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
    dims: Sequence[int],  # K sizes of the sub-actions
    action_masks: Tensor | None = None,  # (B, sum of dims) bool
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:  # (B,), (B,)
    """The same for K independent categorical sub-actions (a masked MultiBinary has K two-way ones): sums over K."""
    if len(set(dims)) == 1:  # equal sizes: one call on (B, K, A / K)
        shape = (len(logits), len(dims), dims[0])
        masks = None if action_masks is None else action_masks.view(shape)
        log_prob, entropy = log_prob_and_entropy(logits.view(shape), actions, masks, entropy_gradient)
        return log_prob.sum(1), entropy.sum(1)
    parts = torch.split(logits, list(dims), 1)
    masks_of = [None] * len(dims) if action_masks is None else torch.split(action_masks.contiguous(), list(dims), 1)
    pairs = [
        log_prob_and_entropy(part, action, None if mask is None else mask.contiguous(), entropy_gradient)
        for part, action, mask in zip(parts, actions.unbind(1), masks_of, strict=True)
    ]
    return torch.stack([pair[0] for pair in pairs], 1).sum(1), torch.stack([pair[1] for pair in pairs], 1).sum(1)


@torch.no_grad()
def draw(probs: Tensor) -> Tensor:  # (B, A) → (B, 1) int64
    """`torch.multinomial(probs, 1, True)`: the same draws from the same random stream, on the CPU in 40 % of the time.

    torch divides the probabilities by exponential variates and takes the largest. It makes these one by one (316 µs for
    256 × 86); here the same uniforms are drawn and one vectorised logarithm is taken of them (105 µs).
    """
    usable = probs.device.type == "cpu" and probs.dtype == torch.float32 and _exponentials_agree()
    if not usable or not torch.isfinite(probs.sum()):  # torch's own error names NaN and infinity
        return torch.multinomial(probs, 1, True)
    return (probs / _exponentials(probs.shape, torch.default_generator)).argmax(-1, keepdim=True)


def _exponentials(shape: torch.Size, generator: torch.Generator) -> Tensor:
    uniforms = torch.empty(shape, dtype=torch.float64).uniform_(generator=generator)
    return uniforms.neg_().log1p_().neg_().to(torch.float32)


@cache
def _exponentials_agree() -> bool:
    """Whether this build of torch makes its exponentials the way `_exponentials` does: asked once per process."""
    ours, theirs = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = torch.empty(64, 33).exponential_(1.0, generator=theirs)
    same = torch.equal(_exponentials(expected.shape, ours), expected)
    return same and torch.equal(ours.get_state(), theirs.get_state())


@torch.no_grad()
def sample(logits: Tensor, action_masks: Tensor | None = None) -> tuple[Tensor, Tensor]:  # (B, A) → (B,), (B,)
    """Draw one action per row from torch's random stream exactly as SB3 does; also the log-probability of each."""
    log_probs = log_normalize(logits)
    if action_masks is not None:
        log_probs = masked_log_normalize(log_probs, as_legal(action_masks))
    actions = draw(torch.softmax(log_probs, -1))
    return actions.squeeze(1), log_probs.gather(-1, actions).squeeze(1)


@torch.no_grad()
def multi_sample(
    logits: Tensor,  # (B, sum of dims)
    dims: Sequence[int],
    action_masks: Tensor | None = None,  # (B, sum of dims) bool
) -> tuple[Tensor, Tensor]:  # (B, K), (B,)
    """Draw K sub-actions per row, one sub-action after the other as SB3 does."""
    parts = torch.split(logits, list(dims), 1)
    masks_of = [None] * len(dims) if action_masks is None else torch.split(action_masks, list(dims), 1)
    pairs = [
        sample(part, None if mask is None else mask.contiguous()) for part, mask in zip(parts, masks_of, strict=True)
    ]
    return torch.stack([pair[0] for pair in pairs], 1), torch.stack([pair[1] for pair in pairs], 1).sum(1)


def gaussian_log_prob(means: Tensor, scale: Tensor, actions: Tensor) -> Tensor:  # (B, A) each → (B,)
    """Of a diagonal Gaussian, as torch's Normal and SB3 compute it."""
    densities = -((actions - means) ** 2) / (2 * scale**2) - scale.log() - math.log(math.sqrt(2 * math.pi))
    log_prob: Tensor = densities.sum(dim=1)
    return log_prob


def gaussian_entropy(scale: Tensor) -> Tensor:  # (B, A) → (B,)
    """Of a diagonal Gaussian, as torch's Normal and SB3 compute it."""
    entropy: Tensor = (0.5 + 0.5 * math.log(2 * math.pi) + torch.log(scale)).sum(dim=1)
    return entropy


class Coefficients(NamedTuple):
    """The numbers of PPO's loss. In compiled code they are scalar tensors, so that a schedule compiles nothing anew."""

    clip_range: Any
    clip_range_vf: Any  # None: values are not clipped
    ent_coef: Any
    vf_coef: Any

    @classmethod
    def of(cls, work: Any) -> Coefficients:
        """Those of a `PPOWork`."""
        return cls(*(getattr(work, name) for name in cls._fields))


class Evaluated(NamedTuple):
    """Outputs of the policy, with its present parameters, for a minibatch; they carry gradients."""

    values: Tensor  # (B,)
    log_probs: Tensor  # (B,) of the stored actions
    entropy: Tensor | None  # (B,); None where the distribution has no closed form
    logits: Tensor | None = None  # (B, A) of the action net, before masks; a Gaussian's means; None: it has none


def normalized(batch: RolloutBatch, wanted: bool) -> RolloutBatch:
    """The batch with the advantages that the loss uses: zero mean and unit (sample) deviation over the minibatch. A
    single advantage stays as it is."""
    advantages = batch.advantages
    if not wanted or len(advantages) < 2:
        return batch
    return batch._replace(advantages=(advantages - advantages.mean()) / (advantages.std() + 1e-8))


def ppo_terms(
    batch: RolloutBatch,  # whose advantages are used as they are
    evaluated: Evaluated,
    clip_range: Any,
    clip_range_vf: Any,
) -> Terms:
    """The terms of PPO's loss under SB3's names, each a scalar without its weight.

    The policy's is the clipped surrogate: minus the mean of the more pessimistic of two objectives. The value's is the
    squared error to the returns; with `clip_range_vf` the prediction moves at most that far from the old one. The
    entropy's is minus its mean; where the distribution has no closed form, it is estimated from the actions taken.
    """
    advantages, values, old_values = batch.advantages, evaluated.values, batch.old_values
    ratio = torch.exp(evaluated.log_probs - batch.old_log_probs)
    clipped = advantages * torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
    if clip_range_vf is not None:
        values = old_values + torch.clamp(values - old_values, -clip_range_vf, clip_range_vf)
    if batch.sequences is None:
        value_loss = functional.mse_loss(batch.returns, values)
    else:  # by the operations of sb3-contrib's recurrent PPO, whose gradient rounds otherwise
        value_loss = torch.mean((batch.returns - values) ** 2)
    return {
        "policy_gradient_loss": -torch.min(advantages * ratio, clipped).mean(),
        "entropy_loss": -torch.mean(-evaluated.log_probs if evaluated.entropy is None else evaluated.entropy),
        "value_loss": value_loss,
    }


def with_loss(terms: Terms, batch: RolloutBatch, evaluated: Evaluated, numbers: Any) -> Terms:
    """The terms, the loss that is their weighted sum in their order, and how far the policy has moved, as SB3 logs it.

    That is the share of the rows whose ratio lies outside the clip range, and an estimate of KL(old ‖ new) that is
    never negative, http://joschu.net/blog/kl-approx.html

    Args:
        numbers: `Coefficients`, or a `PPOWork`. Terms without a weight among them have weight 1.
    """
    weights = {"entropy_loss": numbers.ent_coef, "value_loss": numbers.vf_coef}
    parts = [weights[name] * term if name in weights else term for name, term in terms.items()]
    with torch.no_grad():
        log_ratio = evaluated.log_probs - batch.old_log_probs
        ratio = torch.exp(log_ratio)
        clip_fraction = torch.mean((torch.abs(ratio - 1) > numbers.clip_range).float())
        approx_kl = torch.mean((ratio - 1) - log_ratio)
    return {"loss": reduce(operator.add, parts), **terms, "clip_fraction": clip_fraction, "approx_kl": approx_kl}
