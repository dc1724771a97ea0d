"""Our PPO and MaskablePPO as SB3 algorithms: callbacks, saving, loading, changing envs, errors."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame, ToyGymEnv, single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
SETTINGS = {"n_steps": 8, "batch_size": 20, "n_epochs": 1, "device": "cpu", "seed": 1}


def native(num_envs: int = 5) -> NativeVecEnv:
    return NativeVecEnv(ToyGame(num_envs))


class Recorder(BaseCallback):
    """Keeps what a callback sees at each step."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.stop_after = stop_after
        self.steps: list[dict] = []
        self.events: list[str] = []

    def _on_rollout_start(self) -> None:
        self.events.append("start")

    def _on_step(self) -> bool:
        self.events.append("step")
        names = ("infos", "dones", "rewards", "new_obs", "actions", "values", "log_probs", "obs_tensor", "n_steps")
        self.steps.append({name: self.locals[name] for name in names})
        assert self.locals["self"] is self.model
        return self.stop_after is None or self.n_calls < self.stop_after

    def _on_rollout_end(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("make", [native, toy_gym_vec])
def test_callbacks_see_each_step(make):
    recorder = Recorder()
    model = MaskablePPO("MlpPolicy", make(), **SETTINGS).learn(80, recorder)
    assert recorder.events == (["start"] + ["step"] * 8 + ["end"]) * 2
    assert model.num_timesteps == recorder.num_timesteps == 80
    for step in recorder.steps:
        assert step["actions"].shape == step["dones"].shape == step["rewards"].shape == (5,)
        assert step["values"].shape == (5, 1)
        assert step["log_probs"].shape == (5,)
        assert len(step["infos"]) == 5
        assert ["terminal_observation" in info for info in step["infos"]] == step["dones"].tolist()
        # What a callback keeps is not overwritten by later steps.
        assert (step["new_obs"][:, 1] == 0).tolist() == step["dones"].tolist()
    assert [step["n_steps"] for step in recorder.steps] == [*range(8)] * 2


@pytest.mark.parametrize("make", [native, toy_gym_vec])
def test_lent_observations_are_the_same_numbers(make):
    recorder = Recorder()
    kept = MaskablePPO("MlpPolicy", make(), **SETTINGS).learn(80)
    lent = MaskablePPO("MlpPolicy", make(), **SETTINGS)
    lent.collector.lends_observations = True
    lent.learn(80, recorder)
    for ours, theirs in zip(lent.policy.parameters(), kept.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    storage = lent.rollout_buffer
    np.testing.assert_array_equal(storage.observations, kept.rollout_buffer.observations)
    in_storage = [np.shares_memory(step["new_obs"], storage.observations) for step in recorder.steps[-8:]]
    native_env = lent.env.__class__.__name__ == "NativeVecEnv"
    assert in_storage == [native_env] * 7 + [False], "written where it is stored, but for the last of the rollout"


@pytest.mark.parametrize("make", [native, toy_gym_vec])
def test_episode_statistics(make):
    model = MaskablePPO("MlpPolicy", make(), **SETTINGS)
    model.learn(40)
    assert sorted(episode["l"] for episode in model.ep_info_buffer) == [3, 3, 4, 4, 5, 6, 7]
    assert list(model.ep_success_buffer).count(True) == 4
    assert model._last_episode_starts.tolist() == [False, True, False, False, False]
    assert model._last_obs[:, 1].tolist() == [2, 0, 3, 2, 1]


def test_a_callback_can_stop_the_run():
    model = MaskablePPO("MlpPolicy", native(), **SETTINGS).learn(1000, Recorder(stop_after=3))
    assert model.num_timesteps == 15
    assert model.rollout_buffer.pos == 2, "the step at which the callback stopped is not stored, as in SB3"
    model.learn(40)
    assert model.num_timesteps == 40


def test_truncated_episodes_are_bootstrapped_with_the_value_of_their_last_observation():
    model = MaskablePPO("MlpPolicy", native(), **SETTINGS, learning_rate=0.0, gamma=0.5)
    model.learn(40)
    storage = model.rollout_buffer
    plain = storage.actions[:, :, 0].astype(np.float32) / 10
    added = storage.rewards - plain
    assert (np.abs(added) > 1e-6).sum() == 3, "env 1 is cut twice, env 3 once; env 4 was cut and terminated at once"
    final = torch.tensor([[1.0 + 1, 4, float(storage.actions[3, 1, 0])]])
    assert storage.rewards[3, 1] == pytest.approx(plain[3, 1] + 0.5 * model.policy.predict_values(final).item())


@pytest.mark.parametrize("use_masking", [True, False])
def test_masks_are_respected_and_can_be_left_out(use_masking: bool):
    class NoMasks(ToyGame):
        def step(self) -> None:
            self.slots.action_masks[:] = True  # let illegal actions pass
            super().step()

    env = NativeVecEnv(ToyGame() if use_masking else NoMasks())
    model = MaskablePPO("MlpPolicy", env, **SETTINGS).learn(400, use_masking=use_masking)
    assert model.rollout_buffer.storage.masks.all() == (not use_masking)


def test_a_state_without_legal_action_counts_as_all_legal_and_is_told_once():
    class Stuck(ToyGame):
        def step(self) -> None:
            self.slots.action_masks[2] = True  # any action is taken
            super().step()
            self.slots.action_masks[2] = self.steps[2] < 2

    with pytest.warns(UserWarning, match="env 2 at step 10") as told:
        model = MaskablePPO("MlpPolicy", NativeVecEnv(Stuck()), **SETTINGS).learn(40)
    assert len(told) == 1
    assert model.collector.empty_masks.count > 1
    model.collector.empty_masks.raises = True
    with pytest.raises(EnvError, match="no legal action in env 2 at step"):
        model.learn(40)


def test_an_env_without_masks_is_an_error():
    with pytest.raises(EnvSpecError, match="ActionMasker"):
        MaskablePPO("MlpPolicy", "CartPole-v1", **SETTINGS).learn(40)
    with pytest.raises(ValueError):  # noqa: PT011  # sb3-contrib's class
        MaskablePPO("MlpPolicy", "CartPole-v1", **SETTINGS).learn(40)


@pytest.mark.parametrize(("kind", "stock"), [(PPO, RolloutBuffer), (MaskablePPO, MaskableRolloutBuffer)])
def test_the_rollout_buffer_is_one_of_stocks(kind, stock):
    """And a subclass whose update is stock's own loop learns from it as stock does."""

    class StockUpdate(kind):
        def train(self) -> None:
            (stable_baselines3.PPO if kind is PPO else sb3_contrib.MaskablePPO).train(self)

    model = kind("MlpPolicy", toy_gym_vec(), **SETTINGS).learn(80)
    other = StockUpdate("MlpPolicy", toy_gym_vec(), **SETTINGS).learn(80)
    assert isinstance(model.rollout_buffer, stock)
    assert type(model.rollout_buffer) is not stock
    for one, two in zip(model.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_ppo_ignores_masks():
    class AnyAction(ToyGame):
        def _write_mask(self, index: int) -> None:
            self.slots.action_masks[index] = True

    model = PPO("MlpPolicy", NativeVecEnv(AnyAction()), **SETTINGS).learn(40)
    assert model.rollout_buffer.storage.masks is None


@pytest.mark.parametrize(
    ("engine", "training"), [("torch", ("train_fwd", "train_bwd", "optim")), ("kernels", ("train",))]
)
def test_the_clock_can_be_shared_and_adds_up(engine: str, training: tuple[str, ...]):
    model = MaskablePPO("MlpPolicy", native(), engine=engine, **SETTINGS)
    clock = PhaseClock()
    model.time_with(clock)
    model.learn(80)
    spent = clock.snapshot()
    for phase in ("action", "env_step", "buffer", "log", *training):
        assert spent[phase] > 0, phase
    assert clock.enter("other") == "other", "the phase before is back after collecting and training"


@pytest.mark.parametrize(
    ("ours", "stock"), [(PPO, stable_baselines3.PPO), (MaskablePPO, sb3_contrib.MaskablePPO)], ids=["PPO", "Maskable"]
)
def test_saved_by_us_loaded_by_stock_and_back(ours, stock, tmp_path: Path):
    settings = SETTINGS | {"clip_range_vf": 0.2, "target_kl": 0.5}
    model = ours("MlpPolicy", toy_gym_vec(), **settings).learn(80)
    model.save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        for name in archive.namelist():
            assert b"fasttrain" not in archive.read(name), name
        for name in (b'"_fast"', b'"engine"', b'"collector"'):
            assert name not in archive.read("data")
    for loaded in (stock.load(tmp_path / "model"), ours.load(tmp_path / "model", env=toy_gym_vec())):
        for name, value in model.policy.state_dict().items():
            assert torch.equal(loaded.policy.state_dict()[name], value)
        mine, other = (m.policy.optimizer.state_dict() for m in (model, loaded))
        assert mine["param_groups"] == other["param_groups"]
        assert torch.equal(mine["state"][0]["exp_avg"], other["state"][0]["exp_avg"])
        assert loaded.num_timesteps == 80
    loaded.learn(40, reset_num_timesteps=False)
    assert loaded.num_timesteps == 120
    model.save(tmp_path / "again", exclude=["_last_obs"])
    ours.load(tmp_path / "again", env=toy_gym_vec()).learn(40)


def test_the_zip_loads_where_fasttrain_does_not_exist(tmp_path: Path):
    MaskablePPO("MlpPolicy", native(), **SETTINGS).learn(40).save(tmp_path / "model")
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fasttrain":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import numpy as np, sb3_contrib
model = sb3_contrib.MaskablePPO.load({str(tmp_path / "model")!r}, device="cpu")
action, _ = model.predict(np.zeros(3, np.float32), action_masks=np.eye(8)[3], deterministic=True)
print(int(action), model.num_timesteps)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3", "40"], done.stderr


def test_predict_is_that_of_the_policy():
    model = MaskablePPO("MlpPolicy", native(), **SETTINGS).learn(40)
    observations = model.get_env().reset()
    masks = np.zeros((5, 8), np.bool_)
    masks[:, 4] = True
    assert model.predict(observations, action_masks=masks)[0].tolist() == [4] * 5


def test_set_env_and_another_number_of_envs(tmp_path: Path):
    model = MaskablePPO("MlpPolicy", toy_gym_vec(), **SETTINGS).learn(40)
    model.set_env(native())
    model.learn(40)
    assert model.collector.source is model.get_env()
    model.save(tmp_path / "model")
    loaded = MaskablePPO.load(tmp_path / "model", env=native(3), batch_size=12)
    loaded.learn(24)
    assert loaded.rollout_buffer.storage.settings[:2] == (8, 3)


def test_n_steps_can_change_between_rollouts():
    model = MaskablePPO("MlpPolicy", native(), **SETTINGS).learn(40)
    model.n_steps = 4
    model.learn(20)
    assert model.rollout_buffer.storage.settings[:2] == (4, 5)


def test_normalised_envs_are_normalised():
    env = VecNormalize(native())
    model = MaskablePPO("MlpPolicy", env, **SETTINGS).learn(80)
    assert env.obs_rms.count > 80
    np.testing.assert_array_equal(model._last_obs, env.normalize_obs(env.get_original_obs()))


def test_a_single_gym_env_is_wrapped_by_sb3():
    model = MaskablePPO("MlpPolicy", ToyGymEnv(0), **SETTINGS | {"batch_size": 8}).learn(16)
    assert len(model.ep_info_buffer) == 5


def test_a_rollout_buffer_of_the_users_own_is_served_by_sb3s_loops():
    class Doubled(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values, dones):
            super().compute_returns_and_advantage(last_values, dones)
            self.returns *= 2

    class AnyAction(ToyGame):
        def _write_mask(self, index: int) -> None:
            self.slots.action_masks[index] = True

    runs = [
        model_class("MlpPolicy", NativeVecEnv(AnyAction()), rollout_buffer_class=Doubled, **SETTINGS).learn(80)
        for model_class in (PPO, stable_baselines3.PPO)
    ]
    assert isinstance(runs[0].rollout_buffer, Doubled)
    for name, value in runs[1].policy.state_dict().items():
        assert torch.equal(runs[0].policy.state_dict()[name], value)


def test_collecting_before_learn_is_refused():
    model = PPO("MlpPolicy", native(), **SETTINGS)
    with pytest.raises(RuntimeError, match="learn"):
        model.collect_rollouts(model.get_env(), Recorder(), model.rollout_buffer, 4)
