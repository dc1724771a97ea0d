"""SAC: SB3's class with a plain PyTorch update, written out here from acting to the optimizers' steps.

`learn`, `load`, `save`, schedules, loggers and callbacks are SB3's own. Every number is that of stock SAC
(tests/parity/test_off_policy_parity.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.utils import polyak_update
from torch import Tensor
from torch.nn import functional

from fasttrain.algos.causes import bad_gradients, blame, list_first
from fasttrain.algos.engine import Engine, PolicyStep
from fasttrain.algos.off_policy import OffPolicy, without_threads_left
from fasttrain.algos.step import TorchStep, check_terms, gradient_norm
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.stock import refuse_foreign_buffer
from fasttrain.vec.base import SlotSource

LOGGED = ("ent_coef", "n_updates", "skipped_steps")  # logged names that no loss term may have
OF_ACTOR = ("actor_loss", "ent_coef_loss")  # names that no term of the critics' loss may have, either


class Evaluated(NamedTuple):
    """What the networks compute for a batch of B transitions. All but `ent_coef` and `target` carry gradients."""

    actions: Tensor  # (B, A) from -1 to 1, drawn by the actor for `batch.observations`
    log_probs: Tensor  # (B, 1) of `actions`
    ent_coef: Tensor  # () or (1,) the weight of the entropy
    target: Tensor  # (B, 1) the TD target of the critics
    # Values (B, 1) from each critic. `critic_loss` gets the values of `batch.actions`. `actor_loss` gets the values
    # of `actions`, from critics that have learned from this batch.
    q_values: tuple[Tensor, ...]


class SACWork(NamedTuple):
    """The settings of a round of SAC updates by compiled kernels; the names are SB3's."""

    gradient_steps: int
    batch_size: int
    gamma: float  # discount factor; not used if a batch has `discounts`
    tau: float
    target_update_interval: int
    target_entropy: float
    ent_coef: Tensor  # the weight of the entropy, or its logarithm if the weight is learned
    ent_coef_optimizer: torch.optim.Optimizer | None


class SACEngine(Engine):
    """A SAC policy on PyTorch. It acts by the policy's own `predict`."""

    kind, float32_only = "torch", "SAC"

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        actions, _ = self.policy.predict(observations)
        return PolicyStep(self.policy.scale_action(actions))


class SAC(OffPolicy, stable_baselines3.SAC):
    """Drop-in for `stable_baselines3.SAC`. Stock SB3 loads its zips.

    Critics and actor learn one after the other, each with its own loss. A subclass can add terms, for example
    conservative Q-learning (Kumar et al. 2020) to the critics' loss, and imitation to the actor's loss:

        def critic_loss(self, batch, evaluated):
            drawn = self.critic(batch.observations, evaluated.actions.detach())
            gaps = [mine.mean() - theirs.mean() for mine, theirs in zip(drawn, evaluated.q_values)]
            return super().critic_loss(batch, evaluated) | {"cql_loss": sum(gaps)}

        def actor_loss(self, batch, evaluated):
            imitation = (evaluated.actions - batch.actions).square().mean()
            return super().actor_loss(batch, evaluated) | {"bc_loss": imitation}

    Args:
        those of `stable_baselines3.SAC`, and `engine`: "torch" (stock's numbers), "kernels", or `EngineSettings`.
    """

    _torch_engine = SACEngine
    learn = without_threads_left(stable_baselines3.SAC.learn)

    def _setup_model(self) -> None:
        super()._setup_model()
        refuse_foreign_buffer(self.replay_buffer, self.overrides(SAC, "evaluate", "critic_loss", "actor_loss"))

    # --- acting, in the loop of `off_policy.py`

    def _choose(
        self, source: SlotSource, action_noise: ActionNoise | None, learning_starts: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Actions (N, A) for the envs, and the same actions scaled to -1 … 1 for the replay buffer."""
        engine = self.engine if self.engine.fits(self.policy) else self.engine_now()
        random = self.num_timesteps < learning_starts and not (self.use_sde and self.use_sde_at_warmup)
        if engine.kind == "torch":
            return self._sample_action(learning_starts, action_noise, source.num_envs)
        if random:
            space: Any = self.action_space  # one draw for N envs gives the numbers of N calls of `sample`
            size, whole = (source.num_envs, *space.shape), space.dtype.kind != "f"  # integer actions include `high`
            drawn = space.np_random.uniform(space.low, space.high.astype(np.float64) + whole, size)
            scaled = self.policy.scale_action((np.floor(drawn) if whole else drawn).astype(space.dtype))
        else:
            scaled = engine.act(self._last_obs, None).actions
        if action_noise is not None:
            scaled = np.clip(scaled + action_noise(), -1, 1)
        return self.policy.unscale_action(scaled), scaled

    # --- learning

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Take `gradient_steps` updates, each on a batch of its own, and log them as SB3 does.

        Raises:
            DivergedError: too many calls in a row had no finite update; see `guard.py`.
        """
        if not isinstance(self.replay_buffer, ReplayStorage):  # SB3's own update takes any other buffer
            return super().train(gradient_steps, batch_size)
        clock, critic = self.collector.clock, self.critic.optimizer
        learners = [self.actor.optimizer, *filter(None, [self.ent_coef_optimizer])]
        with clock.phase("other"):
            self._update_learning_rate([critic, *learners])
            engine: Any = self.engine_now()
            if engine.kind == "kernels":
                return self._record(engine, engine.update(self.replay(), self.work(gradient_steps, batch_size)))
            self.policy.set_training_mode(True)
            step = SACStep(engine, [critic, *learners])
            with step.stepping():
                clock.enter("replay_sample")
                for number, batch in enumerate(self.replay().batches(gradient_steps, batch_size)):
                    clock.enter("train_fwd")
                    evaluated = self.evaluate(batch)
                    terms = check_terms(self, self.critic_loss(batch, evaluated), (*LOGGED, *OF_ACTOR), "critic_loss")
                    step.begin()
                    if step.descend(terms, critic):
                        clock.enter("train_fwd")
                        rated = evaluated._replace(q_values=self.critic(batch.observations, evaluated.actions))
                        more = check_terms(self, self.actor_loss(batch, rated), (*LOGGED, *terms), "actor_loss")
                        if step.descend(more, *learners):
                            step.note({"ent_coef": evaluated.ent_coef.reshape(()), **terms, **more})
                    if number % self.target_update_interval == 0:
                        self._move_targets()
                    clock.enter("replay_sample")
            self._record(engine, engine.count_steps(step.read()))

    def evaluate(self, batch: ReplayBatch) -> Evaluated:
        """Actions and values of a batch, and the target r + discount × (V(next) + ent_coef × entropy).

        V is the lowest value that a target critic gives to an action drawn by the actor (Haarnoja et al. 2018).
        """
        if self.use_sde:
            self.actor.reset_noise()
        actions, log_probs = self.actor.action_log_prob(batch.observations)
        learned = self.log_ent_coef
        ent_coef = self.ent_coef_tensor if learned is None else torch.exp(learned.detach())
        with torch.no_grad():
            next_actions, next_log_probs = self.actor.action_log_prob(batch.next_observations)
            next_values = torch.cat(self.critic_target(batch.next_observations, next_actions), dim=1)
            lowest, _ = torch.min(next_values, dim=1, keepdim=True)
            soft = lowest - ent_coef * next_log_probs.reshape(-1, 1)
            discounts = self.gamma if batch.discounts is None else batch.discounts
            target = batch.rewards + (1 - batch.dones) * discounts * soft
        q_values = self.critic(batch.observations, batch.actions)
        return Evaluated(actions, log_probs.reshape(-1, 1), ent_coef, target, q_values)

    def critic_loss(self, batch: ReplayBatch, evaluated: Evaluated) -> dict[str, Tensor]:
        """Scalar terms by name. The critics minimise their sum. Each term is logged as `train/<name>`."""
        errors = [functional.mse_loss(values, evaluated.target) for values in evaluated.q_values]
        return {"critic_loss": 0.5 * sum(errors)}  # type: ignore[dict-item]

    def actor_loss(self, batch: ReplayBatch, evaluated: Evaluated) -> dict[str, Tensor]:
        """Scalar terms by name: the actor's loss, and the loss of the entropy's weight if this weight is learned."""
        lowest, _ = torch.min(torch.cat(evaluated.q_values, dim=1), dim=1, keepdim=True)
        terms = {"actor_loss": (evaluated.ent_coef * evaluated.log_probs - lowest).mean()}
        if self.log_ent_coef is not None:
            missing_entropy = (evaluated.log_probs + float(self.target_entropy)).detach()
            terms["ent_coef_loss"] = -(self.log_ent_coef * missing_entropy).mean()
        return terms

    @torch.no_grad()
    def _move_targets(self) -> None:
        """Move the target critics towards the critics by the share `self.tau`: SB3's `polyak_update` in one call."""
        targets, critics = (list[Tensor](each.parameters()) for each in (self.critic_target, self.critic))
        torch._foreach_mul_(targets, 1 - self.tau)
        torch._foreach_add_(targets, critics, alpha=self.tau)
        polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)

    def work(self, gradient_steps: int, batch_size: int) -> SACWork:
        """The settings of a round of updates by compiled kernels."""
        learned = self.ent_coef_optimizer is not None
        ent_coef: Any = self.log_ent_coef if learned else self.ent_coef_tensor
        return SACWork(gradient_steps, batch_size, self.gamma, self.tau, self.target_update_interval,
                       float(self.target_entropy), ent_coef, self.ent_coef_optimizer)  # fmt: skip


class SACStep(TorchStep):
    """The optimizers' steps of SAC's updates. A guard skips a step if its loss or a gradient is not finite."""

    def __init__(self, engine: Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__(engine, math.inf, optimizers)

    def begin(self) -> None:
        """Begin an update. It has two steps: first of the critics, then of the actor and the entropy's weight."""
        self.taken += 1
        self.noted.append({})
        if self.guarded:
            self.norms.append(torch.zeros(()))

    def descend(self, terms: dict[str, Tensor], *optimizers: torch.optim.Optimizer) -> bool:
        """Take one step of the optimizers to minimise the sum of `terms`. Returns False if the step was skipped."""
        loss, parameters = reduce(torch.add, terms.values()), parameters_of(optimizers)
        self.clock.enter("train_bwd")
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(loss, inputs=parameters)  # the other networks need no gradients here
        self.clock.enter("optim")
        if self.guarded:
            gradients = [each.grad for each in parameters if each.grad is not None]
            norm = torch.add(gradient_norm(gradients), loss.detach(), alpha=0.0)  # NaN where the loss is not finite
            self.norms[-1] = norm.cpu() + self.norms[-1]
            if not math.isfinite(self.norms[-1].item()):
                self.blamed = self.blamed or blame(
                    math.isfinite(loss.item()), list_first(bad_gradients(self.engine.policy))
                )
                return False
        for optimizer in optimizers:
            optimizer.step()
        return True


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The parameters that these optimizers change."""
    every = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    return [each for each in every if each.requires_grad]
