from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import PPO

from conftest import Finished, RunCommand
from messages import assert_says, wrong_inputs
from resume_cases import assert_equal

SMALL = ("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=2", "checkup=off",
         "algo.net_arch=[8]", "eval.episodes=2", "total_timesteps=1024", "checkpoint_every=256", "seed=3")  # fmt: skip


@pytest.fixture
def stopped(trained: RunCommand) -> Finished:
    """A run of 1,024 steps; without its last checkpoint it looks as if it had been killed."""
    more = ("train_log_enabled=true", "train_log_to_file=true", "log_every=8", "eval_every=512", "eval_async=false")
    done = trained(*SMALL, *more)
    shutil.rmtree(done.folder / "checkpoints" / "step_000000001024")
    return done


def test_a_killed_run_goes_on_in_its_own_folder(stopped: Finished, fasttrain: RunCommand):
    folder = stopped.folder
    before = {name: stopped.table(name) for name in ("episodes.csv", "progress.csv", "evaluations.csv")}
    table = (folder / "evaluations.csv").read_text().splitlines()
    (folder / "evaluations.csv").write_text("\n".join([*table[:1], "512,2.0,5"]))  # half a row
    first = stopped.json("summary.json")
    done = fasttrain("resume", f"run={folder}").ok()
    assert not list(done.folder.iterdir()), "the folder that the fixture asks for stays empty"
    assert "going on from step_000000000768: 768 of 1,024 steps" in done.out
    for name, rows in before.items():
        after = stopped.table(name)
        assert [row.get("env_steps") for row in after] == [row.get("env_steps") for row in rows], name
    assert (folder / "checkpoints" / "step_000000001024").is_dir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["resumed_at"] == [768]
    assert (summary["env_steps"], summary["updates"]) == (1024, first["updates"])
    assert summary["wall_s"] > summary["perf"]["wall_s"]
    assert summary["perf"]["env_steps"] == 256
    assert summary["quality"] == first["quality"]
    assert "checkpoint_every=256" in summary["overrides"]


@pytest.mark.parametrize("reuse", [1, 2])
def test_a_run_whose_envs_step_during_updates_goes_on(
    reuse: int, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "envs"))
    more = ("env.entry_point=strangers:Own", "algo=ppo", "vec_env=shared", "workers=2", "schedule=continuous")
    done = fasttrain(*SMALL, *more, f"algo.reuse={reuse}", "fused_update=off", "eval_every=512").ok()
    lag = done.json("summary.json")["perf"]["lag"]
    assert 0 < lag["mean"] <= 1
    assert lag["largest"] <= 2
    assert 1024 <= done.json("summary.json")["env_steps"] <= 1024 + 8  # each env may finish a step that has begun
    resumed = fasttrain("resume", f"run={done.folder}", "total_timesteps=1536").ok()
    assert "going on from step_" in resumed.out
    assert json.loads((done.folder / "summary.json").read_text())["env_steps"] in range(1536, 1536 + 256 + 8)


def test_a_longer_horizon_and_another_one_after_that(stopped: Finished, fasttrain: RunCommand):
    for total in (1280, 1536):
        fasttrain("resume", f"run={stopped.folder}", f"total_timesteps={total}").ok()
    summary = stopped.json("summary.json")
    assert (summary["env_steps"], summary["resumed_at"]) == (1536, [768, 1280])
    assert stopped.json("plan.json")["config"]["total_timesteps"] == 1536
    assert "nothing is left to do" in fasttrain("resume", f"run={stopped.folder}").ok().out


@pytest.mark.parametrize("name", ["state.json", "arrays.npz"])
def test_a_manifest_that_leaves_a_file_out_is_damage(stopped: Finished, fasttrain: RunCommand, name: str):
    """Other damage: tests/faults/test_campaigns.py."""
    newest = stopped.folder / "checkpoints" / "step_000000000768"
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["files"][name]
    (newest / "manifest.json").write_bytes(json.dumps(manifest, indent=1).encode())
    if name == "arrays.npz":
        (newest / name).unlink()
    done = fasttrain("resume", f"run={stopped.folder}").ok()
    assert f"warning: step_000000000768: manifest.json does not list {name}" in done.out
    assert "going on from step_000000000512" in done.out


def test_what_there_is_to_go_on_from_is_wrong(stopped: Finished, fasttrain: RunCommand, trained: RunCommand):
    plan = stopped.json("plan.json")
    for flags in (7, [{}], ["x"]):
        (stopped.folder / "plan.json").write_text(json.dumps({**plan, "flags": flags}))
        fasttrain("resume", f"run={stopped.folder}").refused("its plan.json has no list of flags")
    (stopped.folder / "plan.json").write_text(json.dumps(plan))
    for folder in (stopped.folder / "checkpoints").iterdir():
        (folder / "state.json").unlink()
    told = "no checkpoint to continue from: step_000000000768: state.json is missing"
    fasttrain("resume", f"run={stopped.folder}").refused(told)
    shutil.rmtree(stopped.folder / "checkpoints")
    other = trained(*SMALL, "num_envs=4", "total_timesteps=256").folder
    shutil.copytree(other / "checkpoints", stopped.folder / "checkpoints")
    fasttrain("resume", f"run={stopped.folder}").refused("the checkpoint is of another env or algorithm")


@pytest.mark.parametrize("typed", wrong_inputs("what a resume cannot change"))
def test_what_cannot_be(typed: str, fasttrain: RunCommand, trained: RunCommand):
    folder = str(trained(*SMALL, "num_envs=4", "total_timesteps=256").folder)
    done = fasttrain("resume", *typed.replace("FOLDER", folder).split())
    done.refused()
    assert_says("what a resume cannot change", typed, done.err.replace(folder, "FOLDER"))


WALK = """
import numpy as np, os, pathlib, signal
from plain_env import PlainEnv
class Walk(PlainEnv):
    length = 100
    def __init__(self, hidden=False):
        self.hidden = np.random.default_rng() if hidden else None
    def seen(self):
        if pathlib.Path("stop").exists() and self.time == 90:
            pathlib.Path("stop").unlink()
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
        return (self.hidden or self.np_random).normal(size=2).clip(-9, 9).astype("float32")
"""


@pytest.fixture
def walk(fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "walk_on.py").write_text(WALK)
    return lambda *more: fasttrain(
        "+profile=speed", "env.entry_point=walk_on:Walk", "algo=ppo", "vec_env=dummy", "num_envs=4", "batch_size=64",
        "algo.rollout_size=128", "total_timesteps=640", "checkpoint_every=128", "eval.episodes=2", "checkup=off", *more,
    )  # fmt: skip


def test_an_env_with_hidden_randomness_begins_a_new_episode(walk: Callable[..., Finished], fasttrain: RunCommand):
    done = walk("env.kwargs.hidden=true", "total_timesteps=256")
    shutil.rmtree(done.folder / "checkpoints" / "step_000000000256")
    again = fasttrain("resume", f"run={done.folder}").ok()
    assert "warning: 4 of 4 envs could not be brought back to where they were" in again.out


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_run_that_a_signal_stopped_and_was_resumed_equals_one_that_was_not(
    walk: Callable[..., Finished], fasttrain: RunCommand, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Killed ones: tests/faults/test_campaigns.py."""
    monkeypatch.setenv("SIGNAL", name)
    whole = walk()
    Path("stop").touch()
    done = walk()
    assert done.exit_code == 4, done.err
    summary = done.json("summary.json")
    assert (summary["status"], summary["stopped_by"]) == ("stopped", "signal")
    assert 256 < summary["env_steps"] < 640
    assert f"stopped at {summary['env_steps']:,} steps: by a signal" in done.out
    assert "later steps are dropped" in done.out
    PPO.load(done.folder / "model.zip", device="cpu")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fasttrain("resume", f"run={done.folder}").ok()
    assert_equal(done.folder, whole.folder)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_noise_goes_on_where_it_was(num_envs: int, fasttrain: RunCommand):
    done = fasttrain("+profile=speed", "algo=td3", "algo.action_noise=ornstein-uhlenbeck_0.5", "env.id=Pendulum-v1",
                     f"num_envs={num_envs}", "vec_env=dummy", "warmup_steps=16", "algo.net_arch=[8]", "checkup=off",
                     "total_timesteps=48", "checkpoint_every=32", "eval.episodes=0").ok()  # fmt: skip
    newest = done.folder / "checkpoints" / "step_000000000048"
    shutil.move(newest, done.folder / "whole")
    fasttrain("resume", f"run={done.folder}").ok()
    with np.load(newest / "arrays.npz") as found, np.load(done.folder / "whole" / "arrays.npz") as wanted:
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
