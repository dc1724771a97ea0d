from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

import fasttrain
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.algos.engine import EngineSettings
from fasttrain.errors import EnvError
from fasttrain.threads import ThreadChoice
from fasttrain_games.skullking.game import SkullKingGame

BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)


def make_policy(space: spaces.Space[Any] = BOX, action: spaces.Space[Any] | None = None, **kwargs: Any) -> Any:
    return ActorCriticPolicy(space, action or spaces.Discrete(3), lambda _: 1e-3, **kwargs)


def test_pack_reads_what_is_there_and_keeps_the_policys_own_storage():
    policy = make_policy()
    kernels = KernelEngine(policy, EngineSettings())
    pointers = [parameter.data_ptr() for parameter in policy.parameters()]
    kernels.pack()
    for parameter, view in ((place.parameter, place.of(kernels.parameters)) for place in kernels._places):
        torch.testing.assert_close(view, parameter.detach(), rtol=0, atol=0)
    assert pointers == [parameter.data_ptr() for parameter in policy.parameters()]
    places = torch.zeros(kernels.size)
    for view in (place.of(places) for place in kernels._places):
        view += 1.0
    assert places.max() == 1.0, "no two parameters share a place"
    assert places.sum() == sum(parameter.numel() for parameter in policy.parameters())


def trained(kind: str, rollouts: int, **settings: Any) -> Any:
    """Our MaskablePPO on Skull King; rollouts are the same with and without the kernels only for the first one."""
    env = fasttrain.NativeVecEnv(SkullKingGame(16), seed=0)
    arguments = {"n_steps": 32, "batch_size": 128, "n_epochs": 3, "learning_rate": 1e-3, **settings}
    model = fasttrain.MaskablePPO("MlpPolicy", env, seed=0, device="cpu", **arguments)
    model._setup_learn(512 * rollouts, None)
    callback = CallbackList([])
    callback.init_callback(model)
    for _ in range(rollouts):
        model.use_engine("torch")  # collect as stock does: the same data for both
        model.collect_rollouts(env, callback, model.rollout_buffer, model.n_steps)
        model.use_engine(kind)
        model.train()
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ent_coef": 0.02, "clip_range_vf": 0.2},
        {"normalize_advantage": False, "max_grad_norm": 0.05},
        {"batch_size": 100},
        {"policy_kwargs": {"activation_fn": torch.nn.ReLU, "net_arch": [32]}},
        {"policy_kwargs": {"net_arch": {"pi": [16, 8, 4], "vf": [20]}}},
        {"policy_kwargs": {"net_arch": [1024, 520]}},
    ],
)
def test_a_whole_update_equals_autograds(settings: dict[str, Any]):
    eager, fused = trained("torch", 1, **settings), trained("kernels", 1, **settings)
    assert isinstance(fused.engine, KernelEngine)
    assert eager.engine.gradient_updates == fused.engine.gradient_updates > 0
    assert eager._n_updates == fused._n_updates
    for (name, expected), value in zip(
        eager.policy.state_dict().items(), fused.policy.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    log, reference = fused.logger.name_to_value, eager.logger.name_to_value
    assert set(log) == set(reference)
    for key in reference:
        assert log[key] == pytest.approx(reference[key], rel=2e-3, abs=2e-5), key


def test_adams_state_goes_on_where_it_was():
    """Two updates: fused then eager, against eager twice; a lost moment or step would show in the second."""
    eager, mixed = trained("torch", 1), trained("kernels", 1)
    for model in (eager, mixed):
        model.use_engine("torch")
        np.random.seed(1)
        model.train()
    for expected, value in zip(eager.policy.parameters(), mixed.policy.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=5e-5)
        state, reference = mixed.policy.optimizer.state[value], eager.policy.optimizer.state[expected]
        assert state["step"] == reference["step"]
        torch.testing.assert_close(state["exp_avg_sq"], reference["exp_avg_sq"], rtol=1e-3, atol=1e-9)


def test_target_kl_stops_at_the_same_minibatch():
    settings = {"target_kl": 0.005, "learning_rate": 5e-3, "n_epochs": 10}
    eager, fused = trained("torch", 1, **settings), trained("kernels", 1, **settings)
    assert 0 < fused.engine.gradient_updates < 40
    assert fused.engine.gradient_updates == eager.engine.gradient_updates
    assert fused._n_updates == eager._n_updates
    assert fused.logger.name_to_value["train/approx_kl"] == pytest.approx(
        eager.logger.name_to_value["train/approx_kl"], rel=1e-3
    )


def test_the_ratio_is_one_where_nothing_has_changed_yet():
    model = trained("kernels", 1, n_epochs=1, batch_size=512)
    assert model.logger.name_to_value["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert model.logger.name_to_value["train/clip_fraction"] == 0.0


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch):
    def weights(on_threads: bool, parts: int = 2) -> torch.Tensor:
        monkeypatch.setattr(ThreadChoice, "next", lambda _: on_threads)
        env = fasttrain.NativeVecEnv(SkullKingGame(16), seed=0)
        model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=64, batch_size=1024, n_epochs=2, seed=0, device="cpu")
        model.use_engine(EngineSettings(kind="kernels", threads=parts))
        model.learn(1024)
        return model.policy.action_net.weight.detach()

    assert torch.equal(weights(True), weights(False))
    torch.testing.assert_close(weights(True), weights(False, parts=1), rtol=0, atol=1e-5)


def test_torchs_number_of_threads_is_left_alone():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        env = fasttrain.NativeVecEnv(SkullKingGame(16), seed=0)
        model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=64, batch_size=1024, n_epochs=2, seed=0, device="cpu")
        model.use_engine(EngineSettings(kind="kernels", threads=2))
        model.learn(1024)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_trained_model_is_stock(tmp_path: Any):
    env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=2, seed=0, device="cpu")
    model.use_engine("kernels")
    model.learn(512)
    assert isinstance(model.engine, KernelEngine)
    model.save(tmp_path / "model")
    stock = sb3_contrib.MaskablePPO.load(tmp_path / "model", env=env, device="cpu")
    for key, value in model.policy.state_dict().items():
        assert torch.equal(stock.policy.state_dict()[key], value)
    stock.learn(256)  # its optimizer takes the state over
    (step,) = {int(state["step"]) for state in stock.policy.optimizer.state.values()}
    assert step == (512 + 256) // 64 * 2


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fresh_process_trains_with_kernels_from_the_disk_cache(tmp_path: Any, threads: int):
    """Cached machine code reaches numba's threads without having started them; that crashed once. numba starts them
    once in a process, and sets torch's number when it does; torch keeps its own."""
    code = (
        "import stable_baselines3, torch, fasttrain\n"
        "from fasttrain.algos.engine import EngineSettings\n"
        "from fasttrain_games.skullking.game import SkullKingGame\n"
        f"torch.set_num_threads({threads})\n"
        "env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)\n"
        "model = fasttrain.MaskablePPO('MlpPolicy', env, n_steps=64, batch_size=512, n_epochs=2, device='cpu')\n"
        f"model.use_engine(EngineSettings(kind='kernels', threads={3 - threads}))\n"
        "model.learn(512)\n"
        "print('trained', model.engine.gradient_updates, torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"trained 2 {threads}\n"), done.stderr


@pytest.mark.parametrize("masked", [True, False])
def test_rows_learned_from_are_the_rows_stored(masked: bool):
    env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, seed=0, device="cpu")
    if not masked:
        env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
        model = fasttrain.PPO("MlpPolicy", env, n_steps=16, batch_size=48, n_epochs=1, seed=0, device="cpu")
    model.use_engine("kernels")
    for _ in range(2):  # the second rollout must not be made of the first
        model.learn(16 * env.num_envs, reset_num_timesteps=False)
        storage: Any = model.rollout_buffer.storage
        rows = model.engine._rows_of_rollout(storage)
        seen = storage.observations.reshape(16 * env.num_envs, -1)
        masks = storage.masks.reshape(len(seen), -1) if masked else np.ones((len(seen), 2), np.bool_)
        assert len(rows.starts) == len(rows.legal_starts) == len(seen) + 1
        for row, (observation, mask) in enumerate(zip(seen, masks, strict=True)):
            part = slice(rows.starts[row], rows.starts[row + 1])
            assert rows.columns[part].tolist() == np.flatnonzero(observation).tolist()
            assert np.array_equal(rows.values[part], observation[observation != 0])
            legal = rows.legal[rows.legal_starts[row] : rows.legal_starts[row + 1]]
            assert legal.tolist() == np.flatnonzero(mask).tolist()


def test_what_a_callback_writes_into_the_observations_is_learned_from():
    class Halves(BaseCallback):
        def _on_rollout_end(self) -> None:
            self.model.rollout_buffer.observations[:, ::2] *= 0.5

        def _on_step(self) -> bool:
            return True

    def learned(callback: Any) -> Any:
        env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
        model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, seed=0, device="cpu")
        model.use_engine("kernels")
        model.learn(2 * 16 * 8, callback=callback)
        return torch.cat([parameter.flatten() for parameter in model.policy.parameters()])

    assert not torch.equal(learned(None), learned(Halves()))


def test_a_replaced_head_is_what_learns():
    env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.use_engine("kernels")
    model.learn(256)
    model.policy.action_net = torch.nn.Linear(64, 86)
    model.policy.optimizer = torch.optim.Adam(model.policy.parameters(), lr=1e-2)
    before = model.policy.action_net.weight.detach().clone()
    model.learn(256)
    assert not torch.equal(model.policy.action_net.weight, before)


def test_an_observation_that_is_not_finite_is_named():
    kernels = KernelEngine(make_policy(), EngineSettings())
    kernels.pack()
    observations = np.zeros((4, 4), np.float32)
    observations[2, 1] = np.nan
    with pytest.raises(EnvError, match="the observation of env 2 is not finite"):
        kernels.act(observations, None)


def test_an_update_that_is_not_finite_leaves_the_weights_alone():
    env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)
    model = fasttrain.MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.use_engine("kernels")
    model.learn(256)
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.rollout_buffer.storage._advantages[3, 2] = torch.nan
    with pytest.raises(EnvError, match="not finite"):
        model.train()
    assert all(torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())
