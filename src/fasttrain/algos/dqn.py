"""DQN: SB3's class, collecting and updating faster, and what SB3 has not: masks, double Q-learning, PER.

`learn`, `load`, `save`, schedules, target updates, loggers and callbacks are SB3's own. With plain settings every
number is that of stock DQN (tests/parity/test_dqn_parity.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, Schedule, TrainFreq
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecFrameStack, VecTransposeImage
from stable_baselines3.dqn.policies import DQNPolicy

from fasttrain.algos.fast import Fast
from fasttrain.algos.q_collect import collect, random_actions
from fasttrain.batch import opened
from fasttrain.buffers.prefetch import Direct, Prefetching, Replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.buffers.stock import STOCK_REPLAYS, replay_class, window_of
from fasttrain.engines import layout
from fasttrain.engines.causes import why_replay
from fasttrain.engines.engine import Engine, EngineSettings, QRule, QWork
from fasttrain.engines.heads import action_dims
from fasttrain.engines.kernels_q import KernelQEngine
from fasttrain.engines.q_networks import BRANCHING_POLICIES, greedy
from fasttrain.engines.torch_q import TorchQEngine
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.vec.base import slots_of

LOSSES = ("huber", "mse")
SelfDQN = TypeVar("SelfDQN", bound="DQN")


class DQN(Fast, stable_baselines3.DQN):
    """Drop-in for `stable_baselines3.DQN`. A zip of a plain network loads there.

    Args:
        double_q: the online network chooses the next action, the target network rates it (van Hasselt et al. 2016).
        loss: "huber" (SB3's) or "mse".
        prioritized: arguments of `PrioritizedReplayBuffer` (`alpha`, `beta`, …), {} for its defaults; None: uniform.
        use_masking: masks in exploration, in the greedy choice and in the target, if the env has them.
        engine: "torch", whose numbers are stock's, "kernels" for an MLP on the CPU, or `EngineSettings`.
        further arguments: as `stable_baselines3.DQN`. MultiDiscrete actions get one head of the network each
            (Tavakoli et al. 2018); such a model does not load in stock DQN.

    Raises:
        ConfigError: an unknown loss.
    """

    _kinds: ClassVar[dict[str, type[Engine]]] = {"torch": TorchQEngine, "kernels": KernelQEngine}

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
        engine: str | EngineSettings = "torch",
        _init_setup_model: bool = True,
        **further: Any,
    ) -> None:
        if loss not in LOSSES:
            raise ConfigError(f"loss={loss!r}: choose {' or '.join(LOSSES)}")
        self.double_q, self.loss, self.use_masking = double_q, loss, use_masking
        self.engine = engine  # type: ignore[assignment]  # made in `_setup_model`
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
        if self.replay_buffer is None and self.replay_buffer_class in STOCK_REPLAYS:
            masked = self.use_masking and self.env is not None and slots_of(self.env).masked
            self.replay_buffer = _new_storage(self, masked)
        super()._setup_model()
        self._attach()
        self._refuse_foreign_buffer()

    def _refuse_foreign_buffer(self) -> None:
        """A buffer that is none of ours is served by SB3's own loops, which know nothing of what ours do besides."""
        if isinstance(self.replay_buffer, ReplayStorage):
            return
        extras = {"double_q=True": self.double_q, "loss='mse'": self.loss != "huber", "prioritized":
                  self.prioritized is not None, "MultiDiscrete actions":
                  isinstance(self.action_space, spaces.MultiDiscrete)}  # fmt: skip
        asked = [name for name, given in extras.items() if given]
        if asked:
            raise ConfigError(
                f"{', '.join(asked)} with replay_buffer_class={type(self.replay_buffer).__name__}: SB3's own update, "
                "which serves such a buffer, cannot do that; leave replay_buffer_class out, or derive it from "
                "fasttrain's ReplayStorage"
            )

    def prefetch_batches(self, deterministic: bool = False, depth: int = 1) -> None:
        """Draw the next update's batches in a thread; see `Prefetching`.

        `deterministic`: the batches of a run without a thread, same random stream. Such a batch depends on every
        number drawn before it, so it is drawn when it is asked for, and nothing is ahead of time.
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
        try:
            return super().learn(
                total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
            )
        finally:
            self.collector.sampler.close()

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
        source = self.collector.source_of(env)
        masked = self.use_masking and source.masked
        storage = _storage_of(self, masked)
        if storage is None:
            return super().collect_rollouts(
                env, callback, train_freq, replay_buffer, action_noise, learning_starts, log_interval
            )
        if failure := self.prepare(env):
            warnings.warn(f"{failure}; training goes on without", stacklevel=3)
        callback.update_locals(  # those of stock's that stay: once, and not at every step
            {"self": self, "env": env, "callback": callback, "train_freq": train_freq, "replay_buffer": storage,
             "action_noise": action_noise, "learning_starts": learning_starts, "log_interval": log_interval,
             "continue_training": True}
        )  # fmt: skip
        with self.collector.clock.phase("buffer"):
            return collect(self, source, masked, storage, callback, train_freq, learning_starts, log_interval)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        if not isinstance(self.replay_buffer, ReplayStorage):
            return super().train(gradient_steps, batch_size)
        with self.collector.clock.phase("other"):
            train(self, gradient_steps, batch_size)

    def work(self, gradient_steps: int, batch_size: int) -> QWork:
        """Updates as the model's settings ask for them."""
        rated = isinstance(self.replay_buffer, PrioritizedReplayBuffer)
        rule = QRule(tuple(action_dims(self.action_space)), self.gamma, self.double_q, self.loss, rated)
        return QWork(gradient_steps, batch_size, rule, self.max_grad_norm)

    def replay(self) -> Replay:
        """The buffer as engines ask for it."""
        buffer: Any = self.replay_buffer
        return Replay(buffer, self.collector.sampler, self._vec_normalize_env)

    def prepare(self, env: VecEnv) -> str:
        if self.engine.settings.compile_mode is None or not isinstance(self.replay_buffer, ReplayStorage):
            return ""
        engine = self.engine_now()
        with self.collector.clock.phase("other"):
            return engine.prepare(self.replay(), self.work(1, self.batch_size), [env.num_envs])

    def _must_change(self) -> bool:
        return self.engine.kind == "kernels" and self._vec_normalize_env is not None

    def why_not(self, kind: str) -> str:
        if kind == "kernels" and self._vec_normalize_env is not None:
            return "VecNormalize: batches are normalised one by one"
        return layout.why_not_q(self.policy) if kind == "kernels" else ""

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
        dims = action_dims(self.action_space)
        masks = opened(np.asarray(action_masks).astype(np.bool_).reshape(-1, sum(dims)), dims)
        if not deterministic and np.random.rand() < self.exploration_rate:
            actions = random_actions(self.action_space, len(masks), masks, at_once=False)
        else:
            with torch.no_grad():
                legal = torch.from_numpy(masks).to(self.device)
                best = greedy(self.q_net(tensor), legal, dims).cpu().numpy()
                actions = best.reshape(-1, *(self.action_space.shape or ()))
        return (actions if vectorized else actions[0]), state


def _new_storage(model: DQN, masked: bool) -> ReplayStorage:
    asked = model.replay_buffer_class
    kind = replay_class(model.observation_space, model.n_steps, asked)
    if model.prioritized is not None:
        kind = PrioritizedReplayBuffer
    window = window_of(model.n_steps, model.gamma, asked)
    return kind(
        model.buffer_size,
        model.observation_space,
        model.action_space,
        device=model.device,
        n_envs=model.n_envs,
        optimize_memory_usage=model.optimize_memory_usage,
        mask_width=sum(action_dims(model.action_space)) if masked else None,
        frame_stack=None if model.optimize_memory_usage or asked not in STOCK_REPLAYS else frames_in(model.env),
        **{**window, **model.replay_buffer_kwargs, **(model.prioritized or {})},
    )


def frames_in(env: VecEnv | None) -> int | None:
    """How many frames an image that `env` shows has, one behind the other; None where it shows no images.

    Only frames of VecFrameStack along the first axis count as such; an image otherwise stacked is one frame.
    """
    if env is None or not is_image_space(env.observation_space):
        return None
    stacks, first = 1, False
    while isinstance(env, VecEnvWrapper):
        first |= isinstance(env, VecTransposeImage)
        if isinstance(env, VecFrameStack):
            stacked: Any = env.stacked_obs
            stacks, first = stacked.n_stack, first or stacked.channels_first
        env = env.venv
    return stacks if first else 1


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
    if isinstance(buffer, ReplayStorage) and buffer.size() == 0 and model.replay_buffer_class in STOCK_REPLAYS:
        model.replay_buffer = storage = _new_storage(model, masked)
        return storage
    raise EnvSpecError(
        f"the env has action masks, and {type(buffer).__name__} does not store them: leave replay_buffer_class out, "
        "give it mask_width=…, or take use_masking=False"
    )


def train(model: DQN, gradient_steps: int, batch_size: int) -> None:
    """`gradient_steps` updates, then what SB3 logs of them: the mean loss, in float64 of float32 scalars.

    Raises:
        DivergedError: round after round no update was finite; see `guard.py`.
        EnvError: kernels came to a loss that is not finite and nothing is guarded.
    """
    policy, storage = model.policy, model.replay_buffer
    policy.set_training_mode(True)
    model._update_learning_rate(policy.optimizer)
    if isinstance(storage, PrioritizedReplayBuffer):
        storage.anneal(model._current_progress_remaining)
    engine = model.engine_now()
    try:
        done = engine.update(model.replay(), model.work(gradient_steps, batch_size))
    except EnvError as error:
        if type(error) is not EnvError:
            raise
        raise EnvError(f"at step {model.num_timesteps:,}: {error}") from error
    engine.clock.enter("log")
    model._n_updates += gradient_steps
    record, losses = model.logger.record, done.terms["loss"]
    record("train/n_updates", model._n_updates, exclude="tensorboard")
    if done.skipped:
        losses = losses[np.isfinite(done.norms)]
    if engine.skipped_steps:
        record("train/skipped_steps", engine.skipped_steps)
    record("train/loss", float(losses.mean()) if len(losses) else math.nan)
    if engine.guard is not None:
        engine.guard.note(model, done.norms, lambda: why_replay(model, done.blamed), expected=done.expected_skips)
