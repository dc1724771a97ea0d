"""scripts/rendering_engines.py: its tables, of made-up data."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MACHINE = {"machine": "2 cores, some processor"}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("rendering_engines")


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def test_speed_is_a_row_for_each_number_of_battles(engines: ModuleType) -> None:
    def load(name: str) -> dict[str, Any]:
        battles = int(name.split("-")[1])
        command = {"command": f"python3 scripts/benchmark.py {name} --repeats {repeats}"}
        if name.endswith("-capacity"):
            return {"ratios": {"the engines alone": spread(0.9)}, **MACHINE}
        ratios = {"SubprocVecEnv": spread(3.0), "SubprocVecEnv, our PPO": spread(2.0)}
        late = {"fasttrain": spread(4.0), "SubprocVecEnv": spread(7.0)}
        return {"ours": spread(300.0 * battles), "theirs": {"SubprocVecEnv": spread(100.0 * battles)},
                "ratios": ratios, "p95_ms": late, "games_per_s": {"fasttrain": spread(7.5)}, **command,
                **MACHINE}  # fmt: skip

    repeats = 1
    assert "with training, one turn each;" in " ".join(engines.showdown(load).split())
    repeats = 3
    text = engines.showdown(load)
    assert "with training, medians of 3 turns;" in " ".join(text.split())
    assert "| 16 | 4,800 | 1,600 | 3.00× | 2.00× | 90 % | 7.5 | 4 / 7 |" in text
    assert "Generation 1, against max_damage; 2 cores" in text


def test_learning_is_a_row_for_each_opponent(engines: ModuleType) -> None:
    ends = {
        f"{kind}_{opponent}": {"games": 400, "win_rate": rate, "distinct_share": 1.0}
        for (kind, opponent), rate in zip(
            [("greedy", "random"), ("sampled", "random"), ("greedy", "max_damage"), ("sampled", "max_damage")],
            (0.97, 0.95, 0.61, 0.52),
            strict=True,
        )
    }
    curve = [{"games": 10, "win_rate": 0.01}, {"games": 10, "win_rate": 0.5}]
    stored = {"generation": 1, "env_steps": 2_000_000, "wall_s": 3600, "curve": curve, **ends, **MACHINE}
    text = engines.showdown_learning(lambda name: stored)
    assert "| max_damage | 61.0 % | 52.0 % |" in text
    assert "2,000,000 decisions in 60 minutes" in " ".join(text.split())
    assert "in percent: 1, 50." in " ".join(text.split())


def test_go_is_told_by_colour(engines: ModuleType) -> None:
    found = {"games": 400, "win_rate": 0.6, "distinct_share": 0.9, "black": 0.95, "white": 0.25}
    stored = {"env_steps": 500_000, "wall_s": 1500, "curve": [], "greedy": found, "sampled": found, **MACHINE}
    assert "| greedy | 60.0 % | 95.0 % | 25.0 % | 90.0 % |" in engines.go_learning(lambda name: stored)


def test_refused_and_lost_are_told_apart(engines: ModuleType) -> None:
    part = {"generation": 9, "decisions": 500_000, "games": 7000, "distinct_games": 7000, "refused": 500, "lost": 0}
    assert "| 9 | 500,000 | 7,000 | 7,000 | 500 | 0 |" in engines.showdown_legal(lambda name: {"parts": [part]})
