"""benchmarks/: equal work or no ratio, turns, the guard's verdict, report pages. Measures nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
pytest.importorskip("benchmarks", reason="a source archive has none")

from benchmarks import __main__ as program  # noqa: E402
from benchmarks import account, guard, machine, peers, report, runner, trainings, work  # noqa: E402
from benchmarks.runner import Side  # noqa: E402
from benchmarks.work import OURS, Work  # noqa: E402
from conftest import configured  # noqa: E402


def sample(rate: float, updates: int = 16, **more: Any) -> dict[str, Any]:
    return {"rate": rate, "env_steps": 1024, "updates": updates, "samples_per_update": 256, **more}


def toy(**measurements: Any) -> Work:
    sides = {OURS: lambda: sample(4.0), "stock": lambda: sample(2.0), **measurements}
    return Work("toy-one", "A toy.", sides, peers=frozenset({"SBX"}), target="T1")


def in_this_process(found: Work, side: Side, turn: int) -> Any:
    measurement = found.measurements[side.measurement]
    return measurement(turn) if found.seeded else measurement()


def measured(found: Work, repeats: int = 3, peers: bool = True) -> dict[str, Any]:
    return runner.run(found, runner.sides_of(found, peers), repeats, measured=in_this_process)


def test_every_work_is_described_and_the_targets_are_measured() -> None:
    works = work.every_work()
    assert len(works) > 100
    assert all(found.text.endswith((".", "?")) and found.measurements for found in works.values())
    assert all(found.peers <= set(found.measurements) for found in works.values())
    assert {found.target for found in guard.guarded()} == set(guard.TARGETS)
    assert {found.name for found in work.chosen(["ppo-update-64", "dqn-cartpole"])} == {
        "ppo-update-64-256", "ppo-update-64-2048", "dqn-cartpole",
    }  # fmt: skip
    with pytest.raises(SystemExit, match="no work nothing"):
        work.chosen(["nothing"])


def test_a_result_with_the_instructions_of_avx2_alone_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured, file = list[str | None](), tmp_path / "results.jsonl"
    monkeypatch.setattr(program.os, "environ", dict(program.os.environ))
    monkeypatch.setattr(runner, "run", lambda *_: measured.append(program.os.environ.get("NUMBA_CPU_NAME")) or {})
    monkeypatch.setattr(report, "section", lambda _: [])
    for words, name in (([], None), (["--narrow"], "haswell")):
        program.main(["run", "gemm-forward", "--json", str(file), *words])
        assert measured.pop() == name
    texts = [json.loads(line)["machine"] for line in file.read_text().splitlines()]
    assert ["AVX2 alone" in text for text in texts] == [False, True]


def test_the_account_counts_each_layer_and_each_phase_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import nn

    monkeypatch.setattr(account, "best_of", lambda call: call() is None or 6.0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 5))
    layers = account.layers_of(net, torch.zeros(2, 3, 6, 6))
    assert layers == [(3.0, True), (3.0, False)]
    assert account.training_passes(layers) == 3.0 * 2 + 3.0 * 3
    took = account.parts_of({"env_step_ms": 1.0, "train_ms": 2.0, "optim_ms": 0.5, "log_ms": 0.5})
    assert took == {"env": 1.0, "policy": 0.0, "update": 2.5, "storage": 0.0, "rest": 0.5}
    page = account.section("toy", ("a=1",), {**dict.fromkeys(account.PARTS, 0.0), "env": 1.0}, took)
    assert "| update | 0.00 | 2.50 | +2.50 | +62% |" in page
    assert page[-2] == "250,000 steps/s, needed ÷ spent 25%."


@pytest.mark.parametrize(
    "name",
    ["auto-dqn-dict", "learn-dqn-lunarlander", "learn-memory-skullking", "learn-settings", "libraries-pong-dqn",
     "recurrent-64-128-short", "skirmish-self-play", "zoo-tuned-acrobot"],
)  # fmt: skip
def test_command_lines_are_such_that_fasttrain_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(arguments: list[str]) -> None:
        configured(*arguments)
        raise InterruptedError

    for variable in ("SDL_VIDEODRIVER", "WANDB_MODE"):  # which a measurement sets
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(trainings, "finished", typed)
    monkeypatch.setattr("benchmarks.works.libraries.find_spec", lambda name: True)
    found = work.every_work()[name]
    for side, measurement in found.measurements.items():
        if side == OURS or found.seeded:
            with pytest.raises(InterruptedError):
                measurement(0) if found.seeded else measurement()


def test_the_campaign_for_a_gpu_has_no_command_that_fails_there_for_the_first_time() -> None:
    from benchmarks.works import gpu

    for name, (_, _, sides) in gpu.FLAGS.items():
        for side in sides:
            configured(*gpu.arguments_of(name, side))
            configured(*gpu.arguments_of(name, side, dry=True))
    for name, updates in (("gpu-amp", 32), ("gpu-pinned", 80), ("gpu-skullking-4096", 8)):
        assert trainings.command(gpu.arguments_of(name, OURS, dry=True), 64)["updates"] == updates


def test_sides_take_turns_ours_warms_up_first_and_ratios_are_taken_turn_by_turn() -> None:
    order: list[tuple[str, int]] = []

    def noted(found: Work, side: Side, turn: int) -> dict[str, Any]:
        order.append((side.label, turn))
        return sample(1.0)

    runner.run(toy(), runner.sides_of(toy(), peers=False), 2, measured=noted)
    assert order == [(OURS, 0), (OURS, 0), ("stock", 0), (OURS, 1), ("stock", 1)]
    slowing = iter([0.0, 100.0, 50.0])  # the first is not counted; then the machine slows down
    theirs = iter([20.0, 10.0])
    result = measured(
        toy(**{OURS: lambda: sample(next(slowing), startup_s=5.0), "stock": lambda: sample(next(theirs))}), 2, False
    )
    assert result["ratios"]["stock"]["median"] == 5.0
    assert result["ratios"]["stock"]["interval"] == pytest.approx([5.0, 5.0])
    assert result["sides"][OURS]["startup_s"] == {"median": 5.0, "min": 5.0, "max": 5.0, "turns": 2}


def test_other_work_gets_no_ratio_and_what_cannot_be_measured_is_said() -> None:
    found = measured(toy(lazy=lambda: sample(500.0, updates=4), SBX=lambda: {"skipped": "no wheel"}))
    assert list(found["ratios"]) == ["stock"]
    assert found["unequal"] == {"lazy": {"env_steps": 1024, "updates": 4, "samples_per_update": 256}}
    assert found["skipped"] == {"SBX": "no wheel"}
    nothing = measured(toy(**{OURS: lambda: {"skipped": "no GPU"}}))
    assert (nothing["skipped"], nothing["ratios"]) == ({OURS: "no GPU"}, {})


def test_quality_is_compared_seed_by_seed() -> None:
    sides = {
        OURS: lambda seed: sample(9.0, quality=100.0 + seed),
        "stock": lambda seed: sample(1.0, quality=99.0 + seed),
    }
    found = measured(Work("learn-toy", "Learns.", sides, equal=("env_steps",), seeded=True), 10)
    assert found["quality"]["stock"]["difference"] == pytest.approx(1.0)
    assert found["quality"]["stock"]["verdict"] == "pass"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([0.90, 0.91, 0.92], "slower"), ([1.10, 1.12, 1.11], "faster"), ([0.90, 0.95, 1.30], "no difference shown"),
     ([0.50], "one turn says nothing")],
)  # fmt: skip
def test_slower_only_where_the_interval_says_so(ratios: list[float], verdict: str) -> None:
    assert runner.judged({"interval": runner.ratio_interval(ratios)}) == verdict


def test_the_guard_measures_two_revisions_in_checkouts_of_their_own(monkeypatch, tmp_path):
    repository = tmp_path / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    repository.mkdir()
    subprocess.run([*git, "init", "-q"], check=True)
    for text in ("old", "new"):
        (repository / "version").write_text(text, encoding="utf-8")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", text], check=True)
    monkeypatch.setattr(guard, "ROOT", repository)
    places = set()

    def by_version(found: Work, side: Side, turn: int) -> dict[str, Any]:
        places.add(side.checkout)
        return sample({"old": 2.0, "new": 1.0}[(side.checkout / "version").read_text(encoding="utf-8")])

    said: list[str] = []
    [result] = guard.guard("HEAD", "HEAD~1", [toy()], 3, said.append, by_version)
    assert result["verdict"] == "slower"
    assert result["ratios"]["HEAD~1"]["median"] == 0.5
    assert len(places) == 2
    assert not any(place.exists() for place in places)
    with pytest.raises(SystemExit, match="nothing"):
        guard.guard("HEAD", "nothing", [toy()], 1, said.append)


def test_results_become_a_page_that_is_not_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "REPORTS", tmp_path)
    about = machine.about(["run", "toy", "--json", "/somewhere/a.jsonl"])
    assert about["command"] == "python -m benchmarks run toy --json a.jsonl"
    file = tmp_path / "toys.jsonl"
    found = {**about, **measured(toy(lazy=lambda: sample(500.0, updates=4)))}
    file.write_text(json.dumps(found) + "\n", encoding="utf-8")
    text = report.write(file).read_text(encoding="utf-8")
    assert (tmp_path / f"{about['date']}-toys.md").is_file()
    assert "| stock | 2 | [2, 2] | 2× [2, 2] |" in text
    assert "lazy: no ratio, it did other work" in text
    assert about["commit"] in text
    file.write_text(json.dumps({**found, "text": "Another."}) + "\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="is there already"):
        report.write(file)
    assert [report.number(value) for value in (154_321.0, 11.63, 0.7064)] == ["154,000", "11.6", "0.706"]


def test_a_measurement_is_a_process_and_a_peer_that_fails_is_skipped(capsys, monkeypatch):
    monkeypatch.setattr(work, "every_work", lambda: work.works_of(toy()))
    assert program.main(["one", "toy-one", "stock", "0"]) == 0
    assert json.loads(capsys.readouterr().out) == sample(2.0)
    assert program.main(["one", "toy-two", "stock", "0"]) == 0
    assert "no such measurement" in capsys.readouterr().out
    assert program.main(["list"]) == 0
    assert "toy-one" in capsys.readouterr().out
    monkeypatch.setitem(peers.PEERS, "broken", peers.Peer("nothing.py"))
    assert "exit code 2" in peers.run("broken", {})["skipped"]
