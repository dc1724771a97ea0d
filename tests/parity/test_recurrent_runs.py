"""Policies that remember, from the command line: what runs, what the plan says of it, what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain as ours
from conftest import Finished, RunCommand
from fasttrain.algos.recurrent_policies import GRU
from fasttrain.runs.evaluate import evaluate
from messages import assert_says, wrong_inputs
from plain_env import PlainEnv
from toys import RandomEnv

CART = ("env.id=CartPole-v1", "algo=recurrent_ppo", "algo.lstm_hidden_size=16", "eval.episodes=4")
SHORT = ("total_timesteps=256", "num_envs=4", "algo.rollout_size=128", "batch_size=32", "algo.n_epochs=1")
SKULL = ("env=skullking", "algo=maskable_recurrent_ppo", "algo.lstm_hidden_size=16", "eval.episodes=2")


def rows_of(done: Finished) -> dict[str, Any]:
    return {row["flag"]: row for row in done.json("plan.json")["flags"]}


def trained(fasttrain: RunCommand, *arguments: str) -> Finished:
    """A run whose stored policy is evaluated once more, to the same figures."""
    done = fasttrain("+profile=speed", *arguments).ok()
    again = fasttrain("eval", f"run={done.folder}").ok()
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert greedy == {key: done.json("summary.json")["quality"][key] for key in greedy}
    return done


def test_how_sequences_are_made_is_told(fasttrain: RunCommand):
    done = trained(fasttrain, *CART, "total_timesteps=1024", "algo.n_epochs=1", "schedule=auto")
    rows = rows_of(done)
    assert (rows["engine"]["effective"], rows["vec_env"]["effective"]) == ("fast", "dummy")
    assert rows["steps_back"]["effective"] == 85
    assert "2 sequences per minibatch and one more for each episode's end" in rows["steps_back"]["reason"]
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


def test_a_masked_game_is_played_and_exported(fasttrain: RunCommand):
    done = trained(fasttrain, *SKULL, *SHORT)
    exported = fasttrain("export", f"run={done.folder}", "format=torchscript").ok()
    assert "next_vf_c float32 (batch, 1, 16)" in exported.out


def test_masks_and_inputs_take_a_native_game_in_its_single_form(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", *SKULL, *SHORT, "algo.cell=gru", "algo.memory_inputs=[reward]").ok()
    row = rows_of(done)["vec_env"]
    assert row["effective"] in ("dummy", "shared")
    assert row["reason"].startswith("algo.memory_inputs needs single envs, not the native batch; ")
    fasttrain("play", f"run={done.folder}", "play.speed=1000", "play.seed=1", "opponent=random").ok()


def test_groups_of_workers(fasttrain: RunCommand):
    groups = ("vec_env=shared", "num_workers=2", "schedule=first_ready")
    done = fasttrain("+profile=speed", *CART, *SHORT, *groups, "algo.cell=gru", "algo.memory_inputs=[action]").ok()
    assert rows_of(done)["schedule"]["effective"] == "first_ready"
    assert done.json("perf.json")["total"]["updates"] == 8


def test_another_cell_with_inputs_and_wrappers(fasttrain: RunCommand):
    told = ("algo.memory_inputs=[action,reward]", "env.normalize=[obs]", "env.frame_stack=2")
    done = trained(fasttrain, *CART, *SHORT, "algo.cell=gru", *told)
    rows = rows_of(done)
    assert (rows["algo.cell"]["effective"], rows["algo.cell"]["class"]) == ("gru", "trade-off")
    assert rows["algo.memory_inputs"]["effective"] == ["action", "reward"]
    assert rows["fused_update"]["effective"] == "off"
    told_why = "a GRU is computed on PyTorch: compiled kernels compute only LSTMs"
    assert rows["fused_update"]["reason"].startswith(told_why)
    assert "a GRU is computed on PyTorch" in done.out
    model = ours.RecurrentPPO.load(done.folder / "model.zip", device="cpu")
    assert isinstance(model.policy.lstm_actor, GRU)
    assert model.observation_space.shape == (2 * (4 + 2 + 1),)  # CartPole's, two actions, a reward; stacked
    exported = fasttrain("export", f"run={done.folder}", "format=torchscript").ok()
    assert "pi_h float32 (batch, 1, 16), vf_h float32 (batch, 1, 16)" in exported.out
    assert "pi_c" not in exported.out


class Picture(RandomEnv):
    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Discrete(2))


WRONG = "settings that do not go with memory"


@pytest.mark.parametrize("typed", wrong_inputs(WRONG))
def test_what_does_not_go_with_memory_is_refused_by_name(fasttrain: RunCommand, typed: str):
    done = fasttrain(*typed.split(), "checkup=off", "total_timesteps=2048")
    done.refused()
    assert_says(WRONG, typed, done.err.strip())


class FirstTold(PlainEnv):
    """Only the first observation says which action pays; episodes of 4 steps."""

    observation_space, length = spaces.Box(-1, 1, (1,), np.float32), 4

    def seen(self) -> Any:
        self.right = self.right if self.time else int(self.np_random.integers(2))
        return np.array([0 if self.time else 2 * self.right - 1], np.float32)

    def paid(self, action: Any) -> Any:
        return float(action == self.right)


def test_evaluation_hands_states_on_and_resets_them_where_episodes_begin():
    """A hand-made LSTM: the cell adds up the observations, so its sign is the first one of the episode."""
    env = DummyVecEnv([FirstTold] * 3)
    net = {"lstm_hidden_size": 1, "net_arch": [], "ortho_init": False}
    policy = (model := RecurrentPPO("MlpLstmPolicy", env, device="cpu", policy_kwargs=net)).policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.lstm_actor.bias_ih_l0.copy_(torch.tensor([20.0, 20.0, 0.0, 20.0]))  # gates open: input, forget, output
        policy.lstm_actor.weight_ih_l0[2] = 20.0  # the cell's input is the observation's sign
        policy.action_net.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    assert evaluate(model, env, episodes=30, deterministic=True, seed=0)["mean_reward"] == 4.0
