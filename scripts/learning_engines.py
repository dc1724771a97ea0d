#!/usr/bin/env python3
"""How well one learns against an engine: python3 scripts/learning_engines.py go [--minutes 60] [--seed 0]

`go` trains MaskablePPO against GNU Go, level 1, on 5×5 for so many minutes, and then plays 400 games with seeds that
training did not see, half of them as Black: wins by colour, how many of the games differ from each other, and the win
rate over the training. What is found is stored in docs/results/.

  --minutes M   of training       --seed N     of the training
  --size N      of the board      --games N    that are played at the end
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
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and find_spec("fasttrain") is None and Path(sys.prefix) != ROOT / ".venv":
    import _bootstrap

    sys.exit(_bootstrap.run_script(Path(__file__), sys.argv[1:]))

import bench_machine  # noqa: E402

SETTINGS = ("num_envs=32", "algo.rollout_size=4096", "batch_size=512", "algo.n_epochs=4", "algo.net_arch=[256,256]",
            "algo.ent_coef=0.01", "algo.gamma=1.0")  # fmt: skip
TENTHS = 10
BOARDS = 16


def trained(folder: Path, size: int, minutes: float, seed: int) -> None:
    """Train for so long."""
    command = ["+profile=speed", "env=go", f"env.kwargs.size={size}", f"stop.max_minutes={minutes:g}", f"seed={seed}",
               "total_timesteps=1e9", "eval.episodes=20", *SETTINGS, f"hydra.run.dir={folder}"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "fasttrain", *command, "report=false"], check=True)


def curve(folder: Path) -> list[dict[str, Any]]:
    """Win rate in each tenth of the training's games."""
    with (folder / "episodes.csv").open() as file:
        won = [float(row["return"]) > 0 for row in csv.DictReader(file)]
    parts = [won[len(won) * tenth // TENTHS : len(won) * (tenth + 1) // TENTHS] for tenth in range(TENTHS)]
    return [{"games": len(part), "win_rate": round(sum(part) / max(1, len(part)), 4)} for part in parts]


def played(folder: Path, size: int, games: int, greedy: bool) -> dict[str, Any]:
    """`games` games, half of them as Black, with seeds of their own."""
    import bench_engines
    from fasttrain import MaskablePPO
    from fasttrain.machine import usable_cores
    from fasttrain.spec.daemons import DaemonsConfig
    from fasttrain.vec.games import DaemonVecEnv

    settings = DaemonsConfig(command=tuple(bench_engines.command()), count=BOARDS, games_per_daemon=1)
    with tempfile.TemporaryDirectory() as where:
        kwargs = {"size": size, "level": bench_engines.LEVEL}
        env = DaemonVecEnv("fasttrain.daemons.go:Go", kwargs, BOARDS, settings, usable_cores(), folder=Path(where))
        model = MaskablePPO.load(folder / "model.zip", device="cpu")
        env.seed(10**9)  # training's are small numbers and what is derived from them
        seen, won = env.reset(), {"black": list[bool](), "white": list[bool]()}
        left = [games // BOARDS] * BOARDS  # of each board the same number: quick games are no more often counted
        while any(left):
            actions, _ = model.predict(seen, deterministic=greedy, action_masks=env.slots.action_masks)
            seen, _, dones, infos = env.step(actions)
            for board in range(BOARDS):
                info = infos[board]
                if dones[board] and left[board] and "lost" not in info:
                    left[board] -= 1
                    won[info.get("colour", "black")].append(bool(info.get("is_win", False)))
        env.close()
        records = [json.loads(line)["record"] for line in (Path(where) / "games.jsonl").read_text().splitlines()]
    everything = [*won["black"], *won["white"]]
    return {
        "games": len(everything), "win_rate": round(sum(everything) / len(everything), 4),
        "distinct_share": round(len({*records}) / len(records), 4),
        **{colour: round(sum(one) / max(1, len(one)), 4) for colour, one in won.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, play, store."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("engine", choices=["go"])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=5)
    parser.add_argument("--games", type=int, default=400)
    args = parser.parse_args(arguments)
    folder = ROOT / "outputs" / f"go-{args.size}-{args.seed}"
    trained(folder, args.size, args.minutes, args.seed)
    summary = json.loads((folder / "summary.json").read_text())
    found = {
        "work": f"go-{args.size}-learning", **bench_machine.about(),
        "command": f"python3 scripts/learning_engines.py go --size {args.size} --minutes {args.minutes:g}",
        "env_steps": summary["env_steps"], "wall_s": round(summary["wall_s"]), "curve": curve(folder),
        "greedy": played(folder, args.size, args.games, True), "sampled": played(folder, args.size, args.games, False),
    }  # fmt: skip
    (ROOT / "docs" / "results" / f"go-{args.size}-learning.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({name: found[name] for name in ("env_steps", "wall_s", "greedy", "sampled", "curve")}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
