from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sb3_contrib import MaskablePPO

from conftest import Finished, RunCommand, configured
from fasttrain.errors import ConfigError
from fasttrain.runs.state import check_identity, digest_of, identity, is_retraced


@pytest.fixture
def run(fasttrain: RunCommand) -> Finished:
    done = fasttrain("+profile=speed", "num_envs=8", "algo.rollout_size=256", "batch_size=64", "checkup=off",
                     "eval.episodes=2", "total_timesteps=512", "checkpoint_every=256")  # fmt: skip
    assert done.exit_code == 0, done.err
    shutil.rmtree(done.folder / "checkpoints" / "step_000000000512")
    return done


def changed(folder: Path, **parts: object) -> None:
    """State with other parts, and the manifest that fits it: as if somebody had written it so."""
    from fasttrain.saving.checkpoints import CheckpointFolder

    state = {**json.loads((folder / "state.json").read_text()), **parts}
    files = {name: (folder / name).read_bytes() for name in ("arrays.npz", "model.zip")}
    CheckpointFolder(folder.parent).publish(256, {"state.json": json.dumps(state).encode(), **files})


def test_a_checkpoint_is_numbers_and_a_stock_zip(run: Finished):
    folder = run.folder / "checkpoints" / "step_000000000256"
    assert {path.name for path in folder.iterdir()} == {"state.json", "arrays.npz", "model.zip", "manifest.json"}
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        assert {"model/_last_obs", "envs/game/games", "random/torch", "model/policy_optimizer/0/exp_avg"} <= set(arrays)
    assert MaskablePPO.load(folder / "model.zip", device="cpu").num_timesteps == 256


@pytest.mark.parametrize(
    ("part", "value"),
    [("random", {}), ("run", {"progress": 3, "resumed_at": []}), ("model", {"counters": {"num_timesteps": "many"}}),
     ("envs", {}), ("random", {"python": None, "numpy": 3})],
)  # fmt: skip
def test_what_does_not_fit_is_one_clear_error(run: Finished, fasttrain: RunCommand, part: str, value: object):
    changed(run.folder / "checkpoints" / "step_000000000256", **{part: value})
    done = fasttrain("resume", f"run={run.folder}")
    assert done.exit_code == 2
    assert "the checkpoint" in done.err
    assert "Traceback" not in done.err


def test_a_run_that_stored_what_its_game_now_declares_goes_on(run: Finished, fasttrain: RunCommand):
    plan = run.json("plan.json")
    env = {"native_game": "fasttrain.games.skullking.game:SkullKingGame", "opponent_key": "opponents",
           "eval_opponent": "medium", "own": {"num_envs": {"speed": 256}}, "reward_debug_key": None}  # fmt: skip
    plan["config"]["env"] = {**{key: value for key, value in plan["config"]["env"].items() if key != "game"}, **env}
    (run.folder / "plan.json").write_text(json.dumps(plan))
    done = fasttrain("resume", f"run={run.folder}")
    assert done.exit_code == 0, done.err
    assert run.json("summary.json")["env_steps"] == 512


def test_python_envs_are_noted():
    plain = ("+profile=speed", "env.id=CartPole-v1", "algo=ppo", "vec_env=dummy")
    assert is_retraced(configured(*plain))
    assert not is_retraced(configured("+profile=speed", "vec_env=native", "checkpoint_every=10"))
    found = identity(configured(*plain))
    settings = found.pop("settings")
    assert found == {"algo": "ppo", "env": "CartPole-v1", "num_envs": 12}
    others = (
        ("seed=3", "seed"),
        ("algo.gamma=0.9", "algo.gamma"),
        ("env.kwargs.sutton_barto_reward=true", "env.kwargs"),
    )
    for typed, key in others:
        other = identity(configured(*plain, typed))["settings"]
        assert [name for name in other if other[name] != settings[name]] == [key]


def test_an_env_whose_module_was_moved_is_the_same_env():
    today = configured("env.entry_point=fasttrain_games.skullking.env:SkullKingEnv")
    stored = identity(today)
    stored["env"] = "fasttrain.games.skullking.env:SkullKingEnv"
    stored["settings"]["env.entry_point"] = digest_of(stored["env"])
    check_identity(stored, today)
    stored["settings"]["env.entry_point"] = digest_of("another")
    with pytest.raises(ConfigError, match="the checkpoint is of another env"):
        check_identity(stored, today)
