"""Ranges of single keys and rules about several: what a typed configuration must also satisfy.

A rule reads the configuration by dotted keys, so that it speaks of any algorithm that has the key and of no other.
Every message names the fields, their values and a valid choice.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.typed import did_you_mean

AT_LEAST: dict[str, float] = {  # a key before those that have their value from it
    "env.total_timesteps": 1,
    "env.eval_episodes": 2,
    "own.batch_size": 2,
    "own.learning_rate": 0,
    "own.n_epochs": 1,
    "own.rollout_size": 2,
    "own.native_num_envs": 1,
    "num_envs": 1,
    "num_workers": 1,
    "pipeline": 1,
    "updates_per_step": 1,
    "batch_size": 2,
    "warmup_steps": 0,
    "action_repeat": 1,
    "gradient_accumulation": 1,
    "inference_batch_size": 1,
    "torch_threads": 1,
    "log_every": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "engine_switch_at": 0,
    "checkpoint_every_minutes": 0,
    "total_timesteps": 1,
    "env.max_episode_steps": 1,
    "env.frame_stack": 1,
    "env.step_timeout_s": 0.1,
    "env.max_restarts": 0,
    "seed": 0,
    "eval.episodes": 2,
    "eval.num_envs": 1,
    "eval.seed": 0,
    "play.episodes": 1,
    "play.speed": 0,
    "play.seed": 0,
    "self_play.pool": 0,
    "self_play.every": 1,
    "stop.max_minutes": 0.001,
    "guard.max_skipped": 0,
    "checkpoint.keep": 1,
    "checkpoint.grace_s": 0,
    "checkup_timeout_s": 0.1,
    "seeds": 1,
    "horizon_minutes": 0.001,
    "gate.margin": 0,
    "gate.min_pairs": 2,
    "gate.min_speed_up": 0,
    "ablate.minutes": 0.1,
    "tune.minutes": 0.1,
    "tune.min_update_ratio": 0,
    "tune.max_memory_gb": 0.1,
    "doctor.seconds": 0.05,
    "doctor.tries": 0,
    "algo.rollout_size": 2,
    "algo.n_epochs": 1,
    "algo.lstm_hidden_size": 1,
    "algo.n_lstm_layers": 1,
    "algo.buffer_size": 1,
    "algo.n_steps": 1,
    "algo.per_alpha": 0,
    "algo.target_update_interval": 1,
    "algo.max_grad_norm": 0,
    "algo.ent_coef": 0,
    "algo.vf_coef": 0,
    "algo.target_kl": 0,
    "algo.policy_delay": 1,
    "algo.target_policy_noise": 0,
    "algo.target_noise_clip": 0,
    "algo.top_quantiles_to_drop_per_net": 0,
    "algo.cg_max_steps": 1,
    "algo.cg_damping": 0,
    "algo.line_search_max_iter": 1,
    "algo.n_critic_updates": 1,
    "algo.sub_sampling_factor": 1,
    "algo.rms_prop_eps": 0,
}
MAX_SEED = 2**32 - 1 - 1_000_000  # numpy's bound, with room for one seed per env
MAX_TORCH_THREADS = 256
MAX_N_STEPS = 128  # of buffers/n_step.py
AT_MOST: dict[str, int] = {
    "seed": MAX_SEED,
    "eval.seed": MAX_SEED,
    "play.seed": MAX_SEED,
    "torch_threads": MAX_TORCH_THREADS,
    "algo.max_grad_norm": 1_000_000,
    "algo.ent_coef": 1_000_000,
    "algo.vf_coef": 1_000_000,
    "algo.learning_rate": 1_000_000,
}
BETWEEN: dict[str, tuple[float, float]] = {
    "algo.gamma": (0, 1),
    "algo.gae_lambda": (0, 1),
    "algo.tau": (0, 1),
    "algo.line_search_shrinking_factor": (0, 1),
    "algo.per_beta": (0, 1),
    "self_play.latest": (0, 1),
    "stop.patience": (0.01, 1),
    "algo.exploration_fraction": (0, 1),
    "algo.exploration_initial_eps": (0, 1),
    "algo.exploration_final_eps": (0, 1),
}
METRICS = ("win_rate", "mean_reward", "tail")  # of gate.metric
QUALITY_NAMES = ("episodes", "mean_reward", "win_rate", "draw_rate", "score_diff", "end_reason", "mean_length",
                 "mean_turns", "scores", "untold", "ci95", "tail", "auto", "sampled")  # fmt: skip
PATHS = ("run", "study", "output")
LONGEST_NAME = 255  # bytes: of all usual file systems
SCHEDULES = ("algo.learning_rate", "algo.clip_range", "algo.clip_range_vf")


def lookup(config: Any, key: str) -> Any:
    """The value under a dotted key, None where this configuration has no such key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def check(config: Any) -> None:
    """Ranges and cross-field rules that need nothing but the configuration itself."""
    for key, least in AT_LEAST.items():
        value = lookup(config, key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value < least:
            raise ConfigError(f"{key}={value}: must be at least {least:g}")
    for key, most in AT_MOST.items():
        value = lookup(config, key)
        number = parse_schedule(value, key)[1] if key in SCHEDULES else value
        if isinstance(number, (int, float)) and number > most:
            raise ConfigError(f"{key}={value}: must be at most {most}")
    for key, (low, high) in BETWEEN.items():
        value = lookup(config, key)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{key}={value}: must lie between {low:g} and {high:g}")
    for key in SCHEDULES:
        value = lookup(config, key)
        if value is not None and parse_schedule(value, key)[1] <= 0:
            raise ConfigError(f"{key}={value}: must be positive")
    for key in PATHS:
        check_path(key, lookup(config, key))
    rules = (
        _check_policy,
        _check_net_arch,
        _check_lstm,
        _check_vec_env,
        _check_workers,
        _check_rollout,
        _check_replay,
        _check_device,
        _check_scores,
    )
    for rule in rules:
        rule(config)


def check_path(key: str, value: str | None) -> None:
    """Whether a file or folder can be called that.

    Raises:
        ConfigError: it cannot.
    """
    if value is None:
        return
    longest = max((len(name.encode("utf-8", "replace")) for name in value.split("/")), default=0)
    if not value or "\0" in value or longest > LONGEST_NAME:
        shown = value if len(value) < 60 else f"{value[:60]}…"
        raise ConfigError(f"{key}={shown}: no file or folder can be called that")


def parse_schedule(value: float | str, key: str) -> tuple[Literal["constant", "linear"], float]:
    """`3e-4` → ("constant", 3e-4); `"linear_3e-4"` → ("linear", 3e-4): from that value down to 0."""
    kind: Literal["constant", "linear"] = "constant"
    text = str(value)
    if text.startswith("linear_"):
        kind, text = "linear", text.removeprefix("linear_")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{key}={value}: expected a number, or a schedule such as linear_3e-4")
    return kind, number


def _check_net_arch(config: Any) -> None:
    arch = config.algo.net_arch
    parts = arch.values() if isinstance(arch, dict) else [arch or ()]
    critic = "vf" if config.algo.spec.on_policy else "qf"
    if isinstance(arch, dict) and set(arch) - {"pi", critic}:
        raise ConfigError(
            f"algo.net_arch={arch}: the keys are pi and {critic}, as in {{pi: [64, 64], {critic}: [64, 64]}}"
        )
    if any(width < 1 for part in parts for width in part):
        raise ConfigError(f"algo.net_arch={arch}: every width must be at least 1")


def _check_policy(config: Any) -> None:
    policy, policies = config.algo.policy, ("auto", *config.algo.spec.policies)
    if policy not in policies and ":" not in policy:
        raise ConfigError(
            f"algo.policy={policy}: not one of {', '.join(policies)}, or module:Class of your own"
            f"{did_you_mean(policy, policies)}"
        )
    if ":" in policy and lookup(config, "algo.dueling"):
        raise ConfigError(
            f"algo.policy={policy} contradicts algo.dueling=true, which is a network of its own; leave one of them out"
        )
    for key in ("algo.ent_coef", "algo.target_entropy"):
        value = lookup(config, key)
        if isinstance(value, str) and not re.fullmatch(r"auto(_\d+(\.\d+)?)?", value):
            raise ConfigError(f"{key}={value}: expected a number, auto, or auto_0.1 to begin with")
    if doubled := {"net_arch", "activation_fn", "lstm_hidden_size"} & {*config.algo.policy_kwargs}:
        name = min(doubled)
        raise ConfigError(f"algo.policy_kwargs.{name} is a key of its own: take algo.{name}=…")


def _check_lstm(config: Any) -> None:
    if lookup(config, "algo.shared_lstm") and config.algo.enable_critic_lstm:
        raise ConfigError(
            "algo.shared_lstm=true contradicts algo.enable_critic_lstm=true: the value network uses the policy's LSTM "
            "or one of its own; take algo.enable_critic_lstm=false with the shared one"
        )


def _check_vec_env(config: Any) -> None:
    if config.force_dummy_vec_env and config.vec_env not in ("auto", "dummy", "subproc"):
        raise ConfigError(
            f"force_dummy_vec_env=true contradicts vec_env={config.vec_env}: leave one of them out, "
            "or take vec_env=dummy"
        )
    if config.vec_env == "native" and config.env.native_game is None and config.env.backend != "envpool":
        raise ConfigError(
            f"vec_env=native with env.id={config.env.id or config.env.entry_point}: this environment has no native "
            "batch; take vec_env=auto, dummy or subproc"
        )


def _check_workers(config: Any) -> None:
    if isinstance(config.num_workers, int) and config.num_workers > config.num_envs:
        raise ConfigError(
            f"num_workers={config.num_workers} is more than num_envs={config.num_envs}: a worker needs at least one "
            f"env; take num_workers={config.num_envs} or fewer"
        )


def _check_rollout(config: Any) -> None:
    rollout_size = lookup(config, "algo.rollout_size")
    batch_size = config.batch_size or config.own.batch_size or 0
    if rollout_size is not None and lookup(config, "algo.n_steps") is None and batch_size > rollout_size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than algo.rollout_size={rollout_size}: a minibatch is drawn from "
            f"one rollout; take batch_size={rollout_size} or less, or a larger rollout"
        )


def _check_replay(config: Any) -> None:
    buffer_size = lookup(config, "algo.buffer_size")
    if buffer_size is None:
        return
    if config.algo.n_steps > MAX_N_STEPS:
        raise ConfigError(f"algo.n_steps={config.algo.n_steps}: must be at most {MAX_N_STEPS}")
    batch_size = config.batch_size or config.own.batch_size or 0
    if batch_size > buffer_size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than algo.buffer_size={buffer_size}: take a smaller batch_size"
        )
    if config.num_envs > buffer_size:
        raise ConfigError(
            f"num_envs={config.num_envs} is more than algo.buffer_size={buffer_size}: the buffer holds no "
            "transition per env; take a larger buffer"
        )


def _check_scores(config: Any) -> None:
    taken = sorted({*QUALITY_NAMES} & {*config.env.score_keys})
    if taken:
        raise ConfigError(f"env.score_keys: {', '.join(taken)} is told already; leave it out, or rename it in the info")
    if config.gate.metric not in ("auto", *METRICS, *config.env.score_keys):
        raise ConfigError(
            f"gate.metric={config.gate.metric}: expected auto, {', '.join(METRICS)}, or a name that env.score_keys has"
        )


def _check_device(config: Any) -> None:
    if not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", config.device):
        raise ConfigError(f"device={config.device}: expected auto, cpu, cuda, cuda:0 or mps")
