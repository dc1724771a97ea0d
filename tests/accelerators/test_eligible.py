"""What compiled kernels reproduce: what is overridden, added or unknown PyTorch computes, and one sentence names it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.sac.policies import SACPolicy

from accelerated import Careful, Conservative, WithTerm, toy_sac, weights
from fasttrain import DQN, PPO, SAC
from fasttrain.accelerators import eligible, layout
from fasttrain.accelerators.eligible import policy_reason, unsupported_reason
from fasttrain.algos.q_networks import BranchingDQNPolicy, DuelingDQNPolicy
from fasttrain.buffers.prioritized import PrioritizedReplayBuffer
from fasttrain.buffers.replay_storage import ReplayStorage
from recurrent_cases import SHARED
from recurrent_cases import policy_of as recurrent
from toys import toy_gym_vec

BOX, TWO, PAIR = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2), spaces.MultiDiscrete([2, 2])
WIDE = spaces.Box(-1.0, 1.0, (4,), np.float64)
NO_MLP = "not an MLP of linear layers with one kind of activation"
NO_ADAM = "the optimizer is {}: kernels compute a plain Adam with one parameter group"
NOT_STOCKS = "the policy is not SB3's own, or its actions are neither"
COMPUTE, NO_KERNEL = "compiled kernels compute", "compiled kernels do not compute"
NOT_CALLED = "has a hook or a method set by the user, which kernels would not call"


def actor(space: Any = BOX, actions: Any = TWO, kind: Any = ActorCriticPolicy, **kwargs: Any) -> Any:
    return kind(space, actions, lambda _: 1e-3, **kwargs)


def keyed(part: spaces.Space[Any]) -> Any:
    return actor(spaces.Dict({"a": BOX, "b": part}), kind=MultiInputActorCriticPolicy)


def q_net(space: Any = BOX, actions: Any = TWO, kind: Any = DQNPolicy, **kwargs: Any) -> Any:
    return actor(space, actions, kind, **kwargs)


def soft(**kwargs: Any) -> Any:
    return actor(actions=spaces.Box(-1, 1, (2,)), kind=SACPolicy, **kwargs)


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
        (actor(activation_fn=torch.nn.ELU), None),
        (actor(activation_fn=torch.nn.LeakyReLU), None),
        (
            actor(activation_fn=partial(torch.nn.ELU, 0.5)),
            f"{COMPUTE} ELU with its default argument, not ELU(",
        ),
        (actor(activation_fn=partial(torch.nn.LeakyReLU, 0.2)), f"{COMPUTE} LeakyReLU with its default argument"),
        (actor(activation_fn=torch.nn.SiLU), f"{NO_KERNEL} SiLU; they compute Tanh, ReLU, ELU, LeakyReLU"),
        (actor(net_arch=[]), NO_MLP),
        (actor(actions=spaces.MultiBinary(2)), NOT_STOCKS),
        (actor(actions=spaces.Box(-1, 1, (2,))), None),
        (actor(actions=spaces.Box(-1, 1, (2, 2))), NOT_STOCKS),
        (actor(actions=spaces.Box(-1, 1, (2,)), use_sde=True), NOT_STOCKS),
        (actor(WIDE), "observations are float64; compiled kernels need a float32 Box"),
        (keyed(spaces.Box(-1.0, 1.0, (2, 2), np.float64)), None),
        (keyed(spaces.Discrete(3)), "the observations' key 'b' is Discrete(3); kernels need a Box, such as a one-hot"),
        (keyed(spaces.Box(0, 255, (3, 36, 36), np.uint8)), "the observations' key 'b' is an image"),
        (actor(features_extractor_class=OwnFeatures), "features come from a OwnFeatures, not from a flat Box"),
        (actor(kind=OwnActing), "OwnActing.predict_values is overridden: compiled kernels compute ActorCriticPolicy's"),
        (recurrent(), None),
        (recurrent(**SHARED), None),
        (recurrent(net_arch=[]), None),
        (recurrent(units=24), "an LSTM of 24 units: compiled kernels take multiples of 16"),
        (recurrent(units=272), "an LSTM of 272 units: torch is faster above 256"),
        (recurrent(lstm_kwargs={"bias": False}), "the LSTM has other arguments than SB3's"),
        (recurrent(n_lstm_layers=2), "2 layers of LSTMs"),
        (recurrent(enable_critic_lstm=False), "the value net has no LSTM"),
        (recurrent(actions=spaces.Box(-1, 1, (2,))), None),
        (recurrent(optimizer_class=torch.optim.AdamW), NO_ADAM.format("AdamW")),
        (q_net(net_arch=[3]), None),
        (q_net(kind=DuelingDQNPolicy, net_arch=[3, 4, 5], activation_fn=torch.nn.Tanh), None),
        (q_net(spaces.Box(-1.0, 1.0, (2, 3), np.float32), PAIR, BranchingDQNPolicy), None),
        (q_net(actions=spaces.MultiDiscrete([2, 2], np.int32), kind=BranchingDQNPolicy), "actions are MultiDiscrete"),
        (q_net(kind=DuelingDQNPolicy, net_arch=[]), NO_MLP),
        (q_net(spaces.Discrete(4)), "observations are Discrete(4); kernels need a Box, such as a one-hot"),
        (q_net(optimizer_class=OwnAdam), NO_ADAM.format("OwnAdam")),
        (q_net(kind=OwnChoice), "OwnChoice._predict is overridden: compiled kernels compute DQNPolicy's own _predict"),
        (soft(), None),
        (soft(use_sde=True), "gSDE is computed on PyTorch"),
        (soft(net_arch={"pi": [8], "qf": []}), "a network without a hidden layer"),
        (soft(features_extractor_class=OwnFeatures), "features come from a OwnFeatures; compiled kernels need flat"),
    ],
)
def test_what_kernels_serve(policy: Any, reason: str | None):
    assert policy_reason(policy) is None if reason is None else str(policy_reason(policy)).startswith(reason)


def net_of(policy: Any) -> Any:
    """Layers of a net, which `learned_by` learns."""
    if hasattr(policy, "critic_target"):
        return policy.critic.qf0
    return policy.q_net.q_net if hasattr(policy, "q_net") else policy.mlp_extractor.policy_net


def learner_of(policy: Any) -> Any:
    return policy.critic.optimizer if hasattr(policy, "critic_target") else policy.optimizer


def with_own_method(policy: Any) -> None:
    part = next(getattr(policy, name) for name in ("actor", "q_net", "features_extractor") if hasattr(policy, name))
    part.forward = lambda seen: seen


CHANGES: dict[str, tuple[Any, str]] = {
    "float64": (lambda policy: policy.double(), "the policy's tensors are not all float32 on the CPU"),
    "hook": (lambda policy: net_of(policy)[0].register_forward_hook(lambda *_: None), f".0 {NOT_CALLED}"),
    "gradients' hook": (lambda policy: net_of(policy)[0].register_full_backward_hook(lambda *_: None), NOT_CALLED),
    "method": (with_own_method, NOT_CALLED),
    "norm": (lambda policy: net_of(policy).insert(1, torch.nn.LayerNorm(64)), NO_MLP),
    "activation": (lambda policy: net_of(policy).__setitem__(1, torch.nn.ELU()), NO_MLP),
    "frozen": (lambda policy: net_of(policy)[0].bias.requires_grad_(False), "0.bias is frozen"),
    "parameter's hook": (lambda policy: net_of(policy)[0].bias.register_hook(lambda _: None), "0.bias has a hook"),
    "weight decay": (lambda policy: learner_of(policy).param_groups[0].update(weight_decay=0.1), "option weight_decay"),
    "step's hook": (lambda policy: learner_of(policy).register_step_post_hook(lambda *_: None), "steps have a hook"),
    "other parameters": (lambda policy: learner_of(policy).param_groups[0]["params"].pop(), "not those of the policy"),
    "parameter": (lambda policy: policy.register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
                  "the parameter scale is in none of the layers that compiled kernels know"),
}  # fmt: skip


@pytest.mark.parametrize("make", [actor, recurrent, q_net, soft])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_done_to_a_policy_counts(change: str, make: Any):
    policy = make()
    CHANGES[change][0](policy)
    assert CHANGES[change][1] in str(policy_reason(policy))


def test_layers_of_a_class_of_their_own():
    policy, remembering, headed = actor(), recurrent(), actor()
    policy.mlp_extractor = OwnLayers(4, [64, 64], torch.nn.Tanh)
    assert policy_reason(policy) == "the hidden layers are a OwnLayers, a class of the user"
    remembering.lstm_critic = OwnLstm(5, 16)
    assert policy_reason(remembering) == "the LSTM is a OwnLstm, a class of the user"
    headed.action_net = torch.nn.Sequential(torch.nn.Linear(64, 2))
    assert policy_reason(headed) == NO_MLP
    frozen = actor(actions=spaces.Box(-1, 1, (2,)))
    frozen.log_std.requires_grad = False
    assert policy_reason(frozen) == "the parameter log_std is frozen"
    actor_alone = soft()
    actor_alone.actor.optimizer = torch.optim.RMSprop(actor_alone.actor.parameters())
    assert str(policy_reason(actor_alone)).startswith(NO_ADAM.format("RMSprop"))


def test_an_activation_with_a_number_that_kernels_do_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(layout.KINDS, torch.nn.GELU, 9)
    assert policy_reason(actor(activation_fn=torch.nn.GELU)) == f"{NO_KERNEL} the activation 9 (GELU)"


@pytest.mark.parametrize(("kind", "work"), [(PPO, "PPOWork"), (DQN, "QWork"), (SAC, "SACWork")])
def test_a_field_that_kernels_do_not_know(kind: Any, work: str, monkeypatch: pytest.MonkeyPatch):
    model = kind("MlpPolicy", "Pendulum-v1" if kind is SAC else "CartPole-v1", device="cpu")
    assert unsupported_reason(model) is None
    monkeypatch.setattr(getattr(eligible, work), "_fields", (*getattr(eligible, work)._fields, "kl_coef"))
    assert unsupported_reason(model) == f"{work}.kl_coef is a field that compiled kernels do not know"


# --- an algorithm of the user's: what is learned is what its own methods say


def made(kind: Any, engine: str = "torch", **options: Any) -> Any:
    if issubclass(kind, SAC):
        return toy_sac(kind, engine=engine, **options)
    settings: dict[str, Any] = {"n_steps": 8, "batch_size": 20, "n_epochs": 1}
    if issubclass(kind, DQN):
        settings = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 400}
    return kind("MlpPolicy", toy_gym_vec(), seed=0, device="cpu", engine=engine, **{**settings, **options})


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


def replay(kind: Any) -> dict[str, Any]:
    return {"replay_buffer_class": kind, "use_masking": False}


class FarTarget(DQN):
    def evaluate(self, batch: Any) -> Any:
        evaluated = super().evaluate(batch)
        return evaluated._replace(target=evaluated.target + 5.0)


class HalfActions(SAC):
    def _sample_action(self, *args: Any) -> Any:
        actions, stored = super()._sample_action(*args)
        return actions / 2, stored / 2


PPOS, DQNS = "overridden: compiled kernels compute PPO's own", "overridden: compiled kernels compute DQN's own"
SACS = "overridden: compiled kernels compute SAC's own"
STORAGES = "overridden: compiled kernels compute ReplayStorage's own"


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (OwnTrain, {}, f"OwnTrain.train is {PPOS} train"),
        (OwnWork, {}, f"OwnWork.work is {PPOS} work"),
        (WithTerm, {}, f"WithTerm.loss is {PPOS} loss"),
        (OwnSampling, {"use_masking": False}, f"OwnSampling._sample_action is {DQNS} _sample_action"),
        (Conservative, {}, f"Conservative.loss is {DQNS} loss"),
        (FarTarget, {}, f"FarTarget.evaluate is {DQNS} evaluate"),
        (Careful, {}, f"Careful.critic_loss is {SACS} critic_loss"),
        (HalfActions, {}, f"HalfActions._sample_action is {SACS} _sample_action"),
        (DQN, replay(Halved), f"Halved.sample is {STORAGES} sample"),
        (DQN, replay(Gathered), f"Gathered.gather is {STORAGES} gather"),
        (DQN, replay(Newest), f"Newest._get_samples is {STORAGES} _get_samples"),
        (DQN, replay(Sampled), "Sampled.sample is overridden: compiled kernels compute PrioritizedReplayBuffer's own"),
        (PPO, {"rollout_buffer_class": type("Own", (RolloutBuffer,), {})},
         "the buffer is a Own, with which SB3's own loops run"),
    ],
)  # fmt: skip
def test_what_is_overridden_is_what_learns(kind: Any, options: dict[str, Any], reason: str):
    model = made(kind, "kernels", **options)
    assert str(unsupported_reason(model)).startswith(reason)
    assert model.engine.kind == "torch"
    assert model.engine.unsupported_reason == unsupported_reason(model)
    if "rollout_buffer_class" not in options:
        learned = weights(model.learn(80))
        expected = weights(made(kind, **options).learn(80))  # made now: both draw from torch's random stream
        torch.testing.assert_close(learned, expected, rtol=1e-4, atol=1e-5)
        stock = next(one for one in (PPO, DQN, SAC) if issubclass(kind, one))
        masks = {"use_masking": False} if options else {}
        assert not torch.allclose(weights(made(stock, **masks).learn(80)), learned, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "name"), [(PPO, "work"), (DQN, "work"), (DQN, "loss"), (SAC, "critic_loss"), (SAC, "_move_targets")]
)
def test_a_method_set_on_a_model_counts_until_it_is_its_own_again(kind: Any, name: str):
    model = made(kind, "kernels")
    own = getattr(model, name)
    setattr(model, name, lambda *given: own(*given))
    told = f"{kind.__name__}.{name} is set on the instance: compiled kernels compute {kind.__name__}'s own {name}"
    assert unsupported_reason(model) == told
    assert model.engine_now().kind == "torch"
    setattr(model, name, own)  # as a mock puts it back
    assert unsupported_reason(model) is None


def test_a_thread_does_not_sample_for_a_buffer_of_the_users():
    model = made(DQN, "torch", **replay(Halved))
    model.prefetch_batches()
    model.learn(60)
    assert (model.collector.sampler.hits, model.collector.sampler.waits) == (0, 0)


def test_a_subclass_without_methods_of_its_own_is_served():
    plain = type("Plain", (PPO,), {"told": 0, "_on_step": lambda self: None})
    assert made(plain, "kernels").learn(40).engine.kind == "kernels"


def test_dqn_does_not_ask_at_every_step(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    plain = eligible.unsupported_reason
    monkeypatch.setattr(eligible, "unsupported_reason", lambda model: asked.append(model) or plain(model))
    model = made(DQN, "kernels", policy_kwargs={"activation_fn": torch.nn.ELU})
    model.learn(100)
    assert model._n_updates > 10
    assert len(asked) <= 3, "made, and begun to learn"
    served = made(DQN, "kernels").learn(60)
    before = len(asked)
    served.q_net.q_net[0].register_forward_hook(lambda *_: None)
    assert served.engine_now().kind == "torch"
    assert "q_net.0 has a hook" in str(served.engine.unsupported_reason)
    assert len(asked) == before + 2, "what changed is seen at the next update, and asked once more for its engine"
