from __future__ import annotations

from typing import Any

import pytest

from fasttrain.errors import ConfigError
from fasttrain_integrations.zoo.entries import algorithm, configuration, entry_of, taken, zoo_name
from messages import assert_says, wrong_inputs


def settings(algo: str = "ppo", env: str = "CartPole-v1", **entry: Any) -> dict[str, Any]:
    found = taken({"n_timesteps": 1e5, "policy": "MlpPolicy", **entry}, env, algorithm(algo))
    assert found.left == []
    configuration(found.settings, algorithm(algo))
    return found.settings


def left(algo: str = "ppo", **entry: Any) -> list[str]:
    return taken({"n_timesteps": 1e5, "policy": "MlpPolicy", **entry}, "CartPole-v1", algorithm(algo)).left


def test_what_is_not_said_is_as_the_zoo_has_it_not_as_we_do():
    plain = settings("dqn")
    config = configuration(plain, algorithm("dqn"))
    assert (config.num_envs, config.vec_env, config.engine) == (1, "dummy", "stock")
    assert (config.batch_size, config.warmup_steps, config.algo.train_freq, config.updates_per_step) == (32, 100, 4, 1)
    assert configuration(settings("ppo"), algorithm("ppo")).algo.n_steps == 2048
    assert plain["total_timesteps"] == 100_000
    assert isinstance(plain["total_timesteps"], int)


@pytest.mark.parametrize(
    ("given", "meant"), [("lin_0.001", "linear_0.001"), ("lin_2.5e-4", "linear_2.5e-4"), (3e-4, 3e-4), ("3e-4", "3e-4")]
)
def test_schedules(given: Any, meant: Any):
    found = settings(learning_rate=given, clip_range="lin_0.2")
    assert (found["algo.learning_rate"], found["algo.clip_range"]) == (meant, "linear_0.2")


def test_keys_of_ours_and_sb3s():
    found = settings(
        "sac", "Pendulum-v1", ent_coef="auto", learning_starts=7, gradient_steps=-1, train_freq=[1, "episode"],
        use_sde=True, sde_sample_freq=4, use_sde_at_warmup=True, optimize_memory_usage=False,
    )  # fmt: skip
    config = configuration(found, algorithm("sac"))
    assert (config.algo.ent_coef, config.warmup_steps, config.updates_per_step) == ("auto", 7, -1)
    assert (config.algo.train_freq, config.algo.use_sde, config.algo.sde_sample_freq) == ((1, "episode"), True, 4)


def test_networks_in_words_of_python():
    text = "dict(log_std_init=-2.5, ortho_init=False, activation_fn=nn.GELU, net_arch=dict(pi=[256, 256], vf=[]), )"
    found = settings(policy_kwargs=text)
    assert found["algo.net_arch"] == {"pi": [256, 256], "vf": []}
    assert found["algo.activation_fn"] == "gelu"
    assert (found["algo.policy_kwargs.log_std_init"], found["algo.policy_kwargs.ortho_init"]) == (-2.5, False)
    assert settings(policy_kwargs="dict(net_arch=[dict(pi=[8], vf=[8])])")["algo.net_arch"] == {"pi": [8], "vf": [8]}
    assert settings(policy_kwargs={"net_arch": [8]})["algo.net_arch"] == [8]
    lstm = "dict(lstm_hidden_size=32, enable_critic_lstm=True, activation_fn=torch.nn.ReLU)"
    found = settings("ppo_lstm", policy="MlpLstmPolicy", policy_kwargs=lstm)
    assert (found["algo.lstm_hidden_size"], found["algo.enable_critic_lstm"]) == (32, True)
    tf_like = settings("a2c", policy_kwargs="dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-5))")
    assert tf_like["algo.policy_kwargs.optimizer_class"].endswith("rmsprop_tf_like:RMSpropTFLike")
    assert tf_like["algo.policy_kwargs.optimizer_kwargs"] == {"eps": 1e-5}


@pytest.mark.parametrize("text", wrong_inputs("policy_kwargs of rl_zoo3"))
def test_no_text_is_executed(text: str):
    (told,) = left(policy_kwargs=text)
    assert_says("policy_kwargs of rl_zoo3", text, told)


def test_deep_and_long_texts_are_no_dict():
    for text in ("(" * 5000, f"dict(a={'[' * 90}1{']' * 90})" + " " * 30_000):
        assert "is no dict" in left(policy_kwargs=text)[0]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (True, ["obs", "reward"]), (False, []), ("dict(norm_obs=True, norm_reward=False)", ["obs"]),
        ("{'norm_obs': False, 'norm_reward': True}", ["reward"]), ({"norm_obs": True}, ["obs", "reward"]),
        ("dict(clip_obs=10.0)", ["obs", "reward"]),
    ],
)  # fmt: skip
def test_normalisation(given: Any, parts: list[str]):
    assert settings(normalize=given)["env.normalize"] == parts


def test_what_vecnormalize_would_do_otherwise_is_told():
    assert left(normalize="dict(clip_obs=5.0, gamma=0.5)") == [
        "normalize.clip_obs: here VecNormalize keeps its default",
        "normalize.gamma: rewards are normalised by algo.gamma",
    ]
    assert left(normalize=True, normalize_kwargs={"epsilon": 1e-3}) == [
        "normalize.epsilon: here VecNormalize keeps its default"
    ]


def test_wrappers_and_callbacks():
    wrappers = ["minigrid.wrappers.FlatObsWrapper", {"rl_zoo3.wrappers.FrameSkip": {"skip": 2}}]
    callback = {"stable_baselines3.common.callbacks.CheckpointCallback": {"save_freq": 5, "save_path": "x"}}
    found = taken(
        {"n_timesteps": 10, "policy": "my.nets.Mine", "env_wrapper": wrappers, "callback": callback}, "A-v0",
        algorithm("ppo"),
    )  # fmt: skip
    assert found.settings["env.wrappers"] == [
        "minigrid.wrappers:FlatObsWrapper",
        {"wrapper": "rl_zoo3.wrappers:FrameSkip", "skip": 2},
    ]
    assert found.settings["callbacks"] == [
        {"callback": "stable_baselines3.common.callbacks:CheckpointCallback", "save_freq": 5, "save_path": "x"}
    ]
    assert found.settings["algo.policy"] == "my.nets:Mine"
    assert [note.split(":")[0] for note in found.notes] == ["env_wrapper"]
    assert settings(env_wrapper=None)["env.wrappers"] == []
    assert left(env_wrapper="import os") == ["env_wrapper: 'import os' is no dotted name of a class"]
    assert left(callback={"a.B": {}, "a.C": {}})[0].startswith("callback: {'a.B': {}, 'a.C': {}}: expected a class")


def test_hindsight_replay():
    kwargs = "dict(goal_selection_strategy='episode', n_sampled_goal=2, max_episode_length=9, online_sampling=False)"
    found = taken({"replay_buffer_class": "HerReplayBuffer", "replay_buffer_kwargs": kwargs}, "E-v0", algorithm("tqc"))
    assert (found.settings["algo.her"], found.settings["algo.her_goals"]) == ("episode", 2)
    told = left("tqc", replay_buffer_class="HerReplayBuffer", replay_buffer_kwargs=kwargs)
    assert told == ["replay_buffer_kwargs.max_episode_length: fasttrain's buffer has no such argument"]
    assert settings("dqn", replay_buffer_class="HerReplayBuffer")["algo.her"] == "future"


def test_what_has_no_place_is_told_with_the_reason():
    told = left(
        "tqc", vec_env_wrapper="a.B", monitor_kwargs={"info_keywords": ["x"]}, replay_buffer_class="MyBuffer",
        optimize_memory_usage=True, sde_sample_freq=4, n_top=3, verbose=2,
    )  # fmt: skip
    assert [line.split(":")[0] for line in told] == [
        "vec_env_wrapper", "monitor_kwargs", "replay_buffer_class", "optimize_memory_usage", "sde_sample_freq", "n_top",
        "verbose",
    ]  # fmt: skip
    assert "n_top: TQC has no such argument" in told
    assert "sde_sample_freq: has no effect without use_sde" in told
    assert left("dqn", double_q=True) == ["double_q: DQN has no such argument"]
    assert left("ppo", rollout_size=64) == ["rollout_size: PPO has no such argument"]
    assert left("ppo", gradient_steps=3) == ["gradient_steps: PPO has no such argument"]
    assert left("ppo_lstm")[0].startswith("policy: MlpPolicy is none of MlpLstmPolicy")
    assert left("ars", n_envs=4)[0].startswith("n_envs: ars plays in 1 env here")


@pytest.mark.parametrize(
    ("kind", "deviation", "meant"),
    [
        ("normal", 0.1, "normal_0.1"),
        ("normal", 1e-7, "normal_0.0000001"),
        ("ornstein-uhlenbeck", 0.5, "ornstein-uhlenbeck_0.5"),
        ("normal", 1, "normal_1"),
    ],
)
def test_noise(kind: str, deviation: float, meant: str):
    assert settings("td3", "Pendulum-v1", noise_type=kind, noise_std=deviation)["algo.action_noise"] == meant
    assert left("ppo", noise_type=kind, noise_std=deviation)[0] == "noise_type: ppo explores without action noise"
    assert "is not an action noise of the zoo" in left("td3", noise_type="pink", noise_std=deviation)[0]


def test_a_minibatch_larger_than_the_rollout_is_the_rollout():
    assert settings(n_envs=2, n_steps=16, batch_size=256)["batch_size"] == 32
    assert settings(n_envs=2, n_steps=16, batch_size=32)["batch_size"] == 32


def test_stacked_and_normalised_observations_are_told_of():
    found = taken({"n_timesteps": 1, "policy": "MlpPolicy", "normalize": True, "frame_stack": 2}, "A", algorithm("ppo"))
    assert found.notes == ["frame_stack: the zoo stacks normalised frames; here stacked frames are normalised"]


def test_names_of_algorithms():
    assert algorithm("ppo_lstm") is algorithm("recurrent_ppo")
    assert zoo_name(algorithm("recurrent_ppo")) == "ppo_lstm"
    assert zoo_name(algorithm("sac")) == "sac"
    with pytest.raises(ConfigError, match="^--algo pppo: not one of a2c, ars, .*; did you mean 'ppo'"):
        algorithm("pppo")


def test_the_entry_is_the_envs_else_that_of_atari_games_else_default():
    entries = {"CartPole-v1": {"a": 1}, "atari": {"a": 2}, "default": {"a": 3}, "Odd-v0": 4}

    def of(env: str, entries: Any = entries) -> Any:
        return entry_of(entries, env, lambda env: env.startswith("ALE/"), "ppo.yml")[0]

    assert [of(env) for env in ("CartPole-v1", "my_game:CartPole-v1", "ALE/Pong-v5", "Other-v0")] == [
        "CartPole-v1", "CartPole-v1", "atari", "default",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="ppo.yml: no entry CartPol-v1, and none called default; did you mean 'Cart"):
        of("CartPol-v1", {"CartPole-v1": {}})
    with pytest.raises(ConfigError, match="ppo.yml: Odd-v0 has no keys"):
        of("Odd-v0")
