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
from fasttrain.spec.checks import EnvFacts
from messages import assert_says, wrong_inputs

ENV = """
import random, numpy as np
from plain_env import PlainEnv
class Walk(PlainEnv):
    x = 0.0
    def __init__(self, faults=()):
        self.faults = faults
    def reset(self, **more):
        super().reset(**more)
        self.x = random.random() if "unseeded" in self.faults else self.np_random.random()
        return self.seen(), {}
    def paid(self, action):
        if "raises" in self.faults and self.time == 5:
            raise RuntimeError("the board fell")
        self.x += action - 1
        return np.array([action, 0.0]) if "array" in self.faults else float(action)
    def seen(self):
        return np.zeros(9 if "shape" in self.faults else 2, np.float32) + self.x + (99 if "far" in self.faults else 0)
    def action_masks(self):
        return np.zeros(2, bool) if "empty" in self.faults and self.time == 4 else np.ones(2, bool)
"""
WALK = ("env.entry_point=walk:Walk",)
SMALL = (
    *WALK, "+profile=speed", "algo=ppo", "vec_env=dummy", "num_envs=2", "total_timesteps=200", "algo.rollout_size=100",
    "batch_size=50", "eval.episodes=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "walk.py").write_text(ENV)
    monkeypatch.setitem(check.LONG, "max_steps", 500)


def test_check_shows_costs_and_writes_them(fasttrain: RunCommand):
    done = fasttrain("check", *WALK).ok()
    assert "Checkup of env.entry_point=walk:Walk: " in done.out
    for row in ("build", "reset", "step", "action mask", "episode", "reward", "return", "info", "CPU time"):
        assert f"\n{row} " in done.out
    assert "10.0 steps, mean of 50" in done.out
    assert "\nnothing found\n" in done.out
    stored = done.json("checkup.json")
    assert (stored["schema"], stored["env"], stored["findings"]) == (1, "env.entry_point=walk:Walk", [])
    assert stored["costs"]["steps"] == 500
    assert stored["costs"]["has_masks"]
    assert stored["reward_range"] == [0.0, 1.0]
    assert not (done.folder / "model.zip").exists()
    fasttrain("check", "env.id=CartPole-v1").ok()  # masks are asked for only where the algorithm was chosen


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


@pytest.mark.parametrize("typed", wrong_inputs("envs that check cannot play"))
def test_what_check_cannot_play_is_wrong_input(fasttrain: RunCommand, typed: str):
    done = fasttrain("check", *typed.split())
    done.refused()
    assert_says("envs that check cannot play", typed, done.err)


def test_a_training_goes_on_after_warnings(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "env.kwargs.faults=[unseeded]").ok()
    lines = done.out.splitlines()
    assert lines[0].startswith("Checkup: 1 finding in ")
    assert lines[1].startswith("  warning unseeded_randomness: ")
    assert "checkup.json" in lines[2]
    assert lines[3] == "  the env offers action masks and algo=ppo ignores them: use algo=maskable_ppo"
    assert (done.folder / "model.zip").is_file()
    assert done.json("checkup.json")["findings"][0]["code"] == "unseeded_randomness"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["env.kwargs.faults=[array]"], "env.entry_point=walk:Walk: the checkup found errors that "
         "stop every training\n  error reward_not_scalar: "),
        (["env.kwargs.faults=[unseeded]", "checkup=strict"], "checkup=strict: 1 finding in env.entry_point=walk:Walk"),
    ],
)  # fmt: skip
def test_a_training_stops_before_it_begins(fasttrain: RunCommand, typed: list[str], told: str):
    done = fasttrain(*SMALL, *typed)
    done.refused(told)
    assert not (done.folder / "plan.json").exists()
    assert (done.folder / "checkup.json").is_file()


def looked(tmp_path: Path, *typed: str) -> tuple[ProbeResult | None, EnvFacts]:
    """What the checkup of a training measured, and what the plan is made of."""
    config = configured("+profile=speed", *WALK, "algo=ppo", "vec_env=auto", *typed)
    costs: list[ProbeResult | None] = []
    with survey_of(config, make_console()) as survey:

        def measure() -> ProbeResult | None:
            costs.append(run_checkup(config, tmp_path, make_console(), survey))
            return costs[0]

        facts = env_facts(config, survey, measure)
    return costs[0], facts


def test_few_lines_are_printed_and_all_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(check, "MOST_LINES", 1)
    looked(tmp_path, "env.kwargs.faults=[unseeded,far]")
    lines = capsys.readouterr().out.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("Checkup")) :]  # a slow start has a line
    assert len(lines) == 4
    assert lines[0].startswith("Checkup: 2 findings in ")
    assert lines[2].startswith("  (1 more in ")


def test_what_the_checkup_measured_is_not_measured_again_and_an_error_is_no_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with monkeypatch.context() as patched:
        patched.setattr(Survey, "costs", lambda _: pytest.fail("played twice"))
        costs, facts = looked(tmp_path)
    assert costs is not None
    assert (facts.step_s, facts.cpu_share) == (costs.step_s + costs.mask_s, costs.cpu_share)
    assert "Checkup: nothing found in " in capsys.readouterr().out
    with pytest.raises(EnvSpecError, match="the board fell"):
        looked(tmp_path, "env.kwargs.faults=[raises]")


def test_observations_that_no_algorithm_reads_are_refused_whatever_the_algorithm(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "nested.py").write_text(
        "from walk import Walk, np\nfrom gymnasium import spaces\n"
        "class Nested(Walk):\n"
        "    observation_space = spaces.Dict({'x': spaces.Dict({'y': spaces.Box(-9, 9, (2,), np.float32)})})\n"
        "    def seen(self):\n        return {'x': {'y': super().seen()}}\n"
    )
    told = ("under the key 'x' of its observation", "add gymnasium.wrappers:FlattenObservation to env.wrappers")
    fasttrain("check", "env.entry_point=nested:Nested").refused(*told)
    flat = "env.wrappers=[gymnasium.wrappers:FlattenObservation]"
    assert "nothing found" in fasttrain("check", "env.entry_point=nested:Nested", flat).ok().out
