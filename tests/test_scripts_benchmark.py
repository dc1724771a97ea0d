"""scripts/benchmark.py: equal work or no ratio; what cannot be measured here is skipped and said. Measures nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_peers")


def sample(rate: float, updates: int = 16, **more: Any) -> dict[str, Any]:
    return {"rate": rate, "env_steps": 1024, "updates": updates, "samples_per_update": 256, **more}


def test_ratio_is_taken_turn_by_turn_against_the_best(benchmark: ModuleType) -> None:
    samples = {
        "fasttrain": [sample(100.0, startup_s=5.0), sample(50.0, startup_s=7.0)],  # the machine slowed down
        "slow": [sample(10.0), sample(5.0)],
        "fast": [sample(20.0), sample(10.0)],
    }
    result = benchmark.compared("fasttrain", samples, "work")
    assert result["best_of_theirs"] == "fast"
    assert result["ratio"] == {"median": 5.0, "min": 5.0, "max": 5.0}
    assert result["startup_s"] == {"fasttrain": {"median": 6.0, "min": 5.0, "max": 7.0}}


def test_other_work_gets_no_ratio(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    samples = {"fasttrain": [sample(100.0)], "equal": [sample(10.0)], "lazy": [sample(500.0, updates=4)]}
    result = benchmark.compared("fasttrain", samples, "work")
    assert list(result["ratios"]) == ["equal"]
    assert result["unequal_work"]["lazy"]["updates"] == 4
    assert "no ratio" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no opponent did the same work"):
        benchmark.compared("fasttrain", {"fasttrain": [sample(100.0)], "lazy": [sample(500.0, updates=4)]}, "work")


def test_what_cannot_be_measured_is_skipped_and_said(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(work: str, contestant: str) -> dict[str, Any]:
        return (
            {"skipped": "not installed"} if contestant == "SBX" else sample(2.0 if contestant == "fasttrain" else 1.0)
        )

    monkeypatch.setattr(benchmark, "measure", measure)
    result = benchmark.run_work("ppo-cartpole-8", 2, peers=True)
    assert result["skipped"] == {"SBX": "not installed"}
    assert result["ratio"]["median"] == 2.0
    assert "SBX" not in result["theirs"]
    assert "Tianshou" in result["theirs"]
    benchmark.show_result(result)
    assert "SBX: not installed" in capsys.readouterr().out
    assert list(benchmark.run_work("ppo-cartpole-8", 1, peers=False)["theirs"]) == ["SB3, DummyVecEnv"]
    monkeypatch.setattr(benchmark, "measure", lambda *_: {"skipped": "no CUDA"})
    assert benchmark.run_work("ppo-gpu", 5, peers=False) is None
    assert "skipped: no CUDA" in capsys.readouterr().out


def test_gpu_work_says_that_there_is_none(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all("CUDA" in measurement()["skipped"] for measurement in benchmark.WORKS["ppo-gpu"].values())


def test_groups_of_works(benchmark: ModuleType) -> None:
    assert benchmark.works_of("ppo")[0] == "skullking-train"
    assert {"ppo-update-512", "ppo-cartpole-8", "ppo-gpu"} < set(benchmark.works_of("ppo"))
    assert benchmark.works_of("ppo-gpu") == ["ppo-gpu"]
    assert benchmark.works_of("dqn") == ["dqn-cartpole", "dqn-update-64", "dqn-update-masked"]
    assert {"per-storage-1e6", "per-tree-1e4"} < set(benchmark.works_of("per"))
    assert benchmark.works_of("all") == list(benchmark.WORKS)
    assert benchmark.works_of("nothing") == []


def test_peers_get_the_tested_torch_and_only_the_pins_named(peers: ModuleType) -> None:
    constraints = 'numpy==2.4.6; python_version >= "3.11"\ntorch==2.13.0\ntorchaudio==1\n'
    assert peers.pins_of(constraints, ("torch",)) == ["torch==2.13.0"]
    real = (SCRIPTS.parent / "constraints.txt").read_text(encoding="utf-8")
    for peer in peers.PEERS.values():
        assert (SCRIPTS / "peers" / peer.script).is_file()
        assert any(pin.startswith("torch==") for pin in peers.pins_of(real, peer.constrained))


def test_failed_installation_is_a_reason_and_is_tried_again(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str]) -> None:
        commands.append(command)
        if "pip" in command:
            raise peers.Unavailable("not installed: no such version")
        Path(command[-1]).mkdir(parents=True, exist_ok=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(peers, "_install", fail)
    for _ in range(2):
        assert peers.run_peer("SBX", {}) == {"skipped": "not installed: no such version"}
    assert len(commands) == 4
    assert commands[0][-1].startswith(str(tmp_path / "fasttrain-bench" / "sbx-"))
    pinned = Path(commands[1][commands[1].index("-c") + 1]).read_text(encoding="utf-8")
    assert "torch==" in pinned
    assert "installing SBX" in capsys.readouterr().err


def test_a_script_that_fails_is_a_reason(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scripts" / "peers").mkdir(parents=True)
    script = tmp_path / "scripts" / "peers" / "ppo_lean.py"
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    script.write_text("raise ValueError('no such env')", encoding="utf-8")
    assert peers.run_peer("lean loop", {}) == {"skipped": "does not run here: ValueError: no such env"}
    script.write_text("import sys; print('noise'); print(sys.argv[1]); print('more noise')", encoding="utf-8")
    assert peers.run_peer("lean loop", {"num_envs": 8}) == {"num_envs": 8}


@pytest.mark.parametrize("work", [{"cartpole": True}, {}], ids=["cartpole", "skullking"])
def test_both_updates_begin_with_the_same_rollout_and_weights(
    benchmark: ModuleType, work: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's buffer holds what ours collected; its update then gives what ours gives, to rounding."""
    import numpy as np
    import torch

    bench = benchmark.bench_ppo
    monkeypatch.setattr(bench, "ROLLOUT", 512)
    monkeypatch.setattr(bench, "NUM_ENVS", 4)
    full = {"net_arch": [16, 16], "batch_size": 128, "more": ("fused_update=off",), **work}
    threads = torch.get_num_threads()
    try:
        model, chosen = bench.speed_model(full)
        bench.collect_once(model)
        stock = bench.stock_twin(model, full)
        counts = [bench.count_updates(each) for each in (model, stock)]
        for each in (model, stock):
            np.random.seed(0)
            each.train()
    finally:
        torch.set_num_threads(threads)
        model.env.close()
    assert chosen["fused_update"] == "off"
    assert [count() for count in counts] == [16, 16]
    for name, ours in model.policy.state_dict().items():
        theirs = stock.policy.state_dict()[name]
        assert (ours - theirs).abs().max() < 1e-5


def test_the_update_measured_computes_as_the_plan_says(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    bench = benchmark.bench_ppo
    monkeypatch.setattr(bench, "ROLLOUT", 512)
    monkeypatch.setattr(bench, "NUM_ENVS", 4)
    threads = torch.get_num_threads()
    try:
        work = {"net_arch": [16, 16], "batch_size": 128, "cartpole": True, "more": ("use_amp=on",)}
        model, chosen = bench.speed_model(work)
    finally:
        torch.set_num_threads(threads)
    model.env.close()
    assert chosen["use_amp"] == "bfloat16"
    assert model.engine.settings.amp_dtype is torch.bfloat16


@pytest.mark.parametrize("masked", [False, True], ids=["cartpole", "skullking"])
def test_both_dqn_updates_begin_with_the_same_buffer_and_weights(
    benchmark: ModuleType, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's buffer holds what ours collected; without masks its update then gives what ours gives, to rounding."""
    import numpy as np

    bench = benchmark.bench_dqn
    monkeypatch.setattr("fasttrain.accelerators.kernels_q.kernel_calls", list)
    work = {"batch_size": 32, "transitions": 400, "calls": 1, "masked": masked}
    model = bench.our_model(work)
    bench.fill(model)
    stock = bench.stock_twin(model, work)
    assert stock.replay_buffer.size() * bench.NUM_ENVS == 400
    assert (model.replay_buffer.mask_width is not None) == masked
    assert (stock.replay_buffer.observations[-1] == model.replay_buffer.observations[-1]).all()
    assert stock.replay_buffer.observations[-1].any()
    counts = [benchmark.bench_ppo.count_updates(each) for each in (model, stock)]
    for each in (model, stock):
        np.random.seed(0)
        each.train(4, 32)
    model.env.close()
    assert [count() for count in counts] == [4, 4]
    if not masked:
        for name, ours in model.policy.state_dict().items():
            assert (ours - stock.policy.state_dict()[name]).abs().max() < 1e-5


def test_the_dqn_update_is_measured_with_kernels_and_equal_work(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from fasttrain.algos.dqn import DQN

    asked: list[Any] = []
    use_engine = DQN.use_engine
    monkeypatch.setattr(DQN, "use_engine", lambda model, kind: (asked.append(model), use_engine(model, kind))[1])
    bench = benchmark.bench_dqn
    monkeypatch.setattr(bench, "BLOCKS", 3)
    work = {"batch_size": 32, "transitions": 400, "calls": 2}
    threads = torch.get_num_threads()
    try:
        ours, theirs = (bench.update_alone(work, mine, 1) for mine in (True, False))
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == 1
    assert asked[0].engine.kind == "kernels"
    result = benchmark.compared("fasttrain", {"fasttrain": [ours], "stock": [theirs]}, "dqn-update")
    assert result["equal_work"] == {"env_steps": 0, "updates": 8.0, "samples_per_update": 32}
    assert result["unit"] == "samples per second"


def test_dqn_runs_of_ours_and_stock_do_equal_work(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock takes the hyperparameters named to ours, and counts updates as ours does (those are the config's own)."""
    import torch

    bench = benchmark.bench_dqn
    commands: list[list[str]] = []
    monkeypatch.setattr(benchmark.bench_ppo, "command_run", lambda arguments, *_: commands.append(arguments) or {})
    work = {**bench.CARTPOLE, "warmup_steps": 100, "total_timesteps": 400}
    bench.cartpole_ours(work)
    named = dict(argument.split("=", 1) for argument in commands[0])
    assert named["total_timesteps"] == "400"
    assert named["algo.net_arch"] == "[64,64]"
    assert {key.removeprefix("algo.") for key in named} >= bench.CARTPOLE["algo"].keys()
    threads = torch.get_num_threads()
    try:
        done = bench.cartpole_stock(work, False, 1)
    finally:
        torch.set_num_threads(threads)
    # The first vector step after which more than 100 steps are done is the 13th of 50: 38 are followed by 8 updates.
    assert (done["env_steps"], done["updates"], done["samples_per_update"]) == (400, 8 * 38, 64)


def test_prioritized_replay_is_measured_the_same_way_for_all(
    benchmark: ModuleType, peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = benchmark.bench_per
    monkeypatch.setattr(bench, "ROUNDS", 10)
    samples = {name: [bench.measure(name, 1000, True)] for name in ("fasttrain", "numpy, O(N)")}
    result = benchmark.compared("fasttrain", samples, "per-storage-1e3")
    assert result["equal_work"] == {"env_steps": 0, "updates": "rate", "samples_per_update": 256}
    assert result["sample_us"].keys() == result["update_us"].keys() == samples.keys()
    assert {"cpprb", "TorchRL"} <= benchmark.PEERS_ONLY

    def fail(name: str, peer: Any) -> Path:
        raise peers.Unavailable("no such version")

    monkeypatch.setattr(peers, "python_of", fail)
    assert benchmark.WORKS["per-tree-1e4"]["cpprb"]() == {"skipped": "no such version"}
