"""Our PPO and MaskablePPO as SB3 algorithms: callbacks, saving, envs, buffers, errors; and the update and its log."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv

from accelerated import WithTerm, filled, masked_model, minibatch_terms, weights
from fasttrain.algos.engine import EngineSettings, Statistics
from fasttrain.algos.policy_view import view_of
from fasttrain.algos.ppo import PPO, MaskablePPO, has_stock_buffer, storage_of
from fasttrain.algos.recurrent import MaskableRecurrentPPO
from fasttrain.algos.reuse import Reuse
from fasttrain.algos.step import PPOStep
from fasttrain.buffers.stock import RolloutView
from fasttrain.errors import ConfigError, EnvError, EnvSpecError
from fasttrain.perf.clock import PhaseClock
from fasttrain.vec.native import NativeVecEnv
from toys import ToyGame, toy_gym_vec

SETTINGS: dict[str, Any] = {"n_steps": 8, "batch_size": 20, "n_epochs": 1, "device": "cpu", "seed": 1}


class AnyAction(ToyGame):
    def _write_mask(self, index: int) -> None:
        self.slots.action_masks[index] = True


def native(num_envs: int = 5, kind: type[ToyGame] = ToyGame) -> NativeVecEnv:
    return NativeVecEnv(kind(num_envs))


def made(kind: Any = MaskablePPO, env: Any = None, **changes: Any) -> Any:
    return kind("MlpPolicy", env or native(), **SETTINGS | changes)


class Recorder(BaseCallback):
    """Keeps what a callback sees at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict] = []
        self.events: list[str] = []

    def _on_rollout_start(self) -> None:
        self.events.append("start")

    def _on_step(self) -> bool:
        self.events.append("step")
        names = ("infos", "dones", "rewards", "new_obs", "actions", "values", "log_probs", "obs_tensor", "n_steps")
        self.steps.append({name: self.locals[name] for name in names})
        assert self.locals["self"] is self.model
        return True

    def _on_rollout_end(self) -> None:
        self.events.append("end")
        assert self.locals["values"].shape == (5, 1), "those after the last step"


def test_callbacks_see_each_step_and_episodes_are_counted():
    recorder, model = Recorder(), made()
    model.learn(40, recorder)
    assert sorted(episode["l"] for episode in model.ep_info_buffer) == [3, 3, 4, 4, 5, 6, 7]
    assert list(model.ep_success_buffer).count(True) == 4
    assert model._last_episode_starts.tolist() == [False, True, False, False, False]
    assert model._last_obs[:, 1].tolist() == [2, 0, 3, 2, 1]
    model.learn(40, recorder, reset_num_timesteps=False)
    assert recorder.events == (["start"] + ["step"] * 8 + ["end"]) * 2
    assert model.num_timesteps == recorder.num_timesteps == 80
    for step in recorder.steps:
        assert step["actions"].shape == step["dones"].shape == step["rewards"].shape == (5,)
        assert (step["values"].shape, step["log_probs"].shape, len(step["infos"])) == ((5, 1), (5,), 5)
        assert ["terminal_observation" in info for info in step["infos"]] == step["dones"].tolist()
        # What a callback keeps is not overwritten by later steps.
        assert (step["new_obs"][:, 1] == 0).tolist() == step["dones"].tolist()
    assert [step["n_steps"] for step in recorder.steps] == [*range(8)] * 2


@pytest.mark.parametrize("engine", ["torch", "kernels"])
@pytest.mark.parametrize("make", [native, toy_gym_vec])
def test_what_is_lent_to_callbacks_are_the_same_numbers(make: Any, engine: Any):
    recorder, kept, lent = Recorder(), made(env=make(), engine=engine).learn(80), made(env=make(), engine=engine)
    lent.collector.lends = True
    lent.learn(80, recorder)
    assert torch.equal(weights(lent), weights(kept))
    storage, last = lent.rollout_buffer, recorder.steps[-8:]
    for name in ("observations", "actions", "values", "log_probs"):
        np.testing.assert_array_equal(getattr(storage, name), getattr(kept.rollout_buffer, name))
    in_storage = [np.shares_memory(step["new_obs"], storage.observations) for step in last]
    assert in_storage == [True] * 7 + [False], "written where it is stored, but for the last of the rollout"
    for name, lends in (("values", True), ("log_probs", True), ("actions", False)):  # an env may keep its actions
        shared = {np.shares_memory(step[name], getattr(storage.storage, name)) for step in last}
        assert shared == {lends and engine == "kernels"}, "kernels write where it is stored"


def test_kernels_write_the_actions_of_a_box_where_they_are_stored():
    kept = made(PPO, "Pendulum-v1", engine="kernels", batch_size=4).learn(16)
    lent = made(PPO, "Pendulum-v1", engine="kernels", batch_size=4)
    lent.collector.lends = True
    lent.learn(16)
    assert torch.equal(weights(lent), weights(kept))
    np.testing.assert_array_equal(lent.rollout_buffer.actions, kept.rollout_buffer.actions)


def test_a_copied_buffer_is_written_where_the_copy_is():
    model = made(engine="kernels")
    model.collector.lends = True
    model.learn(40)
    before = model.rollout_buffer.values.copy()
    model.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    model.learn(40, reset_num_timesteps=False)
    assert (model.rollout_buffer.values != before).all()


def test_a_callback_can_stop_the_run():
    says = iter([True, True, False])
    model = made().learn(1000, lambda *_: next(says))
    assert model.num_timesteps == 15
    assert model.rollout_buffer.pos == 2, "the step at which the callback stopped is not stored, as in SB3"
    assert model.learn(40).num_timesteps == 40


def test_truncated_episodes_are_bootstrapped_with_the_value_of_their_last_observation():
    model = made(learning_rate=0.0, gamma=0.5).learn(40)
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

    model = made(env=native(kind=ToyGame if use_masking else NoMasks)).learn(200, use_masking=use_masking)
    assert model.rollout_buffer.storage.masks.all() == (not use_masking)
    masks = np.zeros((5, 8), np.bool_)
    masks[:, 4] = True
    assert model.predict(np.zeros((5, 3), np.float32), action_masks=masks)[0].tolist() == [4] * 5
    assert made(PPO, native(kind=AnyAction)).learn(40).rollout_buffer.storage.masks is None


def test_a_state_without_legal_action_counts_as_all_legal_and_is_told_once():
    class Stuck(ToyGame):
        def step(self) -> None:
            self.slots.action_masks[2] = True  # any action is taken
            super().step()
            self.slots.action_masks[2] = self.steps[2] < 2

    with pytest.warns(UserWarning, match="env 2 at step 10") as told:
        model = made(env=native(kind=Stuck)).learn(40)
    assert len(told) == 1
    assert model.collector.empty_masks.count > 1
    model.collector.empty_masks.raises = True
    with pytest.raises(EnvError, match="no legal action in env 2 at step"):
        model.learn(40)


def test_an_env_without_masks_and_collecting_before_learn_are_errors():
    with pytest.raises(EnvSpecError, match="ActionMasker"):
        made(env="CartPole-v1").learn(40)
    with pytest.raises(ValueError):  # noqa: PT011  # sb3-contrib's class
        made(env="CartPole-v1").learn(40)
    model = made(PPO)
    with pytest.raises(RuntimeError, match="learn"):
        model.collect_rollouts(model.get_env(), Recorder(), model.rollout_buffer, 4)


@pytest.mark.parametrize(
    ("engine", "training"), [("torch", ("train_fwd", "train_bwd", "optim")), ("kernels", ("train",))]
)
def test_the_clock_can_be_shared_and_adds_up(engine: str, training: tuple[str, ...]):
    model, clock = made(engine=engine), PhaseClock()
    model.time_with(clock)
    model.learn(80)
    spent = clock.snapshot()
    for phase in ("action", "env_step", "buffer", "log", *training):
        assert spent[phase] > 0, phase
    assert clock.enter("other") == "other", "the phase before is back after collecting and training"


@pytest.mark.parametrize("kind", [PPO, MaskablePPO])
def test_a_zip_knows_nothing_of_fasttrain(kind: Any, tmp_path: Path):
    """So that it loads where there is none."""
    model = made(kind, toy_gym_vec(), clip_range_vf=0.2, target_kl=0.5).learn(40)
    model.save(tmp_path / "model")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        for name in archive.namelist():
            assert b"fasttrain" not in archive.read(name), name
        for name in (b'"_fast"', b'"engine"', b'"collector"'):
            assert name not in archive.read("data")
    model.save(tmp_path / "again", exclude=["_last_obs"])
    kind.load(tmp_path / "again", env=toy_gym_vec()).learn(40)


def test_envs_their_number_and_steps_can_change(tmp_path: Path):
    model = made(env=toy_gym_vec()).learn(40)
    model.set_env(native())
    model.learn(40)
    assert model.collector.source is model.get_env()
    model.n_steps = 4
    assert model.learn(20).rollout_buffer.storage.settings[:2] == (4, 5)
    model.save(tmp_path / "model")
    loaded = MaskablePPO.load(tmp_path / "model", env=native(3), batch_size=12).learn(12)
    assert loaded.rollout_buffer.storage.settings[:2] == (4, 3)


def test_a_rollout_buffer_of_the_users_own_is_served_by_sb3s_loops():
    class Doubled(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
            super().compute_returns_and_advantage(last_values, dones)
            self.returns *= 2

    ours, stock = (
        made(kind, native(kind=AnyAction), rollout_buffer_class=Doubled).learn(80)
        for kind in (PPO, stable_baselines3.PPO)
    )
    assert isinstance(ours.rollout_buffer, Doubled)
    assert not has_stock_buffer(ours)
    assert torch.equal(weights(ours), weights(stock))


def small_model(kind: Any = PPO, **changes: Any) -> Any:
    return made(kind, toy_gym_vec(2), batch_size=8, seed=0, **changes)


def test_storage_is_kept_while_it_fits():
    model = small_model()
    storage, view = model.rollout_buffer.storage, model.rollout_buffer
    assert has_stock_buffer(model)
    assert storage_of(model, 8, 2) is storage
    assert model.rollout_buffer is view
    assert storage_of(model, 4, 2) is not storage
    assert model.rollout_buffer.buffer_size == 4
    model.gamma = 0.5
    assert storage_of(model, 4, 2).gamma == 0.5
    assert model.rollout_buffer_class is RolloutBuffer, "the zip must name SB3's class"


def test_a_buffer_of_sb3_that_is_put_in_afterwards_gives_way_to_ours():
    model = small_model()
    model.n_steps = 4
    model.rollout_buffer = RolloutBuffer(4, model.observation_space, model.action_space, "cpu", n_envs=2)
    assert isinstance(model.learn(8).rollout_buffer, RolloutView)


class OwnLoss(PPO):
    def loss(self, batch: Any, evaluated: Any) -> Any:
        return super().loss(batch, evaluated)


def test_a_stock_buffer_that_the_user_filled_is_trained_on_as_by_sb3():
    """Its update is SB3's, which calls no `loss` of a subclass: that is refused."""

    def filled(kind: Any) -> Any:
        model, random, one = small_model(kind), np.random.default_rng(0), torch.ones(2)
        model.set_logger(configure(format_strings=[]))
        model.rollout_buffer = buffer = RolloutBuffer(8, model.observation_space, model.action_space, "cpu", n_envs=2)
        for _ in range(8):
            seen = random.random((2, *model.observation_space.shape))
            buffer.add(seen, np.zeros(2), random.random(2), np.zeros(2), one, -one)
        buffer.compute_returns_and_advantage(torch.zeros(2), np.zeros(2))
        return model

    ours, stock = filled(PPO), filled(stable_baselines3.PPO)
    for model in (ours, stock):
        np.random.seed(0)
        model.train()
    assert torch.equal(weights(ours), weights(stock))
    with pytest.raises(ConfigError, match="reuse or an own loss with a rollout in a RolloutBuffer: SB3's own update"):
        filled(OwnLoss).train()
    ours.reuse = Reuse(2)
    with pytest.raises(ConfigError, match="reuse or an own loss"):
        ours.train()


def test_a_buffer_of_the_users_own_has_no_place_beside_memory_and_masks():
    model = MaskableRecurrentPPO("MlpLstmPolicy", toy_gym_vec(2), n_steps=8, device="cpu")
    spaces_of = model.observation_space, model.action_space
    model.rollout_buffer = type("Own", (RolloutBuffer,), {})(8, *spaces_of, "cpu", n_envs=2)
    with pytest.raises(ConfigError, match="MaskableRecurrentPPO needs its own rollout buffer"):
        model.learn(16)


KEYS = {
    "learning_rate", "entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss",
    "explained_variance", "n_updates", "clip_range", "clip_range_vf",
}  # fmt: skip


def collected(**kwargs: Any) -> Any:
    """A model whose storage is filled and which has not been trained."""
    return filled(masked_model(EngineSettings(), **kwargs))


def test_ratio_is_one_before_the_first_step():
    model = collected()
    batch = next(model.rollout_buffer.storage.minibatches(20))
    terms = minibatch_terms(model.work(), view_of(model.policy, model.action_space), batch)
    assert abs(terms["approx_kl"].item()) < 1e-6
    assert terms["clip_fraction"].item() == 0
    # With a ratio of one the policy loss is minus the mean of the normalised advantages, which is zero.
    assert abs(terms["policy_gradient_loss"].item()) < 1e-6


def test_the_log_has_the_keys_of_sb3_and_its_explained_variance():
    model = collected(clip_range_vf=0.2)
    model.train()
    storage = model.rollout_buffer.storage
    values, returns = storage.values.T.reshape(-1), storage.returns.T.reshape(-1)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert model.logger.name_to_value["train/explained_variance"] == pytest.approx(float(expected))
    keys = {key.removeprefix("train/") for key in model.logger.name_to_value if key.startswith("train/")}
    assert keys == KEYS
    assert model.logger.name_to_value["train/n_updates"] == 2


def test_target_kl_stops_before_the_step_that_would_exceed_it():
    model = collected(target_kl=1e-12, learning_rate=0.1)
    seen = count_steps(model)
    model.train()
    assert len(seen) == 1, "the first minibatch has no divergence yet, the second stops the update"
    assert model._n_updates == 1


@pytest.mark.parametrize(("moved", "stops"), [(1.45, False), (1.55, True)])
def test_an_update_may_move_one_and_a_half_times_the_target(moved: float, stops: bool):
    model = collected(target_kl=0.01)
    step = PPOStep(model.engine, model.work())
    step.noted.append({"approx_kl": torch.tensor(moved * 0.01)})
    assert step.diverged() == stops


def count_steps(model) -> list[None]:
    seen: list[None] = []
    model.policy.optimizer.register_step_post_hook(lambda *_: seen.append(None))
    return seen


def test_nothing_is_read_inside_the_minibatch_loop(monkeypatch: pytest.MonkeyPatch):
    model = collected()
    model.use_engine(EngineSettings(fused_adam=True))  # SB3's own loop reads its step counter
    nothing = Statistics({}, np.zeros(0), steps=0, epochs=0)
    monkeypatch.setattr(PPOStep, "of_rollout", lambda *_: nothing)  # once per rollout
    monkeypatch.setattr("fasttrain.algos.step.reading_waits", lambda _: True)  # as on CUDA
    model.policy.set_training_mode(True)
    steps = count_steps(model)
    read = []
    for name in ("item", "cpu", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            read.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    assert model.update() is not None
    assert read == []
    assert len(steps) == 8


def test_a_single_row_left_over_is_trained_on_and_frozen_parameters_stay():
    model = collected(batch_size=79)  # 80 rows: the last minibatch has one, whose advantage has no deviation
    frozen = model.policy.value_net.weight.requires_grad_(False)
    before = copy.deepcopy(frozen)
    model.train()
    assert all(torch.isfinite(parameter).all() for parameter in model.policy.parameters())
    assert torch.equal(frozen, before)


def learned(kind: type[PPO], engine: EngineSettings | str = "torch", **kwargs: Any) -> torch.Tensor:
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    model = kind("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu", engine=engine, **kwargs)
    return weights(model.learn(128))


def test_a_term_of_the_users_is_computed_though_the_loss_was_to_be_compiled():
    plain = learned(WithTerm)
    with pytest.warns(match="WithTerm.loss is overridden"):
        fast = learned(WithTerm, EngineSettings(compile_mode="default"))
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)  # torch's fused Adam rounds otherwise


def test_the_entropy_has_a_gradient_for_a_loss_of_the_users():
    class Curious(PPO):
        def loss(self, batch: Any, evaluated: Any) -> Any:
            return super().loss(batch, evaluated) | {"curious": -evaluated.entropy.mean()}

    assert not torch.equal(learned(Curious), learned(PPO))
    assert torch.equal(learned(PPO, ent_coef=0.0), learned(PPO))
