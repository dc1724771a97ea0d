"""The curriculum of a run: which task each training episode begins with, and how well each task is played.

Environments reset by themselves, so the task of the next episode must be known before the present episode ends. Each
environment has one task in advance, so the result of an episode cannot change the next task, only later tasks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.batch import Int64Array
from fasttrain.envs.tasks import TASK
from fasttrain.errors import ConfigError, EnvError
from fasttrain.runs.loggers import instance_of
from fasttrain.saving.env_state import plain
from fasttrain.spec.config import Config
from fasttrain.spec.curriculum import LEARNABILITY, WEIGHTS, CurriculumConfig, stages_of
from fasttrain.spec.infos import win_of
from fasttrain.spec.setting import named
from fasttrain.vec.self_play import SelfPlayVecEnv

T = TypeVar("T")
RECENT = 100  # means are taken over this number of last episodes
FLOOR = 0.1  # with learnability: share of draws by weight alone, so that every task is drawn at times
STREAM = 0x7A5C  # part of the generator's seed, so that the run's other generators draw different numbers


class TaskCurriculum(Protocol):
    """The methods and the attribute that your class for `curriculum.by=module:Class` must have.

    Its constructor may have the parameters `tasks` (the list of names) and `seed`.
    """

    state: Any  # values that JSON can store; read at a checkpoint, and assigned when the run is resumed

    def sample(self) -> str:
        """Draw the name of the task of a future episode."""

    def on_step(self, env_steps: int) -> None:
        """Called after each vector step with the number of env steps so far."""

    def on_episode(self, task: str, episode_return: float, length: int, won: bool | None) -> None:
        """Called at the end of each episode. `won` is None if the environment does not report it."""


class TaskSampler:
    """Draws tasks of the present stage by weight, and with `curriculum.by=learnability` also by learnability.

    Learnability is p(1 - p), where p is the share of wins among the last 100 episodes of a task: tasks that are always
    or never won teach nothing (Tzannetos et al. 2023, https://arxiv.org/abs/2304.12877).

    Args:
        in_advance: number of running and future episodes that already have a task. When a stage begins, their tasks
            are of the previous stage, so the means of the new stage leave these episodes out.
    """

    def __init__(self, config: CurriculumConfig, seed: int, in_advance: int = 0) -> None:
        self._names = [*config.tasks]
        self._weights = np.array([config.weights.get(name, 1.0) for name in self._names])
        self._stages, self._stage = stages_of(config), 0
        self._wins: dict[str, deque[bool]] | None = None
        if config.by == LEARNABILITY:
            self._wins = {name: deque(maxlen=RECENT) for name in self._names}
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in ("win_rate", "reward")}
        self._in_advance, self._of_before = in_advance, 0
        self._random = np.random.default_rng((seed, STREAM))
        self._bounds: np.ndarray[Any, np.dtype[np.float64]] | None = None  # (K,) cumulative probabilities

    @property
    def stage(self) -> int:
        """The number of the present stage of the schedule, from 0."""
        return self._stage

    @property
    def stages(self) -> int:
        """How many stages the schedule has."""
        return len(self._stages)

    def probabilities(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(K,) float64: the probability of each task now."""
        tasks = self._stages[self._stage].tasks
        chances: np.ndarray[Any, np.dtype[np.float64]] = self._weights * [name in tasks for name in self._names]
        chances = chances / chances.sum()
        if self._wins is not None:
            shares = np.array([(sum(won) + 1) / (len(won) + 2) for won in self._wins.values()])
            learnable = chances * shares * (1 - shares)
            chances = (1 - FLOOR) * learnable / learnable.sum() + FLOOR * chances
        return chances

    def sample(self) -> str:
        if self._bounds is None:  # computed only after a change, because thousands of games may end per second
            self._bounds = np.cumsum(self.probabilities())
        drawn = int(np.searchsorted(self._bounds, self._random.random() * self._bounds[-1], side="right"))
        return self._names[drawn]

    def on_step(self, env_steps: int) -> None:
        for number in range(len(self._stages) - 1, self._stage, -1):
            stage = self._stages[number]
            if stage.metric is None:
                reached = env_steps >= stage.begins  # even if an earlier stage still waits for a mean result
            else:
                next_one, mean = number == self._stage + 1, self._mean(stage.metric)
                reached = next_one and mean is not None and mean >= stage.begins
            if reached:
                self._enter(number)
                return
        present = self._stages[self._stage]
        if present.metric is not None and (mean := self._mean(present.metric)) is not None and mean < present.back:
            self._enter(self._stage - 1)

    def on_episode(self, task: str, episode_return: float, length: int, won: bool | None) -> None:
        if self._of_before:
            self._of_before -= 1
        else:
            self._recent["reward"].append(episode_return)
            self._recent["win_rate"].extend([] if won is None else [float(won)])
        if won is None and (self._wins is not None or any(stage.metric == "win_rate" for stage in self._stages)):
            raise EnvError(
                "the curriculum needs wins, and the environment does not report whether an episode was won: put "
                "is_success into the last info of an episode, or name another entry by env.result.win=…"
            )
        if self._wins is not None and won is not None:
            self._wins[task].append(won)
            self._bounds = None

    def _mean(self, metric: str) -> float | None:
        values = self._recent[metric]
        return sum(values) / RECENT if len(values) == RECENT else None

    def _enter(self, stage: int) -> None:
        self._stage, self._bounds, self._of_before = stage, None, self._in_advance
        for values in self._recent.values():
            values.clear()

    @property
    def state(self) -> dict[str, Any]:
        """The sampler's state as values for JSON."""
        wins = None if self._wins is None else {name: list(won) for name, won in self._wins.items()}
        recent = {name: list(values) for name, values in self._recent.items()}
        stage = {"stage": self._stage, "of_before": self._of_before}
        return {**stage, "wins": wins, "recent": recent, "random": self._random.bit_generator.state}

    @state.setter
    def state(self, stored: Mapping[str, Any]) -> None:
        self._stage = min(int(stored["stage"]), len(self._stages) - 1)
        self._of_before = int(stored.get("of_before", 0))
        for name, won in (stored["wins"] or {}).items():
            if self._wins is not None and name in self._wins:
                self._wins[name].extend(won)
        for name, values in stored["recent"].items():
            self._recent[name].extend(values)
        self._random.bit_generator.state = stored["random"]
        self._bounds = None


@dataclass(slots=True)
class TaskFigures:
    """How well a task is played: the number of its episodes, and the results of the last ones."""

    episodes: int = 0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    wins: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    value_error: float | None = None  # mean absolute error of the predicted values in the last rollout

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "episodes": self.episodes,
            "mean_reward": sum(self.returns) / len(self.returns) if self.returns else None,
            "win_rate": sum(self.wins) / len(self.wins) if self.wins else None,
            "value_error": self.value_error,
        }


class Curriculum:
    """Gives each environment the task of its next episode, and records how well each task is played."""

    def __init__(self, config: Config, num_envs: int) -> None:
        settings = config.curriculum
        self.names, self._by = [*settings.tasks], settings.by
        self.draws: TaskCurriculum
        if settings.by in (WEIGHTS, LEARNABILITY):
            self.draws = TaskSampler(settings, config.seed, 2 * num_envs)
        else:
            name, given = named(settings.by, "curriculum", "curriculum.by")
            kind: Any = object
            supplied = {"tasks": lambda: list(self.names), "seed": lambda: config.seed}
            self.draws = instance_of(name, given, "curriculum.by", kind, supplied)
            if missing := [each for each in ("sample", "on_step", "on_episode") if not hasattr(self.draws, each)]:
                raise ConfigError(f"curriculum.by={name}: it has no method {', '.join(missing)}")
        self.figures = {name: TaskFigures() for name in self.names}
        self.present: Int64Array = np.zeros(num_envs, np.int64)  # numbers of tasks, from 1; 0: none
        self.following: Int64Array = np.zeros(num_envs, np.int64)
        self._rows: list[Int64Array] = []  # tasks (N,) at each vector step of the rollout
        self.state()  # fails now if a user's class has a state that cannot be stored

    def begin(self, env: VecEnv) -> None:
        """Draw the first task of every environment, for the environment's next `reset`."""
        self.present[:] = [self._draw() for _ in self.present]
        set_tasks(env, self.present)

    def prepare(self, env: VecEnv) -> None:
        """Call after the first reset: draw the tasks of the second episodes, unless they came from a checkpoint."""
        if not self.following.any():
            self.following[:] = [self._draw() for _ in self.following]
        set_tasks(env, self.following)

    @contextmanager
    def set_aside(self, env: VecEnv, lent: AbstractContextManager[T]) -> Iterator[T]:
        """Lend the training's environments to an evaluation. Inside the block episodes have no tasks. When the
        block ends, the interrupted training episodes are played again from the start, with their tasks."""
        with lent as played:
            set_tasks(env, np.zeros_like(self.present))
            try:
                yield played
            finally:
                set_tasks(env, self.present)
        set_tasks(env, self.following)

    def to_dict(self) -> dict[str, Any]:
        """The figures of every task, for JSON."""
        return {name: each.to_dict() for name, each in self.figures.items()}

    def _draw(self) -> int:
        name = self.draws.sample()
        if name not in self.figures:
            raise ConfigError(f"curriculum.by: sample() returned {name!r}; the tasks are {', '.join(self.names)}")
        return 1 + self.names.index(name)

    def step(self, env: VecEnv, ended: Sequence[int], env_steps: int) -> None:
        """Call after each vector step. In the environments `ended` the next episode has already begun."""
        self._rows.append(self.present.copy())
        self.draws.on_step(env_steps)
        if ended:
            rows = np.asarray(ended, np.int64)
            self.present[rows] = self.following[rows]
            self.following[rows] = [self._draw() for _ in ended]
            set_tasks(env, self.following[rows], rows)

    def take_value_errors(self, model: Any) -> None:
        """Store for each task the mean absolute error of the values in the last rollout. This works
        only for fasttrain's PPO with `schedule=lockstep`: other rollouts do not have one row for each vector step."""
        rows, self._rows = self._rows, []
        storage = getattr(getattr(model, "rollout_buffer", None), "storage", None)
        if not rows or storage is None or storage.values.shape != (len(rows), len(self.present)):
            return
        tasks, errors = np.stack(rows), np.abs(np.asarray(storage.returns) - np.asarray(storage.values))
        for number, figures in enumerate(self.figures.values(), 1):
            if (played := tasks == number).any():
                figures.value_error = float(errors[played].mean())

    def count(self, info: Mapping[str, Any], episode_return: float, length: int) -> None:
        """Record an ended episode. `info`: the last info of the episode, from `InfoReader.read`."""
        figures = self.figures.get(str(info.get(TASK)))
        if figures is None:  # the episode had no task, because its env was restarted
            return
        won = win_of(info)
        figures.episodes += 1
        figures.returns.append(episode_return)
        if won is not None:
            figures.wins.append(won)
        self.draws.on_episode(str(info[TASK]), episode_return, length, won)

    def state(self) -> dict[str, Any]:
        """The state as values for a checkpoint."""
        figures = {
            name: {"episodes": each.episodes, "returns": list(each.returns), "wins": list(each.wins)}
            for name, each in self.figures.items()
        }
        tasks = {"present": self.present.tolist(), "following": self.following.tolist()}
        draws = plain(getattr(self.draws, "state", None))
        try:
            json.dumps(draws)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"curriculum.by={self._by}: a checkpoint cannot store its state {draws!r:.60} ({error}): "
                              "use lists, mappings, texts and numbers") from error  # fmt: skip
        return {**tasks, "figures": figures, "draws": draws}

    def load(self, stored: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        for name, each in stored["figures"].items():
            if (figures := self.figures.get(name)) is not None:
                figures.episodes = int(each["episodes"])
                figures.returns.extend(each["returns"])
                figures.wins.extend(each["wins"])
        self.present[:], self.following[:] = stored["present"], stored["following"]
        if stored["draws"] is not None:
            self.draws.state = stored["draws"]

    def line(self) -> str:
        """`stage 1 of 2, early 62 %, late 31 %`: win rates, or mean rewards if wins are not reported."""
        shown, draws = list[str](), self.draws
        if isinstance(draws, TaskSampler) and draws.stages > 1:
            shown.append(f"stage {draws.stage + 1} of {draws.stages}")
        for name, each in self.figures.items():
            row = each.to_dict()
            if row["win_rate"] is not None:
                shown.append(f"{name} {100 * row['win_rate']:.0f} %")
            elif row["mean_reward"] is not None:
                shown.append(f"{name} {row['mean_reward']:.3g}")
        return ", ".join(shown)


def set_tasks(env: VecEnv, numbers: Int64Array, envs: Int64Array | None = None) -> None:
    """Set the tasks of the next episodes: `numbers` (M,) for the environments `envs` (M,), or for all."""
    base: Any = env.unwrapped
    base = base.inner if isinstance(base, SelfPlayVecEnv) else base
    if hasattr(base, "set_tasks"):
        base.set_tasks(numbers, slice(None) if envs is None else envs)
        return
    for index, number in zip(range(env.num_envs) if envs is None else envs.tolist(), numbers.tolist(), strict=True):
        env.env_method("set_task", number, indices=[index])
