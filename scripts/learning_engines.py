#!/usr/bin/env python3
"""How well one learns against an engine: python3 scripts/learning_engines.py go|showdown [--minutes 60] [--seed 0]

`go` trains MaskablePPO against GNU Go, level 1, on 5×5 for so many minutes, and then plays 400 games with seeds that
training did not see, half of them as Black: wins by colour, how many of the games differ from each other, and the win
rate over the training. `showdown` does the same in random battles of Pokémon Showdown, against an opponent that takes
the move of most damage, and then plays 400 against that one and 400 against random actions. What is found is stored in
docs/results/. `legal` plays random legal actions, with neither policy nor learning, and counts what the engines refused
and what was lost: python3 scripts/learning_engines.py legal --of showdown --decisions 1000000

  --minutes M      of training; 0: play again with what an earlier one left
  --seed N         of the training              --size N        of the board
  --games N        that are played at the end
  --generation N   of Showdown's rules          --of ENGINE     which plays, of `legal`
  --decisions N    of `legal`
"""

# fmt: off
import sys

# An older Python must be able to parse this file to reach the message.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.stderr.write("fasttrain needs Python 3.10 or newer, this is " + sys.version.split()[0] + "\n")
    sys.exit(2)
# fmt: on

import argparse
import csv
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and find_spec("fasttrain") is None and Path(sys.prefix) != ROOT / ".venv":
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:]))

import bench_machine  # noqa: E402

COMMON = ("+profile=speed", "eval.episodes=20", "report=false", "num_envs=32",
          "algo.net_arch=[256,256]", "algo.gamma=1.0", "algo.ent_coef=0.01")  # fmt: skip
# Updates cost next to nothing beside the engines.
GO = ("env=go", "total_timesteps=1e9", "algo.rollout_size=2048", "batch_size=256", "algo.n_epochs=10",
      "algo.learning_rate=5e-4")  # fmt: skip
ERRS = {5: 0.4}  # White never wins against one that never errs; on larger boards 0.4 is too little for either colour
SHOWDOWN = ("env=showdown", "env.kwargs.opponent=max_damage", "+env.kwargs.shaping=1.0", "algo.rollout_size=8192",
            "algo.learning_rate=linear_5e-4", "total_timesteps=2.1e6", "batch_size=512", "algo.n_epochs=4")  # fmt: skip
TENTHS = 10
AT_ONCE = 20
UNSEEN = 10**9  # a seed: training's are small numbers and what is derived from them


def trained(folder: Path, minutes: float, seed: int, *settings: str) -> None:
    """Train for so long; for no minutes: take what an earlier training left."""
    if not minutes:
        return
    command = [*COMMON, *settings, f"stop.max_minutes={minutes:g}", f"seed={seed}", f"hydra.run.dir={folder}"]
    subprocess.run([sys.executable, "-m", "fasttrain", *command], check=True)


def curve(folder: Path) -> list[dict[str, Any]]:
    """Win rate in each tenth of the training's games, and how much the opponent erred, where it does."""
    with (folder / "episodes.csv").open() as file:
        rows = [*csv.DictReader(file)]
    found = []
    for part in (rows[len(rows) * tenth // TENTHS : len(rows) * (tenth + 1) // TENTHS] for tenth in range(TENTHS)):
        won = sum(float(row["return"]) > 0.5 for row in part)  # a tie is 0, but for rounding
        errs = [float(row["errs"]) for row in part if row.get("errs")]
        more = {"errs": round(sum(errs) / len(errs), 4)} if errs else {}
        found.append({"games": len(part), "win_rate": round(won / max(1, len(part)), 4), **more})
    return found


def env_of(engine: str, kwargs: dict[str, Any], folder: Path, at_once: int = AT_ONCE) -> Any:
    """Games with an engine, as many at once; `go` or `showdown`."""
    import bench_engines
    import bench_showdown
    from fasttrain.machine import usable_cores
    from fasttrain.spec.daemons import DaemonsConfig
    from fasttrain.vec.games import DaemonVecEnv

    if engine == "go":
        settings = DaemonsConfig(command=tuple(bench_engines.command()), count=at_once, games_per_daemon=1)
    else:
        settings = DaemonsConfig(command=bench_showdown.command(), cwd=str(bench_showdown.FOLDER))
    entry_point = {"go": "fasttrain.daemons.go:Go", "showdown": "fasttrain.daemons.showdown:Showdown"}[engine]
    return DaemonVecEnv(entry_point, kwargs, at_once, settings, usable_cores(), folder=folder)


def records(folder: Path, each: int | None = None) -> list[str]:
    """Of all games that were played to their end, or of the first `each` of every row."""
    found: dict[int, list[str]] = {}
    for line in (folder / "games.jsonl").read_text().splitlines():
        game = json.loads(line)
        found.setdefault(game["row"], []).append(json.dumps(game["record"]))
    return [record for row in found.values() for record in row[:each]]


def played(model: Any, engine: str, kwargs: dict[str, Any], games: int, greedy: bool) -> dict[str, Any]:
    """So many games with seeds of their own. Both colours are counted apart where there are two."""
    with tempfile.TemporaryDirectory() as where:
        env = env_of(engine, kwargs, Path(where))
        env.seed(UNSEEN)
        seen, won = env.reset(), dict[str, list[bool]]()
        # Of each env, and each colour, the same number: quick games are no more often counted.
        colours = ("black", "white") if engine == "go" else ("all",)
        left = [dict.fromkeys(colours, games // AT_ONCE // len(colours)) for _ in range(AT_ONCE)]
        while any(any(each.values()) for each in left):
            actions, _ = model.predict(seen, deterministic=greedy, action_masks=env.slots.action_masks)
            seen, _, dones, infos = env.step(actions)
            for row, info in enumerate(infos):
                colour = info.get("colour", "all")
                if dones[row] and "lost" not in info and left[row][colour]:
                    left[row][colour] -= 1
                    won.setdefault(colour, []).append(bool(info.get("is_win", False)))
        env.close()
        found = records(Path(where), games // AT_ONCE)
    everything = [one for each in won.values() for one in each]
    return {
        "games": len(everything), "win_rate": round(sum(everything) / len(everything), 4),
        "distinct_share": round(len({*found}) / len(found), 4),
        **{colour: round(sum(each) / len(each), 4) for colour, each in won.items() if colour != "all"},
    }  # fmt: skip


def go(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A name and what was found."""
    from fasttrain import MaskablePPO

    name, folder = f"go-{args.size}", ROOT / "outputs" / f"go-{args.size}-{args.seed}"
    errs = ERRS.get(args.size, 1.0)
    trained(folder, args.minutes, args.seed, *GO, f"env.kwargs.size={args.size}", f"env.kwargs.errs={errs}")
    model, kwargs = MaskablePPO.load(folder / "model.zip", device="cpu"), {"size": args.size, "level": 1}
    return name, {
        **training(folder, f"go --size {args.size} --games {args.games}"),
        **{kind: played(model, "go", kwargs, args.games, kind == "greedy") for kind in ("greedy", "sampled")},
    }


def showdown(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A name and what was found."""
    import bench_showdown
    from fasttrain import MaskablePPO

    if why := bench_showdown.missing():
        raise SystemExit(why)
    generation = args.generation
    folder = ROOT / "outputs" / f"showdown-{generation}-{args.seed}"
    where = f"daemons.cwd={bench_showdown.FOLDER}"
    trained(folder, args.minutes, args.seed, *SHOWDOWN, f"env.kwargs.generation={generation}", where)
    model = MaskablePPO.load(folder / "model.zip", device="cpu")
    return "showdown" if generation == 1 else f"showdown-{generation}", {
        **training(folder, f"showdown --generation {generation} --games {args.games}"),
        "generation": generation,
        **{
            f"{kind}_{opponent}": played(
                model, "showdown", {"generation": generation, "opponent": opponent}, args.games, kind == "greedy"
            )
            for opponent in ("random", "max_damage")
            for kind in ("greedy", "sampled")
        },
    }


def training(folder: Path, work: str) -> dict[str, Any]:
    """How long it took, and how the win rate went."""
    summary = json.loads((folder / "summary.json").read_text())
    command = f"python3 scripts/learning_engines.py {work} --minutes {summary['wall_s'] / 60:.0f}"
    found = {"command": command, "env_steps": summary["env_steps"], "wall_s": round(summary["wall_s"])}
    return {**found, "curve": curve(folder)}


def legal(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Random legal actions: how many of them an engine would not take, and why games were lost."""
    import numpy as np

    kinds = {"go": [{"size": 5, "level": 1}], "showdown": [{"generation": 1}, {"generation": 9}]}[args.of]
    parts, rng = [], np.random.default_rng(args.seed)
    for kwargs in kinds:
        with tempfile.TemporaryDirectory() as where:
            env = env_of(args.of, kwargs, Path(where))
            env.seed(UNSEEN)
            env.reset()
            began, decided = time.perf_counter(), 0
            while decided < args.decisions // len(kinds):
                draws = np.where(env.slots.action_masks, rng.random(env.slots.action_masks.shape), -1.0)
                env.step(draws.argmax(axis=1))
                decided = env.times().decisions
            times, tally = env.times(), env.tally(fresh=True)
            env.close()
            found = records(Path(where))
        parts.append({
            **kwargs, "decisions": times.decisions, "games": times.games, "refused": times.refused,
            "lost": times.lost, "lost_by_cause": dict(tally.lost), "distinct_games": len({*found}),
            "wall_s": round(time.perf_counter() - began),
        })  # fmt: skip
    command = f"python3 scripts/learning_engines.py legal --of {args.of} --decisions {args.decisions}"
    return f"{args.of}-legal", {"command": command, "parts": parts}


ENGINES = {"go": go, "showdown": showdown, "legal": legal}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, play, store."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("engine", choices=[*ENGINES])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=5)
    parser.add_argument("--generation", type=int, default=1)
    parser.add_argument("--games", type=int, default=400)
    parser.add_argument("--of", choices=["go", "showdown"], default="showdown")
    parser.add_argument("--decisions", type=int, default=1_000_000)
    args = parser.parse_args(arguments)
    name, found = ENGINES[args.engine](args)
    name = name if args.engine == "legal" else f"{name}-learning"
    stored = {"work": name, **bench_machine.about(), **found}
    (ROOT / "docs" / "results" / f"{name}.json").write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
