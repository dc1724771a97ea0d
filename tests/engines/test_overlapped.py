"""Updates beside collecting: exactly one update of lag, the same numbers each time, nothing lost."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from fasttrain.algos.ppo import MaskablePPO
from fasttrain.engines import overlapped
from fasttrain.engines.engine import EngineSettings, Statistics
from fasttrain.engines.kernels import KernelEngine
from fasttrain.engines.overlapped import Overlapped, copy_optimizer, copy_weights, learner_settings
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


def made(kind: str = "kernels", overlap: bool = True, **settings: Any) -> MaskablePPO:
    engine = EngineSettings(kind=kind, overlap=overlap, threads=2)
    env = NativeVecEnv(ToyGame(5), seed=0)
    return MaskablePPO("MlpPolicy", env, device="cpu", engine=engine, **{**SETTINGS, **settings})


def trained(steps: int = 160, kind: str = "kernels", overlap: bool = True, watch: Watch | None = None) -> MaskablePPO:
    return made(kind, overlap).learn(steps, watch)


@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_rollouts_are_collected_with_weights_one_update_old(kind: str):
    watch = Watch()
    trained(kind=kind, watch=watch)  # four rollouts of 40
    assert all(len(weights) == 1 for weights in watch.acting), "weights never change within a rollout"
    first, second, third, fourth = (weights.pop() for weights in watch.acting)
    assert first == second, "the first update runs beside the second rollout"
    assert watch.ended == [first, third, fourth, pytest.approx(watch.ended[3])]
    assert len({second, third, fourth, watch.ended[3]}) == 4
    assert watch.updates == [0, 0, 6, 12]


@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_the_thread_changes_no_number(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Against the same updates made at the moment they are waited for, one thing after the other."""
    beside = trained(kind=kind)

    class Later:
        def __init__(self, target: Any, **_: Any) -> None:
            self.work = target

        def start(self) -> None:
            pass

        def is_alive(self) -> bool:
            return True

        def join(self) -> None:
            self.work()

    monkeypatch.setattr(overlapped.threading, "Thread", Later)
    after = trained(kind=kind)
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
    assert model.engine.overlapped.job is None
    assert fingerprint(model.policy) not in watch.acting[0]
    model.learn(80)
    assert model.engine.gradient_updates == 6 + 12


def test_a_schedule_follows_the_progress_of_its_own_rollout():
    rates: list[float] = []
    model = made("torch", learning_rate=lambda progress: 0.01 * progress)

    class Rates(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            rates.append(self.model.policy.optimizer.param_groups[0]["lr"])

    model.learn(160, Rates())
    assert rates[1:] == pytest.approx([0.0075, 0.005, 0.0025])


def test_an_error_in_the_thread_reaches_the_trainer(monkeypatch: pytest.MonkeyPatch):
    model = made("torch")
    update, before = TorchEngine.update, fingerprint(model.policy)

    def broken(engine: TorchEngine, *given: Any) -> Statistics:
        if threading.current_thread().name == "fasttrain-update":
            raise ZeroDivisionError("in the thread")
        return update(engine, *given)

    monkeypatch.setattr(TorchEngine, "update", broken)
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        model.learn(160)
    assert model.num_timesteps == 80, "the rollout beside it was collected"
    assert fingerprint(model.policy) == before
    assert model.engine.overlapped.job is None
    monkeypatch.undo()
    model.learn(80)
    assert model.engine.gradient_updates == 2 * 6


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


def test_the_thread_captures_no_graphs_and_leaves_a_core(monkeypatch: pytest.MonkeyPatch):
    assert learner_settings(EngineSettings(compile_mode="reduce-overhead", overlap=True)) == EngineSettings(
        compile_mode="default"
    )
    assert learner_settings(EngineSettings()) == EngineSettings()
    for cores, threads in ((4, 3), (1, 1)):
        monkeypatch.setattr(overlapped, "usable_cores", lambda cores=cores: cores)
        assert learner_settings(EngineSettings(kind="kernels", threads=8)).threads == threads
    assert KernelEngine(made().policy, EngineSettings(overlap=True, threads=8)).max_threads == 1, "and acts with one"


def test_a_replaced_layer_is_what_learns():
    model = trained(120)
    model.policy.action_net = torch.nn.Linear(64, model.action_space.n)
    model.policy.optimizer = torch.optim.Adam(model.policy.parameters(), lr=1e-2)
    before = model.policy.action_net.weight.detach().clone()
    model.learn(120)
    assert not torch.equal(model.policy.action_net.weight, before)
    (steps,) = {int(state["step"]) for state in model.policy.optimizer.state.values()}
    assert steps == 18


def test_the_update_is_compiled_before_it_begins():
    """Compiling for the thread is no part of the first update, and is counted."""
    threads: list[str] = []

    def plain_compiler(function: Any) -> Any:
        threads.append(threading.current_thread().name)
        return lambda *args: function(*args)

    class Plain(TorchEngine):
        def __init__(self, policy: Any, settings: EngineSettings, before: Any = None) -> None:
            super().__init__(policy, settings, before, plain_compiler)

    model = made("torch")
    settings = EngineSettings(compile_mode="default", overlap=True)
    model.engine = Plain(model.policy, settings, model.engine)
    spent = model.collector.clock.snapshot()["other"]
    model.prepare(model.env)
    learner: Any = model.engine.overlapped.learner
    assert learner.compiled is not None, "before training, not in its first update"
    compiled_in = model.engine.warmup_s
    model.learn(120)
    assert learner.compiled is not None
    assert not learner.must_compile_for((20,))
    assert set(threads) == {threading.main_thread().name}
    assert model.engine.warmup_s == compiled_in > learner.warmup_s > 0
    assert model.collector.clock.snapshot()["other"] > spent


def test_nothing_under_way_is_nothing_to_take():
    engine, beside = made().engine, Overlapped()
    assert beside.job is None
    assert beside.take(engine) is None


def collected() -> MaskablePPO:
    """A model after one rollout, before any update."""
    model = made()
    model.train = lambda: None
    return model.learn(40)


def test_waiting_takes_nothing_over():
    model = collected()
    before, beside = fingerprint(model.policy), model.engine.overlapped
    beside.start(model.engine, model.rollout_buffer, model.work())
    job = beside.job
    done = job.result()
    assert (job.work, done.steps) == (model.work(), 6)
    assert (fingerprint(model.policy), model.engine.gradient_updates) == (before, 0)
    assert beside.take(model.engine) == (job, done)
    assert (beside.job, beside.spare) == (None, model.rollout_buffer)
    assert fingerprint(model.policy) == fingerprint(job.learner.policy) != before
    assert model.engine.gradient_updates == 6


def test_an_update_of_another_process_is_held_until_it_is_taken():
    there, here = collected(), made()
    there.engine.overlapped.start(there.engine, there.rollout_buffer, there.work())
    job = there.engine.overlapped.job
    learner, done = job.learner, job.result()

    def fill(copied: Any) -> None:
        copy_weights(learner.policy, copied.policy)
        copy_optimizer(learner.policy.optimizer, copied.policy.optimizer)

    before, beside = fingerprint(here.policy), here.engine.overlapped
    beside.hold(here.engine, job.work, done, fill)
    assert beside.job.result() is done
    assert fingerprint(here.policy) == before
    held, taken = beside.take(here.engine)
    assert (held.work, held.rollout, taken) == (job.work, None, done)
    assert fingerprint(here.policy) == fingerprint(learner.policy) != before
    assert here.engine.gradient_updates == 6
    here.learn(80)
    assert here.engine.gradient_updates == 6 + 12


def test_the_thread_draws_no_random_number_of_the_trainers():
    model = collected()
    beside, work = Overlapped(), model.work()
    before = np.random.get_state()[2]
    beside.start(model.engine, model.rollout_buffer, work)
    begun = np.random.get_state()
    beside.job.result()
    after = np.random.get_state()
    assert begun[2] != before, "drawn before the thread begins"
    assert (begun[1] == after[1]).all()
    assert begun[2] == after[2]
