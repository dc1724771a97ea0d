from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import configured
from fasttrain import train
from fasttrain.cli import main
from fasttrain.errors import ConfigError
from fasttrain.runs.evaluate import load_run
from fasttrain.runs.resume import changed_plan
from fasttrain.spec.plain import to_dict
from fasttrain.spec.removed import set_key

SHOP = """
from pathlib import Path
from gymnasium import spaces
from plain_env import PlainEnv
from stable_baselines3.common.callbacks import BaseCallback

class Mover(BaseCallback):
    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder).absolute()

    def _on_step(self):
        if not self.folder.with_name("moved").exists():
            self.folder.rename(self.folder.with_name("moved"))
        return True

class Shop(PlainEnv):
    sold = 0

    def __init__(self, prices=None, most=1.0, length=4, wide=2):
        self.prices, self.most, self.length = prices, most, length
        self.observation_space = spaces.Box(0, 1, (wide,))

    def seen(self):
        return self.np_random.random(self.observation_space.shape, "float32")

    def paid(self, action):
        self.sold += 1
        return min(self.prices[0, 1], self.prices[None], self.most)
"""
SETTINGS: dict[str, Any] = {
    "env.kwargs": {"prices": {(0, 1): 3.0, None: 2.0}, "most": float("inf")},
    "algo.n_steps": 16, "algo.n_epochs": 1, "batch_size": 32,
    "eval.episodes": 2, "num_envs": 2, "vec_env": "dummy", "checkpoint_every": 32, "report": False, "checkup": "off",
}  # fmt: skip


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"shop_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    return lambda **more: train(f"{name}:Shop", algo="ppo", total_timesteps=64, settings=SETTINGS, **more)


def evaluated(*arguments: str) -> float:
    assert main(["eval", "run=first", "hydra.run.dir=e", *arguments]) == 0
    quality = json.loads(Path("e/eval.json").read_text())["quality"]["greedy"]
    return float(quality["mean_reward"])


def test_eval_and_resume_build_the_env_that_trained(shop: Any, capfd: pytest.CaptureFixture[str]):
    run = shop(folder="first")
    assert run.summary["quality"]["mean_reward"] == 8.0 == evaluated()
    assert evaluated("eval.env_kwargs.length=3") == 6.0
    assert evaluated("env.kwargs.most=1.5", "eval.env_kwargs.length=2") == 3.0
    assert evaluated("env.kwargs={most: 1.5, length: 1}") == 1.5
    for typed, told in (
        ("model=best", "no best_model.zip there; the run was made without eval_every="),
        ("env.kwargs.wide=3", "the policy is for Box(0.0, 1.0, (2,), float32)"),
        ("num_envs=3", "eval takes run=…, model=…, opponent=…, eval.…, env.kwargs.… and --trust only"),
        ("eval.episodes=0", "eval.episodes=0: no episode would be played"),
    ):
        assert main(["eval", "run=first", "hydra.run.dir=e", typed]) == 2
        assert told in capfd.readouterr().err
    shutil.copy("first/model.zip", "first/best_model.zip")
    assert evaluated("model=best", "eval.env_kwargs={length: 1}") == 2.0
    first = json.loads(Path("first/plan.json").read_text())
    capfd.readouterr()
    assert main(["resume", "run=first", "total_timesteps=96"]) == 0
    assert "warning: 2 of 2 envs keep values between episodes that a checkpoint does not hold (sold)" in (
        " ".join(capfd.readouterr().out.split())
    )
    plan = json.loads(Path("first/plan.json").read_text())
    assert plan["provenance"] == first["provenance"]
    assert len(plan["resumed"]) == 1
    assert json.loads(Path("first/summary.json").read_text())["quality"]["mean_reward"] == 8.0
    shop(folder="second", seed=4)
    shutil.rmtree("first/checkpoints")
    shutil.copytree("second/checkpoints", "first/checkpoints")
    assert main(["resume", "run=first", "total_timesteps=128"]) == 2
    assert "another run: it was trained with another seed" in capfd.readouterr().err


def test_a_loop_makes_a_folder_each_and_overwrite_begins_anew(shop: Any):
    folders = {shop().folder, shop().folder}
    assert len(folders) == 2
    Path("it/daemons").mkdir(parents=True)
    shop(folder="it", on_existing="overwrite")
    (Path("it") / "daemons").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=r"folder=it holds a run \(done\): use another folder, on_existing=resume"):
        shop(folder="it")
    with pytest.raises(ConfigError, match="it holds this run, finished after 64 steps: nothing is left to do"):
        shop(folder="it", on_existing="resume")
    mover = {"callback": f"shop_{Path.cwd().name}:Mover", "folder": "it"}
    shop(folder="it", on_existing="overwrite", callbacks=[mover])
    assert not Path("it/daemons").exists()
    before, after = (json.loads(Path(place, "plan.json").read_text()) for place in ("moved", "it"))
    assert after == before
    assert {"config", "flags", "provenance"} <= after.keys()


def test_an_evaluation_that_cannot_be_is_refused_before_training(shop: Any):
    for kwargs, told in (({"wide": 5}, "the policy is for"), ({"lenght": 5}, "unknown env.kwargs.lenght")):
        with pytest.raises(Exception, match=told):
            shop(**{"folder": "bad", "on_existing": "overwrite", "eval_every": 16, "eval.env_kwargs": kwargs})
    assert not Path("bad/model.zip").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_envs", 10**9),
        ("algo.net_arch", [10**6, 10**6]),
        ("algo.rollout_size", 10**12),
        ("algo.policy_kwargs.features_extractor_kwargs.features_dim", 10**9),
    ],
)
def test_a_plan_of_sizes_that_fit_into_no_memory_is_refused_by_arithmetic(tmp_path: Path, key: str, value: Any):
    config = to_dict(configured("env.id=CartPole-v1", "algo=ppo"))
    set_key(config, key, value)
    (tmp_path / "plan.json").write_text(json.dumps({"config": config, "flags": []}))
    (tmp_path / "model.zip").touch()
    for read in (load_run, lambda folder: changed_plan(folder, configured(), ())):
        with pytest.raises(ConfigError, match=rf"its plan.json does not fit .*\({key}.* no machine has the memory"):
            read(tmp_path)
