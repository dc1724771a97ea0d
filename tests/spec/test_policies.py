"""The settings of several policies: what they say, and which of them are refused."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import configured
from fasttrain.errors import ConfigError
from fasttrain.spec.policies import columns_of, goals_of, member_file, own_config, returns_of, seen_of, with_told
from fasttrain_games.skullking.observation import IS_BIDDING

FAST = "engine=fast"
SHARING = (FAST, "algo=ppo", "env.backend=pettingzoo", "env.id=herd", "env.kwargs.sharing=true")
CART = ("env.id=CartPole-v1", "algo=ppo", FAST)
TWO = "policies={manager: {decides: bid, algo.n_epochs: 25, algo: {net_arch: [8]}}, worker: {decides: play}}"


def test_each_policy_has_the_runs_settings_and_its_own() -> None:
    config = configured(FAST, TWO, "algo.gamma=0.9", "init_from=somewhere")
    manager, worker = (own_config(config, name) for name in ("manager", "worker"))
    assert (manager.algo.n_epochs, manager.algo.net_arch, manager.algo.gamma) == (25, (8,), 0.9)
    assert worker.algo == config.algo
    assert (manager.init_from, manager.policies) == (None, {})
    own = configured(FAST, "policies={a: {decides: bid, batch_size: 8, init_from: x}, b: {decides: play}}")
    assert (own_config(own, "a").batch_size, own_config(own, "a").init_from) == (8, "x")
    assert own_config(own, "b").batch_size == own.batch_size


def test_a_games_phases_are_columns_of_its_observation() -> None:
    assert columns_of(configured(FAST, TWO), 248) == [[IS_BIDDING - 248], None]
    swapped = configured(FAST, "policies={worker: {decides: others}, manager: {decides: [bid, last]}}",
                         "env.phases={last: 162}")  # fmt: skip
    assert columns_of(swapped, 248) == [None, [IS_BIDDING - 248, 162 - 248]]


def test_without_columns_the_info_says_whose_decision_it_is() -> None:
    config = configured(*CART, "policies={a: {decides: [x, y]}, b: {decides: z, returns: steps}}")
    (wrapper,) = config.env.wrappers
    assert wrapper == {"wrapper": "fasttrain.envs.wrappers:InfoOneHot", "key": "policy", "values": ["x", "y", "z"]}
    assert columns_of(config, 7) == [[-3, -2], [-1]]
    assert with_told(config) == config, "a stored configuration has the wrapper already"
    assert configured(*CART).env.wrappers == ()


def test_a_phase_that_is_named_twice_counts_once() -> None:
    config = configured(*CART, "policies={a: {decides: [x, x]}, b: {decides: 7}}")
    assert config.env.wrappers[0]["values"] == ["x", "7"]


def test_files_of_the_policies_stand_beside_the_models() -> None:
    assert [member_file(stem, "worker") for stem in ("model", "best_model")] == ["worker.zip", "best_model_worker.zip"]


def policies(text: str, *more: str) -> tuple[str, ...]:
    return (FAST, f"policies={{{text}}}", *more)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (policies("a: {decides: bid}"), "only one policy"),
    (policies("a: {decides: bid}, b: {decides: bid}"), r"policies\.b and policies\.a both decide in bid"),
    (policies("a: {decides: play}, b: {decides: others}"), "both decide in others"),
    (policies("a: {decides: bids}, b: {decides: play}"), r"a\.decides=bids: .*no such phase; did you mean 'bid'"),
    (policies("a: {decides: x}, b: {decides: play}"), "no such phase; there are bid, play, others"),
    (policies("a: {decide: bid}, b: {decides: play}"), r"unknown key 'policies\.a\.decide'; did you mean 'decides'"),
    (policies("a: {}, b: {decides: play}"), r"policies\.a needs decides"),
    (policies("a: {decides: bid, algo.n_epoch: 3}, b: {decides: play}"), r"unknown key 'policies\.a\.algo\.n_epoch'.*"
     r"did you mean 'algo\.n_epochs'"),
    (policies("a: {decides: bid, algo.n_epochs: 3, algo: {n_epochs: 4}}, b: {decides: play}"),
     r"policies\.a: algo\.n_epochs is set twice, by its own key and inside algo"),
    (policies("a: {decides: bid, algo.n_epochs: many}, b: {decides: play}"), r"policies\.a\.algo\.n_epochs=many: exp"),
    (policies("a: {decides: bid, algo.n_epochs: 0}, b: {decides: play}"), r"policies\.a\.algo\.n_epochs=0: must be at"),
    (policies("a: {decides: bid, algo.rollout_size: 8}, b: {decides: play}"), "all policies share one rollout"),
    (policies("a: {decides: bid, returns: far}, b: {decides: play}"), "returns=far: not one of joint, decisions"),
    (policies("a: {decides: bid, algo.gamma: 0.9}, b: {decides: play}"), "have no joint returns"),
    (policies("a: {decides: bid, reward_key: x, returns: joint}, b: {decides: play}"), "have no joint returns"),
    (policies("model: {decides: bid}, b: {decides: play}"), "'model' cannot name a policy: its file model.zip is"),
    (policies("a: {decides: bid}, b: {decides: play}", "algo=dqn"), "policies need one of ppo, maskable_ppo, recu"),
    (policies("a: {decides: bid}, b: {decides: play}", "algo=maskable_recurrent_ppo", "algo.memory_inputs=[action]"),
     "and algo.memory_inputs appends others"),
    (policies("a: {decides: bid}, b: {decides: play}", "algo=maskable_recurrent_ppo", "opponent=self"), "with memory"),
    (policies("a: {decides: bid}, b: {decides: play}", "engine=stock"), "SB3 has no such training; use engine=fast"),
    (policies("a: {decides: bid}, b: {decides: play}", "env.normalize=[obs]"), "which env.normalize=\\[obs\\] changes"),
    (policies("a: {goal_every: 3, goals: 2}, b: {decides: play}"), "sets the goals of one other"),
    (policies("a: {goal_every: 3, goals: 2}, b: {}, c: {}"), "sets the goals of one other"),
    (policies("a: {goal_every: 3, goals: 2}, b: {goal_every: 3, goals: 2}"), "sets the goals of one other"),
    (policies("a: {goal_every: 3}, b: {}"), r"policies\.a: a policy that sets goals needs goals >= 2,"),
    (policies("a: {goal_every: 0, goals: 2}, b: {}"), "and goal_every >= 1 or phase"),
    (policies("a: {goal_every: round, goals: 2}, b: {}"), r"policies\.a\.goal_every=round: expected a whole number"),
    ((*CART, "policies={a: {goal_every: phase, goals: 2}, b: {}}"), "this game has no phases; name their columns by"),
    (policies("a: {goal_every: 3, goals: 2}, b: {}", "opponent=self"), "goal_every need fixed opponents"),
    (policies("a: {decides: bid, reward_key: x}, b: {decides: play}", "opponent=self"), "reward_key need fixed"),
    ((*CART, "policies={a: {decides: x}, b: {decides: others}}"), 'or name a value of info\\["policy"\\]'),
    (policies("a: {decides: null}, b: {decides: play}"), r"a\.decides=None: expected a phase, or a list of phases"),
    (policies("a: {decides: {x: 1}}, b: {decides: play}"), "expected a phase, or a list of phases"),
    (policies("a: {decides: 1}, b: {decides: play}"), r"a\.decides=1: this game has no such phase"),
    (policies("a: {decides: bid, algo: 3}, b: {decides: play}"), r"policies\.a\.algo=3: expected a mapping"),
    (policies("a: {decides: bid, batch_size: 1}, b: {decides: play}"), r"a\.batch_size=1: must be at least 2"),
    (policies("a: {decides: bid}, A: {decides: play}"), "'A' cannot name a policy"),
    (policies("best_model_a: {decides: bid}, a: {decides: play}"), "its file best_model_a.zip is another"),
    ((*SHARING, "policies={a: {decides: x, reward_key: y}, b: {decides: z}}"), r"a\.reward_key: .*has no infos"),
    ((*SHARING, "env.kwargs.roles=[z, x]", "policies={a: {decides: x}, b: {decides: z}}"),
     r"env\.kwargs\.roles=\['z', 'x'\]: the policies' decides name the roles \(x, z\); remove it"),
    ((*SHARING[:-1], "policies={a: {decides: x}, b: {decides: y}}"), "set env.kwargs.sharing=true, so that each agent"),
    ((FAST, TWO, "algo.reuse=2"), "policies learn from the newest rollout alone; use algo.reuse=1"),
    ((FAST, TWO, "algo.target_tv=0.1"), "policies with algo.target_tv: it is for one policy"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_wrong_settings_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*settings)


def test_a_manager_sets_goals_and_the_worker_decides_where_there_is_one() -> None:
    config = configured(FAST, "policies={m: {goal_every: 3, goals: 4, observation: [5]}, w: {observation: ['0:2']}}")
    assert goals_of(config) == (4, 3, ())
    assert columns_of(config, 14) == [None, [-4, -3, -2, -1]]
    assert [seen_of(config, name, 14) for name in "mw"] == [[5], [0, 1, 10, 11, 12, 13]]
    phase = configured(
        FAST, "policies={m: {goal_every: phase, goals: 2}, w: {returns: joint}}", "env.phases={last: 162}"
    )
    assert goals_of(phase) == (2, 0, (IS_BIDDING, 162))
    assert [seen_of(phase, name, 14) for name in "mw"] == [[*range(12)], None]
    assert [returns_of(phase, name) for name in "mw"] == ["decisions", "joint"]
    assert goals_of(configured(FAST, TWO)) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("[9]", "there is no column 9; there are 0 to 3"),
        ("['2:6']", "no column 4"),
        ("[]", "names no column"),
        ("['2:1']", "'2:1' is neither a column nor"),
        ("[x]", "'x' is neither a column nor"),
    ],
)
def test_an_observation_names_columns_that_there_are(asked: str, message: str) -> None:
    config = configured(*CART, f"policies={{a: {{decides: x, observation: {asked}}}, b: {{decides: y}}}}",
                        "env.phases={x: 1, y: 2}")  # fmt: skip
    with pytest.raises(ConfigError, match=f"policies.a.observation: .*{message}"):
        seen_of(config, "a", 4)


def test_rewards_of_a_policy_are_told_by_the_workers_too() -> None:
    config = configured(*CART, "policies={a: {decides: x, reward_key: points}, b: {decides: z}}", "env.info_keys=[own]")
    assert config.env.info_keys == ("own", "points")
    assert [returns_of(config, name) for name in "ab"] == ["decisions"] * 2
    assert with_told(config) == config


def test_a_column_outside_of_the_observation_is_refused() -> None:
    config: Any = configured(*CART, "env.phases={x: 1, y: 9}", "policies={a: {decides: x}, b: {decides: y}}")
    with pytest.raises(ConfigError, match=r"policies\.b: its phase is column 9; the observation has columns 0 to 3"):
        columns_of(config, 4)
