"""Whether a kernel that can run on threads shall: by what it took."""

from __future__ import annotations

from collections import deque


class ThreadChoice:
    """Threads or no threads, by what the last runs of a kernel took.

    Two threads halve an update on an idle machine; where another process wants the second core they make it several
    times slower, because every minibatch waits for the thread that has no core. The choice changes no number
    (`minibatch_gradient`), so timing it does not make a run depend on time.

    Args:
        trial: how many runs in a row the slower mode is tried for. Threads that had nothing to do have gone to sleep:
            for a run of 0.1 ms the first ones say nothing (acting for 256 envs: 0.27 ms, then 0.11; alone 0.19).
    """

    TRY_OTHER_EVERY = 50  # trials: so often the slower mode gets one
    REMEMBERED = 4  # runs of each; the best of them counts, so that a moment's disturbance decides nothing

    def __init__(self, trial: int = 1) -> None:
        self._seconds = {mode: deque[float](maxlen=self.REMEMBERED) for mode in (True, False)}
        self._trial, self._runs, self._mode = trial, 0, True

    def next(self) -> bool:
        """Whether the next run shall use threads."""
        if self._runs % self._trial == 0:
            self._mode = self._choose(self._runs // self._trial)
        self._runs += 1
        return self._mode

    def _choose(self, trials: int) -> bool:
        for mode, seconds in self._seconds.items():
            if not seconds:
                return mode
        faster = min(self._seconds, key=lambda mode: min(self._seconds[mode]))
        return not faster if trials % self.TRY_OTHER_EVERY == self.TRY_OTHER_EVERY - 1 else faster

    def took(self, on_threads: bool, seconds: float) -> None:
        """Note what a run took, per optimizer step or for so many rows."""
        self._seconds[on_threads].append(seconds)
