"""Chunks and burn-in: loss and gradient beside a float64 walk step by step, and beside stock's split."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from torch import Tensor

import fasttrain
from fasttrain.batch import each_array
from fasttrain.engines.engine import EngineSettings
from fasttrain.engines.packed_lstm import RecurrentKernelEngine
from fasttrain.engines.recurrent import RecurrentEngine
from fasttrain.errors import ConfigError
from toys import RandomEnv, seeded_vec, single_thread

one_thread = pytest.fixture(autouse=True)(single_thread)
BOX = spaces.Box(-1, 1, (3,), np.float32)
ENGINES = {"padded": EngineSettings(), "grouped": EngineSettings(fused_adam=True),
           "packed": EngineSettings(kind="kernels")}  # fmt: skip
LSTMS: dict[str, dict[str, Any]] = {
    "own critic": {},
    "two layers": {"n_lstm_layers": 2},
    "shared": {"shared_lstm": True, "enable_critic_lstm": False},
}


class Uneven(RandomEnv):
    """Episodes of any length, of about 14 steps."""

    def step(self, action: Any):
        self.steps = 0
        seen, reward, *_ = super().step(action)
        return seen, reward, bool(self.np_random.random() < 0.07), False, {}


def model_of(engine: EngineSettings = ENGINES["grouped"], lstm: Any = None, **settings: Any) -> Any:
    """With a rollout by the weights before its last update, so that what is stored is stale."""
    make = lambda: Uneven(BOX, spaces.Discrete(3))  # noqa: E731
    arguments = {"n_steps": 24, "batch_size": 24, "n_epochs": 2, "learning_rate": 0.02, "chunk_steps": 8} | settings
    model = fasttrain.RecurrentPPO(
        "MlpLstmPolicy", seeded_vec(make), seed=3, device="cpu", engine=engine,
        policy_kwargs={"lstm_hidden_size": 16} | (lstm or {}), **arguments,
    )  # fmt: skip
    return model.learn(2 * 96)


def head_of(model: Any) -> Any:
    """The head of a model without burn-in too, whose engine has none."""
    kind = RecurrentKernelEngine if model.engine.settings.kind == "kernels" else RecurrentEngine
    return kind(model.policy, model.engine.settings).new_head()


def cell(lstm: Any, seen: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of all layers in float64; h, c (L, 1, H)."""
    after = []
    for layer in range(lstm.num_layers):
        w_ih, w_hh, b_ih, b_hh = (
            getattr(lstm, f"{name}_l{layer}").double() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        i, f, g, o = (seen @ w_ih.T + b_ih + h[layer] @ w_hh.T + b_hh).chunk(4, 1)
        now = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
        seen = o.sigmoid() * now.tanh()
        after.append((seen, now))
    return torch.stack([one for one, _ in after]), torch.stack([one for _, one in after])


def walked(model: Any, net: str, row: int, burn_in: int) -> Tensor:  # (1, H)
    """What the LSTM makes of a row in float64, alone: from its chunk's first step, after a burn-in without gradient."""
    rollout = model.rollout_buffer
    policy, (at, env) = model.policy, divmod(row, rollout.num_envs)
    lstm = policy.lstm_actor if net == "pi" or policy.lstm_critic is None else policy.lstm_critic
    starts = rollout.episode_starts[:, env] != 0
    first = at
    while first % model.chunk_steps and not starts[first]:
        first -= 1
    begin = first
    while first - begin < burn_in and begin > 0 and not starts[begin]:
        begin -= 1
    h, c = (torch.from_numpy(np.array(getattr(rollout, f"{part}_states_{net}")[begin, :, env : env + 1])).double()
            for part in ("hidden", "cell"))  # fmt: skip
    for step in range(begin, at + 1):
        if starts[step]:
            h, c = torch.zeros_like(h), torch.zeros_like(c)
        with torch.set_grad_enabled(step >= first):
            h, c = cell(lstm, torch.from_numpy(rollout.observations[step, env]).double()[None], h, c)
    return h[-1]


@pytest.mark.parametrize("burn_in", [0, 3, 12])
@pytest.mark.parametrize("lstm", LSTMS)
@pytest.mark.parametrize("laid", ENGINES)
def test_outputs_and_gradients_are_those_of_a_walk_step_by_step(laid: Any, lstm: str, burn_in: int):
    model = model_of(ENGINES[laid], LSTMS[lstm], burn_in=burn_in)
    policy, rollout = model.policy, model.rollout_buffer
    head = head_of(model)
    assert head.layout == laid
    parameters = [part for name, part in policy.named_parameters() if "lstm" in name]
    weights = torch.from_numpy(np.random.default_rng(1).random(24)).double()
    rollout.returns[:] = np.arange(96).reshape(24, 4)  # which row it is
    np.random.seed(8)
    for batch in rollout.sequences(24, laid):
        rows = [int(value) for value in batch.returns]
        assert len({*rows}) == 24
        actor = torch.cat([walked(model, "pi", row, burn_in) for row in rows])
        critic = torch.cat([walked(model, "vf", row, burn_in) for row in rows])
        critic = actor.detach() if policy.lstm_critic is None else critic
        double = lambda net, given: torch.func.functional_call(  # noqa: E731
            net, {name: part.detach().double() for name, part in net.named_parameters()}, given)  # fmt: skip
        logits = double(policy.action_net, double(policy.mlp_extractor.policy_net, actor)).log_softmax(1)
        values = double(policy.value_net, double(policy.mlp_extractor.value_net, critic))[:, 0]
        wanted = logits[torch.arange(24), torch.from_numpy(rollout.actions.reshape(-1)[rows])]
        found_values, found, _ = head.rated(batch, True)
        assert float((found_values - values).detach().abs().max()) < 1e-5
        assert float((found - wanted).detach().abs().max()) < 1e-5
        theirs = torch.autograd.grad((weights * (wanted + values)).sum(), parameters, allow_unused=True)
        ours = torch.autograd.grad((weights * (found + found_values)).sum(), parameters, allow_unused=True)
        assert max(float(part.abs().max()) for part in theirs if part is not None) > 1e-2
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            assert one is None or float((one - other).abs().max()) < 2e-5


@pytest.mark.parametrize("laid", ENGINES)
def test_a_burn_in_over_the_whole_rollout_gives_the_states_of_a_plain_walk(laid: Any):
    model = model_of(ENGINES[laid], burn_in=23)
    rollout = model.rollout_buffer
    head, count = head_of(model), 0
    (batch,) = rollout.sequences(None, laid)
    begun, places = head.begun(batch.sequences), batch.sequences.burn_in.places.tolist()
    model.chunk_steps = 24  # of `walked`: from the episode's start, or the rollout's
    for place in places:
        state = batch.sequences.states.pi[0][:, place].numpy()
        rows = [row for row in range(96) if np.array_equal(rollout.hidden_states_pi[row // 4, :, row % 4], state)]
        wanted = walked(model, "pi", rows[0] - 4, 0).detach()
        assert float((begun.pi[0][:, place] - wanted).abs().max()) < 1e-6
        assert np.abs(begun.pi[0][:, place].numpy() - state).max() > 1e-3, "what was stored is stale"
        count += 1
    assert not any(part.requires_grad for part in (*begun.pi, *begun.vf))
    assert count >= 6


@pytest.mark.parametrize("laid", ENGINES)
def test_one_chunk_of_the_whole_rollout_in_one_minibatch_has_stocks_gradient(laid: Any):
    model = model_of(ENGINES[laid], chunk_steps=24)
    rollout, head, found = model.rollout_buffer, head_of(model), []
    seed = next(seed for seed in range(9999) if np.random.RandomState(seed).randint(96) % 24 == 0)
    for chunk_steps in (24, None):
        rollout.chunk_steps = chunk_steps
        np.random.seed(seed)
        (batch,) = rollout.sequences(None, laid)
        values, log_probs, _ = head.rated(batch, True)
        loss = ((values - batch.returns) ** 2).mean() - (log_probs * batch.advantages).mean()
        gradients = torch.autograd.grad(loss, list(model.policy.parameters()))
        found.append((loss.detach(), *gradients))
    largest = max(float(part.abs().max()) for part in found[0])
    assert largest > 0.1
    assert max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)) < 1e-6 * largest


def test_padding_is_nothing_to_what_is_rated():
    model = model_of(ENGINES["padded"], burn_in=4)
    head, padding = head_of(model), 0
    for batch in model.rollout_buffer.sequences(24, "padded"):
        wanted = head.rated(batch, True)
        gaps = torch.ones(len(batch.observations), dtype=torch.bool)
        gaps[batch.sequences.kept] = False
        batch.observations[gaps] = 1e3
        padding += int(gaps.sum())
        found = head.rated(batch, True)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert padding > 20


class Own(RecurrentActorCriticPolicy):
    def evaluate_actions(self, *arguments: Any) -> Any:
        return super().evaluate_actions(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_steps": 5}, "^chunk_steps=5: must divide the rollout's 24 steps of each env$"),
        ({"chunk_steps": 0}, "^chunk_steps=0: must divide the rollout's 24 steps of each env$"),
        ({"chunk_steps": 8, "batch_size": 20}, "^chunk_steps=8 with batch_size=20: a minibatch is whole chunks; "
                                               "take batch_size=16$"),
        ({"burn_in": 4, "chunk_steps": None}, "^burn_in=4 means nothing without chunk_steps: take both, or leave both"),
        ({"burn_in": 24}, "^burn_in=24: must lie between 0 and 23, the rollout has 24 steps of each env$"),
        ({"burn_in": -1}, "^burn_in=-1: must lie between 0 and 23"),
        ({"burn_in": 4, "policy": Own}, "^burn_in=4: the policy has an acting path of its own; leave it out$"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"policy": "MlpLstmPolicy", "n_steps": 24, "batch_size": 24, "chunk_steps": 8}
    with pytest.raises(ConfigError, match=message):
        fasttrain.RecurrentPPO(env=seeded_vec(lambda: gym.make("CartPole-v1")), **(arguments | settings))


def test_a_zip_keeps_how_rollouts_are_cut(tmp_path: Any):
    model = model_of(burn_in=2)
    model.save(tmp_path / "model")
    again = fasttrain.RecurrentPPO.load(tmp_path / "model", env=model.env, device="cpu")
    assert (again.rollout_buffer.chunk_steps, again.rollout_buffer.burn_in) == (8, 2)
    copied = each_array(torch.Tensor.clone, tuple(again.policy.parameters()))
    again.learn(96)
    assert any(not torch.equal(one, other) for one, other in zip(copied, again.policy.parameters(), strict=True))
