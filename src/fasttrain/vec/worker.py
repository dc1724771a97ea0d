"""What a worker process of `SharedMemoryVecEnv` does: build its envs, step them into shared memory, answer calls.

Free of torch and SB3, as long as the user's envs are.
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
from fasttrain.envs.retrace import closed
from fasttrain.envs.user_code import blame
from fasttrain.errors import EnvSpecError
from fasttrain.vec.worker_envs import EnvRows, MaskReader, NeedsRestartError, Settings, failure_of
from fasttrain.vec.worker_memory import (
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
from fasttrain.vec.worker_start import Bell, Channel, DeadlineError, acquire

Env = gymnasium.Env[Any, Any]

STEP, CALL, CLOSE, HOLD = range(4)  # commands; HOLD: no step this time, see `Crew.replace`
CLOSE_S = 1.0  # for the trainer to hear what closing came to
NO_MAIL, RECORDS, RESULT, FAILED = range(4)  # what follows on the pipe


class Ready(NamedTuple):
    """What a worker says once its envs are built."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    mask_width: int


class TakeOn(NamedTuple):
    """The end of a worker's errands."""

    settings: Settings
    keeps: bool  # its first env is to be the one that it built for them, in the wrappers of its factory


class Worker:
    """Serves one channel."""

    def __init__(self, channel: Channel, notify: Bell, settings: Settings | None) -> None:
        self.channel = channel
        self.notify = notify  # one semaphore of all workers, for a trainer that waits for whoever is first
        self._given = settings
        self.guard = ForkGuard()

    def disown(self) -> None:
        """In a child that an env has forked: it may live on, but not here, and nothing here is its own."""
        self.guard.forked = True
        self.channel.connection.close()
        self.notify.close()

    def serve(self) -> None:
        """Until CLOSE, or until the trainer is gone."""
        kept: list[Env] = []
        settings = self._errands(kept) if self._given is None else self._given
        if settings is None:
            _close(kept)
            return
        self.settings = settings
        try:
            factories, envs, masks = self._build(kept)
        except BaseException as error:
            self.guard.check(error)
            whole = str(error) if isinstance(error, EnvSpecError) else blame(error)  # ours is a whole message already
            self._send(failure_of(error, env_index=self.settings.first)._replace(spec=True, text=whole))
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
        except (EOFError, OSError):  # the trainer is gone
            pass
        finally:
            self.guard.check()
            failed = [text for env in envs if (text := closed(env))]
            with suppress(OSError, DeadlineError):  # the trainer is gone, or does not listen
                self.channel.send(pack(failed[0] if failed else ""), CLOSE_S)

    def _errands(self, kept: list[Env]) -> Settings | None:
        """Do what the trainer asks for until it says which envs are this worker's. None: it needs no worker."""
        with suppress(EOFError, OSError):  # it is gone
            memory = receive_block(self.channel.connection)
            while True:
                work = pickle.loads(self.channel.receive())
                if work is None:
                    return None
                if isinstance(work, TakeOn):
                    if not work.keeps:
                        _close(kept)
                    return work.settings
                answer = _answer(work, memory, kept)
                self.guard.check()
                self.channel.send(answer)
        return None

    def _build(self, kept: list[Env]) -> tuple[list[Callable[[], Env]], list[Env], MaskReader]:
        factories = cloudpickle.loads(self.settings.factories)
        random.seed()  # a forked process begins with its parent's streams, all workers with the same
        np.random.seed()
        first = factories[0].around(kept.pop()) if kept else factories[0]()
        envs = [first, *(factory() for factory in factories[1:])]
        masks = MaskReader(envs[0], self.settings.use_masks)
        for row, env in enumerate(envs):
            if not masks.suits(env):
                first, spaces = self.settings.first, (envs[0].observation_space, envs[0].action_space)
                raise EnvSpecError(
                    f"the envs differ: env {first} has {spaces}, env {first + row} has "
                    f"{(env.observation_space, env.action_space)}; a vector env needs the same spaces in all, and "
                    "masks in all or in none"
                )
        # A fresh one: its first episode is to be the one that a DummyVecEnv gets. Our own factories look for masks
        # themselves wherever they build.
        if masks.used_env and not hasattr(factories[0], "around"):
            closed(envs[0])
            envs[0] = factories[0]()
        return factories, envs, masks

    def _loop(self) -> None:
        control, channel = self.control, self.channel
        while True:
            acquire(channel.go, self.settings.spin_s)
            # Read now: a trainer that gave up on this request may have posted another by the time of the reply.
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
        """A `Failure` as the result: the call raised, and the env goes on."""
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
        if seeds[0] is not None:  # envs that draw from the global streams are seeded too, each worker differently
            random.seed(seeds[0])
            np.random.seed(seeds[0] % 2**32)
        return self.rows.reset(seeds, options, buffer)

    def _call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[int]) -> object:
        return [env.get_wrapper_attr(name)(*args, **kwargs) for env in self._envs(rows)]

    def _call_get(self, name: str, rows: Sequence[int]) -> object:
        return [env.get_wrapper_attr(name) for env in self._envs(rows)]

    def _call_set(self, name: str, value: object, rows: Sequence[int]) -> None:
        """Set where the attribute is (a wrapper or the env itself), and read it back."""
        for env in self._envs(rows):
            env.set_wrapper_attr(name, value)
            if not _same(env.get_wrapper_attr(name), value):
                raise ValueError(f"{env}: {name} was set to {value!r} and reads {env.get_wrapper_attr(name)!r}")

    def _call_wrapped(self, module: str, name: str, rows: Sequence[int]) -> object:
        return [_is_wrapped(env, (module, name)) for env in self._envs(rows)]

    def _call_render(self, rows: Sequence[int]) -> object:
        return [env.render() for env in self._envs(rows)]

    def _envs(self, rows: Sequence[int]) -> list[Env]:
        return [self.rows.envs[row] for row in rows]

    def _send(self, value: object) -> None:
        self.channel.send(pack(value))


def serve(channel: Channel, notify: Bell, settings: Settings | None) -> None:
    """All that a worker's process does."""
    worker = Worker(channel, notify, settings)
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=worker.disown)
    worker.serve()


def pack(value: object) -> bytes:
    """Pickle `value`. Raises TypeError: it cannot be pickled; says what it is."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"{type(value).__name__} cannot be sent to another process: {error}") from error


def _answer(errand: Callable[[Any, list[Env]], Any], memory: object, kept: list[Env]) -> bytes:
    try:
        answer: bytes = cloudpickle.dumps(errand(memory, kept))  # spaces may be of classes that pickle cannot name
        return answer
    except BaseException as error:
        return pack(failure_of(error, env_index=0)._replace(spec=isinstance(error, EnvSpecError)))


def _close(envs: list[Env]) -> None:
    while envs:
        closed(envs.pop())


def _same(found: Any, value: Any) -> bool:
    if found is value:
        return True
    if isinstance(value, np.ndarray) and np.shape(found) != value.shape:
        return False
    try:
        return bool(np.all(np.asarray(found == value)))
    except Exception:
        return True  # values that cannot be compared: that it can be read has to do


def _is_wrapped(env: object, wanted: tuple[str, str]) -> bool:
    """By name: unpickling SB3's wrapper classes here would load torch into the worker."""
    while isinstance(env, gymnasium.Wrapper):
        if any((kind.__module__, kind.__qualname__) == wanted for kind in type(env).__mro__):
            return True
        env = env.env
    return False
