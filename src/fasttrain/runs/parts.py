"""The parts of one run, typed. The callback, checkpoints, evaluations and reports work with this object."""

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
from fasttrain.runs.phases import Phases
from fasttrain.runs.progress import Progress, StatusFile
from fasttrain.runs.stopping import STEPS, Stop, StopFlag, Stopping
from fasttrain.runs.view import LiveView, Voice
from fasttrain.saving.checkpointing import Checkpoints
from fasttrain.saving.files import Saving, into_place, write_json
from fasttrain.spec.config import Config
from fasttrain.spec.infos import InfoReader
from fasttrain.spec.plan import RunSpec
from fasttrain.vec.base import EmptyMasks


class Interval:
    """Reports when a counter has passed the next multiple of `every` (0: never)."""

    def __init__(self, every: int) -> None:
        self.every = self.following = every

    def due(self, count: int) -> bool:
        if not self.every or count < self.following:
            return False
        self.following = (count // self.every + 1) * self.every
        return True


class Course:
    """State of the training loop: when logs, evaluations and checkpoints are due, and why the training ends."""

    def __init__(self, config: Config) -> None:
        self.log = Interval(config.log_every)  # `log` and `snapshot` count gradient updates, the others env steps
        self.snapshot = Interval(config.self_play.every)
        self.evaluate = Interval(config.eval_every)
        self.checkpoint = Interval(config.checkpoint_interval[0])
        self.film = Interval(config.video.every)
        self.logged_updates = 0
        self.enemy_turn_ms = 0.0  # sum of the values that Python envs report as info["perf"]["enemy_turn_ms"]
        self.stopped: Stop | None = None  # set when a rule of `stop`, a callback or a signal ends the training early
        self.at_rest = True  # False: the training ended inside a rollout
        self.noise = list[Any]()  # in a resumed run: the action noise of each env; None: the env begins an episode

    @property
    def continues(self) -> bool:
        """Whether the run is to be resumed later, because `stop.at_steps` ends the training."""
        return self.stopped is not None and self.stopped.by == STEPS


@dataclass(eq=False)
class Parts:
    """One run: its plan, and the objects that were built from it."""

    plan: RunSpec  # a new object after a change in training, for example when kernels take over
    folder: Path
    console: Console
    say: Voice  # prints one line, above the live view if there is one
    clock: PhaseClock
    stopping: Stopping
    users: UsersCallbacks
    env: VecEnv
    model: BaseAlgorithm
    pool: SnapshotPool | None  # the opponents in self-play; None without self-play
    curriculum: Curriculum | None  # None without tasks
    phases: Phases | None  # None without `env.phases`
    engine_switch: EngineSwitch | None
    compile_s: float = 0.0  # seconds of compiling kernels before training
    startup_s: float = 0.0  # seconds from the start of the process to the start of training
    resumed_at: list[int] = field(default_factory=list)  # number of env steps at each resume
    origin: dict[str, Any] = field(default_factory=dict)  # for plan.json: command lines, versions and machine
    stop: StopFlag = field(default_factory=StopFlag)
    evaluator: Evaluator = field(init=False)  # `train.build` sets this field and the two below
    meter: PerfMeter = field(init=False)
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.saving, self.empty_masks = Saving(self.say), EmptyMasks(config.env.on_empty_mask == "raise", self.say)
        self.reader = InfoReader.of(config.env, self.say)  # reads the envs' infos
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
        """The effective configuration."""
        return self.plan.config

    def write_plan(self) -> None:
        """Write plan.json again, also if the folder was moved or emptied during the run."""
        write_json(self.folder / "plan.json", {**self.plan.to_dict(), **self.origin})

    def save(self, file: Path) -> None:
        """Write the model with its statistics and opponents. If writing fails, the old files are kept."""
        with into_place(file) as draft:
            save_model(self.model, draft)
            if self.pool is not None:
                torch.save(self.pool.state(), pool_file(draft))


def pool_file(model_file: Path) -> Path:
    """The file with the opponents in self-play that belong to a model zip."""
    return model_file.with_name(f"{model_file.stem}.opponents.pt")
