"""What our DQN has besides stock DQN: masks everywhere, double Q-learning, prioritized and n-step replay, kernels."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.batch import FinishedEpisode
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from fasttrain.envs.masks import ActionMasks
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.vec.base import EmptyMasks
from toys import RandomEnv, ToyGame, seeded_vec

SETTINGS: dict[str, Any] = {
    "learning_starts": 20,
    "train_freq": 1,
    "gradient_steps": 2,
    "batch_size": 16,
    "buffer_size": 400,
    "target_update_interval": 50,
    "learning_rate": 1e-3,
    "seed": 0,
    "device": "cpu",
}


def toy_model(**changes: Any) -> Any:
    """On five games that raise at once if an illegal action is played."""
    return fasttrain.DQN("MlpPolicy", fasttrain.NativeVecEnv(ToyGame(5), seed=0), **{**SETTINGS, **changes})


class Forbidding(gymnasium.Env[Any, Any]):
    """Ten steps; only action 2 is legal, or none at all."""

    def __init__(self, legal: tuple[int, ...] = (2,)) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(4)
        self.legal, self.chosen = legal, list[int]()

    def action_masks(self) -> Any:
        return np.isin(np.arange(4), self.legal)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.chosen.append(int(action))
        return np.full(3, self.steps / 10, np.float32), 1.0, self.steps == 10, False, {}


class Stop(BaseCallback):
    def _on_step(self) -> bool:
        return self.n_calls < 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", [{}, {"double_q": True, "n_steps": 3, "prioritized": {}}, {"loss": "mse"}])
def test_no_illegal_action_is_ever_played(fused: bool, changes: dict[str, Any]):
    model = toy_model(exploration_final_eps=0.3, **changes)
    if fused:
        model.use_engine("kernels")
    model.learn(400)  # ToyGame raises at an illegal one
    assert (model.engine.kind == "kernels") == fused
    assert model.engine.gradient_updates == model._n_updates == 2 * (400 - 20) // 5


def test_masks_of_single_envs():
    envs = [Forbidding(), Forbidding()]
    model = fasttrain.DQN("MlpPolicy", DummyVecEnv([lambda i=i: envs[i] for i in range(2)]), **SETTINGS)
    model.learn(200)
    assert set(envs[0].chosen + envs[1].chosen) == {2}


def test_masks_can_be_left_out():
    env = Forbidding()
    model = fasttrain.DQN("MlpPolicy", DummyVecEnv([lambda: env]), use_masking=False, **SETTINGS).learn(200)
    assert set(env.chosen) == {0, 1, 2, 3}
    assert model.replay_buffer.mask_width is None


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_where_no_action_is_legal_all_are(engine: str):
    env = Forbidding(())
    model = fasttrain.DQN("MlpPolicy", DummyVecEnv([lambda: env]), engine=engine, **SETTINGS)
    with pytest.warns(UserWarning, match="no legal action in env 0 at step 0"):
        model.learn(200)
    assert model.collector.empty_masks.count == 200
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
    settings = {**SETTINGS, "replay_buffer_kwargs": {"mask_width": 4}}
    fasttrain.DQN("MlpPolicy", env, replay_buffer_class=ReplayStorage, **settings).learn(50)


def test_stored_masks_are_those_of_the_next_state():
    model = toy_model()
    model.learn(300)
    storage = model.replay_buffer
    for row in range(storage.size()):
        for env in range(5):
            mask = storage.gather(np.array([row]), np.array([env])).next_action_masks[0].numpy()
            step = int(storage.next_observations[row, env, 1])
            expected = np.ones(8, bool) if storage.dones[row, env] else np.arange(8) != step
            np.testing.assert_array_equal(mask, expected)


def test_ends_are_stored_by_what_ended_them():
    """ToyGame's even envs end by the rules, its odd ones are cut, env 4 is both at once, which counts as the rules."""
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model = fasttrain.DQN("MlpPolicy", env, learning_starts=1000, buffer_size=500, seed=0).learn(100)
    storage = model.replay_buffer
    dones, timeouts = storage.dones[:20].astype(bool), storage.timeouts[:20].astype(bool)
    assert dones.any(axis=0).all()
    assert (timeouts[:, [1, 3]] == dones[:, [1, 3]]).all()
    assert not timeouts[:, [0, 2, 4]].any()
    masks = storage.masks_of(np.flatnonzero(dones.reshape(-1)))
    assert masks is None or np.asarray(masks).all(), "of a last state that told none, everything is legal"


@pytest.mark.parametrize("deterministic", [False, True])
def test_predict_with_masks(deterministic: bool):
    model = toy_model()
    model.exploration_rate = 0.5
    rng = np.random.default_rng(0)
    masks = rng.random((500, 8)) < 0.3
    masks[np.arange(500), rng.integers(0, 8, 500)] = True
    observations = rng.random((500, 3)).astype(np.float32)
    for _ in range(4):
        actions, _ = model.predict(observations, deterministic=deterministic, action_masks=masks)
        assert masks[np.arange(500), actions].all()
    single, _ = model.predict(observations[0], deterministic=deterministic, action_masks=masks[0])
    assert single.shape == ()
    assert masks[0, single]
    anything, _ = model.predict(observations[0], deterministic=True, action_masks=np.zeros(8, bool))
    assert anything == model.predict(observations[0], deterministic=True)[0]


def test_prioritized_replay_learns_what_it_was_wrong_about():
    model = toy_model(prioritized={"alpha": 0.7, "beta": 0.5})
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    model.learn(400)
    assert len(np.unique(model.replay_buffer.priorities)) > 50, "priorities follow the errors"
    assert model.replay_buffer.beta > 0.5, "beta grows with the progress"


def test_a_callback_can_stop_it():
    model = toy_model()
    model.learn(400, callback=Stop())
    assert model.num_timesteps == 15


def test_a_wrong_loss_is_refused():
    with pytest.raises(ConfigError, match="loss='l1': choose huber or mse"):
        toy_model(loss="l1")


def test_a_saved_model_keeps_its_settings(tmp_path: Any):
    model = toy_model(double_q=True, loss="mse", prioritized={"alpha": 0.3}).learn(100)
    model.save(tmp_path / "model.zip")
    again = fasttrain.DQN.load(tmp_path / "model.zip", env=fasttrain.NativeVecEnv(ToyGame(5), seed=0), device="cpu")
    assert (again.double_q, again.loss_kind, again.prioritized) == (True, "mse", {"alpha": 0.3})
    assert isinstance(again.replay_buffer, PrioritizedReplayBuffer)
    again.learn(100)


class Cut(Forbidding):
    """As `Forbidding`, cut after ten steps instead of ended; the legal action is the number of the step modulo 4."""

    def action_masks(self) -> Any:
        return np.arange(4) == self.steps % 4

    def step(self, action: Any) -> Any:
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, False, ended, info


def test_the_mask_of_a_truncated_episodes_last_state_is_stored():
    env = DummyVecEnv([lambda: Monitor(ActionMasks(Cut(), "method"))])
    model = fasttrain.DQN("MlpPolicy", env, **SETTINGS)
    model.learn(40)
    storage = model.replay_buffer
    cut = np.flatnonzero(storage.timeouts[:40, 0])
    assert cut.tolist() == [9, 19, 29, 39]
    assert storage.next_masks[cut, 0].tolist() == [[False, False, True, False]] * 4


def test_a_lost_transition_is_left_out(monkeypatch: pytest.MonkeyPatch):
    env = fasttrain.NativeVecEnv(ToyGame(5), seed=0)
    model = fasttrain.DQN("MlpPolicy", env, **SETTINGS)
    step, count = env.step_slots, itertools.count()

    def with_a_fault(actions: Any) -> None:
        step(actions)
        if next(count) == 7:
            env.slots.truncations[3] = True
            env.slots.rewards[3] = 1e6
            last = np.full(env.observation_space.shape, 777.0, np.float32)
            env.slots.finished.append(FinishedEpisode(3, 0.0, 5, last, True, {}, lost=True))

    monkeypatch.setattr(env, "step_slots", with_a_fault)
    model.learn(100)
    storage = model.replay_buffer
    batch = storage.sample(1000)
    assert batch.rewards.max() < 1e6
    assert batch.next_observations.max() < 777.0
    assert storage.dones[6, 3] == 1


def test_learn_has_the_arguments_of_stock():
    ours, theirs = (inspect.signature(kind.learn).parameters for kind in (fasttrain.DQN, stable_baselines3.DQN))
    assert {name: each.default for name, each in ours.items()} == {name: each.default for name, each in theirs.items()}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([5]), spaces.MultiDiscrete([3, 4], np.int32)], ids=["one", "32"]
)
def test_unusual_sub_actions(space: Any, fused: bool):
    def make() -> Any:
        return RandomEnv(spaces.Box(-1, 1, (4,), np.float32), space)

    model = fasttrain.DQN("MlpPolicy", seeded_vec(make), **SETTINGS)
    if fused:
        model.use_engine("kernels")
    model.learn(200)
    assert model.predict(np.zeros((3, 4), np.float32), deterministic=True)[0].shape == (3, *space.shape)
    masks = np.ones((3, int(space.nvec.sum())), np.bool_)
    assert model.predict(np.zeros((3, 4), np.float32), action_masks=masks)[0].shape == (3, *space.shape)


@pytest.mark.parametrize("options", [{"double_q": True}, {"loss": "mse"}, {"prioritized": {}}])
def test_a_foreign_buffer_does_not_silently_drop_what_was_asked_for(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="with replay_buffer_class=Foreign: SB3's own update"):
        fasttrain.DQN("MlpPolicy", DummyVecEnv([Forbidding]), replay_buffer_class=Foreign, **SETTINGS, **options)


class Foreign(ReplayBuffer):
    """One of the user's own."""


class OwnStorage(ReplayStorage):
    """One of the user's own, of ours."""


def test_a_storage_without_priorities_does_not_pass_by_prioritized():
    with pytest.raises(ConfigError, match="prioritized with a OwnStorage, which draws in its own way: derive it from"):
        fasttrain.DQN(
            "MlpPolicy", DummyVecEnv([Forbidding]), replay_buffer_class=OwnStorage, prioritized={}, **SETTINGS
        )


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"n_steps": 3, "gamma": 0.9}, (3, 0.9)),
        ({"replay_buffer_class": NStepReplayBuffer, "gamma": 0.9}, (3, 0.99)),
        ({"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 4, "gamma": 0.95}}, (4, 0.95)),
    ],
)
def test_n_steps_and_the_buffer_for_them_are_honoured_as_by_stock(settings: dict[str, Any], window: tuple[int, float]):
    losses = []
    for kind in (stable_baselines3.DQN, fasttrain.DQN):
        model = kind("MlpPolicy", "CartPole-v1", learning_starts=20, buffer_size=500, seed=0, device="cpu", **settings)
        assert isinstance(model.replay_buffer, NStepReplayBuffer)
        assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == window
        model.learn(120)
        losses.append(model.logger.name_to_value["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_n_steps_beside_a_buffer_class_warns_and_does_nothing_as_in_stock():
    with pytest.warns(UserWarning, match="n_steps=3"):
        model = fasttrain.DQN("MlpPolicy", "CartPole-v1", n_steps=3, replay_buffer_class=ReplayBuffer, buffer_size=100)
    assert model.replay_buffer.n_steps == 1
