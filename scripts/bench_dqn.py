"""Works of benchmark.py about DQN: CartPole end to end, and the update alone, without masks and with them.

Both sides of an update are given the very same replay buffer: our model fills it with random play, and stock's is
filled with that. An update's cost does not depend on what the weights are, so they are trained on and on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import bench_ppo

Measurement = Callable[[], dict[str, Any]]

# --- T4: CartPole end to end

WINDOW = 100  # last episodes, whose mean return is the quality
# Every hyperparameter that a default might choose differently. 19,000 updates: stock takes about 20 s for them.
CARTPOLE: dict[str, Any] = {
    "num_envs": 8,
    "updates_per_step": 8,
    "batch_size": 64,
    "warmup_steps": 1000,
    "total_timesteps": 20_000,
    "algo": {
        "buffer_size": 50_000,
        "learning_rate": 1e-3,
        "gamma": 0.99,
        "tau": 1.0,
        "target_update_interval": 500,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
        "max_grad_norm": 10.0,
    },
    "net_arch": [64, 64],
}


def cartpole_ours(work: dict[str, Any]) -> dict[str, Any]:
    """A whole `fasttrain` run."""
    settings = ("num_envs", "updates_per_step", "batch_size", "warmup_steps", "total_timesteps")
    return bench_ppo.command_run(
        [
            "+profile=speed",
            "algo=dqn",
            "env.id=CartPole-v1",
            *(f"{key}={work[key]}" for key in settings),
            *(f"algo.{key}={value}" for key, value in work["algo"].items()),
            f"algo.net_arch={work['net_arch']}".replace(" ", ""),
            "eval.episodes=8",
        ],
        work["batch_size"],
        WINDOW,
    )


def cartpole_stock(work: dict[str, Any], subproc: bool, threads: int | None = None) -> dict[str, Any]:
    """What an SB3 user writes. `threads`: None is torch's own choice."""
    begun = time.perf_counter()
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    torch.set_num_threads(threads or torch.get_num_threads())
    kind = SubprocVecEnv if subproc else DummyVecEnv
    start = {"start_method": "fork"} if subproc else {}  # forkserver: 8 processes that each import torch
    env = make_vec_env("CartPole-v1", n_envs=work["num_envs"], seed=0, vec_env_cls=kind, vec_env_kwargs=start)
    model = DQN(
        "MlpPolicy",
        env,
        batch_size=work["batch_size"],
        learning_starts=work["warmup_steps"],
        train_freq=1,
        gradient_steps=work["updates_per_step"],
        policy_kwargs={"net_arch": work["net_arch"]},
        stats_window_size=WINDOW,
        seed=0,
        device="cpu",
        **work["algo"],
    )
    return bench_ppo.stock_learn(model, work["total_timesteps"], begun)


# --- T4: the update alone

# One call of `train` makes 8 updates; a block of calls is timed.
UPDATES: dict[str, dict[str, Any]] = {
    "dqn-update-64": {"batch_size": 64, "transitions": 50_000, "calls": 40},
    "dqn-update-masked": {"batch_size": 256, "transitions": 50_000, "calls": 8, "masked": True},
}
NUM_ENVS, GRADIENT_STEPS, BLOCKS = 8, 8, 21


def update_alone(work: dict[str, Any], ours: bool, stock_threads: int | None = None) -> dict[str, Any]:
    """Samples per second of `model.train(8, batch_size)` on a filled buffer: CartPole, or Skull King with masks.

    Stock knows no masks: its maximum is over all actions, which is less work. `stock_threads`: None is torch's choice.
    """
    begun = time.perf_counter()
    import torch

    stock_threads = stock_threads or torch.get_num_threads()
    model = our_model(work)
    fill(model)
    if ours:
        model.use_engine("kernels")
    trained = model if ours else stock_twin(model, work)
    torch.set_num_threads(1 if ours else stock_threads)  # 1: what torch_threads=auto takes for such a net
    updates = bench_ppo.count_updates(trained)
    ready = time.perf_counter()
    seconds = []
    for _ in range(BLOCKS):
        before = time.perf_counter()
        for _ in range(work["calls"]):
            trained.train(GRADIENT_STEPS, work["batch_size"])
        seconds.append(time.perf_counter() - before)
    return {
        "rate": work["calls"] * GRADIENT_STEPS * work["batch_size"] / statistics.median(seconds[1:]),
        "unit": "samples per second",
        "env_steps": 0,
        "updates": updates() / (BLOCKS * work["calls"]),
        "samples_per_update": work["batch_size"],
        "warm_up_s": seconds[0],
        "startup_s": ready - begun,
    }


def our_model(work: dict[str, Any]) -> Any:
    """Our DQN with an empty buffer; without kernels yet."""
    from stable_baselines3.common.env_util import make_vec_env

    from fasttrain.accelerators.kernels_q import kernel_calls
    from fasttrain.algos.dqn import DQN
    from fasttrain.games.skullking.game import SkullKingGame
    from fasttrain.kernel_cache import compile_all
    from fasttrain.vec.native import NativeVecEnv

    compile_all(kernel_calls())
    masked = work.get("masked", False)
    env: Any = NativeVecEnv(SkullKingGame(NUM_ENVS)) if masked else make_vec_env("CartPole-v1", NUM_ENVS, seed=0)
    env.seed(0)
    return DQN("MlpPolicy", env, **_arguments(work))


def _arguments(work: dict[str, Any]) -> dict[str, Any]:
    """The same for both; no step is taken by the stock model."""
    return {
        "buffer_size": work["transitions"],
        "batch_size": work["batch_size"],
        "learning_starts": work["transitions"],
        "train_freq": work["transitions"] // NUM_ENVS,
        "policy_kwargs": {"net_arch": [64, 64]},
        "seed": 0,
        "device": "cpu",
    }


def fill(model: Any) -> None:
    """Fill the model's buffer by random play."""
    _, callback = model._setup_learn(model.buffer_size)
    callback.on_training_start({}, {})
    model.collect_rollouts(
        model.env, callback, model.train_freq, model.replay_buffer, learning_starts=model.learning_starts
    )


def stock_twin(model: Any, work: dict[str, Any]) -> Any:
    """Stock's model with the same weights, hyperparameters and transitions."""
    import numpy as np
    from stable_baselines3 import DQN

    stock = DQN("MlpPolicy", model.env, **_arguments(work))
    stock._setup_learn(model.buffer_size)
    stock.policy.load_state_dict(model.policy.state_dict())
    buffer, storage = stock.replay_buffer, model.replay_buffer
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        mine = getattr(buffer, name)
        mine[:] = np.asarray(getattr(storage, name)).reshape(mine.shape)
    buffer.pos, buffer.full = storage.pos, storage.full
    return stock


# --- the table of works

WORKS: dict[str, dict[str, Measurement]] = {
    "dqn-cartpole": {
        "fasttrain": lambda: cartpole_ours(CARTPOLE),
        "stock DQN, DummyVecEnv": lambda: cartpole_stock(CARTPOLE, False),
        # On a busy machine torch's own threads wait for each other: the better of both is the opponent.
        "stock DQN, DummyVecEnv, 1 thread": lambda: cartpole_stock(CARTPOLE, False, 1),
        "stock DQN, SubprocVecEnv": lambda: cartpole_stock(CARTPOLE, True),
    },
    **{
        name: {
            "fasttrain": lambda work=work: update_alone(work, True),
            "stock": lambda work=work: update_alone(work, False),
            "stock, 1 thread": lambda work=work: update_alone(work, False, 1),
        }
        for name, work in UPDATES.items()
    },
}
