"""Prefetching: no torn rows, no stale blocks, no leaked thread, no swallowed error; and that it does draw ahead."""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from accelerated import toy_dqn, weights
from fasttrain.buffers.prefetch import Direct, Prefetching, Replay, draw_block
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.errors import FastTrainError

KINDS = pytest.mark.parametrize("kind", [ReplayStorage, PrioritizedReplayBuffer])
NUMBER = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def made(
    kind: type[ReplayStorage] = ReplayStorage, rows: int = 8, envs: int = 2, steps: int = 5, **options: Any
) -> Any:
    storage = kind(rows * envs, NUMBER, spaces.Discrete(1 << 20), "cpu", envs, **options)
    for step in range(steps):
        put(storage, step)
    return storage


def put(storage: ReplayStorage, step: int) -> None:
    """Transition k (counted over steps and envs) says k in everything it holds."""
    said = np.arange(step * storage.n_envs, (step + 1) * storage.n_envs)
    both = np.stack([said, said], axis=1)
    storage.put(both, both, said, said, np.zeros(storage.n_envs))


def until_ready(sampler: Prefetching) -> None:
    with sampler._changed:
        assert sampler._changed.wait_for(lambda: len(sampler._ready) == sampler.depth, 60)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "fasttrain-prefetch"]


class Two(gymnasium.Env[Any, Any]):
    observation_space, action_space = NUMBER, spaces.Discrete(2)


@pytest.fixture
def sampler() -> Iterator[Prefetching]:
    made_here = Prefetching(seed=0, bound_s=60)
    yield made_here
    made_here.close()
    assert threads() == []


@KINDS
def test_a_copied_block_holds_the_same_transitions(kind: type[ReplayStorage]):
    lean = kind is ReplayStorage
    options = {"optimize_memory_usage": True, "handle_timeout_termination": False} if lean else {}
    storage = made(kind, steps=11, n_steps=3, mask_width=3, **options)
    drawn = draw_block(storage, 3, 5, np.random.default_rng(0))
    block, copied = drawn.batches, drawn.copied().batches
    assert copied.observations.shape == copied.next_observations.shape == (15, 2)
    for name, rows in (("observations", "rows"), ("actions", "rows"), ("next_observations", "next_rows")):
        inside, outside = (getattr(each, name)[getattr(each, rows)] for each in (copied, block))
        np.testing.assert_array_equal(inside, outside)
        assert not np.shares_memory(getattr(copied, name), getattr(block, name))
    assert copied.next_masks.shape == (3, 5, 3)
    if kind is PrioritizedReplayBuffer:
        assert (drawn.generation, drawn.indices.shape, copied.weights.shape) == (11, (15,), (3, 5))


def test_a_block_is_drawn_before_it_is_asked_for(sampler: Prefetching):
    storage = made()
    list(sampler.batches(storage, 3, 4))
    assert (sampler.hits, sampler.waits) == (0, 1)
    assert sampler.wait_ns > 0
    until_ready(sampler)
    for step in range(5, 8):
        put(storage, step)
    batches = list(sampler.batches(storage, 3, 4))
    assert (sampler.hits, sampler.waits) == (1, 1)
    assert [len(batch.observations) for batch in batches] == [4, 4, 4]
    assert max(batch.actions.max() for batch in batches) < 10, "it lacks what was stored since"


@KINDS
def test_the_same_seed_draws_the_same_and_the_global_stream_is_left_alone(kind: type[ReplayStorage]):
    storage, drawn, before = made(kind), [], np.random.get_state()
    for seed in (0, 0, 1):
        sampler = Prefetching(seed)
        drawn.append([sampler.block(storage, 2, 16).batches.actions.tolist() for _ in range(3)])
        list(sampler.batches(storage, 2, 4))
        sampler.close()
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != [np.random.default_rng(0).integers(0, 5, 32).tolist()], "not the stream of an env seeded 0"
    after = np.random.get_state()
    assert before[2] == after[2]
    np.testing.assert_array_equal(before[1], after[1])


def test_depth_bounds_how_far_ahead_it_is():
    sampler, storage = Prefetching(0, depth=3), made()
    sampler.block(storage, 1, 4)
    until_ready(sampler)
    for _ in range(3):
        sampler.block(storage, 1, 4)
    assert sampler.hits >= 3
    sampler.close()
    with pytest.raises(ValueError, match="depth=0"):
        Prefetching(depth=0)


def test_another_buffer_or_size_throws_away_what_was_drawn(sampler: Prefetching):
    first, second = made(), made(steps=0)
    for step in range(100, 104):
        put(second, step)
    sampler.block(first, 2, 4)
    until_ready(sampler)
    assert sampler.block(second, 2, 4).batches.actions.min() >= 200
    until_ready(sampler)
    assert sampler.block(second, 2, 7).batches.rows.shape == (2, 7)
    until_ready(sampler)
    assert sampler.block(second, 5, 7).batches.rows.shape == (5, 7)
    until_ready(sampler)
    assert len(list(sampler.batches(second, 5, 7))) == 5
    assert (sampler.hits, sampler.waits) == (0, 5)


def test_a_reset_buffer_throws_away_what_was_drawn(sampler: Prefetching):
    storage = made(PrioritizedReplayBuffer)
    sampler.block(storage, 2, 4)
    until_ready(sampler)
    storage.reset()
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        sampler.block(storage, 2, 4)
    until_ready(sampler)  # one more error, of the empty buffer
    storage.reset()
    put(storage, 50)
    assert sampler.block(storage, 2, 4).batches.actions.min() >= 100


@pytest.mark.parametrize("again", [True, False])
def test_late_priorities_never_land_on_a_recycled_slot(again: bool, sampler: Prefetching):
    storage = made(PrioritizedReplayBuffer, rows=4, envs=1, steps=4, alpha=1.0)
    sampler.block(storage, 2, 4)
    until_ready(sampler)  # the next block is drawn of rows 0 to 3
    if again:
        put(storage, 4)  # row 0 is written anew
    block = sampler.block(storage, 2, 4)
    assert block.batches.actions.max() < 4, "what was drawn is what there was"
    assert sorted(set(block.indices.tolist())) == [0, 1, 2, 3]
    storage.update_priorities(block.indices, np.full(8, 7.0), block.generation)
    np.testing.assert_allclose(storage.priorities[:, 0], [1 if again else 7, 7, 7, 7], rtol=1e-5)


class Broken(ReplayStorage):
    def windows(self, *arguments: Any) -> Any:
        raise OSError("the disk is gone")


def test_an_error_reaches_the_trainer_with_its_traceback(sampler: Prefetching):
    storage = made(Broken)
    for flat in (True, True, False):  # each time, without hanging
        with pytest.raises(OSError, match="the disk is gone") as caught:
            sampler.block(storage, 2, 4) if flat else list(sampler.batches(storage, 2, 4))
        assert "in windows" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert len(sampler.block(made(), 2, 4).batches.rows) == 2, "another buffer works"


def test_a_request_has_a_bound():
    sampler, storage, release = Prefetching(bound_s=0.05), made(), threading.Event()

    def hold() -> None:
        with storage.lock:
            held.set()
            release.wait(60)

    held, holder = threading.Event(), threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    with pytest.raises(FastTrainError, match=r"no replay batch was drawn within 0.05 s"):
        sampler.block(storage, 2, 4)
    release.set()
    holder.join()
    sampler.bound_s = 60
    sampler.close()
    assert threads() == []


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_begins_without_a_thread(clone: Any, sampler: Prefetching):
    storage = made()
    sampler.block(storage, 2, 4)
    other = clone(sampler)
    assert (other.seed, other.depth, other.bound_s) == (0, 1, 60)
    assert len(threads()) == 1
    assert other.block(pickle.loads(pickle.dumps(storage)), 1, 3).batches.rows.shape == (1, 3)
    other.close()
    sampler.close()
    assert threads() == []
    assert sampler.block(storage, 2, 4).batches.rows.shape == (2, 4), "a closed one starts again"


@pytest.mark.parametrize(("kind", "flat"), [(ReplayStorage, True), (PrioritizedReplayBuffer, False)])
def test_no_row_is_torn(kind: type[ReplayStorage], flat: bool, sampler: Prefetching, busy_threads: None):
    """All parts of a transition say the same number, on a ring that is written over all the time."""
    storage = made(kind, rows=6, envs=4, steps=6)
    for step in range(6, 900):
        put(storage, step)
        if step % 3:
            continue
        if flat:
            block = sampler.block(storage, 2, 2000).batches
            parts = [block.observations[:, 0], block.observations[:, 1], block.next_observations[:, 0],
                     block.actions[:, 0], block.rewards.reshape(-1)]  # fmt: skip
            np.testing.assert_array_equal(parts, np.broadcast_to(parts[0], (5, 4000)))
        else:
            for batch in sampler.batches(storage, 2, 8):
                said = batch.rewards
                assert torch.equal(batch.observations, said.expand(-1, 2))
                assert torch.equal(batch.next_observations, said.expand(-1, 2))
                assert torch.equal(batch.actions, said.long())


def learner(deterministic: bool = False, **changes: Any) -> Any:
    model = toy_dqn(**changes)
    model.prefetch_batches(deterministic)
    return model


@pytest.mark.parametrize(
    ("engine", "changes"), [("torch", {}), ("kernels", {"prioritized": {}, "n_steps": 3, "double_q": True})]
)
def test_dqn_trains_with_it_and_leaves_no_thread(engine: str, changes: dict[str, Any]):
    model = learner(engine=engine, **changes)
    for _ in range(2):
        model.learn(100, reset_num_timesteps=False)
        assert threads() == []
    sampler = model.collector.sampler
    assert sampler.hits + sampler.waits == model._n_updates // 2 == (200 - 20) // 5
    assert sampler.hits > 0


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_deterministic_gives_the_batches_of_a_run_without_it(engine: str):
    plain = weights(toy_dqn(engine=engine).learn(80))
    assert torch.equal(plain, weights(learner(True, engine=engine).learn(80)))


def test_no_thread_is_left_after_an_error():
    def interrupt(names: dict[str, Any], _: Any) -> bool:
        if names["self"].num_timesteps == 60:
            assert threads() == ["fasttrain-prefetch"]
            raise KeyboardInterrupt("enough")
        return True

    with pytest.raises(KeyboardInterrupt, match="enough"):
        learner().learn(400, callback=interrupt)
    assert threads() == []


def test_a_loaded_replay_buffer_is_the_one_that_is_drawn_from(tmp_path: Any):
    model = learner().learn(100)
    model.save_replay_buffer(tmp_path / "replay.pkl")
    model.load_replay_buffer(tmp_path / "replay.pkl", truncate_last_traj=False)
    model.learn(100, reset_num_timesteps=False)
    assert model._n_updates == 2 * (200 - 20) // 5


def test_an_engine_asks_for_batches_or_a_block_and_the_sampler_draws_them(sampler: Prefetching):
    replay = Replay(made(), sampler)
    assert [len(batch.rewards) for batch in replay.batches(3, 4)] == [4, 4, 4]
    assert replay.block(3, 5).batches.rows.shape == (3, 5)
    assert sampler.hits + sampler.waits == 2
    normalised = Replay(made(), sampler, VecNormalize(DummyVecEnv([Two])))
    assert len(list(normalised.batches(3, 4))) == 3
    assert sampler.hits + sampler.waits == 2, "drawn directly, to be normalised"


@pytest.mark.parametrize("per_row", [False, True])
def test_errors_that_are_not_finite_rate_nothing_where_that_is_looked_for(per_row: bool):
    storage = made(PrioritizedReplayBuffer, rows=4, envs=1, steps=4, alpha=1.0)
    replay, indices, errors = Replay(storage, Direct()), np.arange(4), np.array([3.0, np.nan, np.inf, 5.0])
    generation: Any = np.full(4, storage.generation) if per_row else storage.generation
    replay.rate(indices, errors, generation, guarded=True)
    np.testing.assert_allclose(storage.priorities[:, 0], [3, 1, 1, 5], rtol=1e-5)
    with pytest.raises(ValueError, match="the TD error of slot 1 is nan"):
        replay.rate(indices, errors, generation, guarded=False)


@pytest.mark.cuda
@KINDS
def test_on_cuda_batches_arrive_whole(kind: type[ReplayStorage], sampler: Prefetching):
    storage = made(kind, rows=64, steps=64)
    storage.device = torch.device("cuda", 0)
    for step in range(64, 400):
        put(storage, step)
        for batch in sampler.batches(storage, 4, 256):
            assert batch.rewards.device.type == "cuda"
            assert torch.equal(batch.observations, batch.rewards.expand(-1, 2))
            assert torch.equal(batch.actions, batch.rewards.long())
