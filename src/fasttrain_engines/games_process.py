"""A worker that plays games with engines, as the trainer sees it."""

from __future__ import annotations

import pickle
from typing import Any

from fasttrain.errors import EnvError, EnvSpecError, FastTrainError
from fasttrain.vec.process import PipedProcess
from fasttrain_engines.games_worker import GamesSettings, Ready


class GamesProcess(PipedProcess):
    """The process, what it says and what it is told."""

    _lost = EnvError

    def __init__(self, settings: GamesSettings) -> None:
        self.up, self.silent_s = False, 0.0  # how long it was listened to in vain
        what = f"worker {settings.worker}, which plays the games with the engines,"
        super().__init__(what, "fasttrain_engines.games_worker:serve", settings)

    def ready(self, timeout_s: float) -> Ready:
        """The spaces.

        Raises:
            FastTrainError: the game could not be made.
        """
        answer = self.use_pipe(lambda: self.connection.recv() if self.connection.poll(timeout_s) else None)
        if isinstance(answer, FastTrainError):
            raise answer
        if answer is None:
            raise EnvSpecError(f"env.entry_point: the game was not made within {timeout_s:g} s")
        spaces: Ready = answer
        return spaces

    def send(self, command: str, content: object) -> None:
        """Tell the worker."""
        self.use_pipe(lambda: self.connection.send_bytes(pickle.dumps((command, content))))

    def hear(self) -> tuple[str, Any]:
        """The next message."""
        message: tuple[str, Any] = pickle.loads(self.use_pipe(self.connection.recv_bytes))
        self.silent_s = 0.0
        return message
