"""scripts/reproduce.py: the README says what is stored, and its renderers say what they are given. Measures nothing."""

from __future__ import annotations

import datetime
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
ABSOLUTE = re.compile(r"""(?:^|[\s"'=(])(?:/[A-Za-z]\w*/?\w|[A-Z]:\\)""", flags=re.MULTILINE)  # a path of some machine


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("reproduce", monkeypatch)


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("rendering", monkeypatch)


def entry(reproduce: ModuleType, name: str, text: str = "new", files: tuple[str, ...] = ()) -> Any:
    return reproduce.Entry(name, files, (f"python3 scripts/{name}.py",), 2, lambda load: text)


# --- the README


def test_the_readme_says_what_is_stored(reproduce: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["--check"]) == 0, capsys.readouterr().out


def test_every_block_of_the_readme_has_an_entry_and_every_entry_a_block(reproduce: ModuleType) -> None:
    names = [name for name, _ in reproduce.BLOCK.findall(reproduce.read_pages())]
    assert sorted(names) == sorted(entry.name for entry in reproduce.ENTRIES)


def test_every_command_of_an_entry_is_a_script_that_takes_it(reproduce: ModuleType) -> None:
    for found in reproduce.ENTRIES:
        for command in found.commands:
            python, script, *_ = command.split()
            assert python == "python3"
            assert (ROOT / script).is_file(), command
    benchmark, captures = importlib.import_module("benchmark"), importlib.import_module("captures")
    commands = [command.split()[1:] for found in reproduce.ENTRIES for command in found.commands]
    for script, *arguments in commands:
        if script == "scripts/benchmark.py":
            assert arguments[0] in ("plot", "limits", "start", "auto") or benchmark.works_of(arguments[0]), arguments
        if script == "scripts/captures.py":
            assert set(arguments) <= captures.CAPTURES.keys()


def test_stored_works_are_those_that_the_commands_measure(reproduce: ModuleType, rendering: ModuleType) -> None:
    benchmark = importlib.import_module("benchmark")
    (speed,) = [found for found in reproduce.ENTRIES if found.name == "speed"]
    measured = {work for command in speed.commands for work in benchmark.works_of(command.split()[2])}
    assert set(rendering.speed_works()) <= measured <= benchmark.WORKS.keys()


def test_stored_results_say_where_and_when_but_no_path(reproduce: ModuleType) -> None:
    assert ABSOLUTE.search('"/opt/x"')
    assert ABSOLUTE.search("--results /opt/x")
    for path in sorted(reproduce.RESULTS.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        assert "cores" in found["machine"], path.name
        assert found["versions"]["torch"], path.name
        assert datetime.date.fromisoformat(found["measured"]), path.name
        assert found["command"].startswith("python3 scripts/"), path.name
        assert not ABSOLUTE.search(text), path.name


# --- blocks


def readme(*names: str, more: str = "") -> str:
    blocks = [f"<!-- results: {name} -->\nold\n<!-- end -->" for name in names]
    return "\n\n".join(["Before.", *blocks, f"After.{more}"])


def test_blocks_are_filled_and_the_rest_is_left_alone(reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "ENTRIES", (entry(reproduce, "a"), entry(reproduce, "b-2")))
    filled = reproduce.filled(readme("a", "b-2"), {"b-2": "one\n\\1 two"})
    kept, written = "<!-- results: a -->\nold\n<!-- end -->", "<!-- results: b-2 -->\none\n\\1 two\n<!-- end -->"
    assert filled == f"Before.\n\n{kept}\n\n{written}\n\nAfter."
    assert reproduce.filled(filled, {"b-2": "one\n\\1 two"}) == filled
    empty = "<!-- results: a -->\n<!-- end -->"
    assert reproduce.filled(empty, {"a": "text"}) == "<!-- results: a -->\ntext\n<!-- end -->"


@pytest.mark.parametrize(
    ("names", "told"),
    [((), "0 blocks <!-- results: a -->"), (("a", "a"), "2 blocks"), (("a", "c"), "no entry makes c")],
)
def test_missing_double_and_foreign_blocks_are_told(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr(reproduce, "ENTRIES", (entry(reproduce, "a"),))
    with pytest.raises(SystemExit, match=told):
        reproduce.filled(readme(*names), {"a": "new"})


def test_what_differs_is_a_problem(reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "ENTRIES", (entry(reproduce, "a"),))
    assert reproduce.problems(readme("a"), {"a": "old"}) == []
    assert reproduce.problems(readme("a"), {"a": "new"}) == ["--- pages", "+++ stored", "-old", "+new"]


@pytest.mark.parametrize(
    "line",
    ["trains at 120,000 steps/s", "is 3.2× as fast", "it wins 72 % of its games", "in nine or 9 minutes on 2 cores",
     "win rate near 60 %"],
)  # fmt: skip
def test_measured_figures_outside_of_blocks_are_a_problem(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(reproduce, "ENTRIES", (entry(reproduce, "a"),))
    assert reproduce.problems(readme("a", more=f"\n{line}"), {"a": "old"}) == [f"measured, but in no block: {line}"]


# --- the command


@pytest.fixture
def small(reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Two entries, the second without data, each on a page of its own in `tmp_path`."""
    entries = (entry(reproduce, "a", "new", ("a.json",)), entry(reproduce, "b", "newer", ("b.json", "b.png")))
    monkeypatch.setattr(reproduce, "ENTRIES", entries)
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    pages = (tmp_path / "README.md", tmp_path / "b.md")
    monkeypatch.setattr(reproduce, "PAGES", pages)
    for page, name in zip(pages, "ab", strict=True):
        page.write_text(readme(name))
    (tmp_path / "a.json").write_text(json.dumps({"measured": "2026-01-01"}))
    return reproduce


def test_list_says_time_and_age(small: ModuleType, tmp_path: Path) -> None:
    lines = small.listing(small.ENTRIES, tmp_path, datetime.date(2026, 1, 4))
    assert lines[0].split("  ")[0] == "a"
    assert "2 min   measured 3 days ago" in lines[0]
    assert "python3 scripts/a.py" in lines[0]
    assert "2 of 2 files missing" in lines[1]


def test_age_is_asked_of_git_where_the_file_does_not_say(reproduce: ModuleType, tmp_path: Path) -> None:
    day = {"GIT_AUTHOR_DATE": "2026-01-01T12:00:00", "GIT_COMMITTER_DATE": "2026-01-01T12:00:00"}
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "x.png").write_bytes(b"1")
    assert reproduce.age_days(tmp_path / "missing.png", datetime.date(2026, 1, 3)) is None
    for command in (["init", "-q"], ["add", "x.png"], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, env={"PATH": "/usr/bin:/bin", "HOME": "/", **day})
    assert reproduce.age_days(tmp_path / "x.png", datetime.date(2026, 1, 3)) == 2


def test_write_then_check(small: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main(["--check", "--only", "a"]) == 1
    assert "+new" in capsys.readouterr().out
    assert small.main(["--write", "--only", "a"]) == 0
    assert small.main(["--check", "--only", "a"]) == 0
    first, second = (page.read_text(encoding="utf-8") for page in small.PAGES)
    assert (first.count("new"), second.count("new")) == (1, 0)
    with pytest.raises(SystemExit, match=r"b: b.json, b.png not in .*; run --only b"):
        small.main(["--write"])


def test_every_command_runs_once(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0 if len(ran) < 3 else 7)

    monkeypatch.setattr(subprocess, "run", run)
    first = small.ENTRIES[0]
    small.run([first, first._replace(name="again"), small.ENTRIES[1]])
    assert ran == [[sys.executable, "scripts/a.py"], [sys.executable, "scripts/b.py"]]
    with pytest.raises(SystemExit, match=r"python3 scripts/a.py: exit code 7"):
        small.run([first])


def test_data_of_another_form_are_told(small: ModuleType, tmp_path: Path) -> None:
    broken = small.Entry("a", ("a.json",), ("python3 scripts/a.py",), 1, lambda load: load("a")["figures"])
    with pytest.raises(SystemExit, match="a: its data cannot be rendered: KeyError"):
        small.rendered([broken], tmp_path)


# --- renderers


@pytest.mark.parametrize(
    ("value", "text"),
    [(154_194.7, "154,000"), (8.906, "8.91"), (0.97, "0.97"), (338.2, "338"), (1_116_812, "1,120,000")],
)
def test_rounded(rendering: ModuleType, value: float, text: str) -> None:
    assert rendering.rounded(value) == text


def work(**more: Any) -> dict[str, Any]:
    spread = {"median": 100.0, "min": 90.0, "max": 110.0}
    ratios = {
        "slow": {"median": 10.0, "min": 9.0, "max": 11.0},
        "fast": {"median": 2.0, "min": 1.5, "max": 2.5},
    }
    theirs = {"slow": {**spread, "median": 10.0}, "fast": {**spread, "median": 50.0}}
    command = "python3 scripts/benchmark.py x --repeats 3"
    return {"command": command, "ours": spread, "theirs": theirs, "ratio": ratios["fast"], "ratios": ratios, **more}


def test_a_row_of_speed(rendering: ModuleType) -> None:
    row = rendering._speed_row(rendering.Work("x", "a work"), work(unit="rounds of sample and update per second"))
    assert row == ["a work", "100 rounds/s", "50 (fast), 10 (slow)", "**2×** [1.5, 2.5]", "3"]
    row = rendering._speed_row(rendering.Work("x", "a work", against="slow"), work())
    assert row == ["a work", "100 steps/s", "10 (slow)", "**10×** [9, 11]", "3"]
    once = work(command="python3 scripts/benchmark.py x --repeats 1", share_of_ideal={"median": 0.89})
    row = rendering._speed_row(rendering.Work("x", "a work"), once)
    assert (row[0], row[3]) == ("a work: 89 % of cores ÷ env time", "**2×**")
    many = {f"other {n}": {"median": float(n), "min": 1.0, "max": 1.0} for n in range(1, 8)}
    assert rendering._speed_row(rendering.Work("x", "a work"), work(theirs=many))[2] == (
        "7 (other 7), 6 (other 6), 5 (other 5), 4 slower"
    )


def cells(side: str, learning: ModuleType, task: str, rewards: list[float], **more: Any) -> list[dict[str, Any]]:
    overrides = learning.overrides_of(learning.TASKS[task], side)
    return [
        {
            "seed": seed, "side": side, "overrides": overrides, "cpu_share": 1.0, "curve": [reward],
            "curve_of": "return", "final": {"mean_reward": reward, "win_rate": None},
            "sampled": {"mean_reward": reward, "win_rate": None},
            "trail": [[1000, 2.5, 10.0], [2000 + seed, 5.0, reward]], **more,
        }
        for seed, reward in enumerate(rewards)
    ]  # fmt: skip


def test_a_row_of_learning(rendering: ModuleType) -> None:
    learning = rendering.learning
    stock = cells("baseline", learning, "cartpole", [400.0 + seed for seed in range(10)])
    ours = cells("speed", learning, "cartpole", [450.0 + seed for seed in range(10)])
    other = cells("speed", learning, "cartpole", [1.0] * 10, overrides=["another"])
    found = {"cells": [*stock, *ours, *other]}
    sides = [rendering.cells_of(lambda name: found, "cartpole", side) for side in ("baseline", "speed")]
    assert rendering._learning_row("cartpole", "CartPole", *sides) == [
        "CartPole", "100,000", "10", "404.5", "454.5", "+50 [+50, +50]", "pass", "2,000 → 2,000 (195)", "5 → 5",
    ]  # fmt: skip
    assert rendering._open_note("CartPole", "cartpole", *sides) == []


def test_an_open_gate_gets_a_note_and_added_seeds_are_said(rendering: ModuleType) -> None:
    learning = rendering.learning

    def by_seed(side: str, rewards: list[float], task: str) -> dict[int, dict[str, Any]]:
        return {cell["seed"]: cell for cell in cells(side, learning, task, rewards)}

    stock = by_seed("baseline", [100.0] * 16, "dqn-cartpole")
    ours = by_seed("speed", [40.0, 160.0] * 5 + [180.0] * 6, "dqn-cartpole")
    (note,) = rendering._stopping_note("CartPole", "dqn-cartpole", stock, ours)
    assert note.startswith("On CartPole ten seeds were not enough (+0 [-45, +45]); it was stopped at 16.")
    early = {seed: ours[seed] for seed in range(10)}
    assert rendering._stopping_note("CartPole", "dqn-cartpole", stock, early) == []
    (note,) = rendering._open_note("CartPole", "cartpole", {s: stock[s] for s in early}, early)
    assert "scatters too much for 10 seeds" in note
    assert "sampled play by +0 [-45, +45]" in note


def test_settings_show_ratios_and_the_spread_of_seeds(rendering: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module("bench_settings", monkeypatch)
    samples = {
        "stock": [{"steps_per_s": 10.0, "win_rate": 0.4, "updates_per_step": 0.16},
                  {"steps_per_s": 5.0, "win_rate": 0.5, "updates_per_step": 0.16}],
        "speed": [{"steps_per_s": 60.0, "win_rate": 0.45, "updates_per_step": 0.004},
                  {"steps_per_s": 40.0, "win_rate": 0.47, "updates_per_step": 0.004}],
    }  # fmt: skip
    rows = bench.table(samples)
    assert rows["speed"]["ratio"] == {"median": 7.0, "min": 6.0, "max": 8.0}
    found = {"rows": rows, "env_steps": 1000, "turns": 2, "episodes": 2000, "command": "python3 scripts/x.py"}
    text = rendering.faster_settings(lambda name: found)
    assert "| `speed` | 50 | 7.0× [6.0, 8.0] | 46.0 % [45.0, 47.0] | 0.004 |" in text
    assert (
        "| stock (minibatch 64, 10 epochs, learning rate 3e-4, 12 envs) | 7.5 | | 45.0 % [40.0, 50.0] | 0.160 |" in text
    )


# --- captures


def test_parts_of_what_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = module("captures", monkeypatch)
    lines = ["Plan", "[PERF] 1", "a", "", "Quality", "", "everything is in x", "more"]
    assert captures.between(lines, "[PERF] ", "everything is in") == ["[PERF] 1", "a", "", "Quality"]
    assert captures.between(lines, "Quality", "no such line") == ["Quality", "", "everything is in x", "more"]


def test_the_spoiled_example_is_the_readmes_with_a_mask_too_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    captures = module("captures", monkeypatch)
    ran: list[tuple[str, ...]] = []

    def fasttrain(folder: Path, *arguments: str) -> list[str]:
        ran.append(arguments)
        return ["Plan", "Checkup of x", "step 1 µs", "written to nowhere"]

    monkeypatch.setattr(captures, "fasttrain", fasttrain)
    assert captures.checkup(tmp_path) == {"lines": ["Checkup of x", "step 1 µs"]}
    scope: dict[str, Any] = {}
    exec((tmp_path / "collect.py").read_text(encoding="utf-8"), scope)
    env = scope["Collect"](3)
    env.reset(seed=0)
    env.step(1)
    assert env.action_masks().tolist() == [True, True, True]
    env.step(0)
    assert env.action_masks().tolist() == [True, False, True]


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = module("bench_machine", monkeypatch)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Fast CPU 9000\nflags : x\nmodel name\t: other\n")
    assert machine.cpu_name(cpuinfo) == "Fast CPU 9000"
    about = machine.about()
    assert " cores, " in about["machine"]
    assert {"python", "torch", "numpy", "stable-baselines3"} <= about["versions"].keys()
    assert datetime.date.fromisoformat(about["measured"])


def test_pictures_are_drawn_from_what_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = module("bench_plot", monkeypatch)
    stored = ROOT / "docs" / "results"
    (tmp_path / "learning").mkdir()
    for name in ("skullking-train.json", "learning/acrobot.json", "learning/cartpole.json"):
        (tmp_path / name).write_bytes((stored / name).read_bytes())
    assert plot.draw(tmp_path, tmp_path / "learning") == 0
    for name in ("ppo.png", "learning.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert plot.draw(tmp_path / "nothing", tmp_path / "nothing") == 2
