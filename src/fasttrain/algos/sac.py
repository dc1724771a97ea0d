"""SAC: SB3's class with a plain PyTorch update that can be read here, from acting to the optimizers' steps.

`learn`, `load`, `save`, schedules, loggers and callbacks are SB3's own. Every number is that of stock SAC
(tests/parity/test_sac_parity.py). A replay buffer of another class (HER's) is served by SB3's own loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.type_aliases import MaybeCallback, RolloutReturn, TrainFreq
from stable_baselines3.common.utils import polyak_update, should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.sac.policies import SACPolicy
from torch import Tensor
from torch.nn import functional

from fasttrain.algos.causes import bad_gradients, blame, check_step, listed, why_replay
from fasttrain.algos.engine import Acted, Engine, EngineSettings, Statistics, refuse_settings
from fasttrain.algos.fast import Fast, left_out, note_episodes
from fasttrain.algos.losses import checked
from fasttrain.algos.step import TorchStep, faster_adam, gradient_norm
from fasttrain.buffers.prefetch import Direct, Prefetching, Replay
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.stock import STOCK_REPLAYS, refuse_foreign_buffer, replay_of
from fasttrain.vec.base import SlotSource

LOGGED = ("ent_coef", "n_updates", "skipped_steps")  # no names of terms
OF_ACTOR = ("actor_loss", "ent_coef_loss")  # no names of the critics' terms
SelfSAC = TypeVar("SelfSAC", bound="SAC")


class Evaluated(NamedTuple):
    """What the networks say of a batch of B transitions. `actions`, `log_probs` and `q_values` carry gradients."""

    actions: Tensor  # (B, A) of -1 to 1, drawn by the actor for the observations
    log_probs: Tensor  # (B, 1) theirs
    ent_coef: Tensor  # () or (1,) the weight of the entropy
    target: Tensor  # (B, 1) the TD target of the critics
    q_values: tuple[Tensor, ...]  # (B, 1) of each critic: `critic_loss` gets those of the batch's actions,
    # `actor_loss` those of `actions`, by the critics that have learned from this batch already


class SACWork(NamedTuple):
    """Some updates, one after the other, as an accelerator is asked for them; the names are SB3's."""

    gradient_steps: int
    batch_size: int
    gamma: float  # of batches that have no discounts of their own
    tau: float
    target_update_interval: int
    target_entropy: float
    ent_coef: Tensor  # its logarithm, if it is learned
    ent_coef_optimizer: torch.optim.Optimizer | None


class SACEngine(Engine):
    """The engine of the plain update, which acts as the policy itself does."""

    kind = "torch"

    def __init__(self, policy: SACPolicy, settings: EngineSettings, before: Engine | None = None) -> None:
        refuse_settings(settings, "SAC")
        super().__init__(policy, settings, before)

    def act(self, observations: Any, action_masks: Any, memory: Any = None) -> Acted:
        actions, _ = self.policy.predict(observations)
        return Acted(self.policy.scale_action(actions), memory=memory)


class SAC(Fast, stable_baselines3.SAC):
    """Drop-in for `stable_baselines3.SAC`. A zip loads there.

    Two networks learn one after the other, so the loss has two seams. A subclass that adds a term to the critics'
    loss, here that of conservative Q-learning (Kumar et al. 2020), and one to the actor's:

        def critic_loss(self, batch, evaluated):
            drawn = self.critic(batch.observations, evaluated.actions.detach())
            gaps = [mine.mean() - theirs.mean() for mine, theirs in zip(drawn, evaluated.q_values)]
            return super().critic_loss(batch, evaluated) | {"cql_loss": sum(gaps)}

        def actor_loss(self, batch, evaluated):
            imitation = (evaluated.actions - batch.actions).square().mean()
            return super().actor_loss(batch, evaluated) | {"bc_loss": imitation}

    Args:
        as `stable_baselines3.SAC`, and `engine`: "torch", whose numbers are stock's, "kernels", or `EngineSettings`.
    """

    _plain = SACEngine
    _updates_often = True
    prioritized: ClassVar[None] = None  # of replay: all transitions alike

    def _setup_model(self) -> None:
        if self.replay_buffer is None and self.replay_buffer_class in STOCK_REPLAYS:
            self.replay_buffer = replay_of(self, None)
        super()._setup_model()
        self._attach()
        own = {f"{type(self).__name__}.{name} is overridden": getattr(type(self), name) is not getattr(SAC, name)
               for name in ("evaluate", "critic_loss", "actor_loss")}  # fmt: skip
        refuse_foreign_buffer(self.replay_buffer, own)

    # --- collecting

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: ActionNoise | None = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        """Act, step and store, until there is enough for the next update."""
        source = self.collector.source_of(env)
        if not isinstance(self.replay_buffer, ReplayStorage):  # of a class that is none of ours
            return super().collect_rollouts(
                env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
            )
        callback.update_locals(  # names of stock's loop that stay: once, and not at every step
            {"self": self, "env": env, "callback": callback, "train_freq": train_freq,
             "replay_buffer": self.replay_buffer, "action_noise": action_noise, "learning_starts": learning_starts,
             "log_interval": log_interval, "continue_training": True}
        )  # fmt: skip
        with self.collector.clock.phase("buffer"):
            return self._collect(source, callback, train_freq, action_noise, learning_starts, log_interval)

    def _collect(
        self,
        source: SlotSource,
        callback: BaseCallback,
        train_freq: TrainFreq,
        action_noise: ActionNoise | None,
        learning_starts: int,
        log_interval: int | None,
    ) -> RolloutReturn:
        collector, clock, num_envs = self.collector, self.collector.clock, source.num_envs
        storage: Any = self.replay_buffer
        num_steps, num_episodes = 0, 0
        self.policy.set_training_mode(False)
        if self.use_sde:
            self.actor.reset_noise(num_envs)
        with clock.phase("log"):
            callback.on_rollout_start()  # it may exchange the engine
        while should_collect_more_steps(train_freq, num_steps, num_episodes):
            clock.enter("action")
            if self.use_sde and self.sde_sample_freq > 0 and num_steps % self.sde_sample_freq == 0:
                self.actor.reset_noise(num_envs)
            actions, buffer_actions = self._choose(num_envs, action_noise, learning_starts)
            came = collector.step(source, actions)
            self.num_timesteps += source.slots.transitions
            num_steps += 1
            if self.engine.guard is not None:  # last observations are stored, even of episodes that ended by the rules
                normalizer = self._vec_normalize_env
                check_step(came.observations, came.rewards, source.slots.finished, self.num_timesteps, normalizer)
            clock.enter("log")
            callback.update_locals(
                {"num_collected_steps": num_steps, "num_collected_episodes": num_episodes, "actions": actions,
                 "buffer_actions": buffer_actions, "new_obs": came.observations, "rewards": came.rewards,
                 "dones": came.dones, "infos": came.infos}
            )  # fmt: skip
            if not callback.on_step():
                return RolloutReturn(num_steps * num_envs, num_episodes, continue_training=False)
            clock.enter("buffer")
            note_episodes(self, came.infos, came.dones)
            with storage.lock:
                self._store_transition(storage, buffer_actions, came.observations, came.rewards, came.dones, came.infos)
                if any(none := left_out(source.slots)):
                    storage.discard(*none)
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()
            for env in np.flatnonzero(came.dones):
                num_episodes += 1
                self._episode_num += 1
                if action_noise is not None:
                    action_noise.reset(**({"indices": [env]} if num_envs > 1 else {}))
                if log_interval is not None and self._episode_num % log_interval == 0:
                    self.dump_logs()
        with clock.phase("log"):
            callback.on_rollout_end()
        return RolloutReturn(num_steps * num_envs, num_episodes, continue_training=True)

    def _choose(
        self, count: int, action_noise: ActionNoise | None, learning_starts: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Actions (N, A) as the envs get them, and as replay stores them: from -1 to 1."""
        engine = self.engine if self.engine.fits(self.policy) else self.engine_now()
        random = self.num_timesteps < learning_starts and not (self.use_sde and self.use_sde_at_warmup)
        if engine.kind == "torch" and not (random and self.collector.local_random_actions):
            return self._sample_action(learning_starts, action_noise, count)
        if random:
            space: Any = self.action_space  # one draw gives the numbers of N draws
            drawn = space.np_random.uniform(space.low, space.high, (count, *space.shape)).astype(space.dtype)
            scaled = self.policy.scale_action(drawn)
        else:
            scaled = engine.act(self._last_obs, None).actions
        if action_noise is not None:
            scaled = np.clip(scaled + action_noise(), -1, 1)
        return self.policy.unscale_action(scaled), scaled

    # --- learning

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Take `gradient_steps` updates, each on a batch of its own, and log them as SB3 does.

        Raises:
            DivergedError: round after round no update was finite; see `guard.py`.
        """
        if not isinstance(self.replay_buffer, ReplayStorage):  # none of ours: SB3's own update serves it
            return super().train(gradient_steps, batch_size)
        clock, critic = self.collector.clock, self.critic.optimizer
        learners = [self.actor.optimizer, *filter(None, [self.ent_coef_optimizer])]
        with clock.phase("other"):
            self.policy.set_training_mode(True)
            self._update_learning_rate([critic, *learners])
            engine: Any = self.engine_now()
            if engine.kind == "kernels":
                return self._record(engine, engine.update(self.replay(), self.work(gradient_steps, batch_size)))
            step = SACStep(engine, [critic, *learners])
            with step.stepping():
                clock.enter("replay_sample")
                for number, batch in enumerate(self.replay().batches(gradient_steps, batch_size)):
                    clock.enter("train_fwd")
                    evaluated = self.evaluate(batch)
                    terms = checked(self, self.critic_loss(batch, evaluated), (*LOGGED, *OF_ACTOR), "critic_loss")
                    step.begin()
                    if step.descend(terms, critic):
                        clock.enter("train_fwd")
                        rated = evaluated._replace(q_values=self.critic(batch.observations, evaluated.actions))
                        more = checked(self, self.actor_loss(batch, rated), (*LOGGED, *terms), "actor_loss")
                        if step.descend(more, *learners):
                            step.note({"ent_coef": evaluated.ent_coef.reshape(()), **terms, **more})
                    if number % self.target_update_interval == 0:
                        self._move_targets()
                    clock.enter("replay_sample")
            self._record(engine, engine.counted(step.read()))

    def evaluate(self, batch: ReplayBatch) -> Evaluated:
        """What the networks say of a batch: r + discount × (V(next) + ent_coef × entropy) is the target.

        V is the lowest value that the target critics give an action of the actor's (Haarnoja et al. 2018).
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
        """The named terms, scalars, whose sum the critics minimise; each is logged as `train/<name>`."""
        errors = [functional.mse_loss(values, evaluated.target) for values in evaluated.q_values]
        return {"critic_loss": 0.5 * sum(errors)}  # type: ignore[dict-item]

    def actor_loss(self, batch: ReplayBatch, evaluated: Evaluated) -> dict[str, Tensor]:
        """The same of the actor, and of the entropy's weight where that is learned."""
        lowest, _ = torch.min(torch.cat(evaluated.q_values, dim=1), dim=1, keepdim=True)
        terms = {"actor_loss": (evaluated.ent_coef * evaluated.log_probs - lowest).mean()}
        if self.log_ent_coef is not None:
            short = (evaluated.log_probs + float(self.target_entropy)).detach()  # of entropy, by so much
            terms["ent_coef_loss"] = -(self.log_ent_coef * short).mean()
        return terms

    @torch.no_grad()
    def _move_targets(self) -> None:
        """Target critics follow by the share `tau`; SB3's `polyak_update` in one call for all parameters."""
        targets, critics = (list[Tensor](each.parameters()) for each in (self.critic_target, self.critic))
        torch._foreach_mul_(targets, 1 - self.tau)
        torch._foreach_add_(targets, critics, alpha=self.tau)
        polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)

    def _record(self, engine: Engine, done: Statistics) -> None:
        """Log means in float64 of float32 scalars, as SB3 takes them, of the updates that were not skipped."""
        engine.clock.enter("log")
        self._n_updates += done.epochs
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, values in done.terms.items():
            self.logger.record(f"train/{name}", float(values.mean(dtype=np.float64)))
        if engine.skipped_steps:
            self.logger.record("train/skipped_steps", engine.skipped_steps)
        if engine.guard is not None:
            engine.guard.note(self, done.norms, lambda: why_replay(self, done.blamed))

    # --- what accelerators and prefetching ask

    def work(self, gradient_steps: int, batch_size: int) -> SACWork:
        """The updates that an accelerator shall compute, by the model's settings."""
        learned = self.ent_coef_optimizer is not None
        ent_coef: Any = self.log_ent_coef if learned else self.ent_coef_tensor
        return SACWork(gradient_steps, batch_size, self.gamma, self.tau, self.target_update_interval,
                       float(self.target_entropy), ent_coef, self.ent_coef_optimizer)  # fmt: skip

    def replay(self) -> Replay:
        """The buffer as updates ask for batches of it."""
        buffer: Any = self.replay_buffer
        return Replay(buffer, self.collector.sampler, self._vec_normalize_env)

    def prefetch_batches(self, deterministic: bool = False, depth: int = 1) -> None:
        """Draw the next update's batches in a thread; see `Prefetching`. `deterministic`: none can be drawn ahead."""
        self.collector.sampler.close()
        self.collector.sampler = Direct() if deterministic else Prefetching(self.seed, depth)

    def learn(
        self: SelfSAC,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "SAC",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfSAC:
        """As SB3's; whatever ends it, no thread is left behind."""
        self.collector.watch = None
        try:
            return super().learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )
        finally:
            self.collector.sampler.close()


class SACStep(TorchStep):
    """The optimizers' steps of SAC's updates: in each the critics' first, then the actor's and the entropy's weight's.

    Guarded, each steps only where its loss and its gradients are finite.
    """

    def __init__(self, engine: Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__(engine, math.inf)
        self.optimizers = optimizers

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(faster_adam(optimizer, not self.engine.settings.exact))
            yield

    def begin(self) -> None:
        """The next update."""
        self.taken += 1
        self.noted.append({})
        if self.guarded:
            self.norms.append(torch.zeros(()))

    def descend(self, terms: dict[str, Tensor], *optimizers: torch.optim.Optimizer) -> bool:
        """Let the optimizers step down the gradient of the terms' sum; whether they did."""
        loss, parameters = reduce(torch.add, terms.values()), parameters_of(optimizers)
        self.clock.enter("train_bwd")
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(loss, inputs=parameters)  # the other network's gradients would be thrown away
        self.clock.enter("optim")
        return self.take(loss, *optimizers)

    def take(self, loss: Tensor, *optimizers: torch.optim.Optimizer) -> bool:
        """Let the optimizers step along the gradients that are there; whether they did."""
        if self.guarded:
            gradients = [each.grad for each in parameters_of(optimizers) if each.grad is not None]
            norm = torch.add(gradient_norm(gradients), loss.detach(), alpha=0.0)  # NaN where the loss is not finite
            self.norms[-1] = norm.cpu() + self.norms[-1]
            if not math.isfinite(self.norms[-1].item()):
                self.blamed = self.blamed or blame(
                    math.isfinite(loss.item()), listed(bad_gradients(self.engine.policy))
                )
                return False
        for optimizer in optimizers:
            optimizer.step()
        return True


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """All that they change; what is frozen, they do not."""
    found = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    return [each for each in found if each.requires_grad]
