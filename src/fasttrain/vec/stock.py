"""Stable-Baselines3's own vector envs with what a run of ours needs of them.

`SubprocVecEnv` is started so that signals to the whole group leave its workers alone; `NotedVecEnv` is a DummyVecEnv
that notes the actions of its `Retrace` envs once per vector step.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from fasttrain.batch import select_rows
from fasttrain.envs.retrace import MOST_ACTIONS, Retrace
from fasttrain.envs.user_code import process_settings, put_back
from fasttrain.errors import EXIT_CRASHED, EnvSpecError, FastTrainError
from fasttrain.terminal import tell
from fasttrain.vec.process import START_METHOD, ended, kill_group
from fasttrain.vec.worker_start import belong_to_the_trainer, end_at_once, hold_signals, safe_path

EnvFn = Callable[[], gym.Env[Any, Any]]


WORKER_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)  # what SB3 raises when a worker process is gone
CLOSE_S = 5.0  # for envs in workers to close, as in the workers of `vec_env=shared`


class InWorker:
    """Builds an env in a worker: the first code of ours that runs there."""

    def __init__(self, factory: EnvFn) -> None:
        self._factory = factory

    def __call__(self) -> gym.Env[Any, Any]:
        belong_to_the_trainer()
        end_at_once()
        try:
            env = self._factory()
        except FastTrainError as error:
            tell(f"fasttrain: a worker ends: {error}")
            raise SystemExit(EXIT_CRASHED) from error
        return env if isinstance(env, Retrace) else Retrace(env)


class WorkersVecEnv(SubprocVecEnv):
    """SB3's, of envs by `InWorker`, whose end waits for no env: its `close()` may hang, or leave threads that do."""

    close_failed = ""

    def close(self) -> None:
        if self.closed:
            return
        self.closed, deadline = True, time.monotonic() + CLOSE_S
        for remote in self.remotes:
            with suppress(EOFError, OSError):
                if self.waiting and remote.poll(CLOSE_S):
                    remote.recv()
                remote.send(("env_method", ("end", (), {})))
                remote.send(("close", None))
        for remote, process in zip(self.remotes, self.processes, strict=True):
            with suppress(EOFError, OSError, ValueError):  # dead, or ended after an error
                if remote.poll(max(0.0, deadline - time.monotonic())):
                    self.close_failed = self.close_failed or str(remote.recv())
                ended(process, max(0.0, deadline - time.monotonic()))
            remote.close()
        _kill_all(self.processes)


def start_subproc(factories: Sequence[EnvFn]) -> SubprocVecEnv:
    """One worker per env.

    The constructor waits until the first worker has imported torch and built its env, seconds or for ever. So it runs
    in a thread: signals are held back from there, and from the workers, while the main thread is open to Ctrl-C.
    """
    others = set(multiprocessing.active_children())
    with safe_path(), ThreadPoolExecutor(1, initializer=hold_signals) as thread:
        made = thread.submit(WorkersVecEnv, [InWorker(factory) for factory in factories], START_METHOD)
        try:
            env = made.result()
        except BaseException as error:
            _kill_until(made, others)
            if isinstance(error, WORKER_ERRORS):
                raise EnvSpecError("a worker could not build its env; what it said stands above") from error
            raise
    # A worker ignores SIGTERM, and multiprocessing's own exit handler would wait for it for ever: kill it before.
    Finalize(env, _kill_all, (env.processes,), exitpriority=50)
    return env


def _kill_all(processes: Sequence[Any]) -> None:
    for process in processes:
        with suppress(ValueError):  # closed already
            if process.is_alive():  # what was waited for gave its number back: somebody else may have it
                kill_group(process)


@contextmanager
def workers_ended(env: VecEnv) -> Iterator[None]:
    """After an error: of workers that live on SB3's `close` would wait for answers that were taken already."""
    try:
        yield
    finally:
        if isinstance(env.unwrapped, SubprocVecEnv):
            _kill_all(env.unwrapped.processes)


def _kill_until(made: Future[Any], others: set[Any]) -> None:
    """End what is started until nothing more is: nobody will use it."""
    while True:
        last = made.done()
        _kill_all(list(set(multiprocessing.active_children()) - others))
        if last:
            return
        time.sleep(0.01)


ROWS = 1000  # kept at least, before those of finished episodes are dropped


class NotedVecEnv(DummyVecEnv):
    """Of PPO on CartPole noting env by env took 1.8 %, once per vector step 0.2 %.

    Args:
        factories: of a `Retrace` around a `Monitor` each.
        told: what was said already of this process; None: nothing.
    """

    envs: list[Retrace]  # type: ignore[assignment]
    close_failed = ""

    def __init__(self, factories: Sequence[Callable[[], Retrace]], told: set[str] | None = None) -> None:
        self.told = set[str]() if told is None else told
        before = process_settings()
        super().__init__(list(factories))
        self.put_back(before)
        self.rows: list[NDArray[Any]] = []  # actions (N, ...) since the oldest running episode began
        self._most = ROWS
        for index, env in enumerate(self.envs):
            env.noted_by(self, index)

    def put_back(self, before: dict[str, Any]) -> None:
        """Undo what an env has changed in this process since; say so once."""
        if new := [name for name in put_back(before) if name not in self.told]:
            self.told.update(new)
            tell(
                f"fasttrain: warning: an env changed {', '.join(new)} in the process that trains, which was put back; "
                "vec_env=shared gives envs processes of their own"
            )

    def step_async(self, actions: NDArray[Any]) -> None:
        super().step_async(actions)
        if len(self.rows) >= self._most:
            self._forget()
        self.rows.append(np.array(actions))

    def close(self) -> None:
        self.close_failed = next(filter(None, [env.end() for env in self.envs]), "")

    def seen(self, index: int) -> Any:
        """The observation of one env, as the space has it."""
        return select_rows(self._obs_from_buf(), index)

    def total(self, index: int) -> float:
        """The sum of the rewards of its running episode."""
        monitor = self.envs[index].env
        return float(sum(monitor.rewards)) if isinstance(monitor, Monitor) else 0.0

    def _forget(self) -> None:
        """Rows of episodes that are over, and of those that are too long to repeat."""
        count = max(min(env.begun_at for env in self.envs), len(self.rows) - MOST_ACTIONS)
        del self.rows[:count]
        for env in self.envs:
            env.begun_at -= count
        self._most = 2 * len(self.rows) + ROWS
