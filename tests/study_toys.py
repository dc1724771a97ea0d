"""Studies without processes: `run_cell` as a function of what was typed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.errors import EXIT_STOPPED
from fasttrain.runs.logs import EvaluationLog
from fasttrain.spec.precedence import key_of
from fasttrain_studies.study import Cell, Ended, Place

# What ran with the profile speed, as its plan tells
PPO = {"num_envs": 256, "vec_env": "native", "batch_size": 1024, "torch_threads": 1, "fused_update": "on",
       "workers": "not applicable", "use_amp": "off", "use_compile": "off",
       "updates_per_step": "not applicable"}  # fmt: skip
# Of a training of a population
SMALL = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "total_timesteps=512", "algo.rollout_size=128",
         "batch_size=64", "num_envs=2", "algo.n_epochs=2", "eval.episodes=4", "vec_env=dummy", "torch_threads=1",
         "fused_update=on", "report=false", "checkup=off")  # fmt: skip
Behaviour = Callable[[dict[str, str], int], Mapping[str, Any]]  # (settings typed, seed) → what summary.json says


def summary(steps_per_s: float = 1000.0, win_rate: float | None = 0.5, **more: Any) -> dict[str, Any]:
    """A summary.json with what the studies read."""
    quality = {"episodes": 100, "mean_reward": more.pop("mean_reward", 1.0), "win_rate": win_rate, "score_diff": None,
               "draw_rate": None, "mean_turns": None, "end_reason": {"won": 0.5, "lost": 0.5}}  # fmt: skip
    env_steps = more.pop("env_steps", 1000)
    return {"status": "done", "env_steps": env_steps, "updates": more.pop("updates", 10), "wall_s": 1.0,
            "steps_per_s": steps_per_s, "update_ratio": 0.01, "reward_per_hour": None, "quality": quality,
            "utilization": {"memory_bytes": more.pop("memory_bytes", 2**20)}, **more}  # fmt: skip


def write_episodes(folder: Path, wins: Sequence[int], steps_each: int = 10) -> None:
    """episodes.csv of episodes that end every `steps_each` env steps and hundredth of a second."""
    lines = ["episode,env_steps,env,return,length,wall_s,is_win"]
    lines += [
        f"{i + 1},{(i + 1) * steps_each},0,{won}.0,{steps_each},{(i + 1) / 100},{won}" for i, won in enumerate(wins)
    ]
    (folder / "episodes.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Fakes:
    """Stands in for `run_cell`; remembers what was run."""

    def __init__(self, behaviour: Behaviour, plan: Mapping[str, Any] | None = None, stop_at: int = -1) -> None:
        self.behaviour, self.plan, self.stop_at = behaviour, plan, stop_at
        self.ran: list[tuple[str, int | None]] = []

    def __call__(
        self, command: str, overrides: Sequence[str], folder: Path, label: str = "", seed: int | None = None,
        ended: Ended = None, place: Place | None = None,
    ) -> tuple[Cell, bool]:  # fmt: skip
        assert command == "train"
        self.ran.append((label, seed))
        folder.mkdir(parents=True, exist_ok=True)
        typed = {key_of(text): text.partition("=")[2] for text in overrides}
        found = dict(self.behaviour(typed, seed or 0))
        code, error = int(found.pop("exit_code", 0)), str(found.pop("error", ""))
        wins, log = found.pop("wins", None), EvaluationLog(folder / "evaluations.csv")
        for step, reward in enumerate(found.pop("evaluations", ()) if ended else (), 1):
            log.add(1000 * step, 1.0, {"episodes": 1, "mean_reward": reward, "win_rate": None, "score_diff": None,
                                       "ci95": {"mean_reward": None, "win_rate": None}})  # fmt: skip
            if ended is not None and (error := ended(folder)):
                code = EXIT_STOPPED
                break
        if not code:
            (folder / "summary.json").write_text(json.dumps(found), encoding="utf-8")
            if self.plan is not None:
                (folder / "plan.json").write_text(json.dumps(self.plan), encoding="utf-8")
            if wins is not None:
                write_episodes(folder, wins)
        (folder / "log.txt").write_text(error, encoding="utf-8")
        cell = Cell(label, list(overrides), folder, code, error, 1.0, seed, {} if code else found)
        return cell, len(self.ran) == self.stop_at

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Fakes:
        """Put it in the place of the real one."""
        monkeypatch.setattr("fasttrain_studies.study.run_cell", self)
        return self


def rising(final: float, episodes: int = 400, seed: int = 0) -> list[int]:
    """Wins whose rate rises from 0 to `final` over the first half."""
    rng = np.random.default_rng(seed)
    rates = final * np.minimum(1.0, np.arange(episodes) / (episodes / 2))
    return [int(value) for value in rng.random(episodes) < rates]
