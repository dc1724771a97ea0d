"""The env in a process of its own: what it does to that process is named, and its env goes on into the training."""

from __future__ import annotations

import dataclasses
import json
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
import os
import gymnasium as gym, numpy as np
class Counted(gym.Env):
    observation_space = gym.spaces.Box(-20, 20, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    def __init__(self, forgets=True):
        self.forgets, self.episodes = forgets, 0
        with open("builds", "a") as file:
            print(os.getpid(), file=file)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.count, self.x = 0, self.np_random.random() + (0 if self.forgets else self.episodes)
        return self.observe(), {}
    def step(self, action):
        self.count += 1
        self.x += int(action) - 1
        return self.observe(), float(action), self.count == 10, False, {}
    def observe(self):
        return np.zeros(2, np.float32) + self.x
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


def quiet() -> Console:
    return Console(quiet=True)


def test_a_training_with_workers_builds_its_envs_and_no_more(fasttrain: RunCommand):
    done = fasttrain(*SHARED, "checkup=off")
    assert done.exit_code == 0, done.err
    assert builds() == [2, 2, 2], "two workers' and, in the trainer, those to evaluate in"


def test_the_env_of_a_checkup_goes_on_into_the_training_where_it_is_dear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survey, "DEAR_S", 0.0)
    config = configured(*SHARED)
    with survey_of(config, quiet()) as looking:
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
            for mine, theirs in zip(env.step([step % 3] * 4)[:3], fresh.step([step % 3] * 4)[:3], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        env.close()
    assert builds() == [2, 2, 4], "two workers' and, here, those to compare with"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["vec_env=dummy"], "vec_env=dummy plays it in another process than the checkup"),
        (
            ["vec_env=shared", "env.kwargs.forgets=false"],
            "the same seed gave another trajectory, first the observation",
        ),
        (["vec_env=shared", "deterministic=true"], "deterministic=true takes none that was played"),
        (["vec_env=shared", "env.max_episode_steps=7"], "with other arguments"),
    ],
)
def test_a_dear_env_that_is_built_again_says_why(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(survey, "DEAR_S", 0.0)
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


def test_a_quick_env_is_built_again_without_a_word(capsys: pytest.CaptureFixture[str]):
    config = configured(*SHARED)
    with survey_of(config, make_console()) as looking:
        assert looking.costs().steps > 0
        scout = looking.first_worker(config, env_spec(config))
        assert scout is not None
        assert not scout.keeps
    assert capsys.readouterr().out == ""


def test_without_play_and_workers_there_is_no_process():
    facts = env_facts(configured(*COUNTED, "vec_env=dummy"))
    assert facts.step_s is None
    assert builds() == [1]
    assert Path("builds").read_text() == f"{os.getpid()}\n"


def test_spaces_of_the_users_own_class_come_back(tmp_path: Path):
    (tmp_path / "spaced.py").write_text(
        "import gymnasium as gym\nfrom counted import Counted\ndef mine():\n"
        "    class Mine(gym.spaces.Discrete): pass\n    return Mine(3)\n"
        "class Spaced(Counted):\n    action_space = mine()\n"
    )
    with Survey(EnvSpec(entry_point="spaced:Spaced", use_masks=False), 60.0, quiet()) as looking:
        assert type(looking.build().action_space).__name__ == "Mine"


def test_a_fault_of_ours_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch):
    with Survey(EnvSpec(entry_point="counted:Counted", use_masks=False), 60.0, quiet()) as looking:
        monkeypatch.setattr(survey, "Build", lambda spec: divmod)  # nothing that a worker can call
        with pytest.raises(EnvError, match="TypeError") as caught:
            looking.build()
        assert not isinstance(caught.value, EnvSpecError)


def test_an_env_that_is_no_more_stays_in_the_folder(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "leaving.py").write_text(
        "import os\nfrom counted import Counted\nclass Leaving(Counted):\n"
        "    def reset(self, **more):\n        os._exit(3)\n"
    )
    done = fasttrain("+profile=speed", "env.entry_point=leaving:Leaving", "algo=ppo", "vec_env=dummy")
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert "env.entry_point=leaving:Leaving ends the process with code 3 in reset of seed 20260101" in done.err
    (finding,) = json.loads((done.folder / "checkup.json").read_text())["findings"]
    assert (finding["code"], finding["severity"]) == ("ends_process", "error")


def test_an_env_that_does_not_come_back_is_killed_and_named(tmp_path: Path):
    (tmp_path / "sleeping.py").write_text(
        "import time\nfrom counted import Counted\nclass Sleeping(Counted):\n"
        "    def step(self, action):\n        time.sleep(600)\n"
    )
    before = processes_left()
    with (
        Survey(EnvSpec(entry_point="sleeping:Sleeping", use_masks=False), 0.5, quiet()) as looking,
        pytest.raises(BrokenEnvError, match="hangs in step 1 of seed 20260101: nothing came back for 0.5 s"),
    ):
        looking.checkup({}, stays=False)
    assert [process for process in processes_left() if process not in before] == []


def test_a_compiled_game_is_looked_at_in_this_process():
    spec = EnvSpec(id="fasttrain/SkullKing-v0")
    with Survey(spec, 60.0, quiet(), here=True) as looking:
        assert looking.build().observation_space.shape == (248,)
        assert looking.checkup({"max_steps": 50}, False).steps >= 50
        assert looking._scout is None
        assert looking._kept
    assert not looking._kept


@pytest.mark.parametrize(("name", "told"), [("NormalizeObservation", True), ("RecordEpisodeStatistics", False)])
def test_a_wrapper_with_running_statistics_of_its_own_is_told(name: str, told: bool):
    console = Console(record=True, width=200, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    Survey(EnvSpec(id="CartPole-v1", wrappers=(f"gymnasium.wrappers:{name}",)), 10.0, console).build_here()
    said = console.export_text()
    console.file.close()
    assert (f"warning: {name} in env.wrappers: its running statistics are each env's own" in said) == told
