"""`algo.cell` and `algo.memory_inputs` from the command line: what runs, what the plan says of it, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from conftest import RunCommand
from fasttrain.algos.recurrent import RecurrentPPO
from fasttrain.algos.recurrent_policies import GRU
from toys import RandomEnv, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
CART = ("env.id=CartPole-v1", "algo=recurrent_ppo", "algo.lstm_hidden_size=16", "eval.episodes=4")
SHORT = ("total_timesteps=256", "num_envs=4", "algo.rollout_size=128", "batch_size=32", "algo.n_epochs=1")
SKULL = ("env=skullking", "algo=maskable_recurrent_ppo", "algo.lstm_hidden_size=16", "eval.episodes=4")


def rows_of(done: Any) -> dict[str, Any]:
    return {row["flag"]: row for row in done.json("plan.json")["flags"]}


def test_a_run_with_another_cell(fasttrain: RunCommand):
    told = ("algo.memory_inputs=[action,reward]", "env.normalize=[obs]", "env.frame_stack=2")
    done = fasttrain("+profile=speed", *CART, *SHORT, "algo.cell=gru", *told)
    assert done.exit_code == 0, done.err
    rows = rows_of(done)
    assert (rows["algo.cell"]["effective"], rows["algo.cell"]["class"]) == ("gru", "trade-off")
    assert rows["algo.memory_inputs"]["effective"] == ["action", "reward"]
    assert rows["fused_update"]["effective"] == "off"
    told_why = "a GRU is computed on PyTorch: compiled kernels serve LSTMs alone"
    assert rows["fused_update"]["reason"].startswith(told_why)
    assert f"{told_why}" in done.out
    model = RecurrentPPO.load(done.folder / "model.zip", device="cpu")
    assert isinstance(model.policy.lstm_actor, GRU)
    assert model.observation_space.shape == (2 * (4 + 2 + 1),)  # CartPole's, two actions, a reward; stacked
    again = fasttrain("eval", f"run={done.folder}")
    assert again.exit_code == 0, again.err
    greedy = again.json("eval.json")["quality"]["greedy"]
    assert greedy == {key: done.json("summary.json")["quality"][key] for key in greedy}
    exported = fasttrain("export", f"run={done.folder}", "format=torchscript")
    assert exported.exit_code == 0, exported.err
    assert "pi_h float32 (batch, 1, 16), vf_h float32 (batch, 1, 16)" in exported.out
    assert "pi_c" not in exported.out


def test_without_kernels_the_cell_learns_by_stocks_own_steps(fasttrain: RunCommand):
    """engine=fast with fused_update=off: padded sequences through sb3-contrib's methods."""
    found = []
    for fused in ("off", "auto"):
        done = fasttrain(*CART, *SHORT, "engine=fast", "vec_env=dummy", f"fused_update={fused}", "algo.cell=gru")
        assert done.exit_code == 0, done.err
        found.append(RecurrentPPO.load(done.folder / "model.zip", device="cpu").policy.state_dict())
    padded, grouped = found
    assert any(not torch.equal(padded[name], grouped[name]) for name in padded)
    assert max(float((padded[name] - grouped[name]).abs().max()) for name in padded) < 1e-5


def test_masks_and_inputs_take_a_native_game_in_its_single_form(fasttrain: RunCommand):
    done = fasttrain("+profile=speed", *SKULL, *SHORT, "algo.cell=gru", "algo.memory_inputs=[reward]")
    assert done.exit_code == 0, done.err
    row = rows_of(done)["vec_env"]
    assert row["effective"] in ("dummy", "shared")
    assert row["reason"].startswith("algo.memory_inputs is shown by single envs, not by the native batch; ")
    played = fasttrain("play", f"run={done.folder}", "play.speed=1000", "play.seed=1", "opponent=random")
    assert played.exit_code == 0, played.err


def test_groups_of_workers(fasttrain: RunCommand):
    groups = ("vec_env=shared", "num_workers=2", "schedule=first_ready")
    done = fasttrain("+profile=speed", *CART, *SHORT, *groups, "algo.cell=gru", "algo.memory_inputs=[action]")
    assert done.exit_code == 0, done.err
    assert rows_of(done)["schedule"]["effective"] == "first_ready"
    assert done.json("perf.json")["total"]["updates"] == 8


class Picture(RandomEnv):
    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Discrete(2))


FAST = ("engine=fast",)
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "stock": ((*CART, "engine=stock", "algo.cell=gru"), "algo.cell=gru with engine=stock: stock has the LSTM alone"),
    "baseline": (("+profile=baseline", *CART, "algo.cell=gru"), "algo.cell=gru with engine=stock: "),
    "kernels": ((*CART, *FAST, "vec_env=dummy", "algo.cell=gru", "fused_update=on"),
                "fused_update=on: no compiled kernels for this policy (a GRU is computed on PyTorch: "),
    "exact": (("+profile=exact", *CART, "algo.cell=gru"), "algo.cell=gru with profile=exact: stock has the LSTM alone"),
    "exact, masked": (("+profile=exact", *SKULL, "algo.cell=gru"), "algo.cell=gru with profile=exact: "),
    "no such cell": ((*CART, *FAST, "algo.cell=lru"), "algo.cell=lru: "),
    "no such input": ((*CART, *FAST, "algo.memory_inputs=[time]"), "algo.memory_inputs"),
    "an algorithm without memory": (("env.id=CartPole-v1", "algo=ppo", "algo.cell=gru"),
                                    "algo.cell means nothing for algo=ppo (only for recurrent_ppo, maskable_"),
    "inputs without memory": (("env.id=CartPole-v1", "algo=dqn", "algo.memory_inputs=[action]"),
                              "algo.memory_inputs means nothing for algo=dqn (only for recurrent_ppo, maskable_"),
    "twice": ((*CART, *FAST, "algo.policy_kwargs.cell=gru"), "algo.policy_kwargs.cell is a key of its own"),
    "the LSTM's arguments": ((*CART, *FAST, "vec_env=dummy", "algo.cell=gru",
                              "algo.policy_kwargs.lstm_kwargs={bias: false}"),
                             "cell=gru with lstm_kwargs={'bias': False}"),
    "native": ((*SKULL, *FAST, "vec_env=native", "algo.memory_inputs=[action]"),
               "algo.memory_inputs=['action'] does not go with the native batch of fasttrain/SkullKing-v0"),
    "a VectorEnv": ((*CART, *FAST, "vec_env=vector", "algo.memory_inputs=[action]"),
                    "algo.memory_inputs=['action'] does not go with a VectorEnv"),
    "engines": (("env=go", "algo=maskable_recurrent_ppo", *FAST, "algo.memory_inputs=[action]"),
                "algo.memory_inputs=['action'] does not go with env.backend=daemons"),
    "self-play": ((*SKULL, *FAST, "opponent=self", "vec_env=auto", "algo.memory_inputs=[action]"),
                  "opponent=self with algo.memory_inputs: the opponents see the env's own observations"),
    "images": (("env.entry_point=test_cells_and_inputs:Picture", *CART[1:], *FAST, "algo.memory_inputs=[action]"),
               "numbers are added to a Box with one axis or to a Dict: put images into a Dict"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_by_name(fasttrain: RunCommand, case: str):
    typed, message = REFUSED[case]
    done = fasttrain(*typed, "checkup=off", "total_timesteps=2048", "eval.episodes=2")
    assert done.exit_code == 2, done.err
    assert done.err.startswith("fasttrain: error: ")
    assert done.err.count("\n") == 1
    assert message in done.err
