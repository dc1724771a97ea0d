"""What a run says of its replay buffer."""

from __future__ import annotations

import pytest

from conftest import RunCommand
from fasttrain.runs.callbacks import replay_line


@pytest.mark.parametrize("prefetch", ["off", "on"])
def test_fill_size_and_prefetching_are_said(fasttrain: RunCommand, prefetch: str):
    done = fasttrain(
        "env.id=CartPole-v1", "algo=dqn", "engine=fast", "vec_env=dummy", "num_envs=4", "total_timesteps=400",
        "warmup_steps=100", "log_every=20", "algo.buffer_size=300", "batch_size=16", f"prefetch={prefetch}",
        "eval.episodes=2",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    summary, perf = done.json("summary.json"), done.json("perf.json")
    replay = summary["replay"]
    assert perf["replay"] == replay
    assert "buffer 100%" in perf["lines"][-1]
    assert ("prefetch_hits" in perf["lines"][-1]) == (prefetch == "on")
    assert (replay["transitions"], replay["capacity"]) == (300, 300)
    assert replay["memory_bytes"] == 300 * (2 * 16 + 8 + 3 * 4)
    assert "replay buffer: 300 of 300 transitions, 0 MB when full" in done.out
    assert ("prefetch" in replay) == (prefetch == "on")
    if prefetch == "on":
        assert replay["prefetch"]["hits"] + replay["prefetch"]["waits"] == summary["updates"]
        assert "prefetched batches" in done.out


def test_the_line():
    facts = {"transitions": 1000, "capacity": 5000, "memory_bytes": 2_000_000}
    assert replay_line(facts) == "replay buffer: 1,000 of 5,000 transitions, 2 MB when full"
