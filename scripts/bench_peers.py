"""Other frameworks on the work of the ppo-cartpole and per benchmarks: each in a virtual environment of its own.

Made on first use in a cache folder outside the repository ($XDG_CACHE_HOME or ~/.cache, fasttrain-bench/), with the
versions below and torch from constraints.txt. Delete that folder to be rid of them. A framework that cannot be
installed here is skipped, with the reason. What it runs is scripts/peers/NAME.py or scripts/bench_per.py: the work as
JSON in, one line of JSON out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 1800, 900


@dataclass(frozen=True)
class Peer:
    """What to install and which script of scripts/peers/ to run; no packages: this environment will do."""

    script: str
    packages: tuple[str, ...] = ()
    constrained: tuple[str, ...] = ("torch", "gymnasium", "numpy", "stable_baselines3")  # lines of constraints.txt


# Sample Factory asks for NumPy 1 and Gymnasium below 1.0, so only torch is ours there.
PEERS = {
    "lean loop": Peer("ppo_lean.py"),
    "SBX": Peer("ppo_sbx.py", ("sbx-rl==0.28.0", "jax==0.10.2", "box2d==2.3.10", "pygame-ce==2.5.8")),
    "Tianshou": Peer("ppo_tianshou.py", ("tianshou==2.0.1",)),
    "TorchRL": Peer("ppo_torchrl.py", ("torchrl==0.14.1", "gymnasium", "torch")),
    "Sample Factory": Peer("ppo_sample_factory.py", ("sample-factory==2.1.1",), ("torch",)),
}


class Unavailable(Exception):  # noqa: N818 - not an error: the benchmark says so and goes on
    """The framework cannot be measured here; the text says why."""


def run_peer(name: str, work: dict[str, Any]) -> dict[str, Any]:
    """Measure one framework; `{"skipped": reason}` if it cannot be installed or run."""
    peer = PEERS[name]
    return run_script(name, peer, [str(ROOT / "scripts" / "peers" / peer.script), json.dumps(work)])


def run_script(name: str, peer: Peer, script: list[str]) -> dict[str, Any]:
    """What a script with its arguments prints in the peer's environment; `{"skipped": reason}` as above."""
    try:
        return _run([str(python_of(name, peer)), *script])
    except Unavailable as reason:
        return {"skipped": str(reason)}


def install(peers: Mapping[str, Peer]) -> None:
    """Make their environments; say where each is, or why not."""
    for name, peer in peers.items():
        print(f"{name}: {_place(name, peer)}", flush=True)


def _place(name: str, peer: Peer) -> str:
    try:
        return str(python_of(name, peer))
    except Unavailable as reason:
        return str(reason)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain-bench"


def python_of(name: str, peer: Peer) -> Path:
    """The peer's interpreter, after installing what is missing.

    Raises:
        Unavailable: the installation failed.
    """
    if not peer.packages:
        return Path(sys.executable)
    pins = pins_of((ROOT / "constraints.txt").read_text(encoding="utf-8"), peer.constrained)
    inputs = json.dumps([peer.packages, pins, sys.version_info[:2]])
    slug = re.sub(r"\W+", "-", name.lower())
    folder = cache_folder() / f"{slug}-{hashlib.sha256(inputs.encode()).hexdigest()[:8]}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "installed"
    if not done.exists():
        print(f"  installing {name} into {folder} (once)", file=sys.stderr, flush=True)
        _install([sys.executable, "-m", "venv", "--clear", str(folder)])
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
        _install([*pip, "-c", str(constraints), *peer.packages])
        done.touch()
    return python


def pins_of(constraints: str, names: tuple[str, ...]) -> list[str]:
    """The lines of constraints.txt about the packages named."""
    return [line for line in constraints.splitlines() if line.partition("==")[0] in names]


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"not installed: {error}") from error
    if done.returncode:
        raise Unavailable(f"not installed: {_last_line(done.stderr) or _last_line(done.stdout)}")


def _run(command: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"did not end within {RUN_TIMEOUT_S} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        raise Unavailable(f"does not run here: {_last_line(done.stderr) or _last_line(done.stdout)}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    install(PEERS)
