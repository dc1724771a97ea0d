"""Where a run comes from stands in its plan.json."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fasttrain.runs.folders import git_state, provenance


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_state_of_the_users_folder(tmp_path: Path):
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


def test_without_git_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_what_was_typed_can_be_typed_again(tmp_path: Path):
    told = json.loads(json.dumps(provenance(["+profile=speed", "env.kwargs.name='a b'"], tmp_path)))
    assert told["command"].endswith(" +profile=speed 'env.kwargs.name='\"'\"'a b'\"'\"''")
    assert told["folder"] == str(tmp_path)
    assert told["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert told["machine"]["cores"] >= 1
    assert told["began"].endswith("+00:00")
