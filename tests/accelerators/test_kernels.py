"""Compiled kernels of every algorithm: an update is autograd's, whatever is seen and done; what is learned from is what
was stored; a model stays stock's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from stable_baselines3 import PPO as STOCK_PPO
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize

from accelerated import UNEVEN, filled, numbers_of, weights
from fasttrain import DQN, PPO, SAC, MaskablePPO, NativeVecEnv, RecurrentPPO
from fasttrain.accelerators.kernels import KernelEngine
from fasttrain.accelerators.layout import make_layout
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.q_networks import DuelingDQNPolicy
from fasttrain.algos.reuse import Reuse
from fasttrain.batch import each_array, flat_rows
from fasttrain.errors import EnvError
from fasttrain_games.skullking.game import SkullKingGame
from fasttrain_kernels.threads import ThreadChoice
from toys import MaskedEnv, RandomEnv, seeded_vec

NORMED, WIDE = spaces.Box(-1.0, 1.0, (5,), np.float32), spaces.Box(-1.0, 1.0, (4,), np.float64)
BOX, SIX, ACTING = spaces.Box(-1.0, 1.0, (5,), np.float32), spaces.Discrete(6), spaces.Box(-1, 1, (3,))
KEYED = spaces.Dict(  # no alphabet: the order is the space's
    [("z", spaces.Box(-1.0, 1.0, (2, 3), np.float32)), ("a", spaces.Box(-5, 5, (2,), np.int64)),
     ("hand", spaces.MultiBinary(4))]
)  # fmt: skip
PARTS = spaces.Dict({"a": BOX, "b": spaces.Box(-1.0, 1.0, (2, 2), np.float64)})


class Case(NamedTuple):
    """`net` goes into `policy_kwargs`."""

    kind: Any = MaskablePPO
    seen: Any = BOX
    acting: Any = SIX
    settings: dict[str, Any] = {}  # noqa: RUF012
    net: dict[str, Any] = {}  # noqa: RUF012
    policy: Any = None
    reuse: int = 1


LSTM = {"lstm_hidden_size": 16, "net_arch": [8]}
BETA: dict[str, Any] = {"double_q": True, "n_steps": 3, "prioritized": {"beta": 0.5}}
RELU3 = {"net_arch": {"pi": [16, 8, 8], "qf": [24]}, "n_critics": 3}
TANH = {"net_arch": [16], "activation_fn": torch.nn.Tanh, "n_critics": 1}
UNLIKE = {"n_steps": 3, "target_update_interval": 2, "ent_coef": 0.1}
CASES = {
    "masked": Case(),
    "masked, clipped values": Case(settings={"clip_range_vf": 0.1, "ent_coef": 0.0}),
    "masked, small norm": Case(settings={"normalize_advantage": False, "max_grad_norm": 0.05, "batch_size": 25}),
    "masked, relu": Case(net={"activation_fn": torch.nn.ReLU, "net_arch": [32]}),
    "masked, unlike nets": Case(net={"net_arch": {"pi": [16, 8, 4], "vf": [20]}}),
    "masked, stopped": Case(settings={"target_kl": 0.3, "learning_rate": 1e-2, "n_epochs": 9}),
    "masked, sub-actions": Case(acting=spaces.MultiDiscrete([3, 1, 4])),
    "keys": Case(PPO, KEYED),
    "box": Case(PPO, acting=ACTING, settings={"clip_range_vf": 0.1}),
    "box, unlike nets": Case(PPO, acting=ACTING, net={"log_std_init": -1.0, "net_arch": {"pi": [8], "vf": [20, 4]}}),
    "memory, box": Case(RecurrentPPO, acting=ACTING, net=LSTM),
    "reuse": Case(PPO, reuse=3),
    "reuse, keys": Case(PPO, KEYED, reuse=3),
    "dqn": Case(DQN),
    "dqn, double, three steps, priorities": Case(DQN, settings=BETA),
    "dqn, double, mse, priorities": Case(DQN, settings={"double_q": True, "loss": "mse", "prioritized": {}}),
    "dqn, mse, three steps": Case(DQN, settings={"loss": "mse", "n_steps": 3, "max_grad_norm": 0.05}),
    "dqn, sub-actions": Case(DQN, acting=spaces.MultiDiscrete([3, 4, 2])),
    "dqn, dueling": Case(DQN, acting=spaces.MultiDiscrete([3, 4, 2]), policy=DuelingDQNPolicy),
    "dqn, keys": Case(DQN, KEYED, spaces.Discrete(3)),
    "sac": Case(SAC, acting=UNEVEN, settings={"gradient_steps": 3}),
    "sac, float64, three critics": Case(SAC, WIDE, UNEVEN, UNLIKE, RELU3),
    "sac, keys, one critic": Case(SAC, PARTS, UNEVEN, {"ent_coef": "auto_0.5", "learning_rate": 1e-2}, TANH),
    "sac, one-hot": Case(SAC, spaces.Discrete(3), UNEVEN, {"tau": 0.5, "batch_size": 301}, {"net_arch": [40]}),
    "sac, normalised": Case(SAC, NORMED, UNEVEN, {"batch_size": 150}, {"net_arch": [8, 300]}),
}
SETTINGS: dict[Any, dict[str, Any]] = {
    DQN: {"learning_starts": 10_000, "batch_size": 32, "learning_rate": 1e-3},  # `train` is called by hand
    SAC: {"learning_starts": 20, "batch_size": 32},
}
ON_POLICY = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "ent_coef": 0.02}
NETS = {DQN: {"net_arch": [16, 16]}, SAC: {"net_arch": [16, 12]}}


def made(case: Case = CASES["masked"], engine: Any = "torch") -> Any:
    kind, masked = case.kind, case.kind in (MaskablePPO, DQN)
    env: Any = seeded_vec(lambda: (MaskedEnv if masked else RandomEnv)(case.seen, case.acting, True))
    policy = "MultiInputPolicy" if isinstance(case.seen, spaces.Dict) else "MlpPolicy"
    policy = policy.replace("Policy", "LstmPolicy") if kind is RecurrentPPO else policy
    settings = {"seed": 0, "device": "cpu", **SETTINGS.get(kind, ON_POLICY), **case.settings}
    env = VecNormalize(env) if case.seen is NORMED else env
    net = {**NETS.get(kind, {}), **case.net}
    return kind(case.policy or policy, env, engine=engine, policy_kwargs=net, **settings)


def moved(part: Any) -> None:
    """So that ratios are not 1, older rollouts have weights, and the target net is another one than the online net."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def updated(case: Case, engine: str) -> Any:
    """By the engine, from what torch has collected; SAC acts with it too."""
    if case.kind is SAC:
        return made(case, engine).learn(60, log_interval=None)
    model = made(case)
    if case.kind is DQN:
        model.learn(200)
        moved(model.q_net_target)
        model.gamma = 0.7  # as may be while training goes on; that of a one-step buffer is not used, as in stock
    else:
        model.reuse = Reuse(case.reuse) if case.reuse > 1 else None
        for _ in range(case.reuse - 1):
            filled(model).reuse.merged(model)
        moved(filled(model).policy)
    model.use_engine(engine)
    train(model, 3)
    return model


def train(model: Any, seed: int) -> None:
    """DQN one batch after the other: a block of several draws its random numbers in another order."""
    np.random.seed(seed)
    for sizes in [(1, 32)] * 3 if isinstance(model, DQN) else [()]:
        model.train(*sizes)


TOLERANCE = {DQN: 2e-6, SAC: 1e-5}
LOGGED = {DQN: {"rel": 1e-4}, SAC: {"rel": 1e-4, "abs": 1e-5}}


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_autograds_and_adams_state_goes_on(name: str):
    case = CASES[name]
    plain, fused = (updated(case, engine) for engine in ("torch", "kernels"))
    assert (plain.engine.kind, fused.engine.kind) == ("torch", "kernels"), fused.engine.unsupported_reason
    assert fused.engine.gradient_updates == plain.engine.gradient_updates > 0
    assert fused._n_updates == plain._n_updates
    assert plain.engine.gradient_updates < 36 or "target_kl" not in case.settings, "it must stop for it to be seen"
    tolerance, expected = TOLERANCE.get(case.kind, 2e-5), numbers_of(plain)
    for key, value in numbers_of(fused).items():
        moment = key.endswith("exp_avg_sq")
        exact = {"rtol": 1e-2, "atol": 1e-7} if moment else {"rtol": 1e-5, "atol": tolerance}
        torch.testing.assert_close(value, expected[key], **exact, msg=lambda told, key=key: f"{key}: {told}")
    log, reference = (
        {key: value for key, value in model.logger.name_to_value.items() if not key.startswith("time/")}
        for model in (fused, plain)
    )
    close = LOGGED.get(case.kind, {"rel": 2e-3, "abs": 2e-5})
    assert log == {key: pytest.approx(value, **close) for key, value in reference.items()}
    if case.kind is SAC:
        np.testing.assert_allclose(fused.replay_buffer.actions, plain.replay_buffer.actions, rtol=0, atol=1e-5)
        return
    if case.kind is DQN:
        shown = plain.replay_buffer.sample(9).observations
        with torch.no_grad():
            values = plain.q_net(shown)
        np.testing.assert_allclose(fused.engine.q_values(each_array(np.asarray, shown))[0], values, rtol=0, atol=1e-4)
        if "prioritized" in case.settings:
            np.testing.assert_allclose(fused.replay_buffer.priorities, plain.replay_buffer.priorities, rtol=1e-3)
    for model in (plain, fused):  # a lost moment or step would show
        model.use_engine("torch")
        train(model, 1)
    torch.testing.assert_close(weights(fused), weights(plain), rtol=0, atol=1e-4)


def test_features_of_keys_are_joined_in_the_order_of_sb3():
    policy = MultiInputActorCriticPolicy(KEYED, SIX, lambda _: 1e-3)
    seen = {key: np.stack([KEYED[key].sample() for _ in range(5)]) for key in ("hand", "a", "z")}
    features = policy.extract_features({key: torch.from_numpy(seen[key]) for key in KEYED})
    assert (features.numpy() == flat_rows(seen, tuple(KEYED))).all()


def test_actions_are_drawn_from_the_policys_gaussian():
    model = made(CASES["box"], "kernels")
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
    model = made(CASES["box"])
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
        (lambda: made(CASES["box"], "kernels"), STOCK_PPO),
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
    eager, fused = (updated(Case(kind), engine) for engine in ("torch", "kernels"))
    for model in (eager, fused):
        storage = model.rollout_buffer.storage
        storage.observations[::2, :, 1:3] = 0.0
        storage.observations[1::2] *= 0.5
        if kind is MaskablePPO:
            storage.masks[:] = True
        np.random.seed(1)
        model.train()
    torch.testing.assert_close(weights(fused), weights(eager), rtol=0, atol=1e-4)


def test_an_update_that_is_not_finite_leaves_the_weights_alone():
    model = made(engine="kernels").learn(64)
    model.engine.guard = None  # with it: tests/faults/test_nan.py
    before = weights(model)
    model.rollout_buffer.storage.advantages[3, 2] = np.nan
    with pytest.raises(EnvError, match="not finite"):
        model.train()
    assert torch.equal(weights(model), before)
