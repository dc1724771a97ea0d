"""NaN and infinity in five places, with kernels and without: named, and no weight changes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

from conftest import RunCommand
from fasttrain.algos.dqn import DQN
from fasttrain.algos.guard import Guard
from fasttrain.algos.ppo import PPO, MaskablePPO
from fasttrain.errors import DivergedError, EnvError
from fasttrain.vec.groups import WorkerGroups
from fasttrain.vec.shared import SharedMemoryVecEnv
from toys import RandomEnv, seeded_vec, single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
KINDS = ("ppo", "maskable_ppo", "dqn")
WAYS = [("ppo", False), ("ppo", True), ("maskable_ppo", True), ("dqn", False), ("dqn", True)]
every_way = pytest.mark.parametrize(("kind", "fused"), WAYS)
both_ways = pytest.mark.parametrize(("fused", "value"), [(False, np.nan), (True, np.inf)], ids=["eager", "fused"])
every_kind = pytest.mark.parametrize("kind", KINDS)
VALUES = dict(zip(WAYS, (np.nan, np.inf, np.nan, np.inf, np.nan), strict=True))  # that spoil
NEVER = 10**9


class Spoiling(VecEnvWrapper):
    """Puts `value` into one place at the `at`-th step; what the model weighed at that moment is kept."""

    def __init__(self, venv: Any, scale: float = 1.0) -> None:
        super().__init__(venv)
        self.at, self.field, self.value, self.steps, self.scale = NEVER, "", 0.0, 0, scale
        self.model: Any = None
        self.before = b""

    def reset(self) -> Any:
        return self.venv.reset() * np.float32(self.scale)

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        observations = observations * np.float32(self.scale)
        self.steps += 1
        if self.steps == self.at:
            self.before = fingerprint(self.model)
            if self.field == "observation":
                observations[2, 1] = self.value
            else:
                rewards[2] = self.value
        return observations, rewards, dones, infos


def made(kind: str, fused: bool, scale: float = 1.0, **kwargs: Any) -> tuple[Any, list[str]]:
    """A model on five spoilable envs, and the lines its guard has said."""
    lines: list[str] = []
    shared: dict[str, Any] = {"device": "cpu", "seed": 0} | kwargs
    if kind == "dqn":
        settings = {"learning_starts": 20, "train_freq": 1, "gradient_steps": 2, "batch_size": 16, "buffer_size": 500}
        model: Any = DQN("MlpPolicy", Spoiling(plain_vec(), scale), **(settings | shared))
    else:
        env = Spoiling(toy_gym_vec() if kind == "maskable_ppo" else plain_vec(), scale)
        kind_of_model: Any = PPO if kind == "ppo" else MaskablePPO
        settings = {"n_steps": 8, "batch_size": 40, "n_epochs": 2}
        model = kind_of_model("MlpPolicy", env, **(settings | shared))
    if fused:
        model.use_engine("kernels")
    model.engine.guard = Guard(say=lines.append)
    model.env.model = model
    return model, lines


def plain_vec() -> Any:
    return seeded_vec(lambda: RandomEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)), 5)


def fingerprint(model: Any) -> bytes:
    """Every byte of the weights and of the optimizer's state."""
    tensors = [*model.policy.state_dict().values()]
    optimizer = model.policy.optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [optimizer.state.get(parameter, {}).get(key) for key in ("step", "exp_avg", "exp_avg_sq")]
    return b"".join(b"-" if tensor is None else tensor.detach().numpy().tobytes() for tensor in tensors)


def trained(kind: str, fused: bool, **kwargs: Any) -> tuple[Any, list[str]]:
    """After some updates, so that Adam has a state; another round of data is there to learn from."""
    model, lines = made(kind, fused, **kwargs)
    model.learn(80)
    assert lines == []
    return model, lines


def train(model: Any) -> None:
    if isinstance(model, DQN):
        model.train(2, 16)
    else:
        model.train()


def spoil_a_weight(model: Any, value: float) -> str:
    """Which."""
    name = "q_net.q_net.4.weight" if isinstance(model, DQN) else "action_net.weight"
    weight = model.q_net.q_net[4].weight if isinstance(model, DQN) else model.policy.action_net.weight
    with torch.no_grad():
        weight[0, 0] = value
    return name


def is_finite(model: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in model.policy.state_dict().values())


@every_way
@pytest.mark.parametrize("field", ["observation", "reward"])
def test_bad_data_is_named_before_anything_uses_it(kind: str, fused: bool, field: str):
    (model, _), value = trained(kind, fused), VALUES[kind, fused]
    model.env.at, model.env.field, model.env.value = model.env.steps + 5, field, value
    where = " at index 1" if field == "observation" else ""
    message = rf"the {field} of env 2 is not finite \({value}{where}\) at step 105: check what the env returns"
    with pytest.raises(EnvError, match=message):
        model.learn(80, reset_num_timesteps=False)
    assert fingerprint(model) == model.env.before


@every_way
def test_a_bad_weight_is_named_when_it_acts_and_when_it_learns(kind: str, fused: bool):
    model, lines = trained(kind, fused)
    name = spoil_a_weight(model, VALUES[kind, fused])
    model.exploration_rate = 0.0
    model.exploration_schedule = lambda _: 0.0
    before, updates = fingerprint(model), model.engine.gradient_updates
    train(model)
    assert f"2 of 2 updates skipped: parameter {name} is not finite; weights and optimizer are as they were" in lines[0]
    assert (model.engine.skipped_steps, model.engine.gradient_updates) == (2, updates)
    assert model.logger.name_to_value["train/skipped_steps"] == 2
    with pytest.raises(EnvError, match=f"is not finite although its inputs are: parameter {name} is not"):
        model.learn(80, reset_num_timesteps=False)
    assert fingerprint(model) == before


@every_way
def test_a_bad_loss_is_skipped_and_the_run_goes_on(kind: str, fused: bool):
    model, lines = trained(kind, fused, **({"loss": "mse"} if kind == "dqn" else {}))
    before = fingerprint(model)
    if kind == "dqn":
        good = model.replay_buffer.rewards.copy()
        model.replay_buffer.rewards[:] = 3e38
    else:
        model.vf_coef = VALUES[kind, fused]
    train(model)
    assert fingerprint(model) == before
    assert "2 of 2 updates skipped: the loss;" in lines[0]
    if kind == "dqn":
        model.replay_buffer.rewards[:] = good
    else:
        model.vf_coef = 0.5
    model.learn(80, reset_num_timesteps=False)
    assert fingerprint(model) != before
    assert is_finite(model)
    assert (len(lines), model.engine.skipped_steps) == (1, 2)


@every_way
def test_a_gradient_that_overflows_is_named(kind: str, fused: bool):
    """A rectified net and huge observations: the loss is finite, the gradient's square is more than float32 holds."""
    policy = {"activation_fn": torch.nn.ReLU}
    special: dict[str, Any] = {"loss": "mse"} if kind == "dqn" else {"vf_coef": 1e14}
    model, lines = made(kind, fused, 1e15 if kind == "dqn" else 1e5, policy_kwargs=policy, **special)
    before = fingerprint(model)
    model.engine.guard.max_skipped = NEVER
    model.learn(40)
    if kind != "dqn" or not fused:  # there the state has been made, as a first step would have made it
        assert fingerprint(model) == before
    assert model.engine.skipped_steps == (2 * 4 if kind == "dqn" else 2)
    named = "q_net.q_net." if kind == "dqn" else "(mlp_extractor.)?value_net."
    assert re.search(rf"2 of 2 updates skipped: the gradient of parameter {named}[a-z0-9_.]+; weights", lines[0])


@both_ways
def test_bad_rows_cost_their_minibatches_alone(fused: bool, value: float):
    model, lines = trained("maskable_ppo" if fused else "ppo", fused, batch_size=10)
    model.rollout_buffer.storage.advantages[3, 2] = value
    before, updates = fingerprint(model), model.engine.gradient_updates
    model.train()
    assert model.engine.gradient_updates == updates + 6
    assert f"2 of 8 updates skipped: the advantage of env 2 in row 3 of the rollout is {value};" in lines[0]
    assert fingerprint(model) != before
    steps = {float(state["step"]) for state in model.policy.optimizer.state.values()}
    assert steps == {updates + 6.0}, "Adam counts the steps that it took"


@both_ways
def test_bad_rows_of_a_replay_buffer_are_named_and_priorities_stay(fused: bool, value: float):
    model, lines = trained("dqn", fused, prioritized={})
    model.replay_buffer.next_observations[3, 4, 1] = value
    model.replay_buffer.rewards[7, 1] = value
    model.train(60, 32)
    assert 0 < model.engine.skipped_steps < 60
    assert f"updates skipped: the next observation of env 4 in row 3 of the replay buffer is {value};" in lines[0]
    assert is_finite(model)
    assert np.isfinite(model.replay_buffer.tree.total())


@every_way
def test_too_many_rounds_in_a_row_stop_the_run(kind: str, fused: bool):
    model, lines = trained(kind, fused)
    model.engine.guard.max_skipped = 2
    name = spoil_a_weight(model, VALUES[kind, fused])
    before = fingerprint(model)
    train(model)
    train(model)
    with pytest.raises(DivergedError, match=rf"in 3 rounds in a row, at step 80: parameter {name}"):
        train(model)
    assert fingerprint(model) == before
    assert len(lines) == 2, "another line when twice as many are skipped"


@every_way
def test_a_rollback_goes_to_the_last_good_weights_once(kind: str, fused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fasttrain.algos.guard.COPY_EVERY", 1)
    model, lines = trained(kind, fused)
    guard = model.engine.guard
    guard.max_skipped, guard.at_limit = 0, "rollback"
    kept = fingerprint(model)
    train(model)
    first = fingerprint(model)
    assert first != kept
    train(model)
    spoil_a_weight(model, np.inf)
    train(model)
    assert fingerprint(model) == first, "the weights that the last good round began with"
    assert "back to the last good weights" in lines[-1]
    spoil_a_weight(model, np.inf)
    with pytest.raises(DivergedError, match="again after going back"):
        train(model)


@every_kind
def test_without_the_guard_the_weights_are_lost(kind: str):
    """The test that fails if the flag does nothing."""
    model, _ = trained(kind, False)
    model.engine.guard = None
    if kind == "dqn":
        model.replay_buffer.rewards[:] = np.nan
    else:
        model.vf_coef = np.nan
    train(model)
    assert not is_finite(model)


@every_kind
def test_without_the_guard_bad_rewards_come_in(kind: str):
    model, _ = made(kind, False, **({"learning_starts": NEVER} if kind == "dqn" else {}))
    model.engine.guard = None
    model.env.at, model.env.field, model.env.value = 3, "reward", np.nan
    model.train = lambda *_, **__: None
    model.learn(40)
    stored = model.replay_buffer.rewards if kind == "dqn" else model.rollout_buffer.rewards
    assert np.isnan(stored).any()


SMALL = ("env.entry_point=bad_toys:Bad", "num_envs=2", "total_timesteps=2000", "eval.episodes=2", "vec_env=dummy")
PPO_OF_RUNS = ("algo=ppo", "algo.rollout_size=200", "batch_size=100")


@pytest.mark.parametrize(
    ("algo", "engine", "field"),
    [
        (PPO_OF_RUNS, "stock", "observation"),
        (PPO_OF_RUNS, "fast", "reward"),
        (("algo=dqn",), "stock", "reward"),
        (("algo=dqn",), "fast", "observation"),
    ],
)
def test_a_run_stops_with_the_place(fasttrain: RunCommand, algo: tuple[str, ...], engine: str, field: str):
    done = fasttrain(*SMALL, *algo, f"engine={engine}", f"env.kwargs.fault=nan_{field}")
    assert done.exit_code == 1
    assert f"the {field} of env 0, 1 is not finite (nan" in done.err
    assert "at step 410" in done.err
    trained = "algo=ppo" in algo  # DQN still warms up
    assert done.err.count("\n") == 1 + trained, "what happened, and what was saved"
    assert not (done.folder / "last_good.zip").exists()


@pytest.mark.parametrize("engine", ["stock", "fast"])
def test_nan_guard_false_looks_for_nothing(fasttrain: RunCommand, engine: str):
    fasttrain(*SMALL, "algo=dqn", "warmup_steps=3000", f"engine={engine}", "nan_guard=false",
                     "env.kwargs.fault=nan_reward", "env.kwargs.at=5", "total_timesteps=40").ok()  # fmt: skip


def test_a_run_that_diverged_leaves_its_last_good_weights(fasttrain: RunCommand):
    done = fasttrain(*SMALL, "engine=fast", "algo=ppo", "algo.rollout_size=100", "batch_size=100",
                     "env.kwargs.fault=overflow")  # fmt: skip
    assert done.exit_code == 1
    assert "no update could be applied in 11 rounds in a row, at step 1100: " in done.err
    assert done.err.count("\n") == 2, "what happened, and what was saved"
    assert "[GUARD] step 100: " in done.out
    assert is_finite(PPO.load(done.folder / "last_good.zip", device="cpu"))
    assert done.json("summary.json")["status"] == "crashed"


class OddPolicy(ActorCriticPolicy):
    """A user's own, whose actions are not finite from some step on."""

    left = 9

    def forward(self, obs: torch.Tensor, deterministic: bool = False) -> Any:
        actions, values, log_probs = super().forward(obs, deterministic)
        self.left -= 1
        if self.left < 0:
            actions[1, 0] = torch.nan
        return actions, values, log_probs


@pytest.mark.parametrize("grouped", [False, True], ids=["lockstep", "groups"])
@pytest.mark.usefixtures("forked_workers")
def test_an_action_that_is_not_finite_reaches_no_env(grouped: bool, monkeypatch: pytest.MonkeyPatch):
    """np.clip leaves NaN as it is, and an env of whole numbers would get whatever the cast makes of it."""
    space = spaces.Box(-1, 1, (2,), np.float32)
    makers = [lambda: RandomEnv(spaces.Box(-1, 1, (3,), np.float32), space)] * 4
    env = SharedMemoryVecEnv(makers, num_workers=2) if grouped else DummyVecEnv(makers)
    try:
        model = PPO(OddPolicy, env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")
        if grouped:
            model.collector.schedule, model.policy.left = "first_ready", 10  # after both groups, five of each in turn
            monkeypatch.setattr(WorkerGroups, "first_ready", lambda self, groups: groups[:1])
        where = "env 3 is not finite at step 24" if grouped else "env 1 is not finite at step 40"
        with pytest.raises(EnvError, match=f"the action of {where}: lower the learning rate, or look at the policy"):
            model.learn(64)
    finally:
        env.close()
