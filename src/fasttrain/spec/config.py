"""The typed configuration tree. YAML and command line become one frozen `Config`, once; nothing below sees YAML.

Every speed flag is a flat field here; `flags.FLAGS` says what class each one is. Keys below `algo` are SB3's own
constructor names. Ranges and contradictions are the rules of `checks`. The settings of studies stand first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, AlgorithmSpec, instead
from fasttrain.spec.checks import check
from fasttrain.spec.typed import Named, Switch, build, convert


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """What a candidate must show beside its baseline (`compare`, `ablate`)."""

    margin: float | None = None  # in the metric's unit; None: 0.03 of a win rate, 5 % of the baseline's mean reward
    metric: str = "auto"  # win_rate where there is one, else mean_reward; or tail: training's; or one of env.score_keys
    min_pairs: int = 5  # fewer seeds prove nothing, whatever their interval says
    min_speed_up: float = 1.1  # below it a candidate is not worth its trade-offs
    threshold: float | None = None  # of reward, or win rate: time to it; None: 90 % of the baseline's rise


@dataclass(frozen=True, kw_only=True, slots=True)
class AblateConfig:
    """Flag by flag from baseline to the profile."""

    minutes: float = 10.0  # for everything
    flags: tuple[str, ...] = ()  # only these; empty: all that differ
    name: str = "measured"  # profile/NAME.yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """Search for the most steps/s."""

    minutes: float = 10.0  # for everything
    space: dict[str, tuple[Any, ...]] | None = None  # key → values to try; None: made from machine and profile
    min_update_ratio: float | None = None  # gradient updates per env step; None: the profile's own
    max_memory_gb: float | None = None  # resident, children included; None: 80 % of what is free at the start
    sampler: Literal["random", "optuna"] = "random"
    name: str = "tuned"  # profile/NAME.yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What `fasttrain doctor` measures."""

    test: Literal["all", "env", "policy", "update", "replay", "transport", "logging"] = "all"
    seconds: float = 3.0  # per part
    tries: int = 1  # how many of its advices it tries itself, 0 = none


NetArch = tuple[int, ...] | dict[str, tuple[int, ...]] | None
SELF = "self"  # as an opponent: snapshots of the learner


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
    wrappers: tuple[Named, ...] = ()  # module:Class of the user's Gymnasium wrappers, the first innermost
    frame_stack: int = 1  # observations seen at once: SB3's VecFrameStack
    normalize: tuple[Literal["obs", "reward"], ...] = ()  # by running statistics: SB3's VecNormalize
    info_keys: tuple[str, ...] = ()  # info entries kept at every step under lean_info
    on_env_error: Literal["raise", "restart"] = "raise"  # vec_env=shared: what a failing env or worker does to the run
    step_timeout_s: float = 300.0  # vec_env=shared: a worker that takes longer is taken for hung
    max_restarts: int = 10  # vec_env=shared: more within ten minutes end the run
    native_game: str | None = None  # module:Class of the batched game, for vec_env=native
    native_num_envs: dict[str, int] | None = None  # the game's own num_envs, by tier
    opponent_key: str | None = None  # the entry of kwargs that names the opponents; None: the env has none
    eval_opponent: str | None = None  # a fixed one, by which quality is measured in self-play
    by_tier: dict[str, dict[str, dict[str, float]]] | None = None  # algorithm → tier → its own values, as algo.by_tier
    win_key: str | None = None  # of the last info: whether the episode was won; None: is_win or is_success
    score_keys: tuple[str, ...] = ()  # of the last info: numbers to be told of, [vp, damage]
    end_key: str | None = None  # of the last info: how the episode ended; None: end_reason
    reward_debug_key: str | None = None  # the entry of kwargs that makes the env tell its reward term by term
    total_timesteps: int  # the env's own horizon; the top-level key of the same name decides
    eval_episodes: int  # likewise for eval.episodes


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """Below `algo.`: the stock class's constructor arguments by SB3's names, and what ours has besides.

    `ALGO_CLASSES` has a subclass for each algorithm, made from its spec. Of one that learns from rollouts,
    `rollout_size` = num_steps × num_envs; `n_steps` is SB3's: steps of each env. None: as `rollout_size` says.
    """

    name: str
    policy: str  # auto, SB3's alias, or module:Class of the user's own
    policy_kwargs: dict[str, Any] = field(default_factory=dict)  # SB3's; a class is named as module:Class
    net_arch: NetArch
    activation_fn: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] | None
    by_tier: dict[str, dict[str, float]]  # the algorithm's own values; `own` picks among them

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def spec(self) -> AlgorithmSpec:
        """What the algorithm is and can do."""
        return ALGORITHMS[self.name]

    def num_steps(self, num_envs: int) -> int:
        """Of each env in a rollout: `n_steps`, else what is nearest to `rollout_size`."""
        return int(self.n_steps or max(1, round(self.rollout_size / num_envs)))


def _algo_class(spec: AlgorithmSpec) -> type[AlgoConfig]:
    keys = spec.keys()
    own = set.intersection(*({*values} for values in spec.tiers.values()))  # these come from `own`
    columns = [(name, hint) if name in own else (name, hint, default) for name, (hint, default) in keys.items()]
    head = [("name", Literal[spec.name])]
    namespace = {"__module__": __name__}
    return make_dataclass(
        f"{spec.name}_config", [*head, *columns], bases=(AlgoConfig,), namespace=namespace,
        frozen=True, kw_only=True, slots=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How quality is measured: own envs, own seeds."""

    episodes: int
    num_envs: int | None  # None: 8, or 64 of a native game, whose envs cost next to nothing
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPlayConfig:
    """Which snapshots of the learner are its opponents under `opponent=self`."""

    latest: float = 0.5  # probability of the latest snapshot; else one of the pool
    pool: int = 8  # snapshots kept besides
    every: int = 500  # gradient updates from one snapshot to the next


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """How `fasttrain play` shows a game."""

    episodes: int = 1
    speed: float = 2.0  # decisions per second; 0: Enter at each
    seed: int | None = None  # None: another game every time
    human: bool = False  # a person plays the learner's side, the agent the others
    deterministic: bool = True  # the best choice, not a drawn one
    model: Literal["model.zip", "best_model.zip"] = "model.zip"


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """What ends a training before its horizon."""

    at_reward: float | None = None  # mean return of the last 100 episodes
    max_minutes: float | None = None  # of training, start-up apart
    on_plateau: bool = False  # the mean return of 100 episodes no longer rises
    patience: float = 0.2  # share of total_timesteps without a rise that makes a plateau


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What `checkpoint_every` and a stop leave for `resume`."""

    keep: int = 3  # the newest so many
    grace_s: float = 5.0  # a stop waits so long for the rollout under way and its update; else they are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """When `nan_guard` gives up."""

    max_skipped: int = 10  # rounds of updates in a row that brought nothing; a round: PPO's rollout, DQN's vector step
    at_limit: Literal["stop", "rollback"] = "stop"  # rollback: once back to the last good weights, kept in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnConfig:
    """What the algorithm and the game name as their own values in the tier that the profile picks."""

    tier: str
    batch_size: int | None  # None for an algorithm without minibatches
    learning_rate: float
    n_epochs: int | None  # None for an algorithm without epochs
    rollout_size: int | None  # likewise
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
    overlap: bool
    updates_per_step: int
    batch_size: int | None
    warmup_steps: int
    use_amp: Switch
    amp_dtype: Literal["bfloat16", "float16"]
    use_compile: Switch
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"]
    fused_update: Switch
    engine_switch_at: int | None = None
    prefetch: Switch
    pin_memory: Switch
    lean_info: bool
    local_random_actions: bool
    action_repeat: int
    gradient_accumulation: int
    inference_batch_size: int | None = None
    torch_threads: int | Literal["auto", "default"]
    log_every: int
    train_log_enabled: bool
    train_log_to_console: bool
    train_log_to_file: bool
    reward_debug: bool
    eval_every: int
    eval_async: bool
    checkpoint_every: int
    checkpoint_every_minutes: float = 0.0
    checkpoint_async: bool
    nan_guard: bool

    total_timesteps: int
    seed: int
    device: str
    deterministic: bool
    live: Switch
    on_existing: Literal["refuse", "resume", "overwrite"] = "refuse"  # where the output folder holds a run already
    env: EnvConfig
    algo: AlgoConfig
    eval: EvalConfig
    own: OwnConfig
    opponent: str | None = None  # self, or one of the game's own; None: as env.kwargs says
    run: str | None = None  # a finished run's folder, for commands that read one
    format: Literal["onnx", "torchscript"] | None = None  # of `export`
    model: Literal["final", "best"] = "final"  # which model of the run `export` takes
    output: str | None = None  # the file `export` writes; into the run's folder if left out
    trust: bool = False  # `eval`, `play`, `export`: load models as SB3 does, running what is pickled in them; --trust
    play: PlayConfig = PlayConfig()
    self_play: SelfPlayConfig = SelfPlayConfig()
    checkup: Literal["off", "warn", "strict"] = "off"  # a look at the env before training; strict: any finding stops
    checkup_timeout_s: float = 120.0  # no call of the env's may take longer there: it is taken for hung
    stop: StopConfig = StopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    report: bool = True  # report.html at the end of a run
    callbacks: tuple[Named, ...] = ()  # module:Class of SB3's or the user's callbacks, with arguments or without
    loggers: tuple[Named, ...] | None = None  # csv, stdout, tensorboard, module:Class; None: as train_log_… say
    profiler: Literal["off", "cprofile", "torch", "pyinstrument"] = "off"  # of the training, into the run's folder
    candidates: str | None = None  # of `compare`, as YAML: [baseline, {name: mine, overrides: [num_envs=8]}]
    seeds: int = 5  # of `compare` and `ablate`: seed, seed + 1, …
    horizon_minutes: float | None = None  # of `compare`: every cell trains so long
    study: str | None = None  # the folder of a study to go on with, or to begin
    gate: GateConfig = field(default_factory=GateConfig)
    ablate: AblateConfig = field(default_factory=AblateConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)


ALGO_CLASSES: dict[str, type[AlgoConfig]] = {spec.name: _algo_class(spec) for spec in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    """The classes of `ALGO_CLASSES` by their own names, which pickles have."""
    found = ALGO_CLASSES.get(name.removesuffix("_config"))
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def from_mapping(values: Mapping[str, Any]) -> Config:
    """The typed and checked configuration.

    Raises:
        ConfigError: unknown key, wrong type, out of range, or fields that contradict each other.
    """
    values = dict(values)
    algo = values.get("algo")
    if not isinstance(algo, Mapping):
        raise ConfigError(f"algo: choose one of {', '.join(ALGORITHMS)}")
    algo_class = ALGO_CLASSES.get(str(algo.get("name")), ALGO_CLASSES["ppo"])
    for key in algo:
        if why := foreign_key(f"algo.{key}", str(algo.get("name"))):
            raise ConfigError(why)
    values["own"] = convert(values.get("own"), OwnConfig, "own")  # before algo, which has its values from there
    values["algo"] = build(algo_class, algo, "algo.")
    values["env"] = _build_env(values.get("env"))
    config = build(Config, values, known=all_keys())
    config = config if config.opponent is None else against(config, config.opponent)
    check(config)
    return config


def against(config: Config, opponent: str) -> Config:
    """The same with these opponents in the env.

    Raises:
        ConfigError: the env names no opponents.
    """
    key = config.env.opponent_key
    if key is None:
        what = f"env.id={config.env.id}" if config.env.id else f"env.entry_point={config.env.entry_point}"
        raise ConfigError(
            f"opponent={opponent} with {what}: this env has no opponents that fasttrain knows of; name the entry of "
            "env.kwargs that chooses them as env.opponent_key, or leave opponent out"
        )
    env = replace(config.env, kwargs={**config.env.kwargs, key: opponent})
    return replace(config, env=env, opponent=opponent)


def env_kwargs(config: Config) -> dict[str, Any]:
    """What the env is made with: `env.kwargs`, and what flags add to them."""
    key = config.env.reward_debug_key
    return {**config.env.kwargs, key: True} if config.reward_debug and key else config.env.kwargs


def plays_itself(config: Config) -> bool:
    """Whether snapshots of the learner are among the opponents."""
    chosen = config.env.kwargs.get(config.env.opponent_key) if config.env.opponent_key else None
    return chosen == SELF or (isinstance(chosen, (Mapping, list, tuple)) and SELF in chosen)


def against_bots(config: Config) -> Config:
    """For what is no training (checkup, evaluation): in self-play the opponents are `env.eval_opponent`."""
    if not plays_itself(config):
        return config
    if config.env.eval_opponent is None:
        raise ConfigError("opponent=self: name a fixed opponent by which quality is measured, as env.eval_opponent")
    return against(config, config.env.eval_opponent)


def _build_env(env: Any) -> EnvConfig:
    if not isinstance(env, Mapping):
        raise ConfigError("env: choose skullking or skirmish, or name an environment by env.id or env.entry_point")
    config = build(EnvConfig, env, "env.")
    if (config.id is None) == (config.entry_point is None):
        state = "both are set" if config.id else "neither is set"
        raise ConfigError(f"env.id and env.entry_point: {state}; give exactly one, env.id=CartPole-v1 say")
    return config


def all_keys() -> list[str]:
    """Every key a user can set, dotted, of every algorithm: what "did you mean" chooses from."""
    names = [field.name for field in fields(Config)]
    groups = [(name, hint) for name, hint in get_type_hints(Config).items() if is_dataclass(hint)]
    for name, cls in (*groups, *(("algo", cls) for cls in ALGO_CLASSES.values())):
        names += [f"{name}.{field.name}" for field in fields(cls)]
    return sorted({*names, "profile"})


def foreign_key(key: str, algo: str) -> str:
    """The sentence that refuses another algorithm's key below `algo.`, or one of SB3's; empty for every other key."""
    if told := instead(key):
        return told
    owners = [name for name, cls in ALGO_CLASSES.items() if key in {f"algo.{field.name}" for field in fields(cls)}]
    if not owners or algo in owners or algo not in ALGO_CLASSES:
        return ""
    return f"{key} means nothing for algo={algo} (only for {', '.join(owners)}); leave it out"


def to_dict(value: Any) -> Any:
    """A plain, JSON-ready copy of a configuration."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_dict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_dict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
