"""`fasttrain settings`: what it prints of the declarations, as text, JSON and a JSON schema."""

from __future__ import annotations

import json
import re

import pytest

from fasttrain import cli
from fasttrain.cli.settings import completions, main, rows
from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS
from fasttrain.spec.config import Config
from fasttrain.spec.setting import declared, settings_of

# Words of this project alone, which nobody who knows SB3, Gymnasium and Hydra has met.
DIALECT = r"\b(wall|say\b(?! )|told|lend|lends|rests?|herd|guest|kept|given|took|own\.)\b|[a-z]+; null:"


def test_every_setting_has_a_sentence():
    keys = {row.key for row in rows()}
    declared_keys = {key for key, one in settings_of(Config, parts=True) if not declared(one).hidden}
    assert {key for key in declared_keys if not key.startswith("algo.")} <= keys
    assert {f"algo.{key}" for spec in ALGORITHMS.values() for key in list(spec.keys())} <= keys
    assert [row.key for row in rows() if not re.match(r"^[A-Za-z].*\.$|^.*\)$|^.*\}\.?$|^.*\]\.$", row.text)] == []


def test_no_text_speaks_the_private_dialect():
    assert [(row.key, found[0]) for row in rows() if (found := re.search(DIALECT, row.text))] == []


def test_a_prefix_chooses(capsys: pytest.CaptureFixture[str]):
    assert main(["settings", "env.on_"]) == 0
    out = capsys.readouterr().out
    assert "env.on_empty_mask=all_legal" in out
    assert "all_legal | raise" in out
    assert "num_envs" not in out


def test_json_has_what_is_declared(capsys: pytest.CaptureFixture[str]):
    main(["settings", "--json", "num_envs"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["key"], row["default"], row["least"], row["flag_class"]) == ("num_envs", 8, 1, "trade-off")
    main(["settings", "algo.per_alpha", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["algorithms"] == ["dqn"]


def test_the_schema_describes_a_file(capsys: pytest.CaptureFixture[str]):
    main(["settings", "--schema"])
    properties = json.loads(capsys.readouterr().out)["properties"]
    assert properties["workers"]["anyOf"] == [{"enum": ["auto"]}, {"type": "integer"}]
    assert properties["env"]["properties"]["normalize"]["type"] == ["array"]
    assert properties["env"]["additionalProperties"] is False
    assert properties["nan_guard"]["enum"] == ["off", "stop", "rollback", True, False]
    assert "ppo" in properties["algo"]["properties"]["name"]["enum"]


def test_what_begins_no_key_is_refused():
    with pytest.raises(ConfigError, match="nvm_envs: no such key; did you mean 'num_envs'"):
        main(["settings", "nvm_envs"])
    with pytest.raises(ConfigError, match="expected one PREFIX"):
        main(["settings", "--yaml"])


@pytest.mark.parametrize(
    ("line", "words", "left"),
    [
        ("fasttrain com", ["compare"], "fasttrain com"),
        ("fasttrain compare gate.m", [], "fasttrain gate.m"),
        ("fasttrain compare vec_env=d", ["vec_env=dummy", "vec_env=daemons"], "fasttrain vec_env=d"),
        ("fasttrain +profile=speed lean_info=", ["lean_info=true", "lean_info=false"],
         "fasttrain +profile=speed lean_info="),
        ("fasttrain num_envs=4 ", [], "fasttrain num_envs=4 "),
    ],
)  # fmt: skip
def test_completions_are_commands_and_values(line: str, words: list[str], left: str):
    assert completions(line) == (words, left)


def test_the_shell_gets_the_keys_of_a_command_and_no_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMP_LINE", "fasttrain compare gate.m")
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["gate.margin=", "gate.metric="]
    monkeypatch.setenv("COMP_LINE", "fasttrain algo=none num")
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().err == ""
