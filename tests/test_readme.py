"""README.md and docs/ are run: the example env trains, the flag table is the code's, the commands parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import RunCommand, configured
from fasttrain.cli.commands import COMMANDS, PLAIN, prepare
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.precedence import split_options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)]


def test_the_example_env_trains_with_masks(fasttrain: RunCommand, tmp_path: Path):
    (example,) = [text for language, text in BLOCKS if language == "python" and "class Collect" in text]
    (tmp_path / "collect.py").write_text(example)
    (command,) = re.findall(r"^fasttrain (\+.*collect:Collect.*)$", README, flags=re.MULTILINE)
    done = fasttrain(*command.split(), "total_timesteps=16000", "algo.rollout_size=3000", "batch_size=300")
    assert done.exit_code == 0, done.err
    quality = done.json("summary.json")["quality"]
    assert quality["mean_length"] == 4.0, "an illegal pick would end no episode after four steps"
    assert quality["win_rate"] is not None
    assert quality["mean_reward"] > 2.083 + 0.2, "random play takes the heaviest 1 + 1/2 + 1/3 + 1/4 times"


def test_the_drop_in_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (example,) = [text for language, text in BLOCKS if language == "python" and "skull_king" in text]
    exec(example.replace("100_000", "16_384"), {})
    assert (tmp_path / "skull_king.zip").is_file()


def test_the_worker_example_runs_as_a_script(tmp_path: Path):
    (example,) = [text for language, text in BLOCKS if language == "python" and "SharedMemoryVecEnv" in text]
    small = example.replace("100_000", "64").replace('"MlpPolicy", env', '"MlpPolicy", env, n_steps=2, batch_size=64')
    (tmp_path / "script.py").write_text(small)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_readme_is_short_and_shows_a_run():
    assert len(README.splitlines()) <= 220
    assert "[PERF] " in README


def test_links_lead_somewhere():
    links = [(path, link) for path, text in PAGES.items() for link in re.findall(r"\]\(([^)#\s]+)\)", text)]
    assert len(links) >= 10
    assert [link for path, link in links if "://" not in link and not (path.parent / link).exists()] == []


def flag_table() -> str:
    """What the README's table must say."""
    profiles = {name: configured(f"+profile={name}") for name in ("baseline", "balance", "speed")}
    lines = ["| flag | baseline | balance | speed | class | what it is |", "|---|---|---|---|---|---|"]
    for flag in FLAGS:
        values = [str(getattr(config, flag.name)).lower() for config in profiles.values()]
        values = ["null" if value == "none" else value for value in values]
        lines.append(f"| `{flag.name}` | {' | '.join(values)} | {flag.class_text} | {flag.text} |")
    return "\n".join(lines)


def test_the_flag_table_is_the_codes():
    assert flag_table() in README


def test_every_command_composes():
    shell = "\n".join(text for language, text in BLOCKS if not language)
    commands = re.findall(rf"^fasttrain (?!-m|zoo )(?:({'|'.join(COMMANDS)}) )?(.*)$", shell, flags=re.MULTILINE)
    assert len(commands) >= 20
    for word, text in commands:
        typed = shlex.split(text, comments=True)
        there = any(argument.startswith(("run=", "--config-dir")) for argument in typed)  # of a study that is there
        if word not in PLAIN and not there:
            configured(
                *(text for text in prepare(word or "train", *split_options(typed))[1] if not text.startswith("hydra."))
            )


def test_the_five_files_exist():
    house = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d\. `(src/[\w/]+\.py)`", house, flags=re.MULTILINE)
    assert len(files) == 5
    assert all((ROOT / name).is_file() for name in files)
