"""Do settings reach the rewards that RL Baselines3 Zoo publishes, one run an entry
(https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md)?

`zoo-tuned-…`: conf/tuned of this repository. `zoo-entry-…`: entries of rl_zoo3, imported by `fasttrain zoo import` and
run by the faster of the two commands that it prints; they need rl_zoo3.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.work import OURS, Sample, Work, works_of
from benchmarks.works.learning import learned, learning_work

EPISODES = "eval.episodes=500"
# What the zoo's benchmark says, of its algorithms that which is best; it has nothing for DoorKey (best: about 0.965).
TUNED = {
    "cartpole": 500.0, "acrobot": -73.506, "mountaincar": -100.849, "mountaincar_continuous": 94.679,
    "pendulum": -156.995, "lunarlander": 242.119, "doorkey": 0.96,
}  # fmt: skip
ENTRIES = {
    ("ppo", "CartPole-v1"): 500.0, ("ppo", "LunarLander-v3"): 242.119, ("sac", "Pendulum-v1"): -156.995,
    ("ppo", "Acrobot-v1"): -73.506, ("ppo", "MountainCar-v0"): -110.423, ("ppo", "Pendulum-v1"): -172.225,
    ("dqn", "MountainCar-v0"): -100.849, ("qrdqn", "CartPole-v1"): 500.0, ("ars", "CartPole-v1"): 500.0,
    ("a2c", "CartPole-v1"): 500.0, ("td3", "Pendulum-v1"): -151.855,
}  # fmt: skip


def imported(algo: str, env: str, seed: int) -> Sample:
    """A training by the faster command that `fasttrain zoo import` prints.

    Raises:
        SystemExit: it printed none.
    """
    zoo = find_spec("rl_zoo3")
    if zoo is None or zoo.origin is None:
        return {"skipped": "rl_zoo3 is not installed"}
    file = Path(zoo.origin).parent / "hyperparams" / f"{algo}.yml"
    command = [sys.executable, "-m", "fasttrain", "zoo", "import", str(file), "--env", env, "--algo", algo]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        done = subprocess.run(command, capture_output=True, text=True)
        line = next((line for line in done.stdout.splitlines() if line.endswith("    faster")), None)
        if line is None:
            raise SystemExit(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return learned((*line.split()[1:-1], EPISODES), "mean_reward", seed)


WORKS = works_of(
    *(
        learning_work(
            f"zoo-tuned-{name}",
            f"`+tuned={name}`; the zoo's best mean reward is {reward:g}.",
            {OURS: ("+profile=speed", f"+tuned={name}", EPISODES)},
            "mean_reward",
        )
        for name, reward in TUNED.items()
    ),
    *(
        Work(
            f"zoo-entry-{algo}-{env.partition('-')[0].lower()}",
            f"The zoo's entry for {env} by {algo}, imported; it publishes {reward:g}.",
            {OURS: partial(imported, algo, env)},
            equal=(),
            seeded=True,
        )
        for (algo, env), reward in ENTRIES.items()
    ),
)
