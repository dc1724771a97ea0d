from __future__ import annotations

import base64
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sb3_contrib import MaskablePPO as StockMaskablePPO
from stable_baselines3 import DQN, PPO

from conftest import Finished, RunCommand
from fasttrain.runs.envs import this_machine
from plain_env import PlainEnv
from resume_cases import episodes_of

SMALL = ("algo.rollout_size=512", "batch_size=128", "algo.n_epochs=2", "eval.episodes=8", "num_envs=8", "checkup=off")


@pytest.fixture
def skull_king(trained: RunCommand) -> Finished:
    return trained("+profile=speed", *SMALL, "total_timesteps=2048", "log_every=8", "train_log_enabled=true",
                   "train_log_to_file=true", "train_log_to_console=true", "eval_every=1024", "eval_async=false",
                   "checkpoint_every=1024", "seed=7")  # fmt: skip


def test_what_a_run_leaves(skull_king: Finished):
    names = {path.name for path in skull_king.folder.iterdir()}
    assert {
        "plan.json", "model.zip", "best_model.zip", "checkpoints", "episodes.csv", "progress.csv", "perf.json",
        "summary.json", ".hydra",
    } <= names  # fmt: skip
    assert not {"checkup.json", "vecnormalize.npz", "evaluating"} & names
    found = sorted((skull_king.folder / "checkpoints").iterdir())
    assert [folder.name for folder in found] == ["step_000000001024", "step_000000002048"]
    StockMaskablePPO.load(found[0] / "model.zip", device="cpu")
    said = skull_king.json("status.json")
    assert (said["phase"], said["env_steps"], said["total_timesteps"]) == ("done", 2048, 2048)
    assert said["said"].startswith("everything is in ")
    summary = skull_king.json("summary.json")
    assert {
        "schema", "version", "status", "env_steps", "wall_s", "startup_s", "steps_per_s", "updates", "update_ratio",
        "perf", "limits", "utilization", "quality", "plan", "seed", "overrides", "model",
    } <= set(summary)  # fmt: skip
    assert (summary["status"], summary["env_steps"], summary["seed"]) == ("done", 2048, 7)
    assert summary["updates"] == 2048 // 512 * 2 * (512 // 128)
    assert summary["update_ratio"] == summary["updates"] / 2048
    assert summary["startup_s"] < summary["first_update_s"] < summary["startup_s"] + summary["wall_s"]
    assert "total_timesteps=2048" in summary["overrides"]
    assert set(summary["quality"]) >= {"mean_reward", "win_rate", "score_diff", "end_reason", "episodes", "ci95"}
    assert summary["quality"]["episodes"] == 8
    rows = skull_king.table("episodes.csv")
    assert len(rows) == skull_king.json("summary.json")["episodes"] >= 24
    assert [int(row["episode"]) for row in rows] == list(range(1, len(rows) + 1))
    assert {"return", "length", "wall_s", "is_win", "score", "score_diff", "winner", "end_reason"} <= set(rows[0])
    assert all(int(row["length"]) == 65 for row in rows), "ten rounds: 10 bids and 55 cards"


def test_phases_cover_the_wall_time_and_what_is_printed(skull_king: Finished):
    total = skull_king.json("perf.json")["total"]
    phases = [value for key, value in total.items() if key.endswith("_ms") and key != "enemy_turn_ms"]
    assert sum(phases) == pytest.approx(total["wall_s"] * 1e6 / total["env_steps"], rel=1e-3)
    assert total["covered_share"] >= 0.9  # of a run of a moment; ≥ 0.98 of a real one is the benchmark's business
    for phase in ("action_ms", "env_step_ms", "buffer_ms", "train_ms", "eval_ms", "checkpoint_ms", "log_ms"):
        assert total[phase] > 0, phase
    assert 0 < total["enemy_turn_ms"] < total["env_step_ms"]
    told = ("Plan: what differs from a plain SB3 script", "enemy_turn_ms", "Quality", "[EVAL] 1,024 steps",
            "explained_variance")  # fmt: skip
    assert [text for text in told if text not in skull_king.out] == []
    assert skull_king.out.count("[PERF] steps/s") >= 2
    assert len((skull_king.folder / "progress.csv").read_text().splitlines()) >= 2


def test_the_model_is_stock_and_needs_no_fasttrain(skull_king: Finished):
    model = StockMaskablePPO.load(skull_king.folder / "model.zip", device="cpu")
    masks = np.zeros(86, bool)
    masks[5] = True
    action, _ = model.predict(np.zeros(model.observation_space.shape, np.float32), action_masks=masks)
    assert action == 5
    with zipfile.ZipFile(skull_king.folder / "model.zip") as archive:
        parts = json.loads(archive.read("data")).values()
    texts = [part[":serialized:"] for part in parts if isinstance(part, dict) and ":serialized:" in part]
    pickles = [base64.b64decode(text) for text in texts]
    assert len(pickles) > 5
    assert not any(b"fasttrain" in pickled for pickled in pickles), "it plays where fasttrain cannot be imported"


def weights(done: Finished, stock: Any = StockMaskablePPO) -> dict[str, Any]:
    model = stock.load(done.ok().folder / "model.zip", device="cpu")
    return {name: tensor.tolist() for name, tensor in model.policy.state_dict().items()}


def test_same_seed_same_weights_and_evaluation_changes_nothing(fasttrain: RunCommand):
    arguments = ("+profile=speed", *SMALL, "total_timesteps=1024", "seed=1")
    plain = fasttrain(*arguments)
    evaluated = fasttrain(*arguments, "eval_every=512", "eval_async=false")  # beside: test_evaluator_background_eval.py
    assert weights(plain) == weights(evaluated) != weights(fasttrain(*arguments, "seed=2"))
    assert not (plain.folder / "progress.csv").exists(), "it was not asked for"
    assert "train/" not in plain.out


@pytest.mark.parametrize(("algo", "stock"), [("ppo", PPO), ("dqn", DQN)])
def test_any_gymnasium_env(fasttrain: RunCommand, algo: str, stock: type[PPO] | type[DQN]):
    extra = ("algo.rollout_size=96", "batch_size=48") if algo == "ppo" else ("warmup_steps=100",)
    done = fasttrain("+profile=speed", "env.id=CartPole-v1", f"algo={algo}", "total_timesteps=192", "eval.episodes=4",
                     "vec_env=dummy", "num_envs=12", *extra).ok()  # fmt: skip
    summary = done.json("summary.json")
    assert summary["quality"]["win_rate"] is None
    # PPO: 2 rollouts × 10 epochs × 2 minibatches; DQN: 10 after each vector step of 12 once 100 transitions are there
    assert summary["updates"] == (2 * 10 * 2 if algo == "ppo" else (192 // 12 - 8) * 10)
    stock.load(done.folder / "model.zip", device="cpu")


class Duel(PlainEnv):
    length = 5

    def told(self) -> dict[str, Any]:
        return {"perf": {"enemy_turn_ms": 2.0}}


CARTPOLE = ("env.id=CartPole-v1", "algo=ppo", "num_envs=4", "algo.rollout_size=128", "batch_size=64", "algo.n_epochs=1",
            "total_timesteps=256", "eval.episodes=2", "checkup=off")  # fmt: skip


def test_the_opponents_time_is_told_of_python_envs_and_of_stock_classes(fasttrain: RunCommand):
    own = f"env.entry_point={__name__}:Duel"
    done = fasttrain("+profile=speed", *CARTPOLE, "env.id=null", own, "vec_env=dummy")
    assert done.ok().json("perf.json")["total"]["enemy_turn_ms"] == pytest.approx(2000.0)  # 2 ms × 1,000 steps
    done = fasttrain("+profile=baseline", *SMALL, "num_envs=4", "vec_env=dummy", "total_timesteps=512")
    total = done.ok().json("perf.json")["total"]
    assert 0 < total["enemy_turn_ms"] < total["env_step_ms"]


def test_plan_json_says_where_each_value_came_from(trained: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOG_EVERY", "77")
    done = trained("+profile=speed", *CARTPOLE, "vec_env=dummy")
    rows = {row["flag"]: row for row in done.json("plan.json")["flags"]}
    assert (rows["num_envs"]["source"], rows["num_envs"]["effective"]) == ("command line", 4)
    assert (rows["log_every"]["source"], rows["log_every"]["effective"]) == ("environment", 77)
    assert (rows["engine"]["source"], rows["engine"]["class"]) == ("profile speed", "exact")
    assert rows["gradient_accumulation"]["source"] == "default"


def test_shared_workers_learn_what_one_process_learns(fasttrain: RunCommand):
    one, other = (fasttrain("+profile=exact", *CARTPOLE, f"vec_env={kind}") for kind in ("dummy", "shared"))
    assert weights(one, PPO) == weights(other, PPO)
    assert one.json("summary.json")["quality"]["mean_reward"] == other.json("summary.json")["quality"]["mean_reward"]
    assert episodes_of(one.folder) == episodes_of(other.folder)
    parts = other.json("perf.json")["total"]
    assert parts["slowest_worker_ms"] + parts["transport_ms"] == pytest.approx(parts["env_step_ms"], abs=1e-3)
    assert "  of it transport_ms" in other.out
    assert "transport_ms" not in one.out


def test_windows_is_seen(monkeypatch: pytest.MonkeyPatch):
    """What a plan makes of it: tests/spec/test_stepping.py."""
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert this_machine().windows


HOOKING = """
from stable_baselines3.common.callbacks import BaseCallback

class Hooking(BaseCallback):
    def _on_step(self):
        if self.num_timesteps == 128:
            self.model.policy.action_net.register_forward_hook(lambda *_: None)
        return True
"""


def test_kernels_that_serve_no_more_are_told(fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hooking.py").write_text(HOOKING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = fasttrain("+profile=speed", *CARTPOLE, "vec_env=dummy", "callbacks=[hooking:Hooking]").ok()
    assert done.out.count("from here on PyTorch computes, not the compiled kernels: ") == 1
