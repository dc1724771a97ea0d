from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SMALL = ("env=skullking", "num_envs=4")


def test_the_kernels_of_a_run_are_compiled_and_said(fasttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.runs.engine.learner_calls", lambda _: [])  # 15 s of compiling; the game's are shown
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("fasttrain_games.skullking.game.SkullKingGame.kernel_calls", calls)
    monkeypatch.setattr("fasttrain.runs.engine.env_facts", lambda _: facts())
    first = fasttrain("warmup", "+profile=speed", *SMALL)
    assert first.exit_code == 0, first.err
    assert "1 of 1 kernels compiled in" in first.out
    assert "all 1 kernels were there" in fasttrain("warmup", "+profile=speed", *SMALL).out
    assert not list(tmp_path.glob("outputs/*")), "it is no run, and leaves no folder of one"


def calls(game: Any) -> list[Any]:
    import numpy as np

    from fasttrain.jit import njit
    from fasttrain.kernel_cache import KernelCall

    @njit
    def nothing(x: Any) -> Any:
        return x

    return [KernelCall(nothing, (np.zeros(1),))]


def facts() -> Any:
    from fasttrain.spec.checks import EnvFacts

    return EnvFacts(native=True, step_s=None)


def test_a_run_without_kernels_says_so(fasttrain: Any):
    done = fasttrain("warmup", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=1")
    assert (done.exit_code, "this run has no compiled kernels" in done.out) == (0, True)
