"""Stable-Baselines3's own `SubprocVecEnv`, started so that signals to the whole group leave its workers alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import gymnasium as gym
from stable_baselines3.common.vec_env import SubprocVecEnv

from fasttrain.vec.process import START_METHOD, kill_group
from fasttrain.vec.worker_start import belong_to_the_trainer, end_at_once, hold_signals

EnvFn = Callable[[], gym.Env[Any, Any]]


class InWorker:
    """Builds an env in a worker: the first code of ours that runs there."""

    def __init__(self, factory: EnvFn) -> None:
        self._factory = factory

    def __call__(self) -> gym.Env[Any, Any]:
        belong_to_the_trainer()
        end_at_once()
        return self._factory()


def start_subproc(factories: Sequence[EnvFn]) -> SubprocVecEnv:
    """One worker per env.

    The constructor waits until the first worker has imported torch and built its env, seconds or for ever. So it runs
    in a thread: signals are held back from there, and from the workers, while the main thread is open to Ctrl-C.
    """
    others = set(multiprocessing.active_children())
    with ThreadPoolExecutor(1, initializer=hold_signals) as thread:
        made = thread.submit(SubprocVecEnv, [InWorker(factory) for factory in factories], START_METHOD)
        try:
            return made.result()
        except BaseException:
            _kill_until(made, others)
            raise


def _kill_until(made: Future[Any], others: set[Any]) -> None:
    """End what is started until nothing more is: nobody will use it."""
    while True:
        last = made.done()
        for process in set(multiprocessing.active_children()) - others:
            kill_group(process)
        if last:
            return
        time.sleep(0.01)
