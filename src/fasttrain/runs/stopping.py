"""The rules that end a training early: a signal, a reward, a time limit, or a reward that no longer rises (plateau).

The plateau rule compares the mean returns of blocks of at least 100 episodes. It stops the training if both hold:

1. The best block of the last `stop.patience` × total_timesteps steps is not better than the best earlier one by more
   than twice the standard error of their difference.
2. The line through the late blocks is flat: its slope plus twice its standard error lies below half of the mean slope
   of the training until then. If the training has not risen until then, the line's slope must be at most 0. Rule 2
   is for slow steady rises that noise hides. Of simulated trainings with such a rise (1,000 to 30,000 episodes, noise
   of 0.25 to 1 times the total gain, patience 0.2) rule 1 alone stopped 61 %, and both rules together 0.3 %. With 6,000
   to 20,000 episodes and noise of 1 to 2 times the gain they stopped 100 % and 7 % (tests/runs/test_stopping.py).

Nothing is decided in the first `stop.patience` × total_timesteps steps. If a training has no reward for a while at its
start, the patience must be longer than that.
"""

from __future__ import annotations

import math
import os
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.runs.progress import Moments, fit_line
from fasttrain.spec.config import Config
from fasttrain.spec.groups import StopConfig
from fasttrain.spec.reading import is_self_play

RECENT_EPISODES = 100
BLOCKS_PER_PATIENCE = 10
ERRORS = 2.0
StoppedBy = Literal["horizon", "reward", "plateau", "time", "signal", "callback", "steps"]


class Stop(NamedTuple):
    """Why a training ended early: the word for summary.json, and a text such as `by a signal`."""

    by: StoppedBy
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """The episodes that ended in an interval of env steps."""

    begin: int
    end: int
    returns: Moments


class Plateau:
    """The plateau rule. It gets every finished episode and decides once per block."""

    def __init__(self, patience_steps: float) -> None:
        self._patience = patience_steps
        self._blocks: list[Block] = []
        self._begin = 0
        self._open = Moments()
        self.found: tuple[Block, Block] | None = None  # on a plateau: the best earlier block, the best late block

    def add(self, env_steps: int, episode_return: float) -> None:
        self._open.add(episode_return)
        long_enough = env_steps - self._begin >= self._patience / BLOCKS_PER_PATIENCE
        if long_enough and self._open.count >= RECENT_EPISODES:
            self._blocks.append(Block(self._begin, env_steps, self._open))
            self._begin, self._open = env_steps, Moments()
            self.found = self._look(env_steps)

    def _look(self, env_steps: int) -> tuple[Block, Block] | None:
        since = env_steps - self._patience
        before = [block for block in self._blocks if block.end <= since]
        recent = [block for block in self._blocks if block.end > since]
        if not before or len(recent) < 2:
            return None
        best, now = (max(blocks, key=lambda block: block.returns.mean) for blocks in (before, recent))
        if _rise(best, now) > 0:
            return None
        first, top = self._blocks[0], max((best, now), key=lambda block: block.returns.mean)
        mean_slope = max(0.0, _rise(first, top)) / env_steps
        return (best, now) if _is_flat(recent, mean_slope) else None


def _rise(before: Block, after: Block) -> float:
    """How much the mean rose between two blocks, minus twice the standard error of the difference."""
    error = math.hypot(before.returns.error, after.returns.error)
    return after.returns.mean - before.returns.mean - ERRORS * error


def _is_flat(blocks: list[Block], mean_slope: float) -> bool:
    episodes = sum(block.returns.count for block in blocks)
    variance = sum(block.returns.squares for block in blocks) / (episodes - len(blocks))
    points = [((block.begin + block.end) / 2, block.returns.mean, float(block.returns.count)) for block in blocks]
    line = fit_line(points)
    if line is None:
        return False
    return line.slope + ERRORS * line.error(variance) < mean_slope / 2 if mean_slope else line.slope <= 0


STEPS: StoppedBy = "steps"  # stop.at_steps ended the training; the run can be resumed as after a signal


class Stopping:
    """The rules of `stop`. `self.active`: at least one rule is set."""

    def __init__(self, config: StopConfig, total_timesteps: int) -> None:
        self._config = config
        self._patience_steps = (config.patience or 0.0) * total_timesteps
        self._plateau = Plateau(self._patience_steps) if config.patience else None
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.active = any((config.patience, config.max_minutes, config.at_steps)) or config.at_reward is not None

    def add(self, env_steps: int, episode_return: float, learned: bool = True) -> None:
        """Add a training episode. `learned`: False before the first update, while the policy is random."""
        if learned:
            self._recent.append(episode_return)
        if self._plateau is not None:
            self._plateau.add(env_steps, episode_return)

    def reason(self, wall_s: float, env_steps: int) -> Stop | None:
        """Why to stop now, after `env_steps` in `wall_s` seconds of training; None: no rule applies."""
        wanted, most, last = self._config.at_reward, self._config.max_minutes, self._config.at_steps
        mean = sum(self._recent) / RECENT_EPISODES
        if wanted is not None and len(self._recent) == RECENT_EPISODES and mean >= wanted:
            reached = f"mean return of the last {RECENT_EPISODES} episodes reached {mean:.4g}"
            return Stop("reward", f"{reached} (stop.at_reward={wanted:g})")
        if self._plateau is not None and self._plateau.found is not None:
            before, now = (block.returns for block in self._plateau.found)
            return Stop(
                "plateau",
                f"the mean return no longer rises: at best {now.mean:.4g} ± {now.error:.2g} in the last "
                f"{self._patience_steps:,.0f} steps, {before.mean:.4g} ± {before.error:.2g} before "
                f"(stop.patience={self._config.patience:g})",
            )
        if last is not None and env_steps >= last:
            return Stop(STEPS, f"stop.at_steps={last:,} is reached")
        if most is not None and wall_s >= 60 * most:
            return Stop("time", f"{wall_s / 60:.2f} minutes of training are over (stop.max_minutes={most:g})")
        return None


def stopping_for(config: Config) -> Stopping:
    """The stopping rules of a run. Raises ConfigError for a rule that has no effect in this run."""
    stop = config.stop
    if stop.patience and is_self_play(config):
        raise ConfigError(
            f"stop.patience={stop.patience:g} with opponent=self: against snapshots of itself the reward says nothing "
            "of progress; remove it, use stop.max_minutes=…, or choose another opponent"
        )
    return Stopping(stop, config.total_timesteps)


REPEAT_S = 0.5  # a second signal within this time counts as the first one
HANG_UP = getattr(signal, "SIGHUP", None)  # sent when the terminal is closed
FROM_OUTSIDE = (HANG_UP, getattr(signal, "SIGUSR1", None), getattr(signal, "SIGUSR2", None))  # signals that Slurm sends


def _is_free(number: int) -> bool:
    """Whether no Python code handles the signal and, checked on Linux, no C code does (`faulthandler.register`)."""
    caught = 0
    with suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return signal.getsignal(number) is signal.SIG_DFL and not caught >> (number - 1) & 1


class StopFlag:
    """Set by SIGINT, SIGTERM, SIGUSR1, SIGUSR2, or by a terminal that closes (unless under nohup).

    The run then ends after the current update (`Checkpoints`). A second signal kills it. A signal within `REPEAT_S` of
    the first is ignored: a run of a study may get a signal twice, from the process group and from the study.
    """

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Handle the signals inside the block. Only the main thread can handle signals; in other threads do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        others = [number for number in FROM_OUTSIDE if number and _is_free(number)]
        numbers = [signal.SIGINT, signal.SIGTERM, *others]
        previous = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        try:
            yield self
        finally:
            for number, handler in previous:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == HANG_UP:
            silence_terminals()
        if not self.requested:
            self.requested, self._since = True, now
        elif now - self._since > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def silence_terminals() -> None:
    """Send output to the null device if it goes to a terminal: printing to a closed terminal is an error."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # `isatty` is false for a closed terminal
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
