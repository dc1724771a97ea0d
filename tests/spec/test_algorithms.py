"""One entry an algorithm: the table of arguments is the installed classes', and every stock algorithm really runs."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from stable_baselines3.common.save_util import load_from_zip_file

from conftest import Finished, RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.native import GameSpec
from fasttrain.spec.algorithms import ALGORITHMS, TIERS, algorithms_with
from fasttrain.spec.config import ALGO_CLASSES

ROOT = Path(__file__).resolve().parents[2]
RESUMED = ("a2c", "qrdqn", "tqc", "ars")
STOCK_ONLY = [name for name, spec in ALGORITHMS.items() if not spec.fast]
SMALL = ("eval.episodes=1", "vec_env=dummy", "checkup=off", "live=off", "report=false")


def less(algo: str) -> tuple[str, ...]:
    """Of each kind of algorithm, so that `steps_of` hold some updates."""
    spec = ALGORITHMS[algo]
    if spec.off_policy:
        return ("algo.net_arch=[16]", "num_envs=2", "warmup_steps=10", "batch_size=16", "updates_per_step=1",
                "algo.buffer_size=500")  # fmt: skip
    if spec.on_policy:
        more = ["algo.n_epochs=2"] * ("n_epochs" in spec.arguments()) + ["batch_size=16"] * spec.minibatches
        return ("algo.net_arch=[16]", "num_envs=2", "algo.rollout_size=32", *more)
    return ("algo.n_delta=2",)


def steps_of(algo: str) -> int:
    """More where an update takes whole episodes."""
    spec = ALGORITHMS[algo]
    return 64 if spec.on_policy else 40 if spec.off_policy else 600


def env_of(algo: str) -> str:
    return "Pendulum-v1" if ALGORITHMS[algo].actions == ("Box",) else "CartPole-v1"


def train(fasttrain: RunCommand, algo: str, *more: str) -> Finished:
    small = (f"total_timesteps={steps_of(algo)}", *SMALL, *less(algo))
    done = fasttrain("+profile=speed", f"algo={algo}", f"env.id={env_of(algo)}", *small, *more).ok()
    return done


def test_the_table_of_arguments_is_that_of_the_installed_classes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script: Any = importlib.import_module("stock_arguments")
    assert json.loads(script.FILE.read_text(encoding="utf-8")) == script.table()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_defaults_are_those_of_the_stock_class(algo: str):
    spec, config = ALGORITHMS[algo], configured(f"algo={algo}", f"env.id={env_of(algo)}")
    for name, (_, default) in spec.arguments().items():
        ours = ("n_steps", "train_freq", *spec.tiers["baseline"])
        if name in spec.keys() and name not in ours:  # noqa: SIM118
            assert getattr(config.algo, name) == default, name
    stock, own = {name: default for name, (_, default) in spec.arguments().items()}, spec.tiers["baseline"]
    assert own["learning_rate"] == stock["learning_rate"]
    if spec.on_policy:
        assert own["rollout_size"] == 8 * stock["n_steps"]
    assert isinstance(config.algo, ALGO_CLASSES[algo])
    assert set(spec.tiers) == set(TIERS)


def test_no_place_compares_with_an_algorithms_name():
    names = "|".join(ALGORITHMS)
    compared = re.compile(rf"""(?:==|!=|\bin\b) *[(\[{{]?["'](?:{names})["']|["'](?:{names})["'] *(?:==|!=|\bin\b)""")
    assert compared.search('if algo == "dqn":')
    assert compared.search('"ppo" in names')
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if compared.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("algo", STOCK_ONLY)
def test_a_stock_algorithm_trains_is_timed_loads_by_its_stock_class_and_resumes(fasttrain: RunCommand, algo: str):
    steps, spec = steps_of(algo), ALGORITHMS[algo]
    done = train(fasttrain, algo, f"checkpoint_every={steps}")
    summary, plan = done.json("summary.json"), done.json("plan.json")
    assert summary["env_steps"] >= steps
    assert summary["updates"] > 0
    assert summary["quality"]["episodes"] == 1
    assert {row["flag"]: row["effective"] for row in plan["flags"]}["engine"] == "stock"
    phases = ("action_ms", "env_step_ms", *(["optim_ms"] if spec.on_policy or spec.off_policy else []))
    assert all(summary["perf"][phase] > 0 for phase in phases), summary["perf"]
    stock: Any = spec.load(fast=False)
    model = stock.load(done.folder / "model.zip", device="cpu")
    model.predict(gymnasium.make(env_of(algo)).reset()[0])
    if algo not in RESUMED:
        return
    part = train(fasttrain, algo, f"checkpoint_every={steps // 2}", f"total_timesteps={steps // 2}", "eval.episodes=0")
    fasttrain("resume", f"run={part.folder}", f"total_timesteps={steps}").ok()
    first, second = (load_from_zip_file(run.folder / "model.zip", device="cpu")[1] for run in (done, part))
    for part_name, state in first.items():
        for name, tensor in state.items() if not part_name.endswith("optimizer") else ():
            assert (tensor == second[part_name][name]).all(), (part_name, name)


def test_spaces_that_do_not_suit_are_told(fasttrain: RunCommand):
    told = "has Discrete(2) actions, algo=sac needs Box; use another algo: maskable_ppo, ppo,"
    fasttrain("algo=sac", "env.id=CartPole-v1").refused(told)


def test_keys_of_other_algorithms_are_told():
    with pytest.raises(ConfigError, match=r"algo.double_q has no effect with algo=sac \(only for dqn\)"):
        configured("algo=sac", "env.id=Pendulum-v1", "++algo.double_q=true")
    assert configured("algo=sac", "env.id=Pendulum-v1", "algo.ent_coef=auto_0.1").algo.ent_coef == "auto_0.1"
    assert configured("algo=sac", "env.id=Pendulum-v1", "algo.ent_coef=0.1").algo.ent_coef == 0.1
    assert set(algorithms_with("fast")) == {
        "ppo",
        "maskable_ppo",
        "recurrent_ppo",
        "maskable_recurrent_ppo",
        "dqn",
        "sac",
    }


# --- what a game says


GAME = GameSpec()
TEXTS = {"num_envs": 2, "speed": {"num_envs": 4}, "ppo": {"speed": {"num_envs": 8}}, "eval_episodes": {"ppo": 9}}


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `own` what the game of these tests declares."""
    return lambda own: monkeypatch.setattr("test_algorithms.GAME", GameSpec(own=own))


def test_what_a_game_says_of_an_algorithm_or_a_tier_goes_before_the_rest(declare: Any):
    declare(TEXTS)
    start = ("env.id=CartPole-v1", "env.game=test_algorithms:GAME")
    found = [
        configured(*start, f"tier={tier}", f"algo={algo}") for tier in ("balance", "speed") for algo in ("a2c", "ppo")
    ]
    assert [config.own.num_envs for config in found] == [2, 2, 4, 8]
    assert [config.eval.episodes for config in found] == [100, 9, 100, 9]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"ppo": {"speed": {"batch_size": 1}}}, "^GameSpec.own.batch_size=1: must be at least 2$"),
        ({"num_envs": {"speed": 0}}, "^GameSpec.own.num_envs=0: must be at least 1$"),
        ({"ppo": {"speed": {"n_epochs": 0.5}}}, "^GameSpec.own.n_epochs=0.5: expected a whole"),
        ({"total_timesteps": 0}, "^GameSpec.own.total_timesteps=0: must be at least 1$"),
        ({"eval_episode": 7}, "^GameSpec.own has no 'eval_episode'; did you mean 'eval_episodes'.; it may have total_"),
        ({"ppo": {"fast": {"n_epochs": 7}}}, "^GameSpec.own has no 'ppo.fast.n_epochs'; .*also by tier or algorithm"),
        ({"speed": 7}, "^GameSpec.own has no 'speed'; it may have total_timesteps, "),
        ({"num_envs": {"batch_size": 7}}, "^GameSpec.own has no 'num_envs.batch_size'; "),
    ],
)
def test_what_no_game_can_say(declare: Any, own: Mapping[str, Any], told: str):
    declare(own)
    with pytest.raises(ConfigError, match=told):
        configured("env.id=CartPole-v1", "env.game=test_algorithms:GAME", "algo=ppo", "+profile=speed")
