from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from conftest import configured
from fasttrain.cli import main
from fasttrain.cli.compose import Loader
from fasttrain.runs.folders import changed_settings
from fasttrain.saving.files import lock_folder, write_json
from fasttrain.spec.plain import to_dict

SMALL = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=2", "checkup=off",
         "fused_update=off", "eval.episodes=2", "batch_size=32", "algo.net_arch=[8]",
         "algo.rollout_size=64", "report=false")  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A training of 128 steps in the folder `it`: its exit code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def begin(*arguments: str) -> tuple[int, str, str]:
        code = main([*SMALL, "total_timesteps=128", "hydra.run.dir=it", *arguments])
        return code, *capfd.readouterr()

    return begin


def content(folder: Path) -> dict[str, Any]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def test_a_second_run_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    assert run()[0] == 0
    same = (*SMALL, "total_timesteps=128")
    assert changed_settings(tmp_path / "it", configured(*same)) == {}
    other = changed_settings(tmp_path / "it", configured(*same, "num_envs=4", "+env.kwargs.size=2"))
    assert other == {"num_envs": 4, "env.kwargs.size": 2, "env.kwargs": None}
    config = configured(*same)
    stored = to_dict(config)
    stored["env"]["game"] = "fasttrain.integrations.pettingzoo:GAME"
    (tmp_path / "older").mkdir()
    write_json(tmp_path / "older" / "plan.json", {"config": stored})
    moved = replace(config, env=replace(config.env, game="fasttrain_integrations.pettingzoo:GAME"))
    assert "env.game" not in changed_settings(tmp_path / "older", moved), "the same module by its former name"
    before = content(tmp_path / "it")
    code, _, err = run("seed=1")
    assert code == 2
    assert "hydra.run.dir=it holds a run (done): use another folder, on_existing=resume continues it, " in err
    code, _, err = run("on_existing=maybe")
    assert (code, "on_existing=maybe: not one of refuse, resume, overwrite" in err) == (2, True)
    for other in (["check", "env.id=CartPole-v1"], ["compare", "candidates=[baseline,speed]"], ["-m", "seed=1,2"],
                  ["eval", "run=it"]):  # fmt: skip
        assert main([*other, "hydra.run.dir=it", "hydra.sweep.dir=it"]) == 2
    monkeypatch.setenv("NAME_OF_IT", "it")
    assert main([*SMALL, "hydra.run.dir=${oc.env:NAME_OF_IT}"]) == 2
    (tmp_path / "mine" / "profile").mkdir(parents=True)
    (tmp_path / "mine" / "profile" / "here.yaml").write_text("# @package _global_\nhydra:\n  run:\n    dir: it\n")
    assert main(["--config-dir", str(tmp_path / "mine"), "+profile=here"]) == 2
    assert capfd.readouterr().err.count("=it holds a run (done): use another folder") == 6
    assert content(tmp_path / "it") == before


def test_while_a_process_is_at_work_nobody_else_is(run: Run, tmp_path: Path):
    (tmp_path / "it").mkdir()
    with lock_folder(tmp_path / "it"):
        for way in ("refuse", "resume", "overwrite"):
            code, _, err = run(f"on_existing={way}")
            assert (code, "it: still going on (process " in err) == (2, True)
    assert not (tmp_path / "it" / ".hydra").exists()


def test_resume_begins_goes_on_and_ends(run: Run, tmp_path: Path):
    """The same command again and again, as a queue gives it."""
    assert run("on_existing=resume")[0] == 0
    code, out, _ = run("on_existing=resume")
    assert (code, out) == (0, "it holds this run, finished after 128 steps: nothing is left to do\n")
    code, out, err = run("on_existing=resume", "total_timesteps=256", "eval.episodes=3")
    assert code == 0, err
    assert "going on from step_000000000128: 128 of 256 steps" in out, "what speed keeps at the end"
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (summary["env_steps"], summary["resumed_at"], summary["quality"]["episodes"]) == (256, [128], 3)
    code, _, err = run("on_existing=resume", "num_envs=4", "algo.gamma=0.9")
    assert code == 2
    assert "whose algo.gamma, num_envs differ, which cannot change in a resumed run" in err


def test_resume_of_what_left_nothing_to_go_on_from_begins_anew(run: Run, tmp_path: Path):
    assert run("checkpoint_every=0")[0] == 0
    for name in ("model.zip", "summary.json"):
        (tmp_path / "it" / name).unlink()
    code, out, err = run("on_existing=resume")
    assert (code, "going on" in out) == (0, False), err
    assert (tmp_path / "it" / "model.zip").is_file()


def test_overwrite_takes_nothing_but_its_own(run: Run, tmp_path: Path):
    assert run("eval_every=64", "eval_async=false")[0] == 0
    for name in ("notes.txt", "model.py"):
        (tmp_path / "it" / name).write_text("mine")
    assert run("on_existing=overwrite", "env.id=Nowhere-v0")[0] == 2
    assert (tmp_path / "it" / "model.zip").is_file(), "wrong input costs nothing"
    assert run("on_existing=overwrite", "seed=1", "checkpoint_every=0")[0] == 0
    names = {path.name for path in (tmp_path / "it").iterdir()}
    assert {"notes.txt", "model.py", "model.zip", "summary.json"} <= names
    assert not {"best_model.zip", "evaluations.csv"} & names
    assert not list((tmp_path / "it").rglob("step_*"))
    assert json.loads((tmp_path / "it" / "summary.json").read_text())["seed"] == 1


@pytest.mark.parametrize(
    ("kind", "name", "command"),
    [
        ("sweep", "sweep.json", ["-m", "seed=1,2", "hydra.sweep.dir=it"]),
        ("study", "study.json", ["compare", "candidates=[baseline,speed]", "hydra.run.dir=it"]),
    ],
)
def test_a_sweep_and_a_study_too(
    kind: str, name: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it").mkdir()
    stored = json.dumps({"arguments": ["-m", "seed=1"], "command": "tune"})
    (tmp_path / "it" / name).write_text(stored)
    assert main(command) == 2
    assert f"=it holds a {kind}: use another folder, on_existing=resume continues it" in capsys.readouterr().err
    assert main([*command, "on_existing=resume"]) == 2
    wrong = "of other arguments (-m seed=1): use another folder" if kind == "sweep" else "is a study of tune"
    assert wrong in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "it").iterdir()] == [name]
    assert (tmp_path / "it" / name).read_text() == stored


def test_other_commands_have_no_way_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    composed = Mock(side_effect=Loader.load_configuration)
    monkeypatch.setattr(Loader, "load_configuration", lambda *given: composed(*given))
    assert main(["check", "env.id=CartPole-v1", "on_existing=resume", f"hydra.run.dir={tmp_path}"]) == 2
    assert "on_existing=resume has no effect with check; use another folder: hydra.run.dir=…" in capsys.readouterr().err
    assert composed.call_count == 1
