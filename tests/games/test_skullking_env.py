from __future__ import annotations

import numpy as np
import pytest
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv
from test_skullking_game import make, reset

from fasttrain.errors import EnvError
from fasttrain_games.skullking.bids import SkullKingBids
from fasttrain_games.skullking.env import SkullKingEnv
from fasttrain_games.skullking.render import card_name

MIXED = {"random": 1.0, "easy": 1.0, "medium": 1.0, "hard": 1.0, "self": 1.0}


def draw_action(mask: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(mask)))


@pytest.mark.parametrize(("num_players", "card_memory"), [(2, True), (4, False)])
def test_dummy_vec_env_and_native_batch_agree_bit_for_bit(num_players: int, card_memory: bool) -> None:
    num_envs, options = 5, {"shaping_trick_won": 0.1, "card_memory": card_memory, "opponents": MIXED}
    envs = DummyVecEnv([lambda: SkullKingEnv(num_players, **options) for _ in range(num_envs)])
    envs.seed(40)
    observations = envs.reset()
    game, slots = make(num_envs, num_players, **options)
    reset(game, 40)
    rng = np.random.default_rng(2)
    finished = 0
    for step in range(200):
        assert np.array_equal(np.stack(envs.env_method("action_masks")), slots.action_masks)
        assert envs.get_attr("opponents_turn") == game.opponents_turn.tolist()
        assert np.array_equal(observations, slots.observations)
        actions = np.array([draw_action(mask, rng) for mask in slots.action_masks])
        if step == 100:  # in the middle of a game
            envs.env_method("set_opponents", "hard")
            game.set_opponents("hard")
        observations, rewards, dones, infos = envs.step(actions)
        slots.actions[:] = actions
        game.step()
        assert np.array_equal(rewards, slots.rewards)
        assert np.array_equal(dones, slots.terminations)
        for i in np.flatnonzero(dones):
            finished += 1
            assert np.array_equal(infos[i]["terminal_observation"], game.final_observations[i])
            assert not infos[i]["TimeLimit.truncated"]
            assert {key: infos[i][key] for key in game.episode_info(i)} == game.episode_info(i)
    assert finished >= num_envs


def test_illegal_actions_are_replaced_by_the_lowest_legal_one_and_counted() -> None:
    env, plain = SkullKingEnv(), SkullKingEnv()
    env.reset(seed=5)
    plain.reset(seed=5)
    a = env.step(50)
    b = plain.step(0)
    assert np.array_equal(a[0], b[0])
    assert a[4] == {"illegal_actions": 1}
    assert b[4] == {}
    a = env.step(-7)
    b = plain.step(int(plain.action_masks().argmax()))
    assert np.array_equal(a[0], b[0])
    assert a[4] == {"illegal_actions": 2}
    assert env.step(int(env.action_masks().argmax()))[4] == {"illegal_actions": 2}
    assert env.reset(seed=5)[1] == env.step(0)[4] == {}


def test_illegal_actions_raise_on_request_and_before_the_first_reset() -> None:
    env = SkullKingEnv(on_illegal="raise")
    with pytest.raises(EnvError, match=r"call reset\(\) first"):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"action 50 is illegal now, legal actions are \[0, 1\]"):
        env.step(50)
    env.step(1)
    with pytest.raises(EnvError, match=r"call reset\(\) first"):
        SkullKingEnv().step(0)


def test_render_shows_the_table() -> None:
    env = SkullKingEnv(render_mode="ansi")
    env.reset(seed=2)
    table = env.render()
    assert "round 1/10  bidding" in table
    assert table.count("?") == 4
    env.step(1)
    view = env.peek()
    table = env.render()
    lines = table.splitlines()
    assert len(lines) == 7
    assert "?" not in table
    assert lines[-1].startswith("hand: ")
    for seat, line in enumerate(lines[2:6]):
        assert line.startswith("you" if seat == 0 else f"bot {seat}")
        assert ("*" in line) is (seat == view.leader)
        assert line.split()[1 + (seat > 0)] == str(view.bids[seat])
    for code in view.trick:
        assert card_name(code) in table
    done = False
    while not done:
        _, _, done, _, info = env.step(int(env.action_masks().argmax()))
    table = env.render()
    assert table.startswith(f"game over: {info['end_reason']} with {info['score']} points ({info['score_diff']:+d})")
    assert SkullKingEnv().render() is None
    assert [card_name(code) for code in (0, 55, 56, 61)] == ["yellow 1", "black 14", "escape", "pirate"]
    assert [card_name(code) for code in (66, 74)] == ["tigress as escape", "tigress as pirate"]
    assert [card_name(code) for code in (67, 71)] == ["skull king", "white whale"]


def test_bad_settings_are_named() -> None:
    with pytest.raises(TypeError, match="render_mode='human': choose None or 'ansi'"):  # as make_vec_env expects
        SkullKingEnv(render_mode="human")
    with pytest.raises(TypeError, match="shaping_nonsense"):
        SkullKingEnv(shaping_nonsense=1.0)


def test_a_round_with_a_given_bid_is_a_goal_environment_that_hindsight_can_change() -> None:
    env, rng, met, bids = SkullKingBids(rounds=(2, 5), most=3), np.random.default_rng(0), [], set()
    check_env(env, skip_render_check=True)
    for seed in range(40):
        seen, _ = env.reset(seed=seed)
        done, rewards = False, []
        while not done:
            assert not seen["observation"][env._hidden].any(), "the bid is in desired_goal alone"
            seen, reward, done, truncated, info = env.step(np.int64(draw_action(env.action_masks(), rng)))
            rewards.append(reward)
        assert not truncated
        assert rewards[:-1] == [0.0] * (len(rewards) - 1)
        assert bool(rewards[-1]) == bool(info["bids_made"]) == info["is_success"], "as the game itself counts it"
        reached, asked = seen["achieved_goal"], seen["desired_goal"]
        assert env.compute_reward(np.stack([reached, reached]), np.stack([reached, asked]), [{}, {}]).tolist() == [
            1.0,
            rewards[-1],
        ]
        met.append(info["is_success"])
        bids.add(round(10 * asked[0]))
    assert bids == {0, 1, 2, 3}
    assert 0 < sum(met) < 40
