from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import stable_baselines3
import torch

from conftest import Finished, RunCommand
from fasttrain.runs.models import read_model_file
from fasttrain.saving.archives import read_tensors
from messages import assert_says, wrong_inputs

BASE = ("+profile=speed", "algo=ppo", "env.entry_point=toys:Corridor", "vec_env=dummy", "num_envs=4", "batch_size=64",
        "algo.rollout_size=128", "total_timesteps=128", "eval.episodes=2", "checkup=off",
        "report=false", "seed=7")  # fmt: skip
SMALL = ("algo.net_arch=[8]",)
STILL = ("algo.learning_rate=1e-30",)  # changes no weight


def weights(run: Finished) -> dict[str, torch.Tensor]:
    return read_model_file(run.folder / "model.zip")[1]


@pytest.fixture
def first(trained: RunCommand) -> Finished:
    return trained(*BASE, *SMALL, "total_timesteps=512", "env.normalize=[obs]")


@pytest.mark.parametrize("updates", ["fused_update=on", "fused_update=off", "engine=stock"])
def test_the_weights_are_taken(updates: str, first: Finished, fasttrain: RunCommand) -> None:
    run = fasttrain(*BASE, *SMALL, *STILL, updates, f"init_from={first.folder}").ok()
    assert "init_from: 8 of the 8 tensors of the policy come from" in run.out
    for name, tensor in weights(first).items():
        assert torch.allclose(weights(run)[name], tensor, atol=1e-20), name


CART = ("env.id=CartPole-v1", "env.entry_point=null", *SMALL, *STILL)


@pytest.fixture
def stock() -> stable_baselines3.PPO:
    return stable_baselines3.PPO("MlpPolicy", "CartPole-v1", seed=3, policy_kwargs={"net_arch": [8]}, device="cpu")


def test_a_zip_of_stock_sb3_serves(stock: stable_baselines3.PPO, tmp_path: Path, fasttrain: RunCommand) -> None:
    stock.save(tmp_path / "stock.zip")
    run = fasttrain(*BASE, *CART, f"init_from={tmp_path / 'stock.zip'}").ok()
    for name, tensor in stock.policy.state_dict().items():
        assert torch.allclose(weights(run)[name], tensor, atol=1e-20), name


def test_a_model_that_is_not_finite_is_refused(
    stock: stable_baselines3.PPO, tmp_path: Path, fasttrain: RunCommand
) -> None:
    with torch.no_grad():
        stock.policy.value_net.weight[0, 0] = float("nan")
    stock.save(tmp_path / "nan.zip")
    fasttrain(*BASE, *CART, f"init_from={tmp_path / 'nan.zip'}").refused("are not finite (value_net.weight)")


def test_what_does_not_fit_stays_fresh_and_is_named(first: Finished, fasttrain: RunCommand) -> None:
    wider = (*BASE, *STILL, "algo.net_arch={pi: [8], vf: [16]}")
    fresh, run = fasttrain(*wider), fasttrain(*wider, f"init_from={first.folder}")
    assert "Not taken: mlp_extractor.value_net.0.weight is (8, 3) there, (16, 3) here" in run.out
    kept = [name for name in weights(run) if "value" in name and name != "value_net.bias"]
    assert len(kept) == 3
    for name, tensor in weights(run).items():
        wanted = weights(fresh) if name in kept else weights(first)
        assert torch.allclose(tensor, wanted[name], atol=1e-20), name


def test_optimizer_and_statistics_are_taken_where_they_are_asked_for(first: Finished, fasttrain: RunCommand) -> None:
    same = (*BASE, *SMALL, *STILL, "env.normalize=[obs]", f"init_from={first.folder}")

    def moments(run: Finished) -> Any:
        with zipfile.ZipFile(run.folder / "model.zip") as archive:
            state = read_tensors(archive.read("policy.optimizer.pth"), "optimizer")["state"]
        return state[0]["step"]

    without, whole = fasttrain(*same), fasttrain(*same, "init_from_also=[optimizer,statistics]")
    assert "env.normalize begins with new statistics" in without.out
    assert moments(whole) - moments(without) == moments(first)
    assert first.json("summary.json")["env_steps"] == 512


@pytest.mark.parametrize("typed", wrong_inputs("models to begin with"))
def test_what_cannot_be_taken_is_refused(typed: str, first: Finished, fasttrain: RunCommand) -> None:
    folder = str(first.folder)
    done = fasttrain(*BASE, *SMALL, *typed.replace("FOLDER", folder).split())
    done.refused()
    assert_says("models to begin with", typed, done.err.replace(folder, "FOLDER"))


def test_a_file_that_is_no_model_is_refused_before_any_env_starts(
    tmp_path: Path, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half.zip").write_bytes(b"PK\3\4 cut off")
    monkeypatch.setattr("fasttrain.runs.train.survey_of", lambda *_: pytest.fail("an env was built"))
    fasttrain(*BASE, *SMALL, f"init_from={tmp_path / 'half.zip'}").refused("half.zip cannot be read: it is no zip file")


def test_another_algorithms_network_fits_nowhere(first: Finished, fasttrain: RunCommand) -> None:
    dqn = ("algo=dqn", "env.entry_point=toys:Corridor", "vec_env=dummy", "engine=fast", "total_timesteps=100")
    fasttrain(*dqn, f"init_from={first.folder}", "eval.episodes=0").refused("no part of it fits this run's network")
