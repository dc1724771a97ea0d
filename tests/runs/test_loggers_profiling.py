"""profiler=…: the tables it leaves, and that nothing is left on afterwards."""

from __future__ import annotations

import json
import pstats
import sys
from pathlib import Path

import pytest

from conftest import RunCommand
from fasttrain.errors import ConfigError
from fasttrain.runs import loggers as module
from fasttrain.runs.loggers import TraceEnd, check_profiler, profiling

SMALL = ("env.id=CartPole-v1", "algo=ppo", "vec_env=dummy", "num_envs=2", "algo.rollout_size=64", "batch_size=32",
         "algo.n_epochs=1", "total_timesteps=128", "eval.episodes=2", "live=off", "report=false",
         "torch_threads=1", "+profile=baseline")  # fmt: skip


def wasteful(crash: int = 0) -> int:
    total = 0
    for number in range(100_000):  # nothing is called, so that no other function shares the time
        total += number * number
    return total + len(crash) if crash else total


def test_off_watches_nothing(tmp_path: Path):
    said: list[str] = []
    with profiling("off", tmp_path, said.append) as callbacks:
        assert sys.getprofile() is None
    assert (list(callbacks), said, list(tmp_path.iterdir())) == ([], [], [])


def test_cprofile_leaves_two_tables_even_of_a_crash(tmp_path: Path):
    said: list[str] = []
    with pytest.raises(TypeError), profiling("cprofile", tmp_path, said.append):
        wasteful(1)
    text = (tmp_path / "profile.txt").read_text(encoding="utf-8")
    assert text.index("Ordered by: internal time") < text.index("Ordered by: cumulative time")
    assert "(wasteful)" in text
    functions = {name for _, _, name in pstats.Stats(str(tmp_path / "profile.prof")).stats}
    assert "wasteful" in functions
    assert "not comparable" in said[0]
    assert said[1].split()[:2] == ["ncalls", "tottime"]
    assert "(wasteful)" in said[2], "it takes most of its own time"
    assert said[-1] == f"profile: {tmp_path / 'profile.txt'}, {tmp_path / 'profile.prof'}"
    assert sys.getprofile() is None


def test_pyinstrument_leaves_a_tree(tmp_path: Path):
    pytest.importorskip("pyinstrument")
    said: list[str] = []
    with profiling("pyinstrument", tmp_path, said.append):
        for _ in range(10):
            wasteful()
    assert "wasteful" in (tmp_path / "profile.txt").read_text(encoding="utf-8")
    assert "<html" in (tmp_path / "profile.html").read_text(encoding="utf-8")
    assert any("wasteful" in line for line in said)


def test_a_missing_package_is_said_before_training(monkeypatch: pytest.MonkeyPatch, fasttrain: RunCommand):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    check_profiler("cprofile")
    with pytest.raises(ConfigError, match=r"pip install fasttrain\[profile\]"):
        check_profiler("pyinstrument")
    done = fasttrain(*SMALL, "profiler=pyinstrument")
    assert done.exit_code == 2
    assert not (done.folder / "plan.json").exists()


class Watched:
    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


def test_a_trace_ends_once():
    watched = Watched()
    end = TraceEnd(watched, most_s=1e9)
    assert end._on_step()
    assert (watched.stopped, end.seconds) == (0, 0.0)
    end._most_s = 0.0
    assert end._on_step()
    assert end._on_step()
    end.stop()
    assert watched.stopped == 1
    assert end.seconds > 0


@pytest.mark.filterwarnings("default")  # torch's profiler warns of its own parts
def test_a_profiled_run_says_so(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "profiler=torch")
    assert done.exit_code == 0, done.err
    assert done.json("summary.json")["profiler"] == "torch"
    assert done.json("plan.json")["config"]["profiler"] == "torch"
    names = {event.get("name") for event in json.loads((done.folder / "trace.json").read_text())["traceEvents"]}
    assert "aten::addmm" in names
    assert "aten::addmm" in (done.folder / "profile.txt").read_text(encoding="utf-8")
    assert "profiler=torch is on: steps/s and [PERF] of this run are not comparable" in done.out
    plain = fasttrain(*SMALL)
    assert "profiler" not in plain.json("summary.json")
    assert not (plain.folder / "profile.txt").exists()
