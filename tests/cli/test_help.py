from __future__ import annotations

import pytest

from fasttrain.cli import main


@pytest.mark.parametrize(
    ("typed", "holds", "lacks"),
    [
        (["help", "compare"], ["candidates=null", "gate.metric=auto", "fasttrain help train"], ["\n  num_envs="]),
        (["ablate", "--help"], ["candidates=null"], ["\n  num_envs="]),
        (["help", "eval"], ["  run=null", "  eval.episodes"], ["\n  num_envs=", "candidates"]),
        (["help", "resume"], ["  log_every=10", "  stop.patience"], ["\n  num_envs=", "\n  seed="]),
        (["help", "watch"], ["fasttrain watch [FOLDER …]"], ["\n  num_envs="]),
        (["help", "train"], ["  daemons.timeouts_s.game=3600", "(off | stop | rollback; class exact)", "warmup=off",
          "  algo.net_arch"], ["tier", "candidates", "  algo.name"]),
    ],
)  # fmt: skip
def test_it_tells_its_settings(
    capsys: pytest.CaptureFixture[str], typed: list[str], holds: list[str], lacks: list[str]
):
    assert main(typed) == 0
    told = capsys.readouterr().out
    assert [text for text in holds if text not in told] == [text for text in lacks if text in told] == []


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["help", "compar"], "did you mean 'compare'"),
        (["abalte"], "did you mean 'ablate'"),
        (["+profile=speed", "ablate"], "ablate: the command comes before its settings"),
    ],
)
def test_a_command_that_is_none_is_wrong_input(capsys: pytest.CaptureFixture[str], typed: list[str], told: str):
    assert main(typed) == 2
    assert told in capsys.readouterr().err
