"""`loggers=[tensorboard]`: event files in the run's folder, by torch's SummaryWriter."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from stable_baselines3.common.logger import HParam, TensorBoardOutputFormat

from fasttrain.runs.loggers import Home, Numbers, Settings, Tracker
from fasttrain.terminal import near


class TensorBoard(TensorBoardOutputFormat, Tracker):
    """SB3's writer, which purges what a resume writes again."""

    name = "tensorboard"

    def __init__(self, home: Home, settings: Settings) -> None:
        self._folder, self._look = str(home.folder / "tensorboard"), f"tensorboard --logdir {near(home.shared)}"
        plain = (bool, int, float)
        self._settings = {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}
        import_module("tensorboard")  # torch has a writer without it that fails later
        super().__init__(self._folder)

    def cut(self, env_steps: int) -> None:
        self.writer.close()
        self.writer = type(self.writer)(log_dir=self._folder, purge_step=env_steps + 1)

    def finish(self, status: str, final: Numbers, files: Sequence[Path], step: int) -> str:
        if final:
            rows = {"settings": HParam(self._settings, dict(final)), **final}
            self.write(rows, dict.fromkeys(rows, ()), step)
        return self._look
