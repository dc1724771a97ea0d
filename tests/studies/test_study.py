from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest

from conftest import RunCommand, configured
from fasttrain.cli.commands import OWNERS, STUDIES, prepare
from fasttrain.errors import ConfigError
from fasttrain.runs.view import make_console
from fasttrain.saving.files import read_json, write_json
from fasttrain_studies.study import (
    OWN_KEYS,
    Cell,
    Study,
    Wanted,
    base_overrides,
    last_line,
    merged,
    run_cell,
    settings,
    why,
)
from messages import assert_says, wrong_inputs
from study_toys import Fakes, summary


def study_in(folder: Path) -> Study:
    return Study("compare", folder, ["candidates=[a,b]", "num_envs=4", "run=x"], make_console())


def test_what_speaks_to_the_study_does_not_reach_its_cells():
    typed = ["+profile=speed", "seeds=3", "gate.margin=2", "run=x", "num_envs=4", "minutes=1", "--config-dir=here"]
    assert base_overrides(typed) == ["+profile=speed", "num_envs=4", "--config-dir=here"]
    of_studies = {key.rstrip(".") for key, owner in OWNERS.items() if set(owner.commands) <= set(STUDIES)}
    assert of_studies <= set(OWN_KEYS)


def test_cells_are_stored_at_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(lambda typed, seed: summary(100.0 + seed)).use(monkeypatch)
    wanted = [Wanted("a", seed, ("num_envs=4",)) for seed in (0, 1)]
    first = study_in(tmp_path)
    first.notes["what"] = 1
    found = first.run(wanted)
    assert {seed: cell.summary["steps_per_s"] for seed, cell in found["a"].items()} == {0: 100.0, 1: 101.0}
    stored = read_json(tmp_path / "study.json")
    assert stored["arguments"] == ["candidates=[a,b]", "num_envs=4"]
    assert stored["cells"][1]["overrides"] == ["num_envs=4", "live=off", "report=false", "seed=1"]
    again = study_in(tmp_path)
    assert again.notes == {"what": 1}
    assert set(again.run([*wanted, Wanted("a", 0, ("num_envs=8",))])["a"]) == {0, 1}
    assert len(fakes.ran) == 3, "only the new cell ran"


def test_a_study_of_before_is_refused_by_the_setting_that_is_no_more(tmp_path: Path):
    write_json(tmp_path / "study.json", {"command": "compare", "arguments": ["env.id=A-v0", "horizon_minutes=2"]})
    with pytest.raises(ConfigError, match=r"^run=.* \(horizon_minutes is no setting any more: use minutes=…\); begin"):
        prepare("compare", [], [f"run={tmp_path}"])


def test_a_failed_cell_is_run_again_but_an_illegal_label_is_not_tried_with_other_seeds(tmp_path, monkeypatch):
    codes = iter([2, 1, 1])
    fakes = Fakes(lambda typed, seed: {"exit_code": next(codes), "error": "no"}).use(monkeypatch)
    study = study_in(tmp_path)
    cells = [Wanted("bad", seed, ("num_envs=0",)) for seed in range(3)] + [Wanted("worse", 0, ())]
    assert study.run(cells) == {"bad": {}, "worse": {}}
    assert fakes.ran == [("bad", 0), ("worse", 0)]
    study.run([Wanted("worse", 0, ())])
    assert fakes.ran[-1] == ("worse", 0)
    assert len(study.cells) == 2, "the later try replaces the earlier one"
    assert [cell.status for cell in study.failed()] == ["illegal", "failed"]


def test_none_is_begun_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(lambda typed, seed: summary()).use(monkeypatch)
    study = study_in(tmp_path)
    assert study.run([Wanted("a", 0, ())], until_s=0.0) == {"a": {}}
    assert fakes.ran == []


def test_a_signal_ends_it_after_the_cell_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(), stop_at=1).use(monkeypatch)
    study = study_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run([Wanted("a", 0, ()), Wanted("a", 1, ())])
    assert len(read_json(tmp_path / "study.json")["cells"]) == 1


@pytest.mark.parametrize("typed", wrong_inputs("commands of studies"))
def test_wrong_input_is_told_before_anything_runs(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, typed: str):
    fakes = Fakes(lambda typed, seed: summary()).use(monkeypatch)
    done = fasttrain(*shlex.split(typed))
    done.refused()
    assert_says("commands of studies", typed, done.err.removeprefix("fasttrain: error: ").rstrip())
    assert fakes.ran == []


def test_a_cell_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(61234.0, 0.613, mean_reward=2.9)).use(monkeypatch)
    cell = study_in(tmp_path).run([Wanted("a", 0, ())])["a"][0]
    assert cell.described() == "done · 61,234 steps/s · reward 2.9 · win 61.3 %"


def test_a_written_profile_composes_to_its_values(tmp_path: Path, fasttrain: RunCommand):
    values = settings(configured("+profile=speed"))
    values.update({"batch_size": 512, "use_amp": "off", "workers": 2, "lean_info": False})
    study = Study("tune", tmp_path / "it's a study", [], make_console())
    file = study.write_profile("mine", values, "two\nlines", {"batch_size": "measured: 1.3×"})
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# two\n# lines\nengine: fast\n")
    assert "batch_size: 512 # measured: 1.3×\n" in text
    done = fasttrain(*study.use_profile("mine"), "total_timesteps=64", "env.id=CartPole-v1", "algo=ppo",
                     "eval.episodes=0", "report=false", "checkup=off", "num_envs=2", "batch_size=64",
                     "vec_env=dummy").ok()  # fmt: skip
    plan = done.json("plan.json")
    effective = {row["flag"]: (row["effective"], row["source"]) for row in plan["flags"]}
    assert effective["engine"] == ("fast", "profile mine")
    assert effective["lean_info"][1] == "profile mine"


def test_the_command_that_uses_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Study("tune", tmp_path / "a b", [], make_console()).say_profile("mine", tmp_path / "mine.yaml")
    told = f"written to {tmp_path}/mine.yaml: fasttrain --config-dir '{tmp_path}/a b/conf' +profile=mine"
    assert told in capsys.readouterr().out
    typed = ["--config-dir=own", "+profile=[speed,theirs]", "env.id=CartPole-v1"]
    Study("tune", tmp_path / "b", [], make_console()).say_profile("mine", tmp_path / "mine.yaml", typed)
    told = capsys.readouterr().out
    assert f"fasttrain 'hydra.searchpath=['\"'\"'file://{tmp_path}/b/conf'" in told
    assert "'+profile=[speed,theirs,mine]' --config-dir=own env.id=CartPole-v1" in told


def test_bad_input_is_illegal_and_says_why(tmp_path: Path):
    cell, _ = run_cell("train", ["num_env=3"], tmp_path)
    assert (cell.status, cell.done) == ("illegal", False)
    assert cell.error == "unknown key 'num_env'; did you mean 'num_envs' or 'eval.num_envs'?"


def test_a_sigterm_is_passed_on_and_the_cell_saves(tmp_path: Path):
    folder, small = tmp_path / "it's", ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "algo.rollout_size=128",
             "batch_size=64", "eval.episodes=2", "vec_env=dummy", "checkup=off", "report=false")  # fmt: skip

    def stop_once_it_trains() -> None:
        episodes = folder / "episodes.csv"
        while not episodes.exists() or episodes.read_text().count("\n") < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=stop_once_it_trains)
    killer.start()
    before = signal.getsignal(signal.SIGTERM)
    cell, stopped = run_cell("train", [*small, "total_timesteps=1e9"], folder)
    killer.join()
    assert stopped
    assert (cell.status, cell.summary["status"]) == ("stopped", "stopped")
    assert (folder / "model.zip").is_file()
    assert signal.getsignal(signal.SIGTERM) is before
    stored = json.loads(json.dumps(cell.to_dict(tmp_path)))
    assert stored["folder"] == "it's"
    assert Cell.from_dict(stored, tmp_path).summary == cell.summary


@pytest.mark.parametrize(
    ("base", "more", "expected"),
    [
        (["+profile=speed", "num_envs=4"], ["profile=baseline"], ["num_envs=4", "profile=baseline"]),
        (["num_envs=4", "seed=1"], ["num_envs=8"], ["seed=1", "num_envs=8"]),
        (["--config-dir=here", "a=1"], ["--config-dir=there"], ["--config-dir=here", "a=1", "--config-dir=there"]),
    ],
)
def test_later_overrides_replace_earlier_ones(base: list[str], more: list[str], expected: list[str]):
    assert merged(base, more) == expected


def test_what_ended_a_cell(tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_text("one\nfasttrain: error: no such env\n\nlast\n")
    assert why(2, log) == "no such env"
    assert why(-9, log) == "killed by signal SIGKILL"
    assert why(0, log) == why(4, log) == ""
    log.write_text("")
    assert why(1, log) == "no output"


def test_what_a_cell_says_last_is_read_while_it_runs(tmp_path: Path):
    with pytest.raises(OSError, match="log.txt"):
        last_line(tmp_path)
    log = tmp_path / "log.txt"
    log.touch()
    assert last_line(tmp_path) == "starting"
    log.write_bytes(b"x" * 5000 + b"\n 12,000/40,000 steps 30 % \xc2\xb7 reward\x1b[2J 5\n\n")
    assert last_line(tmp_path) == "12,000/40,000 steps 30 % · reward\N{REPLACEMENT CHARACTER}[2J 5"
