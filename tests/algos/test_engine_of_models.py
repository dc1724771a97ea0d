"""What all our algorithms share: which engine computes and when it is made anew, and what is read off an env's step."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

import fasttrain
from accelerated import SETTINGS, filled, masked_model, weights
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.kernels_q import KernelQEngine
from fasttrain.algos.engine import Collector, EngineSettings, TorchEngine, bootstrap_truncated, find_kernels, to_device
from fasttrain.algos.guard import Guard
from fasttrain.algos.policy_view import clip_actions
from fasttrain.algos.ppo import MaskablePPO
from fasttrain.algos.q_networks import TorchQEngine
from fasttrain.algos.step import explained_variance_term
from fasttrain.batch import FinishedEpisode
from fasttrain.errors import ConfigError, EnvError
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.base import EmptyMasks, stuck_envs, unblock_masks
from toys import ToyGame, toy_gym_vec

ENGINES: dict[str, tuple[type[Any], type[Any]]] = {
    "MaskablePPO": (TorchEngine, KernelEngine),
    "DQN": (TorchQEngine, KernelQEngine),
}
KINDS = pytest.mark.parametrize("name", ENGINES)
EITHER = pytest.mark.parametrize("engine", ["torch", "kernels"])
KERNELS, STEPS = EngineSettings(kind="kernels"), 80


def new_env() -> Any:
    return fasttrain.NativeVecEnv(ToyGame(5), seed=0)


def made(name: str, env: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 20, "n_epochs": 1}
    if name == "DQN":
        settings = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 400}
    return getattr(fasttrain, name)("MlpPolicy", env or new_env(), seed=0, device="cpu", **settings, **options)


def with_policy_of(model: Any, name: str) -> Any:
    model.policy = made(name).policy
    if name == "DQN":
        model._create_aliases()
    return model


@KINDS
@pytest.mark.parametrize(
    ("engine", "kernels"), [(None, False), ("kernels", True), (EngineSettings(kind="kernels"), True)]
)
def test_an_engine_is_asked_for_where_a_model_is_made(name: str, engine: Any, kernels: bool):
    model = made(name, **({} if engine is None else {"engine": engine}))
    assert type(model.engine) is ENGINES[name][kernels]
    assert model.engine.settings == EngineSettings.of(engine or "torch")
    assert model.engine.settings.exact is not kernels
    assert model.engine.unsupported_reason is None
    asked = model.engine
    assert model.prepare(model.get_env()) == "", "there is nothing to compile"
    model.learn(STEPS)
    assert model.engine is asked, "the same from the first rollout to the last update"
    assert model.engine.gradient_updates > 0
    assert model.engine.warmup_s == 0.0


@KINDS
def test_a_zip_names_no_engine_and_one_is_asked_for_where_it_is_loaded(name: str, tmp_path: Path):
    made(name, engine="kernels").learn(STEPS).save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert not {"engine", "collector"} & set(json.loads(archive.read("data")))
    kind, (torchs, kernels) = getattr(fasttrain, name), ENGINES[name]
    assert type(kind.load(tmp_path / "model").engine) is torchs
    loaded = kind.load(tmp_path / "model", env=new_env(), engine="kernels")
    before = weights(loaded)
    assert type(loaded.learn(STEPS).engine) is kernels
    assert loaded.engine.gradient_updates > 0
    assert not torch.equal(weights(loaded), before)


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
    model.engine.guard = None
    model.use_engine("kernels")
    assert model.engine.guard is None


@KINDS
@EITHER
def test_the_engine_is_kept_until_its_policy_is_replaced(name: str, engine: str):
    model = made(name, engine=engine).learn(STEPS)
    before, updates = model.engine, model.engine.gradient_updates
    assert model.engine_now() is before
    with_policy_of(model, name)
    assert model.engine_now() is not before
    assert (model.engine.kind, model.engine.gradient_updates, model.engine.guard) == (engine, updates, before.guard)
    assert model.engine.policy is model.policy
    fresh = weights(model)
    model.learn(STEPS)
    assert not torch.equal(weights(model), fresh)


@KINDS
def test_kernels_are_made_anew_for_a_new_head_and_left_for_what_they_do_not_serve(name: str):
    model = made(name, engine="kernels").learn(STEPS)
    before, policy, head = model.engine, model.policy, torch.nn.Linear(64, ToyGame.NUM_ACTIONS)
    if name == "DQN":
        policy.q_net.q_net[-1] = head
    else:
        policy.action_net = head
    policy.optimizer = torch.optim.Adam(getattr(policy, "q_net", policy).parameters(), lr=1e-2)
    assert model.engine_now() is not before
    assert type(model.engine) is ENGINES[name][1]
    policy.optimizer.register_step_post_hook(lambda *_: None)
    assert type(model.engine_now()) is ENGINES[name][0]
    assert "the optimizer's steps have a hook" in str(model.engine.unsupported_reason)
    model.learn(STEPS)


def layers_of(policy: Any) -> Any:
    return policy.q_net.q_net if hasattr(policy, "q_net") else policy.mlp_extractor.policy_net


CHANGES: dict[str, Callable[[Any], object]] = {
    "weight decay": lambda policy: policy.optimizer.param_groups[0].update(weight_decay=0.1),
    "a frozen parameter": lambda policy: next(policy.parameters()).requires_grad_(False),
    "a parameter less": lambda policy: policy.optimizer.param_groups[0]["params"].pop(),
    "a module more": lambda policy: layers_of(policy).append(torch.nn.Dropout()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "lends"), [("DQN", False), ("MaskablePPO", True), ("MaskablePPO", False)])
def test_a_change_of_the_model_in_mid_training_ends_the_kernels(name: str, lends: bool, change: str):
    model = made(name, engine="kernels")
    model.collector.lends = lends
    assert type(model.engine_now()) is ENGINES[name][1]
    CHANGES[change](model.policy)
    assert type(model.engine_now()) is ENGINES[name][0]


def test_kernels_of_q_networks_do_not_normalise():
    model = made("DQN", VecNormalize(toy_gym_vec()), engine="kernels")
    assert model.engine.unsupported_reason == "VecNormalize: batches are normalised one by one, which kernels do not do"
    model.learn(STEPS)
    assert type(model.engine) is TorchQEngine
    assert model.engine.gradient_updates > 0
    assert type(made("MaskablePPO", VecNormalize(toy_gym_vec()), engine="kernels").engine) is KernelEngine
    later = made("DQN", engine="kernels")
    assert type(later.engine_now()) is KernelQEngine
    later.set_env(VecNormalize(toy_gym_vec()))
    assert type(later.engine_now()) is TorchQEngine, "the policy still fits, its env does not"


@KINDS
@EITHER
def test_what_acting_gives(name: str, engine: str):
    """Actions for the envs, on the host; of an actor-critic all that a rollout keeps of the step."""
    model = made(name, engine=engine)
    observations, masks = np.zeros((5, 3), np.float32), np.zeros((5, 8), np.bool_)
    masks[:, 3] = True
    model.engine.begin()
    acted = model.engine.act(observations, masks)
    assert acted.actions.tolist() == [3] * 5
    assert acted.lstm_states is None
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
def test_kernels_that_cannot_be_imported_cost_the_kernels_only(name: str, monkeypatch: pytest.MonkeyPatch):
    find_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "fasttrain.accelerators.eligible", None)
    model = made(name, engine="kernels").learn(STEPS)
    find_kernels.cache_clear()
    assert model.engine.kind == "torch"
    assert "cannot be imported with this version of numba (" in model.engine.unsupported_reason
    assert model.num_timesteps >= STEPS


def test_an_engine_that_is_none_is_told():
    with pytest.raises(ConfigError, match="engine='kernel': choose torch or kernels; did you mean 'kernels'"):
        made("MaskablePPO", engine="kernel")


class SumEngine:
    """V(observation) = 10 × its sum."""

    def __init__(self, kind: str) -> None:
        self.settings, self.rated = EngineSettings(kind=kind), list[int]()

    def values(self, observations: Any, memory: Any = None) -> Any:
        parts = observations.values() if isinstance(observations, dict) else [observations]
        sums = sum(part.sum(axis=1) for part in parts)
        self.rated.append(len(sums))
        return 10.0 * sums


def bootstrapped(kind: str, finished: list[FinishedEpisode], values: Any = 0.0, storage: Any = None) -> Any:
    """Rewards that were zero, and how many states went through the engine together."""
    engine: Any = SumEngine(kind)
    model = SimpleNamespace(engine=engine, gamma=0.5, rollout_buffer=SimpleNamespace(storage=storage))
    rewards = np.zeros(4, np.float32)
    bootstrap_truncated(model, finished, rewards, np.broadcast_to(values, 4), 7)
    return rewards.tolist(), engine.rated


def episode(index: int, truncated: bool, lost: bool = False) -> FinishedEpisode:
    return FinishedEpisode(index, 1.0, 3, np.full(2, float(index + 1), np.float32), truncated, {}, lost)


@pytest.mark.parametrize(("kind", "together"), [("torch", [1, 1]), ("kernels", [2])])
def test_only_cut_episodes_get_the_value_of_their_last_state(kind: str, together: list[int]):
    """Env by env as in stock, whose numbers a product of several rows would not give; by kernels all at once."""
    rewards, rated = bootstrapped(kind, [episode(0, False), episode(2, True), episode(3, True)])
    assert rewards == [0.0, 0.0, 0.5 * 10 * 6, 0.5 * 10 * 8]
    assert rated == together
    last = {"a": np.full(2, 1.0, np.float32), "b": np.full(3, 2.0, np.float32)}
    assert bootstrapped(kind, [episode(1, True)._replace(final_observation=last)])[0][1] == 0.5 * 10 * 8
    out: list[Any] = []
    storage = SimpleNamespace(leave_out=lambda step, envs: out.append((step, *envs)))
    rewards, rated = bootstrapped(kind, [episode(1, True, lost=True)], np.array([1.5, 2.5, 3.5, 0.0]), storage)
    assert out == [(7, 1)], "a lost episode teaches nothing"
    assert rewards == [0.0, 0.5 * 2.5, 0.0, 0.0], "what led there ends as cut, with the value of where it led"
    assert rated == []


@pytest.mark.parametrize("squash", [False, True])
def test_box_actions_reach_the_env_within_bounds_and_others_as_drawn(squash: bool):
    space = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))
    policy = SimpleNamespace(squash_output=squash, unscale_action=lambda actions: 2 * actions)
    model: Any = SimpleNamespace(action_space=space, policy=policy)
    actions = np.array([[-3.0, 2.0], [0.5, 9.0]])
    expected = 2 * actions if squash else np.array([[-1.0, 2.0], [0.5, 4.0]])
    assert (clip_actions(model, actions) == expected).all()
    model.action_space = spaces.Discrete(5)
    assert clip_actions(model, actions) is actions


def test_empty_masks_are_counted_told_once_and_may_be_an_error():
    masks = np.ones((5, 4), np.bool_)
    said: list[str] = []
    empty = EmptyMasks(warn=said.append)
    empty.check(masks, [4], 10)
    masks[[1, 3]] = False
    assert stuck_envs(masks, [4]).tolist() == stuck_envs(masks, [2, 2]).tolist() == [1, 3]
    empty.check(masks, [4], 812)
    empty.check(masks, [2, 2], 813, np.arange(10, 15))
    assert empty.count == 4
    assert len(said) == 1
    assert "no legal action in env 1, 3 at step 812" in said[0]
    masks[3, :2] = True
    assert stuck_envs(masks, [4]).tolist() == [1]
    assert stuck_envs(masks, [3, 1]).tolist() == [1, 3]
    with pytest.raises(EnvError, match=r"env 11 \(head 0, 1\), 13 \(head 1\) at step 9"):
        EmptyMasks(raises=True).check(masks, [2, 2], 9, np.arange(10, 15))
    filled = unblock_masks(masks, [2, 2])
    assert filled.all()
    assert not masks[1].any(), "a copy"
    assert unblock_masks(filled, [4]) is filled


def test_masks_of_another_width_are_refused():
    source: Any = SimpleNamespace(read_masks=lambda: np.ones((2, 5), np.bool_))
    with pytest.raises(EnvError, match=r"returned 5 entries .* needs 4"):
        Collector().read_masks(source, [4], 0)


BY_KIND = pytest.mark.parametrize("kind", ["torch", "kernels"])


def model_of(kind: str, **changes: Any) -> Any:
    return filled(masked_model(EngineSettings(kind=kind), **changes))


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"pin_memory": True, "threads": 4}, True),  # neither changes how a number is made
        ({"kind": "kernels"}, False),
        ({"fused_adam": True}, False),
        ({"compile_mode": "default"}, False),
        ({"amp_dtype": torch.bfloat16}, False),
        ({"gradient_accumulation": 2}, False),
    ],
)
def test_numbers_are_stocks_while_nothing_asks_for_others(changes: dict[str, Any], exact: bool):
    assert EngineSettings(**changes).exact == exact


@BY_KIND
def test_an_update_says_what_it_came_to(kind: str):
    """Both engines by the same names, a number for each minibatch; the divergence of the last epoch alone, as SB3's."""
    model = model_of(kind, clip_range_vf=0.2)
    done = model.update()
    per_minibatch = {name: len(term) for name, term in done.terms.items()}
    names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "clip_fraction")
    assert per_minibatch == {**dict.fromkeys(names, 8), "approx_kl": 4, "explained_variance": 1}
    assert (done.steps, done.epochs, done.stopped, done.blamed, done.expected_skips) == (8, 2, False, "", False)
    assert done.norms.shape == (8,)
    assert np.isfinite(done.norms).all()
    assert model.engine.gradient_updates == 8
    assert (
        done.terms["explained_variance"] == explained_variance_term(model.rollout_buffer.storage)["explained_variance"]
    )
    model.engine.guard = None
    assert model.update().norms.shape == (0,), "nobody asks for them"


@BY_KIND
def test_an_update_that_stops_says_so(kind: str):
    done = model_of(kind, target_kl=1e-12, learning_rate=0.1).update()
    assert (done.steps, done.epochs, done.stopped) == (1, 1, True)
    assert len(done.terms["approx_kl"]) == 2, "the minibatch that stopped it is seen"
    assert done.norms.shape == (1,)


@BY_KIND
def test_who_is_to_blame_is_named_and_the_weights_stay(kind: str):
    model = model_of(kind)
    before = weights(model)
    model.rollout_buffer.storage.returns[:] = np.nan
    done = model.update()
    assert (done.steps, done.skipped, done.blamed) == (0, 8, "the loss")
    assert (model.engine.gradient_updates, model.engine.skipped_steps) == (0, 8)
    assert torch.equal(weights(model), before)


@BY_KIND
def test_another_engine_goes_on_from_its_state(kind: str):
    model, other = (model_of(kind, n_epochs=epochs) for epochs in (2, 1))
    for each in (model, other):
        each.engine.guard = Guard("rollback")
        each.train()
    assert other.engine.gradient_updates == 4
    state, arrays = model.engine.state()
    assert arrays, "copies for a rollback"
    other.engine.load(json.loads(json.dumps(state)), arrays, other)
    assert other.engine.gradient_updates == model.engine.gradient_updates == 8
    assert other.engine.guard.state()[0] == model.engine.guard.state()[0]
    model.engine.guard, model.engine.skipped_steps = None, 3
    state, arrays = model.engine.state()
    assert arrays == {}
    other.engine.load(state, arrays, None)
    assert other.engine.skipped_steps == 3, "without a guard there are the counters"


def test_torchs_own_words_get_the_place(monkeypatch: pytest.MonkeyPatch):
    engine = masked_model(EngineSettings()).engine
    good, bad = np.zeros((1, 3), np.float32), np.full((1, 3), np.nan, np.float32)

    def fail_with(message: str) -> None:
        def act(*_: Any) -> Any:
            raise RuntimeError(message)

        monkeypatch.setattr(engine.view, "act", act)

    fail_with("probability tensor contains either `inf`, `nan` or element < 0")
    with pytest.raises(EnvError, match="its weights are too large"):
        engine.act(good, None)
    with pytest.raises(EnvError, match="the observation of env 0 is not finite"):
        engine.act(bad, None)
    engine.guard = None
    with pytest.raises(RuntimeError, match="probability tensor"):
        engine.act(bad, None)
    fail_with("shapes")
    with pytest.raises(RuntimeError, match="shapes"):
        engine.act(good, None)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of what goes through page-locked memory, in whose place there is ordinary one, which any machine has."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: found.append(tuple(one.shape)) or one.clone())
    return found


@pytest.mark.parametrize(("keyed", "masked"), [(True, True), (False, False)])
def test_the_same_numbers_arrive_by_page_locked_memory(shapes: list[tuple[int, ...]], keyed: bool, masked: bool):
    observations = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    given, masks = {"a": observations, "b": np.arange(4)} if keyed else observations, observations > 0
    sent = [to_device(given, masks if masked else None, torch.device("cpu"), pinned) for pinned in (False, True)]
    assert len(shapes) == 1 + keyed + masked
    torch.testing.assert_close(*sent, rtol=0, atol=0, check_device=True)


def test_a_rollout_goes_through_page_locked_memory(shapes: list[tuple[int, ...]]):
    plain = masked_model(EngineSettings()).learn(80)
    model = masked_model(EngineSettings())
    model.engine.pinned = True  # type: ignore[attr-defined]
    assert torch.equal(weights(plain), weights(model.learn(80)))
    assert {*shapes} == {(5, 3), (5, 8)}
    assert not masked_model(EngineSettings(pin_memory=True)).engine_now().pinned, "it is on the CPU"


@pytest.mark.cuda
def test_on_cuda_the_weights_are_those_of_plain_copies():
    ends = []
    for pinned in (False, True):
        model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
        model.use_engine(EngineSettings(pin_memory=pinned))
        ends.append(weights(model.learn(160)))
        assert model.engine_now().pinned == pinned
    torch.testing.assert_close(*ends)
