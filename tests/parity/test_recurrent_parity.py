"""`algo=recurrent_ppo` is sb3-contrib's RecurrentPPO: the same weights, and an evaluation that remembers."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from conftest import RunCommand
from fasttrain.runs.evaluate import evaluate
from toys import single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
TINY = ("env.id=CartPole-v1", "algo=recurrent_ppo", "algo.lstm_hidden_size=8", "eval.episodes=4")


def test_profile_baseline_is_a_plain_script(fasttrain: RunCommand):
    done = fasttrain(
        "+profile=baseline", *TINY, "vec_env=dummy", "num_envs=4", "seed=3", "algo.n_epochs=2", "batch_size=32",
        "algo.rollout_size=128", "algo.enable_critic_lstm=false", "algo.n_lstm_layers=2", "total_timesteps=384",
        "algo.learning_rate=linear_1e-3", "algo.net_arch=[16]", "eval_every=128",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    env = make_vec_env("CartPole-v1", n_envs=4, seed=3, vec_env_cls=DummyVecEnv)
    lstm: dict[str, Any] = {"lstm_hidden_size": 8, "n_lstm_layers": 2, "enable_critic_lstm": False, "net_arch": [16]}
    plain = RecurrentPPO(
        "MlpLstmPolicy", env, n_steps=32, n_epochs=2, batch_size=32, seed=3, device="cpu", policy_kwargs=lstm,
        learning_rate=lambda left: 1e-3 * left,
    ).learn(384)  # fmt: skip
    ours = RecurrentPPO.load(done.folder / "model.zip", device="cpu")
    assert ours.num_timesteps == plain.num_timesteps == 384
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(ours.policy.state_dict()[name], value), f"{name} differs"


def test_profile_speed_runs_ours_and_says_how_sequences_are_made(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", *TINY, "total_timesteps=1024", "algo.n_epochs=1", "schedule=auto")
    assert done.exit_code == 0, done.err
    rows = {row["flag"]: row for row in done.json("plan.json")["flags"]}
    assert (rows["engine"]["effective"], rows["vec_env"]["effective"]) == ("fast", "dummy")
    assert rows["steps_back"]["effective"] == 85
    assert "2 sequences a minibatch, one more for each episode's end in it" in rows["steps_back"]["reason"]
    assert rows["algo.rollout_size"]["effective"] == 12 * 85
    told = re.search(r"sequences: ([\d.]+) a minibatch; (\d+) % padding, in stock's layout (\d+) %", done.out)
    assert told is not None
    assert 4 < float(told[1]) < 20, "episodes of some 20 steps, minibatches of 128"
    assert int(told[2]) <= int(told[3]) < 90
    assert int(told[3]) > 20
    perf = done.json("perf.json")["total"]
    assert perf["updates"] == 16  # 2 rollouts of 1,020 in minibatches of 128
    assert perf["train_fwd_ms"] + perf["train_ms"] > 0
    assert perf["env_step_ms"] > 0
    again = fasttrain("eval", f"run={done.folder}")
    assert again.exit_code == 0, again.err
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert greedy == {key: done.json("summary.json")["quality"][key] for key in greedy}


def test_shared_workers_serve_it(fasttrain: RunCommand):
    done = fasttrain(
        *TINY, "engine=fast", "vec_env=shared", "num_workers=2", "num_envs=4", "total_timesteps=64", "batch_size=32",
        "algo.rollout_size=64", "algo.n_epochs=1", "algo.shared_lstm=true", "algo.enable_critic_lstm=false",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.json("plan.json")["config"]["vec_env"] == "shared"
    assert RecurrentPPO.load(done.folder / "model.zip", device="cpu").policy.shared_lstm


MASKED = ("algo=maskable_recurrent_ppo", "env=skullking", "algo.lstm_hidden_size=8")
REFUSED = {
    "use_amp=on": (*TINY, "engine=fast"),
    "use_compile=on": (*TINY, "engine=fast"),
    "gradient_accumulation=2": (*TINY, "engine=fast"),
    "engine=stock": MASKED,
    "vec_env=vector": (*TINY, "engine=fast"),
    "batch_size=31": (*TINY, "num_envs=4", "algo.rollout_size=156"),
    "algo.policy=MlpPolicy": TINY,
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_does_not_go_with_memory_is_refused_by_name(fasttrain: RunCommand, typed: str):
    done = fasttrain(*REFUSED[typed], typed)
    assert done.exit_code == 2
    assert done.err.startswith("fasttrain: error: ")
    assert done.err.count("\n") == 1
    assert typed.partition("=")[0] in done.err or "resets in the step after" in done.err


def test_masks_and_memory_from_the_command_line(fasttrain: RunCommand):
    small = (
        "total_timesteps=512",
        "num_envs=8",
        "algo.rollout_size=256",
        "batch_size=128",
        "algo.n_epochs=1",
        "eval.episodes=8",
    )
    done = fasttrain("+profile=speed", *MASKED, *small)
    assert done.exit_code == 0, done.err
    again = fasttrain("eval", f"run={done.folder}")
    assert again.exit_code == 0, again.err
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert greedy == {key: done.json("summary.json")["quality"][key] for key in greedy}
    played = fasttrain("play", f"run={done.folder}", "play.speed=1000", "play.seed=1", "opponent=random")
    assert played.exit_code == 0, played.err
    exported = fasttrain("export", f"run={done.folder}", "format=torchscript")
    assert exported.exit_code == 0, exported.err
    assert "next_vf_c float32 (batch, 1, 8)" in exported.out


class FirstTold(gym.Env[Any, Any]):
    """Only the first observation says which action pays; episodes of 4 steps."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps, self.right = 0, int(self.np_random.integers(2))
        return np.array([2 * self.right - 1], np.float32), {}

    def step(self, action: int):
        self.steps += 1
        return np.zeros(1, np.float32), float(action == self.right), self.steps == 4, False, {}


def test_evaluation_hands_states_on_and_resets_them_where_episodes_begin():
    """A hand-made LSTM: the cell adds up the observations, so its sign is the first one of the episode."""
    env = DummyVecEnv([FirstTold] * 3)
    model = RecurrentPPO(
        "MlpLstmPolicy", env, device="cpu", policy_kwargs={"lstm_hidden_size": 1, "net_arch": [], "ortho_init": False}
    )
    policy = model.policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.lstm_actor.bias_ih_l0.copy_(torch.tensor([20.0, 20.0, 0.0, 20.0]))  # gates open: input, forget, output
        policy.lstm_actor.weight_ih_l0[2] = 20.0  # the cell's input is the observation's sign
        policy.action_net.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    result = evaluate(model, env, episodes=30, deterministic=True, seed=0)
    assert result["mean_reward"] == 4.0
