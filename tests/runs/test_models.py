from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

import fasttrain
from conftest import configured
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.engine import settle_engine, settle_kernels
from fasttrain.runs.envs import build_vec_env, env_facts, this_machine
from fasttrain.runs.models import bare_model, build_algorithm, load_policy, read_model_file, save_model
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plan import resolve
from fasttrain.vec.native import NativeVecEnv
from fasttrain.vec.stock import ActionLogVecEnv
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
        (*CARTPOLE, "algo=ppo", *SMALL, "algo.net_arch={pi: [8], vf: [4, 4]}", "algo.activation_fn=relu"),
        (*CARTPOLE, "algo=ppo", *SMALL, "algo.learning_rate=linear_1e-3", "env.frame_stack=3", "env.normalize=[obs]"),
        ("+profile=speed", *CARTPOLE, "algo=dqn", "algo.net_arch=[16]"),
        ("+profile=speed", *CARTPOLE, "algo=dqn", "algo.dueling=true", "algo.prioritized=true"),
        (*CARTPOLE, "algo=recurrent_ppo", *SMALL, "algo.lstm_hidden_size=8", "algo.enable_critic_lstm=false",
         "algo.shared_lstm=true"),
        ("+profile=speed", *CARTPOLE, "algo=recurrent_ppo", *SMALL, "algo.lstm_hidden_size=8", "algo.cell=gru"),
        ("+profile=speed", "vec_env=dummy", "algo=maskable_recurrent_ppo", *SMALL, "algo.cell=gru",
         "algo.memory_inputs=[action]"),
        ("env.entry_point=test_models:Pictures", *CARTPOLE[1:], "algo=ppo", *SMALL, "env.frame_stack=2"),
        ("env.entry_point=test_models:Both", *CARTPOLE[1:], "algo=ppo", *SMALL),
        ("+profile=speed", "env.entry_point=test_models:Both", *CARTPOLE[1:], "algo=dqn", "algo.buffer_size=300"),
        ("+profile=speed", "vec_env=native", "num_envs=2", *LARGER),
        ("+profile=speed", "vec_env=native", "num_envs=2", "algo=dqn"),
    ],
    ids=lambda arguments: " ".join(arguments),
)  # fmt: skip
def test_every_algorithm_comes_back_as_it_was(tmp_path: Path, arguments: tuple[str, ...]):
    config, model, file = trained(tmp_path, *arguments)
    assert isinstance(read_model_file(file)[0]["lr_schedule"][":serialized:"], str), "left as it is"
    found = load_policy(config, file)
    wanted = model.policy.state_dict()
    for name, tensor in found.policy.state_dict().items():
        assert torch.equal(tensor, wanted[name])
    assert found.num_timesteps == 77
    assert (found.observation_space, found.action_space) == (model.observation_space, model.action_space)
    assert found.get_env() is None
    samples = [model.observation_space.sample() for _ in range(5)]
    observations: Any = np.stack(samples)
    if isinstance(samples[0], dict):
        observations = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
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
    kwargs = {"share_features_extractor": False}
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, policy_kwargs=kwargs).save(tmp_path / "model.zip")
    with pytest.raises(ConfigError, match=r"policy_kwargs.share_features_extractor is 'False'.*--trust"):
        load_policy(configured("env.id=CartPole-v1", "algo=ppo"), tmp_path / "model.zip")


def test_the_bare_model_is_small_and_trust_is_sb3s_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = configured("+profile=speed", *CARTPOLE, "algo=dqn", "algo.buffer_size=1000000000")
    model = bare_model(config)
    assert model.replay_buffer.buffer_size == 1  # type: ignore[attr-defined]
    assert model.get_env() is None
    config, model, file = trained(tmp_path, *CARTPOLE, "algo=ppo", *SMALL)
    with pytest.raises(AssertionError, match="unpickled"):
        load_policy(config, file, trust=True)
    monkeypatch.undo()
    found = load_policy(config, file, trust=True)
    assert pickle.dumps(found.lr_schedule) == pickle.dumps(model.lr_schedule)


@pytest.mark.parametrize(("engine", "base"), [("stock", "stable_baselines3"), ("fast", "fasttrain")])
def test_a_dqn_of_ones_own_is_built_again(engine: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    name = f"own_dqn_{engine}"
    (tmp_path / f"{name}.py").write_text(f"from {base} import DQN\nclass Mine(DQN):\n    pass\n")
    config = configured("env.id=CartPole-v1", "algo=dqn", f"engine={engine}", f"algo.entry_point={name}:Mine")
    assert type(bare_model(config)).__name__ == "Mine"


PENDULUM = ("env.id=Pendulum-v1", "vec_env=dummy", "num_envs=1")


def effective(*arguments: str, native: bool = False) -> Config:
    return resolve(configured(*arguments), {}, EnvFacts(native, 1e-5), Machine(2, False, False)).config


@contextmanager
def built(*arguments: str, native: bool = False) -> Iterator[Any]:
    """The model of these settings in its env."""
    config = effective(*arguments, native=native)
    env = build_vec_env(config, config.num_envs, 0)
    yield build_algorithm(config, env, PhaseClock())
    env.close()


@pytest.mark.parametrize(
    ("arguments", "expected", "env"),
    [
        ((*CARTPOLE, "engine=stock", "algo=ppo"), stable_baselines3.PPO, None),
        ((*CARTPOLE, "engine=fast", "algo=ppo"), fasttrain.PPO, ActionLogVecEnv),
        ((*CARTPOLE, "engine=stock", "algo=dqn", "algo.buffer_size=100"), stable_baselines3.DQN, None),
        ((*CARTPOLE, "engine=fast", "algo=dqn", "algo.buffer_size=100"), fasttrain.DQN, ActionLogVecEnv),
        (("+profile=speed", "engine=stock", "fused_update=off"), sb3_contrib.MaskablePPO, None),
        (("+profile=speed", "engine=fast", "fused_update=off"), fasttrain.MaskablePPO, NativeVecEnv),
    ],
)
def test_engine_algo_and_game_choose_the_classes(arguments: tuple[str, ...], expected: type, env: type | None):
    with built(*arguments, native=arguments[0] == "+profile=speed") as model:
        assert type(model) is expected
        assert env in (None, type(model.get_env())), "stock's is timed by one around it"


def test_every_algorithm_argument_arrives():
    with built(
        *CARTPOLE, "algo=ppo", "algo.n_epochs=3", "algo.gamma=0.9", "algo.gae_lambda=0.8", "algo.clip_range=linear_0.3",
        "algo.clip_range_vf=0.1", "algo.normalize_advantage=false", "algo.ent_coef=0.01", "algo.vf_coef=0.4",
        "algo.max_grad_norm=0.6", "algo.target_kl=0.02", "algo.net_arch=[32]", "algo.activation_fn=relu",
        "algo.learning_rate=linear_1e-3", "batch_size=32", "algo.rollout_size=256",
    ) as model:  # fmt: skip
        found = (model.n_epochs, model.gamma, model.gae_lambda, model.normalize_advantage, model.ent_coef,
                 model.vf_coef, model.max_grad_norm, model.target_kl, model.batch_size, model.n_steps)  # fmt: skip
        assert found == (3, 0.9, 0.8, False, 0.01, 0.4, 0.6, 0.02, 32, 128)
        assert [model.lr_schedule(left) for left in (1.0, 0.5)] == [1e-3, 5e-4]
        assert [model.clip_range(left) for left in (1.0, 0.5)] == [0.3, 0.15]
        assert model.clip_range_vf(0.5) == 0.1
        assert isinstance(model.policy.mlp_extractor.policy_net[1], torch.nn.ReLU)
        assert model.policy.mlp_extractor.policy_net[0].out_features == 32
    with built(*CARTPOLE, "algo=dqn", "updates_per_step=6", "warmup_steps=77", "algo.buffer_size=100") as model:
        assert (model.gradient_steps, model.train_freq.frequency, model.learning_starts) == (6, 1, 77)
    noise, rounds = "algo.action_noise=ornstein-uhlenbeck_0.25", "algo.train_freq=[2,episode]"
    with built(*PENDULUM, "algo=td3", rounds, noise, "algo.buffer_size=500") as model:
        assert (model.train_freq.frequency, model.train_freq.unit.value, model.gradient_steps) == (2, "episode", -1)
        assert isinstance(model.action_noise, OrnsteinUhlenbeckActionNoise)
        assert model.action_noise._sigma.tolist() == [0.25]
    told = "algo.action_noise=pink_1: expected normal_0.1, .*, or ornstein-uhlenbeck_0.1"
    with pytest.raises(ConfigError, match=told), built(*PENDULUM, "algo=td3", "algo.action_noise=pink_1"):
        pass
    for engine in ("stock", "fast"):
        sde = ("algo.use_sde=true", "algo.sde_sample_freq=4", f"engine={engine}")
        with built(*PENDULUM, "algo=ppo", *sde) as model:
            assert (model.use_sde, model.sde_sample_freq, model.policy.use_sde) == (True, 4, True)
    with built("env.id=CartPole-v1", "vec_env=dummy", "algo=ars", "env.normalize=[obs,reward]") as model:
        assert model.get_env().gamma == 0.99, "VecNormalize's own, of an algorithm without a discount"


@pytest.mark.parametrize(
    ("fused", "activation", "expected"),
    [
        ("auto", "elu", "on"),
        ("on", "relu", "on"),
        ("off", "tanh", "off"),
        ("auto", "gelu", "off"),
        ("on", "gelu", None),
    ],
)
def test_fused_update_puts_the_kernels_to_work_or_says_why_not(fused: str, activation: str, expected: str | None):
    arguments = (*CARTPOLE, "algo=ppo", "engine=fast", f"fused_update={fused}", "algo.rollout_size=64", "batch_size=64",
                 f"algo.activation_fn={activation}")  # fmt: skip
    plan = resolve(configured(*arguments), {}, EnvFacts(False, 1e-5), Machine(2, False, False))
    env = build_vec_env(plan.config, 2, 0)
    model = build_algorithm(plan.config, env, PhaseClock())
    if expected is None:
        with pytest.raises(ConfigError, match="fused_update=on: no compiled kernels for this policy"):
            settle_kernels(plan, model)
        return
    plan = settle_engine(settle_kernels(plan, model), model)
    model.learn(64)
    assert (model.engine.kind == "kernels") == (expected == "on")
    row = plan.row("fused_update")
    assert row.effective == plan.config.fused_update == expected
    assert "compiled kernels do not compute GELU" in row.reason or activation != "gelu"


def test_env_facts_build_the_env_once_and_time_it_only_where_the_plan_must_choose():
    assert env_facts(configured("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")).step_s is None
    measured = env_facts(configured("env.id=CartPole-v1", "algo=ppo", "vec_env=auto")).step_s
    assert measured is not None
    assert measured > 0
    assert env_facts(configured("+profile=speed")) == EnvFacts(True, None)
    with pytest.raises(EnvSpecError, match="offers no action masks"):
        env_facts(configured("env.id=CartPole-v1"))
