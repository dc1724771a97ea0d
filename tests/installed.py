"""Packages beside fasttrain, as an installer would leave them: modules, and the metadata that names entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ASKED = """
import sys
from fasttrain.cli import main
from fasttrain.cli.compose import configured
from fasttrain.errors import ConfigError

for typed in sys.argv[1:]:
    try:
        if typed.startswith("fasttrain "):
            sys.stderr = sys.stdout
            main(typed.split()[1:])
            continue
        config = configured(typed.split())
        print(config.env.backend, getattr(config, config.env.backend, ""))
    except ConfigError as error:
        print(error)
"""


def install(folder: Path, package: str, offers: Mapping[str, Mapping[str, str]], **modules: str) -> Path:
    """Write a distribution into `folder`, which belongs on the path; `offers`: group → name → module:object."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines = [
        line for group, names in offers.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def asked(folder: Path, *typed: str) -> list[str]:
    """What each of these settings or commands comes to in a process that finds the packages of `folder`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", ASKED, *typed]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
