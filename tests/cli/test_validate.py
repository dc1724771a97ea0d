"""`fasttrain check --config FILE`: every error of a file of settings, with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain.cli import main as command
from fasttrain.cli.validate import main, problems
from fasttrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WRONG = """profile: speed
algo: ppo
nvm_envs: 3
env:
  id: CartPole-v1
  mask: x
vec_env: sharedd
algo.n_epochs: many
warmup_steps: 5
"""


def test_all_errors_of_a_file_are_named_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text(WRONG)
    assert command(["check", "--config", "wrong.yaml", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [(one["key"], one["place"]) for one in found] == [
        ("nvm_envs", "wrong.yaml:3"),
        ("env.mask", "wrong.yaml:6"),
        ("vec_env", "wrong.yaml:7"),
        ("algo.n_epochs", "wrong.yaml:8"),
        ("warmup_steps", "wrong.yaml:9"),
    ]
    assert found[2]["suggestion"] == "did you mean 'shared'?"


@pytest.mark.parametrize("name", ["profile/speed", "profile/exact", "tuned/lunarlander"])
def test_shipped_files_have_none(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", f"--config={ROOT / 'conf' / name}.yaml"]) == 0
    assert "no errors" in capsys.readouterr().out


def test_values_that_contradict_each_other_are_one_error(tmp_path: Path):
    file = tmp_path / "two.yaml"
    file.write_text("algo: ppo\nenv.id: CartPole-v1\nengine: fast\neval_every: 100\neval.episodes: 0\nseed: -1\n")
    assert [one.key for one in problems(file)] == ["seed"]


def test_what_is_no_file_of_settings(tmp_path: Path):
    file = tmp_path / "odd.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        problems(file)
    file.write_text("- a\n")
    with pytest.raises(ConfigError, match="has no keys"):
        problems(file)
    file.write_text("a: [1\n")
    assert "expected ',' or ']'" in problems(file)[0].reason
    file.write_text("num_envs: ${oc.env:N}\nseed: 1\nseed: 2\n")
    assert [(one.place, one.reason) for one in problems(file)] == [(f"{file}:3", "seed is set twice")]
