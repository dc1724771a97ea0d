"""Commands train what a plain script of stock Stable-Baselines3 trains: same seed, bit for bit the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import pytest
import sb3_contrib
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import fasttrain as ours
from conftest import Finished, RunCommand
from fasttrain.cli import main
from fasttrain_games.skullking.game import SkullKingGame


def assert_same(done: Finished, plain: Any) -> None:
    assert done.exit_code == 0, done.err
    model = type(plain).load(done.folder / "model.zip", device="cpu")
    assert model.num_timesteps == plain.num_timesteps
    weights = model.policy.state_dict()
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(weights[name], value), f"{name} differs"


class Script(NamedTuple):
    """A command, and the class, settings and number of envs of the script that it stands for."""

    command: tuple[str, ...]
    kind: Any
    settings: dict[str, Any]
    num_envs: int
    steps: int


ON_POLICY = ("algo.n_epochs=2", "algo.rollout_size=128", "batch_size=32")
SMALL = {"n_epochs": 2, "batch_size": 32}
LSTM = {"lstm_hidden_size": 8, "n_lstm_layers": 2, "enable_critic_lstm": False, "net_arch": [16]}
SCRIPTS = {
    "ppo": Script(("algo=ppo", "vec_env=dummy", *ON_POLICY, "eval_every=200"), PPO, {**SMALL, "n_steps": 32}, 4, 300),
    "ppo, subproc": Script(("algo=ppo", *ON_POLICY), PPO, {**SMALL, "n_steps": 64}, 2, 128),
    "dqn": Script(
        ("algo=dqn", "vec_env=dummy", "warmup_steps=100", "algo.buffer_size=300", "algo.target_update_interval=80"),
        DQN,
        {"batch_size": 64, "learning_starts": 100, "buffer_size": 300, "target_update_interval": 80, "train_freq": 1},
        4,
        600,
    ),
    "recurrent": Script(
        ("algo=recurrent_ppo", "vec_env=dummy", *ON_POLICY, "eval_every=128", "algo.learning_rate=linear_1e-3",
         *(f"algo.{name}={str(value).lower()}" for name, value in LSTM.items())),
        sb3_contrib.RecurrentPPO,
        {**SMALL, "n_steps": 32, "policy_kwargs": LSTM, "learning_rate": lambda left: 1e-3 * left},
        4,
        256,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_profile_baseline_is_a_plain_script(fasttrain: RunCommand, name: str, forked_stock_workers: None):
    command, kind, settings, num_envs, steps = SCRIPTS[name]
    sizes = f"num_envs={num_envs}", f"total_timesteps={steps}"
    done = fasttrain("+profile=baseline", "env.id=CartPole-v1", "seed=3", *sizes, "eval.episodes=2", *command)
    # In this process: SB3 promises the same numbers of its workers.
    vec = make_vec_env("CartPole-v1", num_envs, seed=3, vec_env_cls=DummyVecEnv)
    policy = "MlpLstmPolicy" if name == "recurrent" else "MlpPolicy"
    assert_same(done, kind(policy, vec, seed=3, device="cpu", **settings).learn(steps))


def test_profile_exact_and_the_class_by_itself_are_stock_on_a_native_game(fasttrain: RunCommand):
    def difference(model: Any) -> float:
        weights = model.policy.state_dict()
        return max(float((value - weights[name]).abs().max()) for name, value in stock.policy.state_dict().items())

    settings = {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "seed": 3, "device": "cpu"}
    env = DummyVecEnv([lambda: Monitor(gymnasium.make("fasttrain_games.envs:fasttrain/SkullKing-v0"))] * 8)
    stock = sb3_contrib.MaskablePPO("MlpPolicy", env, **settings).learn(512)
    model = ours.MaskablePPO("MlpPolicy", ours.NativeVecEnv(SkullKingGame(8)), **settings).learn(512)
    assert difference(model) == 0.0
    done = fasttrain(
        "+profile=exact", "seed=3", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=2",
        "total_timesteps=512", "eval.episodes=2", "eval_every=256",
    ).ok()  # fmt: skip
    assert done.json("plan.json")["config"]["vec_env"] == "native"
    model = sb3_contrib.MaskablePPO.load(done.folder / "model.zip", device="cpu")
    assert model.num_timesteps == 512
    assert difference(model) <= 1e-5


PPO_ENTRY = """
defaults: &usual
  policy: MlpPolicy
  n_envs: 4
CartPole-v1:
  <<: *usual
  n_timesteps: !!float 3e2
  normalize: "dict(norm_obs=True, norm_reward=False)"
  policy_kwargs: "dict(net_arch=dict(pi=[16], vf=[16, 8]), activation_fn=nn.ReLU, ortho_init=False)"
  learning_rate: lin_0.001
  clip_range: lin_0.2
"""
DQN_ENTRY = """
CartPole-v1:
  n_timesteps: !!float 300
  policy: 'MlpPolicy'
  learning_rate: !!float 2.3e-3
  policy_kwargs: "dict(net_arch=[32, 32])"
"""
SAC_ENTRY = """
default:
  n_timesteps: 400
  policy: 'MlpPolicy'
  learning_rate: lin_7.3e-4
  ent_coef: 'auto'
  policy_kwargs: "dict(log_std_init=-3, net_arch=[16, 16])"
"""
# As they stand in the entry and in the script.
OF_PPO: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 3,
    "ent_coef": 0.01,
}
OF_DQN: dict[str, Any] = {
    "batch_size": 64, "buffer_size": 5000, "learning_starts": 100, "gamma": 0.99, "target_update_interval": 10,
    "train_freq": 32, "gradient_steps": -1, "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
}  # fmt: skip
OF_SAC: dict[str, Any] = {
    "buffer_size": 2000, "batch_size": 16, "gradient_steps": 20, "learning_starts": 100, "use_sde": True,
    "sde_sample_freq": 8, "use_sde_at_warmup": True,
}  # fmt: skip


def imported(fasttrain: RunCommand, entry: str, settings: dict[str, Any], env: str, algo: str, *more: str) -> Finished:
    Path(f"{algo}.yml").write_text(
        entry + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in settings.items())
    )
    assert main(["zoo", "import", f"{algo}.yml", "--env", env, "--algo", algo]) == 0
    return fasttrain("--config-dir", "conf", f"+profile=zoo_{algo}_{env}", "seed=3", "eval.episodes=2", *more)


def test_ppo_of_an_entry_of_the_zoo_is_stocks(fasttrain: RunCommand):
    env = VecNormalize(make_vec_env("CartPole-v1", 4, seed=3, vec_env_cls=DummyVecEnv), norm_reward=False, gamma=0.98)
    net = {"net_arch": {"pi": [16], "vf": [16, 8]}, "activation_fn": torch.nn.ReLU, "ortho_init": False}
    with pytest.warns(UserWarning, match="mini-batch size"):  # 256 of 4 × 32
        plain = PPO(
            "MlpPolicy", env, learning_rate=LinearSchedule(1e-3, 0.0, 1.0), clip_range=LinearSchedule(0.2, 0.0, 1.0),
            seed=3, device="cpu", policy_kwargs=net, **OF_PPO,
        )  # fmt: skip
    plain.learn(300)
    for more in ((), ("engine=fast",)):
        assert_same(imported(fasttrain, PPO_ENTRY, OF_PPO, "CartPole-v1", "ppo", *more), plain)


def test_dqn_of_an_entry_is_stocks_with_its_rounds(fasttrain: RunCommand):
    given = {**OF_DQN, "learning_rate": 2.3e-3, "policy_kwargs": {"net_arch": [32, 32]}, "seed": 3, "device": "cpu"}
    plain = DQN("MlpPolicy", make_vec_env("CartPole-v1", 1, seed=3), **given).learn(300)
    for more in ((), ("engine=fast",)):
        done = imported(fasttrain, DQN_ENTRY, OF_DQN, "CartPole-v1", "dqn", *more)
        assert_same(done, plain)
        rows = {row["flag"]: row["effective"] for row in done.json("plan.json")["flags"]}
        assert (rows["updates_per_step"], rows["replay_ratio"]) == (32, 1.0)
        assert done.json("summary.json")["updates"] == plain._n_updates == 32 * 7


def test_sac_with_rounds_of_episodes_and_sde_is_stocks(fasttrain: RunCommand):
    done = imported(fasttrain, SAC_ENTRY, {**OF_SAC, "train_freq": [1, "episode"]}, "Pendulum-v1", "sac")
    plain = SAC(
        "MlpPolicy", make_vec_env("Pendulum-v1", 1, seed=3), learning_rate=LinearSchedule(7.3e-4, 0.0, 1.0), seed=3,
        device="cpu", train_freq=(1, "episode"), policy_kwargs={"log_std_init": -3, "net_arch": [16, 16]}, **OF_SAC,
    ).learn(400)  # fmt: skip
    assert_same(done, plain)
    assert done.json("summary.json")["updates"] == plain._n_updates == 2 * 20
