"""Quality on the way (`eval_every`): in the training, or beside it in a process of its own (`eval_async`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.config import Config
from fasttrain.runs.background_eval import BackgroundEvaluation, EvaluationError, Result, forget, keep_as
from fasttrain.runs.evaluations import EvaluationLog
from fasttrain.runs.saving import Saving

BEST = "best_model.zip"
SNAPSHOT = "a snapshot to evaluate"


class Evaluator:
    """Keeps evaluations.csv, and the best greedy mean reward's model as best_model.zip.

    Args:
        quality: evaluates the policy as it is now; the greedy one's `evaluate.summarise`.
        save: writes the model, and what belongs to it, to a file.
        say: one line.
        saving: is told of what could not be written.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        quality: Callable[[], dict[str, Any]],
        save: Callable[[Path], None],
        say: Callable[[str], None],
        saving: Saving,
    ) -> None:
        self.folder, self._quality, self._save, self._say = folder, quality, save, say
        self._saving = saving
        self.log = EvaluationLog(folder / "evaluations.csv")
        self.best_reward = float("-inf")
        self.beside_s = 0.0  # evaluated beside training
        self._background = BackgroundEvaluation(config, folder, save) if config.eval_async else None

    def evaluate(self, env_steps: int, wall_s: float) -> None:
        """Evaluate now, or hand a snapshot over."""
        if self._background is not None:
            try:
                with self._saving.of(SNAPSHOT):
                    self._background.submit(env_steps, wall_s)
            except EvaluationError as error:
                self._give_up(error)
        if self._background is None:
            quality = self._quality()
            if self._note(env_steps, wall_s, quality):
                with self._saving.of(BEST):
                    self._save(self.folder / BEST)
                    self.best_reward = quality["mean_reward"]

    def go_on(self, rows: list[dict[str, Any]]) -> None:
        """After a resume: these were made."""
        self.log.go_on(rows)
        self.best_reward = max([self.best_reward, *(row["mean_reward"] for row in rows)])

    def collect(self) -> None:
        """Take in what has been evaluated beside training."""
        if self._background is not None and self._background.waiting:
            try:
                self._take(self._background.poll())
            except EvaluationError as error:
                self._give_up(error)

    def finish(self, keep_on: Callable[[], bool]) -> None:
        """Wait for what is still evaluated, unless `keep_on` ends it; no process is left."""
        background = self._background
        if background is None:
            return
        try:
            if background.waiting and keep_on():
                self._say(f"waiting for {len(background.waiting)} evaluations that began during training")
            while self._take(background.wait(keep_on)):
                pass
        except EvaluationError as error:
            self._give_up(error)
        if self._background is not None and background.waiting and keep_on():
            self._say(f"{len(background.waiting)} evaluations were given up: they took too long")
        if background.left_out:
            self._say(f"{background.left_out} evaluations were left out: they take longer than eval_every")
        self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def _take(self, result: Result | None) -> bool:
        if result is None:
            return False
        self.beside_s += result.seconds
        if self._note(result.env_steps, result.wall_s, result.quality):
            with self._saving.of(BEST):
                keep_as(result.file, self.folder / BEST)
                self.best_reward = result.quality["mean_reward"]
        with self._saving.of(result.file.name):
            forget(result.file)
        return True

    def _note(self, env_steps: int, wall_s: float, quality: dict[str, Any]) -> bool:
        """Say and store it; whether it is the best so far."""
        if not quality["episodes"]:
            return False
        with self._saving.of(self.log.file.name):
            self.log.add(env_steps, wall_s, quality)
        win = "" if quality["win_rate"] is None else f", win rate {100 * quality['win_rate']:.1f} %"
        self._say(f"[EVAL] {env_steps:,} steps: mean reward {quality['mean_reward']:.3g}{win}")
        return bool(quality["mean_reward"] > self.best_reward)

    def _give_up(self, error: EvaluationError) -> None:
        lost = 0 if self._background is None else len(self._background.waiting)
        waited = f" ({lost} that waited are lost)" if lost else ""
        self._say(f"[EVAL] no evaluation beside training: {error}{waited}; from now on it is done in the training")
        self._saving.failed.pop(SNAPSHOT, None)  # none is wanted any more
        self.close()
