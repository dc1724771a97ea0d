from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv

from fasttrain.algos.dqn import DQN
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.guard import Guard
from fasttrain.algos.ppo import PPO
from fasttrain.errors import ConfigError
from fasttrain.saving.model_state import load_model_state, model_state


def model(kind: Any, width: int = 8, fused: bool = False, **policy: Any) -> Any:
    env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    more: dict[str, Any] = {"n_steps": 16, "batch_size": 8} if kind is PPO else {"buffer_size": 50, "prioritized": {}}
    made = kind("MlpPolicy", env, seed=1, policy_kwargs={"net_arch": [width], **policy}, device="cpu", **more)
    made.set_logger(Logger(None, []))
    if fused:
        made.use_engine("kernels")
    return made


def travelled(state: Any) -> Any:
    return json.loads(json.dumps(state))


def assert_taken_over(fresh: Any, state: Any, arrays: dict[str, Any]) -> None:
    load_model_state(fresh, travelled(state), {name: array.copy() for name, array in arrays.items()})
    again, same = model_state(fresh)
    assert travelled(again) == travelled(state)
    assert {name: array.tobytes() for name, array in same.items()} == {
        k: array.tobytes() for k, array in arrays.items()
    }


class Slowing(torch.optim.Optimizer):
    """An optimizer of the user's, which keeps a number and a tensor for all parameters together."""

    def __init__(self, params: Any, lr: float = 1e-3, eps: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = np.int64(self.state.get("calls", 0) + 1)
        self.state["sum"] = self.state.get("sum", torch.zeros(2)) + 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["momentum"] = 0.9 * state.get("momentum", 0.0) + parameter.grad
                parameter.sub_(state["momentum"] * self.state["sum"][0], alpha=group["lr"] / self.state["calls"])


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, Slowing])
@pytest.mark.parametrize("kind", [PPO, DQN])
def test_another_optimizer_goes_on_where_it_was(kind: Any, optimizer: Any):
    trained, fresh = (model(kind, optimizer_class=optimizer) for _ in range(2))
    trained.learn(64, log_interval=None)
    state, arrays = model_state(trained)
    load_model_state(fresh, travelled(state), {name: array.copy() for name, array in arrays.items()})
    for each in (trained, fresh):
        for parameter in each.policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        each.policy.optimizer.step()
    ours, theirs = (each.policy.state_dict() for each in (fresh, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Keep(BaseCallback):
    """The state as a checkpoint takes it before the third rollout."""

    def __init__(self, at: int = 64) -> None:
        super().__init__()
        self.at = at

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps == self.at:
            self.kept = model_state(self.model)

    def _on_step(self) -> bool:
        return True


def test_guard_and_gradient_scaler():
    trained, fresh = model(PPO), model(PPO)
    for each in (trained, fresh):
        each.use_engine(EngineSettings(amp_dtype=torch.float16))
        engine: Any = each.engine
        engine.scaler._init_scale = 1e30
    keep = Keep()
    trained.learn(96, callback=keep)
    state, arrays = keep.kept
    assert state["scaler"]["scale"] < 1e30
    assert state["guard"]["skipped"] == 2 * 10 * 4, "all minibatches of all epochs"
    assert_taken_over(fresh, state, arrays)


def test_what_a_guard_goes_back_to_is_of_the_policy_that_is_trained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.algos.guard.COPY_EVERY", 1)
    trained, fresh = model(PPO), model(PPO)
    for each in (trained, fresh):
        each.engine.guard = Guard("rollback")
    keep = Keep(at=64)
    trained.learn(96, callback=keep)
    state, arrays = keep.kept
    assert state["guard"]["copies"] == 2
    assert_taken_over(fresh, state, arrays)
    assert fresh.engine.guard.state()[0]["copies"] == 2
    with pytest.raises(ConfigError, match="arrays for a rollback"):
        fresh.engine.guard.load(state["guard"], {}, fresh)


def test_tensors_are_filled_in_place():
    """Kernels hold views of them."""
    trained, fresh = model(DQN, fused=True), model(DQN, fused=True)
    trained.learn(200, log_interval=None)
    fresh.learn(150, log_interval=None)
    places = {name: tensor.data_ptr() for name, tensor in fresh.policy.state_dict().items()}
    load_model_state(fresh, *model_state(trained))
    assert {name: tensor.data_ptr() for name, tensor in fresh.policy.state_dict().items()} == places
    assert fresh.engine.fits(fresh.policy)
    (step,) = {float(state["step"]) for state in fresh.policy.optimizer.state.values()}
    assert step == trained.engine.gradient_updates


def without(arrays: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name not in names}


def test_what_is_not_of_this_network_is_refused_by_name():
    trained = model(PPO)
    trained.learn(32, log_interval=None)
    state, arrays = model_state(trained)
    obs, starts, bias, moment = (
        "_last_obs",
        "_last_episode_starts",
        "policy/value_net.bias",
        "policy_optimizer/0/exp_avg",
    )
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("another network: only one of the two has value_net.bias", without(arrays, bias)),
        ("value_net.bias has numbers that are not finite", {**arrays, bias: np.full_like(arrays[bias], np.nan)}),
        ("exp_avg has numbers that are not finite", {**arrays, moment: np.full_like(arrays[moment], np.nan)}),
        (f"the checkpoint's {obs} ", {**arrays, obs: np.zeros((1, 4), np.float32)}),
        (f"the checkpoint's {obs} ", {**arrays, obs: np.zeros((2, 5), np.float32)}),
        (f"the checkpoint's {obs} ", {**arrays, obs: np.zeros((2, 4), "U3")}),
        (f"the checkpoint's {obs} ", {**without(arrays, obs), f"{obs}/part": np.zeros((2, 4), np.float32)}),
        (f"the checkpoint's {starts} ", {**arrays, starts: np.zeros(3, np.bool_)}),
        (f"the checkpoint's {starts} ", {**arrays, starts: np.zeros(2)}),
    ]
    for told, given in wrong:
        with pytest.raises(ConfigError, match=told):
            load_model_state(model(PPO), state, given)
    with pytest.raises(ConfigError, match=r"mlp_extractor.*has shape \(8, 4\), not \(9, 4\)"):
        load_model_state(model(PPO, width=9), state, arrays)
    with pytest.raises(KeyError, match="99"):
        load_model_state(model(PPO), state, {**arrays, "policy_optimizer/99/step": np.zeros((), np.float32)})
    with pytest.raises(ConfigError, match="counter"):
        load_model_state(model(PPO), {**state, "counters": {"__class__": 1}}, arrays)
    with torch.no_grad():
        trained.policy.value_net.bias.fill_(5.0)
    assert arrays[bias].tolist() == [5.0], "views, not copies"


def test_lstm_states_of_other_shapes_are_refused():
    def made() -> Any:
        env = DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        found = RecurrentPPO("MlpLstmPolicy", env, n_steps=16, policy_kwargs={"lstm_hidden_size": 4}, device="cpu")
        found.set_logger(Logger(None, []))
        return found

    trained, fresh = made(), made()
    trained.learn(32, log_interval=None)
    state, arrays = model_state(trained)
    load_model_state(fresh, travelled(state), arrays)
    assert torch.equal(fresh._last_lstm_states.vf[1], trained._last_lstm_states.vf[1])
    for array in (np.zeros((1, 3, 4), np.float32), np.full((1, 2, 4), np.inf, np.float32)):
        with pytest.raises(ConfigError, match="lstm/pi/1"):
            load_model_state(made(), state, {**arrays, "lstm/pi/1": array})
