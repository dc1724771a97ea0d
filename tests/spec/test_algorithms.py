"""One entry an algorithm: the table of arguments is the installed classes', and every stock algorithm really runs."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.save_util import load_from_zip_file

from conftest import Finished, RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, TIERS, having
from fasttrain.spec.config import ALGO_CLASSES

ROOT = Path(__file__).resolve().parents[2]
STOCK_ONLY = [name for name, spec in ALGORITHMS.items() if not spec.has_fast]
SMALL = ("eval.episodes=2", "vec_env=dummy", "checkup=off", "live=off")


def less(algo: str) -> tuple[str, ...]:
    """Of each kind of algorithm, so that `steps_of` hold some updates."""
    spec = ALGORITHMS[algo]
    if spec.off_policy:
        return (
            "algo.net_arch=[16]",
            "num_envs=2",
            "warmup_steps=50",
            "batch_size=16",
            "updates_per_step=1",
            "algo.buffer_size=500",
        )
    if spec.on_policy:
        epochs = ["algo.n_epochs=2"] if "n_epochs" in spec.arguments() else []
        return (
            "algo.net_arch=[16]",
            "num_envs=2",
            "algo.rollout_size=64",
            *(["batch_size=16"] if spec.minibatches else []),
            *epochs,
        )
    return ("algo.n_delta=2",)


def steps_of(algo: str) -> int:
    """More where an update takes whole episodes."""
    return 200 if ALGORITHMS[algo].on_policy or ALGORITHMS[algo].off_policy else 600


def env_of(algo: str) -> str:
    return "Pendulum-v1" if ALGORITHMS[algo].actions == ("Box",) else "CartPole-v1"


def train(fasttrain: RunCommand, algo: str, *more: str) -> Finished:
    small = (f"total_timesteps={steps_of(algo)}", *SMALL, *less(algo))
    done = fasttrain("+profile=speed", f"algo={algo}", f"env.id={env_of(algo)}", *small, *more)
    assert done.exit_code == 0, done.err
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
    stock = {name: default for name, (_, default) in spec.arguments().items()}
    own = spec.tiers["baseline"]
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
def test_a_stock_algorithm_trains_is_timed_and_loads_by_its_stock_class(fasttrain: RunCommand, algo: str):
    done = train(fasttrain, algo)
    summary, plan = done.json("summary.json"), done.json("plan.json")
    assert summary["env_steps"] >= steps_of(algo)
    assert summary["updates"] > 0
    assert summary["quality"]["episodes"] == 2
    effective = {row["flag"]: row["effective"] for row in plan["flags"]}
    assert effective["engine"] == "stock"
    perf = summary["perf"]
    spec = ALGORITHMS[algo]
    for phase in ("action_ms", "env_step_ms", *(["optim_ms"] if spec.on_policy or spec.off_policy else [])):
        assert perf[phase] > 0, (phase, perf)
    stock: Any = ALGORITHMS[algo].load(fast=False)
    model = stock.load(done.folder / "model.zip", device="cpu")
    env = gymnasium.make(env_of(algo))
    rewards, _ = evaluate_policy(model, env, n_eval_episodes=1, warn=False)
    assert rewards == rewards
    again = fasttrain("eval", f"run={done.folder}", "eval.episodes=2")
    assert again.exit_code == 0, again.err


@pytest.mark.parametrize("algo", ["a2c", "qrdqn", "tqc", "ars"])
def test_a_stock_algorithm_resumes_to_the_bits_of_one_left_alone(fasttrain: RunCommand, algo: str):
    steps = steps_of(algo)
    whole = train(fasttrain, algo, f"checkpoint_every={steps}")
    part = train(fasttrain, algo, f"checkpoint_every={steps // 2}", f"total_timesteps={steps // 2}")
    resumed = fasttrain("resume", f"run={part.folder}", f"total_timesteps={steps}")
    assert resumed.exit_code == 0, resumed.err
    folders = (whole.folder, part.folder)
    first, second = (load_from_zip_file(folder / "model.zip", device="cpu")[1] for folder in folders)
    for part_name, state in first.items():
        if part_name.endswith("optimizer"):
            continue
        for name, tensor in state.items():
            assert (tensor == second[part_name][name]).all(), (part_name, name)


def test_continuous_algorithms_update_once_per_transition_unless_told_otherwise(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=speed", "algo=sac", "env.id=Pendulum-v1", *SMALL, "num_envs=4", "total_timesteps=400", "batch_size=8"
    )
    rows = {row["flag"]: row for row in done.json("plan.json")["flags"]}
    assert (rows["updates_per_step"]["effective"], rows["warmup_steps"]["effective"]) == (4, 100)
    assert rows["updates_per_step"]["reason"] == "sac's own"
    assert done.json("summary.json")["updates"] == pytest.approx(300, abs=8)


def test_spaces_that_do_not_suit_are_told(fasttrain: RunCommand):
    done = fasttrain("algo=sac", "env.id=CartPole-v1")
    assert done.exit_code == 2
    assert "has Discrete(2) actions, algo=sac needs Box; take another algo: maskable_ppo, ppo," in done.err


def test_keys_of_other_algorithms_are_told():
    with pytest.raises(ConfigError, match=r"algo.double_q means nothing for algo=sac \(only for dqn\)"):
        configured("algo=sac", "env.id=Pendulum-v1", "++algo.double_q=true")
    assert configured("algo=sac", "env.id=Pendulum-v1", "algo.ent_coef=auto_0.1").algo.ent_coef == "auto_0.1"
    assert configured("algo=sac", "env.id=Pendulum-v1", "algo.ent_coef=0.1").algo.ent_coef == 0.1
    assert set(having("has_fast")) == {"ppo", "maskable_ppo", "recurrent_ppo", "maskable_recurrent_ppo", "dqn", "sac"}
