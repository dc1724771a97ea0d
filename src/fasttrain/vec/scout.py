"""Scout: a worker process before there is a crew. It tries an env for the trainer, and may then be the first worker.

What an env does to its process (it hangs, ends it, dies, eats the memory) ends no trainer, which can say what it was.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fasttrain.vec.channel import Bell, DeadlineError
from fasttrain.vec.process import START_METHOD, WorkerLostError, WorkerProcess
from fasttrain.vec.worker import pack
from fasttrain.vec.worker_envs import Failure, Settings
from fasttrain.vec.worker_memory import SharedBlock

LOOK_EVERY_S = 0.1
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
MEMORY_BYTES = 4096


class ScoutLostError(WorkerLostError):
    """The process is gone. `exit_code` as of multiprocessing: -11 for signal 11, None if it is not known."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process ended with exit code {exit_code}")
        self.exit_code = exit_code


class Scout:
    """One process with one env at most, and memory that it and the trainer share."""

    def __init__(self, start_method: str | None = None) -> None:
        self.context = multiprocessing.get_context(start_method or START_METHOD)
        self.notify = Bell(self.context)
        self.keeps = False  # whether its env is to be the crew's first
        self._block = SharedBlock(MEMORY_BYTES)
        self.memory = self._block.memory
        self._worker: WorkerProcess | None = WorkerProcess(self.context, self.notify, None, 0)
        with suppress(OSError):  # it is gone already: the first errand says so
            self._block.send(self._worker.channel.connection)
        self._idle = True

    @property
    def pid(self) -> int:
        return int(self._ours.process.pid)

    @property
    def _ours(self) -> WorkerProcess:
        if self._worker is None:
            raise RuntimeError("this scout belongs to a crew, or is closed")
        return self._worker

    def ask(self, errand: Callable[[Any, list[Any]], Any], look: Callable[[], None]) -> Any:
        """Let it do `errand(memory, kept)`; the answer. `look` is called ten times a second until that comes.

        Raises:
            ScoutLostError: it died.
            WorkerLostError: the errand raised; `failure` says what. Or what came cannot be read here.
            anything that `look` raises: the process is killed then.
        """
        worker, self._idle = self._ours, False
        try:
            with suppress(DeadlineError, OSError):
                worker.channel.send(pack(errand), SEND_TIMEOUT_S)
            while not worker.channel.connection.poll(LOOK_EVERY_S):
                look()
                if not worker.process.is_alive() and not worker.channel.connection.poll(0):
                    raise self._lost()
            answer = worker.receive(SEND_TIMEOUT_S, "answering")
        except WorkerLostError as error:
            if not worker.process.is_alive():
                raise self._lost() from error
            raise
        except BaseException:
            self.kill()
            raise
        self._idle = True
        if isinstance(answer, Failure):
            raise WorkerLostError(answer.text, answer)
        return answer

    def _lost(self) -> ScoutLostError:
        self._ours.process.join(1.0)
        lost = ScoutLostError(self._ours.process.exitcode)
        self.kill()
        return lost

    def hand_over(self, settings: Settings, num_envs: int) -> WorkerProcess:
        """The process, as the worker of `settings`: it belongs to the crew from here on."""
        worker, self._worker = self._ours, None
        self._block.close()
        worker.take_on(settings, num_envs, self.keeps, SEND_TIMEOUT_S)
        return worker

    def close(self) -> None:
        """Let it close its env and end; a busy one is killed. Nothing happens to one that was handed over."""
        if self._worker is None:
            return
        worker = self._worker
        if self._idle:
            with suppress(DeadlineError, OSError, ValueError):
                worker.channel.send(pack(None), SEND_TIMEOUT_S)
                worker.process.join(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            self.notify.close()
            self._block.close()
