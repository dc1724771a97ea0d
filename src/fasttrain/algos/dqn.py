"""DQN: SB3's class with a plain PyTorch update that can be read here, from acting to the optimizer's step.

`learn`, `load`, `save`, schedules, target updates, loggers and callbacks are SB3's own. With plain settings every
number is that of stock DQN (tests/parity/test_dqn_parity.py). Beyond SB3 it has action masks, MultiDiscrete actions,
double Q-learning and prioritized replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback, RolloutReturn, TrainFreq
from stable_baselines3.common.utils import should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.dqn.policies import DQNPolicy
from torch import Tensor
from torch.nn import functional

from fasttrain.algos.causes import check_step, why_replay
from fasttrain.algos.engine import Engine, QWork, Statistics, TorchQEngine, network_values
from fasttrain.algos.fast import AnyDiscrete, Came, Fast, left_out, next_states, note_episodes, read_masks
from fasttrain.algos.losses import checked
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.q_networks import BRANCHING, best_values, chosen_values, greedy, random_actions
from fasttrain.algos.step import TorchStep
from fasttrain.batch import BoolArray, opened
from fasttrain.buffers.prefetch import Direct, Prefetching, Replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.stock import STOCK_REPLAYS, refuse_foreign_buffer, replay_of, storage_of
from fasttrain.errors import ConfigError, EnvError
from fasttrain.vec.base import SlotSource, slots_of

LOSSES = {"huber": functional.smooth_l1_loss, "mse": functional.mse_loss}
CHOOSING = (OffPolicyAlgorithm.__module__, DQNPolicy.__module__, __name__)  # whose methods `_choose` reproduces
LOGGED = ("loss", "n_updates", "skipped_steps")  # no names of terms
SelfDQN = TypeVar("SelfDQN", bound="DQN")


class Evaluated(NamedTuple):
    """What the networks say of a batch of B transitions. `q_values` and `current` carry gradients."""

    q_values: Tensor  # (B, A) of the online network, of all actions in the observations
    current: Tensor  # (B, K) of these, the values of the K (sub-)actions that were taken
    target: Tensor  # (B, 1) the TD target of `current`


class DQN(Fast, stable_baselines3.DQN, AnyDiscrete):
    """Drop-in for `stable_baselines3.DQN`. A zip of a plain network loads there.

    A subclass that adds a term to the loss, here that of conservative Q-learning (Kumar et al. 2020):

        def loss(self, batch, evaluated):
            every = evaluated.q_values.logsumexp(1, keepdim=True)
            return super().loss(batch, evaluated) | {"cql_loss": (every - evaluated.current).mean()}

    Args:
        double_q: the online network chooses the next action, the target network rates it (van Hasselt et al. 2016).
        loss: "huber" (SB3's) or "mse".
        prioritized: arguments of `PrioritizedReplayBuffer` (`alpha`, `beta`, …), {} for its defaults; None: uniform.
        use_masking: masks in exploration, in the greedy choice and in the target, if the env has them.
        further arguments: as `stable_baselines3.DQN`, and `engine`: "torch", whose numbers are stock's, "kernels" for
            an MLP on the CPU, or `EngineSettings`. MultiDiscrete actions get one head of the network each (Tavakoli et
            al. 2018); such a model does not load in stock DQN.

    Raises:
        ConfigError: an unknown loss.
    """

    _plain = TorchQEngine
    _updates_often = True

    def __init__(
        self,
        *args: Any,
        double_q: bool = False,
        loss: str = "huber",
        prioritized: Mapping[str, Any] | None = None,
        use_masking: bool = True,
        **further: Any,
    ) -> None:
        if loss not in LOSSES:
            raise ConfigError(f"loss={loss!r}: choose {' or '.join(LOSSES)}")
        self.double_q, self.loss_kind, self.use_masking = double_q, loss, use_masking
        self.prioritized = None if prioritized is None else dict(prioritized)
        super().__init__(*args, **further)

    def _setup_model(self) -> None:
        if isinstance(vars(self).get("loss"), str):  # `loss_kind` in zips of before
            self.loss_kind = vars(self).pop("loss")
        self.dims = action_dims(self.action_space)  # sizes of the sub-actions, A their sum
        several = isinstance(self.action_space, spaces.MultiDiscrete)
        if several:
            self.policy_class = BRANCHING.get(self.policy_class, self.policy_class)
        if self.replay_buffer is None and self.replay_buffer_class in STOCK_REPLAYS:
            masked = self.use_masking and self.env is not None and slots_of(self.env).masked
            self.replay_buffer = replay_of(self, sum(self.dims) if masked else None)
        super()._setup_model()
        self._attach()
        own = {f"{type(self).__name__}.{name} is overridden": getattr(type(self), name) is not getattr(DQN, name)
               for name in ("evaluate", "loss")}  # fmt: skip
        extras = {"double_q=True": self.double_q, "loss='mse'": self.loss_kind == "mse", "prioritized":
                  self.prioritized is not None, "MultiDiscrete actions": several, **own}  # fmt: skip
        refuse_foreign_buffer(self.replay_buffer, extras)

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
        masked = self.use_masking and source.masked
        storage: Any = self.replay_buffer
        if masked or not isinstance(storage, ReplayStorage):
            storage = storage_of(self, sum(self.dims) if masked else None)
        if storage is None:  # a buffer of a class that is none of ours: SB3's own loop serves it
            return super().collect_rollouts(
                env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
            )
        if failure := self.prepare(env):
            warnings.warn(f"{failure}; training goes on without", stacklevel=3)
        callback.update_locals(  # names of stock's loop that stay: once, and not at every step
            {"self": self, "env": env, "callback": callback, "train_freq": train_freq, "replay_buffer": storage,
             "action_noise": action_noise, "learning_starts": learning_starts, "log_interval": log_interval,
             "continue_training": True}
        )  # fmt: skip
        with self.collector.clock.phase("buffer"):
            return self._collect(source, storage, masked, callback, train_freq, learning_starts, log_interval)

    def _collect(
        self,
        source: SlotSource,
        storage: ReplayStorage,
        masked: bool,
        callback: BaseCallback,
        train_freq: TrainFreq,
        learning_starts: int,
        log_interval: int | None,
    ) -> RolloutReturn:
        collector, clock, space = self.collector, self.collector.clock, self.action_space
        num_steps, num_episodes = 0, 0
        self.policy.set_training_mode(False)
        with clock.phase("log"):
            callback.on_rollout_start()  # it may exchange the engine
        while should_collect_more_steps(train_freq, num_steps, num_episodes):
            clock.enter("env_step")  # reading the masks is the env's work
            masks = opened(read_masks(collector, source, space, self.num_timesteps), self.dims) if masked else None
            clock.enter("action")
            actions = self._choose(source.num_envs, masks, learning_starts)
            came = collector.step(source, actions)
            self.num_timesteps += source.slots.transitions
            num_steps += 1
            if self.engine.guard is not None:  # last observations are stored, even of episodes that ended by the rules
                normalizer = self._vec_normalize_env
                check_step(came.observations, came.rewards, source.slots.finished, self.num_timesteps, normalizer)
            clock.enter("log")
            callback.update_locals(
                {"num_collected_steps": num_steps, "num_collected_episodes": num_episodes, "actions": actions,
                 "buffer_actions": actions, "new_obs": came.observations, "rewards": came.rewards,
                 "dones": came.dones, "infos": came.infos}
            )  # fmt: skip
            if not callback.on_step():
                return RolloutReturn(num_steps * source.num_envs, num_episodes, continue_training=False)
            clock.enter("buffer")
            note_episodes(self, came.infos, came.dones)
            self._store(source, storage, masked, actions, came)
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()  # exploration rate and target network
            for _ in range(np.count_nonzero(came.dones)):
                num_episodes += 1
                self._episode_num += 1
                if log_interval is not None and self._episode_num % log_interval == 0:
                    self.dump_logs()
        with clock.phase("log"):
            callback.on_rollout_end()
        return RolloutReturn(num_steps * source.num_envs, num_episodes, continue_training=True)

    def _choose(self, count: int, masks: BoolArray | None, learning_starts: int) -> NDArray[Any]:  # (N,) or (N, K)
        """ε-greedy as SB3: one draw decides for the whole vector step; before `learning_starts` all is random."""
        if masks is None and self._chooses_itself():
            return self._sample_action(learning_starts, None, count)[0]
        if self.num_timesteps < learning_starts or np.random.rand() < self.exploration_rate:
            return random_actions(self.action_space, count, masks, self.collector.local_random_actions)
        engine = self.engine if self.engine.fits(self.policy) else self.engine_now()
        return engine.act(self._last_obs, masks).actions

    def _chooses_itself(self) -> bool:
        """Whether a method of the user's chooses the actions: it is asked as SB3 asks it. Takes 0.5 µs."""
        asked = (self._sample_action, self.predict, self.policy._predict)
        return any(getattr(method, "__module__", "") not in CHOOSING for method in asked)

    def _store(
        self, source: SlotSource, storage: ReplayStorage, masked: bool, actions: NDArray[Any], came: Came
    ) -> None:
        """One transition per env that made one. What VecNormalize changed is stored as the env gave it, as SB3 does."""
        normalizer, slots = self._vec_normalize_env, source.slots
        seen, rewards = came.observations, came.rewards
        if normalizer is None:
            self._last_original_obs = self._last_obs
        else:
            seen, rewards = normalizer.get_original_obs(), normalizer.get_original_reward()
        next_obs, next_masks = next_states(source, seen, normalizer, self.dims if masked else None)
        timeouts = slots.truncations & ~slots.terminations
        before: Any = self._last_original_obs
        with storage.lock:
            storage.put(before, next_obs, actions, rewards, came.dones, timeouts, next_masks)
            if any(none := left_out(slots)):
                storage.discard(*none)
        self._last_obs = came.observations
        if normalizer is not None:
            self._last_original_obs = seen

    # --- learning

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Take `gradient_steps` optimizer steps, each on a batch of its own, and log them as SB3 does.

        Raises:
            DivergedError: round after round no update was finite; see `guard.py`.
        """
        if not isinstance(self.replay_buffer, ReplayStorage):  # none of ours: SB3's own update serves it
            return super().train(gradient_steps, batch_size)
        policy, clock = self.policy, self.collector.clock
        with clock.phase("other"):
            policy.set_training_mode(True)
            self._update_learning_rate(policy.optimizer)
            if isinstance(self.replay_buffer, PrioritizedReplayBuffer):
                self.replay_buffer.anneal(self._current_progress_remaining)
            engine: Any = self.engine_now()
            if engine.kind == "kernels":
                return self._record(engine, self._by_kernels(engine, gradient_steps, batch_size))
            replay, step = self.replay(), TorchStep(engine, self.max_grad_norm)
            with step.stepping():
                clock.enter("replay_sample")
                for batch in replay.sampler.batches(replay.storage, gradient_steps, batch_size, replay.normalizer):
                    clock.enter("train_fwd")
                    compiled = None if engine.compiled is None else engine.compiled.terms_of(batch)
                    if compiled is not None:
                        evaluated, terms = compiled
                    else:
                        evaluated = self.evaluate(batch)
                        terms = self.loss(batch, evaluated)
                    loss = reduce(torch.add, checked(self, terms, LOGGED).values())
                    clock.enter("train_bwd")
                    policy.optimizer.zero_grad()
                    step.backward(loss)
                    clock.enter("optim")
                    step.apply(loss)
                    step.noted.append({name: term.detach() for name, term in {**terms, "loss": loss}.items()})
                    clock.enter("replay_sample")
                    if batch.indices is not None:  # of prioritized replay
                        errors = (evaluated.current.detach() - evaluated.target).abs().mean(dim=1).cpu().numpy()
                        replay.rate(batch.indices, errors, batch.generation, guarded=engine.guard is not None)
            self._record(engine, engine.counted(step.read()))

    def evaluate(self, batch: ReplayBatch) -> Evaluated:
        """What the networks say of a batch: r + discount × V(next) is the target, V by the target network.

        V is the value of the target network's best legal action, with `double_q` of the online network's. Of several
        sub-actions it is the mean of theirs (Tavakoli et al. 2018).
        """
        policy, precision, dims = self.policy, self.engine.precision, self.dims
        with torch.no_grad():
            masks = batch.next_action_masks
            next_values = network_values(policy.q_net_target, batch.next_observations, precision)
            if self.double_q:
                chosen = greedy(network_values(policy.q_net, batch.next_observations, precision), masks, dims)
                best = chosen_values(next_values, chosen, dims)
            else:
                best = best_values(next_values, masks, dims)
            discounts = self.gamma if batch.discounts is None else batch.discounts
            target = batch.rewards + (1 - batch.dones) * discounts * best.mean(dim=1, keepdim=True)
        q_values = network_values(policy.q_net, batch.observations, precision)
        return Evaluated(q_values, chosen_values(q_values, batch.actions, dims), target)

    def loss(self, batch: ReplayBatch, evaluated: Evaluated) -> dict[str, Tensor]:
        """The named terms, scalars, whose sum is minimised and logged as `train/loss`.

        Terms of a subclass's own are logged as `train/<name>` besides. The TD error's is the mean Huber loss (delta 1,
        SB3's) or squared error over rows and sub-actions, weighted where prioritized replay drew the batch.
        """
        error, target = LOSSES[self.loss_kind], evaluated.target.expand_as(evaluated.current)
        if batch.weights is None:
            return {"td_loss": error(evaluated.current, target)}
        return {"td_loss": (batch.weights * error(evaluated.current, target, reduction="none")).mean()}

    def _record(self, engine: Engine, done: Statistics) -> None:
        """Log means in float64 of float32 scalars, as SB3 takes them, of the updates that were not skipped."""
        engine.clock.enter("log")
        self._n_updates += done.epochs
        record, only = self.logger.record, done.terms.keys() == {"td_loss", "loss"}
        for name, values in done.terms.items():
            if only and name == "td_loss":  # is the loss
                continue
            if done.skipped and len(values) == len(done.norms):  # a term need not be in every batch
                values = values[np.isfinite(done.norms)]
            record(f"train/{name}", float(values.mean(dtype=np.float64)) if len(values) else np.nan)
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        if engine.skipped_steps:
            record("train/skipped_steps", engine.skipped_steps)
        if engine.guard is not None:
            engine.guard.note(self, done.norms, lambda: why_replay(self, done.blamed), expected=done.expected_skips)

    # --- acting outside of training

    def predict(
        self,
        observation: Any,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
        action_masks: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """As SB3's; with masks, (A,) or (N, A), no illegal action is chosen or drawn."""
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        self.policy.set_training_mode(False)
        tensor, vectorized = self.policy.obs_to_tensor(observation)
        masks = opened(np.asarray(action_masks, np.bool_).reshape(-1, sum(self.dims)), self.dims)
        if not deterministic and np.random.rand() < self.exploration_rate:
            actions = random_actions(self.action_space, len(masks), masks, at_once=False)
        else:
            with torch.no_grad():
                best = greedy(self.q_net(tensor), torch.from_numpy(masks).to(self.device), self.dims).cpu().numpy()
            actions = best.reshape(-1, *(self.action_space.shape or ()))
        return (actions if vectorized else actions[0]), state

    # --- what a plain run does not use: compiled code, batches drawn ahead, buffers made for masks

    def _by_kernels(self, engine: Any, gradient_steps: int, batch_size: int) -> Statistics:
        """All updates in one call. Raises EnvError: the loss is not finite and nothing is guarded."""
        try:
            return engine.update(self.replay(), self.work(gradient_steps, batch_size))  # type: ignore[no-any-return]
        except EnvError as error:
            raise EnvError(f"at step {self.num_timesteps:,}: {error}") from error

    def work(self, gradient_steps: int, batch_size: int) -> QWork:
        """The updates that kernels shall compute, by the model's settings."""
        return QWork(gradient_steps, batch_size, self.double_q, self.loss_kind, self.gamma, self.max_grad_norm)

    def replay(self) -> Replay:
        """The buffer as updates ask for batches of it."""
        buffer: Any = self.replay_buffer
        return Replay(buffer, self.collector.sampler, self._vec_normalize_env)

    def prefetch_batches(self, deterministic: bool = False, depth: int = 1) -> None:
        """Draw the next update's batches in a thread; see `Prefetching`.

        `deterministic`: the batches of a run without a thread. These depend on every number drawn before them, so that
        none can be drawn ahead.
        """
        self.collector.sampler.close()
        self.collector.sampler = Direct() if deterministic else Prefetching(self.seed, depth)

    def learn(
        self: SelfDQN,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "DQN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfDQN:
        """As SB3's; whatever ends it, no thread is left behind."""
        self.collector.watch = None
        try:
            return super().learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )
        finally:
            self.collector.sampler.close()
