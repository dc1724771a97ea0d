from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fasttrain.runs.folders import command_line, missing_files


@pytest.mark.parametrize("name", ["outputs/2026-01-31/12-00-00_ppo_1", "my runs/it's a=b", "back\\slash (1), [2]"])
def test_a_command_line_comes_back_from_shell_and_hydra_as_it_was(name: str):
    program, command, argument = shlex.split(command_line("resume", run=Path(name)))
    assert (program, command) == ("fasttrain", "resume")
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert (override.key_or_group, override.value()) == ("run", name)


def test_plain_names_stay_plain():
    assert command_line("compare", "seeds=3", run=Path("a/b")) == "fasttrain compare seeds=3 run=a/b"


def test_what_a_command_needs_of_a_run_and_is_gone_is_named(tmp_path: Path):
    for name in ("plan.json", "summary.json", "model.zip"):
        (tmp_path / name).touch()
    assert missing_files(tmp_path, normalized=False, pooled=False, failed=()) == []
    lost = ["vecnormalize.npz (it was written, and is gone)", "model.opponents.pt (it was written, and is gone)"]
    assert missing_files(tmp_path, normalized=True, pooled=True, failed=()) == lost
    assert missing_files(tmp_path, normalized=True, pooled=False, failed={"vecnormalize.npz": "full disk"}) == []
