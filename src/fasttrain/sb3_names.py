"""Constructor arguments of SB3's algorithms that are no keys below `algo.` here, and which setting does it instead."""

from __future__ import annotations

INSTEAD = {
    "env": "the environment is env.id=CartPole-v1, or env.entry_point=module:Class",
    "batch_size": "take batch_size=…, a key of its own",
    "learning_starts": "take warmup_steps=…, env steps before the first update",
    "train_freq": "an update round follows every step of all envs; take updates_per_step=… and num_envs=…",
    "gradient_steps": "take updates_per_step=…, updates per step of all envs",
    "seed": "take seed=…, a key of its own",
    "device": "take device=…, a key of its own",
    "verbose": "take train_log_to_console=true or false",
    "tensorboard_log": "the log is progress.csv in the run's folder (train_log_to_file=true), drawn in report.html",
    "stats_window_size": "mean returns are over the last 100 episodes; episodes.csv in the run's folder has every one",
    "use_sde": "state-dependent exploration is in Python alone: fasttrain.PPO(…, use_sde=True)",
    "sde_sample_freq": "state-dependent exploration is in Python alone: fasttrain.PPO(…, use_sde=True)",
    "use_sde_at_warmup": "state-dependent exploration is in Python alone: fasttrain.PPO(…, use_sde=True)",
    "rollout_buffer_class": "the engine chooses its buffer: engine=stock takes SB3's, engine=fast its own",
    "rollout_buffer_kwargs": "the engine chooses its buffer: engine=stock takes SB3's, engine=fast its own",
    "replay_buffer_class": "take algo.prioritized=true or false, and engine=stock for SB3's own buffer",
    "replay_buffer_kwargs": "take algo.buffer_size=…, algo.prioritized=… and algo.n_steps=…",
    "optimize_memory_usage": "take a smaller algo.buffer_size=…, or in Python fasttrain.DQN with it",
    "_init_setup_model": "the model is always set up before training",
}


def instead(key: str) -> str:
    """The sentence that refuses `algo.batch_size` (or what is below such a key); empty for every other key."""
    group, _, name = key.partition(".")
    told = INSTEAD.get(name.split(".")[0]) if group == "algo" else None
    return f"{key} is no setting here: {told}" if told else ""
