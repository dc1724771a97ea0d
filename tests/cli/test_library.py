from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch

import fasttrain
from fasttrain import RunSpec, train
from fasttrain.cli import library
from fasttrain.errors import ConfigError
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve

SMALL: dict[str, Any] = {"total_timesteps": 256, "num_envs": 2, "workers": 0, "report": False}
EVAL = {"eval.episodes": 2, "algo.n_steps": 64, "algo.n_epochs": 1}
TINY = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Tiny(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, {}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_returns_spec_model_summary_and_perf_and_leaves_the_files_of_a_run():
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    run = train("CartPole-v1", algo="ppo", profile="exact", settings=EVAL, **SMALL)
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == before
    assert isinstance(run.spec, RunSpec)
    assert isinstance(run.model, stable_baselines3.PPO)
    assert run.model.num_timesteps == run.summary["env_steps"] == run.perf["total"]["env_steps"] == 256
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    assert run.folder.is_absolute()
    assert run.folder.parent.parent.name == "outputs"
    assert "CartPole-v1_ppo" in run.folder.name
    assert {row.flag: row.source for row in run.spec.rows}["engine"] == "profile exact"
    assert {row.flag: row.source for row in run.spec.rows}["num_envs"] == "command line"
    action, _ = run.model.predict(np.zeros(4, np.float32))
    assert action in (0, 1)
    assert repr(run).startswith("<ppo, done: 256 steps at ")


def test_a_spec_is_run_again_to_the_bit_and_may_be_changed():
    first = train("CartPole-v1", algo="ppo", profile="exact", settings=EVAL, **SMALL)
    again = train(first.spec, folder="again")
    weights = [[*one.model.policy.state_dict().values()] for one in (first, again)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert {row.flag: row.source for row in again.spec.rows}["engine"] == "profile exact"
    other = train(first.spec, folder="other", seed=1)
    assert other.summary["seed"] == 1
    with pytest.raises(ConfigError, match="a RunSpec has its algorithm"):
        train(first.spec, algo="dqn")


def test_a_folder_that_holds_a_run_is_refused_gone_on_with_or_begun_anew():
    def begin(steps: int = 128, **more: Any) -> library.Trained:
        settings = {"eval.episodes": 2, "algo.rollout_size": 64}
        small = {"num_envs": 2, "vec_env": "dummy", "batch_size": 32, "fused_update": "off", "report": False}
        return train(
            "CartPole-v1", algo="ppo", folder="it", settings=settings, checkpoint_every=64, engine="fast",
            total_timesteps=steps, **small, **more,
        )  # fmt: skip

    assert begin(on_existing="resume").summary["env_steps"] == 128, "there is nothing yet to go on with"
    with pytest.raises(ConfigError, match=r"^folder=it holds a run \(done\): take another folder, on_existing=resume"):
        begin()
    with pytest.raises(ConfigError, match="it holds this run, finished after 128 steps: nothing is left to do"):
        begin(on_existing="resume")
    longer = begin(256, on_existing="resume")
    assert (longer.summary["env_steps"], longer.summary["resumed_at"]) == (256, [128])
    assert longer.model.num_timesteps == 256
    with pytest.raises(ConfigError, match="of other values of seed, which cannot change on the way"):
        begin(512, on_existing="resume", seed=1)
    anew = begin(on_existing="overwrite", seed=1)
    assert (anew.summary["env_steps"], anew.summary["seed"], anew.summary.get("resumed_at", [])) == (128, 1, [])


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
    found: list[Any] = []
    work = lambda: found.append(train("CartPole-v1", algo="ppo", engine="fast", settings=EVAL, **SMALL))  # noqa: E731
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].summary["status"] == "done"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"env": "CartPole-v1", "algo": "ppoo"}, "algo=ppoo: no such algo"),
        ({"env": "CartPole-v1", "algo": "ppo", "profile": "sped"}, "profile=sped: no such profile"),
        ({"env": "CartPole-v1", "algo": "ppo", "num_env": 3}, "unknown key 'num_env'; did you mean 'num_envs'"),
        (
            {"env": "CartPole-v1", "algo": "ppo", "settings": {"algo.gama": 1}},
            "unknown key 'algo.gama'; did you mean 'gamma'",
        ),
        ({"env": "CartPole-v1", "algo": "ppo", "num_envs": 0}, "num_envs=0"),
        ({"env": "CartPole-v1", "settings": {"gate.margin": 1.0}}, "gate.margin=1.0 means nothing for train; to judge"),
        ({"env": "NoSuchEnv-v3", "algo": "ppo"}, "NoSuchEnv"),
        ({"settings": {"env.game": "skirmish", "env.kwargs.wide": 3}}, "env.kwargs.mission='only_war'.*unexpected"),
        (
            {"env": "CartPole-v1", "algo": "ppo", "num_workers": 2, "vec_env": "dummy"},
            r"workers=2 means nothing with vec_env=dummy.* \(typed: num_workers=2\)$",
        ),
        (
            {"env": "CartPole-v1", "algo": "ppo", "settings": {"algo.batch_size": 64}, "batch_size": 32},
            "algo.batch_size=64 contradicts batch_size=32: they are one setting",
        ),
    ],
)
def test_wrong_input_is_an_error_of_one_sentence(arguments: dict[str, Any], told: str):
    with pytest.raises(fasttrain.errors.FastTrainError, match=told):
        train(**arguments)


@pytest.mark.parametrize("profile", [None, "baseline", "speed"])
def test_sb3s_names_of_settings_come_before_what_a_profile_says(profile: str | None, monkeypatch: pytest.MonkeyPatch):
    def ready(config: Any, sources: dict[str, str], *_: Any) -> Any:
        plans.append(resolve(config, sources, EnvFacts(native=False, step_s=20e-6), Machine(2, False, False)))
        raise ConfigError("enough")

    plans: list[RunSpec] = []
    monkeypatch.setattr(library, "ready", ready)
    with pytest.raises(ConfigError, match="enough"):
        train(
            "Pendulum-v1", algo="sac", profile=profile, folder="x",
            settings={"algo.gradient_steps": 2, "algo.learning_starts": 1000},
        )  # fmt: skip
    rows = {row.flag: (row.effective, row.source) for row in plans[0].rows}
    assert rows["updates_per_step"] == (2, "command line")
    assert rows["warmup_steps"] == (1000, "command line")


def test_a_class_of_the_script_itself_is_trained_in_its_process(tmp_path: Path):
    call = (
        "train(Tiny, algo='ppo', profile='balance', total_timesteps=512, report=False, settings={'eval.episodes': 2})"
    )
    (tmp_path / "script.py").write_text(
        f"{TINY}\nif __name__ == '__main__':\n    from fasttrain import train\n    print({call})"
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
    assert "mean reward 4" in done.stdout
