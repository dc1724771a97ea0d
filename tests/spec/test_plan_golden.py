"""Golden plans: what command lines come to, the values of the settings and where each of them comes from.

For each command line golden_plans.json holds what differs from the plan of its profile alone, and for a profile what
differs from the default job. `8 → 64` was asked for and became. Write the file again, and read the difference:

    WRITE_PLANS=1 .venv/bin/python -m pytest tests/spec/test_plan_golden.py
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

import fasttrain
from fasttrain.cli import library, main
from fasttrain.errors import ConfigError
from fasttrain.runs import resume
from fasttrain.runs import train as training
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plain import to_dict
from fasttrain.spec.plan import RunSpec, resolve
from fasttrain.spec.reading import from_mapping
from fasttrain.spec.removed import flat

GOLDEN = Path(__file__).with_name("golden_plans.json")
MINE = {
    "profile/mine": "# @package _global_\ndefaults: [/profile/speed, _self_]\nnum_envs: 3\n",
    "profile/upon": "# @package _global_\ndefaults: [speed@_global_, /profile/exact, _self_]\nenv: {frame_stack: 2}\n",
    "profile/later": "# @package _global_\nworkers: 3\n",
    "profile/sb3": "# @package _global_\nnum_workers: 2\nalgo: {batch_size: 128}\n",
    "env/small": "id: CartPole-v1\nmax_episode_steps: 50\n",
    "main": "defaults: [config, {override env: small}, {override algo: ppo}, _self_]\nnum_envs: 3\n",
}


class PlannedError(ConfigError):
    """Ends a command once its plan is there."""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The plans of all commands, as lines. Machine and env are the same everywhere."""

    def open_run(config: Config, sources: dict[str, str], *_: Any) -> Any:
        facts = EnvFacts(native=config.env.spec.native is not None, step_s=20e-6)
        record(resolve(config, sources, facts, Machine(cores=4, windows=False, cuda=False)), sources)

    def record(plan: RunSpec, sources: dict[str, str]) -> None:
        (tmp_path / "run" / "plan.json").write_text(json.dumps(plan.to_dict()))
        assert from_mapping(to_dict(plan.config)) == plan.config, "a stored run is read back as it was"
        values = {key: (json.dumps(it), sources.get(key, "")) for key, it in flat(to_dict(plan.config)).items()}
        for row in plan.rows:
            came = dict.fromkeys(map(json.dumps, (row.requested, row.effective)))
            values[row.flag] = " → ".join(came), sources.get(row.flag, row.source)
        lines.append([f"{key}: {value} ({source})".replace(" ()", "") for key, (value, source) in values.items()])
        raise PlannedError

    def changed_plan(*arguments: Any) -> RunSpec:
        record(plan := change(*arguments), {})
        return plan

    lines, change = list[list[str]](), resume.changed_plan
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name, text in MINE.items():
        (tmp_path / "mine" / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    for module in (training, library):
        monkeypatch.setattr(module, "open_run", open_run)
    monkeypatch.setattr(resume, "changed_plan", changed_plan)
    return lines


def plan(line: str) -> None:
    """Run a command line, or a call of `train`, until its plan is there."""
    with pytest.MonkeyPatch.context() as environment:
        if line.startswith("train("):
            with pytest.raises(PlannedError):
                eval(line, {"train": fasttrain.train})
            return
        words = shlex.split(line)
        while words and words[0].partition("=")[0].isupper():
            environment.setenv(*words.pop(0).split("=", 1))
        assert main([*words, "hydra.run.dir=out", "hydra.output_subdir=null"]) == ConfigError.exit_code


def test_every_command_line_has_its_plan(planned: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    golden, plans = json.loads(GOLDEN.read_text(encoding="utf-8")), dict[str, list[str]]()
    for line in golden:
        plan(line)
        assert len(planned) == len(plans) + 1, (line, capsys.readouterr().err)
        plans[line] = planned[-1]
    found = {}
    for line, told in plans.items():
        base = next((word for word in line.split() if word != line and word in golden), "")
        found[line] = [text for text in told if not line or text not in plans[base]]
    if os.environ.get("WRITE_PLANS"):
        GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        golden = found
    for line in golden:
        assert found[line] == golden[line], line
