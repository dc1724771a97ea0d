"""Checks of a typed configuration: rules about several settings. Also the facts from which the plan is made.

A rule reads the configuration by dotted keys, so that it applies to every algorithm that has the key. Every message
names the settings, their values and a valid choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError, naming
from fasttrain.spec.algorithms import MOST_RATE
from fasttrain.spec.backends import backend_of, check_parts
from fasttrain.spec.cluster import ClusterConfig, check_cluster
from fasttrain.spec.config import Config
from fasttrain.spec.curriculum import CurriculumConfig, check_curriculum
from fasttrain.spec.policies import check_policies, own_config
from fasttrain.spec.removed import lookup
from fasttrain.spec.setting import did_you_mean, flags_of
from fasttrain.terminal import spelt, value_text

MAX_N_STEPS = 128  # limit of buffers/n_step.py
QUALITY_NAMES = ("episodes", "mean_reward", "win_rate", "draw_rate", "score_diff", "end_reason", "mean_length",
                 "mean_turns", "scores", "untold", "distinct_episodes", "ci95", "tail", "auto", "sampled")  # fmt: skip
NAMED = ("loggers", "callbacks")  # settings that may have arguments of any name
SECRET = re.compile(r"(?i)[\"']?(\w*(?:api_?key|token|password|secret)\w*)[\"']?\s*[:=]|://[^/\s:@]+:[^/\s@]+@")
BATCHED = ("native", "vector", "daemons")  # vec_env in which one object steps all envs
AUTO_FROM = re.compile(r"auto_(?=.*[1-9])(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")  # SB3's auto_0.1, with a positive number
PATHS = ("run", "output", "init_from")
LONGEST_NAME = 255  # bytes; the limit of all usual file systems
WITHOUT = {  # setting → (default, other setting without which it has no effect, what to add)
    "algo.sde_sample_freq": (-1, "algo.use_sde", "algo.use_sde=true"),
    "algo.use_sde_at_warmup": (False, "algo.use_sde", "algo.use_sde=true"),
    "init_from_strict": (False, "init_from", "init_from=PATH"),
    "init_from_also": ((), "init_from", "init_from=PATH"),
}
SCHEDULES = ("algo.learning_rate", "algo.clip_range", "algo.clip_range_vf", "algo.delta_std", "algo.teacher_coef")


def check(config: Config) -> None:
    """Check the rules that need no facts about env and machine. Raises ConfigError."""
    for key in SCHEDULES:
        if (value := lookup(config, key)) is None:
            continue
        first, last = parse_schedule(value, key)
        if key == "algo.learning_rate" and max(first, last) > MOST_RATE:
            raise ConfigError(f"{key}={value}: must be at most {MOST_RATE}")
        if not first > 0 <= last:
            raise ConfigError(f"{key}={value}: must be positive")
    for key in PATHS:
        check_path(key, lookup(config, key))
    for key in NAMED:
        check_no_secret(key, str(lookup(config, key)))
    learning = _check_rollouts if config.algo.spec.on_policy else _check_replay
    for rule in (_check_policy, _check_size, _check_stepping, learning, _check_scores, check_parts):
        rule(config)
    for key, (usual, other, how) in WITHOUT.items():
        if not lookup(config, other) and lookup(config, key) not in (None, usual):
            raise ConfigError(f"{key} has no effect without {how}: add that, or remove {key}")
    if config.curriculum != CurriculumConfig():
        check_curriculum(config.curriculum)
    if config.curriculum.tasks and (config.vec_env == "vector" or backend_of(config.env) is not None):
        raise ConfigError(
            "curriculum.tasks are options for the reset of single environments, but here one object resets all of them "
            f"(env.backend={config.env.backend}, vec_env={config.vec_env}): use single environments, or a native game"
        )
    if config.policies:
        check_policies(config)
    if config.cluster != ClusterConfig():
        check_cluster(config)
    for name in config.policies:
        own = own_config(config, name)
        with naming(f"policies.{name}"):
            check(own)
    _ = config.checkpoint_interval  # raises if the format is wrong


def check_path(key: str, value: str | None) -> None:
    """Raises ConfigError if no file or folder can have this name."""
    if value is None:
        return
    longest = max((len(name.encode("utf-8", "replace")) for name in value.split("/")), default=0)
    if not value or "\0" in value or longest > LONGEST_NAME:
        short = value if len(value) < 60 else f"{value[:60]}…"
        raise ConfigError(f"{key}={short}: no file or folder can be called that")


def check_no_secret(key: str, text: str) -> None:
    """Raises ConfigError if `text`, which is stored, holds a key or password. The message does not show the secret."""
    if secret := next((each for each in SECRET.finditer(text) if not _is_dotted_name(text, each)), None):
        name = next(filter(None, secret.groups()), "a password in an address")
        raise ConfigError(
            f"{key}: {name} would be stored in the run's folder and shown in its report; remove it and put it into "
            "an environment variable such as WANDB_API_KEY or MLFLOW_TRACKING_PASSWORD"
        )


def _is_dotted_name(text: str, match: re.Match[str]) -> bool:
    """Whether the match in `text` is part of a name such as `secret_game:Stats`, not the key of a secret."""
    if not match.group().endswith(":") or not text[match.end() :][:1].isidentifier():
        return False
    before, inner = text[: match.start()].rstrip(), 1
    while inner:  # remove all pairs of brackets
        before, inner = re.subn(r"[\[{(][^\[\]{}()]*[\]})]", "", before)
    return not (before.endswith(("{", ",")) and before.rfind("{") > max(before.rfind("["), before.rfind("(")))


def parse_schedule(value: float | str, key: str) -> tuple[float, float]:
    """First and last value: `3e-4` → (3e-4, 3e-4), `"linear_3e-4"` → (3e-4, 0), `"linear_3e-4_1e-4"` → (3e-4, 1e-4).

    Raises ConfigError if `value` is neither a number nor a schedule.
    """
    text = str(value)
    words = text.split("_")[1:] if text.startswith("linear_") else [text, text]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        wanted = "expected a number, or a schedule: linear_3e-4 (falls to 0) or linear_3e-4_1e-4 (falls to 1e-4)"
        raise ConfigError(f"{key}={value}: {wanted}{did_you_mean(text.partition('_')[0], ['linear'])}")
    return numbers[0], numbers[1] if len(numbers) > 1 else 0.0


# Largest values: no machine has the memory for more.
MOST = {"num_envs": 10**6, "workers": 10**4, "algo.buffer_size": 10**10, "algo.rollout_size": 10**10,
        "algo.n_steps": 10**9, "batch_size": 10**9, "algo.lstm_hidden_size": 10**5, "algo.n_lstm_layers": 100,
        "env.frame_stack": 10**5, "algo.policy_kwargs.n_critics": 10**3, "algo.policy_kwargs.n_quantiles": 10**6,
        "algo.policy_kwargs.features_extractor_kwargs.features_dim": 10**6,
        "algo.policy_kwargs.features_extractor_kwargs.cnn_output_dim": 10**6}  # fmt: skip
MOST_WEIGHTS, MOST_WIDTH = 10**10, 10**6


def _check_size(config: Config) -> None:
    for key, most in MOST.items():
        value = lookup(config, key)
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{key}={value}: must be at most {most:,}; no machine has the memory for more")
    arch = config.algo.net_arch
    parts = arch.values() if isinstance(arch, dict) else [arch or ()]
    critic = "vf" if config.algo.spec.on_policy else "qf"
    if isinstance(arch, dict) and set(arch) - {"pi", critic}:
        raise ConfigError(
            f"algo.net_arch={value_text(arch)}: the keys are pi and {critic}, "
            f"as in {{pi: [64, 64], {critic}: [64, 64]}}"
        )
    if any(not 1 <= width <= MOST_WIDTH for part in parts for width in part):
        raise ConfigError(
            f"algo.net_arch={value_text(arch)}: every width must be at least 1 and at most {MOST_WIDTH:,}"
        )
    for part in parts:
        weights = sum(wide * other for wide, other in zip(part, (1, *part), strict=False))
        if weights > MOST_WEIGHTS or len(part) > 1000:
            raise ConfigError(
                f"algo.net_arch: no machine has the memory for {len(part):,} layers of {weights:,} weights"
            )


def _check_policy(config: Config) -> None:
    policy, policies = config.algo.policy, ("auto", *config.algo.spec.policies)
    if policy not in policies and ":" not in policy:
        raise ConfigError(
            f"algo.policy={policy}: not one of {', '.join(policies)}, or module:Class of your own"
            f"{did_you_mean(policy, policies)}"
        )
    if ":" in policy and lookup(config, "algo.dueling"):
        raise ConfigError(
            f"algo.policy={policy} contradicts algo.dueling=true, which has its own network; remove one of them"
        )
    for key in ("algo.ent_coef", "algo.target_entropy"):
        value = lookup(config, key)
        if isinstance(value, str) and value != "auto" and not AUTO_FROM.fullmatch(value):
            raise ConfigError(f"{key}={value}: expected a number, auto, or auto_0.1 (auto that starts at 0.1)")
    own = {"net_arch", "lstm_hidden_size", "cell", *(["activation_fn"] if config.algo.activation_fn else [])}
    for name in sorted(own & {*config.algo.policy_kwargs}):
        raise ConfigError(f"algo.policy_kwargs.{name}: use algo.{name}=… instead")
    if config.algo.kwargs and config.algo.entry_point is None:
        raise ConfigError(
            f"algo.kwargs={config.algo.kwargs} without algo.entry_point: they are arguments of a class of your own; "
            "SB3's arguments are keys below algo"
        )
    if lookup(config, "algo.shared_lstm") and config.algo.enable_critic_lstm:
        raise ConfigError(
            "algo.shared_lstm=true contradicts algo.enable_critic_lstm=true: the value network uses the policy's LSTM "
            "or one of its own; use algo.enable_critic_lstm=false with the shared one"
        )


def _check_stepping(config: Config) -> None:
    env, backend = config.env, backend_of(config.env)
    if config.vec_env == "vector" and backend is None and env.id is None:
        raise ConfigError(
            f"vec_env=vector with env.entry_point={env.entry_point}: a single env has no vector form; if this is a "
            "VectorEnv, use env.backend=vector, else vec_env=auto"
        )
    if config.vec_env == "native" and env.spec.native is None and (backend is None or backend.vec_env != "native"):
        raise ConfigError(
            f"vec_env=native with env.id={config.env.id or config.env.entry_point}: this environment has no native "
            "batch; use vec_env=auto, dummy or subproc"
        )
    if isinstance(config.workers, int) and config.workers > config.num_envs:
        raise ConfigError(
            f"workers={config.workers} is more than num_envs={config.num_envs}: a worker needs at least one "
            f"env; use workers={config.num_envs} or fewer"
        )
    if not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", config.device):
        raise ConfigError(f"device={config.device}: expected auto, cpu, cuda, cuda:0 or mps")


def _check_rollouts(config: Config) -> None:
    rollout_size, batch_size = config.algo.rollout_size, batch_size_of(config) or 0
    if config.algo.n_steps is None and batch_size > rollout_size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than algo.rollout_size={rollout_size}: a minibatch is drawn from "
            f"one rollout; use batch_size={rollout_size} or less, or a larger rollout"
        )


def _check_replay(config: Config) -> None:
    if not config.algo.spec.off_policy:
        return
    buffer_size, batch_size, frequency = config.algo.buffer_size, batch_size_of(config) or 0, config.algo.train_freq
    if config.algo.n_steps > MAX_N_STEPS:
        raise ConfigError(f"algo.n_steps={config.algo.n_steps}: must be at most {MAX_N_STEPS}")
    if batch_size > buffer_size:
        raise ConfigError(
            f"batch_size={batch_size} is larger than algo.buffer_size={buffer_size}: use a smaller batch_size"
        )
    if config.num_envs > buffer_size:
        raise ConfigError(
            f"num_envs={config.num_envs} is more than algo.buffer_size={buffer_size}: the buffer holds less "
            "than one transition per env; use a larger buffer"
        )
    if train_frequency(frequency)[1] == "episode" and config.num_envs > 1:
        raise ConfigError(
            f"algo.train_freq={list(frequency)} with num_envs={config.num_envs}: episodes of several envs end at "
            "different steps; use num_envs=1, or a number of vector steps"
        )
    if config.updates_per_step == 0:
        raise ConfigError("updates_per_step=0: nothing would be learned; use 1 or more, or -1 for one per transition")


def train_frequency(value: int | Sequence[Any]) -> tuple[int, str]:
    """SB3's `train_freq` as (count, "step" or "episode"); 4 becomes (4, "step"). Raises ConfigError if it is wrong."""
    count, unit = (value, "step") if isinstance(value, int) else value if len(value) == 2 else (0, "")
    if not isinstance(count, int) or count < 1 or unit not in ("step", "episode"):
        raise ConfigError(f"algo.train_freq={value_text(value)}: expected a number of vector steps, or [1, episode]")
    return count, str(unit)


def _check_scores(config: Config) -> None:
    win, value, scores = config.env.result.win, config.env.result.win_value, config.env.result.scores
    if value is not None and (win is None or not isinstance(value, (bool, int, float, str))):
        raise ConfigError(
            f"env.result.win_value={value} with env.result.win={win}: set both: env.result.win is an entry "
            "of the last info, env.result.win_value its value after a win"
        )
    if taken := sorted({*QUALITY_NAMES} & {*scores}):
        raise ConfigError(f"env.result.scores: {', '.join(taken)} is reported already; rename it in the info")


# With fewer gradient updates, large batches learned less than stock. Skull King under `speed`: after 832 updates
# (200,000 steps) its win rate was 1.6 points behind stock, and 3.5 points in the last fifth of the training; after
# 1,953 updates (500,000 steps) it was 3.4 points above stock. Ten seeds each, benchmarks/works/learning.py.
ENOUGH_UPDATES = 1_900


def batch_size_of(config: Config) -> int | None:
    """The batch size: the setting, else the game's or algorithm's own value; None without minibatches."""
    return config.batch_size or config.own.batch_size


def updates_of(config: Config) -> int | None:
    """Gradient updates of the whole training; None for an algorithm without rollouts."""
    algo = config.algo
    batch_size = batch_size_of(config)
    if not algo.spec.on_policy or batch_size is None or config.own.n_epochs is None:
        return None
    return int(config.total_timesteps * algo.n_epochs // batch_size)


def short_run_warning(config: Config) -> str:
    """The warning that large batches leave too few updates for this training; empty if there are enough."""
    updates, algo, batch_size = updates_of(config), config.algo, batch_size_of(config)
    if updates is None or updates >= ENOUGH_UPDATES or batch_size is None:
        return ""
    stock = algo.spec.tiers["baseline"]
    plain = config.total_timesteps * stock["n_epochs"] / stock["batch_size"]
    if updates > 0.5 * plain:
        return ""
    steps = ENOUGH_UPDATES * batch_size // algo.n_epochs
    return (
        f"short: {config.total_timesteps:,} steps are {updates:,} updates (stock: {plain:,.0f}); with fewer than about "
        f"{ENOUGH_UPDATES:,} updates, here {steps:,} steps, such batches were measured to learn less than stock's: use "
        f"{'+profile=balance, ' * (config.tier != 'balance')}a smaller batch_size, or more steps"
    )


NOT_APPLICABLE = "not applicable"
FLAGS = flags_of(Config)
# Sources of values that no user has chosen. The game's and the algorithm's own values win over such values.
SHIPPED = ("default", *(f"profile {name}" for name in ("baseline", "exact", "balance", "speed", "debug")))
BY_NAME = {flag.name: flag for flag in FLAGS}


class Machine(NamedTuple):
    """Facts about the machine, for the plan."""

    cores: int  # physical cores that this process may use
    windows: bool
    cuda: bool
    bf16_units: str = ""  # name of the CPU's units for bfloat16; empty: the CPU has none


class EnvFacts(NamedTuple):
    """Facts about the env, for the plan."""

    native: bool
    step_s: float | None  # None: not measured
    cpu_share: float = 1.0  # share of a step in which the env computes; in the rest it waits for an engine or a socket
    images: bool = False  # the policy is convolutional
    tried: tuple[float, ...] | None = None  # measured seconds of a step of all envs: in one process, in workers
    vector: tuple[float, float] | None = None  # measured seconds of a step: without and with the env's own VectorEnv
    shares: str = ""  # "process" or "machine": copies of the env in one process or machine influence each other
    vector_form: bool = False  # the env has a vector form
    density: tuple[float, float] = (1.0, 1.0)  # shares of non-zero numbers in observations, and of legal actions


Resolved = tuple[Any, str]  # the effective value of a flag, and the reason why it differs from the requested value


class Context(NamedTuple):
    """The facts on which resolvers of the plan base their decisions."""

    config: Config
    sources: Mapping[str, str]
    env: EnvFacts
    machine: Machine
    effective: dict[str, Any]  # flags resolved so far, in the order of FLAGS

    def typed(self, flag: str) -> bool:
        """Whether the flag was set on the command line."""
        return self.sources.get(flag) == "command line"

    def instead(self, flag: str, value: Any, why: str, error: str, usual: tuple[Any, ...] = ("auto",)) -> Resolved:
        """Replace the requested value by `value`, for the reason `why`.

        Raises ConfigError with the text `error` if the user typed a value that is not in `usual`.
        """
        if self.typed(flag) and getattr(self.config, flag) not in usual:
            raise ConfigError(error)
        return value, why


def check_extras(config: Config, engine: str, sources: Mapping[str, str]) -> None:
    """Raises ConfigError if a key needs the fast class or prioritized replay, which the run does not use."""
    for key in ("algo.per_alpha", "algo.per_beta"):
        if sources.get(key) == "command line" and not config.algo.prioritized:
            raise ConfigError(
                f"{key} has no effect with algo.prioritized=false: use algo.prioritized=true, or remove it"
            )
    if "algo.her_goals" in sources and getattr(config.algo, "her", "") == "off":
        raise ConfigError("algo.her_goals has no effect with algo.her=off: use algo.her=future, or remove it")
    if engine != "stock" or not config.algo.spec.fast:
        return
    for name, (_, usual) in config.algo.spec.extras.items():
        value = getattr(config.algo, name)
        if value != usual and name not in ("use_masking", "action_noise"):
            raise ConfigError(
                f"algo.{name}={spelt(value)} with engine=stock: the stock class has no such argument; use "
                f"engine=fast, or remove algo.{name}"
            )
