"""scripts/learning_recurrent.py and its tables: cells, resuming, the gate. Trains nothing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fasttrain.cli.compose import configured

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LEARNING = ("learning_rate", "n_epochs", "gamma", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "max_grad_norm",
            "target_kl", "rollout_size", "normalize_advantage")  # fmt: skip


@pytest.fixture
def recurrent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("learning_recurrent")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    for key in ("PYTHONPATH", "FASTTRAIN_ENGINE_SWITCH_AT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(key, "")  # main() sets them, for its cells
    return module


def cell(seed: int, final: float, measure: str = "win_rate", **more: Any) -> dict[str, Any]:
    """As scripts/learning.py leaves it."""
    final_figures = {"mean_reward": 0.0, measure: final, "score_diff": None}
    seconds = {"wall_s": 3.0, "elapsed_s": 5.0, "cpu_share": 0.8}
    rest = {"env_steps": 1000, "curve": [0.0] * 50, "sampled": {}, "trail": []}
    return {"seed": seed, **seconds, **rest, "final": final_figures, **more}


def test_all_arms_have_a_seed_before_any_has_the_next_and_none_runs_twice(
    recurrent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def run_cell(task: Any, overrides: list[str], seed: int) -> dict[str, Any]:
        arm = "stock" if "profile=baseline" in overrides else "none" if "algo=ppo" in overrides else "ours"
        ran.append((arm, seed))
        if len(ran) == 5:
            raise SystemExit("stopped")
        return cell(seed, {"ours": 1.0, "stock": 0.99, "none": 0.5}[arm])

    monkeypatch.setattr(recurrent.learning, "run_cell", run_cell)
    with pytest.raises(SystemExit, match="stopped"):
        recurrent.main(["tmaze-50", "--seeds", "2"])
    assert ran == [("ours", 0), ("stock", 0), ("none", 0), ("ours", 1), ("stock", 1)]
    assert recurrent.main(["tmaze-50", "--seeds", "2"]) == 0
    assert ran[5:] == [("stock", 1), ("none", 1)]
    recurrent.main(["tmaze-50", "--seeds", "3", "--arms", "no memory"])
    assert ran[7:] == [("none", 2)]
    recurrent.main(["tmaze-50", "--show"])
    assert len(ran) == 8
    stored = json.loads((tmp_path / "learning-recurrent-tmaze-50.json").read_text(encoding="utf-8"))
    assert len(stored["cells"]) == 7
    assert stored["cells"][0]["curve"] == [0.0] * 10
    assert "trail" not in stored["cells"][0]
    assert stored["gate"]["pairs"] == 2
    assert stored["gate"]["verdict"] == "not enough seeds"
    assert "tmaze-50, no memory" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "verdict"), [(0.99, "pass"), (0.5, "fail")])
def test_the_gate_is_that_of_compare(recurrent: ModuleType, ours: float, verdict: str) -> None:
    cells = [
        {"arm": arm, "overrides": recurrent.overrides_of(recurrent.TASKS["tmaze-10"], arm), **cell(seed, final)}
        for seed in range(5)
        for arm, final in (("fasttrain", ours), ("stock", 1.0))
    ]
    found = recurrent.gate("tmaze-10", cells)
    assert (found.verdict, found.margin, found.pairs) == (verdict, 0.03, 5)
    others = [{**each, "overrides": ["num_envs=1"]} for each in cells]  # of other settings
    assert recurrent.gate("tmaze-10", others) is None
    assert recurrent.gate("pendulum", cells) is None


def test_one_seed_is_stored_as_json(recurrent: ModuleType, tmp_path: Path) -> None:
    task = recurrent.TASKS["cartpole"]
    cells = [
        {"arm": arm, "overrides": recurrent.overrides_of(task, arm), **cell(0, 100.0, "mean_reward")}
        for arm in ("fasttrain", "stock")
    ]
    recurrent.store(tmp_path / "one.json", "cartpole", cells)
    stored = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert stored["gate"]["low"] is None
    assert "cores" in stored["machine"]


def test_arms_differ_in_memory_alone(recurrent: ModuleType) -> None:
    """Profiles would choose other values for PPO and for stock's: what they choose of learning is typed."""
    for name, task in recurrent.TASKS.items():
        if name == "memory-s7":  # its package may not be there
            continue
        learnt = []
        for arm in task.arms:
            config = configured(recurrent.overrides_of(task, arm))
            algo = {key: getattr(config.algo, key, None) for key in LEARNING}  # MaskablePPO cannot set one of them
            learnt.append((algo, config.batch_size, config.num_envs, config.total_timesteps, config.env.id))
        assert learnt[1:] == learnt[:-1], name


def test_unknown_tasks_are_refused(recurrent: ModuleType) -> None:
    with pytest.raises(SystemExit) as refused:
        recurrent.main(["go"])
    assert refused.value.code == 2


def test_figures(recurrent: ModuleType) -> None:
    found = recurrent.figures({0: cell(0, 0.4, curve=[0.0] * 10), 1: cell(1, 0.6, curve=[1.0] * 10)}, "win_rate")
    assert (found["seeds"], found["mean"], found["range"]) == (2, 0.5, (0.4, 0.6))
    assert found["interval"] == pytest.approx((0.5 - 1.2706, 0.5 + 1.2706), abs=1e-3)
    assert (found["cpu_s"], found["curve"], found["score_diff"]) == (4.0, [0.5] * 10, None)


def test_the_page_shows_what_is_stored(recurrent: ModuleType, tmp_path: Path) -> None:
    rendering = importlib.import_module("rendering_recurrent")
    assert rendering.TITLES.keys() <= recurrent.TASKS.keys()
    for name in rendering.TITLES:
        task = recurrent.TASKS[name]
        cells = [
            {
                "arm": arm,
                "overrides": recurrent.overrides_of(task, arm),
                **recurrent.kept(cell(seed, 0.75, task.measure)),
            }
            for arm in task.arms
            for seed in range(1 if name == "skullking" else 5)
        ]
        recurrent.store(recurrent.path_of(name), name, cells)
    text = rendering.learned(importlib.import_module("rendering").loader(tmp_path))
    assert "| T-maze of length 10 | fasttrain | 5 | 1,000 | 75.0 % [75.0, 75.0] | 75, 75 | 3 | 4 | pass: +0.0" in text
    assert "| Skull King | all cards shown, no memory | 1 | 1,000 | 75.0 % | - | 3 | 4 | |" in text
    assert "| CartPole without velocities | fasttrain | 5 | 1,000 | 0.75 [0.75, 0.75] |" in text


def test_where_the_gate_is_open_the_curves_are_told(recurrent: ModuleType, tmp_path: Path) -> None:
    rendering, task = importlib.import_module("rendering_recurrent"), recurrent.TASKS["cartpole"]
    cells = [
        {
            "arm": arm,
            "overrides": recurrent.overrides_of(task, arm),
            **cell(seed, 100.0 * (seed % 3), "mean_reward", curve=[height + seed * (arm == "stock")] * 10),
        }
        for arm, height in (("fasttrain", 52.0), ("stock", 50.0))
        for seed in range(5 if arm == "stock" else 2)
    ]
    recurrent.store(tmp_path / "one.json", "cartpole", cells)
    stored = json.loads((tmp_path / "one.json").read_text(encoding="utf-8"))
    assert stored["gate"]["verdict"] == "not enough seeds"
    (note,) = rendering._open_note("cartpole", "CartPole", stored)
    assert "over 2 seeds; the means of the whole training curves differ by +1.5 [" in note
    assert rendering._open_note("cartpole", "CartPole", {**stored, "gate": {"verdict": "pass"}}) == []
