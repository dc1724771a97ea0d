from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from conftest import RunCommand, configured
from fasttrain.envs.make import EnvSpec
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.runs import survey
from fasttrain.runs.envs import build_vec_env, env_facts, env_spec, survey_of
from fasttrain.runs.survey import BrokenEnvError, Survey
from fasttrain.runs.view import make_console
from worker_toys import processes_left

ENV = """
import os, time
import gymnasium as gym
from plain_env import PlainEnv
class Counted(PlainEnv):
    x = episodes = 0
    def __init__(self, forgets=True):
        self.forgets = forgets
        with open("builds", "a") as file:
            print(os.getpid(), file=file)
    def reset(self, **more):
        super().reset(**more)
        self.episodes += 1
        self.x = self.np_random.random() + (0 if self.forgets else self.episodes)
        return self.seen(), {}
    def paid(self, action):
        return float(action)
    def seen(self):
        return super().seen() + self.x + self.time
class Leaving(Counted):
    def reset(self, **more):
        os._exit(0)
class Sleeping(Counted):
    def step(self, action):
        time.sleep(600)
def mine():
    class Mine(gym.spaces.Discrete): pass
    return Mine(3)
class Spaced(Counted):
    action_space = mine()
"""
COUNTED = ("env.entry_point=counted:Counted", "algo=ppo")
SHARED = (*COUNTED, "+profile=speed", "vec_env=shared", "num_envs=4", "num_workers=2", "schedule=lockstep",
          "fused_update=off", "total_timesteps=64", "algo.rollout_size=64", "batch_size=32", "eval.episodes=2",
          "eval_async=false", "report=false")  # fmt: skip


@pytest.fixture(autouse=True)
def _env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)


def builds() -> list[int]:
    """How many envs each process built, the first process first."""
    pids = Path("builds").read_text().split()
    return [pids.count(pid) for pid in dict.fromkeys(pids)]


def test_a_training_builds_its_envs_and_no_more(fasttrain: RunCommand):
    fasttrain(*SHARED, "checkup=off").ok()
    assert builds() == [2, 2, 2], "two workers' and, in the trainer, those to evaluate in"


def test_the_env_of_a_checkup_goes_on_into_the_training_where_it_is_dear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survey, "SLOW_BUILD_S", 0.0)
    config = configured(*SHARED)
    with survey_of(config, Console(quiet=True)) as looking:
        assert looking.build().build_s > 0
        assert looking.checkup({"max_seconds": 0.0}, stays=True).steps >= 2
        scout = looking.first_worker(config, env_spec(config))
        assert scout is not None
        if sys.platform == "linux":
            assert "libtorch" not in Path(f"/proc/{scout.pid}/maps").read_text()
        env = build_vec_env(config, 4, 0, scout=scout)
        fresh = build_vec_env(dataclasses.replace(config, vec_env="dummy"), 4, 0)
        assert env.get_attr("episodes")[0] > env.get_attr("episodes")[1] == 0
        np.testing.assert_array_equal(env.reset(), fresh.reset())
        for step in range(25):
            for mine, theirs in zip(env.step([step % 2] * 4)[:3], fresh.step([step % 2] * 4)[:3], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        env.close()
    assert builds() == [2, 2, 4], "two workers' and, here, those to compare with"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["vec_env=dummy"], "vec_env=dummy plays it in another process than the checkup"),
        (["vec_env=shared", "env.kwargs.forgets=false"], "the same seed gave another trajectory, first the ob"),
        (["vec_env=shared", "deterministic=true"], "deterministic=true takes no env that was played"),
        (["vec_env=shared", "env.max_episode_steps=7"], "the training's env has other arguments"),
    ],
)
def test_a_dear_env_that_is_built_again_says_why(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(survey, "SLOW_BUILD_S", 0.0)
    config = configured(*SHARED, *arguments)
    spec = env_spec(config)
    with Survey(dataclasses.replace(spec, max_episode_steps=None), 60.0, make_console()) as looking:
        looking.checkup({"max_seconds": 0.0}, stays=True)
        scout = looking.first_worker(config, spec)
        assert (scout is None) == (config.vec_env != "shared")
        assert scout is None or not scout.keeps
    said = capsys.readouterr().out
    assert "building the env takes 0.0 s, and it is built again for training: " in said
    assert why in said


def test_without_play_and_workers_there_is_no_process():
    facts = env_facts(configured(*COUNTED, "vec_env=dummy"))
    assert facts.step_s is None
    assert builds() == [1]
    assert Path("builds").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize(("fused_update", "known"), [("auto", True), ("off", False)])
def test_without_a_checkup_a_native_game_is_played_where_kernels_are_compared_on_it(fused_update: str, known: bool):
    config = configured("+profile=speed", "checkup=off", f"fused_update={fused_update}")
    with survey_of(config, Console(quiet=True)) as looking:
        zeros, illegal = (1 - share for share in env_facts(config, looking).density)
    assert (zeros > 0.5, illegal > 0.5) == (known, known)


def test_a_fault_of_ours_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch):
    with looked_at("Counted") as looking:
        monkeypatch.setattr(survey, "Build", lambda spec: divmod)  # nothing that a worker can call
        with pytest.raises(EnvError, match="TypeError") as caught:
            looking.build()
        assert not isinstance(caught.value, EnvSpecError)


def test_a_compiled_game_is_looked_at_in_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survey, "Scout", lambda: pytest.fail("a process was started"))
    spec = EnvSpec(id="fasttrain/SkullKing-v0")
    with Survey(spec, 60.0, Console(quiet=True), here=True) as looking:
        assert looking.build().observation_space.shape == (248,)
        assert looking.checkup({"max_steps": 50}, False).steps >= 50
    assert not looking._envs_here


def looked_at(name: str, timeout_s: float = 60.0) -> Survey:
    return Survey(EnvSpec(entry_point=f"counted:{name}", use_masks=False), timeout_s, Console(quiet=True))


def test_spaces_of_the_users_own_class_come_back():
    with looked_at("Spaced") as looking:
        assert type(looking.build().action_space).__name__ == "Mine"


def test_an_env_that_is_no_more_stays_in_the_folder(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", "env.entry_point=counted:Leaving", "algo=ppo", "vec_env=dummy")
    done.refused("env.entry_point=counted:Leaving ends the process with code 0 in reset of seed 20260101")
    (finding,) = done.json("checkup.json")["findings"]
    assert (finding["code"], finding["severity"]) == ("ends_process", "error")


def test_an_env_that_does_not_come_back_is_killed_and_named():
    before = processes_left()
    told = "hangs in step 1 of seed 20260101: nothing came back for 0.5 s"
    with looked_at("Sleeping", 0.5) as looking, pytest.raises(BrokenEnvError, match=told):
        looking.checkup({}, stays=False)
    assert [process for process in processes_left() if process not in before] == []


def test_a_wrapper_with_running_statistics_of_its_own_is_told(capsys: pytest.CaptureFixture[str]):
    for name in ("RecordEpisodeStatistics", "NormalizeObservation"):
        Survey(EnvSpec(id="CartPole-v1", wrappers=(f"gymnasium.wrappers:{name}",)), 10.0, make_console()).build_here()
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: NormalizeObservation in env.wrappers: each env has its own running statistics" in said
    assert said.count("running statistics") == 1
