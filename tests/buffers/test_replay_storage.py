"""ReplayStorage against SB3's replay buffers: the same numbers from the same random state, bit by bit."""

from __future__ import annotations

import itertools
import pickle
import types
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from fasttrain.buffers import replay_storage as replay
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import PACK_ABOVE, ReplayStorage
from fasttrain.errors import ConfigError

BOX = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (2, 4, 3), np.uint8)
DICT = spaces.Dict({"box": BOX, "kind": spaces.Discrete(4), "image": IMAGE})
LEAN: dict[str, Any] = {"optimize_memory_usage": True, "handle_timeout_termination": False}
FIELDS = ("observations", "actions", "next_observations", "dones", "rewards", "discounts")


def draw(space: spaces.Space, envs: int, rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: draw(sub, envs, rng) for key, sub in space.spaces.items()}
    space.seed(int(rng.integers(1 << 30)))
    return np.stack([space.sample() for _ in range(envs)])


def fill(buffers: list[Any], steps: int, rng: np.random.Generator, ends: float = 0.2) -> None:
    """The same transitions into all; about half of the ends are timeouts."""
    first = buffers[0]
    for _ in range(steps):
        observations, following = (draw(first.observation_space, first.n_envs, rng) for _ in range(2))
        actions = draw(first.action_space, first.n_envs, rng)
        rewards = rng.standard_normal(first.n_envs).astype(np.float32)
        dones = rng.random(first.n_envs) < ends
        infos = [{"TimeLimit.truncated": bool(done and rng.random() < 0.5)} for done in dones]
        for buffer in buffers:
            buffer.add(_copy(observations), _copy(following), actions, rewards, dones, infos)


def _copy(values: Any) -> Any:
    return dict(values) if isinstance(values, dict) else values.copy()


def assert_same(ours: Any, stock: Any) -> None:
    for name in FIELDS:
        mine, other = getattr(ours, name), getattr(stock, name)
        if other is None:
            assert mine is None
            continue
        pairs = [(mine[key], other[key]) for key in other] if isinstance(other, dict) else [(mine, other)]
        for a, b in pairs:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=name)


CASES = {
    "box": (ReplayBuffer, BOX, spaces.Discrete(4)),
    "box actions": (ReplayBuffer, BOX, spaces.Box(-1, 1, (2,), np.float64)),
    "float64": (ReplayBuffer, spaces.Box(-1, 1, (2, 2), np.float64), spaces.Discrete(4)),
    "image": (ReplayBuffer, IMAGE, spaces.MultiDiscrete([2, 3, 4])),
    "discrete": (ReplayBuffer, spaces.Discrete(6), spaces.Discrete(4)),
    "multi-discrete": (ReplayBuffer, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3)),
    "multi-binary": (ReplayBuffer, spaces.MultiBinary(5), spaces.Discrete(2)),
    "dict": (DictReplayBuffer, DICT, spaces.Discrete(4)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("envs", "steps", "timeouts"), [(1, 25, True), (3, 4, True), (3, 17, False)])
def test_samples_are_those_of_sb3(case: tuple, envs: int, steps: int, timeouts: bool):
    kind, *both = case
    options = {"n_envs": envs, "handle_timeout_termination": timeouts}
    stock, ours = kind(10 * envs, *both, "cpu", **options), ReplayStorage(10 * envs, *both, "cpu", **options)
    fill([stock, ours], steps, np.random.default_rng(0))
    assert (ours.pos, ours.full, ours.size()) == (stock.pos, stock.full, stock.size())
    assert_same_samples(stock, ours)


def assert_same_samples(stock: Any, ours: Any, batch_size: int = 64, seed: int = 3, **given: Any) -> None:
    drawn = []
    for buffer in (stock, ours):
        np.random.seed(seed)
        drawn.append((buffer.sample(batch_size, **given), np.random.random()))
    (expected, after), (batch, found) = drawn
    assert after == found, "what numpy's stream gives next"
    n_steps = getattr(stock, "n_steps", 1)
    assert_same(batch if n_steps > 1 else batch._replace(discounts=getattr(expected, "discounts", None)), expected)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    n_steps=st.sampled_from([1, 2, 3, 5, 7, 8, 9, 16, 20, 33, 128]),
    size=st.integers(1, 40),
    steps=st.integers(1, 100),
    envs=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 0.997, 1.0]),
    ends=st.sampled_from([0.0, 0.05, 0.4]),
    timeouts=st.booleans(),
    batch_size=st.integers(1, 50),
)
def test_n_steps_are_those_of_sb3(seed, n_steps, size, steps, envs, gamma, ends, timeouts, batch_size):
    options = {"n_envs": envs, "n_steps": n_steps, "gamma": gamma, "handle_timeout_termination": timeouts}
    both = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(4)
    stock = NStepReplayBuffer(size * envs, *both, "cpu", **options)
    ours = ReplayStorage(size * envs, *both, "cpu", **options)
    fill([stock, ours], steps, np.random.default_rng(seed), ends)
    assert_same_samples(stock, ours, batch_size, seed % 1000)


@pytest.mark.parametrize("steps", [4, 23])
def test_without_next_observations_as_sb3(steps: int):
    stock, ours = (kind(20, BOX, spaces.Discrete(4), "cpu", 2, **LEAN) for kind in (ReplayBuffer, ReplayStorage))
    assert not hasattr(ours, "next_observations")
    assert ours.flat_views().next_observations is None
    fill([stock, ours], steps, np.random.default_rng(0))
    assert_same_samples(stock, ours)


@pytest.mark.parametrize("space", [BOX, DICT], ids=["box", "dict"])
def test_without_next_observations_n_steps_and_dicts_work_too(space: spaces.Space):
    """Of a run without breaks both ways of keeping the next observation hold the same."""
    options: Any = {"handle_timeout_termination": False, "n_steps": 3, "gamma": 0.9}
    both = [ReplayStorage(20, space, spaces.Discrete(4), "cpu", 2, lean, **options) for lean in (False, True)]
    rng = np.random.default_rng(0)
    observations = draw(space, 2, rng)
    for step in range(24):
        following = draw(space, 2, rng)
        for storage in both:
            storage.put(observations, following, np.zeros(2), np.full(2, step), np.zeros(2))
        observations = following
    rows, envs = both[1].draw(100)
    assert (rows != both[1].pos).all()
    assert_same(*(storage.gather(rows, envs) for storage in both))


@pytest.mark.parametrize(("width", "n_steps"), [(1, 3), (5, 1), (PACK_ABOVE, 3), (PACK_ABOVE + 1, 1), (100, 3)])
def test_masks_belong_to_the_next_observation_of_the_window(width: int, n_steps: int):
    ours = ReplayStorage(20, spaces.Discrete(1000), spaces.Discrete(width), "cpu", 2, n_steps=n_steps, mask_width=width)
    masks = np.random.default_rng(1).random((27, 2, width)) < 0.5
    masks[..., 0] = True
    for step in range(27):
        # A next observation says which step and env it is of.
        after = np.array([2 * step, 2 * step + 1])
        dones = np.random.default_rng(step).random(2) < 0.2
        ours.put(np.zeros(2), after, np.zeros(2), np.zeros(2), dones, None, masks[step])
    batch = ours.sample(200)
    expected = masks.reshape(54, width)[batch.next_observations[:, 0]]
    assert batch.next_action_masks.dtype == torch.bool
    np.testing.assert_array_equal(batch.next_action_masks.numpy(), expected)
    packed = ours.flat_views().next_masks
    assert packed.shape == (20, width if width <= PACK_ABOVE else -(-width // 8))


@pytest.mark.parametrize("width", [3, 40])
def test_masks_left_out_or_empty_at_an_end_are_all_legal(width: int):
    ours = ReplayStorage(4, BOX, spaces.Discrete(width), "cpu", 2, mask_width=width)
    step = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(2), np.zeros(2)
    ours.put(*step, np.zeros(2))
    ours.put(*step, np.array([True, False]), None, np.zeros((2, width), bool))
    legal = ours.gather(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])).next_action_masks
    assert legal.all(dim=1).tolist() == [True, True, True, False]
    assert not legal[3].any()
    with pytest.raises(ValueError, match="next_masks must have the shape"):
        ours.put(*step, np.zeros(2), None, np.zeros((2, width + 1), bool))


@pytest.mark.parametrize(("lean", "width"), [(False, None), (False, 100), (True, 4)])
def test_bytes_are_known_beforehand(lean: bool, width: int | None):
    ours = ReplayStorage(
        30, DICT, spaces.Discrete(4), "cpu", 3, lean, handle_timeout_termination=not lean, mask_width=width
    )
    views = ours.flat_views()
    parts = [part for part in views if part is not None]
    arrays = itertools.chain.from_iterable(part.values() if isinstance(part, dict) else [part] for part in parts)
    assert ours.memory_bytes == sum(array.nbytes for array in arrays)
    assert ours.observations["image"].dtype == np.uint8


def test_too_large_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    memory = types.SimpleNamespace(available=10_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    pixels = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    made = []
    monkeypatch.setattr(replay.np, "zeros", lambda *arguments, **_: made.append(arguments))
    with pytest.raises(ConfigError) as refusal:
        ReplayStorage(10**6, pixels, spaces.Discrete(4), "cpu", 4)
    assert made == []
    text = str(refusal.value)
    each = 2 * 84 * 84 * 4 + 8 + 3 * 4
    assert f"{each:,} bytes needs" in text
    assert f"{each * 10**6:,} bytes" in text
    assert "10,000 bytes) are free" in text
    assert "optimize_memory_usage" in text
    monkeypatch.undo()
    memory.available = 100 * each
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(ConfigError, match="buffer_size=88 would fit"):
        ReplayStorage(104, pixels, spaces.Discrete(4), "cpu", 4)
    assert ReplayStorage(88, pixels, spaces.Discrete(4), "cpu", 4).memory_bytes == 88 * each


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_steps": 0}, "n_steps=0"),
        ({"n_steps": 129}, "from 1 to 128"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"mask_width": 0}, "mask_width=0"),
        ({"optimize_memory_usage": True}, "handle_timeout_termination=True exclude each other"),
        ({"buffer_size": 1, **LEAN}, "buffer_size of at least 2"),
        ({"observation_space": spaces.Dict({"a": spaces.Dict({"b": BOX})})}, "flatten it"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict, match: str):
    given_options = {"buffer_size": 10, "observation_space": BOX, "action_space": spaces.Discrete(2), "device": "cpu"}
    with pytest.raises(ConfigError, match=match):
        ReplayStorage(**{**given_options, **options})


def test_misuse_is_refused():
    ours = ReplayStorage(10, BOX, spaces.Discrete(4), "cpu", 2)
    with pytest.raises(ValueError, match="empty"):
        ours.sample(4)
    fill([ours], 2, np.random.default_rng(0))
    for rows, envs in (([0, 5], [0, 0]), ([0, 0], [0, 2]), ([-1], [0])):
        with pytest.raises(IndexError, match="is outside of 5 × 2"):
            ours.gather(np.array(rows), np.array(envs))
    with pytest.raises(ValueError, match="broadcast"):
        ours.put(np.zeros((2, 4)), np.zeros((2, 4)), np.zeros(2), np.zeros(2), np.zeros(2))


def test_reset_and_pickle():
    ours = ReplayStorage(10, BOX, spaces.Discrete(4), "cpu", n_steps=2, mask_width=4)
    fill([ours], 13, np.random.default_rng(0))
    other = pickle.loads(pickle.dumps(ours))
    rows, envs = ours.draw(9)
    batch = other.gather(rows, envs)
    assert_same(batch, ours.gather(rows, envs))
    before = batch.observations.clone()
    fill([other], 1, np.random.default_rng(0))
    assert torch.equal(batch.observations, before), "batches own their memory"
    assert other.pos == 4
    assert (other.observations[3] != ours.observations[3]).any(), "what was unpickled must write to what it shows"
    assert np.shares_memory(other.flat_views().observations, other.observations)
    other.reset()
    assert other.size() == 0


def one_row(storage: ReplayStorage, value: float, **ends: Any) -> None:
    """A vector step whose every number says which env and step it is of: value + env."""
    envs = np.arange(storage.n_envs, dtype=np.float32)
    observations = np.repeat((value + envs)[:, None], 3, axis=1) / 1000
    dones = np.zeros(storage.n_envs, np.bool_)
    timeouts = np.zeros(storage.n_envs, np.bool_)
    dones[ends.get("dones", [])] = True
    timeouts[ends.get("timeouts", [])] = True
    masks = np.repeat((envs % 2 == 0)[:, None], storage.mask_width, axis=1) if storage.mask_width else None
    storage.put(observations, observations + 0.5, np.zeros(storage.n_envs), value + envs, dones, timeouts, masks)


def drawn(storage: ReplayStorage) -> set[tuple[int, int]]:
    return {*zip(*(part.tolist() for part in storage.draw(400)), strict=True)}


@pytest.mark.parametrize(("kind", "saves_memory"), [(ReplayStorage, True), (PrioritizedReplayBuffer, False)])
def test_what_is_discarded_is_never_drawn(kind: type[ReplayStorage], saves_memory: bool):
    options: Any = {"optimize_memory_usage": saves_memory, "handle_timeout_termination": not saves_memory}
    storage = kind(12, BOX, spaces.Discrete(4), "cpu", 3, n_steps=3, **options)
    one_row(storage, 10)
    one_row(storage, 20, dones=[0, 1])
    storage.discard([1])
    one_row(storage, 30)
    assert drawn(storage) == {*itertools.product(range(3), range(3))} - {(1, 1)}
    assert storage.gather(np.array([0]), np.array([1])).rewards.item() == 11, "no window goes on into it"
    assert 21 not in storage._get_samples(np.full(100, 1)).rewards
    assert (storage.dones[0, 1], storage.timeouts[0, 1]) == (1, 1)
    for value in (40, 50, 60):
        one_row(storage, value)
    assert (1, 1) in drawn(storage), "written anew"


def test_while_nothing_else_is_stored_what_is_discarded_stays():
    storage = ReplayStorage(3, BOX, spaces.Discrete(4), "cpu", 1)
    for value in (10, 20):
        one_row(storage, value)
        storage.discard([0])
        assert drawn(storage) == {(0, 0)}
    one_row(storage, 30)
    one_row(storage, 40)
    storage.discard([0])
    assert drawn(storage) == {(2, 0)}


@pytest.mark.parametrize(
    ("mask_width", "ends"),
    [(None, {}), (4, {"dones": [1]}), (PACK_ABOVE + 8, {"dones": [1], "timeouts": [1]}), (4, {})],
)
def test_a_rest_belongs_to_the_transition_before_it(mask_width: int | None, ends: dict[str, list[int]]):
    storage = ReplayStorage(30, BOX, spaces.Discrete(mask_width or 4), "cpu", 3, n_steps=3, mask_width=mask_width)
    one_row(storage, 10)
    storage.discard((), (), [1])
    one_row(storage, 20)
    storage.discard((), [1], [1])
    assert drawn(storage) == {(row, env) for row in range(2) for env in (0, 2)}, "nobody knows yet what it led to"
    one_row(storage, 30, **ends)
    assert storage.discard((), [1], [1] if ends else []) == [(0, 1)]
    one_row(storage, 40)
    if ends:
        storage.discard((), [1])  # begins the next episode: nobody's reward
        one_row(storage, 50)
    batch = storage.gather(np.array([0, 0]), np.array([1, 0]))
    assert batch.rewards[:, 0].tolist() == pytest.approx([11 + 21 + 31, 10 + 0.99 * 20 + 0.99**2 * 30])
    assert batch.dones[0].item() == float(ends == {"dones": [1]})
    assert batch.discounts[0].item() == pytest.approx(0.99)
    assert batch.next_observations[0, 0].item() == pytest.approx(0.531), "what was seen when the rest was over"
    if mask_width is not None:
        assert batch.next_action_masks[0].any() == bool(ends), "a mask of that moment"
    assert drawn(storage) >= {(0, 1), (0, 0)}
    assert not {(1, 1), (2, 1)} & drawn(storage)


def test_a_rest_as_long_as_the_ring_and_one_that_a_fault_ends():
    storage = ReplayStorage(8, BOX, spaces.Discrete(4), "cpu", 2)
    for value in (10, 20, 30, 40, 50, 60):
        one_row(storage, value)
        storage.discard((), [1] if value > 10 else [], [1])
    assert drawn(storage) == {(row, 0) for row in range(4)}
    one_row(storage, 70)
    storage.discard((), (), [1])
    one_row(storage, 80, dones=[1], timeouts=[1])
    storage.discard([1])
    one_row(storage, 90)
    storage.discard((), [1])
    assert storage.rewards[2, 1] == 71, "neither what a fault brought nor what came after it"
    assert (2, 1) not in drawn(storage)
