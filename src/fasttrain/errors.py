"""One tree of errors. Every message says what happened, where (env 3, worker 1, step 812; which key) and what to do.

Of a run, `step` is the number of env steps (`model.num_timesteps`) once what is named has happened; 0 is the reset. Of
an env or an episode the steps count from 1, one that failed included.

The command line prints the message alone and exits with `exit_code`; `FASTTRAIN_TRACEBACK=1` shows the traceback too.
"""

from __future__ import annotations

# How a process ends: done, crashed or an env broke, wrong input, a quality gate failed, stopped by a signal.
EXIT_DONE, EXIT_CRASHED, EXIT_WRONG_INPUT, EXIT_GATE_FAILED, EXIT_STOPPED = range(5)


class FastTrainError(Exception):
    """Root of all errors that fasttrain raises on purpose."""

    exit_code = EXIT_CRASHED


class ConfigError(FastTrainError):
    """The user asked for something that cannot be: unknown key, wrong type, values that contradict each other."""

    exit_code = EXIT_WRONG_INPUT


class EnvError(FastTrainError):
    """An environment broke its contract while running: no legal action, wrong shape, an exception in `step`."""


class EnvSpecError(EnvError):
    """An environment cannot be built or does not fit the algorithm; found before training starts."""

    exit_code = EXIT_WRONG_INPUT


class NoMasksError(EnvSpecError, ValueError):
    """An env without action masks for an algorithm that wants them; a ValueError too, which sb3-contrib raises."""


class DivergedError(FastTrainError):
    """Round after round no update was finite; the weights are those of the last good one."""


class CrashedError(FastTrainError):
    """An error ended a training of which something is saved; `__cause__` is the error."""


def too_little_memory(error: MemoryError) -> str:
    """The message for a MemoryError, with the way out."""
    wanted = f": {error}" if str(error) else ""
    return f"not enough memory{wanted}; use a smaller num_envs, algo.rollout_size (algo.n_steps) or algo.buffer_size"
