from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from conftest import RunCommand, composed
from fasttrain.cli.commands import (
    COMMANDS,
    OWNERS,
    command_of,
    implementation,
    prepare,
    quoted,
    refuse_foreign_keys,
    repeated_settings,
)
from fasttrain.errors import ConfigError
from fasttrain.spec.reading import all_keys


def test_the_collector_sleeps_only_until_the_command_is_loaded():
    gc.disable()
    try:
        implementation("train")
        assert gc.isenabled()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.enable()


def test_a_misspelt_command_names_the_right_one_and_owned_keys_exist():
    assert command_of("compare") == ("compare", [])
    assert command_of("ablate") == ("compare", ["candidates=ablate"])
    assert command_of("warmup") == ("train", ["warmup=only"])
    with pytest.raises(ConfigError, match="unknown command 'compair'; did you mean 'compare'"):
        command_of("compair")
    keys = all_keys()
    for owned, owner in OWNERS.items():
        assert any(key.startswith(owned) if owned.endswith(".") else key == owned for key in keys), owned
        assert set(owner.commands) <= set(COMMANDS)


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_key_of_another_command_is_refused_with_its_value(command: str):
    with pytest.raises(ConfigError, match=f"^gate.margin=2 has no effect with {command}; to judge candidates: "):
        refuse_foreign_keys(command, ["num_envs", "gate.margin"], ["num_envs=3", "gate.margin=1", "gate.margin=2"])
    refuse_foreign_keys("compare", ["num_envs", "gate.margin"], ["num_envs=3", "gate.margin=1"])


def test_candidates_reach_the_study_as_text():
    for value in ("[baseline,speed]", "[{name: it's, overrides: [num_envs=8, env.kwargs.opponents=[hard,easy]]}]",
                  r"[{name: b, overrides: ['run=C:\a']}]"):  # fmt: skip
        assert composed(quoted(f"candidates={value}"))["candidates"] == value
    assert quoted("candidates='[a]'") == "candidates='[a]'"


def test_a_study_has_a_folder_of_its_own_or_the_one_named():
    fresh, *rest = prepare("tune", [], ["+profile=speed"])[1]
    assert fresh.startswith("hydra.run.dir='studies/${now:%Y-%m-%d}/")
    assert "_tune_" in fresh
    assert rest == ["+profile=speed"]
    assert prepare("tune", [], ["+profile=speed", "run=my study"])[1][0] == "hydra.run.dir='my study'"


def test_a_study_named_alone_goes_on_with_its_own_arguments(tmp_path: Path):
    begun = {"command": "compare", "arguments": ["candidates=[baseline,speed]", "seeds=3"]}
    (tmp_path / "study.json").write_text(json.dumps(begun))
    study = f"run={tmp_path}"
    assert prepare("compare", [], [study])[1][1:] == ["candidates='[baseline,speed]'", "seeds=3", study]
    assert prepare("compare", [], ["seeds=9", study])[1][1:] == ["candidates='[baseline,speed]'", "seeds=9", study]
    with pytest.raises(ConfigError, match=f"is a study of compare: fasttrain compare {study}"):
        prepare("tune", [], [study])
    with pytest.raises(ConfigError, match=f"is a study of compare: fasttrain compare {study}"):
        prepare("compare", [], ["candidates=ablate", study])
    (tmp_path / "study.json").write_text(json.dumps({"command": "ablate", "arguments": ["+profile=speed"]}))
    assert prepare("compare", [], [study])[1][1:] == ["candidates='ablate'", "+profile=speed", study]
    with pytest.raises(ConfigError, match=f"is a study of ablate: fasttrain ablate {study}"):
        prepare("compare", [], ["candidates=[baseline,speed]", study])
    with pytest.raises(ConfigError, match="no study.json there"):
        prepare("compare", [], [f"run={tmp_path / 'none'}", "seeds=9", "sweep.max_parallel=2"])
    (tmp_path / "study.json").write_text('{"command": "compare", "arguments": 5}')
    with pytest.raises(ConfigError, match="its study.json is not of fasttrain"):
        prepare("compare", [], [study])


def test_a_space_that_is_typed_twice_is_refused():
    twice = ["tune.space={algo.gamma: [0.9, 0.99]}", "tune.space={algo.n_epochs: [2, 4]}"]
    with pytest.raises(ConfigError, match="tune.space is given 2 times; remove one"):
        prepare("tune", [], twice)


def test_a_setting_that_is_typed_again_counts_as_typed_last_and_a_line_says_so():
    assert repeated_settings(["algo.gamma=0.9", "seed=1", "+algo.gamma=0.8", "seed=1"]) == [
        "algo.gamma=0.9 has no effect: algo.gamma=0.8 was typed after it"
    ]
    assert repeated_settings(["env.kwargs={a: 1}", "env.kwargs={b: 2}", "++env.kwargs.c=1"]) == [], "all of them count"
    assert repeated_settings(["~env.kwargs.a", "+env.kwargs.a=3"]) == []


def test_what_is_no_single_run_cannot_be_swept(fasttrain: RunCommand):
    fasttrain("play", "-m", "num_envs=1,2").refused("-m sweeps over trainings; play cannot be swept\n")


def test_options_of_a_command():
    for typed in (["--test", "env"], ["--test=env"]):
        assert prepare("doctor", typed, ["+profile=speed"]) == ([], ["+profile=speed", "doctor.test=env"])
    for command in ("eval", "play", "export"):
        assert "trust=true" in prepare(command, ["--trust"], ["run=x"])[1]
    with pytest.raises(ConfigError, match="--trust has no effect with resume; eval, play, export load models"):
        prepare("resume", ["--trust"], ["run=x"])
