"""Works of benchmark.py about memory: CartPole without its velocities end to end, and what memory costs in Skull King.

`recurrent-64-128-short` is an LSTM of 64 units, minibatches of 128 and short episodes: an untrained policy falls after
about 20 steps, and a learning rate of 1e-8 keeps it so. In `long` the pole may swing and episodes are over after 500
steps, beyond a rollout of 128. `quality` is their mean length. All step single envs one by one, ours and stock in
a DummyVecEnv: CartPole's own VectorEnv resets in the step after an episode's end, which recurrent policies refuse.
`recurrent-skullking-…`: the ratio is the share of the steps/s of MaskablePPO without memory, which is not the same work
for the machine and is asked for so: the same env, steps, updates and samples. `recurrent-256-arithmetic` says how near
to what the cores can multiply the update with an LSTM of 256 units comes, for minibatches of 2,048 and short episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

import bench_peers
import bench_ppo
from bench_skullking import TRAIN
from memory_envs import Blind

Measurement = Callable[[], dict[str, Any]]
SHOWN = (0, 2)  # the cart's place and the pole's angle
NUM_ENVS, NUM_STEPS, EPOCHS, LEARNING_RATE = 64, 128, 4, 1e-8
LONGEST = 500
NOTHING_LEARNED = {"env_steps": 0, "updates": 0, "samples_per_update": 0}  # of works that compare arithmetic alone
# Rollouts: stock takes 5 s for one in minibatches of 128, on one thread of a busy machine.
CARTPOLE: dict[str, dict[str, Any]] = {
    f"recurrent-{units}-{name}": {"units": units, "batch_size": batch_size, "swings": swings, "rollouts": rollouts}
    for units in (64, 256)
    for name, batch_size, swings, rollouts in (
        ("128-short", 128, False, 3),
        ("2048-short", 2048, False, 5),
        ("2048-long", 2048, True, 5),
    )
}


class Swinging(CartPoleEnv):
    """A pole that may fall and a cart that may leave: only the limit of steps ends an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.x_threshold = self.theta_threshold_radians = np.inf


def short() -> gymnasium.Env[Any, Any]:
    """CartPole without velocities."""
    return Blind(gymnasium.wrappers.TimeLimit(CartPoleEnv(), LONGEST), SHOWN)


def long() -> gymnasium.Env[Any, Any]:
    """The same, whose episodes are all `LONGEST` steps."""
    return Blind(gymnasium.wrappers.TimeLimit(Swinging(), LONGEST), SHOWN)


def cartpole_ours(work: dict[str, Any]) -> dict[str, Any]:
    """A whole run of the command, as our users start it."""
    rollout = NUM_ENVS * NUM_STEPS
    return bench_ppo.command_run(
        [
            "+profile=speed",
            f"env.entry_point=bench_recurrent:{'long' if work['swings'] else 'short'}",
            "algo=recurrent_ppo",
            "vec_env=dummy",
            f"num_envs={NUM_ENVS}",
            f"batch_size={work['batch_size']}",
            f"algo.rollout_size={rollout}",
            f"algo.n_epochs={EPOCHS}",
            f"algo.learning_rate={LEARNING_RATE}",
            f"algo.lstm_hidden_size={work['units']}",
            f"total_timesteps={rollout * work['rollouts']}",
            "checkup=off",
            "eval.episodes=2",
        ],
        work["batch_size"],
    )


def cartpole_stock(work: dict[str, Any], threads: int | None = None) -> dict[str, Any]:
    """What an SB3 user writes. `threads`: None is torch's own choice, which an SB3 user gets."""
    begun = time.perf_counter()
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(threads or torch.get_num_threads())
    model = RecurrentPPO(
        "MlpLstmPolicy",
        make_vec_env(long if work["swings"] else short, n_envs=NUM_ENVS, seed=0),
        n_steps=NUM_STEPS,
        batch_size=work["batch_size"],
        n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        policy_kwargs={"lstm_hidden_size": work["units"]},
        seed=0,
        device="cpu",
    )
    return bench_ppo.stock_learn(model, NUM_ENVS * NUM_STEPS * work["rollouts"], begun)


def cartpole_loop(work: dict[str, Any]) -> dict[str, Any]:
    """A lean single-file loop."""
    import bench_lstm_loop

    make = long if work["swings"] else short
    return bench_lstm_loop.run(
        make, NUM_ENVS, NUM_STEPS, work["units"], LEARNING_RATE, EPOCHS, work["batch_size"], work["rollouts"]
    )


def cartpole_peer(work: dict[str, Any]) -> dict[str, Any]:
    """Sample Factory, in an environment of its own; one LSTM for both nets, behind layers of 64."""
    # It leaves epochs out where the loss changes by less than 1e-6, as it does at our learning rate.
    shown = {"num_envs": NUM_ENVS, "num_steps": NUM_STEPS, "n_epochs": EPOCHS, "learning_rate": 1000 * LEARNING_RATE}
    asked = {name: work[name] for name in ("units", "batch_size", "rollouts")}
    loss = {"gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "vf_coef": 0.5, "max_grad_norm": 0.5}
    return bench_peers.run_peer("Sample Factory", {**shown, **asked, **loss})


def arithmetic() -> dict[str, Any]:
    """GFLOP/s of the update by the products of its two LSTMs alone: forward, and twice as much backward."""
    work = CARTPOLE["recurrent-256-2048-short"]
    found, units = cartpole_ours(work), work["units"]
    forward = 2 * 2 * 4 * units * (units + len(SHOWN))
    rate = found["limits"]["update_only_steps_per_s"] * EPOCHS * 3 * forward / 1e9
    return {"rate": rate, "unit": "GFLOP/s", **NOTHING_LEARNED}


def product() -> dict[str, Any]:
    """GFLOP/s of torch's product of two matrices of 1,024 × 1,024, on all cores."""
    size, many = 1024, 100
    one, other = torch.rand(size, size), torch.rand(size, size)
    one @ other
    begun = time.perf_counter()
    for _ in range(many):
        one @ other
    rate = many * 2 * size**3 / (time.perf_counter() - begun) / 1e9
    return {"rate": rate, "unit": "GFLOP/s", **NOTHING_LEARNED}


class Encoder(BaseFeaturesExtractor):
    """A features extractor: one layer of 64 units, so that the LSTM's inputs are few."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 64)
        self.net = nn.Sequential(nn.Linear(observation_space.shape[0], 64), nn.Tanh())

    def forward(self, observations: Tensor) -> Tensor:
        found: Tensor = self.net(observations)
        return found


SHARED = ("algo.lstm_hidden_size=64", "algo.shared_lstm=true", "algo.enable_critic_lstm=false")
SKULLKING: dict[str, tuple[str, ...]] = {
    "recurrent-skullking-256": (),  # stock's architecture, and its number of units
    "recurrent-skullking-64": ("algo.lstm_hidden_size=64",),
    "recurrent-skullking-shared": SHARED,
    "recurrent-skullking-encoder": (*SHARED, "algo.policy_kwargs.features_extractor_class=bench_recurrent:Encoder"),
}
SKULLKING_ROLLOUTS = 6


def skullking(algo: str, *more: str) -> dict[str, Any]:
    """A run of the command on native games, by MaskablePPO's own settings."""
    return bench_ppo.command_run(
        [
            "+profile=speed",
            f"algo={algo}",
            f"num_envs={TRAIN['num_envs']}",
            f"batch_size={TRAIN['batch_size']}",
            f"algo.rollout_size={TRAIN['rollout_size']}",
            f"algo.n_epochs={TRAIN['n_epochs']}",
            f"algo.learning_rate={TRAIN['learning_rate']}",
            f"total_timesteps={TRAIN['rollout_size'] * SKULLKING_ROLLOUTS}",
            "checkup=off",
            "eval.episodes=2",
            *more,
        ],
        TRAIN["batch_size"],
    )


WORKS: dict[str, dict[str, Measurement]] = {
    **{
        name: {
            "fasttrain": lambda work=work: cartpole_ours(work),
            "sb3-contrib": lambda work=work: cartpole_stock(work),
            "sb3-contrib, 1 thread": lambda work=work: cartpole_stock(work, 1),
            "lean PPO-LSTM loop": lambda work=work: cartpole_loop(work),
            **({} if work["swings"] else {"Sample Factory": lambda work=work: cartpole_peer(work)}),
        }
        for name, work in CARTPOLE.items()
    },
    "recurrent-256-arithmetic": {"fasttrain": arithmetic, "torch, product of matrices": product},
    **{
        name: {
            "fasttrain": lambda more=more: skullking("maskable_recurrent_ppo", *more),
            "fasttrain MaskablePPO, no memory": lambda: skullking("maskable_ppo"),
        }
        for name, more in SKULLKING.items()
    },
}
