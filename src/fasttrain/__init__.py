"""fasttrain: Stable-Baselines3 training several times faster, with the learning unchanged and the time accounted for.

Public names are imported on first use, so that `import fasttrain` (and every worker process) stays free of torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from fasttrain.spec.removed import FormerModules

__version__ = "0.2.0"

_PUBLIC = {
    "DQN": "fasttrain.algos.dqn",
    "MaskablePPO": "fasttrain.algos.ppo",
    "MaskableRecurrentPPO": "fasttrain.algos.recurrent",
    "PPO": "fasttrain.algos.ppo",
    "NativeVecEnv": "fasttrain.vec.native",
    "RecurrentPPO": "fasttrain.algos.recurrent",
    "ReplaceEnv": "fasttrain.errors",
    "RunSpec": "fasttrain.spec.plan",
    "SAC": "fasttrain.algos.sac",
    "SharedMemoryVecEnv": "fasttrain.vec.shared",
    "train": "fasttrain.cli.library",
}

__all__ = [
    "DQN", "PPO", "SAC", "MaskablePPO", "MaskableRecurrentPPO", "NativeVecEnv", "RecurrentPPO", "ReplaceEnv",
    "RunSpec", "SharedMemoryVecEnv", "__version__", "train",
]  # fmt: skip


def put_behind_python(folder: str) -> None:
    """Let modules of `folder` be imported: before installed packages, but after Python's own modules, so that a file
    named signal.py or queue.py does not hide them."""
    while folder in sys.path:
        sys.path.remove(folder)
    library = os.path.dirname(os.__file__)
    own = [place for place, path in enumerate(sys.path) if path in (library, os.path.join(library, "lib-dynload"))]
    sys.path.insert(max(own, default=-1) + 1, folder)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fasttrain' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


sys.meta_path.insert(0, FormerModules)
