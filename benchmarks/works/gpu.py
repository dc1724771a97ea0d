"""What is to be measured on a GPU: `python -m benchmarks run gpu ppo-gpu --repeats 3 --peers`.

It is meant for 40 minutes, but nobody has run it on a GPU yet. Each work trains with one flag on and off, or says how
many steps per second a known job reaches. Without a GPU the works are skipped. A test reads each command line, and
trains the first side of three works on a CPU with a few steps.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of
from benchmarks.works.ppo import on_gpu

WIDE = {
    "num_envs": 2048, "batch_size": 8192, "algo.net_arch": [1024, 512, 256], "algo.rollout_size": 65_536,
    "algo.n_epochs": 4, "total_timesteps": 1_048_576,
}  # fmt: skip
OFF_POLICY = {
    "algo": "dqn", "env.entry_point": "benchmarks.envs:Pictures", "num_envs": 8, "updates_per_step": 4,
    "batch_size": 256, "algo.buffer_size": 20_000, "algo.learning_starts": 2_000, "total_timesteps": 10_000,
}  # fmt: skip
PONG = {
    "env.backend": "envpool", "env.id": "Pong-v5", "algo": "ppo", "num_envs": 64, "batch_size": 2048,
    "algo.rollout_size": 8192, "algo.n_epochs": 4, "total_timesteps": 163_840,
}  # fmt: skip
SKULL_KING = {
    "num_envs": 4096, "batch_size": 16_384, "algo.rollout_size": 131_072, "algo.n_epochs": 1,
    "total_timesteps": 5_242_880,
}  # fmt: skip
# A work: the settings of all sides, and what each side changes.
FLAGS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "gpu-amp": (
        "Skull King, [1024, 512, 256], 2,048 native envs, with and without mixed precision.",
        WIDE, {OURS: {"use_amp": "on"}, "without": {"use_amp": "off"}},
    ),
    "gpu-compile": (
        "The same with and without torch.compile.",
        WIDE, {OURS: {"use_compile": "on"}, "without": {"use_compile": "off"}},
    ),
    "gpu-pinned": (
        "DQN from 84×84 pictures, batches in pinned memory or not, drawn by a thread or not.",
        OFF_POLICY,
        {
            OURS: {"pin_memory": "on", "prefetch": "on"},
            "no thread": {"pin_memory": "on", "prefetch": "off"},
            "neither": {"pin_memory": "off", "prefetch": "off"},
        },
    ),
    "gpu-pong": (
        "Pong from its pictures, PPO, 64 envs of EnvPool; wanted: 6,800 steps/s.",
        PONG, {OURS: {}, "float32": {"use_amp": "off", "use_compile": "off"}},
    ),
    "gpu-skullking-4096": (
        "Native Skull King, 4,096 envs, one epoch; wanted: 5,000,000 steps/s.",
        SKULL_KING, {OURS: {}, "on the CPU": {"device": "cpu"}},
    ),
}  # fmt: skip
DRY = {"total_timesteps": 512, "num_envs": 8, "batch_size": 64, "algo.rollout_size": 512, "algo.net_arch": [16]}
DRY_OFF_POLICY = {"algo.learning_starts": 100, "algo.buffer_size": 1000, "batch_size": 16, "total_timesteps": 256}


def arguments_of(name: str, side: str, dry: bool = False) -> list[str]:
    """The command line of one side. `dry`: for a CPU, with few steps and a small network."""
    _, shared, sides = FLAGS[name]
    settings: dict[str, Any] = {"device": "cuda", **shared, **sides[side], "eval.episodes": 8}
    if dry:
        smaller = DRY_OFF_POLICY if settings.get("algo") == "dqn" else DRY
        settings |= smaller | {"device": "cpu", "use_compile": "off"}
    return ["+profile=speed", *trainings.typed(settings)]


def training(name: str, side: str) -> Sample:
    """A training of one side."""
    settings = FLAGS[name][1]
    if settings.get("env.backend") == "envpool" and find_spec("envpool") is None:
        return {"skipped": "EnvPool is not installed"}
    return trainings.command(arguments_of(name, side), int(settings["batch_size"]))


WORKS = works_of(
    *(
        Work(name, text, {side: partial(on_gpu, partial(training, name, side)) for side in sides})
        for name, (text, _, sides) in FLAGS.items()
    )
)
