"""Small games for tests of vec, algos and parity: a native game, and seeded stock envs that give the same run twice.

Worker processes import this module. It imports no torch, which would cost each of them two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fasttrain.batch import Slots
from fasttrain.errors import EnvError

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import DummyVecEnv


class ToyGame:
    """Counts steps. Env i ends after 3 + i steps: by the rules if i is even, cut if i is odd, both at once if i is 4.

    Observation: (seed, steps in this episode, last action). Reward: action / 10. The action equal to the number of
    steps so far is illegal.
    """

    NUM_ACTIONS = 8

    def __init__(self, num_envs: int = 5) -> None:
        self.num_envs = num_envs
        self.observation_space = spaces.Box(-1.0, 1e6, (3,), np.float32)
        self.action_space = spaces.Discrete(self.NUM_ACTIONS)
        self.final_observations = np.zeros((num_envs, 3), np.float32)
        self.opponents_ns = 0
        self.steps = np.zeros(num_envs, np.int64)
        self.seeds = np.zeros(num_envs, np.int64)
        self.level = 0
        self.handicaps = np.zeros(num_envs)
        self.closed = False

    def bind(self, slots: Slots) -> None:
        self.slots = slots

    def reset(self, indices: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        for index, seed in zip(indices, seeds, strict=True):
            if seed is not None:
                self.seeds[index] = seed
            self._begin(index)

    def _begin(self, index: int) -> None:
        self.steps[index] = 0
        self.slots.observations[index] = (self.seeds[index], 0, -1)
        self._write_mask(index)

    def _write_mask(self, index: int) -> None:
        self.slots.action_masks[index] = np.arange(self.NUM_ACTIONS) != self.steps[index]

    def step(self) -> None:
        slots = self.slots
        for index in range(self.num_envs):
            action = int(slots.actions[index])
            if not slots.action_masks[index, action]:
                raise EnvError(f"env {index}: action {action} is illegal")
            self.steps[index] += 1
            slots.rewards[index] = action / 10
            over = self.steps[index] == 3 + index
            slots.terminations[index] = over and index % 2 == 0
            slots.truncations[index] = over and (index % 2 == 1 or index == 4)
            slots.observations[index] = (self.seeds[index], self.steps[index], action)
            self._write_mask(index)
            if over:
                self.final_observations[index] = slots.observations[index]
                self._begin(index)

    def episode_info(self, index: int) -> dict[str, Any]:
        return {"is_success": index % 2 == 0, "score": 10 * index}

    def set_level(self, level: int, indices: list[int] | None = None) -> list[str] | None:
        self.level = level
        return None if indices is None else [f"env {index}" for index in indices]

    def total_steps(self) -> int:
        return int(self.steps.sum())

    def close(self) -> None:
        self.closed = True


class ToyGymEnv(gym.Env[NDArray[np.float32], int]):
    """Env `index` of the ToyGame as a Gymnasium env."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.observation_space = spaces.Box(-1.0, 1e6, (3,), np.float32)
        self.action_space = spaces.Discrete(ToyGame.NUM_ACTIONS)
        self.seed_value, self.steps = 0, 0

    def action_masks(self) -> NDArray[np.bool_]:
        return np.arange(ToyGame.NUM_ACTIONS) != self.steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        if seed is not None:
            self.seed_value = seed
        self.steps = 0
        return np.array([self.seed_value, 0, -1], np.float32), {}

    def step(self, action: int):
        self.steps += 1
        over = self.steps == 3 + self.index
        observation = np.array([self.seed_value, self.steps, action], np.float32)
        info = {"is_success": self.index % 2 == 0, "score": 10 * self.index} if over else {}
        terminated, truncated = over and self.index % 2 == 0, over and (self.index % 2 == 1 or self.index == 4)
        return observation, float(np.float32(action / 10)), terminated, truncated, info


def toy_gym_vec(num_envs: int = 5, monitor: bool = True) -> DummyVecEnv:
    """The ToyGame's envs in SB3's DummyVecEnv."""
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    def make(index: int) -> Callable[[], gym.Env]:
        return lambda: Monitor(ToyGymEnv(index)) if monitor else ToyGymEnv(index)

    return DummyVecEnv([make(index) for index in range(num_envs)])


def seeded_vec(make: Callable[[], gym.Env], num_envs: int = 4) -> DummyVecEnv:
    """`make()` N times under Monitor; action spaces seeded, because SB3's identity envs draw their states from them."""
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    def one(index: int) -> gym.Env:
        env = make()
        env.action_space.seed(index)
        return Monitor(env)

    return DummyVecEnv([lambda index=index: one(index) for index in range(num_envs)])


class RandomEnv(gym.Env[Any, Any]):
    """Random observations; the reward is 1 for action 1. Ends after 10 steps, by the rules or by a limit."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, cut: bool = False) -> None:
        self.observation_space, self.action_space, self.cut = observation_space, action_space, cut

    def _draw(self) -> Any:
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        self.steps = 0
        return self._draw(), {}

    def step(self, action: Any):
        self.steps += 1
        over = self.steps >= 10
        return self._draw(), float(np.all(action == 1)), over and not self.cut, over and self.cut, {}


class MaskedEnv(RandomEnv):
    """The RandomEnv with a random mask per state, some choice of every sub-action legal. An illegal action fails."""

    share = 0.5

    def _dims(self) -> list[int]:
        space: Any = self.action_space
        several = np.full(space.shape, 2) if isinstance(space, spaces.MultiBinary) else getattr(space, "nvec", None)
        return np.ravel(space.n if several is None else several).astype(int).tolist()

    def _draw(self) -> Any:
        dims = self._dims()
        self.mask: NDArray[np.bool_] = self.np_random.random(sum(dims)) < self.share
        for start, size in zip(np.cumsum([0, *dims[:-1]]), dims, strict=True):
            self.mask[start + self.np_random.integers(size)] = True
        return super()._draw()

    def step(self, action: Any):
        chosen = np.cumsum([0, *self._dims()[:-1]]) + np.asarray(action).reshape(-1)
        assert self.mask[chosen].all()
        return super().step(action)

    def action_masks(self) -> NDArray[np.bool_]:
        return self.mask


def single_thread() -> Iterator[None]:
    """Body of a fixture: torch on one thread. Two threads on a busy 2-core machine spin: 270 s of tests, not 11 s."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Failing(gym.Wrapper[Any, Any, Any, Any]):
    """Fails in its seventh step, and so does every env that replaces it."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 7:
            raise ValueError("the seventh step")
        return super().step(action)


def short() -> gym.Env:
    return gym.make("CartPole-v1", max_episode_steps=5)


class Corridor(gym.Env[NDArray[np.float32], int]):
    """Walk right for `length` cells, in twice as many steps at most. The reset option `length` is for one episode."""

    def __init__(self, length: int = 8, reads: bool = True) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.usual, self.reads = length, reads

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.length = (options or {}).get("length", self.usual) if self.reads else self.usual
        self.place, self.steps = 0, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.place, self.steps = max(0, self.place + (1 if action else -1)), self.steps + 1
        won, late = self.place == self.length, self.steps == 2 * self.length
        info = {"is_success": won} if won or late else {}
        return self._observation(), float(won), won, late and not won, info

    def _observation(self) -> NDArray[np.float32]:
        return np.array([self.place, self.length, self.steps], np.float32) / 60


class Bits(gym.Env[Any, Any]):
    """A goal env: each action flips one of `bits`, the goal is drawn by reset. -1 a step until it is reached."""

    def __init__(self, bits: int = 5) -> None:
        part = spaces.MultiBinary(bits)
        self.observation_space: Any = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), part))
        self.action_space: Any = spaces.Discrete(bits)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state, self.goal = self.np_random.integers(0, 2, (2, self.action_space.n))
        self.steps = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.state[action] ^= 1
        self.steps += 1
        reward = float(self.compute_reward(self.state, self.goal, {}))
        return self.seen(), reward, reward == 0, self.steps == len(self.goal), {"is_success": reward == 0}

    def seen(self) -> Any:
        state = self.state.astype(np.int8)
        return {"observation": state, "achieved_goal": state.copy(), "desired_goal": self.goal.astype(np.int8)}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(achieved != desired).any(-1).astype(np.float32)
