"""What all our algorithms share: which engine computes, when it is made anew, what goes on then, what is saved."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import VecNormalize

import fasttrain
from fasttrain.accelerators.eligible import unsupported_reason
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.engine import EngineSettings, TorchEngine, TorchQEngine
from fasttrain.algos.fast import find_kernels
from fasttrain.errors import ConfigError
from fasttrain.perf.clock import PhaseClock
from toys import ToyGame, single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
ENGINES: dict[str, tuple[type[Any], type[Any]]] = {
    "PPO": (TorchEngine, KernelEngine),
    "MaskablePPO": (TorchEngine, KernelEngine),
    "DQN": (TorchQEngine, KernelQEngine),
}
KINDS = pytest.mark.parametrize("name", ENGINES)
STEPS = 80


class AnyAction(ToyGame):
    """PPO knows no masks."""

    def _write_mask(self, index: int) -> None:
        self.slots.action_masks[index] = True


def new_env(name: str) -> Any:
    return fasttrain.NativeVecEnv((AnyAction if name == "PPO" else ToyGame)(5), seed=0)


def made(name: str, env: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 20, "n_epochs": 1}
    if name == "DQN":
        settings = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 400}
    kind = getattr(fasttrain, name)
    return kind("MlpPolicy", env or new_env(name), seed=0, device="cpu", **settings, **options)


@KINDS
@pytest.mark.parametrize(
    ("engine", "kernels"),
    [("torch", False), ("kernels", True), (EngineSettings(kind="kernels"), True), (EngineSettings(), False)],
)
def test_an_engine_is_asked_for_where_a_model_is_made(name: str, engine: Any, kernels: bool):
    model = made(name, engine=engine)
    assert type(model.engine) is ENGINES[name][kernels]
    assert model.engine.settings == EngineSettings.of(engine)
    assert model.engine.unsupported_reason is None
    asked = model.engine
    model.learn(STEPS)
    assert model.engine is asked, "the same from the first rollout to the last update"
    assert model.engine.gradient_updates > 0


@KINDS
def test_without_a_word_it_is_torch_with_the_numbers_of_stock(name: str):
    model = made(name)
    assert type(model.engine) is ENGINES[name][0]
    assert model.engine.settings.exact


@KINDS
def test_an_engine_is_asked_for_where_a_model_is_loaded(name: str, tmp_path: Path):
    made(name, engine="kernels").learn(STEPS).save(tmp_path / "model")
    kind, (torchs, kernels) = getattr(fasttrain, name), ENGINES[name]
    assert type(kind.load(tmp_path / "model", env=new_env(name)).engine) is torchs, "what was used is not in the zip"
    loaded = kind.load(tmp_path / "model", env=new_env(name), engine="kernels")
    assert type(loaded.engine) is kernels
    before = [parameter.detach().clone() for parameter in loaded.policy.parameters()]
    loaded.learn(STEPS)
    assert type(loaded.engine) is kernels
    assert loaded.engine.gradient_updates > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, loaded.policy.parameters(), strict=True))


@KINDS
def test_a_model_loads_without_an_env(name: str, tmp_path: Path):
    model = made(name).learn(STEPS)
    model.save(tmp_path / "model")
    loaded = getattr(fasttrain, name).load(tmp_path / "model", engine="kernels")
    observations = np.zeros((2, 3), np.float32)
    ours, theirs = (each.predict(observations, deterministic=True)[0] for each in (model, loaded))
    assert (ours == theirs).all()


@KINDS
@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_a_zip_names_neither_engine_nor_collector(name: str, engine: str, tmp_path: Path):
    made(name, engine=engine).learn(STEPS).save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        kept = json.loads(archive.read("data"))
    assert "n_envs" in kept
    assert not {"engine", "collector"} & set(kept)


@KINDS
def test_counters_guard_and_clock_go_on_with_another_engine(name: str):
    model, clock = made(name), PhaseClock()
    model.time_with(clock)
    assert model.collector.clock is model.engine.clock is clock
    model.learn(STEPS)
    before = model.engine
    before.skipped_steps, before.warmup_s = 2, 1.5
    for wanted, kind in (("kernels", ENGINES[name][1]), ("torch", ENGINES[name][0])):
        model.use_engine(wanted)
        assert type(model.engine) is kind
        assert model.engine is not before
        assert (model.engine.clock, model.engine.guard) == (clock, before.guard)
        for counter in ("gradient_updates", "skipped_steps", "warmup_s"):
            assert getattr(model.engine, counter) == getattr(before, counter)
    updates = model.engine.gradient_updates
    model.learn(STEPS)
    assert model.engine.gradient_updates == 2 * updates


def test_no_guard_stays_no_guard():
    model = made("PPO")
    model.engine.guard = None
    model.use_engine("kernels")
    assert model.engine.guard is None


def renewed(model: Any) -> Any:
    """The policy with another head, and an optimizer for it."""
    policy = model.policy
    head = torch.nn.Linear(64, ToyGame.NUM_ACTIONS)
    if hasattr(policy, "q_net"):
        policy.q_net.q_net[-1] = head
    else:
        policy.action_net = head
    policy.optimizer = torch.optim.Adam(getattr(policy, "q_net", policy).parameters(), lr=1e-2)
    return policy


@KINDS
@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_the_engine_is_kept_until_its_policy_is_replaced(name: str, engine: str):
    model = made(name, engine=engine).learn(STEPS)
    before, updates = model.engine, model.engine.gradient_updates
    assert model.engine_now() is before
    model.policy = made(name).policy
    if name == "DQN":
        model._create_aliases()
    assert model.engine_now() is not before
    assert (model.engine.kind, model.engine.gradient_updates, model.engine.guard) == (engine, updates, before.guard)
    assert model.engine.policy is model.policy
    weights = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(STEPS)
    assert any(not torch.equal(a, b) for a, b in zip(weights, model.policy.parameters(), strict=True))


@KINDS
def test_kernels_are_made_anew_for_a_new_head(name: str):
    model = made(name, engine="kernels").learn(STEPS)
    before = model.engine
    renewed(model)
    assert model.engine_now() is not before
    assert type(model.engine) is ENGINES[name][1]


@KINDS
def test_torch_serves_what_kernels_cannot_until_they_can(name: str):
    """With torch's fused Adam: who asks for kernels does not ask for stock's very numbers."""
    model = made(name, engine="kernels", policy_kwargs={"activation_fn": torch.nn.ELU})
    assert type(model.engine) is ENGINES[name][0]
    assert unsupported_reason(model) == model.engine.unsupported_reason == "not an MLP of tanh or relu layers"
    assert not model.engine.settings.exact
    seen: list[bool] = []
    model.policy.optimizer.register_step_post_hook(lambda adam, *_: seen.append(bool(adam.param_groups[0]["fused"])))
    model.learn(STEPS)
    assert set(seen) == {True}
    model.policy = made(name).policy
    if name == "DQN":
        model._create_aliases()
    assert type(model.engine_now()) is ENGINES[name][1]
    assert model.engine.unsupported_reason is None


@KINDS
def test_what_kernels_could_serve_and_cannot_any_more_is_torchs(name: str):
    model = made(name, engine="kernels").learn(STEPS)
    assert type(model.engine) is ENGINES[name][1]
    renewed(model).optimizer.register_step_post_hook(lambda *_: None)
    assert type(model.engine_now()) is ENGINES[name][0]
    assert "the optimizer's steps have a hook" in str(model.engine.unsupported_reason)
    model.learn(STEPS)


def test_kernels_of_q_networks_do_not_normalise():
    model = made("DQN", VecNormalize(toy_gym_vec()), engine="kernels")
    assert model.engine.unsupported_reason == "VecNormalize: batches are normalised one by one"
    assert type(model.engine) is TorchQEngine
    model.learn(STEPS)
    assert type(model.engine) is TorchQEngine
    assert model.engine.gradient_updates > 0
    assert type(made("MaskablePPO", VecNormalize(toy_gym_vec()), engine="kernels").engine) is KernelEngine
    later = made("DQN", engine="kernels")
    assert type(later.engine_now()) is KernelQEngine
    later.set_env(VecNormalize(toy_gym_vec()))
    assert type(later.engine_now()) is TorchQEngine, "the policy still fits, its env does not"


@KINDS
@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_a_policy_without_memory_gives_none_back(name: str, engine: str):
    model = made(name, engine=engine)
    model.engine.begin()
    observations = np.zeros((5, 3), np.float32)
    assert model.engine.act(observations, None).memory is None
    assert model.engine.act(observations, np.ones((5, 8), np.bool_)).memory is None


@KINDS
@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_what_acting_gives(name: str, engine: str):
    """Actions for the envs, on the host; of an actor-critic all that a rollout keeps of the step."""
    model = made(name, engine=engine)
    observations, masks = np.zeros((5, 3), np.float32), np.zeros((5, 8), np.bool_)
    masks[:, 3] = True
    model.engine.begin()
    acted = model.engine.act(observations, masks)
    assert acted.actions.tolist() == [3] * 5
    if name == "DQN":
        assert acted.stored is None
        return
    assert torch.equal(acted.stored.observations, torch.from_numpy(observations))
    assert acted.stored.actions.tolist() == [3] * 5
    assert (acted.stored.values.shape, acted.stored.log_probs.shape) == ((5, 1), (5,))
    assert torch.equal(acted.stored.action_masks, torch.from_numpy(masks))
    assert model.engine.act(observations, None).stored.action_masks is None
    np.testing.assert_allclose(model.engine.values(observations), acted.stored.values[:, 0].detach(), rtol=1e-6)


@KINDS
def test_preparing_without_a_compiler_does_nothing(name: str):
    model = made(name)
    assert model.prepare(model.get_env()) == ""
    assert model.engine.warmup_s == 0.0


@KINDS
def test_kernels_that_cannot_be_imported_cost_the_kernels_only(name: str, monkeypatch: pytest.MonkeyPatch):
    find_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "fasttrain.accelerators.eligible", None)
    model = made(name, engine="kernels").learn(120)
    find_kernels.cache_clear()
    assert model.engine.kind == "torch"
    assert "cannot be imported with this version of numba (" in model.engine.unsupported_reason
    assert model.num_timesteps >= 120


def test_an_engine_that_is_none_is_told():
    with pytest.raises(ConfigError, match="engine='kernel': choose torch or kernels; did you mean 'kernels'"):
        made("PPO", engine="kernel")
