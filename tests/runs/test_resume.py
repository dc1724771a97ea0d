from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import Finished, RunCommand
from fasttrain.runs.evaluate import config_of
from fasttrain.runs.folders import changes
from fasttrain.runs.resume import changed_plan

SMALL = ("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=2", "checkup=off",
         "algo.net_arch=[8]", "eval.episodes=2", "total_timesteps=1024", "checkpoint_every=256", "seed=3")  # fmt: skip


@pytest.fixture
def stopped(trained: RunCommand) -> Finished:
    """A run of 1,024 steps; without its last checkpoint it looks as if it had been killed."""
    more = ("train_log_enabled=true", "train_log_to_file=true", "log_every=8", "eval_every=512", "eval_async=false")
    done = trained(*SMALL, *more)
    shutil.rmtree(done.folder / "checkpoints" / "step_000000001024")
    return done


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_a_killed_run_goes_on_in_its_own_folder(stopped: Finished, fasttrain: RunCommand):
    folder = stopped.folder
    before = {name: rows_of(folder / name) for name in ("episodes.csv", "progress.csv", "evaluations.csv")}
    first = stopped.json("summary.json")
    done = fasttrain("resume", f"run={folder}")
    assert done.exit_code == 0, done.err
    assert not list(done.folder.iterdir()), "the folder that the fixture asks for stays empty"
    assert "going on from step_000000000768: 768 of 1,024 steps" in done.out
    for name, rows in before.items():
        after = rows_of(folder / name)
        assert [row.get("env_steps") for row in after] == [row.get("env_steps") for row in rows], name
    assert (folder / "checkpoints" / "step_000000001024").is_dir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["resumed_at"] == [768]
    assert (summary["env_steps"], summary["updates"]) == (1024, first["updates"])
    assert summary["wall_s"] > summary["perf"]["wall_s"]
    assert summary["perf"]["env_steps"] == 256
    assert summary["quality"] == first["quality"]
    assert "checkpoint_every=256" in summary["overrides"]


def test_a_longer_horizon_and_another_one_after_that(stopped: Finished, fasttrain: RunCommand):
    for total in (1536, 2048):
        assert fasttrain("resume", f"run={stopped.folder}", f"total_timesteps={total}").exit_code == 0
    summary = stopped.json("summary.json")
    assert (summary["env_steps"], summary["resumed_at"]) == (2048, [768, 1536])
    assert stopped.json("plan.json")["config"]["total_timesteps"] == 2048
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 0
    assert "nothing is left to do" in done.out


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(stopped: Finished, fasttrain: RunCommand):
    newest = stopped.folder / "checkpoints" / "step_000000000768" / "arrays.npz"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 0, done.err
    assert "warning: step_000000000768: arrays.npz is not what was written" in done.out
    assert "going on from step_000000000512" in done.out
    assert stopped.json("summary.json")["resumed_at"] == [512]


@pytest.mark.parametrize("name", ["state.json", "arrays.npz"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_manifest_that_leaves_a_file_out_is_damage(stopped: Finished, fasttrain: RunCommand, name: str, gone: bool):
    newest = stopped.folder / "checkpoints" / "step_000000000768"
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["files"][name]
    (newest / "manifest.json").write_bytes(json.dumps(manifest, indent=1).encode())
    if gone:
        (newest / name).unlink()
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 0, done.err
    assert f"warning: step_000000000768: manifest.json does not list {name}" in done.out
    assert "going on from step_000000000512" in done.out


@pytest.mark.parametrize("flags", [None, 7, [{}], ["x"]])
def test_a_plan_without_flags_is_named(stopped: Finished, fasttrain: RunCommand, flags: object):
    plan = stopped.json("plan.json")
    del plan["flags"]
    (stopped.folder / "plan.json").write_text(json.dumps(plan if flags is None else {**plan, "flags": flags}))
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 2
    assert "its plan.json has no list of flags" in done.err


def test_a_plan_of_before_is_read_by_the_settings_of_today(stopped: Finished):
    plan = stopped.json("plan.json")
    config = plan["config"]
    config |= {"nan_guard": True, "guard": {"at_limit": "rollback"}, "checkpoint_every_minutes": 5.0, "tier": "speed",
               "engine_switch_at": 512, "metrics": {"port": None, "host": "x"}, "ablate": {"flags": []}}  # fmt: skip
    config["env"] |= {"name": "x", "win_key": "won", "score_keys": ["vp"]}
    del config["env"]["result"]
    config["daemons"] = {"start_timeout_s": 60.0, "recycle_mb": None, "log_mb": 1.0}
    del plan["engine_switch_at"]
    row = next(row for row in plan["flags"] if row["flag"] == "nan_guard")
    row["requested"] = row["effective"] = True
    plan["flags"].append({**row, "flag": "engine_switch_at", "requested": None, "effective": 512})
    plan["flags"].append({**row, "flag": "checkpoint_every_minutes", "requested": 5.0, "effective": 5.0})
    (stopped.folder / "plan.json").write_text(json.dumps(plan))
    kept = config_of(stopped.folder)
    assert (kept.nan_guard, kept.checkpoint_every, kept.env.result.win) == ("rollback", 256, "won")
    assert (kept.env.result.scores, kept.daemons.timeouts_s.start) == (("vp",), 60.0)
    found = changed_plan(stopped.folder, kept, [])
    assert found.engine_switch_at == 512
    assert found.row("nan_guard").effective == "rollback"
    assert (found.row("nan_guard").requested, found.row("checkpoint_every").effective) == ("rollback", 256)
    config["checkpoint_every"] = 0
    timed = next(row for row in plan["flags"] if row["flag"] == "checkpoint_every")
    timed["requested"] = timed["effective"] = 0
    (stopped.folder / "plan.json").write_text(json.dumps(plan))
    found = changed_plan(stopped.folder, config_of(stopped.folder), [])
    assert {found.config.checkpoint_every, found.row("checkpoint_every").requested} == {"5min"}
    assert found.row("checkpoint_every").effective == "5min"
    assert not {"nan_guard", "engine_switch_at", "env.name", "env.result.win"} & {*changes(stopped.folder, kept)}


def test_half_a_row_of_evaluations_is_left_out(stopped: Finished, fasttrain: RunCommand):
    file = stopped.folder / "evaluations.csv"
    whole = file.read_text().splitlines()
    file.write_text("\n".join([*whole[:1], "512,2.0,5"]))
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 0, done.err
    assert [row["env_steps"] for row in rows_of(file)] == ["512", "1024"]
    assert all(row["mean_reward"] for row in rows_of(file))


def test_without_a_whole_checkpoint_nothing_begins_from_scratch(stopped: Finished, fasttrain: RunCommand):
    for folder in (stopped.folder / "checkpoints").iterdir():
        (folder / "state.json").unlink()
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 2
    assert "no checkpoint to go on from: step_000000000768: state.json is missing" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "resume needs run=FOLDER"),
        (("run=nowhere",), "no plan.json there"),
        (("run={folder}", "algo=dqn"), "algo cannot change in a run that goes on (algo=maskable_ppo on "),
        (("run={folder}", "env.id=CartPole-v1"), "env.id cannot change"),
        (("run={folder}", "num_envs=16"), "num_envs cannot change"),
        (("run={folder}", "+profile=exact"), "profile cannot change"),
    ],
)
def test_what_cannot_be(arguments: tuple[str, ...], told: str, fasttrain: RunCommand, trained: RunCommand):
    done = trained(*SMALL, "total_timesteps=256")
    wrong = fasttrain("resume", *(text.format(folder=done.folder) for text in arguments))
    assert wrong.exit_code == 2
    assert told in wrong.err
    assert "Traceback" not in wrong.err


def test_a_checkpoint_of_another_run_is_refused(stopped: Finished, fasttrain: RunCommand, trained: RunCommand):
    other = trained(*SMALL, "num_envs=4", "total_timesteps=256").folder
    shutil.rmtree(stopped.folder / "checkpoints")
    shutil.copytree(other / "checkpoints", stopped.folder / "checkpoints")
    done = fasttrain("resume", f"run={stopped.folder}")
    assert done.exit_code == 2
    assert "the checkpoint is of another env or algorithm" in done.err


def test_an_env_with_hidden_randomness_begins_a_new_episode_and_says_so(
    fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hidden_walk.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Walk(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self): self.rng = np.random.default_rng()\n"
        "    def reset(self, seed=None, options=None):\n"
        "        super().reset(seed=seed); self.t = 0; self.x = np.zeros(1, np.float32); return self.x.copy(), {}\n"
        "    def step(self, action):\n"
        "        self.t += 1; self.x += action + self.rng.normal()\n"
        "        return self.x.copy(), 1.0, self.t == 100, False, {}\n"
    )
    done = fasttrain("+profile=speed", "env.entry_point=hidden_walk:Walk", "algo=ppo", "vec_env=dummy", "num_envs=4",
                     "algo.rollout_size=256", "batch_size=64", "total_timesteps=512", "checkpoint_every=256",
                     "eval.episodes=2", "checkup=off")  # fmt: skip
    shutil.rmtree(done.folder / "checkpoints" / "step_000000000512")
    again = fasttrain("resume", f"run={done.folder}")
    assert again.exit_code == 0, again.err
    assert "warning: 4 of 4 envs could not be brought back to where they were" in again.out


def wait_for(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("step_*")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_stopped_or_killed_and_resumed_equals_one_that_was_not(
    number: signal.Signals, fasttrain: RunCommand, trained: RunCommand, tmp_path: Path
):
    arguments = (*SMALL, "total_timesteps=32768", "checkpoint_every=2048", "checkpoint.keep=99")
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "fasttrain", *arguments, "report=false", f"hydra.run.dir={folder}"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(folder, process)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == (4 if number == signal.SIGTERM else -signal.SIGKILL), (out, err)
    if number == signal.SIGTERM:
        assert "stopped at" in out
        assert "by a signal" in out
        assert "steps since are dropped" in out
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["stopped_by"]) == ("stopped", "signal")
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        assert 0 <= summary["env_steps"] - int(newest.name.removeprefix("step_")) <= 8
    assert fasttrain("resume", f"run={folder}").exit_code == 0
    whole = trained(*arguments).folder
    last = [path / "checkpoints" / "step_000000032768" / "arrays.npz" for path in (folder, whole)]
    with np.load(last[0]) as found, np.load(last[1]) as wanted:
        assert set(found) == set(wanted)
        for name in wanted:
            assert np.array_equal(found[name], wanted[name]), name
    assert [row["return"] for row in rows_of(folder / "episodes.csv")] == [
        row["return"] for row in rows_of(whole / "episodes.csv")
    ]
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_noise_goes_on_where_it_was(num_envs: int, fasttrain: RunCommand):
    done = fasttrain("+profile=speed", "algo=td3", "algo.action_noise=ornstein-uhlenbeck_0.5", "env.id=Pendulum-v1",
                     f"num_envs={num_envs}", "vec_env=dummy", "warmup_steps=16", "algo.net_arch=[8]", "checkup=off",
                     "total_timesteps=60", "checkpoint_every=40", "eval.episodes=0")  # fmt: skip
    newest = done.folder / "checkpoints" / "step_000000000060"
    shutil.move(newest, done.folder / "whole")
    assert fasttrain("resume", f"run={done.folder}").exit_code == 0
    with np.load(newest / "arrays.npz") as found, np.load(done.folder / "whole" / "arrays.npz") as wanted:
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
