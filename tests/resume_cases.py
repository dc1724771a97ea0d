"""Small runs that can be resumed, and whether two of them came to the same, what tells the time left out."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def _ppo(rollout: int) -> tuple[str, ...]:
    """Five rollouts, each with a checkpoint."""
    return (f"algo.rollout_size={rollout}", "batch_size=64", "algo.n_epochs=2", "algo.net_arch=[8]", "num_envs=8",
            f"total_timesteps={5 * rollout}", f"checkpoint_every={rollout}")  # fmt: skip


def _dqn(steps: int) -> tuple[str, ...]:
    return ("algo=dqn", "algo.prioritized=true", "algo.n_steps=3", "algo.double_q=true", "algo.buffer_size=300",
            "warmup_steps=100", "batch_size=16", "updates_per_step=2", "algo.net_arch=[8]", "num_envs=8",
            "algo.target_update_interval=50", "prefetch=off", f"total_timesteps={steps}",
            "checkpoint_every=80")  # fmt: skip


PPO, DQN = _ppo(256), _dqn(640)
SMALL_PPO, SMALL_DQN = _ppo(128), _dqn(400)
SAC = ("algo=sac", "env.id=Pendulum-v1", "algo.buffer_size=100", "warmup_steps=40", "batch_size=16", "num_envs=4",
       "updates_per_step=2", "algo.net_arch=[8]", "total_timesteps=200", "checkpoint_every=40")  # fmt: skip
CART = ("env.id=CartPole-v1", "num_envs=4")
SHARED = ("vec_env=shared", "num_workers=2")
LSTM = ("algo.lstm_hidden_size=16",)
SELF = ("opponent=self", "self_play.every=4", "self_play.pool=2")
GRU = (*LSTM, "algo.cell=gru", "algo.memory_inputs=[action,reward]", "algo.n_lstm_layers=2")
WRAPPED = ("env.normalize=[obs,reward]", "env.frame_stack=3")
CORRIDOR = ("env.entry_point=toys:Corridor", "algo=ppo", "num_envs=4", "curriculum.by=learnability",
            "curriculum.tasks={short: {length: 3}, long: {length: 15}}")  # fmt: skip
ROUNDS = ("curriculum.tasks={early: {rounds: [1, 2]}, late: {rounds: [4, 5]}}", "curriculum.weights={late: 4}")
TWO = ("policies={manager: {decides: bid, algo.n_epochs: 3, returns: steps},"
       " worker: {decides: play, algo.gamma: 0.9, returns: decisions}}",)  # fmt: skip
GOALS = ("policies={manager: {goal_every: 3, goals: 2, observation: ['0:3']}, worker: {reward_key: is_success}}",
         "env.entry_point=toys:Corridor")  # fmt: skip
BITS = ("env.entry_point=toys:Bits", "algo.her=future", "algo.n_steps=1", "num_envs=4")
PYTHON_GAME = "env.entry_point=reference.skirmish_python.env:SkirmishPythonEnv"
CASES = {
    "maskable-native": SMALL_PPO,
    "maskable-native-curriculum": (*SMALL_PPO, *ROUNDS),
    "maskable-native-reuse": (*SMALL_PPO, "algo.reuse=3", "algo.target_tv=0.01"),
    "ppo-dummy-reuse": (*SMALL_PPO, *CART, *WRAPPED, "algo=ppo", "vec_env=dummy", "algo.reuse=2", "fused_update=off"),
    "maskable-native-policies": (*SMALL_PPO, *TWO),
    "maskable-self-play-policies": (*SMALL_PPO, *SELF, *TWO, "fused_update=off"),
    "ppo-dummy-curriculum": (*SMALL_PPO, *CORRIDOR, "vec_env=dummy"),
    "ppo-shared-curriculum": (*SMALL_PPO, *CORRIDOR, *SHARED),
    "ppo-dummy-goals": (*SMALL_PPO, *GOALS, "algo=ppo", "vec_env=dummy", "num_envs=4"),
    "maskable-native-eager": (*SMALL_PPO, "fused_update=off"),
    "maskable-skirmish": (*SMALL_PPO, "env=skirmish"),
    "maskable-self-play": (*SMALL_PPO, *SELF),
    "maskable-dummy-self-play": (*SMALL_PPO, *SELF, "vec_env=dummy", "num_envs=4"),
    "maskable-shared": (*SMALL_PPO, PYTHON_GAME, *SHARED, "num_envs=4"),
    "ppo-shared": (*SMALL_PPO, *CART, "algo=ppo", *SHARED),
    "ppo-dummy-wrapped": (*SMALL_PPO, *CART, *WRAPPED, "algo=ppo", "vec_env=dummy"),
    "dqn-native": SMALL_DQN,
    "dqn-native-eager": (*SMALL_DQN, "fused_update=off"),
    "dqn-dummy": (*SMALL_DQN, *CART, "vec_env=dummy", "algo.train_freq=5", "updates_per_step=3"),
    "dqn-dummy-hindsight": (*SMALL_DQN, *BITS, "vec_env=dummy"),
    "dqn-shared-hindsight": (*SMALL_DQN, *BITS, *SHARED, "algo.prioritized=false", "fused_update=off"),
    "dqn-shared": (*SMALL_DQN, *CART, *SHARED),
    "sac-dummy": (*SAC, "vec_env=dummy", "algo.action_noise=normal_0.1"),
    "recurrent-shared": (*SMALL_PPO, *CART, *LSTM, "algo=recurrent_ppo", *SHARED),
    "maskable-recurrent-self-play": (*SMALL_PPO, *LSTM, *SELF, "algo=maskable_recurrent_ppo", "algo.n_lstm_layers=2"),
    "recurrent-gru-shared": (*SMALL_PPO, *CART, *GRU, *SHARED, "algo=recurrent_ppo"),
    "maskable-recurrent-policies": (*SMALL_PPO, *LSTM, *TWO, "algo=maskable_recurrent_ppo"),
    "stock-ppo": (*SMALL_PPO, *CART, "algo=ppo", "vec_env=dummy", "engine=stock"),
}
ABOUT_TIME = ("wall_s", "t", "enemy_turn_ms", "resumed_at", "episodes_file", "curve")


def parts_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """State without what tells the time, and arrays, of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    with np.load(newest / "arrays.npz", allow_pickle=False) as arrays:
        return without(json.loads((newest / "state.json").read_text()), ABOUT_TIME), dict(arrays)


def without(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {name: without(part, names) for name, part in value.items() if name not in names}
    return [without(part, names) for part in value] if isinstance(value, list) else value


def episodes_of(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "episodes.csv").read_text().splitlines()))
    return [{name: text for name, text in row.items() if name != "wall_s"} for row in rows]


def assert_equal(folder: Path, whole: Path) -> None:
    (state, arrays), (wanted_state, wanted_arrays) = parts_of(folder), parts_of(whole)
    assert state == wanted_state
    assert_equal_arrays(arrays, wanted_arrays)
    assert episodes_of(folder) == episodes_of(whole)


def assert_equal_arrays(arrays: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(arrays) == set(wanted)
    for name, array in wanted.items():
        assert arrays[name].dtype == array.dtype, name
        if array.dtype.names:  # records have gaps between their fields, in which anything may stand
            assert (arrays[name] == array).all(), name
        else:
            assert arrays[name].tobytes() == array.tobytes(), name
