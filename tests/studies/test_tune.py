"""`fasttrain tune`: rungs, limits, the verdict beside the profile, what is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from conftest import RunCommand, configured
from fasttrain.studies.tune import changes, default_space, is_legal, legal_points, update_ratio
from study_toys import Fakes, summary

PPO = {"num_envs": 256, "vec_env": "native", "batch_size": 1024, "torch_threads": 1, "fused_update": "on",
       "workers": "not applicable", "use_amp": "off", "use_compile": "off",
       "updates_per_step": "not applicable"}  # fmt: skip
DQN = {**PPO, "num_envs": 12, "vec_env": "shared", "workers": 2, "batch_size": 256, "updates_per_step": 10}


def plan_of(effective: Mapping[str, Any]) -> dict[str, Any]:
    return {"flags": [{"flag": name, "effective": value} for name, value in effective.items()]}


PLAN = plan_of(PPO)
TWO = ("tune", "+profile=speed", "tune.space={num_envs:[256,512]}", "report=false")
SPACE = "tune.space={num_envs:[64,256,512],batch_size:[512,1024,2048]}"


def rate(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
    """512 envs are 1.5 times as fast; smaller batches slower."""
    speed = 1000.0 * {"64": 0.5, "512": 1.5}.get(typed.get("num_envs", ""), 1.0)
    return summary((speed * 0.8 if typed.get("batch_size") == "512" else speed) + seed)


def test_the_fastest_legal_setting_wins_beside_the_profile(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(rate, PLAN).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", SPACE, "report=false").ok()
    study = done.json("study.json")
    assert study["best"] == {"num_envs": 512}
    assert study["result"]["value"] == pytest.approx(1.5, abs=0.001)
    labels = [label for label, _ in fakes.ran]
    first = [label for label in labels if label.endswith("(3 s)")]
    assert first[0] == "profile (3 s)"
    assert len(first) == len(set(first)) == 6, "the profile and five others; batches of 2048 update too rarely"
    assert not any("batch_size=2048" in label for label in labels)
    assert sum(label.endswith("(8 s)") for label in labels) == 2
    finals = [label for label in labels if label.endswith("(16 s)")]
    assert len(finals) == 9, "three turns of the profile and two others"
    assert finals[:3].count("profile (16 s)") == 1
    text = (done.folder / "conf" / "profile" / "tuned.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert (values["num_envs"], values["batch_size"]) == (512, 1024)
    assert "num_envs: 512 # best steps/s by value: 512 1,500, 64 500" in text
    assert "num_envs changes what is learned: check the learning by fasttrain compare before you rely on it" in done.out


def test_where_nothing_is_clearly_faster_the_profile_stays(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(1000.0 + len(typed.get("num_envs", ""))), PLAN).use(monkeypatch)
    done = fasttrain(*TWO)
    assert "1.00× [1.00, 1.00] as fast as the profile, which stays" in done.out
    values = yaml.safe_load((done.folder / "conf" / "profile" / "tuned.yaml").read_text(encoding="utf-8"))
    assert values["num_envs"] == 256


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"memory_bytes": 3 * 2**30}, "refused: 3.0 GiB of memory, 2.0 are allowed"),
        ({"updates": 0}, "refused: it ended before its first update"),
        ({"exit_code": 1, "error": "boom"}, "failed"),
    ],
)
def test_what_breaks_a_limit_is_not_taken(fasttrain, monkeypatch, more, said):
    def hungry(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        if typed.get("num_envs") != "512":
            return rate(typed, seed)
        return {**rate(typed, seed), **more} if "exit_code" in more else summary(9999.0, **more)

    Fakes(hungry, PLAN).use(monkeypatch)
    monkeypatch.setattr("fasttrain.studies.tune.free_memory", lambda: 2.5 * 2**30)
    done = fasttrain(*TWO).ok()
    assert said in done.out
    assert done.json("study.json").get("best", {}) == {}


def test_what_was_typed_is_not_searched_and_a_profile_that_cannot_run_ends_it(fasttrain, monkeypatch):
    Fakes(rate, PLAN, stop_at=2).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", "num_envs=512", "fused_update=on", "report=false")
    assert "space: batch_size 512/1024/2048, torch_threads" in done.out
    Fakes(lambda typed, seed: {"exit_code": 1, "error": "no"}).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", "report=false")
    assert done.exit_code == 1
    assert "the profile itself could not be run" in done.out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["tune.space={num_env:[1,2]}"], "tune.space: unknown key 'num_env'; did you mean 'num_envs'"),
        (["tune.space={num_envs:[]}"], "tune.space: num_envs has no values to try"),
        (["tune.space={num_envs:[abc]}"], "tune.space: num_envs=abc: expected a whole number"),
        (["tune.space={algo.gamma:[x]}"], "tune.space: algo.gamma=x: expected a number"),
        (["seeds=3"], "seeds=3 has no effect with tune; a single run takes seed="),
    ],
)
def test_wrong_input(fasttrain: RunCommand, typed: list[str], message: str):
    fasttrain("tune", "+profile=speed", *typed).refused(message)


# --- the space around a plan, and which points are worth a trial


def test_the_space_lies_around_the_plan():
    assert default_space(configured("+profile=speed"), plan_of(PPO), cores=4) == {
        "num_envs": [64, 128, 256, 512, 1024],
        "batch_size": [512, 1024, 2048],
        "torch_threads": [1, 4],
        "fused_update": ["on", "off"],
    }
    space = default_space(configured("+profile=speed", "algo=dqn"), plan_of(DQN), cores=4)
    assert space["updates_per_step"] == [5, 10, 20]
    assert space["workers"] == [2, 4, 8]
    assert space["num_envs"] == [3, 6, 12, 24, 48]


def test_rounds_of_episodes_stay_with_one_env():
    config = configured("algo=sac", "env.id=Pendulum-v1", "num_envs=1", "algo.train_freq=[1,episode]")
    space = default_space(config, plan_of({**DQN, "num_envs": 1, "vec_env": "dummy", "updates_per_step": -1}), cores=4)
    assert not {"num_envs", "updates_per_step"} & {*space}


def test_update_ratios():
    ppo, dqn = configured("+profile=speed"), configured("+profile=speed", "algo=dqn")
    assert update_ratio(ppo, {}, PPO) == 4 * 16 / 16384
    assert update_ratio(ppo, {"batch_size": 512}, PPO) == 4 * 32 / 16384
    assert update_ratio(ppo, {"algo.n_epochs": 2}, PPO) == 2 * 16 / 16384
    assert update_ratio(dqn, {"num_envs": 20}, DQN) == 0.5
    rounds = configured("+profile=speed", "algo=dqn", "algo.train_freq=4")
    assert update_ratio(rounds, {"num_envs": 20}, DQN) == 0.125
    assert update_ratio(rounds, {"updates_per_step": -1}, DQN) == 1.0


@pytest.mark.parametrize(
    ("point", "legal"),
    [
        ({"num_envs": 1024}, True),
        ({"batch_size": 2048}, False),  # half as many updates
        ({"num_envs": 32768}, False),  # more than the rollout
        ({"fused_update": "on", "use_amp": "on"}, False),
        ({"fused_update": "off", "use_amp": "on"}, True),
        ({"num_envs": 4, "workers": 8}, False),
    ],
)
def test_points_that_are_worth_a_trial(point: dict[str, Any], legal: bool):
    assert is_legal(configured("+profile=speed"), point, PPO, least_ratio=0.00390625) == legal


def test_the_point_that_changes_nothing_is_left_out():
    space = {"num_envs": [128, 256], "batch_size": [512, 1024]}
    assert len(legal_points(configured("+profile=speed"), space, PPO, 0.00390625)) == 3
    found = changes({"num_envs": 256, "batch_size": 512, "algo.gamma": 0.9}, PPO)
    assert found == {"batch_size": 512, "algo.gamma": 0.9}
