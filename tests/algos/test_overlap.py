"""Updates beside collecting: exactly one update of lag, the same numbers each time, nothing lost."""

from __future__ import annotations

from typing import Any

import fasttrain.algos.overlap as overlap_module
import numpy as np
import pytest
import torch
from fasttrain.algos.overlap import copy_optimizer, copy_weights, without_graphs
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.ppo import MaskablePPO
from fasttrain.engines.engine import EngineSettings
from fasttrain.engines.torch import TorchEngine
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame

SETTINGS: dict[str, Any] = {"n_steps": 8, "batch_size": 20, "n_epochs": 3, "learning_rate": 1e-2, "seed": 0}


def fingerprint(policy: Any) -> float:
    return float(sum(parameter.detach().double().abs().sum() for parameter in policy.parameters()))


class Watch(BaseCallback):
    """The acting weights of every rollout, and the weights as they are when it ends."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.acting: list[set[float]] = []
        self.ended: list[float] = []
        self.updates: list[int] = []
        self.stop_after = stop_after

    def _on_rollout_start(self) -> None:
        self.acting.append({fingerprint(self.model.policy)})
        self.updates.append(self.model.engine.gradient_updates)

    def _on_step(self) -> bool:
        self.acting[-1].add(fingerprint(self.model.policy))
        return self.stop_after is None or self.n_calls < self.stop_after

    def _on_rollout_end(self) -> None:
        self.ended.append(fingerprint(self.model.policy))


def trained(steps: int = 160, fused: bool = True, overlap: bool = True, watch: Watch | None = None, **settings: Any):
    model = MaskablePPO("MlpPolicy", NativeVecEnv(ToyGame(5), seed=0), device="cpu", **{**SETTINGS, **settings})
    if fused:
        model.use_engine("kernels")
    if overlap:
        model.overlap_updates(2)
    return model.learn(steps, watch)


@pytest.mark.parametrize("fused", [True, False])
def test_rollouts_are_collected_with_weights_one_update_old(fused: bool):
    watch = Watch()
    trained(fused=fused, watch=watch)  # four rollouts of 40
    assert all(len(weights) == 1 for weights in watch.acting), "weights never change within a rollout"
    first, second, third, fourth = (weights.pop() for weights in watch.acting)
    assert first == second, "the first update runs beside the second rollout"
    assert watch.ended == [first, third, fourth, pytest.approx(watch.ended[3])]
    assert len({second, third, fourth, watch.ended[3]}) == 4
    assert watch.updates == [0, 0, 6, 12]


@pytest.mark.parametrize("fused", [True, False])
def test_the_thread_changes_no_number(fused: bool, monkeypatch: pytest.MonkeyPatch):
    """Against the same updates made at the moment they are waited for, one thing after the other."""
    beside = trained(fused=fused)

    class Later:
        def __init__(self, target: Any, args: Any, **_: Any) -> None:
            self.work = lambda: target(*args)

        def start(self) -> None:
            pass

        def join(self) -> None:
            self.work()

    monkeypatch.setattr(overlap_module.threading, "Thread", Later)
    after = trained(fused=fused)
    for ours, theirs in zip(beside.policy.parameters(), after.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert beside.engine.gradient_updates == after.engine.gradient_updates == 4 * 6
    assert beside._n_updates == 4 * 3


def test_the_lag_is_no_stock_training():
    lagging, plain = trained(), trained(overlap=False)
    assert fingerprint(lagging.policy) != fingerprint(plain.policy)
    assert lagging.engine.gradient_updates == plain.engine.gradient_updates


def test_one_rollout_has_no_lag():
    lagging, plain = trained(40), trained(40, overlap=False)
    assert fingerprint(lagging.policy) == fingerprint(plain.policy)


def test_the_log_and_the_optimizer_arrive():
    model = trained(120)
    assert model.logger.name_to_value["train/n_updates"] == 9
    (steps,) = {int(state["step"]) for state in model.policy.optimizer.state.values()}
    assert steps == 18
    assert model.collector.clock.background_ns > 0


def test_a_stop_in_the_middle_takes_the_update_over():
    watch = Watch(stop_after=12)
    model = trained(400, watch=watch)
    assert model.engine.gradient_updates == 6
    assert not model._fast.overlap.under_way
    assert fingerprint(model.policy) not in watch.acting[0]
    model.learn(80)
    assert model.engine.gradient_updates == 6 + 12


def test_a_schedule_follows_the_progress_of_its_own_rollout():
    rates: list[float] = []
    model = MaskablePPO(
        "MlpPolicy", NativeVecEnv(ToyGame(5), seed=0), device="cpu",
        **{**SETTINGS, "learning_rate": lambda progress: 0.01 * progress},
    )  # fmt: skip
    model.overlap_updates(2)

    class Rates(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            rates.append(self.model.policy.optimizer.param_groups[0]["lr"])

    model.learn(160, Rates())
    assert rates[1:] == pytest.approx([0.0075, 0.005, 0.0025])


def test_an_error_in_the_thread_reaches_the_trainer():
    model = MaskablePPO("MlpPolicy", NativeVecEnv(ToyGame(5), seed=0), device="cpu", **SETTINGS)
    model.overlap_updates(2)

    class Broken(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            if self.num_timesteps == 40:
                self.model.clip_range = None

    before = fingerprint(model.policy)
    with pytest.raises(TypeError):
        model.learn(160, Broken())
    assert fingerprint(model.policy) == before


def test_a_saved_model_is_stock(tmp_path: Any):
    import sb3_contrib

    model = trained(120)
    model.save(tmp_path / "model")
    stock = sb3_contrib.MaskablePPO.load(tmp_path / "model", device="cpu")
    for key, value in model.policy.state_dict().items():
        assert torch.equal(stock.policy.state_dict()[key], value)


def test_copies_are_made_in_place():
    def pair() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        linear = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(linear.parameters(), lr=np.random.rand())
        for _ in range(2):
            linear(torch.ones(3)).sum().backward()
            optimizer.step()
        return linear, optimizer

    (source, source_adam), (target, target_adam) = pair(), pair()
    places = [parameter.data_ptr() for parameter in target.parameters()]
    moments = [state["exp_avg"].data_ptr() for state in target_adam.state.values()]
    copy_weights(source, target)
    copy_optimizer(source_adam, target_adam)
    assert torch.equal(source.weight, target.weight)
    assert places == [parameter.data_ptr() for parameter in target.parameters()]
    assert moments == [state["exp_avg"].data_ptr() for state in target_adam.state.values()]
    assert target_adam.param_groups[0]["lr"] == source_adam.param_groups[0]["lr"]
    assert target_adam.param_groups[0]["params"][0] is target.weight
    assert torch.equal(target_adam.state[target.weight]["exp_avg_sq"], source_adam.state[source.weight]["exp_avg_sq"])


def test_the_thread_captures_no_graphs():
    assert without_graphs(EngineSettings(compile_mode="reduce-overhead")).compile_mode == "default"
    assert without_graphs(EngineSettings()) == EngineSettings()


def test_a_replaced_layer_is_what_learns():
    model = trained(120)
    model.policy.action_net = torch.nn.Linear(64, model.action_space.n)
    model.policy.optimizer = torch.optim.Adam(model.policy.parameters(), lr=1e-2)
    before = model.policy.action_net.weight.detach().clone()
    model.learn(120)
    assert not torch.equal(model.policy.action_net.weight, before)
    (steps,) = {int(state["step"]) for state in model.policy.optimizer.state.values()}
    assert steps == 18


def test_the_update_is_compiled_before_training_begins():
    """Compiling for the thread is no part of the first update, and is counted."""
    model = MaskablePPO("MlpPolicy", NativeVecEnv(ToyGame(5), seed=0), device="cpu", **SETTINGS)
    settings = EngineSettings(compile_mode="default")
    model.use_engine(settings)
    model.engine = TorchEngine(model.policy, settings, plain_compiler)
    model.engine.warm = True  # acting is another matter
    made: list[Any] = []

    class Plain(TorchEngine):
        def __init__(self, policy: Any, settings: EngineSettings) -> None:
            super().__init__(policy, settings, plain_compiler)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fasttrain.algos.fast.TorchEngine", Plain)
        model.overlap_updates(2)
    (accelerator,) = made
    assert accelerator.warm
    assert accelerator.compiled is not None
    assert model._fast.warmup_s >= accelerator.warmup_s > 0


def plain_compiler(function: Any) -> Any:
    return lambda *args: function(*args)
