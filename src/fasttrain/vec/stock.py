"""Stable-Baselines3's own vector envs, with additions that a run needs.

`start_subproc` starts a `SubprocVecEnv` whose workers ignore signals to the process group. `ActionLogVecEnv` is a
`DummyVecEnv` that records the actions of its `Retrace` envs.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from fasttrain.batch import select_rows
from fasttrain.envs import retrace
from fasttrain.envs.answers import misfits
from fasttrain.envs.retrace import MOST_ACTIONS, Retrace
from fasttrain.envs.user_code import blame, needs_package, process_settings, restore_settings
from fasttrain.errors import EXIT_CRASHED, EnvError, EnvSpecError, FastTrainError, ReplaceEnv
from fasttrain.terminal import tell
from fasttrain_vec.process import START_METHOD, kill_group, wait_for_end
from fasttrain_vec.replacing import ASKED, Replacements, built_anew
from fasttrain_vec.worker_start import bind_to_trainer, hold_signals, safe_path, skip_shutdown

EnvFn = Callable[[], gym.Env[Any, Any]]
WORKER_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)  # SB3 raises these if a worker process is gone
CLOSE_S = 5.0  # timeout for closing the envs in workers, as with `vec_env=shared`


class WorkerFactory:
    """Builds an env in a worker process of SubprocVecEnv, after the process was set up.

    An error of fasttrain in a reset or step ends the process. The folder `notes` gets a file with the error's message.
    """

    def __init__(self, factory: EnvFn, notes: str) -> None:
        self._factory, self._notes = factory, notes

    def __call__(self) -> gym.Env[Any, Any]:
        bind_to_trainer()
        skip_shutdown()
        try:
            env = self._factory()
        except FastTrainError as error:
            tell(f"fasttrain: a worker ends: {error}")
            raise SystemExit(EXIT_CRASHED) from error
        env = env if isinstance(env, Retrace) else Retrace(env)
        for name in ("reset", "step"):
            setattr(env, name, self._noting(getattr(env, name)))
        return env

    def _noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except (FastTrainError, gym.error.DependencyNotInstalled) as raised:
                error = raised if isinstance(raised, FastTrainError) else EnvSpecError(f"an env: {blame(raised)}")
                Path(self._notes, f"{os.getpid()}").write_text(f"{error.exit_code} {error}", encoding="utf-8")
                raise SystemExit(EXIT_CRASHED) from raised

        return noting


def why_worker_ended(env: VecEnv) -> EnvError:
    """The error for a SubprocVecEnv whose worker is gone, with the worker's message if it wrote one."""
    for note in sorted(Path(getattr(env.unwrapped, "notes", "")).glob("[0-9]*")):
        code, _, text = note.read_text(encoding="utf-8").partition(" ")
        return (EnvSpecError if code == str(EnvSpecError.exit_code) else EnvError)(text)
    return EnvError("a worker process died; its last output is above")


class WorkersVecEnv(SubprocVecEnv):
    """SB3's SubprocVecEnv, whose `close()` has a timeout: an env's `close()` may hang, or leave threads that hang."""

    close_failed, notes = "", ""

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
            with suppress(EOFError, OSError, ValueError):  # the worker is dead, or its pipe was closed after an error
                if remote.poll(max(0.0, deadline - time.monotonic())):
                    self.close_failed = self.close_failed or str(remote.recv())
                wait_for_end(process, max(0.0, deadline - time.monotonic()))
            remote.close()
        _kill_all(self.processes)


def start_subproc(factories: Sequence[EnvFn]) -> SubprocVecEnv:
    """SB3's SubprocVecEnv with one worker per env.

    Its constructor waits until the first worker has imported torch and built its env, which may hang.
    So it runs in a thread. Signals are blocked in that thread and in the workers, and Ctrl-C reaches the main thread.
    """
    other_processes, notes = set(multiprocessing.active_children()), TemporaryDirectory()
    with safe_path(), ThreadPoolExecutor(1, initializer=hold_signals) as thread:
        workers: list[EnvFn] = [WorkerFactory(factory, notes.name) for factory in factories]
        future = thread.submit(WorkersVecEnv, workers, START_METHOD)
        try:
            env = future.result()
        except BaseException as error:
            notes.cleanup()
            while not future.done():
                _kill_all(set(multiprocessing.active_children()) - other_processes)
                time.sleep(0.01)
            _kill_all(set(multiprocessing.active_children()) - other_processes)
            if isinstance(error, WORKER_ERRORS):
                raise EnvSpecError("a worker could not build its env; its error message stands above") from error
            raise
    # multiprocessing's own exit handler would wait for ever, because workers ignore SIGTERM. So kill the workers first.
    Finalize(env, _kill_all, (env.processes,), exitpriority=50)
    env.notes = notes.name
    Finalize(env, notes.cleanup, exitpriority=40)
    return env


def _kill_all(processes: Iterable[Any]) -> None:
    for process in processes:
        with suppress(ValueError):  # the process object is closed already
            if process.is_alive():  # the pid of an ended process may belong to another process by now
                kill_group(process)


@contextmanager
def killing_workers(env: VecEnv) -> Iterator[None]:
    """At the end, kill the workers of a SubprocVecEnv.

    After an error SB3's `close` would wait for answers of the workers, although these have been received already.
    """
    try:
        yield
    finally:
        if isinstance(env.unwrapped, SubprocVecEnv):
            _kill_all(env.unwrapped.processes)


ATOMS = {bool, int, float, str, type(None), np.bool_, np.float32, np.float64, np.int64}  # need no copy
MIN_ROWS = 1000  # number of rows at which the rows of finished episodes are dropped


class ActionLogVecEnv(DummyVecEnv):
    """A DummyVecEnv that records the actions of its envs, and replaces an env that raises `ReplaceEnv`.

    The actions are recorded once per vector step. If each env recorded its actions, this took 1.8 % of PPO's time on
    CartPole; here it takes 0.2 %.

    Args:
        factories: each builds a `Retrace` around a `Monitor`.
        warned: names of process settings that the user has already been warned about.
    """

    envs: list[Retrace]  # type: ignore[assignment]
    close_failed = ""

    def __init__(self, factories: Sequence[Callable[[], Retrace]], warned: set[str] | None = None) -> None:
        self.warned = set[str]() if warned is None else warned
        self._pid = os.getpid()
        before = process_settings()
        super().__init__(list(factories))
        self.restore_settings(before)
        buffers: dict[Any, NDArray[Any]] = dict(self.buf_obs)
        self._rows = buffers.get(None)  # observations (N, ...); None: the space has parts
        self.rows: list[NDArray[Any]] = []  # actions (N, ...) since the oldest running episode began
        self._most = MIN_ROWS
        self.factories, self.replacements, self.lost_steps = list(factories), Replacements(), 0
        self.lost_envs: list[int] = []  # envs whose episode was lost in the last step
        self._last_seeds: list[int | None] = [None] * self.num_envs
        for index in range(self.num_envs):
            self._prepare(index)

    def _prepare(self, index: int) -> None:
        """Let an env record its actions here. Its resets replace it if it asks for that."""
        env = self.envs[index]
        env.log_actions_in(self, index)
        reset = env.reset

        def resetting(*, seed: int | None = None, **options: Any) -> Any:
            self._last_seeds[index] = self._last_seeds[index] if seed is None else seed
            try:
                return reset(seed=seed, **options)
            except ReplaceEnv as asked:
                return self._built_anew(index, asked, **options)

        env.reset = resetting  # type: ignore[method-assign]

    def _built_anew(self, index: int, asked: ReplaceEnv, **options: Any) -> Any:
        """Replace an env. Returns the answer of the new env's reset."""

        def note(error: ReplaceEnv) -> None:
            if too_many := self.replacements.add(ASKED, index):
                raise EnvError(f"{too_many}; the last: {error}")

        note(asked)
        place = self.envs[index], self.factories[index], self._last_seeds[index]
        self.envs[index], self._last_seeds[index], answer = built_anew(*place, note, **options)
        self._prepare(index)
        return answer

    def restore_settings(self, before: dict[str, Any]) -> None:
        """Undo changes that an env made to settings of this process. Warns once per setting."""
        if new := [name for name in restore_settings(before) if name not in self.warned]:
            self.warned.update(new)
            tell(
                f"fasttrain: warning: an env changed {', '.join(new)} in the training process; the change was undone. "
                "With vec_env=shared envs run in processes of their own"
            )

    def reset(self) -> VecEnvObs:
        try:
            return super().reset()
        except Exception as error:
            raise _with_place(error) from error.__cause__

    def step_wait(self) -> VecEnvStepReturn:
        """Step every env, with the results of SB3's loop in two thirds of its time (64 envs: 1.6 µs each, not 2.5)."""
        if self.lost_envs:
            self.lost_envs = []
        try:
            for env_idx in range(self.num_envs):
                self._step_one(env_idx)
        except Exception as error:
            raise _with_place(error) from error.__cause__
        if os.getpid() != self._pid:  # takes 40 ns; true in a child that an env forked, once the env returns
            os._exit(EXIT_CRASHED)  # else the child would also train, and write to the parent's files
        infos = [info.copy() if ATOMS.issuperset(map(type, info.values())) else _copied(info)
                 for info in self.buf_infos]  # fmt: skip
        return self._obs_from_buf(), self.buf_rews.copy(), self.buf_dones.copy(), infos

    def _step_one(self, env_idx: int) -> None:
        env = self.envs[env_idx]
        try:
            seen, reward, terminated, truncated, info = env.step(self.actions[env_idx])
        except ReplaceEnv as asked:
            self._lose_episode(env_idx, asked)
            return
        self.buf_rews[env_idx] = reward
        self.buf_infos[env_idx] = info
        self.buf_dones[env_idx] = done = terminated or truncated
        info["TimeLimit.truncated"] = truncated and not terminated
        if done:
            info["terminal_observation"] = seen
            seen, self.reset_infos[env_idx] = env.reset()
        self._save_obs(env_idx, seen)

    def _save_obs(self, env_idx: int, obs: VecEnvObs) -> None:
        if self._rows is None:
            super()._save_obs(env_idx, obs)
        else:
            self._rows[env_idx] = obs

    def _obs_from_buf(self) -> VecEnvObs:
        observations: VecEnvObs = super()._obs_from_buf() if self._rows is None else self._rows.copy()
        return observations

    def _lose_episode(self, env_idx: int, asked: ReplaceEnv) -> None:
        """End an episode as truncated in the state before this step, and replace the env."""
        self.lost_envs.append(env_idx)
        self.lost_steps += self.envs[env_idx].steps_begun
        last = self.observation_of(env_idx)
        self.buf_rews[env_idx], self.buf_dones[env_idx] = 0.0, True
        self.buf_infos[env_idx] = {"lost": str(asked), "TimeLimit.truncated": True, "terminal_observation": last}
        seen, self.reset_infos[env_idx] = self._built_anew(env_idx, asked)
        self._save_obs(env_idx, seen)

    def step_async(self, actions: NDArray[Any]) -> None:
        super().step_async(actions)
        if len(self.rows) >= self._most:
            self._forget()
        self.rows.append(np.array(actions))

    def close(self) -> None:
        self.close_failed = next(filter(None, [env.end() for env in self.envs]), "")

    def observation_of(self, index: int) -> Any:
        return select_rows(self._obs_from_buf(), index)

    def return_of(self, index: int) -> float:
        """The sum of the rewards of one env's running episode."""
        monitor = self.envs[index].env
        return float(sum(monitor.rewards)) if isinstance(monitor, Monitor) else 0.0

    def _forget(self) -> None:
        """Drop the rows of finished episodes, and rows of episodes that are too long to repeat."""
        count = max(min(env.first_row for env in self.envs), len(self.rows) - MOST_ACTIONS)
        del self.rows[:count]
        for env in self.envs:
            env.first_row -= count
        self._most = 2 * len(self.rows) + MIN_ROWS


def _copied(info: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of an info; a shallow copy if an object in it, such as a lock, cannot be copied."""
    try:
        return copy.deepcopy(info)
    except Exception:  # the user's objects may raise anything
        return info.copy()


class Resting:
    """An env whose `step` does nothing: it returns the last observation, reward 0 and no end."""

    def __init__(self, env: Any, observation: Any) -> None:
        self.env, self.observation = env, observation

    def step(self, _: object) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation, 0.0, False, False, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


@contextmanager
def resting(env: VecEnv, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A function that lets one env of a DummyVecEnv rest until the block ends. Other vec envs step all their envs."""
    base: Any = env.unwrapped
    if not (wanted and isinstance(base, ActionLogVecEnv)):
        yield lambda _: None
        return
    before = [*base.envs]

    def rest(index: int) -> None:
        base.envs[index] = Resting(base.envs[index], base.observation_of(index))  # type: ignore[call-overload]

    try:
        yield rest
    finally:
        base.envs[:] = before


# --- errors that SB3's loop, or a wrapper, raises because of what an env returned

LOOPS = (*tuple(os.path.dirname(str(it.__file__)) for it in (stable_baselines3, gym.wrappers, retrace)), __file__)


def place_of(error: BaseException) -> str:
    """`env 3, step 12 of its episode, ` if the traceback names an env, else an empty text."""
    for frame in _frames(error):
        vec_env, index = (frame.f_locals.get(name) for name in ("self", "env_idx"))
        if isinstance(vec_env, DummyVecEnv) and index is not None:
            begun = getattr(vec_env.envs[index], "steps_begun", None)  # only a `Retrace` has this attribute
            step = "" if begun is None else f"step {begun} of its episode, " if begun else "its reset, "
            return f"env {index}, {step}"
    return ""


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _with_place(error: Exception) -> Exception:
    """An EnvError that names env and step, if the env returned something wrong or lacks a package; else `error`."""
    missing = needs_package(error)
    if not (problem := str(error) if isinstance(error, EnvError) else blame(error) if missing else _problem_of(error)):
        return error
    kind = EnvSpecError if missing or isinstance(error, EnvSpecError) else EnvError
    env_error = kind(f"{place_of(error).rstrip(', ')}: {problem}")
    env_error.__cause__ = error
    return env_error


def _problem_of(error: Exception) -> str:
    """What is wrong with the values on which SB3's loop failed; "" if the error comes from other code."""
    frame = _frames(error)[-1]
    values, name = frame.f_locals, frame.f_code.co_name
    if not frame.f_code.co_filename.startswith(LOOPS):
        return ""
    if name == "_save_obs":
        found = misfits(values["self"].observation_space, values["obs"])
        return next((f"{where} {what}" for _, where, what, _ in found), "")
    what = "(observation, reward, terminated, truncated, info): a number as reward, two bools and a dict"
    return f"step() must return {what} ({error})" if name in ("step", "_step_one") else ""
