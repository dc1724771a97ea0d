"""Every setting, declared once: type, default, range, class and text. Speed flags are those that have a class.

Keys below `algo` are SB3's own constructor names (`spec/algorithms.py`). Rules about several settings: `checks`.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, AlgorithmSpec, OwnValues, own_values
from fasttrain.spec.backends import name_of_env, option_of, with_parts
from fasttrain.spec.games import GameSpec, game_of
from fasttrain.spec.setting import Named, Switch, setting

NetArch = tuple[int, ...] | dict[str, tuple[int, ...]] | None
SELF = "self"  # as an opponent: snapshots of the learner
MAX_SEED = 2**32 - 1 - 1_000_000  # numpy's bound, with room for one seed per env
MAX_TORCH_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """What a candidate must show beside its baseline (`compare`, `ablate`)."""

    margin: float | None = setting(
        None,
        "in the metric's unit; null: 0.03 of a win rate, 5 % of the baseline's mean reward, near 0 by its spread",
        least=0,
    )
    metric: str = setting(
        "auto",
        "win_rate where there is one, else mean_reward; tail: of the training curve; or one of env.result.scores",
    )
    threshold: float | None = setting(None, "time to this reward, or win rate; null: 90 % of the baseline's rise")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """Search for the most steps/s."""

    space: dict[str, tuple[Any, ...]] | None = setting(
        None, "{num_envs: [64, 128], batch_size: [512, 1024]}; null: made from machine and profile"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What `fasttrain doctor` measures."""

    test: Literal["all", "env", "policy", "update", "replay", "transport", "logging"] = setting(
        "all", "which part; also --test"
    )
    tries: int = setting(1, "how many of its advices it tries itself", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Which entries of an episode's last info tell how it ended."""

    win: str | None = setting(None, "whether the episode was won; null: is_win or is_success")
    win_value: Any = setting(None, "what the entry `win` holds where the episode was won; null: true")
    scores: tuple[str, ...] = setting((), "numbers to be told of, [vp, damage]")
    end: str | None = setting(None, "how the episode ended; null: end_reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """What to play. One of `id` and `entry_point` names the environment."""

    id: str | None = setting(None, "a registered Gymnasium id, or module:Id-v0")
    entry_point: str | None = setting(None, "module:Class, from a package or the working directory")
    kwargs: dict[str, Any] = setting({}, "what it is made with")
    backend: str = setting(
        "gymnasium",
        "vector: a VectorEnv steps all; envpool: in C++; pettingzoo: a seat of the game id names; daemons: engines",
    )
    max_episode_steps: int | None = setting(None, "truncates there, counted in the env's own steps", least=1)
    masks: str | None = setting(None, "the method that gives action masks, get_action_mask say; null: action_masks")
    on_empty_mask: Literal["all_legal", "raise"] = setting(
        "all_legal", "where no action is legal, as in stock; or an error"
    )
    wrappers: tuple[Named, ...] = setting((), "[my_game.wrappers:Shaped, {wrapper: …, factor: 2}], the first innermost")
    frame_stack: int = setting(1, "observations seen at once: SB3's VecFrameStack", least=1)
    normalize: tuple[Literal["obs", "reward"], ...] = setting((), "by running statistics: SB3's VecNormalize")
    info_keys: tuple[str, ...] = setting((), "info entries kept at every step under lean_info")
    on_env_error: Literal["raise", "restart"] = setting("raise", "restart: go on without the env or worker that failed")
    step_timeout_s: float = setting(
        300.0, "a call in the checkup, or a step of a worker of vec_env=shared, that takes longer is hung", least=0.1
    )
    game: str | None = setting(None, "a package's game by its name, or module:GAME of yours: a GameSpec")
    result: Result = setting(
        Result(),
        "which entries of the last info tell how an episode ended: {win: winner, win_value: red, scores: [vp]}",
    )

    @property
    def spec(self) -> GameSpec:
        """What the game declares of itself."""
        return game_of(self.game)

    @property
    def option(self) -> str:
        """For messages."""
        return option_of(self.id, self.entry_point, self.kwargs)

    @property
    def name(self) -> str:
        """For folders and tables."""
        return name_of_env(self.id, self.entry_point, self.kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """Below `algo.`: the stock class's constructor arguments by SB3's names, and what ours has besides.

    `ALGO_CLASSES` has a subclass for each algorithm, made from its spec. Of one that learns from rollouts,
    `rollout_size` = num_steps × num_envs; `n_steps` is SB3's: steps of each env. None: as `rollout_size` says.
    """

    name: str
    policy: str = setting("auto", "SB3's alias, or module:Class of the user's own")
    entry_point: str | None = setting(None, "module:Class of the user's own, derived from the algorithm's class")
    kwargs: dict[str, Any] = setting({}, "what its constructor takes besides")
    policy_kwargs: dict[str, Any] = setting({}, "SB3's; a class is named as module:Class")
    net_arch: NetArch = setting(None, "widths of the hidden layers; null: SB3's")
    activation_fn: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] | None = setting(None, "null: SB3's")

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
    own = set.intersection(*({*values} for values in spec.tiers.values()))  # `own` has their values
    columns = [(name, hint) if name in own else (name, hint, default) for name, (hint, default) in spec.keys().items()]
    head = [("name", Literal[spec.name])]
    namespace = {"__module__": __name__}
    return make_dataclass(
        f"{spec.name}_config", [*head, *columns], bases=(AlgoConfig,), namespace=namespace,
        frozen=True, kw_only=True, slots=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How quality is measured: own envs, own seeds."""

    episodes: int = setting(MISSING, "left out: the game's own number; 0: no evaluation", least=0)
    seed: int = setting(1_000_003, "far from the training envs' seeds (seed, seed + 1, …)", least=0, most=MAX_SEED)
    env_kwargs: dict[str, Any] = setting({}, "what the evaluation's env is made with besides, over env.kwargs")
    num_envs: int | None = setting(
        None, "null: up to 8, or 64 of a game that steps all; with num_envs=1 that one env, lent", least=1, most=4096
    )
    max_steps: int = setting(27_000, "an episode that is longer is cut and counts as it stands", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPlayConfig:
    """Which snapshots of the learner are its opponents under `opponent=self`."""

    pool: int = setting(8, "a uniform sample of all before the latest, which is every other opponent", least=0)
    every: int = setting(500, "gradient updates from one snapshot to the next", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """How `fasttrain play` shows a game."""

    episodes: int = setting(1, "how many", least=1)
    speed: float = setting(2.0, "decisions per second; 0: Enter at each", least=0)
    seed: int | None = setting(None, "null: another game every time", least=0, most=MAX_SEED)
    human: bool = setting(False, "true: you play against the agent")
    deterministic: bool = setting(True, "the best choice; false: one drawn from the policy's probabilities")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """Videos of the greedy policy, made while a run trains; `fasttrain play run=… output=game.mp4` makes one of it."""

    every: int = setting(0, "env steps between videos, in the run's videos/; 0: none", least=0)
    episodes: int = setting(1, "that each shows, at most a minute of them", least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """What ends a training before its horizon."""

    at_reward: float | None = setting(None, "mean return of the last 100 episodes, from the first update on")
    max_minutes: float | None = setting(None, "of training, start-up apart", least=0.001)
    patience: float | None = setting(
        None, "share of total_timesteps without a rise that ends it, 0.2 say; null: never", least=0.01, most=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What `fasttrain resume run=…` goes on from."""

    keep: int = setting(3, "the newest so many", least=1)
    grace_s: float = setting(5.0, "a stop waits so long for the rollout and its update; else they are dropped", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run. Flags first (the table of the README), then the rest."""

    engine: Literal["stock", "fast"] = setting(
        "stock", "stock SB3 classes, or fasttrain's with the lean collect and update path", "exact"
    )
    vec_env: Literal["auto", "dummy", "subproc", "shared", "native", "vector", "daemons"] = setting(
        "subproc", "how copies of the env are stepped", "exact", classes={"vector": "rounding"}
    )
    num_envs: int = setting(8, "copies of the env stepped together", "trade-off", least=1)
    workers: int | Literal["auto"] = setting(
        "auto", "worker processes; 0: none, all envs in this process", "exact", stock=None, least=0
    )
    schedule: Literal["auto", "lockstep", "first_ready"] = setting(
        "lockstep",
        "all step together; the policy acts for each worker as it is ready",
        "trade-off",
        classes={"lockstep": "exact"},
        needs="on_policy",
        ours=True,
    )
    updates_per_step: int = setting(
        1,
        "gradient updates per vector step, or per algo.train_freq=… of them; -1: one per transition",
        "trade-off",
        needs="off_policy",
        least=-1,
    )
    batch_size: int | None = setting(
        None,
        "minibatch of one gradient update; null = the algorithm's own",
        "trade-off",
        stock=64,
        needs="minibatches",
        least=2,
    )
    warmup_steps: int = setting(5000, "env steps before the first update", "trade-off", needs="off_policy", least=0)
    use_amp: Literal["off", "auto", "on", "bfloat16", "float16"] = setting(
        "off", "mixed precision in the networks; on: bfloat16", "trade-off", ours=True
    )
    use_compile: Literal["off", "auto", "on", "default", "reduce-overhead", "max-autotune"] = setting(
        "off", "torch.compile of update and acting; on: its default mode", "rounding", ours=True
    )
    fused_update: Switch = setting(
        "off", "compiled CPU kernels for acting and update of an MLP policy, also behind an LSTM", "rounding", ours=True
    )
    prefetch: Switch = setting(
        "off", "replay batches prepared in the background", "trade-off", needs="off_policy", ours=True
    )
    pin_memory: Switch = setting("off", "page-locked staging for CUDA copies", "exact", ours=True)
    lean_info: bool = setting(False, "only env.info_keys leave the env between episode ends", "exact")
    copy_final_observations: bool = setting(
        False, "an env that writes into its own array in reset() does not change an episode's end", "trade-off"
    )
    action_repeat: int = setting(1, "env steps per decision", "trade-off", least=1)
    gradient_accumulation: int = setting(
        1, "parts in which a minibatch is computed, for less memory", "rounding", needs="rows_alone", ours=True, least=1
    )
    torch_threads: int | Literal["auto", "default"] = setting(
        "default", "threads of one torch operation", "rounding", least=1, most=MAX_TORCH_THREADS
    )
    log_every: int = setting(
        10, "gradient updates between [PERF] lines and log rows", "exact", least=1, may_change=True
    )
    train_log_enabled: bool = setting(True, "record training statistics", "exact", may_change=True)
    train_log_to_console: bool = setting(True, "print them and the [PERF] line", "exact", may_change=True)
    train_log_to_file: bool = setting(True, "write them to progress.csv", "exact", may_change=True)
    reward_debug: bool = setting(False, "report reward terms one by one", "exact")
    eval_every: int = setting(0, "env steps between evaluations, 0 = at the end", "exact", least=0, may_change=True)
    eval_async: bool = setting(False, "evaluate in a process beside training", "exact")
    checkpoint_every: int | str = setting(
        0,
        "env steps between checkpoints; 5min: by time; 0 = only where a signal or an error stops the run",
        "exact",
        least=0,
        may_change=True,
    )
    checkpoint_async: bool = setting(
        False, "write checkpoints in a thread while training goes on", "exact", may_change=True
    )
    nan_guard: Literal["off", "stop", "rollback"] = setting(
        "stop",
        "refuse non-finite data and updates; after ten lost rounds: stop, or back once to the last good weights",
        "exact",
        stock="off",
    )

    total_timesteps: int = setting(
        MISSING, "env steps of the training; left out: the game's own number", least=1, most=10**15, may_change=True
    )
    seed: int = setting(0, "of everything random", least=0, most=MAX_SEED)
    device: str = setting("auto", "cpu for MLP policies (SB3's own advice), cuda for images where there is one")
    deterministic: bool = setting(False, "torch.use_deterministic_algorithms")
    live: Switch = setting("auto", "the live view: on a terminal, off elsewhere and in sweeps", may_change=True)
    on_existing: Literal["refuse", "resume", "overwrite"] = setting(
        "refuse", "where the output folder holds a run, sweep or study already"
    )
    tier: Literal["baseline", "balance", "speed", "debug"] = setting(
        "baseline", "which values of the game's own and the algorithm's own; profiles pick one", hidden=True
    )
    env: EnvConfig
    algo: AlgoConfig
    eval: EvalConfig
    opponent: Named | None = setting(
        None, "self: snapshots of the learner; one of the game's own; module:Class of yours; null: as env.kwargs says"
    )
    run: str | None = setting(None, "the folder of a run, or of a study that compare and tune go on with or begin")
    format: Literal["onnx", "torchscript"] | None = setting(None, "of `export`")
    model: Literal["final", "best"] = setting("final", "which model of the run `export` and `play` take")
    output: str | None = setting(
        None,
        "the file that `export`, `play` (a video) or `report` (a page) writes; null: of export in the run's folder",
    )
    trust: bool = setting(
        False, "eval, play, export: load models as SB3 does, running what is pickled in them; --trust"
    )
    play: PlayConfig = PlayConfig()
    video: VideoConfig = VideoConfig()
    self_play: SelfPlayConfig = SelfPlayConfig()
    checkup: Literal["off", "warn", "strict"] = setting(
        "off", "a look at the env before training; strict: any finding stops"
    )
    stop: StopConfig = StopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: bool = setting(True, "report.html and its pictures at the end", may_change=True)
    callbacks: tuple[Named, ...] = setting((), "[my_game.callbacks:Curriculum, {callback: …, every: 100}]; SB3's too")
    loggers: tuple[Named, ...] | None = setting(
        None,
        "[csv, stdout, tensorboard, {logger: …, file: x}, {logger: prometheus, port: 9100}]; null: as train_log_… say",
    )
    candidates: str | None = setting(
        None,
        "of compare: [baseline, {name: mine, overrides: [num_envs=8]}], the others must match the first; ablate, or "
        "{ablate: [num_envs, vec_env]}: the profile's flags one by one",
    )
    seeds: int = setting(5, "of compare: seed, seed + 1, …", least=1)
    minutes: float | None = setting(
        None,
        "of compare: of training in every cell, instead of equal steps; tune, candidates=ablate: of all, null: 10",
        least=0.001,
    )
    warmup: Literal["off", "only"] = setting("off", "of train; only: compile the kernels of such a run, train nothing")
    gate: GateConfig = GateConfig()
    tune: TuneConfig = TuneConfig()
    doctor: DoctorConfig = DoctorConfig()

    @property
    def checkpoint_interval(self) -> tuple[int, float]:
        """Env steps and seconds from one checkpoint to the next, as `checkpoint_every` says; 0: not by these. Raises
        ConfigError: it says neither."""
        every = self.checkpoint_every
        if isinstance(every, int):
            return every, 0.0
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d\d?)?min", every):
            raise ConfigError(f"checkpoint_every={every}: expected a number of env steps, or minutes as in 5min")
        return 0, 60 * float(every.removesuffix("min"))

    @property
    def own(self) -> OwnValues:
        """What holds where nobody chose another value."""
        return own_values(self.env.spec.own, self.algo.spec, self.tier)


if not TYPE_CHECKING:  # with what engines declare, `daemons` say
    Config = with_parts(Config)
ALGO_CLASSES: dict[str, type[AlgoConfig]] = {spec.name: _algo_class(spec) for spec in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    """The classes of `ALGO_CLASSES` by their own names, which pickles have."""
    found = ALGO_CLASSES.get(name.removesuffix("_config"))
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
