"""Plays an env by random legal actions: checks the form of every answer and measures build, reset and step."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from fasttrain.batch import BoolArray
from fasttrain.envs.answers import AnswerError, as_ends, check_reset
from fasttrain.envs.masks import MASKABLE_SPACES, FlatMasks, mask_width, random_legal_action
from fasttrain.envs.user_code import BUILDING, MASKING, Place, attribute_of, blame, needs_package
from fasttrain.errors import EnvError, EnvSpecError

SEED = 20_260_101  # seed of the checkup and of measurements; trainings use other seeds: 0, 1, …
ACTIONS_SEED = 7_919  # not SEED, because an env may draw its state in the same way as random play draws actions
PROBE_SECONDS, PROBE_STEPS = 0.3, 500
MANY_ACTIONS = 20


class PlayError(EnvSpecError):
    """The env broke its contract while it was played.

    Args:
        code: code of the finding.
        what: what happened.
        remedy: what to do; empty: the usual remedy of the code.
        at_action: True if `step` raised an error.
    """

    def __init__(self, code: str, what: str, remedy: str = "", at_action: bool = False) -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.code, self.what, self.remedy, self.at_action = code, what, remedy, at_action


class Moment(NamedTuple):
    """What the env returned at one reset or step, and the mask after it."""

    action: Any  # None after a reset
    observation: Any
    reward: Any  # 0.0 after a reset
    terminated: Any
    truncated: Any
    info: Any
    mask: BoolArray | None  # (A,) for the next action; None without masks, and after the end of an episode
    ended: bool


Watch = Callable[[Moment], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """Times in seconds. The first reset and the first step are not counted, because they compile, load and allocate."""

    build_s: float  # time of constructing the env
    step_s: float  # mean time of a step
    step_cv: float  # standard deviation / mean of a step's time: the larger it is, the longer envs wait for each other
    mask_s: float  # mean time of `action_masks()`, 0 without masks
    reset_s: float  # mean time of a reset
    steps: int  # number of measured steps
    resets: int  # number of measured resets
    episode_steps: float | None  # mean length of the episodes that ended; None if none did
    has_masks: bool
    cpu_share: float  # CPU time ÷ wall time inside `step`: near 0 the env waits, near 1 it computes
    info_bytes: float  # mean pickled size of a step's info, 0 if it cannot be pickled
    density: tuple[float, float]  # mean share of non-zero numbers in an observation, and of legal actions


class Play:
    """Plays one env and measures it. Methods raise PlayError if the env raises or breaks its contract.

    Args:
        env_factory: builds the env; the time is measured.
        use_masks: draw only actions that the env's masks allow, if it has masks.
        lenient: note in `self.faults`, without an error, if a mask read twice differs, or if `step` changes the action.
        place: records which call of the env is running.
        build_s: the building time of an env that exists already, if `env_factory` only returns it.
    """

    def __init__(
        self,
        env_factory: Callable[[], gymnasium.Env[Any, Any]],
        use_masks: bool = True,
        lenient: bool = False,
        place: Place | None = None,
        build_s: float | None = None,
    ) -> None:
        self.place = place or Place()
        began = time.perf_counter()
        if build_s is None:
            self.place.enter(BUILDING)
        self.env = env = env_factory()
        self._build_s = time.perf_counter() - began if build_s is None else build_s
        self.action_space = copy.deepcopy(env.action_space)  # some envs use the generator of their own action space
        self.action_space.seed(ACTIONS_SEED)
        maskable = use_masks and isinstance(env.action_space, MASKABLE_SPACES)
        self._action_masks = attribute_of(env, "action_masks") if maskable else None
        self.has_masks = self._action_masks is not None
        self.rng = np.random.default_rng(ACTIONS_SEED)
        self.faults: dict[str, str] = {}  # code → text of the first fault with this code
        self.lengths: list[int] = []  # lengths of the episodes that ended
        self.steps_s: list[float] = []  # seconds of each step, without the time for which other processes had the core
        self.resets_s: list[float] = []
        self.total_steps = 0
        self.length = 0  # number of steps of this episode, including a step that raises
        self.action: Any = None  # the last action
        self.warm_up_s = 0.0
        self._lenient = lenient
        self._flat_mask = FlatMasks(mask_width(env.action_space) if self.has_masks else 0)
        self._masks_s: list[float] = []
        self._infos_bytes: list[int] = []
        self._cpu_s: list[float] = []  # CPU seconds of each step
        self._nonzero: list[float] = []  # see `ProbeResult.density`
        self._legal: list[float] = []
        self._run_delay = RunDelay()

    def run(self, max_seconds: float, max_steps: int, watch: Watch = lambda _: None) -> Moment:
        """Play from a seeded reset, and pass every moment to `watch`. Returns the last moment, for `go_on`."""
        began = time.perf_counter()
        moment = self.reset(SEED)
        watch(moment)
        watch(self.step(self.draw(moment.mask)))
        for times in (self.steps_s, self._masks_s, self.resets_s, self.lengths, self._infos_bytes, self._cpu_s):
            times.clear()
        self.warm_up_s = time.perf_counter() - began
        deadline = time.perf_counter() + max_seconds
        moment = self.reset()
        watch(moment)
        return self.go_on(moment, lambda: len(self.steps_s) >= max_steps or time.perf_counter() >= deadline, watch)

    def go_on(self, moment: Moment, enough: Callable[[], bool], watch: Watch = lambda _: None) -> Moment:
        """Play from `moment` on, at least one step, until `enough()` is true."""
        while True:
            if moment.ended:
                moment = self.reset()
                watch(moment)
            moment = self.step(self.draw(moment.mask))
            watch(moment)
            if enough():
                return moment

    def episode(self, seed: int, most: int, choose: Callable[[Moment], Any] | None = None) -> Iterator[Moment]:
        """The moments of one episode from a seeded reset, at most `most` steps. Without `choose` actions are random."""
        moment = self.reset(seed)
        yield moment
        while not moment.ended and self.length < most:
            moment = self.step(self.draw(moment.mask) if choose is None else choose(moment))
            yield moment

    def reset(self, seed: int | None = None) -> Moment:
        self.length, self.action = 0, None
        self.place.reset(seed)
        began = time.perf_counter()
        try:
            answer = self.env.reset(seed=seed)
            info = check_reset(answer)
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error
        self.resets_s.append(time.perf_counter() - began)
        return Moment(None, answer[0], 0.0, False, False, info, self._mask(), False)

    def step(self, action: Any) -> Moment:
        self.action, passed = action, copy.copy(action)
        self.length += 1  # a step that fails also counts
        self.place.step(self.length)
        delay_s, cpu_began, began = self._run_delay.seconds(), time.process_time(), time.perf_counter()
        try:
            answer = self.env.step(passed)
        except (Exception, SystemExit) as error:
            if "values to unpack (expected 5" in str(error):  # raised in a wrapper, which unpacks what step() returned
                raise self._wrong_step(f"the wrong number of values ({error})") from error
            raise self._failed(error, at_action=True) from error
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        delay_s = self._run_delay.seconds() - delay_s
        self.steps_s.append(max(wall_s - delay_s, 1e-9))  # positive even for a short step, as the two clocks differ
        self._cpu_s.append(cpu_s)
        self.total_steps += 1
        if self._lenient and not np.array_equal(action, passed):
            text = f"step() wrote into the array of actions that it received, first at {self.position()}"
            self.faults.setdefault("changed_action", text)
        if not isinstance(answer, (tuple, list)) or len(answer) != 5:
            raise self._wrong_step(f"{len(answer)} values" if isinstance(answer, (tuple, list)) else _short(answer))
        observation, reward, terminated, truncated, info = answer
        self._infos_bytes.append(_pickled_bytes(info))
        self._nonzero.append(_share_nonzero(observation))
        try:
            ended = any(as_ends(terminated, truncated))
        except AnswerError as error:
            raise self._failed(error) from None
        if ended:
            self.lengths.append(self.length)
        return Moment(action, observation, reward, terminated, truncated, info, None if ended else self._mask(), ended)

    def draw(self, mask: BoolArray | None) -> Any:
        return random_legal_action(self.action_space, mask, self.rng)

    def draw_another(self, mask: BoolArray | None, action: Any) -> Any:
        """A random legal action other than `action`; None if 20 draws find none.

        With many actions, half of the calls try the space's first action first: it often does nothing ("pass"), unlike
        all other actions, and random play would rarely draw it.
        """
        draws: Iterator[Any] = (self.draw(mask) for _ in range(20))
        many = isinstance(self.action_space, spaces.Discrete) and self.action_space.n > MANY_ACTIONS
        if many and (mask is None or mask[0]) and self.rng.random() < 0.5:
            draws = itertools.chain([self.action_space.start], draws)  # type: ignore[attr-defined]
        return next((draw for draw in draws if not np.array_equal(draw, action)), None)

    def position(self) -> str:
        if self.action is None:
            return "the start of an episode of random legal play"
        return f"step {self.length} of an episode of random legal play (last action {self.action})"

    def costs(self) -> ProbeResult:
        """The measurements. There must have been at least one step and one reset."""
        step_s = _mean(self.steps_s)
        return ProbeResult(
            build_s=self._build_s,
            step_s=step_s,
            step_cv=float(np.std(self.steps_s) / step_s) if step_s > 0 else 0.0,
            mask_s=_mean(self._masks_s),
            reset_s=_mean(self.resets_s),
            steps=len(self.steps_s),
            resets=len(self.resets_s),
            episode_steps=_mean(self.lengths) if self.lengths else None,
            has_masks=self.has_masks,
            cpu_share=min(1.0, _mean(self._cpu_s) / step_s) if step_s > 0 else 0.0,
            info_bytes=_mean(self._infos_bytes),
            density=(_mean(self._nonzero), _mean(self._legal) if self._legal else 1.0),
        )

    def _mask(self) -> BoolArray | None:
        if self._action_masks is None:
            return None
        self.place.enter(MASKING)
        try:
            began = time.perf_counter()
            answer = self._action_masks()
            self._masks_s.append(time.perf_counter() - began)
            mask = self._flat_mask(answer)
            self._legal.append(np.count_nonzero(mask) / max(len(mask), 1))
            reads_twice = self._lenient and "stale_mask" not in self.faults
            if reads_twice and not np.array_equal(mask, self._flat_mask(self._action_masks())):
                text = f"two calls of action_masks() without a step between them gave two masks ({self.position()})"
                self.faults["stale_mask"] = text
        except (EnvError, ValueError) as error:  # NumPy raises ValueError for ragged lists
            text = str(error) if str(error).startswith("env ") else f"env {self.env.unwrapped}: {error}"
            remedy = "give one entry per choice of each sub-action, 1 = legal, after every reset and step"
            raise PlayError("bad_mask", f"{text}, at {self.position()}", remedy) from error
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error
        return mask

    def _failed(self, error: BaseException, at_action: bool = False) -> PlayError:
        if isinstance(error, AnswerError):  # raised in a wrapper of fasttrain, or by `check_reset`
            return PlayError(error.code, f"env {self.env.unwrapped}: {error}")
        what = f"env {self.env.unwrapped} failed at {self.position()}: {blame(error)}"
        if needs_package(error):
            return PlayError("needs_package", what)
        shape = isinstance(error, (TypeError, ValueError)) and re.search(r"unpack|unexpected keyword", str(error))
        if self.action is None and shape:  # raised in a wrapper, which unpacks what reset() returned
            return PlayError("raised", what, "reset(self, *, seed=None, options=None) must return (observation, info)")
        return PlayError("raised", what, at_action=at_action)

    def _wrong_step(self, returned: str) -> PlayError:
        return PlayError(
            "step_answer",
            f"env {self.env.unwrapped}: step() returned {returned} instead of (observation, reward, terminated, "
            "truncated, info); the old gym interface had 4",
            "return five, or adapt the old gym interface by env.wrappers=[fasttrain.envs.wrappers:OldGym]",
        )


class RunDelay:
    """The time for which this thread was ready to run but had no core, as Linux counts it. Reading it takes 2 µs.

    This delay is subtracted from a step's time: otherwise an env would seem slow on a busy machine.
    """

    def __init__(self, file: str = "/proc/thread-self/schedstat") -> None:
        try:
            self._file: int | None = os.open(file, os.O_RDONLY)
        except OSError:  # not Linux, or a kernel that does not count the time of waiting for a core
            self._file = None

    def seconds(self) -> float:
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) * 1e-9

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _share_nonzero(observation: Any) -> float:
    parts = observation.values() if isinstance(observation, dict) else [observation]
    arrays = [part for part in parts if isinstance(part, np.ndarray) and part.dtype.kind in "fiub"]
    total = sum(part.size for part in arrays)
    return sum(np.count_nonzero(part) for part in arrays) / total if total else 1.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _pickled_bytes(info: object) -> int:
    try:
        return len(pickle.dumps(info, pickle.HIGHEST_PROTOCOL)) if info or not isinstance(info, Mapping) else 0
    except Exception:  # the user's objects may raise anything; the checkup reports such infos
        return 0
