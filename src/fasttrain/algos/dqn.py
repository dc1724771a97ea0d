"""DQN: SB3's class, collecting and updating faster, and what SB3 has not: masks, double Q-learning, PER.

`learn`, `load`, `save`, schedules, target updates, loggers and callbacks are SB3's own. With plain settings every
number is that of stock DQN (tests/parity/test_dqn_parity.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv, RolloutReturn, Schedule, TrainFreq
from stable_baselines3.common.utils import should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.dqn.policies import DQNPolicy

from fasttrain.algos.heads import MaskCheck, action_dims
from fasttrain.algos.q_networks import BRANCHING_POLICIES, greedy
from fasttrain.algos.q_update import QState, update
from fasttrain.algos.rollouts import note_episodes
from fasttrain.batch import BoolArray, FinishedEpisode
from fasttrain.buffers.prefetch import Direct, Prefetching
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.vec.adapter import slots_of
from fasttrain.vec.base import SlotSource, copy_observations

LOSSES = ("huber", "mse")
_STOCK_BUFFERS = (None, ReplayBuffer, DictReplayBuffer, NStepReplayBuffer)
SelfDQN = TypeVar("SelfDQN", bound="DQN")


class DQN(stable_baselines3.DQN):
    """Drop-in for `stable_baselines3.DQN`. A zip of a plain network loads there.

    Args:
        double_q: the online network chooses the next action, the target network rates it (van Hasselt et al. 2016).
        loss: "huber" (SB3's) or "mse".
        prioritized: arguments of `PrioritizedReplayBuffer` (`alpha`, `beta`, …), {} for its defaults; None: uniform.
        use_masking: masks in exploration, in the greedy choice and in the target, if the env has them.
        further arguments: as `stable_baselines3.DQN`. MultiDiscrete actions get one head of the network each
            (Tavakoli et al. 2018); such a model does not load in stock DQN.

    Raises:
        ConfigError: an unknown loss.
    """

    _fast: QState

    def __init__(
        self,
        policy: str | type[DQNPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-4,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 32,
        tau: float = 1.0,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 4,
        gradient_steps: int = 1,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        target_update_interval: int = 10_000,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        max_grad_norm: float = 10.0,
        *,
        double_q: bool = False,
        loss: str = "huber",
        prioritized: Mapping[str, Any] | None = None,
        use_masking: bool = True,
        _init_setup_model: bool = True,
        **further: Any,
    ) -> None:
        if loss not in LOSSES:
            raise ConfigError(f"loss={loss!r}: choose {' or '.join(LOSSES)}")
        self.double_q, self.loss, self.use_masking = double_q, loss, use_masking
        self.prioritized = None if prioritized is None else dict(prioritized)
        # SB3's DQN takes Discrete actions alone, so its own constructor is passed by.
        OffPolicyAlgorithm.__init__(
            self, policy, env, learning_rate, buffer_size, learning_starts, batch_size, tau, gamma, train_freq,
            gradient_steps, replay_buffer_class=replay_buffer_class, replay_buffer_kwargs=replay_buffer_kwargs,
            optimize_memory_usage=optimize_memory_usage, n_steps=n_steps, sde_support=False, support_multi_env=True,
            supported_action_spaces=(spaces.Discrete, spaces.MultiDiscrete), **further,
        )  # fmt: skip
        space = getattr(self, "action_space", None)  # `load` without an env brings it later
        if isinstance(space, spaces.MultiDiscrete) and policy in BRANCHING_POLICIES:
            self.policy_class = BRANCHING_POLICIES[policy]
        self.exploration_initial_eps, self.exploration_final_eps = exploration_initial_eps, exploration_final_eps
        self.exploration_fraction = exploration_fraction
        self.target_update_interval, self.max_grad_norm = target_update_interval, max_grad_norm
        self._n_calls, self.exploration_rate = 0, 0.0
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        if self.replay_buffer is None and self.replay_buffer_class in _STOCK_BUFFERS:
            masked = self.use_masking and self.env is not None and slots_of(self.env).masked
            self.replay_buffer = _new_storage(self, masked)
        super()._setup_model()
        self._fast = QState()

    def use_kernels(self) -> None:
        """Act and learn through compiled kernels where the policy allows it: faster, equal up to rounding."""
        self._fast.fused = True

    def prefetch_batches(self, deterministic: bool = False, depth: int = 1) -> None:
        """Draw the next update's batches in a thread; see `Prefetching`.

        `deterministic`: the batches of a run without a thread, same random stream. Such a batch depends on every
        number drawn before it, so it is drawn when it is asked for, and nothing is ahead of time.
        """
        self._fast.sampler.close()
        self._fast.sampler = Direct() if deterministic else Prefetching(self.seed, depth)

    def learn(self: SelfDQN, *arguments: Any, **options: Any) -> SelfDQN:
        """As SB3's; whatever ends it, no thread is left behind."""
        try:
            return super().learn(*arguments, **options)
        finally:
            self._fast.sampler.close()

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
        source = self._fast.source_of(env)
        masked = self.use_masking and source.masked
        storage = _storage_of(self, masked)
        if storage is None:
            return super().collect_rollouts(
                env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
            )
        with self._fast.clock.phase("buffer"):
            return collect(self, source, masked, storage, callback, train_freq, learning_starts, log_interval)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        if not isinstance(self.replay_buffer, ReplayStorage):
            return super().train(gradient_steps, batch_size)
        with self._fast.clock.phase("other"):
            update(self, gradient_steps, batch_size)

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
        width = sum(action_dims(self.action_space))
        masks = np.asarray(action_masks).astype(np.bool_).reshape(-1, width)
        MaskCheck(self.action_space)(masks, self.num_timesteps)
        if not deterministic and np.random.rand() < self.exploration_rate:
            actions = random_actions(self.action_space, len(masks), masks, at_once=False)
        else:
            with torch.no_grad():
                actions = _greedy(self, tensor, masks)
        return (actions if vectorized else actions[0]), state

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_fast"]


def _new_storage(model: DQN, masked: bool) -> ReplayStorage:
    kind = ReplayStorage if model.prioritized is None else PrioritizedReplayBuffer
    return kind(
        model.buffer_size,
        model.observation_space,
        model.action_space,
        device=model.device,
        n_envs=model.n_envs,
        optimize_memory_usage=model.optimize_memory_usage,
        n_steps=model.n_steps,
        gamma=model.gamma,
        mask_width=sum(action_dims(model.action_space)) if masked else None,
        **{**model.replay_buffer_kwargs, **(model.prioritized or {})},
    )


def _storage_of(model: DQN, masked: bool) -> ReplayStorage | None:
    """The model's buffer if it is one of ours, made anew while empty if the env turns out to have masks.

    Raises:
        EnvSpecError: the env has masks and the buffer has no room for them.
    """
    buffer = model.replay_buffer
    if not masked:
        return buffer if isinstance(buffer, ReplayStorage) else None
    if isinstance(buffer, ReplayStorage) and buffer.mask_width is not None:
        return buffer
    if isinstance(buffer, ReplayStorage) and buffer.size() == 0 and model.replay_buffer_class in _STOCK_BUFFERS:
        model.replay_buffer = storage = _new_storage(model, masked)
        return storage
    raise EnvSpecError(
        f"the env has action masks, and {type(buffer).__name__} does not store them: leave replay_buffer_class out, "
        "give it mask_width=…, or take use_masking=False"
    )


def collect(
    model: DQN,
    source: SlotSource,
    masked: bool,
    storage: ReplayStorage,
    callback: BaseCallback,
    train_freq: TrainFreq,
    learning_starts: int,
    log_interval: int | None,
) -> RolloutReturn:
    """As SB3's `collect_rollouts`: act, step, store, until there is enough for the next update.

    The names of SB3's local variables (`infos`, `dones`, `new_obs`, …) are kept where callbacks read them.
    """
    fast = model._fast
    clock = fast.clock
    num_collected_steps, num_collected_episodes = 0, 0
    model.policy.set_training_mode(False)
    with clock.phase("log"):
        callback.on_rollout_start()
    while should_collect_more_steps(train_freq, num_collected_steps, num_collected_episodes):
        clock.enter("env_step")  # reading the masks is the env's work
        action_masks = _read_masks(model, source) if masked else None
        clock.enter("action")
        actions = _choose(model, learning_starts, source.num_envs, action_masks)
        clock.enter("env_step")
        source.step_slots(actions)
        model.num_timesteps += source.num_envs
        num_collected_steps += 1
        clock.enter("buffer")
        slots = source.slots
        new_obs: Any = copy_observations(slots.observations) if source.reuses_arrays else slots.observations
        rewards = np.array(slots.rewards, np.float32)
        dones = slots.terminations | slots.truncations
        infos = source.infos()
        clock.enter("log")
        callback.update_locals({**locals(), "self": model})
        if not callback.on_step():
            return RolloutReturn(num_collected_steps * source.num_envs, num_collected_episodes, continue_training=False)
        clock.enter("buffer")
        note_episodes(model, source, infos, dones)
        _store(model, source, storage, actions, new_obs, rewards, dones, masked)
        model._update_current_progress_remaining(model.num_timesteps, model._total_timesteps)
        model._on_step()
        for _ in range(np.count_nonzero(dones)):
            num_collected_episodes += 1
            model._episode_num += 1
            if log_interval is not None and model._episode_num % log_interval == 0:
                model.dump_logs()
    with clock.phase("log"):
        callback.on_rollout_end()
    return RolloutReturn(num_collected_steps * source.num_envs, num_collected_episodes, continue_training=True)


def _choose(model: DQN, learning_starts: int, count: int, masks: BoolArray | None) -> NDArray[Any]:
    """ε-greedy as SB3: one draw decides for the whole vector step; before `learning_starts` all is random."""
    at_once = model._fast.local_random_actions
    if model.num_timesteps < learning_starts or np.random.rand() < model.exploration_rate:
        return random_actions(model.action_space, count, masks, at_once)
    kernels = model._fast.kernels_of(model)
    if kernels is not None:
        return kernels.act(model._last_obs, masks)  # type: ignore[arg-type]
    with torch.no_grad():
        return _greedy(model, model.policy.obs_to_tensor(model._last_obs)[0], masks)  # type: ignore[arg-type]


def _greedy(model: DQN, observations: Any, masks: BoolArray | None) -> NDArray[Any]:  # (N,) or (N, K)
    mask_tensor = None if masks is None else torch.from_numpy(masks).to(model.device)
    best = greedy(model.q_net(observations), mask_tensor, action_dims(model.action_space))
    actions: NDArray[Any] = best.cpu().numpy()
    return actions


def random_actions(
    space: spaces.Space[Any], count: int, masks: BoolArray | None, at_once: bool
) -> NDArray[Any]:  # (count,) or (count, K)
    """Uniform over the (legal) actions of each row: by the space's own sampler, or all in one draw of its stream."""
    dims = action_dims(space)
    if not at_once:
        if masks is None:
            return np.array([space.sample() for _ in range(count)])
        ends = np.cumsum(dims)[:-1]
        given = masks.astype(np.int8)
        rows = [tuple(np.split(row, ends)) if len(dims) > 1 else row for row in given]
        return np.array([space.sample(mask=row) for row in rows])
    rng = space.np_random
    if masks is None:
        drawn = rng.integers(0, dims, size=(count, len(dims)))
    else:
        keys = rng.random(masks.shape)
        keys[~masks] = -1.0
        drawn = np.stack([part.argmax(axis=1) for part in np.split(keys, np.cumsum(dims)[:-1], axis=1)], axis=1)
    return drawn[:, 0] if isinstance(space, spaces.Discrete) else drawn


def _read_masks(model: DQN, source: SlotSource) -> BoolArray:
    """A checked copy of the masks (N, A): the step that follows overwrites the slots."""
    masks = source.read_masks()
    if masks is None:
        raise EnvSpecError(f"the env had action masks when training began and has none at step {model.num_timesteps}")
    MaskCheck(model.action_space)(masks, model.num_timesteps)
    return np.array(masks)


def _store(
    model: DQN,
    source: SlotSource,
    storage: ReplayStorage,
    actions: NDArray[Any],
    new_obs: Any,
    rewards: NDArray[Any],
    dones: BoolArray,
    masked: bool,
) -> None:
    """One transition per env. What normalising wrappers changed is stored as it was, as SB3 does."""
    normalizer = model._vec_normalize_env
    finished, seen = source.slots.finished, new_obs
    if normalizer is None:
        model._last_original_obs = model._last_obs
    else:
        seen, rewards = normalizer.get_original_obs(), normalizer.get_original_reward()
    next_obs = copy_observations(seen) if finished else seen
    for episode in finished:
        _put_last(next_obs, episode, normalizer)
    timeouts = source.slots.truncations & ~source.slots.terminations
    next_masks = None
    if masked:
        next_masks = np.array(source.read_masks())
        next_masks[dones] = True  # of a last state the env tells no mask
    before: Any = model._last_original_obs
    storage.put(before, next_obs, actions, rewards, dones, timeouts, next_masks)
    model._last_obs = new_obs
    if normalizer is not None:
        model._last_original_obs = seen


def _put_last(next_obs: Any, episode: FinishedEpisode, normalizer: Any) -> None:
    """The episode's last observation in the place of the next one's first."""
    last: Any = episode.final_observation
    if last is None:
        return
    if normalizer is not None:
        last = normalizer.unnormalize_obs(last)
    if isinstance(next_obs, dict):
        for key, part in next_obs.items():
            part[episode.env_index] = last[key]
    else:
        next_obs[episode.env_index] = last
