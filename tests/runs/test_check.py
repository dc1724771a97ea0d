"""`fasttrain check` and the checkup before a training: what is printed, written, refused. No test asserts a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RunCommand, configured
from fasttrain.envs.probe import ProbeResult
from fasttrain.errors import EnvSpecError
from fasttrain.runs import check
from fasttrain.runs.check import run_checkup
from fasttrain.runs.envs import env_facts, survey_of
from fasttrain.runs.survey import Survey
from fasttrain.runs.view import make_console

ENV = """
import random
import gymnasium as gym, numpy as np
class Walk(gym.Env):
    observation_space = gym.spaces.Box(-20, 20, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    def __init__(self, faults=()):
        self.faults = faults
        if "no masks" in faults:
            self.action_masks = None
            del self.action_masks
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.x = 0, random.random() if "unseeded" in self.faults else self.np_random.random()
        return self.observe(), {}
    def step(self, action):
        self.count += 1
        self.x += action - 1
        if "raises" in self.faults and self.count == 5:
            raise RuntimeError("the board fell")
        reward = np.array([action, 0.0]) if "array" in self.faults else float(action)
        return self.observe(), reward, self.count == 10, False, {}
    def observe(self):
        return np.zeros(9 if "shape" in self.faults else 2, np.float32) + self.x + (99 if "far" in self.faults else 0)
    def action_masks(self):
        return np.zeros(3, bool) if "empty" in self.faults and self.count == 4 else np.ones(3, bool)
"""
WALK = ("env.entry_point=walk:Walk",)
SMALL = (
    *WALK, "+profile=speed", "algo=ppo", "vec_env=dummy", "num_envs=2", "total_timesteps=200", "algo.rollout_size=100",
    "batch_size=50", "eval.episodes=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "walk.py").write_text(ENV)
    monkeypatch.setitem(check.LONG, "max_steps", 500)


def test_check_shows_costs_and_writes_them(fasttrain: RunCommand):
    done = fasttrain("check", *WALK)
    assert done.exit_code == 0, done.err
    assert "Checkup of env.entry_point=walk:Walk: " in done.out
    for row in ("build", "reset", "step", "action mask", "episode", "reward", "return", "info", "CPU time"):
        assert f"\n{row} " in done.out
    assert "10.0 steps, mean of 50" in done.out
    assert "\nnothing found\n" in done.out
    stored = done.json("checkup.json")
    assert (stored["schema"], stored["env"], stored["findings"]) == (1, "env.entry_point=walk:Walk", [])
    assert stored["costs"]["steps"] == 500
    assert stored["costs"]["has_masks"]
    assert stored["reward_range"] == [0.0, 2.0]
    assert not (done.folder / "model.zip").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "codes"),
    [
        (["env.kwargs.faults=[unseeded]"], 0, ["unseeded_randomness"]),
        (["env.kwargs.faults=[unseeded]", "checkup=strict"], 2, ["unseeded_randomness"]),
        (["env.kwargs.faults=[empty]"], 0, ["empty_mask"]),
        (["env.kwargs.faults=[unseeded,shape]"], 2, ["wrong_shape", "unseeded_randomness"]),
        (["checkup=strict"], 0, []),
    ],
)
def test_exit_codes_of_check(fasttrain: RunCommand, arguments: list[str], exit_code: int, codes: list[str]):
    done = fasttrain("check", *WALK, *arguments)
    assert done.exit_code == exit_code
    assert done.err == ""
    stored = done.json("checkup.json")["findings"]
    assert [finding["code"] for finding in stored] == codes
    for finding in stored:
        assert f"{finding['severity']} {finding['code']}: {finding['message']}; {finding['remedy']}" in done.out


def test_check_alone_looks_at_skull_king(fasttrain: RunCommand):
    done = fasttrain("check")
    assert done.exit_code == 0
    assert "Checkup of env.id=fasttrain/SkullKing-v0: " in done.out
    assert "nothing found" in done.out


def test_check_asks_for_masks_only_where_the_algorithm_was_chosen(fasttrain: RunCommand):
    assert fasttrain("check", "env.id=CartPole-v1").exit_code == 0
    refused = fasttrain("check", "env.id=CartPole-v1", "algo=maskable_ppo")
    assert refused.exit_code == 2
    assert "offers no action masks" in refused.err
    refused = fasttrain("check", "env.id=Pendulum-v1", "algo=dqn")
    assert refused.exit_code == 2
    assert "algo=dqn needs Discrete" in refused.err


def test_check_names_an_env_that_cannot_be_built(fasttrain: RunCommand):
    done = fasttrain("check", "env.id=CartPol-v1")
    assert done.exit_code == 2
    assert "did you mean 'CartPole-v" in done.err


def test_check_plays_no_envpool(fasttrain: RunCommand):
    done = fasttrain("check", "env.id=CartPole-v1", "env.backend=envpool")
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert "check plays one Gymnasium env" in done.err


@pytest.mark.parametrize("profile", ["exact", "balance", "speed", "debug"])
def test_profiles_warn_and_plain_runs_do_not_look(profile: str):
    assert configured(f"+profile={profile}").checkup == "warn"
    assert configured().checkup == configured("+profile=baseline").checkup == "off"
    assert configured(f"+profile={profile}", "checkup=off").checkup == "off"


def test_a_training_says_in_one_line_that_nothing_was_found(fasttrain: RunCommand):
    done = fasttrain(*SMALL)
    assert done.exit_code == 0, done.err
    assert done.out.splitlines()[0].startswith("Checkup: nothing found in ")
    assert done.json("checkup.json")["findings"] == []


def test_a_training_goes_on_after_warnings(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "env.kwargs.faults=[unseeded]")
    assert done.exit_code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Checkup: 1 finding in ")
    assert lines[1].startswith("  warning unseeded_randomness: ")
    assert "checkup.json" in lines[2]
    assert lines[3] == "  the env offers action masks and algo=ppo ignores them: take algo=maskable_ppo"
    assert (done.folder / "model.zip").is_file()
    assert done.json("checkup.json")["findings"][0]["code"] == "unseeded_randomness"


def test_what_no_training_takes_stops_without_strict_too(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "env.kwargs.faults=[array]")
    assert done.exit_code == 2
    first, second = done.err.strip().splitlines()
    assert first == "fasttrain: error: env.entry_point=walk:Walk: no training takes what the checkup found"
    assert second.startswith("  error reward_not_scalar: ")
    assert "return one number" in second


def test_strict_stops_before_anything_is_trained(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "env.kwargs.faults=[unseeded]", "checkup=strict")
    assert done.exit_code == 2
    assert "checkup=strict: 1 finding in env.entry_point=walk:Walk" in done.err
    assert "\n  warning unseeded_randomness: " in done.err
    assert not (done.folder / "plan.json").exists()
    assert (done.folder / "checkup.json").is_file()


def test_off_looks_at_nothing(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "checkup=off")
    assert done.exit_code == 0, done.err
    assert "Checkup" not in done.out
    assert not (done.folder / "checkup.json").exists()


def test_few_lines_are_printed_and_all_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(check, "MOST_LINES", 1)
    monkeypatch.chdir(tmp_path)
    config = configured("+profile=speed", *WALK, "algo=ppo", "env.kwargs.faults=[unseeded,far]")
    with survey_of(config, make_console()) as survey:
        run_checkup(config, tmp_path, make_console(), survey)
    lines = capsys.readouterr().out.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("Checkup")) :]  # a slow start has a line
    assert len(lines) == 4
    assert lines[0].startswith("Checkup: 2 findings in ")
    assert lines[2].startswith("  (1 more in ")


def test_what_the_checkup_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Survey, "costs", lambda _: pytest.fail("played twice"))
    config = configured("+profile=speed", *WALK, "algo=ppo", "vec_env=auto")
    costs: list[ProbeResult | None] = []
    with survey_of(config, make_console()) as survey:

        def measure() -> ProbeResult | None:
            costs.append(run_checkup(config, tmp_path, make_console(), survey))
            return costs[0]

        facts = env_facts(config, survey, measure)
    assert costs[0] is not None
    assert facts.step_s == costs[0].step_s + costs[0].mask_s
    assert facts.cpu_share == costs[0].cpu_share


def test_what_an_erring_env_cost_is_no_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = configured("+profile=speed", *WALK, "algo=ppo", "vec_env=auto", "env.kwargs.faults=[raises]")
    with survey_of(config, make_console()) as survey:
        assert run_checkup(config, tmp_path, make_console(), survey) is None
    with pytest.raises(EnvSpecError, match="the board fell"):
        env_facts(config)


def test_a_reset_of_another_form_is_told_the_right_one(fasttrain: RunCommand, tmp_path: Path):
    reset = "def reset(self, seed=None, options=None): return zeros(3)"
    text = f"from walk import Walk\nfrom numpy import zeros\n\nclass Old(Walk):\n    {reset}\n"
    (tmp_path / "old.py").write_text(text + "    def action_masks(self): return zeros(3, bool)\n")
    done = fasttrain("+profile=speed", "env.entry_point=old:Old", "algo=ppo", "vec_env=dummy")
    assert done.exit_code == 2
    assert done.err.strip().endswith("; reset(self, *, seed=None, options=None) must return (observation, info)")
