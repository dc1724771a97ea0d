"""`fasttrain plan-cluster run=FOLDER games_per_hour=N`: how many machines a training needs.

    fasttrain -m +profile=speed cluster=ray cluster.actors=1,2 hydra.sweep.dir=scaling
    fasttrain plan-cluster run=scaling games_per_hour=50000 cores=16 price=1.2 total_timesteps=1e9

run: one training with cluster=ray, or a sweep of such trainings. cores: of one machine; default: of this machine.
price: of one machine for one hour, in a currency of yours. total_timesteps: default: those of the training.

The prediction is one formula. Its numbers come from the training with the fewest actors. If there are trainings with
more actors, the error of the formula is shown for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.machine import usable_cores
from fasttrain.runs.progress import clock_text
from fasttrain.runs.view import FittingTable, make_console, say
from fasttrain.saving.files import read_json
from fasttrain.terminal import duration_text, rate_text
from fasttrain_report.values import as_mapping, as_number

KEYS = ("run", "games_per_hour", "cores", "price", "total_timesteps")
OFF_POLICY = ("dqn", "sac")
MESSAGE_S = 0.1  # an actor should work for this time per rollout
FAR = 0.1  # a larger error of the formula is pointed out


class Measured(NamedTuple):
    """One training with cluster=ray. Times are seconds per env step."""

    folder: Path
    actors: int
    env_steps: int
    episode_steps: float  # env steps per episode
    learner_s: float  # of the learner, besides waiting for actors
    actors_s: float  # waiting for actors
    config: Mapping[str, Any]

    @property
    def steps_per_s(self) -> float:
        return 1 / (self.learner_s + self.actors_s)


class Formula(NamedTuple):
    """Seconds per env step: those of the learner, plus the work of one actor ÷ number of actors.

    With schedule=continuous, DQN and SAC both happen at the same time, and the longer one counts.
    """

    learner_s: float
    work_s: float
    beside: bool

    @classmethod
    def of(cls, measured: Measured) -> Formula:
        algorithm = as_mapping(measured.config.get("algo")).get("name")
        beside = measured.config.get("schedule") == "continuous" or algorithm in OFF_POLICY
        waited = measured.learner_s + measured.actors_s if beside else measured.actors_s
        return cls(measured.learner_s, waited * measured.actors, beside)

    def steps_per_s(self, actors: int) -> float:
        work_s = self.work_s / actors
        return 1 / (max(self.learner_s, work_s) if self.beside else self.learner_s + work_s)

    def actors(self, steps_per_s: float) -> int | None:
        """The fewest actors that give so many env steps per second; None if the learner alone is slower."""
        left_s = 1 / steps_per_s - (0.0 if self.beside else self.learner_s)
        if left_s <= 0 or (self.beside and self.learner_s > left_s):
            return None
        return max(1, math.ceil(self.work_s / left_s * (1 - 1e-9)))


def main(arguments: Sequence[str]) -> int:
    """Print the measured trainings and the plan.

    Raises ConfigError: an argument is unknown or wrong, or the folder has no finished training with cluster=ray.
    """
    typed = _typed([text for text in arguments if text != "plan-cluster"])
    runs = sorted(_runs(Path(typed["run"])), key=lambda run: run.actors)
    games, cores = float(typed["games_per_hour"]), int(float(typed.get("cores", usable_cores())))
    first, console = runs[0], make_console()
    formula = Formula.of(first)
    table = FittingTable(["actors", "steps/s", "by the formula", "error", "folder"])
    for run in runs:
        predicted = formula.steps_per_s(run.actors)
        error = predicted / run.steps_per_s - 1
        far = "" if run is first else f"{100 * error:+.1f} %"
        table.add_row(str(run.actors), rate_text(run.steps_per_s), rate_text(predicted), far, str(run.folder))
    console.print(table)
    say(console, "The numbers of the formula come from the first row: per env step the learner takes "
                 f"{duration_text(formula.learner_s)}, an actor {duration_text(formula.work_s)}.")  # fmt: skip
    if len(runs) == 1:
        say(console, "warning: only one number of actors was measured, so the error of the formula is not known: train "
                     f"again with cluster.actors={2 * first.actors}")  # fmt: skip
    if any(abs(formula.steps_per_s(run.actors) / run.steps_per_s - 1) > FAR for run in runs):
        say(console, f"warning: the formula is wrong by more than {FAR:.0%}, so the plan below may be wrong by more")
    total = float(typed.get("total_timesteps", first.config["total_timesteps"]))
    for line in plan(formula, first, games, cores, total, as_number(typed.get("price"))):
        say(console, line)
    return EXIT_DONE


def plan(
    formula: Formula, run: Measured, games_per_hour: float, cores: int, total: float, price: float | None
) -> list[str]:
    """The plan as lines of text. Raises ConfigError: the learner alone is too slow."""
    wanted = games_per_hour * run.episode_steps / 3600
    head = f"{games_per_hour:,.0f} games an hour of {run.episode_steps:,.0f} env steps are {rate_text(wanted)} steps/s"
    if (actors := formula.actors(wanted)) is None:
        most = 3600 / formula.learner_s / run.episode_steps
        raise ConfigError(
            f"{head}; the learner alone takes {duration_text(formula.learner_s)} per env step, enough for {most:,.0f} "
            "games an hour with any number of actors: make the updates cheaper (algo.n_epochs, batch_size, a GPU)"
        )
    machines = math.ceil((actors + 1) / cores)
    envs = max(1, int(run.config["num_envs"]) // run.actors) * actors
    hours = total / formula.steps_per_s(actors) / 3600
    lines = [
        f"{head}: cluster.actors={actors} num_envs={envs}",
        f"machines of {cores} cores: {machines}; a core for each actor, and one for the learner",
        f"{total:,.0f} steps in {clock_text(3600 * hours)}: {machines * hours:.3g} machine-hours"
        + ("" if price is None else f", {machines * hours * price:,.2f} at {price:g} for a machine and hour"),
    ]
    rollout = as_number(as_mapping(run.config.get("algo")).get("rollout_size"))
    if rollout and (each_s := rollout * formula.work_s / actors) < MESSAGE_S:
        lines.append(f"warning: an actor would work {duration_text(each_s)} a rollout, less than "
                     f"{duration_text(MESSAGE_S)}, so messages would cost much: use "
                     f"algo.rollout_size={math.ceil(rollout * MESSAGE_S / each_s)}")  # fmt: skip
    return lines


def _typed(arguments: Sequence[str]) -> dict[str, str]:
    typed = dict(text.partition("=")[::2] for text in arguments)
    if wrong := [key for key in typed if key not in KEYS]:
        raise ConfigError(f"plan-cluster takes {', '.join(f'{key}=…' for key in KEYS)}; not {', '.join(wrong)}")
    if missing := [key for key in KEYS[:2] if not typed.get(key)]:
        raise ConfigError(f"plan-cluster needs {' and '.join(f'{key}=…' for key in missing)}")
    for key in KEYS[1:]:
        number = as_number(typed.get(key, 1))
        whole = key != "cores" or (number is not None and number.is_integer())
        if number is None or number <= 0 or not whole:
            raise ConfigError(f"{key}={typed[key]}: expected a {'whole ' * (key == 'cores')}number above 0")
    return typed


def _runs(folder: Path) -> list[Measured]:
    """The trainings with cluster=ray in the folder. Raises ConfigError: there is none."""
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder")
    places = [folder] if (folder / "plan.json").exists() else sorted(path.parent for path in folder.glob("*/plan.json"))
    found = [measured for place in places if (measured := _measured(place)) is not None]
    if not found:
        raise ConfigError(
            f"run={folder}: no finished training with cluster=ray there; train one for some minutes, with cluster=ray "
            "cluster.actors=1 and again with cluster.actors=2"
        )
    return found


def _measured(folder: Path) -> Measured | None:
    config = as_mapping(read_json(folder / "plan.json").get("config"))
    summary = read_json(folder / "summary.json")
    perf, cluster = as_mapping(summary.get("perf")), as_mapping(config.get("cluster"))
    steps, episodes = as_number(perf.get("env_steps")), as_number(summary.get("episodes"))
    wall_s, waited_ms = as_number(perf.get("wall_s")), as_number(perf.get("env_step_ms"))
    if cluster.get("engine") != "ray" or not (steps and episodes and wall_s and waited_ms):
        return None
    waited_s = waited_ms / 1e6
    all_steps = as_number(summary.get("env_steps")) or steps
    return Measured(
        folder, int(cluster["actors"]), int(steps), all_steps / episodes, max(1e-9, wall_s / steps - waited_s),
        waited_s, config,
    )  # fmt: skip
