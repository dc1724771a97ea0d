"""What is finite, and who is blamed for what is not: the first thing that was not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from accelerated import SETTINGS, filled
from fasttrain.algos import causes
from fasttrain.algos.dqn import DQN
from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.algos.q_networks import mark_not_finite
from fasttrain.batch import FinishedEpisode
from fasttrain.errors import EnvError
from toys import RandomEnv, seeded_vec, toy_gym_vec

GOOD = np.zeros(4, np.float32)


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, np.nan), (np.float64, np.inf), (np.float16, -np.inf)])
def test_one_number_is_enough(dtype: type, value: float):
    array = np.ones((5, 7), dtype)
    assert causes.all_finite(array)
    assert causes.first_bad(array) is None
    array[3, 2] = value
    assert not causes.all_finite(array)
    assert not causes.all_finite(array[:, 1:4]), "not contiguous"
    assert causes.first_bad(array) == (3, 2)


def test_infinities_do_not_cancel_and_huge_or_whole_numbers_are_finite():
    assert not causes.all_finite(np.array([np.inf, -np.inf, 1], np.float32))
    assert causes.all_finite(np.full(100, 3e38, np.float32)), "though their sum is not"
    assert causes.all_finite(np.full(3, 255, np.uint8))
    assert causes.first_bad(np.zeros(3, np.int64)) is None


def test_data_come_before_weights_before_what_was_made_of_them():
    model = filled(MaskablePPO("MlpPolicy", toy_gym_vec(), **SETTINGS))
    storage = model.rollout_buffer.storage

    def why() -> str:
        return causes.why_rollout(model.policy, storage, "the loss")

    assert why() == "the loss"
    with torch.no_grad():
        model.policy.mlp_extractor.policy_net[-2].bias[:] = 100.0  # all features are 1
        model.policy.action_net.weight[:] = 3e38  # finite, but not what comes of it
    assert why().startswith("the logits of env 0 in row 0 of the rollout, with finite weights")
    storage.returns[2, 1] = np.inf
    assert why() == "the return of env 1 in row 2 of the rollout is inf"
    storage.log_probs[4, 3] = np.nan
    assert why() == "the log prob of env 3 in row 4 of the rollout is nan"
    with torch.no_grad():
        model.policy.value_net.bias[0] = np.nan
    assert why() == "parameter value_net.bias is not finite"
    storage.rewards[1, 0] = np.nan
    assert why() == "the reward of env 0 in row 1 of the rollout is nan"
    storage.observations[0, 2, 1] = np.nan
    assert why() == "the observation of env 2 in row 0 of the rollout is nan"


def test_dict_observations_by_key():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)})
    env = seeded_vec(lambda: RandomEnv(space, spaces.Discrete(2)))
    model = filled(PPO("MultiInputPolicy", env, **(SETTINGS | {"batch_size": 16})))
    storage = model.rollout_buffer.storage
    assert causes.why_rollout(model.policy, storage, "the loss") == "the loss"
    storage.observations["a"][3, 2, 0] = -np.inf
    assert (
        causes.why_rollout(model.policy, storage, "") == "the observation 'a' of env 2 in row 3 of the rollout is -inf"
    )


def test_replay():
    env = seeded_vec(lambda: RandomEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)))
    model = DQN("MlpPolicy", env, learning_starts=1000, buffer_size=400, device="cpu", seed=0).learn(40)
    storage = model.replay_buffer
    assert causes.why_replay(model, "the loss") == "the loss"
    storage.rewards[50:] = np.nan  # not filled yet
    assert causes.why_replay(model, "the loss") == "the loss"
    with torch.no_grad():
        model.q_net_target.q_net[0].bias[0] = np.nan
    assert causes.why_replay(model, "") == "parameter q_net_target.q_net.0.bias is not finite"
    storage.rewards[5, 3] = np.inf
    assert causes.why_replay(model, "") == "the reward of env 3 in row 5 of the replay buffer is inf"
    storage.next_observations[2, 1, 0] = np.nan
    assert causes.why_replay(model, "") == "the next observation of env 1 in row 2 of the replay buffer is nan"


def episode(last: np.ndarray) -> FinishedEpisode:
    return FinishedEpisode(env_index=3, episode_return=0.0, length=1, final_observation=last, truncated=True, info={})


def test_env_field_place_and_step_are_named():
    causes.check_step(np.zeros((4, 2), np.float32), GOOD, [episode(np.zeros(2, np.float32))], 8)
    seen = {"board": np.zeros((8, 2, 2), np.float32), "hand": np.zeros((8, 3), np.uint8)}
    seen["board"][1:, 1, 0] = np.inf
    with pytest.raises(EnvError, match=r"the observation 'board' of env 1, 2, 3, 4, 5 and 2 more is not finite \(inf "
                       r"at index 1, 0\) at step 12: "):  # fmt: skip
        causes.check_step(seen, GOOD, (), 12)
    with pytest.raises(EnvError, match=r"the reward of env 2 is not finite \(nan\) at step 12"):
        causes.check_step(np.zeros((4, 1)), np.array([0, 0, np.nan, 0], np.float32), (), 12)
    with pytest.raises(EnvError, match=r"the last observation of the episode of env 3 is not finite \(nan at index 1"):
        causes.check_step(np.zeros((4, 2)), GOOD, [episode(np.array([0, np.nan]))], 12)


def test_behind_a_normalizer_the_env_is_named_that_began_it():
    class Normalizer:
        def get_original_obs(self) -> np.ndarray:
            return np.array([[0.0], [np.nan], [0.0], [0.0]], np.float32)

        def get_original_reward(self) -> np.ndarray:
            return GOOD

    with pytest.raises(EnvError, match="the observation of env 1 is not finite"):
        causes.check_step(np.full((4, 1), np.nan, np.float32), GOOD, (), 4, Normalizer())


def test_parameters_and_gradients_by_name():
    net = nn.Linear(2, 2)
    assert causes.bad_parameters(net) == []
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    net.bias.grad[1] = -3.0
    assert causes.bad_gradients(net) == ["bias"], "the largest, where all are finite"
    net.weight.grad[0, 0] = torch.inf
    assert causes.bad_gradients(net) == ["weight"]
    with torch.no_grad():
        net.weight[0, 0] = torch.nan
    assert causes.bad_parameters(net) == ["weight"]
    assert causes.list_first(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert causes.blame(False, "a") == "the loss"
    assert causes.blame(True, "a, b") == "the gradient of parameter a, b"


def test_why_no_action():
    net = nn.Linear(2, 2)
    assert causes.why_no_action(net, torch.zeros(3, 2), "it") == ""
    seen = {"x": torch.tensor([[0.0], [torch.inf]])}
    assert causes.why_no_action(net, seen, "it").startswith("the observation 'x' of env 1 is not finite")
    with torch.no_grad():
        net.bias[0] = torch.nan
    told = "it is not finite although its inputs are: parameter bias"
    assert causes.why_no_action(net, np.zeros((3, 2)), "it").startswith(told)


def test_choices_are_marked_where_values_are_not_finite():
    chosen = torch.tensor([2, 0])
    assert mark_not_finite(chosen, torch.zeros(2, 3)) is chosen
    assert mark_not_finite(chosen, torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])).tolist() == [-1, -1]
    assert mark_not_finite(chosen.to("meta"), torch.zeros(2, 3, device="meta")).shape == (2,), "no host reads there"


def test_an_action_that_is_not_finite_is_refused_with_env_and_step():
    net, seen = torch.nn.Linear(1, 1), np.zeros((3, 1), np.float32)
    causes.check_actions(np.array([1, 2]), net, seen[:2], 7)
    huge = np.full((3, 2), 1e30, np.float32)  # whose square is not a float32
    causes.check_actions(huge, net, seen, 7)
    huge[1:, 0] = np.nan
    with pytest.raises(EnvError, match="the action of env 5, 6 is not finite at step 7: lower the learning rate"):
        causes.check_actions(huge, net, seen, 7, np.array([4, 5, 6]))
    with pytest.raises(EnvError, match="at step 7: the observation of env 0, 1, 2 is not finite"):
        causes.check_actions(huge, net, np.full((3, 1), np.inf, np.float32), 7)
