"""SAC's update with the gradients written out: torch's own matrix products, without autograd.

It computes what `SAC.evaluate`, `critic_loss`, `actor_loss` and autograd compute, from the same batches and the same
random numbers, equal up to rounding (tests/accelerators/test_fused_sac.py). What is saved: the actor sees observations
and next observations at once; where the actor learns, no gradient of the critics' weights is made, and for each row
only that critic is gone back through whose value is the lowest; there is no graph; Adam steps in one call. It holds
nothing of its own: weights, optimizers and targets are stock's.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.sac.policies import LOG_STD_MAX, LOG_STD_MIN
from torch import Tensor, nn

from fasttrain.accelerators.layout import KINDS
from fasttrain.algos.causes import why_no_action
from fasttrain.algos.engine import Acted, Engine, EngineSettings, Statistics, refuse_settings
from fasttrain.algos.sac import SACStep, SACWork
from fasttrain.buffers.prefetch import Replay
from fasttrain.buffers.replay_storage import ReplayBatch
from fasttrain.errors import EnvError
from fasttrain.kernels.dense import RELU

LOG_ROOT = math.log(math.sqrt(2 * math.pi))
EPSILON = 1e-6  # SB3's, in the density of a squashed action


class Chain(NamedTuple):
    """Linear layers with an activation behind each; behind the last only where `open_end` is False."""

    layers: list[nn.Linear]
    relu: bool
    open_end: bool = True

    @classmethod
    def of(cls, net: Any, open_end: bool = True) -> Chain:
        """That of an nn.Sequential of SB3's."""
        kinds = [KINDS[type(each)] for each in net if not isinstance(each, nn.Linear)]
        return cls([each for each in net if isinstance(each, nn.Linear)], RELU in kinds, open_end)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """The inputs, and what each layer makes of them, (B, width) each."""
        seen = [inputs]
        for number, layer in enumerate(self.layers, start=1):
            made = torch.addmm(layer.bias, seen[-1], layer.weight.t())
            if number < len(self.layers) or not self.open_end:
                made = made.relu_() if self.relu else made.tanh_()
            seen.append(made)
        return seen

    def backward(self, seen: list[Tensor], gradient: Tensor, learn: bool) -> Tensor:
        """Gradient (B, width) of the first layer's outputs before its activation, by that of the last one's.

        Args:
            seen: what `forward` gave.
            learn: put the gradients of the parameters where an optimizer finds them.
        """
        for number in range(len(self.layers), 0, -1):
            layer = self.layers[number - 1]
            if number < len(self.layers) or not self.open_end:
                gradient = self._through(gradient, seen[number])
            if learn:
                layer.weight.grad, layer.bias.grad = gradient.t() @ seen[number - 1], gradient.sum(0)
            if number > 1:
                gradient = gradient @ layer.weight
        return gradient

    def _through(self, gradient: Tensor, outputs: Tensor) -> Tensor:
        aten: Any = torch.ops.aten
        through = aten.threshold_backward(gradient, outputs, 0) if self.relu else aten.tanh_backward(gradient, outputs)
        return through  # type: ignore[no-any-return]


class Drawn(NamedTuple):
    """Actions of M rows, drawn by the actor, and what the way back needs."""

    actions: Tensor  # (M, A) of -1 to 1
    log_probs: Tensor  # (M, 1)
    hidden: list[Tensor]  # of the actor's trunk
    raw: Tensor  # (M, A) the logarithms of the deviations, before they are clamped
    spread: Tensor  # (M, A) deviation × noise
    slopes: Tensor  # (M, A) 1 - actions²


class FusedSACEngine(Engine):
    """Of a SAC policy that `eligible.py` allows. It holds nothing of its own."""

    kind: ClassVar[str] = "kernels"

    def __init__(self, policy: Any, settings: EngineSettings, before: Engine | None = None) -> None:
        refuse_settings(settings, "SAC")
        super().__init__(policy, settings, before)
        actor, critic, target = policy.actor, policy.critic, policy.critic_target
        self._trunk = Chain.of(actor.latent_pi, open_end=False)
        self._critics, self._targets = ([Chain.of(net) for net in nets.q_networks] for nets in (critic, target))
        modules = [*policy.modules()]
        self._parts = [(own, [*own.values()]) for each in modules for own in (each._modules, each._parameters)]
        self._parameters = [*policy.parameters()]

    def fits(self, policy: Any) -> bool:
        """Not once a layer was added or put in the place of another, or computes in another dtype. Takes 20 µs."""
        if not super().fits(policy) or any(each.dtype != torch.float32 for each in self._parameters):
            return False
        return all(len(own) == len(was) and all(map(operator.is_, own.values(), was)) for own, was in self._parts)

    @torch.no_grad()
    def act(self, observations: Any, action_masks: Any, memory: Any = None) -> Acted:
        """Draw actions from -1 to 1. Raises EnvError: one is not finite."""
        features = self._features(self.policy.obs_to_tensor(observations)[0])
        actions = self._draw(features, self._noise(len(features))).actions
        if not math.isfinite(actions.sum().item()):
            what = "the actor's output"
            raise EnvError(why_no_action(self.policy, observations, what) or f"{what} is not finite")
        return Acted(actions.numpy().reshape(-1, *self.policy.action_space.shape), memory=memory)

    @torch.no_grad()
    def update(self, data: Replay, work: SACWork) -> Statistics:
        """Updates, one after the other, of as many batches. A step that is not finite is not taken if guarded."""
        critic, entropy = self.policy.critic.optimizer, work.ent_coef_optimizer
        learners = [self.policy.actor.optimizer, *([] if entropy is None else [entropy])]
        step = SACStep(self, [critic, *learners])
        with step.stepping():
            self.clock.enter("replay_sample")
            for number, batch in enumerate(data.batches(work.gradient_steps, work.batch_size)):
                self.clock.enter("train")
                seen, following = self._features(batch.observations), self._features(batch.next_observations)
                noise = torch.cat((self._noise(len(seen)), self._noise(len(seen))))
                drawn = self._draw(torch.cat((seen, following)), noise)
                ent_coef = work.ent_coef if entropy is None else work.ent_coef.exp()
                target = self._target(batch, following, drawn, ent_coef, work.gamma)
                critic_loss = self._learn_critics(torch.cat((seen, batch.actions), 1), target)
                step.begin()
                if step.take(critic_loss, critic):
                    terms = self._learn_actor(seen, drawn, ent_coef, work)
                    if step.take(reduce(torch.add, terms.values()), *learners):
                        step.note({"ent_coef": ent_coef.reshape(()), "critic_loss": critic_loss, **terms})
                if number % work.target_update_interval == 0:
                    targets, critics = self.policy.critic_target.parameters(), self.policy.critic.parameters()
                    torch._foreach_lerp_([*targets], [*critics], work.tau)
                self.clock.enter("replay_sample")
        self.clock.enter("log")
        return self.counted(step.read())

    def _features(self, observations: Any) -> Tensor:  # (B, F)
        """The observations, flat: eligible policies make nothing else of them."""
        policy = self.policy
        given = preprocess_obs(observations, policy.observation_space, normalize_images=policy.normalize_images)
        features: Tensor = policy.actor.features_extractor(given)
        return features

    def _noise(self, count: int) -> Tensor:  # (count, A), the numbers that SB3's distribution would draw
        return torch.randn(count, self.policy.actor.mu.out_features)

    def _draw(self, features: Tensor, noise: Tensor) -> Drawn:
        """As `Actor.action_log_prob`, with this standard normal noise (M, A)."""
        actor, hidden = self.policy.actor, self._trunk.forward(features)
        mean = torch.addmm(actor.mu.bias, hidden[-1], actor.mu.weight.t())
        raw = torch.addmm(actor.log_std.bias, hidden[-1], actor.log_std.weight.t())
        log_std = raw.clamp(LOG_STD_MIN, LOG_STD_MAX)
        spread = log_std.exp().mul_(noise)
        actions = mean.add_(spread).tanh_()
        slopes = 1 - actions * actions
        density = noise.square().mul_(-0.5).sub_(log_std).sub_(LOG_ROOT).sub_((slopes + EPSILON).log_())
        return Drawn(actions, density.sum(1, keepdim=True), hidden, raw, spread, slopes)

    def _target(self, batch: ReplayBatch, following: Tensor, drawn: Drawn, ent_coef: Tensor, gamma: float) -> Tensor:
        """As in `SAC.evaluate`; the second half of what was drawn is for the next observations."""
        half = len(following)
        inputs = torch.cat((following, drawn.actions[half:]), 1)
        lowest = torch.cat([net.forward(inputs)[-1] for net in self._targets], 1).amin(1, keepdim=True)
        discounts = gamma if batch.discounts is None else batch.discounts
        return batch.rewards + (1 - batch.dones) * discounts * (lowest - ent_coef * drawn.log_probs[half:])

    def _learn_critics(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Gradients of the mean squared errors / 2; their sum, ()."""
        loss = torch.zeros(())
        for net in self._critics:
            seen = net.forward(inputs)
            errors = seen[-1] - target
            loss += errors.square().mean().mul_(0.5)
            net.backward(seen, errors.div_(len(errors)), learn=True)
        return loss

    def _learn_actor(self, seen: Tensor, drawn: Drawn, ent_coef: Tensor, work: SACWork) -> dict[str, Tensor]:
        """Gradients of the mean of ent_coef × log_probs - the lowest value, and of the entropy's weight; the terms."""
        size, actor = len(seen), self.policy.actor
        actions, log_probs = drawn.actions[:size], drawn.log_probs[:size]
        lowest, by_actions = self._rate(seen, actions)
        slopes, share = drawn.slopes[:size], ent_coef / size
        outer = (by_actions.div_(-size) + 2 * share * actions / (slopes + EPSILON)).mul_(slopes)  # of the mean
        raw = drawn.raw[:size]
        inner = (outer * drawn.spread[:size] - share).mul_((raw >= LOG_STD_MIN) & (raw <= LOG_STD_MAX))  # of `raw`
        hidden = [each[:size] for each in drawn.hidden]
        for head, gradient in ((actor.mu, outer), (actor.log_std, inner)):
            head.weight.grad, head.bias.grad = gradient.t() @ hidden[-1], gradient.sum(0)
        if self._trunk.layers:
            self._trunk.backward(hidden, torch.addmm(outer @ actor.mu.weight, inner, actor.log_std.weight), learn=True)
        terms = {"actor_loss": (ent_coef * log_probs - lowest).mean()}
        if work.ent_coef_optimizer is not None:
            short = (log_probs + work.target_entropy).mean()
            work.ent_coef.grad = -short.reshape(1)
            terms["ent_coef_loss"] = -(work.ent_coef * short).reshape(())
        return terms

    def _rate(self, seen: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest of the critics' values (B, 1), and its gradient (B, A) by the actions."""
        inputs = torch.cat((seen, actions), 1)
        ways = [net.forward(inputs) for net in self._critics]
        lowest, whose = torch.cat([way[-1] for way in ways], 1).min(1, keepdim=True)
        gradient = torch.empty_like(actions)
        for number, (net, way) in enumerate(zip(self._critics, ways, strict=True)):
            rows = (whose[:, 0] == number).nonzero()[:, 0]
            own = [each[rows] for each in way[1:]]
            first = net.backward([inputs, *own], torch.ones(len(rows), 1), learn=False)
            gradient[rows] = first @ net.layers[0].weight[:, seen.shape[1] :]
        return lowest, gradient
