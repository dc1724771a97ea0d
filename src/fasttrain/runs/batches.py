"""Batches: envs that one object steps together (compiled games, EnvPool, Gymnasium's VectorEnvs), and their options.
This file also has the checkup of a game with an external engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import Observations
from fasttrain.envs.checkup import CheckupResult, checkup
from fasttrain.envs.findings import make_finding
from fasttrain.envs.masks import LOOKED_FOR, random_legal_action
from fasttrain.envs.names import arguments, callable_at
from fasttrain.errors import ConfigError
from fasttrain.spec.backends import OF_VECTORS, SINGLE, VECTOR, Backend, backend_of
from fasttrain.spec.config import Config
from fasttrain.spec.policies import WRAPPER
from fasttrain.spec.reading import env_kwargs, is_self_play, memory_inputs, uses_masks
from fasttrain.terminal import value_text
from fasttrain.vec.base import SlotVecEnv, copy_observations
from fasttrain.vec.vector import GymVecEnv, registered


def check_native_options(config: Config) -> None:
    """Raises ConfigError for an option that a batch of envs does not support. The message says what to do."""
    env = config.env
    # `told`: info["policy"] names the policy that acts, and `policies` has added a wrapper that reads this entry.
    entries = [one for one in env.wrappers if isinstance(one, dict)]
    told = any((one.get("wrapper"), one.get("key")) == (WRAPPER, "policy") for one in entries)
    asked: dict[str, Any] = {
        **{f"policies.{name}.decides": told and own.get("decides") for name, own in config.policies.items()},
        "env.wrappers": list(env.wrappers),
        "algo.memory_inputs": list(memory_inputs(config)),
        "action_repeat": config.action_repeat if config.action_repeat > 1 else None,
        "env.stagger": env.stagger,
        "env.masks": env.masks,
        **{f"policies.{name}.goal_every": own.get("goal_every") for name, own in config.policies.items()},
    }
    if config.env.backend == SINGLE and config.vec_env != VECTOR:
        asked["env.max_episode_steps"] = env.max_episode_steps
        batch, way_out = f"the native batch of {env.id} (compiled code, which lacks it)", "vec_env=dummy or shared"
    else:
        backend = backend_for(config)
        batch, way_out = backend.what, backend.instead
        if backend is OF_VECTORS:
            asked |= {"env.max_episode_steps": env.max_episode_steps if env.entry_point else None, "env.masks": None}
        else:
            asked |= {f"env.{key}": getattr(env, key) for key in backend.refuses}
            batch = f"env.backend={backend.name}: {batch}"
    for key, value in asked.items():
        if value:
            raise ConfigError(f"{key}={value_text(value)} does not go with {batch}; remove it, or use {way_out}")


def has_vector_form(config: Config) -> bool:
    """Whether a registered VectorEnv can replace the env's `num_envs` single envs. False if an option needs single
    envs, if the tier does not allow the other random numbers of a VectorEnv, or with engine=stock, whose classes cannot
    handle steps that only reset an env."""
    env = config.env
    asked = config.action_repeat > 1 or env.frame_stack > 1 or config.workers == 0
    exact = config.engine == "stock" or config.tier not in ("balance", "speed")
    if env.id is None or asked or exact or is_self_play(config) or config.algo.spec.recurrent:
        return False
    try:
        return gymnasium.spec(env.id).vector_entry_point is not None
    except gymnasium.error.Error:
        return False


def check_batch(
    config: Config, look: Callable[[SlotVecEnv], object] = lambda _: None
) -> tuple[str, spaces.Space[Any], spaces.Space[Any]]:
    """The name, action space and observation space of a batch. Raises EnvSpecError if the batch cannot be built,
    ConfigError if it does not suit the algorithm or an option. `look` is called with one game of an external engine.
    """
    check_native_options(config)
    backend = backend_for(config)
    what = backend.option(config.env)
    env = made_batch(config, 1) if backend.masked or config.algo.spec.masks != "must" else None
    if env is None or (config.algo.spec.masks == "must" and not env.has_attr("action_masks")):
        sought, others = config.env.masks or LOOKED_FOR.replace("info[", "infos["), "use algo=ppo or dqn"
        if backend is not OF_VECTORS:
            raise ConfigError(f"{what} has no action masks: {others}")
        raise ConfigError(f"{what} has no action masks (looked for {sought}): {others}, or env.masks=METHOD")
    late = isinstance(env, GymVecEnv) and env.resets_late
    with closing(env):
        if backend.lends:
            look(env)
    if late:
        _check_late_resets(config, f"{what} resets in the step after an episode's end")
    return what, env.action_space, env.observation_space


def _check_late_resets(config: Config, what: str) -> None:
    """Raises ConfigError if the algorithm or an option cannot handle steps that only reset an env."""
    if config.engine == "stock" or not config.algo.spec.fast:
        raise ConfigError(
            f"{what}, and algo={config.algo.name} with engine={config.engine} would learn from these steps: use "
            "engine=fast with ppo, maskable_ppo, dqn or sac, or env.backend=gymnasium"
        )
    if config.algo.spec.recurrent:
        raise ConfigError(
            f"{what}, which algo={config.algo.name} would remember: use env.backend=gymnasium, or an algorithm without "
            "memory"
        )
    if config.env.frame_stack > 1 or is_self_play(config):
        option = "env.frame_stack" if config.env.frame_stack > 1 else "opponent=self"
        raise ConfigError(f"{what}, which {option} does not allow: remove that setting")


def backend_for(config: Config) -> Backend:
    return backend_of(config.env) or OF_VECTORS


def made_batch(config: Config, num_envs: int, folder: Path | None = None) -> SlotVecEnv:
    """A batch of `num_envs` envs: a VectorEnv (registered or the user's), or a backend's batch. `folder`: for logs."""
    env, backend = config.env, backend_for(config)
    if backend is not OF_VECTORS:
        built: SlotVecEnv = backend.build(config, num_envs, folder)
        return built
    kwargs = arguments(env_kwargs(config), "env.kwargs.")
    if env.id is not None:
        make = registered(env.id, kwargs, env.max_episode_steps)
    else:
        make = partial(callable_at(str(env.entry_point), env.option), **kwargs)
    return GymVecEnv(make, num_envs, backend.option(env), uses_masks(config), env.masks)


# --- the checkup of games with an external engine

OF_SEEDS = ("unseeded_randomness", "state_left_over", "renumbered")
MANY_REFUSED = 0.05  # larger shares of refused actions are reported: hidden rules of a game may forbid a few


class OneGame(gymnasium.Env[Any, Any]):
    """The only game of `games` as a Gymnasium env, for the checkup. Closing the env does not stop the engine."""

    def __init__(self, games: SlotVecEnv) -> None:
        self.games, self._ended = games, False
        self.decisions = self.refused = self.played = 0
        self.lost: list[str] = []  # why games were lost, a text each
        self.observation_space, self.action_space = games.observation_space, games.action_space
        if games.masked:
            self.action_masks = lambda: np.array(self._mask())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the game that began when the last one ended. With a seed, or in mid-game, begin a new one."""
        if seed is not None or not self._ended:
            super().reset(seed=seed)
            self.games.seed(int(self.np_random.integers(1 << 31)))
            self.games.reset()
        self._ended = False
        return self._row(self.games.slots.observations), {}

    def step(self, action: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action. If the engine refuses it, take a random legal one. If the engine fails, the episode ends."""
        slots = self.games.slots
        self.games.step_slots(np.asarray(action)[None])
        while slots.resets is not None:
            self.refused += 1
            self.games.step_slots(
                np.asarray(random_legal_action(self.action_space, self._mask(), self.np_random))[None]
            )
        self.decisions += 1
        reward, terminated, truncated = float(slots.rewards[0]), bool(slots.terminations[0]), bool(slots.truncations[0])
        self._ended = bool(slots.finished)
        if not self._ended:
            return self._row(slots.observations), reward, terminated, truncated, {}
        episode = slots.finished[0]
        self.played += 1
        if episode.lost:
            self.lost.append(str(episode.info.get("lost")))
        return episode.final_observation, reward, terminated, truncated, dict(episode.info)

    def _mask(self) -> Any:
        masks = self.games.read_masks()
        return None if masks is None else masks[0]

    def _row(self, observations: Observations) -> Any:
        copied: Any = copy_observations(observations)
        return {name: part[0] for name, part in copied.items()} if isinstance(copied, dict) else copied[0]


def checkup_of_game(games: SlotVecEnv, use_masks: bool, **limits: Any) -> CheckupResult:
    """The checkup of the only game of `games`. Engines need not support seeds, so findings about seeds are dropped."""
    game = OneGame(games)
    result = checkup(lambda: game, use_masks=use_masks, copies=False, **limits)
    findings = [one for one in result.findings if one.code not in OF_SEEDS]
    unseeded = len(findings) < len(result.findings)
    if game.lost:
        text = f"{len(game.lost)} of {game.played} games were lost ({', '.join(sorted({*game.lost}))})"
        findings.append(make_finding("lost_games", text))
    if games.masked and game.refused > MANY_REFUSED * game.decisions:
        text = f"the engine refused {game.refused} of {game.decisions} actions that its masks had marked as legal"
        findings.append(make_finding("mask_not_respected", text, severity="warning"))
    unknown = "whether actions change the result: the engine plays a different game each time, also with the same seed"
    not_checked = (*result.not_checked, *([unknown] if unseeded and not game.lost else []))
    return dataclasses.replace(result, findings=tuple(findings), not_checked=not_checked)
