from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RunCommand
from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.saving.files import lock_folder
from fasttrain_studies import trials
from fasttrain_studies.study import Cell
from fasttrain_studies.tune import FRESH, Objective
from study_toys import PPO, Fakes, summary

PLAN = {"flags": [{"flag": name, "effective": value} for name, value in PPO.items()]}
TWO = ("tune", "+profile=speed", "tune.space={num_envs:[256,512]}", "report=false")
SPACE = "tune.space={num_envs:[64,256,512],batch_size:[512,1024,2048]}"
REWARD = ("tune", "+profile=speed", "tune.objective=reward", "total_timesteps=10000", "report=false", "seeds=2",
          "tune.space={algo.learning_rate:{low:1e-4,high:1e-2,log:true}}")  # fmt: skip


def rate(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
    """512 envs are 1.5 times as fast; smaller batches slower."""
    speed = 1000.0 * {"64": 0.5, "512": 1.5}.get(typed.get("num_envs", ""), 1.0)
    return summary((speed * 0.8 if typed.get("batch_size") == "512" else speed) + seed % 7)


def reward(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
    """The higher the learning rate, the better; the evaluations during training say so too."""
    found = 1000 * float(typed.get("algo.learning_rate", 1e-3))
    return summary(mean_reward=found + seed % 2, evaluations=[found] * 9)


def profile_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "conf" / "profile" / "tuned.yaml").read_text(encoding="utf-8"))
    return loaded


def test_the_fastest_settings_win_beside_the_profile(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(rate, PLAN).use(monkeypatch)
    done = fasttrain("tune", "+profile=speed", SPACE, "report=false").ok()
    study = done.json("study.json")
    assert study["best"] == {"num_envs": 512}
    assert study["result"]["value"] == pytest.approx(1.5, abs=0.1)
    tried = [label for label, seed in fakes.ran if seed == 0]
    assert tried[0] == "profile"
    assert len(tried) == len(set(tried)) == 6, "the profile and five others; batches of 2048 update too rarely"
    assert not any("batch_size=2048" in label for label in tried)
    finals = [(label, seed) for label, seed in fakes.ran if seed]
    assert finals == [(label, FRESH + turn) for turn in range(3) for label in ("profile", "num_envs=512")]
    assert study["rows"][0]["point"] == {"num_envs": 512}, "the best first"
    values = profile_of(done.folder)
    assert (values["num_envs"], values["batch_size"]) == (512, 1024)
    assert "num_envs changes what is learned; before you use the profile, compare the learning: " in done.out
    assert main(["tune", f"run={done.folder}"]) == 0
    assert len(fakes.ran) == 12, "all cells are known"


def test_more_reward_is_confirmed_on_fresh_seeds(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    fakes = Fakes(reward, PLAN).use(monkeypatch)
    done = fasttrain(*REWARD, "tune.trials=12").ok()
    study = done.json("study.json")
    assert len(study["rows"]) == 12
    best = study["best"]["algo.learning_rate"]
    assert 1e-3 < best <= 1e-2
    late = [row for row in study["rows"] if row["note"].startswith("ended early")]
    assert 0 < len(late) < 10
    assert all(row["mean_reward"] is None for row in late)
    assert min(row["mean_reward"] for row in study["rows"][:3]) >= study["rows"][3]["mean_reward"]
    short = {label for label, _ in fakes.ran} - {label for label, seed in fakes.ran if seed == 1}
    assert short, "what ended early had no second seed"
    fresh = {seed for _, seed in fakes.ran if seed > 1}
    assert fresh == {*range(FRESH, FRESH + 5)}
    assert study["result"]["difference"] == pytest.approx(1000 * (best - 1e-3))
    assert study["result"]["low"] > 0
    assert profile_of(done.folder)["algo"]["learning_rate"] == best
    assert f"--config-dir {done.folder / 'conf'} '+profile=[speed,tuned]' total_timesteps=10000" in done.out


def test_luck_and_what_is_not_clearly_faster_are_not_written(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    def lucky(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        other = "algo.learning_rate" in typed
        return summary(mean_reward=float(seed % 7) + (10.0 if other and seed < FRESH else 0.0))

    Fakes(lucky, PLAN).use(monkeypatch)
    done = fasttrain(*REWARD, "tune.trials=3").ok()
    assert "the profile's own settings stay, and no profile is written" in done.out
    assert "difference +0 [+0, +0], 5 new seeds" in done.out
    assert not (done.folder / "conf").exists()
    assert done.json("study.json")["best"] == {}
    Fakes(lambda typed, seed: summary(1000.0 + len(typed.get("num_envs", ""))), PLAN).use(monkeypatch)
    done = fasttrain(*TWO).ok()
    assert "1.00× [1.00, 1.00] as fast as the profile, in 3 turns: the profile's own settings stay" in done.out
    assert not (done.folder / "conf").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"memory_bytes": 3 * 2**30}, "refused: 3.0 GiB of memory, 2.0 are allowed"),
        ({"updates": 0}, "refused: it ended before its first update"),
        ({"exit_code": 1, "error": "boom"}, "failed: boom"),
    ],
)
def test_what_breaks_a_limit_is_not_taken(fasttrain, monkeypatch, more, said):
    def hungry(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        if typed.get("num_envs") != "512":
            return rate(typed, seed)
        return {**rate(typed, seed), **more} if "exit_code" in more else summary(9999.0, **more)

    Fakes(hungry, PLAN).use(monkeypatch)
    monkeypatch.setattr("fasttrain_studies.tune.free_memory", lambda: 2.5 * 2**30)
    done = fasttrain(*TWO).ok()
    assert said in done.out
    assert "no trial was better than the profile" in done.out


def test_a_profile_that_cannot_run_or_reports_no_such_figure_ends_it(fasttrain, monkeypatch):
    failed = {"exit_code": 1, "error": "no"}
    for first in (0, 1):  # both seeds, or the second alone
        Fakes(lambda typed, seed, first=first: failed if seed >= first else summary(), PLAN).use(monkeypatch)
        done = fasttrain(*REWARD)
        assert done.exit_code == 1
        assert "the profile itself could not be run; see above" in done.out
    Fakes(lambda typed, seed: summary(win_rate=None), PLAN).use(monkeypatch)
    fasttrain(*TWO, "tune.objective=win_rate").refused("tune.objective=win_rate: a run with the profile's own settings")
    fasttrain(*TWO, "tune.objective=reward_per_hour").refused("does not report it")


@pytest.mark.parametrize("trials", [4, 2], ids=["with more to come", "the last"])
def test_a_stopped_search_goes_on_with_the_trial_that_was_killed(fasttrain, monkeypatch, capfd, trials):
    first = Fakes(reward, PLAN, stop_at=5).use(monkeypatch)
    stopped = fasttrain(*REWARD, f"tune.trials={trials}")
    assert stopped.exit_code == 4
    assert f"fasttrain tune run={stopped.folder} goes on" in stopped.out
    with lock_folder(stopped.folder):  # another process leads
        monkeypatch.setattr("os.getpid", lambda: -1)  # not the process that holds the lock
        guest = Fakes(reward, PLAN).use(monkeypatch)
        assert main(["tune", f"run={stopped.folder}"]) == 0
    assert "continues the search, then confirms the best settings" in capfd.readouterr().out
    assert guest.ran[0] == (first.ran[-1][0], 1), "the killed trial goes on with its second seed"
    assert trials > 2 or len(guest.ran) == 1
    assert not set(guest.ran) & set(first.ran), "and its finished cells are not run again"
    assert len(stopped.json("study.json")["rows"]) == trials


def test_with_other_settings_the_search_begins_again(fasttrain, monkeypatch):
    Fakes(reward, PLAN).use(monkeypatch)
    done = fasttrain(*REWARD, "tune.trials=2").ok()
    other = Fakes(reward, PLAN).use(monkeypatch)
    assert main(["tune", f"run={done.folder}", "total_timesteps=20000"]) == 0
    assert len({label for label, seed in other.ran if seed == 0}) == 3, "the profile and two trials"


def test_seeds_count_for_the_speed_too(fasttrain, monkeypatch):
    fakes = Fakes(rate, PLAN).use(monkeypatch)
    fasttrain(*TWO, "seeds=2").ok()
    assert [seed for label, seed in fakes.ran if label == "num_envs=512"][:2] == [0, 1]


def test_the_mean_of_a_seed_is_judged_after_more_than_ten_evaluations(fasttrain, monkeypatch):
    def flat(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        return {**reward(typed, seed), "evaluations": [0.0] * 12}

    Fakes(flat, PLAN).use(monkeypatch)
    done = fasttrain(*REWARD, "tune.trials=12").ok()
    assert any(row["note"].startswith("ended early") for row in done.json("study.json")["rows"])


def test_cells_of_another_process_in_the_same_study_stay(fasttrain, monkeypatch, tmp_path):
    def beside(typed: Mapping[str, str], seed: int) -> dict[str, Any]:
        path = next(tmp_path.glob("*/study.json"))
        stored = json.loads(path.read_text())
        stored["cells"].append({**Cell("other", [str(seed)], tmp_path, 0, "", 1.0, 7).to_dict(tmp_path)})
        path.write_text(json.dumps(stored))
        return rate(typed, seed)

    Fakes(beside, PLAN).use(monkeypatch)
    done = fasttrain(*TWO).ok()
    assert [cell["seed"] for cell in done.json("study.json")["cells"] if cell["label"] == "other"] == [7] * 4


def test_a_process_that_joins_has_the_settings_of_the_search(fasttrain, monkeypatch, capfd):
    Fakes(rate, PLAN).use(monkeypatch)
    folder = fasttrain(*TWO).ok().folder
    monkeypatch.setattr("fasttrain_studies.tune.holder", lambda _: "1")
    assert main(["tune", f"run={folder}", "tune.trials=5", "minutes=1"]) == 0, "limits may differ"
    assert main(["tune", f"run={folder}", "seed=7"]) == 2
    assert "another process searches there with other settings (+profile=speed tune.space" in capfd.readouterr().err


def test_a_search_of_which_all_settings_are_refused_says_why(fasttrain, monkeypatch):
    Fakes(rate, PLAN).use(monkeypatch)
    fasttrain(*TWO[:2], "tune.space={batch_size:[10000000]}").refused("no trial could be run; the last one: ")


def test_without_optuna_it_says_what_to_install(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "find_spec", lambda name: None if name == "optuna" else name)
    fasttrain(*TWO).refused("tune needs optuna: ", "pip install 'fasttrain[tune]'")


def test_values_of_objectives(tmp_path: Path):
    def cell(folder: str, **more: Any) -> Cell:
        wins = more.pop("wins", None)
        Fakes(lambda typed, seed: {**summary(900.0, 0.75, mean_reward=2.5), **more, "wins": wins})(
            "train", [], tmp_path / folder
        )
        return Cell(
            "a", [], tmp_path / folder, 0, "", 1.0, 0, json.loads((tmp_path / folder / "summary.json").read_text())
        )

    plain = cell("plain", reward_per_hour=60.0)
    found = {name: Objective.of(name).value(plain) for name in ("reward", "win_rate", "steps_per_s", "reward_per_hour")}
    assert found == {"reward": 2.5, "win_rate": 0.75, "steps_per_s": 900.0, "reward_per_hour": 60.0}
    half = Objective.of("time_to:0.5")
    soon, never = half.value(cell("soon", wins=[0] * 100 + [1] * 100)), half.value(cell("never", wins=[0] * 200))
    assert soon == pytest.approx(1 / 1.5), "150 episodes of 10 ms each"
    assert never == 0.0
    assert (half.text(soon), half.text(never)) == ("1.5 s", "never")
    with pytest.raises(ConfigError, match="time_to:NUMBER"):
        Objective.of("time_to:soon")


def test_a_search_with_real_trainings(fasttrain: RunCommand):
    done = fasttrain(
        "tune", "+profile=speed", "env.id=CartPole-v1", "algo=ppo", "tune.objective=reward", "tune.trials=1", "seeds=1",
        "total_timesteps=512", "num_envs=2", "vec_env=dummy", "algo.rollout_size=128", "batch_size=64", "checkup=off",
        "tune.space={algo.gamma: [0.9, 0.99]}", "eval.episodes=2", "eval_async=false", "report=false", "minutes=0.01",
    ).ok()  # fmt: skip
    (row,) = done.json("study.json")["rows"]
    assert row["point"] == {"algo.gamma": 0.9}
    assert row["mean_reward"] > 5
    rows = (done.folder / "cells").glob("gamma*seed0*/evaluations.csv")
    assert len(next(rows).read_text().splitlines()) > 3
