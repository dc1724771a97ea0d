"""Experiments with new envs that find the cause of a finding of the checkup.

Why does an env not repeat an episode from its seed? Why does it refuse an action? Do two copies influence each other?
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

from fasttrain.envs.findings import Finding, make_finding
from fasttrain.envs.masks import is_legal
from fasttrain.envs.probe import ACTIONS_SEED, SEED, Moment, Play, PlayError
from fasttrain.envs.second_play import HORIZON, Difference, Frame, differing_part, first_difference, frame_of
from fasttrain.envs.user_code import attribute_of, preserve_random_state

Playing = Callable[[], AbstractContextManager[Play]]  # a context in which a new env is played
Beside = Callable[[], AbstractContextManager[None]]  # a context in which another process plays a copy of the env
Again = Callable[[int, int, int, bool], Difference | None]
PAST_STEPS = 20  # steps that are played before the compared episode
HELD_STEPS, HALVINGS, STARTS, ENOUGH_STARTS = 20, 14, 8, 4
BESIDE_S, BUILT_BESIDE_S = 10.0, 60.0  # limits in seconds: playing in the other process; building its env
PLAYING = b"fasttrain: playing beside"  # the first output of the other process when it plays


def unseeded(difference: Difference, again: Again) -> Finding:
    """The finding that the same seed and actions gave different trajectories in two envs, with its cause.

    `again(seed, python, numpy, in_constructor)` plays the recorded actions in a new env. `python` and `numpy` seed the
    global generators of `random` and NumPy before it is built; with `in_constructor` both generators get other seeds
    after the env was built and before it is played. The recorded play used (SEED, 1, 1).
    """
    cause = (
        "the cause is unknown. It is neither reset(seed=…) nor the global generators `random` and `np.random`; perhaps "
        "the env has a generator of its own, reads the clock, or depends on another process"
    )
    if again(SEED, 1, 1, False) is None:
        streams = "`random` and `np.random`"
        if again(SEED, 1, 2, False) is None:
            streams = "`random`"
        elif again(SEED, 2, 1, False) is None:
            streams = "`np.random`"
        who = "its constructor" if again(SEED, 1, 1, True) is None else "it"
        cause = f"{who} draws from the global {streams}"
    text = f"the same seed and the same actions gave two different trajectories, first in {difference}: {cause}"
    return make_finding("unseeded_randomness", text)


def carried_over(difference: Difference, seed_matters: bool, playing: Playing) -> Finding:
    """The finding that a second reset with the same seed began differently on the same env, with its cause.

    `seed_matters`: two seeds gave two trajectories in new envs.
    """
    with playing() as play:
        redrawn = differing_part(frame_of(play.reset(SEED)), frame_of(play.reset(SEED)))
    with playing() as play:
        start, steps = _start_after(play, ACTIONS_SEED, PAST_STEPS)
    with playing() as play:
        other, other_steps = _start_after(play, ACTIONS_SEED + 1, steps)
    text = f"on the same env, reset(seed=…) gave another start the second time (first difference: {difference})"
    if not redrawn and steps == other_steps and differing_part(start, other):
        return make_finding("state_left_over", f"{text}, and the start depends on the actions in the episode before")
    if renumbered := _renumbered(playing):
        return make_finding("renumbered", f"{text}: the same game, its parts numbered anew ({renumbered})")
    cause = (
        "a generator that the constructor makes and reset(seed=…) does not seed, or a counter of episodes"
        if redrawn
        else "the cause is unknown; perhaps a generator that step() draws from, or a counter of steps"
    )
    if redrawn and not seed_matters:
        cause = f"{cause}; two seeds gave the same trajectory in new envs, so all copies of the env play the same"
    return make_finding("unseeded_randomness", f"{text}: {cause}")


def _start_after(play: Play, actions_seed: int, steps: int) -> tuple[Frame, int]:
    """Play up to `steps` random steps, then reset(SEED). Returns the frame of this reset and the number of steps."""
    play.rng = np.random.default_rng(actions_seed)
    play.action_space.seed(actions_seed)
    for _ in play.episode(SEED + 1, steps):
        pass
    count = play.length
    return frame_of(play.reset(SEED)), count


def _renumbered(playing: Playing) -> str:
    """Integers in observations that a second play replaces one for one by other integers: "1 → 4". Empty if none."""
    with playing() as play:
        first, actions = _flat_observations(play, PAST_STEPS)
        second, _ = _flat_observations(play, len(actions), lambda _: actions[play.length])
    if len(first) != len(second) or any(one.shape != other.shape for one, other in zip(first, second, strict=True)):
        return ""
    pairs = {(one, other) for one, other in zip(np.concatenate(first), np.concatenate(second), strict=True)}
    changed = sorted((one, other) for one, other in pairs if one != other)
    one_for_one = len({one for one, _ in pairs}) == len(pairs) == len({other for _, other in pairs})
    whole = all(float(number).is_integer() for pair in pairs for number in pair)
    if len(changed) < 3 or not one_for_one or not whole:
        return ""
    return ", ".join(f"{one:g} → {other:g}" for one, other in changed[:3])


def _flat_observations(
    play: Play, steps: int, choose: Callable[[Moment], Any] | None = None
) -> tuple[list[np.ndarray[Any, Any]], list[Any]]:
    """The flattened observations of an episode from SEED, and its actions."""
    observations, actions = list[np.ndarray[Any, Any]](), list[Any]()
    for moment in play.episode(SEED, steps, choose):
        flat: Any = spaces.flatten(play.env.observation_space, moment.observation)
        observations.append(np.ravel(flat))
        actions.append(moment.action)
    return observations, actions[1:]


# --- a refused action


def refused(play: Play, what: str, deadline: float) -> Finding:
    """The finding that step() raised for an action which the mask allows. It says whether the mask is late or wrong.

    Episodes are replayed, with other actions at the end. A mask that comes too late forbids the refused action one
    step later, in every replay. If other actions raise too, the mask is not the cause.
    """
    accepted = cases = late = 0
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
            after = _play_another(play, seed, moments, action)
            accepted += after is not None
            if after is not None and after.mask is not None:
                cases += 1
                late += not is_legal(play.action_space, after.mask, action)
    if cases >= 3 and late == cases:
        late_text = f"in {cases} of {cases} replays the mask one step later forbids this action: masks come too late"
        return make_finding("stale_mask", f"{what}; {late_text}")
    if accepted:
        return make_finding("mask_not_respected", f"{what}, at an action that the mask allows; other actions work")
    return make_finding("raised", what)


def _play_another(play: Play, seed: int, moments: Sequence[Moment], refused_action: object) -> Moment | None:
    """The moment after an action other than the refused one, in the same state; None if that action raised too."""
    try:
        *_, moment = play.episode(seed, len(moments) - 1, lambda _: moments[play.length + 1].action)
        action = play.draw_another(moment.mask, refused_action)
        return None if action is None else play.step(action)
    except PlayError:
        return None


# --- do two copies influence each other?


def interference(playing: Playing, recorded: Sequence[Frame], deadline: float, streams_apart: bool = False) -> str:
    """What differs in the first copy if a second copy is played in turns with the first; empty if nothing differs.

    `streams_apart`: each copy has its own state of the global generators of `random` and NumPy.
    """
    try:
        with playing() as one, playing() as other:
            turns = _endless_play(other)

            def turn() -> None:
                with preserve_random_state() if streams_apart else nullcontext():
                    next(turns)

            difference = first_difference(one, recorded, SEED, deadline, between=turn)
    except PlayError as fault:
        return fault.what
    except Exception as error:
        return f"a second copy cannot be built ({error})"
    return "" if difference is None else f"{difference} differs"


def interference_from_outside(beside: Beside, playing: Playing, recorded: Sequence[Frame], deadline: float) -> bool:
    """Whether this copy returns other values while another process plays a second copy."""
    try:
        with playing() as one, beside():
            return first_difference(one, recorded, SEED, deadline, len(recorded)) is not None
    except Exception:  # one of the two envs cannot be built or played
        return True


def _endless_play(play: Play) -> Iterator[None]:
    """Random play without an end, one step per item, with other seeds than the recorded play."""
    for seed in itertools.count(SEED + 1):
        for _ in play.episode(seed, sys.maxsize):
            yield


@contextmanager
def played_beside(spec: object, folder: str) -> Iterator[None]:
    """Another process plays a copy of the env during the block. `spec` is an `EnvSpec`.

    Raises EnvSpecError: the process could not build its copy.
    """
    code = "from fasttrain.envs.causes import play_beside; play_beside()"
    path = os.pathsep.join([folder, *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path}, cwd=folder,
    )  # fmt: skip
    timer = threading.Timer(BUILT_BESIDE_S, process.kill)  # the copy may wait for this process's port or licence
    timer.start()
    try:
        with suppress(OSError):  # if the process has ended, its output is empty: see below
            process.stdin.write(pickle.dumps((spec, folder)))  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        if not any(PLAYING in line for line in process.stdout or ()):  # the env may print other lines
            raise PlayError("raised", "another process could not play a second copy")
        timer.cancel()
        yield
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def play_beside() -> None:
    """Main function of the other process: build the env from the spec on stdin, and play it for `BESIDE_S`."""
    from fasttrain.envs.make import make_env

    spec, folder = pickle.load(sys.stdin.buffer)
    play, until = Play(lambda: make_env(spec, folder)), time.monotonic() + BESIDE_S
    turns = _endless_play(play)
    next(turns)
    sys.stdout.buffer.write(b"\n" + PLAYING + b"\n")
    sys.stdout.flush()
    while time.monotonic() < until:
        next(turns)


def always_one_seed(play: Play) -> Iterator[Finding]:
    """A finding if reset() always seeds `np_random` with the same number, and the env uses `np_random`."""
    states, inner = list[Any](), play.env.unwrapped
    for seed in (SEED, SEED + 1):
        list(play.episode(seed, 1))
        number, generator = (attribute_of(inner, name) for name in ("_np_random_seed", "_np_random"))
        if number in (None, -1, seed) or not isinstance(generator, np.random.Generator):
            return
        states.append((number, str(generator.bit_generator.state)))  # as text, because some states hold arrays
        generator.random()  # so that the state differs the second time if reset() does not seed the generator
    unused = str(seeding.np_random(number)[0].bit_generator.state)
    if states[0] == states[1] != (number, unused):
        text = f"reset(seed=…) seeds np_random with {number} for any seed, so all episodes begin alike"
        yield make_finding("unseeded_randomness", text)


# --- the declared range of actions


def unused_range(play: Play, deadline: float) -> Iterator[Finding]:
    """A finding if the outer part of a Box of actions has the same effect as its bounds.

    Several episodes begin from the same seed. The first repeats an action at the bounds, the second an action half as
    far from the middle of the Box, and so on. Their trajectories are compared. A seed that is not finished at the
    deadline is ignored.
    """
    space = play.action_space
    if not isinstance(space, spaces.Box) or not np.isfinite([space.low, space.high]).all():
        return

    def repeat(seed: int, action: NDArray[Any]) -> list[tuple[Any, ...]]:
        moments = play.episode(seed, HELD_STEPS, lambda _: action.astype(space.dtype))
        return [frame_of(moment)[1:4] for moment in itertools.takewhile(in_time, moments)]

    def in_time(_: object = None) -> bool:
        return time.perf_counter() <= deadline

    rng, alike, tried = np.random.default_rng(SEED), list[int](), 0
    for seed in itertools.takewhile(in_time, range(SEED + 1, SEED + 1 + STARTS)):
        corner = np.where(rng.random(space.shape) < 0.5, space.low, space.high)
        first, middle = repeat(seed, corner), (space.low + space.high) / 2
        actions = (middle + (corner - middle) * 0.5**half for half in range(1, HALVINGS + 1))
        differs = (half for half, action in enumerate(actions, 1) if not in_time() or repeat(seed, action) != first)
        half = next(differs, 0)
        if not in_time():
            break
        tried += 1
        alike += [half] if half else []  # half 0: all halved actions had the same effect; perhaps only signs matter
        if min(alike, default=2) < 2:
            break
    if len(alike) >= ENOUGH_STARTS and min(alike) >= 2:
        declared, share = f"{space.low.min():g} to {space.high.max():g}", 0.5 ** (min(alike) - 1)
        text = (
            f"in {len(alike)} of {tried} episodes, actions at the bounds of the declared Box ({declared}) had the same "
            f"effect as actions {share:g} times as far from its middle"
        )
        yield make_finding("unused_range", text)
