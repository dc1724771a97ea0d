"""DQN: SB3's class with a plain PyTorch update, written out here from acting to the optimizer's step.

`learn`, `load`, `save`, schedules, target updates, loggers and callbacks are SB3's own. With default settings every
number is that of stock DQN (tests/parity/test_off_policy_parity.py). This class also has action
masks, MultiDiscrete actions, double Q-learning and prioritized replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.dqn.policies import DQNPolicy
from torch import Tensor
from torch.nn import functional

from fasttrain.algos.engine import EnvStep, Statistics
from fasttrain.algos.off_policy import OffPolicy, without_threads_left
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.q_networks import (
    BRANCHING,
    TorchQEngine,
    best_values,
    chosen_values,
    greedy,
    network_values,
    random_actions,
)
from fasttrain.algos.step import TorchStep, check_terms
from fasttrain.batch import LAST_MASKS, BoolArray, each_array
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.stock import refuse_foreign_buffer
from fasttrain.errors import ConfigError, EnvError
from fasttrain.vec.base import SlotSource, copy_observations, unblock_masks

LOSSES = {"huber": functional.smooth_l1_loss, "mse": functional.mse_loss}
CHOOSING = (
    OffPolicyAlgorithm.__module__,
    DQNPolicy.__module__,
    __name__,
)  # methods of these modules choose like `_choose`
LOGGED = ("loss", "n_updates", "skipped_steps")  # keys of the log that no term of the loss may have


class Evaluated(NamedTuple):
    """What the networks compute for a batch of B transitions. `q_values` and `current` carry gradients."""

    q_values: Tensor  # (B, A) values of all actions, by the online network
    current: Tensor  # (B, K) entries of `q_values` for the K sub-actions that were taken
    target: Tensor  # (B, 1) the TD target of `current`


class QWork(NamedTuple):
    """The settings of a round of DQN updates by compiled kernels."""

    gradient_steps: int
    batch_size: int
    double_q: bool  # the online network chooses the next action (van Hasselt et al. 2016)
    loss: str  # huber or mse
    gamma: float  # discount factor, if a batch has no discounts of its own
    max_grad_norm: float


class AnyDiscrete(OffPolicyAlgorithm):
    """A base of DQN that allows MultiDiscrete actions. SB3's DQN refuses them."""

    def __init__(self, *args: Any, **further: Any) -> None:
        further["supported_action_spaces"] = (spaces.Discrete, spaces.MultiDiscrete)
        super().__init__(*args, **further)


class DQN(OffPolicy, stable_baselines3.DQN, AnyDiscrete):
    """Drop-in for `stable_baselines3.DQN`. Stock SB3 loads the zips of models with SB3's own network.

    A subclass can add a term to the loss, for example the term of conservative Q-learning (Kumar et al. 2020):

        def loss(self, batch, evaluated):
            every = evaluated.q_values.logsumexp(1, keepdim=True)
            return super().loss(batch, evaluated) | {"cql_loss": (every - evaluated.current).mean()}

    Args:
        double_q: the online network chooses the next action, the target network gives its value (van Hasselt et al.
            2016).
        loss: "huber" (SB3's) or "mse".
        prioritized: arguments of `PrioritizedReplayBuffer` (`alpha`, `beta`, …), {} for its defaults; None: uniform.
        use_masking: use the env's action masks in exploration, in the greedy choice and in the target.
        further arguments: those of `stable_baselines3.DQN`, and `engine`: "torch" (stock's numbers), "kernels" (an MLP
            on the CPU), or `EngineSettings`. A model for MultiDiscrete actions has one head per sub-action (Tavakoli
            et al. 2018). Stock DQN cannot load this model.

    Raises:
        ConfigError: an unknown loss.
    """

    _torch_engine = TorchQEngine
    learn = without_threads_left(stable_baselines3.DQN.learn)

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
        if isinstance(vars(self).get("loss"), str):  # zips of older versions store `loss_kind` as "loss"
            self.loss_kind = vars(self).pop("loss")
        self.dims = action_dims(self.action_space)  # sizes of the sub-actions; A is their sum
        several = isinstance(self.action_space, spaces.MultiDiscrete)
        if several:
            self.policy_class = BRANCHING.get(self.policy_class, self.policy_class)
        super()._setup_model()
        extras = {"double_q=True": self.double_q, "loss='mse'": self.loss_kind == "mse", "prioritized":
                  self.prioritized is not None, "MultiDiscrete actions": several,
                  **self.overrides(DQN, "evaluate", "loss")}  # fmt: skip
        refuse_foreign_buffer(self.replay_buffer, extras)

    # --- acting, in the loop of `off_policy.py`

    def _choose(
        self, source: SlotSource, action_noise: ActionNoise | None, learning_starts: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """ε-greedy as in SB3: one draw decides for all envs. Before `learning_starts` all actions are random."""
        collector, count, masks = self.collector, source.num_envs, None
        if self.use_masking and source.masked:
            collector.clock.enter("env_step")  # reading masks counts as the env's time
            masks = unblock_masks(collector.read_masks(source, self.dims, self.num_timesteps), self.dims)
            collector.clock.enter("action")
        choosing = (self._sample_action, self.predict, self.policy._predict)
        if masks is None and any(getattr(method, "__module__", "") not in CHOOSING for method in choosing):
            actions = self._sample_action(learning_starts, None, count)[0]  # calls the method that the user overrides
        elif self.num_timesteps < learning_starts or np.random.rand() < self.exploration_rate:
            actions = random_actions(self.action_space, self.dims, count, masks)
        else:
            engine = self.engine if self.engine.fits(self.policy) else self.engine_now()
            actions = engine.act(self._last_obs, masks).actions
        return actions, actions

    def _store(self, source: SlotSource, storage: ReplayStorage, actions: NDArray[Any], step: EnvStep) -> None:
        """Store one transition per env, as in SB3: with observations and rewards before normalisation."""
        dims = self.dims if self.use_masking and source.masked else None
        if dims is None and self._store_transition.__module__ != OffPolicyAlgorithm.__module__:
            return super()._store(source, storage, actions, step)  # call the method that the user's class overrides
        normalizer, slots = self._vec_normalize_env, source.slots
        seen, rewards = step.observations, step.rewards
        if normalizer is None:
            self._last_original_obs = self._last_obs
        else:
            seen, rewards = normalizer.get_original_obs(), normalizer.get_original_reward()
        next_obs, next_masks = next_states(source, seen, normalizer, dims)
        before: Any = self._last_original_obs
        storage.put(before, next_obs, actions, rewards, step.dones, slots.truncations & ~slots.terminations, next_masks)
        self._last_obs = step.observations
        if normalizer is not None:
            self._last_original_obs = seen

    # --- learning

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Take `gradient_steps` optimizer steps, each on a batch of its own, and log them as SB3 does.

        Raises:
            DivergedError: too many rounds in a row had no finite update; see `guard.py`.
        """
        if not isinstance(self.replay_buffer, ReplayStorage):  # any other buffer: SB3's own update
            return super().train(gradient_steps, batch_size)
        policy, clock = self.policy, self.collector.clock
        with clock.phase("other"):
            self._update_learning_rate(policy.optimizer)
            if isinstance(self.replay_buffer, PrioritizedReplayBuffer):
                self.replay_buffer.anneal(self._current_progress_remaining)
            engine: Any = self.engine_now()
            if engine.kind == "kernels":
                return self._record(engine, self._by_kernels(engine, gradient_steps, batch_size))
            policy.set_training_mode(True)
            replay, step = self.replay(), TorchStep(engine, self.max_grad_norm)
            with step.stepping():
                clock.enter("replay_sample")
                for batch in replay.batches(gradient_steps, batch_size):
                    clock.enter("train_fwd")
                    compiled = None if engine.compiled is None else engine.compiled.terms_of(batch)
                    if compiled is not None:
                        evaluated, terms = compiled
                    else:
                        evaluated = self.evaluate(batch)
                        terms = self.loss(batch, evaluated)
                    loss = reduce(torch.add, check_terms(self, terms, LOGGED).values())
                    clock.enter("train_bwd")
                    policy.optimizer.zero_grad()
                    step.backward(loss)
                    clock.enter("optim")
                    step.apply(loss)
                    step.noted.append({name: term.detach() for name, term in {**terms, "loss": loss}.items()})
                    clock.enter("replay_sample")
                    if batch.indices is not None:  # prioritized replay
                        errors = (evaluated.current.detach() - evaluated.target).abs().mean(dim=1).cpu().numpy()
                        replay.rate(batch.indices, errors, batch.generation, guarded=engine.guard is not None)
            if all(noted.keys() == {"td_loss", "loss"} for noted in step.noted):  # loss and td_loss are the same number
                step.noted = [{"loss": noted["loss"]} for noted in step.noted]
            self._record(engine, engine.count_steps(step.read()))

    def evaluate(self, batch: ReplayBatch) -> Evaluated:
        """Values of a batch, and the target r + discount × V(next).

        V is the target network's value of the best legal action. The target network chooses this action; if
        `double_q`, the online network does. With several sub-actions V is the mean over them (Tavakoli et al. 2018).
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
        """Scalar terms by name. Their sum is minimised and logged as `train/loss`.

        Terms that a subclass adds are also logged, as `train/<name>`. `td_loss` is the mean Huber loss (delta 1, as in
        SB3) or squared error over rows and sub-actions, weighted if prioritized replay drew the batch.
        """
        error, target = LOSSES[self.loss_kind], evaluated.target.expand_as(evaluated.current)
        if batch.weights is None:
            return {"td_loss": error(evaluated.current, target)}
        return {"td_loss": (batch.weights * error(evaluated.current, target, reduction="none")).mean()}

    # --- acting outside of training

    def predict(
        self,
        observation: Any,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
        action_masks: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """As SB3's `predict`. With masks, (A,) or (N, A), only legal actions are chosen or drawn."""
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        self.policy.set_training_mode(False)
        tensor, vectorized = self.policy.obs_to_tensor(observation)
        masks = unblock_masks(np.asarray(action_masks, np.bool_).reshape(-1, sum(self.dims)), self.dims)
        if not deterministic and np.random.rand() < self.exploration_rate:
            actions = random_actions(self.action_space, self.dims, len(masks), masks)
        else:
            with torch.no_grad():
                best = greedy(self.q_net(tensor), torch.from_numpy(masks).to(self.device), self.dims).cpu().numpy()
            actions = best.reshape(-1, *(self.action_space.shape or ()))
        return (actions if vectorized else actions[0]), state

    # --- compiled kernels

    def _by_kernels(self, engine: Any, gradient_steps: int, batch_size: int) -> Statistics:
        """All updates in one call. Raises EnvError if the loss is not finite and `nan_guard` is off."""
        try:
            return engine.update(self.replay(), self.work(gradient_steps, batch_size))  # type: ignore[no-any-return]
        except EnvError as error:
            raise type(error)(f"at step {self.num_timesteps:,}: {error}") from error

    def work(self, gradient_steps: int, batch_size: int) -> QWork:
        """The settings of a round of updates by compiled kernels."""
        return QWork(gradient_steps, batch_size, self.double_q, self.loss_kind, self.gamma, self.max_grad_norm)


def next_states(
    source: SlotSource, observations: Any, normalizer: Any, dims: Sequence[int] | None
) -> tuple[Any, BoolArray | None]:  # (N, ...), (N, A)
    """Next observations and masks for the replay buffer. Where an episode ended, they are the episode's last.

    Args:
        observations: those after the step. Where an episode ended, it is the first observation of the next episode.
        normalizer: SB3's VecNormalize, which here undoes the normalisation of last observations; or None.
        dims: sizes of the sub-actions; None: no masks. All choices are legal in a last observation for which the env
            gave no masks, and in a sub-action without a legal choice.
    """
    finished = source.slots.finished
    masks = None if dims is None else np.array(source.read_masks())
    if masks is not None:
        masks[source.slots.terminations | source.slots.truncations] = True
    if finished:
        observations = copy_observations(observations)
    for episode in finished:
        last, env, last_masks = episode.final_observation, episode.env_index, episode.info.get(LAST_MASKS)
        if last is not None:
            last = last if normalizer is None else normalizer.unnormalize_obs(last)
            each_array(lambda part, row, env=env: part.__setitem__(env, row), observations, last)
        if masks is not None and last_masks is not None and episode.truncated:
            masks[env] = last_masks
    return observations, None if masks is None or dims is None else unblock_masks(masks, dims)
