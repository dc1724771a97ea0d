"""Models on engines with settings, and steps and losses of one minibatch, for several test files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.accelerators.compiled import CompiledPPO, CompiledQ
from fasttrain.algos.dqn import DQN
from fasttrain.algos.engine import EngineSettings, Statistics
from fasttrain.algos.policy_view import PolicyView
from fasttrain.algos.ppo import PPO, MaskablePPO, ppo_terms, with_loss
from fasttrain.algos.recurrent import RecurrentPPO
from fasttrain.algos.sac import SAC
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


UNEVEN = spaces.Box(np.array([-2.0, 0.0, -1.0], np.float32), np.array([2.0, 0.5, 1.0], np.float32))


def toy_sac(kind: Any = SAC, acting: spaces.Box = UNEVEN, **changes: Any) -> Any:
    """Random observations, and three actions of unlike bounds."""
    acting = copy.deepcopy(acting)  # it has a stream of its own
    env = DummyVecEnv([lambda: RandomEnv(spaces.Box(-1.0, 1.0, (5,), np.float32), acting)] * 2)
    settings = {"learning_starts": 20, "batch_size": 16, "buffer_size": 100, "seed": 0, "device": "cpu"}
    return kind("MlpPolicy", env, **{**settings, "policy_kwargs": {"net_arch": [8]}, **changes})


class WithTerm(PPO):
    """Adds a term to the loss."""

    def loss(self, batch: RolloutBatch, evaluated: Any) -> Terms:
        return super().loss(batch, evaluated) | {"far": evaluated.logits.square().mean()}


class Conservative(DQN):
    """As the docstring of DQN has it."""

    def loss(self, batch: Any, evaluated: Any) -> Terms:
        every = evaluated.q_values.logsumexp(1, keepdim=True)
        return super().loss(batch, evaluated) | {"cql_loss": (every - evaluated.current).mean()}


class Careful(SAC):
    """As the docstring of SAC has it."""

    def critic_loss(self, batch: Any, evaluated: Any) -> Terms:
        drawn = self.critic(batch.observations, evaluated.actions.detach())
        gaps = [mine.mean() - theirs.mean() for mine, theirs in zip(drawn, evaluated.q_values, strict=True)]
        return super().critic_loss(batch, evaluated) | {"cql_loss": torch.stack(gaps).sum()}

    def actor_loss(self, batch: Any, evaluated: Any) -> Terms:
        imitation = (evaluated.actions - batch.actions).square().mean()
        return super().actor_loss(batch, evaluated) | {"bc_loss": imitation}


def filled(model: Any) -> Any:
    """The model after one rollout, before any update."""
    train, model.train = model.train, lambda: None
    model.learn(model.n_steps * model.n_envs)
    model.train = train
    return model


def a_batch(model: Any, size: int = 20) -> RolloutBatch:
    return next(model.rollout_buffer.storage.minibatches(size))


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


def numbers_of(model: Any) -> dict[str, torch.Tensor]:
    """Weights, the states of the optimizers, and SAC's coefficient of the entropy."""
    found = dict(model.policy.state_dict())
    parts = (model.actor, model.critic) if hasattr(model, "critic") else (model.policy,)
    for number, part in enumerate(parts):
        for index, parameter in enumerate(part.optimizer.param_groups[0]["params"]):
            state = part.optimizer.state[parameter]
            found |= {f"optimizer {number} {index} {key}": value for key, value in state.items()}
    learned = getattr(model, "ent_coef_optimizer", None) is not None
    ent_coef = getattr(model, "log_ent_coef" if learned else "ent_coef_tensor", None)
    return found if ent_coef is None else {**found, "ent_coef": ent_coef.detach()}


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
