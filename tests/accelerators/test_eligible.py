"""What compiled kernels reproduce: what is overridden, added or unknown PyTorch computes, and one sentence names it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.dqn.policies import DQNPolicy

from fasttrain import DQN, PPO
from fasttrain.accelerators import eligible, layout
from fasttrain.accelerators.eligible import policy_reason, unsupported_reason
from fasttrain.algos.q_networks import BranchingDQNPolicy, DuelingDQNPolicy
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from recurrent_cases import SHARED
from recurrent_cases import policy_of as recurrent
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX, TWO, PAIR = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2), spaces.MultiDiscrete([2, 2])
WIDE = spaces.Box(-1.0, 1.0, (4,), np.float64)
NO_MLP = "not an MLP of tanh or relu layers"
NO_ADAM = "the optimizer is {}: compiled kernels compute a plain Adam of one group"
NOT_CALLED = "has a hook or a method of its own, which compiled kernels would not call"


def actor(space: Any = BOX, actions: Any = TWO, kind: Any = ActorCriticPolicy, **kwargs: Any) -> Any:
    return kind(space, actions, lambda _: 1e-3, **kwargs)


def q_net(space: Any = BOX, actions: Any = TWO, kind: Any = DQNPolicy, **kwargs: Any) -> Any:
    return actor(space, actions, kind, **kwargs)


class OwnLayers(MlpExtractor):
    """Hidden layers with a forward of the user's."""


class OwnFeatures(FlattenExtractor):
    """A features extractor of the user's."""


class OwnLstm(torch.nn.LSTM):
    """An LSTM of the user's."""


class OwnAdam(torch.optim.Adam):
    """An optimizer of the user's."""


class OwnActing(ActorCriticPolicy):
    @torch.no_grad()
    def predict_values(self, obs: Any) -> Any:
        return super().predict_values(obs)


class OwnChoice(DQNPolicy):
    def _predict(self, observation: Any, deterministic: bool = True) -> Any:
        return super()._predict(observation, deterministic)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (actor(), None),
        (actor(activation_fn=torch.nn.ReLU, net_arch={"pi": [3], "vf": [5, 6]}, share_features_extractor=False), None),
        (actor(actions=PAIR), None),
        (actor(net_arch=[]), NO_MLP),
        (actor(actions=spaces.MultiBinary(2)), "the policy is not SB3's own, or its actions are neither"),
        (actor(actions=spaces.Box(-1, 1, (2,))), None),
        (actor(WIDE), "observations are float64; kernels would serve a float32 Box"),
        (
            actor(features_extractor_class=OwnFeatures),
            "features come from a OwnFeatures, not from a flat Box",
        ),
        (actor(kind=OwnActing), "OwnActing.predict_values is overridden: compiled kernels compute ActorCriticPolicy's"),
        (recurrent(), None),
        (recurrent(**SHARED), None),
        (recurrent(net_arch=[]), None),
        (recurrent(units=24), "an LSTM of 24 units: compiled kernels take multiples of 16"),
        (recurrent(units=272), "an LSTM of 272 units: torch is faster above 256"),
        (recurrent(lstm_kwargs={"bias": False}), "the LSTM has arguments of its own"),
        (recurrent(n_lstm_layers=2), "2 layers of LSTMs"),
        (recurrent(enable_critic_lstm=False), "the value net has no LSTM"),
        (recurrent(actions=spaces.Box(-1, 1, (2,))), None),
        (recurrent(optimizer_class=torch.optim.AdamW), NO_ADAM.format("AdamW")),
        (q_net(net_arch=[3]), None),
        (q_net(kind=DuelingDQNPolicy, net_arch=[3, 4, 5], activation_fn=torch.nn.Tanh), None),
        (q_net(spaces.Box(-1.0, 1.0, (2, 3), np.float32), PAIR, BranchingDQNPolicy), None),
        (q_net(actions=spaces.MultiDiscrete([2, 2], np.int32), kind=BranchingDQNPolicy), "actions are MultiDiscrete"),
        (q_net(kind=DuelingDQNPolicy, net_arch=[]), NO_MLP),
        (q_net(spaces.Discrete(4)), "observations are Discrete(4); kernels would serve a one-hot Box"),
        (q_net(optimizer_class=OwnAdam), NO_ADAM.format("OwnAdam")),
        (q_net(kind=OwnChoice), "OwnChoice._predict is overridden: compiled kernels compute DQNPolicy's own _predict"),
    ],
)
def test_what_kernels_serve(policy: Any, reason: str | None):
    assert policy_reason(policy) is None if reason is None else str(policy_reason(policy)).startswith(reason)


def net_of(policy: Any) -> Any:
    return policy.q_net.q_net if hasattr(policy, "q_net") else policy.mlp_extractor.policy_net


CHANGES: dict[str, tuple[Any, str]] = {
    "float64": (lambda policy: policy.double(), "the policy is not float32 on the CPU"),
    "hook": (lambda policy: net_of(policy)[0].register_forward_hook(lambda *_: None), f".0 {NOT_CALLED}"),
    "gradients' hook": (lambda policy: net_of(policy)[0].register_full_backward_hook(lambda *_: None), NOT_CALLED),
    "method": (lambda policy: setattr(policy.features_extractor if hasattr(policy, "value_net") else policy.q_net,
                                      "forward", lambda seen: seen), NOT_CALLED),
    "norm": (lambda policy: net_of(policy).insert(1, torch.nn.LayerNorm(64)), NO_MLP),
    "activation": (lambda policy: net_of(policy).__setitem__(1, torch.nn.ELU()), NO_MLP),
    "frozen": (lambda policy: net_of(policy)[0].bias.requires_grad_(False), "0.bias is frozen"),
    "parameter's hook": (lambda policy: net_of(policy)[0].bias.register_hook(lambda _: None), "0.bias has a hook"),
    "weight decay": (lambda policy: policy.optimizer.param_groups[0].update(weight_decay=0.1), "option weight_decay"),
    "step's hook": (lambda policy: policy.optimizer.register_step_post_hook(lambda *_: None), "steps have a hook"),
    "other parameters": (lambda policy: policy.optimizer.param_groups[0]["params"].pop(), "the policy's parameters"),
    "parameter": (lambda policy: policy.register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
                  "the parameter scale is in none of the layers that compiled kernels know"),
}  # fmt: skip


@pytest.mark.parametrize("make", [actor, recurrent, q_net])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_done_to_a_policy_counts(change: str, make: Any):
    policy = make()
    CHANGES[change][0](policy)
    assert CHANGES[change][1] in str(policy_reason(policy))


def test_layers_of_a_class_of_their_own():
    policy, remembering, headed = actor(), recurrent(), actor()
    policy.mlp_extractor = OwnLayers(4, [64, 64], torch.nn.Tanh)
    assert policy_reason(policy) == "the hidden layers are a OwnLayers, a class of their own"
    remembering.lstm_critic = OwnLstm(5, 16)
    assert policy_reason(remembering) == "the LSTM is a OwnLstm, a class of its own"
    headed.action_net = torch.nn.Sequential(torch.nn.Linear(64, 2))
    assert policy_reason(headed) == NO_MLP


def test_an_activation_with_a_number_that_kernels_do_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(layout.KINDS, torch.nn.ELU, 2)
    assert policy_reason(actor(activation_fn=torch.nn.ELU)) == "compiled kernels do not compute activation 2 (ELU)"


@pytest.mark.parametrize(("kind", "name"), [("PPOWork", "PPOWork.kl_coef"), ("QWork", "QWork.kl_coef")])
def test_a_field_that_kernels_do_not_know(kind: str, name: str, monkeypatch: pytest.MonkeyPatch):
    model = made(PPO if kind == "PPOWork" else DQN)
    assert unsupported_reason(model) is None
    monkeypatch.setattr(getattr(eligible, kind), "_fields", (*getattr(eligible, kind)._fields, "kl_coef"))
    assert unsupported_reason(model) == f"{name} is a field that compiled kernels do not know"


# --- an algorithm of the user's: what is learned is what its own methods say


def made(kind: Any, engine: str = "torch", **options: Any) -> Any:
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 20, "n_epochs": 1}
    if issubclass(kind, DQN):
        settings = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 400}
    return kind("MlpPolicy", toy_gym_vec(), seed=0, device="cpu", engine=engine, **{**settings, **options})


class OwnLoss(PPO):
    def loss(self, batch: Any, evaluated: Any) -> Any:
        return super().loss(batch, evaluated) | {"size": evaluated.logits.square().mean()}


class OwnTrain(PPO):
    def train(self) -> None:
        super().train()
        with torch.no_grad():
            self.policy.value_net.bias += 1.0


class OwnWork(PPO):
    def work(self) -> Any:
        return super().work()._replace(ent_coef=0.5)


class OwnSampling(DQN):
    def _sample_action(self, learning_starts: int, action_noise: Any = None, n_envs: int = 1) -> Any:
        actions, stored = super()._sample_action(learning_starts, action_noise, n_envs)
        return actions // 2, stored // 2


class OwnUpdate(DQN):
    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        super().train(2 * gradient_steps, batch_size)


class Halved(ReplayStorage):
    """As SB3's users write one: they know five fields."""

    def sample(self, batch_size: int, env: Any = None) -> Any:
        batch = super().sample(batch_size, env)
        return ReplayBufferSamples(*batch[:4], batch.rewards / 2)


class Gathered(ReplayStorage):
    def gather(self, *args: Any) -> Any:
        batch = super().gather(*args)
        return batch._replace(rewards=batch.rewards / 2)


class Newest(ReplayStorage):
    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        batch = super()._get_samples(batch_inds % 4, env)
        return batch._replace(rewards=batch.rewards / 2)


class Sampled(PrioritizedReplayBuffer):
    def sample(self, *args: Any) -> Any:
        return super().sample(*args)._replace(weights=None)


def on_instance(model: Any) -> None:
    plain = type(model).work
    model.work = lambda *sizes: plain(model, *sizes)._replace(max_grad_norm=1e-3)


class Case(NamedTuple):
    kind: Any
    reason: str
    options: dict[str, Any] = {}  # noqa: RUF012
    change: Any = None


def replay(kind: Any) -> dict[str, Any]:
    return {"replay_buffer_class": kind, "use_masking": False}


OVERRIDDEN = [
    Case(OwnLoss, "OwnLoss.loss is overridden: compiled kernels compute PPO's own loss"),
    Case(OwnTrain, "OwnTrain.train is overridden: compiled kernels compute PPO's own train"),
    Case(OwnWork, "OwnWork.work is overridden: compiled kernels compute PPO's own work"),
    Case(OwnUpdate, "OwnUpdate.train is overridden: compiled kernels compute DQN's own train"),
    Case(OwnSampling, "OwnSampling._sample_action is overridden: compiled kernels", {"use_masking": False}),
    Case(PPO, "PPO.work is set on the instance: compiled kernels compute PPO's own work", change=on_instance),
    Case(DQN, "DQN.work is set on the instance: compiled kernels compute DQN's own work", change=on_instance),
    Case(DQN, "Halved.sample is overridden: compiled kernels compute ReplayStorage's own sample", replay(Halved)),
    Case(DQN, "Gathered.gather is overridden: compiled kernels compute ReplayStorage's own gather", replay(Gathered)),
    Case(DQN, "Newest._get_samples is overridden: compiled kernels compute ReplayStorage's", replay(Newest)),
    Case(DQN, "Sampled.sample is overridden: compiled kernels compute PrioritizedReplayBuffer's", replay(Sampled)),
    Case(PPO, "OwnActing.predict_values is overridden", {"policy": OwnActing}),
    Case(PPO, "the buffer is a Own, which SB3's own loops serve",
         {"rollout_buffer_class": type("Own", (RolloutBuffer,), {})}),
]  # fmt: skip


def trained(case: Case, engine: str, kind: Any = None, **options: Any) -> Any:
    options = {**case.options, **options}
    policy = options.pop("policy", None)
    model = made(kind or case.kind, engine, **options)
    if policy is not None:
        model = (kind or case.kind)(policy, toy_gym_vec(), n_steps=8, batch_size=20, n_epochs=1, seed=0, engine=engine)
    if case.change is not None:
        case.change(model)
    return model.learn(120)


@pytest.mark.parametrize("case", OVERRIDDEN, ids=lambda case: case.reason.partition(":")[0])
def test_what_is_overridden_is_what_learns(case: Case):
    model = trained(case, "kernels")
    assert str(unsupported_reason(model)).startswith(case.reason)
    assert model.engine.kind == "torch"
    assert model.engine.unsupported_reason == unsupported_reason(model)
    expected = trained(case, "torch")
    for ours, theirs in zip(model.policy.parameters(), expected.policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if "use_masking" in case.options:  # the buffer's own batches, the method's own actions are what is learned from
        plain = made(DQN, "torch", use_masking=False).learn(120)
        assert not torch.allclose(plain.q_net.q_net[0].weight, model.q_net.q_net[0].weight, atol=1e-5)


def test_a_thread_does_not_sample_for_a_buffer_of_the_users():
    model = made(DQN, "torch", **replay(Halved))
    model.prefetch_batches()
    model.learn(120)
    assert (model.collector.sampler.hits, model.collector.sampler.waits) == (0, 0)


def test_a_subclass_without_methods_of_its_own_is_served():
    plain = type("Plain", (PPO,), {"told": 0, "_on_step": lambda self: None})
    assert made(plain, "kernels").learn(40).engine.kind == "kernels"
    model = made(PPO, "kernels")
    model.train = model.train  # as a mock puts it back
    assert unsupported_reason(model) is None


def test_dqn_does_not_ask_at_every_step(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    plain = eligible.unsupported_reason
    monkeypatch.setattr(eligible, "unsupported_reason", lambda model: asked.append(model) or plain(model))
    model = made(DQN, "kernels", policy_kwargs={"activation_fn": torch.nn.ELU})
    model.learn(120)
    assert model._n_updates > 10
    assert len(asked) <= 3, "made, and begun to learn"
    served = made(DQN, "kernels").learn(60)
    before = len(asked)
    served.q_net.q_net[0].register_forward_hook(lambda *_: None)
    assert served.engine_now().kind == "torch"
    assert "q_net.0 has a hook" in str(served.engine.unsupported_reason)
    assert len(asked) == before + 2, "what changed is seen at the next update, and asked once more for its engine"
