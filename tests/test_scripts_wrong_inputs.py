"""scripts/wrong_inputs.py: a sample of its cases, none of them bad; and that it finds what it looks for."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SAMPLES = {"settings": 40, "hand": 30, "processes": 6}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("wrong_inputs")


@pytest.mark.skipif(os.name == "nt", reason="closed descriptors and signals of POSIX")
@pytest.mark.parametrize("part", SAMPLES)
def test_a_sample_of_wrong_inputs_is_told_in_one_line(
    script: ModuleType, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    found = script.run(part, script.cases_of(part, 0), 1, SAMPLES[part], lambda line: None)
    assert found["cases"] == SAMPLES[part]
    assert found["bad"] == []
    assert list(tmp_path.iterdir()) == []


def test_there_are_as_many_cases_as_promised_and_every_setting_is_among_them(script: ModuleType):
    from fasttrain.spec.reading import all_keys

    cases = {part: script.cases_of(part, 0) for part in script.PARTS}
    assert len(cases["settings"]) + len(cases["hand"]) >= 1000
    assert len(cases["processes"]) >= 40
    tried = {argument.partition("=")[0] for case in cases["settings"] for argument in case.arguments}
    assert set(all_keys()) - tried <= {"profile", "tuned", "algo"}


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        ((2, "fasttrain: error: num_envs=0: must be at least 1\n"), ""),
        ((2, "loading\nfasttrain: error: num_envs=0: must be at least 1\n"), ""),
        ((2, ""), "wordless: "),
        ((2, "fasttrain: error: a number is wrong\nnum_envs\n"), "does not name num_envs: fasttrain: error: a number"),
        ((1, "fasttrain: error: num_envs=0\n"), "exit code 1, not 2: fasttrain: error: num_envs=0"),
        ((2, "Traceback (most recent call last)\nfasttrain: error: num_envs=0\n"), "traceback: fasttrain: error: num"),
        ((None, "", "hung for 60 s"), "hung for 60 s"),
    ],
)
def test_what_is_bad(script: ModuleType, ended: tuple[object, ...], wrong: str):
    case = script.Case("out of range", ("num_envs=0",), ("num_envs",))
    told = script.judged(case, script.Ended(*ended))
    assert told.startswith(wrong) if wrong else not told


def test_an_input_that_is_taken_and_one_that_hangs_are_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = ("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=1", "batch_size=8", "algo.n_steps=8")
    taken = script.Case("right", small, ("num_envs",))
    ended = script.in_this_process(taken, tmp_path / "taken", lambda: tmp_path)
    assert script.judged(taken, ended).startswith("accepted")
    monkeypatch.setattr(script, "MOST_S", 0.2)
    monkeypatch.setattr("fasttrain.cli._dispatch", lambda arguments: [None for _ in iter(int, 1)])
    ended = script.in_this_process(taken, tmp_path / "hangs", lambda: tmp_path)
    assert script.judged(taken, ended).startswith("hung for 0.2 s")


def test_results_are_stored_part_by_part_and_shown(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = {"cases": 3, "bad_count": 1, "elapsed_s": 2.0, "bad": ["x"]}
    monkeypatch.setattr(script, "run", lambda *_: found)
    monkeypatch.setattr(script, "cases_of", lambda *_: [])
    results = tmp_path / "wrong_inputs.json"
    assert script.main(["--only", "hand", "--results", str(results)]) == 1
    stored = json.loads(results.read_text(encoding="utf-8"))
    assert stored["command"] == "python3 scripts/wrong_inputs.py"
    assert stored["parts"] == {"hand": found}
    found |= {"bad": [], "bad_count": 0}
    assert script.main(["--only", "hand", "settings", "--results", str(results)]) == 0
    assert list(json.loads(results.read_text(encoding="utf-8"))["parts"]) == ["settings", "hand"]
    assert script.main(["--show", "--results", str(results)]) == 0
    assert "hand       3 cases, 0 bad, 2 s" in capsys.readouterr().out
