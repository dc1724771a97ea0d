from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fasttrain.errors import EnvError
from fasttrain_vec.crew import WORKER_SPIN_S, Crew, CrewOptions
from fasttrain_vec.replacing import SEED_STRIDE, successor_seed
from fasttrain_vec.worker_memory import NO_ROW, ROW
from fasttrain_vec.worker_start import SPIN_S
from worker_toys import END, GO, Chaos, action_of, chaos_envs, walkers

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
    pytest.mark.usefixtures("forked_workers"),
]


def crew_of(env_fns: list[Callable[[], Any]], **changes: Any) -> Crew:
    values: dict[str, Any] = {
        "num_workers": 2, "start_method": None, "info_keys": (), "on_env_error": "restart", "step_timeout_s": 20.0,
        "start_timeout_s": 30.0, "use_masks": True, "check_finite": True, "max_restarts": 10, "restart_window_s": 600.0,
    }  # fmt: skip
    return Crew(env_fns, CrewOptions(**values | changes))


class Started:
    """Chaos envs in a crew, reset, with a view of the state that a reader sees."""

    def __init__(self, num_envs: int = 4, **changes: Any) -> None:
        self.crew = crew_of(chaos_envs(num_envs), **changes)
        self.crew.reset(list(range(50, 50 + num_envs)), [{}] * num_envs)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.close()

    @property
    def now(self) -> Any:
        return self.crew.arrays.observations[self.crew.buffers[0]]

    def step(self, *actions: int) -> list[Any]:
        self.crew.arrays.actions[:] = actions or GO
        self.crew.post_step()
        return self.crew.wait_step()

    def kill(self, index: int) -> None:
        process = self.crew.workers[index].process
        process.kill()
        process.join(10.0)


@pytest.mark.parametrize(
    ("num_envs", "num_workers", "expected"),
    [(5, 2, [(0, 2), (2, 5)]), (3, 8, [(0, 1), (1, 2), (2, 3)]), (4, 1, [(0, 4)]), (5, 3, [(0, 2), (2, 3), (3, 5)])],
)
def test_envs_are_split_in_order_and_evenly(num_envs: int, num_workers: int, expected: list[tuple[int, int]]):
    crew = crew_of(walkers(num_envs), num_workers=num_workers)
    assert [(worker.first, worker.stop) for worker in crew.workers] == expected
    assert crew.num_workers == len(expected)
    numbers = crew.call("get", {index: ("number", [0]) for index in range(crew.num_workers)})
    assert numbers == [[first] for first, _ in expected]
    crew.close()


@pytest.mark.parametrize(
    ("cores", "workers", "spins", "long"), [(2, None, False, True), (3, 2, True, True), (1, 2, False, False)]
)
def test_one_worker_per_core_and_who_spins_how_long_depends_on_the_cores(
    cores: int, workers: int | None, spins: bool, long: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fasttrain_vec.crew.usable_cores", lambda: cores)
    crew = crew_of(walkers(3), num_workers=workers)
    assert crew.num_workers == 2
    assert (crew.spin_s > 0) is spins
    assert {worker.settings.spin_s for worker in crew.workers} == {WORKER_SPIN_S if long else SPIN_S}
    crew.close()


def assert_cut(started: Started, before: Any, first_steps: int) -> None:
    """The episodes of the second worker, in this step; the others have gone on."""
    arrays = started.crew.arrays
    assert arrays.lost.tolist() == arrays.truncations.tolist() == [False, False, True, True]
    assert arrays.rewards.tolist() == [1, 1, 0, 0]
    np.testing.assert_array_equal(arrays.final_observations[2:], before[2:])
    assert started.now[:, 2].tolist() == [first_steps, first_steps, 0, 0], "first states"
    assert (started.now[2:, 1] > before[2:, 1]).all(), "of other episodes"
    assert arrays.action_masks.all()
    started.step()
    assert not arrays.lost.any(), "said once"
    assert started.now[:, 2].tolist() == [first_steps + 1, first_steps + 1, 1, 1]


@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_that_died_is_replaced_and_its_episodes_are_cut(times: int):
    with Started() as started:
        started.step()
        before, crew = started.now.copy(), started.crew
        for _ in range(times - 1):
            started.kill(1)
            crew.call("get", {1: ("number", [0])})
        started.kill(1)
        assert started.step() == []
        assert crew.replacements.count == times
        assert crew.seeds == [50, 51, *(successor_seed(seed, failures=31 * times) for seed in (52, 53))]
        assert crew.call("get", {1: ("seed_given", [0, 1])}) == [crew.seeds[2:]]
        assert_cut(started, before, 2)


def test_a_worker_that_died_between_steps_is_told_of_by_the_next_step():
    """The learner continues from the state it saw; that step ends the episode; no action of the old state is applied to
    the fresh episode."""
    with Started() as started:
        started.step()
        crew, arrays = started.crew, started.crew.arrays
        arrays.action_masks[2, 5:] = False  # a mark of the state that the learner sees
        before, masks = started.now.copy(), arrays.action_masks.copy()
        started.kill(1)
        assert crew.call("get", {0: ("number", [0]), 1: ("number", [1, 0])}) == [[0], [3, 2]], "answered all the same"
        np.testing.assert_array_equal(started.now, before)
        np.testing.assert_array_equal(arrays.action_masks, masks)
        assert arrays.rewards.tolist() == [1, 1, 1, 1], "what the last step brought stays readable"
        assert not arrays.lost.any()
        assert started.step(GO, GO, action_of("raise"), action_of("kill")) == [], "these two are not applied"
        assert_cut(started, before, 2)
        assert crew.replacements.count == 1


def test_a_call_that_kills_its_worker_each_time_or_hangs_ends_the_run():
    lost = r"worker 1 \(envs 2-3\) failed: "
    with Started() as started:
        with pytest.raises(EnvError, match=f"{lost}it ended with exit code 7"):
            started.crew.call("method", {1: ("do_now", ("os_exit",), {}, [0])})
        assert started.crew.replacements.count == 1
    with Started(step_timeout_s=0.5) as started:
        with pytest.raises(EnvError, match=f"{lost}it did not answer in time"):
            started.crew.call("method", {0: ("where", (), {}, [0]), 1: ("work_long", (), {}, [0])})
        assert started.crew.call("get", {0: ("number", [1])}) == [[1]]


def test_a_call_while_a_step_is_under_way_keeps_what_the_step_brings():
    with Started() as started:
        started.crew.arrays.actions[:] = (GO, END, action_of("raise"), GO)
        started.crew.post_step()
        assert started.crew.call("get", {1: ("number", [1])}) == [[3]]
        assert started.crew.stepping == {0, 1}
        records = started.crew.wait_step()
        assert sorted(record.env_index for record in records) == [1, 2]
        assert started.crew.stepping == set()
        assert started.crew.replacements.count == 1


def test_a_worker_that_dies_in_a_call_after_its_step_was_settled():
    """What the step brought is delivered first; the step after it tells of the loss."""
    with Started() as started:
        started.crew.arrays.actions[:] = (GO, GO, GO, END)
        started.crew.post_step()
        started.crew.call("get", {1: ("number", [1])})
        started.kill(1)
        started.crew.call("get", {1: ("number", [1])})
        records = started.crew.wait_step()
        arrays = started.crew.arrays
        assert [record.env_index for record in records] == [3]
        assert arrays.terminations.tolist() == [False, False, False, True]
        assert not arrays.lost.any()
        assert started.now[:, 2].tolist() == [1, 1, 1, 0]
        before = started.now.copy()
        started.step()
        assert_cut(started, before, 2)


@pytest.mark.parametrize("fault", ["raise", "os_exit"])
def test_a_failure_in_reset_is_mended_with_other_seeds(fault: str):
    with Started() as started:
        infos = started.crew.reset([60, 61, 62, 63], [{}, {}, {"fault": fault}, {}])
        assert len(infos) == 4
        assert started.now[:, 2].tolist() == [0, 0, 0, 0]
        assert started.crew.seeds == [60, 61, *(successor_seed(seed, failures=31) for seed in (62, 63))]
        assert started.crew.replacements.count == 1
        started.step()
        assert not started.crew.arrays.lost.any(), "nothing had begun, so nothing is lost"
        assert started.now[:, 2].tolist() == [1, 1, 1, 1]


def test_a_loss_that_nobody_was_told_of_is_forgotten_by_a_reset():
    with Started() as started:
        started.kill(1)
        started.crew.call("get", {1: ("number", [1])})
        started.crew.reset([None] * 4, [{}] * 4)
        started.step()
        assert not started.crew.arrays.lost.any()
        assert started.now[:, 2].tolist() == [1, 1, 1, 1]


def test_too_many_restarts_end_the_run_with_the_last_cause():
    with Started(max_restarts=2) as started:
        for _ in range(2):
            started.step(action_of("raise"), GO, GO, GO)
        with pytest.raises(
            EnvError,
            match=r"3 restarts within 10 minutes, 2 allowed; the last: env 2 \(worker 1, seed 52, last action 3\) "
            r"failed at its step 3: RuntimeError: the board fell",
        ) as caught:
            started.step(GO, GO, action_of("raise"), GO)
        assert "in step" in str(caught.value.__cause__)


def test_a_worker_that_cannot_be_replaced_ends_the_run(tmp_path: Any):
    class Once(Chaos):
        def __init__(self, number: int, path: str) -> None:
            super().__init__(number)
            with open(path, "x", encoding="utf-8"):  # FileExistsError from the second time on
                pass

    crew = crew_of([lambda: Once(0, str(tmp_path / "a"))], num_workers=1, max_restarts=3)
    crew.reset([1], [{}])
    crew.workers[0].process.kill()
    crew.post_step()
    with pytest.raises(EnvError, match="4 restarts within 10 minutes, 3 allowed; the last: .*FileExistsError"):
        crew.wait_step()
    crew.close()


def test_the_seed_of_a_rebuilt_env_is_named_when_it_hangs_later():
    with Started(max_restarts=1, step_timeout_s=0.5) as started:
        started.step(GO, GO, action_of("raise"), GO)
        assert started.crew.seeds == [50, 51, 52 + SEED_STRIDE, 53]
        with pytest.raises(EnvError, match=rf"env 2 \(worker 1, seed {52 + SEED_STRIDE}, last action "):
            started.step(GO, GO, action_of("hang"), GO)


def test_when_failures_are_raised_all_replies_are_collected_first():
    """So that the same envs can be reset and used again, as a DummyVecEnv's can."""
    with Started(on_env_error="raise") as started:
        with pytest.raises(EnvError, match=r"env 0 \(worker 0, seed 50, last action 3\) failed at its step 1"):
            started.step(action_of("raise"), GO, GO, action_of("nan_reward"))
        assert started.crew.stepping == set()
        started.crew.reset([1, 2, 3, 4], [{}] * 4)
        started.step()
        assert started.now[:, 2].tolist() == [1, 1, 1, 1]
        assert (started.crew.control[:, ROW] == NO_ROW).all()


def test_a_late_reply_is_never_taken_for_the_next():
    with Started(on_env_error="raise", step_timeout_s=0.5) as started:
        process = started.crew.workers[1].process
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EnvError, match=r"worker 1 \(envs 2-3\) failed: it did not answer in time"):
            started.step()
        process.join(10.0)
        assert not process.is_alive(), "it cannot answer any more"
        with pytest.raises(EnvError, match=r"worker 1 \(envs 2-3\) failed: it was killed"):
            started.step()
