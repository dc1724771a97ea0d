"""How well one learns against an engine: train for a while, then play games with seeds that training did not see."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import trainings
from benchmarks.work import OURS, Sample, Work, works_of
from benchmarks.works import engines

COMMON = {"algo.net_arch": [256, 256], "algo.gamma": 1.0, "algo.ent_coef": 0.01, "num_envs": 32, "eval.episodes": 20}
GO = {  # updates cost next to nothing beside the engines
    **COMMON, "env": "go", "total_timesteps": "1e9", "algo.rollout_size": 2048, "batch_size": 256, "algo.n_epochs": 10,
    "algo.learning_rate": 5e-4,
}  # fmt: skip
SHOWDOWN = {
    **COMMON, "env": "showdown", "env.kwargs.opponent": "max_damage", "+env.kwargs.shaping": 1.0,
    "algo.rollout_size": 8192, "algo.learning_rate": "linear_5e-4", "total_timesteps": "2.1e6", "batch_size": 512,
    "algo.n_epochs": 4, "env.kwargs.generation": 1, "daemons.cwd": engines.SHOWDOWN,
}  # fmt: skip
AT_ONCE, GAMES = 20, 400
UNSEEN = 10**9  # a seed: training's are small numbers and what is derived from them


def learned(kind: str, settings: dict[str, Any], minutes: float, kwargs: dict[str, Any], seed: int) -> Sample:
    """`quality` is the win rate of greedy play; `sampled`, and the share of games that differ, beside it."""
    from fasttrain import MaskablePPO
    from fasttrain.cli import main

    if not (engines.gnugo() if kind == "go" else engines.battles()):
        return {"skipped": "the engine is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        typed = [*trainings.typed(settings), f"stop.max_minutes={minutes}", f"seed={seed}", f"hydra.run.dir={run}"]
        if main(["+profile=speed", "report=false", "live=off", *typed]) != 0:
            raise SystemExit(1)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        model = MaskablePPO.load(run / "model.zip", device="cpu")
        greedy, distinct = played(model, kind, kwargs, True, Path(folder) / "greedy")
        sampled, _ = played(model, kind, kwargs, False, Path(folder) / "sampled")
    return {
        "rate": summary["steps_per_s"], "env_steps": summary["env_steps"], "wall_s": summary["wall_s"],
        "quality": greedy, "sampled": sampled, "distinct_share": distinct,
    }  # fmt: skip


def played(model: Any, kind: str, kwargs: dict[str, Any], greedy: bool, folder: Path) -> tuple[float, float]:
    """The win rate, and how many of the games' records differ. Each env plays as many games as any other."""
    from fasttrain.machine import usable_cores
    from fasttrain_engines.settings import DaemonsConfig
    from fasttrain_engines.vec_env import DaemonVecEnv

    folder.mkdir()
    entry = "fasttrain_engines.go:Go"
    settings = DaemonsConfig(command=engines.gnugo(), count=AT_ONCE, games_per_daemon=1)
    if kind == "showdown":
        entry = "fasttrain_engines.showdown:Showdown"
        settings = DaemonsConfig(command=engines.battles(), cwd=str(engines.SHOWDOWN))
    env = DaemonVecEnv(entry, kwargs, AT_ONCE, settings, usable_cores(), folder=folder)
    env.seed(UNSEEN)
    seen, won = env.reset(), [list[bool]() for _ in range(AT_ONCE)]
    while any(len(row) < GAMES // AT_ONCE for row in won):
        actions, _ = model.predict(seen, deterministic=greedy, action_masks=env.slots.action_masks)
        seen, _, dones, infos = env.step(actions)
        for row, info in enumerate(infos):
            if dones[row] and "lost" not in info and len(won[row]) < GAMES // AT_ONCE:
                won[row].append(bool(info.get("is_win", False)))
    env.close()
    lines = (folder / "games.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.dumps(json.loads(line)["record"]) for line in lines]
    return sum(map(sum, won)) / GAMES, len({*records}) / len(records)


def work(name: str, text: str, *arguments: Any) -> Work:
    return Work(name, text, {OURS: partial(learned, *arguments)}, equal=(), seeded=True, is_rate=True)


WORKS = works_of(
    work(  # White never wins against one that never errs; on 9×9 0.4 is too little for either colour
        "learn-go-5", "GNU Go, level 1, on 5×5: 25 minutes, then 400 games against one that does not err.",
        "go", {**GO, "env.kwargs.size": 5, "env.kwargs.errs": 0.4}, 25, {"size": 5, "level": 1},
    ),
    work(
        "learn-go-9", "The same on 9×9, 98 minutes.",
        "go", {**GO, "env.kwargs.size": 9, "env.kwargs.errs": 1.0}, 98, {"size": 9, "level": 1},
    ),
    *(
        work(
            f"learn-showdown-{opponent.replace('_', '-')}",
            f"Pokémon Showdown, generation 1: 60 minutes against max_damage, then 400 battles against {opponent}.",
            "showdown", SHOWDOWN, 60, {"generation": 1, "opponent": opponent},
        )
        for opponent in ("random", "max_damage")
    ),
)  # fmt: skip
