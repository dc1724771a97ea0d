"""Backends: `env.backend=NAME` chooses who steps the envs, an object that a package offers under that name.

    [project.entry-points."fasttrain.engines"]  # "fasttrain.integrations" of other people's libraries
    my_engine = "my_package.backend:BACKEND"

It says what the checks and the plan ask, and builds the vectorized env. The module of an engine is imported while the
configuration is declared, because its settings are a part of that: at its top it may import `fasttrain.errors`,
`fasttrain.spec.setting` and this module, all else of fasttrain inside methods.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from fasttrain.errors import ConfigError
from fasttrain.spec import plugins
from fasttrain.spec.plain import to_dict
from fasttrain.spec.setting import defaults_of

SINGLE, VECTOR = "gymnasium", "vector"  # fasttrain's own: single envs, which it steps by itself; a VectorEnv
DAEMONS = "daemons"  # the engine in fasttrain's own wheel
ENGINES = (f"env.backend={DAEMONS}", "env=go", "env=showdown", DAEMONS)  # what it adds, for those who lack it
RESERVED = (SINGLE, VECTOR, "profile", "tuned", "hydra")  # besides the configuration's keys no engine can be called so
Config: TypeAlias = Any  # that of `spec.config`, which this module helps to declare
EnvConfig: TypeAlias = Any  # its `env`
ADAPTERS = "fasttrain.integrations."
C = TypeVar("C")


def option_of(env_id: object, entry_point: object, kwargs: Mapping[str, Any]) -> str:
    """How messages name an env: as it was typed, which of a game behind an adapter is its id."""
    if env_id is None and str(entry_point).startswith(ADAPTERS):
        env_id = kwargs.get("game")
    return f"env.entry_point={entry_point}" if env_id is None else f"env.id={env_id}"


def name_of_env(env_id: object, entry_point: object, kwargs: object = None) -> str:
    """`ALE-Pong-v5` of ALE/Pong-v5, `My` of my.envs:My, `go` of the engine's class Go or its adapter."""
    if str(entry_point).startswith("fasttrain.") and isinstance(kwargs, Mapping):
        entry_point = kwargs.get("game", entry_point)
    text = str(env_id or entry_point or "env")
    own = re.match(rf"(?:{'|'.join(plugins.OURS)})[/.](?:.*:)?(\w+)", text)
    return own[1].lower() if own else re.sub(r"[^\w.-]+", "-", text.rpartition(":")[2])


class Backend:
    """A backend; a subclass, or an instance's attributes, say what is otherwise."""

    name: str = ""  # that of its entry point; its settings stand below it at the top level
    vec_env: str = "vector"  # in the plan; native: it steps all at once, daemons: each goes at its own pace
    why: str = "a VectorEnv steps all envs"  # in the plan
    what: str = ""  # who steps, in the message that refuses a setting
    instead: str = "env.backend=gymnasium"  # where that setting works
    refuses: tuple[str, ...] = ("max_episode_steps",)  # keys below `env.` that mean nothing to it
    masked: bool = True  # whether an env of it can have action masks
    lends: bool = False  # its vectorized env is an `ExternalVecEnv`: the checkup plays one game of it
    settings: type | None = None  # of an engine: a dataclass whose fields are `setting(…)`, frozen, all with defaults
    conf: Path | None = None  # of an engine: a folder of YAML files, env/my_game.yaml say

    def adapted(self, env: EnvConfig) -> EnvConfig:
        """The env as another backend plays it, where this one is an adapter; else as it is."""
        return env

    def check(self, config: Config) -> None:
        """Rules about its settings, where it is chosen.

        Raises:
            ConfigError: names the key and a way out.
        """

    def option(self, env: EnvConfig) -> str:
        """What messages call the env."""
        return str(env.option)

    def build(self, config: Config, num_envs: int, folder: Path | None) -> Any:
        """The vectorized env, a `SlotVecEnv`; its logs go to `folder`, which only a training has.

        Raises:
            FastTrainError: it cannot be built.
        """
        raise ConfigError(f"env.backend={self.name}: {type(self).__qualname__} has no method build")

    def workers(self, config: Config, requested: int | str, num_envs: int, cores: int) -> tuple[int, str]:
        """Of vec_env=daemons: how many processes play, and why."""
        return 1, ""

    def evaluations(self, config: Config, guests: int, cores: int) -> str:
        """Of one that `lends`: what becomes of the training's games while evaluations play that many."""
        return ""

    def own(self, config: Config) -> Any:
        """Its settings in a configuration."""
        return getattr(config, self.name)


class _Vector(Backend):
    name, what, instead = VECTOR, "a VectorEnv, which steps all envs itself", "env.backend=gymnasium with vec_env=auto"

    def option(self, env: EnvConfig) -> str:
        return f"the VectorEnv of {env.option}" if env.id else env.option


OF_VECTORS = _Vector()


def backend_of(env: EnvConfig) -> Backend | None:
    """Of `env.backend`; None for single envs. Raises ConfigError: nobody offers it, or who does cannot be loaded."""
    return None if env.backend == SINGLE else OF_VECTORS if env.backend == VECTOR else _loaded(env.backend)


def lends_games(config: Config) -> bool:
    """Whether evaluations play guests of the training's own vectorized env."""
    backend = backend_of(config.env)
    return backend is not None and backend.lends


def _loaded(name: str) -> Backend:
    if isinstance(engine := _engines().get(name), Backend):
        return engine
    if told := engine or lacking(f"env.backend={name}"):
        raise ConfigError(told)
    group = plugins.INTEGRATIONS
    if name in plugins.names(group) and isinstance(plugins.load(group, name), Backend):
        return _checked(group, name)
    known = backends()
    raise ConfigError(f"env.backend={name}: not one of {', '.join(known)}{plugins.hint(name, known)}")


def _checked(group: str, name: str) -> Backend:
    """What a name stands for. Raises ConfigError: it cannot be loaded, or is not what a backend has to be."""
    found = plugins.load(group, name)
    if not isinstance(found, Backend):
        raise plugins.fault(group, name, f"is no fasttrain.spec.backends.Backend but {found!r:.80}")
    if found.name != name:
        raise plugins.fault(group, name, f"calls itself {found.name!r}: its entry point must have the same name")
    try:
        if found.settings:
            to_dict(usual := found.settings())
            defaults_of(make_dataclass("parts", [(name, found.settings, usual)]))
        if found.conf and not Path(found.conf).is_dir():
            raise NotADirectoryError(found.conf)
    except Exception as error:  # whatever a class raises that is no frozen dataclass with plain defaults
        told = f"{type(error).__name__}: {error}"
        raise plugins.fault(group, name, f"has settings or files that are not as they must be: {told}") from error
    return found


@functools.cache  # the configuration is declared with those that are there then
def _engines() -> dict[str, Backend | str]:
    """The engines that packages offer; in place of one that is left out, why."""
    return {name: _engine(name) for name in plugins.names(plugins.ENGINES)}


def _engine(name: str) -> Backend | str:
    try:
        return _checked(plugins.ENGINES, name)
    except ConfigError as error:
        return str(error)


def engines() -> list[Backend]:
    """The engines that are installed."""
    return [one for one in _engines().values() if isinstance(one, Backend)]


def left_out() -> str:
    """Text for messages: which installed engines cannot be used, and why. Their YAML files are not found either."""
    return "".join(f"; {one}" for one in _engines().values() if isinstance(one, str))


def backends() -> list[str]:
    """What `env.backend` may be; imports all integrations."""
    others = [*engines(), *plugins.loaded(plugins.INTEGRATIONS).values()]
    return [SINGLE, VECTOR, *(one.name for one in others if isinstance(one, Backend))]


def lacking(typed: str) -> str:
    """Why the engine that something belongs to is not there; empty where it is, or for what belongs to none."""
    if isinstance(why := _engines().get(typed), str):
        return why
    if typed not in ENGINES or DAEMONS in _engines():
        return ""
    again = plugins.outdated() or "; install fasttrain again"
    return f"{typed} plays with external engines, which this installation of fasttrain is without{again}"


def played(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's plain values without the settings of engines that the run does not use, so that plan.json can
    be read where these engines are not installed. Older runs stored the settings of all engines."""
    env = values.get("env")
    others = {DAEMONS, *(one.name for one in engines())} - {env.get("backend") if isinstance(env, Mapping) else None}
    return {key: value for key, value in values.items() if key not in others}


def with_parts(config: type[C]) -> type[C]:
    """The configuration's class with the settings of the engines that are installed."""
    for name in {*RESERVED, *(one.name for one in fields(config))} & _engines().keys():  # type: ignore[arg-type]
        told = plugins.fault(plugins.ENGINES, name, "has a name that means something else in a configuration")
        _engines()[name] = str(told)
    parts = [(one.name, one.settings, one.settings()) for one in engines() if one.settings]
    namespace = {"__module__": config.__module__, "__doc__": config.__doc__}
    return make_dataclass(
        config.__name__, parts, bases=(config,), namespace=namespace, frozen=True, kw_only=True, slots=True
    )  # fmt: skip


def check_backend(config: Config) -> None:
    """Check the settings of the chosen one. Raises ConfigError: it refuses some, or those of others are typed."""
    for one in engines():
        if one.settings is None or one.name == config.env.backend:
            continue
        usual, own = one.settings(), one.own(config)
        for part in fields(usual):
            if getattr(own, part.name) != getattr(usual, part.name):
                key = f"{one.name}.{part.name}"
                raise ConfigError(f"{key} is for games with external engines: use env.backend={one.name}")
    if (chosen := backend_of(config.env)) is not None:
        chosen.check(config)
