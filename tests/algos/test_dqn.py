"""What our DQN has besides stock DQN: masks everywhere, double Q-learning, prioritized and n-step replay, kernels."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from accelerated import DQN_SETTINGS as SETTINGS
from accelerated import Conservative, toy_dqn
from fasttrain.algos.dqn import Evaluated
from fasttrain.batch import FinishedEpisode
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.envs.masks import ActionMasks
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.vec.base import EmptyMasks
from plain_env import PlainEnv
from toys import RandomEnv, ToyGame, seeded_vec

PER: dict[str, Any] = {"double_q": True, "n_steps": 3, "prioritized": {}}


class Forbidding(PlainEnv):
    """Ten steps; only action 2 is legal, or none at all."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(4)

    def __init__(self, legal: tuple[int, ...] = (2,)) -> None:
        self.legal, self.chosen = legal, list[int]()

    def action_masks(self) -> Any:
        return np.isin(np.arange(4), self.legal)

    def seen(self) -> Any:
        return np.full(3, self.time / 10, np.float32)

    def paid(self, action: Any) -> Any:
        self.chosen.append(int(action))
        return 1.0


class Cut(Forbidding):
    """Cut after ten steps; the legal action is the number of the step modulo 4."""

    cut = True

    def action_masks(self) -> Any:
        return np.arange(4) == self.time % 4


@pytest.mark.parametrize(
    ("engine", "changes"), [("torch", PER), ("torch", {"loss": "mse"}), ("kernels", {}), ("kernels", PER)]
)
def test_no_illegal_action_is_ever_played(engine: str, changes: dict[str, Any]):
    model = toy_dqn(exploration_final_eps=0.3, engine=engine, **changes)
    model.learn(300)  # ToyGame raises at an illegal one
    assert model.engine.kind == engine
    assert model.engine.gradient_updates == model._n_updates == 2 * (300 - 20) // 5


@pytest.mark.parametrize(("use_masking", "chosen"), [(True, {2}), (False, {0, 1, 2, 3})])
def test_masks_of_single_envs_and_masks_left_out(use_masking: bool, chosen: set[int]):
    envs = [Forbidding(), Forbidding()]
    vec = DummyVecEnv([lambda i=i: envs[i] for i in range(2)])
    model = fasttrain.DQN("MlpPolicy", vec, use_masking=use_masking, **SETTINGS).learn(100)
    assert {*envs[0].chosen, *envs[1].chosen} == chosen
    assert (model.replay_buffer.mask_width is None) is not use_masking


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_where_no_action_is_legal_all_are(engine: str):
    env = Forbidding(())
    model = fasttrain.DQN("MlpPolicy", DummyVecEnv([lambda: env]), engine=engine, **SETTINGS)
    with pytest.warns(UserWarning, match="no legal action in env 0 at step 0"):
        model.learn(100)
    assert model.collector.empty_masks.count == 100
    assert set(env.chosen) == {0, 1, 2, 3}
    assert model.replay_buffer.sample(100).next_action_masks.all()
    model.collector.empty_masks = EmptyMasks(raises=True)
    with pytest.raises(EnvError, match="no legal action in env 0"):
        model.learn(50)


def test_a_buffer_without_room_for_masks_is_an_error():
    env = DummyVecEnv([Forbidding])
    model = fasttrain.DQN("MlpPolicy", env, replay_buffer_class=ReplayStorage, **SETTINGS)
    with pytest.raises(EnvSpecError, match="ReplayStorage does not store them"):
        model.learn(50)
    room = {"replay_buffer_class": ReplayStorage, "replay_buffer_kwargs": {"mask_width": 4}}
    fasttrain.DQN("MlpPolicy", env, **room, **SETTINGS).learn(50)


def test_ends_and_masks_are_stored_as_those_of_the_next_state():
    """ToyGame's even envs end by the rules, its odd ones are cut, env 4 is both at once, which counts as the rules."""
    storage = toy_dqn().learn(100).replay_buffer
    dones, timeouts = storage.dones[:20].astype(bool), storage.timeouts[:20].astype(bool)
    assert dones.any(axis=0).all()
    assert (timeouts[:, [1, 3]] == dones[:, [1, 3]]).all()
    assert not timeouts[:, [0, 2, 4]].any()
    for row, env in np.ndindex(20, 5):
        mask = storage.gather(np.array([row]), np.array([env])).next_action_masks[0].numpy()
        step = int(storage.next_observations[row, env, 1])
        np.testing.assert_array_equal(mask, np.ones(8, bool) if dones[row, env] else np.arange(8) != step)


def test_the_mask_of_a_truncated_episodes_last_state_is_stored():
    env = DummyVecEnv([lambda: Monitor(ActionMasks(Cut(), "method"))])
    storage = fasttrain.DQN("MlpPolicy", env, **SETTINGS).learn(40).replay_buffer
    cut = np.flatnonzero(storage.timeouts[:40, 0])
    assert cut.tolist() == [9, 19, 29, 39]
    assert storage.next_masks[cut, 0].tolist() == [[False, False, True, False]] * 4


def test_predict_explores_within_masks():
    model = toy_dqn()
    model.exploration_rate = 0.5
    rng = np.random.default_rng(0)
    masks = rng.random((500, 8)) < 0.3
    masks[np.arange(500), rng.integers(0, 8, 500)] = True
    observations = rng.random((500, 3)).astype(np.float32)
    for _ in range(4):
        actions, _ = model.predict(observations, action_masks=masks)
        assert masks[np.arange(500), actions].all()
    single, _ = model.predict(observations[0], action_masks=masks[0])
    assert single.shape == ()
    assert masks[0, single]
    anything, _ = model.predict(observations[0], deterministic=True, action_masks=np.zeros(8, bool))
    assert anything == model.predict(observations[0], deterministic=True)[0]


def test_prioritized_replay_learns_what_it_was_wrong_about():
    model = toy_dqn(prioritized={"alpha": 0.7, "beta": 0.5})
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    model.learn(300)
    assert len(np.unique(model.replay_buffer.priorities)) > 50, "priorities follow the errors"
    assert model.replay_buffer.beta > 0.5, "beta grows with the progress"


def test_a_callback_can_stop_it():
    says = iter([True, True, False])
    assert toy_dqn().learn(400, callback=lambda *_: next(says)).num_timesteps == 15


def test_a_saved_model_keeps_its_settings(tmp_path: Any):
    toy_dqn(double_q=True, loss="mse", prioritized={"alpha": 0.3}).learn(50).save(tmp_path / "model.zip")
    again = fasttrain.DQN.load(tmp_path / "model.zip", env=fasttrain.NativeVecEnv(ToyGame(5), seed=0), device="cpu")
    assert (again.double_q, again.loss_kind, again.prioritized) == (True, "mse", {"alpha": 0.3})
    assert isinstance(again.replay_buffer, PrioritizedReplayBuffer)
    again.learn(50)
    again.__dict__["loss"] = again.__dict__.pop("loss_kind")  # as in zips of before
    again.save(tmp_path / "old.zip")
    assert fasttrain.DQN.load(tmp_path / "old.zip", device="cpu").loss_kind == "mse"


def test_a_lost_transition_is_left_out(monkeypatch: pytest.MonkeyPatch):
    model = toy_dqn()
    env = model.get_env()
    step, count = env.step_slots, itertools.count()

    def with_a_fault(actions: Any) -> None:
        step(actions)
        if next(count) == 7:
            env.slots.truncations[3] = True
            env.slots.rewards[3] = 1e6
            last = np.full(env.observation_space.shape, 777.0, np.float32)
            env.slots.finished.append(FinishedEpisode(3, 0.0, 5, last, True, {}, lost=True))

    monkeypatch.setattr(env, "step_slots", with_a_fault)
    storage = model.learn(100).replay_buffer
    batch = storage.sample(1000)
    assert batch.rewards.max() < 1e6
    assert batch.next_observations.max() < 777.0
    assert storage.dones[6, 3] == 1


def test_learn_has_the_arguments_of_stock():
    ours, theirs = (inspect.signature(kind.learn).parameters for kind in (fasttrain.DQN, stable_baselines3.DQN))
    assert {name: each.default for name, each in ours.items()} == {name: each.default for name, each in theirs.items()}


@pytest.mark.parametrize(
    ("space", "engine"),
    [(spaces.MultiDiscrete([5]), "torch"), (spaces.MultiDiscrete([5]), "kernels"),
     (spaces.MultiDiscrete([3, 4], np.int32), "kernels")],
    ids=str,
)  # fmt: skip
def test_unusual_sub_actions(space: Any, engine: str):
    vec = seeded_vec(lambda: RandomEnv(spaces.Box(-1, 1, (4,), np.float32), space))
    model = fasttrain.DQN("MlpPolicy", vec, engine=engine, **SETTINGS).learn(100)
    masks = np.ones((3, int(space.nvec.sum())), np.bool_)
    for given in ({"deterministic": True}, {"action_masks": masks}):
        assert model.predict(np.zeros((3, 4), np.float32), **given)[0].shape == (3, *space.shape)


class Foreign(ReplayBuffer):
    """One of the user's own."""


class OwnStorage(ReplayStorage):
    """One of the user's own, of ours."""


FOREIGN = "with replay_buffer_class=Foreign: SB3's own update"


@pytest.mark.parametrize(
    ("kind", "buffer", "options", "told"),
    [
        (fasttrain.DQN, None, {"loss": "l1"}, "loss='l1': choose huber or mse"),
        (fasttrain.DQN, Foreign, {"double_q": True}, FOREIGN),
        (fasttrain.DQN, Foreign, {"loss": "mse"}, FOREIGN),
        (fasttrain.DQN, Foreign, {"prioritized": {}}, FOREIGN),
        (Conservative, Foreign, {}, "Conservative.loss is overridden with replay_buffer_class=Foreign"),
        (fasttrain.DQN, OwnStorage, {"prioritized": {}}, "prioritized with a OwnStorage, which draws transitions in"),
    ],
)
def test_a_buffer_does_not_silently_drop_what_was_asked_for(kind: Any, buffer: Any, options: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        kind("MlpPolicy", DummyVecEnv([Forbidding]), replay_buffer_class=buffer, **SETTINGS, **options)


def test_n_steps_beside_a_buffer_class_warns_and_does_nothing_as_in_stock():
    with pytest.warns(UserWarning, match="n_steps=3"):
        model = fasttrain.DQN("MlpPolicy", "CartPole-v1", n_steps=3, replay_buffer_class=ReplayBuffer, buffer_size=100)
    assert model.replay_buffer.n_steps == 1


@pytest.mark.parametrize("double_q", [False, True])
def test_the_target_looks_at_legal_next_actions_only(double_q: bool):
    model = toy_dqn(double_q=double_q).learn(100)
    batch = model.replay_buffer.sample(64)
    masks = batch.next_action_masks
    assert masks is not None
    assert not masks.all()
    with torch.no_grad():
        online, target = model.q_net(batch.next_observations), model.q_net_target(batch.next_observations)
    ranked = torch.where(masks, online if double_q else target, -torch.inf)
    best = target.gather(1, ranked.argmax(dim=1, keepdim=True))
    evaluated = model.evaluate(batch)
    torch.testing.assert_close(evaluated.target, batch.rewards + (1 - batch.dones) * 0.99 * best)
    assert not evaluated.target.requires_grad
    torch.testing.assert_close(evaluated.q_values, model.q_net(batch.observations))
    torch.testing.assert_close(evaluated.current, evaluated.q_values.gather(1, batch.actions))


@pytest.mark.parametrize(("kind", "expected"), [("huber", (0.125 + 3 * 1.5) / 2), ("mse", (0.25 + 3 * 4.0) / 2)])
def test_the_td_loss_by_hand(kind: str, expected: float):
    model = toy_dqn(loss=kind).learn(50)
    batch = model.replay_buffer.sample(2)._replace(weights=torch.tensor([[1.0], [3.0]]))
    current = torch.tensor([[1.5], [1.0]])
    terms = model.loss(batch, Evaluated(current, current, torch.tensor([[1.0], [3.0]])))
    assert list(terms) == ["td_loss"]
    assert terms["td_loss"].item() == pytest.approx(expected)


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_counts_rates_and_log(engine: str):
    model = toy_dqn(engine=engine, learning_rate=lambda left: 1e-3 * left, learning_starts=10_000).learn(200)
    model._current_progress_remaining = 0.25
    model.train(4, 16)
    assert model.engine.gradient_updates == 4
    assert model.logger.name_to_value["train/n_updates"] == 4
    assert model.policy.optimizer.state[next(model.q_net.parameters())]["step"] == 4
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-4)


def test_a_loss_that_is_not_finite_is_an_error():
    model = toy_dqn(engine="kernels").learn(60)
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    model.replay_buffer.rewards[:] = np.inf
    with pytest.raises(EnvError, match="at step .*: the loss is not finite .* lower the learning rate"):
        model.train(1, 16)
