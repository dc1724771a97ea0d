"""The worker process of `SharedMemoryVecEnv`: it builds its envs, steps them into shared memory and answers calls.

It does not import torch or SB3, unless the user's envs import them.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np

from fasttrain.batch import select_rows
from fasttrain.envs.retrace import close_env
from fasttrain.envs.user_code import blame
from fasttrain.errors import EnvSpecError
from fasttrain_vec.worker_envs import EnvRows, MaskReader, NeedsRestartError, Settings, failure_of
from fasttrain_vec.worker_memory import (
    BUFFER,
    BUSY_NS,
    COMMAND,
    MAIL,
    NO_ROW,
    NOTIFY,
    OPPONENTS_NS,
    REPLY,
    REQUEST,
    ROW,
    STEP_NS,
    ForkGuard,
    Layout,
    receive_block,
)
from fasttrain_vec.worker_start import SPIN_S, Bell, Channel, DeadlineError, acquire

Env = gymnasium.Env[Any, Any]

STEP, CALL, CLOSE, HOLD = range(4)  # commands; HOLD: reply without stepping; see `Crew._post`
CLOSE_S = 1.0  # timeout for sending the result of closing the envs
NO_MAIL, RECORDS, RESULT, FAILED = range(4)  # the kind of message that follows on the pipe


class Ready(NamedTuple):
    """A worker's message once its envs are built."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    mask_width: int


class Assignment(NamedTuple):
    """Turns a process that runs tasks (`process.Scout`) into the worker of some envs."""

    settings: Settings
    keeps: bool  # the env that this process has built for the checkup becomes its first env, in new wrappers


class Worker:
    """Answers the requests that come through one channel."""

    def __init__(self, channel: Channel, notify: Bell, settings: Settings | None) -> None:
        self.channel = channel
        self.notify = notify  # shared by all workers: the trainer waits on it for the first worker that is ready
        self._given = settings
        self.guard = ForkGuard()

    def release_pipes(self) -> None:
        """Runs in a child that an env has forked: the child may live on, but must not use the worker's pipes."""
        self.guard.forked = True
        self.channel.connection.close()
        self.notify.close()

    def serve(self) -> None:
        """Serve requests until CLOSE, or until the trainer has ended."""
        built: list[Env] = []
        settings = self._run_tasks(built) if self._given is None else self._given
        if settings is None:
            _close(built)
            return
        self.settings = settings
        try:
            factories, envs, masks = self._build(built)
        except BaseException as error:
            self.guard.check(error)
            text = str(error) if isinstance(error, EnvSpecError) else blame(error)
            self._send(failure_of(error, env_index=self.settings.first)._replace(text=text))
            return
        try:
            env = envs[0]
            self._send(Ready(env.observation_space, env.action_space, masks.width))
            layout: Layout = pickle.loads(self.channel.receive())
            arrays, control = layout.views(receive_block(self.channel.connection))
            self.control = control[settings.worker]
            mine = select_rows(arrays, slice(settings.first, settings.first + len(envs)))
            self.rows = EnvRows(settings, factories, envs, masks, mine, self.control[ROW : ROW + 1], self.guard)
            self._send(None)
            self._loop()
        except (EOFError, OSError):  # the trainer has ended
            pass
        finally:
            self.guard.check()
            failures = [text for env in envs if (text := close_env(env))]
            with suppress(OSError, DeadlineError):  # the trainer has ended, or does not read
                self.channel.send(pack(failures[0] if failures else ""), CLOSE_S)

    def _run_tasks(self, built: list[Env]) -> Settings | None:
        """Run the trainer's tasks until an `Assignment` comes, and return its settings. None: no worker is needed."""
        with suppress(EOFError, OSError):  # the trainer has ended
            memory = receive_block(self.channel.connection)
            while True:
                message = pickle.loads(self.channel.receive())
                if message is None:
                    return None
                if isinstance(message, Assignment):
                    if not message.keeps:
                        _close(built)
                    return message.settings
                answer = _run_task(message, memory, built)
                self.guard.check()
                self.channel.send(answer)
        return None

    def _build(self, built: list[Env]) -> tuple[list[Callable[[], Env]], list[Env], MaskReader]:
        factories = cloudpickle.loads(self.settings.factories)
        random.seed()  # else forked workers would all have the random state of their parent
        np.random.seed()
        first = factories[0].around(built.pop()) if built else factories[0]()
        envs = [first, *(factory() for factory in factories[1:])]
        for row, env in enumerate(envs):
            if not hasattr(env, "action_space"):
                raise EnvSpecError(
                    f"the function of env {self.settings.first + row} returned {env!r:.80}; return an env"
                )
        masks = MaskReader(envs[0], self.settings.use_masks)
        for row, env in enumerate(envs):
            if not masks.suits(env):
                first, spaces = self.settings.first, (envs[0].observation_space, envs[0].action_space)
                raise EnvSpecError(
                    f"the envs differ: env {first} has {spaces}, env {first + row} has "
                    f"{(env.observation_space, env.action_space)}; a vector env needs the same spaces in all, and "
                    "masks in all or in none"
                )
        # The search for masks may have reset the env. Build a new one, so that its first episode is the same as in a
        # DummyVecEnv. fasttrain's own factories (with `around`) make this search in a DummyVecEnv, too: the env stays.
        if masks.used_env and not hasattr(factories[0], "around"):
            close_env(envs[0])
            envs[0] = factories[0]()
        return factories, envs, masks

    def _loop(self) -> None:
        control, channel, spin_s = self.control, self.channel, self.settings.spin_s
        waited_s = 0.0
        while True:
            replied = time.perf_counter()
            acquire(channel.go, spin_s if waited_s < spin_s else SPIN_S)  # after a long wait the next may be long, too
            waited_s = time.perf_counter() - replied
            # Read the request's number now: the trainer may give up waiting and post another request before the reply.
            command, request = control[COMMAND], control[REQUEST]
            if command == CLOSE:
                return
            kind, mail = (NO_MAIL, b"")
            if command == STEP:
                kind, mail = self._step()
            elif command == CALL:
                kind, mail = self._call()
            self.guard.check()
            control[MAIL] = kind
            control[REPLY] = request
            channel.done.release()
            if control[NOTIFY]:
                self.notify.release()
            if kind:
                channel.send(mail)

    def _step(self) -> tuple[int, bytes]:
        began = time.perf_counter_ns()
        control, rows = self.control, self.rows
        try:
            records = rows.step(int(control[BUFFER]))
            kind, mail = (RECORDS, pack(records)) if records else (NO_MAIL, b"")
        except NeedsRestartError as error:
            kind, mail = FAILED, pack(error.failure)
            control[ROW] = NO_ROW
        spent = time.perf_counter_ns() - began
        control[STEP_NS] = spent
        control[BUSY_NS] += spent
        control[OPPONENTS_NS] += rows.opponents_ns
        rows.opponents_ns = 0
        return kind, mail

    def _call(self) -> tuple[int, bytes]:
        """Run one call. If it raises, the result is a `Failure`, and the envs can go on."""
        payload = self.channel.receive()
        try:
            name, arguments = pickle.loads(payload)
            return RESULT, pack(getattr(self, f"_call_{name}")(*arguments))
        except NeedsRestartError as error:
            self.control[ROW] = NO_ROW
            return FAILED, pack(error.failure)
        except BaseException as error:
            missing = isinstance(error, AttributeError)
            return RESULT, pack(failure_of(error, env_index=0)._replace(missing=missing))

    def _call_reset(self, seeds: Sequence[int | None], options: Sequence[dict[str, Any]], buffer: int) -> object:
        if seeds[0] is not None:  # some envs use the global generators: seed these too, differently in each worker
            random.seed(seeds[0])
            np.random.seed(seeds[0] % 2**32)
        return self.rows.reset(seeds, options, buffer)

    def _call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[int]) -> object:
        return [env.get_wrapper_attr(name)(*args, **kwargs) for env in self._envs(rows)]

    def _call_value(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[int]) -> object:
        """As `call` of Gymnasium's vector envs: call the method, or read the attribute."""
        values = [env.get_wrapper_attr(name) for env in self._envs(rows)]
        return [value(*args, **kwargs) if callable(value) else value for value in values]

    def _call_get(self, name: str, rows: Sequence[int]) -> object:
        return [env.get_wrapper_attr(name) for env in self._envs(rows)]

    def _call_set(self, name: str, value: object, rows: Sequence[int]) -> None:
        """Set the attribute in the wrapper that has it, or in the env, and read it back."""
        for env in self._envs(rows):
            env.set_wrapper_attr(name, value)
            if not _same(env.get_wrapper_attr(name), value):
                raise ValueError(f"{env}: {name} was set to {value!r}, but now is {env.get_wrapper_attr(name)!r}")

    def _call_wrapped(self, module: str, name: str, rows: Sequence[int]) -> object:
        return [_is_wrapped(env, (module, name)) for env in self._envs(rows)]

    def _call_render(self, rows: Sequence[int]) -> object:
        return [env.render() for env in self._envs(rows)]

    def _envs(self, rows: Sequence[int]) -> list[Env]:
        return [self.rows.envs[row] for row in rows]

    def _send(self, value: object) -> None:
        self.channel.send(pack(value))


def serve(channel: Channel, notify: Bell, settings: Settings | None) -> None:
    """The main function of a worker process."""
    worker = Worker(channel, notify, settings)
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=worker.release_pipes)
    worker.serve()


def pack(value: object) -> bytes:
    """Pickle `value`. If it cannot be pickled, raises a TypeError that names its type."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"{type(value).__name__} cannot be sent to another process: {error}") from error


def _run_task(task: Callable[[Any, list[Env]], Any], memory: object, built: list[Env]) -> bytes:
    try:
        answer: bytes = cloudpickle.dumps(task(memory, built))  # plain pickle cannot send some classes of spaces
        return answer
    except BaseException as error:
        return pack(failure_of(error, env_index=0))


def _close(envs: list[Env]) -> None:
    while envs:
        close_env(envs.pop())


def _same(value: Any, expected: Any) -> bool:
    if value is expected:
        return True
    if isinstance(expected, np.ndarray) and np.shape(value) != expected.shape:
        return False
    try:
        return bool(np.all(np.asarray(value == expected)))
    except Exception:
        return True  # the values cannot be compared, but the attribute was read


def _is_wrapped(env: object, wrapper: tuple[str, str]) -> bool:
    """Whether `env` has the wrapper (module, class name). Unpickling SB3's classes here would import torch."""
    while isinstance(env, gymnasium.Wrapper):
        if any((kind.__module__, kind.__qualname__) == wrapper for kind in type(env).__mro__):
            return True
        env = env.env
    return False
