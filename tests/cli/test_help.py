"""`fasttrain help COMMAND`: a command's own settings, with what is declared of them."""

from __future__ import annotations

import pytest

from fasttrain.cli import main


@pytest.mark.parametrize(
    ("typed", "holds", "lacks"),
    [
        (
            ["help", "compare"],
            ["candidates=null", "gate.metric=auto", "fasttrain help train"],
            ["\n  num_envs=", "format"],
        ),
        (["compare", "--help"], ["candidates=null"], ["\n  num_envs="]),
        (["help", "ablate"], ["candidates=null"], ["\n  num_envs="]),
        (["ablate", "--help"], ["candidates=null"], ["\n  num_envs="]),
        (["help", "eval"], ["  run=null", "  eval.episodes"], ["\n  num_envs=", "candidates"]),
        (["help", "resume"], ["  log_every=10", "  stop.patience"], ["\n  num_envs=", "\n  seed="]),
        (["help", "watch"], ["fasttrain watch [FOLDER …]"], ["\n  num_envs="]),
        (
            ["help", "train"],
            [
                "  daemons.timeouts_s.game=3600",
                "(off | stop | rollback; class exact)",
                "(gymnasium | vector | daemons | envpool | pettingzoo)",
                "  algo.net_arch",
                "warmup=off",
            ],
            ["tier", "candidates", "  algo.name"],
        ),
    ],
)
def test_a_command_tells_its_settings(
    capsys: pytest.CaptureFixture[str], typed: list[str], holds: list[str], lacks: list[str]
):
    assert main(typed) == 0
    told = capsys.readouterr().out
    assert [text for text in holds if text not in told] == [text for text in lacks if text in told] == []


def test_a_command_that_is_none_is_wrong_input(capsys: pytest.CaptureFixture[str]):
    assert main(["help", "compar"]) == 2
    assert "did you mean 'compare'" in capsys.readouterr().err
    assert main(["abalte"]) == 2
    assert "did you mean 'ablate'" in capsys.readouterr().err
    assert main(["+profile=speed", "ablate"]) == 2
    assert "ablate: the command comes before its settings" in capsys.readouterr().err
