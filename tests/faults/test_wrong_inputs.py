"""Wrong inputs, one of each kind and by the thousand with `-m campaign`: none is taken, each is told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from wrong_inputs import Case, in_this_process, settings
from wrong_inputs_by_hand import by_hand

from conftest import RunCommand
from fasttrain.spec.reading import all_keys

pytestmark = pytest.mark.skipif(os.name == "nt", reason="closed descriptors and signals of POSIX")
CASES: dict[str, Callable[[], list[Case]]] = {"settings": lambda: [*settings(0)], "hand": lambda: [*by_hand()]}


@pytest.mark.parametrize(
    "all_of_them", [False, pytest.param(True, marks=[pytest.mark.campaign, pytest.mark.timeout(0)])], ids=["one", "all"]
)
@pytest.mark.parametrize("part", CASES)
def test_wrong_inputs_are_told_in_one_line(
    part: str, all_of_them: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = CASES[part]()
    if part == "settings":
        tried = {argument.partition("=")[0] for case in cases for argument in case.arguments}
        assert set(all_keys()) - tried <= {"profile", "tuned", "algo"}
    if not all_of_them:
        Random(1).shuffle(cases)
        cases = [*{case.kind: case for case in cases}.values()]
    wrong = [(str(case), in_this_process(case, tmp_path / "case", capfd)) for case in cases]
    assert [each for each in wrong if each[1]] == []


PLAIN = ("env.id=CartPole-v1", "algo=ppo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_env=4"], "unknown key 'num_env'; did you mean 'num_envs'"),
        (["num_envs=many"], "num_envs=many: expected a whole number"),
        (["batch_size=99999"], "batch_size=99999 is larger than algo.rollout_size=16384"),
        (["+profile=fast"], "profile=fast: no such profile, choose from balance, baseline, debug, exact, speed"),
        (["profile=sped"], "did you mean 'speed'"),
        (["algo=sax"], "algo=sax: no such algo, choose from"),
        (["env.id=CartPol-v1", "algo=ppo"], "CartPole-v1"),
        (["env.entry_point=no_such_module:Env", "algo=ppo"], "no_such_module"),
        (["env.entry_point=gymnasium:NoSuchClass", "algo=ppo"], "NoSuchClass"),
        (["env.entry_point=broken:Broken", "algo=ppo"], "no map (broken.py:4"),
        (["nan_guard=never"], "nan_guard=never: not one of off, stop, rollback"),
        (["+profile=speed", "use_amp=on", "amp_dtype=float16"], "use_amp=float16 on the CPU: only CUDA has float16"),
        (["engine=fast", "schedule=first_ready"], "vec_env=subproc has no workers that step independently"),
        (["env.step_timeout_s=0"], "env.step_timeout_s=0"),
        (["vec_env=native", "algo=ppo"], "ignores masks"),
        (["env.kwargs.opponents=mediun"], "medium"),
        (["env.kwargs.oponents=easy"], "oponents"),
        (["tran"], "unknown command 'tran'; did you mean 'train'"),
        (["num_envs", "4"], "num_envs is a setting: type num_envs=VALUE"),
        (["eval"], "eval needs run=FOLDER"),
        (["num_envs=[1"], "num_envs=[1"),
        ([*PLAIN, "num_envs=1e9"], "num_envs=1000000000: must be at most 1,000,000"),
        (
            [*PLAIN, "algo.net_arch=[1000000,1000000]"],
            "no machine has the memory for 2 layers of 1,000,001,000,000 weights",
        ),
        (["algo=dqn", PLAIN[0], "algo.buffer_size=1e15"], "must be at most 10,000,000,000"),
    ],
)
def test_one_message_and_exit_code_2(fasttrain: RunCommand, tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "broken.py").write_text(
        "import gymnasium\nclass Broken(gymnasium.Env):\n    def __init__(self):\n"
        "        raise RuntimeError('no map')\n"
    )
    done = fasttrain(*arguments)
    done.refused(message)
    assert "Traceback" not in done.out
    assert not (done.folder / "model.zip").exists()


def test_environment_variable_is_checked_too_and_a_traceback_comes_on_request(
    fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NUM_ENVS", "x")
    monkeypatch.setenv("FASTTRAIN_TRACEBACK", "1")
    done = fasttrain(*PLAIN)
    assert done.exit_code == 2
    assert "num_envs=x: expected a whole number (environment: NUM_ENVS=x)" in done.err
    assert "Traceback" in done.err


def _to_a_closed_pipe(fd: int) -> Callable[[], None]:
    def connect() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, fd)

    return connect


def _in_a_folder_that_is_gone() -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path.cwd().rmdir()


PROCESSES: dict[str, tuple[Callable[[], None] | None, dict[str, str], str]] = {  # before it starts, environment, told
    "stdin closed": (lambda: os.close(0), {}, "num_envs"),
    "stdout closed": (lambda: os.close(1), {}, "num_envs"),
    "stdout to a closed pipe": (_to_a_closed_pipe(1), {}, "num_envs"),
    "stderr to a closed pipe": (_to_a_closed_pipe(2), {}, ""),
    "working directory gone": (_in_a_folder_that_is_gone, {}, "working directory"),
    "working directory that cannot be written": (lambda: os.chdir("/proc"), {}, "output folder"),
    "a HOME that is not there": (None, {"HOME": "/nothing/of/that/name"}, "num_envs"),
    "ASCII": (None, {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}, "num_envs"),
    "no width": (None, {"COLUMNS": "0", "LINES": "0"}, "num_envs"),
    "a TMPDIR that is not there": (None, {"TMPDIR": "/nothing/of/that/name"}, "num_envs"),
    "a variable that is no text": (None, {"NUM_ENVS": "\udcff"}, "num_envs"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", PROCESSES)
def test_a_process_tells_it_too(way: str, tmp_path: Path) -> None:
    before, environment, told = PROCESSES[way]
    command = [sys.executable, "-m", "fasttrain", *PLAIN, "num_envs=abc"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, preexec_fn=before, timeout=120,
        stdin=subprocess.DEVNULL, capture_output=True, errors="replace",
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
