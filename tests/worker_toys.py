"""Envs for tests of the worker processes. Free of torch, because a worker imports this module."""

from __future__ import annotations

import copy
import gc
import multiprocessing.forkserver
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
from gymnasium import spaces

from fasttrain.errors import EnvSpecError
from fasttrain_vec.worker_envs import Settings
from fasttrain_vec.worker_memory import Layout

ACTION_SPACES = {
    "discrete": spaces.Discrete(5),
    "multi_discrete": spaces.MultiDiscrete([2, 4, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
}


class Opaque:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("Opaque stays where it is")


class OnlyThere:
    """Can be pickled in a worker, but not loaded in the trainer."""

    def __reduce__(self) -> Any:
        return _only_in_a_worker, (os.getpid(),)


def _only_in_a_worker(pid: int) -> str:
    if pid != os.getpid():
        raise ImportError("no such class in the trainer")
    return "loaded"


class Point:
    """An object in an info."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    def __hash__(self) -> int:
        return self.x


class Walker(gym.Env[Any, Any]):
    """Observation: (env number, episode, step in it, a random number). Ends after 2 to 12 steps, drawn at the reset.

    Masks by any convention and dtype; every info holds values of many types; `live` is changed after it was given.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium's own form

    def __init__(
        self, number: int, actions: str = "discrete", masks: str = "method", dtype: str = "bool", rich: bool = True
    ) -> None:
        self.number, self.masks, self.dtype, self.rich = number, masks, dtype, rich
        self.action_space = ACTION_SPACES[actions]
        state = spaces.Box(-1.0, 1e6, (4,), np.float32)
        self.mask_entries = {"discrete": 5, "multi_discrete": 9, "multi_binary": 6, "box": 0}[actions]
        if masks == "observation":
            mask = spaces.Box(0, 1, (self.mask_entries,), np.int8)
            self.observation_space: Any = spaces.Dict({"state": state, "action_mask": mask})
        else:
            self.observation_space = state
        if masks == "method":
            self.action_masks = self.legal
        self.render_mode = "rgb_array"
        self.episode = self.steps = self.level = 0
        self.live: list[int] = []
        self.calls: list[Any] = []
        self.closed_file: str | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.live.append(-1)  # after the last info went out
        self.episode, self.steps = self.episode + 1, 0
        self.length = int((options or {}).get("length", self.np_random.integers(2, 13)))
        info: dict[str, Any] = {"episode_number": self.episode, "start": [self.episode], "options": options}
        self.live = info["live"] = [self.episode]
        return self._observation(), self._with_mask(info if self.rich else {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.action_space.shape:
            action = np.asarray(action)
            told = float(np.sum(action))
            action += 1  # an env may change what it is given
        else:
            told = float(action)
        self.live.append(-2)  # after the last info went out
        self.steps += 1
        over = self.steps >= self.length
        draw = float(self.np_random.random())
        info: dict[str, Any] = {}
        if self.rich:
            info = {
                "int": self.steps, "float": draw, "bool": over, "text": f"s{self.steps}", "none": None,
                "np_float": np.float64(draw), "np_int": np.int32(self.steps), "np_bool": np.bool_(over),
                "array": np.arange(self.steps % 3), "big": 2**60 + self.steps, "nested": {"a": [self.steps]},
                "point": Point(self.steps), "a key with spaces": (1, "x"), "live": [self.steps],
            }  # fmt: skip
            self.live = info["live"]
            if self.steps % 2:
                info["sometimes"] = self.steps
        terminated, truncated = over and self.number % 3 != 1, over and self.number % 3 != 0  # 2: both at once
        return self._observation(), told + draw, terminated, truncated, self._with_mask(info)

    def _observation(self) -> Any:
        state = np.array([self.number, self.episode, self.steps, self.np_random.random()], np.float32)
        return {"state": state, "action_mask": self.legal()} if self.masks == "observation" else state

    def legal(self) -> Any:
        """Any but the last action of each head, by state."""
        mask = np.ones(self.mask_entries, self.dtype)
        mask[(self.steps + self.number) % (2 if self.mask_entries == 6 else self.mask_entries)] = 0
        return mask

    def _with_mask(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "action_mask": self.legal()} if self.masks == "info" else info

    def note(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Counts calls; (env number, calls so far)."""
        self.calls.append((args, kwargs))
        return self.number, len(self.calls)

    def heard(self) -> list[Any]:
        return self.calls

    def fail(self, kind: type[Exception]) -> None:
        raise kind("the board fell")

    def process(self) -> dict[str, Any]:
        """What this process is like."""
        names = ("torch", "stable_baselines3", "sb3_contrib")
        threads = {name: value for name, value in os.environ.items() if name.endswith("_THREADS")}
        return {
            "pid": os.getpid(), "loaded": [name for name in names if name in sys.modules], "threads": threads,
            "draws": (random.random(), float(np.random.random())), "prints_at_once": sys.stdout.line_buffering,
        }  # fmt: skip

    def only_here(self) -> Any:
        return OnlyThere()

    def opaque(self) -> Any:
        return Opaque()

    def render(self) -> Any:
        return np.full((2, 3, 3), self.number, np.uint8)

    def write_when_closed(self, path: str) -> None:
        self.closed_file = path

    def close(self) -> None:
        if self.closed_file:
            with open(self.closed_file, "a", encoding="utf-8") as file:
                file.write(f"{self.number}\n")


class Hat(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute of its own."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.colour = "red"


class Stubborn(gym.Wrapper[Any, Any, Any, Any]):
    """Has an attribute that cannot be changed."""

    @property
    def mood(self) -> str:
        return "bad"

    @mood.setter
    def mood(self, value: str) -> None:
        pass


class Sampler(gym.Env[Any, Any]):
    """Random members of its spaces. Ends after 3 steps, in turn by the rules and by a limit."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.observation_space.sample(), {"episode_number": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over, even = self.steps == 3, self.episode % 2 == 0
        reward = float(np.sum(np.asarray(action, np.float64))) + self.steps
        return self.observation_space.sample(), reward, over and even, over and not even, {"seen": np.array(action)}


# --- faults on demand: the action says what goes wrong

FAULTS = (
    "raise", "nan_observation", "nan_reward", "infinite_observation", "wrong_shape", "short_mask", "wrong_answer",
    "sys_exit", "nan_at_the_end", "os_exit", "kill", "hang", "stop",
)  # fmt: skip
IN_PROCESS = FAULTS[:9]  # mended inside the worker
GO, END, CUT = 0, 1, 2  # actions that go well: on; the episode ends; it is cut
NUM_ACTIONS = 3 + len(FAULTS)


def action_of(fault: str) -> int:
    return 3 + FAULTS.index(fault)


class Chaos(gym.Env[Any, Any]):
    """Observation: (env number, episode, sequence number in it, check sum). Does what the action says.

    Episodes count up from the time, so that an env's successor does not repeat its numbers.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self.engine_pid = 0
        self.start_again()

    def start_again(self) -> None:
        self.steps, self.episode, self.mask = 0, float(time.monotonic_ns() // 1000), np.ones(NUM_ACTIONS, np.bool_)

    def row(self) -> Any:
        row = np.array([self.number, self.episode, self.steps, 0.0])
        row[3] = checksum(row)
        return row

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed_given = seed
        if options and "fault" in options:
            self.do(options["fault"])
        self.start_again()
        return self.row(), {"episode": self.episode}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.mask = np.ones(NUM_ACTIONS, np.bool_)
        over = action in (END, CUT)
        answer = [self.row(), 1.0, action == END, action == CUT, {"number": self.number} if over else {}]
        return self.do(FAULTS[int(action) - 3], answer) if action > CUT else tuple(answer)

    def do(self, fault: str, answer: Any = None) -> Any:
        if fault == "raise":
            raise RuntimeError("the board fell")
        if fault == "sys_exit":
            sys.exit(3)
        if fault == "os_exit":
            os._exit(7)
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            time.sleep(1.0)  # a signal to oneself may take a moment
        if fault == "hang":
            time.sleep(3600.0)
        if fault == "wrong_answer":
            return answer[:4]
        if fault == "nan_at_the_end":
            answer[3] = True
        if fault in ("nan_observation", "nan_at_the_end"):
            answer[0][1] = np.nan
        elif fault == "infinite_observation":
            answer[0][2] = np.inf
        elif fault == "nan_reward":
            answer[1] = float("nan")
        elif fault == "wrong_shape":
            answer[0] = answer[0][:1]  # NumPy would stretch it
        elif fault == "short_mask":
            self.mask = self.mask[1:]
        return tuple(answer)

    def action_masks(self) -> Any:
        return self.mask

    def do_now(self, fault: str) -> Any:
        """The same in a call between steps."""
        return self.do(fault)

    def hold_the_interpreter(self) -> None:
        sum(range(10**11))

    def work_long(self) -> None:
        time.sleep(3600.0)

    def where(self) -> tuple[int, float, int]:
        return os.getpid(), self.episode, self.steps


def checksum(row: Any) -> float:
    """Of the first three numbers."""
    return float(zlib.crc32(np.asarray(row[:3], np.float64).tobytes()))


class LongSteps(Chaos):
    """Every step takes an hour; with `holding` it never lets another thread of its process run."""

    def __init__(self, number: int, holding: bool = False) -> None:
        super().__init__(number)
        self.holding = holding

    def step(self, action: Any) -> Any:
        if self.holding:
            self.hold_the_interpreter()
        self.work_long()


@contextmanager
def signals_rained() -> Iterator[None]:
    """Inside, processes that this one starts get SIGINT and SIGTERM all the time, from their first instruction on."""
    before, over = set(multiprocessing.active_children()), threading.Event()

    def strike() -> None:
        while not over.wait(0.005):
            for process in set(multiprocessing.active_children()) - before:
                for number in (signal.SIGINT, signal.SIGTERM):
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, number)  # type: ignore[arg-type]

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        yield
    finally:
        over.set()
        striking.join()


def processes_left() -> list[psutil.Process]:
    """Children of this process but for Python's own two helpers and the server of `runs.warm`, which stay."""
    helpers = (multiprocessing.forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in helpers
        and child.status() != psutil.STATUS_ZOMBIE
        and "fasttrain.runs.warm" not in " ".join(child.cmdline())
    ]


def shared_memory_names(pid: int | str = "self") -> set[str]:
    """Files in /dev/shm that a process has mapped and that still have their name; other processes have theirs."""
    maps = f"/proc/{pid}/maps"
    if not os.path.exists(maps):
        return set()
    with open(maps, encoding="utf-8") as lines:
        mapped = {int(line.split()[4]) for line in lines if " /dev/shm/" in line}  # by inode: a name may have changed
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in mapped}


@contextmanager
def no_litter() -> Iterator[None]:
    """No process, no name in /dev/shm and no open file more than before."""
    processes, names, files = processes_left(), shared_memory_names(), psutil.Process().num_fds()
    yield
    if shared_memory_names() - names:
        gc.collect()  # of what a traceback still holds; costs 0.2 s
    assert [process for process in processes_left() if process not in processes] == []
    assert shared_memory_names() - names == set()
    assert psutil.Process().num_fds() <= files + 3, "the fork server and the resource tracker may have begun"


def chaos_envs(count: int) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [lambda number=number: Chaos(number) for number in range(count)]


def walkers(count: int, **options: Any) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [lambda number=number: Walker(number, **options) for number in range(count)]


class Engine(Walker):
    """Talks to a program of its own, as many real envs do."""

    def begin_engine(self) -> int:
        self.engine = subprocess.Popen(["sleep", "3600"])
        return self.engine.pid

    def end_engine(self) -> Any:
        self.engine.terminate()
        return self.engine.wait(timeout=5.0)


def echo(go: Any, done: Any, bell: Any) -> None:
    """The other side of two semaphores and a bell."""
    while go.acquire(True, 20.0):
        done.release()
        bell.release()


# --- errands of a scout


def note(memory: Any, kept: list[Any]) -> int:
    memory[0] += 1
    return os.getpid()


def build(memory: Any, kept: list[Any]) -> None:
    env = Walker(0)
    env.played = 7  # type: ignore[attr-defined]
    kept.append(env)


def wrong(memory: Any, kept: list[Any]) -> None:
    raise EnvSpecError("it cannot be")


def broken(memory: Any, kept: list[Any]) -> None:
    raise KeyError("of ours")


def leave(memory: Any, kept: list[Any]) -> None:
    os._exit(3)


def sleep(memory: Any, kept: list[Any]) -> None:
    time.sleep(600)


class Factory:
    """As ours: it can wrap an env that was built before."""

    def __call__(self) -> gym.Env[Any, Any]:
        return Walker(1)

    def around(self, core: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        return gym.wrappers.TimeLimit(core, 5)


# --- what a worker and its memory are made with


def settings(factories: list[Any] = (), **changes: Any) -> Settings:  # type: ignore[assignment]
    values: dict[str, Any] = {
        "worker": 0, "first": 0, "factories": cloudpickle.dumps(list(factories)), "info_keys": (), "use_masks": True,
        "check_finite": True, "restart_envs": False, "spin_s": 0.0,
    }  # fmt: skip
    return Settings(**values | changes)


def layout_of(spaces_of: Any, num_envs: int, mask_width: int, num_info_keys: int = 0) -> Layout:
    """`spaces_of`: what has the two spaces."""
    return Layout(
        num_envs=num_envs, num_workers=1, observation_space=spaces_of.observation_space,
        action_space=spaces_of.action_space, mask_width=mask_width, num_info_keys=num_info_keys,
    )  # fmt: skip
