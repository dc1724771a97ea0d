"""Small runs that can be resumed, and whether two of them came to the same, what tells the time left out."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PPO = ("algo.rollout_size=256", "batch_size=64", "algo.n_epochs=2", "algo.net_arch=[8]", "num_envs=8",
       "total_timesteps=1280", "checkpoint_every=256")  # fmt: skip
DQN = ("algo=dqn", "algo.prioritized=true", "algo.n_steps=3", "algo.double_q=true", "algo.buffer_size=300",
       "warmup_steps=100", "batch_size=16", "updates_per_step=2", "algo.net_arch=[8]", "num_envs=8",
       "algo.target_update_interval=50", "prefetch=off", "total_timesteps=640", "checkpoint_every=80")  # fmt: skip
SAC = ("algo=sac", "env.id=Pendulum-v1", "algo.buffer_size=100", "warmup_steps=40", "batch_size=16", "num_envs=4",
       "updates_per_step=2", "algo.net_arch=[8]", "total_timesteps=200", "checkpoint_every=40")  # fmt: skip
CART = ("env.id=CartPole-v1", "num_envs=4")
SHARED = ("vec_env=shared", "num_workers=2")
LSTM = ("algo.lstm_hidden_size=16",)
SELF = ("opponent=self", "self_play.every=4", "self_play.pool=2")
CASES = {
    "maskable-native": (*PPO,),
    "maskable-native-eager": (*PPO, "fused_update=off"),
    "maskable-skirmish": (*PPO, "env=skirmish"),
    "maskable-self-play": (*PPO, *SELF),
    "maskable-dummy-self-play": (*PPO, *SELF, "vec_env=dummy", "num_envs=4"),
    "maskable-shared": (*PPO, "env.entry_point=reference.skirmish_python.env:SkirmishPythonEnv", *SHARED, "num_envs=4"),
    "ppo-dummy": (*PPO, *CART, "algo=ppo", "vec_env=dummy"),
    "ppo-shared": (*PPO, *CART, "algo=ppo", *SHARED),
    "ppo-dummy-wrapped": (*PPO, *CART, "algo=ppo", "vec_env=dummy", "env.normalize=[obs,reward]", "env.frame_stack=3"),
    "dqn-native": (*DQN,),
    "dqn-native-eager": (*DQN, "fused_update=off"),
    "dqn-dummy": (*DQN, *CART, "vec_env=dummy"),
    "dqn-shared": (*DQN, *CART, *SHARED),
    "dqn-rounds": (*DQN, *CART, "vec_env=dummy", "algo.train_freq=5", "updates_per_step=3"),
    "sac-dummy": (*SAC, "vec_env=dummy", "algo.action_noise=normal_0.1"),
    "recurrent-shared": (*PPO, *CART, *LSTM, "algo=recurrent_ppo", *SHARED),
    "maskable-recurrent-self-play": (*PPO, *LSTM, *SELF, "algo=maskable_recurrent_ppo", "algo.n_lstm_layers=2"),
    "recurrent-gru-shared": (
        *PPO,
        *CART,
        *LSTM,
        *SHARED,
        "algo=recurrent_ppo",
        "algo.cell=gru",
        "algo.memory_inputs=[action,reward]",
        "algo.n_lstm_layers=2",
    ),
    "stock-ppo": (*PPO, *CART, "algo=ppo", "vec_env=dummy", "engine=stock"),
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
