"""What is finite, and the words for what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fasttrain.algos.causes import (
    all_finite,
    bad_gradients,
    bad_parameters,
    check_actions,
    check_step,
    first_bad,
    listed,
    why_no_action,
)
from fasttrain.algos.engine import marked
from fasttrain.batch import FinishedEpisode
from fasttrain.errors import EnvError

GOOD = np.zeros(4, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_is_enough(dtype: type, value: float):
    array = np.ones((5, 7), dtype)
    assert all_finite(array)
    assert first_bad(array) is None
    array[3, 2] = value
    assert not all_finite(array)
    assert not all_finite(array[:, 1:4]), "not contiguous"
    assert first_bad(array) == (3, 2)


def test_opposite_infinities_do_not_cancel():
    assert not all_finite(np.array([np.inf, -np.inf, 1], np.float32))


def test_huge_numbers_are_finite_though_their_sum_is_not():
    assert all_finite(np.full(100, 3e38, np.float32))


def test_whole_numbers_are_finite():
    assert all_finite(np.full(3, 255, np.uint8))
    assert first_bad(np.zeros(3, np.int64)) is None


def episode(last: np.ndarray) -> FinishedEpisode:
    return FinishedEpisode(env_index=3, episode_return=0.0, length=1, final_observation=last, truncated=True, info={})


def test_a_good_step_passes():
    check_step(np.zeros((4, 2), np.float32), GOOD, [episode(np.zeros(2, np.float32))], 8)


def test_env_field_place_and_step_are_named():
    seen = {"board": np.zeros((8, 2, 2), np.float32), "hand": np.zeros((8, 3), np.uint8)}
    seen["board"][1:, 1, 0] = np.inf
    with pytest.raises(EnvError, match=r"the observation 'board' of env 1, 2, 3, 4, 5 and 2 more is not finite \(inf "
                       r"at index 1, 0\) at step 12: "):  # fmt: skip
        check_step(seen, GOOD, (), 12)
    with pytest.raises(EnvError, match=r"the reward of env 2 is not finite \(nan\) at step 12"):
        check_step(np.zeros((4, 1)), np.array([0, 0, np.nan, 0], np.float32), (), 12)
    with pytest.raises(EnvError, match=r"the last observation of the episode of env 3 is not finite \(nan at index 1"):
        check_step(np.zeros((4, 2)), GOOD, [episode(np.array([0, np.nan]))], 12)


def test_behind_a_normalizer_the_env_is_named_that_began_it():
    class Normalizer:
        def get_original_obs(self) -> np.ndarray:
            return np.array([[0.0], [np.nan], [0.0], [0.0]], np.float32)

        def get_original_reward(self) -> np.ndarray:
            return GOOD

    with pytest.raises(EnvError, match="the observation of env 1 is not finite"):
        check_step(np.full((4, 1), np.nan, np.float32), GOOD, (), 4, Normalizer())


def test_parameters_and_gradients_by_name():
    net = nn.Linear(2, 2)
    assert bad_parameters(net) == []
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    net.bias.grad[1] = -3.0
    assert bad_gradients(net) == ["bias"], "the largest, where all are finite"
    net.weight.grad[0, 0] = torch.inf
    assert bad_gradients(net) == ["weight"]
    with torch.no_grad():
        net.weight[0, 0] = torch.nan
    assert bad_parameters(net) == ["weight"]


def test_why_no_action():
    net = nn.Linear(2, 2)
    assert why_no_action(net, torch.zeros(3, 2), "it") == ""
    seen = {"x": torch.tensor([[0.0], [torch.inf]])}
    assert why_no_action(net, seen, "it").startswith("the observation 'x' of env 1 is not finite")
    with torch.no_grad():
        net.bias[0] = torch.nan
    assert why_no_action(net, np.zeros((3, 2)), "it").startswith(
        "it is not finite although its inputs are: parameter bias"
    )


def test_names_are_cut():
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_choices_are_marked_where_values_are_not_finite():
    chosen = torch.tensor([2, 0])
    assert marked(chosen, torch.zeros(2, 3)) is chosen
    assert marked(chosen, torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])).tolist() == [-1, -1]
    assert marked(chosen.to("meta"), torch.zeros(2, 3, device="meta")).shape == (2,), "no host reads there"


def test_an_action_that_is_not_finite_is_refused_with_env_and_step():
    check_actions(np.array([1, 2]), torch.nn.Linear(1, 1), np.zeros((2, 1), np.float32), 7)
    huge = np.full((3, 2), 1e30, np.float32)  # whose square is not a float32
    check_actions(huge, torch.nn.Linear(1, 1), np.zeros((3, 1), np.float32), 7)
    huge[1:, 0] = np.nan
    with pytest.raises(EnvError, match="the action of env 5, 6 is not finite at step 7: lower the learning rate"):
        check_actions(huge, torch.nn.Linear(1, 1), np.zeros((3, 1), np.float32), 7, np.array([4, 5, 6]))
    with pytest.raises(EnvError, match="at step 7: the observation of env 0, 1, 2 is not finite"):
        check_actions(huge, torch.nn.Linear(1, 1), np.full((3, 1), np.inf, np.float32), 7)
