"""Hindsight experience replay (Andrychowicz et al. 2017): transitions are drawn with goals that were reached later.

`HindsightStorage` replaces SB3's HerReplayBuffer (2.9.2), with the same draws from numpy's global stream and the same
numbers (tests/buffers/test_hindsight.py). SB3 searches the whole buffer at every draw. Here a sum tree counts the
transitions that can be drawn. So the time of a draw hardly depends on the size of the buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from fasttrain.batch import BoolArray, Float32Array, Int64Array
from fasttrain.buffers.frames import Place
from fasttrain.buffers.n_step import Envs, end_window
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayBatch, ReplayStorage
from fasttrain.buffers.sum_tree import SumTree, find_kernel, set_kernel
from fasttrain.errors import ConfigError, EnvError, EnvSpecError

GOALS = ("future", "final", "episode")
GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")
NO_EPISODE = ("hindsight (algo.her) learns from finished episodes, and none has ended before the first update: set "
              "warmup_steps to more than the steps of an episode × num_envs")  # fmt: skip


class HindsightStorage(ReplayStorage, HerReplayBuffer):  # type: ignore[misc]
    """A `ReplayStorage` of a goal env, in which a share of each batch gets goals that its episodes reached.

    Only transitions of finished episodes are drawn. `n_sampled_goal / (n_sampled_goal + 1)` of a batch are virtual:
    their goal is the `achieved_goal` after a step of the same episode, and `compute_reward` of the env gives their
    reward. Virtual transitions keep the real `dones`, and the real masks if the env has no `compute_action_masks`.

    Args:
        env: a VecEnv of Gymnasium envs with `compute_reward`. The first env computes all rewards; see `set_env`.
        n_sampled_goal: virtual transitions per real one.
        goal_selection_strategy: "future" (this step or a later one), "final" (the last step) or "episode" (any step).
        *arguments, **options: arguments of `ReplayStorage`.

    Raises:
        ConfigError: wrong arguments of `ReplayStorage`, no goal env, an unknown strategy, n_steps > 1, or
            optimize_memory_usage.
    """

    ep_start: Any  # (size, N) int32 first row of the episode
    ep_length: Any  # (size, N) int32 steps of the episode; 0: it has not ended, or its first row is overwritten
    overhead_bytes = 18  # per transition: the tree, `ep_start` and `ep_length`

    def __init__(
        self,
        *arguments: Any,
        env: VecEnv | None = None,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        strategy = str(getattr(goal_selection_strategy, "name", goal_selection_strategy)).lower()
        if strategy not in GOALS:
            raise ConfigError(f"goal_selection_strategy={goal_selection_strategy!r}: choose {', '.join(GOALS)}")
        if n_sampled_goal < 1:
            raise ConfigError(f"n_sampled_goal={n_sampled_goal} must be at least 1")
        if copy_info_dict:
            raise ConfigError("copy_info_dict=True is only in SB3's HerReplayBuffer, with engine=stock")
        super().__init__(*arguments, **options)
        missing = [key for key in GOAL_KEYS if not self._keyed or key not in self._stored]
        if missing:
            raise ConfigError(
                f"hindsight needs a goal env, whose observation is a Dict of {', '.join(GOAL_KEYS)}; "
                f"{' and '.join(missing)} is missing"
            )
        if self.n_steps > 1 or self.optimize_memory_usage:
            raise ConfigError("hindsight supports only n_steps=1 and optimize_memory_usage=False")
        self.n_sampled_goal, self.strategy = n_sampled_goal, strategy
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        self.ep_start, self.ep_length = np.zeros((2, self.buffer_size, self.n_envs), np.int32)
        self.under_way_steps: Int64Array = np.zeros(self.n_envs, np.int64)  # steps of each unfinished episode
        self.tree = getattr(self, "tree", None) or SumTree(self.buffer_size * self.n_envs)
        self.env: VecEnv | None = None
        self._known_good = self._masks_follow_goals = False
        if env is not None:
            self.set_env(env)

    def set_env(self, env: VecEnv) -> None:
        """Set the VecEnv; its first env computes the rewards. Raises ConfigError: that env has no `compute_reward`."""
        if has_method(env, "compute_reward") is False:
            raise ConfigError(
                "hindsight (algo.her) needs a goal env: give it a method compute_reward(achieved_goal, desired_goal, "
                "info), which takes arrays with one row per transition"
            )
        self.env, self._known_good = env, False
        self._masks_follow_goals = self.next_masks is not None and has_method(env, "compute_action_masks") is True

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"env": None}

    def reset(self) -> None:
        """Empty the buffer."""
        with self.lock:
            super().reset()
            self.tree.clear()
            self.under_way_steps[:] = self.ep_length[:] = 0

    # --- episodes

    def _row_stored(self, row: int) -> None:
        """Allow draws from episodes that ended in `row`. End draws from an episode whose first row was overwritten."""
        for env in self.ep_length[row].nonzero()[0]:
            self._set_episode(int(env), row, int(self.ep_length[row, env]), drawable=False)
        self.under_way_steps += 1
        for env in self.dones[row].nonzero()[0]:
            self._end_episode(int(env))

    def _end_episode(self, env: int) -> None:
        """Allow draws from the episode of `env` that ended in the newest row."""
        length = min(int(self.under_way_steps[env]), self.buffer_size)
        self._set_episode(env, self.pos - length, length, drawable=True)
        self.under_way_steps[env] = 0

    def _set_episode(self, env: int, first: int, length: int, drawable: bool) -> None:
        rows = np.arange(first, first + length) % self.buffer_size
        self.ep_start[rows, env], self.ep_length[rows, env] = first % self.buffer_size, length if drawable else 0
        worth = np.full(length, self._worth if drawable else 0.0, np.float64)
        if drawable and self.void is not None:
            worth[self.void[rows, env]] = 0.0
        set_kernel(self.tree.nodes, self.tree.starts, self.tree.capacity, rows * self.n_envs + env, worth)

    @property
    def _worth(self) -> float:
        """The priority of the transitions of an episode that has just ended."""
        return 1.0

    def discard(self, lost: Envs, resting: Envs = (), waiting: Envs = ()) -> list[Place]:
        """See `ReplayStorage.discard`. The last step of an episode that ended by a fault is never drawn."""
        with self.lock:
            if [*resting, *waiting]:
                raise EnvError("hindsight (algo.her) needs an env in which the policy acts at every step")
            row = (self.pos - 1) % self.buffer_size
            complete = super().discard(lost)
            for env in lost:
                if self.under_way_steps[env]:
                    self._end_episode(env)
                first, length = int(self.ep_start[row, env]), int(self.ep_length[row, env])
                self._set_episode(env, row, 1, drawable=False)
                self._set_episode(env, first, length - 1, drawable=True)
            return complete

    def truncate_last_trajectory(self) -> None:
        """Truncate all unfinished episodes, like SB3's method with this name."""
        self.end_rows(self.under_way_steps.nonzero()[0].tolist())

    def end_rows(self, envs: list[int]) -> None:
        """Truncate the unfinished episodes of these envs at the newest row."""
        with self.lock:
            for env in envs:
                if self.under_way_steps[env]:
                    end_window(self, (self.pos - 1) % self.buffer_size, env)
                    self._end_episode(env)

    # --- drawing

    @property
    def can_draw(self) -> bool:
        """Whether the buffer has a finished episode, so that transitions can be drawn."""
        return self.tree.total() > 0

    def draw(self, batch_size: int, rng: np.random.Generator | None = None) -> tuple[Int64Array, Int64Array]:
        """Rows (B,) and envs (B,) of finished episodes, uniformly. Raises ConfigError: no episode has ended yet."""
        if not (count := int(self.tree.total())):
            raise ConfigError(NO_EPISODE)
        integers: Any = np.random.randint if rng is None else rng.integers
        found = np.empty(batch_size, np.int64)
        find_kernel(self.tree.nodes, self.tree.starts, integers(0, count, size=batch_size) + 0.5, found)
        return np.divmod(found, self.n_envs)

    def gather(
        self,
        rows: Int64Array,
        envs: Int64Array,
        env: VecNormalize | None = None,
        device: torch.device | str | None = None,
        rng: np.random.Generator | None = None,
    ) -> ReplayBatch:
        """The transitions at these rows of these envs: first the real, then the virtual transitions, as in SB3."""
        rows, envs = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(envs, np.int64)
        virtual = self.virtual(len(rows))
        if not isinstance(self, PrioritizedReplayBuffer):  # prioritized weights and indices must keep the drawn order
            order = virtual.argsort(kind="stable")
            rows, envs, virtual = rows[order], envs[order], virtual[order]
        seen, following, rewards, masks = self.relabelled(rows, envs, virtual, rng)
        flat = rows * self.n_envs + envs
        over, cut = (array.reshape(-1).take(flat)[:, None] for array in (self.dones, self.timeouts))
        observed = [
            {key: self._tensor(part, device) for key, part in self._normalize_obs(each, env).items()}  # type: ignore[union-attr]
            for each in (seen, following)
        ]
        return ReplayBatch(
            observations=observed[0],
            actions=self._tensor(self.actions.reshape(-1, self.action_dim).take(flat, axis=0), device),
            next_observations=observed[1],
            dones=self._tensor(over * (1 - cut), device),
            rewards=self._tensor(self._normalize_reward(rewards[:, None], env), device),
            next_action_masks=None if masks is None else self._tensor(masks, device),
        )

    def virtual(self, batch_size: int) -> BoolArray:
        """(B,) True for the virtual transitions of a drawn batch: the first rows, as in SB3."""
        return np.arange(batch_size) < int(self.her_ratio * batch_size)

    def relabelled(
        self, rows: Int64Array, envs: Int64Array, virtual: BoolArray, rng: np.random.Generator | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], Float32Array, BoolArray | None]:
        """Observations, next observations, rewards and next masks (M, ...), with new goals in the rows `virtual` (M,).

        Raises:
            EnvError: `compute_reward` failed, or did not return a finite number for each row.
        """
        flat = rows * self.n_envs + envs
        seen, following = ({key: array.reshape(-1, *array.shape[2:]).take(flat, axis=0) for key, array in each.items()}
                           for each in (self._stored, self._stored_next))  # fmt: skip
        rewards: Float32Array = self.rewards.reshape(-1).take(flat)
        masks = self.masks_of(flat)
        goals = self._goals(rows[virtual], envs[virtual], rng)
        seen["desired_goal"][virtual] = following["desired_goal"][virtual] = goals
        rewards[virtual] = self._rewards(following["achieved_goal"][virtual], goals)
        if masks is not None and self._masks_follow_goals:
            masks[virtual] = self._masks({key: part[virtual] for key, part in following.items()}, masks[virtual].shape)
        return seen, following, rewards, masks

    def _goals(self, rows: Int64Array, envs: Int64Array, rng: np.random.Generator | None) -> NDArray[Any]:
        start, length = self.ep_start[rows, envs].astype(np.int64), self.ep_length[rows, envs].astype(np.int64)
        integers: Any = np.random.randint if rng is None else rng.integers
        if self.strategy == "final":
            step = length - 1
        else:
            step = integers((rows - start) % self.buffer_size if self.strategy == "future" else 0, length)
        goals: NDArray[Any] = self._stored_next["achieved_goal"][(step + start) % self.buffer_size, envs]
        return goals

    def _rewards(self, achieved: NDArray[Any], goals: NDArray[Any]) -> Float32Array:
        rewards: Float32Array = np.asarray(
            self._asked("compute_reward", achieved, goals, [{} for _ in goals]), np.float32
        )
        if rewards.shape != (len(goals),) or not np.isfinite(rewards).all():
            got = f"the shape {rewards.shape}" if rewards.shape != (len(goals),) else "a number that is not finite"
            raise self._wrong(
                f"compute_reward must return one finite number for each of {len(goals)} rows, and it returned {got}: "
                "let it take arrays, with np.linalg.norm(achieved_goal - desired_goal, axis=-1) for example"
            )
        self._known_good = True
        return rewards

    def _masks(self, observations: dict[str, NDArray[Any]], shape: tuple[int, ...]) -> BoolArray:
        masks: BoolArray = np.array(self._asked("compute_action_masks", observations), np.bool_)
        if masks.shape != shape:
            raise self._wrong(f"compute_action_masks must return masks of the shape {shape}, not {masks.shape}")
        masks[~masks.any(axis=1)] = True  # an empty mask: all legal, as in `put`
        return masks

    def _asked(self, method: str, *arguments: Any) -> Any:
        """What a method of the first env returns. Not cached, as in SB3, because the env's attributes may change."""
        if self.env is None:
            raise EnvError("hindsight has no env that computes rewards: call set_env after loading the buffer")
        try:
            return self.env.env_method(method, *arguments, indices=[0])[0]
        except Exception as error:
            raise self._wrong(f"{method} failed for a batch of transitions: {error!r:.300}") from error

    def _wrong(self, text: str) -> EnvError:
        """The error about a method of the env; EnvSpecError if the env has not computed a reward yet."""
        return EnvError(text) if self._known_good else EnvSpecError(text)


class PrioritizedHindsightStorage(HindsightStorage, PrioritizedReplayBuffer):  # type: ignore[misc]
    """A `HindsightStorage` that draws by TD errors, like `PrioritizedReplayBuffer`."""

    draw = PrioritizedReplayBuffer.draw
    sample = PrioritizedReplayBuffer.sample

    @property
    def _worth(self) -> float:
        return self._highest

    def virtual(self, batch_size: int) -> BoolArray:
        """(B,) True for the virtual transitions: spread over the batch, which is in storage order."""
        spread: BoolArray = np.arange(batch_size) % (self.n_sampled_goal + 1) != 0
        return spread


def has_method(env: VecEnv, name: str) -> bool | None:
    """Whether the first env or one of its wrappers has this method; None if the VecEnv cannot tell."""
    try:
        return bool(env.env_method("has_wrapper_attr", name, indices=[0])[0])
    except Exception:  # a user's VecEnv without Gymnasium envs
        return None
