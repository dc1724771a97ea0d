from __future__ import annotations

import gymnasium
import pytest
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

import fasttrain
from conftest import configured
from fasttrain.envs.probe import Play
from fasttrain.errors import ConfigError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs.engine import set_threads, settle_engine, settle_kernels
from fasttrain.runs.envs import build_vec_env, env_facts
from fasttrain.runs.models import build_algorithm
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.config import Config
from fasttrain.spec.plan import resolve
from fasttrain.vec.native import NativeVecEnv
from fasttrain.vec.stock import NotedVecEnv, WorkersVecEnv

CARTPOLE = ("env.id=CartPole-v1", "vec_env=dummy", "num_envs=2")


def effective(*arguments: str, native: bool = False) -> Config:
    return resolve(configured(*arguments), {}, EnvFacts(native, 1e-5), Machine(2, False, False)).config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("engine=stock", "algo=ppo"), stable_baselines3.PPO),
        (("engine=fast", "algo=ppo"), fasttrain.PPO),
        (("engine=stock", "algo=dqn", "algo.buffer_size=100"), stable_baselines3.DQN),
        (("engine=fast", "algo=dqn", "algo.buffer_size=100"), fasttrain.DQN),
    ],
)
def test_engine_and_algo_choose_the_class(arguments: tuple[str, ...], expected: type):
    config = effective(*CARTPOLE, *arguments)
    env = build_vec_env(config, 2, 0)
    assert type(build_algorithm(config, env, PhaseClock())) is expected
    env.close()


@pytest.mark.parametrize(("engine", "expected"), [("stock", sb3_contrib.MaskablePPO), ("fast", fasttrain.MaskablePPO)])
def test_native_game_and_masks(engine: str, expected: type):
    config = effective("+profile=speed", f"engine={engine}", "fused_update=off", native=True)
    env = build_vec_env(config, 4, 0)
    assert isinstance(env, NativeVecEnv)
    model = build_algorithm(config, env, PhaseClock())
    assert type(model) is expected
    assert model.n_steps == config.algo.rollout_size // 256
    env.close()


def test_vec_env_kinds():
    for kind, expected in (("dummy", NotedVecEnv), ("subproc", WorkersVecEnv)):
        env = build_vec_env(effective("env.id=CartPole-v1", "algo=ppo", f"vec_env={kind}", "num_envs=2"), 2, 0)
        assert type(env) is expected
        env.close()


def test_every_algorithm_argument_arrives():
    config = effective(
        *CARTPOLE, "algo=ppo", "algo.n_epochs=3", "algo.gamma=0.9", "algo.gae_lambda=0.8", "algo.clip_range=linear_0.3",
        "algo.clip_range_vf=0.1", "algo.normalize_advantage=false", "algo.ent_coef=0.01", "algo.vf_coef=0.4",
        "algo.max_grad_norm=0.6", "algo.target_kl=0.02", "algo.net_arch=[32]", "algo.activation_fn=relu",
        "algo.learning_rate=linear_1e-3", "batch_size=32", "algo.rollout_size=256",
    )  # fmt: skip
    env = build_vec_env(config, 2, 0)
    model = build_algorithm(config, env, PhaseClock())
    assert isinstance(model, stable_baselines3.PPO)
    found = (model.n_epochs, model.gamma, model.gae_lambda, model.normalize_advantage, model.ent_coef, model.vf_coef,
             model.max_grad_norm, model.target_kl, model.batch_size, model.n_steps)  # fmt: skip
    assert found == (3, 0.9, 0.8, False, 0.01, 0.4, 0.6, 0.02, 32, 128)
    assert (model.lr_schedule(1.0), model.lr_schedule(0.5)) == (1e-3, 5e-4)
    assert (model.clip_range(1.0), model.clip_range(0.5)) == (0.3, 0.15)
    assert model.clip_range_vf is not None
    assert model.clip_range_vf(0.5) == 0.1
    assert isinstance(model.policy.mlp_extractor.policy_net[1], torch.nn.ReLU)
    assert model.policy.mlp_extractor.policy_net[0].out_features == 32
    env.close()


def test_dqn_counts_updates_per_vector_step():
    config = effective(*CARTPOLE, "algo=dqn", "updates_per_step=6", "warmup_steps=77", "algo.buffer_size=100")
    env = build_vec_env(config, 2, 0)
    model = build_algorithm(config, env, PhaseClock())
    assert isinstance(model, stable_baselines3.DQN)
    assert (model.gradient_steps, model.train_freq.frequency, model.learning_starts) == (6, 1, 77)
    env.close()


@pytest.mark.parametrize(
    ("fused", "activation", "expected"),
    [("auto", "tanh", "on"), ("on", "relu", "on"), ("off", "tanh", "off"), ("auto", "elu", "off")],
)
def test_fused_update_puts_the_kernels_to_work_or_says_why_not(fused: str, activation: str, expected: str):
    arguments = (*CARTPOLE, "algo=ppo", "engine=fast", f"fused_update={fused}", "algo.rollout_size=64", "batch_size=64",
                 f"algo.activation_fn={activation}")  # fmt: skip
    plan = resolve(configured(*arguments), {}, EnvFacts(False, 1e-5), Machine(2, False, False))
    env = build_vec_env(plan.config, 2, 0)
    model = build_algorithm(plan.config, env, PhaseClock())
    plan = settle_engine(settle_kernels(plan, model), model)
    model.learn(64)
    assert (model.engine.kind == "kernels") == (expected == "on")
    (row,) = [row for row in plan.rows if row.flag == "fused_update"]
    assert row.effective == plan.config.fused_update == expected
    assert "not an MLP of tanh or relu layers" in row.reason or activation != "elu"
    env.close()


def test_fused_update_asked_for_by_name_and_impossible():
    config = configured(*CARTPOLE, "algo=ppo", "engine=fast", "fused_update=on", "algo.activation_fn=elu")
    plan = resolve(config, {}, EnvFacts(False, 1e-5), Machine(2, False, False))
    env = build_vec_env(plan.config, 2, 0)
    with pytest.raises(ConfigError, match="fused_update=on: no compiled kernels for this policy"):
        settle_kernels(plan, build_algorithm(plan.config, env, PhaseClock()))
    env.close()


def test_env_facts_build_the_env_once_and_time_it_only_where_the_plan_must_choose():
    assert env_facts(configured("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")).step_s is None
    measured = env_facts(configured("env.id=CartPole-v1", "algo=ppo", "vec_env=auto")).step_s
    assert measured is not None
    assert measured > 0
    assert env_facts(configured("+profile=speed")) == EnvFacts(True, None)
    with pytest.raises(EnvSpecError, match="offers no action masks"):
        env_facts(configured("env.id=CartPole-v1"))


def test_workers_are_fitted_to_what_the_checkup_measured():
    config = configured("env.id=CartPole-v1", "algo=ppo", "vec_env=shared")
    play = Play(lambda: gymnasium.make("CartPole-v1"))
    play.run(0.01, 100)
    costs = play.costs()
    assert env_facts(config).step_s is None
    assert env_facts(config, measure=lambda: costs).step_s == costs.step_s


def test_threads():
    before = torch.get_num_threads()
    try:
        set_threads(1)
        set_threads("default")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_rounds_and_noise_reach_stocks_arguments():
    small = ("env.id=Pendulum-v1", "vec_env=dummy", "num_envs=1", "algo.buffer_size=500")
    config = effective(*small, "algo=td3", "algo.train_freq=[2,episode]", "algo.action_noise=ornstein-uhlenbeck_0.25")
    env = build_vec_env(config, 1, 0)
    model = build_algorithm(config, env, PhaseClock())
    assert (model.train_freq.frequency, model.train_freq.unit.value, model.gradient_steps) == (2, "episode", -1)
    assert isinstance(model.action_noise, OrnsteinUhlenbeckActionNoise)
    assert model.action_noise._sigma.tolist() == [0.25]
    wrong = effective(*small, "algo=td3", "algo.action_noise=pink_1")
    with pytest.raises(
        ConfigError, match="algo.action_noise=pink_1: expected normal_0.1, .*, or ornstein-uhlenbeck_0.1"
    ):
        build_algorithm(wrong, env, PhaseClock())
    env.close()


@pytest.mark.parametrize("engine", ["stock", "fast"])
def test_state_dependent_exploration_reaches_ppo(engine: str):
    config = effective("env.id=Pendulum-v1", "vec_env=dummy", "num_envs=2", "algo=ppo", f"engine={engine}",
                       "algo.use_sde=true", "algo.sde_sample_freq=4")  # fmt: skip
    env = build_vec_env(config, 2, 0)
    model = build_algorithm(config, env, PhaseClock())
    assert (model.use_sde, model.sde_sample_freq, model.policy.use_sde) == (True, 4, True)
    env.close()


def test_an_algorithm_without_a_discount_normalises_by_vecnormalizes_own():
    config = effective("env.id=CartPole-v1", "vec_env=dummy", "num_envs=1", "algo=ars", "env.normalize=[obs,reward]")
    env = build_vec_env(config, 1, 0)
    assert env.gamma == 0.99
    env.close()
