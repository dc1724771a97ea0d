"""Other libraries on the same work, each in a virtual environment of its own.

Made on first use in a cache folder outside the repository ($XDG_CACHE_HOME or ~/.cache, fasttrain-bench/), with the
versions below and torch from constraints.txt. Delete that folder to be rid of them. What cannot be installed here is
skipped, with the reason. The files beside this one run there: the work as JSON in, one line of JSON out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 1800, 900


@dataclass(frozen=True)
class Peer:
    """What to install and which file to run; no packages: this environment will do."""

    script: str
    packages: tuple[str, ...] = ()
    constrained: tuple[str, ...] = ("torch", "gymnasium", "numpy", "stable_baselines3")  # lines of constraints.txt
    without_dependencies: tuple[str, ...] = ()  # packages that ask for another torch, which would bring CUDA


# Sample Factory asks for NumPy 1 and Gymnasium below 1.0, so only torch is ours there. TorchRL's replay has its own
# torch (4.8 GB with CUDA): no binary of TorchRL loads with that of constraints.txt, and without it there is no PER.
PEERS = {
    "lean loop": Peer("ppo_lean.py"),
    "lean loop, EnvPool": Peer("ppo_lean.py", ("envpool==1.2.5", "torch", "gymnasium", "numpy")),
    "SBX": Peer("ppo_sbx.py", ("sbx-rl==0.28.0", "jax==0.10.2", "box2d==2.3.10", "pygame-ce==2.5.8")),
    "Tianshou": Peer("ppo_tianshou.py", ("tianshou==2.0.1",)),
    "TorchRL": Peer("ppo_torchrl.py", ("torchrl==0.14.1", "gymnasium", "torch")),
    "Sample Factory": Peer("ppo_sample_factory.py", ("sample-factory==2.1.1",), ("torch",)),
    "RLlib": Peer("ppo_rllib.py", ("ray[rllib]==2.60.0", "torch", "box2d==2.3.10", "pygame-ce==2.5.8"), ("torch",)),
    "pufferlib": Peer(
        "vec_puffer.py",
        ("torch", "gymnasium", "numpy", "psutil", "rich", "rich-argparse", "nvidia-ml-py"),
        without_dependencies=("pufferlib-core==3.0.23",),
    ),
    "cpprb": Peer("per.py", ("cpprb==11.0.0",), ("numpy",)),
    "TorchRL, replay": Peer("per.py", ("torchrl==0.13.3", "torch==2.12.0"), ()),
    "async-gym-agents": Peer(
        "ppo_async_gym.py", ("torchinfo==1.8.0", "stable-baselines3"), without_dependencies=("async-gym-agents==0.5.0",)
    ),
    "SBX, off-policy": Peer("off_policy_sbx.py", ("sbx-rl==0.28.0", "jax==0.10.2", "mujoco")),
}


class UnavailableError(Exception):
    """It cannot be measured here; the text says why."""


def run(name: str, work: Any) -> dict[str, Any]:
    """What a peer says of the work; `{"skipped": reason}` if it cannot be installed or run."""
    peer = PEERS[name]
    try:
        command = [str(_python_of(name, peer)), str(HERE / peer.script), json.dumps(work)]
        lines = [line for line in _output(command, RUN_TIMEOUT_S).splitlines() if line.startswith('{"')]
        return dict(json.loads(lines[-1])) if lines else {"skipped": "it printed no result"}
    except UnavailableError as reason:
        return {"skipped": str(reason)}


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain-bench"


def _python_of(name: str, peer: Peer) -> Path:
    """The peer's interpreter, after installing what is missing."""
    if not peer.packages:
        return Path(sys.executable)
    constraints = (HERE.parents[1] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in constraints if line.partition("==")[0] in peer.constrained]
    inputs = json.dumps([peer.packages, peer.without_dependencies, pins, sys.version_info[:2]])
    slug = re.sub(r"\W+", "-", name.lower())
    folder = cache_folder() / f"{slug}-{hashlib.sha256(inputs.encode()).hexdigest()[:8]}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / "installed").exists():
        print(f"  installing {name} into {folder} (once)", file=sys.stderr, flush=True)
        _output([sys.executable, "-m", "venv", "--clear", str(folder)], INSTALL_TIMEOUT_S)
        (folder / "constraints.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
        _output([*pip, "-c", str(folder / "constraints.txt"), *peer.packages], INSTALL_TIMEOUT_S)
        if peer.without_dependencies:
            _output([*pip, "--no-deps", *peer.without_dependencies], INSTALL_TIMEOUT_S)
        (folder / "installed").touch()
    return python


def _output(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{Path(command[0]).name}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UnavailableError(f"exit code {done.returncode}: {said[-1].strip()[:300] if said else 'no word'}")
    return done.stdout
