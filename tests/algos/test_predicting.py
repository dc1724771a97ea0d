"""`predict_of` against `model.predict`: the same actions, from the same random stream."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.policies import ActorCriticPolicy

from fasttrain.algos.predicting import DirectPredict, predict_of
from toys import MaskedEnv, RandomEnv

BOX = spaces.Box(-1, 1, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
PARTS = spaces.Dict({"a": BOX, "b": spaces.Discrete(3)})


def observations_of(space, rng):
    space.seed(int(rng.integers(1000)))
    rows = [space.sample() for _ in range(6)]
    return {key: np.stack([row[key] for row in rows]) for key in space.spaces} if space is PARTS else np.stack(rows)


CASES = [
    (MaskablePPO, BOX, spaces.Discrete(7), 7), (MaskablePPO, BOX, spaces.Discrete(7), 0),
    (MaskablePPO, PARTS, spaces.MultiDiscrete([3, 4]), 7), (MaskablePPO, BOX, spaces.MultiBinary(3), 6),
    (PPO, IMAGE, spaces.Discrete(4), 0), (PPO, PARTS, spaces.MultiDiscrete([2, 2]), 0),
    (PPO, BOX, spaces.Box(-1, 1, (2,), np.float32), 0), (PPO, spaces.Discrete(4), spaces.Discrete(2), 0),
]  # fmt: skip


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("algorithm", "observations", "actions", "width"), CASES)
def test_actions_and_random_stream_are_those_of_predict(algorithm, observations, actions, width, deterministic):
    policy = "MultiInputPolicy" if observations is PARTS else "CnnPolicy" if observations is IMAGE else "MlpPolicy"
    env = (MaskedEnv if algorithm is MaskablePPO else RandomEnv)(observations, actions)
    model, rng = algorithm(policy, env, seed=1, device="cpu"), np.random.default_rng(0)
    model.policy.set_training_mode(True)
    direct = predict_of(model)
    assert (type(direct), model.policy.training) == (DirectPredict, False)
    for _ in range(20):
        seen = observations_of(observations, rng)
        masks = {"action_masks": rng.random((6, width)) < 0.4} if width else {}  # some rows allow nothing
        state = torch.get_rng_state()
        expected = model.predict(seen, deterministic=deterministic, **masks)[0]
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        got, states = direct(seen, state=None, episode_start=None, deterministic=deterministic, **masks)
        np.testing.assert_array_equal(got, expected)
        assert (got.dtype, states) == (expected.dtype, None)
        assert torch.equal(torch.get_rng_state(), after)


def test_weights_that_are_not_finite_raise_the_error_of_the_distribution(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # a process-wide setting
    model = PPO("MlpPolicy", RandomEnv(BOX, spaces.Discrete(3)), device="cpu")
    direct = predict_of(model)
    model.policy.action_net.bias.data.fill_(np.nan)
    with pytest.raises(ValueError, match="nan"):
        direct(np.zeros((2, 5), np.float32), deterministic=True)


def test_a_model_or_policy_with_a_predict_of_its_own_is_asked_itself():
    class Own(PPO):
        def predict(self, *args, **kwargs):
            return super().predict(*args, **kwargs)

    class OwnPolicy(ActorCriticPolicy):
        def extract_features(self, obs, features_extractor=None):
            return super().extract_features(obs, features_extractor)

    env = RandomEnv(BOX, spaces.Discrete(3))
    changed = PPO("MlpPolicy", env)
    changed.policy.predict = changed.policy.predict  # set on the instance
    for model in (Own("MlpPolicy", env), PPO(OwnPolicy, env), DQN("MlpPolicy", env), changed):
        assert predict_of(model) == model.predict
