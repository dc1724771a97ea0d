"""A run's model: built from the effective configuration, saved, and read from a zip without executing pickled code.

SB3's own `load` unpickles spaces, schedules and classes. Here the model is built from the run's configuration, as
training builds it, and only the policy's tensors are read from the zip. The JSON in the zip that describes the policy
must agree with the configuration. `--trust` loads any other model in SB3's way.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from fasttrain.algos.continuous import LONGEST, use_continuous
from fasttrain.algos.engine import Fast
from fasttrain.algos.joint import JointMaskablePPO, JointPPO
from fasttrain.algos.joint_recurrent import JointMaskableRecurrentPPO, JointRecurrentPPO
from fasttrain.algos.owners import Owners, View, Viewed, view_of, view_of_seats
from fasttrain.algos.ppo import storage_of
from fasttrain.algos.q_networks import DUELING_POLICIES
from fasttrain.algos.reuse import Reuse
from fasttrain.buffers.hindsight import HindsightStorage
from fasttrain.envs.names import arguments, callable_at
from fasttrain.envs.user_code import blame
from fasttrain.errors import ConfigError, FastTrainError, naming
from fasttrain.perf.clock import PhaseClock
from fasttrain.perf.stock import TimedVecEnv
from fasttrain.runs.engine import pick_device
from fasttrain.runs.envs import Statistics, build_vec_env
from fasttrain.runs.spaces import is_fast, policy_class, policy_for, policy_kwargs
from fasttrain.saving.archives import open_archive, read_member, read_tensors
from fasttrain.saving.checkpoints import array_writer
from fasttrain.saving.env_state import moments
from fasttrain.saving.files import parse_json
from fasttrain.spec.checks import BATCHED, parse_schedule, train_frequency
from fasttrain.spec.config import Config
from fasttrain.spec.policies import columns_of, decides_of, goals_of, member_file, own_config, returns_of, seen_of
from fasttrain.spec.reading import uses_masks, with_fixed_opponent


def build_algorithm(config: Config, env: VecEnv, clock: PhaseClock) -> BaseAlgorithm:
    """Build the algorithm of the effective configuration. `clock` measures its phases."""
    algo, spec = config.algo, config.algo.spec
    fast = is_fast(config)
    alias = policy_for(algo, env.observation_space, spec.policies)
    policy = policy_class(config, env.observation_space) if ":" in algo.policy else alias
    given = {
        **_arguments(config, env.action_space),
        "policy_kwargs": policy_kwargs(algo),
        "seed": config.seed,
        "device": pick_device(config.device, alias),
        "verbose": 0,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You have specified a mini-batch size", UserWarning)  # the plan says this
        if not fast:
            model = _made(config, fast, policy, TimedVecEnv(env, clock), given)
            if isinstance(model, Fast):
                model.time_with(clock)  # a class from algo.entry_point; in a run `settle_kernels` refuses it later
            return model
        if "double_q" in spec.extras:
            given |= {name: getattr(algo, name) for name in ("double_q", "loss", "use_masking")}
            given["prioritized"] = {"alpha": algo.per_alpha, "beta": algo.per_beta} if algo.prioritized else None
            policy = DUELING_POLICIES[policy] if algo.dueling else policy
        ours: Any = _joint(config, env, clock, given) if config.policies else _made(config, fast, policy, env, given)
    ours.time_with(clock)
    ours.collector.lends = True  # they may be views: the run's callback keeps none of them
    if spec.on_policy:
        ours.collector.schedule = config.schedule
        ours.reuse = Reuse(algo.reuse) if getattr(algo, "reuse", 1) > 1 else None
        ours.target_tv = getattr(algo, "target_tv", None)
        if config.schedule == "continuous":
            use_continuous(ours, config.max_lag)
            storage_of(ours, LONGEST * ours.n_steps, ours.n_envs)
    if spec.off_policy and config.prefetch == "on":
        ours.prefetch_batches(config.deterministic)
    return ours  # type: ignore[no-any-return]


JOINT: dict[str, Any] = {
    "ppo": JointPPO, "maskable_ppo": JointMaskablePPO, "recurrent_ppo": JointRecurrentPPO,
    "maskable_recurrent_ppo": JointMaskableRecurrentPPO,
}  # fmt: skip


def _joint(config: Config, env: VecEnv, clock: PhaseClock, given: dict[str, Any]) -> BaseAlgorithm:
    """Several policies as one algorithm. Their weights are drawn one after the other from the run's seed."""
    space: Any = env.unwrapped.observation_space  # without stacked frames
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"policies read columns of an observation that is a Box with one axis; this one is {space}")
    unseeded: dict[str, Any] = {"seed": None}
    own = {name: dataclasses.replace(own_config(config, name), **unseeded) for name in config.policies}
    kind: Any = JOINT[config.algo.name]
    width, goals = space.shape[0], goals_of(config)
    seats = getattr(getattr(env.unwrapped, "venv", None), "seat_spaces", None)  # of PettingZoo's agents

    def view(name: str) -> View:
        if seats:
            its = [seats[agent] for agent in decides_of(config, name)]
            return view_of_seats(its, seen_of(config, name, its[0][0].shape[0]), f"policies.{name}")
        seen, sets_goals = seen_of(config, name, width), "goals" in config.policies[name]
        return view_of(seen, width, config.env.frame_stack, goals.number if goals else 0, sets_goals)

    views = {name: view(name) for name in own}

    def build(name: str, env: VecEnv) -> BaseAlgorithm:
        with naming(f"policies.{name}"):
            return build_algorithm(own[name], Viewed(env, views[name]), clock)

    return kind(  # type: ignore[no-any-return]
        env, owners=Owners([*own], columns_of(config, width), [*views.values()]), **given,
        make=lambda env: {name: build(name, env) for name in own},
        returns={name: returns_of(config, name) for name in own},
        reward_keys={name: each["reward_key"] for name, each in config.policies.items() if "reward_key" in each},
    )  # fmt: skip


def algorithm_class(config: Config, fast: bool) -> Any:
    """The algorithm's class, or the user's subclass of it. Raises ConfigError if it is no subclass."""
    base, own = config.algo.spec.load(fast), config.algo.entry_point
    if own is None:
        return base
    found = callable_at(own, f"algo.entry_point={own}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"algo.entry_point={own}: algo={config.algo.name} with engine={config.engine} needs a class derived from "
            f"{base.__module__.partition('.')[0]}.{base.__name__}, not {found!r:.80}"
        )
    return found


def _made(config: Config, fast: bool, policy: object, env: VecEnv, given: dict[str, Any]) -> BaseAlgorithm:
    algo, kind = config.algo, algorithm_class(config, fast)
    own = arguments(algo.kwargs, "algo.kwargs.")
    try:
        return kind(policy, env, **given, **own)  # type: ignore[no-any-return]
    except (FastTrainError, MemoryError):
        raise
    except Exception as error:  # raised by a class of the user, or by SB3 for spaces that it does not support
        parts = {name: getattr(algo, name) for name in ("entry_point", "kwargs", "policy", "policy_kwargs")}
        named = " with ".join(f"algo.{name}={value}" for name, value in parts.items() if value and value != "auto")
        raise ConfigError(f"{named or f'algo={algo.name}'}: {' '.join(blame(error).split())}") from error


def _arguments(config: Config, action_space: spaces.Space[Any]) -> dict[str, Any]:
    """The stock class's constructor arguments, from `algo.` and from flags such as batch_size and warmup_steps."""
    algo, spec = config.algo, config.algo.spec
    found: dict[str, Any] = {}
    for name, (kind, _) in spec.arguments().items():
        if name in spec.keys():  # noqa: SIM118 - a method
            value = getattr(algo, name)
            if kind.startswith("schedule") and value is not None:
                begin, end = parse_schedule(value, f"algo.{name}")
                value = begin if begin == end else LinearSchedule(begin, end, 1.0)  # a class that SB3 can load
            found[name] = value
    if (noise := getattr(algo, "action_noise", None)) is not None:
        found["action_noise"] = _noise(noise, action_space)
    if spec.minibatches:
        found["batch_size"] = config.batch_size
    if spec.on_policy:
        found["n_steps"] = algo.rollout_size // config.num_envs
    if spec.off_policy:
        found |= {"learning_starts": config.warmup_steps, "gradient_steps": config.updates_per_step}
        found["train_freq"] = train_frequency(algo.train_freq)
        if algo.her != "off":  # fasttrain's classes replace HerReplayBuffer by HindsightStorage
            found["replay_buffer_class"] = HerReplayBuffer if spec.fast else HindsightStorage
            found["replay_buffer_kwargs"] = {"n_sampled_goal": algo.her_goals, "goal_selection_strategy": algo.her}
    return found


NOISES: dict[str, Any] = {"normal": NormalActionNoise, "ornstein-uhlenbeck": OrnsteinUhlenbeckActionNoise}


def _noise(text: str, action_space: spaces.Space[Any]) -> ActionNoise:
    """Action noise of TD3 and DDPG from `normal_0.1` or `ornstein-uhlenbeck_0.5`, in the scale of actions (-1 to 1)."""
    kind, _, number = text.partition("_")
    sigma = float(number) if re.fullmatch(r"\d+(\.\d+)?", number) else -1.0
    if kind not in NOISES or sigma < 0:
        known = "normal_0.1, Gaussian noise of that standard deviation, or ornstein-uhlenbeck_0.1"
        raise ConfigError(f"algo.action_noise={text}: expected {known}")
    shape = action_space.shape or ()
    return NOISES[kind](np.zeros(shape), np.full(shape, sigma))  # type: ignore[no-any-return]


# --- zips

# All files that SB3 2 and sb3-contrib write into the zips of these algorithms, and tensors.pth of SB3 0.x.
MEMBERS = frozenset(
    ("data", "policy.pth", "policy.optimizer.pth", "actor.optimizer.pth", "critic.optimizer.pth",
     "ent_coef_optimizer.pth", "pytorch_variables.pth", "tensors.pth", "_stable_baselines3_version", "system_info.txt")
)  # fmt: skip
OPTIMIZERS = re.compile(r"policy\.members\.\w+\.optimizer\.pth")  # in a model with several policies
MOST_MEMBERS = 100
MOST_DATA_BYTES = 64 << 20  # 1 MB is usual; `data` holds the last observations of all envs
MOST_WEIGHT_BYTES = 8 << 30
POLICY_PACKAGES = ("stable_baselines3", "sb3_contrib", "fasttrain")
# Keys of policy_kwargs that are not compared: acting does not need them, or the shapes of the weights show them.
UNCOMPARED_KWARGS = frozenset(
    ("optimizer_class", "optimizer_kwargs", "ortho_init", "log_std_init", "net_arch", "device", "lstm_hidden_size",
     "n_lstm_layers", "enable_critic_lstm", "shared_lstm")
)  # fmt: skip
WAY_OUT = "--trust loads it as Stable-Baselines3 does, and runs the code in it: use it only if you trust who made it"


def read_model_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read an SB3 zip without executing anything in it. Raises ConfigError if it is no SB3 zip.

    Returns SB3's `data`, in which pickled values stay text, and the policy's state dict on the CPU.
    """
    with open_archive(path, str(path), most_members=MOST_MEMBERS) as archive:
        foreign = sorted(name for name in archive.namelist() if name not in MEMBERS and not OPTIMIZERS.fullmatch(name))
        if foreign:
            raise ConfigError(f"{path}: it contains {foreign[0][:100]!r}, which no SB3 model has")
        data = read_member(archive, "data", MOST_DATA_BYTES, str(path))
        policy = read_member(archive, "policy.pth", MOST_WEIGHT_BYTES, str(path))
    facts = parse_json(data, f"{path}: its data")
    weights = read_tensors(policy, f"{path}: its policy.pth")
    good = isinstance(weights, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    )
    if not isinstance(facts, dict) or not good:
        raise ConfigError(f"{path} is no model of Stable-Baselines3")
    return facts, weights


def load_policy(config: Config, file: Path, trust: bool = False) -> BaseAlgorithm:
    """The model in `file` on the CPU, for acting only. Raises ConfigError if the zip holds another network than the
    configuration builds. `trust`: SB3 loads the zip and may run code in it.
    """
    if trust and config.policies:
        raise ConfigError(f"{file} holds several policies, which SB3 cannot load: leave out --trust")
    if trust:
        # Acting needs no replay buffer, which may be too large for this machine.
        without: dict[str, Any] = {"buffer_size": 1, "replay_buffer_class": None, "replay_buffer_kwargs": {}}
        small = without if config.algo.spec.off_policy else {}
        return algorithm_class(config, _plays_as_ours(config)).load(file, device="cpu", **small)  # type: ignore[no-any-return]
    facts, weights = read_model_file(file)
    model = bare_model(config)
    _check_policy(facts, model, file)
    _fill(model, weights, file)
    steps, exploration = facts.get("num_timesteps"), facts.get("exploration_rate")
    model.num_timesteps = steps if type(steps) is int and 0 <= steps < 2**63 else 0
    if hasattr(model, "exploration_rate") and isinstance(exploration, (int, float)) and 0 <= exploration <= 1:
        model.exploration_rate = float(exploration)
    return model


def _plays_as_ours(config: Config) -> bool:
    """Whether to act with fasttrain's class even after stock training. Masks and dueling heads need fasttrain's DQN."""
    spec, own = config.algo.spec, config.algo.entry_point is not None
    return spec.off_policy and spec.fast is not None and not (own and config.engine == "stock")


def bare_model(config: Config) -> BaseAlgorithm:
    """The algorithm of the configuration on the CPU, with new weights, the smallest buffers and no env."""
    config = with_fixed_opponent(config)
    spec = config.algo.spec
    small: dict[str, Any] = {"rollout_size": 2} if spec.on_policy else {}
    small |= {"buffer_size": 1, "n_steps": 1, "her": "off"} if spec.off_policy else {}
    engine: Literal["stock", "fast"] = "fast" if getattr(config.algo, "cell", "lstm") != "lstm" else "stock"
    if config.policies:
        engine = "fast"
    if _plays_as_ours(config):
        small |= {"prioritized": False, "use_masking": uses_masks(config)} if "prioritized" in spec.extras else {}
        engine = "fast"
    own = dataclasses.replace(
        config,
        algo=dataclasses.replace(config.algo, **small),
        engine=engine,
        device="cpu",
        num_envs=1,
        batch_size=2,
        fused_update="off",
        prefetch="off",
    )
    env = one_env(config)
    try:
        model = build_algorithm(own, env, PhaseClock())
    finally:
        env.close()
    model.env = model._vec_normalize_env = None
    return model


def one_env(config: Config, statistics: Statistics | None = None) -> VecEnv:
    """A vectorized env with one copy of the run's env, in this process, with the run's wrappers."""
    own = config if config.vec_env in BATCHED else dataclasses.replace(config, vec_env="dummy")
    return build_vec_env(own, 1, config.eval.seed, statistics)


def evaluation_env(config: Config) -> VecEnv:
    """One copy of the run's env for a callback such as EvalCallback. SB3's `sync_envs_normalization` can update it."""
    env = one_env(with_fixed_opponent(config))
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    wrapped = env if is_fast(config) else TimedVecEnv(env, PhaseClock())
    return BaseAlgorithm._wrap_env(wrapped, verbose=0, monitor_wrapper=False)


def find_statistics(config: Config, model_file: Path, trust: bool = False, pickled: Path | None = None) -> Path | None:
    """The file with a model's statistics of `env.normalize`; None if this setting was off. Raises ConfigError
    if there is no file, or only a pickle without `trust`. `pickled`: SB3's own file, if it is not beside the model.
    """
    if not config.env.normalize:
        return None
    plain, pickled = statistics_of(model_file), pickled or statistics_of(model_file, pickled=True)
    if plain.is_file():
        return plain
    if not pickled.is_file():
        raise ConfigError(f"{model_file} was trained with env.normalize, but no {plain.name} lies beside its model")
    if not trust:
        raise ConfigError(f"{model_file}: no {plain.name} beside it, only {pickled.name}, a pickle; {WAY_OUT}")
    return pickled


# --- the policy


def _check_policy(facts: dict[str, Any], model: BaseAlgorithm, file: Path) -> None:
    """Raises ConfigError if the zip describes another policy than the one that was built. The message names the key."""
    kind = facts.get("policy_class")
    module = str(kind.get("__module__") if isinstance(kind, dict) else kind)
    if not isinstance(kind, dict) or module.split(".")[0] not in POLICY_PACKAGES:
        raise ConfigError(f"{file}: its policy_class is from {module[:100]!r}, not SB3 or fasttrain; {WAY_OUT}")
    kwargs = facts.get("policy_kwargs", {})
    if not isinstance(kwargs, dict):
        raise ConfigError(f"{file}: its policy_kwargs are no mapping")
    own, policy = model.policy_kwargs, model.policy
    defaults = inspect.signature(model.policy_class.__init__).parameters
    for key in sorted({*kwargs, *own} - UNCOMPARED_KWARGS):
        if key.startswith(":"):
            continue
        built = _readable(getattr(policy, key, own.get(key)))
        stored = _readable(kwargs[key] if key in kwargs else defaults[key].default if key in defaults else None)
        if stored != built:
            raise ConfigError(
                f"{file}: its policy_kwargs.{key[:50]} is {str(stored)[:80]!r}, the run's configuration builds "
                f"{str(built)[:80]!r}; {WAY_OUT}"
            )


def _readable(value: object) -> Any:
    """The value as SB3 writes it into a zip: as JSON, or as the object's text without its memory address."""
    try:
        value = json.loads(json.dumps(value))
    except TypeError:
        value = str(value)
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", value) if isinstance(value, str) else value


def _fill(model: BaseAlgorithm, weights: dict[str, torch.Tensor], file: Path) -> None:
    own = model.policy.state_dict()
    different = sorted(set(own) ^ set(weights)) or [
        name for name in own if own[name].shape != weights[name].shape or own[name].dtype != weights[name].dtype
    ]
    if different:
        name = different[0]
        shapes = [tuple(each[name].shape) if name in each else "none" for each in (weights, own)]
        raise ConfigError(
            f"{file} holds another network than the run's configuration builds: {name[:100]} has shape {shapes[0]}, "
            f"not {shapes[1]}; {WAY_OUT}"
        )
    bad = next((name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())), None)
    if bad is not None:
        raise ConfigError(f"{file}: its weights are not finite ({bad[:100]}), so it cannot play")
    model.policy.load_state_dict(weights, strict=True)
    model.policy.set_training_mode(False)


def save_model(model: BaseAlgorithm, path: Path) -> None:
    """Write the model to `path`. Statistics of `env.normalize` go beside it, as plain arrays and in SB3's format."""
    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        with statistics_of(path).open("wb") as file:
            array_writer({name: np.asarray(value) for name, value in moments(statistics).items()})(file)
        statistics.save(str(statistics_of(path, pickled=True)))
    model.save(path)
    for name, member in getattr(model, "members", {}).items():  # SB3 and sb3-contrib can load these files
        member.save(path.with_name(member_file(path.stem, name)))


def statistics_of(path: Path, pickled: bool = False) -> Path:
    """The file of a model's statistics: vecnormalize.npz for model.zip. `pickled`: SB3's own file, vecnormalize.pkl."""
    name = "vecnormalize" if path.stem == "model" else f"{path.stem}_vecnormalize"
    return path.with_name(name + (".pkl" if pickled else ".npz"))
