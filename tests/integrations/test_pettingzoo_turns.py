"""Parameter sharing in games whose seats decide one after another, or all at once: what is stored and what rests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sb3_contrib
import torch
from gymnasium import spaces

import nimble
from conftest import RunCommand, configured
from fasttrain import PPO, MaskablePPO
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.vector import GymVecEnv
from fasttrain_integrations.pettingzoo import Rows
from messages import assert_says, wrong_inputs

GAMMA, LAMBDA, STEPS = 0.9, 0.8, 60
TICTACTOE = "pettingzoo.classic.tictactoe_v3"


def made(num_envs: int = 6, game: str = "nimble", **options: Any) -> GymVecEnv:
    return GymVecEnv(lambda num_envs: Rows(num_envs, game, **options), num_envs, f"env.id={game}")


def made_aec(game: str, **options: Any) -> Any:
    if game == "nimble":
        return nimble.Nimble(**options)
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env(**options)


def is_out(game: Any, seat: str) -> bool:
    return bool(game.terminations[seat] or game.truncations[seat])


def seen_of(game: Any, seat: str) -> tuple[Any, Any]:
    seen = game.observe(seat)
    return (
        (seen["observation"], seen["action_mask"])
        if isinstance(seen, dict)
        else (seen, game.infos[seat]["action_mask"])
    )


def played(game: Any, actions: Any) -> tuple[list[dict[str, Any]], tuple[str, Any]]:
    """Every decision, by PettingZoo's own calls, and who decides next, on what. actions: (T, seats)."""
    seats, decisions, pending = game.possible_agents, list[dict[str, Any]](), dict[str, dict[str, Any]]()
    game.reset()
    for step, row in enumerate(actions):
        seat = game.agent_selection
        seen, mask = seen_of(game, seat)
        pending[seat] = {"seat": seats.index(seat), "step": step, "seen": seen, "mask": mask, "reward": 0.0, "end": ""}
        decisions.append(pending[seat])
        game.step(int(row[seats.index(seat)]))
        for one, decision in pending.items():
            decision["reward"] += game.rewards[one]
        for one in [one for one in pending if is_out(game, one)]:
            ended = pending.pop(one)
            ended["end"] = "over" if game.terminations[one] else "cut"
            ended["last"] = seen_of(game, one)[0]
        while game.agents and is_out(game, game.agent_selection):
            game.step(None)
        if not game.agents:
            game.reset()
    for decision in pending.values():
        decision["end"] = "open"
    return decisions, (game.agent_selection, seen_of(game, game.agent_selection)[0])


def advantages(decisions: list[dict[str, Any]], values: Any, rate: Any, upcoming: Any) -> list[float | None]:
    """Of one seat's decisions by the recursion of the paper; None where nobody knows yet what came of it."""
    found: list[float | None] = []
    after, carried = 0.0, 0.0
    for decision in reversed(decisions):
        value, reward = values[decision["step"]], decision["reward"]
        if decision["end"] == "open" and upcoming is None:
            found.append(None)
            after, carried = value, 0.0
            continue
        if decision["end"]:
            carried = 0.0
            after = {"over": lambda: 0.0, "cut": lambda d=decision: rate(d["last"]), "open": lambda: rate(upcoming)}[
                decision["end"]
            ]()
        carried = reward + GAMMA * after - value + GAMMA * LAMBDA * carried
        found.append(carried)
        after = value
    return found[::-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("nimble", {"loss": 1.0}),  # who takes three stones twice is out while the others go on
        ("nimble", {"loss": 0.5, "stones": 3, "told": "info"}),  # may be over before the third seat had a turn
        ("nimble", {"stones": 40, "cut_at": 7}),
        (TICTACTOE, {}),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_what_is_stored_is_what_a_game_by_hand_gives(game: str, options: dict[str, Any], kind: str):
    if game == TICTACTOE:
        pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
    copies, seats = 2, len(made_aec(game, **options).possible_agents)
    env = made(copies * seats, game, **options)
    model = MaskablePPO(
        "MlpPolicy", env, n_steps=STEPS, batch_size=32, n_epochs=1, learning_rate=0.0, gamma=GAMMA,
        gae_lambda=LAMBDA, seed=3, engine=kind,
    )  # fmt: skip
    model.learn(1)
    storage: Any = model.rollout_buffer.storage
    chosen = storage.actions.reshape(STEPS, copies, seats)
    learned = np.zeros(STEPS * copies * seats, bool)
    learned[storage.rows] = True
    learned = learned.reshape(STEPS, copies, seats)

    def rate(seen: Any) -> float:
        with torch.no_grad():
            return float(model.policy.predict_values(torch.as_tensor(np.asarray(seen, np.float32))[None]))

    ends, told = set[str](), 0
    for copy in range(copies):
        decisions, (mover, upcoming) = played(made_aec(game, **options), chosen[:, copy])
        assert len(decisions) == STEPS
        for seat in range(seats):
            own, row = [one for one in decisions if one["seat"] == seat], copy * seats + seat
            is_next = made_aec(game).possible_agents.index(mover) == seat
            expected = advantages(own, storage.values[:, row], rate, upcoming if is_next else None)
            known = [(one, value) for one, value in zip(own, expected, strict=True) if value is not None]
            assert np.flatnonzero(learned[:, copy, seat]).tolist() == [one["step"] for one, _ in known]
            for one, value in known:
                step = one["step"]
                assert storage.observations[step, row].tolist() == np.asarray(one["seen"]).tolist()
                assert storage.masks[step, row].tolist() == (one["mask"] != 0).tolist()
                assert storage.advantages[step, row] == pytest.approx(value, abs=1e-4)
                assert storage.returns[step, row] == pytest.approx(value + storage.values[step, row], abs=1e-4)
            ends |= {one["end"] for one in own}
            told += len(own)
    assert model.num_timesteps == told == STEPS * copies
    assert ("cut" if "cut_at" in options else "over") in ends


def test_the_losers_end_comes_while_they_wait_and_lengths_are_decisions():
    env = made(3, loss=1.0, stones=4)
    env.reset()
    rests, ends = [], []
    for action in (0, 0, 1):  # red takes one, green one, blue the last two
        rests.append(np.flatnonzero(~env.slots.rests).tolist())
        env.step_slots(np.full(3, action))
        ends.append([(one.env_index, one.length, one.episode_return) for one in env.slots.finished])
    assert rests == [[0], [1], [2]]
    assert ends == [[], [], [(0, 1, -0.875), (1, 1, -0.875), (2, 1, 1.25)]]
    env.step_slots(np.full(3, 2))
    assert env.slots.finished == []
    env.step_slots(np.full(3, 0))  # green takes the last one before blue had a turn: no episode of blue's
    assert [(one.env_index, one.length) for one in env.slots.finished] == [(0, 1), (1, 1)]


def test_who_is_out_rests_until_the_game_is_over():
    env = made(3, stones=20)
    env.reset()
    movers, ends = [], []
    for action in (2, 0, 0, 2, 0, 0, 0):  # red is greedy twice
        movers += np.flatnonzero(~env.slots.rests).tolist()
        env.step_slots(np.full(3, action))
        ends += [(len(movers), one.env_index, one.length, one.episode_return) for one in env.slots.finished]
    assert movers == [0, 1, 2, 0, 1, 2, 1]
    assert ends == [(4, 0, 2, 0.375 - 1.0)]


def test_masks_in_infos_are_of_the_seat_to_move_and_a_look_is_legal():
    env = made(1, told="info", stones=2)
    env.reset()
    for _ in range(20):  # an illegal move would take more stones than there are
        env.step_slots(env.slots.action_masks.argmax(axis=1))
        assert env.venv.copies[0].aec.left >= 0
    assert {action for seat, action in env.venv.copies[0].aec.log if seat == "green"} <= {0, None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("game", ["nimble", TICTACTOE])
def test_it_is_learned_from_the_command_line(game: str, fasttrain: RunCommand):
    if game == TICTACTOE:
        pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
    loss = ("env.kwargs.loss=1.0",) if game == "nimble" else ()
    typed = ("env.backend=pettingzoo", f"env.id={game}", "env.kwargs.sharing=true", "num_envs=6", *loss)
    assert configured(*typed).env.entry_point == "fasttrain_integrations.pettingzoo:Rows"
    short = ("total_timesteps=600", "eval.episodes=6", "algo.rollout_size=384", "batch_size=64")
    done = fasttrain("+profile=speed", *typed, *short).ok()
    rows = done.table("episodes.csv")
    assert "rests" not in rows[0]
    returns = [float(row["return"]) for row in rows]
    assert min(returns) <= -0.5, "a loser's"
    assert max(returns) >= 1.0, "a winner's"
    done = fasttrain(
        "+profile=speed", *typed, "algo=dqn", "total_timesteps=300", "warmup_steps=50", "eval.episodes=6"
    ).ok()


def test_every_agent_is_a_row_and_rests_until_its_game_is_over():
    env = made(game="herd")
    env.reset()
    rests, ends = [], []
    for _ in range(4):
        env.step_slots(np.ones(6, np.int64))
        rests.append([] if env.slots.resets is None else np.flatnonzero(env.slots.resets).tolist())
        ends.append([(one.env_index, one.length, one.episode_return) for one in env.slots.finished])
    assert ends == [[], [(0, 2, 2.0), (3, 2, 2.0)], [(1, 3, 3.0), (4, 3, 3.0)], [(2, 4, 4.0), (5, 4, 4.0)]]
    assert rests == [[], [], [0, 3], [0, 1, 3, 4]]
    assert env.slots.observations.tolist() == [[0, 0], [0, 1], [0, 2]] * 2  # both games have begun again
    env.step_slots(np.ones(6, np.int64))
    assert env.slots.resets is None
    assert env.venv.copies[0].games == 3  # a look at the masks, the reset, the next one


def test_the_last_observation_is_the_agents_own_and_rewards_of_rest_are_none():
    env = made(3, "herd")
    env.reset()
    env.step_slots(np.array([1, 0, 1]))
    (episode,) = env.slots.finished
    assert (episode.env_index, episode.episode_return, episode.final_observation.tolist()) == (1, -1.0, [1.0, 1.0])
    env.step_slots(np.ones(3, np.int64))
    assert (env.slots.resets.tolist(), env.slots.rewards.tolist()) == ([False, True, False], [1.0, 0.0, 1.0])
    assert [{*acted} for acted in env.venv.copies[0].acted[-2:]] == [{"cow_0", "cow_1", "cow_2"}, {"cow_0", "cow_2"}]


def test_nothing_is_learned_of_rest():
    env = made(6, "herd")
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0)
    model.learn(6 * 32)
    decisions = sum(len(acted) for copy in env.venv.copies for acted in copy.acted)
    assert model.num_timesteps == decisions
    assert decisions < 6 * len(env.venv.copies[0].acted)


def test_rows_that_do_not_fit_are_told_and_one_row_is_a_look():
    with pytest.raises(EnvSpecError, match="3 agents, each a row: num_envs=8 is no multiple of that; use num_envs=6"):
        Rows(8, "herd")
    env = made(1, "herd")
    env.reset()
    for _ in range(10):
        env.step_slots(np.ones(1, np.int64))
    assert env.observation_space.shape == (2,)
    with pytest.raises(EnvSpecError, match=r"the module has neither env\(\) nor parallel_env\(\)"):
        Rows(3, "json")


def test_sharing_is_learned_from_the_command_line(fasttrain: RunCommand):
    typed = ("env.backend=pettingzoo", "env.id=herd", "env.kwargs.sharing=true", "algo=ppo", "num_envs=6")
    config = configured(*typed)
    assert (config.env.backend, config.env.entry_point) == ("vector", "fasttrain_integrations.pettingzoo:Rows")
    done = fasttrain("+profile=speed", *typed, "total_timesteps=1500", "eval.episodes=6", "algo.rollout_size=384").ok()
    assert done.json("summary.json")["quality"]["mean_reward"] == 3.0  # 2, 3 and 4 steps of eating
    fasttrain("engine=stock", *typed, "total_timesteps=300").refused("would learn from these steps")


ROLES = ["hound_0", "hound_1", "hare"]
CHASE = ("+profile=speed", "env.backend=pettingzoo", "env.kwargs.sharing=true", "num_envs=6", "checkup=off",
         "algo.rollout_size=384", "batch_size=64", "fused_update=off", "eval.episodes=6", "report=false")  # fmt: skip
TWO = "policies={hounds: {decides: [hound_0, hound_1]}, hare: {decides: hare}}"


def test_rows_of_seats_with_different_spaces_are_padded():
    env = made(6, "chase", roles=ROLES, masked=True)
    env.reset()
    assert (env.observation_space.shape, env.action_space) == ((8,), spaces.Discrete(5))
    assert env.slots.observations[:, 5:].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]] * 2
    assert not env.slots.observations[[0, 2, 3, 5], 3:5].any()
    drawn = env.slots.observations[:, :5]
    np.testing.assert_array_equal(env.slots.action_masks, drawn > 0)
    env.step_slots(drawn.argmax(axis=1))
    assert env.slots.rewards.tolist() == [1.0] * 6
    some = made(3, "chase", roles=ROLES, masked="hounds")
    some.reset()
    assert some.slots.action_masks[1].all(), "an agent without a mask can do everything"
    some.venv.copies[0].masked = ""
    with pytest.raises(EnvError, match="hound_0 had an action mask before and has none now"):
        some.step_slots(some.slots.action_masks.argmax(axis=1))
    numbers = made(3, "chase", roles=ROLES, numbers=True)
    numbers.reset()
    numbers.step_slots(np.full((3, 5), 0.4, np.float32))
    assert numbers.action_space == spaces.Box(-1.0, 0.5, (5,), np.float32)
    acted = numbers.venv.copies[0].acted[-1]
    assert {agent: own.tolist() for agent, own in acted.items()} == {
        "hound_0": pytest.approx([0.3] * 3), "hare": pytest.approx([0.4] * 5), "hound_1": pytest.approx([0.3] * 3)
    }  # fmt: skip


def test_seats_with_different_spaces_have_policies_of_their_own(fasttrain: RunCommand):
    masked = ("algo=maskable_ppo", "env.kwargs.masked=true")
    done = fasttrain(*CHASE, "env.id=chase", TWO, "total_timesteps=6000", "algo.learning_rate=0.01", *masked).ok()
    assert done.json("summary.json")["quality"]["mean_reward"] >= 4.0
    for name, size in (("hounds", 3), ("hare", 5)):
        model = sb3_contrib.MaskablePPO.load(done.folder / f"{name}.zip")
        assert (model.observation_space, model.action_space) == (
            spaces.Box(0.0, 1.0, (size,), np.float32), spaces.Discrete(size)
        )  # fmt: skip
    told = done.json("summary.json")["policies"]
    assert told["hounds"]["decisions"] == 2 * told["hare"]["decisions"]


@pytest.mark.parametrize("policies", wrong_inputs("policies of seats that differ"))
def test_policies_that_do_not_fit_the_seats_are_refused(policies: str, fasttrain: RunCommand):
    done = fasttrain(*CHASE, "env.id=chase", "algo=ppo", f"policies={policies}", "total_timesteps=384")
    done.refused()
    assert_says("policies of seats that differ", policies, done.err)


def test_seats_that_decide_in_turn_have_policies_too(fasttrain: RunCommand):
    two = "policies={first: {decides: [red, blue]}, second: {decides: green}}"
    done = fasttrain(*CHASE, "algo=maskable_ppo", "env.id=nimble", two, "total_timesteps=768").ok()
    told = done.json("summary.json")["policies"]
    assert told["first"]["decisions"] + told["second"]["decisions"] == done.json("summary.json")["env_steps"]
    assert told["first"]["decisions"] == pytest.approx(2 * told["second"]["decisions"], rel=0.1)


@pytest.mark.filterwarnings("ignore")
def test_pistonball(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pytest.importorskip("pettingzoo", reason="pettingzoo is not installed")
    pytest.importorskip("pymunk", reason="pymunk is not installed")
    env = GymVecEnv(
        lambda num_envs: Rows(num_envs, "pettingzoo.butterfly.pistonball_v6", max_cycles=4), 20, "pistonball"
    )
    env.reset()
    for _ in range(6):
        env.step_slots(np.zeros((20, 1), np.float32))
    assert env.slots.observations.shape == (20, 457, 120, 3)
