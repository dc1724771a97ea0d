"""Works of benchmark.py about PPO: the update alone, CartPole end to end beside other frameworks, a large net on a GPU.

Both sides of an update are given the very same rollout: our model collects it, and stock's buffer is filled with it.
Before each timed update the weights are set back, so that every one starts alike; the first is not counted but shown.
"""

from __future__ import annotations

import csv
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_peers

SKULLKING = "fasttrain/SkullKing-v0"
Measurement = Callable[[], dict[str, Any]]

# --- a whole run of the fasttrain command


def command_run(arguments: Sequence[str], batch_size: int, window: int = 500) -> dict[str, Any]:
    """`fasttrain ARGUMENTS` in this process; its own summary says what it did and how fast.

    `window`: the last episodes, whose mean return is the quality.
    """
    from fasttrain.cli import main

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if main([*arguments, "live=off", f"hydra.run.dir={folder}"]) != 0:
            raise SystemExit(1)
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        with (folder / "episodes.csv").open(newline="", encoding="utf-8") as file:
            returns = [float(row["return"]) for row in csv.DictReader(file)]
    flags = {row["flag"]: row["effective"] for row in summary["plan"]}
    return {
        "rate": summary["steps_per_s"],
        "env_steps": summary["env_steps"],
        "updates": summary["updates"],
        "samples_per_update": batch_size,
        "quality": statistics.fmean(returns[-window:]),
        "startup_s": summary["startup_s"],
        "covered_share": summary["perf"]["covered_share"],
        "limits": summary["limits"],
        "gpu_share": summary["utilization"]["gpu"],
        "chosen": {key: flags[key] for key in ("vec_env", "workers", "fused_update", "use_amp", "use_compile")},
    }


# --- T3: the update alone

UPDATES: dict[str, dict[str, Any]] = {
    "ppo-update-64-256": {"net_arch": [64, 64], "batch_size": 256, "repeats": 8},
    "ppo-update-64-2048": {"net_arch": [64, 64], "batch_size": 2048, "repeats": 12},
    "ppo-update-512": {"net_arch": [512, 512, 256], "batch_size": 2048, "repeats": 2, "more": ("use_amp=auto",)},
    "ppo-update-cartpole-256": {"net_arch": [64, 64], "batch_size": 256, "repeats": 8, "cartpole": True},
    "ppo-update-cartpole-2048": {"net_arch": [64, 64], "batch_size": 2048, "repeats": 12, "cartpole": True},
}
ROLLOUT, NUM_ENVS, EPOCHS = 16_384, 64, 4


def update_alone(work: dict[str, Any], ours: bool, stock_threads: int | None = None) -> dict[str, Any]:
    """Samples per second of `model.train()` on one filled rollout: Skull King with masks, or CartPole.

    `stock_threads`: None is torch's own choice, which is what an SB3 user gets.
    """
    begun = time.perf_counter()
    import torch

    stock_threads = stock_threads or torch.get_num_threads()
    model, chosen = speed_model(work)
    collect_once(model)
    seconds = []
    trained = model if ours else stock_twin(model, work)
    if not ours:
        torch.set_num_threads(stock_threads)
    start = {key: value.clone() for key, value in trained.policy.state_dict().items()}
    updates = count_updates(trained)
    for _ in range(work["repeats"] + 1):
        trained.policy.load_state_dict(start)
        before = time.perf_counter()
        trained.train()
        seconds.append(time.perf_counter() - before)
    counted = updates()
    return {
        "rate": ROLLOUT * EPOCHS / statistics.median(seconds[1:]),
        "unit": "samples per second",
        "env_steps": ROLLOUT,
        "updates": counted / len(seconds),
        "samples_per_update": work["batch_size"],
        "warm_up_s": seconds[0],
        "startup_s": before - begun - sum(seconds[:-1]),
        **({"chosen": chosen} if ours else {}),
    }


def speed_model(work: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model as `fasttrain +profile=speed` builds it, and what the plan settled on."""

    from fasttrain.cli.compose import configured
    from fasttrain.kernel_cache import compile_all
    from fasttrain.perf.clock import PhaseClock
    from fasttrain.runs import engine, envs, models
    from fasttrain.runs.engine import learner_calls, settle_engine, settle_kernels
    from fasttrain.spec.plan import resolve

    env = ("env=gym", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy") if work.get("cartpole") else ()
    arguments = [
        "+profile=speed",
        *env,
        f"num_envs={NUM_ENVS}",
        f"batch_size={work['batch_size']}",
        f"algo.rollout_size={ROLLOUT}",
        f"algo.n_epochs={EPOCHS}",
        f"algo.net_arch={work['net_arch']}".replace(" ", ""),
        *work.get("more", ()),
    ]
    config = configured(arguments)
    plan = resolve(config, {}, envs.env_facts(config), envs.this_machine())
    engine.set_threads(plan.config.torch_threads)
    compile_all([*envs.game_calls(plan.config), *learner_calls(plan.config)])
    model = models.build_algorithm(
        plan.config, envs.build_vec_env(plan.config, plan.config.num_envs, seed=0), PhaseClock()
    )
    plan = settle_engine(settle_kernels(plan, model), model)
    return model, {key: getattr(plan.config, key) for key in ("fused_update", "use_amp", "torch_threads")}


def collect_once(model: Any) -> None:
    """Fill the model's rollout storage."""
    _, callback = model._setup_learn(ROLLOUT)
    callback.on_training_start({}, {})
    model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    model._current_progress_remaining = 1.0


def stock_twin(model: Any, work: dict[str, Any]) -> Any:
    """Stock's model with the same weights, hyperparameters and rollout."""
    import numpy as np
    import sb3_contrib
    import stable_baselines3

    stock_class = stable_baselines3.PPO if work.get("cartpole") else sb3_contrib.MaskablePPO
    stock = stock_class(
        "MlpPolicy",
        model.env,
        n_steps=model.n_steps,
        batch_size=work["batch_size"],
        n_epochs=EPOCHS,
        learning_rate=model.learning_rate,
        policy_kwargs={"net_arch": work["net_arch"]},
        seed=0,
        device="cpu",
    )
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


def count_updates(model: Any) -> Callable[[], float]:
    """How many gradient updates the model makes from now on: by the optimizer's own step counts, kernels' too."""
    optimizer = model.policy.optimizer

    def now() -> float:
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        return float(max(map(float, steps), default=0.0))

    begun = now()
    return lambda: now() - begun


# --- T7: CartPole end to end, and envs with continuous actions

PPO = {"n_epochs": 4, "num_steps": 128, "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2,
       "vf_coef": 0.5, "max_grad_norm": 0.5}  # fmt: skip
CARTPOLE: dict[str, dict[str, Any]] = {
    "ppo-cartpole-8": {**PPO, "num_envs": 8, "batch_size": 256, "rollouts": 80},
    "ppo-cartpole-64": {**PPO, "num_envs": 64, "batch_size": 2048, "rollouts": 30},
}
SMALL = {**PPO, "num_envs": 8, "batch_size": 256, "rollouts": 80}
CONTINUOUS: dict[str, dict[str, Any]] = {
    "ppo-pendulum-8": {**SMALL, "env_id": "Pendulum-v1", "env_kwargs": {}},
    "ppo-pendulum-64": {**PPO, "env_id": "Pendulum-v1", "env_kwargs": {}, "num_envs": 64, "batch_size": 2048,
                        "rollouts": 30},
    "ppo-lander-8": {**SMALL, "env_id": "LunarLander-v3", "env_kwargs": {"continuous": True}},
}  # fmt: skip


def cartpole_ours(work: dict[str, Any]) -> dict[str, Any]:
    rollout = work["num_envs"] * work["num_steps"]
    return command_run(
        [
            "+profile=speed",
            f"env.id={work.get('env_id', 'CartPole-v1')}",
            *(f"env.kwargs.{key}={value}" for key, value in work.get("env_kwargs", {}).items()),
            "algo=ppo",
            f"num_envs={work['num_envs']}",
            f"algo.rollout_size={rollout}",
            f"batch_size={work['batch_size']}",
            f"algo.n_epochs={work['n_epochs']}",
            f"algo.learning_rate={work['learning_rate']}",
            f"total_timesteps={rollout * work['rollouts']}",
            "eval.episodes=8",
        ],
        work["batch_size"],
    )


def cartpole_stock(work: dict[str, Any], subproc: bool) -> dict[str, Any]:
    """What an SB3 user writes."""
    begun = time.perf_counter()
    from stable_baselines3 import PPO as StockPPO  # noqa: N811 - a class named like a constant
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    kind = SubprocVecEnv if subproc else DummyVecEnv
    start = {"start_method": "fork"} if subproc else {}  # forkserver: 64 processes that each import torch
    env = make_vec_env(
        work.get("env_id", "CartPole-v1"), n_envs=work["num_envs"], seed=0, vec_env_cls=kind, vec_env_kwargs=start,
        env_kwargs=work.get("env_kwargs"),
    )  # fmt: skip
    same = ("n_epochs", "learning_rate", "gamma", "gae_lambda", "clip_range", "vf_coef", "max_grad_norm", "batch_size")
    model = StockPPO(
        "MlpPolicy", env, n_steps=work["num_steps"], seed=0, device="cpu", **{key: work[key] for key in same}
    )
    return stock_learn(model, work["num_envs"] * work["num_steps"] * work["rollouts"], begun)


def stock_learn(model: Any, total: int, begun: float) -> dict[str, Any]:
    """Time a stock model's `learn`."""
    updates = 0

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1

    model.policy.optimizer.register_step_post_hook(count)
    started = time.perf_counter()
    model.learn(total)
    seconds = time.perf_counter() - started
    model.env.close()
    return {
        "rate": model.num_timesteps / seconds,
        "env_steps": model.num_timesteps,
        "updates": updates,
        "samples_per_update": model.batch_size,
        "quality": statistics.fmean(episode["r"] for episode in model.ep_info_buffer),
        "startup_s": started - begun,
    }


# --- T8: a large net on a GPU

GPU: dict[str, Any] = {
    "net_arch": [1024, 512, 256], "num_envs": 2048, "num_steps": 32, "batch_size": 8192, "rollouts": 8,
}  # fmt: skip


def gpu(measure: Measurement) -> dict[str, Any]:
    """The measurement, or why it is none."""
    import torch

    return measure() if torch.cuda.is_available() else {"skipped": "this machine (or this torch build) has no CUDA"}


def gpu_ours(device: str = "cuda") -> dict[str, Any]:
    rollout = GPU["num_envs"] * GPU["num_steps"]
    return command_run(
        [
            "+profile=speed",
            f"device={device}",
            f"num_envs={GPU['num_envs']}",
            f"algo.net_arch={GPU['net_arch']}".replace(" ", ""),
            f"algo.rollout_size={rollout}",
            f"batch_size={GPU['batch_size']}",
            f"total_timesteps={rollout * GPU['rollouts']}",
            "algo.n_epochs=4",
            "eval.episodes=64",
        ],
        GPU["batch_size"],
    )


def gpu_stock(native: bool, device: str = "cuda") -> dict[str, Any]:
    """Stock sb3-contrib on the same GPU, on our native envs or on the single-env class."""
    begun = time.perf_counter()
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.env_util import make_vec_env

    import fasttrain.envs  # noqa: F401 - registers the game
    from fasttrain.games.skullking.game import SkullKingGame
    from fasttrain.vec.native import NativeVecEnv

    # Stock reads episodes from infos; the native batch puts them there as Monitor does.
    env: Any = (
        NativeVecEnv(SkullKingGame(GPU["num_envs"]))
        if native
        else make_vec_env("fasttrain.envs:" + SKULLKING, n_envs=GPU["num_envs"], seed=0)
    )
    env.seed(0)
    model = MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=GPU["num_steps"],
        batch_size=GPU["batch_size"],
        n_epochs=4,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": GPU["net_arch"]},
        seed=0,
        device=device,
    )
    return stock_learn(model, GPU["num_envs"] * GPU["num_steps"] * GPU["rollouts"], begun)


# --- the table of works

SUBPROC, SINGLE = "SB3, SubprocVecEnv", "sb3-contrib, DummyVecEnv, GPU"
PEERS_ONLY = {*bench_peers.PEERS, SUBPROC, SINGLE}


def _cartpole_works() -> dict[str, dict[str, Measurement]]:
    return {
        name: {
            "fasttrain": lambda work=work: cartpole_ours(work),
            "SB3, DummyVecEnv": lambda work=work: cartpole_stock(work, False),
            SUBPROC: lambda work=work: cartpole_stock(work, True),
            **{
                peer: lambda work=work, peer=peer: bench_peers.run_peer(peer, {**work, "ent_coef": 0.0})
                for peer in (bench_peers.PEERS if name in CARTPOLE else ["SBX"])
            },
        }
        for name, work in (CARTPOLE | CONTINUOUS).items()
    }


WORKS: dict[str, dict[str, Measurement]] = {
    **{
        name: {
            "fasttrain": lambda work=work: update_alone(work, True),
            "stock": lambda work=work: update_alone(work, False),
            "stock, 1 thread": lambda work=work: update_alone(work, False, 1),
        }
        for name, work in UPDATES.items()
    },
    **_cartpole_works(),
    "ppo-gpu": {
        "fasttrain": lambda: gpu(gpu_ours),
        "sb3-contrib, native envs": lambda: gpu(lambda: gpu_stock(True)),
        SINGLE: lambda: gpu(lambda: gpu_stock(False)),
    },
}
