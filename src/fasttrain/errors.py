"""The errors that fasttrain raises. A message says what happened, where (env 3, step 812; which key) and what to do.

In messages about a run, `step` is `model.num_timesteps`, which includes the step of the event; 0 is the reset. In
messages about an env or an episode, steps count from 1, and a step that failed counts too.

The command line prints the message and exits with `exit_code`; with `FASTTRAIN_TRACEBACK=1` it prints the traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Exit codes: done; crashed, or an env failed; wrong input; a quality gate failed; stopped by a signal.
EXIT_DONE, EXIT_CRASHED, EXIT_WRONG_INPUT, EXIT_GATE_FAILED, EXIT_STOPPED = range(5)


class FastTrainError(Exception):
    """The base class of all errors that fasttrain raises."""

    exit_code = EXIT_CRASHED


class ConfigError(FastTrainError):
    """Settings are wrong: an unknown key, a wrong type, values that contradict each other."""

    exit_code = EXIT_WRONG_INPUT


class EnvError(FastTrainError):
    """An environment failed during training: no legal action, a wrong shape, an exception in `step`."""


class EnvSpecError(EnvError):
    """An environment cannot be built, or does not fit the algorithm. Raised before training starts."""

    exit_code = EXIT_WRONG_INPUT


class ReplaceEnv(EnvError):  # noqa: N818 - not a failure, but a wish of the environment
    """Raised by an environment in `step` or `reset`, to be closed and built anew.

    The episode counts as lost: the step is left out of the training. With vec_env=dummy or shared no error is shown.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return f"the env asked to be replaced{': ' if text else ''}{text}"


class NoMasksError(EnvSpecError, ValueError):
    """An env without action masks for an algorithm that needs them. Also a ValueError, as in sb3-contrib."""


class DivergedError(FastTrainError):
    """Too many updates in a row had a loss or gradient that is not finite. The weights are the last good ones."""


class CrashedError(FastTrainError):
    """An error ended a training of which something was saved; `__cause__` is the error."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what` before the message of any FastTrainError that is raised in the block."""
    try:
        yield
    except FastTrainError as error:
        error.args = (f"{what}: {error}",)
        raise


def too_little_memory(error: MemoryError) -> str:
    """The message for a MemoryError."""
    wanted = f": {error}" if str(error) else ""
    return f"not enough memory{wanted}; use a smaller num_envs, algo.rollout_size (algo.n_steps) or algo.buffer_size"
