"""Translates rl_zoo3's hyperparameters into settings. Keys without a counterpart are reported with the reason.

The zoo evaluates texts such as `dict(net_arch=[64, 64], activation_fn=nn.ReLU)` as Python. Here they are parsed, and
only literals, `dict` and a few known names are allowed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fasttrain.errors import ConfigError
from fasttrain.spec.algorithms import ALGORITHMS, LSTM, AlgorithmSpec, argument_message
from fasttrain.spec.config import Config
from fasttrain.spec.precedence import ALIASES
from fasttrain.spec.reading import from_mapping
from fasttrain.spec.removed import set_key
from fasttrain.spec.setting import defaults_of, did_you_mean

Settings = dict[str, Any]  # dotted key → value
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "GELU": "gelu", "SiLU": "silu", "LeakyReLU": "leaky_relu"}
CLASSES = {"RMSpropTFLike": "stable_baselines3.common.sb2_compat.rmsprop_tf_like:RMSpropTFLike"}
PLAIN = {"n_timesteps": "total_timesteps", "n_envs": "num_envs", "frame_stack": "env.frame_stack",
         "env_kwargs": "env.kwargs"}  # fmt: skip
LISTS = {"env_wrapper": ("env.wrappers", "wrapper"), "callback": ("callbacks", "callback")}
STOCK = ("n_steps", "batch_size", "learning_starts", "train_freq", "gradient_steps")  # get SB3's default if missing
NORMALIZE = {"training": True, "clip_obs": 10.0, "clip_reward": 10.0, "epsilon": 1e-8}  # VecNormalize's defaults
NO_PLACE = {
    "vec_env_wrapper": "there is no place for wrappers of all envs at once, but env.frame_stack and env.normalize",
    "monitor_kwargs": "is_success needs no setting; env.result.scores=[…] names other entries of the last info",
    "replay_buffer_class": "the engine chooses the buffer",
    "replay_buffer_kwargs": "the engine chooses its buffer",
}
HINDSIGHT = ("replay_buffer_class", "replay_buffer_kwargs")
MOST_CHARACTERS = 20_000


class Taken(NamedTuple):
    """The translation of an entry."""

    settings: Settings
    left: list[str]  # texts `key: why it was not translated`
    notes: list[str]  # texts about differences from the zoo in translated keys


def zoo_name(spec: AlgorithmSpec) -> str:
    """rl_zoo3's name for an algorithm."""
    return spec.zoo or spec.name


def algorithm(name: str) -> AlgorithmSpec:
    """The algorithm with this name, in rl_zoo3 or in fasttrain. Raises ConfigError if there is none."""
    known = {**ALGORITHMS, **{zoo_name(spec): spec for spec in ALGORITHMS.values()}}
    if name not in known:
        raise ConfigError(f"--algo {name}: not one of {', '.join(sorted(known))}{did_you_mean(name, known)}")
    return known[name]


def entry_of(
    entries: Mapping[Any, Any], env: str, is_atari: Callable[[str], bool], where: str
) -> tuple[str, Mapping[str, Any]]:
    """Name and contents of the entry for an env: its own, `atari` for an Atari game, or `default`. Raises ConfigError
    if there is none.
    """
    plain = env.rpartition(":")[2]
    name = plain if plain in entries else "atari" if is_atari(plain) else "default"
    found = entries.get(name)
    if not isinstance(found, Mapping):
        held = f"{name} has no keys" if name in entries else f"no entry {plain}, and none called {name}"
        names = ", ".join(map(str, entries))
        raise ConfigError(f"{where}: {held}{did_you_mean(plain, map(str, entries))}; it has {names:.2000}")
    return name, found


def taken(entry: Mapping[str, Any], env: str, spec: AlgorithmSpec) -> Taken:
    """The settings of a training as in the zoo: one process, and SB3's defaults for keys that are not in the entry."""
    stock = {name: default for name, (_, default) in spec.arguments().items() if name in STOCK}
    found, left = Settings(), list[str]()
    for key, value in {**stock, "n_envs": 1, **entry}.items():
        for name, setting in _told(str(key), value, entry, spec):
            if isinstance(setting, ConfigError):
                left.append(f"{name}: {setting}")
            else:
                found[name] = setting
    notes = [*_fitted(found, left, spec)]
    first = {"env.id": env, "engine": "stock", "vec_env": "dummy", "tier": "baseline"}
    return Taken({**first, **found}, [*dict.fromkeys(left)], notes)


def nested(settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with each dotted setting added to the mapping of its group."""
    for key, value in settings.items():
        set_key(values, key, value)
    return values


def configuration(settings: Settings, spec: AlgorithmSpec) -> Config:
    """The typed configuration with these settings and defaults for the others. Raises ConfigError if one is wrong."""
    return from_mapping(nested(settings, {**defaults_of(Config), "algo": {"name": spec.name}}))


def _told(key: str, value: object, entry: Mapping[str, Any], spec: AlgorithmSpec) -> list[tuple[str, Any]]:
    try:
        return [*_settings(key, value, entry, spec)]
    except ConfigError as error:
        return [(key, error)]


def _settings(key: str, value: object, entry: Mapping[str, Any], spec: AlgorithmSpec) -> Iterator[tuple[str, Any]]:
    """The settings for one key of an entry as (setting, value); (name, ConfigError) if none exists."""
    if key in PLAIN:
        value = {"frame_stack": 1, "env_kwargs": {}}.get(key) if value is None else value
        yield PLAIN[key], int(value) if isinstance(value, float) and value.is_integer() else value
    elif key in LISTS:
        name, word = LISTS[key]
        yield name, [_named(one, word) for one in (value if isinstance(value, list) else [value]) if one]
    elif key == "policy":
        if "." not in str(value) and value not in spec.policies:
            raise ConfigError(f"{value} is none of {', '.join(spec.policies)}")
        yield "algo.policy", _dotted(value) if "." in str(value) else value
    elif key == "policy_kwargs":
        for name, part in _parts(value):
            yield _network(name, part, spec)
    elif key in ("normalize", "normalize_kwargs"):
        yield from _normalize(entry)
    elif key in ("noise_type", "noise_std"):
        yield _noise(entry, spec)
    elif key in NO_PLACE:
        yield from _placed(key, value, entry, spec)
    elif key in ("sde_sample_freq", "use_sde_at_warmup") and not entry.get("use_sde"):
        raise ConfigError("has no effect without use_sde")
    elif f"algo.{key}" in ALIASES and key in spec.arguments():
        yield ALIASES[f"algo.{key}"].key, value
    elif key in {*spec.keys()} & {*spec.arguments()}:
        kind, line, number = str(value).partition("_")
        linear = isinstance(value, str) and line and kind.isalpha() and spec.arguments()[key][0].startswith("schedule")
        yield f"algo.{key}", f"linear_{number}" if linear else value
    elif key != "optimize_memory_usage" or value:
        told = "" if f"algo.{key}" in ALIASES else argument_message(f"algo.{key}").partition(": ")[2]
        raise ConfigError(told or f"{spec.stock.partition(':')[2]} has no such argument")


def _fitted(found: Settings, left: list[str], spec: AlgorithmSpec) -> Iterator[str]:
    """Adjust settings in `found` that depend on each other. Yields notes about differences from the zoo."""
    if "num_envs" in spec.flags and found["num_envs"] != spec.flags["num_envs"]:
        left.append(f"n_envs: {spec.name} plays in {spec.flags['num_envs']} env here, candidates one after the other")
        found["num_envs"] = spec.flags["num_envs"]
    sizes: list[Any] = [found.get(name) for name in ("batch_size", "num_envs", "algo.n_steps")]
    if spec.on_policy and all(isinstance(size, int) for size in sizes) and sizes[0] > sizes[1] * sizes[2]:
        found["batch_size"] = sizes[1] * sizes[2]  # SB3 does the same, with a warning
    if found.get("env.frame_stack", 1) != 1 and "obs" in found.get("env.normalize", ()):
        yield "frame_stack: the zoo stacks normalised frames; here stacked frames are normalised"
    if found.get("env.wrappers"):
        yield "env_wrapper: results are those of the wrapped env; the zoo reports those of the env inside the wrapper"


def _dotted(value: object) -> str:
    module, dot, name = str(value).rpartition(".")
    if not dot or not all(word.isidentifier() for word in str(value).split(".")):
        raise ConfigError(f"{value!r:.100} is no dotted name of a class")
    return f"{module}:{name}"


def _named(entry: object, word: str) -> Any:
    if not isinstance(entry, Mapping):
        return _dotted(entry)
    (name, arguments), *more = entry.items() or [("", None)]
    if more or not isinstance(arguments or {}, Mapping) or word in (arguments or {}):
        raise ConfigError(f"{dict(entry)!r:.200}: expected a class and its arguments")
    return {word: _dotted(name), **(arguments or {})}


def _normalize(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    asked = entry.get("normalize")
    texts = [one for one in (asked, entry.get("normalize_kwargs")) if isinstance(one, (str, Mapping))]
    said = {name: _value(part) for one in texts for name, part in _parts(one)}
    on = isinstance(asked, (str, Mapping)) or bool(asked)
    parts = (name for name in ("obs", "reward") if on and said.pop(f"norm_{name}", True))
    yield "env.normalize", list(parts)
    for name, value in said.items():
        if name == "gamma" and value != entry.get("gamma", 0.99):
            yield f"normalize.{name}", ConfigError("rewards are normalised by algo.gamma")
        elif name != "gamma" and NORMALIZE.get(name) != value:
            yield f"normalize.{name}", ConfigError("here VecNormalize keeps its default")


def _placed(key: str, value: object, entry: Mapping[str, Any], spec: AlgorithmSpec) -> Iterator[tuple[str, Any]]:
    """The settings for SB3's HerReplayBuffer. Raises ConfigError if `entry` has another replay buffer under `key`."""
    if not (key in HINDSIGHT and entry.get(HINDSIGHT[0]) == "HerReplayBuffer" and spec.off_policy):
        if value:
            raise ConfigError(NO_PLACE[key])
        return
    if key != HINDSIGHT[0]:
        return
    given = {name: _value(part) for name, part in _parts(entry.get("replay_buffer_kwargs"))}
    yield "algo.her", given.pop("goal_selection_strategy", "future")
    yield "algo.her_goals", given.pop("n_sampled_goal", 4)
    for name, value in given.items():
        if value:
            yield f"replay_buffer_kwargs.{name}", ConfigError("fasttrain's buffer has no such argument")


def _noise(entry: Mapping[str, Any], spec: AlgorithmSpec) -> tuple[str, Any]:
    if "action_noise" not in spec.extras:
        raise ConfigError(f"{spec.name} explores without action noise")
    kind, deviation = str(entry.get("noise_type")).strip(), entry.get("noise_std")
    if kind == "None":
        return "algo.action_noise", None
    name = next((name for name in ("normal", "ornstein-uhlenbeck") if name in kind), None)
    if name is None or not isinstance(deviation, (int, float)):
        raise ConfigError(f"{kind:.100} with noise_std={deviation!r:.100} is not an action noise of the zoo")
    return "algo.action_noise", f"{name}_{float(deviation):.12f}".rstrip("0").rstrip(".")


def _network(name: str, node: object, spec: AlgorithmSpec) -> tuple[str, Any]:
    """The setting for one entry of `policy_kwargs`, whose value is a syntax tree or a plain value."""
    try:
        if name == "activation_fn":
            text = ast.unparse(node) if isinstance(node, ast.AST) else str(node)
            owner, _, kind = text.rpartition(".")
            if owner.rpartition(".")[2] != "nn" or kind not in ACTIVATIONS:
                raise ConfigError(f"{text:.100} is none of {', '.join(f'nn.{name}' for name in ACTIVATIONS)}")
            return "algo.activation_fn", ACTIVATIONS[kind]
        value = _value(node)
        if name == "net_arch" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            value = value[0]  # this is the form of SB3 before 1.8
    except ConfigError as error:
        return f"policy_kwargs.{name}", error
    own = name == "net_arch" or (spec.recurrent and name in LSTM)
    return f"algo.{name}" if own else f"algo.policy_kwargs.{name}", value


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping, or of the text of a Python dict; in the latter case the values are syntax trees."""
    if value is None or isinstance(value, Mapping):
        yield from (value or {}).items()
        return
    text = str(value)
    try:
        node: Any = ast.parse(text.strip() if len(text) <= MOST_CHARACTERS else "", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{text!r:.200} is no dict(…)") from error
    if (found := _pairs(node)) is None:
        raise ConfigError(f"{text!r:.200} is no dict(…)")
    yield from found


def _pairs(node: ast.AST) -> list[tuple[str, ast.AST]] | None:
    """The entries of `dict(a=1)` and `{"a": 1}`; None for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return [(str(one.arg), one.value) for one in node.keywords] if all(one.arg for one in node.keywords) else None
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return [(str(getattr(key, "value", "")), one) for key, one in zip(node.keys, node.values, strict=True)]
    return None


def _value(node: object) -> Any:
    """The Python value that a syntax tree stands for. A value that is no syntax tree is returned unchanged."""
    if not isinstance(node, ast.AST):
        return node
    if (pairs := _pairs(node)) is not None:
        return {name: _value(one) for name, one in pairs}
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Name) and node.id in CLASSES:
        return CLASSES[node.id]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        value = None if isinstance(node, ast.Constant) else ...
    if not isinstance(value, (int, float, str, type(None))):
        raise ConfigError(f"{ast.unparse(node)!r:.200} has more than literals, dict(…) and known names")
    return value
