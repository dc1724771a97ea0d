from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting_vector import RESET_REWARD, Counting, InTurn, Mute

from fasttrain import DQN, PPO, MaskablePPO
from fasttrain.errors import EnvError, EnvSpecError
from fasttrain.vec.base import close_envs, resets_and_rests, slots_of
from fasttrain.vec.vector import GymVecEnv, registered

MODES = ("NextStep", "SameStep", "Disabled")


def made(num_envs: int = 2, **options: Any) -> GymVecEnv:
    return GymVecEnv(lambda num_envs: Counting(num_envs, **options), num_envs, "the counting env")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [False, True])
def test_episodes_have_their_length_return_last_observation_and_info(mode: str, cut: bool):
    env = made(mode=mode, cut=cut)
    env.reset()
    found = []
    for _ in range(14):
        env.step_slots(np.zeros(2, np.int64))
        found += env.slots.finished
    lengths = {index: [one.length for one in found if one.env_index == index] for index in range(2)}
    late = mode == "NextStep"
    assert lengths == ({0: [3] * 3, 1: [4] * 3} if late else {0: [3] * 4, 1: [4] * 3})
    assert all(one.episode_return == one.length == one.info["score"] for one in found)
    assert all(one.truncated is cut for one in found)
    assert all(one.final_observation.tolist()[1] == one.length for one in found)


def test_only_next_step_has_rows_that_only_reset_and_they_say_nothing():
    env = made()
    env.reset()
    ended, seen = np.zeros(2, np.bool_), 0
    for _ in range(20):
        env.step_slots(np.zeros(2, np.int64))
        late = env.slots.resets
        assert (np.zeros(2, np.bool_) if late is None else late).tolist() == ended.tolist()
        assert env.slots.transitions == 2 - int(ended.sum())
        assert not np.any(env.slots.rewards == RESET_REWARD)
        assert not np.any((env.slots.terminations | env.slots.truncations) & ended)
        seen += int(ended.sum())
        ended = env.slots.terminations | env.slots.truncations
    assert seen == env.venv.only_resets > 5
    same = made(mode="SameStep")
    same.reset()
    for _ in range(8):
        same.step_slots(np.zeros(2, np.int64))
        assert same.slots.resets is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", ["infos", "method", "dict"])
def test_masks_are_of_the_state_that_is_acted_on(mode: str, masks: str):
    env = made(mode=mode, masks=masks)
    assert env.masked
    assert env.observation_space.shape == (2,)
    env.reset()
    for _ in range(20):
        assert env.slots.action_masks is not None
        env.step_slots(env.slots.action_masks.argmax(axis=1))
    assert env.venv.illegal == 0
    assert not GymVecEnv(lambda num_envs: Counting(num_envs, masks=masks), 2, "x", use_masks=False).masked


@pytest.mark.parametrize("engine", ["torch", "kernels"])
@pytest.mark.parametrize("cut", [False, True])
def test_ppo_learns_from_all_transitions_and_no_reset(engine: str, cut: bool):
    env = made(num_envs=3, cut=cut)
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=8, n_epochs=2, seed=0, engine=engine)
    model.learn(3 * 16)
    rollout: Any = model.rollout_buffer.storage
    real = env.venv.calls * 3 - env.venv.only_resets
    assert env.venv.only_resets > 0
    assert model.num_timesteps == real
    assert len(rollout.rows) == len({*rollout.rows.tolist()})
    drawn = np.concatenate([batch.observations.numpy() for batch in rollout.minibatches(8)])
    assert len(drawn) == len(rollout.rows) < 48
    over = {index: 3 + index for index in range(3)}
    seen = rollout.observations.reshape(-1, 2)
    envs = np.arange(48) % 3  # of each row of the stored (T, N) layout
    last = np.array([seen[row][1] == over[envs[row]] for row in range(48)])
    assert not last[rollout.rows].any()  # a state that is over was acted on, and is no transition
    assert last[np.setdiff1d(np.arange(48), rollout.rows)].all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ["torch", "kernels"])
def test_returns_stop_at_the_end_of_an_episode(mode: str, engine: str):
    exact = {"gae_lambda": 1.0, "gamma": 1.0}
    model = PPO("MlpPolicy", made(1, mode=mode), n_steps=24, batch_size=8, n_epochs=1, seed=0, engine=engine, **exact)
    model.learn(24)
    rollout: Any = model.rollout_buffer.storage
    counts, returns = rollout.observations.reshape(-1, 2)[:, 1], rollout.returns.reshape(-1)
    assert returns[rollout.rows] == pytest.approx(3 - counts[rollout.rows], abs=1e-5)
    assert len(rollout.rows) == (18 if mode == "NextStep" else 24)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_dqn_stores_no_reset(n_steps: int):
    env = made(num_envs=3)
    model = DQN("MlpPolicy", env, buffer_size=300, learning_starts=10, n_steps=n_steps, seed=0)
    model.learn(120)
    assert model.num_timesteps == env.venv.calls * 3 - env.venv.only_resets
    batch = model.replay_buffer.sample(2000)
    before, after = batch.observations.numpy(), batch.next_observations.numpy()
    assert np.all(before[:, 0] == after[:, 0])  # one episode
    assert np.all(after[:, 1] > before[:, 1])
    assert not np.any(batch.rewards.numpy() >= RESET_REWARD)


@pytest.mark.parametrize("prioritized", [None, {}])
def test_what_a_rest_brings_belongs_to_the_decision_before_it(prioritized: Any):
    env = GymVecEnv(lambda num_envs: InTurn(), 2, "the game in turn")
    model = DQN("MlpPolicy", env, buffer_size=60, learning_starts=10, prioritized=prioritized, seed=0).learn(80)
    batch = model.replay_buffer.sample(400)
    parts = batch.observations, batch.next_observations, batch.rewards, batch.dones
    drawn = {*map(tuple, np.hstack([part.numpy() for part in parts]).tolist())}
    assert drawn == {(0, 2, 11, 0), (1, 3, 11, 0), (2, 4, 11, 1), (3, 4, 1, 1)}


@pytest.mark.parametrize("engine", ["torch", "kernels"])
@pytest.mark.parametrize("kind", [PPO, MaskablePPO])
def test_a_rollout_without_a_transition_is_not_learned_from(engine: str, kind: Any):
    env = made(2, masks="method")  # both reset in the 20th step, one of them before it now and then
    model = kind("MlpPolicy", env, n_steps=1, batch_size=2, n_epochs=1, seed=0, engine=engine)
    model.engine.guard = None
    with pytest.warns(UserWarning, match="a rollout without a transition"):
        model.learn(32)
    assert (model._n_updates, env.venv.calls) == (20, 21)
    assert all(np.isfinite(part.detach().numpy()).all() for part in model.policy.parameters())


def test_what_lies_around_it_knows_the_rows_too():
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(made())
    source = slots_of(env)
    source.reset()  # type: ignore[attr-defined]
    for _ in range(4):
        source.step_slots(np.zeros(2, np.int64))
    assert source.slots.resets is resets_and_rests(env)[0] is env.unwrapped.slots.resets  # type: ignore[attr-defined]
    assert source.slots.resets is not None


def test_a_registered_form_is_made_with_its_limit_and_seeded():
    env = GymVecEnv(registered("CartPole-v1", {}, 7), 3, "CartPole")
    env.seed(5)
    first = env.reset()
    lengths: list[int] = []
    for _ in range(30):
        env.step_slots(np.arange(3) % 2)
        lengths += [episode.length for episode in env.slots.finished if episode.truncated]
    assert {*lengths} == {7}
    env.seed(5)
    assert np.array_equal(env.reset(), first)
    with pytest.raises(EnvSpecError, match="has no vector_entry_point"):
        registered("Pendulum-v1", {})
    with pytest.raises(EnvSpecError, match=r"does not say when it resets .metadata\['autoreset_mode'\] is None"):
        GymVecEnv(Mute, 2, "env.entry_point=mine:Mute")
    with pytest.raises(EnvSpecError, match="the constructor failed: TypeError"):
        GymVecEnv(lambda num_envs: Counting(num_envs, colour="red"), 2, "mine")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (0, np.zeros((1, 2), np.float32), "reading the observations failed: ValueError: shape (1, 2), expected (2, 2)"),
        (0, None, "reading the observations failed: ValueError: shape (), expected (2, 2)"),
        (1, 1.0, "step() returned rewards of shape (), expected (2,)"),
        (2, np.zeros(1, np.bool_), "step() returned terminations of shape (1,), expected (2,)"),
        (3, None, "step() returned truncations of shape (), expected (2,)"),
        (4, None, "step() returned (ndarray, ndarray, ndarray, ndarray, NoneType), expected (observations, rewards"),
    ],
)
def test_an_answer_for_fewer_envs_is_not_repeated_over_all(place: int, value: Any, told: str):
    env = made()
    env.reset()
    answer = [*env.venv.step(np.zeros(2, np.int64))]
    answer[place] = value
    env.venv.step = lambda actions: tuple(answer)  # type: ignore[method-assign]
    with pytest.raises(EnvError) as caught:
        env.step_slots(np.zeros(2, np.int64))
    assert str(caught.value).startswith(f"the counting env: {told}")


def test_a_close_that_raises_is_told_and_costs_nothing():
    env = made()

    def close(**_: Any) -> None:
        raise RuntimeError("the viewer was never open")

    env.venv.close = close  # type: ignore[method-assign]
    assert close_envs(env).startswith("RuntimeError: the viewer was never open")
