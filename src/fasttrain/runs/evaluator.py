"""Evaluations (`eval_every`) and videos (`video.every`) during training: in its process, or in a second one.

With `eval_async` the trainer only saves snapshots. The second process plays them with its own envs, seeds and random
state. A snapshot that is due while two are waiting is skipped.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain.runs.logs import EvaluationLog
from fasttrain.saving.files import Saving
from fasttrain.spec.config import Config
from fasttrain.spec.reading import second_env_hint
from fasttrain_vec.process import PipedProcess, WorkerLostError

BEST, VIDEOS = "best_model.zip", "videos"
SNAPSHOT, EVALUATION = "a snapshot to evaluate", "evaluation"


class Evaluator:
    """Keeps evaluations.csv, and the model with the best greedy mean reward as best_model.zip.

    Args:
        quality: evaluates the present policy; returns `evaluate.summarise` of greedy play.
        save: writes the model, with its statistics and opponents, to a file.
        note: is called with each evaluation and the number of env steps before it.
        film: makes a video of the present policy; returns a line about it.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        quality: Callable[[], dict[str, Any]],
        save: Callable[[Path], None],
        say: Callable[[str], None],
        saving: Saving,
        note: Callable[[dict[str, Any], int], None] = lambda *_: None,
        film: Callable[[Path], str] = lambda _: "",
    ) -> None:
        self.folder, self._quality, self._save, self._say, self._note = folder, quality, save, say, note
        self._film, self._alone = film, second_env_hint(config)
        self.saving = saving
        self.log = EvaluationLog(folder / "evaluations.csv")
        self.best_reward = float("-inf")
        self.beside_s = 0.0  # seconds of evaluation in the second process
        self.background = BackgroundEvaluation(config, folder, save) if config.eval_async else None

    def evaluate(self, env_steps: int, wall_s: float, measure: bool = True, film: bool = False) -> None:
        """Evaluate the policy, film it, or both: here, or from a snapshot in the second process."""
        video = self.folder / VIDEOS / f"step_{env_steps}.mp4" if film else None
        if self.background is not None:
            try:
                with self.saving.of(SNAPSHOT):
                    self.background.submit(env_steps, wall_s, measure, video)
                return
            except WorkerLostError as error:
                self._give_up(error)
        if video is not None:
            self._say(self._film(video))
        if measure:
            with self.saving.extra(EVALUATION):
                self._record(env_steps, wall_s, self._quality(), lambda: self._save(self.folder / BEST))

    def go_on(self, rows: list[dict[str, Any]]) -> None:
        """Continue a resumed run from its stored evaluations."""
        self.log.go_on(rows)
        self.best_reward = max([self.best_reward, *(row["mean_reward"] for row in rows)])

    def collect(self) -> None:
        """Record what the second process has finished."""
        if self.background is not None:
            try:
                self._take(self.background.poll())
            except WorkerLostError as error:
                self._give_up(error)

    def finish(self, keep_on: Callable[[], bool]) -> None:
        """Wait for running evaluations while `keep_on()` is true, then end the second process."""
        background = self.background
        if background is None:
            return
        try:
            if background.waiting and keep_on():
                self._say(f"waiting for {len(background.waiting)} evaluations that were due during training")
            while self._take(background.wait(keep_on)):
                pass
        except WorkerLostError as error:
            self._give_up(error)
        if self.background is not None and background.waiting and keep_on():
            self._say(f"{len(background.waiting)} evaluations were given up: they took too long")
        if background.left_out:
            self._say(f"{background.left_out} evaluations were left out: one takes longer than eval_every steps")
        self.close()

    def close(self) -> None:
        if self.background is not None:
            self.background.close()
            self.background = None

    def _take(self, result: Result | None) -> bool:
        if result is None:
            return False
        self.beside_s += result.seconds
        if result.filmed:
            self._say(result.filmed)
        snapshot = result.file.parent
        if result.quality:
            self._record(result.env_steps, result.wall_s, result.quality, lambda: self._keep(snapshot))
        shutil.rmtree(snapshot, ignore_errors=True)
        return True

    def _keep(self, snapshot: Path) -> None:
        for part in sorted(snapshot.iterdir()):  # the model with its statistics and opponents
            os.replace(part, self.folder / part.name)

    def _record(self, env_steps: int, wall_s: float, quality: dict[str, Any], keep: Callable[[], None]) -> None:
        """Print and store an evaluation; `keep` stores the model if it is the best so far."""
        if not quality["episodes"]:
            return
        with self.saving.of(self.log.file.name):
            self.log.add(env_steps, wall_s, quality)
        self._note(quality, env_steps)
        win = "" if quality["win_rate"] is None else f", win rate {100 * quality['win_rate']:.1f} %"
        self._say(f"[EVAL] {env_steps:,} steps: mean reward {quality['mean_reward']:.3g}{win}")
        if quality["mean_reward"] > self.best_reward:
            with self.saving.of(BEST):
                keep()
                self.best_reward = quality["mean_reward"]

    def _give_up(self, error: WorkerLostError) -> None:
        lost = 0 if self.background is None else len(self.background.waiting)
        why = f"{error}{self._alone}" + (f" ({lost} that waited are lost)" if lost else "")
        self._say(f"[EVAL] no evaluation beside training: {why}; from now on the training itself evaluates")
        self.saving.failed.pop(SNAPSHOT, None)  # a snapshot that could not be written no longer matters
        self.close()


MOST_WAITING = 2  # most snapshots that wait, including the one that is being played
NAME, SERVE = "the process that evaluates", "fasttrain.runs.evaluator:serve"
PATIENCE_S = 600.0  # time limit for running evaluations when training is over


class Result(NamedTuple):
    """The evaluation of one snapshot."""

    env_steps: int
    wall_s: float  # seconds of training when the snapshot was taken
    quality: dict[str, Any]  # `evaluate.summarise` of greedy play; empty if only a video was made
    seconds: float  # time that evaluation and video took
    file: Path  # the snapshot's model, in a folder of its own
    filmed: str = ""  # a line for the console about the video


class BackgroundEvaluation:
    """The second process and the snapshots that wait for it, each in a folder below `evaluating`."""

    def __init__(self, config: Config, folder: Path, save: Callable[[Path], None]) -> None:
        self._config, self._save = config, save
        self.folder = folder / "evaluating"
        self.waiting: list[tuple[int, float, Path]] = []
        self.left_out = 0
        self._process: PipedProcess | None = None

    def submit(self, env_steps: int, wall_s: float, measure: bool = True, video: Path | None = None) -> None:
        """Save the policy for the process to evaluate, film or both. Raises WorkerLostError if the process died."""
        if len(self.waiting) >= MOST_WAITING:
            self.left_out += 1
            return
        if self._process is None:
            try:  # the process gets one thread, so that the trainer has the other cores
                alone = dataclasses.replace(self._config, torch_threads=1)
                self._process = PipedProcess(NAME, SERVE, alone, environment={})
            except OSError as error:  # no memory or no file descriptors are left
                raise WorkerLostError(f"{NAME} cannot be started ({error})") from error
        process = self._process
        file = self.folder / str(env_steps) / BEST
        file.parent.mkdir(parents=True, exist_ok=True)
        self._save(file)
        self.waiting.append((env_steps, wall_s, file))
        process.use_pipe(lambda: process.connection.send((file, measure, video)))

    def poll(self, timeout_s: float = 0.0) -> Result | None:
        """The next result within `timeout_s`, or None. The caller removes its `file`. Raises WorkerLostError."""
        process = self._process
        if not self.waiting or process is None or not process.use_pipe(lambda: process.connection.poll(timeout_s)):
            return None
        answer = process.use_pipe(process.connection.recv)
        env_steps, wall_s, file = self.waiting.pop(0)
        if "error" in answer:
            raise WorkerLostError(answer["error"])
        return Result(env_steps, wall_s, answer["quality"], answer["seconds"], file, answer["filmed"])

    def wait(self, keep_on: Callable[[], bool]) -> Result | None:
        """Like `poll` for at most `PATIENCE_S`. None also if `keep_on()` is false."""
        deadline = time.monotonic() + PATIENCE_S
        while self.waiting and keep_on() and time.monotonic() < deadline:
            if (result := self.poll(0.2)) is not None:
                return result
        return None

    def close(self) -> None:
        """End the process and remove the waiting snapshots."""
        if self._process is not None:
            self._process.end(1.0)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)


def serve(connection: Connection, config: Config) -> None:
    """Evaluate the snapshots that arrive, until the connection is closed. Called in the second process."""
    from fasttrain.runs.engine import set_threads

    set_threads(1)
    with suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                answer = _evaluated(config, *job)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)


def _evaluated(config: Config, file: Path, measure: bool, video: Path | None) -> dict[str, Any]:
    from rich.console import Console

    from fasttrain.runs.evaluate import evaluate_both
    from fasttrain.runs.models import find_statistics, load_policy
    from fasttrain.runs.video import recorded

    begun, model, statistics = time.perf_counter(), load_policy(config, file), find_statistics(config, file)
    filmed = "" if video is None else recorded(config, model, statistics, video)
    quality: dict[str, Any] = {}
    if measure:
        quality = evaluate_both(model, config, Console(quiet=True), statistics=statistics, sampled=False)["greedy"]
    return {"quality": quality, "filmed": filmed, "seconds": time.perf_counter() - begun}
