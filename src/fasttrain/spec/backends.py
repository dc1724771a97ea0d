"""Backends: `env.backend=NAME` chooses how the envs are stepped. A package has a `Backend` as entry point.

    [project.entry-points."fasttrain.engines"]  # or "fasttrain.integrations", for adapters to libraries
    my_engine = "my_package.backend:BACKEND"

A backend answers questions of the checks and the plan, and builds the vectorized env. An engine also declares settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from fasttrain.errors import ConfigError
from fasttrain.spec import plugins

SINGLE, VECTOR = "gymnasium", "vector"  # fasttrain's own backends: single envs, and a VectorEnv
Config: TypeAlias = Any  # the class in `spec.config`; Any, because `spec.config` imports this module
EnvConfig: TypeAlias = Any  # the type of `Config.env`
ADAPTERS = "fasttrain_integrations."


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


class Backend(plugins.Part):
    """Base of backends. A subclass or an instance overrides the parts that differ."""

    offered_as = (plugins.ENGINES, plugins.INTEGRATIONS)  # by its `name`, which is also that of its group of settings
    vec_env: str = "vector"  # vec_env in the plan; native: all envs step at once, daemons: each at its own pace
    why: str = "a VectorEnv steps all envs"  # reason in the plan
    what: str = ""  # says who steps the envs, in messages about a setting in `refuses`
    instead: str = "env.backend=gymnasium"  # what messages suggest in place of this backend
    refuses: tuple[str, ...] = ("max_episode_steps",)  # keys below `env.` that have no effect with this backend
    masked: bool = True  # whether the envs can have action masks
    lends: bool = False  # builds an `ExternalVecEnv`, whose games are also used by evaluations and the checkup

    def added(self) -> list[tuple[str, Any, Any]]:
        return [] if self.settings is None else [(self.name, self.settings, self.settings())]

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
    if engine := next((one for one in plugins.parts(plugins.ENGINES) if one.name == name), None):
        return engine  # type: ignore[no-any-return]
    if message := plugins.missing_text(f"env.backend={name}") or plugins.missing_text(name):
        raise ConfigError(message)
    group = plugins.INTEGRATIONS
    if name in plugins.names(group) and isinstance(plugins.load(group, name), Backend):
        return plugins.checked(group, name)  # type: ignore[no-any-return]
    known = backends()
    raise ConfigError(f"env.backend={name}: not one of {', '.join(known)}{plugins.hint(name, known)}")


def backends() -> list[str]:
    """All values of `env.backend`. Imports all integrations."""
    others = [*plugins.parts(plugins.ENGINES), *plugins.load_all(plugins.INTEGRATIONS).values()]
    return [SINGLE, VECTOR, *(one.name for one in others if isinstance(one, Backend))]


def check_parts(config: Config) -> None:
    """Raises ConfigError if a part or the chosen backend refuses a setting, or another engine's setting was changed."""
    for rule in (rule for part in plugins.parts(*plugins.PARTS) for rule in part.rules):
        rule(config)
    for one in plugins.parts(plugins.ENGINES):
        if one.settings is None or one.name == config.env.backend:
            continue
        usual, own = one.settings(), getattr(config, one.name)
        for each in fields(usual):
            if getattr(own, each.name) != getattr(usual, each.name):
                key = f"{one.name}.{each.name}"
                raise ConfigError(f"{key} is for games with external engines: use env.backend={one.name}")
    if (chosen := backend_of(config.env)) is not None:
        chosen.check(config)
