from __future__ import annotations

import dataclasses
import re

import pytest

from fasttrain.perf.clock import PHASES
from fasttrain.perf.report import EnvTimes, PerfWindow, advice, limits_dict, perf_dict, perf_line, perf_rows

WINDOW = PerfWindow(
    env_steps=2000,
    updates=10,
    phases_ns={"action": 30_000_000, "env_step": 50_000_000, "train_fwd": 15_000_000, "other": 5_000_000},
    envs=EnvTimes(20_000_000),
    cpu_share=0.97,
    gpu_share=None,
    memory_bytes=512 * 2**20,
)


def test_line_is_machine_readable_and_adds_up():
    line = perf_line(WINDOW)
    assert line.startswith("[PERF] steps/s 20000 action_ms 15.000 env_step_ms 25.000 (enemy_turn_ms 10.000) ")
    assert line.endswith("update_ratio 0.00500 cpu 97% gpu - mem 512MB")
    values = dict(re.findall(r"(\w+_ms) ([\d.]+)", re.sub(r"\(.*?\)", "", line)))
    assert sum(map(float, values.values())) == pytest.approx(1000 * 0.1 / 2)


def test_rows_show_shares_and_the_limit_of_each_phase():
    rows = {row[0]: row[1:] for row in perf_rows(WINDOW)}
    assert rows["env_step_ms"] == ("25.000", "50.0 %", "40,000")
    assert rows["  of it enemy_turn_ms"] == ("10.000", "20.0 %", "100,000")
    assert rows["total"] == ("50.000", "100.0 %", "20,000")


def test_slow_steps_are_told_one_by_one():
    slow = dataclasses.replace(WINDOW, env_steps=4, phases_ns={"env_step": 7_000_000_000, "other": 1_000_000_000})
    rows = {row[0]: row[1:] for row in perf_rows(slow)}
    assert rows["env_step_ms"] == ("1,750.000", "87.5 %", "0.571")
    assert perf_line(slow).startswith("[PERF] steps/s 0.5 env_step_ms 1750000.000 "), "programs read one unit"


def test_a_dict_holds_every_phase_and_what_remains_if_a_part_were_alone():
    content = perf_dict(WINDOW)
    assert (content["covered_share"], content["optim_ms"], content["steps_per_s"]) == (0.95, 0.0, 20000.0)
    assert limits_dict(WINDOW) == {
        "env_only_steps_per_s": 40000.0,
        "policy_only_steps_per_s": 66666.7,
        "update_only_steps_per_s": 133333.3,
    }


WALL_OF = {
    "action": "acting", "env_step": "the environment", "buffer": "storing",
    "replay_sample": "drawing replay", "train_fwd": "the update", "train_bwd": "the update", "train": "the update",
    "optim": "the update", "log": "logging", "eval": "evaluating", "checkpoint": "saving",
    "other": "most of it belongs to",
}  # fmt: skip


@pytest.mark.parametrize("largest", PHASES)
def test_advice_names_the_largest_phase(largest: str):
    window = dataclasses.replace(WINDOW, phases_ns={**dict.fromkeys(PHASES, 2), largest: 40})
    assert re.match(rf"\d+ % of the time: {WALL_OF[largest]}", advice(window, 2, {}))


def test_what_updates_take_together_counts_as_one_and_an_empty_window_divides_by_nothing():
    phases = {"env_step": 30, "replay_sample": 15, "train_fwd": 10, "train_bwd": 10, "optim": 5}
    assert advice(dataclasses.replace(WINDOW, phases_ns=phases), 2, {}).startswith("57 % of the time: the update is")
    empty = dataclasses.replace(WINDOW, env_steps=0, updates=0, phases_ns={}, envs=EnvTimes())
    assert perf_line(empty).startswith("[PERF] steps/s 0 other_ms 0.000")
    assert perf_rows(empty)[-1] == ("total", "0.000", "0.0 %", "-")


@pytest.mark.parametrize(
    ("largest", "effective", "told"),
    [
        ("env_step", {"vec_env": "native"}, "the environment is the bottleneck: make its step cheaper"),
        ("log", {"train_log_enabled": False}, "logging is the bottleneck: raise log_every"),
        (
            "eval",
            {"eval_async": "not applicable"},
            "evaluating is the bottleneck: raise eval_every; or lower eval.episodes",
        ),
    ],
)
def test_advice_names_nothing_that_is_in_force(largest: str, effective: dict[str, object], told: str):
    window = dataclasses.replace(WINDOW, phases_ns={largest: 40})
    assert advice(window, 2, effective) == f"100 % of the time: {told}"


def with_workers(**times: int | bool) -> PerfWindow:
    return dataclasses.replace(WINDOW, envs=EnvTimes(num_workers=2, envs_ns=70_000_000, slowest_ns=38_000_000, **times))


def test_env_step_splits_into_the_slowest_worker_and_the_way_to_it():
    window = with_workers()
    rows = {row[0]: row[1:] for row in perf_rows(window)}
    assert rows["  of it slowest_worker_ms"][0] == "19.000"
    assert rows["  of it transport_ms"][0] == "6.000"
    assert "(slowest_worker_ms 19.000) (transport_ms 6.000)" in perf_line(window)
    content = perf_dict(window)
    assert content["slowest_worker_ms"] + content["transport_ms"] == content["env_step_ms"]
    assert content["workers"] == {
        "num_workers": 2, "busy_share": 0.35, "slowest_over_mean": 1.0857, "restarts": 0, "lost_steps": 0
    }  # fmt: skip
    apart = perf_line(with_workers(in_step=False, waiting_ns=10_000_000))
    assert "(waiting_ms 5.000)" in apart
    assert "slowest" not in apart


def test_how_old_transitions_were_is_a_row_if_any_policy_was_older():
    window = with_workers(lags=(30, 2, 120, 5))
    assert ("lag in updates", "mean 0.25", "max 2", "dropped 5") in perf_rows(window)
    assert " lag 0.25 lag_max 2 update_ratio" in perf_line(window)
    assert perf_dict(window)["lag"] == {"mean": 0.25, "largest": 2, "dropped": 5}
    assert "lag" not in perf_dict(with_workers())
    assert "lag" not in perf_line(with_workers())


@pytest.mark.parametrize(
    ("changes", "cores", "advised"),
    [
        ({"slowest_ns": 20_000_000, "envs_ns": 30_000_000}, 2, "more envs per worker"),
        ({"slowest_ns": 48_000_000, "envs_ns": 60_000_000}, 2, "schedule=first_ready"),
        ({}, 8, "2 of 8 cores step them: raise workers"),
        ({}, 2, "schedule=first_ready"),
        ({"in_step": False, "waiting_ns": 40_000_000}, 2, "a native batch or a cheaper step"),
    ],
)
def test_advice_when_workers_are_the_wall(changes: dict[str, int], cores: int, advised: str):
    envs = EnvTimes(num_workers=2, envs_ns=70_000_000, slowest_ns=38_000_000)._replace(**changes)
    assert advised in advice(dataclasses.replace(WINDOW, envs=envs), cores, {})


def test_a_games_time_stands_apart_from_the_phases():
    now = EnvTimes(15, 2, 140, 90, 100, True, 3, 9)
    assert now.since(EnvTimes(10, 2, 100, 60, 70, True, 1, 5)) == EnvTimes(5, 2, 40, 30, 30, True, 2, 4)
    before = EnvTimes(games=(("engine", 10_000_000), ("queue", 5_000_000)))
    envs = EnvTimes(games=(("engine", 80_000_000), ("queue", 35_000_000))).since(before)
    assert dict(envs.games) == {"engine": 70_000_000, "queue": 30_000_000}
    window = dataclasses.replace(WINDOW, envs=envs)
    assert perf_rows(window)[-2:] == [
        ("of a game's time engine_ms", "35.000", "70.0 %", "28,571"),
        ("of a game's time queue_ms", "15.000", "30.0 %", "66,667"),
    ]
    assert "(engine_ms 35.000) (queue_ms 15.000) update_ratio" in perf_line(window)
    assert perf_dict(window)["of_a_game"] == {"engine_ms": 35.0, "queue_ms": 15.0}
    assert "their time is engine most of all: fasttrain doctor" in advice(window, 2, {})
