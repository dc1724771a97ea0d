"""scripts/faults.py and its table: what is stored, counted and shown. Nothing is killed here."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("faults")


@pytest.fixture
def rendering_faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("rendering_faults")


def only(faults: ModuleType, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    made = {name: faults.Part(3, 1, name, run) for name, run in parts.items()}
    monkeypatch.setattr(faults, "PARTS", made)


def test_parts_are_stored_one_by_one_and_not_tried_again(
    faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    tried: list[tuple[str, int, int]] = []

    def part(count: int, seed: int, folder: Path, say: Any) -> dict[str, Any]:
        tried.append((folder.name, count, seed))
        say("half way")
        if len(tried) == 2:
            raise KeyboardInterrupt
        return {"tries": count, "bad": []}

    only(faults, monkeypatch, a=part, b=part)
    command = ["--results", str(tmp_path / "faults.json")]
    assert faults.main([*command, "--only", "a", "b"]) == 130
    assert "b begins again" in capsys.readouterr().out
    assert faults.main([*command, "--only", "a", "b"]) == 0
    assert tried == [("a", 3, 0), ("b", 3, 0), ("b", 3, 0)]
    stored = json.loads((tmp_path / "faults.json").read_text(encoding="utf-8"))
    assert stored["command"] == "python3 scripts/faults.py"
    assert stored["machine"]
    assert [part["count"] for part in stored["parts"].values()] == [3, 3]
    faults.main([*command, "--only", "a", "--count", "5", "--seed", "2"])
    faults.main([*command, "--only", "a", "--count", "5", "--seed", "2", "--again"])
    assert tried[3:] == [("a", 5, 2), ("a", 5, 2)]
    faults.main([*command, "--show"])
    assert len(tried) == 5


def test_a_broken_promise_is_stored_without_paths_and_fails(
    faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def part(count: int, seed: int, folder: Path, say: Any) -> dict[str, Any]:
        return {"bad": [f"{folder}/run/x.zip is gone; /home/me/y too; 3/4 of step_1/state.json"]}

    only(faults, monkeypatch, a=part)
    assert faults.main(["--results", str(tmp_path / "faults.json"), "--only", "a"]) == 1
    text = faults.load(tmp_path / "faults.json")["parts"]["a"]["bad"]
    assert text == ["run/x.zip is gone; … too; 3/4 of step_1/state.json"]
    assert not faults.is_done(faults.load(tmp_path / "faults.json")["parts"]["a"], 3, 0), "it is tried again"


def test_a_part_of_which_nothing_could_be_tried_is_not_stored(
    faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    only(faults, monkeypatch, full=lambda *_: {"points": 0, "bad": []})
    assert faults.main(["--results", str(tmp_path / "faults.json"), "--only", "full"]) == 1
    assert "full: nothing could be tried here; not stored" in capsys.readouterr().out
    assert faults.load(tmp_path / "faults.json") == {}


@pytest.mark.parametrize(("high", "bad"), [(0.989, 1), (0.99, 0)])
def test_guards_that_surely_cost_more_than_a_percent_are_a_broken_promise(
    faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, high: float, bad: int
):
    bench_guards = importlib.import_module("bench_guards")
    ratio = {"value": 0.98, "low": 0.97, "high": high}
    works = iter(
        [{"ratio": ratio, "checkpoint_s": 0.25}]
        + 2 * [{"ratio": {**ratio, "value": 1.0, "high": 1.1}, "checkpoint_s": 0.0}]
    )
    monkeypatch.setattr(bench_guards, "_one", lambda *_: next(works))
    found = bench_guards.measure(10, 0, tmp_path, print)
    assert (found["ratio"], found["checkpoint_s"], len(found["bad"])) == (ratio, 0.25, bad)


def test_a_checkpoint_never_gives_time_back(faults: ModuleType):
    found = importlib.import_module("bench_guards").judged([(1.0, 1.0)] * 9, [-0.5, -0.1, 0.2], 0)
    assert found["checkpoint_s"] == 0.0
    assert found["ratio"] == found["nan_guard"]


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--count", "0"]])
def test_wrong_arguments_are_refused(faults: ModuleType, arguments: list[str]):
    with pytest.raises(SystemExit) as refused:
        faults.main(arguments)
    assert refused.value.code == 2


def test_cases_of_not_finite_numbers_are_counted_by_place(faults: ModuleType):
    names = [
        "test_bad_data_is_named_before_anything_uses_it[observation-nan-eager-ppo]",
        "test_bad_data_is_named_before_anything_uses_it[reward-inf-fused-maskable_ppo]",
        "test_a_bad_weight_is_named_when_it_acts[nan-eager-dqn]",
        "test_a_gradient_that_overflows_is_named[eager-dqn]",
        "test_something_else[reward-ppo]",
    ]
    cases = [ElementTree.Element("testcase", name=name) for name in names]
    ElementTree.SubElement(cases[3], "failure")
    found = faults.by_place(cases)
    assert (found["cases"], found["passed"], found["bad"]) == (4, 3, [names[3]])
    assert found["places"]["observation"] == {"ppo": {"cases": 1, "passed": 1}}
    assert found["places"]["reward"] == {"maskable_ppo": {"cases": 1, "passed": 1}}
    assert found["places"]["gradient"] == {"dqn": {"cases": 1, "passed": 0}}


def test_every_place_is_one_of_a_test_that_there_is(faults: ModuleType):
    text = (faults.TESTS / "faults" / "test_nan.py").read_text(encoding="utf-8")
    for test in faults.PLACES:
        assert f"def {test.partition('[')[0]}(" in text


def test_malicious_files_are_judged_by_what_they_did(faults: ModuleType):
    row = {"name": "a", "command": "eval", "exit_code": 2, "executed": False, "outside": [], "growth_mb": 3.21,
           "said": "no", "expected": 2}  # fmt: skip
    found = faults.judged([row, {**row, "executed": True}, {**row, "exit_code": 1, "outside": ["x"], "growth_mb": 9}])
    assert (found["files"], found["as_expected"], found["executed"], found["outside"]) == (3, 1, 1, 1)
    assert found["growth_mb"] == 9
    assert len(found["bad"]) == 2
    assert len(faults.judged([row, {**row, "growth_mb": 101.0}])["bad"]) == 1


PARTS: dict[str, dict[str, Any]] = {
    "kills": {"kills": 200, "resumes": 200, "while_writing": 120, "partial": 0,
              "lost": {"waiting": 0.97, "beside": 1.4}, "equal": 9, "runs": 9},
    "stops": {"stops": 3, "saved": 3, "seconds": [0.5, 0.25, 1.75]},
    "cold-cache": {"cases": 8, "right": 8, "warm": 6, "said_once": 2, "kinds": {"unwritable": 2}},
    "guards": {"pairs": 10, "ratio": {"value": 0.996, "low": 0.991, "high": 1.001}},
}  # fmt: skip


def test_the_table_has_a_row_for_each_part_that_is_stored(rendering_faults: ModuleType):
    found = {"machine": "2 cores, x86_64", "parts": PARTS}
    text = rendering_faults.faults(lambda name: found)
    assert "On 2 cores:" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 4
    assert "120 of them while one was being written | 200 | 200 resumed from a whole checkpoint, 0 partial" in rows[0]
    assert "; lost were at most 0.97" in rows[0]
    assert "| 3 | 3 with a checkpoint and exit code 4, after 0.5 s (median), at most 1.8 s |" in rows[1]
    assert "| 8 | 8 right results; the next run compiled nothing in 6 of 6; one line said 2 of 2 times" in rows[2]
    assert "| 10 | cost 0.4 % of the steps per second [-0.1, 0.9] |" in rows[3]


def test_every_part_has_a_row(faults: ModuleType, rendering_faults: ModuleType):
    assert faults.PARTS.keys() | {"guards"} == rendering_faults.ROWS.keys()
