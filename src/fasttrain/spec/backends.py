"""Backends: `env.backend=NAME` chooses how the envs are stepped. A package has a `Backend` as entry point.

    [project.entry-points."fasttrain.engines"]  # or "fasttrain.integrations", for adapters to libraries
    my_engine = "my_package.backend:BACKEND"

A backend answers questions of the checks and the plan, and builds the vectorized env. The module of an engine is
imported while the configuration is declared, because it declares settings. At its top this engine module may import
`fasttrain.errors`, `fasttrain.spec.setting` and `fasttrain.spec.backends`; all else of fasttrain only inside methods.
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

SINGLE, VECTOR = "gymnasium", "vector"  # fasttrain's own backends: single envs, and a VectorEnv
DAEMONS = "daemons"  # the engine in fasttrain's own wheel
ENGINES = (f"env.backend={DAEMONS}", "env=go", "env=showdown", DAEMONS)  # overrides and keys that need DAEMONS
RESERVED = (SINGLE, VECTOR, "profile", "tuned", "hydra")  # names that an engine cannot have
Config: TypeAlias = Any  # the class in `spec.config`; Any, because `spec.config` imports this module
EnvConfig: TypeAlias = Any  # the type of `Config.env`
ADAPTERS = "fasttrain_integrations."
C = TypeVar("C")


def option_of(env_id: object, entry_point: object, kwargs: Mapping[str, Any]) -> str:
    """The env as messages name it: the option that the user typed."""
    if env_id is None and str(entry_point).startswith(ADAPTERS):
        env_id = kwargs.get("game")
    return f"env.entry_point={entry_point}" if env_id is None else f"env.id={env_id}"


def name_of_env(env_id: object, entry_point: object, kwargs: object = None) -> str:
    """A short name: `ALE-Pong-v5` for ALE/Pong-v5, `My` for my.envs:My, `go` for an engine's class Go."""
    if str(entry_point).startswith(ADAPTERS) and isinstance(kwargs, Mapping):
        entry_point = kwargs.get("game", entry_point)
    text = str(env_id or entry_point or "env")
    own = re.match(rf"(?:{'|'.join(plugins.OURS)})[/.](?:.*:)?(\w+)", text)
    return own[1].lower() if own else re.sub(r"[^\w.-]+", "-", text.rpartition(":")[2])


class Backend:
    """Base of backends. A subclass or an instance overrides the parts that differ."""

    name: str = ""  # name of the entry point and of the group of settings
    vec_env: str = "vector"  # vec_env in the plan; native: all envs step at once, daemons: each at its own pace
    why: str = "a VectorEnv steps all envs"  # reason in the plan
    what: str = ""  # says who steps the envs, in messages about a setting in `refuses`
    instead: str = "env.backend=gymnasium"  # what messages suggest in place of this backend
    refuses: tuple[str, ...] = ("max_episode_steps",)  # keys below `env.` that have no effect with this backend
    masked: bool = True  # whether the envs can have action masks
    lends: bool = False  # builds an `ExternalVecEnv`, whose games are also used by evaluations and the checkup
    settings: type | None = None  # only engines: a frozen dataclass of `setting(…)` fields with defaults
    conf: Path | None = None  # only engines: a folder of YAML files, for example env/my_game.yaml

    def adapted(self, env: EnvConfig) -> EnvConfig:
        """An adapter returns `env` rewritten for the backend that steps the envs; others return `env` itself."""
        return env

    def check(self, config: Config) -> None:
        """Check the settings of this backend. Called if it is the chosen backend.

        Raises ConfigError, with a message that names the key and what to do.
        """

    def option(self, env: EnvConfig) -> str:
        """The env as messages name it."""
        return str(env.option)

    def build(self, config: Config, num_envs: int, folder: Path | None) -> Any:
        """Build the vectorized env, a `SlotVecEnv`. `folder`: for its logs; None outside of a training.

        Raises FastTrainError if the env cannot be built.
        """
        raise ConfigError(f"env.backend={self.name}: {type(self).__qualname__} has no method build")

    def workers(self, config: Config, requested: int | str, num_envs: int, cores: int) -> tuple[int, str]:
        """With vec_env=daemons: the number of processes, and the reason."""
        return 1, ""

    def evaluations(self, config: Config, guests: int, cores: int) -> str:
        """With `lends`: what happens to the training's games while an evaluation plays `guests` games."""
        return ""

    def own(self, config: Config) -> Any:
        return getattr(config, self.name)


class _Vector(Backend):
    name, what, instead = VECTOR, "a VectorEnv, which steps all envs itself", "env.backend=gymnasium with vec_env=auto"

    def option(self, env: EnvConfig) -> str:
        return f"the VectorEnv of {env.option}" if env.id else env.option


OF_VECTORS = _Vector()


def backend_of(env: EnvConfig) -> Backend | None:
    """The backend that `env.backend` names; None for single envs. Raises ConfigError if a backend cannot be loaded."""
    return None if env.backend == SINGLE else OF_VECTORS if env.backend == VECTOR else _loaded(env.backend)


def lends_games(config: Config) -> bool:
    """Whether evaluations play games of the training's vectorized env."""
    backend = backend_of(config.env)
    return backend is not None and backend.lends


def _loaded(name: str) -> Backend:
    if isinstance(engine := _engines().get(name), Backend):
        return engine
    if message := engine or missing_engine_text(f"env.backend={name}"):
        raise ConfigError(message)
    group = plugins.INTEGRATIONS
    if name in plugins.names(group) and isinstance(plugins.load(group, name), Backend):
        return _checked(group, name)
    known = backends()
    raise ConfigError(f"env.backend={name}: not one of {', '.join(known)}{plugins.hint(name, known)}")


def _checked(group: str, name: str) -> Backend:
    """Load a backend and check it. Raises ConfigError if loading fails, or the backend breaks a rule."""
    backend = plugins.load(group, name)
    if not isinstance(backend, Backend):
        raise plugins.plugin_error(group, name, f"is no fasttrain.spec.backends.Backend but {backend!r:.80}")
    if backend.name != name:
        what = f"has the name {backend.name!r}: its entry point must have the same name"
        raise plugins.plugin_error(group, name, what)
    try:
        if backend.settings:
            to_dict(usual := backend.settings())
            defaults_of(make_dataclass("parts", [(name, backend.settings, usual)]))
        if backend.conf and not Path(backend.conf).is_dir():
            raise NotADirectoryError(backend.conf)
    except Exception as error:  # a wrong class of settings may raise anything
        what = f"has wrong settings or files: {type(error).__name__}: {error}"
        raise plugins.plugin_error(group, name, what) from error
    return backend


@functools.cache
def _engines() -> dict[str, Backend | str]:
    """Installed engines by name. For an engine that cannot be used, the value is the error message."""
    return {name: _engine(name) for name in plugins.names(plugins.ENGINES)}


def _engine(name: str) -> Backend | str:
    try:
        return _checked(plugins.ENGINES, name)
    except ConfigError as error:
        return str(error)


def engines() -> list[Backend]:
    return [one for one in _engines().values() if isinstance(one, Backend)]


def broken_engines_text() -> str:
    """Why installed engines cannot be used, for a message about a missing YAML file, which may be an engine's."""
    return "".join(f"; {one}" for one in _engines().values() if isinstance(one, str))


def backends() -> list[str]:
    """All values of `env.backend`. Imports all integrations."""
    others = [*engines(), *plugins.load_all(plugins.INTEGRATIONS).values()]
    return [SINGLE, VECTOR, *(one.name for one in others if isinstance(one, Backend))]


def missing_engine_text(typed: str) -> str:
    """The message if the engine for a typed key or override is not installed or is broken; else empty."""
    if isinstance(error := _engines().get(typed), str):
        return error
    if typed not in ENGINES or DAEMONS in _engines():
        return ""
    again = plugins.outdated_metadata_hint() or "; install fasttrain again"
    return f"{typed} plays with external engines, which this installation of fasttrain lacks{again}"


def without_unused_engines(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's plain values without the settings of engines that the run does not use.

    So plan.json can be read on machines without these engines.
    """
    env = values.get("env")
    others = {DAEMONS, *(one.name for one in engines())} - {env.get("backend") if isinstance(env, Mapping) else None}
    return {key: value for key, value in values.items() if key not in others}


def with_parts(config: type[C]) -> type[C]:
    """The configuration's class with the settings of the installed engines."""
    for name in {*RESERVED, *(one.name for one in fields(config))} & _engines().keys():  # type: ignore[arg-type]
        error = plugins.plugin_error(plugins.ENGINES, name, "has a name that means something else in a configuration")
        _engines()[name] = str(error)
    parts = [(one.name, one.settings, one.settings()) for one in engines() if one.settings]
    made = make_dataclass(config.__name__, parts, bases=(config,), frozen=True, kw_only=True, slots=True)
    made.__module__, made.__doc__ = config.__module__, config.__doc__  # pickle finds the class by its module
    return made


def check_backend(config: Config) -> None:
    """Raises ConfigError if the chosen backend refuses a setting, or a setting of another engine was changed."""
    for one in engines():
        if one.settings is None or one.name == config.env.backend:
            continue
        usual, own = one.settings(), getattr(config, one.name)
        for part in fields(usual):
            if getattr(own, part.name) != getattr(usual, part.name):
                key = f"{one.name}.{part.name}"
                raise ConfigError(f"{key} is for games with external engines: use env.backend={one.name}")
    if (chosen := backend_of(config.env)) is not None:
        chosen.check(config)
