"""Models on engines with settings, and steps and losses of one minibatch, for several test files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from fasttrain.accelerators.compiled import CompiledPPO, CompiledQ
from fasttrain.algos.dqn import DQN
from fasttrain.algos.engine import EngineSettings, Statistics
from fasttrain.algos.policy_view import PolicyView
from fasttrain.algos.ppo import PPO, MaskablePPO, ppo_terms, with_loss
from fasttrain.algos.recurrent import RecurrentPPO
from fasttrain.algos.step import PPOWork, Terms, normalize_advantages
from fasttrain.buffers.rollout import RolloutBatch
from fasttrain.buffers.stock import as_stock
from fasttrain.vec.native import NativeVecEnv
from toys import RandomEnv, ToyGame, seeded_vec, toy_gym_vec

SETTINGS = {"n_steps": 16, "batch_size": 20, "n_epochs": 2, "device": "cpu", "seed": 0}


def masked_model(settings: EngineSettings, **kwargs: Any) -> MaskablePPO:
    """Five envs, 80 rows a rollout, minibatches of 20."""
    model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | kwargs))
    model.use_engine(settings)
    return model


def box_model(settings: EngineSettings, **kwargs: Any) -> PPO:
    """Continuous actions with two axes, which go through the policy's own methods."""

    def make() -> gym.Env:
        return RandomEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2, 1), np.float32))

    model = PPO("MlpPolicy", seeded_vec(make), **(SETTINGS | {"batch_size": 16} | kwargs))
    model.use_engine(settings)
    return model


DQN_SETTINGS: dict[str, Any] = {
    "learning_starts": 20, "train_freq": 1, "gradient_steps": 2, "batch_size": 16, "buffer_size": 400,
    "target_update_interval": 50, "learning_rate": 1e-3, "seed": 0, "device": "cpu",
}  # fmt: skip


def toy_dqn(kind: Any = DQN, env: Any = None, **changes: Any) -> Any:
    """On five games that raise at once if an illegal action is played."""
    return kind("MlpPolicy", env or NativeVecEnv(ToyGame(5), seed=0), **{**DQN_SETTINGS, **changes})


def filled(model: Any) -> Any:
    """The model after one rollout, before any update."""
    train, model.train = model.train, lambda: None
    model.learn(model.n_steps * model.n_envs)
    model.train = train
    return model


def a_batch(model: Any, size: int = 20) -> RolloutBatch:
    return next(model.rollout_buffer.storage.minibatches(size))


def batch_of(observations: Any, actions: Any, action_masks: Any) -> RolloutBatch:
    """Rows without returns: what a head rates."""
    none = torch.zeros(len(actions))
    return RolloutBatch(observations, actions, none, none, none, none, action_masks)


def one_step(model: Any, **changes: Any) -> tuple[torch.Tensor, Statistics]:
    """Gradients of one step on the whole rollout, not clipped, and what it came to; `changes` are attributes.

    The weights are put back.
    """
    for name, value in ({"n_epochs": 1, "batch_size": None, "max_grad_norm": 1e9} | changes).items():
        setattr(model, name, value)
    before = copy.deepcopy(model.policy.state_dict())
    done = model.update()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.policy.parameters()])
    model.policy.load_state_dict(before)
    return gradients, done


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])


def with_compiler(model: Any, compiler: Callable[..., Any]) -> Any:
    """The model's engine, which will be compiled by a compiler of the test's own."""
    kind = CompiledQ if hasattr(model, "replay_buffer") else CompiledPPO
    model.engine.compiled = kind(model.engine, compiler)
    return model.engine


def counting(calls: list[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A compiler that compiles nothing and notes every call of what it was given."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            calls.append(function.__name__)
            return function(*args)

        return called

    return compiler


def loss_terms(view: PolicyView, batch: RolloutBatch, numbers: Any) -> Terms:
    """The loss of a minibatch whose advantages are used as they are, in SB3's order of operations."""
    evaluated = view.evaluate(batch, entropy_gradient=True)
    terms = ppo_terms(batch, evaluated, numbers.clip_range, numbers.clip_range_vf)
    return with_loss(terms, batch, evaluated, numbers)


def minibatch_terms(work: PPOWork, view: PolicyView, batch: RolloutBatch) -> Terms:
    return loss_terms(view, normalize_advantages(batch) if work.normalize_advantage else batch, work)


def updated_by(engine: Any, storage: Any, work: PPOWork) -> Statistics:
    """The plain update of a recurrent policy, or the kernels', without a model around it."""
    learner: Any = RecurrentPPO.__new__(RecurrentPPO)
    learner.engine_now, learner.work, learner.rollout_buffer = lambda: engine, lambda: work, as_stock(storage)
    done: Statistics = learner.update()
    return done
