from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sb3_contrib import MaskablePPO as StockMaskablePPO
from stable_baselines3 import DQN, PPO

from conftest import Finished, RunCommand

SMALL = ("algo.rollout_size=2048", "batch_size=256", "algo.n_epochs=2", "eval.episodes=20", "num_envs=32")


@pytest.fixture
def skull_king(fasttrain: RunCommand) -> Finished:
    done = fasttrain("+profile=speed", *SMALL, "total_timesteps=8192", "log_every=16", "train_log_enabled=true",
                     "train_log_to_file=true", "eval_every=4096", "eval_async=false", "checkpoint_every=4096",
                     "seed=7")  # fmt: skip
    assert done.exit_code == 0, done.err
    return done


def test_a_run_leaves_every_file(skull_king: Finished):
    names = {path.name for path in skull_king.folder.iterdir()}
    assert {
        "plan.json", "model.zip", "best_model.zip", "checkpoints", "episodes.csv", "progress.csv", "perf.json",
        "summary.json", ".hydra",
    } <= names  # fmt: skip
    found = sorted((skull_king.folder / "checkpoints").iterdir())
    assert [folder.name for folder in found] == ["step_000000004096", "step_000000008192"]
    StockMaskablePPO.load(found[0] / "model.zip", device="cpu")


def test_summary_has_what_the_design_names(skull_king: Finished):
    summary = skull_king.json("summary.json")
    assert {
        "schema", "version", "status", "env_steps", "wall_s", "startup_s", "steps_per_s", "updates", "update_ratio",
        "perf", "limits", "utilization", "quality", "plan", "seed", "overrides", "model",
    } <= set(summary)  # fmt: skip
    assert summary["status"] == "done"
    assert summary["env_steps"] == 8192
    assert summary["updates"] == 8192 // 2048 * 2 * (2048 // 256)
    assert summary["update_ratio"] == summary["updates"] / 8192
    assert summary["startup_s"] < summary["first_update_s"] < summary["startup_s"] + summary["wall_s"]
    assert summary["seed"] == 7
    assert "total_timesteps=8192" in summary["overrides"]
    assert set(summary["quality"]) >= {"mean_reward", "win_rate", "score_diff", "end_reason", "episodes", "ci95"}
    assert summary["quality"]["episodes"] == 20
    low, high = summary["quality"]["ci95"]["win_rate"]
    assert 0 <= low <= summary["quality"]["win_rate"] <= high <= 1


def test_phases_cover_the_wall_time(skull_king: Finished):
    total = skull_king.json("perf.json")["total"]
    phases = [value for key, value in total.items() if key.endswith("_ms") and key != "enemy_turn_ms"]
    assert sum(phases) == pytest.approx(total["wall_s"] * 1e6 / total["env_steps"], rel=1e-3)
    assert total["covered_share"] >= 0.95  # of a run of a second; ≥ 0.98 of a real one is the benchmark's business
    for phase in ("action_ms", "env_step_ms", "buffer_ms", "train_ms", "eval_ms", "checkpoint_ms", "log_ms"):
        assert total[phase] > 0, phase
    assert 0 < total["enemy_turn_ms"] < total["env_step_ms"]
    assert skull_king.json("perf.json")["lines"][0].startswith("[PERF] steps/s ")


def test_episodes_csv_holds_the_games(skull_king: Finished):
    rows = list(csv.DictReader((skull_king.folder / "episodes.csv").read_text().splitlines()))
    summary = skull_king.json("summary.json")
    assert len(rows) == summary["episodes"] > 50
    assert [int(row["episode"]) for row in rows] == list(range(1, len(rows) + 1))
    assert {"return", "length", "wall_s", "is_win", "score", "score_diff", "winner", "end_reason"} <= set(rows[0])
    assert all(int(row["length"]) == 65 for row in rows), "ten rounds: 10 bids and 55 cards"


def test_what_is_printed(skull_king: Finished):
    assert "Plan: what differs from a plain SB3 script" in skull_king.out
    assert "[PERF] " in skull_king.out
    assert "enemy_turn_ms" in skull_king.out
    assert "Quality" in skull_king.out
    assert "[EVAL] 4,096 steps" in skull_king.out


def test_the_model_is_stock(skull_king: Finished):
    model = StockMaskablePPO.load(skull_king.folder / "model.zip", device="cpu")
    masks = np.zeros(86, bool)
    masks[5] = True
    action, _ = model.predict(np.zeros(model.observation_space.shape, np.float32), action_masks=masks)
    assert action == 5


def test_the_model_plays_where_fasttrain_cannot_be_imported(skull_king: Finished, tmp_path: Path):
    code = (
        "import sys, numpy as np\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'fasttrain': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from sb3_contrib import MaskablePPO\n"
        f"model = MaskablePPO.load({str(skull_king.folder / 'model.zip')!r}, device='cpu')\n"
        "masks = np.zeros(86, bool); masks[[3, 80]] = True\n"
        "actions = {int(model.predict(np.random.rand(*model.observation_space.shape).astype('float32'),"
        " action_masks=masks)[0]) for _ in range(50)}\n"
        "assert actions <= {3, 80}, actions\n"
        "assert not any(m.split('.')[0] == 'fasttrain' for m in sys.modules)\n"
        "print('played', len(actions))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("played")


def test_same_seed_same_weights_and_evaluation_changes_nothing(fasttrain: RunCommand):
    arguments = ("+profile=speed", *SMALL, "total_timesteps=4096", "seed=1")
    plain, evaluated, other = (
        fasttrain(*arguments),
        fasttrain(*arguments, "eval_every=2048", "eval_async=false"),  # beside: test_evaluator.py
        fasttrain(*arguments, "seed=2"),
    )
    weights = [
        StockMaskablePPO.load(done.folder / "model.zip", device="cpu").policy.state_dict()["action_net.weight"].numpy()
        for done in (plain, evaluated, other)
    ]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


@pytest.mark.parametrize(("algo", "stock"), [("ppo", PPO), ("dqn", DQN)])
def test_any_gymnasium_env(fasttrain: RunCommand, algo: str, stock: type[PPO] | type[DQN]):
    extra = ("algo.rollout_size=480", "batch_size=48") if algo == "ppo" else ("warmup_steps=100",)
    done = fasttrain("+profile=speed", "env.id=CartPole-v1", f"algo={algo}", "total_timesteps=960", "eval.episodes=4",
                     "vec_env=dummy", *extra)  # fmt: skip
    assert done.exit_code == 0, done.err
    summary = done.json("summary.json")
    assert summary["quality"]["win_rate"] is None
    # PPO: 2 rollouts × 10 epochs × 10 minibatches; DQN: 10 after each vector step of 12 once 100 transitions are there
    assert summary["updates"] == (2 * 10 * 10 if algo == "ppo" else (960 // 12 - 8) * 10)
    stock.load(done.folder / "model.zip", device="cpu")


def test_opponents_of_python_envs_are_timed_from_info(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "timed_duel.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Duel(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed); self.t = 0\n"
        "        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        self.t += 1\n"
        "        return np.zeros(2, np.float32), 1.0, self.t >= 5, False, {'perf': {'enemy_turn_ms': 2.0}}\n"
    )
    done = fasttrain("+profile=speed", "env.entry_point=timed_duel:Duel", "algo=ppo", "total_timesteps=480",
                     "vec_env=dummy", "algo.rollout_size=480", "batch_size=48", "eval.episodes=4")  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.json("perf.json")["total"]["enemy_turn_ms"] == pytest.approx(2000.0)  # 2 ms × 1,000 steps


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_signal_ends_the_run_with_everything_saved(fasttrain: RunCommand):
    def stop_when_training() -> None:
        deadline = time.monotonic() + 60
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=stop_when_training)
    killer.start()
    done = fasttrain("+profile=speed", *SMALL, "total_timesteps=50000000")
    killer.join()
    assert done.exit_code == 4, done.err
    summary = done.json("summary.json")
    assert (summary["status"], summary["stopped_by"]) == ("stopped", "signal")
    assert f"stopped at {summary['env_steps']:,} steps: by a signal" in done.out
    StockMaskablePPO.load(done.folder / "model.zip", device="cpu")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_flags_that_steer_logging_do_something(fasttrain: RunCommand):
    arguments = ("+profile=speed", *SMALL, "total_timesteps=4096", "log_every=8")
    silent = fasttrain(*arguments)
    assert not (silent.folder / "progress.csv").exists()
    assert "train/" not in silent.out
    loud = fasttrain(*arguments, "train_log_enabled=1", "train_log_to_console=1", "train_log_to_file=1")
    assert "explained_variance" in loud.out
    assert loud.out.count("[PERF] steps/s") >= 2
    assert len((loud.folder / "progress.csv").read_text().splitlines()) >= 2


def test_plan_json_says_where_each_value_came_from(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOG_EVERY", "77")
    done = fasttrain("+profile=speed", *SMALL, "total_timesteps=2048")
    rows = {row["flag"]: row for row in done.json("plan.json")["flags"]}
    assert (rows["num_envs"]["source"], rows["num_envs"]["effective"]) == ("command line", 32)
    assert (rows["log_every"]["source"], rows["log_every"]["effective"]) == ("environment", 77)
    assert (rows["engine"]["source"], rows["engine"]["class"]) == ("profile speed", "exact")
    assert rows["gradient_accumulation"]["source"] == "default"
    assert json.dumps(rows)


def test_stock_classes_see_the_opponents_time_too(fasttrain: RunCommand):
    done = fasttrain("+profile=baseline", *SMALL, "num_envs=4", "vec_env=dummy", "total_timesteps=2048")
    assert done.exit_code == 0, done.err
    total = done.json("perf.json")["total"]
    assert 0 < total["enemy_turn_ms"] < total["env_step_ms"]


CARTPOLE = ("env.id=CartPole-v1", "algo=ppo", "num_envs=4", "algo.rollout_size=256", "batch_size=64", "algo.n_epochs=1",
            "total_timesteps=512", "eval.episodes=4")  # fmt: skip


def test_shared_workers_learn_what_one_process_learns(fasttrain: RunCommand):
    """`vec_env` is of class exact: same seed, same model."""
    ends = []
    for vec_env in ("dummy", "shared"):
        done = fasttrain("+profile=exact", *CARTPOLE, f"vec_env={vec_env}", "checkup=off")
        assert done.exit_code == 0, done.err
        ends.append((PPO.load(done.folder / "model.zip", device="cpu").policy.state_dict(), done))
    (dummy, one), (shared, other) = ends
    assert all((dummy[name] == shared[name]).all() for name in dummy)
    assert one.json("summary.json")["quality"]["mean_reward"] == other.json("summary.json")["quality"]["mean_reward"]
    returns = [[line.split(",")[2:5] for line in (done.folder / "episodes.csv").read_text().splitlines()]
               for done in (one, other)]  # fmt: skip
    assert returns[0] == returns[1]
    parts = other.json("perf.json")["total"]
    assert parts["slowest_worker_ms"] + parts["transport_ms"] == pytest.approx(parts["env_step_ms"], abs=1e-3)
    assert "  of it transport_ms" in other.out
    assert "transport_ms" not in one.out


def test_on_windows_one_process_unless_asked(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.system", lambda: "Windows")
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    chosen = {}
    for asked in ((), ("vec_env=shared",)):
        done = fasttrain("+profile=balance", *CARTPOLE, "checkup=off", *asked)
        assert done.exit_code == 0, done.err
        chosen[asked] = {row["flag"]: row["effective"] for row in done.json("plan.json")["flags"]}["vec_env"]
    assert chosen == {(): "dummy", ("vec_env=shared",): "shared"}


HOOKING = """
from stable_baselines3.common.callbacks import BaseCallback

class Hooking(BaseCallback):
    def _on_step(self):
        if self.num_timesteps == 256:
            self.model.policy.action_net.register_forward_hook(lambda *_: None)
        return True
"""


def test_kernels_that_serve_no_more_are_told_once(
    fasttrain: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "hooking.py").write_text(HOOKING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = fasttrain("+profile=speed", *CARTPOLE, "checkup=off", "vec_env=dummy", "callbacks=[hooking:Hooking]")
    assert done.exit_code == 0, done.err
    assert done.out.count("PyTorch computes from here on, not compiled kernels: ") == 1
