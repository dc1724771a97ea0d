from __future__ import annotations

import dataclasses
import re

import pytest

from fasttrain.perf.report import PerfWindow, advice, limits_dict, perf_dict, perf_line, perf_rows

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


def test_dict_holds_every_phase_and_what_is_covered():
    content = perf_dict(WINDOW)
    assert content["covered_share"] == 0.95
    assert content["optim_ms"] == 0.0
    assert content["steps_per_s"] == 20000.0


def test_limits_are_what_remains_if_a_part_were_alone():
    assert limits_dict(WINDOW) == {
        "env_only_steps_per_s": 40000.0,
        "policy_only_steps_per_s": 66666.7,
        "update_only_steps_per_s": 133333.3,
    }


def test_advice_names_the_largest_share():
    assert advice(WINDOW).startswith("50 % of the time: the environment is the wall")
    update = dataclasses.replace(WINDOW, phases_ns={"train": 90, "env_step": 10})
    assert "the update is the wall" in advice(update)


def test_an_empty_window_divides_by_nothing():
    empty = dataclasses.replace(WINDOW, env_steps=0, updates=0, phases_ns={}, envs=EnvTimes())
    assert perf_line(empty).startswith("[PERF] steps/s 0 other_ms 0.000")
    assert perf_rows(empty)[-1] == ("total", "0.000", "0.0 %", "-")
