"""The parts of one run, typed: what its callback, checkpoints, evaluations and reports are given of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from fasttrain.algos.self_play import SnapshotPool
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.windows import PerfMeter
from fasttrain.runs.curriculum import Curriculum
from fasttrain.runs.engine import EngineSwitch
from fasttrain.runs.evaluator import Evaluator
from fasttrain.runs.loggers import UsersCallbacks
from fasttrain.runs.logs import EpisodeLog
from fasttrain.runs.models import save_model
from fasttrain.runs.progress import Progress, StatusFile
from fasttrain.runs.stopping import Stop, StopFlag, Stopping
from fasttrain.runs.view import LiveView, Voice
from fasttrain.saving.checkpointing import Checkpoints
from fasttrain.saving.files import Saving, into_place, write_json
from fasttrain.spec.config import Config
from fasttrain.spec.infos import InfoReader
from fasttrain.spec.plan import RunSpec
from fasttrain.vec.base import EmptyMasks


class Interval:
    """Says when a counter has passed the next multiple of `every` (0 = never)."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.following = every

    def due(self, count: int) -> bool:
        if not self.every or count < self.following:
            return False
        self.following = (count // self.every + 1) * self.every
        return True


class Course:
    """Where a training is: what is due next, and why it ends."""

    def __init__(self, config: Config) -> None:
        self.log = Interval(config.log_every)  # in gradient updates, as snapshots are; the others in env steps
        self.snapshot = Interval(config.self_play.every)
        self.evaluate = Interval(config.eval_every)
        self.checkpoint = Interval(config.checkpoint_interval[0])
        self.film = Interval(config.video.every)
        self.logged_updates = 0
        self.enemy_turn_ms = 0.0  # of Python envs that report info["perf"]["enemy_turn_ms"]
        self.stopped: Stop | None = None  # before the horizon, by a rule of `stop` or a signal
        self.at_rest = True  # False: stopped within a rollout
        self.noise = list[Any]()  # of a resumed run: where each env's action noise was; None: the env starts again


@dataclass(eq=False)
class Parts:
    """One run: what was decided (`plan`), and what was built for it."""

    plan: RunSpec  # changed where only the running training can tell
    folder: Path
    console: Console
    say: Voice  # one line, above the live view where there is one
    clock: PhaseClock
    stopping: Stopping
    users: UsersCallbacks
    env: VecEnv
    model: BaseAlgorithm
    pool: SnapshotPool | None  # the opponents in self-play
    curriculum: Curriculum | None  # where training episodes begin with tasks
    engine_switch: EngineSwitch | None
    compile_s: float = 0.0
    startup_s: float = 0.0  # from the creation of the process until the training began
    resumed_at: list[int] = field(default_factory=list)  # env steps
    origin: dict[str, Any] = field(default_factory=dict)  # of plan.json: where the run, or its resume, comes from
    stop: StopFlag = field(default_factory=StopFlag)
    evaluator: Evaluator = field(init=False)  # this and the next two: by `train.build`
    meter: PerfMeter = field(init=False)
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.saving, self.empty_masks = Saving(self.say), EmptyMasks(config.env.on_empty_mask == "raise", self.say)
        self.reader = InfoReader.of(config.env, self.say)  # of the envs' infos
        self.course = Course(config)
        self.progress = Progress(config.total_timesteps, self.clock)
        if self.curriculum is not None:
            self.progress.tasks = self.curriculum.line
        self.progress.max_s = None if config.stop.max_minutes is None else 60 * config.stop.max_minutes
        self.episodes = EpisodeLog(self.folder / "episodes.csv", config.reward_debug, self.saving)
        self.status = StatusFile(self.folder, self.progress, lambda: self.say.last)
        title = f"{config.algo.name} on {config.env.id or config.env.entry_point}"
        panel = config.live == "on" or (config.live == "auto" and self.console.is_terminal)
        self.live = LiveView(self.progress, self.console, title, panel, self.status.tick)

    @property
    def config(self) -> Config:
        """The effective one, after all that is known by now."""
        return self.plan.config

    def write_plan(self) -> None:
        """plan.json, whole: also in a folder that was moved or emptied on the way."""
        write_json(self.folder / "plan.json", {**self.plan.to_dict(), **self.origin})

    def save(self, file: Path) -> None:
        """The model, and what belongs to it: whole, or as it was."""
        with into_place(file) as draft:
            save_model(self.model, draft)
            if self.pool is not None:
                torch.save(self.pool.state(), pool_file(draft))


def pool_file(model_file: Path) -> Path:
    """Where the opponents lie that belong to a model zip."""
    return model_file.with_name(f"{model_file.stem}.opponents.pt")
