"""Kernels for recurrent policies: who is served, and that they act and learn as the torch engine does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import (
    RecurrentActorCriticPolicy,
    RecurrentMultiInputActorCriticPolicy,
)
from sb3_contrib.common.recurrent.type_aliases import RNNStates

import fasttrain
from fasttrain.buffers.recurrent import RecurrentStorage
from fasttrain.buffers.sequences import Memory
from fasttrain.engines.engine import EngineSettings, PPOWork
from fasttrain.engines.heads import action_dims
from fasttrain.engines.packed_lstm import RecurrentKernelEngine
from fasttrain.engines.recurrent import RecurrentEngine
from fasttrain.engines.recurrent_policies import (
    MaskableRecurrentActorCriticPolicy,
    MaskableRecurrentMultiInputActorCriticPolicy,
)
from fasttrain.engines.sequence_kernels import SequenceKernelEngine, kernel_calls, why_not
from fasttrain.jit import njit_bare
from fasttrain.kernels import recurrent
from fasttrain.threads import ThreadChoice
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1, 1, (5,), np.float32)
DICT = spaces.Dict({"b": spaces.Box(-1, 1, (3,), np.float32), "a": spaces.MultiBinary(4)})
SHARED = {"shared_lstm": True, "enable_critic_lstm": False}
CPU = torch.device("cpu")


def policy_of(kind: Any = RecurrentActorCriticPolicy, box: Any = BOX, actions: Any = None, **settings: Any) -> Any:
    torch.manual_seed(2)
    eps = {"eps": 1.0}  # Adam's first steps are then as the gradient is, not its sign
    policy = kind(box, actions or spaces.Discrete(4), lambda _: 1e-2, lstm_hidden_size=settings.pop("units", 16),
                  optimizer_kwargs=eps, **settings)  # fmt: skip
    for parameter in policy.parameters():  # biases and heads of SB3's initialisation are too small to test anything
        torch.nn.init.normal_(parameter, std=0.3)
    return policy


class Own(torch.nn.Module):
    """A features extractor of the user's."""

    features_dim = 4

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(space.shape[0], 4)

    def forward(self, seen: Any) -> Any:
        return self.layer(seen)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        (SHARED, ""),
        ({"net_arch": []}, ""),
        ({"units": 24}, "an LSTM of 24 units: kernels take multiples of 16"),
        ({"units": 272}, "an LSTM of 272 units: torch's own products are faster above 256"),
        ({"n_lstm_layers": 2}, "2 layers of LSTMs"),
        ({"enable_critic_lstm": False}, "a value net without an LSTM"),
        ({"actions": spaces.Box(-1, 1, (2,))}, "not a plain policy with discrete actions"),
        ({"features_extractor_class": Own}, "not a flat Box observation"),
        ({"activation_fn": torch.nn.ELU}, "not an MLP of tanh or relu layers"),
        ({"optimizer_class": torch.optim.AdamW}, "not a plain Adam"),
    ],
)
def test_who_is_served(settings: dict[str, Any], why: str):
    assert why_not(policy_of(**settings)) == why


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "two LSTMs": (RecurrentActorCriticPolicy, {}),
    "one for both nets": (MaskableRecurrentActorCriticPolicy, {**SHARED, "units": 32}),
    "no layers behind": (RecurrentActorCriticPolicy, {"net_arch": []}),
    "nets of two depths, relu": (MaskableRecurrentActorCriticPolicy,
                                 {"net_arch": {"pi": [8], "vf": [16, 9]}, "activation_fn": torch.nn.ReLU}),
    "several choices": (MaskableRecurrentActorCriticPolicy, {"actions": spaces.MultiDiscrete([2, 3]), "net_arch": [8]}),
    "bits": (MaskableRecurrentActorCriticPolicy, {"actions": spaces.MultiBinary(3)}),
    "keys": (MaskableRecurrentMultiInputActorCriticPolicy, {"box": DICT}),
    "keys without masks": (RecurrentMultiInputActorCriticPolicy, {"box": DICT, **SHARED}),
}  # fmt: skip


def seen_of(space: Any, rng: Any, count: int) -> Any:
    """Observations (count, …), half of the numbers zero."""
    if isinstance(space, spaces.Dict):
        return {key: seen_of(part, rng, count) for key, part in space.spaces.items()}
    seen = rng.standard_normal((count, *space.shape)).astype(np.float32) * (rng.random((count, *space.shape)) < 0.5)
    return (seen > 0).astype(np.int8) if isinstance(space, spaces.MultiBinary) else seen.astype(np.float32)


def masks_of(policy: Any, rng: Any, count: int) -> Any:
    """Masks (count, A) with a legal choice of each sub-action; None where the policy takes none."""
    if not isinstance(policy, MaskableRecurrentActorCriticPolicy):
        return None
    dims = action_dims(policy.action_space)
    masks = rng.random((count, sum(dims))) < 0.5
    for first, size in zip(np.cumsum([0, *dims]), dims, strict=False):
        masks[np.arange(count), first + rng.integers(size, size=count)] = True
    return masks


def memory_of(policy: Any, rng: Any, count: int, starts: float) -> Memory:
    units, shared = policy.lstm_actor.hidden_size, policy.lstm_critic is None
    parts = [torch.from_numpy(rng.standard_normal((1, count, units)).astype(np.float32)) for _ in range(4)]
    pi, vf = (parts[0], parts[1]), (parts[2], parts[3])
    return Memory(RNNStates(pi, pi if shared else vf), rng.random(count) < starts)


def rollout_of(policy: Any, steps: int, envs: int, seed: int = 0, left_out: bool = False) -> RecurrentStorage:
    """Acted on by the torch engine, with numbers of chance for states, rewards and ends of episodes."""
    rng, engine = np.random.default_rng(seed), RecurrentEngine(policy, EngineSettings())
    masked = isinstance(policy, MaskableRecurrentActorCriticPolicy)
    lstm = policy.lstm_actor
    storage = RecurrentStorage(
        steps, envs, policy.observation_space, policy.action_space, state_shape=(1, lstm.hidden_size),
        own_critic=policy.lstm_critic is not None, device=CPU, gamma=0.9, gae_lambda=0.8,
        mask_width=sum(action_dims(policy.action_space)) if masked else None,
    )  # fmt: skip
    for step in range(steps):
        memory = memory_of(policy, rng, envs, 0.1)
        stored = engine.act(seen_of(policy.observation_space, rng, envs), masks_of(policy, rng, envs), memory).stored
        noise = torch.from_numpy(rng.normal(0, 0.3, envs).astype(np.float32))  # so that some ratios are clipped
        rewards = rng.standard_normal(envs).astype(np.float32)
        storage.add(
            stored.observations, stored.actions, rewards, memory.episode_starts, stored.values + noise[:, None],
            stored.log_probs + noise, stored.action_masks, memory.states,
        )  # fmt: skip
        if left_out:
            storage.leave_out(step, rng.random(envs) < 0.1)
    storage.compute_returns_and_advantages(np.zeros(envs, np.float32), np.zeros(envs, np.bool_))
    return storage


WORK = PPOWork(2, 50, 0.2, None, 0.01, 0.5, True, 0.5, None)


def updated(engine_class: Any, policy: Any, storage: Any, work: PPOWork, threads: int = 1) -> Any:
    """A copy of the policy after the update, and what the update came to."""
    learner = copy.deepcopy(policy)
    kind = "kernels" if engine_class is SequenceKernelEngine else "torch"
    engine = engine_class(learner, EngineSettings(kind=kind, threads=threads))
    np.random.seed(0)
    return learner, engine.update(storage, work)


def check_same(one: Any, other: Any, before: Any, bound: float = 1e-4) -> None:
    """The two moved as far, up to `bound` of the way that each parameter went."""
    trio = zip(one.named_parameters(), other.parameters(), before.parameters(), strict=True)
    for (name, mine), theirs, begun in trio:
        way = float((theirs - begun).detach().abs().max())
        assert way > 0, name
        assert float((mine - theirs).detach().abs().max()) < bound * way + 1e-7, name


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_torch_engines(name: str):
    kind, settings = CASES[name]
    policy = policy_of(kind, **settings)
    assert why_not(policy) == ""
    storage = rollout_of(policy, 16, 11, left_out=name == "bits")
    learned, done = updated(SequenceKernelEngine, policy, storage, WORK)
    expected, there = updated(RecurrentEngine, policy, storage, WORK)
    check_same(learned, expected, policy)
    assert {*done.terms} == {*there.terms}
    for term, found in done.terms.items():
        np.testing.assert_allclose(found, there.terms[term], rtol=2e-4, atol=2e-5, err_msg=term)
    np.testing.assert_allclose(done.norms, there.norms, rtol=1e-4)
    assert (done.steps, done.epochs) == (there.steps, there.epochs)


@pytest.mark.parametrize(
    "change",
    [
        {"clip_range_vf": 0.1},
        {"normalize_advantage": False},
        {"target_kl": 0.25, "batch_size": 13},
        {"batch_size": None},
        {"batch_size": 1, "normalize_advantage": False, "n_epochs": 1},
    ],
)
def test_every_setting_of_the_work_is_the_torch_engines(change: dict[str, Any]):
    policy = policy_of()
    storage, work = rollout_of(policy, 9, 6), WORK._replace(**change)
    learned, done = updated(SequenceKernelEngine, policy, storage, work)
    expected, there = updated(RecurrentEngine, policy, storage, work)
    check_same(learned, expected, policy)
    assert (done.steps, done.epochs, done.stopped) == (there.steps, there.epochs, there.stopped)
    assert done.stopped == ("target_kl" in change)


def test_threads_change_nothing_but_the_order_of_sums(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of()
    storage, work = rollout_of(policy, 20, 40), WORK._replace(batch_size=600)
    alone, _ = updated(SequenceKernelEngine, policy, storage, work)
    found = []
    for on_threads in (True, False):  # 4 parts of a minibatch in either case
        monkeypatch.setattr(ThreadChoice, "next", lambda _, mode=on_threads: mode)
        found.append(updated(SequenceKernelEngine, policy, storage, work, threads=4)[0])
    for one, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one, other)
    check_same(found[0], alone, policy)


@pytest.mark.parametrize("name", CASES)
def test_acting_gives_the_policys_values_and_states(name: str):
    kind, settings = CASES[name]
    policy, rng = policy_of(kind, **settings), np.random.default_rng(1)
    count = 150  # more than a block of rows
    seen, masks = seen_of(policy.observation_space, rng, count), masks_of(policy, rng, count)
    memory = memory_of(policy, rng, count, 0.3)
    engine = SequenceKernelEngine(policy, EngineSettings(kind="kernels"))
    engine.begin()
    acted = engine.act(seen, masks, memory)
    reference = RecurrentEngine(policy, EngineSettings())
    theirs = reference.act(seen, masks, memory)
    stored = acted.stored
    assert stored is not None
    assert stored.memory is memory.states  # as they were, before the reset
    torch.testing.assert_close(stored.values, theirs.stored.values, rtol=1e-5, atol=1e-5)
    for mine, other in zip((*acted.memory.pi, *acted.memory.vf), (*theirs.memory.pi, *theirs.memory.vf), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.values(seen, memory), reference.values(seen, memory), rtol=1e-5, atol=1e-5)
    starts = torch.from_numpy(memory.episode_starts.astype(np.float32))
    tensors = {key: torch.from_numpy(part) for key, part in seen.items()} if isinstance(seen, dict) else None
    given = {} if masks is None else {"action_masks": masks}
    distribution, _ = policy.get_distribution(
        torch.from_numpy(seen) if tensors is None else tensors, memory.states.pi, starts, **given
    )
    expected = distribution.log_prob(stored.actions)
    torch.testing.assert_close(stored.log_probs, expected.detach(), rtol=1e-4, atol=1e-4)


def test_draws_have_the_policys_probabilities():
    policy, rng, count = policy_of(MaskableRecurrentActorCriticPolicy), np.random.default_rng(3), 40_000
    one = memory_of(policy, rng, 1, 0.0)
    seen, mask = seen_of(BOX, rng, 1), np.array([[True, False, True, True]])
    many = Memory(RNNStates(*((h.expand(1, count, -1), c.expand(1, count, -1)) for h, c in one.states)),
                  np.zeros(count, np.bool_))  # fmt: skip
    engine = SequenceKernelEngine(policy, EngineSettings(kind="kernels"))
    engine.begin()
    torch.manual_seed(0)
    acted = engine.act(np.tile(seen, (count, 1)), np.tile(mask, (count, 1)), many)
    distribution, _ = policy.get_distribution(torch.from_numpy(seen), one.states.pi, torch.zeros(1), mask)
    probs = distribution.distribution.probs[0].detach().double().numpy()
    shares = np.bincount(acted.actions, minlength=4) / count
    np.testing.assert_allclose(shares, probs, atol=4 * np.sqrt(0.25 / count))
    assert shares[1] == 0


def test_a_gradient_that_is_not_finite_is_no_step_and_names_the_parameter():
    policy = policy_of()
    storage = rollout_of(policy, 8, 6)
    storage._observations[""][3, 2, 1] = torch.inf
    learned, done = updated(SequenceKernelEngine, policy, storage, WORK._replace(n_epochs=1))
    assert done.skipped == 1
    assert done.blamed
    assert all(bool(torch.isfinite(parameter).all()) for parameter in learned.parameters())


@njit_bare
def laid_out(begins: Any, begin: int, end: int, batch: Any, index: Any, laid: Any) -> Any:
    return recurrent.lay_out(begins, begin, end, batch, index, laid)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_are_whole_sequences_step_by_step_and_the_longest_first(parts: int):
    rng = np.random.default_rng(parts)
    for _ in range(50):
        size = int(rng.integers(1, 40))
        begins, batch = rng.random(size) < rng.choice([0.0, 0.2, 1.0]), rng.permutation(1000)[:size]
        whole = np.split(batch, np.flatnonzero(begins[1:]) + 1)
        met = []
        for part in range(parts):
            index, laid = np.zeros((5, size + 2), np.int64), np.zeros(size, np.int64)
            count, longest, total = laid_out(
                begins, size * part // parts, size * (part + 1) // parts, batch, index, laid
            )
            sizes, at = index[2, :longest], 0
            assert sizes.sum() == total
            assert longest == 0 or sizes[0] == count
            rows = []
            for steps in sizes:
                rows.append(laid[at : at + steps])
                at += steps
            met += [np.array([row[s] for row in rows if s < len(row)]) for s in range(count)]
            lengths = [len(each) for each in met[-count:]] if count else []
            assert lengths == sorted(lengths, reverse=True)
        assert sorted(map(tuple, met)) == sorted(map(tuple, whole))


def test_the_model_takes_them_where_they_know_every_layer():
    def engine_of(**kwargs: Any) -> Any:
        return fasttrain.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", engine="kernels", device="cpu",
                                      policy_kwargs={"lstm_hidden_size": 16, **kwargs}).engine  # fmt: skip

    assert type(engine_of()) is SequenceKernelEngine
    assert type(engine_of(n_lstm_layers=2)) is RecurrentKernelEngine


def test_the_calls_are_the_engines():
    names = [call.name for call in kernel_calls(in_groups=True)]
    assert names == ["act_remembering", "train_sequences", "follow", "compress"]
