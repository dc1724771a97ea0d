"""`fasttrain tune`: rungs, limits, the verdict beside the profile, what is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from conftest import RunCommand
from study_toys import Fakes, summary

PLAN = {
    "flags": [
        {"flag": name, "effective": value}
        for name, value in {
            "num_envs": 256, "vec_env": "native", "batch_size": 1024, "torch_threads": 1, "fused_update": "on",
            "workers": "not applicable", "use_amp": "off", "use_compile": "off",
            "updates_per_step": "not applicable",
        }.items()
    ]
}  # fmt: skip
SPACE = "tune.space={num_envs:[64,256,512],batch_size:[512,1024,2048]}"


def rate(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
    """512 envs are 1.5 times as fast; smaller batches slower."""
    speed = 1000.0 * {"64": 0.5, "512": 1.5}.get(typed.get("num_envs", ""), 1.0)
    return summary((speed * 0.8 if typed.get("batch_size") == "512" else speed) + seed)


def test_the_fastest_legal_setting_wins_beside_the_profile(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(rate, PLAN).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", SPACE, "report=false")
    assert done.exit_code == 0, done.err
    study = done.json("study.json")
    assert study["best"] == {"num_envs": 512}
    assert study["result"]["value"] == pytest.approx(1.5, abs=0.001)
    labels = [label for label, _ in fakes.ran]
    first = [label for label in labels if label.endswith("(3 s)")]
    assert first[0] == "profile (3 s)"
    assert len(first) == len(set(first)) == 6, "the profile and five others; batches of 2048 update too rarely"
    assert not any("batch_size=2048" in label for label in labels)
    assert sum(label.endswith("(8 s)") for label in labels) == 2
    assert [label for label in labels if label.endswith("(16 s)")][:3].count("profile (16 s)") == 1
    assert len([label for label in labels if label.endswith("(16 s)")]) == 9, (
        "three turns of the profile and two others"
    )
    values = yaml.safe_load((done.folder / "conf" / "profile" / "tuned.yaml").read_text(encoding="utf-8"))
    assert (values["num_envs"], values["batch_size"]) == (512, 1024)
    text = (done.folder / "conf" / "profile" / "tuned.yaml").read_text(encoding="utf-8")
    assert "num_envs: 512 # best steps/s by value: 512 1,500, 64 500" in text
    assert "num_envs changes what is learned: fasttrain compare with it before you rely on it" in done.out


def test_where_nothing_is_clearly_faster_the_profile_stays(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: summary(1000.0 + len(typed.get("num_envs", ""))), PLAN).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", SPACE, "report=false")
    assert "1.00× [1.00, 1.00] as fast as the profile, which stays" in done.out
    values = yaml.safe_load((done.folder / "conf" / "profile" / "tuned.yaml").read_text(encoding="utf-8"))
    assert values["num_envs"] == 256


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"memory_bytes": 3 * 2**30}, "not taken: 3.0 GiB of memory, 2.0 are allowed"),
        ({"updates": 0}, "not taken: it did not get as far as an update"),
        ({"exit_code": 1, "error": "boom"}, "failed"),
    ],
)
def test_what_breaks_a_limit_is_not_taken(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], said: str
):
    def hungry(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        found = rate(typed, seed)
        return (
            {**found, **summary(9999.0, **more)}
            if typed.get("num_envs") == "512" and "exit_code" not in more
            else ({**found, **more} if typed.get("num_envs") == "512" else found)
        )

    Fakes(hungry, PLAN).use(monkeypatch)
    monkeypatch.setattr("fasttrain.studies.tune.free_memory", lambda: 2.5 * 2**30)
    done = fasttrain("tune", "+profile=speed", SPACE, "report=false")
    assert done.exit_code == 0
    assert said in done.out
    assert done.json("study.json")["best"] == {}


def test_what_was_typed_is_not_searched(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    Fakes(rate, PLAN).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", "num_envs=512", "fused_update=on", "report=false")
    assert "space: batch_size 512/1024/2048, torch_threads" in done.out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["tune.space={num_env:[1,2]}"], "tune.space: unknown key 'num_env'; did you mean 'num_envs'"),
        (["tune.space={num_envs:[]}"], "tune.space: num_envs has no values to try"),
        (["tune.space={num_envs:[abc]}"], "tune.space: num_envs=abc: expected a whole number"),
        (["tune.space={algo.gamma:[x]}"], "tune.space: algo.gamma=x: expected a number"),
        (["seeds=3"], "seeds=3 means nothing for tune; a single run takes seed="),
    ],
)
def test_wrong_input(fasttrain: RunCommand, typed: list[str], message: str):
    done = fasttrain("tune", "+profile=speed", *typed)
    assert done.exit_code == 2
    assert message in done.err


def test_a_profile_that_cannot_run_ends_it(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    Fakes(lambda typed, seed: {"exit_code": 1, "error": "no"}).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", "report=false")
    assert done.exit_code == 1
    assert "the profile itself could not be run" in done.out
