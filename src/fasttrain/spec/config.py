"""Declares settings: type, default, range, class and text. A setting with a `flag_class` is a speed flag.

The keys below `algo` are SB3's own constructor names (`algorithms`). `checks` has the rules about several settings.
Settings that only engines or commands of other packages read are declared there (`plugins.Part`).
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

from fasttrain.errors import ConfigError
from fasttrain.spec import groups
from fasttrain.spec.algorithms import ALGORITHMS, AlgorithmSpec, OwnValues, own_values
from fasttrain.spec.backends import name_of_env, option_of
from fasttrain.spec.cluster import ClusterConfig
from fasttrain.spec.curriculum import CurriculumConfig
from fasttrain.spec.games import GameSpec, game_of
from fasttrain.spec.plugins import with_parts
from fasttrain.spec.setting import Named, Switch, setting

NetArch = tuple[int, ...] | dict[str, tuple[int, ...]] | None
SELF = "self"  # as the value of `opponent`: snapshots of the learner
MAX_TORCH_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Which entries of an episode's last info say how the episode ended."""

    win: str | None = setting(None, "Entry that says whether the episode was won. null uses is_win or is_success.")
    win_value: Any = setting(None, "Value of the entry env.result.win in a won episode. null means true.")
    scores: tuple[str, ...] = setting((), "Entries with numbers to report, for example [vp, damage].")
    end: str | None = setting(None, "Entry that says how the episode ended. null looks for end_reason.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """The environment. One of `id` and `entry_point` names it."""

    id: str | None = setting(None, "A registered Gymnasium id, or module:Id-v0.")
    entry_point: str | None = setting(
        None, "The environment's class as module:Class, from a package or from the working directory."
    )
    kwargs: dict[str, Any] = setting({}, "Arguments of the environment's constructor.")
    backend: str = setting(
        "gymnasium",
        "Who steps the environments. gymnasium: fasttrain. vector: a Gymnasium VectorEnv. envpool: EnvPool. "
        "pettingzoo: a seat of the PettingZoo game that env.id names. daemons: an external engine.",
    )
    max_episode_steps: int | None = setting(None, "Truncates episodes after this number of environment steps.", least=1)
    masks: str | None = setting(
        None,
        "Name of the method, info entry or observation key that holds action masks. null looks for "
        "action_masks and action_mask.",
    )
    on_empty_mask: Literal["all_legal", "raise"] = setting(
        "all_legal",
        "What to do in a state without a legal action. all_legal counts every action as legal, as "
        "sb3-contrib does. raise ends the run.",
    )
    wrappers: tuple[Named, ...] = setting(
        (), "Gymnasium wrappers as [module:Class, {wrapper: module:Class, factor: 2}]. The first is the innermost."
    )
    frame_stack: int = setting(1, "Number of observations that are stacked, by SB3's VecFrameStack.", least=1)
    normalize: tuple[Literal["obs", "reward"], ...] = setting(
        (), "Normalizes obs, reward or both by running statistics, with SB3's VecNormalize."
    )
    stagger: int = setting(
        0,
        "Truncates the first episode of each training environment after a random number of steps, at most this. So "
        "episodes of equal length do not all end in the same step. 0: never.",
        least=0,
    )
    info_keys: tuple[str, ...] = setting((), "Entries of the info that lean_info keeps at every step.")
    on_env_error: Literal["raise", "restart"] = setting(
        "raise", "raise ends the run when an environment fails. restart replaces the environment or worker."
    )
    step_timeout_s: float = setting(
        300.0, "Seconds after which a call of the checkup or a step of a worker counts as hung.", least=0.1
    )
    phases: dict[str, int] = setting(
        {}, "Reports steps, reward and value error by phase: phase and the column that is 1 in this phase, {bid: 175}."
    )
    game: str | None = setting(
        None, "A game by the name that its package gave it, or a GameSpec of yours as module:NAME."
    )
    result: Result = setting(
        Result(),
        "Which entries of an episode's last info say how it ended: {win: winner, win_value: red, scores: [vp]}.",
    )

    @property
    def spec(self) -> GameSpec:
        return game_of(self.game)

    @property
    def option(self) -> str:
        return option_of(self.id, self.entry_point, self.kwargs)

    @property
    def name(self) -> str:
        return name_of_env(self.id, self.entry_point, self.kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """The keys below `algo.`: the stock class's constructor arguments, and those of fasttrain's class.

    `ALGO_CLASSES` has a subclass for each algorithm, made from its spec. An on-policy algorithm has `rollout_size` =
    num_steps × num_envs, and SB3's `n_steps`, the steps of each env. If `n_steps` is None, `rollout_size` decides.
    """

    name: str
    policy: str = setting(
        "auto", "SB3's name of a policy, or a class of yours as module:Class. auto chooses by the observation space."
    )
    entry_point: str | None = setting(None, "An algorithm of yours as module:Class, derived from the class of algo=.")
    kwargs: dict[str, Any] = setting({}, "Further arguments of the class in algo.entry_point.")
    policy_kwargs: dict[str, Any] = setting({}, "SB3's policy_kwargs. A class in it is written as module:Class.")
    net_arch: NetArch = setting(None, "Widths of the hidden layers, for example [64, 64]. null uses SB3's.")
    activation_fn: Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"] | None = setting(
        None, "Activation function of the hidden layers. null uses SB3's."
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def spec(self) -> AlgorithmSpec:
        return ALGORITHMS[self.name]

    def num_steps(self, num_envs: int) -> int:
        """Steps of each env in a rollout."""
        return int(self.n_steps or max(1, round(self.rollout_size / num_envs)))


def _algo_class(spec: AlgorithmSpec) -> type[AlgoConfig]:
    return make_dataclass(
        f"{spec.name}_config", [("name", Literal[spec.name]), *spec.fields()], bases=(AlgoConfig,),
        namespace={"__module__": __name__}, frozen=True, kw_only=True, slots=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configuration of one run. The first fields are the speed flags."""

    engine: Literal["stock", "fast"] = setting(
        "stock",
        "stock uses the classes of Stable-Baselines3. fast uses fasttrain's classes, which are faster.",
        "exact",
    )
    vec_env: Literal["auto", "dummy", "subproc", "shared", "native", "vector", "daemons"] = setting(
        "subproc",
        "How the copies of the environment are stepped. auto measures and chooses. dummy: one after another "
        "in this process. shared: worker processes with shared memory. subproc: SB3's SubprocVecEnv. native, "
        "vector: one call steps all copies. daemons: an external engine.",
        "exact",
        classes={"vector": "rounding"},
    )
    num_envs: int = setting(8, "Number of copies of the environment that are stepped together.", "trade-off", least=1)
    workers: int | Literal["auto"] = setting(
        "auto",
        "Number of worker processes for the environments. 0 steps all of them in the training process.",
        "exact",
        stock=None,
        least=0,
    )
    schedule: Literal["auto", "lockstep", "first_ready", "continuous"] = setting(
        "lockstep",
        "lockstep: all environments step together. first_ready: the policy acts for each worker as soon as it is "
        "ready. continuous: they step during updates too. The last two are not repeatable.",
        "trade-off",
        classes={"lockstep": "exact"},
        needs="on_policy",
        ours=True,
    )
    max_lag: int = setting(
        4, "With schedule=continuous, transitions older than this number of updates are not learned from.", "trade-off",
        needs="on_policy", ours=True, least=1,
    )  # fmt: skip
    updates_per_step: int = setting(
        1,
        "Gradient updates after each vector step, or after algo.train_freq vector steps. -1 makes one update per "
        "transition. SB3 calls it gradient_steps.",
        "trade-off",
        needs="off_policy",
        least=-1,
    )
    batch_size: int | None = setting(
        None,
        "Size of the minibatch of one gradient update. null uses the algorithm's or game's own value.",
        "trade-off",
        stock=64,
        needs="minibatches",
        least=2,
    )
    warmup_steps: int = setting(
        5000,
        "Env steps with random actions before the first update. SB3 calls it learning_starts.",
        "trade-off",
        needs="off_policy",
        least=0,
    )
    use_amp: Literal["off", "auto", "on", "bfloat16", "float16"] = setting(
        "off",
        "Mixed precision in the networks. on means bfloat16. auto uses it where the hardware is faster with it.",
        "trade-off",
        ours=True,
    )
    use_compile: Literal["off", "auto", "on", "default", "reduce-overhead", "max-autotune"] = setting(
        "off",
        "torch.compile for acting and the update. on uses the default mode; the other values are torch's modes.",
        "rounding",
        ours=True,
    )
    fused_update: Switch = setting(
        "off",
        "Compiled CPU kernels for acting and the update of MLP policies, also with an LSTM. auto compares "
        "their speed with PyTorch's. Unless off, PyTorch uses its fused Adam, and channels_last for images.",
        "rounding",
        ours=True,
    )
    prefetch: Switch = setting(
        "off", "Draws replay batches in a background thread.", "trade-off", needs="off_policy", ours=True
    )
    pin_memory: Switch = setting("off", "Page-locked memory for copies to and from CUDA.", "exact", ours=True)
    lean_info: bool = setting(
        False, "Drops infos between the ends of episodes. env.info_keys names entries to keep.", "exact"
    )
    copy_final_observations: bool = setting(
        False,
        "Copies the last observation of an episode, for environments that overwrite their array in reset().",
        "trade-off",
    )
    action_repeat: int = setting(
        1, "Repeats each action for this number of environment steps and adds up the rewards.", "trade-off", least=1
    )
    gradient_accumulation: int = setting(
        1,
        "Computes each minibatch in this number of parts, to use less memory.",
        "rounding",
        needs="rows_alone",
        ours=True,
        least=1,
    )
    torch_threads: int | Literal["auto", "default"] = setting(
        "default",
        "Threads of one torch operation. auto measures one thread and one per core. default: torch's own number.",
        "rounding",
        least=1,
        most=MAX_TORCH_THREADS,
    )
    log_every: int = setting(
        10, "Gradient updates between two [PERF] lines and log rows.", "exact", least=1, may_change=True
    )
    train_log_enabled: bool = setting(True, "Records training statistics.", "exact", may_change=True)
    train_log_to_console: bool = setting(True, "Prints statistics and the [PERF] line.", "exact", may_change=True)
    train_log_to_file: bool = setting(True, "Writes training statistics to progress.csv.", "exact", may_change=True)
    reward_debug: bool = setting(False, "Reports the terms of the reward one by one.", "exact")
    eval_every: int = setting(
        0, "Env steps between two evaluations. 0 evaluates at the end only.", "exact", least=0, may_change=True
    )
    eval_async: bool = setting(False, "Evaluates in a process beside the training.", "exact")
    checkpoint_every: int | str = setting(
        0,
        "Env steps between two checkpoints, or minutes as in 5min. 0 writes one only when a signal or an "
        "error stops the run.",
        "exact",
        least=0,
        may_change=True,
    )
    checkpoint_async: bool = setting(
        False, "Writes checkpoints in a thread while training goes on.", "exact", may_change=True
    )
    nan_guard: Literal["off", "stop", "rollback"] = setting(
        "stop",
        "Refuses data and updates that are not finite. After ten rounds without a good update, stop ends the "
        "run and rollback goes back once to the last good weights.",
        "exact",
        stock="off",
    )

    total_timesteps: int = setting(
        MISSING, "Minimum env steps of training. Default: the game's own number.", least=1, most=10**15, may_change=True
    )
    seed: int = setting(0, "Seed of everything random.", least=0, most=groups.MAX_SEED)
    device: str = setting(
        "auto",
        "auto uses the CPU for MLP policies and CUDA for images if there is a GPU. Or cpu, cuda, cuda:1.",
    )
    deterministic: bool = setting(
        False, "Uses torch.use_deterministic_algorithms, and fixed rules in place of measurements."
    )
    live: Switch = setting("auto", "The live view of a training. auto shows it on a terminal.", may_change=True)
    on_existing: Literal["refuse", "resume", "overwrite"] = setting(
        "refuse",
        "What to do if the output folder already holds a run, sweep or study: refuse it, resume it, or overwrite it.",
    )
    tier: Literal["baseline", "balance", "speed", "debug"] = setting(
        "baseline", "Which of the game's and algorithm's own values are used. Profiles set it.", hidden=True
    )
    env: EnvConfig
    algo: AlgoConfig
    eval: groups.EvalConfig
    opponent: Named | None = setting(
        None,
        "Opponent in two-player games. self: snapshots of the learner. A name: one of the game's own. "
        "module:Class: one of yours.",
    )
    run: str | None = setting(None, "Folder of a run, sweep or study.")
    init_from: str | None = setting(
        None, "Begins with the weights of this run's folder or zip, for layers with the same name and shape."
    )
    init_from_strict: bool = setting(False, "Refuses a model of init_from if one of its layers does not fit.")
    init_from_also: tuple[Literal["optimizer", "statistics"], ...] = setting(
        (), "What else init_from takes. optimizer: the state of the optimizer. statistics: those of env.normalize."
    )
    model: Literal["final", "best"] = setting(
        "final", "Which model of the run is used: the final one or the best evaluation's."
    )
    output: str | None = setting(
        None, "File that export, play (a video, or decisions as .npz) or report (a page) writes."
    )
    trust: bool = setting(False, "Loads a model as SB3 does, which executes code that is pickled in it. Also --trust.")
    clone: groups.CloneConfig = groups.CloneConfig()
    video: groups.VideoConfig = groups.VideoConfig()
    self_play: groups.SelfPlayConfig = groups.SelfPlayConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    policies: dict[str, dict[str, Any]] = setting(
        {},
        "Several policies, each with its phase and settings: {manager: {decides: bid}, worker: {decides: play}}. "
        "With {manager: {goal_every: 5, goals: 3}, worker: {}} the manager sets goals for the worker.",
    )
    checkup: Literal["off", "warn", "strict"] = setting(
        "off",
        "Plays the environment before training and looks for faults. warn prints them. strict ends the run "
        "at any finding.",
    )
    stop: groups.StopConfig = groups.StopConfig()
    checkpoint: groups.CheckpointConfig = groups.CheckpointConfig()
    report: bool = setting(True, "Draws report.html at the end.", may_change=True)
    callbacks: tuple[Named, ...] = setting((), "SB3 callbacks as [module:Class, {callback: module:Class, every: 100}].")
    loggers: tuple[Named, ...] | None = setting(
        None,
        "Where log rows go: [csv, stdout, tensorboard, wandb, mlflow, trackio, {logger: prometheus, port: "
        "9100}, {logger: module:Class}]. null: csv and stdout, by train_log_to_file and train_log_to_console.",
    )
    warmup: Literal["off", "only"] = setting("off", "only: compiles the kernels for these settings, without training.")
    cluster: ClusterConfig = ClusterConfig()

    @property
    def checkpoint_interval(self) -> tuple[int, float]:
        """Env steps and seconds between two checkpoints; one of them is 0. Raises ConfigError: wrong format."""
        every = self.checkpoint_every
        if isinstance(every, int):
            return every, 0.0
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d\d?)?min", every):
            raise ConfigError(f"checkpoint_every={every}: expected a number of env steps, or minutes as in 5min")
        return 0, 60 * float(every.removesuffix("min"))

    @property
    def names_models(self) -> bool:
        """Whether the training begins with other models or follows one: `init_from`, `algo.teacher`, `policies`."""
        return bool(self.init_from or self.policies or getattr(self.algo, "teacher", None))

    @property
    def own(self) -> OwnValues:
        """The defaults of the game or algorithm in this tier, for settings that the user does not set."""
        return own_values(self.env.spec.own, self.algo.spec, self.tier)


if not TYPE_CHECKING:  # add the settings of installed engines and commands, such as `daemons` and `tune`
    Config = with_parts(Config)
ALGO_CLASSES: dict[str, type[AlgoConfig]] = {spec.name: _algo_class(spec) for spec in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    """The classes of `ALGO_CLASSES` by their own names, for unpickling."""
    if name.removesuffix("_config") not in ALGO_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ALGO_CLASSES[name.removesuffix("_config")]
