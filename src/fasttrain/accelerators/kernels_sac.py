"""KernelSACEngine: the networks of SAC act and learn in the compiled kernels of `fasttrain_kernels.sac`, in own memory.

Batches and random numbers are the same as in the update on PyTorch, so that weights are equal except for rounding
(tests/accelerators/test_kernels_sac.py). The entropy coefficient is one number, which torch's optimizer updates.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.sac.policies import SACPolicy

from fasttrain.accelerators.kernels import adam_of, constants_of, zeros
from fasttrain.accelerators.layout import Chain, Flat, pad_width
from fasttrain.algos.causes import blame, why_no_action
from fasttrain.algos.devices import EngineSettings
from fasttrain.algos.engine import Engine, PolicyStep, Statistics
from fasttrain.algos.sac import SACWork
from fasttrain.algos.step import faster_adam
from fasttrain.batch import Float32Array, Float64Array
from fasttrain.buffers.prefetch import Replay
from fasttrain.buffers.replay_storage import ReplayBatch
from fasttrain.errors import EnvError
from fasttrain_kernels import sac
from fasttrain_kernels.kernel_cache import KernelCall
from fasttrain_kernels.threads import FOLLOW, ThreadChoice, new_team

ROWS_PER_THREAD = 64  # rows of a batch for each thread; with fewer rows a second thread saves no time
NONE: Float32Array = np.zeros(0, np.float32)


class KernelSACEngine(Engine):
    """The engine for a SAC policy that `eligible.py` accepts. It moves the policy's tensors into flat vectors (`Flat`).

    Only one method may run at a time, because all calls use the same working memory.
    """

    kind, float32_only = "kernels", "SAC"

    def __init__(self, policy: Any, settings: EngineSettings, previous: Engine | None = None) -> None:
        super().__init__(policy, settings, previous)
        actor, critic, target = policy.actor, policy.critic, policy.critic_target
        chains = [Chain.of([*net][:-1], [net[-1]]) for net in critic.q_networks]
        target_parameters = [each for net in target.q_networks for each in net.parameters()]
        own = Chain.of([*actor.latent_pi], [actor.mu, actor.log_std])
        self._actor = Flat(own.parameters, actor, policy.modules())
        self._critics = Flat([each for chain in chains for each in chain.parameters], critic)
        self._targets = Flat(target_parameters)
        (layout, *self._of_actor), (q_layout, *self._of_critic) = own.layout(), chains[0].layout()
        self._nets = sac.Net(layout, own.pieces(layout)), sac.Net(q_layout, chains[0].pieces(q_layout))
        count = len(chains)
        of_critics = [each.reshape(count, -1) for each in (*self._critics.arrays, self._targets.arrays[0])]
        self._learners = sac.Learners(*self._actor.arrays, *of_critics)
        space = policy.observation_space
        self._plain = isinstance(space, spaces.Box) and space.dtype == np.float32  # True: observations are the features
        self._scratch: sac.SACScratch | None = None
        self._choice = ThreadChoice()

    def fits(self, policy: Any) -> bool:
        """Whether every tensor of `policy` is still the view that this engine created."""
        return policy is self.policy and self._actor.holds() and self._critics.holds() and self._targets.holds()

    def act(self, observations: Any, action_masks: Any, memory: Any = None, into: Any = None) -> PolicyStep:
        """Draw actions from -1 to 1. Raises EnvError: an action is not finite."""
        seen = self._features(observations if self._plain else self.policy.obs_to_tensor(observations)[0])
        noise = self._noise(len(seen))
        batch, scratch = sac.SACBatch(seen[None], noise, NONE, NONE, noise[None]), self._scratch_for(len(seen))
        if not math.isfinite(sac.act_rows(batch, self._learners.actor, self._nets[0], scratch)):
            what = "the actor's output"
            raise EnvError(why_no_action(self.policy, observations, what) or f"{what} is not finite")
        actions = scratch.drawn[0, : len(seen)].copy()
        return PolicyStep(actions.reshape(-1, *self.policy.action_space.shape))

    @torch.no_grad()
    def update(self, data: Replay, work: SACWork) -> Statistics:
        """Take all updates, each with a new batch. With `self.guard` a step whose loss is not finite is skipped."""
        guarded, blamed, entropy = self.guard is not None, "", work.ent_coef_optimizer
        terms: list[dict[str, float]] = []
        done = np.full((work.gradient_steps, sac.NUM_STATISTICS), math.nan)
        with nullcontext() if entropy is None else faster_adam(entropy, not self.settings.exact):
            self.clock.enter("replay_sample")
            for number, batch in enumerate(data.batches(work.gradient_steps, work.batch_size)):
                self.clock.enter("train")
                update, norms = self._update(batch, work, number), done[number, sac.CRITIC_NORM :]
                count = len(update.batch.rewards)
                parts = max(1, min(self.settings.threads, count // ROWS_PER_THREAD))
                scratch = self._scratch_for(count, parts)
                bad = self._choice.run(sac.train_update, parts, update, scratch, done[number])
                taken = ~(np.isnan(norms) & guarded)
                self._critics.stepped(int(taken[0]))
                if taken.all():
                    self._actor.stepped(1)
                    terms.append(self._learned(work, update.settings, done[number]))
                else:
                    of_critic = math.isnan(done[number, sac.CRITIC_NORM])
                    flat, loss = (self._critics, sac.CRITIC_LOSS) if of_critic else (self._actor, sac.ACTOR_LOSS)
                    cause = blame(math.isfinite(done[number, loss]), flat.name_at(bad, self.policy))
                    blamed = blamed or cause
                self.clock.enter("replay_sample")
        self.clock.enter("log")
        norms = done[:, sac.CRITIC_NORM] + done[:, sac.ACTOR_NORM] if guarded else np.zeros(0)
        steps = work.gradient_steps - int(np.count_nonzero(np.isnan(norms)))
        by_name = {name: np.array([each[name] for each in terms], np.float32) for name in (terms[0] if terms else ())}
        return self.count_steps(Statistics(by_name, norms, steps, work.gradient_steps, blamed=blamed))

    def _update(self, batch: ReplayBatch, work: SACWork, number: int) -> sac.Update:
        """The kernel's arguments for the update with index `number` among the updates of this call."""
        learned, weight = work.ent_coef_optimizer is not None, work.ent_coef.detach()
        tau = float(work.tau) if number % work.target_update_interval == 0 else 0.0
        settings = sac.SACSettings(
            ent_coef=float(weight.exp() if learned else weight),
            log_ent_coef=float(weight) if learned else 0.0,
            target_entropy=work.target_entropy,
            tau=tau,
            actor_step=self._actor.steps + 1,
            critic_step=self._critics.steps + 1,
            guarded=self.guard is not None,
        )
        adams = [adam_of(each.optimizer, math.inf) for each in (self.policy.actor, self.policy.critic)]
        return sac.Update(self._batch(batch, work.gamma), self._learners, *self._nets, settings, *adams)

    def _learned(self, work: SACWork, settings: sac.SACSettings, statistics: Float64Array) -> dict[str, float]:
        """Update the entropy coefficient, if it is learned. Returns the terms for the log."""
        terms = {"ent_coef": settings.ent_coef, "critic_loss": statistics[sac.CRITIC_LOSS],
                 "actor_loss": statistics[sac.ACTOR_LOSS]}  # fmt: skip
        if work.ent_coef_optimizer is not None:
            terms["ent_coef_loss"] = -settings.log_ent_coef * statistics[sac.MISSING_ENTROPY]
            work.ent_coef.grad = torch.full_like(work.ent_coef, -statistics[sac.MISSING_ENTROPY])
            work.ent_coef_optimizer.step()
        return terms

    def _batch(self, batch: ReplayBatch, gamma: float) -> sac.SACBatch:
        """The transitions as arrays for the kernel, with the noise that the update on PyTorch would draw."""
        features = np.stack([self._features(each) for each in (batch.observations, batch.next_observations)])
        count = features.shape[1]
        noise = np.stack([self._noise(count) for _ in range(2)])
        discounts = (1 - batch.dones) * (gamma if batch.discounts is None else batch.discounts)
        tensors = (batch.actions.reshape(noise.shape[1:]), batch.rewards.reshape(count), discounts.reshape(count))
        actions, rewards, left = (np.ascontiguousarray(each.numpy(), np.float32) for each in tensors)
        return sac.SACBatch(features, actions, rewards, left, noise)

    def _features(self, observations: Any) -> Float32Array:  # (B, F)
        """The flat observations, which are the features of every policy that `eligible.py` accepts."""
        policy = self.policy
        if not self._plain:
            scaled = preprocess_obs(observations, policy.observation_space, normalize_images=policy.normalize_images)
            observations = policy.actor.features_extractor(scaled)
        return np.ascontiguousarray(observations, np.float32).reshape(-1, policy.actor.features_dim)

    def _noise(self, count: int) -> Float32Array:  # (count, A), the numbers that SB3's distribution would draw
        noise: Float32Array = torch.randn(count, self.policy.actor.mu.out_features).numpy()
        return noise

    def _scratch_for(self, count: int, parts: int = 0) -> sac.SACScratch:
        """Working memory for `count` rows on `parts` threads; 0: any number of threads."""
        scratch = self._scratch
        if scratch is not None and scratch.inputs.shape[1] >= count and parts in (0, len(scratch.sums)):
            return scratch
        rows, parts = pad_width(max(count, 0 if scratch is None else scratch.inputs.shape[1])), max(1, parts)
        (size, row_size), (q_size, q_row_size) = self._of_actor, self._of_critic
        inputs, q_inputs = (net.layout.inputs for net in self._nets)
        critics, dims = len(self._learners.critics), self.policy.actor.mu.out_features
        constants = constants_of(max(row_size, q_row_size))
        block = len(constants.every)
        of_actor, of_critics = zeros(2, size), zeros(3, critics, q_size)
        self._scratch = scratch = sac.SACScratch(
            inputs=zeros(2, rows, inputs),
            activations=zeros(2, rows, row_size),
            drawn=zeros(2, rows, dims),
            slopes=zeros(2, rows, dims),
            log_probs=zeros(2, rows),
            deltas=zeros(parts, block, row_size),
            q_inputs=zeros(parts, block, q_inputs),
            q_activations=zeros(parts, critics, block, q_row_size),
            q_deltas=zeros(parts, block, q_row_size),
            targets=zeros(parts, block),
            chosen=np.zeros((parts, block), np.int64),
            actor_ahead=of_actor[0],
            actor_back=of_actor[1],
            critics_ahead=of_critics[0],
            critics_back=of_critics[1],
            targets_ahead=of_critics[2],
            actor_sums=zeros(parts, size),
            critic_sums=zeros(parts, critics, q_size),
            actor_gradient=np.zeros_like(self._learners.actor),
            critic_gradients=np.zeros_like(self._learners.critics),
            squares=np.zeros(critics),
            sums=np.zeros((parts, sac.NUM_STATISTICS)),
            constants=constants,
        )
        return scratch


def kernel_calls() -> list[KernelCall]:
    """All calls of kernels by a `KernelSACEngine`, for tiny nets."""
    box, row, number = spaces.Box(-1.0, 1.0, (3,), np.float32), torch.zeros(1, 3), torch.zeros(1, 1)
    batch, work = ReplayBatch(row, row, row, number, number), SACWork(1, 1, 0.99, 0.1, 1, -3.0, torch.ones(1), None)
    with torch.random.fork_rng(devices=[]):
        engine = KernelSACEngine(SACPolicy(box, box, lambda _: 1e-3, net_arch=[4, 4]), EngineSettings())
        update, scratch = engine._update(batch, work, 0), engine._scratch_for(1)
    acting = KernelCall(sac.act_rows, (update.batch, engine._learners.actor, engine._nets[0], scratch))
    learning = KernelCall(sac.train_update, (update, scratch, np.zeros(sac.NUM_STATISTICS), new_team(), 0))
    return [acting, learning, FOLLOW]
