from __future__ import annotations

import pytest
import torch

from conftest import RunCommand
from fasttrain.errors import ConfigError
from fasttrain.runs import train
from fasttrain.runs.engine import pick_device


@pytest.fixture(params=[0, 2])
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return int(request.param)


def test_auto_is_the_gpu_for_images_alone(count: int):
    assert pick_device("auto", "MlpPolicy") == "cpu"
    assert pick_device("auto", "CnnPolicy") == ("cuda" if count else "cpu")


@pytest.mark.parametrize("count", [2], indirect=True)
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_what_is_there_is_taken(count: int, device: str):
    assert pick_device(device, "MlpPolicy") == device


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", "cuda:x"])
@pytest.mark.parametrize("count", [0], indirect=True)
def test_without_cuda(count: int, device: str):
    with pytest.raises(ConfigError, match=f"device={device}: this machine .* has no CUDA"):
        pick_device(device, "MlpPolicy")


@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "cuda:01"])
@pytest.mark.parametrize("count", [2], indirect=True)
def test_a_gpu_too_far(count: int, device: str):
    with pytest.raises(ConfigError, match=f"device={device}: this machine has cuda:0, cuda:1"):
        pick_device(device, "MlpPolicy")


@pytest.mark.parametrize("count", [0], indirect=True)
def test_it_is_told_before_workers_start(count: int, fasttrain: RunCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "build_vec_env", lambda *_: pytest.fail("workers have started"))
    done = fasttrain("env.id=CartPole-v1", "algo=ppo", "device=cuda:7", "checkup=off")
    assert done.exit_code == 2
    assert "device=cuda:7" in done.err
