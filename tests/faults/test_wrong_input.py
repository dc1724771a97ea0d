"""Wrong input gets one message on stderr, exit code 2, no traceback, and leaves no half-made model."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RunCommand

PLAIN = ("env.id=CartPole-v1", "algo=ppo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_env=4"], "unknown key 'num_env'; did you mean 'num_envs'"),
        (["algo.gama=0.9"], "unknown key 'algo.gama'; did you mean 'algo.gamma'"),
        (["num_envs=many"], "num_envs=many: expected a whole number"),
        (["num_envs=0"], "num_envs=0: must be at least 1"),
        (["batch_size=99999"], "batch_size=99999 is larger than algo.rollout_size=16384"),
        (["+profile=fast"], "profile=fast: no such profile, choose from balance, baseline, debug, exact, speed"),
        (["profile=sped"], "did you mean 'speed'"),
        (["algo=sax"], "algo=sax: no such algo, choose from"),
        (["env.id=CartPol-v1", "algo=ppo"], "CartPole-v1"),
        (["env.entry_point=no_such_module:Env", "algo=ppo"], "no_such_module"),
        (["env.entry_point=gymnasium:NoSuchClass", "algo=ppo"], "NoSuchClass"),
        (["env.id=CartPole-v1"], "offers no action masks"),
        (["updates_per_step=4"], "updates_per_step=4 means nothing for algo=maskable_ppo"),
        (["use_amp=on"], "use_amp=on with engine=stock: the stock classes cannot do that; take engine=fast"),
        (["nan_guard=never"], "nan_guard=never: not one of off, stop, rollback"),
        (["+profile=speed", "use_amp=on", "amp_dtype=float16"], "use_amp=float16 on the CPU: only CUDA has float16"),
        (
            ["engine=fast", "schedule=first_ready"],
            "schedule=first_ready: vec_env=subproc has no workers that could step apart",
        ),
        (["use_subproc_envs=fast"], "use_subproc_envs=fast"),
        (["vec_env=shared", "num_workers=9", "num_envs=4"], "workers=9 is more than num_envs=4"),
        (["env.step_timeout_s=0"], "env.step_timeout_s=0"),
        (["env.on_env_error=ignore"], "env.on_env_error=ignore"),
        (["vec_env=native", "algo=ppo"], "ignores masks"),
        (["env.kwargs.opponents=mediun"], "medium"),
        (["env.kwargs.oponents=easy"], "oponents"),
        (["tran"], "unknown command 'tran'; did you mean 'train'"),
        (["eval"], "eval needs run=FOLDER"),
        (["eval", "run=nowhere"], "no plan.json there"),
        (["num_envs=[1"], "num_envs=[1"),
        ([*PLAIN, "device=cuda:7"], "CUDA"),
        ([*PLAIN, "num_envs=1e9"], "num_envs=1000000000: must be at most 1,000,000"),
        ([*PLAIN, "workers=100000"], "workers=100000: must be at most 10,000"),
        ([*PLAIN, "algo.net_arch=[1000000,1000000]"], "2 layers of 1,000,001,000,000 weights fit into no memory"),
        ([*PLAIN, "algo.rollout_size=1000000000000"], "must be at most 10,000,000,000"),
        (["algo=dqn", PLAIN[0], "algo.buffer_size=1e15"], "must be at most 10,000,000,000"),
    ],
)
def test_one_message_and_exit_code_2(fasttrain: RunCommand, arguments: list[str], message: str):
    if arguments[-1].startswith("device=cuda"):
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    done = fasttrain(*arguments)
    assert done.exit_code == 2, done.err
    assert message in done.err
    assert done.err.startswith("fasttrain: error: ")
    assert done.err.count("\n") == 1, "one message, one line"
    assert "Traceback" not in done.err + done.out
    assert not (done.folder / "model.zip").exists()


def test_environment_variable_is_checked_too(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUM_ENVS", "x")
    done = fasttrain(*PLAIN)
    assert done.exit_code == 2
    assert "num_envs=x: expected a whole number (environment: NUM_ENVS=x)" in done.err


def test_an_env_that_raises_while_being_built(fasttrain: RunCommand, tmp_path: Path):
    (tmp_path / "broken.py").write_text(
        "import gymnasium as gym\n"
        "class Broken(gym.Env):\n    def __init__(self):\n        raise RuntimeError('no map')\n"
    )
    done = fasttrain("env.entry_point=broken:Broken", "algo=ppo")
    assert done.exit_code == 2
    assert "no map" in done.err
    assert "broken.py" in done.err


def test_traceback_on_request(fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTTRAIN_TRACEBACK", "1")
    assert "Traceback" in fasttrain("num_envs=0").err
