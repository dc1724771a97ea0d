"""Recurrent policies in one game: what each remembers goes from its decision to its next one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_joint import MaskedTurns, Turns

import fasttrain
from fasttrain.algos.joint_recurrent import JointMaskableRecurrentPPO, JointRecurrentPPO
from fasttrain.algos.owners import Owners
from fasttrain.errors import ConfigError
from toys import seeded_vec

NAMES = ["a", "b"]


def joint_model(masked: bool = True, engine: str = "torch", **second: Any) -> Any:
    box = spaces.Box(-1, 1, (3,), np.float32)
    env = seeded_vec(lambda: (MaskedTurns if masked else Turns)(box, spaces.Discrete(4), cut=True))
    member = fasttrain.MaskableRecurrentPPO if masked else fasttrain.RecurrentPPO
    units = {"lstm_hidden_size": 16, "net_arch": [8]}, {"lstm_hidden_size": 32, "net_arch": [8], **second}
    given: dict[str, Any] = {"n_steps": 24, "batch_size": 24, "n_epochs": 2, "device": "cpu"}
    model: Any = (JointMaskableRecurrentPPO if masked else JointRecurrentPPO)(
        env, owners=Owners(NAMES, [[-3], None]), n_steps=24, batch_size=24, seed=1, device="cpu",
        make=lambda env: {
            name: member("MlpLstmPolicy", env, policy_kwargs=own, **given)
            for name, own in zip(NAMES, units, strict=True)
        },
    )  # fmt: skip
    model.use_engine(engine)
    return model


@pytest.mark.parametrize("masked", [True, False])
def test_what_a_policy_remembers_goes_from_its_decision_to_its_next_one(masked: bool) -> None:
    model, fresh = joint_model(masked), joint_model(masked)
    model.learn(96)
    whole = model.rollout_buffer.storage
    owners = model.owners(whole.observations)
    for number, (name, member) in enumerate(fresh.members.items()):
        own, policy = model.members[name].rollout_buffer.storage, member.policy
        for env in range(4):
            states, last = None, 0
            for step in np.flatnonzero(owners[:, env] == number):
                if states is None or whole.episode_starts[last + 1 : step + 1, env].any():
                    states = tuple(torch.zeros(1, 1, policy.lstm_actor.hidden_size) for _ in range(4))
                if not whole.episode_starts[step, env]:  # there the flag makes them zero
                    for stored, now in zip(own.states, states, strict=True):
                        np.testing.assert_allclose(stored[step][:, env], now[:, 0].numpy(), atol=1e-6)
                masks = {"action_masks": torch.from_numpy(whole.masks[step, env : env + 1])} if masked else {}
                shown = torch.from_numpy(whole.observations[step, env : env + 1])
                with torch.no_grad():
                    _, value, _, after = policy(
                        shown, type(model._last_lstm_states)(states[:2], states[2:]), torch.zeros(1), **masks
                    )
                assert own.values[step, env] == pytest.approx(float(value), abs=1e-5)
                states, last = (*after.pi, *after.vf), step
    assert model.members["a"]._n_updates == 2


def test_a_sequence_goes_on_over_decisions_of_others_and_ends_with_the_episode() -> None:
    model = joint_model(False).learn(96)
    storage = model.members["a"].rollout_buffer.storage
    begins = storage.begins(storage.rows)
    # 3 episodes of 10 steps in 24 steps; a decides in every third step, counted from the env's first
    assert begins.sum() == 4 * 3
    assert len(storage.rows) == 4 * 8
    assert not (np.diff(storage.rows) == 4).any(), "two decisions of a never follow each other"


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_predict_remembers_as_the_training_does(engine: str) -> None:
    model = joint_model(engine=engine).learn(96)
    shown = np.random.default_rng(1).uniform(-1, 0.4, (6, 2, 3)).astype(np.float32)
    shown[::3, 0, 0] = shown[1::2, 1, 0] = 1.0
    masks, state = np.ones((2, 4), np.bool_), None
    alone: dict[Any, Any] = {}
    for step in range(6):
        starts = np.array([step in (0, 4), step == 0])
        actions, state = model.predict(shown[step], state, starts, deterministic=True, action_masks=masks)
        for env in range(2):
            if starts[env]:
                alone = {key: its for key, its in alone.items() if key[1] != env}
            key = ("a" if shown[step, env, 0] > 0.5 else "b"), env
            action, alone[key] = model.members[key[0]].predict(
                shown[step, [env]], alone.get(key), deterministic=True, action_masks=masks[:1]
            )
            assert actions[env] == action[0]
    assert [part.shape for part in state] == [(1, 2, 48)] * 2


def test_kernels_act_and_learn_for_both() -> None:
    model = joint_model(engine="kernels").learn(192)
    assert [member.engine.kind for member in model.members.values()] == ["kernels", "kernels"]
    assert all(member.engine.gradient_updates for member in model.members.values())


def test_policies_with_other_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent policies need the same cell, layers and kind of critic"):
        joint_model(n_lstm_layers=2)
