"""Why an env does not repeat an episode or refuses an action, and whether two copies of it are independent.

Each question is answered by an experiment with fresh envs. Where it leaves several causes, the text says so.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from numpy.typing import NDArray

from fasttrain.envs.findings import Finding, found
from fasttrain.envs.masks import is_legal
from fasttrain.envs.probe import ACTIONS_SEED, SEED, Moment, Play, PlayError
from fasttrain.envs.second_play import HORIZON, Difference, Frame, differing_part, first_difference, frame_of
from fasttrain.envs.user_code import kept_random_state

Playing = Callable[[], AbstractContextManager[Play]]  # a fresh env
Beside = Callable[[], AbstractContextManager[None]]  # another process plays a copy meanwhile
Again = Callable[[int, int, int, bool], Difference | None]
PAST_STEPS = 20  # of an episode before the one that is compared
HELD_STEPS, HALVINGS, STARTS, ENOUGH_STARTS = 20, 14, 8, 4
BESIDE_S, BUILT_BESIDE_S = 10.0, 60.0  # the longest that another process plays beside; and that it takes to begin
PLAYING = b"fasttrain: playing beside"  # what it says then


def unseeded(difference: Difference, again: Again) -> Finding:
    """The finding that the same seed and the same actions gave another trajectory in another env, with its cause.

    `again(seed, python, numpy, in_constructor)` plays the recorded actions in a fresh env with the global streams of
    `random` and NumPy put so while it is built, and while it is played too unless `in_constructor`. The recorded play
    had (SEED, 1, 1).
    """
    cause = (
        "the cause is not known: neither reset(seed=…) nor the global streams of `random` and NumPy decide it (perhaps "
        "a generator of its own, the clock or another process)"
    )
    if again(SEED, 1, 1, False) is None:
        streams = "`random` and `np.random`"
        if again(SEED, 1, 2, False) is None:
            streams = "`random`"
        elif again(SEED, 2, 1, False) is None:
            streams = "`np.random`"
        who = "its constructor" if again(SEED, 1, 1, True) is None else "it"
        cause = f"{who} draws from the global {streams}"
    text = f"the same seed and the same actions gave two trajectories, first {difference}: {cause}"
    return found("unseeded_randomness", text)


def carried_over(difference: Difference, seed_decides: bool, playing: Playing) -> Finding:
    """The finding that reset(seed=…) gave another start the second time on the same env, with its cause.

    `seed_decides`: two seeds gave two trajectories in fresh envs.
    """
    with playing() as play:
        redrawn = differing_part(frame_of(play.reset(SEED)), frame_of(play.reset(SEED)))
    with playing() as play:
        start, steps = _start_after(play, ACTIONS_SEED, PAST_STEPS)
    with playing() as play:
        other, other_steps = _start_after(play, ACTIONS_SEED + 1, steps)
    second = f"reset(seed=…) gave another start the second time on the same env (first {difference})"
    if not redrawn and steps == other_steps and differing_part(start, other):
        return found("state_left_over", f"{second}, and which one depends on the actions of the episode before")
    if renamed := _renamed(playing):
        return found("renumbered", f"{second}: the same game with other numbers ({renamed})")
    cause = (
        "a generator that the constructor makes and reset(seed=…) does not seed, or a count of episodes"
        if redrawn
        else "the cause is not known (perhaps a generator that step() draws from, or a count of steps)"
    )
    if redrawn and not seed_decides:
        cause = f"{cause}; two seeds gave the same trajectory in fresh envs, so all copies of the env play the same"
    return found("unseeded_randomness", f"{second}: {cause}")


def _start_after(play: Play, choices: int, steps: int) -> tuple[Frame, int]:
    """The start from SEED after `steps` random steps at most of another episode, and how many those were."""
    play.rng = np.random.default_rng(choices)
    play.action_space.seed(choices)
    for _ in play.episode(SEED + 1, steps):
        pass
    taken = play.length
    return frame_of(play.reset(SEED)), taken


def _renamed(playing: Playing) -> str:
    """How whole numbers of the observation were others the second time, one for one; empty where they were not."""
    with playing() as play:
        first, actions = _numbers(play, PAST_STEPS)
        second, _ = _numbers(play, len(actions), lambda _: actions[play.length])
    if len(first) != len(second) or any(one.shape != other.shape for one, other in zip(first, second, strict=True)):
        return ""
    pairs = {(one, other) for one, other in zip(np.concatenate(first), np.concatenate(second), strict=True)}
    changed = sorted((one, other) for one, other in pairs if one != other)
    one_for_one = len({one for one, _ in pairs}) == len(pairs) == len({other for _, other in pairs})
    whole = all(float(number).is_integer() for pair in pairs for number in pair)
    if len(changed) < 3 or not one_for_one or not whole:
        return ""
    return ", ".join(f"{one:g} → {other:g}" for one, other in changed[:3])


def _numbers(
    play: Play, steps: int, choose: Callable[[Moment], Any] | None = None
) -> tuple[list[np.ndarray[Any, Any]], list[Any]]:
    """The observations of an episode from SEED, flat, and its actions."""
    seen, taken = list[np.ndarray[Any, Any]](), list[Any]()
    for moment in play.episode(SEED, steps, choose):
        flat: Any = spaces.flatten(play.env.observation_space, moment.observation)
        seen.append(np.ravel(flat))
        taken.append(moment.action)
    return seen, taken[1:]


# --- a refused action


def refused(play: Play, what: str, deadline: float) -> Finding:
    """The finding that step() raised at an action that its mask allows: is the mask one step late, or else wrong?

    In replays with another action in that place, a late mask forbids the refused one a step later, every time. Where
    other actions raise too, it is not about the mask.
    """
    passed = cases = late = 0
    for seed in range(SEED + 1, SEED + 31):
        if cases >= 6 or time.perf_counter() > deadline:
            break
        moments: list[Moment] = []
        try:
            for moment in play.episode(seed, HORIZON):
                moments.append(moment)
                if time.perf_counter() > deadline:
                    break
        except PlayError:
            action = play.action
            after = _instead(play, seed, moments, action)
            passed += after is not None
            if after is not None and after.mask is not None:
                cases += 1
                late += not is_legal(play.action_space, after.mask, action)
    if cases >= 3 and late == cases:
        late_text = f"in {cases} of {cases} replays the mask one step later forbids what was refused: it comes late"
        return found("stale_mask", f"{what}; {late_text}")
    if passed:
        return found("mask_not_respected", f"{what}, at an action that the mask allows, and at no other")
    return found("raised", what)


def _instead(play: Play, seed: int, moments: Sequence[Moment], refused_action: object) -> Moment | None:
    """The moment after another action than the refused one in the same state; None if that raised too."""
    try:
        *_, moment = play.episode(seed, len(moments) - 1, lambda _: moments[play.length + 1].action)
        action = play.draw_another(moment.mask, refused_action)
        return None if action is None else play.step(action)
    except PlayError:
        return None


# --- copies


def interference(playing: Playing, recorded: Sequence[Frame], deadline: float, streams_apart: bool = False) -> str:
    """How a second copy that is played in turns with the first changes what the first does; empty: it does not. With
    `streams_apart` each has the global streams of `random` and NumPy for itself."""
    try:
        with playing() as one, playing() as other:
            turns = _endless(other)

            def turn() -> None:
                with kept_random_state() if streams_apart else nullcontext():
                    next(turns)

            difference = first_difference(one, recorded, SEED, deadline, between=turn)
    except PlayError as fault:
        return fault.what
    except Exception as error:
        return f"a second copy cannot be built ({error})"
    return "" if difference is None else f"{difference} differs"


def interference_from_outside(beside: Beside, playing: Playing, recorded: Sequence[Frame], deadline: float) -> bool:
    """Whether a copy that another process plays at the same time changes what this one does."""
    try:
        with playing() as one, beside():
            return first_difference(one, recorded, SEED, deadline, len(recorded)) is not None
    except Exception:  # one of both cannot be built or played
        return True


def _endless(play: Play) -> Iterator[None]:
    """Random play, a step at a time, of other episodes than those that are recorded."""
    for seed in itertools.count(SEED + 1):
        for _ in play.episode(seed, sys.maxsize):
            yield


@contextmanager
def played_beside(spec: object, folder: str) -> Iterator[None]:
    """Another process plays a copy of the env (an `EnvSpec`) while the block runs.

    Raises:
        EnvSpecError: it could not build its copy.
    """
    code = "from fasttrain.envs.causes import play_beside; play_beside()"
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path}, cwd=folder,
    )  # fmt: skip
    waiting = threading.Timer(BUILT_BESIDE_S, process.kill)  # for a port, or a licence that this process has
    waiting.start()
    try:
        with suppress(OSError):  # it ended; what it says tells why
            process.stdin.write(pickle.dumps((spec, folder)))  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        if not any(PLAYING in line for line in process.stdout or ()):  # between lines that the env prints
            raise PlayError("raised", "another process could not play a second copy")
        waiting.cancel()
        yield
    finally:
        waiting.cancel()
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def play_beside() -> None:
    """What the other process does: build the env that stdin names and play it, until it is killed or time is up."""
    from fasttrain.envs.make import make_env

    spec, folder = pickle.load(sys.stdin.buffer)
    play, until = Play(lambda: make_env(spec, folder)), time.monotonic() + BESIDE_S
    turns = _endless(play)
    next(turns)
    sys.stdout.buffer.write(b"\n" + PLAYING + b"\n")
    sys.stdout.flush()
    while time.monotonic() < until:
        next(turns)


def always_one_seed(play: Play) -> Iterator[Finding]:
    """Whether reset() seeds `np_random`, which the env draws from, with the same number always."""
    states, inner = list[Any](), play.env.unwrapped
    for seed in (SEED, SEED + 1):
        list(play.episode(seed, 1))
        number, generator = (getattr(inner, name, None) for name in ("_np_random_seed", "_np_random"))
        if number in (None, -1, seed) or not isinstance(generator, np.random.Generator):
            return
        states.append((number, str(generator.bit_generator.state)))  # of some kinds it holds arrays
        generator.random()  # one that reset() does not seed is in another state the second time
    undrawn = str(seeding.np_random(number)[0].bit_generator.state)
    if states[0] == states[1] != (number, undrawn):
        text = f"reset(seed=…) seeds np_random with {number} whatever it is given, so all episodes begin alike"
        yield found("unseeded_randomness", text)


# --- the declared range of actions


def unused_range(play: Play, deadline: float) -> Iterator[Finding]:
    """Whether the outer part of a Box of actions changes nothing.

    From one start, an action at the bounds is held, then one half as far from the middle of the Box, and so on: whether
    the episodes are the same. A start that is not through at the deadline does not count.
    """
    space = play.action_space
    if not isinstance(space, spaces.Box) or not np.isfinite([space.low, space.high]).all():
        return

    def held(seed: int, action: NDArray[Any]) -> list[tuple[Any, ...]]:
        moments = play.episode(seed, HELD_STEPS, lambda _: action.astype(space.dtype))
        return [frame_of(moment)[1:4] for moment in itertools.takewhile(in_time, moments)]

    def in_time(_: object = None) -> bool:
        return time.perf_counter() <= deadline

    rng, alike, tried = np.random.default_rng(SEED), list[int](), 0
    for seed in itertools.takewhile(in_time, range(SEED + 1, SEED + 1 + STARTS)):
        corner = np.where(rng.random(space.shape) < 0.5, space.low, space.high)
        first, middle = held(seed, corner), (space.low + space.high) / 2  # of a Box around 0: 0
        towards = (middle + (corner - middle) * 0.5**half for half in range(1, HALVINGS + 1))
        other = (half for half, action in enumerate(towards, 1) if not in_time() or held(seed, action) != first)
        half = next(other, 0)
        if not in_time():
            break
        tried += 1
        alike += [half] if half else []  # else the action does not matter there, or only its sign
        if min(alike, default=2) < 2:
            break
    if len(alike) >= ENOUGH_STARTS and min(alike) >= 2:
        declared, share = f"{space.low.min():g} to {space.high.max():g}", 0.5 ** (min(alike) - 1)
        same = f"in {len(alike)} of {tried} episodes, actions at the bounds of the declared Box ({declared}) had the"
        text = f"{same} same effect as actions {share:g} times as far from its middle: what lies beyond changes nothing"
        yield found("unused_range", text)
