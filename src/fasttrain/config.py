"""The typed configuration tree. YAML and command line become one frozen `Config`, once; nothing below sees YAML.

Every speed flag is a flat field here; `plan.FLAGS` says what class each one is. Keys below `algo` are SB3's own
constructor names. Ranges and contradictions are checked by `check`, which names the fields and a valid choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.typed import Switch, build

NetArch = tuple[int, ...] | dict[str, tuple[int, ...]] | None
Policy = Literal["auto", "MlpPolicy", "CnnPolicy", "MultiInputPolicy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """What to play. One of `id` and `entry_point` names the environment."""

    name: str  # the group's name, for folders and tables
    id: str | None = None  # a registered Gymnasium id, or module:Id-v0
    entry_point: str | None = None  # module:Class, from a package or the working directory
    kwargs: dict[str, Any]
    backend: Literal["gymnasium", "envpool"] = "gymnasium"  # envpool: all envs in C++, kwargs are its options
    api: Literal["gymnasium", "gym"] = "gymnasium"  # gym: the old interface, adapted
    max_episode_steps: int | None = None  # truncates there, counted in the env's own steps
    wrappers: tuple[str, ...] = ()  # module:Class of the user's Gymnasium wrappers, the first innermost
    frame_stack: int = 1  # observations seen at once: SB3's VecFrameStack
    normalize: tuple[Literal["obs", "reward"], ...] = ()  # by running statistics: SB3's VecNormalize
    info_keys: tuple[str, ...] = ()  # info entries kept at every step under lean_info
    on_env_error: Literal["raise", "restart"] = "raise"  # vec_env=shared: what a failing env or worker does to the run
    step_timeout_s: float = 300.0  # vec_env=shared: a worker that takes longer is taken for hung
    max_restarts: int = 10  # vec_env=shared: more within ten minutes end the run
    native_game: str | None = None  # module:Class of the batched game, for vec_env=native
    native_num_envs: dict[str, int] | None = None  # the game's own num_envs, by tier
    total_timesteps: int  # the env's own horizon; the top-level key of the same name decides
    eval_episodes: int  # likewise for eval.episodes


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Constructor arguments of SB3's PPO and sb3-contrib's MaskablePPO; `rollout_size` = num_steps × num_envs."""

    name: Literal["ppo", "maskable_ppo"]
    policy: Policy
    net_arch: NetArch
    activation_fn: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] | None
    learning_rate: float | str
    rollout_size: int
    n_epochs: int
    gamma: float
    gae_lambda: float
    clip_range: float | str
    clip_range_vf: float | str | None
    normalize_advantage: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None
    by_tier: dict[str, dict[str, float]]  # the algorithm's own values; `own` picks among them


@dataclass(frozen=True, kw_only=True, slots=True)
class DQNConfig:
    """Constructor arguments of SB3's DQN."""

    name: Literal["dqn"]
    policy: Policy
    net_arch: NetArch
    activation_fn: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] | None
    learning_rate: float | str
    buffer_size: int
    tau: float
    gamma: float
    target_update_interval: int
    exploration_fraction: float
    exploration_initial_eps: float
    exploration_final_eps: float
    max_grad_norm: float
    by_tier: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How quality is measured: own envs, own seeds."""

    episodes: int
    num_envs: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnConfig:
    """What the algorithm and the game name as their own values in the tier that the profile picks."""

    tier: str
    batch_size: int
    learning_rate: float
    n_epochs: int | None  # None for an algorithm without epochs
    rollout_size: int
    native_num_envs: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run. Flags first (the table of the README), then the rest."""

    engine: Literal["stock", "fast"]
    vec_env: Literal["auto", "dummy", "subproc", "shared", "native"]
    use_subproc_envs: bool
    force_dummy_vec_env: bool
    num_envs: int
    num_workers: int | Literal["auto"]
    pipeline: int | Literal["auto"]
    async_envs: bool
    updates_per_step: int
    batch_size: int | None
    warmup_steps: int
    use_amp: Switch
    amp_dtype: Literal["bfloat16", "float16"]
    use_compile: Switch
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"]
    fused_update: Switch
    prefetch: Switch
    pin_memory: Switch
    lean_info: bool
    local_random_actions: bool
    action_repeat: int
    gradient_accumulation: int
    torch_threads: int | Literal["auto", "default"]
    log_every: int
    train_log_enabled: bool
    train_log_to_console: bool
    train_log_to_file: bool
    reward_debug: bool
    eval_every: int
    eval_async: bool
    checkpoint_every: int
    checkpoint_async: bool
    nan_guard: bool

    total_timesteps: int
    seed: int
    device: str
    deterministic: bool
    live: Switch
    env: EnvConfig
    algo: PPOConfig | DQNConfig
    eval: EvalConfig
    own: OwnConfig
    run: str | None = None  # a finished run's folder, for commands that read one
    checkup: Literal["off", "warn", "strict"] = "off"  # a look at the env before training; strict: any finding stops


AT_LEAST: dict[str, float] = {
    "num_envs": 1,
    "num_workers": 1,
    "pipeline": 1,
    "updates_per_step": 1,
    "batch_size": 2,
    "warmup_steps": 0,
    "action_repeat": 1,
    "gradient_accumulation": 1,
    "torch_threads": 1,
    "log_every": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "total_timesteps": 1,
    "env.max_episode_steps": 1,
    "env.frame_stack": 1,
    "env.step_timeout_s": 0.1,
    "env.max_restarts": 0,
    "seed": 0,
    "eval.episodes": 2,
    "eval.num_envs": 1,
    "eval.seed": 0,
    "own.batch_size": 2,
    "algo.rollout_size": 2,
    "algo.n_epochs": 1,
    "algo.buffer_size": 1,
    "algo.target_update_interval": 1,
    "algo.max_grad_norm": 0,
    "algo.ent_coef": 0,
    "algo.vf_coef": 0,
    "algo.target_kl": 0,
}
MAX_SEED = 2**32 - 1 - 1_000_000  # numpy's bound, with room for one seed per env
MAX_TORCH_THREADS = 256
AT_MOST: dict[str, int] = {
    "seed": MAX_SEED,
    "eval.seed": MAX_SEED,
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
    "algo.exploration_fraction": (0, 1),
    "algo.exploration_initial_eps": (0, 1),
    "algo.exploration_final_eps": (0, 1),
}
SCHEDULES = ("algo.learning_rate", "algo.clip_range", "algo.clip_range_vf")


def from_mapping(values: Mapping[str, Any]) -> Config:
    """The typed and checked configuration.

    Raises:
        ConfigError: unknown key, wrong type, out of range, or fields that contradict each other.
    """
    values = dict(values)
    algo = values.get("algo")
    if not isinstance(algo, Mapping):
        raise ConfigError("algo: choose maskable_ppo, ppo or dqn")
    # The union is resolved by name, so that a wrong key below `algo` is reported against the right algorithm.
    algo_class = DQNConfig if algo.get("name") == "dqn" else PPOConfig
    for key in algo:
        if why := foreign_key(f"algo.{key}", str(algo.get("name"))):
            raise ConfigError(why)
    values["algo"] = build(algo_class, algo, "algo.")
    values["env"] = _build_env(values.get("env"))
    config = build(Config, values, known=all_keys())
    check(config)
    return config


def _build_env(env: Any) -> EnvConfig:
    if not isinstance(env, Mapping):
        raise ConfigError("env: choose skullking, or name an environment by env.id or env.entry_point")
    config = build(EnvConfig, env, "env.")
    if (config.id is None) == (config.entry_point is None):
        state = "both are set" if config.id else "neither is set"
        raise ConfigError(f"env.id and env.entry_point: {state}; give exactly one, env.id=CartPole-v1 say")
    return config


def all_keys() -> list[str]:
    """Every key a user can set, dotted, of every algorithm: what "did you mean" chooses from."""
    names = [field.name for field in fields(Config)]
    for prefix, cls in (
        ("env.", EnvConfig),
        ("algo.", PPOConfig),
        ("algo.", DQNConfig),
        ("eval.", EvalConfig),
        ("own.", OwnConfig),
    ):
        names += [prefix + field.name for field in fields(cls)]
    return sorted({*names, "profile"})


def foreign_key(key: str, algo: str) -> str:
    """The sentence that refuses another algorithm's key below `algo.`; empty for every other key."""
    by_class = {PPOConfig: ("ppo", "maskable_ppo"), DQNConfig: ("dqn",)}
    owners = [
        name
        for cls, names in by_class.items()
        if key in {f"algo.{field.name}" for field in fields(cls)}
        for name in names
    ]
    if not owners or algo in owners or not any(algo in names for names in by_class.values()):
        return ""
    return f"{key} means nothing for algo={algo} (only for {', '.join(owners)}); leave it out"


def lookup(config: Config, key: str) -> Any:
    """The value under a dotted key, None where this configuration has no such key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def check(config: Config) -> None:
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
    for rule in (_check_net_arch, _check_vec_env, _check_workers, _check_ppo, _check_dqn, _check_device):
        rule(config)


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


def _check_net_arch(config: Config) -> None:
    arch = config.algo.net_arch
    parts = arch.values() if isinstance(arch, dict) else [arch or ()]
    if isinstance(arch, dict) and set(arch) - {"pi", "vf"}:
        raise ConfigError(f"algo.net_arch={arch}: the keys are pi and vf, as in {{pi: [64, 64], vf: [64, 64]}}")
    if any(width < 1 for part in parts for width in part):
        raise ConfigError(f"algo.net_arch={arch}: every width must be at least 1")


def _check_vec_env(config: Config) -> None:
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


def _check_workers(config: Config) -> None:
    if isinstance(config.num_workers, int) and config.num_workers > config.num_envs:
        raise ConfigError(
            f"num_workers={config.num_workers} is more than num_envs={config.num_envs}: a worker needs at least one "
            f"env; take num_workers={config.num_envs} or fewer"
        )


def _check_ppo(config: Config) -> None:
    algo = config.algo
    if not isinstance(algo, PPOConfig):
        return
    batch_size = config.batch_size or config.own.batch_size
    if batch_size > algo.rollout_size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than algo.rollout_size={algo.rollout_size}: a minibatch is drawn from "
            f"one rollout; take batch_size={algo.rollout_size} or less, or a larger rollout"
        )


def _check_dqn(config: Config) -> None:
    algo = config.algo
    if not isinstance(algo, DQNConfig):
        return
    batch_size = config.batch_size or config.own.batch_size
    if batch_size > algo.buffer_size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than algo.buffer_size={algo.buffer_size}: take a smaller batch_size"
        )
    if config.num_envs > algo.buffer_size:
        raise ConfigError(
            f"num_envs={config.num_envs} is more than algo.buffer_size={algo.buffer_size}: the buffer holds no "
            "transition per env; take a larger buffer"
        )


def _check_device(config: Config) -> None:
    name = config.device.split(":")[0]
    if name not in ("auto", "cpu", "cuda", "mps"):
        raise ConfigError(f"device={config.device}: expected auto, cpu, cuda, cuda:0 or mps")


def to_dict(value: Any) -> Any:
    """A plain, JSON-ready copy of a configuration."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_dict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_dict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
