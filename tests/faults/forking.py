"""An env that forks in every way, and plays the same game as if it did not. Free of torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LENGTH = 9  # steps of an episode
CODE = 5  # with which a child calls sys.exit


class CameBackError(Exception):
    """In a child only."""


class Forking(gym.Env[Any, Any]):
    """Random numbers to see; the action says how to fork, see `KINDS`. Children are wrong about everything."""

    observation_space = spaces.Box(-9.0, 9.0, (3,), np.float32)

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(len(KINDS))
        self.child = False
        self.t = 0
        self.lives: list[int] = []  # children that live on, and programs
        self.codes: list[int] = []  # of children that came back
        self.pool: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        if options and options["fork"] and os.fork() == 0:
            self.become_wrong()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = float(self.np_random.normal())
        list(KINDS.values())[int(action)](self)
        return self._observation(), -9.0 if self.child else reward, self.t == LENGTH and not self.child, False, {}

    def _observation(self) -> Any:
        draw = self.np_random.normal(size=3).clip(-9, 9).astype(np.float32)
        return np.full(3, -9.0, np.float32) if self.child else draw

    def become_wrong(self) -> None:
        self.child = True
        time.sleep(0.002)  # the worker has answered by then

    # --- how to fork

    def nothing(self) -> None:
        """Plain steps between."""

    def come_back(self) -> None:
        self._fork(self.become_wrong)

    def raise_in_the_child(self) -> None:
        def fail() -> None:
            self.become_wrong()
            raise CameBackError

        self._fork(fail)

    def exit_in_the_child(self) -> None:
        pid = self._fork(lambda: sys.exit(CODE))
        self.codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def terminate_at_once(self) -> None:
        def stay() -> None:
            while True:
                signal.pause()

        pid = self._fork(stay)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM

    def fork_in_a_thread(self) -> None:
        def work() -> None:
            if os.fork() == 0:
                signal.pause()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def live_on(self) -> None:
        """A child, and a child of that, which hear no signal."""

        def stay() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.fork()
            while True:
                signal.pause()

        self._replace(self._fork(stay))

    def start_a_program(self) -> None:
        self._replace(subprocess.Popen(["sleep", "1000"]).pid)

    def use_a_pool(self) -> None:
        """Now and then a new one: terminating it must work."""
        if self.pool is None:
            self.pool = multiprocessing.get_context("fork").Pool(2)
        assert self.pool.map(abs, [-1, -2, 3]) == [1, 2, 3]
        if self.t % 3 == 0:
            self.pool.terminate()
            self.pool.join()
            self.pool = None

    def use_an_executor(self) -> None:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
            assert list(executor.map(abs, [-1, 2])) == [1, 2]

    def _fork(self, then: Callable[[], Any]) -> int:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] and self.pool is None:  # those that came back
                pass
        pid = os.fork()
        if pid == 0:
            then()
        return pid

    def _replace(self, pid: int) -> None:
        """At most two stay: this is about what the worker leaves, not about how many processes fit."""
        self.lives.append(pid)
        if len(self.lives) > 2:
            first = self.lives.pop(0)
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)


KINDS: dict[str, Callable[[Forking], None]] = {
    "nothing": Forking.nothing,
    "the child comes back": Forking.come_back,
    "the child raises": Forking.raise_in_the_child,
    "the child exits": Forking.exit_in_the_child,
    "the child is terminated at once": Forking.terminate_at_once,
    "forked in a thread": Forking.fork_in_a_thread,
    "the child lives on": Forking.live_on,
    "a program": Forking.start_a_program,
    "a pool": Forking.use_a_pool,
    "an executor": Forking.use_an_executor,
}
