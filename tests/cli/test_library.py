from __future__ import annotations

import json
import runpy
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch

import fasttrain
from fasttrain import RunSpec, train
from fasttrain.errors import ConfigError

SMALL: dict[str, Any] = {"total_timesteps": 128, "num_envs": 2, "workers": 0, "report": False, "checkup": "off"}
EVAL = {"eval.episodes": 2, "algo.n_steps": 32, "algo.n_epochs": 1}
TINY = """
from plain_env import PlainEnv

class Tiny(PlainEnv):
    def __init__(self, length=4):
        self.length = length
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_leaves_a_run_and_returns_spec_model_summary_and_perf_and_a_spec_is_run_again_to_the_bit():
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    run = train("CartPole-v1", algo="ppo", profile="exact", settings=EVAL, **SMALL)
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == before
    assert isinstance(run.spec, RunSpec)
    assert isinstance(run.model, stable_baselines3.PPO)
    assert run.model.num_timesteps == run.summary["env_steps"] == run.perf["total"]["env_steps"] == 128
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    assert run.folder.is_absolute()
    assert run.folder.parent.parent.name == "outputs"
    assert "CartPole-v1_ppo" in run.folder.name
    assert {row.flag: row.source for row in run.spec.rows}["engine"] == "profile exact"
    assert {row.flag: row.source for row in run.spec.rows}["num_envs"] == "command line"
    action, _ = run.model.predict(np.zeros(4, np.float32))
    assert action in (0, 1)
    assert repr(run).startswith("<ppo, done: 128 steps at ")
    again = train(run.spec, folder="again")
    weights = [[*one.model.policy.state_dict().values()] for one in (run, again)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert {row.flag: row.source for row in again.spec.rows}["engine"] == "profile exact"
    other = train(run.spec, folder="other", seed=1, checkpoint_every=64)
    assert other.summary["seed"] == 1
    longer = train(run.spec, folder="other", seed=1, total_timesteps=256, on_existing="resume")
    assert longer.summary["env_steps"] == 256
    with pytest.raises(ConfigError, match="a RunSpec has its algorithm"):
        train(run.spec, algo="dqn")


def test_an_env_is_named_by_module_class_game_or_is_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tiny_game.py").write_text(TINY)
    monkeypatch.syspath_prepend(str(tmp_path))
    import tiny_game  # type: ignore[import-not-found]

    for env in ("tiny_game:Tiny", tiny_game.Tiny):
        run = train(
            env, algo="ppo", settings={**EVAL, "env.kwargs.length": 6}, engine="fast", folder=f"{env}"[:9], **SMALL
        )
        assert run.summary["quality"]["mean_reward"] == 6.0
        assert run.spec.config.env.entry_point == "tiny_game:Tiny"
    game = train("skullking", profile="exact", settings={"eval.episodes": 2, "algo.n_steps": 64}, **SMALL)
    assert game.spec.config.env.id == "fasttrain/SkullKing-v0"


def test_outside_of_the_main_thread_no_signal_is_touched():
    with ThreadPoolExecutor() as threads:
        found = threads.submit(train, "CartPole-v1", algo="ppo", engine="fast", settings=EVAL, **SMALL).result()
    assert found.summary["status"] == "done"


CARTPOLE = {"env": "CartPole-v1", "algo": "ppo"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"env": "CartPole-v1", "algo": "ppoo"}, "algo=ppoo: no such algo"),
        ({**CARTPOLE, "profile": "sped"}, "profile=sped: no such profile"),
        ({**CARTPOLE, "num_env": 3}, "unknown key 'num_env'; did you mean 'num_envs'"),
        ({**CARTPOLE, "settings": {"algo.gama": 1}}, "unknown key 'algo.gama'; did you mean 'algo.gamma'"),
        ({**CARTPOLE, "num_envs": 0}, "num_envs=0"),
        ({"env": "CartPole-v1", "settings": {"gate.margin": 1.0}}, "gate.margin=1.0 has no effect with train; to"),
        ({"env": "NoSuchEnv-v3", "algo": "ppo"}, "NoSuchEnv"),
        ({**CARTPOLE, "vec_env": "dummy", "engine": "fast", "settings": {"env.backend": "vector"}},
         "vec_env=dummy with env.backend=vector"),
        ({"settings": {"env.game": "skirmish", "env.kwargs.wide": 3}}, "env.kwargs.mission='only_war'.*unexpected"),
        ({**CARTPOLE, "num_workers": 2, "vec_env": "dummy"},
         r"workers=2 has no effect with vec_env=dummy.* \(typed: num_workers=2\)$"),
        ({**CARTPOLE, "settings": {"algo.batch_size": 64}, "batch_size": 32},
         "algo.batch_size=64 contradicts batch_size=32: they are one setting"),
    ],
)  # fmt: skip
def test_wrong_input_is_an_error_of_one_sentence(arguments: dict[str, Any], told: str):
    with pytest.raises(fasttrain.errors.FastTrainError, match=told):
        train(**arguments)


def test_a_class_of_the_script_itself_is_trained_in_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"total_timesteps": 64, "num_envs": 2, "batch_size": 32, "algo.n_steps": 32, "eval.episodes": 2}
    call = f"train(Tiny, algo='ppo', profile='balance', report=False, **{small})"
    (tmp_path / "script.py").write_text(f"{TINY}\nfrom fasttrain import train\nprint({call})\n")
    runpy.run_path("script.py", run_name="__main__")
    assert "mean reward 4" in capsys.readouterr().out
