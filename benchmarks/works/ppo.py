"""PPO: the update alone, whole trainings beside other frameworks, a large net on a GPU.

Both sides of an update are given the very same rollout: our model collects it, and stock's buffer is filled with it.
Before each timed update the weights are set back, so that every one starts alike; the first is not counted but shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import peers, trainings
from benchmarks.work import OURS, Sample, Work, works_of

# --- the update alone

ROLLOUT, NUM_ENVS, EPOCHS = 16_384, 64, 4
SKULLKING, CARTPOLE = (), ("env=gym", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")
UPDATES: dict[str, tuple[list[int], int, int, tuple[str, ...]]] = {  # net, minibatch, updates, overrides
    "ppo-update-64-256": ([64, 64], 256, 8, SKULLKING),
    "ppo-update-64-2048": ([64, 64], 2048, 12, SKULLKING),
    "ppo-update-512": ([512, 512, 256], 2048, 2, (*SKULLKING, "use_amp=auto")),
    "ppo-update-cartpole-256": ([64, 64], 256, 8, CARTPOLE),
    "ppo-update-cartpole-2048": ([64, 64], 2048, 12, CARTPOLE),
}


def env_of(name: str) -> str:
    return "CartPole" if "cartpole" in name else "Skull King with masks"


def update_alone(name: str, ours: bool, stock_threads: int | None = None) -> Sample:
    """Samples per second of `model.train()` on one filled rollout: Skull King with masks, or CartPole."""
    begun = time.perf_counter()
    import torch

    net, batch_size, repeats, more = UPDATES[name]
    stock_threads = stock_threads or torch.get_num_threads()
    settings = {"num_envs": NUM_ENVS, "batch_size": batch_size, "algo.rollout_size": ROLLOUT, "algo.n_epochs": EPOCHS}
    plan, model = trainings.built(["+profile=speed", *more, *trainings.typed({**settings, "algo.net_arch": net})])
    _, callback = model._setup_learn(ROLLOUT)
    callback.on_training_start({}, {})
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    model._current_progress_remaining = 1.0
    trained = model if ours else stock_twin(model, net, batch_size, "algo=ppo" in more)
    if not ours:
        torch.set_num_threads(stock_threads)
    start = {key: value.clone() for key, value in trained.policy.state_dict().items()}
    updates, seconds, ready = trainings.count_updates(trained), [], time.perf_counter()
    for _ in range(repeats + 1):
        trained.policy.load_state_dict(start)
        before = time.perf_counter()
        trained.train()
        seconds.append(time.perf_counter() - before)
    return {
        "rate": ROLLOUT * EPOCHS / statistics.median(seconds[1:]),
        "updates": updates() / len(seconds),
        "samples_per_update": batch_size,
        "startup_s": ready - begun + seconds[0],
        "chosen": {key: getattr(plan.config, key) for key in ("fused_update", "use_amp", "torch_threads")},
    }


def stock_twin(model: Any, net: list[int], batch_size: int, plain: bool) -> Any:
    """Stock's model with the same weights, hyperparameters and rollout."""
    import numpy as np
    import sb3_contrib
    import stable_baselines3

    same = {"n_steps": model.n_steps, "learning_rate": model.learning_rate, "batch_size": batch_size}
    stock_class: Any = stable_baselines3.PPO if plain else sb3_contrib.MaskablePPO
    kwargs = {"net_arch": net}
    stock = stock_class("MlpPolicy", model.env, n_epochs=EPOCHS, policy_kwargs=kwargs, seed=0, device="cpu", **same)
    stock._setup_learn(ROLLOUT)
    stock.policy.load_state_dict(model.policy.state_dict())
    buffer, storage = stock.rollout_buffer, model.rollout_buffer
    buffer.reset()
    for name in ("values", "returns", "advantages", "log_probs", "actions", "observations"):
        mine = getattr(buffer, name)
        mine[:] = np.asarray(getattr(storage, name)).reshape(mine.shape)
    if getattr(storage, "action_masks", None) is not None:
        buffer.action_masks[:] = storage.action_masks.reshape(buffer.action_masks.shape)
    buffer.pos, buffer.full = buffer.buffer_size, True
    return stock


# --- whole trainings

PPO = {"n_epochs": 4, "num_steps": 128, "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2,
       "vf_coef": 0.5, "max_grad_norm": 0.5, "env_kwargs": {}}  # fmt: skip
SMALL = {**PPO, "num_envs": 8, "batch_size": 256, "rollouts": 80}
LARGE = {**PPO, "num_envs": 64, "batch_size": 2048, "rollouts": 30}
TRAININGS: dict[str, dict[str, Any]] = {
    "ppo-cartpole-8": {**SMALL, "env_id": "CartPole-v1"},
    "ppo-cartpole-64": {**LARGE, "env_id": "CartPole-v1"},
    "ppo-pendulum-8": {**SMALL, "env_id": "Pendulum-v1"},
    "ppo-pendulum-64": {**LARGE, "env_id": "Pendulum-v1"},
    "ppo-lander-8": {**SMALL, "env_id": "LunarLander-v3", "env_kwargs": {"continuous": True}},
}
SUBPROC = "SB3, SubprocVecEnv"
POOL = "lean loop, EnvPool"
VECTOR = "fasttrain, CartPole's own VectorEnv"  # its resets are steps, so the work is a little more
FRAMEWORKS = ("lean loop", POOL, "SBX", "Tianshou", "TorchRL", "Sample Factory")


def ours(work: dict[str, Any], vec_env: str = "dummy") -> Sample:
    rollout = work["num_envs"] * work["num_steps"]
    settings = {
        "env.id": work["env_id"],
        "algo": "ppo",
        "vec_env": vec_env,
        "num_envs": work["num_envs"],
        "batch_size": work["batch_size"],
        "algo.rollout_size": rollout,
        "algo.n_epochs": work["n_epochs"],
        "algo.learning_rate": work["learning_rate"],
        "total_timesteps": rollout * work["rollouts"],
        "eval.episodes": 8,
    }
    kwargs = trainings.typed(work["env_kwargs"], "env.kwargs.")
    return trainings.command(["+profile=speed", *trainings.typed(settings), *kwargs], work["batch_size"])


def stock(work: dict[str, Any], subproc: bool) -> Sample:
    """What an SB3 user writes."""
    begun = time.perf_counter()
    import stable_baselines3

    env = trainings.stock_envs(work["env_id"], work["num_envs"], subproc, work["env_kwargs"])
    names = ("n_epochs", "learning_rate", "gamma", "gae_lambda", "clip_range", "vf_coef", "max_grad_norm", "batch_size")
    same = {name: work[name] for name in names}
    model = stable_baselines3.PPO("MlpPolicy", env, n_steps=work["num_steps"], seed=0, device="cpu", **same)
    return trainings.stock_learn(model, work["num_envs"] * work["num_steps"] * work["rollouts"], begun)


def training(name: str, work: dict[str, Any]) -> Work:
    libraries = FRAMEWORKS if work["env_id"] == "CartPole-v1" else ("SBX",)
    asked, pool = {**work, "ent_coef": 0.0}, {"backend": "envpool", "pool_threads": 1}
    return Work(
        name,
        f"Training {work['env_id']}, PPO [64, 64], {work['num_envs']} envs, minibatch {work['batch_size']}, 4 epochs.",
        {
            OURS: partial(ours, work),
            **({VECTOR: partial(ours, work, "vector")} if libraries == FRAMEWORKS else {}),
            "SB3, DummyVecEnv": partial(stock, work, False),
            SUBPROC: partial(stock, work, True),
            **{
                library: partial(peers.run, library, asked | (pool if library == POOL else {})) for library in libraries
            },
        },
        peers=frozenset({SUBPROC, *libraries}),
        target="T7" if libraries == FRAMEWORKS else "",
    )


# --- a large net on a GPU

GPU: dict[str, Any] = {"net_arch": [1024, 512, 256], "num_envs": 2048, "num_steps": 32, "batch_size": 8192}
GPU_ROLLOUTS = 8


def on_gpu(measurement: Callable[[], Sample]) -> Sample:
    """The measurement, or why it is none."""
    import torch

    return measurement() if torch.cuda.is_available() else {"skipped": "this machine (or this torch build) has no CUDA"}


def gpu_ours() -> Sample:
    rollout = GPU["num_envs"] * GPU["num_steps"]
    settings = {
        **{"device": "cuda", "num_envs": GPU["num_envs"], "batch_size": GPU["batch_size"], "eval.episodes": 64},
        **{"algo.net_arch": GPU["net_arch"], "algo.rollout_size": rollout, "algo.n_epochs": EPOCHS},
        "total_timesteps": rollout * GPU_ROLLOUTS,
    }
    return trainings.command(["+profile=speed", *trainings.typed(settings)], GPU["batch_size"])


def gpu_stock(native: bool) -> Sample:
    """Stock sb3-contrib on the same GPU, on our native envs or on the single-env class."""
    begun = time.perf_counter()
    from sb3_contrib import MaskablePPO

    import fasttrain_games.envs  # noqa: F401 - registers the game
    from fasttrain.vec.native import NativeVecEnv
    from fasttrain_games.skullking.game import SkullKingGame

    num_envs = GPU["num_envs"]
    single = "fasttrain_games.envs:fasttrain/SkullKing-v0"
    env: Any = NativeVecEnv(SkullKingGame(num_envs)) if native else trainings.stock_envs(single, num_envs)
    env.seed(0)
    model = MaskablePPO(
        "MlpPolicy", env, n_steps=GPU["num_steps"], batch_size=GPU["batch_size"], n_epochs=EPOCHS, learning_rate=1e-3,
        policy_kwargs={"net_arch": GPU["net_arch"]}, seed=0, device="cuda",
    )  # fmt: skip
    return trainings.stock_learn(model, num_envs * GPU["num_steps"] * GPU_ROLLOUTS, begun)


SINGLE = "sb3-contrib, DummyVecEnv, GPU"
WORKS = works_of(
    *(
        Work(
            name,
            f"The update of PPO alone, net {net}, minibatch {batch_size}, {env_of(name)}.",
            {
                OURS: partial(update_alone, name, True),
                "stock": partial(update_alone, name, False),
                "stock, 1 thread": partial(update_alone, name, False, 1),
            },
            unit="samples/s",
            equal=("updates", "samples_per_update"),
            target="T3" if "cartpole" not in name else "",
        )
        for name, (net, batch_size, _, _) in UPDATES.items()
    ),
    *(training(name, work) for name, work in TRAININGS.items()),
    Work(
        "ppo-gpu",
        "Skull King, MaskablePPO [1024, 512, 256] on a GPU, 2,048 native envs, minibatch 8,192.",
        {
            OURS: partial(on_gpu, gpu_ours),
            "sb3-contrib, native envs": partial(on_gpu, partial(gpu_stock, True)),
            SINGLE: partial(on_gpu, partial(gpu_stock, False)),
        },
        peers=frozenset({SINGLE}),
        target="T8",
    ),
)
