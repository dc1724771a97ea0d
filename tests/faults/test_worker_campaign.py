"""A thousand faults of envs and workers in one run under "restart", in both vector envs on worker processes.

Beside the run a twin of each env plays in this process without any fault. Each row must be the twin's, bit for bit.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fragile import CUT, END, FAULTS, GO, OF_ENV, Fragile

from fasttrain.vec.shared import SharedMemoryVecEnv
from fasttrain_vec import EnvError, VectorEnv
from toys import single_thread
from worker_toys import no_litter

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
    pytest.mark.usefixtures("forked_workers"),
]
_one_thread = pytest.fixture(autouse=True, scope="module")(single_thread)
REPLACED = {"new env asks": 2, "start": 2, "new reset": 2, "call raises": 0}  # all others: 1
BY_FILE = ("call", "call raises", "start", "new reset", "new env asks")
NUM_ENVS = 6  # three in each worker


class Run:
    """A vector env under faults, and a twin of each env."""

    def __init__(self, kind: Any, folder: Path, timeout_s: float) -> None:
        self.folder, self.is_sb3, self.lost_steps, self.causes = folder, kind is SharedMemoryVecEnv, 0, Counter[str]()
        fns = [lambda number=number: Fragile(number, str(folder)) for number in range(NUM_ENVS)]
        self.env: Any = kind(fns, 2, on_env_error="restart", step_timeout_s=timeout_s, max_restarts=10**6)
        self.crew = self.env.crew if self.is_sb3 else self.env._crew
        if self.is_sb3:
            self.env.seed(7)
        self.last = self.env.reset() if self.is_sb3 else self.env.reset(seed=7)[0]
        self.twins, self.rewards = [twin_of(row) for row in self.last], [list[float]() for _ in range(NUM_ENVS)]

    def answers(self, actions: Any) -> tuple[Any, ...]:
        """Observations, rewards, terminations, truncations, {ended env: last observation}, lost envs."""
        if not self.is_sb3:
            *answer, infos = self.env.step(actions)
            finals = {index: infos["final_obs"][index] for index in np.flatnonzero(infos.get("_final_obs", []))}
            return *answer, finals, {*np.flatnonzero(infos.get("final_info", {}).get("_lost", []))}
        observations, rewards, dones, infos = self.env.step(actions)
        cut = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        finals = {index: infos[index]["terminal_observation"] for index in np.flatnonzero(dones)}
        finished = {episode.env_index: episode for episode in self.env.slots.finished}
        assert {*finished} == {*finals}
        for index, episode in finished.items():
            played = [*self.rewards[index], float(rewards[index])]
            assert (episode.length, episode.episode_return) == (len(played), sum(played))
        return observations, rewards, dones & ~cut, cut, finals, {i for i, each in finished.items() if each.lost}

    def step(self, actions: Any, doomed: set[int]) -> None:
        """Step. Each row must be its twin's or, where the env is `doomed`, the end of a lost episode."""
        after, rewards, terminations, truncations, finals, lost = self.answers(actions)
        assert lost == doomed
        assert (after.shape, rewards.shape) == ((NUM_ENVS, 5), (NUM_ENVS,))
        assert np.isfinite(after).all()
        for index, row in enumerate(after):
            self.rewards[index].append(float(rewards[index]))
            if index in doomed:
                assert row[1] != self.last[index][1], "a new seed"
                self.twins[index], wanted = twin_of(row), (self.last[index], 0.0, False, True)
                self.lost_steps += len(self.rewards[index])
            else:
                wanted = self.twins[index].step(actions[index])[:4]
            assert (rewards[index], terminations[index], truncations[index]) == wanted[1:]
            assert (index in finals) == (wanted[2] or wanted[3])
            follows = wanted[0]
            if index in finals:
                np.testing.assert_array_equal(finals[index], wanted[0])
                follows = row if index in doomed else self.twins[index].reset()[0]
                self.rewards[index] = []
            np.testing.assert_array_equal(row, follows)
        self.last = after

    def suffer(self, fault: str, where: int, actions: Any) -> None:
        """One fault of env `where`, in the next step or before it."""
        self.causes[fault] += 1
        doomed = {where} if fault in OF_ENV else {0, 1, 2} if where < 3 else {3, 4, 5}
        poke = lambda: self.env.env_method("poke") if self.is_sb3 else self.env.call("poke")  # noqa: E731
        if fault in BY_FILE:
            (self.folder / f"{fault}-{where}").touch()
        if fault == "between steps":
            os.kill(self.crew.workers[where // 3].process.pid, signal.SIGKILL)
        elif fault == "call":
            poke()
        elif fault == "call raises":
            doomed = set()
            with pytest.raises(EnvError, match=f"a call to env {where - where % 3} or a later .* failed: .*not now"):
                poke()
        else:
            actions[where] = 3 + FAULTS.index(fault)
        self.step(actions, doomed)
        assert [*self.folder.iterdir()] == [], "the fault has happened"
        assert self.env.restarts == sum(times * REPLACED.get(kind, 1) for kind, times in self.causes.items())


def twin_of(row: Any) -> Fragile:
    """An env in the state after a reset with the seed that `row` tells."""
    twin = Fragile(int(row[0]))
    np.testing.assert_array_equal(twin.reset(seed=int(row[1]))[0], row)
    return twin


@pytest.mark.parametrize("kind", [VectorEnv, SharedMemoryVecEnv])
@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(0)])])
def test_faults_in_one_run(kind: Any, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It ends normally, no wrong row gets through and nothing is left. The seed replays a failure."""
    monkeypatch.setattr("fasttrain_vec.process.POLL_EVERY_S", 0.02)  # a death is noticed sooner
    rng = np.random.default_rng(20260)
    kinds, count = (FAULTS, int(os.environ.get("FASTTRAIN_FAULTS", count))) if count > 15 else (FAULTS[:15], count)

    def drawn() -> Any:
        return rng.choice([GO, END, CUT], NUM_ENVS, p=[0.7, 0.15, 0.15])

    with no_litter():
        run = Run(kind, tmp_path, 1.0 if count > 15 else 60.0)
        for number in range(count):
            for _ in range(rng.integers(0, 5)):
                run.step(drawn(), set())
            run.suffer(kinds[number % len(kinds)], int(rng.integers(NUM_ENVS)), drawn())
        run.step(drawn(), set())
        asked = sum(run.causes[fault] for fault in ("ask", "reset asks", "new env asks"))
        assert run.crew.replacements.causes["asked to be replaced"] == asked
        assert not run.is_sb3 or run.env.lost_steps == run.lost_steps
        run.env.close()
        sys.stdout.write(f"{kind.__name__}: {count} faults: {dict(run.causes)}\n")
        del run
