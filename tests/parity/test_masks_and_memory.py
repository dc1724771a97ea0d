"""Masks and memory together, where no stock class exists: three proofs.

(a) where all is legal, MaskableRecurrentPPO is RecurrentPPO with sb3-contrib's masked distribution put in, bit by bit;
(b) without what the LSTM does, it is MaskablePPO; (c) a float64 reference that walks through each env step by step
finds the same loss and the same gradients.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import make_masked_proba_distribution
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor

import fasttrain
from accelerated import loss_terms
from fasttrain.accelerators.compiled import Coefficients
from fasttrain.algos.engine import EngineSettings
from fasttrain.algos.policy_view import action_dims
from fasttrain.algos.recurrent_policies import MaskableRecurrentActorCriticPolicy
from fasttrain.algos.step import normalize_advantages
from fasttrain.batch import each_array
from fasttrain.errors import ConfigError, NoMasksError
from fasttrain.runs.evaluate import evaluate
from toys import MaskedEnv, RandomEnv, seeded_vec

BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "discrete": spaces.Discrete(5),
    "multi-discrete": spaces.MultiDiscrete([2, 4]),
    "multi-binary": spaces.MultiBinary(3),
}
LSTMS = {
    "own critic": {},
    "two layers": {"n_lstm_layers": 2},
    "shared": {"shared_lstm": True, "enable_critic_lstm": False},
    "no critic LSTM": {"enable_critic_lstm": False},
}
UNPADDED = EngineSettings(fused_adam=True)
NUMBERS = Coefficients(0.2, None, 0.01, 0.5)
EACH_SPACE = pytest.mark.parametrize("actions", SPACES.values(), ids=SPACES)


class AllLegal(MaskedEnv):
    share = 2.0


def model_of(
    actions: Any, kind: Any = fasttrain.MaskableRecurrentPPO, policy: Any = "MlpLstmPolicy", env: Any = MaskedEnv,
    lstm: Any = (), **settings: Any,
) -> Any:  # fmt: skip
    usual = {"n_steps": 16, "batch_size": 32, "n_epochs": 2, "ent_coef": 0.01, "seed": 3, "device": "cpu"}
    net = {"policy_kwargs": {"lstm_hidden_size": 8, **dict(lstm)}} if "Recurrent" in kind.__name__ else {}
    return kind(policy, seeded_vec(lambda: env(BOX, actions, True), 3), **usual | net | settings)


def difference(one: Any, other: Any) -> float:
    first, second = one.policy.state_dict(), other.policy.state_dict()
    return max(float((first[name] - second[name]).abs().max()) for name in second)


class Renormalised(RecurrentActorCriticPolicy):
    """sb3-contrib's policy with its masked distribution in place of the plain one, and no masks."""

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_dist = make_masked_proba_distribution(self.action_space)

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor) -> Any:
        return self.action_dist.proba_distribution(action_logits=self.action_net(latent_pi))


@pytest.mark.parametrize("name", ["discrete", "multi-discrete"])
def test_a_where_all_is_legal_it_is_the_recurrent_one(name: str):
    stock = sb3_contrib.RecurrentPPO
    kinds = ((fasttrain.MaskableRecurrentPPO, "MlpLstmPolicy"), (stock, Renormalised), (stock, "MlpLstmPolicy"))
    ours, put_in, plain = (model_of(SPACES[name], *kind, env=AllLegal).learn(2 * 48) for kind in kinds)
    assert difference(ours, put_in) == 0.0
    assert difference(ours, plain) < 1e-5


class Forgetful(MaskableRecurrentActorCriticPolicy):
    """What the LSTM would make of features are the features."""

    @staticmethod
    def _process_sequence(features: torch.Tensor, lstm_states: Any, episode_starts: Any, lstm: Any) -> Any:
        return features, lstm_states


@EACH_SPACE
def test_b_without_its_lstm_it_is_the_masked_one(actions: spaces.Space):
    ours = model_of(actions, policy=Forgetful, lstm={"lstm_hidden_size": 3}, batch_size=48)
    theirs = model_of(actions, sb3_contrib.MaskablePPO, "MlpPolicy", batch_size=48)
    before = {name: value.clone() for name, value in ours.policy.state_dict().items() if "lstm" not in name}
    theirs.policy.load_state_dict(before)
    for each in (ours, theirs):
        each.set_random_seed(7)
        each.learn(2 * 48)
    assert difference(ours, theirs) < 1e-6
    learned = theirs.policy.state_dict()
    assert max(float((before[name] - learned[name]).abs().max()) for name in learned) > 1e-4


def walked(lstm: Any, inputs: Any, starts: Any, h: Any, c: Any) -> torch.Tensor:
    """The last layer's output (1, H) behind the last of `inputs`, (h, c) standing before the first of them."""
    for seen, begins in zip(inputs, starts, strict=True):
        if begins:
            h, c = torch.zeros_like(h), torch.zeros_like(c)
        after_h, after_c = [], []
        for layer in range(lstm.num_layers):
            w_ih, w_hh, b_ih, b_hh = (getattr(lstm, f"{name}_l{layer}")
                                      for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))  # fmt: skip
            i, f, g, o = (seen @ w_ih.T + b_ih + h[layer] @ w_hh.T + b_hh).chunk(4, 1)
            cell = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
            seen = o.sigmoid() * cell.tanh()
            after_h.append(seen)
            after_c.append(cell)
        h, c = torch.stack(after_h), torch.stack(after_c)
    return seen


def reference_loss(model: Any, rollout: Any, steps: Any, envs: Any) -> torch.Tensor:
    """PPO's loss of some rows in float64: each row's output by walking from its sequence's first step, alone."""
    policy, dims = model.policy, action_dims(model.action_space)
    rows, outputs = {*zip(steps.tolist(), envs.tolist(), strict=True)}, []
    for step, env in sorted(rows):
        first = step
        while first > 0 and not rollout.episode_starts[first, env] and (first - 1, env) in rows:
            first -= 1
        inputs = torch.from_numpy(rollout.observations[first : step + 1, env]).double()[:, None]
        starts, latents = rollout.episode_starts[first : step + 1, env], {}
        for net, lstm in (("pi", policy.lstm_actor), ("vf", policy.lstm_critic)):
            stored = [getattr(rollout, f"{part}_states_{net}")[first, :, env : env + 1] for part in ("hidden", "cell")]
            if lstm is not None:
                latents[net] = walked(lstm, inputs, starts, *(torch.from_numpy(part).double() for part in stored))
        if policy.lstm_critic is None:
            latents["vf"] = latents["pi"].detach() if policy.shared_lstm else policy.critic(inputs[-1])
        logits = policy.action_net(policy.mlp_extractor.forward_actor(latents["pi"]))
        value = policy.value_net(policy.mlp_extractor.forward_critic(latents["vf"]))
        legal = torch.from_numpy(rollout.storage.masks[step, env])[None]
        parts = zip(logits.split(dims, 1), legal.split(dims, 1), rollout.actions[step, env].reshape(-1), strict=True)
        log_prob, entropy = 0.0, 0.0
        for part, allowed, action in parts:
            found = part.masked_fill(~allowed, -torch.inf).log_softmax(1)
            log_prob = log_prob + found[0, int(action)]
            only = found[allowed]
            entropy = entropy - (only.exp() * only).sum()
        stored = (torch.tensor(float(getattr(rollout, name)[step, env]), dtype=torch.float64)
                  for name in ("advantages", "returns", "log_probs"))  # fmt: skip
        outputs.append((value.squeeze(), log_prob, entropy, *stored))
    values, log_probs, entropies, advantages, returns, old = map(torch.stack, zip(*outputs, strict=True))
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (log_probs - old).exp()
    clipped = torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
    return -clipped - 0.01 * entropies.mean() + 0.5 * ((returns - values) ** 2).mean()


class Doubled(FlattenExtractor):
    """SB3 makes float32 of every observation; from here on it is float64."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations).double()


def collected(actions: spaces.Space, lstm: Any) -> Any:
    """A model in float64 with a rollout made by the weights before its last update: ratios are not one."""
    model = model_of(actions, lstm=lstm, learning_rate=0.01).learn(48)
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
    model = collected(SPACES[actions], LSTMS[lstm])
    rollout, parameters = model.rollout_buffer, list(model.policy.parameters())
    walks: dict[Any, Any] = {}  # both layouts have the same rows in a minibatch
    for settings, laid in ((EngineSettings(), "padded"), (UNPADDED, "grouped")):
        model.use_engine(settings)
        head = model.engine.new_view()
        np.random.seed(4)
        for given in rollout.storage.minibatches(27, laid):
            terms = loss_terms(head, normalize_advantages(doubled(given)), NUMBERS)
            gradients = torch.autograd.grad(terms["loss"], parameters, allow_unused=True)
            values = rollout.returns.reshape(-1)
            places = tuple(sorted(int(np.flatnonzero(values == value)[0]) for value in given.returns))
            if places not in walks:
                loss = reference_loss(model, rollout, *np.divmod(places, rollout.n_envs))
                walks[places] = loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)
            expected, wanted = walks[places]
            assert abs(float(terms["loss"].detach() - expected)) < 1e-10
            for ours, theirs in zip(gradients, wanted, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or float((ours - theirs).abs().max()) < 1e-10
    assert len(walks) == 2


@EACH_SPACE
def test_evaluation_and_zips_hand_over_masks_and_memory(actions: spaces.Space, tmp_path: Path):
    model = model_of(actions, engine=UNPADDED).learn(48)
    for deterministic in (True, False):  # an illegal action fails in the env
        assert evaluate(model, model.env, 4, deterministic, seed=1)["episodes"] == 4
    model.save(tmp_path / "model")
    policy = {"policy_class": MaskableRecurrentActorCriticPolicy}
    ours = fasttrain.MaskableRecurrentPPO.load(tmp_path / "model", device="cpu")
    published = sb3_contrib.RecurrentPPO.load(tmp_path / "model", device="cpu", custom_objects=policy)
    seen, masks = np.zeros((2, 3), np.float32), np.zeros((2, sum(action_dims(actions))), np.bool_)
    masks[:, np.cumsum([0, *action_dims(actions)[:-1]])] = True  # the first choice of each, nothing else
    for each in (model, ours, published):
        assert difference(each, model) == 0.0
        states = None
        for start in (True, False):
            chosen, states = each.policy.predict(seen, states, np.full(2, start), action_masks=masks)
            assert not chosen.any()
        assert np.abs(states[0]).max() > 0
    assert not model.predict(seen, None, np.ones(2, np.bool_), action_masks=masks)[0].any()


def test_what_has_no_masks_is_refused():
    with pytest.raises(NoMasksError):
        model_of(SPACES["discrete"], env=RandomEnv).learn(48)
    with pytest.raises(ConfigError, match=r"Box.* actions have no masks: use RecurrentPPO"):
        model_of(BOX, env=RandomEnv)
    with pytest.raises(ConfigError, match="policy=RecurrentActorCriticPolicy takes no masks"):
        model_of(SPACES["discrete"], policy=RecurrentActorCriticPolicy)
