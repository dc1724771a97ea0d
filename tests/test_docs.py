from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommand, configured
from fasttrain.cli.commands import COMMANDS, PLAIN, prepare, spelt_out
from fasttrain.cli.help import help_on
from fasttrain.spec.checks import FLAGS
from fasttrain.spec.precedence import split_options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = (*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *(ROOT / "docs").rglob("*.md"))
PAGES = {path: path.read_text(encoding="utf-8") for path in sorted(FILES)}
SCHEMAS = {
    file.name.removesuffix(".schema.json"): json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "docs" / "reference" / "schemas").glob("*.json"))
}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
         "null": type(None)}  # fmt: skip
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)]


def example(part: str) -> str:
    found = {text for language, text in BLOCKS if language == "python" and part in text}
    assert len(found) == 1, f"{part!r} is in {len(found)} examples"
    return found.pop()


def test_the_example_env_trains_with_masks(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "collect.py").write_text(example("class Collect"))
    assert example("class Collect") == (ROOT / "examples" / "collect.py").read_text(encoding="utf-8")
    page = PAGES[ROOT / "docs" / "start" / "own_env.md"]
    (command,) = re.findall(r"^fasttrain (\+.*collect:Collect.*)$", page, flags=re.MULTILINE)
    done = fasttrain(*command.split(), "total_timesteps=16000", "algo.rollout_size=3000", "batch_size=300").ok()
    quality = done.json("summary.json")["quality"]
    assert [problem for name in SCHEMAS for problem in misfits(SCHEMAS[name], done.json(f"{name}.json"), name)] == []
    assert quality["mean_length"] == 4.0, "an illegal pick would end no episode after four steps"
    assert quality["win_rate"] is not None
    assert quality["mean_reward"] > 2.083 + 0.2, "random play takes the heaviest 1 + 1/2 + 1/3 + 1/4 times"


def misfits(schema: dict[str, Any], value: Any, place: str) -> Iterator[str]:
    """Where a file does not fit its JSON schema, of what the schemas in docs/reference/schemas use."""
    types = schema.get("type", [])
    if types and not any(isinstance(value, TYPES[name]) for name in ([types] if isinstance(types, str) else types)):
        yield f"{place}: {value!r} is no {types}"
    elif value not in schema.get("enum", [value]):
        yield f"{place}: {value!r} is none of {schema['enum']}"
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from misfits(schema.get("items", {}), entry, f"{place}[{index}]")
    elif isinstance(value, dict):
        yield from (f"{place}: {key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, entry in value.items():
            below = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            yield from [f"{place}: unknown {key}"] if below is False else misfits(below, entry, f"{place}.{key}")


def test_the_files_of_an_off_policy_run_with_workers_fit_their_schemas(fasttrain: RunCommand):
    short = ("total_timesteps=600", "warmup_steps=100", "eval.episodes=2", "eval_every=300", "prefetch=on")
    shared = ("num_envs=2", "workers=1", "vec_env=shared")
    done = fasttrain("+profile=balance", "env.id=CartPole-v1", "algo=dqn", *shared, *short).ok()
    files = {name: done.json(f"{name}.json") for name in SCHEMAS}
    assert files["summary"]["perf"]["workers"]["num_workers"] == 1
    assert files["summary"]["replay"]["prefetch"]["hits"] >= 0
    assert [problem for name in SCHEMAS for problem in misfits(SCHEMAS[name], files[name], name)] == []


def test_the_drop_in_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(example("skull_king").replace("100_000", "16_384"), {})
    assert (tmp_path / "skull_king.zip").is_file()


@pytest.mark.parametrize("part", ["SharedMemoryVecEnv([", "import SharedMemoryVecEnv  #", "import VectorEnv"])
def test_a_worker_example_runs_as_a_script(part: str, tmp_path: Path):
    text = example(part).replace("100_000", "64").replace("10_000", "64")
    small = text.replace('"MlpPolicy", env)', '"MlpPolicy", env, n_steps=2, batch_size=64)')
    (tmp_path / "script.py").write_text(small)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_python_example_compiles():
    for language, text in BLOCKS:
        if language == "python":
            compile(text, "example", "exec")


def test_readme_contributing_and_agents_are_short():
    assert len(README.splitlines()) <= 180
    assert len(PAGES[ROOT / "CONTRIBUTING.md"].encode()) <= 9_000
    assert len(PAGES[ROOT / "AGENTS.md"].splitlines()) <= 120


def test_links_of_the_repository_lead_somewhere():
    made = {"settings.md", "profiles.md", "benchmark_results.md", "changelog.md", "contributing.md", "security.md"}
    links = [(path, link) for path, text in PAGES.items() for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)]
    assert len(links) >= 100
    broken = [link for path, link in links if "://" not in link and not (path.parent / link).exists()]
    measured = (ROOT / "benchmarks").exists()  # a source archive has none
    assert [link for link in broken if Path(link).name not in made and (measured or "benchmarks/" not in link)] == []


def test_the_readme_of_a_package_index_has_no_link_that_is_dead_there():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = README
    for change in hook["fancy-pypi-readme"]["substitutions"]:  # as hatch-fancy-pypi-readme does
        text = re.sub(change["pattern"], change["replacement"], text)
    assert "masks (`fasttrain help masks`)" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    assert all(help_on(["help", topic]) for topic in re.findall(r"`fasttrain help ([a-z]\w*)`", text))


def test_the_flag_table_is_the_codes():
    profiles = {name: configured(f"+profile={name}") for name in ("baseline", "balance", "speed")}
    for flag in FLAGS:
        values = [str(getattr(config, flag.name)).lower() for config in profiles.values()]
        values = ["null" if value == "none" else value for value in values]
        assert f"| `{flag.name}` | {' | '.join(values)} | {flag.class_text} | {flag.text} |" in README


def test_every_command_composes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT / "examples")  # some pages are about its files
    monkeypatch.syspath_prepend(ROOT / "examples")
    shell = "\n".join(text for language, text in BLOCKS if language in ("", "sh"))
    commands = re.findall(rf"^fasttrain (?!-m|zoo |help )(?:({'|'.join(COMMANDS)}|ablate) )?(.*)$", shell, re.MULTILINE)
    assert len(commands) >= 80
    for word, text in commands:
        typed = shlex.split(text, comments=True)
        there = any(argument.startswith(("run=", "--config-dir")) for argument in typed)  # of what is there
        if word in PLAIN or there or "…" in text or "--config" in typed:
            continue
        options, typed = split_options(typed)
        command, typed = spelt_out("compare" if word == "ablate" else word or "train", typed)
        arguments = prepare(command, options, typed)[1]
        configured(*(argument for argument in arguments if not argument.startswith("hydra.")))


def test_the_five_files_of_a_transition_exist():
    house = PAGES[ROOT / "CONTRIBUTING.md"]
    files = re.findall(r"^\d\. `(src/[\w/]+\.py)`", house, flags=re.MULTILINE)
    assert len(files) == 5
    assert all((ROOT / name).is_file() for name in files)


def test_messages_of_the_errors_page_are_those_of_the_program():
    page = PAGES[ROOT / "docs" / "reference" / "errors.md"]
    texts = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    plain = re.sub(r"[\"']\s*\n\s*f?[\"']", "", texts)
    fragments = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(fragments) >= 25
    for fragment in fragments:
        for part in fragment.split("…"):
            assert part.strip(" '[]") in plain, fragment


def test_the_site_builds_without_a_warning(tmp_path: Path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "reference" / "settings.md").read_text(encoding="utf-8")
    assert all(f"| `{key}` |" in settings for key in ("num_envs", "env.masks", "gate.margin", "algo.net_arch"))
    index = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert index.count("\n- [") >= 55
