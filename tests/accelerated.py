"""Models on engines with settings, and steps and losses of one minibatch, for several test files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.buffers.rollout import RolloutBatch
from fasttrain.engines.engine import EngineSettings, PPOWork
from fasttrain.engines.heads import Head, loss_terms
from fasttrain.engines.losses import Coefficients, Terms, normalized
from fasttrain.engines.torch import PPOStep
from toys import RandomEnv, seeded_vec, toy_gym_vec

SETTINGS = {"n_steps": 16, "batch_size": 20, "n_epochs": 2, "device": "cpu", "seed": 0}


def masked_model(settings: EngineSettings, **kwargs: Any) -> MaskablePPO:
    """Five envs, 80 rows a rollout, minibatches of 20."""
    model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | kwargs))
    model.use_engine(settings)
    return model


def box_model(settings: EngineSettings, **kwargs: Any) -> PPO:
    """Continuous actions, which go through the policy's own methods."""

    def make() -> gym.Env:
        return RandomEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32))

    model = PPO("MlpPolicy", seeded_vec(make), **(SETTINGS | {"batch_size": 16} | kwargs))
    model.use_engine(settings)
    return model


def filled(model: Any) -> Any:
    """The model after one rollout, before any update."""
    train, model.train = model.train, lambda: None
    model.learn(model.n_steps * model.n_envs)
    model.train = train
    return model


def a_batch(model: Any, size: int = 20) -> RolloutBatch:
    return next(model.rollout_buffer.minibatches(size))


def a_step(model: Any, **changes: Any) -> PPOStep:
    """Of the model's engine, by its settings of now but for `changes`, which are fields of `PPOWork`."""
    return PPOStep(model.engine_now(), model.work()._replace(**changes))


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


def with_compiler(model: Any, compiler: Callable[..., Any]) -> Any:
    """The model's engine, made anew with a compiler of the test's own."""
    before = model.engine
    model.engine = type(before)(model.policy, before.settings, before, compiler)
    return model.engine


def counting(calls: list[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A compiler that compiles nothing and notes every call of what it was given."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            calls.append(function.__name__)
            return function(*args)

        return called

    return compiler


def minibatch_terms(work: PPOWork, head: Head, batch: RolloutBatch) -> Terms:
    """The loss of one minibatch by itself, in SB3's order of operations."""
    numbers = Coefficients(work.clip_range, work.clip_range_vf, work.ent_coef, work.vf_coef)
    batch = normalized(batch, work.normalize_advantage)
    return loss_terms(head, batch, numbers, entropy_gradient=work.ent_coef != 0.0)
