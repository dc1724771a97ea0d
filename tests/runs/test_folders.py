from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from fasttrain.runs.folders import command_line, git_state, missing_files, provenance, summary_in


@pytest.mark.parametrize("name", ["outputs/2026-01-31/12-00-00_ppo_1", "my runs/it's a=b", "back\\slash (1), [2]"])
def test_a_command_line_comes_back_from_shell_and_hydra_as_it_was(name: str):
    program, command, argument = shlex.split(command_line("resume", run=Path(name)))
    assert (program, command) == ("fasttrain", "resume")
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert (override.key_or_group, override.value()) == ("run", name)


def test_what_a_command_needs_of_a_run_and_is_gone_is_named(tmp_path: Path):
    assert command_line("compare", "seeds=3", run=Path("a/b")) == "fasttrain compare seeds=3 run=a/b"
    for name in ("plan.json", "summary.json", "model.zip"):
        (tmp_path / name).touch()
    assert missing_files(tmp_path, normalized=False, pooled=False, failed=()) == []
    lost = ["vecnormalize.npz (it was written, and is gone)", "model.opponents.pt (it was written, and is gone)"]
    assert missing_files(tmp_path, normalized=True, pooled=True, failed=()) == lost
    assert missing_files(tmp_path, normalized=True, pooled=False, failed={"vecnormalize.npz": "full disk"}) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_state_of_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert git_state(tmp_path) is None
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    (tmp_path / "game.py").write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = git_state(tmp_path)
    assert clean is not None
    assert (len(clean["commit"]), clean["changed"]) == (40, 0)
    (tmp_path / "game.py").write_text("x = 2\n")
    (tmp_path / "outputs").write_text("")
    assert git_state(tmp_path) == {**clean, "changed": 1}, "what is not tracked is no change"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "without git nothing is said"


def test_what_was_typed_can_be_typed_again(tmp_path: Path):
    told = json.loads(json.dumps(provenance(["+profile=speed", "env.kwargs.name='a b'"], tmp_path)))
    assert told["command"].endswith(" +profile=speed 'env.kwargs.name='\"'\"'a b'\"'\"''")
    assert told["folder"] == str(tmp_path)
    assert told["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert told["machine"]["cores"] >= 1
    assert told["began"].endswith("+00:00")


def test_an_evaluation_is_read_as_a_training_is(tmp_path: Path):
    assert summary_in(tmp_path) == {}
    (tmp_path / "eval.json").write_text('{"quality": {"greedy": {"mean_reward": 1.5}, "sampled": {}}}')
    assert summary_in(tmp_path) == {"quality": {"mean_reward": 1.5}}
    (tmp_path / "summary.json").write_text('{"status": "done"}')
    assert summary_in(tmp_path) == {"status": "done"}
