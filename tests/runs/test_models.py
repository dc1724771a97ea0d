"""Models opened without executing what is in them: the same policy as SB3 loads, or one line that says what is missing.

Hostile files: tests/faults/test_evil_files.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.envs import build_vec_env, env_facts, this_machine
from fasttrain.runs.models import bare_model, build_algorithm, find_statistics, load_policy, read_model_file, save_model
from fasttrain.spec.plan import resolve
from toys import RandomEnv

CARTPOLE = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=2")
SMALL = ("algo.rollout_size=64", "batch_size=32")
LARGER = ("algo.rollout_size=512", "batch_size=32")  # speed has 256 of a native game
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)


class Pictures(RandomEnv):
    def __init__(self) -> None:
        super().__init__(IMAGE, spaces.Discrete(3))


class Both(RandomEnv):
    def __init__(self) -> None:
        parts = {"picture": IMAGE, "box": spaces.Box(-1.0, 1.0, (3,), np.float32), "kind": spaces.Discrete(4)}
        super().__init__(spaces.Dict(parts), spaces.MultiDiscrete([2, 3]))


def trained(tmp_path: Path, *arguments: str) -> tuple[Any, BaseAlgorithm, Path]:
    config = configured(*arguments)
    config = resolve(config, {}, env_facts(config), this_machine()).config
    env = build_vec_env(config, config.num_envs, 3)
    model = build_algorithm(config, env, PhaseClock())
    file = tmp_path / "model.zip"
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.num_timesteps = 77
    save_model(model, file)
    env.close()
    return config, model, file


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here unpickles by way of what SB3 and torch use, but torch's reader of weights alone."""
    load = torch.load

    def weights(*given: Any, **how: Any) -> Any:
        return load(*given, **how) if how.get("weights_only") is True else refused()

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr("cloudpickle.loads", refused)
    monkeypatch.setattr("stable_baselines3.common.save_util.cloudpickle.loads", refused)
    monkeypatch.setattr("torch.load", weights)


@pytest.mark.parametrize(
    "arguments",
    [
        (*CARTPOLE, "algo=ppo", *SMALL),
        ("+profile=speed", *CARTPOLE, "algo=ppo", *SMALL),
        (*CARTPOLE, "algo=ppo", *SMALL, "algo.net_arch={pi: [8], vf: [4, 4]}", "algo.activation_fn=relu"),
        (*CARTPOLE, "algo=ppo", *SMALL, "algo.learning_rate=linear_1e-3", "env.frame_stack=3", "env.normalize=[obs]"),
        ("+profile=speed", *CARTPOLE, "algo=dqn", "algo.net_arch=[16]"),
        (*CARTPOLE, "algo=dqn"),
        ("+profile=speed", *CARTPOLE, "algo=dqn", "algo.dueling=true", "algo.prioritized=true"),
        (*CARTPOLE, "algo=recurrent_ppo", *SMALL, "algo.lstm_hidden_size=8"),
        (*CARTPOLE, "algo=recurrent_ppo", *SMALL, "algo.lstm_hidden_size=8", "algo.enable_critic_lstm=false",
         "algo.shared_lstm=true"),
        ("+profile=speed", *CARTPOLE, "algo=recurrent_ppo", *SMALL, "algo.lstm_hidden_size=8", "algo.cell=gru"),
        ("+profile=speed", "vec_env=dummy", "algo=maskable_recurrent_ppo", *SMALL, "algo.cell=gru",
         "algo.memory_inputs=[action]"),
        ("env.entry_point=test_models:Pictures", *CARTPOLE[1:], "algo=ppo", *SMALL, "env.frame_stack=2"),
        ("env.entry_point=test_models:Both", *CARTPOLE[1:], "algo=ppo", *SMALL),
        ("+profile=speed", "env.entry_point=test_models:Both", *CARTPOLE[1:], "algo=dqn", "algo.buffer_size=300"),
        ("+profile=speed", "vec_env=native", "num_envs=2", *LARGER),
        ("vec_env=dummy", "num_envs=2", *SMALL),
        ("+profile=speed", "vec_env=native", "num_envs=2", "algo=dqn"),
        ("+profile=speed", "env=skirmish", "vec_env=native", "num_envs=2", *LARGER),
    ],
    ids=lambda arguments: " ".join(arguments),
)  # fmt: skip
def test_every_algorithm_comes_back_as_it_was(tmp_path: Path, arguments: tuple[str, ...]):
    config, model, file = trained(tmp_path, *arguments)
    found = load_policy(config, file)
    wanted = model.policy.state_dict()
    for name, tensor in found.policy.state_dict().items():
        assert torch.equal(tensor, wanted[name])
    assert found.num_timesteps == 77
    assert (found.observation_space, found.action_space) == (model.observation_space, model.action_space)
    assert found.get_env() is None
    samples = [model.observation_space.sample() for _ in range(5)]
    observations: Any = (
        np.stack(samples)
        if not isinstance(samples[0], dict)
        else {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    )
    ours, theirs = (each.predict(observations, deterministic=True)[0] for each in (found, model))
    assert np.array_equal(ours, theirs)


def test_a_zip_of_plain_sb3_plays_where_the_plan_says_what_it_is(tmp_path: Path):
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save(tmp_path / "model.zip")
    assert load_policy(configured("env.id=CartPole-v1", "algo=ppo"), tmp_path / "model.zip")
    with pytest.raises(ConfigError, match=r"policy_kwargs.activation_fn is .*Tanh.* builds .*ReLU.*; --trust"):
        load_policy(configured("env.id=CartPole-v1", "algo=ppo", "algo.activation_fn=relu"), tmp_path / "model.zip")
    with pytest.raises(ConfigError, match=r"another network .* has shape \(64, 4\), not \(8, 4\); --trust loads it"):
        load_policy(configured("env.id=CartPole-v1", "algo=ppo", "algo.net_arch=[8, 8]"), tmp_path / "model.zip")
    with pytest.raises(ConfigError, match="another network"):
        load_policy(configured("env.id=CartPole-v1", "algo=dqn"), tmp_path / "model.zip")


def test_a_policy_that_cannot_be_rebuilt_names_its_key(tmp_path: Path):
    kwargs = {"share_features_extractor": False, "net_arch": [4]}
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu", policy_kwargs=kwargs)
    model.save(tmp_path / "model.zip")
    with pytest.raises(ConfigError, match=r"policy_kwargs.share_features_extractor is 'False'.*--trust"):
        load_policy(configured("env.id=CartPole-v1", "algo=ppo", "algo.net_arch=[4]"), tmp_path / "model.zip")


def test_the_bare_model_is_small_and_has_no_env():
    config = configured("+profile=speed", *CARTPOLE, "algo=dqn", "algo.buffer_size=1000000000")
    model = bare_model(config)
    assert model.replay_buffer.buffer_size == 1  # type: ignore[attr-defined]
    assert model.get_env() is None


def test_what_a_zip_holds(tmp_path: Path):
    _, model, file = trained(tmp_path, *CARTPOLE, "algo=ppo", *SMALL)
    found = read_model_file(file)
    assert found.facts["num_timesteps"] == 77
    assert isinstance(found.facts["lr_schedule"][":serialized:"], str), "left as it is"
    assert found.weights.keys() == model.policy.state_dict().keys()


def test_which_statistics(tmp_path: Path):
    config, _, file = trained(tmp_path, *CARTPOLE, "algo=ppo", *SMALL, "env.normalize=[obs]")
    plain, pickled = tmp_path / "vecnormalize.npz", tmp_path / "vecnormalize.pkl"
    assert find_statistics(configured("env.id=CartPole-v1", "algo=ppo"), file) is None
    assert find_statistics(config, file) == find_statistics(config, file, trust=True) == plain
    plain.unlink()
    with pytest.raises(ConfigError, match=r"no vecnormalize.npz beside it, only vecnormalize.pkl, a pickle; --trust"):
        find_statistics(config, file)
    assert find_statistics(config, file, trust=True) == pickled
    pickled.unlink()
    with pytest.raises(ConfigError, match="no vecnormalize.npz lies beside its model"):
        find_statistics(config, file, trust=True)


def test_trust_is_sb3s_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, model, file = trained(tmp_path, *CARTPOLE, "algo=ppo", *SMALL)
    with pytest.raises(AssertionError, match="unpickled"):
        load_policy(config, file, trust=True)
    monkeypatch.undo()
    found = load_policy(config, file, trust=True)
    assert pickle.dumps(found.lr_schedule) == pickle.dumps(model.lr_schedule)


@pytest.mark.parametrize(("engine", "base"), [("stock", "stable_baselines3"), ("fast", "fasttrain")])
def test_a_dqn_of_ones_own_is_built_again_of_either_base(
    engine: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    name = f"own_dqn_{engine}"
    (tmp_path / f"{name}.py").write_text(f"from {base} import DQN\nclass Mine(DQN):\n    pass\n")
    config = configured("env.id=CartPole-v1", "algo=dqn", f"engine={engine}", f"algo.entry_point={name}:Mine")
    assert type(bare_model(config)).__name__ == "Mine"
