"""scripts/learning.py: its cells and tables. The statistics are those of tests/studies/test_statistics.py."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("learning")


# --- cells


def cell(seed: int, side: str, reward: float, overrides: list[str], **more: Any) -> dict[str, Any]:
    return {
        "seed": seed,
        "side": side,
        "overrides": overrides,
        "final": {"mean_reward": reward, "win_rate": None},
        "sampled": {"mean_reward": reward, "win_rate": None},
        "curve": [reward / 2, reward],
        "curve_of": "return",
        "trail": [[100, 1.5, reward / 2], [200, 3.0, reward]],
        "cpu_share": 1.0,
        **more,
    }


def test_cells_are_stored_one_by_one_and_never_run_twice(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def run_cell(task: Any, overrides: list[str], seed: int) -> dict[str, Any]:
        side = "speed" if "profile=speed" in overrides else "baseline"
        ran.append((side, seed))
        if len(ran) == 4:
            raise SystemExit("stopped")
        full = cell(seed, side, 400.0 + seed, overrides, elapsed_s=1.0)
        return {key: value for key, value in full.items() if key not in ("side", "overrides")}

    monkeypatch.setattr(learning, "run_cell", run_cell)
    command = ["--tasks", "cartpole", "--seeds", "2", "--results", str(tmp_path)]
    with pytest.raises(SystemExit, match="stopped"):
        learning.main(command)
    assert len(learning.load(tmp_path / "cartpole.json")) == 3
    assert learning.main([*command, "--json", str(tmp_path / "report")]) == 0
    assert ran == [("baseline", 0), ("speed", 0), ("baseline", 1), ("speed", 1), ("speed", 1)]
    gate = json.loads((tmp_path / "report").read_text(encoding="utf-8"))["cartpole"]["gate"]["speed"]["final"]
    assert (gate["pairs"], gate["difference"], gate["verdict"]) == (2, 0.0, "not enough seeds")
    # A candidate has a name and overrides of its own; the baseline's cells serve it too.
    candidate = ["--name", "short", "--override", "algo.n_epochs=2"]
    learning.main([*command, *candidate])
    assert ran[5:] == [("speed", 0), ("speed", 1)]
    stored = learning.load(tmp_path / "cartpole.json")
    assert [c["side"] for c in stored[-2:]] == ["short", "short"]
    assert all(c["overrides"][-1] == "algo.n_epochs=2" for c in stored[-2:])
    learning.main([*command, "--name", "short", "--override", "algo.n_epochs=3"])  # other overrides: other cells
    assert len(ran) == 9
    capsys.readouterr()
    learning.main([*command, "--show"])
    assert len(ran) == 9
    assert "short" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--name", "x"], ["--override", "a=1"], ["--tasks", "go"], ["--sides", "fast"],
                  ["--name", "speed", "--override", "a=1"]],
)  # fmt: skip
def test_wrong_arguments_are_refused(learning: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        learning.main(arguments)
    assert refused.value.code == 2


def test_time_to_threshold_and_disturbed_cells(learning: ModuleType) -> None:
    cells = {s: cell(s, "speed", 100.0 + s, [], cpu_share=0.5 if s == 0 else 1.1) for s in range(3)}
    found = learning.times(cells, threshold=101.0)
    assert found["reached"] == 2
    assert found["env_steps"][0] == 200
    assert found["wall_s"][0] == 3.0
    assert found["disturbed"] == 1
    assert learning.times(cells, threshold=999.0)["env_steps"] == [None, None, None]


def test_a_win_rate_is_judged_as_such(learning: ModuleType) -> None:
    def cells(rate: float) -> dict[int, dict[str, Any]]:
        won = {"mean_reward": 1.0, "win_rate": rate}
        more = {"final": won, "sampled": won, "curve": [rate], "curve_of": "is_win"}
        return {seed: cell(seed, "any", 0.0, [], **more) for seed in range(10)}

    found = learning.compared(cells(0.60), cells(0.58))
    assert found["final"].margin == found["curve"].margin == 0.03
    assert found["final"].verdict == "pass"
    assert learning.compared(cells(0.60), cells(0.56))["final"].verdict == "fail"


def test_what_is_kept_of_a_run(learning: ModuleType) -> None:
    final = {"mean_reward": 1.0, "win_rate": 0.5, "episodes": 3, "ci95": {}, "end_reason": {}}
    summary = {"env_steps": 400, "updates": 8, "wall_s": 2.0, "startup_s": 1.0, "steps_per_s": 200.0}
    summary["quality"] = {**final, "sampled": final}  # type: ignore[assignment]
    episodes = [
        {"env_steps": str(2 * n + 2), "return": "-1", "wall_s": str(n / 100), "is_win": str(n // 100)}
        for n in range(200)
    ]
    kept = learning.summarised(summary, episodes)
    assert kept["curve_of"] == "is_win"
    assert kept["curve"] == [0.0] * 25 + [1.0] * 25
    assert kept["trail"][0] == [200, 0.99, 0.0]
    assert next(point for point in kept["trail"] if point[2] >= 0.5)[:2] == [300, 1.49]


def test_every_task_is_known_to_the_command(learning: ModuleType) -> None:
    """Both sides are asked for the same env, steps and episodes of evaluation."""
    for task in learning.TASKS.values():
        stock, ours = learning.overrides_of(task, "baseline"), learning.overrides_of(task, "speed", ["a=1"])
        assert stock[3:] == ours[1:-1]
        assert any(each.startswith("total_timesteps=") for each in stock)
        assert ours[-1] == "a=1"


def test_groups_of_tasks(learning: ModuleType) -> None:
    played = ["cartpole", "invalid-actions", "acrobot", "lunarlander", "skullking", "skullking-short"]
    assert learning.tasks_of("ppo") == played
    assert learning.tasks_of("dqn,cartpole")[-1] == "cartpole"
    assert all("algo=dqn" in learning.TASKS[name].overrides for name in learning.tasks_of("dqn"))
    assert {name for group in learning.GROUPS.values() for name in group} == learning.TASKS.keys()


@pytest.mark.parametrize(("rates", "verdict"), [([0.3, 0.32], "not enough seeds"), ([0.3] * 5 + [0.32] * 5, "pass"),
                                                ([0.2, 0.21] * 5, "fail")])  # fmt: skip
def test_without_a_baseline_chance_must_be_beaten(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float], verdict: str
) -> None:
    """Of two values 0.01 from their mean, the interval is ± 12.7 × 0.01."""
    commands: list[list[str]] = []

    def run_cell(task: Any, overrides: list[str], seed: int) -> dict[str, Any]:
        commands.append(overrides)
        final = {"mean_reward": 0.0, "win_rate": rates[seed]}
        full = cell(seed, "", 0.0, overrides, final=final, curve_of="is_win", elapsed_s=1.0)
        return {key: value for key, value in full.items() if key not in ("side", "overrides", "sampled")}

    monkeypatch.setattr(learning, "run_cell", run_cell)
    command = ["--tasks", "dqn-skullking", "--seeds", str(len(rates)), "--results", str(tmp_path)]
    assert learning.main([*command, "--json", str(tmp_path / "report")]) == 0
    assert len(commands) == len(rates)
    assert all("profile=speed" in overrides for overrides in commands)  # stock has nothing to be compared with
    found = json.loads((tmp_path / "report").read_text(encoding="utf-8"))["dqn-skullking"]
    assert found["beats_chance"]["speed"]["verdict"] == verdict
    assert found["gate"] == {}


def test_dqn_has_no_sampled_policy_to_compare(learning: ModuleType) -> None:
    cells = {seed: cell(seed, "any", 100.0, []) for seed in range(3)}
    greedy = {seed: {key: value for key, value in each.items() if key != "sampled"} for seed, each in cells.items()}
    assert learning.compared(greedy, greedy).keys() == {"final", "curve", "tail"}


def test_the_tail_is_the_last_fifth_of_the_curve(learning: ModuleType) -> None:
    cells = {0: {"curve": [0.0] * 8 + [3.0, 5.0], "curve_of": "return"}}
    assert learning.figure(cells, "tail") == ({0: 4.0}, False)
    assert learning.figure(cells, "curve") == ({0: 0.8}, False)
    assert {name for name, task in learning.TASKS.items() if task.gated == "tail"} == {
        "dqn-cartpole",
        "dqn-acrobot",
        "dqn-lunarlander",
    }
