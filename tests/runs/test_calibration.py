from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numba
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.console import Console
from untouched import untouched

from conftest import configured
from fasttrain.perf.clock import PhaseClock
from fasttrain.runs import calibration as module
from fasttrain.runs.calibration import calibrate, calibrate_at_switch, expected_s, measured, settle_threads, ways_of
from fasttrain.runs.envs import build_vec_env
from fasttrain.runs.models import build_algorithm
from fasttrain.spec.checks import EnvFacts, Machine
from fasttrain.spec.plan import resolve

PPO = ("algo=ppo", "algo.net_arch=[256]", "algo.rollout_size=32", "batch_size=16")
DQN = ("algo=dqn", "algo.net_arch=[256]", "warmup_steps=4", "batch_size=8", "algo.buffer_size=100")
SLOW = {"kernels": 1740.0, "torch on 1 thread": 1300.0, "torch on 2 threads": 1240.0}
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def on_two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "PAYS_FROM_S", 30.0)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "learner_calls", lambda *_: [])  # as if all were compiled
    monkeypatch.setattr(module, "set_threads", lambda threads: threads)


def run_of(*arguments: str, algo: tuple[str, ...] = PPO, bf16_units: str = "") -> tuple[Any, Any]:
    """The plan of a long run and its model."""
    base = ("+profile=speed", "env.id=CartPole-v1", "vec_env=dummy", "num_envs=2", "total_timesteps=10000000", *algo)
    machine = Machine(2, False, False, bf16_units)
    plan = resolve(configured(*base, *arguments), {}, EnvFacts(False, 1e-5), machine)
    return plan, build_algorithm(plan.config, build_vec_env(plan.config, 2, 0), PhaseClock())


@pytest.mark.parametrize(
    ("costs", "fused_update", "threads"),
    [
        (SLOW, "off", 1),  # of torch the second thread must gain a tenth
        ({**SLOW, "torch on 2 threads": 900.0}, "off", 2),
        ({**SLOW, "kernels": 1000.0}, "on", 1),
        ({"kernels": 1000.0, "torch on 1 thread": 1500.0}, "on", 1),  # a busy machine left no time for the rest
    ],
)
def test_measured_costs_decide(
    monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], fused_update: str, threads: int
):
    monkeypatch.setattr(module, "measured", lambda *_: (costs, True))
    plan, model = run_of()
    after = calibrate(plan, model, QUIET)
    row = after.row("fused_update")
    assert (row.requested, row.effective, after.config.fused_update) == ("auto", fused_update, fused_update)
    assert row.reason.startswith(f"measured here: kernels {costs['kernels']:,.0f} ms, torch on 1 thread")
    assert after.events
    assert row in after.notable()
    if fused_update == "off":
        assert after.config.torch_threads == threads
        assert settle_threads(after, model) is after, "tried once"


def test_a_machine_and_a_shape_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked, steady = list[Any](), True
    monkeypatch.setattr(module, "measured", lambda ways, *_: (asked.append(ways) or SLOW, steady))
    plan, model = run_of()
    first = calibrate(plan, model, QUIET)
    assert calibrate(plan, model, QUIET) == first
    assert len(asked) == 1
    (file,) = (tmp_path / "fasttrain").glob("calibration-*")
    file.write_bytes(file.read_bytes()[:-1])  # damaged
    assert calibrate(plan, model, QUIET) == first
    calibrate(*run_of("batch_size=32"), QUIET)
    assert len(asked) == 3, "another shape"
    file.unlink()
    steady = False
    assert calibrate(plan, model, QUIET) == first
    assert not file.exists(), "on a busy machine: the next run measures again"


@pytest.mark.parametrize(
    "argument",
    ["deterministic=true", "fused_update=on", "fused_update=off", "algo.activation_fn=gelu", "total_timesteps=64",
     "use_amp=bfloat16"],
)  # fmt: skip
def test_nothing_is_measured_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch, argument: str):
    monkeypatch.setattr(module, "measured", lambda *_: pytest.fail("measured"))
    plan, model = run_of(argument)
    assert calibrate(plan, model, QUIET) is plan


def test_bfloat16_is_one_of_the_ways_where_the_rule_takes_it(monkeypatch: pytest.MonkeyPatch):
    plan, model = run_of("algo.net_arch=[512]", "batch_size=512", "algo.rollout_size=512", bf16_units="AMX")
    assert (plan.config.use_amp, plan.config.fused_update) == ("bfloat16", "off")
    costs = dict.fromkeys(ways_of(plan, model), 2.0)
    assert [*costs][1:3] == ["torch on 1 thread", "torch in bfloat16 on 1 thread"]
    for best, expected in (("kernels", ("off", "on")), ("torch in bfloat16 on 1 thread", ("bfloat16", "off"))):
        monkeypatch.setattr(module, "measured", lambda *_, best=best: ({**costs, best: 1.0}, True))
        monkeypatch.setattr(module, "recall", lambda _: None)
        after = calibrate(plan, model, QUIET)
        assert (after.config.use_amp, after.config.fused_update) == expected


@pytest.mark.parametrize("algo", [PPO, DQN])
def test_measuring_changes_nothing(monkeypatch: pytest.MonkeyPatch, algo: tuple[str, ...]):
    monkeypatch.setattr(module, "MOST_S", 0.0)
    plan, model = run_of(algo=algo)
    threads = torch.get_num_threads()
    ways = {name: way for name, way in ways_of(plan, model).items() if name != "kernels"}
    with untouched(model, drawn=False):
        costs, steady = measured({"again": ways[min(ways)], **ways}, model)
    assert min(costs.values()) > 0
    assert (len(costs), steady) == (2, False), "no time was left for more"
    assert torch.get_num_threads() == threads
    assert expected_s(plan.config, model) > 100


@pytest.mark.parametrize("algo", [PPO, DQN], ids=["ppo", "dqn"])
def test_each_way_is_really_what_computes(monkeypatch: pytest.MonkeyPatch, algo: tuple[str, ...]):
    plan, model = run_of(algo=algo)
    computed: list[tuple[str, Any]] = []

    def told(config: Any, *arguments: Any) -> Any:
        trial = build_algorithm(config, *arguments)
        computed.append((config.fused_update, trial))
        return trial

    monkeypatch.setattr(module, "build_algorithm", told)
    measured(ways_of(plan, model), model)
    kinds = [(asked, trial.engine.kind) for asked, trial in computed if trial._n_updates > 0]
    assert set(kinds) == {("on", "kernels"), ("off", "torch")}


def test_what_is_tried_has_as_many_zeros_and_legal_actions_as_the_env(monkeypatch: pytest.MonkeyPatch):
    kinds = spaces.Box(-1, 1, (400,), np.float32), spaces.MultiDiscrete([300, 100])
    blank = module._Blank(*kinds, True, (0.15, 0.05))
    seen, legal = zip(*((blank.step(None)[0], blank.action_masks()) for _ in range(16)), strict=True)
    assert np.mean(np.array(seen) != 0) == pytest.approx(0.15, abs=0.02)
    assert np.mean(legal) == pytest.approx(0.05 + 2 / 400, abs=0.01)
    assert np.array(legal)[:, 300:].any(1).all()
    told: list[Any] = []
    monkeypatch.setattr(module, "measured", lambda *arguments: (told.append(arguments[2]) or SLOW, True))
    for density in ((0.15, 0.05), (0.15, 0.05), (1.0, 1.0)):
        calibrate(*run_of(), QUIET, density)
    assert told == [(0.15, 0.05), (1.0, 1.0)], "what was measured is kept for the like"


def test_at_the_switch_torch_may_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "measured", lambda *_: (SLOW, True))
    plan, model = run_of("total_timesteps=64")
    after, reason = calibrate_at_switch(plan, model, QUIET, (1.0, 1.0))
    assert "kernels 1,740 ms, torch on 1 thread 1,300 ms, torch on 2 threads 1,240 ms per 1,000 env steps" in reason
    assert (after.config.fused_update, model.engine.kind) == ("off", "torch")
    assert model.engine.settings.fused_adam
    monkeypatch.setattr(module, "measured", lambda *_: ({**SLOW, "kernels": 1.0}, True))
    monkeypatch.setattr(module, "recall", lambda _: None)
    after, reason = calibrate_at_switch(plan, model, QUIET, (1.0, 1.0))
    assert (after.config.fused_update, reason) == ("on", "")


def test_a_policy_that_cannot_be_there_twice_keeps_the_rule(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "build_algorithm", Mock(side_effect=OSError("one at a time")))
    row = calibrate(*run_of(), QUIET).row("fused_update")
    assert (row.effective, row.reason.rpartition("; ")[2]) == ("on", "not measured: OSError")
