"""Compiled kernels of PPO, MaskablePPO and RecurrentPPO: an update is autograd's, whatever is seen and done; what is
learned from is what was stored; a model stays stock's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from stable_baselines3 import PPO as STOCK_PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy

from accelerated import filled, weights
from fasttrain import PPO, MaskablePPO, NativeVecEnv, RecurrentPPO
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.layout import make_layout
from fasttrain.algos.engine import EngineSettings
from fasttrain.batch import flat_rows
from fasttrain.errors import EnvError
from fasttrain_games.skullking.game import SkullKingGame
from fasttrain_kernels.threads import ThreadChoice
from toys import MaskedEnv, RandomEnv, seeded_vec

BOX, SIX, ACTING = spaces.Box(-1.0, 1.0, (5,), np.float32), spaces.Discrete(6), spaces.Box(-1, 1, (3,))
KEYED = spaces.Dict(  # no alphabet: the order is the space's
    [("z", spaces.Box(-1.0, 1.0, (2, 3), np.float32)), ("a", spaces.Box(-5, 5, (2,), np.int64)),
     ("hand", spaces.MultiBinary(4))]
)  # fmt: skip


def made(kind: Any = MaskablePPO, seen: Any = BOX, acting: Any = SIX, **options: Any) -> Any:
    policy = ("MultiInput" if seen is KEYED else "Mlp") + ("LstmPolicy" if kind is RecurrentPPO else "Policy")
    env = seeded_vec(lambda: (MaskedEnv if kind is MaskablePPO else RandomEnv)(seen, acting, True))
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "ent_coef": 0.02, "seed": 0, "device": "cpu"}
    return kind(policy, env, **(settings | options))


def updated(engine: str, *where: Any, **options: Any) -> Any:
    """An update from a rollout that torch has made, by weights that have moved since, so that ratios are not 1."""
    model = filled(made(*where, **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.use_engine(engine)
    np.random.seed(3)
    model.train()
    assert model.engine.kind == engine, model.engine.unsupported_reason
    return model


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ((), {}),
        ((), {"clip_range_vf": 0.1, "ent_coef": 0.0}),
        ((), {"normalize_advantage": False, "max_grad_norm": 0.05, "batch_size": 25}),
        ((), {"policy_kwargs": {"activation_fn": torch.nn.ReLU, "net_arch": [32]}}),
        ((), {"policy_kwargs": {"net_arch": {"pi": [16, 8, 4], "vf": [20]}}}),
        ((), {"target_kl": 0.3, "learning_rate": 1e-2, "n_epochs": 9}),
        ((MaskablePPO, BOX, spaces.MultiDiscrete([3, 1, 4])), {}),
        ((PPO, KEYED), {}),
        ((PPO, BOX, ACTING), {"clip_range_vf": 0.1}),
        ((PPO, BOX, ACTING), {"policy_kwargs": {"log_std_init": -1.0, "net_arch": {"pi": [8], "vf": [20, 4]}}}),
        ((RecurrentPPO, BOX, ACTING), {"policy_kwargs": {"lstm_hidden_size": 16, "net_arch": [8]}}),
    ],
)
def test_a_whole_update_equals_autograds_and_adams_state_goes_on(where: Any, options: dict[str, Any]):
    eager, fused = updated("torch", *where, **options), updated("kernels", *where, **options)
    torch.testing.assert_close(weights(fused), weights(eager), rtol=0, atol=2e-5)
    assert eager.engine.gradient_updates == fused.engine.gradient_updates > 0
    assert eager._n_updates == fused._n_updates
    assert eager.engine.gradient_updates < 36, "it must stop for target_kl to be seen"
    log, reference = fused.logger.name_to_value, eager.logger.name_to_value
    assert log == {name: pytest.approx(value, rel=2e-3, abs=2e-5) for name, value in reference.items()}
    for model in (eager, fused):  # a lost moment or step would show
        model.use_engine("torch")
        np.random.seed(1)
        model.train()
    torch.testing.assert_close(weights(fused), weights(eager), rtol=0, atol=1e-4)
    for expected, value in zip(eager.policy.parameters(), fused.policy.parameters(), strict=True):
        state, reference = fused.policy.optimizer.state[value], eager.policy.optimizer.state[expected]
        assert state["step"] == reference["step"]
        torch.testing.assert_close(state["exp_avg_sq"], reference["exp_avg_sq"], rtol=1e-2, atol=1e-7)


def test_features_of_keys_are_joined_in_the_order_of_sb3():
    policy = MultiInputActorCriticPolicy(KEYED, SIX, lambda _: 1e-3)
    seen = {key: np.stack([KEYED[key].sample() for _ in range(5)]) for key in ("hand", "a", "z")}
    features = policy.extract_features({key: torch.from_numpy(seen[key]) for key in KEYED})
    assert (features.numpy() == flat_rows(seen, tuple(KEYED))).all()
    model = made(PPO, KEYED, engine="kernels").learn(64)
    assert (model.engine.kind, model.engine.gradient_updates) == ("kernels", 8)


def test_actions_are_drawn_from_the_policys_gaussian():
    model = made(PPO, BOX, ACTING, engine="kernels")
    model.engine.begin()
    observation = np.linspace(-1, 1, 5, dtype=np.float32)
    acted = model.engine.act(np.tile(observation, (4000, 1)), None)
    policy, stored = model.policy, acted.stored
    distribution = policy.get_distribution(torch.from_numpy(observation[None])).distribution
    torch.testing.assert_close(stored.actions.mean(0), distribution.mean[0], rtol=0, atol=0.06)
    torch.testing.assert_close(stored.actions.std(0), distribution.stddev[0], rtol=0.05, atol=0)
    values, log_probs, _ = policy.evaluate_actions(stored.observations[:7], stored.actions[:7])
    torch.testing.assert_close(stored.log_probs[:7], log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stored.values[:7], values, rtol=1e-4, atol=1e-5)
    assert (acted.actions.dtype, acted.actions.shape) == (np.float32, (4000, 3))
    np.testing.assert_allclose(model.engine.values(observation[None]), values[:1, 0].detach(), rtol=1e-4)


def test_without_a_guard_no_action_is_drawn_from_means_that_are_not_finite():
    model = made(PPO, BOX, ACTING)
    model.engine.guard = None
    with torch.no_grad():
        model.policy.action_net.bias[0] = torch.nan
    with pytest.raises(ValueError, match="Expected parameter"):  # torch's words
        model.engine.act(np.zeros((2, 5), np.float32), None)


def engine_of(**settings: Any) -> KernelEngine:
    return KernelEngine(ActorCriticPolicy(BOX, SIX, lambda _: 1e-3), EngineSettings(**settings))


def test_pack_reads_what_is_there_and_keeps_the_policys_own_storage():
    kernels = engine_of()
    pointers = [parameter.data_ptr() for parameter in kernels.policy.parameters()]
    kernels.pack()
    for place in make_layout(kernels.policy)[1]:
        torch.testing.assert_close(place.of(kernels.parameters), place.parameter.detach(), rtol=0, atol=0)
    assert pointers == [parameter.data_ptr() for parameter in kernels.policy.parameters()]
    observations = np.zeros((4, 5), np.float32)
    observations[2, 1] = np.nan
    with pytest.raises(EnvError, match="the observation of env 2 is not finite"):
        kernels.act(observations, None)


def on_skull_king(num_envs: int = 8, engine: Any = "kernels", **settings: Any) -> Any:
    env = NativeVecEnv(SkullKingGame(num_envs), seed=0)
    arguments = {"n_steps": 16, "batch_size": 64, "n_epochs": 1, "seed": 0, "device": "cpu", **settings}
    return MaskablePPO("MlpPolicy", env, engine=engine, **arguments)


@pytest.mark.parametrize(
    ("make", "stock"),
    [
        (on_skull_king, sb3_contrib.MaskablePPO),
        (lambda: made(PPO, BOX, ACTING, engine="kernels"), STOCK_PPO),
    ],
)
def test_a_trained_model_is_stocks(make: Any, stock: Any, tmp_path: Any):
    steps = 32 * (model := make()).n_envs
    assert isinstance(model.learn(steps).engine, KernelEngine)
    assert torch.equal(weights(model), weights(make().learn(steps))), "the same seed"
    model.save(tmp_path / "model")
    loaded = stock.load(tmp_path / "model", env=model.env, device="cpu")
    assert torch.equal(weights(loaded), weights(model))
    (before,) = {int(state["step"]) for state in loaded.policy.optimizer.state.values()}
    loaded.learn(2 * steps)  # its optimizer takes the state over
    assert {int(state["step"]) for state in loaded.policy.optimizer.state.values()} == {3 * before}


def test_threads_change_no_number_and_torchs_own_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    def learned(on_threads: bool, parts: int = 2) -> torch.Tensor:
        monkeypatch.setattr(ThreadChoice, "next", lambda _: on_threads)
        settings = EngineSettings(kind="kernels", threads=parts)
        return weights(on_skull_king(16, settings, n_steps=32, batch_size=512, n_epochs=2).learn(512))

    before = torch.get_num_threads()
    together = learned(True)
    assert torch.get_num_threads() == before == 1
    assert torch.equal(together, learned(False))
    torch.testing.assert_close(together, learned(False, parts=1), rtol=0, atol=1e-5)


def test_a_fresh_process_trains_with_kernels_from_the_disk_cache(tmp_path: Any):
    """Cached machine code reaches numba's threads without having started them; that crashed once. numba starts them
    once in a process, and sets torch's number when it does; torch keeps its own."""
    code = (
        "import stable_baselines3, torch, fasttrain\n"
        "from fasttrain.algos.engine import EngineSettings\n"
        "from fasttrain_games.skullking.game import SkullKingGame\n"
        "torch.set_num_threads(1)\n"
        "env = fasttrain.NativeVecEnv(SkullKingGame(8), seed=0)\n"
        "model = fasttrain.MaskablePPO('MlpPolicy', env, n_steps=64, batch_size=512, n_epochs=2, device='cpu')\n"
        "model.use_engine(EngineSettings(kind='kernels', threads=2))\n"
        "model.learn(512)\n"
        "print('trained', model.engine.gradient_updates, torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "trained 2 1\n"), done.stderr


@pytest.mark.parametrize("kind", [MaskablePPO, PPO])
def test_a_second_rollout_is_not_made_of_the_first(kind: Any):
    eager, fused = updated("torch", kind), updated("kernels", kind)
    for model in (eager, fused):
        storage = model.rollout_buffer.storage
        storage.observations[::2, :, 1:3] = 0.0
        storage.observations[1::2] *= 0.5
        if kind is MaskablePPO:
            storage.masks[:] = True
        np.random.seed(1)
        model.train()
    torch.testing.assert_close(weights(fused), weights(eager), rtol=0, atol=1e-4)


def test_what_a_callback_writes_into_the_observations_is_learned_from():
    class Halves(BaseCallback):
        def _on_rollout_end(self) -> None:
            self.model.rollout_buffer.observations[:, ::2] *= 0.5

        def _on_step(self) -> bool:
            return True

    plain, changed = (made(engine="kernels").learn(128, callback=callback) for callback in (None, Halves()))
    assert not torch.equal(weights(plain), weights(changed))


def test_an_option_that_is_set_between_rollout_and_update_is_obeyed():  # by torch: kernels compute a plain Adam
    model = made(engine="kernels").learn(64)
    model.policy.optimizer.param_groups[0]["weight_decay"] = 0.1
    model.train()
    assert "weight_decay" in model.engine.unsupported_reason


def test_an_update_that_is_not_finite_leaves_the_weights_alone():
    model = made(engine="kernels").learn(64)
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    before = weights(model)
    model.rollout_buffer.storage.advantages[3, 2] = np.nan
    with pytest.raises(EnvError, match="not finite"):
        model.train()
    assert torch.equal(weights(model), before)
