"""Masks and memory together, where no stock class exists: three proofs.

(a) where all is legal, MaskableRecurrentPPO is RecurrentPPO with sb3-contrib's masked distribution put in, bit by bit;
(b) without what the LSTM does, it is MaskablePPO; (c) a float64 reference that walks through each env step by step
finds the same loss and the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.maskable.distributions import make_masked_proba_distribution
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor

import fasttrain
from accelerated import loss_terms
from fasttrain.accelerators.compiled import Coefficients
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.recurrent_policies import MaskableRecurrentActorCriticPolicy
from fasttrain.algos.step import normalized
from fasttrain.batch import each_array
from fasttrain.errors import ConfigError, NoMasksError
from fasttrain.runs.evaluate import evaluate
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "discrete": spaces.Discrete(5),
    "multi-discrete": spaces.MultiDiscrete([2, 4]),
    "multi-binary": spaces.MultiBinary(3),
}
UNPADDED = EngineSettings(fused_adam=True)


class MaskedEnv(RandomEnv):
    """A random mask per state, some choice of every sub-action legal; or all legal. An illegal action is an error."""

    share = 0.5

    def _draw(self) -> Any:
        dims = action_dims(self.action_space)
        self.mask: NDArray[np.bool_] = self.np_random.random(sum(dims)) < self.share
        for start, size in zip(np.cumsum([0, *dims[:-1]]), dims, strict=True):
            self.mask[start + self.np_random.integers(size)] = True
        return super()._draw()

    def step(self, action: Any):
        dims = action_dims(self.action_space)
        chosen = np.cumsum([0, *dims[:-1]]) + np.asarray(action).reshape(-1)
        assert self.mask[chosen].all()
        return super().step(action)

    def action_masks(self) -> NDArray[np.bool_]:
        return self.mask


class AllLegal(MaskedEnv):
    share = 2.0


def masked(actions: spaces.Space, kind: type[MaskedEnv] = MaskedEnv) -> Callable[[], gym.Env]:
    return lambda: kind(BOX, actions, True)


def model_of(kind: Any, make: Callable[[], gym.Env], policy: Any = "MlpLstmPolicy", **settings: Any) -> Any:
    usual = {"n_steps": 24, "batch_size": 32, "n_epochs": 2, "ent_coef": 0.01, "seed": 3, "device": "cpu"}
    arguments = usual | settings
    arguments["policy_kwargs"] = {"lstm_hidden_size": 8} | arguments.get("policy_kwargs", {})
    return kind(policy, seeded_vec(make), **arguments)


def difference(one: Any, other: Any) -> float:
    first, second = one.policy.state_dict(), other.policy.state_dict()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


class Renormalised(RecurrentActorCriticPolicy):
    """sb3-contrib's policy with its masked distribution in place of the plain one, and no masks."""

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_dist = make_masked_proba_distribution(self.action_space)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor) -> Any:
        return self.action_dist.proba_distribution(action_logits=self.action_net(latent_pi))


@pytest.mark.parametrize("actions", [SPACES["discrete"], SPACES["multi-discrete"]])
def test_a_where_all_is_legal_it_is_the_recurrent_one(actions: spaces.Space):
    ours = model_of(fasttrain.MaskableRecurrentPPO, masked(actions, AllLegal)).learn(3 * 96)
    put_in = model_of(sb3_contrib.RecurrentPPO, masked(actions, AllLegal), Renormalised).learn(3 * 96)
    assert difference(ours, put_in) == 0.0
    plain = model_of(sb3_contrib.RecurrentPPO, masked(actions, AllLegal)).learn(3 * 96)
    assert 0.0 <= difference(ours, plain) < 1e-5


class Forgetful(MaskableRecurrentActorCriticPolicy):
    """What the LSTM would make of features are the features."""

    @staticmethod
    def _process_sequence(features: torch.Tensor, lstm_states: Any, episode_starts: Any, lstm: Any) -> Any:
        return features, lstm_states


@pytest.mark.parametrize("actions", SPACES.values(), ids=SPACES)
def test_b_without_its_lstm_it_is_the_masked_one(actions: spaces.Space):
    settings: dict[str, Any] = {"batch_size": 96, "n_epochs": 3}
    ours = model_of(
        fasttrain.MaskableRecurrentPPO, masked(actions), Forgetful, policy_kwargs={"lstm_hidden_size": 3}, **settings
    )
    theirs = sb3_contrib.MaskablePPO(
        "MlpPolicy", seeded_vec(masked(actions)), n_steps=24, ent_coef=0.01, seed=3, device="cpu", **settings
    )
    before = {name: value.clone() for name, value in ours.policy.state_dict().items() if "lstm" not in name}
    theirs.policy.load_state_dict(before)
    for each in (ours, theirs):
        each.set_random_seed(7)
        each.learn(3 * 96)
    found = theirs.policy.state_dict()
    worst = max(float((ours.policy.state_dict()[name] - found[name]).abs().max()) for name in found)
    assert worst < 1e-6
    assert max(float((before[name] - found[name]).abs().max()) for name in found) > 1e-4


def reference_loss(model: Any, rollout: Any, steps: Any, envs: Any, states: Any) -> torch.Tensor:
    """PPO's loss of some rows in float64: each row's output by walking from its sequence's first step, alone."""
    policy, dims = model.policy, action_dims(model.action_space)
    outputs = []
    where = {(int(step), int(env)): number for number, (step, env) in enumerate(zip(steps, envs, strict=True))}
    for step, env in zip(steps, envs, strict=True):
        first = step
        while first > 0 and not rollout.episode_starts[first, env] and (first - 1, env) in where:
            first -= 1
        cells = {}
        for which, lstm in (("pi", policy.lstm_actor), ("vf", policy.lstm_critic or policy.lstm_actor)):
            stored = [part[first, :, env : env + 1].double() for part in states[which]]
            h, c = (torch.zeros_like(part) if rollout.episode_starts[first, env] else part for part in stored)
            for at in range(first, step + 1):
                seen = torch.from_numpy(rollout.observations[at, env]).double()[None]
                if at > first and rollout.episode_starts[at, env]:
                    h, c = torch.zeros_like(h), torch.zeros_like(c)
                after_h, after_c = [], []
                for layer in range(lstm.num_layers):
                    weights = [getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh")]
                    biases = [getattr(lstm, f"{name}_l{layer}") for name in ("bias_ih", "bias_hh")]
                    gates = seen @ weights[0].T + biases[0] + h[layer] @ weights[1].T + biases[1]
                    i, f, g, o = gates.chunk(4, 1)
                    cell = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
                    seen = o.sigmoid() * cell.tanh()
                    after_h.append(seen)
                    after_c.append(cell)
                h, c = torch.stack(after_h), torch.stack(after_c)
            cells[which] = seen
            raw = torch.from_numpy(rollout.observations[step, env]).double()[None]
        latent_vf = cells["vf"]
        if policy.lstm_critic is None:
            latent_vf = cells["pi"].detach() if policy.shared_lstm else policy.critic(raw)
        logits = policy.action_net(policy.mlp_extractor.forward_actor(cells["pi"]))
        value = policy.value_net(policy.mlp_extractor.forward_critic(latent_vf))
        legal = torch.from_numpy(rollout.storage.masks[step, env])[None]
        parts = zip(logits.split(dims, 1), legal.split(dims, 1), rollout.actions[step, env].reshape(-1), strict=True)
        log_prob, entropy = 0.0, 0.0
        for part, allowed, action in parts:
            found = part.masked_fill(~allowed, -torch.inf).log_softmax(1)
            log_prob = log_prob + found[0, int(action)]
            only = found[allowed]
            entropy = entropy - (only.exp() * only).sum()
        outputs.append((value.squeeze(), log_prob, entropy))
    values, log_probs, entropies = (torch.stack([row[place] for row in outputs]) for place in range(3))
    kept = {name: torch.from_numpy(getattr(rollout, name)[steps, envs]).double()
            for name in ("advantages", "returns", "log_probs")}  # fmt: skip
    advantages = kept["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (log_probs - kept["log_probs"]).exp()
    clipped = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
    return -clipped - 0.01 * entropies.mean() + 0.5 * ((kept["returns"] - values) ** 2).mean()


LSTMS = {
    "own critic": {},
    "two layers": {"n_lstm_layers": 2},
    "shared": {"shared_lstm": True, "enable_critic_lstm": False},
    "no critic LSTM": {"enable_critic_lstm": False},
}


class Doubled(FlattenExtractor):
    """SB3 makes float32 of every observation; from here on it is float64."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations).double()


def collected(actions: spaces.Space, **lstm: Any) -> Any:
    """A model in float64 with a rollout made by the weights before its last update: ratios are not one."""
    model = model_of(fasttrain.MaskableRecurrentPPO, masked(actions), policy_kwargs=lstm, learning_rate=0.01)
    model.learn(96)
    model.policy.double()
    model.policy.pi_features_extractor = model.policy.vf_features_extractor = Doubled(BOX)
    model.policy.features_extractor = model.policy.pi_features_extractor
    return model


def doubled(batch: Any) -> Any:
    """Its numbers in float64."""
    names = ("old_values", "old_log_probs", "advantages", "returns")
    states = each_array(torch.Tensor.double, batch.sequences.states)
    return batch._replace(
        **{name: getattr(batch, name).double() for name in names}, sequences=batch.sequences._replace(states=states)
    )


@pytest.mark.parametrize(("actions", "lstm"), list(product(SPACES, LSTMS)))
def test_c_loss_and_gradients_are_those_of_a_walk_step_by_step(actions: str, lstm: str):
    model = collected(SPACES[actions], **LSTMS[lstm])
    rollout, parameters = model.rollout_buffer, list(model.policy.parameters())
    states = {
        net: [torch.from_numpy(getattr(rollout, f"{part}_states_{net}")) for part in ("hidden", "cell")]
        for net in ("pi", "vf")
    }
    numbers = Coefficients(0.2, None, 0.01, 0.5)
    for settings, laid in ((EngineSettings(), "padded"), (UNPADDED, "grouped")):
        model.use_engine(settings)
        head = model.engine.new_view()
        np.random.seed(4)
        for given in rollout.storage.minibatches(41, laid):
            batch = doubled(given)
            places = [int(np.flatnonzero(rollout.returns.reshape(-1) == value)[0]) for value in given.returns]
            steps, envs = np.divmod(places, rollout.n_envs)
            terms = loss_terms(head, normalized(batch, True), numbers)
            gradients = torch.autograd.grad(terms["loss"], parameters, allow_unused=True)
            expected = reference_loss(model, rollout, steps, envs, states)
            wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
            assert abs(float((terms["loss"] - expected).detach())) < 1e-10
            for ours, theirs in zip(gradients, wanted, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or float((ours - theirs).abs().max()) < 1e-10


def test_where_nothing_was_learned_yet_ratios_are_one():
    for engine in ("torch", UNPADDED):
        model = model_of(
            fasttrain.MaskableRecurrentPPO, masked(SPACES["discrete"]), batch_size=None, n_epochs=1, engine=engine
        )
        model.learn(96)
        assert abs(model.logger.name_to_value["train/approx_kl"]) < 1e-7
        assert model.logger.name_to_value["train/clip_fraction"] == 0.0


def test_what_stands_in_padding_changes_nothing():
    model = model_of(fasttrain.MaskableRecurrentPPO, masked(SPACES["multi-discrete"])).learn(96)
    head, numbers = model.engine.new_view(), Coefficients(0.2, None, 0.01, 0.5)
    batch = normalized(next(iter(model.rollout_buffer.storage.minibatches(41))), True)
    gaps = np.setdiff1d(np.arange(len(batch.actions)), batch.sequences.kept.numpy())
    assert len(gaps) > 3
    clean = loss_terms(head, batch, numbers)
    assert batch.action_masks[gaps].all()
    assert not batch.observations[gaps].any()
    wanted = torch.autograd.grad(clean["loss"], list(model.policy.parameters()))
    batch.observations[gaps], batch.actions[gaps] = 7.0, 1
    dirty = loss_terms(head, batch, numbers)
    assert torch.equal(clean["loss"], dirty["loss"])
    for one, other in zip(wanted, torch.autograd.grad(dirty["loss"], list(model.policy.parameters())), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("actions", SPACES.values(), ids=SPACES)
def test_evaluation_hands_over_masks_and_memory(actions: spaces.Space):
    model = model_of(fasttrain.MaskableRecurrentPPO, masked(actions), engine=UNPADDED).learn(96)
    for deterministic in (True, False):  # an illegal action fails in the env
        assert evaluate(model, model.env, 9, deterministic, seed=1)["episodes"] == 9
    seen, masks = np.zeros((2, 3), np.float32), np.zeros((2, sum(action_dims(actions))), np.bool_)
    masks[:, np.cumsum([0, *action_dims(actions)[:-1]])] = True  # the first choice of each, nothing else
    states = None
    for start in (True, False):
        chosen, states = model.predict(seen, states, np.full(2, start), deterministic=False, action_masks=masks)
        assert not chosen.any()
    again, _ = model.predict(seen, states, np.zeros(2, np.bool_), action_masks=masks)
    assert not again.any()
    assert np.abs(states[0]).max() > 0


def test_a_zip_loads_by_our_class_and_by_stocks_with_the_published_policy(tmp_path: Path):
    model = model_of(fasttrain.MaskableRecurrentPPO, masked(SPACES["multi-binary"])).learn(96)
    model.save(tmp_path / "model")
    policy = {"policy_class": MaskableRecurrentActorCriticPolicy}
    seen, masks = np.full((1, 3), 0.3, np.float32), np.array([[True, False, True, True, False, True]])
    expected = model.predict(seen, deterministic=True, action_masks=masks)[0]
    for loaded in (
        fasttrain.MaskableRecurrentPPO.load(tmp_path / "model", device="cpu"),
        sb3_contrib.RecurrentPPO.load(tmp_path / "model", device="cpu", custom_objects=policy),
    ):
        assert difference(loaded, model) == 0.0
        assert np.array_equal(loaded.policy.predict(seen, deterministic=True, action_masks=masks)[0], expected)


def test_what_has_no_masks_is_refused():
    with pytest.raises(NoMasksError):
        model_of(fasttrain.MaskableRecurrentPPO, lambda: RandomEnv(BOX, SPACES["discrete"])).learn(96)
    with pytest.raises(ConfigError, match=r"Box.* actions have no masks: take RecurrentPPO"):
        model_of(fasttrain.MaskableRecurrentPPO, lambda: RandomEnv(BOX, BOX))
    with pytest.raises(ConfigError, match="policy=RecurrentActorCriticPolicy takes no masks"):
        model_of(fasttrain.MaskableRecurrentPPO, masked(SPACES["discrete"]), RecurrentActorCriticPolicy)
