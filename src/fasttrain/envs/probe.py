"""What one step and one reset of an env cost here, from a fraction of a second of random legal play."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from fasttrain.batch import BoolArray
from fasttrain.envs.masks import MASKABLE_SPACES, flat_mask, mask_width, random_legal_action
from fasttrain.envs.user_code import blame, kept_random_state
from fasttrain.errors import EnvError, EnvSpecError

_SEED = 20_260_101  # of the probe alone: its episodes must not coincide with those of a training seeded 0, 1, 2, …


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """Costs in seconds. The first reset and step are left out of the means: they compile, load and allocate."""

    build_s: float  # constructing the env
    step_s: float  # mean
    step_cv: float  # standard deviation / mean: what envs stepped together wait for each other
    mask_s: float  # mean cost of `action_masks()`, 0 without masks
    reset_s: float  # mean
    steps: int  # measured
    resets: int  # measured
    episode_steps: float | None  # mean length of the episodes that ended; None if none did
    has_masks: bool


def probe(
    env_factory: Callable[[], gymnasium.Env[Any, Any]], max_seconds: float = 0.3, max_steps: int = 500
) -> ProbeResult:
    """Build an env, play random legal actions, close it; at least one step and one reset whatever the limits are.

    Python's and NumPy's global random streams are left as they were.

    Raises:
        EnvSpecError: the env cannot be built, or raises or breaks its contract while playing.
    """
    with kept_random_state():
        began = time.perf_counter()
        env = env_factory()
        build_s = time.perf_counter() - began
        play = _Play(env)
        try:
            play.run(max_seconds, max_steps)
        except EnvSpecError:
            raise
        except EnvError as error:
            raise EnvSpecError(f"env {env.unwrapped}, {play.position()}: {error}") from error
        except Exception as error:
            raise EnvSpecError(f"env {env.unwrapped} failed at {play.position()}: {blame(error)}") from error
        finally:
            env.close()
    return play.result(build_s)


class _Play:
    """One env being played, and the times taken."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._rng = np.random.default_rng(_SEED)
        self._has_masks = isinstance(env.action_space, MASKABLE_SPACES) and env.has_wrapper_attr("action_masks")
        self._action_masks = env.get_wrapper_attr("action_masks") if self._has_masks else None
        self._steps_s: list[float] = []
        self._masks_s: list[float] = []
        self._resets_s: list[float] = []
        self._lengths: list[int] = []
        self._length = 0
        self._action: Any = None

    def run(self, max_seconds: float, max_steps: int) -> None:
        self._env.action_space.seed(_SEED)
        self._reset(seed=_SEED)
        self._step()
        for times in (self._steps_s, self._masks_s, self._resets_s):
            times.clear()
        self._lengths.clear()
        deadline = time.perf_counter() + max_seconds
        self._reset()
        while True:
            if self._step():
                self._reset()
            if len(self._steps_s) >= max_steps or time.perf_counter() >= deadline:
                return

    def position(self) -> str:
        return f"step {self._length} of an episode of random legal play (last action {self._action})"

    def result(self, build_s: float) -> ProbeResult:
        step_s = float(np.mean(self._steps_s))
        return ProbeResult(
            build_s=build_s,
            step_s=step_s,
            step_cv=float(np.std(self._steps_s) / step_s) if step_s > 0 else 0.0,
            mask_s=float(np.mean(self._masks_s)) if self._masks_s else 0.0,
            reset_s=float(np.mean(self._resets_s)),
            steps=len(self._steps_s),
            resets=len(self._resets_s),
            episode_steps=float(np.mean(self._lengths)) if self._lengths else None,
            has_masks=self._has_masks,
        )

    def _reset(self, seed: int | None = None) -> None:
        began = time.perf_counter()
        self._env.reset(seed=seed)
        self._resets_s.append(time.perf_counter() - began)
        self._length = 0
        self._action = None

    def _step(self) -> bool:
        self._action = random_legal_action(self._env.action_space, self._masks(), self._rng)
        began = time.perf_counter()
        answer = self._env.step(self._action)
        self._steps_s.append(time.perf_counter() - began)
        if len(answer) != 5:
            raise EnvSpecError(
                f"env {self._env.unwrapped}: step() returned {len(answer)} values instead of (observation, reward, "
                "terminated, truncated, info); the old gym interface had 4"
            )
        self._length += 1
        ended = bool(answer[2] or answer[3])
        if ended:
            self._lengths.append(self._length)
        return ended

    def _masks(self) -> BoolArray | None:
        if self._action_masks is None:
            return None
        began = time.perf_counter()
        mask = self._action_masks()
        self._masks_s.append(time.perf_counter() - began)
        return flat_mask(mask, mask_width(self._env.action_space))
