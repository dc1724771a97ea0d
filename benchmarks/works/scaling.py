"""How speed changes with envs, width, replay size and cores.

One sample holds a whole curve, whose `rate` is the geometric mean. Figures for 16 and 64 cores are computed by Amdahl's
law from the time on one core and on two: s = 2·T₂/T₁ − 1 is the share that does not become faster.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of
from benchmarks.works import dqn

ENVS, WIDTHS, REPLAYS = (1, 8, 64, 512, 4096), (32, 64, 128, 256, 512, 1024), (10**4, 10**5, 10**6, 10**7)
ROLLOUT, BATCH, ROLLOUTS = 8192, 2048, 12
GAMES = {
    "skullking": ("algo.net_arch=[64,64]",),
    "cartpole": ("env.id=CartPole-v1", "algo=ppo", "algo.net_arch=[64,64]"),
}
CORES: dict[str, tuple[str, ...]] = {  # what is trained on one core and on two
    "skullking": (f"algo.rollout_size={ROLLOUT}", "num_envs=256", f"batch_size={BATCH}"),
    "masked-100us": (
        "env.entry_point=benchmarks.envs:Working", "algo=maskable_ppo", f"algo.rollout_size={ROLLOUT}", "num_envs=64",
        f"batch_size={BATCH}", "checkup=off",
    ),
}  # fmt: skip
PAPER = (16, 64)  # cores


def curve(points: dict[str, float]) -> Sample:
    return {"rate": statistics.geometric_mean(points.values()), **points}


def by_envs(game: str) -> Sample:
    """Steps per second of whole trainings."""
    found = {}
    for num_envs in ENVS:
        sizes = (f"num_envs={num_envs}", f"algo.rollout_size={ROLLOUT}", f"batch_size={BATCH}", "eval.episodes=8")
        total = f"total_timesteps={(ROLLOUTS if num_envs > 1 else 2) * ROLLOUT}"
        summary, _ = trainings.finished(["+profile=speed", *GAMES[game], *sizes, total])
        found[f"{num_envs} × env"] = summary["steps_per_s"]
    return curve(found)


def by_width(kernels: bool, threads: int) -> Sample:
    """Samples per second of PPO's update, two hidden layers."""
    found = {}
    for width in WIDTHS:
        _, model = trainings.built([
            "+profile=speed", f"algo.net_arch=[{width},{width}]", f"fused_update={'on' if kernels else 'off'}",
            f"torch_threads={threads}", "use_amp=off", "num_envs=64", f"algo.rollout_size={ROLLOUT}",
            f"batch_size={BATCH}", "algo.n_epochs=1",
        ])  # fmt: skip
        _, callback = model._setup_learn(ROLLOUT)
        callback.on_training_start({}, {})
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        model._current_progress_remaining = 1.0
        spent = []
        for _ in range(3):
            begun = time.perf_counter()
            model.train()
            spent.append(time.perf_counter() - begun)
        found[f"{width} × {width}"] = ROLLOUT / statistics.median(spent[1:])
    return curve(found)


def by_replay() -> Sample:
    """Samples per second of DQN's update, batch 256, from a full buffer."""
    found = {}
    for size in REPLAYS:
        model = dqn.our_model(256, False, size)
        model.use_engine("kernels")
        spent = []
        for _ in range(9):
            begun = time.perf_counter()
            model.train(64, 256)
            spent.append(time.perf_counter() - begun)
        found[f"10^{len(str(size)) - 1} × transition"] = 64 * 256 / statistics.median(spent[1:])
    return curve(found)


def on_cores(game: str, cores: list[int]) -> float:
    """Steps per second of a process that has these cores from its start."""
    os.sched_setaffinity(0, cores)
    total = f"total_timesteps={ROLLOUTS * ROLLOUT * (4 if game == 'skullking' else 1)}"
    return float(trainings.finished(["+profile=speed", *CORES[game], total, "eval.episodes=8"])[0]["steps_per_s"])


def by_cores(game: str) -> Sample:
    """Steps per second on one core and on two, and what the law says for more."""
    cores, rates = sorted(os.sched_getaffinity(0))[:2], []
    for count in (1, 2):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            rates.append(fresh.submit(on_cores, game, cores[:count]).result())
    serial = min(1.0, max(0.0, 2 * rates[0] / rates[1] - 1))
    paper = {f"{count} × core, computed": rates[0] / (serial + (1 - serial) / count) for count in PAPER}
    return {"rate": rates[1], "1 × core": rates[0], "2 × core": rates[1], **paper, "serial × share": serial}


def torch_and_kernels(threads: int) -> dict[str, Any]:
    return {OURS: partial(by_width, True, threads), "PyTorch": partial(by_width, False, threads)}


WORKS = works_of(
    *(Work(f"scaling-envs-{game}", f"PPO [64, 64], {game}, 1 to 4,096 envs.", {OURS: partial(by_envs, game)}, equal=())
      for game in GAMES),
    *(Work(f"scaling-width-{threads}", f"PPO's update, Skull King, minibatch 2,048, threads: {threads}.",
           torch_and_kernels(threads), unit="samples/s", equal=()) for threads in (1, 2)),
    Work("scaling-replay", "DQN's update, batch 256, CartPole, by the buffer's size.", {OURS: by_replay},
         unit="samples/s", equal=()),
    *(Work(f"scaling-cores-{game}", f"Training on one core and on two, {game}.", {OURS: partial(by_cores, game)},
           equal=()) for game in CORES),
)  # fmt: skip
