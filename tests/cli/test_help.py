from __future__ import annotations

import pytest

from fasttrain.cli import main
from fasttrain.cli.commands import COMMANDS, OTHER_WORDS


@pytest.mark.parametrize(
    ("typed", "holds", "lacks"),
    [
        (["help", "compare"], ["candidates=null", "gate.metric=auto", "fasttrain help train"], ["\n  num_envs="]),
        (["ablate", "--help"], ["candidates=null"], ["\n  num_envs="]),
        (["help", "eval"], ["  run=null", "  eval.episodes"], ["\n  num_envs=", "candidates"]),
        (["help", "resume"], ["  log_every=10", "  stop.patience"], ["\n  num_envs=", "\n  seed="]),
        (["help", "watch"], ["fasttrain watch: a live table", "\n  fasttrain watch"], ["\n  num_envs="]),
        (["train", "-h"], ["\n  num_envs=8\n", "  algo.gae_lambda=0.95"], ["candidates"]),
        (["warmup", "--help"], ["\n  fasttrain train warmup=only +profile=speed\n"], ["\n  num_envs="]),
        (["help", "masks"], ["Action masks\n", "`True` or 1 is legal", "\n  fasttrain +profile=speed env.entry_point=",
          "DQN with masks", "guides/masks.md"], ["```", "](", "algo=dqn total"]),
        (["help", "Engines"], ["External engines\n"], []),
        (["help", "env"], ["fasttrain help own_env ", "fasttrain help slow_envs "], []),
        (["sweep", "--help"], ["Sweeps\n"], []),
        (["help", "balance"], ["| batch_size", "| 64 → 320 "], []),
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
        (["help", "compar"], "help compar: no command, profile or topic; did you mean 'compare'"),
        (["maks", "--help"], "did you mean 'masks'"),
        (["abalte"], "did you mean 'ablate'"),
        (["+profile=speed", "ablate"], "ablate: the command comes before its settings"),
    ],
)
def test_a_command_that_is_none_is_wrong_input(capsys: pytest.CaptureFixture[str], typed: list[str], told: str):
    assert main(typed) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [*COMMANDS, *OTHER_WORDS])
def test_each_command_has_an_example(capsys: pytest.CaptureFixture[str], command: str):
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"fasttrain {command}")
    assert f"\n  fasttrain {'+' if command == 'train' else ' '.join(OTHER_WORDS.get(command, [command]))}" in told
    assert ".md" in told
