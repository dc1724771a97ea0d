from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from scipy import stats

import fasttrain
from fasttrain.algos import q_networks
from fasttrain.algos.q_networks import BranchingDQNPolicy, DuelingDQNPolicy
from toys import RandomEnv, seeded_vec

BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
DICT = spaces.Dict({"a": BOX, "b": spaces.Discrete(3)})
FIVE, BRANCHES = spaces.Discrete(5), spaces.MultiDiscrete([2, 3])


def make(kind: Any, space: spaces.Space[Any] = BOX, action: spaces.Space[Any] = FIVE, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return kind(space, action, lambda _: 1e-3, **kwargs)


def test_greedy_by_hand():
    q = torch.tensor([[1.0, 5.0, 2.0, 4.0, 3.0], [9.0, 0.0, 1.0, 1.0, 0.0]])
    masks = torch.tensor([[True, False, True, False, True], [True, True, False, False, False]])
    assert q_networks.greedy(q, None, [5]).tolist() == [1, 0]
    assert q_networks.greedy(q, masks, [5]).tolist() == [4, 0]
    assert q_networks.greedy(q, None, [2, 3]).tolist() == [[1, 1], [0, 0]], "the first of equals"
    assert q_networks.greedy(q, masks, [2, 3]).tolist() == [[0, 2], [0, 0]]
    assert q_networks.best_values(q, None, [5]).tolist() == [[5.0], [9.0]]
    assert q_networks.best_values(q, masks, [5]).tolist() == [[3.0], [9.0]]
    assert q_networks.best_values(q, masks, [2, 3]).tolist() == [[1.0, 3.0], [9.0, 0.0]], "nothing legal: nothing comes"


def test_values_of_given_choices():
    q = torch.arange(10.0).reshape(2, 5)
    assert q_networks.chosen_values(q, torch.tensor([3, 0]), [5]).tolist() == [[3.0], [5.0]]
    assert q_networks.chosen_values(q, torch.tensor([[1, 0], [0, 2]]), [2, 3]).tolist() == [[1.0, 2.0], [5.0, 9.0]]
    best = q_networks.chosen_values(q, q_networks.greedy(q, None, [2, 3]), [2, 3])
    assert best.tolist() == q_networks.best_values(q, None, [2, 3]).tolist()


def test_dueling_heads_by_hand():
    advantages, values = torch.tensor([[1.0, 3.0, 0.0, 3.0, 6.0]]), torch.tensor([[10.0]])
    assert q_networks.join(advantages, values, [2, 3]).tolist() == [[9.0, 11.0, 7.0, 10.0, 13.0]]
    assert q_networks.join(advantages[:, 2:], values, [3]).tolist() == [[7.0, 10.0, 13.0]]


def test_a_dueling_net_tells_value_from_advantages():
    policy = make(DuelingDQNPolicy, net_arch=[8])
    seen = torch.randn(6, 4)
    hidden = policy.q_net.q_net(seen)
    torch.testing.assert_close(policy.q_net(seen).mean(1, keepdim=True), policy.q_net.value_net(hidden))
    names = {name for name, _ in policy.q_net.named_parameters()}
    layers = ("q_net.0", "advantage_net", "value_net")
    assert names == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert len(policy.optimizer.param_groups[0]["params"]) == 6
    assert make(DuelingDQNPolicy, net_arch=[]).q_net(torch.zeros(2, 4)).shape == (2, 5)


def test_every_policy_of_stock_has_two_of_ours():
    for name, kind in stable_baselines3.DQN.policy_aliases.items():
        assert issubclass(q_networks.DUELING_POLICIES[name], kind)
        assert issubclass(q_networks.BRANCHING[kind], kind)


@pytest.mark.parametrize(
    ("name", "space", "action"),
    [("DQNPolicy", BOX, FIVE), ("CnnPolicy", IMAGE, BRANCHES), ("BranchingMultiInputPolicy", DICT, BRANCHES),
     ("DuelingDQNPolicy", BOX, BRANCHES), ("DuelingCnnPolicy", IMAGE, FIVE), ("DuelingMultiInputPolicy", DICT, FIVE)],
    ids=str,
)  # fmt: skip
def test_illegal_actions_are_never_predicted(name: str, space: Any, action: Any):
    kind = getattr(q_networks, name)  # SB3's own has a branching one put in its place
    model = fasttrain.DQN(kind, seeded_vec(lambda: RandomEnv(space, action), 1), buffer_size=8, seed=0, device="cpu")
    space.seed(0)
    singles = [space.sample() for _ in range(8)]
    batch = {key: np.stack([s[key] for s in singles]) for key in singles[0]} if space is DICT else np.stack(singles)
    masks = np.zeros((8, 5), np.bool_)
    only = np.random.default_rng(0).integers(0, [2, 3], (8, 2)) if action is BRANCHES else np.arange(8)[:, None] % 5
    masks[np.arange(8)[:, None], only + ([0, 2] if action is BRANCHES else [0])] = True
    expected = only.reshape(8, *(action.shape or ()))
    np.testing.assert_array_equal(model.predict(batch, action_masks=masks)[0], expected)
    free, _ = model.predict(batch, deterministic=True)
    assert free.shape == expected.shape
    assert (free != expected).any()
    legal = np.ones_like(masks)
    np.testing.assert_array_equal(model.predict(batch, deterministic=True, action_masks=legal)[0], free)
    single, _ = model.predict(singles[3], action_masks=masks[3])
    assert single.shape == (action.shape or ())
    np.testing.assert_array_equal(single, expected[3])


def test_every_policy_is_saved_and_loaded(tmp_path: Path):
    for family in ("Branching", "Dueling"):
        kind = getattr(q_networks, f"{family}DQNPolicy")
        policy = make(kind, action=BRANCHES, net_arch=[6], activation_fn=torch.nn.Tanh)
        policy.save(tmp_path / family)
        loaded = kind.load(tmp_path / family, device="cpu")
        seen = torch.randn(3, 4)
        torch.testing.assert_close(loaded.q_net(seen), policy.q_net(seen))
        torch.testing.assert_close(copy.deepcopy(policy).q_net(seen), policy.q_net(seen))
        torch.testing.assert_close(policy.q_net_target(seen), policy.q_net(seen))
        assert policy(seen).tolist() == policy.q_net._predict(seen).tolist()


@pytest.mark.parametrize("kind", [DuelingDQNPolicy, BranchingDQNPolicy])
def test_stock_dqn_trains_them(kind: Any):
    model = stable_baselines3.DQN(kind, gymnasium.make("CartPole-v1"), learning_starts=8, seed=0, device="cpu")
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(20)
    assert any(not torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 4])], ids=["discrete", "multi"])
@pytest.mark.parametrize("masked", [False, True])
def test_random_actions_are_distributed_as_the_spaces_own(space: Any, masked: bool):
    space.seed(0)
    count, dims = 5_000, [5] if isinstance(space, spaces.Discrete) else [3, 4]
    mask = np.array(
        [True, False, True, True, False] if len(dims) == 1 else [True, True, False, True, False, True, True]
    )
    masks = np.tile(mask, (count, 1)) if masked else None
    drawn = q_networks.random_actions(space, dims, count, masks).reshape(count, -1)
    codes = drawn[:, 0] if len(dims) == 1 else drawn[:, 0] * dims[1] + drawn[:, 1]
    table = np.bincount(codes, minlength=int(np.prod(dims)))
    legal = np.outer(mask[:3], mask[3:]).ravel() if len(dims) == 2 else mask
    np.testing.assert_array_equal(table > 0, legal if masked else np.ones_like(legal))
    assert stats.chisquare(table[table > 0]).pvalue > 1e-3


def test_random_actions_of_a_discrete_space_are_those_of_its_sampler():
    space, other = spaces.Discrete(5, seed=3), spaces.Discrete(5, seed=3)
    drawn = [q_networks.random_actions(space, [5], count, None).tolist() for count in (7, 1, 4)]
    assert [action for part in drawn for action in part] == [other.sample() for _ in range(12)]
    assert space.sample() == other.sample()


def test_a_single_sub_action_takes_masks_too():
    space = spaces.MultiDiscrete([4], seed=0)
    masks = np.array([[False, True, False, False], [False, False, False, True]])
    drawn = q_networks.random_actions(space, [4], 2, masks)
    assert drawn.tolist() == [[1], [3]]
