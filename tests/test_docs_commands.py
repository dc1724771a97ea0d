"""Every command on every page is run as it is typed, with a short horizon: `pytest -m docs_commands`.

A page is one shell: its commands run in their order, in a folder that holds what they name (docs_world.py).
The last line says how many ran, and why the others did not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import docs_world
from docs_world import ROOT

PAGES = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *ROOT.glob("docs/**/*.md")])
# Commands that are not run here, and why.
ELSEWHERE = {
    r"(pip|apt|npm) install ": "installs a package",
    r"python3 scripts/(run|test)\.py": "tests/test_scripts.py runs it",
    r"fasttrain .*run=logs/ppo": "tests/integrations/test_zoo_folders.py runs it on such folders",
    r".*(…|=FOLDER\b)": "stands for a command of the reader's",
    r"ruff ": "scripts/test.py runs it",
    r"(export RAY|ray (start|get)|.*10\.0\.0\.7)": "needs a cluster",
    r"py-spy ": "a program that fasttrain does not install",
    r".*env=showdown ": "needs the Node package pokemon-showdown",
}
# What a command needs that may not be there: a module, or a program.
NEEDS = {
    "minigrid": "minigrid", "LunarLander": "Box2D", "tuned=lunarlander": "Box2D", "BipedalWalker": "Box2D",
    "Hopper": "mujoco", "envpool": "envpool", "env=atari": "ale_py", "pettingzoo": "pettingzoo",
    "pistonball": "pymunk", "mpe2": "mpe2", "gymnasium_robotics": "gymnasium_robotics", "env=go": "gnugo",
    "javac": "javac", "onnx": "onnxscript", "mp4": "imageio_ffmpeg", "video": "imageio_ffmpeg",
    "tensorboard": "tensorboard", "cluster=ray": "ray", "plan-cluster": "ray",
}  # fmt: skip
TRAIN = "total_timesteps=1000 eval.episodes=4"
# What is added to a command that it ends soon, by the first pattern that fits. Of a setting that is there twice the
# last one counts.
SHORT = {
    r"fasttrain (help|settings|report|watch|plan-cluster|new|export|zoo|check|doctor|--help)": "",
    r"fasttrain train warmup": "",
    r"fasttrain clone": "clone.episodes=20 clone.epochs=1 eval.episodes=4",
    r"(javac|python) ": "",
    r"fasttrain eval": "eval.episodes=10",
    r"fasttrain play .*(human|output)": "play.episodes=1",
    r"fasttrain play": "play.speed=100 play.episodes=1",
    r"fasttrain tune .*objective": "minutes=0.2 seeds=1 total_timesteps=4000 tune.trials=1",
    r"fasttrain (tune|compare candidates=ablate)": "minutes=0.2",
    r"fasttrain compare .*minutes": "seeds=1 minutes=0.05 eval.episodes=4",
    r"fasttrain compare": f"seeds=1 {TRAIN}",
    r"fasttrain resume": "total_timesteps=40000",
    r".*exchange_every": "population=2 population.exchange_every=8192 total_timesteps=16384 eval.episodes=4",
    r"fasttrain -m": TRAIN,
    r".*eval_every": "total_timesteps=40000 eval_every=16384 eval.episodes=4",
    r".*on_existing=resume": "total_timesteps=60000",
    r".*(atari.*algo=ppo|Pixels)": f"{TRAIN} num_envs=2 algo.rollout_size=256 batch_size=128 eval.episodes=2",
    r".*atari": "total_timesteps=300 eval.episodes=2",
    r".*(env=go|env=showdown|daemons)": "total_timesteps=128 algo.rollout_size=128 batch_size=64 eval.episodes=2",
    r".*": TRAIN,
}


class Command(NamedTuple):
    """A line of a page, and the folder in which it is typed."""

    line: str
    folder: str

    @property
    def reason(self) -> str:
        """Why it is not run; empty where it is."""
        told = next((why for pattern, why in ELSEWHERE.items() if re.match(pattern, self.line)), "")
        lacks = [name for part, name in NEEDS.items() if part in self.line and not _is_there(name)]
        return told or "".join(f"needs {name}" for name in lacks[:1])

    @property
    def short(self) -> str:
        """The line with a short horizon."""
        more = next(more for pattern, more in SHORT.items() if re.match(pattern, self.line))
        return f"{self.line} {more}"


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None or shutil.which(name, path=PATH) is not None


PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/games"])


def commands(page: Path) -> list[Command]:
    """The commands of a page, in their order."""
    found, folder = list[Command](), "."
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    typed = [text for language, text in blocks if language in ("", "sh") and not text.startswith("[PERF]")]
    for line in "".join(typed).splitlines():
        line = re.sub(r"\s+#.*", "", line).removeprefix(".venv/bin/")
        if line.startswith("cd "):
            folder = line.removeprefix("cd ")
        elif line:
            found.append(Command(line, folder))
    return found


def test_every_line_is_a_command_that_runs_or_has_its_reason():
    lines = [command for page in PAGES for command in commands(page)]
    assert len(lines) >= 100
    typed = ("fasttrain ", "python -m", "javac ")
    assert [one.line for one in lines if not one.line.startswith(typed) and not one.reason] == []


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """How many commands ran, by the reason of those that did not."""
    found: dict[str, int] = {}
    yield found
    told = ", ".join(f"{count} {why}" for why, count in sorted(found.items()))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        request.config.get_terminal_writer().line(f"\n{sum(found.values())} commands: {told}")


@pytest.mark.docs_commands
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, counts: dict[str, int]):
    docs_world.lay_out(tmp_path)
    failed = []
    for command in commands(page):
        outcome = command.reason or "ran"
        counts[outcome] = counts.get(outcome, 0) + 1
        if command.reason:
            continue
        done = subprocess.run(
            ["bash", "-c", f"exec {command.short}"], cwd=tmp_path / command.folder,
            env={**os.environ, "PATH": PATH, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
            input="\n" * 500, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        fine = (0, 3) if "compare" in command.line else (0,)
        if done.returncode not in fine:
            failed.append(f"{command.short}\nexit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)
