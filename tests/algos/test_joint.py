"""Several policies in one game: whose decision a row is, what each learns from, and how they act together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

import fasttrain
from fasttrain.algos.joint import JointMaskablePPO, JointPPO, JointStorage, by_env_steps
from fasttrain.algos.owners import NOBODY, Owners, View, Viewed, view_of
from fasttrain.algos.self_play import Player, weights_of
from fasttrain.batch import FinishedEpisode
from fasttrain.buffers.rollout import RolloutStorage, advantages_of
from fasttrain.envs.goals import Goals, MaskedGoals
from fasttrain.errors import ConfigError, EnvError
from toys import MaskedEnv, RandomEnv, seeded_vec

A, B = 0, 1
TURNS = [A, B, B, A, B, B]  # whose decision each step is; after the last one it is B's
NAMES = ["a", "b"]


class Turns(RandomEnv):
    """The first column of the observation is 1 in every third step of an episode: a decision of the first policy."""

    def _draw(self) -> Any:
        drawn = super()._draw()
        self.turn = getattr(self, "turn", -1) + 1
        drawn[0] = self.turn % 3 == 0
        return drawn


class MaskedTurns(MaskedEnv, Turns):
    pass


def members_of(kind: Any, **settings: Any) -> Any:
    """What builds two models, of which the first differs in its settings."""
    given = {"n_steps": 12, "batch_size": 16, "n_epochs": 2, "device": "cpu"}
    own = ({"policy_kwargs": {"net_arch": [8]}, "n_epochs": 3, "gamma": 0.8}, {})
    return lambda env: {
        name: kind("MlpPolicy", env, **{**given, **settings, **more}) for name, more in zip(NAMES, own, strict=True)
    }


def joint_model(
    kind: Any = JointPPO, cut: bool = True, engine: str = "torch", columns: Any = ([-3], None), views: Any = ()
) -> Any:
    box, masked = spaces.Box(-1, 1, (3,), np.float32), kind is JointMaskablePPO
    env = seeded_vec(lambda: (MaskedTurns if masked else Turns)(box, spaces.Discrete(4), cut))
    member = fasttrain.MaskablePPO if masked else fasttrain.PPO
    model = kind(
        env,
        make=members_of(member),
        owners=Owners(NAMES, columns, views),
        n_steps=12,
        batch_size=16,
        seed=1,
        device="cpu",
    )
    model.use_engine(engine)
    return model


def goal_model(masked: bool = True, engine: str = "torch", views: Any = None, **more: Any) -> Any:
    """A manager that sees the first two of three columns and sets one of two goals every three steps, and a worker."""
    box, game = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)
    env = seeded_vec(lambda: MaskedGoals(MaskedEnv(box, game), 2, 3) if masked else Goals(RandomEnv(box, game), 2, 3))
    given: dict[str, Any] = {"n_steps": 24, "batch_size": 16, "n_epochs": 2, "device": "cpu", "gamma": 1.0}
    member = fasttrain.MaskablePPO if masked else fasttrain.PPO
    views = views or [view_of([0, 1], 5, 1, 2, True), view_of(None, 5, 1, 2, False)]
    model: Any = (JointMaskablePPO if masked else JointPPO)(
        env, owners=Owners(["manager", "worker"], [None, [-2, -1]], views), n_steps=24, batch_size=16, seed=1,
        make=lambda env: {
            name: member("MlpPolicy", Viewed(env, view), gae_lambda=1.0, **given)
            for name, view in zip(["manager", "worker"], views, strict=True)
        },
        device="cpu", returns={"manager": "decisions", "worker": "decisions"}, **more,
    )  # fmt: skip
    model.use_engine(engine)
    return model


def storage(turns: list[int] = TURNS, following: int = B, **settings: Any) -> tuple[JointStorage, Any]:
    """Steps with rewards 1, 2, … and values 10, 20, …, of policy a with gamma 0.5 and lambda 1, b with 0.9 and 0.5."""
    shown = np.array(turns, np.float32).reshape(-1, 1, 1)
    given = len(turns), 1, spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
    own: Any = {"a": {"gamma": 0.5, "gae_lambda": 1.0}, "b": {"gamma": 0.9, "gae_lambda": 0.5}}
    members = {
        name: SimpleNamespace(
            **each, rollout_buffer=SimpleNamespace(storage=RolloutStorage(*given, device=torch.device("cpu"), **each))
        )
        for name, each in own.items()
    }
    model: Any = SimpleNamespace(
        members=members, policy=SimpleNamespace(owners=Owners(NAMES, [None, [-1]])),
        returns=dict.fromkeys(NAMES, "decisions"), engine=SimpleNamespace(decisions=dict.fromkeys(NAMES, 0)),
        reward_keys={}, _last_obs=np.full((1, 1), following, np.float32),
    )  # fmt: skip
    vars(model).update(settings)
    made = JointStorage(*given, device=torch.device("cpu"), gamma=1.0, gae_lambda=1.0, model=model)
    made.assign("observations", shown)
    made.rewards[:, 0] = np.arange(1, len(turns) + 1)
    made.values[:, 0] = np.arange(10.0, 10.0 * len(turns) + 1, 10.0)
    made.complete()
    return made, model


BY_STEPS, OF_BOTH = {"a": "steps", "b": "decisions"}, {"b": "decisions"}
A_DECIDES, NOBODY_DECIDES, A_FAULT = (
    (2, 0, who, np.float32(value)) for who, value in ((A, 8), (NOBODY, 8), (None, 30))
)


class Told(NamedTuple):
    """An episode may end with step 2, and the rollout with one; advantages by step, and the rows of a and of b."""

    advantages: dict[int, float]
    rows: tuple[list[int] | None, list[int] | None] = (None, None)
    settings: dict[str, Any] = {}  # noqa: RUF012
    end: Any = None  # True: by the rules; else what is noted of it
    last_done: bool = False


DISCOUNTED = 1 + 0.5 * 2 + 0.25 * 3 - 10
TRANSITIONS = {
    # a: 1 + 2 + 3 + 0.5 · 40 - 10. Its decision at step 3 is left out, because its next one is not known.
    # b, by δ of 9, 22, 9 and 9 and decay 0.45: rewards 2; 3 + 4; 5; 6 and next values 30, 50, 60, 70.
    "from a policy's decision to its next one": Told(
        dict(enumerate([16.0, 21.5426, 27.8725, 0.0, 13.05, 9.0])), ([0], [1, 2, 4, 5])
    ),
    # a: 1 + 2 + 3 - 10; b at step 2: 3 - 30, and at step 1: 2 + 0.9 · 30 - 20 + 0.45 · -27
    "an end after another's decision": Told({0: -4.0, 1: -3.15, 2: -27.0}, (None, [1, 2, 4, 5]), end=True),
    "an end with the rollout": Told({3: 4 + 5 + 6 - 40}, ([0, 3], None), last_done=True),
    # a: 1 + 2 + 3 + 0.5 · 8 - 10; b has left its step 2 out, whose value is the end of the transition before.
    "cut: the value of who would decide": Told({0: 0.0, 1: 9.0, 2: 0.0}, ([0], [1, 4, 5]), end=A_DECIDES),
    # b: 2 + 0.9 · 30 - 20 at step 1, whose episode is cut there; a cannot know what its decision was worth.
    "a fault": Told({0: 0.0, 1: 9.0, 2: 0.0}, ([], [1, 4, 5]), end=A_FAULT),
    "gamma by env steps": Told({0: DISCOUNTED + 0.125 * 40}, settings={"returns": BY_STEPS}),
    "gamma by env steps, cut": Told({0: DISCOUNTED + 0.125 * 8}, settings={"returns": BY_STEPS}, end=A_DECIDES),
    # a, with gamma 0.5 and lambda 1, to any policy's next decision: 4 + 0.5 · 5 + 0.25 · 6 + 0.125 · 70 - 40
    "a joint return": Told({0: -6.25, 3: -23.25}, ([0, 3], None), {"returns": OF_BOTH}, A_DECIDES),
    "no policy has learned the value": Told(
        {0: 1 + 0.5 * 2 + 0.25 * 30 - 10}, (None, [1, 4, 5]), {"returns": {}}, NOBODY_DECIDES
    ),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_what_a_policy_learns_of_by_hand(name: str) -> None:
    told = TRANSITIONS[name]
    made, model = storage(**told.settings)
    if told.end is not None:
        made.episode_starts[3] = 1.0
        made.finals += [] if told.end is True else [told.end]
    if told.end is A_FAULT:
        made.rewards[2] = 0.0
        made.leave_out(2, [0])
    found = finished(made, told.last_done)
    assert {step: found[step] for step in told.advantages} == told.advantages
    for policy, rows in zip(NAMES, told.rows, strict=True):
        assert rows is None or list(model.members[policy].rollout_buffer.storage.rows) == rows
    assert made.returns[0, 0] == found[0] + 10.0
    everybodys = sorted(row for rows in told.rows for row in rows or ())
    assert None in told.rows or list(made.rows) == everybodys
    assert model.engine.decisions == {"a": 2, "b": 4 - (told.end is A_FAULT)}


def finished(made: JointStorage, last_done: bool = False) -> list[float]:
    made.compute_returns_and_advantages(np.array([70.0], np.float32), np.array([last_done]))
    return [round(float(value), 4) for value in made.advantages[:, 0]]


def test_gamma_by_env_steps_with_a_fault_and_one_gamma_for_both() -> None:
    made, _ = storage([A, B, A], returns=BY_STEPS)
    made.rewards[2] = 0.0
    made.leave_out(2, [0])  # a fault ended the episode
    made.finals.append(A_FAULT)
    assert finished(made, last_done=True)[0] == 1 + 0.5 * 2 + 0.25 * 30 - 10
    rewards, gammas = by_env_steps(np.ones((4, 1), np.float32), np.array([[False], [True], [True], [False]]), 0.5)
    assert rewards[:, 0].tolist() == [1.0, 0.5, 0.25, 1.0]
    assert gammas[:, 0].tolist() == [0.125, 0.25, 0.5, 0.5]
    both, model = storage(returns={})
    for each in (model.members["b"], model.members["b"].rollout_buffer.storage):
        vars(each).update(gamma=0.5, gae_lambda=1.0)
    flat = advantages_of(both.rewards, both.values, both.episode_starts, np.array([70.0], np.float32),
                         np.array([False]), 0.5, 1.0)  # fmt: skip
    finished(both)
    np.testing.assert_array_equal(both.advantages, flat)


@pytest.mark.parametrize("kind", [JointPPO, JointMaskablePPO])
def test_both_policies_learn_each_by_its_own_settings(kind: Any) -> None:
    model = joint_model(kind)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(96)
    a, b = model.members.values()
    assert (a._n_updates, b._n_updates) == (2 * 3, 2 * 2)
    assert all(not torch.equal(before[name], value) for name, value in model.policy.state_dict().items())
    assert model.engine.decisions["a"] + model.engine.decisions["b"] == 96
    logged = model.logger.name_to_value
    assert {"a/train/loss", "b/train/loss", "a/train/learning_rate"} <= {*logged}
    assert logged["a/train/n_updates"] == 6
    figures = model.figures()
    assert figures["b"]["updates"] == b.engine.gradient_updates > 0
    assert model.engine.gradient_updates == a.engine.gradient_updates + b.engine.gradient_updates


def test_a_rollout_holds_what_its_own_policy_did() -> None:
    model = joint_model(JointMaskablePPO).learn(48)
    stored = model.rollout_buffer.storage
    seen, masks = (torch.from_numpy(each.reshape(48, -1)) for each in (stored.observations, stored.masks))
    owners = model.owners(seen.numpy())
    assert {*owners} == {A, B}
    fresh = joint_model(JointMaskablePPO)  # acted with these weights
    for number, member in enumerate(fresh.members.values()):
        own = owners == number
        actions = torch.from_numpy(stored.actions.reshape(48)[own])
        values, log_probs, _ = member.policy.evaluate_actions(seen[own], actions, masks[own])
        np.testing.assert_allclose(stored.values.reshape(48)[own], values.detach().flatten(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stored.log_probs.reshape(48)[own], log_probs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [True, False])
def test_a_policy_with_a_view_of_its_own_learns_from_what_it_saw_and_did(masked: bool) -> None:
    model, fresh = goal_model(masked), goal_model(masked)
    model.learn(96)
    whole = model.rollout_buffer.storage
    seen, actions = whole.observations.reshape(96, -1), whole.actions.reshape(96, -1)
    for number, (name, columns, chosen) in enumerate([("manager", [0, 1], [1]), ("worker", [*range(5)], [0])]):
        own = model.members[name].rollout_buffer.storage
        rows = own.rows
        assert {*model.owners(seen[rows])} == {number}
        np.testing.assert_array_equal(own.observations.reshape(96, -1)[rows], seen[rows][:, columns])
        np.testing.assert_array_equal(own.actions.reshape(96, -1)[rows], actions[rows][:, chosen])
        masks = [] if not masked else [torch.from_numpy(own.masks.reshape(96, -1)[rows])]
        given = torch.from_numpy(seen[rows][:, columns]), torch.from_numpy(actions[rows, chosen[0]])
        values, log_probs, _ = fresh.members[name].policy.evaluate_actions(*given, *masks)
        np.testing.assert_allclose(own.values.reshape(96)[rows], values.detach().flatten(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own.log_probs.reshape(96)[rows], log_probs.detach(), rtol=1e-5, atol=1e-6)


def test_a_managers_return_is_the_sum_of_rewards_until_its_next_decision() -> None:
    model = goal_model().learn(96)
    whole, own = model.rollout_buffer.storage, model.members["manager"].rollout_buffer.storage
    for env in range(4):  # episodes of 10 steps of the env, with 4 goals in between
        assert np.flatnonzero(model.owners(whole.observations[:, env]) == 0).tolist() == [0, 4, 8, 12, 14, 18, 22]
        for step, end in ((0, 14), (4, 14), (12, 14)):
            total = whole.rewards[step:end, env].sum()
            assert own.returns[step, env] == pytest.approx(total, abs=1e-5)
        delta = whole.rewards[14:18, env].sum() + whole.rewards[18:22, env].sum() + own.values[22, env]
        assert own.returns[14, env] == pytest.approx(delta, abs=1e-5), "the last goal has no outcome yet"


def test_goals_are_set_in_evaluations_and_by_opponents() -> None:
    model, shown = goal_model(), np.random.default_rng(1).uniform(-1, 1, (6, 5)).astype(np.float32)
    shown[:, 3:] = np.eye(3)[[0, 1, 2, 0, 1, 1]][:, 1:]
    masks = np.ones((6, 6), np.bool_)
    masks[:, [0, 2, 3]] = False
    actions, _ = model.predict(shown, deterministic=True, action_masks=masks)
    assert actions[[1, 2, 4, 5]].tolist() == [[1, 0]] * 4
    manager = model.members["manager"].predict(shown[[0, 3], :2], deterministic=True)[0]
    assert actions[[0, 3]].tolist() == [[0, goal] for goal in manager]
    assert Player(model).act(shown[[1]], masks[[1]]).tolist() == [[1, 0]]


def test_a_view_of_every_column_changes_nothing() -> None:
    views = ((), [View(np.arange(3)), View()])
    plain, viewed = (joint_model(JointMaskablePPO, views=each).learn(96) for each in views)
    assert all(torch.equal(a, b) for a, b in zip(plain.policy.parameters(), viewed.policy.parameters(), strict=True))


def test_a_policy_can_have_a_reward_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    step = RandomEnv.step

    def with_points(env: Any, action: int) -> Any:
        observation, reward, *rest, info = step(env, action)
        return observation, reward, *rest, {**info, "points": env.steps}

    monkeypatch.setattr(RandomEnv, "step", with_points)
    model = goal_model(reward_keys={"manager": "points"}).learn(96)
    own = model.members["manager"].rollout_buffer.storage
    assert own.returns[0, 0] == pytest.approx(sum(range(1, 11)))
    assert own.returns[12, 0] == pytest.approx(10)
    assert model.rollout_buffer.storage.rewards.max() <= 1
    monkeypatch.setattr(RandomEnv, "step", lambda env, action: (*step(env, action)[:4], {"points": "many"}))
    with pytest.raises(EnvError, match=r"policies\.worker\.reward_key=points: the infos have .*'many'"):
        goal_model(reward_keys={"worker": "points"}).learn(96)
    state = model.engine.state()
    resumed = goal_model(reward_keys={"manager": "points"})
    resumed.engine.load(*state, resumed)
    monkeypatch.setattr(RandomEnv, "step", step)  # no info has the entry any more
    resumed.learn(960)
    with pytest.raises(ConfigError, match=r"policies\.worker\.reward_key=point: no info has had such an entry in"):
        goal_model(reward_keys={"worker": "point"}).learn(960)


def test_kernels_give_what_torch_gives() -> None:
    shown = np.random.default_rng(0).random((9, 3), np.float32)
    plain, fast = joint_model(), joint_model(engine="kernels")
    assert fast.unsupported_reason() is None
    assert [engine.kind for engine in fast.engine_now().engines] == ["kernels", "kernels"]
    fast.engine.begin()
    np.testing.assert_allclose(fast.engine.values(shown), plain.engine_now().values(shown), rtol=1e-5, atol=1e-6)
    fast.learn(96)
    assert fast.figures()["a"]["updates"] > 0


def test_only_a_member_that_kernels_support_uses_them() -> None:
    model = joint_model(engine="kernels")
    first = model.members["a"]
    first.policy.mlp_extractor.policy_net.register_forward_hook(lambda *_: None)
    assert [engine.kind for engine in model.engine_now().engines] == ["torch", "kernels"]
    assert model.unsupported_reason() is None
    model.members["b"].policy.mlp_extractor.policy_net.register_forward_hook(lambda *_: None)
    assert model.unsupported_reason().startswith("a: mlp_extractor.policy_net has a hook")


def test_predict_asks_the_policy_that_decides() -> None:
    model = joint_model(JointMaskablePPO)
    shown = np.random.default_rng(1).uniform(-1, 0.4, (7, 3)).astype(np.float32)
    shown[[0, 4], 0] = 1.0
    masks = np.ones((7, 4), np.bool_)
    masks[:, 0] = False
    actions, _ = model.predict(shown, deterministic=True, action_masks=masks)
    for row in range(7):
        own = model.members["a" if row in (0, 4) else "b"]
        assert actions[row] == own.predict(shown[row], deterministic=True, action_masks=masks[row])[0]
        assert model.predict(shown[row], deterministic=True, action_masks=masks[row])[0] == actions[row]


@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_an_opponent_in_self_play_is_a_copy_of_all_policies(engine: str) -> None:
    model, other = (joint_model(JointMaskablePPO, engine=engine) for _ in range(2))
    other.learn(48)
    shown, masks = np.random.default_rng(2).random((9, 3), np.float32), np.zeros((9, 4), np.bool_)
    masks[:, 2] = True
    player = Player(model)
    assert [each.kind for each in player.engine.engines] == [engine, engine]  # type: ignore[attr-defined]
    assert player.act(shown, masks).tolist() == [2] * 9
    player.load(weights_of(other))
    other.engine_now().begin()
    np.testing.assert_array_equal(player.engine.values(shown), other.engine.values(shown))  # type: ignore[attr-defined]


def test_a_policy_that_never_decides_is_named() -> None:
    model = joint_model(columns=([-3, -2, -1], None))
    model.owners.columns = model.policy.owners.columns = [[0], None]
    model.env.envs[0].unwrapped.turn = 0
    for env in model.env.envs:
        env.unwrapped._draw = lambda: np.zeros(3, np.float32)
    with pytest.raises(ConfigError, match=r"policies\.a has decided nothing in \d+ env steps"):
        model.learn(4 * 12 * 20)


def test_a_truncated_end_is_noted_with_its_owner() -> None:
    model = joint_model()
    rewards = np.ones(4, np.float32)
    last = np.array([1.0, 0.2, 0.3], np.float32)
    ends = [FinishedEpisode(2, 1.0, 3, last, True, {}), FinishedEpisode(1, 1.0, 3, None, True, {})]
    model.bootstrap_truncated(ends, rewards, np.zeros(4, np.float32), 5)
    ((step, env, owner, value),) = model.rollout_buffer.storage.finals
    assert (step, env, owner) == (5, 2, A)
    with torch.no_grad():
        expected = model.members["a"].policy.predict_values(torch.from_numpy(last[None]))
    assert value == pytest.approx(float(expected))
    assert rewards.tolist() == [1.0] * 4


def test_guards_of_all_policies_follow_the_models() -> None:
    model = joint_model()
    model.engine.guard = None
    assert [engine.guard for engine in model.engine_now().engines] == [None, None]


def test_errors_and_lines_of_the_guard_name_the_policy() -> None:
    model, lines = joint_model(), list[str]()
    model.engine.guard.say = lines.append
    model.engine_now().engines[B].guard.say("[GUARD] step 3: one")
    assert lines == ["[GUARD] policies.b: step 3: one"]
    with torch.no_grad():
        model.members["b"].policy.action_net.weight.fill_(torch.nan)
    with pytest.raises(EnvError, match=r"^policies\.b: .*not finite"):
        model.learn(48)
